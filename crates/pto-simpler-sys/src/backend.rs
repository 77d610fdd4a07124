//! The worker side of the HAL: one started runtime with its chip workers.

use std::fmt;
use std::sync::Arc;

use crate::allocation::DomainState;
use crate::args::{CopyTo, DevicePlace};
use crate::callable::{CallableSpec, Registered};
use crate::capability::{Capabilities, Negotiated};
use crate::config::CallConfig;
use crate::error::{BackendError, SubmitError};
use crate::ids::{ChipId, DeviceBufferId, DomainId, HostBufferId, RunId};
use crate::orchestrator::GraphBuilder;

/// How many dispatch frames there are: the most dispatches that are published at one time. A host entry has one set
/// of intermediates per frame.
pub const FRAMES: usize = 2;

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunOutcome {
    /// The tasks: `Ok`, or the first failure.
    pub result: Result<(), BackendError>,
    /// A failure of the backend's own cleanup after the fence (it could not free a domain, say).
    pub cleanup: Option<BackendError>,
}

impl RunOutcome {
    /// All tasks done, cleanup done.
    #[must_use]
    pub const fn success() -> Self {
        Self { result: Ok(()), cleanup: None }
    }

    /// Tasks failed, cleanup done.
    #[must_use]
    pub const fn failed(error: BackendError) -> Self {
        Self { result: Err(error), cleanup: None }
    }
}

/// Where the backend reports the end of runs.
pub trait RunEvents: Send + Sync {
    /// `run` has ended: its fence has passed and the backend's own cleanup is over.
    ///
    /// Called exactly once for each accepted run, in the order in which runs were accepted, on any thread of the
    /// backend, holding no lock of the backend, without anybody having to wait. It may come before the `submit`
    /// that accepted the run has returned. The receiver may call `release_buffer`, `fill_buffer`, `release_domain`,
    /// `domain_state` and `run_state`; it does not submit, start or close, and it does not unwind.
    fn ended(&self, run: RunId, outcome: RunOutcome);
}

/// What a backend knows of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RunState {
    /// Never accepted: nothing of it will happen, and no end will be reported.
    Unknown,
    /// Accepted; its end has not been reported yet.
    Running,
    /// Its end has been reported, or is being reported.
    Ended,
}

/// Where a backend is in its life; see [`Backend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackendPhase {
    /// Nothing has been started.
    New,
    /// Somebody is in [`Backend::start`].
    Starting,
    /// Started.
    Ready,
    /// The start failed and was rolled back.
    Failed,
    /// Somebody is in [`Backend::close`], or a close has failed.
    Closing,
    /// Closed or abandoned.
    Closed,
}

/// What [`Backend::abandon`] could not clean up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AbandonReport {
    /// Chip workers that were ended by force.
    pub ended: Vec<ChipId>,
    /// Human-readable names of what is left: processes, mappings, shared-memory names.
    pub left: Vec<String>,
}

/// A runtime that drives chip workers: the emulator, Simpler, or a wrapper around either.
///
/// # Life cycle
///
/// ```text
/// New --register*--> New --start--> Ready --close--> Closed
///                     |               |  \--close fails--> Closing --close again--> Closed
///                     |               \--abandon--> Closed
///                     \--start fails (rolled back)--> Failed --close--> Closed
/// ```
///
/// A call in the wrong state is a misuse error that names the state. `close` in `New`, `Failed` and `Closed` is Ok.
///
/// # Threads
///
/// Every method may be called from any thread. `submit` serialises graph builds first come, first served. Nothing
/// of the backend's own is locked while a builder or a [`RunEvents`] runs, other than what makes a second
/// submission wait.
///
/// # Inside a graph build
///
/// On the thread that is building, `submit`, `start`, `close`, `abandon` and `release_buffer` are refused as misuse
/// (they would wait for the build itself). Buffer creation and reads and writes are allowed.
///
/// # Runs
///
/// Runs are FIFO with completion fences: the tasks of a run start only when every earlier run has passed its fence,
/// unless the negotiated depth lets them overlap. A run that allocated a domain has *ordered cleanup*: the next
/// submission waits until that cleanup is over. Memory that a run in flight may use is never freed before its
/// fence.
pub trait Backend: Send + Sync + fmt::Debug {
    /// What is known before the start; constant for the backend's life. Does not block.
    fn capabilities(&self) -> &Capabilities;

