//! Failure, poison and refusal: S50 to S60. Rules 17 to 20; invariants I4, I6 and I13.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::error::Error as _;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pto_dispatch::{Args, Error, Options, Parameter, PreparedWorker, Program, ProgramSpec};
use pto_mock::{EventKind, Fault, FaultEffect, FreeCause, Journal};
use pto_simpler_sys::{
    Access, Backend, Call, ChipId, DataType, DomainRequest, Effect, Family, NamedBuffer, RunId, RuntimeFailure,
};
use pto_tests::rig::{Rig, emulator_only, submits};
use pto_tests::scenario::{DOMAIN, add, add_one, f1, program, signal_program, signal_request};

fn no_args() -> Args {
    Args::new()
}

fn task_submits(journal: &Journal) -> usize {
    journal.count(|e| matches!(e, EventKind::TaskSubmit { .. }))
}

/// What the builders here fail with.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the builder's own error {0}")]
struct Own(u32);

/// F1, which fails with [`Own`] as often as `fail` says: after its lease (1), or after its first task (2).
fn failing(fail: &Arc<AtomicU64>) -> Arc<dyn Program> {
    let fail = Arc::clone(fail);
    program(ProgramSpec::new("failing").callable(add()), move |build, _| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        let mode = fail.load(Ordering::SeqCst);
        if mode == 1 {
            return Err(Own(1).into());
        }
        add_one(build, &lease, "signal")?;
        if mode == 2 {
            return Err(Own(2).into());
        }
        Ok(())
    })
}

fn assert_own(error: &Error, expected: u32) {
    let Error::Program { source, .. } = error else { panic!("the builder's own error, not {error:?}") };
    assert_eq!(source.downcast_ref::<Own>(), Some(&Own(expected)));
}

#[test]
fn s50_failed_dispatch_then_close() {
    for (mode, warm) in [(1, false), (2, false), (2, true)] {
        let Some(bench) = emulator_only("s50") else { return };
        let fail = Arc::new(AtomicU64::new(0));
        let rig = bench.prepare(&Options::persistent().reset(false), &[failing(&fail)], bench.builder());
        if warm {
            rig.worker.call(&no_args()).unwrap();
        }
        fail.store(mode, Ordering::SeqCst);
        let error = rig.worker.submit(rig.ids[0], &no_args()).map(drop).unwrap_err();
        assert_own(&error, mode as u32);
        fail.store(0, Ordering::SeqCst);
        let before = submits(&rig.journal());
        let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
        let Err(Error::Poisoned(failure)) = refused else { panic!("{refused:?}") };
        assert_own(&failure.cause, mode as u32);
        assert_eq!(submits(&rig.journal()), before);
        // The error was delivered to the submitter.
        rig.worker.close().unwrap();
        assert_eq!(rig.spy.releases(), [], "a poisoned domain is not ours to release");
        let journal = rig.journal();
        assert_eq!((journal.allocs(), journal.frees()), (1, 1), "freed once, by the backend (I4)");
        bench.assert_clean();
    }
}

#[test]
fn s50_a_failure_before_opening_rejects_that_dispatch_only() {
    let Some(bench) = emulator_only("s50b") else { return };
    let fail = Arc::new(AtomicU64::new(0));
    let rig = bench.prepare(&Options::persistent().reset(false), &[failing(&fail)], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    // Warm: the lease is a table look-up, and nothing has been touched.
    fail.store(1, Ordering::SeqCst);
    assert_own(&rig.worker.call(&no_args()).unwrap_err(), 1);
    fail.store(0, Ordering::SeqCst);
    rig.worker.call(&no_args()).unwrap();
    rig.worker.close().unwrap();
    assert_eq!((rig.journal().allocs(), rig.journal().releases()), (1, 1));
    bench.assert_clean();
}

#[test]
fn s51_abandoned_run() {
    let Some(bench) = emulator_only("s51") else { return };
    let rig = bench.f1n();
    rig.emulator().arm(Fault::new(Call::Run, FaultEffect::Unwind));
    let outcome = rig.worker.call(&no_args());
    let Err(Error::Failed(failure)) = &outcome else { panic!("{outcome:?}") };
    assert_eq!(failure.cause.family(), Family::Backend);
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    assert!(matches!(refused, Err(Error::Poisoned(_) | Error::Finished(_))), "{refused:?}");
    let journal = rig.journal();
    assert_eq!((submits(&journal), journal.frees()), (2, 0));
    assert_eq!(rig.emulator().stats().domains, 1, "the domain is on the worker's list still");
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.releases(), []);
    let frees = journal.select(|e| matches!(e, EventKind::Free { .. }));
    assert!(matches!(frees[..], [EventKind::Free { cause: FreeCause::Sweep, .. }]), "{frees:?}");
    bench.assert_clean();
}

