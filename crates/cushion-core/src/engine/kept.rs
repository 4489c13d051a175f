//! How much an engine itself keeps: what tests of its growth ask for.

use super::Engine;
use crate::driver::Driver;

/// How much an engine itself keeps at one moment.
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
    /// Streams with frees that are not done.
    pub pending_streams: usize,
    /// Blocks looked at so far to learn whether pending ones would serve a request.
    pub looks_at_pending: u64,
    /// Addresses reserved for lanes.
    pub addresses: u64,
}

impl<D: Driver> Engine<D> {
    /// How much the engine itself keeps, for tests of what it keeps too long.
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
