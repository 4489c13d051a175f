//! Programs on real threads, on a checked driver: see `testing::stress`.
//!
//! `CUSHION_OPERATIONS=300000 CUSHION_SEED=7 cargo test -p cushion-core --release --test all --
//! threads --ignored --nocapture` runs longer.

#[cfg(test)]
mod tests {
    use cushion_core::Policy;
    use cushion_core::testing::{Stress, stress};

    fn run(policy: Policy) {
        for seed in 0..2 {
            let stressed = stress(Stress { seed, policy, operations: 1000 });
            assert!(stressed.served > 1000, "{stressed:?}");
            assert!(stressed.graphs > 0 && stressed.destroyed > 0, "{stressed:?}");
        }
    }

    #[test]
    fn segments() {
        run(Policy::Segments);
    }

    #[test]
    fn expandable() {
        run(Policy::Expandable);
    }

    #[test]
    fn paged() {
        run(Policy::Paged);
    }

    #[expect(clippy::disallowed_methods, reason = "the environment sets the number of operations")]
    fn number(name: &str, default: u64) -> u64 {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    }

    #[test]
    #[ignore = "runs for minutes"]
    fn long() {
        let seed = number("CUSHION_SEED", 1);
        let operations = number("CUSHION_OPERATIONS", 100_000);
        for policy in Policy::ALL {
            let stressed = stress(Stress { seed, policy, operations });
            eprintln!("{policy}, seed {seed}: {stressed:?}");
        }
    }
}
