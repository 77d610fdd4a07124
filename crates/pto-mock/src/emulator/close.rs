//! Start, close and abandon.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pto_simpler_sys::{
    AbandonReport, BackendError, Call, ChipId, Depth, Effect, Negotiated, RunEvents, RuntimeFailure,
};

use super::Core;
use super::run::abandoned;
use super::state::{Phase, State};
use crate::board::Interrupt;
use crate::builder::DEFAULT_GRACE;
use crate::faults::FaultEffect;
use crate::journal::{EventKind, FreeCause};

impl Core {
    pub(crate) fn start(self: &Arc<Self>, events: Arc<dyn RunEvents>) -> Result<Negotiated, BackendError> {
        let call = Call::Start;
        self.refuse_reentrant(call)?;
        {
            let mut state = self.state.lock();
            if state.phase != Phase::New {
                let message = format!("the worker is {:?}; it starts once, in New", state.phase);
                return Err(BackendError::misuse(call, message));
            }
            state.phase = Phase::Starting;
            state.events = Some(events);
        }
        let fired = self.faults.whole(call);
        let started = catch_unwind(AssertUnwindSafe(|| self.faults.around(fired, || self.spawn_all())));
        let failed = !matches!(started, Ok(Ok(())));
        if failed {
            self.end_threads(&mut None);
        }
        let mut state = self.state.lock();
        // An abandon meanwhile has closed the worker already.
        let abandoned_meanwhile = state.abandoned;
        if state.phase == Phase::Starting {
            state.phase = if failed { Phase::Failed } else { Phase::Ready };
        }
        if failed {
            state.events = None;
        }
        self.journal.record(EventKind::Start { ok: !failed });
        self.changed.notify_all();
        drop(state);
        match started {
            Ok(Ok(())) if abandoned_meanwhile => Err(abandoned(call)),
            Ok(Ok(())) => Ok(Negotiated::new(Depth::Exactly(self.options.depth))),
            Ok(Err(error)) => Err(error),
            Err(payload) => resume_unwind(payload),
        }
    }

    fn spawn_all(self: &Arc<Self>) -> Result<(), BackendError> {
        let call = Call::Start;
        for index in 0..self.capabilities.chips() {
            let chip = ChipId(index);
            let part = self.faults.part(call, chip);
            self.faults.around(part, || {
                let core = Arc::clone(self);
                let thread = self.spawn(format!("pto-chip{index}"), move || core.chip_thread(chip));
                let thread = thread.map_err(|e| no_thread(&e).on_chip(chip))?;
                let mut state = self.state.lock();
                if let Some(lane) = state.lane_mut(chip) {
                    lane.gone = false;
                }
                enlist(&mut state, &thread);
                state.threads.chips.push(Some(thread));
                Ok(())
            })?;
        }
        for index in 0..self.capabilities.sub_workers as usize {
            let core = Arc::clone(self);
            let thread = self.spawn(format!("pto-sub{index}"), move || core.sub_thread(index));
            let thread = thread.map_err(|e| no_thread(&e))?;
            let mut state = self.state.lock();
            if let Some(sub) = state.subs.get_mut(index) {
                sub.gone = false;
            }
            enlist(&mut state, &thread);
            state.threads.subs.push(Some(thread));
        }
        let core = Arc::clone(self);
        let thread = self.spawn("pto-finisher".to_owned(), move || core.finisher_thread());
        let thread = thread.map_err(|e| no_thread(&e))?;
        let mut state = self.state.lock();
        state.finisher_gone = false;
        enlist(&mut state, &thread);
        state.threads.finisher = Some(thread);
        Ok(())
    }

    /// Spawns a thread that first waits until its start has been recorded.
    fn spawn(self: &Arc<Self>, name: String, life: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
        thread::Builder::new().name(name).spawn(life)
    }

