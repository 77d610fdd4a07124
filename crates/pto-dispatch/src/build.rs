//! The graph build: what a program may ask for while one dispatch is being built.
//!
//! # Opening (design rule 12)
//!
//! Until a dispatch opens, leases of retained domains are table look-ups and nothing has been touched. The first
//! call that reaches the backend (an allocation, a copy, a task), or else the end of the build, opens it:
//!
//! 1. every retained domain of the program is registered with the run;
//! 2. all their mappings are checked;
//! 3. with reset on, every named buffer on every participating chip is zeroed, synchronously;
//! 4. the builder's own call goes through.
//!
//! A failed call that had an effect is *sticky*: later calls of the same build return it, and a builder that
//! swallows it has failed all the same (rule 17).

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use pto_domain::{
    DomainError, DomainKey, DomainName, Lease, LeaseParts, LeasedBuffer, check_name, check_request, difference,
};
use pto_reset::check_mapping;
use pto_simpler_sys::{
    Access, BackendError, BuildFailed, Call, CallConfig, CallableKind, CallbackError, ChipId, CopyResult,
    CopySource, CopyTo, DataType, DevicePlace, DomainAllocation, DomainRequest, EntryArg, EntryCall, EntryHost,
    EntryValue, GraphBuilder, Orchestrator, ScratchId, Shape, TensorArg, TensorPlace,
};

use crate::buffer::{DeviceTensor, HostBuffer};
use crate::error::Error;
use crate::inner::{Inner, OpeningPlan, PreparedProgram, Storage, guarded, panic_text};
use crate::program::{Args, DispatchId};
use crate::task::{Group, Task, expect_kind};

/// An invariant lifetime: neither longer nor shorter will do.
type Invariant<'b> = PhantomData<fn(&'b ()) -> &'b ()>;

/// Reusable storage of one group submission.
#[derive(Debug, Default)]
pub(crate) struct GroupStorage {
    pub(crate) args: Vec<pto_simpler_sys::TaskArgs>,
    pub(crate) workers: Vec<ChipId>,
}

/// The build of one dispatch's graph, handed to [`Program::build`](crate::Program::build).
///
/// Everything that it gives out (leases, tensors, scratch) carries the lifetime `'b` of this build and cannot leave
/// it.
pub struct Build<'b> {
    pub(crate) inner: &'b Inner,
    pub(crate) program: &'b PreparedProgram,
    pub(crate) orchestrator: &'b dyn Orchestrator,
    pub(crate) config: &'b CallConfig,
    pub(crate) state: &'b State,
    lifetime: Invariant<'b>,
}

/// What a build has done so far.
pub(crate) struct State {
    pub(crate) storage: RefCell<Box<Storage>>,
    pub(crate) plan: Arc<OpeningPlan>,
    pub(crate) id: DispatchId,
    pub(crate) frame: usize,
    /// Dispatches in flight that a control call would have to wait for, where the submitter does not want to wait.
    pub(crate) would_wait: bool,
    pub(crate) opened: Cell<bool>,
    pub(crate) tasks: Cell<bool>,
    pub(crate) sticky: RefCell<Option<Error>>,
    ordinary: RefCell<Vec<LeaseParts>>,
}

/// A tensor argument that is valid in this build.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Tensor<'b> {
    pub(crate) arg: TensorArg,
    pub(crate) chip: Option<ChipId>,
    lifetime: Invariant<'b>,
}

impl Tensor<'_> {
    /// The same tensor, starting `bytes` bytes into its place.
    pub fn at(mut self, bytes: u64) -> Self {
        self.arg.byte_offset = bytes;
        self
    }
}

/// Run-scoped scratch memory of this build.
#[derive(Clone, Copy, Debug)]
pub struct Scratch<'b> {
    id: ScratchId,
    lifetime: Invariant<'b>,
}

/// A host intermediate of this dispatch's frame.
#[derive(Clone, Copy, Debug)]
pub struct Intermediate<'b> {
    id: pto_simpler_sys::HostBufferId,
    nbytes: u64,
    lifetime: Invariant<'b>,
}

impl Intermediate<'_> {
    /// Size in bytes.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }
}

