//! Statistics: every counter is declared once, in the table below.
//!
//! The engine writes the counters under its lock. Any thread can read them at any time without the
//! lock, so that reading never blocks a hit. Each figure is correct; figures read one after the
//! other may be an allocation apart.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::lanes::{LaneFigures, Lanes};
use crate::base::names::PoolId;
use crate::driver::StreamId;

/// Adds without an atomic read-modify-write: only the holder of the lock writes.
pub(super) fn add(cell: &AtomicU64, amount: u64) -> u64 {
    let sum = cell.load(Relaxed).wrapping_add(amount);
    cell.store(sum, Relaxed);
    sum
}

pub(super) fn subtract(cell: &AtomicU64, amount: u64) {
    cell.store(cell.load(Relaxed).wrapping_sub(amount), Relaxed);
}

/// One figure over time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stat {
    /// The value now.
    pub current: u64,
    /// The largest value since the last reset of peaks.
    pub peak: u64,
    /// The sum of all increases.
    pub allocated: u64,
    /// The sum of all decreases.
    pub freed: u64,
}

/// One figure, for all pools and by size class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StatArray {
    /// All pools.
    pub all: Stat,
    /// Small pools.
    pub small_pool: Stat,
    /// Large pools.
    pub large_pool: Stat,
}

impl StatArray {
    /// Returns the flat keys of `torch.cuda.memory_stats()` that follow the name of the figure.
    #[must_use]
    pub fn flat(&self) -> Vec<(String, i64)> {
        let mut flat = Vec::with_capacity(12);
        for (pool, stat) in
            [("all", &self.all), ("small_pool", &self.small_pool), ("large_pool", &self.large_pool)]
        {
            flatten(&mut flat, pool, stat);
        }
        flat
    }
}

/// The live counterpart of [`Stat`].
#[derive(Debug, Default)]
pub(crate) struct LiveStat {
    current: AtomicU64,
    peak: AtomicU64,
    allocated: AtomicU64,
    freed: AtomicU64,
}

impl LiveStat {
    pub(crate) fn increase(&self, amount: u64) {
        let current = add(&self.current, amount);
        if current > self.peak.load(Relaxed) {
            self.peak.store(current, Relaxed);
        }
        add(&self.allocated, amount);
    }

    pub(crate) fn decrease(&self, amount: u64) {
        subtract(&self.current, amount);
        add(&self.freed, amount);
    }

    /// Sets a figure whose definition changed with an option.
    pub(crate) fn set_current(&self, value: u64) {
        let current = self.current.load(Relaxed);
        if value > current {
            self.increase(value - current);
        } else if value < current {
            self.decrease(current - value);
        }
    }

    fn reset_peak(&self) {
        self.peak.store(self.current.load(Relaxed), Relaxed);
    }

    fn reset_accumulated(&self) {
        self.allocated.store(0, Relaxed);
        self.freed.store(0, Relaxed);
    }

    fn read(&self) -> Stat {
        Stat {
            current: self.current.load(Relaxed),
            peak: self.peak.load(Relaxed),
            allocated: self.allocated.load(Relaxed),
            freed: self.freed.load(Relaxed),
        }
    }
}

/// The live counterpart of [`StatArray`]. The figures of all pools are the sums of both halves, so
/// that only the peak of the sum is stored: these are the most frequent writes.
#[derive(Debug, Default)]
pub(crate) struct LiveStatArray {
    small_pool: LiveStat,
    large_pool: LiveStat,
    peak_of_all: AtomicU64,
}

impl LiveStatArray {
    fn half(&self, small: bool) -> &LiveStat {
        if small { &self.small_pool } else { &self.large_pool }
    }

    /// Returns the value of all pools now.
    pub(crate) fn increase(&self, small: bool, amount: u64) -> u64 {
        self.half(small).increase(amount);
        let current = self.current();
        if current > self.peak_of_all.load(Relaxed) {
            self.peak_of_all.store(current, Relaxed);
        }
        current
    }

    pub(crate) fn decrease(&self, small: bool, amount: u64) {
        self.half(small).decrease(amount);
    }

    pub(crate) fn current(&self) -> u64 {
        self.small_pool.current.load(Relaxed) + self.large_pool.current.load(Relaxed)
    }

    /// Returns the sum of all decreases.
    pub(crate) fn freed(&self) -> u64 {
        self.small_pool.freed.load(Relaxed) + self.large_pool.freed.load(Relaxed)
    }

    fn reset_peak(&self) {
        self.small_pool.reset_peak();
        self.large_pool.reset_peak();
        self.peak_of_all.store(self.current(), Relaxed);
    }

