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

/// Everything of one kind. Places that become vacant are used again.
#[derive(Debug)]
pub(crate) struct Table<T>(Slab<T>);

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self(Slab::new())
    }
}

impl<T> Table<T> {
    pub(crate) fn insert(&mut self, item: T) -> Id<T> {
        Id::from_key(self.0.insert(item))
    }

    pub(crate) fn remove(&mut self, id: Id<T>) -> T {
        self.0.remove(id.key())
    }

    pub(crate) fn get(&self, id: Id<T>) -> Option<&T> {
        self.0.get(id.key())
    }

    /// Everything, in order of place.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Id<T>, &T)> {
        self.0.iter().map(|(key, item)| (Id::from_key(key), item))
    }
}

impl<T> Index<Id<T>> for Table<T> {
    type Output = T;

    fn index(&self, id: Id<T>) -> &T {
        &self.0[id.key()]
    }
}

impl<T> IndexMut<Id<T>> for Table<T> {
    fn index_mut(&mut self, id: Id<T>) -> &mut T {
        &mut self.0[id.key()]
    }
}
