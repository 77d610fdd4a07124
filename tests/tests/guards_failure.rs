//! Guards of failures that no scenario names: what is kept, what is told to whom, and what a lying backend gets.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::sync::{Arc, Mutex};

use pto_dispatch::{Args, Error, HostBuffer, Options, Parameter, PreparedWorker, Program, ProgramSpec};
use pto_mock::mocks::{MockBackend, MockOrchestrator};
use pto_mock::{EventKind, Fault, FaultEffect, FreeCause};
use pto_simpler_sys::{
    Backend, BackendError, BackendPhase, BufferWindow, Call, Capabilities, ChipId, CopyResult, Depth, DomainId,
    DomainRequest, DomainState, FailureKind, Family, HostBufferId, MemberWindow, NamedBuffer, Negotiated,
    RunEvents, RunId, RunOutcome, RunState, RuntimeFailure, SubmitError,
};
use pto_tests::gate::{Gate, OpenOnDrop};
use pto_tests::parked;
use pto_tests::rig::{emulator_only, submits};
use pto_tests::scenario::{DOMAIN, f0, f1, program, signal_request};
use pto_tests::spy::Seen;

fn no_args() -> Args {
    Args::new()
}

fn failure(kind: FailureKind, fatal: bool) -> RuntimeFailure {
    RuntimeFailure::new(Call::Run, "RuntimeError", "told to fail").with_kind(kind).with_fatal(fatal)
}

/// Rule 18: a failure that the backend calls fatal ends the worker in both modes, whatever kind it is, and the same
/// goes for a fatal failure of the cleanup that rides along.
#[test]
fn a_fatal_failure_ends_an_ordinary_worker() {
    let Some(bench) = emulator_only("guards: fatal") else { return };
    for (kind, fatal, cleanup, ends) in [
        (FailureKind::Call, false, false, false),
        (FailureKind::Task, false, false, false),
        (FailureKind::Call, true, false, true),
        (FailureKind::Task, false, true, true),
    ] {
        let rig = bench.prepare(&Options::ordinary(), &[f1()], bench.builder());
        rig.hold_runs();
        let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
        if cleanup {
            rig.emulator().arm(Fault::new(Call::Run, FaultEffect::After).on_chip(0).fatal());
        }
        rig.emulator().fail(RunId(1), failure(kind, fatal)).unwrap();
        let Err(Error::Failed(first)) = dispatch.wait() else { panic!("it failed") };
        assert_eq!((first.secondary.len(), first.final_for_worker), (usize::from(cleanup), ends));
        rig.until_idle();
        rig.emulator().set_completion(pto_mock::Completion::Free);
        match rig.worker.call(&no_args()) {
            Err(Error::Finished(cause)) => assert!(ends && Arc::ptr_eq(&cause, &first), "{cause}"),
            other => assert!(!ends && other.is_ok(), "{other:?}"),
        }
        rig.worker.close().unwrap();
    }
    bench.assert_clean();
}

/// A dropped buffer that could not be released is nobody's error until close, which reports it.
#[test]
fn a_dropped_buffer_that_cannot_be_released_is_reported_by_close() {
    let Some(bench) = emulator_only("guards: dropped buffer") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    let buffer = rig.worker.create_buffer(8).unwrap();
    rig.emulator().arm(Fault::new(Call::ReleaseBuffer, FaultEffect::Before));
    drop(buffer);
    rig.worker.call(&no_args()).unwrap();
    let Err(Error::Close(report)) = rig.worker.close() else { panic!("the release failed") };
    assert!(matches!(&report.primary, Error::Release { .. }) && report.others.is_empty(), "{report}");
    assert!(report.complete);
    bench.assert_clean();
}

/// So is the staging of a rejected dispatch.
#[test]
fn staging_of_a_rejected_dispatch_that_cannot_be_released_is_reported_by_close() {
    let Some(bench) = emulator_only("guards: rejected staging fails") else { return };
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
    rig.emulator().arm(Fault::new(Call::ReleaseBuffer, FaultEffect::Before));
    let rejected = rig.worker.call(&no_args().scalar(1));
    assert!(matches!(rejected, Err(Error::Program { .. })), "{rejected:?}");
    rig.worker.call(&no_args().scalar(0)).unwrap();
    let Err(Error::Close(report)) = rig.worker.close() else { panic!("the release failed") };
    assert!(matches!(&report.primary, Error::Release { .. }) && report.others.is_empty(), "{report}");
    bench.assert_clean();
}

