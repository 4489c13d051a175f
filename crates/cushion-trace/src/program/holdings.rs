//! Holdings: recorded segments, each from the event that allocated it to the event that released
//! it.
//!
//! One address can belong to many segments over time, so a segment is identified by the order of
//! allocation. An expandable segment is one holding as long as any of its pages is mapped.

use std::collections::BTreeMap;

use super::beginning::Beginning;
use crate::model::event::{Action, Event};
use crate::model::events::Events;

/// The number of a holding, in the order of first events. Holdings from before the trace come
/// first.
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
    /// The highest end address so far.
    end: u64,
    /// Mapped bytes; `None` for a plain segment.
    mapped: Option<u64>,
}

impl Holdings {
    /// Returns the holdings before the first event, and the holding of each segment of the
    /// beginning.
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

    /// Applies an event.
    pub(crate) fn take(&mut self, event: &Event) {
        let &Event { addr: address, size, .. } = event;
        match event.action {
            Action::SegmentAlloc => {
                // A range is released without an event, after which its addresses can be reused.
                if let Some((start, _)) = self.find(address) {
                    self.alive.remove(&start);
                }
                self.insert(address, size, None);
            }
            Action::SegmentMap => match self.alive.range_mut(..=address).next_back() {
                // Pages are mapped at the lowest free address, so an address beyond all mapped
                // pages belongs to another range.
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

    /// Returns the holding of an address.
    pub(crate) fn at(&self, address: u64) -> Option<HoldingId> {
        self.find(address).map(|(_, holding)| holding.id)
    }

    /// Returns whether an address is in an expandable segment.
    pub(crate) fn is_paged(&self, address: u64) -> bool {
        self.find(address).is_some_and(|(_, holding)| holding.mapped.is_some())
    }

    /// Returns the number of holdings so far.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Iterates over the starts of expandable segments.
    pub(crate) fn paged_starts(&self) -> impl Iterator<Item = u64> {
        self.alive.iter().filter(|(_, holding)| holding.mapped.is_some()).map(|(&start, _)| start)
    }

    /// Iterates over the distances from `start` to the starts of the nearest expandable segments,
    /// before and after it.
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

/// Iterates over the event and the holding of each allocation of a trace.
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
