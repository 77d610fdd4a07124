//! Faults as a schedule: "the 3rd allocation on chip 1 fails after taking effect".
//!
//! A [`Fault`] names a call, optionally a chip, the how-manieth matching call it hits, and what then happens. A
//! [`FaultSchedule`] is a list of them. Both are plain ordered values with a text form, so a failing schedule can be
//! printed, replayed and shrunk:
//!
//! ```
//! use pto_mock::FaultSchedule;
//!
//! let schedule: FaultSchedule = "allocate_domain@chip1#3:after; task#1:before=chip-died(signal=9)!".parse().unwrap();
//! assert_eq!(schedule.faults.len(), 2);
//! assert_eq!(schedule.to_string(), "allocate_domain@chip1#3:after; task#1:before=chip-died(signal=9)!");
//! ```
//!
//! # Text form
//!
//! `call[@chipN]#k:effect[=kind][!]`, faults separated by `;`. Calls by the names of
//! [`Call::name`] (run-scoped scratch is `alloc_scratch`), effects `before`, `after`, `no-reply`, `hang`, `unwind`;
//! kinds `plain` (the default), `chip-died(exit=CODE)`, `chip-died(signal=NUMBER)`, `device-timeout`,
//! `out-of-shared-memory(BYTES)`, `out-of-device-memory(BYTES)`, `deferred`; `!` makes the failure final for the worker.
//!
//! # What is counted
//!
//! A fault without a chip counts whole calls. A fault with a chip counts what the call does on that chip: a copy, a
//! task, the making of one window of an allocation, the freeing of one window. Each fault fires once, at its
//! occurrence; every matching call is counted from when the fault was armed. Where several faults hit one call, the
//! first of the schedule wins; the others are counted, and spent if it was their turn.
//!
//! Domains are allocated by `get_or_allocate_domain` on a persistent worker and by `allocate_domain` on an ordinary one,
//! and a fault on a call that is never made does nothing. It stays pending: assert at the end of a test that none is.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use pto_simpler_sys::{BackendError, Call, ChipId, Effect, FailureKind, RuntimeFailure};

use crate::journal::{EventKind, Journal};

/// Every call that a fault can hit, with its text form.
pub const CALLS: [(Call, &str); 27] = [
    (Call::Register, "register"),
    (Call::Start, "start"),
    (Call::Submit, "submit"),
    (Call::AllocateDomain, "allocate_domain"),
    (Call::GetOrAllocateDomain, "get_or_allocate_domain"),
    (Call::CopyTo, "copy_to"),
    (Call::CopyFrom, "copy_from"),
    (Call::SubmitNextLevel, "submit_next_level"),
    (Call::SubmitNextLevelGroup, "submit_next_level_group"),
    (Call::SubmitSub, "submit_sub"),
    (Call::Scope, "scope"),
    (Call::AllocScratch, "alloc_scratch"),
    (Call::RunEntry, "run_entry"),
    (Call::Task, "task"),
    (Call::Run, "run"),
    (Call::CreateBuffer, "create_buffer"),
    (Call::WriteBuffer, "write_buffer"),
    (Call::ReadBuffer, "read_buffer"),
    (Call::FillBuffer, "fill_buffer"),
    (Call::ReleaseBuffer, "release_buffer"),
    (Call::Alloc, "alloc"),
    (Call::Free, "free"),
    (Call::ReleaseDomain, "release_domain"),
    (Call::DomainState, "domain_state"),
    (Call::CommittedDeviceMemory, "committed_device_memory"),
    (Call::Close, "close"),
    (Call::Abandon, "abandon"),
];

/// When, relative to what the call does, it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultEffect {
    /// It fails without having done anything ([`Effect::None`]).
    Before,
    /// It does its work and then reports a failure ([`Effect::Done`]).
    After,
    /// It does its work and the reply is lost ([`Effect::Unknown`]).
    NoReply,
    /// It stops until released (or until the backend is abandoned), and then goes on as if nothing had been.
    Hang,
    /// It does its work and then unwinds, as a broken binding might.
    Unwind,
}

