//! The locks of the binding and their order.
//!
//! 1. [`BuildLock`]: serialises graph builds first come, first served. It is the only lock under which a thread
//!    attaches to the interpreter, and it is taken detached. A thread that builds holds it for the whole of Simpler's
//!    `submit`; control outside runs and buffer releases take it too, because inside Simpler they wait for the same.
//! 2. The table locks of [`Shared`](super::shared::Shared): leaves. A thread takes them attached or detached, one at
//!    a time, holds them for a few instructions, and neither attaches nor calls anybody else's code meanwhile.
//!
//! An attached thread never waits for the build lock, so the interpreter and this lock cannot wait for each other.

use parking_lot::{Condvar, Mutex};

/// A lock that is granted in the order in which it was asked for.
#[derive(Debug, Default)]
pub(crate) struct BuildLock {
    tickets: Mutex<Tickets>,
    turn: Condvar,
}

#[derive(Debug, Default)]
struct Tickets {
    next: u64,
    serving: u64,
}

impl BuildLock {
    /// Waits for the lock.
    pub(crate) fn acquire(&self) -> BuildGuard<'_> {
        let mut tickets = self.tickets.lock();
        let mine = tickets.next;
        tickets.next += 1;
        while tickets.serving != mine {
            self.turn.wait(&mut tickets);
        }
        BuildGuard { lock: self }
    }

    /// Takes the lock if nobody holds it or waits for it.
    pub(crate) fn try_acquire(&self) -> Option<BuildGuard<'_>> {
        let mut tickets = self.tickets.lock();
        if tickets.serving != tickets.next {
            return None;
        }
        tickets.next += 1;
        Some(BuildGuard { lock: self })
    }
}

/// The lock, held.
#[derive(Debug)]
pub(crate) struct BuildGuard<'a> {
    lock: &'a BuildLock,
}

impl Drop for BuildGuard<'_> {
    fn drop(&mut self) {
        self.lock.tickets.lock().serving += 1;
        self.lock.turn.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, mpsc};

    #[test]
    fn waiters_are_served_in_the_order_of_their_tickets() {
        let lock = Arc::new(BuildLock::default());
        let (sender, order) = mpsc::channel();
        let held = lock.acquire();
        assert!(lock.try_acquire().is_none());
        let mut threads = Vec::new();
        for i in 0..4u64 {
            let (lock, sender) = (Arc::clone(&lock), sender.clone());
            let waiting = Arc::clone(&lock);
            threads.push(std::thread::spawn(move || {
                let _guard = lock.acquire();
                sender.send(i).unwrap();
            }));
            // The next thread starts only once this one has its ticket.
            while waiting.tickets.lock().next != i + 2 {
                std::thread::yield_now();
            }
        }
        drop(held);
        for thread in threads {
            thread.join().unwrap();
        }
        drop(sender);
        assert_eq!(order.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(lock.try_acquire().is_some());
    }
}
