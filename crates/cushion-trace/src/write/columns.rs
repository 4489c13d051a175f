//! Encodes events into the columns of Cushion's own trace files.

use std::collections::HashMap;
use std::io::{self, Write};

use crate::format::columns::{
    ADDR_KNOWN, ADDR_NEW, ADDR_NEW_ALIGNED, CHANGES, COLUMNS, HEADS, KNOWN, NEW, POOLS, SIZES,
    STACKS, STREAMS, Sizes, time_column,
};
use crate::model::event::Event;
use crate::model::flags::{ALIGN_BITS, MORE, NO_POOL, POOL, SIZE, STACK, STREAM};
use crate::model::number::{put_number, zigzag};

/// Encodes one group of events at a time.
#[derive(Debug)]
pub(crate) struct Encoder {
    columns: [Vec<u8>; COLUMNS],
    before: Event,
    /// The number of each address in the group.
    known: HashMap<u64, usize>,
    sizes: Sizes,
}

impl Default for Encoder {
    fn default() -> Self {
        let (columns, known, sizes) = Default::default();
        Self { columns, before: Event::EMPTY, known, sizes }
    }
}

impl Encoder {
    /// Adds an event. The caller writes the group once it is full.
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

    /// Returns the number of events in the group.
    pub(crate) fn len(&self) -> usize {
        self.columns[HEADS].len()
    }

    /// Writes the group and starts the next.
    pub(crate) fn write(&mut self, out: &mut impl Write) -> io::Result<()> {
        let mut len = Vec::new();
        for column in &mut self.columns {
            len.clear();
            // The first column has one byte for each event, so its length is the count of events.
            put_number(&mut len, column.len() as u64);
            out.write_all(&len)?;
            out.write_all(column)?;
            column.clear();
        }
        self.before = Event::EMPTY;
        self.known.clear();
        self.sizes.clear();
        Ok(())
    }
}
