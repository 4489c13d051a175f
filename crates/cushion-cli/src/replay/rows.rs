//! The results of `cushion replay`: a line of JSON, or a row of a table, for each trace and policy.

use cushion_core::driver::Call;
use cushion_core::size::display;
use cushion_core::{Ladder, Policy};
use cushion_trace::{Outcome, RecordedOom, Refusal};
use serde::Serialize;

use super::words;
use crate::output::table::{Align, Table};
use crate::shortages;
use crate::trace_files::load::short;

pub(super) struct Row<'a> {
    pub(super) trace: &'a str,
    pub(super) policy: Policy,
    pub(super) ladder: Ladder,
    pub(super) outcome: &'a Outcome,
    pub(super) floor: u64,
    /// The smallest device, if it was searched for and found.
    pub(super) smallest: Option<u64>,
    /// The first refusal of the recorded run.
    pub(super) recorded: Option<RecordedOom>,
    pub(super) has_limit: bool,
    /// The stack of the refused request, if it was recorded.
    pub(super) stack: Vec<String>,
}

/// The result of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Fits,
    OutOfMemory,
    /// The recorded run ran out of memory, and this replay had no limit.
    RecordedOutOfMemory,
}

impl Answer {
    fn in_words(self) -> &'static str {
        match self {
            Self::Fits => "fits",
            Self::OutOfMemory => "out of memory",
            Self::RecordedOutOfMemory => "ran out when recorded",
        }
    }
}

/// One line of `--json`. The object is flat, so each of its keys is a field.
#[derive(Serialize)]
pub(super) struct JsonRow<'a> {
    trace: &'a str,
    policy: &'static str,
    ladder: &'static str,
    events: u64,
    allocs: u64,
    live_peak_bytes: u64,
    floor_bytes: u64,
    reserved_peak_bytes: u64,
    excess: Option<f64>,
    min_capacity_bytes: Option<u64>,
    same_address: Option<u64>,
    first_difference: Option<JsonDifference>,
    driver: JsonDriver,
    retries: u64,
    pending_frees: u64,
    hurried_frees: u64,
    shortages: u64,
    survived: u64,
    refused: u64,
    milliseconds_lost: f64,
    spilled_peak_bytes: u64,
    result: Answer,
    oom: Option<JsonRefusal>,
    recorded_oom: Option<JsonRecorded>,
}

#[derive(Serialize)]
struct JsonDifference {
    event: u64,
    requested: u64,
    pytorch_address: Option<u64>,
    address: Option<u64>,
}

#[derive(Serialize)]
struct JsonDriver {
    malloc: u64,
    free: u64,
    create: u64,
    map: u64,
    set_access: u64,
    unmap: u64,
    release: u64,
    /// Counted as `num_device_alloc` in PyTorch's statistics.
    allocations: u64,
    /// The last event with a driver call.
    last_event: u64,
    time_us: f64,
}

#[derive(Serialize)]
struct JsonRefusal {
    event: u64,
    requested: u64,
    live: u64,
    reserved: u64,
    largest_free: u64,
    at_beginning: bool,
    stack: Vec<String>,
}

#[derive(Serialize)]
struct JsonRecorded {
    event: u64,
    requested: u64,
    refusals: u64,
    live: u64,
    reserved: Option<u64>,
    device_free: Option<u64>,
    /// The capacity that stands for the memory the run had.
    capacity: Option<u64>,
}

impl<'a> Row<'a> {
    fn answer(&self) -> Answer {
        if self.outcome.oom.is_some() {
            Answer::OutOfMemory
        } else if self.recorded.is_some() && !self.has_limit {
            Answer::RecordedOutOfMemory
        } else {
            Answer::Fits
        }
    }

