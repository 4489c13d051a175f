//! Where a process gets its options from, and what else it can set besides options.
//!
//! A binding passes the caller's arguments and a function that reads the environment; this crate
//! does not read the environment. A later source overrides an earlier one: PyTorch's variable,
//! `CUSHION_CONF`, `CUSHION_POLICY`, the variable of each option, and the caller's arguments.

use thiserror::Error;

use super::conf::pairs;
use super::policy::{Policy, selected_policy};
use super::{NotOurs, Options, OptionsError, REGISTRY};
use crate::base::bytes::parse_bytes;
use crate::options::inject::{Injection, InjectionError};

/// The variables that PyTorch reads, in its order. It reads only the first one that is set.
pub const TORCH_VARIABLES: [&str; 3] =
    ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// One argument of `install`, with its environment variable.
#[derive(Debug, Clone, Copy)]
pub struct SettingSpec {
    /// The name in code: an argument of `install`, or a function of the package.
    pub name: &'static str,
    /// The environment variable.
    pub variable: &'static str,
    /// The default.
    pub default: &'static str,
    /// The accepted values, to complete "it takes ...".
    pub accepts: &'static str,
    /// What it does.
    pub meaning: &'static str,
}

const POLICY: SettingSpec = SettingSpec {
    name: "policy",
    variable: "CUSHION_POLICY",
    default: Options::DEFAULT.policy.name(),
    accepts: "`segments`, `expandable` or `paged`",
    meaning: "How memory is laid out and obtained. `segments` is the layout of PyTorch's classic \
              allocator, `expandable` that of its expandable segments. `paged` maps scattered free \
              pages into one contiguous range. The same as `paged:False`, \
              `expandable_segments:True` and `paged:True` in a conf string.",
};
const CONF: SettingSpec = SettingSpec {
    name: "conf",
    variable: "CUSHION_CONF",
    default: "none",
    accepts: "options as `key:value,key:value`",
    meaning: "Options in one string, in the syntax of `PYTORCH_CUDA_ALLOC_CONF`.",
};
const LOG: SettingSpec = SettingSpec {
    name: "enable_logging",
    variable: "CUSHION_LOG",
    default: "0",
    accepts: "`1` or `0`",
    meaning: "Whether Cushion logs the installation and every refused allocation to standard \
              error, through Python's logger `cushion`.",
};
const SIMULATE: SettingSpec = SettingSpec {
    name: "simulate",
    variable: "CUSHION_SIMULATE",
    default: "none",
    accepts: "a size up to 1 PiB, such as `16GiB`, `8GB` or a number of bytes",
    meaning: "Simulates devices of this size, for experiments and tests without a GPU. The same as \
              `cushion.simulate()`. PyTorch cannot use simulated memory, so `cushion.install()` \
              refuses to run with it.",
};
const RECEIPTS: SettingSpec = SettingSpec {
    name: "receipts",
    variable: "CUSHION_RECEIPTS",
    default: "none",
    accepts: "the path of a file, which is created if it does not exist",
    meaning: "Appends every shortage, survived or refused, to this file as a line of JSON. Several \
              processes may share a file.",
};
const INJECT: SettingSpec = SettingSpec {
    name: "inject",
    variable: "CUSHION_INJECT",
    default: "none",
    accepts: "rules, such as `nth=5` or `every=1000; over=1GiB,fraction=0.01,seed=7`",
    meaning: "Makes allocations fail by these rules, to test how a program handles failures \
              ([inject.md](inject.md)). Each device counts its own allocations.",
};

/// All arguments, in the order in which they are shown.
pub static SETTINGS: &[SettingSpec] = &[POLICY, CONF, LOG, SIMULATE, RECEIPTS, INJECT];

