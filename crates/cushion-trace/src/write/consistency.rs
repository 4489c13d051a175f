//! Checks whether a snapshot's events lead to its segments.
//!
//! PyTorch's viewer shows the allocator's state at an event by undoing all later events, last
//! first, starting from the segments. An event that cannot be undone, such as the free of a block
//! outside all segments, causes an error or a wrong picture. PyTorch's own files can have such
//! events if recording was switched on and off or a file was assembled. This module makes the same
//! walk and checks every step.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::model::event::{Action, Event};
use crate::model::events::{Events, Window};
use crate::model::snapshot::{BlockState, Segment, Snapshot};

/// An event that cannot be undone, or segments that contradict each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inconsistency {
    /// The device.
    pub device: usize,
    /// The event, counted from 0 in its device's trace; `None` if the segments contradict each
    /// other.
    pub event: Option<usize>,
    /// The address concerned.
    pub address: u64,
    /// The contradiction.
    pub what: &'static str,
}

impl fmt::Display for Inconsistency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, event, address, what } = self;
        match event {
            Some(event) => write!(f, "device {device}, event {event}, {address:#x}: {what}"),
            None => write!(f, "device {device}, {address:#x}: {what}"),
        }
    }
}

/// Returns the last inconsistency of each device. The viewer can show the events after it, but not
/// those before. The result is empty for a consistent snapshot.
#[must_use]
pub fn inconsistencies(snapshot: &Snapshot) -> Vec<Inconsistency> {
    let devices = snapshot.devices.iter().enumerate();
    devices.filter_map(|(device, events)| walk(device, &snapshot.segments, events)).collect()
}

/// Undoes the events of a device, last first. Returns the first contradiction.
fn walk(device: usize, segments: &[Segment], events: &Events) -> Option<Inconsistency> {
    let mut memory = Memory::default();
    let here = |segment: &&Segment| usize::try_from(segment.device) == Ok(device);
    for segment in segments.iter().filter(here) {
        if let Err((address, what)) = memory.start(segment) {
            return Some(Inconsistency { device, event: None, address, what });
        }
    }
    let mut window = Window::new(events);
    for index in (0..events.len()).rev() {
        let event = window.get(index)?;
        if let Err(what) = memory.undo(&event) {
            return Some(Inconsistency { device, event: Some(index), address: event.addr, what });
        }
    }
    None
}

/// The segments and the blocks in use at one moment.
#[derive(Debug, Default)]
struct Memory {
    /// By first address, without overlaps.
    segments: BTreeMap<u64, Range>,
    /// The first addresses of blocks in use. Each is inside a segment.
    blocks: BTreeSet<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    end: u64,
    stream: u64,
}

impl Range {
    fn of(event: &Event) -> Result<Self, &'static str> {
        Ok(Self { end: end(event.addr, event.size)?, stream: event.stream })
    }
}

impl Memory {
    /// Adds a segment of the snapshot and its blocks.
    fn start(&mut self, segment: &Segment) -> Result<(), (u64, &'static str)> {
        let at = |what| (segment.address, what);
        let end = end(segment.address, segment.total_size).map_err(at)?;
        self.add(segment.address, Range { end, stream: segment.stream }, false).map_err(at)?;
        let mut next = segment.address;
        for block in &segment.blocks {
            // The viewer ignores the addresses of blocks and takes them as contiguous.
            if block.address != next || next >= end {
                return Err((block.address, "a block that is not where the one before it ends"));
            }
            if block.state != BlockState::Inactive {
                self.blocks.insert(next);
            }
            next = next.checked_add(block.size).ok_or((next, "a block beyond all addresses"))?;
        }
        Ok(())
    }

