//! One device of a snapshot, and the program made of it.

use cushion_core::size::SMALL_SEGMENT;
use cushion_core::{Options, Policy};

use super::Program;
use super::beginning::Beginning;
use super::builder::{Builder, Skipped};
use super::device::device_total;
use super::holdings::{HoldingId, Holdings};
use super::labels::Labels;
use super::options::options_of;
use super::streams::spread_over_streams;
use crate::model::event::Action;
use crate::model::events::Events;
use crate::model::snapshot::{Origin, Segment, Snapshot};

/// The recording of one device.
pub(crate) struct Recording<'a> {
    pub(crate) events: &'a Events,
    /// The holdings before the first event.
    pub(crate) start: Holdings,
    beginning: Beginning,
    /// The holding of each segment of the beginning.
    beginning_ids: Vec<HoldingId>,
    options: Options,
    origin: Origin,
    device_total: Option<u64>,
}

impl<'a> Recording<'a> {
    /// Reads the settings and works out the beginning. Appends notes for the user to `notes`.
    pub(crate) fn new(
        snapshot: &Snapshot,
        events: &'a Events,
        segments: &[&Segment],
        notes: &mut Vec<String>,
    ) -> Self {
        let options = options_of(&snapshot.settings, notes);
        let beginning = Beginning::of(events, segments, &options);
        notes.extend(beginning.notes());
        let (start, beginning_ids) = Holdings::before(&beginning);
        Self {
            events,
            device_total: device_total(events, &start),
            start,
            beginning_ids,
            beginning,
            options,
            origin: snapshot.origin,
        }
    }

    /// Returns whether a trial can follow PyTorch without knowing its limit. It can if PyTorch
    /// always released all cached memory at once.
    pub(crate) fn can_be_followed(&self) -> bool {
        self.options.max_split_size.is_none() && self.options.garbage_collection_threshold == 0.0
    }

    /// Returns the cost of a replay in events, including the restoring of the beginning page by
    /// page.
    pub(crate) fn effort(&self) -> u64 {
        let pages = self.beginning.segments.iter().map(|segment| {
            segment.size
                / if segment.small { SMALL_SEGMENT } else { self.options.large_segment_size }
        });
        let pages = pages.fold(0, u64::saturating_add);
        (self.events.len() as u64).saturating_add(pages.saturating_mul(64))
    }

    /// Makes the program with these pools.
    pub(crate) fn program(&self, labels: &Labels) -> Program {
        let events = self.events;
        let mut seen = [self.beginning.has(false), self.beginning.has(true)];
        let mut allocs = 0;
        for event in events {
            allocs += usize::from(event.action == Action::Alloc);
            seen[0] |= event.action == Action::SegmentAlloc;
            seen[1] |= event.action == Action::SegmentMap;
        }
        let [plain, maps] = seen;
        let recorded = self.options.policy == Policy::Expandable;
        let expandable = if maps == plain { recorded } else { maps };
        let policy = if expandable { Policy::Expandable } else { Policy::Segments };
        let mut builder = Builder::new(events, labels, &self.start, expandable, allocs);
        builder.begin(&self.beginning);
        builder.run();
        let (mut steps, Skipped { unknown_frees, overlaps }) = builder.finish();
        spread_over_streams(steps.rare_steps_mut());
        let mut notes = Vec::new();
        if unknown_frees > 0 {
            notes.push(format!(
                "{unknown_frees} frees of memory that was not allocated are left out"
            ));
        }
        if overlaps > 0 {
            notes.push(format!(
                "{overlaps} allocations begin where another is still live; the older one counts as \
                 freed"
            ));
        }
        let pools = self.beginning_ids.iter().map(|&id| labels.pool(id)).collect();
        Program {
            events: events.len() as u64,
            allocs: steps.requests().len() as u64,
            steps,
            beginning: self.beginning.clone(),
            beginning_pools: pools,
            options: self.options.clone(),
            policy,
            origin: self.origin,
            device_total: self.device_total,
            oom: None,
            notes,
        }
    }
}
