//! The data of a report: every figure that the page draws, embedded in the page as JSON.
//!
//! Each struct is one JSON object that the page's scripts read, and each field one of its keys. So
//! the structs are as wide and as alike as the page needs: merging or splitting them would change
//! the JSON.
//!
//! All sizes are bounded for any trace: curves by [`series`](super::series), the address map by
//! [`map`](super::map), lists by the constants in [`gather`](super::gather). Sizes are bytes;
//! events are counted from 0.

use cushion_core::Policy;
use serde::Serialize;

/// All data of one page.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// The version of Cushion that wrote the page.
    pub(crate) version: &'static str,
    pub(crate) trace: Trace,
    /// The limit to judge against.
    pub(crate) capacity: Option<u64>,
    /// The least that any allocator could reserve for the trace.
    pub(crate) floor: u64,
    /// The floor including the requests that PyTorch refused: the least memory a device must have.
    pub(crate) floor_device: u64,
    /// The smallest common card that holds `floor_device`.
    pub(crate) floor_card: Option<u64>,
    /// Which capacity to give to find out whether the run fits its card, if the run was refused
    /// memory and no capacity was given.
    #[serde(skip)]
    pub(crate) to_find_out: Vec<String>,
    /// The findings, most useful first.
    pub(crate) findings: Vec<Finding>,
    pub(crate) policies: Vec<PolicyRun>,
    pub(crate) timeline: Timeline,
    pub(crate) peak: Peak,
    pub(crate) lifetimes: Lifetimes,
    /// The shortages of each replay that had any, and of a file of receipts.
    pub(crate) shortages: Vec<Shortages>,
    /// Stacks that other parts refer to by index, as indices into `frames`, innermost first.
    pub(crate) sites: Vec<Vec<u32>>,
    /// Lines of the recorded program.
    pub(crate) frames: Vec<String>,
    /// What is not known, and what is assumed.
    pub(crate) notes: Vec<String>,
}

/// The recorded trace.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Trace {
    pub(crate) name: String,
    pub(crate) device: usize,
    /// The number of devices with events.
    pub(crate) devices: usize,
    pub(crate) events: u64,
    pub(crate) allocs: u64,
    /// The text of `PYTORCH_CUDA_ALLOC_CONF`, if the file has one.
    pub(crate) conf: Option<String>,
    /// The policy PyTorch ran with.
    pub(crate) policy: Option<&'static str>,
    /// The ladder the replays ran with.
    pub(crate) ladder: &'static str,
    pub(crate) begins_in_the_middle: bool,
    /// From the first event to the last, if the file has times.
    pub(crate) duration_us: Option<u64>,
    pub(crate) oom: Option<RecordedOom>,
}

/// The first request that PyTorch itself refused.
#[derive(Debug, Default, Clone, Copy, Serialize)]
pub(crate) struct RecordedOom {
    pub(crate) event: u64,
    pub(crate) requested: u64,
    /// The number of refused requests.
    pub(crate) count: u64,
    pub(crate) live: u64,
    pub(crate) reserved: Option<u64>,
    pub(crate) device_free: Option<u64>,
}

/// A sentence for the reader.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) tone: Tone,
    pub(crate) text: String,
}

/// The kind of a finding. The page never shows it by colour alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Tone {
    /// An improvement, or success.
    Good,
    /// A failure, or wasted memory.
    Bad,
    /// Information.
    Plain,
}

/// The replay under one policy.
#[derive(Debug, Serialize)]
pub(crate) struct PolicyRun {
    #[serde(rename = "name")]
    pub(crate) policy: Policy,
    /// A short description of the policy.
    pub(crate) about: &'static str,
    /// Whether PyTorch used this policy.
    pub(crate) recorded: bool,
    /// Events replayed: fewer than recorded if memory ran out.
    pub(crate) events: u64,
    pub(crate) live_peak: u64,
    pub(crate) live_peak_event: u64,
    pub(crate) reserved_peak: u64,
    pub(crate) reserved_peak_event: u64,
    pub(crate) excess: Option<f64>,
    /// The smallest device on which the whole trace passes, if any.
    pub(crate) smallest: Option<u64>,
    /// The smallest common card that holds `smallest`, by its nominal GB.
    pub(crate) card: Option<u64>,
    pub(crate) driver_us: f64,
    /// Requests retried after all cached memory was released.
    pub(crate) retries: u64,
    /// The number of allocations.
    pub(crate) allocs: u64,
    /// The number of allocations at PyTorch's address; `None` under another policy.
    pub(crate) same_address: Option<u64>,
    /// Whether the replay ended where PyTorch's run went on.
    pub(crate) left_early: bool,
    pub(crate) refusal: Option<RefusalAt>,
    /// Reserved bytes over the events.
    pub(crate) reserved: Curve,
    pub(crate) map: AddressMap,
}

