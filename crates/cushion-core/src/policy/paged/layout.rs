//! Remembered layouts: a program that repeats a step gets the same addresses at the same points of
//! the step.
//!
//! Best fit depends on all free memory. As soon as anything has changed, a step that was served
//! well once is laid out anew, and a large request finds its pages half used. So the policy
//! remembers where each request was served in each situation. The situation of a lane is the set of
//! its live blocks and their addresses. In the same situation, a request of the same size is served
//! where it was served before, if that is free. A step that repeats exactly then needs nothing from
//! the driver, whatever the step before it needed.

use std::hash::BuildHasher;

use rustc_hash::FxBuildHasher;

use super::Paged;
use super::stitch::StitchId;
use crate::driver::Driver;
use crate::heap::Lane;
use crate::heap::block::BlockId;
use crate::heap::segment::Kind;
use crate::memory::{Found, Mem, Request};

/// The number of sets; each situation belongs to one. Enough for steps of some ten thousand large
/// requests, in less than a megabyte.
const SETS: usize = 1 << 13;

/// How many situations a set remembers, latest first.
const WAYS: usize = 4;

/// A hash of a lane's live blocks and of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Situation(u64);

/// Where a request was served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Home(u64),
    Stitch(StitchId),
}

/// A situation, and where its request was served.
type Memory = (Situation, Place);

/// Where requests were served, by situation. Allocates its table, of fixed size, when the first one
/// is remembered.
#[derive(Debug, Default)]
pub(super) struct Layout {
    sets: Vec<[Option<Memory>; WAYS]>,
}

impl Situation {
    /// Returns the situation of a request's lane now; `None` for small requests.
    fn now(lane: &Lane, request: &Request) -> Option<Self> {
        let &Request { lane: at, size, small, .. } = request;
        (!small).then(|| Self(FxBuildHasher.hash_one((at, lane.fingerprint(), size))))
    }

    #[expect(clippy::cast_possible_truncation, reason = "a hash")]
    fn set(self) -> usize {
        self.0 as usize % SETS
    }
}

impl Layout {
    fn place(&self, situation: Situation) -> Option<Place> {
        let mut set = self.sets.get(situation.set())?.iter().flatten();
        set.find(|(it, _)| *it == situation).map(|&(_, place)| place)
    }

    fn remember(&mut self, situation: Situation, place: Place) {
        if self.sets.is_empty() {
            self.sets.resize(SETS, [None; WAYS]);
        }
        let set = &mut self.sets[situation.set()];
        let known = set.iter().position(|it| it.is_some_and(|(it, _)| it == situation));
        let last = known.unwrap_or(WAYS - 1);
        set[..=last].rotate_right(1);
        set[0] = Some((situation, place));
    }
}

impl Paged {
    /// Returns the memory that served the request before in this situation, if it is free.
    pub(super) fn served_before<D: Driver>(
        &self,
        mem: &Mem<'_, D>,
        request: &Request,
    ) -> Option<Found> {
        let lane = mem.heap.lane(request.lane)?;
        match self.layout.place(Situation::now(lane, request)?)? {
            Place::Home(address) => {
                let id = lane.free_at(address)?;
                let block = &mem.heap[id];
                // Another policy may own the addresses by now.
                let is_home = mem.heap[block.segment].kind == Kind::Homes;
                // Sizes near `u64::MAX` were never served, but another situation may have the same
                // hash.
                let end = address.checked_add(request.size);
                let fits = end.is_some_and(|end| end <= block.end());
                (fits && is_home).then_some(Found::Within { block: id, address })
            }
            Place::Stitch(stitch) => self
                .stitches
                .can_lend(mem.heap, stitch, request)
                .then_some(Found::Stitch(stitch.number())),
        }
    }

    /// Remembers where a request is about to be served: by a free block of its lane.
    pub(super) fn remember<D: Driver>(&mut self, mem: &Mem<'_, D>, request: &Request, id: BlockId) {
        let lane = mem.heap.lane(request.lane);
        let Some(situation) = lane.and_then(|lane| Situation::now(lane, request)) else { return };
        let block = &mem.heap[id];
        let place = match mem.heap[block.segment].kind {
            Kind::Stitch(number) => Place::Stitch(StitchId::new(number)),
            Kind::Homes => Place::Home(block.address),
            Kind::Plain | Kind::Pages { .. } | Kind::Host => return,
        };
        self.layout.remember(situation, place);
    }
}
