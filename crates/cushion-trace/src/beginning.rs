//! What was held before the first event.
//!
//! PyTorch keeps the last so many events, so most traces begin in the middle of a run. What it held at
//! that moment can be worked out from both ends: the file has all segments and blocks as they were at
//! its last event, and every event changes them in a way that can be undone.
//!
//! - A segment was there if walking back from the final ones, over each event that got or gave back
//!   memory, leaves it.
//! - A block was live if the trace frees it without having allocated it, or if it is live at the end
//!   and the trace did not allocate it.
//! - Everything else in those segments was free, and neighbouring free blocks are always one.
//! - The size of a live block is the final one where it lived to the end. Else it is what was asked for,
//!   rounded, together with what follows it up to the next block if that is too little for PyTorch to
//!   have split off. A neighbour that was freed before the trace begins leaves that open: then the
//!   next allocation behind the block shows where it ends.

use std::collections::BTreeMap;

use cushion_core::size::{GIB, MIN_BLOCK, SMALL_REQUEST, SMALL_SEGMENT, block_size, display};
use cushion_core::{HeldBlock, HeldSegment, Options, PoolId, StreamId};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::events::Events;
use crate::snapshot::{Action, BlockState, Event, Segment};

/// Free memory of a large plain segment is split off a block only if it is more than this.
const LEAST_LARGE_REST: u64 = SMALL_REQUEST;

/// What was held before the first event.
#[derive(Debug, Clone, Default)]
pub(crate) struct Beginning {
    /// By address.
    pub(crate) segments: Vec<Start>,
    /// By address. Their places are their slots.
    pub(crate) blocks: Vec<StartBlock>,
    /// What was found that cannot have been, and left out.
    pub(crate) left_out: u64,
    /// Blocks whose size had to be taken as what was asked for, rounded, because the segment they were
    /// in is not known.
    pub(crate) homeless: u64,
    /// Blocks that may have been up to 1 MiB longer than they are taken to be.
    pub(crate) unsettled: u64,
}

/// A segment that was there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) stream: u64,
    pub(crate) small: bool,
    /// If pages came and went behind it: where the range begins that it is a part of.
    pub(crate) range: Option<u64>,
    /// Its pool, where the file says.
    pub(crate) pool: Option<PoolId>,
    /// Its blocks, as a range of [`Beginning::blocks`].
    pub(crate) blocks: (usize, usize),
}

/// A block that was live, or given back but waiting for another stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StartBlock {
    pub(crate) address: u64,
    /// Zero until it is known.
    pub(crate) size: u64,
    pub(crate) requested: u64,
    pub(crate) stream: u64,
    pub(crate) pending: bool,
}

impl Beginning {
    /// What the events and the final segments say.
    pub(crate) fn of(events: &Events, segments: &[&Segment], options: &Options) -> Self {
        let mut changes = Vec::new();
        let mut blocks = Opening::default();
        for (index, event) in events.iter().enumerate() {
            match event.action {
                Action::SegmentAlloc
                | Action::SegmentFree
                | Action::SegmentMap
                | Action::SegmentUnmap => changes.push(event),
                _ => blocks.take(&event, index == 0),
            }
        }
        let mut beginning = Self { blocks: blocks.finish(segments), ..Self::default() };
        beginning.left_out += beginning.drop_overlaps();
        beginning.segments = walk_back(&changes, segments);
        beginning.left_out += beginning.drop_impossible();
        beginning.settle(options, events);
        beginning.left_out += beginning.drop_absurd();
        beginning.find_ranges(&changes, events);
        beginning
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.blocks.is_empty()
    }

    /// Live bytes, as asked for.
    pub(crate) fn live(&self) -> u64 {
        self.blocks.iter().map(|block| block.requested).fold(0, u64::saturating_add)
    }

    /// Bytes of all segments.
    pub(crate) fn reserved(&self) -> u64 {
        self.segments.iter().map(|segment| segment.size).fold(0, u64::saturating_add)
    }

