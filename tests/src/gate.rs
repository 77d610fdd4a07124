//! How tests hold something open, and how a hanging test ends. No sleeps, no assertions on time.

use std::io::Write as _;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// How long a test may take before its process is aborted: a guard against hangs, far above what any test needs.
pub const HANG_GUARD: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

/// A gate: whoever [`pass`](Self::pass)es it waits until it is open. Clones are the same gate.
#[derive(Clone, Debug, Default)]
pub struct Gate {
    inner: Arc<Inner>,
}

impl Gate {
    /// A closed gate.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Arrives, and waits until the gate is open.
    pub fn pass(&self) {
        let mut state = self.inner.state.lock();
        state.0 += 1;
        self.inner.changed.notify_all();
        while !state.1 {
            self.inner.changed.wait(&mut state);
        }
    }

    /// Waits until `count` arrivals have been counted since the gate was made.
    pub fn wait_arrived(&self, count: usize) {
        let mut state = self.inner.state.lock();
        while state.0 < count {
            self.inner.changed.wait(&mut state);
        }
    }

    /// How many have arrived.
    #[must_use]
    pub fn arrived(&self) -> usize {
        self.inner.state.lock().0
    }

    /// Opens the gate for good.
    pub fn open(&self) {
        self.inner.state.lock().1 = true;
        self.inner.changed.notify_all();
    }

    /// Closes the gate again for those who come later.
    pub fn shut(&self) {
        self.inner.state.lock().1 = false;
    }
}

/// Opens a gate when dropped, so that a failing test does not leave threads behind.
#[derive(Debug)]
pub struct OpenOnDrop(pub Gate);

impl Drop for OpenOnDrop {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// Aborts the process unless dropped within [`HANG_GUARD`].
#[derive(Debug)]
pub struct HangGuard {
    over: Arc<(Mutex<bool>, Condvar)>,
    watch: Option<JoinHandle<()>>,
}

impl HangGuard {
    /// Starts watching the test called `name`.
    #[must_use]
    pub fn arm(name: &'static str) -> Self {
        let over: Arc<(Mutex<bool>, Condvar)> = Arc::default();
        let theirs = Arc::clone(&over);
        let watch = std::thread::spawn(move || {
            let (over, changed) = &*theirs;
            let deadline = std::time::Instant::now() + HANG_GUARD;
            let mut over = over.lock();
            while !*over {
                if changed.wait_until(&mut over, deadline).timed_out() && !*over {
                    // Not `eprintln`: the harness captures that, and it would be lost with the process.
                    let _told = writeln!(std::io::stderr(), "{name} hangs: no end after {HANG_GUARD:?}");
                    std::process::abort();
                }
            }
        });
        Self { over, watch: Some(watch) }
    }
}

impl Drop for HangGuard {
    fn drop(&mut self) {
        *self.over.0.lock() = true;
        self.over.1.notify_all();
        if let Some(watch) = self.watch.take() {
            let _joined = watch.join();
        }
    }
}
