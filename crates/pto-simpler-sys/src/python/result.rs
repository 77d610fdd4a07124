//! Typed failures: what a Python exception says, and what it means for the worker.

use pyo3::exceptions::{
    PyIndexError, PyKeyError, PyMemoryError, PyModuleNotFoundError, PyOverflowError, PyTimeoutError, PyTypeError,
    PyValueError,
};
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::process::Children;
use crate::error::{BackendError, Call, Effect, FailureKind, RuntimeFailure};
use crate::ids::ChipId;

/// The exception as it is: type name, message, traceback text with its causes.
pub(crate) fn failure(py: Python<'_>, call: Call, error: &PyErr) -> RuntimeFailure {
    let type_name = error.get_type(py).qualname().map_or_else(|_| "Exception".to_owned(), |n| n.to_string());
    let message = error.value(py).str().map_or_else(|_| "(no text)".to_owned(), |m| m.to_string());
    let mut failure = RuntimeFailure::new(call, type_name, message);
    failure.traceback = traceback(py, error).ok();
    failure
}

fn traceback(py: Python<'_>, error: &PyErr) -> PyResult<String> {
    // The frames are not attached to the exception unless Python code has caught it.
    let parts = (error.get_type(py), error.value(py), error.traceback(py));
    let lines = py.import("traceback")?.call_method1("format_exception", parts)?;
    // Names of files and messages may hold what is no text elsewhere.
    lines.try_iter()?.map(|line| Ok(line?.cast_into::<PyString>()?.to_string_lossy().into_owned())).collect()
}

/// The failure of a call that the runtime validates before it does anything: a complaint about the arguments is the
/// caller's, anything else the runtime's.
pub(crate) fn validated(py: Python<'_>, call: Call, error: &PyErr, children: &Children) -> BackendError {
    if is_complaint(py, error) {
        return BackendError::misuse(call, failure(py, call, error).message);
    }
    classified(py, call, error, children, Effect::Unknown).into()
}

/// The exceptions with which the runtime refuses arguments.
fn is_complaint(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyValueError>(py)
        || error.is_instance_of::<PyTypeError>(py)
        || error.is_instance_of::<PyIndexError>(py)
        || error.is_instance_of::<PyKeyError>(py)
}

/// The failure of a call that may have reached the chips: says which chip, whether its process died and whether the
/// worker is finished.
pub(crate) fn classified(
    py: Python<'_>,
    call: Call,
    error: &PyErr,
    children: &Children,
    effect: Effect,
) -> RuntimeFailure {
    let mut failure = failure(py, call, error).with_effect(effect);
    if error.is_instance_of::<PyTimeoutError>(py) {
        failure.kind = FailureKind::Deferred;
        return failure;
    }
    // The message of a failed collective quotes its first failure; a refusal quotes its reason as its cause.
    let mut text = failure.message.clone();
    let mut cause = error.cause(py);
    for _ in 0..4 {
        let Some(error) = cause else { break };
        text.push('\n');
        text.push_str(&error.value(py).str().map(|t| t.to_string()).unwrap_or_default());
        cause = error.cause(py);
    }
    read_text(&mut failure, &text, children);
    failure
}

/// Reads the parts of a message that the runtime keeps stable.
fn read_text(failure: &mut RuntimeFailure, text: &str, children: &Children) {
    if let Some(pid) = number_after(text, "child process pid=") {
        let signal = number_after(text, "(signal=");
        let exit_code = number_after(text, "(exit_status=");
        match children.chip_of(pid) {
            Some(chip) => {
                failure.kind = FailureKind::ChipDied { exit_code, signal };
                failure.chip = Some(chip);
                failure.fatal = true;
            }
            // A sub-worker process: chips are untouched, but its tasks can no longer run.
            None => failure.kind = FailureKind::Task,
        }
    } else if text.contains("chip_process dev=") && text.contains(" ctrl=") {
        // A control call that the chip refused, for want of memory say, which leaves its run lane as it was.
        let chip = number_after(text, "first error chip=").and_then(|n| u32::try_from(n).ok());
        failure.chip = chip.map(ChipId);
    } else if text.contains("chip_process dev=") {
        failure.kind = if text.contains("failed with code -100") && text.contains("finalize_native_run") {
            FailureKind::DeviceTimeout
        } else {
            FailureKind::Task
        };
        failure.chip = number_after(text, "(worker_id=").and_then(|n| u32::try_from(n).ok()).map(ChipId);
        // The chip's run lane stays poisoned although new work is still admitted.
        failure.fatal = true;
    } else if text.contains("sub_worker") {
        failure.kind = FailureKind::Task;
    } else if text.contains("chip worker ") {
        failure.chip = number_after(text, "chip worker ").and_then(|n| u32::try_from(n).ok()).map(ChipId);
    }
    if text.contains("ordered cleanup failed") {
        failure.fatal = true;
    }
}

