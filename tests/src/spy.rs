//! A wrapper that counts calls of any backend, and misbehaves where a test tells it to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use parking_lot::{Condvar, Mutex};
use pto_simpler_sys::{
    AbandonReport, Backend, BackendError, BuildFailed, Call, CallConfig, CallableSpec, DeviceBufferId, DomainId,
    GraphBuilder, HostBufferId, Negotiated, Orchestrator, Registered, RunEvents, RunId, RunOutcome, RunState,
    SubmitError,
};

use crate::gate::Gate;

/// A call that the spy saw, before it was forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// `register`.
    Register,
    /// `start`.
    Start,
    /// `submit`.
    Submit(RunId),
    /// `release_domain`.
    ReleaseDomain(DomainId),
    /// `release_buffer`.
    ReleaseBuffer(HostBufferId),
    /// `free`.
    Free(DeviceBufferId),
    /// `close`.
    Close,
    /// `abandon`.
    Abandon,
}

/// The wrapper.
#[derive(Debug)]
pub struct Spy {
    inner: Arc<dyn Backend>,
    seen: Mutex<Vec<Seen>>,
    /// `release_domain` answers Ok and does nothing.
    pub lie_about_release: AtomicBool,
    /// Every end is reported from a thread that then panics.
    pub panic_after_end: Arc<AtomicBool>,
    /// The thread that `check_blocking` refuses.
    pub refuse_blocking: Mutex<Option<ThreadId>>,
    /// `submit` returns only when the end of its run has been reported.
    pub return_late: AtomicBool,
    /// Every end passes this gate before it is reported.
    pub ends: Arc<Mutex<Option<Gate>>>,
    /// `close` passes this gate first.
    pub closing: Mutex<Option<Gate>>,
    /// `run_state` panics.
    pub panic_in_run_state: AtomicBool,
    /// Every graph is built a second time.
    pub build_twice: AtomicBool,
    ended: Arc<Ended>,
}

/// The runs whose ends have been reported.
#[derive(Debug, Default)]
struct Ended {
    runs: Mutex<Vec<RunId>>,
    changed: Condvar,
}

/// A builder that builds twice.
struct Twice<'a>(&'a mut dyn GraphBuilder);

impl GraphBuilder for Twice<'_> {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
        let first = self.0.build(orchestrator);
        let _second = self.0.build(orchestrator);
        first
    }
}

impl Spy {
    /// A well-behaved wrapper.
    #[must_use]
    pub fn new(inner: Arc<dyn Backend>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            seen: Mutex::default(),
            lie_about_release: AtomicBool::new(false),
            panic_after_end: Arc::default(),
            refuse_blocking: Mutex::default(),
            return_late: AtomicBool::new(false),
            ended: Arc::default(),
            ends: Arc::default(),
            closing: Mutex::default(),
            panic_in_run_state: AtomicBool::new(false),
            build_twice: AtomicBool::new(false),
        })
    }

    /// What it saw, in order.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().clone()
    }

    /// How many calls match.
    #[must_use]
    pub fn count(&self, matches: impl Fn(&Seen) -> bool) -> usize {
        self.seen.lock().iter().filter(|seen| matches(seen)).count()
    }

    /// How often `close` was called.
    #[must_use]
    pub fn closes(&self) -> usize {
        self.count(|seen| *seen == Seen::Close)
    }

    /// The domains whose release was asked for, in order.
    #[must_use]
    pub fn releases(&self) -> Vec<DomainId> {
        let releases = |seen: &Seen| if let Seen::ReleaseDomain(id) = seen { Some(*id) } else { None };
        self.seen.lock().iter().filter_map(releases).collect()
    }

    fn see(&self, seen: Seen) {
        self.seen.lock().push(seen);
    }
}

struct Ends {
    to: Arc<dyn RunEvents>,
    panic_after: Arc<AtomicBool>,
    ended: Arc<Ended>,
    gate: Arc<Mutex<Option<Gate>>>,
}

impl RunEvents for Ends {
    fn ended(&self, run: RunId, outcome: RunOutcome) {
        let gate = self.gate.lock().clone();
        if let Some(gate) = gate {
            gate.pass();
        }
        if !self.panic_after.load(Ordering::SeqCst) {
            self.to.ended(run, outcome);
            self.ended.runs.lock().push(run);
            self.ended.changed.notify_all();
            return;
        }
        let to = Arc::clone(&self.to);
        let reporter = std::thread::spawn(move || {
            to.ended(run, outcome);
            // Unwinds as a panic does, without the message on standard error.
            std::panic::resume_unwind(Box::new("the reporting thread panics"));
        });
        assert!(reporter.join().is_err());
    }
}

#[deny(clippy::missing_trait_methods)]
impl Backend for Spy {
    pto_simpler_sys::forward_backend!(
        inner: capabilities, phase, create_buffer, create_zeros, write_buffer, read_buffer, fill_buffer, alloc, copy_to, copy_from, domain_state, committed_device_memory,
    );

    fn check_blocking(&self) -> Result<(), BackendError> {
        if *self.refuse_blocking.lock() == Some(std::thread::current().id()) {
            return Err(BackendError::misuse(Call::Submit, "this thread may not block"));
        }
        self.inner.check_blocking()
    }

    fn register(&self, callable: &CallableSpec) -> Result<Registered, BackendError> {
        self.see(Seen::Register);
        self.inner.register(callable)
    }

    fn start(&self, events: Arc<dyn RunEvents>) -> Result<Negotiated, BackendError> {
        self.see(Seen::Start);
        let (panic_after, ended) = (Arc::clone(&self.panic_after_end), Arc::clone(&self.ended));
        self.inner.start(Arc::new(Ends { to: events, panic_after, ended, gate: Arc::clone(&self.ends) }))
    }

    fn submit(&self, run: RunId, config: &CallConfig, graph: &mut dyn GraphBuilder) -> Result<(), SubmitError> {
        self.see(Seen::Submit(run));
        if self.build_twice.load(Ordering::SeqCst) {
            return self.inner.submit(run, config, &mut Twice(graph));
        }
        self.inner.submit(run, config, graph)?;
        if self.return_late.load(Ordering::SeqCst) {
            let mut runs = self.ended.runs.lock();
            while !runs.contains(&run) {
                self.ended.changed.wait(&mut runs);
            }
        }
        Ok(())
    }

    fn run_state(&self, run: RunId) -> RunState {
        assert!(!self.panic_in_run_state.load(Ordering::SeqCst), "run_state panics");
        self.inner.run_state(run)
    }

    fn release_buffer(&self, buffer: HostBufferId) -> Result<(), BackendError> {
        self.see(Seen::ReleaseBuffer(buffer));
        self.check_blocking()?;
        self.inner.release_buffer(buffer)
    }

    fn free(&self, buffer: DeviceBufferId) -> Result<(), BackendError> {
        self.see(Seen::Free(buffer));
        self.inner.free(buffer)
    }

    fn release_domain(&self, domain: DomainId) -> Result<(), BackendError> {
        self.see(Seen::ReleaseDomain(domain));
        if self.lie_about_release.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.inner.release_domain(domain)
    }

    fn close(&self) -> Result<(), BackendError> {
        self.see(Seen::Close);
        let gate = self.closing.lock().clone();
        if let Some(gate) = gate {
            gate.pass();
        }
        self.inner.close()
    }

    fn abandon(&self) -> AbandonReport {
        self.see(Seen::Abandon);
        self.inner.abandon()
    }
}
