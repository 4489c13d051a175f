//! What a report shows: every figure the page draws, as it is embedded in the page (JSON).
//!
//! Everything here is bounded whatever the trace: curves by [`series`](super::series), the address map
//! by [`map`](super::map), lists by the constants in [`gather`](super::gather). Sizes are bytes; events
//! are counted from 0.

use serde::Serialize;

/// Everything one page shows.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// The version of Cushion that made it.
    pub(crate) version: &'static str,
    pub(crate) trace: Trace,
    /// The card to judge against.
    pub(crate) capacity: Option<u64>,
    /// The least any allocator could reserve for the trace.
    pub(crate) floor: u64,
    /// The same with the requests that PyTorch refused: the least any device must have.
    pub(crate) floor_device: u64,
    /// The smallest common card with room for that.
    pub(crate) floor_card: Option<u64>,
    /// How to find out whether the run fits the card it ran on, if it was refused memory there and no
    /// card is asked about.
    #[serde(skip)]
    pub(crate) to_find_out: Vec<String>,
    /// The answer in plain words, most useful first.
    pub(crate) findings: Vec<Finding>,
    pub(crate) policies: Vec<PolicyRun>,
    pub(crate) timeline: Timeline,
    pub(crate) peak: Peak,
    pub(crate) lifetimes: Lifetimes,
    /// Of each replay that had any, and of a file of receipts.
    pub(crate) shortages: Vec<Shortages>,
    /// Stacks that other parts name by index, as indices into `frames`, innermost first.
    pub(crate) sites: Vec<Vec<u32>>,
    /// Lines of the recorded program.
    pub(crate) frames: Vec<String>,
    /// What could not be known, and what is assumed.
    pub(crate) notes: Vec<String>,
}

/// What was recorded.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Trace {
    pub(crate) name: String,
    pub(crate) device: usize,
    /// How many devices of the trace have events.
    pub(crate) devices: usize,
    pub(crate) events: u64,
    pub(crate) allocs: u64,
    /// The text of `PYTORCH_CUDA_ALLOC_CONF`, where the file has one.
    pub(crate) conf: Option<String>,
    /// The policy PyTorch ran with.
    pub(crate) policy: Option<&'static str>,
    /// The ladder the replays ran with.
    pub(crate) ladder: &'static str,
    pub(crate) begins_in_the_middle: bool,
    /// From the first event to the last, where the file has times.
    pub(crate) duration_us: Option<u64>,
    pub(crate) oom: Option<RecordedOom>,
}

/// The first request PyTorch itself refused.
#[derive(Debug, Default, Clone, Copy, Serialize)]
pub(crate) struct RecordedOom {
    pub(crate) event: u64,
    pub(crate) requested: u64,
    /// How many were refused in all.
    pub(crate) count: u64,
    pub(crate) live: u64,
    pub(crate) reserved: Option<u64>,
    pub(crate) device_free: Option<u64>,
}

/// A sentence for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) tone: Tone,
    pub(crate) text: String,
}

/// What a finding means to whoever reads it. Never told by colour alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Tone {
    /// Something to gain, or all is well.
    Good,
    /// It fails, or memory is wasted.
    Bad,
    /// Worth knowing.
    Plain,
}

/// One policy's replay.
#[derive(Debug, Default, Serialize)]
pub(crate) struct PolicyRun {
    pub(crate) name: &'static str,
    /// What it is, in a few words.
    pub(crate) about: &'static str,
    /// Whether PyTorch ran with it.
    pub(crate) recorded: bool,
    /// Events replayed: fewer than recorded if memory ran out.
    pub(crate) events: u64,
    pub(crate) live_peak: u64,
    pub(crate) live_peak_event: u64,
    pub(crate) reserved_peak: u64,
    pub(crate) reserved_peak_event: u64,
    pub(crate) excess: Option<f64>,
    /// The smallest device on which the whole trace passes, if there is one.
    pub(crate) smallest: Option<u64>,
    /// The smallest common card that has room for that, by the GB it is sold as.
    pub(crate) card: Option<u64>,
    pub(crate) driver_us: f64,
    /// Requests tried again after everything cached was given back.
    pub(crate) retries: u64,
    /// Of this many allocations ...
    pub(crate) allocs: u64,
    /// ... this many were put where PyTorch put them; `None` under another policy.
    pub(crate) same_address: Option<u64>,
    /// Whether it ended where PyTorch's run went on.
    pub(crate) left_early: bool,
    pub(crate) refusal: Option<RefusalAt>,
    /// Reserved bytes over the events.
    pub(crate) reserved: Curve,
    pub(crate) map: AddressMap,
}

/// Where memory ran out in a replay.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct RefusalAt {
    pub(crate) event: u64,
    pub(crate) requested: u64,
    pub(crate) live: u64,
    pub(crate) reserved: u64,
    pub(crate) largest_free: u64,
    /// Whether PyTorch refused it too.
    pub(crate) recorded: bool,
    /// Whether what was held before the first event is too much already.
    pub(crate) at_beginning: bool,
    /// The stack of the request, in [`Report::sites`].
    pub(crate) site: Option<u32>,
}

