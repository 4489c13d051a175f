//! The options of the allocator: one table, from which everything else about them follows.
//!
//! [`REGISTRY`] declares each option once: its key, unit, default, meaning, and how it is read and
//! shown. [`NOT_OURS`] lists the keys that PyTorch knows and Cushion leaves alone. Parsing,
//! showing, the suggestions in error messages and `docs/options.md` ([`markdown`]) all come from
//! these two.
//!
//! Keys and values are those of `PYTORCH_CUDA_ALLOC_CONF`, so that a conf string that works there
//! works here and means the same. Where PyTorch lets a slip pass in silence, this parser refuses
//! it. Nothing here reads the environment: a binding does, and passes the text on.

mod conf;
mod page;
mod registry;
mod settings;

use std::fmt::Write as _;

pub use page::markdown;
pub use registry::REGISTRY;
pub use settings::{
    Asked, SETTINGS, SettingSpec, Settings, SettingsError, TORCH_VARIABLES, torch_variable,
    without_key,
};

use conf::{Pair, edits};
use thiserror::Error;

use crate::ladder::RungSet;
use crate::policy::Policy;
use crate::size::MIB;

/// A large segment must be larger than the smallest request that gets a segment of its own.
const MIN_LARGE_ALLOC_MIB: u64 = 10;

/// How many size intervals [`Options::roundup_power2_divisions`] has.
const INTERVALS: usize = 16;

