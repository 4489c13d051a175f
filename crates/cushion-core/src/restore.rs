//! Putting an allocator back into a state it was in: segments where they lay, live blocks where they
//! were in them, everything else free.
//!
//! A recorded run rarely begins at its beginning. Whoever knows what was held at some moment can go
//! on from there, with the same memory found by the same requests.

use std::collections::BTreeMap;

use crate::block::{BlockId, BlockState};
use crate::driver::{Driver, DriverError, StreamId};
use crate::history::Tag;
use crate::locked::{Locked, State};
use crate::owner::Owner;
use crate::policy::{Policy, Request, Source};
use crate::pool::{PoolId, PoolTable};
use crate::segment::Backing;
use crate::size::{MIN_BLOCK, SMALL_SEGMENT};

/// Memory that was held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldSegment {
    /// Where it began.
    pub address: u64,
    /// Its size.
    pub size: u64,
    /// The stream it belonged to.
    pub stream: StreamId,
    /// The pool it belonged to; a private one is made with one use.
    pub pool: PoolId,
    /// Whether it served small requests.
    pub small: bool,
    /// If pages came and went behind it: where the reserved range began that it is a part of.
    pub range: Option<u64>,
    /// The live blocks in it, in address order. What lies between them was free.
    pub live: Vec<HeldBlock>,
}

/// A block that was live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldBlock {
    /// Where it began.
    pub address: u64,
    /// Its size.
    pub size: u64,
    /// What was asked for.
    pub requested: u64,
}

/// A reserved range, as far as it was held.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct HeldRange {
    /// Whether its pages are not as large as PyTorch's; then they are as small as the device has them.
    finely: bool,
    /// Bytes from where it began to where the last segment in it ended.
    reach: u64,
}

/// Why a segment was not put back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// No allocator can have held this.
    #[error("no allocator can have held the segment at {address:#x}: {what}")]
    Impossible {
        /// Where it began.
        address: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The device has no room for it.
    #[error("the device has no room for the segment of {size} bytes at {address:#x}")]
    Full {
        /// Where it began.
        address: u64,
        /// Its size.
        size: u64,
    },
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl HeldSegment {
    /// Whether it can have been.
    fn check(&self) -> Result<(), &'static str> {
        if self.size == 0 || !self.size.is_multiple_of(MIN_BLOCK) {
            return Err("its size is no multiple of 512 bytes");
        }
        let end = self.address.checked_add(self.size).ok_or("its end is beyond 64 bits")?;
        let mut at = self.address;
        for block in &self.live {
            let block_end = block.address.checked_add(block.size).filter(|&it| it <= end);
            if block.address < at || block_end.is_none() {
                return Err("its blocks overlap or leave it");
            }
            let aligned = |size: u64| size.is_multiple_of(MIN_BLOCK);
            if block.size == 0 || !aligned(block.size) || !aligned(block.address - self.address) {
                return Err("a block is no multiple of 512 bytes");
            }
            if block.requested > block.size {
                return Err("a block is smaller than what was asked for");
            }
            at = block.address + block.size;
        }
        Ok(())
    }
}

