//! The test's side of a simulated device: work on its streams, captures, other tenants, scripted
//! failures and addresses, and counts.

use super::{CallCounts, SimDriver};
use crate::driver::script::FailWhen;
use crate::driver::{Call, Fault, NodeId, StreamId};

impl SimDriver {
    // ---- work on streams ----

    /// From now on, a wait for the device finishes no work. A replay uses this: in a replay, work
    /// finishes when the trace says so, and PyTorch waited for fewer streams than a wait for the
    /// device does.
    pub fn work_outlasts_waits(&self) {
        self.state().streams.set_outlasts_waits();
    }

    /// Queues work on `stream`. The work stays unfinished until another call finishes it. Returns
    /// its number on the stream, from 1. On a stream that is being captured, the work becomes a
    /// node of the graph and never runs.
    pub fn launch(&self, stream: StreamId) -> u64 {
        let mut state = self.state();
        let node = NodeId(state.fresh_handle());
        state.streams.launch(stream, node)
    }

    /// Finishes all work queued on `stream`.
    pub fn finish(&self, stream: StreamId) {
        self.state().streams.finish(stream);
    }

    /// Finishes the unfinished work that was queued first, on any stream: the device makes one
    /// step. Returns false if no work is unfinished.
    pub fn finish_oldest(&self) -> bool {
        self.state().streams.finish_oldest()
    }

    /// Finishes the work on `stream` up to number `work`, as far as it was queued.
    pub fn finish_until(&self, stream: StreamId, work: u64) {
        self.state().streams.finish_until(stream, work);
    }

    /// Whether the work on `stream` up to number `work` is finished.
    #[must_use]
    pub fn is_finished(&self, stream: StreamId, work: u64) -> bool {
        self.state().streams.is_finished(stream, work)
    }

    /// Finishes all work on all streams.
    pub fn finish_all(&self) {
        self.state().streams.finish_all();
    }

    /// Destroys a stream, as the program that made it may. Work queued on the stream continues. The
    /// handle must not be used afterwards.
    pub fn destroy_stream(&self, stream: StreamId) {
        self.state().streams.destroy(stream);
    }

    /// Starts capturing `stream` into a new graph.
    pub fn begin_capture(&self, stream: StreamId) {
        let mut state = self.state();
        let id = state.fresh_handle();
        state.streams.begin_capture(stream, id);
    }

    /// Makes later work on `waiter` follow the work queued on `other`. If `other` is being captured
    /// and `waiter` is not, `waiter` joins the capture.
    pub fn wait_for(&self, waiter: StreamId, other: StreamId) {
        self.state().streams.wait_for(waiter, other);
    }

    /// Ends the capture that `stream` belongs to, on every stream that joined it.
    pub fn end_capture(&self, stream: StreamId) {
        self.state().streams.end_capture(stream);
    }

    // ---- memory ----

    /// Sets the bytes that another tenant of the device holds. Returns false, and changes nothing,
    /// if the device has less free memory than that.
    pub fn set_tenant(&self, tenant: u32, bytes: u64) -> bool {
        let mut state = self.state();
        let before = state.memory.tenant(tenant);
        if bytes > before && bytes - before > self.free_bytes(&state) {
            return false;
        }
        state.memory.set_tenant(tenant, bytes);
        true
    }

    /// Returns the bytes of the device held through this driver: plain allocations, and each page
    /// once.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.state().memory.held()
    }

    /// Returns the bytes of host memory held through this driver: each page once.
    #[must_use]
    pub fn held_host(&self) -> u64 {
        self.state().memory.held_host()
    }

    /// Returns the number of addresses that are reserved now, mapped or not.
    #[must_use]
    pub fn reserved_addresses(&self) -> u64 {
        self.state().memory.reserved_addresses()
    }

    // ---- scripts and counts ----

    /// Scripts a failure.
    pub fn fail(&self, when: FailWhen, fault: Fault) {
        self.state().script.fail(when, fault);
    }

    /// Removes all scripted failures that have not occurred yet.
    pub fn clear_failures(&self) {
        self.state().script.clear_failures();
    }

    /// Places the next [`Call::Alloc`] of exactly `bytes` bytes at `address`, if that range is
    /// clear and a real driver could return it.
    pub fn place_alloc(&self, bytes: u64, address: u64) {
        self.state().script.place_next(Call::Alloc, bytes, address);
    }

    /// Places the next [`Call::Reserve`] of any size at `address`, if that range is clear and a
    /// real driver could return it.
    pub fn place_reserve(&self, address: u64) {
        self.state().script.place_next(Call::Reserve, 0, address);
    }

    /// Removes all scripted addresses that no call has used yet.
    pub fn clear_placements(&self) {
        self.state().script.clear_places();
    }

    /// Returns the number of calls of each kind and their total price.
    #[must_use]
    pub fn counts(&self) -> CallCounts {
        self.state().counts
    }

    /// Sets all counts to zero.
    pub fn reset_counts(&self) {
        self.state().counts = CallCounts::default();
    }
}
