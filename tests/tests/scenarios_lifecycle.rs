//! Lifecycle and close: S01 to S11. Rules 6, 7, 17, 20 and 21; invariants I4, I5, I12 and I14.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use pto_dispatch::{Args, Error, Options, PreparedWorker, Program, ProgramSpec, Target};
use pto_mock::{Completion, EmulatorBuilder, EventKind, Fault, FaultEffect, FreeCause, Journal, KernelObject};
use pto_simpler_sys::{
    Backend, BackendError, Call, CallableKind, CallableSpec, ChipId, DomainState, Effect, Family, Retention, RunId,
};
use pto_tests::parked;
use pto_tests::rig::{Bench, Rig, allocations, any_backend, assert_order, at, emulator_only, submits};
use pto_tests::scenario::{DOMAIN, f1, program, signal_request};
use pto_tests::spy::{Seen, Spy};

fn no_args() -> Args {
    Args::new()
}

fn persistent() -> Options {
    Options::persistent().reset(false)
}

fn frees_by(journal: &Journal, cause: FreeCause) -> usize {
    journal.count(|e| matches!(e, EventKind::Free { cause: c, .. } if *c == cause))
}

/// Waits until close has turned admission off.
fn until_closing(rig: &Rig) {
    loop {
        match rig.worker.try_submit(rig.ids[0], &no_args()) {
            Err(Error::Closing | Error::Closed) => return,
            Err(Error::WouldBlock { .. }) => std::thread::yield_now(),
            other => panic!("two runs are held: {other:?}"),
        }
    }
}

#[test]
fn s01_close_order() {
    let Some(bench) = emulator_only("s01") else { return };
    let rig = bench.f1n();
    rig.hold_runs();
    let second = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let third = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let journal = rig.journal();
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let close = parked::spawn(scope, || rig.worker.close());
        until_closing(&rig);
        rig.complete(2);
        second.wait().unwrap();
        close.wait_parked();
        assert!(!third.is_done());
        assert_eq!(rig.spy.releases(), [], "released while a native is open (I5)");
        assert_eq!(rig.spy.closes(), 0, "backend closed while a native is open");
        rig.complete(3);
        close.join().unwrap();
        assert!(third.is_done(), "close returned before the dispatch was terminal");
    });
    third.wait().unwrap();
    let [(_, domain)] = allocations(&journal)[..] else { panic!("{journal}") };
    assert_order(
        &journal,
        &[
            ("end of run 2", at(&journal, "ended 2", |e| *e == EventKind::Ended(RunId(2), true))),
            ("end of run 3", at(&journal, "ended 3", |e| *e == EventKind::Ended(RunId(3), true))),
            ("release", at(&journal, "release", |e| *e == EventKind::Release(domain))),
            ("free", at(&journal, "free", |e| matches!(e, EventKind::Free { .. }))),
            ("backend close", at(&journal, "close", |e| *e == EventKind::CloseBegin)),
        ],
    );
    assert_eq!((journal.allocs(), journal.releases(), journal.frees()), (1, 1, 1));
    bench.assert_clean();
}

#[test]
fn s02_submit_against_a_closing_worker() {
    let Some(bench) = emulator_only("s02") else { return };
    let builds = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&builds);
    let f1 = f1();
    let counting = program(f1.spec().clone(), move |build, args| {
        counted.fetch_add(1, Ordering::SeqCst);
        f1.build(build, args)
    });
    let rig = bench.prepare(&persistent(), &[counting], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    rig.hold_runs();
    let handles: Vec<_> = (0..2).map(|_| rig.worker.submit(rig.ids[0], &no_args()).unwrap()).collect();
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let blocked = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &no_args()).map(drop));
        blocked.wait_parked();
        let close = parked::spawn(scope, || rig.worker.close());
        // The submitter wakes although both natives are still held: close does not wait for it, nor it for close.
        let refused = blocked.join();
        assert!(matches!(refused, Err(Error::Closing)), "{refused:?}");
        rig.complete(2);
        rig.complete(3);
        close.join().unwrap();
    });
    assert!(handles.iter().all(|handle| handle.wait().is_ok()));
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
    let journal = rig.journal();
    assert_eq!(submits(&journal), 3);
    assert_eq!(builds.load(Ordering::SeqCst), 3, "a refused submit built something");
    assert_eq!(rig.emulator().stats().runs, 0);
    bench.assert_clean();
}

