//! `paged`: addresses are plentiful, pages are not. Cushion's own policy, and the default.
//!
//! Every page keeps one home address for as long as it is held. The homes of a lane lie end to end,
//! so that free memory merges as in one large segment, and a hit is plain best fit. If no free
//! block serves a request although there is enough free memory, scattered free pages get second
//! addresses side by side: a [`stitch`]. Only the missing bytes are requested from the driver.
//!
//! | file | subject |
//! |---|---|
//! | `growth.rs` | a miss: fresh pages or a stitch, whichever is cheaper |
//! | `sizes.rs` | the sizes of fresh pages |
//! | `room.rs` | the place in the homes with the fewest missing bytes |
//! | `free_pages.rs`, `plan.rs` | the free memory that a new stitch consists of |
//! | `stitch.rs`, `lend.rs` | stitches: their table; making, using and dissolving them |
//! | `layout.rs` | the place where the same request was served before |
//! | `split.rs` | pages are split when memory is nearly exhausted |
//! | `trim.rs` | pages that are not needed are given back |

mod check;
mod free_pages;
mod growth;
mod layout;
mod lend;
mod plan;
mod room;
mod sizes;
mod split;
mod stitch;
mod trim;

use std::time::Duration;

use self::free_pages::FreePages;
use self::layout::Layout;
use self::plan::free_memory;
use self::room::Room;
use self::stitch::{StitchId, Stitches};
use self::trim::Windows;
use super::Rules;
use crate::backing::check::Unclaimed;
use crate::base::check::Violation;
use crate::base::names::Tag;
use crate::base::size::MIN_BLOCK;
use crate::driver::{Driver, DriverResult, EventId};
use crate::heap::block::{Block, BlockId};
use crate::heap::pool::LaneId;
use crate::heap::segment::Kind;
use crate::heap::{Chains, Heap, Lane};
use crate::memory::unmap::{Calls, Unmapping};
use crate::memory::{Found, GiveBack, Mem, Request};
use crate::streams::proof::{Idle, Proof};

/// The policy, and its state about the memory that it laid out.
#[derive(Debug, Default)]
pub(super) struct Paged {
    stitches: Stitches,
    layout: Layout,
    windows: Windows,
    /// Whether the program has freed more so far than is live. Before that, it loads memory that it
    /// keeps.
    has_loaded: bool,
    /// Bytes freed before the totals of the ledger were last reset.
    freed_before: u64,
    /// Whether so little of the limit is left that pages are smaller than usual.
    is_tight: bool,
    /// The peak of live bytes, as of the last window.
    high_water: u64,
}

/// The policy's notes on one lane.
#[derive(Debug)]
struct PagedLane {
    free_pages: FreePages,
    /// The room found last: the size it was for, the lane's count of changes then, and the room.
    room: Option<(u64, u64, Option<Room>)>,
}

impl<D: Driver> Rules<D> for Paged {
    fn find(&self, mem: &Mem<'_, D>, request: &Request) -> Option<Found> {
        self.served_before(mem, request).or_else(|| self.find_to_lend(mem, request))
    }

    /// Best fit, or an existing stitch.
    fn find_to_lend(&self, mem: &Mem<'_, D>, request: &Request) -> Option<Found> {
        let lane = mem.heap.lane(request.lane);
        if let Some(block) = lane.and_then(|lane| lane.free().at_least(request.size).next()) {
            return Some(Found::Block(block));
        }
        if request.small {
            return None;
        }
        let stitch = self.stitches.made_before(mem.heap, request)?;
        Some(Found::Stitch(stitch.number()))
    }

    fn search(&mut self, mem: &mut Mem<'_, D>, request: &Request) -> Option<Found> {
        let found = self.find(mem, request)?;
        if self.is_tight && self.split_for_block(mem, found, request) {
            return self.find(mem, request);
        }
        Some(found)
    }

