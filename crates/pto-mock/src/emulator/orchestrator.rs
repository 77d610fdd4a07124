//! The graph of one run, as its builder sees it.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pto_simpler_sys::{
    Access, BackendError, BuildFailed, Call, CallConfig, CallableId, CallableKind, CallbackError, ChipId,
    CopyResult, CopyTo, DevicePlace, DomainAllocation, DomainRequest, Effect, EntryCall, EntryHost, HostBufferId,
    Orchestrator, RunId, RuntimeFailure, ScratchId, TaskArgs, TensorArg, TensorPlace,
};

use super::Core;
use super::chip::{Group, Task, panic_text};
use super::control::host_region;
use super::state::{Callable, HostMemory, State};
use super::window::Region;
use crate::faults::Fired;
use crate::journal::EventKind;
use crate::kernel::{Code, EntryContext, TaskContext};

/// Size of an argument blob: a header, and so much per tensor and scalar. Chosen so that the default limit of
/// 64,016 bytes holds 500 tensors (Simpler takes 400 and fails at 1,000).
const BLOB_HEADER_BYTES: u64 = 16;
const BLOB_TENSOR_BYTES: u64 = 128;
const BLOB_SCALAR_BYTES: u64 = 8;

/// The orchestrator of one build. Not `Sync`: only the building thread has it.
pub(crate) struct Graph<'a> {
    core: &'a Core,
    run: RunId,
    depth: Cell<u32>,
}

impl fmt::Debug for Graph<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("run", &self.run).finish_non_exhaustive()
    }
}

/// A task whose arguments have been checked.
struct Checked {
    chip: Option<ChipId>,
    tensors: Vec<Region>,
    scalars: Vec<u64>,
    hosts: Vec<HostBufferId>,
}

impl<'a> Graph<'a> {
    pub(crate) fn new(core: &'a Core, run: RunId) -> Self {
        Self { core, run, depth: Cell::new(0) }
    }

    fn callable(
        &self,
        state: &State,
        call: Call,
        id: CallableId,
        kind: CallableKind,
    ) -> Result<Callable, BackendError> {
        let callable = state.callables.get(id).cloned();
        let callable = callable
            .ok_or_else(|| BackendError::misuse(call, format!("{id} is not registered; register it first")))?;
        if callable.kind != kind {
            let message =
                format!("{:?} is a {:?} callable; this call takes {kind:?}", callable.name, callable.kind);
            return Err(BackendError::misuse(call, message));
        }
        Ok(callable)
    }

    /// Checks the arguments of one task and finds their memory.
    fn check(
        &self,
        state: &State,
        call: Call,
        callable: &Callable,
        args: &TaskArgs,
        chip: Option<ChipId>,
    ) -> Result<Checked, BackendError> {
        let misuse = |message: String| Err(BackendError::misuse(call, message));
        let (tensors, scalars) = (args.tensors().len() as u64, args.scalars().len() as u64);
        let limits = &self.core.capabilities.limits;
        if chip.is_some() && tensors > u64::from(limits.tensors) {
            return misuse(format!("{tensors} tensors; at most {} are permitted", limits.tensors));
        }
        if chip.is_some() && scalars > u64::from(limits.scalars) {
            return misuse(format!("{scalars} scalars; at most {} are permitted", limits.scalars));
        }
        let blob = BLOB_HEADER_BYTES + BLOB_TENSOR_BYTES * tensors + BLOB_SCALAR_BYTES * scalars;
        if blob > limits.argument_bytes {
            return misuse(format!(
                "the arguments take {blob} bytes; at most {} are permitted",
                limits.argument_bytes
            ));
        }
        if let Some(signature) = &callable.signature {
            let (takes, scalar_count) = (signature.tensors.len() as u64, u64::from(signature.scalars));
            if (tensors, scalars) != (takes, scalar_count) {
                return misuse(format!(
                    "{:?} takes {takes} tensors and {scalar_count} scalars; {tensors} and {scalars} were given",
                    callable.name
                ));
            }
        }
        let mut checked = Checked {
            chip,
            tensors: Vec::with_capacity(args.tensors().len()),
            scalars: args.scalars().to_vec(),
            hosts: Vec::new(),
        };
        for (index, tensor) in args.tensors().iter().enumerate() {
            let region = self.tensor(state, call, index, tensor, chip)?;
            checked.tensors.push(region);
            if let TensorPlace::Host(id) = tensor.place {
                checked.hosts.push(id);
            }
        }
        Ok(checked)
    }