/// Rule 6: an argument lives until the dispatch is terminal even where no task of it names it.
#[test]
fn an_argument_that_no_task_uses_is_kept_as_well() {
    let Some(bench) = emulator_only("guards: unused argument") else { return };
    let spec = ProgramSpec::new("idle").parameter(Parameter::host("x", 4));
    let rig = bench.prepare(&Options::ordinary(), &[program(spec, |_, _| Ok(()))], bench.builder());
    rig.hold_runs();
    let x = rig.worker.create_buffer(4).unwrap();
    let args = no_args().host(&x);
    let dispatch = rig.worker.submit(rig.ids[0], &args).unwrap();
    drop(args);
    assert!(matches!(x.clone().release(), Err(Error::BufferInUse)), "the dispatch has it");
    drop(x);
    assert_eq!(rig.emulator().stats().host_buffers, 1, "it went before the end");
    rig.complete(1);
    dispatch.wait().unwrap();
    assert_eq!(rig.emulator().stats().host_buffers, 0);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// The arguments of a rejected dispatch are let go at once.
#[test]
fn the_arguments_of_a_rejected_dispatch_are_let_go() {
    let Some(bench) = emulator_only("guards: rejected arguments") else { return };
    let spec = ProgramSpec::new("failing").parameter(Parameter::host("x", 4));
    let failing = program(spec, |_, _| Err("told to fail".into()));
    let rig = bench.prepare(&Options::ordinary(), &[failing], bench.builder());
    let x = rig.worker.create_buffer(4).unwrap();
    let args = no_args().host(&x);
    assert!(rig.worker.submit(rig.ids[0], &args).is_err());
    drop(args);
    x.release().unwrap();
    assert_eq!(rig.emulator().stats().host_buffers, 0);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 20: what the backend could not clean up after a failed build, which its submitter was not told of.
#[test]
fn a_cleanup_that_failed_after_a_failed_build_is_reported_by_close() {
    let Some(bench) = emulator_only("guards: swept") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f1()], bench.builder());
    rig.emulator().arm(Fault::new(Call::GetOrAllocateDomain, FaultEffect::Before).on_chip(1));
    rig.emulator().arm(Fault::new(Call::Run, FaultEffect::Before).on_chip(0));
    let own = rig.worker.call(&no_args()).unwrap_err();
    assert!(matches!(&own, Error::Backend(e) if e.call() == Call::GetOrAllocateDomain), "{own:?}");
    // Nobody submits again, so close is the first to tell.
    let Err(Error::Close(report)) = rig.worker.close() else { panic!("the cleanup failed") };
    let Error::Failed(failure) = &report.primary else { panic!("{report}") };
    assert_eq!(failure.cause.to_string(), own.to_string());
    assert!(matches!(&failure.secondary[..], [Error::Backend(e)] if e.call() == Call::Run), "{failure}");
    bench.assert_clean();
}

