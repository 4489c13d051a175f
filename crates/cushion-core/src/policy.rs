//! Policies: how memory is laid out and obtained.
//!
//! A policy decides which free block serves a request and how it is cut, where memory for a miss
//! comes from, how much the driver must have for it, and how much of a free block may be given
//! back. Code outside this room does not depend on which policy is in force. A new policy is one
//! more implementation of [`Rules`], in its own folder; `first_fit.rs` is the smallest one.
//!
//! The policy in force can be changed while the engine runs. Each segment stores the policy that
//! created it, and that policy decides about the segment's blocks.

mod expandable;
#[cfg(test)]
mod first_fit;
mod paged;
mod segments;

pub(crate) use self::expandable::segment_for;

use std::fmt;

use crate::backing::check::Unclaimed;
use crate::base::check::Violation;
use crate::base::names::{PolicyIndex, Tag};
use crate::driver::{Driver, DriverResult, EventId, Properties};
use crate::heap::Chains;
use crate::heap::block::{Block, BlockId};
use crate::heap::segment::Kind;
use crate::memory::unmap::{Calls, Unmapping};
use crate::memory::{Found, GiveBack, Mem, Request};
use crate::options::Policy;
use crate::streams::proof::{Idle, Proof};

/// The decisions of a policy, and its state about the memory that it laid out.
pub(crate) trait Rules<D: Driver>: fmt::Debug + Send {
    // ---- serving a request from reserved memory ----

    /// Returns the memory that serves a request now: a free block of its lane, or what the policy
    /// can make of several.
    fn find(&self, mem: &Mem<'_, D>, request: &Request) -> Option<Found>;

    /// Like [`find`](Self::find), in a lane of another stream, which lends by best fit only.
    fn find_to_lend(&self, mem: &Mem<'_, D>, request: &Request) -> Option<Found> {
        self.find(mem, request)
    }

    /// Like [`find`](Self::find), for a request that takes the memory. May change the layout of
    /// free memory.
    fn search(&mut self, mem: &mut Mem<'_, D>, request: &Request) -> Option<Found> {
        self.find(mem, request)
    }

    /// Turns the found memory into a free block of its lane that begins at the address of the
    /// request. Also returns whether the rest of the block becomes a block of its own.
    fn prepare(
        &mut self,
        mem: &mut Mem<'_, D>,
        found: Found,
        request: &Request,
    ) -> (BlockId, bool) {
        let Found::Block(id) = found else { unreachable!("this policy finds only free blocks") };
        let splits = mem.heap[id].size > request.size && self.splits(mem, id, request.size);
        (id, splits)
    }

    /// Returns whether the rest of a free block, which is larger than `size`, becomes a block of
    /// its own.
    fn splits(&self, mem: &Mem<'_, D>, id: BlockId, size: u64) -> bool;

    /// Returns evidence that no work can use the found memory, if the proof covers all of it.
    fn idle<'lock>(
        &self,
        mem: &Mem<'lock, D>,
        found: Found,
        _size: u64,
        proof: Proof,
    ) -> Option<Idle<'lock>> {
        match found {
            Found::Block(block) | Found::Within { block, .. } => mem.idle(block, proof),
            Found::Stitch(_) => None,
        }
    }

    // ---- memory from the driver ----

