//! Parsing of sizes with units.

use super::size::{GIB, KIB, MIB};

/// Parses a size: `24GiB`, `1.5 GiB`, `512MiB`, `24G` (binary), `24GB` (decimal) or a number of
/// bytes. Refuses 0 and sizes above 1 PiB.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let unit = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => KIB,
        "m" | "mib" => MIB,
        "g" | "gib" => GIB,
        "t" | "tib" => 1024 * GIB,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("{text:?} is no size: write 24GiB, 512MiB or a number of bytes")),
    };
    let bytes = if let Ok(whole) = number.parse::<u64>() {
        whole.checked_mul(unit)
    } else {
        let value: f64 = number.parse().map_err(|_| {
            format!("{text:?} is no size: write 24GiB, 512MiB or a number of bytes")
        })?;
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a positive decimal; casts to integers saturate"
        )]
        let bytes = (value * unit as f64) as u64;
        Some(bytes)
    };
    match bytes {
        Some(0) => Err("0 is no size: write 24GiB, 512MiB or a number of bytes".to_owned()),
        Some(bytes) if bytes <= 1 << 50 => Ok(bytes),
        _ => Err(format!("{text:?} is more than any device has (1 PiB at most)")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_and_without_units_are_parsed() {
        assert_eq!(parse_bytes("24GiB"), Ok(24 * GIB));
        assert_eq!(parse_bytes("24 gib"), Ok(24 * GIB));
        assert_eq!(parse_bytes("24G"), Ok(24 * GIB));
        assert_eq!(parse_bytes("21.5GiB"), Ok(43 * GIB / 2));
        assert_eq!(parse_bytes("24GB"), Ok(24_000_000_000));
        assert_eq!(parse_bytes("1048576"), Ok(MIB));
        for bad in ["", "GiB", "24XiB", "-1", "1.2.3G", "0", "99999999999TiB", "nan"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }
}
