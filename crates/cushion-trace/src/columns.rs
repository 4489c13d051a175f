//! Events in columns: the body of Cushion's own trace files.
//!
//! What is packed event by event (see `pack`) is small, but hides from gzip that a program asks for
//! the same things again and again. So a file keeps a group of events field by field: all first bytes,
//! then all addresses, and so on. An address is given once in a group and by its number after that,
//! which is what makes the rounds of a loop look alike. `docs/trace-format.md` has it byte by byte.
//!
//! The columns may come from a hostile file: [`decode`] takes any bytes.

use std::collections::HashMap;
use std::io::{self, Write};

use crate::error::{Format, TraceError};
use crate::pack::{NOTHING, put_number, unzigzag, zigzag};
use crate::snapshot::{Action, Event};
use crate::source::Source;
use crate::stacks::StackId;

/// The most events in a group: enough for gzip to find the rounds of a loop, and little enough to be
/// held as columns while it is read.
pub(crate) const GROUP: usize = 1 << 16;

/// Addresses are multiples of this many bits, nearly always.
const ALIGN_BITS: u32 = 9;

// The first byte of an event.
const ACTION: u8 = 0x0f;
/// The address: one of these four.
const ADDR: u8 = 0x30;
const ADDR_SAME: u8 = 0x00;
const ADDR_KNOWN: u8 = 0x10;
const ADDR_NEW_ALIGNED: u8 = 0x20;
const ADDR_NEW: u8 = 0x30;
const SIZE: u8 = 0x40;
const MORE: u8 = 0x80;
// The second, if there are `MORE` changes.
const STREAM: u8 = 0x01;
const STACK: u8 = 0x02;
const POOL: u8 = 0x04;
const NO_POOL: u8 = 0x08;

// The columns, in the order of the file.
const HEADS: usize = 0;
const CHANGES: usize = 1;
const KNOWN: usize = 2;
const NEW: usize = 3;
const SIZES: usize = 4;
const TIMES: usize = 5;
const COMPLETED: usize = 6;
const STREAMS: usize = 7;
const STACKS: usize = 8;
const POOLS: usize = 9;
const COLUMNS: usize = 10;

/// The time of a completed free has a column of its own: it is nearly always that of the request
/// before it, and zeros in a row cost nothing.
fn time_column(action: Action) -> usize {
    if action == Action::FreeCompleted { COMPLETED } else { TIMES }
}

/// The sizes last seen at the addresses of a group, by their numbers, and which of them the event
/// before was at.
#[derive(Debug, Default)]
struct Sizes {
    last: Vec<u64>,
    here: Option<usize>,
}

impl Sizes {
    /// The size that an event has unless it says so: a free is of what was at its address, all else
    /// is like the event before.
    fn expected(&self, action: Action, before: u64) -> u64 {
        match (action, self.here) {
            (Action::FreeRequested | Action::FreeCompleted, Some(here)) => self.last[here],
            _ => before,
        }
    }

    fn new_address(&mut self) {
        self.here = Some(self.last.len());
        self.last.push(0);
    }

    fn note(&mut self, size: u64) {
        if let Some(here) = self.here {
            self.last[here] = size;
        }
    }

    fn clear(&mut self) {
        self.last.clear();
        self.here = None;
    }
}

/// A group in the making.
#[derive(Debug)]
pub(crate) struct Encoder {
    columns: [Vec<u8>; COLUMNS],
    before: Event,
    /// The number of each address of the group.
    known: HashMap<u64, usize>,
    sizes: Sizes,
}

impl Default for Encoder {
    fn default() -> Self {
        let (columns, known, sizes) = Default::default();
        Self { columns, before: NOTHING, known, sizes }
    }
}

