//! Completion: the cell that a dispatch's handles share, and the handle itself (design rule 6).
//!
//! 1. A cell belongs to one dispatch at a time. It is written once, by the thread that finishes the dispatch.
//! 2. Every waiter reads the same cached outcome.
//! 3. References are counted by the cell itself (the dispatch and each handle); with the last one the cell is reset
//!    and returns to the pool, so that a warm dispatch makes none.

use std::fmt;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::program::DispatchId;
use crate::reentry;
use crate::sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, Rank, deadline_after};

/// How a dispatch ended.
pub type Outcome = Result<(), Error>;

/// The shared part of one dispatch's handles.
#[derive(Debug)]
pub(crate) struct Cell {
    refs: AtomicUsize,
    id: AtomicU64,
    done: AtomicBool,
    outcome: Mutex<Option<Outcome>>,
    changed: Condvar,
}

impl Cell {
    fn new() -> Self {
        Self {
            refs: AtomicUsize::new(0),
            id: AtomicU64::new(0),
            done: AtomicBool::new(false),
            outcome: Mutex::new(Rank::Outcome, None),
            changed: Condvar::new(),
        }
    }

    /// Publishes the outcome. The first one stays.
    fn complete(&self, outcome: Outcome) {
        let mut slot = self.outcome.lock();
        if slot.is_none() {
            *slot = Some(outcome);
        }
        self.done.store(true, Ordering::Release);
        drop(slot);
        self.changed.notify_all();
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    fn wait(&self, deadline: Option<Instant>) -> Option<Outcome> {
        let mut slot = self.outcome.lock();
        loop {
            if let Some(outcome) = &*slot {
                return Some(outcome.clone());
            }
            let (next, in_time) = self.changed.wait_until(slot, deadline);
            slot = next;
            if !in_time {
                return slot.clone();
            }
        }
    }
}

/// Cells that no dispatch uses at the moment.
#[derive(Debug)]
pub(crate) struct CellPool {
    free: Mutex<Vec<Arc<Cell>>>,
}

impl CellPool {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { free: Mutex::new(Rank::Pool, Vec::new()) })
    }

    /// A cell for dispatch `id`, held by the dispatch itself.
    pub(crate) fn acquire(pool: &Arc<Self>, id: u64) -> CellRef {
        let cell = pool.free.lock().pop().unwrap_or_else(|| Arc::new(Cell::new()));
        cell.refs.store(1, Ordering::Relaxed);
        cell.id.store(id, Ordering::Relaxed);
        CellRef { cell, pool: Arc::clone(pool) }
    }

    #[cfg(test)]
    pub(crate) fn idle(&self) -> usize {
        self.free.lock().len()
    }
}

/// A counted reference to a cell.
pub(crate) struct CellRef {
    cell: Arc<Cell>,
    pool: Arc<CellPool>,
}

impl CellRef {
    pub(crate) fn complete(&self, outcome: Outcome) {
        self.cell.complete(outcome);
    }
}

impl Clone for CellRef {
    fn clone(&self) -> Self {
        self.cell.refs.fetch_add(1, Ordering::Relaxed);
        Self { cell: Arc::clone(&self.cell), pool: Arc::clone(&self.pool) }
    }
}

impl Drop for CellRef {
    fn drop(&mut self) {
        if self.cell.refs.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        // Nobody else can reach the cell now: reset it, then let the next dispatch have it. The old outcome is
        // dropped outside the lock.
        let old = self.cell.outcome.lock().take();
        self.cell.done.store(false, Ordering::Relaxed);
        drop(old);
        self.pool.free.lock().push(Arc::clone(&self.cell));
    }
}

impl fmt::Debug for CellRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CellRef({})", self.cell.id.load(Ordering::Relaxed))
    }
}

/// A handle: observes one dispatch.
///
/// Handles are cheap to clone, may be sent and shared between threads, and may be dropped at any time: dropping
/// one abandons nothing. The dispatch owns its arguments, its frame and its staging until it is terminal.
#[derive(Clone)]
pub struct Dispatch {
    cell: CellRef,
    worker: u64,
    backend: std::sync::Arc<dyn pto_simpler_sys::Backend>,
}

impl Dispatch {
    pub(crate) fn new(cell: CellRef, worker: u64, backend: std::sync::Arc<dyn pto_simpler_sys::Backend>) -> Self {
        Self { cell, worker, backend }
    }

    /// The dispatch's number: counted from 1 on each worker, in the order in which frames were granted.
    #[must_use]
    pub fn id(&self) -> DispatchId {
        DispatchId(self.cell.cell.id.load(Ordering::Relaxed))
    }

