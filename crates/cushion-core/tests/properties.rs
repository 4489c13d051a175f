//! Random programs, on every policy and ladder, with every invariant checked after each step.

#[cfg(test)]
mod tests {
    use cushion_core::testing::{Action, CAPACITY, World};
    use cushion_core::{Ladder, Policy};
    use proptest::prelude::*;

    fn sizes() -> impl Strategy<Value = u64> {
        prop_oneof![
            4 => 1_u64..4096,
            4 => 1_u64..(2 << 20),
            4 => (1_u64 << 20)..(24 << 20),
            2 => (10_u64 << 20)..(96 << 20),
            1 => prop::sample::select(vec![
                0, 1, 511, 512, 513, (1 << 20) - 1, 1 << 20, (1 << 20) + 1,
                (10 << 20) - 1, 10 << 20, 20 << 20, CAPACITY - 1, CAPACITY, CAPACITY + 1,
                u64::MAX / 2, u64::MAX - 512, u64::MAX,
            ]),
        ]
    }

    fn actions() -> impl Strategy<Value = Action> {
        let addresses = prop_oneof![any::<u64>(), (1_u64 << 48)..(1 << 48) + CAPACITY];
        prop_oneof![
            30 => (sizes(), any::<u8>()).prop_map(|(size, stream)| Action::Alloc { size, stream }),
            20 => any::<u16>().prop_map(|index| Action::Free { index }),
            8 => (any::<u16>(), any::<u8>())
                .prop_map(|(index, stream)| Action::UseOn { index, stream }),
            4 => any::<u8>().prop_map(|stream| Action::Finish { stream }),
            2 => Just(Action::FinishAll),
            2 => Just(Action::ProcessEvents),
            2 => Just(Action::EmptyCache),
            1 => any::<u8>().prop_map(|pool| Action::EmptyPool { pool }),
            2 => (any::<u8>(), prop::option::of(any::<u8>()))
                .prop_map(|(pool, stream)| Action::BeginPool { pool, stream }),
            3 => any::<u8>().prop_map(|pool| Action::EndPool { pool }),
            2 => any::<u8>().prop_map(|pool| Action::ReleasePool { pool }),
            1 => (any::<u8>(), any::<bool>())
                .prop_map(|(pool, allow)| Action::UseOnOom { pool, allow }),
            1 => any::<u8>().prop_map(|pool| Action::NoSplit { pool }),
            1 => (any::<u8>(), any::<u8>())
                .prop_map(|(pool, stream)| Action::BeginCapture { pool, stream }),
            2 => any::<u8>().prop_map(|stream| Action::JoinCapture { stream }),
            2 => any::<u8>().prop_map(|stream| Action::FollowStream { stream }),
            2 => Just(Action::EndCapture),
            2 => (any::<u8>(), any::<u64>())
                .prop_map(|(tenant, bytes)| Action::SetTenant { tenant, bytes }),
            1 => prop::option::of(any::<u64>()).prop_map(|bytes| Action::SetLimit { bytes }),
            1 => any::<u8>().prop_map(|conf| Action::Configure { conf }),
            2 => (any::<u8>(), any::<u8>(), any::<bool>()).prop_map(
                |(call, nth, out_of_memory)| Action::Fail { call, nth, out_of_memory }
            ),
            1 => addresses.clone().prop_map(|address| Action::FreeUnknown { address }),
            1 => addresses.prop_map(|address| Action::RecordUnknown { address }),
            1 => Just(Action::Snapshot),
            8 => Just(Action::Trim),
            1 => Just(Action::ResetStats),
            1 => any::<u8>().prop_map(|rules| Action::Inject { rules }),
            1 => (sizes(), any::<u8>())
                .prop_map(|(size, stream)| Action::Prefetch { size, stream }),
        ]
    }

    fn run(policy: Policy, ladder: Ladder, program: &[Action]) {
        let mut world = World::new(policy, ladder);
        for action in program {
            world.step(action);
        }
        world.finish();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn segments_torch(program in prop::collection::vec(actions(), 1..160)) {
            run(Policy::Segments, Ladder::Torch, &program);
        }

        #[test]
        fn segments_graceful(program in prop::collection::vec(actions(), 1..160)) {
            run(Policy::Segments, Ladder::Graceful, &program);
        }

        #[test]
        fn expandable_torch(program in prop::collection::vec(actions(), 1..160)) {
            run(Policy::Expandable, Ladder::Torch, &program);
        }

        #[test]
        fn expandable_graceful(program in prop::collection::vec(actions(), 1..160)) {
            run(Policy::Expandable, Ladder::Graceful, &program);
        }

        #[test]
        fn paged_torch(program in prop::collection::vec(actions(), 1..160)) {
            run(Policy::Paged, Ladder::Torch, &program);
        }

        #[test]
        fn paged_graceful(program in prop::collection::vec(actions(), 1..160)) {
            run(Policy::Paged, Ladder::Graceful, &program);
        }
    }
}
