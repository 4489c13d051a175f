//! How much is looked at with the lock held: so that tests can tell that it does not grow with what there is.

use std::cell::Cell;

/// What was looked at so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LookedAt {
    /// Blocks that lie side by side, to find room among them.
    pub blocks: u64,
    /// Pages, to find what a range can be made of.
    pub pages: u64,
}

/// The counts, for who holds the lock.
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