    fn reset_accumulated(&self) {
        self.small_pool.reset_accumulated();
        self.large_pool.reset_accumulated();
    }

    fn read(&self) -> StatArray {
        let (small_pool, large_pool) = (self.small_pool.read(), self.large_pool.read());
        let all = Stat {
            current: small_pool.current + large_pool.current,
            peak: self.peak_of_all.load(Relaxed),
            allocated: small_pool.allocated + large_pool.allocated,
            freed: small_pool.freed + large_pool.freed,
        };
        StatArray { all, small_pool, large_pool }
    }
}

/// The reserved bytes of each private pool. It has a lock of its own: it is written only when
/// memory is obtained from the driver or given back.
#[derive(Debug, Default)]
pub(crate) struct ReservedByPrivate(Mutex<BTreeMap<PoolId, LiveStatArray>>);

impl ReservedByPrivate {
    /// From this many pools on, a new pool replaces one that is gone.
    const MOST: usize = 1024;

    fn pools(&self) -> MutexGuard<'_, BTreeMap<PoolId, LiveStatArray>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn increase(&self, pool: PoolId, small: bool, bytes: u64) {
        if pool != PoolId::DEFAULT {
            let mut pools = self.pools();
            if pools.len() >= Self::MOST && !pools.contains_key(&pool) {
                // PyTorch numbers pools in order of creation, so that the first one found is the
                // oldest.
                let gone = pools.iter().find(|(_, array)| array.current() == 0);
                if let Some(gone) = gone.map(|(&pool, _)| pool) {
                    pools.remove(&gone);
                }
            }
            pools.entry(pool).or_default().increase(small, bytes);
        }
    }

    pub(crate) fn decrease(&self, pool: PoolId, small: bool, bytes: u64) {
        if pool != PoolId::DEFAULT {
            self.pools().entry(pool).or_default().decrease(small, bytes);
        }
    }

    fn read(&self) -> BTreeMap<PoolId, StatArray> {
        self.pools().iter().map(|(&pool, array)| (pool, array.read())).collect()
    }

    fn reset_peak(&self) {
        self.pools().values().for_each(LiveStatArray::reset_peak);
    }

    fn reset_accumulated(&self) {
        self.pools().values().for_each(LiveStatArray::reset_accumulated);
    }
}

/// A plain count.
#[derive(Debug, Default)]
pub(crate) struct LiveCount(AtomicU64);

