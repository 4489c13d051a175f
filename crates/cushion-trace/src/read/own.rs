//! Reads Cushion's own trace file. `docs/trace-format.md` describes every byte.
//!
//! The file is not trusted. No count in the file allocates memory: memory grows with the bytes that
//! arrive, under [`Limits`](crate::Limits), and every reference is checked.

use std::sync::Arc;

use super::columns::{Decoder, broken, number, stack_of};
use super::source::Source;
use crate::format::columns::GROUP;
use crate::format::own::{
    ALLOCATED, BLOCK_STACK, CONF_BIT, DIVISIONS_BIT, ELSEWHERE, END, EVENTS, EXPANDABLE,
    FIRST_FLAG_BIT, FIRST_INT_BIT, FRAMES, FROM_RMM, FROM_TORCH, INACTIVE, LARGE, MAGIC, MEMORY,
    PENDING_FREE, PRIVATE, REQUESTED, SEGMENT_STACK, SETTINGS, SETTINGS_BITS, STACKS, STATE, TEXTS,
    THRESHOLD_BIT, VERSION,
};
use crate::model::error::TraceError;
use crate::model::events::Events;
use crate::model::number::unzigzag;
use crate::model::settings::Settings;
use crate::model::snapshot::{Block, BlockState, Origin, Segment, Snapshot};
use crate::model::stacks::{Frame, StackId, StackTable, Stacks};

/// Reads the unpacked file from its first byte on.
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
    /// The estimated memory in use, in bytes.
    held: usize,
}

impl Reader<'_, '_> {
    fn section(&mut self, letter: u8) -> Result<(), TraceError> {
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

    /// Counts memory before it is allocated.
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
        self.section(SETTINGS)?;
        let offset = self.source.offset();
        let which = self.number()?;
        if which >> SETTINGS_BITS != 0 {
            let found = format!("the bits {which:#x}");
            let expected = format!("bits of the {SETTINGS_BITS} settings");
            return Err(broken(offset, expected, found));
        }
        let has = |bit: u32| which >> bit & 1 != 0;
        let mut settings = Settings::default();
        let fields = settings.fields();
        if has(CONF_BIT) {
            *fields.conf = Some(self.text()?.as_ref().to_owned());
        }
        if has(THRESHOLD_BIT) {
            *fields.threshold = Some(f64::from_le_bytes(self.source.array()?));
        }
        if has(DIVISIONS_BIT) {
            let mut divisions = Vec::new();
            for _ in 0..self.number()? {
                self.hold(size_of::<(u64, u64)>())?;
                divisions.push((self.number()?, self.number()?));
            }
            *fields.divisions = Some(divisions);
        }
        for (bit, (_, int)) in (FIRST_INT_BIT..).zip(fields.ints) {
            if has(bit) {
                *int = Some(unzigzag(self.number()?));
            }
        }
        for (bit, (_, flag)) in (FIRST_FLAG_BIT..).zip(fields.flags) {
            if has(bit) {
                *flag = Some(self.flag()?);
            }
        }
        Ok(settings)
    }

    fn stacks(&mut self) -> Result<Stacks, TraceError> {
        self.section(TEXTS)?;
        let mut texts = Vec::new();
        for _ in 0..self.number()? {
            texts.push(self.text()?);
        }
        let mut table = StackTable::default();
        self.section(FRAMES)?;
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
        self.section(STACKS)?;
        for place in 0..self.number()? {
            let offset = self.source.offset();
            let (count, _) = table.counts();
            let frame = self.number()?;
            let frame = table.frame_of_number(frame).ok_or_else(|| {
                let expected = format!("one of {count} frames");
                broken(offset, expected, format!("number {frame}"))
            })?;
            // The caller is listed before its callees, so there are no cycles.
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
        self.section(MEMORY)?;
        let mut segments = Vec::new();
        for _ in 0..self.number()? {
            // A growing vector has up to twice the room it needs.
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
            ALLOCATED => BlockState::Allocated,
            PENDING_FREE => BlockState::PendingFree,
            INACTIVE => BlockState::Inactive,
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
        self.section(EVENTS)?;
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

    /// Checks the counts at the end of the file, which detect a writer that lost items.
    fn end(&mut self, segments: &[Segment], devices: &[Events]) -> Result<(), TraceError> {
        self.section(END)?;
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
