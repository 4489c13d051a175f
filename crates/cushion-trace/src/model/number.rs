//! Numbers of variable length: seven bits to a byte, low bits first. The top bit of a byte says
//! that another byte follows.

/// Appends a number.
#[inline]
pub(crate) fn put_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
}

/// Maps small integers of either sign to small numbers.
#[inline]
pub(crate) fn zigzag(int: i64) -> u64 {
    (int << 1 ^ int >> 63).cast_unsigned()
}

/// Reverses [`zigzag`].
#[inline]
pub(crate) fn unzigzag(number: u64) -> i64 {
    (number >> 1).cast_signed() ^ -(number & 1).cast_signed()
}