impl FaultEffect {
    /// The effects that report (or delay) without unwinding; a fault matrix adds [`Unwind`](Self::Unwind).
    pub const ALL: [Self; 4] = [Self::Before, Self::After, Self::NoReply, Self::Hang];

    const fn text(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::After => "after",
            Self::NoReply => "no-reply",
            Self::Hang => "hang",
            Self::Unwind => "unwind",
        }
    }
}

/// What kind of failure is reported; an orderable twin of [`FailureKind`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultKind {
    /// A call failed; a task failed where a task is hit. The text form leaves it out.
    #[default]
    Plain,
    /// The chip process exited. In the emulator, later work on that chip fails the same way.
    ChipExited(i32),
    /// A signal ended the chip process. In the emulator, later work on that chip fails the same way.
    ChipKilled(i32),
    /// The device gave up waiting for progress.
    DeviceTimeout,
    /// No shared memory, with the bytes asked for.
    OutOfSharedMemory(u64),
    /// No device memory, with the bytes asked for.
    OutOfDeviceMemory(u64),
    /// A bounded wait inside the runtime ended first.
    Deferred,
}

/// The failure that a fault reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FailureTemplate {
    /// Its kind.
    pub kind: FaultKind,
    /// Whether the worker is finished.
    pub fatal: bool,
}

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fault {
    /// The call to hit.
    pub call: Call,
    /// Only what the call does on this chip; `None` counts whole calls.
    pub chip: Option<ChipId>,
    /// Which matching call is hit: 1 is the next one. 0 never fires.
    pub occurrence: u64,
    /// When the call fails.
    pub effect: FaultEffect,
    /// What it reports.
    pub failure: FailureTemplate,
}

impl Fault {
    /// The next whole `call` fails with `effect`; change it from there.
    #[must_use]
    pub const fn new(call: Call, effect: FaultEffect) -> Self {
        let failure = FailureTemplate { kind: FaultKind::Plain, fatal: false };
        Self { call, chip: None, occurrence: 1, effect, failure }
    }

    /// The same fault on one chip.
    #[must_use]
    pub const fn on_chip(mut self, chip: u32) -> Self {
        self.chip = Some(ChipId(chip));
        self
    }

    /// The same fault at another occurrence.
    #[must_use]
    pub const fn nth(mut self, occurrence: u64) -> Self {
        self.occurrence = occurrence;
        self
    }

    /// The same fault with another kind of failure.
    #[must_use]
    pub const fn with_kind(mut self, kind: FaultKind) -> Self {
        self.failure.kind = kind;
        self
    }

    /// The same fault, final for the worker.
    #[must_use]
    pub const fn fatal(mut self) -> Self {
        self.failure.fatal = true;
        self
    }

    /// The failure that the fault reports, on `chip`.
    #[must_use]
    pub fn to_failure(&self, chip: Option<ChipId>) -> RuntimeFailure {
        let kind = match self.failure.kind {
            FaultKind::Plain if self.call == Call::Task => FailureKind::Task,
            FaultKind::Plain => FailureKind::Call,
            FaultKind::ChipExited(code) => FailureKind::ChipDied { exit_code: Some(code), signal: None },
            FaultKind::ChipKilled(signal) => FailureKind::ChipDied { exit_code: None, signal: Some(signal) },
            FaultKind::DeviceTimeout => FailureKind::DeviceTimeout,
            FaultKind::OutOfSharedMemory(requested_bytes) => FailureKind::OutOfSharedMemory { requested_bytes },
            FaultKind::OutOfDeviceMemory(requested_bytes) => FailureKind::OutOfDeviceMemory { requested_bytes },
            FaultKind::Deferred => FailureKind::Deferred,
        };
        let effect = match self.effect {
            FaultEffect::Before | FaultEffect::Hang => Effect::None,
            FaultEffect::After | FaultEffect::Unwind => Effect::Done,
            FaultEffect::NoReply => Effect::Unknown,
        };
        let mut failure = RuntimeFailure::new(self.call, "InjectedFault", format!("armed as {self}"))
            .with_kind(kind)
            .with_effect(effect)
            .with_fatal(self.failure.fatal);
        failure.chip = chip.or(self.chip);
        failure
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain => f.write_str("plain"),
            Self::ChipExited(code) => write!(f, "chip-died(exit={code})"),
            Self::ChipKilled(signal) => write!(f, "chip-died(signal={signal})"),
            Self::DeviceTimeout => f.write_str("device-timeout"),
            Self::OutOfSharedMemory(bytes) => write!(f, "out-of-shared-memory({bytes})"),
            Self::OutOfDeviceMemory(bytes) => write!(f, "out-of-device-memory({bytes})"),
            Self::Deferred => f.write_str("deferred"),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let call = CALLS.iter().find(|(call, _)| *call == self.call).map_or(self.call.name(), |(_, text)| text);
        f.write_str(call)?;
        if let Some(chip) = self.chip {
            write!(f, "@{chip}")?;
        }
        write!(f, "#{}:{}", self.occurrence, self.effect.text())?;
        if self.failure.kind != FaultKind::Plain {
            write!(f, "={}", self.failure.kind)?;
        }
        if self.failure.fatal { f.write_str("!") } else { Ok(()) }
    }
}

