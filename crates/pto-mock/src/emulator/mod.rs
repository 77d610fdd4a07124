//! The emulator: a backend that does the work.

mod buffers;
mod chip;
mod close;
mod control;
mod domain;
mod orchestrator;
mod run;
mod state;
mod table;
pub(crate) mod window;

use std::fmt;
use std::sync::Arc;
use std::thread;

use parking_lot::{Condvar, Mutex};
use pto_simpler_sys::{
    AbandonReport, Backend, BackendError, BackendPhase, Call, CallConfig, CallableKind, CallableSource,
    CallableSpec, Capabilities, ChipId, CopyTo, DeviceBufferId, DevicePlace, DomainId, DomainState, GraphBuilder,
    HostBufferId, Negotiated, Registered, RunEvents, RunId, RunState, RuntimeFailure, SubmitError,
};

use self::state::{Callable, Phase, State};
use self::window::Contexts;
use crate::board::Board;
use crate::builder::{Completion, EmulatorBuilder, LibraryEntry, Options};
use crate::faults::{Fault, FaultControl, FaultSchedule};
use crate::journal::{Event, EventKind, Journal};
use crate::kernel::{Code, KernelObject};
use crate::memory::{Memory, SegmentFactory};

/// Everything that the threads of an emulator share.
pub(crate) struct Core {
    pub(crate) capabilities: Capabilities,
    pub(crate) options: Options,
    pub(crate) segments: SegmentFactory,
    pub(crate) journal: Journal,
    pub(crate) faults: FaultControl,
    pub(crate) board: Arc<Board>,
    pub(crate) contexts: Arc<Contexts>,
    pub(crate) state: Mutex<State>,
    /// For submitters, control calls, releases and closers.
    pub(crate) changed: Condvar,
    /// For the finisher.
    pub(crate) finish: Condvar,
    /// For each chip's thread.
    pub(crate) lane_wake: Vec<Condvar>,
    /// For sub-workers.
    pub(crate) sub_wake: Condvar,
}

impl Core {
    /// On the building thread, and on threads of the emulator, calls that would wait for themselves are refused.
    pub(crate) fn refuse_reentrant(&self, call: Call) -> Result<(), BackendError> {
        self.refuse_in_build(call)?;
        if self.state.lock().threads.ids.contains(&thread::current().id()) {
            let message = "called on a thread of the emulator (a kernel, or the receiver of run ends), which would \
                           wait for itself; hand it to another thread";
            return Err(BackendError::misuse(call, message));
        }
        Ok(())
    }

    /// A task holds up its own run, and with it whatever waits for that run or for a later one.
    fn refuse_in_task(&self) -> Result<(), BackendError> {
        let here = thread::current().id();
        let state = self.state.lock();
        let finisher = state.threads.finisher.as_ref().map(|thread| thread.thread().id());
        if state.threads.ids.contains(&here) && finisher != Some(here) {
            let message = "called by a task, on its thread; it would wait for the run of the task itself; hand it to \
                           another thread";
            return Err(BackendError::misuse(Call::Task, message));
        }
        Ok(())
    }

    pub(crate) fn refuse_in_build(&self, call: Call) -> Result<(), BackendError> {
        let here = thread::current().id();
        if self.state.lock().building.is_some_and(|building| building.thread == here) {
            let message = "called inside a graph build, on its thread; it would wait for the build itself";
            return Err(BackendError::misuse(call, message));
        }
        Ok(())
    }

