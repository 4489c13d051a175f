//! Snapshots in the form of PyTorch's `_cuda_memorySnapshot`, which PyTorch's tools, its viewer and
//! `cushion replay` read.

use cushion::core::{
    Action, BlockFigures, BlockUse, Entry, Options, Policy, PoolId, SegmentFigures,
};
use cushion::devices;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use rustc_hash::FxHashMap;

use crate::history::recorder::{self, Level, Reading};
use crate::history::stacks::{self, StackId};
use crate::python::gil;

/// Returns all segments and the recorded events of `device_count` devices, of all pools or of one
/// private pool.
pub(crate) fn snapshot(
    py: Python<'_>,
    device_count: usize,
    only: Option<PoolId>,
    with_traces: bool,
) -> PyResult<Bound<'_, PyDict>> {
    let _reading = Reading::begin();
    let mut writer = Writer { py, frames: FxHashMap::default() };
    let segments = PyList::empty(py);
    let mut traces = Vec::new();
    if with_traces {
        traces.resize_with(device_count, || PyList::empty(py));
    }
    for (device, engine) in devices().made() {
        // Without Python's lock, because another thread may hold the engine's lock for a while.
        let (now, history) = {
            let _released = gil::release();
            if with_traces {
                engine.snapshot_and_history()
            } else {
                (engine.snapshot(), Vec::new())
            }
        };
        for segment in &now.segments {
            if only.is_none_or(|pool| pool == segment.pool) {
                segments.append(writer.segment(device, segment)?)?;
            }
        }
        let Some(trace) = traces.get(device) else { continue };
        for entry in &history {
            if only.is_none_or(|pool| pool == entry.pool) {
                trace.append(writer.entry(entry)?)?;
            }
        }
    }
    let result = PyDict::new(py);
    result.set_item("segments", segments)?;
    result.set_item("device_traces", traces)?;
    result.set_item("allocator_settings", settings(py, &devices().options())?)?;
    // PyTorch keeps these lists itself, and does not pass them to a plug-in.
    for key in ["external_annotations", "host_segments", "host_traces"] {
        result.set_item(key, PyList::empty(py))?;
    }
    Ok(result)
}

/// Writes dicts. The frames of one stack are one list, so that a pickle holds them once.
struct Writer<'py> {
    py: Python<'py>,
    frames: FxHashMap<StackId, Bound<'py, PyList>>,
}

impl<'py> Writer<'py> {
    fn segment(&mut self, device: usize, segment: &SegmentFigures) -> PyResult<Bound<'py, PyDict>> {
        let py = self.py;
        let sum = |wanted: fn(&BlockFigures) -> bool, bytes: fn(&BlockFigures) -> u64| -> u64 {
            segment.blocks.iter().filter(|block| wanted(block)).map(bytes).sum()
        };
        let is_active = |block: &BlockFigures| block.use_ != BlockUse::Free;
        let result = PyDict::new(py);
        result.set_item("device", device)?;
        result.set_item("address", segment.address)?;
        result.set_item("total_size", segment.size)?;
        result.set_item("allocated_size", sum(|b| b.use_ == BlockUse::Live, |b| b.size))?;
        result.set_item("active_size", sum(is_active, |b| b.size))?;
        result.set_item("requested_size", sum(is_active, |b| b.requested))?;
        result.set_item("stream", segment.stream.0)?;
        result.set_item("segment_type", if segment.small { "small" } else { "large" })?;
        result.set_item("segment_pool_id", (segment.pool.0, segment.pool.1))?;
        result.set_item("is_expandable", segment.paged)?;
        if segment.stitched {
            result.set_item("stitched", true)?;
        }
        result.set_item("frames", self.frames(recorder::stack_of(segment.tag))?)?;
        let blocks = PyList::empty(py);
        for block in &segment.blocks {
            blocks.append(self.block(block)?)?;
        }
        result.set_item("blocks", blocks)?;
        Ok(result)
    }

    fn block(&mut self, block: &BlockFigures) -> PyResult<Bound<'py, PyDict>> {
        let py = self.py;
        let result = PyDict::new(py);
        let is_free = block.use_ == BlockUse::Free;
        let stack = if is_free { None } else { recorder::stack_of(block.tag) };
        result.set_item(intern!(py, "address"), block.address)?;
        result.set_item(intern!(py, "size"), block.size)?;
        result.set_item(intern!(py, "requested_size"), block.requested)?;
        result.set_item(intern!(py, "state"), block.use_.name())?;
        result.set_item(intern!(py, "frames"), self.frames(stack)?)?;
        Ok(result)
    }

    fn entry(&mut self, entry: &Entry) -> PyResult<Bound<'py, PyDict>> {
        let py = self.py;
        let result = PyDict::new(py);
        let place = if entry.action == Action::OutOfMemory { "device_free" } else { "addr" };
        result.set_item(intern!(py, "action"), entry.action.name())?;
        result.set_item(place, entry.address)?;
        result.set_item(intern!(py, "size"), entry.size)?;
        result.set_item(intern!(py, "stream"), entry.stream.0)?;
        result.set_item(intern!(py, "time_us"), entry.time.as_micros())?;
        result.set_item(intern!(py, "compile_context"), intern!(py, "N/A"))?;
        result.set_item(intern!(py, "user_metadata"), recorder::metadata_of(entry.tag))?;
        result.set_item(intern!(py, "pool_id"), (entry.pool.0, entry.pool.1))?;
        if recorder::level() >= Level::Alloc
            && let Some(stack) = recorder::stack_of(entry.tag)
        {
            result.set_item(intern!(py, "frames"), self.frames(Some(stack))?)?;
        }
        Ok(result)
    }

    fn frames(&mut self, stack: Option<StackId>) -> PyResult<Bound<'py, PyList>> {
        let Some(stack) = stack else { return Ok(PyList::empty(self.py)) };
        if let Some(known) = self.frames.get(&stack) {
            return Ok(known.clone());
        }
        let list = stacks::show(self.py, stack)?;
        self.frames.insert(stack, list.clone());
        Ok(list)
    }
}

/// Returns the allocator settings in PyTorch's form, and the version of Cushion.
fn settings<'py>(py: Python<'py>, options: &Options) -> PyResult<Bound<'py, PyDict>> {
    let settings = PyDict::new(py);
    settings.set_item("PYTORCH_CUDA_ALLOC_CONF", options.to_torch_conf())?;
    let max_split = options.max_split_size.map_or(-1, |size| i64::try_from(size).unwrap_or(-1));
    settings.set_item("max_split_size", max_split)?;
    settings.set_item("garbage_collection_threshold", options.garbage_collection_threshold)?;
    settings.set_item("expandable_segments", options.policy == Policy::Expandable)?;
    settings.set_item("pinned_num_register_threads", 1)?;
    settings.set_item("release_lock_on_cudamalloc", false)?;
    settings.set_item("pinned_use_cuda_host_register", false)?;
    let reuse = options.graph_capture_record_stream_reuse;
    settings.set_item("graph_capture_record_stream_reuse", reuse)?;
    let divisions = PyDict::new(py);
    for (at, count) in options.roundup_power2_divisions.iter().enumerate() {
        divisions.set_item((1_u64 << at).to_string(), count)?;
    }
    settings.set_item("roundup_power2_divisions", divisions)?;
    settings.set_item("cushion", env!("CARGO_PKG_VERSION"))?;
    Ok(settings)
}