#[test]
fn s03_close_twice() {
    let bench = any_backend("s03a");
    let rig = bench.prepare_any(&persistent(), &[f1()], 2);
    rig.worker.call(&no_args()).unwrap();
    rig.worker.close().unwrap();
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.closes(), 1);
    assert_eq!(rig.spy.releases().len(), 1);
    bench.assert_clean();
}

#[test]
fn s03_close_after_a_failed_close() {
    let Some(bench) = emulator_only("s03b") else { return };
    let rig = bench.f1n();
    rig.emulator().arm(Fault::new(Call::Close, FaultEffect::Before));
    let Err(Error::Close(failure)) = rig.worker.close() else { panic!("the backend's close fails") };
    assert!(!failure.complete && failure.others.is_empty(), "{failure:?}");
    assert!(matches!(&failure.primary, Error::Backend(e) if e.call() == Call::Close), "{failure:?}");
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.closes(), 2);
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.closes(), 2, "the third close is a no-op");
    assert_eq!(rig.spy.releases().len(), 1, "a retry releases nothing again");
    assert_eq!(rig.journal().releases(), 1);
    bench.assert_clean();
}

#[test]
fn s04_two_threads_close() {
    let Some(bench) = emulator_only("s04") else { return };
    let rig = bench.f1n();
    rig.emulator().arm(Fault::new(Call::Close, FaultEffect::Hang));
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let first = parked::spawn(scope, || rig.worker.close());
        rig.emulator().faults().wait_hung(1);
        let second = parked::spawn(scope, || rig.worker.close());
        second.wait_parked();
        assert_eq!(rig.emulator().release_hangs(), 1);
        first.join().unwrap();
        second.join().unwrap();
    });
    assert_eq!((rig.spy.closes(), rig.spy.releases().len()), (1, 1), "exactly one teardown");
    bench.assert_clean();
}

#[test]
fn s04_two_threads_close_and_get_the_same_error() {
    let Some(bench) = emulator_only("s04b") else { return };
    let rig = bench.f1n();
    // The teardown is parked in the release, and fails afterwards in the backend's close.
    rig.emulator().arm(Fault::new(Call::ReleaseDomain, FaultEffect::Hang));
    rig.emulator().arm(Fault::new(Call::Close, FaultEffect::Before));
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let first = parked::spawn(scope, || rig.worker.close());
        rig.emulator().faults().wait_hung(1);
        let second = parked::spawn(scope, || rig.worker.close());
        second.wait_parked();
        rig.emulator().release_hangs();
        let (Err(Error::Close(first)), Err(Error::Close(second))) = (first.join(), second.join()) else {
            panic!("both get the error")
        };
        assert!(Arc::ptr_eq(&first, &second), "not the same error: {first:?} and {second:?}");
    });
    assert_eq!(rig.spy.closes(), 1, "the joiner started a second attempt");
    rig.worker.close().unwrap();
    assert_eq!((rig.spy.closes(), rig.spy.releases().len()), (2, 1));
    bench.assert_clean();
}

#[test]
fn s05_backend_panics_while_staging_is_released() {
    let Some(bench) = emulator_only("s05a") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f1()], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    rig.hold_runs();
    rig.emulator().arm(Fault::new(Call::ReleaseBuffer, FaultEffect::Unwind));
    let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let waiters: Vec<_> = (0..3).map(|_| parked::spawn(scope, || dispatch.wait())).collect();
        waiters.iter().for_each(parked::Parked::wait_parked);
        rig.complete(2);
        for waiter in waiters {
            let Err(Error::Failed(failure)) = waiter.join() else { panic!("a cleanup error is the outcome") };
            assert_eq!(failure.cause.family(), Family::Broken, "{failure}");
            assert_eq!(failure.id, dispatch.id());
        }
    });
    assert!(dispatch.is_done());
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    assert!(matches!(refused, Err(Error::Poisoned(_))), "{refused:?}");
    // Delivered, and nothing else is wrong.
    rig.worker.close().unwrap();
    assert_eq!(rig.emulator().stats().host_buffers, 0);
    bench.assert_clean();
}

