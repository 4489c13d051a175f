//! Memory over a simulated device, with no policy and no engine above it.

use std::sync::Arc;

use super::unmap::{Calls, Unmapping, join_unmapped};
use super::{GiveBack, Mem, Request};
use crate::backing::{Backing, PageUse};
use crate::base::clock::VirtualClock;
use crate::base::looks::Looks;
use crate::base::names::{Owner, PolicyIndex, PoolId, Tag};
use crate::base::size::{GIB, MIB};
use crate::driver::{
    Call, Driver, DriverResult, FailWhen, Fault, Properties, SimConfig, SimDriver, StreamId,
};
use crate::heap::Heap;
use crate::heap::block::{BlockId, BlockState};
use crate::heap::pool::{LaneId, PoolTable};
use crate::heap::segment::Kind;
use crate::ledger::Ledger;
use crate::ledger::change::{Place, Span};
use crate::ledger::history::{Action, History};
use crate::ledger::lanes::Lanes;
use crate::ledger::stats::{Counters, Stats};
use crate::options::Options;
use crate::streams::Streams;
use crate::streams::proof::{LastingStreams, Proof};

const PAGE: u64 = 2 * MIB;
const POLICY: PolicyIndex = PolicyIndex(0);
const OWN: StreamId = StreamId(1);

/// What the engine's lock protects, as far as memory goes.
struct Rig {
    gpu: SimDriver,
    device: Properties,
    heap: Heap,
    backing: Backing,
    streams: Streams,
    counters: Counters,
    history: History,
    clock: VirtualClock,
    options: Options,
    looks: Looks,
    lanes: Arc<Lanes>,
}

impl Rig {
    fn new(config: SimConfig, options: Options) -> Self {
        let lanes = Arc::new(Lanes::default());
        let mut history = History::default();
        history.restart(1000);
        let gpu = SimDriver::new(config);
        Self {
            device: gpu.properties(),
            gpu,
            heap: Heap::new(Arc::clone(&lanes)),
            backing: Backing::new(Some(GIB)),
            streams: Streams::default(),
            counters: Counters::new(None),
            history,
            clock: VirtualClock::new(),
            options,
            looks: Looks::default(),
            lanes,
        }
    }

    fn small() -> Self {
        Self::new(SimConfig::with_capacity(64 * MIB), Options::default())
    }

    fn mem(&mut self) -> Mem<'_, SimDriver> {
        Mem {
            heap: &mut self.heap,
            backing: &mut self.backing,
            streams: &mut self.streams,
            ledger: Ledger::new(&self.counters, &mut self.history, &self.clock),
            options: &self.options,
            driver: &self.gpu,
            device: &self.device,
            looks: &self.looks,
        }
    }

    fn stats(&self) -> Stats {
        self.counters.read(&self.lanes)
    }

    fn reserved(&self) -> u64 {
        self.stats().reserved_bytes.all.current
    }

    fn request(&mut self, bytes: u64) -> Request {
        self.mem().request(bytes, OWN, Owner::NOBODY, Tag(3))
    }

    /// The actions of the history so far.
    fn actions(&self) -> Vec<Action> {
        self.history.entries().map(|entry| entry.action).collect()
    }

    /// What each room says of itself, and the pages behind the blocks. `detached` bytes are on
    /// their way back.
    fn check(&self, detached: u64) {
        self.heap.check().unwrap();
        self.streams.check(&self.heap).unwrap();
        let mut unclaimed = self.backing.check().unwrap();
        for (_, block) in self.heap.blocks() {
            let kind = self.heap[block.segment].kind;
            if kind == Kind::Plain {
                continue;
            }
            if block.is_mapped() {
                unclaimed.claim(block.address, block.end(), None).unwrap();
            } else {
                unclaimed.claim_nothing(block.address, block.end()).unwrap();
            }
        }
        unclaimed.check_rest().unwrap();
        let reserved = self.heap.segments().filter(|(_, segment)| segment.is_reserved());
        let addresses = reserved.map(|(_, segment)| segment.size).sum();
        self.backing.check_figures(addresses, detached).unwrap();
        assert_eq!(self.reserved() + detached, self.gpu.held());
        assert_eq!(self.stats().spilled_bytes.current, self.gpu.held_host());
    }

    /// A segment with this many pages, all mapped and free.
    fn pages(&mut self, count: u64) -> BlockId {
        let request = self.request(PAGE);
        let mut mem = self.mem();
        let reserved = mem.reserve_segment(count * PAGE, Kind::Homes, &request, POLICY);
        let id = reserved.unwrap().unwrap();
        assert_eq!(mem.map_equal_pages(id, count * PAGE, PAGE, Tag::NONE), Ok(true));
        self.check(0);
        id
    }

    /// Unmaps what lies in a free block.
    fn unmap(&mut self, id: BlockId, start: u64, end: u64, calls: &mut Calls) -> Unmapping {
        let mut mem = self.mem();
        let proof = Proof::of_device(mem.streams.now());
        let idle = mem.idle(id, proof).expect("nobody uses it");
        mem.unmap_pages(&idle, GiveBack::Pages { start, end }, calls, |_, _, _| true)
    }
}

