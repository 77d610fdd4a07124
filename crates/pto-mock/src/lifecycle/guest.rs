//! Somebody else's program under the suite: random submissions, waits, drops and faults, on any backend, with the
//! oracle over the backend's own journal where it keeps one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use pto_dispatch::{Args, Dispatch, Error, Options, PreparedWorker, Program};
use pto_simpler_sys::{Backend, Call, DomainRequest, FRAMES, Family};

use super::oracle::{self, Rules};
use crate::{Fault, FaultEffect, FaultSchedule, FaultyBackend, Journal, strategies};

/// A program of yours, as [`exercise`] drives it.
pub trait LifecycleProgram {
    /// The program.
    fn program(&self) -> Arc<dyn Program>;

    /// What it asks for under a domain name; `None` for a name that it never asks for.
    fn request(&self, domain: &str) -> Option<DomainRequest>;

    /// Arguments for one dispatch.
    ///
    /// # Errors
    ///
    /// What the worker returns; allowed once a fault is armed.
    fn args(&self, worker: &PreparedWorker) -> Result<Args, Error>;

    /// Compares the results of a dispatch that succeeded. `fresh` says whether its windows were promised to be zero.
    ///
    /// # Errors
    ///
    /// What is wrong with them.
    fn verify(&self, args: &Args, fresh: bool) -> Result<(), String>;
}

/// One operation of a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// `submit`.
    Submit,
    /// `try_submit`.
    TrySubmit,
    /// `wait` on the oldest handle.
    Wait,
    /// `wait_timeout(0)` on the newest handle.
    Poll,
    /// The oldest handle is dropped.
    Drop,
    /// A fault is armed.
    Arm(Fault),
}

/// How a worker is prepared, and what is then done with it. Plain data: prints, replays, shrinks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Whether execution is persistent.
    pub persistent: bool,
    /// Whether windows are reset, where it is.
    pub reset: bool,
    /// What is done; then the worker is closed.
    pub steps: Vec<Step>,
}

/// Plans of at most `most` steps for a backend with `chips` chips. One plan in two has faults; they hit any call but
/// those with which a test looks at its own buffers.
pub fn plans(chips: u32, most: usize) -> impl Strategy<Value = Plan> {
    let effects = [FaultEffect::Before, FaultEffect::After, FaultEffect::NoReply];
    let fault = strategies::fault(chips, &effects).prop_filter("the test's own looks are not hit", |f| {
        !matches!(f.call, Call::ReadBuffer | Call::WriteBuffer)
    });
    let calm = prop_oneof![
        4 => Just(Step::Submit),
        2 => Just(Step::TrySubmit),
        3 => Just(Step::Wait),
        1 => Just(Step::Poll),
        1 => Just(Step::Drop),
    ]
    .boxed();
    let rough = prop_oneof![6 => calm.clone(), 1 => fault.prop_map(Step::Arm)];
    let steps = prop_oneof![proptest::collection::vec(calm, 0..=most), proptest::collection::vec(rough, 0..=most)];
    (any::<bool>(), any::<bool>(), steps).prop_map(|(persistent, reset, steps)| Plan { persistent, reset, steps })
}

/// One plan in progress.
struct Exercise<'a> {
    guest: &'a dyn LifecycleProgram,
    worker: PreparedWorker,
    fresh: bool,
    /// Whether a fault was ever armed: only then may anything fail.
    faulty: bool,
    handles: VecDeque<(Dispatch, Args)>,
}

