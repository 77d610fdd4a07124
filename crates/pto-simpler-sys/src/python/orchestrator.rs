//! The orchestrator of one graph build.
//!
//! The builder runs detached; each call here attaches by itself. Copies go one after the other, also those of a
//! batch: the runtime takes control only from the thread that its callback runs on, and from any other thread such a
//! call would wait for the end of the very build that makes it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::args::{Target, check_counts};
use super::callables::Callable;
use super::domains::Domain;
use super::room;
use super::runs::DomainUse;
use super::shared::{Scratch, Shared, check_before_tasks, unknown};
use super::views::Views;
use crate::allocation::DomainAllocation;
use crate::args::{CopySource, CopyTo, DevicePlace, TaskArgs};
use crate::callable::CallableKind;
use crate::capability::Retention;
use crate::config::CallConfig;
use crate::error::{BackendError, BuildFailed, Call, CallbackError, Effect};
use crate::ids::{CallableId, ChipId, DomainId, HostBufferId, RunId, ScratchId};
use crate::orchestrator::{CopyResult, EntryCall, EntryHost, Orchestrator};
use crate::request::DomainRequest;

/// The orchestrator that a builder sees.
#[derive(Debug)]
pub(crate) struct SimplerOrchestrator<'a> {
    pub(super) shared: &'a Shared,
    pub(super) run: RunId,
    /// The runtime's orchestrator, and the configuration of this run.
    pub(super) object: Py<PyAny>,
    config: Py<PyAny>,
    pub(super) tasks: Rc<Cell<bool>>,
    depth: Cell<u32>,
    /// Domains that are taken out of the runtime's own release set once the build has succeeded (legacy retention).
    detach: RefCell<Vec<DomainId>>,
}

impl<'a> SimplerOrchestrator<'a> {
    pub(crate) fn new(
        shared: &'a Shared,
        run: RunId,
        object: Py<PyAny>,
        config: Py<PyAny>,
        tasks: Rc<Cell<bool>>,
    ) -> Self {
        Self { shared, run, object, config, tasks, depth: Cell::new(0), detach: RefCell::default() }
    }

