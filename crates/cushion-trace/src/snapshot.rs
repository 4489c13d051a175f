//! The snapshot as Rust values: what PyTorch's allocator held when it was asked (segments and
//! blocks), what it did before that (events), and how it was set up.
//!
//! A trace has millions of events and far fewer stacks, so an event is a small `Copy` value and
//! names its stack by number. What no replay looks at (metadata, annotations, host memory) is
//! left out.

use std::fmt;

use crate::arena::{Arena, List};
use crate::error::TraceError;
use crate::events::Events;
use crate::pack::NOTHING;
use crate::stacks::{StackId, Stacks};
use crate::value::{StrId, Value};

/// A PyTorch memory snapshot.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// The memory the allocator held when the snapshot was taken, in the file's order.
    pub segments: Vec<Segment>,
    /// The recorded events, oldest first, for each device (`device_traces`).
    pub devices: Vec<Events>,
    /// How the allocator was set up.
    pub settings: Settings,
    /// The stacks that events refer to.
    pub stacks: Stacks,
    /// What recorded it.
    pub origin: Origin,
}

/// What recorded a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Origin {
    /// PyTorch's caching allocator: requests, segments and their driver calls.
    #[default]
    Torch,
    /// RAPIDS Memory Manager's log: requests only, no segments.
    Rmm,
}

/// One thing the allocator did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What it did.
    pub action: Action,
    /// The address it did it to; for [`Action::Oom`], the bytes that were free on the device.
    pub addr: u64,
    /// The size in bytes; of an allocation, the size that was asked for.
    pub size: u64,
    /// The stream, as the bits of its handle.
    pub stream: u64,
    /// When, in microseconds since 1970; zero where the file does not say.
    pub time_us: u64,
    /// The memory pool, where the file says: files of PyTorch 2.11 do not, newer ones do.
    pub pool: Option<(u64, u64)>,
    /// Where in the program, if stacks were recorded.
    pub stack: Option<StackId>,
}

/// A segment: memory that came from the driver in one piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The device it is on.
    pub device: u32,
    /// Its first address.
    pub address: u64,
    /// Its length in bytes.
    pub total_size: u64,
    /// The stream it belongs to, as the bits of its handle.
    pub stream: u64,
    /// Whether it serves large requests.
    pub large: bool,
    /// The memory pool it belongs to; the default one is `(0, 0)`.
    pub pool: (u64, u64),
    /// Whether it is a mapped range of an expandable segment.
    pub expandable: bool,
    /// Where in the program it was got, if stacks were recorded.
    pub stack: Option<StackId>,
    /// Its blocks, by address, without gaps.
    pub blocks: Vec<Block>,
}

/// A part of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its first address.
    pub address: u64,
    /// Its length in bytes.
    pub size: u64,
    /// The bytes that were asked for when it was last handed out.
    pub requested_size: u64,
    /// Whether it is in use.
    pub state: BlockState,
    /// Where in the program it was handed out, if stacks were recorded.
    pub stack: Option<StackId>,
}

/// Whether a block is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// The program has it.
    Allocated,
    /// The program gave it back, but a stream may still be using it.
    PendingFree,
    /// The cache has it.
    Inactive,
}

/// How the allocator was set up (`allocator_settings`). What the file does not say, or says in
/// another type than PyTorch 2.11 does, is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// The text of `PYTORCH_CUDA_ALLOC_CONF` (or its newer name, `PYTORCH_ALLOC_CONF`).
    pub conf: Option<String>,
    /// The largest block that may be split, in bytes; -1 for no limit.
    pub max_split_size: Option<i64>,
    /// The share of the memory fraction from which the cache is trimmed; 0 for never.
    pub garbage_collection_threshold: Option<f64>,
    /// Whether segments grow in place.
    pub expandable_segments: Option<bool>,
    /// Rounding of sizes: from how many MiB on, into how many divisions of a power of two.
    pub roundup_power2_divisions: Option<Vec<(u64, u64)>>,
    /// Whether memory used by several streams is used again during graph capture.
    pub graph_capture_record_stream_reuse: Option<bool>,
    /// Whether the allocator's lock is let go around `cudaMalloc`.
    pub release_lock_on_cudamalloc: Option<bool>,
    /// Threads that register pinned memory.
    pub pinned_num_register_threads: Option<i64>,
    /// Whether pinned memory is registered rather than allocated by CUDA.
    pub pinned_use_cuda_host_register: Option<bool>,
    /// The size from which on pinned memory is not rounded up, in bytes.
    pub max_round_threshold: Option<i64>,
    /// The largest pinned block that is cached, in bytes.
    pub max_cached_size: Option<i64>,
}

