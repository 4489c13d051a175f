//! The least memory that a trace needs, under any allocator and under each policy.

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use cushion_core::size::{GIB, MIB};
    use cushion_core::{Ladder, Policy};
    use cushion_trace::{
        CAPACITY_STEP, Limits, Program, ReplayConfig, min_capacity, open, replay, replay_watched,
    };

    fn program(name: &str) -> Program {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces");
        let path = PathBuf::from(folder).join(format!("{name}.pickle.gz"));
        Program::of(&open(&path, &Limits::default()).unwrap(), 0)
    }

    fn config(policy: Policy) -> ReplayConfig {
        ReplayConfig { policy, ladder: Ladder::Torch, capacity: None, options: None }
    }

    #[test]
    fn the_smallest_capacity_is_enough_and_one_step_less_is_not() {
        for name in ["stream_offload", "graphs_serving", "vision_multires.midrun"] {
            let program = program(name);
            for policy in Policy::ALL {
                let mut runs = 0;
                let smallest =
                    min_capacity(&program, &config(policy), |done, _| runs = done).unwrap();
                let smallest = smallest.expect("some device is large enough");
                assert!(runs > 2, "{name}, {policy}");
                assert_eq!(smallest % CAPACITY_STEP, 0);
                assert!(
                    smallest >= program.floor_bytes(true) || program.waits(),
                    "{name}, {policy}: {smallest}"
                );
                let passes = |capacity| {
                    let limited = ReplayConfig { capacity: Some(capacity), ..config(policy) };
                    replay(&program, &limited).unwrap().oom.is_none()
                };
                assert!(passes(smallest), "{name}, {policy}: {smallest}");
                assert!(!passes(smallest - CAPACITY_STEP), "{name}, {policy}: {smallest}");
            }
        }
    }

    /// PyTorch ran out of memory at 21.5, 22.5 and 24 GiB and finished at 27 GiB; with expandable
    /// segments it finished at 21.5 GiB.
    #[test]
    fn a_run_that_ran_out_of_memory_needs_as_much_as_in_pytorch() {
        let program = program("llama_varlen.capped24");
        let smallest = |policy| {
            let found = min_capacity(&program, &config(policy), |_, _| {}).unwrap();
            found.expect("some device is large enough")
        };
        let segments = smallest(Policy::Segments);
        assert!((24 * GIB..27 * GIB).contains(&segments), "{segments}");
        assert!(smallest(Policy::Expandable) < 43 * GIB / 2);
    }

    #[test]
    fn the_floor_is_live_memory_plus_the_peaks_of_private_pools() {
        // One stream and no private pool: the peak of live bytes, rounded.
        let plain = program("vision_multires");
        let outcome = replay(&plain, &config(Policy::Segments)).unwrap();
        let floor = plain.floor_bytes(false);
        assert!(floor >= outcome.live_peak && floor < outcome.live_peak + 2 * MIB, "{floor}");
        // Nine graphs in one private pool: its peak counts in addition to other live bytes.
        let graphs = program("graphs_serving");
        let outcome = replay(&graphs, &config(Policy::Segments)).unwrap();
        let floor = graphs.floor_bytes(false);
        assert_eq!((outcome.live_peak, floor), (4_442_463_248, 4_589_395_968));
        // A request that PyTorch refused counts only if it must be served.
        let capped = program("llama_varlen.capped24");
        assert!(capped.floor_bytes(true) > capped.floor_bytes(false));
    }

    #[test]
    fn peaks_are_at_the_reported_events() {
        #[derive(Default)]
        struct Peaks {
            live: (u64, u64),
            reserved: (u64, u64),
            moments: u64,
        }
        impl cushion_trace::Watch for Peaks {
            fn moment(&mut self, event: u64, live: u64, reserved: u64) {
                self.moments += 1;
                if live > self.live.1 {
                    self.live = (event, live);
                }
                if reserved > self.reserved.1 {
                    self.reserved = (event, reserved);
                }
            }
        }
        let program = program("stream_offload");
        let mut peaks = Peaks::default();
        let outcome = replay_watched(&program, &config(Policy::Segments), &mut peaks).unwrap();
        assert_eq!(peaks.live, (outcome.live_peak_event, outcome.live_peak));
        assert_eq!(peaks.reserved, (outcome.reserved_peak_event, outcome.reserved_peak));
        assert!(peaks.moments >= program.allocs);
        let state =
            cushion_trace::state_at(&program, &config(Policy::Segments), peaks.reserved.0).unwrap();
        assert_eq!(state.snapshot.reserved, outcome.reserved_peak);
        for segment in &state.snapshot.segments {
            for block in segment.blocks.iter().filter(|b| b.use_ == cushion_core::BlockUse::Live) {
                let event =
                    state.allocated_by[&block.address].expect("the trace begins with the run");
                assert!(event <= peaks.reserved.0);
            }
        }
    }
}