/// As F1 over 16 ranks.
fn sixteen() -> Arc<dyn Program> {
    let request = DomainRequest::packed(0..16, vec![NamedBuffer::bytes("signal", 64)]);
    program(ProgramSpec::new("sixteen").callable(add()), move |build, _| {
        let lease = build.lease(DOMAIN, &request)?;
        add_one(build, &lease, "signal")
    })
}

#[test]
fn s53_first_cause_first() {
    let Some(bench) = emulator_only("s53") else { return };
    let rig = bench.prepare(&Options::persistent().reset(false), &[sixteen()], bench.builder().chips(16));
    rig.worker.call(&no_args()).unwrap();
    rig.hold_runs();
    let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    for chip in 0..16 {
        // Neither the failed run's cleanup nor the sweep of the backend's close can free a window.
        rig.emulator().arm(Fault::new(Call::Run, FaultEffect::Before).on_chip(chip));
        rig.emulator().arm(Fault::new(Call::Close, FaultEffect::Before).on_chip(chip));
    }
    let native = RuntimeFailure::new(Call::Run, "RuntimeError", "code -9").on_chip(ChipId(3));
    rig.emulator().fail(RunId(2), native).unwrap();
    while !dispatch.is_done() {
        std::thread::yield_now();
    }
    drop(dispatch);
    let closed = rig.worker.close();
    let Err(error @ Error::Close(close)) = &closed else { panic!("{closed:?}") };
    assert!(!close.complete, "{close:?}");
    let Error::Failed(failure) = &close.primary else { panic!("the dispatch first: {close:?}") };
    assert_eq!(failure.id.get(), 2);
    let Error::Backend(cause) = &failure.cause else { panic!("{failure:?}") };
    assert_eq!(
        (cause.runtime().unwrap().chip, cause.runtime().unwrap().message.as_str()),
        (Some(ChipId(3)), "code -9")
    );
    assert!(!failure.secondary.is_empty(), "the cleanup is attached: {failure}");
    assert!(
        close.others.iter().any(|e| matches!(e, Error::Backend(e) if e.call() == Call::Close)),
        "the close is attached: {error}"
    );
    assert_eq!(rig.spy.releases(), [], "no release by us");
    // What is left can still be closed, and the process goes on.
    rig.worker.close().unwrap();
    assert_eq!(rig.emulator().stats().domains, 0);
    bench.assert_clean();
}

#[test]
fn s54_lease_table_after_a_failure() {
    let Some(bench) = emulator_only("s54") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f1()], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    rig.hold_runs();
    let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    rig.emulator().fail(RunId(2), RuntimeFailure::new(Call::Run, "RuntimeError", "by hand")).unwrap();
    assert!(dispatch.wait().is_err());
    let journal = rig.journal();
    let freed = |e: &EventKind| matches!(e, EventKind::Free { cause: FreeCause::Cleanup(RunId(2)), .. });
    assert_eq!(journal.count(freed), 1, "the runtime frees by itself:\n{journal}");
    let copies = journal.copies().len();
    for _ in 0..2 {
        let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
        assert!(matches!(refused, Err(Error::Poisoned(_))), "{refused:?}");
    }
    assert_eq!((journal.copies().len(), submits(&journal)), (copies, 2), "a copy into freed memory");
    rig.worker.close().unwrap();
    assert_eq!((rig.spy.releases().len(), journal.frees()), (0, 1));
    bench.assert_clean();
}

/// A payload that is no text.
#[derive(Debug, PartialEq, Eq)]
struct Payload(u32);

