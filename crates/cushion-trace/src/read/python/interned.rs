//! Tables that store equal values once and number them.
//!
//! Their hash maps use std's hasher: the keys come from the file, which can be hostile.

use std::collections::HashMap;
use std::sync::Arc;

use super::value::StrId;
use crate::model::names::Name;

/// The strings of a file. The first ones are those of [`Name`].
#[derive(Debug)]
pub(super) struct Strings {
    texts: Vec<Arc<str>>,
    ids: HashMap<Arc<str>, StrId>,
}

impl Strings {
    pub(super) fn new() -> Self {
        let mut strings = Self { texts: Vec::new(), ids: HashMap::new() };
        for name in Name::ALL {
            strings.insert(name.text());
        }
        strings
    }

    pub(super) fn text(&self, id: StrId) -> &Arc<str> {
        &self.texts[id.0 as usize]
    }

    #[inline]
    pub(super) fn get(&self, text: &str) -> Option<StrId> {
        self.ids.get(text).copied()
    }

    /// Adds a string that is not in the table; `None` if numbers run out.
    pub(super) fn insert(&mut self, text: &str) -> Option<StrId> {
        let id = StrId(u32::try_from(self.texts.len()).ok()?);
        let shared: Arc<str> = text.into();
        self.texts.push(Arc::clone(&shared));
        self.ids.insert(shared, id);
        Some(id)
    }
}

/// Pairs of integers, which are memory pools.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    pairs: Vec<(u64, u64)>,
    ids: HashMap<(u64, u64), u32>,
}

impl Pairs {
    pub(super) fn pair(&self, id: u32) -> Option<(u64, u64)> {
        self.pairs.get(id as usize).copied()
    }

    pub(super) fn get(&self, pair: (u64, u64)) -> Option<u32> {
        // Nearly all pairs are the default pool, which is the first.
        if self.pairs.first() == Some(&pair) {
            return Some(0);
        }
        self.ids.get(&pair).copied()
    }

    /// Adds a pair that is not in the table; `None` if numbers run out.
    pub(super) fn insert(&mut self, pair: (u64, u64)) -> Option<u32> {
        let id = u32::try_from(self.pairs.len()).ok()?;
        self.pairs.push(pair);
        self.ids.insert(pair, id);
        Some(id)
    }
}
