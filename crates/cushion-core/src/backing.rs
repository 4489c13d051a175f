//! Backing: the physical memory behind addresses, and how much of it may be held.
//!
//! Only this room makes the driver's memory calls: plain allocations, reserved addresses, pages and their mappings. It
//! knows nothing of blocks. Whatever the driver refuses to take back is kept here and offered again, so that no byte is
//! ever unaccounted for. Memory is taken away only with an [`Idle`], the streams' statement that no work uses it.

pub(crate) mod check;
mod pages;

pub(crate) use self::pages::PageUse;

use std::ops::Range;

use self::pages::PageTable;
use crate::driver::{Driver, DriverResult, PageHandle};
use crate::ledger::change::Change;
use crate::streams::proof::Idle;

/// All memory that the driver gave, but for live plain segments, which the heap lists.
#[derive(Debug, Default)]
pub(crate) struct Backing {
    pages: PageTable,
    /// Addresses reserved for lanes that pages come and go behind.
    lane_addresses: u64,
    /// Addresses that no block is in, and that the driver would not take back so far: where they begin, and how many.
    refused_ranges: Vec<(u64, u64)>,
    /// Bytes of plain segments that are detached: still held, and on their way back to the driver.
    detached: u64,
    /// The most bytes that this engine may hold, if that is less than the device has.
    limit: Option<u64>,
    /// Bytes of pages by use, as the ledger was last told.
    counted: [u64; 3],
}

impl Backing {
    pub(crate) fn new(limit: Option<u64>) -> Self {
        Self { limit, ..Self::default() }
    }

    // ---- how much may be held ----

    pub(crate) fn limit(&self) -> Option<u64> {
        self.limit
    }

    pub(crate) fn set_limit(&mut self, limit: Option<u64>) {
        self.limit = limit;
    }

