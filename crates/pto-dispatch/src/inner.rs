//! What the public types of this crate share: one prepared worker's state.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pto_domain::{DomainTable, LeaseAuthority, ProgramIndex, Slot};
use pto_reset::{CoveredWindow, MappedWindow, Method, ResetPlan};
use pto_simpler_sys::{
    Backend, BackendError, Call, CallConfig, CallableId, Capabilities, CopyResult, CopyTo, DeviceBufferId,
    DomainAllocation, DomainId, DomainRequest, FRAMES, HostBufferId, Negotiated, RunOutcome, Signature, TaskArgs,
};

use crate::buffer::{DeviceTensor, HostBuffer};
use crate::completion::{CellPool, CellRef};
use crate::error::{Error, Failure};
use crate::frame::Admission;
use crate::options::Mode;
use crate::program::{Args, Program};
use crate::shutdown::Shutdown;
use crate::staging::StagingCache;
use crate::stats::Counters;
use crate::sync::{AtomicUsize, Mutex, Rank, assert_unlocked};

/// Why submitters are turned away.
#[derive(Clone, Debug)]
pub(crate) enum Refusal {
    /// A failure in persistent mode.
    Poisoned(Arc<Failure>),
    /// A failure that was final for the worker.
    Finished(Arc<Failure>),
    /// Close has begun.
    Closing,
    /// Close is over, or has at least come to the backend.
    Closed,
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Poisoned(failure) => {
                failure.mark_delivered();
                Self::Poisoned(failure)
            }
            Refusal::Finished(failure) => {
                failure.mark_delivered();
                Self::Finished(failure)
            }
            Refusal::Closing => Self::Closing,
            Refusal::Closed => Self::Closed,
        }
    }
}

/// A registered callable.
#[derive(Clone, Debug)]
pub(crate) struct Callable {
    pub(crate) id: CallableId,
    pub(crate) name: Arc<str>,
    pub(crate) kind: pto_simpler_sys::CallableKind,
    pub(crate) signature: Option<Signature>,
}

/// One prepared program.
pub(crate) struct PreparedProgram {
    pub(crate) program: Arc<dyn Program>,
    pub(crate) name: Arc<str>,
    pub(crate) index: ProgramIndex,
    pub(crate) callables: Vec<Callable>,
    /// Host intermediates by frame, in declaration order, with their sizes.
    pub(crate) intermediates: [Vec<(HostBufferId, u64)>; FRAMES],
    /// What opening a dispatch of this program has to do. Changed only under the build lock.
    pub(crate) plan: Mutex<Arc<OpeningPlan>>,
    pub(crate) counters: Counters,
}

impl std::fmt::Debug for PreparedProgram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PreparedProgram({}: {})", self.index, self.name)
    }
}

/// A retained domain as the opening needs it.
#[derive(Debug)]
pub(crate) struct Retained {
    pub(crate) key: Arc<str>,
    pub(crate) id: DomainId,
    pub(crate) request: Arc<DomainRequest>,
    pub(crate) allocation: Arc<DomainAllocation>,
}

/// Everything that opening a dispatch does, precomputed: the retained domains in first-use order and, with reset
/// on, the copies that zero them. Made anew only when a program has gained a domain.
#[derive(Debug, Default)]
pub(crate) struct OpeningPlan {
    pub(crate) domains: Vec<Retained>,
    pub(crate) reset: Option<ResetPlan>,
}

/// Storage that one frame reuses from dispatch to dispatch.
#[derive(Debug, Default)]
pub(crate) struct Storage {
    pub(crate) args: Args,
    pub(crate) config: CallConfig,
    /// Buffers that the builder used without having them as arguments.
    pub(crate) kept_hosts: Vec<HostBuffer>,
    pub(crate) kept_tensors: Vec<DeviceTensor>,
    pub(crate) plan: Arc<OpeningPlan>,
    /// Zero buffers, one per distinct size.
    pub(crate) sources: Vec<HostBufferId>,
    /// Those of them that are released at the end of this dispatch.
    pub(crate) staging: Vec<HostBufferId>,
    pub(crate) staging_bytes: u64,
    pub(crate) copies: Vec<CopyTo>,
    pub(crate) results: Vec<CopyResult>,
    pub(crate) reply: DomainAllocation,
    /// Domains that this dispatch has leased.
    pub(crate) leased: Vec<Slot>,
    /// How many domains this dispatch has allocated.
    pub(crate) allocated: u64,
    pub(crate) task_args: Vec<TaskArgs>,
    pub(crate) groups: Vec<crate::build::GroupStorage>,
    pub(crate) cell: Option<CellRef>,
    pub(crate) program: usize,
}

