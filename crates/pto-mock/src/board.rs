//! How kernels wait for signal cells, and how such waits end early.
//!
//! One [`Board`] serves an emulator. Whoever changes memory calls [`Board::changed`]; a waiter looks, and sleeps only
//! if nothing has changed since it looked.
//!
//! No wake-up is lost: the writer bumps `version` and then reads `waiters`; the waiter bumps `waiters` and then
//! reads `version`, both sequentially consistent. So either the writer sees the waiter and wakes it (under the lock
//! that the waiter holds from its last look at `version` until it sleeps), or the waiter sees the new version.

use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

/// How often a waiter looks before it sleeps: long enough for a peer that is about to signal, short enough not to
/// starve it on few cores.
const SPINS: u32 = 64;

/// A meeting point of writers and waiters.
#[derive(Debug, Default)]
pub(crate) struct Board {
    version: AtomicU64,
    waiters: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

/// Counts a waiter for as long as it exists, also if its predicate panics.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Board {
    /// Something changed: whoever waits looks again.
    pub(crate) fn changed(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock());
            self.changed.notify_all();
        }
    }

    /// Waits until `look` answers. `look` runs without any lock of the board.
    pub(crate) fn wait<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        for _ in 0..SPINS {
            if let Some(answer) = look() {
                return answer;
            }
            std::hint::spin_loop();
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let _waiting = Waiting(&self.waiters);
        loop {
            let seen = self.version.load(Ordering::SeqCst);
            if let Some(answer) = look() {
                return answer;
            }
            let mut guard = self.lock.lock();
            while self.version.load(Ordering::SeqCst) == seen {
                self.changed.wait(&mut guard);
            }
        }
    }
}

/// Why the waits of a run end early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interrupt {
    /// Another task of the run failed, or the run was failed by hand.
    RunFailed,
    /// The emulator was abandoned.
    Abandoned,
}

/// The interrupt flag that the tasks of one run share.
#[derive(Debug, Default)]
pub(crate) struct InterruptFlag(AtomicU8);

impl InterruptFlag {
    /// Raises the flag; abandonment overrides failure, never the other way round.
    pub(crate) fn raise(&self, why: Interrupt) {
        self.0.fetch_max(if why == Interrupt::RunFailed { 1 } else { 2 }, Ordering::SeqCst);
    }

    pub(crate) fn get(&self) -> Option<Interrupt> {
        match self.0.load(Ordering::SeqCst) {
            0 => None,
            1 => Some(Interrupt::RunFailed),
            _ => Some(Interrupt::Abandoned),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn waiters_see_every_change_that_they_wait_for() {
        let (board, cell) = (Board::default(), AtomicU32::new(0));
        let rounds = if cfg!(miri) { 20 } else { 2_000 };
        std::thread::scope(|scope| {
            for me in 0..2 {
                let (board, cell) = (&board, &cell);
                scope.spawn(move || {
                    for round in 0..rounds {
                        let turn = round * 2 + me;
                        board.wait(|| (cell.load(Ordering::Acquire) == turn).then_some(()));
                        cell.store(turn + 1, Ordering::Release);
                        board.changed();
                    }
                });
            }
        });
        assert_eq!(cell.load(Ordering::Acquire), rounds * 2);
        assert_eq!(board.waiters.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn abandonment_overrides_failure() {
        let flag = InterruptFlag::default();
        assert_eq!(flag.get(), None);
        flag.raise(Interrupt::Abandoned);
        flag.raise(Interrupt::RunFailed);
        assert_eq!(flag.get(), Some(Interrupt::Abandoned));
    }
}
