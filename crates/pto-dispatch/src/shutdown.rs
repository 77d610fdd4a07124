//! Closing a worker (design rule 20), as a state machine with one function that assigns the phase.
//!
//! ```text
//!          close                 drained              backend closed
//!   Open ---------> Draining ---------------> Teardown ------------> Closed
//!                      ^                        |   ^
//!                      | deadline               |   | close again: retries the backend's close only
//!                      +--(stays Draining)      v   |
//!                                              Failed
//! ```
//!
//! | from | to | when |
//! |---|---|---|
//! | Open | Draining | the first close |
//! | Draining | Teardown | every dispatch is terminal |
//! | Teardown | Closed | the backend is closed, whatever else failed |
//! | Teardown | Failed | the backend's close failed |
//! | Failed | Teardown | close is called again |

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use pto_domain::ReleaseOutcome;
use pto_simpler_sys::{BackendError, Call, DomainState, HostBufferId};

use crate::error::{CloseFailure, Error};
use crate::inner::{Inner, Refusal, guarded};
use crate::program::DispatchId;
use crate::reentry;
use crate::staging;
use crate::sync::{AtomicBool, Condvar, Mutex, Ordering, Rank, deadline_after};

/// The outcome of a close attempt, shared by everybody who waited for it.
type Attempt = Result<(), Arc<CloseFailure>>;

#[derive(Debug)]
enum Phase {
    Open,
    Draining,
    Teardown {
        attempt: u64,
    },
    /// `seen`: somebody has been given the outcome.
    Failed {
        attempt: u64,
        outcome: Attempt,
        seen: bool,
    },
    Closed {
        outcome: Attempt,
    },
}

/// Where a worker is on its way down.
#[derive(Debug)]
pub(crate) struct Shutdown {
    phase: Mutex<Phase>,
    changed: Condvar,
    /// The thread that tears down for callers with a deadline.
    closer: Mutex<Option<JoinHandle<()>>>,
    /// Set once teardown has begun: host buffers are the backend's from then on.
    torn_down: AtomicBool,
}

impl Shutdown {
    pub(crate) fn new() -> Self {
        Self {
            phase: Mutex::new(Rank::Phase, Phase::Open),
            changed: Condvar::new(),
            closer: Mutex::new(Rank::Closer, None),
            torn_down: AtomicBool::new(false),
        }
    }

    pub(crate) fn is_torn_down(&self) -> bool {
        self.torn_down.load(Ordering::Acquire)
    }

    /// Whether nothing is left to do.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(&*self.phase.lock(), Phase::Closed { .. })
    }

    /// The one place that assigns the phase. Returns false, and changes nothing, on an edge that is not in the table.
    fn transition(&self, phase: &mut Phase, next: Phase) -> bool {
        let legal = matches!(
            (&*phase, &next),
            (Phase::Open, Phase::Draining)
                | (Phase::Draining | Phase::Failed { .. }, Phase::Teardown { .. })
                | (Phase::Teardown { .. }, Phase::Closed { .. } | Phase::Failed { .. })
        );
        debug_assert!(legal, "illegal close transition from {phase:?} to {next:?}");
        if legal {
            *phase = next;
            self.changed.notify_all();
        }
        legal
    }

    fn join_closer(&self) {
        let closer = self.closer.lock().take();
        if let Some(closer) = closer
            && closer.join().is_err()
        {
            tracing::error!("the closing thread panicked");
        }
    }
}

impl Inner {
    /// Closes the worker, waiting without limit or for at most `limit`.
    pub(crate) fn close(self: &Arc<Self>, limit: Option<Duration>) -> Result<(), Error> {
        reentry::refuse(self.id, "close")?;
        self.backend.check_blocking()?;
        self.close_here(limit)
    }

