//! The journal: one totally ordered list of what a backend did.
//!
//! Events are numbered from 0 in the order in which they were recorded. The emulator records an event while it holds
//! the lock that makes the event true, so the order of the list is the order in which things happened.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pto_simpler_sys::{Call, CallableId, ChipId, DeviceBufferId, DevicePlace, DomainId, HostBufferId, RunId};

/// What a submission was waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WaitFor {
    /// Another thread's graph build.
    Build,
    /// A run in flight to end, because there are as many as the depth allows.
    Depth,
    /// The ordered cleanup of a run that allocated.
    Cleanup,
    /// The run to head the device queue (a control call inside the build).
    Head,
}

/// Who had a domain freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FreeCause {
    /// `release_domain`.
    Release,
    /// The cleanup of this run, or of its failed build.
    Cleanup(RunId),
    /// `close` or `abandon`.
    Sweep,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// A callable was registered.
    Register {
        /// Its id.
        callable: CallableId,
        /// Its name.
        name: Arc<str>,
    },
    /// The worker started, or failed to.
    Start {
        /// Whether it did.
        ok: bool,
    },
    /// A submission begins to wait. Recorded only where it really has to.
    Wait {
        /// The run.
        run: RunId,
        /// For what.
        on: WaitFor,
    },
    /// The graph build of a run begins.
    Admit(RunId),
    /// The build is over and the run is accepted: its end will be reported.
    Accept(RunId),
    /// The graph build failed, and the run's cleanup is over. Nothing more comes of this run.
    BuildFailed(RunId),
    /// A domain was allocated.
    Alloc {
        /// The run that asked.
        run: RunId,
        /// The name asked for.
        name: Arc<str>,
        /// The new domain.
        domain: DomainId,
        /// Requested bytes of each window.
        window_bytes: u64,
        /// Members in rank order.
        chips: Vec<ChipId>,
    },
    /// An allocation reported a failure after it had made windows.
    AllocFailed {
        /// The run that asked.
        run: RunId,
        /// The name asked for.
        name: Arc<str>,
        /// The domain that holds the windows until the run's cleanup.
        domain: DomainId,
        /// The members whose windows were made.
        chips: Vec<ChipId>,
    },
    /// A retained domain was found again and registered with this run.
    Reuse {
        /// The run.
        run: RunId,
        /// The name.
        name: Arc<str>,
        /// The domain.
        domain: DomainId,
    },
    /// Bytes were copied into device memory.
    Copy {
        /// The run whose graph asked, `None` outside runs.
        run: Option<RunId>,
        /// The chip.
        chip: ChipId,
        /// The place.
        dst: DevicePlace,
        /// How many bytes.
        nbytes: u64,
        /// Whether every byte was zero.
        zero: bool,
    },
    /// Bytes were copied out of device memory.
    CopyFrom {
        /// The run whose graph asked, `None` outside runs.
        run: Option<RunId>,
        /// The chip.
        chip: ChipId,
        /// The place.
        src: DevicePlace,
        /// How many bytes.
        nbytes: u64,
    },
    /// A task was submitted. A group is one event per chip.
    TaskSubmit {
        /// The run.
        run: RunId,
        /// The chip, `None` for a sub-worker task.
        chip: Option<ChipId>,
        /// What it runs.
        callable: CallableId,
    },
    /// A task starts.
    TaskStart {
        /// The run.
        run: RunId,
        /// The chip, `None` for a sub-worker task.
        chip: Option<ChipId>,
        /// What it runs.
        callable: CallableId,
    },
    /// A task ended.
    TaskEnd {
        /// The run.
        run: RunId,
        /// The chip, `None` for a sub-worker task.
        chip: Option<ChipId>,
        /// What it ran.
        callable: CallableId,
        /// Whether it succeeded.
        ok: bool,
    },
    /// A task that had not started never will.
    TaskCancel {
        /// The run.
        run: RunId,
        /// The chip, `None` for a sub-worker task.
        chip: Option<ChipId>,
        /// What it would have run.
        callable: CallableId,
    },
    /// All tasks of the run are done.
    Fence(RunId),
    /// The backend's own cleanup after the fence is over.
    Cleanup(RunId),
    /// The end of the run is being reported; the flag says whether the run succeeded, cleanup included.
    Ended(RunId, bool),
    /// A domain was released: its name is free.
    Release(DomainId),
    /// Memory of a domain was freed; all that there was, unless a fault kept some.
    Free {
        /// The domain.
        domain: DomainId,
        /// The members whose windows were freed.
        chips: Vec<ChipId>,
        /// Who asked.
        cause: FreeCause,
    },
    /// A host buffer was created.
    BufferCreate {
        /// The buffer.
        buffer: HostBufferId,
        /// Its size.
        nbytes: u64,
        /// Whether it is a read-only buffer of zeros.
        zeros: bool,
    },
    /// Every byte of a host buffer was set.
    BufferFill {
        /// The buffer.
        buffer: HostBufferId,
        /// To what.
        byte: u8,
    },
    /// A host buffer was released.
    BufferRelease {
        /// The buffer.
        buffer: HostBufferId,
        /// Its size.
        nbytes: u64,
    },
    /// Resident device memory was allocated.
    DeviceAlloc {
        /// The buffer.
        buffer: DeviceBufferId,
        /// The chip.
        chip: ChipId,
        /// Its size.
        nbytes: u64,
    },
    /// Resident device memory was freed.
    DeviceFree(DeviceBufferId),
    /// A hang fault has stopped a call; it goes on when released.
    Hung {
        /// The call.
        call: Call,
        /// The chip, where the call concerns one.
        chip: Option<ChipId>,
    },
    /// `close` begins: admission is off.
    CloseBegin,
    /// `close` is over.
    Close {
        /// Whether it succeeded.
        ok: bool,
    },
    /// `abandon` begins.
    Abandon,
}

