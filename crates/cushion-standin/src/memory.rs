//! Memory: plain allocations, address ranges and pages.

use std::ffi::{c_int, c_uint, c_ulonglong};

use cudarc::driver::sys::{CUmemAccessDesc, CUmemAllocationProp, CUmemLocationType as Location};
use cushion_core::Driver;
use cushion_core::driver::PageHandle;

use crate::out::{In, Out};
use crate::world::{PageKind, World, code_of, tagged};
use crate::{INVALID_VALUE, NOT_SUPPORTED, driver_calls};

/// Returns the device and the kind of a requested page. A page in host memory belongs to the
/// current device.
fn page_asked(world: &World, properties: &CUmemAllocationProp) -> Result<(usize, PageKind), c_int> {
    let id = properties.location.id;
    let (device, node) = match properties.location.type_ {
        Location::CU_MEM_LOCATION_TYPE_DEVICE => (world.device(id)?, None),
        Location::CU_MEM_LOCATION_TYPE_HOST_NUMA if id >= 0 => (world.current()?, Some(id)),
        _ => return Err(INVALID_VALUE),
    };
    let supports = |what| world.supports(device, what);
    if !supports("pages") || (node.is_some() && !supports("host")) {
        return Err(NOT_SUPPORTED);
    }
    let handles = properties.requestedHandleTypes.0;
    let rdma = properties.allocFlags.gpuDirectRDMACapable != 0;
    let (refused_handles, refused_rdma, code) = world.pages.refused;
    if handles & refused_handles != 0 || (rdma && refused_rdma) {
        return Err(code);
    }
    Ok((device, PageKind { handles, rdma, node }))
}

fn size(bytes: usize) -> u64 {
    bytes as u64
}

driver_calls! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) |world| {
        let device = world.current()?;
        let info = code_of(world.devices[device].sim.memory_info())?;
        free.give(usize::try_from(info.free).map_err(|_| INVALID_VALUE)?)?;
        total.give(usize::try_from(info.total).map_err(|_| INVALID_VALUE)?)
    }

    fn cuMemAlloc_v2(out: Out<u64>, bytes: usize) |world| {
        let device = world.current_outside_capture()?;
        if out.is_null() {
            return Err(INVALID_VALUE);
        }
        let bytes = size(bytes);
        let place = world.fresh_address(bytes);
        let sim = &world.devices[device].sim;
        sim.place_alloc(bytes, place);
        let address = sim.alloc(bytes);
        sim.clear_placements();
        let address = code_of(address)?;
        world.owners.insert(address, (bytes, device));
        out.give(address)
    }

    fn cuMemFree_v2(address: u64) |world| {
        world.current_outside_capture()?;
        let device = world.owner(address).ok_or(INVALID_VALUE)?;
        code_of(world.devices[device].sim.free(address))?;
        world.owners.remove(&address);
        Ok(())
    }

    fn cuMemAddressReserve(
        out: Out<u64>,
        bytes: usize,
        alignment: usize,
        _wish: u64,
        flags: c_ulonglong,
    ) |world| {
        let device = world.current_for_pages()?;
        if out.is_null() || flags != 0 || !(alignment == 0 || alignment.is_power_of_two()) {
            return Err(INVALID_VALUE);
        }
        let bytes = size(bytes);
        let place = world.fresh_address(bytes);
        let sim = &world.devices[device].sim;
        sim.place_reserve(place);
        let address = sim.reserve(bytes);
        sim.clear_placements();
        let address = code_of(address)?;
        world.owners.insert(address, (bytes, device));
        out.give(address)
    }

    fn cuMemAddressFree(address: u64, bytes: usize) |world| {
        let device = world.owner(address).ok_or(INVALID_VALUE)?;
        code_of(world.expect_current(device)?.unreserve(address, size(bytes)))?;
        world.owners.remove(&address);
        Ok(())
    }

    fn cuMemGetAllocationGranularity(
        out: Out<usize>,
        properties: In<CUmemAllocationProp>,
        _option: c_uint,
    ) |world| {
        let (device, ..) = page_asked(world, &properties.get()?)?;
        let granularity = world.devices[device].sim.properties().granularity;
        out.give(usize::try_from(granularity).map_err(|_| INVALID_VALUE)?)
    }

    fn cuMemCreate(
        out: Out<u64>,
        bytes: usize,
        properties: In<CUmemAllocationProp>,
        flags: c_ulonglong,
    ) |world| {
        let (device, kind) = page_asked(world, &properties.get()?)?;
        if out.is_null() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let sim = world.expect_current(device)?;
        let bytes = size(bytes);
        let page = if kind.node.is_some() { sim.create_host(bytes) } else { sim.create(bytes) };
        let page = tagged(device, code_of(page)?.0);
        world.pages.kinds.insert(page, kind);
        out.give(page)
    }

    fn cuMemRelease(page: u64) |world| {
        let (device, number) = world.untag(page)?;
        code_of(world.expect_current(device)?.release(PageHandle(number)))?;
        world.pages.kinds.remove(&page);
        Ok(())
    }

    fn cuMemMap(address: u64, bytes: usize, offset: usize, page: u64, flags: c_ulonglong) |world| {
        let (device, number) = world.untag(page)?;
        if offset != 0 || flags != 0 {
            return Err(NOT_SUPPORTED);
        }
        code_of(world.expect_current(device)?.map(address, size(bytes), PageHandle(number)))
    }

    fn cuMemSetAccess(
        address: u64,
        bytes: usize,
        access: In<CUmemAccessDesc>,
        count: usize,
    ) |world| {
        let device = world.owner(address).ok_or(INVALID_VALUE)?;
        let mut granted = 0;
        for access in access.get_all(count)? {
            if access.location.type_ != Location::CU_MEM_LOCATION_TYPE_DEVICE {
                return Err(INVALID_VALUE);
            }
            let reader = world.device(access.location.id)?;
            if reader != device && !world.can_reach(reader, device) {
                return Err(INVALID_VALUE);
            }
            granted |= 1 << reader;
        }
        code_of(world.expect_current(device)?.set_access(address, size(bytes)))?;
        world.devices[device].access.insert(address, (size(bytes), granted));
        Ok(())
    }

    fn cuMemUnmap(address: u64, bytes: usize) |world| {
        let device = world.owner(address).ok_or(INVALID_VALUE)?;
        let bytes = size(bytes);
        code_of(world.expect_current(device)?.unmap(address, bytes))?;
        let access = &mut world.devices[device].access;
        access.retain(|&start, _| start < address || start - address >= bytes);
        Ok(())
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: In<u8>, bytes: usize, stream: *mut ()) |world| {
        world.reach(to, bytes, stream)?;
        world.memory.write(to, &from.get_all(bytes)?);
        Ok(())
    }

    fn cuMemcpyDtoHAsync_v2(to: Out<u8>, from: u64, bytes: usize, stream: *mut ()) |world| {
        world.reach(from, bytes, stream)?;
        let mut found = vec![0; bytes];
        world.memory.read(from, &mut found);
        to.give_all(&found)
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: *mut ()) |world| {
        world.reach(from, bytes, stream)?;
        world.reach(to, bytes, stream)?;
        world.memory.copy(from, to, bytes);
        Ok(())
    }

    fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: *mut ()) |world| {
        world.reach(to, bytes, stream)?;
        world.memory.fill(to, bytes, value);
        Ok(())
    }

    fn cuDeviceTotalMem_v2(out: Out<usize>, device: c_int) |world| {
        let device = world.device(device)?;
        let total = world.devices[device].sim.properties().total;
        out.give(usize::try_from(total).map_err(|_| INVALID_VALUE)?)
    }
}
