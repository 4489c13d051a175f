//! How many addresses a lane reserves for pages. A process has 128 TiB of them.

use super::{Mem, Request};
use crate::base::size::{MIB, round_up};
use crate::driver::Driver;

/// Until all lanes together have this many times half the device's memory, a lane reserves as many
/// addresses as it may ever need. After that it starts with [`FIRST`], and each new segment has
/// twice as many as the lane has.
const PLENTY_OF_HALVES: u64 = 5;

/// Under PyTorch's layout, lanes may reserve this much more than three times the device's memory.
/// The layout equals PyTorch's until a lane needs more addresses than it has.
const MORE_AS_PYTORCH: u64 = 1 << 40;

/// After that, each new lane reserves one in this many of the remaining addresses, so that tens of
/// graph pools get more than graphs use.
const SHARES_OF_REST: u64 = 8;

/// The first addresses of a lane for large requests when addresses are scarce. A lane for small
/// requests starts with half.
const FIRST: u64 = 8 * MIB;

impl<D: Driver> Mem<'_, D> {
    /// Returns how many addresses a lane reserves for homes: `room`, while there are plenty.
    pub(crate) fn addresses_for_homes(&self, request: &Request, room: u64) -> u64 {
        let plenty = (self.device.total / 2).saturating_mul(PLENTY_OF_HALVES);
        if room <= plenty.saturating_sub(self.backing.lane_addresses()) {
            return room.max(request.size);
        }
        self.fewer_addresses(request, room)
    }

    /// Returns how many addresses a lane reserves where PyTorch would reserve `room`: all of them
    /// while there are plenty, then a fraction of the rest.
    pub(crate) fn addresses_as_pytorch(&self, request: &Request, room: u64, page_size: u64) -> u64 {
        let plenty = self.device.total.saturating_mul(3).saturating_add(MORE_AS_PYTORCH);
        let left = plenty.saturating_sub(self.backing.lane_addresses());
        if room <= left {
            return room;
        }
        let bytes = (left / SHARES_OF_REST).max(self.fewer_addresses(request, room));
        round_up(bytes, page_size).map_or(room, |bytes| bytes.min(room))
    }

    /// Returns how many addresses a lane reserves when they are scarce: a few at first, then each
    /// time twice as many as it has, so that they grow with use and segments stay few.
    fn fewer_addresses(&self, request: &Request, room: u64) -> u64 {
        let held = self.heap.lane(request.lane).map_or(0, |lane| lane.addresses());
        let first = if request.small { FIRST / 2 } else { FIRST };
        held.saturating_mul(2).max(first).min(room).max(request.size)
    }
}
