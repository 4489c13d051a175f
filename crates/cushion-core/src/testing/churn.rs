//! A steady load for benchmarks and for counting the work of the hot path: random sizes, with a
//! fixed number of live blocks.

use crate::{Driver, Engine, StreamId};

/// Live blocks on one stream, replaced one at a time.
#[derive(Debug)]
pub struct Churn<'a, D: Driver> {
    engine: &'a Engine<D>,
    random: Random,
    blocks: Vec<u64>,
}

impl<'a, D: Driver> Churn<'a, D> {
    const STREAM: StreamId = StreamId(0);

    /// Allocates `live` blocks.
    ///
    /// # Panics
    ///
    /// If the device is too small for the blocks.
    #[must_use]
    pub fn new(engine: &'a Engine<D>, live: usize) -> Self {
        let mut churn = Self { engine, random: Random::default(), blocks: Vec::new() };
        churn.blocks = (0..live).map(|_| churn.take()).collect();
        churn
    }

    /// Frees a random block and allocates another.
    ///
    /// # Panics
    ///
    /// If the engine refuses either.
    pub fn pair(&mut self) {
        let index = usize::try_from(self.random.next() % self.blocks.len() as u64);
        let index = index.expect("the index of a block");
        self.engine.free(self.blocks[index]).expect("a live address");
        self.blocks[index] = self.take();
    }

    /// Allocates from 512 bytes to 2 MiB; small sizes are more frequent.
    fn take(&mut self) -> u64 {
        let random = self.random.next();
        let bytes = 512 + (random >> 40) % (1 << (9 + random % 13));
        self.engine.alloc(bytes, Self::STREAM).expect("the device is large enough")
    }
}

/// Xorshift: a random generator with the same numbers on every machine.
#[derive(Debug)]
struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
