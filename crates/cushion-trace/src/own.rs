//! Cushion's own trace file: everything a [`Snapshot`] has, in a tenth of the pickle's bytes or less.
//! `docs/trace-format.md` has it byte by byte.
//!
//! The file is read in one go and not trusted. No count in it allocates anything: memory grows with
//! the bytes that came, under [`Limits`](crate::Limits), and what refers to something is checked.

use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::columns::{Decoder, Encoder, GROUP, broken, number, stack_of};
use crate::error::TraceError;
use crate::events::Events;
use crate::pack::{put_number, unzigzag, zigzag};
use crate::snapshot::{Block, BlockState, Origin, Segment, Settings, Snapshot};
use crate::source::Source;
use crate::stacks::{Frame, StackId, StackTable, Stacks};

/// How every such file starts, once unpacked; a byte with the version follows.
pub(crate) const MAGIC: &[u8] = b"CUSHION";
const VERSION: u8 = 1;
// Where the events come from: PyTorch's allocator, or RMM's log.
const FROM_TORCH: u8 = 0;
const FROM_RMM: u8 = 1;

// Each part starts with a letter, so that a reader that has lost its way notices.
const SETTINGS: u8 = b'A';
const TEXTS: u8 = b'T';
const FRAMES: u8 = b'F';
const STACKS: u8 = b'S';
const MEMORY: u8 = b'M';
const EVENTS: u8 = b'E';
const END: u8 = b'Z';

// A segment's first byte.
const LARGE: u8 = 0x01;
const EXPANDABLE: u8 = 0x02;
const PRIVATE: u8 = 0x04;
const SEGMENT_STACK: u8 = 0x08;
// A block's; its two low bits are the state.
const STATE: u8 = 0x03;
const REQUESTED: u8 = 0x04;
const BLOCK_STACK: u8 = 0x08;
const ELSEWHERE: u8 = 0x10;

/// Writes the file, wrapped in gzip, whose checksum protects it.
pub(crate) fn write(snapshot: &Snapshot, out: impl Write) -> io::Result<()> {
    let mut encoder = GzEncoder::new(out, Compression::best());
    write_bare(snapshot, &mut encoder)?;
    encoder.finish()?.flush()
}

/// Writes the file without the wrapping.
fn write_bare(snapshot: &Snapshot, out: &mut impl Write) -> io::Result<()> {
    let Snapshot { segments, devices, settings, stacks, origin } = snapshot;
    let mut bytes = MAGIC.to_vec();
    let origin = match origin {
        Origin::Torch => FROM_TORCH,
        Origin::Rmm => FROM_RMM,
    };
    bytes.extend_from_slice(&[VERSION, origin]);
    put_settings(&mut bytes, settings);
    put_stacks(&mut bytes, stacks);
    bytes.push(MEMORY);
    put_number(&mut bytes, segments.len() as u64);
    let mut blocks = 0;
    for segment in segments {
        put_segment(&mut bytes, segment);
        blocks += segment.blocks.len() as u64;
        drain_full(&mut bytes, out)?;
    }
    bytes.push(EVENTS);
    put_number(&mut bytes, devices.len() as u64);
    let mut events = 0;
    out.write_all(&bytes)?;
    let mut group = Encoder::default();
    for device in devices {
        for event in device {
            group.push(&event);
            if group.len() == GROUP {
                group.write(out)?;
            }
        }
        if group.len() > 0 {
            group.write(out)?;
        }
        out.write_all(&[0])?;
        events += device.len() as u64;
    }
    bytes.clear();
    bytes.push(END);
    put_number(&mut bytes, blocks);
    put_number(&mut bytes, events);
    out.write_all(&bytes)
}

fn drain_full(bytes: &mut Vec<u8>, out: &mut impl Write) -> io::Result<()> {
    if bytes.len() > 1 << 16 {
        out.write_all(bytes)?;
        bytes.clear();
    }
    Ok(())
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    put_number(bytes, text.len() as u64);
    bytes.extend_from_slice(text.as_bytes());
}

