//! What tags stand for, each value once and under a number, for as long as somebody refers to it.
//!
//! Nobody says when a tag is needed no longer: an event leaves the history when others come. So what is kept is swept now
//! and then: first it is noted what is on its way, then every engine is asked for the tags it still has, and what is
//! neither goes. That costs time in proportion to what is referred to, and is done when as much has come since the last
//! time; so memory is bounded by a constant and a multiple of what is referred to.

use std::hash::Hash;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rustc_hash::{FxBuildHasher, FxHashMap, FxHashSet};

/// Bytes that are kept before anything is swept.
const LEAST: usize = 1 << 20;
/// Bytes of an entry beside its value, about.
const ENTRY: usize = 96;
/// Bytes that may come for each tag that was looked at, before all are looked at again.
const FOR_EACH_TAG: usize = 16;
/// So many references to a value are the table's own.
const OWN: usize = 2;

#[derive(Debug)]
pub(crate) struct Kept<T: ?Sized> {
    numbers: FxHashMap<Arc<T>, NonZeroU32>,
    values: FxHashMap<NonZeroU32, Entry<T>>,
    last: u32,
    bytes: usize,
    /// With more bytes than this it is time to sweep.
    limit: usize,
    sweeps: u64,
}

#[derive(Debug)]
struct Entry<T: ?Sized> {
    value: Arc<T>,
    /// How many sweeps there had been when it was last asked for.
    asked_for: u64,
}

/// A value with its number. As long as this is there, it is kept.
pub(crate) type Numbered<T> = (NonZeroU32, Arc<T>);

/// One sweep, begun.
#[derive(Debug, Clone, Copy)]
#[must_use = "a sweep that is not ended removes nothing"]
pub(crate) struct Sweep(u64);

impl<T: ?Sized + Eq + Hash> Kept<T> {
    pub(crate) const fn new() -> Self {
        Self {
            numbers: FxHashMap::with_hasher(FxBuildHasher),
            values: FxHashMap::with_hasher(FxBuildHasher),
            last: 0,
            bytes: 0,
            limit: LEAST,
            sweeps: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether it is time to sweep.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes > self.limit
    }

    pub(crate) fn get(&self, number: NonZeroU32) -> Option<Arc<T>> {
        self.values.get(&number).map(|entry| Arc::clone(&entry.value))
    }

    /// The number of a value that is kept.
    pub(crate) fn find(&mut self, value: &T) -> Option<Numbered<T>> {
        let number = *self.numbers.get(value)?;
        let entry = self.values.get_mut(&number)?;
        entry.asked_for = self.sweeps;
        Some((number, Arc::clone(&entry.value)))
    }

    /// Keeps a value that is not there yet. None if there are no numbers left.
    pub(crate) fn add(&mut self, value: Arc<T>) -> Option<Numbered<T>> {
        if u32::try_from(self.values.len()).is_ok_and(|count| count == u32::MAX) {
            return None;
        }
        // A number is used again as late as can be: meanwhile one that is out of date stands for nothing.
        let number = loop {
            self.last = self.last.wrapping_add(1);
            match NonZeroU32::new(self.last) {
                Some(number) if !self.values.contains_key(&number) => break number,
                _ => {}
            }
        };
        self.bytes += Self::cost(&value);
        self.numbers.insert(Arc::clone(&value), number);
        let entry = Entry { value: Arc::clone(&value), asked_for: self.sweeps };
        self.values.insert(number, entry);
        Some((number, value))
    }

    fn cost(value: &T) -> usize {
        ENTRY + size_of_val(value)
    }

    /// Begins a sweep. What is on its way to an engine stays, even if it arrives where one has been asked already.
    pub(crate) fn begin_sweep(&mut self) -> Sweep {
        self.sweeps += 1;
        let on_its_way = |entry: &&mut Entry<T>| Arc::strong_count(&entry.value) > OWN;
        let entries = self.values.values_mut().filter(on_its_way);
        entries.for_each(|entry| entry.asked_for = self.sweeps);
        // What is on its way no longer has arrived: whoever asks an engine after this finds it.
        fence(Ordering::Acquire);
        Sweep(self.sweeps)
    }

    /// Ends a sweep: what is not among `used`, and was not asked for since it began, is taken out and returned. `looked_at`
    /// is how many tags it took to find that out.
    #[must_use]
    pub(crate) fn end_sweep(
        &mut self,
        sweep: Sweep,
        used: &FxHashSet<NonZeroU32>,
        looked_at: usize,
    ) -> Vec<Arc<T>> {
        let goes = |number: &NonZeroU32, entry: &mut Entry<T>| {
            entry.asked_for < sweep.0 && !used.contains(number)
        };
        let gone: Vec<_> = self.values.extract_if(goes).map(|(_, entry)| entry.value).collect();
        for value in &gone {
            self.numbers.remove(value);
            self.bytes -= Self::cost(value);
        }
        // Room for what may come until the next time, and not for what was there once.
        self.values.shrink_to(self.values.len() * 2);
        self.numbers.shrink_to(self.numbers.len() * 2);
        self.limit = LEAST.max(self.bytes * 2).max(self.bytes + looked_at * FOR_EACH_TAG);
        gone
    }

    /// Ends a sweep that came to nothing; the next one is due after some more.
    pub(crate) fn give_up_sweep(&mut self, _sweep: Sweep) {
        self.limit = self.bytes + LEAST;
    }
}
