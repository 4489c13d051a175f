//! The page table: which physical handle is behind which addresses.
//!
//! A page may have several addresses; it is counted once, here. All paging calls of the driver are made in this file,
//! each with its way back, so that a call that fails leaves every page accounted for.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;

use crate::driver::{Driver, DriverResult, PageHandle};
use crate::streams::proof::Idle;

/// Which figures a page counts in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageUse {
    /// Memory of the device, for large requests,
    Large,
    /// or for small ones.
    Small,
    /// Host memory.
    Host,
}

impl PageUse {
    pub(crate) const ALL: [Self; 3] = [Self::Large, Self::Small, Self::Host];

    /// Of the device, by the pool it is for.
    pub(crate) fn of(small: bool) -> Self {
        if small { Self::Small } else { Self::Large }
    }
}

/// One physical handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) bytes: u64,
    pub(crate) use_: PageUse,
    /// At how many addresses it is mapped. A page with none is one the driver would not take back;
    /// it is held, and offered again.
    pub(crate) addresses: u32,
}

/// All pages.
#[derive(Debug, Default)]
pub(super) struct PageTable {
    /// Nobody asks for them in order.
    pages: FxHashMap<PageHandle, Page>,
    mapped: BTreeMap<u64, PageHandle>,
    /// Pages mapped nowhere.
    unreleased: Vec<PageHandle>,
    /// Mappings that were to be undone, but the driver would not: behind unmapped blocks.
    refused: BTreeSet<u64>,
    held: [u64; 3],
}

impl PageTable {
    /// Bytes of all pages of one use, each page once.
    pub(crate) fn held(&self, use_: PageUse) -> u64 {
        self.held[use_ as usize]
    }

    /// Puts fresh pages of these sizes behind the addresses from `address` on, accessible. On failure
    /// nothing new is usable there: a page that could not be given back on the way is kept as
    /// unreleased, and one that could not even be unmapped stays where it is and is used next time.
    pub(crate) fn map_fresh(
        &mut self,
        driver: &impl Driver,
        address: u64,
        sizes: &[u64],
        use_: PageUse,
    ) -> DriverResult<()> {
        let bytes: u64 = sizes.iter().sum();
        let mut missing = Vec::with_capacity(sizes.len());
        let mut at = address;
        for &size in sizes {
            if self.page_at(at) != Some(size) {
                // A page of another size that is still there is in the way.
                self.retry_refused(driver, at..at + size)?;
                missing.push((at, size));
            }
            at += size;
        }
        let mut fresh = Vec::with_capacity(missing.len());
        let filled = self.fill(driver, &missing, use_, &mut fresh);
        let Err(error) = filled.and_then(|()| driver.set_access(address, bytes)) else {
            self.refused.retain(|at| !(address..address + bytes).contains(at));
            return Ok(());
        };
        for (at, _) in missing {
            if self.mapped.contains_key(&at) {
                self.undo(driver, at);
            }
        }
        fresh.retain(|page| self.pages.get(page).is_some_and(|page| page.addresses == 0));
        self.abandon(driver, fresh);
        Err(error)
    }

    /// Creates one page for each address, then maps them. All pages are created first because a
    /// shortage shows there, and is then cheap to undo.
    fn fill(
        &mut self,
        driver: &impl Driver,
        places: &[(u64, u64)],
        use_: PageUse,
        fresh: &mut Vec<PageHandle>,
    ) -> DriverResult<()> {
        for &(_, bytes) in places {
            let page = match use_ {
                PageUse::Host => driver.create_host(bytes)?,
                PageUse::Large | PageUse::Small => driver.create(bytes)?,
            };
            self.adopt(page, bytes, use_);
            fresh.push(page);
        }
        for (&(at, bytes), &page) in places.iter().zip(&*fresh) {
            driver.map(at, bytes, page)?;
            self.note_mapped(at, page);
        }
        Ok(())
    }

    /// Gives pages a second address each, one after the other from `address` on, accessible. On failure none has
    /// one, but for those the driver would not take away again.
    pub(crate) fn map_again(
        &mut self,
        driver: &impl Driver,
        address: u64,
        pages: impl Iterator<Item = PageHandle>,
    ) -> DriverResult<()> {
        let mut at = address;
        let mut mapped = Ok(());
        for page in pages {
            let bytes = self.pages[&page].bytes;
            mapped = driver.map(at, bytes, page);
            if mapped.is_err() {
                break;
            }
            self.note_mapped(at, page);
            at += bytes;
        }
        mapped.and_then(|()| driver.set_access(address, at - address)).inspect_err(|_| {
            let again: Vec<u64> = self.mapped.range(address..at).map(|(&at, _)| at).collect();
            again.into_iter().for_each(|at| self.undo(driver, at));
        })
    }

    /// Takes an address from a page that has others, or notes that the driver would not.
    pub(crate) fn unmap_or_refuse(&mut self, driver: &impl Driver, address: u64, _: &Idle<'_>) {
        self.undo(driver, address);
    }

