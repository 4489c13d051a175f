//! The packed events of a trace. A snapshot of a gigabyte has twenty million events; unpacked, at
//! 64 bytes each, they would need more memory than the file.
//!
//! Events are packed in strides of [`STRIDE`] (see `pack`), at about seven bytes an event without
//! stacks. Access to one event unpacks its whole stride, so iteration in order is cheap and random
//! access costs one stride.

use std::fmt;

use super::event::Event;
use super::pack::{Unpacker, pack};

/// The number of events packed together.
pub(crate) const STRIDE: usize = 256;

/// The events of one device, oldest first.
#[derive(Clone, Default, PartialEq)]
pub struct Events {
    /// The full strides, packed.
    strides: Vec<Box<[u8]>>,
    /// The last events, fewer than a stride, unpacked.
    tail: Vec<Event>,
    packed_bytes: usize,
}

impl Events {
    /// Returns the number of events.
    #[must_use]
    pub fn len(&self) -> usize {
        self.strides.len() * STRIDE + self.tail.len()
    }

    /// Returns whether there are no events.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the event at `index`. To visit many events, use [`Self::iter`].
    #[must_use]
    pub fn get(&self, index: usize) -> Option<Event> {
        let (stride, place) = (index / STRIDE, index % STRIDE);
        match self.strides.get(stride) {
            Some(packed) => Unpacker::new(packed).nth(place),
            None => self.tail.get(index - self.strides.len() * STRIDE).copied(),
        }
    }

    /// Iterates over all events, oldest first.
    #[must_use]
    pub fn iter(&self) -> Iter<'_> {
        self.iter_from(0)
    }

    /// Iterates over the events from `index` on.
    #[must_use]
    pub fn iter_from(&self, index: usize) -> Iter<'_> {
        let index = index.min(self.len());
        Iter { window: Window::new(self), next: index, end: self.len() }
    }

    /// Appends an event.
    pub fn push(&mut self, event: Event) {
        if self.tail.capacity() == 0 {
            self.tail.reserve_exact(if self.strides.is_empty() { 4 } else { STRIDE });
        }
        self.tail.push(event);
        if self.tail.len() == STRIDE {
            let packed = pack(&self.tail).into_boxed_slice();
            self.packed_bytes += packed.len();
            self.strides.push(packed);
            self.tail.clear();
        }
    }

    /// Estimates the memory in use, in bytes.
    pub(crate) fn held(&self) -> usize {
        // Each stride is an allocation of its own.
        let overhead = size_of::<Box<[u8]>>() + 16;
        self.packed_bytes
            + self.strides.capacity() * overhead
            + self.tail.capacity() * size_of::<Event>()
    }

    /// Unpacks a stride into `into`.
    fn unpack_stride(&self, stride: usize, into: &mut Vec<Event>) {
        into.clear();
        match self.strides.get(stride) {
            Some(packed) => into.extend(Unpacker::new(packed)),
            None => into.extend_from_slice(&self.tail),
        }
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

impl FromIterator<Event> for Events {
    fn from_iter<I: IntoIterator<Item = Event>>(iter: I) -> Self {
        let mut events = Self::default();
        events.extend(iter);
        events
    }
}

impl Extend<Event> for Events {
    fn extend<I: IntoIterator<Item = Event>>(&mut self, iter: I) {
        iter.into_iter().for_each(|event| self.push(event));
    }
}

impl<'a> IntoIterator for &'a Events {
    type Item = Event;
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

/// Iterates over [`Events`] in order.
#[derive(Debug, Clone)]
pub struct Iter<'a> {
    window: Window<'a>,
    next: usize,
    end: usize,
}

impl Iterator for Iter<'_> {
    type Item = Event;

    #[inline]
    fn next(&mut self) -> Option<Event> {
        if self.next == self.end {
            return None;
        }
        self.next += 1;
        self.window.get(self.next - 1)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.end - self.next, Some(self.end - self.next))
    }

    fn nth(&mut self, n: usize) -> Option<Event> {
        self.next = self.next.saturating_add(n).min(self.end);
        self.next()
    }
}

impl ExactSizeIterator for Iter<'_> {}

/// Random access to [`Events`] for a caller that moves forward and looks a little ahead. The two
/// strides used last stay unpacked.
#[derive(Debug, Clone)]
pub(crate) struct Window<'a> {
    events: &'a Events,
    open: [Vec<Event>; 2],
    /// The numbers of the strides in `open`.
    numbers: [usize; 2],
}

impl<'a> Window<'a> {
    pub(crate) fn new(events: &'a Events) -> Self {
        Self { events, open: [Vec::new(), Vec::new()], numbers: [usize::MAX; 2] }
    }

    #[inline]
    pub(crate) fn get(&mut self, index: usize) -> Option<Event> {
        let (stride, place) = (index / STRIDE, index % STRIDE);
        let side = stride % 2;
        if self.numbers[side] != stride {
            if index >= self.events.len() {
                return None;
            }
            self.events.unpack_stride(stride, &mut self.open[side]);
            self.numbers[side] = stride;
        }
        self.open[side].get(place).copied()
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
        fn pushed_events_are_read_back(events in vec(any_event(), 0..600), at in 0..600_usize) {
            let packed: Events = events.iter().copied().collect();
            prop_assert_eq!(packed.len(), events.len());
            prop_assert_eq!(packed.iter().collect::<Vec<_>>(), events.clone());
            prop_assert_eq!(packed.get(at), events.get(at).copied());
            let rest: Vec<_> = packed.iter_from(at).collect();
            prop_assert_eq!(&rest[..], events.get(at..).unwrap_or(&[]));
            prop_assert_eq!(packed.iter().nth(at), events.get(at).copied());
            let mut window = Window::new(&packed);
            for ahead in [0, 300, 1, 2, 299, at] {
                prop_assert_eq!(window.get(ahead), events.get(ahead).copied());
            }
        }
    }
}
