//! How the requests of a thread behave in a shortage: their budget, the rungs that they skip,
//! injected failures, and the observers of refusals.

use std::time::Duration;

use cushion::core::{Injection, Rung, RungSet, set_budget, set_skipped_rungs};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::module::settings;
use crate::shortage::refusal;

/// Sets how long each request of this thread may wait, and which rungs it skips in addition to
/// those of the options.
#[pyfunction]
pub(crate) fn set_wishes(budget_ms: Option<f64>, skip: Vec<String>) -> PyResult<()> {
    let budget = match budget_ms.map(|ms| Duration::try_from_secs_f64(ms / 1e3)) {
        None => None,
        Some(Ok(budget)) => Some(budget),
        Some(Err(_)) => {
            let text = "a budget is a number of milliseconds, 0 or more";
            return Err(PyValueError::new_err(text));
        }
    };
    let skip = skip.iter().map(|name| rung(name)).collect::<PyResult<RungSet>>()?;
    set_budget(budget);
    set_skipped_rungs(skip);
    Ok(())
}

/// Returns the rung with this name, if it can be skipped.
fn rung(name: &str) -> PyResult<Rung> {
    Rung::named(name).filter(|rung| rung.can_be_skipped()).ok_or_else(|| {
        let names: Vec<_> = Rung::ALL.iter().filter(|rung| rung.can_be_skipped()).collect();
        let names: Vec<_> = names.into_iter().map(ToString::to_string).collect();
        let names = names.join(", ");
        PyValueError::new_err(format!("there is no rung `{name}` to skip: the rungs are {names}"))
    })
}

/// Returns how long each request of this thread may wait, in milliseconds, and which rungs it
/// skips.
#[pyfunction]
pub(crate) fn wishes() -> (Option<f64>, Vec<&'static str>) {
    let budget = cushion::core::budget().map(|budget| budget.as_secs_f64() * 1e3);
    (budget, cushion::core::skipped_rungs().iter().map(Rung::name).collect())
}

/// Makes allocations fail by these rules, on every device; `None` ends that. Returns the rules
/// before.
#[pyfunction]
#[pyo3(signature = (rules=None))]
pub(crate) fn inject(py: Python<'_>, rules: Option<&str>) -> PyResult<Option<String>> {
    let parsed = rules.map(str::parse::<Injection>).transpose();
    let parsed = parsed.map_err(|error| PyValueError::new_err(error.to_string()))?;
    let before = py.detach(|| settings::replace_injection(parsed));
    let before = before.map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(before.map(|injection| injection.to_string()))
}

/// Calls `observer(device, bytes, limit, free)` whenever an allocation is refused.
#[pyfunction]
pub(crate) fn observe_refusals(observer: Py<PyAny>) {
    refusal::observe(observer);
}