    /// What could not be known, in words.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.is_empty() {
            notes.push(format!(
                "the trace begins in the middle of a run: {} live in {} blocks and {} reserved in \
                 {} segments before its first event are rebuilt from its end",
                display(self.live()),
                self.blocks.len(),
                display(self.reserved()),
                self.segments.len()
            ));
        }
        if self.homeless > 0 {
            notes.push(format!(
                "where {} of those blocks lay is not known: the file does not have their segments",
                self.homeless
            ));
        }
        if self.unsettled > 0 {
            notes.push(format!(
                "{} of those blocks may have been up to 1 MiB longer than is taken, which the file \
                 does not tell",
                self.unsettled
            ));
        }
        if self.left_out > 0 {
            notes.push(format!(
                "{} segments or blocks that contradict others in the file are left out",
                self.left_out
            ));
        }
        notes
    }

    /// Whether pages came and went behind any of it, or plain segments were there.
    pub(crate) fn has(&self, paged: bool) -> bool {
        self.segments.iter().any(|segment| segment.range.is_some() == paged)
    }

    /// The segment as the engine takes it, in this pool.
    pub(crate) fn held(&self, segment: &Start, pool: PoolId) -> HeldSegment {
        let blocks = &self.blocks[segment.blocks.0..segment.blocks.1];
        let live = |block: &StartBlock| HeldBlock {
            address: block.address,
            size: block.size,
            requested: block.requested,
        };
        HeldSegment {
            address: segment.address,
            size: segment.size,
            stream: StreamId(segment.stream),
            pool,
            small: segment.small,
            range: segment.range,
            live: blocks.iter().map(live).collect(),
        }
    }

    /// Sorts the blocks, and leaves out those that begin where another is.
    fn drop_overlaps(&mut self) -> u64 {
        let before = self.blocks.len();
        self.blocks.sort_by_key(|block| block.address);
        let mut end = 0;
        self.blocks.retain(|block| {
            let extent = block.size.max(block.requested).max(1);
            let fits = block.address >= end && block.address.checked_add(extent).is_some();
            if fits {
                end = block.address + extent;
            }
            fits
        });
        (before - self.blocks.len()) as u64
    }

    /// Leaves out segments no allocator can have held.
    fn drop_impossible(&mut self) -> u64 {
        let before = self.segments.len();
        let mut end = 0;
        self.segments.retain(|segment| {
            let own_end = segment.address.checked_add(segment.size);
            let possible = segment.address >= end
                && segment.address > 0
                && segment.size > 0
                && segment.size.is_multiple_of(MIN_BLOCK)
                && own_end.is_some();
            if possible {
                end = own_end.unwrap_or(u64::MAX);
            }
            possible
        });
        (before - self.segments.len()) as u64
    }

    /// Leaves out what would take long to put back and was never there: so much memory for small
    /// requests, in pages of 2 MiB.
    fn drop_absurd(&mut self) -> u64 {
        let before = self.segments.len();
        let most = 64 * GIB;
        self.segments.retain(|s| s.range.is_none() || !s.small || s.size <= most);
        (before - self.segments.len()) as u64
    }

    /// Finds the blocks of each segment and their sizes.
    fn settle(&mut self, options: &Options, events: &Events) {
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
                // No final segment says what it served; its own blocks may.
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
            // Blocks of odd sizes are not PyTorch's.
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

    /// Free memory is always handed out from its first address on, so the first allocation behind a
    /// block, while that lives, begins where it ends. Returns how many blocks nothing tells about.
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

    /// Finds which segments with pages behind them are parts of one reserved range, and where it
    /// begins: at the lowest address that was ever mapped. A range has room for more than the device,
    /// so two of them begin farther apart than all that was ever held.
    fn find_ranges(&mut self, changes: &[Event], events: &Events) {
        if !self.has(true) {
            return;
        }
        let room = room_at_least(self.reserved(), changes);
        let mut ranges: Vec<Range> = Vec::new();
        let mut parts = Vec::new();
        for segment in self.segments.iter().filter(|segment| segment.range.is_some()) {
            let &Start { address, size, stream, small, pool, .. } = segment;
            match ranges.last_mut() {
                Some(range)
                    if (range.stream, range.small) == (stream, small)
                        && address - range.start < room
                        && (range.pool.is_none() || pool.is_none() || range.pool == pool) =>
                {
                    range.pool = range.pool.or(pool);
                    range.mapped += size;
                }
                _ => ranges.push(Range { start: address, mapped: size, stream, small, pool }),
            }
            parts.push(ranges.len() - 1);
        }
        lower_starts(&mut ranges, changes, events, room);
        let paged = self.segments.iter_mut().filter(|segment| segment.range.is_some());
        for (segment, part) in paged.zip(parts) {
            segment.range = Some(ranges[part].start);
            segment.pool = segment.pool.or(ranges[part].pool);
        }
    }
}

