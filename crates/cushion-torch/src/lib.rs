//! Cushion as PyTorch's allocator: one library that is both the plug-in PyTorch loads and the Python
//! module `cushion._cushion`. They share their statics, so what the module configures is what the plug-in
//! does.
//!
//! - `abi.rs`: the entry points PyTorch calls; `plugin.rs`: what they do; `function.rs`: the C++ function
//!   that comes with one of them.
//! - `throw.rs`, `refusal.rs`, `message.rs`: what a refused allocation raises and says.
//! - `callbacks.rs`, `receipts.rs`, `futures.rs`: what a program has to do with shortages.
//! - `settings.rs`: what was asked for, and what is changed of it later.
//! - `gil.rs`, `threads.rs`, `fork.rs`: how all of this lives in a Python process.
//! - `recorder.rs`, `stacks.rs`, `kept.rs`, `snapshot.rs`: history, with Python stacks.
//! - `profiler.rs`: reports to `torch.profiler`. `symbols.rs`: finding what others have loaded.

#![expect(unreachable_pub, reason = "the entry points are found by their names")]

mod abi;
mod callbacks;
mod fork;
mod function;
mod futures;
mod gil;
mod kept;
mod message;
mod plugin;
mod profiler;
mod receipts;
mod recorder;
mod refusal;
mod settings;
mod snapshot;
mod stacks;
mod symbols;
mod threads;
mod throw;

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

/// Locks; what a thread that panicked held is as good as ever here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The Rust half of the package `cushion`. Its Python half keeps to these functions.
#[pymodule]
mod _cushion {
    use std::collections::HashMap;
    use std::ffi::OsString;

    use std::time::Duration;

    use cushion::core::options::{Asked, Settings, torch_variable, without_key};
    use cushion::core::{
        Action, Driver as _, Injection, Policy, PoolId, Rung, RungSet, StreamId, parse_bytes,
        set_budget, set_skipped_rungs,
    };
    use cushion::{CudaError, DeviceEngine, DeviceError, HistoryPlan, devices};
    use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
    use pyo3::prelude::*;
    use pyo3::types::{PyDict, PyList, PyString};

    #[pymodule_export]
    use super::callbacks::{
        add_callback, add_last_call, expect_refusals, is_callback_on, refuse_after_all,
        remove_callback, remove_last_call,
    };
    #[pymodule_export]
    use super::futures::Pending;
    #[pymodule_export]
    use super::receipts::{keep_receipts, observe_receipts, receipt, receipts};

