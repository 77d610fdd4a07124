//! The state of an emulator, all of it behind one lock.
//!
//! # Locks
//!
//! `Core::state` is taken first; under it only leaf locks are taken (journal, device contexts, the board of cell
//! waiters). Faults are consulted, memory is made and unmapped, and every closure of a user runs with no lock held.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::thread::{JoinHandle, ThreadId};

use pto_simpler_sys::{
    BackendError, CallableId, CallableKind, ChipId, DeviceBufferId, DomainId, DomainRequest, HostBufferId,
    RunEvents, RunId, ScratchId, Signature,
};

pub(crate) use pto_simpler_sys::BackendPhase as Phase;

use super::chip::{Job, Task};
use super::table::{NumberSet, Table};
use super::window::{DomainWindows, Region};
use crate::board::InterruptFlag;
use crate::kernel::Code;

/// One domain of a run, and whether the run asked to keep it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunDomain {
    pub(crate) id: DomainId,
    pub(crate) retain: bool,
}

/// A run from the start of its build until its end is reported.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) id: RunId,
    pub(crate) interrupt: Arc<InterruptFlag>,
    /// The build is over and succeeded.
    pub(crate) accepted: bool,
    /// The completion fence has passed.
    pub(crate) fenced: bool,
    /// The fence waits for a test to release it.
    pub(crate) held: bool,
    /// The next submission waits for this run's cleanup.
    pub(crate) ordered: bool,
    /// A task was submitted: control is over.
    pub(crate) tasks_seen: bool,
    /// Tasks that have not started.
    pub(crate) pending: usize,
    /// Tasks that run now.
    pub(crate) running: usize,
    /// The first failure.
    pub(crate) failure: Option<BackendError>,
    pub(crate) domains: Vec<RunDomain>,
    pub(crate) scratch: Vec<ScratchId>,
    /// Host buffers that tasks name, once per use.
    pub(crate) hosts: Vec<HostBufferId>,
}

impl Run {
    pub(crate) fn new(id: RunId, held: bool) -> Self {
        Self {
            id,
            interrupt: Arc::default(),
            accepted: false,
            fenced: false,
            held,
            ordered: false,
            tasks_seen: false,
            pending: 0,
            running: 0,
            failure: None,
            domains: Vec::new(),
            scratch: Vec::new(),
            hosts: Vec::new(),
        }
    }

    /// Ties a domain to the run; asking twice keeps it if either call asked to.
    pub(crate) fn register(&mut self, id: DomainId, retain: bool) {
        match self.domains.iter_mut().find(|d| d.id == id) {
            Some(domain) => domain.retain |= retain,
            None => self.domains.push(RunDomain { id, retain }),
        }
    }
}

/// One member of a domain, on the backend's side.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) chip: ChipId,
    pub(crate) context: u64,
    pub(crate) base: u64,
    pub(crate) mapped_bytes: u64,
    /// Whether the window still counts as device memory.
    pub(crate) mapped: bool,
}

/// A physical domain until all its windows are freed.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) name: Arc<str>,
    pub(crate) request: DomainRequest,
    pub(crate) windows: Arc<DomainWindows>,
    pub(crate) members: Vec<Member>,
    /// Position in the order of allocation; a sweep goes backwards.
    pub(crate) order: u64,
    /// All windows were made, and the caller was told so.
    pub(crate) complete: bool,
    /// Made by `get_or_allocate_domain`: can be found again by its name.
    pub(crate) retainable: bool,
    /// A run that was registered with it failed: never found again, freed when nobody is registered any more.
    pub(crate) doomed: bool,
    /// Somebody asked for its release: the name is free.
    pub(crate) released: bool,
    /// A `release_domain` is under way.
    pub(crate) releasing: bool,
    /// Its windows are being freed.
    pub(crate) freeing: bool,
    /// What `release_domain` answered, for everybody who asks again.
    pub(crate) release_result: Option<Result<(), BackendError>>,
    /// Runs in flight that are registered with it.
    pub(crate) runs: Vec<RunId>,
}

