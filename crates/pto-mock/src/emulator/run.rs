//! Runs: admission, the build, acceptance, the fence, cleanup, and the report of the end.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use parking_lot::MutexGuard;
use pto_simpler_sys::{
    BackendError, BuildFailed, Call, CallConfig, Effect, GraphBuilder, RunId, RunOutcome, RunState, RuntimeFailure,
    SubmitError,
};

use super::Core;
use super::orchestrator::Graph;
use super::state::{Building, Phase, Run, State};
use crate::board::Interrupt;
use crate::faults::FaultEffect;
use crate::journal::{EventKind, FreeCause, WaitFor};

impl Core {
    pub(crate) fn submit(
        &self,
        run: RunId,
        config: &CallConfig,
        graph: &mut dyn GraphBuilder,
    ) -> Result<(), SubmitError> {
        self.refuse_reentrant(Call::Submit)?;
        config.check(Call::Submit)?;
        self.check_admission(&self.state.lock(), run)?;
        let fired = self.faults.whole(Call::Submit);
        match fired.map(|fired| fired.fault.effect) {
            Some(FaultEffect::Before) => {
                let error = fired.map(|fired| fired.error());
                return error.map_or(Ok(()), |error| Err(error.into()));
            }
            Some(FaultEffect::Hang) => {
                if let Some(fired) = &fired {
                    self.faults.hang(fired);
                }
            }
            _ => {}
        }
        self.admit(run)?;
        let built = catch_unwind(AssertUnwindSafe(|| graph.build(&Graph::new(self, run))));
        match built {
            Ok(Ok(())) => self.accept(run)?,
            Ok(Err(BuildFailed)) => {
                return Err(self.cancel(run).map_or(SubmitError::Build(BuildFailed), SubmitError::Backend));
            }
            Err(payload) => {
                let _swept = self.cancel(run);
                resume_unwind(payload);
            }
        }
        match fired {
            Some(fired) if matches!(fired.fault.effect, FaultEffect::After | FaultEffect::NoReply) => {
                Err(fired.error().into())
            }
            Some(fired) if fired.fault.effect == FaultEffect::Unwind => {
                resume_unwind(Box::new(format!("injected unwind: {}", fired.fault)))
            }
            _ => Ok(()),
        }
    }

    fn check_admission(&self, state: &State, run: RunId) -> Result<(), BackendError> {
        if state.abandoned {
            return Err(closed_by_abandon(Call::Submit));
        }
        self.require_ready(state, Call::Submit)?;
        if state.used(run) {
            let message = format!("{run} was submitted before; choose a number that was never used");
            return Err(BackendError::misuse(Call::Submit, message));
        }
        Ok(())
    }

    /// Takes a ticket, waits for its turn, for room, and for ordered cleanup; then the run exists.
    fn admit(&self, run: RunId) -> Result<(), BackendError> {
        let mut state = self.state.lock();
        self.check_admission(&state, run)?;
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.tickets.push_back(ticket);
        let mut told = [false; 3];
        let admitted = loop {
            if state.abandoned {
                break Err(abandoned(Call::Submit));
            }
            // A close that began meanwhile drains submissions that hold a ticket, as Simpler does.
            let wait = if state.tickets.front() != Some(&ticket) {
                Some((0, WaitFor::Build))
            } else if state.runs.len() >= self.options.depth as usize {
                Some((1, WaitFor::Depth))
            } else if state.runs.iter().any(|run| run.ordered) {
                Some((2, WaitFor::Cleanup))
            } else {
                None
            };
            let Some((index, on)) = wait else {
                break self.check_turn(&state, run);
            };
            if let Some(told) = told.get_mut(index)
                && !std::mem::replace(told, true)
            {
                self.journal.record(EventKind::Wait { run, on });
            }
            self.changed.wait(&mut state);
        };
        match admitted {
            Ok(()) => {
                let by_hand = state.by_hand;
                state.runs.push_back(Run::new(run, by_hand));
                state.building = Some(Building { run, thread: thread::current().id() });
                self.journal.record(EventKind::Admit(run));
            }
            Err(_) => {
                state.tickets.retain(|t| *t != ticket);
                self.changed.notify_all();
            }
        }
        admitted
    }