/// The refusal that ended a replay.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct RefusalAt {
    pub(crate) event: u64,
    pub(crate) requested: u64,
    pub(crate) live: u64,
    pub(crate) reserved: u64,
    pub(crate) largest_free: u64,
    /// Whether PyTorch refused the request too.
    pub(crate) recorded: bool,
    /// Whether the memory held before the first event already exceeds the limit.
    pub(crate) at_beginning: bool,
    /// The stack of the request, in [`Report::sites`].
    pub(crate) site: Option<u32>,
}

/// The x axis, and live bytes over it.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Timeline {
    /// Number of buckets: bucket `i` of `buckets` begins at event `i * events / buckets`, rounded
    /// up.
    pub(crate) buckets: usize,
    /// The start of each bucket, in microseconds after the first event.
    pub(crate) times: Option<Vec<u64>>,
    /// Live bytes, of the run that served most.
    pub(crate) live: Curve,
    pub(crate) live_peak: u64,
    pub(crate) live_peak_event: u64,
}

/// The minimum and maximum of each bucket. The curve ends early if the run did.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Curve {
    pub(crate) lo: Vec<u64>,
    pub(crate) hi: Vec<u64>,
}

/// Segments and blocks at one moment, as a sequence of rectangles in address order.
#[derive(Debug, Default, Serialize)]
pub(crate) struct AddressMap {
    pub(crate) event: u64,
    pub(crate) reserved: u64,
    /// Requested bytes of live blocks.
    pub(crate) live: u64,
    /// Bytes of pending blocks.
    pub(crate) pending: u64,
    /// Bytes that rounding adds to live blocks.
    pub(crate) rounding: u64,
    /// Bytes of free blocks.
    pub(crate) free: u64,
    /// The number of free blocks.
    pub(crate) holes: u64,
    /// The largest free blocks, largest first.
    pub(crate) largest_holes: Vec<Hole>,
    pub(crate) groups: Vec<MapGroup>,
    /// The number of blocks.
    pub(crate) blocks: u64,
    /// The number of blocks drawn together with a neighbour.
    pub(crate) merged: u64,
    pub(crate) rects: Rects,
}

/// A free block.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Hole {
    pub(crate) size: u64,
    pub(crate) address: String,
    pub(crate) group: usize,
}

/// Segments of one stream and pool.
#[derive(Debug, Default, Serialize)]
pub(crate) struct MapGroup {
    pub(crate) label: String,
    pub(crate) size: u64,
    pub(crate) free: u64,
    /// The number of segments.
    pub(crate) segments: u64,
    /// What is drawn, in address order.
    pub(crate) strips: Vec<Strip>,
}

/// One segment; in a very large map, several small ones.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Strip {
    pub(crate) address: String,
    pub(crate) segments: u32,
    /// Unmapped addresses before the segment, back to the previous one.
    pub(crate) unmapped: u64,
    /// The number of its rectangles in [`Rects`].
    pub(crate) rects: u32,
}

/// Rectangles, one column per figure to keep the page small.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Rects {
    pub(crate) size: Vec<u64>,
    /// One letter each: live and `K`ept to the end of the trace, live from `B`efore the trace
    /// began, `L`ive, `P`ending, `F`ree, `M`ixed.
    pub(crate) kind: String,
    /// The event that allocated the block; -1 if there is none or it is not known.
    pub(crate) event: Vec<i64>,
    /// The stack in [`Report::sites`]; -1 if there is none.
    pub(crate) site: Vec<i64>,
    /// For merged rectangles: index, number of blocks, bytes free among them.
    pub(crate) merged: Vec<(u32, u32, u64)>,
}

