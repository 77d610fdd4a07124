//! Scenarios with the same expected values on every backend: S01, S19, S22, S25, S27, S36, S37, S50 and S71.
//!
//! Other suites reach into the emulator to force an order; these use public calls only. Runs are held open by a
//! sub-worker that polls a host buffer, and what reached the backend is read from [`JournalBackend`]. On a
//! process-backed backend each test is a process of its own, and nothing may be left in shared memory after it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use pto_dispatch::{Args, Error, Options, Parameter, PreparedWorker, Program, ProgramSpec};
use pto_mock::EventKind;
use pto_mock::conformance::BackendSpec;
use pto_simpler_sys::{
    Access, CallableSpec, ChipId, DataType, DomainRequest, Family, NamedBuffer, RunId, Signature,
};
use pto_tests::everywhere::{Hold, OpenOnDrop, Outs, Rig, copy, gate, hold_run, read_back, until_closing};
use pto_tests::rig::{allocations, assert_order, at, copies, submits};
use pto_tests::scenario::{DOMAIN, add, add_one, f1, f2, fail, program, signal_request};
use pto_tests::spy::Spy;
use pto_tests::{backend, everywhere, parked};

fn no_args() -> Args {
    Args::new()
}

/// F1, whose run ends when its hold (argument 0) is open.
fn held() -> Arc<dyn Program> {
    held_noting(&Arc::default())
}

/// The same; notes the dispatch and the frame of each build.
fn held_noting(builds: &Arc<Mutex<Vec<(u64, usize)>>>) -> Arc<dyn Program> {
    let builds = Arc::clone(builds);
    let spec = ProgramSpec::new("held").callable(add()).callable(gate()).parameter(Parameter::host("hold", 8));
    program(spec, move |build, args| {
        builds.lock().unwrap().push((build.dispatch().get(), build.frame()));
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        add_one(build, &lease, "signal")?;
        hold_run(build, 1, args, 0)
    })
}

/// A program that adds 1 to each word of `window_bytes` on two members, and reads the result into arguments 0 and 1.
fn adder(name: &str, window_bytes: u64) -> Arc<dyn Program> {
    let spec = ProgramSpec::new(name).callable(add()).callable(copy());
    let spec =
        spec.parameter(Parameter::host("out0", window_bytes)).parameter(Parameter::host("out1", window_bytes));
    program(spec, move |build, args| {
        let lease = build.lease(DOMAIN, &signal_request(window_bytes))?;
        add_one(build, &lease, "signal")?;
        read_back(build, &lease, "signal", 1, args, 0)
    })
}

/// An accepted end of a run, in the journal.
fn ended(run: u64) -> impl Fn(&EventKind) -> bool {
    move |event| *event == EventKind::Ended(RunId(run), true)
}

everywhere!(s01_close_order, || {
    let rig = Rig::new(&Options::persistent().reset(false), &[held()], 2);
    rig.worker.call(&Args::new().host(&Hold::opened(&rig.worker).0)).unwrap();
    let (hold2, hold3) = (Hold::new(&rig.worker), Hold::new(&rig.worker));
    let (args2, args3) = (Args::new().host(&hold2.0), Args::new().host(&hold3.0));
    let second = rig.worker.submit(rig.ids[0], &args2).unwrap();
    let third = rig.worker.submit(rig.ids[0], &args3).unwrap();
    std::thread::scope(|scope| {
        let _rescue = OpenOnDrop(&[&hold2, &hold3]);
        hold2.wait_arrived();
        let close = parked::spawn(scope, || rig.worker.close());
        until_closing(&rig, &args3);
        hold2.open();
        second.wait().unwrap();
        hold3.wait_arrived();
        close.wait_parked();
        assert!(!third.is_done());
        assert_eq!(rig.spy.releases(), [], "released while a native is open (I5)");
        assert_eq!(rig.spy.closes(), 0, "backend closed while a native is open");
        hold3.open();
        close.join().unwrap();
        assert!(third.is_done(), "close returned before the dispatch was terminal");
    });
    third.wait().unwrap();
    let journal = &rig.journal;
    let [(_, domain)] = allocations(journal)[..] else { panic!("{journal}") };
    assert_order(
        journal,
        &[
            ("end of run 2", at(journal, "ended 2", ended(2))),
            ("end of run 3", at(journal, "ended 3", ended(3))),
            ("release", at(journal, "release", |e| *e == EventKind::Release(domain))),
            ("free", at(journal, "free", |e| matches!(e, EventKind::Free { .. }))),
            ("backend close", at(journal, "close", |e| *e == EventKind::CloseBegin)),
        ],
    );
    assert_eq!((journal.allocs(), journal.releases(), journal.frees()), (1, 1, 1));
});

