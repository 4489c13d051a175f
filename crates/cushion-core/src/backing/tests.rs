//! The backing over a simulated device whose calls fail: no byte is ever unaccounted for.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Backing, PageUse};
use crate::base::names::{PolicyIndex, Tag};
use crate::base::size::MIB;
use crate::driver::{Call, FailWhen, Fault, SimConfig, SimDriver, StreamId};
use crate::heap::Heap;
use crate::heap::block::BlockState;
use crate::heap::pool::{LaneId, PoolTable};
use crate::heap::segment::{Kind, Segment};
use crate::ledger::change::Change;
use crate::ledger::lanes::Lanes;
use crate::streams::Streams;
use crate::streams::proof::{Idle, Proof};

const PAGE: u64 = 2 * MIB;
/// Addresses of the lane.
const ADDRESSES: u64 = 8 * PAGE;

/// The statement that the pages of the tests are idle, of a block that stands for all of them.
fn idle() -> Idle<'static> {
    let mut heap = Heap::new(Arc::new(Lanes::default()));
    let lane = LaneId { pool: PoolTable::LARGE, stream: StreamId(0) };
    let (kind, policy, tag) = (Kind::Homes, PolicyIndex(0), Tag::NONE);
    let segment = Segment { address: PAGE, size: PAGE, lane, kind, policy, tag };
    let id = heap.add_segment(segment, BlockState::Free);
    let streams = Streams::default();
    streams.idle(&heap, id, Proof::of_device(streams.now())).expect("nobody has had it")
}

/// A backing, and what its callers believe to be mapped.
struct Rig {
    gpu: SimDriver,
    backing: Backing,
    idle: Idle<'static>,
    /// Where pages are, and their sizes.
    mapped: BTreeMap<u64, u64>,
    lane: Option<u64>,
}

impl Rig {
    fn new() -> Self {
        Self {
            gpu: SimDriver::new(SimConfig::with_capacity(64 * MIB)),
            backing: Backing::new(None),
            idle: idle(),
            mapped: BTreeMap::new(),
            lane: None,
        }
    }

    /// Checks the backing against itself, against its callers and against the device. `spare` are
    /// addresses beside the lane's that are still reserved.
    fn check(&mut self, spare: Option<u64>) {
        let before = self.backing.counted;
        let now = PageUse::ALL.map(|use_| self.backing.held(use_));
        let change = self.backing.take_change();
        assert_eq!(change, (before != now).then_some(Change::PagesHeld { before, now }));
        assert_eq!(self.backing.take_change(), None);
        assert_eq!([now[0] + now[1], now[2]], [self.gpu.held(), self.gpu.held_host()]);

        let mut unclaimed = self.backing.check().unwrap();
        for (&at, &bytes) in &self.mapped {
            unclaimed.claim(at, at + bytes, Some(bytes)).unwrap();
        }
        for start in [self.lane, spare].into_iter().flatten() {
            unclaimed.claim_nothing(start, start + ADDRESSES).unwrap();
        }
        unclaimed.check_rest().unwrap();
        let reserved = if self.lane.is_some() { ADDRESSES } else { 0 };
        self.backing.check_figures(reserved, 0).unwrap();
        let others = if spare.is_some() { ADDRESSES } else { 0 };
        let refused: u64 = self.backing.refused_ranges.iter().map(|&(_, bytes)| bytes).sum();
        assert_eq!(self.gpu.reserved_addresses(), reserved + others + refused);
    }

    /// Maps fresh pages; returns whether they are there.
    fn map(&mut self, at: u64, sizes: &[u64], use_: PageUse) -> bool {
        let mapped = self.backing.map_fresh(&self.gpu, at, sizes, use_);
        let is_mapped = matches!(mapped, Ok(Some(())));
        if is_mapped {
            let mut at = at;
            for &size in sizes {
                self.mapped.insert(at, size);
                at += size;
            }
        }
        is_mapped
    }