/// A place that a tensor or a copy can refer to.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a, 'b> {
    /// A named buffer of a leased domain.
    Window(&'a LeasedBuffer<'b>),
    /// A host buffer; the dispatch keeps it until it is terminal.
    Host(&'a HostBuffer),
    /// Resident device memory; the dispatch keeps it until it is terminal.
    Device(&'a DeviceTensor),
    /// Run-scoped scratch.
    Scratch(Scratch<'b>),
    /// A host intermediate.
    Intermediate(Intermediate<'b>),
}

impl<'a, 'b> From<&'a LeasedBuffer<'b>> for Place<'a, 'b> {
    fn from(buffer: &'a LeasedBuffer<'b>) -> Self {
        Self::Window(buffer)
    }
}

impl<'a> From<&'a HostBuffer> for Place<'a, '_> {
    fn from(buffer: &'a HostBuffer) -> Self {
        Self::Host(buffer)
    }
}

impl<'a> From<&'a DeviceTensor> for Place<'a, '_> {
    fn from(tensor: &'a DeviceTensor) -> Self {
        Self::Device(tensor)
    }
}

impl<'b> From<Scratch<'b>> for Place<'_, 'b> {
    fn from(scratch: Scratch<'b>) -> Self {
        Self::Scratch(scratch)
    }
}

impl<'b> From<Intermediate<'b>> for Place<'_, 'b> {
    fn from(intermediate: Intermediate<'b>) -> Self {
        Self::Intermediate(intermediate)
    }
}

impl<'b> Build<'b> {
    /// The dispatch being built.
    #[must_use]
    pub fn dispatch(&self) -> DispatchId {
        self.state.id
    }

    /// The dispatch frame, below [`FRAMES`](pto_simpler_sys::FRAMES).
    #[must_use]
    pub fn frame(&self) -> usize {
        self.state.frame
    }

    /// Number of chip workers.
    #[must_use]
    pub fn chips(&self) -> u32 {
        self.inner.backend.capabilities().chips()
    }

    /// Whether domains are kept between dispatches.
    #[must_use]
    pub fn is_persistent(&self) -> bool {
        self.inner.mode.persistent
    }

    /// Whether reused domains are zeroed before this dispatch can see them.
    #[must_use]
    pub fn is_resetting(&self) -> bool {
        self.inner.mode.reset
    }

    /// The call configuration of this dispatch.
    #[must_use]
    pub fn config(&self) -> &'b CallConfig {
        self.config
    }

    /// Leases the domain `name`. In persistent mode the first use allocates it and later dispatches lease the same
    /// physical domain; otherwise it is allocated for this dispatch. Asking again in the same dispatch returns the
    /// same lease.
    ///
    /// # Errors
    ///
    /// [`Error::Request`]: the request is invalid (nothing was done). [`Error::Domain`]: retained under another
    /// request, with the difference; closing. [`Error::Poisoned`]: an older dispatch has failed meanwhile.
    /// [`Error::Build`]: not retained yet and a task was submitted already. [`Error::WouldBlock`] under `try_submit`. [`Error::Reset`]: a mapping is smaller than the request.
    /// [`Error::Backend`]: the backend failed.
    pub fn lease(&self, name: &str, request: &DomainRequest) -> Result<Lease<'b>, Error> {
        self.check_sticky()?;
        if self.inner.mode.persistent {
            self.lease_retained(name, request)
        } else {
            self.lease_ordinary(name, request)
        }
    }

    fn lease_retained(&self, name: &str, request: &DomainRequest) -> Result<Lease<'b>, Error> {
        let inner = self.inner;
        let found = {
            let table = inner.table.lock();
            let slot = table.lookup(self.program.index, name, request);
            slot.and_then(|slot| slot.map(|slot| Ok((slot, table.lease(slot, &inner.authority)?))).transpose())
        };
        let found = found.map_err(|error| self.not_leased(error))?;
        if let Some((slot, lease)) = found {
            self.note_leased(slot);
            return Ok(lease);
        }
        self.check_new_domain(name, request)?;
        self.open()?;
        let key = DomainKey::new(self.program.index, DomainName::new(name));
        let backend_name = key.to_string();
        let mut storage = self.state.storage.borrow_mut();
        let Storage { reply, allocated, .. } = &mut **storage;
        self.effect(Call::GetOrAllocateDomain, || {
            self.orchestrator.get_or_allocate_domain(&backend_name, request, true, reply)
        })?;
        *allocated += 1;
        self.check_new_mapping(&backend_name, request, reply)?;
        let inserted = {
            let mut table = inner.table.lock();
            let slot = table.insert(self.program.index, name, request, reply.clone());
            slot.and_then(|slot| Ok((slot, table.lease(slot, &inner.authority)?)))
        };
        let (slot, lease) = inserted.map_err(|error| self.stick(self.not_leased(error)))?;
        drop(storage);
        self.note_leased(slot);
        Ok(lease)
    }

    /// A worker that is poisoned while this graph is being built says what poisoned it, as to any submitter.
    fn not_leased(&self, error: DomainError) -> Error {
        match (&error, self.check_poison()) {
            (DomainError::Poisoned, Err(poisoned)) => poisoned,
            _ => error.into(),
        }
    }

    fn lease_ordinary(&self, name: &str, request: &DomainRequest) -> Result<Lease<'b>, Error> {
        let authority = &self.inner.authority;
        if let Some(parts) = self.state.ordinary.borrow().iter().find(|p| p.key.name().as_str() == name) {
            return match difference(&parts.request, request) {
                None => Ok(Lease::new(authority, parts.clone())),
                Some(difference) => Err(Error::build(format!(
                    "domain `{name}` was leased in this dispatch with another request: {difference}"
                ))),
            };
        }
        self.check_new_domain(name, request)?;
        self.open()?;
        let mut storage = self.state.storage.borrow_mut();
        let Storage { reply, allocated, .. } = &mut **storage;
        self.effect(Call::AllocateDomain, || self.orchestrator.allocate_domain(name, request, reply))?;
        *allocated += 1;
        self.check_new_mapping(name, request, reply)?;
        let Some(domain) = reply.id() else {
            return Err(self.stick(Error::broken("the backend's reply names no domain")));
        };
        let parts = LeaseParts {
            domain,
            key: DomainKey::new(self.program.index, DomainName::new(name)),
            epoch: 1,
            first_use: true,
            request: Arc::new(request.clone()),
            allocation: Arc::new(reply.clone()),
        };
        self.state.ordinary.borrow_mut().push(parts.clone());
        Ok(Lease::new(authority, parts))
    }

    fn check_new_domain(&self, name: &str, request: &DomainRequest) -> Result<(), Error> {
        let capabilities = self.inner.backend.capabilities();
        check_name(name)
            .and_then(|()| check_request(request, capabilities.chips(), capabilities.limits.ranks))
            .map_err(|source| Error::Request { name: name.into(), source })?;
        if self.state.tasks.get() {
            return Err(Error::build(format!(
                "domain `{name}` is not allocated yet and a task was submitted already: lease it before the first task"
            )));
        }
        self.check_control()
    }

    /// A mapping that is too small is unusable from the start (rule 14).
    fn check_new_mapping(&self, key: &str, request: &DomainRequest, reply: &DomainAllocation) -> Result<(), Error> {
        check_mapping(request, reply).map_err(|source| self.stick(Error::Reset { key: key.into(), source }))
    }

    fn note_leased(&self, slot: pto_domain::Slot) {
        let leased = &mut self.state.storage.borrow_mut().leased;
        if !leased.contains(&slot) {
            leased.push(slot);
        }
    }

    /// A tensor over `place`: `shape` elements of `dtype`, from the first byte on.
    ///
    /// # Errors
    ///
    /// [`Error::Build`]: not one to five non-zero dimensions, or a buffer of another worker.
    pub fn tensor<'a>(
        &self,
        place: impl Into<Place<'a, 'b>>,
        shape: &[u32],
        dtype: DataType,
        access: Access,
    ) -> Result<Tensor<'b>, Error>
    where
        'b: 'a,
    {
        let Some(dims) = Shape::new(shape) else {
            return Err(Error::build(format!(
                "a tensor has 1 to {} dimensions, none of them 0; given {shape:?}",
                Shape::MAX_DIMS
            )));
        };
        let (place, chip) = self.place(place.into())?;
        let arg = TensorArg { place, shape: dims, dtype, byte_offset: 0, access };
        Ok(Tensor { arg, chip, lifetime: PhantomData })
    }

    fn place(&self, place: Place<'_, 'b>) -> Result<(TensorPlace, Option<ChipId>), Error> {
        Ok(match place {
            Place::Window(buffer) => (buffer.place(&self.inner.authority), Some(buffer.chip())),
            Place::Host(buffer) => {
                self.check_owner(buffer.worker())?;
                self.keep_host(buffer);
                (TensorPlace::Host(buffer.id()), None)
            }
            Place::Device(tensor) => {
                self.check_owner(tensor.worker())?;
                self.keep_device(tensor);
                (TensorPlace::Resident(tensor.id()), Some(tensor.chip()))
            }
            Place::Scratch(scratch) => (TensorPlace::Scratch(scratch.id), None),
            Place::Intermediate(intermediate) => (TensorPlace::Host(intermediate.id), None),
        })
    }

    fn check_owner(&self, worker: u64) -> Result<(), Error> {
        if worker == self.inner.id { Ok(()) } else { Err(Error::build("the buffer belongs to another worker")) }
    }

    /// A buffer that the builder brought along lives until the dispatch is terminal, like an argument (rule 6).
    fn keep_host(&self, buffer: &HostBuffer) {
        let kept = &mut self.state.storage.borrow_mut().kept_hosts;
        if !kept.iter().any(|k| k.id() == buffer.id()) {
            kept.push(buffer.clone());
        }
    }

    fn keep_device(&self, tensor: &DeviceTensor) {
        let kept = &mut self.state.storage.borrow_mut().kept_tensors;
        if !kept.iter().any(|k| k.id() == tensor.id()) {
            kept.push(tensor.clone());
        }
    }

    /// The host intermediate number `index` of this dispatch's frame.
    ///
    /// # Errors
    ///
    /// [`Error::Build`] where the program declares fewer.
    pub fn intermediate(&self, index: usize) -> Result<Intermediate<'b>, Error> {
        let declared = &self.program.intermediates[self.state.frame];
        let Some(&(id, nbytes)) = declared.get(index) else {
            return Err(Error::build(format!(
                "host intermediate {index} is not declared: the program declares {}",
                declared.len()
            )));
        };
        Ok(Intermediate { id, nbytes, lifetime: PhantomData })
    }

    /// Writes a host intermediate from `offset` (bytes) on.
    ///
    /// # Errors
    ///
    /// [`Error::Backend`]: out of bounds (misuse) or the backend failed.
    pub fn write_intermediate(&self, to: Intermediate<'b>, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.check_sticky()?;
        self.effect(Call::WriteBuffer, || self.inner.backend.write_buffer(to.id, offset, bytes))
    }

    /// Run-scoped host memory of `nbytes` bytes for passing results from task to task. Does not open the dispatch.
    ///
    /// # Errors
    ///
    /// [`Error::Backend`]: zero bytes (misuse), or no room.
    pub fn scratch(&self, nbytes: u64) -> Result<Scratch<'b>, Error> {
        self.check_sticky()?;
        let id = self.effect(Call::AllocScratch, || self.orchestrator.alloc(nbytes))?;
        Ok(Scratch { id, lifetime: PhantomData })
    }

    /// Copies all of `src` to the start of `dst`, synchronously. *Control*: before the first task only.
    ///
    /// # Errors
    ///
    /// [`Error::Build`]: after a task, or `dst` is not device memory. [`Error::WouldBlock`] under `try_submit`.
    /// [`Error::Backend`]: out of bounds (misuse), or the backend failed.
    pub fn copy_to<'a>(&self, dst: impl Into<Place<'a, 'b>>, src: &HostBuffer) -> Result<(), Error>
    where
        'b: 'a,
    {
        let dst = self.control_place(dst.into())?;
        self.check_owner(src.worker())?;
        self.keep_host(src);
        self.open()?;
        let copy = CopyTo { dst, src: CopySource::Host(src.id()), nbytes: src.nbytes() };
        self.effect(Call::CopyTo, || self.orchestrator.copy_to(&copy))
    }

    /// Copies from the start of `src` into all of `dst`, synchronously. *Control*: before the first task only.
    ///
    /// # Errors
    ///
    /// As [`copy_to`](Self::copy_to).
    pub fn copy_from<'a>(&self, dst: &HostBuffer, src: impl Into<Place<'a, 'b>>) -> Result<(), Error>
    where
        'b: 'a,
    {
        let src = self.control_place(src.into())?;
        self.check_owner(dst.worker())?;
        self.keep_host(dst);
        self.open()?;
        self.effect(Call::CopyFrom, || self.orchestrator.copy_from(dst.id(), src, dst.nbytes()))
    }

    fn control_place(&self, place: Place<'_, 'b>) -> Result<DevicePlace, Error> {
        self.check_sticky()?;
        if self.state.tasks.get() {
            return Err(Error::build("copies come before the first task of a dispatch: copy earlier"));
        }
        self.check_poison()?;
        self.check_control()?;
        match self.place(place)?.0 {
            TensorPlace::DomainBuffer { domain, chip, buffer } => {
                Ok(DevicePlace::DomainBuffer { domain, chip, buffer })
            }
            TensorPlace::Resident(id) => Ok(DevicePlace::Resident(id)),
            TensorPlace::Host(_) | TensorPlace::Scratch(_) => {
                Err(Error::build("the device side of a copy is a leased buffer or a device tensor"))
            }
        }
    }

    /// A task of the program's callable number `callable` (its position in
    /// [`ProgramSpec::callables`](crate::ProgramSpec)), to be given arguments and submitted.
    ///
    /// # Errors
    ///
    /// [`Error::Build`] where the program declares fewer callables.
    pub fn task(&self, callable: usize) -> Result<Task<'_, 'b>, Error> {
        Task::new(self, self.callable(callable)?)
    }

    /// A group of tasks of one callable that start together, one on each chip.
    ///
    /// # Errors
    ///
    /// As [`task`](Self::task).
    pub fn group(&self, callable: usize) -> Result<Group<'_, 'b>, Error> {
        Group::new(self, self.callable(callable)?)
    }

    fn callable(&self, index: usize) -> Result<&'b crate::inner::Callable, Error> {
        self.program.callables.get(index).ok_or_else(|| {
            Error::build(format!(
                "callable {index} is not declared: program `{}` declares {}",
                self.program.name,
                self.program.callables.len()
            ))
        })
    }

    /// Runs `body` in a nested scope: tasks submitted in it reclaim their intermediates independently. Does not
    /// open the dispatch by itself.
    ///
    /// # Errors
    ///
    /// What `body` returns; [`Error::Backend`] where the scope cannot be opened (too deep) or closed.
    ///
    /// # Panics
    ///
    /// Only where `body` does: its panic is resumed after the backend has closed the scope.
    pub fn scope<T, E: From<Error>>(&self, body: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.check_sticky()?;
        let mut body = Some(body);
        let mut result = None;
        crate::sync::assert_unlocked("scope");
        let scoped = catch_unwind(AssertUnwindSafe(|| {
            self.orchestrator.scope(&mut || {
                let Some(body) = body.take() else { return Err(BuildFailed) };
                let outcome = catch_unwind(AssertUnwindSafe(body));
                let failed = !matches!(outcome, Ok(Ok(_)));
                result = Some(outcome);
                if failed { Err(BuildFailed) } else { Ok(()) }
            })
        }));
        // A failure of the backend's own counts whatever became of the body.
        let scoped = match scoped {
            Ok(Err(CallbackError::Backend(error))) => Err(self.failed(error)),
            Err(payload) => {
                let text = format!("the backend panicked: {}", panic_text(&*payload));
                Err(self.failed(BackendError::broken(Call::Scope, text)))
            }
            Ok(Ok(())) => Ok(Ok(())),
            Ok(Err(CallbackError::Build(failed))) => Ok(Err(failed)),
        };
        match result {
            Some(Err(payload)) => resume_unwind(payload),
            Some(Ok(Err(error))) => return Err(error),
            Some(Ok(Ok(_))) | None => {}
        }
        match scoped {
            Ok(Ok(())) => {}
            Err(error) => return Err(error.into()),
            Ok(Err(BuildFailed)) => {
                return Err(self
                    .stick(Error::broken("the backend reports a failed scope whose body did not fail"))
                    .into());
            }
        }
        match result {
            Some(Ok(Ok(value))) => Ok(value),
            _ => Err(self.stick(Error::broken("the backend opened a scope without running its body")).into()),
        }
    }

    /// Runs the program's host entry number `callable`: a generated program that builds the rest of this graph by
    /// itself and leases its domains through this build.
    ///
    /// # Errors
    ///
    /// [`Error::Build`] where there is no such callable, or it is no entry. [`Error::WouldBlock`] under `try_submit`
    /// while dispatches are in flight: an entry may copy, which waits for them. What a lease inside the entry returned;
    /// [`Error::Backend`] where the entry failed, with its traceback.
    pub fn run_entry(&self, callable: usize, args: &[(Arc<str>, EntryInput<'b>)]) -> Result<(), Error> {
        self.check_sticky()?;
        let callable = self.callable(callable)?;
        expect_kind(callable, CallableKind::Entry)?;
        self.check_control()?;
        let args: Vec<EntryArg> = args
            .iter()
            .map(|(name, input)| EntryArg {
                name: Arc::clone(name),
                value: match input {
                    EntryInput::Tensor(tensor) => EntryValue::Tensor(tensor.arg),
                    EntryInput::Scalar(value) => EntryValue::Scalar(*value),
                },
            })
            .collect();
        let host = Host { build: self, error: RefCell::new(None) };
        let call = EntryCall { args: &args, config: self.config, frame: self.state.frame as u32 };
        crate::sync::assert_unlocked("run_entry");
        let ran = catch_unwind(AssertUnwindSafe(|| self.orchestrator.run_entry(callable.id, &call, &host)));
        // The entry may have submitted tasks that only the backend knows of.
        self.state.tasks.set(true);
        match ran {
            Ok(Ok(())) => self.check_sticky(),
            Ok(Err(CallbackError::Build(_))) => Err(host
                .error
                .into_inner()
                .unwrap_or_else(|| self.stick(Error::broken("an entry reports a refusal that was not given")))),
            Ok(Err(CallbackError::Backend(error))) => Err(self.failed(error)),
            Err(payload) => {
                let text = format!("the backend panicked: {}", panic_text(&*payload));
                Err(self.failed(BackendError::broken(Call::RunEntry, text)))
            }
        }
    }

    // ---- opening ----

    /// Opens the dispatch, once.
    pub(crate) fn open(&self) -> Result<(), Error> {
        self.check_sticky()?;
        if self.state.opened.get() {
            return Ok(());
        }
        self.check_poison()?;
        self.state.opened.set(true);
        // From here on a failure cannot be undone, whatever the failed call says of its own effect.
        self.register_retained()
            .and_then(|()| self.reset_retained())
            .map_err(|error| self.stick(self.explain(error)))?;
        tracing::trace!(dispatch = %self.state.id, program = %self.program.name, "opened");
        Ok(())
    }

    /// Why the opening failed. A backend frees the domains of a failed run, and gives up a chip that died in it, before
    /// it reports the run's end. Where a domain is gone (refused, or made anew) or a chip takes no copy, the end of an
    /// older dispatch may so be on its way, and be the cause. Waiting for it costs little: what is made anew or copied
    /// has waited for the older runs already.
    fn explain(&self, error: Error) -> Error {
        let told =
            matches!(error, Error::Backend(BackendError::Misuse(_)) | Error::Broken(_) | Error::ResetCopy { .. });
        if !told {
            return error;
        }
        if !self.state.would_wait {
            self.inner.admission.wait_older(self.state.id.0);
        }
        match self.inner.ended_by() {
            Some(cause) => {
                tracing::debug!(dispatch = %self.state.id, %error, "the opening failed after an older failure");
                cause
            }
            None => error,
        }
    }

    fn register_retained(&self) -> Result<(), Error> {
        let mut storage = self.state.storage.borrow_mut();
        let reply = &mut storage.reply;
        for domain in &self.state.plan.domains {
            guarded(Call::GetOrAllocateDomain, || {
                self.orchestrator.get_or_allocate_domain(&domain.key, &domain.request, true, reply)
            })?;
            if reply.id() != Some(domain.id) {
                return Err(Error::broken(format!(
                    "the backend answers {:?} for retained domain {} ({})",
                    reply.id(),
                    domain.key,
                    domain.id
                )));
            }
            check_mapping(&domain.request, reply)
                .map_err(|source| Error::Reset { key: Arc::clone(&domain.key), source })?;
        }
        Ok(())
    }

    fn reset_retained(&self) -> Result<(), Error> {
        let Some(plan) = &self.state.plan.reset else { return Ok(()) };
        let mut storage = self.state.storage.borrow_mut();
        let Storage { copies, results, sources, .. } = &mut **storage;
        plan.write_copies(sources, copies)
            .map_err(|error| Error::broken(format!("a checked reset plan cannot be carried out: {error}")))?;
        if copies.is_empty() {
            return Ok(());
        }
        guarded(Call::CopyTo, || self.orchestrator.copy_batch(copies, results))?;
        if results.len() != copies.len() {
            return Err(Error::broken(format!("{} results for {} copies", results.len(), copies.len())));
        }
        for (copy, result) in copies.iter().zip(results.iter()) {
            match result {
                CopyResult::Done => {}
                CopyResult::Failed(source) => return Err(self.reset_copy_error(copy, source.clone())),
                CopyResult::Skipped => return Err(Error::broken("a copy was skipped and none before it failed")),
            }
        }
        Ok(())
    }

    fn reset_copy_error(&self, copy: &CopyTo, source: BackendError) -> Error {
        let (id, chip) = match copy.dst {
            DevicePlace::DomainBuffer { domain, chip, .. } | DevicePlace::Window { domain, chip, .. } => {
                (domain, chip)
            }
            DevicePlace::Resident(_) => return source.into(),
        };
        let Some(domain) = self.state.plan.domains.iter().find(|d| d.id == id) else { return source.into() };
        let buffer: Arc<str> = match copy.dst {
            DevicePlace::DomainBuffer { buffer, .. } => domain
                .request
                .buffers
                .get(buffer as usize)
                .map_or_else(|| format!("#{buffer}").into(), |b| Arc::clone(&b.name)),
            DevicePlace::Window { offset, .. } => format!("bytes from {offset}").into(),
            DevicePlace::Resident(_) => "".into(),
        };
        let rank = domain.request.rank_of(chip).map_or(u32::MAX, |rank| rank as u32);
        Error::ResetCopy { key: Arc::clone(&domain.key), buffer, chip, rank, source }
    }

    // ---- the rules of a build ----

    pub(crate) fn check_sticky(&self) -> Result<(), Error> {
        match &*self.state.sticky.borrow() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// A control call waits for the device queue; a submitter that does not wait is told so instead.
    fn check_control(&self) -> Result<(), Error> {
        if self.state.would_wait {
            return Err(Error::WouldBlock { reason: "a control call waits for the dispatches in flight" });
        }
        Ok(())
    }

    /// Once persistent dispatch is poisoned, retained domains are the backend's: nothing more is touched.
    fn check_poison(&self) -> Result<(), Error> {
        self.inner.ended_by().map_or(Ok(()), Err)
    }

    /// Makes an orchestrator call; a failure that had an effect, or that is final for the worker, sticks.
    pub(crate) fn effect<T>(&self, call: Call, body: impl FnOnce() -> Result<T, BackendError>) -> Result<T, Error> {
        guarded(call, body).map_err(|error| self.failed(error))
    }

    fn failed(&self, error: BackendError) -> Error {
        let error = Error::Backend(error);
        if error.effect().possible() || error.must_reprepare() { self.stick(error) } else { error }
    }

    fn stick(&self, error: Error) -> Error {
        let mut sticky = self.state.sticky.borrow_mut();
        sticky.get_or_insert(error).clone()
    }
}

impl std::fmt::Debug for Build<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Build").field("dispatch", &self.state.id).field("program", &self.program.name).finish()
    }
}

