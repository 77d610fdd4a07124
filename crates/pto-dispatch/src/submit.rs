//! Submission: from arguments to a published dispatch, or to a rejection that leaves nothing behind.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use pto_simpler_sys::{Backend, BackendError, Call, CallConfig, Effect, RunId, RunState, SubmitError};

use crate::build::{Built, Graph};
use crate::completion::Dispatch;
use crate::error::{Error, Failure};
use crate::frame::Grant;
use crate::inner::{Inner, PreparedProgram, Stage, Storage, guarded, panic_text};
use crate::program::{Args, DispatchId, ProgramId};
use crate::reentry::{self, Building};
use crate::stats::add;
use crate::sync::Ordering;

/// Whether a submitter waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    Wait,
    Try,
}

type Payload = Box<dyn std::any::Any + Send>;

impl Inner {
    /// Submits one dispatch.
    pub(crate) fn submit(
        self: &Arc<Self>,
        program: ProgramId,
        args: &Args,
        config: Option<&CallConfig>,
        patience: Patience,
    ) -> Result<Dispatch, Error> {
        reentry::refuse(self.id, "submit")?;
        self.backend.check_blocking()?;
        let prepared = self.program(program)?;
        // Asked for once, and before anything is held: it is the user's code.
        let spec = prepared.program.spec();
        args.check(spec, self.id)?;
        let config = config.unwrap_or(&spec.config);
        config.check(Call::Submit)?;
        let grant = match patience {
            Patience::Wait => self.admission.acquire()?,
            Patience::Try => match self.admission.try_acquire(self.most_in_flight(prepared))? {
                Some(grant) => grant,
                None => return Err(Error::WouldBlock { reason: "earlier dispatches are in flight" }),
            },
        };
        let storage = std::mem::replace(
            &mut *self.slots[grant.frame].stage.lock(),
            Stage::Building { run: grant.id, ended: None },
        );
        let Stage::Idle(mut storage) = storage else {
            self.admission.cancel(grant.frame);
            return Err(Error::broken("a granted frame is not idle"));
        };
        storage.program = program.index;
        storage.args.copy_from(args);
        storage.config.clone_from(config);
        match self.prepare_opening(prepared, &mut storage, grant, patience) {
            Ok(()) => self.build(prepared, grant, storage, patience),
            Err(error) => {
                // Before the opening, so only a failure that is final for the worker concerns anybody else.
                let rejection = Rejection {
                    error,
                    first: None,
                    returned: false,
                    payload: None,
                    swept: None,
                    consequence: false,
                };
                self.reject(prepared, grant.id, false, &rejection);
                self.give_back(grant.frame, storage);
                Err(rejection.error)
            }
        }
    }

    pub(crate) fn program(&self, id: ProgramId) -> Result<&PreparedProgram, Error> {
        if id.worker != self.id {
            return Err(Error::UnknownProgram);
        }
        self.programs.get(id.index).ok_or(Error::UnknownProgram)
    }

    /// How many dispatches may be in flight for a submission that does not want to wait for the device queue.
    fn most_in_flight(&self, program: &PreparedProgram) -> usize {
        let resets = self.mode.reset && self.table.lock().retained(program.index).next().is_some();
        let depth = self.negotiated.get().map_or(1, |n| n.depth.guaranteed());
        let waits = resets || self.ordered.load(Ordering::Acquire) > 0;
        if waits { 0 } else { (depth as usize).saturating_sub(1) }
    }

    /// Everything of the opening that can be settled before the run: the plan with its checks, and staging.
    fn prepare_opening(
        &self,
        program: &PreparedProgram,
        storage: &mut Storage,
        grant: Grant,
        patience: Patience,
    ) -> Result<(), Error> {
        storage.plan = self.opening_plan(program)?;
        if patience == Patience::Try && grant.in_flight > 0 && self.ordered.load(Ordering::Acquire) > 0 {
            return Err(Error::WouldBlock { reason: "the cleanup of an earlier dispatch comes first" });
        }
        let Some(reset) = &storage.plan.reset else { return Ok(()) };
        if patience == Patience::Try && grant.in_flight > 0 && reset.copies() > 0 {
            return Err(Error::WouldBlock { reason: "the reset waits for the dispatches in flight" });
        }
        match self.zeros {
            Some(zeros) => {
                storage.sources.clear();
                storage.sources.push(zeros);
            }
            None => {
                let Storage { plan, sources, staging, .. } = storage;
                let sizes = plan.reset.as_ref().map_or(&[][..], |reset| reset.staging_sizes());
                let made = self.staging.acquire(&*self.backend, sizes, sources, staging)?;
                let owned = sizes.iter().zip(sources.iter()).filter(|(_, id)| staging.contains(id));
                storage.staging_bytes = owned.map(|(nbytes, _)| *nbytes).sum();
                program.counters.staging_taken(made, storage.staging_bytes);
            }
        }
        Ok(())
    }

