//! Threads that a test wants to see blocked before it goes on.

use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::{Scope, ScopedJoinHandle};

/// A thread that is about to block.
#[derive(Debug)]
pub struct Parked<'s, T> {
    thread: ScopedJoinHandle<'s, T>,
    stat: Option<PathBuf>,
}

/// How often in a row a thread must be seen asleep: a lock that is contended for a moment also looks asleep.
const LOOKS: u32 = 200;

/// Starts `body` on a thread of `scope`.
pub fn spawn<'s, T: Send + 's>(scope: &'s Scope<'s, '_>, body: impl FnOnce() -> T + Send + 's) -> Parked<'s, T> {
    let (tell, told) = mpsc::channel();
    let thread = scope.spawn(move || {
        let own = std::fs::read_link("/proc/thread-self").ok();
        tell.send(own.map(|own| PathBuf::from("/proc").join(own).join("stat"))).unwrap();
        body()
    });
    Parked { thread, stat: told.recv().unwrap() }
}

impl<T> Parked<'_, T> {
    /// Waits until the thread sleeps. Where the system does not show that, gives it ample opportunity instead, which
    /// can hide a failure but never invent one.
    ///
    /// # Panics
    ///
    /// Where the thread ends instead.
    #[track_caller]
    pub fn wait_parked(&self) {
        let mut asleep = 0;
        while asleep < LOOKS {
            assert!(!self.thread.is_finished(), "the thread ended instead of blocking");
            let state = self.stat.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
            // The state follows the name, which is in parentheses and may hold anything.
            let state = state.and_then(|stat| stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()));
            asleep = if matches!(state, Some('S') | None) { asleep + 1 } else { 0 };
            std::thread::yield_now();
        }
    }

    /// Whether the thread has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for its result; a panic of the thread is resumed.
    pub fn join(self) -> T {
        match self.thread.join() {
            Ok(value) => value,
            Err(payload) => std::panic::resume_unwind(payload),
        }
    }
}
