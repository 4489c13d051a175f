//! Units, the sizes that PyTorch rounds to, and the display of sizes.

/// One kibibyte.
pub const KIB: u64 = 1 << 10;
/// One mebibyte.
pub const MIB: u64 = 1 << 20;
/// One gibibyte.
pub const GIB: u64 = 1 << 30;

/// Every block size is a multiple of this.
pub const MIN_BLOCK: u64 = 512;
/// Requests up to this size are served from the small pool.
pub const SMALL_REQUEST: u64 = MIB;
/// The size of the segments (and pages) of the small pool.
pub const SMALL_SEGMENT: u64 = 2 * MIB;
/// A request of at least this size gets a segment of its own size.
pub const OWN_SEGMENT: u64 = 10 * MIB;
/// The size of such a segment is rounded up to a multiple of this.
pub const SEGMENT_ROUNDING: u64 = 2 * MIB;

/// Rounds `value` up to a multiple of `unit`; `None` on overflow.
#[must_use]
pub fn round_up(value: u64, unit: u64) -> Option<u64> {
    debug_assert!(unit > 0, "the unit is 0");
    value.checked_next_multiple_of(unit)
}

/// Whether a block of this size belongs to the small pool.
#[must_use]
pub fn is_small(block_size: u64) -> bool {
    block_size <= SMALL_REQUEST
}

/// Formats a size as PyTorch does: `1.50 GiB`, `20.00 MiB`, `512 bytes`.
#[must_use]
pub fn display(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
    let of = |unit: u64| bytes as f64 / unit as f64;
    if bytes <= KIB {
        format!("{bytes} bytes")
    } else if bytes <= MIB {
        format!("{:.2} KiB", of(KIB))
    } else if bytes <= GIB {
        format!("{:.2} MiB", of(MIB))
    } else {
        format!("{:.2} GiB", of(GIB))
    }
}
