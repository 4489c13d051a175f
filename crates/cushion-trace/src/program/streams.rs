//! The streams that pending frees wait for.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use super::narrow;
use super::steps::{Rare, Slot};

/// Assigns a stream to each pending free. The trace does not tell which stream a pending free waits
/// for. PyTorch polls the oldest free of a stream first, so frees that completed in the order of
/// their requests can have waited for the same stream. This uses as few streams as that allows.
pub(super) fn spread_over_streams(steps: &mut [Rare]) {
    let mut completed: FxHashMap<Slot, usize> = FxHashMap::default();
    for (index, step) in steps.iter().enumerate() {
        if let Rare::Complete { slot } = step {
            completed.insert(*slot, index);
        }
    }
    // The streams so far, by the step at which the last free of each completes.
    let mut latest: BTreeSet<(usize, u32)> = BTreeSet::new();
    for step in steps {
        if let Rare::FreeLater { slot, other } = step {
            let done = completed.get(slot).copied().unwrap_or(usize::MAX);
            let before = latest.range(..=(done, u32::MAX)).next_back().copied();
            *other = match before {
                Some(stream) => {
                    latest.remove(&stream);
                    stream.1
                }
                None => narrow(latest.len()),
            };
            latest.insert((done, *other));
        }
    }
}