/// The settings of one allocator, as parsed. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Free blocks of this size or more are never split; `None` sets no limit.
    pub max_split_size: Option<u64>,
    /// How much larger than the request an unsplittable block may be; `None` means
    /// [`large_segment_size`](Self::large_segment_size).
    pub max_non_split_rounding: Option<u64>,
    /// Steps between one power of two and the next that a request is rounded up to, one entry per
    /// interval (see [`divisions_for`](Self::divisions_for)); each is 0 (off) or a power of two.
    pub roundup_power2_divisions: [u64; INTERVALS],
    /// Share of the memory limit above which idle cached memory is given back; 0 is off.
    pub garbage_collection_threshold: f64,
    /// Whether segments grow in place instead of being fixed when they are made.
    pub expandable_segments: bool,
    /// `paged` (ours): pages with a home each, and second addresses that put free pieces side by side. It is the
    /// default, so with both set `expandable_segments` counts ([`Policy::of`]); a conf string that has both `True` sets
    /// this one alone. With neither, memory is laid out in segments.
    pub paged: bool,
    /// The size of the largest pages under `paged`.
    pub page_size: u64,
    /// After how many milliseconds `paged` gives back what it does not need; zero for never.
    pub trim_ms: u64,
    /// Size of the segments that requests between 1 MiB and 10 MiB are cut from.
    pub large_segment_size: u64,
    /// Share of the memory of each device that this process may hold.
    pub per_process_memory_fraction: f64,
    /// Whether a CUDA graph capture may reuse blocks freed on other streams within it.
    pub graph_capture_record_stream_reuse: bool,
    /// How long one request may wait for memory, in milliseconds; 0 never waits.
    pub wait_ms: u64,
    /// How long all requests of the process together may wait, in milliseconds; `None` sets no limit.
    pub wait_total_ms: Option<u64>,
    /// The first pause of a request that looks again and again, in microseconds.
    pub wait_base_us: u64,
    /// How much longer each pause is than the one before.
    pub wait_factor: f64,
    /// The longest pause, in milliseconds.
    pub wait_ceiling_ms: u64,
    /// How often one request climbs the ladder at most.
    pub max_tries: u64,
    /// How long each of the program's callbacks may take at least, in milliseconds.
    pub callback_ms: u64,
    /// Rungs of the ladder that are left out.
    pub skip_rungs: RungSet,
    /// The most host memory that may serve requests; 0 is off.
    pub spill_limit: u64,
    /// The smallest request that host memory may serve.
    pub spill_over: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl Options {
    /// Asks for a policy.
    pub fn ask_for(&mut self, policy: Policy) {
        self.expandable_segments = policy == Policy::Expandable;
        self.paged = policy == Policy::Paged;
    }

    /// The options of a conf string that says nothing.
    pub const DEFAULT: Self = Self {
        max_split_size: None,
        max_non_split_rounding: None,
        roundup_power2_divisions: [0; INTERVALS],
        garbage_collection_threshold: 0.0,
        expandable_segments: false,
        paged: true,
        page_size: 80 << 20,
        trim_ms: 30_000,
        large_segment_size: 20 * MIB,
        per_process_memory_fraction: 1.0,
        graph_capture_record_stream_reuse: false,
        wait_ms: 3_000,
        wait_total_ms: None,
        wait_base_us: 50,
        wait_factor: 2.0,
        wait_ceiling_ms: 100,
        max_tries: 500,
        callback_ms: 1_000,
        skip_rungs: RungSet::NONE,
        spill_limit: 0,
        spill_over: 16 * MIB,
    };

    /// Reads a conf string, starting from the defaults.
    pub fn parse(conf: &str) -> Result<Parsed, OptionsError> {
        let mut options = Self::default();
        let not_ours = options.apply(conf)?;
        Ok(Parsed { options, not_ours })
    }

    /// Applies a conf string to these options, and returns the pairs that are not Cushion's.
    ///
    /// Options marked [`resets`](OptionSpec::resets) go back to their default unless the string
    /// names them; the others keep their value. A key given twice takes effect twice, in order: the
    /// last one wins, except that a second list of `roundup_power2_divisions` changes only the
    /// intervals it fills. The two keys that choose a policy are read together: `paged:True` counts before
    /// `expandable_segments:True`, and that before either `False`. On an error nothing changes.
    pub fn apply(&mut self, conf: &str) -> Result<Vec<NotOurs>, OptionsError> {
        let pairs = conf::pairs(conf)?;
        if let Some(pair) = pairs.iter().find(|pair| !is_known(&pair.key)) {
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
        if let Some(policy) = policy_asked_for(&pairs, Policy::of(self)) {
            next.ask_for(policy);
        }
        *self = next;

        let not_ours = pairs.into_iter().filter(|pair| is_not_ours(&pair.key));
        Ok(not_ours.map(|Pair { key, value }| NotOurs { key, value }).collect())
    }

    /// The divisions that apply to a request of `size` bytes; 0 means that they do not round it.
    ///
    /// Interval 0 is everything below 2 MiB, interval `i` holds the sizes from 2^i MiB up to, and
    /// not including, twice that, and interval 15 everything from 32 GiB up.
    pub fn divisions_for(&self, size: u64) -> u64 {
        let log_mib = size.checked_ilog2().unwrap_or(0).saturating_sub(MIB.ilog2());
        self.roundup_power2_divisions[interval(log_mib)]
    }

    /// The conf string that parses to these options: those that differ from the default, in the
    /// order of [`REGISTRY`].
    ///
    /// Exact for options that a conf string can express, as all parsed ones are. For fields set by
    /// hand, sizes are rounded down to whole MiB, and a value out of range is written as it is.
    pub fn to_conf(&self) -> String {
        let mut conf = String::new();
        let expandable = Policy::of(self) == Policy::Expandable;
        for spec in REGISTRY {
            let value = spec.show(self);
            // Who asks for expandable segments has said that it is not `paged`.
            let said = expandable && spec.key == PAGED;
            if value != spec.default && !said {
                let comma = if conf.is_empty() { "" } else { "," };
                // Writing to a string cannot fail.
                let _ = write!(conf, "{comma}{}:{value}", spec.key);
            }
        }
        conf
    }

    /// The same for readers to whom a string that names no policy means PyTorch's classic allocator, as in its
    /// snapshots: `paged` is named, and segments are not.
    pub fn to_torch_conf(&self) -> String {
        let conf = without_key(&self.to_conf(), PAGED);
        match Policy::of(self) {
            Policy::Paged if conf.is_empty() => format!("{PAGED}:True"),
            Policy::Paged => format!("{PAGED}:True,{conf}"),
            Policy::Segments | Policy::Expandable => conf,
        }
    }
}

/// The options that choose a policy.
const EXPANDABLE: &str = "expandable_segments";
const PAGED: &str = "paged";

/// The policy that the pairs of a string ask for, where it was `before`; `None` if they say nothing of it.
///
/// `expandable_segments:False` is what PyTorch's users write to have what is usual, so it says no more than that: it
/// ends `expandable`, and asks for none of the others.
fn policy_asked_for(pairs: &[Pair], before: Policy) -> Option<Policy> {
    let last = |key| pairs.iter().rfind(|pair| pair.key == key).map(|pair| pair.value == "True");
    match (last(PAGED), last(EXPANDABLE)) {
        (Some(true), _) => Some(Policy::Paged),
        (_, Some(true)) => Some(Policy::Expandable),
        (Some(false), _) => Some(Policy::Segments),
        (None, Some(false)) if before == Policy::Expandable => Some(Policy::of(&Options::DEFAULT)),
        (None, Some(false)) => Some(before),
        (None, None) => None,
    }
}

/// What a conf string held: Cushion's options, and what was left for others.
#[derive(Debug, Clone, PartialEq)]
pub struct Parsed {
    /// The options, with defaults for those not given.
    pub options: Options,
    /// The pairs whose key is in [`NOT_OURS`], in the order written.
    pub not_ours: Vec<NotOurs>,
}

/// A pair of a conf string that PyTorch knows and Cushion does not act on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotOurs {
    /// The key, one of [`NOT_OURS`].
    pub key: String,
    /// The value as written, white space removed; a list keeps its brackets.
    pub value: String,
}

