//! Backing: the physical memory behind addresses, and the limit on it.
//!
//! Only this room makes the driver's memory calls: plain allocations, reserved addresses, pages and
//! their mappings. It knows nothing of blocks. Memory that the driver refuses to take back is kept
//! here and offered again, so that every byte stays accounted for. Memory is taken away only with
//! an [`Idle`], evidence from the streams that no work uses it.

pub(crate) mod check;
mod pages;

pub(crate) use self::pages::PageUse;

use std::ops::Range;

use self::pages::PageTable;
use crate::driver::{Driver, DriverResult, PageHandle};
use crate::ledger::change::Change;
use crate::streams::proof::Idle;

/// All memory that the driver provided, except live plain segments, which the heap lists.
#[derive(Debug, Default)]
pub(crate) struct Backing {
    pages: PageTable,
    /// Addresses reserved for lanes, behind which pages are mapped and unmapped.
    lane_addresses: u64,
    /// Addresses without a block that the driver refused to take back so far: start and size.
    refused_ranges: Vec<(u64, u64)>,
    /// Bytes of detached plain segments: still held, and on their way back to the driver.
    detached: u64,
    /// The most bytes that this engine may hold, if that is less than the device has.
    limit: Option<u64>,
    /// Bytes of pages by use, as last passed to the ledger.
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

    /// Returns how many more bytes the limit allows while `reserved` bytes are held. Detached
    /// segments count as held.
    pub(crate) fn may_grow_by(&self, reserved: u64) -> u64 {
        let held = reserved.saturating_add(self.detached);
        self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(held))
    }

    /// Returns the bytes that the device reports as free.
    pub(crate) fn device_free(driver: &impl Driver) -> DriverResult<u64> {
        Ok(driver.memory_info()?.free)
    }

    // ---- plain segments ----

    /// Allocates a plain segment. Returns `None` if memory ran out.
    pub(crate) fn allocate(driver: &impl Driver, bytes: u64) -> DriverResult<Option<u64>> {
        unless_full(driver.alloc(bytes))
    }

    /// Frees plain segments. The caller must not hold the engine's lock: the driver waits for the
    /// whole device. Returns how many it freed before it failed.
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

    /// Counts a plain segment that was detached.
    pub(crate) fn segment_detached(&mut self, bytes: u64) {
        self.detached += bytes;
    }

    /// Counts a detached segment that was freed or returned to its lane.
    pub(crate) fn segment_settled(&mut self, bytes: u64) {
        self.detached -= bytes;
    }

    // ---- addresses ----

    /// Reserves addresses. Returns `None` if there are none left.
    pub(crate) fn reserve(
        &mut self,
        driver: &impl Driver,
        bytes: u64,
    ) -> DriverResult<Option<u64>> {
        unless_full(driver.reserve(bytes))
    }

    /// Reserves addresses for pages of a lane. Returns `None` if there are none left.
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

    /// Gives back the addresses of a lane's segment. On failure they stay reserved.
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

    /// Returns the addresses reserved for lanes, in bytes.
    pub(crate) fn lane_addresses(&self) -> u64 {
        self.lane_addresses
    }

    /// Gives back addresses that contain no block. If the driver refuses, they are kept and tried
    /// again.
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

    /// Maps fresh pages of these sizes from `address` on. Returns `None` if memory ran out. On
    /// failure nothing new is usable there.
    pub(crate) fn map_fresh(
        &mut self,
        driver: &impl Driver,
        address: u64,
        sizes: &[u64],
        use_: PageUse,
    ) -> DriverResult<Option<()>> {
        unless_full(self.pages.map_fresh(driver, address, sizes, use_))
    }

    /// Gives each of these pages a second address, side by side from `address` on. On failure none
    /// has one, except those that the driver refuses to unmap.
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

    /// Like [`unmap`](Self::unmap). A mapping that the driver refuses to undo is kept and tried
    /// again.
    pub(crate) fn unmap_for_good(&mut self, driver: &impl Driver, address: u64, idle: &Idle<'_>) {
        if self.pages.unmap(driver, address, idle).is_err() {
            self.pages.refuse(address, idle);
        }
    }

    /// Removes a second address of a page. A mapping that the driver refuses to undo is kept and
    /// tried again.
    pub(crate) fn unmap_again(&mut self, driver: &impl Driver, address: u64, idle: &Idle<'_>) {
        self.pages.unmap_or_refuse(driver, address, idle);
    }

    /// Tries again to unmap and release the pages that the driver refused.
    pub(crate) fn retry_pages(&mut self, driver: &impl Driver) {
        self.pages.retry(driver);
    }

    /// Returns the page mapped at or around an address: its start there, its size and its handle.
    pub(crate) fn page_around(&self, address: u64) -> Option<(u64, u64, PageHandle)> {
        self.pages.page_around(address)
    }

    /// Returns the pages mapped in a range or into it, lowest first: the start there, and the size
    /// of each.
    pub(crate) fn pages_in(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        self.pages.pages_in(range)
    }

    /// Returns the number of pages held.
    pub(crate) fn page_count(&self) -> usize {
        self.pages.iter().count()
    }

    /// Returns the bytes of all pages of one use, each page counted once.
    pub(crate) fn held(&self, use_: PageUse) -> u64 {
        self.pages.held(use_)
    }

    /// Returns the change in bytes of pages since the last call; `None` if there is none.
    pub(crate) fn take_change(&mut self) -> Option<Change> {
        let now = PageUse::ALL.map(|use_| self.pages.held(use_));
        let before = std::mem::replace(&mut self.counted, now);
        (before != now).then_some(Change::PagesHeld { before, now })
    }
}

/// Turns an out-of-memory error of the driver into `None`.
fn unless_full<T>(result: DriverResult<T>) -> DriverResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_out_of_memory() => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
