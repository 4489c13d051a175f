//! The start of a replay: restores the memory that was held before the first event.

use cushion_core::{BlockUse, HeldSegment, PoolId, RestoreError, StreamId};

use super::outcome::{Refusal, Watch};
use super::run::{Run, Stop};

impl<W: Watch> Run<'_, W> {
    /// Restores the memory that was held before the first event. Under the recorded policy the
    /// layout is the recorded one; under another policy the live blocks are requested in address
    /// order.
    pub(super) fn begin(&mut self) -> Result<(), Stop> {
        if self.program.beginning.is_empty() {
            return Ok(());
        }
        let placed = self.restore_layout()?;
        if !self.request_blocks(&placed)? {
            return self.too_much_at_the_beginning();
        }
        self.seen.difference = None;
        if let Some(capacity) = self.goal.capacity {
            // PyTorch ran with a higher limit. Under this limit it would have released its cache.
            if self.engine.live_and_reserved().1 > capacity {
                self.engine.empty_cache()?;
            }
            if self.engine.live_and_reserved().1 > capacity {
                return self.too_much_at_the_beginning();
            }
        }
        self.count_from_here();
        Ok(())
    }

    /// Restores the recorded segments, if the policy is the recorded one. Returns for each block
    /// whether it was restored.
    fn restore_layout(&mut self) -> Result<Vec<bool>, Stop> {
        let program = self.program;
        let beginning = &program.beginning;
        let mut placed = vec![false; beginning.blocks.len()];
        if !self.goal.follows {
            return Ok(placed);
        }
        let held: Vec<HeldSegment> = beginning
            .segments
            .iter()
            .zip(&program.beginning_pools)
            .map(|(segment, &pool)| beginning.held(segment, pool))
            .collect();
        let driver = self.driver;
        let bases = self.engine.restore(&held, |held| match held.range {
            Some(range) => driver.place_reserve(range),
            None => driver.place_alloc(held.size, held.address),
        });
        driver.clear_placements();
        for ((segment, held), base) in beginning.segments.iter().zip(&held).zip(bases) {
            let base = match base {
                Ok(base) => base,
                Err(RestoreError::Driver(error)) => return Err(error.into()),
                // Its blocks are requested one by one.
                Err(_) => continue,
            };
            if held.pool != PoolId::DEFAULT {
                self.pools.uses.insert(held.pool, 1);
            }
            let slots = segment.blocks.0..segment.blocks.1;
            placed[slots.clone()].fill(true);
            for (address, block) in
                self.addresses[slots.clone()].iter_mut().zip(&beginning.blocks[slots])
            {
                *address = base + (block.address - held.address);
            }
        }
        Ok(placed)
    }

    /// Requests the blocks that are not `placed`. Returns `false` if the engine refused one.
    fn request_blocks(&mut self, placed: &[bool]) -> Result<bool, Stop> {
        let program = self.program;
        let beginning = &program.beginning;
        let mut pools = vec![PoolId::DEFAULT; placed.len()];
        for (segment, &pool) in beginning.segments.iter().zip(&program.beginning_pools) {
            pools[segment.blocks.0..segment.blocks.1].fill(pool);
        }
        for (slot, block) in beginning.blocks.iter().enumerate().filter(|&(slot, _)| !placed[slot])
        {
            if pools[slot] != self.pools.window.unwrap_or(PoolId::DEFAULT) {
                self.end_pool();
                if pools[slot] != PoolId::DEFAULT {
                    self.begin_pool(pools[slot]);
                }
            }
            match self.alloc(0, block.requested, StreamId(block.stream), None)? {
                Some(address) => self.addresses[slot] = address,
                None => return Ok(false),
            }
        }
        self.end_pool();
        Ok(true)
    }

    /// Resets all counts: the restored memory does not count as the replay's work.
    fn count_from_here(&mut self) {
        self.engine.reset_accumulated_stats();
        self.engine.reset_peak_stats();
        self.driver.reset_counts();
        self.note_peaks(0);
    }

    /// Ends the replay: the capacity is below the memory held before the first event.
    fn too_much_at_the_beginning(&mut self) -> Result<(), Stop> {
        self.count_from_here();
        let held = self.engine.snapshot();
        let blocks = held.segments.iter().flat_map(|segment| &segment.blocks);
        let free = blocks.filter(|block| block.use_ == BlockUse::Free).map(|block| block.size);
        self.seen.difference = None;
        self.seen.oom = Some(Refusal {
            event: 0,
            requested: 0,
            live: self.program.beginning.live(),
            reserved: held.reserved,
            largest_free: free.max().unwrap_or(0),
            recorded: false,
            at_beginning: true,
        });
        Err(Stop::OutOfMemory(0))
    }
}
