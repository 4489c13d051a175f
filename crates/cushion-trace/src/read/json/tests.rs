//! Tests of the JSON reader.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::model::event::Action;
use crate::model::snapshot::Snapshot;
use crate::read::limits::Limits;
use crate::read::open::read;
use crate::testing::pickle::PROTOCOL_4;

/// The snapshot of the pickle tests, written by Python's `json.dumps`.
const SNAPSHOT: &str = include_str!("snapshot.json");

fn load(text: impl AsRef<[u8]>) -> Result<Snapshot, TraceError> {
    read(text.as_ref(), &Limits::default())
}

/// Returns the offset of the error, what was expected and what was found.
fn broken(text: impl AsRef<[u8]>) -> (u64, String, String) {
    match load(text) {
        Err(TraceError::Broken { format: Format::Json, offset, expected, found }) => {
            (offset.byte, expected, found)
        }
        other => panic!("{other:?}"),
    }
}

fn value(text: &str) -> Result<(Value, Arena), TraceError> {
    let mut input = text.as_bytes();
    Reader::new(&mut Source::new(&mut input, &Limits::default())).run()
}

fn with_events(events: &str) -> String {
    format!(r#"{{"segments": [], "device_traces": [[{events}]]}}"#)
}

#[test]
fn json_and_pickle_give_the_same_snapshot() {
    let pickle = load(PROTOCOL_4).unwrap();
    assert_eq!(load(SNAPSHOT).unwrap(), pickle);
    let value: serde_json::Value = serde_json::from_str(SNAPSHOT).unwrap_or_default();
    let pretty = serde_json::to_string_pretty(&value).unwrap();
    let dense = serde_json::to_string(&value).unwrap();
    let marked = format!("\u{feff}\r\n\t {dense} \n");
    for text in [pretty, dense, marked] {
        // serde_json sorts keys, which changes the order of stack numbers.
        let read = load(&text).unwrap();
        assert_eq!(read.segments.len(), pickle.segments.len());
        let facts = |snapshot: &Snapshot| -> Vec<_> {
            snapshot.devices[0].iter().map(|e| (e.action, e.addr, e.size, e.pool)).collect()
        };
        assert_eq!(facts(&read), facts(&pickle));
    }
}

#[test]
fn the_size_of_reads_does_not_matter() {
    struct Bits<'a>(&'a [u8], usize);
    impl std::io::Read for Bits<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let len = buffer.len().min(self.1);
            self.0.read(&mut buffer[..len])
        }
    }
    let whole = load(SNAPSHOT).unwrap();
    for size in [1, 2, 3, 7, 100] {
        let read = read(Bits(SNAPSHOT.as_bytes(), size), &Limits::default()).unwrap();
        assert_eq!(read, whole, "{size} bytes at a time");
    }
}

#[test]
fn values_of_every_kind_are_read() {
    let cases = [
        ("0", Value::Int(0)),
        ("-0", Value::Int(0)),
        ("123456789012345678901234567890", Value::Huge),
        ("18446744073709551615", Value::Uint(u64::MAX)),
        ("-9223372036854775808", Value::Int(i64::MIN)),
        ("99999999999999999999", Value::Huge),
        ("999999999999999999", Value::Int(999_999_999_999_999_999)),
        ("9999999999999999999", Value::Uint(9_999_999_999_999_999_999)),
        ("1.5e3", Value::Float(1500.0)),
        ("1E-2", Value::Float(0.01)),
        ("-Infinity", Value::Float(f64::NEG_INFINITY)),
        ("Infinity", Value::Float(f64::INFINITY)),
        ("true", Value::Bool(true)),
        ("false", Value::Bool(false)),
        ("null", Value::None),
    ];
    for (text, expected) in cases {
        assert_eq!(value(text).unwrap().0, expected, "{text}");
    }
    assert!(matches!(value("NaN").unwrap().0, Value::Float(nan) if nan.is_nan()));
    for text in ["01", "-", "1.", ".5", "1e", "1e+", "+1", "1.5.2", "--1", "0x10", "-Inf", "1a"] {
        assert!(value(text).is_err(), "{text}");
    }
}

