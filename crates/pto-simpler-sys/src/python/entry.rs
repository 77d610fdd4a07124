//! Host entries: programs that a generator wrote as a directory, loaded and called the way the generator's own
//! runner does.
//!
//! The Python half is `support.py`, `lending.py` and `tensors.py`, compiled into the binding. An entry gets the runtime's
//! orchestrator behind a thin wrapper that announces each call before it reaches the device, so that the dispatch can
//! open first; a provider for its domains that asks the [`EntryHost`]; and its tensors as views over the backend's own
//! buffers, which can be sliced. All of these answer during the one call that they were made for, on its thread. No
//! torch is needed for any of it, though the generated module imports it.

use std::cell::{Cell, RefCell};
use std::ffi::CStr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::exceptions::{PyImportError, PyMemoryError, PyRuntimeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList};

use super::args::BLOB;
use super::building::{GraphBuildFailed, detached};
use super::callables::{self, Callable};
use super::memory::Mapping;
use super::orchestrator::SimplerOrchestrator;
use super::shared::Shared;
use super::{interpreter, result, room};
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
    sub_workers: u32,
}

static SUPPORT: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
static TENSOR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The Python half of the binding.
pub(crate) fn support(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    let module = SUPPORT.get_or_try_init(py, || {
        // Each imports the ones before it.
        PyModule::from_code(py, TENSORS, c"pto_simpler_tensors.py", c"pto_simpler_tensors")?;
        PyModule::from_code(py, LENDING, c"pto_simpler_lending.py", c"pto_simpler_lending")?;
        PyModule::from_code(py, SOURCE, c"pto_simpler_support.py", c"pto_simpler_support").map(Bound::unbind)
    })?;
    Ok(module.bind(py))
}

macro_rules! source {
    ($file:literal) => {
        match CStr::from_bytes_with_nul(concat!(include_str!($file), "\0").as_bytes()) {
            Ok(source) => source,
            Err(_) => c"raise ImportError('a support module contains a zero byte')",
        }
    };
}

const TENSORS: &CStr = source!("tensors.py");
const LENDING: &CStr = source!("lending.py");
const SOURCE: &CStr = source!("support.py");

