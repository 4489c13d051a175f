//! Pools: the blocks that serve one kind of request, kept by stream.
//!
//! A pool is small or large. It belongs to the default pool, which all requests share, or is one
//! half of a private pool (a CUDA graph's, or the user's own). Its blocks are kept by stream, in
//! one *lane* each: memory freed on a stream may be reused without waiting on that stream only.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Index, IndexMut};

use super::block::BlockId;
use super::lane::Lane;
use crate::base::names::{Moment, PoolId};
use crate::base::table::{Id, Table};
use crate::driver::StreamId;
use crate::ledger::change::Place;
use crate::ledger::lanes::Lanes;

/// The index of a pool in the table.
pub(crate) type PoolIndex = Id<Pool>;

/// Identifies the part of a pool that belongs to one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LaneId {
    pub(crate) pool: PoolIndex,
    pub(crate) stream: StreamId,
}

/// One pool.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) id: PoolId,
    pub(crate) small: bool,
    /// Searches so far, counted only while garbage collection is on. Block ages are measured in
    /// them.
    pub(super) searches: u64,
    /// Segments of this pool that are held.
    segments: u32,
    lanes: BTreeMap<StreamId, Lane>,
}

impl Pool {
    /// Returns the figures that the memory of one of its lanes counts in.
    pub(super) fn place(&self, lane: LaneId) -> Place {
        let host = lane.pool == PoolTable::SPILL;
        Place { pool: self.id, small: self.small, stream: lane.stream, host }
    }

    pub(crate) fn lane(&self, stream: StreamId) -> Option<&Lane> {
        self.lanes.get(&stream)
    }

    pub(super) fn lane_if_any(&mut self, stream: StreamId) -> Option<&mut Lane> {
        self.lanes.get_mut(&stream)
    }

    /// Returns the number of segments of this pool that are held.
    pub(crate) fn segments(&self) -> u32 {
        self.segments
    }

    /// Counts a new segment of a stream, and creates its lane if needed.
    pub(super) fn segment_added(&mut self, stream: StreamId, lanes: &Lanes) {
        self.segments += 1;
        self.lane_or_new(stream, lanes).segment_added();
    }

    /// Counts a removed segment of a stream. The lane is removed with its last segment.
    pub(super) fn segment_removed(&mut self, stream: StreamId, lanes: &Lanes) {
        self.segments -= 1;
        if self.lane_mut(stream).segment_removed()
            && let Some(lane) = self.lanes.remove(&stream)
        {
            debug_assert!(lane.is_empty());
            lanes.close(lane.stats());
        }
    }

    /// Returns the lane of a stream that holds memory of this pool.
    pub(super) fn lane_mut(&mut self, stream: StreamId) -> &mut Lane {
        self.lanes.get_mut(&stream).expect("the stream has a lane in this pool")
    }

    /// Returns the lane of a stream; creates it if the stream holds no memory of this pool.
    fn lane_or_new(&mut self, stream: StreamId, lanes: &Lanes) -> &mut Lane {
        let (id, small) = (self.id, self.small);
        self.lanes.entry(stream).or_insert_with(|| Lane::new(lanes.open(stream, id, small)))
    }

    /// Returns all lanes, in order of their streams.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = (StreamId, &Lane)> {
        self.lanes.iter().map(|(&stream, lane)| (stream, lane))
    }

    /// Returns all free blocks, by stream, size and address.
    pub(crate) fn free_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.lanes.values().flat_map(|lane| lane.free().iter().map(|(_, _, id)| id))
    }
}

/// The properties of a private pool.
#[derive(Debug)]
pub(crate) struct PrivatePool {
    /// How many captures and owners use it. At zero its memory may be given back.
    pub(crate) uses: u32,
    /// When the last use was released. Graphs launched before may still run.
    pub(crate) released: Option<Moment>,
    small: PoolIndex,
    large: PoolIndex,
    /// Whether its blocks are never split.
    pub(crate) no_split: bool,
}

impl PrivatePool {
    /// Returns one half of the pool.
    pub(crate) fn half(&self, small: bool) -> PoolIndex {
        if small { self.small } else { self.large }
    }

    /// Marks it as no longer in use, from `released` on.
    pub(crate) fn release_all(&mut self, released: Moment) {
        self.uses = 0;
        self.released.get_or_insert(released);
    }
}

/// All pools.
#[derive(Debug)]
pub(crate) struct PoolTable {
    pools: Table<Pool>,
    pub(super) private: BTreeMap<PoolId, PrivatePool>,
    /// Private pools that may serve requests of the default pool before memory is given back.
    pub(super) use_on_oom: BTreeSet<PoolId>,
}

impl PoolTable {
    /// The default small pool.
    pub(crate) const SMALL: PoolIndex = PoolIndex::new(0);
    /// The default large pool.
    pub(crate) const LARGE: PoolIndex = PoolIndex::new(1);
    /// The pool of host memory.
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

    /// Creates a private pool with one use.
    pub(crate) fn open_private(&mut self, id: PoolId) {
        let (small, large) = (self.open(id, true), self.open(id, false));
        self.private
            .insert(id, PrivatePool { uses: 1, released: None, small, large, no_split: false });
    }

    /// Removes a private pool that has no segment.
    pub(crate) fn close_private(&mut self, id: PoolId) {
        let pool = self.private.remove(&id).expect("a known private pool");
        self.use_on_oom.remove(&id);
        for index in [pool.small, pool.large] {
            let gone = self.pools.remove(index);
            debug_assert!(gone.lanes.is_empty(), "lanes go with their last segment");
        }
    }

    /// Shrinks the tables to their contents.
    pub(super) fn shrink(&mut self) {
        self.pools.shrink();
        let lanes = self.pools.iter_mut().flat_map(|(_, pool)| pool.lanes.values_mut());
        lanes.for_each(Lane::shrink);
    }

    /// Returns a private pool.
    pub(crate) fn private(&self, id: PoolId) -> Option<&PrivatePool> {
        self.private.get(&id)
    }

    /// Returns all private pools.
    pub(crate) fn privates(&self) -> impl Iterator<Item = (PoolId, &PrivatePool)> {
        self.private.iter().map(|(&id, private)| (id, private))
    }

    /// Returns the private pools that may serve requests of the default pool before memory is given
    /// back.
    pub(crate) fn use_on_oom(&self) -> impl Iterator<Item = PoolId> {
        self.use_on_oom.iter().copied()
    }

    /// Returns one half of a pool, if the pool exists.
    pub(crate) fn half(&self, id: PoolId, small: bool) -> Option<PoolIndex> {
        if id == PoolId::DEFAULT {
            return Some(Self::default_half(small));
        }
        self.private(id).map(|private| private.half(small))
    }

    /// Returns one half of the default pool.
    pub(crate) fn default_half(small: bool) -> PoolIndex {
        if small { Self::SMALL } else { Self::LARGE }
    }

    /// Returns every pool, default first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PoolIndex, &Pool)> {
        self.pools.iter()
    }

    /// Returns the other half of the same private or default pool.
    pub(crate) fn other_half(&self, index: PoolIndex) -> PoolIndex {
        let Pool { id, small, .. } = self[index];
        match self.private.get(&id) {
            Some(private) => private.half(!small),
            None => Self::default_half(!small),
        }
    }

    /// Returns whether blocks of this pool must not be split.
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
