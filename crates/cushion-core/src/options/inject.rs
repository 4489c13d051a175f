//! Injected failures: they let programs test how they handle a shortage, without one.
//!
//! Off by default. Rules say which allocations fail (the n-th, every n-th, those above a size, a
//! seeded fraction) and how: they are refused outright, or served at a given rung of the ladder.
//! Other rules fail calls of the driver, by kind.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use crate::base::bytes::parse_bytes;
use crate::base::random::Random;
use crate::driver::{Call, Fault};
use crate::options::ladder::Rung;

/// A set of rules for injected failures.
///
/// ```
/// use cushion_core::Injection;
///
/// let injection: Injection = "every=1000; over=1GiB,fraction=0.01,seed=7,at=wait".parse()?;
/// assert_eq!(injection.to_string(), "every=1000; over=1073741824,fraction=0.01,seed=7,at=wait");
/// let faults: Injection = "driver=create,nth=3,fault=oom".parse()?;
/// # Ok::<(), cushion_core::InjectionError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Injection {
    rules: Vec<Rule>,
}

#[derive(Debug, Clone, PartialEq)]
struct Rule {
    what: What,
    when: When,
    dice: Random,
    seed: u64,
    /// How many allocations or calls it has counted.
    seen: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum What {
    /// Allocations of at least `over` bytes, served at the rung `at` or refused outright.
    Allocations { over: u64, at: Option<Rung> },
    /// Calls of the driver.
    Calls { call: Call, fault: Fault },
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum When {
    Always,
    Nth(u64),
    Every(u64),
    Fraction(f64),
}

/// Why a rule cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not a rule for injected failures: {why}. A rule is made of `nth=N`, `every=N` or \
     `fraction=F` with `seed=N`, and `over=SIZE`, `at=RUNG`, or `driver=CALL` with `fault=oom` or \
     `fault=CODE`, separated by commas; rules are separated by `;`"
)]
pub struct InjectionError {
    /// The rule.
    pub text: String,
    /// The reason.
    pub why: String,
}

/// How an allocation is made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Injected {
    /// The rung that serves it; `None` refuses it outright.
    pub(crate) at: Option<Rung>,
}

impl Injection {
    /// Returns whether any rule fails allocations.
    #[must_use]
    pub fn fails_allocations(&self) -> bool {
        self.rules.iter().any(|rule| matches!(rule.what, What::Allocations { .. }))
    }

    /// Returns the rules that fail calls of the driver.
    #[must_use]
    pub fn driver_faults(&self) -> Faults {
        let is_call = |rule: &&Rule| matches!(rule.what, What::Calls { .. });
        Faults { rules: Mutex::new(self.rules.iter().filter(is_call).cloned().collect()) }
    }

    /// Returns the failure of this allocation, if any. Every rule counts every allocation.
    pub(crate) fn strike(&mut self, bytes: u64) -> Option<Injected> {
        let mut struck = None;
        for rule in &mut self.rules {
            if let What::Allocations { over, at } = rule.what
                && bytes >= over
                && rule.strikes()
            {
                struck.get_or_insert(Injected { at });
            }
        }
        struck
    }
}

/// The rules that fail calls of the driver.
#[derive(Debug, Default)]
pub struct Faults {
    rules: Mutex<Vec<Rule>>,
}

impl Faults {
    /// Replaces the rules.
    pub fn replace(&self, other: Self) {
        let rules = other.rules.into_inner().unwrap_or_else(PoisonError::into_inner);
        *self.rules.lock().unwrap_or_else(PoisonError::into_inner) = rules;
    }

    /// Returns whether there are no rules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Returns the failure of this call, if any.
    pub fn strike(&self, call: Call) -> Option<Fault> {
        let mut rules = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
        let mut struck = None;
        for rule in &mut *rules {
            if let What::Calls { call: kind, fault } = rule.what
                && kind == call
                && rule.strikes()
            {
                struck.get_or_insert(fault);
            }
        }
        struck
    }
}