// ---- plain segments ----

#[test]
fn a_detached_segment_is_out_of_its_lane_and_still_held() {
    let mut rig = Rig::small();
    let request = rig.request(20 * MIB);
    let id = rig.mem().plain_segment(20 * MIB, &request, POLICY).unwrap().unwrap();
    rig.check(0);
    let before = rig.stats();
    assert_eq!(rig.reserved(), 20 * MIB);
    let room = rig.mem().may_grow_by();

    let detached = rig.mem().detach(id);
    assert_eq!((detached.address(), detached.bytes()), (rig.heap[id].address, 20 * MIB));
    rig.check(20 * MIB);
    assert_eq!((rig.reserved(), rig.stats().segment.all.current), (0, 0));
    assert_eq!(rig.mem().may_grow_by(), room, "it counts towards the limit");
    assert_eq!(rig.heap.lane(request.lane).unwrap().free().iter().count(), 0);

    rig.mem().reattach(&detached);
    rig.check(0);
    let after = rig.stats();
    assert_eq!(after.reserved_bytes.all.current, before.reserved_bytes.all.current);
    assert_eq!((after.segment.all.current, &after.lanes), (1, &before.lanes));
    assert!(rig.heap[id].is_free());
    assert_eq!(rig.actions(), [Action::SegmentAlloc], "nothing happened to the memory");
}

#[test]
fn a_freed_segment_is_forgotten() {
    let mut rig = Rig::small();
    let request = rig.request(20 * MIB);
    let kept = rig.mem().plain_segment(4 * MIB, &request, POLICY).unwrap().unwrap();
    let gone = rig.mem().plain_segment(20 * MIB, &request, POLICY).unwrap().unwrap();
    let detached = rig.mem().detach(gone);
    assert_eq!(Backing::free(&rig.gpu, [detached.address()].into_iter()), (1, Ok(())));
    rig.mem().forget(&detached, Tag(8));
    rig.check(0);
    assert!(rig.heap.get(gone).is_none() && rig.heap[kept].is_free());
    assert_eq!(rig.reserved(), 4 * MIB);
    let last = *rig.history.entries().last().unwrap();
    assert_eq!((last.action, last.size, last.tag), (Action::SegmentFree, 20 * MIB, Tag(8)));
    assert_eq!(rig.stats().num_device_free, 1);

    let detached = rig.mem().detach(kept);
    assert_eq!(Backing::free(&rig.gpu, [detached.address()].into_iter()), (1, Ok(())));
    rig.mem().forget(&detached, Tag::NONE);
    rig.check(0);
    assert!(rig.heap.lane(request.lane).is_none(), "the lane goes with its last segment");
    assert_eq!(rig.history.entries().last().unwrap().tag, Tag(3), "of the request it was made for");
}