    fn unmap(&mut self, at: u64) -> bool {
        let unmapped = self.backing.unmap(&self.gpu, at, &self.idle).is_ok();
        assert_eq!(self.backing.page_around(at).is_none(), unmapped, "mapped where it was");
        if unmapped {
            self.mapped.remove(&at);
        }
        unmapped
    }

    /// Every operation once, most of them with what an earlier one left behind.
    fn run(&mut self) {
        let Ok(Some(lane)) = self.backing.reserve_for_lane(&self.gpu, ADDRESSES) else { return };
        self.lane = Some(lane);
        self.check(None);
        for _ in 0..2 {
            // The second time it finds what the first one could not undo.
            if self.map(lane, &[PAGE, 2 * PAGE], PageUse::Large) {
                break;
            }
            self.check(None);
        }
        self.check(None);
        self.map(lane + 4 * PAGE, &[PAGE, PAGE], PageUse::Small);
        self.check(None);
        self.stitch();
        self.check(None);

        if self.mapped.contains_key(&lane) {
            self.unmap(lane);
            self.check(None);
        }
        if self.mapped.remove(&(lane + PAGE)).is_some() {
            self.backing.unmap_for_good(&self.gpu, lane + PAGE, &self.idle);
            self.check(None);
            // A page of another size may still be in the way.
            self.map(lane + PAGE, &[PAGE, PAGE], PageUse::Large);
            self.check(None);
        }
        self.backing.retry_pages(&self.gpu);
        self.check(None);
        self.spill();
        self.check(None);
    }

    /// Gives all pages second addresses, takes those away, and gives the addresses back.
    fn stitch(&mut self) {
        let Ok(Some(stitch)) = self.backing.reserve(&self.gpu, ADDRESSES) else { return };
        let pages: Vec<_> =
            self.mapped.keys().map(|&at| self.backing.page_around(at).unwrap()).collect();
        let handles = pages.iter().map(|&(_, _, page)| page);
        if !pages.is_empty() && self.backing.map_again(&self.gpu, stitch, handles).is_ok() {
            let mut at = stitch;
            let held = self.gpu.held();
            for &(home, bytes, page) in &pages {
                assert_eq!(self.backing.page_around(at), Some((at, bytes, page)));
                assert_eq!(self.backing.page_around(home), Some((home, bytes, page)));
                self.backing.unmap_again(&self.gpu, at, &self.idle);
                at += bytes;
            }
            assert_eq!(self.gpu.held(), held, "the pages stay at their homes");
        }
        self.check(Some(stitch));
        self.backing.give_up_range(&self.gpu, stitch, ADDRESSES);
    }

    /// Takes host memory, and gives it back.
    fn spill(&mut self) {
        let Ok(Some(at)) = self.backing.reserve(&self.gpu, ADDRESSES) else { return };
        if self.map(at, &[PAGE], PageUse::Host) {
            self.check(Some(at));
            self.mapped.remove(&at);
            self.backing.unmap_for_good(&self.gpu, at, &self.idle);
        }
        self.check(Some(at));
        self.backing.give_up_range(&self.gpu, at, ADDRESSES);
    }

    /// Gives everything back, as far as the driver takes it.
    fn give_back(&mut self) {
        let mapped: Vec<u64> = self.mapped.keys().copied().collect();
        for at in mapped {
            self.unmap(at);
        }
        self.backing.retry_pages(&self.gpu);
        self.check(None);
        self.backing.retry_ranges(&self.gpu);
        self.check(None);
        if self.mapped.is_empty()
            && let Some(lane) = self.lane
            && self.backing.unreserve_of_lane(&self.gpu, lane, ADDRESSES).is_ok()
        {
            self.lane = None;
        }
        self.check(None);
    }

    /// The driver works again: nothing is left on the device.
    fn end(&mut self) {
        self.gpu.clear_failures();
        // First what is refused behind known addresses, then what is released.
        self.give_back();
        self.give_back();
        assert_eq!((self.gpu.held(), self.gpu.held_host()), (0, 0));
        assert_eq!((self.gpu.reserved_addresses(), self.backing.page_count()), (0, 0));
        assert_eq!(self.backing.lane_addresses(), 0);
        assert_eq!(PageUse::ALL.map(|use_| self.backing.held(use_)), [0; 3]);
    }
}

