//! The end of a dispatch: what happens between the backend's report and a free frame (design rule 7).
//!
//! 1. The backend reports the end of the run, on a thread of its own.
//! 2. Our cleanup runs on that thread: staging is released, arguments are let go.
//! 3. A failure is recorded, and poisons the worker where it must.
//! 4. The outcome is published to the handles.
//! 5. The frame is free.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use pto_simpler_sys::{FailureKind, RunEvents, RunId, RunOutcome};

use crate::error::{Error, Failure};
use crate::inner::{Inner, Refusal, Stage, Storage};
use crate::program::DispatchId;
use crate::staging;
use crate::sync::Ordering;

/// Where the backend reports ends. Weak, because the worker owns the backend.
#[derive(Debug)]
pub(crate) struct Sink(pub(crate) Weak<Inner>);

impl RunEvents for Sink {
    fn ended(&self, run: RunId, outcome: RunOutcome) {
        match self.0.upgrade() {
            Some(inner) => {
                inner.ended(run, outcome);
                // The worker may have been dropped meanwhile, which leaves its programs to this thread. What they do in
                // their destructors is the user's, and must not unwind into the backend.
                if catch_unwind(AssertUnwindSafe(|| drop(inner))).is_err() {
                    tracing::error!(%run, "a program panicked while it was dropped");
                }
            }
            None => tracing::error!(%run, "a run ended after its worker was gone"),
        }
    }
}

impl Inner {
    /// The backend's report.
    pub(crate) fn ended(&self, run: RunId, outcome: RunOutcome) {
        for (frame, slot) in self.slots.iter().enumerate() {
            let mut stage = slot.stage.lock();
            match &mut *stage {
                Stage::Building { run: building, ended } if *building == run.0 => {
                    // The submission has not returned yet; the submitting thread goes on from here.
                    ended.get_or_insert(outcome);
                    return;
                }
                Stage::Published { run: published, .. } if *published == run.0 => {
                    if let Stage::Published { storage, .. } = std::mem::replace(&mut *stage, Stage::Finishing) {
                        drop(stage);
                        self.finish(frame, DispatchId(run.0), storage, outcome);
                    }
                    return;
                }
                _ => {}
            }
        }
        tracing::error!(%run, "the backend reports the end of a run that is not in flight");
    }

    /// Steps 2 to 5. Runs once for each accepted run.
    pub(crate) fn finish(&self, frame: usize, id: DispatchId, mut storage: Box<Storage>, outcome: RunOutcome) {
        let program = &self.programs[storage.program];
        let mut failures: Vec<Error> = outcome.result.err().map(Error::Backend).into_iter().collect();
        failures.extend(outcome.cleanup.map(Error::Backend));
        failures.extend(staging::release(&*self.backend, &mut storage.staging));
        program.counters.staging_returned(std::mem::take(&mut storage.staging_bytes));
        if storage.allocated > 0 {
            self.ordered.fetch_sub(1, Ordering::AcqRel);
        }
        let cell = storage.cell.take();
        storage.clear();

        let outcome = if failures.is_empty() {
            Ok(())
        } else {
            let cause = failures.remove(0);
            let failure = self.fail(id, Arc::clone(&program.name), cause, failures, false);
            Err(Error::Failed(failure))
        };
        tracing::debug!(dispatch = %id, program = %program.name, ok = outcome.is_ok(), "terminal");
        if let Some(cell) = cell {
            cell.complete(outcome);
        }
        *self.slots[frame].stage.lock() = Stage::Idle(storage);
        self.admission.retire(frame);
    }

    /// Records a failure of a dispatch that had an effect, and turns later submitters away where it must. The first
    /// failure is kept, unless it is a `consequence` (see [`Failure`]) and this one its cause.
    pub(crate) fn fail(
        &self,
        id: DispatchId,
        program: Arc<str>,
        cause: Error,
        secondary: Vec<Error>,
        consequence: bool,
    ) -> Arc<Failure> {
        let finished = self.is_final(&cause) || secondary.iter().any(Error::must_reprepare);
        let persistent = self.mode.persistent;
        let failure = {
            let mut failures = self.failures.lock();
            let kept = if persistent { &mut failures.poison } else { &mut failures.finished };
            let explains = kept.as_ref().is_some_and(|kept| kept.follows_from(id));
            let ends = finished || persistent || explains;
            let failure = Arc::new(Failure::new(id, program, cause, secondary, ends, consequence));
            if ends && (kept.is_none() || explains) {
                *kept = Some(Arc::clone(&failure));
            }
            failures.dispatches.retain(|f| !f.is_delivered());
            failures.dispatches.push(Arc::clone(&failure));
            failure
        };
        tracing::warn!(dispatch = %id, error = %failure, "dispatch failed");
        let explained = |old: &Refusal| match old {
            Refusal::Poisoned(kept) | Refusal::Finished(kept) => kept.follows_from(id),
            Refusal::Closing | Refusal::Closed => false,
        };
        if persistent {
            self.admission.refuse(Refusal::Poisoned(Arc::clone(&failure)), explained);
            self.table.lock().poison();
        } else if failure.final_for_worker {
            self.admission.refuse(Refusal::Finished(Arc::clone(&failure)), explained);
        }
        failure
    }

    /// Whether a failure ends the worker in both modes (rule 18). A task of a sub-worker, which names no chip, leaves
    /// the chips as they were.
    fn is_final(&self, cause: &Error) -> bool {
        let failed_task = match cause {
            Error::Backend(error) => {
                error.runtime().is_some_and(|f| f.kind == FailureKind::Task && f.chip.is_some())
            }
            _ => false,
        };
        cause.must_reprepare() || (failed_task && self.capabilities.failed_task_is_final)
    }
}
