//! Infers which recorded segments belong to private pools.
//!
//! Newer PyTorch names the pool in each event, and the final `segments` name the pools of what is
//! left at the end. For the other segments, those of graphs and pools destroyed during the run, the
//! pool is inferred. First every such segment counts as the default pool's. A trial replay then
//! follows PyTorch until the first departure from its path, and looks for a segment that would
//! explain the departure if it were private. If PyTorch allocated a new segment although the
//! default pool had room, the new one was private; if PyTorch kept an empty segment while all
//! cached memory was released, that one was. An explanation is kept only if the engine then follows
//! PyTorch further than before.

use cushion_core::PoolId;
use rustc_hash::FxHashMap;

use crate::model::events::Events;
use crate::program::holdings::{HoldingId, Holdings, requests};
use crate::program::labels::Labels;
use crate::replay::trial::{Departure, DepartureKind};

/// The way to choose the pool of a holding that turns out to be private.
#[derive(Debug, Clone, Copy)]
enum Join {
    /// The pool of the allocation before the first one in the holding, if that pool is private.
    Before,
    /// The pool of the allocation after, if that pool is private.
    After,
    /// A new pool.
    New,
}

/// Infers the pools that the trace does not tell. `follow` runs a trial and returns its departure
/// from PyTorch's path. `effort` is the cost of a trial, in events.
pub(crate) fn infer(
    events: &Events,
    start: &Holdings,
    labels: Labels,
    effort: u64,
    follow: impl Fn(&Labels) -> Option<Departure>,
) -> Labels {
    // Limits the total effort to seconds.
    let mut trials = (50_000_000 / effort.max(1)).clamp(1, 400);
    let requests = Requests::of(events, start);
    let mut best = labels.clone();
    let mut now = labels;
    let mut departure = follow(&now);
    while let Some(at) = departure {
        let mut further: Option<(usize, Labels, Option<Departure>)> = None;
        // Several holdings can be in the way of one request. An explanation that changes the
        // departure at the same event may be the first of several, if each makes one more holding
        // private.
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
    /// The holding of each allocation, in order.
    holdings: Vec<HoldingId>,
    /// The index of each holding's first allocation in `holdings`.
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

    /// Returns labels that may explain a departure.
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
            ids.retain(|&id| !labels.is_known(id));
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
            for join in [Join::Before, Join::After, Join::New] {
                explanations.push(self.privatise(labels, group, join));
            }
            if group.iter().any(|&id| labels.pool(id) != PoolId::DEFAULT) {
                let mut back = labels.clone();
                group.iter().for_each(|&id| back.set_pool(id, PoolId::DEFAULT));
                explanations.push(back);
            }
        }
        explanations.retain(|other| !other.has_same_pools(labels));
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
                Join::New => None,
            };
            let pool = neighbour.map(|&id| labels.pool(id)).filter(|&p| p != PoolId::DEFAULT);
            let pool = pool.unwrap_or_else(|| *own.get_or_insert_with(|| labels.fresh_pool()));
            labels.set_pool(id, pool);
        }
        labels
    }
}
