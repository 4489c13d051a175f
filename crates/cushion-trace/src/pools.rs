//! Which recorded segments belong to private pools.
//!
//! Newer PyTorch says so in each event, and the final `segments` say so for what is left at the end.
//! For the rest, the segments of graphs and pools that were destroyed under way, it is inferred: take
//! every segment for the default pool's, follow PyTorch with the engine until it went another way,
//! and see which segment, if it were private, would explain that. Where PyTorch got a new segment
//! although the default pool had room, the new one was private; where it kept an empty segment while
//! everything cached was given back, that one was. An explanation is kept only if the engine then
//! follows PyTorch further than before.

use cushion_core::PoolId;
use rustc_hash::FxHashMap;

use crate::events::Events;
use crate::holdings::{HoldingId, Holdings, requests};
use crate::snapshot::Segment;

/// Inferred pools are named apart from recorded ones.
const INFERRED: u64 = u64::MAX;

/// The pool of each holding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Labels {
    pools: Vec<PoolId>,
    /// Whether the trace itself says so.
    known: Vec<bool>,
    inferred_pools: u64,
}

impl Labels {
    /// What the events and the final segments say.
    pub(crate) fn recorded(events: &Events, segments: &[&Segment], start: &Holdings) -> Self {
        let mut holdings = start.clone();
        let mut pools = vec![PoolId::DEFAULT; start.count()];
        let mut known = vec![false; start.count()];
        for event in events {
            holdings.take(&event);
            pools.resize(holdings.count(), PoolId::DEFAULT);
            known.resize(holdings.count(), false);
            if let (Some((a, b)), Some(id)) = (event.pool, holdings.at(event.addr)) {
                pools[id] = PoolId(a, b);
                known[id] = true;
            }
        }
        for segment in segments {
            if let Some(id) = holdings.at(segment.address) {
                pools[id] = PoolId(segment.pool.0, segment.pool.1);
                known[id] = true;
            }
        }
        Self { pools, known, inferred_pools: 0 }
    }

    pub(crate) fn pool(&self, id: HoldingId) -> PoolId {
        self.pools.get(id).copied().unwrap_or(PoolId::DEFAULT)
    }

    /// Whether the trace says everything.
    pub(crate) fn is_complete(&self) -> bool {
        self.known.iter().all(|&known| known)
    }

    /// How many holdings are taken as private by inference.
    pub(crate) fn inferred(&self) -> usize {
        let is_inferred = |&(pool, &known): &(&PoolId, &bool)| !known && *pool != PoolId::DEFAULT;
        self.pools.iter().zip(&self.known).filter(is_inferred).count()
    }

    fn fresh_pool(&mut self) -> PoolId {
        self.inferred_pools += 1;
        PoolId(INFERRED, self.inferred_pools)
    }
}

/// Where a run left PyTorch's path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Departure {
    /// The event at which it shows.
    pub(crate) event: usize,
    pub(crate) kind: DepartureKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DepartureKind {
    /// A request was served at another address.
    Served { pytorch: u64, ours: u64 },
    /// Other segments were given back: ours in addition, and all of PyTorch's.
    GivenBack { extra: Vec<u64>, pytorch: Vec<u64> },
}

/// How a holding that turns out to be private finds its pool.
#[derive(Debug, Clone, Copy)]
enum Join {
    /// The pool of the allocation before its first one, if private.
    Before,
    /// The pool of the allocation after, if private.
    After,
    /// A new one.
    Nobody,
}

