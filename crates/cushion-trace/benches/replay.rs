//! Measures the speed of replays, without the time to read a trace.
//!
//! `make bench` uses the traces in `tests/traces`; `make bench TRACES=FOLDER` uses those of a
//! folder. Each row is the median of several replays, in events of the trace per second.

#![expect(clippy::print_stdout, reason = "the bench's table is its output")]
#![expect(clippy::disallowed_methods, reason = "a bench measures real time")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use cushion_core::{Ladder, Policy};
use cushion_trace::{Limits, Program, ReplayConfig, open, replay};

/// The number of replays per row.
const RUNS: usize = 9;

fn main() {
    let folder = std::env::var_os("TRACES").filter(|folder| !folder.is_empty()).map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces")),
        PathBuf::from,
    );
    let mut traces: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.to_string_lossy().ends_with(".pickle.gz"))
        .collect();
    traces.sort();
    println!("{:<34} {:<11} {:>10} {:>16}", "trace", "policy", "events", "events/s");
    for path in traces {
        let snapshot = open(&path, &Limits::default()).expect("a readable trace");
        let program = Program::of(&snapshot, 0);
        let name = path.file_name().map(|name| name.to_string_lossy().replace(".pickle.gz", ""));
        for policy in Policy::ALL {
            let config =
                ReplayConfig { policy, ladder: Ladder::Torch, capacity: None, options: None };
            let mut times: Vec<Duration> = (0..RUNS)
                .map(|_| {
                    let start = Instant::now();
                    let outcome = replay(&program, &config).expect("a replay");
                    assert!(outcome.allocs > 0, "nothing was replayed");
                    start.elapsed()
                })
                .collect();
            times.sort_unstable();
            #[expect(clippy::cast_precision_loss, reason = "a rate")]
            let rate = program.events as f64 / times[RUNS / 2].as_secs_f64();
            println!(
                "{:<34} {:<11} {:>10} {:>14.2} M",
                name.as_deref().unwrap_or("?"),
                policy.name(),
                program.events,
                rate / 1e6
            );
        }
    }
}
