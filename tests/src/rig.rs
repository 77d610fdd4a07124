//! A prepared worker on the backend under test.
//!
//! Tests that need nothing but a backend run on the one that [`backend::chosen`] gives; tests that look into the journal or inject faults run on the emulator only, and say that
//! they are skipped where another backend is chosen.

use std::sync::Arc;

use pto_dispatch::{Args, Options, PreparedWorker, Program, ProgramId};
use pto_mock::conformance::BackendSpec;
use pto_mock::{Completion, Emulator, EmulatorBuilder, EventKind, Journal, Memory, kernels};
use pto_simpler_sys::{Backend, DevicePlace, DomainId, RunId};

use crate::backend;
use crate::gate::HangGuard;
use crate::scenario::f1;
use crate::shm::ShmDir;
use crate::spy::Spy;

/// The name under which the emulator is chosen.
const EMULATOR: &str = "emulator";

/// One test: a hang guard and a shared-memory directory of its own.
#[derive(Debug)]
pub struct Bench {
    /// Where the emulator makes its memory.
    pub shm: ShmDir,
    guard: Option<HangGuard>,
}

/// The bench of a test that needs the emulator; `None`, with a note, where another backend is chosen.
#[must_use]
pub fn emulator_only(name: &'static str) -> Option<Bench> {
    let chosen = backend::chosen().unwrap().name();
    if chosen == EMULATOR {
        return Some(any_backend(name));
    }
    println!("{name}: skipped: needs the emulator, {} is {chosen}", backend::VARIABLE);
    None
}

/// The bench of a test that runs on any backend.
#[must_use]
pub fn any_backend(name: &'static str) -> Bench {
    Bench { shm: ShmDir::new(), guard: Some(HangGuard::arm(name)) }
}

impl Bench {
    /// The same bench without the hang guard, for tests that bring a watchdog of their own.
    #[must_use]
    pub fn unguarded(mut self) -> Self {
        self.guard = None;
        self
    }

    /// An emulator with two chips and the portable kernels, to be changed further.
    #[must_use]
    pub fn builder(&self) -> EmulatorBuilder {
        let memory = Memory::SharedIn(self.shm.path().to_owned());
        kernels::install(Emulator::builder().memory(memory).chips(2))
    }

    /// A worker on this emulator.
    ///
    /// # Panics
    ///
    /// Where it cannot be prepared.
    #[must_use]
    pub fn prepare(&self, options: &Options, programs: &[Arc<dyn Program>], builder: EmulatorBuilder) -> Rig {
        let emulator = builder.build().unwrap();
        let mut rig = Self::prepare_on(options, programs, Arc::clone(&emulator) as Arc<dyn Backend>);
        rig.emulator = Some(emulator);
        rig
    }

    /// F1n of the scenarios: F1 persistent, with reset off, on an emulator, warm. The warm-up is run 1.
    ///
    /// # Panics
    ///
    /// Where it cannot be prepared or run.
    #[must_use]
    pub fn f1n(&self) -> Rig {
        let rig = self.prepare(&Options::persistent().reset(false), &[f1()], self.builder());
        rig.worker.call(&Args::new()).unwrap();
        rig.until_idle();
        rig
    }

    /// A worker on the backend under test.
    ///
    /// # Panics
    ///
    /// Where it cannot be prepared, or where the environment names no backend.
    #[must_use]
    pub fn prepare_any(&self, options: &Options, programs: &[Arc<dyn Program>], chips: u32) -> Rig {
        let chosen = backend::chosen().unwrap();
        if chosen.name() == EMULATOR {
            // With its memory in a directory of this test's own.
            return self.prepare(options, programs, self.builder().chips(chips));
        }
        Self::prepare_on(options, programs, chosen.create(&BackendSpec::new(chips, 1)).unwrap())
    }

    fn prepare_on(options: &Options, programs: &[Arc<dyn Program>], backend: Arc<dyn Backend>) -> Rig {
        let spy = Spy::new(backend);
        let worker = PreparedWorker::prepare(programs, options, Arc::clone(&spy) as Arc<dyn Backend>).unwrap();
        let ids = worker.programs().collect();
        Rig { worker, ids, spy, emulator: None }
    }

    /// Nothing is left in shared memory.
    #[track_caller]
    pub fn assert_clean(&self) {
        self.shm.assert_clean();
    }
}

/// A prepared worker and what is around it.
#[derive(Debug)]
pub struct Rig {
    /// The worker.
    pub worker: PreparedWorker,
    /// Its programs.
    pub ids: Vec<ProgramId>,
    /// Between the worker and its backend.
    pub spy: Arc<Spy>,
    emulator: Option<Arc<Emulator>>,
}

