//! Shared by the tests of the report: runs the command, reads the page, and writes small snapshots
//! as Python's pickle would.

#![allow(dead_code, reason = "each test uses some of it")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// Returns the path of a trace shipped with the sources.
pub(crate) fn trace(name: &str) -> String {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces"));
    folder.join(format!("{name}.pickle.gz")).display().to_string()
}

pub(crate) fn cushion(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_cushion")).args(args).output().expect("cushion runs")
}

/// Returns the page about a trace.
pub(crate) fn page(trace: &str, more: &[&str]) -> String {
    let output = cushion(&[&["report", trace, "-o", "-"], more].concat());
    let talk = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{talk}");
    String::from_utf8(output.stdout).expect("a page is text")
}

/// Returns the figures in a page.
pub(crate) fn figures(page: &str) -> Value {
    let (_, rest) = page.split_once(r#"id="data">"#).expect("the page has figures");
    let (json, _) = rest.split_once("</script>").expect("the figures end");
    serde_json::from_str(json).expect("the figures are JSON")
}

/// Returns two receipts of a run that is too large for its card, a line each: one survived, one
/// refused.
pub(crate) fn receipt_lines() -> (String, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("receipts.jsonl");
    let (trace, to) = (trace("llama_varlen.capped24"), file.display().to_string());
    let args = ["replay", &trace, "--capacity", "24GiB", "--ladder", "graceful"];
    cushion(&[&args[..], &["--policy", "segments", "--receipts", &to]].concat());
    let text = std::fs::read_to_string(file).expect("the receipts are written");
    let line = |line: Option<&str>| line.expect("there are some").to_owned() + "\n";
    (line(text.lines().next()), line(text.lines().last()))
}

/// Writes a snapshot of one device with these events.
pub(crate) fn write_snapshot(path: &Path, events: &[Vec<u8>]) {
    write_with_segments(path, &[], events);
}

/// Does the same, with the segments held at the end.
pub(crate) fn write_with_segments(path: &Path, segments: &[Vec<u8>], events: &[Vec<u8>]) {
    let pickle = [
        dict(&[("segments", list(segments)), ("device_traces", list(&[list(events)]))]),
        b".".to_vec(),
    ];
    std::fs::write(path, pickle.concat()).expect("the snapshot is written");
}

/// Returns a segment of one live block that `function` allocated.
pub(crate) fn segment(address: i64, size: i64, function: &str) -> Vec<u8> {
    let block = dict(&[
        ("size", int(size)),
        ("state", text("active_allocated")),
        ("frames", list(&[frame(function)])),
    ]);
    dict(&[
        ("address", int(address)),
        ("total_size", int(size)),
        ("segment_type", text("large")),
        ("blocks", list(&[block])),
    ])
}

/// Returns an event, with a stack of one frame if `function` names one.
pub(crate) fn event(action: &str, addr: i64, size: i64, function: Option<&str>) -> Vec<u8> {
    let mut items = vec![("action", text(action)), ("addr", int(addr)), ("size", int(size))];
    items.extend(function.map(|function| ("frames", list(&[frame(function)]))));
    dict(&items)
}

fn frame(function: &str) -> Vec<u8> {
    dict(&[("name", text(function)), ("filename", text(function)), ("line", int(7))])
}

fn int(int: i64) -> Vec<u8> {
    [&[0x8a, 8][..], &int.to_le_bytes()].concat()
}

fn text(text: &str) -> Vec<u8> {
    let length = u32::try_from(text.len()).expect("a short text");
    [b"X", &length.to_le_bytes()[..], text.as_bytes()].concat()
}

fn list(values: &[Vec<u8>]) -> Vec<u8> {
    [b"](", &values.concat()[..], b"e"].concat()
}

fn dict(items: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let items: Vec<u8> =
        items.iter().flat_map(|(key, value)| [text(key), value.clone()].concat()).collect();
    [b"}(", &items[..], b"u"].concat()
}
