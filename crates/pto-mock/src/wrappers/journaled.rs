//! A journal of any backend, recorded from outside.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;
use pto_simpler_sys::{
    AbandonReport, Backend, BackendError, BuildFailed, CallConfig, CallableSpec, ChipId, CopySource, CopyTo,
    DeviceBufferId, DevicePlace, DomainId, DomainState, GraphBuilder, HostBufferId, Negotiated, Orchestrator,
    Registered, RunEvents, RunId, RunOutcome, RunState, SubmitError,
};

use super::journaled_graph::JournaledGraph;
use crate::journal::{EventKind, FreeCause, Journal};

/// Bytes read at a time to find out whether a copy's source is zero.
const PROBE_BYTES: usize = 4096;

#[derive(Debug, Default)]
struct Known {
    /// Domains that are not known to be freed, with their members.
    domains: BTreeMap<DomainId, Vec<ChipId>>,
    residents: HashMap<DeviceBufferId, ChipId>,
    hosts: HashMap<HostBufferId, u64>,
    /// Runs whose acceptance has not been recorded yet.
    admitted: HashSet<RunId>,
}

/// What the parts of a [`JournalBackend`] share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) journal: Journal,
    known: Mutex<Known>,
}

impl Shared {
    /// Enters a domain, and says whether it is new.
    pub(super) fn meet(&self, domain: DomainId, chips: &[ChipId]) -> bool {
        self.known.lock().domains.insert(domain, chips.to_vec()).is_none()
    }

    pub(super) fn chip_of(&self, place: DevicePlace) -> Option<ChipId> {
        match place {
            DevicePlace::DomainBuffer { chip, .. } | DevicePlace::Window { chip, .. } => Some(chip),
            DevicePlace::Resident(id) => self.known.lock().residents.get(&id).copied(),
        }
    }

    /// Records a copy that succeeded.
    pub(super) fn copied(&self, run: Option<RunId>, copy: &CopyTo, zero: bool) {
        if let Some(chip) = self.chip_of(copy.dst) {
            self.journal.record(EventKind::Copy { run, chip, dst: copy.dst, nbytes: copy.nbytes, zero });
        }
    }

    pub(super) fn copied_from(&self, run: Option<RunId>, src: DevicePlace, nbytes: u64) {
        if let Some(chip) = self.chip_of(src) {
            self.journal.record(EventKind::CopyFrom { run, chip, src, nbytes });
        }
    }

    /// Looks which domains have been freed meanwhile.
    fn sweep(&self, backend: &dyn Backend, cause: FreeCause) {
        let asked: Vec<DomainId> = self.known.lock().domains.keys().copied().collect();
        for domain in asked.into_iter().rev() {
            if backend.domain_state(domain) == Ok(DomainState::Freed) {
                let gone = self.known.lock().domains.remove(&domain);
                if let Some(chips) = gone {
                    self.journal.record(EventKind::Free { domain, chips, cause });
                }
            }
        }
    }

    fn accept(&self, run: RunId) {
        if self.known.lock().admitted.remove(&run) {
            self.journal.record(EventKind::Accept(run));
        }
    }
}

/// Whether the bytes that a copy takes are all zero.
pub(super) fn is_zero(backend: &dyn Backend, copy: &CopyTo) -> bool {
    let host = match copy.src {
        CopySource::Fill(byte) => return byte == 0,
        CopySource::Host(host) => host,
    };
    let mut buffer = [0; PROBE_BYTES];
    let mut at = 0;
    while at < copy.nbytes {
        let n = usize::try_from(copy.nbytes - at).unwrap_or(PROBE_BYTES).min(PROBE_BYTES);
        let Some(part) = buffer.get_mut(..n) else { return false };
        if backend.read_buffer(host, at, part).is_err() || part.iter().any(|b| *b != 0) {
            return false;
        }
        at += n as u64;
    }
    true
}