/// A text that is not a fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("fault {text:?}: {what}")]
pub struct ParseFaultError {
    /// The text.
    pub text: String,
    /// What is wrong with it, and what is permitted.
    pub what: String,
}

/// The forms of a kind.
const KINDS: &str = "plain, chip-died(exit=CODE), chip-died(signal=NUMBER), device-timeout, out-of-shared-memory(BYTES), \
                     out-of-device-memory(BYTES), deferred";

impl FromStr for FaultKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |prefix: &str| text.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(')'));
        let bad = |e: std::num::ParseIntError| format!("{text:?}: {e}; permitted: {KINDS}");
        match text {
            "plain" => Ok(Self::Plain),
            "device-timeout" => Ok(Self::DeviceTimeout),
            "deferred" => Ok(Self::Deferred),
            _ => {
                if let Some(n) = number("chip-died(exit=") {
                    n.parse().map(Self::ChipExited).map_err(bad)
                } else if let Some(n) = number("chip-died(signal=") {
                    n.parse().map(Self::ChipKilled).map_err(bad)
                } else if let Some(n) = number("out-of-shared-memory(") {
                    n.parse().map(Self::OutOfSharedMemory).map_err(bad)
                } else if let Some(n) = number("out-of-device-memory(") {
                    n.parse().map(Self::OutOfDeviceMemory).map_err(bad)
                } else {
                    Err(format!("unknown kind {text:?}; permitted: {KINDS}"))
                }
            }
        }
    }
}

impl FromStr for Fault {
    type Err = ParseFaultError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let error = |what: String| ParseFaultError { text: text.to_owned(), what };
        let form = || error("the form is call[@chipN]#k:effect[=kind][!]".to_owned());
        let (body, fatal) = text.strip_suffix('!').map_or((text, false), |body| (body, true));
        let (place, rest) = body.split_once('#').ok_or_else(form)?;
        let (occurrence, outcome) = rest.split_once(':').ok_or_else(form)?;
        let (call, chip) = match place.split_once('@') {
            None => (place, None),
            Some((call, chip)) => {
                let number = chip.strip_prefix("chip").and_then(|n| n.parse().ok());
                let chip = number.ok_or_else(|| error(format!("{chip:?} is no chip; write chip0, chip1, ...")))?;
                (call, Some(ChipId(chip)))
            }
        };
        let call = CALLS.iter().find(|(_, name)| *name == call).map(|(call, _)| *call);
        let call = call.ok_or_else(|| {
            let names = CALLS.map(|(_, name)| name).join(", ");
            error(format!("unknown call; permitted: {names}"))
        })?;
        let occurrence =
            occurrence.parse().map_err(|e| error(format!("occurrence {occurrence:?} is no number: {e}")))?;
        let (effect, kind) = outcome.split_once('=').map_or((outcome, "plain"), |(effect, kind)| (effect, kind));
        let effects =
            [FaultEffect::Before, FaultEffect::After, FaultEffect::NoReply, FaultEffect::Hang, FaultEffect::Unwind];
        let effect = effects.into_iter().find(|e| e.text() == effect).ok_or_else(|| {
            error(format!("unknown effect {effect:?}; permitted: before, after, no-reply, hang, unwind"))
        })?;
        let kind = kind.parse().map_err(error)?;
        Ok(Self { call, chip, occurrence, effect, failure: FailureTemplate { kind, fatal } })
    }
}