    pub(crate) fn close(&self) -> Result<(), BackendError> {
        self.refuse_reentrant(Call::Close)?;
        let mut state = self.state.lock();
        if state.closing_now {
            let attempt = state.close_attempts;
            while state.closing_now && state.close_attempts == attempt {
                self.changed.wait(&mut state);
            }
            return state.close_result.clone();
        }
        while state.phase == Phase::Starting {
            self.changed.wait(&mut state);
        }
        if state.phase == Phase::Closed {
            return Ok(());
        }
        state.closing_now = true;
        state.phase = Phase::Closing;
        self.journal.record(EventKind::CloseBegin);
        self.changed.notify_all();
        while state.phase != Phase::Closed
            && !(state.tickets.is_empty() && state.runs.is_empty() && state.direct == 0)
        {
            self.changed.wait(&mut state);
        }
        drop(state);
        let mut complete = false;
        let fired = self.faults.whole(Call::Close);
        let closed = catch_unwind(AssertUnwindSafe(|| {
            self.faults.around(fired, || {
                let torn = self.tear_down();
                complete = torn.is_ok();
                torn
            })
        }));
        let result = match &closed {
            Ok(result) => result.clone(),
            Err(_) => Err(RuntimeFailure::new(Call::Close, "panic", "the close unwound")
                .with_effect(Effect::Unknown)
                .into()),
        };
        let mut state = self.state.lock();
        state.closing_now = false;
        state.close_attempts += 1;
        state.close_result = result.clone();
        if complete {
            state.phase = Phase::Closed;
        }
        self.journal.record(EventKind::Close { ok: result.is_ok() });
        self.changed.notify_all();
        drop(state);
        if let Err(payload) = closed {
            resume_unwind(payload);
        }
        result
    }

    /// Frees everything and ends the threads. Every step is attempted; what is left is left for another try.
    fn tear_down(&self) -> Result<(), BackendError> {
        let mut first = None;
        let mut domains: Vec<_> = self.state.lock().domains.iter().map(|(id, domain)| (domain.order, id)).collect();
        domains.sort_unstable();
        for (_, id) in domains.into_iter().rev() {
            let before = self.state.lock().domains.get(id).is_some();
            if before && let Err(error) = self.free_domain(id, FreeCause::Sweep) {
                first.get_or_insert(error);
            }
        }
        self.free_memory();
        self.end_threads(&mut first);
        self.state.lock().events = None;
        first.map_or(Ok(()), Err)
    }

    /// Releases resident device memory, host buffers and scratch.
    fn free_memory(&self) {
        let mut state = self.state.lock();
        let mut memory = Vec::new();
        for id in state.residents.iter().map(|(id, _)| id).collect::<Vec<_>>() {
            if let Some(resident) = state.residents.remove(id) {
                if let Some(lane) = state.lane_mut(resident.chip) {
                    lane.committed_bytes -= resident.mapped_bytes;
                }
                memory.push(resident.region);
            }
        }
        for id in state.hosts.iter().map(|(id, _)| id).collect::<Vec<_>>() {
            if let Some(host) = state.hosts.remove(id) {
                state.host_bytes -= host.region.len;
                memory.push(host.region);
            }
        }
        for id in state.scratch.iter().map(|(id, _)| id).collect::<Vec<_>>() {
            memory.extend(state.scratch.remove(id).map(|scratch| scratch.region));
        }
        for region in &memory {
            region.freed.store(true, Ordering::Release);
        }
        drop(state);
        self.board.changed();
    }

    /// Asks all threads to end and joins those that do. Threads that an abandon gave up on are left.
    fn end_threads(&self, first: &mut Option<BackendError>) {
        let mut state = self.state.lock();
        for index in 0..self.capabilities.chips() {
            let chip = ChipId(index);
            if state.lane(chip).is_none_or(|lane| lane.gone) {
                continue;
            }
            let closing = state.phase == Phase::Closing && !state.abandoned;
            drop(state);
            // Outside an ordinary close nothing may stop a chip from ending.
            let part = if closing { self.faults.part(Call::Close, chip) } else { None };
            let effect = part.map(|fired| fired.fault.effect);
            if let (Some(FaultEffect::Hang), Some(fired)) = (effect, &part) {
                self.faults.hang(fired);
            }
            if let Some(fired) = part.filter(|fired| fired.fault.effect != FaultEffect::Hang) {
                first.get_or_insert(fired.error());
            }
            state = self.state.lock();
            if effect != Some(FaultEffect::Before)
                && let Some(lane) = state.lane_mut(chip)
            {
                lane.end = true;
            }
        }
        state.subs_end = true;
        state.finisher_end = true;
        self.wake_all_lanes();
        self.finish.notify_all();
        // Once an abandon has given up on what is stuck, only threads that are not stuck are waited for.
        let ending = |state: &State| {
            let lost = state.lost;
            state.lanes.iter().any(|lane| lane.end && !lane.gone && !(lost && lane.busy.is_some()))
                || state.subs.iter().any(|sub| !(sub.gone || lost && sub.busy.is_some()))
                || !(state.finisher_gone || lost && state.reporting)
        };
        while ending(&state) {
            self.changed.wait(&mut state);
        }
        let mut joinable = Vec::new();
        let (lanes, subs, finisher) = (
            gone(state.lanes.iter().map(|l| l.gone)),
            gone(state.subs.iter().map(|s| s.gone)),
            state.finisher_gone,
        );
        let threads = &mut state.threads;
        for (index, thread) in threads.chips.iter_mut().enumerate() {
            joinable.extend(thread.take_if(|_| lanes.get(index) == Some(&true)));
        }
        for (index, thread) in threads.subs.iter_mut().enumerate() {
            joinable.extend(thread.take_if(|_| subs.get(index) == Some(&true)));
        }
        joinable.extend(threads.finisher.take_if(|_| finisher));
        drop(state);
        for thread in joinable {
            if thread.thread().id() != thread::current().id() {
                // A thread of ours catches every panic of code that is not ours.
                let ended = thread.join();
                debug_assert!(ended.is_ok(), "threads of the emulator do not panic");
            }
        }
    }