/// Infers what the trace does not say. `follow` runs a trial, which takes the `effort` of so many events,
/// and tells where it departs.
pub(crate) fn infer(
    events: &Events,
    start: &Holdings,
    labels: Labels,
    effort: u64,
    follow: impl Fn(&Labels) -> Option<Departure>,
) -> Labels {
    // Keep the whole effort to seconds.
    let mut trials = (50_000_000 / effort.max(1)).clamp(1, 400);
    let requests = Requests::of(events, start);
    let mut best = labels.clone();
    let mut now = labels;
    let mut departure = follow(&now);
    while let Some(at) = departure {
        let mut further: Option<(usize, Labels, Option<Departure>)> = None;
        // Several holdings can stand in the way of one request. An explanation that changes how the
        // engine departs there may be the first of several, if each makes one more holding private.
        let mut aside = None;
        for labels in requests.explanations(events, start, &now, &at) {
            if trials == 0 {
                return best;
            }
            trials -= 1;
            let next = follow(&labels);
            let reach = next.as_ref().map_or(usize::MAX, |departure| departure.event);
            if reach == at.event && next.as_ref() != Some(&at) && labels.inferred() > now.inferred()
            {
                aside.get_or_insert((labels, next));
            } else if further.as_ref().is_none_or(|(furthest, ..)| reach > *furthest) {
                further = Some((reach, labels, next));
            }
        }
        match (further, aside) {
            (Some((reach, labels, next)), _) if reach > at.event => {
                best = labels.clone();
                now = labels;
                departure = next;
            }
            (_, Some((labels, next))) => {
                now = labels;
                departure = next;
            }
            _ => return best,
        }
    }
    now
}

/// The allocations of a trace, by the holding they were made in.
struct Requests {
    /// In order.
    holdings: Vec<HoldingId>,
    /// The place of each holding's first allocation in that order.
    first: FxHashMap<HoldingId, usize>,
}

impl Requests {
    fn of(events: &Events, start: &Holdings) -> Self {
        let holdings: Vec<HoldingId> = requests(events, start).map(|(_, id)| id).collect();
        let mut first = FxHashMap::default();
        for (place, &id) in holdings.iter().enumerate() {
            first.entry(id).or_insert(place);
        }
        Self { holdings, first }
    }

    /// Labels that might explain a departure.
    fn explanations(
        &self,
        events: &Events,
        start: &Holdings,
        labels: &Labels,
        departure: &Departure,
    ) -> Vec<Labels> {
        let mut at = start.clone();
        for event in events.iter().take(departure.event) {
            at.take(&event);
        }
        let ids = |addresses: &[u64]| -> Vec<HoldingId> {
            let mut ids: Vec<_> = addresses.iter().filter_map(|&a| at.at(a)).collect();
            ids.retain(|&id| !labels.known[id]);
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        let groups = match &departure.kind {
            DepartureKind::Served { pytorch, ours } => vec![ids(&[*pytorch]), ids(&[*ours])],
            DepartureKind::GivenBack { extra, pytorch } => vec![ids(extra), ids(pytorch)],
        };
        let mut explanations = Vec::new();
        for group in groups.iter().filter(|group| !group.is_empty()) {
            for join in [Join::Before, Join::After, Join::Nobody] {
                explanations.push(self.privatise(labels, group, join));
            }
            if group.iter().any(|&id| labels.pool(id) != PoolId::DEFAULT) {
                let mut back = labels.clone();
                group.iter().for_each(|&id| back.pools[id] = PoolId::DEFAULT);
                explanations.push(back);
            }
        }
        explanations.retain(|other| other.pools != labels.pools);
        explanations
    }

    fn privatise(&self, labels: &Labels, group: &[HoldingId], join: Join) -> Labels {
        let mut labels = labels.clone();
        let mut own = None;
        for &id in group {
            let first = self.first.get(&id).copied();
            let neighbour = match join {
                Join::Before => first.and_then(|at| self.holdings.get(at.checked_sub(1)?)),
                Join::After => {
                    first.and_then(|at| self.holdings[at..].iter().find(|&&other| other != id))
                }
                Join::Nobody => None,
            };
            let pool = neighbour.map(|&id| labels.pool(id)).filter(|&p| p != PoolId::DEFAULT);
            labels.pools[id] =
                pool.unwrap_or_else(|| *own.get_or_insert_with(|| labels.fresh_pool()));
        }
        labels
    }
}