/// A list of faults.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FaultSchedule {
    /// The faults, the first having precedence.
    pub faults: Vec<Fault>,
}

impl FaultSchedule {
    /// No faults.
    #[must_use]
    pub const fn none() -> Self {
        Self { faults: Vec::new() }
    }

    /// One more fault.
    #[must_use]
    pub fn with(mut self, fault: Fault) -> Self {
        self.faults.push(fault);
        self
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty()
    }
}

impl From<Fault> for FaultSchedule {
    fn from(fault: Fault) -> Self {
        Self { faults: vec![fault] }
    }
}

impl FromIterator<Fault> for FaultSchedule {
    fn from_iter<I: IntoIterator<Item = Fault>>(faults: I) -> Self {
        Self { faults: faults.into_iter().collect() }
    }
}

impl Extend<Fault> for FaultSchedule {
    fn extend<I: IntoIterator<Item = Fault>>(&mut self, faults: I) {
        self.faults.extend(faults);
    }
}

impl fmt::Display for FaultSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, fault) in self.faults.iter().enumerate() {
            if i > 0 {
                f.write_str("; ")?;
            }
            fault.fmt(f)?;
        }
        Ok(())
    }
}

impl FromStr for FaultSchedule {
    type Err = ParseFaultError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.split(';').filter(|part| !part.trim().is_empty()).map(str::parse).collect()
    }
}

/// A call that a hang fault has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hung {
    /// Names this stop; never used twice by one backend.
    pub id: u64,
    /// The call.
    pub call: Call,
    /// The chip, where the call concerns one.
    pub chip: Option<ChipId>,
}

#[derive(Debug, Default)]
struct Armed {
    /// Each fault with the number of matching calls seen since it was armed.
    faults: Vec<(Fault, u64)>,
    hung: Vec<Hung>,
    next_hang: u64,
    /// Whole calls seen so far, by position in [`CALLS`].
    seen: [u64; CALLS.len()],
    /// Set by abandon: nothing hangs any more.
    open: bool,
}

/// The position of a call in [`CALLS`].
fn position(call: Call) -> Option<usize> {
    CALLS.iter().position(|(known, _)| *known == call)
}

#[derive(Debug, Default)]
struct Control {
    armed: Mutex<Armed>,
    changed: Condvar,
    journal: Option<Journal>,
}

/// The armed faults of one backend, and the calls that hang in it. Clones are the same control.
#[derive(Clone, Debug, Default)]
pub struct FaultControl {
    control: Arc<Control>,
}

/// A fault whose turn has come, on the chip it hits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fired {
    pub(crate) fault: Fault,
    pub(crate) call: Call,
    pub(crate) chip: Option<ChipId>,
}

impl Fired {
    /// The failure to report.
    pub(crate) fn error(&self) -> BackendError {
        self.fault.to_failure(self.chip).into()
    }
}

impl FaultControl {
    /// A control with `schedule` armed. Stops of hang faults are recorded in `journal`, where there is one.
    #[must_use]
    pub fn new(schedule: FaultSchedule, journal: Option<Journal>) -> Self {
        let control = Self { control: Arc::new(Control { journal, ..Control::default() }) };
        schedule.faults.into_iter().for_each(|fault| control.arm(fault));
        control
    }

    /// Arms one more fault; it counts from now on.
    pub fn arm(&self, fault: Fault) {
        self.control.armed.lock().faults.push((fault, 0));
    }

    /// Disarms all faults that have not fired.
    pub fn disarm(&self) {
        self.control.armed.lock().faults.clear();
    }

    /// The faults that have not fired, in precedence order.
    #[must_use]
    pub fn pending(&self) -> Vec<Fault> {
        self.control.armed.lock().faults.iter().map(|(fault, _)| *fault).collect()
    }