    /// Whether the dispatch is terminal. Never blocks, and may be asked anywhere, inside a graph builder too.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.cell.cell.is_done()
    }

    /// The outcome, once the dispatch is terminal. Does not wait.
    #[must_use]
    pub fn outcome(&self) -> Option<Outcome> {
        if !self.is_done() {
            return None;
        }
        self.cell.cell.wait(Some(Instant::now())).inspect(deliver)
    }

    /// Waits until the dispatch is terminal and returns its outcome. Idempotent: every waiter in any thread gets
    /// the same.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] where the dispatch failed. [`Error::Reentrant`] inside a graph builder of the same worker
    /// while the dispatch is not terminal. [`Error::Backend`] (misuse) where the backend says that this thread may
    /// not block.
    pub fn wait(&self) -> Outcome {
        self.wait_deadline(None)
    }

    /// As [`wait`](Self::wait), for at most `limit`; `Duration::MAX` means no limit. A wait that times out changes
    /// nothing, and returns by its deadline whatever the backend does.
    ///
    /// # Errors
    ///
    /// [`Error::WaitTimeout`] where the dispatch is not terminal by then; otherwise as [`wait`](Self::wait).
    pub fn wait_timeout(&self, limit: Duration) -> Outcome {
        self.wait_deadline(Some(limit))
    }

    fn wait_deadline(&self, limit: Option<Duration>) -> Outcome {
        let deadline = limit.and_then(deadline_after);
        if !self.is_done() {
            reentry::refuse(self.worker, "wait")?;
            if limit != Some(Duration::ZERO) {
                self.backend.check_blocking()?;
            }
        }
        match self.cell.cell.wait(deadline) {
            Some(outcome) => {
                deliver(&outcome);
                outcome
            }
            None => Err(Error::WaitTimeout { id: self.id() }),
        }
    }
}

impl fmt::Debug for Dispatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dispatch").field("id", &self.id()).field("done", &self.is_done()).finish()
    }
}

/// Somebody has seen this outcome; `close` need not report it.
fn deliver(outcome: &Outcome) {
    if let Err(Error::Failed(failure)) = outcome {
        failure.mark_delivered();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_cell_returns_to_the_pool_with_its_last_reference_and_comes_back_clean() {
        let pool = CellPool::new();
        let owner = CellPool::acquire(&pool, 1);
        let handle = owner.clone();
        owner.complete(Ok(()));
        drop(owner);
        assert_eq!(pool.idle(), 0, "a handle is left");
        assert!(handle.cell.is_done());
        drop(handle);
        assert_eq!(pool.idle(), 1);
        let again = CellPool::acquire(&pool, 2);
        assert_eq!((pool.idle(), again.cell.is_done()), (0, false));
        assert!(again.cell.wait(Some(Instant::now())).is_none());
    }

    #[test]
    fn the_first_outcome_stays() {
        let pool = CellPool::new();
        let cell = CellPool::acquire(&pool, 1);
        cell.complete(Ok(()));
        cell.complete(Err(Error::Closing));
        assert!(matches!(cell.cell.wait(None), Some(Ok(()))));
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::thread;

    use super::*;

    #[test]
    fn every_waiter_gets_the_one_outcome_and_the_cell_returns_to_the_pool() {
        loom::model(|| {
            let pool = CellPool::new();
            let owner = CellPool::acquire(&pool, 1);
            let handle = owner.clone();
            let mine = owner.clone();
            let waiter = thread::spawn(move || matches!(handle.cell.wait(None), Some(Err(Error::Closing))));
            owner.complete(Err(Error::Closing));
            drop(owner);
            assert!(matches!(mine.cell.wait(None), Some(Err(Error::Closing))));
            drop(mine);
            assert!(waiter.join().unwrap());
            assert_eq!(pool.idle(), 1);
        });
    }

    #[test]
    fn a_cell_is_reused_only_after_its_last_handle_is_gone() {
        loom::model(|| {
            let pool = CellPool::new();
            let owner = CellPool::acquire(&pool, 1);
            let handle = owner.clone();
            let finisher = thread::spawn(move || {
                owner.complete(Ok(()));
            });
            let next = CellPool::acquire(&pool, 2);
            assert!(!next.cell.is_done(), "a fresh cell carries no old outcome");
            assert!(matches!(handle.cell.wait(None), Some(Ok(()))));
            drop(handle);
            finisher.join().unwrap();
            drop(next);
            assert_eq!(pool.idle(), 2);
        });
    }
}
