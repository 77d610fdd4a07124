//! Host entries: programs that a generator wrote as a directory, loaded and called the way the generator's own
//! runner does.
//!
//! The Python half is `support.py`, compiled into the binding. An entry gets the runtime's orchestrator behind a thin
//! wrapper that announces each call before it reaches the device, so that the dispatch can open first; a provider for
//! its domains that asks the [`EntryHost`]; and its tensors as views over the backend's own buffers, which can be
//! sliced. No torch is needed for any of it, though the generated module imports it.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::Arc;

use pyo3::exceptions::{PyImportError, PyRuntimeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList};

use super::building::{GraphBuildFailed, detached};
use super::callables::{self, Callable};
use super::orchestrator::SimplerOrchestrator;
use super::shared::Shared;
use super::{interpreter, result};
use crate::allocation::DomainAllocation;
use crate::args::{TensorArg, TensorPlace};
use crate::backend::FRAMES;
use crate::error::{BackendError, BuildFailed, Call, CallbackError, Effect};
use crate::ids::{CallableId, ChipId};
use crate::orchestrator::{EntryCall, EntryHost, EntryValue};
use crate::request::{DomainRequest, NamedBuffer};

/// A loaded program.
#[derive(Debug)]
pub(crate) struct Entry {
    program: Py<PyAny>,
    /// Whether it takes its domains from a provider.
    pub(crate) takes_domains: bool,
    pub(crate) wants_sdma: bool,
    pub(crate) used_callbacks: Vec<String>,
    subs: u32,
    chips: u32,
}

static SUPPORT: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
static TENSOR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The Python half of the binding.
pub(crate) fn support(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    let module = SUPPORT.get_or_try_init(py, || {
        PyModule::from_code(py, SOURCE, c"pto_simpler_support.py", c"pto_simpler_support").map(Bound::unbind)
    })?;
    Ok(module.bind(py))
}

const SOURCE: &std::ffi::CStr =
    match std::ffi::CStr::from_bytes_with_nul(concat!(include_str!("support.py"), "\0").as_bytes()) {
        Ok(source) => source,
        Err(_) => c"raise ImportError('the support module contains a zero byte')",
    };

fn tensor_class(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    let class = TENSOR.get_or_try_init(py, || support(py)?.call_method0("tensor_class").map(Bound::unbind))?;
    Ok(class.bind(py))
}

impl Entry {
    /// Loads the program in `directory`, its sub-workers and chip callables, and makes its intermediates, one set per
    /// dispatch frame. Attached; before the start, since the chip processes must inherit the intermediates.
    pub(crate) fn load(
        py: Python<'_>,
        shared: &Shared,
        name: &str,
        directory: &Path,
    ) -> Result<Self, BackendError> {
        let callbacks = PyDict::new(py);
        for (name, source) in &shared.options.callbacks {
            let function = callables::object(py, name, source)?;
            callbacks.set_item(&**name, function).map_err(|e| result::failure(py, Call::Register, &e))?;
        }
        let capabilities = &shared.capabilities;
        let load = || -> PyResult<Self> {
            let program = support(py)?.getattr("Program")?.call1((
                directory,
                &*capabilities.platform,
                &*capabilities.runtime,
                capabilities.chips(),
                FRAMES,
                callbacks,
            ))?;
            Ok(Self {
                takes_domains: program.getattr("takes_domains")?.extract()?,
                wants_sdma: program.getattr("sdma")?.extract()?,
                used_callbacks: program.getattr("used_callbacks")?.extract()?,
                subs: program.getattr("subs")?.len()? as u32,
                chips: program.getattr("chips")?.len()? as u32,
                program: program.unbind(),
            })
        };
        load().map_err(|e| load_error(py, name, &e))
    }

    pub(crate) const fn callables(&self) -> usize {
        (self.subs + self.chips) as usize
    }

    pub(crate) const fn sub_workers(&self) -> u32 {
        self.subs
    }

    /// Registers the program's callables with the worker that is about to start.
    pub(crate) fn register(&self, py: Python<'_>, worker: &Bound<'_, PyAny>) -> PyResult<()> {
        self.program.bind(py).call_method1(intern!(py, "register"), (worker,)).map(drop)
    }
}

