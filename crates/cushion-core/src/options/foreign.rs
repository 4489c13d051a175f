//! The keys that PyTorch knows and Cushion does not act on.

/// A pair of a conf string that PyTorch knows and Cushion does not act on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotOurs {
    /// The key, one of [`NOT_OURS`].
    pub key: String,
    /// The value as written, without white space; a list keeps its brackets.
    pub value: String,
}

/// A key that is accepted with any value and not acted on.
#[derive(Debug, Clone, Copy)]
pub struct NotOursSpec {
    /// The key in a conf string.
    pub key: &'static str,
    /// Why Cushion does not act on it.
    pub why: &'static str,
}

const PINNED: &str = "It concerns pinned host memory, which PyTorch manages itself.";
const LOCK: &str = "It concerns a lock of PyTorch's own allocator.";
const RESERVE: &str = "Cushion chooses the size of its address ranges itself.";

/// The keys that PyTorch knows and Cushion does not act on.
pub static NOT_OURS: &[NotOursSpec] = &[
    NotOursSpec {
        key: "backend",
        why: "It selects one of PyTorch's allocators, and Cushion replaces them.",
    },
    NotOursSpec { key: "release_lock_on_cudamalloc", why: LOCK },
    NotOursSpec { key: "release_lock_on_hipmalloc", why: LOCK },
    NotOursSpec {
        key: "throw_on_cudamalloc_oom",
        why: "It refuses a request without trying to find memory; Cushion always tries.",
    },
    NotOursSpec { key: "expandable_segments_reserve", why: RESERVE },
    NotOursSpec { key: "expandable_segments_reserve_by_class", why: RESERVE },
    NotOursSpec { key: "pinned_use_cuda_host_register", why: PINNED },
    NotOursSpec { key: "pinned_use_hip_host_register", why: PINNED },
    NotOursSpec { key: "pinned_num_register_threads", why: PINNED },
    NotOursSpec { key: "pinned_use_background_threads", why: PINNED },
    NotOursSpec { key: "pinned_reserve_segment_size_mb", why: PINNED },
    NotOursSpec { key: "pinned_free_catch_all", why: PINNED },
    NotOursSpec { key: "pinned_max_round_threshold_mb", why: PINNED },
    NotOursSpec { key: "pinned_max_cached_size_mb", why: PINNED },
];

pub(super) fn is_not_ours(key: &str) -> bool {
    NOT_OURS.iter().any(|spec| spec.key == key)
}