    fn undo(&mut self, event: &Event) -> Result<(), &'static str> {
        match event.action {
            // An allocation that is neither freed nor in a segment is odd but harmless.
            Action::Alloc => {
                self.blocks.remove(&event.addr);
                Ok(())
            }
            Action::FreeRequested if self.blocks.contains(&event.addr) => Ok(()),
            Action::FreeRequested => Err("a free was requested for a block that is not in use"),
            Action::FreeCompleted if self.is_held(event.addr) => {
                self.blocks.insert(event.addr);
                Ok(())
            }
            Action::FreeCompleted => Err("a block was freed where no segment is"),
            Action::SegmentFree | Action::SegmentUnmap => {
                let range = Range::of(event)?;
                self.add(event.addr, range, event.action == Action::SegmentUnmap)
            }
            Action::SegmentAlloc => self.remove(event, true),
            Action::SegmentMap => self.remove(event, false),
            Action::Snapshot | Action::Oom | Action::Annotate | Action::Other => Ok(()),
        }
    }

    fn is_held(&self, address: u64) -> bool {
        let before = self.segments.range(..=address).next_back();
        before.is_some_and(|(_, range)| address < range.end)
    }

    /// Adds a segment. With `merge`, adjacent segments of the same stream become one.
    fn add(&mut self, start: u64, mut range: Range, merge: bool) -> Result<(), &'static str> {
        let after = self.segments.range(start..).next().map(|(&start, &range)| (start, range));
        if let Some((next, _)) = after
            && next < range.end
        {
            return Err("a segment was returned to the driver where another one is");
        }
        let before =
            self.segments.range(..start).next_back().map(|(&start, &range)| (start, range));
        if let Some((_, previous)) = before
            && previous.end > start
        {
            return Err("a segment was returned to the driver where another one is");
        }
        if merge
            && let Some((next, after)) = after
            && next == range.end
            && after.stream == range.stream
        {
            range.end = after.end;
            self.segments.remove(&next);
        }
        if merge
            && let Some((previous, before)) = before
            && before.end == start
            && before.stream == range.stream
        {
            self.segments.insert(previous, Range { end: range.end, ..before });
        } else {
            self.segments.insert(start, range);
        }
        Ok(())
    }

    /// Removes a range of a segment; with `whole`, the range must be the whole segment.
    fn remove(&mut self, event: &Event, whole: bool) -> Result<(), &'static str> {
        let (start, range) = (event.addr, Range::of(event)?);
        let holder = self.segments.range(..=start).next_back();
        let holder = holder.map(|(&start, &range)| (start, range));
        let Some((first, held)) = holder.filter(|(_, held)| range.end <= held.end) else {
            return Err("a segment was allocated that does not exist later");
        };
        if whole && (first, held.end) != (start, range.end) {
            return Err("a segment was allocated that has another size later");
        }
        if self.blocks.range(start..range.end).next().is_some() {
            return Err("a segment was allocated after a block in it");
        }
        self.segments.remove(&first);
        if first < start {
            self.segments.insert(first, Range { end: start, ..held });
            if range.end < held.end {
                // The viewer gives the upper remainder the event's stream.
                self.segments.insert(range.end, Range { end: held.end, ..range });
            }
        } else if range.end < held.end {
            self.segments.insert(range.end, held);
        }
        Ok(())
    }
}