/// A backend that records what passes through it, in the events that the emulator records from inside.
///
/// From outside, some things are known late or not at all: `Fence` and `Cleanup` are recorded when the end is
/// reported (the fence may have passed earlier); a `Free` when the domain is found to be freed, at the next end of a
/// run, release or close; tasks are seen when they are submitted, not when they run; nobody is seen waiting. To say
/// whether a copy is of zeros, its source is read through the wrapped backend.
#[derive(Debug)]
pub struct JournalBackend {
    inner: Arc<dyn Backend>,
    shared: Arc<Shared>,
}

impl JournalBackend {
    /// Wraps a backend.
    #[must_use]
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self::with_journal(inner, Journal::new())
    }

    /// Wraps a backend and records into `journal`.
    #[must_use]
    pub fn with_journal(inner: Arc<dyn Backend>, journal: Journal) -> Self {
        Self { inner, shared: Arc::new(Shared { journal, known: Mutex::default() }) }
    }

    /// The journal.
    #[must_use]
    pub fn journal(&self) -> Journal {
        self.shared.journal.clone()
    }

    /// The wrapped backend.
    #[must_use]
    pub fn inner(&self) -> &Arc<dyn Backend> {
        &self.inner
    }

    fn created(&self, nbytes: u64, zeros: bool, buffer: HostBufferId) -> HostBufferId {
        self.shared.known.lock().hosts.insert(buffer, nbytes);
        self.shared.journal.record(EventKind::BufferCreate { buffer, nbytes, zeros });
        buffer
    }
}

struct JournaledEvents {
    outer: Arc<dyn RunEvents>,
    shared: Arc<Shared>,
    /// Weak: the backend keeps this receiver, and must not keep itself.
    inner: std::sync::Weak<dyn Backend>,
}

impl RunEvents for JournaledEvents {
    fn ended(&self, run: RunId, outcome: RunOutcome) {
        // The end may come before the submission has returned.
        self.shared.accept(run);
        self.shared.journal.record(EventKind::Fence(run));
        if let Some(inner) = self.inner.upgrade() {
            self.shared.sweep(&*inner, FreeCause::Cleanup(run));
        }
        self.shared.journal.record(EventKind::Cleanup(run));
        let ok = outcome.result.is_ok() && outcome.cleanup.is_none();
        self.shared.journal.record(EventKind::Ended(run, ok));
        self.outer.ended(run, outcome);
    }
}

struct JournaledBuild<'a> {
    outer: &'a mut dyn GraphBuilder,
    inner: &'a dyn Backend,
    shared: &'a Shared,
}

impl GraphBuilder for JournaledBuild<'_> {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
        self.shared.known.lock().admitted.insert(orchestrator.run());
        self.shared.journal.record(EventKind::Admit(orchestrator.run()));
        self.outer.build(&JournaledGraph::new(orchestrator, self.inner, self.shared))
    }
}

#[deny(clippy::missing_trait_methods)]
impl Backend for JournalBackend {
    pto_simpler_sys::forward_backend!(
        inner: capabilities, phase, check_blocking, run_state, write_buffer, read_buffer, domain_state, committed_device_memory,
    );

    fn register(&self, callable: &CallableSpec) -> Result<Registered, BackendError> {
        let registered = self.inner.register(callable)?;
        let name = Arc::clone(&callable.name);
        self.shared.journal.record(EventKind::Register { callable: registered.id, name });
        Ok(registered)
    }

    fn start(&self, events: Arc<dyn RunEvents>) -> Result<Negotiated, BackendError> {
        let events =
            JournaledEvents { outer: events, shared: Arc::clone(&self.shared), inner: Arc::downgrade(&self.inner) };
        let started = self.inner.start(Arc::new(events));
        self.shared.journal.record(EventKind::Start { ok: started.is_ok() });
        started
    }

