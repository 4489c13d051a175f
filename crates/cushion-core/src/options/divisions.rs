//! The value of `roundup_power2_divisions`: one number of divisions per interval of sizes.

use super::Options;
use super::values::{power_of_two, whole};
use crate::base::size::MIB;

/// The number of intervals.
const INTERVALS: usize = 16;

/// The divisions of each interval: 0 (off) or a power of two.
pub(super) type Divisions = [u64; INTERVALS];

/// No rounding in any interval.
pub(super) const OFF: Divisions = [0; INTERVALS];

impl Options {
    /// Returns the divisions for a request of `size` bytes; 0 means that the request is not rounded
    /// to a division.
    ///
    /// Interval 0 holds all sizes below 2 MiB. Interval `i` holds the sizes from 2^i MiB up to, but
    /// not including, twice that. Interval 15 holds all sizes from 32 GiB.
    pub fn divisions_for(&self, size: u64) -> u64 {
        let log_mib = size.checked_ilog2().unwrap_or(0).saturating_sub(MIB.ilog2());
        self.roundup_power2_divisions[interval(log_mib)]
    }
}

/// Returns the index of the interval that begins at 2^`log_mib` MiB.
fn interval(log_mib: u32) -> usize {
    (log_mib as usize).min(INTERVALS - 1)
}

/// Reads one number for all intervals, or a list that changes the intervals of `before` it names.
///
/// As in PyTorch, the first interval named also sets the intervals below it, each later one sets
/// only itself, and `>` sets those above the last one named (above interval 0 if none is named
/// before).
pub(super) fn read(before: &Divisions, text: &str) -> Result<Divisions, String> {
    let Some(list) = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) else {
        return Ok([power_of_two(text)?; INTERVALS]);
    };

    let mut divisions = *before;
    let mut entries: Vec<_> = list.split(',').collect();
    // The text after a trailing comma, and an empty list, are not entries.
    if entries.last().is_some_and(|entry| entry.is_empty()) {
        entries.pop();
    }
    let mut last = None;
    for entry in entries {
        let (name, count) = entry
            .split_once(':')
            .ok_or_else(|| format!("`{entry}` has no `:` between interval and divisions"))?;
        let count = if whole(count)? == 0 { 0 } else { power_of_two(count)? };
        if name == ">" {
            divisions[last.unwrap_or(0) + 1..].fill(count);
        } else {
            let at = interval(power_of_two(name)?.ilog2());
            let from = if last.is_none() { 0 } else { at };
            divisions[from..=at].fill(count);
            last = Some(at);
        }
    }
    Ok(divisions)
}

/// Returns the shortest text that [`read`] turns into these divisions, or `off`.
pub(super) fn text(divisions: &Divisions) -> String {
    let (first, last) = (divisions[0], divisions[INTERVALS - 1]);
    // The intervals below `head` equal the first one; those from `tail` on equal the last one.
    let Some(head) = divisions.iter().position(|count| *count != first) else {
        return if first == 0 { "off".to_owned() } else { first.to_string() };
    };
    let tail = divisions.iter().rposition(|count| *count != last).map_or(0, |at| at + 1);

    let mut entries = vec![format!("{}:{first}", 1_u64 << (head - 1))];
    for (at, count) in divisions.iter().enumerate().take(tail).skip(head) {
        // An interval that is not named is 0, but `>` needs the interval before it named.
        if *count != 0 || at + 1 == tail {
            entries.push(format!("{}:{count}", 1_u64 << at));
        }
    }
    if last != 0 {
        entries.push(format!(">:{last}"));
    }
    format!("[{}]", entries.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::size::GIB;
    use crate::options::tests::{parse, refused};

    fn slots(value: &str) -> Divisions {
        parse(&format!("roundup_power2_divisions:{value}")).roundup_power2_divisions
    }

    #[test]
    fn one_division_fills_all_intervals() {
        assert_eq!(slots("1"), [1; 16]);
        assert_eq!(slots("4"), [4; 16]);
        refused("roundup_power2_divisions", &["0", "3", "-4", "4.0", "off", "x"]);
    }

    #[test]
    fn a_list_fills_below_its_first_and_above_its_last() {
        let full = [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8];
        assert_eq!(slots("[256:1,512:2,1024:4,>:8]"), full);
        // Without `>` the rest stays off. Intervals between two names stay off too.
        assert_eq!(slots("[4:2,32:8]"), [2, 2, 2, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        // Only the first name sets the intervals below it, even if a later name is lower.
        assert_eq!(slots("[8:2,2:4]"), [2, 4, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        // `>` begins after the last name in the list.
        assert_eq!(slots("[8:2,2:4,>:1]"), [2, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
        // Names are clamped to the last interval, and then `>` sets nothing.
        assert_eq!(slots("[65536:2,>:8]"), [2; 16]);
        assert_eq!(slots("[32768:2,9223372036854775808:4]")[14..], [2, 4]);
        // `>` alone does not set the first interval, and does not count as the first name.
        assert_eq!(slots("[>:8]"), [0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]);
        assert_eq!(slots("[>:8,4:2]"), [2, 2, 2, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]);
        // Zero turns an interval off.
        assert_eq!(slots("[2:4,4:0,>:8]")[..4], [4, 4, 0, 8]);
        assert_eq!(slots("[]"), [0; 16]);
        assert_eq!(slots("[1:4,]")[..2], [4, 0]);
    }

    #[test]
    fn bad_lists_are_refused() {
        refused(
            "roundup_power2_divisions",
            &[
                "[256]",
                "[256:]",
                "[:1]",
                "[:]",
                "[256:3]",
                "[300:1]",
                "[0:1]",
                "[256:1,,512:2]",
                "[,]",
                "[,256:1]",
                "[256:1,,]",
                "[256:-1]",
                "[<:1]",
                "[>:3]",
                "[>]",
                "[256:1:2]",
                "[256:+1]",
                "[x:1]",
            ],
        );
    }

    #[test]
    fn divisions_by_size() {
        let mut options = Options::default();
        for (at, slot) in options.roundup_power2_divisions.iter_mut().enumerate() {
            *slot = 1 << at;
        }
        let cases = [
            (0, 0),
            (1, 0),
            (512, 0),
            (MIB - 1, 0),
            (MIB, 0),
            (2 * MIB - 1, 0),
            (2 * MIB, 1),
            (3 * MIB, 1),
            (4 * MIB, 2),
            (20 * MIB, 4),
            (255 * MIB, 7),
            (256 * MIB, 8),
            (512 * MIB - 1, 8),
            (512 * MIB, 9),
            (GIB, 10),
            (16 * GIB, 14),
            (32 * GIB - 1, 14),
            (32 * GIB, 15),
            (64 * GIB, 15),
            (1 << 50, 15),
            (u64::MAX, 15),
        ];
        for (size, at) in cases {
            assert_eq!(options.divisions_for(size), 1 << at, "{size}");
        }
        assert_eq!(Options::default().divisions_for(GIB), 0);
        let options = parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]");
        let found = [100, 300, 600, 1500, 3000].map(|mib| options.divisions_for(mib * MIB));
        assert_eq!(found, [1, 1, 2, 4, 8]);
    }
}
