//! The heap against a plain model: a map from addresses to states.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;

use super::block::{BlockId, BlockState, Holder};
use super::pool::{LaneId, PoolIndex, PoolTable};
use super::segment::{Kind, Segment};
use super::{Changed, Heap};
use crate::base::names::{Moment, Moments, Owner, PolicyIndex, PoolId, Tag};
use crate::driver::StreamId;
use crate::ledger::change::{Held, Splits};
use crate::ledger::lanes::Lanes;

/// Blocks and segments are multiples of this.
const UNIT: u64 = 1 << 12;
/// Segments begin at multiples of this, and are not larger.
const SLOT: u64 = 64 * UNIT;
/// The smallest blocks that are indexed by address. The model asks which ranges of this size are
/// wholly free.
const GROUP: u64 = 4 * UNIT;
const FIRST_SLOT: u64 = 1 << 40;
const PRIVATE: PoolId = PoolId(0, 7);

/// One block of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    size: u64,
    state: BlockState,
    freed: Moment,
    /// The searches of its pool when it became free.
    since: u64,
}

/// One segment of the model.
#[derive(Debug, Clone, Copy)]
struct Area {
    size: u64,
    lane: LaneId,
    kind: Kind,
}

impl Area {
    fn is_reserved(&self) -> bool {
        matches!(self.kind, Kind::Pages { .. } | Kind::Homes)
    }
}

/// What somebody who looks at the changed addresses of a lane knows of it.
#[derive(Debug, Default)]
struct View {
    /// Ranges of [`GROUP`] bytes that are wholly free, by address.
    wholly_free: BTreeSet<u64>,
    /// Removed segments that were not reported yet.
    gone: Vec<(u64, u64)>,
}

/// A heap, and the model of it.
struct World {
    heap: Heap,
    lanes: Arc<Lanes>,
    moments: Moments,
    areas: BTreeMap<u64, Area>,
    parts: BTreeMap<u64, Part>,
    searches: BTreeMap<PoolIndex, u64>,
    views: BTreeMap<LaneId, View>,
    /// The sum of all `Splits` that the heap returned.
    splits: (i64, i64),
}

/// A number below `most`, which is not zero.
fn below(choice: u64, most: u64) -> u64 {
    choice % most
}

impl World {
    fn new() -> Self {
        let lanes = Arc::new(Lanes::default());
        Self {
            heap: Heap::new(Arc::clone(&lanes)),
            lanes,
            moments: Moments::default(),
            areas: BTreeMap::new(),
            parts: BTreeMap::new(),
            searches: BTreeMap::new(),
            views: BTreeMap::new(),
            splits: (0, 0),
        }
    }

    // ---- the model ----

    /// The segment that an address lies in.
    fn area_at(&self, address: u64) -> (u64, Area) {
        let (&start, &area) = self.areas.range(..=address).next_back().unwrap();
        (start, area)
    }

    /// The blocks of one segment.
    fn parts_of(&self, start: u64) -> impl Iterator<Item = (u64, Part)> {
        let end = start + self.areas[&start].size;
        self.parts.range(start..end).map(|(&at, &part)| (at, part))
    }

    fn is_whole(&self, start: u64) -> bool {
        self.parts_of(start).count() == 1
    }

    /// Gives a range, which lies in one block, a state. Free and unmapped ranges merge with their
    /// like.
    fn set(&mut self, start: u64, size: u64, state: BlockState, freed: Option<Moment>) {
        let (area_start, area) = self.area_at(start);
        let since = self.searches.get(&area.lane.pool).copied().unwrap_or(0);
        let (&low, &before) = self.parts.range(..=start).next_back().unwrap();
        let (end, high) = (start + size, low + before.size);
        assert!(end <= high, "one block");
        self.parts.remove(&low);
        for (from, to) in [(low, start), (end, high)].into_iter().filter(|(from, to)| from < to) {
            self.parts.insert(from, Part { size: to - from, since, ..before });
        }
        let freed = freed.unwrap_or(before.freed);
        let mut at = start;
        let mut part = Part { size, state, freed, since };
        if matches!(state, BlockState::Free | BlockState::Unmapped) {
            let lower = self.parts.range(area_start..start).next_back();
            let upper = self.parts.range(end..area_start + area.size).next();
            let is_alike = |it: Option<(&u64, &Part)>| {
                it.map(|(&at, &part)| (at, part)).filter(|(_, it)| it.state == state)
            };
            for (beside, other) in [is_alike(lower), is_alike(upper)].into_iter().flatten() {
                self.parts.remove(&beside);
                at = at.min(beside);
                part.size += other.size;
                part.freed = part.freed.max(other.freed);
            }
        }
        self.parts.insert(at, part);
    }

