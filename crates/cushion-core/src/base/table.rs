//! Tables of things that refer to each other by typed ids: a slab that cannot mix up its keys.

use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

use slab::Slab;

/// A thing of kind `T`, by its place in its table.
pub(crate) struct Id<T> {
    place: u32,
    kind: PhantomData<fn() -> T>,
}

impl<T> Id<T> {
    pub(crate) const fn new(place: u32) -> Self {
        Self { place, kind: PhantomData }
    }

    /// Its place in the table.
    pub(crate) fn number(self) -> u32 {
        self.place
    }

    fn from_key(key: usize) -> Self {
        Self::new(u32::try_from(key).expect("fewer than 2^32 of a kind"))
    }

    fn key(self) -> usize {
        self.place as usize
    }
}

// By hand, because deriving would ask the same of `T`.
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

/// Everything of one kind. Places that become vacant are used again, and given back at the end of the table, when
/// somebody who has the time says so: nothing that is there ever moves.
#[derive(Debug)]
pub(crate) struct Table<T> {
    slab: Slab<T>,
    /// How many were removed since places were last given back.
    removed: usize,
}

/// So many places are never given back.
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

    /// How many there are, and how many there is room for.
    pub(crate) fn size(&self) -> (usize, usize) {
        (self.slab.len(), self.slab.capacity())
    }

    /// Gives places back, if only few of many are in use. It is a walk over all of them: so many must have been removed
    /// since the last one that this costs little for each.
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

    /// Everything, in order of place.
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
    fn places_are_given_back_and_nothing_moves() {
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
        // Low places come first, so that the end of the table can be given back later.
        assert!(table.insert(1) < ids[3]);
    }

    /// One that cannot be moved keeps all before it: then the walk is not made again for nothing.
    #[test]
    fn one_at_the_end_keeps_its_place() {
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
