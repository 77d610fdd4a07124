//! The state of one backend, shared by its handle, its threads and the orchestrators of its builds.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use pyo3::intern;
use pyo3::prelude::*;

use super::building;
use super::callables::Callable;
use super::domains::{Domain, Domains, Release};
use super::interpreter;
use super::lock::BuildLock;
use super::memory::Mapping;
use super::options::SimplerOptions;
use super::process::{Children, Death};
use super::queue::Queue;
use super::result;
use super::runs::{Runs, Uses};
use super::store::Store;
use super::sys::Api;
use super::table::Table;
use super::views::{View, Views};
use crate::args::DevicePlace;
pub(crate) use crate::backend::BackendPhase as Phase;
use crate::backend::{RunEvents, RunOutcome};
use crate::capability::Capabilities;
use crate::error::{BackendError, Call, FailureKind, RuntimeFailure};
use crate::ids::{CallableId, ChipId, DeviceBufferId, DomainId, HostBufferId, RunId, ScratchId};

/// A host buffer.
#[derive(Debug)]
pub(crate) struct HostBuffer {
    pub(crate) mapping: Arc<Mapping>,
    pub(crate) views: Views,
    pub(crate) nbytes: u64,
    pub(crate) read_only: bool,
    /// Name in shared memory; none for a buffer made before the start, which has no name.
    pub(crate) name: Option<String>,
}

/// Resident device memory.
#[derive(Debug)]
pub(crate) struct Resident {
    pub(crate) chip: ChipId,
    pub(crate) nbytes: u64,
    pub(crate) views: Views,
}

/// Run-scoped scratch.
#[derive(Debug)]
pub(crate) struct Scratch {
    pub(crate) nbytes: u64,
    pub(crate) views: Views,
}

/// A run that the waiter has to see to its end.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(crate) run: RunId,
    pub(crate) handle: Py<PyAny>,
}

/// Everything one backend knows. Locks in here are leaves (see [`lock`](super::lock)).
pub(crate) struct Shared {
    /// The process that made the backend. A forked child has a copy of it and must not touch it.
    process: u32,
    pub(crate) capabilities: Capabilities,
    pub(crate) options: SimplerOptions,
    pub(crate) api: Api,
    pub(crate) build_lock: BuildLock,
    phase: Mutex<Phase>,
    /// Why no more work is taken, once that is so.
    finished: Mutex<Option<RuntimeFailure>>,
    pub(crate) runs: Runs,
    pub(crate) accepted: Queue<Accepted>,
    pub(crate) events: OnceLock<Arc<dyn RunEvents>>,
    pub(crate) host: Mutex<Table<HostBuffer>>,
    pub(crate) resident: Mutex<Table<Resident>>,
    pub(crate) scratch: Mutex<Table<Scratch>>,
    pub(crate) domains: Mutex<Domains>,
    domain_released: Condvar,
    pub(crate) callables: Mutex<Vec<Arc<Callable>>>,
    /// Handles of registered callables, by the position of the callable; filled at the start.
    pub(crate) handles: Mutex<BTreeMap<u32, Py<PyAny>>>,
    pub(crate) children: Arc<Children>,
    /// The worker from its start on. Never dropped by itself: collecting a worker that is not closed ends the
    /// process. An orderly close takes it out.
    worker: Mutex<Option<ManuallyDrop<Py<PyAny>>>>,
    /// The worker while its start is under way.
    starting: Mutex<Option<Arc<Py<PyAny>>>>,
    started: Condvar,
    /// Releases of domains that are under way outside runs.
    releasing: AtomicUsize,
    /// Released buffers, for the next one of the same size.
    pub(crate) store: Mutex<Store>,
    /// Buffers whose release waits for a moment without runs, with their names in shared memory.
    pub(super) deferred: Mutex<Vec<(Py<PyAny>, Option<String>)>>,
    /// The first failure of such a release; `close` reports it.
    pub(crate) deferred_failure: Mutex<Option<BackendError>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("process", &self.process)
            .field("phase", &self.phase())
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(capabilities: Capabilities, options: SimplerOptions, api: Api) -> Self {
        let store_bytes = options.released_buffer_bytes;
        Self {
            process: std::process::id(),
            capabilities,
            options,
            api,
            build_lock: BuildLock::default(),
            phase: Mutex::new(Phase::New),
            finished: Mutex::default(),
            runs: Runs::default(),
            accepted: Queue::default(),
            events: OnceLock::new(),
            host: Mutex::default(),
            resident: Mutex::default(),
            scratch: Mutex::default(),
            domains: Mutex::default(),
            domain_released: Condvar::new(),
            callables: Mutex::default(),
            handles: Mutex::default(),
            children: Arc::default(),
            worker: Mutex::default(),
            starting: Mutex::default(),
            started: Condvar::new(),
            releasing: AtomicUsize::new(0),
            store: Mutex::new(Store::new(store_bytes)),
            deferred: Mutex::default(),
            deferred_failure: Mutex::default(),
        }
    }