    /// Obtains new memory and returns a free block for the request in its lane; `None` if memory
    /// ran out.
    fn grow(&mut self, mem: &mut Mem<'_, D>, request: &Request) -> DriverResult<Option<BlockId>>;

    /// Returns whether memory of an idle stream is better for the request than new memory.
    fn prefers_borrowing(&mut self, _mem: &mut Mem<'_, D>, _request: &Request) -> bool {
        false
    }

    /// Returns the bytes that an empty device must provide for the request.
    fn wanted(&self, _mem: &Mem<'_, D>, request: &Request) -> u64 {
        request.wanted
    }

    /// Returns the bytes that the driver must have free to serve the request, after everything
    /// cached is given back.
    fn needed(&mut self, mem: &mut Mem<'_, D>, request: &Request) -> u64;

    /// Returns whether the request would fit if live blocks lay on pages, on a device that reports
    /// `free` bytes. Only for a policy that does not use pages.
    fn would_fit_on_pages(&self, _mem: &Mem<'_, D>, _request: &Request, _free: u64) -> bool {
        false
    }

    // ---- memory that the policy laid out ----

    /// Returns how much of a free block in one of its segments may be given back.
    fn give_back(&self, mem: &Mem<'_, D>, block: &Block) -> GiveBack;

    /// Unmaps and releases the pages that lie wholly in a free block of one of its segments, as far
    /// as `calls` allow.
    fn unmap(&mut self, mem: &mut Mem<'_, D>, idle: &Idle<'_>, calls: &mut Calls) -> Unmapping {
        let what = self.give_back(mem, &mem.heap[idle.block()]);
        mem.unmap_pages(idle, what, calls, |_, _, _| true)
    }

    /// Completes the free of a pending block in one of its segments, which is of this kind.
    fn complete_free(&mut self, mem: &mut Mem<'_, D>, id: BlockId, kind: Kind, tag: Tag) {
        mem.complete_free(id, kind, tag);
    }

    // ---- trimming ----

    /// Checks whether the work that detached pages wait for is done.
    fn poll_detached(&mut self, _mem: &mut Mem<'_, D>) -> DriverResult<()> {
        Ok(())
    }

    /// Unmaps a few detached pages whose work is done. Returns their bytes, or `None` if there are
    /// none.
    fn release_detached(&mut self, _mem: &mut Mem<'_, D>) -> Option<u64> {
        None
    }

    /// Detaches pages that have not been needed for a while.
    fn trim(
        &mut self,
        _mem: &mut Mem<'_, D>,
        _now: std::time::Duration,
        _may_take: bool,
    ) -> DriverResult<()> {
        Ok(())
    }

    /// Returns detached pages to their lanes: those that could serve the request, or all. Returns
    /// whether any page was detached.
    fn recall(&mut self, _mem: &mut Mem<'_, D>, _request: Option<&Request>) -> bool {
        false
    }

    /// Notes that recalled pages serve a request of `size` bytes.
    fn note_recalled(&mut self, _mem: &Mem<'_, D>, _found: Found, _size: u64) {}

    /// Returns the bytes of detached pages.
    fn detached(&self, _mem: &Mem<'_, D>) -> u64 {
        0
    }

    // ---- upkeep ----

    /// Called before the totals of the ledger are reset to zero.
    fn totals_reset(&mut self, _mem: &Mem<'_, D>) {}

    /// Returns the number of stitches, the capacity of their table, and the bytes of their
    /// addresses.
    fn stitches(&self) -> (usize, usize, u64) {
        (0, 0, 0)
    }

    /// Limits the stitches of a stream to fewer than usual, for tests.
    fn set_most_stitches(&mut self, _most: usize) {}

    /// Shrinks the tables to their contents.
    fn shrink(&mut self) {}

    /// Returns the events that it waits for, for the engine to destroy at its end.
    fn take_events(&mut self) -> Vec<EventId> {
        Vec::new()
    }

    /// Its share of the invariant check.
    fn check(
        &self,
        _mem: &Mem<'_, D>,
        _chains: &Chains,
        _unclaimed: &mut Unclaimed<'_>,
    ) -> Result<(), Violation> {
        Ok(())
    }
}

/// The policies of one engine, and the index of the one in force.
#[derive(Debug)]
pub(crate) struct Policies<D> {
    all: Vec<Box<dyn Rules<D>>>,
    in_force: PolicyIndex,
}

impl From<Policy> for PolicyIndex {
    fn from(policy: Policy) -> Self {
        Self(policy as u8)
    }
}

/// Returns the policy in force if `asked_for` is selected: on a device without pages, `segments`.
pub(crate) fn possible(device: &Properties, asked_for: Policy) -> Policy {
    if device.has_pages { asked_for } else { Policy::Segments }
}

impl<D: Driver> Policies<D> {
    pub(crate) fn new(in_force: Policy) -> Self {
        // In the order of `Policy`.
        let all: Vec<Box<dyn Rules<D>>> = vec![
            Box::new(segments::Segments),
            Box::new(expandable::Expandable),
            Box::new(paged::Paged::default()),
        ];
        Self { all, in_force: in_force.into() }
    }

    pub(crate) fn in_force(&self) -> PolicyIndex {
        self.in_force
    }

    pub(crate) fn set_in_force(&mut self, policy: PolicyIndex) {
        self.in_force = policy;
    }

    /// Adds a policy.
    #[cfg(test)]
    fn add(&mut self, rules: Box<dyn Rules<D>>) -> PolicyIndex {
        self.all.push(rules);
        PolicyIndex(u8::try_from(self.all.len() - 1).expect("few policies"))
    }

    /// Returns the rules of a policy.
    pub(crate) fn rules(&self, policy: PolicyIndex) -> &dyn Rules<D> {
        &*self.all[usize::from(policy.0)]
    }

    /// Returns the rules of a policy, to act on memory.
    pub(crate) fn rules_mut(&mut self, policy: PolicyIndex) -> &mut dyn Rules<D> {
        &mut *self.all[usize::from(policy.0)]
    }

    /// Returns the rules of all policies.
    pub(crate) fn all(&self) -> impl Iterator<Item = &dyn Rules<D>> {
        self.all.iter().map(|rules| &**rules)
    }

    /// Returns the rules of all policies, to act on memory.
    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut Box<dyn Rules<D>>> {
        self.all.iter_mut()
    }

    /// Returns how much of a free block may be given back.
    pub(crate) fn give_back(&self, mem: &Mem<'_, D>, id: BlockId) -> GiveBack {
        let block = &mem.heap[id];
        self.rules(mem.heap[block.segment].policy).give_back(mem, block)
    }

    /// Returns the rules of the policy that laid out a block.
    pub(crate) fn of_block(&mut self, mem: &Mem<'_, D>, id: BlockId) -> &mut dyn Rules<D> {
        self.rules_mut(mem.heap.segment_of(id).policy)
    }
}

/// Returns whether a block is too large for a request. Blocks that must not be split serve only
/// requests of nearly their size.
fn is_oversized_for<D: Driver>(mem: &Mem<'_, D>, block: u64, size: u64) -> bool {
    let Some(max_split) = mem.options.max_split_size else { return false };
    let rounding = mem.options.max_non_split_rounding.unwrap_or(mem.options.large_segment_size);
    if size < max_split { block >= max_split } else { block >= size.saturating_add(rounding) }
}