    /// What may have changed while a submission waited for its turn.
    fn check_turn(&self, state: &State, run: RunId) -> Result<(), BackendError> {
        if let Some(cause) = &state.cleanup_failure {
            let message = format!("a prior run's ordered cleanup failed; close the worker. Cause: {cause}");
            return Err(RuntimeFailure::new(Call::Submit, "RuntimeError", message).with_fatal(true).into());
        }
        if state.used(run) {
            let message = format!("{run} was submitted meanwhile; choose a number that was never used");
            return Err(BackendError::misuse(Call::Submit, message));
        }
        Ok(())
    }

    fn accept(&self, run: RunId) -> Result<(), BackendError> {
        let mut state = self.state.lock();
        if state.abandoned {
            drop(state);
            let _swept = self.cancel(run);
            return Err(abandoned(Call::Submit));
        }
        if let Some(run) = state.run_mut(run) {
            run.accepted = true;
        }
        self.journal.record(EventKind::Accept(run));
        self.end_build(&mut state);
        Ok(())
    }

    fn end_build(&self, state: &mut State) {
        state.building = None;
        state.tickets.pop_front();
        self.finish.notify_all();
        self.changed.notify_all();
    }

    /// Cancels a run whose build failed: what has not started never will, what has is fenced, then cleanup, whose
    /// failure it returns.
    fn cancel(&self, run: RunId) -> Option<BackendError> {
        let mut state = self.state.lock();
        if let Some(run) = state.run(run) {
            run.interrupt.raise(Interrupt::RunFailed);
        }
        self.cancel_tasks(&mut state, run);
        self.board.changed();
        while state.run(run).is_some_and(|run| run.pending + run.running > 0) && !state.lost {
            self.changed.wait(&mut state);
        }
        doom(&mut state, run);
        drop(state);
        let cleanup = self.clean_up(run, false);
        let mut state = self.state.lock();
        if let Some(error) = &cleanup {
            state.cleanup_failure.get_or_insert_with(|| error.clone());
        }
        state.runs.retain(|r| r.id != run);
        state.cancelled.insert(run.0);
        self.journal.record(EventKind::BuildFailed(run));
        self.end_build(&mut state);
        self.wake_all_lanes();
        cleanup
    }

    /// The thread that lets runs pass their fences in order, cleans up after them and reports their ends.
    pub(crate) fn finisher_thread(&self) {
        let mut state = self.state.lock();
        loop {
            let front = state.runs.front();
            let done = front
                .is_some_and(|run| run.accepted && !run.held && (run.pending + run.running == 0 || state.lost));
            if let (Some(run), true) = (front.map(|run| run.id), done) {
                MutexGuard::unlocked(&mut state, || self.finish_run(run));
            } else if state.finisher_end && front.is_none_or(|run| !run.accepted) {
                break;
            } else {
                self.finish.wait(&mut state);
            }
        }
        state.finisher_gone = true;
        self.changed.notify_all();
    }

    fn finish_run(&self, run: RunId) {
        let fired = self.faults.whole(Call::Run);
        if let Some(fired) = &fired
            && fired.fault.effect == FaultEffect::Hang
        {
            self.faults.hang(fired);
        }
        let mut state = self.state.lock();
        let mut late = None;
        if let Some(fired) = fired {
            match fired.fault.effect {
                FaultEffect::Before | FaultEffect::NoReply => self.fail_run(&mut state, run, fired.error()),
                FaultEffect::After | FaultEffect::Unwind => late = Some(fired.error()),
                FaultEffect::Hang => {}
            }
        }
        let mut success = true;
        if let Some(run) = state.run_mut(run) {
            run.fenced = true;
            success = run.failure.is_none();
        }
        if !success {
            doom(&mut state, run);
        }
        self.journal.record(EventKind::Fence(run));
        self.wake_all_lanes();
        self.changed.notify_all();
        drop(state);

        let cleanup = self.clean_up(run, success).or(late);

        let mut state = self.state.lock();
        self.journal.record(EventKind::Cleanup(run));
        if let Some(error) = &cleanup {
            state.cleanup_failure.get_or_insert_with(|| error.clone());
        }
        let mut outcome = RunOutcome { result: Ok(()), cleanup };
        if state.runs.front().is_some_and(|front| front.id == run)
            && let Some(over) = state.runs.pop_front()
        {
            outcome.result = over.failure.map_or(Ok(()), Err);
        }
        state.ended.insert(run.0);
        let ok = outcome.result.is_ok() && outcome.cleanup.is_none();
        self.journal.record(EventKind::Ended(run, ok));
        let events = state.events.clone();
        state.reporting = true;
        self.changed.notify_all();
        self.wake_all_lanes();
        drop(state);
        if let Some(events) = events {
            // The receiver promises not to unwind; if it does, later ends are reported all the same.
            let _unwound = catch_unwind(AssertUnwindSafe(|| events.ended(run, outcome)));
        }
        self.state.lock().reporting = false;
        self.changed.notify_all();
    }

