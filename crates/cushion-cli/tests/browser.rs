//! The report as drawn by Chromium, without a network and without a screen.
//!
//! A copy of the page gets a small script that inspects it and posts its findings to a surrounding
//! page; this program reads them from the browser's dump of that page. It is a program of its own,
//! not a `#[test]`, so that it can print that it is skipped when there is no browser.

mod support;

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use support::{event, figures, page, receipt_lines, trace, write_snapshot};

/// The names of the browser; `scripts/setup-browser.sh` looks for the same.
const BROWSERS: [&str; 5] =
    ["chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome"];

/// Checks reports with a browser; panics if one is wrong.
type Check = fn(&str);

fn main() {
    let Some(browser) = BROWSERS.into_iter().find(|name| runs(name)) else {
        let _ = writeln!(
            io::stderr(),
            "SKIPPED: browser: no Chromium found; scripts/setup-browser.sh installs one"
        );
        return;
    };
    let checks: [(&str, Check); 5] = [
        ("every trace is drawn, and peaks are the table's", traces),
        ("narrow windows do not scroll sideways", narrow),
        ("dark and light differ, and both can be read", schemes),
        ("names in a trace are text", hostile),
        ("a million events are drawn", million),
    ];
    for (name, check) in checks {
        check(browser);
        let _ = writeln!(io::stderr(), "browser: {name} ... ok");
    }
}

fn runs(browser: &str) -> bool {
    let status =
        Command::new(browser).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Returns what the script found in a page, in a window `width` wide.
fn look(browser: &str, page: &str, width: u32, dark: bool) -> Value {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let catch = "<head><script>window.faults = []; window.onerror = (what) => { window.faults.push(what); };\
                 document.addEventListener('securitypolicyviolation', (e) => window.faults.push(e.violatedDirective));</script>";
    let check = format!("<script>{}</script></body>", include_str!("browser.js"));
    let page = page.replacen("<head>", catch, 1);
    let (before, after) = page.rsplit_once("</body>").expect("a page has a body");
    fs::write(at("report.html"), [before, &check, after].concat()).expect("written");
    let around = format!(
        "<!doctype html><meta charset=utf-8><body style='margin:0'><pre id=found></pre>\
         <script>onmessage = (e) => {{ found.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(e.data)))); }};</script>\
         <iframe src=report.html style='border:0;width:{width}px;height:2000px'></iframe>"
    );
    fs::write(at("around.html"), around).expect("written");
    let mut command = Command::new(browser);
    command
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--hide-scrollbars", "--virtual-time-budget=20000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", at("profile").display()));
    if dark {
        command.arg("--blink-settings=preferredColorScheme=0");
    }
    let output = command.arg(format!("file://{}", at("around.html").display())).output();
    let output = output.expect("the browser runs");
    let dump = String::from_utf8_lossy(&output.stdout).into_owned();
    let found = between(&dump, "<pre id=\"found\">", "</pre>").filter(|found| !found.is_empty());
    let found = found.unwrap_or_else(|| {
        panic!("the script posted nothing: {dump}\n{}", String::from_utf8_lossy(&output.stderr))
    });
    serde_json::from_slice(&base64(found)).expect("what was found is JSON")
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    Some(text.split_once(start)?.1.split_once(end)?.0)
}

/// Decodes base 64, which passes through a dump of HTML unchanged.
fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bytes, mut bits, mut held) = (Vec::new(), 0_u32, 0);
    for byte in text.bytes().filter(|&byte| byte != b'=') {
        let digit = DIGITS.iter().position(|&digit| digit == byte).expect("base 64");
        bits = (bits << 6) | u32::try_from(digit).expect("a digit");
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push(u8::try_from((bits >> held) & 0xff).expect("a byte"));
        }
    }
    bytes
}

