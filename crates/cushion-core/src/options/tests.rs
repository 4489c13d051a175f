//! Tests of the options as a whole: each option, strings that combine them, and the tables.

use super::*;
use crate::base::random::Random;
use crate::base::size::MIB;
use crate::options::ladder::Rung;

pub(super) fn parse(conf: &str) -> Options {
    let parsed = Options::parse(conf).unwrap();
    assert_eq!(parsed.not_ours, []);
    parsed.options
}

/// Asserts that each value is refused with an error that names key and value.
pub(super) fn refused(key: &str, values: &[&str]) {
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
fn defaults_are_those_of_pytorch_except_for_the_policy() {
    let options = Options::default();
    assert_eq!(Policy::of(&options), Policy::Paged);
    assert_eq!(options.max_split_size, None);
    assert_eq!(options.max_non_split_rounding, None);
    assert_eq!(options.roundup_power2_divisions, [0; 16]);
    assert_eq!(options.garbage_collection_threshold, 0.0);
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
    // The largest number of whole MiB that fits in 64 bits; larger numbers become this one.
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
fn limits_follow_the_large_segment_size_in_any_order() {
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
    // A size from an earlier string counts too.
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
    refused("garbage_collection_threshold", &["0", "1", "1.0", "-0.1", "nan", "inf", "80%", "off"]);
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
    assert_eq!(parse("expandable_segments:True").policy, Policy::Expandable);
    assert_ne!(parse("expandable_segments:False").policy, Policy::Expandable);
    let key = "graph_capture_record_stream_reuse";
    assert!(parse(&format!("{key}:True")).graph_capture_record_stream_reuse);
    assert!(!parse(&format!("{key}:False")).graph_capture_record_stream_reuse);
    assert_eq!(parse("paged:True").policy, Policy::Paged);
    assert_ne!(parse("paged:False").policy, Policy::Paged);
    for key in ["expandable_segments", "paged", key] {
        refused(key, &["true", "TRUE", "1", "0", "yes", "Truee", "[True]"]);
    }
}

#[test]
fn a_string_selects_a_policy() {
    use Policy::{Expandable, Paged, Segments};

    // The policy afterwards, if it was `segments`, `expandable` or `paged` before.
    let cases = [
        ("", [Segments, Expandable, Paged]),
        ("max_split_size_mb:64", [Segments, Expandable, Paged]),
        ("expandable_segments:True", [Expandable; 3]),
        ("expandable_segments:False", [Segments, Paged, Paged]),
        ("paged:True", [Paged; 3]),
        ("paged:False", [Segments; 3]),
        // Both keys in one string, in either order.
        ("expandable_segments:True,paged:True", [Paged; 3]),
        ("paged:True,expandable_segments:True", [Paged; 3]),
        ("expandable_segments:True,paged:False", [Expandable; 3]),
        ("paged:False,expandable_segments:True", [Expandable; 3]),
        ("expandable_segments:False,paged:True", [Paged; 3]),
        ("paged:False,expandable_segments:False", [Segments; 3]),
        // The last pair of a key counts.
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
            // The printed conf parses to the same options.
            assert_eq!(parse(&options.to_conf()), options, "{conf}");
            Policy::of(&options)
        });
        assert_eq!(found, expected, "{conf}");
    }
}

#[test]
fn the_conf_for_pytorch_names_paged_but_not_segments() {
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
        policy: Policy::Expandable,
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
    // A list starts from the default, not from the value of an earlier string.
    let mut options = parse("roundup_power2_divisions:4");
    options.apply("roundup_power2_divisions:[1:2]").unwrap();
    assert_eq!(options.roundup_power2_divisions[..2], [2, 0]);
}

#[test]
fn reset_of_every_option_is_its_default() {
    let mut options = parse(ALL);
    for spec in REGISTRY {
        assert_ne!(spec.show(&options), spec.default(), "{}", spec.key);
    }
    for spec in REGISTRY {
        (spec.reset)(&mut options);
        assert_eq!(spec.show(&options), spec.default(), "{}", spec.key);
    }
    assert_eq!(options, Options::default());
}

