//! Curves over millions of events, with as many points as a screen has pixels: each bucket keeps
//! its minimum and maximum, so no peak is lost.

use cushion_trace::Watch;

use super::data::Curve;

/// About the width of a large screen in pixels.
pub(crate) const BUCKETS: usize = 1500;

/// Returns the number of buckets for a trace of `events` events.
pub(crate) fn buckets(events: u64) -> usize {
    usize::try_from(events).unwrap_or(usize::MAX).clamp(1, BUCKETS)
}

/// Returns the bucket of an event.
fn bucket(event: u64, events: u64) -> usize {
    let buckets = buckets(events);
    let place = u128::from(event) * buckets as u128 / u128::from(events.max(1));
    usize::try_from(place).unwrap_or(usize::MAX).min(buckets - 1)
}

/// Returns the first event of a bucket.
pub(crate) fn first_event(bucket: usize, events: u64) -> u64 {
    let first = (bucket as u128 * u128::from(events)).div_ceil(buckets(events) as u128);
    u64::try_from(first).unwrap_or(u64::MAX)
}

/// Records live and reserved bytes during a replay.
#[derive(Debug)]
pub(crate) struct Recorder {
    events: u64,
    live: Series,
    reserved: Series,
}

impl Recorder {
    /// Makes a recorder for `events` events. If the trace begins in the middle of a run, the first
    /// values count from the start; else the curve starts at zero.
    pub(crate) fn new(events: u64, begins_in_the_middle: bool) -> Self {
        let series = || Series { begins_in_the_middle, ..Series::default() };
        Self { events, live: series(), reserved: series() }
    }

    /// Returns the curves of live and reserved bytes up to event `end`. Each peak is given as an
    /// event and a value, because it may last for less than a step.
    pub(crate) fn finish(
        self,
        end: u64,
        live_peak: (u64, u64),
        reserved_peak: (u64, u64),
    ) -> (Peaked, Peaked) {
        let events = self.events;
        (self.live.finish(end, live_peak, events), self.reserved.finish(end, reserved_peak, events))
    }
}

impl Watch for Recorder {
    fn moment(&mut self, event: u64, live: u64, reserved: u64) {
        let at = bucket(event, self.events);
        self.live.take(at, event, live);
        self.reserved.take(at, event, reserved);
    }
}

/// A curve and the event of its highest point.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Peaked {
    pub(crate) curve: Curve,
    pub(crate) peak_event: u64,
}

#[derive(Debug, Default)]
struct Series {
    curve: Curve,
    /// The latest value.
    now: u64,
    /// The first event with the highest value so far, and the value.
    most: (u64, u64),
    begins_in_the_middle: bool,
}

impl Series {
    fn take(&mut self, at: usize, event: u64, value: u64) {
        let Curve { lo, hi } = &mut self.curve;
        // Events come in order; an event out of order is counted in the current bucket.
        let at = at.max(hi.len().saturating_sub(1));
        if at < hi.len() {
            lo[at] = lo[at].min(value);
            hi[at] = hi[at].max(value);
        } else {
            if hi.is_empty() && self.begins_in_the_middle {
                self.now = value;
            }
            lo.resize(at, self.now);
            hi.resize(at, self.now);
            lo.push(value);
            hi.push(value);
        }
        self.now = value;
        if value > self.most.1 {
            self.most = (event, value);
        }
    }

    fn finish(mut self, end: u64, (event, value): (u64, u64), events: u64) -> Peaked {
        // Nothing changes until the end.
        let length = (bucket(end.saturating_sub(1), events) + 1).max(self.curve.hi.len());
        self.curve.lo.resize(length, self.now);
        self.curve.hi.resize(length, self.now);
        if value > self.most.1 {
            self.most = (event, value);
            let at = bucket(event, events).min(length - 1);
            self.curve.hi[at] = value;
        }
        Peaked { curve: self.curve, peak_event: self.most.0 }
    }
}