/// A reserved range.
#[derive(Debug)]
struct Range {
    start: u64,
    /// Bytes with pages behind them. At zero PyTorch gives the addresses back.
    mapped: u64,
    stream: u64,
    small: bool,
    pool: Option<PoolId>,
}

/// A range began where pages are mapped later, below what was mapped at the beginning.
fn lower_starts(ranges: &mut [Range], changes: &[Event], events: &Events, room: u64) {
    let starts: Vec<u64> = ranges.iter().map(|range| range.start).collect();
    let mut served = served_small(events).into_iter();
    for event in changes {
        let above = starts.partition_point(|&start| start <= event.addr);
        let inside = |range: &&mut Range| range.mapped > 0 && event.addr - range.start < room;
        match event.action {
            Action::SegmentMap => {
                let small = served.next().flatten();
                if let Some(range) = ranges[..above].last_mut().filter(inside) {
                    range.mapped = range.mapped.saturating_add(event.size);
                } else if let Some(range) = ranges.get_mut(above)
                    && range.mapped > 0
                    && range.stream == event.stream
                    && Some(range.small) == small
                    && starts[above] - event.addr < room
                {
                    range.start = event.addr.min(range.start);
                    range.mapped = range.mapped.saturating_add(event.size);
                }
            }
            Action::SegmentUnmap => {
                let lower = |range: &&mut Range| range.mapped > 0 && range.start <= event.addr;
                let (below, others) = ranges.split_at_mut(above);
                let range = others.first_mut().filter(lower);
                if let Some(range) = range.or(below.last_mut().filter(inside)) {
                    range.mapped = range.mapped.saturating_sub(event.size);
                }
            }
            _ => {}
        }
    }
}

/// How much room a reserved range has at least: PyTorch makes it an eighth more than the device, which
/// has at least what was ever held of it.
fn room_at_least(held: u64, changes: &[Event]) -> u64 {
    let mut now = held;
    let mut most = held;
    for event in changes {
        now = match event.action {
            Action::SegmentAlloc | Action::SegmentMap => now.saturating_add(event.size),
            _ => now.saturating_sub(event.size),
        };
        most = most.max(now);
    }
    most.saturating_add(most / 8)
}

/// For each mapping, whether the request right after it was small; `None` if none came.
fn served_small(events: &Events) -> Vec<Option<bool>> {
    let mut served = Vec::new();
    let mut open = 0_usize;
    for event in events {
        match event.action {
            Action::SegmentMap => {
                served.push(None);
                open += 1;
            }
            Action::Alloc | Action::Oom => {
                let small = event.size <= SMALL_REQUEST;
                let count = served.len();
                served[count - open..].fill(Some(small));
                open = 0;
            }
            _ => {}
        }
    }
    served
}

/// Blocks that must have been there, found going forward.
#[derive(Debug, Default)]
struct Opening {
    blocks: Vec<StartBlock>,
    /// Addresses allocated by the trace and not given back.
    live: FxHashSet<u64>,
    /// Addresses given back whose free is not complete.
    waiting: FxHashSet<u64>,
}

