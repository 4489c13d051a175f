//! Makes a snapshot of the Python values that a file built.

use super::arena::{Arena, List};
use super::record::{Place, Record};
use super::value::{Value, name_of};
use crate::model::error::TraceError;
use crate::model::events::Events;
use crate::model::names::Name;
use crate::model::settings::Settings;
use crate::model::snapshot::{Block, BlockState, Origin, Segment, Snapshot};

/// The most devices; no machine has more. Without a limit, a file could repeat an empty list at two
/// bytes each.
const MAX_DEVICES: usize = 1024;

/// Makes the snapshot of the value that a file built.
pub(crate) fn snapshot(root: Value, mut arena: Arena) -> Result<Snapshot, TraceError> {
    let top = Record::take(root, Place::Top, &mut arena)?;
    let segment_list = top.list(Name::Segments, &mut arena)?;
    let device_list = top.list(Name::DeviceTraces, &mut arena)?;
    let mut segments = Vec::with_capacity(segment_list.len());
    for (i, value) in segment_list.into_iter().enumerate() {
        segments.push(segment(i, value, &mut arena)?);
    }
    if device_list.len() > MAX_DEVICES {
        let what = format!(
            "`device_traces` has {} devices, expected at most {MAX_DEVICES}",
            device_list.len()
        );
        return Err(TraceError::snapshot(arena.at, what));
    }
    let mut devices = Vec::with_capacity(device_list.len());
    for (i, value) in device_list.into_iter().enumerate() {
        devices.push(events(i, value, &mut arena)?);
    }
    let settings = match top.get(Name::AllocatorSettings) {
        Some(value) => settings(value, &mut arena)?,
        None => Settings::default(),
    };
    Ok(Snapshot {
        segments,
        devices,
        settings,
        stacks: arena.into_stacks().finish(),
        origin: Origin::Torch,
    })
}

fn events(device: usize, value: Value, arena: &mut Arena) -> Result<Events, TraceError> {
    let list = match value {
        Value::List(id) => arena.take_list(id),
        Value::Stack(None) => List::Values(Vec::new()),
        _ => List::Values(vec![value]),
    };
    let found = match list {
        List::Events(events) => return Ok(*events),
        List::Values(values) if values.is_empty() => return Ok(Events::default()),
        List::Values(_) if !matches!(value, Value::List(_)) => value.kind(),
        List::Values(_) => "a list of something else",
        List::Stack(_) => "a list of frames",
        List::Gone => "a list that was used before",
    };
    let what = format!("`device_traces[{device}]` is {found}, expected a list of events");
    Err(TraceError::snapshot(arena.at, what))
}

fn segment(index: usize, value: Value, arena: &mut Arena) -> Result<Segment, TraceError> {
    let record = Record::take(value, Place::Segment(index), arena)?;
    let address = record.need(Name::Address, record.bits(Name::Address)?)?;
    let total_size = record.need(Name::TotalSize, record.unsigned(Name::TotalSize)?)?;
    let device = record.unsigned(Name::Device)?.unwrap_or(0);
    let device =
        u32::try_from(device).map_err(|_| record.fault(Name::Device, "a number of devices"))?;
    let large = match record.get(Name::SegmentType).map(name_of) {
        Some(Some(Name::Large)) => true,
        Some(Some(Name::Small)) => false,
        Some(_) => return Err(record.fault(Name::SegmentType, "`small` or `large`")),
        // PyTorch's small segments are 2 MiB.
        None => total_size > 2 << 20,
    };
    let pool = match record.get(Name::SegmentPoolId) {
        Some(value) => {
            arena.pair(value).ok_or_else(|| record.fault(Name::SegmentPoolId, "two ints"))?
        }
        None => (0, 0),
    };
    let list = record.list(Name::Blocks, arena)?;
    let mut blocks = Vec::with_capacity(list.len());
    let mut next = address;
    for (i, value) in list.into_iter().enumerate() {
        let block = block(Place::Block(index, i), value, next, arena)?;
        next = block.address.wrapping_add(block.size);
        blocks.push(block);
    }
    Ok(Segment {
        device,
        address,
        total_size,
        stream: record.bits(Name::Stream)?.unwrap_or(0),
        large,
        pool,
        expandable: record.flag(Name::IsExpandable).unwrap_or(false),
        stack: record.stack(arena)?,
        blocks,
    })
}