#[test]
fn a_block_is_counted_from_its_hand_out_to_its_free() {
    let mut rig = Rig::small();
    let request = rig.request(MIB + 5);
    let id = rig.mem().plain_segment(20 * MIB, &request, POLICY).unwrap().unwrap();
    let address = rig.mem().take(id, true, &request);
    rig.check(0);
    let stats = rig.stats();
    assert_eq!(stats.requested_bytes.large_pool.current, MIB + 5);
    assert_eq!(stats.allocated_bytes.large_pool.current, request.size);
    assert_eq!(stats.inactive_split_bytes.large_pool.current, 20 * MIB - request.size);
    assert_eq!(rig.mem().begin_free(address + 1, Tag::NONE), None);
    let taken = rig.mem().begin_free(address, Tag(6)).unwrap();
    assert_eq!(rig.stats().allocation.all.current, 0);
    assert_eq!(rig.stats().active_bytes.all.current, request.size);
    rig.mem().complete_free(taken, Kind::Plain, Tag::NONE);
    rig.check(0);
    let stats = rig.stats();
    assert_eq!((stats.active.all.current, stats.inactive_split.all.current), (0, 0));
    let tags: Vec<_> = rig.history.entries().map(|entry| entry.tag).collect();
    assert_eq!(tags, [Tag(3), Tag(3), Tag(6), Tag(3)]);
    assert_eq!(rig.mem().plain_segment(GIB, &request, POLICY), Ok(None), "memory ran out");
}

#[test]
fn requests_go_to_the_pool_of_their_stream() {
    let mut rig = Rig::small();
    let graph = PoolId(0, 4);
    rig.heap.open_private(graph);
    let halves = [true, false].map(|small| rig.heap.pools().half(graph, small).unwrap());
    rig.streams.begin_recording(graph, Box::new(|stream| stream == OWN));
    let lane = |rig: &mut Rig, bytes| rig.request(bytes).lane;
    assert_eq!(lane(&mut rig, 100), LaneId { pool: halves[0], stream: OWN });
    assert_eq!(lane(&mut rig, 2 * MIB), LaneId { pool: halves[1], stream: OWN });
    drop(rig.streams.end_recording(graph));
    assert_eq!(lane(&mut rig, 100).pool, PoolTable::SMALL);
    let endless = rig.request(u64::MAX - 5);
    assert_eq!((endless.size, endless.wanted, endless.small), (u64::MAX, u64::MAX, false));
}

// ---- host memory ----

fn spilling(limit: u64, over: u64) -> Options {
    Options { spill_limit: limit, spill_over: over, ..Options::default() }
}

fn spill(rig: &mut Rig, bytes: u64) -> DriverResult<Option<u64>> {
    let request = rig.request(bytes);
    rig.mem().spill(&request, POLICY)
}

#[test]
fn host_memory_serves_only_what_the_options_allow() {
    let mut rig = Rig::new(SimConfig::with_capacity(64 * MIB), spilling(32 * MIB, 8 * MIB));
    assert_eq!(spill(&mut rig, 8 * MIB - 1), Ok(None), "too small");
    assert_eq!(spill(&mut rig, 32 * MIB + 1), Ok(None), "more than the limit");
    assert!(spill(&mut rig, 8 * MIB).unwrap().is_some());
    rig.check(0);
    assert_eq!(spill(&mut rig, 24 * MIB + 1), Ok(None), "more than is left");
    assert!(spill(&mut rig, 24 * MIB).unwrap().is_some(), "all that is left");
    rig.check(0);
    assert_eq!(spill(&mut rig, 8 * MIB), Ok(None));
    assert_eq!(rig.backing.held(PageUse::Host), 32 * MIB);
    assert_eq!((rig.reserved(), rig.stats().spilled_allocation.current), (0, 2));
    assert_eq!(rig.stats().active.all.current, 0, "the figures of the device do not count it");

    rig.options.spill_limit = u64::MAX;
    assert_eq!(spill(&mut rig, u64::MAX - 5), Ok(None), "sizes that overflow");
    let config = SimConfig { has_pages: false, ..SimConfig::with_capacity(64 * MIB) };
    let mut rig = Rig::new(config, spilling(32 * MIB, 0));
    assert_eq!(spill(&mut rig, 8 * MIB), Ok(None), "no pages");
    let config = SimConfig { host: 4 * MIB, ..SimConfig::with_capacity(64 * MIB) };
    let mut rig = Rig::new(config, spilling(32 * MIB, 0));
    assert_eq!(spill(&mut rig, 8 * MIB), Ok(None), "the host has no more");
    rig.check(0);
    assert_eq!(rig.gpu.reserved_addresses(), 0);
}