    fn prepare(
        &mut self,
        mem: &mut Mem<'_, D>,
        found: Found,
        request: &Request,
    ) -> (BlockId, bool) {
        let id = match found {
            Found::Block(id) => id,
            Found::Within { block, address } => {
                if mem.heap[block].address != address {
                    mem.heap.cut_within_lane(block, address, address + request.size);
                }
                block
            }
            Found::Stitch(number) => self.lend(mem, StitchId::new(number), request.size),
        };
        self.remember(mem, request, id);
        (id, mem.heap[id].size - request.size >= MIN_BLOCK)
    }

    fn splits(&self, mem: &Mem<'_, D>, id: BlockId, size: u64) -> bool {
        mem.heap[id].size - size >= MIN_BLOCK
    }

    fn idle<'lock>(
        &self,
        mem: &Mem<'lock, D>,
        found: Found,
        size: u64,
        proof: Proof,
    ) -> Option<Idle<'lock>> {
        match found {
            Found::Block(block) | Found::Within { block, .. } => mem.idle(block, proof),
            Found::Stitch(number) => {
                let id = StitchId::new(number);
                let at_home = |home| mem.idle(home, proof).is_some();
                let idle = mem.idle(self.stitches.get(id).block, proof)?;
                self.stitches.homes_of(mem.heap, id, size).all(at_home).then_some(idle)
            }
        }
    }

    fn grow(&mut self, mem: &mut Mem<'_, D>, request: &Request) -> DriverResult<Option<BlockId>> {
        self.grow_or_stitch(mem, request)
    }

    fn prefers_borrowing(&mut self, mem: &mut Mem<'_, D>, request: &Request) -> bool {
        !request.small && !mem.is_recording() && self.growing_passes_high_water(mem, request)
    }

    /// No segment is created for a request: pages are enough.
    fn wanted(&self, mem: &Mem<'_, D>, request: &Request) -> u64 {
        mem.whole_units(request.size)
    }

    fn needed(&mut self, mem: &mut Mem<'_, D>, request: &Request) -> u64 {
        if request.small {
            return mem.whole_units(request.size);
        }
        let at_borders = free_memory(mem, request.lane).bytes_at_borders();
        mem.whole_units(request.size.saturating_sub(at_borders))
    }

    /// Whole pages only.
    fn give_back(&self, mem: &Mem<'_, D>, block: &Block) -> GiveBack {
        if mem.heap[block.segment].kind != Kind::Homes {
            return GiveBack::Nothing;
        }
        let page_around = |address| mem.backing.page_around(address).expect("a page at home");
        let page = page_around(block.address);
        let (first, bytes, _) = page;
        let start = if first == block.address { first } else { first + bytes };
        let is_in_one = block.end() <= first + bytes;
        let (last, bytes, _) = if is_in_one { page } else { page_around(block.end() - 1) };
        let end = if last + bytes == block.end() { block.end() } else { last };
        if start < end { GiveBack::Pages { start, end } } else { GiveBack::Nothing }
    }

    /// Takes each page out of its stitches first.
    fn unmap(&mut self, mem: &mut Mem<'_, D>, idle: &Idle<'_>, calls: &mut Calls) -> Unmapping {
        let block = &mem.heap[idle.block()];
        if !block.is_free() {
            return Unmapping::NOTHING;
        }
        let what = self.give_back(mem, block);
        mem.unmap_pages(idle, what, calls, |mem, page, calls| {
            self.take_out_of_stitches(mem, page, idle, calls)
        })
    }

    fn complete_free(&mut self, mem: &mut Mem<'_, D>, id: BlockId, kind: Kind, tag: Tag) {
        match kind {
            Kind::Stitch(number) => self.return_home(mem, StitchId::new(number), id, tag),
            kind => mem.complete_free(id, kind, tag),
        }
    }

    fn poll_detached(&mut self, mem: &mut Mem<'_, D>) -> DriverResult<()> {
        self.poll_work(mem)
    }

    fn release_detached(&mut self, mem: &mut Mem<'_, D>) -> Option<u64> {
        self.release_some(mem)
    }

    fn trim(&mut self, mem: &mut Mem<'_, D>, now: Duration, may_take: bool) -> DriverResult<()> {
        self.look(mem, now, may_take)
    }

    fn recall(&mut self, mem: &mut Mem<'_, D>, request: Option<&Request>) -> bool {
        if self.windows.detached.is_empty() {
            return false;
        }
        match request {
            Some(request) => self.recall_for(mem, request),
            None => self.recall_all(mem),
        }
        true
    }

    fn note_recalled(&mut self, mem: &Mem<'_, D>, found: Found, size: u64) {
        self.note_needed(mem, found, size);
    }

    fn detached(&self, mem: &Mem<'_, D>) -> u64 {
        self.detached_bytes(mem)
    }

    fn totals_reset(&mut self, mem: &Mem<'_, D>) {
        self.freed_before += mem.ledger.freed_since_reset();
    }

    fn stitches(&self) -> (usize, usize, u64) {
        self.stitches.size()
    }

    fn set_most_stitches(&mut self, most: usize) {
        self.stitches.set_most(most);
    }

    fn shrink(&mut self) {
        self.stitches.shrink();
    }

    fn take_events(&mut self) -> Vec<EventId> {
        self.stitches.take_events()
    }

    fn check(
        &self,
        mem: &Mem<'_, D>,
        chains: &Chains,
        unclaimed: &mut Unclaimed<'_>,
    ) -> Result<(), Violation> {
        self.check_stitches(mem, chains, unclaimed)?;
        self.check_detached(mem)?;
        self.check_free_pages(mem, chains)
    }
}