    pub(super) fn json(&self) -> JsonRow<'a> {
        let outcome = self.outcome;
        let calls = |call| outcome.driver.of(call);
        JsonRow {
            trace: self.trace,
            policy: self.policy.name(),
            ladder: self.ladder.name(),
            events: outcome.events,
            allocs: outcome.allocs,
            live_peak_bytes: outcome.live_peak,
            floor_bytes: self.floor,
            reserved_peak_bytes: outcome.reserved_peak,
            excess: outcome.excess(),
            min_capacity_bytes: self.smallest,
            same_address: outcome.same_address,
            first_difference: outcome.difference.map(|difference| JsonDifference {
                event: difference.event,
                requested: difference.requested,
                pytorch_address: difference.pytorch,
                address: difference.ours,
            }),
            driver: JsonDriver {
                malloc: calls(Call::Alloc),
                free: calls(Call::Free),
                create: calls(Call::Create),
                map: calls(Call::Map),
                set_access: calls(Call::SetAccess),
                unmap: calls(Call::Unmap),
                release: calls(Call::Release),
                allocations: outcome.stats.num_device_alloc,
                last_event: outcome.last_driver_event,
                time_us: microseconds(outcome.driver.nanos),
            },
            retries: outcome.retries,
            pending_frees: outcome.pending_frees,
            hurried_frees: outcome.hurried_frees,
            shortages: outcome.stats.shortages,
            survived: outcome.stats.shortages_survived,
            refused: outcome.stats.shortages_refused,
            milliseconds_lost: outcome.stats.milliseconds_lost(),
            spilled_peak_bytes: outcome.stats.spilled_bytes.peak,
            result: self.answer(),
            recorded_oom: self.recorded.map(|oom| JsonRecorded {
                event: oom.event,
                requested: oom.requested,
                refusals: oom.count,
                live: oom.live,
                reserved: oom.reserved,
                device_free: oom.device_free,
                capacity: oom.room.capacity(),
            }),
            oom: outcome.oom.map(|refusal| {
                let Refusal {
                    event, requested, live, reserved, largest_free, at_beginning, ..
                } = refusal;
                let stack = self.stack.clone();
                JsonRefusal { event, requested, live, reserved, largest_free, at_beginning, stack }
            }),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "times are small")]
pub(crate) fn microseconds(nanos: u64) -> f64 {
    nanos as f64 / 1000.0
}

/// The table, and below it the details that do not fit in a cell.
pub(super) struct Rows {
    table: Table,
    with_smallest: bool,
    details: Vec<String>,
}

impl Rows {
    pub(super) fn new(with_smallest: bool) -> Self {
        let mut columns = vec![
            ("trace", Align::Left),
            ("policy", Align::Left),
            ("allocs", Align::Right),
            ("live peak", Align::Right),
            ("floor", Align::Right),
            ("reserved peak", Align::Right),
            ("excess", Align::Right),
        ];
        if with_smallest {
            columns.push(("smallest device", Align::Right));
        }
        columns.extend([("driver", Align::Right), ("result", Align::Left)]);
        Self { table: Table::new(columns), with_smallest, details: Vec::new() }
    }

    pub(super) fn add(&mut self, row: &Row<'_>) {
        let outcome = row.outcome;
        let file = short(row.trace);
        let none = || "-".to_owned();
        let mut cells = vec![
            file.clone(),
            row.policy.to_string(),
            outcome.allocs.to_string(),
            display(outcome.live_peak),
            display(row.floor),
            display(outcome.reserved_peak),
            outcome.excess().map_or_else(none, |excess| format!("{excess:.4}")),
        ];
        if self.with_smallest {
            cells.push(row.smallest.map_or_else(none, display));
        }
        cells.push(format!("{:.2} ms", microseconds(outcome.driver.nanos) / 1000.0));
        cells.push(row.answer().in_words().to_owned());
        self.table.add(cells);
        if let Some(refusal) = &outcome.oom {
            self.details.push(format!("{file}, {}: {}", row.policy, words::in_words(refusal)));
            self.details.extend(row.stack.iter().map(|line| format!("    {line}")));
        }
        self.details.extend(shortages::in_words(&format!("{file}, {}", row.policy), outcome));
    }

    /// Adds details of a trace below the table.
    pub(super) fn explain(&mut self, trace: &str, lines: &[String]) {
        let mut lines = lines.iter();
        self.details.extend(lines.next().map(|line| format!("{}: {line}.", short(trace))));
        self.details.extend(lines.map(|line| format!("    {line}")));
    }

    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines = self.table.lines();
        if !self.details.is_empty() {
            lines.push(String::new());
            lines.extend(self.details.iter().cloned());
        }
        lines
    }
}
