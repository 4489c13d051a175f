//! Compares replays with PyTorch's recorded behaviour: every address and every figure.

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use cushion_core::size::GIB;
    use cushion_core::{Ladder, Policy};
    use cushion_trace::{Limits, Outcome, Program, ReplayConfig, open, replay};

    fn program(name: &str) -> Program {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces");
        let path = PathBuf::from(folder).join(format!("{name}.pickle.gz"));
        let snapshot = open(&path, &Limits::default()).unwrap();
        Program::of(&snapshot, 0)
    }

    fn run(program: &Program, policy: Policy, capacity: Option<u64>) -> Outcome {
        let config = ReplayConfig { policy, ladder: Ladder::Torch, capacity, options: None };
        replay(program, &config).unwrap()
    }

    /// Real workloads, with the allocations, peak live and peak reserved bytes that PyTorch
    /// reported.
    #[test]
    fn real_workloads_follow_pytorch_to_the_byte() {
        let segments = Policy::Segments;
        let expandable = Policy::Expandable;
        for (name, policy, allocs, live, reserved) in [
            ("vision_multires", segments, 23_775, 12_955_097_104, 21_678_260_224),
            ("stream_offload", segments, 3_577, 10_574_888_960, 12_968_787_968),
            ("graphs_serving", segments, 3_607, 4_442_463_248, 7_262_437_376),
            ("vision_multires.expandable", expandable, 16_041, 11_977_906_192, 12_100_567_040),
            ("stream_offload.expandable", expandable, 2_997, 10_574_888_960, 10_737_418_240),
        ] {
            let program = program(name);
            assert_eq!(program.policy, policy, "{name}");
            let outcome = run(&program, policy, None);
            assert_eq!(outcome.difference, None, "{name}");
            assert_eq!(outcome.same_address, Some(allocs), "{name}");
            assert_eq!(outcome.allocs, allocs, "{name}");
            assert_eq!(outcome.live_peak, live, "{name}");
            assert_eq!(outcome.reserved_peak, reserved, "{name}");
            assert_eq!(outcome.oom, None, "{name}");
        }
    }

    #[test]
    fn a_limited_run_runs_out_of_memory_where_pytorch_did() {
        let program = program("llama_varlen.capped24");
        let outcome = run(&program, Policy::Segments, Some(24 * GIB));
        assert_eq!(outcome.difference, None);
        assert_eq!(outcome.same_address, Some(93_299));
        assert_eq!(outcome.reserved_peak, 24_438_112_256);
        let refusal = outcome.oom.expect("PyTorch ran out of memory");
        assert!(refusal.recorded);
        assert_eq!(refusal.event, 278_444);

        // With expandable segments the program fits the same limit, as in PyTorch.
        assert_eq!(run(&program, Policy::Expandable, Some(24 * GIB)).oom, None);
    }

    #[test]
    fn another_capacity_gives_a_difference() {
        let program = program("vision_multires");
        let outcome = run(&program, Policy::Segments, Some(13 * GIB));
        let difference = outcome.difference.expect("a difference from PyTorch");
        assert!(difference.pytorch.is_some());
        assert!(outcome.same_address.expect("the same policy") < program.allocs);
    }

    #[test]
    fn another_policy_is_not_compared() {
        let outcome = run(&program("stream_offload"), Policy::Expandable, None);
        assert_eq!(outcome.same_address, None);
        assert_eq!(outcome.difference, None);
    }

    /// Random programs under every option, recorded by `tests/traces/record.py`. Compares addresses
    /// and every key of `torch.cuda.memory_stats()` at the end.
    #[test]
    fn corner_cases_match_pytorch_in_every_figure() {
        let lines = include_str!("../../../tests/traces/corners/stats.jsonl");
        let mut wrong = Vec::new();
        for line in lines.lines() {
            let recorded: serde_json::Value = serde_json::from_str(line).unwrap();
            let name = recorded["name"].as_str().unwrap();
            let program = program(&format!("corners/{name}"));
            let outcome = run(&program, program.policy, recorded["limit"].as_u64());
            assert_eq!(outcome.difference, None, "{name}");
            assert_eq!(outcome.same_address, Some(program.allocs), "{name}");
            let stats = recorded["stats"].as_object().unwrap();
            let peak = |key: &str| stats[key].as_u64();
            assert_eq!(Some(outcome.reserved_peak), peak("reserved_bytes.all.peak"), "{name}");
            assert_eq!(Some(outcome.live_peak), peak("requested_bytes.all.peak"), "{name}");
            assert_eq!(Some(outcome.retries), stats["num_alloc_retries"].as_u64(), "{name}");
            if ["toggle", "graphs", "pools"].iter().any(|inferred| name.starts_with(inferred)) {
                // The policy and the private pools are inferred from addresses. The moment of a
                // switch or of a release is not in the trace, and some figures depend on it.
                continue;
            }
            for (key, ours) in outcome.stats.flat() {
                if key == "num_sync_all_streams" {
                    // An `empty_cache` that releases nothing leaves no event.
                    continue;
                }
                let Some(pytorch) = stats.get(&key).and_then(serde_json::Value::as_i64) else {
                    continue;
                };
                if pytorch != ours {
                    wrong.push(format!("{name}: {key}: PyTorch {pytorch}, ours {ours}"));
                }
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}