    fn register(&self, spec: &CallableSpec) -> Result<Registered, BackendError> {
        let call = Call::Register;
        let misuse = |message: String| BackendError::misuse(call, message);
        let entry = match &spec.source {
            CallableSource::Named => {
                let key = (Arc::clone(&spec.name), spec.kind);
                self.options.library.get(&key).cloned().ok_or_else(|| {
                    misuse(format!("no {:?} callable is called {:?}; add it to the builder", spec.kind, spec.name))
                })?
            }
            CallableSource::Object(object) => {
                let object = object.downcast_ref::<KernelObject>().ok_or_else(|| {
                    misuse(format!("{:?}: the object is no KernelObject, which the emulator needs", spec.name))
                })?;
                LibraryEntry { code: object.code.clone(), signature: spec.signature.clone() }
            }
            other => {
                let message =
                    format!("{:?}: the emulator runs closures, not {other:?}; use Named or Object", spec.name);
                return Err(misuse(message));
            }
        };
        if entry.code.kind() != spec.kind {
            let message = format!(
                "{:?} is {:?} code registered as {:?}; agree on one",
                spec.name,
                entry.code.kind(),
                spec.kind
            );
            return Err(misuse(message));
        }
        if let (Some(known), Some(given)) = (&entry.signature, &spec.signature)
            && known != given
        {
            return Err(misuse(format!("{:?} takes {known:?}, registered with {given:?}", spec.name)));
        }
        if spec.kind != CallableKind::Entry && entry.signature.is_none() && spec.signature.is_none() {
            return Err(misuse(format!("{:?} has no signature; register it with one", spec.name)));
        }
        {
            let state = self.state.lock();
            if !matches!(state.phase, Phase::New | Phase::Ready) || state.abandoned {
                let message = format!("the worker is {:?}; callables are registered in New or Ready", state.phase);
                return Err(misuse(message));
            }
            let (count, limit) = (state.callables.len(), self.capabilities.limits.callables);
            if count >= limit as usize {
                return Err(misuse(format!("callable capacity exhausted: {count} of {limit} are registered")));
            }
        }
        self.faults.around(self.faults.whole(call), || {
            let takes_domains = matches!(entry.code, Code::Entry { takes_domains: true, .. });
            let signature = entry.signature.or_else(|| spec.signature.clone());
            let callable = Callable {
                name: Arc::clone(&spec.name),
                kind: spec.kind,
                signature: signature.clone(),
                code: entry.code,
            };
            let mut state = self.state.lock();
            let id = state.callables.insert(callable);
            let id = id.ok_or_else(|| BackendError::broken(call, "the table of callables is full"))?;
            self.journal.record(EventKind::Register { callable: id, name: Arc::clone(&spec.name) });
            Ok(Registered { id, signature, takes_domains })
        })
    }
}

/// What an emulator holds at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EmulatorStats {
    /// Domains with memory that is not freed, released ones included.
    pub domains: usize,
    /// Runs in flight, the one being built included.
    pub runs: usize,
    /// Host buffers.
    pub host_buffers: usize,
    /// Bytes of all host buffers.
    pub host_bytes: u64,
    /// The most bytes that all host buffers had at one time.
    pub host_peak_bytes: u64,
    /// Resident device allocations.
    pub resident_buffers: usize,
    /// Live pieces of run-scoped scratch.
    pub scratch: usize,
    /// Device memory committed on each chip, in bytes.
    pub committed_bytes: Vec<u64>,
    /// Shared-memory names that exist now: normally none, since names are unlinked at once.
    pub linked_names: Vec<String>,
    /// Threads that have not ended.
    pub threads: usize,
}

/// An in-process [`Backend`] that executes kernels (closures) on emulated chips.
///
/// See the [crate documentation](crate) for a tour. Dropping an emulator that is not closed abandons it.
pub struct Emulator {
    core: Arc<Core>,
}

impl fmt::Debug for Emulator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Emulator").field("capabilities", &self.core.capabilities).finish_non_exhaustive()
    }
}

impl Emulator {
    /// Options; start here.
    #[must_use]
    pub fn builder() -> EmulatorBuilder {
        EmulatorBuilder::new()
    }

    pub(crate) fn assemble(
        capabilities: Capabilities,
        options: Options,
        memory: Memory,
        faults: FaultSchedule,
        recording: bool,
        by_hand: bool,
    ) -> Arc<Self> {
        let journal = if recording { Journal::new() } else { Journal::muted() };
        let chips = capabilities.device_ids.len();
        let state = State::new(chips, capabilities.sub_workers as usize, by_hand);
        let core = Core {
            capabilities,
            options,
            segments: SegmentFactory::new(memory),
            faults: FaultControl::new(faults, Some(journal.clone())),
            journal,
            board: Arc::default(),
            contexts: Arc::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            finish: Condvar::new(),
            lane_wake: (0..chips).map(|_| Condvar::new()).collect(),
            sub_wake: Condvar::new(),
        };
        Arc::new(Self { core: Arc::new(core) })
    }

