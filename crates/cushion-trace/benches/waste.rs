//! Compares the wasted memory and the driver calls of `paged` with those of `expandable`.
//!
//! `cargo bench -p cushion-trace --bench waste -- TRACE...` replays each trace without a limit.
//! Small changes of the page size move the result at random, so each trace runs with nine sizes (72
//! to 88 MiB in steps of 2, around the default of 80). The table has the median, the minimum and
//! the maximum. Excess is peak reserved over peak live bytes. Driver time is the simulator's cost
//! as a multiple of the cost under `expandable`.

#![expect(clippy::print_stdout, reason = "the bench's table is its output")]

use std::path::{Path, PathBuf};

use cushion_core::{Ladder, Options, Policy};
use cushion_trace::{Limits, Outcome, Program, ReplayConfig, open, replay};

const SIZES: [u64; 9] = [72, 74, 76, 78, 80, 82, 84, 86, 88];

fn main() {
    let arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let mut traces: Vec<PathBuf> = arguments.map(PathBuf::from).collect();
    if traces.is_empty() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces");
        let found = std::fs::read_dir(folder).expect("the recorded traces");
        let found = found.filter_map(Result::ok).map(|entry| entry.path());
        traces = found.filter(|path| path.extension().is_some_and(|it| it == "gz")).collect();
        traces.sort();
    }
    println!(
        "{:<34} {:>7} {:>10} {:>7} {:>17} {:>7} {:>15}",
        "trace", "floor", "expandable", "paged", "", "driver", ""
    );
    let mut sum = 0.0;
    for path in &traces {
        sum += one(path);
    }
    println!("mean of the medians {:.4}", sum / traces.len().max(1) as f64);
}

#[expect(clippy::cast_precision_loss, reason = "figures for display")]
fn one(path: &Path) -> f64 {
    let snapshot = open(path, &Limits::default()).expect("a readable trace");
    let program = Program::of(&snapshot, 0);
    let run = |policy, size: u64| -> Outcome {
        let options = Options { page_size: size << 20, ..program.options.clone() };
        let options = Some(options);
        let config = ReplayConfig { policy, ladder: Ladder::Graceful, capacity: None, options };
        replay(&program, &config).expect("a driver that works")
    };
    let time = |outcome: &Outcome| outcome.driver.nanos as f64;
    let excess = |outcome: &Outcome| outcome.excess().expect("something was live");
    let expandable = run(Policy::Expandable, 80);
    let runs: Vec<Outcome> = SIZES.iter().map(|&size| run(Policy::Paged, size)).collect();
    let (paged, least, most) = spread(runs.iter().map(excess));
    let (driver, fewest, highest) = spread(runs.iter().map(|run| time(run) / time(&expandable)));
    let (last, _, latest) =
        spread(runs.iter().map(|run| run.last_driver_event as f64 / run.events as f64));
    let floor = program.floor_bytes(false) as f64 / expandable.live_peak as f64;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.trim_end_matches(".pickle.gz");
    println!(
        "{name:<34} {floor:>7.4} {:>10.4} {paged:>7.4} [{least:.4} {most:.4}] {driver:>6.2}x \
         [{fewest:.2} {highest:.2}] {last:.3} {latest:.3}",
        excess(&expandable),
    );
    paged
}

/// Returns the median, the minimum and the maximum.
fn spread(figures: impl Iterator<Item = f64>) -> (f64, f64, f64) {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    (figures[figures.len() / 2], figures[0], figures[figures.len() - 1])
}
