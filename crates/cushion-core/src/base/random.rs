//! Pseudo-random numbers from a seed: the same on every machine.

/// A pseudo-random generator (`SplitMix64`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Random(pub u64);

impl Random {
    /// Returns the next number.
    #[expect(
        clippy::should_implement_trait,
        reason = "the generator is endless and not an iterator"
    )]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns the next number between 0 and 1.
    #[expect(clippy::cast_precision_loss, reason = "a fraction needs no more precision")]
    pub fn share(&mut self) -> f64 {
        self.next() as f64 / u64::MAX as f64
    }
}
