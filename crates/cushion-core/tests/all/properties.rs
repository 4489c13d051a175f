//! Random programs on every policy and ladder. Every step is followed by a check of the invariants.
//!
//! `CUSHION_PROGRAMS=200000 CUSHION_SEED=7 cargo test -p cushion-core --release --test all --
//! properties --ignored --nocapture` runs that many programs from that seed.

#[cfg(test)]
mod tests {
    use cushion_core::testing::{Action, Program, Setup, Summary, run_programs};
    use cushion_core::{Ladder, Policy};
    use proptest::prelude::*;

    /// Number of programs for each policy and ladder.
    const PROGRAMS: u64 = 4000;

    fn run(policy: Policy, ladder: Ladder) {
        for number in 0..PROGRAMS {
            let mut program = Program::random(number);
            program.setup = Setup { policy, ladder, ..program.setup };
            if let Some(failure) = program.failure() {
                let smallest = program.shrunk();
                let why = smallest.failure().unwrap_or_default();
                panic!("program {number}: {failure}\nshrunk: {why}\n{smallest:#?}");
            }
        }
    }

    #[test]
    fn segments_torch() {
        run(Policy::Segments, Ladder::Torch);
    }

    #[test]
    fn segments_graceful() {
        run(Policy::Segments, Ladder::Graceful);
    }

    #[test]
    fn expandable_torch() {
        run(Policy::Expandable, Ladder::Torch);
    }

    #[test]
    fn expandable_graceful() {
        run(Policy::Expandable, Ladder::Graceful);
    }

    #[test]
    fn paged_torch() {
        run(Policy::Paged, Ladder::Torch);
    }

    #[test]
    fn paged_graceful() {
        run(Policy::Paged, Ladder::Graceful);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn random_bytes_are_programs_that_run(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            Program::read(&bytes).run();
        }
    }

    #[expect(clippy::disallowed_methods, reason = "the environment sets the number of programs")]
    fn number(name: &str, default: u64) -> u64 {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    }

    #[test]
    #[ignore = "runs for minutes"]
    fn many_programs() {
        let (seed, programs) = (number("CUSHION_SEED", 1), number("CUSHION_PROGRAMS", 100_000));
        let Summary { programs, actions } = run_programs(seed, programs, |so_far| {
            if so_far.programs.is_multiple_of(20_000) {
                eprintln!("seed {seed}: {} programs, {} actions", so_far.programs, so_far.actions);
            }
        });
        eprintln!("seed {seed}: {programs} programs with {actions} actions, none failed");
    }

    #[test]
    fn random_programs_are_long_and_have_every_action() {
        let mut names = std::collections::BTreeSet::new();
        let mut actions = 0;
        for number in 0..PROGRAMS {
            let program = Program::random(number);
            actions += program.actions.len();
            let name = |action: &Action| {
                let text = format!("{action:?}");
                text.split([' ', '{']).next().unwrap_or_default().to_owned()
            };
            names.extend(program.actions.iter().map(name));
        }
        assert_eq!(names.len(), 46, "{names:?}");
        assert!(actions as u64 > 50 * PROGRAMS, "{actions} actions");
    }
}
