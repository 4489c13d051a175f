//! Growing under `paged`: pages with a home, and second addresses where those are enough.
//!
//! A miss looks for memory in the order of what it costs: a range stitched before costs nothing, a page some tens of
//! microseconds, a new range as much for each page in it, and a byte more than was ever live costs a byte.

use crate::block::BlockId;
use crate::driver::{Driver, DriverResult, StreamId};
use crate::history::Tag;
use crate::locked::{Locked, State};
use crate::policy::{PageSizes, Policy, Request};
use crate::pool::PoolIndex;
use crate::room::Room;
use crate::segment::Backing;
use crate::size::{MIB, round_up};
use crate::stitch::{Part, StitchId};
use crate::trim::Windows;

/// A thousandth more than was ever live may be held without another look.
const SLACK: u64 = 1000;

/// What a page must bring to be mapped again, as a part of the largest fresh one. Where memory is short the price does
/// not matter.
const LEAST_PIECE: u64 = 20;

/// What mapping a page is worth, in bytes that are not asked for: about 30 µs.
const PRICE_OF_MAPPING: u64 = MIB;

/// Addresses for homes are cut to this part where fewer will do.
const FEWER_ADDRESSES: u64 = 16;

/// Up to so many times half the device's memory, a lane gets as many addresses as it may ever need. Beyond, it begins with
/// [`FIRST_ADDRESSES`], and each new range has twice as many as it has.
const PLENTY_OF_HALVES: u64 = 5;

/// What segments laid out as PyTorch's may have beyond three times the device's memory. The layout is PyTorch's until a lane
/// needs more addresses than it has got. A process has 128 TiB of them.
const MORE_AS_PYTORCH: u64 = 1 << 40;

/// Then each later lane gets this part of what is left, so that tens of graph pools get more than graphs use.
const PART_OF_WHAT_IS_LEFT: u64 = 8;

/// The first addresses of a lane for large requests where there is no plenty. For small ones it is half as many.
const FIRST_ADDRESSES: u64 = 8 * MIB;

/// What growing goes by.
#[derive(Debug, Default)]
pub(crate) struct Homes {
    /// Whether more was freed so far than was live then: before that, a program loads what it keeps.
    has_loaded: bool,
    /// What was freed before the totals last began again from zero.
    pub(crate) freed_before: u64,
    /// Whether so little of the limit is left that pages are smaller than they would be.
    pub(crate) is_tight: bool,
    /// The most that was live, as of the last window.
    pub(crate) high_water: u64,
    pub(crate) windows: Windows,
    /// Addresses reserved for lanes that pages come and go behind.
    pub(crate) addresses: u64,
}

/// A free block that serves a request, or one that can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Block(BlockId),
    /// Out of a free block, what begins at this address.
    Piece {
        block: BlockId,
        address: u64,
    },
    /// A range stitched before.
    Range(StitchId),
}

