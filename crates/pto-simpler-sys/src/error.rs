//! Errors of a backend, in three families.
//!
//! * [`Misuse`]: the caller can fix it. The message says what to change, and nothing was done.
//! * [`RuntimeFailure`]: the runtime failed. Carries the runtime's own type name, message and traceback text, what
//!   the failed call had done by then ([`Effect`]), and whether the worker is finished.
//! * [`BrokenInvariant`]: a bug of the backend or of pto, returned instead of a panic.
//!
//! Errors are cheap to clone (one reference count), because outcomes are cached and handed to every waiter.

use std::fmt;
use std::sync::Arc;

use crate::ids::ChipId;

/// The family of an error; the same three in every crate of pto.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// The caller can fix it; nothing was done.
    Misuse,
    /// The runtime failed.
    Backend,
    /// A bug in pto or in a backend.
    Broken,
}

/// The calls of a backend, by the names of Simpler's own. Errors, journals and fault schedules speak of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Call {
    /// `Backend::register`.
    Register,
    /// `Backend::start`.
    Start,
    /// `Backend::submit`.
    Submit,
    /// `Orchestrator::allocate_domain`.
    AllocateDomain,
    /// `Orchestrator::get_or_allocate_domain`.
    GetOrAllocateDomain,
    /// `copy_to`, on the orchestrator or outside runs; also each entry of a `copy_batch`.
    CopyTo,
    /// `copy_from`, on the orchestrator or outside runs.
    CopyFrom,
    /// `Orchestrator::submit_next_level`.
    SubmitNextLevel,
    /// `Orchestrator::submit_next_level_group`.
    SubmitNextLevelGroup,
    /// `Orchestrator::submit_sub`.
    SubmitSub,
    /// `Orchestrator::scope`.
    Scope,
    /// `Orchestrator::alloc`: run-scoped scratch.
    AllocScratch,
    /// `Orchestrator::run_entry`.
    RunEntry,
    /// A task on a chip worker or a sub-worker, after its submission.
    Task,
    /// The end of a run: its fence and the backend's cleanup after it.
    Run,
    /// `Backend::create_buffer` and `Backend::create_zeros`.
    CreateBuffer,
    /// `Backend::write_buffer`.
    WriteBuffer,
    /// `Backend::read_buffer`.
    ReadBuffer,
    /// `Backend::fill_buffer`.
    FillBuffer,
    /// `Backend::release_buffer`.
    ReleaseBuffer,
    /// `Backend::alloc`: resident device memory.
    Alloc,
    /// `Backend::free`.
    Free,
    /// `Backend::release_domain`.
    ReleaseDomain,
    /// `Backend::domain_state`.
    DomainState,
    /// `Backend::committed_device_memory`.
    CommittedDeviceMemory,
    /// `Backend::close`.
    Close,
    /// `Backend::abandon`.
    Abandon,
}

impl Call {
    /// The name of the call as users of the runtime know it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Register => "register",
            Self::Start => "start",
            Self::Submit => "submit",
            Self::AllocateDomain => "allocate_domain",
            Self::GetOrAllocateDomain => "get_or_allocate_domain",
            Self::CopyTo => "copy_to",
            Self::CopyFrom => "copy_from",
            Self::SubmitNextLevel => "submit_next_level",
            Self::SubmitNextLevelGroup => "submit_next_level_group",
            Self::SubmitSub => "submit_sub",
            Self::Scope => "scope",
            Self::AllocScratch => "alloc (scratch)",
            Self::RunEntry => "run_entry",
            Self::Task => "task",
            Self::Run => "run",
            Self::CreateBuffer => "create_buffer",
            Self::WriteBuffer => "write_buffer",
            Self::ReadBuffer => "read_buffer",
            Self::FillBuffer => "fill_buffer",
            Self::ReleaseBuffer => "release_buffer",
            Self::Alloc => "alloc",
            Self::Free => "free",
            Self::ReleaseDomain => "release_domain",
            Self::DomainState => "domain_state",
            Self::CommittedDeviceMemory => "committed_device_memory",
            Self::Close => "close",
            Self::Abandon => "abandon",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a failed call had done by the time it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Nothing.
    None,
    /// All of it, or a part.
    Done,
    /// Nobody knows; to be treated like `Done`, and never retried.
    Unknown,
}