impl<D: Driver> Locked<'_, D> {
    /// The reserved ranges that these segments are parts of, by where they began.
    pub(crate) fn held_ranges(&self, segments: &[HeldSegment]) -> BTreeMap<u64, HeldRange> {
        let mut ranges: BTreeMap<u64, HeldRange> = BTreeMap::new();
        for held in segments {
            let Some(start) = held.range else { continue };
            let page_size =
                if held.small { SMALL_SEGMENT } else { self.state.options.large_segment_size };
            let page_size = page_size.next_multiple_of(self.device.granularity);
            let offset = held.address.saturating_sub(start);
            let range = ranges.entry(start).or_default();
            range.finely |=
                !held.size.is_multiple_of(page_size) || !offset.is_multiple_of(page_size);
            range.reach = range.reach.max(offset.saturating_add(held.size));
        }
        ranges
    }

    /// Puts a segment back; returns where it begins now. `range` is the reserved range that it is a part of, and
    /// `range_at` where that begins now, if another segment of it was put back before.
    pub(crate) fn restore(
        &mut self,
        held: &HeldSegment,
        range: HeldRange,
        range_at: Option<u64>,
    ) -> Result<u64, RestoreError> {
        let impossible = |what| RestoreError::Impossible { address: held.address, what };
        held.check().map_err(impossible)?;
        let full = RestoreError::Full { address: held.address, size: held.size };
        if held.size > self.device.total {
            return Err(full);
        }
        let pool = if held.pool == PoolId::DEFAULT {
            if held.small { PoolTable::SMALL } else { PoolTable::LARGE }
        } else {
            if !self.state.pools.private.contains_key(&held.pool) {
                self.state.pools.open_private(held.pool);
            }
            let private = &self.state.pools.private[&held.pool];
            if held.small { private.small } else { private.large }
        };
        let request = |bytes, requested| Request {
            requested,
            size: bytes,
            wanted: bytes,
            stream: held.stream,
            pool,
            small: held.small,
            owner: Owner::NOBODY,
        };
        let whole = request(held.size, held.size);
        let free = match held.range {
            None => self.plain_segment(held.size, &whole, Policy::Segments, Tag::NONE)?,
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
        let base = self.state.blocks[free].address;
        // Everything up to the last live block is taken from the front, piece by piece, and the
        // pieces between live blocks are freed again.
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

    /// Takes the first bytes of a free block, which keeps its identity as long as any are left.
    fn take_exactly(&mut self, free: BlockId, request: &Request) -> u64 {
        let splits = self.state.blocks[free].size > request.size;
        self.take(free, splits, request, Tag::NONE)
    }

    /// Puts pages behind a part of a reserved range, and returns the free block there.
    fn restore_pages(
        &mut self,
        request: &Request,
        offset: u64,
        range: HeldRange,
        range_at: Option<u64>,
    ) -> Result<Option<BlockId>, RestoreError> {
        let impossible = |what| RestoreError::Impossible { address: 0, what };
        let policy = Policy::Expandable;
        let start = match range_at {
            Some(start) => start,
            None => {
                let view = self.state.view(self.device);
                let Source::Reserve { bytes, page_size } =
                    policy.rules().source(view, None, request)
                else {
                    unreachable!("with no lane there is nothing to extend");
                };
                let fewer = self.addresses_as_pytorch(request, bytes, page_size);
                let bytes = range.reach.max(fewer).min(bytes).next_multiple_of(page_size);
                let page_size = if range.finely { self.device.granularity } else { page_size };
                let backing = Backing::Pages { page_size };
                let made = self.paged_segment(bytes, backing, request, policy, Tag::NONE)?;
                let Some(made) = made else { return Ok(None) };
                self.state.blocks[made].address
            }
        };
        let address = start.checked_add(offset).ok_or_else(|| impossible("its end is too high"))?;
        let lane = self.state.pools[request.pool].lane(request.stream);
        let taken = || impossible("its range is taken, or too small for it");
        let unmapped = lane
            .and_then(|lane| lane.unmapped_at(address))
            .filter(|&id| {
                let end = address.checked_add(request.size);
                end.is_some_and(|end| end <= self.state.blocks[id].end())
            })
            .ok_or_else(taken)?;
        let State { blocks, segments, pools, .. } = &mut *self.state;
        let segment = &segments[blocks[unmapped].segment];
        // Pages with a home are another range's.
        let Backing::Pages { page_size } = segment.backing else { return Err(taken()) };
        if segment.address != start
            || !offset.is_multiple_of(page_size)
            || !request.size.is_multiple_of(page_size)
        {
            return Err(impossible(
                "it is not made of whole pages; what `paged` had at second addresses is not put back",
            ));
        }
        let low = blocks[unmapped].address;
        if address > low {
            let front = blocks.split_front(unmapped, address - low, BlockState::Unmapped);
            let lane = pools[request.pool].lane_mut(request.stream);
            lane.remove_unmapped(low);
            lane.insert_unmapped(low, front);
            lane.insert_unmapped(address, unmapped);
        }
        if !self.map_block(unmapped, request.size, Tag::NONE)? {
            return Ok(None);
        }
        let free = &self.state.blocks[unmapped];
        if (free.address, free.size) != (address, request.size) {
            return Err(impossible("it touches another part of its range"));
        }
        Ok(Some(unmapped))
    }
}
