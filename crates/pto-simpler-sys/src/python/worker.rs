//! The backend over one Simpler worker.

use std::cell::Cell;
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use parking_lot::Mutex;
use pyo3::intern;
use pyo3::prelude::*;

use super::building::{self, GraphBuildFailed};
use super::callables;
use super::interpreter;
use super::memory::Mapping;
use super::options::SimplerOptions;
use super::orchestrator::{self, SimplerOrchestrator};
use super::owner::Owner;
use super::probe::{self, RuntimeInfo};
use super::process::Monitor;
use super::runs::Uses;
use super::shared::{Accepted, HostBuffer, Phase, Resident, Shared, unknown};
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

/// How long a forced end waits for processes and for the waiter thread.
const FORCED_END: Duration = Duration::from_secs(5);

/// A [`Backend`] over the genuine Simpler runtime, in this process. See the [module](super) for its rules.
#[derive(Debug)]
pub struct SimplerBackend {
    shared: Arc<Shared>,
    owner: Owner,
    info: RuntimeInfo,
    waiter: Mutex<Option<JoinHandle<()>>>,
    monitor: Mutex<Option<Monitor>>,
    /// Held by the thread that closes; others wait for it. Never held attached.
    closing: Mutex<()>,
    next_buffer: AtomicU64,
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

