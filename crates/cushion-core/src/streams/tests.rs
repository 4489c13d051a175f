//! Streams over a small heap and a simulated device, with no engine above them.

use std::sync::Arc;

use super::Streams;
use super::proof::{LastingStreams, Marked, Proof, Work};
use crate::base::names::{Owner, PolicyIndex, PoolId, Tag};
use crate::base::size::MIB;
use crate::driver::{Call, DriverResult, FailWhen, Fault, SimConfig, SimDriver, StreamId};
use crate::heap::Heap;
use crate::heap::block::{BlockId, BlockState, Holder};
use crate::heap::pool::{LaneId, PoolIndex, PoolTable};
use crate::heap::segment::{Kind, Segment};
use crate::ledger::lanes::Lanes;

const GRAPH: PoolId = PoolId(0, 5);
const OWN: StreamId = StreamId(1);
const SIDE: StreamId = StreamId(2);
const OTHER: StreamId = StreamId(3);

/// Streams, blocks and a device.
struct Rig {
    gpu: SimDriver,
    heap: Heap,
    streams: Streams,
    segments: u64,
}

impl Rig {
    fn new() -> Self {
        Self {
            gpu: SimDriver::new(SimConfig::with_capacity(MIB)),
            heap: Heap::new(Arc::new(Lanes::default())),
            streams: Streams::default(),
            segments: 0,
        }
    }

    /// A live block of a stream.
    fn live_in(&mut self, pool: PoolIndex, stream: StreamId) -> BlockId {
        self.segments += 1;
        let address = self.segments << 20;
        let lane = LaneId { pool, stream };
        let (kind, policy, tag) = (Kind::Plain, PolicyIndex(0), Tag::NONE);
        let segment = Segment { address, size: 1024, lane, kind, policy, tag };
        let id = self.heap.add_segment(segment, BlockState::Free);
        self.take(id);
        id
    }

    fn live(&mut self, stream: StreamId) -> BlockId {
        self.live_in(PoolTable::LARGE, stream)
    }

    fn take(&mut self, id: BlockId) {
        let holder = Holder { requested: 1024, tag: Tag::NONE, owner: Owner::NOBODY };
        self.heap.take(id, 1024, false, holder);
    }

    fn record_use(&mut self, id: BlockId, stream: StreamId) {
        self.streams.record_use(&mut self.heap, &self.gpu, id, stream);
    }

    fn note_borrowed(&mut self, id: BlockId, stream: StreamId) {
        self.streams.note_borrowed(&mut self.heap, &self.gpu, id, stream);
    }

    /// Frees a live block. Without users it is free at once.
    fn free(&mut self, id: BlockId) -> DriverResult<()> {
        self.free_with(id, false)
    }

    fn free_with(&mut self, id: BlockId, reuse: bool) -> DriverResult<()> {
        let ended = self.heap.begin_free(self.heap[id].address);
        assert_eq!(ended, Some(id));
        if self.heap[id].users.are_none() {
            let now = self.streams.next_moment();
            let kind = self.heap.segment_of(id).kind;
            self.heap.complete_free(id, kind, now);
            return Ok(());
        }
        self.streams.free_when_done(&mut self.heap, &self.gpu, id, reuse)
    }

    /// Completes the frees that are done, in order.
    fn complete(&mut self) -> Vec<BlockId> {
        let mut completed = Vec::new();
        while let Some(id) = self.streams.next_done() {
            let now = self.streams.next_moment();
            let kind = self.heap.segment_of(id).kind;
            self.heap.complete_free(id, kind, now);
            completed.push(id);
        }
        self.check();
        completed
    }

    fn process(&mut self) -> Vec<BlockId> {
        self.streams.process(&mut self.heap, &self.gpu).unwrap();
        self.complete()
    }

    fn check(&self) {
        self.heap.check().unwrap();
        self.streams.check(&self.heap).unwrap();
    }

    fn records(&self) -> u64 {
        self.gpu.counts().of(Call::EventRecord)
    }

    fn is_idle(&self, id: BlockId, proof: Proof) -> bool {
        self.streams.idle(&self.heap, id, proof).is_some()
    }
}

// ---- events ----

