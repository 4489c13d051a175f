//! The backing's share of the invariant check.

use std::collections::BTreeMap;

use super::{Backing, PageUse};
use crate::base::check::{Violation, ensure};
use crate::driver::PageHandle;

/// Mappings that no room has claimed yet: address and size.
#[derive(Debug)]
pub(crate) struct Unclaimed<'a> {
    backing: &'a Backing,
    mappings: BTreeMap<u64, u64>,
}

impl Backing {
    /// Checks pages, mappings and figures against each other. Returns all mappings, for the owners
    /// of the addresses to claim.
    pub(crate) fn check(&self) -> Result<Unclaimed<'_>, Violation> {
        let mut held = [0; 3];
        let mut addresses = 0;
        let mut unreleased = 0;
        for (_, page) in self.pages.iter() {
            held[page.use_ as usize] += page.bytes;
            addresses += page.addresses;
            unreleased += usize::from(page.addresses == 0);
        }
        let mappings: BTreeMap<u64, u64> = self.pages.mappings().collect();
        ensure!(addresses as usize == mappings.len(), "mappings and pages disagree");
        ensure!(unreleased == self.pages.unreleased(), "{unreleased} pages have no address");
        ensure!(
            held == PageUse::ALL.map(|use_| self.held(use_)) && held == self.counted,
            "pages of {held:?} bytes, but {:?} counted",
            self.counted
        );
        Ok(Unclaimed { backing: self, mappings })
    }

    /// Checks the addresses of lanes and the detached bytes against a recount.
    pub(crate) fn check_figures(&self, addresses: u64, detached: u64) -> Result<(), Violation> {
        ensure!(
            addresses == self.lane_addresses,
            "{} addresses reserved, a recount gives {addresses}",
            self.lane_addresses
        );
        ensure!(
            detached == self.detached,
            "{} bytes are detached, a recount gives {detached}",
            self.detached
        );
        Ok(())
    }
}

impl Unclaimed<'_> {
    /// Claims the pages behind `start..end`: whole, without gaps, of `page_size` if one is given.
    pub(crate) fn claim(
        &mut self,
        start: u64,
        end: u64,
        page_size: Option<u64>,
    ) -> Result<(), Violation> {
        let mut at = start;
        while at < end {
            let Some((first, bytes, _)) = self.backing.page_around(at) else {
                return Err(Violation(format!("no page at {at:#x} of {start:#x}..{end:#x}")));
            };
            ensure!(
                page_size.is_none_or(|size| size == bytes) && !self.backing.pages.is_refused(first),
                "a page of {bytes} bytes at {first:#x} behind {start:#x}..{end:#x}"
            );
            self.mappings.remove(&first);
            at = first + bytes;
        }
        Ok(())
    }

    /// Checks that nothing is mapped behind `start..end`, except mappings that the driver refused
    /// to undo.
    pub(crate) fn claim_nothing(&mut self, start: u64, end: u64) -> Result<(), Violation> {
        for (at, _) in self.mappings.extract_if(start..end, |_, _| true) {
            ensure!(self.backing.pages.is_refused(at), "a page at {at:#x} behind no block");
        }
        Ok(())
    }

    /// Claims one mapping of a page.
    pub(crate) fn claim_page(
        &mut self,
        at: u64,
        bytes: u64,
        page: PageHandle,
    ) -> Result<(), Violation> {
        let here = self.backing.page_around(at);
        ensure!(
            here == Some((at, bytes, page)) && !self.backing.pages.is_refused(at),
            "{page:?} of {bytes} bytes is not at {at:#x}: {here:?}"
        );
        self.mappings.remove(&at);
        Ok(())
    }

    /// Checks that all unclaimed mappings are at addresses that the driver refused to take back.
    pub(crate) fn check_rest(mut self) -> Result<(), Violation> {
        let refused = &self.backing.refused_ranges;
        let in_refused =
            |at: u64| refused.iter().any(|&(start, size)| (start..start + size).contains(&at));
        self.mappings.retain(|&at, _| !(self.backing.pages.is_refused(at) && in_refused(at)));
        ensure!(self.mappings.is_empty(), "pages at {:x?}, behind no block", self.mappings);
        Ok(())
    }
}