everywhere!(s19_same_name_in_two_programs, || {
    let rig = Rig::new(&Options::persistent(), &[adder("prefill", 64), adder("decode", 128)], 2);
    let [prefill, decode] = rig.ids[..] else { panic!("two programs") };
    for (id, nbytes) in [(prefill, 64), (decode, 128), (prefill, 64)] {
        let outs = Outs::new(&rig.worker, nbytes);
        rig.worker.run(id, &outs.args()).unwrap();
        outs.assert_all(1);
    }
    let domains = allocations(&rig.journal);
    let names: Vec<&str> = domains.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["p0:comm_d0", "p1:comm_d0"]);
    assert_ne!(domains[0].1, domains[1].1);
    let mut wiped: Vec<_> =
        copies(&rig.journal).iter().map(|(run, chip, _, nbytes)| (*run, *chip, *nbytes)).collect();
    wiped.sort_unstable();
    assert_eq!(wiped, [(3, 0, 64), (3, 1, 64)], "only the third run resets");
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.releases(), [domains[1].1, domains[0].1]);
    assert_eq!((rig.journal.allocs(), rig.journal.frees()), (2, 2));
});

everywhere!(s22_staging_buffers, || {
    let f2 = f2();
    let mut spec = f2.spec().clone();
    spec = spec.callable(copy()).parameter(Parameter::host("out0", 1_048_576));
    spec = spec.parameter(Parameter::host("out1", 1_048_576));
    let reading = program(spec, move |build, args| {
        f2.build(build, args)?;
        let lease = build.lease(DOMAIN, &pto_tests::scenario::f2_request())?;
        read_back(build, &lease, "payload", 1, args, 0)
    });
    let rig = Rig::new(&Options::persistent(), &[reading], 2);
    let outs = Outs::new(&rig.worker, 1_048_576);
    rig.worker.call(&outs.args()).unwrap();
    outs.assert_all(1);
    assert_eq!(rig.journal.copies(), [], "the first use is not reset");
    assert_eq!(rig.worker.stats(rig.ids[0]).unwrap().staging_buffers, 0);
    rig.worker.call(&outs.args()).unwrap();
    outs.assert_all(1);
    for chip in [0, 1] {
        let of_chip: Vec<_> = copies(&rig.journal).into_iter().filter(|(_, c, ..)| *c == chip).collect();
        assert_eq!(of_chip, [(2, chip, 0, 1_048_576), (2, chip, 1, 17)], "declaration order on each rank");
    }
    let zeros = |e: &EventKind| matches!(e, EventKind::Copy { zero: true, .. });
    assert!(rig.journal.copies().iter().all(zeros), "{}", rig.journal);
    let stats = rig.worker.stats(rig.ids[0]).unwrap();
    assert_eq!((stats.staging_buffers, stats.peak_staging_bytes), (2, 1_048_593));
    assert_eq!((stats.reset_copies, stats.zeroed_bytes), (4, 2 * 1_048_593));
    drop(outs);
    rig.worker.close().unwrap();
});

