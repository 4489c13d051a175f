//! The library, its devices, and contexts.

use std::ffi::{c_char, c_int, c_uint};
use std::ptr::without_provenance_mut;

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use crate::out::Out;
use crate::world::{MODE, STACK, World};
use crate::{INVALID_CONTEXT, INVALID_VALUE, NO_DEVICE, driver_calls};

/// The handle of a context is this plus its device's number.
const CONTEXTS: usize = 0xc0_0000;

type Context = *mut ();

fn context(device: usize) -> Context {
    without_provenance_mut(CONTEXTS + (device + 1) * 16)
}

fn device_of(world: &World, context: Context) -> Result<Option<usize>, c_int> {
    if context.is_null() {
        return Ok(None);
    }
    let device = (0..world.devices.len()).find(|&device| self::context(device) == context);
    match device {
        Some(device) if world.devices[device].retained > 0 => Ok(Some(device)),
        _ => Err(INVALID_CONTEXT),
    }
}

fn attribute(world: &World, device: usize, attribute: c_int) -> Result<c_int, c_int> {
    /// `CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`, newer than cudarc's
    /// declarations.
    const HOST_PAGES: c_int = 141;
    const ASKED: [(Attribute, &str); 4] = [
        (Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "pages"),
        (Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "file"),
        (Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, "fabric"),
        (Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, "rdma"),
    ];
    let is = |known: Attribute| i64::from(known as u32) == i64::from(attribute);
    if is(Attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID) {
        return Ok(world.node());
    }
    let asked = match attribute {
        HOST_PAGES => Some("host"),
        _ => ASKED.iter().find(|&&(known, _)| is(known)).map(|&(_, word)| word),
    };
    asked.map(|word| c_int::from(world.supports(device, word))).ok_or(INVALID_VALUE)
}

/// Returns CUDA's name for an error code.
fn name_of(code: c_int) -> Option<&'static std::ffi::CStr> {
    Some(match code {
        0 => c"CUDA_SUCCESS",
        crate::INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        crate::OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        crate::NOT_INITIALIZED => c"CUDA_ERROR_NOT_INITIALIZED",
        crate::DEINITIALIZED => c"CUDA_ERROR_DEINITIALIZED",
        crate::NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        crate::INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        crate::INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        crate::INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        crate::NOT_READY => c"CUDA_ERROR_NOT_READY",
        crate::CONTEXT_IS_DESTROYED => c"CUDA_ERROR_CONTEXT_IS_DESTROYED",
        crate::NOT_SUPPORTED => c"CUDA_ERROR_NOT_SUPPORTED",
        crate::CAPTURE_UNSUPPORTED => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        crate::CAPTURE_IMPLICIT => c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        crate::UNKNOWN => c"CUDA_ERROR_UNKNOWN",
        _ => return None,
    })
}

fn count(number: usize) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

driver_calls! {
    fn cuInit(_flags: c_uint) |world| {
        if world.devices.is_empty() {
            return Err(NO_DEVICE);
        }
        world.calls.initialised = true;
        Ok(())
    }

    fn cuDriverGetVersion(version: Out<c_int>) |_world| { version.give(13000) }

    fn cuGetErrorName(code: c_int, text: Out<*const c_char>) |_world| {
        match name_of(code) {
            Some(name) => text.give(name.as_ptr()),
            None => text.give(std::ptr::null()).and(Err(INVALID_VALUE)),
        }
    }

    fn cuGetErrorString(code: c_int, text: Out<*const c_char>) |_world| {
        match name_of(code) {
            Some(name) => text.give(name.as_ptr()),
            None => text.give(std::ptr::null()).and(Err(INVALID_VALUE)),
        }
    }

    fn cuDeviceGetCount(devices: Out<c_int>) |world| { devices.give(count(world.devices.len())) }

    fn cuDeviceGet(device: Out<c_int>, index: c_int) |world| {
        device.give(count(world.device(index)?))
    }

    fn cuDeviceGetName(text: Out<u8>, room: c_int, device: c_int) |world| {
        let name = format!("Stand-in {}\0", world.device(device)?);
        if usize::try_from(room).is_ok_and(|room| room >= name.len()) {
            text.give_all(name.as_bytes())
        } else {
            Err(INVALID_VALUE)
        }
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) |world| {
        uuid.give(crate::nvml::uuid(world.device(device)?))
    }

    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: c_int) |world| {
        let device = world.device(device)?;
        value.give(self::attribute(world, device, attribute)?)
    }

    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, owner: c_int) |world| {
        let (device, owner) = (world.device(device)?, world.device(owner)?);
        can.give(c_int::from(world.can_reach(device, owner)))
    }

    fn cuDevicePrimaryCtxRetain(out: Out<Context>, device: c_int) |world| {
        let device = world.device(device)?;
        out.give(context(device))?;
        world.devices[device].retained += 1;
        Ok(())
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) |world| {
        let device = world.device(device)?;
        let retained = &mut world.devices[device].retained;
        *retained = retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) |world| {
        let device = world.device(device)?;
        flags.give(0)?;
        active.give(c_int::from(world.devices[device].retained > 0))
    }

    fn cuCtxGetCurrent(out: Out<Context>) |_world| {
        let current = STACK.with_borrow(|stack| stack.last().copied().flatten());
        out.give(current.map_or(std::ptr::null_mut(), context))
    }

    fn cuCtxSetCurrent(context: Context) |world| {
        let device = device_of(world, context)?;
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            stack.push(device);
        });
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: Context) |world| {
        let device = device_of(world, context)?.ok_or(INVALID_CONTEXT)?;
        STACK.with_borrow_mut(|stack| stack.push(Some(device)));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(out: Out<Context>) |_world| {
        let popped = STACK.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
        out.give_if_asked(popped.map_or(std::ptr::null_mut(), context));
        Ok(())
    }

    fn cuCtxSynchronize() |world| {
        let device = world.current_outside_capture()?;
        if !world.devices[device].capturing.is_empty() {
            return Err(crate::CAPTURE_UNSUPPORTED);
        }
        world.devices[device].sim.finish_all();
        Ok(())
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_uint>) |_world| {
        let new = mode.get()?;
        if new > 2 {
            return Err(INVALID_VALUE);
        }
        mode.give(MODE.replace(new))
    }

    fn cuStreamGetCtx(stream: *mut (), out: Out<Context>) |world| {
        let (device, _) = world.stream(stream)?;
        out.give(context(device))
    }
}