impl PagedLane {
    /// Creates the notes on a lane, if there are none.
    fn open(heap: &mut Heap, at: LaneId, small: bool) {
        if heap.lane(at).is_some_and(|lane| lane.notes::<Self>().is_none()) {
            let free_pages = FreePages::new(small);
            heap.put_notes(at, Box::new(Self { free_pages, room: None }));
        }
    }

    /// Runs `f` on the notes on a lane; returns `None` if there are none.
    fn change<T>(
        heap: &mut Heap,
        at: LaneId,
        f: impl FnOnce(&mut Self, &mut Heap) -> T,
    ) -> Option<T> {
        let mut notes = heap.take_notes(at)?;
        let changed = notes.downcast_mut().map(|notes| f(notes, heap));
        heap.put_notes(at, notes);
        changed
    }

    /// Returns the free pages of the lane, as of the last look.
    fn free_pages(&self) -> &FreePages {
        &self.free_pages
    }

    /// Looks at the changed pages of a lane.
    fn refresh<D: Driver>(mem: &mut Mem<'_, D>, at: LaneId) {
        let backing = &*mem.backing;
        let looked_at = Self::change(mem.heap, at, |notes, heap| {
            let changes: Vec<_> = std::iter::from_fn(|| heap.take_changed(at)).collect();
            let lane = heap.lane(at).expect("a lane with notes");
            notes.free_pages.refresh(
                changes,
                |range| backing.pages_in(range),
                |address| {
                    let block = &heap[lane.free_at(address)?];
                    (address < block.end()).then(|| block.address..block.end())
                },
            )
        });
        mem.looks.at_pages(looked_at.unwrap_or(0));
    }

    /// Returns the room found for `size` bytes, if the lane has not changed since.
    fn room_seen(&self, lane: &Lane, size: u64) -> Option<Option<Room>> {
        let (for_size, changes, room) = self.room?;
        (for_size == size && changes == lane.changes()).then_some(room)
    }

    fn note_room(heap: &mut Heap, at: LaneId, size: u64, room: Option<Room>) {
        Self::change(heap, at, |notes, heap| {
            let changes = heap.lane(at).map_or(0, Lane::changes);
            notes.room = Some((size, changes, room));
        });
    }
}