    // ---- Who may call what, when --------------------------------------------------------------------------------

    /// What identifies this backend among the builds of a thread.
    pub(crate) fn key(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Refuses a process that only inherited the backend.
    pub(crate) fn check_process(&self, call: Call) -> Result<(), BackendError> {
        let here = std::process::id();
        if here != self.process {
            return Err(BackendError::misuse(
                call,
                format!(
                    "this backend belongs to process {}, not to its forked child {here}; make one in a program that \
                     the child executes",
                    self.process
                ),
            ));
        }
        Ok(())
    }

    /// Refuses a forked child, and a thread that is attached to the interpreter.
    pub(crate) fn check_caller(&self, call: Call) -> Result<(), BackendError> {
        self.check_process(call)?;
        interpreter::check_detached(call)
    }

    /// Refuses a thread that is inside a build of this backend.
    pub(crate) fn check_outside_build(&self, call: Call) -> Result<(), BackendError> {
        if building::inside(self.key()).is_some() {
            return Err(BackendError::misuse(
                call,
                "called inside a graph build of this backend, for whose end it would wait; call it after the \
                 submission has returned",
            ));
        }
        Ok(())
    }

    pub(crate) fn phase(&self) -> Phase {
        *self.phase.lock()
    }

    /// The one place where the phase changes: from one of `from` to `to`.
    pub(crate) fn enter(&self, call: Call, from: &[Phase], to: Phase) -> Result<Phase, BackendError> {
        let mut phase = self.phase.lock();
        if !from.contains(&phase) {
            return Err(wrong_phase(call, *phase, from));
        }
        Ok(std::mem::replace(&mut *phase, to))
    }

    /// Changes the phase unless somebody has abandoned the backend meanwhile; whether it did.
    pub(crate) fn leave(&self, to: Phase) -> bool {
        let mut phase = self.phase.lock();
        let left = *phase != Phase::Closed;
        if left {
            *phase = to;
        }
        left
    }

    pub(crate) fn require(&self, call: Call, allowed: &[Phase]) -> Result<(), BackendError> {
        let phase = self.phase();
        if allowed.contains(&phase) { Ok(()) } else { Err(wrong_phase(call, phase, allowed)) }
    }

    /// Takes no more work from now on. The first reason counts.
    pub(crate) fn finish(&self, failure: &RuntimeFailure) {
        self.finished.lock().get_or_insert_with(|| failure.clone());
    }

    /// Refuses where the worker is finished, with the reason.
    pub(crate) fn check_usable(&self, call: Call) -> Result<(), BackendError> {
        match &*self.finished.lock() {
            None => Ok(()),
            Some(reason) => {
                let mut failure = reason.clone();
                failure.message = format!("the worker takes no more work since {reason}; close it");
                failure.call = call;
                failure.effect = crate::error::Effect::None;
                failure.fatal = true;
                Err(failure.into())
            }
        }
    }

    /// Takes note of a failure that is final for the worker, in the words of the first chip that died if one did:
    /// later deaths are mostly consequences.
    pub(crate) fn note(&self, mut failure: RuntimeFailure) -> RuntimeFailure {
        if let (FailureKind::ChipDied { exit_code, signal }, Some(chip)) = (failure.kind, failure.chip) {
            self.children.look();
            // The runtime may have reaped it already, in which case only its message tells.
            self.children.died(chip, Death { exit_code, signal });
        }
        if let Some((chip, death)) = self.children.first_death()
            && failure.kind != FailureKind::Deferred
        {
            let told = match failure.kind {
                FailureKind::ChipDied { exit_code, signal } if failure.chip == Some(chip) => (exit_code, signal),
                _ => (None, None),
            };
            failure.kind =
                FailureKind::ChipDied { exit_code: death.exit_code.or(told.0), signal: death.signal.or(told.1) };
            failure.chip = Some(chip);
            failure.fatal = true;
        }
        if failure.fatal {
            self.finish(&failure);
        }
        failure
    }

    /// [`result::classified`], noted.
    pub(crate) fn failure(
        &self,
        py: Python<'_>,
        call: Call,
        error: &PyErr,
        effect: crate::error::Effect,
    ) -> BackendError {
        self.note(result::classified(py, call, error, &self.children, effect)).into()
    }

    /// [`result::validated`], noted.
    pub(crate) fn validated(&self, py: Python<'_>, call: Call, error: &PyErr) -> BackendError {
        match result::validated(py, call, error, &self.children) {
            BackendError::Runtime(failure) => self.note((*failure).clone()).into(),
            other => other,
        }
    }

    // ---- The worker object --------------------------------------------------------------------------------------

    pub(crate) fn set_worker(&self, worker: Py<PyAny>) {
        *self.worker.lock() = Some(ManuallyDrop::new(worker));
    }

    pub(crate) fn worker<'py>(&self, py: Python<'py>, call: Call) -> Result<Bound<'py, PyAny>, BackendError> {
        self.worker
            .lock()
            .as_ref()
            .map(|worker| worker.bind(py).clone())
            .ok_or_else(|| BackendError::misuse(call, "the worker has been closed"))
    }

    /// The start of `worker` is under way, or (`None`) over.
    pub(crate) fn set_starting(&self, worker: Option<Py<PyAny>>) {
        *self.starting.lock() = worker.map(Arc::new);
        self.started.notify_all();
    }

    /// The worker whose start is still under way at `deadline`; `None` as soon as it is over.
    pub(crate) fn starting_by(&self, deadline: Instant) -> Option<Arc<Py<PyAny>>> {
        let mut starting = self.starting.lock();
        while starting.is_some() && !self.started.wait_until(&mut starting, deadline).timed_out() {}
        starting.clone()
    }

    /// The worker, to be dropped: after an orderly close, or where it never started.
    pub(crate) fn take_worker(&self) -> Option<Py<PyAny>> {
        self.worker.lock().take().map(ManuallyDrop::into_inner)
    }

    // ---- Control outside runs -----------------------------------------------------------------------------------

    /// Runs a device-control call, attached. Inside a build on this thread it belongs to that run and must precede
    /// its tasks; elsewhere it needs the device to itself, so no run may be in flight or get in meanwhile.
    pub(crate) fn control<T>(
        &self,
        call: Call,
        work: impl for<'py> FnOnce(Python<'py>, &Bound<'py, PyAny>) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        self.check_caller(call)?;
        if let Some(tasks) = building::inside(self.key()) {
            check_before_tasks(call, tasks)?;
            return Python::attach(|py| work(py, &self.worker(py, call)?));
        }
        self.require(call, &[Phase::Ready])?;
        let result = {
            let _lock = self.build_lock.acquire();
            self.require(call, &[Phase::Ready]).and_then(|()| self.check_idle(call)).and_then(|()| {
                Python::attach(|py| {
                    let result = work(py, &self.worker(py, call)?);
                    self.release_deferred(py);
                    result
                })
            })
        };
        self.drain_deferred();
        result
    }

    fn check_idle(&self, call: Call) -> Result<(), BackendError> {
        match self.runs.in_flight() {
            0 => Ok(()),
            n => Err(BackendError::misuse(
                call,
                format!("{n} run(s) in flight; 0 are allowed: wait for them, or call inside a graph build"),
            )),
        }
    }

    // ---- Places -------------------------------------------------------------------------------------------------

    /// The buffer object of a host buffer.
    pub(crate) fn host_view(
        &self,
        py: Python<'_>,
        call: Call,
        id: HostBufferId,
    ) -> Result<(View, bool), BackendError> {
        self.host.lock().at(id).map(|b| (b.views.view(py, b.nbytes), b.read_only)).ok_or_else(|| unknown(call, id))
    }

    /// The buffer object of a place in device memory, and its chip.
    pub(crate) fn device_view(
        &self,
        py: Python<'_>,
        call: Call,
        place: DevicePlace,
    ) -> Result<(View, ChipId), BackendError> {
        match place {
            DevicePlace::DomainBuffer { domain, chip, buffer } => {
                let domains = self.domains.lock();
                let it = live(&domains, call, domain)?;
                it.view(py, chip, buffer).map(|view| (view, chip)).ok_or_else(|| no_member(call, it, chip, buffer))
            }
            DevicePlace::Window { .. } => Err(BackendError::misuse(
                call,
                "a byte range of a window was asked for, and this backend copies whole named buffers only",
            )),
            DevicePlace::Resident(id) => self
                .resident
                .lock()
                .at(id)
                .map(|r| (r.views.view(py, r.nbytes), r.chip))
                .ok_or_else(|| unknown(call, id)),
        }
    }

    // ---- Releasing domains --------------------------------------------------------------------------------------

    pub(crate) fn doomed(&self, id: DomainId) -> bool {
        self.domains.lock().table.at(id).is_some_and(|d| d.doomed)
    }

    pub(crate) fn doom(&self, ids: impl Iterator<Item = DomainId>) {
        let mut domains = self.domains.lock();
        for id in ids {
            if let Some(domain) = domains.table.at_mut(id) {
                domain.doomed = true;
            }
        }
    }

    /// Releases a domain, once: whoever comes later waits for the first and gets its outcome. Attached; waits
    /// detached.
    pub(crate) fn release_now(&self, py: Python<'_>, id: DomainId) -> Result<(), BackendError> {
        let call = Call::ReleaseDomain;
        /// Counts a release from before it looks for dead members: the monitor frees it from those that die later.
        struct Releasing<'a>(&'a AtomicUsize);
        impl Drop for Releasing<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        self.releasing.fetch_add(1, Ordering::SeqCst);
        let _releasing = Releasing(&self.releasing);
        self.children.look();
        let handle = loop {
            let mut domains = self.domains.lock();
            if domains.state(id).is_none() {
                return Err(unknown(call, id));
            }
            // No longer in the table: freed.
            let Some(domain) = domains.table.at_mut(id) else { return Ok(()) };
            if matches!(domain.release, Release::No)
                && let Some((chip, death)) = self.children.first_death_among(&domain.request.workers)
            {
                drop(domains);
                return Err(self.dead_member(call, id, chip, death));
            }
            match &domain.release {
                Release::Failed(error) => return Err(error.clone()),
                Release::Done => return Ok(()),
                // Its own run frees it in its cleanup; any other run that is registered with it must end first, which
                // the runtime would not wait for.
                Release::No if !self.runs.is_active(domain.owner) && self.runs.uses_domain(id) => {
                    domain.doomed = true;
                    domains.released(id);
                    return Ok(());
                }
                Release::No => {
                    domain.release = Release::Going;
                    break domain.handle.clone_ref(py);
                }
                Release::Going => {
                    drop(domains);
                    py.detach(|| self.wait_for_release(id));
                }
            }
        };
        let result = handle.bind(py).call_method0(intern!(py, "release")).map(drop);
        let flag = |name| handle.bind(py).getattr(name).and_then(|v| v.is_truthy()).unwrap_or(false);
        let (freed, released) = (flag(intern!(py, "freed")), flag(intern!(py, "released")));
        let outcome = result.map_err(|e| self.failure(py, call, &e, crate::error::Effect::Unknown));
        let gone = {
            let mut domains = self.domains.lock();
            if let Some(domain) = domains.table.at_mut(id) {
                domain.release = match &outcome {
                    Ok(()) => Release::Done,
                    Err(error) => Release::Failed(error.clone()),
                };
            }
            if released {
                domains.released(id);
            }
            if freed && outcome.is_ok() { domains.freed(id) } else { None }
        };
        self.domain_released.notify_all();
        drop(gone);
        outcome
    }

    /// Behind a dead member the runtime waits for minutes, and then fails all the same.
    fn dead_member(&self, call: Call, id: DomainId, chip: ChipId, death: Death) -> BackendError {
        let failure = RuntimeFailure::new(
            call,
            "ChipDied",
            format!("{id} cannot be released, because the process of a member has ended; close frees it"),
        )
        .with_kind(FailureKind::ChipDied { exit_code: death.exit_code, signal: death.signal })
        .on_chip(chip)
        .with_fatal(true);
        self.note(failure).into()
    }

    /// Whether somebody waits for chips: a run that is being built or in flight, or a release.
    pub(crate) fn waits_for_chips(&self) -> bool {
        !self.runs.idle() || self.releasing.load(Ordering::SeqCst) > 0
    }

    fn wait_for_release(&self, id: DomainId) {
        let mut domains = self.domains.lock();
        while domains.table.at(id).is_some_and(|d| matches!(d.release, Release::Going)) {
            self.domain_released.wait(&mut domains);
        }
    }

    // ---- The end of runs ----------------------------------------------------------------------------------------

    /// Brings the domain table up to date with the runtime after a run has ended (or its build has failed), and
    /// drops the run's scratch and buffers. Attached.
    pub(crate) fn settle(&self, py: Python<'_>, uses: &Uses) {
        let handles: Vec<(DomainId, Py<PyAny>)> = {
            let domains = self.domains.lock();
            uses.domains
                .iter()
                .filter_map(|d| domains.table.at(d.id).map(|domain| (d.id, domain.handle.clone_ref(py))))
                .collect()
        };
        for (id, handle) in handles {
            let flag = |name| handle.bind(py).getattr(name).and_then(|v| v.is_truthy()).unwrap_or(false);
            if flag("freed") {
                let domain = self.domains.lock().freed(id);
                drop(domain);
            } else if flag("released") {
                self.domains.lock().released(id);
            }
        }
        let gone: Vec<Option<Scratch>> = {
            let mut scratch = self.scratch.lock();
            uses.scratch.iter().map(|id: &ScratchId| scratch.take(*id)).collect()
        };
        drop(gone);
        for id in &uses.temporary {
            let buffer = self.host.lock().take(*id);
            if let Some(buffer) = buffer
                && let Some(refused) = { self.store.lock().put(buffer) }
            {
                self.defer_release(refused.views.into_buffer(), refused.name);
            }
        }
    }

    /// Reports the end of a run, once. Detached, holding nothing.
    pub(crate) fn report(&self, run: RunId, outcome: RunOutcome) {
        if let Some(events) = self.events.get() {
            events.ended(run, outcome);
        }
    }
}

