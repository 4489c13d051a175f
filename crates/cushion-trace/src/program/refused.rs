//! The out-of-memory error of the recorded run, and the memory it had then.
//!
//! A replay without a limit skips the requests that PyTorch refused, so it does not tell whether
//! the run fits the recorded device. The trace does: it has the live and reserved bytes at that
//! moment, and PyTorch writes the free bytes of the device. The capacity of the device follows from
//! these.

use cushion_core::size::{block_size, segment_size};
use rustc_hash::FxHashMap;

use super::Program;
use super::steps::Rare;
use crate::model::event::Action;
use crate::model::events::Events;
use crate::model::snapshot::Origin;

/// The first request that PyTorch refused in the recorded run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedOom {
    /// The event, counted from 0.
    pub event: u64,
    /// The requested bytes.
    pub requested: u64,
    /// The number of refused requests.
    pub count: u64,
    /// The live bytes at that moment, as requested.
    pub live: u64,
    /// The reserved bytes at that moment, if the trace has segments.
    pub reserved: Option<u64>,
    /// The free bytes of the device at that moment, if the trace has them.
    pub device_free: Option<u64>,
    /// The memory available to the allocator.
    pub room: Room,
}

/// The memory that was available to the allocator of a recorded run, as far as a refusal tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Room {
    /// The device was full. The value is the sum of reserved and free bytes.
    Device(u64),
    /// More bytes were free than requested: a limit was in force.
    Limit {
        /// The most bytes reserved before the refusal.
        at_least: u64,
        /// The bytes that would have been reserved with the request.
        below: u64,
    },
    /// The trace does not tell.
    Unknown,
}

impl Room {
    /// Returns the capacity; for a limit, the least possible one.
    #[must_use]
    pub fn capacity(self) -> Option<u64> {
        match self {
            Self::Device(bytes) | Self::Limit { at_least: bytes, .. } => Some(bytes),
            Self::Unknown => None,
        }
    }
}

impl RecordedOom {
    /// Returns the first refusal in a program's events.
    pub(crate) fn of(program: &Program, events: &Events) -> Option<Self> {
        let refusals = program.steps.rare_steps().iter();
        let mut refusals = refusals.filter_map(|step| match *step {
            Rare::Refused { event, size, .. } => Some((event, size)),
            _ => None,
        });
        let (event, requested) = refusals.next()?;
        let count = 1 + refusals.count() as u64;
        let held = Held::before(program, events, event as usize);
        // Only PyTorch writes the free bytes.
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
                // If the limit changed during the run, nothing is known.
                if at_least < below { Room::Limit { at_least, below } } else { Room::Unknown }
            }
            _ => Room::Unknown,
        };
        let (event, live) = (u64::from(event), held.live);
        Some(Self { event, requested, count, live, reserved, device_free, room })
    }
}

/// The bytes that the recorded allocator held.
#[derive(Debug, Default)]
struct Held {
    live: u64,
    reserved: u64,
    reserved_peak: u64,
    /// Whether the trace has segments.
    has_segments: bool,
}

impl Held {
    /// Returns the bytes right before an event.
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

    /// Returns the reserved bytes; `None` if the trace has no segments or lacks some.
    fn reserved(&self) -> Option<u64> {
        (self.has_segments && self.reserved >= self.live).then_some(self.reserved)
    }
}
