//! The streams' share of the invariant check.

use std::collections::BTreeMap;

use super::Streams;
use crate::base::check::{Violation, ensure};
use crate::heap::Heap;
use crate::heap::block::{BlockId, BlockState};

impl Streams {
    /// Every pending block waits for as many events as it counts, and no other block waits.
    pub(crate) fn check(&self, heap: &Heap) -> Result<(), Violation> {
        ensure!(self.done.is_empty(), "the frees of {:?} were not completed", self.done);
        let mut waiting: BTreeMap<BlockId, u32> = BTreeMap::new();
        let events = self.events.values().flatten().map(|&(_, block)| block);
        for block in events.chain(self.awaiting_device.iter().map(|&(_, block)| block)) {
            *waiting.entry(block).or_default() += 1;
        }
        for deferred in &self.deferred {
            waiting.entry(deferred.block).or_default();
        }
        let mut pending = 0_usize;
        for (id, block) in heap.blocks().filter(|(_, it)| it.state == BlockState::Pending) {
            pending += 1;
            let events = waiting.get(&id).copied();
            ensure!(events == Some(block.users.events), "{block:?} waits for {events:?} events");
        }
        ensure!(pending == waiting.len(), "an event of no pending block");
        Ok(())
    }
}