impl EventKind {
    /// The run that the event belongs to, if any.
    #[must_use]
    pub fn run(&self) -> Option<RunId> {
        match self {
            Self::Wait { run, .. }
            | Self::Admit(run)
            | Self::Accept(run)
            | Self::BuildFailed(run)
            | Self::Alloc { run, .. }
            | Self::AllocFailed { run, .. }
            | Self::Reuse { run, .. }
            | Self::TaskSubmit { run, .. }
            | Self::TaskStart { run, .. }
            | Self::TaskEnd { run, .. }
            | Self::TaskCancel { run, .. }
            | Self::Fence(run)
            | Self::Cleanup(run)
            | Self::Ended(run, _) => Some(*run),
            Self::Copy { run, .. } | Self::CopyFrom { run, .. } => *run,
            Self::Free { cause: FreeCause::Cleanup(run), .. } => Some(*run),
            _ => None,
        }
    }
}

/// One entry of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its number: 0 for the first event after construction.
    pub seq: u64,
    /// What happened.
    pub kind: EventKind,
}

/// A chip, or the sub-workers.
struct Where(Option<ChipId>);

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(chip) => write!(f, "{chip}"),
            None => f.write_str("sub"),
        }
    }
}

/// A run, or "no run".
struct Owner(Option<RunId>);

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(run) => write!(f, "{run}"),
            None => f.write_str("outside"),
        }
    }
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Register { callable, name } => write!(f, "register {callable} {name:?}"),
            Self::Start { ok } => write!(f, "start ok={ok}"),
            Self::Wait { run, on } => write!(f, "wait {run} for {on:?}"),
            Self::Admit(run) => write!(f, "admit {run}"),
            Self::Accept(run) => write!(f, "accept {run}"),
            Self::BuildFailed(run) => write!(f, "build-failed {run}"),
            Self::Alloc { run, name, domain, window_bytes, chips } => {
                write!(f, "alloc {run} {name:?} {domain} {window_bytes}B {chips:?}")
            }
            Self::AllocFailed { run, name, domain, chips } => {
                write!(f, "alloc-failed {run} {name:?} {domain} left {chips:?}")
            }
            Self::Reuse { run, name, domain } => write!(f, "reuse {run} {name:?} {domain}"),
            Self::Copy { run, chip, dst, nbytes, zero } => {
                write!(f, "copy {} {chip} {dst:?} {nbytes}B zero={zero}", Owner(*run))
            }
            Self::CopyFrom { run, chip, src, nbytes } => {
                write!(f, "copy-from {} {chip} {src:?} {nbytes}B", Owner(*run))
            }
            Self::TaskSubmit { run, chip, callable } => {
                write!(f, "task-submit {run} {} {callable}", Where(*chip))
            }
            Self::TaskStart { run, chip, callable } => write!(f, "task-start {run} {} {callable}", Where(*chip)),
            Self::TaskEnd { run, chip, callable, ok } => {
                write!(f, "task-end {run} {} {callable} ok={ok}", Where(*chip))
            }
            Self::TaskCancel { run, chip, callable } => {
                write!(f, "task-cancel {run} {} {callable}", Where(*chip))
            }
            Self::Fence(run) => write!(f, "fence {run}"),
            Self::Cleanup(run) => write!(f, "cleanup {run}"),
            Self::Ended(run, ok) => write!(f, "ended {run} ok={ok}"),
            Self::Release(domain) => write!(f, "release {domain}"),
            Self::Free { domain, chips, cause } => write!(f, "free {domain} {chips:?} by {cause:?}"),
            Self::BufferCreate { buffer, nbytes, zeros } => {
                write!(f, "buffer-create {buffer} {nbytes}B zeros={zeros}")
            }
            Self::BufferFill { buffer, byte } => write!(f, "buffer-fill {buffer} 0x{byte:02X}"),
            Self::BufferRelease { buffer, nbytes } => write!(f, "buffer-release {buffer} {nbytes}B"),
            Self::DeviceAlloc { buffer, chip, nbytes } => write!(f, "device-alloc {buffer} {chip} {nbytes}B"),
            Self::DeviceFree(buffer) => write!(f, "device-free {buffer}"),
            Self::Hung { call, chip } => match chip {
                Some(chip) => write!(f, "hung {call} {chip}"),
                None => write!(f, "hung {call}"),
            },
            Self::CloseBegin => f.write_str("close-begin"),
            Self::Close { ok } => write!(f, "close ok={ok}"),
            Self::Abandon => f.write_str("abandon"),
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>5} {}", self.seq, self.kind)
    }
}