/// Rule 17: where a builder goes on after a sticky failure and ends with an error of its own, the worker is poisoned
/// by what came first; and of two failures of the backend in one build the first is the one that sticks.
#[test]
fn the_first_failure_of_a_build_is_the_cause() {
    let Some(bench) = emulator_only("guards: first cause") else { return };
    let own = program(ProgramSpec::new("own error"), |build, _| {
        assert!(build.lease(DOMAIN, &signal_request(64)).is_err());
        Err("told to fail".into())
    });
    let rig = bench.prepare(&Options::persistent(), &[own], bench.builder());
    rig.emulator().arm(Fault::new(Call::GetOrAllocateDomain, FaultEffect::After));
    let failed = rig.worker.call(&no_args());
    assert!(
        matches!(failed, Err(Error::Program { .. })),
        "the submitter gets what the builder returned: {failed:?}"
    );
    let Err(Error::Poisoned(poison)) = rig.worker.call(&no_args()) else { panic!("poisoned") };
    assert!(matches!(&poison.cause, Error::Backend(e) if e.call() == Call::GetOrAllocateDomain), "{poison}");
    assert!(matches!(&poison.secondary[..], [Error::Program { .. }]), "{poison}");
    rig.worker.close().unwrap();

    let nested = program(ProgramSpec::new("nested"), |build, _| {
        let _swallowed = build.scope(|| {
            assert!(build.lease(DOMAIN, &signal_request(64)).is_err());
            Ok::<_, Error>(())
        });
        Ok(())
    });
    let rig = bench.prepare(&Options::persistent(), &[nested], bench.builder());
    rig.emulator().arm(Fault::new(Call::GetOrAllocateDomain, FaultEffect::After));
    rig.emulator().arm(Fault::new(Call::Scope, FaultEffect::After));
    let failed = rig.worker.call(&no_args());
    assert!(matches!(&failed, Err(Error::Backend(e)) if e.call() == Call::GetOrAllocateDomain), "{failed:?}");
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 18: an ordinary dispatch that is being built while an older failure turns out to be final allocates nothing.
#[test]
fn an_ordinary_dispatch_being_built_while_the_worker_is_finished_allocates_nothing() {
    let Some(bench) = emulator_only("guards: finished while building") else { return };
    let gate = Gate::new();
    let inside = gate.clone();
    let gated = program(ProgramSpec::new("gated"), move |build, _| {
        inside.pass();
        build.lease(DOMAIN, &signal_request(64))?;
        Ok(())
    });
    let builder = bench.builder().failed_task_is_final(true);
    let rig = bench.prepare(&Options::ordinary(), &[gated, f0()], builder);
    rig.hold_runs();
    let older = rig.worker.submit(rig.ids[1], &no_args()).unwrap();
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let building = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &no_args()).map(drop));
        gate.wait_arrived(1);
        rig.emulator().fail(RunId(1), failure(FailureKind::Task, false).on_chip(ChipId(0))).unwrap();
        while !older.is_done() {
            std::thread::yield_now();
        }
        gate.open();
        let outcome = building.join();
        assert!(matches!(&outcome, Err(Error::Finished(f)) if f.id == older.id()), "{outcome:?}");
    });
    assert_eq!((rig.journal().allocs(), submits(&rig.journal())), (0, 1));
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// An explicit release is one call, and close finds nothing wrong; one that a close overtakes is done all the same.
#[test]
fn a_released_buffer_is_released_once() {
    let Some(bench) = emulator_only("guards: released once") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    let [now, overtaken] = [(), ()].map(|()| rig.worker.create_buffer(8).unwrap());
    let releases = || rig.spy.count(|seen| matches!(seen, Seen::ReleaseBuffer(_)));
    now.release().unwrap();
    assert_eq!((releases(), rig.emulator().stats().host_buffers), (1, 1));
    rig.emulator().arm(Fault::new(Call::ReleaseBuffer, FaultEffect::Hang));
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let releasing = parked::spawn(scope, || overtaken.release());
        rig.emulator().faults().wait_hung(1);
        rig.worker.close().unwrap();
        rig.emulator().release_hangs();
        releasing.join().unwrap();
    });
    assert_eq!(releases(), 2);
    bench.assert_clean();
}

/// A tensor that could not be freed because dispatches are in flight is freed by close, and not left to the sweep.
#[test]
fn a_tensor_that_could_not_be_freed_is_freed_at_close() {
    let Some(bench) = emulator_only("guards: tensor in flight") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    let tensor = rig.worker.alloc(ChipId(0), 8).unwrap();
    rig.hold_runs();
    let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let refused = rig.worker.free(tensor);
    assert!(matches!(&refused, Err(Error::Backend(e)) if e.family() == Family::Misuse), "{refused:?}");
    rig.complete(1);
    dispatch.wait().unwrap();
    rig.worker.close().unwrap();
    let journal = rig.journal();
    assert!(
        journal.before(|e| matches!(e, EventKind::DeviceFree(_)), |e| *e == EventKind::CloseBegin),
        "{journal}"
    );
    bench.assert_clean();
}

