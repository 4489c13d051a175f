//! Prepares a snapshot for PyTorch's viewer, which needs events that lead to the segments.
//!
//! If the viewer cannot undo an event (see `consistency`), that event and all events before it are
//! left out. A trace without segments, of an allocator that has none, gets one segment for each
//! allocation.

use std::collections::BTreeMap;

use super::Written;
use super::consistency::inconsistencies;
use crate::model::event::{Action, Event};
use crate::model::events::{Events, Iter};
use crate::model::settings::Settings;
use crate::model::snapshot::{Block, BlockState, Segment, Snapshot};
use crate::model::stacks::Stacks;

/// PyTorch serves requests above this size from its large pool.
const LARGE: u64 = 1 << 20;

/// A snapshot that is ready for the viewer.
#[derive(Debug)]
pub(crate) struct Ready<'s> {
    snapshot: &'s Snapshot,
    made_up: Option<MadeUp>,
    /// The first event to write, for each device.
    from: Vec<usize>,
    written: Written,
}

/// Segments and events in place of the snapshot's own.
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
                // No event can be undone from segments that contradict each other.
                from[found.device] = found.event.map_or(count, |event| event + 1);
            }
            written.left_out = from.iter().map(|&from| from as u64).sum();
        }
        let mut ready = Self { snapshot, made_up, from, written };
        ready.written.events = ready.devices().map(|events| events.len() as u64).sum();
        ready
    }

    /// Returns the whole snapshot, consistent or not.
    #[cfg(test)]
    pub(crate) fn whole(snapshot: &'s Snapshot) -> Self {
        let from = vec![0; snapshot.devices.len()];
        Self { snapshot, made_up: None, from, written: Written::default() }
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

    /// Iterates over the events of each device.
    pub(crate) fn devices(&self) -> impl Iterator<Item = Iter<'_>> {
        let devices = self.made_up.as_ref().map_or(&self.snapshot.devices, |made| &made.devices);
        devices.iter().zip(&self.from).map(|(events, &from)| events.iter_from(from))
    }
}

/// Returns whether the snapshot has allocations but no segments.
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

/// Live allocations by address, each with whether its free was requested.
#[derive(Debug, Default)]
struct Live(BTreeMap<u64, (Event, bool)>);