#[derive(Debug, Default)]
struct Log {
    events: Vec<Event>,
    next: u64,
}

#[derive(Debug, Default)]
struct Inner {
    log: Mutex<Log>,
    grown: Condvar,
    muted: bool,
}

/// A shared handle to an event list. Clones see the same list.
///
/// ```
/// use pto_mock::{EventKind, Journal};
/// use pto_simpler_sys::RunId;
///
/// let journal = Journal::new();
/// journal.record(EventKind::Admit(RunId(1)));
/// journal.record(EventKind::Fence(RunId(1)));
/// assert!(journal.before(|e| *e == EventKind::Admit(RunId(1)), |e| *e == EventKind::Fence(RunId(1))));
/// assert_eq!(journal.events()[1].to_string(), "    1 fence run1");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Journal {
    inner: Arc<Inner>,
}

impl Journal {
    /// An empty journal.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A journal that keeps nothing, for long measurements.
    #[must_use]
    pub fn muted() -> Self {
        Self { inner: Arc::new(Inner { muted: true, ..Inner::default() }) }
    }

    /// Appends an event and wakes whoever waits for one.
    pub fn record(&self, kind: EventKind) {
        if self.inner.muted {
            return;
        }
        let mut log = self.inner.log.lock();
        let seq = log.next;
        log.next += 1;
        log.events.push(Event { seq, kind });
        self.inner.grown.notify_all();
    }

    /// Whether events are kept.
    #[must_use]
    pub fn is_recording(&self) -> bool {
        !self.inner.muted
    }