everywhere!(s22_one_staging_buffer_for_each_distinct_size, || {
    let two = |a, b| DomainRequest::packed([0, 1, 2], vec![NamedBuffer::bytes("a", a), NamedBuffer::bytes("b", b)]);
    let (d0, d1) = (two(64, 64), two(64, 4096));
    let pair = program(ProgramSpec::new("pair"), move |build, _| {
        build.lease("d0", &d0)?;
        build.lease("d1", &d1)?;
        Ok(())
    });
    let rig = Rig::new(&Options::persistent(), &[pair], 3);
    rig.worker.call(&no_args()).unwrap();
    rig.worker.call(&no_args()).unwrap();
    assert_eq!(copies(&rig.journal).len(), 12);
    let stats = rig.worker.stats(rig.ids[0]).unwrap();
    assert_eq!((stats.staging_buffers, stats.peak_staging_bytes), (2, 4160));
    rig.worker.close().unwrap();
});

everywhere!(s25_a_lease_shows_what_was_asked_for_and_not_its_mapping, || {
    let f1 = f1();
    let looking = program(f1.spec().clone(), move |build, args| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        assert_eq!(lease.window_bytes(), 64, "the lease exposes padding");
        assert_eq!(lease.buffer(ChipId(0), "signal")?.nbytes(), 64);
        f1.build(build, args)
    });
    let rig = Rig::new(&Options::persistent(), &[looking], 2);
    rig.worker.call(&no_args()).unwrap();
    rig.worker.call(&no_args()).unwrap();
    let mut wiped = copies(&rig.journal);
    wiped.sort_unstable();
    assert_eq!(wiped, [(2, 0, 0, 64), (2, 1, 0, 64)]);
    rig.worker.close().unwrap();
});

everywhere!(s27_never_wipe_under_a_running_dispatch, || {
    let spec = ProgramSpec::new("held").callable(add()).callable(copy()).callable(gate());
    let spec = spec.parameter(Parameter::host("out0", 64)).parameter(Parameter::host("out1", 64));
    let holding = program(spec.parameter(Parameter::host("hold", 8)), |build, args| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        hold_run(build, 2, args, 2)?;
        add_one(build, &lease, "signal")?;
        read_back(build, &lease, "signal", 1, args, 0)
    });
    let rig = Rig::new(&Options::persistent(), &[holding], 2);
    let [out2, out3] = [(); 2].map(|()| Outs::new(&rig.worker, 64));
    let (hold, open) = (Hold::new(&rig.worker), Hold::opened(&rig.worker));
    rig.worker.call(&out2.args().host(&open.0)).unwrap();
    let running = rig.worker.submit(rig.ids[0], &out2.args().host(&hold.0)).unwrap();
    let copied = rig.journal.copies().len();
    assert_eq!(copied, 2, "run 2 was reset");
    std::thread::scope(|scope| {
        let _rescue = OpenOnDrop(&[&hold]);
        hold.wait_arrived();
        let next = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &out3.args().host(&open.0)).unwrap());
        rig.journal.wait_until(|events| events.iter().any(|e| e.kind == EventKind::Admit(RunId(3))));
        next.wait_parked();
        assert_eq!(rig.journal.copies().len(), copied, "wiped under a running dispatch");
        hold.open();
        running.wait().unwrap();
        next.join().wait().unwrap();
    });
    out2.assert_all(1);
    out3.assert_all(1);
    assert_eq!(rig.journal.copies_of(RunId(3)).len(), 2);
    rig.worker.close().unwrap();
});

