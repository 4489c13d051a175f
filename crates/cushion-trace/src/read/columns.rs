//! Decodes the columns of Cushion's own trace files. The columns can come from a hostile file: the
//! decoder accepts any bytes.

use super::source::Source;
use crate::format::columns::{
    ADDR, ADDR_KNOWN, ADDR_NEW_ALIGNED, ADDR_SAME, CHANGES, COLUMNS, HEADS, KNOWN, NEW, POOLS,
    SIZES, STACKS, STREAMS, Sizes, time_column,
};
use crate::model::error::{Format, TraceError};
use crate::model::event::{Action, Event};
use crate::model::flags::{ACTION, ALIGN_BITS, MORE, NO_POOL, POOL, SIZE, STACK, STREAM};
use crate::model::number::unzigzag;
use crate::model::stacks::StackId;

/// The bytes of a column, and the position of the decoder.
#[derive(Debug, Default)]
struct Column {
    bytes: Vec<u8>,
    at: usize,
    /// The offset of the column's first byte in the file.
    start: u64,
}

/// Decodes groups of events. Its buffers are reused from group to group.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    columns: [Column; COLUMNS],
    addresses: Vec<u64>,
    sizes: Sizes,
}

impl Decoder {
    /// Estimates the memory in use, in bytes.
    pub(crate) fn held(&self) -> usize {
        let columns: usize = self.columns.iter().map(|column| column.bytes.capacity()).sum();
        columns + self.addresses.capacity() * size_of::<u64>() + self.sizes.held()
    }

    /// Reads the columns of a group. The caller has read the number of events, `count`.
    pub(crate) fn fill(&mut self, count: usize, source: &mut Source<'_>) -> Result<(), TraceError> {
        for (i, column) in self.columns.iter_mut().enumerate() {
            let offset = source.offset();
            let len = if i == HEADS { count as u64 } else { number(source)? };
            // A number has at most ten bytes, and a pool has two numbers.
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

    /// Decodes the group and passes each event to `each`. `stacks` is the number of known stacks.
    pub(crate) fn decode(
        &mut self,
        stacks: usize,
        mut each: impl FnMut(Event),
    ) -> Result<(), TraceError> {
        let Self { columns, addresses, sizes } = self;
        addresses.clear();
        sizes.clear();
        let mut event = Event::EMPTY;
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

/// Returns the stack with this number, `None` for 0. A number above `stacks` is an error.
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

/// Makes the error of a broken Cushion trace.
pub(crate) fn broken(
    offset: u64,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> TraceError {
    TraceError::broken(Format::Own, offset, expected, found)
}

/// Reads a number from the file.
pub(crate) fn number(source: &mut Source<'_>) -> Result<u64, TraceError> {
    let start = source.offset();
    read_number(start, || source.byte())
}

/// Reads a number of variable length (see `model::number`) byte by byte.
#[inline]
fn read_number(
    start: u64,
    mut byte: impl FnMut() -> Result<u8, TraceError>,
) -> Result<u64, TraceError> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let next = byte()?;
        // The tenth byte has one bit of the number.
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
    use crate::format::columns::GROUP;
    use crate::read::limits::Limits;
    use crate::testing::any_event;
    use crate::write::columns::Encoder;

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
        fn encoded_events_are_decoded(events in vec(any_event(), 0..200)) {
            prop_assert_eq!(decode(&encode(&events), u32::MAX as usize).unwrap(), events);
        }

        #[test]
        fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..400)) {
            let _ = decode(&bytes, 5);
        }

        #[test]
        fn a_changed_byte_never_panics(
            events in vec(any_event(), 1..50), at in any::<usize>(), byte in any::<u8>()
        ) {
            let mut bytes = encode(&events);
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = decode(&bytes, 5);
        }
    }

    #[test]
    fn groups_are_encoded_independently() {
        let event = Event { action: Action::Alloc, addr: 1 << 40, size: 7, ..Event::EMPTY };
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
    fn references_to_missing_items_are_errors() {
        let stack = StackId::of_number(3);
        let bytes = encode(&[Event { stack, ..Event::EMPTY }]);
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
    fn bytes_left_in_a_column_are_an_error() {
        let mut bytes = encode(&[Event::EMPTY]);
        assert_eq!(bytes, [1, Event::EMPTY.action.code(), 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]);
        bytes[4] = 1;
        bytes.insert(5, 9);
        let error = decode(&bytes, 0).expect_err("a column too long").to_string();
        assert!(error.contains("at byte 5 "), "{error}");
        assert!(error.contains("expected the end of the column, found 1 bytes more"), "{error}");
        let error = decode(&[1, 0, 200, 1], 0).expect_err("an endless column").to_string();
        assert!(error.contains("a column of at most 20 bytes, found one of 200"), "{error}");
    }

    #[test]
    fn numbers_have_at_most_64_bits() {
        let read = |mut bytes: &[u8]| number(&mut Source::new(&mut bytes, &Limits::default()));
        let mut most = vec![0xff; 9];
        most.push(1);
        assert_eq!(read(&most).unwrap(), u64::MAX);
        most[9] = 2;
        assert!(read(&most).is_err());
        assert!(read(&[0x80; 12]).is_err());
    }
}