fn end(start: u64, size: u64) -> Result<u64, &'static str> {
    match start.checked_add(size) {
        Some(end) if end > start => Ok(end),
        _ => Err("a segment of zero bytes, or beyond all addresses"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::settings::Settings;
    use crate::model::snapshot::{Block, Origin};
    use crate::model::stacks::Stacks;

    const MIB: u64 = 1 << 20;

    fn event(action: Action, addr: u64, size: u64) -> Event {
        Event { action, addr, size, stream: 0, time_us: 0, pool: None, stack: None }
    }

    /// Returns a segment with blocks of these sizes; the flag says whether a block is in use.
    fn segment(address: u64, blocks: &[(u64, bool)]) -> Segment {
        let mut next = address;
        let blocks: Vec<Block> = blocks
            .iter()
            .map(|&(size, used)| {
                let state = if used { BlockState::Allocated } else { BlockState::Inactive };
                next += size;
                Block { address: next - size, size, requested_size: size, state, stack: None }
            })
            .collect();
        Segment {
            device: 0,
            address,
            total_size: next - address,
            stream: 0,
            large: true,
            pool: (0, 0),
            expandable: false,
            stack: None,
            blocks,
        }
    }

    fn found(segments: Vec<Segment>, events: &[Event]) -> Vec<(Option<usize>, &'static str)> {
        let devices = vec![events.iter().copied().collect()];
        let settings = Settings::default();
        let stacks = Stacks::default();
        let snapshot = Snapshot { segments, devices, settings, stacks, origin: Origin::Torch };
        inconsistencies(&snapshot).iter().map(|found| (found.event, found.what)).collect()
    }

    #[test]
    fn a_complete_trace_is_consistent() {
        let (low, high) = (64 * MIB, 128 * MIB);
        let events = [
            event(Action::SegmentAlloc, low, 20 * MIB),
            event(Action::Alloc, low, 5 * MIB),
            event(Action::SegmentMap, high, 4 * MIB),
            event(Action::SegmentMap, high + 4 * MIB, 2 * MIB),
            event(Action::Alloc, high, 6 * MIB),
            event(Action::FreeRequested, low, 5 * MIB),
            event(Action::Snapshot, 0, 0),
            event(Action::FreeCompleted, low, 5 * MIB),
            event(Action::SegmentFree, low, 20 * MIB),
            event(Action::FreeRequested, high, 6 * MIB),
            event(Action::FreeCompleted, high, 6 * MIB),
            event(Action::SegmentUnmap, high + 2 * MIB, 2 * MIB),
            event(Action::Alloc, high, 2 * MIB),
        ];
        let left =
            vec![segment(high, &[(2 * MIB, true)]), segment(high + 4 * MIB, &[(2 * MIB, false)])];
        assert_eq!(found(left.clone(), &events), []);
        // The last events of the trace are consistent with the same segments.
        for from in 0..events.len() {
            assert_eq!(found(left.clone(), &events[from..]), [], "from {from}");
        }
        // Without the unmap in the middle, the trace would end with one segment.
        let unmapped = [&events[..11], &events[12..]].concat();
        let (first, what) = found(left, &unmapped)[0];
        assert_eq!((first, what), (Some(2), "a segment was allocated that does not exist later"));
    }

    #[test]
    fn an_event_that_cannot_be_undone_is_reported() {
        let address = 64 * MIB;
        let here = || vec![segment(address, &[(MIB, true), (MIB, false)])];
        for (action, at, size, what) in [
            (Action::FreeRequested, address + MIB, MIB, "not in use"),
            (Action::FreeCompleted, address + 2 * MIB, MIB, "where no segment is"),
            (Action::SegmentAlloc, address, 2 * MIB, "after a block in it"),
            (Action::SegmentAlloc, address, MIB, "another size later"),
            (Action::SegmentAlloc, address + 4 * MIB, MIB, "does not exist later"),
            (Action::SegmentMap, address + MIB, 2 * MIB, "does not exist later"),
            (Action::SegmentMap, address, MIB, "after a block in it"),
            (Action::SegmentFree, address + MIB, MIB, "where another one is"),
            (Action::SegmentUnmap, address - MIB, 2 * MIB, "where another one is"),
            (Action::SegmentUnmap, address + 2 * MIB, 0, "zero bytes"),
            (Action::SegmentFree, u64::MAX, 2, "beyond all addresses"),
        ] {
            let events = [
                event(Action::Oom, 7, 7),
                event(action, at, size),
                event(Action::Alloc, address, MIB / 2),
            ];
            let events = if what == "after a block in it" { &events[..2] } else { &events[..] };
            let found = found(here(), events);
            let [(Some(1), said)] = found[..] else { panic!("{action:?}: {found:?}") };
            assert!(said.contains(what), "{action:?}: {said}");
        }
        // Undoing the map of a free range leaves the rest of the segment.
        assert_eq!(found(here(), &[event(Action::SegmentMap, address + MIB, MIB)]), []);
    }

    #[test]
    fn contradicting_segments_are_reported() {
        let twice = vec![segment(MIB, &[(MIB, false)]), segment(MIB, &[(MIB, false)])];
        assert!(matches!(found(twice, &[])[..], [(None, _)]));
        let mut gap = segment(MIB, &[(512, true), (512, true)]);
        gap.blocks[1].address += 512;
        let what = "a block that is not where the one before it ends";
        assert_eq!(found(vec![gap], &[]), [(None, what)]);
        // Segments of different devices do not contradict each other.
        let mut other = segment(MIB, &[(MIB, true)]);
        other.device = 1;
        assert_eq!(found(vec![segment(MIB, &[(MIB, true)]), other], &[]), []);
    }
}
