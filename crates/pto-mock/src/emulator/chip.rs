//! Threads of chips and sub-workers: one task at a time, in submit order.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::MutexGuard;
use pto_simpler_sys::{BackendError, Call, CallableId, ChipId, Effect, FailureKind, RunId, RuntimeFailure};

use super::Core;
use super::state::State;
use crate::board::Interrupt;
use crate::journal::EventKind;
use crate::kernel::{Code, Kernel, KernelError, SubTask, TaskContext};

/// Chips of one group task: it starts on all of them together.
pub(crate) struct Group {
    pub(crate) members: Vec<ChipId>,
    pub(crate) started: AtomicBool,
}

/// A task that was submitted and has not started.
pub(crate) struct Task {
    pub(crate) run: RunId,
    /// `None` for a sub-worker task.
    pub(crate) chip: Option<ChipId>,
    pub(crate) callable: CallableId,
    pub(crate) name: Arc<str>,
    pub(crate) code: Code,
    pub(crate) context: TaskContext,
    pub(crate) group: Option<Arc<Group>>,
}

/// Work of a control call on a chip's own thread.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The message of a panic payload.
pub(crate) fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

/// How a task failed, and whether it failed by itself (rather than because its wait was interrupted).
struct TaskFailure {
    error: BackendError,
    own: bool,
}

impl Core {
    /// The life of a chip worker.
    pub(crate) fn chip_thread(&self, chip: ChipId) {
        let Ok(index) = usize::try_from(chip.0) else { return };
        let Some(wake) = self.lane_wake.get(index) else { return };
        let mut state = self.state.lock();
        loop {
            let job = state.lane_mut(chip).and_then(|lane| lane.jobs.pop_front());
            if let Some(job) = job {
                MutexGuard::unlocked(&mut state, job);
            } else if let Some(task) = self.take_task(&mut state, chip) {
                state = self.execute(state, task);
                if let Some(lane) = state.lane_mut(chip) {
                    lane.busy = None;
                }
                self.wake_group_of(&state, chip);
            } else if state.lane(chip).is_none_or(|lane| lane.end) {
                break;
            } else {
                wake.wait(&mut state);
            }
        }
        if let Some(lane) = state.lane_mut(chip) {
            lane.gone = true;
        }
        self.changed.notify_all();
    }

    /// The life of a sub-worker.
    pub(crate) fn sub_thread(&self, index: usize) {
        let mut state = self.state.lock();
        loop {
            let head = state.device_head();
            let ready = state.direct == 0 && state.sub_queue.front().is_some_and(|task| Some(task.run) == head);
            let task = if ready { state.sub_queue.pop_front() } else { None };
            if let Some(task) = task {
                let busy = Some((task.run, Arc::clone(&task.name)));
                if let Some(sub) = state.subs.get_mut(index) {
                    sub.busy = busy;
                }
                state = self.execute(state, task);
                if let Some(sub) = state.subs.get_mut(index) {
                    sub.busy = None;
                }
            } else if state.subs_end {
                break;
            } else {
                self.sub_wake.wait(&mut state);
            }
        }
        if let Some(sub) = state.subs.get_mut(index) {
            sub.gone = true;
        }
        self.changed.notify_all();
    }

    /// Takes the task at the head of a chip's queue, if it may start now.
    fn take_task(&self, state: &mut State, chip: ChipId) -> Option<Task> {
        if state.direct > 0 {
            return None;
        }
        let head = state.device_head();
        let front = state.lane(chip)?.queue.front()?;
        if Some(front.run) != head {
            return None;
        }
        if let Some(group) = front.group.clone()
            && !group.started.load(Ordering::Relaxed)
        {
            // Every other member must be idle with this group at its head.
            let ready = group.members.iter().filter(|member| **member != chip).all(|member| {
                state.lane(*member).is_some_and(|lane| {
                    let front = lane.queue.front().and_then(|task| task.group.as_ref());
                    lane.busy.is_none() && front.is_some_and(|theirs| Arc::ptr_eq(theirs, &group))
                })
            });
            if !ready {
                return None;
            }
            group.started.store(true, Ordering::Relaxed);
            self.wake_lanes(&group.members);
        }
        let lane = state.lane_mut(chip)?;
        let task = lane.queue.pop_front()?;
        lane.busy = Some((task.run, Arc::clone(&task.name)));
        Some(task)
    }

    fn wake_lanes(&self, chips: &[ChipId]) {
        for chip in chips {
            if let Some(wake) = usize::try_from(chip.0).ok().and_then(|index| self.lane_wake.get(index)) {
                wake.notify_all();
            }
        }
    }

    /// A chip has become idle: if a group is next, its other members may be waiting for that.
    fn wake_group_of(&self, state: &State, chip: ChipId) {
        let front = state.lane(chip).and_then(|lane| lane.queue.front());
        if let Some(group) = front.and_then(|task| task.group.as_ref()) {
            self.wake_lanes(&group.members);
        }
    }

