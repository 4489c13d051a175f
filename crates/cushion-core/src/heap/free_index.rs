//! The free blocks of one lane, ordered by size and address: a pure data structure, without policy.
//!
//! It is a sorted sequence cut into chunks, with the bounds between chunks in a separate array. A
//! look-up is two binary searches over contiguous memory. An insertion moves half a chunk at most.
//! Chunks are split, joined and recycled with enough slack that a program in a steady state
//! allocates no host memory here. (The standard library's B-tree allocated a node for one
//! allocation in ten.)

use super::block::BlockId;

/// A chunk of this length is split.
const FULL: usize = 32;
/// A chunk shorter than this is joined with a neighbour,
const SPARSE: usize = 6;
/// if both together are shorter than this.
const JOINED: usize = 20;

/// How many emptied chunks are kept for reuse.
const SPARES: usize = 8;

/// The sort key of a block: size, then address, in one number that compares without a branch.
type Key = u128;

fn key(size: u64, address: u64) -> Key {
    u128::from(size) << 64 | u128::from(address)
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    size: u64,
    address: u64,
    id: BlockId,
}

impl Entry {
    fn key(&self) -> Key {
        key(self.size, self.address)
    }
}

/// Free blocks by size, then address.
#[derive(Debug, Default)]
pub(crate) struct FreeIndex {
    /// The upper bound of each chunk: no key of the chunk is above it, and every key of the next
    /// chunk is. The last bound is [`Key::MAX`].
    bounds: Vec<Key>,
    /// As many as `bounds`. One of them may be empty.
    chunks: Vec<Vec<Entry>>,
    /// Emptied chunks, for the next split.
    spare: Vec<Vec<Entry>>,
}

impl FreeIndex {
    /// Adds a block; returns false if one with the same size and address is present.
    pub(crate) fn insert(&mut self, size: u64, address: u64, id: BlockId) -> bool {
        let entry = Entry { size, address, id };
        let chunk = self.chunk_of(entry.key());
        let Some(entries) = self.chunks.get_mut(chunk) else {
            // The first block. Most of thousands of streams have few free blocks, so the first
            // chunk has no slack.
            self.bounds = vec![Key::MAX];
            self.chunks = vec![vec![entry]];
            return true;
        };
        let Err(place) = entries.binary_search_by_key(&entry.key(), Entry::key) else {
            return false;
        };
        entries.insert(place, entry);
        if entries.len() == FULL {
            self.split(chunk);
        }
        true
    }

    /// Removes a block; returns false if it is not present.
    pub(crate) fn remove(&mut self, size: u64, address: u64) -> bool {
        let key = key(size, address);
        let chunk = self.chunk_of(key);
        let Some(entries) = self.chunks.get_mut(chunk) else { return false };
        let Ok(place) = entries.binary_search_by_key(&key, Entry::key) else {
            return false;
        };
        entries.remove(place);
        if entries.len() < SPARSE && self.chunks.len() > 1 {
            self.thin(chunk);
        }
        true
    }