pub(crate) fn wrong_phase(call: Call, phase: Phase, allowed: &[Phase]) -> BackendError {
    let allowed: Vec<String> = allowed.iter().map(|p| format!("{p:?}")).collect();
    BackendError::misuse(call, format!("the backend is {phase:?}, and must be {}", allowed.join(" or ")))
}

/// Control must come before the tasks of its run.
pub(crate) fn check_before_tasks(call: Call, tasks: bool) -> Result<(), BackendError> {
    if tasks {
        return Err(BackendError::misuse(
            call,
            "device control after a task of the same run, where their order is not defined; do it before the first \
             task",
        ));
    }
    Ok(())
}

pub(crate) fn unknown(call: Call, id: impl std::fmt::Display) -> BackendError {
    BackendError::misuse(call, format!("{id} is not known here or was released; use an id that is live"))
}

/// A domain that can be used.
pub(crate) fn live(domains: &Domains, call: Call, id: DomainId) -> Result<&Domain, BackendError> {
    domains.table.at(id).filter(|d| !d.released).ok_or_else(|| unknown(call, id))
}

pub(crate) fn no_member(call: Call, domain: &Domain, chip: ChipId, buffer: u32) -> BackendError {
    BackendError::misuse(
        call,
        format!(
            "domain {:?} has members {:?} and {} buffer(s); asked for buffer {buffer} on {chip}",
            domain.name,
            domain.request.workers,
            domain.request.buffers.len()
        ),
    )
}

