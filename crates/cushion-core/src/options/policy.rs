//! The policies, by name, and how conf strings select one.
//!
//! This file holds names only. The engine's `policy` module holds what each policy does.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Options;
use super::conf::Pair;

/// How memory is laid out and obtained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// PyTorch's classic allocator: plain segments, best fit, split and merge.
    Segments,
    /// PyTorch's expandable segments: one growing address range per stream and pool.
    Expandable,
    /// Cushion's own: each page keeps a home address, and stitches map scattered free pages side by
    /// side at second addresses.
    Paged,
}

impl Policy {
    /// Every policy.
    pub const ALL: [Self; 3] = [Self::Segments, Self::Expandable, Self::Paged];

    /// Returns the name of the policy.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Segments => "segments",
            Self::Expandable => "expandable",
            Self::Paged => "paged",
        }
    }

    /// Returns whether memory comes in pages, some of which may be mapped already, and not in whole
    /// segments.
    #[must_use]
    pub const fn uses_pages(self) -> bool {
        !matches!(self, Self::Segments)
    }

    /// Returns the policy that `options` select.
    #[must_use]
    pub fn of(options: &Options) -> Self {
        options.policy
    }

    /// Returns the policy with this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.name() == name)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// PyTorch's key that selects `expandable`.
pub(super) const EXPANDABLE: &str = "expandable_segments";
/// The key that selects `paged` or `segments`.
pub(super) const PAGED: &str = "paged";

/// Returns the policy that the pairs of one conf string select, or `None` if they name no policy.
/// `before` is the policy in force before the string.
///
/// The last pair of each key counts. `paged:True` comes before `expandable_segments:True`, which
/// comes before `paged:False`. `expandable_segments:False` only ends `expandable`: PyTorch users
/// write it to get the default, so it does not select `segments`.
pub(super) fn selected_policy(pairs: &[Pair], before: Policy) -> Option<Policy> {
    let last = |key| pairs.iter().rfind(|pair| pair.key == key).map(|pair| pair.value == "True");
    match (last(PAGED), last(EXPANDABLE)) {
        (Some(true), _) => Some(Policy::Paged),
        (_, Some(true)) => Some(Policy::Expandable),
        (Some(false), _) => Some(Policy::Segments),
        (None, Some(false)) if before == Policy::Expandable => Some(Options::DEFAULT.policy),
        (None, Some(false)) => Some(before),
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_found_by_its_name() {
        for policy in Policy::ALL {
            assert_eq!(Policy::named(policy.name()), Some(policy));
            assert_eq!(policy.to_string(), policy.name());
        }
        assert_eq!(Policy::named("pages"), None);
    }
}