    fn tensor(
        &self,
        state: &State,
        call: Call,
        index: usize,
        tensor: &TensorArg,
        chip: Option<ChipId>,
    ) -> Result<Region, BackendError> {
        let misuse = |message: String| BackendError::misuse(call, format!("tensor {index} {message}"));
        let on_device = || match chip {
            Some(chip) => Ok(chip),
            None => Err(misuse("lives on a device; a sub-worker takes host memory".to_owned())),
        };
        let elsewhere = |owner: ChipId, here: ChipId| misuse(format!("lives on {owner}; the task runs on {here}"));
        let region = match tensor.place {
            TensorPlace::DomainBuffer { domain, chip: owner, buffer } => {
                let here = on_device()?;
                if owner != here {
                    return Err(elsewhere(owner, here));
                }
                self.core.domain_buffer(state, call, domain, owner, buffer)?
            }
            TensorPlace::Resident(id) => {
                let here = on_device()?;
                let resident = state.residents.get(id);
                let resident = resident
                    .ok_or_else(|| misuse(format!("names {id}, which is not contained in a live allocation")))?;
                if resident.chip != here {
                    return Err(elsewhere(resident.chip, here));
                }
                resident.region.clone()
            }
            TensorPlace::Host(id) => host_region(state, call, id)?,
            TensorPlace::Scratch(id) => match state.scratch.get(id) {
                Some(memory) if state.run(self.run).is_some_and(|run| run.scratch.contains(&id)) => {
                    memory.region.clone()
                }
                _ => return Err(misuse(format!("names {id}, which is no scratch of this run"))),
            },
        };
        let (offset, size) = (tensor.byte_offset, tensor.dtype.size());
        if !offset.is_multiple_of(size) {
            return Err(misuse(format!("starts at byte {offset}; it must be a multiple of {size}")));
        }
        let part = tensor.nbytes().and_then(|nbytes| region.part(offset, nbytes));
        let mut part = part.ok_or_else(|| {
            let asked = tensor.nbytes().map_or_else(|| "more than 64 bits of".to_owned(), |n| n.to_string());
            misuse(format!("spans {asked} bytes from byte {offset} on; the place has {} bytes", region.len))
        })?;
        part.writable &= tensor.access != Access::Input;
        Ok(part)
    }

    /// Queues checked tasks.
    fn push(&self, callable_id: CallableId, callable: &Callable, tasks: Vec<Checked>, grouped: bool) {
        let core = self.core;
        let members: Vec<ChipId> = tasks.iter().filter_map(|task| task.chip).collect();
        let group = grouped.then(|| Arc::new(Group { members, started: AtomicBool::new(false) }));
        let mut state = core.state.lock();
        let Some(run) = state.run_mut(self.run) else { return };
        let interrupt = Arc::clone(&run.interrupt);
        let failed = run.failure.is_some();
        run.tasks_seen = true;
        for task in tasks {
            let (chip, run) = (task.chip, self.run);
            core.journal.record(EventKind::TaskSubmit { run, chip, callable: callable_id });
            if failed {
                core.journal.record(EventKind::TaskCancel { run, chip, callable: callable_id });
                continue;
            }
            for id in task.hosts {
                if let Some(memory) = state.hosts.get_mut(id) {
                    memory.users += 1;
                    if let Some(run) = state.run_mut(run) {
                        run.hosts.push(id);
                    }
                }
            }
            if let Some(run) = state.run_mut(run) {
                run.pending += 1;
            }
            let queued = Task {
                run,
                chip,
                callable: callable_id,
                name: Arc::clone(&callable.name),
                code: callable.code.clone(),
                context: TaskContext {
                    run,
                    tensors: task.tensors,
                    scalars: task.scalars,
                    board: Arc::clone(&core.board),
                    interrupt: Arc::clone(&interrupt),
                    contexts: Arc::clone(&core.contexts),
                },
                group: group.clone(),
            };
            match chip {
                Some(chip) => {
                    if let Some(lane) = state.lane_mut(chip) {
                        lane.queue.push_back(queued);
                    }
                }
                None => state.sub_queue.push_back(queued),
            }
        }
        drop(state);
        core.wake_all_lanes();
    }

    fn control(&self, call: Call) -> Result<(), BackendError> {
        self.core.control(self.run, call)
    }
}