#[test]
fn the_default_of_every_row_is_read_back_as_printed() {
    for spec in REGISTRY {
        let mut options = parse(ALL);
        // The default of an option that resets may have no form in a conf string: the string that
        // does not name the option sets it.
        let conf = match spec.resets {
            true => String::new(),
            false => format!("{}:{}", spec.key, spec.default()),
        };
        options.apply(&conf).unwrap();
        assert_eq!(spec.show(&options), spec.default(), "{conf}");
        assert_eq!(parse(&conf), Options::DEFAULT, "{conf}");
        // The same holds for every other value: each row of `ALL` is printed as it was written.
        let all = parse(ALL);
        let conf = format!("{}:{}", spec.key, spec.show(&all));
        assert!(format!("{ALL},").contains(&format!("{conf},")), "{conf}");
    }
}

#[test]
fn every_row_prints_its_range() {
    let accepts = |key| REGISTRY.iter().find(|spec| spec.key == key).unwrap().accepts;
    assert_eq!(accepts("large_segment_size_mb"), "a whole number of MiB above 10");
    assert_eq!(accepts("page_mb"), "a whole number of MiB from 2 to 1024");
    assert_eq!(accepts("spill_over_mb"), "a whole number of MiB");
    assert_eq!(accepts("wait_base_us"), "a whole number of microseconds above 0");
    assert_eq!(accepts("max_tries"), "a whole number above 0");
    assert_eq!(accepts("wait_factor"), "a number from 1 to 100");
    let names: Vec<_> = accepts("skip_rungs").split('`').skip(7).step_by(2).collect();
    let skippable = Rung::ALL.into_iter().filter(|rung| rung.can_be_skipped());
    assert_eq!(names, skippable.map(Rung::name).collect::<Vec<_>>());
    for (conf, why) in [
        ("large_segment_size_mb:10", "it is not above 10"),
        ("page_mb:1025", "it is not from 2 to 1024"),
        ("max_tries:0", "it is not above 0"),
        ("wait_factor:0.5", "it is not from 1 to 100"),
        ("garbage_collection_threshold:1", "it is not above 0 and below 1"),
    ] {
        let error = Options::parse(conf).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    refused("page_mb", &["0", "1", "1025", "80.0"]);
    refused("wait_factor", &["0.99", "100.1", "nan", "x"]);
    for key in ["wait_base_us", "wait_ceiling_ms", "max_tries"] {
        refused(key, &["0", "-1", "1.5"]);
    }
}

#[test]
fn a_failed_apply_changes_nothing() {
    let before = parse(ALL);
    for tail in ["expandable_segments:no", "max_split_size_mb:1", "nonsense:1", "backend", "a:["] {
        let mut options = before.clone();
        let conf = format!("large_segment_size_mb:11,expandable_segments:False,{tail}");
        assert!(options.apply(&conf).is_err(), "{tail}");
        assert_eq!(options, before, "{tail}");
    }
}

#[test]
fn the_last_of_two_values_wins() {
    let options = parse("max_split_size_mb:64,max_split_size_mb:32,expandable_segments:True,");
    assert_eq!(options.max_split_size, Some(32 * MIB));
    assert_eq!(options.policy, Policy::Expandable);
    // Both values are read, so both must be valid.
    assert!(Options::parse("max_split_size_mb:1,max_split_size_mb:32").is_err());
    // A list after another value changes only the intervals it sets.
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
fn the_message_for_a_bad_value() {
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
    // A default that depends on another option is written once it is set explicitly.
    let explicit = "max_non_split_rounding_mb:20";
    assert_eq!(canonical(explicit), explicit);
}

/// Random options from a fixed seed.
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
        // Applied to other options, a string sets the options it names and those that reset.
        let mut other = random.options();
        let everything: Vec<_> = REGISTRY
            .iter()
            .filter(|spec| !spec.resets || spec.show(&options) != spec.default())
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
fn keys_are_unique_and_descriptions_complete() {
    for spec in REGISTRY {
        assert!(!is_not_ours(spec.key));
        let doc = spec.doc();
        assert!(doc.contains(&format!("\n- Default: {}.\n", spec.default())), "{doc}");
        assert!(doc.contains("\n- Worst case: "), "{doc}");
        for text in [spec.meaning, spec.change, spec.worst_case] {
            assert!(doc.contains(text) && text.ends_with('.'), "{doc}");
        }
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
fn the_page_holds_every_row() {
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
