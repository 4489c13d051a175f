//! Unmapping pages.
//!
//! Every call of the driver takes tens of microseconds, and a page may be in hundreds of stitches.
//! So the lock is held for a limited number of calls at a time. The rest follows in the next hold,
//! if it is still free then.

use super::{GiveBack, Mem};
use crate::base::names::Tag;
use crate::driver::{Driver, DriverResult, PageHandle};
use crate::heap::block::BlockId;
use crate::ledger::change::{Change, Span};
use crate::streams::proof::Idle;

/// How many driver calls are made in one hold of the lock.
const CALLS_A_HOLD: u32 = 32;

/// The calls that unmap and release one page, and give back the addresses of its segment.
pub(crate) const CALLS_A_PAGE: u32 = 3;

/// How many driver calls may still be made in this hold of the lock.
#[derive(Debug)]
pub(crate) struct Calls(u32);

impl Calls {
    /// Returns the calls of one hold of the lock.
    pub(crate) fn of_one_hold() -> Self {
        Self(CALLS_A_HOLD)
    }

    /// Returns a budget without limit: a request needs the page now, or the calls were counted
    /// before.
    pub(crate) fn unlimited() -> Self {
        Self(u32::MAX)
    }

    /// Spends this many calls; returns false if fewer are left.
    pub(crate) fn spend(&mut self, calls: u32) -> bool {
        let left = self.0.checked_sub(calls);
        self.0 = left.unwrap_or(0);
        left.is_some()
    }

    pub(crate) fn are_left(&self) -> bool {
        self.0 > 0
    }
}

/// How far unmapping the pages of a free block got.
#[derive(Debug)]
pub(crate) struct Unmapping {
    /// The unmapped addresses. The caller passes them to [`Mem::note_unmapped`], several at a time.
    pub(crate) unmapped: Option<Span>,
    /// The block with pages that are left to do, or the driver's error.
    pub(crate) rest: DriverResult<Option<BlockId>>,
}

impl Unmapping {
    /// Nothing was to be done.
    pub(crate) const NOTHING: Self = Self { unmapped: None, rest: Ok(None) };
}

/// Appends newly unmapped addresses to the open span. If they are not adjacent, returns the open
/// span and starts a new one.
pub(crate) fn join_unmapped(open: &mut Option<Span>, more: Option<Span>) -> Option<Span> {
    match (&mut *open, more) {
        (_, None) => None,
        (Some(before), Some(more)) if before.address + before.bytes == more.address => {
            before.bytes += more.bytes;
            None
        }
        (before, Some(more)) => before.replace(more),
    }
}

impl<D: Driver> Mem<'_, D> {
    /// Unmaps and releases the pages of `what`, which lie wholly in a free block, as far as `calls`
    /// allow. Then, if nothing of the segment is mapped any more, gives back its addresses. Asks
    /// `may_go` about each page first. If the driver fails half-way, the pages before are gone.
    pub(crate) fn unmap_pages(
        &mut self,
        idle: &Idle<'_>,
        what: GiveBack,
        calls: &mut Calls,
        mut may_go: impl FnMut(&mut Self, PageHandle, &mut Calls) -> bool,
    ) -> Unmapping {
        let id = idle.block();
        let GiveBack::Pages { start, end } = what else { return Unmapping::NOTHING };
        if !self.heap[id].is_free() {
            return Unmapping::NOTHING;
        }
        let place = self.heap.place(self.heap[id].lane);
        let mut at = start;
        let mut failed = Ok(());
        while at < end {
            let page = self.backing.page_around(at);
            let (_, bytes, page) = page.expect("a free block has pages behind it");
            if !may_go(self, page, calls) || !calls.spend(CALLS_A_PAGE) {
                break;
            }
            failed = self.backing.unmap(self.driver, at, idle);
            if failed.is_err() {
                break;
            }
            at += bytes;
        }
        let span = Span { address: start, bytes: at - start, place };
        let unmapped = (at > start).then_some(span);
        if let Some(span) = unmapped {
            self.heap.mark_unmapped(id, start, at);
            self.count_pages();
            self.ledger.apply(Change::PagesUnmapped(span));
        }
        let rest = failed.and_then(|()| {
            let block = &self.heap[id];
            if at < end {
                return Ok(if block.is_mapped() { Some(id) } else { block.next });
            }
            if !block.is_split() && !block.is_mapped() {
                self.unreserve(id)?;
            }
            Ok(None)
        });
        Unmapping { unmapped, rest }
    }

    /// Counts and records unmapped addresses.
    pub(crate) fn note_unmapped(&mut self, unmapped: Option<Span>, tag: Tag) {
        if let Some(span) = unmapped {
            self.ledger.apply(Change::UnmapEnded(span, tag));
        }
    }
}