#[test]
fn a_block_is_done_when_the_events_of_all_its_streams_are() {
    let mut rig = Rig::new();
    let id = rig.live(OWN);
    for stream in [SIDE, OTHER, SIDE] {
        rig.record_use(id, stream);
    }
    rig.gpu.launch(SIDE);
    rig.gpu.launch(OTHER);
    rig.free(id).unwrap();
    assert_eq!(rig.records(), 2, "one event a stream");
    rig.check();
    assert!(!rig.streams.is_nothing_pending());
    assert_eq!(rig.process(), []);
    rig.gpu.finish(OTHER);
    assert_eq!(rig.process(), []);
    assert_eq!(rig.heap[id].state, BlockState::Pending);
    rig.gpu.finish(SIDE);
    assert_eq!(rig.process(), [id]);
    assert_eq!(rig.heap[id].state, BlockState::Free);
    assert!(rig.streams.is_nothing_pending());
    assert!(rig.heap.lane(rig.heap[id].lane).unwrap().is_shared());
}

#[test]
fn work_that_is_queued_after_the_free_is_not_waited_for() {
    let mut rig = Rig::new();
    let id = rig.live(OWN);
    rig.record_use(id, SIDE);
    let used = rig.gpu.launch(SIDE);
    rig.free(id).unwrap();
    rig.gpu.launch(SIDE);
    rig.gpu.finish_until(SIDE, used);
    assert_eq!(rig.process(), [id]);
}

#[test]
fn a_use_on_its_own_stream_needs_no_event() {
    let mut rig = Rig::new();
    let id = rig.live(OWN);
    rig.record_use(id, OWN);
    assert!(rig.heap[id].users.are_none());
    assert!(!rig.heap.lane(rig.heap[id].lane).unwrap().is_shared());
}

#[test]
fn frees_complete_in_the_order_of_their_stream_and_streams_do_not_wait_for_each_other() {
    let mut rig = Rig::new();
    let ids: Vec<_> = (0..4).map(|_| rig.live(OWN)).collect();
    let mut work = Vec::new();
    for &id in &ids[..3] {
        rig.record_use(id, SIDE);
        work.push(rig.gpu.launch(SIDE));
        rig.free(id).unwrap();
    }
    rig.record_use(ids[3], OTHER);
    rig.gpu.launch(OTHER);
    rig.free(ids[3]).unwrap();
    assert_eq!(rig.streams.count(), 2);
    assert_eq!(rig.streams.pending().count(), 4);

    rig.gpu.finish(OTHER);
    assert_eq!(rig.process(), [ids[3]], "an unfinished event hides those of its own stream only");
    rig.gpu.finish_until(SIDE, work[1]);
    assert_eq!(rig.process(), [ids[0], ids[1]]);
    rig.gpu.finish_until(SIDE, work[2]);
    assert_eq!(rig.process(), [ids[2]]);
    assert!(rig.gpu.counts().of(Call::EventCreate) <= 4);
}

#[test]
fn finished_events_are_used_again() {
    let mut rig = Rig::new();
    let id = rig.live(OWN);
    for _ in 0..10 {
        rig.record_use(id, SIDE);
        rig.free(id).unwrap();
        assert_eq!(rig.process(), [id]);
        rig.take(id);
    }
    assert_eq!(rig.gpu.counts().of(Call::EventCreate), 1);
    assert_eq!(rig.streams.take_idle_events().len(), 1);
}

#[test]
fn a_pass_over_many_streams_is_bounded_and_the_next_one_goes_on() {
    const MANY: u64 = 200;
    let mut rig = Rig::new();
    for stream in 10..10 + MANY {
        let id = rig.live(OWN);
        rig.record_use(id, StreamId(stream));
        rig.gpu.launch(StreamId(stream));
        rig.free(id).unwrap();
    }
    rig.gpu.finish(StreamId(10 + MANY - 1));
    let mut passes = 0;
    let mut done = Vec::new();
    while done.is_empty() {
        rig.gpu.reset_counts();
        done = rig.process();
        passes += 1;
        assert!(rig.gpu.counts().of(Call::EventQuery) <= 18);
        assert!(passes < 20, "every stream is asked at some time");
        assert!(rig.streams.has_more());
    }
    assert!(passes > 10, "{passes}");
    rig.streams.process_many(&mut rig.heap, &rig.gpu).unwrap();
    assert!(!rig.streams.has_more(), "a request that finds no memory asks them all");
    rig.gpu.finish_all();
    let mut done = done.len();
    for _ in 0..20 {
        done += rig.process().len();
    }
    assert_eq!(done as u64, MANY);
}