impl Encoder {
    /// Adds an event; the caller writes the group once it is full.
    pub(crate) fn push(&mut self, event: &Event) {
        let before = &self.before;
        let mut head = event.action.code();
        if event.addr != before.addr {
            let next = self.known.len();
            let number = *self.known.entry(event.addr).or_insert(next);
            if number < next {
                head |= ADDR_KNOWN;
                put_number(&mut self.columns[KNOWN], number as u64);
                self.sizes.here = Some(number);
            } else {
                self.sizes.new_address();
                let moved = event.addr.wrapping_sub(before.addr).cast_signed();
                if moved.trailing_zeros() >= ALIGN_BITS {
                    head |= ADDR_NEW_ALIGNED;
                    put_number(&mut self.columns[NEW], zigzag(moved >> ALIGN_BITS));
                } else {
                    head |= ADDR_NEW;
                    put_number(&mut self.columns[NEW], zigzag(moved));
                }
            }
        }
        if event.size != self.sizes.expected(event.action, before.size) {
            head |= SIZE;
            put_number(&mut self.columns[SIZES], event.size);
        }
        self.sizes.note(event.size);
        let later = event.time_us.wrapping_sub(before.time_us).cast_signed();
        put_number(&mut self.columns[time_column(event.action)], zigzag(later));
        let mut more = 0;
        if event.stream != before.stream {
            more |= STREAM;
            put_number(&mut self.columns[STREAMS], event.stream);
        }
        if event.stack != before.stack {
            more |= STACK;
            let number = event.stack.map_or(0, |stack| stack.number().into());
            put_number(&mut self.columns[STACKS], number);
        }
        match event.pool {
            pool if pool == before.pool => {}
            Some((a, b)) => {
                more |= POOL;
                put_number(&mut self.columns[POOLS], a);
                put_number(&mut self.columns[POOLS], b);
            }
            None => more |= NO_POOL,
        }
        if more != 0 {
            head |= MORE;
            self.columns[CHANGES].push(more);
        }
        self.columns[HEADS].push(head);
        self.before = *event;
    }

    /// How many events the group has.
    pub(crate) fn len(&self) -> usize {
        self.columns[HEADS].len()
    }

    /// Writes the group and begins the next.
    pub(crate) fn write(&mut self, out: &mut impl Write) -> io::Result<()> {
        let mut len = Vec::new();
        for column in &mut self.columns {
            len.clear();
            // The first column has a byte for each event, so its length is their count.
            put_number(&mut len, column.len() as u64);
            out.write_all(&len)?;
            out.write_all(column)?;
            column.clear();
        }
        self.before = NOTHING;
        self.known.clear();
        self.sizes.clear();
        Ok(())
    }
}

/// A column as it was read, and how far it has been used.
#[derive(Debug, Default)]
struct Column {
    bytes: Vec<u8>,
    at: usize,
    /// Where in the file its first byte is.
    start: u64,
}

/// Reads groups; keeps its room from one to the next.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    columns: [Column; COLUMNS],
    addresses: Vec<u64>,
    sizes: Sizes,
}

impl Decoder {
    /// About how many bytes of memory it holds.
    pub(crate) fn held(&self) -> usize {
        let columns: usize = self.columns.iter().map(|column| column.bytes.capacity()).sum();
        columns + (self.addresses.capacity() + self.sizes.last.capacity()) * size_of::<u64>()
    }

    /// Reads the columns of a group whose count of events, `count`, has been read.
    pub(crate) fn fill(&mut self, count: usize, source: &mut Source<'_>) -> Result<(), TraceError> {
        for (i, column) in self.columns.iter_mut().enumerate() {
            let offset = source.offset();
            let len = if i == HEADS { count as u64 } else { number(source)? };
            // No number is longer than ten bytes, and only pools have two of them.
            let most = 20 * count as u64;
            if len > most {
                let expected = format!("a column of at most {most} bytes");
                return Err(broken(offset, expected, format!("one of {len}")));
            }
            column.start = source.offset();
            column.at = 0;
            source.copy(len, &mut column.bytes)?;
        }
        Ok(())
    }