impl Storage {
    /// Lets go of everything that belongs to one dispatch, keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.args.clear();
        // What it refers to is the caller's; the default holds nothing.
        self.config = CallConfig::new();
        self.kept_hosts.clear();
        self.kept_tensors.clear();
        self.sources.clear();
        self.leased.clear();
        self.allocated = 0;
        self.cell = None;
    }
}

/// What one frame is doing.
#[derive(Debug)]
pub(crate) enum Stage {
    /// Nothing.
    Idle(Box<Storage>),
    /// A thread is building (it has the storage); the end may have been reported already.
    Building { run: u64, ended: Option<RunOutcome> },
    /// Accepted, its end not reported yet.
    Published { run: u64, storage: Box<Storage> },
    /// A thread is finishing it (it has the storage).
    Finishing,
}

/// One of the frames.
#[derive(Debug)]
pub(crate) struct FrameSlot {
    pub(crate) stage: Mutex<Stage>,
}

impl FrameSlot {
    pub(crate) fn new() -> Self {
        Self { stage: Mutex::new(Rank::Stage, Stage::Idle(Box::default())) }
    }
}

/// Failures that close may have to report.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    /// Failed dispatches that nobody has seen yet (and some that somebody has).
    pub(crate) dispatches: Vec<Arc<Failure>>,
    /// Failures that belong to no dispatch (a dropped buffer that could not be released).
    pub(crate) loose: Vec<Error>,
    /// The failure that poisoned the worker.
    pub(crate) poison: Option<Arc<Failure>>,
    /// The failure that was final for an ordinary worker.
    pub(crate) finished: Option<Arc<Failure>>,
}

/// One prepared worker.
#[derive(Debug)]
pub(crate) struct Inner {
    /// Unique in the process.
    pub(crate) id: u64,
    pub(crate) backend: Arc<dyn Backend>,
    /// What the backend said before its start. It is constant, so nobody asks again.
    pub(crate) capabilities: Capabilities,
    pub(crate) mode: Mode,
    pub(crate) method: Method,
    pub(crate) negotiated: std::sync::OnceLock<Negotiated>,
    pub(crate) authority: LeaseAuthority,
    pub(crate) programs: Vec<PreparedProgram>,
    pub(crate) admission: Admission<Refusal>,
    pub(crate) slots: [FrameSlot; FRAMES],
    pub(crate) table: Mutex<DomainTable>,
    pub(crate) pool: crate::sync::Arc<CellPool>,
    pub(crate) staging: StagingCache,
    /// The read-only zeros of a range-copying backend, made before the start.
    pub(crate) zeros: Option<HostBufferId>,
    /// Dispatches in flight that have allocated a domain: the backend makes the next submission wait for their
    /// cleanup.
    pub(crate) ordered: AtomicUsize,
    pub(crate) failures: Mutex<Failures>,
    pub(crate) resident: Mutex<Vec<DeviceBufferId>>,
    /// Host buffers dropped inside a graph builder, or where nobody may block, to be released later.
    pub(crate) deferred: Mutex<Vec<HostBufferId>>,
    pub(crate) shutdown: Shutdown,
}