/// A number says which settings follow, one bit for each.
fn put_settings(bytes: &mut Vec<u8>, settings: &Settings) {
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
    let (mut which, mut values) = (0, Vec::new());
    if let Some(conf) = conf {
        which |= 1;
        put_text(&mut values, conf);
    }
    if let Some(threshold) = garbage_collection_threshold {
        which |= 1 << 1;
        values.extend_from_slice(&threshold.to_le_bytes());
    }
    if let Some(divisions) = roundup_power2_divisions {
        which |= 1 << 2;
        put_number(&mut values, divisions.len() as u64);
        for &(from, into) in divisions {
            put_number(&mut values, from);
            put_number(&mut values, into);
        }
    }
    let ints = [max_split_size, pinned_num_register_threads, max_round_threshold, max_cached_size];
    for (bit, int) in (3..).zip(ints) {
        if let Some(int) = int {
            which |= 1 << bit;
            put_number(&mut values, zigzag(*int));
        }
    }
    let flags = [
        expandable_segments,
        graph_capture_record_stream_reuse,
        release_lock_on_cudamalloc,
        pinned_use_cuda_host_register,
    ];
    for (bit, flag) in (7..).zip(flags) {
        if let Some(flag) = flag {
            which |= 1 << bit;
            values.push((*flag).into());
        }
    }
    bytes.push(SETTINGS);
    put_number(bytes, which);
    bytes.extend_from_slice(&values);
}

/// The texts that frames are made of, the frames that stacks are made of, and the stacks.
fn put_stacks(bytes: &mut Vec<u8>, stacks: &Stacks) {
    let mut texts: Vec<&str> = Vec::new();
    let mut numbers: HashMap<&str, u64> = HashMap::new();
    let mut frames = Vec::new();
    for frame in stacks.all_frames() {
        for text in [&*frame.name, &*frame.filename] {
            let number = *numbers.entry(text).or_insert_with(|| {
                texts.push(text);
                texts.len() as u64 - 1
            });
            put_number(&mut frames, number);
        }
        put_number(&mut frames, frame.line.into());
    }
    bytes.push(TEXTS);
    put_number(bytes, texts.len() as u64);
    texts.iter().for_each(|text| put_text(bytes, text));
    let (frame_count, stack_count) = stacks.counts();
    bytes.push(FRAMES);
    put_number(bytes, frame_count as u64);
    bytes.extend_from_slice(&frames);
    bytes.push(STACKS);
    put_number(bytes, stack_count as u64);
    for (frame, caller) in stacks.nodes() {
        put_number(bytes, frame as u64);
        put_number(bytes, caller.map_or(0, |caller| caller.number().into()));
    }
}

fn put_segment(bytes: &mut Vec<u8>, segment: &Segment) {
    let Segment { device, address, total_size, stream, large, pool, expandable, stack, blocks } =
        segment;
    let flag = |set: bool, bit| if set { bit } else { 0 };
    bytes.push(
        flag(*large, LARGE)
            | flag(*expandable, EXPANDABLE)
            | flag(*pool != (0, 0), PRIVATE)
            | flag(stack.is_some(), SEGMENT_STACK),
    );
    put_number(bytes, u64::from(*device));
    put_number(bytes, *address);
    put_number(bytes, *total_size);
    put_number(bytes, *stream);
    if *pool != (0, 0) {
        put_number(bytes, pool.0);
        put_number(bytes, pool.1);
    }
    put_stack(bytes, *stack);
    put_number(bytes, blocks.len() as u64);
    let mut next = *address;
    for block in blocks {
        let Block { address, size, requested_size, state, stack } = block;
        bytes.push(
            state_code(*state)
                | flag(requested_size != size, REQUESTED)
                | flag(stack.is_some(), BLOCK_STACK)
                | flag(*address != next, ELSEWHERE),
        );
        put_number(bytes, *size);
        if requested_size != size {
            put_number(bytes, *requested_size);
        }
        put_stack(bytes, *stack);
        if *address != next {
            put_number(bytes, *address);
        }
        next = address.wrapping_add(*size);
    }
}