#[test]
fn spilled_memory_goes_back_once_its_own_stream_is_done() {
    let mut rig = Rig::new(SimConfig::with_capacity(64 * MIB), spilling(32 * MIB, 0));
    rig.streams.set_lasting(LastingStreams::All);
    let address = spill(&mut rig, 8 * MIB).unwrap().unwrap();
    rig.gpu.launch(OWN);
    let id = rig.mem().begin_free(address, Tag::NONE).unwrap();
    assert!(rig.mem().is_spilled(id));
    rig.mem().free_spilled(id).unwrap();
    rig.streams.process(&mut rig.heap, &rig.gpu).unwrap();
    assert_eq!(rig.streams.next_done(), None, "its stream is at work");
    rig.check(0);
    rig.gpu.finish(OWN);
    rig.streams.process(&mut rig.heap, &rig.gpu).unwrap();
    assert_eq!(rig.streams.next_done(), Some(id));
    rig.mem().complete_free_of_spill(id, Tag::NONE);
    rig.check(0);
    assert_eq!((rig.gpu.held_host(), rig.gpu.reserved_addresses()), (0, 0));
    assert!(rig.heap.get(id).is_none());
    assert_eq!(rig.actions(), [Action::Alloc, Action::FreeRequested, Action::FreeCompleted]);
}

#[test]
fn no_host_memory_is_lost_whichever_call_fails() {
    for nth in 1..30 {
        let mut rig = Rig::new(SimConfig::with_capacity(64 * MIB), spilling(32 * MIB, 0));
        rig.gpu.fail(FailWhen::NthOfAny(nth), Fault::Failed(700));
        for _ in 0..2 {
            let Ok(Some(address)) = spill(&mut rig, 8 * MIB) else {
                rig.check(0);
                continue;
            };
            rig.check(0);
            let id = rig.mem().begin_free(address, Tag::NONE).unwrap();
            // Nothing says that the stream still exists.
            rig.mem().free_spilled(id).unwrap();
            let proof = Proof::of_device(rig.streams.now());
            rig.streams.device_waited_for(&mut rig.heap, proof);
            assert_eq!(rig.streams.next_done(), Some(id));
            rig.mem().complete_free_of_spill(id, Tag::NONE);
            rig.check(0);
        }
        rig.gpu.clear_failures();
        rig.mem().retry_refused();
        rig.check(0);
        let held = (rig.gpu.held_host(), rig.gpu.reserved_addresses());
        assert_eq!(held, (0, 0), "call {nth} failed");
    }
}

// ---- pages ----

#[test]
fn unmapping_stops_when_the_calls_of_one_hold_are_spent() {
    let mut rig = Rig::small();
    let id = rig.pages(24);
    let (start, end) = (rig.heap[id].address, rig.heap[id].end());
    let mut rest = id;
    let mut at = start;
    let mut holds = 0;
    loop {
        rig.gpu.reset_counts();
        let mut calls = Calls::of_one_hold();
        let unmapping = rig.unmap(rest, at, end, &mut calls);
        let span = unmapping.unmapped.expect("some pages fit into one hold");
        assert_eq!(span.address, at);
        at += span.bytes;
        holds += 1;
        assert!(rig.gpu.counts().total() <= 32, "{:?}", rig.gpu.counts());
        rig.check(0);
        assert_eq!(rig.reserved(), end - at);
        let Some(id) = unmapping.rest.unwrap() else { break };
        rest = id;
        assert!(at < end && !calls.are_left());
        let block = &rig.heap[rest];
        assert_eq!((block.address, block.end(), block.state), (at, end, BlockState::Free));
    }
    assert_eq!((at, holds), (end, 3));
    assert!(rig.heap.segments().next().is_none(), "the addresses go with the last page");
    assert_eq!((rig.gpu.held(), rig.gpu.reserved_addresses()), (0, 0));
}