    /// Where the backend is in its life. Any state; does not block. Another thread may have changed it by the time the
    /// caller looks at the answer.
    fn phase(&self) -> BackendPhase;

    /// Whether the calling thread may block here. A binding refuses a thread that is attached to an interpreter
    /// (other threads would need that interpreter to end the wait). Asked before any lock is taken.
    ///
    /// # Errors
    ///
    /// Misuse that says how to detach.
    fn check_blocking(&self) -> Result<(), BackendError>;

    /// Registers a callable. State: `New` (backends may allow `Ready` too). Registering equal content twice may
    /// give two ids.
    ///
    /// # Errors
    ///
    /// Misuse: wrong state, unknown name, source or kind that this backend cannot run, over the limit of callables.
    /// Runtime failure: the code could not be loaded.
    fn register(&self, callable: &CallableSpec) -> Result<Registered, BackendError>;

    /// Starts the chip workers (Simpler forks its processes here) and reports ends of runs to `events` from then
    /// on. `New -> Ready`, or `Failed` after a complete rollback. Blocks.
    ///
    /// # Errors
    ///
    /// Misuse in another state; runtime failure naming the chip that did not come up.
    fn start(&self, events: Arc<dyn RunEvents>) -> Result<Negotiated, BackendError>;

    /// Builds the graph of `run` by calling `graph` once, synchronously, on this thread, then accepts the run.
    /// State: `Ready`.
    ///
    /// Blocks while another thread builds, while as many runs are in flight as the depth allows, and while a
    /// predecessor's ordered cleanup is not over. Once it has returned Ok, the end of the run is reported to the
    /// [`RunEvents`].
    ///
    /// * A run with no tasks is accepted and ends like any other.
    /// * A failed build: tasks not started are cancelled, started ones are fenced, domains that the run allocated
    ///   (retained ones registered with it included) are freed, and no end is reported.
    ///
    /// # Errors
    ///
    /// [`SubmitError::Build`] where the builder failed. [`SubmitError::Backend`]: misuse (state, a `run` used
    /// before, a `config` that [`CallConfig::check`] refuses, called inside a build of the same backend) or failure; [`run_state`](Self::run_state) then says
    /// whether the run was accepted all the same. Where the builder failed *and* what it had allocated could not be
    /// freed, it is the failure of that cleanup, which says what is still mapped; nothing is accepted after it.
    fn submit(&self, run: RunId, config: &CallConfig, graph: &mut dyn GraphBuilder) -> Result<(), SubmitError>;

    /// Whether `run` was accepted, and whether it has ended. Any state; does not block.
    fn run_state(&self, run: RunId) -> RunState;

    /// Creates a host buffer of `nbytes` bytes. Its contents are unspecified. State: `New` (chip workers inherit it)
    /// or `Ready`. Does not wait for runs; legal inside a build.
    ///
    /// # Errors
    ///
    /// Misuse: zero bytes, wrong state. Runtime failure `OutOfSharedMemory`: no room, with the size; nothing is
    /// left.
    fn create_buffer(&self, nbytes: u64) -> Result<HostBufferId, BackendError>;

    /// Creates a host buffer of zeros that nobody can write: a copy source only. State: `New` or `Ready`.
    ///
    /// # Errors
    ///
    /// As [`create_buffer`](Self::create_buffer).
    fn create_zeros(&self, nbytes: u64) -> Result<HostBufferId, BackendError>;

    /// Writes `bytes` into a host buffer from `offset` on. Legal while runs are in flight; what a task that reads
    /// the buffer at the same time sees is then unspecified, word by word. Does not block.
    ///
    /// # Errors
    ///
    /// Misuse: unknown or released buffer, read-only buffer, out of bounds (also by overflow).
    fn write_buffer(&self, buffer: HostBufferId, offset: u64, bytes: &[u8]) -> Result<(), BackendError>;

