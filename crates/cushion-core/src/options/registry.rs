//! The table of options: each declared once, with how it is read and shown.

use super::conf::{boolean, boolean_text, number, power_of_two, whole};
use super::{INTERVALS, MIN_LARGE_ALLOC_MIB, OptionSpec, Options, interval};
use crate::ladder::{Rung, RungSet};
use crate::policy::Policy;
use crate::size::MIB;

/// All options, in the order in which they are read and shown.
pub static REGISTRY: &[OptionSpec] = &[
    // First, because the limits below are checked against it.
    OptionSpec {
        key: "large_segment_size_mb",
        unit: "MiB",
        default: "20",
        accepts: "a whole number of MiB above 10",
        meaning: "Size of the segments that requests between 1 MiB and 10 MiB are cut from.",
        worst_case: "one small block left in a segment keeps all of it reserved, so a large value \
                     strands more memory.",
        resets: false,
        read: |options, value| {
            let mib = whole(value)?;
            if mib <= MIN_LARGE_ALLOC_MIB {
                return Err(format!("it is not above {MIN_LARGE_ALLOC_MIB}"));
            }
            options.large_segment_size = bytes(mib);
            Ok(())
        },
        show: |options| (options.large_segment_size / MIB).to_string(),
        reset: |options| options.large_segment_size = Options::default().large_segment_size,
    },
    OptionSpec {
        key: "max_split_size_mb",
        unit: "MiB",
        default: "unlimited",
        accepts: "a whole number of MiB, `large_segment_size_mb` or more",
        meaning: "Free blocks of this size or more are kept whole: no smaller request is cut from \
                  them, and they serve only requests of nearly their own size.",
        worst_case: "a program whose large sizes vary holds one unsplit block for each of them, \
                     and reserves far more than it uses.",
        resets: true,
        read: |options, value| {
            options.max_split_size = Some(at_least_a_large_segment(options, value)?);
            Ok(())
        },
        show: |options| options.max_split_size.map_or("unlimited".to_owned(), mib_text),
        reset: |options| options.max_split_size = None,
    },
    OptionSpec {
        key: "max_non_split_rounding_mb",
        unit: "MiB",
        default: "as large_segment_size_mb",
        accepts: "a whole number of MiB, `large_segment_size_mb` or more",
        meaning: "How much larger than the request a block of `max_split_size_mb` or more may be \
                  and still serve it.",
        worst_case: "that much memory is wasted inside every large block handed out.",
        resets: true,
        read: |options, value| {
            options.max_non_split_rounding = Some(at_least_a_large_segment(options, value)?);
            Ok(())
        },
        show: |options| {
            options.max_non_split_rounding.map_or("as large_segment_size_mb".to_owned(), mib_text)
        },
        reset: |options| options.max_non_split_rounding = None,
    },
    OptionSpec {
        key: "roundup_power2_divisions",
        unit: "divisions",
        default: "off",
        accepts: "a power of two, or a list such as `[256:1,512:2,>:8]` of intervals (a power of \
                  two in MiB, or `>` for those above the last one named) with their divisions (0 \
                  or a power of two)",
        meaning: "Rounds a request up to one of this many equal steps between a power of two and \
                  the next, so that sizes that differ a little can reuse the same block. An \
                  interval is named by the power of two, in MiB, at which it begins; there are 16, \
                  the first for everything below 2 MiB and the last for everything from 32 GiB. \
                  The first interval named also sets all below it; one that is not named is off; 0 \
                  and 1 are off.",
        worst_case: "with 2 divisions a request just above a power of two grows by almost half.",
        resets: true,
        read: read_divisions,
        show: |options| divisions_text(&options.roundup_power2_divisions),
        reset: |options| options.roundup_power2_divisions = [0; INTERVALS],
    },
    OptionSpec {
        key: "garbage_collection_threshold",
        unit: "fraction",
        default: "off",
        accepts: "a number above 0 and below 1",
        meaning: "Once reserved memory passes this share of the limit that \
                  `per_process_memory_fraction` sets, cached memory that has been idle longest is \
                  given back before more is taken. It does nothing while no such limit is set.",
        worst_case: "a low value gives back memory that is needed again at once, and each return \
                     may wait for the device.",
        resets: true,
        read: |options, value| {
            let share = number(value)?;
            if !(share > 0.0 && share < 1.0) {
                return Err("it is not between 0 and 1".to_owned());
            }
            options.garbage_collection_threshold = share;
            Ok(())
        },
        show: |options| match options.garbage_collection_threshold {
            0.0 => "off".to_owned(),
            share => format!("{share:?}"),
        },
        reset: |options| options.garbage_collection_threshold = 0.0,
    },
    OptionSpec {
        key: "expandable_segments",
        unit: "True or False",
        default: "False",
        accepts: "`True` or `False`",
        meaning: "`True` asks for the policy `expandable`: one address range per stream and pool that grows and \
                  shrinks page by page. `False` takes that back, and asks for no other policy.",
        worst_case: "a new peak is slower to reach, because each page is mapped by itself.",
        resets: false,
        read: |options, value| {
            options.expandable_segments = boolean(value)?;
            Ok(())
        },
        show: |options| boolean_text(Policy::of(options) == Policy::Expandable),
        reset: |options| options.expandable_segments = false,
    },
    OptionSpec {
        key: "paged",
        unit: "True or False",
        default: "True",
        accepts: "`True` or `False`",
        meaning: "`True` is the policy `paged`: pages get second addresses, so that free memory serves a request \
                  wherever it lies. `False` is `segments`, which does as PyTorch's classic allocator does, or \
                  `expandable` where the same string has `expandable_segments:True`. Of one string that has both \
                  `True`, this counts; of several strings, the last that names either.",
        worst_case: "a new peak is slower to reach, because pages are mapped one by one.",
        resets: false,
        read: |options, value| {
            options.paged = boolean(value)?;
            Ok(())
        },
        show: |options| boolean_text(options.paged),
        reset: |options| options.paged = Options::DEFAULT.paged,
    },
    OptionSpec {
        key: "page_mb",
        unit: "MiB",
        default: "80",
        accepts: "a whole number of MiB from 2 to 1024",
        meaning: "The size of the largest pages under `paged`; those for what a program loads first are 20 MiB larger.",
        worst_case: "smaller pages make a new peak slower to reach, larger ones waste more.",
        resets: false,
        read: |options, value| {
            let size = whole(value)?;
            if !(2..=1024).contains(&size) {
                return Err("it must be from 2 to 1024".to_owned());
            }
            options.page_size = size * MIB;
            Ok(())
        },
        show: |options| (options.page_size / MIB).to_string(),
        reset: |options| options.page_size = Options::DEFAULT.page_size,
    },
    OptionSpec {
        key: "trim_ms",
        unit: "ms",
        default: "30000",
        accepts: "a whole number of milliseconds; 0 is never",
        meaning: "After how long `paged` gives back memory that was not needed: between once and twice this \
                  time after the last moment at which it was.",
        worst_case: "a peak that comes back less often than this is reached by driver calls again.",
        resets: false,
        read: |options, value| {
            options.trim_ms = whole(value)?;
            Ok(())
        },
        show: |options| options.trim_ms.to_string(),
        reset: |options| options.trim_ms = Options::DEFAULT.trim_ms,
    },
    OptionSpec {
        key: "per_process_memory_fraction",
        unit: "fraction",
        default: "1.0",
        accepts: "a number from 0 to 1",
        meaning: "Share of the memory of each device that this process may hold.",
        worst_case: "at 0 every allocation is refused.",
        resets: false,
        read: |options, value| {
            let share = number(value)?;
            if !(0.0..=1.0).contains(&share) {
                return Err("it is not from 0 to 1".to_owned());
            }
            options.per_process_memory_fraction = share;
            Ok(())
        },
        show: |options| format!("{:?}", options.per_process_memory_fraction),
        reset: |options| options.per_process_memory_fraction = 1.0,
    },
    OptionSpec {
        key: "graph_capture_record_stream_reuse",
        unit: "True or False",
        default: "False",
        accepts: "`True` or `False`",
        meaning: "While a CUDA graph is captured, a block that other streams used may be reused as \
                  soon as the graph itself orders the new use after the old ones.",
        worst_case: "captures take longer, because the graph is walked to find out.",
        resets: false,
        read: |options, value| {
            options.graph_capture_record_stream_reuse = boolean(value)?;
            Ok(())
        },
        show: |options| boolean_text(options.graph_capture_record_stream_reuse),
        reset: |options| options.graph_capture_record_stream_reuse = false,
    },
    OptionSpec {
        key: "wait_ms",
        unit: "ms",
        default: "3000",
        accepts: "a whole number of milliseconds",
        meaning: "How long one request may wait for memory that can still come: for work on other \
                  streams, for other threads, for other processes on the device. 0 waits for \
                  none of these, as a search for the largest batch size wants it; the driver still \
                  waits for work under way where cached memory is given back.",
        worst_case: "a request that is refused in the end is refused so much later.",
        resets: false,
        read: |options, value| {
            options.wait_ms = whole(value)?;
            Ok(())
        },
        show: |options| options.wait_ms.to_string(),
        reset: |options| options.wait_ms = Options::DEFAULT.wait_ms,
    },
    OptionSpec {
        key: "wait_total_ms",
        unit: "ms",
        default: "unlimited",
        accepts: "a whole number of milliseconds, or `unlimited`",
        meaning: "How long all requests of the process together may wait for memory. Once it is \
                  used up, no request waits.",
        worst_case: "a long run that lives by waiting now and then is refused once it is used up.",
        resets: false,
        read: |options, value| {
            options.wait_total_ms = if value == "unlimited" { None } else { Some(whole(value)?) };
            Ok(())
        },
        show: |options| options.wait_total_ms.map_or("unlimited".to_owned(), |ms| ms.to_string()),
        reset: |options| options.wait_total_ms = None,
    },
    OptionSpec {
        key: "wait_base_us",
        unit: "µs",
        default: "50",
        accepts: "a whole number of microseconds above 0",
        meaning: "The first pause of a request that has to look again and again for memory. What \
                  can be signalled, such as a free by another thread, wakes it at once.",
        worst_case: "a small value asks the driver often; a large one finds memory late.",
        resets: false,
        read: |options, value| {
            options.wait_base_us = above_zero(value)?;
            Ok(())
        },
        show: |options| options.wait_base_us.to_string(),
        reset: |options| options.wait_base_us = Options::DEFAULT.wait_base_us,
    },
    OptionSpec {
        key: "wait_factor",
        unit: "times",
        default: "2.0",
        accepts: "a number from 1 to 100",
        meaning: "How much longer each pause is than the one before, up to `wait_ceiling_ms`. Half \
                  of each pause is by chance, so that processes do not ask in step.",
        worst_case: "at 1 the device is asked at every `wait_base_us` for as long as a request waits.",
        resets: false,
        read: |options, value| {
            let factor = number(value)?;
            if !(1.0..=100.0).contains(&factor) {
                return Err("it is not from 1 to 100".to_owned());
            }
            options.wait_factor = factor;
            Ok(())
        },
        show: |options| format!("{:?}", options.wait_factor),
        reset: |options| options.wait_factor = Options::DEFAULT.wait_factor,
    },
    OptionSpec {
        key: "wait_ceiling_ms",
        unit: "ms",
        default: "100",
        accepts: "a whole number of milliseconds above 0",
        meaning: "The longest pause of a request that has to look again and again for memory.",
        worst_case: "memory that another process gave back is found so much later.",
        resets: false,
        read: |options, value| {
            options.wait_ceiling_ms = above_zero(value)?;
            Ok(())
        },
        show: |options| options.wait_ceiling_ms.to_string(),
        reset: |options| options.wait_ceiling_ms = Options::DEFAULT.wait_ceiling_ms,
    },
    OptionSpec {
        key: "max_tries",
        unit: "times",
        default: "500",
        accepts: "a whole number above 0",
        meaning: "How often one request may climb the ladder. It climbs again only after something \
                  changed: somebody gave memory back.",
        worst_case: "a request that others outrun again and again is refused after so many tries.",
        resets: false,
        read: |options, value| {
            options.max_tries = above_zero(value)?;
            Ok(())
        },
        show: |options| options.max_tries.to_string(),
        reset: |options| options.max_tries = Options::DEFAULT.max_tries,
    },
    OptionSpec {
        key: "callback_ms",
        unit: "ms",
        default: "1000",
        accepts: "a whole number of milliseconds",
        meaning: "How long each of the program's callbacks for a shortage may take, if the request may \
                  not wait longer than that. One that takes longer is not called again.",
        worst_case: "a request that callbacks cannot help is refused so much later, for each of them.",
        resets: false,
        read: |options, value| {
            options.callback_ms = whole(value)?;
            Ok(())
        },
        show: |options| options.callback_ms.to_string(),
        reset: |options| options.callback_ms = Options::DEFAULT.callback_ms,
    },
    OptionSpec {
        key: "skip_rungs",
        unit: "rungs",
        default: "none",
        accepts: "names of rungs with `+` between them, such as `borrow+wait`, of `garbage`, `poll`, \
                  `borrow`, `events`, `oversize`, `cached`, `pieces`, `callbacks`, `wait` and `spill`; or `none`",
        meaning: "Rungs of the ladder that are left out when memory runs out.",
        worst_case: "requests are refused that a rung would have served.",
        resets: false,
        read: |options, value| {
            let names = value.split('+').filter(|_| value != "none");
            options.skip_rungs = names.map(rung).collect::<Result<_, _>>()?;
            Ok(())
        },
        show: |options| {
            let names: Vec<_> = options.skip_rungs.iter().map(Rung::name).collect();
            if names.is_empty() { "none".to_owned() } else { names.join("+") }
        },
        reset: |options| options.skip_rungs = RungSet::NONE,
    },
    OptionSpec {
        key: "spill_limit_mb",
        unit: "MiB",
        default: "off",
        accepts: "a whole number of MiB; 0 or `off` is off",
        meaning: "The most host memory that may serve requests when all else has failed. It sits at \
                  a device address: the device uses it as its own, at the speed of the bus.",
        worst_case: "the program goes on many times slower, and the host's memory is taken, pinned.",
        resets: false,
        read: |options, value| {
            options.spill_limit = if value == "off" { 0 } else { bytes(whole(value)?) };
            Ok(())
        },
        show: |options| match options.spill_limit {
            0 => "off".to_owned(),
            limit => mib_text(limit),
        },
        reset: |options| options.spill_limit = 0,
    },
    OptionSpec {
        key: "spill_over_mb",
        unit: "MiB",
        default: "16",
        accepts: "a whole number of MiB",
        meaning: "The smallest request that host memory may serve, with `spill_limit_mb`.",
        worst_case: "with a small value, memory that every kernel uses lands behind the bus.",
        resets: false,
        read: |options, value| {
            options.spill_over = bytes(whole(value)?);
            Ok(())
        },
        show: |options| mib_text(options.spill_over),
        reset: |options| options.spill_over = Options::DEFAULT.spill_over,
    },
];