/// Looking up what ids name.
impl Shared {
    /// A registered callable.
    pub(crate) fn callable(&self, call: Call, id: CallableId) -> Result<Arc<Callable>, BackendError> {
        let callables = self.callables.lock();
        callables
            .get(id.index() as usize)
            .filter(|_| id.generation() == 1)
            .cloned()
            .ok_or_else(|| unknown(call, id))
    }

    /// The runtime's handle of a registered callable.
    pub(crate) fn handle<'py>(
        &self,
        py: Python<'py>,
        call: Call,
        id: CallableId,
    ) -> Result<Bound<'py, PyAny>, BackendError> {
        let handles = self.handles.lock();
        handles.get(&id.index()).map(|h| h.bind(py).clone()).ok_or_else(|| unknown(call, id))
    }

    pub(crate) fn check_chip(&self, call: Call, chip: ChipId) -> Result<(), BackendError> {
        let chips = self.capabilities.chips();
        if chip.0 < chips {
            return Ok(());
        }
        Err(BackendError::misuse(call, format!("{chip} does not exist; chips are 0..{chips}")))
    }

    /// Removes resident memory from the table.
    pub(crate) fn take_resident(&self, call: Call, id: DeviceBufferId) -> Result<Resident, BackendError> {
        self.resident.lock().take(id).ok_or_else(|| unknown(call, id))
    }
}
