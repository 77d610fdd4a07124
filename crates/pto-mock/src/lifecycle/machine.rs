//! The state machine test: every transition on a real worker over the emulator, compared with the model, and all
//! invariants after each step.

#![allow(clippy::panic, reason = "a state machine test reports by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest_state_machine::StateMachineTest;
use pto_dispatch::{Args, Dispatch, Error, PreparedWorker, Program, ProgramId};
use pto_simpler_sys::{Call, ChipId, DomainId, FailureKind, RunId, RuntimeFailure};

use super::model::{Expect, FaultPoint, Model, Shown, Status, Transition, World};
use super::oracle::{self, Rules};
use super::shape::{Act, Epochs, Seen, Shape, TOLD_TO_PANIC, ToldToFail, Toucher, pattern};
use super::watch::Watch;
use crate::{Emulator, EventKind, Fault, FaultEffect};

/// How long a step may take before the run is called hung. A guard, not an expectation.
const HANG: Duration = Duration::from_secs(60);

/// A worker under test.
#[derive(Debug)]
pub struct System {
    emulator: Arc<Emulator>,
    worker: Option<PreparedWorker>,
    programs: Vec<ProgramId>,
    handles: Vec<Option<Dispatch>>,
    let_go: BTreeSet<u64>,
    seen: Seen,
    epochs: Epochs,
    /// Who wrote each retained domain last, as the accepted dispatches have it.
    writers: BTreeMap<(usize, usize), Option<u64>>,
    /// What the first tasks must have found: by run, chip and domain, the byte that fills the window.
    must_see: BTreeMap<(RunId, ChipId, u64), u8>,
    buffers_before: usize,
    watch: Watch,
}

/// The state machine test.
#[derive(Debug)]
pub struct Lifecycle;

impl StateMachineTest for Lifecycle {
    type SystemUnderTest = System;
    type Reference = Model;

    fn init_test(world: &World) -> System {
        let (seen, epochs) = (Seen::default(), Epochs::default());
        let watch = Watch::new(HANG);
        let emulator = Toucher::install(world.shape.emulator(), Arc::clone(&seen))
            .build()
            .expect("every shape is a valid emulator");
        let programs: Vec<Arc<dyn Program>> = world
            .shape
            .programs
            .iter()
            .enumerate()
            .map(|(index, domains)| {
                Arc::new(Toucher::new(index, domains.clone(), Arc::clone(&epochs))) as Arc<dyn Program>
            })
            .collect();
        let backend = Arc::clone(&emulator);
        let worker = PreparedWorker::prepare(&programs, &world.shape.options(), backend)
            .expect("every shape can be prepared");
        let programs = worker.programs().collect();
        let buffers_before = buffers_made(&emulator);
        System {
            emulator,
            worker: Some(worker),
            programs,
            handles: Vec::new(),
            let_go: BTreeSet::new(),
            writers: BTreeMap::new(),
            must_see: BTreeMap::new(),
            buffers_before,
            seen,
            epochs,
            watch,
        }
    }

    fn apply(mut system: System, world: &World, transition: Transition) -> System {
        system.watch.begin(|| format!("{transition:?} on {:?}", world.shape));
        let answer = system.step(world, &transition);
        assert_eq!(answer, world.expect, "the answer to {transition:?}");
        if let (
            Transition::Submit { program, leases, .. } | Transition::TrySubmit { program, leases },
            Expect::Accepted(id),
        ) = (&transition, &answer)
        {
            system.expect_contents(&world.shape, *program, leases, *id);
            system.check_opening(world, *program, leases, *id);
        }
        if !matches!(transition, Transition::Arm(_)) && world.fault.is_none() {
            system.emulator.faults().disarm();
        }
        system.settle(world);
        system.watch.end();
        system
    }

    fn check_invariants(system: &System, world: &World) {
        system.check(world);
    }

    fn teardown(mut system: System) {
        system.watch.begin(|| "the drop of the worker".to_owned());
        // Dropping must do everything that close does. A fault nobody met must not hit it.
        system.emulator.faults().disarm();
        for run in system.worker.as_ref().map(PreparedWorker::in_flight).unwrap_or_default() {
            system.complete(run.get());
        }
        system.handles.clear();
        drop(system.worker.take());
        let stats = system.emulator.stats();
        assert_eq!((stats.domains, stats.runs, stats.host_buffers, stats.threads), (0, 0, 0, 0), "I14: {stats:?}");
        assert!(stats.linked_names.is_empty(), "I14: {stats:?}");
        system.watch.end();
    }
}

fn buffers_made(emulator: &Emulator) -> usize {
    emulator.journal().events().iter().filter(|e| matches!(e.kind, EventKind::BufferCreate { .. })).count()
}

impl System {
    fn worker(&self) -> &PreparedWorker {
        self.worker.as_ref().expect("the worker lives until teardown")
    }