    /// What is left to do once the builder has succeeded, still inside the callback: legacy retention.
    ///
    /// Until here the domains belong to the runtime's release set of this run, so a build that failed frees them.
    pub(crate) fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let ids = self.detach.take();
        for id in ids {
            let handle =
                self.shared.domains.lock().table.at(id).map(|d| (Arc::clone(&d.name), d.handle.clone_ref(py)));
            let Some((name, handle)) = handle else { continue };
            super::legacy::detach(py, self.shared, &name, handle.bind(py))?;
        }
        Ok(())
    }

    /// Takes note that this run uses a domain; a later note of the same domain replaces the earlier one.
    fn uses(&self, id: DomainId, keep: bool) {
        self.shared.runs.uses(self.run, |uses| match uses.domains.iter_mut().find(|d| d.id == id) {
            Some(known) => known.keep = keep,
            None => uses.domains.push(DomainUse { id, keep }),
        });
    }

    /// Checks of a new domain that the runtime lacks.
    fn check_new(&self, call: Call, request: &DomainRequest) -> Result<(), BackendError> {
        let limit = self.shared.capabilities.limits.ranks as usize;
        if request.workers.len() > limit {
            return Err(BackendError::misuse(
                call,
                format!("{} workers asked for; a domain has at most {limit} ranks", request.workers.len()),
            ));
        }
        let chips = self.shared.capabilities.chips();
        if chips as usize > limit {
            return Err(BackendError::misuse(
                call,
                format!(
                    "the worker has {chips} chips, all of which the runtime joins for its first domain, and at most \
                     {limit} can be joined; prepare a worker of at most {limit} chips"
                ),
            ));
        }
        room::check(call, &self.shared.capabilities.platform, request).inspect_err(|_| {
            // What released buffers hold may be what is missing next time.
            self.shared.empty_store();
        })
    }

    /// Puts a domain that the runtime has just returned into the table.
    fn adopt(
        &self,
        py: Python<'_>,
        call: Call,
        name: &str,
        request: &DomainRequest,
        handle: &Bound<'_, PyAny>,
    ) -> Result<DomainId, BackendError> {
        let domain = Domain::read(py, self.run, name, request, handle)
            .map_err(|e| self.shared.failure(py, call, &e, Effect::Done))?;
        let id = self.shared.domains.lock().add(domain);
        Ok(id)
    }

    fn reply(&self, call: Call, id: DomainId, reply: &mut DomainAllocation) -> Result<(), BackendError> {
        let domains = self.shared.domains.lock();
        domains.table.at(id).ok_or_else(|| unknown(call, id))?.describe(id, reply);
        Ok(())
    }

    fn allocate(
        &self,
        call: Call,
        name: &str,
        request: &DomainRequest,
        keep: bool,
    ) -> Result<DomainId, BackendError> {
        check_before_tasks(call, self.tasks.get())?;
        self.check_new(call, request)?;
        let id = Python::attach(|py| {
            let arguments = self
                .shared
                .api
                .domain_arguments(py, name, request)
                .map_err(|e| self.shared.validated(py, call, &e))?;
            let handle = self
                .shared
                .api
                .allocate_domain(self.object.bind(py), &arguments)
                .map_err(|e| self.shared.validated(py, call, &e))?;
            self.adopt(py, call, name, request, &handle)
        })?;
        self.uses(id, keep);
        Ok(id)
    }

    /// The public retention call: the runtime validates, finds or allocates, and registers with this run's fence.
    fn public_retention(&self, name: &str, request: &DomainRequest, keep: bool) -> Result<DomainId, BackendError> {
        let call = Call::GetOrAllocateDomain;
        let known = self.shared.domains.lock().names.get(name).copied();
        if known.is_none() {
            check_before_tasks(call, self.tasks.get())?;
            self.check_new(call, request)?;
        }
        let id = Python::attach(|py| {
            let shared = self.shared;
            let arguments =
                shared.api.domain_arguments(py, name, request).map_err(|e| shared.validated(py, call, &e))?;
            arguments
                .set_item(intern!(py, "retain_after_run"), keep)
                .map_err(|e| shared.validated(py, call, &e))?;
            let handle = shared
                .api
                .get_or_allocate_domain(self.object.bind(py), &arguments)
                .map_err(|e| shared.validated(py, call, &e))?;
            let same = known
                .filter(|id| shared.domains.lock().table.at(*id).is_some_and(|d| d.handle.bind(py).is(&handle)));
            match same {
                Some(id) => Ok(id),
                None => self.adopt(py, call, name, request, &handle),
            }
        })?;
        self.uses(id, keep);
        Ok(id)
    }

    /// Retention through the private hooks: our own table finds and validates, the runtime only allocates.
    fn legacy_retention(&self, name: &str, request: &DomainRequest, keep: bool) -> Result<DomainId, BackendError> {
        let call = Call::GetOrAllocateDomain;
        let known = {
            let domains = self.shared.domains.lock();
            match domains.names.get(name).and_then(|id| domains.table.at(*id).map(|d| (*id, d))) {
                Some((id, domain)) if domain.request == *request => Some(id),
                Some((_, domain)) => {
                    return Err(BackendError::misuse(
                        call,
                        format!(
                            "domain {name:?} is retained as {:?}; asked for as {request:?}; ask as the first time",
                            domain.request
                        ),
                    ));
                }
                None => None,
            }
        };
        if let Some(id) = known {
            self.uses(id, keep);
            return Ok(id);
        }
        let id = self.allocate(call, name, request, keep)?;
        if keep {
            self.detach.borrow_mut().push(id);
        }
        Ok(id)
    }

    fn copy(&self, py: Python<'_>, copy: &CopyTo) -> Result<(), BackendError> {
        copy_to(py, self.shared, self.object.bind(py), copy)
    }

    fn callable(&self, call: Call, id: CallableId, kind: CallableKind) -> Result<Arc<Callable>, BackendError> {
        let callable = self.shared.callable(call, id)?;
        if callable.kind != kind {
            return Err(BackendError::misuse(
                call,
                format!("{:?} is a {:?} callable, and a {kind:?} callable is needed", callable.name, callable.kind),
            ));
        }
        Ok(callable)
    }

    fn config<'py>(
        &self,
        py: Python<'py>,
        call: Call,
        config: Option<&CallConfig>,
    ) -> Result<Bound<'py, PyAny>, BackendError> {
        match config {
            None => Ok(self.config.bind(py).clone()),
            Some(config) => {
                config.check(call)?;
                self.shared.api.call_config(py, config).map_err(|e| self.shared.validated(py, call, &e))
            }
        }
    }

    /// Takes note of a task, before it is handed over: whatever becomes of it, control can no longer be ordered.
    fn task(&self, buffers: Vec<HostBufferId>) {
        self.tasks.set(true);
        if !buffers.is_empty() {
            self.shared.runs.uses(self.run, |uses| uses.buffers.extend(buffers));
        }
    }
}

