//! Guards of handles, frames, cleanup and close that no scenario names: each test fails where its guard is taken out.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use pto_dispatch::{
    Args, Build, Dispatch, Error, Options, Parameter, PreparedWorker, Program, ProgramResult, ProgramSpec, Staging,
};
use pto_mock::{Completion, Event, EventKind, Fault, FaultEffect};
use pto_simpler_sys::{
    Access, Backend, Call, CallConfig, ChipId, DataType, DomainRequest, FailureKind, Family, Limits, NamedBuffer,
    RunId, RuntimeFailure,
};
use pto_tests::gate::{Gate, HANG_GUARD};
use pto_tests::parked;
use pto_tests::rig::{Bench, Rig, any_backend, emulator_only, submits};
use pto_tests::scenario::{DOMAIN, add, f0, f1, f2, program, signal_request, store};
use pto_tests::spy::{Seen, Spy};

fn no_args() -> Args {
    Args::new()
}

fn told_to_fail() -> RuntimeFailure {
    RuntimeFailure::new(Call::Run, "RuntimeError", "told to fail").with_kind(FailureKind::Task)
}

/// Leases `comm_d0` without tasks.
fn leasing(request: DomainRequest) -> Arc<dyn Program> {
    program(ProgramSpec::new("leasing"), move |build, _| {
        build.lease(DOMAIN, &request)?;
        Ok(())
    })
}

/// Rule 20: what is ours is given back before the backend closes, and not left to its sweep.
#[test]
fn close_gives_back_tensors_buffers_and_staging_before_the_backend_closes() {
    let Some(bench) = emulator_only("guards: own things at close") else { return };
    let request = signal_request(64);
    let spec = ProgramSpec::new("owning").intermediate(8).intermediate(16);
    let owning = program(spec, move |build, _| {
        build.lease(DOMAIN, &request)?;
        Ok(())
    });
    let options = Options::persistent().staging(Staging::Retained { cap_bytes: 64 });
    let rig = bench.prepare(&options, &[owning], bench.builder());
    let tensors = [rig.worker.alloc(ChipId(0), 8).unwrap(), rig.worker.alloc(ChipId(1), 8).unwrap()];
    rig.worker.call(&no_args()).unwrap();
    rig.worker.call(&no_args()).unwrap();
    // Four intermediates, two for each frame, and one retained staging buffer.
    assert_eq!(rig.emulator().stats().host_buffers, 5);
    rig.worker.close().unwrap();
    let journal = rig.journal();
    let closing = journal.position(|e| *e == EventKind::CloseBegin).unwrap();
    let before =
        |what: fn(&EventKind) -> bool| journal.events().iter().filter(|e| e.seq < closing && what(&e.kind)).count();
    assert_eq!(before(|e| matches!(e, EventKind::DeviceFree(_))), 2, "{journal}");
    assert_eq!(before(|e| matches!(e, EventKind::BufferRelease { .. })), 5, "{journal}");
    drop(tensors);
    bench.assert_clean();
}

