//! Which graph builds this thread is inside, and how a builder that borrows reaches Simpler's callback.
//!
//! Simpler calls the graph callback synchronously, on the thread that submits. A Python callable must own what it
//! uses, and a builder is borrowed, so the callable owns nothing: it looks for the innermost build of its thread.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

pyo3::create_exception!(
    pto,
    GraphBuildFailed,
    pyo3::exceptions::PyException,
    "Raised through the runtime when a graph builder fails; carries nothing."
);

/// What the callback runs: attached, with the orchestrator and the call configuration.
pub(crate) type Job<'a> =
    dyn for<'py> FnMut(Python<'py>, &Bound<'py, PyAny>, &Bound<'py, PyAny>) -> PyResult<()> + 'a;

struct Active {
    backend: usize,
    tasks: Rc<Cell<bool>>,
    /// The borrowed job, its lifetime erased; gone once it has been called.
    job: Option<*mut Job<'static>>,
}

thread_local! {
    static ACTIVE: RefCell<Vec<Active>> = const { RefCell::new(Vec::new()) };
}

/// Whether this thread is building a graph for `backend`, and if so whether a task was submitted already.
pub(crate) fn inside(backend: usize) -> Option<bool> {
    ACTIVE.with_borrow(|active| active.iter().rev().find(|a| a.backend == backend).map(|a| a.tasks.get()))
}

struct Pop;

impl Drop for Pop {
    fn drop(&mut self) {
        ACTIVE.with_borrow_mut(Vec::pop);
    }
}

/// Runs `submit`, in which the runtime calls [`GraphCallback`], with `job` as the innermost build of this thread.
pub(crate) fn with_job<R>(
    backend: usize,
    tasks: Rc<Cell<bool>>,
    job: &mut Job<'_>,
    submit: impl FnOnce() -> R,
) -> R {
    // SAFETY: only the lifetime changes. The pointer is reachable through this thread's stack alone, used at most
    // once (`take` below), and removed by `Pop` before this function returns or unwinds, so while `job` is borrowed.
    let job = unsafe { std::mem::transmute::<*mut Job<'_>, *mut Job<'static>>(job) };
    ACTIVE.with_borrow_mut(|active| active.push(Active { backend, tasks, job: Some(job) }));
    let _pop = Pop;
    submit()
}

/// The callable that is handed to the runtime.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct GraphCallback;

#[pymethods]
impl GraphCallback {
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        orchestrator: &Bound<'py, PyAny>,
        _args: &Bound<'py, PyAny>,
        config: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let job = ACTIVE.with_borrow_mut(|active| active.last_mut().and_then(|a| a.job.take()));
        let Some(job) = job else {
            return Err(PyRuntimeError::new_err("the graph callback was called outside its submission"));
        };
        // SAFETY: the pointer comes from the `with_job` that is still on this thread's stack, whose exclusive borrow
        // of the job it stands for; `take` made this the only use.
        (unsafe { &mut *job })(py, orchestrator, config)
    }
}

/// Lets `f` run detached from the interpreter although it borrows things that must stay on this thread.
pub(crate) fn detached<R>(py: Python<'_>, f: impl FnOnce() -> R) -> R {
    struct SameThread<T>(T);
    // SAFETY: `Python::detach` asks for `Send` only to keep Python tokens out of the closure; it runs the closure on
    // this very thread. Callers pass closures that hold no token: builders see the interpreter through an
    // orchestrator that attaches by itself.
    unsafe impl<T> Send for SameThread<T> {}
    impl<T> SameThread<T> {
        fn into_inner(self) -> T {
            self.0
        }
    }
    let f = SameThread(f);
    py.detach(move || SameThread(f.into_inner()())).into_inner()
}
