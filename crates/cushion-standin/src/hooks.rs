//! Functions with which a test controls and queries the stand-in; CUDA does not have them. They are
//! not counted and do not fail. Unknown devices are ignored.

use std::ffi::{c_char, c_int, c_uint};

use cushion_core::StreamId;

use crate::gate;
use crate::out::In;
use crate::world::{Device, world};

fn on(device: c_int, act: impl FnOnce(&mut Device)) {
    let mut world = world();
    if let Ok(device) = world.device(device) {
        act(&mut world.devices[device]);
    }
}

// ---- calls ----

/// Returns how often a function was called, failures included; for null, the total of all
/// functions.
///
/// # Safety
///
/// `name` is null or a text that ends in a zero byte.
#[unsafe(no_mangle)]
unsafe extern "C" fn standin_calls(name: In<c_char>) -> u64 {
    let world = world();
    match name.text() {
        Some(name) => world.calls.counts.get(name.as_str()).copied().unwrap_or(0),
        None => world.calls.counts.values().sum(),
    }
}

/// Resets all counts to zero.
#[unsafe(no_mangle)]
extern "C" fn standin_reset_calls() {
    world().calls.counts.clear();
}

/// Makes the `nth` call from now, of any function, fail with this code and do nothing. Zero stops
/// it.
#[unsafe(no_mangle)]
extern "C" fn standin_fail(nth: u64, code: c_int) {
    world().calls.failure = (nth > 0).then_some((nth, code));
}

/// Makes every call return that CUDA has shut down, as at the end of a process.
#[unsafe(no_mangle)]
extern "C" fn standin_shut_down() {
    world().calls.shut_down = true;
}

/// Blocks calls of this function from now on. The next call of this hook releases them; null blocks
/// none.
///
/// # Safety
///
/// `name` is null or a text that ends in a zero byte.
#[unsafe(no_mangle)]
unsafe extern "C" fn standin_block(name: In<c_char>) {
    gate::close(name.text());
}

/// Returns once a call waits because of `standin_block`.
#[unsafe(no_mangle)]
extern "C" fn standin_await_blocked() {
    gate::await_waiting();
}

// ---- contexts and memory ----

/// Returns the devices that have a context: bit n is device n.
#[unsafe(no_mangle)]
extern "C" fn standin_contexts() -> u64 {
    let world = world();
    let held = (0..).zip(&world.devices).filter(|(_, device)| device.retained > 0);
    held.map(|(index, _)| 1_u64 << index).sum()
}

/// Returns the devices that have access to a mapped address: bit n is device n.
#[unsafe(no_mangle)]
extern "C" fn standin_access(address: u64) -> u64 {
    let world = world();
    let Some(device) = world.owner(address) else { return 0 };
    let last = world.devices[device].access.range(..=address).next_back();
    last.map_or(0, |(&start, &(bytes, granted))| if address - start < bytes { granted } else { 0 })
}

/// Returns the bytes held on a device.
#[unsafe(no_mangle)]
extern "C" fn standin_held(device: c_int) -> u64 {
    let mut held = 0;
    on(device, |device| held = device.sim.held());
    held
}

/// Returns the bytes of host memory held for a device.
#[unsafe(no_mangle)]
extern "C" fn standin_held_host(device: c_int) -> u64 {
    let mut held = 0;
    on(device, |device| held = device.sim.held_host());
    held
}

/// Sets how much another program holds on a device. Returns 0 if the device has less, else 1.
#[unsafe(no_mangle)]
extern "C" fn standin_set_tenant(device: c_int, bytes: u64) -> c_int {
    let mut done = false;
    on(device, |device| done = device.sim.set_tenant(0, bytes));
    c_int::from(done)
}

/// Refuses pages with any of these handle types, or for RDMA, with this code.
#[unsafe(no_mangle)]
extern "C" fn standin_refuse_pages(handles: c_uint, rdma: c_int, code: c_int) {
    world().pages.refused = (handles, rdma != 0, code);
}

