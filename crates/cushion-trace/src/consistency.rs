//! Whether a snapshot's events lead to its segments.
//!
//! PyTorch's viewer shows the allocator's state at any event by taking back, from the last on, all
//! that came after it, starting from the segments. That ends in an error, or in a wrong picture, if
//! an event cannot be taken back: a free of a block that is nowhere, a segment that was not there.
//! PyTorch's own files can be like that, when recording was switched on and off or a file was put
//! together. Here the same walk is made, with every step checked.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::events::{Events, Window};
use crate::snapshot::{Action, BlockState, Event, Segment, Snapshot};

/// Something that cannot be taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inconsistency {
    /// The device.
    pub device: usize,
    /// The event, counted from 0 in its device's trace; `None` if the segments do not agree among
    /// themselves.
    pub event: Option<usize>,
    /// The address in question.
    pub address: u64,
    /// What is wrong with it.
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

/// The last inconsistency of each device: what comes after it can be shown, what is before cannot.
/// Empty for a snapshot that is consistent all through.
#[must_use]
pub fn inconsistencies(snapshot: &Snapshot) -> Vec<Inconsistency> {
    let found = walk_all(snapshot, only_default_stream(&snapshot.devices, &[]));
    // What is left of the events may be on the default stream alone, which makes a difference.
    let from: Vec<usize> = found.iter().map(|found| first_consistent(found.as_ref())).collect();
    if only_default_stream(&snapshot.devices, &from) {
        return walk_all(snapshot, true).into_iter().flatten().collect();
    }
    found.into_iter().flatten().collect()
}

/// The first event that can be shown; the count of events if none can.
pub(crate) fn first_consistent(found: Option<&Inconsistency>) -> usize {
    found.map_or(0, |found| found.event.map_or(usize::MAX, |event| event + 1))
}

fn walk_all(snapshot: &Snapshot, one_stream: bool) -> Vec<Option<Inconsistency>> {
    let devices = snapshot.devices.iter().enumerate();
    devices.map(|(device, events)| walk(device, &snapshot.segments, events, one_stream)).collect()
}

/// Whether all events, those of a device from a certain one on, are on the default stream.
fn only_default_stream(devices: &[Events], from: &[usize]) -> bool {
    devices.iter().enumerate().all(|(device, events)| {
        let from = from.get(device).copied().unwrap_or(0);
        events.iter_from(from).all(|event| event.stream == 0)
    })
}

/// Takes back the events of a device, from the last on; what could not be.
fn walk(
    device: usize,
    segments: &[Segment],
    events: &Events,
    one_stream: bool,
) -> Option<Inconsistency> {
    let mut memory = Memory { one_stream, ..Memory::default() };
    let here = |segment: &&Segment| usize::try_from(segment.device) == Ok(device);
    for segment in segments.iter().filter(here) {
        if let Err((address, what)) = memory.start(segment) {
            return Some(Inconsistency { device, event: None, address, what });
        }
    }
    let mut window = Window::new(events);
    for index in (0..events.len()).rev() {
        let event = window.get(index)?;
        if let Err(what) = memory.take_back(&event) {
            return Some(Inconsistency { device, event: Some(index), address: event.addr, what });
        }
    }
    None
}

/// Segments and the blocks in use in them, at some time.
#[derive(Debug, Default)]
struct Memory {
    /// By first address. No two overlap.
    segments: BTreeMap<u64, Range>,
    /// First addresses of blocks in use; each is in a segment.
    blocks: BTreeSet<u64>,
    /// Where all events are on the default stream the viewer takes their streams away, so that what
    /// an event brings back never joins a segment of the snapshot.
    one_stream: bool,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    end: u64,
    stream: Option<u64>,
}

impl Memory {
    /// Adds a segment of the snapshot, with its blocks.
    fn start(&mut self, segment: &Segment) -> Result<(), (u64, &'static str)> {
        let at = |what| (segment.address, what);
        let end = end(segment.address, segment.total_size).map_err(at)?;
        self.add(segment.address, Range { end, stream: Some(segment.stream) }, false)
            .map_err(at)?;
        let mut next = segment.address;
        for block in &segment.blocks {
            // The viewer takes blocks to lie one behind the other, whatever their addresses.
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

    fn take_back(&mut self, event: &Event) -> Result<(), &'static str> {
        match event.action {
            // An allocation that nobody freed and nobody holds is odd, but does no harm.
            Action::Alloc => {
                self.blocks.remove(&event.addr);
                Ok(())
            }
            Action::FreeRequested if self.blocks.contains(&event.addr) => Ok(()),
            Action::FreeRequested => Err("a free was asked for of a block that is not in use"),
            Action::FreeCompleted if self.is_held(event.addr) => {
                self.blocks.insert(event.addr);
                Ok(())
            }
            Action::FreeCompleted => Err("a block was freed where no segment is"),
            Action::SegmentFree | Action::SegmentUnmap => {
                let range = self.range(event)?;
                self.add(event.addr, range, event.action == Action::SegmentUnmap)
            }
            Action::SegmentAlloc => self.remove(event, true),
            Action::SegmentMap => self.remove(event, false),
            Action::Snapshot | Action::Oom | Action::Annotate | Action::Other => Ok(()),
        }
    }

    fn range(&self, event: &Event) -> Result<Range, &'static str> {
        let stream = (!self.one_stream).then_some(event.stream);
        Ok(Range { end: end(event.addr, event.size)?, stream })
    }

    fn is_held(&self, address: u64) -> bool {
        let before = self.segments.range(..=address).next_back();
        before.is_some_and(|(_, range)| address < range.end)
    }

    /// Adds a segment; with `merge`, it joins those it touches.
    fn add(&mut self, start: u64, mut range: Range, merge: bool) -> Result<(), &'static str> {
        let after = self.segments.range(start..).next().map(|(&start, &range)| (start, range));
        if let Some((next, _)) = after
            && next < range.end
        {
            return Err("a segment was given back where another one is");
        }
        let before =
            self.segments.range(..start).next_back().map(|(&start, &range)| (start, range));
        if let Some((_, previous)) = before
            && previous.end > start
        {
            return Err("a segment was given back where another one is");
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

    /// Removes a whole segment, or a part of one.
    fn remove(&mut self, event: &Event, whole: bool) -> Result<(), &'static str> {
        let (start, range) = (event.addr, self.range(event)?);
        let holder = self.segments.range(..=start).next_back();
        let holder = holder.map(|(&start, &range)| (start, range));
        let Some((first, held)) = holder.filter(|(_, held)| range.end <= held.end) else {
            return Err("a segment was got that is not there later");
        };
        if whole && (first, held.end) != (start, range.end) {
            return Err("a segment was got that has another size later");
        }
        if self.blocks.range(start..range.end).next().is_some() {
            return Err("a segment was got after a block in it");
        }
        self.segments.remove(&first);
        if first < start {
            self.segments.insert(first, Range { end: start, ..held });
            if range.end < held.end {
                // The viewer gives the rear part the event's stream.
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
        _ => Err("a segment of no bytes, or beyond all addresses"),
    }
}