/// MiB to bytes; what would not fit becomes the most whole MiB that do, as in PyTorch.
fn bytes(mib: u64) -> u64 {
    mib.min(u64::MAX / MIB) * MIB
}

fn above_zero(value: &str) -> Result<u64, String> {
    match whole(value)? {
        0 => Err("it is not above 0".to_owned()),
        number => Ok(number),
    }
}

fn rung(name: &str) -> Result<Rung, String> {
    match Rung::named(name) {
        Some(rung) if rung.can_be_skipped() => Ok(rung),
        Some(rung) => Err(format!("`{rung}` cannot be left out")),
        None => Err(format!("there is no rung `{name}`")),
    }
}

fn mib_text(bytes: u64) -> String {
    (bytes / MIB).to_string()
}

fn at_least_a_large_segment(options: &Options, value: &str) -> Result<u64, String> {
    let size = bytes(whole(value)?);
    if size < options.large_segment_size {
        let least = options.large_segment_size / MIB;
        return Err(format!("it is below the size of a large segment, {least} MiB"));
    }
    Ok(size)
}

/// Reads `roundup_power2_divisions`. As in PyTorch, the first interval named also fills those below
/// it, each later one fills itself alone, and `>` fills those above the last one named (above
/// interval 0, if none was named yet).
fn read_divisions(options: &mut Options, value: &str) -> Result<(), String> {
    let slots = &mut options.roundup_power2_divisions;
    let Some(list) = value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) else {
        slots.fill(power_of_two(value)?);
        return Ok(());
    };

    let mut entries: Vec<_> = list.split(',').collect();
    // What follows a trailing comma, and the whole of an empty list, is not an entry.
    if entries.last().is_some_and(|entry| entry.is_empty()) {
        entries.pop();
    }
    let mut last = None;
    for entry in entries {
        let (name, count) = entry
            .split_once(':')
            .ok_or_else(|| format!("`{entry}` has no `:` between interval and divisions"))?;
        let count = if whole(count)? == 0 { 0 } else { power_of_two(count)? };
        if name == ">" {
            slots[last.unwrap_or(0) + 1..].fill(count);
        } else {
            let at = interval(power_of_two(name)?.ilog2());
            let from = if last.is_none() { 0 } else { at };
            slots[from..=at].fill(count);
            last = Some(at);
        }
    }
    Ok(())
}

/// The shortest value that [`read_divisions`] turns into these divisions.
fn divisions_text(slots: &[u64; INTERVALS]) -> String {
    let (first, last) = (slots[0], slots[INTERVALS - 1]);
    // The intervals below `head` are all as the first; those from `tail` on are all as the last.
    let Some(head) = slots.iter().position(|count| *count != first) else {
        return if first == 0 { "off".to_owned() } else { first.to_string() };
    };
    let tail = slots.iter().rposition(|count| *count != last).map_or(0, |at| at + 1);

    let mut entries = vec![format!("{}:{first}", 1_u64 << (head - 1))];
    for (at, count) in slots.iter().enumerate().take(tail).skip(head) {
        // One that is not named is 0, but `>` must have the interval before it named.
        if *count != 0 || at + 1 == tail {
            entries.push(format!("{}:{count}", 1_u64 << at));
        }
    }
    if last != 0 {
        entries.push(format!(">:{last}"));
    }
    format!("[{}]", entries.join(","))
}