#[test]
fn without_calls_the_whole_block_is_the_rest() {
    let mut rig = Rig::small();
    let id = rig.pages(4);
    let (start, end) = (rig.heap[id].address, rig.heap[id].end());
    let mut spent = Calls::of_one_hold();
    assert!(!spent.spend(33) && !spent.are_left());
    let unmapping = rig.unmap(id, start, end, &mut spent);
    assert_eq!((unmapping.unmapped, unmapping.rest), (None, Ok(Some(id))));
    rig.check(0);
    assert_eq!(rig.heap[id].size, 4 * PAGE);
}

#[test]
fn pages_in_the_middle_of_a_block_leave_the_rest_free() {
    let mut rig = Rig::small();
    let id = rig.pages(6);
    let start = rig.heap[id].address;
    let (from, to) = (start + PAGE, start + 3 * PAGE);
    let unmapping = rig.unmap(id, from, to, &mut Calls::unlimited());
    let place = Place { pool: PoolId::DEFAULT, small: false, stream: OWN, host: false };
    let expected = Span { address: from, bytes: 2 * PAGE, place };
    assert_eq!((unmapping.unmapped, unmapping.rest), (Some(expected), Ok(None)));
    rig.check(0);
    let mut blocks: Vec<_> =
        rig.heap.blocks().map(|(_, it)| (it.address - start, it.size, it.state)).collect();
    blocks.sort_by_key(|&(at, ..)| at);
    let (free, unmapped) = (BlockState::Free, BlockState::Unmapped);
    let parts = [(0, PAGE, free), (PAGE, 2 * PAGE, unmapped), (3 * PAGE, 3 * PAGE, free)];
    assert_eq!(blocks, parts);
    assert_eq!(rig.heap[id].state, unmapped, "it keeps the block's identity");
    rig.mem().note_unmapped(unmapping.unmapped, Tag(9));
    let last = *rig.history.entries().last().unwrap();
    assert_eq!((last.action, last.address, last.size), (Action::SegmentUnmap, from, 2 * PAGE));
    let mut mem = rig.mem();
    assert!(mem.idle(id, Proof::of_device(mem.streams.now())).is_none(), "not twice");
    mem.note_unmapped(None, Tag(9));
    assert_eq!(rig.history.entries().count(), 2);
}

#[test]
fn a_page_that_may_not_go_stops_unmapping() {
    let mut rig = Rig::small();
    let id = rig.pages(4);
    let (start, end) = (rig.heap[id].address, rig.heap[id].end());
    let mut mem = rig.mem();
    let idle = mem.idle(id, Proof::of_device(mem.streams.now())).unwrap();
    let mut asked = 0;
    let may_go = |_: &mut Mem<'_, SimDriver>, _, _: &mut Calls| {
        asked += 1;
        asked < 3
    };
    let what = GiveBack::Pages { start, end };
    let unmapping = mem.unmap_pages(&idle, what, &mut Calls::unlimited(), may_go);
    assert_eq!(unmapping.unmapped.map(|span| span.bytes), Some(2 * PAGE));
    let rest = unmapping.rest.unwrap().unwrap();
    assert_eq!((mem.heap[rest].address, mem.heap[rest].end()), (start + 2 * PAGE, end));
    let unmapping = mem.unmap_pages(&idle, what, &mut Calls::unlimited(), |_, _, _| true);
    assert!(unmapping.unmapped.is_none() && unmapping.rest == Ok(None), "it is not free any more");
    rig.check(0);
}

#[test]
fn a_failure_half_way_keeps_what_was_done() {
    for (call, is_unmapped) in [(Call::Unmap, 2), (Call::Release, 4)] {
        let mut rig = Rig::small();
        let id = rig.pages(4);
        let (start, end) = (rig.heap[id].address, rig.heap[id].end());
        rig.gpu.fail(FailWhen::Nth(call, 3), Fault::Failed(700));
        let unmapping = rig.unmap(id, start, end, &mut Calls::unlimited());
        rig.check(0);
        assert_eq!(unmapping.unmapped.map(|span| span.bytes / PAGE), Some(is_unmapped));
        assert_eq!(unmapping.rest.is_err(), call == Call::Unmap);
        // A page that was unmapped and not released is held, and offered again.
        assert_eq!(rig.gpu.held() / PAGE, if call == Call::Unmap { 2 } else { 1 });
        rig.mem().retry_refused();
        rig.check(0);
        assert_eq!(rig.gpu.held() / PAGE, 4 - is_unmapped);
    }
}