    fn submit(&self, run: RunId, config: &CallConfig, graph: &mut dyn GraphBuilder) -> Result<(), SubmitError> {
        let mut build = JournaledBuild { outer: graph, inner: &*self.inner, shared: &self.shared };
        let submitted = self.inner.submit(run, config, &mut build);
        match (&submitted, self.inner.run_state(run)) {
            (_, RunState::Running) => self.shared.accept(run),
            (Err(SubmitError::Build(_)), _) => {
                self.shared.known.lock().admitted.remove(&run);
                self.shared.sweep(&*self.inner, FreeCause::Cleanup(run));
                self.shared.journal.record(EventKind::BuildFailed(run));
            }
            // Ended already (its acceptance was recorded with its end), or refused.
            _ => {}
        }
        submitted
    }

    fn create_buffer(&self, nbytes: u64) -> Result<HostBufferId, BackendError> {
        self.inner.create_buffer(nbytes).map(|buffer| self.created(nbytes, false, buffer))
    }

    fn create_zeros(&self, nbytes: u64) -> Result<HostBufferId, BackendError> {
        self.inner.create_zeros(nbytes).map(|buffer| self.created(nbytes, true, buffer))
    }

    fn fill_buffer(&self, buffer: HostBufferId, byte: u8) -> Result<(), BackendError> {
        self.inner.fill_buffer(buffer, byte)?;
        self.shared.journal.record(EventKind::BufferFill { buffer, byte });
        Ok(())
    }

    fn release_buffer(&self, buffer: HostBufferId) -> Result<(), BackendError> {
        self.inner.release_buffer(buffer)?;
        let nbytes = self.shared.known.lock().hosts.remove(&buffer).unwrap_or_default();
        self.shared.journal.record(EventKind::BufferRelease { buffer, nbytes });
        Ok(())
    }

    fn alloc(&self, chip: ChipId, nbytes: u64) -> Result<DeviceBufferId, BackendError> {
        let buffer = self.inner.alloc(chip, nbytes)?;
        self.shared.known.lock().residents.insert(buffer, chip);
        self.shared.journal.record(EventKind::DeviceAlloc { buffer, chip, nbytes });
        Ok(buffer)
    }

    fn free(&self, buffer: DeviceBufferId) -> Result<(), BackendError> {
        self.inner.free(buffer)?;
        self.shared.known.lock().residents.remove(&buffer);
        self.shared.journal.record(EventKind::DeviceFree(buffer));
        Ok(())
    }

    fn copy_to(&self, copy: &CopyTo) -> Result<(), BackendError> {
        let zero = is_zero(&*self.inner, copy);
        self.inner.copy_to(copy)?;
        self.shared.copied(None, copy, zero);
        Ok(())
    }

    fn copy_from(&self, dst: HostBufferId, src: DevicePlace, nbytes: u64) -> Result<(), BackendError> {
        self.inner.copy_from(dst, src, nbytes)?;
        self.shared.copied_from(None, src, nbytes);
        Ok(())
    }

    fn release_domain(&self, domain: DomainId) -> Result<(), BackendError> {
        // A repeated release is no new event.
        let before = self.inner.domain_state(domain);
        if before == Ok(DomainState::Live) {
            self.shared.journal.record(EventKind::Release(domain));
        }
        let released = self.inner.release_domain(domain);
        self.shared.sweep(&*self.inner, FreeCause::Release);
        released
    }

    fn close(&self) -> Result<(), BackendError> {
        self.shared.journal.record(EventKind::CloseBegin);
        let closed = self.inner.close();
        self.shared.sweep(&*self.inner, FreeCause::Sweep);
        self.shared.journal.record(EventKind::Close { ok: closed.is_ok() });
        closed
    }

    fn abandon(&self) -> AbandonReport {
        self.shared.journal.record(EventKind::Abandon);
        let report = self.inner.abandon();
        self.shared.sweep(&*self.inner, FreeCause::Sweep);
        report
    }
}
