//! The locks and atomics of this crate, behind one module so that a model checker can stand in for them.
//!
//! # Lock order
//!
//! A thread that holds one of these takes only later ones, and none is held across a backend call. [`Rank`] lists
//! them in order. Builds with debug assertions, and so all tests, keep the ranks that a thread holds and panic where
//! it takes a lock out of order, or calls the backend with a lock held ([`assert_unlocked`]); release builds carry no
//! trace of it.
//!
//! The *build lock* is not in the list: it is the `building` flag of the gate, held by the thread whose graph is
//! being built, and it is the only thing held across backend calls.

/// The locks in the order in which one thread may take them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    /// `Admission::gate`: frames, tickets, refusal.
    Gate,
    /// `FrameSlot::stage`: what one frame is doing.
    Stage,
    /// `PreparedProgram::plan`: what opening a dispatch has to do.
    Plan,
    /// `Inner::table`: retained domains.
    Table,
    /// `Shutdown::phase`.
    Phase,
    /// `Shutdown::closer`: the closing thread.
    Closer,
    /// `Inner::failures`.
    Failures,
    /// `Inner::resident`.
    Resident,
    /// `Inner::deferred`.
    Deferred,
    /// `StagingCache::buffers`.
    Staging,
    /// `Cell::outcome`: one dispatch's outcome.
    Outcome,
    /// `CellPool::free`.
    Pool,
}

/// Ranks that the current thread holds, where somebody looks: builds with debug assertions, outside the model.
#[cfg(all(debug_assertions, not(loom)))]
mod held {
    use std::cell::Cell;

    use super::Rank;

    thread_local! {
        /// One bit a rank.
        static HELD: Cell<u32> = const { Cell::new(0) };
    }

    /// The rank of a lock.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct Ranked(Rank);

    impl Ranked {
        pub(crate) const fn new(rank: Rank) -> Self {
            Self(rank)
        }

        #[track_caller]
        pub(crate) fn take(self) -> Held {
            Held::take(self.0)
        }
    }

    /// A lock that the current thread holds.
    #[derive(Debug)]
    pub(crate) struct Held(u32);

    impl Held {
        /// Panics where a lock of this rank or a later one is held.
        #[track_caller]
        fn take(rank: Rank) -> Self {
            let held = HELD.get();
            assert!(held >> rank as u32 == 0, "lock order: {rank:?} is taken with ranks {held:#b} held");
            HELD.set(held | 1 << rank as u32);
            Self(1 << rank as u32)
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            HELD.set(HELD.get() & !self.0);
        }
    }

    #[track_caller]
    pub(crate) fn assert_unlocked(what: &str) {
        let held = HELD.get();
        assert!(held == 0, "lock order: {what} is called with ranks {held:#b} held");
    }
}

#[cfg(not(all(debug_assertions, not(loom))))]
mod held {
    /// Nothing: nobody looks.
    #[derive(Clone, Copy, Debug)]
    #[cfg_attr(loom, allow(dead_code, reason = "the model has guards of its own"))]
    pub(crate) struct Ranked;

    #[cfg_attr(loom, allow(dead_code, reason = "the model has guards of its own"))]
    impl Ranked {
        pub(crate) const fn new(_: super::Rank) -> Self {
            Self
        }

        pub(crate) fn take(self) -> Held {
            Held
        }
    }

    /// Nothing: nobody looks.
    #[derive(Debug)]
    #[cfg_attr(loom, allow(dead_code, reason = "the model has guards of its own"))]
    pub(crate) struct Held;

    pub(crate) fn assert_unlocked(_: &str) {}
}

/// To be called before each backend call: no lock of this crate is held across one.
#[track_caller]
pub(crate) fn assert_unlocked(what: &str) {
    held::assert_unlocked(what);
}

#[cfg(not(loom))]
mod imp {
    use std::ops::{Deref, DerefMut};
    use std::time::Instant;

    pub(crate) use std::sync::Arc;
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

    use super::Rank;
    use super::held::{Held, Ranked};

    #[cfg(not(debug_assertions))]
    const _: () =
        assert!(size_of::<Mutex<u8>>() == size_of::<parking_lot::Mutex<u8>>(), "release builds carry ranks");

    /// A mutex that is never poisoned by a panic.
    #[derive(Debug)]
    pub(crate) struct Mutex<T> {
        rank: Ranked,
        mutex: parking_lot::Mutex<T>,
    }

