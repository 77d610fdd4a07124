//! More scenarios with the same expected values on every backend: S02, S38, S40, S42, S45, S55, S56 and S60.
//!
//! As `scenarios_everywhere`: public calls only, runs held open by a sub-worker, and one process per test on a
//! process-backed backend.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pto_dispatch::{Args, Dispatch, Error, Options, Parameter, Program, ProgramSpec};
use pto_mock::EventKind;
use pto_simpler_sys::{Access, ChipId, DataType, DomainRequest, Effect, Family, NamedBuffer, RunId};
use pto_tests::everywhere::{Hold, OpenOnDrop, Rig, copy, gate, hold_run, until_closing};
use pto_tests::rig::submits;
use pto_tests::scenario::{DOMAIN, add, add_one, f1, fail, program, signal_request};
use pto_tests::{everywhere, parked};

fn no_args() -> Args {
    Args::new()
}

/// F1 whose run ends when its hold (argument 0) is open, with a failed task where argument 1 is not 0.
fn held() -> Arc<dyn Program> {
    let spec = ProgramSpec::new("held").callable(add()).callable(gate()).callable(fail());
    let spec = spec.parameter(Parameter::host("hold", 8)).parameter(Parameter::scalar("fails"));
    program(spec, |build, args| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        add_one(build, &lease, "signal")?;
        hold_run(build, 1, args, 0)?;
        if args.scalar_at(1)? != 0 {
            build.task(2)?.scalar(7).submit(ChipId(1))?;
        }
        Ok(())
    })
}

fn held_args(hold: &Hold, fails: bool) -> Args {
    Args::new().host(&hold.0).scalar(u64::from(fails))
}

everywhere!(s02_submit_against_a_closing_worker, || {
    let rig = Rig::new(&Options::persistent().reset(false), &[held()], 2);
    let open = Hold::opened(&rig.worker);
    rig.worker.call(&held_args(&open, false)).unwrap();
    let (hold2, hold3) = (Hold::new(&rig.worker), Hold::new(&rig.worker));
    let second = rig.worker.submit(rig.ids[0], &held_args(&hold2, false)).unwrap();
    let third = rig.worker.submit(rig.ids[0], &held_args(&hold3, false)).unwrap();
    std::thread::scope(|scope| {
        let _rescue = OpenOnDrop(&[&hold2, &hold3]);
        hold2.wait_arrived();
        let accepted = submits(&rig.journal);
        let blocked = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &held_args(&open, false)).map(drop));
        blocked.wait_parked();
        let close = scope.spawn(|| rig.worker.close());
        // Both runs are still held: neither a frame nor the end of a run wakes it.
        let woken = blocked.join();
        assert!(matches!(woken, Err(Error::Closing)), "{woken:?}");
        until_closing(&rig, &held_args(&open, false));
        assert!(!second.is_done() && !third.is_done());
        assert_eq!((submits(&rig.journal), rig.spy.closes()), (accepted, 0));
        hold2.open();
        hold3.open();
        close.join().unwrap().unwrap();
    });
    let late = rig.worker.submit(rig.ids[0], &held_args(&open, false)).map(drop);
    assert!(matches!(late, Err(Error::Closed)), "{late:?}");
    assert_eq!(submits(&rig.journal), 3);
    second.wait().unwrap();
    third.wait().unwrap();
});

everywhere!(s38_waiting_with_a_limit, || {
    let rig = Rig::new(&Options::persistent().reset(false), &[held()], 2);
    let hold = Hold::new(&rig.worker);
    let dispatch = rig.worker.submit(rig.ids[0], &held_args(&hold, false)).unwrap();
    std::thread::scope(|scope| {
        let _rescue = OpenOnDrop(&[&hold]);
        let early = dispatch.wait_timeout(Duration::ZERO);
        assert!(matches!(early, Err(Error::WaitTimeout { id }) if id == dispatch.id()), "{early:?}");
        assert!(!dispatch.is_done() && dispatch.outcome().is_none());
        let forever = parked::spawn(scope, || dispatch.wait_timeout(Duration::MAX));
        forever.wait_parked();
        let close = rig.worker.close_timeout(Duration::ZERO);
        let Err(Error::CloseTimeout { in_flight }) = close else { panic!("the frame is still owned: {close:?}") };
        assert_eq!(&*in_flight, [dispatch.id()]);
        // Waits that expire while the run finishes: a finished result is never a timeout.
        let racing = scope.spawn(|| {
            loop {
                let done = dispatch.is_done();
                match dispatch.wait_timeout(Duration::ZERO) {
                    Ok(()) => return,
                    Err(Error::WaitTimeout { .. }) if !done => std::thread::yield_now(),
                    other => panic!("done: {done}, {other:?}"),
                }
            }
        });
        hold.open();
        forever.join().unwrap();
        racing.join().unwrap();
    });
    dispatch.wait().unwrap();
    assert!(matches!(dispatch.outcome(), Some(Ok(()))));
    rig.worker.close().unwrap();
});

