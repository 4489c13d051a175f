//! The memory of a simulated device: plain allocations, reserved ranges, pages, mappings, and the
//! bytes that other tenants hold.
//!
//! Each method checks its arguments and changes nothing if it refuses them.

use std::collections::BTreeMap;
use std::ops::Range;

use super::PageHandle;
use crate::base::size::round_up;

/// The first address that the simulator chooses itself. It lies above every address that a real
/// driver returns, so the simulator's addresses never collide with recorded ones.
const OWN_ADDRESSES: u64 = 1 << 48;

/// The distance between the first addresses of two devices: an address identifies its device.
const DEVICE_ADDRESSES: u64 = 1 << 55;
const LAST_DEVICE: u32 = 127;

/// The end of the simulator's addresses.
const LAST_ADDRESS: u64 = 1 << 62;

#[derive(Debug, Default)]
pub(super) struct Memory {
    /// Plain allocations: size by address.
    plain: BTreeMap<u64, u64>,
    /// Reserved ranges: size by address.
    ranges: BTreeMap<u64, u64>,
    pages: BTreeMap<PageHandle, Page>,
    /// Mapped pages: size and page by address.
    mappings: BTreeMap<u64, (u64, PageHandle)>,
    /// Bytes that each other tenant holds.
    tenants: BTreeMap<u32, u64>,
    /// Bytes of the device held through this driver; each page counts once.
    held: u64,
    /// Bytes of host memory held through this driver; each page counts once.
    held_host: u64,
    next_address: u64,
}

#[derive(Debug)]
struct Page {
    bytes: u64,
    /// Whether the page is in host memory.
    host: bool,
    /// The number of addresses that the page is mapped at.
    mapped: u32,
}

impl Memory {
    /// Returns the empty memory of the device with this index.
    pub(super) fn new(device: u32) -> Self {
        let apart = u64::from(device.min(LAST_DEVICE)) * DEVICE_ADDRESSES;
        Self { next_address: OWN_ADDRESSES + apart, ..Self::default() }
    }

    // ---- bytes ----

    /// Returns the bytes of the device that this driver and all other tenants hold.
    pub(super) fn used(&self) -> u64 {
        let tenants: u64 = self.tenants.values().sum();
        self.held.saturating_add(tenants)
    }

    pub(super) fn held(&self) -> u64 {
        self.held
    }

    pub(super) fn held_host(&self) -> u64 {
        self.held_host
    }

    pub(super) fn tenant(&self, tenant: u32) -> u64 {
        self.tenants.get(&tenant).copied().unwrap_or(0)
    }

    pub(super) fn set_tenant(&mut self, tenant: u32, bytes: u64) {
        self.tenants.insert(tenant, bytes);
    }

    /// Returns the counter of held bytes: of host memory, or of the device.
    fn held_in(&mut self, host: bool) -> &mut u64 {
        if host { &mut self.held_host } else { &mut self.held }
    }

    // ---- addresses ----

    /// Whether a scripted range can be used: it is aligned to `unit`, lies below the simulator's
    /// own addresses, and overlaps no other range.
    pub(super) fn can_place(&self, address: u64, bytes: u64, unit: u64) -> bool {
        let end = address.saturating_add(bytes);
        address > 0
            && address.is_multiple_of(unit)
            && end <= OWN_ADDRESSES
            && self.is_clear(address..end)
    }

    /// Takes a range of `bytes` bytes, aligned to `unit`, that no earlier range has used; `None` if
    /// no addresses are left.
    pub(super) fn fresh_range(&mut self, bytes: u64, unit: u64) -> Option<u64> {
        let address = round_up(self.next_address, unit)?;
        let end = address.checked_add(round_up(bytes, unit)?)?;
        if end > LAST_ADDRESS {
            return None;
        }
        self.next_address = end;
        Some(address)
    }

    fn is_clear(&self, range: Range<u64>) -> bool {
        let clear_in = |map: &BTreeMap<u64, u64>| {
            map.range(..range.end)
                .next_back()
                .is_none_or(|(&start, &bytes)| start.saturating_add(bytes) <= range.start)
        };
        clear_in(&self.plain) && clear_in(&self.ranges)
    }

