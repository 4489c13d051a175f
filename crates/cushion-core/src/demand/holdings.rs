//! How much memory each thread or task holds, from a walk over all live blocks.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use super::owner::{self, Standing};
use crate::base::names::{Owner, Tag};
use crate::heap::Heap;
use crate::heap::block::{Block, Holder as HolderOf};
use crate::heap::pool::PoolTable;
use crate::outcome::receipt::{Group, Holder};

/// Returns the owners that hold device memory and still exist, with the bytes of each.
pub(super) fn holdings(heap: &Heap) -> BTreeMap<Owner, (Standing, u64)> {
    let mut bytes: BTreeMap<Owner, u64> = BTreeMap::new();
    // There can be very many blocks, and consecutive ones mostly have the same owner.
    let on_device = heap.live_blocks().filter(|block| block.lane.pool != PoolTable::SPILL);
    let mut run: Option<(Owner, u64)> = None;
    for block in on_device {
        match &mut run {
            Some((owner, held)) if *owner == block.holder.owner => *held += block.size,
            _ => {
                let before = run.replace((block.holder.owner, block.size));
                before
                    .into_iter()
                    .for_each(|(owner, held)| *bytes.entry(owner).or_default() += held);
            }
        }
    }
    run.into_iter().for_each(|(owner, held)| *bytes.entry(owner).or_default() += held);
    let standings = owner::standings(bytes.keys().copied());
    let is_there = standings.into_iter().filter(|(_, standing)| *standing != Standing::Gone);
    is_there.map(|(owner, standing)| (owner, (standing, bytes[&owner]))).collect()
}

/// Returns the owners that hold device memory and still exist.
pub(super) fn holders(heap: &Heap) -> BTreeMap<Owner, Standing> {
    holdings(heap).into_iter().map(|(owner, (standing, _))| (owner, standing)).collect()
}

/// How many groups and holders a receipt lists.
const NAMED: usize = 8;

/// Returns the largest groups of live allocations and the owners that hold the most bytes.
pub(crate) fn largest_holders(heap: &Heap) -> (Vec<Group>, Vec<Holder>) {
    let mut groups: FxHashMap<(Tag, u64), (u64, u64)> = FxHashMap::default();
    let mut holders: BTreeMap<Owner, u64> = BTreeMap::new();
    // There can be very many blocks, and consecutive ones are mostly alike.
    let of_holder = |block: &&Block| block.holder;
    let mut blocks = heap.live_blocks().peekable();
    while let Some(first) = blocks.next() {
        let (mut count, mut bytes) = (1, first.size);
        while let Some(more) = blocks.next_if(|it| of_holder(it) == of_holder(&first)) {
            count += 1;
            bytes += more.size;
        }
        let HolderOf { tag, requested, owner } = first.holder;
        let group = groups.entry((tag, requested)).or_default();
        *group = (group.0 + count, group.1 + bytes);
        *holders.entry(owner).or_default() += bytes;
    }
    let of_group =
        |((tag, each), (count, bytes))| Group { tag, each, count, bytes, stack: Vec::new() };
    let mut groups: Vec<Group> = groups.into_iter().map(of_group).collect();
    let rank = |group: &Group| (std::cmp::Reverse(group.bytes), group.tag, group.each);
    if groups.len() > NAMED {
        groups.select_nth_unstable_by_key(NAMED, rank);
        groups.truncate(NAMED);
    }
    groups.sort_unstable_by_key(rank);
    let mut holders: Vec<(Owner, u64)> = holders.into_iter().collect();
    holders.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
    holders.truncate(NAMED);
    let named = |(owner, bytes)| Holder { who: owner::name_of(owner), bytes };
    (groups, holders.into_iter().map(named).collect())
}