#[test]
fn s05_reporting_thread_and_a_waiter_panic() {
    let Some(bench) = emulator_only("s05b") else { return };
    let rig = bench.f1n();
    rig.hold_runs();
    rig.spy.panic_after_end.store(true, Ordering::SeqCst);
    let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let panicking = parked::spawn(scope, || {
            catch_unwind(AssertUnwindSafe(|| {
                dispatch.wait().unwrap();
                resume_unwind(Box::new("a waiter panics"));
            }))
        });
        let others: Vec<_> = (0..2).map(|_| parked::spawn(scope, || dispatch.wait())).collect();
        others.iter().for_each(parked::Parked::wait_parked);
        panicking.wait_parked();
        rig.complete(2);
        assert!(panicking.join().is_err());
        assert!(others.into_iter().all(|other| other.join().is_ok()));
    });
    assert!(dispatch.is_done() && dispatch.wait().is_ok());
    rig.emulator().set_completion(Completion::Free);
    rig.worker.call(&no_args()).unwrap();
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Leases the given domains, in order.
fn leasing(domains: &'static [&'static str]) -> Arc<dyn Program> {
    program(ProgramSpec::new("leasing"), move |build, _| {
        for name in domains {
            build.lease(name, &signal_request(64))?;
        }
        Ok(())
    })
}