    /// The close, on a thread that may block.
    fn close_here(self: &Arc<Self>, limit: Option<Duration>) -> Result<(), Error> {
        let deadline = limit.and_then(deadline_after);
        let bounded = deadline.is_some();
        self.stop_admission();
        let mut joined: Option<u64> = None;
        loop {
            let mut phase = self.shutdown.phase.lock();
            match &mut *phase {
                Phase::Open | Phase::Draining => {
                    drop(phase);
                    if !self.admission.wait_idle(deadline) {
                        return Err(self.close_timeout());
                    }
                    self.begin_teardown(None, bounded)?;
                    joined = Some(1);
                }
                Phase::Teardown { attempt } => {
                    joined.get_or_insert(*attempt);
                    let (phase, in_time) = self.shutdown.changed.wait_until(phase, deadline);
                    let over = !matches!(&*phase, Phase::Teardown { .. });
                    drop(phase);
                    if !in_time && !over {
                        return Err(self.close_timeout());
                    }
                }
                Phase::Failed { attempt, outcome, seen } => {
                    let (attempt, outcome) = (*attempt, outcome.clone());
                    // Whoever waited for this attempt gets its outcome; only a new call starts another.
                    let mine = joined.is_some_and(|joined| joined <= attempt);
                    *seen |= mine;
                    drop(phase);
                    self.shutdown.join_closer();
                    if mine {
                        return outcome.map_err(Error::Close);
                    }
                    self.begin_teardown(Some(attempt), bounded)?;
                    joined = Some(attempt + 1);
                }
                Phase::Closed { outcome } => {
                    let outcome = outcome.clone();
                    drop(phase);
                    self.shutdown.join_closer();
                    return outcome.map_err(Error::Close);
                }
            }
        }
    }

    /// Turns submitters away. Every closer does so before it looks at anything else: the phase alone must never tell
    /// a second closer that nobody gets in any more.
    fn stop_admission(&self) {
        self.admission.refuse(Refusal::Closing, |old| !matches!(old, Refusal::Closing | Refusal::Closed));
        let mut phase = self.shutdown.phase.lock();
        if matches!(&*phase, Phase::Open) {
            self.shutdown.transition(&mut phase, Phase::Draining);
            drop(phase);
            tracing::debug!("closing");
        }
    }

    fn close_timeout(&self) -> Error {
        let in_flight: Vec<DispatchId> = self.admission.in_use().into_iter().map(DispatchId).collect();
        Error::CloseTimeout { in_flight: in_flight.into() }
    }

    /// Becomes the one closer, unless another thread was faster. `failed` names the attempt that is retried.
    fn begin_teardown(self: &Arc<Self>, failed: Option<u64>, bounded: bool) -> Result<(), Error> {
        let (attempt, unseen) = {
            let mut phase = self.shutdown.phase.lock();
            let next = match &*phase {
                Phase::Draining if failed.is_none() => (1, None),
                // The caller of that attempt stopped waiting before it was over: this one reports for it.
                Phase::Failed { attempt, outcome: Err(failure), seen: false } if failed == Some(*attempt) => {
                    (attempt + 1, Some(Arc::clone(failure)))
                }
                Phase::Failed { attempt, .. } if failed == Some(*attempt) => (attempt + 1, None),
                _ => return Ok(()),
            };
            self.shutdown.transition(&mut phase, Phase::Teardown { attempt: next.0 });
            next
        };
        self.shutdown.torn_down.store(true, Ordering::Release);
        if !bounded {
            self.teardown(attempt, unseen);
            return Ok(());
        }
        // The backend's own calls may take longer than the caller wants to wait.
        let (inner, theirs) = (Arc::clone(self), unseen.clone());
        // Locked until the handle is in its place: whoever finds the worker closed must find the thread to join.
        let mut closer = self.shutdown.closer.lock();
        match std::thread::Builder::new().name("pto-close".into()).spawn(move || inner.teardown(attempt, theirs)) {
            Ok(thread) => *closer = Some(thread),
            Err(error) => {
                drop(closer);
                tracing::warn!(%error, "no thread for a bounded close; closing on this one");
                self.teardown(attempt, unseen);
            }
        }
        Ok(())
    }

    /// Steps of a close after the drain; every one is attempted. A retry closes the backend and nothing else, and
    /// reports what an earlier attempt could tell nobody.
    fn teardown(&self, attempt: u64, unseen: Option<Arc<CloseFailure>>) {
        let mut errors = Vec::new();
        if attempt == 1 {
            self.admission.refuse(Refusal::Closed, |_| true);
            self.release_domains(&mut errors);
            self.free_resident(&mut errors);
            self.release_buffers(&mut errors);
        }
        let closed = guarded(Call::Close, || self.backend.close());
        let complete = closed.is_ok();
        errors.extend(closed.err().map(Error::Backend));
        let outcome = self.compose(unseen.as_deref(), errors, complete);
        if let Err(failure) = &outcome {
            tracing::warn!(error = %failure, "close failed");
        }
        let mut phase = self.shutdown.phase.lock();
        let next =
            if complete { Phase::Closed { outcome } } else { Phase::Failed { attempt, outcome, seen: false } };
        self.shutdown.transition(&mut phase, next);
    }

