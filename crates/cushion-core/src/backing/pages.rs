//! The page table: the physical handle behind each address.
//!
//! A page may have several addresses; it is counted once, here. All paging calls of the driver are
//! made in this file, each with its rollback, so that after a failed call every page is still
//! accounted for.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;

use crate::driver::{Driver, DriverResult, PageHandle};
use crate::streams::proof::Idle;

/// The figures that a page counts in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageUse {
    /// Device memory for large requests.
    Large,
    /// Device memory for small requests.
    Small,
    /// Host memory.
    Host,
}

impl PageUse {
    pub(crate) const ALL: [Self; 3] = [Self::Large, Self::Small, Self::Host];

    /// Returns the use of a device page, by the pool that it is for.
    pub(crate) fn of(small: bool) -> Self {
        if small { Self::Small } else { Self::Large }
    }
}

/// One physical handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) bytes: u64,
    pub(crate) use_: PageUse,
    /// At how many addresses it is mapped. A page with none was refused by the driver on release;
    /// it is held and offered again.
    pub(crate) addresses: u32,
}

/// All pages.
#[derive(Debug, Default)]
pub(super) struct PageTable {
    /// Never read in order.
    pages: FxHashMap<PageHandle, Page>,
    mapped: BTreeMap<u64, PageHandle>,
    /// Pages mapped nowhere.
    unreleased: Vec<PageHandle>,
    /// Mappings behind unmapped blocks that the driver refused to undo.
    refused: BTreeSet<u64>,
    held: [u64; 3],
}

impl PageTable {
    /// Returns the bytes of all pages of one use, each page counted once.
    pub(crate) fn held(&self, use_: PageUse) -> u64 {
        self.held[use_ as usize]
    }

    /// Maps fresh pages of these sizes from `address` on, and makes them accessible. On failure
    /// nothing new is usable there: a page that the driver refuses to release is kept as
    /// unreleased, and one that it refuses to unmap stays where it is and is used next time.
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
                // A page of another size that is still mapped there is in the way.
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

    /// Creates one page for each address, then maps them. All pages are created first, because a
    /// shortage appears there and is then cheap to undo.
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

    /// Gives each page a second address, one after the other from `address` on, and makes it
    /// accessible. On failure none has one, except those that the driver refuses to unmap.
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

    /// Unmaps an address of a page that has others, or notes that the driver refused.
    pub(crate) fn unmap_or_refuse(&mut self, driver: &impl Driver, address: u64, _: &Idle<'_>) {
        self.undo(driver, address);
    }

    /// Unmaps memory that is not in use, because it was mapped a moment ago or is known to be idle.
    /// Notes it if the driver refuses.
    fn undo(&mut self, driver: &impl Driver, address: u64) {
        let page = self.mapped[&address];
        if driver.unmap(address, self.pages[&page].bytes).is_ok() {
            self.note_unmapped(address);
        } else {
            self.refused.insert(address);
        }
    }

    /// Unmaps one page and releases it. On `Err` it is still mapped. A page that was unmapped but
    /// could not be released is kept as unreleased, and that is not an error here.
    pub(crate) fn unmap(
        &mut self,
        driver: &impl Driver,
        address: u64,
        _: &Idle<'_>,
    ) -> DriverResult<()> {
        self.take_away(driver, address)
    }

    /// Like [`unmap`](Self::unmap), for memory that is known to be idle.
    fn take_away(&mut self, driver: &impl Driver, address: u64) -> DriverResult<()> {
        let page = self.mapped[&address];
        driver.unmap(address, self.pages[&page].bytes)?;
        if self.note_unmapped(address) == 0 {
            self.abandon(driver, [page]);
        }
        Ok(())
    }

    /// Unmaps the refused mappings in a range; `Err` if one is refused again. They were idle when
    /// they were first refused, and could not be used since.
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

    /// Notes that the mapping at `address`, which is idle, could not be undone.
    pub(crate) fn refuse(&mut self, address: u64, _: &Idle<'_>) {
        self.refused.insert(address);
    }

    /// Returns whether the mapping at `address` could not be undone.
    pub(crate) fn is_refused(&self, address: u64) -> bool {
        self.refused.contains(&address)
    }

    /// Tries again to give back what the driver refused: refused mappings first, then unreleased
    /// pages.
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

    /// Returns the size of the page mapped at exactly this address, if there is one.
    pub(crate) fn page_at(&self, address: u64) -> Option<u64> {
        self.mapped.get(&address).map(|page| self.pages[page].bytes)
    }

    /// Returns the page mapped at or around an address: its start there, its size and its handle.
    pub(crate) fn page_around(&self, address: u64) -> Option<(u64, u64, PageHandle)> {
        let (&start, &page) = self.mapped.range(..=address).next_back()?;
        let bytes = self.pages[&page].bytes;
        (address < start + bytes).then_some((start, bytes, page))
    }

    /// Returns the pages mapped in a range or into it, lowest first: the start there, and the size
    /// of each.
    pub(crate) fn pages_in(&self, range: std::ops::Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        let first = self.page_around(range.start).map_or(range.start, |(start, ..)| start);
        let mapped = self.mapped.range(first..range.end);
        mapped.map(|(&address, page)| (address, self.pages[page].bytes))
    }

    /// Returns every mapping: address and size.
    pub(crate) fn mappings(&self) -> impl Iterator<Item = (u64, u64)> {
        self.mapped.iter().map(|(&address, page)| (address, self.pages[page].bytes))
    }

    /// Returns every page once, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PageHandle, &Page)> {
        self.pages.iter().map(|(&handle, page)| (handle, page))
    }

    /// Returns how many pages the driver refused to release so far.
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

    /// Returns how many other addresses the page has.
    fn note_unmapped(&mut self, address: u64) -> u32 {
        let page = self.mapped.remove(&address).expect("a mapped page");
        let page = self.pages.get_mut(&page).expect("a known page");
        page.addresses -= 1;
        page.addresses
    }

    /// Releases pages that are mapped nowhere. Keeps those that the driver refuses.
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
