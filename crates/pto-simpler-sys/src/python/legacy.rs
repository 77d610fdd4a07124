//! Legacy retention: keeping a domain beyond its run with a runtime that has no public call for it.
//!
//! The runtime keeps two registers of live domains, one of the whole worker and one per run, and frees at the end of
//! a run what is in the run's. Taking a domain out of the run's register, and only there, leaves it to the worker:
//! its own close frees it, or whoever holds the handle. These registers are private, so this is done only on request
//! and only after each of them was found to be what it is expected to be.

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::shared::Shared;
use crate::error::Call;

/// The worker's register of live domains, and the resources of the run being built.
const LIVE: &str = "_live_domains";
const BUILDING: &str = "_building_run_resources";

/// The hooks that this worker object lacks; none if legacy retention can work.
pub(crate) fn missing(worker: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    let mut missing = Vec::new();
    match worker.getattr(LIVE) {
        Ok(live) if live.is_instance_of::<PyDict>() => {}
        _ => missing.push(format!("Worker.{LIVE} (a dict)")),
    }
    if !worker.hasattr(BUILDING)? {
        missing.push(format!("Worker.{BUILDING}"));
    }
    Ok(missing)
}

/// Takes a domain that the run being built has allocated out of that run's register. Inside the graph callback.
pub(crate) fn detach(py: Python<'_>, shared: &Shared, name: &str, handle: &Bound<'_, PyAny>) -> PyResult<()> {
    let worker =
        shared.worker(py, Call::GetOrAllocateDomain).map_err(|e| PyRuntimeError::new_err(e.to_string()))?;
    let unexpected = |what: &str| PyRuntimeError::new_err(format!("legacy retention of domain {name:?}: {what}"));
    let resources = worker.getattr(BUILDING)?;
    if resources.is_none() {
        return Err(unexpected("no run is being built"));
    }
    let lock = resources.getattr(intern!(py, "domain_lock"))?;
    lock.call_method0(intern!(py, "__enter__"))?;
    let result = (|| {
        if resources.getattr(intern!(py, "retired"))?.is_truthy()? {
            return Err(unexpected("its run has already been cleaned up"));
        }
        let of_worker = worker.getattr(LIVE)?.get_item(name)?;
        let of_run = resources.getattr(intern!(py, "live_domains"))?;
        if !of_worker.is(handle) || !of_run.get_item(name)?.is(handle) {
            return Err(unexpected("the runtime's registers hold another domain of that name"));
        }
        of_run.del_item(name)
    })();
    let none = py.None();
    lock.call_method1(intern!(py, "__exit__"), (&none, &none, &none))?;
    result
}