/// A program that cannot be used is the caller's to replace; a missing package, a compiler's complaint or an error of
/// the program's own code is not.
fn load_error(py: Python<'_>, name: &str, error: &PyErr) -> BackendError {
    let call = Call::Register;
    let mut failure = result::failure(py, call, error);
    failure.message = format!("program {name:?}: {}", failure.message);
    if error.is_instance_of::<PyImportError>(py) {
        failure.message = format!("{}; searched by {}", failure.message, interpreter::searched(py));
        return failure.into();
    }
    // What the program's own code raises keeps its traceback.
    let refused = error.get_type(py).hasattr(intern!(py, "_pto_refused")).unwrap_or(false);
    if refused { BackendError::misuse(call, failure.message) } else { failure.into() }
}

/// An entry that is being called on this thread.
struct Active {
    /// The borrowed call, its lifetimes erased.
    call: *const ActiveCall<'static>,
}

struct ActiveCall<'a> {
    orchestrator: &'a SimplerOrchestrator<'a>,
    host: &'a dyn EntryHost,
    /// Whether the host has refused something: the entry must not succeed any more.
    refused: Cell<bool>,
    /// Whether the entry has announced a call that reaches the device.
    opened: Cell<bool>,
}

thread_local! {
    static ACTIVE: RefCell<Vec<Active>> = const { RefCell::new(Vec::new()) };
}

struct Pop;

impl Drop for Pop {
    fn drop(&mut self) {
        ACTIVE.with_borrow_mut(Vec::pop);
    }
}

fn with_call<R>(call: &ActiveCall<'_>, run: impl FnOnce() -> R) -> R {
    let call = std::ptr::from_ref(call).cast::<ActiveCall<'static>>();
    ACTIVE.with_borrow_mut(|active| active.push(Active { call }));
    let _pop = Pop;
    run()
}

/// The innermost entry of this thread. `None` where the provider or the gate outlived its call.
fn active<R>(use_it: impl FnOnce(&ActiveCall<'_>) -> R) -> Option<R> {
    let call = ACTIVE.with_borrow(|active| active.last().map(|a| a.call))?;
    // SAFETY: the pointer is that of a shared borrow held by the `with_call` that is still on this thread's stack:
    // it pushed the entry and pops it before it ends. The callable objects that lead here cannot be called from
    // another thread to any effect, because the stack of active calls is the thread's own.
    Some(use_it(unsafe { &*call }))
}

fn outside() -> PyErr {
    PyRuntimeError::new_err("called outside the entry that it was given to")
}

/// `before(is_task)`: called by the orchestrator that the entry sees, before a call that reaches the device.
#[pyclass(frozen)]
struct Gate;

#[pymethods]
impl Gate {
    fn __call__(&self, py: Python<'_>, is_task: bool) -> PyResult<()> {
        active(|call| {
            if !call.opened.get() {
                detached(py, || call.host.open()).map_err(|BuildFailed| {
                    call.refused.set(true);
                    GraphBuildFailed::new_err(())
                })?;
                call.opened.set(true);
            }
            if is_task {
                call.orchestrator.tasks.set(true);
            }
            Ok(())
        })
        .unwrap_or_else(|| Err(outside()))
    }
}

/// `provider(name=, workers=, window_size=, buffers=)`: leases a domain from the host.
#[pyclass(frozen)]
struct Provider;

#[pymethods]
impl Provider {
    #[pyo3(signature = (*, name, workers, window_size, buffers = None))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        workers: &Bound<'py, PyAny>,
        window_size: u64,
        buffers: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let request = request(workers, window_size, buffers)?;
        active(|call| {
            let mut reply = DomainAllocation::new();
            detached(py, || call.host.domain(name, &request, &mut reply)).map_err(|BuildFailed| {
                call.refused.set(true);
                GraphBuildFailed::new_err(())
            })?;
            let handle = reply.id().and_then(|id| {
                call.orchestrator.shared.domains.lock().table.at(id).map(|domain| domain.handle.clone_ref(py))
            });
            let handle = handle
                .ok_or_else(|| PyRuntimeError::new_err(format!("the lease of domain {name:?} is not live")))?;
            support(py)?.getattr(intern!(py, "Lease"))?.call1((handle,))
        })
        .unwrap_or_else(|| Err(outside()))
    }
}

