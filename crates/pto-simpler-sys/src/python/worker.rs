//! The backend over one Simpler worker.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::Mutex;
use pyo3::prelude::*;

use super::building::{self, GraphBuildFailed};
use super::callables;
use super::ending::FORCED_END;
use super::host::out_of_bounds;
use super::interpreter;
use super::options::SimplerOptions;
use super::orchestrator::{self, SimplerOrchestrator};
use super::owner::Owner;
use super::probe::{self, RuntimeInfo};
use super::process::Monitor;
use super::runs::Uses;
use super::shared::{Accepted, Phase, Resident, Shared, unknown, wrong_phase};
use super::table::Key;
use super::views::Views;
use super::{result, start, waiter};
use crate::allocation::DomainState;
use crate::args::{CopyTo, DevicePlace};
use crate::backend::{AbandonReport, Backend, RunEvents, RunOutcome, RunState};
use crate::callable::{CallableKind, CallableSpec, Registered};
use crate::capability::{Capabilities, Depth, Negotiated};
use crate::config::CallConfig;
use crate::error::{BackendError, BuildFailed, Call, Effect, FailureKind, RuntimeFailure, SubmitError};
use crate::ids::{CallableId, ChipId, DeviceBufferId, DomainId, HostBufferId, RunId};
use crate::orchestrator::GraphBuilder;

/// A [`Backend`] over the genuine Simpler runtime, in this process. See the [module](super) for its rules.
#[derive(Debug)]
pub struct SimplerBackend {
    pub(super) shared: Arc<Shared>,
    pub(super) owner: Owner,
    info: RuntimeInfo,
    pub(super) waiter: Mutex<Option<JoinHandle<()>>>,
    pub(super) monitor: Mutex<Option<Monitor>>,
    /// Held by the thread that closes; others wait for it. Never held attached.
    closing: Mutex<()>,
    pub(super) next_buffer: AtomicU64,
}

impl SimplerBackend {
    /// Starts the interpreter if this is the first backend of the process, imports the runtime and finds out what it
    /// offers. Starts no process.
    ///
    /// # Errors
    ///
    /// Misuse: no devices, or a thread that is attached to the interpreter. Runtime failure: the interpreter does
    /// not start, the prelude fails, the runtime is missing (the message says how it was searched for) or lacks a
    /// piece that the binding needs (the message names it), or legacy retention was chosen and a private hook is
    /// missing.
    pub fn new(options: SimplerOptions) -> Result<Self, BackendError> {
        if options.device_ids.is_empty() {
            return Err(BackendError::misuse(Call::Start, "no device ids; name at least one device"));
        }
        interpreter::prepare(&options)?;
        let probed = Python::attach(|py| probe::probe(py, &options))?;
        let shared = Shared::new(probed.capabilities, options, probed.api);
        Ok(Self {
            shared: Arc::new(shared),
            owner: Owner::start()?,
            info: probed.info,
            waiter: Mutex::default(),
            monitor: Mutex::default(),
            closing: Mutex::default(),
            next_buffer: AtomicU64::new(1),
        })
    }

    /// What was found out about the imported runtime.
    #[must_use]
    pub fn runtime(&self) -> &RuntimeInfo {
        &self.info
    }

    /// The process of each chip worker that is running, by its id in the system. Empty before the start, after the
    /// end, and on a runtime that does not tell.
    #[must_use]
    pub fn chip_processes(&self) -> Vec<(ChipId, u32)> {
        self.shared.children.chip_processes()
    }

    fn admit(&self, run: RunId, config: &CallConfig) -> Result<(), BackendError> {
        let call = Call::Submit;
        self.shared.check_caller(call)?;
        self.shared.check_outside_build(call)?;
        self.shared.require(call, &[Phase::Ready])?;
        config.check(call)?;
        self.shared.check_usable(call)?;
        if !self.shared.runs.begin(run) {
            return Err(BackendError::misuse(call, format!("{run} was used before; choose a new number")));
        }
        Ok(())
    }

