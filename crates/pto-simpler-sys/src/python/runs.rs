//! What is known of runs: which are being built, which are in flight and with what, which have ended.

use std::collections::BTreeMap;

use parking_lot::{Condvar, Mutex, MutexGuard};
use pyo3::{Py, PyAny};

use crate::backend::RunState;
use crate::ids::{DomainId, HostBufferId, RunId, ScratchId};

/// What a run uses, known once its graph is built.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    /// Domains that the run allocated or is registered with; `keep` where a success leaves the domain retained.
    pub(crate) domains: Vec<DomainUse>,
    /// Host buffers that are arguments of its tasks.
    pub(crate) buffers: Vec<HostBufferId>,
    /// Scratch, which ends with the run.
    pub(crate) scratch: Vec<ScratchId>,
    /// Host buffers of a host entry's own, which end with the run.
    pub(crate) temporary: Vec<HostBufferId>,
    /// Objects of a host entry that must live as long as the run.
    pub(crate) keep: Vec<Py<PyAny>>,
}

/// A domain as one run uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DomainUse {
    pub(crate) id: DomainId,
    pub(crate) keep: bool,
}

#[derive(Debug)]
struct Active {
    accepted: bool,
    fenced: bool,
    uses: Uses,
}

/// Numbers, kept as ranges: run ids mostly count up, so this stays small however many there were.
#[derive(Debug, Default)]
struct Numbers(BTreeMap<u64, u64>);

impl Numbers {
    fn contains(&self, n: u64) -> bool {
        self.0.range(..=n).next_back().is_some_and(|(_, last)| *last >= n)
    }

    fn insert(&mut self, n: u64) {
        if self.contains(n) {
            return;
        }
        let mut first = n;
        let mut last = n;
        if let Some((start, end)) = self.0.range(..n).next_back().map(|(a, b)| (*a, *b))
            && end.checked_add(1) == Some(n)
        {
            first = start;
        }
        if let Some(next) = n.checked_add(1)
            && let Some(end) = self.0.remove(&next)
        {
            last = end;
        }
        self.0.insert(first, last);
    }
}

#[derive(Debug, Default)]
struct Inner {
    active: BTreeMap<u64, Active>,
    ended: Numbers,
}

/// The table of runs. A leaf lock.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    inner: Mutex<Inner>,
    changed: Condvar,
}

impl Runs {
    /// Takes note that a run is being built; false where the number was used before.
    pub(crate) fn begin(&self, run: RunId) -> bool {
        let mut inner = self.inner.lock();
        if inner.ended.contains(run.0) || inner.active.contains_key(&run.0) {
            return false;
        }
        inner.active.insert(run.0, Active { accepted: false, fenced: false, uses: Uses::default() });
        true
    }

    /// Forgets a run that was not accepted, and returns what its build had used.
    pub(crate) fn cancel(&self, run: RunId) -> Uses {
        let active = self.inner.lock().active.remove(&run.0);
        self.changed.notify_all();
        active.map(|a| a.uses).unwrap_or_default()
    }

    /// The run was accepted.
    pub(crate) fn accept(&self, run: RunId) {
        if let Some(active) = self.inner.lock().active.get_mut(&run.0) {
            active.accepted = true;
        }
    }

    /// Changes what the run uses.
    pub(crate) fn uses(&self, run: RunId, change: impl FnOnce(&mut Uses)) {
        if let Some(active) = self.inner.lock().active.get_mut(&run.0) {
            change(&mut active.uses);
        }
    }

    /// Takes out what an accepted run used, once its fence has passed: it uses nothing any more.
    pub(crate) fn take_uses(&self, run: RunId) -> Uses {
        let mut inner = self.inner.lock();
        let Some(active) = inner.active.get_mut(&run.0) else { return Uses::default() };
        active.fenced = true;
        std::mem::take(&mut active.uses)
    }

    /// The end of a run: whether this is the first report of it. From now on the run counts as ended and no longer
    /// as in flight.
    pub(crate) fn end(&self, run: RunId) -> bool {
        let mut inner = self.inner.lock();
        if !inner.active.get(&run.0).is_some_and(|a| a.accepted) {
            return false;
        }
        inner.active.remove(&run.0);
        inner.ended.insert(run.0);
        drop(inner);
        self.changed.notify_all();
        true
    }

