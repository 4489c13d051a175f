//! The contents of a simulated device's memory, for tests and examples that read and write it.
//!
//! Contents are kept by address, and only for memory that was written: a device of 80 GB costs only
//! the bytes that its program writes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The number of bytes that are stored together.
const CHUNK: usize = 1 << 14;

/// The value of bytes that were never written. It is not zero, so that a missing write shows.
const GARBAGE: u8 = 0xCD;

/// Stored bytes by address. `Send` and `Sync`.
#[derive(Debug, Default)]
pub struct SimMemory {
    chunks: Mutex<BTreeMap<u64, Chunk>>,
}

#[derive(Debug)]
enum Chunk {
    /// Every byte has this value.
    Filled(u8),
    Bytes(Box<[u8; CHUNK]>),
}

impl Chunk {
    fn bytes(&mut self) -> &mut [u8; CHUNK] {
        if let Self::Filled(byte) = *self {
            *self = Self::Bytes(Box::new([byte; CHUNK]));
        }
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Filled(_) => unreachable!("replaced above"),
        }
    }
}

impl SimMemory {
    fn chunks(&self) -> MutexGuard<'_, BTreeMap<u64, Chunk>> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes bytes at an address.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        let mut chunks = self.chunks();
        for (chunk, within, outer) in chunks_of(address, bytes.len()) {
            let chunk = chunks.entry(chunk).or_insert(Chunk::Filled(GARBAGE));
            chunk.bytes()[within].copy_from_slice(&bytes[outer]);
        }
    }

    /// Reads the bytes at an address.
    pub fn read(&self, address: u64, bytes: &mut [u8]) {
        let chunks = self.chunks();
        for (chunk, within, outer) in chunks_of(address, bytes.len()) {
            match chunks.get(&chunk) {
                Some(Chunk::Bytes(found)) => bytes[outer].copy_from_slice(&found[within]),
                Some(Chunk::Filled(byte)) => bytes[outer].fill(*byte),
                None => bytes[outer].fill(GARBAGE),
            }
        }
    }

    /// Copies from one address to another; the ranges may overlap.
    pub fn copy(&self, from: u64, to: u64, bytes: usize) {
        let mut found = vec![0; bytes];
        self.read(from, &mut found);
        self.write(to, &found);
    }

    /// Sets every byte of a range.
    pub fn fill(&self, address: u64, bytes: usize, value: u8) {
        let mut chunks = self.chunks();
        for (chunk, within, _) in chunks_of(address, bytes) {
            if within == (0..CHUNK) {
                chunks.insert(chunk, Chunk::Filled(value));
            } else {
                let chunk = chunks.entry(chunk).or_insert(Chunk::Filled(GARBAGE));
                chunk.bytes()[within].fill(value);
            }
        }
    }

    /// Discards the contents of freed memory. A chunk that is only partly freed stays, because the
    /// rest of it may be in use.
    pub fn forget(&self, address: u64, bytes: usize) {
        let mut chunks = self.chunks();
        for (chunk, within, _) in chunks_of(address, bytes) {
            if within == (0..CHUNK) {
                chunks.remove(&chunk);
            } else if let Some(chunk) = chunks.get_mut(&chunk) {
                chunk.bytes()[within].fill(GARBAGE);
            }
        }
    }
}

/// Splits a range by chunk: returns the number of each chunk, the bytes within that chunk, and the
/// matching bytes of the range.
fn chunks_of(
    address: u64,
    bytes: usize,
) -> impl Iterator<Item = (u64, Range<usize>, Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == bytes {
            return None;
        }
        let at = address.wrapping_add(done as u64);
        let start = usize::try_from(at % CHUNK as u64).expect("less than a chunk");
        let length = (CHUNK - start).min(bytes - done);
        let outer = done..done + length;
        done += length;
        Some((at / CHUNK as u64, start..start + length, outer))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_bytes_are_read_back_and_other_bytes_are_garbage() {
        let memory = SimMemory::default();
        let bytes: Vec<u8> = (0..251).cycle().take(3 * CHUNK).collect();
        memory.write(1000, &bytes);
        let mut read = vec![0; bytes.len() + 2];
        memory.read(999, &mut read);
        assert_eq!((read[0], read[bytes.len() + 1]), (GARBAGE, GARBAGE));
        assert_eq!(read[1..=bytes.len()], bytes);
    }

    #[test]
    fn fill_and_forget_change_only_their_range() {
        let memory = SimMemory::default();
        let all = 4 * CHUNK;
        memory.fill(0, all, 7);
        memory.fill(10, 2 * CHUNK, 0);
        let mut read = vec![0; all];
        memory.read(0, &mut read);
        assert!(read[..10].iter().chain(&read[10 + 2 * CHUNK..]).all(|&byte| byte == 7));
        assert!(read[10..10 + 2 * CHUNK].iter().all(|&byte| byte == 0));

        memory.forget(5, 2 * CHUNK);
        memory.read(0, &mut read);
        assert!(read[..5].iter().all(|&byte| byte == 7));
        assert!(read[5..5 + 2 * CHUNK].iter().all(|&byte| byte == GARBAGE));
        assert_eq!(read[5 + 2 * CHUNK..10 + 2 * CHUNK], [0; 5]);
        memory.forget(0, all);
        assert!(memory.chunks().is_empty(), "freed memory is still stored");
    }
}