    /// How much more the limit allows, while `reserved` bytes are held. Detached segments are still held.
    pub(crate) fn may_grow_by(&self, reserved: u64) -> u64 {
        let held = reserved.saturating_add(self.detached);
        self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(held))
    }

    /// The bytes that the device reports as free.
    pub(crate) fn device_free(driver: &impl Driver) -> DriverResult<u64> {
        Ok(driver.memory_info()?.free)
    }

    // ---- plain segments ----

    /// Allocates a plain segment; `None` if memory ran out.
    pub(crate) fn allocate(driver: &impl Driver, bytes: u64) -> DriverResult<Option<u64>> {
        unless_full(driver.alloc(bytes))
    }

    /// Frees plain segments, without the engine's lock: the driver waits for the whole device. Returns how many it freed
    /// before it failed.
    pub(crate) fn free(
        driver: &impl Driver,
        segments: impl Iterator<Item = u64>,
    ) -> (usize, DriverResult<()>) {
        let mut freed = 0;
        for address in segments {
            if let Err(error) = driver.free(address) {
                return (freed, Err(error));
            }
            freed += 1;
        }
        (freed, Ok(()))
    }

    /// A plain segment was detached.
    pub(crate) fn segment_detached(&mut self, bytes: u64) {
        self.detached += bytes;
    }

    /// A detached segment was freed, or is in its lane again.
    pub(crate) fn segment_settled(&mut self, bytes: u64) {
        self.detached -= bytes;
    }

    // ---- addresses ----

    /// Reserves addresses; `None` if there are none.
    pub(crate) fn reserve(
        &mut self,
        driver: &impl Driver,
        bytes: u64,
    ) -> DriverResult<Option<u64>> {
        unless_full(driver.reserve(bytes))
    }

    /// Reserves addresses for a lane that pages come and go behind; `None` if there are none.
    pub(crate) fn reserve_for_lane(
        &mut self,
        driver: &impl Driver,
        bytes: u64,
    ) -> DriverResult<Option<u64>> {
        let reserved = self.reserve(driver, bytes)?;
        if reserved.is_some() {
            self.lane_addresses += bytes;
        }
        Ok(reserved)
    }

    /// Gives the addresses of a lane's segment back. On failure they are still reserved.
    pub(crate) fn unreserve_of_lane(
        &mut self,
        driver: &impl Driver,
        address: u64,
        bytes: u64,
    ) -> DriverResult<()> {
        self.pages.retry_refused(driver, address..address + bytes)?;
        driver.unreserve(address, bytes)?;
        self.lane_addresses -= bytes;
        Ok(())
    }

    /// Addresses reserved for lanes.
    pub(crate) fn lane_addresses(&self) -> u64 {
        self.lane_addresses
    }

    /// Gives addresses back that no block is in. What the driver refuses is kept and tried again.
    pub(crate) fn give_up_range(&mut self, driver: &impl Driver, address: u64, bytes: u64) {
        let unmapped = self.pages.retry_refused(driver, address..address + bytes);
        if unmapped.and_then(|()| driver.unreserve(address, bytes)).is_err() {
            self.refused_ranges.push((address, bytes));
        }
    }

    /// Tries again to give back addresses that the driver refused.
    pub(crate) fn retry_ranges(&mut self, driver: &impl Driver) {
        for (address, bytes) in std::mem::take(&mut self.refused_ranges) {
            self.give_up_range(driver, address, bytes);
        }
    }

    // ---- pages ----

    /// Maps fresh pages of these sizes from `address` on; `None` if memory ran out. On failure nothing new is usable
    /// there.
    pub(crate) fn map_fresh(
        &mut self,
        driver: &impl Driver,
        address: u64,
        sizes: &[u64],
        use_: PageUse,
    ) -> DriverResult<Option<()>> {
        unless_full(self.pages.map_fresh(driver, address, sizes, use_))
    }

    /// Gives pages a second address each, side by side from `address` on. On failure none has one, but for those that
    /// the driver refuses to unmap.
    pub(crate) fn map_again(
        &mut self,
        driver: &impl Driver,
        address: u64,
        pages: impl Iterator<Item = PageHandle>,
    ) -> DriverResult<()> {
        self.pages.map_again(driver, address, pages)
    }

    /// Unmaps one page and releases it. On failure it is still mapped where it was.
    pub(crate) fn unmap(
        &mut self,
        driver: &impl Driver,
        address: u64,
        idle: &Idle<'_>,
    ) -> DriverResult<()> {
        self.pages.unmap(driver, address, idle)
    }

    /// As [`unmap`](Self::unmap). A mapping that the driver refuses to undo is kept and tried again.
    pub(crate) fn unmap_for_good(&mut self, driver: &impl Driver, address: u64, idle: &Idle<'_>) {
        if self.pages.unmap(driver, address, idle).is_err() {
            self.pages.refuse(address, idle);
        }
    }

    /// Takes a second address from a page. A mapping that the driver refuses to undo is kept and tried again.
    pub(crate) fn unmap_again(&mut self, driver: &impl Driver, address: u64, idle: &Idle<'_>) {
        self.pages.unmap_or_refuse(driver, address, idle);
    }

    /// Tries again to unmap and release what the driver refused.
    pub(crate) fn retry_pages(&mut self, driver: &impl Driver) {
        self.pages.retry(driver);
    }

    /// The page mapped at or around an address: where it begins there, its size and its handle.
    pub(crate) fn page_around(&self, address: u64) -> Option<(u64, u64, PageHandle)> {
        self.pages.page_around(address)
    }

    /// The pages mapped in a range or into it, lowest first: where each begins there, and its size.
    pub(crate) fn pages_in(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        self.pages.pages_in(range)
    }

    /// How many pages are held.
    pub(crate) fn page_count(&self) -> usize {
        self.pages.iter().count()
    }

    /// Bytes of all pages of one use, each page once.
    pub(crate) fn held(&self, use_: PageUse) -> u64 {
        self.pages.held(use_)
    }

    /// How the bytes of pages changed since the ledger was last told; `None` if they did not.
    pub(crate) fn take_change(&mut self) -> Option<Change> {
        let now = PageUse::ALL.map(|use_| self.pages.held(use_));
        let before = std::mem::replace(&mut self.counted, now);
        (before != now).then_some(Change::PagesHeld { before, now })
    }
}

/// Tells a shortage, `None`, from a driver that failed.
fn unless_full<T>(result: DriverResult<T>) -> DriverResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_out_of_memory() => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