/// `copy_to`, by the orchestrator or the worker.
pub(crate) fn copy_to(
    py: Python<'_>,
    shared: &Shared,
    by: &Bound<'_, PyAny>,
    copy: &CopyTo,
) -> Result<(), BackendError> {
    let call = Call::CopyTo;
    let CopySource::Host(source) = copy.src else {
        return Err(BackendError::misuse(
            call,
            "a device fill was asked for, and this backend copies from host buffers only",
        ));
    };
    let (host, _) = shared.host_view(py, call, source)?;
    let (device, _) = shared.device_view(py, call, copy.dst)?;
    check_copy(call, copy.nbytes, host.nbytes, device.nbytes)?;
    shared
        .api
        .copy_to(by, device.buffer.bind(py), host.buffer.bind(py))
        .map_err(|e| shared.failure(py, call, &e, Effect::Unknown))
}

/// `copy_from`, by the orchestrator or the worker.
pub(crate) fn copy_from(
    py: Python<'_>,
    shared: &Shared,
    by: &Bound<'_, PyAny>,
    dst: HostBufferId,
    src: DevicePlace,
    nbytes: u64,
) -> Result<(), BackendError> {
    let call = Call::CopyFrom;
    let (host, read_only) = shared.host_view(py, call, dst)?;
    if read_only {
        return Err(BackendError::misuse(call, format!("{dst} is read-only; copy into another buffer")));
    }
    let (device, _) = shared.device_view(py, call, src)?;
    check_copy(call, nbytes, host.nbytes, device.nbytes)?;
    shared
        .api
        .copy_from(by, host.buffer.bind(py), device.buffer.bind(py))
        .map_err(|e| shared.failure(py, call, &e, Effect::Unknown))
}

/// The runtime copies exactly as many bytes as the host buffer holds.
fn check_copy(call: Call, nbytes: u64, host: u64, device: u64) -> Result<(), BackendError> {
    if nbytes != host {
        return Err(BackendError::misuse(
            call,
            format!("{nbytes} bytes asked for; this backend copies whole host buffers, and this one has {host}"),
        ));
    }
    if nbytes > device {
        return Err(BackendError::misuse(call, format!("{nbytes} bytes asked for; the device side has {device}")));
    }
    Ok(())
}

/// The chip that a copy goes to, which decides what a failure skips.
fn chip_of(shared: &Shared, place: DevicePlace) -> Option<ChipId> {
    match place {
        DevicePlace::DomainBuffer { chip, .. } | DevicePlace::Window { chip, .. } => Some(chip),
        DevicePlace::Resident(id) => shared.resident.lock().at(id).map(|r| r.chip),
    }
}

