//! CPU time of the engine with very many streams, pending frees, blocks, stitches or pools.
//!
//! Each row is one function, and the median of several runs. In rows with many driver calls, the
//! time of the simulated driver is subtracted. The time of a real driver is not included. With an
//! argument, only the rows run whose names contain it.

#![expect(clippy::print_stdout, reason = "the bench prints a table")]
#![expect(clippy::disallowed_methods, reason = "a bench measures real time")]

mod common;

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use cushion_core::driver::Call;
use cushion_core::testing::RealClock;
use cushion_core::{Engine, EngineConfig, Policy, PoolId, SimConfig, StreamId};

use common::{Gpu, Timed, median, own_micros};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const MAIN: StreamId = StreamId(0);

fn gpu(policy: Policy, capacity: u64) -> Gpu {
    let driver = Timed::new(SimConfig::with_capacity(capacity));
    let clock = Arc::new(RealClock::default());
    let engine = Engine::with_config(driver, EngineConfig { clock, ..EngineConfig::default() });
    engine.set_policy(policy);
    engine.configure("wait_ms:0,trim_ms:0").expect("valid options");
    engine
}

/// Returns the microseconds that `run` takes, including the driver.
fn micros(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64() * 1e6
}

/// Prints a row with one figure for each policy.
fn for_each_policy(name: &str, unit: &str, row: impl Fn(Policy) -> f64) {
    let [segments, expandable, paged] = Policy::ALL.map(row);
    println!("{name:<58} {segments:>12.1} {expandable:>12.1} {paged:>12.1} {unit}");
}

/// Prints a row with one figure.
fn one(name: &str, value: f64, unit: &str) {
    println!("{name:<58} {value:>38.1} {unit}");
}

// ---- pending frees ----

/// A request is refused while 32,000 neighbouring blocks are pending on another stream.
fn refusal_with_pending_neighbours() {
    const COUNT: u64 = 32_000;
    for_each_policy("refusal with 32,000 neighbouring pending blocks", "µs", |policy| {
        let gpu = gpu(policy, COUNT * 2 * MIB + GIB);
        let blocks: Vec<u64> =
            (0..COUNT).map(|_| gpu.alloc(2 * MIB, MAIN).expect("memory")).collect();
        gpu.driver().launch(StreamId(1));
        for &block in &blocks {
            gpu.record_stream(block, StreamId(1)).expect("a live address");
        }
        for &block in &blocks {
            gpu.free(block).expect("a live address");
        }
        let refused = || {
            own_micros(&gpu, || {
                let refused = gpu.alloc(COUNT * 2 * MIB + 512 * MIB, MAIN);
                assert!(refused.is_err(), "the device is smaller");
            })
        };
        median((0..3).map(|_| refused()).collect())
    });
}

/// An allocation and its free, while 10,000 streams have one pending free each.
fn pair_with_pending_streams() {
    const STREAMS: u64 = 10_000;
    for_each_policy("pair with a pending free on each of 10,000 streams", "µs", |policy| {
        let gpu = gpu(policy, 4096 * GIB);
        for stream in 0..STREAMS {
            let own = StreamId(stream);
            // This block stays live. The free rest of its segment serves the pairs below.
            gpu.alloc(4 << 10, own).expect("memory");
            let block = gpu.alloc(4 << 10, own).expect("memory");
            let other = StreamId((stream + 1) % STREAMS);
            gpu.driver().launch(other);
            gpu.record_stream(block, other).expect("a live address");
            gpu.free(block).expect("a live address");
        }
        let pairs = 500;
        let run = || {
            let times = micros(|| {
                for pair in 0..pairs {
                    let stream = StreamId(pair * 7919 % STREAMS);
                    let block = gpu.alloc(black_box(8 << 10), stream).expect("memory");
                    gpu.free(block).expect("a live address");
                }
            });
            #[expect(clippy::cast_precision_loss, reason = "a few hundred")]
            let pairs = pairs as f64;
            times / pairs
        };
        median((0..9).map(|_| run()).collect())
    });
}

// ---- releasing memory ----

/// `empty_cache` with cached memory of 10,000 streams.
fn empty_cache_with_many_streams() {
    for_each_policy("empty_cache with 10,000 streams", "ms", |policy| {
        let run = || {
            let gpu = gpu(policy, 4096 * GIB);
            for stream in (0..10_000).map(StreamId) {
                for bytes in [4 << 10, 3 * MIB] {
                    let block = gpu.alloc(bytes, stream).expect("memory");
                    gpu.free(block).expect("a live address");
                }
            }
            own_micros(&gpu, || gpu.empty_cache().expect("a working driver")) / 1e3
        };
        median((0..5).map(|_| run()).collect())
    });
}

