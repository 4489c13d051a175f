//! Pools and lanes: the free blocks that may serve one kind of request.
//!
//! A pool is small or large, and belongs to everybody (the default) or to one private pool (a CUDA
//! graph's, or the user's own). Its blocks are kept by stream, a *lane* each: memory freed on a
//! stream may be reused on that stream without waiting, and on no other.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::BuildHasher;
use std::ops::{Index, IndexMut, Range};
use std::sync::Arc;

use rustc_hash::FxBuildHasher;
use serde::{Deserialize, Serialize};

use crate::block::{BlockId, BlockTable};
use crate::driver::StreamId;
use crate::free_index::FreeIndex;
use crate::free_pages::FreePages;
use crate::pages::PageTable;
use crate::proof::Moment;
use crate::room::Room;
use crate::segment::SegmentId;
use crate::stats::{LaneStats, Lanes};
use crate::table::{Id, Table};

/// The name of a private pool, as PyTorch forms it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PoolId(pub u64, pub u64);

impl PoolId {
    /// The pool that is nobody's own.
    pub const DEFAULT: Self = Self(0, 0);
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.0, self.1)
    }
}

/// A pool, by its place in the table.
pub(crate) type PoolIndex = Id<Pool>;

/// The free blocks of one pool on one stream.
#[derive(Debug)]
pub(crate) struct Lane {
    /// By size, then address: the first that is large enough is the best fit.
    free: FreeIndex,
    /// Lanes that have homes know what lies where.
    by_address: Option<Box<ByAddress>>,
    /// Unmapped blocks by address.
    unmapped: BTreeMap<u64, BlockId>,
    /// Segments of the lane that are still held: with the last, it goes.
    segments: u32,
    /// Addresses of those of them that pages come and go behind.
    addresses: u64,
    /// Where room of so many bytes was found, or that there is none. Forgotten when a block becomes free or unmapped, or is
    /// so no more.
    room: Option<(u64, Option<Room>)>,
    /// What is live in it, and where, in one number.
    live: u64,
    /// Whether other streams work on its blocks, so that it and they run side by side.
    pub(crate) is_shared: bool,
    stats: Arc<LaneStats>,
}

/// What lies where in a lane.
#[derive(Debug)]
struct ByAddress {
    /// Free blocks of so many bytes are looked for, and no smaller ones.
    least: u64,
    /// Those, by address and size.
    free: FreeIndex,
    pages: FreePages,
}

impl ByAddress {
    fn free_at(&self, address: u64) -> Option<BlockId> {
        // Here the address comes first, so that what is smaller begins before it.
        self.free.smaller_than(address + 1).next()
    }
}

impl Lane {
    /// Free blocks, by size and address.
    pub(crate) fn free(&self) -> &FreeIndex {
        &self.free
    }

    /// The last free block that begins at or before `address`, in a lane that [has homes](Self::add_homes). It may end
    /// before the address.
    pub(crate) fn free_at(&self, address: u64) -> Option<BlockId> {
        self.by_address.as_ref()?.free_at(address)
    }

    /// Pages, of multiples of `unit`, will have their homes in a segment. From now on, free blocks can be looked up by
    /// address. In a lane of small requests only whole pages are looked for, and blocks that have room for one.
    pub(crate) fn add_homes(
        &mut self,
        addresses: Range<u64>,
        segment: SegmentId,
        small: bool,
        unit: u64,
    ) {
        let by_address = self.by_address.get_or_insert_with(|| {
            let least = if small { unit } else { 0 };
            let mut free = FreeIndex::default();
            for (size, address, id) in self.free.iter().filter(|&(size, ..)| size >= least) {
                free.insert(address, size, id);
            }
            Box::new(ByAddress { least, free, pages: FreePages::new(small) })
        });
        by_address.pages.add_homes(addresses, segment, unit);
    }