    /// Releases retained domains in reverse first-use order and verifies that each is freed. After a failure they
    /// are the backend's, and the plan is empty.
    fn release_domains(&self, errors: &mut Vec<Error>) {
        let plan = {
            let mut table = self.table.lock();
            table.stop_leasing();
            table.release_plan()
        };
        for slot in plan {
            let (key, begun) = {
                let mut table = self.table.lock();
                let key: Arc<str> = table.domain(slot).map_or("?", |d| d.backend_name()).into();
                (key, table.begin_release(slot))
            };
            let id = match begun {
                Ok(id) => id,
                Err(error) => {
                    errors.push(error.into());
                    continue;
                }
            };
            let released = guarded(Call::ReleaseDomain, || self.backend.release_domain(id));
            let outcome = match released {
                Err(source) => {
                    errors.push(Error::Release { what: key, source });
                    ReleaseOutcome::Failed
                }
                Ok(()) => match guarded(Call::DomainState, || self.backend.domain_state(id)) {
                    Ok(DomainState::Freed) => ReleaseOutcome::Freed,
                    Ok(_) => {
                        errors.push(Error::NotFreed { key });
                        ReleaseOutcome::NotFreed
                    }
                    Err(source) => {
                        errors.push(Error::Release { what: key, source });
                        ReleaseOutcome::Failed
                    }
                },
            };
            if let Err(error) = self.table.lock().finish_release(slot, outcome) {
                errors.push(error.into());
            }
        }
    }

    fn free_resident(&self, errors: &mut Vec<Error>) {
        let resident = std::mem::take(&mut *self.resident.lock());
        for id in resident.into_iter().rev() {
            if let Err(source) = guarded(Call::Free, || self.backend.free(id)) {
                errors.push(Error::Release { what: format!("device tensor {id}").into(), source });
            }
        }
    }

    /// Releases our own host buffers: retained staging, intermediates, the zeros, and what was dropped in builders.
    fn release_buffers(&self, errors: &mut Vec<Error>) {
        errors.extend(self.staging.clear(&*self.backend));
        let mut ours: Vec<HostBufferId> = std::mem::take(&mut *self.deferred.lock());
        for program in &self.programs {
            ours.extend(program.intermediates.iter().flatten().map(|(id, _)| *id));
        }
        ours.extend(self.zeros);
        errors.extend(staging::release(&*self.backend, &mut ours));
    }

    /// The outcome: Ok only if nothing failed here and every earlier failure was delivered to somebody.
    fn compose(&self, unseen: Option<&CloseFailure>, errors: Vec<Error>, complete: bool) -> Attempt {
        let mut failures = self.failures.lock();
        let poison = failures.poison.clone();
        let undelivered: Vec<_> = failures.dispatches.drain(..).filter(|f| !f.is_delivered()).collect();
        let loose = std::mem::take(&mut failures.loose);
        drop(failures);
        let mut all: Vec<Error> = Vec::new();
        if let Some(unseen) = unseen {
            all.push(unseen.primary.clone());
            all.extend(unseen.others.iter().cloned());
        }
        let poison_first = |all: &mut Vec<Error>| {
            if let Some(poison) = &poison {
                poison.mark_delivered();
                all.push(Error::Failed(Arc::clone(poison)));
            }
        };
        let poison_undelivered = poison.as_ref().is_some_and(|p| !p.is_delivered());
        let first = unseen.is_none() && undelivered.is_empty() && !(errors.is_empty() && loose.is_empty());
        if poison_undelivered || first {
            poison_first(&mut all);
        }
        for failure in undelivered {
            if !poison.as_ref().is_some_and(|p| Arc::ptr_eq(p, &failure)) {
                failure.mark_delivered();
                all.push(Error::Failed(failure));
            }
        }
        all.extend(loose);
        all.extend(errors);
        let mut all = all.into_iter();
        match all.next() {
            None => Ok(()),
            Some(primary) => Err(Arc::new(CloseFailure { primary, others: all.collect(), complete })),
        }
    }