everywhere!(s40_many_waiters, || {
    let rig = Rig::new(&Options::persistent().reset(false), &[held()], 2);
    rig.worker.call(&held_args(&Hold::opened(&rig.worker), false)).unwrap();
    let hold = Hold::new(&rig.worker);
    let dispatch = rig.worker.submit(rig.ids[0], &held_args(&hold, true)).unwrap();
    let failures = std::thread::scope(|scope| {
        let _rescue = OpenOnDrop(&[&hold]);
        let waiters: Vec<_> = (0..8)
            .map(|index| {
                let handle: Dispatch = dispatch.clone();
                scope.spawn(move || match index % 3 {
                    0 => handle.wait(),
                    1 => handle.wait_timeout(Duration::MAX),
                    _ => loop {
                        // Never blocks behind the waiters.
                        match handle.outcome() {
                            Some(outcome) => return outcome,
                            None => std::thread::yield_now(),
                        }
                    },
                })
            })
            .collect();
        hold.open();
        let of = |outcome: Result<(), Error>| match outcome {
            Err(Error::Failed(failure)) => failure,
            other => panic!("{other:?}"),
        };
        waiters.into_iter().map(|waiter| of(waiter.join().unwrap())).collect::<Vec<_>>()
    });
    assert!(failures.iter().all(|failure| Arc::ptr_eq(failure, &failures[0])), "not one error for all (I10)");
    assert!(failures[0].cause.to_string().contains("chip1"), "{}", failures[0].cause);
    assert!(dispatch.is_done());
    let ends = rig.journal.count(|e| matches!(e, EventKind::Ended(RunId(2), false)));
    assert_eq!(ends, 1, "one end");
    // The failure was delivered; what the backend adds is its own.
    let closed = rig.worker.close();
    println!("close: {closed:?}");
    assert_eq!(rig.journal.frees(), 1, "freed once (I4)");
});

everywhere!(s42_separate_host_scratch_per_frame, || {
    let spec = ProgramSpec::new("adding").callable(add()).callable(copy()).callable(gate()).intermediate(4);
    let spec = spec.parameter(Parameter::host("hold", 8)).parameter(Parameter::host("out", 4));
    let adding = program(spec.parameter(Parameter::scalar("value")), |build, args| {
        let scratch = |access| build.tensor(build.intermediate(0)?, &[1], DataType::Int32, access);
        let out = build.tensor(args.host_at(1)?, &[1], DataType::Int32, Access::OutputExisting)?;
        build.task(0)?.tensor(scratch(Access::InOut)?).scalar(args.scalar_at(2)?).submit(ChipId(0))?;
        build.task(1)?.tensor(scratch(Access::Input)?).tensor(out).submit(ChipId(0))?;
        hold_run(build, 2, args, 0)
    });
    let rig = Rig::new(&Options::ordinary(), &[adding], 1);
    let made = || rig.journal.count(|e| matches!(e, EventKind::BufferCreate { .. }));
    assert_eq!(made(), 2, "twice per program");
    let start = rig.journal.position(|e| matches!(e, EventKind::Start { .. })).unwrap();
    let last = rig.journal.last_position(|e| matches!(e, EventKind::BufferCreate { .. })).unwrap();
    assert!(last < start, "made after the start");
    let holds = [(); 3].map(|()| Hold::new(&rig.worker));
    let outs = [(); 3].map(|()| rig.worker.create_buffer(4).unwrap());
    let own = made();
    let submit = |index: usize| {
        let value = [1, 10, 100][index];
        let args = Args::new().host(&holds[index].0).host(&outs[index]).scalar(value);
        rig.worker.submit(rig.ids[0], &args).unwrap()
    };
    let _rescue = OpenOnDrop(&[&holds[0], &holds[1], &holds[2]]);
    let (first, second) = (submit(0), submit(1));
    holds[0].open();
    first.wait().unwrap();
    let third = submit(2);
    holds[1].open();
    holds[2].open();
    second.wait().unwrap();
    third.wait().unwrap();
    let values = outs.each_ref().map(|out| {
        let mut bytes = [0; 4];
        out.read(0, &mut bytes).unwrap();
        i32::from_ne_bytes(bytes)
    });
    // The second has scratch of its own; the third has the first one's.
    assert_eq!(values, [1, 10, 101]);
    assert_eq!(made(), own, "never per dispatch");
    rig.worker.close().unwrap();
});