impl Exercise<'_> {
    /// Errors are for faults, and never for bugs.
    fn allow(&self, what: &str, error: &Error) -> Result<(), String> {
        if error.family() == Family::Broken {
            return Err(format!("{what}: {error}"));
        }
        if self.faulty { Ok(()) } else { Err(format!("{what} fails without a fault: {error}")) }
    }

    fn submit(&mut self, patient: bool) -> Result<(), String> {
        let args = match self.guest.args(&self.worker) {
            Ok(args) => args,
            Err(error) => return self.allow("making arguments", &error),
        };
        let id = self.worker.only().map_err(|error| error.to_string())?;
        let submitted = if patient { self.worker.submit(id, &args) } else { self.worker.try_submit(id, &args) };
        match submitted {
            Ok(dispatch) => self.handles.push_back((dispatch, args)),
            Err(Error::WouldBlock { .. }) if !patient => {}
            Err(error) => return self.allow("submit", &error),
        }
        let held = self.worker.in_flight().len();
        if held > FRAMES { Err(format!("I9: {held} dispatches in flight")) } else { Ok(()) }
    }

    fn wait(&mut self) -> Result<(), String> {
        let Some((dispatch, args)) = self.handles.pop_front() else { return Ok(()) };
        let (first, again) = (dispatch.wait(), dispatch.wait());
        if format!("{first:?}") != format!("{again:?}") || !dispatch.is_done() {
            return Err(format!("I10: {first:?}, then {again:?}"));
        }
        match first {
            Ok(()) => {
                self.guest.verify(&args, self.fresh).map_err(|what| format!("dispatch {}: {what}", dispatch.id()))
            }
            Err(error) => self.allow("a dispatch", &error),
        }
    }
}

/// Carries out a plan on a backend in state `New`: prepares, takes every step, waits for what is in flight, closes, and
/// lets the oracle judge the journal.
///
/// `journal` is one that the backend keeps from inside ([`Emulator::journal`](crate::Emulator::journal)). A journal from
/// outside ([`JournalBackend`](crate::JournalBackend)) learns of fences and frees too late for the oracle; leave it out
/// for a backend that keeps none, and everything else is checked all the same.
///
/// # Errors
///
/// The first thing that is wrong: an invariant, an error without a fault, results that differ.
pub fn exercise(
    guest: &dyn LifecycleProgram,
    backend: Arc<dyn Backend>,
    journal: Option<&Journal>,
    plan: &Plan,
) -> Result<(), String> {
    let faulty = Arc::new(FaultyBackend::new(backend, FaultSchedule::none()));
    let faults = faulty.faults();
    let options = if plan.persistent { Options::persistent().reset(plan.reset) } else { Options::ordinary() };
    let worker = PreparedWorker::prepare(&[guest.program()], &options, faulty).map_err(|e| e.to_string())?;
    let fresh = !plan.persistent || plan.reset;
    let mut run = Exercise { guest, worker, fresh, faulty: false, handles: VecDeque::new() };
    for step in &plan.steps {
        match step {
            Step::Submit => run.submit(true)?,
            Step::TrySubmit => run.submit(false)?,
            Step::Wait => run.wait()?,
            Step::Poll => {
                if let Some((dispatch, _)) = run.handles.back() {
                    let waited = dispatch.wait_timeout(Duration::ZERO);
                    if let Err(error) = waited
                        && !matches!(error, Error::WaitTimeout { .. })
                    {
                        run.allow("a dispatch", &error)?;
                    }
                }
            }
            Step::Drop => drop(run.handles.pop_front()),
            Step::Arm(fault) => {
                run.faulty = true;
                faults.arm(*fault);
            }
        }
    }
    while !run.handles.is_empty() {
        run.wait()?;
    }
    let mut closed = run.worker.close();
    while let Err(error) = closed {
        run.allow("close", &error)?;
        // Only a failed backend close is tried again; each fault fails one attempt.
        closed = if error.may_retry() { run.worker.close() } else { Ok(()) };
    }
    let Some(journal) = journal else { return Ok(()) };
    let request = |name: &str| {
        let own = name.split_once(':').map_or(name, |(_, own)| own);
        guest.request(own)
    };
    let resets = plan.persistent && plan.reset;
    let rules = Rules { frames: FRAMES, resets, request: &request, closed: true };
    oracle::check(&journal.events(), rules).map_err(|breach| format!("{breach}\n{journal}"))
}