/// After a poison the domains are the backend's: close asks for no release, the sweep frees each once (rule 17).
#[test]
fn after_a_failed_run_close_leaves_the_domains_to_the_backend() {
    let Some(bench) = emulator_only("guards: poisoned table") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f1(), f0()], bench.builder());
    rig.worker.run(rig.ids[0], &no_args()).unwrap();
    rig.until_idle();
    rig.hold_runs();
    // A run that is not registered with the domain: only our own table knows that it is poisoned.
    let dispatch = rig.worker.submit(rig.ids[1], &no_args()).unwrap();
    rig.emulator().fail(RunId(2), failure(FailureKind::Task, false)).unwrap();
    assert!(dispatch.wait().is_err());
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.releases(), []);
    let journal = rig.journal();
    let swept = journal.count(|e| matches!(e, EventKind::Free { cause: FreeCause::Sweep, .. }));
    assert_eq!((journal.frees(), swept), (1, 1));
    bench.assert_clean();
}

/// What a backend gets wrong in the tests below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    /// Nothing.
    None,
    /// It answers with another domain for the name of a retained one.
    OtherDomain,
    /// It forgets the result of one copy.
    MissingResult,
    /// It skips a copy without a failure before it.
    SkippedCopy,
}

fn orchestrator(run: RunId, lie: Lie) -> MockOrchestrator {
    let mut orchestrator = MockOrchestrator::new();
    orchestrator.expect_run().return_const(run);
    orchestrator.expect_get_or_allocate_domain().returning(move |_, _, _, reply| {
        let other = lie == Lie::OtherDomain && run != RunId(1);
        reply.begin(DomainId::new(u32::from(other), 0), 1);
        let member = MemberWindow { chip: ChipId(0), rank: 0, device_context: 1, base: 0x1000, mapped_bytes: 64 };
        reply.push_member(member, [BufferWindow { address: 0x1000, nbytes: 64 }]);
        Ok(())
    });
    orchestrator.expect_copy_batch().returning(move |copies, results| {
        results.clear();
        results.resize(copies.len(), CopyResult::Done);
        match lie {
            Lie::MissingResult => drop(results.pop()),
            Lie::SkippedCopy => results[0] = CopyResult::Skipped,
            Lie::None | Lie::OtherDomain => {}
        }
        Ok(())
    });
    orchestrator
}

/// A backend of one chip that zeroes by itself and ends every run at once.
fn backend(lie: Lie) -> MockBackend {
    let mut capabilities = Capabilities::new("mock", "mock", vec![0]);
    capabilities.device_fill = true;
    let events: Arc<Mutex<Option<Arc<dyn RunEvents>>>> = Arc::default();
    let reported = Arc::clone(&events);
    let mut backend = MockBackend::new();
    backend.expect_capabilities().return_const(capabilities);
    backend.expect_phase().return_const(BackendPhase::New);
    backend.expect_check_blocking().returning(|| Ok(()));
    backend.expect_start().returning(move |to| {
        *events.lock().unwrap() = Some(to);
        Ok(Negotiated::new(Depth::Exactly(1)))
    });
    backend.expect_submit().returning(move |run, _, graph| {
        graph.build(&orchestrator(run, lie)).map_err(SubmitError::from)?;
        let to = reported.lock().unwrap().clone();
        to.unwrap().ended(run, RunOutcome::success());
        Ok(())
    });
    backend.expect_run_state().return_const(RunState::Unknown);
    backend.expect_release_domain().returning(|_| Ok(()));
    backend.expect_domain_state().returning(|_| Ok(DomainState::Freed));
    backend.expect_close().times(1).returning(|| Ok(()));
    backend
}

/// Answers that no sound backend gives are broken invariants, found before anything is built on them.
#[test]
fn a_lying_backend_is_found_out() {
    let request = DomainRequest::packed([0], vec![NamedBuffer::bytes("b", 64)]);
    let leasing: Arc<dyn Program> = program(ProgramSpec::new("leasing"), move |build, _| {
        build.lease(DOMAIN, &request)?;
        Ok(())
    });
    for lie in [Lie::None, Lie::OtherDomain, Lie::MissingResult, Lie::SkippedCopy] {
        let backend = Arc::new(backend(lie)) as Arc<dyn Backend>;
        let worker = PreparedWorker::prepare(&[Arc::clone(&leasing)], &Options::persistent(), backend).unwrap();
        worker.call(&no_args()).unwrap();
        let second = worker.call(&no_args());
        if lie == Lie::None {
            second.unwrap();
        } else {
            assert!(matches!(second, Err(Error::Broken(_))), "{lie:?}: {second:?}");
            let refused = worker.call(&no_args());
            assert!(matches!(refused, Err(Error::Poisoned(_))), "{lie:?}: {refused:?}");
        }
        worker.close().unwrap();
    }
}