    /// All events so far.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        self.inner.log.lock().events.clone()
    }

    /// Number of events that are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.log.lock().events.len()
    }

    /// Whether no event is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets the events so far; later ones keep counting from where the numbers were.
    pub fn clear(&self) {
        self.inner.log.lock().events.clear();
    }

    /// The number of the first event that matches.
    #[must_use]
    pub fn position(&self, matches: impl Fn(&EventKind) -> bool) -> Option<u64> {
        self.inner.log.lock().events.iter().find(|e| matches(&e.kind)).map(|e| e.seq)
    }

    /// The number of the last event that matches.
    #[must_use]
    pub fn last_position(&self, matches: impl Fn(&EventKind) -> bool) -> Option<u64> {
        self.inner.log.lock().events.iter().rev().find(|e| matches(&e.kind)).map(|e| e.seq)
    }

    /// How many events match.
    #[must_use]
    pub fn count(&self, matches: impl Fn(&EventKind) -> bool) -> usize {
        self.inner.log.lock().events.iter().filter(|e| matches(&e.kind)).count()
    }

    /// Whether an event matches.
    #[must_use]
    pub fn contains(&self, matches: impl Fn(&EventKind) -> bool) -> bool {
        self.position(matches).is_some()
    }

    /// Whether both kinds of event happened, and the first `earlier` came before the first `later`.
    #[must_use]
    pub fn before(&self, earlier: impl Fn(&EventKind) -> bool, later: impl Fn(&EventKind) -> bool) -> bool {
        matches!((self.position(earlier), self.position(later)), (Some(a), Some(b)) if a < b)
    }

    /// The events that match, in order.
    #[must_use]
    pub fn select(&self, matches: impl Fn(&EventKind) -> bool) -> Vec<EventKind> {
        self.inner.log.lock().events.iter().filter(|e| matches(&e.kind)).map(|e| e.kind.clone()).collect()
    }

    /// The events of one run, in order.
    #[must_use]
    pub fn of_run(&self, run: RunId) -> Vec<EventKind> {
        self.select(|e| e.run() == Some(run))
    }

    /// Every copy into device memory.
    #[must_use]
    pub fn copies(&self) -> Vec<EventKind> {
        self.select(|e| matches!(e, EventKind::Copy { .. }))
    }

    /// Every copy that a run's graph made.
    #[must_use]
    pub fn copies_of(&self, run: RunId) -> Vec<EventKind> {
        self.select(|e| matches!(e, EventKind::Copy { run: Some(r), .. } if *r == run))
    }

    /// Number of domains allocated.
    #[must_use]
    pub fn allocs(&self) -> usize {
        self.count(|e| matches!(e, EventKind::Alloc { .. }))
    }

    /// Number of domains released by `release_domain`.
    #[must_use]
    pub fn releases(&self) -> usize {
        self.count(|e| matches!(e, EventKind::Release(_)))
    }

    /// Number of frees of domain memory.
    #[must_use]
    pub fn frees(&self) -> usize {
        self.count(|e| matches!(e, EventKind::Free { .. }))
    }

    /// Blocks until the list satisfies `holds`, which is asked once now and after each event. There is no deadline:
    /// for tests, under a hang guard of their own.
    pub fn wait_until(&self, holds: impl Fn(&[Event]) -> bool) {
        let mut log = self.inner.log.lock();
        while !holds(&log.events) {
            self.inner.grown.wait(&mut log);
        }
    }

    /// As [`wait_until`](Self::wait_until), but gives up after `limit`; says whether the list satisfied `holds`.
    #[must_use]
    pub fn wait_until_for(&self, limit: Duration, holds: impl Fn(&[Event]) -> bool) -> bool {
        let deadline = Instant::now() + limit;
        let mut log = self.inner.log.lock();
        while !holds(&log.events) {
            if self.inner.grown.wait_until(&mut log, deadline).timed_out() {
                return holds(&log.events);
            }
        }
        true
    }
}

impl fmt::Display for Journal {
    /// One event a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.log.lock().events.iter().try_for_each(|event| writeln!(f, "{event}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_numbered_in_order_and_clearing_keeps_counting() {
        let journal = Journal::new();
        journal.record(EventKind::Start { ok: true });
        journal.clear();
        journal.record(EventKind::Fence(RunId(3)));
        assert_eq!(journal.events(), [Event { seq: 1, kind: EventKind::Fence(RunId(3)) }]);
        assert_eq!(journal.of_run(RunId(3)).len(), 1);
        assert_eq!(journal.of_run(RunId(4)).len(), 0);
    }

    #[test]
    fn a_waiter_wakes_when_the_list_satisfies_it() {
        let journal = Journal::new();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| journal.wait_until(|events| events.len() == 2));
            journal.record(EventKind::Abandon);
            journal.record(EventKind::CloseBegin);
            waiter.join().unwrap();
        });
        assert!(!journal.wait_until_for(Duration::ZERO, |events| events.len() == 3));
    }

    #[test]
    fn a_muted_journal_keeps_nothing() {
        let journal = Journal::muted();
        journal.record(EventKind::Abandon);
        assert!(journal.is_empty() && !journal.is_recording());
    }
}