#[test]
fn addresses_that_the_driver_keeps_are_offered_again() {
    let mut rig = Rig::small();
    let id = rig.pages(1);
    let (start, end) = (rig.heap[id].address, rig.heap[id].end());
    rig.gpu.fail(FailWhen::Nth(Call::Unreserve, 1), Fault::Failed(700));
    let unmapping = rig.unmap(id, start, end, &mut Calls::unlimited());
    assert!(unmapping.unmapped.is_some() && unmapping.rest.is_err());
    rig.check(0);
    assert_eq!(rig.heap[id].state, BlockState::Unmapped);
    rig.mem().retry_refused();
    rig.check(0);
    assert!(rig.heap.get(id).is_none());
    assert_eq!(rig.gpu.reserved_addresses(), 0);
}

fn map_one_page(mem: &mut Mem<'_, SimDriver>, id: BlockId, _: u64) -> DriverResult<bool> {
    mem.map_equal_pages(id, PAGE, PAGE, Tag::NONE)
}

#[test]
fn what_was_mapped_before_memory_ran_out_stays() {
    let mut rig = Rig::small();
    let request = rig.request(PAGE);
    let mut mem = rig.mem();
    let reserved = mem.reserve_segment(100 * PAGE, Kind::Homes, &request, POLICY);
    let id = reserved.unwrap().unwrap();
    let id = mem.extend(id, 8 * PAGE, map_one_page).unwrap().unwrap();
    assert_eq!((mem.heap[id].size, mem.heap[id].state), (8 * PAGE, BlockState::Free));
    // The device has 32.
    assert_eq!(mem.extend(id, 40 * PAGE, map_one_page), Ok(None));
    rig.check(0);
    assert_eq!(rig.reserved(), 32 * PAGE);
    let lane = rig.heap.lane(request.lane).unwrap();
    assert_eq!(lane.free().largest(), 32 * PAGE);
    assert_eq!(rig.mem().room(), Ok(0));
}

#[test]
fn unmapped_addresses_join_if_they_follow_each_other() {
    let place = Place { pool: PoolId::DEFAULT, small: false, stream: OWN, host: false };
    let span = |address, bytes| Some(Span { address, bytes, place });
    let mut open = None;
    assert_eq!(join_unmapped(&mut open, None), None);
    assert_eq!(join_unmapped(&mut open, span(10, 5)), None);
    assert_eq!(join_unmapped(&mut open, span(15, 5)), None);
    assert_eq!(join_unmapped(&mut open, None), None);
    assert_eq!(open, span(10, 10));
    assert_eq!(join_unmapped(&mut open, span(30, 5)), span(10, 10));
    assert_eq!(open, span(30, 5));
}

#[test]
fn lanes_get_all_the_addresses_they_may_need_while_there_is_plenty() {
    let mut rig = Rig::small();
    let request = rig.request(4 * MIB);
    // Five halves of 64 MiB.
    assert_eq!(rig.mem().addresses_for_homes(&request, 100 * MIB), 100 * MIB);
    let mut mem = rig.mem();
    mem.reserve_segment(100 * MIB, Kind::Homes, &request, POLICY).unwrap().unwrap();
    let other = Request { lane: LaneId { stream: StreamId(2), ..request.lane }, ..request };
    assert_eq!(mem.addresses_for_homes(&other, 60 * MIB), 60 * MIB, "exactly what is left");
    assert_eq!(mem.addresses_for_homes(&other, 62 * MIB), 8 * MIB, "a lane begins with few");
    let small = Request { small: true, ..other };
    assert_eq!(mem.addresses_for_homes(&small, 62 * MIB), 4 * MIB);
    let large = Request { size: 50 * MIB, ..other };
    assert_eq!(
        mem.addresses_for_homes(&large, 62 * MIB),
        50 * MIB,
        "and never fewer than it needs"
    );
    mem.reserve_segment(12 * MIB, Kind::Homes, &other, POLICY).unwrap().unwrap();
    assert_eq!(mem.addresses_for_homes(&other, 62 * MIB), 24 * MIB, "twice as many as it has");
    rig.check(0);
}