    /// The journal of everything the emulator did.
    #[must_use]
    pub fn journal(&self) -> Journal {
        self.core.journal.clone()
    }

    /// Blocks until the journal satisfies `holds`. See [`Journal::wait_until`].
    pub fn wait_until(&self, holds: impl Fn(&[Event]) -> bool) {
        self.core.journal.wait_until(holds);
    }

    /// Blocks until `run` is accepted; says whether it was (a build can fail, the emulator can be abandoned).
    pub fn wait_accepted(&self, run: RunId) -> bool {
        let mut state = self.core.state.lock();
        loop {
            if state.ended.contains(run.0) || state.run(run).is_some_and(|run| run.accepted) {
                return true;
            }
            if state.cancelled.contains(run.0) || state.phase == Phase::Closed {
                return false;
            }
            self.core.changed.wait(&mut state);
        }
    }

    /// Lets a run that is held ([`Completion::ByHand`]) pass its fence as soon as its tasks are done. Legal from the
    /// beginning of its build on.
    ///
    /// # Errors
    ///
    /// Misuse: the run is not in flight.
    pub fn complete(&self, run: RunId) -> Result<(), BackendError> {
        self.core.let_go(run, None)
    }

    /// As [`complete`](Self::complete), but the run fails with `failure`, and its waits are interrupted. Works for
    /// any run in flight.
    ///
    /// # Errors
    ///
    /// Misuse: the run is not in flight.
    pub fn fail(&self, run: RunId, failure: RuntimeFailure) -> Result<(), BackendError> {
        self.core.let_go(run, Some(failure))
    }

    /// Changes who lets runs pass their fence, for runs whose build begins from now on.
    pub fn set_completion(&self, completion: Completion) {
        self.core.state.lock().by_hand = completion == Completion::ByHand;
    }

    /// Arms one more fault; it counts from now on.
    pub fn arm(&self, fault: Fault) {
        self.core.faults.arm(fault);
    }

    /// The armed faults, and the calls that hang.
    #[must_use]
    pub fn faults(&self) -> FaultControl {
        self.core.faults.clone()
    }

    /// Lets every call that hangs now go on; says how many did.
    pub fn release_hangs(&self) -> usize {
        self.core.faults.release_all()
    }

    /// Lets the hanging `call` on `chip` (any, for `None`) go on; says how many did.
    pub fn release_hang(&self, call: Call, chip: Option<ChipId>) -> usize {
        let hung = self.core.faults.hung();
        let chosen = hung.iter().filter(|hung| hung.call == call && (chip.is_none() || hung.chip == chip));
        chosen.filter(|hung| self.core.faults.release(hung.id)).count()
    }

    /// Reads any mapped byte of a window, padding included. For tests; allowed at any time.
    ///
    /// # Errors
    ///
    /// Misuse: unknown or freed domain, no member, outside the mapping.
    pub fn peek(&self, domain: DomainId, chip: ChipId, offset: u64, out: &mut [u8]) -> Result<(), BackendError> {
        let segment = self.mapped(domain, chip)?;
        segment.load(offset, out).map_err(|e| BackendError::misuse(Call::CopyFrom, e.to_string()))
    }

    /// Writes any mapped byte of a window, padding included. For tests; allowed at any time.
    ///
    /// # Errors
    ///
    /// As [`peek`](Self::peek).
    pub fn poke(&self, domain: DomainId, chip: ChipId, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        let segment = self.mapped(domain, chip)?;
        segment.store(offset, bytes).map_err(|e| BackendError::misuse(Call::CopyTo, e.to_string()))?;
        self.core.board.changed();
        Ok(())
    }

    fn mapped(&self, id: DomainId, chip: ChipId) -> Result<Arc<crate::memory::Segment>, BackendError> {
        let state = self.core.state.lock();
        let window = state.domains.get(id).and_then(|domain| {
            let rank = domain.members.iter().position(|member| member.chip == chip && member.mapped)?;
            domain.windows.members.get(rank)
        });
        window
            .map(|window| Arc::clone(&window.segment))
            .ok_or_else(|| BackendError::misuse(Call::CopyFrom, format!("{id} has no mapped window on {chip}")))
    }

