//! How much an engine itself keeps: what tests of its growth ask for.

use crate::driver::Driver;
use crate::engine::Engine;
use crate::locked::State;

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
        self.locked(|engine| {
            let (lane_figures, room_for_lane_figures) = engine.lanes.size();
            let State { blocks, segments, pools, stitches, live, pending, homes, .. } =
                &*engine.state;
            let lanes = pools.iter().map(|(_, pool)| pool.lanes().count()).sum();
            let ((blocks, room_for_blocks), (segments, room_for_segments)) =
                (blocks.size(), segments.size());
            Kept {
                lanes,
                lane_figures,
                room_for_lane_figures,
                blocks,
                room_for_blocks,
                segments,
                room_for_segments,
                room_for_ranges: stitches.room(),
                room_for_live: live.capacity(),
                pending_streams: pending.streams(),
                looks_at_pending: pending.looks.get(),
                addresses: homes.addresses,
            }
        })
    }
}
