//! Lanes: the blocks of one pool on one stream, and the indexes that find them.

use std::any::Any;
use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::ops::Range;
use std::sync::Arc;

use rustc_hash::FxBuildHasher;

use super::block::BlockId;
use super::dirty::{Changed, Dirty};
use super::free_index::FreeIndex;
use super::segment::SegmentId;
use crate::ledger::lanes::LaneStats;

/// What a policy keeps about one lane. It goes with the lane.
pub(crate) type Notes = Box<dyn Any + Send>;

/// The blocks of one pool on one stream.
#[derive(Debug)]
pub(crate) struct Lane {
    /// By size, then address: the first that is large enough is the best fit.
    free: FreeIndex,
    /// Free blocks by address, for policies that ask for it.
    by_address: Option<Box<ByAddress>>,
    /// Unmapped blocks by address.
    unmapped: BTreeMap<u64, BlockId>,
    /// Segments of the lane that are still held: with the last, the lane goes.
    segments: u32,
    /// Addresses of those segments that pages come and go behind.
    addresses: u64,
    /// How often a block joined or left one of the indexes above.
    changes: u64,
    /// XOR of hashes of live (address, size) pairs.
    fingerprint: u64,
    /// Whether the program uses its blocks on other streams, so that it and they run side by side.
    is_shared: bool,
    notes: Option<Notes>,
    stats: Arc<LaneStats>,
}

/// Free blocks by address.
#[derive(Debug)]
struct ByAddress {
    /// Smaller blocks are left out.
    least: u64,
    /// By address and size: the address comes first here.
    free: FreeIndex,
    dirty: Dirty,
}

impl Lane {
    pub(super) fn new(stats: Arc<LaneStats>) -> Self {
        Self {
            free: FreeIndex::default(),
            by_address: None,
            unmapped: BTreeMap::new(),
            segments: 0,
            addresses: 0,
            changes: 0,
            fingerprint: 0,
            is_shared: false,
            notes: None,
            stats,
        }
    }

    // ---- looking ----

    /// Free blocks, by size and address.
    pub(crate) fn free(&self) -> &FreeIndex {
        &self.free
    }

    /// The last free block that begins at or before `address`, in a lane that is indexed by address. It may end before
    /// the address.
    pub(crate) fn free_at(&self, address: u64) -> Option<BlockId> {
        // The address comes first in this index: what is smaller begins before it.
        self.by_address.as_ref()?.free.smaller_than(address + 1).next()
    }

    /// All unmapped blocks, lowest address first.
    pub(crate) fn unmapped(&self) -> impl Iterator<Item = (u64, BlockId)> {
        self.unmapped.iter().map(|(&address, &id)| (address, id))
    }

    /// The unmapped block that begins at `address`, or else the last one before it.
    pub(crate) fn unmapped_at(&self, address: u64) -> Option<BlockId> {
        self.unmapped.range(..=address).next_back().map(|(_, &id)| id)
    }

    /// Segments of the lane that are still held.
    pub(crate) fn segments(&self) -> u32 {
        self.segments
    }

    /// Addresses of the segments that pages come and go behind.
    pub(crate) fn addresses(&self) -> u64 {
        self.addresses
    }