    fn complete(&mut self, run: u64) {
        if self.let_go.insert(run) {
            self.emulator.complete(RunId(run)).expect("a run in flight can be let go");
        }
    }

    /// Fails the oldest run, after its tasks: those not started yet would be cancelled, by chance.
    fn fail(&mut self, run: u64) {
        self.let_go.insert(run);
        self.emulator.wait_until(|events| {
            let of_run = |event: &crate::Event| event.kind.run() == Some(RunId(run));
            let submitted = |e: &&crate::Event| matches!(e.kind, EventKind::TaskSubmit { .. }) && of_run(e);
            let ended = |e: &&crate::Event| matches!(e.kind, EventKind::TaskEnd { .. }) && of_run(e);
            events.iter().filter(submitted).count() == events.iter().filter(ended).count()
        });
        // On a chip, as a final failure is; one of a sub-worker leaves the worker as it was.
        let failure = RuntimeFailure::new(Call::Run, "RuntimeError", "told to fail").with_kind(FailureKind::Task);
        let failure = failure.on_chip(ChipId(0));
        self.emulator.fail(RunId(run), failure).expect("a run in flight can fail");
    }

    fn step(&mut self, world: &World, transition: &Transition) -> Expect {
        match transition {
            Transition::Submit { program, leases, act } => {
                let id = self.programs[*program];
                let args = Toucher::args(leases, *act);
                self.submit_letting_go(id, &args, &world.released.clone())
            }
            Transition::TrySubmit { program, leases } => {
                let id = self.programs[*program];
                let args = Toucher::args(leases, Act::Normal);
                let submitted = self.worker().try_submit(id, &args);
                self.submitted(Ok(submitted))
            }
            Transition::SubmitWhileOldestFails { program } => {
                let id = self.programs[*program];
                let args = Toucher::args(&[], Act::Normal);
                let oldest = self.worker().in_flight()[0].get();
                let worker = self.worker.take().expect("the worker lives until teardown");
                let submitted = std::thread::scope(|scope| {
                    let submitter = scope.spawn(|| worker.submit(id, &args));
                    self.fail(oldest);
                    submitter.join().expect("submit does not panic")
                });
                self.worker = Some(worker);
                self.submitted(Ok(submitted))
            }
            Transition::Complete { flight } => {
                let run = self.worker().in_flight()[*flight].get();
                self.complete(run);
                Expect::Nothing
            }
            Transition::FailOldest => {
                let oldest = self.worker().in_flight()[0].get();
                self.fail(oldest);
                Expect::Nothing
            }
            Transition::Wait { handle } => {
                let dispatch = self.handles[*handle].as_ref().expect("the model knows which handles are held");
                let (first, second) = (dispatch.wait(), dispatch.wait());
                assert_eq!(format!("{first:?}"), format!("{second:?}"), "waiting is idempotent");
                shown(dispatch, Some(&first))
            }
            Transition::Poll { handle } => {
                let dispatch = self.handles[*handle].as_ref().expect("the model knows which handles are held");
                let seen = match dispatch.wait_timeout(Duration::ZERO) {
                    Err(Error::WaitTimeout { id }) => {
                        assert_eq!(id, dispatch.id());
                        None
                    }
                    outcome => Some(outcome),
                };
                shown(dispatch, seen.as_ref())
            }
            Transition::DropHandle { handle } => {
                self.handles[*handle] = None;
                Expect::Nothing
            }
            Transition::Arm(point) => {
                self.arm(world, *point);
                Expect::Nothing
            }
            Transition::CloseTimeout => self.closed(self.worker().close_timeout(Duration::ZERO)),
            Transition::Close { threads } => self.close(*threads, &world.released.clone()),
        }
    }

    fn submit_letting_go(&mut self, program: ProgramId, args: &Args, released: &[u64]) -> Expect {
        let worker = self.worker.take().expect("the worker lives until teardown");
        let submitted = std::thread::scope(|scope| {
            let submitter = scope.spawn(|| catch_unwind(AssertUnwindSafe(|| worker.submit(program, args))));
            for run in released {
                self.complete(*run);
            }
            submitter.join().expect("panics are caught")
        });
        self.worker = Some(worker);
        self.submitted(submitted)
    }