/// Checks what must hold on every page.
fn sound(found: &Value, what: &str) {
    let none = |key: &str| assert_eq!(found[key], Value::Array(Vec::new()), "{what}: {key}");
    none("errors");
    none("unreachable");
    none("unnamed");
    none("twice");
    none("faint");
    none("wide");
    assert_eq!(found["drawn"], "yes", "{what}");
    assert_eq!(found["silent"], 0, "{what}: pictures without words");
    assert_eq!(found["blank"], 0, "{what}: maps with nothing on them");
    assert_eq!(found["overflow"], 0, "{what}: the page scrolls sideways");
    for key in ["moved", "hides", "walks"] {
        assert_eq!(found[key], true, "{what}: {key}");
    }
    assert_ne!(found["axis"], false, "{what}: the other axis draws the same");
    assert!(found["usable"].as_u64() > Some(15), "{what}: {found}");
    let levels: Vec<u64> = list(&found["levels"]).iter().map(number).collect();
    assert_eq!(levels[0], 1, "{what}");
    assert!(levels.windows(2).all(|pair| pair[1] <= pair[0] + 1), "{what}: {levels:?}");
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

fn number(value: &Value) -> u64 {
    value.as_u64().expect("a number")
}

/// Formats bytes as the page does.
fn display(bytes: u64) -> String {
    cushion_core::size::display(bytes)
}

/// Checks that the highest point drawn is the table's figure, to half a pixel, and that hovering
/// there shows it exactly.
fn peaks(found: &Value, report: &Value, what: &str) {
    let half = found["half"].as_f64().expect("half a pixel");
    let near = |key: &str, bytes: u64| {
        #[expect(clippy::cast_precision_loss, reason = "half a pixel is far more")]
        let off = (found["highest"][key].as_f64().expect("drawn") - bytes as f64).abs();
        assert!(off <= half, "{what}: {key} is {off} bytes off, half a pixel is {half}");
    };
    let reads = |button: String, bytes: u64| {
        let readout = found["readouts"][&button].as_str().unwrap_or_default();
        assert!(readout.contains(&display(bytes)), "{what}: {button}: {readout}");
    };
    for policy in list(&report["policies"]) {
        let name = policy["name"].as_str().expect("a name");
        near(name, number(&policy["reserved_peak"]));
        reads(format!("{name} peak"), number(&policy["reserved_peak"]));
        let text = found["text"].as_str().expect("text");
        assert!(text.contains(&display(number(&policy["reserved_peak"]))), "{what}");
    }
    near("live", number(&report["timeline"]["live_peak"]));
    reads("Live peak".to_owned(), number(&report["timeline"]["live_peak"]));
}

fn traces(browser: &str) {
    for (name, more) in [
        ("graphs_serving", &[][..]),
        ("stream_offload.expandable", &[]),
        ("vision_multires", &[]),
        ("llama_varlen.capped24", &["--capacity", "24GiB"]),
    ] {
        let page = page(&trace(name), more);
        let found = look(browser, &page, 1280, false);
        sound(&found, name);
        let report = figures(&page);
        peaks(&found, &report, name);
        let text = found["text"].as_str().expect("text");
        let told = list(&report["shortages"])
            .iter()
            .all(|run| text.replace('\u{a0}', " ").contains(run["told"].as_str().expect("words")));
        assert!(told, "{name}: every shortage is listed");
        let has_section = text.contains("Shortages\n");
        assert_eq!(has_section, !list(&report["shortages"]).is_empty(), "{name}");
        let lead = found["lead"].as_str().expect("a lead").replace('\u{a0}', " ");
        assert_eq!(report["findings"][0]["text"], *lead, "{name}");
        assert!(found["title"].as_str().is_some_and(|title| title.contains(name)));
    }
}

fn narrow(browser: &str) {
    for (name, more) in
        [("graphs_serving", &[][..]), ("llama_varlen.capped24", &["--capacity", "24GiB"])]
    {
        let page = page(&trace(name), more);
        for width in [360, 700] {
            let found = look(browser, &page, width, false);
            assert_eq!(found["width"], width);
            sound(&found, &format!("{name} at {width}"));
            peaks(&found, &figures(&page), name);
        }
    }
}

fn schemes(browser: &str) {
    let page = page(&trace("graphs_serving"), &[]);
    let [light, dark] = [false, true].map(|dark| look(browser, &page, 1280, dark));
    sound(&dark, "dark");
    assert_ne!(light["background"], dark["background"]);
}

fn hostile(browser: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("<img src=x onerror=hacked=true>.pickle");
    let evil = "</script><script>window.hacked = true</script><img src=x onerror='hacked = true'>";
    let mut events = Vec::new();
    for i in 0..10 {
        events.push(event("alloc", (1 << 40) + (i << 24), 5_000_000, Some(evil)));
    }
    write_snapshot(&path, &events);
    let whose = "<img src=x onerror='hacked = true'>";
    let receipts = folder.path().join("<img src=x onerror=hacked=true>.jsonl");
    let (survived, refused) = receipt_lines();
    let lines = [survived, refused].map(|line| line.replacen("thread 1 (main)", whose, 1));
    fs::write(&receipts, lines.concat()).expect("written");
    let receipts = receipts.display().to_string();
    let page = page(&path.display().to_string(), &["--receipts", &receipts]);
    for width in [360, 1280] {
        let found = look(browser, &page, width, false);
        assert_eq!(found["hacked"], false);
        sound(&found, "hostile");
        let text = found["text"].as_str().expect("text");
        assert!(text.contains(evil), "the name is shown as it is");
        assert!(text.contains("<img src=x onerror=hacked=true>.pickle"));
        assert!(text.contains("<img src=x onerror=hacked=true>.jsonl"));
        assert!(text.contains(whose) && text.contains("fits with policy expandable"));
    }
}

fn million(browser: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("million.pickle");
    write_million(&path);
    let page = page(&path.display().to_string(), &[]);
    let found = look(browser, &page, 1280, false);
    sound(&found, "a million events");
    peaks(&found, &figures(&page), "a million events");
}

/// Writes a trace of a million small blocks, with one large block in the middle.
fn write_million(path: &Path) {
    let mut events = Vec::new();
    let address = |i: i64| (1 << 40) + (i % 1000) * (2 << 20);
    for i in 0..333_000 {
        if i >= 1000 {
            events.push(event("free_requested", address(i), 1 << 20, None));
            events.push(event("free_completed", address(i), 1 << 20, None));
        }
        events.push(event("alloc", address(i), 1 + (i * 7919) % (1 << 20), None));
        if i == 150_000 {
            events.push(event("alloc", 1 << 42, 5 << 30, None));
            events.push(event("free_requested", 1 << 42, 5 << 30, None));
            events.push(event("free_completed", 1 << 42, 5 << 30, None));
        }
    }
    write_snapshot(path, &events);
}