    #[cold]
    fn split(&mut self, chunk: usize) {
        let mut upper = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(FULL));
        let lower = &mut self.chunks[chunk];
        upper.extend(lower.drain(FULL / 2..));
        let bound = lower.last().map_or(0, Entry::key);
        self.bounds.insert(chunk, bound);
        self.chunks.insert(chunk + 1, upper);
    }

    /// Joins a sparse chunk with a neighbour, if there is room.
    #[cold]
    fn thin(&mut self, chunk: usize) {
        let len = self.chunks[chunk].len();
        let fits =
            |other: usize| self.chunks.get(other).is_some_and(|other| len + other.len() < JOINED);
        let lower = if fits(chunk + 1) {
            chunk
        } else if chunk > 0 && (fits(chunk - 1) || len == 0) {
            chunk - 1
        } else if len == 0 {
            chunk
        } else {
            return;
        };
        let mut upper = self.chunks.remove(lower + 1);
        if self.chunks[lower].is_empty() {
            std::mem::swap(&mut self.chunks[lower], &mut upper);
        } else {
            self.chunks[lower].append(&mut upper);
        }
        self.bounds.remove(lower);
        if self.spare.len() < SPARES {
            self.spare.push(upper);
        }
    }

    /// Returns the blocks of at least `size` bytes, smallest first.
    pub(crate) fn at_least(&self, size: u64) -> impl Iterator<Item = BlockId> {
        let (chunk, place) = self.place_of(size);
        let first = self.chunks.get(chunk).map_or(&[][..], |entries| &entries[place..]);
        let rest = self.chunks.get(chunk + 1..).unwrap_or(&[]);
        first.iter().chain(rest.iter().flatten()).map(|entry| entry.id)
    }

    /// Returns the blocks smaller than `size` bytes, largest first.
    pub(crate) fn smaller_than(&self, size: u64) -> impl Iterator<Item = BlockId> {
        let (chunk, place) = self.place_of(size);
        let last = self.chunks.get(chunk).map_or(&[][..], |entries| &entries[..place]);
        let rest = &self.chunks[..chunk];
        last.iter().rev().chain(rest.iter().flatten().rev()).map(|entry| entry.id)
    }

    /// Returns all blocks with their size and address, smallest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64, BlockId)> {
        self.chunks.iter().flatten().map(|entry| (entry.size, entry.address, entry.id))
    }

    /// Shrinks the arrays to their contents.
    pub(crate) fn shrink(&mut self) {
        let chunks = self.chunks.len();
        if self.chunks.capacity() / 4 > chunks.max(SPARES) {
            self.bounds.shrink_to(2 * chunks);
            self.chunks.shrink_to(2 * chunks);
        }
    }

    /// Returns the size of the largest block; 0 if there is none.
    pub(crate) fn largest(&self) -> u64 {
        self.chunks.iter().rev().find_map(|entries| entries.last()).map_or(0, |entry| entry.size)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.chunks.iter().all(Vec::is_empty)
    }

    /// Returns the chunk that has, or would have, `key`.
    fn chunk_of(&self, key: Key) -> usize {
        self.bounds.partition_point(|bound| *bound < key)
    }

    /// Returns the position of the first block of at least `size` bytes, if that is in this chunk:
    /// the chunk, and the index in it.
    fn place_of(&self, size: u64) -> (usize, usize) {
        let chunk = self.chunk_of(key(size, 0));
        let place = self
            .chunks
            .get(chunk)
            .map_or(0, |entries| entries.partition_point(|entry| entry.size < size));
        (chunk, place)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// It gives the same answers as the standard library's ordered map.
        #[test]
        fn it_behaves_like_an_ordered_map(
            steps in prop::collection::vec((any::<bool>(), 0_u64..40, 0_u64..60), 1..1500)
        ) {
            let mut index = FreeIndex::default();
            let mut model = BTreeMap::new();
            for (insert, size, address) in steps {
                let id = BlockId::new(u32::try_from(size * 100 + address).unwrap());
                if insert {
                    let new = model.insert((size, address), id).is_none();
                    prop_assert_eq!(index.insert(size, address, id), new);
                } else {
                    let known = model.remove(&(size, address)).is_some();
                    prop_assert_eq!(index.remove(size, address), known);
                }
                prop_assert_eq!(index.largest(), model.last_key_value().map_or(0, |(k, _)| k.0));
                prop_assert_eq!(index.is_empty(), model.is_empty());
                let from = address % 45;
                prop_assert!(index.at_least(from).eq(model.range((from, 0)..).map(|(_, &id)| id)));
                let below = model.range(..(from, 0)).rev().map(|(_, &id)| id);
                prop_assert!(index.smaller_than(from).eq(below));
            }
            let all: Vec<_> = index.iter().collect();
            let expected: Vec<_> = model.iter().map(|(&(s, a), &id)| (s, a, id)).collect();
            prop_assert_eq!(all, expected);
        }
    }
}
