//! The texts of the latest refusals, each with its receipt.
//!
//! An exception that PyTorch builds from a C++ exception carries only a text. This table maps the
//! exact text of a refusal to its receipt. No two refusals of a process have the same text: each
//! text ends with the device, the number of the receipt, which an engine uses once, and the
//! process.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// The latest refusals of each device. `R` is the receipt.
#[derive(Debug)]
pub(crate) struct Refusals<R>(BTreeMap<u32, VecDeque<Refusal<R>>>);

#[derive(Debug)]
struct Refusal<R> {
    text: String,
    receipt: Arc<R>,
}

impl<R> Refusals<R> {
    pub(crate) const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Adds a refusal, and drops the oldest ones of this device beyond `most`.
    pub(crate) fn add(&mut self, device: u32, text: String, receipt: Arc<R>, most: usize) {
        let refusals = self.0.entry(device).or_default();
        refusals.push_back(Refusal { text, receipt });
        let excess = refusals.len().saturating_sub(most);
        refusals.drain(..excess);
    }

    /// Returns the receipt of the refusal that the text of an exception belongs to.
    ///
    /// The text may have more around the refusal's own: PyTorch appends a C++ backtrace if it is
    /// asked to, and `DataParallel` prepends the traceback of its thread. If the text contains
    /// several refusals, the first one counts: a callback's own refusal is quoted further inside.
    pub(crate) fn find(&self, text: &str) -> Option<Arc<R>> {
        let all = || self.0.values().flat_map(|refusals| refusals.iter().rev());
        let found = all().find(|refusal| refusal.text == text).or_else(|| {
            let place = |refusal: &&Refusal<R>| text.find(&refusal.text);
            let inside = all().filter_map(|refusal| Some((place(&refusal)?, refusal)));
            let first = inside.min_by_key(|(at, refusal)| (*at, Reverse(refusal.text.len())));
            first.map(|(_, refusal)| refusal)
        });
        found.map(|refusal| Arc::clone(&refusal.receipt))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(number: u64, device: u32) -> String {
        format!(
            "CUDA out of memory. Tried to allocate 2.00 MiB.\n\
             Cushion's receipt: {number} on GPU {device} of process 42."
        )
    }

    /// Receipts 1 to `count` of devices 0 and 1, as (device, number).
    fn refusals(count: u64, most: usize) -> Refusals<(u32, u64)> {
        let mut refusals = Refusals::new();
        for (number, device) in (1..=count).flat_map(|number| [(number, 0), (number, 1)]) {
            refusals.add(device, text(number, device), Arc::new((device, number)), most);
        }
        refusals
    }

    fn found(refusals: &Refusals<(u32, u64)>, text: &str) -> Option<(u32, u64)> {
        refusals.find(text).map(|receipt| *receipt)
    }

    #[test]
    fn texts_that_differ_in_the_number_alone_have_their_own_receipts() {
        let refusals = refusals(12, 100);
        for (number, device) in (1..=12).flat_map(|number| [(number, 0), (number, 1)]) {
            let text = text(number, device);
            assert_eq!(found(&refusals, &text), Some((device, number)));
            assert_eq!(found(&refusals, &format!("{text}\nC++ stack")), Some((device, number)));
            let wrapped = format!("Caught it in replica 0.\n{text}\n");
            assert_eq!(found(&refusals, &wrapped), Some((device, number)));
        }
    }

    #[test]
    fn only_a_whole_text_is_found() {
        let refusals = refusals(12, 100);
        let whole = text(1, 0);
        assert_eq!(found(&refusals, &whole[..whole.len() - 1]), None);
        assert_eq!(found(&refusals, "Cushion's receipt: 1 on GPU 0 of process 42."), None);
        assert_eq!(found(&refusals, &text(13, 0)), None);
        assert_eq!(found(&refusals, ""), None);
    }

    #[test]
    fn a_refusal_that_quotes_another_is_itself() {
        let mut refusals = refusals(3, 100);
        let outer = format!("CUDA out of memory. The callback failed: {}\n{}", text(2, 0), "4");
        refusals.add(0, outer.clone(), Arc::new((0, 4)), 100);
        assert_eq!(found(&refusals, &outer), Some((0, 4)));
        assert_eq!(found(&refusals, &format!("{outer}\nC++ stack")), Some((0, 4)));
    }

    #[test]
    fn the_oldest_of_a_device_go_first() {
        let refusals = refusals(5, 2);
        for device in [0, 1] {
            let numbers = (1..=5).filter(|&it| found(&refusals, &text(it, device)).is_some());
            assert_eq!(numbers.collect::<Vec<_>>(), [4, 5]);
        }
    }
}
