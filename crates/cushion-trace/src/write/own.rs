//! Writes Cushion's own trace file, which keeps all of a [`Snapshot`] in a tenth of the pickle's
//! bytes or less. `docs/trace-format.md` describes every byte.

use std::collections::HashMap;
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;

use super::columns::Encoder;
use crate::format::columns::GROUP;
use crate::format::own::{
    ALLOCATED, BLOCK_STACK, CONF_BIT, DIVISIONS_BIT, ELSEWHERE, END, EVENTS, EXPANDABLE,
    FIRST_FLAG_BIT, FIRST_INT_BIT, FRAMES, FROM_RMM, FROM_TORCH, INACTIVE, LARGE, MAGIC, MEMORY,
    PENDING_FREE, PRIVATE, REQUESTED, SEGMENT_STACK, SETTINGS, STACKS, TEXTS, THRESHOLD_BIT,
    VERSION,
};
use crate::model::number::{put_number, zigzag};
use crate::model::settings::Settings;
use crate::model::snapshot::{Block, BlockState, Origin, Segment, Snapshot};
use crate::model::stacks::{StackId, Stacks};

/// Writes the file, compressed with gzip. The gzip checksum protects it.
pub(crate) fn write(snapshot: &Snapshot, out: impl Write) -> io::Result<()> {
    let mut encoder = GzEncoder::new(out, Compression::best());
    write_bare(snapshot, &mut encoder)?;
    encoder.finish()?.flush()
}

/// Writes the file without compression.
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

/// Writes the settings: a number with one bit for each setting that follows, and the settings.
fn put_settings(bytes: &mut Vec<u8>, settings: &Settings) {
    let mut settings = settings.clone();
    let fields = settings.fields();
    let (mut which, mut values) = (0, Vec::new());
    if let Some(conf) = fields.conf {
        which |= 1 << CONF_BIT;
        put_text(&mut values, conf);
    }
    if let Some(threshold) = fields.threshold {
        which |= 1 << THRESHOLD_BIT;
        values.extend_from_slice(&threshold.to_le_bytes());
    }
    if let Some(divisions) = fields.divisions {
        which |= 1 << DIVISIONS_BIT;
        put_number(&mut values, divisions.len() as u64);
        for &mut (from, into) in divisions {
            put_number(&mut values, from);
            put_number(&mut values, into);
        }
    }
    for (bit, (_, int)) in (FIRST_INT_BIT..).zip(fields.ints) {
        if let Some(int) = int {
            which |= 1 << bit;
            put_number(&mut values, zigzag(*int));
        }
    }
    for (bit, (_, flag)) in (FIRST_FLAG_BIT..).zip(fields.flags) {
        if let Some(flag) = flag {
            which |= 1 << bit;
            values.push((*flag).into());
        }
    }
    bytes.push(SETTINGS);
    put_number(bytes, which);
    bytes.extend_from_slice(&values);
}

/// Writes the texts of the frames, the frames of the stacks, and the stacks.
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
        BlockState::Allocated => ALLOCATED,
        BlockState::PendingFree => PENDING_FREE,
        BlockState::Inactive => INACTIVE,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::error::TraceError;
    use crate::model::event::{Action, Event};
    use crate::model::stacks::{Frame, StackTable};
    use crate::read::limits::Limits;
    use crate::read::open;
    use crate::testing::any_snapshot;

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
        fn written_snapshots_are_read_back(snapshot in any_snapshot()) {
            let mut wrapped = Vec::new();
            write(&snapshot, &mut wrapped).unwrap();
            prop_assert_eq!(&load(&wrapped).unwrap(), &snapshot);
            prop_assert_eq!(load(&bare(&snapshot)).unwrap(), snapshot);
        }

        #[test]
        fn changed_and_cut_files_never_panic(
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

    /// Returns the example of `docs/trace-format.md`.
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

    /// Compares with the bytes before the bar in the `hex` block of the page.
    #[test]
    fn the_documented_example_has_the_documented_bytes() {
        let page = include_str!("../../../../docs/trace-format.md");
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
    fn another_version_is_an_error() {
        let mut bytes = bare(&example());
        bytes[MAGIC.len()] = 2;
        let error = load(&bytes).expect_err("from the future").to_string();
        assert!(error.contains("at byte 7 "), "{error}");
        assert!(error.contains("expected version 1, the one this program knows"), "{error}");
        assert!(error.ends_with("found version 2"), "{error}");
    }

    /// A count of billions with few bytes behind it is an error, early and in little memory.
    #[test]
    fn counts_in_the_file_do_not_allocate() {
        let limits = Limits { memory_bytes: 1 << 20, ..Limits::default() };
        let start = [MAGIC, &[VERSION, FROM_TORCH]].concat();
        let huge = [0xff, 0xff, 0xff, 0xff, 0x7f];
        let parts: [&[u8]; 5] =
            [b"A\x04", b"A\0T", b"A\0T\0F\0S\0M", b"A\0T\0F\0S\0M\0E", b"A\x01"];
        for part in parts {
            let header = [&start[..], part, &huge].concat();
            let cut = open::read(&header[..], &limits).expect_err("nothing follows");
            assert!(matches!(cut, TraceError::Broken { .. }), "{cut}");
            // Zeros are valid texts, segments and devices.
            let zeros = [header, vec![0; 4 << 20]].concat();
            let full = open::read(&zeros[..], &limits).expect_err("over the limit");
            let limit = matches!(full, TraceError::Limit { field: "memory_bytes", .. });
            assert!(limit, "{}: {full}", part.escape_ascii());
        }
    }

    #[test]
    fn references_to_missing_items_are_errors() {
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