    /// Whether one reserved range contains all of `range`.
    fn is_reserved(&self, range: &Range<u64>) -> bool {
        self.ranges
            .range(..=range.start)
            .next_back()
            .is_some_and(|(&start, &bytes)| range.end <= start.saturating_add(bytes))
    }

    // ---- plain allocations and reserved ranges ----

    pub(super) fn add_plain(&mut self, address: u64, bytes: u64) {
        self.plain.insert(address, bytes);
        self.held += bytes;
    }

    /// Returns the size of a plain allocation; 0 if the address is unknown.
    pub(super) fn plain_bytes(&self, address: u64) -> u64 {
        self.plain.get(&address).copied().unwrap_or(0)
    }

    pub(super) fn remove_plain(&mut self, address: u64) -> bool {
        let bytes = self.plain.remove(&address);
        self.held -= bytes.unwrap_or(0);
        bytes.is_some()
    }

    pub(super) fn add_range(&mut self, address: u64, bytes: u64) {
        self.ranges.insert(address, bytes);
    }

    /// Removes a reserved range, which must be given whole and contain no mapping.
    pub(super) fn remove_range(&mut self, address: u64, bytes: u64) -> bool {
        let empty = self.mappings.range(address..address.saturating_add(bytes)).next().is_none();
        let known = empty && self.ranges.get(&address) == Some(&bytes);
        if known {
            self.ranges.remove(&address);
        }
        known
    }

    /// Returns the sum of the sizes of all reserved ranges.
    pub(super) fn reserved_addresses(&self) -> u64 {
        self.ranges.values().sum()
    }

    // ---- pages ----

    pub(super) fn add_page(&mut self, page: PageHandle, bytes: u64, host: bool) {
        self.pages.insert(page, Page { bytes, host, mapped: 0 });
        *self.held_in(host) += bytes;
    }

    /// Returns the size of a page; 0 if the page is unknown.
    pub(super) fn page_bytes(&self, page: PageHandle) -> u64 {
        self.pages.get(&page).map_or(0, |page| page.bytes)
    }

    /// Removes a page, which must not be mapped.
    pub(super) fn remove_page(&mut self, page: PageHandle) -> bool {
        let Some(&Page { bytes, host, mapped: 0 }) = self.pages.get(&page) else {
            return false;
        };
        self.pages.remove(&page);
        *self.held_in(host) -= bytes;
        true
    }

    /// Maps a whole page into a reserved range where nothing is mapped.
    pub(super) fn map(&mut self, address: u64, bytes: u64, page: PageHandle) -> bool {
        let range = address..address.saturating_add(bytes);
        let below = self.mappings.range(..range.end).next_back();
        let overlaps = below.is_some_and(|(&start, &(bytes, _))| start + bytes > range.start);
        if overlaps || !self.is_reserved(&range) {
            return false;
        }
        let Some(known) = self.pages.get_mut(&page).filter(|known| known.bytes == bytes) else {
            return false;
        };
        known.mapped += 1;
        self.mappings.insert(address, (bytes, page));
        true
    }

    /// Returns the mappings (address, size, page) that make up `range` exactly, in order; `None` if
    /// the range has a gap or ends inside a page.
    pub(super) fn pages_of(&self, range: Range<u64>) -> Option<Vec<(u64, u64, PageHandle)>> {
        let mut at = range.start;
        let mut found = Vec::new();
        for (&address, &(bytes, page)) in self.mappings.range(range.clone()) {
            if address != at {
                return None;
            }
            found.push((address, bytes, page));
            at += bytes;
        }
        (at == range.end && !found.is_empty()).then_some(found)
    }

    /// Removes mappings that [`pages_of`](Self::pages_of) returned.
    pub(super) fn unmap(&mut self, mappings: &[(u64, u64, PageHandle)]) {
        for (address, _, page) in mappings {
            self.mappings.remove(address);
            if let Some(page) = self.pages.get_mut(page) {
                page.mapped -= 1;
            }
        }
    }
}
