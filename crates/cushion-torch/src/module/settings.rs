//! The settings of this process: `install()` sets them all, and later calls change some of them.
//!
//! A change keeps the settings that it does not name as they are in force, whatever set them: the
//! first `install()`, PyTorch's `_set_allocator_settings`, or `cushion.inject()`. An engine can
//! return its options, but not its file for receipts or its rules for injected failures, so those
//! two are noted here.

use std::collections::HashMap;
use std::path::absolute;
use std::sync::{Mutex, MutexGuard};

use cushion::core::options::{Asked, NotOurs, Settings, torch_variable, without_key};
use cushion::core::{Injection, Policy};
use cushion::{DeviceError, devices};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::process::lock;
use crate::pytorch::{profiler, throw};

/// The settings as Python sees them.
#[pyclass(frozen, name = "Settings")]
pub(crate) struct PySettings {
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

/// Returns the settings from the arguments and from the variables of `environ`.
#[pyfunction]
#[pyo3(signature = (environ, policy=None, conf=None, log=None, receipts=None, inject=None))]
pub(crate) fn gather_settings(
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

/// Applies `settings` to every device. Returns the name of the exception for out of memory.
#[pyfunction]
pub(crate) fn start(py: Python<'_>, settings: &PySettings) -> PyResult<&'static str> {
    profiler::start();
    let applied = py.detach(|| set(&mut lock(&IN_FORCE), settings.settings.clone()));
    applied.map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(throw::out_of_memory_name())
}

/// Changes the settings that are given, and keeps the others. Returns the settings in force.
#[pyfunction]
#[pyo3(signature = (policy=None, conf=None, receipts=None, inject=None))]
pub(crate) fn change_settings(
    py: Python<'_>,
    policy: Option<String>,
    conf: Option<String>,
    receipts: Option<String>,
    inject: Option<String>,
) -> PyResult<PySettings> {
    let asked = Asked { policy, conf, log: None, receipts, inject };
    let settings = py.detach(|| change(&asked));
    let settings = settings.map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(PySettings { settings, torch_variable: None })
}

/// Applies a conf string to every device. Returns the keys that only PyTorch uses.
#[pyfunction]
pub(crate) fn configure(py: Python<'_>, conf: &str) -> PyResult<Vec<String>> {
    let not_ours: Result<Vec<NotOurs>, _> = py.detach(|| {
        let _in_force = lock(&IN_FORCE);
        devices().configure(conf)
    });
    let not_ours = not_ours.map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(not_ours.into_iter().map(|pair| pair.key).collect())
}

/// Returns the options in force as a conf string.
#[pyfunction]
pub(crate) fn conf(py: Python<'_>) -> String {
    py.detach(|| devices().options().to_conf())
}

/// Returns a conf string without its `backend`.
#[pyfunction]
pub(crate) fn without_backend(conf: &str) -> String {
    without_key(conf, "backend")
}

struct InForce {
    receipts: Option<String>,
    /// The rules that settings have set; none after `cushion.inject()`. Setting either value again
    /// leaves the rules of the engines as they are.
    inject: Option<Injection>,
}

/// Locked while settings change, so that no other change comes between reading and setting.
static IN_FORCE: Mutex<InForce> = Mutex::new(InForce { receipts: None, inject: None });

/// Locks the settings while this process forks.
pub(crate) fn hold() -> MutexGuard<'static, impl Sized> {
    lock(&IN_FORCE)
}

fn change(asked: &Asked) -> Result<Settings, DeviceError> {
    let mut in_force = lock(&IN_FORCE);
    let options = devices().options();
    // The options in force replace the environment: arguments override them in the same way.
    let before = |name: &str| match name {
        "CUSHION_CONF" => Some(options.to_conf()),
        "CUSHION_POLICY" => Some(Policy::of(&options).name().to_owned()),
        _ => None,
    };
    let mut settings = Settings::gather(asked, before)?;
    if asked.receipts.is_none() {
        settings.receipts.clone_from(&in_force.receipts);
    }
    if asked.inject.is_none() {
        settings.inject.clone_from(&in_force.inject);
    }
    let Asked { policy, conf, log: _, receipts, inject } = asked;
    // Without a change, not even the file for receipts is opened again.
    let changes = [policy, conf, receipts, inject].into_iter().any(Option::is_some);
    if changes { set(&mut in_force, settings) } else { Ok(settings) }
}

fn set(in_force: &mut InForce, mut settings: Settings) -> Result<Settings, DeviceError> {
    // The program may change its working directory. Engines that are made later write to the same
    // file.
    if let Some(path) = &mut settings.receipts
        && let Some(whole) =
            absolute(&*path).ok().and_then(|whole| whole.into_os_string().into_string().ok())
    {
        *path = whole;
    }
    devices().set(&settings)?;
    in_force.receipts.clone_from(&settings.receipts);
    in_force.inject.clone_from(&settings.inject);
    Ok(settings)
}

/// Replaces the rules for injected failures on every device. Returns the rules before.
pub(super) fn replace_injection(
    rules: Option<Injection>,
) -> Result<Option<Injection>, DeviceError> {
    let mut in_force = lock(&IN_FORCE);
    let before = devices().inject(rules)?;
    in_force.inject = None;
    Ok(before)
}
