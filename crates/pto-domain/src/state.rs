//! The life of one retained domain.
//!
//! ```text
//!            +--+ published
//!            v  |
//! (insert) Live --begin_release--> Releasing --freed-----------------> Freed
//!            |                         \-------not freed, or failed--> Unreleased
//!            \--poison, backend_owned--> BackendOwned <--+
//!                                              \---------+ published, poison again
//! ```
//!
//! The legal edges; every other one is a broken invariant that names both ends:
//!
//! | from | to | when |
//! |---|---|---|
//! | `Live` | `Live` | a dispatch that leased it was published |
//! | `Live` | `Releasing` | close asks the backend to release it |
//! | `Live` | `BackendOwned` | a failure made it the backend's to clean (rule 17) |
//! | `Releasing` | `Freed` | the backend released it and says that it is freed |
//! | `Releasing` | `Unreleased` | the release failed, or could not be verified |
//! | `BackendOwned` | `BackendOwned` | a dispatch that leased it was published while an older one failed |
//!
//! A release that is under way when a failure arrives ends as it ends: `Releasing` never becomes `BackendOwned`,
//! because the backend repeats the outcome of a release instead of freeing twice.

use std::fmt;

/// Where a retained domain is in its life, without payload: for errors, logs and tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DomainPhase {
    /// Retained: it may be leased.
    Live,
    /// Its release has been asked for; the outcome is not known yet.
    Releasing,
    /// Released by us and verified to be freed.
    Freed,
    /// Its release failed, or it could not be verified. The backend's own close is what may still free it.
    Unreleased,
    /// The backend's to clean since a failure: never leased, never released by us.
    BackendOwned,
}

impl fmt::Display for DomainPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Live => "live",
            Self::Releasing => "being released",
            Self::Freed => "freed",
            Self::Unreleased => "not released",
            Self::BackendOwned => "owned by the backend",
        })
    }
}

/// How the release of a domain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReleaseOutcome {
    /// The backend released it and reports it as freed.
    Freed,
    /// The backend accepted the release but does not report it as freed.
    NotFreed,
    /// The release failed; never tried again.
    Failed,
}

/// The life of one domain: the one value of it that there is. Only [`step`](Self::step) assigns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life(State);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Live,
    Releasing,
    Ended(ReleaseOutcome),
    BackendOwned,
}

/// What may happen to a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A dispatch that leased it was published.
    Published,
    /// Close asks for its release.
    BeginRelease,
    /// The release is decided.
    FinishRelease(ReleaseOutcome),
    /// It becomes the backend's.
    Disown,
}

/// An edge that is not in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IllegalEdge {
    pub(crate) from: DomainPhase,
    pub(crate) to: DomainPhase,
}

impl Life {
    /// A domain that has just been allocated.
    pub(crate) const fn new() -> Self {
        Self(State::Live)
    }

    pub(crate) const fn phase(self) -> DomainPhase {
        phase_of(self.0)
    }

    /// How its release ended, once it has.
    pub(crate) const fn release_outcome(self) -> Option<ReleaseOutcome> {
        match self.0 {
            State::Ended(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// The transition function.
    pub(crate) fn step(&mut self, event: Event) -> Result<(), IllegalEdge> {
        let next = match (self.0, event) {
            (State::Live, Event::Published) => State::Live,
            (State::Live, Event::BeginRelease) => State::Releasing,
            (State::Live | State::BackendOwned, Event::Disown) => State::BackendOwned,
            (State::Releasing, Event::FinishRelease(outcome)) => State::Ended(outcome),
            (State::BackendOwned, Event::Published) => State::BackendOwned,
            (from, event) => {
                let to = match event {
                    Event::Published => State::Live,
                    Event::BeginRelease => State::Releasing,
                    Event::FinishRelease(outcome) => State::Ended(outcome),
                    Event::Disown => State::BackendOwned,
                };
                return Err(IllegalEdge { from: phase_of(from), to: phase_of(to) });
            }
        };
        self.0 = next;
        Ok(())
    }
}

const fn phase_of(state: State) -> DomainPhase {
    match state {
        State::Live => DomainPhase::Live,
        State::Releasing => DomainPhase::Releasing,
        State::Ended(ReleaseOutcome::Freed) => DomainPhase::Freed,
        State::Ended(ReleaseOutcome::NotFreed | ReleaseOutcome::Failed) => DomainPhase::Unreleased,
        State::BackendOwned => DomainPhase::BackendOwned,
    }
}
