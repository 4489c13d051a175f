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

/// The notes of a policy on one lane. They are dropped with the lane.
pub(crate) type Notes = Box<dyn Any + Send>;

/// The blocks of one pool on one stream.
#[derive(Debug)]
pub(crate) struct Lane {
    /// By size, then address: the first block that is large enough is the best fit.
    free: FreeIndex,
    /// Free blocks by address, for policies that need it.
    by_address: Option<Box<ByAddress>>,
    /// Unmapped blocks by address.
    unmapped: BTreeMap<u64, BlockId>,
    /// Segments of the lane that are held. The lane is removed with the last one.
    segments: u32,
    /// Bytes of addresses in segments behind which pages are mapped and unmapped.
    addresses: u64,
    /// How often a block was added to or removed from one of the indexes above.
    changes: u64,
    /// XOR of hashes of live (address, size) pairs.
    fingerprint: u64,
    /// Whether the program uses its blocks on other streams, so that these streams run beside its
    /// own.
    is_shared: bool,
    notes: Option<Notes>,
    stats: Arc<LaneStats>,
}

/// Free blocks by address.
#[derive(Debug)]
struct ByAddress {
    /// Smaller blocks are not in this index.
    least: u64,
    /// The address takes the place of the size here, and the size that of the address.
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

    /// Returns the free blocks, by size and address.
    pub(crate) fn free(&self) -> &FreeIndex {
        &self.free
    }

    /// Returns the last free block that begins at or before `address`, in a lane that is indexed by
    /// address. The block may end before `address`.
    pub(crate) fn free_at(&self, address: u64) -> Option<BlockId> {
        // This index has addresses in the place of sizes: `smaller_than` compares addresses.
        self.by_address.as_ref()?.free.smaller_than(address + 1).next()
    }

    /// Returns all unmapped blocks, lowest address first.
    pub(crate) fn unmapped(&self) -> impl Iterator<Item = (u64, BlockId)> {
        self.unmapped.iter().map(|(&address, &id)| (address, id))
    }

    /// Returns the unmapped block that begins at `address`, or else the last one before it.
    pub(crate) fn unmapped_at(&self, address: u64) -> Option<BlockId> {
        self.unmapped.range(..=address).next_back().map(|(_, &id)| id)
    }

    /// Returns how many segments of the lane are held.
    pub(crate) fn segments(&self) -> u32 {
        self.segments
    }

    /// Returns the bytes of addresses in segments behind which pages are mapped and unmapped.
    pub(crate) fn addresses(&self) -> u64 {
        self.addresses
    }

    /// Returns how often an index changed. What was found out about free and unmapped blocks is
    /// valid while this is unchanged.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns the XOR of hashes of live (address, size) pairs.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Returns whether the program uses its blocks on other streams.
    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared
    }

    pub(crate) fn stats(&self) -> &LaneStats {
        &self.stats
    }

    /// Returns the policy's notes on this lane.
    pub(crate) fn notes<T: Any>(&self) -> Option<&T> {
        self.notes.as_ref()?.downcast_ref()
    }

    /// Returns the segment that contains an address, in a lane that is indexed by address.
    pub(crate) fn segment_at(&self, address: u64) -> Option<SegmentId> {
        self.by_address.as_ref()?.dirty.segment_at(address)
    }

    /// Returns the changes since the policy last looked, in a lane that is indexed by address.
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

    /// Returns the index by address, if it covers blocks of this size.
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

    /// From now on, indexes free blocks of at least `least` bytes by address, and marks changes at
    /// the addresses of this segment by units of `unit` bytes.
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

    /// Makes room for marks at these addresses, before pages are mapped there.
    pub(super) fn reach(&mut self, addresses: &Range<u64>) {
        if let Some(by_address) = &mut self.by_address {
            by_address.dirty.reach(addresses);
        }
    }

    /// Marks a part of a free block of `block` bytes that has become free, is no longer free, or
    /// has other pages.
    #[inline]
    pub(super) fn mark(&mut self, block: u64, part: Range<u64>) {
        if let Some(by_address) = &mut self.by_address
            && block >= by_address.least
        {
            by_address.dirty.mark(part);
        }
    }

    /// Returns the next changed addresses, and unmarks them.
    pub(super) fn take_changed(&mut self) -> Option<Changed> {
        self.by_address.as_mut()?.dirty.take()
    }

    /// Counts a block that was handed out.
    pub(super) fn activated(&mut self, address: u64, size: u64) {
        self.stats.activated(size);
        self.fingerprint ^= FxBuildHasher.hash_one((address, size));
    }

    /// Counts a block whose free has completed.
    pub(super) fn deactivated(&mut self, address: u64, size: u64) {
        self.stats.deactivated(size);
        self.fingerprint ^= FxBuildHasher.hash_one((address, size));
    }

    pub(super) fn set_shared(&mut self) {
        self.is_shared = true;
    }

    pub(super) fn segment_added(&mut self) {
        self.segments += 1;
    }

    /// Returns whether it was the last one.
    pub(super) fn segment_removed(&mut self) -> bool {
        self.segments -= 1;
        self.segments == 0
    }

    /// Counts addresses reserved for pages of the lane.
    pub(super) fn addresses_added(&mut self, bytes: u64) {
        self.addresses += bytes;
    }

    /// Counts the addresses of the segment at `start` that were given back.
    pub(super) fn addresses_removed(&mut self, start: u64, bytes: u64) {
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

    /// Shrinks the indexes to their contents.
    pub(super) fn shrink(&mut self) {
        self.free.shrink();
        if let Some(by_address) = &mut self.by_address {
            by_address.free.shrink();
        }
    }
}
