//! The graph-building side of the HAL: what a builder may ask for while its run's graph is being built.

use std::sync::Arc;

use crate::allocation::DomainAllocation;
use crate::args::{CopyTo, DevicePlace, TaskArgs, TensorArg};
use crate::config::CallConfig;
use crate::error::{BackendError, BuildFailed, CallbackError};
use crate::ids::{CallableId, ChipId, HostBufferId, RunId, ScratchId};
use crate::request::DomainRequest;

/// A graph builder, called by [`Backend::submit`](crate::Backend::submit) exactly once, synchronously, on the
/// submitting thread.
///
/// An implementation must not unwind: it catches panics of user code, keeps the payload, and returns the marker.
pub trait GraphBuilder {
    /// Builds the graph of one run.
    ///
    /// # Errors
    ///
    /// [`BuildFailed`] cancels the run. The reason stays with the implementation.
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed>;
}

/// The result of one entry of a [`copy_batch`](Orchestrator::copy_batch).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyResult {
    /// Copied.
    Done,
    /// Tried, and failed.
    Failed(BackendError),
    /// Not tried, because an earlier entry for the same chip failed.
    Skipped,
}

/// An argument of a host entry. The entry sees a scalar as the number that it is: it compares and computes with it
/// before it becomes the 64 bits of a task's argument.
#[derive(Clone, Debug, PartialEq)]
pub enum EntryValue {
    /// A tensor.
    Tensor(TensorArg),
    /// A tensor whose leading dimension runs over the list: one part per position, of one shape and element type, each
    /// resident on a chip of its own. An entry may only take whole parts out of it.
    Stacked(Vec<TensorArg>),
    /// A scalar without a sign.
    Scalar(u64),
    /// A scalar with a sign.
    Signed(i64),
    /// A floating-point scalar.
    Float(f64),
    /// A truth value.
    Bool(bool),
}

/// A named argument of a host entry.
#[derive(Clone, Debug, PartialEq)]
pub struct EntryArg {
    /// The parameter name in the generated program.
    pub name: Arc<str>,
    /// Its value.
    pub value: EntryValue,
}

/// One call of a host entry.
#[derive(Clone, Copy, Debug)]
pub struct EntryCall<'a> {
    /// Named arguments.
    pub args: &'a [EntryArg],
    /// The configuration of this dispatch.
    pub config: &'a CallConfig,
    /// The dispatch frame, below [`FRAMES`](crate::FRAMES): names the set of host intermediates to use.
    pub frame: u32,
}

/// What a host entry may call back while it runs. Called on the submitting thread, detached from any interpreter.
pub trait EntryHost {
    /// Must be called before each of the entry's own calls that reach the device (a task, a copy, a domain of its own,
    /// scratch), so that the dispatch opens first. `task`: the call is a task, after which no control may follow.
    /// Cheap when it is open already.
    ///
    /// # Errors
    ///
    /// [`BuildFailed`]: the opening failed; the entry must stop. The reason stays with the host.
    fn open(&self, task: bool) -> Result<(), BuildFailed>;

    /// Whether [`domain`](Self::domain) keeps its domains between runs. Where it does, an entry that asks the runtime
    /// itself to retain a domain gets one from the host instead.
    fn retains(&self) -> bool;

    /// Leases the domain `name` and describes it in `reply`.
    ///
    /// # Errors
    ///
    /// [`BuildFailed`]: no lease; the entry must stop. The reason stays with the host.
    fn domain(&self, name: &str, request: &DomainRequest, reply: &mut DomainAllocation) -> Result<(), BuildFailed>;
}

/// The calls of a run whose graph is being built.
///
/// **Thread**: only the thread that called `submit`, only during `build`. The trait has no `Send` or `Sync` bound,
/// and a reference cannot outlive the build.
///
/// **Control before tasks.** `allocate_domain`, `get_or_allocate_domain` (when it allocates), `copy_to`,
/// `copy_from` and `copy_batch` are *control*: they come before the first task of the run and wait until the run
/// heads the device queue, which is to say until every earlier run has passed its fence. After a task they are
/// refused with a misuse error.
pub trait Orchestrator {
    /// The run being built.
    fn run(&self) -> RunId;

    /// Collectively allocates a domain that is freed in this run's cleanup. The backend zeroes every window before
    /// any member can reach it. *Control; blocks.*
    ///
    /// * `workers` order defines the ranks; buffers are placed back to back in declaration order.
    /// * The name must not be live; it is free again as soon as a domain is released.
    /// * Validation comes before any effect.
    ///
    /// # Errors
    ///
    /// Misuse: an invalid request (no workers, duplicates, a worker out of range, window 0, buffers over the
    /// window, duplicate buffer names, too many ranks), a live name, or a task was submitted already; nothing was
    /// done. Runtime failure: the error's [`Effect`](crate::Effect) says whether windows may be left on some
    /// members; those are freed in this run's cleanup.
    fn allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError>;

