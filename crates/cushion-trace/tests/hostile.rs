//! Traces that no allocator could have made. A replay of them must not panic.

#[cfg(test)]
mod tests {
    use cushion_core::{Ladder, Policy};
    use cushion_trace::{
        Action, Block, BlockState, Event, Origin, Program, ReplayConfig, Segment, Settings,
        Snapshot, Stacks, min_capacity, replay, state_at,
    };
    use proptest::prelude::*;
    use std::panic::resume_unwind;

    /// Few addresses, so that events overlap: some realistic, some extreme.
    fn addresses() -> impl Strategy<Value = u64> {
        prop_oneof![
            8 => (0_u64..40).prop_map(|n| 0x7f00_0000_0000 + n * (1 << 20)),
            2 => (0_u64..8).prop_map(|n| 0x3_0200_0000 + n * (20 << 20)),
            1 => prop::sample::select(vec![
                0, 1, 511, 512, 1 << 47, 1 << 48, (1 << 48) + (2 << 20), 1 << 63,
                u64::MAX - 511, u64::MAX,
            ]),
        ]
    }

    fn sizes() -> impl Strategy<Value = u64> {
        prop_oneof![
            4 => 1_u64..(4 << 20),
            2 => (0_u64..8).prop_map(|n| n * (2 << 20)),
            2 => (0_u64..4).prop_map(|n| n * (20 << 20)),
            1 => prop::sample::select(vec![0, 1 << 40, 1 << 62, u64::MAX - 511, u64::MAX]),
        ]
    }

    /// A tebibyte is half a million pages to restore, so it is rare.
    fn segment_sizes() -> impl Strategy<Value = u64> {
        prop_oneof![
            60 => sizes().prop_filter("pages take time", |&size| size != 1 << 40),
            1 => Just(1_u64 << 40),
        ]
    }

    fn streams() -> impl Strategy<Value = u64> {
        prop_oneof![6 => 0_u64..3, 1 => prop::sample::select(vec![1 << 63, u64::MAX])]
    }

    fn events() -> impl Strategy<Value = Event> {
        let actions = prop::sample::select(vec![
            Action::Alloc,
            Action::Alloc,
            Action::Alloc,
            Action::FreeRequested,
            Action::FreeRequested,
            Action::FreeCompleted,
            Action::FreeCompleted,
            Action::SegmentAlloc,
            Action::SegmentFree,
            Action::SegmentMap,
            Action::SegmentUnmap,
            Action::Oom,
            Action::Snapshot,
            Action::Annotate,
            Action::Other,
        ]);
        let pools = prop::option::of((0_u64..2, 0_u64..3));
        (actions, addresses(), sizes(), streams(), pools).prop_map(
            |(action, addr, size, stream, pool)| Event {
                action,
                addr,
                // Unmapped memory counts as held before, so its size is limited.
                size: if action == Action::SegmentUnmap { size % (1 << 36) } else { size },
                stream,
                time_us: 0,
                pool,
                stack: None,
            },
        )
    }

    fn blocks() -> impl Strategy<Value = Vec<Block>> {
        let states = prop::sample::select(vec![
            BlockState::Allocated,
            BlockState::PendingFree,
            BlockState::Inactive,
        ]);
        let block = (addresses(), sizes(), sizes(), states).prop_map(
            |(address, size, requested_size, state)| Block {
                address,
                size,
                requested_size,
                state,
                stack: None,
            },
        );
        prop::collection::vec(block, 0..4)
    }

    fn segments() -> impl Strategy<Value = Segment> {
        let pools = (0_u64..2, 0_u64..2);
        (addresses(), segment_sizes(), streams(), pools, any::<bool>(), blocks()).prop_map(
            |(address, total_size, stream, pool, expandable, blocks)| Segment {
                stack: None,
                device: 0,
                address,
                total_size,
                stream,
                large: total_size > 2 << 20,
                pool,
                expandable,
                blocks,
            },
        )
    }

    fn settings() -> impl Strategy<Value = Settings> {
        let confs = prop::sample::select(vec![
            "",
            "expandable_segments:True",
            "large_segment_size_mb:21,expandable_segments:True",
            "max_split_size_mb:40,garbage_collection_threshold:0.5",
            "per_process_memory_fraction:0.1",
            "no such option",
        ]);
        confs.prop_map(|conf| Settings { conf: Some(conf.to_owned()), ..Settings::default() })
    }

    /// Replays a program under one policy, in every way.
    fn check(
        program: &Program,
        policy: Policy,
        capacity: Option<u64>,
    ) -> Result<(), TestCaseError> {
        for ladder in [Ladder::Torch, Ladder::Graceful] {
            let config = ReplayConfig { policy, ladder, capacity, options: None };
            let outcome = replay(program, &config);
            prop_assert!(outcome.is_ok(), "{:?}", outcome);
        }
        let ladder = Ladder::Torch;
        let config = ReplayConfig { policy, ladder, capacity, options: None };
        prop_assert!(state_at(program, &config, 50).is_ok());
        // This replays the program many times, so few cases do it.
        if capacity.is_some_and(|capacity| capacity % 32 == 0) {
            let smallest = min_capacity(program, &config, |_, _| {});
            prop_assert!(smallest.is_ok(), "{:?}", smallest);
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn any_events_can_be_replayed(
            events in prop::collection::vec(events(), 1..120),
            named in any::<bool>(),
            segments in prop::collection::vec(segments(), 0..4),
            settings in settings(),
            capacity in prop::option::of(1_u64..(1 << 30)),
        ) {
            let events: Vec<Event> = events
                .into_iter()
                .map(|event| Event { pool: event.pool.filter(|_| named), ..event })
                .collect();
            let devices = vec![events.into_iter().collect()];
            let (stacks, origin) = (Stacks::default(), Origin::Torch);
            let snapshot = Snapshot { segments, devices, settings, stacks, origin };
            let program = Program::of(&snapshot, 0);
            // Each policy on a thread of its own, because this test takes longest.
            std::thread::scope(|scope| {
                let runs = Policy::ALL.map(|policy| {
                    let program = &program;
                    scope.spawn(move || check(program, policy, capacity))
                });
                runs.into_iter().try_for_each(|run| run.join().unwrap_or_else(|panic| resume_unwind(panic)))
            })?;
            prop_assert!(program.floor_bytes(true) >= program.floor_bytes(false));
        }
    }
}