/// Names the reader knows. They are the first strings of every arena, so that a key is known by
/// its number and no string is compared.
macro_rules! names {
    ($($name:ident = $text:literal,)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Name { $($name,)* }

        impl Name {
            pub(crate) const ALL: &[Self] = &[$(Self::$name,)*];

            pub(crate) fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

names! {
    Alloc = "alloc", FreeRequested = "free_requested", FreeCompleted = "free_completed",
    SegmentAlloc = "segment_alloc", SegmentFree = "segment_free", SegmentMap = "segment_map",
    SegmentUnmap = "segment_unmap", Snapshot = "snapshot", Oom = "oom", Annotate = "annotate",
    Action = "action", Addr = "addr", DeviceFree = "device_free", Size = "size",
    Stream = "stream", TimeUs = "time_us", PoolId = "pool_id", Frames = "frames",
    Function = "name", Filename = "filename", Line = "line", Segments = "segments",
    DeviceTraces = "device_traces", AllocatorSettings = "allocator_settings", Device = "device",
    Address = "address", TotalSize = "total_size", SegmentType = "segment_type", Large = "large",
    Small = "small", SegmentPoolId = "segment_pool_id", IsExpandable = "is_expandable",
    Blocks = "blocks", RequestedSize = "requested_size", State = "state",
    ActiveAllocated = "active_allocated", ActivePendingFree = "active_pending_free",
    ActiveAwaitingFree = "active_awaiting_free", Inactive = "inactive",
    CudaAllocConf = "PYTORCH_CUDA_ALLOC_CONF", AllocConf = "PYTORCH_ALLOC_CONF",
    MaxSplitSize = "max_split_size", GarbageCollectionThreshold = "garbage_collection_threshold",
    ExpandableSegments = "expandable_segments",
    RoundupPower2Divisions = "roundup_power2_divisions",
    GraphCaptureRecordStreamReuse = "graph_capture_record_stream_reuse",
    ReleaseLockOnCudamalloc = "release_lock_on_cudamalloc",
    PinnedNumRegisterThreads = "pinned_num_register_threads",
    PinnedUseCudaHostRegister = "pinned_use_cuda_host_register",
    MaxRoundThreshold = "max_round_threshold", MaxCachedSize = "max_cached_size",
}

impl Name {
    /// The name that a string value is, if the reader knows it.
    #[inline]
    pub(crate) fn of(value: Value) -> Option<Self> {
        match value {
            Value::Str(StrId(id)) => Self::ALL.get(id as usize).copied(),
            _ => None,
        }
    }
}

macro_rules! actions {
    ($($action:ident: $doc:literal,)*) => {
        /// What the allocator did.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Action {
            $(#[doc = $doc] $action,)*
            /// Something this version of the reader has no name for.
            Other,
        }

        impl Action {
            /// The action's name in the file; `other` where the reader has none.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$action => Name::$action.text(),)*
                    Self::Other => "other",
                }
            }

            /// The action's number in packed events and in Cushion's own traces.
            pub(crate) fn code(self) -> u8 {
                self as u8
            }

            pub(crate) fn of_code(code: u8) -> Option<Self> {
                [$(Self::$action,)* Self::Other].get(usize::from(code)).copied()
            }

            #[inline]
            fn of(value: Value) -> Self {
                match Name::of(value) {
                    $(Some(Name::$action) => Self::$action,)*
                    _ => Self::Other,
                }
            }
        }
    };
}

actions! {
    Alloc: "A block was handed out.",
    FreeRequested: "The program gave a block back.",
    FreeCompleted: "The block is in the cache again: no stream was using it any more.",
    SegmentAlloc: "A segment came from the driver.",
    SegmentFree: "A segment went back to the driver.",
    SegmentMap: "Memory was mapped into an expandable segment.",
    SegmentUnmap: "Memory was unmapped from an expandable segment.",
    Snapshot: "A snapshot was taken; the size is that of the memory in use.",
    Oom: "A request failed for want of memory.",
    Annotate: "The program left a note.",
}

/// An event whose dict is still being filled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draft {
    event: Event,
    addr: bool,
    size: bool,
}

impl Draft {
    pub(crate) const EMPTY: Self = Self { event: NOTHING, addr: false, size: false };

