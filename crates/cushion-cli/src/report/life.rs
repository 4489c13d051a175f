//! Lifetimes of allocations: from the request to the completed free.

use std::collections::HashMap;

use cushion_trace::{Action, Event};

use super::data::{Life, LifeBin, Lifetimes};

/// The ends of the allocations of a trace.
#[derive(Debug, Default)]
pub(crate) struct Lives {
    /// For each event that is an allocation with a recorded free, the event of that free; else 0,
    /// at which no free can be.
    ends: Vec<u32>,
}

impl Lives {
    /// Returns the event that freed the allocation of `event`; `None` if the trace ends before.
    pub(crate) fn end(&self, event: u64) -> Option<u64> {
        let end = *self.ends.get(usize::try_from(event).ok()?)?;
        (end > 0).then_some(u64::from(end))
    }
}

/// Follows each address from its `alloc` to its `free_completed`, and counts the lifetimes in
/// events and, if the file has them, in times. `peak` is the event of the peak of live bytes.
pub(crate) fn follow(
    events: impl Iterator<Item = Event>,
    peak: u64,
    has_times: bool,
) -> (Lives, Lifetimes) {
    let mut ends = Vec::new();
    let mut live: HashMap<u64, Start> = HashMap::new();
    let mut found = Lifetimes::default();
    let (mut by_events, mut by_time) = (Histogram::default(), Histogram::default());
    for (index, event) in (0_u32..).zip(events) {
        ends.push(0);
        let ended = match event.action {
            Action::Alloc => {
                let Event { size, time_us, .. } = event;
                // An address that is allocated again was freed, even if that was not recorded.
                live.insert(event.addr, Start { index, size, time_us })
            }
            Action::FreeCompleted => live.remove(&event.addr),
            _ => None,
        };
        if let Some(start) = ended {
            ends[start.index as usize] = index;
            let life = start.life(peak, Some(index));
            by_events.add(u64::from(index - start.index), life);
            if has_times {
                by_time.add(event.time_us.saturating_sub(start.time_us), life);
            }
            found.all.add(life);
        }
    }
    #[expect(clippy::iter_over_hash_type, reason = "a sum does not depend on the order")]
    for start in live.values() {
        let life = start.life(peak, None);
        found.to_the_end.add(life);
        found.all.add(life);
    }
    found.by_events = by_events.finish();
    found.by_time = has_times.then(|| by_time.finish());
    (Lives { ends }, found)
}

/// The start of an allocation.
struct Start {
    index: u32,
    size: u64,
    time_us: u64,
}

impl Start {
    fn life(&self, peak: u64, end: Option<u32>) -> Life {
        let there = u64::from(self.index) <= peak && end.is_none_or(|end| u64::from(end) > peak);
        Life { count: 1, bytes: self.size, at_peak: if there { self.size } else { 0 } }
    }
}

impl Life {
    fn add(&mut self, other: Self) {
        self.count += other.count;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.at_peak = self.at_peak.saturating_add(other.at_peak);
    }
}

/// Bins of half a decade: 0 to 2, 3 to 9, 10 to 29, 30 to 99, and so on.
#[derive(Debug, Default)]
struct Histogram {
    bins: Vec<Life>,
}

impl Histogram {
    /// Returns the start of a bin.
    fn edge(bin: usize) -> u64 {
        let power = u32::try_from(bin / 2).ok().and_then(|exponent| 10_u64.checked_pow(exponent));
        let factor = if bin.is_multiple_of(2) { 1 } else { 3 };
        match power.and_then(|power| power.checked_mul(factor)) {
            Some(1) => 0,
            Some(edge) => edge,
            None => u64::MAX,
        }
    }

    fn add(&mut self, length: u64, life: Life) {
        let mut bin = 0;
        while Self::edge(bin + 1) <= length && Self::edge(bin + 1) < u64::MAX {
            bin += 1;
        }
        if bin >= self.bins.len() {
            self.bins.resize(bin + 1, Life::default());
        }
        self.bins[bin].add(life);
    }

    /// Returns the bins from the first that is not empty.
    fn finish(self) -> Vec<LifeBin> {
        self.bins
            .into_iter()
            .enumerate()
            .map(|(bin, life)| LifeBin { from: Self::edge(bin), to: Self::edge(bin + 1), life })
            .skip_while(|bin| bin.life.count == 0)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(action: Action, addr: u64, size: u64, time_us: u64) -> Event {
        Event { action, addr, size, stream: 0, time_us, pool: None, stack: None }
    }

    #[test]
    fn bins_are_half_decades() {
        let edges: Vec<u64> = (0..7).map(Histogram::edge).collect();
        assert_eq!(edges, [0, 3, 10, 30, 100, 300, 1000]);
        let mut histogram = Histogram::default();
        for length in [2, 3, 9, 10, u64::MAX] {
            histogram.add(length, Life { count: 1, ..Life::default() });
        }
        let bins = histogram.finish();
        assert_eq!(bins[..3].iter().map(|bin| bin.life.count).collect::<Vec<_>>(), [1, 2, 1]);
        assert!(bins.len() < 50, "bounded: {}", bins.len());
    }

    #[test]
    fn a_lifetime_ends_when_its_free_completes() {
        use Action::{Alloc, FreeCompleted, FreeRequested};
        let events = [
            event(Alloc, 1, 100, 10),
            event(Alloc, 2, 50, 11),
            event(FreeRequested, 1, 100, 20),
            event(Alloc, 3, 7, 21),
            event(FreeCompleted, 1, 100, 1010),
            event(FreeCompleted, 9, 100, 1011),
        ];
        let (lives, found) = follow(events.into_iter(), 1, true);
        assert_eq!((lives.end(0), lives.end(1), lives.end(99)), (Some(4), None, None));
        assert_eq!(found.all, Life { count: 3, bytes: 157, at_peak: 150 });
        assert_eq!(found.to_the_end, Life { count: 2, bytes: 57, at_peak: 50 });
        let [bin] = &found.by_events[..] else { panic!("{found:?}") };
        assert_eq!((bin.from, bin.to), (3, 10));
        assert_eq!(bin.life, Life { count: 1, bytes: 100, at_peak: 100 });
        let by_time = found.by_time.unwrap();
        assert_eq!((by_time[0].from, by_time[0].to), (1000, 3000));
    }
}