everywhere!(s36_two_frames_third_waits_before_doing_anything, || {
    let builds = Arc::default();
    let rig = Rig::new(&Options::persistent().reset(false), &[held_noting(&builds)], 2);
    let open = Hold::opened(&rig.worker);
    let open = Args::new().host(&open.0);
    rig.worker.call(&open).unwrap();
    let (hold2, hold3) = (Hold::new(&rig.worker), Hold::new(&rig.worker));
    let first = rig.worker.submit(rig.ids[0], &Args::new().host(&hold2.0)).unwrap();
    let second = rig.worker.submit(rig.ids[0], &Args::new().host(&hold3.0)).unwrap();
    std::thread::scope(|scope| {
        let _rescue = OpenOnDrop(&[&hold2, &hold3]);
        hold2.wait_arrived();
        let seen = rig.spy.seen();
        let third = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &open));
        third.wait_parked();
        assert_eq!(builds.lock().unwrap().len(), 3, "the third has built something (I9)");
        assert_eq!(rig.spy.seen(), seen, "the third has reached the backend");
        assert_eq!(submits(&rig.journal), 3);
        assert!(matches!(rig.worker.try_submit(rig.ids[0], &open), Err(Error::WouldBlock { .. })));
        hold2.open();
        let third = third.join().unwrap();
        assert!(first.is_done() && !second.is_done(), "the third waits for the oldest");
        assert_eq!((first.id().get(), second.id().get(), third.id().get()), (2, 3, 4));
        let builds = builds.lock().unwrap();
        let frame = |id| builds.iter().find(|b| b.0 == id).unwrap().1;
        assert_eq!(frame(4), frame(2), "the third gets the frame of the one that ended");
        assert_ne!(frame(3), frame(2));
        hold3.open();
        third.wait().unwrap();
    });
    rig.worker.close().unwrap();
});

everywhere!(s37_a_failed_dispatch_refuses_later_ones_with_its_own_error, || {
    let failing = program(ProgramSpec::new("failing").callable(fail()).callable(add()), |build, _| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        let buffer = lease.buffer(ChipId(0), "signal")?;
        let tensor = build.tensor(&buffer, &[16], DataType::Int32, Access::InOut)?;
        build.task(1)?.tensor(tensor).scalar(1).submit(ChipId(0))?;
        Ok(build.task(0)?.scalar(7).submit(ChipId(1))?)
    });
    let rig = Rig::new(&Options::persistent().reset(false), &[failing], 2);
    let error = rig.worker.call(&no_args()).unwrap_err();
    assert_eq!(error.family(), Family::Backend, "{error}");
    let text = error.to_string();
    let accepted = submits(&rig.journal);
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    let Err(Error::Poisoned(failure)) = refused else { panic!("{refused:?}") };
    let cause = failure.cause.to_string();
    assert!(
        text.ends_with(&cause) && cause.contains("chip1"),
        "{cause:?} is not what dispatch 1 failed with: {text:?}"
    );
    assert_eq!(submits(&rig.journal), accepted);
    // The error was delivered to the waiter; what the backend adds at close is its own.
    let closed = rig.worker.close();
    println!("close: {closed:?}");
    assert_eq!(rig.spy.releases(), [], "after a failure domains are the backend's");
    assert_eq!((rig.journal.allocs(), rig.journal.frees()), (1, 1), "freed once (I4)");
});

/// The builder's own error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("own failure {0}")]
struct Own(u64);

fn failing_at(mode: &Arc<AtomicU64>) -> Arc<dyn Program> {
    let mode = Arc::clone(mode);
    program(ProgramSpec::new("failing").callable(add()), move |build, _| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        let mode = mode.load(Ordering::SeqCst);
        if mode == 1 {
            return Err(Own(1).into());
        }
        add_one(build, &lease, "signal")?;
        if mode == 2 { Err(Own(2).into()) } else { Ok(()) }
    })
}

#[track_caller]
fn assert_own(error: &Error, expected: u64) {
    let Error::Program { source, .. } = error else { panic!("the builder's own error, not {error:?}") };
    assert_eq!(source.downcast_ref::<Own>(), Some(&Own(expected)));
}

