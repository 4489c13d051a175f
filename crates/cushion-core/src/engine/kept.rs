//! The sizes of an engine's own tables, for tests that they do not grow without bound.

use super::Engine;
use crate::driver::Driver;

/// The sizes of an engine's own tables at one moment.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Kept {
    pub lanes: usize,
    pub lane_figures: usize,
    pub room_for_lane_figures: usize,
    pub blocks: usize,
    pub room_for_blocks: usize,
    pub segments: usize,
    pub room_for_segments: usize,
    pub room_for_ranges: usize,
    pub room_for_live: usize,
    /// Streams with unfinished frees.
    pub pending_streams: usize,
    /// Blocks examined so far to tell whether pending ones would serve a request.
    pub looks_at_pending: u64,
    /// Bytes of addresses reserved for lanes.
    pub addresses: u64,
}

impl<D: Driver> Engine<D> {
    /// Returns the sizes of the engine's own tables, for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn kept(&self) -> Kept {
        self.shared.locked(|core| {
            let (lane_figures, room_for_lane_figures) = self.shared.lanes().size();
            let [(blocks, room_for_blocks), (segments, room_for_segments), (_, room_for_live)] =
                core.mem.heap.sizes();
            Kept {
                lanes: core.mem.heap.lanes().count(),
                lane_figures,
                room_for_lane_figures,
                blocks,
                room_for_blocks,
                segments,
                room_for_segments,
                room_for_ranges: core.policies.all().map(|rules| rules.stitches().1).sum(),
                room_for_live,
                pending_streams: core.mem.streams.count(),
                looks_at_pending: core.mem.streams.looks(),
                addresses: core.mem.backing.lane_addresses(),
            }
        })
    }
}
