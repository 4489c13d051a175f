//! A snapshot made ready for PyTorch's viewer: one whose events lead to its segments.
//!
//! Where they do not, the events that the viewer could not take back (see `consistency`) are left
//! out, and so is all that came before them. A trace without any segments, of an allocator that has
//! none, gets one for each allocation.

use std::collections::BTreeMap;

use crate::consistency::{first_consistent, inconsistencies};
use crate::events::{Events, Iter};
use crate::snapshot::{Action, Block, BlockState, Event, Segment, Settings, Snapshot};
use crate::stacks::Stacks;
use crate::write::Written;

/// From this size on PyTorch takes requests from its large pool.
const LARGE: u64 = 1 << 20;

/// What is written for the viewer.
#[derive(Debug)]
pub(crate) struct Ready<'s> {
    snapshot: &'s Snapshot,
    made_up: Option<MadeUp>,
    /// The first event that is written, for each device.
    from: Vec<usize>,
    written: Written,
}

/// In place of a snapshot's own.
#[derive(Debug, Default)]
struct MadeUp {
    segments: Vec<Segment>,
    devices: Vec<Events>,
}

impl<'s> Ready<'s> {
    pub(crate) fn of(snapshot: &'s Snapshot) -> Self {
        let mut written = Written::default();
        let mut from = vec![0; snapshot.devices.len()];
        let made_up = has_no_segments(snapshot).then(|| MadeUp::of(snapshot, &mut written));
        if made_up.is_none() {
            written.inconsistencies = inconsistencies(snapshot);
            for found in &written.inconsistencies {
                let count = snapshot.devices[found.device].len();
                from[found.device] = first_consistent(Some(found)).min(count);
            }
            written.left_out = from.iter().map(|&from| from as u64).sum();
        }
        let mut ready = Self { snapshot, made_up, from, written };
        ready.written.events = ready.devices().map(|events| events.len() as u64).sum();
        ready
    }

    pub(crate) fn into_written(self) -> Written {
        self.written
    }

    pub(crate) fn stacks(&self) -> &Stacks {
        &self.snapshot.stacks
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.snapshot.settings
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        self.made_up.as_ref().map_or(&self.snapshot.segments, |made_up| &made_up.segments)
    }

    /// The events of each device.
    pub(crate) fn devices(&self) -> impl Iterator<Item = Iter<'_>> {
        let devices = self.made_up.as_ref().map_or(&self.snapshot.devices, |made| &made.devices);
        devices.iter().zip(&self.from).map(|(events, &from)| events.iter_from(from))
    }
}

/// Whether there are allocations, but nothing they could be in.
fn has_no_segments(snapshot: &Snapshot) -> bool {
    let mut allocations = false;
    snapshot.segments.is_empty()
        && snapshot.devices.iter().flatten().all(|event| {
            allocations |= event.action == Action::Alloc;
            !matches!(
                event.action,
                Action::SegmentAlloc
                    | Action::SegmentFree
                    | Action::SegmentMap
                    | Action::SegmentUnmap
            )
        })
        && allocations
}

impl MadeUp {
    fn of(snapshot: &Snapshot, written: &mut Written) -> Self {
        let mut made_up = Self::default();
        for (device, events) in (0..).zip(&snapshot.devices) {
            let mut live = Live::default();
            let mut with_segments = Events::default();
            for event in events {
                if !live.step(event, &mut with_segments, written) {
                    written.left_out += 1;
                }
            }
            made_up.segments.extend(live.segments(device));
            made_up.devices.push(with_segments);
        }
        made_up
    }
}

/// Allocations by address, each with whether its free was asked for.
#[derive(Debug, Default)]
struct Live(BTreeMap<u64, (Event, bool)>);

impl Live {
    /// Passes an event on, with those of its segment; whether it was one that makes sense.
    fn step(&mut self, event: Event, into: &mut Events, written: &mut Written) -> bool {
        match event.action {
            Action::Alloc => {
                if event.size == 0 || self.meets(&event) {
                    return false;
                }
                self.0.insert(event.addr, (event, false));
                into.push(Event { action: Action::SegmentAlloc, ..event });
                into.push(event);
                written.segments_made_up += 1;
            }
            Action::FreeRequested => {
                let Some((alloc, asked)) = self.0.get_mut(&event.addr) else { return false };
                *asked = true;
                into.push(Event { size: alloc.size, ..event });
            }
            Action::FreeCompleted => {
                let Some((alloc, _)) = self.0.remove(&event.addr) else { return false };
                let event = Event { size: alloc.size, ..event };
                into.push(event);
                // The segment is that of the allocation, whoever frees it.
                into.push(Event { action: Action::SegmentFree, stream: alloc.stream, ..event });
            }
            _ => into.push(event),
        }
        true
    }

    /// Whether an allocation shares memory with another, as a trace cut short may say.
    fn meets(&self, event: &Event) -> bool {
        let Some(end) = event.addr.checked_add(event.size) else { return true };
        let before = self.0.range(..end).next_back();
        before.is_some_and(|(&start, (other, _))| start + other.size > event.addr)
    }

    /// What is still there, as segments.
    fn segments(self, device: u32) -> impl Iterator<Item = Segment> {
        self.0.into_iter().map(move |(address, (alloc, asked))| Segment {
            device,
            address,
            total_size: alloc.size,
            stream: alloc.stream,
            large: alloc.size > LARGE,
            pool: alloc.pool.unwrap_or_default(),
            expandable: false,
            stack: alloc.stack,
            blocks: vec![Block {
                address,
                size: alloc.size,
                requested_size: alloc.size,
                state: if asked { BlockState::PendingFree } else { BlockState::Allocated },
                stack: alloc.stack,
            }],
        })
    }
}