/// The caller's arguments. They override every variable.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    /// The policy, by its name.
    pub policy: Option<String>,
    /// A conf string.
    pub conf: Option<String>,
    /// Whether messages go to standard error.
    pub log: Option<bool>,
    /// The file for receipts; an empty text means no file.
    pub receipts: Option<String>,
    /// Rules for injected failures; an empty text means no rules.
    pub inject: Option<String>,
}

/// The options of a process, and its other arguments, gathered from all sources.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The options of every engine.
    pub options: Options,
    /// Whether messages go to standard error.
    pub log: bool,
    /// The size of each simulated device; `None` uses real devices.
    pub simulate: Option<u64>,
    /// The file for receipts.
    pub receipts: Option<String>,
    /// The rules for injected failures.
    pub inject: Option<Injection>,
    /// Pairs of conf strings that Cushion does not act on.
    pub not_ours: Vec<NotOurs>,
}

/// Why a source is refused, with its name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// A conf string, or the variable of an option, is wrong.
    #[error("{source_name}: {error}")]
    Options {
        /// The argument or variable.
        source_name: String,
        /// The error.
        error: OptionsError,
    },
    /// The rules for injected failures are wrong.
    #[error("{source_name}: {error}")]
    Inject {
        /// The argument or variable.
        source_name: String,
        /// The error.
        error: InjectionError,
    },
    /// Another argument or variable is wrong.
    #[error("{source_name} cannot be `{value}`: it takes {accepts}")]
    Value {
        /// The argument or variable.
        source_name: String,
        /// The value given.
        value: String,
        /// The accepted values.
        accepts: &'static str,
    },
}

