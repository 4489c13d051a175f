//! CPU time of an allocate-and-free pair: the rows of the tables in the documentation.
//!
//! Each row is the median of several runs, in nanoseconds per pair. Compare rows of one run with
//! each other; absolute figures depend on the machine.

#![expect(clippy::print_stdout, reason = "the bench prints a table")]
#![expect(clippy::disallowed_methods, reason = "a bench measures real time")]

use std::hint::black_box;
use std::time::Instant;

use cushion_core::testing::churn::Churn;
use cushion_core::{Engine, EngineConfig, Ladder, Policy, SimConfig, SimDriver, StreamId};

const RUNS: usize = 9;
const PAIRS: u32 = 200_000;
const STREAM: StreamId = StreamId(0);

fn engine(policy: Policy) -> Engine<SimDriver> {
    engine_with(policy, Ladder::Graceful)
}

fn engine_with(policy: Policy, ladder: Ladder) -> Engine<SimDriver> {
    let driver = SimDriver::new(SimConfig::with_capacity(64 << 30));
    let engine = Engine::with_config(driver, EngineConfig { ladder, ..EngineConfig::default() });
    engine.set_policy(policy);
    engine
}

/// Returns the nanoseconds per pair of the median run.
fn median(mut run: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[RUNS / 2]
}

fn pair(policy: Policy, bytes: u64) -> f64 {
    let engine = engine(policy);
    median(|| {
        for _ in 0..PAIRS {
            let address = engine.alloc(black_box(bytes), STREAM).expect("memory");
            engine.free(address).expect("a live address");
        }
    })
}

fn churn(policy: Policy, live: usize) -> f64 {
    let engine = engine(policy);
    let mut churn = Churn::new(&engine, live);
    median(|| (0..PAIRS).for_each(|_| churn.pair()))
}

/// Runs pairs on several threads at once, on one stream.
fn threads(policy: Policy, count: u32) -> f64 {
    let engine = engine(policy);
    median(|| {
        std::thread::scope(|scope| {
            for _ in 0..count {
                scope.spawn(|| {
                    for _ in 0..PAIRS / count {
                        let address = engine.alloc(black_box(4096), STREAM).expect("memory");
                        engine.free(address).expect("a live address");
                    }
                });
            }
        });
    })
}

/// Returns the time of the ladder `graceful` divided by that of `torch`. The ladders differ only
/// when memory runs out, so the ratio should be 1. Turns of a few milliseconds alternate between
/// the two, so that noise of the machine affects both alike.
fn over_torch(mut run: [impl FnMut(); 2]) -> f64 {
    const TURNS: usize = 400;
    let mut ratios: Vec<f64> = (0..TURNS)
        .map(|turn| {
            let mut times = [0.0; 2];
            for index in [turn % 2, 1 - turn % 2] {
                let start = Instant::now();
                run[index]();
                times[index] = start.elapsed().as_secs_f64();
            }
            times[1] / times[0]
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    ratios[TURNS / 2]
}

const TURN: u32 = 10_000;
const LADDERS: [Ladder; 2] = [Ladder::Torch, Ladder::Graceful];

fn pair_over_torch(policy: Policy, bytes: u64) -> f64 {
    let engines = LADDERS.map(|ladder| engine_with(policy, ladder));
    over_torch(engines.each_ref().map(|engine| {
        move || {
            for _ in 0..TURN {
                let address = engine.alloc(black_box(bytes), STREAM).expect("memory");
                engine.free(address).expect("a live address");
            }
        }
    }))
}

fn churn_over_torch(policy: Policy, live: usize) -> f64 {
    let engines = LADDERS.map(|ladder| engine_with(policy, ladder));
    over_torch(engines.each_ref().map(|engine| {
        let mut churn = Churn::new(engine, live);
        move || (0..TURN).for_each(|_| churn.pair())
    }))
}

type Row = (&'static str, fn(Policy) -> f64);

fn table(title: &str, digits: usize, rows: &[Row]) {
    println!("{title:<24} {:>12} {:>12} {:>12}", "segments", "expandable", "paged");
    for (name, row) in rows {
        let [segments, expandable, paged] = Policy::ALL.map(row);
        println!("{name:<24} {segments:>12.digits$} {expandable:>12.digits$} {paged:>12.digits$}");
    }
}

fn main() {
    table(
        "ns per pair",
        1,
        &[
            ("pair of 4 KiB", |policy| pair(policy, 4 << 10)),
            ("pair of 4 MiB", |policy| pair(policy, 4 << 20)),
            ("churn, 64 live", |policy| churn(policy, 64)),
            ("churn, 4096 live", |policy| churn(policy, 4096)),
            ("4 threads, one stream", |policy| threads(policy, 4)),
        ],
    );
    println!();
    table(
        "graceful / torch",
        3,
        &[
            ("pair of 4 KiB", |policy| pair_over_torch(policy, 4 << 10)),
            ("pair of 4 MiB", |policy| pair_over_torch(policy, 4 << 20)),
            ("churn, 64 live", |policy| churn_over_torch(policy, 64)),
            ("churn, 4096 live", |policy| churn_over_torch(policy, 4096)),
        ],
    );
}