    /// What `Drop` does: a bounded close that logs. A worker that will not close is leaked, never collected.
    pub(crate) fn close_on_drop(self: &Arc<Self>) {
        if self.shutdown.is_closed() {
            return;
        }
        // Never inside a builder of this worker: whoever submits borrows it for as long as the build lasts.
        if guarded(Call::Close, || self.backend.check_blocking()).is_err() {
            // This thread may not wait: another one closes.
            let inner = Arc::clone(self);
            let spawned = std::thread::Builder::new().name("pto-close".into()).spawn(move || inner.close_bounded());
            if let Err(error) = spawned {
                tracing::error!(%error, "no thread to close a dropped worker with; it is leaked");
                std::mem::forget(Arc::clone(self));
            }
            return;
        }
        self.close_bounded();
    }

    fn close_bounded(self: &Arc<Self>) {
        let limit = self.mode.drop_limit;
        // No questions: the caller has asked, or this is a thread of our own.
        let closed = self.close_here(Some(limit));
        if let Err(error) = closed {
            tracing::error!(%error, "closing a dropped worker failed");
        }
        if !self.shutdown.is_closed() {
            tracing::error!(limit_ms = limit.as_millis() as u64, "a dropped worker is not closed; it is leaked");
            std::mem::forget(Arc::clone(self));
        }
    }
}

/// Closes a backend after a failed preparation, and returns the first error.
pub(crate) fn close_after(backend: &dyn pto_simpler_sys::Backend, first: Error) -> Error {
    if let Err(error) = guarded(Call::Close, || backend.close()) {
        log_second(&first, &error);
    }
    first
}

fn log_second(first: &Error, second: &BackendError) {
    tracing::error!(%first, %second, "preparation failed, and so did closing the backend");
}

#[cfg(all(test, not(loom)))]
mod tests {
    use pto_mock::{Emulator, Fault, FaultEffect};

    use super::*;
    use crate::options::Options;
    use crate::prepare::prepare;
    use crate::program::{Args, Program, ProgramResult, ProgramSpec};

    struct Idle(ProgramSpec);

    impl Program for Idle {
        fn spec(&self) -> &ProgramSpec {
            &self.0
        }

        fn build<'b>(&self, _: &crate::build::Build<'b>, _: &Args) -> ProgramResult {
            Ok(())
        }
    }

    fn failed(inner: &Inner) -> Option<u64> {
        match &*inner.shutdown.phase.lock() {
            Phase::Failed { attempt, .. } => Some(*attempt),
            _ => None,
        }
    }

    /// A closer that comes late, with what it saw overtaken by others, begins nothing: only the attempt that it saw
    /// fail, and only if it is the last one, is tried again.
    #[test]
    fn only_the_last_attempt_that_was_seen_to_fail_is_tried_again() {
        let emulator = Emulator::builder().build().unwrap();
        emulator.arm(Fault::new(Call::Close, FaultEffect::Before));
        emulator.arm(Fault::new(Call::Close, FaultEffect::Before).nth(2));
        let programs: [Arc<dyn Program>; 1] = [Arc::new(Idle(ProgramSpec::new("idle")))];
        let inner = prepare(&programs, &Options::ordinary(), |_| Ok(Arc::clone(&emulator) as _)).unwrap();
        let begin = |failed| inner.begin_teardown(failed, false).unwrap();
        inner.stop_admission();
        begin(Some(1));
        assert!(!inner.shutdown.is_torn_down(), "nothing has failed yet");
        begin(None);
        assert_eq!(failed(&inner), Some(1));
        for late in [None, Some(0), Some(2)] {
            begin(late);
            assert_eq!(failed(&inner), Some(1), "{late:?}");
        }
        begin(Some(1));
        assert_eq!(failed(&inner), Some(2));
        if let Phase::Failed { seen, .. } = &mut *inner.shutdown.phase.lock() {
            *seen = true;
        }
        for late in [None, Some(1), Some(3)] {
            begin(late);
            assert_eq!(failed(&inner), Some(2), "{late:?}");
        }
        begin(Some(2));
        assert!(inner.shutdown.is_closed());
    }
}