everywhere!(s50_failed_dispatch_then_close, || {
    for (mode, warm) in [(1, false), (2, false), (2, true)] {
        let fail = Arc::new(AtomicU64::new(0));
        let rig = Rig::new(&Options::persistent().reset(false), &[failing_at(&fail)], 2);
        if warm {
            rig.worker.call(&no_args()).unwrap();
        }
        fail.store(mode, Ordering::SeqCst);
        assert!(rig.worker.failure().is_none());
        let error = rig.worker.submit(rig.ids[0], &no_args()).map(drop).unwrap_err();
        assert_own(&error, mode);
        fail.store(0, Ordering::SeqCst);
        let before = submits(&rig.journal);
        let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
        let Err(Error::Poisoned(failure)) = refused else { panic!("{refused:?}") };
        assert_own(&failure.cause, mode);
        assert!(rig.worker.failure().is_some_and(|asked| Arc::ptr_eq(&asked, &failure)), "why it takes no more");
        assert_eq!(submits(&rig.journal), before);
        // The error was delivered to the submitter.
        rig.worker.close().unwrap();
        assert_eq!(rig.spy.releases(), [], "a poisoned domain is not ours to release");
        let counts = (rig.journal.allocs(), rig.journal.frees());
        assert_eq!(counts, (1, 1), "freed once, by the backend (I4); mode {mode}, warm {warm}");
    }
});

everywhere!(s71_nothing_left_after_a_clean_close, || {
    let rig = Rig::new(&Options::persistent(), &[f1()], 2);
    rig.worker.call(&no_args()).unwrap();
    let _unreleased = rig.worker.create_buffer(1 << 20).unwrap();
    rig.worker.close().unwrap();
});

everywhere!(s71_nothing_left_after_a_drop, || {
    let rig = Rig::new(&Options::persistent(), &[f2()], 2);
    rig.worker.call(&no_args()).unwrap();
    let last = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let Rig { worker, spy, .. } = rig;
    drop(worker);
    assert!(last.is_done());
    assert_eq!(spy.closes(), 1);
});

everywhere!(s71_nothing_left_after_a_failed_reset, || {
    let faults = "copy_to@chip1#1:before".parse().unwrap();
    let rig = Rig::with_faults(&Options::persistent(), &[f1()], 2, faults);
    rig.worker.call(&no_args()).unwrap();
    let refused = rig.worker.call(&no_args()).unwrap_err();
    let Error::ResetCopy { key, buffer, chip, rank, .. } = &refused else { panic!("{refused:?}") };
    assert_eq!((&**key, &**buffer, *chip, *rank), ("p0:comm_d0", "signal", ChipId(1), 1));
    assert!(matches!(rig.worker.call(&no_args()), Err(Error::Poisoned(_))));
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.releases(), []);
    assert_eq!((rig.journal.allocs(), rig.journal.frees()), (1, 1));
});

everywhere!(s71_nothing_left_after_a_panic_in_a_builder, || {
    let panicking = program(ProgramSpec::new("panicking").callable(add()), |build, _| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        add_one(build, &lease, "signal")?;
        panic!("the builder's own panic");
    });
    let rig = Rig::new(&Options::persistent(), &[panicking], 2);
    let payload =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rig.worker.call(&no_args()))).unwrap_err();
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"the builder's own panic"));
    assert!(matches!(rig.worker.call(&no_args()), Err(Error::Poisoned(_))));
    rig.worker.close().unwrap();
});

everywhere!(s71_nothing_left_after_a_failed_construction, || {
    let unknown = ProgramSpec::new("unknown").callable(CallableSpec::chip("nobody_has_this", Signature::default()));
    let backend = backend::chosen().unwrap().create(&BackendSpec::new(2, 1)).unwrap();
    let spy = Spy::new(backend);
    let refused =
        PreparedWorker::prepare(&[program(unknown, |_, _| Ok(()))], &Options::persistent(), Arc::clone(&spy) as _);
    let error = refused.map(drop).unwrap_err();
    assert!(error.to_string().contains("nobody_has_this") || format!("{error:?}").contains("nobody_has_this"));
    assert_eq!(spy.closes(), 1, "afterwards exactly one close (S11)");
});