#[test]
fn escapes_are_decoded() {
    let text = |json: &str| {
        let (value, arena) = value(json).unwrap();
        let Value::Str(id) = value else { panic!("{value:?}") };
        arena.text(id).to_string()
    };
    assert_eq!(text(r#""a\"\\\/\b\f\n\r\t\u00e9""#), "a\"\\/\u{8}\u{c}\n\r\té");
    assert_eq!(text(r#""\ud83d\ude00""#), "😀");
    assert_eq!(text(r#""\ud83dx\ude00\ud83d\ud83d\ude00""#), "\u{fffd}x\u{fffd}\u{fffd}😀");
    let long = "é".repeat(CHUNK);
    assert_eq!(text(&format!("\"{long}\"")), long);
    assert!(load(b"{\"\xff\": 1, \"segments\": [], \"device_traces\": []}").is_ok());
}

#[test]
fn a_key_given_twice_has_its_last_value() {
    let twice = r#"{"action": "oom", "size": 1, "addr": 2, "size": 3, "action": "alloc"}"#;
    let event = load(with_events(twice)).unwrap().devices[0].get(0).unwrap();
    assert_eq!((event.action, event.size), (Action::Alloc, 3));
}

#[test]
fn values_of_unknown_keys_are_not_kept() {
    // Nested, with keys that are known elsewhere.
    let novelty = r#"{"action": [1, {"frames": "x"}], "text": "\u0041\n", "n": null}"#;
    let event = |n: usize| {
        format!(
            r#"{{"action": "alloc", "addr": {n}, "user_metadata": "number {n}", "size": 1,
            "novelty": {novelty}, "pool_id": [0, 0], "frames": [{{"name": "f", "line": 1}}]}}"#
        )
    };
    let events: Vec<String> = (0..1000).map(event).collect();
    let text = with_events(&events.join(","));
    let (_, arena) = value(&text).unwrap();
    assert!(arena.dicts.len() < 10 && arena.lists.len() < 10);
    assert!(arena.held() < 60_000, "{}", arena.held());
    let read = load(&text).unwrap();
    assert!((0..).zip(&read.devices[0]).all(|(n, event)| event.addr == n));
    assert!(read.devices[0].iter().all(|e| e.stack.is_some() && e.pool == Some((0, 0))));
}

#[test]
fn errors_have_offset_expectation_and_finding() {
    let case = |text: &str, offset: u64, expected: &str, found: &str| {
        let told = broken(text);
        assert!(told.1.contains(expected) && told.2.contains(found), "{text}: {told:?}");
        assert_eq!(told.0, offset, "{text}");
    };
    case("{", 1, "a key in quotes or `}`", "the end of the file");
    case("{\"a\"", 4, "a colon", "the end of the file");
    case("{\"a\" 1}", 5, "a colon", "`1`");
    case("{\"a\": 1,}", 8, "a key in quotes", "`}`");
    case("{a: 1}", 1, "a key in quotes", "`a`");
    case("[1, ]", 4, "a value", "`]`");
    case("[1 2]", 3, "a comma or `]`", "`2`");
    case("[1}", 2, "a comma or `]`", "`}`");
    case("{\"a\": 1]", 7, "a comma or `}`", "`]`");
    case("[1, 2", 5, "a comma or `]`", "the end of the file");
    case("[\"ab", 4, "closing quote", "the end of the file");
    case("[\"a\nb\"]", 3, "closing quote", "0x0a");
    case("[\"\\x\"]", 2, "an escape", "`x`");
    case("[\"\\u12g4\"]", 2, "hexadecimal", "12g4");
    case("[trux]", 4, "true", "`x`");
    case("[01]", 1, "a number", "`01`");
    case("[nul", 4, "null", "the end of the file");
    case("[] x", 3, "the end of the file", "`x`");
    case("{}}", 2, "the end of the file", "`}`");
    case("[\u{e9}]", 1, "a value", "0xc3");
}

#[test]
fn nesting_a_million_deep_is_read() {
    let deep = 1_000_000;
    let lists = "[".repeat(deep) + &"]".repeat(deep);
    let dicts = "{\"blocks\":".repeat(deep) + "1" + &"}".repeat(deep);
    let skipped = "{\"x\":".repeat(deep) + "1" + &"}".repeat(deep);
    for text in [lists, dicts, skipped] {
        assert!(value(&text).is_ok());
        assert!(matches!(load(&text), Err(TraceError::Snapshot { .. })));
        let cut = &text[..text.len() - 1];
        assert!(load(cut).is_err());
    }
}

#[test]
fn memory_is_limited() {
    let limits = Limits { memory_bytes: 1 << 20, ..Limits::default() };
    let over = |text: String| {
        let error = read(text.as_bytes(), &limits).expect_err("over the limit");
        assert!(matches!(error, TraceError::Limit { field: "memory_bytes", .. }), "{error}");
    };
    over("[".repeat(200_000));
    over("{\"blocks\":".repeat(100_000));
    over("[".to_owned() + &"[],".repeat(100_000));
    over("[".to_owned() + &"{},".repeat(100_000));
    over(format!("[\"{}\"]", "x".repeat(2 << 20)));
    over(format!("[{}]", "1".repeat(2 << 20)));
    over("{".to_owned() + &(0..50_000).map(|n| format!("\"k{n}\":1,")).collect::<String>());
    // A skipped text can have any length.
    let long =
        format!(r#"{{"segments": [], "device_traces": [], "x": "{}"}}"#, "y".repeat(2 << 20));
    assert!(read(long.as_bytes(), &limits).is_ok());
}

#[test]
fn every_truncated_text_is_an_error() {
    let text = SNAPSHOT.trim_end();
    for len in 0..text.len() {
        assert!(load(&text.as_bytes()[..len]).is_err(), "cut to {len}");
    }
}

/// Tokens that are put together at random.
const TOKENS: &[&str] = &["[", "]", "{", "}", ",", ":", "\"a\"", "1", "-2.5e1", "null", " "];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn damage_never_panics(
        flips in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        tokens in vec(prop::sample::select(br#"[]{},:"\u1e-0x"#.to_vec()), 0..60),
        at in any::<prop::sample::Index>(),
    ) {
        let mut text = SNAPSHOT.as_bytes().to_vec();
        for (place, byte) in flips {
            let place = place.index(text.len());
            text[place] = byte;
        }
        let _ = load(&text);
        let at = at.index(text.len());
        text.splice(at..at, tokens.clone());
        let _ = load(&text);
        let _ = load([b"{".to_vec(), tokens].concat());
    }

    /// This reader and serde_json accept the same texts, except for what Python adds to JSON.
    #[test]
    fn agrees_with_serde_json(
        tokens in vec(prop::sample::select(TOKENS), 0..12),
    ) {
        let text = format!("[{}", tokens.concat());
        let theirs = serde_json::from_str::<serde_json::Value>(&text).is_ok();
        prop_assert_eq!(value(&text).is_ok(), theirs, "{}", text);
    }
}