everywhere!(s45_dropped_handles_persistent, || {
    let rig = Rig::new(&Options::persistent().reset(false), &[held()], 2);
    let open = Hold::opened(&rig.worker);
    for _ in 0..2 {
        drop(rig.worker.submit(rig.ids[0], &held_args(&open, false)).unwrap());
    }
    let third = rig.worker.submit(rig.ids[0], &held_args(&open, true)).unwrap();
    while !third.is_done() {
        std::thread::yield_now();
    }
    // Nobody has asked it how it ended.
    drop(third);
    for _ in 0..2 {
        let refused = rig.worker.submit(rig.ids[0], &held_args(&open, false)).map(drop);
        let Err(Error::Poisoned(failure)) = &refused else { panic!("{refused:?}") };
        assert_eq!(failure.id.get(), 3);
    }
    assert_eq!(submits(&rig.journal), 3);
    // Delivered by the refusals, so not repeated; what the backend adds is its own.
    match rig.worker.close() {
        Err(Error::Close(close)) => assert!(!matches!(close.primary, Error::Failed(_)), "{close:?}"),
        other => other.unwrap(),
    }
    assert_eq!(rig.journal.frees(), 1, "{}", rig.journal);
});

everywhere!(s55_a_panic_before_anything_reaches_the_device_rejects_that_dispatch_only, || {
    let panics = Arc::new(AtomicU64::new(1));
    let mode = Arc::clone(&panics);
    let panicking = program(ProgramSpec::new("panicking").callable(add()), move |build, _| {
        match mode.load(Ordering::SeqCst) {
            0 => {}
            at => std::panic::panic_any(at),
        }
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        add_one(build, &lease, "signal")
    });
    let rig = Rig::new(&Options::persistent(), &[panicking, f1()], 2);
    for warm in [false, true] {
        panics.store(7, Ordering::SeqCst);
        let payload = catch_unwind(AssertUnwindSafe(|| rig.worker.run(rig.ids[0], &no_args()))).unwrap_err();
        assert_eq!(payload.downcast_ref::<u64>(), Some(&7), "the payload, warm: {warm}");
        rig.worker.run(rig.ids[1], &no_args()).unwrap();
        panics.store(0, Ordering::SeqCst);
        rig.worker.run(rig.ids[0], &no_args()).unwrap();
    }
    assert_eq!((rig.journal.allocs(), rig.journal.frees()), (2, 0));
    rig.worker.close().unwrap();
    assert_eq!(rig.journal.frees(), 2);
});

everywhere!(s55_a_panic_after_a_task_leaves_an_ordinary_worker_usable, || {
    let panics = Arc::new(AtomicU64::new(1));
    let mode = Arc::clone(&panics);
    let panicking = program(ProgramSpec::new("panicking").callable(add()), move |build, _| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        add_one(build, &lease, "signal")?;
        assert!(mode.load(Ordering::SeqCst) == 0, "the builder's own panic");
        Ok(())
    });
    let rig = Rig::new(&Options::ordinary(), &[panicking], 2);
    let payload = catch_unwind(AssertUnwindSafe(|| rig.worker.call(&no_args()))).unwrap_err();
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"the builder's own panic"));
    assert_eq!((rig.journal.allocs(), rig.journal.frees()), (1, 1), "freed with the run that was cancelled");
    panics.store(0, Ordering::SeqCst);
    rig.worker.call(&no_args()).unwrap();
    rig.worker.close().unwrap();
    assert_eq!((rig.journal.allocs(), rig.journal.frees()), (2, 2));
});