    /// Frees what the run leaves behind: domains that nobody keeps, the last first, and scratch. Returns the first
    /// failure.
    fn clean_up(&self, run: RunId, success: bool) -> Option<BackendError> {
        let domains = {
            let mut state = self.state.lock();
            state.run_mut(run).map(|run| std::mem::take(&mut run.domains)).unwrap_or_default()
        };
        let mut first = None;
        for registered in domains.into_iter().rev() {
            let free = {
                let mut state = self.state.lock();
                state.domains.get_mut(registered.id).is_some_and(|domain| {
                    domain.runs.retain(|r| *r != run);
                    let keep = success && registered.retain && !domain.doomed && !domain.released;
                    domain.doomed |= !keep;
                    !keep && domain.runs.is_empty()
                })
            };
            if free && let Err(error) = self.free_domain(registered.id, FreeCause::Cleanup(run)) {
                first.get_or_insert(error);
            }
        }
        let mut state = self.state.lock();
        let (scratch, hosts) = state
            .run_mut(run)
            .map(|run| (std::mem::take(&mut run.scratch), std::mem::take(&mut run.hosts)))
            .unwrap_or_default();
        for id in scratch {
            if let Some(memory) = state.scratch.remove(id) {
                memory.region.freed.store(true, std::sync::atomic::Ordering::Release);
            }
        }
        for id in hosts {
            if let Some(memory) = state.hosts.get_mut(id) {
                memory.users -= 1;
            }
        }
        first
    }

    pub(crate) fn run_state(&self, run: RunId) -> RunState {
        let state = self.state.lock();
        match state.run(run) {
            Some(run) if run.accepted => RunState::Running,
            Some(_) => RunState::Unknown,
            None if state.ended.contains(run.0) => RunState::Ended,
            None => RunState::Unknown,
        }
    }

    /// Lets a held run pass its fence, as failed where an error is given.
    pub(crate) fn let_go(&self, run: RunId, failure: Option<RuntimeFailure>) -> Result<(), BackendError> {
        let mut state = self.state.lock();
        let Some(held) = state.run_mut(run) else {
            let message = format!("{run} is not in flight; complete or fail runs that are");
            return Err(BackendError::misuse(Call::Run, message));
        };
        held.held = false;
        if let Some(failure) = failure {
            self.fail_run(&mut state, run, failure.into());
        }
        self.finish.notify_all();
        Ok(())
    }

    pub(crate) fn require_ready(&self, state: &State, call: Call) -> Result<(), BackendError> {
        if state.phase == Phase::Ready {
            return Ok(());
        }
        let message = format!("the worker is {:?}; the call needs it to be Ready", state.phase);
        Err(BackendError::misuse(call, message))
    }
}

/// A run failed: the domains registered with it are never found again.
fn doom(state: &mut State, run: RunId) {
    let ids: Vec<_> = state.run(run).map(|run| run.domains.iter().map(|d| d.id).collect()).unwrap_or_default();
    for id in ids {
        if let Some(domain) = state.domains.get_mut(id) {
            domain.doomed = true;
        }
    }
}

/// The misuse of a call that begins after `abandon`, which closed the worker.
pub(crate) fn closed_by_abandon(call: Call) -> BackendError {
    BackendError::misuse(call, "the worker was abandoned, which closed it; only close is left")
}

/// The failure of a call that `abandon` interrupts.
pub(crate) fn abandoned(call: Call) -> BackendError {
    RuntimeFailure::new(call, "Abandoned", "the emulator was abandoned; only close is left")
        .with_effect(Effect::None)
        .with_fatal(true)
        .into()
}
