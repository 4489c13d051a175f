//! The smallest policy: first fit, with one plain segment for each miss. It shows that a policy is
//! one implementation of [`Rules`], and that code outside this room need not know it.

use super::Rules;
use crate::base::names::PolicyIndex;
use crate::driver::{Driver, DriverResult};
use crate::heap::block::{Block, BlockId};
use crate::memory::{Found, GiveBack, Mem, Request};

#[derive(Debug)]
struct FirstFit {
    index: PolicyIndex,
}

impl<D: Driver> Rules<D> for FirstFit {
    /// Returns the lowest free block that is large enough.
    fn find(&self, mem: &Mem<'_, D>, request: &Request) -> Option<Found> {
        let free = mem.heap.lane(request.lane)?.free().at_least(request.size);
        free.min_by_key(|&id| mem.heap[id].address).map(Found::Block)
    }

    fn splits(&self, _mem: &Mem<'_, D>, _id: BlockId, _size: u64) -> bool {
        true
    }

    fn grow(&mut self, mem: &mut Mem<'_, D>, request: &Request) -> DriverResult<Option<BlockId>> {
        let bytes = mem.whole_units(request.size);
        if mem.may_grow_by() < bytes {
            return Ok(None);
        }
        mem.plain_segment(bytes, request, self.index)
    }

    fn needed(&mut self, mem: &mut Mem<'_, D>, request: &Request) -> u64 {
        mem.whole_units(request.size)
    }

    fn give_back(&self, _mem: &Mem<'_, D>, block: &Block) -> GiveBack {
        if block.is_split() { GiveBack::Nothing } else { GiveBack::Segment }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::base::clock::VirtualClock;
    use crate::base::names::{Owner, Tag};
    use crate::base::random::Random;
    use crate::base::size::MIB;
    use crate::core::Shared;
    use crate::core::attempt::Effort;
    use crate::demand::asked::Asked;
    use crate::driver::{SimConfig, SimDriver, StreamId};
    use crate::options::ladder::Ladder;
    use crate::options::{Options, Policy};
    use crate::shortage::callbacks::Callbacks;
    use crate::shortage::climb::{Served, Waited};
    use crate::shortage::receipts::Receipts;
    use crate::shortage::{Climber, Desk};

    const STREAM: StreamId = StreamId(0);

    /// Returns an engine with first fit in force.
    fn shared(capacity: u64) -> Shared<SimDriver> {
        let driver = SimDriver::new(SimConfig::with_capacity(capacity));
        let device = driver.properties();
        let (options, clock) = (Options::default(), Arc::new(VirtualClock::new()));
        let ladder = Ladder::Graceful;
        let shared = Shared::new(driver, device, clock, options, Policy::Segments, ladder, None);
        shared.locked(|core| {
            let index = core.policies.add(Box::new(FirstFit { index: PolicyIndex(3) }));
            assert_eq!(index, PolicyIndex(3));
            core.policies.set_in_force(index);
        });
        shared
    }

    fn desk() -> Desk {
        let (callbacks, receipts) = (Callbacks::default(), Receipts::default());
        Desk { callbacks, receipts, waited: Waited::default(), seed: 0 }
    }

    fn alloc(shared: &Shared<SimDriver>, desk: &Desk, bytes: u64) -> Option<u64> {
        let asked = Asked::by_thread(bytes, STREAM, Tag::NONE);
        match (Climber { shared, desk }).serve(&asked, Effort::Wait) {
            Ok(Served::At(address)) => Some(address),
            Ok(_) => unreachable!("a thread waits until the end"),
            Err(_) => None,
        }
    }

    fn free(shared: &Shared<SimDriver>, address: u64) {
        shared.locked(|mut core| core.free(address, Owner::NOBODY, Tag::NONE)).unwrap();
    }

    fn check(shared: &Shared<SimDriver>) {
        let stats = shared.stats();
        shared.locked(|core| core.check_invariants(&stats)).unwrap();
    }

    #[test]
    fn the_lowest_free_block_serves() {
        let (shared, desk) = (shared(100 * MIB), desk());
        let first = alloc(&shared, &desk, 10 * MIB).unwrap();
        let second = alloc(&shared, &desk, 4 * MIB).unwrap();
        [first, second].into_iter().for_each(|address| free(&shared, address));
        let low = first.min(second);
        assert_eq!(alloc(&shared, &desk, 2 * MIB), Some(low), "best fit would take the smaller");
        check(&shared);
    }

    #[test]
    fn the_ladder_gives_its_segments_back() {
        let (shared, desk) = (shared(32 * MIB), desk());
        let parts: Vec<u64> = (0..4).map(|_| alloc(&shared, &desk, 8 * MIB).unwrap()).collect();
        assert_eq!(alloc(&shared, &desk, 8 * MIB), None);
        parts.into_iter().for_each(|address| free(&shared, address));
        assert!(alloc(&shared, &desk, 30 * MIB).is_some(), "four segments make room for one");
        check(&shared);
    }

    #[test]
    fn invariants_hold_after_every_step_of_a_random_program() {
        let (shared, desk) = (shared(64 * MIB), desk());
        let mut random = Random(7);
        let mut live = Vec::new();
        for _ in 0..400 {
            if live.len() > 12 || !live.is_empty() && random.next().is_multiple_of(3) {
                let at = usize::try_from(random.next() % live.len() as u64).unwrap();
                free(&shared, live.swap_remove(at));
            } else {
                live.extend(alloc(&shared, &desk, 1 + random.next() % (9 * MIB)));
            }
            check(&shared);
        }
    }
}
