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
pub enum FileFormat {
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
/// [`FileFormat::Cushion`] keeps all of it. The other two are for PyTorch's viewer and tools, which have
/// to be able to go back from the segments through the events: what does not fit is left out.
///
/// # Errors
///
/// When `out` cannot be written to.
pub fn write_snapshot(
    snapshot: &Snapshot,
    format: FileFormat,
    out: impl Write,
) -> io::Result<Written> {
    if format == FileFormat::Cushion {
        own::write(snapshot, out)?;
        let events = snapshot.devices.iter().map(|events| events.len() as u64).sum();
        return Ok(Written { events, ..Written::default() });
    }
    let ready = Ready::of(snapshot);
    let mut out = BufWriter::with_capacity(1 << 16, out);
    match format {
        FileFormat::Json => put_snapshot(&ready, &mut json::Json::new(&mut out))?,
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
    fn key(&mut self, name: Name) -> io::Result<()> {
        self.text_key(name.text())
    }
    /// The same, for a key that no reader here looks at.
    fn text_key(&mut self, name: &'static str) -> io::Result<()>;
    /// The same, for a number in quotes.
    fn number_key(&mut self, number: u64) -> io::Result<()>;
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
    sink.text_key("external_annotations")?;
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
        (Name::TotalSize.text(), segment.total_size),
        ("allocated_size", sum(allocated)),
        ("active_size", sum(active)),
        (Name::RequestedSize.text(), sum(requested)),
    ] {
        sink.text_key(name)?;
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
    sink.text_key("compile_context")?;
    sink.text("N/A")?;
    sink.text_key("user_metadata")?;
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
    use crate::open::{Limits, read};
    use crate::own::tests::any_snapshot;
    use crate::pickle::write as opcodes;
    use crate::snapshot::Origin;
    use crate::stacks::Frame;

    fn pickle(snapshot: &Snapshot) -> Vec<u8> {
        let mut out = Vec::new();
        put_snapshot(&Ready::whole(snapshot), &mut pickle::Pickle::new(&mut out).unwrap()).unwrap();
        out
    }

    fn json(snapshot: &Snapshot) -> Vec<u8> {
        let mut out = Vec::new();
        put_snapshot(&Ready::whole(snapshot), &mut json::Json::new(&mut out)).unwrap();
        out
    }

    /// JSON as the pickle that says the same, to be read by the same reader.
    fn as_pickle(value: &Value) -> Vec<u8> {
        match value {
            Value::Object(items) => {
                let items: Vec<_> =
                    items.iter().map(|(key, value)| (key.as_str(), as_pickle(value))).collect();
                opcodes::dict(&items)
            }
            Value::Array(values) => {
                opcodes::list(&values.iter().map(as_pickle).collect::<Vec<_>>())
            }
            Value::String(text) => opcodes::text(text),
            Value::Bool(flag) => vec![if *flag { 0x88 } else { 0x89 }],
            Value::Null => vec![b'N'],
            Value::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(int), _) => opcodes::int(int),
                (_, Some(int)) => [&[0x8a, 9][..], &int.to_le_bytes(), &[0]].concat(),
                _ => [&b"G"[..], &number.as_f64().unwrap().to_be_bytes()].concat(),
            },
        }
    }

    /// A snapshot with its stacks written out: their numbers may differ from one reading to another.
    type Plain = (Vec<(Segment, Vec<Vec<Frame>>)>, Vec<Vec<(Event, Vec<Frame>)>>, Settings);

    fn plain(snapshot: &Snapshot) -> Plain {
        let frames = |stack: &mut Option<StackId>| -> Vec<Frame> {
            stack.take().into_iter().flat_map(|id| snapshot.stacks.frames(id)).cloned().collect()
        };
        let segments = snapshot.segments.iter().map(|segment| {
            let mut segment = segment.clone();
            let mut all = vec![frames(&mut segment.stack)];
            all.extend(segment.blocks.iter_mut().map(|block| frames(&mut block.stack)));
            (segment, all)
        });
        let devices = snapshot.devices.iter().map(|events| {
            let plain = events.iter().map(|mut event| {
                let frames = frames(&mut event.stack);
                (event, frames)
            });
            plain.collect()
        });
        (segments.collect(), devices.collect(), snapshot.settings.clone())
    }

    fn load(bytes: &[u8]) -> Snapshot {
        read(bytes, &Limits::default()).unwrap()
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(snapshot in any_snapshot()) {
            let expected = plain(&snapshot);
            prop_assert_eq!(&plain(&load(&pickle(&snapshot))), &expected);
            let value = serde_json::from_slice(&json(&snapshot)).unwrap();
            let read = load(&[as_pickle(&value), b".".to_vec()].concat());
            prop_assert_eq!(&plain(&read), &expected);
        }
    }

    /// The keys of PyTorch 2.11, and no others.
    #[test]
    fn the_keys_are_pytorchs() {
        let block = Block {
            address: 512,
            size: 512,
            requested_size: 500,
            state: BlockState::PendingFree,
            stack: None,
        };
        let segment = Segment {
            device: 0,
            address: 512,
            total_size: 1024,
            stream: 0,
            large: false,
            pool: (0, 1),
            expandable: true,
            stack: None,
            blocks: vec![
                block,
                Block { address: 1024, state: BlockState::Allocated, ..block },
                Block { address: 1536, state: BlockState::Inactive, ..block },
            ],
        };
        let event = Event {
            action: Action::Oom,
            addr: 77,
            size: 88,
            stream: u64::MAX,
            time_us: 99,
            pool: Some((0, 1)),
            stack: None,
        };
        let free = Event { action: Action::FreeRequested, pool: None, ..event };
        let snapshot = Snapshot {
            origin: Origin::Torch,
            segments: vec![segment],
            devices: vec![[event, free].into_iter().collect()],
            settings: Settings::default(),
            stacks: Stacks::default(),
        };
        let written: Value = serde_json::from_slice(&json(&snapshot)).unwrap();
        let block = |address, state| {
            serde_json::json!({
                "address": address, "size": 512, "requested_size": 500, "state": state, "frames": [],
            })
        };
        let expected = serde_json::json!({
            "segments": [{
                "device": 0, "address": 512, "total_size": 1024, "allocated_size": 512,
                "active_size": 1024, "requested_size": 1000, "stream": 0, "segment_type": "small",
                "segment_pool_id": [0, 1], "is_expandable": true, "frames": [],
                "blocks": [
                    block(512, "active_pending_free"),
                    block(1024, "active_allocated"),
                    block(1536, "inactive"),
                ],
            }],
            "device_traces": [[
                {
                    "action": "oom", "device_free": 77, "size": 88, "stream": -1, "time_us": 99,
                    "compile_context": "N/A", "user_metadata": "", "pool_id": [0, 1],
                },
                {
                    "action": "free_requested", "addr": 77, "size": 88, "stream": -1, "time_us": 99,
                    "compile_context": "N/A", "user_metadata": "",
                },
            ]],
            "allocator_settings": {},
            "external_annotations": [],
        });
        assert_eq!(written, expected);
    }

    /// A list of many events comes in pieces the viewer can take, and stacks are written once.
    #[test]
    fn long_lists_and_shared_stacks() {
        let mut table = crate::stacks::StackTable::default();
        let frame = Frame { name: "f".into(), filename: "only_once.py".into(), line: 1 };
        let frame = table.intern(frame).unwrap();
        let stack = table.link(None, frame);
        let event = Event {
            action: Action::Snapshot,
            addr: 0,
            size: 0,
            stream: 0,
            time_us: 0,
            pool: None,
            stack,
        };
        let snapshot = Snapshot {
            origin: Origin::Torch,
            segments: Vec::new(),
            devices: vec![std::iter::repeat_n(event, 2500).collect()],
            settings: Settings::default(),
            stacks: table.finish(),
        };
        let bytes = pickle(&snapshot);
        assert_eq!(load(&bytes), snapshot);
        let text = b"only_once.py";
        assert_eq!(bytes.windows(text.len()).filter(|window| window == text).count(), 1);
        // A thousand, a thousand, and five hundred; the frame; the list of devices.
        let appends = bytes.iter().filter(|&&byte| byte == crate::pickle::op::APPENDS).count();
        assert!(appends >= 5, "{appends}");
        assert!(bytes.len() < 2500 * 40, "{}", bytes.len());
    }

    #[test]
    fn a_full_disk_is_an_error() {
        struct Full(usize);
        impl Write for Full {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let snapshot = Snapshot {
            origin: Origin::Torch,
            segments: Vec::new(),
            devices: Vec::new(),
            settings: Settings::default(),
            stacks: Stacks::default(),
        };
        for format in [FileFormat::Cushion, FileFormat::Pickle, FileFormat::Json] {
            let error = write_snapshot(&snapshot, format, Full(12)).expect_err("no room");
            assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{format:?}");
        }
    }
}
