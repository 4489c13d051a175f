//! Packs each event against the event before it: equal fields take no bytes, addresses and times
//! are stored as differences, and numbers take only the bytes they need.
//!
//! This is the layout of events in memory. Trace files use another layout, which compresses better
//! (see `format::columns`) and must not change when this one does.

use super::event::{Action, Event};
use super::flags::{ACTION, ALIGN_BITS, MORE, NO_POOL, POOL, SIZE, STACK, STREAM};
use super::number::{put_number, unzigzag, zigzag};
use super::stacks::StackId;

// The address bits of the first byte. Neither is set if the address is that of the event before.
const ADDR_ALIGNED: u8 = 0x10;
const ADDR_PLAIN: u8 = 0x20;

/// Packs events. The first is packed against [`Event::EMPTY`].
pub(crate) fn pack(events: &[Event]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(events.len() * 8);
    let mut before = &Event::EMPTY;
    for event in events {
        pack_event(before, event, &mut bytes);
        before = event;
    }
    bytes
}

fn pack_event(before: &Event, event: &Event, bytes: &mut Vec<u8>) {
    let moved = event.addr.wrapping_sub(before.addr).cast_signed();
    let aligned = moved.trailing_zeros() >= ALIGN_BITS;
    let mut head = event.action.code();
    if moved != 0 {
        head |= if aligned { ADDR_ALIGNED } else { ADDR_PLAIN };
    }
    if event.size != before.size {
        head |= SIZE;
    }
    let mut more = 0;
    if event.stream != before.stream {
        more |= STREAM;
    }
    if event.stack != before.stack {
        more |= STACK;
    }
    if event.pool != before.pool {
        more |= if event.pool.is_some() { POOL } else { NO_POOL };
    }
    if more != 0 {
        head |= MORE;
    }
    bytes.push(head);
    if more != 0 {
        bytes.push(more);
    }
    if moved != 0 {
        put_number(bytes, zigzag(if aligned { moved >> ALIGN_BITS } else { moved }));
    }
    if event.size != before.size {
        put_number(bytes, event.size);
    }
    put_number(bytes, zigzag(event.time_us.wrapping_sub(before.time_us).cast_signed()));
    if more & STREAM != 0 {
        put_number(bytes, event.stream);
    }
    if more & STACK != 0 {
        put_number(bytes, event.stack.map_or(0, |stack| stack.number().into()));
    }
    if let (POOL, Some((a, b))) = (more & POOL, event.pool) {
        put_number(bytes, a);
        put_number(bytes, b);
    }
}

/// Unpacks the bytes that [`pack`] made.
#[derive(Debug, Clone)]
pub(crate) struct Unpacker<'a> {
    bytes: std::slice::Iter<'a, u8>,
    before: Event,
}

impl<'a> Unpacker<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes: bytes.iter(), before: Event::EMPTY }
    }

    #[inline]
    fn byte(&mut self) -> Option<u8> {
        self.bytes.next().copied()
    }

    #[inline]
    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        Some(number)
    }

    fn changes(&mut self, more: u8) -> Option<()> {
        if more & STREAM != 0 {
            self.before.stream = self.number()?;
        }
        if more & STACK != 0 {
            self.before.stack = StackId::of_number(u32::try_from(self.number()?).ok()?);
        }
        if more & POOL != 0 {
            self.before.pool = Some((self.number()?, self.number()?));
        }
        if more & NO_POOL != 0 {
            self.before.pool = None;
        }
        Some(())
    }
}

impl Iterator for Unpacker<'_> {
    type Item = Event;

    #[inline]
    fn next(&mut self) -> Option<Event> {
        let head = self.byte()?;
        let more = if head & MORE != 0 { self.byte()? } else { 0 };
        self.before.action = Action::of_code(head & ACTION)?;
        let moved = match head & (ADDR_ALIGNED | ADDR_PLAIN) {
            0 => 0,
            ADDR_ALIGNED => unzigzag(self.number()?) << ALIGN_BITS,
            _ => unzigzag(self.number()?),
        };
        self.before.addr = self.before.addr.wrapping_add_signed(moved);
        if head & SIZE != 0 {
            self.before.size = self.number()?;
        }
        let later = unzigzag(self.number()?);
        self.before.time_us = self.before.time_us.wrapping_add_signed(later);
        if more != 0 {
            self.changes(more)?;
        }
        Some(self.before)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::testing::any_event;

    proptest! {
        #[test]
        fn packed_events_come_back(events in vec(any_event(), 0..100)) {
            let packed = pack(&events);
            prop_assert_eq!(Unpacker::new(&packed).collect::<Vec<_>>(), events);
        }
    }

    #[test]
    fn an_event_equal_to_the_one_before_takes_two_bytes() {
        let event = Event { action: Action::Alloc, addr: 1 << 40, size: 7, ..Event::EMPTY };
        assert_eq!(pack(&[event, event]).len(), pack(&[event]).len() + 2);
    }
}