    fn submitted(&mut self, submitted: std::thread::Result<Result<Dispatch, Error>>) -> Expect {
        match submitted {
            Err(payload) => {
                let text = payload.downcast_ref::<&str>().copied();
                assert_eq!(text, Some(TOLD_TO_PANIC), "the builder's own panic comes back");
                Expect::ProgramPanic
            }
            Ok(Ok(dispatch)) => {
                let id = dispatch.id().get();
                self.handles.push(Some(dispatch));
                Expect::Accepted(id)
            }
            Ok(Err(Error::Program { source, .. })) => {
                assert!(
                    source.downcast_ref::<ToldToFail>().is_some(),
                    "the builder's own error comes back as itself"
                );
                Expect::ProgramError
            }
            Ok(Err(Error::Domain(error))) => {
                assert!(matches!(error, pto_domain::DomainError::SpecChanged { .. }), "{error}");
                Expect::SpecChanged
            }
            Ok(Err(Error::Reset { .. })) => Expect::Slack,
            Ok(Err(Error::Backend(_))) => Expect::BackendFailure,
            // After the opening: what could be tried again by itself comes as the failure that poisoned the worker.
            Ok(Err(Error::Failed(failure))) if failure.cause.may_retry() => {
                assert!(failure.final_for_worker && matches!(failure.cause, Error::Backend(_)), "{failure}");
                Expect::BackendFailure
            }
            Ok(Err(Error::ResetCopy { .. })) => Expect::ResetFailure,
            Ok(Err(Error::WouldBlock { .. })) => Expect::WouldBlock,
            Ok(Err(Error::Poisoned(failure))) => Expect::Poisoned(failure.id.get()),
            Ok(Err(Error::Finished(failure))) => Expect::Finished(failure.id.get()),
            Ok(Err(Error::Closing)) => Expect::Closing,
            Ok(Err(Error::Closed)) => Expect::Closed,
            Ok(Err(error)) => panic!("no transition is answered with {error:?}"),
        }
    }

    fn arm(&self, world: &World, point: FaultPoint) {
        let effect = |effect: bool| if effect { FaultEffect::After } else { FaultEffect::Before };
        let fault = match point {
            FaultPoint::Staging => Fault::new(Call::CreateBuffer, FaultEffect::Before),
            FaultPoint::Allocate { effect: done } if world.shape.persistent => {
                Fault::new(Call::GetOrAllocateDomain, effect(done))
            }
            FaultPoint::Allocate { effect: done } => Fault::new(Call::AllocateDomain, effect(done)),
            FaultPoint::ResetCopy { effect: done } => Fault::new(Call::CopyTo, effect(done)),
            FaultPoint::Task { effect: done } => Fault::new(Call::SubmitNextLevel, effect(done)),
            FaultPoint::Release => Fault::new(Call::ReleaseDomain, FaultEffect::Before),
            FaultPoint::Close => Fault::new(Call::Close, FaultEffect::Before),
        };
        self.emulator.arm(fault);
    }

    fn close(&mut self, threads: usize, released: &[u64]) -> Expect {
        let worker = self.worker.take().expect("the worker lives until teardown");
        let answers: Vec<Result<(), Error>> = std::thread::scope(|scope| {
            let closers: Vec<_> = (0..threads).map(|_| scope.spawn(|| worker.close())).collect();
            for run in released {
                self.complete(*run);
            }
            closers.into_iter().map(|closer| closer.join().expect("close does not panic")).collect()
        });
        self.worker = Some(worker);
        let answers: Vec<Expect> = answers.into_iter().map(|answer| self.closed(answer)).collect();
        assert!(answers.iter().all(|answer| *answer == answers[0]), "closers disagree: {answers:?}");
        answers[0].clone()
    }

    fn closed(&self, answer: Result<(), Error>) -> Expect {
        match answer {
            Ok(()) => Expect::CloseOk,
            Err(Error::CloseTimeout { in_flight }) => {
                Expect::CloseTimeout(in_flight.iter().map(|d| d.get()).collect())
            }
            Err(Error::Close(failure)) => match &failure.primary {
                Error::Failed(failure) => Expect::CloseFailedBecause(failure.id.get()),
                Error::Release { .. } | Error::Backend(_) => Expect::CloseFailed { complete: failure.complete },
                other => panic!("close never fails because of {other:?}"),
            },
            Err(error) => panic!("close is never answered with {error:?}"),
        }
    }

    /// Waits until exactly the runs that the model says are in flight hold frames.
    fn settle(&self, world: &World) {
        let wanted: Vec<u64> = world.flights.iter().map(|f| f.id).collect();
        let begun = Instant::now();
        loop {
            let held: Vec<u64> = self.worker().in_flight().iter().map(|d| d.get()).collect();
            if held == wanted {
                return;
            }
            assert!(begun.elapsed() < HANG, "I12: {held:?} are in flight, {wanted:?} should be");
            std::thread::yield_now();
        }
    }

    /// Notes what the tasks of an accepted dispatch must find.
    fn expect_contents(&mut self, shape: &Shape, program: usize, leases: &[usize], id: u64) {
        if shape.resets() {
            for (_, writer) in self.writers.iter_mut().filter(|((p, _), _)| *p == program) {
                *writer = None;
            }
        }
        for domain in leases {
            let before =
                if shape.persistent { self.writers.insert((program, *domain), Some(id)).flatten() } else { None };
            for chip in &shape.programs[program][*domain].workers {
                let byte = before.map_or(0, |run| pattern(run, chip.0));
                self.must_see.insert((RunId(id), *chip, *domain as u64), byte);
            }
        }
    }

