//! The out-of-memory error of a recorded run, as its trace tells it.

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use cushion_core::Ladder;
    use cushion_core::size::{GIB, MIB};
    use cushion_trace::{Limits, Program, ReplayConfig, Room, open, read, replay};

    fn program(name: &str) -> Program {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces");
        let path = PathBuf::from(folder).join(format!("{name}.pickle.gz"));
        Program::of(&open(&path, &Limits::default()).unwrap(), 0)
    }

    fn written(text: &str) -> Program {
        Program::of(&read(text.as_bytes(), &Limits::default()).unwrap(), 0)
    }

    /// The limit of each of these runs is known.
    #[test]
    fn the_limit_is_inside_the_reported_bounds() {
        for (name, limit, event, count) in [
            ("llama_varlen.capped24", 24 * GIB, 278_444, 1),
            ("corners/capped", GIB, 1186, 1),
            ("corners/max_split_expandable", GIB, 1190, 2),
            ("corners/pools_capped", GIB / 2, 682, 2),
            ("corners/toggle_capped", GIB, 1799, 1),
        ] {
            let program = program(name);
            let oom = program.oom.expect(name);
            assert_eq!((oom.event, oom.count), (event, count), "{name}");
            assert!(oom.device_free > Some(100 * GIB), "{name}");
            let Room::Limit { at_least, below } = oom.room else { panic!("{name}: {oom:?}") };
            assert!((at_least..below).contains(&limit), "{name}: {oom:?}");
            assert_eq!(oom.room.capacity(), Some(at_least));
            // A replay has the same refusal, with the real limit and with the reported one.
            let met = |capacity| {
                let config = ReplayConfig {
                    policy: program.policy,
                    ladder: Ladder::Torch,
                    capacity: Some(capacity),
                    options: None,
                };
                let refusal = replay(&program, &config).unwrap().oom.expect(name);
                assert!(refusal.recorded, "{name}");
                let figures = (refusal.event, refusal.requested, refusal.live);
                assert_eq!(figures, (oom.event, oom.requested, oom.live), "{name}");
                refusal.reserved
            };
            assert_eq!(Some(met(limit)), oom.reserved, "{name}");
            met(at_least);
        }
        assert_eq!(program("graphs_serving").oom, None);
    }

    /// Returns a snapshot with 30 MiB reserved, 20 MiB live, and a refused request of 64 MiB.
    fn refused(before: &str, free: u64) -> String {
        let (size, segment) = (20 * MIB, 30 * MIB);
        format!(
            r#"{{"segments": [], "device_traces": [[{before}
            {{"action": "segment_alloc", "addr": 8388608, "size": {segment}, "stream": 0}},
            {{"action": "alloc", "addr": 8388608, "size": {size}, "stream": 0}},
            {{"action": "oom", "device_free": {free}, "size": {}, "stream": 0}}]]}}"#,
            64 * MIB
        )
    }

    #[test]
    fn the_capacity_of_a_full_device_is_reserved_plus_free() {
        let oom = written(&refused("", 7 * MIB)).oom.unwrap();
        assert_eq!((oom.event, oom.requested, oom.count), (2, 64 * MIB, 1));
        assert_eq!((oom.live, oom.reserved), (20 * MIB, Some(30 * MIB)));
        assert_eq!((oom.device_free, oom.room), (Some(7 * MIB), Room::Device(37 * MIB)));
        let oom = written(&refused("", 64 * MIB)).oom.unwrap();
        assert_eq!(oom.room, Room::Limit { at_least: 30 * MIB, below: 94 * MIB });
    }

    #[test]
    fn figures_that_are_not_recorded_are_unknown() {
        // More bytes are live than the segments hold, so segments are missing.
        let stray = r#"{"action": "alloc", "addr": 1073741824, "size": 1073741824, "stream": 0},"#;
        let oom = written(&refused(stray, 7 * MIB)).oom.unwrap();
        assert_eq!((oom.live, oom.reserved), (GIB + 20 * MIB, None));
        assert_eq!((oom.room, oom.room.capacity()), (Room::Unknown, None));
        // A log of RMM has neither segments nor free bytes.
        let log = "Thread,Time,Action,Pointer,Size,Stream\n\
                   1,10:00:00.000001,allocate,0x7f0000000000,1048576,0\n\
                   1,10:00:00.000002,allocate failure,0x0,8589934592,0\n";
        let oom = written(log).oom.unwrap();
        assert_eq!((oom.event, oom.requested, oom.live), (1, 8 * GIB, MIB));
        assert_eq!((oom.reserved, oom.device_free, oom.room), (None, None, Room::Unknown));
    }
}
