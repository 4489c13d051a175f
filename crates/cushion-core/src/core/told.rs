//! Tags that are still referred to by receipts in the making.

use std::sync::{Arc, Weak};

use crate::base::names::Tag;
use crate::outcome::receipt::Group;

/// The tags that receipts in the making will name: of memory that may be free by the time they are filed, after a wait of
/// minutes.
#[derive(Debug, Default)]
pub(crate) struct ToldLater(Vec<Weak<[Tag]>>);

impl ToldLater {
    /// The tags of these groups count as referred to for as long as the caller keeps what is returned.
    pub(crate) fn hold(&mut self, groups: &[Group]) -> Arc<[Tag]> {
        let held: Arc<[Tag]> = groups.iter().map(|group| group.tag).collect();
        self.0.retain(|told| told.strong_count() > 0);
        self.0.push(Arc::downgrade(&held));
        held
    }

    /// All tags that are held.
    pub(crate) fn for_each(&self, mut f: impl FnMut(Tag)) {
        let held = self.0.iter().filter_map(Weak::upgrade);
        held.for_each(|tags| tags.iter().copied().for_each(&mut f));
    }
}
