//! The shortages of a replay: as text below the table, and as receipts in a file.

use std::io::Write as _;
use std::path::Path;

use cushion_core::size::display;
use cushion_core::{Policy, Receipt};
use cushion_trace::Outcome;
use serde::Serialize;

use crate::trace_files::save::save;

/// Says what would have made a request fit; empty if it was served.
pub(crate) fn remedies(receipt: &Receipt) -> Vec<String> {
    let shortage = &receipt.shortage;
    if receipt.outcome.is_survived() {
        return Vec::new();
    }
    shortage.remedies().iter().map(ToString::to_string).collect()
}

/// Describes the shortages of a run in a few lines, the first starting with `what`; empty if there
/// were none.
pub(crate) fn in_words(what: &str, outcome: &Outcome) -> Vec<String> {
    if outcome.tally.shortages == 0 {
        return Vec::new();
    }
    let mut first = format!("{what}: {}", outcome.tally);
    let spilled = outcome.stats.spilled_bytes.peak;
    if spilled > 0 {
        first += &format!(", {} of host memory at the peak", display(spilled));
    }
    // The table is about the first refused request.
    let refused = outcome.receipts.iter().find(|receipt| !receipt.outcome.is_survived());
    let remedies = refused.map(|receipt| remedies(receipt)).unwrap_or_default();
    std::iter::once(first).chain(remedies.iter().map(|remedy| format!("    {remedy}"))).collect()
}

/// Receipts to write to a file.
#[derive(Debug, Default)]
pub(crate) struct ReceiptLines {
    text: Vec<u8>,
}

/// A receipt with its trace and policy.
#[derive(Serialize)]
struct Line<'a> {
    trace: &'a str,
    policy: &'static str,
    remedies: Vec<String>,
    #[serde(flatten)]
    receipt: &'a Receipt,
}

impl ReceiptLines {
    /// Adds the receipts of a run.
    pub(crate) fn add(
        &mut self,
        trace: &str,
        policy: Policy,
        outcome: &Outcome,
    ) -> anyhow::Result<()> {
        for receipt in &outcome.receipts {
            let remedies = remedies(receipt);
            let line = Line { trace, policy: policy.name(), remedies, receipt };
            serde_json::to_writer(&mut self.text, &line)?;
            self.text.push(b'\n');
        }
        Ok(())
    }

    /// Writes all receipts.
    pub(crate) fn save(&self, path: &Path) -> anyhow::Result<()> {
        save(path, |file| file.write_all(&self.text))
    }
}
