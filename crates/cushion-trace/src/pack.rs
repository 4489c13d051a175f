//! One event packed against the one before it: what is the same takes no bytes, addresses and times
//! are differences, numbers are as long as they need to be.
//!
//! This is how events lie in memory. Files have an order of their own, which gzip likes better (see
//! `columns.rs`) and which must not change with this one.

use crate::snapshot::{Action, Event};
use crate::stacks::StackId;

/// Addresses are multiples of this, nearly always.
const ALIGN_BITS: u32 = 9;

// The first byte of an event: its action, and what follows.
const ACTION: u8 = 0x0f;
const ADDR_ALIGNED: u8 = 0x10;
const ADDR_PLAIN: u8 = 0x20;
const SIZE: u8 = 0x40;
const MORE: u8 = 0x80;
// The second byte, if there are `MORE` changes.
const STREAM: u8 = 0x01;
const STACK: u8 = 0x02;
const POOL: u8 = 0x04;
const NO_POOL: u8 = 0x08;

/// The event before the first.
pub(crate) const NOTHING: Event = Event {
    action: Action::Other,
    addr: 0,
    size: 0,
    stream: 0,
    time_us: 0,
    pool: None,
    stack: None,
};

/// Packs events, the first against nothing.
pub(crate) fn pack(events: &[Event]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(events.len() * 8);
    let mut before = &NOTHING;
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

/// Appends a number: seven bits to a byte, low ones first; the top bit says that more follow.
#[inline]
pub(crate) fn put_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
}

/// Unpacks what [`pack`] packed.
#[derive(Debug, Clone)]
pub(crate) struct Unpacker<'a> {
    bytes: std::slice::Iter<'a, u8>,
    before: Event,
}

impl<'a> Unpacker<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes: bytes.iter(), before: NOTHING }
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

/// Small differences of either sign become small numbers.
#[inline]
pub(crate) fn zigzag(int: i64) -> u64 {
    (int << 1 ^ int >> 63).cast_unsigned()
}

#[inline]
pub(crate) fn unzigzag(number: u64) -> i64 {
    (number >> 1).cast_signed() ^ -(number & 1).cast_signed()
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Events of every kind, alike enough to share fields with the one before.
    pub(crate) fn any_event() -> impl Strategy<Value = Event> {
        let address = prop_oneof![
            Just(0_u64),
            (0..1_u64 << 30).prop_map(|n| 0x7f00_0000_0000 + n * 512),
            any::<u64>()
        ];
        let size = prop_oneof![Just(512_u64), 0..1_u64 << 40, any::<u64>()];
        let few = prop_oneof![Just(0_u64), 0..4_u64, any::<u64>()];
        let pool = prop_oneof![Just(None), Just(Some((0, 0))), any::<Option<(u64, u64)>>()];
        let stack = prop_oneof![Just(0_u32), 0..5_u32, any::<u32>()].prop_map(StackId::of_number);
        (0..11_u8, address, size, few.clone(), few, pool, stack).prop_map(
            |(code, addr, size, stream, time_us, pool, stack)| Event {
                action: Action::of_code(code).unwrap(),
                addr,
                size,
                stream,
                time_us,
                pool,
                stack,
            },
        )
    }

    proptest! {
        #[test]
        fn packed_events_come_back(events in vec(any_event(), 0..100)) {
            let packed = pack(&events);
            prop_assert_eq!(Unpacker::new(&packed).collect::<Vec<_>>(), events);
        }
    }

    #[test]
    fn an_event_like_the_one_before_takes_two_bytes() {
        let event = Event { action: Action::Alloc, addr: 1 << 40, size: 7, ..NOTHING };
        assert_eq!(pack(&[event, event]).len(), pack(&[event]).len() + 2);
    }
}
