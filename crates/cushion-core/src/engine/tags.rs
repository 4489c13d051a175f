//! The tags in use, for a program that stores data behind tags.

use super::Engine;
use crate::base::names::Tag;
use crate::driver::Driver;
use crate::heap::block::BlockState;

impl<D: Driver> Engine<D> {
    /// Calls `f` with every tag in use: by live or pending memory, by segments, by the history, and
    /// by receipts, including unfinished ones. A tag may appear more than once. The tag of a
    /// request that is under way is not included until the request is served or refused: its caller
    /// knows it.
    ///
    /// `f` is called with the engine's lock held, and must not call the engine.
    pub fn tags_in_use(&self, mut f: impl FnMut(Tag)) {
        {
            let core = self.shared.lock();
            let in_use =
                |state: BlockState| matches!(state, BlockState::Live | BlockState::Pending);
            let blocks = core.heap.blocks().filter(|(_, block)| in_use(block.state));
            blocks.for_each(|(_, block)| f(block.holder.tag));
            core.heap.segments().for_each(|(_, segment)| f(segment.tag));
            core.history.entries().for_each(|entry| f(entry.tag));
            core.setup.told_later.for_each(&mut f);
        }
        for receipt in self.desk.receipts.read() {
            f(receipt.tag);
            receipt.groups.iter().for_each(|group| f(group.tag));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use super::*;
    use crate::driver::{SimConfig, SimDriver, StreamId};

    const MIB: u64 = 1 << 20;

    fn engine() -> Engine<SimDriver> {
        Engine::new(SimDriver::new(SimConfig::with_capacity(64 * MIB)))
    }

    fn in_use(engine: &Engine<SimDriver>) -> BTreeSet<u64> {
        let mut found = BTreeSet::new();
        engine.tags_in_use(|tag| {
            found.insert(tag.0);
        });
        found.remove(&0);
        found
    }

    #[test]
    fn a_tag_is_in_use_while_memory_or_history_has_it() {
        let engine = engine();
        let stream = StreamId(0);
        // The first allocation creates the segment.
        let segment = engine.alloc_for(MIB, stream, Tag(1)).unwrap();
        let live = engine.alloc_for(4096, stream, Tag(2)).unwrap();
        let pending = engine.alloc_for(4096, stream, Tag(3)).unwrap();
        engine.free(segment).unwrap();
        engine.driver().launch(StreamId(7));
        engine.record_stream(pending, StreamId(7)).unwrap();
        engine.free_for(pending, Tag(4)).unwrap();
        assert!(in_use(&engine).is_superset(&BTreeSet::from([1, 2, 3])));
        assert!(!in_use(&engine).contains(&4), "nothing is recorded");
        engine.record_history(2);
        engine.free_for(live, Tag(5)).unwrap();
        assert!(in_use(&engine).contains(&5) && !in_use(&engine).contains(&2));
        engine.driver().finish_all();
        engine.empty_cache().unwrap();
        engine.record_history(0);
        assert_eq!(in_use(&engine), BTreeSet::new());
    }

    #[test]
    fn receipts_filed_or_unfinished_keep_their_tags_in_use() {
        let engine = Arc::new(engine());
        let stream = StreamId(0);
        let first = engine.alloc_for(60 * MIB, stream, Tag(1)).unwrap();
        let gpu = Arc::downgrade(&engine);
        engine.on_shortage(0, move |_| {
            let gpu = gpu.upgrade().unwrap();
            gpu.free(first).unwrap();
            gpu.empty_cache().unwrap();
            assert!(in_use(&gpu).contains(&1), "the receipt will name its owner");
        });
        let gpu = Arc::downgrade(&engine);
        engine.explain_tags(move |tags| {
            let named = in_use(&gpu.upgrade().unwrap()).contains(&1) && tags.contains(&Tag(1));
            tags.iter().map(|_| vec![named.to_string()]).collect()
        });
        let second = engine.alloc_for(60 * MIB, stream, Tag(2)).unwrap();
        let receipts = engine.receipts();
        assert_eq!(receipts[0].groups[0].stack, ["true"]);
        drop(receipts);
        engine.free(second).unwrap();
        engine.empty_cache().unwrap();
        assert_eq!(in_use(&engine), BTreeSet::from([1, 2]), "the receipt has both");
        engine.keep_receipts(0);
        assert_eq!(in_use(&engine), BTreeSet::new());
    }
}
