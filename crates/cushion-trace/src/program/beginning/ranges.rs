//! The reserved address ranges that expandable segments belonged to.

use cushion_core::PoolId;
use cushion_core::size::SMALL_REQUEST;

use super::{Beginning, Start};
use crate::model::event::{Action, Event};
use crate::model::events::Events;

impl Beginning {
    /// Groups the mapped ranges by the reserved range they belong to, and finds its start: the
    /// lowest address that was ever mapped. A reserved range is larger than the device, so two of
    /// them begin farther apart than all memory that was ever held.
    pub(super) fn find_ranges(&mut self, changes: &[Event], events: &Events) {
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

/// A reserved address range.
#[derive(Debug)]
struct Range {
    start: u64,
    /// Mapped bytes. At zero PyTorch releases the addresses.
    mapped: u64,
    stream: u64,
    small: bool,
    pool: Option<PoolId>,
}

/// Lowers the starts of ranges in which the trace maps pages below those of the beginning.
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

/// Returns the least size of a reserved range. PyTorch makes it an eighth larger than the device,
/// and the device has at least the most memory that was ever held.
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

/// Returns for each mapping whether the request right after it was small; `None` if there was none.
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