    /// Free blocks that share their plain segment with others, and their bytes.
    fn count_splits(&self) -> (i64, i64) {
        let plain = self.areas.iter().filter(|(_, area)| area.kind == Kind::Plain);
        let shared = plain.filter(|&(&start, _)| !self.is_whole(start));
        let parts = shared.flat_map(|(&start, _)| self.parts_of(start));
        parts
            .filter(|(_, part)| part.state == BlockState::Free)
            .fold((0, 0), |(blocks, bytes), (_, part)| {
                (blocks + 1, bytes + i64::try_from(part.size).unwrap())
            })
    }

    /// Whether a range is wholly in one free block.
    fn is_free(&self, start: u64, size: u64) -> bool {
        let below = self.parts.range(..=start).next_back();
        below.is_some_and(|(&at, part)| {
            part.state == BlockState::Free && start + size <= at + part.size
        })
    }

    /// The groups of a lane's homes.
    fn groups_of(&self, lane: LaneId) -> impl Iterator<Item = u64> {
        let homes =
            self.areas.iter().filter(move |(_, it)| it.lane == lane && it.kind == Kind::Homes);
        homes.flat_map(|(&start, area)| (0..area.size / GROUP).map(move |at| start + at * GROUP))
    }

    // ---- choosing ----

    /// A block that a condition holds for.
    fn pick(&self, choice: u64, is_wanted: impl Fn(&Part, Kind) -> bool) -> Option<(u64, Part)> {
        let is_wanted = |at: u64, part: &Part| is_wanted(part, self.area_at(at).1.kind);
        let wanted: Vec<_> = self.parts.iter().filter(|&(&at, it)| is_wanted(at, it)).collect();
        let at = below(choice, (wanted.len() as u64).max(1));
        let &(&address, &part) = wanted.get(usize::try_from(at).unwrap())?;
        Some((address, part))
    }

    /// Addresses within a block.
    fn within(at: u64, part: &Part, choices: (u64, u64)) -> (u64, u64) {
        let units = part.size / UNIT;
        let first = below(choices.0, units);
        let count = 1 + below(choices.1, units - first);
        (at + first * UNIT, count * UNIT)
    }

    fn id_at(&self, address: u64) -> BlockId {
        self.heap.blocks().find(|(_, block)| block.address == address).unwrap().0
    }

    // ---- operations ----

    fn add_segment(&mut self, kind: Kind, state: BlockState, choices: (u64, u64)) {
        let slots = (0..).map(|slot| FIRST_SLOT + slot * SLOT);
        let address = slots.into_iter().find(|start| !self.areas.contains_key(start)).unwrap();
        let size = (1 + below(choices.0, SLOT / UNIT)) * UNIT;
        let private = self.heap.pools().half(PRIVATE, true).unwrap_or(PoolTable::LARGE);
        let pool = match kind {
            Kind::Host => PoolTable::SPILL,
            _ => [PoolTable::SMALL, PoolTable::LARGE, private]
                [usize::try_from(below(choices.1, 3)).unwrap()],
        };
        let lane = LaneId { pool, stream: StreamId(below(choices.1 / 3, 2)) };
        let policy = PolicyIndex(0);
        let segment = Segment { address, size, lane, kind, policy, tag: Tag(address) };
        let id = self.heap.add_segment(segment, state);
        if kind == Kind::Homes {
            self.heap.index_by_address(id, GROUP, UNIT);
        }
        self.areas.insert(address, Area { size, lane, kind });
        let since = self.searches.get(&pool).copied().unwrap_or(0);
        self.parts.insert(address, Part { size, state, freed: Moment::FIRST, since });
        self.views.entry(lane).or_default();
    }

    fn remove_segment(&mut self, start: u64) {
        let removed = self.heap.remove_segment(self.id_at(start));
        let area = self.areas.remove(&start).unwrap();
        self.parts.remove(&start);
        assert_eq!((removed.address, removed.size, removed.tag), (start, area.size, Tag(start)));
        if self.areas.values().all(|it| it.lane != area.lane) {
            self.views.remove(&area.lane);
        } else if area.kind == Kind::Homes {
            self.views.get_mut(&area.lane).unwrap().gone.push((start, start + area.size));
        }
    }

    fn returned(&mut self, splits: Splits) {
        self.splits.0 += splits.blocks;
        self.splits.1 += splits.bytes;
    }

