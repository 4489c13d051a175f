//! The keys and words of PyTorch's snapshot files.

macro_rules! names {
    ($($name:ident = $text:literal,)*) => {
        /// A key or word that the readers recognise.
        ///
        /// These are the first strings of every arena, so a reader recognises a key by its number
        /// and does not compare strings.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Name { $($name,)* }

        impl Name {
            pub(crate) const ALL: &[Self] = &[$(Self::$name,)*];

            pub(crate) fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

names! {
    Alloc = "alloc", FreeRequested = "free_requested", FreeCompleted = "free_completed",
    SegmentAlloc = "segment_alloc", SegmentFree = "segment_free", SegmentMap = "segment_map",
    SegmentUnmap = "segment_unmap", Snapshot = "snapshot", Oom = "oom", Annotate = "annotate",
    Action = "action", Addr = "addr", DeviceFree = "device_free", Size = "size",
    Stream = "stream", TimeUs = "time_us", PoolId = "pool_id", Frames = "frames",
    Function = "name", Filename = "filename", Line = "line", Segments = "segments",
    DeviceTraces = "device_traces", AllocatorSettings = "allocator_settings", Device = "device",
    Address = "address", TotalSize = "total_size", SegmentType = "segment_type", Large = "large",
    Small = "small", SegmentPoolId = "segment_pool_id", IsExpandable = "is_expandable",
    Blocks = "blocks", RequestedSize = "requested_size", State = "state",
    ActiveAllocated = "active_allocated", ActivePendingFree = "active_pending_free",
    ActiveAwaitingFree = "active_awaiting_free", Inactive = "inactive",
    CudaAllocConf = "PYTORCH_CUDA_ALLOC_CONF", AllocConf = "PYTORCH_ALLOC_CONF",
    MaxSplitSize = "max_split_size", GarbageCollectionThreshold = "garbage_collection_threshold",
    ExpandableSegments = "expandable_segments",
    RoundupPower2Divisions = "roundup_power2_divisions",
    GraphCaptureRecordStreamReuse = "graph_capture_record_stream_reuse",
    ReleaseLockOnCudamalloc = "release_lock_on_cudamalloc",
    PinnedNumRegisterThreads = "pinned_num_register_threads",
    PinnedUseCudaHostRegister = "pinned_use_cuda_host_register",
    MaxRoundThreshold = "max_round_threshold", MaxCachedSize = "max_cached_size",
}
