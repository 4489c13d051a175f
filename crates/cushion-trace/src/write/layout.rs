//! Writes the keys and values of a snapshot file to a [`Sink`], in PyTorch's layout.

use std::io;

use super::sink::{Shared, Sink};
use super::viewer::Ready;
use crate::model::event::{Action, Event};
use crate::model::names::Name;
use crate::model::settings::Settings;
use crate::model::snapshot::{Block, BlockState, Segment};
use crate::model::stacks::{StackId, Stacks};

/// Writes a snapshot with the keys of PyTorch 2.11.
pub(super) fn put_snapshot<'a, S: Sink<'a>>(ready: &'a Ready<'_>, sink: &mut S) -> io::Result<()> {
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
        put_block(block, stacks, sink)?;
    }
    sink.close_list()?;
    sink.close_dict()
}

fn put_block<'a, S: Sink<'a>>(block: &Block, stacks: &'a Stacks, sink: &mut S) -> io::Result<()> {
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

/// Writes the settings that are known.
fn put_settings<'a, S: Sink<'a>>(settings: &'a Settings, sink: &mut S) -> io::Result<()> {
    let mut fields_of = settings.clone();
    let fields = fields_of.fields();
    sink.open_dict()?;
    if let Some(conf) = &settings.conf {
        sink.key(Name::CudaAllocConf)?;
        sink.text(conf)?;
    }
    if let Some(threshold) = fields.threshold {
        sink.key(Name::GarbageCollectionThreshold)?;
        sink.float(*threshold)?;
    }
    for (name, int) in fields.ints {
        if let Some(int) = int {
            sink.key(name)?;
            sink.int(*int)?;
        }
    }
    let mut flags = fields.flags;
    // `graph_capture_record_stream_reuse` comes last in these files.
    flags[1..].rotate_left(1);
    for (name, flag) in flags {
        if let Some(flag) = flag {
            sink.key(name)?;
            sink.flag(*flag)?;
        }
    }
    if let Some(divisions) = fields.divisions {
        sink.key(Name::RoundupPower2Divisions)?;
        sink.open_dict()?;
        for &mut (from, into) in divisions {
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
    use crate::format::pickle::op;
    use crate::model::snapshot::{Origin, Snapshot};
    use crate::model::stacks::{Frame, StackTable};
    use crate::read::limits::Limits;
    use crate::read::open::read;
    use crate::testing::{any_snapshot, pickle as opcodes};
    use crate::write::{json, pickle};

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

    /// Returns the pickle with the values of a JSON text.
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

    /// A snapshot with its frames in place of stack numbers, which differ between readers.
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
        fn written_snapshots_are_read_back(snapshot in any_snapshot()) {
            let expected = plain(&snapshot);
            prop_assert_eq!(&plain(&load(&pickle(&snapshot))), &expected);
            let value = serde_json::from_slice(&json(&snapshot)).unwrap();
            let read = load(&[as_pickle(&value), b".".to_vec()].concat());
            prop_assert_eq!(&plain(&read), &expected);
        }
    }

    #[test]
    fn the_keys_are_those_of_pytorch_2_11() {
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
                "address": address, "size": 512, "requested_size": 500, "state": state,
                "frames": [],
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

    /// A long list is appended in batches that the viewer can read, and a stack is written once.
    #[test]
    fn long_lists_are_batched_and_stacks_shared() {
        let mut table = StackTable::default();
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
        let appends = bytes.iter().filter(|&&byte| byte == op::APPENDS).count();
        assert!(appends >= 5, "{appends}");
        assert!(bytes.len() < 2500 * 40, "{}", bytes.len());
    }
}
