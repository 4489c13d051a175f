//! One function for each function of the driver library, with a `must_use` result.
//!
//! All are methods of the loaded [`Api`], and each makes one call. A call is `unsafe` because it
//! leaves Rust; CUDA has no safe interface. The table in `sys.rs` ensures that the function exists
//! and has these parameters; each `SAFETY` comment justifies the arguments. Plain numbers need no
//! justification: CUDA checks sizes, addresses, device indices and flags itself.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::ptr::{null, null_mut, with_exposed_provenance_mut};

use cushion_core::StreamId;
use cushion_core::driver::{Capture, EventId, MemoryInfo, NodeId, PageHandle};

use crate::sys::{
    Api, CUdevice, CUdevice_attribute, CUgraphNode, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationProp, CUresult, CUstreamCaptureMode,
    CUstreamCaptureStatus,
};

/// The code of a failed call. It is not an enum, because newer drivers return codes that were
/// unknown when this was compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) i32);

macro_rules! codes {
    ($($name:ident = $theirs:ident;)*) => {
        impl Code {
            $(pub(crate) const $name: Self = Self(CUresult::$theirs as i32);)*
        }
    };
}

codes! {
    INVALID_VALUE = CUDA_ERROR_INVALID_VALUE;
    OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY;
    NOT_INITIALIZED = CUDA_ERROR_NOT_INITIALIZED;
    DEINITIALIZED = CUDA_ERROR_DEINITIALIZED;
    STUB_LIBRARY = CUDA_ERROR_STUB_LIBRARY;
    DEVICE_UNAVAILABLE = CUDA_ERROR_DEVICE_UNAVAILABLE;
    NO_DEVICE = CUDA_ERROR_NO_DEVICE;
    INVALID_CONTEXT = CUDA_ERROR_INVALID_CONTEXT;
    INVALID_HANDLE = CUDA_ERROR_INVALID_HANDLE;
    NOT_READY = CUDA_ERROR_NOT_READY;
    CONTEXT_IS_DESTROYED = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    NOT_PERMITTED = CUDA_ERROR_NOT_PERMITTED;
    NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED;
    SYSTEM_DRIVER_MISMATCH = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    CAPTURE_IMPLICIT = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

pub(crate) type CallResult<T> = Result<T, Code>;

/// A device attribute. It is not an enum, because drivers know more attributes than cudarc's
/// declarations of one CUDA version.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attribute(c_uint);

macro_rules! attributes {
    ($($name:ident = $theirs:ident;)*) => {
        impl Attribute {
            $(pub(crate) const $name: Self = Self(CUdevice_attribute::$theirs as c_uint);)*
        }
    };
}

attributes! {
    PAGES = CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    FILE_HANDLES = CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    FABRIC_HANDLES = CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED;
    RDMA = CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
    HOST_NODE = CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID;
}

impl Attribute {
    /// `CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`, of CUDA 12.9 and later.
    pub(crate) const HOST_PAGES: Self = Self(141);
}

/// A context, by its raw handle. Zero means no context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContextId(usize);

/// A thread's capture mode, as the number that CUDA returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mode(c_uint);

impl Mode {
    pub(crate) const RELAXED: Self =
        Self(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint);
}

fn check(code: c_int) -> CallResult<()> {
    if code == 0 { Ok(()) } else { Err(Code(code)) }
}

/// Returns a size as C's `size_t`. A size or handle that does not fit is refused, as CUDA would
/// refuse it.
fn size(bytes: u64) -> CallResult<usize> {
    usize::try_from(bytes).map_err(|_| Code::INVALID_VALUE)
}

fn pointer<T>(handle: u64) -> CallResult<*mut T> {
    size(handle).map(with_exposed_provenance_mut)
}

fn handle<T>(pointer: *const T) -> u64 {
    pointer.expose_provenance() as u64
}

fn count(number: c_int) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

// ---- the library and its devices ----

impl Api {
    pub(crate) fn init(&self) -> CallResult<()> {
        // SAFETY: no pointers; it may be called any number of times, from any thread.
        check(unsafe { (self.cuInit)(0) })
    }

    /// Returns 1000 × major + 10 × minor.
    pub(crate) fn driver_version(&self) -> CallResult<u32> {
        let mut version = 0;
        // SAFETY: `version` is writable during the call.
        check(unsafe { (self.cuDriverGetVersion)(&raw mut version) })?;
        Ok(count(version))
    }

    pub(crate) fn error_name(&self, code: Code) -> Option<String> {
        let mut text: *const c_char = null();
        // SAFETY: `text` is writable during the call. The code is passed as a number, and any value
        // is allowed.
        check(unsafe { (self.cuGetErrorName)(code.0, &raw mut text) }).ok()?;
        if text.is_null() {
            return None;
        }
        // SAFETY: on success CUDA returns a constant text that ends in a zero byte. It lives as
        // long as the library, which is never unloaded.
        let text = unsafe { CStr::from_ptr(text) };
        Some(text.to_string_lossy().into_owned())
    }

    pub(crate) fn device_count(&self) -> CallResult<u32> {
        let mut devices = 0;
        // SAFETY: `devices` is writable during the call.
        check(unsafe { (self.cuDeviceGetCount)(&raw mut devices) })?;
        Ok(count(devices))
    }

    pub(crate) fn device(&self, index: u32) -> CallResult<CUdevice> {
        let index = c_int::try_from(index).map_err(|_| Code::INVALID_VALUE)?;
        let mut device = 0;
        // SAFETY: `device` is writable during the call.
        check(unsafe { (self.cuDeviceGet)(&raw mut device, index) })?;
        Ok(device)
    }

    pub(crate) fn device_name(&self, device: CUdevice) -> CallResult<String> {
        const ROOM: c_int = 256;
        let mut text = [0_u8; ROOM as usize];
        // SAFETY: `text` is writable during the call, for the given number of bytes.
        check(unsafe { (self.cuDeviceGetName)(text.as_mut_ptr().cast(), ROOM, device) })?;
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    pub(crate) fn attribute(&self, device: CUdevice, attribute: Attribute) -> CallResult<i32> {
        let mut value = 0;
        // SAFETY: `value` is writable during the call. The attribute is passed as a number, and any
        // value is allowed.
        check(unsafe { (self.cuDeviceGetAttribute)(&raw mut value, attribute.0, device) })?;
        Ok(value)
    }

    /// Returns the UUID of the device, or of the MIG instance; it is unique across machines.
    pub(crate) fn uuid(&self, device: CUdevice) -> CallResult<[u8; 16]> {
        let mut uuid = [0; 16];
        // SAFETY: `uuid` is writable during the call, and has the size of CUDA's type, sixteen
        // characters.
        check(unsafe { (self.cuDeviceGetUuid_v2)((&raw mut uuid).cast(), device) })?;
        Ok(uuid)
    }

    /// Returns whether `device` can access memory of `owner`.
    pub(crate) fn can_reach(&self, device: CUdevice, owner: CUdevice) -> CallResult<bool> {
        let mut can = 0;
        // SAFETY: `can` is writable during the call.
        check(unsafe { (self.cuDeviceCanAccessPeer)(&raw mut can, device, owner) })?;
        Ok(can != 0)
    }

    // ---- contexts ----

    pub(crate) fn primary_retain(&self, device: CUdevice) -> CallResult<ContextId> {
        let mut context = null_mut();
        // SAFETY: `context` is writable during the call.
        check(unsafe { (self.cuDevicePrimaryCtxRetain)(&raw mut context, device) })?;
        Ok(ContextId(context.expose_provenance()))
    }

    pub(crate) fn primary_release(&self, device: CUdevice) -> CallResult<()> {
        // SAFETY: no pointers. `Primary` calls it once for each `primary_retain`, so no other user
        // of the context loses it.
        check(unsafe { (self.cuDevicePrimaryCtxRelease_v2)(device) })
    }

    pub(crate) fn primary_is_active(&self, device: CUdevice) -> CallResult<bool> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: `flags` and `active` are writable during the call.
        check(unsafe {
            (self.cuDevicePrimaryCtxGetState)(device, &raw mut flags, &raw mut active)
        })?;
        Ok(active != 0)
    }

    pub(crate) fn current(&self) -> CallResult<ContextId> {
        let mut context = null_mut();
        // SAFETY: `context` is writable during the call.
        check(unsafe { (self.cuCtxGetCurrent)(&raw mut context) })?;
        Ok(ContextId(context.expose_provenance()))
    }

    pub(crate) fn push(&self, context: ContextId) -> CallResult<()> {
        // SAFETY: a `ContextId` always comes from CUDA: a primary context that is retained
        // meanwhile, or the context of a stream that its owner keeps.
        check(unsafe { (self.cuCtxPushCurrent_v2)(with_exposed_provenance_mut(context.0)) })
    }

    pub(crate) fn pop(&self) -> CallResult<()> {
        let mut popped = null_mut();
        // SAFETY: `popped` is writable during the call.
        check(unsafe { (self.cuCtxPopCurrent_v2)(&raw mut popped) })
    }

    /// Waits for all work of the current context.
    pub(crate) fn synchronize(&self) -> CallResult<()> {
        // SAFETY: no pointers.
        check(unsafe { (self.cuCtxSynchronize)() })
    }

    /// Sets the mode of this thread and returns the previous one.
    pub(crate) fn exchange_capture_mode(&self, mode: Mode) -> CallResult<Mode> {
        let mut mode = mode.0;
        // SAFETY: `mode` is readable and writable during the call. Its value is one that CUDA
        // returned, or CUDA's own constant. It is passed as a number, which may hold any value that
        // CUDA writes.
        check(unsafe { (self.cuThreadExchangeStreamCaptureMode)((&raw mut mode).cast()) })?;
        Ok(Mode(mode))
    }

    // ---- memory ----

    pub(crate) fn memory_info(&self) -> CallResult<MemoryInfo> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: `free` and `total` are writable during the call.
        check(unsafe { (self.cuMemGetInfo_v2)(&raw mut free, &raw mut total) })?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    pub(crate) fn alloc(&self, bytes: u64) -> CallResult<u64> {
        let mut address = 0;
        // SAFETY: `address` is writable during the call.
        check(unsafe { (self.cuMemAlloc_v2)(&raw mut address, size(bytes)?) })?;
        Ok(address)
    }

    pub(crate) fn free(&self, address: u64) -> CallResult<()> {
        // SAFETY: CUDA takes an address as a number, and refuses addresses it did not hand out.
        check(unsafe { (self.cuMemFree_v2)(address) })
    }

    pub(crate) fn reserve(&self, bytes: u64, alignment: u64) -> CallResult<u64> {
        let (bytes, alignment) = (size(bytes)?, size(alignment)?);
        let mut address = 0;
        // SAFETY: `address` is writable during the call.
        check(unsafe { (self.cuMemAddressReserve)(&raw mut address, bytes, alignment, 0, 0) })?;
        Ok(address)
    }

    pub(crate) fn unreserve(&self, address: u64, bytes: u64) -> CallResult<()> {
        // SAFETY: CUDA refuses ranges it did not hand out, and ranges in use.
        check(unsafe { (self.cuMemAddressFree)(address, size(bytes)?) })
    }

    pub(crate) fn granularity(&self, properties: &CUmemAllocationProp) -> CallResult<u64> {
        let least = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut bytes = 0;
        // SAFETY: `bytes` is writable and `properties` readable during the call.
        check(unsafe {
            (self.cuMemGetAllocationGranularity)(&raw mut bytes, &raw const *properties, least)
        })?;
        Ok(bytes as u64)
    }

    pub(crate) fn create(
        &self,
        bytes: u64,
        properties: &CUmemAllocationProp,
    ) -> CallResult<PageHandle> {
        let bytes = size(bytes)?;
        let mut page = 0;
        // SAFETY: `page` is writable and `properties` readable during the call.
        check(unsafe { (self.cuMemCreate)(&raw mut page, bytes, &raw const *properties, 0) })?;
        Ok(PageHandle(page))
    }

    pub(crate) fn release(&self, page: PageHandle) -> CallResult<()> {
        // SAFETY: the driver tracks the pages it created, and calls this once for each.
        check(unsafe { (self.cuMemRelease)(page.0) })
    }

    pub(crate) fn map(&self, address: u64, bytes: u64, page: PageHandle) -> CallResult<()> {
        // SAFETY: the driver has checked that it created the page and has not released it. CUDA
        // refuses ranges that are not reserved, or are mapped.
        check(unsafe { (self.cuMemMap)(address, size(bytes)?, 0, page.0, 0) })
    }

    pub(crate) fn set_access(
        &self,
        address: u64,
        bytes: u64,
        access: &[CUmemAccessDesc],
    ) -> CallResult<()> {
        let bytes = size(bytes)?;
        // SAFETY: `access` is readable during the call, for the given number of entries. CUDA
        // refuses ranges that are not mapped.
        check(unsafe { (self.cuMemSetAccess)(address, bytes, access.as_ptr(), access.len()) })
    }

    pub(crate) fn unmap(&self, address: u64, bytes: u64) -> CallResult<()> {
        // SAFETY: CUDA refuses ranges that are not made of whole mapped pages. The contract of
        // `Driver` requires that no work uses them any more; if some does, it fails on the device
        // and touches no memory of the process.
        check(unsafe { (self.cuMemUnmap)(address, size(bytes)?) })
    }

    // ---- content of memory ----
    //
    // CUDA gives registered host memory the same kind of address as device memory, so a wrong
    // number could reach memory of the process. The caller guarantees that it does not.

    /// # Safety
    ///
    /// Device memory for all of `bytes` starts at `to`, and `bytes` does not change until the
    /// stream has finished the copy.
    pub(crate) unsafe fn copy_in(&self, to: u64, bytes: &[u8], stream: StreamId) -> CallResult<()> {
        let stream = pointer(stream.0)?;
        // SAFETY: the caller upholds this contract.
        check(unsafe {
            (self.cuMemcpyHtoDAsync_v2)(to, bytes.as_ptr().cast(), bytes.len(), stream)
        })
    }

    /// # Safety
    ///
    /// Device memory for all of `bytes` starts at `from`, and nobody uses `bytes` until the stream
    /// has finished the copy.
    pub(crate) unsafe fn copy_out(
        &self,
        from: u64,
        bytes: &mut [u8],
        stream: StreamId,
    ) -> CallResult<()> {
        let (to, stream) = (bytes.as_mut_ptr().cast(), pointer(stream.0)?);
        // SAFETY: the caller upholds this contract.
        check(unsafe { (self.cuMemcpyDtoHAsync_v2)(to, from, bytes.len(), stream) })
    }

    /// # Safety
    ///
    /// Device memory of `bytes` bytes starts at both addresses.
    pub(crate) unsafe fn copy(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        stream: StreamId,
    ) -> CallResult<()> {
        // SAFETY: the caller upholds this contract.
        check(unsafe { (self.cuMemcpyDtoDAsync_v2)(to, from, bytes, pointer(stream.0)?) })
    }

    /// # Safety
    ///
    /// Device memory of `bytes` bytes starts at `to`.
    pub(crate) unsafe fn fill(
        &self,
        to: u64,
        bytes: usize,
        value: u8,
        stream: StreamId,
    ) -> CallResult<()> {
        // SAFETY: the caller upholds this contract.
        check(unsafe { (self.cuMemsetD8Async)(to, value, bytes, pointer(stream.0)?) })
    }

    // ---- events and streams ----
    //
    // CUDA takes events as pointers and need not check them: the driver passes only events that it
    // created and has not destroyed. Streams and nodes belong to the program, and nothing can tell
    // a valid one from an invalid one; the contract of `Driver` requires handles that CUDA
    // returned. For a stream that was destroyed since, CUDA may return an error.

    pub(crate) fn event_create(&self) -> CallResult<EventId> {
        let flags = crate::sys::EVENT_DISABLE_TIMING;
        let mut event = null_mut();
        // SAFETY: `event` is writable during the call.
        check(unsafe { (self.cuEventCreate)(&raw mut event, flags) })?;
        Ok(EventId(handle(event)))
    }

    pub(crate) fn event_destroy(&self, event: EventId) -> CallResult<()> {
        // SAFETY: a live event, as stated above; the driver removes it from its list first.
        check(unsafe { (self.cuEventDestroy_v2)(pointer(event.0)?) })
    }

    pub(crate) fn event_record(&self, event: EventId, stream: StreamId) -> CallResult<()> {
        let (event, stream) = (pointer(event.0)?, pointer(stream.0)?);
        // SAFETY: a live event and a stream of the program, as stated above.
        check(unsafe { (self.cuEventRecord)(event, stream) })
    }

    pub(crate) fn event_query(&self, event: EventId) -> CallResult<bool> {
        // SAFETY: a live event, as stated above.
        match check(unsafe { (self.cuEventQuery)(pointer(event.0)?) }) {
            Ok(()) => Ok(true),
            Err(Code::NOT_READY) => Ok(false),
            Err(code) => Err(code),
        }
    }

    pub(crate) fn event_synchronize(&self, event: EventId) -> CallResult<()> {
        // SAFETY: a live event, as stated above.
        check(unsafe { (self.cuEventSynchronize)(pointer(event.0)?) })
    }

    pub(crate) fn stream_create(&self) -> CallResult<StreamId> {
        let flags = crate::sys::STREAM_NON_BLOCKING;
        let mut stream = null_mut();
        // SAFETY: `stream` is writable during the call.
        check(unsafe { (self.cuStreamCreate)(&raw mut stream, flags) })?;
        Ok(StreamId(handle(stream)))
    }

    /// # Safety
    ///
    /// [`stream_create`](Self::stream_create) made the stream, and it is not used any more.
    pub(crate) unsafe fn stream_destroy(&self, stream: StreamId) -> CallResult<()> {
        // SAFETY: the caller guarantees a live stream.
        check(unsafe { (self.cuStreamDestroy_v2)(pointer(stream.0)?) })
    }

    pub(crate) fn stream_synchronize(&self, stream: StreamId) -> CallResult<()> {
        // SAFETY: a stream of the program, as stated above.
        check(unsafe { (self.cuStreamSynchronize)(pointer(stream.0)?) })
    }

    pub(crate) fn stream_context(&self, stream: StreamId) -> CallResult<ContextId> {
        let stream = pointer(stream.0)?;
        let mut context = null_mut();
        // SAFETY: a stream of the program, as stated above; `context` is writable during the call.
        check(unsafe { (self.cuStreamGetCtx)(stream, &raw mut context) })?;
        Ok(ContextId(context.expose_provenance()))
    }

    pub(crate) fn capture(&self, stream: StreamId) -> CallResult<Option<Capture>> {
        const NONE: c_uint = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_uint;
        const ACTIVE: c_uint = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as c_uint;
        let stream = pointer(stream.0)?;
        let (mut status, mut id, mut length) = (NONE, 0, 0);
        let mut nodes: *const CUgraphNode = null();
        // SAFETY: a stream of the program, as stated above. `status`, `id`, `nodes` and `length`
        // are writable during the call; the status is passed as a number, which may hold any value.
        // A null pointer says that the graph is not wanted.
        let answer = check(unsafe {
            (self.cuStreamGetCaptureInfo_v2)(
                stream,
                (&raw mut status).cast(),
                &raw mut id,
                null_mut(),
                &raw mut nodes,
                &raw mut length,
            )
        });
        match answer {
            Ok(()) if status == NONE => return Ok(None),
            Ok(()) => {}
            // This is the default stream, while a stream that waits for it is captured. Nothing may
            // be done on it now, and CUDA does not say which capture it is.
            Err(Code::CAPTURE_IMPLICIT) => return Ok(Some(Capture { id: 0, terminals: vec![] })),
            Err(code) => return Err(code),
        }
        // An invalidated capture has no nodes, and lasts until the program ends it.
        if status != ACTIVE || nodes.is_null() {
            return Ok(Some(Capture { id, terminals: vec![] }));
        }
        // SAFETY: for an active capture CUDA returns the address and number of the nodes. The array
        // belongs to CUDA, and is unchanged until the program's next call on this stream.
        let nodes = unsafe { std::slice::from_raw_parts(nodes, length) };
        let terminals = nodes.iter().map(|&node| NodeId(handle(node))).collect();
        Ok(Some(Capture { id, terminals }))
    }

    pub(crate) fn dependencies(&self, node: NodeId) -> CallResult<Vec<NodeId>> {
        let node: CUgraphNode = pointer(node.0)?;
        let mut length = 0;
        // SAFETY: a node of the program, as stated above. `length` is writable during the call; a
        // null array requests only the number.
        check(unsafe { (self.cuGraphNodeGetDependencies)(node, null_mut(), &raw mut length) })?;
        if length == 0 {
            return Ok(vec![]);
        }
        let mut nodes: Vec<CUgraphNode> = vec![null_mut(); length];
        // SAFETY: as before; `nodes` is writable for `length` entries. CUDA writes the number of
        // entries it filled.
        check(unsafe {
            (self.cuGraphNodeGetDependencies)(node, nodes.as_mut_ptr(), &raw mut length)
        })?;
        nodes.truncate(length);
        Ok(nodes.into_iter().map(|node| NodeId(handle(node))).collect())
    }
}
