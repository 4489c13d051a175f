//! What a miss looks at with the lock held does not grow with what there is.

mod common;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cushion_core::size::{GIB, MIB};
    use cushion_core::{Engine, LookedAt, SimConfig, SimDriver};

    use crate::common::*;

    /// A program that has freed more than it has live, and holds nothing.
    fn loaded(conf: &str) -> Gpu {
        let gpu = Engine::new(Arc::new(SimDriver::new(SimConfig::with_capacity(512 * GIB))));
        gpu.configure(conf).unwrap();
        for _ in 0..3 {
            let block = gpu.alloc(8 * GIB, S0).unwrap();
            gpu.free(block).unwrap();
        }
        gpu.empty_cache().unwrap();
        gpu
    }

    fn free_every_second(gpu: &Gpu, blocks: &[u64], odd: usize) {
        blocks.iter().skip(odd).step_by(2).for_each(|&block| gpu.free(block).unwrap());
    }

    /// What one request, a miss, looks at.
    fn looked_at_for(gpu: &Gpu, bytes: u64) -> LookedAt {
        let (before, misses) = (gpu.looked_at(), gpu.stats().misses);
        gpu.alloc(bytes, S0).unwrap();
        assert_eq!(gpu.stats().misses, misses + 1, "{bytes} bytes are no miss");
        let after = gpu.looked_at();
        LookedAt { blocks: after.blocks - before.blocks, pages: after.pages - before.pages }
    }

    /// What misses look at beside so many free blocks, of which none serves them: the most of several.
    fn looked_at_among(free: u64) -> LookedAt {
        let gpu = loaded("paged:True,wait_ms:0");
        let size = |n: u64| MIB + MIB / 8 + n % 7 * 4096;
        let blocks: Vec<u64> = (0..2 * free).map(|n| gpu.alloc(size(n), S0).unwrap()).collect();
        while gpu.would_hit(2 * MIB, S0) {
            gpu.alloc(2 * MIB, S0).unwrap();
        }
        free_every_second(&gpu, &blocks, 0);
        // The first miss that looks for pieces looks at all that has changed so far, each page once.
        let first = (0..200).find(|_| looked_at_for(&gpu, 3 * MIB).pages > 0);
        assert!(first.is_some(), "pieces are looked for");
        let mut most = LookedAt::default();
        for n in 1..50 {
            // Not next to each other, and in pages of their own.
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
    fn a_miss_does_not_look_at_every_free_block() {
        let few = looked_at_among(5_000);
        let many = looked_at_among(50_000);
        assert!(few.pages <= 24 && few.blocks <= 24, "{few:?}");
        assert!(many.pages <= few.pages + 4 && many.blocks <= few.blocks + 4, "{few:?}, {many:?}");
    }

    /// What a request that reaches over a comb looks at: every second page is free, and the others are gone.
    fn looked_at_over_comb(pages: u64) -> LookedAt {
        let gpu = loaded("paged:True,page_mb:2,trim_ms:0,wait_ms:0");
        let blocks: Vec<u64> = (0..2 * pages).map(|_| gpu.alloc(2 * MIB, S0).unwrap()).collect();
        free_every_second(&gpu, &blocks, 0);
        gpu.empty_cache().unwrap();
        free_every_second(&gpu, &blocks, 1);
        looked_at_for(&gpu, pages * 8 * MIB)
    }

    #[test]
    fn a_miss_over_many_holes_looks_at_each_block_a_few_times() {
        let [few, many] = [500, 4_000].map(|pages| (pages, looked_at_over_comb(pages)));
        for (pages, looked_at) in [few, many] {
            // As many free as unmapped ones, and each is a page.
            assert!(looked_at.blocks <= 5 * 2 * pages + 20, "{pages} pages: {looked_at:?}");
            assert!(looked_at.pages <= 5 * 2 * pages + 20, "{pages} pages: {looked_at:?}");
        }
    }
}