/// Rule 7: an end that is reported before its submission has returned is not lost.
#[test]
fn an_end_reported_before_the_submission_returns_is_kept() {
    let bench = any_backend("guards: early end");
    let rig = bench.prepare_any(&Options::persistent(), &[f1()], 2);
    rig.spy.return_late.store(true, Ordering::SeqCst);
    for _ in 0..4 {
        let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
        // The submission returned after the end, so nothing is left to wait for.
        assert!(dispatch.is_done(), "the end was lost");
        dispatch.wait().unwrap();
    }
    assert_eq!(rig.worker.in_flight(), []);
    assert_eq!(rig.worker.stats(rig.ids[0]).unwrap().staging_buffers, 3);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 7: the outcome is published before the frame is free.
#[test]
fn a_frame_is_free_only_when_the_outcome_is_published() {
    let Some(bench) = emulator_only("guards: outcome before frame") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder().journal(false));
    rig.hold_runs();
    // The window between the two steps is short; many tries make it all but certain to be hit.
    for run in 1..=3000 {
        let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
        rig.complete(run);
        while !rig.worker.in_flight().is_empty() {
            std::hint::spin_loop();
        }
        assert!(dispatch.is_done(), "the frame of dispatch {run} was free before its outcome was published");
    }
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// `check_blocking`: a thread that may not block is told so at once, by every call that would wait.
#[test]
fn a_thread_that_may_not_block_is_refused() {
    let Some(bench) = emulator_only("guards: blocking") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    rig.hold_runs();
    let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let buffer = rig.worker.create_buffer(8).unwrap();
    *rig.spy.refuse_blocking.lock() = Some(std::thread::current().id());
    let refused = |what: &str, result: Result<(), Error>| {
        assert!(matches!(&result, Err(Error::Backend(e)) if e.family() == Family::Misuse), "{what}: {result:?}");
    };
    refused("submit", rig.worker.submit(rig.ids[0], &no_args()).map(drop));
    refused("try_submit", rig.worker.try_submit(rig.ids[0], &no_args()).map(drop));
    refused("wait", dispatch.wait());
    refused("wait_timeout", dispatch.wait_timeout(Duration::MAX));
    refused("close", rig.worker.close());
    refused("close_timeout", rig.worker.close_timeout(Duration::ZERO));
    refused("alloc", rig.worker.alloc(ChipId(0), 8).map(drop));
    refused("release", buffer.release());
    let fresh = Spy::new(bench.builder().build().unwrap());
    *fresh.refuse_blocking.lock() = Some(std::thread::current().id());
    refused("prepare", PreparedWorker::prepare(&[f0()], &Options::ordinary(), Arc::clone(&fresh) as _).map(drop));
    assert_eq!(fresh.seen(), [Seen::Close]);
    // Neither of these waits.
    assert!(!dispatch.is_done() && dispatch.outcome().is_none());
    assert!(matches!(dispatch.wait_timeout(Duration::ZERO), Err(Error::WaitTimeout { .. })));
    *rig.spy.refuse_blocking.lock() = None;
    // Refused before anything was done: close has not even begun.
    let second = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    rig.complete(1);
    rig.complete(2);
    dispatch.wait().unwrap();
    second.wait().unwrap();
    assert_eq!(rig.spy.count(|seen| matches!(seen, Seen::Submit(_))), 2);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// `Drop` on a thread that may not block hands the close to another one.
#[test]
fn dropped_where_it_may_not_block_the_worker_closes_elsewhere() {
    let Some(bench) = emulator_only("guards: drop elsewhere") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f1()], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    let (spy, emulator) = (Arc::clone(&rig.spy), rig.shared_emulator());
    emulator.arm(Fault::new(Call::ReleaseDomain, FaultEffect::Hang));
    *spy.refuse_blocking.lock() = Some(std::thread::current().id());
    // Returns although the release hangs.
    drop(rig);
    let seen = |what: &EventKind| {
        let happened = |events: &[Event]| events.iter().any(|e| e.kind == *what);
        assert!(emulator.journal().wait_until_for(HANG_GUARD / 4, happened), "nobody closes the worker: no {what}");
    };
    seen(&EventKind::Hung { call: Call::ReleaseDomain, chip: None });
    emulator.release_hangs();
    seen(&EventKind::Close { ok: true });
    assert_eq!((spy.closes(), emulator.journal().frees()), (1, 1));
    bench.assert_clean();
}

/// A backend that does not close is kept for ever: collecting it could end the process (rule 20).
#[test]
fn a_worker_that_will_not_close_is_leaked_and_one_that_closes_is_not() {
    let Some(bench) = emulator_only("guards: leak") else { return };
    for close_fails in [false, true] {
        let rig = bench.prepare(&Options::persistent(), &[f1()], bench.builder());
        rig.worker.call(&no_args()).unwrap();
        let backend = Arc::downgrade(&rig.spy);
        let emulator = rig.shared_emulator();
        if close_fails {
            emulator.arm(Fault::new(Call::Close, FaultEffect::Before));
        }
        drop(rig);
        assert_eq!(backend.upgrade().is_some(), close_fails, "close fails: {close_fails}");
        let report = emulator.abandon();
        assert_eq!(report.left, Vec::<String>::new());
    }
}

/// A close with a deadline bounds the backend's own calls too, and goes on when called again.
#[test]
fn a_bounded_close_does_not_wait_for_a_hanging_backend() {
    let Some(bench) = emulator_only("guards: bounded close") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f1()], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    rig.emulator().arm(Fault::new(Call::Close, FaultEffect::Hang));
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let closing = scope.spawn(|| rig.worker.close_timeout(Duration::from_millis(1)));
        rig.emulator().faults().wait_hung(1);
        let closed = closing.join().unwrap();
        assert!(matches!(&closed, Err(Error::CloseTimeout { in_flight }) if in_flight.is_empty()), "{closed:?}");
        assert!(closed.unwrap_err().may_retry());
        rig.emulator().release_hangs();
        rig.worker.close().unwrap();
    });
    assert_eq!((rig.spy.closes(), rig.spy.releases().len()), (1, 1));
    bench.assert_clean();
}

