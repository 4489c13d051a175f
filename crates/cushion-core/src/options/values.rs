//! Values of options: how each kind of value is read from text and written as text.

use std::ops::RangeBounds;

use crate::base::size::MIB;
use crate::options::ladder::{Rung, RungSet};

/// Reads a whole number: digits only, without the sign that `u64::from_str` accepts.
pub(super) fn whole(text: &str) -> Result<u64, String> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!("`{text}` is not a whole number"));
    }
    text.parse().map_err(|_| format!("`{text}` does not fit in 64 bits"))
}

pub(super) fn power_of_two(text: &str) -> Result<u64, String> {
    let number = whole(text)?;
    if number.is_power_of_two() {
        Ok(number)
    } else {
        Err(format!("`{text}` is not a power of two"))
    }
}

pub(super) fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "it is not a number".to_owned())
}

/// Writes a number so that [`number`] reads the same bits, with a `.0` if it is whole.
pub(super) fn number_text(value: f64) -> String {
    format!("{value:?}")
}

pub(super) fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "True" => Ok(true),
        "False" => Ok(false),
        _ => Err("it is neither `True` nor `False`".to_owned()),
    }
}

pub(super) fn boolean_text(value: bool) -> String {
    if value { "True" } else { "False" }.to_owned()
}

/// Returns `value` if `range` contains it. `words` are the range in words.
pub(super) fn in_range<T: PartialOrd>(
    value: T,
    range: impl RangeBounds<T>,
    words: &str,
) -> Result<T, String> {
    if range.contains(&value) { Ok(value) } else { Err(format!("it is not{words}")) }
}

/// Reads a whole number of MiB as bytes.
pub(super) fn mib(text: &str) -> Result<u64, String> {
    whole(text).map(bytes)
}

/// Converts MiB to bytes. Like PyTorch, it returns the largest whole number of MiB where the
/// product does not fit in 64 bits.
pub(super) fn bytes(mib: u64) -> u64 {
    mib.min(u64::MAX / MIB) * MIB
}

/// Writes bytes as MiB, rounded down.
pub(super) fn mib_text(bytes: u64) -> String {
    (bytes / MIB).to_string()
}

/// Reads MiB as bytes, and refuses less than the size of a large segment.
pub(super) fn mib_of_large_segment(text: &str, large_segment: u64) -> Result<u64, String> {
    let size = mib(text)?;
    if size < large_segment {
        let least = mib_text(large_segment);
        return Err(format!("it is below the size of a large segment, {least} MiB"));
    }
    Ok(size)
}

/// Reads names of rungs with `+` between them, or `none`.
pub(super) fn rungs(text: &str) -> Result<RungSet, String> {
    text.split('+').filter(|_| text != "none").map(rung).collect()
}

fn rung(name: &str) -> Result<Rung, String> {
    match Rung::named(name) {
        Some(rung) if rung.can_be_skipped() => Ok(rung),
        Some(rung) => Err(format!("`{rung}` cannot be skipped")),
        None => Err(format!("`{name}` is not the name of a rung")),
    }
}

pub(super) fn rungs_text(rungs: RungSet) -> String {
    let names: Vec<_> = rungs.iter().map(Rung::name).collect();
    if names.is_empty() { "none".to_owned() } else { names.join("+") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_values() {
        assert_eq!(whole("0"), Ok(0));
        assert_eq!(whole("18446744073709551615"), Ok(u64::MAX));
        for text in ["", "+1", "-1", "1.0", "0x10", "１", "18446744073709551616"] {
            assert!(whole(text).is_err(), "{text}");
        }
        assert_eq!(power_of_two("1"), Ok(1));
        assert_eq!(power_of_two("9223372036854775808"), Ok(1 << 63));
        assert!(power_of_two("0").is_err() && power_of_two("6").is_err());
        assert_eq!(number("1e-2"), Ok(0.01));
        assert!(number("").is_err() && number("0,1").is_err());
        assert_eq!((boolean("True"), boolean("False")), (Ok(true), Ok(false)));
        assert!(boolean("true").is_err());
    }
}