    /// How often `call` came by so far, faulty or not: as whole calls, the way a fault without a chip counts them. The
    /// difference before and after an operation says which calls it makes, and so which faults can hit it.
    #[must_use]
    pub fn seen(&self, call: Call) -> u64 {
        let armed = self.control.armed.lock();
        position(call).and_then(|at| armed.seen.get(at)).copied().unwrap_or_default()
    }

    /// The calls that hang now, in the order in which they stopped.
    #[must_use]
    pub fn hung(&self) -> Vec<Hung> {
        self.control.armed.lock().hung.clone()
    }

    /// Blocks until at least `count` calls hang at the same time (or the backend was abandoned).
    pub fn wait_hung(&self, count: usize) {
        let mut armed = self.control.armed.lock();
        while armed.hung.len() < count && !armed.open {
            self.control.changed.wait(&mut armed);
        }
    }

    /// Lets one call that hangs go on; says whether it did hang.
    pub fn release(&self, id: u64) -> bool {
        let mut armed = self.control.armed.lock();
        let before = armed.hung.len();
        armed.hung.retain(|hung| hung.id != id);
        let released = armed.hung.len() < before;
        drop(armed);
        self.control.changed.notify_all();
        released
    }

    /// Lets every call that hangs now go on; says how many did.
    pub fn release_all(&self) -> usize {
        let mut armed = self.control.armed.lock();
        let count = armed.hung.len();
        armed.hung.clear();
        drop(armed);
        self.control.changed.notify_all();
        count
    }

    /// Lets everything go on, now and later.
    pub(crate) fn open(&self) {
        self.control.armed.lock().open = true;
        self.release_all();
    }

    /// Counts one call, `whole` or a part of one, for faults that match `matches`, and returns the first whose turn it
    /// is.
    fn count(
        &self,
        call: Call,
        chip: Option<ChipId>,
        whole: bool,
        matches: impl Fn(&Fault) -> bool,
    ) -> Option<Fired> {
        let mut armed = self.control.armed.lock();
        if whole && let Some(seen) = position(call).and_then(|at| armed.seen.get_mut(at)) {
            *seen += 1;
        }
        let mut fired = None;
        armed.faults.retain_mut(|(fault, seen)| {
            if fault.call != call || !matches(fault) {
                return true;
            }
            *seen += 1;
            if *seen != fault.occurrence {
                return true;
            }
            fired.get_or_insert(*fault);
            false
        });
        fired.map(|fault| Fired { fault, call, chip })
    }

    /// A whole call that concerns no chip, or several.
    pub(crate) fn whole(&self, call: Call) -> Option<Fired> {
        self.count(call, None, true, |fault| fault.chip.is_none())
    }

    /// The part of a call that concerns one chip of several.
    pub(crate) fn part(&self, call: Call, chip: ChipId) -> Option<Fired> {
        self.count(call, Some(chip), false, |fault| fault.chip == Some(chip))
    }

    /// A whole call that concerns exactly one chip.
    pub(crate) fn single(&self, call: Call, chip: ChipId) -> Option<Fired> {
        self.count(call, Some(chip), true, |fault| fault.chip.is_none_or(|c| c == chip))
    }

    /// Stops here until released.
    pub(crate) fn hang(&self, fired: &Fired) {
        let mut armed = self.control.armed.lock();
        if armed.open {
            return;
        }
        let id = armed.next_hang;
        armed.next_hang += 1;
        armed.hung.push(Hung { id, call: fired.call, chip: fired.chip });
        self.control.changed.notify_all();
        if let Some(journal) = &self.control.journal {
            journal.record(EventKind::Hung { call: fired.call, chip: fired.chip });
        }
        while armed.hung.iter().any(|hung| hung.id == id) {
            self.control.changed.wait(&mut armed);
        }
    }