    /// The segment that begins at `start` is no more.
    pub(crate) fn remove_homes(&mut self, start: u64) {
        if let Some(by_address) = &mut self.by_address {
            by_address.pages.remove_homes(start);
        }
    }

    /// Pages come to these addresses: what of them is free can change from now on.
    pub(crate) fn reach(&mut self, addresses: &Range<u64>) {
        if let Some(by_address) = &mut self.by_address {
            by_address.pages.reach(addresses);
        }
    }

    /// A part of a free block of so many bytes was not free before, or is not any more; or it has other pages.
    #[inline]
    pub(crate) fn changed(&mut self, block: u64, part: Range<u64>) {
        if let Some(by_address) = &mut self.by_address
            && block >= by_address.least
        {
            by_address.pages.changed(part);
        }
    }

    /// Brings up to date which pages are free, and how; returns how many were looked at.
    pub(crate) fn look_at_changes(&mut self, pages: &PageTable, blocks: &BlockTable) -> u64 {
        let Some(by_address) = &mut self.by_address else { return 0 };
        let ByAddress { free, pages: free_pages, .. } = &mut **by_address;
        free_pages.refresh(
            |range| pages.pages_in(range),
            |address| {
                let block = &blocks[free.smaller_than(address + 1).next()?];
                (address < block.end()).then(|| block.address..block.end())
            },
        )
    }

    /// Which pages are free, and how, as of the last look; `None` in a lane without homes.
    pub(crate) fn free_pages(&self) -> Option<&FreePages> {
        self.by_address.as_ref().map(|by_address| &by_address.pages)
    }

    /// Where room was found, and of how many bytes, if that is still so.
    pub(crate) fn room_found(&self) -> Option<(u64, Option<Room>)> {
        self.room
    }

    pub(crate) fn note_room(&mut self, size: u64, room: Option<Room>) {
        self.room = Some((size, room));
    }

    /// The index by address, if a block of this size is in it.
    fn by_address(&mut self, size: u64) -> Option<&mut FreeIndex> {
        let by_address = self.by_address.as_mut()?;
        (size >= by_address.least).then_some(&mut by_address.free)
    }

    /// All unmapped blocks, lowest address first.
    pub(crate) fn unmapped(&self) -> impl Iterator<Item = (u64, BlockId)> {
        self.unmapped.iter().map(|(&address, &id)| (address, id))
    }

    /// The unmapped block that begins at `address`, or else the last one before it.
    pub(crate) fn unmapped_at(&self, address: u64) -> Option<BlockId> {
        self.unmapped.range(..=address).next_back().map(|(_, &id)| id)
    }

    pub(crate) fn insert_free(&mut self, size: u64, address: u64, id: BlockId) {
        let new = self.free.insert(size, address, id);
        debug_assert!(new, "a block is in the free index once");
        if let Some(by_address) = self.by_address(size) {
            by_address.insert(address, size, id);
        }
        self.room = None;
        self.stats.freed(size);
    }

    pub(crate) fn remove_free(&mut self, size: u64, address: u64) {
        let removed = self.free.remove(size, address);
        debug_assert!(removed, "a free block is in the free index");
        if let Some(by_address) = self.by_address(size) {
            by_address.remove(address, size);
        }
        self.room = None;
        self.stats.taken(size, || self.free.largest());
    }

    pub(crate) fn insert_unmapped(&mut self, address: u64, id: BlockId) {
        let before = self.unmapped.insert(address, id);
        debug_assert!(before.is_none(), "a block is in the unmapped index once");
        self.room = None;
    }

    pub(crate) fn remove_unmapped(&mut self, address: u64) {
        let removed = self.unmapped.remove(&address);
        debug_assert!(removed.is_some(), "an unmapped block is in the unmapped index");
        self.room = None;
    }

    /// Gives back what its indexes do not need.
    fn shrink(&mut self) {
        self.free.shrink();
        if let Some(by_address) = &mut self.by_address {
            by_address.free.shrink();
        }
    }

    /// Segments of the lane that are still held.
    pub(crate) fn segments(&self) -> u32 {
        self.segments
    }