/// The x axis, and live bytes over it.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Timeline {
    /// Buckets: bucket `i` of `buckets` begins at event `i * events / buckets`, rounded up.
    pub(crate) buckets: usize,
    /// When each bucket begins, in microseconds after the first event.
    pub(crate) times: Option<Vec<u64>>,
    /// Live bytes, of the run that served most.
    pub(crate) live: Curve,
    pub(crate) live_peak: u64,
    pub(crate) live_peak_event: u64,
}

/// The least and the most in each bucket. It may end early, where a run did.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Curve {
    pub(crate) lo: Vec<u64>,
    pub(crate) hi: Vec<u64>,
}

/// Segments and blocks at one moment, as a tape of rectangles in address order.
#[derive(Debug, Default, Serialize)]
pub(crate) struct AddressMap {
    pub(crate) event: u64,
    pub(crate) reserved: u64,
    /// Bytes asked for, in live blocks.
    pub(crate) live: u64,
    /// Bytes of blocks that wait for another stream.
    pub(crate) pending: u64,
    /// What rounding adds to live blocks.
    pub(crate) rounding: u64,
    /// Bytes of free blocks.
    pub(crate) free: u64,
    /// How many free blocks.
    pub(crate) holes: u64,
    /// The largest of them, largest first.
    pub(crate) largest_holes: Vec<Hole>,
    pub(crate) groups: Vec<MapGroup>,
    /// Blocks of the engine.
    pub(crate) blocks: u64,
    /// How many of them are drawn together with a neighbour.
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
    /// Segments of the engine.
    pub(crate) segments: u64,
    /// What is drawn, in address order.
    pub(crate) strips: Vec<Strip>,
}

/// One segment; or, in a very large map, several small ones.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Strip {
    pub(crate) address: String,
    pub(crate) segments: u32,
    /// Addresses before it, back to the segment before, that pages were or may come behind.
    pub(crate) unmapped: u64,
    /// How many rectangles of [`Rects`], in order.
    pub(crate) rects: u32,
}

/// Rectangles, one column per figure to keep the page small.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Rects {
    pub(crate) size: Vec<u64>,
    /// A letter each: live and `K`ept to the end of the trace, live from `B`efore the trace began,
    /// `L`ive, `P`ending, `F`ree, `M`ixed.
    pub(crate) kind: String,
    /// The event that allocated it; -1 where there is none or it is not known.
    pub(crate) event: Vec<i64>,
    /// Its stack in [`Report::sites`]; -1 where there is none.
    pub(crate) site: Vec<i64>,
    /// Of merged ones: index, how many blocks, bytes free among them.
    pub(crate) merged: Vec<(u32, u32, u64)>,
}

/// What was live at the peak of live bytes.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Peak {
    pub(crate) event: u64,
    /// The policy whose replay was looked at; what is live does not depend on it.
    pub(crate) policy: &'static str,
    pub(crate) live: u64,
    pub(crate) allocations: u64,
    /// Largest first.
    pub(crate) groups: Vec<PeakGroup>,
    /// Of all, those made before the trace began.
    pub(crate) from_before: Life,
    /// Groups left out of the list, and their bytes.
    pub(crate) other_groups: u64,
    pub(crate) other_bytes: u64,
    pub(crate) has_stacks: bool,
}

/// Allocations with one origin.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct PeakGroup {
    pub(crate) bytes: u64,
    pub(crate) count: u64,
    /// Bytes of those that the trace never frees.
    pub(crate) kept: u64,
    pub(crate) largest: u64,
    pub(crate) origin: Origin,
}

/// Where allocations came from, as far as the trace tells.
#[derive(Debug, Default, Clone, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Origin {
    /// A stack in [`Report::sites`].
    Site(u32),
    /// No stack was recorded: requests of one size on one stream.
    Size { size: u64, stream: String },
    /// Allocated before the trace began.
    #[default]
    Before,
}

/// How long allocations lived.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Lifetimes {
    pub(crate) by_events: Vec<LifeBin>,
    /// In microseconds, where the file has times.
    pub(crate) by_time: Option<Vec<LifeBin>>,
    /// Those the trace never frees.
    pub(crate) to_the_end: Life,
    /// Those made before the trace began, at the peak.
    pub(crate) from_before: Life,
    pub(crate) all: Life,
}

/// Allocations that lived from `from` up to, not including, `to`.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct LifeBin {
    pub(crate) from: u64,
    pub(crate) to: u64,
    #[serde(flatten)]
    pub(crate) life: Life,
}

/// How many allocations, their bytes, and the bytes of those live at the peak of live bytes.
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
    /// Whether they are from a file of receipts.
    pub(crate) from_file: bool,
    /// All of them, in words.
    pub(crate) told: String,
    /// Some of them, in order.
    pub(crate) rows: Vec<ShortageRow>,
    /// How many there were.
    pub(crate) all: u64,
    /// Lines of the file that end too early.
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
    /// Whether it was made up.
    pub(crate) injected: bool,
    /// The time lost, in milliseconds.
    pub(crate) ms: f64,
    pub(crate) rungs: Vec<RungTried>,
    /// What the program's callbacks did.
    pub(crate) answers: Vec<String>,
    /// What would have made it fit; nothing if it was served.
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
    /// Bytes it won.
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
    /// Where they were asked for, if that was recorded.
    pub(crate) at: Option<String>,
}
