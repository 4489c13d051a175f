//! Measures the speed and the memory of reading snapshots of one gibibyte.
//!
//! The input repeats the events of a shipped trace, with and without stacks, in the form of
//! Python's pickle (protocol 4) and `json.dump`. It is generated while it is read. Each row runs in
//! its own process, so its memory peak (`VmHWM`) is that of the reader plus a few megabytes for the
//! repeated events. The last column is the peak after a replay of the trace.

#![expect(clippy::print_stdout, reason = "the bench's table is its output")]
#![expect(clippy::disallowed_methods, reason = "a bench measures real time")]

use std::io::{self, Read};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use cushion_core::Ladder;
use cushion_trace::{Event, Limits, Program, ReplayConfig, open, read, replay};

/// The approximate length of each file.
const FILE_BYTES: usize = 1 << 30;
/// The number of items that Python appends to a list at once.
const BATCH: usize = 1000;
/// The number of events that are repeated; few enough to take little memory.
const EVENTS: usize = 10_000;
const TRACE: &str = "../../tests/traces/vision_multires.pickle.gz";

const KINDS: [(&str, Write); 4] = [
    ("pickle", |events| pickle(events, false)),
    ("pickle, stacks", |events| pickle(events, true)),
    ("json", |events| json(events, false)),
    ("json, stacks", |events| json(events, true)),
];

type Write = fn(&[Event]) -> Repeated;

fn main() {
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() == Some("--one") {
        let kind = args.next().unwrap_or_default();
        let (_, write) = KINDS.into_iter().find(|(name, _)| *name == kind).expect("a kind of file");
        one(&kind, write);
        return;
    }
    let head = ["file", "unpacked", "events", "speed", "peak memory", "of unpacked", "replayed"];
    let [file, unpacked, events, speed, peak, share, replayed] = head;
    println!(
        "{file:<16} {unpacked:>10} {events:>10} {speed:>10} {peak:>12} {share:>12} {replayed:>10}"
    );
    let this = std::env::current_exe().expect("this program");
    for (kind, _) in KINDS {
        let done = Command::new(&this).args(["--one", kind]).status().expect("a process");
        assert!(done.success(), "{kind}: {done}");
    }
}

#[expect(clippy::cast_precision_loss, reason = "figures for display")]
fn one(kind: &str, write: Write) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(TRACE);
    let trace = open(&path, &Limits::default()).expect("a readable trace");
    let events: Vec<Event> = trace.devices[0].iter().take(EVENTS).collect();
    let file = write(&events);
    drop((trace, events));
    let bytes = file.len() as f64;
    let start = Instant::now();
    let snapshot = read(file, &Limits::default()).expect("a sound file");
    let seconds = start.elapsed().as_secs_f64();
    let peak = peak_memory().map(|peak| peak as f64);
    let program = Program::of(&snapshot, 0);
    let (policy, ladder) = (program.policy, Ladder::Torch);
    let config = ReplayConfig { policy, ladder, capacity: None, options: None };
    replay(&program, &config).expect("a simulated device that works");
    let replayed = peak_memory().map(|peak| peak as f64);
    let share =
        |peak: Option<f64>| peak.map_or("?".to_owned(), |p| format!("{:.1} %", p / bytes * 100.0));
    let megabytes = |bytes: f64| format!("{:.0} MB", bytes / 1e6);
    println!(
        "{kind:<16} {:>10} {:>10} {:>10} {:>12} {:>12} {:>10}",
        megabytes(bytes),
        snapshot.devices[0].len(),
        format!("{:.0} MB/s", bytes / seconds / 1e6),
        peak.map_or("?".to_owned(), megabytes),
        share(peak),
        share(replayed),
    );
}

/// Returns the peak memory of this process, if the system reports it.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}

/// A file with a repeated body.
struct Repeated {
    head: Vec<u8>,
    body: Vec<u8>,
    times: usize,
    tail: Vec<u8>,
    at: usize,
}

impl Repeated {
    fn new(head: Vec<u8>, body: Vec<u8>, tail: &[u8]) -> Self {
        let times = FILE_BYTES / body.len();
        Self { head, body, times, tail: tail.to_vec(), at: 0 }
    }

    fn len(&self) -> usize {
        self.head.len() + self.body.len() * self.times + self.tail.len()
    }
}

impl Read for Repeated {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bodies = self.head.len() + self.body.len() * self.times;
        let rest = match self.at {
            at if at < self.head.len() => &self.head[at..],
            at if at < bodies => &self.body[(at - self.head.len()) % self.body.len()..],
            at => &self.tail[at - bodies..],
        };
        let len = rest.len().min(buffer.len());
        buffer[..len].copy_from_slice(&rest[..len]);
        self.at += len;
        Ok(len)
    }
}

/// The number of distinct frames. Stacks are made of them: some hundred, with common callers.
const FRAMES: usize = 300;

fn frame(number: usize) -> (String, String, usize) {
    let file = format!(
        "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module_{}.py",
        number % 40
    );
    (format!("forward_{number}"), file, 7 * number)
}

fn stack(number: usize) -> impl Iterator<Item = usize> {
    let branch = number / 3 % 25;
    (0..14).map(move |depth| match depth {
        0 => number % 90,
        1..5 => (branch * 7 + depth * 13) % FRAMES,
        _ => FRAMES - depth,
    })
}