    /// Addresses of the segments that pages come and go behind.
    pub(crate) fn addresses(&self) -> u64 {
        self.addresses
    }

    /// Addresses were reserved for pages of the lane.
    pub(crate) fn addresses_came(&mut self, bytes: u64) {
        self.addresses += bytes;
    }

    /// Addresses were given back.
    pub(crate) fn addresses_went(&mut self, bytes: u64) {
        self.addresses -= bytes;
    }

    /// A block is handed out.
    pub(crate) fn activated(&mut self, address: u64, size: u64) {
        self.stats.activated(size);
        self.live ^= FxBuildHasher.hash_one((address, size));
    }

    /// A block that was handed out is free.
    pub(crate) fn deactivated(&mut self, address: u64, size: u64) {
        self.stats.deactivated(size);
        self.live ^= FxBuildHasher.hash_one((address, size));
    }

    /// What is live, and where, in one number.
    pub(crate) fn live(&self) -> u64 {
        self.live
    }

    pub(crate) fn stats(&self) -> &LaneStats {
        &self.stats
    }
}

/// One pool.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) id: PoolId,
    pub(crate) small: bool,
    /// Searches so far, counted only while garbage collection is on: the clock of block ages.
    pub(crate) searches: u64,
    /// Segments made for this pool that are still held.
    segments: u32,
    lanes: BTreeMap<StreamId, Lane>,
}

impl Pool {
    pub(crate) fn lane(&self, stream: StreamId) -> Option<&Lane> {
        self.lanes.get(&stream)
    }

    pub(crate) fn lane_if_any(&mut self, stream: StreamId) -> Option<&mut Lane> {
        self.lanes.get_mut(&stream)
    }

    /// Segments made for this pool that are still held.
    pub(crate) fn segments(&self) -> u32 {
        self.segments
    }

    /// A segment is made for a stream.
    pub(crate) fn segment_came(&mut self, stream: StreamId, lanes: &Lanes) {
        self.segments += 1;
        self.lane_or_new(stream, lanes).segments += 1;
    }

    /// A segment of a stream is held no more; with its last one, the lane goes.
    pub(crate) fn segment_went(&mut self, stream: StreamId, lanes: &Lanes) {
        self.segments -= 1;
        let lane = self.lane_mut(stream);
        lane.segments -= 1;
        if lane.segments == 0
            && let Some(lane) = self.lanes.remove(&stream)
        {
            debug_assert!(lane.free.is_empty() && lane.unmapped.is_empty() && lane.live == 0);
            lanes.close(&lane.stats);
        }
    }

    /// The lane of a stream that holds memory of this pool.
    pub(crate) fn lane_mut(&mut self, stream: StreamId) -> &mut Lane {
        self.lanes.get_mut(&stream).expect("the stream has a lane in this pool")
    }

    /// The lane of a stream, made if the stream holds nothing of this pool.
    fn lane_or_new(&mut self, stream: StreamId, lanes: &Lanes) -> &mut Lane {
        self.lanes.entry(stream).or_insert_with(|| Lane {
            free: FreeIndex::default(),
            by_address: None,
            unmapped: BTreeMap::new(),
            segments: 0,
            addresses: 0,
            room: None,
            live: 0,
            is_shared: false,
            stats: lanes.open(stream, self.id, self.small),
        })
    }

    /// All lanes, in order of their streams.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = (StreamId, &Lane)> {
        self.lanes.iter().map(|(&stream, lane)| (stream, lane))
    }

    /// All free blocks, by stream, size and address.
    pub(crate) fn free_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.lanes.values().flat_map(|lane| lane.free().iter().map(|(_, _, id)| id))
    }
}