/// Makes a block. `next` is the end of the block before: in older files blocks have no address.
fn block(place: Place, value: Value, next: u64, arena: &mut Arena) -> Result<Block, TraceError> {
    let record = Record::take(value, place, arena)?;
    let size = record.need(Name::Size, record.unsigned(Name::Size)?)?;
    let state = match record.get(Name::State).map(name_of) {
        Some(Some(Name::ActiveAllocated)) => BlockState::Allocated,
        // The second name is that of PyTorch's documentation.
        Some(Some(Name::ActivePendingFree | Name::ActiveAwaitingFree)) => BlockState::PendingFree,
        Some(Some(Name::Inactive)) => BlockState::Inactive,
        _ => {
            let states = "`active_allocated`, `active_pending_free` or `inactive`";
            return Err(record.fault(Name::State, states));
        }
    };
    Ok(Block {
        address: record.bits(Name::Address)?.unwrap_or(next),
        size,
        requested_size: record.unsigned(Name::RequestedSize)?.unwrap_or(size),
        state,
        stack: record.stack(arena)?,
    })
}

fn settings(value: Value, arena: &mut Arena) -> Result<Settings, TraceError> {
    let record = Record::take(value, Place::Settings, arena)?;
    let mut settings = Settings::default();
    let fields = settings.fields();
    if let Some(Value::Str(id)) = record.get(Name::CudaAllocConf).or(record.get(Name::AllocConf)) {
        *fields.conf = Some(arena.text(id).to_string());
    }
    if let Some(Value::Float(share)) = record.get(Name::GarbageCollectionThreshold) {
        *fields.threshold = Some(share);
    }
    if let Some(value @ Value::Dict(_)) = record.get(Name::RoundupPower2Divisions) {
        let divisions = Record::take(value, Place::Settings, arena)?;
        *fields.divisions = Some(divisions.steps(arena));
    }
    for (name, int) in fields.ints {
        *int = record.int(name);
    }
    for (name, flag) in fields.flags {
        *flag = record.flag(name);
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::{Block, BlockState, Name, Segment, Settings, Snapshot, TraceError};
    use crate::model::event::{Action, Event};
    use crate::model::stacks::Stacks;
    use crate::read::limits::Limits;
    use crate::read::open::read;
    use crate::testing::pickle::{dict, int, list, pair, snapshot, text, top};

    fn load(pickle: &[u8]) -> Result<Snapshot, TraceError> {
        read(pickle, &Limits::default())
    }

    /// Returns the message for a pickle that is not a snapshot.
    fn fault(pickle: &[u8]) -> String {
        match load(pickle) {
            Err(TraceError::Snapshot { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    fn with_segment(items: &[(&str, Vec<u8>)]) -> Vec<u8> {
        top(&[("device_traces", list(&[])), ("segments", list(&[dict(items)]))])
    }

    fn with_settings(items: &[(&str, Vec<u8>)]) -> Settings {
        let empty = list(&[]);
        let settings = ("allocator_settings", dict(items));
        load(&top(&[("segments", empty.clone()), ("device_traces", empty), settings]))
            .unwrap()
            .settings
    }

    const TRUE: [u8; 1] = [0x88];
    const NONE: [u8; 1] = [b'N'];

    #[test]
    fn actions_are_read_by_name() {
        for name in [Name::Alloc, Name::FreeCompleted, Name::SegmentUnmap, Name::Oom] {
            let pickle = snapshot(&[dict(&[
                ("action", text(name.text())),
                ("addr", int(1)),
                ("size", int(1)),
            ])]);
            assert_eq!(
                load(&pickle).unwrap().devices[0].get(0).unwrap().action.name(),
                name.text()
            );
        }
        let own = load(&snapshot(&[dict(&[("action", text("spill"))])])).unwrap();
        assert_eq!(own.devices[0].get(0).unwrap().action, Action::Other);
    }

    #[test]
    fn optional_keys_of_an_event_have_defaults() {
        let bare = dict(&[("action", text("alloc")), ("addr", int(-1)), ("size", int(8))]);
        let nones = dict(&[
            ("action", text("snapshot")),
            ("pool_id", NONE.to_vec()),
            ("frames", NONE.to_vec()),
        ]);
        let full = dict(&[
            ("action", text("oom")),
            ("device_free", int(77)),
            ("size", int(8)),
            ("stream", int(-2)),
            ("pool_id", list(&[int(1), int(2)])),
            ("frames", list(&[])),
            ("novelty", dict(&[("deep", list(&[NONE.to_vec()]))])),
        ]);
        let events = load(&snapshot(&[bare, nones, full])).unwrap().devices.remove(0);
        let empty = Event::EMPTY;
        assert_eq!(
            events.get(0).unwrap(),
            Event { action: Action::Alloc, addr: u64::MAX, size: 8, ..empty }
        );
        assert_eq!(events.get(1).unwrap(), Event { action: Action::Snapshot, ..empty });
        let oom = Event { action: Action::Oom, addr: 77, size: 8, stream: u64::MAX - 1, ..empty };
        assert_eq!(events.get(2).unwrap(), Event { pool: Some((1, 2)), ..oom });
    }

    #[test]
    fn an_incomplete_event_is_an_error_that_names_the_key() {
        let lacks = |items: &[(&str, Vec<u8>)]| fault(&snapshot(&[dict(items)]));
        let [alloc, oom] = ["alloc", "oom"].map(|action| ("action", text(action)));
        let size = ("size", int(1));
        assert!(lacks(&[alloc.clone(), size.clone()]).contains("`alloc`"));
        assert!(lacks(&[alloc.clone(), size.clone()]).ends_with("has no `addr`"));
        assert!(lacks(&[oom, size]).ends_with("has no `device_free`"));
        assert!(lacks(&[alloc.clone(), ("addr", int(1))]).ends_with("has no `size`"));
        assert!(
            lacks(&[alloc.clone(), ("size", int(-1))])
                .contains("`size` of an event is a negative int")
        );
        assert!(
            lacks(&[alloc.clone(), ("addr", text("x"))]).contains("`addr` of an event is a str")
        );
        assert!(lacks(&[alloc, ("pool_id", int(1))]).contains("`pool_id` of an event is an int"));
        assert!(lacks(&[("action", int(1))]).contains("`action` of an event is an int"));
    }

    #[test]
    fn the_top_level_must_be_a_snapshot() {
        let empty = list(&[]);
        assert_eq!(fault(b"]."), "the top level is a list, expected a dict");
        let half = top(&[("segments", empty.clone())]);
        assert_eq!(fault(&half), "the top level has no `device_traces`");
        let half = top(&[("device_traces", empty.clone())]);
        assert_eq!(fault(&half), "the top level has no `segments`");
        let odd = top(&[("segments", int(1)), ("device_traces", empty.clone())]);
        assert_eq!(fault(&odd), "`segments` of the top level is an int, expected a list");
        let odd = top(&[("segments", empty), ("device_traces", list(&[int(1)]))]);
        assert_eq!(fault(&odd), "`device_traces[0]` is an int, expected a list of events");
    }

    #[test]
    fn a_list_of_events_is_used_once() {
        let event = dict(&[("action", text("snapshot"))]);
        let twice = list(&[[list(&[event]), b"2".to_vec()].concat()]);
        let what = fault(&top(&[("segments", list(&[])), ("device_traces", twice)]));
        assert!(what.contains("`device_traces[1]` is a list that was used before"), "{what}");
    }

    #[test]
    fn a_segment_of_an_old_file_has_defaults() {
        let block = |size, state| dict(&[("size", int(size)), ("state", text(state))]);
        let blocks = list(&[
            block(512, "active_allocated"),
            block(1024, "active_pending_free"),
            block(512, "inactive"),
        ]);
        let items = [("address", int(4096)), ("total_size", int(2048)), ("blocks", blocks)];
        let snapshot = load(&with_segment(&items)).unwrap();
        let block = |address, size, state| Block {
            address,
            size,
            requested_size: size,
            state,
            stack: None,
        };
        let expected = Segment {
            stack: None,
            device: 0,
            address: 4096,
            total_size: 2048,
            stream: 0,
            large: false,
            pool: (0, 0),
            expandable: false,
            blocks: vec![
                block(4096, 512, BlockState::Allocated),
                block(4608, 1024, BlockState::PendingFree),
                block(5632, 512, BlockState::Inactive),
            ],
        };
        assert_eq!(snapshot.segments, [expected]);
        assert!(snapshot.devices.is_empty() && snapshot.stacks.is_empty());
        assert_eq!(snapshot.settings, Settings::default());
    }

    #[test]
    fn a_segment_of_a_new_file_is_read() {
        let block = dict(&[
            ("address", int(9000)),
            ("size", int(4096)),
            ("requested_size", int(4000)),
            ("state", text("active_awaiting_free")),
            ("frames", list(&[])),
        ]);
        let items = [
            ("device", int(3)),
            ("address", int(8192)),
            ("total_size", int(4096)),
            ("stream", int(-1)),
            ("segment_type", text("large")),
            ("segment_pool_id", pair(0, 1)),
            ("is_expandable", TRUE.to_vec()),
            ("blocks", list(&[block])),
        ];
        let segment = load(&with_segment(&items)).unwrap().segments.remove(0);
        assert_eq!((segment.device, segment.stream, segment.pool), (3, u64::MAX, (0, 1)));
        assert!(segment.large && segment.expandable);
        let state = BlockState::PendingFree;
        let expected =
            Block { address: 9000, size: 4096, requested_size: 4000, state, stack: None };
        assert_eq!(segment.blocks, [expected]);
    }

    #[test]
    fn an_incomplete_segment_is_an_error_that_names_the_key() {
        let whole = [("address", int(0)), ("total_size", int(1)), ("blocks", list(&[dict(&[])]))];
        assert_eq!(fault(&with_segment(&whole[1..])), "`segments[0]` has no `address`");
        assert_eq!(fault(&with_segment(&whole[..2])), "`segments[0]` has no `blocks`");
        assert_eq!(fault(&with_segment(&whole)), "`segments[0].blocks[0]` has no `size`");
        let device = [&[("device", int(-1))][..], &whole].concat();
        assert!(fault(&with_segment(&device)).starts_with("`device` of `segments[0]` is a neg"));
        let state = list(&[dict(&[("size", int(1)), ("state", text("lost"))])]);
        let items = [("address", int(0)), ("total_size", int(1)), ("blocks", state)];
        assert!(fault(&with_segment(&items)).contains("expected `active_allocated`"));
        // One segment, listed twice.
        let twice = [dict(&whole), b"2".to_vec()].concat();
        let pickle = top(&[("device_traces", list(&[])), ("segments", list(&[twice]))]);
        assert!(load(&pickle).is_err());
    }

    #[test]
    fn settings_are_read() {
        let divisions = dict(&[("1", int(4)), ("x", int(1)), ("16", int(8))]);
        let settings = with_settings(&[
            ("PYTORCH_ALLOC_CONF", text("backend:native")),
            ("max_split_size", int(-1)),
            ("garbage_collection_threshold", b"G\x3f\xe8\0\0\0\0\0\0".to_vec()),
            ("expandable_segments", TRUE.to_vec()),
            ("roundup_power2_divisions", divisions),
            ("graph_capture_record_stream_reuse", int(1)),
            ("from_the_future", int(1)),
        ]);
        let expected = Settings {
            conf: Some("backend:native".to_owned()),
            max_split_size: Some(-1),
            garbage_collection_threshold: Some(0.75),
            expandable_segments: Some(true),
            roundup_power2_divisions: Some(vec![(1, 4), (16, 8)]),
            ..Settings::default()
        };
        assert_eq!(settings, expected);
    }

    #[test]
    fn stacks_share_their_callers() {
        let frame = |name: &str, line| {
            dict(&[("name", text(name)), ("filename", text("a.py")), ("line", int(line))])
        };
        let event =
            |frames: &[Vec<u8>]| dict(&[("action", text("annotate")), ("frames", list(frames))]);
        let [main, step, test] = [frame("main", 9), frame("step", 5), frame("test", -5)];
        let read = load(&snapshot(&[
            event(&[step.clone(), main.clone()]),
            event(&[test, main.clone()]),
            event(&[step, main.clone()]),
            event(&[main]),
        ]))
        .unwrap();
        assert_eq!(read.stacks.counts(), (3, 3));
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| read.devices[0].get(i).unwrap().stack.unwrap());
        assert!(a == c && a != b && b != d);
        let names = |id| -> Vec<_> { read.stacks.frames(id).map(|f| (&*f.name, f.line)).collect() };
        assert_eq!(names(a), [("step", 5), ("main", 9)]);
        assert_eq!(names(b), [("test", 0), ("main", 9)]);
        assert_eq!(names(d), [("main", 9)]);
        // The number of another snapshot's stack is harmless.
        assert_eq!(Stacks::default().frames(a).count(), 0);
    }
}
