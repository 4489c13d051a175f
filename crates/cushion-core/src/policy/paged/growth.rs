//! Growing: fresh pages with a home, or a stitch if that is enough.
//!
//! A miss tries the cheapest source of memory first. An existing stitch costs nothing, a fresh page
//! some tens of microseconds, a new stitch as much for each of its pages. A reserved byte above the
//! peak of live bytes costs a byte.

use super::Paged;
use super::PagedLane;
use super::plan::{free_memory, free_memory_as_seen};
use super::room::{Room, room_at_home};
use super::sizes::PageSizes;
use super::stitch::StitchedPage;
use crate::base::names::{PolicyIndex, Tag};
use crate::base::size::{MIB, round_up};
use crate::driver::{Driver, DriverResult};
use crate::heap::block::BlockId;
use crate::heap::pool::LaneId;
use crate::heap::segment::Kind;
use crate::memory::{Mem, Request};
use crate::options::Policy;

/// Grow freely up to 0.1 % above peak live bytes: one part in this many.
const SLACK: u64 = 1000;

/// A page is mapped again only if it provides at least one in this many of the largest fresh page.
/// If memory is short, this does not apply.
const LEAST_PART: u64 = 20;

/// The cost of mapping a page, about 30 µs, expressed in bytes.
const PRICE_OF_MAPPING: u64 = MIB;

/// If fewer addresses are enough, or addresses run out, homes reserve one in this many.
const FEWER_ADDRESSES: u64 = 16;

