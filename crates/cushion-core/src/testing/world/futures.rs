//! Requests by futures, which later actions poll or drop.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::{SimEngine, World};
use crate::testing::gpu::Gpu;
use crate::{AllocFuture, StreamId};

/// The most futures that wait at the same time.
const MOST: usize = 3;

/// The waiting futures of a program.
pub struct Futures<'e> {
    engine: &'e SimEngine,
    held: Vec<Held<'e>>,
}

struct Held<'e> {
    size: u64,
    stream: StreamId,
    future: Pin<Box<AllocFuture<'e, Arc<Gpu>>>>,
}

impl fmt::Debug for Futures<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Futures").field("held", &self.held.len()).finish_non_exhaustive()
    }
}

impl<'e> Futures<'e> {
    pub(crate) fn of(engine: &'e SimEngine) -> Self {
        Self { engine, held: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.held.len()
    }

    pub(crate) fn drop_all(&mut self) {
        self.held.clear();
    }

    pub(super) fn drop_one(&mut self, index: u8) {
        if let Some(index) = self.index(index) {
            self.held.remove(index);
        }
    }

    /// Drops the futures that request memory for a stream which is about to be destroyed.
    pub(super) fn drop_of(&mut self, stream: StreamId) {
        self.held.retain(|held| held.stream != stream);
    }

    fn index(&self, index: u8) -> Option<usize> {
        usize::from(index).checked_rem(self.held.len())
    }
}

impl World {
    pub(super) fn ask_future(&mut self, size: u64, stream: StreamId, futures: &mut Futures<'_>) {
        if self.captures.silent == Some(stream) {
            return;
        }
        if futures.held.len() >= MOST {
            futures.held.remove(0);
        }
        let future = Box::pin(futures.engine.alloc_async(size, stream));
        self.poll(Held { size, stream, future }, futures);
    }

    pub(super) fn poll_future(&mut self, index: u8, futures: &mut Futures<'_>) {
        if let Some(index) = futures.index(index)
            && self.captures.silent != Some(futures.held[index].stream)
        {
            let held = futures.held.remove(index);
            self.poll(held, futures);
        }
    }

    fn poll<'e>(&mut self, mut held: Held<'e>, futures: &mut Futures<'e>) {
        let before = self.engine.stats().allocation.all.current;
        match held.future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => futures.held.push(held),
            Poll::Ready(result) => drop(self.take(held.size, held.stream, before, result)),
        }
    }
}
