//! Restoring the state of an allocator: segments at their addresses, live blocks in them,
//! everything else free.
//!
//! A recorded run rarely begins at its beginning. With the memory held at some moment, a replay can
//! start there, and requests find the same memory.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use super::Engine;
use crate::base::names::{Owner, PolicyIndex, PoolId, Tag};
use crate::base::size::{MIN_BLOCK, SMALL_SEGMENT};
use crate::core::Locked;
use crate::driver::{Driver, DriverError, StreamId};
use crate::heap::block::BlockId;
use crate::heap::pool::LaneId;
use crate::heap::segment::Kind;
use crate::memory::Request;
use crate::options::Policy;
use crate::policy::segment_for;

/// A segment that was held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldSegment {
    /// Its start.
    pub address: u64,
    /// Its size.
    pub size: u64,
    /// Its stream.
    pub stream: StreamId,
    /// Its pool. A private pool is created with one use.
    pub pool: PoolId,
    /// Whether it served small requests.
    pub small: bool,
    /// For a segment of pages: the start of the reserved range that contains it.
    pub range: Option<u64>,
    /// The live blocks in it, in address order. The memory between them was free.
    pub live: Vec<HeldBlock>,
}

/// A block that was live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldBlock {
    /// Its start.
    pub address: u64,
    /// Its size.
    pub size: u64,
    /// The requested bytes.
    pub requested: u64,
}

/// A reserved range, as far as it was held.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct HeldRange {
    /// Whether its pages are not of PyTorch's size. Then they have the smallest size of the device.
    finely: bool,
    /// Bytes from its start to the end of the last segment in it.
    reach: u64,
}

/// Why a segment was not restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// No allocator can have held this segment.
    #[error("no allocator can have held the segment at {address:#x}: {what}")]
    Impossible {
        /// Its start.
        address: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The device has no room for it.
    #[error("the device has no room for the segment of {size} bytes at {address:#x}")]
    Full {
        /// Its start.
        address: u64,
        /// Its size.
        size: u64,
    },
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl HeldSegment {
    /// Checks that an allocator can have held it.
    fn check(&self) -> Result<(), &'static str> {
        if self.size == 0 || !self.size.is_multiple_of(MIN_BLOCK) {
            return Err("its size is not a multiple of 512 bytes");
        }
        let end = self.address.checked_add(self.size).ok_or("its end is beyond 64 bits")?;
        let mut at = self.address;
        for block in &self.live {
            let block_end = block.address.checked_add(block.size).filter(|&it| it <= end);
            if block.address < at || block_end.is_none() {
                return Err("its blocks overlap or lie outside it");
            }
            let aligned = |size: u64| size.is_multiple_of(MIN_BLOCK);
            if block.size == 0 || !aligned(block.size) || !aligned(block.address - self.address) {
                return Err("a block is not aligned to 512 bytes");
            }
            if block.requested > block.size {
                return Err("a block is smaller than its request");
            }
            at = block.address + block.size;
        }
        Ok(())
    }
}

impl<D: Driver> Engine<D> {
    /// Restores the memory that an allocator held at some moment: its segments, the live blocks in
    /// them, and free memory between. Calls `placing` before each segment that takes addresses from
    /// the driver. Returns the new start of each segment, or why it could not be restored.
    pub fn restore(
        &self,
        segments: &[HeldSegment],
        mut placing: impl FnMut(&HeldSegment),
    ) -> Vec<Result<u64, RestoreError>> {
        let mut ranges_at: FxHashMap<u64, u64> = FxHashMap::default();
        let ranges = self.shared.locked(|core| core.held_ranges(segments));
        let mut put_back = |held: &HeldSegment| {
            let range_at = held.range.and_then(|range| ranges_at.get(&range).copied());
            if range_at.is_none() {
                placing(held);
            }
            let range = held.range.and_then(|range| ranges.get(&range).copied());
            let range = range.unwrap_or_default();
            let base = self.shared.locked(|mut core| core.restore(held, range, range_at))?;
            if let Some(range) = held.range {
                ranges_at.insert(range, base - (held.address - range));
            }
            Ok(base)
        };
        segments.iter().map(&mut put_back).collect()
    }
}