    pub(crate) fn state(&self, run: RunId) -> RunState {
        let inner = self.inner.lock();
        match inner.active.get(&run.0) {
            Some(active) if active.accepted => RunState::Running,
            Some(_) => RunState::Unknown,
            None if inner.ended.contains(run.0) => RunState::Ended,
            None => RunState::Unknown,
        }
    }

    /// Whether the run is being built or in flight, its fence not passed.
    pub(crate) fn is_active(&self, run: RunId) -> bool {
        self.inner.lock().active.get(&run.0).is_some_and(|a| !a.fenced)
    }

    /// Accepted runs that have not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.inner.lock().active.values().filter(|a| a.accepted).count()
    }

    /// Whether no run is being built or in flight.
    pub(crate) fn idle(&self) -> bool {
        self.inner.lock().active.is_empty()
    }

    /// Accepted runs that have not ended, in the order of their numbers.
    pub(crate) fn pending(&self) -> Vec<RunId> {
        self.inner.lock().active.iter().filter(|(_, a)| a.accepted).map(|(n, _)| RunId(*n)).collect()
    }

    /// The run in flight or being built that has this host buffer among its arguments.
    pub(crate) fn user_of(&self, buffer: HostBufferId) -> Option<RunId> {
        let inner = self.inner.lock();
        inner.active.iter().find(|(_, a)| a.uses.buffers.contains(&buffer)).map(|(n, _)| RunId(*n))
    }

    /// Whether a run in flight or being built is registered with this domain.
    pub(crate) fn uses_domain(&self, domain: DomainId) -> bool {
        self.inner.lock().active.values().any(|a| a.uses.domains.iter().any(|d| d.id == domain))
    }

    /// Domains that runs in flight use and do not keep.
    pub(crate) fn passing_domains(&self) -> Vec<DomainUse> {
        let inner = self.inner.lock();
        inner
            .active
            .values()
            .filter(|a| a.accepted)
            .flat_map(|a| &a.uses.domains)
            .filter(|d| !d.keep)
            .copied()
            .collect()
    }

    /// Waits until no accepted run is in flight.
    pub(crate) fn wait_until_ended(&self) {
        let mut inner = self.inner.lock();
        while any_accepted(&inner) {
            self.changed.wait(&mut inner);
        }
    }

    /// Like [`wait_until_ended`](Self::wait_until_ended), until `deadline`; whether they have ended.
    pub(crate) fn wait_until_ended_by(&self, deadline: std::time::Instant) -> bool {
        let mut inner = self.inner.lock();
        while any_accepted(&inner) {
            if self.changed.wait_until(&mut inner, deadline).timed_out() {
                return !any_accepted(&inner);
            }
        }
        true
    }
}

fn any_accepted(inner: &MutexGuard<'_, Inner>) -> bool {
    inner.active.values().any(|a| a.accepted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_remember_exactly_what_was_put_in_and_stay_small() {
        let mut numbers = Numbers::default();
        for n in [5, 3, 4, 0, u64::MAX, u64::MAX - 1, 4] {
            numbers.insert(n);
        }
        for n in [0, 3, 4, 5, u64::MAX - 1, u64::MAX] {
            assert!(numbers.contains(n), "{n}");
        }
        for n in [1, 2, 6, u64::MAX - 2] {
            assert!(!numbers.contains(n), "{n}");
        }
        assert_eq!(numbers.0.len(), 3);
    }

    #[test]
    fn a_run_is_unknown_until_accepted_and_ends_once() {
        let runs = Runs::default();
        let run = RunId(7);
        assert!(runs.begin(run) && !runs.begin(run));
        assert_eq!((runs.state(run), runs.in_flight(), runs.idle()), (RunState::Unknown, 0, false));
        assert!(!runs.end(run));
        runs.accept(run);
        assert_eq!((runs.state(run), runs.in_flight()), (RunState::Running, 1));
        assert!(runs.end(run) && !runs.end(run));
        assert_eq!((runs.state(run), runs.idle()), (RunState::Ended, true));
        assert!(!runs.begin(run));
        assert!(runs.begin(RunId(8)));
        runs.cancel(RunId(8));
        assert_eq!(runs.state(RunId(8)), RunState::Unknown);
        assert!(runs.begin(RunId(8)));
    }
}