fn put_stack(bytes: &mut Vec<u8>, stack: Option<StackId>) {
    if let Some(stack) = stack {
        put_number(bytes, stack.number().into());
    }
}

fn state_code(state: BlockState) -> u8 {
    match state {
        BlockState::Allocated => 0,
        BlockState::PendingFree => 1,
        BlockState::Inactive => 2,
    }
}

/// Reads the file, unwrapped, from its first byte on.
pub(crate) fn read(source: &mut Source<'_>) -> Result<Snapshot, TraceError> {
    let mut reader = Reader { source, held: 0 };
    reader.source.skip(MAGIC.len() as u64)?;
    let offset = reader.source.offset();
    let version = reader.source.byte()?;
    if version != VERSION {
        let expected = format!("version {VERSION}, the one this program knows");
        return Err(broken(offset, expected, format!("version {version}")));
    }
    let offset = reader.source.offset();
    let origin = match reader.source.byte()? {
        FROM_TORCH => Origin::Torch,
        FROM_RMM => Origin::Rmm,
        other => {
            let expected = "0 for events of PyTorch, or 1 for those of RMM";
            return Err(broken(offset, expected, format!("{other}")));
        }
    };
    let settings = reader.settings()?;
    let stacks = reader.stacks()?;
    let known = stacks.counts().1;
    let segments = reader.segments(known)?;
    let devices = reader.devices(known)?;
    reader.end(&segments, &devices)?;
    Ok(Snapshot { segments, devices, settings, stacks, origin })
}

struct Reader<'s, 'r> {
    source: &'s mut Source<'r>,
    /// An estimate of the bytes held, for the memory limit.
    held: usize,
}

impl Reader<'_, '_> {
    fn part(&mut self, letter: u8) -> Result<(), TraceError> {
        let offset = self.source.offset();
        let byte = self.source.byte()?;
        if byte == letter {
            return Ok(());
        }
        let expected = format!("the part `{}`", letter as char);
        Err(broken(offset, expected, format!("the byte {byte:#04x}")))
    }

    fn number(&mut self) -> Result<u64, TraceError> {
        number(self.source)
    }

    /// Counts memory before it is taken.
    fn hold(&mut self, bytes: usize) -> Result<(), TraceError> {
        self.held = self.held.saturating_add(bytes);
        self.within(self.held)
    }

    fn within(&self, held: usize) -> Result<(), TraceError> {
        self.source.check_memory(held, self.source.offset())
    }

    fn text(&mut self) -> Result<Arc<str>, TraceError> {
        let len = self.number()?;
        let offset = self.source.offset();
        let mut bytes = Vec::new();
        self.source.copy(len, &mut bytes)?;
        self.hold(bytes.len() + 80)?;
        match str::from_utf8(&bytes) {
            Ok(text) => Ok(text.into()),
            Err(error) => {
                let offset = offset + error.valid_up_to() as u64;
                Err(broken(offset, "text in UTF-8", "other bytes"))
            }
        }
    }