    /// The events of the group, one by one. `stacks` is how many there are to refer to.
    pub(crate) fn decode(
        &mut self,
        stacks: usize,
        mut each: impl FnMut(Event),
    ) -> Result<(), TraceError> {
        let Self { columns, addresses, sizes } = self;
        addresses.clear();
        sizes.clear();
        let mut event = NOTHING;
        for i in 0..columns[HEADS].bytes.len() {
            let head = columns[HEADS].byte()?;
            event.action = Action::of_code(head & ACTION).ok_or_else(|| {
                let offset = columns[HEADS].start + i as u64;
                broken(offset, "an action", format!("number {}", head & ACTION))
            })?;
            match head & ADDR {
                ADDR_SAME => {}
                ADDR_KNOWN => {
                    let column = &mut columns[KNOWN];
                    let offset = column.offset();
                    let number = column.number()?;
                    let place = usize::try_from(number).ok().filter(|&n| n < addresses.len());
                    let place = place.ok_or_else(|| {
                        let expected = format!("one of {} addresses", addresses.len());
                        broken(offset, expected, format!("number {number}"))
                    })?;
                    event.addr = addresses[place];
                    sizes.here = Some(place);
                }
                new => {
                    let moved = unzigzag(columns[NEW].number()?);
                    let shift = if new == ADDR_NEW_ALIGNED { ALIGN_BITS } else { 0 };
                    event.addr = event.addr.wrapping_add_signed(moved << shift);
                    addresses.push(event.addr);
                    sizes.new_address();
                }
            }
            event.size = match head & SIZE {
                0 => sizes.expected(event.action, event.size),
                _ => columns[SIZES].number()?,
            };
            sizes.note(event.size);
            let later = unzigzag(columns[time_column(event.action)].number()?);
            event.time_us = event.time_us.wrapping_add_signed(later);
            if head & MORE != 0 {
                changes(&mut event, columns, stacks)?;
            }
            each(event);
        }
        match columns.iter().find(|column| column.at < column.bytes.len()) {
            None => Ok(()),
            Some(column) => {
                let left = format!("{} bytes more", column.bytes.len() - column.at);
                Err(broken(column.offset(), "the end of the column", left))
            }
        }
    }
}

fn changes(
    event: &mut Event,
    columns: &mut [Column; COLUMNS],
    stacks: usize,
) -> Result<(), TraceError> {
    let more = columns[CHANGES].byte()?;
    if more & STREAM != 0 {
        event.stream = columns[STREAMS].number()?;
    }
    if more & STACK != 0 {
        let offset = columns[STACKS].offset();
        event.stack = stack_of(columns[STACKS].number()?, stacks, offset)?;
    }
    if more & POOL != 0 {
        event.pool = Some((columns[POOLS].number()?, columns[POOLS].number()?));
    }
    if more & NO_POOL != 0 {
        event.pool = None;
    }
    Ok(())
}

/// The stack with this number, 0 for none, if there are that many.
pub(crate) fn stack_of(
    number: u64,
    stacks: usize,
    offset: u64,
) -> Result<Option<StackId>, TraceError> {
    match u32::try_from(number) {
        Ok(small) if number <= stacks as u64 => Ok(StackId::of_number(small)),
        _ => {
            let expected = format!("one of {stacks} stacks");
            Err(broken(offset, expected, format!("number {number}")))
        }
    }
}

impl Column {
    fn offset(&self) -> u64 {
        self.start + self.at as u64
    }

    #[inline]
    fn byte(&mut self) -> Result<u8, TraceError> {
        match self.bytes.get(self.at) {
            Some(&byte) => {
                self.at += 1;
                Ok(byte)
            }
            None => {
                let expected = "one more byte in the column";
                Err(broken(self.offset(), expected, "its end"))
            }
        }
    }

    #[inline]
    fn number(&mut self) -> Result<u64, TraceError> {
        let start = self.offset();
        read_number(start, || self.byte())
    }
}

