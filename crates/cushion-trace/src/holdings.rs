//! Holdings: recorded segments, each from the event that got it to the one that gave it back.
//!
//! One address can belong to many segments over time, so a segment is known by the order in which
//! PyTorch got it. A range that pages come and go behind is one holding as long as any page is there.

use std::collections::BTreeMap;

use crate::beginning::Beginning;
use crate::events::Events;
use crate::snapshot::{Action, Event};

/// A holding, numbered in the order of its first event. Those that were there before the trace
/// begins come first.
pub(crate) type HoldingId = usize;

/// The holdings at one point of a trace.
#[derive(Debug, Clone, Default)]
pub(crate) struct Holdings {
    alive: BTreeMap<u64, Holding>,
    count: HoldingId,
}

#[derive(Debug, Clone, Copy)]
struct Holding {
    id: HoldingId,
    /// The highest address it ever reached.
    end: u64,
    /// Bytes with pages behind them; `None` for a plain segment.
    mapped: Option<u64>,
}

impl Holdings {
    /// The holdings before the first event, and the holding of each segment that was there.
    pub(crate) fn before(beginning: &Beginning) -> (Self, Vec<HoldingId>) {
        let mut start = Self::default();
        let mut ids = Vec::with_capacity(beginning.segments.len());
        for segment in &beginning.segments {
            let end = segment.address.saturating_add(segment.size);
            let known = segment.range.and_then(|range| start.alive.get_mut(&range));
            if let Some(Holding { id, end: known_end, mapped: Some(mapped) }) = known {
                *known_end = end.max(*known_end);
                *mapped = mapped.saturating_add(segment.size);
                ids.push(*id);
                continue;
            }
            ids.push(start.count);
            let from = segment.range.unwrap_or(segment.address);
            start.insert(from, end - from, segment.range.map(|_| segment.size));
        }
        (start, ids)
    }

    /// Moves past an event.
    pub(crate) fn take(&mut self, event: &Event) {
        let &Event { addr: address, size, .. } = event;
        match event.action {
            Action::SegmentAlloc => {
                // Addresses of a range can be used again once it is gone, which no event tells.
                if let Some((start, _)) = self.find(address) {
                    self.alive.remove(&start);
                }
                self.insert(address, size, None);
            }
            Action::SegmentMap => match self.alive.range_mut(..=address).next_back() {
                // Pages are mapped at the lowest free place, so a place beyond all that was ever
                // mapped is another range.
                Some((_, Holding { end, mapped: Some(mapped), .. })) if address <= *end => {
                    *end = address.saturating_add(size).max(*end);
                    *mapped = mapped.saturating_add(size);
                }
                _ => self.insert(address, size, Some(size)),
            },
            Action::SegmentFree => {
                self.alive.remove(&address);
            }
            Action::SegmentUnmap => {
                if let Some((start, Holding { mapped: Some(mapped), .. })) = self.find(address) {
                    let left = mapped.saturating_sub(size);
                    if left == 0 {
                        self.alive.remove(&start);
                    } else if let Some(holding) = self.alive.get_mut(&start) {
                        holding.mapped = Some(left);
                    }
                }
            }
            _ => {}
        }
    }

    /// The holding that an address lies in.
    pub(crate) fn at(&self, address: u64) -> Option<HoldingId> {
        self.find(address).map(|(_, holding)| holding.id)
    }

    /// Whether an address lies in a range that pages come and go behind.
    pub(crate) fn is_paged(&self, address: u64) -> bool {
        self.find(address).is_some_and(|(_, holding)| holding.mapped.is_some())
    }

    /// How many holdings there were so far.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Where the ranges begin that pages come and go behind.
    pub(crate) fn paged_starts(&self) -> impl Iterator<Item = u64> {
        self.alive.iter().filter(|(_, holding)| holding.mapped.is_some()).map(|(&start, _)| start)
    }

    /// How far from `start` the nearest ranges begin, before and after it, that pages come and go
    /// behind.
    pub(crate) fn gaps(&self, start: u64) -> impl Iterator<Item = u64> {
        let paged = |&(_, holding): &(&u64, &Holding)| holding.mapped.is_some();
        let before = self.alive.range(..start).next_back().filter(paged);
        let after = self.alive.range(start.saturating_add(1)..).next().filter(paged);
        before.into_iter().chain(after).map(move |(&other, _)| other.abs_diff(start))
    }

    fn find(&self, address: u64) -> Option<(u64, Holding)> {
        let (&start, &holding) = self.alive.range(..=address).next_back()?;
        (address < holding.end).then_some((start, holding))
    }

    fn insert(&mut self, address: u64, size: u64, mapped: Option<u64>) {
        let (id, end) = (self.count, address.saturating_add(size));
        self.count += 1;
        self.alive.insert(address, Holding { id, end, mapped });
    }
}

/// The event and holding of each allocation of a trace.
pub(crate) fn requests(
    events: &Events,
    start: &Holdings,
) -> impl Iterator<Item = (usize, HoldingId)> {
    let mut holdings = start.clone();
    events.iter().enumerate().filter_map(move |(index, event)| {
        holdings.take(&event);
        let is_request = event.action == Action::Alloc;
        Some((index, holdings.at(event.addr).filter(|_| is_request)?))
    })
}