    /// A locked [`Mutex`].
    #[derive(Debug)]
    pub(crate) struct MutexGuard<'a, T> {
        guard: parking_lot::MutexGuard<'a, T>,
        /// Let go after the lock.
        _held: Held,
    }

    impl<T> Mutex<T> {
        pub(crate) const fn new(rank: Rank, value: T) -> Self {
            Self { rank: Ranked::new(rank), mutex: parking_lot::Mutex::new(value) }
        }

        #[track_caller]
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            let held = self.rank.take();
            MutexGuard { guard: self.mutex.lock(), _held: held }
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            &self.guard
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            &mut self.guard
        }
    }

    /// A condition variable.
    #[derive(Debug, Default)]
    pub(crate) struct Condvar(parking_lot::Condvar);

    impl Condvar {
        pub(crate) const fn new() -> Self {
            Self(parking_lot::Condvar::new())
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }

        /// Waits for a notification, until `deadline` if there is one. Returns false once the deadline has passed.
        pub(crate) fn wait_until<'a, T>(
            &self,
            mut guard: MutexGuard<'a, T>,
            deadline: Option<Instant>,
        ) -> (MutexGuard<'a, T>, bool) {
            let in_time = match deadline {
                None => {
                    self.0.wait(&mut guard.guard);
                    true
                }
                Some(deadline) => !self.0.wait_until(&mut guard.guard, deadline).timed_out(),
            };
            (guard, in_time)
        }
    }
}

#[cfg(loom)]
mod imp {
    use std::time::Instant;

    pub(crate) use loom::sync::Arc;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

    /// The model's mutex.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    pub(crate) type MutexGuard<'a, T> = loom::sync::MutexGuard<'a, T>;

    impl<T> Mutex<T> {
        pub(crate) fn new(_: super::Rank, value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("model threads do not panic while they hold a lock")
        }
    }

    /// The model's condition variable.
    #[derive(Debug, Default)]
    pub(crate) struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }

        /// The model has no clock: a deadline has always passed, after one yield to the other threads.
        pub(crate) fn wait_until<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            deadline: Option<Instant>,
        ) -> (MutexGuard<'a, T>, bool) {
            match deadline {
                None => (self.0.wait(guard).expect("model threads do not panic while they hold a lock"), true),
                Some(_) => (guard, false),
            }
        }
    }
}

pub(crate) use imp::*;

use std::time::{Duration, Instant};

/// The instant `limit` from now; `None`, which means no deadline, where that lies beyond what the clock can say.
pub(crate) fn deadline_after(limit: Duration) -> Option<Instant> {
    Instant::now().checked_add(limit)
}

#[cfg(all(test, debug_assertions, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn locks_are_taken_in_order_and_again_once_they_are_let_go() {
        let (gate, table) = (Mutex::new(Rank::Gate, 1), Mutex::new(Rank::Table, 2));
        for _ in 0..2 {
            let first = gate.lock();
            assert_eq!(*first + *table.lock(), 3);
        }
        drop(table.lock());
        drop(gate.lock());
        assert_unlocked("the backend");
    }

    #[test]
    #[should_panic(expected = "lock order: Gate is taken")]
    fn an_earlier_lock_after_a_later_one_is_caught() {
        let (gate, table) = (Mutex::new(Rank::Gate, ()), Mutex::new(Rank::Table, ()));
        let _later = table.lock();
        let _earlier = gate.lock();
    }

    #[test]
    #[should_panic(expected = "lock order: Stage is taken")]
    fn two_locks_of_one_rank_are_caught() {
        let slots = [Mutex::new(Rank::Stage, ()), Mutex::new(Rank::Stage, ())];
        let _one = slots[0].lock();
        let _other = slots[1].lock();
    }

    #[test]
    #[should_panic(expected = "lock order: close is called")]
    fn a_lock_across_a_backend_call_is_caught() {
        let table = Mutex::new(Rank::Table, ());
        let _held = table.lock();
        let _ok = crate::inner::guarded(pto_simpler_sys::Call::Close, || Ok(()));
    }

    #[test]
    fn another_thread_has_ranks_of_its_own() {
        let (gate, table) = (Mutex::new(Rank::Gate, ()), Mutex::new(Rank::Table, ()));
        let _held = table.lock();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(gate.lock())).join().unwrap();
        });
    }
}
