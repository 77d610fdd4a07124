//! The waiter thread: turns the runtime's handles into run events.
//!
//! Every native handle is waited here, in the order of submission, whatever becomes of the user's own handle: one
//! that nobody waits keeps its run "in flight" for ever and makes `close` raise its error.

use std::cell::Cell;
use std::sync::Arc;

use pyo3::prelude::*;

use super::shared::{Accepted, Phase, Shared};
use super::sys;
use crate::backend::RunOutcome;
use crate::capability::Retention;
use crate::error::{BackendError, Call, Effect, FailureKind, RuntimeFailure};

/// The worker's sticky refusal after a failed cleanup.
const POISON: &str = "_ordered_cleanup_error";

thread_local! {
    static CURRENT: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread waits for the runs of some backend.
pub(crate) fn is_current() -> bool {
    CURRENT.get()
}

/// Runs until the queue of accepted runs is closed and empty.
pub(crate) fn run(shared: &Arc<Shared>) {
    CURRENT.set(true);
    while let Some(Accepted { run, handle }) = shared.accepted.pop() {
        let mut outcome = Python::attach(|py| {
            let outcome = outcome(py, shared, handle.bind(py));
            let uses = shared.runs.take_uses(run);
            shared.settle(py, &uses);
            let outcome = match release(py, shared, outcome.result.is_err(), &uses) {
                Ok(()) => outcome,
                Err(error) => RunOutcome { cleanup: outcome.cleanup.or(Some(error)), ..outcome },
            };
            drop(handle);
            outcome
        });
        if let RunOutcome { result: Ok(()), cleanup: None } = outcome {
            outcome = RunOutcome::success();
        }
        if shared.runs.end(run) {
            shared.report(run, outcome);
        }
        shared.drain_deferred();
    }
}

/// Waits for the run and its cleanup.
fn outcome(py: Python<'_>, shared: &Shared, handle: &Bound<'_, PyAny>) -> RunOutcome {
    let Err(error) = shared.api.result(handle) else { return RunOutcome::success() };
    if shared.phase() == Phase::Closed {
        let failure = super::result::failure(py, Call::Run, &error).with_effect(Effect::Unknown).with_fatal(true);
        return RunOutcome::failed(abandoned(failure).into());
    }
    let poison = shared
        .worker(py, Call::Run)
        .ok()
        .and_then(|worker| sys::optional(&worker, POISON).ok().flatten())
        .map(PyErr::from_value);
    let cleanup = |error: &PyErr| -> BackendError {
        let failure = super::result::classified(py, Call::Run, error, &shared.children, Effect::Unknown);
        shared.note(failure.with_fatal(true)).into()
    };
    match &poison {
        // The run itself was fine, its cleanup was not.
        Some(poison) if poison.value(py).is(error.value(py)) => {
            RunOutcome { result: Ok(()), cleanup: Some(cleanup(poison)) }
        }
        _ => {
            let failure = super::result::classified(py, Call::Run, &error, &shared.children, Effect::Done);
            RunOutcome { result: Err(shared.note(of_run(failure)).into()), cleanup: poison.as_ref().map(cleanup) }
        }
    }
}

/// The failure of a run that the end of its worker has cut off, whatever the runtime says of it.
fn abandoned(mut failure: RuntimeFailure) -> RuntimeFailure {
    failure.message = format!("the backend was abandoned while the run was in flight: {}", failure.message);
    failure
}

/// The failure of a run in terms of its tasks. Without a time limit of ours, a timeout is the device's.
fn of_run(mut failure: RuntimeFailure) -> RuntimeFailure {
    if failure.kind == FailureKind::Deferred {
        failure.kind = FailureKind::DeviceTimeout;
        failure.fatal = true;
    }
    if failure.kind != FailureKind::Call {
        failure.call = Call::Task;
    }
    failure
}

/// Releases what this run was the last to use: domains that somebody released meanwhile, and, with legacy retention,
/// where the runtime no longer frees what was retained, everything that a failed run was registered with and what a
/// successful one does not keep. Behind a dead chip a release would wait for minutes in vain; `close` sees to those.
pub(crate) fn release(
    py: Python<'_>,
    shared: &Shared,
    failed: bool,
    uses: &super::runs::Uses,
) -> Result<(), BackendError> {
    if shared.children.first_death().is_some() {
        return Ok(());
    }
    if shared.capabilities.retention == Retention::PrivateHooks {
        shared.doom(uses.domains.iter().filter(|d| failed || !d.keep).map(|d| d.id));
    }
    let mut first = Ok(());
    for domain in &uses.domains {
        if shared.doomed(domain.id) && !shared.runs.uses_domain(domain.id) {
            let result = shared.release_now(py, domain.id);
            first = first.and(result);
        }
    }
    first
}