    /// Runs one task without the lock and accounts for it.
    fn execute<'a>(&'a self, mut state: MutexGuard<'a, State>, task: Task) -> MutexGuard<'a, State> {
        let (run, chip, callable) = (task.run, task.chip, task.callable);
        if let Some(run) = state.run_mut(run) {
            run.pending -= 1;
            run.running += 1;
        }
        self.journal.record(EventKind::TaskStart { run, chip, callable });
        let poison = chip.and_then(|chip| state.lane(chip)?.poison.clone());
        let result = MutexGuard::unlocked(&mut state, || {
            let result = match poison {
                Some(error) => Err(TaskFailure { error, own: true }),
                None => self.call(&task),
            };
            // The memory that the task held must not outlive its fence.
            drop(task);
            result
        });
        self.journal.record(EventKind::TaskEnd { run, chip, callable, ok: result.is_ok() });
        if let Some(run) = state.run_mut(run) {
            run.running -= 1;
        }
        if let Err(TaskFailure { error, own }) = result {
            if let (Some(chip), true) = (chip, own) {
                self.mark_lane(&mut state, chip, &error);
            }
            self.fail_run(&mut state, run, error);
        }
        self.finish.notify_all();
        self.changed.notify_all();
        state
    }

    /// What a failure means for the chip it happened on.
    fn mark_lane(&self, state: &mut State, chip: ChipId, error: &BackendError) {
        let Some(lane) = state.lane_mut(chip) else { return };
        let Some(failure) = error.runtime() else { return };
        let died = matches!(failure.kind, FailureKind::ChipDied { .. });
        if died && lane.dead.is_none() {
            lane.dead = Some(failure.clone().with_effect(Effect::None).into());
        }
        if (died || self.capabilities.failed_task_is_final) && lane.poison.is_none() {
            let mut poison = failure.clone().with_fatal(true);
            if !died {
                poison.message = format!("chip run lane is poisoned by an earlier failure: {}", poison.message);
            }
            lane.poison = Some(poison.into());
        }
    }

    /// Calls the code of a task; a panic is a failure like any other.
    fn call(&self, task: &Task) -> Result<(), TaskFailure> {
        let fired = match task.chip {
            Some(chip) => self.faults.single(Call::Task, chip),
            None => self.faults.whole(Call::Task),
        };
        let last = self.capabilities.failed_task_is_final && task.chip.is_some();
        let mut own = true;
        let failure = |type_name: &str, message: String| {
            let mut failure = RuntimeFailure::new(Call::Task, type_name, message)
                .with_kind(FailureKind::Task)
                .with_effect(Effect::Done);
            failure.chip = task.chip;
            failure
        };
        let called = catch_unwind(AssertUnwindSafe(|| {
            self.faults.around(fired, || {
                // A hang may have been ended by the failure of the run.
                if let Some(why) = task.context.interrupt.get() {
                    own = false;
                    let error = match why {
                        Interrupt::RunFailed => KernelError::RunFailed,
                        Interrupt::Abandoned => KernelError::Abandoned,
                    };
                    return Err(failure("KernelError", format!("{:?}: {error}", task.name)).into());
                }
                let result = match (&task.code, task.chip) {
                    (Code::Chip(code), Some(chip)) => code(&Kernel { chip, task: &task.context }),
                    (Code::Sub(code), None) => code(&SubTask { task: &task.context }),
                    _ => Err(KernelError::failed("a callable of another kind was queued")),
                };
                result.map_err(|error| {
                    own = !matches!(error, KernelError::RunFailed | KernelError::Abandoned);
                    failure("KernelError", format!("{:?}: {error}", task.name)).into()
                })
            })
        }));
        let error = match called {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error,
            Err(payload) => failure("panic", format!("{:?}: {}", task.name, panic_text(&*payload))).into(),
        };
        let error = match error.runtime() {
            Some(failure) if last && own => failure.clone().with_fatal(true).into(),
            _ => error,
        };
        Err(TaskFailure { error, own })
    }

    /// Records the first failure of a run, interrupts its waits and cancels what has not started.
    pub(crate) fn fail_run(&self, state: &mut State, run: RunId, error: BackendError) {
        let Some(failed) = state.run_mut(run) else { return };
        failed.failure.get_or_insert(error);
        failed.interrupt.raise(Interrupt::RunFailed);
        self.cancel_tasks(state, run);
        self.board.changed();
        self.finish.notify_all();
        self.changed.notify_all();
    }

    /// Takes the tasks of a run that have not started out of all queues.
    pub(crate) fn cancel_tasks(&self, state: &mut State, run: RunId) {
        let mut cancelled = 0;
        let queues = state.lanes.iter_mut().map(|lane| &mut lane.queue).chain([&mut state.sub_queue]);
        for queue in queues {
            queue.retain(|task| {
                // A group that has started on one member starts on all of them.
                let started = task.group.as_ref().is_some_and(|group| group.started.load(Ordering::Relaxed));
                if task.run != run || started {
                    return true;
                }
                cancelled += 1;
                self.journal.record(EventKind::TaskCancel { run, chip: task.chip, callable: task.callable });
                false
            });
        }
        if let Some(run) = state.run_mut(run) {
            run.pending -= cancelled;
        }
        // What was behind the cancelled tasks may be able to start.
        self.wake_all_lanes();
    }

    pub(crate) fn wake_all_lanes(&self) {
        for wake in &self.lane_wake {
            wake.notify_all();
        }
        self.sub_wake.notify_all();
    }
}
