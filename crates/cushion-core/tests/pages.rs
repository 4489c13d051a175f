//! Pages and second addresses, as those see them who ask from outside.

mod common;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cushion_core::driver::Call;
    use cushion_core::size::{GIB, MIB};
    use cushion_core::{
        CheckedDriver, Driver, Engine, EngineConfig, Options, SimConfig, SimDriver,
    };

    use crate::common::{PAGED, S0, full_now, gpu, never_fits, reserved_mib, take};

    fn on_pages<D: Driver>(driver: D, conf: &str) -> Engine<D> {
        let options = Options::parse(&format!("paged:True,{conf}")).unwrap().options;
        Engine::with_config(driver, EngineConfig { options, ..EngineConfig::default() })
    }

    /// Until the program counts as loaded: it has freed more than it has live.
    fn settle<D: Driver>(gpu: &Engine<D>, bytes: u64) {
        let live = gpu.stats().active_bytes.all.current;
        for _ in 0..=live / bytes + 1 {
            let address = gpu.alloc(bytes, S0).unwrap();
            gpu.free(address).unwrap();
        }
    }

    #[test]
    fn the_base_of_an_allocation_is_mapped_as_a_whole() {
        let mut seen = 0;
        for (whole, part) in
            (60..=128).step_by(4).flat_map(|whole| (33..whole).map(move |part| (whole, part)))
        {
            let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(1024 * MIB)));
            let checked = Arc::new(CheckedDriver::new(sim));
            let gpu = on_pages(Arc::clone(&checked), "page_mb:16");
            let blocks: Vec<u64> = (0..64).map(|_| gpu.alloc(8 * MIB, S0).unwrap()).collect();
            settle(&gpu, 8 * MIB);
            for (_, &block) in blocks.iter().enumerate().filter(|(i, _)| i % 8 < 4) {
                gpu.free(block).unwrap();
            }
            let large = gpu.alloc(whole * MIB, S0).unwrap();
            if gpu.page_figures().ranges == 0 {
                continue;
            }
            gpu.free(large).unwrap();
            // A smaller request takes the range again, and pages that it does not use leave it.
            let small = gpu.alloc(part * MIB, S0).unwrap();
            if small != large {
                continue;
            }
            gpu.empty_cache().unwrap();
            let (base, size) = gpu.base_of(small).unwrap();
            assert!(base <= small && small + part * MIB <= base + size);
            checked.behind(base, size);
            seen += 1;
        }
        assert!(seen > 0);
    }

    #[test]
    fn no_event_of_retired_ranges_is_left_at_the_end() {
        let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(8 * GIB)));
        let gpu = on_pages(Arc::clone(&sim), "page_mb:2");
        settle(&gpu, 4 * MIB);
        let blocks: Vec<u64> = (0..1400).map(|_| gpu.alloc(2 * MIB, S0).unwrap()).collect();
        settle(&gpu, 2 * MIB);
        let (freed, kept): (Vec<_>, Vec<_>) =
            blocks.into_iter().enumerate().partition(|(i, _)| i % 2 == 0);
        freed.into_iter().for_each(|(_, block)| gpu.free(block).unwrap());
        // More ranges than may be, while their stream is at work.
        sim.launch(S0);
        for pages in 2..9 {
            let ranges = (0..690 / pages).map(|_| gpu.alloc(pages * 2 * MIB, S0).unwrap());
            let ranges: Vec<u64> = ranges.collect();
            ranges.into_iter().for_each(|range| gpu.free(range).unwrap());
        }
        assert!(sim.counts().of(Call::EventCreate) > 0, "none was retired");
        kept.into_iter().for_each(|(_, block)| gpu.free(block).unwrap());
        sim.finish_all();
        drop(gpu);
        assert_eq!(sim.held(), 0);
        assert_eq!(sim.counts().of(Call::EventCreate), sim.counts().of(Call::EventDestroy));
    }

    #[test]
    fn what_fits_later_is_not_said_never_to_fit() {
        let gpu = gpu(1024, "wait_ms:0,paged:True");
        gpu.set_memory_limit(Some(16 * MIB));
        let first = take(&gpu, 9 * MIB, S0);
        let shortage = full_now(gpu.alloc(9 * MIB, S0));
        assert_eq!(shortage.wanted, 10 * MIB, "whole pages, and no segment");
        gpu.free(first).unwrap();
        take(&gpu, 9 * MIB, S0);
        never_fits(gpu.alloc(17 * MIB, S0));
        // A small request takes a page.
        let small = crate::common::gpu(1024, "wait_ms:0,paged:True");
        small.set_memory_limit(Some(MIB));
        never_fits(small.alloc(512, S0));
    }

    #[test]
    fn a_device_smaller_than_a_segment_serves_what_fits() {
        let gpu = gpu(12, PAGED);
        take(&gpu, 9 * MIB, S0);
        assert_eq!(reserved_mib(&gpu), 10);
    }

    #[test]
    fn a_program_that_resets_its_figures_has_loaded_all_the_same() {
        let held = |resets: bool| {
            let gpu = gpu(4096, PAGED);
            take(&gpu, 500 * MIB, S0);
            for _ in 0..20 {
                let block = take(&gpu, 50 * MIB, S0);
                gpu.free(block).unwrap();
                if resets {
                    gpu.reset_accumulated_stats();
                }
            }
            // What is loaded gets large pages; what comes later does not.
            take(&gpu, 61 * MIB, S0);
            take(&gpu, 3 * MIB, S0);
            reserved_mib(&gpu)
        };
        assert_eq!(held(true), held(false));
    }
}