impl Orchestrator for Graph<'_> {
    fn run(&self) -> RunId {
        self.run
    }

    fn allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        self.core.allocate(Call::AllocateDomain, self.run, name, request, None, reply)
    }

    fn get_or_allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        retain_after_run: bool,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        self.core.get_or_allocate(self.run, name, request, retain_after_run, reply)
    }

    fn copy_to(&self, copy: &CopyTo) -> Result<(), BackendError> {
        self.control(Call::CopyTo)?;
        self.core.copy_to(Some(self.run), copy)
    }

    fn copy_from(&self, dst: HostBufferId, src: DevicePlace, nbytes: u64) -> Result<(), BackendError> {
        self.control(Call::CopyFrom)?;
        self.core.copy_from(Some(self.run), dst, src, nbytes)
    }

    fn copy_batch(&self, copies: &[CopyTo], results: &mut Vec<CopyResult>) -> Result<(), BackendError> {
        results.clear();
        self.control(Call::CopyTo)?;
        self.core.copy_batch(self.run, copies, results);
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
        config.map_or(Ok(()), |config| config.check(call))?;
        let (entry, checked) = {
            let state = self.core.state.lock();
            self.core.check_building(&state, self.run, call)?;
            let entry = self.callable(&state, call, callable, CallableKind::Chip)?;
            self.core.check_chip(call, worker)?;
            let checked = self.check(&state, call, &entry, args, Some(worker))?;
            (entry, checked)
        };
        let fired = self.core.faults.single(call, worker);
        self.core.faults.around(fired, || {
            self.push(callable, &entry, vec![checked], false);
            Ok(())
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
        config.map_or(Ok(()), |config| config.check(call))?;
        if workers.is_empty() || args.len() != workers.len() {
            let (a, w) = (args.len(), workers.len());
            let message = format!("{a} argument lists for {w} workers; give one list per worker, at least 1");
            return Err(BackendError::misuse(call, message));
        }
        if let Some(twice) = workers.iter().enumerate().find(|(i, chip)| workers[..*i].contains(chip)) {
            let message = format!("workers contains duplicates: {} stands twice", twice.1);
            return Err(BackendError::misuse(call, message));
        }
        let (entry, tasks) = {
            let state = self.core.state.lock();
            self.core.check_building(&state, self.run, call)?;
            let entry = self.callable(&state, call, callable, CallableKind::Chip)?;
            let mut tasks = Vec::with_capacity(workers.len());
            for (args, worker) in args.iter().zip(workers) {
                self.core.check_chip(call, *worker)?;
                tasks.push(self.check(&state, call, &entry, args, Some(*worker))?);
            }
            (entry, tasks)
        };
        let whole = self.core.faults.whole(call);
        let parts = workers.iter().map(|chip| self.core.faults.part(call, *chip));
        let fired: Option<Fired> = whole.into_iter().chain(parts.flatten()).next();
        self.core.faults.around(fired, || {
            self.push(callable, &entry, tasks, true);
            Ok(())
        })
    }

    fn submit_sub(&self, callable: CallableId, args: &TaskArgs) -> Result<(), BackendError> {
        let call = Call::SubmitSub;
        let (entry, checked) = {
            let state = self.core.state.lock();
            self.core.check_building(&state, self.run, call)?;
            let entry = self.callable(&state, call, callable, CallableKind::Sub)?;
            if state.subs.is_empty() {
                return Err(BackendError::misuse(call, "the worker has 0 sub-workers; start it with at least 1"));
            }
            let checked = self.check(&state, call, &entry, args, None)?;
            (entry, checked)
        };
        self.core.faults.around(self.core.faults.whole(call), || {
            self.push(callable, &entry, vec![checked], false);
            Ok(())
        })
    }

    fn scope(&self, body: &mut dyn FnMut() -> Result<(), BuildFailed>) -> Result<(), CallbackError> {
        let call = Call::Scope;
        self.core.check_building(&self.core.state.lock(), self.run, call)?;
        let limit = self.core.capabilities.limits.scope_depth;
        let depth = self.depth.get();
        if depth >= limit {
            let message = format!("scopes are nested {limit} deep already, which is the limit; close one first");
            return Err(BackendError::misuse(call, message).into());
        }
        let mut inner = Ok(());
        let outer = self.core.faults.around(self.core.faults.whole(call), || {
            self.depth.set(depth + 1);
            // An unwinding body leaves the whole build, so the depth need not be restored for it.
            inner = body();
            self.depth.set(depth);
            Ok(())
        });
        inner.map_err(CallbackError::from).and(outer.map_err(CallbackError::from))
    }

    fn alloc(&self, nbytes: u64) -> Result<ScratchId, BackendError> {
        let call = Call::AllocScratch;
        self.core.check_building(&self.core.state.lock(), self.run, call)?;
        if nbytes == 0 {
            return Err(BackendError::misuse(call, "nbytes is 0; scratch needs at least 1 byte"));
        }
        self.core.faults.around(self.core.faults.whole(call), || {
            let region = self.core.host_memory(call, nbytes, true)?;
            let mut state = self.core.state.lock();
            let id = state.scratch.insert(HostMemory { region, users: 0 });
            let id = id.ok_or_else(|| BackendError::broken(call, "the table of scratch is full"))?;
            if let Some(run) = state.run_mut(self.run) {
                run.scratch.push(id);
            }
            Ok(id)
        })
    }

    fn run_entry(
        &self,
        entry: CallableId,
        entry_call: &EntryCall<'_>,
        host: &dyn EntryHost,
    ) -> Result<(), CallbackError> {
        let call = Call::RunEntry;
        let callable = {
            let state = self.core.state.lock();
            self.core.check_building(&state, self.run, call)?;
            self.callable(&state, call, entry, CallableKind::Entry)?
        };
        entry_call.config.check(call)?;
        let Code::Entry { code, .. } = &callable.code else {
            return Err(BackendError::broken(call, "an entry callable without an entry").into());
        };
        let mut inner = Ok(());
        let outer = self.core.faults.around(self.core.faults.whole(call), || {
            let mut context = EntryContext { call: entry_call, orchestrator: self, host };
            inner = match catch_unwind(AssertUnwindSafe(|| code(&mut context))) {
                Ok(result) => result,
                Err(payload) => {
                    let message = format!("{:?}: {}", callable.name, panic_text(&*payload));
                    Err(BackendError::from(
                        RuntimeFailure::new(call, "panic", message).with_effect(Effect::Unknown),
                    )
                    .into())
                }
            };
            Ok(())
        });
        inner.and(outer.map_err(CallbackError::from))
    }
}