impl LiveCount {
    pub(crate) fn add(&self, amount: u64) {
        add(&self.0, amount);
    }

    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    pub(crate) fn read(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Declares every counter once. The live struct, the struct that is read, the flat keys and the
/// resets all come from this table.
macro_rules! counters {
    (
        arrays { $($(#[doc = $array_doc:literal])* $array:ident,)* }
        stats { $($(#[doc = $stat_doc:literal])* $stat:ident,)* }
        counts { $($(#[doc = $count_doc:literal])* $count:ident,)* }
        settings { $($(#[doc = $setting_doc:literal])* $setting:ident,)* }
        our_stats { $($(#[doc = $our_stat_doc:literal])* $our_stat:ident,)* }
        ours { $($(#[doc = $our_doc:literal])* $our:ident,)* }
    ) => {
        /// The counters that the engine writes.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(super) $array: LiveStatArray,)*
            $(pub(super) $stat: LiveStat,)*
            $(pub(super) $count: LiveCount,)*
            $(pub(super) $setting: LiveCount,)*
            $(pub(super) $our_stat: LiveStat,)*
            $(pub(super) $our: LiveCount,)*
            pub(super) reserved_by_private: ReservedByPrivate,
            /// The peak of live and pending bytes since a policy last restarted it.
            pub(super) watermark: LiveCount,
        }

        /// All figures of one engine, as read at one moment.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[doc = $array_doc])* pub $array: StatArray,)*
            $($(#[doc = $stat_doc])* pub $stat: Stat,)*
            $($(#[doc = $count_doc])* pub $count: u64,)*
            $($(#[doc = $setting_doc])* pub $setting: u64,)*
            $($(#[doc = $our_stat_doc])* pub $our_stat: Stat,)*
            $($(#[doc = $our_doc])* pub $our: u64,)*
            /// `reserved_bytes` of each private pool. A pool that is gone has zero current bytes,
            /// and keeps its peak and its totals until they are reset.
            pub reserved_bytes_by_private_pools: BTreeMap<PoolId, StatArray>,
            /// The figures of each lane.
            pub lanes: Vec<LaneFigures>,
        }

        impl Counters {
            pub(crate) fn read(&self, lanes: &Lanes) -> Stats {
                Stats {
                    $($array: self.$array.read(),)*
                    $($stat: self.$stat.read(),)*
                    $($count: self.$count.read(),)*
                    $($setting: self.$setting.read(),)*
                    $($our_stat: self.$our_stat.read(),)*
                    $($our: self.$our.read(),)*
                    reserved_bytes_by_private_pools: self.reserved_by_private.read(),
                    lanes: lanes.read(),
                }
            }

            /// Resets peaks to the current values. Called under the engine's lock.
            pub(crate) fn reset_peak(&self) {
                $(self.$array.reset_peak();)*
                $(self.$stat.reset_peak();)*
                $(self.$our_stat.reset_peak();)*
                self.reserved_by_private.reset_peak();
            }

            /// Resets totals and counts to zero. Called under the engine's lock.
            pub(crate) fn reset_accumulated(&self) {
                $(self.$array.reset_accumulated();)*
                $(self.$stat.reset_accumulated();)*
                $(self.$our_stat.reset_accumulated();)*
                self.reserved_by_private.reset_accumulated();
                $(self.$count.set(0);)*
                $(self.$our.set(0);)*
            }
        }

        impl Stats {
            /// Returns the flat keys of `torch.cuda.memory_stats()` with their values.
            /// `max_split_size` is -1 if there is no limit.
            #[must_use]
            pub fn flat(&self) -> Vec<(String, i64)> {
                let mut flat = Vec::with_capacity(123);
                $(
                    let name = stringify!($array);
                    let keys = self.$array.flat().into_iter();
                    flat.extend(keys.map(|(key, value)| (format!("{name}.{key}"), value)));
                )*
                $(flatten(&mut flat, stringify!($stat), &self.$stat);)*
                $(flat.push((stringify!($count).to_owned(), signed(self.$count)));)*
                $(flat.push((stringify!($setting).to_owned(), signed(self.$setting)));)*
                flat
            }
        }
    };
}

counters! {
    arrays {
        /// Allocations that their owners have not freed.
        allocation,
        /// Plain segments held.
        segment,
        /// Blocks that are live or pending.
        active,
        /// Free blocks that share their plain segment with others, and so cannot be given back.
        inactive_split,
        /// Bytes of blocks that their owners have not freed.
        allocated_bytes,
        /// Bytes of physical memory held from the driver.
        reserved_bytes,
        /// Bytes of blocks that are live or pending.
        active_bytes,
        /// Bytes of free blocks that share their plain segment with others.
        inactive_split_bytes,
        /// Bytes requested by callers, until the free has completed.
        requested_bytes,
    }
    stats {
        /// Allocations too large to be split.
        oversize_allocations,
        /// Segments too large to be split.
        oversize_segments,
    }
    counts {
        /// Requests that were tried again after cached memory was given back.
        num_alloc_retries,
        /// Requests refused for lack of memory.
        num_ooms,
        /// How often the engine waited for all pending events.
        num_sync_all_streams,
        /// How often the driver provided memory.
        num_device_alloc,
        /// How often memory was given back to the driver.
        num_device_free,
        /// Requests refused by PyTorch's option `throw_on_cudamalloc_oom`, which Cushion does not
        /// have: always zero.
        num_oom_rejections,
    }
    settings {
        /// The largest size that may be split; `u64::MAX` if there is no limit.
        max_split_size,
    }
    our_stats {
        /// Bytes of host memory at device addresses. No figure above counts them.
        spilled_bytes,
        /// Allocations in host memory. No figure above counts them.
        spilled_allocation,
    }
    ours {
        /// Requests that neither a free block nor the driver could serve.
        shortages,
        /// Shortages after which the request was served.
        shortages_survived,
        /// Shortages after which the request was refused.
        shortages_refused,
        /// Shortages in which the driver failed or the caller abandoned the request.
        shortages_broken,
        /// The time lost in shortages, in nanoseconds.
        shortage_nanos,
        /// Allocations served from memory already reserved.
        hits,
        /// Allocations that needed memory from the driver.
        misses,
    }
}

impl Counters {
    /// Returns the counters of an engine with this `max_split_size`.
    pub(crate) fn new(max_split_size: Option<u64>) -> Self {
        let counters = Self::default();
        counters.max_split_size.set(max_split_size.unwrap_or(u64::MAX));
        counters
    }

    /// Returns the live and pending bytes, and the reserved bytes.
    pub(crate) fn active_and_reserved(&self) -> (u64, u64) {
        (self.active_bytes.current(), self.reserved_bytes.current())
    }

    /// Returns the bytes requested by callers, and the reserved bytes.
    pub(crate) fn live_and_reserved(&self) -> (u64, u64) {
        (self.requested_bytes.current(), self.reserved_bytes.current())
    }

    /// Returns how often the driver mapped memory, mapped it a second time, or took either back.
    pub(crate) fn driver_changes(&self) -> u64 {
        self.num_device_alloc.read() + self.num_device_free.read()
    }
}

impl Stats {
    /// Returns the time lost in shortages, in milliseconds.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a time for people")]
    pub fn milliseconds_lost(&self) -> f64 {
        self.shortage_nanos as f64 / 1e6
    }

    /// Returns the reserved bytes that are neither live nor pending.
    #[must_use]
    pub fn cached_bytes(&self) -> u64 {
        self.reserved_bytes.all.current.saturating_sub(self.active_bytes.all.current)
    }

    /// Returns the size of the largest free block of any lane.
    #[must_use]
    pub fn largest_free_block(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.largest_free).max().unwrap_or(0)
    }

    /// Returns the number of free blocks.
    #[must_use]
    pub fn free_blocks(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.free_blocks).sum()
    }

    /// Returns the number of blocks, free, live or pending.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.free_blocks() + self.active.all.current
    }

    /// Returns the bytes of blocks that are live or pending on one stream.
    #[must_use]
    pub fn stream_bytes(&self, stream: StreamId) -> u64 {
        self.lanes.iter().filter(|lane| lane.stream == stream).map(|lane| lane.active_bytes).sum()
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(-1)
}

fn flatten(flat: &mut Vec<(String, i64)>, name: &str, stat: &Stat) {
    for (kind, value) in [
        ("current", stat.current),
        ("peak", stat.peak),
        ("allocated", stat.allocated),
        ("freed", stat.freed),
    ] {
        flat.push((format!("{name}.{kind}"), signed(value)));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn flat_keys_are_pytorchs_123() {
        let stats = Counters::default().read(&Lanes::default());
        let keys: BTreeSet<_> = stats.flat().into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys.len(), 123);
        for key in [
            "allocation.all.current",
            "active_bytes.small_pool.peak",
            "inactive_split_bytes.large_pool.freed",
            "requested_bytes.all.allocated",
            "oversize_segments.current",
            "num_ooms",
            "num_oom_rejections",
            "max_split_size",
        ] {
            assert!(keys.contains(key), "{key}");
        }
    }

    #[test]
    fn resets_touch_the_same_figures_as_pytorchs() {
        let counters = Counters::default();
        counters.allocated_bytes.increase(true, 700);
        counters.allocated_bytes.decrease(true, 500);
        counters.num_ooms.add(3);
        let lanes = Lanes::default();

        counters.reset_peak();
        let stats = counters.read(&lanes);
        let expected = Stat { current: 200, peak: 200, allocated: 700, freed: 500 };
        assert_eq!(stats.allocated_bytes.all, expected);
        assert_eq!(stats.allocated_bytes.small_pool, expected);
        assert_eq!(stats.num_ooms, 3);

        counters.reset_accumulated();
        let stats = counters.read(&lanes);
        assert_eq!(
            stats.allocated_bytes.all,
            Stat { current: 200, peak: 200, allocated: 0, freed: 0 }
        );
        assert_eq!(stats.num_ooms, 0);
    }

    #[test]
    fn pools_that_are_gone_make_room_for_new_ones() {
        let reserved = ReservedByPrivate::default();
        let most = ReservedByPrivate::MOST as u64;
        for number in 1..=2 * most {
            reserved.increase(PoolId(0, number), true, 100);
            if number != 5 {
                reserved.decrease(PoolId(0, number), true, 100);
            }
        }
        let pools = reserved.read();
        assert_eq!(pools.len() as u64, most);
        assert_eq!(pools[&PoolId(0, 5)].all.current, 100, "what holds something stays");
        assert!(pools.contains_key(&PoolId(0, 2 * most)) && !pools.contains_key(&PoolId(0, 6)));
    }

    #[test]
    fn closed_lanes_are_removed() {
        let lanes = Lanes::default();
        let open = |stream| lanes.open(StreamId(stream), PoolId::DEFAULT, true);
        let opened: Vec<_> = (0..1000).map(open).collect();
        let streams = || lanes.read().iter().map(|lane| lane.stream.0).collect::<BTreeSet<_>>();
        assert_eq!(streams().len(), 1000);
        for (stream, stats) in opened.iter().enumerate() {
            if stream % 100 != 7 {
                lanes.close(stats);
            }
        }
        assert_eq!(streams(), (0..10).map(|hundred| hundred * 100 + 7).collect());
        assert!(lanes.size().1 < 100, "{:?}", lanes.size());
        open(5);
        assert_eq!(streams().len(), 11);
    }
}