    pub(crate) fn abandon(&self) -> AbandonReport {
        let mut report = AbandonReport::default();
        let mut state = self.state.lock();
        let here = thread::current().id();
        if state.building.is_some_and(|building| building.thread == here) {
            report.left.push("everything: abandon was refused inside a graph build".to_owned());
            return report;
        }
        if state.phase == Phase::Closed {
            return report;
        }
        self.journal.record(EventKind::Abandon);
        state.abandoned = true;
        let busy = state.lanes.iter().zip(0..).filter(|(lane, _)| lane.busy.is_some());
        report.ended = busy.map(|(_, index)| ChipId(index)).collect();
        for id in state.runs.iter().map(|run| run.id).collect::<Vec<_>>() {
            if let Some(run) = state.run_mut(id) {
                run.held = false;
                run.interrupt.raise(Interrupt::Abandoned);
            }
            self.fail_run(&mut state, id, abandoned(Call::Run));
        }
        drop(state);
        // Nothing hangs any more, now or later.
        self.faults.open();

        // Threads of the emulator cannot wait for themselves.
        let own = self.state.lock().threads.ids.contains(&here);
        let quiet = |state: &State| {
            state.runs.is_empty()
                && !state.reporting
                && state.direct == 0
                && state.lanes.iter().all(|lane| lane.busy.is_none() && lane.jobs.is_empty())
                && state.subs.iter().all(|sub| sub.busy.is_none())
        };
        if !own {
            self.wait_bounded(self.options.grace, quiet);
        }
        let mut state = self.state.lock();
        if !quiet(&state) {
            state.lost = true;
            self.finish.notify_all();
            self.changed.notify_all();
            drop(state);
            if !own {
                // The finisher reports the runs whose tasks are lost. That takes no longer than the receiver does,
                // so even an impatient caller gives it a while.
                let grace = self.options.grace.max(DEFAULT_GRACE);
                self.wait_bounded(grace, |state| state.runs.iter().all(|run| !run.accepted) && !state.reporting);
            }
            state = self.state.lock();
            for (lane, index) in state.lanes.iter().zip(0..) {
                if let Some((run, name)) = &lane.busy {
                    let chip = ChipId(index);
                    report.left.push(format!(
                        "{chip}: kernel {name:?} of {run} has not returned; its thread and the memory it holds \
                         remain until it does"
                    ));
                }
            }
            for (index, sub) in state.subs.iter().enumerate() {
                if let Some((run, name)) = &sub.busy {
                    report.left.push(format!("sub-worker {index}: {name:?} of {run} has not returned"));
                }
            }
            if let Some(building) = state.building {
                report.left.push(format!("the graph build of {} has not returned", building.run));
            }
            if state.reporting {
                report.left.push("the receiver of run ends has not returned".to_owned());
            }
        }
        drop(state);
        if let Err(error) = self.tear_down() {
            report.left.push(error.to_string());
        }
        let mut state = self.state.lock();
        state.phase = Phase::Closed;
        self.changed.notify_all();
        drop(state);
        report
    }

    /// Waits until `holds`, but not longer than `grace`.
    fn wait_bounded(&self, grace: Duration, holds: impl Fn(&State) -> bool) {
        let deadline = Instant::now() + grace;
        let mut state = self.state.lock();
        while !holds(&state) {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return;
            }
        }
    }
}

fn gone(flags: impl Iterator<Item = bool>) -> Vec<bool> {
    flags.collect()
}

fn enlist(state: &mut State, thread: &JoinHandle<()>) {
    state.threads.ids.push(thread.thread().id());
}

fn no_thread(error: &io::Error) -> RuntimeFailure {
    RuntimeFailure::new(Call::Start, "SystemError", format!("cannot spawn a thread: {error}"))
}
