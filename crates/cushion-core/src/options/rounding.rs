//! Rounding of request sizes, as PyTorch rounds them and as the options ask for.
//!
//! These are pure functions with checked arithmetic. Every size that the engine stores is a
//! multiple of [`MIN_BLOCK`]. A request that cannot be rounded without overflow is refused here,
//! before any state has changed.

use crate::base::size::{
    MIN_BLOCK, OWN_SEGMENT, SEGMENT_ROUNDING, SMALL_SEGMENT, is_small, round_up,
};
use crate::options::Options;

/// Returns the size of the block that serves a request of `requested` bytes; `None` on overflow.
#[must_use]
pub fn block_size(requested: u64, options: &Options) -> Option<u64> {
    if requested < MIN_BLOCK {
        return Some(MIN_BLOCK);
    }
    let divisions = options.divisions_for(requested);
    if divisions > 1 && requested > MIN_BLOCK.checked_mul(divisions)? {
        round_to_division(requested, divisions)
    } else {
        round_up(requested, MIN_BLOCK)
    }
}

/// Rounds up to the next of `divisions` equal steps between two powers of two.
fn round_to_division(size: u64, divisions: u64) -> Option<u64> {
    if size.is_power_of_two() {
        return Some(size);
    }
    let floor = 1_u64 << size.ilog2();
    let step = floor >> divisions.ilog2();
    if step == 0 { floor.checked_mul(2) } else { round_up(size, step) }
}

/// Returns the size of the segment that a miss asks the device for; `None` on overflow.
#[must_use]
pub fn segment_size(block_size: u64, options: &Options) -> Option<u64> {
    if is_small(block_size) {
        Some(SMALL_SEGMENT)
    } else if block_size < OWN_SEGMENT {
        Some(options.large_segment_size)
    } else {
        round_up(block_size, SEGMENT_ROUNDING)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::size::MIB;

    #[test]
    fn blocks_round_to_512() {
        let options = Options::default();
        for (requested, block) in
            [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
        {
            assert_eq!(block_size(requested, &options), Some(block), "request {requested}");
        }
        assert_eq!(block_size(u64::MAX, &options), None);
        assert_eq!(block_size(u64::MAX - 511, &options), Some(u64::MAX - 511));
    }

    #[test]
    fn divisions_step_between_powers_of_two() {
        let options = Options { roundup_power2_divisions: [4; 16], ..Options::default() };
        // 1200 is not above 512 * 4, so it is rounded to 512.
        assert_eq!(block_size(1200, &options), Some(1536));
        assert_eq!(block_size(5 * MIB, &options), Some(5 * MIB));
        assert_eq!(block_size(5 * MIB + 1, &options), Some(6 * MIB));
        assert_eq!(block_size(7 * MIB + 1, &options), Some(8 * MIB));
        assert_eq!(block_size(u64::MAX, &options), None);
    }

    #[test]
    fn segments_follow_the_three_classes() {
        let options = Options::default();
        for (block, segment) in [
            (512, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 512, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (10 * MIB + 512, 12 * MIB),
        ] {
            assert_eq!(segment_size(block, &options), Some(segment), "block {block}");
        }
        assert_eq!(segment_size(u64::MAX - 511, &options), None);
    }
}