#[test]
fn a_failing_driver_delays_a_free_and_loses_nothing() {
    let calls = [Call::EventCreate, Call::EventRecord, Call::EventQuery, Call::Capture];
    for (call, nth, lasting) in calls.into_iter().flat_map(|call| {
        let each = (1..10).flat_map(|nth| {
            [LastingStreams::Unknown, LastingStreams::All].map(|lasting| (nth, lasting))
        });
        each.map(move |(nth, lasting)| (call, nth, lasting))
    }) {
        let mut rig = Rig::new();
        rig.streams.set_lasting(lasting);
        let ids: Vec<_> = (0..3).map(|_| rig.live(OWN)).collect();
        for &id in &ids {
            rig.record_use(id, SIDE);
            rig.record_use(id, OTHER);
            rig.gpu.launch(SIDE);
        }
        rig.gpu.fail(FailWhen::Nth(call, nth), Fault::Failed(700));
        for &id in &ids {
            let _ = rig.free(id);
            rig.check();
        }
        rig.gpu.finish_all();
        for _ in 0..3 {
            let _ = rig.streams.process(&mut rig.heap, &rig.gpu);
            rig.complete();
        }
        rig.gpu.clear_failures();
        rig.process();
        // The program may have destroyed a stream between the free and the event that came late.
        let now = rig.streams.now();
        rig.streams.device_waited_for(&mut rig.heap, Proof::of_device(now));
        rig.complete();
        assert!(ids.iter().all(|&id| rig.heap[id].is_free()), "{call} {nth} failed");
        assert!(rig.streams.is_nothing_pending());
        let asked = rig.gpu.counts().of(Call::EventCreate);
        let refused = u64::from(call == Call::EventCreate && nth <= asked);
        let kept = rig.streams.take_idle_events().len() as u64;
        assert_eq!(kept, asked - refused, "{call} {nth} failed: every event is kept");
    }
}

#[test]
fn events_that_were_waited_for_may_have_been_seen_before() {
    let mut rig = Rig::new();
    rig.heap.open_private(GRAPH);
    let half = rig.heap.pools().half(GRAPH, false).unwrap();
    let (shared, private) = (rig.live(OWN), rig.live_in(half, OWN));
    for id in [shared, private] {
        rig.record_use(id, SIDE);
        rig.gpu.launch(SIDE);
        rig.free(id).unwrap();
    }
    let of_pool = rig.streams.awaited(&mut rig.heap, &rig.gpu, Some(GRAPH)).unwrap();
    assert_eq!(of_pool.iter().map(|&(.., id)| id).collect::<Vec<_>>(), [private]);
    let awaited = rig.streams.awaited(&mut rig.heap, &rig.gpu, None).unwrap();
    assert_eq!(awaited.len(), 2);
    rig.streams.events_waited_for(&mut rig.heap, &rig.gpu, &awaited).unwrap();
    assert_eq!(rig.complete(), [], "they are not done");
    for &(_, event, _) in &of_pool {
        Streams::wait_for_event(&rig.gpu, event).unwrap();
    }
    // The stream's earlier event has finished too, and was not asked for.
    rig.streams.events_waited_for(&mut rig.heap, &rig.gpu, &of_pool).unwrap();
    assert_eq!(rig.complete(), [private]);
    assert_eq!(rig.process(), [shared]);
    rig.streams.events_waited_for(&mut rig.heap, &rig.gpu, &awaited).unwrap();
    assert_eq!(rig.complete(), [], "another thread completed them");
}

// ---- captures ----