    /// Hands out `size` bytes from the start of a free block.
    fn take(&mut self, at: u64, size: u64, splits: bool) {
        let holder = Holder { requested: size - 7, tag: Tag(at + 1), owner: Owner(3) };
        let taken = self.heap.take(self.id_at(at), size, splits, holder);
        self.returned(taken.splits);
        let Held { span, requested, tag } = taken.held;
        assert_eq!((span.address, span.bytes), (at, size));
        assert_eq!((requested, tag), (size - 7, Tag(at + 1)));
        let lane = self.area_at(at).1.lane;
        assert_eq!(
            (span.place.stream, span.place.host),
            (lane.stream, lane.pool == PoolTable::SPILL)
        );
        assert_eq!(self.heap.live_at(at).map(|id| self.heap[id].holder), Some(holder));
        self.set(at, size, BlockState::Live, None);
    }

    fn complete_free(&mut self, at: u64, size: u64) {
        let id = self.id_at(at);
        let (start, area) = self.area_at(at);
        let now = self.moments.next();
        let freed = match area.kind {
            Kind::Host => {
                let freed = self.heap.complete_free_on_host(id);
                self.remove_segment(start);
                freed
            }
            Kind::Stitch(_) => {
                self.parts.retain(|at, _| !(start..start + area.size).contains(at));
                let whole =
                    Part { size: area.size, state: BlockState::Shadow, freed: now, since: 0 };
                self.parts.insert(start, whole);
                self.heap.complete_free_of_stitch(id, now)
            }
            kind @ (Kind::Plain | Kind::Pages { .. } | Kind::Homes) => {
                self.set(at, size, BlockState::Free, Some(now));
                self.heap.complete_free(id, kind, now)
            }
        };
        assert_eq!((freed.held.span.address, freed.held.span.bytes), (at, size));
        assert_eq!((freed.held.requested, freed.held.tag), (size - 7, Tag(at + 1)));
        self.returned(freed.splits);
    }

    /// One detached block is free again, or its memory is gone.
    fn settle(&mut self, at: u64, size: u64, choice: u64) {
        let id = self.id_at(at);
        let is_plain = self.area_at(at).1.kind == Kind::Plain;
        match choice % 3 {
            0 if is_plain => return self.remove_segment(at),
            0 => {
                self.heap.attach(id);
                self.heap.mark_unmapped(id, at, at + size);
                return self.set(at, size, BlockState::Unmapped, None);
            }
            1 => {
                self.heap.attach(id);
                self.heap.merge_again(id);
            }
            _ => {
                self.heap.merge_free(id);
            }
        }
        self.set(at, size, BlockState::Free, None);
    }

    /// Looks at everything that changed in the lanes, as a policy does.
    fn look(&mut self) {
        let lanes: Vec<LaneId> = self.views.keys().copied().collect();
        for lane in lanes {
            let mut view = self.views.remove(&lane).unwrap();
            while let Some(changed) = self.heap.take_changed(lane) {
                match changed {
                    Changed::Gone(range) => {
                        let known = view.gone.iter().position(|&it| it == (range.start, range.end));
                        view.gone.remove(known.expect("reported once"));
                        view.wholly_free.retain(|group| !range.contains(group));
                    }
                    Changed::Here(range) => {
                        let looked_at =
                            |group: &u64| *group < range.end && range.start < group + GROUP;
                        view.wholly_free.retain(|group| !looked_at(group));
                        let free = self.groups_of(lane).filter(looked_at);
                        view.wholly_free.extend(free.filter(|&group| self.is_free(group, GROUP)));
                    }
                }
            }
            assert!(view.gone.is_empty(), "not reported: {:x?}", view.gone);
            let free = self.groups_of(lane).filter(|&group| self.is_free(group, GROUP));
            assert_eq!(view.wholly_free, free.collect(), "a change in {lane:?} was not marked");
            self.views.insert(lane, view);
        }
    }