    fn build(
        self: &Arc<Self>,
        program: &PreparedProgram,
        grant: Grant,
        mut storage: Box<Storage>,
        patience: Patience,
    ) -> Result<Dispatch, Error> {
        let cell = crate::completion::CellPool::acquire(&self.pool, grant.id);
        storage.cell = Some(cell.clone());
        let config = storage.config.clone();
        let mut graph = Graph {
            inner: self,
            program,
            storage: Some(storage),
            id: DispatchId(grant.id),
            frame: grant.frame,
            would_wait: patience == Patience::Try && grant.in_flight > 0,
            built: Built::NotCalled,
            opened: false,
        };
        let submitted = {
            let _building = Building::enter(self.id);
            crate::sync::assert_unlocked("submit");
            catch_unwind(AssertUnwindSafe(|| self.backend.submit(RunId(grant.id), &config, &mut graph)))
        };
        let Graph { built, opened, storage, .. } = graph;
        // The build puts it back whatever happens in it; a backend that unwinds out of the build itself is the
        // only way to lose it, and then everything in it has been dropped.
        let storage = storage.unwrap_or_default();
        let mut verdict = Verdict::of(submitted, built, &program.name);
        count(program, &storage, opened);

        let (mut accepted, mut failure) = (true, None);
        if let Verdict::Rejected(rejection) = &mut verdict {
            let state = guarded(Call::Submit, || Ok(self.backend.run_state(RunId(grant.id))));
            accepted = match state {
                Ok(state) => state != RunState::Unknown,
                // Nothing more can be learned of the run: it counts as not accepted, and the worker is finished.
                Err(error) => {
                    rejection.swept.get_or_insert(error);
                    false
                }
            };
            // Before the frame is free: whoever is next in line must find the worker poisoned.
            failure = self.reject(program, grant.id, opened, rejection);
        }
        if accepted {
            // A rejected dispatch whose run the backend has accepted all the same goes on; nobody has its handle, so
            // its end is for close to report.
            self.accept(program, grant, storage);
            self.release_deferred();
        } else {
            self.give_back(grant.frame, storage);
        }
        match verdict {
            Verdict::Accepted => Ok(Dispatch::new(cell, self.id, Arc::clone(&self.backend) as Arc<dyn Backend>)),
            Verdict::Rejected(rejection) => match (rejection.payload, failure) {
                (Some(payload), _) => resume_unwind(payload),
                // By itself it would invite to try again, on a worker that takes no more.
                (None, Some(failure)) if rejection.error.may_retry() => Err(Error::Failed(failure)),
                (None, _) => Err(rejection.error),
            },
        }
    }

    /// The run is the backend's: publish it, and go on where its end was reported already.
    fn accept(&self, program: &PreparedProgram, grant: Grant, storage: Box<Storage>) {
        add(&program.counters.dispatches, 1);
        if storage.allocated > 0 {
            self.ordered.fetch_add(1, Ordering::AcqRel);
        }
        if !storage.leased.is_empty() {
            let mut table = self.table.lock();
            for slot in &storage.leased {
                // Refused where a failure elsewhere has just made the domain the backend's: no lease will follow.
                if let Err(error) = table.commit_lease(*slot) {
                    tracing::debug!(%error, "a lease is not counted");
                }
            }
            add(&program.counters.reuses, (storage.leased.len() as u64).saturating_sub(storage.allocated));
        }
        // Before the end can be acted upon: until the stage says that the dispatch is published, `ended` only notes
        // it there, so the frame is never retired while admission still counts it as being built.
        self.admission.publish(grant.frame);
        let mut stage = self.slots[grant.frame].stage.lock();
        match std::mem::replace(&mut *stage, Stage::Finishing) {
            Stage::Building { ended: Some(outcome), .. } => {
                drop(stage);
                self.finish(grant.frame, DispatchId(grant.id), storage, outcome);
            }
            _ => *stage = Stage::Published { run: grant.id, storage },
        }
    }

    /// Nothing was accepted: staging, arguments and the frame go back.
    fn give_back(&self, frame: usize, mut storage: Box<Storage>) {
        let failed = crate::staging::release(&*self.backend, &mut storage.staging);
        if !failed.is_empty() {
            self.failures.lock().loose.extend(failed);
        }
        let bytes = std::mem::take(&mut storage.staging_bytes);
        self.programs[storage.program].counters.staging_returned(bytes);
        storage.clear();
        *self.slots[frame].stage.lock() = Stage::Idle(storage);
        self.admission.cancel(frame);
        self.release_deferred();
    }

