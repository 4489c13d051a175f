//! A replay under `paged` of a run recorded under `paged` makes the same driver calls, although a
//! trace does not tell which streams were busy.

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cushion_core::driver::Call;
    use cushion_core::random::Random;
    use cushion_core::size::{GIB, MIB};
    use cushion_core::{
        Action as Did, Engine, EngineConfig, Ladder, LastingStreams, Options, Policy, PoolId,
        SimClock, SimConfig, SimDriver, StreamId,
    };
    use cushion_trace::{
        Action, Event, Events, Origin, Program, ReplayConfig, Settings, Snapshot, Stacks, replay,
    };

    const PRIVATE: PoolId = PoolId(0, 1);

    /// A run on a device with enough memory.
    struct Recorded {
        engine: Engine<Arc<SimDriver>>,
        driver: Arc<SimDriver>,
        /// The stream of each request.
        asked: Vec<StreamId>,
    }

    impl Recorded {
        /// Runs a random program on three streams that are busy or idle at random. One of them
        /// sometimes allocates from a private pool.
        fn run(seed: u64) -> Self {
            let driver = Arc::new(SimDriver::new(SimConfig::with_capacity(64 * GIB)));
            let clock = Arc::new(SimClock::new(Arc::clone(&driver)));
            let config = EngineConfig { clock, ..EngineConfig::default() };
            let engine = Engine::with_config(Arc::clone(&driver), config);
            engine.set_lasting_streams(LastingStreams::All);
            engine.record_history(1 << 20);
            let mut random = Random(seed);
            let mut below = |most: u64| random.next() % most;
            let mut live: Vec<(u64, StreamId)> = Vec::new();
            let mut asked = Vec::new();
            let mut in_window = false;
            for _ in 0..800 {
                let stream = StreamId(below(3));
                match below(40) {
                    0..=3 => _ = driver.launch(stream),
                    4..=11 => driver.finish(stream),
                    12 if in_window => {
                        engine.end_allocate_to_pool(PRIVATE).unwrap();
                        in_window = false;
                    }
                    12 => {
                        let filter = Box::new(|stream| stream == StreamId(2));
                        engine.begin_allocate_to_pool(PRIVATE, filter).unwrap();
                        in_window = true;
                    }
                    13..=27 => {
                        let size = MIB * (2 + below(120)) + 512 * below(1000);
                        live.push((engine.alloc(size, stream).unwrap(), stream));
                        asked.push(stream);
                    }
                    _ if live.is_empty() => {}
                    _ => {
                        let at = usize::try_from(below(live.len() as u64)).unwrap();
                        let (address, own) = live.swap_remove(at);
                        if own != stream && below(4) == 0 {
                            driver.launch(stream);
                            engine.record_stream(address, stream).unwrap();
                        }
                        engine.free(address).unwrap();
                    }
                }
            }
            engine.check_invariants().unwrap();
            Self { engine, driver, asked }
        }

        /// Returns the snapshot that Cushion would write.
        fn snapshot(&self) -> Snapshot {
            let (entries, dropped) = self.engine.history();
            assert_eq!(dropped, 0);
            let events: Events = entries
                .iter()
                .map(|entry| Event {
                    action: match entry.action {
                        Did::Alloc => Action::Alloc,
                        Did::FreeRequested => Action::FreeRequested,
                        Did::FreeCompleted => Action::FreeCompleted,
                        Did::SegmentMap => Action::SegmentMap,
                        other => panic!("nothing is released: {other:?}"),
                    },
                    addr: entry.address,
                    size: entry.size,
                    stream: entry.stream.0,
                    time_us: 0,
                    pool: Some((entry.pool.0, entry.pool.1)),
                    stack: None,
                })
                .collect();
            let conf = Some(Options::default().to_torch_conf());
            Snapshot {
                segments: Vec::new(),
                devices: vec![events],
                settings: Settings { conf, ..Settings::default() },
                stacks: Stacks::default(),
                origin: Origin::Torch,
            }
        }
    }

    #[test]
    fn the_driver_calls_are_the_same() {
        let calls = [Call::Create, Call::Map, Call::SetAccess, Call::Unmap, Call::Release];
        let mut borrowed = 0;
        for seed in 0..60 {
            let recorded = Recorded::run(seed);
            let snapshot = recorded.snapshot();
            let program = Program::of(&snapshot, 0);
            let policy = Policy::Paged;
            let config =
                ReplayConfig { policy, ladder: Ladder::Torch, capacity: None, options: None };
            let replayed = replay(&program, &config).unwrap();
            let stats = recorded.engine.stats();
            assert_eq!(replayed.live_peak, stats.requested_bytes.all.peak, "program {seed}");
            assert_eq!(replayed.reserved_peak, stats.reserved_bytes.all.peak, "program {seed}");
            let counts = recorded.driver.counts();
            for call in calls {
                assert_eq!(replayed.driver.of(call), counts.of(call), "{call:?}, program {seed}");
            }
            let served = snapshot.devices[0].iter().filter(|event| event.action == Action::Alloc);
            let lent = |(event, asked): &(Event, &StreamId)| event.stream != asked.0;
            borrowed += served.zip(&recorded.asked).filter(lent).count();
        }
        assert!(
            borrowed > 100,
            "only {borrowed} requests were served from another stream's memory"
        );
    }
}