/// Returns the handle types of a page; the highest bit is RDMA. Zero also for an unknown page.
#[unsafe(no_mangle)]
extern "C" fn standin_page_kind(page: u64) -> c_uint {
    let kind = world().pages.kinds.get(&page).copied();
    kind.map_or(0, |kind| kind.handles | (c_uint::from(kind.rdma) << 31))
}

/// Returns the NUMA node of a page in host memory; -1 for other and unknown pages.
#[unsafe(no_mangle)]
extern "C" fn standin_page_node(page: u64) -> c_int {
    let kind = world().pages.kinds.get(&page).copied();
    kind.and_then(|kind| kind.node).unwrap_or(-1)
}

// ---- processes ----

/// Sets what NVML reports of another process on a device: the bytes it holds, `u64::MAX` for an
/// unknown number, or 0 to remove it. The device's memory does not change: see
/// `standin_set_tenant`.
#[unsafe(no_mangle)]
extern "C" fn standin_set_process(device: c_int, pid: c_uint, bytes: u64) {
    on(device, |device| {
        device.processes.remove(&pid);
        if bytes > 0 {
            device.processes.insert(pid, bytes);
        }
    });
}

/// Sets the ID under which NVML reports this process, as in a container; 0 for its own.
#[unsafe(no_mangle)]
extern "C" fn standin_set_own_pid(pid: c_uint) {
    world().nvml.own_pid = (pid > 0).then_some(pid);
}

/// Sets the size of NVML's entries in words of eight bytes: 2, 3 or 4. Drivers differ.
#[unsafe(no_mangle)]
extern "C" fn standin_set_entry_words(words: c_uint) {
    world().nvml.entry_words = words.clamp(2, 4);
}

/// Sets whether the devices are MIG instances, for which NVML has other names.
#[unsafe(no_mangle)]
extern "C" fn standin_set_mig(is_mig: c_int) {
    world().nvml.is_mig = is_mig != 0;
}

// ---- streams ----

/// Queues work on a stream; it stays unfinished until a test finishes it.
#[unsafe(no_mangle)]
extern "C" fn standin_launch(device: c_int, stream: u64) {
    on(device, |device| {
        device.sim.launch(StreamId(stream));
    });
}

/// Finishes all work queued on a stream.
#[unsafe(no_mangle)]
extern "C" fn standin_finish(device: c_int, stream: u64) {
    on(device, |device| device.sim.finish(StreamId(stream)));
}

/// Finishes all work of all devices.
#[unsafe(no_mangle)]
extern "C" fn standin_finish_all() {
    world().devices.iter().for_each(|device| device.sim.finish_all());
}

/// Destroys any stream, also one that was not created; its work goes on.
#[unsafe(no_mangle)]
extern "C" fn standin_destroy_stream(stream: u64) {
    let mut world = world();
    world.streams.made.remove(&stream);
    world.streams.destroyed.insert(stream);
}

/// Starts capturing a stream into a new graph.
#[unsafe(no_mangle)]
extern "C" fn standin_begin_capture(device: c_int, stream: u64) {
    on(device, |device| {
        device.sim.begin_capture(StreamId(stream));
        device.capturing.insert(stream);
    });
}

/// Makes later work on `waiter` follow that on `other`, which joins its capture.
#[unsafe(no_mangle)]
extern "C" fn standin_wait_for(device: c_int, waiter: u64, other: u64) {
    on(device, |device| {
        device.sim.wait_for(StreamId(waiter), StreamId(other));
    });
}

/// Ends the capture that began on a stream.
#[unsafe(no_mangle)]
extern "C" fn standin_end_capture(device: c_int, stream: u64) {
    on(device, |device| {
        device.sim.end_capture(StreamId(stream));
        device.capturing.remove(&stream);
    });
}

/// Sets what a stream reports about its capture: 1, that it is part of a capture it did not join
/// (`CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`); 2, that its capture was invalidated; 0, the truth.
#[unsafe(no_mangle)]
extern "C" fn standin_odd_capture(stream: u64, answer: c_int) {
    let mut world = world();
    if answer == 0 {
        world.streams.odd_captures.remove(&stream);
    } else {
        world.streams.odd_captures.insert(stream, answer);
    }
}
