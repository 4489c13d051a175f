//! Remembered layouts: a program that repeats a step gets the same addresses in the same places of it.
//!
//! Best fit depends on all that is free, so a step that was served well once is laid out anew as soon as anything has
//! changed, and a large request finds its pages half used. So it is remembered where each request was served at each
//! moment. A moment is told by what is live in the lane, and where: with the same blocks at the same addresses, a
//! request of the same size is served where it was served before, if that is free. Then a step that repeats exactly
//! asks nothing of the driver, whatever the one before had to ask.

use std::hash::BuildHasher;

use rustc_hash::FxBuildHasher;

use crate::block::BlockId;
use crate::driver::Driver;
use crate::homes::Found;
use crate::locked::Locked;
use crate::policy::Request;
use crate::pool::Lane;
use crate::segment::Backing;
use crate::stitch::StitchId;

/// How many sets there are, each for the moments whose names fall into it: room for steps of some ten thousand large
/// requests, in less than a megabyte.
const SETS: usize = 1 << 13;

/// How many moments a set remembers, the latest first.
const WAYS: usize = 4;

/// The name of a moment in a lane: of what is live, and what is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment(u64);

/// Where a request was served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Home(u64),
    Range(StitchId),
}

/// What is remembered of a moment.
type Memory = (Moment, Place);

/// Where requests were served, by moments. Takes no memory before the first is remembered, and no more afterwards.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    sets: Vec<[Option<Memory>; WAYS]>,
}

impl Moment {
    /// What now is in the lane of a request; those of small ones have no name.
    fn now(lane: &Lane, request: &Request) -> Option<Self> {
        let &Request { pool, stream, size, small, .. } = request;
        (!small).then(|| Self(FxBuildHasher.hash_one((pool, stream, lane.live(), size))))
    }

    #[expect(clippy::cast_possible_truncation, reason = "a hash")]
    fn set(self) -> usize {
        self.0 as usize % SETS
    }
}

impl Layout {
    fn place(&self, moment: Moment) -> Option<Place> {
        let mut set = self.sets.get(moment.set())?.iter().flatten();
        set.find(|(it, _)| *it == moment).map(|&(_, place)| place)
    }

    fn remember(&mut self, moment: Moment, place: Place) {
        if self.sets.is_empty() {
            self.sets.resize(SETS, [None; WAYS]);
        }
        let set = &mut self.sets[moment.set()];
        let known = set.iter().position(|it| it.is_some_and(|(it, _)| it == moment));
        let last = known.unwrap_or(WAYS - 1);
        set[..=last].rotate_right(1);
        set[0] = Some((moment, place));
    }
}

impl<D: Driver> Locked<'_, D> {
    /// What serves a request as it was served before at this moment, if that is free.
    pub(crate) fn served_before(&self, request: &Request) -> Option<Found> {
        let lane = self.state.pools[request.pool].lane(request.stream)?;
        match self.state.layout.place(Moment::now(lane, request)?)? {
            Place::Home(address) => {
                let id = lane.free_at(address)?;
                let block = &self.state.blocks[id];
                // Another policy may have had the addresses since.
                let is_home = self.state.segments[block.segment].backing == Backing::Homes;
                // A size near the largest number was never served, but another moment may have the same name.
                let end = address.checked_add(request.size);
                let fits = end.is_some_and(|end| end <= block.end());
                (fits && is_home).then_some(Found::Piece { block: id, address })
            }
            Place::Range(range) => self.can_lend(range, request).then_some(Found::Range(range)),
        }
    }

    /// Remembers where a request is about to be served: by a free block of its lane.
    pub(crate) fn remember(&mut self, request: &Request, id: BlockId) {
        let lane = self.state.pools[request.pool].lane(request.stream);
        let Some(moment) = lane.and_then(|lane| Moment::now(lane, request)) else { return };
        let block = &self.state.blocks[id];
        let place = match self.state.segments[block.segment].backing {
            Backing::Stitched(range) => Place::Range(range),
            Backing::Homes => Place::Home(block.address),
            Backing::Plain | Backing::Pages { .. } => return,
        };
        self.state.layout.remember(moment, place);
    }
}
