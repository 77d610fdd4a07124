//! The end of a worker: in order, after a failed start, and by force.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use super::shared::Phase;
use super::sys::optional;
use super::worker::SimplerBackend;
use super::{result, start};
use crate::error::{BackendError, Call, Effect, RuntimeFailure};
use crate::ids::{ChipId, DomainId};

/// How long a forced end waits for processes and for the waiter thread.
pub(super) const FORCED_END: Duration = Duration::from_secs(5);

/// How long an interrupted start is left alone before it is looked at again.
const START_INTERVAL: Duration = Duration::from_millis(20);

impl SimplerBackend {
    /// Everything of a worker that is over: its threads, and what its tables hold.
    pub(super) fn clear(&self) {
        let shared = &*self.shared;
        self.stop_monitor();
        let domains: Vec<DomainId> = {
            let domains = shared.domains.lock();
            domains.table.keys().collect()
        };
        for id in domains {
            let domain = shared.domains.lock().freed(id);
            drop(domain);
        }
        let host = shared.host.lock().drain();
        let stored = shared.store.lock().drain();
        shared.forget_deferred();
        let resident = shared.resident.lock().drain();
        let scratch = shared.scratch.lock().drain();
        let handles = std::mem::take(&mut *shared.handles.lock());
        let callables = std::mem::take(&mut *shared.callables.lock());
        drop((host, stored, resident, scratch, handles, callables));
    }

    pub(super) fn stop_monitor(&self) {
        let monitor = self.monitor.lock().take();
        if let Some(monitor) = monitor {
            monitor.stop();
        }
    }

    /// Lets the waiter see the accepted runs to their ends, and ends it.
    pub(super) fn stop_waiter(&self) {
        self.shared.accepted.close();
        let waiter = self.waiter.lock().take();
        if let Some(waiter) = waiter
            && waiter.thread().id() != std::thread::current().id()
        {
            // It does not unwind unless the receiver of the events does, against its contract.
            let _ = waiter.join();
        }
    }

    /// Closes a worker that came up although the start failed in a later step.
    pub(super) fn undo_start(&self) {
        self.stop_waiter();
        let job = Arc::clone(&self.shared);
        let undone = self.owner.run(Call::Start, move |py| {
            let Ok(worker) = job.worker(py, Call::Start) else { return Ok(()) };
            job.api.close(&worker).map_err(|e| BackendError::from(result::failure(py, Call::Close, &e)))?;
            drop(worker);
            drop(job.take_worker());
            Ok(())
        });
        match undone {
            Ok(()) => self.shared.children.clear(),
            Err(error) => tracing::warn!(%error, "a worker whose start failed half way could not be closed"),
        }
    }

    pub(super) fn close_started(&self) -> Result<(), BackendError> {
        let call = Call::Close;
        let shared = &self.shared;
        // A thread that builds holds this lock; after it nobody gets in any more.
        drop(shared.build_lock.acquire());
        shared.runs.wait_until_ended();
        self.stop_waiter();
        if shared.phase() == Phase::Closed {
            // Abandoned meanwhile.
            return Ok(());
        }
        // Closing the worker closes its buffers, and spares the children that are told of each release.
        shared.children.look();
        shared.children.closing();
        if shared.children.first_death().is_some() && self.holds_domains() {
            // A member's death makes an orderly release wait for minutes and then fail; without peers it fails at
            // once.
            shared.children.end_chips();
        }
        let job = Arc::clone(shared);
        let closed = self.owner.run(call, move |py| {
            let worker = job.worker(py, call)?;
            job.api.close(&worker).map_err(|e| {
                let failure = result::classified(py, call, &e, &job.children, Effect::Unknown);
                BackendError::from(job.note(failure))
            })?;
            drop(worker);
            drop(job.take_worker());
            Ok(())
        });
        self.stop_monitor();
        shared.children.look();
        if shared.phase() == Phase::Closed {
            // Abandoned meanwhile, which has ended everything that this close still waited for.
            return Ok(());
        }
        match closed {
            Ok(()) => {
                if shared.children.first_death().is_some() {
                    // The windows that died with it; the processes are gone.
                    let (_, left) = shared.children.destroy(FORCED_END);
                    if !left.is_empty() {
                        tracing::warn!(?left, "a chip process that died has left something behind");
                    }
                }
                shared.children.clear();
                self.clear();
                shared.leave(Phase::Closed);
                self.owner.stop(true);
                match shared.deferred_failure.lock().take() {
                    None => Ok(()),
                    Some(error) => Err(error),
                }
            }
            // A chip has died, or all processes have ended one way or another (a sub-worker, say, by somebody's
            // signal): the runtime will never get this right, or has nothing left to get right. The reference stays,
            // everything else goes.
            Err(error) if shared.children.first_death().is_some() || shared.children.all_gone() => {
                let (_, left) = self.destroy();
                shared.leave(Phase::Closed);
                let mut failure = error
                    .runtime()
                    .cloned()
                    .unwrap_or_else(|| RuntimeFailure::new(call, "RuntimeError", error.to_string()));
                // Everything went well but for the exit of a process whose death is known.
                if left.is_empty() && failure.message.contains("child teardown: pid") {
                    return Ok(());
                }
                failure.message = format!(
                    "{}; the worker's processes were ended and its shared memory was removed instead, left: {}",
                    failure.message,
                    if left.is_empty() { "nothing".to_owned() } else { left.join(", ") }
                );
                failure.call = call;
                failure.effect = Effect::Done;
                Err(failure.into())
            }
            Err(error) => Err(error),
        }
    }

    /// Whether a domain is left: one of ours, or one that a host entry had the runtime keep by itself.
    fn holds_domains(&self) -> bool {
        let shared = &*self.shared;
        if shared.domains.lock().table.values().next().is_some() {
            return true;
        }
        Python::attach(|py| {
            let worker = shared.worker(py, Call::Close).ok();
            let live = worker.and_then(|worker| optional(&worker, "live_domains").ok().flatten());
            live.is_some_and(|live| live.is_truthy().unwrap_or(false))
        })
    }

    /// Makes a start that is under way give up: ends the processes that it has made so far, again and again until it
    /// has noticed, within the time of a forced end. Returns the chips.
    pub(super) fn interrupt_start(&self) -> Vec<ChipId> {
        let mut ended = Vec::new();
        let deadline = Instant::now() + FORCED_END;
        while let Some(worker) = self.shared.starting_by(Instant::now() + START_INTERVAL) {
            Python::attach(|py| {
                if let Ok((chips, subs, mailboxes)) = start::processes(worker.bind(py)) {
                    self.shared.children.started(&chips, &subs, mailboxes);
                }
                drop(worker);
            });
            ended.extend(self.shared.children.end_all());
            if Instant::now() >= deadline {
                break;
            }
        }
        ended
    }

    /// Ends the processes by force, removes their shared memory, and gives up the worker without collecting it.
    pub(super) fn destroy(&self) -> (Vec<ChipId>, Vec<String>) {
        let shared = &*self.shared;
        self.stop_monitor();
        let names: Vec<String> = shared.host.lock().values().filter_map(|b| b.name.clone()).collect();
        shared.children.own_names(names);
        shared.children.own_names(shared.store.lock().names());
        shared.children.own_names(shared.forget_deferred());
        let (ended, left) = shared.children.destroy(FORCED_END);
        self.clear();
        self.owner.stop(false);
        (ended, left)
    }
}
