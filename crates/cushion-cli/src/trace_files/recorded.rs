//! What is said of a recorded run that itself ran out of memory, where no capacity is given.
//!
//! Such a replay has no limit: that it passes says nothing about the card on which the run was refused
//! memory. So that is said first, with the figures of that moment, and how to find out.

use cushion_core::size::{MIB, display};
use cushion_trace::{Origin, RecordedOom, Room};

/// What happened, without a capital and a full stop.
pub(crate) fn what_happened(oom: &RecordedOom, origin: Origin) -> String {
    let who = if origin == Origin::Torch { "PyTorch" } else { "its allocator" };
    let more = match oom.count {
        1 => String::new(),
        count => format!("; it was the first of {count} refusals"),
    };
    format!(
        "the recorded run ran out of memory: at event {} {who} refused a request of {}, {}{more}",
        oom.event,
        display(oom.requested),
        held(oom.live, oom.reserved, oom.device_free)
    )
}

/// What was held and free at that moment, as far as it is known.
pub(crate) fn held(live: u64, reserved: Option<u64>, device_free: Option<u64>) -> String {
    let mut text = format!("with {} live", display(live));
    if let Some(reserved) = reserved {
        text += &format!(" and {} reserved", display(reserved));
    }
    if let Some(free) = device_free {
        text += &format!("; {} of the device were free", display(free));
    }
    text
}

/// What a replay without a limit is worth then.
pub(crate) const NOTHING_SAID: &str =
    "without a limit that request is passed over: that says nothing about the card it ran on";

/// How to find out: which capacity to give.
pub(crate) fn what_to_do(oom: &RecordedOom) -> Vec<String> {
    let capacity = capacity(oom.room);
    match oom.room {
        Room::Device(_) => vec![format!(
            "to find out what fits that card, give --capacity {capacity}: what the run held and what \
             was free"
        )],
        Room::Limit { at_least, below } => vec![
            format!(
                "more was free than was asked for: the run had a limit, of at least {} and below {}",
                display(at_least),
                display(below)
            ),
            format!(
                "to find out what fits it, give that limit, or --capacity {capacity}, the least it can \
                 have been"
            ),
        ],
        _ => vec![format!(
            "to find out what fits that card, give what it leaves the allocator, as --capacity \
             {capacity}"
        )],
    }
}

/// A capacity to type: rounded to whole MiB, without letting the refused request in.
fn capacity(room: Room) -> String {
    match room {
        Room::Device(bytes) if bytes >= MIB => format!("{}MiB", bytes / MIB),
        Room::Limit { at_least, below }
            if at_least.checked_next_multiple_of(MIB).is_some_and(|bytes| bytes < below) =>
        {
            format!("{}MiB", at_least.div_ceil(MIB))
        }
        room => room.capacity().map_or_else(|| "24GiB".to_owned(), |bytes| format!("{bytes}B")),
    }
}
