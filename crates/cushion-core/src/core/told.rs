//! Tags that unfinished receipts will name.

use std::sync::{Arc, Weak};

use crate::base::names::Tag;
use crate::outcome::receipt::Group;

/// The tags that unfinished receipts will name. Their memory may be free by the time the receipts
/// are filed, after a wait of minutes.
#[derive(Debug, Default)]
pub(crate) struct ToldLater(Vec<Weak<[Tag]>>);

impl ToldLater {
    /// Keeps the tags of these groups in use until the returned value is dropped.
    pub(crate) fn hold(&mut self, groups: &[Group]) -> Arc<[Tag]> {
        let held: Arc<[Tag]> = groups.iter().map(|group| group.tag).collect();
        self.0.retain(|told| told.strong_count() > 0);
        self.0.push(Arc::downgrade(&held));
        held
    }

    /// Calls `f` with every tag that is kept.
    pub(crate) fn for_each(&self, mut f: impl FnMut(Tag)) {
        let held = self.0.iter().filter_map(Weak::upgrade);
        held.for_each(|tags| tags.iter().copied().for_each(&mut f));
    }
}