#[test]
fn s06_one_bad_release_does_not_strand_the_others() {
    let Some(bench) = emulator_only("s06") else { return };
    let rig = bench.prepare(&persistent(), &[leasing(&["d0", "d1", "d2"])], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    let journal = rig.journal();
    let domains: Vec<_> = allocations(&journal).into_iter().map(|(_, domain)| domain).collect();
    rig.emulator().arm(Fault::new(Call::ReleaseDomain, FaultEffect::Before).nth(2));
    let Err(Error::Close(failure)) = rig.worker.close() else { panic!("one release fails") };
    assert_eq!(rig.spy.releases(), [domains[2], domains[1], domains[0]], "reverse first-use order (rule 20)");
    assert!(failure.complete && failure.others.is_empty(), "{failure:?}");
    assert!(matches!(&failure.primary, Error::Release { what, .. } if &**what == "p0:d1"), "{failure:?}");
    let freed: Vec<_> = journal.select(|e| matches!(e, EventKind::Free { cause: FreeCause::Release, .. }));
    let freed: Vec<_> =
        freed.iter().map(|e| if let EventKind::Free { domain, .. } = e { *domain } else { panic!() }).collect();
    assert_eq!(freed, [domains[2], domains[0]]);
    assert_eq!(frees_by(&journal, FreeCause::Sweep), 1, "the backend's sweep frees what is left");
    assert_eq!(rig.spy.closes(), 1);
    let Err(Error::Close(again)) = rig.worker.close() else { panic!("the same outcome again") };
    assert!(Arc::ptr_eq(&failure, &again));
    assert_eq!((rig.spy.closes(), rig.spy.releases().len()), (1, 3), "nothing is issued again");
    bench.assert_clean();
}

#[test]
fn s07_asked_to_release_is_not_freed() {
    let Some(bench) = emulator_only("s07") else { return };
    let rig = bench.f1n();
    rig.spy.lie_about_release.store(true, Ordering::SeqCst);
    let Err(Error::Close(failure)) = rig.worker.close() else { panic!("the domain is not freed") };
    assert!(failure.complete, "{failure:?}");
    assert_eq!(failure.primary.to_string(), "not freed: p0:comm_d0");
    let journal = rig.journal();
    assert_eq!((rig.spy.closes(), frees_by(&journal, FreeCause::Sweep), journal.frees()), (1, 1, 1));
    bench.assert_clean();
}

/// An explicit release races the sweep of the backend's close; `park` stops the winner in the middle of its work.
fn release_against_sweep(bench: &Bench, park: &[Fault], sweep_first: bool) -> (Rig, [Result<(), BackendError>; 2]) {
    let rig = bench.f1n();
    let [(_, domain)] = allocations(&rig.journal())[..] else { panic!("one domain") };
    park.iter().for_each(|fault| rig.emulator().arm(*fault));
    let results = std::thread::scope(|scope| {
        let emulator = rig.emulator();
        let sweep = || emulator.close();
        let release = || emulator.release_domain(domain);
        if sweep_first {
            let winner = parked::spawn(scope, sweep);
            emulator.faults().wait_hung(1);
            let loser = parked::spawn(scope, release);
            loser.wait_parked();
            emulator.release_hangs();
            [winner.join(), loser.join()]
        } else {
            let winner = parked::spawn(scope, release);
            emulator.faults().wait_hung(1);
            let loser = parked::spawn(scope, sweep);
            loser.wait_parked();
            emulator.release_hangs();
            [winner.join(), loser.join()]
        }
    });
    (rig, results)
}

#[test]
fn s08_exactly_one_free_in_both_orders() {
    for sweep_first in [true, false] {
        let Some(bench) = emulator_only("s08") else { return };
        let call = if sweep_first { Call::Close } else { Call::ReleaseDomain };
        let park = Fault::new(call, FaultEffect::Hang).on_chip(0);
        let (rig, results) = release_against_sweep(&bench, &[park], sweep_first);
        assert_eq!(results, [Ok(()), Ok(())], "sweep first: {sweep_first}");
        let journal = rig.journal();
        assert_eq!(journal.frees(), 1, "{journal}");
        // The worker's own close finds everything done.
        rig.worker.close().unwrap();
        assert_eq!(journal.frees(), 1);
        bench.assert_clean();
    }
}

#[test]
fn s08_the_loser_repeats_an_error() {
    let Some(bench) = emulator_only("s08b") else { return };
    // The sweep is parked on chip 0 and fails on chip 1.
    let park = Fault::new(Call::Close, FaultEffect::Hang).on_chip(0);
    let fail = Fault::new(Call::Close, FaultEffect::After).on_chip(1);
    let (rig, [sweep, release]) = release_against_sweep(&bench, &[park, fail], true);
    let error = sweep.unwrap_err();
    assert_eq!(release.unwrap_err(), error);
    assert_eq!(rig.journal().frees(), 1);
    drop(rig);

    // And the other way round.
    let Some(bench) = emulator_only("s08c") else { return };
    let park = Fault::new(Call::ReleaseDomain, FaultEffect::Hang).on_chip(0);
    let fail = Fault::new(Call::ReleaseDomain, FaultEffect::After).on_chip(1);
    let (rig, [release, sweep]) = release_against_sweep(&bench, &[park, fail], false);
    let error = release.unwrap_err();
    assert_eq!(sweep.unwrap_err(), error);
    assert_eq!(rig.journal().frees(), 1);
}

#[test]
fn s08_a_lost_release_reply_is_unknown() {
    let Some(bench) = emulator_only("s08d") else { return };
    let rig = bench.f1n();
    let [(_, domain)] = allocations(&rig.journal())[..] else { panic!("one domain") };
    rig.emulator().arm(Fault::new(Call::ReleaseDomain, FaultEffect::NoReply));
    let Err(Error::Close(failure)) = rig.worker.close() else { panic!("the reply is lost") };
    let Error::Release { source, .. } = &failure.primary else { panic!("{failure:?}") };
    assert_eq!(source.effect(), Effect::Unknown);
    assert!(!source.may_retry());
    assert!(rig.worker.close().is_err(), "reported each time");
    assert_eq!(rig.spy.releases(), [domain], "never retried");
    assert_eq!(rig.journal().frees(), 1);
    assert_eq!(rig.emulator().domain_state(domain), Ok(DomainState::Freed));
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
}

#[test]
fn s09_drop_drains_and_releases() {
    let Some(bench) = emulator_only("s09a") else { return };
    let rig = bench.f1n();
    let (journal, emulator, spy) = (rig.journal(), rig.shared_emulator(), Arc::clone(&rig.spy));
    rig.hold_runs();
    let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    std::thread::scope(|scope| {
        let dropping = parked::spawn(scope, || drop(rig));
        dropping.wait_parked();
        assert_eq!((spy.releases().len(), spy.closes()), (0, 0), "nothing is freed under a run (I5)");
        emulator.complete(RunId(2)).unwrap();
        dropping.join();
    });
    dispatch.wait().unwrap();
    assert_eq!((journal.allocs(), journal.releases(), journal.frees(), spy.closes()), (1, 1, 1, 1));
    assert_eq!(emulator.stats().threads, 0);
    bench.assert_clean();
}

#[test]
fn s09_drop_is_bounded_and_leaks_what_does_not_end() {
    let Some(bench) = emulator_only("s09b") else { return };
    let options = persistent().drop_limit(Duration::from_millis(1));
    let rig = bench.prepare(&options, &[f1()], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    let emulator = rig.shared_emulator();
    rig.hold_runs();
    let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    drop(rig);
    // Not freed under the run, and the run still ends like any other.
    assert_eq!(emulator.journal().frees(), 0);
    emulator.complete(RunId(2)).unwrap();
    dispatch.wait().unwrap();
    let report = emulator.abandon();
    assert_eq!(report.left, Vec::<String>::new());
    assert_eq!(emulator.journal().frees(), 1);
    bench.assert_clean();
}

#[test]
fn s09_drop_during_a_panic_and_after_a_failed_close() {
    let Some(bench) = emulator_only("s09c") else { return };
    let spy = Mutex::new(None);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let rig = bench.f1n();
        *spy.lock().unwrap() = Some(Arc::clone(&rig.spy));
        resume_unwind(Box::new(5_i32));
    }));
    assert_eq!(unwound.unwrap_err().downcast_ref::<i32>(), Some(&5));
    let spy = spy.lock().unwrap().take().unwrap();
    assert_eq!((spy.releases().len(), spy.closes()), (1, 1));
    bench.assert_clean();

    let rig = bench.f1n();
    let spy = Arc::clone(&rig.spy);
    rig.emulator().arm(Fault::new(Call::Close, FaultEffect::Before));
    assert!(rig.worker.close().is_err());
    drop(rig);
    assert_eq!((spy.releases().len(), spy.closes()), (1, 2), "drop retries the backend's close only");
    bench.assert_clean();
}

