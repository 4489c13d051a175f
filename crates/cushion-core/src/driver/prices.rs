//! The prices of driver calls, as measured on an NVIDIA H200 (driver 580.159, CUDA 13.0).
//!
//! The price of a mapping call is per handle, not per call, and hardly depends on the size. A call
//! over a range of pages therefore costs the sum over its pages. Between the measured sizes the
//! price is interpolated; above them it grows at the rate of the last interval. A page in host
//! memory was measured only at 256 MiB (78 ms) and is priced by the byte. Calls that were not
//! measured (reserving addresses, waiting) are counted, but have no price.

use super::Call;
use crate::base::size::{GIB, MIB};

/// The sizes at which the size-dependent calls were measured.
const SIZES: [u64; 4] = [2 * MIB, 20 * MIB, 200 * MIB, 2 * GIB];

/// A price in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priced {
    /// The same at any size.
    Flat(u64),
    /// One price for each measured size.
    BySize([u64; 4]),
}

impl Priced {
    /// Returns the price of `call`.
    #[must_use]
    pub fn of(call: Call) -> Self {
        match call {
            Call::Alloc => Self::BySize([51_000, 55_000, 73_000, 157_000]),
            Call::Free => Self::BySize([41_000, 60_000, 167_000, 1_367_000]),
            Call::Create => Self::BySize([11_000, 11_000, 14_000, 42_000]),
            Call::CreateHost => Self::BySize([609_000, 6_094_000, 60_938_000, 624_000_000]),
            Call::Map => Self::BySize([900, 900, 1_000, 1_000]),
            Call::SetAccess => Self::BySize([31_000, 29_000, 35_000, 112_000]),
            Call::Unmap => Self::BySize([19_000, 18_000, 21_000, 39_000]),
            Call::Release => Self::BySize([13_000, 29_000, 125_000, 1_371_000]),
            Call::EventCreate => Self::Flat(240),
            Call::EventRecord => Self::Flat(300),
            Call::EventQuery => Self::Flat(310),
            Call::MemoryInfo => Self::Flat(6_200),
            Call::Capture => Self::Flat(70),
            Call::Reserve
            | Call::Unreserve
            | Call::EventDestroy
            | Call::EventSynchronize
            | Call::StreamSynchronize
            | Call::Dependencies => Self::Flat(0),
        }
    }
}

/// Returns the price in nanoseconds of `call` on one allocation or page of `bytes` bytes.
#[must_use]
pub fn price(call: Call, bytes: u64) -> u64 {
    let at = match Priced::of(call) {
        Priced::Flat(nanos) => return nanos,
        Priced::BySize(at) => at,
    };
    if bytes <= SIZES[0] {
        return at[0];
    }
    let upper = SIZES.iter().position(|&size| bytes <= size).unwrap_or(SIZES.len() - 1);
    let (from, to) = (i128::from(SIZES[upper - 1]), i128::from(SIZES[upper]));
    let (low, high) = (i128::from(at[upper - 1]), i128::from(at[upper]));
    let nanos = low + (high - low) * (i128::from(bytes) - from) / (to - from);
    u64::try_from(nanos).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_prices_are_exact_and_others_are_interpolated() {
        assert_eq!(price(Call::Alloc, 2 * MIB), 51_000);
        assert_eq!(price(Call::Alloc, 512), 51_000);
        assert_eq!(price(Call::Alloc, 20 * MIB), 55_000);
        assert_eq!(price(Call::Alloc, 11 * MIB), 53_000);
        assert_eq!(price(Call::Free, 2 * GIB), 1_367_000);
        assert!(price(Call::Free, 4 * GIB) > 2_000_000);
        assert_eq!(price(Call::SetAccess, 11 * MIB), 30_000);
        assert_eq!(price(Call::CreateHost, 256 * MIB) / 1_000_000, 78);
        assert_eq!(price(Call::EventQuery, 0), 310);
        assert_eq!(price(Call::Reserve, GIB), 0);
    }
}