/// `empty_cache` with about 2,000 pages that make up about 1,000 stitches.
fn releasing_stitches() {
    let gpu = gpu(Policy::Paged, 64 * GIB);
    gpu.configure("page_mb:2").expect("a valid option");
    let whole = 4 * GIB;
    for _ in 0..3 {
        let block = gpu.alloc(whole, MAIN).expect("memory");
        gpu.free(block).expect("a live address");
    }
    gpu.empty_cache().expect("a working driver");
    let blocks: Vec<u64> =
        (0..whole / (6 * MIB)).map(|_| gpu.alloc(6 * MIB, MAIN).expect("memory")).collect();
    for &block in blocks.iter().step_by(2) {
        gpu.free(block).expect("a live address");
    }
    for more in 0..1000 {
        if let Ok(block) = gpu.alloc(10 * MIB + more * 2 * MIB, MAIN) {
            gpu.free(block).expect("a live address");
        }
    }
    let figures = gpu.page_figures();
    let before = gpu.driver().counts();
    let time = own_micros(&gpu, || gpu.empty_cache().expect("a working driver")) / 1e3;
    let after = gpu.driver().counts();
    let name = format!("releasing {} stitches over {} pages", figures.ranges, figures.pages);
    one(&name, time, "ms");
    #[expect(clippy::cast_precision_loss, reason = "counts of calls")]
    let (calls, unmaps) = (
        (after.total() - before.total()) as f64,
        (after.of(Call::Unmap) - before.of(Call::Unmap)) as f64,
    );
    one("    driver calls", calls, "");
    one("    of which unmap", unmaps, "");
}

// ---- metadata ----

/// Pairs with a million live blocks, then a refused request.
fn with_a_million_blocks() {
    const LIVE: usize = 1_000_000;
    let engines = Policy::ALL.map(|policy| {
        let gpu = gpu(policy, 64 * GIB);
        let live: Vec<u64> = (0..LIVE).map(|_| gpu.alloc(4 << 10, MAIN).expect("memory")).collect();
        (policy, gpu, live)
    });
    let of = |policy: Policy| {
        engines.iter().find(|(it, ..)| *it == policy).expect("an engine for each policy")
    };
    for_each_policy("pair with a million live blocks", "ns", |policy| {
        let (_, gpu, live) = of(policy);
        let mut at = 1_u64;
        let pairs = 20_000_u32;
        let mut live = live.clone();
        let mut run = || {
            let time = micros(|| {
                for _ in 0..pairs {
                    at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let index =
                        usize::try_from((at >> 33) % LIVE as u64).expect("an index of a block");
                    gpu.free(live[index]).expect("a live address");
                    live[index] = gpu.alloc(black_box(4 << 10), MAIN).expect("memory");
                }
            });
            time * 1e3 / f64::from(pairs)
        };
        median((0..9).map(|_| run()).collect())
    });
    for_each_policy("refusal with a million live blocks", "ms", |policy| {
        let (_, gpu, _) = of(policy);
        let refused = || {
            micros(|| {
                assert!(gpu.alloc(63 * GIB, MAIN).is_err(), "the device is smaller");
            }) / 1e3
        };
        median((0..3).map(|_| refused()).collect())
    });
}

/// `stats` after 50,000 streams have allocated memory and released it again.
fn stats_after_many_streams() {
    for_each_policy("stats() after 50,000 streams were used and emptied", "µs", |policy| {
        let gpu = gpu(policy, 1024 * GIB);
        for stream in (1..=50_000).map(StreamId) {
            let block = gpu.alloc(4 << 10, stream).expect("memory");
            gpu.free(block).expect("a live address");
            if stream.0 % 5_000 == 0 {
                gpu.empty_cache().expect("a working driver");
            }
        }
        median((0..9).map(|_| micros(|| drop(black_box(gpu.stats())))).collect())
    });
}

// ---- addresses ----

/// 1,000 graphs have a private pool each, with a block of 2 MiB and one of 4 KiB.
fn addresses_of_graph_pools() {
    const TOTAL: u64 = 140 * GIB;
    for_each_policy("addresses for 1,000 graph pools / the device's memory", "", |policy| {
        let gpu = gpu(policy, TOTAL);
        for pool in (1..=1000).map(|number| PoolId(0, number)) {
            gpu.begin_allocate_to_pool(pool, Box::new(|_| true)).expect("a new pool");
            for bytes in [2 * MIB, 4 << 10] {
                let block = gpu.alloc(bytes, MAIN).expect("memory");
                gpu.free(block).expect("a live address");
            }
            gpu.end_allocate_to_pool(pool).expect("the pool");
        }
        #[expect(clippy::cast_precision_loss, reason = "a ratio")]
        let ratio = gpu.driver().reserved_addresses() as f64 / TOTAL as f64;
        ratio
    });
}

fn main() {
    let rows: [(&str, fn()); 7] = [
        ("refusal", refusal_with_pending_neighbours),
        ("pending", pair_with_pending_streams),
        ("empty_cache", empty_cache_with_many_streams),
        ("stitches", releasing_stitches),
        ("million", with_a_million_blocks),
        ("stats", stats_after_many_streams),
        ("pools", addresses_of_graph_pools),
    ];
    let asked: Vec<String> = std::env::args().skip(1).filter(|it| !it.starts_with('-')).collect();
    println!("{:<58} {:>12} {:>12} {:>12}", "", "segments", "expandable", "paged");
    for (name, row) in rows {
        if asked.is_empty() || asked.iter().any(|it| name.contains(it.as_str())) {
            row();
        }
    }
}