/// An input of a host entry.
#[derive(Clone, Copy, Debug)]
pub enum EntryInput<'b> {
    /// A tensor.
    Tensor(Tensor<'b>),
    /// A scalar.
    Scalar(u64),
}

/// The build as a host entry sees it. What goes wrong stays here; only a marker goes through the backend.
struct Host<'a, 'b> {
    build: &'a Build<'b>,
    error: RefCell<Option<Error>>,
}

impl Host<'_, '_> {
    fn keep<T>(&self, result: Result<T, Error>) -> Result<T, BuildFailed> {
        result.map_err(|error| {
            *self.error.borrow_mut() = Some(error);
            BuildFailed
        })
    }
}

impl EntryHost for Host<'_, '_> {
    fn open(&self) -> Result<(), BuildFailed> {
        let opened = self.build.open();
        if opened.is_ok() {
            // Asked for right before the entry's first own effect.
            self.build.state.tasks.set(true);
        }
        self.keep(opened)
    }

    fn domain(&self, name: &str, request: &DomainRequest, reply: &mut DomainAllocation) -> Result<(), BuildFailed> {
        let lease = self.keep(self.build.lease(name, request))?;
        reply.clone_from(lease.allocation(&self.build.inner.authority));
        Ok(())
    }
}

/// How a build ended.
pub(crate) enum Built {
    /// The builder was never called.
    NotCalled,
    /// The graph is complete.
    Complete,
    /// It failed: what the submitter gets, and, where another failure came first, that one. An error that the builder
    /// returned may speak of another worker, so it decides nothing about this one.
    Failed { error: Error, first: Option<Error>, returned: bool },
    /// The builder panicked.
    Panicked { payload: Box<dyn Any + Send>, first: Option<Error> },
}

