//! A request as it was asked for.

use super::owner::{self, Wishes};
use crate::base::names::{Owner, Tag};
use crate::driver::StreamId;

/// A request as it was asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// Not zero.
    pub(crate) bytes: u64,
    pub(crate) stream: StreamId,
    pub(crate) tag: Tag,
    pub(crate) owner: Owner,
    /// A thread waits for it and does nothing else, as opposed to a future.
    pub(crate) blocks: bool,
    /// It is for later: memory of other streams, and of the host, would not help.
    pub(crate) ahead: bool,
    /// Settings captured when the future was created; those of a thread are looked up when they are needed.
    pub(crate) of_maker: Option<Wishes>,
    /// It is asked for in a callback: it calls no callbacks, and never waits.
    pub(crate) in_callback: bool,
}

impl Asked {
    /// A request of this thread, which waits for it.
    pub(crate) fn by_thread(bytes: u64, stream: StreamId, tag: Tag) -> Self {
        let owner = owner::current();
        let in_callback = owner::is_in_callback();
        Self { bytes, stream, tag, owner, blocks: true, ahead: false, of_maker: None, in_callback }
    }

    /// A request of a future that this thread makes.
    pub(crate) fn by_future(bytes: u64, stream: StreamId, tag: Tag) -> Self {
        let of_maker = Some(owner::wishes());
        Self { blocks: false, of_maker, ..Self::by_thread(bytes, stream, tag) }
    }

    /// Priority, budget and skipped rungs of the request. A follower has those of `leader`, in whose name it asks, unless
    /// it has its own.
    pub(crate) fn wishes(&self, leader: Owner) -> Wishes {
        let own = self.of_maker.unwrap_or_else(owner::wishes);
        if self.owner == Owner::FOLLOWER { own.or(&owner::wishes_of(leader)) } else { own }
    }
}
