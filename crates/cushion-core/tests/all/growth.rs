//! The number of blocks and pages that a miss visits with the lock held does not grow with the
//! number of free blocks.

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cushion_core::size::{GIB, MIB};
    use cushion_core::{Engine, LookedAt, SimConfig, SimDriver};

    use crate::common::*;

    /// Returns an engine that holds no memory and assumes that its program is loaded: the program
    /// has freed more than it has live.
    fn loaded(conf: &str) -> Gpu {
        let gpu = Engine::new(Arc::new(SimDriver::new(SimConfig::with_capacity(512 * GIB))));
        gpu.configure(conf).unwrap();
        for _ in 0..3 {
            cache(&gpu, 8 * GIB, S0);
        }
        gpu.empty_cache().unwrap();
        gpu
    }

    /// Makes one request, which must be a miss, and returns what it visits.
    fn looked_at_for(gpu: &Gpu, bytes: u64) -> LookedAt {
        let (before, misses) = (gpu.looked_at(), gpu.stats().misses);
        gpu.alloc(bytes, S0).unwrap();
        assert_eq!(gpu.stats().misses, misses + 1, "the request of {bytes} bytes is not a miss");
        let after = gpu.looked_at();
        LookedAt { blocks: after.blocks - before.blocks, pages: after.pages - before.pages }
    }

    /// Makes several misses among `free` free blocks, none of which fits, and returns the most that
    /// one miss visits.
    fn looked_at_among(free: u64) -> LookedAt {
        let gpu = loaded("paged:True,wait_ms:0");
        let size = |n: u64| MIB + MIB / 8 + n % 7 * 4096;
        let blocks: Vec<u64> = (0..2 * free).map(|n| gpu.alloc(size(n), S0).unwrap()).collect();
        while gpu.would_hit(2 * MIB, S0) {
            gpu.alloc(2 * MIB, S0).unwrap();
        }
        free_every_second(&gpu, &blocks);
        // The first miss that searches for pages to stitch visits every changed page once.
        let first = (0..200).find(|_| looked_at_for(&gpu, 3 * MIB).pages > 0);
        assert!(first.is_some(), "no miss searches for pages to stitch");
        let mut most = LookedAt::default();
        for n in 1..50 {
            // These blocks are not neighbours, and share no page.
            let index = usize::try_from(n * free / 25 / 2 * 2 + 1).unwrap();
            gpu.free(blocks[index]).unwrap();
            gpu.alloc(size(index as u64), S0).unwrap();
            let looked_at = looked_at_for(&gpu, 4 * MIB + n * 512);
            most.blocks = most.blocks.max(looked_at.blocks);
            most.pages = most.pages.max(looked_at.pages);
        }
        most
    }

    #[test]
    fn a_miss_does_not_visit_every_free_block() {
        let few = looked_at_among(5_000);
        let many = looked_at_among(50_000);
        assert!(few.pages <= 24 && few.blocks <= 24, "{few:?}");
        assert!(many.pages <= few.pages + 4 && many.blocks <= few.blocks + 4, "{few:?}, {many:?}");
    }

    /// Frees every second page and unmaps the others, like the teeth of a comb. Makes a miss that
    /// is larger than the comb, and returns what it visits.
    fn looked_at_over_comb(pages: u64) -> LookedAt {
        let gpu = loaded("paged:True,page_mb:2,trim_ms:0,wait_ms:0");
        let blocks: Vec<u64> = (0..2 * pages).map(|_| gpu.alloc(2 * MIB, S0).unwrap()).collect();
        let kept = free_every_second(&gpu, &blocks);
        gpu.empty_cache().unwrap();
        kept.into_iter().for_each(|block| gpu.free(block).unwrap());
        looked_at_for(&gpu, pages * 8 * MIB)
    }

    #[test]
    fn a_miss_over_many_holes_visits_each_block_a_few_times() {
        let [few, many] = [500, 4_000].map(|pages| (pages, looked_at_over_comb(pages)));
        for (pages, looked_at) in [few, many] {
            // Half of the blocks are free, the others are unmapped. Each block is one page.
            assert!(looked_at.blocks <= 5 * 2 * pages + 20, "{pages} pages: {looked_at:?}");
            assert!(looked_at.pages <= 5 * 2 * pages + 20, "{pages} pages: {looked_at:?}");
        }
    }
}