    /// Builds and submits, holding the build lock.
    fn build(&self, run: RunId, config: &CallConfig, graph: &mut dyn GraphBuilder) -> Result<(), SubmitError> {
        let shared = &*self.shared;
        // Close or the end of the worker may have come while this thread waited for its turn.
        shared.require(Call::Submit, &[Phase::Ready])?;
        shared.check_usable(Call::Submit)?;
        let tasks = Rc::new(Cell::new(false));
        let mut build_failed = false;
        let mut payload = None;
        let result = Python::attach(|py| {
            let worker = shared.worker(py, Call::Submit)?;
            let config = shared
                .api
                .call_config(py, config)
                .map_err(|e| result::validated(py, Call::Submit, &e, &shared.children))?;
            let mut job = |py: Python<'_>, orchestrator: &Bound<'_, PyAny>, config: &Bound<'_, PyAny>| {
                let orchestrator = SimplerOrchestrator::new(
                    shared,
                    run,
                    orchestrator.clone().unbind(),
                    config.clone().unbind(),
                    Rc::clone(&tasks),
                );
                // The runtime has waited for the cleanup of earlier runs, of which the waiter may not have heard yet.
                let domains = shared.runs.passing_domains();
                if !domains.is_empty() {
                    shared.settle(py, &Uses { domains, ..Uses::default() });
                }
                // Builders must not unwind; should one, the payload goes around the interpreter all the same.
                let built = building::detached(py, || {
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| graph.build(&orchestrator)))
                });
                match built {
                    Ok(Ok(())) => orchestrator.finish(py),
                    Ok(Err(BuildFailed)) => {
                        build_failed = true;
                        Err(GraphBuildFailed::new_err(()))
                    }
                    Err(panic) => {
                        build_failed = true;
                        payload = Some(panic);
                        Err(GraphBuildFailed::new_err(()))
                    }
                }
            };
            let submitted = building::with_job(shared.key(), Rc::clone(&tasks), &mut job, || {
                shared.api.submit(&worker, &config)
            });
            let accepted = match submitted {
                Ok(handle) => {
                    shared.runs.accept(run);
                    let accepted = Accepted { run, handle: handle.unbind() };
                    shared.accepted.push(accepted).map_err(|accepted| {
                        // Abandoned during the build. Nobody is left to wait for the run, whose tasks went nowhere.
                        std::mem::forget(accepted);
                        drop(shared.runs.cancel(run));
                        shared.check_usable(Call::Submit).err().unwrap_or_else(|| {
                            BackendError::broken(
                                Call::Submit,
                                "a run was accepted after the waiter had been told to end",
                            )
                        })
                    })
                }
                Err(error) => {
                    let uses = shared.runs.cancel(run);
                    shared.settle(py, &uses);
                    if let Err(second) = waiter::release(py, shared, true, &uses) {
                        tracing::warn!(%second, "a domain of a failed build could not be released");
                    }
                    Err(shared.failure(py, Call::Submit, &error, Effect::Unknown))
                }
            };
            shared.release_deferred(py);
            accepted
        });
        if let Some(panic) = payload {
            std::panic::resume_unwind(panic);
        }
        match result {
            Err(_) if build_failed => Err(SubmitError::Build(BuildFailed)),
            other => Ok(other?),
        }
    }
}