#[test]
fn a_free_during_a_recording_waits_for_its_end() {
    let mut rig = Rig::new();
    let id = rig.live(OWN);
    rig.record_use(id, SIDE);
    rig.gpu.launch(SIDE);
    rig.streams.begin_recording(GRAPH, Box::new(|stream| stream == OWN));
    assert!(rig.streams.is_recording_to(GRAPH));
    assert_eq!(rig.streams.recorded_pool(OWN), Some(GRAPH));
    assert_eq!(rig.streams.recorded_pool(SIDE), None);
    rig.free(id).unwrap();
    assert_eq!(rig.records(), 0, "an event would become a part of the graph");
    assert!(!rig.streams.is_nothing_pending());
    rig.check();
    assert!(rig.streams.end_recording(GRAPH).is_some());
    assert!(rig.streams.end_recording(GRAPH).is_none());
    assert_eq!(rig.process(), [], "the use from before the capture needs its event");
    assert_eq!(rig.records(), 0, "since the free, the program may have destroyed the stream");
    assert!(rig.streams.awaits_device());
    let proof = Proof::of_device(rig.streams.now());
    rig.streams.device_waited_for(&mut rig.heap, proof);
    assert_eq!(rig.complete(), [id]);
}

#[test]
fn a_use_in_a_capture_needs_no_event_after_it() {
    let mut rig = Rig::new();
    rig.streams.set_lasting(LastingStreams::All);
    let (captured, both) = (rig.live(OWN), rig.live(OWN));
    rig.record_use(both, SIDE);
    rig.gpu.launch(SIDE);
    rig.streams.begin_recording(GRAPH, Box::new(|_| true));
    rig.gpu.begin_capture(SIDE);
    rig.record_use(captured, SIDE);
    rig.record_use(both, SIDE);
    rig.free(captured).unwrap();
    rig.free(both).unwrap();
    rig.gpu.end_capture(SIDE);
    drop(rig.streams.end_recording(GRAPH));
    assert_eq!(rig.process(), [captured]);
    assert_eq!(rig.records(), 1, "for the use from before");
    rig.gpu.finish(SIDE);
    assert_eq!(rig.process(), [both]);
}

#[test]
fn a_stream_that_is_captured_by_others_gets_no_event() {
    let mut rig = Rig::new();
    rig.streams.set_lasting(LastingStreams::All);
    let id = rig.live(OWN);
    rig.record_use(id, SIDE);
    rig.gpu.launch(SIDE);
    rig.gpu.begin_capture(SIDE);
    rig.free(id).unwrap();
    assert_eq!(rig.process(), []);
    assert_eq!(rig.records(), 0);
    assert!(rig.streams.poll_stream(&rig.gpu, SIDE).unwrap().is_none());
    assert_eq!(rig.records(), 0);
    rig.gpu.end_capture(SIDE);
    assert_eq!(rig.process(), []);
    rig.gpu.finish(SIDE);
    assert_eq!(rig.process(), [id]);
}

#[test]
fn the_order_of_a_captured_graph_completes_a_free() {
    let mut rig = Rig::new();
    rig.streams.set_lasting(LastingStreams::All);
    let (proven, unproven) = (rig.live(OWN), rig.live(OWN));
    rig.streams.begin_recording(GRAPH, Box::new(|_| true));
    rig.gpu.begin_capture(OWN);
    rig.gpu.launch(OWN);
    rig.gpu.wait_for(SIDE, OWN);
    for id in [proven, unproven] {
        rig.record_use(id, SIDE);
    }
    rig.gpu.launch(SIDE);
    rig.free_with(proven, true).unwrap();
    rig.free_with(unproven, false).unwrap();
    rig.streams.process_capture(&mut rig.heap, &rig.gpu, OWN).unwrap();
    assert_eq!(rig.complete(), [], "nothing orders the side stream's work before the own stream's");
    rig.gpu.wait_for(OWN, SIDE);
    rig.streams.process_capture(&mut rig.heap, &rig.gpu, OTHER).unwrap();
    assert_eq!(rig.complete(), [], "only for the block's own stream");
    rig.streams.process_capture(&mut rig.heap, &rig.gpu, OWN).unwrap();
    assert_eq!(rig.complete(), [proven]);
    assert_eq!(rig.records(), 0);
    rig.gpu.end_capture(OWN);
    drop(rig.streams.end_recording(GRAPH));
    assert_eq!(rig.process(), [unproven]);
}