impl Settings {
    /// Gathers the options from the caller's arguments and from the environment, which `variable`
    /// reads.
    pub fn gather(
        asked: &Asked,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, SettingsError> {
        let mut gathered = Gathered::default();
        if let Some((name, conf)) = torch_variable(&variable) {
            gathered.add(name, &conf)?;
        }
        if let Some(conf) = variable(CONF.variable) {
            gathered.add(CONF.variable, &conf)?;
        }
        if let Some(policy) = variable(POLICY.variable) {
            gathered.add_policy(POLICY.variable, &policy)?;
        }
        let mut variables = String::new();
        for spec in REGISTRY {
            let name = spec.env_name();
            if let Some(value) = variable(&name) {
                let pair = format!("{}:{value},", spec.key);
                gathered.read(&name, &pair)?;
                variables += &pair;
            }
        }
        // The variables select a policy together, as one string does.
        gathered.choose(&variables);
        if let Some(conf) = &asked.conf {
            gathered.add(CONF.name, conf)?;
        }
        if let Some(policy) = &asked.policy {
            gathered.add_policy(POLICY.name, policy)?;
        }
        let log = match (asked.log, variable(LOG.variable)) {
            (Some(log), _) => log,
            (None, Some(value)) => flag(LOG.variable, &value)?,
            (None, None) => false,
        };
        let given = |spec: &SettingSpec, asked: &Option<String>| {
            let (name, text) = match asked {
                Some(text) => (spec.name, text.clone()),
                None => (spec.variable, variable(spec.variable)?),
            };
            Some((name, text)).filter(|(_, text)| !text.trim().is_empty())
        };
        let inject = given(&INJECT, &asked.inject).map(|(name, text)| {
            let refused = |error| SettingsError::Inject { source_name: name.to_owned(), error };
            text.parse().map_err(refused)
        });
        let inject = inject.transpose()?;
        let receipts = given(&RECEIPTS, &asked.receipts).map(|(_, path)| path);
        let simulate = Self::simulate_of(&variable)?;
        let Gathered { mut options, policy, not_ours, .. } = gathered;
        options.policy = policy;
        Ok(Self { options, log, simulate, receipts, inject, not_ours })
    }

    /// Returns only the size of each simulated device, or `None` for real devices.
    pub fn simulate_of(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<u64>, SettingsError> {
        let size = variable(SIMULATE.variable).filter(|size| !size.trim().is_empty());
        let refused = |size: &str| refused_value(SIMULATE.variable, size, SIMULATE.accepts);
        size.map(|size| parse_bytes(&size).map_err(|_| refused(&size))).transpose()
    }
}

/// Returns the variable that PyTorch reads, and its text.
pub fn torch_variable(variable: impl Fn(&str) -> Option<String>) -> Option<(&'static str, String)> {
    TORCH_VARIABLES.iter().find_map(|&name| Some((name, variable(name)?)))
}

/// Returns a conf string without its pairs of one key. It serves to remove `backend`: PyTorch stops
/// the program if `backend` names another allocator than the one in use.
#[must_use]
pub fn without_key(conf: &str, key: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut depth = 0_i32;
    let mut start = 0;
    for (at, character) in conf.char_indices().chain([(conf.len(), ',')]) {
        match character {
            '[' => depth += 1,
            ']' => depth -= 1,
            ',' if depth <= 0 || at == conf.len() => {
                let item = &conf[start..at];
                if item.split(':').next().is_none_or(|found| found.trim() != key) {
                    kept.push(item);
                }
                start = at + 1;
            }
            _ => {}
        }
    }
    kept.join(",")
}

/// The conf strings so far, joined, and their result. The policy is kept apart, because the last
/// source that names a policy decides.
#[derive(Debug)]
struct Gathered {
    conf: String,
    options: Options,
    policy: Policy,
    not_ours: Vec<NotOurs>,
}

impl Default for Gathered {
    fn default() -> Self {
        let options = Options::DEFAULT;
        let policy = options.policy;
        Self { conf: String::new(), options, policy, not_ours: Vec::new() }
    }
}

impl Gathered {
    fn add(&mut self, source_name: &str, conf: &str) -> Result<(), SettingsError> {
        self.read(source_name, conf)?;
        self.choose(conf);
        Ok(())
    }

    /// Reads everything except the policy.
    fn read(&mut self, source_name: &str, conf: &str) -> Result<(), SettingsError> {
        if conf.trim().is_empty() {
            return Ok(());
        }
        let before = self.conf.trim_end().trim_end_matches(',');
        let both = if before.is_empty() { conf.to_owned() } else { format!("{before},{conf}") };
        let refused = |error| SettingsError::Options { source_name: source_name.to_owned(), error };
        let parsed = Options::parse(&both).map_err(refused)?;
        (self.conf, self.options, self.not_ours) = (both, parsed.options, parsed.not_ours);
        Ok(())
    }

    /// Takes over the policy that a string selects, if it does. The string has been read before.
    fn choose(&mut self, conf: &str) {
        let selected = pairs(conf).ok().and_then(|pairs| selected_policy(&pairs, self.policy));
        self.policy = selected.unwrap_or(self.policy);
    }

    fn add_policy(&mut self, source_name: &str, policy: &str) -> Result<(), SettingsError> {
        let known = Policy::named(policy.trim());
        self.policy = known.ok_or_else(|| refused_value(source_name, policy, POLICY.accepts))?;
        Ok(())
    }
}

fn flag(source_name: &str, value: &str) -> Result<bool, SettingsError> {
    match value.trim() {
        "1" | "true" | "True" | "yes" | "on" => Ok(true),
        "0" | "false" | "False" | "no" | "off" | "" => Ok(false),
        _ => Err(refused_value(source_name, value, LOG.accepts)),
    }
}

fn refused_value(source_name: &str, value: &str, accepts: &'static str) -> SettingsError {
    SettingsError::Value { source_name: source_name.to_owned(), value: value.to_owned(), accepts }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::size::MIB;

    fn gather(asked: Asked, variables: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        Settings::gather(&asked, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn policy_of(asked: Asked, variables: &[(&str, &str)]) -> Policy {
        Policy::of(&gather(asked, variables).unwrap().options)
    }

    #[test]
    fn receipts_and_injected_failures_are_gathered() {
        let variables = [("CUSHION_RECEIPTS", "a.jsonl"), ("CUSHION_INJECT", "every=3")];
        let settings = gather(Asked::default(), &variables).unwrap();
        assert_eq!(settings.receipts.as_deref(), Some("a.jsonl"));
        assert_eq!(settings.inject.unwrap().to_string(), "every=3");
        let asked = Asked {
            receipts: Some(String::new()),
            inject: Some("nth=2".into()),
            ..Asked::default()
        };
        let settings = gather(asked, &variables).unwrap();
        assert_eq!((settings.receipts, settings.inject), (None, Some("nth=2".parse().unwrap())));
        let error = gather(Asked::default(), &[("CUSHION_INJECT", "soon")]).unwrap_err();
        assert!(error.to_string().starts_with("CUSHION_INJECT: `soon` is not a rule"), "{error}");
    }

    #[test]
    fn the_accepted_policies_are_all_policies() {
        let names: Vec<_> = POLICY.accepts.split('`').skip(1).step_by(2).collect();
        assert_eq!(names, Policy::ALL.map(Policy::name));
    }

    #[test]
    fn without_sources_options_are_the_defaults() {
        let settings = gather(Asked::default(), &[]).unwrap();
        assert_eq!(settings.options, Options::default());
        assert_eq!(Policy::of(&settings.options), Policy::Paged);
        assert!(!settings.log && settings.not_ours.is_empty());
        assert_eq!(settings.simulate, None);
    }

    #[test]
    fn a_later_source_overrides_an_earlier_one() {
        let conf = |conf: &str| Asked { conf: Some(conf.to_owned()), ..Asked::default() };
        let policy = |policy: &str| Asked { policy: Some(policy.to_owned()), ..Asked::default() };
        let torch = ("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64");
        assert_eq!(policy_of(Asked::default(), &[torch]), Policy::Expandable);
        let ours = ("CUSHION_CONF", "paged:False");
        assert_eq!(policy_of(Asked::default(), &[torch, ours]), Policy::Segments);
        let variable = ("CUSHION_POLICY", "expandable");
        assert_eq!(policy_of(Asked::default(), &[torch, ours, variable]), Policy::Expandable);
        let of_option = ("CUSHION_PAGED", "False");
        assert_eq!(policy_of(Asked::default(), &[variable, of_option]), Policy::Segments);
        assert_eq!(policy_of(conf("expandable_segments:True"), &[of_option]), Policy::Expandable);
        assert_eq!(policy_of(conf("paged:True"), &[torch, of_option]), Policy::Paged);
        let both =
            Asked { policy: Some("segments".to_owned()), ..conf("expandable_segments:True") };
        assert_eq!(policy_of(both, &[variable]), Policy::Segments);

        // Options of different sources add up.
        let settings = gather(policy("expandable"), &[torch]).unwrap();
        assert_eq!(settings.options.max_split_size, Some(64 * MIB));
    }

    #[test]
    fn expandable_segments_false_keeps_other_policies() {
        let not = ("CUSHION_EXPANDABLE_SEGMENTS", "False");
        let torch = |conf| ("PYTORCH_CUDA_ALLOC_CONF", conf);
        assert_eq!(policy_of(Asked::default(), &[not]), Policy::Paged);
        assert_eq!(
            policy_of(Asked::default(), &[torch("expandable_segments:True"), not]),
            Policy::Paged
        );
        for policy in [Policy::Segments, Policy::Paged] {
            let variable = ("CUSHION_POLICY", policy.name());
            assert_eq!(policy_of(Asked::default(), &[variable, not]), policy);
        }
        let conf = Asked { conf: Some("expandable_segments:False".into()), ..Asked::default() };
        assert_eq!(policy_of(conf, &[("CUSHION_PAGED", "False")]), Policy::Segments);
    }

    #[test]
    fn the_variables_of_both_options_count_as_one_string() {
        let both = |expandable, paged| {
            let variables = [
                ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
                ("CUSHION_EXPANDABLE_SEGMENTS", expandable),
                ("CUSHION_PAGED", paged),
            ];
            policy_of(Asked::default(), &variables)
        };
        assert_eq!(both("True", "True"), Policy::Paged);
        assert_eq!(both("True", "False"), Policy::Expandable);
        assert_eq!(both("False", "True"), Policy::Paged);
        assert_eq!(both("False", "False"), Policy::Segments);
    }

    #[test]
    fn pytorch_reads_the_first_variable_that_is_set() {
        let variables = [
            ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64"),
            ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,backend:native"),
        ];
        let settings = gather(Asked::default(), &variables).unwrap();
        assert_eq!(settings.options.policy, Policy::Expandable);
        assert_eq!(settings.options.max_split_size, None);
        assert_eq!(settings.not_ours.len(), 1);
    }

    #[test]
    fn a_size_simulates_devices() {
        let simulated = |size| gather(Asked::default(), &[("CUSHION_SIMULATE", size)]);
        assert_eq!(simulated("16GiB").unwrap().simulate, Some(16 << 30));
        assert_eq!(simulated(" ").unwrap().simulate, None);
        for bad in ["0", "-1", "2000TiB"] {
            assert!(simulated(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_option_has_a_variable() {
        for spec in REGISTRY {
            let (name, value) = match spec.key {
                "expandable_segments" | "graph_capture_record_stream_reuse" => {
                    (spec.env_name(), "True")
                }
                "paged" => (spec.env_name(), "False"),
                "garbage_collection_threshold" | "per_process_memory_fraction" => {
                    (spec.env_name(), "0.5")
                }
                "skip_rungs" => (spec.env_name(), "borrow+wait"),
                _ => (spec.env_name(), "32"),
            };
            assert!(name.starts_with("CUSHION_"));
            let settings = gather(Asked::default(), &[(&name, value)]).unwrap();
            let nothing = gather(Asked::default(), &[]).unwrap();
            assert_ne!(settings.options, nothing.options, "{name}");
        }
    }

    #[test]
    fn a_refusal_names_its_source() {
        let text = gather(Asked::default(), &[("CUSHION_MAX_SPLIT_SIZE_MB", "3")]).unwrap_err();
        let text = text.to_string();
        assert!(
            text.starts_with("CUSHION_MAX_SPLIT_SIZE_MB: option `max_split_size_mb`"),
            "{text}"
        );
        let asked = Asked { policy: Some("pages".to_owned()), ..Asked::default() };
        let text = gather(asked, &[]).unwrap_err().to_string();
        assert_eq!(text, "policy cannot be `pages`: it takes `segments`, `expandable` or `paged`");
        let text = gather(Asked::default(), &[("CUSHION_LOG", "maybe")]).unwrap_err().to_string();
        assert_eq!(text, "CUSHION_LOG cannot be `maybe`: it takes `1` or `0`");
        let text = gather(Asked::default(), &[("CUSHION_SIMULATE", "large")]).unwrap_err();
        assert!(
            text.to_string().starts_with("CUSHION_SIMULATE cannot be `large`: it takes a size")
        );
        let broken = [("CUSHION_CONF", "max_split_size_mb"), ("CUSHION_POLICY", "segments")];
        assert!(gather(Asked::default(), &broken).is_err());
    }

    #[test]
    fn backend_is_removed_from_a_conf_string() {
        for (conf, left) in [
            ("backend:native", ""),
            ("max_split_size_mb:64, backend : cudaMallocAsync", "max_split_size_mb:64"),
            (
                "backend:native,roundup_power2_divisions:[256:1,>:8]",
                "roundup_power2_divisions:[256:1,>:8]",
            ),
            ("expandable_segments:True", "expandable_segments:True"),
            ("", ""),
        ] {
            assert_eq!(without_key(conf, "backend"), left);
        }
    }
}