    /// A dispatch was rejected. After its opening that poisons persistent dispatch; before, it concerns nobody else,
    /// unless the backend says that the worker is finished. Returns the failure where there is one.
    fn reject(
        &self,
        program: &PreparedProgram,
        id: u64,
        opened: bool,
        rejection: &Rejection,
    ) -> Option<Arc<Failure>> {
        let error = rejection.error.clone();
        let swept = rejection.swept.clone().map(Error::Backend);
        let finished = rejection.first.as_ref().is_some_and(Error::must_reprepare)
            || (!rejection.returned && error.must_reprepare())
            || swept.as_ref().is_some_and(Error::must_reprepare);
        let known = self.is_known(&error) || rejection.first.as_ref().is_some_and(|first| self.is_known(first));
        if known || !((opened && self.mode.persistent) || finished) {
            // The submitter gets its own error, so this one is for close to report. The backend accepts nothing more.
            self.failures.lock().loose.extend(swept);
            tracing::debug!(dispatch = id, %error, "rejected");
            return None;
        }
        let (cause, mut secondary) = match &rejection.first {
            // The builder went on after a failure that stuck, and ended with one of its own.
            Some(first) if matches!(error, Error::Program { .. } | Error::Panicked { .. }) => {
                (first.clone(), vec![error])
            }
            _ => (error, Vec::new()),
        };
        let unseen = swept.is_some();
        secondary.extend(swept);
        let id = DispatchId(id);
        let failure: Arc<Failure> =
            self.fail(id, Arc::clone(&program.name), cause, secondary, rejection.consequence);
        if !unseen {
            // The submitter has all of it.
            failure.mark_delivered();
        }
        Some(failure)
    }

    /// Whether `error` tells of a failure that this worker (not another one, which the builder may have called) has
    /// recorded already.
    fn is_known(&self, error: &Error) -> bool {
        let (Error::Poisoned(failure) | Error::Finished(failure)) = error else { return false };
        let failures = self.failures.lock();
        [&failures.poison, &failures.finished].into_iter().flatten().any(|known| Arc::ptr_eq(known, failure))
    }
}

fn count(program: &PreparedProgram, storage: &Storage, opened: bool) {
    let counters = &program.counters;
    if opened && let Some(reset) = &storage.plan.reset {
        add(&counters.zeroed_bytes, reset.bytes());
        add(&counters.reset_copies, reset.copies() as u64);
    }
    add(&counters.allocations, storage.allocated);
}

/// What came of a submission, from what the backend says and what the builder left behind.
enum Verdict {
    Accepted,
    Rejected(Box<Rejection>),
}

/// Why a submission came to nothing.
struct Rejection {
    /// What the submitter gets.
    error: Error,
    /// A failure that came before it in the same build.
    first: Option<Error>,
    /// The error is one that the builder returned.
    returned: bool,
    /// A panic to resume in the submitter instead.
    payload: Option<Payload>,
    /// The backend could not clean up after the failed build.
    swept: Option<BackendError>,
    /// The backend was finished before and did nothing: an older dispatch is the cause.
    consequence: bool,
}

impl Verdict {
    fn of(submitted: Result<Result<(), SubmitError>, Payload>, built: Built, program: &Arc<str>) -> Self {
        let swept = match (&submitted, &built) {
            (Ok(Err(SubmitError::Backend(error))), Built::Failed { .. } | Built::Panicked { .. }) => {
                Some(error.clone())
            }
            _ => None,
        };
        // Where the backend unwound, the error is about that.
        let returned = submitted.is_ok() && matches!(built, Built::Failed { returned: true, .. });
        // Refused before the build, with nothing done, by a worker that takes no more: that was decided earlier.
        let consequence = match (&submitted, &built) {
            (Ok(Err(SubmitError::Backend(error))), Built::NotCalled) => {
                error.runtime().is_some_and(|failure| failure.fatal && failure.effect == Effect::None)
            }
            _ => false,
        };
        let rejected = |error, first, payload| {
            Self::Rejected(Box::new(Rejection { error, first, returned, payload, swept, consequence }))
        };
        match (submitted, built) {
            (Ok(Ok(())), Built::Complete) => Self::Accepted,
            (Ok(_), Built::Failed { error, first, .. }) => rejected(error, first, None),
            (Ok(_), Built::Panicked { payload, first }) => {
                let message = panic_text(&*payload).into();
                rejected(Error::Panicked { program: Arc::clone(program), message }, first, Some(payload))
            }
            (Ok(Ok(())), Built::NotCalled) => {
                rejected(Error::broken("the backend accepted a run without building its graph"), None, None)
            }
            (Ok(Err(SubmitError::Backend(error))), Built::Complete | Built::NotCalled) => {
                rejected(error.into(), None, None)
            }
            (Ok(Err(SubmitError::Build(_))), Built::Complete | Built::NotCalled) => rejected(
                Error::broken("the backend reports a failed build, and the builder did not fail"),
                None,
                None,
            ),
            // The backend unwound. Whether the run was accepted is for the backend to say.
            (Err(payload), built) => {
                let first = match built {
                    Built::Failed { error, .. } => Some(error),
                    Built::Panicked { first, .. } => first,
                    Built::Complete | Built::NotCalled => None,
                };
                let text = format!("the backend panicked: {}", panic_text(&*payload));
                let error = Error::Backend(BackendError::broken(Call::Submit, text));
                rejected(error, first, Some(payload))
            }
        }
    }
}
