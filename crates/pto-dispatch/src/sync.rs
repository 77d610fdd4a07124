//! The locks and atomics of this crate, behind one module so that a model checker can stand in for them.
//!
//! # Lock order
//!
//! A thread that holds one of these takes only later ones, and none is held across a backend call:
//!
//! 1. `Admission::gate` (frames, tickets, refusal)
//! 2. `FrameSlot::stage` (what one frame is doing)
//! 3. `Inner::table` (retained domains), `PreparedProgram::plan`
//! 4. `Shutdown::phase`
//! 5. `Inner::failures`, `Inner::resident`, `Inner::deferred`, `StagingCache::buffers`
//! 6. `Cell::outcome` (one dispatch's outcome), `CellPool::free`
//!
//! The *build lock* is not in the list: it is the `building` flag of the gate, held by the thread whose graph is
//! being built, and it is the only thing held across backend calls.

#[cfg(not(loom))]
mod imp {
    use std::time::Instant;

    pub(crate) use std::sync::Arc;
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

    /// A mutex that is never poisoned by a panic.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

    pub(crate) type MutexGuard<'a, T> = parking_lot::MutexGuard<'a, T>;

    impl<T> Mutex<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(parking_lot::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock()
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
                    self.0.wait(&mut guard);
                    true
                }
                Some(deadline) => !self.0.wait_until(&mut guard, deadline).timed_out(),
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
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    pub(crate) type MutexGuard<'a, T> = loom::sync::MutexGuard<'a, T>;

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
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
