//! What the imported runtime offers, found out before anything is started.

use pyo3::exceptions::PyModuleNotFoundError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::options::{RetentionChoice, SimplerOptions, WorkerArgument};
use super::sys::Api;
use super::{interpreter, legacy, result};
use crate::capability::{Capabilities, CopyGranularity, Retention};
use crate::error::{BackendError, Call, RuntimeFailure};

/// The imported runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RuntimeInfo {
    /// Version of the installed distribution, where there is one.
    pub version: Option<String>,
    /// Source revision that the runtime's native part was built from, where it says so.
    pub revision: Option<String>,
    /// Where the package was found.
    pub location: String,
    /// Whether the public retention call exists.
    pub public_retention: bool,
}

pub(crate) struct Probed {
    pub(crate) api: Api,
    pub(crate) info: RuntimeInfo,
    pub(crate) capabilities: Capabilities,
}

/// Imports the runtime and looks at it. Attached.
pub(crate) fn probe(py: Python<'_>, options: &SimplerOptions) -> Result<Probed, BackendError> {
    let api = Api::load(py).map_err(|e| {
        if e.is_instance_of::<PyModuleNotFoundError>(py) {
            let error = result::import(py, Call::Start, "the Simpler runtime", &e);
            let environment = options.environment.as_ref().filter(|root| interpreter::site_of(py, root).is_none());
            return match (environment, error.runtime()) {
                (Some(root), Some(failure)) => {
                    let mut failure = failure.clone();
                    failure.message.push_str(&format!(
                        "; the virtual environment {root:?} has no site directory for this Python and was passed over"
                    ));
                    failure.into()
                }
                _ => error,
            };
        }
        let mut failure = result::failure(py, Call::Start, &e);
        failure.message = format!("this Simpler lacks a piece that the binding needs: {}", failure.message);
        failure.into()
    })?;
    let info = info(py, &api).map_err(|e| result::failure(py, Call::Start, &e))?;
    let mut capabilities = Capabilities::new(&*options.platform, &*options.runtime, options.device_ids.clone());
    capabilities.sub_workers = options.num_sub_workers;
    capabilities.copy_granularity = CopyGranularity::WholeBuffer;
    capabilities.failed_task_is_final = true;
    capabilities.entries = true;
    // Of the 64 scopes that nest, the run itself is the outermost.
    capabilities.limits.scope_depth -= 1;
    capabilities.retention = retention(py, &api, options)?;
    Ok(Probed { api, info, capabilities })
}

fn info(py: Python<'_>, api: &Api) -> PyResult<RuntimeInfo> {
    let package = py.import("simpler")?;
    let location = package
        .getattr("__file__")
        .ok()
        .filter(|file| !file.is_none())
        .map_or_else(|| "(no file)".to_owned(), |file| file.to_string());
    let version = py
        .import("importlib.metadata")?
        .call_method1("version", ("simpler",))
        .or_else(|_| package.getattr("__version__"))
        .ok()
        .map(|v| v.to_string());
    let revision = py
        .import("_task_interface")
        .and_then(|native| native.getattr("__build_commit__"))
        .ok()
        .map(|v| v.to_string())
        .filter(|v| !v.is_empty());
    Ok(RuntimeInfo { version, revision, location, public_retention: api.public_retention })
}

fn retention(py: Python<'_>, api: &Api, options: &SimplerOptions) -> Result<Retention, BackendError> {
    match options.retention {
        RetentionChoice::Public if api.public_retention => Ok(Retention::Public),
        RetentionChoice::Public => {
            Ok(Retention::Unsupported { missing: "Orchestrator.get_or_allocate_domain".into() })
        }
        RetentionChoice::Legacy => {
            // The hooks are attributes of instances; one that never starts is enough to look at.
            let missing = arguments(py, options, options.num_sub_workers)
                .and_then(|arguments| legacy::missing(&api.worker_new(py, &arguments)?))
                .map_err(|e| result::failure(py, Call::Start, &e))?;
            if missing.is_empty() {
                return Ok(Retention::PrivateHooks);
            }
            Err(RuntimeFailure::new(
                Call::Start,
                "RuntimeError",
                format!(
                    "legacy retention needs private hooks that this Simpler does not have: {}; choose public \
                     retention or another version",
                    missing.join(", ")
                ),
            )
            .into())
        }
    }
}

/// The keyword arguments of the runtime's `Worker`.
pub(crate) fn arguments<'py>(
    py: Python<'py>,
    options: &SimplerOptions,
    sub_workers: u32,
) -> PyResult<Bound<'py, PyDict>> {
    let arguments = PyDict::new(py);
    for (name, value) in &options.worker_arguments {
        match value {
            WorkerArgument::Bool(v) => arguments.set_item(name, v)?,
            WorkerArgument::Int(v) => arguments.set_item(name, v)?,
            WorkerArgument::Float(v) => arguments.set_item(name, v)?,
            WorkerArgument::Text(v) => arguments.set_item(name, v)?,
        }
    }
    arguments.set_item("level", 3)?;
    arguments.set_item("platform", &*options.platform)?;
    arguments.set_item("runtime", &*options.runtime)?;
    arguments.set_item("device_ids", options.device_ids.clone())?;
    arguments.set_item("num_sub_workers", sub_workers)?;
    if let Some(timeout) = options.startup_timeout {
        arguments.set_item("startup_timeout_s", timeout.as_secs_f64())?;
    }
    Ok(arguments)
}
