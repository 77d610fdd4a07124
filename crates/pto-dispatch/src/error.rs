//! Errors of this crate: misuse, backend failure, broken invariant, as in every crate of pto.
//!
//! Every error is cheap to clone, because outcomes are cached for all waiters. [`Error::family`] names the family,
//! [`Error::may_retry`] and [`Error::must_reprepare`] say what may follow.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pto_domain::{DomainError, LeaseError, RequestError, TableError};
use pto_reset::ResetError;
use pto_simpler_sys::{BackendError, BackendPhase, ChipId, Effect, Family};

use crate::program::DispatchId;

/// An error of a prepared worker, of a graph build, or of a dispatch.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- misuse: nothing was done ----
    /// No program was given.
    #[error("no programs to prepare: give at least one")]
    NoPrograms,
    /// One program was given twice.
    #[error("program `{name}` is listed twice, at positions {first} and {second}: list it once")]
    DuplicateProgram {
        /// Its name.
        name: Arc<str>,
        /// The earlier position, from 0.
        first: usize,
        /// The later position.
        second: usize,
    },
    /// Two programs, or a program and the backend, want different targets.
    #[error("{what} differs: {first_owner} has {first}, {second_owner} has {second}")]
    TargetMismatch {
        /// `platform`, `runtime` or `device ids`.
        what: &'static str,
        /// Who wants `first`.
        first_owner: String,
        /// One value.
        first: String,
        /// Who wants `second`.
        second_owner: String,
        /// The other value.
        second: String,
    },
    /// `reset = true` without `persistent`.
    #[error("reset needs persistent execution: set persistent, or leave reset unset")]
    ResetWithoutPersistence,
    /// The backend has a life of its own already: another worker was prepared on it, or somebody started or closed it.
    #[error(
        "the backend is {phase:?} and not this worker's to start: prepare each worker on a backend of its own, in New"
    )]
    BackendInUse {
        /// Where it is in its life.
        phase: BackendPhase,
    },
    /// The backend cannot keep domains between runs.
    #[error(
        "persistent execution needs retention, and this backend lacks `{missing}`: choose another retention or prepare without persistent"
    )]
    NoRetention {
        /// The call or hook that is missing.
        missing: Arc<str>,
    },
    /// A host entry that cannot take its domains from us.
    #[error(
        "program `{program}`: entry `{entry}` takes no domain provider, which persistent execution needs: regenerate the artefact, or prepare without persistent"
    )]
    EntryWithoutProvider {
        /// The program.
        program: Arc<str>,
        /// The entry.
        entry: Arc<str>,
    },
    /// More callables than the backend takes.
    #[error("{requested} callables are declared, the backend takes {permitted}")]
    TooManyCallables {
        /// Declared by all programs together.
        requested: usize,
        /// The limit.
        permitted: u32,
    },
    /// A program declares something invalid.
    #[error("program `{program}`: {message}")]
    Declaration {
        /// The program.
        program: Arc<str>,
        /// What is wrong and what to change.
        message: String,
    },
    /// The shortcut was used with several programs.
    #[error("{programs} programs are prepared: say which one to run")]
    Ambiguous {
        /// How many are prepared.
        programs: usize,
    },
    /// A program that this worker did not prepare.
    #[error("this worker did not prepare that program: use an id that it returned")]
    UnknownProgram,
    /// Arguments that do not fit the program's parameters.
    #[error("program `{program}`: {message}")]
    Arguments {
        /// The program.
        program: Arc<str>,
        /// What is wrong and what to change.
        message: String,
    },
    /// Something a builder asked for is invalid.
    #[error("{0}")]
    Build(Arc<str>),
    /// A request that no backend can serve.
    #[error("domain `{name}`: {source}")]
    Request {
        /// The domain.
        name: Arc<str>,
        /// What is wrong with it.
        source: RequestError,
    },
    /// A retained domain cannot be leased: another request, poisoned, closing.
    #[error(transparent)]
    Domain(DomainError),
    /// A lease was asked for something that its domain does not have.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// A retained domain cannot be reset, or its mapping is unusable.
    #[error("domain `{key}`: {source}")]
    Reset {
        /// `p0:name` as the backend knows it.
        key: Arc<str>,
        /// Why.
        source: ResetError,
    },
    /// A call that would wait for the graph build it is made in.
    #[error("{call} inside a graph builder of the same worker would wait for itself: move it out of the builder")]
    Reentrant {
        /// The refused call.
        call: &'static str,
    },
    /// Close has begun.
    #[error("the worker is closing")]
    Closing,
    /// Close is over.
    #[error("the worker is closed")]
    Closed,
    /// `try_submit` would have had to wait.
    #[error("the dispatch would have to wait: {reason}")]
    WouldBlock {
        /// For what.
        reason: &'static str,
    },
    /// A bounded wait ended first. This says nothing about the dispatch.
    #[error("dispatch {id} is not terminal yet: wait again")]
    WaitTimeout {
        /// The dispatch that was waited for.
        id: DispatchId,
    },
    /// A bounded close ended first. Calling again goes on from there.
    #[error("close is not over: {}", in_flight_text(.in_flight))]
    CloseTimeout {
        /// Dispatches still in flight; empty where the backend itself has not returned.
        in_flight: Arc<[DispatchId]>,
    },
    /// A buffer that is still referenced elsewhere.
    #[error("the buffer is still referenced by a dispatch or another clone: wait for it, or drop the clones")]
    BufferInUse,

    // ---- failures ----
    /// A backend call failed, or the backend refused it.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// One copy of a reset failed.
    #[error("resetting buffer `{buffer}` of domain `{key}` on {chip} (rank {rank}) failed: {source}")]
    ResetCopy {
        /// `p0:name` as the backend knows it.
        key: Arc<str>,
        /// The buffer, or the byte offset in the window for range copies.
        buffer: Arc<str>,
        /// The chip worker.
        chip: ChipId,
        /// Its rank in the domain.
        rank: u32,
        /// The cause.
        source: BackendError,
    },
    /// The builder's own error, as it was returned.
    #[error("program `{program}`: {source}")]
    Program {
        /// The program.
        program: Arc<str>,
        /// The original.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// The builder panicked; the panic has been resumed in the submitting caller.
    #[error("program `{program}`: the builder panicked: {message}")]
    Panicked {
        /// The program.
        program: Arc<str>,
        /// The panic message, where it was text.
        message: Arc<str>,
    },
    /// The dispatch failed.
    #[error(transparent)]
    Failed(Arc<Failure>),
    /// An earlier failure ended persistent dispatch on this worker.
    #[error("persistent dispatch is poisoned by an earlier failure: close the worker and prepare it again")]
    Poisoned(#[source] Arc<Failure>),
    /// An earlier failure was final for this worker.
    #[error("the worker refuses more work after an earlier failure: close it and prepare it again")]
    Finished(#[source] Arc<Failure>),
    /// A domain whose release was answered is not freed.
    #[error("not freed: {key}")]
    NotFreed {
        /// `p0:name` as the backend knows it.
        key: Arc<str>,
    },
    /// Releasing something failed.
    #[error("releasing {what} failed: {source}")]
    Release {
        /// `p0:name`, a buffer, a tensor.
        what: Arc<str>,
        /// The cause.
        source: BackendError,
    },
    /// Close did not go well.
    #[error(transparent)]
    Close(Arc<CloseFailure>),

    // ---- broken invariants ----
    /// A bug in pto or in the backend.
    #[error("broken invariant: {0}")]
    Broken(Arc<str>),
}

fn in_flight_text(ids: &[DispatchId]) -> String {
    if ids.is_empty() {
        return "the backend has not returned yet; call close again".to_owned();
    }
    let list: Vec<String> = ids.iter().map(ToString::to_string).collect();
    format!("dispatches still in flight: {}; call close again", list.join(", "))
}

impl Error {
    pub(crate) fn broken(message: impl Into<Arc<str>>) -> Self {
        let message = message.into();
        tracing::error!(%message, "broken invariant");
        Self::Broken(message)
    }

    pub(crate) fn build(message: impl Into<Arc<str>>) -> Self {
        Self::Build(message.into())
    }

    /// The family.
    #[must_use]
    pub fn family(&self) -> Family {
        match self {
            Self::Backend(e) | Self::ResetCopy { source: e, .. } | Self::Release { source: e, .. } => e.family(),
            Self::Domain(e) => e.family(),
            Self::Reset { source, .. } => source.family(),
            Self::Program { .. } | Self::Panicked { .. } => Family::Misuse,
            Self::Failed(f) | Self::Poisoned(f) | Self::Finished(f) => f.cause.family(),
            Self::Close(f) => f.primary.family(),
            Self::NotFreed { .. } => Family::Backend,
            Self::Broken(_) => Family::Broken,
            _ => Family::Misuse,
        }
    }

    /// Whether the same call may be made again as it is, on the same worker.
    #[must_use]
    pub fn may_retry(&self) -> bool {
        match self {
            Self::WouldBlock { .. } | Self::WaitTimeout { .. } | Self::CloseTimeout { .. } | Self::BufferInUse => {
                true
            }
            Self::Backend(e) => e.may_retry(),
            Self::Close(f) => !f.complete,
            _ => false,
        }
    }

    /// Whether this error by itself says that the worker is finished and must be closed and prepared again.
    ///
    /// The error of a rejected submission speaks of itself only: a builder's own failure, or a call that failed, says no
    /// here, also where it came after the opening and has therefore poisoned the worker. Whether the *worker* takes
    /// more is what [`PreparedWorker::failure`](crate::PreparedWorker::failure) says.
    #[must_use]
    pub fn must_reprepare(&self) -> bool {
        match self {
            Self::Poisoned(_) | Self::Finished(_) | Self::Closing | Self::Closed | Self::Broken(_) => true,
            Self::Failed(f) => f.final_for_worker,
            Self::Backend(e) | Self::ResetCopy { source: e, .. } => e.must_reprepare(),
            Self::Domain(e) => e.must_reprepare(),
            Self::Reset { source, .. } => source.family() == Family::Broken,
            _ => false,
        }
    }

    /// What a failed call had done, for the rule that a failure with an effect is sticky.
    pub(crate) fn effect(&self) -> Effect {
        match self {
            Self::Backend(e) => e.effect(),
            _ if self.family() == Family::Broken => Effect::Unknown,
            _ => Effect::None,
        }
    }
}

impl From<TableError> for Error {
    fn from(error: TableError) -> Self {
        Self::broken(error.to_string())
    }
}

impl From<DomainError> for Error {
    fn from(error: DomainError) -> Self {
        Self::Domain(error)
    }
}

/// A dispatch that failed: which one, why, and what else went wrong on its way out.
#[derive(Debug, thiserror::Error)]
#[error("dispatch {id} of program `{program}` failed: {cause}{}", secondary_text(.secondary))]
pub struct Failure {
    /// The dispatch.
    pub id: DispatchId,
    /// Its program.
    pub program: Arc<str>,
    /// The first cause.
    #[source]
    pub cause: Error,
    /// What failed after it (cleanup).
    pub secondary: Vec<Error>,
    /// Whether it ended the worker's useful life.
    pub final_for_worker: bool,
    /// The backend turned this dispatch away because it was finished before: the cause lies with an older one, whose
    /// end may not have been reported yet.
    consequence: bool,
    delivered: AtomicBool,
}

impl Failure {
    pub(crate) fn new(
        id: DispatchId,
        program: Arc<str>,
        cause: Error,
        secondary: Vec<Error>,
        final_for_worker: bool,
        consequence: bool,
    ) -> Self {
        Self { id, program, cause, secondary, final_for_worker, consequence, delivered: AtomicBool::new(false) }
    }

    /// Whether a failure of dispatch `id` that is reported now is the cause of this one.
    pub(crate) fn follows_from(&self, id: DispatchId) -> bool {
        self.consequence && id < self.id
    }

    /// Notes that somebody has been given this failure.
    pub(crate) fn mark_delivered(&self) {
        self.delivered.store(true, Ordering::Relaxed);
    }

    /// Whether somebody has been given this failure: a waiter, a submitter that was turned away because of it, or a
    /// caller of close.
    #[must_use]
    pub fn is_delivered(&self) -> bool {
        self.delivered.load(Ordering::Relaxed)
    }
}

fn secondary_text(secondary: &[Error]) -> String {
    secondary.iter().map(|e| format!("; then {e}")).collect()
}

/// What went wrong in a close, the most telling failure first.
#[derive(Debug, thiserror::Error)]
#[error("close: {primary}{}", secondary_text(.others))]
pub struct CloseFailure {
    /// A failure that nobody had seen, or the poisoning one, or else the first failure of the close itself.
    #[source]
    pub primary: Error,
    /// All others, in the order in which they happened.
    pub others: Vec<Error>,
    /// Whether the backend is closed. If not, calling close again retries that and nothing else.
    pub complete: bool,
}

#[cfg(test)]
mod tests {
    use pto_simpler_sys::ChipId;

    use super::*;

    /// Rule 18: what one request's domain turned out to be does not finish a worker by itself (a persistent one is
    /// poisoned by the opening that it came after); a broken invariant of ours does.
    #[test]
    fn a_reset_error_keeps_its_family_and_finishes_a_worker_only_where_something_is_broken() {
        let short = ResetError::ShortMapping { chip: ChipId(0), rank: 0, mapped: 63, requested: 64 };
        for (source, finished) in [
            (ResetError::ZeroWindow, false),
            (short, false),
            (ResetError::SourceCount { found: 1, needed: 2 }, true),
        ] {
            let error = Error::Reset { key: "p0:d".into(), source: source.clone() };
            assert_eq!(error.family(), source.family());
            assert_eq!(error.must_reprepare(), finished, "{source}");
        }
    }
}
