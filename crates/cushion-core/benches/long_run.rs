//! A long run under `paged`: a billion operations of a program whose working set grows and shrinks
//! and whose sizes change all the time. Reserved bytes must follow live bytes down, addresses and
//! metadata must stay within their bounds, and the invariants must hold.
//!
//! `cargo bench -p cushion-core --bench long_run -- [OPERATIONS]`; the default is a billion. The
//! device and its clock are simulated. A phase of a million operations takes ten minutes of
//! simulated time. Between phases the program does nothing for a minute, after which every free
//! page must be released.

#![expect(clippy::print_stdout, reason = "the bench prints a table")]

use std::sync::Arc;
use std::time::Duration;

use cushion_core::random::Random;
use cushion_core::{Clock, Engine, EngineConfig, Policy, SimClock, SimConfig, SimDriver, StreamId};

const GIB: u64 = 1 << 30;
const DEVICE: u64 = 80 * GIB;
/// Time between two calls of `trim`.
const TRIM_PERIOD: Duration = Duration::from_secs(2);
/// Number of `trim` calls until free memory must be released: one minute.
const TRIMS: u32 = 30;
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
    println!("all memory was released; {worst:?}");
}

/// The largest figures of the run.
#[derive(Debug, Default)]
struct Worst {
    stitches: usize,
    addresses_gib: u64,
    pages: usize,
    blocks: u64,
    /// Free memory that was not released while the program was idle.
    idle_free_mib: u64,
    refused: u64,
}

/// Returns a random number below `end`.
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
    /// Runs a million operations with a random working set and random sizes.
    fn phase(&mut self) {
        let target = (1 + below(&mut self.random, 60)) * GIB;
        let sizes: Vec<u64> = (0..4 + below(&mut self.random, 60))
            .map(|_| {
                // As in real programs, most sizes are small; the largest is a few hundred MiB.
                let scale =
                    below(&mut self.random, 12) + 8 * u64::from(below(&mut self.random, 8) == 0);
                512 + below(&mut self.random, (512 << scale).min(target / 16))
            })
            .collect();
        let mut bytes: u64 = self.live.iter().map(|&(_, size)| size).sum();
        for operation in 0..PHASE {
            if operation.is_multiple_of(PHASE / 600) {
                self.clock.advance(Duration::from_secs(1));
                self.engine.trim().expect("a working driver");
            }
            let grows = bytes < target && !below(&mut self.random, 16).is_multiple_of(5);
            if grows && self.live.len() < 20_000 {
                let index = below(&mut self.random, sizes.len() as u64);
                let size = sizes[usize::try_from(index).unwrap_or(0)];
                // If the request is refused, the program frees a block.
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

    /// Frees most blocks and idles for a minute. Free memory must be released by then.
    fn rest(&mut self, worst: &mut Worst) {
        let kept = self.live.len() / 10;
        for (address, _) in self.live.drain(kept..) {
            self.engine.free(address).expect("a live address");
        }
        let figures = self.engine.page_figures();
        worst.stitches = worst.stitches.max(figures.ranges);
        worst.addresses_gib = worst.addresses_gib.max(figures.addresses / GIB);
        worst.pages = worst.pages.max(figures.pages);
        let stats = self.engine.stats();
        worst.blocks = worst.blocks.max(stats.blocks());
        worst.refused = stats.shortages_refused;
        for _ in 0..TRIMS {
            self.clock.advance(TRIM_PERIOD);
            self.engine.trim().expect("a working driver");
        }
        self.engine.check_invariants().expect("the invariants hold");
        let stats = self.engine.stats();
        let (held, live) = (stats.reserved_bytes.all.current, stats.active_bytes.all.current);
        // The remaining free memory is on pages that are partly in use.
        let free = self.engine.page_figures().free;
        assert!(free <= held / 64 + (80 << 20), "{free} free of {held} held, {live} live");
        worst.idle_free_mib = worst.idle_free_mib.max(free >> 20);
    }

    fn end(&mut self, sim: &SimDriver) {
        for (address, _) in self.live.drain(..) {
            self.engine.free(address).expect("a live address");
        }
        self.engine.empty_cache().expect("a working driver");
        self.engine.check_invariants().expect("the invariants hold");
        assert_eq!(sim.held(), 0, "memory is still reserved");
    }
}