/// The tensors of the binding.
fn tensors<'py>(py: Python<'py>) -> PyResult<&'py Bound<'py, PyAny>> {
    let module = TENSOR.get_or_try_init(py, || support(py)?.getattr("tensors_of").map(Bound::unbind))?;
    Ok(module.bind(py))
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
            let limits = PyDict::new(py);
            limits.set_item("tensors", capabilities.limits.tensors)?;
            limits.set_item("scalars", capabilities.limits.scalars)?;
            limits.set_item("argument_bytes", capabilities.limits.argument_bytes)?;
            limits.set_item("scope_depth", capabilities.limits.scope_depth)?;
            limits.set_item("blob", BLOB)?;
            let program = support(py)?.getattr("Program")?.call1((
                directory,
                &*capabilities.platform,
                &*capabilities.runtime,
                capabilities.chips(),
                FRAMES,
                callbacks,
                limits,
            ))?;
            Ok(Self {
                takes_domains: program.getattr("takes_domains")?.extract()?,
                wants_sdma: program.getattr("sdma")?.extract()?,
                used_callbacks: program.getattr("used_callbacks")?.extract()?,
                subs: program.getattr("subs")?.len()? as u32,
                chips: program.getattr("chips")?.len()? as u32,
                sub_workers: program.getattr("sub_workers")?.extract()?,
                program: program.unbind(),
            })
        };
        load().map_err(|e| load_error(py, name, &e))
    }

    pub(crate) const fn callables(&self) -> usize {
        (self.subs + self.chips) as usize
    }

    /// How many sub-workers the program needs.
    pub(crate) const fn sub_workers(&self) -> u32 {
        self.sub_workers
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
    token: u64,
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

/// Tells calls apart, in all of the process.
static TOKENS: AtomicU64 = AtomicU64::new(0);

struct Pop;

impl Drop for Pop {
    fn drop(&mut self) {
        ACTIVE.with_borrow_mut(Vec::pop);
    }
}

/// Runs `run` with the gate of a call that lasts as long.
fn with_call<R>(call: &ActiveCall<'_>, run: impl FnOnce(Gate) -> R) -> R {
    let token = TOKENS.fetch_add(1, Ordering::Relaxed);
    let call = std::ptr::from_ref(call).cast::<ActiveCall<'static>>();
    ACTIVE.with_borrow_mut(|active| active.push(Active { token, call }));
    let _pop = Pop;
    run(Gate { token })
}

/// What an entry reaches its host through. It opens only in the call that it was made for, on the thread of that call.
#[pyclass(frozen)]
struct Gate {
    token: u64,
}

impl Gate {
    /// The call that this gate belongs to, if this thread is inside it.
    fn call<R>(&self, use_it: impl FnOnce(&ActiveCall<'_>) -> PyResult<R>) -> PyResult<R> {
        let call = ACTIVE.with_borrow(|active| active.iter().rev().find(|a| a.token == self.token).map(|a| a.call));
        let Some(call) = call else {
            return Err(PyRuntimeError::new_err(
                "called outside the entry that it was given to, or from a thread that the entry has started",
            ));
        };
        // SAFETY: the pointer is that of a shared borrow held by the `with_call` that is still on this thread's stack:
        // it pushed the entry and pops it before it ends. Tokens are never used again, and the stack of active calls is
        // the thread's own, so a gate that outlived its call, or went to another thread, finds nothing.
        use_it(unsafe { &*call })
    }
}

#[pymethods]
impl Gate {
    /// To be called before a call that reaches the device.
    fn __call__(&self, py: Python<'_>, is_task: bool) -> PyResult<()> {
        self.call(|call| {
            // The host takes note of the first task, too.
            if !call.opened.get() || (is_task && !call.orchestrator.tasks.get()) {
                detached(py, || call.host.open(is_task)).map_err(|BuildFailed| refused(call))?;
                call.opened.set(true);
            }
            if is_task {
                call.orchestrator.tasks.set(true);
            }
            Ok(())
        })
    }

    /// Raises outside the call.
    fn check(&self) -> PyResult<()> {
        self.call(|_| Ok(()))
    }

    /// Whether domains are kept between runs.
    fn retains(&self) -> PyResult<bool> {
        self.call(|call| Ok(call.host.retains()))
    }

    /// Raises where there is no room for the windows of a domain that the entry allocates by itself.
    fn room(&self, ranks: usize, window_size: u64) -> PyResult<()> {
        self.call(|call| {
            let capabilities = &call.orchestrator.shared.capabilities;
            room::check_windows(Call::AllocateDomain, &capabilities.platform, ranks, window_size)
                .map_err(|error| PyMemoryError::new_err(error.to_string()))
        })
    }

    /// Leases a domain from the host; the runtime's handle of it.
    fn domain<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        workers: &Bound<'py, PyAny>,
        window_size: u64,
        buffers: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let request = request(workers, window_size, buffers)?;
        self.call(|call| {
            let mut reply = DomainAllocation::new();
            detached(py, || call.host.domain(name, &request, &mut reply)).map_err(|BuildFailed| refused(call))?;
            reply
                .id()
                .and_then(|id| {
                    let domains = call.orchestrator.shared.domains.lock();
                    domains.table.at(id).map(|domain| domain.handle.bind(py).clone())
                })
                .ok_or_else(|| PyRuntimeError::new_err(format!("the lease of domain {name:?} is not live")))
        })
    }

    /// Host memory that the tasks of this run can reach, until its end: the runtime's buffer, the address of our
    /// mapping, and what keeps it.
    fn buffer<'py>(&self, py: Python<'py>, nbytes: u64) -> PyResult<(Bound<'py, PyAny>, u64, Kept)> {
        self.call(|call| {
            let orchestrator = call.orchestrator;
            let shared = orchestrator.shared;
            let made = detached(py, || shared.new_host(nbytes, false));
            let id = made.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
            shared.runs.uses(orchestrator.run, |uses| uses.temporary.push(id));
            let host = shared.host.lock();
            host.at(id)
                .map(|b| (b.views.buffer().bind(py).clone(), b.mapping.address(), Kept(Arc::clone(&b.mapping))))
                .ok_or_else(|| PyRuntimeError::new_err("a buffer is gone that was made just now"))
        })
    }
}