impl<D: Driver> Locked<'_, D> {
    /// Serves a miss without the driver: from a range stitched before.
    pub(crate) fn look_again(&self, request: &Request) -> Option<Found> {
        if request.small {
            return None;
        }
        self.stitched_before(request).map(Found::Range)
    }

    /// Whether serving the request by growing would take more than was ever live.
    pub(crate) fn growing_passes_high_water(&mut self, request: &Request) -> bool {
        let missing = self.room_at_home(request).map_or(request.size, |room| room.missing);
        let lane = (request.pool, request.stream);
        let more = self.fresh_pages(lane, missing, u64::MAX).map_or(u64::MAX, |(_, bytes)| bytes);
        self.reserved().saturating_add(more) > self.allowance(request)
    }

    /// What may be held before waste is looked at.
    fn allowance(&self, request: &Request) -> u64 {
        let with_it = self.counters.active_bytes.current().saturating_add(request.size);
        let high = self.high_water().max(with_it);
        high.saturating_add(high / SLACK)
    }

    /// The most that was live.
    fn high_water(&self) -> u64 {
        self.state.homes.high_water.max(self.state.homes.windows.peak)
    }

    /// The fresh pages to make where `missing` bytes are: the size of each, and of all together.
    fn fresh_pages(
        &self,
        (pool, stream): (PoolIndex, StreamId),
        missing: u64,
        most: u64,
    ) -> Option<(u64, u64)> {
        let pool = &self.state.pools[pool];
        let small = pool.small.then(|| {
            let held = pool.lane(stream).map(|lane| lane.stats().read());
            held.map_or(0, |held| held.free_bytes + held.active_bytes)
        });
        let loading = !self.state.homes.has_loaded;
        let limit = self.page_limit();
        let with_it = self.counters.active_bytes.current().saturating_add(missing);
        let high_water = self.high_water().max(with_it);
        let sizes = PageSizes::asked_for(&self.state.options, high_water, self.reserved(), limit);
        sizes.of(small, loading, missing, most, self.device.granularity)
    }

    /// The largest fresh page that a lane gets now.
    pub(crate) fn largest_page(&self, lane: (PoolIndex, StreamId)) -> u64 {
        self.fresh_pages(lane, 1, u64::MAX).map_or(u64::MAX, |(page, _)| page)
    }

    /// The most that can be held.
    fn page_limit(&self) -> u64 {
        self.state.limit.unwrap_or(u64::MAX).min(self.device.total)
    }

    /// The sizes of fresh pages for `missing` bytes in a lane's homes.
    pub(crate) fn sizes_of_fresh_pages(
        &self,
        lane: (PoolIndex, StreamId),
        missing: u64,
        most: u64,
    ) -> Vec<u64> {
        let (page, bytes) = self.fresh_pages(lane, missing, most).expect("addresses for them");
        // Of equal size, but for the last.
        let each = (bytes / bytes.div_ceil(page)).next_multiple_of(self.device.granularity);
        let mut sizes = vec![each; usize::try_from(bytes / each).expect("few pages")];
        sizes.extend((bytes % each > 0).then_some(bytes % each));
        sizes
    }

    /// A free block for the request out of fresh pages, or stitched from what is free and as few of them as will do;
    /// `None` if memory ran out.
    pub(crate) fn grow_homes(
        &mut self,
        request: &Request,
        policy: Policy,
        tag: Tag,
    ) -> DriverResult<Option<BlockId>> {
        self.note_loading();
        let stitches = !request.small;
        let (sizes, limit) = (&self.state.options, self.page_limit());
        self.state.homes.is_tight = PageSizes::are_cut(sizes, self.reserved(), limit);
        if stitches && self.state.homes.is_tight {
            self.split_for_range(request);
        }
        if !stitches || !self.state.homes.has_loaded || !self.growing_passes_high_water(request) {
            let grown = self.grow_at_home(request, policy, tag)?;
            if grown.is_some() || !stitches {
                return Ok(grown);
            }
        }
        if !self.make_room_for_range(request.stream) {
            return self.grow_at_home(request, policy, tag);
        }
        let at_home = self.room_at_home(request).map_or(request.size, |room| room.missing);
        // What a failed attempt leaves behind is for the next miss.
        self.pieces((request.pool, request.stream));
        let least = self.state.options.page_size / LEAST_PIECE;
        for least in [least, 0] {
            let plan = self.pieces_before((request.pool, request.stream)).plan(request.size, least);
            self.state.looks.at_pages(plan.pages() as u64);
            let dearer = self.price(request, plan.missing, plan.pages(), 2)
                >= self.price(request, at_home, 0, 1);
            let no_less = self.whole_units(plan.missing) >= self.whole_units(at_home);
            let grown = if no_less || least > 0 && dearer {
                self.grow_at_home(request, policy, tag)?
            } else if let Some(fresh) = self.pages_at_home(plan.missing, request, policy, tag)? {
                match self.stitch(plan, fresh, request, tag)? {
                    Some(block) => Some(block),
                    // There are no addresses for a range.
                    None => self.grow_at_home(request, policy, tag)?,
                }
            } else {
                None
            };
            if grown.is_some() {
                return Ok(grown);
            }
        }
        Ok(None)
    }

    /// What it costs, in bytes, to serve a request with so many fresh bytes and so many pages mapped again, if fresh
    /// pages are mapped so many times.
    fn price(&self, request: &Request, fresh: u64, again: usize, times: u64) -> u64 {
        let fresh = self.whole_units(fresh);
        let page = self.largest_page((request.pool, request.stream));
        let mappings = fresh.div_ceil(page).saturating_mul(times).saturating_add(again as u64);
        fresh.saturating_add(mappings.saturating_mul(PRICE_OF_MAPPING))
    }

    pub(crate) fn whole_units(&self, bytes: u64) -> u64 {
        round_up(bytes, self.device.granularity).unwrap_or(u64::MAX)
    }

    /// What the driver has to have before it can serve the request, once everything cached is given back.
    pub(crate) fn needed(&mut self, request: &Request) -> u64 {
        let rules = self.state.policy.rules();
        let needed = rules.needed(request.size, request.wanted);
        if !rules.stitches() {
            return needed;
        }
        if request.small {
            return self.whole_units(needed);
        }
        let at_borders = self.pieces((request.pool, request.stream)).bytes_at_borders();
        self.whole_units(needed.saturating_sub(at_borders))
    }

    /// What a device that holds nothing has to give for the request: no segment is made where pages are stitched.
    pub(crate) fn wanted_of(&self, request: &Request) -> u64 {
        if self.state.policy.rules().stitches() {
            self.whole_units(request.size)
        } else {
            request.wanted
        }
    }

    /// Remembers that the program has begun to free what it allocates.
    fn note_loading(&mut self) {
        if !self.state.homes.has_loaded {
            let freed = self.state.homes.freed_before + self.counters.active_bytes.freed();
            self.state.homes.has_loaded = freed > self.counters.active_bytes.current();
        }
    }

    /// Grows the lane's homes until a free block of the request's size is there.
    fn grow_at_home(
        &mut self,
        request: &Request,
        policy: Policy,
        tag: Tag,
    ) -> DriverResult<Option<BlockId>> {
        let room = self.room_at_home(request);
        let missing = room.map_or(request.size, |room| room.missing);
        if self.whole_units(missing) > self.may_grow_by() {
            return Ok(None);
        }
        if let Some(Room { start, .. }) = room {
            return self.extend(start, request.size, tag);
        }
        let Some(start) = self.new_homes(request, policy, tag)? else { return Ok(None) };
        let grown = self.extend(start, request.size, tag);
        self.leave_if_unused(start);
        grown
    }

    /// A range of addresses for homes, with no page so far.
    fn new_homes(
        &mut self,
        request: &Request,
        policy: Policy,
        tag: Tag,
    ) -> DriverResult<Option<BlockId>> {
        // Room for more than the device, so that what is given back low down leaves room higher up; for small requests
        // a part of it, since there can be many streams. Where addresses run out, less will do.
        let most = self.device.total.saturating_add(self.device.total / 8);
        let rooms = [most, most / FEWER_ADDRESSES, 0];
        for room in &rooms[usize::from(request.small)..] {
            let room = self.addresses_for_homes(request, *room);
            let Some(bytes) = round_up(room, self.device.granularity) else {
                return Ok(None);
            };
            let made = self.paged_segment(bytes, Backing::Homes, request, policy, tag)?;
            if let Some(id) = made {
                let State { pools, blocks, .. } = &mut *self.state;
                let block = &blocks[id];
                let lane = pools[request.pool].lane_mut(request.stream);
                let (addresses, unit) = (block.address..block.end(), self.device.granularity);
                lane.add_homes(addresses, block.segment, request.small, unit);
                return Ok(made);
            }
        }
        Ok(None)
    }

    /// How many addresses a lane gets for homes: `room`, while there is plenty.
    fn addresses_for_homes(&self, request: &Request, room: u64) -> u64 {
        let plenty = (self.device.total / 2).saturating_mul(PLENTY_OF_HALVES);
        if room <= plenty.saturating_sub(self.state.homes.addresses) {
            return room.max(request.size);
        }
        self.fewer_addresses(request, room)
    }

    /// How many addresses a lane gets where PyTorch would reserve `room`: all of them while there is plenty, and then a part
    /// of what is left.
    pub(crate) fn addresses_as_pytorch(&self, request: &Request, room: u64, page_size: u64) -> u64 {
        let plenty = self.device.total.saturating_mul(3).saturating_add(MORE_AS_PYTORCH);
        let left = plenty.saturating_sub(self.state.homes.addresses);
        if room <= left {
            return room;
        }
        let bytes = (left / PART_OF_WHAT_IS_LEFT).max(self.fewer_addresses(request, room));
        round_up(bytes, page_size).map_or(room, |bytes| bytes.min(room))
    }

    /// How many addresses a lane gets where there is no plenty: a few when it begins, and then each time twice as many as
    /// it has, so that they grow with what is used and there are few ranges all the same.
    fn fewer_addresses(&self, request: &Request, room: u64) -> u64 {
        let lane = self.state.pools[request.pool].lane(request.stream);
        let held = lane.map_or(0, |lane| lane.addresses());
        let first = if request.small { FIRST_ADDRESSES / 2 } else { FIRST_ADDRESSES };
        held.saturating_mul(2).max(first).min(room).max(request.size)
    }

    /// Gives new addresses back, if no page came to them.
    pub(crate) fn leave_if_unused(&mut self, id: BlockId) {
        let block = &self.state.blocks[id];
        if !block.is_mapped() && !block.is_split() {
            // A driver that will not take them leaves them for the next time.
            let _ = self.unreserve(id);
        }
    }

    /// Fresh pages, wholly free, at the end of the lane's homes; `None` if memory ran out.
    fn pages_at_home(
        &mut self,
        missing: u64,
        request: &Request,
        policy: Policy,
        tag: Tag,
    ) -> DriverResult<Option<Vec<Part>>> {
        if missing == 0 {
            return Ok(Some(Vec::new()));
        }
        let bytes = round_up(missing, self.device.granularity);
        let Some(bytes) = bytes.filter(|&bytes| bytes <= self.may_grow_by()) else {
            return Ok(None);
        };
        let wanted = Request { size: bytes, ..*request };
        let unmapped = |engine: &Self| {
            let lane = engine.state.pools[request.pool].lane(request.stream)?;
            lane.unmapped().map(|(_, id)| id).find(|&id| {
                let block = &engine.state.blocks[id];
                let backing = engine.state.segments[block.segment].backing;
                backing == Backing::Homes && block.size >= bytes
            })
        };
        let there = unmapped(self);
        let Some(target) =
            there.map_or_else(|| self.new_homes(&wanted, policy, tag), |it| Ok(Some(it)))?
        else {
            return Ok(None);
        };
        let (address, segment) =
            (self.state.blocks[target].address, self.state.blocks[target].segment);
        let sizes = self.sizes_of_fresh_pages((request.pool, request.stream), bytes, bytes);
        let mapped = self.map_pages(target, &sizes, tag);
        if !matches!(mapped, Ok(true)) {
            self.leave_if_unused(target);
            return mapped.map(|_| None);
        }
        let mut home = address;
        let parts = sizes.iter().map(|&bytes| {
            let (_, _, page) = self.state.pages.page_around(home).expect("mapped just now");
            let part = Part { page, pool: request.pool, segment, home, bytes, offset: 0 };
            home += bytes;
            part
        });
        Ok(Some(parts.collect()))
    }
}
