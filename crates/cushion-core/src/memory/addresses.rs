//! How many addresses a lane gets for pages to come and go behind. A process has 128 TiB of them.

use super::{Mem, Request};
use crate::base::size::{MIB, round_up};
use crate::driver::Driver;

/// Up to this many times half the device's memory, a lane gets as many addresses as it may ever need. Beyond, it begins
/// with [`FIRST`], and each new segment has twice as many as the lane has.
const PLENTY_OF_HALVES: u64 = 5;

/// What segments laid out as PyTorch's may have beyond three times the device's memory. The layout is PyTorch's until a
/// lane needs more addresses than it has got.
const MORE_AS_PYTORCH: u64 = 1 << 40;

/// Then each later lane gets this part of what is left, so that tens of graph pools get more than graphs use.
const PART_OF_WHAT_IS_LEFT: u64 = 8;

/// The first addresses of a lane for large requests where there is no plenty. For small ones it is half as many.
const FIRST: u64 = 8 * MIB;

impl<D: Driver> Mem<'_, D> {
    /// How many addresses a lane gets for homes: `room`, while there is plenty.
    pub(crate) fn addresses_for_homes(&self, request: &Request, room: u64) -> u64 {
        let plenty = (self.device.total / 2).saturating_mul(PLENTY_OF_HALVES);
        if room <= plenty.saturating_sub(self.backing.lane_addresses()) {
            return room.max(request.size);
        }
        self.fewer_addresses(request, room)
    }

    /// How many addresses a lane gets where PyTorch would reserve `room`: all of them while there is plenty, and then a
    /// part of what is left.
    pub(crate) fn addresses_as_pytorch(&self, request: &Request, room: u64, page_size: u64) -> u64 {
        let plenty = self.device.total.saturating_mul(3).saturating_add(MORE_AS_PYTORCH);
        let left = plenty.saturating_sub(self.backing.lane_addresses());
        if room <= left {
            return room;
        }
        let bytes = (left / PART_OF_WHAT_IS_LEFT).max(self.fewer_addresses(request, room));
        round_up(bytes, page_size).map_or(room, |bytes| bytes.min(room))
    }

    /// How many addresses a lane gets where there is no plenty: a few when it begins, and then each time twice as many as
    /// it has, so that they grow with what is used and there are few segments all the same.
    fn fewer_addresses(&self, request: &Request, room: u64) -> u64 {
        let held = self.heap.lane(request.lane).map_or(0, |lane| lane.addresses());
        let first = if request.small { FIRST / 2 } else { FIRST };
        held.saturating_mul(2).max(first).min(room).max(request.size)
    }
}