    /// Finds the retained domain `name` or allocates it, ties it to this run's fence and, with `retain_after_run`,
    /// keeps it when the run succeeds. When a run fails, the backend frees the retained domains registered with it
    /// as soon as no run in flight is registered with them, at the latest in `close`.
    ///
    /// Needs the capability [`Retention`](crate::Retention) other than `Unsupported`. *Control when it allocates;
    /// finding a domain is not control, does not wait and may follow tasks.*
    ///
    /// The reply describes the same mapping each time while the domain lives.
    ///
    /// # Errors
    ///
    /// As [`allocate_domain`](Self::allocate_domain); also misuse where the name is retained under another request.
    fn get_or_allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        retain_after_run: bool,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError>;

    /// Copies synchronously into device memory. *Control; blocks.*
    ///
    /// * A whole-buffer backend copies all bytes of the host buffer, to the start of the place; `nbytes` must say
    ///   so. A smaller host buffer is a prefix copy. A [`DevicePlace::Window`] needs range copies.
    /// * Never touches bytes past the requested window.
    /// * Zero bytes are refused.
    ///
    /// # Errors
    ///
    /// Misuse: an unknown or freed place or buffer, a chip that is no member, out of bounds, a capability that is
    /// missing, a task was submitted already. Runtime failure: see its effect.
    fn copy_to(&self, copy: &CopyTo) -> Result<(), BackendError>;

    /// Copies synchronously from device memory into a host buffer, from its first byte on. *Control; blocks.*
    ///
    /// # Errors
    ///
    /// As [`copy_to`](Self::copy_to).
    fn copy_from(&self, dst: HostBufferId, src: DevicePlace, nbytes: u64) -> Result<(), BackendError>;

    /// Many [`copy_to`](Self::copy_to) at once: in order for each chip, in parallel over chips where the backend
    /// can. `results` is cleared and gets one result per entry, in the order of `copies`; after a failure the later
    /// entries *of that chip* are skipped, other chips go on. *Control; blocks until all are decided.*
    ///
    /// # Errors
    ///
    /// Misuse of the whole call (a task was submitted already): nothing was tried and `results` is empty.
    fn copy_batch(&self, copies: &[CopyTo], results: &mut Vec<CopyResult>) -> Result<(), BackendError>;

    /// Submits one task to one chip worker. Does not block.
    ///
    /// # Errors
    ///
    /// Misuse: an unknown callable or one of another kind, an unknown chip, arguments that do not match the
    /// signature or live on another chip, or that exceed the limits, a `config` that [`CallConfig::check`] refuses.
    /// Runtime failure: see its effect.
    fn submit_next_level(
        &self,
        callable: CallableId,
        args: &TaskArgs,
        config: Option<&CallConfig>,
        worker: ChipId,
    ) -> Result<(), BackendError>;

    /// Submits one task to each of several chip workers, as one node that starts on all of them together. Does not
    /// block.
    ///
    /// # Errors
    ///
    /// As [`submit_next_level`](Self::submit_next_level); also misuse where the lists differ in length, are empty
    /// or name a worker twice.
    fn submit_next_level_group(
        &self,
        callable: CallableId,
        args: &[TaskArgs],
        config: Option<&CallConfig>,
        workers: &[ChipId],
    ) -> Result<(), BackendError>;

    /// Submits a task to a host-side sub-worker; its tensors must be host memory. Does not block.
    ///
    /// # Errors
    ///
    /// As [`submit_next_level`](Self::submit_next_level); also misuse where a tensor lives on a device.
    fn submit_sub(&self, callable: CallableId, args: &TaskArgs) -> Result<(), BackendError>;

    /// Runs `body` inside a nested scope: tasks submitted in it reclaim their intermediates independently.
    ///
    /// # Errors
    ///
    /// [`CallbackError::Build`] where `body` failed, [`CallbackError::Backend`] where the scope could not be opened
    /// (too deep) or closed.
    fn scope(&self, body: &mut dyn FnMut() -> Result<(), BuildFailed>) -> Result<(), CallbackError>;

    /// Run-scoped host memory for passing results from task to task; freed after the run. Not control.
    ///
    /// # Errors
    ///
    /// Misuse for zero bytes; runtime failure where there is no room.
    fn alloc(&self, nbytes: u64) -> Result<ScratchId, BackendError>;

    /// Calls a host entry: a generated program that builds the rest of this graph by itself and takes its domains
    /// from `host`. Needs the capability `entries`. Blocks as the entry's own calls do.
    ///
    /// # Errors
    ///
    /// [`CallbackError::Build`] where `host` refused, [`CallbackError::Backend`] where the entry itself failed (with
    /// its traceback).
    fn run_entry(&self, entry: CallableId, call: &EntryCall<'_>, host: &dyn EntryHost)
    -> Result<(), CallbackError>;
}
