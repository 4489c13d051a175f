//! A long run under `paged`: a billion operations of a program whose working set grows and shrinks and whose shapes
//! change all the time. What is held has to come down again with what is live, addresses and metadata have to stay within
//! their bounds, and everything has to be consistent.
//!
//! `cargo bench -p cushion-core --bench long_run -- [OPERATIONS]`, a billion unless told. The device and its clock are
//! simulated; a phase of a million operations takes ten minutes of its time, and between phases the program does
//! nothing for a minute: then what is free and could go has to be gone.

#![expect(clippy::print_stdout, reason = "the bench's table is its output")]

use std::sync::Arc;
use std::time::Duration;

use cushion_core::random::Random;
use cushion_core::{Clock, Engine, EngineConfig, Policy, SimClock, SimConfig, SimDriver, StreamId};

const GIB: u64 = 1 << 30;
const DEVICE: u64 = 80 * GIB;
/// How often the thread of a program looks, and how many looks may pass before memory is back: a minute.
const BETWEEN_LOOKS: Duration = Duration::from_secs(2);
const LOOKS: u32 = 30;
/// Operations in a phase.
const PHASE: u64 = 1_000_000;

fn main() {
    let given = std::env::args().skip(1).find_map(|argument| argument.parse::<u64>().ok());
    let phases = given.unwrap_or(1_000_000_000).div_ceil(PHASE);
    let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(DEVICE)));
    let clock = Arc::new(SimClock::new(Arc::clone(&sim)));
    let its_clock: Arc<dyn Clock> = Arc::clone(&clock) as _;
    let engine = Engine::with_config(
        Arc::clone(&sim),
        EngineConfig { clock: its_clock, ..EngineConfig::default() },
    );
    engine.set_policy(Policy::Paged);
    let mut run = Run { engine: &engine, clock: &clock, random: Random(7), live: Vec::new() };
    let mut worst = Worst::default();
    for phase in 0..phases {
        run.phase();
        run.rest(&mut worst);
        if (phase + 1).is_multiple_of((phases / 20).max(1)) {
            println!("{:>4} million operations: {worst:?}", (phase + 1) * PHASE / 1_000_000);
        }
    }
    run.end(&sim);
    println!("everything was given back; {worst:?}");
}

/// The most that was seen.
#[derive(Debug, Default)]
struct Worst {
    ranges: usize,
    addresses_gib: u64,
    pages: usize,
    blocks: u64,
    /// What could be given back and was not, once a program had nothing to do for a while.
    idle_free_mib: u64,
    refused: u64,
}

/// A number below `end`.
fn below(random: &mut Random, end: u64) -> u64 {
    random.next() % end
}

struct Run<'a> {
    engine: &'a Engine<Arc<SimDriver>>,
    clock: &'a SimClock,
    random: Random,
    live: Vec<(u64, u64)>,
}

impl Run<'_> {
    /// A working set of some size, in some shapes, for a million operations.
    fn phase(&mut self) {
        let target = (1 + below(&mut self.random, 60)) * GIB;
        let shapes: Vec<u64> = (0..4 + below(&mut self.random, 60))
            .map(|_| {
                // As in real programs, most are small; the largest are a few hundred MiB.
                let scale =
                    below(&mut self.random, 12) + 8 * u64::from(below(&mut self.random, 8) == 0);
                512 + below(&mut self.random, (512 << scale).min(target / 16))
            })
            .collect();
        let mut bytes: u64 = self.live.iter().map(|&(_, size)| size).sum();
        for operation in 0..PHASE {
            if operation.is_multiple_of(PHASE / 600) {
                self.clock.advance(Duration::from_secs(1));
                self.engine.trim().expect("a driver that works");
            }
            let grows = bytes < target && !below(&mut self.random, 16).is_multiple_of(5);
            if grows && self.live.len() < 20_000 {
                let shape = below(&mut self.random, shapes.len() as u64);
                let size = shapes[usize::try_from(shape).unwrap_or(0)];
                // Where it is refused, the program makes room.
                if let Ok(address) = self.engine.alloc(size, StreamId(0)) {
                    self.live.push((address, size));
                    bytes += size;
                    continue;
                }
            }
            if !self.live.is_empty() {
                let index = below(&mut self.random, self.live.len() as u64);
                let (address, size) = self.live.swap_remove(usize::try_from(index).unwrap_or(0));
                self.engine.free(address).expect("a live address");
                bytes -= size;
            }
        }
    }

    /// Nothing to do for a while: most of it is freed, and what is held has to follow.
    fn rest(&mut self, worst: &mut Worst) {
        let kept = self.live.len() / 10;
        for (address, _) in self.live.drain(kept..) {
            self.engine.free(address).expect("a live address");
        }
        let figures = self.engine.page_figures();
        worst.ranges = worst.ranges.max(figures.ranges);
        worst.addresses_gib = worst.addresses_gib.max(figures.addresses / GIB);
        worst.pages = worst.pages.max(figures.pages);
        let stats = self.engine.stats();
        worst.blocks = worst.blocks.max(stats.blocks());
        worst.refused = stats.shortages_refused;
        for _ in 0..LOOKS {
            self.clock.advance(BETWEEN_LOOKS);
            self.engine.trim().expect("a driver that works");
        }
        self.engine.check_invariants().expect("everything is consistent");
        let stats = self.engine.stats();
        let (held, live) = (stats.reserved_bytes.all.current, stats.active_bytes.all.current);
        // What is left lies on pages that are partly used.
        let free = self.engine.page_figures().free;
        assert!(free <= held / 64 + (80 << 20), "{free} free of {held} held, {live} live");
        worst.idle_free_mib = worst.idle_free_mib.max(free >> 20);
    }

    fn end(&mut self, sim: &SimDriver) {
        for (address, _) in self.live.drain(..) {
            self.engine.free(address).expect("a live address");
        }
        self.engine.empty_cache().expect("a driver that works");
        self.engine.check_invariants().expect("everything is consistent");
        assert_eq!(sim.held(), 0, "memory is left");
    }
}