impl Rig {
    /// The emulator.
    ///
    /// # Panics
    ///
    /// On another backend.
    #[must_use]
    pub fn emulator(&self) -> &Emulator {
        self.emulator.as_ref().unwrap()
    }

    /// The emulator, shared.
    ///
    /// # Panics
    ///
    /// On another backend.
    #[must_use]
    pub fn shared_emulator(&self) -> Arc<Emulator> {
        Arc::clone(self.emulator.as_ref().unwrap())
    }

    /// The journal, where the backend has one.
    #[must_use]
    pub fn try_journal(&self) -> Option<Journal> {
        self.emulator.as_ref().map(|emulator| emulator.journal())
    }

    /// The emulator's journal.
    ///
    /// # Panics
    ///
    /// On another backend.
    #[must_use]
    pub fn journal(&self) -> Journal {
        self.emulator().journal()
    }

    /// From now on runs are held until they are completed by hand.
    pub fn hold_runs(&self) {
        self.emulator().set_completion(Completion::ByHand);
    }

    /// Waits until no dispatch holds a frame: an outcome is published a moment before its frame is free (rule 7).
    pub fn until_idle(&self) {
        while !self.worker.in_flight().is_empty() {
            std::thread::yield_now();
        }
    }

    /// Waits until every task of a run that was submitted so far has ended.
    ///
    /// # Panics
    ///
    /// On another backend than the emulator.
    pub fn until_tasks_over(&self, run: u64) {
        let of_run = |e: &EventKind| e.run() == Some(RunId(run));
        let submitted = |e: &EventKind| matches!(e, EventKind::TaskSubmit { .. }) && of_run(e);
        let ended = |e: &EventKind| matches!(e, EventKind::TaskEnd { .. }) && of_run(e);
        self.emulator().wait_until(|events| {
            let count = |what: &dyn Fn(&EventKind) -> bool| events.iter().filter(|e| what(&e.kind)).count();
            count(&submitted) == count(&ended)
        });
    }

    /// Lets a held run go.
    ///
    /// # Panics
    ///
    /// Where it is not in flight.
    pub fn complete(&self, run: u64) {
        self.emulator().complete(RunId(run)).unwrap();
    }
}

/// Abandons the emulator when a test panics, so that the threads it waits for come back and it fails instead of
/// hanging. Put it into the scope that joins them.
#[derive(Debug)]
pub struct Rescue<'a>(&'a Emulator);

impl Rig {
    /// A rescue for this rig.
    ///
    /// # Panics
    ///
    /// On another backend than the emulator.
    #[must_use]
    pub fn rescue(&self) -> Rescue<'_> {
        Rescue(self.emulator())
    }
}

impl Drop for Rescue<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _report = self.0.abandon();
        }
    }
}

/// Runs accepted so far.
#[must_use]
pub fn submits(journal: &Journal) -> usize {
    journal.count(|e| matches!(e, EventKind::Accept(_)))
}

/// Every copy into a domain buffer: run, chip, position of the buffer, bytes.
#[must_use]
pub fn copies(journal: &Journal) -> Vec<(u64, u32, u32, u64)> {
    let copy = |event: EventKind| match event {
        EventKind::Copy { run: Some(run), chip, dst: DevicePlace::DomainBuffer { buffer, .. }, nbytes, .. } => {
            Some((run.0, chip.0, buffer, nbytes))
        }
        _ => None,
    };
    journal.copies().into_iter().filter_map(copy).collect()
}

/// Every allocated domain with the name that the backend knows it by, in order.
#[must_use]
pub fn allocations(journal: &Journal) -> Vec<(String, DomainId)> {
    let alloc = |event: EventKind| match event {
        EventKind::Alloc { name, domain, .. } => Some((name.to_string(), domain)),
        _ => None,
    };
    journal.select(|e| matches!(e, EventKind::Alloc { .. })).into_iter().filter_map(alloc).collect()
}

/// The first position of an event.
///
/// # Panics
///
/// Where there is none; with the whole journal.
#[track_caller]
#[must_use]
pub fn at(journal: &Journal, what: &str, matches: impl Fn(&EventKind) -> bool) -> u64 {
    journal.position(matches).unwrap_or_else(|| panic!("no {what} in\n{journal}"))
}

/// Asserts that positions in the journal grow.
///
/// # Panics
///
/// Where they do not; with the whole journal.
#[track_caller]
pub fn assert_order(journal: &Journal, order: &[(&str, u64)]) {
    for pair in order.windows(2) {
        assert!(pair[0].1 < pair[1].1, "{} must come before {} in\n{journal}", pair[0].0, pair[1].0);
    }
}