impl Inner {
    /// Refuses where close has begun.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        match self.admission.refusal() {
            Some(reason @ (Refusal::Closing | Refusal::Closed)) => Err(reason.into()),
            _ => Ok(()),
        }
    }

    /// What a failed call of the backend says to a user: where a close was faster, that, and not what the backend
    /// thinks of a call after its own end.
    pub(crate) fn unless_closed(&self, error: BackendError) -> Error {
        match (&error, self.check_open()) {
            (BackendError::Misuse(_), Err(closed)) => closed,
            _ => error.into(),
        }
    }

    /// Releases a host buffer that nobody refers to any more; put off while this thread builds a graph. A failure
    /// surfaces at close.
    pub(crate) fn release_host(&self, id: HostBufferId) {
        if self.shutdown.is_torn_down() {
            return;
        }
        // Nor is it for a thread that may not block: the next submission, or close, releases it.
        let may_block = || guarded(Call::ReleaseBuffer, || self.backend.check_blocking());
        if crate::reentry::is_building(self.id) || may_block().is_err() {
            self.deferred.lock().push(id);
            return;
        }
        if let Err(source) = guarded(Call::ReleaseBuffer, || self.backend.release_buffer(id)) {
            if matches!(source, BackendError::Misuse(_)) && self.shutdown.is_torn_down() {
                // A close was faster: the buffer is gone with the backend.
                return;
            }
            tracing::warn!(buffer = %id, error = %source, "a dropped host buffer could not be released");
            self.failures.lock().loose.push(Error::Release { what: format!("host buffer {id}").into(), source });
        }
    }

    /// Releases what was dropped inside a builder, or on a thread that may not block.
    pub(crate) fn release_deferred(&self) {
        // As many as there are now: what cannot be released here either is put off again.
        let waiting = self.deferred.lock().len();
        for _ in 0..waiting {
            let Some(id) = self.deferred.lock().pop() else { return };
            self.release_host(id);
        }
    }

    /// What a build in progress is turned away with after a failure that ended the worker's useful life. Not read
    /// from the refusal, which a close may have replaced.
    pub(crate) fn ended_by(&self) -> Option<Error> {
        let (poison, finished) = {
            let failures = self.failures.lock();
            (failures.poison.clone(), failures.finished.clone())
        };
        let refusal = poison.map(Refusal::Poisoned).or(finished.map(Refusal::Finished))?;
        Some(refusal.into())
    }

    /// The failure that ended the worker's useful life.
    pub(crate) fn final_failure(&self) -> Option<Arc<Failure>> {
        let failures = self.failures.lock();
        failures.poison.clone().or_else(|| failures.finished.clone())
    }

    /// The opening plan of a program, made anew where the program has gained a domain. Only under the build lock.
    pub(crate) fn opening_plan(&self, program: &PreparedProgram) -> Result<Arc<OpeningPlan>, Error> {
        if !self.mode.persistent {
            return Ok(Arc::clone(&program.plan.lock()));
        }
        let mut cached = program.plan.lock();
        let domains: Vec<Retained> = {
            let table = self.table.lock();
            if table.retained(program.index).count() == cached.domains.len() {
                return Ok(Arc::clone(&cached));
            }
            table
                .retained(program.index)
                .filter_map(|slot| {
                    let domain = table.domain(slot)?;
                    Some(Retained {
                        key: domain.backend_name().into(),
                        id: domain.id(),
                        request: Arc::clone(domain.request()),
                        allocation: Arc::clone(domain.allocation()),
                    })
                })
                .collect()
        };
        let reset = if self.mode.reset { Some(self.reset_plan(&domains)?) } else { None };
        *cached = Arc::new(OpeningPlan { domains, reset });
        Ok(Arc::clone(&cached))
    }

    fn reset_plan(&self, domains: &[Retained]) -> Result<ResetPlan, Error> {
        let windows = domains
            .iter()
            .map(|domain| {
                CoveredWindow::check(&domain.request, self.method)
                    .and_then(|covered| covered.map(domain.id, &domain.allocation))
                    .map_err(|source| Error::Reset { key: Arc::clone(&domain.key), source })
            })
            .collect::<Result<Vec<MappedWindow>, Error>>()?;
        ResetPlan::new(self.method, &windows)
            .map_err(|error| Error::broken(format!("checked windows make no reset plan: {error}")))
    }
}

/// Calls a backend and turns a panic of it into a broken invariant, so that no path of ours unwinds half way.
pub(crate) fn guarded<T>(call: Call, body: impl FnOnce() -> Result<T, BackendError>) -> Result<T, BackendError> {
    assert_unlocked(call.name());
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        Err(BackendError::broken(call, format!("the backend panicked: {}", panic_text(&*payload))))
    })
}

/// The text of a panic payload, where it has one.
pub(crate) fn panic_text(payload: &(dyn Any + Send)) -> &str {
    if let Some(text) = payload.downcast_ref::<&str>() {
        text
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text
    } else {
        "a payload that is not text"
    }
}
