//! The oracle: what each fault must come to, from the rules of the design alone.
//!
//! * Rule 17: a failure before the opening rejects that dispatch only; after it, it poisons persistent dispatch. A
//!   failed call that had an effect, or that is final for the worker, sticks even where the builder swallows it.
//! * Rule 18: ordinary dispatch goes on, unless the failure is final for the worker.
//! * Rule 7: what fails in the cleanup of a run is the outcome, or rides along with the failure of the run.
//! * Rule 20: close attempts every step, reports what nobody has seen, and only a failed backend close can be tried
//!   again.

use pto_mock::FaultEffect;
use pto_simpler_sys::{Call, Family};

use crate::ground::{Act, Mode, Site};
use crate::operations::{Kind, Operation, Own};

/// One fault at one operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell<'a> {
    pub(crate) op: &'a Operation,
    pub(crate) mode: Mode,
    pub(crate) site: Site,
    pub(crate) call: Call,
    pub(crate) occurrence: u64,
    pub(crate) effect: FaultEffect,
    pub(crate) fatal: bool,
}

/// What the operation answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    /// It succeeds.
    Fine,
    /// Its own failure and nothing else.
    Own,
    /// The fault is the first cause.
    Fault,
    /// Its own failure, and the fault attached.
    OwnThenFault,
    /// The backend's panic comes back.
    Panic,
}

/// What becomes of the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    Usable,
    Poisoned,
    Finished,
    /// The backend itself refuses the next run, which is final.
    BackendRefuses,
}

/// What close has to report afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtClose {
    Nothing,
    Own,
    Fault,
    OwnThenFault,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected {
    pub(crate) shown: Shown,
    pub(crate) after: After,
    pub(crate) close: AtClose,
}

