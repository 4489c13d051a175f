//! The options of the allocator.
//!
//! `table.rs` declares each option once, in one row: field, key, unit, default, accepted values and
//! description. The struct [`Options`], the [`REGISTRY`], parsing, printing, the suggestions in
//! error messages and `docs/options.md` ([`markdown`]) come from these rows. [`NOT_OURS`] lists the
//! keys that PyTorch knows and Cushion does not act on.
//!
//! Keys and values are those of `PYTORCH_CUDA_ALLOC_CONF`, so a conf string that works in PyTorch
//! works here with the same meaning. This parser refuses mistakes that PyTorch ignores silently.
//! This crate does not read the environment: a binding reads it and passes the text.

mod conf;
mod divisions;
mod error;
mod foreign;
pub(crate) mod inject;
pub(crate) mod ladder;
mod page;
mod policy;
pub(crate) mod rounding;
mod row;
mod sources;
mod table;
mod values;

#[cfg(test)]
mod tests;

use std::fmt::Write as _;

pub use error::OptionsError;
pub use foreign::{NOT_OURS, NotOurs, NotOursSpec};
pub use page::markdown;
pub use policy::Policy;
pub use row::OptionSpec;
pub use sources::{
    Asked, SETTINGS, SettingSpec, Settings, SettingsError, TORCH_VARIABLES, torch_variable,
    without_key,
};
pub use table::{Options, REGISTRY};

use conf::Pair;
use error::{known_keys, unknown_key};
use foreign::is_not_ours;
use policy::{PAGED, selected_policy};

impl Default for Options {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl Options {
    /// Selects a policy.
    pub fn ask_for(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// Reads a conf string, starting from the defaults.
    pub fn parse(conf: &str) -> Result<Parsed, OptionsError> {
        let mut options = Self::default();
        let not_ours = options.apply(conf)?;
        Ok(Parsed { options, not_ours })
    }

    /// Applies a conf string to these options. Returns the pairs that Cushion does not act on.
    ///
    /// Options marked [`resets`](OptionSpec::resets) return to their default unless the string
    /// names them; the others keep their value. If a key occurs twice, both values are read in
    /// order and the last one wins; but a second list of `roundup_power2_divisions` changes only
    /// the intervals it sets. The two keys that select a policy are read together: `paged:True`
    /// comes before `expandable_segments:True`, which comes before `False` for either key. On error
    /// nothing changes.
    pub fn apply(&mut self, conf: &str) -> Result<Vec<NotOurs>, OptionsError> {
        let pairs = conf::pairs(conf)?;
        let is_known = |pair: &Pair| known_keys().any(|known| known == pair.key);
        if let Some(pair) = pairs.iter().find(|pair| !is_known(pair)) {
            return Err(unknown_key(pair));
        }

        let mut next = self.clone();
        // In the order of the table, not of the string: a row may depend on rows above it.
        for spec in REGISTRY {
            if spec.resets {
                (spec.reset)(&mut next);
            }
            for pair in pairs.iter().filter(|pair| pair.key == spec.key) {
                (spec.read)(&mut next, &pair.value).map_err(|why| OptionsError::BadValue {
                    key: pair.key.clone(),
                    value: pair.value.clone(),
                    why,
                    accepts: spec.accepts,
                })?;
            }
        }
        if let Some(policy) = selected_policy(&pairs, self.policy) {
            next.policy = policy;
        }
        *self = next;

        let not_ours = pairs.into_iter().filter(|pair| is_not_ours(&pair.key));
        Ok(not_ours.map(|Pair { key, value }| NotOurs { key, value }).collect())
    }

    /// Returns the conf string that parses to these options. It names the options that differ from
    /// the default, in the order of [`REGISTRY`].
    ///
    /// The string is exact for options that were parsed. If fields were set in code, sizes are
    /// rounded down to whole MiB, and a value out of range is written as it is.
    pub fn to_conf(&self) -> String {
        let mut conf = String::new();
        for spec in REGISTRY {
            let value = spec.show(self);
            // `expandable_segments:True` already implies `paged:False`.
            let is_implied = self.policy == Policy::Expandable && spec.key == PAGED;
            if value != spec.default() && !is_implied {
                let comma = if conf.is_empty() { "" } else { "," };
                // Writing to a string cannot fail.
                let _ = write!(conf, "{comma}{}:{value}", spec.key);
            }
        }
        conf
    }

    /// Returns the conf string for readers of PyTorch's snapshots, for whom a string without a
    /// policy means PyTorch's classic allocator: it names `paged` and does not name `segments`.
    pub fn to_torch_conf(&self) -> String {
        let conf = without_key(&self.to_conf(), PAGED);
        match self.policy {
            Policy::Paged if conf.is_empty() => format!("{PAGED}:True"),
            Policy::Paged => format!("{PAGED}:True,{conf}"),
            Policy::Segments | Policy::Expandable => conf,
        }
    }
}

/// The result of parsing a conf string.
#[derive(Debug, Clone, PartialEq)]
pub struct Parsed {
    /// The options, with defaults for those not given.
    pub options: Options,
    /// The pairs whose key is in [`NOT_OURS`], in the order written.
    pub not_ours: Vec<NotOurs>,
}