    fn flag(&mut self) -> Result<bool, TraceError> {
        let offset = self.source.offset();
        match self.source.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            byte => Err(broken(offset, "0 or 1", format!("the byte {byte:#04x}"))),
        }
    }

    fn settings(&mut self) -> Result<Settings, TraceError> {
        self.part(SETTINGS)?;
        let offset = self.source.offset();
        let which = self.number()?;
        if which >> 11 != 0 {
            let found = format!("the bits {which:#x}");
            return Err(broken(offset, "bits of the 11 settings", found));
        }
        let has = |bit: u32| which >> bit & 1 != 0;
        let mut settings = Settings::default();
        if has(0) {
            settings.conf = Some(self.text()?.as_ref().to_owned());
        }
        if has(1) {
            let threshold = f64::from_le_bytes(self.source.array()?);
            settings.garbage_collection_threshold = Some(threshold);
        }
        if has(2) {
            let mut divisions = Vec::new();
            for _ in 0..self.number()? {
                self.hold(size_of::<(u64, u64)>())?;
                divisions.push((self.number()?, self.number()?));
            }
            settings.roundup_power2_divisions = Some(divisions);
        }
        let ints = [
            &mut settings.max_split_size,
            &mut settings.pinned_num_register_threads,
            &mut settings.max_round_threshold,
            &mut settings.max_cached_size,
        ];
        for (bit, int) in (3..).zip(ints) {
            if has(bit) {
                *int = Some(unzigzag(self.number()?));
            }
        }
        let flags = [
            &mut settings.expandable_segments,
            &mut settings.graph_capture_record_stream_reuse,
            &mut settings.release_lock_on_cudamalloc,
            &mut settings.pinned_use_cuda_host_register,
        ];
        for (bit, flag) in (7..).zip(flags) {
            if has(bit) {
                *flag = Some(self.flag()?);
            }
        }
        Ok(settings)
    }

    fn stacks(&mut self) -> Result<Stacks, TraceError> {
        self.part(TEXTS)?;
        let mut texts = Vec::new();
        for _ in 0..self.number()? {
            texts.push(self.text()?);
        }
        let mut table = StackTable::default();
        self.part(FRAMES)?;
        for place in 0..self.number()? {
            let offset = self.source.offset();
            let [name, filename] = [self.known_text(&texts)?, self.known_text(&texts)?];
            let at = self.source.offset();
            let line = self.number()?;
            let line = u32::try_from(line)
                .map_err(|_| broken(at, "a line of at most 32 bits", format!("line {line}")))?;
            table.intern(Frame { name, filename, line });
            if table.counts().0 as u64 != place + 1 {
                let expected = "a frame that was not listed before";
                return Err(broken(offset, expected, "one that was"));
            }
            self.within(self.held.saturating_add(table.held()))?;
        }
        self.part(STACKS)?;
        for place in 0..self.number()? {
            let offset = self.source.offset();
            let (count, _) = table.counts();
            let frame = self.number()?;
            let frame = table.frame_of_number(frame).ok_or_else(|| {
                let expected = format!("one of {count} frames");
                broken(offset, expected, format!("number {frame}"))
            })?;
            // A stack is called from one that was listed before it, so there are no circles.
            let at = self.source.offset();
            let (_, before) = table.counts();
            let caller = stack_of(self.number()?, before, at)?;
            table.link(caller, frame);
            if table.counts().1 as u64 != place + 1 {
                let expected = "a stack that was not listed before";
                return Err(broken(offset, expected, "one that was"));
            }
            self.within(self.held.saturating_add(table.held()))?;
        }
        self.hold(table.held())?;
        Ok(table.finish())
    }

    fn known_text(&mut self, texts: &[Arc<str>]) -> Result<Arc<str>, TraceError> {
        let offset = self.source.offset();
        let number = self.number()?;
        let text = usize::try_from(number).ok().and_then(|number| texts.get(number));
        text.cloned().ok_or_else(|| {
            let expected = format!("one of {} texts", texts.len());
            broken(offset, expected, format!("number {number}"))
        })
    }

    fn segments(&mut self, stacks: usize) -> Result<Vec<Segment>, TraceError> {
        self.part(MEMORY)?;
        let mut segments = Vec::new();
        for _ in 0..self.number()? {
            // A vector that grows has twice the room it needs, for a while thrice.
            self.hold(2 * size_of::<Segment>())?;
            segments.push(self.segment(stacks)?);
        }
        Ok(segments)
    }

    fn segment(&mut self, stacks: usize) -> Result<Segment, TraceError> {
        let head = self.head(LARGE | EXPANDABLE | PRIVATE | SEGMENT_STACK)?;
        let offset = self.source.offset();
        let device = self.number()?;
        let device = u32::try_from(device).map_err(|_| {
            broken(offset, "a device of at most 32 bits", format!("device {device}"))
        })?;
        let [address, total_size, stream] = [self.number()?, self.number()?, self.number()?];
        let pool = match head & PRIVATE {
            0 => (0, 0),
            _ => (self.number()?, self.number()?),
        };
        let stack = self.stack(head & SEGMENT_STACK != 0, stacks)?;
        let (mut blocks, mut next) = (Vec::new(), address);
        for _ in 0..self.number()? {
            self.hold(2 * size_of::<Block>())?;
            let block = self.block(next, stacks)?;
            next = block.address.wrapping_add(block.size);
            blocks.push(block);
        }
        let (large, expandable) = (head & LARGE != 0, head & EXPANDABLE != 0);
        Ok(Segment { device, address, total_size, stream, large, pool, expandable, stack, blocks })
    }

    fn block(&mut self, next: u64, stacks: usize) -> Result<Block, TraceError> {
        let offset = self.source.offset();
        let head = self.head(STATE | REQUESTED | BLOCK_STACK | ELSEWHERE)?;
        let state = match head & STATE {
            0 => BlockState::Allocated,
            1 => BlockState::PendingFree,
            2 => BlockState::Inactive,
            code => {
                let found = format!("state {code}");
                return Err(broken(offset, "a state from 0 to 2", found));
            }
        };
        let size = self.number()?;
        let requested_size = if head & REQUESTED != 0 { self.number()? } else { size };
        let stack = self.stack(head & BLOCK_STACK != 0, stacks)?;
        let address = if head & ELSEWHERE != 0 { self.number()? } else { next };
        Ok(Block { address, size, requested_size, state, stack })
    }

    fn head(&mut self, bits: u8) -> Result<u8, TraceError> {
        let offset = self.source.offset();
        let head = self.source.byte()?;
        if head & !bits == 0 {
            return Ok(head);
        }
        let expected = format!("no bits but {bits:#04x}");
        Err(broken(offset, expected, format!("the byte {head:#04x}")))
    }

    fn stack(&mut self, here: bool, stacks: usize) -> Result<Option<StackId>, TraceError> {
        if !here {
            return Ok(None);
        }
        let offset = self.source.offset();
        stack_of(self.number()?, stacks, offset)
    }

    fn devices(&mut self, stacks: usize) -> Result<Vec<Events>, TraceError> {
        self.part(EVENTS)?;
        let (mut devices, mut decoder) = (Vec::new(), Decoder::default());
        for _ in 0..self.number()? {
            self.hold(2 * size_of::<Events>())?;
            let mut events = Events::default();
            loop {
                let offset = self.source.offset();
                let count = match self.number()? {
                    0 => break,
                    count => usize::try_from(count).ok().filter(|&count| count <= GROUP),
                };
                let Some(count) = count else {
                    let expected = format!("a group of at most {GROUP} events");
                    return Err(broken(offset, expected, "more"));
                };
                decoder.fill(count, self.source)?;
                decoder.decode(stacks, |event| events.push(event))?;
                self.within(self.held.saturating_add(events.held() + decoder.held()))?;
            }
            self.hold(events.held())?;
            devices.push(events);
        }
        Ok(devices)
    }

    /// Counts at the end catch a writer that lost something.
    fn end(&mut self, segments: &[Segment], devices: &[Events]) -> Result<(), TraceError> {
        self.part(END)?;
        let blocks: u64 = segments.iter().map(|segment| segment.blocks.len() as u64).sum();
        let events: u64 = devices.iter().map(|events| events.len() as u64).sum();
        for (what, count) in [("blocks", blocks), ("events", events)] {
            let offset = self.source.offset();
            let said = self.number()?;
            if said != count {
                let expected = format!("the count of {what}, {count}");
                return Err(broken(offset, expected, format!("{said}")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;

    use super::*;
    use crate::open::{self, Limits};
    use crate::pack::tests::any_event;
    use crate::snapshot::{Action, Event};

    /// Texts as they are and as they should not be.
    fn any_text() -> impl Strategy<Value = String> {
        prop_oneof!["[a-z_./]{0,12}", "\\PC{0,8}", any::<String>()]
    }

    fn any_stacks() -> impl Strategy<Value = Stacks> {
        let frames = vec((any_text(), any_text(), any::<u32>()), 1..6);
        let stacks = vec(vec(0..6_usize, 1..5), 0..6);
        (frames, stacks).prop_map(|(frames, stacks)| {
            let mut table = StackTable::default();
            for stack in stacks {
                let mut caller = None;
                for place in stack {
                    let (name, filename, line) = &frames[place % frames.len()];
                    let (name, filename) = (name.as_str().into(), filename.as_str().into());
                    let frame = table.intern(Frame { name, filename, line: *line }).unwrap();
                    caller = table.link(caller, frame);
                }
            }
            table.finish()
        })
    }

    fn any_segment() -> impl Strategy<Value = Segment> {
        let size = prop_oneof![Just(512_u64), 0..1_u64 << 40, any::<u64>()];
        let state = prop::sample::select(vec![
            BlockState::Allocated,
            BlockState::PendingFree,
            BlockState::Inactive,
        ]);
        let stack = || (0..9_u32).prop_map(StackId::of_number);
        let blocks =
            vec((size.clone(), size.clone(), option::of(any::<u64>()), state, stack()), 0..5);
        let pool = prop_oneof![Just((0, 0)), any::<(u64, u64)>()];
        (any::<(u32, u64, u64, bool, bool)>(), size, pool, stack(), blocks).prop_map(
            |((device, address, stream, large, expandable), total_size, pool, stack, blocks)| {
                let mut next = address;
                let blocks =
                    blocks.into_iter().map(|(size, requested_size, jump, state, stack)| {
                        let address = jump.unwrap_or(next);
                        next = address.wrapping_add(size);
                        Block { address, size, requested_size, state, stack }
                    });
                let blocks = blocks.collect();
                Segment {
                    device,
                    address,
                    total_size,
                    stream,
                    large,
                    pool,
                    expandable,
                    stack,
                    blocks,
                }
            },
        )
    }

    fn any_settings() -> impl Strategy<Value = Settings> {
        let divisions = prop::collection::btree_map(1..10_u64, any::<u64>(), 0..4);
        (
            option::of(any_text()),
            option::of((0..2048_u16).prop_map(|n| f64::from(n) / 1024.0)),
            option::of(divisions.prop_map(|divisions| divisions.into_iter().collect())),
            any::<[Option<i64>; 4]>(),
            any::<[Option<bool>; 4]>(),
        )
            .prop_map(|(conf, threshold, divisions, ints, flags)| Settings {
                conf,
                garbage_collection_threshold: threshold,
                roundup_power2_divisions: divisions,
                max_split_size: ints[0],
                pinned_num_register_threads: ints[1],
                max_round_threshold: ints[2],
                max_cached_size: ints[3],
                expandable_segments: flags[0],
                graph_capture_record_stream_reuse: flags[1],
                release_lock_on_cudamalloc: flags[2],
                pinned_use_cuda_host_register: flags[3],
            })
    }

    /// Any snapshot that a reader could have made.
    pub(crate) fn any_snapshot() -> impl Strategy<Value = Snapshot> {
        let devices = vec(vec(any_event(), 0..40), 0..3);
        let origin = prop::sample::select(vec![Origin::Torch, Origin::Rmm]);
        (any_stacks(), vec(any_segment(), 0..4), devices, any_settings(), origin).prop_map(
            |(stacks, mut segments, devices, settings, origin)| {
                let known = u32::try_from(stacks.counts().1).unwrap();
                let fit = |stack: &mut Option<StackId>| {
                    *stack = stack.filter(|stack| stack.number() <= known);
                };
                for segment in &mut segments {
                    fit(&mut segment.stack);
                    segment.blocks.iter_mut().for_each(|block| fit(&mut block.stack));
                }
                let devices = devices.into_iter().map(|events| {
                    events
                        .into_iter()
                        .map(|mut event: Event| {
                            fit(&mut event.stack);
                            event
                        })
                        .collect()
                });
                Snapshot { devices: devices.collect(), segments, settings, stacks, origin }
            },
        )
    }

    fn bare(snapshot: &Snapshot) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_bare(snapshot, &mut bytes).unwrap();
        bytes
    }

    fn load(bytes: &[u8]) -> Result<Snapshot, TraceError> {
        open::read(bytes, &Limits::default())
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(snapshot in any_snapshot()) {
            let mut wrapped = Vec::new();
            write(&snapshot, &mut wrapped).unwrap();
            prop_assert_eq!(&load(&wrapped).unwrap(), &snapshot);
            prop_assert_eq!(load(&bare(&snapshot)).unwrap(), snapshot);
        }

        #[test]
        fn a_changed_or_cut_file_is_no_panic(
            snapshot in any_snapshot(), at in any::<usize>(), byte in any::<u8>()
        ) {
            let mut bytes = bare(&snapshot);
            let at = at % bytes.len();
            prop_assert!(load(&bytes[..at]).is_err());
            bytes[at] = byte;
            let _ = load(&bytes);
        }
    }

    fn event(action: Action, addr: u64, size: u64, time_us: u64) -> Event {
        Event { action, addr, size, stream: 0, time_us, pool: None, stack: None }
    }

    /// The example of `docs/trace-format.md`.
    fn example() -> Snapshot {
        let mut table = StackTable::default();
        let frame = Frame { name: "step".into(), filename: "train.py".into(), line: 42 };
        let frame = table.intern(frame).unwrap();
        let stack = table.link(None, frame);
        let address = 0x7f00_0000_0000;
        let time = 1_763_000_000_000_000;
        let block = |address, size, requested_size, state, stack| Block {
            address,
            size,
            requested_size,
            state,
            stack,
        };
        let segment = Segment {
            device: 0,
            address,
            total_size: 2 << 20,
            stream: 0,
            large: false,
            pool: (0, 0),
            expandable: false,
            stack: None,
            blocks: vec![
                block(address, 1024, 1000, BlockState::Allocated, stack),
                block(address + 1024, (2 << 20) - 1024, 0, BlockState::Inactive, None),
            ],
        };
        let events = [
            event(Action::SegmentAlloc, address, 2 << 20, time),
            Event { stack, ..event(Action::Alloc, address, 1000, time + 5) },
            Event { stack, ..event(Action::Alloc, address + 1024, 512, time + 9) },
            Event { stack, ..event(Action::FreeRequested, address + 1024, 512, time + 300) },
            Event { stack, ..event(Action::FreeCompleted, address + 1024, 512, time + 300) },
        ];
        Snapshot {
            origin: Origin::Torch,
            segments: vec![segment],
            devices: vec![events.into_iter().collect()],
            settings: Settings {
                conf: Some("backend:native".to_owned()),
                max_split_size: Some(-1),
                expandable_segments: Some(false),
                ..Settings::default()
            },
            stacks: table.finish(),
        }
    }

    /// The bytes of the page: in its `hex` block, what stands before the bar.
    #[test]
    fn the_example_of_the_page_is_the_truth() {
        let page = include_str!("../../../docs/trace-format.md");
        let block = page.split("```hex\n").nth(1).and_then(|rest| rest.split("```").next());
        let written: Vec<u8> = block
            .expect("the page has its example")
            .lines()
            .flat_map(|line| line.split('|').next().unwrap_or("").split_whitespace())
            .map(|byte| u8::from_str_radix(byte, 16).unwrap())
            .collect();
        let bytes = bare(&example());
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x} ")).collect::<String>();
        assert_eq!(hex(&written), hex(&bytes));
        assert_eq!(load(&written).unwrap(), example());
    }

    #[test]
    fn every_cut_is_an_error_that_names_the_format() {
        let bytes = bare(&example());
        for len in MAGIC.len()..bytes.len() {
            let error = load(&bytes[..len]).expect_err("cut short").to_string();
            assert!(error.starts_with("the Cushion trace cannot be read: at byte"), "{error}");
        }
    }

    #[test]
    fn another_version_is_told_apart() {
        let mut bytes = bare(&example());
        bytes[MAGIC.len()] = 2;
        let error = load(&bytes).expect_err("from the future").to_string();
        assert!(error.contains("at byte 7 "), "{error}");
        assert!(error.contains("expected version 1, the one this program knows"), "{error}");
        assert!(error.ends_with("found version 2"), "{error}");
    }

    /// Counts in the billions, and little behind them: an error, soon and in little memory.
    #[test]
    fn counts_are_not_believed() {
        let limits = Limits { memory_bytes: 1 << 20, ..Limits::default() };
        let start = [MAGIC, &[VERSION, FROM_TORCH]].concat();
        let huge = [0xff, 0xff, 0xff, 0xff, 0x7f];
        let parts: [&[u8]; 5] =
            [b"A\x04", b"A\0T", b"A\0T\0F\0S\0M", b"A\0T\0F\0S\0M\0E", b"A\x01"];
        for part in parts {
            let header = [&start[..], part, &huge].concat();
            let cut = open::read(&header[..], &limits).expect_err("nothing follows");
            assert!(matches!(cut, TraceError::Broken { .. }), "{cut}");
            // Zeros are values of every kind: texts, segments, devices.
            let zeros = [header, vec![0; 4 << 20]].concat();
            let full = open::read(&zeros[..], &limits).expect_err("over the limit");
            let limit = matches!(full, TraceError::Limit { field: "memory_bytes", .. });
            assert!(limit, "{}: {full}", part.escape_ascii());
        }
    }

    #[test]
    fn what_does_not_exist_cannot_be_referred_to() {
        let fault = |part: &[u8]| {
            let bytes = [MAGIC, &[VERSION, FROM_TORCH], part].concat();
            load(&bytes).expect_err("unsound").to_string()
        };
        for (part, expected, found) in [
            (&b"B"[..], "the part `A`", "the byte 0x42"),
            (b"A\x80\x10", "bits of the 11 settings", "the bits 0x800"),
            (b"A\x80\x01\x02", "0 or 1", "the byte 0x02"),
            (b"A\0T\x01\x02\xc3\x28", "text in UTF-8", "other bytes"),
            (b"A\0T\x01\0F\x01\0\x01", "one of 1 texts", "number 1"),
            (b"A\0T\x01\0F\x02\0\0\0\0\0\0", "a frame that was not listed before", "one that was"),
            (b"A\0T\x01\0F\x01\0\0\0S\x01\x01", "one of 1 frames", "number 1"),
            // A stack that calls itself.
            (b"A\0T\x01\0F\x01\0\0\0S\x01\0\x01", "one of 0 stacks", "number 1"),
            (b"A\0T\0F\0S\0M\x01\x10", "no bits but 0x0f", "the byte 0x10"),
            (b"A\0T\0F\0S\0M\x01\x08\0\0\0\0\x01", "one of 0 stacks", "number 1"),
            (b"A\0T\0F\0S\0M\x01\0\0\0\0\0\x01\x03", "a state from 0 to 2", "state 3"),
            (b"A\0T\0F\0S\0M\0E\x01\x81\x80\x04", "a group of at most 65536 events", "more"),
            (b"A\0T\0F\0S\0M\0E\0Z\0\x01", "the count of events, 0", "1"),
        ] {
            let error = fault(part);
            let end = format!("expected {expected}, found {found}");
            assert!(error.ends_with(&end), "{}: {error}", part.escape_ascii());
        }
        let mut other = bare(&example());
        other[MAGIC.len() + 1] = 9;
        assert!(load(&other).is_err());
    }
}
