//! Makes a [`Program`] of a snapshot, including what needs trial replays: the private pools that
//! the trace does not name.

mod pools;

use crate::model::events::Events;
use crate::model::snapshot::{Segment, Snapshot};
use crate::program::Program;
use crate::program::labels::Labels;
use crate::program::recording::Recording;
use crate::program::refused::RecordedOom;
use crate::replay::trial::follow;

impl Program {
    /// Makes the program of one device of a snapshot. A device without events gives an empty
    /// program.
    #[must_use]
    pub fn of(snapshot: &Snapshot, device: usize) -> Self {
        let none = Events::default();
        let events = snapshot.devices.get(device).unwrap_or(&none);
        let segments: Vec<&Segment> = snapshot
            .segments
            .iter()
            .filter(|segment| usize::try_from(segment.device) == Ok(device))
            .collect();
        let mut notes = Vec::new();
        let recording = Recording::new(snapshot, events, &segments, &mut notes);
        let mut labels = Labels::recorded(events, &segments, &recording.start);
        if !labels.is_complete() && recording.can_be_followed() {
            let effort = recording.effort();
            labels = pools::infer(events, &recording.start, labels, effort, |labels| {
                follow(&recording.program(labels), events)
            });
            if labels.inferred() > 0 {
                notes.push(format!(
                    "{} segments that were released during the run are assigned to private pools \
                     by inference",
                    labels.inferred()
                ));
            }
        }
        let mut program = recording.program(&labels);
        program.notes.splice(0..0, notes);
        program.oom = RecordedOom::of(&program, events);
        program
    }
}