    fn admit(&self, run: RunId) -> Result<(), BackendError> {
        let call = Call::Submit;
        self.shared.check_caller(call)?;
        self.shared.check_outside_build(call)?;
        self.shared.require(call, &[Phase::Ready])?;
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
                    shared.accepted.push(accepted).map_err(|_| {
                        BackendError::broken(
                            Call::Submit,
                            "a run was accepted after the waiter had been told to end",
                        )
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

    fn host_buffer(&self, nbytes: u64, read_only: bool) -> Result<HostBufferId, BackendError> {
        let call = Call::CreateBuffer;
        let shared = &*self.shared;
        shared.check_caller(call)?;
        shared.require(call, &[Phase::New, Phase::Ready])?;
        let out_of_memory = |type_name: &str, message: String| {
            RuntimeFailure::new(call, type_name, message)
                .with_kind(FailureKind::OutOfSharedMemory { requested_bytes: nbytes })
        };
        if nbytes == 0 {
            return Err(BackendError::misuse(call, "0 bytes asked for; ask for at least 1"));
        }
        let Some(len) = usize::try_from(nbytes).ok().filter(|n| isize::try_from(*n).is_ok()) else {
            return Err(out_of_memory("OverflowError", "more than the address space".to_owned()).into());
        };
        let Some(len) = NonZeroUsize::new(len) else {
            return Err(BackendError::broken(call, "a checked size is zero"));
        };
        let errno = |what: &str, e: Errno| {
            let message = format!("{what}: {e}");
            match e {
                Errno::ENOSPC | Errno::ENOMEM | Errno::EFBIG => out_of_memory("OSError", message),
                _ => RuntimeFailure::new(call, "OSError", message),
            }
        };
        if shared.phase() == Phase::New {
            let mapping = Mapping::anonymous(len).map_err(|e| errno("shared memory cannot be mapped", e))?;
            let number = self.next_buffer.fetch_add(1, Ordering::Relaxed);
            let object = Python::attach(|py| {
                shared
                    .api
                    .wrap_inherited(py, mapping.address(), nbytes, number, !read_only)
                    .map(Bound::unbind)
                    .map_err(|e| BackendError::from(result::failure(py, call, &e)))
            })?;
            return Ok(shared.add_host(object, Arc::new(mapping), nbytes, read_only, None));
        }
        if !read_only && let Some(stored) = shared.stored_host(nbytes) {
            return Ok(shared.host.lock().add(stored));
        }
        let (object, name) = Python::attach(|py| {
            let worker = shared.worker(py, call)?;
            let buffer =
                shared.api.create_buffer(&worker, nbytes).map_err(|e| result::host_allocation(py, &e, nbytes))?;
            let name = || -> PyResult<String> {
                if read_only {
                    shared.api.make_read_only(&buffer)?;
                }
                buffer.getattr(intern!(py, "shm"))?.getattr(intern!(py, "name"))?.extract()
            };
            let name = name().map_err(|e| BackendError::from(result::failure(py, call, &e)));
            Ok::<_, BackendError>((buffer.unbind(), name))
        })?;
        let mapping = name.and_then(|name| {
            Mapping::named(&name, len)
                .map(|mapping| (Arc::new(mapping), name))
                .map_err(|e| errno("shared memory cannot be reserved", e).into())
        });
        match mapping {
            Ok((mapping, name)) => Ok(shared.add_host(object, mapping, nbytes, read_only, Some(name))),
            Err(error) => {
                shared.defer_release(object);
                // What released buffers hold may be what is missing next time.
                shared.empty_store();
                shared.drain_deferred();
                Err(error)
            }
        }
    }

    fn mapping(&self, call: Call, id: HostBufferId, writing: bool) -> Result<(Arc<Mapping>, u64), BackendError> {
        self.shared.check_process(call)?;
        let host = self.shared.host.lock();
        let buffer = host.at(id).ok_or_else(|| unknown(call, id))?;
        if writing && buffer.read_only {
            return Err(BackendError::misuse(call, format!("{id} is read-only; write to another buffer")));
        }
        Ok((Arc::clone(&buffer.mapping), buffer.nbytes))
    }

    /// Everything of a worker that is over: its threads, and what its tables hold.
    fn clear(&self) {
        let shared = &*self.shared;
        self.stop_monitor();
        let domains: Vec<DomainId> = {
            let domains = shared.domains.lock();
            domains.table.keys().collect()
        };
        for id in domains {
            let domain = shared.domains.lock().freed(id);
            drop(domain);
        }
        let host = shared.host.lock().drain();
        let stored = shared.store.lock().drain();
        let resident = shared.resident.lock().drain();
        let scratch = shared.scratch.lock().drain();
        let handles = std::mem::take(&mut *shared.handles.lock());
        let callables = std::mem::take(&mut *shared.callables.lock());
        drop((host, stored, resident, scratch, handles, callables));
    }

    fn stop_monitor(&self) {
        let monitor = self.monitor.lock().take();
        if let Some(monitor) = monitor {
            monitor.stop();
        }
    }

    /// Lets the waiter see the accepted runs to their ends, and ends it.
    fn stop_waiter(&self) {
        self.shared.accepted.close();
        let waiter = self.waiter.lock().take();
        if let Some(waiter) = waiter
            && waiter.thread().id() != std::thread::current().id()
        {
            // It does not unwind unless the receiver of the events does, against its contract.
            let _ = waiter.join();
        }
    }

    /// Closes a worker that came up although the start failed in a later step.
    fn undo_start(&self) {
        self.stop_waiter();
        let job = Arc::clone(&self.shared);
        let undone = self.owner.run(Call::Start, move |py| {
            let Ok(worker) = job.worker(py, Call::Start) else { return Ok(()) };
            job.api.close(&worker).map_err(|e| BackendError::from(result::failure(py, Call::Close, &e)))?;
            drop(worker);
            drop(job.take_worker());
            Ok(())
        });
        if let Err(error) = undone {
            tracing::warn!(%error, "a worker whose start failed half way could not be closed");
        }
    }

    fn close_started(&self) -> Result<(), BackendError> {
        let call = Call::Close;
        let shared = &self.shared;
        // A thread that builds holds this lock; after it nobody gets in any more.
        drop(shared.build_lock.acquire());
        shared.runs.wait_until_ended();
        self.stop_waiter();
        if shared.phase() == Phase::Closed {
            // Abandoned meanwhile.
            return Ok(());
        }
        shared.empty_store();
        shared.drain_deferred();
        shared.children.look();
        shared.children.closing();
        if shared.children.first_death().is_some() && shared.domains.lock().table.values().next().is_some() {
            // A member's death makes an orderly release wait for minutes and then fail; without peers it fails at
            // once.
            shared.children.end_chips();
        }
        let job = Arc::clone(shared);
        let closed = self.owner.run(call, move |py| {
            let worker = job.worker(py, call)?;
            job.api.close(&worker).map_err(|e| {
                let failure = result::classified(py, call, &e, &job.children, Effect::Unknown);
                BackendError::from(job.note(failure))
            })?;
            drop(worker);
            drop(job.take_worker());
            Ok(())
        });
        self.stop_monitor();
        shared.children.look();
        match closed {
            Ok(()) => {
                shared.children.clear();
                self.clear();
                shared.enter(call, &[Phase::Closing], Phase::Closed)?;
                self.owner.stop(true);
                match shared.deferred_failure.lock().take() {
                    None => Ok(()),
                    Some(error) => Err(error),
                }
            }
            Err(error) if shared.children.first_death().is_some() => {
                // The runtime will never get this right; the reference stays, everything else goes.
                let (_, left) = self.destroy();
                shared.enter(call, &[Phase::Closing], Phase::Closed)?;
                let mut failure = error
                    .runtime()
                    .cloned()
                    .unwrap_or_else(|| RuntimeFailure::new(call, "RuntimeError", error.to_string()));
                // Everything went well but for the exit of a process whose death is known.
                if left.is_empty() && failure.message.contains("child teardown: pid") {
                    return Ok(());
                }
                failure.message = format!(
                    "{}; the worker's processes were ended and its shared memory was removed instead, left: {}",
                    failure.message,
                    if left.is_empty() { "nothing".to_owned() } else { left.join(", ") }
                );
                failure.call = call;
                failure.effect = Effect::Done;
                Err(failure.into())
            }
            Err(error) => Err(error),
        }
    }

    /// Ends the processes by force, removes their shared memory, and gives up the worker without collecting it.
    fn destroy(&self) -> (Vec<ChipId>, Vec<String>) {
        let shared = &*self.shared;
        self.stop_monitor();
        let names: Vec<String> = shared.host.lock().values().filter_map(|b| b.name.clone()).collect();
        shared.children.own_names(names);
        shared.children.own_names(shared.store.lock().names());
        let (ended, left) = shared.children.destroy(FORCED_END);
        self.clear();
        self.owner.stop(false);
        (ended, left)
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
                shared.enter(call, &[Phase::Starting], Phase::Ready)?;
                // The runtime publishes no depth; two is its ceiling.
                Ok(Negotiated::new(Depth::AtMost(2)))
            }
            Err(error) => {
                self.undo_start();
                shared.enter(call, &[Phase::Starting], Phase::Failed)?;
                Err(error)
            }
        }
    }

    fn submit(&self, run: RunId, config: &CallConfig, graph: &mut dyn GraphBuilder) -> Result<(), SubmitError> {
        self.admit(run)?;
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
            let zeroed = shared
                .api
                .create_buffer(worker, nbytes)
                .map_err(|e| result::host_allocation(py, &e, nbytes))
                .and_then(|zeros| {
                    let copied = shared
                        .api
                        .copy_to(worker, &buffer, &zeros)
                        .map_err(|e| shared.failure(py, call, &e, Effect::Done));
                    shared.defer_release(zeros.unbind());
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
            Phase::Starting => shared.require(call, &[Phase::New, Phase::Ready]),
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
        if shared.enter(call, &all, Phase::Closed).is_err() {
            return AbandonReport::default();
        }
        let gone =
            RuntimeFailure::new(Call::Run, "Abandoned", "the backend was abandoned while the run was in flight");
        shared.finish(&gone.clone().with_fatal(true));
        let (ended, mut left) = self.destroy();
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

fn out_of_bounds(call: Call, id: HostBufferId, offset: u64, len: usize, nbytes: u64) -> BackendError {
    BackendError::misuse(call, format!("{len} bytes from byte {offset} on, and {id} has {nbytes}"))
}

impl Shared {
    fn add_host(
        &self,
        object: Py<PyAny>,
        mapping: Arc<Mapping>,
        nbytes: u64,
        read_only: bool,
        name: Option<String>,
    ) -> HostBufferId {
        self.host.lock().add(HostBuffer { mapping, views: Views::new(object), nbytes, read_only, name })
    }
}