/// How many calls it takes if none fails.
fn calls() -> u64 {
    let mut rig = Rig::new();
    rig.run();
    assert_eq!(rig.mapped.len(), 4, "everything but one page is mapped");
    rig.give_back();
    let calls = rig.gpu.counts().total();
    rig.end();
    assert_eq!(rig.gpu.counts().total(), calls, "it was all given back before");
    calls
}

fn run_with(failures: &[FailWhen], fault: Fault) {
    let mut rig = Rig::new();
    failures.iter().for_each(|&when| rig.gpu.fail(when, fault));
    rig.run();
    rig.give_back();
    rig.end();
}

#[test]
fn nothing_is_lost_whichever_call_fails() {
    let calls = calls();
    assert!(calls > 30, "{calls}");
    for fault in [Fault::OutOfMemory, Fault::Failed(700)] {
        for nth in 1..=calls + 3 {
            run_with(&[FailWhen::NthOfAny(nth)], fault);
        }
    }
}

#[test]
fn nothing_is_lost_whichever_two_calls_fail() {
    let calls = calls();
    for first in 1..=calls {
        for second in first + 1..=(first + 12).min(calls + 6) {
            let failures = [FailWhen::NthOfAny(first), FailWhen::NthOfAny(second)];
            run_with(&failures, Fault::Failed(700));
        }
    }
}

#[test]
fn nothing_is_lost_if_one_kind_of_call_fails_every_time() {
    for call in Call::ALL {
        run_with(&[FailWhen::Every(call)], Fault::Failed(700));
        // Pages are mapped, and cannot be made accessible or undone.
        run_with(&[FailWhen::Every(call), FailWhen::Every(Call::Unmap)], Fault::Failed(700));
        run_with(&[FailWhen::Every(call), FailWhen::Every(Call::Release)], Fault::Failed(700));
    }
}

#[test]
fn a_shortage_is_told_from_a_failure() {
    let mut rig = Rig::new();
    let lane = rig.backing.reserve_for_lane(&rig.gpu, 64 * MIB).unwrap().unwrap();
    let sizes = [PAGE; 32];
    let map =
        |rig: &mut Rig, sizes: &[u64]| rig.backing.map_fresh(&rig.gpu, lane, sizes, PageUse::Large);
    rig.gpu.set_tenant(1, PAGE);
    assert_eq!(map(&mut rig, &sizes), Ok(None), "one page is missing");
    assert_eq!(rig.gpu.held(), 0, "those that were made are released");
    rig.gpu.fail(FailWhen::Nth(Call::SetAccess, 1), Fault::Failed(3));
    assert!(map(&mut rig, &sizes[1..]).is_err());
    assert_eq!(rig.gpu.held(), 0);
    assert_eq!(map(&mut rig, &sizes[1..]), Ok(Some(())));
    assert_eq!(Backing::device_free(&rig.gpu), Ok(0));
    assert_eq!(Backing::allocate(&rig.gpu, PAGE), Ok(None));
    rig.gpu.fail(FailWhen::Nth(Call::Alloc, 1), Fault::Failed(3));
    assert!(Backing::allocate(&rig.gpu, PAGE).is_err());
}

#[test]
fn a_page_that_could_not_be_undone_is_used_next_time() {
    let mut rig = Rig::new();
    let lane = rig.backing.reserve_for_lane(&rig.gpu, ADDRESSES).unwrap().unwrap();
    rig.lane = Some(lane);
    rig.gpu.fail(FailWhen::Every(Call::SetAccess), Fault::Failed(3));
    rig.gpu.fail(FailWhen::Every(Call::Unmap), Fault::Failed(3));
    assert!(!rig.map(lane, &[PAGE, PAGE], PageUse::Large));
    rig.check(None);
    assert_eq!(rig.gpu.held(), 2 * PAGE);
    rig.gpu.clear_failures();
    assert!(rig.map(lane, &[PAGE, PAGE], PageUse::Large));
    rig.check(None);
    assert_eq!(rig.gpu.counts().of(Call::Create), 2);
    rig.end();
}