impl Effect {
    /// Whether something may have been done.
    #[must_use]
    pub const fn possible(self) -> bool {
        matches!(self, Self::Done | Self::Unknown)
    }
}

/// What kind of failure a runtime reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// A call failed.
    Call,
    /// A task failed on a chip or in a sub-worker.
    Task,
    /// A chip process died.
    ChipDied {
        /// Its exit code, if it exited.
        exit_code: Option<i32>,
        /// The signal that ended it, if one did.
        signal: Option<i32>,
    },
    /// The device gave up waiting for progress. This is a failed run, not a waiter's timeout.
    DeviceTimeout,
    /// No room in shared memory.
    OutOfSharedMemory {
        /// Bytes asked for.
        requested_bytes: u64,
    },
    /// No device memory.
    OutOfDeviceMemory {
        /// Bytes asked for.
        requested_bytes: u64,
    },
    /// A bounded wait inside the runtime ended first; the same call may finish later.
    Deferred,
}

/// The caller did something that it can correct. Nothing was done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {message}")]
pub struct Misuse {
    /// The refused call.
    pub call: Call,
    /// What is wrong and what to change, lower-case, with both the given and the permitted values.
    pub message: String,
}

/// The runtime failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct RuntimeFailure {
    /// The failed call.
    pub call: Call,
    /// What kind of failure it was.
    pub kind: FailureKind,
    /// The runtime's own type name, for example `RuntimeError`.
    pub type_name: String,
    /// The runtime's own message.
    pub message: String,
    /// The runtime's traceback text, where it has one.
    pub traceback: Option<String>,
    /// The chip that failed, where one did.
    pub chip: Option<ChipId>,
    /// What had been done.
    pub effect: Effect,
    /// Whether the worker is finished: only `close` is left.
    pub fatal: bool,
}

impl RuntimeFailure {
    /// A failure of `call` with no effect, no chip and the worker usable; change the fields from there.
    #[must_use]
    pub fn new(call: Call, type_name: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            call,
            kind: FailureKind::Call,
            type_name: type_name.into(),
            message: message.into(),
            traceback: None,
            chip: None,
            effect: Effect::None,
            fatal: false,
        }
    }

    /// The same failure with another kind.
    #[must_use]
    pub fn with_kind(mut self, kind: FailureKind) -> Self {
        self.kind = kind;
        self
    }

    /// The same failure with another effect.
    #[must_use]
    pub fn with_effect(mut self, effect: Effect) -> Self {
        self.effect = effect;
        self
    }

    /// The same failure on a chip.
    #[must_use]
    pub fn on_chip(mut self, chip: ChipId) -> Self {
        self.chip = Some(chip);
        self
    }

    /// The same failure, final (or not) for the worker.
    #[must_use]
    pub fn with_fatal(mut self, fatal: bool) -> Self {
        self.fatal = fatal;
        self
    }
}

impl fmt::Display for RuntimeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.call)?;
        if let Some(chip) = self.chip {
            write!(f, " on {chip}")?;
        }
        write!(f, " failed: {}: {}", self.type_name, self.message)?;
        match self.kind {
            FailureKind::ChipDied { exit_code: Some(code), .. } => write!(f, " (chip process exited with {code})"),
            FailureKind::ChipDied { signal: Some(signal), .. } => {
                write!(f, " (chip process ended by signal {signal})")
            }
            FailureKind::OutOfSharedMemory { requested_bytes } => {
                write!(f, " (out of shared memory, {requested_bytes} bytes requested)")
            }
            FailureKind::OutOfDeviceMemory { requested_bytes } => {
                write!(f, " (out of device memory, {requested_bytes} bytes requested)")
            }
            _ => Ok(()),
        }
    }
}

/// A bug: something that cannot happen has happened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: broken invariant: {message}")]
pub struct BrokenInvariant {
    /// The call in which it showed.
    pub call: Call,
    /// What was found.
    pub message: String,
}

/// An error of a backend call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The caller can fix it; nothing was done.
    #[error(transparent)]
    Misuse(Arc<Misuse>),
    /// The runtime failed.
    #[error(transparent)]
    Runtime(Arc<RuntimeFailure>),
    /// A bug.
    #[error(transparent)]
    Broken(Arc<BrokenInvariant>),
}