impl Rule {
    fn strikes(&mut self) -> bool {
        self.seen += 1;
        match self.when {
            When::Always => true,
            When::Nth(nth) => self.seen == nth,
            When::Every(nth) => self.seen.is_multiple_of(nth),
            When::Fraction(share) => self.dice.share() < share,
        }
    }
}

impl std::str::FromStr for Injection {
    type Err = InjectionError;

    fn from_str(text: &str) -> Result<Self, InjectionError> {
        let rules = text.split(';').map(str::trim).filter(|rule| !rule.is_empty());
        Ok(Self { rules: rules.map(rule).collect::<Result<_, _>>()? })
    }
}

fn rule(text: &str) -> Result<Rule, InjectionError> {
    let wrong = |why: String| InjectionError { text: text.to_owned(), why };
    let (mut when, mut seed, mut over, mut at) = (None, 0, None, None);
    let (mut call, mut fault) = (None, None);
    for item in text.split(',') {
        let (key, value) = item
            .split_once('=')
            .map(|(key, value)| (key.trim(), value.trim()))
            .ok_or_else(|| wrong(format!("`{}` has no `=`", item.trim())))?;
        let count = || match value.parse::<u64>() {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(wrong(format!("`{value}` is not a whole number above 0"))),
        };
        let given = match key {
            "nth" => Some(When::Nth(count()?)),
            "every" => Some(When::Every(count()?)),
            "fraction" => match value.parse::<f64>() {
                Ok(share) if (0.0..=1.0).contains(&share) => Some(When::Fraction(share)),
                _ => return Err(wrong(format!("`{value}` is not a fraction from 0 to 1"))),
            },
            _ => None,
        };
        if let Some(given) = given {
            if when.replace(given).is_some() {
                return Err(wrong("it has more than one of `nth`, `every`, `fraction`".to_owned()));
            }
            continue;
        }
        match key {
            "seed" => {
                seed = value.parse().map_err(|_| wrong(format!("`{value}` is not a seed")))?;
            }
            "over" => over = Some(parse_bytes(value).map_err(|why| wrong(why.to_string()))?),
            "at" if value == "outright" => at = Some(None),
            "at" => match Rung::named(value) {
                Some(rung) => at = Some(Some(rung)),
                None => return Err(wrong(format!("there is no rung `{value}`"))),
            },
            "driver" => {
                let plain = value.replace('_', "");
                let named = |known: &Call| known.to_string().eq_ignore_ascii_case(&plain);
                let known = Call::ALL.into_iter().find(named);
                let unknown = || wrong(format!("there is no driver call `{value}`"));
                call = Some(known.ok_or_else(unknown)?);
            }
            "fault" if value == "oom" => fault = Some(Fault::OutOfMemory),
            "fault" => match value.parse() {
                Ok(code) => fault = Some(Fault::Failed(code)),
                Err(_) => return Err(wrong(format!("`{value}` is not an error code"))),
            },
            other => return Err(wrong(format!("unknown key `{other}`"))),
        }
    }
    let what = match (call, fault) {
        (Some(_), _) if over.is_some() || at.is_some() => {
            return Err(wrong("`driver` excludes `over` and `at`".to_owned()));
        }
        (Some(call), fault) => What::Calls { call, fault: fault.unwrap_or(Fault::OutOfMemory) },
        (None, Some(_)) => return Err(wrong("`fault` needs `driver`".to_owned())),
        (None, None) => What::Allocations { over: over.unwrap_or(0), at: at.flatten() },
    };
    let filtered = over.is_some() || call.is_some();
    let when = match when {
        Some(when) => when,
        None if filtered => When::Always,
        None => {
            return Err(wrong(
                "it needs `nth`, `every`, `fraction`, `over` or `driver`".to_owned(),
            ));
        }
    };
    Ok(Rule { what, when, dice: Random(seed), seed, seen: 0 })
}