/// The request that an entry makes, as a plain value.
fn request(
    workers: &Bound<'_, PyAny>,
    window_bytes: u64,
    buffers: Option<&Bound<'_, PyAny>>,
) -> PyResult<DomainRequest> {
    let py = workers.py();
    let mut request = DomainRequest { workers: Vec::new(), window_bytes, buffers: Vec::new() };
    for worker in workers.try_iter()? {
        request.workers.push(ChipId(worker?.extract()?));
    }
    if let Some(buffers) = buffers {
        for buffer in buffers.try_iter()? {
            let buffer = buffer?;
            let name: String = buffer.getattr(intern!(py, "name"))?.extract()?;
            let dtype: String = buffer.getattr(intern!(py, "dtype"))?.str()?.extract()?;
            request.buffers.push(NamedBuffer {
                name: name.into(),
                dtype: dtype.into(),
                count: buffer.getattr(intern!(py, "count"))?.extract()?,
                nbytes: buffer.getattr(intern!(py, "nbytes"))?.extract()?,
            });
        }
    }
    Ok(request)
}

/// Calls an entry, inside the graph build of `orchestrator`.
pub(crate) fn run(
    orchestrator: &SimplerOrchestrator<'_>,
    callable: &Arc<Callable>,
    id: CallableId,
    entry_call: &EntryCall<'_>,
    host: &dyn EntryHost,
) -> Result<(), CallbackError> {
    let shared = orchestrator.shared;
    let Some(entry) = &callable.entry else {
        return Err(BackendError::broken(Call::RunEntry, format!("{id} is an entry that was not loaded")).into());
    };
    if entry_call.frame as usize >= FRAMES {
        let message = format!("frame {} asked for; frames are 0..{FRAMES}", entry_call.frame);
        return Err(BackendError::misuse(Call::RunEntry, message).into());
    }
    entry_call.config.check(Call::RunEntry)?;
    let call = ActiveCall { orchestrator, host, refused: Cell::new(false), opened: Cell::new(false) };
    let outcome = Python::attach(|py| {
        let tensors = PyDict::new(py);
        let mut buffers = Vec::new();
        for (position, arg) in entry_call.args.iter().enumerate() {
            let value = match &arg.value {
                EntryValue::Scalar(scalar) => scalar.into_pyobject(py).map(Bound::into_any).map_err(PyErr::from),
                EntryValue::Tensor(tensor) => {
                    if let TensorPlace::Host(id) = tensor.place {
                        buffers.push(id);
                    }
                    argument(py, shared, position, tensor)?
                }
            };
            value
                .and_then(|value| tensors.set_item(&*arg.name, value))
                .map_err(|e| shared.validated(py, Call::RunEntry, &e))?;
        }
        shared.runs.uses(orchestrator.run, |uses| uses.buffers.extend(buffers));
        let config =
            shared.api.call_config(py, entry_call.config).map_err(|e| shared.validated(py, Call::RunEntry, &e))?;
        let called = with_call(&call, || {
            entry.program.bind(py).call_method1(
                intern!(py, "run"),
                (orchestrator.object.bind(py), Gate, config, entry_call.frame, tensors, Provider),
            )
        });
        match called {
            Ok(keep) => {
                shared.runs.uses(orchestrator.run, |uses| uses.keep.push(keep.unbind()));
                Ok(())
            }
            Err(error) => {
                let effect = if call.opened.get() { Effect::Unknown } else { Effect::None };
                Err(shared.failure(py, Call::RunEntry, &error, effect))
            }
        }
    });
    // A refusal counts whatever the entry made of it.
    if call.refused.get() {
        return Err(BuildFailed.into());
    }
    Ok(outcome?)
}

/// An argument tensor as generated code expects it: the runtime's own, and it can be sliced.
#[allow(clippy::type_complexity, reason = "an error of either kind, told apart by the caller")]
fn argument<'py>(
    py: Python<'py>,
    shared: &Shared,
    position: usize,
    tensor: &TensorArg,
) -> Result<PyResult<Bound<'py, PyAny>>, BackendError> {
    let view = shared.argument_view(py, Call::RunEntry, position, tensor)?;
    let address = match tensor.place {
        TensorPlace::Host(id) => shared.host.lock().at(id).map(|buffer| buffer.mapping.address()),
        _ => None,
    };
    let made = || -> PyResult<Bound<'py, PyAny>> {
        let shape = PyList::new(py, tensor.shape.dims())?;
        tensor_class(py)?.call_method1(
            intern!(py, "over"),
            (
                &view.buffer,
                shape,
                shared.api.data_type(py, tensor.dtype),
                tensor.byte_offset,
                tensor.dtype.size(),
                address,
            ),
        )
    };
    Ok(made())
}
