//! `cushion report`: writes one self-contained HTML page about a trace.
//!
//! The page is a template with three parts inserted: styles, scripts, and the figures as JSON. A
//! trace may contain any names, so the JSON is escaped to contain no markup, and the scripts insert
//! text only as text.

mod data;
mod findings;
mod gather;
mod life;
mod map;
mod series;
mod shortages;
mod sites;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cushion_core::size::display;

use crate::Verdict;
use crate::args::ReportArgs;
use crate::output::Streams;
use crate::trace_files::load::{Loaded, load, short};
use crate::trace_files::save::{self, STANDARD, save};

use data::Report;
use gather::{Request, gather};

const PAGE: &str = include_str!("report/page.html");
const STYLE: &str = include_str!("report/page.css");
/// One script in several files; the last file draws the page with the others.
const SCRIPTS: [&str; 7] = [
    include_str!("report/format.js"),
    include_str!("report/tables.js"),
    include_str!("report/chart.js"),
    include_str!("report/map.js"),
    include_str!("report/life.js"),
    include_str!("report/shortages.js"),
    include_str!("report/page.js"),
];

/// Runs the command.
pub(crate) fn run<O: Write, T: Write>(
    args: &ReportArgs,
    streams: &mut Streams<O, T>,
) -> anyhow::Result<Verdict> {
    let trace = &args.trace;
    // Check before the work: a result that cannot be written is useless.
    let output = args.output.clone().unwrap_or_else(|| default_output(trace));
    let is_standard = output == Path::new(STANDARD);
    if !is_standard {
        let inputs: Vec<&Path> =
            std::iter::once(trace.as_path()).chain(args.receipts.as_deref()).collect();
        save::check(&output, &inputs)?;
    }
    let receipts = args.receipts.as_deref().map(shortages::of_file).transpose()?;
    let mut report = report_on(args, streams).with_context(|| trace.display().to_string())?;
    match receipts {
        Some(none) if none.all == 0 => streams.talk(format_args!("{}: no receipts", none.name)),
        receipts => report.shortages.extend(receipts),
    }
    let page = page(&report)?;
    if is_standard {
        streams.data(format_args!("{}", page.trim_end()));
    } else {
        save(&output, |file| file.write_all(page.as_bytes()))?;
        if let Some(failed) = report.findings.first().filter(|_| !report.to_find_out.is_empty()) {
            // The message also goes to standard error.
            streams.talk(format_args!("{}", failed.text));
            for line in &report.to_find_out {
                streams.talk(format_args!("{line}"));
            }
        }
        let size = display(page.len() as u64);
        streams.talk(format_args!("the report is in {} ({size})", output.display()));
    }
    Ok(Verdict::Fits)
}

fn report_on<O: Write, T: Write>(
    args: &ReportArgs,
    streams: &mut Streams<O, T>,
) -> anyhow::Result<Report> {
    let Loaded { name, snapshot, device, program } = load(&args.trace, args.device, streams)?;
    let request = Request {
        name: if name == "-" { "standard input".to_owned() } else { short(&name) },
        snapshot: &snapshot,
        device,
        program: &program,
        ladder: args.ladder.into(),
        capacity: args.capacity,
    };
    gather(&request, streams)
}

/// Returns the trace's name with `.html`, in the current folder.
fn default_output(trace: &Path) -> PathBuf {
    let name = short(&trace.display().to_string());
    let name = if name == "-" { "report" } else { &name };
    let packed = [".gz", ".zst"].iter().find_map(|end| name.strip_suffix(end));
    let name = packed.unwrap_or(name);
    let stem = [".pickle", ".pkl", ".json", ".cushion", ".csv"]
        .iter()
        .find_map(|end| name.strip_suffix(end));
    PathBuf::from(format!("{}.html", stem.unwrap_or(name)))
}

/// Returns the page.
fn page(report: &Report) -> anyhow::Result<String> {
    let data = escape(&serde_json::to_string(report)?);
    let script = SCRIPTS.concat();
    let mut page = String::with_capacity(PAGE.len() + STYLE.len() + script.len() + data.len());
    let mut rest = PAGE;
    // The template is split at the marks before anything is inserted: an inserted part may contain
    // the text of a mark.
    for (mark, part) in [("/*STYLE*/", STYLE), ("/*DATA*/", &data), ("/*SCRIPT*/", &script)] {
        let (before, after) = rest.split_once(mark).context("the template lacks a mark")?;
        page.push_str(before);
        page.push_str(part);
        rest = after;
    }
    page.push_str(rest);
    Ok(page)
}

/// Escapes JSON so that it contains no markup and cannot end its element.
fn escape(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '<' => escaped.push_str("\\u003c"),
            '>' => escaped.push_str("\\u003e"),
            '&' => escaped.push_str("\\u0026"),
            '\u{2028}' => escaped.push_str("\\u2028"),
            '\u{2029}' => escaped.push_str("\\u2029"),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_is_named_after_the_trace() {
        for (trace, output) in [
            ("/a/run.pickle.gz", "run.html"),
            ("run.pickle", "run.html"),
            ("run.capped24.pkl", "run.capped24.html"),
            ("run.cushion", "run.html"),
            ("log.csv.zst", "log.html"),
            ("run", "run.html"),
            ("-", "report.html"),
        ] {
            assert_eq!(default_output(Path::new(trace)), Path::new(output));
        }
    }

    #[test]
    fn embedded_json_holds_no_markup() {
        let hostile = "</script><!-- & \u{2028}\u{2029}";
        let json = serde_json::to_string(hostile).unwrap();
        let escaped = escape(&json);
        assert!(!escaped.contains(['<', '>', '&', '\u{2028}', '\u{2029}']), "{escaped}");
        let back: String = serde_json::from_str(&escaped).unwrap();
        assert_eq!(back, hostile);
    }

    #[test]
    fn a_mark_in_the_data_is_not_replaced() {
        let report = Report { notes: vec!["/*SCRIPT*/ /*DATA*/".to_owned()], ..Report::default() };
        let page = page(&report).unwrap();
        assert_eq!(page.matches("/*SCRIPT*/ /*DATA*/").count(), 1);
        assert!(page.ends_with("</html>\n"));
    }
}
