//! The owner thread: starts and closes one Simpler worker.
//!
//! The runtime binds devices to the thread that started the worker and lets no other thread close it. That thread
//! here belongs to the backend, attaches once and keeps its Python thread state to the end (from Python 3.13 on, a
//! thread that attached anew would be a stranger); while it has nothing to do it is detached.

use std::fmt;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use pyo3::prelude::*;

use super::queue::Queue;
use crate::error::{BackendError, Call};

type Job = Box<dyn for<'py> FnOnce(Python<'py>) + Send>;

pub(crate) struct Owner {
    jobs: Arc<Queue<Job>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owner").finish_non_exhaustive()
    }
}

impl Owner {
    pub(crate) fn start() -> Result<Self, BackendError> {
        let jobs: Arc<Queue<Job>> = Arc::default();
        let queue = Arc::clone(&jobs);
        let thread = std::thread::Builder::new()
            .name("pto-simpler-owner".to_owned())
            .spawn(move || {
                Python::attach(|py| {
                    while let Some(job) = py.detach(|| queue.pop()) {
                        // Whoever waits for the job learns from its silence; the thread has to stay, because only it
                        // can close the worker, whose processes would not outlive it either.
                        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(py)));
                    }
                });
            })
            .map_err(|e| BackendError::broken(Call::Start, format!("the owner thread cannot be started: {e}")))?;
        Ok(Self { jobs, thread: Mutex::new(Some(thread)) })
    }

    /// Runs `job` on the owner thread and waits for it. Call it detached.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        call: Call,
        job: impl for<'py> FnOnce(Python<'py>) -> Result<T, BackendError> + Send + 'static,
    ) -> Result<T, BackendError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let job: Job = Box::new(move |py| {
            // Nobody listens any more only if the waiting thread unwound.
            let _ = sender.send(job(py));
        });
        let gone = |what: &str| BackendError::broken(call, what);
        self.jobs.push(job).map_err(|_| gone("the owner thread has ended"))?;
        receiver.recv().map_err(|_| gone("the owner thread has panicked in this call"))?
    }

    /// Lets the thread end once it has nothing to do, and waits for it if asked to.
    pub(crate) fn stop(&self, wait: bool) {
        self.jobs.close();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && wait
        {
            // It does not unwind.
            let _ = thread.join();
        }
    }
}