#[test]
fn pages_are_found_by_any_address_in_them() {
    let mut rig = Rig::new();
    let lane = rig.backing.reserve_for_lane(&rig.gpu, ADDRESSES).unwrap().unwrap();
    assert!(rig.map(lane + PAGE, &[PAGE, 3 * PAGE], PageUse::Large));
    let around = |at| rig.backing.page_around(at).map(|(start, bytes, _)| (start - lane, bytes));
    assert_eq!(around(lane + PAGE - 1), None);
    assert_eq!(around(lane + PAGE), Some((PAGE, PAGE)));
    assert_eq!(around(lane + 4 * PAGE + 5), Some((2 * PAGE, 3 * PAGE)));
    assert_eq!(around(lane + 5 * PAGE), None);
    let within = |range| rig.backing.pages_in(range).collect::<Vec<_>>();
    let both = [(lane + PAGE, PAGE), (lane + 2 * PAGE, 3 * PAGE)];
    assert_eq!(within(lane..lane + ADDRESSES), both);
    assert_eq!(within(lane + 3 * PAGE..lane + 4 * PAGE), both[1..]);
    assert_eq!(within(lane..lane + 2 * PAGE), both[..1]);
    assert_eq!(within(lane + 5 * PAGE..lane + ADDRESSES), []);
}

#[test]
fn detached_segments_count_towards_the_limit() {
    let mut backing = Backing::new(Some(100));
    assert_eq!((backing.may_grow_by(30), backing.may_grow_by(130)), (70, 0));
    backing.segment_detached(50);
    assert_eq!(backing.may_grow_by(30), 20);
    backing.check_figures(0, 50).unwrap();
    assert!(backing.check_figures(0, 40).is_err());
    backing.segment_settled(50);
    assert_eq!(backing.may_grow_by(30), 70);
    backing.set_limit(None);
    assert_eq!((backing.limit(), backing.may_grow_by(1 << 60)), (None, u64::MAX));
}

#[test]
fn freeing_segments_stops_at_the_first_that_fails() {
    let gpu = SimDriver::new(SimConfig::with_capacity(64 * MIB));
    let segments: Vec<u64> =
        (0..4).map(|_| Backing::allocate(&gpu, MIB).unwrap().unwrap()).collect();
    gpu.fail(FailWhen::Nth(Call::Free, 3), Fault::Failed(3));
    let (freed, result) = Backing::free(&gpu, segments.iter().copied());
    assert!(freed == 2 && result.is_err());
    assert_eq!(gpu.held(), 2 * MIB);
    assert_eq!(Backing::free(&gpu, segments[2..].iter().copied()), (2, Ok(())));
    assert_eq!(gpu.held(), 0);
}

/// The check is what the tests above rely on.
#[test]
fn the_check_finds_pages_behind_no_block() {
    let mut rig = Rig::new();
    let lane = rig.backing.reserve_for_lane(&rig.gpu, ADDRESSES).unwrap().unwrap();
    assert!(rig.map(lane, &[PAGE], PageUse::Small));
    assert!(rig.backing.check().is_err(), "the ledger was not told");
    assert!(rig.backing.take_change().is_some());
    assert!(rig.backing.check().unwrap().check_rest().is_err());
    assert!(rig.backing.check().unwrap().claim_nothing(lane, lane + PAGE).is_err());
    assert!(rig.backing.check().unwrap().claim(lane, lane + 2 * PAGE, None).is_err());
    assert!(rig.backing.check().unwrap().claim(lane, lane + PAGE, Some(2 * PAGE)).is_err());
    let (_, _, page) = rig.backing.page_around(lane).unwrap();
    let mut unclaimed = rig.backing.check().unwrap();
    assert!(unclaimed.claim_page(lane + PAGE, PAGE, page).is_err());
    unclaimed.claim_page(lane, PAGE, page).unwrap();
    unclaimed.check_rest().unwrap();
}
