//! Starting the worker, and what follows when one of its chips dies.

use std::sync::Arc;

use pyo3::prelude::*;

use super::callables::Callable;
use super::ending::FORCED_END;
use super::entry::support;
use super::process::StopSignal;
use super::shared::{Phase, Shared};
use super::sys::optional;
use super::{probe, result, room};
use crate::callable::CallableKind;
use crate::config::CallConfig;
use crate::error::{BackendError, Call, FailureKind, RuntimeFailure};

/// Makes the worker, registers the callables and starts it. On the owner thread.
pub(crate) fn start(py: Python<'_>, shared: &Arc<Shared>) -> Result<(), BackendError> {
    let call = Call::Start;
    let failed = |e: PyErr| BackendError::from(result::failure(py, call, &e));
    let callables = shared.callables.lock().clone();
    let of_entries = callables.iter().filter_map(|c| c.entry.as_ref()).map(|e| e.sub_workers()).max();
    let sub_workers = shared.options.num_sub_workers.max(of_entries.unwrap_or(0));
    check_callbacks(shared, &callables)?;
    room::check_processes(call, shared.options.device_ids.len().saturating_add(sub_workers as usize))?;
    let arguments = probe::arguments(py, &shared.options, sub_workers).map_err(failed)?;
    if callables.iter().filter_map(|c| c.entry.as_ref()).any(|e| e.wants_sdma) {
        arguments.set_item("enable_sdma", true).map_err(failed)?;
    }
    if let Some(level) = shared.options.noise.level() {
        py.import("logging")
            .and_then(|logging| logging.call_method1("getLogger", ("simpler",)))
            .and_then(|logger| logger.call_method1("setLevel", (level,)))
            .map_err(failed)?;
    }
    let worker = shared.api.worker_new(py, &arguments).map_err(failed)?;
    for (index, callable) in (0u32..).zip(&callables) {
        if let Some(target) = &callable.target {
            let handle = shared.api.register(&worker, target.bind(py)).map_err(failed)?;
            shared.handles.lock().insert(index, handle.unbind());
        }
        if let Some(entry) = &callable.entry {
            entry.register(py, &worker).map_err(failed)?;
        }
    }
    let prewarm = shared.api.call_config(py, &CallConfig::default()).map_err(failed)?;
    shared.set_starting(Some(worker.clone().unbind()));
    // Abandoned before there was anything to interrupt.
    if shared.phase() != Phase::Starting {
        shared.set_starting(None);
        return Err(abandoned());
    }
    let init = support(py).and_then(|s| s.call_method1("start", (&worker, &prewarm)));
    if init.is_ok() {
        // From here on the object must not be collected unless it is closed.
        shared.set_worker(worker.clone().unbind());
    }
    shared.set_starting(None);
    if let Err(error) = init {
        let mut failure = result::classified(py, call, &error, &shared.children, crate::error::Effect::None);
        if failure.message.contains("register_callable") {
            // The runtime does not say which.
            let chip = callables.iter().filter(|c| c.kind == CallableKind::Chip).map(|c| &*c.name);
            let names: Vec<&str> = chip.collect();
            failure.message.push_str(&format!(
                "; one of {names:?} could not be loaded: look at its files, its function and its kernels"
            ));
        }
        // Rolled back by the runtime; this only marks the object as over.
        if let Err(second) = shared.api.close(&worker) {
            let second = result::failure(py, Call::Close, &second);
            tracing::warn!(%second, "a worker that did not start could not be closed");
            std::mem::forget(worker.clone().unbind());
        }
        // What it could not roll back is still in its books.
        if let Ok((chips, subs, mailboxes)) = processes(&worker) {
            shared.children.started(&chips, &subs, mailboxes);
            let (_, left) = py.detach(|| shared.children.destroy(FORCED_END));
            if !left.is_empty() {
                failure.message.push_str(&format!("; left: {}", left.join(", ")));
            }
        }
        return Err(failure.into());
    }
    let (chips, subs, mailboxes) = processes(&worker).map_err(failed)?;
    shared.children.started(&chips, &subs, mailboxes);
    Ok(())
}

/// Why a start did not come to its end.
pub(crate) fn abandoned() -> BackendError {
    RuntimeFailure::new(Call::Start, "Abandoned", "the backend was abandoned while it was starting").into()
}

/// A callback that no program uses is mostly a misspelt one.
fn check_callbacks(shared: &Shared, callables: &[Arc<Callable>]) -> Result<(), BackendError> {
    let used: Vec<&String> =
        callables.iter().filter_map(|c| c.entry.as_ref()).flat_map(|e| &e.used_callbacks).collect();
    let unused: Vec<&str> =
        shared.options.callbacks.keys().map(|k| &**k).filter(|k| !used.iter().any(|u| u == k)).collect();
    if unused.is_empty() {
        return Ok(());
    }
    Err(BackendError::misuse(
        Call::Start,
        format!("callbacks {unused:?} are sub-workers of no registered program; programs use {used:?}"),
    ))
}

/// The worker's child processes and the names of their mailboxes, as far as this runtime says.
pub(crate) fn processes(worker: &Bound<'_, PyAny>) -> PyResult<(Vec<i32>, Vec<i32>, Vec<String>)> {
    let pids = |name| match optional(worker, name)? {
        Some(pids) => pids.extract::<Vec<i32>>(),
        None => Ok(Vec::new()),
    };
    let mut mailboxes = Vec::new();
    for name in ["_chip_shms", "_sub_shms"] {
        if let Some(blocks) = optional(worker, name)? {
            for block in blocks.try_iter()? {
                mailboxes.push(block?.getattr("name")?.extract::<String>()?.trim_start_matches('/').to_owned());
            }
        }
    }
    Ok((pids("_chip_pids")?, pids("_sub_pids")?, mailboxes))
}

/// A chip process has ended although nobody asked it to: no more work, and whatever still waits for the dead chip
/// after a short grace is freed from waiting by ending its peers too. On the monitor's thread.
pub(crate) fn chip_died(shared: &Shared, stop: &StopSignal) {
    // None: it exited because the worker is being closed.
    let Some((chip, death)) = shared.children.first_death() else { return };
    if shared.phase() == Phase::Closing {
        // The release of a domain would wait for the dead member.
        shared.children.end_chips();
        return;
    }
    let failure = RuntimeFailure::new(Call::Task, "ChipDied", "the chip process has ended")
        .with_kind(FailureKind::ChipDied { exit_code: death.exit_code, signal: death.signal })
        .on_chip(chip)
        .with_fatal(true);
    tracing::warn!(%chip, exit_code = death.exit_code, signal = death.signal, "a chip process has ended");
    shared.finish(&failure);
    if !stop.wait(shared.options.dead_chip_grace) && shared.waits_for_chips() {
        shared.children.end_chips();
    }
}
