//! Traces that begin in the middle of a run. PyTorch keeps the last events in a ring, so the trace
//! of a long run has the last events and the final segments.

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use cushion_core::size::GIB;
    use cushion_core::{Ladder, Policy};
    use cushion_trace::{
        Action, Limits, Outcome, Program, ReplayConfig, Snapshot, open, replay, state_at,
    };

    fn snapshot(name: &str) -> Snapshot {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces");
        let path = PathBuf::from(folder).join(format!("{name}.pickle.gz"));
        open(&path, &Limits::default()).unwrap()
    }

    /// Returns the trace without its first events.
    fn without_first(snapshot: &Snapshot, events: usize) -> Snapshot {
        let mut last = snapshot.clone();
        last.devices[0] = snapshot.devices[0].iter_from(events).collect();
        last
    }

    fn config(policy: Policy, capacity: Option<u64>) -> ReplayConfig {
        ReplayConfig { policy, ladder: Ladder::Torch, capacity, options: None }
    }

    fn follow(program: &Program, capacity: Option<u64>) -> Outcome {
        replay(program, &config(program.policy, capacity)).unwrap()
    }

    #[test]
    fn a_trace_from_the_middle_of_a_run_follows_pytorchs_addresses() {
        let program = Program::of(&snapshot("vision_multires.midrun"), 0);
        assert!(program.begins_in_the_middle());
        let outcome = follow(&program, None);
        assert_eq!(outcome.difference, None);
        assert_eq!((outcome.same_address, program.allocs), (Some(6_243), 6_243));
        // The figures that PyTorch reported for the whole run. Its peaks are in the recorded
        // events.
        assert_eq!(outcome.live_peak, 10_044_266_512);
        assert_eq!(outcome.reserved_peak, 14_141_095_936);
    }

    #[test]
    fn real_workloads_follow_pytorch_from_any_cut() {
        for (name, capacity) in [
            ("vision_multires", None),
            ("vision_multires.expandable", None),
            ("stream_offload", None),
            ("stream_offload.expandable", None),
            ("graphs_serving", None),
            ("llama_varlen.capped24", Some(24 * GIB)),
        ] {
            let whole = snapshot(name);
            let events = whole.devices[0].len();
            for cut in [1, events / 4, events / 2, events / 2 + 1, events * 9 / 10, events - 1] {
                let program = Program::of(&without_first(&whole, cut), 0);
                let outcome = follow(&program, capacity);
                assert_eq!(outcome.difference, None, "{name} from {cut}");
                assert_eq!(outcome.same_address, Some(program.allocs), "{name} from {cut}");
            }
        }
    }

    /// A replay from any cut ends in the state of the whole replay.
    #[test]
    fn a_cut_trace_ends_in_the_same_state() {
        for name in ["stream_offload", "stream_offload.expandable", "graphs_serving"] {
            let whole = snapshot(name);
            let events = whole.devices[0].len();
            let end = |snapshot: &Snapshot| {
                let program = Program::of(snapshot, 0);
                let state = state_at(&program, &config(program.policy, None), u64::MAX).unwrap();
                let blocks = state.snapshot.segments.into_iter().flat_map(|s| s.blocks);
                blocks.map(|b| (b.address, b.size, b.use_)).collect::<Vec<_>>()
            };
            let expected = end(&whole);
            for cut in [events / 3, events / 2, events * 4 / 5] {
                assert_eq!(end(&without_first(&whole, cut)), expected, "{name} from {cut}");
            }
        }
    }

    /// Random programs under every option. Differences remain where the file lacks information: the
    /// private pool of a segment that was released before the end, and the idle time of cached
    /// blocks.
    #[test]
    fn corner_cases_follow_pytorch_from_their_middle() {
        let lines = include_str!("../../../tests/traces/corners/stats.jsonl");
        let (mut same, mut all) = (0, 0);
        for line in lines.lines() {
            let recorded: serde_json::Value = serde_json::from_str(line).unwrap();
            let name = recorded["name"].as_str().unwrap();
            let whole = snapshot(&format!("corners/{name}"));
            let program = Program::of(&without_first(&whole, whole.devices[0].len() / 2), 0);
            let outcome = follow(&program, recorded["limit"].as_u64());
            let untold = ["garbage_max_split", "pools_expandable"].contains(&name);
            assert!(untold || outcome.difference.is_none(), "{name}: {:?}", outcome.difference);
            same += outcome.same_address.unwrap();
            all += program.allocs;
        }
        assert!(same * 100 >= all * 98, "{same} of {all}");
    }

    #[test]
    fn another_policy_starts_from_the_live_blocks() {
        let whole = snapshot("vision_multires");
        let half = without_first(&whole, whole.devices[0].len() / 2);
        let program = Program::of(&half, 0);
        let outcome = replay(&program, &config(Policy::Expandable, None)).unwrap();
        assert_eq!(outcome.oom, None);
        let from_the_start =
            replay(&Program::of(&whole, 0), &config(Policy::Expandable, None)).unwrap();
        assert_eq!(outcome.live_peak, from_the_start.live_peak);
        // Driver calls for the restored memory are not counted.
        assert!(outcome.driver.total() < from_the_start.driver.total());
    }

    #[test]
    fn a_device_too_small_for_the_beginning_is_reported() {
        let program = Program::of(&snapshot("vision_multires.midrun"), 0);
        for policy in Policy::ALL {
            let outcome = replay(&program, &config(policy, Some(100 << 20))).unwrap();
            let refusal = outcome.oom.expect("260 MiB are live at the beginning");
            assert!(refusal.at_beginning && !refusal.recorded, "{policy}: {refusal:?}");
            assert_eq!((refusal.event, refusal.live >> 20), (0, 260), "{policy}");
            assert_eq!(outcome.allocs, 0, "{policy}");
            assert_eq!(outcome.driver.total(), 0, "{policy}: rebuilding is not counted");
        }
    }

    #[test]
    fn blocks_without_segments_are_requested_one_by_one() {
        let whole = snapshot("stream_offload");
        let mut half = without_first(&whole, whole.devices[0].len() / 2);
        half.segments.clear();
        let program = Program::of(&half, 0);
        assert!(program.notes.iter().any(|note| note.contains("not known")), "{:?}", program.notes);
        let outcome = follow(&program, None);
        assert_eq!(outcome.oom, None);
        assert_eq!(outcome.allocs, program.allocs);
    }

    #[test]
    fn a_completed_free_without_a_request_is_a_free() {
        let mut whole = snapshot("stream_offload");
        let events = std::mem::take(&mut whole.devices[0]);
        whole.devices[0] =
            events.iter().filter(|event| event.action != Action::FreeRequested).collect();
        let outcome = follow(&Program::of(&whole, 0), None);
        assert_eq!(outcome.live_peak, 10_574_888_960);
    }
}
