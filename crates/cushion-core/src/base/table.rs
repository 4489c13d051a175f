//! Tables with typed ids: a slab whose keys cannot be confused with those of another table.

use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

use slab::Slab;

/// The id of an item of type `T`: its place in its table.
pub(crate) struct Id<T> {
    place: u32,
    kind: PhantomData<fn() -> T>,
}

impl<T> Id<T> {
    pub(crate) const fn new(place: u32) -> Self {
        Self { place, kind: PhantomData }
    }

    /// Returns the place in the table.
    pub(crate) fn number(self) -> u32 {
        self.place
    }

    fn from_key(key: usize) -> Self {
        Self::new(u32::try_from(key).expect("fewer than 2^32 items"))
    }

    fn key(self) -> usize {
        self.place as usize
    }
}

// Not derived, because derives would require the same traits of `T`.
impl<T> Clone for Id<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Id<T> {}
impl<T> PartialEq for Id<T> {
    fn eq(&self, other: &Self) -> bool {
        self.place == other.place
    }
}
impl<T> Eq for Id<T> {}
impl<T> PartialOrd for Id<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<T> Ord for Id<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.place.cmp(&other.place)
    }
}
impl<T> std::hash::Hash for Id<T> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.place.hash(state);
    }
}
impl<T> std::fmt::Debug for Id<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "#{}", self.place)
    }
}

/// All items of one type. Vacant places are reused. [`shrink`](Self::shrink) frees vacant places at
/// the end of the table. An item never moves.
#[derive(Debug)]
pub(crate) struct Table<T> {
    slab: Slab<T>,
    /// The number of items removed since the last shrink.
    removed: usize,
}

/// A table of at most this many places is never shrunk.
const FEW_PLACES: usize = 1024;

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { slab: Slab::new(), removed: 0 }
    }
}

impl<T> Table<T> {
    pub(crate) fn insert(&mut self, item: T) -> Id<T> {
        Id::from_key(self.slab.insert(item))
    }

    pub(crate) fn remove(&mut self, id: Id<T>) -> T {
        self.removed += 1;
        self.slab.remove(id.key())
    }

    /// Returns the number of items, and the number of places.
    pub(crate) fn size(&self) -> (usize, usize) {
        (self.slab.len(), self.slab.capacity())
    }

    /// Frees vacant places at the end of the table, if less than an eighth of the places is in use.
    /// The slab visits all its places, so this waits until enough items were removed to make the
    /// cost per removal small.
    pub(crate) fn shrink(&mut self) {
        let (count, room) = self.size();
        if room > FEW_PLACES && count < room / 8 && self.removed > room / 4 {
            self.removed = 0;
            self.slab.shrink_to_fit();
        }
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (Id<T>, &mut T)> {
        self.slab.iter_mut().map(|(key, item)| (Id::from_key(key), item))
    }

    pub(crate) fn get(&self, id: Id<T>) -> Option<&T> {
        self.slab.get(id.key())
    }

    /// Returns all items in the order of their places.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Id<T>, &T)> {
        self.slab.iter().map(|(key, item)| (Id::from_key(key), item))
    }
}

impl<T> Index<Id<T>> for Table<T> {
    type Output = T;

    fn index(&self, id: Id<T>) -> &T {
        &self.slab[id.key()]
    }
}

impl<T> IndexMut<Id<T>> for Table<T> {
    fn index_mut(&mut self, id: Id<T>) -> &mut T {
        &mut self.slab[id.key()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vacant_places_are_freed_and_no_item_moves() {
        let mut table = Table::default();
        let ids: Vec<_> = (0..100_000_u32).map(|item| table.insert(item)).collect();
        table.shrink();
        assert!(table.size().1 >= 100_000);
        for (at, &id) in ids.iter().enumerate() {
            if at != 3 && at != 700 {
                table.remove(id);
            }
        }
        table.shrink();
        assert_eq!(table.size().0, 2);
        assert!(table.size().1 < FEW_PLACES);
        assert_eq!((table[ids[3]], table[ids[700]]), (3, 700));
        // Low places are used first, so that the end of the table can be freed later.
        assert!(table.insert(1) < ids[3]);
    }

    /// An item at the end keeps all places before it. A second shrink does not repeat the useless
    /// visit.
    #[test]
    fn an_item_at_the_end_keeps_its_place() {
        let mut table = Table::default();
        let ids: Vec<_> = (0..10_000_u32).map(|item| table.insert(item)).collect();
        let (&last, others) = ids.split_last().unwrap();
        for &id in others {
            table.remove(id);
        }
        table.shrink();
        assert_eq!(table.removed, 0);
        table.shrink();
        assert_eq!(table[last], 9_999);
        assert!(table.insert(5) < last);
    }
}