impl Orchestrator for SimplerOrchestrator<'_> {
    fn run(&self) -> RunId {
        self.run
    }

    fn allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        let id = self.allocate(Call::AllocateDomain, name, request, false)?;
        self.reply(Call::AllocateDomain, id, reply)
    }

    fn get_or_allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        retain_after_run: bool,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        let call = Call::GetOrAllocateDomain;
        let id = match &self.shared.capabilities.retention {
            Retention::Public => self.public_retention(name, request, retain_after_run)?,
            Retention::PrivateHooks => self.legacy_retention(name, request, retain_after_run)?,
            Retention::Unsupported { missing } => {
                return Err(BackendError::misuse(
                    call,
                    format!("this runtime has no {missing}; choose legacy retention in the options"),
                ));
            }
        };
        self.reply(call, id, reply)
    }

    fn copy_to(&self, copy: &CopyTo) -> Result<(), BackendError> {
        check_before_tasks(Call::CopyTo, self.tasks.get())?;
        Python::attach(|py| self.copy(py, copy))
    }

    fn copy_from(&self, dst: HostBufferId, src: DevicePlace, nbytes: u64) -> Result<(), BackendError> {
        check_before_tasks(Call::CopyFrom, self.tasks.get())?;
        Python::attach(|py| copy_from(py, self.shared, self.object.bind(py), dst, src, nbytes))
    }

    fn copy_batch(&self, copies: &[CopyTo], results: &mut Vec<CopyResult>) -> Result<(), BackendError> {
        results.clear();
        check_before_tasks(Call::CopyTo, self.tasks.get())?;
        let mut failed: Vec<ChipId> = Vec::new();
        Python::attach(|py| {
            for copy in copies {
                let chip = chip_of(self.shared, copy.dst);
                if chip.is_some_and(|chip| failed.contains(&chip)) {
                    results.push(CopyResult::Skipped);
                    continue;
                }
                match self.copy(py, copy) {
                    Ok(()) => results.push(CopyResult::Done),
                    Err(error) => {
                        failed.extend(chip);
                        results.push(CopyResult::Failed(error));
                    }
                }
            }
        });
        Ok(())
    }

    fn submit_next_level(
        &self,
        callable: CallableId,
        args: &TaskArgs,
        config: Option<&CallConfig>,
        worker: ChipId,
    ) -> Result<(), BackendError> {
        let call = Call::SubmitNextLevel;
        let it = self.callable(call, callable, CallableKind::Chip)?;
        self.shared.check_chip(call, worker)?;
        let target = Target::Chip(worker);
        check_counts(self.shared, call, &it, args, target)?;
        Python::attach(|py| {
            let mut buffers = Vec::new();
            let object = self.shared.task_args(py, call, args, target, &mut buffers)?;
            let config = self.config(py, call, config)?;
            let handle = self.shared.handle(py, call, callable)?;
            self.task(buffers);
            self.shared
                .api
                .submit_next_level(self.object.bind(py), &handle, &object, &config, worker.0)
                .map_err(|e| self.shared.failure(py, call, &e, Effect::Unknown))
        })
    }

    fn submit_next_level_group(
        &self,
        callable: CallableId,
        args: &[TaskArgs],
        config: Option<&CallConfig>,
        workers: &[ChipId],
    ) -> Result<(), BackendError> {
        let call = Call::SubmitNextLevelGroup;
        let it = self.callable(call, callable, CallableKind::Chip)?;
        if workers.is_empty() || workers.len() != args.len() {
            return Err(BackendError::misuse(
                call,
                format!("{} workers and {} argument lists; give as many, at least 1", workers.len(), args.len()),
            ));
        }
        for (position, worker) in workers.iter().enumerate() {
            self.shared.check_chip(call, *worker)?;
            if workers[..position].contains(worker) {
                return Err(BackendError::misuse(call, format!("{worker} is named twice; name each worker once")));
            }
        }
        for (args, worker) in args.iter().zip(workers) {
            check_counts(self.shared, call, &it, args, Target::Chip(*worker))?;
        }
        Python::attach(|py| {
            let mut buffers = Vec::new();
            let objects = PyList::empty(py);
            for (args, worker) in args.iter().zip(workers) {
                let object = self.shared.task_args(py, call, args, Target::Chip(*worker), &mut buffers)?;
                objects.append(object).map_err(|e| self.shared.validated(py, call, &e))?;
            }
            let config = self.config(py, call, config)?;
            let handle = self.shared.handle(py, call, callable)?;
            let chips =
                PyList::new(py, workers.iter().map(|w| w.0)).map_err(|e| self.shared.validated(py, call, &e))?;
            self.task(buffers);
            self.shared
                .api
                .submit_next_level_group(self.object.bind(py), &handle, &objects, &config, &chips)
                .map_err(|e| self.shared.failure(py, call, &e, Effect::Unknown))
        })
    }

    fn submit_sub(&self, callable: CallableId, args: &TaskArgs) -> Result<(), BackendError> {
        let call = Call::SubmitSub;
        let it = self.callable(call, callable, CallableKind::Sub)?;
        check_counts(self.shared, call, &it, args, Target::Sub)?;
        Python::attach(|py| {
            let mut buffers = Vec::new();
            let object = self.shared.task_args(py, call, args, Target::Sub, &mut buffers)?;
            let handle = self.shared.handle(py, call, callable)?;
            self.task(buffers);
            self.shared
                .api
                .submit_sub(self.object.bind(py), &handle, &object)
                .map_err(|e| self.shared.failure(py, call, &e, Effect::Unknown))
        })
    }

    fn scope(&self, body: &mut dyn FnMut() -> Result<(), BuildFailed>) -> Result<(), CallbackError> {
        let limit = self.shared.capabilities.limits.scope_depth;
        if self.depth.get() >= limit {
            return Err(BackendError::misuse(Call::Scope, format!("scopes nest at most {limit} deep")).into());
        }
        Python::attach(|py| {
            self.shared
                .api
                .scope_begin(self.object.bind(py))
                .map_err(|e| self.shared.failure(py, Call::Scope, &e, Effect::Unknown))
        })?;
        self.depth.set(self.depth.get() + 1);
        let result = body();
        self.depth.set(self.depth.get() - 1);
        let closed = Python::attach(|py| {
            self.shared
                .api
                .scope_end(self.object.bind(py))
                .map_err(|e| self.shared.failure(py, Call::Scope, &e, Effect::Unknown))
        });
        result?;
        Ok(closed?)
    }

    fn alloc(&self, nbytes: u64) -> Result<ScratchId, BackendError> {
        let call = Call::AllocScratch;
        let Some(count) = u32::try_from(nbytes).ok().filter(|n| *n > 0) else {
            return Err(BackendError::misuse(
                call,
                format!("{nbytes} bytes asked for; scratch takes 1 to {} bytes", u32::MAX),
            ));
        };
        let id = Python::attach(|py| {
            let buffer = self
                .shared
                .api
                .alloc(self.object.bind(py), count)
                .map_err(|e| self.shared.failure(py, call, &e, Effect::Unknown))?;
            let scratch = Scratch { nbytes, views: Views::new(buffer.unbind()) };
            Ok::<ScratchId, BackendError>(self.shared.scratch.lock().add(scratch))
        })?;
        self.shared.runs.uses(self.run, |uses| uses.scratch.push(id));
        Ok(id)
    }

    fn run_entry(
        &self,
        entry: CallableId,
        call: &EntryCall<'_>,
        host: &dyn EntryHost,
    ) -> Result<(), CallbackError> {
        let it = self.callable(Call::RunEntry, entry, CallableKind::Entry)?;
        super::entry::run(self, &it, entry, call, host)
    }
}