    /// What the emulator holds now.
    #[must_use]
    pub fn stats(&self) -> EmulatorStats {
        let state = self.core.state.lock();
        let threads = state.lanes.iter().filter(|lane| !lane.gone).count()
            + state.subs.iter().filter(|sub| !sub.gone).count()
            + usize::from(!state.finisher_gone);
        EmulatorStats {
            domains: state.domains.len(),
            runs: state.runs.len(),
            host_buffers: state.hosts.len(),
            host_bytes: state.host_bytes,
            host_peak_bytes: state.host_peak_bytes,
            resident_buffers: state.residents.len(),
            scratch: state.scratch.len(),
            committed_bytes: state.lanes.iter().map(|lane| lane.committed_bytes).collect(),
            linked_names: self.core.segments.linked(),
            threads,
        }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        // Reports what it could not clean up to nobody: whoever wants to know calls `close` or `abandon`.
        let _report = self.core.abandon();
    }
}

#[deny(clippy::missing_trait_methods)]
impl Backend for Emulator {
    fn capabilities(&self) -> &Capabilities {
        &self.core.capabilities
    }

    fn phase(&self) -> BackendPhase {
        self.core.state.lock().phase
    }

    fn check_blocking(&self) -> Result<(), BackendError> {
        self.core.refuse_in_task()
    }

    fn register(&self, callable: &CallableSpec) -> Result<Registered, BackendError> {
        self.core.register(callable)
    }

    fn start(&self, events: Arc<dyn RunEvents>) -> Result<Negotiated, BackendError> {
        self.core.start(events)
    }

    fn submit(&self, run: RunId, config: &CallConfig, graph: &mut dyn GraphBuilder) -> Result<(), SubmitError> {
        self.core.submit(run, config, graph)
    }

    fn run_state(&self, run: RunId) -> RunState {
        self.core.run_state(run)
    }

    fn create_buffer(&self, nbytes: u64) -> Result<HostBufferId, BackendError> {
        self.core.create_buffer(nbytes, false)
    }

    fn create_zeros(&self, nbytes: u64) -> Result<HostBufferId, BackendError> {
        self.core.create_buffer(nbytes, true)
    }

    fn write_buffer(&self, buffer: HostBufferId, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        self.core.write_buffer(buffer, offset, bytes)
    }

    fn read_buffer(&self, buffer: HostBufferId, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.core.read_buffer(buffer, offset, bytes)
    }

    fn fill_buffer(&self, buffer: HostBufferId, byte: u8) -> Result<(), BackendError> {
        self.core.fill_buffer(buffer, byte)
    }

    fn release_buffer(&self, buffer: HostBufferId) -> Result<(), BackendError> {
        self.core.release_buffer(buffer)
    }

    fn alloc(&self, chip: ChipId, nbytes: u64) -> Result<DeviceBufferId, BackendError> {
        self.core.alloc(chip, nbytes)
    }

    fn free(&self, buffer: DeviceBufferId) -> Result<(), BackendError> {
        self.core.free(buffer)
    }

    fn copy_to(&self, copy: &CopyTo) -> Result<(), BackendError> {
        let access = self.core.access(Call::CopyTo)?;
        self.core.copy_to(access.run, copy)
    }

    fn copy_from(&self, dst: HostBufferId, src: DevicePlace, nbytes: u64) -> Result<(), BackendError> {
        let access = self.core.access(Call::CopyFrom)?;
        self.core.copy_from(access.run, dst, src, nbytes)
    }

    fn release_domain(&self, domain: DomainId) -> Result<(), BackendError> {
        self.core.release_domain(domain)
    }

    fn domain_state(&self, domain: DomainId) -> Result<DomainState, BackendError> {
        let state = self.core.domain_state(domain)?;
        self.core.faults.around(self.core.faults.whole(Call::DomainState), || Ok(state))
    }

    fn committed_device_memory(&self, chip: ChipId) -> Result<u64, BackendError> {
        self.core.committed_device_memory(chip)
    }

    fn close(&self) -> Result<(), BackendError> {
        self.core.close()
    }

    fn abandon(&self) -> AbandonReport {
        self.core.abandon()
    }
}