impl<D: Driver> Locked<'_, D> {
    /// Returns the reserved ranges that contain these segments, by their start.
    pub(crate) fn held_ranges(&self, segments: &[HeldSegment]) -> BTreeMap<u64, HeldRange> {
        let mut ranges: BTreeMap<u64, HeldRange> = BTreeMap::new();
        for held in segments {
            let Some(start) = held.range else { continue };
            let page_size =
                if held.small { SMALL_SEGMENT } else { self.mem.options.large_segment_size };
            let page_size = page_size.next_multiple_of(self.mem.device.granularity);
            let offset = held.address.saturating_sub(start);
            let range = ranges.entry(start).or_default();
            range.finely |=
                !held.size.is_multiple_of(page_size) || !offset.is_multiple_of(page_size);
            range.reach = range.reach.max(offset.saturating_add(held.size));
        }
        ranges
    }

    /// Restores a segment; returns its new start. `range` is the reserved range that contains it,
    /// and `range_at` the new start of that range, if another segment of it was restored before.
    pub(crate) fn restore(
        &mut self,
        held: &HeldSegment,
        range: HeldRange,
        range_at: Option<u64>,
    ) -> Result<u64, RestoreError> {
        let impossible = |what| RestoreError::Impossible { address: held.address, what };
        held.check().map_err(impossible)?;
        let full = RestoreError::Full { address: held.address, size: held.size };
        if held.size > self.mem.device.total {
            return Err(full);
        }
        if held.pool != PoolId::DEFAULT && self.mem.heap.pools().private(held.pool).is_none() {
            self.mem.heap.open_private(held.pool);
        }
        let pool = self.mem.heap.pools().half(held.pool, held.small).expect("opened just now");
        let request = |bytes, requested| Request {
            requested,
            size: bytes,
            wanted: bytes,
            lane: LaneId { pool, stream: held.stream },
            small: held.small,
            owner: Owner::NOBODY,
            tag: Tag::NONE,
        };
        let whole = request(held.size, held.size);
        let free = match held.range {
            None => {
                let policy = PolicyIndex::from(Policy::Segments);
                self.mem.plain_segment(held.size, &whole, policy)?
            }
            Some(start) => {
                let offset = held.address.checked_sub(start);
                let offset = offset.ok_or_else(|| impossible("it lies before its range"))?;
                self.restore_pages(&whole, offset, range, range_at).map_err(
                    |error| match error {
                        RestoreError::Impossible { what, .. } => impossible(what),
                        other => other,
                    },
                )?
            }
        };
        let free = free.ok_or(full)?;
        let base = self.mem.heap[free].address;
        // Everything up to the last live block is taken from the front, block by block, and the
        // gaps between live blocks are freed again.
        let mut at = held.address;
        let mut gaps = Vec::new();
        for block in &held.live {
            if block.address > at {
                let gap = block.address - at;
                gaps.push(self.take_exactly(free, &request(gap, gap)));
            }
            self.take_exactly(free, &request(block.size, block.requested));
            at = block.address + block.size;
        }
        for gap in gaps {
            let freed = self.free(gap, Owner::NOBODY, Tag::NONE);
            debug_assert!(freed.is_ok(), "taken a moment ago");
        }
        Ok(base)
    }

    /// Takes the first bytes of a free block. The rest, if any, keeps the block's id.
    fn take_exactly(&mut self, free: BlockId, request: &Request) -> u64 {
        let splits = self.mem.heap[free].size > request.size;
        self.mem.take(free, splits, request)
    }

    /// Maps pages behind a part of a reserved range, and returns the free block there.
    fn restore_pages(
        &mut self,
        request: &Request,
        offset: u64,
        range: HeldRange,
        range_at: Option<u64>,
    ) -> Result<Option<BlockId>, RestoreError> {
        let impossible = |what| RestoreError::Impossible { address: 0, what };
        let start = match range_at {
            Some(start) => start,
            None => {
                let (bytes, page_size) = segment_for(&self.mem, request);
                let fewer = self.mem.addresses_as_pytorch(request, bytes, page_size);
                let bytes = range.reach.max(fewer).min(bytes).next_multiple_of(page_size);
                let page_size = if range.finely { self.mem.device.granularity } else { page_size };
                let (kind, policy) =
                    (Kind::Pages { page_size }, PolicyIndex::from(Policy::Expandable));
                let made = self.mem.reserve_segment(bytes, kind, request, policy)?;
                let Some(made) = made else { return Ok(None) };
                self.mem.heap[made].address
            }
        };
        let address = start.checked_add(offset).ok_or_else(|| impossible("its end is too high"))?;
        let lane = self.mem.heap.lane(request.lane);
        let taken = || impossible("its range is taken, or too small for it");
        let unmapped = lane
            .and_then(|lane| lane.unmapped_at(address))
            .filter(|&id| {
                let end = address.checked_add(request.size);
                end.is_some_and(|end| end <= self.mem.heap[id].end())
            })
            .ok_or_else(taken)?;
        let segment = self.mem.heap.segment_of(unmapped);
        // Homes belong to another policy.
        let Kind::Pages { page_size } = segment.kind else { return Err(taken()) };
        if segment.address != start
            || !offset.is_multiple_of(page_size)
            || !request.size.is_multiple_of(page_size)
        {
            return Err(impossible(
                "it is not made of whole pages; stitches of `paged` are not restored",
            ));
        }
        self.mem.heap.split_unmapped(unmapped, address);
        if !self.mem.map_equal_pages(unmapped, request.size, page_size, Tag::NONE)? {
            return Ok(None);
        }
        let free = &self.mem.heap[unmapped];
        if (free.address, free.size) != (address, request.size) {
            return Err(impossible("it touches another part of its range"));
        }
        Ok(Some(unmapped))
    }
}