/// A host buffer stays usable while its release is refused.
#[test]
fn a_buffer_with_clones_is_not_released() {
    let Some(bench) = emulator_only("guards: clones") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    let first: HostBuffer = rig.worker.create_buffer(8).unwrap();
    let second = first.clone();
    assert!(matches!(first.release(), Err(Error::BufferInUse)));
    second.write(0, &[1; 8]).unwrap();
    second.release().unwrap();
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 20: every failure that nobody has seen is reported by close, not the last one alone.
#[test]
fn all_failures_that_nobody_saw_are_reported_by_close() {
    let Some(bench) = emulator_only("guards: unseen failures") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    rig.hold_runs();
    for run in 1..=3 {
        let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
        rig.emulator().fail(RunId(run), failure(FailureKind::Call, false)).unwrap();
        if run == 2 {
            assert!(dispatch.wait().is_err(), "this one is seen");
        }
        rig.until_idle();
    }
    let Err(Error::Close(report)) = rig.worker.close() else { panic!("two failures are unseen") };
    let of = |error: &Error| if let Error::Failed(failure) = error { failure.id.get() } else { panic!("{error}") };
    assert_eq!((of(&report.primary), report.others.iter().map(of).collect::<Vec<_>>()), (1, vec![3]), "{report}");
    bench.assert_clean();
}

/// A backend that refuses to release a buffer, of an open worker, is not taken for a closed one.
#[test]
fn a_refused_release_is_told_to_the_caller_or_by_close() {
    let mut mock = backend(Lie::None);
    mock.expect_create_buffer().returning(|_| Ok(HostBufferId::new(7, 1)));
    mock.expect_fill_buffer().returning(|_, _| Ok(()));
    mock.expect_release_buffer().times(2).returning(|_| Err(BackendError::misuse(Call::ReleaseBuffer, "told to")));
    let idle = program(ProgramSpec::new("idle"), |_, _| Ok(()));
    let worker =
        PreparedWorker::prepare(&[idle], &Options::ordinary(), Arc::new(mock) as Arc<dyn Backend>).unwrap();
    let [released, dropped] = [(), ()].map(|()| worker.create_buffer(8).unwrap());
    let refused = released.release();
    assert!(matches!(&refused, Err(Error::Backend(e)) if e.family() == Family::Misuse), "{refused:?}");
    drop(dropped);
    let Err(Error::Close(report)) = worker.close() else { panic!("a release was refused") };
    assert!(matches!(&report.primary, Error::Release { .. }) && report.others.is_empty(), "{report}");
}

/// Rule 17: a dispatch that was turned away for an older failure is no failure of its own, even where its cleanup
/// fails: close reports that and nothing else.
#[test]
fn a_dispatch_turned_away_is_no_failure_of_its_own() {
    let Some(bench) = emulator_only("guards: turned away") else { return };
    let gate = Gate::new();
    let inside = gate.clone();
    let warm = f1();
    let spec = warm.spec().clone().parameter(Parameter::scalar("stop"));
    let gated = program(spec, move |build, args| {
        warm.build(build, &no_args())?;
        if args.scalar_at(0)? == 1 {
            inside.pass();
        }
        Ok(())
    });
    let rig = bench.prepare(&Options::persistent().reset(false), &[gated, f0()], bench.builder());
    let submit = |stop| rig.worker.submit(rig.ids[0], &no_args().scalar(stop));
    submit(0).unwrap().wait().unwrap();
    rig.until_idle();
    rig.hold_runs();
    let older = rig.worker.submit(rig.ids[1], &no_args()).unwrap();
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let building = parked::spawn(scope, || submit(1).map(drop));
        gate.wait_arrived(1);
        rig.emulator().fail(RunId(2), failure(FailureKind::Task, false)).unwrap();
        while !older.is_done() {
            std::thread::yield_now();
        }
        rig.emulator().arm(Fault::new(Call::Run, FaultEffect::Before).on_chip(0));
        gate.open();
        let outcome = building.join();
        assert!(matches!(&outcome, Err(Error::Poisoned(f)) if f.id == older.id()), "{outcome:?}");
    });
    let Err(Error::Close(report)) = rig.worker.close() else { panic!("the cleanup failed") };
    let mut all = std::iter::once(&report.primary).chain(&report.others);
    assert!(all.all(|e| !matches!(e, Error::Failed(f) if f.id != older.id())), "{report}");
    let swept = |e: &Error| matches!(e, Error::Backend(e) if e.call() == Call::Run);
    assert!(std::iter::once(&report.primary).chain(&report.others).any(swept), "{report}");
    bench.assert_clean();
}