#[test]
fn the_latest_recording_takes_a_streams_allocations() {
    let mut rig = Rig::new();
    rig.streams.begin_recording(GRAPH, Box::new(|_| true));
    rig.streams.begin_recording(PoolId(0, 6), Box::new(|stream| stream == SIDE));
    assert_eq!(rig.streams.recorded_pool(SIDE), Some(PoolId(0, 6)));
    assert_eq!(rig.streams.recorded_pool(OWN), Some(GRAPH));
    assert_eq!(rig.streams.end_all_recording().len(), 2);
    assert!(!rig.streams.is_recording());
}

// ---- streams that may be gone ----

#[test]
fn a_stream_that_may_be_gone_gets_no_event() {
    let mut rig = Rig::new();
    let id = rig.live(OWN);
    rig.note_borrowed(id, SIDE);
    assert!(!rig.heap.lane(rig.heap[id].lane).unwrap().is_shared(), "only borrowed");
    rig.gpu.launch(SIDE);
    rig.gpu.destroy_stream(SIDE);
    let before = rig.streams.now();
    rig.free(id).unwrap();
    assert_eq!(rig.records(), 0);
    assert!(rig.streams.awaits_device() && rig.streams.is_nothing_pending());
    rig.check();
    assert_eq!(rig.process(), []);
    rig.streams.device_waited_for(&mut rig.heap, Proof::of_device(before));
    assert_eq!(rig.complete(), [], "the device was waited for before the free");
    let of_stream = rig.streams.poll_stream(&rig.gpu, OWN).unwrap().unwrap();
    rig.streams.device_waited_for(&mut rig.heap, of_stream);
    assert_eq!(rig.complete(), [], "one stream is not the device");
    let now = rig.streams.now();
    rig.streams.device_waited_for(&mut rig.heap, Proof::of_device(now));
    assert_eq!(rig.complete(), [id]);
    assert!(!rig.streams.awaits_device());
}

#[test]
fn a_borrowing_stream_that_lasts_or_that_the_program_names_gets_an_event() {
    let these = LastingStreams::These([OTHER].into());
    for (lasting, borrower, is_named) in [
        (LastingStreams::All, SIDE, false),
        (these, OTHER, false),
        (LastingStreams::Unknown, StreamId(0), false),
        (LastingStreams::Unknown, SIDE, true),
    ] {
        let mut rig = Rig::new();
        rig.streams.set_lasting(lasting);
        let id = rig.live(OWN);
        rig.note_borrowed(id, borrower);
        if is_named {
            rig.record_use(id, borrower);
        }
        rig.gpu.launch(borrower);
        rig.free(id).unwrap();
        assert_eq!(rig.records(), 1, "{borrower:?}");
        assert_eq!(rig.process(), []);
        rig.gpu.finish(borrower);
        assert_eq!(rig.process(), [id]);
    }
}

// ---- proofs ----

#[test]
fn a_proof_covers_only_what_was_freed_before_it() {
    let mut rig = Rig::new();
    let id = rig.live(OWN);
    let before = Proof::of_device(rig.streams.now());
    assert!(!rig.is_idle(id, before), "live");
    rig.record_use(id, SIDE);
    rig.free(id).unwrap();
    assert!(!rig.is_idle(id, Proof::of_device(rig.streams.now())), "pending");
    assert_eq!(rig.process(), [id]);
    assert!(!rig.is_idle(id, before), "freed later");
    assert!(!rig.is_idle(id, Proof::NONE));
    let after = Proof::of_device(rig.streams.now());
    assert!(rig.is_idle(id, after));

    rig.take(id);
    assert!(!rig.is_idle(id, after), "live");
    rig.free(id).unwrap();
    assert!(!rig.is_idle(id, after), "used and freed again");
    rig.heap.detach_whole(id);
    let now = Proof::of_device(rig.streams.now());
    assert!(rig.is_idle(id, now) && !rig.is_idle(id, after), "detached");
    rig.heap.remove_segment(id);
    assert!(!rig.is_idle(id, now), "gone");
}