impl Live {
    /// Appends an event and the events of its segment to `into`. Returns `false` for an impossible
    /// event, which is left out.
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
                // The segment has the allocation's stream, not that of the free.
                into.push(Event { action: Action::SegmentFree, stream: alloc.stream, ..event });
            }
            _ => into.push(event),
        }
        true
    }

    /// Returns whether an allocation overlaps another, as in a truncated trace.
    fn meets(&self, event: &Event) -> bool {
        let Some(end) = event.addr.checked_add(event.size) else { return true };
        let before = self.0.range(..end).next_back();
        before.is_some_and(|(&start, (other, _))| start + other.size > event.addr)
    }

    /// Returns the allocations that are still live, as segments.
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

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::model::snapshot::Origin;
    use crate::read::limits::Limits;
    use crate::read::open::read;
    use crate::write::{FileFormat, write_snapshot};

    fn snapshot(segments: Vec<Segment>, events: &[Event]) -> Snapshot {
        let devices = vec![events.iter().copied().collect()];
        let (settings, stacks) = (Settings::default(), Stacks::default());
        Snapshot { segments, devices, settings, stacks, origin: Origin::Torch }
    }

    fn written(snapshot: &Snapshot) -> (Written, Snapshot) {
        let mut bytes = Vec::new();
        let written = write_snapshot(snapshot, FileFormat::Pickle, &mut bytes).unwrap();
        (written, read(&bytes[..], &Limits::default()).unwrap())
    }

    fn event(action: Action, addr: u64, size: u64) -> Event {
        Event { action, addr, size, stream: 3, time_us: 9, pool: None, stack: None }
    }

    /// Generates events with few addresses and sizes, so that they overlap.
    fn any_event() -> impl Strategy<Value = Event> {
        let actions = prop::sample::select(vec![
            Action::Alloc,
            Action::Alloc,
            Action::FreeRequested,
            Action::FreeCompleted,
            Action::SegmentAlloc,
            Action::SegmentFree,
            Action::SegmentMap,
            Action::SegmentUnmap,
            Action::Oom,
        ]);
        (actions, 1..6_u64, 0..3_u64, 0..2_u64).prop_map(|(action, addr, size, stream)| Event {
            stream,
            ..event(action, addr << 20, size << 20)
        })
    }

    fn any_segment() -> impl Strategy<Value = Segment> {
        (1..6_u64, 1..3_u64, any::<bool>()).prop_map(|(address, size, used)| {
            let (address, size) = (address << 20, size << 20);
            let state = if used { BlockState::Allocated } else { BlockState::Inactive };
            Segment {
                device: 0,
                address,
                total_size: size,
                stream: 0,
                large: true,
                pool: (0, 0),
                expandable: false,
                stack: None,
                blocks: vec![Block { address, size, requested_size: size, state, stack: None }],
            }
        })
    }

    proptest! {
        #[test]
        fn written_files_are_consistent(
            events in vec(any_event(), 0..60), segments in vec(any_segment(), 0..3)
        ) {
            let given = snapshot(segments, &events);
            let (said, read) = written(&given);
            let (count, kept) = (given.devices[0].len() as u64, read.devices[0].len() as u64);
            prop_assert_eq!(said.events, kept);
            // With made-up segments, impossible events are left out one by one.
            if !has_no_segments(&given) {
                prop_assert_eq!(said.left_out + kept, count);
                let from = given.devices[0].len() - read.devices[0].len();
                let rest: Vec<Event> = given.devices[0].iter_from(from).collect();
                prop_assert_eq!(read.devices[0].iter().collect::<Vec<_>>(), rest);
            }
            let left = inconsistencies(&read);
            // Segments that contradict each other are kept as they are, without events.
            prop_assert!(left.is_empty() || (left[0].event.is_none() && kept == 0), "{:?}", left);
            // A consistent trace keeps all its events.
            prop_assert_eq!(said.left_out > 0 || said.segments_made_up > 0 || kept == count, true);
        }

        #[test]
        fn a_trace_without_segments_gets_segments(events in vec(any_event(), 1..60)) {
            let events: Vec<Event> = events
                .into_iter()
                .filter(|event| !event.action.name().starts_with("segment"))
                .collect();
            let given = snapshot(Vec::new(), &events);
            let (said, read) = written(&given);
            prop_assert_eq!(inconsistencies(&read), []);
            let allocs = |snapshot: &Snapshot, action| {
                snapshot.devices[0].iter().filter(|event| event.action == action).count() as u64
            };
            prop_assert_eq!(allocs(&read, Action::Alloc), said.segments_made_up);
            let segments = allocs(&read, Action::SegmentAlloc) - allocs(&read, Action::SegmentFree);
            prop_assert_eq!(read.segments.len() as u64, segments);
            let made = 2 * said.segments_made_up - segments;
            prop_assert_eq!(said.left_out + said.events - made, events.len() as u64);
        }
    }

    #[test]
    fn an_allocation_without_a_segment_gets_its_own() {
        let given = snapshot(
            Vec::new(),
            &[
                event(Action::Alloc, 4096, 100),
                event(Action::Alloc, 8192, 3 << 20),
                event(Action::Alloc, 4096, 100),
                event(Action::FreeRequested, 4096, 0),
                event(Action::FreeCompleted, 4096, 0),
                event(Action::FreeCompleted, 1 << 40, 1),
            ],
        );
        let (said, read) = written(&given);
        assert_eq!((said.events, said.left_out, said.segments_made_up), (7, 2, 2));
        let events: Vec<_> = read.devices[0].iter().map(|e| (e.action, e.addr, e.size)).collect();
        let large = 3 << 20;
        let expected = [
            (Action::SegmentAlloc, 4096, 100),
            (Action::Alloc, 4096, 100),
            (Action::SegmentAlloc, 8192, large),
            (Action::Alloc, 8192, large),
            (Action::FreeRequested, 4096, 100),
            (Action::FreeCompleted, 4096, 100),
            (Action::SegmentFree, 4096, 100),
        ];
        assert_eq!(events, expected);
        let [segment] = &read.segments[..] else { panic!("{:?}", read.segments) };
        assert_eq!((segment.address, segment.total_size, segment.stream), (8192, large, 3));
        assert!(segment.large && segment.blocks[0].state == BlockState::Allocated);
    }

    #[test]
    fn an_allocation_of_zero_bytes_gets_no_segment() {
        let oom = event(Action::Oom, 1 << 20, 0);
        let given = snapshot(Vec::new(), &[oom, event(Action::Alloc, 1 << 20, 0)]);
        let (said, read) = written(&given);
        assert_eq!((said.events, said.left_out, said.segments_made_up), (1, 1, 0));
        assert_eq!(read.devices[0].get(0), Some(oom));
    }

    #[test]
    fn events_before_the_last_inconsistency_are_left_out() {
        let given = snapshot(
            Vec::new(),
            &[
                event(Action::SegmentAlloc, 1 << 20, 1 << 20),
                event(Action::FreeRequested, 1 << 20, 512),
                event(Action::SegmentAlloc, 4 << 20, 1 << 20),
                event(Action::Alloc, 4 << 20, 512),
                event(Action::FreeCompleted, 4 << 20, 512),
                event(Action::SegmentFree, 4 << 20, 1 << 20),
            ],
        );
        let (said, read) = written(&given);
        assert_eq!((said.events, said.left_out), (4, 2));
        assert_eq!(said.inconsistencies[0].event, Some(1));
        assert_eq!(read.devices[0].get(0), given.devices[0].get(2));
        // Cushion's own format keeps all events.
        let mut own = Vec::new();
        let said = write_snapshot(&given, FileFormat::Cushion, &mut own).unwrap();
        assert_eq!((said.events, said.left_out), (6, 0));
        assert_eq!(read_own(&own), given);
    }

    fn read_own(bytes: &[u8]) -> Snapshot {
        read(bytes, &Limits::default()).unwrap()
    }
}