    /// Does `work` as the fault, if any, has it.
    pub(crate) fn around<T>(
        &self,
        fired: Option<Fired>,
        work: impl FnOnce() -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let Some(fired) = fired else { return work() };
        match fired.fault.effect {
            FaultEffect::Before => Err(fired.error()),
            FaultEffect::Hang => {
                self.hang(&fired);
                work()
            }
            FaultEffect::After | FaultEffect::NoReply => work().and_then(|_| Err(fired.error())),
            FaultEffect::Unwind => {
                let _done = work()?;
                std::panic::resume_unwind(Box::new(format!("injected unwind: {}", fired.fault)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_prints_and_parses_back() {
        let kinds = [
            FaultKind::Plain,
            FaultKind::ChipExited(-3),
            FaultKind::ChipKilled(9),
            FaultKind::DeviceTimeout,
            FaultKind::OutOfSharedMemory(64),
            FaultKind::OutOfDeviceMemory(u64::MAX),
            FaultKind::Deferred,
        ];
        for (call, _) in CALLS {
            for chip in [None, Some(ChipId(7))] {
                for effect in FaultEffect::ALL.into_iter().chain([FaultEffect::Unwind]) {
                    for kind in kinds {
                        for fatal in [false, true] {
                            let failure = FailureTemplate { kind, fatal };
                            let fault = Fault { call, chip, occurrence: 12, effect, failure };
                            assert_eq!(fault.to_string().parse(), Ok(fault));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn malformed_faults_say_what_is_permitted() {
        for text in ["", "copy_to", "copy_to#1", "copy_to#x:after", "copy_too#1:after", "copy_to#1:later"] {
            assert!(text.parse::<Fault>().is_err(), "{text}");
        }
        let error = "copy_to@x#1:after".parse::<Fault>().unwrap_err();
        assert!(error.to_string().contains("chip0"), "{error}");
        let error = "copy_to#1:after=odd".parse::<Fault>().unwrap_err();
        assert!(error.to_string().contains("device-timeout"), "{error}");
        assert_eq!(" ; ".parse(), Ok(FaultSchedule::none()));
    }

    #[test]
    fn the_nth_matching_call_is_hit_once_and_chips_are_counted_apart() {
        let schedule = "copy_to@chip1#2:before; copy_to#3:after".parse().unwrap();
        let control = FaultControl::new(schedule, None);
        let hits: Vec<_> = [0, 1, 1, 1, 1]
            .into_iter()
            .map(|chip| control.single(Call::CopyTo, ChipId(chip)).map(|fired| fired.fault.effect))
            .collect();
        // The third copy is the second on chip 1: the first of the schedule wins, and both are spent.
        assert_eq!(hits, [None, None, Some(FaultEffect::Before), None, None]);
        assert_eq!((control.seen(Call::CopyTo), control.seen(Call::Close)), (5, 0));
        control.part(Call::CopyTo, ChipId(1));
        assert_eq!(control.seen(Call::CopyTo), 5, "a part is not a whole call");
        assert!(control.pending().is_empty());
    }

    #[test]
    fn a_hang_goes_on_when_released_and_never_after_abandon() {
        let control = FaultControl::new(Fault::new(Call::Close, FaultEffect::Hang).into(), None);
        let fired = control.whole(Call::Close);
        std::thread::scope(|scope| {
            let stopped = scope.spawn(|| control.around(fired, || Ok(5)));
            control.wait_hung(1);
            let hung = control.hung();
            assert_eq!(hung, [Hung { id: 0, call: Call::Close, chip: None }]);
            assert!(control.release(hung[0].id) && !control.release(hung[0].id));
            assert_eq!(stopped.join().unwrap(), Ok(5));
        });
        control.open();
        control.arm(Fault::new(Call::Close, FaultEffect::Hang));
        assert_eq!(control.around(control.whole(Call::Close), || Ok(6)), Ok(6));
    }

    #[test]
    fn effects_say_what_was_done() {
        for (effect, expected, worked) in [
            (FaultEffect::Before, Effect::None, false),
            (FaultEffect::After, Effect::Done, true),
            (FaultEffect::NoReply, Effect::Unknown, true),
        ] {
            let control = FaultControl::new(Fault::new(Call::Free, effect).into(), None);
            let mut done = false;
            let result = control.around(control.whole(Call::Free), || {
                done = true;
                Ok(())
            });
            assert_eq!((result.unwrap_err().effect(), done), (expected, worked));
        }
    }
}