    /// Reads from a host buffer. As [`write_buffer`](Self::write_buffer).
    ///
    /// # Errors
    ///
    /// Misuse: unknown or released buffer, out of bounds.
    fn read_buffer(&self, buffer: HostBufferId, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError>;

    /// Sets every byte of a host buffer. As [`write_buffer`](Self::write_buffer).
    ///
    /// # Errors
    ///
    /// As [`write_buffer`](Self::write_buffer); runtime failure where the memory cannot be reached.
    fn fill_buffer(&self, buffer: HostBufferId, byte: u8) -> Result<(), BackendError>;

    /// Releases a host buffer. May wait for a busy worker process. Refused inside a build.
    ///
    /// # Errors
    ///
    /// Misuse: unknown, already released, or an argument of a task of a run in flight (nothing was done). Runtime
    /// failure: see its effect.
    fn release_buffer(&self, buffer: HostBufferId) -> Result<(), BackendError>;

    /// Allocates device memory on one chip, zeroed, that outlives runs. State: `Ready`, no run in flight (inside a
    /// build it is control). Blocks. Simpler: `alloc_child_tensor`.
    ///
    /// # Errors
    ///
    /// Misuse: zero bytes, unknown chip, runs in flight. Runtime failure `OutOfDeviceMemory`.
    fn alloc(&self, chip: ChipId, nbytes: u64) -> Result<DeviceBufferId, BackendError>;

    /// Frees device memory. State: `Ready`, no run in flight.
    ///
    /// # Errors
    ///
    /// Misuse: unknown or freed, runs in flight. Runtime failure: see its effect.
    fn free(&self, buffer: DeviceBufferId) -> Result<(), BackendError>;

    /// Copies into device memory outside runs. State: `Ready`, no run in flight. Blocks. Rules of
    /// [`Orchestrator::copy_to`](crate::Orchestrator::copy_to).
    ///
    /// # Errors
    ///
    /// As [`Orchestrator::copy_to`](crate::Orchestrator::copy_to); misuse while runs are in flight, with their number.
    fn copy_to(&self, copy: &CopyTo) -> Result<(), BackendError>;

    /// Copies from device memory into a host buffer outside runs. State: `Ready`, no run in flight. Blocks.
    ///
    /// # Errors
    ///
    /// As [`copy_to`](Self::copy_to).
    fn copy_from(&self, dst: HostBufferId, src: DevicePlace, nbytes: u64) -> Result<(), BackendError>;

    /// Releases a domain: its name is free at once. A domain whose run is over is freed before this returns, *even
    /// while another run executes*: the caller drains first. A domain whose run is in flight is freed in that run's
    /// cleanup. Blocks.
    ///
    /// * Releasing twice is Ok and frees once; it repeats the first outcome, also when that was an error.
    /// * After `close` freed it: Ok.
    ///
    /// # Errors
    ///
    /// Misuse: unknown id. Runtime failure: the release failed, see its effect; it is not retried.
    fn release_domain(&self, domain: DomainId) -> Result<(), BackendError>;

    /// Where a domain is in its life. Any state, also after `close`; does not block.
    ///
    /// # Errors
    ///
    /// Misuse: an id that this backend never gave out.
    fn domain_state(&self, domain: DomainId) -> Result<DomainState, BackendError>;

    /// Device memory committed on `chip`, in bytes, domains included. State: `Ready`; may wait for the chip.
    ///
    /// # Errors
    ///
    /// Misuse: unknown chip. Runtime failure: the chip does not answer.
    fn committed_device_memory(&self, chip: ChipId) -> Result<u64, BackendError>;

    /// Ends the worker: waits for accepted runs, frees domains, device memory and host buffers, ends the chip
    /// workers. Blocks. Idempotent after success. After a failure, calling again retries what is left where the
    /// runtime allows, and returns the cached failure where it does not.
    ///
    /// # Errors
    ///
    /// Misuse inside a build. Runtime failure: the first one; everything else was attempted.
    fn close(&self) -> Result<(), BackendError>;

    /// Last resort, in bounded time: ends the chip workers by force, interrupts kernels that wait, removes shared
    /// memory, and reports runs in flight as failed. Afterwards `close` is Ok. Never fails; says what is left.
    fn abandon(&self) -> AbandonReport;
}