    /// How often a block joined or left an index: what was found out about free and unmapped blocks holds as long as
    /// this is the same.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// XOR of hashes of live (address, size) pairs.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Whether the program uses its blocks on other streams.
    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared
    }

    pub(crate) fn stats(&self) -> &LaneStats {
        &self.stats
    }

    /// What the policy keeps about this lane.
    pub(crate) fn notes<T: Any>(&self) -> Option<&T> {
        self.notes.as_ref()?.downcast_ref()
    }

    /// The segment that an address lies in, in a lane that is indexed by address.
    pub(crate) fn segment_at(&self, address: u64) -> Option<SegmentId> {
        self.by_address.as_ref()?.dirty.segment_at(address)
    }

    /// What changed since the policy last looked, in a lane that is indexed by address.
    pub(crate) fn dirty(&self) -> Option<&Dirty> {
        self.by_address.as_ref().map(|by_address| &by_address.dirty)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.is_empty() && self.unmapped.is_empty() && self.fingerprint == 0
    }

    // ---- changing ----

    pub(super) fn insert_free(&mut self, size: u64, address: u64, id: BlockId) {
        let new = self.free.insert(size, address, id);
        debug_assert!(new, "a block is in the free index once");
        if let Some(by_address) = self.by_address(size) {
            by_address.insert(address, size, id);
        }
        self.changes += 1;
        self.stats.freed(size);
    }

    pub(super) fn remove_free(&mut self, size: u64, address: u64) {
        let removed = self.free.remove(size, address);
        debug_assert!(removed, "a free block is in the free index");
        if let Some(by_address) = self.by_address(size) {
            by_address.remove(address, size);
        }
        self.changes += 1;
        self.stats.taken(size, || self.free.largest());
    }

    /// The index by address, if a block of this size is in it.
    fn by_address(&mut self, size: u64) -> Option<&mut FreeIndex> {
        let by_address = self.by_address.as_mut()?;
        (size >= by_address.least).then_some(&mut by_address.free)
    }

    pub(super) fn insert_unmapped(&mut self, address: u64, id: BlockId) {
        let before = self.unmapped.insert(address, id);
        debug_assert!(before.is_none(), "a block is in the unmapped index once");
        self.changes += 1;
    }

    pub(super) fn remove_unmapped(&mut self, address: u64) {
        let removed = self.unmapped.remove(&address);
        debug_assert!(removed.is_some(), "an unmapped block is in the unmapped index");
        self.changes += 1;
    }

    /// Indexes free blocks of at least `least` bytes by address from now on, and marks changes in the segment with these
    /// addresses, by units of `unit` bytes.
    pub(super) fn index_by_address(
        &mut self,
        addresses: Range<u64>,
        segment: SegmentId,
        least: u64,
        unit: u64,
    ) {
        let by_address = self.by_address.get_or_insert_with(|| {
            let mut free = FreeIndex::default();
            for (size, address, id) in self.free.iter().filter(|&(size, ..)| size >= least) {
                free.insert(address, size, id);
            }
            Box::new(ByAddress { least, free, dirty: Dirty::default() })
        });
        by_address.dirty.add(addresses, segment, unit);
    }

    /// Pages are about to be mapped at these addresses.
    pub(super) fn reach(&mut self, addresses: &Range<u64>) {
        if let Some(by_address) = &mut self.by_address {
            by_address.dirty.reach(addresses);
        }
    }

    /// Marks a part of a free block of `block` bytes: it was not free before, is no longer free, or has other pages.
    #[inline]
    pub(super) fn mark(&mut self, block: u64, part: Range<u64>) {
        if let Some(by_address) = &mut self.by_address
            && block >= by_address.least
        {
            by_address.dirty.mark(part);
        }
    }

    /// The next addresses for the policy to look at.
    pub(super) fn take_changed(&mut self) -> Option<Changed> {
        self.by_address.as_mut()?.dirty.take()
    }

    /// A block is handed out.
    pub(super) fn activated(&mut self, address: u64, size: u64) {
        self.stats.activated(size);
        self.fingerprint ^= FxBuildHasher.hash_one((address, size));
    }

    /// A block that was handed out is free.
    pub(super) fn deactivated(&mut self, address: u64, size: u64) {
        self.stats.deactivated(size);
        self.fingerprint ^= FxBuildHasher.hash_one((address, size));
    }

    pub(super) fn set_shared(&mut self) {
        self.is_shared = true;
    }

    pub(super) fn segment_came(&mut self) {
        self.segments += 1;
    }

    /// Returns whether it was the last one.
    pub(super) fn segment_went(&mut self) -> bool {
        self.segments -= 1;
        self.segments == 0
    }

    /// Addresses were reserved for pages of the lane.
    pub(super) fn addresses_came(&mut self, bytes: u64) {
        self.addresses += bytes;
    }

    /// The addresses of the segment that begins at `start` were given back.
    pub(super) fn addresses_went(&mut self, start: u64, bytes: u64) {
        self.addresses -= bytes;
        if let Some(by_address) = &mut self.by_address {
            by_address.dirty.remove(start);
        }
    }

    pub(super) fn take_notes(&mut self) -> Option<Notes> {
        self.notes.take()
    }

    pub(super) fn put_notes(&mut self, notes: Notes) {
        self.notes = Some(notes);
    }

    /// Gives back what its indexes do not need.
    pub(super) fn shrink(&mut self) {
        self.free.shrink();
        if let Some(by_address) = &mut self.by_address {
            by_address.free.shrink();
        }
    }
}