    use super::recorder::{self, Level, Reading};
    use super::throw::Failure;
    use super::{abi, futures, gil, plugin, profiler, refusal, settings, snapshot, stacks, throw};

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "the name that Python packages give it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::fork::begin();
        super::receipts::begin();
        Ok(())
    }

    /// What was asked for, and what follows from it.
    #[pyclass(frozen, name = "Settings")]
    struct PySettings {
        settings: Settings,
        #[pyo3(get)]
        torch_variable: Option<(String, String)>,
    }

    #[pymethods]
    impl PySettings {
        #[getter]
        fn policy(&self) -> &'static str {
            Policy::of(&self.settings.options).name()
        }

        #[getter]
        fn conf(&self) -> String {
            self.settings.options.to_conf()
        }

        #[getter]
        fn log(&self) -> bool {
            self.settings.log
        }

        #[getter]
        fn simulate(&self) -> Option<u64> {
            self.settings.simulate
        }

        #[getter]
        fn receipts(&self) -> Option<&str> {
            self.settings.receipts.as_deref()
        }

        #[getter]
        fn inject(&self) -> Option<String> {
            self.settings.inject.as_ref().map(ToString::to_string)
        }
    }

    /// Gathers the settings of this process from arguments and from the variables of `environ`.
    #[pyfunction]
    #[pyo3(signature = (environ, policy=None, conf=None, log=None, receipts=None, inject=None))]
    fn gather_settings(
        environ: HashMap<String, String>,
        policy: Option<String>,
        conf: Option<String>,
        log: Option<bool>,
        receipts: Option<String>,
        inject: Option<String>,
    ) -> PyResult<PySettings> {
        let variable = |name: &str| environ.get(name).cloned();
        let settings = Settings::gather(&Asked { policy, conf, log, receipts, inject }, variable)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let torch_variable = torch_variable(variable)
            .map(|(name, conf)| (name.to_owned(), without_key(&conf, "backend")));
        Ok(PySettings { settings, torch_variable })
    }

    /// Makes `settings` those of every device. Returns the name of what is raised when memory runs out.
    #[pyfunction]
    fn start(py: Python<'_>, settings: &PySettings) -> PyResult<&'static str> {
        profiler::start();
        let set = py.detach(|| settings::start(&settings.settings));
        set.map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(throw::out_of_memory_name())
    }

    /// Changes what is given of the settings in force, and leaves the rest. Returns the settings in force.
    #[pyfunction]
    #[pyo3(signature = (policy=None, conf=None, receipts=None, inject=None))]
    fn change_settings(
        py: Python<'_>,
        policy: Option<String>,
        conf: Option<String>,
        receipts: Option<String>,
        inject: Option<String>,
    ) -> PyResult<PySettings> {
        let asked = Asked { policy, conf, log: None, receipts, inject };
        let settings = py.detach(|| settings::change(&asked));
        let settings = settings.map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(PySettings { settings, torch_variable: None })
    }

    /// Devices are simulated from now on, each of `size`, such as `16GiB`.
    #[pyfunction]
    fn simulate(py: Python<'_>, size: &str) -> PyResult<()> {
        let capacity = parse_bytes(size).map_err(PyValueError::new_err)?;
        let simulated = py.detach(|| devices().simulate(capacity));
        simulated.map_err(|error| PyRuntimeError::new_err(format!("Cushion: {error}")))
    }

    /// Whether devices are simulated.
    #[pyfunction]
    fn is_simulated(py: Python<'_>) -> bool {
        py.detach(|| devices().are_simulated())
    }

    /// Python is shutting down: nothing calls into it from now on.
    #[pyfunction]
    fn stop(py: Python<'_>) {
        py.detach(gil::stop);
    }

    /// The addresses of the plug-in's functions, by the names of PyTorch's setters.
    #[pyfunction]
    fn hooks() -> HashMap<&'static str, usize> {
        abi::hooks().into_iter().map(|(name, hook)| (name, hook.expose_provenance())).collect()
    }

    /// Applies a conf string to every device; returns the keys that are PyTorch's alone.
    #[pyfunction]
    fn configure(py: Python<'_>, conf: &str) -> PyResult<Vec<String>> {
        let not_ours = py.detach(|| settings::configure(conf));
        let not_ours = not_ours.map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(not_ours.into_iter().map(|pair| pair.key).collect())
    }

    /// The options in force as a conf string.
    #[pyfunction]
    fn conf(py: Python<'_>) -> String {
        py.detach(|| devices().options().to_conf())
    }

    /// A conf string without its `backend`.
    #[pyfunction]
    fn without_backend(conf: &str) -> String {
        without_key(conf, "backend")
    }

    /// Memory that is no tensor's: the address of `bytes` bytes, for work on `stream`.
    #[pyfunction]
    #[pyo3(signature = (bytes, device=0, stream=0))]
    fn allocate(py: Python<'_>, bytes: u64, device: i64, stream: u64) -> PyResult<u64> {
        let noted = recorder::note(Level::State);
        let served = py.detach(|| {
            usable(device)?;
            Ok::<_, PyErr>(plugin::alloc_for(bytes, device, StreamId(stream), &noted))
        })?;
        let served = served.map_err(|failure| raised(py, failure));
        super::callbacks::pass_on_interrupt();
        served
    }

    /// Prepares memory: afterwards a request of `bytes` bytes on `stream` needs nothing from the driver.
    #[pyfunction]
    #[pyo3(signature = (bytes, device=0, stream=0))]
    fn prefetch(py: Python<'_>, bytes: u64, device: i64, stream: u64) -> PyResult<()> {
        let prepared = py.detach(|| {
            let engine = usable(device)?;
            let prepared = engine.prefetch(bytes, StreamId(stream));
            Ok::<_, PyErr>(prepared.map_err(|error| refusal::refused(device, &error)))
        })?;
        let prepared = prepared.map_err(|failure| raised(py, failure));
        super::callbacks::pass_on_interrupt();
        prepared
    }

    /// As `allocate`, and no thread waits: calls `done(address, None, False)` when it is served, and
    /// `done(None, why, is_out_of_memory)` when it is refused, on another thread.
    #[pyfunction]
    #[pyo3(signature = (bytes, done, device=0, stream=0))]
    fn allocate_later(
        py: Python<'_>,
        bytes: u64,
        done: Py<PyAny>,
        device: i64,
        stream: u64,
    ) -> PyResult<Pending> {
        let noted = recorder::note(Level::State);
        py.detach(|| {
            let request = usable(device)?.alloc_async_for(bytes, StreamId(stream), noted.tag());
            Ok::<_, PyErr>(futures::start(device, (request, noted), done))
        })?
        .map_err(|failure| raised(py, failure))
    }

    /// Bytes of a size such as `8GiB`.
    #[pyfunction(name = "parse_bytes")]
    fn bytes_of(size: &str) -> PyResult<u64> {
        parse_bytes(size).map_err(PyValueError::new_err)
    }

    /// Sets how long each request of this thread may wait, and which rungs it leaves out beside those of the options.
    #[pyfunction]
    fn set_wishes(budget_ms: Option<f64>, skip: Vec<String>) -> PyResult<()> {
        let budget = match budget_ms.map(|ms| Duration::try_from_secs_f64(ms / 1e3)) {
            None => None,
            Some(Ok(budget)) => Some(budget),
            Some(Err(_)) => {
                let text = "a budget is a number of milliseconds, 0 or more";
                return Err(PyValueError::new_err(text));
            }
        };
        let rung = |name: &String| {
            Rung::named(name).filter(|rung| rung.can_be_skipped()).ok_or_else(|| {
                let names: Vec<_> = Rung::ALL.iter().filter(|rung| rung.can_be_skipped()).collect();
                let names: Vec<_> = names.into_iter().map(ToString::to_string).collect();
                let names = names.join(", ");
                PyValueError::new_err(format!(
                    "there is no rung `{name}` to leave out: there are {names}"
                ))
            })
        };
        let skip = skip.iter().map(rung).collect::<PyResult<RungSet>>()?;
        set_budget(budget);
        set_skipped_rungs(skip);
        Ok(())
    }

    /// Allocations are made to fail by these rules from now on, on every device; none end it. Returns those before.
    #[pyfunction]
    #[pyo3(signature = (rules=None))]
    fn inject(py: Python<'_>, rules: Option<&str>) -> PyResult<Option<String>> {
        let parsed = rules.map(str::parse::<Injection>).transpose();
        let parsed = parsed.map_err(|error| PyValueError::new_err(error.to_string()))?;
        let before = py.detach(|| settings::inject(parsed));
        let before = before.map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(before.map(|injection| injection.to_string()))
    }

    /// A failure as Python raises it.
    fn raised(py: Python<'_>, failure: Failure) -> PyErr {
        match failure {
            Failure::OutOfMemory(text) => out_of_memory(py, text),
            Failure::Other(text) => PyRuntimeError::new_err(text),
        }
    }

    /// Gives back what `allocate` gave, on whichever device.
    #[pyfunction]
    fn deallocate(py: Python<'_>, address: u64) -> PyResult<()> {
        let noted = recorder::note(Level::All);
        let freed = py.detach(|| plugin::free_for(address, &noted));
        freed.map_err(|error| PyValueError::new_err(format!("Cushion: {error}")))
    }

    /// The device whose memory an address lies in, live or cached; none if it is not Cushion's.
    #[pyfunction]
    fn device_of(py: Python<'_>, address: u64) -> Option<usize> {
        let holder = || devices().made().find(|(_, engine)| engine.holds(address));
        py.detach(|| holder().map(|(device, _)| device))
    }

    /// The stream that a live allocation is for; none if it is not Cushion's.
    #[pyfunction]
    fn stream_of(py: Python<'_>, address: u64) -> Option<u64> {
        let found = || devices().made().find_map(|(_, engine)| engine.stream_of(address));
        py.detach(|| found().map(|stream| stream.0))
    }

    /// A stream that is never destroyed.
    #[pyfunction]
    fn add_lasting_stream(py: Python<'_>, stream: u64) {
        py.detach(|| devices().add_lasting_stream(StreamId(stream)));
    }

    /// How long each request of this thread may wait, in milliseconds, and which rungs it leaves out.
    #[pyfunction]
    fn wishes() -> (Option<f64>, Vec<&'static str>) {
        let budget = cushion::core::budget().map(|budget| budget.as_secs_f64() * 1e3);
        (budget, cushion::core::skipped_rungs().iter().map(Rung::name).collect())
    }

    /// What nobody holds of a device, other processes included, and its size.
    #[pyfunction]
    #[pyo3(signature = (device=0))]
    fn memory_info(py: Python<'_>, device: i64) -> PyResult<(u64, u64)> {
        let info = py.detach(|| Ok::<_, PyErr>(usable(device)?.driver().memory_info()))?;
        let info = info.map_err(|error| PyRuntimeError::new_err(format!("Cushion: {error}")))?;
        Ok((info.free, info.total))
    }

    /// The devices that have an engine, in order.
    #[pyfunction]
    fn devices_in_use() -> Vec<usize> {
        devices().made().map(|(device, _)| device).collect()
    }

    /// As PyTorch raises it, where PyTorch is loaded.
    fn out_of_memory(py: Python<'_>, text: String) -> PyErr {
        // Looked up, not called: code that runs now could be interrupted, and take this error's place.
        let class = || {
            let modules = py.import("sys")?.getattr("modules")?;
            let torch = modules.get_item("torch");
            // Up to 2.4 PyTorch has only the second of these names. Another thread may be importing it.
            let of_torch = torch.and_then(|torch| {
                let name = "OutOfMemoryError";
                torch.getattr(name).or_else(|_| torch.getattr("cuda")?.getattr(name))
            });
            of_torch.or_else(|_| modules.get_item("cushion._receipts")?.getattr("OutOfMemoryError"))
        };
        match class().and_then(|class| class.call1((&text,))) {
            Ok(error) => PyErr::from_value(error),
            Err(_) => PyMemoryError::new_err(text),
        }
    }

    /// The engine of a device, made if need be.
    fn usable(device: i64) -> PyResult<&'static DeviceEngine> {
        devices().get_or_make(device).map_err(|error| {
            let text = format!("Cushion cannot use GPU {device}: {error}");
            match error {
                DeviceError::OutOfRange(_) | DeviceError::Cuda(CudaError::NoSuchDevice { .. }) => {
                    PyValueError::new_err(text)
                }
                _ => PyRuntimeError::new_err(text),
            }
        })
    }

    /// The figures of a device, nested as PyTorch's are.
    #[pyfunction]
    #[pyo3(signature = (device, by_private_pools=false))]
    fn memory_stats(
        py: Python<'_>,
        device: i64,
        by_private_pools: bool,
    ) -> PyResult<Bound<'_, PyDict>> {
        let stats = engine(device)?.map(DeviceEngine::stats).unwrap_or_default();
        let nested = nest(py, stats.flat())?;
        if by_private_pools {
            let pools = PyDict::new(py);
            for (pool, reserved) in &stats.reserved_bytes_by_private_pools {
                pools.set_item((pool.0, pool.1), nest(py, reserved.flat())?)?;
            }
            nested.set_item("reserved_bytes_by_private_pools", pools)?;
        }
        Ok(nested)
    }

    /// Turns keys with dots into dicts in dicts.
    fn nest(py: Python<'_>, flat: Vec<(String, i64)>) -> PyResult<Bound<'_, PyDict>> {
        let nested = PyDict::new(py);
        for (key, value) in flat {
            let mut dict = nested.clone();
            let mut parts = key.split('.').peekable();
            while let Some(part) = parts.next() {
                if parts.peek().is_none() {
                    dict.set_item(part, value)?;
                    break;
                }
                dict = match dict.get_item(part)? {
                    Some(inner) => inner.cast_into::<PyDict>()?,
                    None => {
                        let inner = PyDict::new(py);
                        dict.set_item(part, &inner)?;
                        inner
                    }
                };
            }
        }
        Ok(nested)
    }

    /// Cushion's own figures of a device, beside those of `torch.cuda.memory_stats()`.
    #[pyfunction]
    #[pyo3(signature = (device=0))]
    fn stats(py: Python<'_>, device: i64) -> PyResult<Bound<'_, PyDict>> {
        let stats = engine(device)?.map(DeviceEngine::stats).unwrap_or_default();
        let result = PyDict::new(py);
        result.set_item("hits", stats.hits)?;
        result.set_item("misses", stats.misses)?;
        result.set_item("cached_bytes", stats.cached_bytes())?;
        result.set_item("largest_free_block", stats.largest_free_block())?;
        result.set_item("blocks", stats.blocks())?;
        result.set_item("free_blocks", stats.free_blocks())?;
        result.set_item("shortages", stats.shortages)?;
        result.set_item("shortages_survived", stats.shortages_survived)?;
        result.set_item("shortages_refused", stats.shortages_refused)?;
        result.set_item(
            "shortage_seconds",
            Duration::from_nanos(stats.shortage_nanos).as_secs_f64(),
        )?;
        result.set_item("spilled_bytes", stats.spilled_bytes.current)?;
        result.set_item("spilled_bytes_peak", stats.spilled_bytes.peak)?;
        let engine = devices().get(device);
        result.set_item("waiting", engine.map_or(0, DeviceEngine::waiting))?;
        result
            .set_item("receipts_lost", engine.map_or(0, |it| cushion::lost_receipts(it).count))?;
        Ok(result)
    }

    /// Peaks start again from now.
    #[pyfunction]
    fn reset_peak_memory_stats(py: Python<'_>, device: i64) -> PyResult<()> {
        let engine = engine(device)?;
        py.detach(|| engine.map(DeviceEngine::reset_peak_stats));
        Ok(())
    }

    /// Totals start again from zero.
    #[pyfunction]
    fn reset_accumulated_memory_stats(py: Python<'_>, device: i64) -> PyResult<()> {
        let engine = engine(device)?;
        py.detach(|| engine.map(DeviceEngine::reset_accumulated_stats));
        Ok(())
    }

    /// The fraction of a device that this process may hold.
    #[pyfunction]
    fn memory_fraction(py: Python<'_>, device: i64) -> PyResult<f64> {
        let engine = engine(device)?;
        Ok(py.detach(|| match engine {
            Some(engine) => engine.memory_fraction(),
            None => devices().options().per_process_memory_fraction,
        }))
    }

    /// Gives back what is cached, on every device.
    #[pyfunction]
    fn empty_cache(py: Python<'_>) -> PyResult<()> {
        let emptied = py.detach(plugin::empty_cache);
        // Memory of the host is memory, too.
        recorder::sweep(py);
        emptied.map_err(|failure| {
            let (Failure::OutOfMemory(text) | Failure::Other(text)) = failure;
            PyRuntimeError::new_err(text)
        })
    }

    /// All segments and blocks, and the events kept, as PyTorch's `_cuda_memorySnapshot` returns them.
    #[pyfunction]
    #[pyo3(signature = (pool=None, include_traces=true))]
    fn memory_snapshot(
        py: Python<'_>,
        pool: Option<(u64, u64)>,
        include_traces: bool,
    ) -> PyResult<Bound<'_, PyDict>> {
        let pool = pool.map(|(first, second)| PoolId(first, second));
        snapshot::snapshot(py, pool.filter(|pool| *pool != PoolId::DEFAULT), include_traces)
    }

    /// Keeps the last `max_entries` events from now on, with Python stacks as `context` says.
    #[pyfunction]
    #[pyo3(signature = (enabled, context, max_entries, clear_history, skip_actions))]
    fn record_memory_history(
        py: Python<'_>,
        enabled: Option<&str>,
        context: Option<&str>,
        max_entries: usize,
        clear_history: bool,
        skip_actions: Vec<String>,
    ) -> PyResult<()> {
        let entries = match enabled {
            None => 0,
            // What is live is known anyway; PyTorch keeps one event then.
            Some("state") => 1,
            Some("all") => max_entries.max(1),
            Some(other) => {
                let text = format!("enabled is '{other}', expected None, 'state' or 'all'");
                return Err(PyRuntimeError::new_err(text));
            }
        };
        let level = Level::named(context).ok_or_else(|| {
            let context = context.unwrap_or_default();
            let text = format!("context is '{context}', expected None, 'state', 'alloc' or 'all'");
            PyRuntimeError::new_err(text)
        })?;
        let is_skipped = |action: &Action| skip_actions.iter().any(|name| name == action.name());
        let skip = Action::ALL.into_iter().filter(is_skipped).collect();
        py.detach(|| devices().record_history(&HistoryPlan { entries, skip }, clear_history));
        recorder::set_level(if entries > 0 { level } else { Level::Never });
        // What was recorded so far may be needed no longer, and with less recorded nothing else would find out.
        recorder::sweep(py);
        Ok(())
    }

    /// The Python stack at which a live allocation was made.
    #[pyfunction]
    fn allocation_traceback(py: Python<'_>, address: u64) -> PyResult<Option<Bound<'_, PyList>>> {
        let _reading = Reading::begin();
        let tag = py.detach(|| devices().made().find_map(|(_, e)| e.tag_of(address)));
        let stack = tag.and_then(recorder::stack_of);
        stack.map(|stack| stacks::show(py, stack)).transpose()
    }

    /// Notes `metadata` beside every allocation from now on.
    #[pyfunction]
    fn set_metadata(py: Python<'_>, metadata: &str) {
        recorder::set_metadata(py, metadata);
    }

    /// What is noted beside every allocation now.
    #[pyfunction]
    fn metadata() -> String {
        recorder::metadata()
    }

    /// How many stacks and texts are kept, because something refers to them or nobody has looked yet.
    #[pyfunction]
    fn kept_notes() -> (usize, usize) {
        recorder::kept()
    }

    /// Calls `observer(device, bytes, limit, free)` whenever an allocation is refused.
    #[pyfunction]
    fn observe_refusals(observer: Py<PyAny>) {
        refusal::observe(observer);
    }

    /// Checks the engine of a device against itself; raises if something is wrong.
    #[pyfunction]
    fn check_invariants(py: Python<'_>, device: i64) -> PyResult<()> {
        let engine = engine(device)?;
        let checked = py.detach(|| engine.map_or(Ok(()), DeviceEngine::check_invariants));
        checked.map_err(|violation| PyRuntimeError::new_err(format!("Cushion: {violation}")))
    }

    /// Runs the command line `args`, program name first; returns the exit code.
    #[pyfunction]
    fn command(py: Python<'_>, args: Vec<Bound<'_, PyString>>) -> PyResult<u8> {
        let args: Vec<OsString> = args.iter().map(|arg| arg.extract()).collect::<PyResult<_>>()?;
        Ok(py.detach(|| cushion_cli::run(args)))
    }

    fn engine(device: i64) -> PyResult<Option<&'static DeviceEngine>> {
        // Before PyTorch has counted its devices, any could be there.
        let known = Some(plugin::device_count()).filter(|&count| count > 0);
        let count = known.unwrap_or(cushion::MAX_DEVICES);
        if usize::try_from(device).is_ok_and(|device| device < count) {
            return Ok(devices().get(device));
        }
        Err(PyRuntimeError::new_err(format!("no device {device}: there are {count}")))
    }
}