fn number_after(text: &str, marker: &str) -> Option<i32> {
    let rest = &text[text.find(marker)? + marker.len()..];
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

/// The failure of an allocation of shared memory.
pub(crate) fn host_allocation(py: Python<'_>, error: &PyErr, nbytes: u64) -> BackendError {
    let failure = failure(py, Call::CreateBuffer, error);
    let errno = error.value(py).getattr("errno").and_then(|n| n.extract::<i32>()).ok();
    if errno.is_some_and(|n| [libc::ENOSPC, libc::ENOMEM, libc::EFBIG].contains(&n))
        || error.is_instance_of::<PyMemoryError>(py)
        || error.is_instance_of::<PyOverflowError>(py)
    {
        return failure.with_kind(FailureKind::OutOfSharedMemory { requested_bytes: nbytes }).into();
    }
    failure.into()
}

/// The failure of an import, with the way in which the module was looked for.
pub(crate) fn import(py: Python<'_>, call: Call, module: &str, error: &PyErr) -> BackendError {
    let mut failure = failure(py, call, error);
    if error.is_instance_of::<PyModuleNotFoundError>(py) {
        failure.message =
            format!("{}, wanted for {module}; searched by {}", failure.message, super::interpreter::searched(py));
    }
    failure.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> RuntimeFailure {
        let children = Children::for_test(&[(40, 0), (41, 1)], &[42]);
        let mut failure = RuntimeFailure::new(Call::Run, "RuntimeError", text);
        read_text(&mut failure, text, &children);
        failure
    }

    #[test]
    fn a_dead_chip_process_is_named_with_its_signal_and_is_fatal() {
        let f = read(
            "LocalMailboxEndpoint progress failed: child process pid=41 exited before mailbox completion (signal=9)",
        );
        assert_eq!(f.kind, FailureKind::ChipDied { exit_code: None, signal: Some(9) });
        assert!(f.fatal && f.chip == Some(ChipId(1)));
        let f = read("child process pid=40 exited before mailbox completion (exit_status=3)");
        assert_eq!(f.kind, FailureKind::ChipDied { exit_code: Some(3), signal: None });
    }

    #[test]
    fn a_failed_chip_task_is_fatal_and_a_failed_sub_task_is_not() {
        let f = read(
            "LocalMailboxEndpoint child failed (worker_id=1, code=1): chip_process dev=5: RuntimeError: \
             finalize_native_run failed with code -9 (run_id=1)",
        );
        assert!(f.fatal && f.kind == FailureKind::Task && f.chip == Some(ChipId(1)));
        let f = read(
            "LocalMailboxEndpoint child failed (worker_id=1, code=1): chip_process dev=5: RuntimeError: \
             finalize_native_run failed with code -100 (run_id=1)",
        );
        assert_eq!(f.kind, FailureKind::DeviceTimeout);
        let f = read("LocalMailboxEndpoint child failed (worker_id=0, code=1): sub_worker: ValueError: no");
        assert!(!f.fatal && f.kind == FailureKind::Task && f.chip.is_none());
        let f = read("child process pid=42 exited before mailbox completion (signal=9)");
        assert!(!f.fatal && f.kind == FailureKind::Task);
    }

    #[test]
    fn a_control_call_that_a_chip_refuses_is_not_a_failed_task() {
        let f = read("control_malloc failed on child: chip_process dev=0 ctrl=0: RuntimeError: malloc failed");
        assert_eq!((f.kind, f.fatal, f.chip), (FailureKind::Call, false, None));
        let f = read(
            "alloc_domain(allocation_id=0) failed on 1/2 chips; first error chip=1: control_alloc_domain failed on \
             child: chip_process dev=5 ctrl=9: RuntimeError: no",
        );
        assert_eq!((f.kind, f.fatal, f.chip), (FailureKind::Call, false, Some(ChipId(1))));
    }

    #[test]
    fn a_chip_that_did_not_come_up_is_named() {
        assert_eq!(read("chip worker 1 (pid 7) failed during init: no device").chip, Some(ChipId(1)));
    }
}
