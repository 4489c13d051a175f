//! The options, one row each.
//!
//! A row gives the field with its type and default, the key, the accepted values with their unit
//! and range, and the description. Everything else about an option comes from its row.

use std::ops::Bound;

use super::divisions::{self, Divisions};
use super::policy::Policy;
use super::row::{Form, OptionSpec, form, lasts, options, range, words};
use super::values::{
    boolean, boolean_text, bytes, in_range, mib, mib_of_large_segment, mib_text, number,
    number_text, rungs, rungs_text, whole,
};
use crate::base::size::MIB;
use crate::options::ladder::RungSet;

options! {
    /// The options of one allocator, as parsed. Sizes are in bytes.
    pub struct Options;

    // The first row, because the rows below are checked against it.
    large_segment_size: u64 = 20 * MIB, kept;
    "large_segment_size_mb": (mib above 10) {
        meaning: "Size of the segments that serve requests between 1 MiB and 10 MiB.",
        change: "rarely. A larger value makes fewer driver calls for programs with many tensors \
                 of this size.",
        worst_case: "one live block keeps its whole segment reserved, so a large value can waste \
                     more memory.",
    }

    /// `None` means that every block may be split.
    max_split_size: Option<u64> = None, resets;
    "max_split_size_mb": {
        unit: "MiB",
        accepts: "a whole number of MiB, `large_segment_size_mb` or more",
        read: |options, text| mib_of_large_segment(text, options.large_segment_size).map(Some),
        show: |size| size.map_or_else(|| "unlimited".to_owned(), mib_text),
    } {
        meaning: "Free blocks of this size or more are not split. They serve only requests of \
                  almost their own size.",
        change: "if small allocations fragment large blocks under `segments`. Try `paged` first.",
        worst_case: "a program with many different large sizes keeps one block for each of them, \
                     and reserves far more than it uses.",
    }

    /// `None` means [`large_segment_size`](Self::large_segment_size).
    max_non_split_rounding: Option<u64> = None, resets;
    "max_non_split_rounding_mb": {
        unit: "MiB",
        accepts: "a whole number of MiB, `large_segment_size_mb` or more",
        read: |options, text| mib_of_large_segment(text, options.large_segment_size).map(Some),
        show: |size| size.map_or_else(|| "as large_segment_size_mb".to_owned(), mib_text),
    } {
        meaning: "A block of `max_split_size_mb` or more may exceed the request it serves by less \
                  than this.",
        change: "only together with `max_split_size_mb`, if the large sizes of a program differ by \
                 more than the default.",
        worst_case: "that much memory is wasted in every large block.",
    }

    /// One entry per interval (see [`divisions_for`](Self::divisions_for)); each is 0 (off) or a
    /// power of two.
    roundup_power2_divisions: Divisions = divisions::OFF, resets;
    "roundup_power2_divisions": {
        unit: "divisions",
        accepts: "a power of two, or a list such as `[256:1,512:2,>:8]`. A list holds intervals \
                  and their divisions. An interval is a power of two in MiB, or `>` for all \
                  intervals above the last one named. Divisions are 0 or a power of two",
        read: |options, text| divisions::read(&options.roundup_power2_divisions, text),
        show: divisions::text,
    } {
        meaning: "Rounds a request up to one of this many equal steps between one power of two and \
                  the next, so that requests of almost the same size can reuse a block. There are \
                  16 intervals, each named by the power of two in MiB at which it begins. The first \
                  holds all sizes below 2 MiB, the last all sizes from 32 GiB. The first interval \
                  in a list also sets all intervals below it. An interval that is not named is \
                  off. 0 and 1 are off.",
        change: "if the sizes of a program vary a little from step to step, under `segments` or \
                 `expandable`.",
        worst_case: "with 2 divisions a request just above a power of two grows by almost half.",
    }

    /// 0 is off.
    garbage_collection_threshold: f64 = 0.0, resets;
    "garbage_collection_threshold": {
        unit: "fraction",
        accepts: "a number above 0 and below 1",
        read: |_, text| {
            let open = (Bound::Excluded(0.0), Bound::Excluded(1.0));
            in_range(number(text)?, open, " above 0 and below 1")
        },
        show: |&share| if share == 0.0 { "off".to_owned() } else { number_text(share) },
    } {
        meaning: "When reserved memory exceeds this fraction of the limit, the cached memory that \
                  has been idle longest is released before more is requested from the driver. The \
                  limit is the one that `per_process_memory_fraction` sets; without a limit the \
                  option has no effect.",
        change: "if a process with a limit must leave memory to others, under `segments` or \
                 `expandable`. Under `paged` leave it off: `trim_ms` does this.",
        worst_case: "a low value releases memory that is needed again at once, and each release \
                     may wait for the device.",
    }

    policy: Policy = Policy::Paged, kept;
    "expandable_segments": {
        unit: "True or False",
        accepts: "`True` or `False`",
        // One pair does not decide: `apply` looks at all pairs and sets the policy.
        read: |options, text| boolean(text).map(|_| options.policy),
        show: |&policy| boolean_text(policy == Policy::Expandable),
    } {
        meaning: "`True` selects the policy `expandable`: one address range per stream and pool, \
                  which grows and shrinks page by page. `False` ends `expandable` and returns to \
                  the default policy; it does not change another policy.",
        change: "to get exactly the layout of PyTorch's expandable segments.",
        worst_case: "a new peak takes longer to reach, because each page is mapped by itself.",
    }
    "paged": {
        unit: "True or False",
        accepts: "`True` or `False`",
        read: |options, text| boolean(text).map(|_| options.policy),
        show: |&policy| boolean_text(policy == Policy::Paged),
    } {
        meaning: "`True` selects the policy `paged`, which maps scattered free pages into one \
                  contiguous range. `False` selects `segments`, the layout of PyTorch's classic \
                  allocator, or `expandable` if the same string has `expandable_segments:True`. If \
                  one string has both keys with `True`, `paged` is selected. If several strings \
                  name either key, the last of these strings decides.",
        change: "to `False` to get exactly the layout of PyTorch's classic allocator.",
        worst_case: "a new peak takes longer to reach, because pages are mapped one by one.",
    }

    page_size: u64 = 80 * MIB, kept;
    "page_mb": (mib from 2 to 1024) {
        meaning: "Size of the largest pages under `paged`. Pages for the memory that a program \
                  loads first may be 20 MiB larger.",
        change: "to a smaller value if every MiB counts, to a larger value if reaching a new peak \
                 takes too long.",
        worst_case: "small pages make a new peak slower to reach; large pages waste more memory.",
    }

    trim_ms: u64 = 30_000, kept;
    "trim_ms": (ms) {
        meaning: "Under `paged`, memory is released to the driver between once and twice this time \
                  after it was last needed. 0 never releases it.",
        change: "to a smaller value if other processes on the device need the memory sooner, to a \
                 larger value if the peaks of the program are further apart than this.",
        worst_case: "a program whose peaks are further apart than this asks the driver for memory \
                     at every peak.",
    }

    per_process_memory_fraction: f64 = 1.0, kept;
    "per_process_memory_fraction": (number "fraction", from 0 to 1) {
        meaning: "Fraction of the memory of each device that this process may reserve. 1 sets no \
                  limit.",
        change: "if several processes share a device and each must stay within its part.",
        worst_case: "at 0 every allocation is refused.",
    }

    graph_capture_record_stream_reuse: bool = false, kept;
    "graph_capture_record_stream_reuse": (flag) {
        meaning: "During the capture of a CUDA graph, a block that other streams used may be \
                  reused as soon as the graph orders the new use after the old ones.",
        change: "to `True` if a captured graph uses several streams and needs too much memory.",
        worst_case: "a capture takes longer, because the allocator walks the graph.",
    }

    wait_ms: u64 = 3_000, kept;
    "wait_ms": (ms) {
        meaning: "How long one request may wait for memory that others can still free: work on \
                  other streams, other threads, or other processes on the device. At 0 a request \
                  never waits for these; the driver may still wait for running work when cached \
                  memory is released.",
        change: "to 0 to fail at once, for example in a search for the largest batch size; to a \
                 larger value if the others hold their memory for longer.",
        worst_case: "a request that is refused is refused this much later.",
    }

    /// `None` sets no limit.
    wait_total_ms: Option<u64> = None, kept;
    "wait_total_ms": {
        unit: "ms",
        accepts: "a whole number of milliseconds, or `unlimited`",
        read: |_, text| if text == "unlimited" { Ok(None) } else { whole(text).map(Some) },
        show: |ms| ms.map_or_else(|| "unlimited".to_owned(), |ms| ms.to_string()),
    } {
        meaning: "How long all requests of the process together may wait for memory. After that, \
                  no request waits.",
        change: "if a job must not lose more than a known time to waiting.",
        worst_case: "a long job that depends on short waits is refused memory once the time is \
                     used up.",
    }

    wait_base_us: u64 = 50, kept;
    "wait_base_us": (us above 0) {
        meaning: "The first pause of a waiting request before it looks for memory again. A free by \
                  another thread of the process ends the pause at once.",
        change: "rarely. A smaller value finds the memory of other streams and processes sooner.",
        worst_case: "a small value queries the driver often; a large value finds memory late.",
    }

    wait_factor: f64 = 2.0, kept;
    "wait_factor": (number "times", from 1 to 100) {
        meaning: "Each pause is this many times as long as the one before, up to \
                  `wait_ceiling_ms`. Half of each pause is random, so that processes do not query \
                  the device in step.",
        change: "rarely. A smaller value queries the driver more often during a long wait.",
        worst_case: "at 1 a waiting request queries the device every `wait_base_us`.",
    }

    wait_ceiling_ms: u64 = 100, kept;
    "wait_ceiling_ms": (ms above 0) {
        meaning: "The longest pause of a waiting request before it looks for memory again.",
        change: "to a smaller value if memory that another process frees must be found sooner.",
        worst_case: "memory that another process frees is found this much later.",
    }

    max_tries: u64 = 500, kept;
    "max_tries": (times above 0) {
        meaning: "How often one request may climb the ladder. It climbs again only after memory \
                  was freed or released since its last try.",
        change: "rarely. A larger value helps if many threads compete for little memory.",
        worst_case: "a request that loses the freed memory to others is refused after this many \
                     tries.",
    }

    callback_ms: u64 = 1_000, kept;
    "callback_ms": (ms) {
        meaning: "How long each callback of the program for a shortage may take, if the rest of \
                  the request's `wait_ms` is shorter. A callback that takes longer is not called \
                  again.",
        change: "to a larger value if a callback needs more time, for example to move data to the \
                 host.",
        worst_case: "for each callback that does not help, a refusal comes this much later.",
    }

    skip_rungs: RungSet = RungSet::NONE, kept;
    "skip_rungs": {
        unit: "rungs",
        accepts: "names of rungs with `+` between them, such as `borrow+wait`, or `none`. The names \
                  are `garbage`, `poll`, `borrow`, `events`, `oversize`, `cached`, `pieces`, \
                  `callbacks`, `wait` and `spill`",
        read: |_, text| rungs(text),
        show: |&skipped| rungs_text(skipped),
    } {
        meaning: "Rungs of the ladder that are skipped when memory runs out.",
        change: "to measure what a rung contributes, or to avoid the effect of one rung.",
        worst_case: "a request is refused that a skipped rung would have served.",
    }

    /// 0 is off.
    spill_limit: u64 = 0, kept;
    "spill_limit_mb": {
        unit: "MiB",
        accepts: "a whole number of MiB; 0 or `off` is off",
        read: |_, text| if text == "off" { Ok(0) } else { mib(text) },
        show: |&limit| if limit == 0 { "off".to_owned() } else { mib_text(limit) },
    } {
        meaning: "The most host memory that may serve requests when every other rung has failed. \
                  The host memory has a device address, and the device reaches it over the bus.",
        change: "if a slow step is better than a refused request.",
        worst_case: "the program runs many times slower, and this much host memory is pinned.",
    }

    spill_over: u64 = 16 * MIB, kept;
    "spill_over_mb": (mib) {
        meaning: "The smallest request that host memory may serve, if `spill_limit_mb` is set.",
        change: "to a larger value to keep memory that is used often on the device.",
        worst_case: "with a small value, memory that every kernel uses is placed behind the bus.",
    }
}