/// Returns the start of each bucket, in microseconds after the first event, and the total duration;
/// `None` if the file has no times. Time never runs backwards, even if the file does.
pub(crate) fn times(of_events: impl Iterator<Item = u64>, events: u64) -> Option<(Vec<u64>, u64)> {
    let mut times = Vec::with_capacity(buckets(events));
    let (mut start, mut now) = (None, 0);
    for (event, time) in (0_u64..).zip(of_events) {
        if time > 0 {
            now = now.max(time.saturating_sub(*start.get_or_insert(time)));
        }
        if event == first_event(times.len(), events) {
            times.push(now);
        }
    }
    (start.is_some() && now > 0).then_some((times, now))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every bucket of a long run keeps its extremes, and the highest point is the peak.
    #[test]
    fn no_peak_is_lost() {
        let events = 1_000_000;
        let mut recorder = Recorder::new(events, false);
        for event in 0..events {
            // One event in a million is the peak.
            let live = if event == 777_777 { 9_999 } else { event % 100 };
            recorder.moment(event, live, 200);
        }
        let (live, reserved) = recorder.finish(events, (777_777, 9_999), (0, 200));
        assert_eq!(live.peak_event, 777_777);
        let (live, reserved) = (live.curve, reserved.curve);
        assert_eq!((live.hi.len(), live.lo.len()), (BUCKETS, BUCKETS));
        let at = live.hi.iter().position(|&hi| hi == 9_999).unwrap();
        assert!(first_event(at, events) <= 777_777 && 777_777 < first_event(at + 1, events));
        assert!(live.lo.iter().all(|&lo| lo == 0));
        assert_eq!(live.hi.iter().filter(|&&hi| hi == 99).count(), BUCKETS - 1);
        assert!(reserved.hi.iter().chain(&reserved.lo).all(|&value| value == 200));
    }

    #[test]
    fn a_short_run_is_drawn_event_by_event() {
        let mut recorder = Recorder::new(5, false);
        recorder.moment(1, 10, 20);
        recorder.moment(3, 5, 20);
        let live = recorder.finish(5, (1, 10), (1, 20)).0.curve;
        assert_eq!(live.hi, [0, 10, 10, 5, 5]);
        assert_eq!(live.lo, live.hi);
    }

    #[test]
    fn a_trace_from_the_middle_does_not_start_at_zero() {
        let mut recorder = Recorder::new(4, true);
        recorder.moment(2, 10, 20);
        assert_eq!(recorder.finish(4, (2, 10), (2, 20)).0.curve.hi, [10, 10, 10, 10]);
    }

    #[test]
    fn a_run_that_ended_early_has_a_shorter_curve() {
        let mut recorder = Recorder::new(10, false);
        recorder.moment(2, 10, 20);
        let live = recorder.finish(5, (2, 10), (2, 20)).0.curve;
        assert_eq!(live.hi, [0, 0, 10, 10, 10]);
    }

    /// A request that is served and undone within one step still counts as a peak.
    #[test]
    fn a_peak_within_a_step_is_drawn() {
        let mut recorder = Recorder::new(4, false);
        recorder.moment(1, 10, 20);
        recorder.moment(2, 10, 20);
        let live = recorder.finish(4, (2, 17), (1, 20)).0;
        assert_eq!(live.peak_event, 2);
        let live = live.curve;
        assert_eq!(live.hi, [0, 10, 17, 10]);
        assert_eq!(live.lo, [0, 10, 10, 10]);
    }

    #[test]
    fn times_count_from_the_first_and_never_go_back() {
        let (times, all) = times([100, 130, 90, 150].into_iter(), 4).unwrap();
        assert_eq!((times, all), (vec![0, 30, 30, 50], 50));
        assert_eq!(super::times([0, 0].into_iter(), 2), None);
        assert_eq!(super::times(std::iter::empty(), 0), None);
    }

    #[test]
    fn buckets_cover_every_event() {
        for events in [1, 2, 1499, 1500, 1501, 4_000, 1_234_567] {
            for at in 0..buckets(events) {
                assert_eq!(bucket(first_event(at, events), events), at, "{events}");
            }
            assert_eq!(bucket(events - 1, events), buckets(events) - 1);
        }
        assert_eq!(bucket(0, 0), 0);
    }
}