impl Paged {
    /// Returns a free block for the request, made of fresh pages, or of a stitch of free memory and
    /// as few fresh pages as possible; `None` if memory ran out.
    pub(super) fn grow_or_stitch<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        request: &Request,
    ) -> DriverResult<Option<BlockId>> {
        self.note_loading(mem);
        let stitches = !request.small;
        self.is_tight = PageSizes::are_cut(mem.options, mem.reserved(), mem.most());
        if stitches && self.is_tight {
            self.split_for_stitch(mem, request);
        }
        if !stitches || !self.has_loaded || !self.growing_passes_high_water(mem, request) {
            let grown = self.grow_at_home(mem, request)?;
            if grown.is_some() || !stitches {
                return Ok(grown);
            }
        }
        if !self.make_room_for_stitch(mem, request.lane.stream) {
            return self.grow_at_home(mem, request);
        }
        let at_home = room_at_home(mem, request).map_or(request.size, |room| room.missing);
        // Refreshed only once: memory that a failed attempt leaves behind is for the next miss.
        free_memory(mem, request.lane);
        let least = mem.options.page_size / LEAST_PART;
        for least in [least, 0] {
            let plan = free_memory_as_seen(mem, request.lane).plan(request.size, least);
            mem.looks.at_pages(plan.page_count() as u64);
            let dearer = self.price(mem, request, plan.missing, plan.page_count(), 2)
                >= self.price(mem, request, at_home, 0, 1);
            let no_less = mem.whole_units(plan.missing) >= mem.whole_units(at_home);
            let grown = if no_less || least > 0 && dearer {
                self.grow_at_home(mem, request)?
            } else if let Some(fresh) = self.fresh_pages_at_home(mem, plan.missing, request)? {
                match self.stitch(mem, plan, fresh, request)? {
                    Some(block) => Some(block),
                    // No addresses are left for a stitch.
                    None => self.grow_at_home(mem, request)?,
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

    /// Returns whether serving the request by growing would take more than the peak of live bytes.
    pub(super) fn growing_passes_high_water<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        request: &Request,
    ) -> bool {
        let missing = room_at_home(mem, request).map_or(request.size, |room| room.missing);
        let fresh = self.fresh_pages(mem, request.lane, missing, u64::MAX);
        let more = fresh.map_or(u64::MAX, |(_, bytes)| bytes);
        mem.reserved().saturating_add(more) > self.allowance(mem, request)
    }

    /// Returns the bytes that may be reserved before waste is considered.
    fn allowance<D: Driver>(&self, mem: &Mem<'_, D>, request: &Request) -> u64 {
        let with_it = mem.ledger.active().saturating_add(request.size);
        let high = self.high_water(mem).max(with_it);
        high.saturating_add(high / SLACK)
    }

    /// Returns the peak of live bytes.
    fn high_water<D: Driver>(&self, mem: &Mem<'_, D>) -> u64 {
        self.high_water.max(mem.ledger.watermark())
    }

    // ---- page sizes ----

    /// Returns the fresh pages for `missing` bytes: the size of each, and the bytes of all
    /// together.
    fn fresh_pages<D: Driver>(
        &self,
        mem: &Mem<'_, D>,
        lane: LaneId,
        missing: u64,
        most: u64,
    ) -> Option<(u64, u64)> {
        let small = mem.heap[lane.pool].small.then(|| {
            let held = mem.heap.lane(lane).map(|lane| lane.stats().read());
            held.map_or(0, |held| held.free_bytes + held.active_bytes)
        });
        let with_it = mem.ledger.active().saturating_add(missing);
        let high_water = self.high_water(mem).max(with_it);
        let sizes = PageSizes::asked_for(mem.options, high_water, mem.reserved(), mem.most());
        sizes.of(small, !self.has_loaded, missing, most, mem.device.granularity)
    }

    /// Returns the size of the largest fresh page that a lane gets now.
    pub(super) fn largest_page<D: Driver>(&self, mem: &Mem<'_, D>, lane: LaneId) -> u64 {
        self.fresh_pages(mem, lane, 1, u64::MAX).map_or(u64::MAX, |(page, _)| page)
    }

    /// Returns the sizes of fresh pages for `missing` bytes in a lane's homes.
    fn sizes_of_fresh_pages<D: Driver>(
        &self,
        mem: &Mem<'_, D>,
        lane: LaneId,
        missing: u64,
        most: u64,
    ) -> Vec<u64> {
        let (page, bytes) = self.fresh_pages(mem, lane, missing, most).expect("addresses for them");
        // All of equal size, except the last.
        let each = (bytes / bytes.div_ceil(page)).next_multiple_of(mem.device.granularity);
        let mut sizes = vec![each; usize::try_from(bytes / each).expect("few pages")];
        sizes.extend((bytes % each > 0).then_some(bytes % each));
        sizes
    }

    /// Returns the cost, in bytes, of serving a request with `fresh` fresh bytes and `again` pages
    /// mapped again, if each fresh page is mapped `times` times.
    fn price<D: Driver>(
        &self,
        mem: &Mem<'_, D>,
        request: &Request,
        fresh: u64,
        again: usize,
        times: u64,
    ) -> u64 {
        let fresh = mem.whole_units(fresh);
        let page = self.largest_page(mem, request.lane);
        let mappings = fresh.div_ceil(page).saturating_mul(times).saturating_add(again as u64);
        fresh.saturating_add(mappings.saturating_mul(PRICE_OF_MAPPING))
    }

    /// Notes whether the program has begun to free its allocations. Before that, it loads memory
    /// that it keeps.
    fn note_loading<D: Driver>(&mut self, mem: &Mem<'_, D>) {
        if !self.has_loaded {
            let freed = self.freed_before + mem.ledger.freed_since_reset();
            self.has_loaded = freed > mem.ledger.active();
        }
    }

    // ---- homes ----

    /// Grows the lane's homes until there is a free block of the request's size.
    fn grow_at_home<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        request: &Request,
    ) -> DriverResult<Option<BlockId>> {
        let room = room_at_home(mem, request);
        let missing = room.map_or(request.size, |room| room.missing);
        if mem.whole_units(missing) > mem.may_grow_by() {
            return Ok(None);
        }
        if let Some(Room { start, .. }) = room {
            return self.extend(mem, start, request);
        }
        let Some(start) = self.new_homes(mem, request)? else { return Ok(None) };
        let grown = self.extend(mem, start, request);
        mem.unreserve_if_unused(start);
        grown
    }

    /// Maps fresh pages at the addresses from `start` on until there is a free block for the
    /// request.
    fn extend<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        start: BlockId,
        request: &Request,
    ) -> DriverResult<Option<BlockId>> {
        mem.extend(start, request.size, |mem, target, bytes| {
            self.map_fresh(mem, target, bytes, request.tag)
        })
    }

    /// Maps fresh pages behind at least the first `bytes` bytes of an unmapped block. Returns false
    /// if memory ran out.
    fn map_fresh<D: Driver>(
        &self,
        mem: &mut Mem<'_, D>,
        id: BlockId,
        bytes: u64,
        tag: Tag,
    ) -> DriverResult<bool> {
        let block = &mem.heap[id];
        let (lane, most) = (block.lane, block.size.min(mem.may_grow_by()));
        let sizes = self.sizes_of_fresh_pages(mem, lane, bytes, most);
        if mem.map_pages(id, &sizes, tag)? {
            return Ok(true);
        }
        // The device has too little for whole pages: map only the missing bytes.
        let least = self.sizes_of_fresh_pages(mem, lane, bytes, 0);
        Ok(least != sizes && mem.map_pages(id, &least, tag)?)
    }

    /// Reserves addresses for homes, without any page. Returns `None` if there are none left.
    fn new_homes<D: Driver>(
        &self,
        mem: &mut Mem<'_, D>,
        request: &Request,
    ) -> DriverResult<Option<BlockId>> {
        // More addresses than the device has memory, so that pages given back at low addresses
        // leave room at higher ones. For small requests a fraction of that, since there can be many
        // streams. If addresses run out, fewer are enough.
        let most = mem.device.total.saturating_add(mem.device.total / 8);
        let rooms = [most, most / FEWER_ADDRESSES, 0];
        let unit = mem.device.granularity;
        for room in &rooms[usize::from(request.small)..] {
            let room = mem.addresses_for_homes(request, *room);
            let Some(bytes) = round_up(room, unit) else { return Ok(None) };
            let policy = PolicyIndex::from(Policy::Paged);
            let made = mem.reserve_segment(bytes, Kind::Homes, request, policy)?;
            if let Some(id) = made {
                // In a lane of small requests only whole pages are searched for, so only blocks
                // with room for one are indexed.
                let least = if request.small { unit } else { 0 };
                mem.heap.index_by_address(id, least, unit);
                PagedLane::open(mem.heap, request.lane, request.small);
                return Ok(made);
            }
        }
        Ok(None)
    }

    /// Maps fresh pages, wholly free, in the lane's homes. Returns `None` if memory ran out.
    fn fresh_pages_at_home<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        missing: u64,
        request: &Request,
    ) -> DriverResult<Option<Vec<StitchedPage>>> {
        if missing == 0 {
            return Ok(Some(Vec::new()));
        }
        let bytes = round_up(missing, mem.device.granularity);
        let Some(bytes) = bytes.filter(|&bytes| bytes <= mem.may_grow_by()) else {
            return Ok(None);
        };
        let has_room = |&id: &BlockId| mem.kind_of(id) == Kind::Homes && mem.heap[id].size >= bytes;
        let lane = mem.heap.lane(request.lane);
        let there = lane.and_then(|lane| lane.unmapped().map(|(_, id)| id).find(has_room));
        let made = match there {
            Some(id) => Some(id),
            None => self.new_homes(mem, &Request { size: bytes, ..*request })?,
        };
        let Some(target) = made else { return Ok(None) };
        let (address, segment) = (mem.heap[target].address, mem.heap[target].segment);
        let sizes = self.sizes_of_fresh_pages(mem, request.lane, bytes, bytes);
        let mapped = mem.map_pages(target, &sizes, request.tag);
        if !matches!(mapped, Ok(true)) {
            mem.unreserve_if_unused(target);
            return mapped.map(|_| None);
        }
        let mut home = address;
        let pages = sizes.iter().map(|&bytes| {
            let (_, _, page) = mem.backing.page_around(home).expect("mapped just now");
            let pool = request.lane.pool;
            let page = StitchedPage { page, pool, segment, home, bytes, offset: 0 };
            home += bytes;
            page
        });
        Ok(Some(pages.collect()))
    }
}