/// What sets a private pool apart.
#[derive(Debug)]
pub(crate) struct PrivatePool {
    /// How many captures and owners use it. At zero its memory may be given back.
    pub(crate) uses: u32,
    /// When the last use was released: graphs that were launched before may still run.
    pub(crate) released: Option<Moment>,
    pub(crate) small: PoolIndex,
    pub(crate) large: PoolIndex,
    /// Its blocks are never split.
    pub(crate) no_split: bool,
}

impl PrivatePool {
    /// Nobody uses it any more, from `released` on.
    pub(crate) fn release_all(&mut self, released: Moment) {
        self.uses = 0;
        self.released.get_or_insert(released);
    }
}

/// All pools.
#[derive(Debug)]
pub(crate) struct PoolTable {
    pools: Table<Pool>,
    pub(crate) private: BTreeMap<PoolId, PrivatePool>,
    /// Private pools that may serve the default pool's requests before anything is given back.
    pub(crate) use_on_oom: BTreeSet<PoolId>,
}

impl PoolTable {
    /// The default small pool.
    pub(crate) const SMALL: PoolIndex = PoolIndex::new(0);
    /// The default large pool.
    pub(crate) const LARGE: PoolIndex = PoolIndex::new(1);
    /// What is in host memory.
    pub(crate) const SPILL: PoolIndex = PoolIndex::new(2);

    pub(crate) fn new() -> Self {
        let mut table =
            Self { pools: Table::default(), private: BTreeMap::new(), use_on_oom: BTreeSet::new() };
        let small = table.open(PoolId::DEFAULT, true);
        let large = table.open(PoolId::DEFAULT, false);
        let spill = table.open(PoolId::DEFAULT, false);
        debug_assert_eq!((small, large, spill), (Self::SMALL, Self::LARGE, Self::SPILL));
        table
    }

    fn open(&mut self, id: PoolId, small: bool) -> PoolIndex {
        let lanes = BTreeMap::new();
        self.pools.insert(Pool { id, small, searches: 0, segments: 0, lanes })
    }

    /// Makes a private pool with one use.
    pub(crate) fn open_private(&mut self, id: PoolId) {
        let (small, large) = (self.open(id, true), self.open(id, false));
        self.private
            .insert(id, PrivatePool { uses: 1, released: None, small, large, no_split: false });
    }

    /// Forgets a private pool that holds no segment any more.
    pub(crate) fn close_private(&mut self, id: PoolId) {
        let pool = self.private.remove(&id).expect("a known private pool");
        self.use_on_oom.remove(&id);
        for index in [pool.small, pool.large] {
            let gone = self.pools.remove(index);
            debug_assert!(gone.lanes.is_empty(), "lanes go with their last segment");
        }
    }

    /// Gives back what the tables do not need.
    pub(crate) fn shrink(&mut self) {
        self.pools.shrink();
        let lanes = self.pools.iter_mut().flat_map(|(_, pool)| pool.lanes.values_mut());
        lanes.for_each(Lane::shrink);
    }

    /// Every pool, default first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PoolIndex, &Pool)> {
        self.pools.iter()
    }

    /// The pool for requests of the other half, of the same private pool or of the default.
    pub(crate) fn other_half(&self, index: PoolIndex) -> PoolIndex {
        let Pool { id, small, .. } = self[index];
        match self.private.get(&id) {
            Some(private) => {
                if small {
                    private.large
                } else {
                    private.small
                }
            }
            None => {
                if small {
                    Self::LARGE
                } else {
                    Self::SMALL
                }
            }
        }
    }

    /// Whether blocks of this pool must stay whole.
    pub(crate) fn is_no_split(&self, index: PoolIndex) -> bool {
        index > Self::SPILL
            && self.private.get(&self[index].id).is_some_and(|private| private.no_split)
    }
}

impl Index<PoolIndex> for PoolTable {
    type Output = Pool;

    fn index(&self, index: PoolIndex) -> &Pool {
        &self.pools[index]
    }
}

impl IndexMut<PoolIndex> for PoolTable {
    fn index_mut(&mut self, index: PoolIndex) -> &mut Pool {
        &mut self.pools[index]
    }
}