/// Keeps memory mapped for whoever still has its address.
#[pyclass(frozen)]
struct Kept(#[allow(dead_code, reason = "held for its drop")] Arc<Mapping>);

fn refused(call: &ActiveCall<'_>) -> PyErr {
    call.refused.set(true);
    GraphBuildFailed::new_err(())
}

/// The request that an entry makes, as a plain value.
fn request(workers: &Bound<'_, PyAny>, window_bytes: u64, buffers: &Bound<'_, PyAny>) -> PyResult<DomainRequest> {
    let py = workers.py();
    let mut request = DomainRequest { workers: Vec::new(), window_bytes, buffers: Vec::new() };
    for worker in workers.try_iter()? {
        request.workers.push(ChipId(worker?.extract()?));
    }
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
        let named = PyDict::new(py);
        let mut buffers = Vec::new();
        for (position, arg) in entry_call.args.iter().enumerate() {
            let mut part = |tensor: &TensorArg| {
                if let TensorPlace::Host(id) = tensor.place {
                    buffers.push(id);
                }
                argument(py, shared, position, tensor)
            };
            let value = match &arg.value {
                EntryValue::Scalar(scalar) => scalar.into_pyobject(py).map(Bound::into_any).map_err(PyErr::from),
                EntryValue::Signed(scalar) => scalar.into_pyobject(py).map(Bound::into_any).map_err(PyErr::from),
                EntryValue::Float(scalar) => scalar.into_pyobject(py).map(Bound::into_any).map_err(PyErr::from),
                EntryValue::Bool(scalar) => {
                    scalar.into_pyobject(py).map(|b| b.to_owned().into_any()).map_err(PyErr::from)
                }
                EntryValue::Tensor(tensor) => part(tensor)?,
                EntryValue::Stacked(parts) => {
                    let list = PyList::empty(py);
                    for tensor in parts {
                        part(tensor)?
                            .and_then(|part| list.append(part))
                            .map_err(|e| shared.validated(py, Call::RunEntry, &e))?;
                    }
                    tensors(py).and_then(|module| module.call_method1(intern!(py, "Stacked"), (list,)))
                }
            };
            value
                .and_then(|value| named.set_item(&*arg.name, value))
                .map_err(|e| shared.validated(py, Call::RunEntry, &e))?;
        }
        shared.runs.uses(orchestrator.run, |uses| uses.buffers.extend(buffers));
        let config =
            shared.api.call_config(py, entry_call.config).map_err(|e| shared.validated(py, Call::RunEntry, &e))?;
        let called = with_call(&call, |gate| {
            entry.program.bind(py).call_method1(
                intern!(py, "run"),
                (orchestrator.object.bind(py), gate, config, entry_call.frame, named),
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
    let host = match tensor.place {
        TensorPlace::Host(id) => shared.host.lock().at(id).map(|b| (Arc::clone(&b.mapping), b.read_only)),
        _ => None,
    };
    let made = || -> PyResult<Bound<'py, PyAny>> {
        let shape = PyList::new(py, tensor.shape.dims())?;
        tensors(py)?.call_method1(
            intern!(py, "over"),
            (
                &view.buffer,
                shape,
                shared.api.data_type(py, tensor.dtype),
                tensor.byte_offset,
                tensor.dtype.size(),
                host.as_ref().map(|(mapping, _)| mapping.address()),
                host.as_ref().is_some_and(|(_, read_only)| !read_only),
                host.map(|(mapping, _)| Kept(mapping)),
            ),
        )
    };
    Ok(made())
}
