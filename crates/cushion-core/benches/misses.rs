//! CPU time of a miss with many free blocks and pages: it must not grow with their number.
//!
//! Each row is one case on a simulated device. The time of the device's calls is subtracted.
//! Compare the figures of one row with each other; absolute figures depend on the machine.

#![expect(clippy::print_stdout, reason = "the bench prints a table")]
#![expect(clippy::disallowed_methods, reason = "a bench measures real time")]

mod common;

use cushion_core::size::{GIB, MIB};
use cushion_core::{Engine, Policy, SimConfig, StreamId};

use common::{Gpu, Timed, median, own_micros};

const STREAM: StreamId = StreamId(0);

fn engine(policy: Policy, conf: &str) -> Gpu {
    let engine = Engine::new(Timed::new(SimConfig::with_capacity(512 * GIB)));
    engine.set_policy(policy);
    engine.configure(conf).expect("valid options");
    // Memory has another layout while a program loads, until it has freed more than is live.
    for _ in 0..3 {
        let block = engine.alloc(8 * GIB, STREAM).expect("memory");
        engine.free(block).expect("a live address");
    }
    engine.empty_cache().expect("a working driver");
    engine
}

/// Frees every second block, from index `first`.
fn free_every_second(engine: &Gpu, blocks: &[u64], first: usize) {
    for block in blocks.iter().skip(first).step_by(2) {
        engine.free(*block).expect("a live address");
    }
}

/// Returns the median time of a miss among `free` free blocks, none of which serves it.
fn miss_among(policy: Policy, free: u64) -> f64 {
    let engine = engine(policy, "wait_ms:0");
    let size = |n: u64| MIB + MIB / 8 + n % 7 * 4096;
    let blocks: Vec<u64> =
        (0..2 * free).map(|n| engine.alloc(size(n), STREAM).expect("memory")).collect();
    while engine.would_hit(2 * MIB, STREAM) {
        engine.alloc(2 * MIB, STREAM).expect("memory");
    }
    free_every_second(&engine, &blocks, 0);
    let mut times = Vec::new();
    for n in 0..1000 {
        let misses = engine.stats().misses;
        let took = own_micros(&engine, || {
            engine.alloc(3 * MIB + n * 512, STREAM).expect("memory");
        });
        if engine.stats().misses > misses {
            times.push(took);
        }
    }
    median(times)
}

fn fragments(free: u64) {
    let [paged, expandable] =
        [Policy::Paged, Policy::Expandable].map(|policy| miss_among(policy, free));
    println!(
        "a miss under paged with {free:>6} free large blocks  {paged:>10.1} us  \
         {:>8.1} x expandable's {expandable:.1} us",
        paged / expandable
    );
}

/// Returns an engine in which every second page is free, and the others are unmapped.
fn comb(pages: u64) -> Gpu {
    let engine = engine(Policy::Paged, "page_mb:2,trim_ms:0,wait_ms:0");
    let blocks: Vec<u64> =
        (0..2 * pages).map(|_| engine.alloc(2 * MIB, STREAM).expect("memory")).collect();
    free_every_second(&engine, &blocks, 0);
    engine.empty_cache().expect("a working driver");
    free_every_second(&engine, &blocks, 1);
    engine
}

/// Compares a request that covers a comb of free pages with a request that needs as many new pages
/// without holes.
fn over_a_comb(pages: u64, bytes: u64) {
    let held = |engine: &Gpu| engine.stats().reserved_bytes.all.current;
    let (mut times, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let comb = comb(pages);
        let before = held(&comb);
        times.push(own_micros(&comb, || {
            comb.alloc(bytes, STREAM).expect("memory");
        }));
        let fresh = held(&comb) - before;
        let row = engine(Policy::Paged, "page_mb:2,trim_ms:0,wait_ms:0");
        plain.push(own_micros(&row, || {
            row.alloc(fresh.max(2 * MIB), STREAM).expect("memory");
        }));
    }
    let (took, plain) = (median(times), median(plain));
    println!(
        "a miss of {:>6} MiB over a comb of {pages:>5} pages {took:>10.1} us  \
         {:>8.1} x as many new pages without holes, {plain:.1} us",
        bytes / MIB,
        took / plain
    );
}

fn main() {
    let rows: &[(&str, fn())] = &[
        ("fragments", || fragments(5_000)),
        ("fragments", || fragments(50_000)),
        ("comb", || over_a_comb(8_000, 256 * MIB)),
        ("comb", || over_a_comb(8_000, 64_000 * MIB)),
    ];
    // Arguments are names of rows.
    let wanted: Vec<String> = std::env::args().skip(1).filter(|it| !it.starts_with('-')).collect();
    for (name, row) in rows {
        if wanted.is_empty() || wanted.iter().any(|it| it == name) {
            row();
        }
    }
}