/// What is wrong with a Cushion trace, and where.
pub(crate) fn broken(
    offset: u64,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> TraceError {
    TraceError::broken(Format::Own, offset, expected, found)
}

/// The next number of the file itself.
pub(crate) fn number(source: &mut Source<'_>) -> Result<u64, TraceError> {
    let start = source.offset();
    read_number(start, || source.byte())
}

/// Seven bits to a byte, low ones first; the top bit says that more follow.
#[inline]
fn read_number(
    start: u64,
    mut byte: impl FnMut() -> Result<u8, TraceError>,
) -> Result<u64, TraceError> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let next = byte()?;
        // The tenth byte has room for one bit.
        if shift == 63 && next > 1 {
            break;
        }
        number |= u64::from(next & 0x7f) << shift;
        if next < 0x80 {
            return Ok(number);
        }
    }
    Err(broken(start, "a number of at most 64 bits", "a longer one"))
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::open::Limits;
    use crate::pack::tests::any_event;

    fn encode(events: &[Event]) -> Vec<u8> {
        let mut encoder = Encoder::default();
        events.iter().for_each(|event| encoder.push(event));
        let mut bytes = Vec::new();
        encoder.write(&mut bytes).unwrap();
        bytes
    }

    fn decode(mut bytes: &[u8], stacks: usize) -> Result<Vec<Event>, TraceError> {
        let mut source = Source::new(&mut bytes, &Limits::default());
        let count = usize::try_from(number(&mut source)?).unwrap().min(GROUP);
        let (mut decoder, mut events) = (Decoder::default(), Vec::new());
        decoder.fill(count, &mut source)?;
        decoder.decode(stacks, |event| events.push(event))?;
        Ok(events)
    }

    proptest! {
        #[test]
        fn encoded_events_come_back(events in vec(any_event(), 0..200)) {
            prop_assert_eq!(decode(&encode(&events), u32::MAX as usize).unwrap(), events);
        }

        #[test]
        fn any_bytes_end_in_events_or_an_error(bytes in vec(any::<u8>(), 0..400)) {
            let _ = decode(&bytes, 5);
        }

        #[test]
        fn a_changed_byte_is_no_panic(
            events in vec(any_event(), 1..50), at in any::<usize>(), byte in any::<u8>()
        ) {
            let mut bytes = encode(&events);
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = decode(&bytes, 5);
        }
    }

    #[test]
    fn the_second_group_is_like_the_first() {
        let event = Event { action: Action::Alloc, addr: 1 << 40, size: 7, ..NOTHING };
        let mut encoder = Encoder::default();
        let [first, second] = [(); 2].map(|()| {
            encoder.push(&event);
            let mut bytes = Vec::new();
            encoder.write(&mut bytes).unwrap();
            bytes
        });
        assert_eq!(first, second);
        assert_eq!(decode(&first, 0).unwrap(), [event]);
    }

    #[test]
    fn what_does_not_exist_cannot_be_referred_to() {
        let stack = StackId::of_number(3);
        let bytes = encode(&[Event { stack, ..NOTHING }]);
        assert!(decode(&bytes, 3).is_ok());
        let error = decode(&bytes, 2).expect_err("no such stack").to_string();
        assert!(error.contains("expected one of 2 stacks, found number 3"), "{error}");

        // One event at a known address, with none known.
        let bytes = [1, ADDR_KNOWN, 0, 1, 7, 0, 0, 1, 0, 0, 0, 0, 0];
        let error = decode(&bytes, 0).expect_err("no such address").to_string();
        assert!(error.contains("at byte 4 "), "{error}");
        assert!(error.contains("expected one of 0 addresses, found number 7"), "{error}");
    }

    #[test]
    fn columns_are_used_up() {
        let mut bytes = encode(&[NOTHING]);
        assert_eq!(bytes, [1, NOTHING.action.code(), 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]);
        bytes[4] = 1;
        bytes.insert(5, 9);
        let error = decode(&bytes, 0).expect_err("a column too long").to_string();
        assert!(error.contains("at byte 5 "), "{error}");
        assert!(error.contains("expected the end of the column, found 1 bytes more"), "{error}");
        let error = decode(&[1, 0, 200, 1], 0).expect_err("an endless column").to_string();
        assert!(error.contains("a column of at most 20 bytes, found one of 200"), "{error}");
    }

    #[test]
    fn numbers_have_64_bits() {
        let read = |mut bytes: &[u8]| number(&mut Source::new(&mut bytes, &Limits::default()));
        let mut most = vec![0xff; 9];
        most.push(1);
        assert_eq!(read(&most).unwrap(), u64::MAX);
        most[9] = 2;
        assert!(read(&most).is_err());
        assert!(read(&[0x80; 12]).is_err());
    }
}
