//! Why a conf string is refused, and which key the user may have meant.

use strsim::levenshtein;
use thiserror::Error;

use super::conf::Pair;
use super::{NOT_OURS, REGISTRY};

/// Why a conf string was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// Neither Cushion nor PyTorch knows the key.
    #[error("unknown option `{key}` (given as `{key}:{value}`): {}", hint(*.nearest))]
    UnknownKey {
        /// The key as written.
        key: String,
        /// The value given for it.
        value: String,
        /// A known key with almost the same spelling.
        nearest: Option<&'static str>,
    },
    /// The option does not accept this value.
    #[error("option `{key}` cannot be `{value}`: {why}; it takes {accepts}")]
    BadValue {
        /// The key.
        key: String,
        /// The value as written.
        value: String,
        /// What is wrong with the value.
        why: String,
        /// The values that the option accepts.
        accepts: &'static str,
    },
    /// A key without a `:` after it.
    #[error("`{text}` has no `:` between key and value; write `key:value`")]
    MissingColon {
        /// The item without the `:`.
        text: String,
    },
    /// A value is followed by something other than a comma.
    #[error("`{key}:{value}` is followed by `{found}`; write a `,` before the next `key:value`")]
    MissingComma {
        /// The key.
        key: String,
        /// The value, up to the unexpected text.
        value: String,
        /// The unexpected text.
        found: String,
    },
    /// A `[` or `]` without its partner, or a list inside a list.
    #[error("brackets do not pair up in `{text}`; a list is written `[a:b,c:d]`, without nesting")]
    UnbalancedBrackets {
        /// The whole conf string, without white space.
        text: String,
    },
    /// A value without a key.
    #[error("no key before `:{value}`; write `key:value`")]
    EmptyKey {
        /// The value.
        value: String,
    },
    /// A key without a value.
    #[error("no value after `{key}:`; write `key:value`")]
    EmptyValue {
        /// The key.
        key: String,
    },
    /// An empty item before a comma.
    #[error("nothing before a `,`; write `key:value,key:value`")]
    EmptyItem,
}

/// Returns every key that a conf string may hold.
pub(super) fn known_keys() -> impl Iterator<Item = &'static str> {
    REGISTRY.iter().map(|spec| spec.key).chain(NOT_OURS.iter().map(|spec| spec.key))
}

pub(super) fn unknown_key(pair: &Pair) -> OptionsError {
    OptionsError::UnknownKey {
        key: pair.key.clone(),
        value: pair.value.clone(),
        nearest: nearest_key(&pair.key),
    }
}

/// Returns the known key with the fewest edits from `key`, if that is few enough for a typing
/// error.
fn nearest_key(key: &str) -> Option<&'static str> {
    const MOST_EDITS: usize = 3;
    let key = key.to_ascii_lowercase();
    known_keys()
        .filter(|known| known.len().abs_diff(key.len()) <= MOST_EDITS)
        .map(|known| (levenshtein(&key, known), known))
        .filter(|(edits, _)| *edits <= MOST_EDITS && edits * 2 < key.len())
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, known)| known)
}

/// Returns what to write instead of an unknown key.
fn hint(nearest: Option<&str>) -> String {
    match nearest {
        Some(key) => format!("did you mean `{key}`?"),
        None => {
            let keys: Vec<_> = REGISTRY.iter().map(|spec| format!("`{}`", spec.key)).collect();
            format!("the options are {}", keys.join(", "))
        }
    }
}
