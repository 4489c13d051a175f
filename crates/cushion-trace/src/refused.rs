//! Where the recorded run itself ran out of memory, and how much it had then.
//!
//! A replay without a limit passes over what PyTorch refused, so it cannot say whether the run fits the
//! card it ran on. The trace can: it has what was live and reserved at that moment, and PyTorch writes
//! how much of the device was free. From these follows the capacity that stands for that card.

use cushion_core::size::{block_size, segment_size};
use rustc_hash::FxHashMap;

use crate::events::Events;
use crate::program::Program;
use crate::snapshot::{Action, Origin};
use crate::steps::Rare;

/// The first request that the recorded run was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedOom {
    /// The event, counted from 0.
    pub event: u64,
    /// Bytes asked for.
    pub requested: u64,
    /// How many requests were refused in all.
    pub count: u64,
    /// Live bytes at that moment, as asked for.
    pub live: u64,
    /// Reserved bytes at that moment, where the trace has segments.
    pub reserved: Option<u64>,
    /// Bytes of the device that were free at that moment, where the trace says.
    pub device_free: Option<u64>,
    /// How much the allocator could have had.
    pub room: Room,
}

/// How much the allocator of a recorded run could have had, as far as a refusal tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Room {
    /// The device was full: this is what the allocator held and what was free.
    Device(u64),
    /// More was free than was asked for: a limit was in force.
    Limit {
        /// The most that was reserved until then.
        at_least: u64,
        /// What the request would have come to.
        below: u64,
    },
    /// The trace does not tell.
    Unknown,
}

impl Room {
    /// The capacity that stands for it; of a limit, the least it can have been.
    #[must_use]
    pub fn capacity(self) -> Option<u64> {
        match self {
            Self::Device(bytes) | Self::Limit { at_least: bytes, .. } => Some(bytes),
            Self::Unknown => None,
        }
    }
}

impl RecordedOom {
    /// The first refusal in the events that a program was made of.
    pub(crate) fn of(program: &Program, events: &Events) -> Option<Self> {
        let refusals = program.steps.rare_steps().iter();
        let mut refusals = refusals.filter_map(|step| match *step {
            Rare::Refused { event, size, .. } => Some((event, size)),
            _ => None,
        });
        let (event, requested) = refusals.next()?;
        let count = 1 + refusals.count() as u64;
        let held = Held::before(program, events, event as usize);
        // Only PyTorch writes it: another's events have nothing there.
        let refused = events.get(event as usize).filter(|_| program.origin == Origin::Torch);
        let device_free = refused.map(|refused| refused.addr);
        let reserved = held.reserved();
        let wanted = block_size(requested, &program.options)
            .and_then(|size| segment_size(size, &program.options));
        let room = match (reserved, device_free, wanted) {
            (Some(reserved), Some(free), Some(wanted)) if free < wanted => {
                Room::Device(reserved.saturating_add(free))
            }
            (Some(reserved), Some(_), Some(wanted)) => {
                let (at_least, below) = (held.reserved_peak, reserved.saturating_add(wanted));
                // A limit that was changed under way could be anything.
                if at_least < below { Room::Limit { at_least, below } } else { Room::Unknown }
            }
            _ => Room::Unknown,
        };
        let (event, live) = (u64::from(event), held.live);
        Some(Self { event, requested, count, live, reserved, device_free, room })
    }
}

/// What the recorded allocator held.
#[derive(Debug, Default)]
struct Held {
    live: u64,
    reserved: u64,
    reserved_peak: u64,
    /// Whether the trace tells of segments.
    has_segments: bool,
}

impl Held {
    /// Right before an event.
    fn before(program: &Program, events: &Events, event: usize) -> Self {
        let beginning = &program.beginning;
        let mut held = Self {
            live: beginning.live(),
            reserved: beginning.reserved(),
            reserved_peak: beginning.reserved(),
            has_segments: !beginning.segments.is_empty(),
        };
        let blocks = beginning.blocks.iter();
        let mut live: FxHashMap<u64, u64> = blocks.map(|b| (b.address, b.requested)).collect();
        for event in events.iter().take(event) {
            match event.action {
                Action::Alloc => {
                    let old = live.insert(event.addr, event.size).unwrap_or(0);
                    held.live = held.live.saturating_sub(old).saturating_add(event.size);
                }
                Action::FreeCompleted => {
                    let freed = live.remove(&event.addr).unwrap_or(0);
                    held.live = held.live.saturating_sub(freed);
                }
                Action::SegmentAlloc | Action::SegmentMap => {
                    held.has_segments = true;
                    held.reserved = held.reserved.saturating_add(event.size);
                    held.reserved_peak = held.reserved_peak.max(held.reserved);
                }
                Action::SegmentFree | Action::SegmentUnmap => {
                    held.reserved = held.reserved.saturating_sub(event.size);
                }
                _ => {}
            }
        }
        held
    }

    /// Reserved bytes; `None` where the trace has no segments, or too few of them.
    fn reserved(&self) -> Option<u64> {
        (self.has_segments && self.reserved >= self.live).then_some(self.reserved)
    }
}
