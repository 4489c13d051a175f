//! Receipts: one record per shortage, survived or refused.
//!
//! Kept in a bounded ring. Whoever wants them as they come (to write them to a file, to log them)
//! listens; listeners are called by the thread that was short of memory, with no lock held.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use crate::block::Block;
use crate::callbacks::Answer;
use crate::driver::Driver;
use crate::error::{Shortage, seconds};
use crate::history::Tag;
use crate::ladder::{Ladder, Rung};
use crate::locked::Locked;
use crate::owner::{self, Owner};
use crate::size::display;

/// The record of one shortage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Receipt {
    /// Its number, from 1 for each engine.
    pub number: u64,
    /// The device.
    pub device: u32,
    /// When the request fell short, on the engine's clock.
    #[serde(with = "seconds")]
    pub at: Duration,
    /// The time lost by it.
    #[serde(with = "seconds")]
    pub took: Duration,
    /// The ladder that was climbed.
    pub ladder: Ladder,
    /// Who asked: the thread, or the task.
    pub who: String,
    /// The same, for this process alone.
    #[serde(skip)]
    pub owner: Owner,
    /// The tag of the request: the number of its stack, where those are recorded.
    pub tag: Tag,
    /// That stack, innermost frame first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
    /// How it ended.
    pub outcome: Outcome,
    /// The figures and each rung. The figures are those of the moment it fell short if it was survived, and of the end
    /// if it was refused.
    pub shortage: Shortage,
    /// The largest groups of live allocations at that moment, the largest first.
    pub groups: Vec<Group>,
    /// Who held live memory at that moment, the most first.
    pub holders: Vec<Holder>,
    /// What the program's callbacks did, in order.
    #[serde(default)]
    pub answers: Vec<Answer>,
}

/// How a shortage ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Outcome {
    /// The request was served, by this rung.
    Survived(Rung),
    /// Refused: full now.
    Full,
    /// Refused: it can never fit.
    NeverFits,
    /// Refused: the task was told to give way.
    GiveWay,
    /// Refused: the task was told to split.
    Split,
    /// Refused: the driver failed.
    Driver,
    /// The request was given up by who made it.
    GivenUp,
}

impl Outcome {
    /// Whether the request was served.
    #[must_use]
    pub fn is_survived(self) -> bool {
        matches!(self, Self::Survived(_))
    }

    /// For people.
    #[must_use]
    pub fn text(self) -> String {
        match self {
            Self::Survived(rung) => format!("survived by {rung}"),
            Self::Full => "refused".to_owned(),
            Self::NeverFits => "refused: it can never fit".to_owned(),
            Self::GiveWay => "told to give way".to_owned(),
            Self::Split => "told to split".to_owned(),
            Self::Driver => "refused: the driver failed".to_owned(),
            Self::GivenUp => "given up".to_owned(),
        }
    }
}

/// Live allocations of one size and one tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Group {
    /// The tag: the number of a stack, where those are recorded.
    pub tag: Tag,
    /// Bytes each was asked for with.
    pub each: u64,
    /// How many there are.
    pub count: u64,
    /// Bytes of their blocks together.
    pub bytes: u64,
    /// The stack that the tag stands for, innermost frame first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
}

/// What one thread or task held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Holder {
    /// Who.
    pub who: String,
    /// Bytes of live blocks.
    pub bytes: u64,
}

impl fmt::Display for Receipt {
    /// One line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "shortage {} on device {}: {} for {}, {} after {:.1} ms",
            self.number,
            self.device,
            display(self.shortage.requested),
            self.who,
            self.outcome.text(),
            self.took.as_secs_f64() * 1e3,
        )
    }
}

/// How many groups and holders a receipt names.
const NAMED: usize = 8;

