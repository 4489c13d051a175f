//! Counts of the blocks and pages that searches visit while the lock is held. Tests use them to
//! check that a search does not become slower as the number of blocks grows.

use std::cell::Cell;

/// The number of blocks and pages visited so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LookedAt {
    /// Neighbouring blocks visited to find room among them.
    pub blocks: u64,
    /// Pages visited to find pages for a range.
    pub pages: u64,
}

/// The counters, protected by the engine's lock.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    so_far: Cell<LookedAt>,
}

impl Looks {
    pub(crate) fn at_blocks(&self, blocks: u64) {
        let so_far = self.so_far.get();
        self.so_far.set(LookedAt { blocks: so_far.blocks + blocks, ..so_far });
    }

    pub(crate) fn at_pages(&self, pages: u64) {
        let so_far = self.so_far.get();
        self.so_far.set(LookedAt { pages: so_far.pages + pages, ..so_far });
    }

    pub(crate) fn so_far(&self) -> LookedAt {
        self.so_far.get()
    }
}