/// Two held runs of a worker without domains.
fn two_held(rig: &Rig) -> [Dispatch; 2] {
    rig.hold_runs();
    [(), ()].map(|()| rig.worker.submit(rig.ids[0], &no_args()).unwrap())
}

/// Fails a held run and waits until that is known.
fn fail(rig: &Rig, run: u64, dispatch: &Dispatch) {
    rig.emulator().fail(RunId(run), told_to_fail()).unwrap();
    while !dispatch.is_done() {
        std::thread::yield_now();
    }
}

/// Rule 20: a failure that was read from a handle, in whatever way, is not reported by close again; one that was not
/// is, and counts as delivered then.
#[test]
fn a_failure_is_delivered_by_each_way_of_reading_it() {
    let Some(bench) = emulator_only("guards: delivery") else { return };
    type Read = fn(&Dispatch) -> Option<Result<(), Error>>;
    let ways: [(&str, Read, bool); 4] = [
        ("wait", |d| Some(d.wait()), true),
        ("wait_timeout", |d| Some(d.wait_timeout(Duration::ZERO)), true),
        ("outcome", Dispatch::outcome, true),
        ("nothing", |_| None, false),
    ];
    for options in [Options::ordinary(), Options::persistent()] {
        for (way, read, delivers) in ways {
            let rig = bench.prepare(&options, &[f0()], bench.builder());
            rig.hold_runs();
            let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
            fail(&rig, 1, &dispatch);
            let outcome = read(&dispatch);
            assert!(outcome.is_none_or(|outcome| outcome.is_err()));
            let closed = rig.worker.close();
            assert_eq!(closed.is_ok(), delivers, "{way}: {closed:?}");
            if let Err(Error::Close(report)) = closed {
                let Error::Failed(failure) = &report.primary else { panic!("{report}") };
                assert_eq!(failure.id, dispatch.id());
                assert!(report.others.is_empty(), "reported once: {report}");
                assert!(failure.is_delivered(), "the caller of close has it");
            }
        }
    }
    bench.assert_clean();
}

/// Rule 17: the first failure is the one that is kept, for submitters and for close.
#[test]
fn a_later_failure_does_not_replace_the_poisoning_one() {
    let Some(bench) = emulator_only("guards: first poison") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f0()], bench.builder());
    let [first, second] = two_held(&rig);
    fail(&rig, 1, &first);
    fail(&rig, 2, &second);
    let (first_id, second_id) = (first.id(), second.id());
    drop((first, second));
    let Err(Error::Close(report)) = rig.worker.close() else { panic!("two failures nobody has seen") };
    assert!(matches!(&report.primary, Error::Failed(f) if f.id == first_id), "{report}");
    assert!(matches!(&report.others[..], [Error::Failed(f)] if f.id == second_id), "{report}");

    let rig = bench.prepare(&Options::persistent(), &[f0()], bench.builder());
    let [first, second] = two_held(&rig);
    fail(&rig, 1, &first);
    fail(&rig, 2, &second);
    rig.until_idle();
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    assert!(matches!(&refused, Err(Error::Poisoned(f)) if f.id == first.id()), "{refused:?}");
    // The second one is still to be told, and does not push itself before the first as the cause of the poison.
    let Err(Error::Close(report)) = rig.worker.close() else { panic!("the second failure was seen by nobody") };
    assert!(matches!(&report.primary, Error::Failed(f) if f.id == second.id()), "{report}");
    bench.assert_clean();
}

/// A program whose builder may call into its own worker.
struct Inside {
    worker: Arc<OnceLock<Weak<PreparedWorker>>>,
}

impl Inside {
    fn prepare(
        bench: &Bench,
        spec: ProgramSpec,
        build: impl for<'b> Fn(&PreparedWorker, &Build<'b>, &Args) -> ProgramResult + Send + Sync + 'static,
    ) -> (Arc<PreparedWorker>, Rest) {
        let inside = Self { worker: Arc::default() };
        let cell = Arc::clone(&inside.worker);
        let calling = program(spec, move |b, args| {
            let worker = cell.get().and_then(Weak::upgrade).unwrap();
            build(&worker, b, args)
        });
        let emulator = bench.builder().build().unwrap();
        let backend = Arc::clone(&emulator) as Arc<dyn Backend>;
        let options = Options::ordinary();
        let worker = Arc::new(PreparedWorker::prepare(&[calling, f0()], &options, backend).unwrap());
        inside.worker.set(Arc::downgrade(&worker)).unwrap();
        (worker, Rest { emulator })
    }
}