impl Backend for SimplerBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    fn phase(&self) -> Phase {
        self.shared.phase()
    }

    fn check_blocking(&self) -> Result<(), BackendError> {
        self.shared.check_caller(Call::Submit)
    }

    fn register(&self, callable: &CallableSpec) -> Result<Registered, BackendError> {
        let call = Call::Register;
        let shared = &*self.shared;
        shared.check_caller(call)?;
        shared.require(call, &[Phase::New])?;
        if callable.kind == CallableKind::Sub && shared.capabilities.sub_workers == 0 {
            return Err(BackendError::misuse(
                call,
                format!("{:?} needs a sub-worker, and there are 0; raise `num_sub_workers`", callable.name),
            ));
        }
        let loaded = Python::attach(|py| callables::load(py, shared, callable))?;
        let limit = shared.capabilities.limits.callables as usize;
        let mut callables = shared.callables.lock();
        // Loading takes its time. A start that has begun meanwhile has not seen this one, or is about to take the lock.
        shared.require(call, &[Phase::New])?;
        let count = callables.iter().map(|c| c.count()).sum::<usize>() + loaded.count();
        if count > limit {
            return Err(BackendError::misuse(
                call,
                format!("{count} callables; at most {limit} can be registered"),
            ));
        }
        let registered = Registered {
            id: CallableId::make(callables.len() as u32, 1),
            signature: loaded.signature.clone(),
            takes_domains: loaded.entry.as_ref().is_some_and(|e| e.takes_domains),
        };
        callables.push(Arc::new(loaded));
        Ok(registered)
    }

    fn start(&self, events: Arc<dyn RunEvents>) -> Result<Negotiated, BackendError> {
        let call = Call::Start;
        let shared = &self.shared;
        shared.check_caller(call)?;
        shared.check_outside_build(call)?;
        shared.enter(call, &[Phase::New], Phase::Starting)?;
        let job = Arc::clone(shared);
        let started = self.owner.run(call, move |py| start::start(py, &job));
        let spawned = started.and_then(|()| {
            let _ = shared.events.set(events);
            let state = Arc::clone(shared);
            let waiter = std::thread::Builder::new()
                .name("pto-simpler-waiter".to_owned())
                .spawn(move || waiter::run(&state))
                .map_err(|e| BackendError::broken(call, format!("the waiter thread cannot be started: {e}")))?;
            *self.waiter.lock() = Some(waiter);
            let state = Arc::clone(shared);
            let monitor = Monitor::start(Arc::clone(&shared.children), move |stop| start::chip_died(&state, stop))
                .map_err(|e| BackendError::broken(call, format!("the chip monitor cannot be started: {e}")))?;
            *self.monitor.lock() = Some(monitor);
            Ok(())
        });
        match spawned {
            Ok(()) => {
                if !shared.leave(Phase::Ready) {
                    // Abandoned when everything was up already.
                    self.destroy();
                    self.stop_waiter();
                    return Err(start::abandoned());
                }
                // The runtime publishes no depth; two is its ceiling.
                Ok(Negotiated::new(Depth::AtMost(2)))
            }
            Err(error) => {
                self.undo_start();
                if shared.leave(Phase::Failed) { Err(error) } else { Err(start::abandoned()) }
            }
        }
    }

    fn submit(&self, run: RunId, config: &CallConfig, graph: &mut dyn GraphBuilder) -> Result<(), SubmitError> {
        self.admit(run, config)?;
        /// Forgets a run that was not accepted, also when a builder unwinds.
        struct Forget<'a>(&'a Shared, RunId);
        impl Drop for Forget<'_> {
            fn drop(&mut self) {
                if self.0.runs.state(self.1) == RunState::Unknown {
                    self.0.runs.cancel(self.1);
                }
            }
        }
        let result = {
            let _forget = Forget(&self.shared, run);
            let _lock = self.shared.build_lock.acquire();
            self.build(run, config, graph)
        };
        self.shared.drain_deferred();
        result
    }

    fn run_state(&self, run: RunId) -> RunState {
        self.shared.runs.state(run)
    }

    fn create_buffer(&self, nbytes: u64) -> Result<HostBufferId, BackendError> {
        self.host_buffer(nbytes, false)
    }

    fn create_zeros(&self, nbytes: u64) -> Result<HostBufferId, BackendError> {
        self.host_buffer(nbytes, true)
    }

    fn write_buffer(&self, buffer: HostBufferId, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        let (mapping, nbytes) = self.mapping(Call::WriteBuffer, buffer, true)?;
        let written = usize::try_from(offset).is_ok_and(|offset| mapping.write(offset, bytes));
        if written { Ok(()) } else { Err(out_of_bounds(Call::WriteBuffer, buffer, offset, bytes.len(), nbytes)) }
    }

    fn read_buffer(&self, buffer: HostBufferId, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        let (mapping, nbytes) = self.mapping(Call::ReadBuffer, buffer, false)?;
        let read = usize::try_from(offset).is_ok_and(|offset| mapping.read(offset, bytes));
        if read { Ok(()) } else { Err(out_of_bounds(Call::ReadBuffer, buffer, offset, bytes.len(), nbytes)) }
    }

    fn fill_buffer(&self, buffer: HostBufferId, byte: u8) -> Result<(), BackendError> {
        self.mapping(Call::FillBuffer, buffer, true)?.0.fill(byte);
        Ok(())
    }

    fn release_buffer(&self, buffer: HostBufferId) -> Result<(), BackendError> {
        let call = Call::ReleaseBuffer;
        let shared = &*self.shared;
        shared.check_caller(call)?;
        shared.check_outside_build(call)?;
        if let Some(run) = shared.runs.user_of(buffer) {
            return Err(BackendError::misuse(
                call,
                format!("{buffer} is an argument of a task of {run}, which is in flight; wait for it"),
            ));
        }
        let taken = shared.host.lock().take(buffer);
        let Some(taken) = taken else { return Err(unknown(call, buffer)) };
        if shared.phase() == Phase::New {
            // No other process knows it yet.
            return Ok(());
        }
        shared.release_host(taken);
        Ok(())
    }

    fn alloc(&self, chip: ChipId, nbytes: u64) -> Result<DeviceBufferId, BackendError> {
        let call = Call::Alloc;
        if nbytes == 0 {
            return Err(BackendError::misuse(call, "0 bytes asked for; ask for at least 1"));
        }
        self.shared.check_chip(call, chip)?;
        let shared = &*self.shared;
        shared.control(call, |py, worker| {
            let buffer = shared.api.alloc_child(worker, chip.0, nbytes).map_err(|e| {
                match shared.failure(py, call, &e, Effect::None) {
                    BackendError::Runtime(failure) if failure.kind == FailureKind::Call => {
                        let kind = FailureKind::OutOfDeviceMemory { requested_bytes: nbytes };
                        (*failure).clone().with_kind(kind).on_chip(chip).into()
                    }
                    other => other,
                }
            })?;
            // The runtime hands memory out as it is. Fresh shared memory is zero.
            let zeroed = shared.reserved_buffer(py, call, worker, nbytes).and_then(|zeros| {
                let copied = shared
                    .api
                    .copy_to(worker, &buffer, zeros.object.bind(py))
                    .map_err(|e| shared.failure(py, call, &e, Effect::Done));
                shared.defer_release(zeros.object, Some(zeros.name));
                copied
            });
            if let Err(error) = zeroed {
                if let Err(second) = shared.api.free(worker, &buffer) {
                    let second = result::failure(py, Call::Free, &second);
                    tracing::warn!(%second, "device memory that could not be zeroed could not be freed either");
                }
                return Err(error);
            }
            Ok(shared.resident.lock().add(Resident { chip, nbytes, views: Views::new(buffer.unbind()) }))
        })
    }

    fn free(&self, buffer: DeviceBufferId) -> Result<(), BackendError> {
        let call = Call::Free;
        let shared = &*self.shared;
        shared.control(call, |py, worker| {
            let taken = shared.take_resident(call, buffer)?;
            shared
                .api
                .free(worker, taken.views.buffer().bind(py))
                .map_err(|e| shared.failure(py, call, &e, Effect::Unknown))
        })
    }

    fn copy_to(&self, copy: &CopyTo) -> Result<(), BackendError> {
        self.shared.control(Call::CopyTo, |py, worker| orchestrator::copy_to(py, &self.shared, worker, copy))
    }

    fn copy_from(&self, dst: HostBufferId, src: DevicePlace, nbytes: u64) -> Result<(), BackendError> {
        self.shared.control(Call::CopyFrom, |py, worker| {
            orchestrator::copy_from(py, &self.shared, worker, dst, src, nbytes)
        })
    }

    fn release_domain(&self, domain: DomainId) -> Result<(), BackendError> {
        self.shared.check_caller(Call::ReleaseDomain)?;
        Python::attach(|py| self.shared.release_now(py, domain))
    }

    fn domain_state(&self, domain: DomainId) -> Result<DomainState, BackendError> {
        self.shared.check_process(Call::DomainState)?;
        self.shared.domains.lock().state(domain).ok_or_else(|| unknown(Call::DomainState, domain))
    }

    fn committed_device_memory(&self, chip: ChipId) -> Result<u64, BackendError> {
        let call = Call::CommittedDeviceMemory;
        self.shared.check_chip(call, chip)?;
        let shared = &*self.shared;
        shared.control(call, |py, worker| {
            let own = shared
                .api
                .committed_device_memory(worker, chip.0)
                .map_err(|e| shared.failure(py, call, &e, Effect::None))?;
            // The runtime does not count windows.
            let domains = shared.domains.lock();
            Ok(domains.table.values().fold(own, |sum, d| sum.saturating_add(d.mapped_on(chip))))
        })
    }

    fn close(&self) -> Result<(), BackendError> {
        let call = Call::Close;
        let shared = &*self.shared;
        shared.check_caller(call)?;
        shared.check_outside_build(call)?;
        let _closing = self.closing.lock();
        match shared.phase() {
            Phase::Closed => Ok(()),
            Phase::New | Phase::Failed => {
                shared.enter(call, &[Phase::New, Phase::Failed], Phase::Closed)?;
                self.stop_waiter();
                self.clear();
                self.owner.stop(true);
                Ok(())
            }
            Phase::Starting => Err(wrong_phase(call, Phase::Starting, &[Phase::New, Phase::Ready])),
            Phase::Ready | Phase::Closing => {
                shared.enter(call, &[Phase::Ready, Phase::Closing], Phase::Closing)?;
                self.close_started()
            }
        }
    }

    fn abandon(&self) -> AbandonReport {
        let call = Call::Abandon;
        let shared = &*self.shared;
        let allowed = shared.check_caller(call).and_then(|()| shared.check_outside_build(call));
        if let Err(error) = allowed {
            return AbandonReport { ended: Vec::new(), left: vec![format!("everything: {error}")] };
        }
        let all = [Phase::New, Phase::Starting, Phase::Ready, Phase::Failed, Phase::Closing];
        let Ok(before) = shared.enter(call, &all, Phase::Closed) else { return AbandonReport::default() };
        let gone =
            RuntimeFailure::new(Call::Run, "Abandoned", "the backend was abandoned while the run was in flight");
        shared.finish(&gone.clone().with_fatal(true));
        let interrupted = if before == Phase::Starting { self.interrupt_start() } else { Vec::new() };
        let (mut ended, mut left) = self.destroy();
        ended.extend(interrupted);
        // With their processes gone, the runtime's own waits mostly come back; those that do not are reported here.
        shared.accepted.close();
        if !shared.runs.wait_until_ended_by(Instant::now() + FORCED_END) {
            for run in shared.runs.pending() {
                let failure = gone.clone().with_effect(Effect::Unknown).with_fatal(true);
                if shared.runs.end(run) {
                    shared.report(run, RunOutcome::failed(failure.into()));
                }
            }
            left.push("the thread that waits for the runtime".to_owned());
        } else {
            self.stop_waiter();
        }
        AbandonReport { ended, left }
    }
}

impl Drop for SimplerBackend {
    fn drop(&mut self) {
        if self.shared.check_process(Call::Close).is_err() {
            // What it refers to belongs to threads and locks that this process does not have.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        match self.shared.phase() {
            Phase::New | Phase::Failed | Phase::Closed => {
                // An attached thread must not wait for one that has to attach in order to end.
                let wait = !interpreter::attached();
                self.shared.accepted.close();
                self.owner.stop(wait);
            }
            phase => {
                // Collecting a worker that is not closed would end the process.
                tracing::warn!(?phase, "a Simpler backend was dropped without being closed; its worker is leaked");
                std::mem::forget(Arc::clone(&self.shared));
                if let Some(monitor) = self.monitor.get_mut().take() {
                    std::mem::forget(monitor);
                }
            }
        }
    }
}