    fn step(&mut self, (op, a, b, c): Step) {
        let is = |state| move |part: &Part, _: Kind| part.state == state;
        match op {
            0 => self.add_segment(Kind::Plain, BlockState::Free, (a, b)),
            1 => self.add_segment(Kind::Homes, BlockState::Unmapped, (a, b)),
            2 => self.add_segment(Kind::Pages { page_size: UNIT }, BlockState::Unmapped, (a, b)),
            3 => self.add_segment(Kind::Stitch(0), BlockState::Shadow, (a, b)),
            4 => {
                self.add_segment(Kind::Host, BlockState::Free, (a, b));
                let (at, part) = self
                    .pick(0, |it, kind| is(BlockState::Free)(it, kind) && kind == Kind::Host)
                    .unwrap();
                self.take(at, part.size, false);
            }
            5..=7 => {
                let Some((at, part)) = self.pick(a, is(BlockState::Free)) else { return };
                let (_, size) = Self::within(at, &part, (0, b));
                let splits = size < part.size && c % 4 != 0;
                self.take(at, if splits { size } else { part.size }, splits);
            }
            8 => {
                let is_wanted =
                    |it: &Part, kind| it.state == BlockState::Free && kind != Kind::Plain;
                let Some((at, part)) = self.pick(a, is_wanted) else { return };
                let (start, size) = Self::within(at, &part, (b, c));
                self.heap.cut_within_lane(self.id_at(at), start, start + size);
                // For the moment they do not merge.
                self.set(start, size, BlockState::Live, None);
                self.set_alone(start, BlockState::Free);
                self.take(start, size, false);
            }
            9..=11 => {
                let Some((at, _)) = self.pick(a, is(BlockState::Live)) else { return };
                assert_eq!(self.heap.begin_free(at + 1), None);
                assert_eq!(self.heap.begin_free(at), Some(self.id_at(at)));
                assert_eq!(self.heap.begin_free(at), None, "freed twice");
                self.set_alone(at, BlockState::Pending);
            }
            12..=14 => {
                let Some((at, part)) = self.pick(a, is(BlockState::Pending)) else { return };
                self.complete_free(at, part.size);
            }
            15 | 16 => {
                let Some((at, part)) = self.pick(a, is(BlockState::Unmapped)) else { return };
                let (_, size) = Self::within(at, &part, (0, b));
                self.heap.mark_mapped(self.id_at(at), size);
                self.set(at, size, BlockState::Free, None);
            }
            17 => {
                let Some((at, part)) = self.pick(a, is(BlockState::Unmapped)) else { return };
                let (start, size) = Self::within(at, &part, (b, c));
                let id = self.id_at(at);
                self.heap.split_unmapped(id, start);
                assert_eq!(self.heap[id].address, start, "it keeps what is from there on");
                self.heap.mark_mapped(id, size);
                self.set(start, size, BlockState::Free, None);
            }
            18..=20 => {
                let is_wanted =
                    |it: &Part, kind| it.state == BlockState::Free && kind == Kind::Homes;
                let Some((at, part)) = self.pick(a, is_wanted) else { return };
                let (start, size) = Self::within(at, &part, (b, c));
                let (id, end) = (self.id_at(at), start + size);
                let state = match op {
                    18 => {
                        self.heap.mark_unmapped(id, start, end);
                        BlockState::Unmapped
                    }
                    19 => {
                        self.heap.lend(id, start, end);
                        BlockState::Lent
                    }
                    _ => {
                        self.heap.detach(id, start, end);
                        BlockState::Detached
                    }
                };
                assert_eq!(self.heap[id].state, state, "it keeps its identity");
                self.set(start, size, state, None);
            }
            21 => {
                let Some((at, part)) = self.pick(a, is(BlockState::Lent)) else { return };
                let (id, now) = (self.id_at(at), self.moments.next());
                self.heap.set_freed(id, now);
                self.heap.merge_free(id);
                self.set(at, part.size, BlockState::Free, Some(now));
            }
            22 => {
                let Some((at, part)) = self.pick(a, is(BlockState::Shadow)) else { return };
                let (start, area) = self.area_at(at);
                if part.size == area.size {
                    let (from, size) = Self::within(start, &part, (b, c));
                    let id = self.id_at(start);
                    self.heap.show(id, from, from + size);
                    self.set(from, size, BlockState::Free, None);
                    self.take(from, size, false);
                }
            }
            23 => {
                let is_wanted =
                    |it: &Part, kind| it.state == BlockState::Free && kind == Kind::Plain;
                let Some((at, part)) = self.pick(a, is_wanted) else { return };
                if part.size == self.area_at(at).1.size {
                    self.heap.detach_whole(self.id_at(at));
                    self.set_alone(at, BlockState::Detached);
                }
            }
            24 | 25 => {
                let Some((at, part)) = self.pick(a, is(BlockState::Detached)) else { return };
                self.settle(at, part.size, b);
            }
            26 => {
                let is_wanted =
                    |it: &Part, _| matches!(it.state, BlockState::Unmapped | BlockState::Shadow);
                let Some((at, part)) = self.pick(a, is_wanted) else { return };
                if part.size == self.area_at(at).1.size {
                    self.remove_segment(at);
                }
            }
            27 => self.heap.shrink(),
            28 => {
                let pool = [PoolTable::SMALL, PoolTable::LARGE][usize::from(a % 2 == 0)];
                self.heap.count_search(pool);
                *self.searches.entry(pool).or_default() += 1;
            }
            29 => {
                if self.heap.pools().private(PRIVATE).is_none() {
                    self.heap.open_private(PRIVATE);
                } else {
                    let half = self.heap.pools().half(PRIVATE, true).unwrap();
                    let is_held = self.areas.values().any(|area| area.lane.pool == half);
                    self.heap.close_private_if_empty(PRIVATE);
                    assert_eq!(self.heap.pools().private(PRIVATE).is_some(), is_held);
                }
            }
            _ => self.look(),
        }
    }