fn pickle(events: &[Event], stacks: bool) -> Repeated {
    let mut head = b"\x80\x04}\x94(".to_vec();
    let mut memo = Memo(1);
    let first_frame = put_frames(&mut head, &mut memo);
    // A list of words, so that each has a memo number before the events.
    memo.text(&mut head, "words");
    head.extend_from_slice(b"]\x94(");
    memo.0 += 1;
    let words = ["action", "addr", "size", "stream", "time_us", "frames"]
        .map(|word| memo.text(&mut head, word));
    let mut actions: Vec<(&str, u32)> = Vec::new();
    for event in events {
        let name = event.action.name();
        if !actions.iter().any(|(known, _)| *known == name) {
            actions.push((name, memo.text(&mut head, name)));
        }
    }
    head.push(b'e');
    memo.text(&mut head, "segments");
    head.extend_from_slice(b"]\x94");
    memo.0 += 1;
    memo.text(&mut head, "device_traces");
    head.extend_from_slice(b"]\x94]\x94");
    let mut body = Vec::new();
    for batch in events.as_chunks::<BATCH>().0 {
        body.push(b'(');
        for (number, event) in batch.iter().enumerate() {
            body.extend_from_slice(b"}\x94(");
            get(&mut body, words[0]);
            let action = actions.iter().find(|(name, _)| *name == event.action.name());
            get(&mut body, action.expect("a known action").1);
            let values = [event.addr, event.size, event.stream, event.time_us];
            for (word, value) in words[1..].iter().zip(values) {
                get(&mut body, *word);
                int(&mut body, value);
            }
            if stacks {
                get(&mut body, words[5]);
                body.extend_from_slice(b"]\x94(");
                for frame in stack(number) {
                    get(&mut body, first_frame + u32::try_from(frame).expect("few"));
                }
                body.push(b'e');
            }
            body.push(b'u');
        }
        body.push(b'e');
    }
    Repeated::new(head, body, b"au.")
}

/// Writes all frames before the events; Python writes each at its first use. Returns the memo
/// number of the first frame.
fn put_frames(head: &mut Vec<u8>, memo: &mut Memo) -> u32 {
    memo.text(head, "frame_table");
    head.extend_from_slice(b"]\x94(");
    memo.0 += 1;
    let keys = ["name", "filename", "line"].map(|key| memo.text(head, key));
    let first = memo.0;
    for number in 0..FRAMES {
        let (name, file, line) = frame(number);
        head.extend_from_slice(b"}(");
        for (key, text) in [(keys[0], name), (keys[1], file)] {
            get(head, key);
            head.extend_from_slice(&[0x8c, u8::try_from(text.len()).expect("short")]);
            head.extend_from_slice(text.as_bytes());
        }
        get(head, keys[2]);
        int(head, line as u64);
        head.extend_from_slice(b"u\x94");
        memo.0 += 1;
    }
    head.push(b'e');
    first
}

/// The number of the next entry in the pickle's memo.
struct Memo(u32);

impl Memo {
    /// Writes a text and returns its memo number.
    fn text(&mut self, bytes: &mut Vec<u8>, text: &str) -> u32 {
        bytes.extend_from_slice(&[0x8c, u8::try_from(text.len()).expect("short")]);
        bytes.extend_from_slice(text.as_bytes());
        bytes.push(0x94);
        self.0 += 1;
        self.0 - 1
    }
}

fn get(bytes: &mut Vec<u8>, number: u32) {
    match u8::try_from(number) {
        Ok(number) => bytes.extend_from_slice(&[b'h', number]),
        Err(_) => {
            bytes.push(b'j');
            bytes.extend_from_slice(&number.to_le_bytes());
        }
    }
}

fn int(bytes: &mut Vec<u8>, int: u64) {
    if let Ok(int) = u8::try_from(int) {
        bytes.extend_from_slice(&[b'K', int]);
    } else if let Ok(int) = u16::try_from(int) {
        bytes.push(b'M');
        bytes.extend_from_slice(&int.to_le_bytes());
    } else if let Ok(int) = i32::try_from(int) {
        bytes.push(b'J');
        bytes.extend_from_slice(&int.to_le_bytes());
    } else {
        // The fewest bytes that leave the sign bit clear.
        let len = 8 - int.leading_zeros() as usize / 8
            + usize::from(int.leading_zeros().is_multiple_of(8));
        let wide = u128::from(int).to_le_bytes();
        bytes.extend_from_slice(&[0x8a, u8::try_from(len).expect("short")]);
        bytes.extend_from_slice(&wide[..len]);
    }
}

fn json(events: &[Event], stacks: bool) -> Repeated {
    use std::fmt::Write as _;

    let mut body = String::new();
    for (number, event) in events.iter().enumerate() {
        let Event { action, addr, size, stream, time_us, .. } = event;
        let _ = write!(
            body,
            "{{\"action\": \"{}\", \"addr\": {addr}, \"size\": {size}, \"stream\": {stream}, \
             \"time_us\": {time_us}",
            action.name()
        );
        if stacks {
            let frames: Vec<String> = stack(number)
                .map(|number| {
                    let (name, file, line) = frame(number);
                    format!("{{\"name\": \"{name}\", \"filename\": \"{file}\", \"line\": {line}}}")
                })
                .collect();
            let _ = write!(body, ", \"frames\": [{}]", frames.join(", "));
        }
        body.push_str("}, ");
    }
    let head = b"{\"segments\": [], \"device_traces\": [[".to_vec();
    let last = b"{\"action\": \"snapshot\", \"addr\": 0, \"size\": 0}]]}";
    Repeated::new(head, body.into_bytes(), last)
}