/// Why a conf string was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// Neither Cushion nor PyTorch has such a key.
    #[error("unknown option `{key}` (given as `{key}:{value}`): {}", hint(*.nearest))]
    UnknownKey {
        /// The key as written.
        key: String,
        /// The value given for it.
        value: String,
        /// A known key that is spelt almost the same.
        nearest: Option<&'static str>,
    },
    /// The key is known, but not with this value.
    #[error("option `{key}` cannot be `{value}`: {why}; it takes {accepts}")]
    BadValue {
        /// The key.
        key: String,
        /// The value as written.
        value: String,
        /// What is wrong with the value.
        why: String,
        /// The values that the option takes.
        accepts: &'static str,
    },
    /// A key without a `:` after it.
    #[error("`{text}` has no `:` between key and value; write `key:value`")]
    MissingColon {
        /// The item in question.
        text: String,
    },
    /// Something follows a value that is not a comma.
    #[error("`{key}:{value}` is followed by `{found}`; write a `,` before the next `key:value`")]
    MissingComma {
        /// The key.
        key: String,
        /// Its value, as far as it goes.
        value: String,
        /// The text after the value.
        found: String,
    },
    /// A `[` or `]` without its partner, or a list inside a list.
    #[error("brackets do not pair up in `{text}`; a list is written `[a:b,c:d]`, without nesting")]
    UnbalancedBrackets {
        /// The whole conf string, white space removed.
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
    /// Nothing before a comma.
    #[error("nothing before a `,`; write `key:value,key:value`")]
    EmptyItem,
}

/// One option: everything there is to know about it.
#[derive(Debug, Clone, Copy)]
pub struct OptionSpec {
    /// The key in a conf string.
    pub key: &'static str,
    /// What a value counts.
    pub unit: &'static str,
    /// The default, as [`show`](Self::show) writes it.
    pub default: &'static str,
    /// The values that are taken, to complete "it takes ...".
    pub accepts: &'static str,
    /// What the option does.
    pub meaning: &'static str,
    /// The worst that a value in range can do.
    pub worst_case: &'static str,
    /// Whether each [`Options::apply`] begins by setting the option back to its default.
    pub resets: bool,
    /// Sets the option from the value of a pair, or says why not.
    read: fn(&mut Options, &str) -> Result<(), String>,
    /// Writes the option as `read` takes it, or as words where the default has no such form.
    show: fn(&Options) -> String,
    /// Sets the option to its default.
    reset: fn(&mut Options),
}

impl OptionSpec {
    /// The environment variable of this option: `CUSHION_` and the key in capitals.
    pub fn env_name(&self) -> String {
        format!("CUSHION_{}", self.key.to_ascii_uppercase())
    }

    /// The present value as text, fit for a conf string unless it is the default.
    pub fn show(&self, options: &Options) -> String {
        (self.show)(options)
    }

    /// The meaning in full, ending with the default and the worst case.
    pub fn doc(&self) -> String {
        let Self { meaning, default, worst_case, .. } = self;
        format!("{meaning} Default: {default}. Worst case: {worst_case}")
    }
}

/// A key that is accepted, with any value, and not acted on.
#[derive(Debug, Clone, Copy)]
pub struct NotOursSpec {
    /// The key in a conf string.
    pub key: &'static str,
    /// Why Cushion does not act on it.
    pub why: &'static str,
}

const PINNED: &str = "It concerns pinned host memory, which stays with PyTorch.";
const LOCK: &str = "It is about a lock of PyTorch's own allocator.";
const RESERVE: &str = "Cushion sizes its address ranges itself.";

/// The keys that PyTorch knows and Cushion leaves alone.
pub static NOT_OURS: &[NotOursSpec] = &[
    NotOursSpec {
        key: "backend",
        why: "It picks an allocator of PyTorch, and Cushion replaces it.",
    },
    NotOursSpec { key: "release_lock_on_cudamalloc", why: LOCK },
    NotOursSpec { key: "release_lock_on_hipmalloc", why: LOCK },
    NotOursSpec {
        key: "throw_on_cudamalloc_oom",
        why: "It fails early instead of trying to find memory, which is what Cushion is for.",
    },
    NotOursSpec { key: "expandable_segments_reserve", why: RESERVE },
    NotOursSpec { key: "expandable_segments_reserve_by_class", why: RESERVE },
    NotOursSpec { key: "pinned_use_cuda_host_register", why: PINNED },
    NotOursSpec { key: "pinned_use_hip_host_register", why: PINNED },
    NotOursSpec { key: "pinned_num_register_threads", why: PINNED },
    NotOursSpec { key: "pinned_use_background_threads", why: PINNED },
    NotOursSpec { key: "pinned_reserve_segment_size_mb", why: PINNED },
    NotOursSpec { key: "pinned_free_catch_all", why: PINNED },
    NotOursSpec { key: "pinned_max_round_threshold_mb", why: PINNED },
    NotOursSpec { key: "pinned_max_cached_size_mb", why: PINNED },
];

/// The index of the interval that begins at 2^`log_mib` MiB.
fn interval(log_mib: u32) -> usize {
    (log_mib as usize).min(INTERVALS - 1)
}

