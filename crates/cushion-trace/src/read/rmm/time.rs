//! Times in the formats of RMM's versions.

pub(super) const DAY_US: u64 = 24 * 60 * 60 * 1_000_000;

/// A time in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Time {
    /// Microseconds since midnight.
    OfDay(u64),
    /// Microseconds since 1970.
    Moment(u64),
}

/// Parses `HH:MM:SS` with an optional fraction after `:` or `.` and an optional date before, or
/// seconds since 1970.
pub(super) fn time(text: &[u8]) -> Option<Time> {
    if !text.contains(&b':') {
        let (whole, part) = split_once(text, b'.').unwrap_or((text, b"0"));
        let us = decimal(whole)?.checked_mul(1_000_000)?.checked_add(fraction(part)?)?;
        return Some(Time::Moment(us));
    }
    if let [y0, y1, y2, y3, b'-', m0, m1, b'-', d0, d1, b' ' | b'T', clock @ ..] = text {
        let year = decimal(&[*y0, *y1, *y2, *y3])?;
        let (month, day) = (decimal(&[*m0, *m1])?, decimal(&[*d0, *d1])?);
        let days = days_since_1970(year, month, day)?;
        return Some(Time::Moment(days * DAY_US + time_of_day(clock)?));
    }
    time_of_day(text).map(Time::OfDay)
}

fn time_of_day(text: &[u8]) -> Option<u64> {
    let (hours, rest) = split_once(text, b':')?;
    let (minutes, rest) = split_once(rest, b':')?;
    let parts = split_once(rest, b':').or_else(|| split_once(rest, b'.'));
    let (seconds, part) = parts.unwrap_or((rest, b"0"));
    let (hours, minutes, seconds) = (decimal(hours)?, decimal(minutes)?, decimal(seconds)?);
    // 60 is a leap second.
    if hours > 23 || minutes > 59 || seconds > 60 {
        return None;
    }
    Some(((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + fraction(part)?)
}

/// Parses the digits after the point as microseconds.
fn fraction(digits: &[u8]) -> Option<u64> {
    decimal(digits.get(..18).unwrap_or(digits))?;
    let mut micros = *b"000000";
    let len = digits.len().min(micros.len());
    micros[..len].copy_from_slice(&digits[..len]);
    decimal(&micros)
}

fn split_once(text: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let place = text.iter().position(|&byte| byte == at)?;
    Some((&text[..place], &text[place + 1..]))
}

/// Returns the days from 1970-01-01 to a day of the Gregorian calendar.
fn days_since_1970(year: u64, month: u64, day: u64) -> Option<u64> {
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Years start in March here, which makes the leap day the last day of a year.
    let (year, month) =
        if month > 2 { (year, month - 3) } else { (year.checked_sub(1)?, month + 9) };
    let leap_days = year / 4 - year / 100 + year / 400;
    let before_month = (153 * month + 2) / 5;
    (365 * year + leap_days + before_month + day).checked_sub(719_469)
}

/// Parses decimal digits without a sign.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    if digits { str::from_utf8(text).ok()?.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_every_version_are_read() {
        let noon = 12 * 3600 * 1_000_000;
        assert_eq!(time(b"12:00:00:000007"), Some(Time::OfDay(noon + 7)));
        assert_eq!(time(b"12:00:00.5"), Some(Time::OfDay(noon + 500_000)));
        assert_eq!(time(b"12:00:00"), Some(Time::OfDay(noon)));
        assert_eq!(time(b"1634567890.123456"), Some(Time::Moment(1_634_567_890_123_456)));
        assert_eq!(time(b"1634567890.123456789"), Some(Time::Moment(1_634_567_890_123_456)));
        assert_eq!(time(b"1970-01-02 12:00:00.25"), Some(Time::Moment(DAY_US + noon + 250_000)));
        // The output of `date -d 2024-02-29T00:00:00Z +%s`.
        assert_eq!(time(b"2024-02-29T00:00:00"), Some(Time::Moment(1_709_164_800_000_000)));
        for odd in ["", "12", "x", "12:00", "24:00:00", "12:60:00", "12:00:00:", "1:2:3:4:5", "-1"]
        {
            let odd_time = time(odd.as_bytes());
            assert!(odd_time.is_none() || odd == "12", "{odd}: {odd_time:?}");
        }
    }
}