    /// Takes one item of the dict; keys that are not known are passed over.
    #[inline]
    pub(crate) fn set(
        &mut self,
        key: Value,
        value: Value,
        arena: &mut Arena,
    ) -> Result<(), TraceError> {
        let Some(name) = Name::of(key) else {
            arena.discard(value);
            return Ok(());
        };
        let event = &mut self.event;
        let taken = match name {
            Name::Action => {
                event.action = Action::of(value);
                matches!(value, Value::Str(_))
            }
            Name::Addr => {
                self.addr = true;
                value.bits().map(|addr| event.addr = addr).is_some()
            }
            Name::DeviceFree => {
                self.addr = true;
                value.unsigned().map(|free| event.addr = free).is_some()
            }
            Name::Size => {
                self.size = true;
                value.unsigned().map(|size| event.size = size).is_some()
            }
            Name::Stream => value.bits().map(|stream| event.stream = stream).is_some(),
            Name::TimeUs => value.unsigned().map(|time| event.time_us = time).is_some(),
            Name::PoolId => {
                event.pool = arena.take_pair(value)?;
                event.pool.is_some() || value == Value::None
            }
            Name::Frames if value == Value::None => true,
            Name::Frames => {
                event.stack = arena.stack(value)?;
                true
            }
            _ => {
                arena.discard(value);
                true
            }
        };
        if taken { Ok(()) } else { Err(Self::fault(name, value, arena.at)) }
    }

    /// The event, once its dict is complete.
    #[inline]
    pub(crate) fn finish(&self, at: u64) -> Result<Event, TraceError> {
        let bare = matches!(self.event.action, Action::Snapshot | Action::Annotate | Action::Other);
        if bare || (self.addr && self.size) {
            return Ok(self.event);
        }
        let key = match self.event.action {
            _ if self.addr => Name::Size,
            Action::Oom => Name::DeviceFree,
            _ => Name::Addr,
        };
        let (action, key) = (self.event.action.name(), key.text());
        Err(TraceError::snapshot(at, format!("an event `{action}` has no `{key}`")))
    }

    #[cold]
    fn fault(name: Name, value: Value, at: u64) -> TraceError {
        let expected = match name {
            Name::Action => "a str",
            Name::PoolId => "two ints",
            Name::Addr | Name::Stream => "an int of 64 bits",
            _ => "an int of 64 bits that is not negative",
        };
        let (key, found) = (name.text(), value.kind());
        TraceError::snapshot(at, format!("`{key}` of an event is {found}, expected {expected}"))
    }
}

/// More devices than any machine has. An empty list may be named again and again in two bytes each.
const MAX_DEVICES: usize = 1024;

