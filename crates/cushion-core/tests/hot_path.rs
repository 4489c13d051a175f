//! The hot path takes nothing from the heap: every allocation of the process is counted.

#[cfg(test)]
mod tests {
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::cell::Cell;

    use cushion_core::testing::churn::Churn;
    use cushion_core::{Engine, Policy, SimConfig, SimDriver};

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

    /// Once the program is in its stride nothing is taken; a large working set may still find a new
    /// shape now and then, and where no more is held than was ever live, a new peak.
    #[test]
    fn a_program_in_its_stride_takes_nothing_from_the_heap() {
        for policy in Policy::ALL {
            let for_peaks = if policy == Policy::Paged { 20 } else { 0 };
            for (live, allowed) in [(1, 0), (64, for_peaks), (4096, 100 + for_peaks)] {
                let engine = Engine::new(SimDriver::new(SimConfig::with_capacity(64 << 30)));
                engine.set_policy(policy);
                let mut churn = Churn::new(&engine, live);
                (0..100_000).for_each(|_| churn.pair());
                let before = TAKEN.get();
                (0..100_000).for_each(|_| churn.pair());
                let taken = TAKEN.get() - before;
                assert!(taken <= allowed, "{policy}, {live} live: {taken} in 100,000 pairs");
            }
        }
    }
}
