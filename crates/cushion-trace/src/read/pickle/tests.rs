//! Tests of the pickle machine.

use proptest::collection::vec;
use proptest::prelude::*;

use super::text::unescape;
use super::*;
use crate::model::event::{Action, Event};
use crate::model::snapshot::{BlockState, Snapshot};
use crate::read::limits::Limits;
use crate::read::open::read;
use crate::read::python::arena::List;
use crate::testing::pickle::{
    PROTOCOL_0, PROTOCOL_1, PROTOCOL_2, PROTOCOL_4, dict, int, list, snapshot, text, top,
};

/// Returns the same snapshot under every protocol. Protocols 2 and 3 differ only in their header,
/// as do 4 and 5.
fn pickles() -> [Vec<u8>; 6] {
    let [mut three, mut five] = [PROTOCOL_2.to_vec(), PROTOCOL_4.to_vec()];
    (three[1], five[1]) = (3, 5);
    [
        PROTOCOL_0.to_vec(),
        PROTOCOL_1.to_vec(),
        PROTOCOL_2.to_vec(),
        three,
        PROTOCOL_4.to_vec(),
        five,
    ]
}

fn load(pickle: &[u8]) -> Result<Snapshot, TraceError> {
    read(pickle, &Limits::default())
}

fn value(pickle: &[u8]) -> Result<Value, TraceError> {
    let mut input = pickle;
    let mut source = Source::new(&mut input, &Limits::default());
    Machine::new(&mut source).run().map(|(value, _)| value)
}

/// Returns the error of a broken pickle.
fn error(pickle: &[u8]) -> TraceError {
    value(pickle).expect_err("this pickle is broken")
}

/// Returns the offset of an error.
fn at(error: &TraceError) -> u64 {
    let TraceError::Broken { offset, .. } = error else { panic!("{error}") };
    offset.byte
}

fn alloc() -> Vec<(&'static str, Vec<u8>)> {
    vec![("action", text("alloc")), ("addr", int(512)), ("size", int(100))]
}

#[test]
fn all_protocols_give_the_same_snapshot() {
    let read: Vec<_> = pickles().iter().map(|pickle| load(pickle).unwrap()).collect();
    assert!(read.iter().all(|snapshot| *snapshot == read[0]));

    let [ref events, ref none] = read[0].devices[..] else { panic!("two devices") };
    assert!(none.is_empty());
    let start = 1_794_709_563_093_091;
    let facts: Vec<_> =
        events.iter().map(|e| (e.action, e.addr, e.size, e.stream, e.time_us - start)).collect();
    assert_eq!(
        facts,
        [
            (Action::SegmentAlloc, 1 << 47, 2 << 20, 0, 0),
            (Action::Alloc, 1 << 47, 500, u64::MAX, 1),
            (Action::FreeRequested, 1 << 47, 500, (1 << 63) + 5, 2),
            (Action::FreeCompleted, 1 << 47, 500, 0, 3),
            (Action::Oom, 12_345_678_901, 300, 0, 4),
        ]
    );
    let pools: Vec<_> = events.iter().map(|e| e.pool).collect();
    assert_eq!(pools, [Some((0, 0)), Some((3, 70_000)), None, None, None]);

    let stacks = &read[0].stacks;
    assert_eq!(events.get(0).unwrap().stack, None);
    assert_eq!(events.get(1).unwrap().stack, events.get(2).unwrap().stack, "the same list");
    assert_eq!(events.get(1).unwrap().stack, events.get(3).unwrap().stack, "an equal list");
    let lines = |event: &Event| -> Vec<_> {
        let frames = stacks.frames(event.stack.unwrap());
        frames.map(|f| (f.name.to_string(), f.filename.to_string(), f.line)).collect()
    };
    let step = ("step".to_owned(), "trén.py".to_owned(), 88);
    let module = ("<module>".to_owned(), "trén.py".to_owned(), 144);
    assert_eq!(lines(&events.get(1).unwrap()), [step, module.clone()]);
    assert_eq!(lines(&events.get(4).unwrap()), [module]);

    let [ref segment] = read[0].segments[..] else { panic!("one segment") };
    assert!(!segment.large && segment.total_size == 2 << 20);
    assert_eq!(segment.blocks[0].state, BlockState::Allocated);
    assert_eq!(segment.blocks[1].address, (1 << 47) + 512);
    assert_eq!(read[0].settings.conf.as_deref(), Some("x:1"));
    assert_eq!(read[0].settings.roundup_power2_divisions, Some(vec![(1, 0), (2, 4)]));
}