everywhere!(s56_swallowed_failure_inside_the_callback, || {
    for (options, fault) in [
        (Options::ordinary(), "allocate_domain#2:after"),
        (Options::persistent(), "get_or_allocate_domain#2:after"),
    ] {
        let refusals = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&refusals);
        let swallowing = program(ProgramSpec::new("swallowing").callable(add()), move |build, _| {
            let other = build.lease("other", &signal_request(64))?;
            assert!(build.lease(DOMAIN, &signal_request(64)).is_err());
            counted.fetch_add(u64::from(add_one(build, &other, "signal").is_err()), Ordering::SeqCst);
            Ok(())
        });
        let rig = Rig::with_faults(&options, &[swallowing], 2, fault.parse().unwrap());
        let failed = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
        let Err(Error::Backend(error)) = &failed else { panic!("reported as failed: {failed:?}") };
        assert_ne!(error.effect(), Effect::None);
        assert_eq!((refusals.load(Ordering::SeqCst), submits(&rig.journal)), (1, 0), "{fault}");
        rig.worker.close().unwrap();
        assert_eq!((rig.journal.allocs(), rig.journal.frees()), (2, 2), "{fault}");
    }
});

/// Takes a host buffer of 4 bytes and a scalar; leases `comm_d0` with the window that the scalar names, and gives its
/// task one scalar too few where the scalar is 1.
fn fussy() -> Arc<dyn Program> {
    let spec = ProgramSpec::new("fussy").callable(add());
    let spec = spec.parameter(Parameter::host("x", 4)).parameter(Parameter::scalar("window"));
    program(spec, |build, args| {
        let window = args.scalar_at(1)?;
        let lease = build.lease(DOMAIN, &signal_request(if window == 1 { 64 } else { window }))?;
        let buffer = lease.buffer(ChipId(0), "signal")?;
        let task = build.task(0)?.tensor(build.tensor(&buffer, &[16], DataType::Int32, Access::InOut)?);
        if window == 1 { Ok(task.submit(ChipId(0))?) } else { Ok(task.scalar(1).submit(ChipId(0))?) }
    })
}

/// One buffer of 4 bytes in a window of 64, which no copies of whole buffers can reset.
fn slack() -> Arc<dyn Program> {
    let request =
        DomainRequest { window_bytes: 64, ..DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("signal", 4)]) };
    program(ProgramSpec::new("slack"), move |build, _| Ok(build.lease(DOMAIN, &request).map(drop)?))
}

everywhere!(s60_refusal_is_not_failure, || {
    let rig = Rig::new(&Options::persistent(), &[fussy(), slack()], 2);
    let stranger = {
        let other = Rig::new(&Options::ordinary(), &[f1()], 1);
        let id = other.ids[0];
        other.worker.close().unwrap();
        id
    };
    let (x, small) = (rig.worker.create_buffer(4).unwrap(), rig.worker.create_buffer(3).unwrap());
    let good = Args::new().host(&x).scalar(64);
    rig.worker.run(rig.ids[0], &good).unwrap();
    rig.worker.run(rig.ids[1], &no_args()).unwrap();
    for (what, id, args) in [
        ("count", rig.ids[0], Args::new().host(&x)),
        ("kind", rig.ids[0], Args::new().scalar(1).host(&x)),
        ("size", rig.ids[0], Args::new().host(&small).scalar(64)),
        ("unregistered", stranger, no_args()),
        ("spec change", rig.ids[0], Args::new().host(&x).scalar(128)),
        ("signature", rig.ids[0], Args::new().host(&x).scalar(1)),
        ("slack", rig.ids[1], no_args()),
    ] {
        let before = submits(&rig.journal);
        let error = rig.worker.submit(id, &args).map(drop).expect_err(what);
        let typed = match what {
            "unregistered" => matches!(error, Error::UnknownProgram),
            "spec change" => matches!(error, Error::Domain(_)),
            "signature" => matches!(error, Error::Build(_)),
            "slack" => matches!(error, Error::Reset { .. }),
            _ => matches!(error, Error::Arguments { .. }),
        };
        assert!(typed && error.family() == Family::Misuse && !error.must_reprepare(), "{what}: {error:?}");
        assert_eq!(submits(&rig.journal), before, "{what}");
        rig.worker.run(rig.ids[0], &good).unwrap_or_else(|e| panic!("unusable after {what}: {e}"));
    }
    drop((good, x, small));
    rig.worker.close().unwrap();
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    assert!(matches!(refused, Err(Error::Arguments { .. } | Error::Closed)), "{refused:?}");
});
