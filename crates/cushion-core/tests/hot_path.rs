//! The hot path makes no heap allocation. The test counts the heap allocations of its thread.

#[cfg(test)]
mod tests {
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::cell::Cell;

    use cushion_core::testing::churn::Churn;
    use cushion_core::{Engine, Policy, SimConfig, SimDriver};

    thread_local! {
        static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    }

    /// Counts the heap allocations of each thread.
    struct Counting;

    // SAFETY: every call is forwarded unchanged to the system's allocator. The counter is a
    // thread-local cell that needs no heap.
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            ALLOCATIONS.set(ALLOCATIONS.get() + 1);
            // SAFETY: the caller upholds the contract of `alloc`.
            unsafe { System.alloc(layout) }
        }

        unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
            // SAFETY: the caller upholds the contract of `dealloc`, and `pointer` came from
            // `System`.
            unsafe { System.dealloc(pointer, layout) }
        }
    }

    #[global_allocator]
    static ALLOCATOR: Counting = Counting;

    /// After a warm-up, alloc and free make no heap allocation. Two exceptions: a large working set
    /// can still have a new combination of sizes, and `paged`, which reserves little more than the
    /// peak of live bytes, can reach a new peak.
    #[test]
    fn a_warm_program_makes_no_heap_allocation() {
        for policy in Policy::ALL {
            let for_peaks = if policy == Policy::Paged { 20 } else { 0 };
            for (live, allowed) in [(1, 0), (64, for_peaks), (4096, 100 + for_peaks)] {
                let engine = Engine::new(SimDriver::new(SimConfig::with_capacity(64 << 30)));
                engine.set_policy(policy);
                let mut churn = Churn::new(&engine, live);
                (0..100_000).for_each(|_| churn.pair());
                let before = ALLOCATIONS.get();
                (0..100_000).for_each(|_| churn.pair());
                let made = ALLOCATIONS.get() - before;
                assert!(made <= allowed, "{policy}, {live} live: {made} in 100,000 pairs");
            }
        }
    }
}
