//! The bodies of the fuzz targets, shared with the short run in
//! `crates/cushion-trace/tests/fuzz.rs`.

use cushion_trace::{Limits, Program, read, read_receipts};

/// The targets: one for each reader, and `open`, which also detects the format.
#[allow(dead_code, reason = "a target uses only its own name")]
pub(crate) const TARGETS: [&str; 6] = ["pickle", "json", "rmm", "own", "open", "receipts"];

/// Small limits, so that a finding is a bug of the reader and not a lack of memory.
const LIMITS: Limits = Limits { unpacked_bytes: 4 << 20, memory_bytes: 32 << 20 };

/// Longer traces are read but not made into programs.
const MAX_EVENTS: usize = 20_000;

/// Runs one target.
pub(crate) fn run(target: &str, bytes: &[u8]) {
    if target == "receipts" {
        return receipts(bytes);
    }
    // The target of a reader prepends the start of its format, so that detection chooses the
    // reader.
    let start: &[u8] = match target {
        "pickle" if bytes.first() != Some(&0x80) => b"\x80\x04",
        "json" if !matches!(bytes.first(), Some(b'{' | b'[')) => b"{",
        "rmm" if !bytes.starts_with(b"Thread,") => b"Thread,Time,Action,Pointer,Size,Stream\n",
        "own" if !bytes.starts_with(b"CUSHION\x01") => b"CUSHION\x01",
        _ => b"",
    };
    match read(&[start, bytes].concat()[..], &LIMITS) {
        Ok(snapshot) => {
            for (device, events) in snapshot.devices.iter().enumerate() {
                for event in events {
                    if let Some(stack) = event.stack {
                        snapshot.stacks.frames(stack).for_each(drop);
                    }
                }
                if events.len() <= MAX_EVENTS {
                    drop(Program::of(&snapshot, device));
                }
            }
        }
        Err(error) => {
            let told = error.to_string();
            assert!(!told.is_empty() && !told.contains('\n'), "not one line: {told:?}");
        }
    }
}

fn receipts(bytes: &[u8]) {
    match read_receipts(bytes) {
        Ok(receipts) => {
            let told = receipts.latest.iter().map(ToString::to_string);
            drop((told.collect::<Vec<_>>(), receipts.tally.to_string()));
        }
        Err(error) => {
            let told = error.to_string();
            assert!(!told.is_empty() && !told.contains('\n'), "not one line: {told:?}");
        }
    }
}