#[test]
fn numbers_of_every_kind_are_read() {
    let cases: [(&[u8], Value); 17] = [
        (b"K\xff.", Value::Int(255)),
        (b"M\xff\xff.", Value::Int(65_535)),
        (b"J\xff\xff\xff\xff.", Value::Int(-1)),
        (b"\x8a\x00.", Value::Int(0)),
        (b"\x8a\x01\x80.", Value::Int(-128)),
        (b"\x8a\x02\xff\x00.", Value::Int(255)),
        (b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80.", Value::Int(i64::MIN)),
        (b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00.", Value::Uint(u64::MAX)),
        (b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\xff.", Value::Int(-1)),
        (b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01.", Value::Huge),
        (b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\xff.", Value::Huge),
        (b"\x8b\x01\x00\x00\x00\x07.", Value::Int(7)),
        (b"I-5\n.", Value::Int(-5)),
        (b"I01\n.", Value::Bool(true)),
        (b"L18446744073709551615L\n.", Value::Uint(u64::MAX)),
        (b"L-18446744073709551615L\n.", Value::Huge),
        (b"F-2.5e3\n.", Value::Float(-2500.0)),
    ];
    for (pickle, expected) in cases {
        assert_eq!(value(pickle).unwrap(), expected, "{pickle:?}");
    }
    for pickle in [&b"I\n."[..], b"Ix\n.", b"L--1L\n.", b"Fx\n.", b"\x8b\xff\xff\xff\xff."] {
        assert!(at(&error(pickle)) == 0, "{pickle:?}");
    }
}

#[test]
fn the_memo_may_be_sparse() {
    // Writes entry 4,294,967,295 and reads it back. No table grows to that length.
    let pickle = b"K\x05r\xff\xff\xff\xff0K\x06j\xff\xff\xff\xff.";
    assert_eq!(value(pickle).unwrap(), Value::Int(5));
    // MEMOIZE counts entries, as in Python, and later entries replace earlier ones.
    assert_eq!(value(b"K\x05q\x010K\x06\x940K\x07h\x01.").unwrap(), Value::Int(6));
    assert_eq!(value(b"K\x05p99999999999\n0g99999999999\n.").unwrap(), Value::Int(5));
    assert!(error(b"h\x00.").to_string().contains("byte 0"));
}

#[test]
fn invalid_text_is_replaced() {
    assert_eq!(unescape(br"a\u00e9\U0001f600\ud800\q\u12"), "aé😀\u{fffd}\\q\\u12");
    // A lone surrogate, which Python allows.
    assert!(matches!(value(b"\x8c\x03\xed\xa0\x80.").unwrap(), Value::Str(_)));
    let long = "x".repeat(3 * CHUNK);
    assert!(matches!(value(&[text(&long), vec![op::STOP]].concat()), Ok(Value::Str(_))));
}

#[test]
fn pop_removes_marks_and_values() {
    assert_eq!(value(b"K\x01(0.").unwrap(), Value::Int(1));
    assert_eq!(value(b"K\x01(K\x02K\x031.").unwrap(), Value::Int(1));
    assert_eq!(value(b"K\x01K\x020.").unwrap(), Value::Int(1));
    assert_eq!(value(b"K\x012\x86.").unwrap().kind(), "a tuple");
    assert_eq!(value(b"C\x02ab.").unwrap(), Value::Bytes);
}

#[test]
fn stack_faults_are_errors() {
    let broken: [&[u8]; 15] = [
        b".",
        b"0",
        b"1",
        b"2",
        b"a",
        b"e",
        b"s",
        b"u",
        b"t",
        b"\x85",
        b"\x94",
        b"K\x01(.",
        b"](K\x01a",
        b"}(K\x01u",
        b"}K\x01K\x02(s",
    ];
    for pickle in broken {
        assert!(matches!(error(pickle), TraceError::Broken { .. }), "{pickle:?}");
    }
}

#[test]
fn opcodes_that_run_code_are_refused() {
    let shell = error(b"\x80\x02cos\nsystem\n\x8c\x02ls\x85R.");
    assert!(matches!(shell, TraceError::Code { offset: 2, opcode: "GLOBAL" }), "{shell}");
    let opcodes = b"ciobRPQ\x81\x82\x83\x84\x92\x93";
    for &opcode in opcodes {
        assert!(matches!(error(&[b'N', opcode]), TraceError::Code { offset: 1, .. }));
    }
    for opcode in [b'S', 0x8f, 0x97, 0, 0xff] {
        assert!(at(&error(&[opcode])) == 0);
    }
}

#[test]
fn every_cut_is_an_error() {
    for pickle in pickles() {
        for len in 0..pickle.len() {
            assert!(load(&pickle[..len]).is_err(), "cut to {len}");
        }
    }
}

#[test]
fn a_length_beyond_the_file_is_an_error() {
    for opcode in [op::BINUNICODE8, op::BINBYTES8] {
        let error = error(&[&[opcode][..], &(1_u64 << 60).to_le_bytes(), b"abc"].concat());
        let TraceError::Broken { offset, expected, found, .. } = error else { panic!("{error}") };
        assert_eq!((offset.byte, &found[..]), (12, "the end of the file"));
        assert_eq!(expected, format!("{} more bytes", (1_u64 << 60) - 3));
    }
}

#[test]
fn nesting_a_million_deep_is_read() {
    let deep = 1_000_000;
    let nested = [vec![op::EMPTY_LIST; deep], vec![op::APPEND; deep - 1]].concat();
    let tuples = [vec![op::EMPTY_TUPLE], vec![op::TUPLE1; deep]].concat();
    let dicts = [b"}N".repeat(deep), vec![op::NONE], vec![op::SETITEM; deep]].concat();
    for mut pickle in [nested, tuples, dicts] {
        pickle.push(op::STOP);
        assert!(value(&pickle).is_ok());
        assert!(matches!(load(&pickle), Err(TraceError::Snapshot { .. })));
    }
}

#[test]
fn an_event_cannot_be_referred_to_again() {
    // The dict is memoised, appended, and referred to again.
    let event = [dict(&alloc()), vec![op::BINPUT, 0]].concat();
    let again = snapshot(&[event.clone(), vec![op::APPENDS, op::MARK, op::BINGET, 0]]);
    let error = load(&again).expect_err("the dict is gone");
    let at = again.iter().rposition(|&byte| byte == op::BINGET).unwrap() as u64;
    assert!(self::at(&error) == at, "{error}");
    // Also after another event reused its slot, and if it is duplicated on the stack.
    let later = [vec![op::APPENDS, op::MARK], dict(&alloc()), vec![op::BINGET, 0]].concat();
    assert!(load(&snapshot(&[event.clone(), later])).is_err());
    assert!(load(&snapshot(&[event, vec![op::DUP]])).is_err());
    // A list of events accepts only events.
    assert!(load(&snapshot(&[dict(&alloc()), int(1)])).is_err());
    assert!(load(&snapshot(&[dict(&alloc()), dict(&[])])).is_err());
}

#[test]
fn an_event_can_be_filled_key_by_key() {
    // `action` last; no known writer does this.
    let mut late = vec![op::EMPTY_DICT];
    for (key, value) in alloc().iter().rev() {
        late.extend([text(key), value.clone(), vec![op::SETITEM]].concat());
    }
    let twice = [dict(&alloc()), text("size"), int(7), vec![op::SETITEM]].concat();
    let events = &load(&snapshot(&[late, twice])).unwrap().devices[0];
    assert_eq!(
        (events.get(0).unwrap().action, events.get(0).unwrap().addr, events.get(0).unwrap().size),
        (Action::Alloc, 512, 100)
    );
    assert_eq!(events.get(1).unwrap().size, 7);
}

#[test]
fn slots_of_events_are_reused() {
    let one = [vec![op::MARK], dict(&alloc()), vec![op::APPENDS]].concat();
    let pickle = [vec![op::EMPTY_LIST], one.repeat(1000), vec![op::STOP]].concat();
    let mut input = &pickle[..];
    let mut source = Source::new(&mut input, &Limits::default());
    let (_, arena) = Machine::new(&mut source).run().unwrap();
    assert_eq!(arena.dicts.len(), 1);
    assert!(matches!(&arena.lists[0].holds, List::Events(events) if events.len() == 1000));
}

#[test]
fn slots_of_values_in_events_are_reused() {
    // Each event has its own list of frames, pool and unknown value, all in the memo, as Python
    // writes them.
    let memo = vec![op::MEMOIZE];
    let frame = dict(&[("name", text("f")), ("line", int(1))]);
    let event = |n: i64| {
        let frames = [list(&[[frame.clone(), memo.clone()].concat()]), memo.clone()].concat();
        let pool = [list(&[int(0), int(n % 3)]), memo.clone()].concat();
        let novelty = [list(&[dict(&[("deep", list(&[]))])]), memo.clone()].concat();
        let more = [("frames", frames), ("pool_id", pool), ("novelty", novelty)];
        [dict(&[&alloc()[..], &more].concat()), memo.clone()].concat()
    };
    let one = |n| [vec![op::MARK], event(n), vec![op::APPENDS]].concat();
    let all: Vec<u8> = (0..1000).flat_map(one).collect();
    let pickle = [vec![op::EMPTY_LIST], all, vec![op::STOP]].concat();
    let mut input = &pickle[..];
    let mut source = Source::new(&mut input, &Limits::default());
    let (_, arena) = Machine::new(&mut source).run().unwrap();
    assert!(arena.dicts.len() < 10 && arena.lists.len() < 10);
    assert!(arena.held() < 60_000, "{}", arena.held());
    let List::Events(events) = &arena.lists[0].holds else { panic!("no events") };
    assert!(events.iter().zip(0..).all(|(event, n)| event.pool == Some((0, n % 3))));
    assert!(events.iter().all(|event| event.stack == events.get(0).unwrap().stack));
}

#[test]
fn values_of_events_can_be_referred_to_again() {
    // Frames, a frame, an empty list, a pool and an unknown value: written in the first event,
    // referred to by the memo in the second.
    let put = |value: Vec<u8>, n: u8| [value, vec![op::BINPUT, n]].concat();
    let frame = put(dict(&[("name", text("f"))]), 0);
    let parts = [
        ("frames", put(list(&[frame]), 1)),
        ("pool_id", put(list(&[int(1), int(2)]), 2)),
        ("novelty", put(list(&[put(dict(&[]), 3)]), 4)),
    ];
    let get = |n: u8| vec![op::BINGET, n];
    let again = [("frames", get(1)), ("pool_id", get(2)), ("novelty", list(&[get(3), get(4)]))];
    let own = [("frames", list(&[get(0)])), ("pool_id", get(2)), ("novelty", get(4))];
    let event = |more: &[(&str, Vec<u8>)]| dict(&[&alloc()[..], more].concat());
    let events = load(&snapshot(&[event(&parts), event(&again), event(&own)])).unwrap();
    let first = events.devices[0].get(0).unwrap();
    assert!(first.stack.is_some() && first.pool == Some((1, 2)));
    assert!(events.devices[0].iter().all(|event| event == first));
    // A skipped value cannot be used as frames.
    let late = [&alloc()[..], &[("frames", get(4))]].concat();
    let error = load(&snapshot(&[event(&parts), dict(&late)])).expect_err("no frames");
    assert!(error.to_string().contains("a value that was skipped before"), "{error}");
}

#[test]
fn memory_is_limited() {
    let limits = Limits { memory_bytes: 1 << 20, ..Limits::default() };
    let many = |opcode: &[u8]| opcode.repeat(200_000);
    for pickle in [many(b"]"), many(b"}"), many(b"N"), many(b"("), many(b")"), many(b"]Na")] {
        let error =
            read(&[&b"\x80\x04"[..], &pickle].concat()[..], &limits).expect_err("over the limit");
        assert!(matches!(error, TraceError::Limit { field: "memory_bytes", .. }), "{error}");
    }
    let long = [b"\x80\x04".to_vec(), text(&"x".repeat(2 << 20))].concat();
    let long = read(&long[..], &limits).expect_err("over the limit");
    assert!(matches!(long, TraceError::Limit { field: "memory_bytes", .. }), "{long}");
}

#[test]
fn frames_of_a_wrong_type_are_errors() {
    for (frames, found) in [(int(1), "`frames` is an int"), (list(&[int(1)]), "a frame is an int")]
    {
        let mut items = alloc();
        items.push(("frames", frames));
        let error = load(&snapshot(&[dict(&items)])).expect_err("no frames");
        assert!(error.to_string().contains(found), "{error}");
    }
    // Frames that contain themselves, and a list used both as frames and as events.
    let own = b"}\x94(\x8c\x06action\x8c\x05alloc\x8c\x06frames](h\x00eu.";
    assert!(value(own).is_ok());
    let both = [list(&[dict(&[])]), vec![op::BINPUT, 0]].concat();
    let event = dict(&[&alloc()[..], &[("frames", both)]].concat());
    let traces = list(&[list(&[event]), vec![op::BINGET, 0]]);
    let error = load(&top(&[("segments", list(&[])), ("device_traces", traces)]));
    assert!(error.expect_err("frames, not events").to_string().contains("device_traces[1]"));
}

/// Opcodes that change the stack and the memo, and small operands.
const OPCODES: &[u8] = b"()[]}{012.NaesudltqhKX\x85\x86\x87\x88\x94\x8a\x00\x01\x02\x03";

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn damage_never_panics(
        which in 0..6_usize,
        flips in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        keep in any::<prop::sample::Index>(),
        cut in prop::bool::weighted(0.2),
    ) {
        let mut pickle = pickles()[which].clone();
        for (place, byte) in flips {
            let place = place.index(pickle.len());
            pickle[place] = byte;
        }
        if cut {
            pickle.truncate(keep.index(pickle.len()));
        }
        let _ = load(&pickle);
    }

    #[test]
    fn random_opcodes_never_panic(
        codes in vec(prop::sample::select(OPCODES), 0..80),
    ) {
        let _ = load(&[&b"\x80\x04"[..], &codes].concat());
        // On top of a dict that looks like an event, in a list.
        let event = b"]\x94}\x94(\x8c\x06action\x8c\x05alloc\
            \x8c\x04addrK\x01\x8c\x04sizeK\x01u";
        let _ = load(&[&event[..], &codes].concat());
    }
}