/// The builder that is handed to the backend: runs the program, keeps its error or panic, returns a marker.
pub(crate) struct Graph<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) program: &'a PreparedProgram,
    /// With the build while it runs.
    pub(crate) storage: Option<Box<Storage>>,
    pub(crate) id: DispatchId,
    pub(crate) frame: usize,
    pub(crate) would_wait: bool,
    pub(crate) built: Built,
    pub(crate) opened: bool,
}

impl GraphBuilder for Graph<'_> {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
        // A graph is built once.
        if !matches!(self.built, Built::NotCalled) {
            return Err(BuildFailed);
        }
        let Some(mut storage) = self.storage.take() else { return Err(BuildFailed) };
        let args: Args = std::mem::take(&mut storage.args);
        let config = std::mem::take(&mut storage.config);
        let state = State {
            plan: Arc::clone(&storage.plan),
            storage: RefCell::new(storage),
            id: self.id,
            frame: self.frame,
            would_wait: self.would_wait,
            opened: Cell::new(false),
            tasks: Cell::new(false),
            sticky: RefCell::new(None),
            ordinary: RefCell::new(Vec::new()),
        };
        self.built = build_graph(self.inner, self.program, orchestrator, &config, &args, &state);
        self.opened = state.opened.get();
        let mut storage = state.storage.into_inner();
        storage.args = args;
        storage.config = config;
        self.storage = Some(storage);
        if matches!(self.built, Built::Complete) { Ok(()) } else { Err(BuildFailed) }
    }
}

fn build_graph<'b>(
    inner: &'b Inner,
    program: &'b PreparedProgram,
    orchestrator: &'b dyn Orchestrator,
    config: &'b CallConfig,
    args: &Args,
    state: &'b State,
) -> Built {
    let build = Build { inner, program, orchestrator, config, state, lifetime: PhantomData };
    let result = catch_unwind(AssertUnwindSafe(|| program.program.build(&build, args)));
    let first = state.sticky.borrow().clone();
    match result {
        Err(payload) => Built::Panicked { payload, first },
        Ok(Err(error)) => match error.downcast::<Error>() {
            Ok(error) => Built::Failed { error: *error, first, returned: true },
            Err(error) => {
                let error = Error::Program { program: Arc::clone(&program.name), source: Arc::from(error) };
                Built::Failed { error, first, returned: true }
            }
        },
        Ok(Ok(())) => match build.open().and_then(|()| build.check_poison()) {
            Ok(()) => Built::Complete,
            Err(error) => Built::Failed { error, first: None, returned: false },
        },
    }
}
