//! The values that tags refer to. Each value is stored once, under a number, while a tag refers to
//! it.
//!
//! No event says that a tag is no longer used: an entry drops out of the history when later ones
//! arrive. Therefore the table is swept from time to time. A sweep first marks the values that are
//! on their way to an engine, then asks every engine for the tags that it still has, and removes
//! all other values. A sweep takes time in proportion to the number of tags, and starts after about
//! as much has been added as was left by the last one. So memory is bounded by a constant plus a
//! multiple of what is referred to.

use std::hash::Hash;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rustc_hash::{FxBuildHasher, FxHashMap, FxHashSet};

/// The table is not swept below this many bytes.
const LEAST: usize = 1 << 20;
/// Approximate bytes of an entry without its value.
const ENTRY: usize = 96;
/// Bytes that may be added for each tag that the last sweep looked at, before the next sweep.
const FOR_EACH_TAG: usize = 16;
/// The number of references to a value that the table itself holds.
const OWN: usize = 2;

#[derive(Debug)]
pub(crate) struct Kept<T: ?Sized> {
    numbers: FxHashMap<Arc<T>, NonZeroU32>,
    values: FxHashMap<NonZeroU32, Entry<T>>,
    last: u32,
    bytes: usize,
    /// Above this many bytes a sweep is due.
    limit: usize,
    sweeps: u64,
}

#[derive(Debug)]
struct Entry<T: ?Sized> {
    value: Arc<T>,
    /// The number of sweeps when the value was last requested.
    asked_for: u64,
}

/// A value with its number. The table keeps the value while this exists.
pub(crate) type Numbered<T> = (NonZeroU32, Arc<T>);

/// A sweep that has begun.
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

    /// Whether a sweep is due.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes > self.limit
    }

    pub(crate) fn get(&self, number: NonZeroU32) -> Option<Arc<T>> {
        self.values.get(&number).map(|entry| Arc::clone(&entry.value))
    }

    /// Returns a stored value with its number.
    pub(crate) fn find(&mut self, value: &T) -> Option<Numbered<T>> {
        let number = *self.numbers.get(value)?;
        let entry = self.values.get_mut(&number)?;
        entry.asked_for = self.sweeps;
        Some((number, Arc::clone(&entry.value)))
    }

    /// Stores a value that the table does not have yet. Returns none if all numbers are in use.
    pub(crate) fn add(&mut self, value: Arc<T>) -> Option<Numbered<T>> {
        if u32::try_from(self.values.len()).is_ok_and(|count| count == u32::MAX) {
            return None;
        }
        // A number is reused as late as possible. Until then, an outdated tag refers to nothing.
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

    /// Begins a sweep. A value that is on its way to an engine stays, even if it reaches an engine
    /// whose tags have been read already.
    pub(crate) fn begin_sweep(&mut self) -> Sweep {
        self.sweeps += 1;
        let on_its_way = |entry: &&mut Entry<T>| Arc::strong_count(&entry.value) > OWN;
        let entries = self.values.values_mut().filter(on_its_way);
        entries.for_each(|entry| entry.asked_for = self.sweeps);
        // A value that is no longer on its way has reached its engine. The fence makes that visible
        // to the code that reads the tags of the engine after this.
        fence(Ordering::Acquire);
        Sweep(self.sweeps)
    }

    /// Ends a sweep: removes and returns the values that are not in `used` and were not requested
    /// since the sweep began. `looked_at` is the number of tags that the sweep has read.
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
        // Keeps capacity for the values that may come before the next sweep.
        self.values.shrink_to(self.values.len() * 2);
        self.numbers.shrink_to(self.numbers.len() * 2);
        self.limit = LEAST.max(self.bytes * 2).max(self.bytes + looked_at * FOR_EACH_TAG);
        gone
    }

    /// Ends a sweep and removes nothing. The next sweep is due after [`LEAST`] more bytes.
    pub(crate) fn give_up_sweep(&mut self, _sweep: Sweep) {
        self.limit = self.bytes + LEAST;
    }
}
