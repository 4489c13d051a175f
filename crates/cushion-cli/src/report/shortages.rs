//! Shortages for the page: those of each replay, and those of a recorded file of receipts.
//!
//! A file of receipts may contain anything: its texts are truncated here, and escaped like all
//! others.

use std::cmp::Reverse;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::Context as _;
use cushion_core::{Ended, Policy, Receipt, Rung};
use cushion_trace::{Outcome, read_receipts};

use crate::shortages::remedies;
use crate::trace_files::load::short;

use super::data::{LiveGroup, RungTried, ShortageRow, Shortages};

/// Receipts shown for each run.
const MOST_ROWS: usize = 50;
/// Groups of live allocations shown for each receipt.
const MOST_GROUPS: usize = 3;
/// Callback answers shown for each receipt.
const MOST_ANSWERS: usize = 4;
/// Characters of a name.
const MOST_NAME: usize = 80;
/// Characters of a callback's answer, and of the place of a request.
const MOST_TEXT: usize = 120;

/// Returns the shortages of a replay, if it had any.
pub(crate) fn of_replay(policy: Policy, outcome: &Outcome) -> Option<Shortages> {
    let receipts: Vec<&Receipt> = outcome.receipts.iter().map(|receipt| &**receipt).collect();
    (!receipts.is_empty()).then(|| Shortages {
        name: policy.name().to_owned(),
        told: outcome.tally.to_string(),
        rows: rows(&receipts),
        all: outcome.tally.shortages,
        ..Shortages::default()
    })
}

/// Returns the shortages of another run, from its file of receipts.
pub(crate) fn of_file(path: &Path) -> anyhow::Result<Shortages> {
    let name = path.display().to_string();
    let file = File::open(path).with_context(|| name.clone())?;
    let read = read_receipts(BufReader::new(file)).with_context(|| name.clone())?;
    let receipts: Vec<&Receipt> = read.latest.iter().collect();
    Ok(Shortages {
        name: short(&name),
        from_file: true,
        told: read.tally.to_string(),
        rows: rows(&receipts),
        all: read.tally.shortages,
        torn: read.torn,
    })
}

/// Returns the rows to show, in order: the first refusals, and the latest shortages.
fn rows(receipts: &[&Receipt]) -> Vec<ShortageRow> {
    let mut shown: Vec<usize> = (0..receipts.len()).collect();
    shown.sort_by_key(|&index| (receipts[index].outcome.is_survived(), Reverse(index)));
    shown.truncate(MOST_ROWS);
    shown.sort_unstable();
    shown.into_iter().map(|index| row(receipts[index])).collect()
}

fn row(receipt: &Receipt) -> ShortageRow {
    let rungs = receipt.shortage.tried.iter().take(Rung::ALL.len()).map(|tried| RungTried {
        rung: tried.rung.name(),
        ended: tried.ended.text(),
        in_vain: tried.ended == Ended::Nothing && tried.won == 0,
        won: tried.won,
        ms: tried.took.as_secs_f64() * 1e3,
    });
    let groups = receipt.groups.iter().take(MOST_GROUPS);
    let groups = groups.map(|group| LiveGroup {
        each: group.each,
        count: group.count,
        bytes: group.bytes,
        at: group.stack.first().map(|frame| frame.chars().take(MOST_TEXT).collect()),
    });
    let answers = receipt.answers.iter().take(MOST_ANSWERS);
    let answers = answers.map(|answer| answer.to_string().chars().take(MOST_TEXT).collect());
    ShortageRow {
        number: receipt.number,
        device: receipt.device,
        who: receipt.who.chars().take(MOST_NAME).collect(),
        requested: receipt.shortage.requested,
        outcome: receipt.outcome.text(),
        survived: receipt.outcome.is_survived(),
        injected: receipt.shortage.injected,
        ms: receipt.took.as_secs_f64() * 1e3,
        rungs: rungs.collect(),
        answers: answers.collect(),
        remedies: remedies(receipt),
        groups: groups.collect(),
    }
}