impl BackendError {
    /// A misuse of `call`.
    #[must_use]
    pub fn misuse(call: Call, message: impl Into<String>) -> Self {
        Self::Misuse(Arc::new(Misuse { call, message: message.into() }))
    }

    /// A broken invariant seen in `call`.
    #[must_use]
    pub fn broken(call: Call, message: impl Into<String>) -> Self {
        Self::Broken(Arc::new(BrokenInvariant { call, message: message.into() }))
    }

    /// The family.
    #[must_use]
    pub fn family(&self) -> Family {
        match self {
            Self::Misuse(_) => Family::Misuse,
            Self::Runtime(_) => Family::Backend,
            Self::Broken(_) => Family::Broken,
        }
    }

    /// The call that failed.
    #[must_use]
    pub fn call(&self) -> Call {
        match self {
            Self::Misuse(e) => e.call,
            Self::Runtime(e) => e.call,
            Self::Broken(e) => e.call,
        }
    }

    /// What the call had done.
    #[must_use]
    pub fn effect(&self) -> Effect {
        match self {
            Self::Misuse(_) => Effect::None,
            Self::Runtime(e) => e.effect,
            Self::Broken(_) => Effect::Unknown,
        }
    }

    /// The runtime's report, where it was the runtime that failed.
    #[must_use]
    pub fn runtime(&self) -> Option<&RuntimeFailure> {
        match self {
            Self::Runtime(e) => Some(e),
            _ => None,
        }
    }

    /// Whether the same call may be made again as it is: only a runtime failure that did nothing and left the
    /// worker usable.
    #[must_use]
    pub fn may_retry(&self) -> bool {
        matches!(self, Self::Runtime(e) if e.effect == Effect::None && !e.fatal)
    }

    /// Whether the worker is finished and must be closed and prepared again.
    #[must_use]
    pub fn must_reprepare(&self) -> bool {
        match self {
            Self::Misuse(_) => false,
            Self::Runtime(e) => e.fatal,
            Self::Broken(_) => true,
        }
    }
}

impl From<RuntimeFailure> for BackendError {
    fn from(failure: RuntimeFailure) -> Self {
        Self::Runtime(Arc::new(failure))
    }
}

/// The marker that a graph builder leaves when it fails. It carries nothing: the builder's own error or panic
/// payload stays with whoever implemented [`GraphBuilder`](crate::GraphBuilder) and never travels through a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the graph builder failed")]
pub struct BuildFailed;

/// Why a submission was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The graph builder failed; the run is cancelled, what it had allocated is swept, no end will be reported.
    #[error(transparent)]
    Build(#[from] BuildFailed),
    /// The backend refused or failed. Ask [`run_state`](crate::Backend::run_state) whether the run was accepted
    /// all the same.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Why an operation with a callback failed: the backend, or the callback.
pub type CallbackError = SubmitError;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_family_answers_retry_and_reprepare() {
        let misuse = BackendError::misuse(Call::Submit, "window_bytes is 0; ask for at least 1");
        assert!(!misuse.may_retry() && !misuse.must_reprepare() && misuse.effect() == Effect::None);
        let clean: BackendError = RuntimeFailure::new(Call::CopyTo, "RuntimeError", "busy").into();
        assert!(clean.may_retry() && !clean.must_reprepare());
        let lost: BackendError =
            RuntimeFailure::new(Call::CopyTo, "RuntimeError", "no reply").with_effect(Effect::Unknown).into();
        assert!(!lost.may_retry() && !lost.must_reprepare());
        let dead: BackendError = RuntimeFailure::new(Call::Run, "RuntimeError", "dead").with_fatal(true).into();
        assert!(!dead.may_retry() && dead.must_reprepare());
        assert!(BackendError::broken(Call::Run, "two ends").must_reprepare());
    }

    #[test]
    fn a_dead_chip_names_itself_and_its_exit() {
        let failure = RuntimeFailure::new(Call::Run, "RuntimeError", "child died")
            .with_kind(FailureKind::ChipDied { exit_code: None, signal: Some(9) })
            .on_chip(ChipId(1));
        assert_eq!(
            failure.to_string(),
            "run on chip1 failed: RuntimeError: child died (chip process ended by signal 9)"
        );
    }
}
