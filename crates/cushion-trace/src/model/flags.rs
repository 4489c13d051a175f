//! Bits that packed events in memory (`pack`) and the columns of Cushion's trace files have in
//! common. `docs/trace-format.md` fixes their values.
//!
//! The address bits differ between the two and are defined there.

/// Addresses are nearly always multiples of `1 << ALIGN_BITS`.
pub(crate) const ALIGN_BITS: u32 = 9;

// The first byte of an event: its action, and the fields that differ from the event before.
pub(crate) const ACTION: u8 = 0x0f;
pub(crate) const SIZE: u8 = 0x40;
/// A second byte follows.
pub(crate) const MORE: u8 = 0x80;

// The second byte: rarer differences.
pub(crate) const STREAM: u8 = 0x01;
pub(crate) const STACK: u8 = 0x02;
pub(crate) const POOL: u8 = 0x04;
pub(crate) const NO_POOL: u8 = 0x08;
