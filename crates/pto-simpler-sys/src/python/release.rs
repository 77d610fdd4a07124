//! Releasing host buffers.
//!
//! The runtime tells every child process of a release and waits for each to be idle; one that stays busy for half a
//! minute ends the run that it works for. So nothing is released while a run is in flight: a released buffer first
//! waits in a store, from which the next buffer of that size is taken, and what the store does not hold waits for a
//! moment without runs. Where too many wait, whoever releases one more makes that moment.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

use super::shared::{HostBuffer, Phase, Shared};
use super::waiter;
use crate::error::Call;

/// Most buffers whose release waits before runs are made to leave it a moment, and how long that may take.
const MOST_DEFERRED: usize = 32;
const REST: Duration = Duration::from_secs(1);

impl Shared {
    /// Takes a host buffer that its user has released.
    pub(crate) fn release_host(&self, buffer: HostBuffer) {
        let refused = self.store.lock().put(buffer);
        if let Some(buffer) = refused {
            self.defer_release(buffer.views.into_buffer(), buffer.name);
            self.let_releases_through();
        }
        self.drain_deferred();
    }

    /// A released buffer of this size, with whatever it contains.
    pub(crate) fn stored_host(&self, nbytes: u64) -> Option<HostBuffer> {
        self.store.lock().take(nbytes)
    }

    /// Empties the store; what was in it is released when no run is in flight.
    pub(crate) fn empty_store(&self) {
        let buffers = self.store.lock().drain();
        self.deferred.lock().extend(buffers.into_iter().map(|b| (b.views.into_buffer(), b.name)));
    }

    /// Has a buffer released at the next moment without runs.
    pub(crate) fn defer_release(&self, buffer: Py<PyAny>, name: Option<String>) {
        self.deferred.lock().push((buffer, name));
    }

    /// Gives up the releases that still wait, because the end of the worker sees to them. Returns the names of the
    /// buffers in shared memory.
    pub(crate) fn forget_deferred(&self) -> Vec<String> {
        let buffers = std::mem::take(&mut *self.deferred.lock());
        buffers.into_iter().filter_map(|(_, name)| name).collect()
    }

    /// Where too many releases wait for a moment without runs, which runs that follow one another closely never leave,
    /// makes such a moment: nothing is submitted until the runs in flight have ended. Gives up after a while, because
    /// a run may wait for what this very thread does next. Detached.
    fn let_releases_through(&self) {
        // The thread that ends the runs must not wait for their end.
        if self.deferred.lock().len() <= MOST_DEFERRED || waiter::is_current() {
            return;
        }
        let _lock = self.build_lock.acquire();
        if self.runs.wait_until_ended_by(Instant::now() + REST) {
            Python::attach(|py| self.release_deferred(py));
        }
    }

    /// Releases what has been waiting for it, unless a run is in flight or somebody holds the build lock (who does
    /// it later). Detached.
    pub(crate) fn drain_deferred(&self) {
        while !self.deferred.lock().is_empty() && self.may_release() {
            let Some(_lock) = self.build_lock.try_acquire() else { return };
            Python::attach(|py| self.release_deferred(py));
        }
    }

    /// Whether the runtime would release a buffer now. A worker that is being closed refuses, and closes its buffers
    /// itself: whoever closes waits for the build lock first, so nobody who holds it is overtaken.
    fn may_release(&self) -> bool {
        self.runs.in_flight() == 0 && self.phase() == Phase::Ready
    }

    /// As above, by a thread that holds the build lock and is attached, outside any callback.
    pub(crate) fn release_deferred(&self, py: Python<'_>) {
        if !self.may_release() {
            return;
        }
        // Not all at once where there are many: others wait for the lock.
        let buffers: Vec<_> = {
            let mut deferred = self.deferred.lock();
            let n = deferred.len().min(2 * MOST_DEFERRED);
            deferred.drain(..n).collect()
        };
        for (buffer, _) in buffers {
            let result = self.worker(py, Call::ReleaseBuffer).and_then(|worker| {
                self.api
                    .release_buffer(&worker, buffer.bind(py))
                    .map_err(|e| self.failure(py, Call::ReleaseBuffer, &e, crate::error::Effect::Unknown))
            });
            if let Err(error) = result {
                tracing::warn!(%error, "a host buffer could not be released");
                self.deferred_failure.lock().get_or_insert(error);
            }
        }
    }
}