    /// An accepted dispatch has registered every retained domain of its program, leased or not (rule 12), and its
    /// leases showed the right epochs (rule 16).
    fn check_opening(&self, world: &World, program: usize, leases: &[usize], id: u64) {
        let epochs = self.epochs.lock();
        for domain in leases {
            let epoch = world.retained[program][*domain].as_ref().map_or(1, |retained| retained.epoch);
            assert_eq!(epochs.get(&(id, *domain)), Some(&epoch), "rule 16: epoch of d{domain} in dispatch {id}");
        }
        drop(epochs);
        if !world.shape.persistent {
            return;
        }
        let retained = world.retained[program].iter().enumerate().filter(|(_, retained)| retained.is_some());
        let wanted: BTreeSet<String> =
            retained.map(|(domain, _)| world.shape.backend_name(program, domain)).collect();
        let events = self.emulator.journal().of_run(RunId(id));
        let registered: BTreeSet<String> = events
            .iter()
            .filter_map(|event| match event {
                EventKind::Alloc { name, .. } | EventKind::Reuse { name, .. } => Some(name.to_string()),
                _ => None,
            })
            .collect();
        assert_eq!(registered, wanted, "rule 12: what dispatch {id} registered");
    }

    fn check(&self, world: &World) {
        let events = self.emulator.journal().events();
        let request = |name: &str| {
            let shape = &world.shape;
            shape.programs.iter().enumerate().find_map(|(program, domains)| {
                let domain = (0..domains.len()).find(|domain| shape.backend_name(program, *domain) == name)?;
                Some(domains[domain].clone())
            })
        };
        let rules = Rules {
            // Said a second time, and not taken from the code under test.
            frames: 2,
            resets: world.shape.resets(),
            request: &request,
            closed: world.status == Status::Closed,
        };
        oracle::check(&events, rules).unwrap_or_else(|breach| {
            let journal: Vec<String> = events.iter().map(ToString::to_string).collect();
            panic!("{breach}\n{}", journal.join("\n"));
        });
        self.check_counts(world, &events);
        self.check_memory(world, &events);
    }

    fn check_counts(&self, world: &World, events: &[crate::Event]) {
        let allocated = events.iter().filter(|e| matches!(e.kind, EventKind::Alloc { .. })).count() as u64;
        if !world.disturbed {
            assert_eq!(allocated, world.allocations, "I3: allocations");
        }
        let made = buffers_made(&self.emulator) - self.buffers_before;
        assert_eq!(made as u64, world.staging_made, "I11: staging buffers");
        if world.status == Status::Closed {
            let stats = self.emulator.stats();
            assert_eq!((stats.domains, stats.host_buffers), (0, 0), "I4, I11: {stats:?}");
        }
    }

    fn check_memory(&self, world: &World, events: &[crate::Event]) {
        let seen = self.seen.lock();
        for (key, byte) in &self.must_see {
            if let Some(found) = seen.get(key) {
                assert!(found.iter().all(|b| b == byte), "I8: {key:?} found {found:?}, should be all {byte}");
            } else {
                let over = events.iter().any(|e| matches!(e.kind, EventKind::Ended(run, true) if run == key.0));
                assert!(!over, "{key:?} has succeeded without running its task");
            }
        }
        drop(seen);
        if !world.shape.padded {
            return;
        }
        let freed: BTreeSet<DomainId> = events
            .iter()
            .filter_map(|e| match &e.kind {
                EventKind::Free { domain, .. } => Some(*domain),
                _ => None,
            })
            .collect();
        for event in events {
            let EventKind::Alloc { domain, window_bytes, chips, .. } = &event.kind else { continue };
            if freed.contains(domain) {
                continue;
            }
            for chip in chips {
                let mut padding = vec![0u8; 4096 - *window_bytes as usize];
                if self.emulator.peek(*domain, *chip, *window_bytes, &mut padding).is_ok() {
                    assert!(padding.iter().all(|b| *b == 0xEE), "I8: padding of {domain} on {chip} was written");
                }
            }
        }
    }
}

fn shown(dispatch: &Dispatch, outcome: Option<&Result<(), Error>>) -> Expect {
    assert_eq!(dispatch.is_done(), outcome.is_some(), "is_done and wait agree");
    Expect::Shows(match outcome {
        None => Shown::Running,
        Some(Ok(())) => Shown::Succeeded,
        Some(Err(Error::Failed(failure))) => {
            assert_eq!(failure.id, dispatch.id(), "a handle reports its own dispatch");
            Shown::Failed
        }
        Some(Err(error)) => panic!("a dispatch never ends with {error:?}"),
    })
}