/// The emulator behind a worker that a builder calls into.
struct Rest {
    emulator: Arc<pto_mock::Emulator>,
}

/// Rule 21: every call that would wait for the build it is made in is refused, before any lock.
#[test]
fn everything_that_waits_is_refused_inside_a_builder() {
    let Some(bench) = emulator_only("guards: inside a builder") else { return };
    let waited: Arc<Mutex<Option<Dispatch>>> = Arc::default();
    let tensors: Arc<Mutex<Vec<pto_dispatch::DeviceTensor>>> = Arc::default();
    let (running, theirs) = (Arc::clone(&waited), Arc::clone(&tensors));
    let done = Arc::new(AtomicBool::new(false));
    let terminal = Arc::clone(&done);
    let (worker, rest) = Inside::prepare(&bench, ProgramSpec::new("inside"), move |worker, _, _| {
        let running = running.lock().unwrap();
        let dispatch = running.as_ref().unwrap();
        let (tensor, spare) = {
            let mut tensors = theirs.lock().unwrap();
            (tensors[0].clone(), tensors.remove(1))
        };
        let host = worker.create_buffer(8)?;
        let mut attempts = vec![
            ("alloc", worker.alloc(ChipId(0), 8).map(drop)),
            ("free", worker.free(spare)),
            ("copy_to", tensor.copy_to(&host)),
            ("copy_from", tensor.copy_from(&host)),
        ];
        if terminal.load(Ordering::SeqCst) {
            // These only read.
            assert!(dispatch.is_done() && dispatch.outcome().unwrap().is_ok());
            dispatch.wait().unwrap();
            dispatch.wait_timeout(Duration::ZERO).unwrap();
        } else {
            assert!(!dispatch.is_done() && dispatch.outcome().is_none());
            attempts.push(("wait", dispatch.wait()));
            attempts.push(("wait_timeout", dispatch.wait_timeout(Duration::MAX)));
        }
        for (name, attempt) in attempts {
            assert!(matches!(attempt, Err(Error::Reentrant { .. })), "{name}: {attempt:?}");
        }
        Ok(())
    });
    for _ in 0..3 {
        let tensor = worker.alloc(ChipId(0), 8).unwrap();
        tensors.lock().unwrap().push(tensor);
    }
    let ids: Vec<_> = worker.programs().collect();
    rest.emulator.set_completion(Completion::ByHand);
    let dispatch = worker.submit(ids[1], &no_args()).unwrap();
    *waited.lock().unwrap() = Some(dispatch.clone());
    let second = worker.submit(ids[0], &no_args()).unwrap();
    rest.emulator.complete(RunId(1)).unwrap();
    rest.emulator.complete(RunId(2)).unwrap();
    dispatch.wait().unwrap();
    second.wait().unwrap();
    done.store(true, Ordering::SeqCst);
    rest.emulator.set_completion(Completion::Free);
    worker.run(ids[0], &no_args()).unwrap();
    worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 21: a host buffer dropped in a builder goes when the build is over, accepted or rejected, and not at close.
#[test]
fn a_buffer_dropped_in_a_builder_is_released_after_the_build() {
    let Some(bench) = emulator_only("guards: deferred release") else { return };
    let spec = ProgramSpec::new("dropping").parameter(Parameter::scalar("fail"));
    let (worker, rest) = Inside::prepare(&bench, spec, |worker, _, args| {
        drop(worker.create_buffer(8)?);
        if args.scalar_at(0)? == 1 { Err("told to fail".into()) } else { Ok(()) }
    });
    let id = worker.programs().next().unwrap();
    rest.emulator.set_completion(Completion::ByHand);
    let held = worker.submit(id, &no_args().scalar(0)).unwrap();
    assert_eq!(rest.emulator.stats().host_buffers, 0, "accepted");
    assert!(worker.submit(id, &no_args().scalar(1)).is_err());
    assert_eq!(rest.emulator.stats().host_buffers, 0, "rejected");
    rest.emulator.complete(RunId(1)).unwrap();
    held.wait().unwrap();
    worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 6: a device tensor is held by its dispatch, as an argument or because the builder used it, and no longer.
#[test]
fn device_tensors_are_held_until_their_dispatch_is_terminal() {
    let Some(bench) = emulator_only("guards: device tensors") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    let other = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    let foreign = other.worker.alloc(ChipId(0), 4).unwrap();
    let refused = rig.worker.free(foreign);
    assert!(matches!(&refused, Err(Error::Build(text)) if text.contains("another worker")), "{refused:?}");
    drop((rig, other));
    for as_argument in [true, false] {
        let brought: Arc<Mutex<Option<pto_dispatch::DeviceTensor>>> = Arc::default();
        let bring = Arc::clone(&brought);
        let mut spec = ProgramSpec::new("resident").callable(add());
        if as_argument {
            spec = spec.parameter(Parameter::device("x", 4));
        }
        let resident = program(spec, move |build, args| {
            let bring = bring.lock().unwrap().take();
            let tensor = match &bring {
                Some(tensor) => tensor,
                None => args.device_at(0)?,
            };
            let tensor = build.tensor(tensor, &[1], DataType::Int32, Access::InOut)?;
            Ok(build.task(0)?.tensor(tensor).scalar(1).submit(ChipId(0))?)
        });
        let rig = bench.prepare(&Options::ordinary(), &[resident], bench.builder());
        let tensor = rig.worker.alloc(ChipId(0), 4).unwrap();
        let device = tensor.clone();
        rig.hold_runs();
        let args = if as_argument {
            no_args().device(&tensor)
        } else {
            *brought.lock().unwrap() = Some(tensor.clone());
            no_args()
        };
        let dispatch = rig.worker.submit(rig.ids[0], &args).unwrap();
        drop((args, tensor));
        // The last clone outside the dispatch. A backend would refuse it too, in its own words.
        let freed = rig.worker.free(device);
        assert!(matches!(freed, Err(Error::BufferInUse)), "as an argument: {as_argument}: {freed:?}");
        rig.complete(1);
        dispatch.wait().unwrap();
        // And once it is terminal nothing holds it any more.
        rig.until_idle();
        rig.emulator().set_completion(Completion::Free);
        let tensor = rig.worker.alloc(ChipId(0), 4).unwrap();
        if as_argument {
            rig.worker.call(&no_args().device(&tensor)).unwrap();
        } else {
            *brought.lock().unwrap() = Some(tensor.clone());
            rig.worker.call(&no_args()).unwrap();
        }
        rig.worker.free(tensor).unwrap();
        rig.worker.close().unwrap();
    }
    bench.assert_clean();
}

/// Rule 4: the program's own configuration is the default, a dispatch's own takes its place for that dispatch only.
#[test]
fn a_dispatch_runs_under_its_own_configuration_or_the_programs() {
    let bench = any_backend("guards: configuration");
    let seen: Arc<Mutex<Vec<u32>>> = Arc::default();
    let noted = Arc::clone(&seen);
    let mut spec = ProgramSpec::new("configured");
    spec.config.aicpu_threads = 3;
    let configured = program(spec, move |build, _| {
        noted.lock().unwrap().push(build.config().aicpu_threads);
        Ok(())
    });
    let rig = bench.prepare_any(&Options::ordinary(), &[configured], 2);
    let mut own = CallConfig::new();
    own.aicpu_threads = 5;
    rig.worker.run(rig.ids[0], &no_args()).unwrap();
    rig.worker.submit_with(rig.ids[0], &no_args(), &own).unwrap().wait().unwrap();
    rig.until_idle();
    rig.worker.try_submit_with(rig.ids[0], &no_args(), &own).unwrap().wait().unwrap();
    for _ in 0..2 {
        rig.worker.run(rig.ids[0], &no_args()).unwrap();
    }
    assert_eq!(*seen.lock().unwrap(), [3, 5, 5, 3, 3]);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 15: where one staging buffer cannot be had, those already made go back at once, and the worker is usable.
#[test]
fn half_made_staging_goes_back() {
    let Some(bench) = emulator_only("guards: half-made staging") else { return };
    for call in [Call::CreateBuffer, Call::FillBuffer] {
        let rig = bench.prepare(&Options::persistent(), &[f2()], bench.builder());
        rig.worker.call(&no_args()).unwrap();
        rig.emulator().arm(Fault::new(call, FaultEffect::Before).nth(2));
        let failed = rig.worker.call(&no_args());
        assert!(matches!(&failed, Err(Error::Backend(e)) if e.call() == call), "{failed:?}");
        assert_eq!(rig.emulator().stats().host_buffers, 0, "{call:?}");
        rig.worker.call(&no_args()).unwrap();
        rig.worker.close().unwrap();
    }
    bench.assert_clean();
}

/// Rule 15: staging that was given back does not count towards the peak.
#[test]
fn the_peak_of_staging_is_that_of_one_time() {
    let bench = any_backend("guards: peak");
    let rig = bench.prepare_any(&Options::persistent(), &[f1()], 2);
    for _ in 0..4 {
        rig.worker.call(&no_args()).unwrap();
        rig.until_idle();
    }
    // Rejected after its staging was made.
    let stats = rig.worker.stats(rig.ids[0]).unwrap();
    assert_eq!((stats.staging_buffers, stats.peak_staging_bytes), (3, 64));
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 15: a rejected dispatch gives its staging back, once, and it does not count from then on.
#[test]
fn a_rejected_dispatch_gives_its_staging_back() {
    let Some(bench) = emulator_only("guards: rejected staging") else { return };
    let spec = ProgramSpec::new("failing").parameter(Parameter::scalar("fail"));
    let failing = program(spec, |build, args| {
        if args.scalar_at(0)? == 1 {
            return Err("told to fail".into());
        }
        build.lease(DOMAIN, &signal_request(64))?;
        Ok(())
    });
    let rig = bench.prepare(&Options::persistent(), &[failing], bench.builder());
    rig.worker.call(&no_args().scalar(0)).unwrap();
    for fail in [1, 1, 0] {
        assert_eq!(rig.worker.call(&no_args().scalar(fail)).is_err(), fail == 1);
        rig.until_idle();
        assert_eq!(rig.emulator().stats().host_buffers, 0);
    }
    assert_eq!(rig.worker.stats(rig.ids[0]).unwrap().peak_staging_bytes, 64);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 15: retained staging keeps what fits under its cap and makes the rest for each dispatch.
#[test]
fn retained_staging_respects_its_cap() {
    let Some(bench) = emulator_only("guards: staging cap") else { return };
    let buffers = [64, 16, 4096].iter().enumerate().map(|(i, n)| NamedBuffer::bytes(format!("b{i}"), *n));
    let request = DomainRequest::packed([0, 1], buffers.collect::<Vec<_>>());
    for (cap_bytes, kept) in [(0, 0), (63, 1), (64, 1), (79, 1), (80, 2), (4175, 2), (4176, 3)] {
        let options = Options::persistent().staging(Staging::Retained { cap_bytes });
        let builder = bench.builder().dirty_host_buffers(true);
        let rig = bench.prepare(&options, &[leasing(request.clone())], builder);
        for _ in 0..3 {
            rig.worker.call(&no_args()).unwrap();
            rig.until_idle();
        }
        let made = rig.worker.stats(rig.ids[0]).unwrap().staging_buffers;
        assert_eq!(rig.emulator().stats().host_buffers, kept, "cap {cap_bytes}");
        assert_eq!(made as usize, kept + 2 * (3 - kept), "cap {cap_bytes}");
        let zero = |e: &EventKind| matches!(e, EventKind::Copy { zero: true, .. });
        assert_eq!(rig.journal().count(zero), 12, "cap {cap_bytes}");
        rig.worker.close().unwrap();
    }
    bench.assert_clean();
}

/// Rule 5: a submitter in line goes on when the build before it is published, without waiting for an end.
#[test]
fn the_next_in_line_is_woken_by_a_published_and_by_a_rejected_build() {
    for fails in [false, true] {
        let Some(bench) = emulator_only("guards: line wakes") else { return };
        let gate = Gate::new();
        let inside = gate.clone();
        let spec = ProgramSpec::new("gated").parameter(Parameter::scalar("what"));
        let gated = program(spec, move |_, args| match args.scalar_at(0)? {
            0 => Ok(()),
            what => {
                inside.pass();
                if what == 2 { Err("told to fail".into()) } else { Ok(()) }
            }
        });
        let rig = bench.prepare(&Options::ordinary(), &[gated], bench.builder());
        rig.hold_runs();
        std::thread::scope(|scope| {
            let _rescue = rig.rescue();
            let submit = |what| rig.worker.submit(rig.ids[0], &no_args().scalar(what));
            let first = parked::spawn(scope, move || submit(if fails { 2 } else { 1 }));
            gate.wait_arrived(1);
            let second = parked::spawn(scope, move || submit(0));
            second.wait_parked();
            gate.open();
            let (first, second) = (first.join(), second.join().unwrap());
            assert_eq!(first.is_err(), fails);
            assert!(!second.is_done(), "every run is held");
        });
        rig.emulator().set_completion(Completion::Free);
        for id in rig.worker.in_flight() {
            rig.complete(id.get());
        }
        rig.worker.close().unwrap();
        bench.assert_clean();
    }
}

/// Rule 17: whoever is next in line finds the worker poisoned before it gets the frame of the failed build.
#[test]
fn the_next_in_line_never_builds_after_a_poisoning_build() {
    let Some(bench) = emulator_only("guards: poison before frame") else { return };
    for _ in 0..20 {
        let gate = Gate::new();
        let inside = gate.clone();
        let built = Arc::new(AtomicBool::new(false));
        let noted = Arc::clone(&built);
        let spec = ProgramSpec::new("gated").parameter(Parameter::scalar("fail"));
        let gated = program(spec, move |build, args| {
            if args.scalar_at(0)? == 0 {
                noted.store(true, Ordering::SeqCst);
                return Ok(());
            }
            build.lease(DOMAIN, &signal_request(64))?;
            inside.pass();
            Err("told to fail".into())
        });
        let rig = bench.prepare(&Options::persistent(), &[gated], bench.builder());
        std::thread::scope(|scope| {
            let _rescue = rig.rescue();
            let submit = |fail| rig.worker.submit(rig.ids[0], &no_args().scalar(fail)).map(drop);
            let first = parked::spawn(scope, move || submit(1));
            gate.wait_arrived(1);
            let second = parked::spawn(scope, move || submit(0));
            second.wait_parked();
            gate.open();
            let (first, second) = (first.join(), second.join());
            assert!(matches!(first, Err(Error::Program { .. })), "{first:?}");
            assert!(matches!(second, Err(Error::Poisoned(_))), "{second:?}");
        });
        assert!(!built.load(Ordering::SeqCst), "a build began after the poison");
        rig.worker.close().unwrap();
    }
    bench.assert_clean();
}

/// `try_submit` waits for nothing in the backend, however the submissions of other threads fall.
#[test]
fn try_submit_never_waits_in_the_backend_beside_other_submitters() {
    let Some(bench) = emulator_only("guards: try beside submit") else { return };
    for options in [Options::ordinary(), Options::persistent()] {
        let rig = bench.prepare(&options, &[f1(), f0(), f1()], bench.builder());
        // Warm the first, so that it resets where that is on; the third stays cold until the races begin.
        rig.worker.run(rig.ids[0], &no_args()).unwrap();
        let mut tried = Vec::new();
        std::thread::scope(|scope| {
            let _rescue = rig.rescue();
            let submitter = scope.spawn(|| {
                for round in 0..150 {
                    rig.worker.submit(rig.ids[round % 3], &no_args()).unwrap();
                }
            });
            while !submitter.is_finished() {
                for id in &rig.ids {
                    match rig.worker.try_submit(*id, &no_args()) {
                        Ok(dispatch) => tried.push(RunId(dispatch.id().get())),
                        Err(Error::WouldBlock { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            submitter.join().unwrap();
        });
        let journal = rig.journal();
        let waits = journal.select(|e| matches!(e, EventKind::Wait { run, .. } if tried.contains(run)));
        assert_eq!(waits, [], "a try_submit waited");
        rig.worker.close().unwrap();
    }
    bench.assert_clean();
}

/// Buffers that a user or a program gets are zeroed, however the backend hands them out.
#[test]
fn buffers_and_intermediates_are_zero_on_a_backend_whose_memory_is_dirty() {
    let Some(bench) = emulator_only("guards: zeroed buffers") else { return };
    let spec = ProgramSpec::new("reading")
        .callable(pto_tests::scenario::peek())
        .callable(pto_mock_copy())
        .intermediate(64)
        .parameter(Parameter::host("out", 64));
    let reading = program(spec, |build, args| {
        let from = build.tensor(build.intermediate(0)?, &[16], DataType::Int32, Access::Input)?;
        let to = build.tensor(args.host_at(0)?, &[16], DataType::Int32, Access::Output)?;
        Ok(build.task(1)?.tensor(from).tensor(to).submit(ChipId(0))?)
    });
    let rig = bench.prepare(&Options::ordinary(), &[reading], bench.builder().dirty_host_buffers(true));
    rig.hold_runs();
    let outs = [rig.worker.create_buffer(64).unwrap(), rig.worker.create_buffer(64).unwrap()];
    for out in &outs {
        let mut bytes = [1; 64];
        out.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 64], "a new buffer is dirty");
        out.fill(7).unwrap();
    }
    // Both frames.
    let dispatches = outs.each_ref().map(|out| rig.worker.submit(rig.ids[0], &no_args().host(out)).unwrap());
    for (run, dispatch) in (1..).zip(&dispatches) {
        rig.complete(run);
        dispatch.wait().unwrap();
    }
    for out in &outs {
        let mut bytes = [1; 64];
        out.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 64], "a new intermediate is dirty");
    }
    drop(outs);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

fn pto_mock_copy() -> pto_simpler_sys::CallableSpec {
    let name = pto_mock::kernels::COPY;
    pto_simpler_sys::CallableSpec::chip(name, pto_mock::kernels::signature(name))
}

/// A closed backend is asked for nothing more: what is left of a worker is gone with it.
#[test]
fn after_close_buffers_go_without_a_call() {
    let bench = any_backend("guards: buffers after close");
    let rig = bench.prepare_any(&Options::ordinary(), &[f0()], 2);
    let (released, dropped) = (rig.worker.create_buffer(8).unwrap(), rig.worker.create_buffer(8).unwrap());
    rig.worker.close().unwrap();
    let before = rig.spy.seen().len();
    released.release().unwrap();
    drop(dropped);
    assert_eq!(rig.spy.seen()[before..], [], "the backend was called after its close");
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 1: limits are checked before the backend starts, over all programs together.
#[test]
fn too_many_callables_and_empty_intermediates_are_refused_before_the_start() {
    let Some(bench) = emulator_only("guards: limits of preparing") else { return };
    let mut limits = Limits::default();
    limits.callables = 1;
    for (permitted, programs) in [(true, vec![f0()]), (false, vec![f0(), f1()])] {
        let emulator = bench.builder().limits(limits).build().unwrap();
        let backend = Arc::clone(&emulator) as Arc<dyn Backend>;
        let prepared = PreparedWorker::prepare(&programs, &Options::ordinary(), backend).map(drop);
        match prepared {
            Ok(()) => assert!(permitted),
            Err(Error::TooManyCallables { requested: 2, permitted: 1 }) => assert!(!permitted),
            Err(error) => panic!("{error:?}"),
        }
        let registered = emulator.journal().count(|e| matches!(e, EventKind::Register { .. }));
        assert_eq!(registered, usize::from(permitted));
    }
    let empty = program(ProgramSpec::new("empty").callable(store()).intermediate(0), |_, _| Ok(()));
    let backend = bench.builder().build().unwrap();
    let error = PreparedWorker::prepare(&[empty], &Options::ordinary(), backend).unwrap_err();
    assert!(matches!(&error, Error::Declaration { message, .. } if message.contains("0 bytes")), "{error:?}");
    let mut spec = ProgramSpec::new("profiled").callable(store());
    spec.config.swimlane = true;
    let backend = bench.builder().build().unwrap();
    let error =
        PreparedWorker::prepare(&[program(spec, |_, _| Ok(()))], &Options::ordinary(), backend).unwrap_err();
    assert!(matches!(&error, Error::Declaration { message, .. } if message.contains("output_prefix")), "{error:?}");
    bench.assert_clean();
}

/// A run whose end fails to free what nothing else can: the worker takes no more work, and says so (rule 18).
#[test]
fn submits_are_counted_only_where_the_backend_accepted() {
    let Some(bench) = emulator_only("guards: accepted after an error") else { return };
    for effect in [FaultEffect::After, FaultEffect::NoReply] {
        let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
        rig.hold_runs();
        rig.emulator().arm(Fault::new(Call::Submit, effect));
        let failed = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
        assert!(matches!(&failed, Err(Error::Backend(e)) if e.call() == Call::Submit), "{failed:?}");
        // The run goes on, and holds its frame until its end.
        assert_eq!((submits(&rig.journal()), rig.worker.in_flight().len()), (1, 1), "{effect:?}");
        rig.complete(1);
        rig.until_idle();
        rig.worker.close().unwrap();
    }
    bench.assert_clean();
}
