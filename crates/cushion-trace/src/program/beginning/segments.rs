//! The segments that were held before the first event.

use std::collections::BTreeMap;

use cushion_core::PoolId;
use rustc_hash::FxHashMap;

use super::Start;
use crate::model::event::{Action, Event};
use crate::model::snapshot::Segment;

/// Undoes every change, last first. Returns the segments that are left.
pub(super) fn walk_back(changes: &[Event], segments: &[&Segment]) -> Vec<Start> {
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

/// Mapped ranges by address.
#[derive(Debug, Default)]
struct Ranges(BTreeMap<u64, Start>);

impl Ranges {
    fn add(&mut self, range: Start) {
        self.remove(range.address, range.size);
        if range.size > 0 {
            self.0.insert(range.address, range);
        }
    }

    /// Removes `address..address + size` and keeps the rest of partly covered ranges.
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

    /// Returns the ranges. Adjacent ranges of one stream become one, unless their pools differ.
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
