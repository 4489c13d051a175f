//! The hot path takes nothing from the heap: every allocation of the process is counted.

#[cfg(test)]
mod tests {
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::cell::Cell;

    use cushion_core::{Engine, Policy, SimConfig, SimDriver, StreamId};

    thread_local! {
        static TAKEN: Cell<u64> = const { Cell::new(0) };
    }

    /// Counts what each thread takes from the heap.
    struct Counting;

    // SAFETY: every call is passed on to the system's allocator unchanged; counting touches only a
    // thread-local cell that needs no heap.
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            TAKEN.set(TAKEN.get() + 1);
            // SAFETY: the caller upholds the contract of `alloc`.
            unsafe { System.alloc(layout) }
        }

        unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
            // SAFETY: the caller upholds the contract of `dealloc`, and `pointer` came from `System`.
            unsafe { System.dealloc(pointer, layout) }
        }
    }

    #[global_allocator]
    static ALLOCATOR: Counting = Counting;

    const STREAM: StreamId = StreamId(0);

    fn engine(policy: Policy) -> Engine<SimDriver> {
        let engine = Engine::new(SimDriver::new(SimConfig::with_capacity(64 << 30)));
        engine.set_policy(policy);
        engine
    }

    /// Random sizes with a fixed number of blocks live. Once the program is in its stride nothing is
    /// taken; a large working set may still find a new shape now and then.
    #[test]
    fn a_program_in_its_stride_takes_nothing_from_the_heap() {
        for policy in Policy::ALL {
            for (live, allowed) in [(1, 0), (64, 0), (4096, 100)] {
                let engine = engine(policy);
                let mut state = 0x9e37_79b9_7f4a_7c15_u64;
                let mut random = || {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    state
                };
                let size = |random: u64| 512 + (random >> 40) % (1 << (9 + random % 13));
                let mut blocks: Vec<u64> =
                    (0..live).map(|_| engine.alloc(size(random()), STREAM).unwrap()).collect();
                let mut before = 0;
                for pair in 0..200_000 {
                    if pair == 100_000 {
                        before = TAKEN.get();
                    }
                    let index = usize::try_from(random() % live).unwrap();
                    engine.free(blocks[index]).unwrap();
                    blocks[index] = engine.alloc(size(random()), STREAM).unwrap();
                }
                let taken = TAKEN.get() - before;
                assert!(taken <= allowed, "{policy}, {live} live: {taken} in 100,000 pairs");
            }
        }
    }
}
