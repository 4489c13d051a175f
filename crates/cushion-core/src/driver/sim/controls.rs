//! What a simulated device is told, and asked, by whoever runs it: work on its streams, captures, other tenants,
//! failures and places to come, and what it has counted.

use std::collections::BTreeSet;

use super::{CallCounts, SimDriver, State};
use crate::driver::script::FailWhen;
use crate::driver::{Call, Fault, NodeId, StreamId};

impl SimDriver {
    // ---- work on streams ----

    /// From now on, waiting for the device finishes no work: in a replay it is done when the trace says so. PyTorch waited
    /// for fewer streams than a wait for the device does.
    pub fn work_outlasts_waits(&self) {
        self.state().outlasts_waits = true;
    }

    /// Queues a piece of work on `stream`; it is unfinished until told otherwise. Returns its number
    /// on the stream, from 1. On a stream that is being captured the work becomes a node of the
    /// graph and never runs.
    pub fn launch(&self, stream: StreamId) -> u64 {
        let mut state = self.state();
        let node = NodeId(state.fresh_handle());
        let entry = state.streams.entry(stream).or_default();
        match &mut entry.capture {
            None => {
                entry.launched += 1;
                entry.unfinished.push_back(node.0);
            }
            Some((_, terminals)) => {
                let follows = std::mem::replace(terminals, BTreeSet::from([node]));
                state.nodes.insert(node, follows.into_iter().collect());
            }
        }
        state.streams.get(&stream).map_or(0, |stream| stream.launched)
    }

    /// Finishes all work queued on `stream`.
    pub fn finish(&self, stream: StreamId) {
        if let Some(stream) = self.state().streams.get_mut(&stream) {
            stream.finish();
        }
    }

    /// Finishes the piece of work that was queued first among all that are unfinished, on whichever
    /// stream: the device makes one step. False if there is none.
    pub fn finish_oldest(&self) -> bool {
        let mut state = self.state();
        let queued = state.streams.values_mut().filter(|stream| !stream.unfinished.is_empty());
        let Some(stream) = queued.min_by_key(|stream| stream.unfinished.front().copied()) else {
            return false;
        };
        stream.finish_until(stream.finished + 1);
        true
    }

    /// Finishes the work on `stream` up to number `work`, as far as it was queued.
    pub fn finish_until(&self, stream: StreamId, work: u64) {
        if let Some(stream) = self.state().streams.get_mut(&stream) {
            stream.finish_until(work);
        }
    }

    /// Whether the work on `stream` up to number `work` is finished.
    #[must_use]
    pub fn is_finished(&self, stream: StreamId, work: u64) -> bool {
        self.state().streams.get(&stream).is_none_or(|stream| stream.finished >= work)
    }

    /// Finishes all work on all streams.
    pub fn finish_all(&self) {
        self.state().finish_all();
    }

    /// Destroys a stream, as the program that made it may. What is queued on it goes on; its handle is not to be
    /// used any more.
    pub fn destroy_stream(&self, stream: StreamId) {
        self.state().destroyed.insert(stream);
    }

    /// Starts capturing `stream` into a new graph.
    pub fn begin_capture(&self, stream: StreamId) {
        let mut state = self.state();
        let id = state.fresh_handle();
        state.streams.entry(stream).or_default().capture = Some((id, BTreeSet::new()));
        state.capturing.insert(stream);
    }

    /// Makes later work on `waiter` follow the work queued on `other`. A waiter that was not being
    /// captured joins the other's capture.
    pub fn wait_for(&self, waiter: StreamId, other: StreamId) {
        let mut state = self.state();
        let joined = state.streams.get(&other).and_then(|stream| stream.capture.clone());
        if let Some((id, nodes)) = joined {
            state.capturing.insert(waiter);
            let waiter = state.streams.entry(waiter).or_default();
            waiter.capture.get_or_insert((id, BTreeSet::new())).1.extend(nodes);
        }
    }

    /// Ends the capture that `stream` belongs to, on every stream that joined it.
    pub fn end_capture(&self, stream: StreamId) {
        let mut state = self.state();
        let Some((id, _)) = state.streams.get(&stream).and_then(|stream| stream.capture.clone())
        else {
            return;
        };
        let State { streams, capturing, nodes, .. } = &mut *state;
        capturing.retain(|stream| {
            let capture = streams.get_mut(stream).map(|stream| &mut stream.capture);
            capture.and_then(|capture| capture.take_if(|(capture, _)| *capture == id)).is_none()
        });
        // Of another capture they are still asked for.
        if capturing.is_empty() {
            nodes.clear();
        }
    }

    // ---- other tenants ----

    /// Sets how much another tenant of the device holds; false, and nothing changes, if the device
    /// does not have that much.
    pub fn set_tenant(&self, tenant: u32, bytes: u64) -> bool {
        let mut state = self.state();
        let before = state.tenants.get(&tenant).copied().unwrap_or(0);
        if bytes > before && bytes - before > self.free_bytes(&state) {
            return false;
        }
        state.tenants.insert(tenant, bytes);
        true
    }

    /// Bytes of the device held through this driver: plain allocations, and each page once.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.state().held
    }

    /// Bytes of host memory held through this driver: each page once.
    #[must_use]
    pub fn held_host(&self) -> u64 {
        self.state().held_host
    }

    // ---- scripts and counts ----

    /// Scripts a failure.
    pub fn fail(&self, when: FailWhen, fault: Fault) {
        self.state().script.fail(when, fault);
    }

    /// Forgets scripted failures that have not struck.
    pub fn clear_failures(&self) {
        self.state().script.clear_failures();
    }

    /// The next [`Call::Alloc`] of exactly `bytes` bytes is placed at `address`, if that range is
    /// clear and one a driver could give.
    pub fn place_alloc(&self, bytes: u64, address: u64) {
        self.state().script.place_next(Call::Alloc, bytes, address);
    }

    /// The next [`Call::Reserve`] is placed at `address`, whatever its size, if that range is clear and
    /// one a driver could give.
    pub fn place_reserve(&self, address: u64) {
        self.state().script.place_next(Call::Reserve, 0, address);
    }

    /// Forgets placements that nobody asked for.
    pub fn clear_placements(&self) {
        self.state().script.clear_places();
    }

    /// How often each call was made and what they cost.
    #[must_use]
    pub fn counts(&self) -> CallCounts {
        self.state().counts
    }

    /// Counts from zero again.
    pub fn reset_counts(&self) {
        self.state().counts = CallCounts::default();
    }
}

/// What a program took of the device's addresses.
impl SimDriver {
    /// The addresses that are reserved now, with or without pages behind them.
    #[must_use]
    pub fn reserved_addresses(&self) -> u64 {
        self.state().ranges.values().sum()
    }
}