fn is_not_ours(key: &str) -> bool {
    NOT_OURS.iter().any(|spec| spec.key == key)
}

fn known_keys() -> impl Iterator<Item = &'static str> {
    REGISTRY.iter().map(|spec| spec.key).chain(NOT_OURS.iter().map(|spec| spec.key))
}

fn is_known(key: &str) -> bool {
    known_keys().any(|known| known == key)
}

fn unknown_key(pair: &Pair) -> OptionsError {
    OptionsError::UnknownKey {
        key: pair.key.clone(),
        value: pair.value.clone(),
        nearest: nearest_key(&pair.key),
    }
}

/// The known key that takes the fewest edits to reach, if they are few enough for a slip.
fn nearest_key(key: &str) -> Option<&'static str> {
    const MOST_EDITS: usize = 3;
    let key = key.to_ascii_lowercase();
    known_keys()
        .filter(|known| known.len().abs_diff(key.len()) <= MOST_EDITS)
        .map(|known| (edits(key.as_bytes(), known.as_bytes()), known))
        .filter(|(edits, _)| *edits <= MOST_EDITS && edits * 2 < key.len())
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, known)| known)
}

/// What to try instead of an unknown key.
fn hint(nearest: Option<&str>) -> String {
    match nearest {
        Some(key) => format!("did you mean `{key}`?"),
        None => {
            let keys: Vec<_> = REGISTRY.iter().map(|spec| format!("`{}`", spec.key)).collect();
            format!("the options are {}", keys.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ladder::Rung;
    use crate::random::Random;

    const GIB: u64 = 1 << 30;

    fn parse(conf: &str) -> Options {
        let parsed = Options::parse(conf).unwrap();
        assert_eq!(parsed.not_ours, []);
        parsed.options
    }

    fn slots(conf_value: &str) -> [u64; INTERVALS] {
        parse(&format!("roundup_power2_divisions:{conf_value}")).roundup_power2_divisions
    }

    /// Asserts that each value is refused with an error that names key and value.
    fn refused(key: &str, values: &[&str]) {
        for value in values {
            let error = Options::parse(&format!("{key}:{value}")).unwrap_err();
            let OptionsError::BadValue { key: k, value: v, .. } = &error else {
                panic!("{key}:{value}: {error:?}");
            };
            assert_eq!((k.as_str(), v.as_str()), (key, *value));
            let text = error.to_string();
            assert!(text.contains(key) && text.contains(value), "{text}");
            let spec = REGISTRY.iter().find(|spec| spec.key == key).unwrap();
            assert!(text.contains(spec.accepts), "{text}");
        }
    }

    #[test]
    fn defaults_are_those_of_pytorch_but_for_the_policy() {
        let options = Options::default();
        assert_eq!(Policy::of(&options), Policy::Paged);
        assert_eq!(options.max_split_size, None);
        assert_eq!(options.max_non_split_rounding, None);
        assert_eq!(options.roundup_power2_divisions, [0; 16]);
        assert_eq!(options.garbage_collection_threshold, 0.0);
        assert!(!options.expandable_segments);
        assert_eq!(options.large_segment_size, 20 * MIB);
        assert_eq!(options.per_process_memory_fraction, 1.0);
        assert!(!options.graph_capture_record_stream_reuse);
        assert_eq!(parse(""), options);
        assert_eq!(options.to_conf(), "");
    }

    #[test]
    fn large_segment_size() {
        assert_eq!(parse("large_segment_size_mb:11").large_segment_size, 11 * MIB);
        assert_eq!(parse("large_segment_size_mb:0512").large_segment_size, 512 * MIB);
        // The most whole MiB that fit in 64 bits, and everything above.
        for mib in ["17592186044415", "17592186044416", "18446744073709551615"] {
            let options = parse(&format!("large_segment_size_mb:{mib}"));
            assert_eq!(options.large_segment_size, u64::MAX - (MIB - 1), "{mib}");
        }
        refused(
            "large_segment_size_mb",
            &["0", "10", "-20", "+20", "20.5", "20MB", "x", "True", "[20]", "18446744073709551616"],
        );
    }

    #[test]
    fn max_split_size() {
        assert_eq!(parse("max_split_size_mb:20").max_split_size, Some(20 * MIB));
        assert_eq!(parse("max_split_size_mb:128").max_split_size, Some(128 * MIB));
        refused("max_split_size_mb", &["0", "19", "-1", "1e3", "128M", "unlimited", "[128:1]"]);
    }

    #[test]
    fn max_non_split_rounding() {
        assert_eq!(parse("max_non_split_rounding_mb:20").max_non_split_rounding, Some(20 * MIB));
        assert_eq!(parse("max_non_split_rounding_mb:64").max_non_split_rounding, Some(64 * MIB));
        refused("max_non_split_rounding_mb", &["0", "19", "-1", "2e1", "[20]"]);
    }

    #[test]
    fn limits_follow_the_large_segment_size_wherever_it_stands() {
        let options = parse("max_split_size_mb:12,large_segment_size_mb:12");
        assert_eq!(options.max_split_size, Some(12 * MIB));
        for conf in [
            "max_split_size_mb:39,large_segment_size_mb:40",
            "large_segment_size_mb:40,max_split_size_mb:39",
            "max_non_split_rounding_mb:39,large_segment_size_mb:40",
            "large_segment_size_mb:12,max_split_size_mb:39,large_segment_size_mb:40",
        ] {
            let error = Options::parse(conf).unwrap_err().to_string();
            assert!(error.contains("below the size of a large segment, 40 MiB"), "{error}");
        }
        // A size kept from an earlier string counts too.
        let mut options = parse("large_segment_size_mb:40");
        assert!(options.apply("max_split_size_mb:39").is_err());
        options.apply("max_split_size_mb:40").unwrap();
        assert_eq!(options.max_split_size, Some(40 * MIB));
    }

    #[test]
    fn garbage_collection_threshold() {
        for (text, share) in [("0.8", 0.8), ("1e-3", 1e-3), (".5", 0.5), ("0.999999", 0.999_999)] {
            let options = parse(&format!("garbage_collection_threshold:{text}"));
            assert_eq!(options.garbage_collection_threshold, share);
        }
        refused(
            "garbage_collection_threshold",
            &["0", "1", "1.0", "-0.1", "nan", "inf", "80%", "off"],
        );
    }

    #[test]
    fn per_process_memory_fraction() {
        for (text, share) in [("0", 0.0), ("0.25", 0.25), ("1", 1.0), ("1.0", 1.0)] {
            let options = parse(&format!("per_process_memory_fraction:{text}"));
            assert_eq!(options.per_process_memory_fraction, share);
        }
        refused("per_process_memory_fraction", &["-0.01", "1.01", "nan", "inf", "half", "[1]"]);
    }

    #[test]
    fn booleans_are_exactly_true_or_false() {
        assert!(parse("expandable_segments:True").expandable_segments);
        assert!(!parse("expandable_segments:False").expandable_segments);
        let key = "graph_capture_record_stream_reuse";
        assert!(parse(&format!("{key}:True")).graph_capture_record_stream_reuse);
        assert!(!parse(&format!("{key}:False")).graph_capture_record_stream_reuse);
        assert!(parse("paged:True").paged);
        assert!(!parse("paged:False").paged);
        for key in ["expandable_segments", "paged", key] {
            refused(key, &["true", "TRUE", "1", "0", "yes", "Truee", "[True]"]);
        }
    }

    #[test]
    fn of_two_fields_that_ask_for_a_policy_the_one_that_is_no_default_counts() {
        let both = Options { expandable_segments: true, paged: true, ..Options::DEFAULT };
        assert_eq!(Policy::of(&both), Policy::Expandable);
    }

    #[test]
    fn a_string_asks_for_a_policy() {
        use Policy::{Expandable, Paged, Segments};

        // From each of the three: segments, expandable, paged.
        let cases = [
            ("", [Segments, Expandable, Paged]),
            ("max_split_size_mb:64", [Segments, Expandable, Paged]),
            ("expandable_segments:True", [Expandable; 3]),
            ("expandable_segments:False", [Segments, Paged, Paged]),
            ("paged:True", [Paged; 3]),
            ("paged:False", [Segments; 3]),
            // Of one string, wherever each stands.
            ("expandable_segments:True,paged:True", [Paged; 3]),
            ("paged:True,expandable_segments:True", [Paged; 3]),
            ("expandable_segments:True,paged:False", [Expandable; 3]),
            ("paged:False,expandable_segments:True", [Expandable; 3]),
            ("expandable_segments:False,paged:True", [Paged; 3]),
            ("paged:False,expandable_segments:False", [Segments; 3]),
            // Said twice, the last counts.
            ("expandable_segments:True,expandable_segments:False", [Segments, Paged, Paged]),
            ("expandable_segments:False,expandable_segments:True", [Expandable; 3]),
            ("paged:True,paged:False", [Segments; 3]),
        ];
        for (conf, expected) in cases {
            assert_eq!(Policy::of(&parse(conf)), expected[2], "{conf}");
            let found = Policy::ALL.map(|policy| {
                let mut options = Options::default();
                options.ask_for(policy);
                options.apply(conf).unwrap();
                // What a string gives, another can say again.
                assert_eq!(parse(&options.to_conf()), options, "{conf}");
                Policy::of(&options)
            });
            assert_eq!(found, expected, "{conf}");
        }
    }

    #[test]
    fn readers_of_pytorch_see_its_default_where_no_policy_is_named() {
        let mut options = parse("max_split_size_mb:64");
        let texts = Policy::ALL.map(|policy| {
            options.ask_for(policy);
            options.to_torch_conf()
        });
        let expected = [
            "max_split_size_mb:64",
            "max_split_size_mb:64,expandable_segments:True",
            "paged:True,max_split_size_mb:64",
        ];
        assert_eq!(texts, expected);
        assert_eq!(Options::default().to_torch_conf(), "paged:True");
        for policy in Policy::ALL {
            options.ask_for(policy);
            let mut read = Options::default();
            read.ask_for(Policy::Segments);
            read.apply(&options.to_torch_conf()).unwrap();
            assert_eq!(read, options, "{policy}");
        }
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
        // Without `>` the rest stays off; what lies between two names stays off as well.
        assert_eq!(slots("[4:2,32:8]"), [2, 2, 2, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        // Only the first name fills what lies below it, even if a later name is lower.
        assert_eq!(slots("[8:2,2:4]"), [2, 4, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        // `>` begins after the last name, wherever that is.
        assert_eq!(slots("[8:2,2:4,>:1]"), [2, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
        // Names are clamped to the last interval, after which `>` has nothing to fill.
        assert_eq!(slots("[65536:2,>:8]"), [2; 16]);
        assert_eq!(slots("[32768:2,9223372036854775808:4]")[14..], [2, 4]);
        // `>` alone leaves the first interval out, and does not count as a first name.
        assert_eq!(slots("[>:8]"), [0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]);
        assert_eq!(slots("[>:8,4:2]"), [2, 2, 2, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]);
        // Zero switches an interval off.
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

    const ALL: &str = "max_split_size_mb:64,max_non_split_rounding_mb:48,\
                       roundup_power2_divisions:4,garbage_collection_threshold:0.6,\
                       expandable_segments:True,paged:False,page_mb:32,trim_ms:500,large_segment_size_mb:32,\
                       per_process_memory_fraction:0.5,graph_capture_record_stream_reuse:True,\
                       wait_ms:0,wait_total_ms:60000,wait_base_us:20,wait_factor:1.5,\
                       wait_ceiling_ms:10,max_tries:9,callback_ms:70,skip_rungs:borrow+wait,\
                       spill_limit_mb:1024,spill_over_mb:64";

    #[test]
    fn four_options_reset_and_the_others_stay() {
        let mut options = parse(ALL);
        options.apply("").unwrap();
        let kept = Options {
            expandable_segments: true,
            paged: false,
            page_size: 32 * MIB,
            trim_ms: 500,
            large_segment_size: 32 * MIB,
            per_process_memory_fraction: 0.5,
            graph_capture_record_stream_reuse: true,
            wait_ms: 0,
            wait_total_ms: Some(60_000),
            wait_base_us: 20,
            wait_factor: 1.5,
            wait_ceiling_ms: 10,
            max_tries: 9,
            callback_ms: 70,
            skip_rungs: [Rung::Borrow, Rung::Wait].into_iter().collect(),
            spill_limit: 1024 * MIB,
            spill_over: 64 * MIB,
            ..Options::default()
        };
        assert_eq!(options, kept);
        let resets: Vec<_> = REGISTRY.iter().filter(|spec| spec.resets).map(|s| s.key).collect();
        let expected = [
            "max_split_size_mb",
            "max_non_split_rounding_mb",
            "roundup_power2_divisions",
            "garbage_collection_threshold",
        ];
        assert_eq!(resets, expected);
        // A list starts from nothing, not from what an earlier string left.
        let mut options = parse("roundup_power2_divisions:4");
        options.apply("roundup_power2_divisions:[1:2]").unwrap();
        assert_eq!(options.roundup_power2_divisions[..2], [2, 0]);
    }

    #[test]
    fn reset_of_every_option_is_its_default() {
        let mut options = parse(ALL);
        for spec in REGISTRY {
            assert_ne!(spec.show(&options), spec.default, "{}", spec.key);
            (spec.reset)(&mut options);
        }
        assert_eq!(options, Options::default());
    }

    #[test]
    fn a_failed_apply_changes_nothing() {
        let before = parse(ALL);
        for tail in
            ["expandable_segments:no", "max_split_size_mb:1", "nonsense:1", "backend", "a:["]
        {
            let mut options = before.clone();
            let conf = format!("large_segment_size_mb:11,expandable_segments:False,{tail}");
            assert!(options.apply(&conf).is_err(), "{tail}");
            assert_eq!(options, before, "{tail}");
        }
    }

    #[test]
    fn the_last_of_two_wins() {
        let options = parse("max_split_size_mb:64,max_split_size_mb:32,expandable_segments:True,");
        assert_eq!(options.max_split_size, Some(32 * MIB));
        assert!(options.expandable_segments);
        // Both are read, so both must be good.
        assert!(Options::parse("max_split_size_mb:1,max_split_size_mb:32").is_err());
        // A list written after another value changes only what it fills.
        let conf = "roundup_power2_divisions:8,roundup_power2_divisions:[1:2,4:4]";
        assert_eq!(parse(conf).roundup_power2_divisions[..4], [2, 8, 4, 8]);
    }

    #[test]
    fn keys_that_are_not_ours_come_back_in_order() {
        let conf = "backend: native, max_split_size_mb: 64,\
                    expandable_segments_reserve_by_class:[a:0.5, b:40G], pinned_free_catch_all:?";
        let parsed = Options::parse(conf).unwrap();
        let options = Options { max_split_size: Some(64 * MIB), ..Options::default() };
        assert_eq!(parsed.options, options);
        let found: Vec<_> =
            parsed.not_ours.iter().map(|p| (p.key.as_str(), p.value.as_str())).collect();
        let expected = [
            ("backend", "native"),
            ("expandable_segments_reserve_by_class", "[a:0.5,b:40G]"),
            ("pinned_free_catch_all", "?"),
        ];
        assert_eq!(found, expected);
        for spec in NOT_OURS {
            let parsed = Options::parse(&format!("{}:x", spec.key)).unwrap();
            let not_ours = NotOurs { key: spec.key.to_owned(), value: "x".to_owned() };
            assert_eq!(parsed, Parsed { options: Options::default(), not_ours: vec![not_ours] });
            assert!(Options::parse(spec.key).is_err());
        }
    }

    #[test]
    fn unknown_keys_suggest_the_nearest() {
        let nearest = |key: &str| {
            let error = Options::parse(&format!("expandable_segments:True,{key}:7")).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(&format!("`{key}:7`")), "{text}");
            match error {
                OptionsError::UnknownKey { nearest, .. } => nearest,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(nearest("max_split_size"), Some("max_split_size_mb"));
        assert_eq!(nearest("MAX_SPLIT_SIZE_MB"), Some("max_split_size_mb"));
        assert_eq!(nearest("garbage_colection_treshold"), Some("garbage_collection_threshold"));
        assert_eq!(nearest("expandable_segment"), Some("expandable_segments"));
        assert_eq!(nearest("pinned_use_host_register"), None);
        assert_eq!(nearest("backends"), Some("backend"));
        assert_eq!(nearest("nonsense"), None);
        assert_eq!(nearest("b"), None);
        assert_eq!(nearest("é"), None);

        let text = Options::parse("max_split_size:7").unwrap_err().to_string();
        let expected = "unknown option `max_split_size` (given as `max_split_size:7`): \
                        did you mean `max_split_size_mb`?";
        assert_eq!(text, expected);
        let text = Options::parse("nonsense:7").unwrap_err().to_string();
        assert!(REGISTRY.iter().all(|spec| text.contains(spec.key)), "{text}");
    }

    #[test]
    fn a_bad_value_reads_well() {
        let text = Options::parse("max_split_size_mb:8").unwrap_err().to_string();
        let expected = "option `max_split_size_mb` cannot be `8`: it is below the size of a large \
                        segment, 20 MiB; it takes a whole number of MiB, `large_segment_size_mb` \
                        or more";
        assert_eq!(text, expected);
    }

    #[test]
    fn conf_text_is_canonical() {
        let canonical = |conf: &str| parse(conf).to_conf();
        assert_eq!(canonical("expandable_segments:False,large_segment_size_mb:20"), "");
        assert_eq!(canonical("paged:True,expandable_segments:True"), "");
        assert_eq!(canonical("paged:False,expandable_segments:False"), "paged:False");
        let expandable = "expandable_segments:True";
        assert_eq!(canonical(&format!("paged:False,{expandable}")), expandable);
        assert_eq!(canonical("roundup_power2_divisions:[1:4,>:4]"), "roundup_power2_divisions:4");
        let list = "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]";
        assert_eq!(canonical(list), list);
        let all = "large_segment_size_mb:32,max_split_size_mb:64,max_non_split_rounding_mb:48,\
                   roundup_power2_divisions:4,garbage_collection_threshold:0.6,\
                   expandable_segments:True,page_mb:32,trim_ms:500,per_process_memory_fraction:0.5,\
                   graph_capture_record_stream_reuse:True,wait_ms:0,wait_total_ms:60000,\
                   wait_base_us:20,wait_factor:1.5,wait_ceiling_ms:10,max_tries:9,callback_ms:70,\
                   skip_rungs:borrow+wait,spill_limit_mb:1024,spill_over_mb:64";
        assert_eq!(canonical(ALL), all);
        // Said aloud, a default that depends on another option is no longer a default.
        let explicit = "max_non_split_rounding_mb:20";
        assert_eq!(canonical(explicit), explicit);
    }

    /// Many combinations, the same ones each time.
    struct Dice(Random);

    impl Dice {
        fn below(&mut self, end: u64) -> u64 {
            self.0.next() % end
        }

        fn share(&mut self) -> f64 {
            f64::from(u32::try_from(self.below(1 << 32)).unwrap()) / f64::from(u32::MAX)
        }

        fn size(&mut self, least_mib: u64) -> u64 {
            let most = u64::MAX / MIB;
            let reach = 1 << self.below(44);
            (least_mib + self.below(reach)).min(most) * MIB
        }

        fn options(&mut self) -> Options {
            let mut options = Options::default();
            if self.below(2) == 0 {
                options.large_segment_size = self.size(11);
            }
            let least = options.large_segment_size / MIB;
            if self.below(2) == 0 {
                options.max_split_size = Some(self.size(least));
            }
            if self.below(2) == 0 {
                options.max_non_split_rounding = Some(self.size(least));
            }
            // Few or many distinct divisions, in runs or not.
            let kinds = 1 + self.below(4);
            let runs = 1 + self.below(4);
            let mut count = 0;
            for slot in &mut options.roundup_power2_divisions {
                if self.below(runs) == 0 {
                    let kind = self.below(kinds);
                    count = if kind == 0 { 0 } else { 1 << (self.below(64) * (kind - 1) / 3) };
                }
                *slot = count;
            }
            if self.below(2) == 0 {
                let share = self.share();
                options.garbage_collection_threshold = if share < 1.0 { share } else { 0.5 };
            }
            let policy = usize::try_from(self.below(3)).unwrap();
            options.ask_for(Policy::ALL[policy]);
            options.page_size = (2 + self.below(1000)) * MIB;
            options.trim_ms = self.below(100_000);
            if self.below(2) == 0 {
                options.per_process_memory_fraction = self.share();
            }
            options.graph_capture_record_stream_reuse = self.below(2) == 0;
            options.wait_ms = self.below(10_000);
            options.wait_total_ms = (self.below(2) == 0).then(|| self.below(10_000));
            options.wait_base_us = 1 + self.below(100);
            options.wait_factor = 1.0 + 99.0 * self.share();
            options.wait_ceiling_ms = 1 + self.below(1000);
            options.max_tries = 1 + self.below(1000);
            options.callback_ms = self.below(1000);
            let rungs = Rung::ALL.into_iter().filter(|rung| rung.can_be_skipped());
            options.skip_rungs = rungs.filter(|_| self.below(3) == 0).collect();
            options.spill_limit = if self.below(2) == 0 { 0 } else { self.size(1) };
            options.spill_over = self.size(0);
            options
        }
    }

    #[test]
    fn conf_text_parses_back() {
        let mut random = Dice(Random(1));
        for _ in 0..20_000 {
            let options = random.options();
            let conf = options.to_conf();
            assert_eq!(parse(&conf), options, "{conf}");
            // Applied to other options, it sets all that it names and all that resets.
            let mut other = random.options();
            let everything: Vec<_> = REGISTRY
                .iter()
                .filter(|spec| !spec.resets || spec.show(&options) != spec.default)
                .map(|spec| format!("{}:{}", spec.key, spec.show(&options)))
                .collect();
            other.apply(&everything.join(",")).unwrap();
            assert_eq!(other, options, "{conf}");
        }
    }

    #[test]
    fn any_text_is_parsed_or_refused_without_panic() {
        let parts = [
            "max_split_size_mb",
            "roundup_power2_divisions",
            "backend",
            ":",
            ":",
            ",",
            "[",
            "]",
            ">",
            "256",
            "0",
            "é",
            " ",
            "True",
            "18446744073709551615",
        ];
        let mut random = Dice(Random(2));
        for _ in 0..50_000 {
            let conf: String = (0..random.below(12))
                .map(|_| parts[usize::try_from(random.below(15)).unwrap()])
                .collect();
            if let Ok(parsed) = Options::parse(&conf) {
                assert_eq!(parse(&parsed.options.to_conf()), parsed.options, "{conf}");
            }
        }
    }

    #[test]
    fn the_tables_agree_with_themselves() {
        let defaults = Options::default();
        for spec in REGISTRY {
            assert_eq!(spec.show(&defaults), spec.default, "{}", spec.key);
            assert!(!is_not_ours(spec.key));
            let doc = spec.doc();
            assert!(doc.contains(&format!(" Default: {}. Worst case: ", spec.default)), "{doc}");
            assert!(doc.ends_with('.') && spec.meaning.ends_with('.'), "{doc}");
        }
        let keys: Vec<_> = known_keys().collect();
        for (at, key) in keys.iter().enumerate() {
            assert!(!keys[..at].contains(key), "{key} is declared twice");
        }
    }

    #[test]
    fn environment_names() {
        let names: Vec<_> = REGISTRY.iter().map(OptionSpec::env_name).collect();
        assert_eq!(names[1], "CUSHION_MAX_SPLIT_SIZE_MB");
        assert!(names.iter().all(|name| name.starts_with("CUSHION_")));
    }

    #[test]
    fn the_page_tells_everything() {
        let page = markdown();
        assert!(page.starts_with("# Options\n"));
        assert!(page.ends_with('\n') && !page.ends_with("\n\n"));
        for spec in REGISTRY {
            let section = format!("\n## {}\n\n{}\n", spec.key, spec.doc());
            for part in [&section, spec.unit, spec.accepts] {
                assert!(page.contains(part), "{}: {part}", spec.key);
            }
        }
        for spec in NOT_OURS {
            assert!(page.contains(&format!("| `{}` | {} |", spec.key, spec.why)), "{}", spec.key);
        }
    }
}