/// Leases `comm_d0` and panics: before anything else (1), or after a task (2), inside a scope.
fn panicking(mode: &Arc<AtomicU64>) -> Arc<dyn Program> {
    let mode = Arc::clone(mode);
    program(ProgramSpec::new("panicking").callable(add()), move |build, _| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        let mode = mode.load(Ordering::SeqCst);
        build.scope(|| {
            if mode == 2 {
                add_one(build, &lease, "signal")?;
            }
            if mode > 0 {
                panic_any(Payload(mode as u32));
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        })
    })
}

fn panics(rig: &Rig) -> Payload {
    let unwound = catch_unwind(AssertUnwindSafe(|| rig.worker.submit(rig.ids[0], &no_args()).map(drop)));
    *unwound.expect_err("the panic resumes in the submitter").downcast::<Payload>().expect("with its payload")
}

#[test]
fn s55_panic_in_user_code_before_opening() {
    let Some(bench) = emulator_only("s55a") else { return };
    let mode = Arc::new(AtomicU64::new(0));
    let rig = bench.prepare(&Options::persistent(), &[panicking(&mode), f1()], bench.builder());
    rig.worker.run(rig.ids[0], &no_args()).unwrap();
    for _ in 0..3 {
        mode.store(1, Ordering::SeqCst);
        assert_eq!(panics(&rig), Payload(1));
        // Frame and staging are back, locks are usable, the other program and this one too.
        assert_eq!((rig.emulator().stats().host_buffers, rig.emulator().stats().runs), (0, 0));
        rig.worker.run(rig.ids[1], &no_args()).unwrap();
        mode.store(0, Ordering::SeqCst);
        rig.worker.run(rig.ids[0], &no_args()).unwrap();
    }
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s55_panic_in_user_code_after_opening() {
    let Some(bench) = emulator_only("s55b") else { return };
    let mode = Arc::new(AtomicU64::new(0));
    let rig = bench.prepare(&Options::persistent(), &[panicking(&mode), f1()], bench.builder());
    rig.worker.run(rig.ids[0], &no_args()).unwrap();
    mode.store(2, Ordering::SeqCst);
    assert_eq!(panics(&rig), Payload(2));
    assert_eq!((rig.emulator().stats().host_buffers, rig.emulator().stats().runs), (0, 0));
    let refused = rig.worker.submit(rig.ids[1], &no_args()).map(drop);
    let Err(Error::Poisoned(failure)) = &refused else { panic!("cleanly poisoned, not {refused:?}") };
    assert!(matches!(&failure.cause, Error::Panicked { program, .. } if &**program == "panicking"), "{failure}");
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s55_panic_in_user_code_of_an_ordinary_worker() {
    let Some(bench) = emulator_only("s55c") else { return };
    let mode = Arc::new(AtomicU64::new(2));
    let rig = bench.prepare(&Options::ordinary(), &[panicking(&mode), f1()], bench.builder());
    assert_eq!(panics(&rig), Payload(2));
    rig.worker.run(rig.ids[1], &no_args()).unwrap();
    mode.store(0, Ordering::SeqCst);
    rig.worker.run(rig.ids[0], &no_args()).unwrap();
    rig.worker.close().unwrap();
    assert_eq!(rig.journal().allocs(), rig.journal().frees());
    bench.assert_clean();
}

#[test]
fn s56_swallowed_failure_inside_the_callback() {
    for options in [Options::ordinary(), Options::persistent()] {
        let Some(bench) = emulator_only("s56") else { return };
        let refusals = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&refusals);
        let swallowing = program(ProgramSpec::new("swallowing").callable(add()), move |build, _| {
            let other = build.lease("other", &signal_request(64))?;
            assert!(build.lease(DOMAIN, &signal_request(64)).is_err());
            let buffer = other.buffer(ChipId(0), "signal")?;
            let tensor = build.tensor(&buffer, &[16], DataType::Int32, Access::InOut)?;
            let refused = build.task(0).and_then(|task| task.tensor(tensor).scalar(1).submit(ChipId(0)));
            counted.fetch_add(u64::from(refused.is_err()), Ordering::SeqCst);
            Ok(())
        });
        let rig = bench.prepare(&options, &[swallowing], bench.builder());
        // One window of the second domain is made and stays: the failure has an effect.
        for call in [Call::AllocateDomain, Call::GetOrAllocateDomain] {
            rig.emulator().arm(Fault::new(call, FaultEffect::Before).on_chip(1).nth(2));
        }
        let failed = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
        let Err(Error::Backend(error)) = &failed else { panic!("reported as failed: {failed:?}") };
        assert_eq!(error.effect(), Effect::Done);
        let journal = rig.journal();
        assert_eq!((refusals.load(Ordering::SeqCst), task_submits(&journal), submits(&journal)), (1, 0, 0));
        rig.worker.close().unwrap();
        assert_eq!(rig.emulator().stats().domains, 0);
        bench.assert_clean();
    }
}

/// Takes a host buffer of 4 bytes and a scalar; leases `comm_d0` with the window that the scalar names, and gives its
/// task one scalar too few where the scalar is 1.
fn fussy() -> Arc<dyn Program> {
    let spec = ProgramSpec::new("fussy")
        .callable(add())
        .parameter(Parameter::host("x", 4))
        .parameter(Parameter::scalar("window"));
    program(spec, |build, args| {
        let window = args.scalar_at(1)?;
        let lease = build.lease(DOMAIN, &signal_request(if window == 1 { 64 } else { window }))?;
        let buffer = lease.buffer(ChipId(0), "signal")?;
        let tensor = build.tensor(&buffer, &[16], DataType::Int32, Access::InOut)?;
        let task = build.task(0)?.tensor(tensor);
        if window == 1 { Ok(task.submit(ChipId(0))?) } else { Ok(task.scalar(1).submit(ChipId(0))?) }
    })
}

/// One buffer of 4 bytes in a window of 64.
fn slack() -> Arc<dyn Program> {
    let buffers = vec![NamedBuffer::bytes("signal", 4)];
    let request = DomainRequest { window_bytes: 64, ..DomainRequest::packed([0, 1], buffers) };
    program(ProgramSpec::new("slack"), move |build, _| {
        build.lease(DOMAIN, &request)?;
        Ok(())
    })
}

#[test]
fn s60_refusal_is_not_failure() {
    let Some(bench) = emulator_only("s60") else { return };
    let rig = bench.prepare(&Options::persistent(), &[fussy(), slack()], bench.builder());
    let stranger = bench.prepare(&Options::ordinary(), &[f1()], bench.builder());
    let (x, small) = (rig.worker.create_buffer(4).unwrap(), rig.worker.create_buffer(3).unwrap());
    let foreign = stranger.worker.create_buffer(4).unwrap();
    let good = Args::new().host(&x).scalar(64);
    rig.worker.run(rig.ids[0], &good).unwrap();
    rig.worker.run(rig.ids[1], &no_args()).unwrap();
    let refusals = [
        ("count", rig.ids[0], Args::new().host(&x)),
        ("kind", rig.ids[0], Args::new().scalar(1).host(&x)),
        ("size", rig.ids[0], Args::new().host(&small).scalar(64)),
        ("owner", rig.ids[0], Args::new().host(&foreign).scalar(64)),
        ("unregistered", stranger.ids[0], no_args()),
        ("spec change", rig.ids[0], Args::new().host(&x).scalar(128)),
        ("signature", rig.ids[0], Args::new().host(&x).scalar(1)),
        ("slack", rig.ids[1], no_args()),
    ];
    let journal = rig.journal();
    for (what, id, args) in &refusals {
        let before = submits(&journal);
        let error = rig.worker.submit(*id, args).map(drop).expect_err(what);
        let typed = match *what {
            "unregistered" => matches!(error, Error::UnknownProgram),
            "spec change" => matches!(error, Error::Domain(_)),
            "signature" => matches!(error, Error::Build(_)),
            "slack" => matches!(error, Error::Reset { .. }),
            _ => matches!(error, Error::Arguments { .. }),
        };
        assert!(typed && error.family() == Family::Misuse && !error.must_reprepare(), "{what}: {error:?}");
        assert_eq!((rig.emulator().stats().runs, submits(&journal)), (0, before), "{what}");
        rig.worker.run(rig.ids[0], &good).unwrap_or_else(|e| panic!("unusable after {what}: {e}"));
        assert_eq!(rig.emulator().stats().host_buffers, 2, "{what}: staging is left");
    }
    drop((good, x, small, foreign));
    drop(refusals);
    rig.worker.close().unwrap();
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    assert!(matches!(refused, Err(Error::Arguments { .. } | Error::Closed)), "{refused:?}");
    stranger.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 18: a backend whose failed task is final ends the worker in both modes, and the worker says why.
#[test]
fn s37_a_final_task_failure_ends_an_ordinary_worker() {
    let Some(bench) = emulator_only("s37c") else { return };
    let failing = program(ProgramSpec::new("f").callable(pto_tests::scenario::fail()), |build, _| {
        Ok(build.task(0)?.scalar(7).submit(ChipId(0))?)
    });
    let rig = bench.prepare(&Options::ordinary(), &[failing], bench.builder().failed_task_is_final(true));
    let outcome = rig.worker.call(&no_args());
    assert!(matches!(&outcome, Err(Error::Failed(f)) if f.final_for_worker), "{outcome:?}");
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    let Err(error @ Error::Finished(_)) = &refused else { panic!("{refused:?}") };
    assert!(error.source().unwrap().to_string().contains("told to fail with 7"));
    assert_eq!(submits(&rig.journal()), 1);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 8: what ends one program's work on a worker leaves another worker alone.
#[test]
fn s54_another_worker_is_untouched() {
    let Some(bench) = emulator_only("s54b") else { return };
    let fail = Arc::new(AtomicU64::new(2));
    let broken = bench.prepare(&Options::persistent(), &[failing(&fail)], bench.builder());
    let healthy = bench.prepare(&Options::persistent(), &[signal_program("other", 64)], bench.builder());
    assert_own(&broken.worker.call(&no_args()).unwrap_err(), 2);
    healthy.worker.call(&no_args()).unwrap();
    healthy.worker.call(&no_args()).unwrap();
    broken.worker.close().unwrap();
    healthy.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 2 with S60: what `prepare` refuses leaves the backend closed, and a new one can be prepared.
#[test]
fn s60_a_refused_preparation_closes_the_backend_once() {
    let Some(bench) = emulator_only("s60b") else { return };
    let emulator = bench.builder().build().unwrap();
    let spy = pto_tests::spy::Spy::new(emulator as Arc<dyn Backend>);
    let unknown = program(
        ProgramSpec::new("unknown").callable(pto_simpler_sys::CallableSpec::chip("nobody", Default::default())),
        |_, _| Ok(()),
    );
    let refused = PreparedWorker::prepare(&[unknown], &Options::ordinary(), Arc::clone(&spy) as Arc<dyn Backend>);
    assert!(matches!(refused.err(), Some(Error::Backend(e)) if e.call() == Call::Register));
    assert_eq!(spy.closes(), 1);
    bench.assert_clean();
}

/// I14 against threads: a buffer that is created while another thread closes is refused, and leaves nothing.
#[test]
fn s60_a_buffer_created_during_a_close() {
    let Some(bench) = emulator_only("s60c") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f1()], bench.builder());
    rig.emulator().arm(Fault::new(Call::CreateBuffer, FaultEffect::Hang));
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let creating = scope.spawn(|| rig.worker.create_buffer(64).map(drop));
        rig.emulator().faults().wait_hung(1);
        rig.worker.close().unwrap();
        rig.emulator().release_hangs();
        let created = creating.join().unwrap();
        assert!(matches!(created, Err(Error::Closed)), "{created:?}");
    });
    assert_eq!(rig.emulator().stats().host_buffers, 0);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 20 against threads: a buffer that is dropped while another thread closes is gone with the backend; that is no
/// failure of the close.
#[test]
fn s60_a_buffer_dropped_during_a_close() {
    let Some(bench) = emulator_only("s60d") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f1()], bench.builder());
    let buffer = rig.worker.create_buffer(64).unwrap();
    rig.emulator().arm(Fault::new(Call::ReleaseBuffer, FaultEffect::Hang));
    // The close stops again where host memory is freed already.
    rig.emulator().arm(Fault::new(Call::Close, FaultEffect::Hang).on_chip(0));
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let dropping = scope.spawn(|| drop(buffer));
        rig.emulator().faults().wait_hung(1);
        let closing = scope.spawn(|| rig.worker.close());
        rig.emulator().faults().wait_hung(2);
        assert_eq!(rig.emulator().release_hang(Call::ReleaseBuffer, None), 1);
        dropping.join().unwrap();
        rig.emulator().release_hangs();
        closing.join().unwrap().unwrap();
    });
    bench.assert_clean();
}
