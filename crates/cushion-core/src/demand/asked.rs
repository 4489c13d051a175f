//! A request as the caller made it.

use super::owner::{self, Wishes};
use crate::base::names::{Owner, Tag};
use crate::driver::StreamId;

/// A request as the caller made it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// Not zero.
    pub(crate) bytes: u64,
    pub(crate) stream: StreamId,
    pub(crate) tag: Tag,
    pub(crate) owner: Owner,
    /// Whether a thread blocks until it is served, as opposed to a future.
    pub(crate) blocks: bool,
    /// Whether it is a prefetch. Memory of other streams or of the host does not help it.
    pub(crate) ahead: bool,
    /// Wishes captured when the future was created. Those of a thread are looked up when needed.
    pub(crate) of_maker: Option<Wishes>,
    /// Whether a callback makes it: then it calls no callbacks and never waits.
    pub(crate) in_callback: bool,
}

impl Asked {
    /// Returns a request of the current thread, which blocks until it is served.
    pub(crate) fn by_thread(bytes: u64, stream: StreamId, tag: Tag) -> Self {
        let owner = owner::current();
        let in_callback = owner::is_in_callback();
        Self { bytes, stream, tag, owner, blocks: true, ahead: false, of_maker: None, in_callback }
    }

    /// Returns a request of a future that the current thread creates.
    pub(crate) fn by_future(bytes: u64, stream: StreamId, tag: Tag) -> Self {
        let of_maker = Some(owner::wishes());
        Self { blocks: false, of_maker, ..Self::by_thread(bytes, stream, tag) }
    }

    /// Returns priority, budget and skipped rungs of the request. A follower asks in the name of
    /// `leader` and uses the leader's wishes where it has none of its own.
    pub(crate) fn wishes(&self, leader: Owner) -> Wishes {
        let own = self.of_maker.unwrap_or_else(owner::wishes);
        if self.owner == Owner::FOLLOWER { own.or(&owner::wishes_of(leader)) } else { own }
    }
}
