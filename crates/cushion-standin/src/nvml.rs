//! NVML: the processes that hold memory of a device.
//!
//! Cushion looks a device up by UUID. PyTorch, which writes a message of its own, looks it up by
//! PCI address and uses the oldest entries. PyTorch also looks for some functions that it does not
//! call here, and aborts if they are missing.

use std::ffi::{c_char, c_int, c_uint};
use std::ptr::without_provenance_mut;

use crate::driver_calls;
use crate::out::{In, Out};
use crate::world::World;

// NVML's codes.
const UNINITIALIZED: c_int = 1;
const INVALID_ARGUMENT: c_int = 2;
const NOT_SUPPORTED: c_int = 3;
const NOT_FOUND: c_int = 6;
const INSUFFICIENT_SIZE: c_int = 7;

/// The handle of a device: [`HANDLES`] plus a multiple of its number, so that none is null.
type Handle = *mut ();
const HANDLES: usize = 0xe0_0000;

/// How the library answers.
pub(crate) struct Nvml {
    initialised: bool,
    /// The reported ID of this process, if it is not the real one.
    pub(crate) own_pid: Option<c_uint>,
    /// The size of an entry of the newest function, in words of eight bytes.
    pub(crate) entry_words: c_uint,
    pub(crate) is_mig: bool,
}

impl Default for Nvml {
    fn default() -> Self {
        Self { initialised: false, own_pid: None, entry_words: 3, is_mig: false }
    }
}

/// Returns the UUID of a device. The stand-in for CUDA's runtime returns the same.
pub(crate) fn uuid(device: usize) -> [u8; 16] {
    [u8::try_from(0xa0 + device).unwrap_or(0xff); 16]
}

fn uuid_text(world: &World, device: usize) -> String {
    let kind = if world.nvml.is_mig { "MIG" } else { "GPU" };
    let hex = uuid(device).map(|byte| format!("{byte:02x}")).concat();
    let part = |range| hex.get(range).unwrap_or_default();
    format!(
        "{kind}-{}-{}-{}-{}-{}",
        part(0..8),
        part(8..12),
        part(12..16),
        part(16..20),
        part(20..32)
    )
}

fn handle(device: usize) -> Handle {
    without_provenance_mut(HANDLES + (device + 1) * 16)
}

fn ready(world: &World) -> Result<(), c_int> {
    if world.nvml.initialised { Ok(()) } else { Err(UNINITIALIZED) }
}

/// Returns the first device for which `is` holds.
fn find(world: &World, out: &Out<Handle>, is: impl Fn(usize) -> bool) -> Result<(), c_int> {
    ready(world)?;
    let found = (0..world.devices.len()).find(|&device| is(device)).ok_or(NOT_FOUND)?;
    out.give(handle(found))
}

/// Writes one entry of `words` words for each process that has a context on a device.
fn give(
    world: &World,
    device: Handle,
    count: &Out<c_uint>,
    entries: &Out<u64>,
    words: usize,
) -> Result<(), c_int> {
    ready(world)?;
    let device = (0..world.devices.len()).find(|&index| handle(index) == device);
    let device = &world.devices[device.ok_or(INVALID_ARGUMENT)?];
    let own = (device.retained > 0).then(|| {
        let pid = world.nvml.own_pid.unwrap_or_else(std::process::id);
        (pid, device.sim.held())
    });
    let others = device.processes.iter().map(|(&pid, &bytes)| (pid, bytes));
    let all: Vec<(c_uint, u64)> = others.chain(own).collect();
    let room = count.get()?;
    count.give(c_uint::try_from(all.len()).unwrap_or(c_uint::MAX))?;
    if all.len() > usize::try_from(room).unwrap_or(0) {
        return Err(INSUFFICIENT_SIZE);
    }
    let mut written = Vec::new();
    for (pid, bytes) in all {
        // The four bytes after the ID are never written; the rest is as without MIG.
        let [a, b, c, d] = pid.to_ne_bytes();
        let first = u64::from_ne_bytes([a, b, c, d, 0x5a, 0x5a, 0x5a, 0x5a]);
        written.extend_from_slice(&[first, bytes, u64::MAX, 0][..words]);
    }
    if written.is_empty() { Ok(()) } else { entries.give_all(&written) }
}

driver_calls! {
    fn nvmlInit_v2() |world| {
        world.nvml.initialised = true;
        Ok(())
    }

    fn nvmlDeviceGetHandleByUUID(text: In<c_char>, out: Out<Handle>) |world| {
        let text = text.text().ok_or(INVALID_ARGUMENT)?;
        find(world, &out, |device| uuid_text(world, device) == text)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(
        device: Handle,
        count: Out<c_uint>,
        entries: Out<u64>,
    ) |world| {
        let words = usize::try_from(world.nvml.entry_words).unwrap_or(3);
        give(world, device, &count, &entries, words)
    }

    // ---- what PyTorch looks for ----

    fn nvmlDeviceGetHandleByPciBusId_v2(text: In<c_char>, out: Out<Handle>) |world| {
        // Domain, bus and device, as in 00000000:01:00.0; the stand-in for CUDA's runtime numbers
        // buses from 1.
        let text = text.text().ok_or(INVALID_ARGUMENT)?;
        let bus = text.split(':').nth(1).and_then(|bus| usize::from_str_radix(bus, 16).ok());
        find(world, &out, |device| bus == Some(device + 1))
    }

    fn nvmlDeviceGetComputeRunningProcesses(
        device: Handle,
        count: Out<c_uint>,
        entries: Out<u64>,
    ) |world| {
        give(world, device, &count, &entries, 2)
    }

    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) |_world| { version.give(13000) }

    fn nvmlDeviceGetNvLinkRemoteDeviceType(_device: Handle, _link: c_uint, _kind: *mut ()) |_world| {
        Err(NOT_SUPPORTED)
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(_device: Handle, _link: c_uint, _info: *mut ()) |_world| {
        Err(NOT_SUPPORTED)
    }
}
