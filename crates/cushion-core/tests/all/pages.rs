//! Pages and stitches, as callers of the engine observe them.

#[cfg(test)]
mod tests {
    use cushion_core::driver::Call;
    use cushion_core::size::MIB;

    use crate::common::{
        PAGED, S0, cache, checked_gpu, free_every_second, full_now, gpu, load, never_fits,
        reserved_mib, take,
    };

    #[test]
    fn the_segment_of_an_allocation_is_fully_mapped() {
        let mut seen = 0;
        for (whole, part) in
            (60..=128).step_by(4).flat_map(|whole| (33..whole).map(move |part| (whole, part)))
        {
            let (gpu, _) = checked_gpu(1024, "paged:True,page_mb:16");
            let blocks: Vec<u64> = (0..64).map(|_| gpu.alloc(8 * MIB, S0).unwrap()).collect();
            load(&gpu, 8 * MIB);
            for (_, &block) in blocks.iter().enumerate().filter(|(i, _)| i % 8 < 4) {
                gpu.free(block).unwrap();
            }
            let large = gpu.alloc(whole * MIB, S0).unwrap();
            if gpu.page_figures().ranges == 0 {
                continue;
            }
            gpu.free(large).unwrap();
            // A smaller request reuses the stitch, and `empty_cache` unmaps the pages after it.
            let small = gpu.alloc(part * MIB, S0).unwrap();
            if small != large {
                continue;
            }
            gpu.empty_cache().unwrap();
            let (base, size) = gpu.base_of(small).unwrap();
            assert!(base <= small && small + part * MIB <= base + size);
            gpu.driver().behind(base, size);
            seen += 1;
        }
        assert!(seen > 0);
    }

    #[test]
    fn drop_destroys_the_events_of_retired_stitches() {
        let (gpu, sim) = checked_gpu(8 << 10, "paged:True,page_mb:2");
        load(&gpu, 4 * MIB);
        let blocks: Vec<u64> = (0..1400).map(|_| gpu.alloc(2 * MIB, S0).unwrap()).collect();
        load(&gpu, 2 * MIB);
        let kept = free_every_second(&gpu, &blocks);
        // Create more stitches than the engine keeps, while their stream has work queued.
        sim.launch(S0);
        for pages in 2..9 {
            let stitches = (0..690 / pages).map(|_| gpu.alloc(pages * 2 * MIB, S0).unwrap());
            let stitches: Vec<u64> = stitches.collect();
            stitches.into_iter().for_each(|block| gpu.free(block).unwrap());
        }
        assert!(sim.counts().of(Call::EventCreate) > 0, "no stitch was retired");
        kept.into_iter().for_each(|block| gpu.free(block).unwrap());
        sim.finish_all();
        drop(gpu);
        assert_eq!(sim.held(), 0);
        assert_eq!(sim.counts().of(Call::EventCreate), sim.counts().of(Call::EventDestroy));
    }

    #[test]
    fn a_request_that_fits_later_is_refused_as_full_now() {
        let gpu = gpu(1024, "wait_ms:0,paged:True");
        gpu.set_memory_limit(Some(16 * MIB));
        let first = take(&gpu, 9 * MIB, S0);
        let shortage = full_now(gpu.alloc(9 * MIB, S0));
        assert_eq!(shortage.wanted, 10 * MIB, "whole pages, not a segment");
        gpu.free(first).unwrap();
        take(&gpu, 9 * MIB, S0);
        never_fits(gpu.alloc(17 * MIB, S0));
        // A small request needs a whole page.
        let small = crate::common::gpu(1024, "wait_ms:0,paged:True");
        small.set_memory_limit(Some(MIB));
        never_fits(small.alloc(512, S0));
    }

    #[test]
    fn a_device_smaller_than_a_segment_serves_a_request_that_fits() {
        let gpu = gpu(12, PAGED);
        take(&gpu, 9 * MIB, S0);
        assert_eq!(reserved_mib(&gpu), 10);
    }

    #[test]
    fn resetting_the_statistics_does_not_change_whether_a_program_is_loaded() {
        let held = |resets: bool| {
            let gpu = gpu(4096, PAGED);
            take(&gpu, 500 * MIB, S0);
            for _ in 0..20 {
                cache(&gpu, 50 * MIB, S0);
                if resets {
                    gpu.reset_accumulated_stats();
                }
            }
            // While a program loads it gets large pages; afterwards it does not.
            take(&gpu, 61 * MIB, S0);
            take(&gpu, 3 * MIB, S0);
            reserved_mib(&gpu)
        };
        assert_eq!(held(true), held(false));
    }
}