/// A host buffer, or run-scoped scratch.
#[derive(Debug)]
pub(crate) struct HostMemory {
    pub(crate) region: Region,
    /// Uses by tasks of runs in flight.
    pub(crate) users: usize,
}

/// Device memory that outlives runs.
#[derive(Debug)]
pub(crate) struct Resident {
    pub(crate) chip: ChipId,
    pub(crate) region: Region,
    pub(crate) mapped_bytes: u64,
}

/// A registered callable.
#[derive(Clone, Debug)]
pub(crate) struct Callable {
    pub(crate) name: Arc<str>,
    pub(crate) kind: CallableKind,
    pub(crate) signature: Option<Signature>,
    pub(crate) code: Code,
}

/// One chip worker.
#[derive(Default)]
pub(crate) struct Lane {
    /// Tasks in submit order.
    pub(crate) queue: VecDeque<Task>,
    /// Copies of a batch.
    pub(crate) jobs: VecDeque<Job>,
    /// What runs now, for messages.
    pub(crate) busy: Option<(RunId, Arc<str>)>,
    /// Set once a failure has made the lane useless: every later task fails with it.
    pub(crate) poison: Option<BackendError>,
    /// Set once the chip process counts as dead: control fails with it too.
    pub(crate) dead: Option<BackendError>,
    /// The thread ends when it finds nothing to do.
    pub(crate) end: bool,
    /// The thread has ended, or never started.
    pub(crate) gone: bool,
    pub(crate) committed_bytes: u64,
    /// Next device address to hand out.
    pub(crate) next_address: u64,
}

/// A host-side sub-worker.
#[derive(Debug, Default)]
pub(crate) struct SubLane {
    pub(crate) busy: Option<(RunId, Arc<str>)>,
    pub(crate) gone: bool,
}

/// Who builds a graph now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Building {
    pub(crate) run: RunId,
    pub(crate) thread: ThreadId,
}

/// Threads of the emulator.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    pub(crate) chips: Vec<Option<JoinHandle<()>>>,
    pub(crate) subs: Vec<Option<JoinHandle<()>>>,
    pub(crate) finisher: Option<JoinHandle<()>>,
    /// Threads of the emulator itself: they may not wait for the emulator.
    pub(crate) ids: Vec<ThreadId>,
}

/// Everything that changes.
pub(crate) struct State {
    pub(crate) phase: Phase,
    pub(crate) abandoned: bool,
    /// After an abandon gave up waiting: running tasks no longer hold up fences.
    pub(crate) lost: bool,
    pub(crate) events: Option<Arc<dyn RunEvents>>,
    /// Tickets of submissions in order of arrival; the front one builds.
    pub(crate) tickets: VecDeque<u64>,
    pub(crate) next_ticket: u64,
    pub(crate) building: Option<Building>,
    /// Runs in order of admission: accepted ones, and at the back the one being built.
    pub(crate) runs: VecDeque<Run>,
    pub(crate) ended: NumberSet,
    pub(crate) cancelled: NumberSet,
    /// Ends are held until released by hand.
    pub(crate) by_hand: bool,
    /// A cleanup failed: no more submissions.
    pub(crate) cleanup_failure: Option<BackendError>,
    /// Direct device calls outside runs under way; no task starts meanwhile.
    pub(crate) direct: usize,
    pub(crate) domains: Table<DomainId, Domain>,
    pub(crate) names: HashMap<Arc<str>, DomainId>,
    pub(crate) next_order: u64,
    pub(crate) next_context: u64,
    /// Failed releases of domains that are gone.
    pub(crate) release_failures: HashMap<DomainId, BackendError>,
    pub(crate) hosts: Table<HostBufferId, HostMemory>,
    pub(crate) host_bytes: u64,
    pub(crate) host_peak_bytes: u64,
    pub(crate) scratch: Table<ScratchId, HostMemory>,
    pub(crate) residents: Table<DeviceBufferId, Resident>,
    pub(crate) callables: Table<CallableId, Callable>,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) sub_queue: VecDeque<Task>,
    pub(crate) subs: Vec<SubLane>,
    pub(crate) subs_end: bool,
    pub(crate) finisher_end: bool,
    pub(crate) finisher_gone: bool,
    /// The finisher is inside the receiver's `ended`.
    pub(crate) reporting: bool,
    pub(crate) threads: Threads,
    /// A close is under way.
    pub(crate) closing_now: bool,
    /// Counts finished attempts to close.
    pub(crate) close_attempts: u64,
    pub(crate) close_result: Result<(), BackendError>,
}

