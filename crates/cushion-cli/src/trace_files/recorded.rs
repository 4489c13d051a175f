//! Messages about a recorded run that ran out of memory itself, when no capacity is given.
//!
//! Such a replay has no limit, so its success says nothing about the card that refused the run. The
//! messages say so first, with the figures of that moment, and say which capacity to give.

use cushion_core::size::{MIB, display};
use cushion_trace::{Origin, RecordedOom, Room};

/// Says what happened, without a capital and a full stop.
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

/// Says how much was live, reserved and free at that moment, as far as it is known.
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

/// What a replay without a limit proves.
pub(crate) const NOTHING_SAID: &str =
    "the replay has no limit and skips that request: it says nothing about the card it ran on";

/// Says which capacity to give.
pub(crate) fn what_to_do(oom: &RecordedOom) -> Vec<String> {
    let capacity = capacity(oom.room);
    match oom.room {
        Room::Device(_) => vec![format!(
            "to find out what fits that card, give --capacity {capacity}: the memory that the run \
             held and that was free"
        )],
        Room::Limit { at_least, below } => vec![
            format!(
                "more was free than requested: the run had a limit, of at least {} and below {}",
                display(at_least),
                display(below)
            ),
            format!(
                "to find out what fits it, give that limit, or --capacity {capacity}, the least it \
                 can have been"
            ),
        ],
        _ => vec![format!(
            "to find out what fits that card, give the memory it leaves to the allocator, as \
             --capacity {capacity}"
        )],
    }
}

/// Returns a capacity to type: rounded to whole MiB, but still too small for the refused request.
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