impl Opening {
    fn take(&mut self, event: &Event, first: bool) {
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
                // The first event of a trace can be the second half of a free that did not wait.
                self.was_there(event, !first);
            }
            _ => {}
        }
    }

    fn was_there(&mut self, event: &Event, pending: bool) {
        let &Event { addr: address, size: requested, stream, .. } = event;
        self.blocks.push(StartBlock { address, size: 0, requested, stream, pending });
    }

    /// All blocks: those freed under way, and those of the final segments that no event made.
    fn finish(mut self, segments: &[&Segment]) -> Vec<StartBlock> {
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

/// The segments that are left after every change is undone, the last first.
fn walk_back(changes: &[Event], segments: &[&Segment]) -> Vec<Start> {
    let mut plain: FxHashMap<u64, Start> = FxHashMap::default();
    let mut pages = Ranges::default();
    for segment in segments {
        let start = Start {
            address: segment.address,
            size: segment.total_size,
            stream: segment.stream,
            small: !segment.large,
            range: segment.expandable.then_some(segment.address),
            pool: Some(PoolId(segment.pool.0, segment.pool.1)),
            blocks: (0, 0),
        };
        if segment.expandable {
            pages.add(start);
        } else {
            plain.insert(segment.address, start);
        }
    }
    for event in changes.iter().rev() {
        let start = |range| Start {
            address: event.addr,
            size: event.size,
            stream: event.stream,
            small: false,
            range,
            pool: None,
            blocks: (0, 0),
        };
        match event.action {
            Action::SegmentAlloc => _ = plain.remove(&event.addr),
            Action::SegmentFree => _ = plain.insert(event.addr, start(None)),
            Action::SegmentMap => pages.remove(event.addr, event.size),
            Action::SegmentUnmap => pages.add(start(Some(event.addr))),
            _ => {}
        }
    }
    let mut all: Vec<Start> = plain.into_values().chain(pages.join()).collect();
    all.sort_by_key(|segment| segment.address);
    all
}

/// Ranges with pages behind them, by address.
#[derive(Debug, Default)]
struct Ranges(BTreeMap<u64, Start>);

impl Ranges {
    fn add(&mut self, range: Start) {
        self.remove(range.address, range.size);
        if range.size > 0 {
            self.0.insert(range.address, range);
        }
    }

    /// Takes away what lies in `address..address + size`, and keeps the rest of what it cuts.
    fn remove(&mut self, address: u64, size: u64) {
        let end = address.saturating_add(size);
        let before = self.0.range(..address).next_back().map(|(&start, _)| start);
        let inside = self.0.range(address..end).map(|(&start, _)| start);
        let touched: Vec<u64> = before.into_iter().chain(inside).collect();
        for start in touched {
            let Some(range) = self.0.get(&start) else { continue };
            let range_end = range.address.saturating_add(range.size);
            if range_end <= address {
                continue;
            }
            let range = range.clone();
            self.0.remove(&start);
            if start < address {
                self.0.insert(start, Start { size: address - start, ..range.clone() });
            }
            if range_end > end {
                self.0.insert(end, Start { address: end, size: range_end - end, ..range });
            }
        }
    }

    /// The ranges; neighbours of one stream are one, as long as what is known of them agrees.
    fn join(self) -> Vec<Start> {
        let mut joined: Vec<Start> = Vec::new();
        for range in self.0.into_values() {
            match joined.last_mut() {
                Some(last)
                    if last.address.checked_add(last.size) == Some(range.address)
                        && last.stream == range.stream
                        && (last.pool.is_none()
                            || range.pool.is_none()
                            || (last.pool, last.small) == (range.pool, range.small)) =>
                {
                    last.size = last.size.saturating_add(range.size);
                    if last.pool.is_none() {
                        (last.pool, last.small) = (range.pool, range.small);
                    }
                }
                _ => joined.push(range),
            }
        }
        joined
    }
}
