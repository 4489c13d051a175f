//! The way out: a snapshot as Cushion's own trace, or as a pickle or JSON that PyTorch's tools read.
//!
//! What PyTorch's viewer gets is made so that all its views work (see `viewer`): events at the start
//! that its replay would trip over are left out, and counted.

mod json;
mod pickle;

use std::io::{self, BufWriter, Write};

use crate::consistency::Inconsistency;
use crate::own;
use crate::snapshot::{Action, Block, BlockState, Event, Name, Segment, Settings, Snapshot};
use crate::stacks::{StackId, Stacks};
use crate::viewer::Ready;

/// The kinds of file that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Cushion's own trace, which has all that was read, in gzip.
    Cushion,
    /// What `torch.cuda.memory._dump_snapshot()` writes: a pickle, of protocol 4.
    Pickle,
    /// The same as JSON, which PyTorch's viewer takes too.
    Json,
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Written {
    /// Events in the file.
    pub events: u64,
    /// Events that were left out: those that PyTorch's viewer could not go back beyond, and all before
    /// them.
    pub left_out: u64,
    /// Why, for each device of which events were left out.
    pub inconsistencies: Vec<Inconsistency>,
    /// Segments made up, one for each allocation, for a trace that has none.
    pub segments_made_up: u64,
}

/// Writes a snapshot; the bytes go out as they are made.
///
/// [`Format::Cushion`] keeps all of it. The other two are for PyTorch's viewer and tools, which have
/// to be able to go back from the segments through the events: what does not fit is left out.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_snapshot(snapshot: &Snapshot, format: Format, out: impl Write) -> io::Result<Written> {
    if format == Format::Cushion {
        own::write(snapshot, out)?;
        let events = snapshot.devices.iter().map(|events| events.len() as u64).sum();
        return Ok(Written { events, ..Written::default() });
    }
    let ready = Ready::of(snapshot);
    let mut out = BufWriter::with_capacity(1 << 16, out);
    match format {
        Format::Json => put_snapshot(&ready, &mut json::Json::new(&mut out))?,
        _ => put_snapshot(&ready, &mut pickle::Pickle::new(&mut out)?)?,
    }
    out.flush()?;
    Ok(ready.into_written())
}

/// Something that values are written to, one after the other. What is written lives as long as `'a`,
/// so that a text written before is known again.
trait Sink<'a> {
    fn open_dict(&mut self) -> io::Result<()>;
    /// Comes before each value of a dict.
    fn key(&mut self, name: Name) -> io::Result<()>;
    fn close_dict(&mut self) -> io::Result<()>;
    fn open_list(&mut self) -> io::Result<()>;
    /// Comes before each value of a list.
    fn item(&mut self) -> io::Result<()>;
    fn close_list(&mut self) -> io::Result<()>;
    fn text(&mut self, text: &'a str) -> io::Result<()>;
    fn int(&mut self, int: i64) -> io::Result<()>;
    fn unsigned(&mut self, int: u64) -> io::Result<()>;
    fn float(&mut self, float: f64) -> io::Result<()>;
    fn flag(&mut self, flag: bool) -> io::Result<()>;
    fn pair(&mut self, pair: (u64, u64)) -> io::Result<()>;
    /// Writes what was kept under this name before; whether there is such a thing.
    fn again(&mut self, what: Shared) -> io::Result<bool>;
    /// Keeps the value just written under this name.
    fn keep(&mut self, what: Shared) -> io::Result<()>;
    /// A dict key that is no [`Name`].
    fn number_key(&mut self, number: u64) -> io::Result<()>;
    /// The file is complete.
    fn end(&mut self) -> io::Result<()>;
}

/// Values that are written many times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Shared {
    Stack(StackId),
    Frame(usize),
}

fn put_snapshot<'a, S: Sink<'a>>(ready: &'a Ready<'_>, sink: &mut S) -> io::Result<()> {
    let stacks = ready.stacks();
    sink.open_dict()?;
    sink.key(Name::Segments)?;
    sink.open_list()?;
    for segment in ready.segments() {
        sink.item()?;
        put_segment(segment, stacks, sink)?;
    }
    sink.close_list()?;
    sink.key(Name::DeviceTraces)?;
    sink.open_list()?;
    for events in ready.devices() {
        sink.item()?;
        sink.open_list()?;
        for event in events {
            sink.item()?;
            put_event(&event, stacks, sink)?;
        }
        sink.close_list()?;
    }
    sink.close_list()?;
    sink.key(Name::AllocatorSettings)?;
    put_settings(ready.settings(), sink)?;
    sink.key(Name::ExternalAnnotations)?;
    sink.open_list()?;
    sink.close_list()?;
    sink.close_dict()?;
    sink.end()
}