type SharedWorker = Arc<OnceLock<Weak<PreparedWorker>>>;

#[test]
fn s10_close_and_submit_inside_the_builder_are_reentrant() {
    let bench = any_backend("s10");
    let shared: SharedWorker = Arc::default();
    let seen: Arc<Mutex<Vec<&'static str>>> = Arc::default();
    let (inside, calls) = (Arc::clone(&shared), Arc::clone(&seen));
    // Argument 0: whether the callback lets the error out.
    let spec = ProgramSpec::new("reentrant").parameter(pto_dispatch::Parameter::scalar("fail"));
    let reentrant = program(spec, move |build, args| {
        let worker = inside.get().and_then(Weak::upgrade).unwrap();
        let id = worker.programs().next().unwrap();
        let buffer = worker.create_buffer(8)?;
        let attempts = [
            ("close", worker.close()),
            ("close_timeout", worker.close_timeout(Duration::MAX)),
            ("submit", worker.submit(id, args).map(drop)),
            ("try_submit", worker.try_submit(id, args).map(drop)),
            ("run", worker.run(id, args)),
            ("release", buffer.release()),
        ];
        for (name, attempt) in &attempts {
            assert!(matches!(attempt, Err(Error::Reentrant { .. })), "{name}: {attempt:?}");
            calls.lock().unwrap().push(name);
        }
        build.lease(DOMAIN, &signal_request(64))?;
        if args.scalar_at(0)? == 1 {
            return Err(Box::new(worker.close().unwrap_err()));
        }
        Ok(())
    });
    let rig = bench.prepare_any(&persistent(), &[reentrant, f1()], 2);
    let worker = Arc::new(rig.worker);
    shared.set(Arc::downgrade(&worker)).unwrap();
    // Continues as the callback decides.
    worker.run(rig.ids[0], &no_args().scalar(0)).unwrap();
    assert_eq!(seen.lock().unwrap().len(), 6);
    // Fails as the callback decides, before anything was opened: the worker stays usable (rule 17).
    let failed = worker.run(rig.ids[0], &no_args().scalar(1));
    assert!(matches!(failed, Err(Error::Reentrant { .. })), "{failed:?}");
    std::thread::scope(|scope| {
        scope.spawn(|| worker.run(rig.ids[1], &no_args()).unwrap());
    });
    worker.run(rig.ids[0], &no_args().scalar(0)).unwrap();
    worker.close().unwrap();
    assert_eq!(rig.spy.closes(), 1);
    drop(worker);
    bench.assert_clean();
}

/// An F1 compiled for `platform`.
fn f1_for(platform: &str) -> Arc<dyn Program> {
    let spec = ProgramSpec::new("f1").target(Target {
        platform: platform.into(),
        runtime: "emulated".into(),
        device_ids: vec![0, 1],
    });
    program(spec, |build, _| {
        build.lease(DOMAIN, &signal_request(64))?;
        Ok(())
    })
}