/// Rule 17: where an older run has failed and its end is still on its way, the next opening finds its domain gone,
/// waits for that end, and names the cause.
#[test]
fn an_opening_that_fails_waits_for_the_older_end_that_explains_it() {
    let Some(bench) = emulator_only("guards: explained") else { return };
    let rig = bench.prepare(&Options::persistent().reset(false), &[f1()], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    rig.until_idle();
    rig.hold_runs();
    let older = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let ends = Gate::new();
    *rig.spy.ends.lock() = Some(ends.clone());
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let _open = OpenOnDrop(ends.clone());
        rig.emulator().fail(RunId(2), failure(FailureKind::Task, false)).unwrap();
        ends.wait_arrived(1);
        let building = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &no_args()).map(drop));
        building.wait_parked();
        ends.open();
        let outcome = building.join();
        assert!(matches!(&outcome, Err(Error::Poisoned(f)) if f.id == older.id()), "{outcome:?}");
    });
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 17: a backend that an older run has finished turns the next submission away before it reports the end of that
/// run. What ended the worker is the older failure, in both modes, although it is recorded later.
#[test]
fn a_submission_refused_because_of_an_older_run_is_not_the_first_cause() {
    for persistent in [true, false] {
        let Some(bench) = emulator_only("older cause") else { return };
        let options = if persistent { Options::persistent().reset(false) } else { Options::ordinary() };
        let rig = bench.prepare(&options, &[f0()], bench.builder());
        rig.hold_runs();
        let older = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
        rig.emulator().arm(Fault::new(Call::Submit, FaultEffect::Before).fatal());
        let refused = rig.worker.submit(rig.ids[0], &no_args()).unwrap_err();
        assert!(matches!(&refused, Error::Backend(e) if e.call() == Call::Submit), "{refused:?}");
        // Until the older end is known, the refusal is all that there is to tell.
        let (Error::Poisoned(early) | Error::Finished(early)) = rig.worker.call(&no_args()).unwrap_err() else {
            panic!("the worker takes more")
        };
        assert_eq!(early.id.get(), 2);

        let cause = failure(FailureKind::Call, false);
        rig.emulator().fail(RunId(1), cause.clone()).unwrap();
        assert!(matches!(older.wait(), Err(Error::Failed(f)) if f.id == older.id()));
        let (Error::Poisoned(kept) | Error::Finished(kept)) = rig.worker.call(&no_args()).unwrap_err() else {
            panic!("the worker takes more")
        };
        assert_eq!(kept.id, older.id(), "persistent {persistent}: {kept}");
        assert!(matches!(&kept.cause, Error::Backend(e) if e.runtime() == Some(&cause)), "{kept}");
        assert!(kept.final_for_worker);
        rig.worker.close().unwrap();
        drop(rig);
        bench.assert_clean();
    }
}

/// Rule 17: the first failure is kept. A dispatch that fails by itself while an older one is in flight is the first,
/// whatever becomes of the older one.
#[test]
fn a_later_dispatch_that_fails_first_stays_the_first_cause() {
    let Some(bench) = emulator_only("later cause") else { return };
    let rig = bench.prepare(&Options::persistent().reset(false), &[f0()], bench.builder());
    rig.hold_runs();
    let older = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let lost = Fault::new(Call::SubmitNextLevel, FaultEffect::After);
    rig.emulator().arm(lost);
    rig.worker.submit(rig.ids[0], &no_args()).unwrap_err();
    rig.emulator().fail(RunId(1), failure(FailureKind::Call, false)).unwrap();
    older.wait().unwrap_err();
    let refused = rig.worker.call(&no_args()).unwrap_err();
    assert!(matches!(&refused, Error::Poisoned(f) if f.id.get() == 2), "{refused:?}");
    rig.worker.close().unwrap();
    drop(rig);
    bench.assert_clean();
}