impl Cell<'_> {
    /// Why the cell cannot be, where it cannot.
    pub(crate) fn impossible(&self) -> Option<&'static str> {
        use FaultEffect::{Before, Hang, NoReply};
        match (self.op.own, self.call) {
            (Own::BuilderLate, Call::Task) => Some("whether a task of a failed build starts is left to the device"),
            (Own::Start, Call::Start) => Some("the call has one outcome, and it is the operation's own failure"),
            _ if self.effect == Hang => None,
            (Own::Task, Call::Task) => Some("a task has one outcome, and it is the operation's own failure"),
            (Own::Task, Call::Run) if matches!(self.effect, Before | NoReply) => {
                Some("a run has one result, and its task has failed already")
            }
            (Own::BuilderEarly | Own::BuilderLate, Call::Submit) if self.effect != Before => {
                Some("a submission whose build failed has no effect to fail after")
            }
            _ => None,
        }
    }

    /// The failure ends the worker's useful life by itself.
    fn is_final(&self) -> bool {
        (self.effect == FaultEffect::Unwind && !self.is_in_entry()) || self.fatal
    }

    /// The scratch that the host entry allocates: the backend catches what unwinds in an entry.
    fn is_in_entry(&self) -> bool {
        matches!(self.op.act, Act::Rich | Act::Swallow) && self.call == Call::AllocScratch && self.occurrence > 1
    }

    pub(crate) fn expected(&self) -> Expected {
        let fine = Expected { shown: Shown::Fine, after: After::Usable, close: AtClose::Nothing };
        let fault = Expected { shown: Shown::Fault, ..fine };
        if self.effect == FaultEffect::Hang {
            return self.undisturbed();
        }
        match self.op.kind {
            Kind::Prepare if self.op.own == Own::Start && self.call == Call::Close => {
                Expected { shown: Shown::Own, ..fine }
            }
            Kind::Prepare | Kind::User => fault,
            Kind::Silent if self.call == Call::ReleaseBuffer => Expected { close: AtClose::Fault, ..fine },
            Kind::Close if self.op.own == Own::Undelivered => Expected { shown: Shown::OwnThenFault, ..fine },
            Kind::Close => fault,
            Kind::Drop => fine,
            Kind::Dispatch | Kind::Silent => self.dispatch(),
        }
    }

    /// Without a fault, or with one that only delays.
    pub(crate) fn undisturbed(&self) -> Expected {
        let persistent = self.mode.persistent();
        let shown = if self.op.own == Own::None { Shown::Fine } else { Shown::Own };
        let after = match self.op.own {
            Own::BuilderLate | Own::Task if persistent => After::Poisoned,
            Own::Task if self.mode == Mode::Final => After::Finished,
            _ => After::Usable,
        };
        Expected { shown, after, close: AtClose::Nothing }
    }

    /// Whether the dispatch goes on after the call, on a thread of the backend.
    pub(crate) fn is_behind_submit(&self) -> bool {
        let builder_fails = matches!(self.op.own, Own::BuilderEarly | Own::BuilderLate);
        matches!(self.call, Call::Task | Call::Run) || (self.call == Call::ReleaseBuffer && !builder_fails)
    }

    fn dispatch(&self) -> Expected {
        let undisturbed = self.undisturbed();
        if self.call == Call::ReleaseBuffer && !self.is_behind_submit() {
            let poisoned = undisturbed.after == After::Poisoned;
            let close = if poisoned { AtClose::OwnThenFault } else { AtClose::Fault };
            return Expected { close, ..undisturbed };
        }
        if self.is_behind_submit() {
            return self.after_submit();
        }
        let opened = self.opens();
        let swallowed = self.op.act == Act::Swallow && self.effect == FaultEffect::Before && !self.fatal;
        if swallowed && opened && !self.is_opening() {
            return undisturbed;
        }
        let after = match self.mode.persistent() {
            true if opened || self.is_final() => After::Poisoned,
            false if self.is_final() => After::Finished,
            _ => After::Usable,
        };
        let accepted = self.call == Call::Submit && self.effect != FaultEffect::Before;
        // The run goes on without a handle.
        let close = if accepted && self.op.own == Own::Task { AtClose::Own } else { AtClose::Nothing };
        let panics = self.call == Call::Submit && self.effect == FaultEffect::Unwind;
        Expected { shown: if panics { Shown::Panic } else { Shown::Fault }, after, close }
    }

    fn opens(&self) -> bool {
        match self.call {
            // Staging comes before the run.
            Call::CreateBuffer | Call::FillBuffer => false,
            Call::Submit => self.effect != FaultEffect::Before,
            call => !self.op.unopened.contains(&call),
        }
    }

    fn is_opening(&self) -> bool {
        self.op.opening.iter().any(|(call, count)| *call == self.call && self.occurrence <= *count)
            || self.call == Call::Submit
    }

    fn after_submit(&self) -> Expected {
        let shown = if self.op.own == Own::None { Shown::Fault } else { Shown::OwnThenFault };
        let cleanup = self.call == Call::Run && matches!(self.effect, FaultEffect::After | FaultEffect::Unwind);
        let after = if self.mode.persistent() {
            After::Poisoned
        } else if self.fatal || (self.call == Call::Task && self.mode == Mode::Final) {
            After::Finished
        } else if cleanup && self.site == Site::Emulator {
            After::BackendRefuses
        } else {
            After::Usable
        };
        Expected { shown, after, close: AtClose::Nothing }
    }

    /// The family of an error with this text that the fault has brought about.
    pub(crate) fn family(&self, text: &str) -> Family {
        // Where the backend unwinds through us it has a bug. A task that unwinds has failed like any other, and so
        // has a run; a wrapper cannot unwind in the middle of a batch.
        let task = matches!(self.call, Call::Task | Call::Run) || self.is_in_entry();
        let batch = self.call == Call::CopyTo && self.site == Site::Wrapper;
        if self.effect == FaultEffect::Unwind && !task {
            assert!(batch || text.contains("injected unwind"), "{text}");
        }
        if text.contains("injected unwind") && !task { Family::Broken } else { Family::Backend }
    }
}