    /// Unmaps what nobody can use, or notes that the driver would not: it was mapped a moment ago, or is known to be
    /// idle.
    fn undo(&mut self, driver: &impl Driver, address: u64) {
        let page = self.mapped[&address];
        if driver.unmap(address, self.pages[&page].bytes).is_ok() {
            self.note_unmapped(address);
        } else {
            self.refused.insert(address);
        }
    }

    /// Unmaps one page and gives it back. `Err` means it is still mapped where it was; a page that
    /// was unmapped but not taken back is unreleased, and that is no error here.
    pub(crate) fn unmap(
        &mut self,
        driver: &impl Driver,
        address: u64,
        _: &Idle<'_>,
    ) -> DriverResult<()> {
        self.take_away(driver, address)
    }

    /// As [`unmap`](Self::unmap), for what is known to be idle.
    fn take_away(&mut self, driver: &impl Driver, address: u64) -> DriverResult<()> {
        let page = self.mapped[&address];
        driver.unmap(address, self.pages[&page].bytes)?;
        if self.note_unmapped(address) == 0 {
            self.abandon(driver, [page]);
        }
        Ok(())
    }

    /// Unmaps what is refused in a range; `Err` if something still is. It was idle when it was first to be unmapped, and
    /// nobody could use it since.
    pub(crate) fn retry_refused(
        &mut self,
        driver: &impl Driver,
        range: std::ops::Range<u64>,
    ) -> DriverResult<()> {
        let refused: Vec<u64> = self.refused.range(range).copied().collect();
        for at in refused {
            self.take_away(driver, at)?;
            self.refused.remove(&at);
        }
        Ok(())
    }

    /// The mapping at `address`, which is idle, could not be undone.
    pub(crate) fn refuse(&mut self, address: u64, _: &Idle<'_>) {
        self.refused.insert(address);
    }

    /// Whether the mapping at `address` could not be undone.
    pub(crate) fn is_refused(&self, address: u64) -> bool {
        self.refused.contains(&address)
    }

    /// Tries again to give back what the driver would not take: first what is refused, then what is
    /// unreleased.
    pub(crate) fn retry(&mut self, driver: &impl Driver) {
        if !self.refused.is_empty() {
            let retried = self.retry_refused(driver, 0..u64::MAX);
            debug_assert!(retried.is_ok() || !self.refused.is_empty(), "what is refused is kept");
        }
        if !self.unreleased.is_empty() {
            let unreleased = std::mem::take(&mut self.unreleased);
            self.abandon(driver, unreleased);
        }
    }

    /// Whether a page is mapped at exactly this address, and its size.
    pub(crate) fn page_at(&self, address: u64) -> Option<u64> {
        self.mapped.get(&address).map(|page| self.pages[page].bytes)
    }

    /// The page mapped at or around an address: where it begins there, its size and its handle.
    pub(crate) fn page_around(&self, address: u64) -> Option<(u64, u64, PageHandle)> {
        let (&start, &page) = self.mapped.range(..=address).next_back()?;
        let bytes = self.pages[&page].bytes;
        (address < start + bytes).then_some((start, bytes, page))
    }

    /// The pages mapped in a range or into it, lowest first: where each begins there, and its size.
    pub(crate) fn pages_in(&self, range: std::ops::Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        let first = self.page_around(range.start).map_or(range.start, |(start, ..)| start);
        let mapped = self.mapped.range(first..range.end);
        mapped.map(|(&address, page)| (address, self.pages[page].bytes))
    }

    /// Every mapping: address and size.
    pub(crate) fn mappings(&self) -> impl Iterator<Item = (u64, u64)> {
        self.mapped.iter().map(|(&address, page)| (address, self.pages[page].bytes))
    }

    /// Every page, once, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PageHandle, &Page)> {
        self.pages.iter().map(|(&handle, page)| (handle, page))
    }

    /// How many pages the driver would not take back so far.
    pub(crate) fn unreleased(&self) -> usize {
        self.unreleased.len()
    }

    fn adopt(&mut self, page: PageHandle, bytes: u64, use_: PageUse) {
        self.pages.insert(page, Page { bytes, use_, addresses: 0 });
        self.held[use_ as usize] += bytes;
    }

    fn note_mapped(&mut self, address: u64, page: PageHandle) {
        self.mapped.insert(address, page);
        self.pages.get_mut(&page).expect("a known page").addresses += 1;
    }

    /// Returned is how many other addresses the page has.
    fn note_unmapped(&mut self, address: u64) -> u32 {
        let page = self.mapped.remove(&address).expect("a mapped page");
        let page = self.pages.get_mut(&page).expect("a known page");
        page.addresses -= 1;
        page.addresses
    }

    /// Gives back pages that are mapped nowhere; keeps those the driver refuses.
    fn abandon(&mut self, driver: &impl Driver, pages: impl IntoIterator<Item = PageHandle>) {
        for page in pages {
            if driver.release(page).is_ok() {
                let gone = self.pages.remove(&page).expect("a known page");
                self.held[gone.use_ as usize] -= gone.bytes;
            } else {
                self.unreleased.push(page);
            }
        }
    }
}
