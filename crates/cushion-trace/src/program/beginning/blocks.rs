//! The blocks that were live before the first event.

use std::collections::BTreeMap;

use cushion_core::Options;
use cushion_core::size::{MIN_BLOCK, SMALL_REQUEST, SMALL_SEGMENT, block_size};
use rustc_hash::FxHashSet;

use super::{Beginning, StartBlock};
use crate::model::event::{Action, Event};
use crate::model::events::Events;
use crate::model::snapshot::{BlockState, Segment};

/// A block in a large plain segment is split only if the rest is larger than this.
const LEAST_LARGE_REST: u64 = SMALL_REQUEST;

impl Beginning {
    /// Finds the blocks of each segment and their sizes.
    pub(super) fn settle(&mut self, options: &Options, events: &Events) {
        let mut open = BTreeMap::new();
        let rounded = |block: &StartBlock| match block.size {
            0 => block_size(block.requested, options).unwrap_or(u64::MAX),
            known => known,
        };
        for segment in &mut self.segments {
            let end = segment.address + segment.size;
            let first = self.blocks.partition_point(|block| block.address < segment.address);
            let last = self.blocks.partition_point(|block| block.address < end);
            segment.blocks = (first, last);
            if segment.pool.is_none() {
                // No final segment tells its kind; its blocks may.
                let in_it = &self.blocks[first..last];
                segment.small = match in_it.first() {
                    Some(block) => rounded(block) <= SMALL_REQUEST,
                    None if segment.range.is_some() => {
                        !segment.size.is_multiple_of(options.large_segment_size)
                    }
                    None => segment.size == SMALL_SEGMENT,
                };
            }
            for index in first..last {
                let after = self.blocks[..last].get(index + 1).map_or(end, |next| next.address);
                let block = &mut self.blocks[index];
                let room = after - block.address;
                if block.size == 0 {
                    let size = rounded(block).min(room);
                    let rest = room - size;
                    let unsplit = segment.range.is_none()
                        && !segment.small
                        && (rest <= LEAST_LARGE_REST
                            || options.max_split_size.is_some_and(|most| size >= most));
                    block.size = if unsplit { room } else { size };
                    if segment.range.is_none() && !segment.small && !unsplit {
                        open.insert(block.address, (index, after));
                    }
                }
                block.size = block.size.min(room);
                block.requested = block.requested.min(block.size);
                block.stream = segment.stream;
            }
        }
        self.unsettled = self.see_ends(open, events);
        for block in self.blocks.iter_mut().filter(|block| block.size == 0) {
            self.homeless += 1;
            block.size = rounded(block);
        }
        for segment in &mut self.segments {
            // PyTorch's blocks are multiples of `MIN_BLOCK`.
            let odd = |block: &StartBlock| {
                !block.size.is_multiple_of(MIN_BLOCK)
                    || !(block.address - segment.address).is_multiple_of(MIN_BLOCK)
            };
            let (first, last) = segment.blocks;
            if self.blocks[first..last].iter().any(odd) {
                segment.blocks = (first, first);
                self.homeless += (last - first) as u64;
            }
        }
    }

    /// Finds the ends of the blocks in `open`. Free memory is handed out from its first address on,
    /// so the first allocation behind a live block begins at the end of that block. Returns the
    /// number of blocks whose end remains unknown.
    fn see_ends(&mut self, mut open: BTreeMap<u64, (usize, u64)>, events: &Events) -> u64 {
        let mut unsettled = 0;
        for event in events {
            if open.is_empty() {
                break;
            }
            match event.action {
                Action::Alloc => {
                    let behind = open.range(..event.addr).next_back();
                    if let Some((&address, &(index, after))) = behind
                        && event.addr < after
                    {
                        let block = &mut self.blocks[index];
                        let rest = event.addr.saturating_sub(address + block.size);
                        if rest <= LEAST_LARGE_REST {
                            block.size = (event.addr - address).max(block.size);
                        }
                        open.remove(&address);
                    }
                }
                Action::FreeRequested | Action::FreeCompleted => {
                    unsettled += u64::from(open.remove(&event.addr).is_some());
                }
                _ => {}
            }
        }
        unsettled + open.len() as u64
    }
}

/// Finds the blocks that must have been live, going forward through the events.
#[derive(Debug, Default)]
pub(super) struct Opening {
    blocks: Vec<StartBlock>,
    /// Addresses that the trace allocated and did not free.
    live: FxHashSet<u64>,
    /// Addresses whose free is requested but not complete.
    waiting: FxHashSet<u64>,
}

impl Opening {
    pub(super) fn take(&mut self, event: &Event, first: bool) {
        match event.action {
            Action::Alloc => {
                self.live.insert(event.addr);
            }
            Action::FreeRequested => {
                if !self.live.remove(&event.addr) {
                    self.was_there(event, false);
                }
                self.waiting.insert(event.addr);
            }
            Action::FreeCompleted
                if !self.waiting.remove(&event.addr) && !self.live.remove(&event.addr) =>
            {
                // The first event of a trace can complete a free that did not wait.
                self.was_there(event, !first);
            }
            _ => {}
        }
    }

    fn was_there(&mut self, event: &Event, pending: bool) {
        let &Event { addr: address, size: requested, stream, .. } = event;
        self.blocks.push(StartBlock { address, size: 0, requested, stream, pending });
    }

    /// Returns all blocks: those that the trace frees, and those of the final segments that no
    /// event allocated.
    pub(super) fn finish(mut self, segments: &[&Segment]) -> Vec<StartBlock> {
        for segment in segments {
            for block in &segment.blocks {
                let made = self.live.contains(&block.address);
                let (known, pending) = match block.state {
                    BlockState::Allocated => (made, false),
                    BlockState::PendingFree => {
                        (made || self.waiting.contains(&block.address), true)
                    }
                    BlockState::Inactive => (true, false),
                };
                if !known && block.address > 0 {
                    self.blocks.push(StartBlock {
                        address: block.address,
                        size: block.size,
                        requested: block.requested_size,
                        stream: segment.stream,
                        pending,
                    });
                }
            }
        }
        self.blocks
    }
}