    /// Gives a whole block a state. It does not merge.
    fn set_alone(&mut self, at: u64, state: BlockState) {
        self.parts.get_mut(&at).unwrap().state = state;
    }

    // ---- comparing ----

    fn compare(&self) {
        self.heap.check().unwrap();
        let mut blocks: Vec<_> = self.heap.blocks().map(|(_, block)| block).collect();
        blocks.sort_by_key(|block| block.address);
        let found: Vec<_> =
            blocks.iter().map(|it| (it.address, it.size, it.state, it.freed)).collect();
        let expected: Vec<_> =
            self.parts.iter().map(|(&at, it)| (at, it.size, it.state, it.freed)).collect();
        assert_eq!(found, expected);
        for (id, block) in self.heap.blocks() {
            let part = self.parts[&block.address];
            let searches = self.searches.get(&block.lane.pool).copied().unwrap_or(0);
            if part.state == BlockState::Free {
                assert_eq!(self.heap.age(id), searches - part.since, "{block:?}");
            }
            let is_live = part.state == BlockState::Live;
            assert_eq!(self.heap.live_at(block.address), is_live.then_some(id));
        }
        assert_eq!(self.splits, self.count_splits(), "the splits that were returned");
        let (blocks, segments) = (self.heap.sizes()[0].0, self.heap.sizes()[1].0);
        assert_eq!((blocks, segments), (self.parts.len(), self.areas.len()));
        assert_eq!(self.lanes.size().0, self.views.len());
        self.compare_lanes();
    }

    fn compare_lanes(&self) {
        for (lane_id, lane) in self.heap.lanes() {
            let of_lane = |&(&at, _): &(&u64, &Part)| self.area_at(at).1.lane == lane_id;
            let parts: Vec<_> = self.parts.iter().filter(of_lane).collect();
            let unmapped = parts.iter().filter(|(_, it)| it.state == BlockState::Unmapped);
            assert!(lane.unmapped().map(|(at, _)| at).eq(unmapped.map(|&(&at, _)| at)));
            let areas = self.areas.values().filter(|it| it.lane == lane_id && it.is_reserved());
            assert_eq!(lane.addresses(), areas.map(|it| it.size).sum::<u64>());
            let Some(dirty) = lane.dirty() else { continue };
            let mut last_free = None;
            for (&at, part) in parts {
                if part.state == BlockState::Free && part.size >= GROUP {
                    last_free = Some(at);
                }
                let found = lane.free_at(at + UNIT / 2).map(|id| self.heap[id].address);
                assert_eq!(found, last_free, "the last free block up to {at:#x}");
                let (start, area) = self.area_at(at);
                let segment = lane.segment_at(at).map(|it| self.heap[it].address);
                assert_eq!(segment, (area.kind == Kind::Homes).then_some(start));
            }
            let view = &self.views[&lane_id];
            for group in self.groups_of(lane_id) {
                let is_known = view.wholly_free.contains(&group) == self.is_free(group, GROUP);
                assert!(is_known || dirty.any(&(group..group + GROUP)), "{group:#x} is not marked");
            }
        }
    }
}

/// An operation, and what it chooses by.
type Step = (u8, u64, u64, u64);

proptest! {
    /// The same blocks as a map from addresses to states, whatever happens; and nothing that the
    /// heap keeps beside the blocks disagrees with them.
    #[test]
    fn it_is_a_map_from_addresses_to_states(
        steps in prop::collection::vec((0_u8..33, 0_u64..999, 0_u64..999, 0_u64..999), 1..120)
    ) {
        let mut world = World::new();
        for kind in [0, 1, 1, 2, 3] {
            world.step((kind, 40, 0, 0));
        }
        for step in steps {
            world.step(step);
            world.compare();
        }
        world.look();
    }
}