#[test]
fn nothing_proves_a_private_pool_idle_before_its_release() {
    let mut rig = Rig::new();
    rig.heap.open_private(GRAPH);
    let half = rig.heap.pools().half(GRAPH, false).unwrap();
    let id = rig.live_in(half, OWN);
    rig.free(id).unwrap();
    let device = |rig: &Rig| Proof::of_device(rig.streams.now());
    let before = device(&rig);
    assert!(!rig.is_idle(id, before), "a graph may be replayed on any stream");
    let released = rig.streams.next_moment();
    rig.heap.private_mut(GRAPH).unwrap().release_all(released);
    assert!(!rig.is_idle(id, before), "the last replay may still run");
    assert!(rig.is_idle(id, device(&rig)));
    let of_stream = rig.streams.poll_stream(&rig.gpu, OWN).unwrap().unwrap();
    assert!(!rig.is_idle(id, of_stream), "a stream proves nothing of a private pool");
}

#[test]
fn a_stream_proves_nothing_of_another_stream() {
    let mut rig = Rig::new();
    let (own, other) = (rig.live(OWN), rig.live(OTHER));
    rig.free(own).unwrap();
    rig.free(other).unwrap();
    rig.gpu.launch(OWN);
    assert!(rig.streams.poll_stream(&rig.gpu, OWN).unwrap().is_none(), "at work");
    rig.gpu.finish(OWN);
    let proof = rig.streams.poll_stream(&rig.gpu, OWN).unwrap().unwrap();
    assert!(rig.is_idle(own, proof));
    assert!(!rig.is_idle(other, proof));
}

#[test]
fn a_mark_proves_what_was_freed_before_it_was_made() {
    let mut rig = Rig::new();
    let (early, late) = (rig.live(OWN), rig.live(OWN));
    rig.free(early).unwrap();
    rig.gpu.launch(OWN);
    let mark = rig.streams.mark(&rig.gpu, OWN).unwrap().unwrap();
    rig.free(late).unwrap();
    let (marked, polled) = rig.streams.poll(&rig.gpu, mark);
    polled.unwrap();
    let Marked::UnderWay(mark) = marked else { panic!("the work is not done") };
    rig.gpu.finish(OWN);
    rig.gpu.fail(FailWhen::Nth(Call::EventQuery, 1), Fault::Failed(1));
    let (marked, polled) = rig.streams.poll(&rig.gpu, mark);
    assert!(polled.is_err());
    let Marked::UnderWay(mark) = marked else { panic!("the driver did not say") };
    let (marked, polled) = rig.streams.poll(&rig.gpu, mark);
    polled.unwrap();
    let Marked::Done(proof) = marked else { panic!("the work is done") };
    assert!(rig.is_idle(early, proof));
    assert!(!rig.is_idle(late, proof));
    assert_eq!(rig.streams.take_idle_events().len(), 1);
}

#[test]
fn only_streams_that_certainly_exist_are_asked_for_their_work() {
    let mut rig = Rig::new();
    rig.heap.open_private(GRAPH);
    let graph = rig.heap.pools().half(GRAPH, false).unwrap();
    let lane = LaneId { pool: PoolTable::LARGE, stream: SIDE };
    let work_on = |rig: &mut Rig, lane, asking| {
        rig.streams.work_on(&rig.heap, &rig.gpu, lane, asking).unwrap()
    };
    assert!(matches!(work_on(&mut rig, lane, OWN), Work::Unknown));
    assert_eq!(rig.records(), 0);
    assert!(matches!(work_on(&mut rig, lane, SIDE), Work::Done(_)));
    rig.gpu.launch(SIDE);
    assert!(matches!(work_on(&mut rig, lane, SIDE), Work::UnderWay));
    rig.streams.set_lasting(LastingStreams::All);
    assert!(matches!(work_on(&mut rig, lane, OWN), Work::UnderWay));
    let private = LaneId { pool: graph, stream: SIDE };
    assert!(matches!(work_on(&mut rig, private, SIDE), Work::Unknown));
}

#[test]
fn the_check_finds_a_block_that_waits_for_nothing() {
    let mut rig = Rig::new();
    let id = rig.live(OWN);
    rig.heap.begin_free(rig.heap[id].address);
    assert!(rig.streams.check(&rig.heap).is_err());
}