#[test]
fn s11_failed_construction_before_the_backend_exists() {
    let bench = any_backend("s11a");
    let made = AtomicUsize::new(0);
    let attempt = |programs: &[Arc<dyn Program>], options: &Options| {
        PreparedWorker::prepare_with(programs, options, |_| {
            made.fetch_add(1, Ordering::SeqCst);
            Err(BackendError::misuse(Call::Start, "not wanted"))
        })
        .unwrap_err()
    };
    let mixed = attempt(&[f1_for("a2a3sim"), f1_for("a5sim")], &persistent());
    assert!(
        matches!(&mixed, Error::TargetMismatch { first, second, .. }
        if first.contains("a2a3sim") && second.contains("a5sim")),
        "{mixed}"
    );
    assert!(matches!(attempt(&[], &persistent()), Error::NoPrograms));
    assert!(matches!(attempt(&[f1()], &Options::ordinary().reset(true)), Error::ResetWithoutPersistence));
    assert_eq!(made.load(Ordering::SeqCst), 0, "the backend was made");
    // Making the backend fails by itself: nothing to close.
    assert!(matches!(attempt(&[f1()], &persistent()), Error::Backend(e) if e.to_string().contains("not wanted")));
    bench.assert_clean();
}

/// A step at which construction fails: its name, the program, the emulator, and whether the error is the right one.
type Step = (&'static str, Arc<dyn Program>, EmulatorBuilder, fn(&Error) -> bool);

fn failing_steps(bench: &Bench) -> Vec<Step> {
    let old = KernelObject::entry_without_domains(|_| Ok(()));
    let callable =
        CallableSpec { name: "old".into(), kind: CallableKind::Entry, signature: None, source: old.into_source() };
    let entry = program(ProgramSpec::new("old").callable(callable), |_, _| Ok(()));
    let missing = Retention::Unsupported { missing: "get_or_allocate_domain".into() };
    let failing = |fault: Fault| bench.builder().faults(fault.into());
    vec![
        ("no provider", entry, bench.builder(), |e| matches!(e, Error::EntryWithoutProvider { .. })),
        ("platform", f1_for("a5"), bench.builder(), |e| matches!(e, Error::TargetMismatch { .. })),
        (
            "retention",
            f1(),
            bench.builder().retention(missing),
            |e| matches!(e, Error::NoRetention { missing } if &**missing == "get_or_allocate_domain"),
        ),
        (
            "register",
            f1(),
            failing(Fault::new(Call::Register, FaultEffect::Before)),
            |e| matches!(e, Error::Backend(e) if e.call() == Call::Register),
        ),
        (
            "init",
            f1(),
            failing(Fault::new(Call::Start, FaultEffect::Before).on_chip(1)),
            |e| matches!(e, Error::Backend(e) if e.runtime().is_some_and(|f| f.chip == Some(ChipId(1)))),
        ),
        (
            "interrupted init",
            f1(),
            failing(Fault::new(Call::Start, FaultEffect::Unwind)),
            |e| matches!(e, Error::Backend(e) if e.call() == Call::Start && e.family() == Family::Broken),
        ),
    ]
}

#[test]
fn s11_failed_construction_leaves_nothing() {
    for close_fails in [false, true] {
        let Some(bench) = emulator_only("s11b") else { return };
        for (name, program, builder, expected) in failing_steps(&bench) {
            let emulator = builder.build().unwrap();
            if close_fails {
                emulator.arm(Fault::new(Call::Close, FaultEffect::Before));
            }
            let spy = Spy::new(Arc::clone(&emulator) as Arc<dyn Backend>);
            let backend = Arc::clone(&spy) as Arc<dyn Backend>;
            let error = PreparedWorker::prepare(&[program], &persistent(), backend).unwrap_err();
            // The first error is the one that is reported, even where the close fails too.
            assert!(expected(&error), "{name}: {error:?}");
            assert_eq!(spy.count(|seen| *seen == Seen::Close), 1, "{name}");
            assert_eq!(emulator.stats().threads, 0, "{name}: children are left");
            assert_eq!(emulator.journal().allocs(), 0, "{name}");
            drop((spy, emulator));
            bench.assert_clean();
        }
    }
}