fn put_segment<'a, S: Sink<'a>>(
    segment: &'a Segment,
    stacks: &'a Stacks,
    sink: &mut S,
) -> io::Result<()> {
    let sum =
        |of: fn(&Block) -> u64| -> u64 { segment.blocks.iter().map(of).fold(0, u64::wrapping_add) };
    let allocated = |block: &Block| match block.state {
        BlockState::Allocated => block.size,
        _ => 0,
    };
    let active = |block: &Block| match block.state {
        BlockState::Inactive => 0,
        _ => block.size,
    };
    let requested = |block: &Block| match block.state {
        BlockState::Inactive => 0,
        _ => block.requested_size,
    };
    sink.open_dict()?;
    sink.key(Name::Device)?;
    sink.unsigned(segment.device.into())?;
    sink.key(Name::Address)?;
    sink.int(segment.address.cast_signed())?;
    for (name, size) in [
        (Name::TotalSize, segment.total_size),
        (Name::AllocatedSize, sum(allocated)),
        (Name::ActiveSize, sum(active)),
        (Name::RequestedSize, sum(requested)),
    ] {
        sink.key(name)?;
        sink.unsigned(size)?;
    }
    sink.key(Name::Stream)?;
    sink.int(segment.stream.cast_signed())?;
    sink.key(Name::SegmentType)?;
    sink.text(if segment.large { Name::Large } else { Name::Small }.text())?;
    sink.key(Name::SegmentPoolId)?;
    sink.pair(segment.pool)?;
    sink.key(Name::IsExpandable)?;
    sink.flag(segment.expandable)?;
    sink.key(Name::Frames)?;
    put_frames(segment.stack, stacks, sink)?;
    sink.key(Name::Blocks)?;
    sink.open_list()?;
    for block in &segment.blocks {
        sink.item()?;
        sink.open_dict()?;
        sink.key(Name::Address)?;
        sink.int(block.address.cast_signed())?;
        sink.key(Name::Size)?;
        sink.unsigned(block.size)?;
        sink.key(Name::RequestedSize)?;
        sink.unsigned(block.requested_size)?;
        sink.key(Name::State)?;
        let state = match block.state {
            BlockState::Allocated => Name::ActiveAllocated,
            BlockState::PendingFree => Name::ActivePendingFree,
            BlockState::Inactive => Name::Inactive,
        };
        sink.text(state.text())?;
        sink.key(Name::Frames)?;
        put_frames(block.stack, stacks, sink)?;
        sink.close_dict()?;
    }
    sink.close_list()?;
    sink.close_dict()
}

fn put_event<'a, S: Sink<'a>>(event: &Event, stacks: &'a Stacks, sink: &mut S) -> io::Result<()> {
    sink.open_dict()?;
    sink.key(Name::Action)?;
    sink.text(event.action.name())?;
    if event.action == Action::Oom {
        sink.key(Name::DeviceFree)?;
        sink.unsigned(event.addr)?;
    } else {
        sink.key(Name::Addr)?;
        // PyTorch writes addresses and streams as signed numbers.
        sink.int(event.addr.cast_signed())?;
    }
    sink.key(Name::Size)?;
    sink.unsigned(event.size)?;
    sink.key(Name::Stream)?;
    sink.int(event.stream.cast_signed())?;
    sink.key(Name::TimeUs)?;
    sink.unsigned(event.time_us)?;
    sink.key(Name::CompileContext)?;
    sink.text("N/A")?;
    sink.key(Name::UserMetadata)?;
    sink.text("")?;
    if let Some(pool) = event.pool {
        sink.key(Name::PoolId)?;
        sink.pair(pool)?;
    }
    if event.stack.is_some() {
        sink.key(Name::Frames)?;
        put_frames(event.stack, stacks, sink)?;
    }
    sink.close_dict()
}

fn put_frames<'a, S: Sink<'a>>(
    stack: Option<StackId>,
    stacks: &'a Stacks,
    sink: &mut S,
) -> io::Result<()> {
    let Some(stack) = stack else {
        sink.open_list()?;
        return sink.close_list();
    };
    if sink.again(Shared::Stack(stack))? {
        return Ok(());
    }
    sink.open_list()?;
    for (number, frame) in stacks.numbered_frames(stack) {
        sink.item()?;
        if sink.again(Shared::Frame(number))? {
            continue;
        }
        sink.open_dict()?;
        sink.key(Name::Function)?;
        sink.text(&frame.name)?;
        sink.key(Name::Filename)?;
        sink.text(&frame.filename)?;
        sink.key(Name::Line)?;
        sink.unsigned(frame.line.into())?;
        sink.close_dict()?;
        sink.keep(Shared::Frame(number))?;
    }
    sink.close_list()?;
    sink.keep(Shared::Stack(stack))
}

/// Only what is known is written.
fn put_settings<'a, S: Sink<'a>>(settings: &'a Settings, sink: &mut S) -> io::Result<()> {
    let Settings {
        conf,
        max_split_size,
        garbage_collection_threshold,
        expandable_segments,
        roundup_power2_divisions,
        graph_capture_record_stream_reuse,
        release_lock_on_cudamalloc,
        pinned_num_register_threads,
        pinned_use_cuda_host_register,
        max_round_threshold,
        max_cached_size,
    } = settings;
    sink.open_dict()?;
    if let Some(conf) = conf {
        sink.key(Name::CudaAllocConf)?;
        sink.text(conf)?;
    }
    if let Some(threshold) = garbage_collection_threshold {
        sink.key(Name::GarbageCollectionThreshold)?;
        sink.float(*threshold)?;
    }
    for (name, int) in [
        (Name::MaxSplitSize, max_split_size),
        (Name::PinnedNumRegisterThreads, pinned_num_register_threads),
        (Name::MaxRoundThreshold, max_round_threshold),
        (Name::MaxCachedSize, max_cached_size),
    ] {
        if let Some(int) = int {
            sink.key(name)?;
            sink.int(*int)?;
        }
    }
    for (name, flag) in [
        (Name::ExpandableSegments, expandable_segments),
        (Name::ReleaseLockOnCudamalloc, release_lock_on_cudamalloc),
        (Name::PinnedUseCudaHostRegister, pinned_use_cuda_host_register),
        (Name::GraphCaptureRecordStreamReuse, graph_capture_record_stream_reuse),
    ] {
        if let Some(flag) = flag {
            sink.key(name)?;
            sink.flag(*flag)?;
        }
    }
    if let Some(divisions) = roundup_power2_divisions {
        sink.key(Name::RoundupPower2Divisions)?;
        sink.open_dict()?;
        for &(from, into) in divisions {
            sink.number_key(from)?;
            sink.unsigned(into)?;
        }
        sink.close_dict()?;
    }
    sink.close_dict()
}