/// Makes the snapshot of the value a file built.
pub(crate) fn build(root: Value, mut arena: Arena) -> Result<Snapshot, TraceError> {
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
    let large = match record.get(Name::SegmentType).map(Name::of) {
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

/// `next` is where the block before ends: older files do not give blocks an address.
fn block(place: Place, value: Value, next: u64, arena: &mut Arena) -> Result<Block, TraceError> {
    let record = Record::take(value, place, arena)?;
    let size = record.need(Name::Size, record.unsigned(Name::Size)?)?;
    let state = match record.get(Name::State).map(Name::of) {
        Some(Some(Name::ActiveAllocated)) => BlockState::Allocated,
        // The second is what PyTorch's documentation calls it.
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
    let int = |name| match record.get(name) {
        Some(Value::Int(int)) => Some(int),
        _ => None,
    };
    let conf = match record.get(Name::CudaAllocConf).or(record.get(Name::AllocConf)) {
        Some(Value::Str(id)) => Some(arena.text(id).to_string()),
        _ => None,
    };
    let roundup_power2_divisions = match record.get(Name::RoundupPower2Divisions) {
        Some(value @ Value::Dict(_)) => {
            let divisions = Record::take(value, Place::Settings, arena)?;
            Some(divisions.steps(arena))
        }
        _ => None,
    };
    Ok(Settings {
        conf,
        max_split_size: int(Name::MaxSplitSize),
        garbage_collection_threshold: match record.get(Name::GarbageCollectionThreshold) {
            Some(Value::Float(share)) => Some(share),
            _ => None,
        },
        expandable_segments: record.flag(Name::ExpandableSegments),
        roundup_power2_divisions,
        graph_capture_record_stream_reuse: record.flag(Name::GraphCaptureRecordStreamReuse),
        release_lock_on_cudamalloc: record.flag(Name::ReleaseLockOnCudamalloc),
        pinned_num_register_threads: int(Name::PinnedNumRegisterThreads),
        pinned_use_cuda_host_register: record.flag(Name::PinnedUseCudaHostRegister),
        max_round_threshold: int(Name::MaxRoundThreshold),
        max_cached_size: int(Name::MaxCachedSize),
    })
}

/// Where in the snapshot a dict is, for messages.
#[derive(Clone, Copy, Debug)]
enum Place {
    Top,
    Settings,
    Segment(usize),
    Block(usize, usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Top => write!(f, "the top level"),
            Self::Settings => write!(f, "`allocator_settings`"),
            Self::Segment(i) => write!(f, "`segments[{i}]`"),
            Self::Block(i, j) => write!(f, "`segments[{i}].blocks[{j}]`"),
        }
    }
}

/// A dict whose keys are looked up by name.
struct Record {
    items: Vec<[Value; 2]>,
    place: Place,
    /// Where the file's value ends.
    at: u64,
}

impl Record {
    /// Each dict is taken once: a file that lists the same one a million times gets an error
    /// instead of a million copies.
    fn take(value: Value, place: Place, arena: &mut Arena) -> Result<Self, TraceError> {
        let found = match value {
            Value::Dict(id) => match arena.take_items(id) {
                Some(items) => return Ok(Self { items, place, at: arena.at }),
                None => "a dict that was used before",
            },
            _ => value.kind(),
        };
        Err(TraceError::snapshot(arena.at, format!("{place} is {found}, expected a dict")))
    }

    /// The value of a key, unless it is `None`; of a key given twice, the last.
    fn get(&self, name: Name) -> Option<Value> {
        let item = self.items.iter().rev().find(|[key, _]| Name::of(*key) == Some(name));
        item.map(|&[_, value]| value).filter(|value| *value != Value::None)
    }

    fn bits(&self, name: Name) -> Result<Option<u64>, TraceError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.bits().map(Some).ok_or_else(|| self.fault(name, "an int of 64 bits"))
    }

    fn unsigned(&self, name: Name) -> Result<Option<u64>, TraceError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let expected = "an int of 64 bits that is not negative";
        value.unsigned().map(Some).ok_or_else(|| self.fault(name, expected))
    }

    fn flag(&self, name: Name) -> Option<bool> {
        match self.get(name) {
            Some(Value::Bool(flag)) => Some(flag),
            _ => None,
        }
    }

    fn stack(&self, arena: &mut Arena) -> Result<Option<StackId>, TraceError> {
        self.get(Name::Frames).map_or(Ok(None), |frames| arena.stack(frames))
    }

    fn need<T>(&self, name: Name, value: Option<T>) -> Result<T, TraceError> {
        value.ok_or_else(|| self.fault(name, "it"))
    }

    fn list(&self, name: Name, arena: &mut Arena) -> Result<Vec<Value>, TraceError> {
        match self.get(name) {
            Some(Value::List(id)) => match arena.take_list(id) {
                List::Values(values) => Ok(values),
                _ => Err(self.fault(name, "a list of its own")),
            },
            // An empty list, once it was read as the frames of something.
            Some(Value::Stack(None)) => Ok(Vec::new()),
            _ => Err(self.fault(name, "a list")),
        }
    }

    /// `{"1": 4, "2": 8}` as pairs of numbers, in the file's order.
    fn steps(&self, arena: &Arena) -> Vec<(u64, u64)> {
        let number = |value| match value {
            Value::Str(id) => arena.text(id).parse().ok(),
            value => value.unsigned(),
        };
        self.items.iter().filter_map(|&[from, to]| number(from).zip(number(to))).collect()
    }

    #[cold]
    fn fault(&self, name: Name, expected: &str) -> TraceError {
        let (place, key) = (self.place, name.text());
        let what = match self.get(name) {
            None => format!("{place} has no `{key}`"),
            Some(found) => {
                format!("`{key}` of {place} is {}, expected {expected}", found.kind())
            }
        };
        TraceError::snapshot(self.at, what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open::{Limits, read};
    use crate::pickle::write::{dict, int, list, pair, snapshot, text, top};

    fn load(pickle: &[u8]) -> Result<Snapshot, TraceError> {
        read(pickle, &Limits::default())
    }

    /// What is wrong with a pickle that is not a snapshot.
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
    fn an_event_is_small() {
        assert_eq!(size_of::<Event>(), 64);
    }

    #[test]
    fn action_names_go_both_ways() {
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
        let empty = Draft::EMPTY.event;
        assert_eq!(
            events.get(0).unwrap(),
            Event { action: Action::Alloc, addr: u64::MAX, size: 8, ..empty }
        );
        assert_eq!(events.get(1).unwrap(), Event { action: Action::Snapshot, ..empty });
        let oom = Event { action: Action::Oom, addr: 77, size: 8, stream: u64::MAX - 1, ..empty };
        assert_eq!(events.get(2).unwrap(), Event { pool: Some((1, 2)), ..oom });
    }

    #[test]
    fn an_event_that_lacks_what_it_needs_is_named() {
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
    fn a_segment_of_an_old_file() {
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
    fn a_segment_of_a_new_file() {
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
    fn a_segment_that_lacks_what_it_needs_is_named() {
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
    fn settings_are_what_the_file_says() {
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
        // A number of another snapshot is harmless.
        assert_eq!(Stacks::default().frames(a).count(), 0);
    }
}
