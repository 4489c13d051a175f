//! Taking pages away from the addresses that they are at.
//!
//! Every call of the driver takes tens of microseconds, and a page may be in hundreds of stitches. So the lock is held for
//! a limited number of calls at a time: what is left is done in the next hold, if it is still free then.

use super::{GiveBack, Mem};
use crate::base::names::Tag;
use crate::driver::{Driver, DriverResult, PageHandle};
use crate::heap::block::BlockId;
use crate::ledger::change::{Change, Span};
use crate::streams::proof::Idle;

/// How many driver calls are made before others get the lock.
const CALLS_A_HOLD: u32 = 32;

/// What unmapping and releasing one page takes, and giving back the addresses of its segment.
pub(crate) const CALLS_A_PAGE: u32 = 3;

/// How many driver calls may still be made in this hold of the lock.
#[derive(Debug)]
pub(crate) struct Calls(u32);

impl Calls {
    /// For one hold of the lock.
    pub(crate) fn of_one_hold() -> Self {
        Self(CALLS_A_HOLD)
    }

    /// No limit: a request needs the page now, or the calls were counted before.
    pub(crate) fn unlimited() -> Self {
        Self(u32::MAX)
    }

    /// Whether so many are left; then they are spent.
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
    /// What was unmapped. The caller hands it to [`Mem::note_unmapped`], several at a time.
    pub(crate) unmapped: Option<Span>,
    /// The block with pages that are left to do, or why the driver failed.
    pub(crate) rest: DriverResult<Option<BlockId>>,
}

impl Unmapping {
    /// Nothing was to be done.
    pub(crate) const NOTHING: Self = Self { unmapped: None, rest: Ok(None) };
}

/// Adds addresses that follow those that were unmapped before. If they do not follow, returns those, and begins anew.
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
    /// Unmaps and releases the pages of `what`, which lie wholly in a free block, as far as `calls` go; then, if nothing of
    /// the segment is mapped any more, gives back its addresses. `may_go` is asked about each page first. Where the driver
    /// fails half-way, the pages before are gone.
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

    /// Counts and records what was unmapped.
    pub(crate) fn note_unmapped(&mut self, unmapped: Option<Span>, tag: Tag) {
        if let Some(span) = unmapped {
            self.ledger.apply(Change::UnmapEnded(span, tag));
        }
    }
}
