//! A watchdog: a step that hangs ends the process with a word on what it was, instead of hanging with it (I12).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Once, PoisonError};
use std::time::{Duration, Instant};

static NEXT: AtomicU64 = AtomicU64::new(0);
static WATCHER: Once = Once::new();
/// Deadlines of the steps under way, by watch.
static STEPS: std::sync::Mutex<BTreeMap<u64, (Instant, String)>> = std::sync::Mutex::new(BTreeMap::new());

/// How often the watcher looks. What it finds has hung for minutes, so this need not be fine.
const EVERY: Duration = Duration::from_secs(1);

/// Watches the steps of one case.
#[derive(Debug)]
pub(super) struct Watch {
    id: u64,
    limit: Duration,
}

impl Watch {
    /// A watch over steps that take at most `limit`.
    pub(super) fn new(limit: Duration) -> Self {
        WATCHER.call_once(|| {
            std::thread::spawn(watch);
        });
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed), limit }
    }

    /// A step begins.
    pub(super) fn begin(&self, what: impl FnOnce() -> String) {
        // A limit beyond the clock is no limit.
        if let Some(deadline) = Instant::now().checked_add(self.limit) {
            steps().insert(self.id, (deadline, what()));
        }
    }

    /// The step is over.
    pub(super) fn end(&self) {
        steps().remove(&self.id);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end();
    }
}

fn steps() -> std::sync::MutexGuard<'static, BTreeMap<u64, (Instant, String)>> {
    STEPS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn watch() {
    loop {
        std::thread::sleep(EVERY);
        let now = Instant::now();
        if let Some((_, what)) = steps().values().find(|(deadline, _)| *deadline < now) {
            eprintln!("I12: this step hangs: {what}");
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_watched_from_its_beginning_to_its_end() {
        let watch = Watch::new(Duration::from_secs(3600));
        let watched = || steps().contains_key(&watch.id);
        assert!(!watched());
        watch.begin(|| "a step".to_owned());
        assert!(watched());
        watch.end();
        assert!(!watched());
    }
}