/// The live allocations at the peak of live bytes.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Peak {
    pub(crate) event: u64,
    /// The policy of the replay used; live allocations do not depend on it.
    pub(crate) policy: &'static str,
    pub(crate) live: u64,
    pub(crate) allocations: u64,
    /// Largest first.
    pub(crate) groups: Vec<PeakGroup>,
    /// The allocations among them that were made before the trace began.
    pub(crate) from_before: Life,
    /// Groups not in the list, and their bytes.
    pub(crate) other_groups: u64,
    pub(crate) other_bytes: u64,
    pub(crate) has_stacks: bool,
}

/// Allocations of one origin.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct PeakGroup {
    pub(crate) bytes: u64,
    pub(crate) count: u64,
    /// Bytes that the trace never frees.
    pub(crate) kept: u64,
    pub(crate) largest: u64,
    pub(crate) origin: Origin,
}

/// The origin of allocations, as far as the trace tells.
#[derive(Debug, Default, Clone, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Origin {
    /// A stack in [`Report::sites`].
    Site(u32),
    /// No stack was recorded: allocations of one size on one stream.
    Size { size: u64, stream: String },
    /// Allocated before the trace began.
    #[default]
    Before,
}

/// How long allocations lived.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Lifetimes {
    pub(crate) by_events: Vec<LifeBin>,
    /// In microseconds, if the file has times.
    pub(crate) by_time: Option<Vec<LifeBin>>,
    /// Allocations that the trace never frees.
    pub(crate) to_the_end: Life,
    /// Allocations from before the trace, at the peak.
    pub(crate) from_before: Life,
    pub(crate) all: Life,
}

/// Allocations that lived from `from` up to, but not including, `to`.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct LifeBin {
    pub(crate) from: u64,
    pub(crate) to: u64,
    #[serde(flatten)]
    pub(crate) life: Life,
}

/// The number of allocations, their bytes, and the bytes of those live at the peak of live bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Life {
    pub(crate) count: u64,
    pub(crate) bytes: u64,
    pub(crate) at_peak: u64,
}

/// The shortages of one run.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Shortages {
    /// The policy of a replay, or the name of the file.
    pub(crate) name: String,
    /// Whether the shortages come from a file of receipts.
    pub(crate) from_file: bool,
    /// A summary.
    pub(crate) told: String,
    /// Some of the shortages, in order.
    pub(crate) rows: Vec<ShortageRow>,
    /// The number of shortages.
    pub(crate) all: u64,
    /// Truncated lines of the file.
    pub(crate) torn: u64,
}

/// One shortage.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ShortageRow {
    pub(crate) number: u64,
    pub(crate) device: u32,
    pub(crate) who: String,
    pub(crate) requested: u64,
    pub(crate) outcome: String,
    pub(crate) survived: bool,
    /// Whether the failure was injected.
    pub(crate) injected: bool,
    /// The time lost, in milliseconds.
    pub(crate) ms: f64,
    pub(crate) rungs: Vec<RungTried>,
    /// The answers of the program's callbacks.
    pub(crate) answers: Vec<String>,
    /// What would have made the request fit; empty if it was served.
    pub(crate) remedies: Vec<String>,
    /// The largest groups of live allocations.
    pub(crate) groups: Vec<LiveGroup>,
}

/// One rung of the ladder.
#[derive(Debug, Default, Serialize)]
pub(crate) struct RungTried {
    pub(crate) rung: &'static str,
    pub(crate) ended: &'static str,
    pub(crate) in_vain: bool,
    /// The bytes won.
    pub(crate) won: u64,
    /// The time it took, in milliseconds.
    pub(crate) ms: f64,
}

/// Live allocations of one size.
#[derive(Debug, Default, Serialize)]
pub(crate) struct LiveGroup {
    pub(crate) each: u64,
    pub(crate) count: u64,
    pub(crate) bytes: u64,
    /// The place of the request, if it was recorded.
    pub(crate) at: Option<String>,
}
