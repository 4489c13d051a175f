//! The recorded allocator's settings.

use super::names::Name;

/// The settings of the recorded allocator (`allocator_settings`). A setting is `None` if the file
/// does not have it, or has it in another type than PyTorch 2.11 writes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// The text of `PYTORCH_CUDA_ALLOC_CONF` (or its newer name, `PYTORCH_ALLOC_CONF`).
    pub conf: Option<String>,
    /// The largest block that may be split, in bytes; -1 for no limit.
    pub max_split_size: Option<i64>,
    /// The share of the memory fraction above which the cache is trimmed; 0 for never.
    pub garbage_collection_threshold: Option<f64>,
    /// Whether segments grow in place.
    pub expandable_segments: Option<bool>,
    /// Rounding of sizes: pairs of a lower bound in MiB and the divisions per power of two.
    pub roundup_power2_divisions: Option<Vec<(u64, u64)>>,
    /// Whether memory used by several streams is reused during graph capture.
    pub graph_capture_record_stream_reuse: Option<bool>,
    /// Whether the allocator releases its lock around `cudaMalloc`.
    pub release_lock_on_cudamalloc: Option<bool>,
    /// Number of threads that register pinned memory.
    pub pinned_num_register_threads: Option<i64>,
    /// Whether pinned memory is registered rather than allocated by CUDA.
    pub pinned_use_cuda_host_register: Option<bool>,
    /// The size from which pinned memory is not rounded up, in bytes.
    pub max_round_threshold: Option<i64>,
    /// The largest pinned block that is cached, in bytes.
    pub max_cached_size: Option<i64>,
}

/// The fields of [`Settings`] by type. The order of `ints` and `flags` is that of Cushion's trace
/// files and must not change.
#[derive(Debug)]
pub(crate) struct Fields<'a> {
    pub(crate) conf: &'a mut Option<String>,
    pub(crate) threshold: &'a mut Option<f64>,
    pub(crate) divisions: &'a mut Option<Vec<(u64, u64)>>,
    pub(crate) ints: [(Name, &'a mut Option<i64>); 4],
    pub(crate) flags: [(Name, &'a mut Option<bool>); 4],
}

impl Settings {
    /// Returns all fields, for readers and writers to go through.
    pub(crate) fn fields(&mut self) -> Fields<'_> {
        let Self {
            conf,
            max_split_size,
            garbage_collection_threshold,
            expandable_segments,
            roundup_power2_divisions,
            graph_capture_record_stream_reuse,
            release_lock_on_cudamalloc,
            pinned_num_register_threads,
            pinned_use_cuda_host_register,
            max_round_threshold,
            max_cached_size,
        } = self;
        Fields {
            conf,
            threshold: garbage_collection_threshold,
            divisions: roundup_power2_divisions,
            ints: [
                (Name::MaxSplitSize, max_split_size),
                (Name::PinnedNumRegisterThreads, pinned_num_register_threads),
                (Name::MaxRoundThreshold, max_round_threshold),
                (Name::MaxCachedSize, max_cached_size),
            ],
            flags: [
                (Name::ExpandableSegments, expandable_segments),
                (Name::GraphCaptureRecordStreamReuse, graph_capture_record_stream_reuse),
                (Name::ReleaseLockOnCudamalloc, release_lock_on_cudamalloc),
                (Name::PinnedUseCudaHostRegister, pinned_use_cuda_host_register),
            ],
        }
    }
}