impl fmt::Display for Injection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, rule) in self.rules.iter().enumerate() {
            let mut items = Vec::new();
            match rule.what {
                What::Allocations { over, .. } if over > 0 => {
                    items.push(format!("over={over}"));
                }
                What::Calls { call, fault: Fault::OutOfMemory } => {
                    items.push(format!("driver={call},fault=oom"));
                }
                What::Calls { call, fault: Fault::Failed(code) } => {
                    items.push(format!("driver={call},fault={code}"));
                }
                What::Allocations { .. } => {}
            }
            match rule.when {
                When::Always => {}
                When::Nth(nth) => items.push(format!("nth={nth}")),
                When::Every(nth) => items.push(format!("every={nth}")),
                When::Fraction(share) => items.push(format!("fraction={share},seed={}", rule.seed)),
            }
            if let What::Allocations { at: Some(rung), .. } = rule.what {
                items.push(format!("at={rung}"));
            }
            write!(f, "{}{}", if index == 0 { "" } else { "; " }, items.join(","))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn struck(text: &str, sizes: &[u64]) -> Vec<usize> {
        let mut injection: Injection = text.parse().unwrap();
        let hits = sizes.iter().enumerate().filter(|&(_, &size)| injection.strike(size).is_some());
        hits.map(|(index, _)| index).collect()
    }

    #[test]
    fn rules_strike_when_they_say() {
        let sizes = [1; 9];
        assert_eq!(struck("nth=3", &sizes), [2]);
        assert_eq!(struck("every=4", &sizes), [3, 7]);
        assert_eq!(struck("nth=1; nth=5", &sizes), [0, 4]);
        assert_eq!(struck("over=2KiB", &[100, 2048, 4096]), [1, 2]);
        assert_eq!(struck("over=2KiB,nth=2", &[4096, 100, 4096, 4096]), [2]);
        let many = [1; 10_000];
        let first = struck("fraction=0.1,seed=7", &many);
        assert!((900..1100).contains(&first.len()), "{}", first.len());
        assert_eq!(first, struck("fraction=0.1,seed=7", &many), "exact by seed");
        assert_ne!(first, struck("fraction=0.1,seed=8", &many));
        assert_eq!(struck("fraction=0", &many), [0; 0]);
    }

    #[test]
    fn driver_calls_fail_by_kind() {
        let injection: Injection =
            "driver=alloc,nth=2; driver=set_access,fault=719".parse().unwrap();
        assert!(!injection.fails_allocations());
        let faults = injection.driver_faults();
        assert_eq!(faults.strike(Call::Alloc), None);
        assert_eq!(faults.strike(Call::SetAccess), Some(Fault::Failed(719)));
        assert_eq!(faults.strike(Call::Alloc), Some(Fault::OutOfMemory));
        assert_eq!(faults.strike(Call::Alloc), None);
    }

    #[test]
    fn parse_errors_say_why() {
        for (text, why) in [
            ("often", "`often` has no `=`"),
            ("nth=0", "`0` is not a whole number above 0"),
            ("nth=1,every=2", "it has more than one of"),
            ("fraction=2", "`2` is not a fraction from 0 to 1"),
            ("nth=1,at=roof", "there is no rung `roof`"),
            ("driver=fly", "there is no driver call `fly`"),
            ("driver=alloc,at=wait", "`driver` excludes `over` and `at`"),
            ("nth=1,fault=oom", "`fault` needs `driver`"),
            ("seed=3", "it needs `nth`, `every`, `fraction`, `over` or `driver`"),
            ("nth=1,colour=red", "unknown key `colour`"),
        ] {
            let error = text.parse::<Injection>().unwrap_err();
            assert!(error.why.starts_with(why), "{text}: {error}");
        }
        assert_eq!("".parse::<Injection>().unwrap(), Injection::default());
    }
}
