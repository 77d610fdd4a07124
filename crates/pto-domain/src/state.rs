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

#[cfg(test)]
mod tests {
    use super::*;

    const OUTCOMES: [ReleaseOutcome; 3] = [ReleaseOutcome::Freed, ReleaseOutcome::NotFreed, ReleaseOutcome::Failed];

    /// Every state, each reached by legal events only.
    fn states() -> Vec<Life> {
        let after = |events: &[Event]| {
            let mut life = Life::new();
            for event in events {
                life.step(*event).unwrap();
            }
            life
        };
        let mut states = vec![after(&[]), after(&[Event::BeginRelease]), after(&[Event::Disown])];
        states.extend(OUTCOMES.map(|outcome| after(&[Event::BeginRelease, Event::FinishRelease(outcome)])));
        states
    }

    fn events() -> Vec<Event> {
        let mut events = vec![Event::Published, Event::BeginRelease, Event::Disown];
        events.extend(OUTCOMES.map(Event::FinishRelease));
        events
    }

    /// The table of the module's documentation, written out a second time.
    fn documented(from: DomainPhase, event: Event) -> Option<DomainPhase> {
        use DomainPhase as P;
        match (from, event) {
            (P::Live, Event::Published) => Some(P::Live),
            (P::Live, Event::BeginRelease) => Some(P::Releasing),
            (P::Live, Event::Disown) => Some(P::BackendOwned),
            (P::Releasing, Event::FinishRelease(ReleaseOutcome::Freed)) => Some(P::Freed),
            (P::Releasing, Event::FinishRelease(_)) => Some(P::Unreleased),
            (P::BackendOwned, Event::Published | Event::Disown) => Some(P::BackendOwned),
            _ => None,
        }
    }

    #[test]
    fn every_state_takes_exactly_the_documented_edges_and_an_illegal_one_changes_nothing() {
        let mut legal = 0;
        for start in states() {
            for event in events() {
                let mut life = start;
                match (life.step(event), documented(start.phase(), event)) {
                    (Ok(()), Some(to)) => {
                        assert_eq!(life.phase(), to, "{start:?} {event:?}");
                        legal += 1;
                    }
                    (Err(edge), None) => {
                        assert_eq!(life, start, "an illegal edge must change nothing");
                        assert_eq!(edge.from, start.phase());
                        assert_eq!(edge.to, aim(event), "{start:?} {event:?}");
                    }
                    (result, documented) => panic!("{start:?} {event:?}: {result:?}, documented {documented:?}"),
                }
            }
        }
        assert_eq!((states().len(), events().len(), legal), (6, 6, 8));
    }

    fn aim(event: Event) -> DomainPhase {
        match event {
            Event::Published => DomainPhase::Live,
            Event::BeginRelease => DomainPhase::Releasing,
            Event::FinishRelease(ReleaseOutcome::Freed) => DomainPhase::Freed,
            Event::FinishRelease(_) => DomainPhase::Unreleased,
            Event::Disown => DomainPhase::BackendOwned,
        }
    }

    #[test]
    fn only_an_ended_release_has_an_outcome() {
        let outcomes: Vec<_> = states().into_iter().map(Life::release_outcome).collect();
        let expected: Vec<_> = [None; 3].into_iter().chain(OUTCOMES.map(Some)).collect();
        assert_eq!(outcomes, expected);
    }

    #[test]
    fn phases_print_as_words_for_messages() {
        let words: Vec<String> = states().iter().map(|life| life.phase().to_string()).collect();
        let ended = ["freed", "not released", "not released"];
        assert_eq!(words[..3], ["live", "being released", "owned by the backend"]);
        assert_eq!(words[3..], ended);
    }
}