/// First device context: an arbitrary number that no address or small integer equals.
const FIRST_CONTEXT: u64 = 0xC0DE_0000_0000_0001;

/// First device address of every chip. Addresses are per chip, so all chips start from the same one.
const FIRST_ADDRESS: u64 = 0x1000_0000_0000;

impl State {
    pub(crate) fn new(chips: usize, subs: usize, by_hand: bool) -> Self {
        let lane = || Lane { gone: true, next_address: FIRST_ADDRESS, ..Lane::default() };
        Self {
            phase: Phase::New,
            abandoned: false,
            lost: false,
            events: None,
            tickets: VecDeque::new(),
            next_ticket: 0,
            building: None,
            runs: VecDeque::new(),
            ended: NumberSet::default(),
            cancelled: NumberSet::default(),
            by_hand,
            cleanup_failure: None,
            direct: 0,
            domains: Table::default(),
            names: HashMap::new(),
            next_order: 0,
            next_context: FIRST_CONTEXT,
            release_failures: HashMap::new(),
            hosts: Table::default(),
            host_bytes: 0,
            host_peak_bytes: 0,
            scratch: Table::default(),
            residents: Table::default(),
            callables: Table::default(),
            lanes: (0..chips).map(|_| lane()).collect(),
            sub_queue: VecDeque::new(),
            subs: (0..subs).map(|_| SubLane { gone: true, ..SubLane::default() }).collect(),
            subs_end: false,
            finisher_end: false,
            finisher_gone: true,
            reporting: false,
            threads: Threads::default(),
            closing_now: false,
            close_attempts: 0,
            close_result: Ok(()),
        }
    }

    pub(crate) fn run(&self, id: RunId) -> Option<&Run> {
        self.runs.iter().find(|run| run.id == id)
    }

    pub(crate) fn run_mut(&mut self, id: RunId) -> Option<&mut Run> {
        self.runs.iter_mut().find(|run| run.id == id)
    }

    /// The run whose tasks may execute: the first whose fence has not passed.
    pub(crate) fn device_head(&self) -> Option<RunId> {
        self.runs.iter().find(|run| !run.fenced).map(|run| run.id)
    }

    /// Whether every run before `id` has passed its fence, and its cleanup where that is ordered.
    pub(crate) fn heads(&self, id: RunId) -> bool {
        self.runs.iter().take_while(|run| run.id != id).all(|run| run.fenced && !run.ordered)
    }

    /// Whether this run number was ever admitted.
    pub(crate) fn used(&self, id: RunId) -> bool {
        self.run(id).is_some() || self.ended.contains(id.0) || self.cancelled.contains(id.0)
    }

    pub(crate) fn lane(&self, chip: ChipId) -> Option<&Lane> {
        self.lanes.get(usize::try_from(chip.0).ok()?)
    }

    pub(crate) fn lane_mut(&mut self, chip: ChipId) -> Option<&mut Lane> {
        self.lanes.get_mut(usize::try_from(chip.0).ok()?)
    }

    pub(crate) fn add_host_bytes(&mut self, nbytes: u64) {
        self.host_bytes = self.host_bytes.saturating_add(nbytes);
        self.host_peak_bytes = self.host_peak_bytes.max(self.host_bytes);
    }
}