impl<D: Driver> Locked<'_, D> {
    /// The largest groups of live allocations, and who holds most.
    pub(crate) fn who_holds_what(&self) -> (Vec<Group>, Vec<Holder>) {
        let mut groups: FxHashMap<(Tag, u64), (u64, u64)> = FxHashMap::default();
        let mut holders: BTreeMap<Owner, u64> = BTreeMap::new();
        // There can be very many blocks, and those made one after the other are mostly alike.
        let of_holder = |block: &&Block| (block.owner, block.tag, block.requested);
        let mut blocks = self.live_blocks().peekable();
        while let Some(first) = blocks.next() {
            let (mut count, mut bytes) = (1, first.size);
            while let Some(more) = blocks.next_if(|it| of_holder(it) == of_holder(&first)) {
                count += 1;
                bytes += more.size;
            }
            let group = groups.entry((first.tag, first.requested)).or_default();
            *group = (group.0 + count, group.1 + bytes);
            *holders.entry(first.owner).or_default() += bytes;
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
}

/// Who wants receipts as they come. Called with no lock held.
pub(crate) type Listener = Arc<dyn Fn(&Receipt) + Send + Sync>;

/// Says which stacks tags stand for: for each tag, in order. Called with no lock held.
pub(crate) type Explainer = Arc<dyn Fn(&[Tag]) -> Vec<Vec<String>> + Send + Sync>;

/// The receipts of one engine.
#[derive(Default)]
pub(crate) struct Receipts {
    inner: Mutex<Inner>,
}

struct Inner {
    ring: VecDeque<Arc<Receipt>>,
    room: usize,
    last: u64,
    listeners: Vec<Listener>,
    explainer: Option<Explainer>,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            ring: VecDeque::new(),
            room: Receipts::ROOM,
            last: 0,
            listeners: Vec::new(),
            explainer: None,
        }
    }
}

impl fmt::Debug for Receipts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receipts").field("last", &self.inner().last).finish_non_exhaustive()
    }
}

impl Receipts {
    /// How many are kept.
    pub(crate) const ROOM: usize = 256;

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the next one.
    pub(crate) fn number(&self) -> u64 {
        let mut inner = self.inner();
        inner.last += 1;
        inner.last
    }

    /// Keeps one, and tells who listens. What a listener panics with stays with it: it is not to bring
    /// down an allocation.
    pub(crate) fn file(&self, mut receipt: Receipt) {
        self.explain(&mut receipt);
        let receipt = Arc::new(receipt);
        let listeners = {
            let mut inner = self.inner();
            if inner.ring.len() >= inner.room {
                inner.ring.pop_front();
            }
            if inner.room > 0 {
                inner.ring.push_back(Arc::clone(&receipt));
            }
            inner.listeners.clone()
        };
        for listener in listeners {
            let told = std::panic::AssertUnwindSafe(|| listener(&receipt));
            let _ = std::panic::catch_unwind(told);
        }
    }

    /// Puts the stacks in that its tags stand for.
    fn explain(&self, receipt: &mut Receipt) {
        let Some(explainer) = self.inner().explainer.clone() else { return };
        let tags: Vec<Tag> = std::iter::once(receipt.tag)
            .chain(receipt.groups.iter().map(|group| group.tag))
            .collect();
        if tags.iter().all(|&tag| tag == Tag::NONE) {
            return;
        }
        let told = std::panic::AssertUnwindSafe(|| explainer(&tags));
        let mut stacks = std::panic::catch_unwind(told).unwrap_or_default().into_iter();
        receipt.stack = stacks.next().unwrap_or_default();
        for (group, stack) in receipt.groups.iter_mut().zip(stacks) {
            group.stack = stack;
        }
    }

    pub(crate) fn explain_by(&self, explainer: Explainer) {
        self.inner().explainer = Some(explainer);
    }

    pub(crate) fn listen(&self, listener: Listener) {
        self.inner().listeners.push(listener);
    }

    pub(crate) fn keep(&self, room: usize) {
        let mut inner = self.inner();
        inner.room = room;
        let too_many = inner.ring.len().saturating_sub(room);
        inner.ring.drain(..too_many);
    }

    /// Those kept, oldest first.
    pub(crate) fn read(&self) -> Vec<Arc<Receipt>> {
        self.inner().ring.iter().cloned().collect()
    }
}
