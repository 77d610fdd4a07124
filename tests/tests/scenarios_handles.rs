//! Handles, frames and back-pressure: S36 to S46. Rules 4 to 7; invariants I5, I9, I10, I12 and I13.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pto_dispatch::{Args, Dispatch, Error, Failure, Options, Parameter, Program, ProgramSpec};
use pto_mock::{EventKind, Fault, FaultEffect, KernelObject, WaitFor};
use pto_simpler_sys::{
    Access, Call, CallConfig, CallableSpec, ChipId, DataType, FailureKind, RunId, RuntimeFailure, Signature,
};
use pto_tests::gate::Gate;
use pto_tests::parked;
use pto_tests::rig::{Rig, copies, emulator_only, submits};
use pto_tests::scenario::{add, f0, f1, program};

fn no_args() -> Args {
    Args::new()
}

fn failure_of_run() -> RuntimeFailure {
    RuntimeFailure::new(Call::Run, "RuntimeError", "failed by hand").on_chip(ChipId(1))
}

/// Fails a held run and waits until its dispatch is terminal, without observing the outcome.
fn fail_and_await(rig: &Rig, run: u64, dispatch: &Dispatch) {
    rig.emulator().fail(RunId(run), failure_of_run()).unwrap();
    while !dispatch.is_done() {
        std::thread::yield_now();
    }
}

fn failed(outcome: Result<(), Error>) -> Arc<Failure> {
    match outcome {
        Err(Error::Failed(failure)) => failure,
        other => panic!("a failed dispatch, not {other:?}"),
    }
}

/// The same program, noting the frame and the number of each dispatch that it builds.
fn noting(inner: Arc<dyn Program>, builds: &Arc<Mutex<Vec<(u64, usize)>>>) -> Arc<dyn Program> {
    let builds = Arc::clone(builds);
    program(inner.spec().clone(), move |build, args| {
        builds.lock().unwrap().push((build.dispatch().get(), build.frame()));
        inner.build(build, args)
    })
}

#[test]
fn s36_two_frames_third_waits_before_doing_anything() {
    let Some(bench) = emulator_only("s36") else { return };
    let builds = Arc::new(Mutex::new(Vec::new()));
    let rig = bench.prepare(&Options::persistent().reset(false), &[noting(f1(), &builds)], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    rig.hold_runs();
    let first = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let second = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let journal = rig.journal();
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let third = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &no_args()));
        let seen = (rig.spy.seen(), rig.emulator().stats());
        third.wait_parked();
        assert_eq!(builds.lock().unwrap().len(), 3, "the third has built something (I9)");
        assert_eq!((rig.spy.seen(), rig.emulator().stats()), seen, "the third has reached the backend");
        assert_eq!(submits(&journal), 3);
        assert!(matches!(rig.worker.try_submit(rig.ids[0], &no_args()), Err(Error::WouldBlock { .. })));
        rig.complete(2);
        let third = third.join().unwrap();
        assert!(first.is_done() && !second.is_done(), "the third waits for the oldest");
        assert_eq!((first.id().get(), second.id().get(), third.id().get()), (2, 3, 4));
        let builds = builds.lock().unwrap();
        let frame = |id| builds.iter().find(|b| b.0 == id).unwrap().1;
        assert_eq!(frame(4), frame(2), "the third gets the frame of the one that ended");
        assert_ne!(frame(3), frame(2));
        rig.complete(3);
        rig.complete(4);
        third.wait().unwrap();
    });
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s37_whose_error_is_it_ordinary() {
    let Some(bench) = emulator_only("s37a") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    rig.hold_runs();
    let first = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let second = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let third = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &no_args()));
        third.wait_parked();
        rig.emulator().fail(RunId(1), failure_of_run()).unwrap();
        let third = third.join().unwrap();
        rig.complete(2);
        rig.complete(3);
        third.wait().unwrap();
    });
    second.wait().unwrap();
    let failure = failed(first.wait());
    assert_eq!(failure.id, first.id());
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s37_whose_error_is_it_persistent() {
    let Some(bench) = emulator_only("s37b") else { return };
    let rig = bench.f1n();
    rig.hold_runs();
    let first = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let second = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let third = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &no_args()).map(drop));
        third.wait_parked();
        rig.emulator().fail(RunId(2), failure_of_run()).unwrap();
        let refused = third.join();
        let Err(error @ Error::Poisoned(_)) = &refused else { panic!("{refused:?}") };
        let source = std::error::Error::source(error).unwrap().to_string();
        assert!(source.contains("dispatch 2") && source.contains("failed by hand"), "{source}");
        assert!(!error.to_string().contains("dispatch 4"), "as if the third had failed: {error}");
    });
    rig.complete(3);
    second.wait().unwrap();
    assert_eq!(failed(first.wait()).id.get(), 2);
    assert_eq!(submits(&rig.journal()), 3);
    rig.worker.close().unwrap();
    assert_eq!(rig.emulator().stats().runs, 0);
    bench.assert_clean();
}

#[test]
fn s38_waiting_with_a_limit() {
    let Some(bench) = emulator_only("s38") else { return };
    let rig = bench.f1n();
    rig.hold_runs();
    let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let early = dispatch.wait_timeout(Duration::ZERO);
    assert!(matches!(early, Err(Error::WaitTimeout { id }) if id == dispatch.id()), "{early:?}");
    assert!(!dispatch.is_done() && dispatch.outcome().is_none());
    let close = rig.worker.close_timeout(Duration::ZERO);
    let Err(Error::CloseTimeout { in_flight }) = close else { panic!("the frame is still owned: {close:?}") };
    assert_eq!(&*in_flight, [dispatch.id()]);
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let forever = parked::spawn(scope, || dispatch.wait_timeout(Duration::MAX));
        forever.wait_parked();
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
        rig.complete(2);
        forever.join().unwrap();
        racing.join().unwrap();
    });
    dispatch.wait().unwrap();
    assert!(matches!(dispatch.outcome(), Some(Ok(()))));
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s39_a_run_that_itself_times_out() {
    let Some(bench) = emulator_only("s39") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    rig.hold_runs();
    let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let timeout =
        RuntimeFailure::new(Call::Run, "TimeoutError", "no progress").with_kind(FailureKind::DeviceTimeout);
    rig.emulator().fail(RunId(1), timeout).unwrap();
    // Not a waiter's timeout, whichever way it is waited for.
    let failure = failed(dispatch.wait());
    let Error::Backend(cause) = &failure.cause else { panic!("{failure:?}") };
    assert_eq!(cause.runtime().unwrap().kind, FailureKind::DeviceTimeout);
    assert!(dispatch.is_done());
    assert!(Arc::ptr_eq(&failed(dispatch.wait_timeout(Duration::ZERO)), &failure));
    assert!(Arc::ptr_eq(&failed(dispatch.outcome().unwrap()), &failure));
    assert!(!Error::Failed(Arc::clone(&failure)).may_retry());
    // Both frames are free.
    let both = [(); 2].map(|()| rig.worker.submit(rig.ids[0], &no_args()).unwrap());
    rig.complete(2);
    rig.complete(3);
    assert!(both.iter().all(|dispatch| dispatch.wait().is_ok()));
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s40_many_waiters() {
    let Some(bench) = emulator_only("s40") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f1()], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    rig.hold_runs();
    let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let journal = rig.journal();
    let failures = std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let waiters: Vec<_> = (0..8)
            .map(|index| {
                let handle = dispatch.clone();
                parked::spawn(scope, move || match index % 2 {
                    0 => handle.wait(),
                    _ => handle.wait_timeout(Duration::MAX),
                })
            })
            .collect();
        waiters.iter().for_each(parked::Parked::wait_parked);
        assert!(!dispatch.is_done(), "and does not block behind the waiters");
        rig.emulator().fail(RunId(2), failure_of_run()).unwrap();
        waiters.into_iter().map(|waiter| failed(waiter.join())).collect::<Vec<_>>()
    });
    assert!(failures.iter().all(|failure| Arc::ptr_eq(failure, &failures[0])), "not one error for all (I10)");
    assert!(dispatch.is_done());
    let released = journal.count(|e| matches!(e, EventKind::BufferRelease { .. }));
    assert_eq!(released, 1, "one cleanup");
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s41_keep_alive_until_the_fence() {
    let Some(bench) = emulator_only("s41") else { return };
    let spec = ProgramSpec::new("keeping").callable(add()).parameter(Parameter::host("x", 4));
    let brought = Arc::new(Mutex::new(None));
    let bring = Arc::clone(&brought);
    let keeping = program(spec, move |build, args| {
        let bring = bring.lock().unwrap().take();
        let tensors = [Some(args.host_at(0)?.clone()), bring].into_iter().flatten();
        for buffer in tensors {
            let tensor = build.tensor(&buffer, &[1], DataType::Int32, Access::InOut)?;
            build.task(0)?.tensor(tensor).scalar(1).submit(ChipId(0))?;
        }
        Ok(())
    });
    let rig = bench.prepare(&Options::ordinary(), &[keeping], bench.builder());
    rig.hold_runs();
    let argument = rig.worker.create_buffer(4).unwrap();
    *brought.lock().unwrap() = Some(rig.worker.create_buffer(4).unwrap());
    let prefix: Arc<str> = "somewhere".into();
    let weak = Arc::downgrade(&prefix);
    let mut config = CallConfig::new();
    config.output_prefix = Some(prefix);
    let args = Args::new().host(&argument);
    let dispatch = rig.worker.submit_with(rig.ids[0], &args, &config).unwrap();
    drop((args, argument, config));
    assert_eq!(rig.emulator().stats().host_buffers, 2, "an argument went before the fence");
    assert!(weak.upgrade().is_some(), "the configuration went before the fence");
    let journal = rig.journal();
    assert_eq!(journal.count(|e| matches!(e, EventKind::BufferRelease { .. })), 0);
    rig.complete(1);
    dispatch.wait().unwrap();
    // Dead right after the result, with handle and worker alive.
    assert_eq!(rig.emulator().stats().host_buffers, 0, "an argument outlives its dispatch");
    assert!(weak.upgrade().is_none(), "the configuration outlives its dispatch");
    assert!(
        journal.before(|e| *e == EventKind::Cleanup(RunId(1)), |e| matches!(e, EventKind::BufferRelease { .. }))
    );
    drop(dispatch);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Stores what the intermediate holds into the output, then writes the scalar into the intermediate.
fn swap() -> CallableSpec {
    let kernel = KernelObject::new(|k| {
        let (scratch, out) = (k.tensor(0)?, k.tensor(1)?);
        let mut before = [0; 4];
        scratch.load(0, &mut before)?;
        out.store(0, &before)?;
        scratch.store(0, &(k.scalar(0)? as i32).to_ne_bytes())
    });
    CallableSpec::chip("swap", Signature::new([Access::InOut, Access::Output], 1)).with_source(kernel.into_source())
}

#[test]
fn s42_separate_host_scratch_per_frame() {
    let Some(bench) = emulator_only("s42") else { return };
    let spec = ProgramSpec::new("swapping")
        .callable(swap())
        .intermediate(4)
        .parameter(Parameter::host("out", 4))
        .parameter(Parameter::scalar("value"));
    let swapping = program(spec, |build, args| {
        let scratch = build.tensor(build.intermediate(0)?, &[1], DataType::Int32, Access::InOut)?;
        let out = build.tensor(args.host_at(0)?, &[1], DataType::Int32, Access::Output)?;
        Ok(build.task(0)?.tensor(scratch).tensor(out).scalar(args.scalar_at(1)?).submit(ChipId(0))?)
    });
    let rig = bench.prepare(&Options::ordinary(), &[swapping], bench.builder().dirty_host_buffers(true));
    let journal = rig.journal();
    let made = |journal: &pto_mock::Journal| journal.count(|e| matches!(e, EventKind::BufferCreate { .. }));
    assert_eq!(made(&journal), 2, "twice per program");
    let last = journal.last_position(|e| matches!(e, EventKind::BufferCreate { .. })).unwrap();
    assert!(last < journal.position(|e| matches!(e, EventKind::Start { .. })).unwrap(), "made after the start");
    rig.hold_runs();
    let outs = [(); 3].map(|()| rig.worker.create_buffer(4).unwrap());
    let submit = |index: usize| {
        let args = Args::new().host(&outs[index]).scalar(11 * (index as u64 + 1));
        rig.worker.submit(rig.ids[0], &args).unwrap()
    };
    let first = submit(0);
    let second = submit(1);
    rig.complete(1);
    first.wait().unwrap();
    let third = submit(2);
    rig.complete(2);
    rig.complete(3);
    second.wait().unwrap();
    third.wait().unwrap();
    let values = outs.each_ref().map(|out| {
        let mut bytes = [0; 4];
        out.read(0, &mut bytes).unwrap();
        i32::from_ne_bytes(bytes)
    });
    // The second has scratch of its own; the third has the first one's.
    assert_eq!(values, [0, 0, 11]);
    assert_eq!(made(&journal), 2 + outs.len(), "never per dispatch");
    drop(outs);
    rig.worker.close().unwrap();
    assert_eq!(rig.emulator().stats().host_buffers, 0);
    bench.assert_clean();
}

#[test]
fn s43_interrupted_after_acceptance() {
    let Some(bench) = emulator_only("s43a") else { return };
    let spec = ProgramSpec::new("one").callable(add()).parameter(Parameter::host("x", 4));
    let one = program(spec, |build, args| {
        let tensor = build.tensor(args.host_at(0)?, &[1], DataType::Int32, Access::InOut)?;
        Ok(build.task(0)?.tensor(tensor).scalar(1).submit(ChipId(0))?)
    });
    let rig = bench.prepare(&Options::ordinary(), &[one], bench.builder());
    rig.hold_runs();
    let argument = rig.worker.create_buffer(4).unwrap();
    rig.emulator().arm(Fault::new(Call::Submit, FaultEffect::Unwind));
    let args = Args::new().host(&argument);
    let unwound = catch_unwind(AssertUnwindSafe(|| rig.worker.submit(rig.ids[0], &args).map(drop)));
    let payload = unwound.expect_err("the unwinding reaches the caller");
    assert!(payload.downcast_ref::<String>().unwrap().contains("injected unwind"));
    drop((args, argument));
    assert_eq!(submits(&rig.journal()), 1);
    let close = rig.worker.close_timeout(Duration::ZERO);
    let Err(Error::CloseTimeout { in_flight }) = close else { panic!("close waits for the native: {close:?}") };
    assert_eq!(in_flight.iter().map(|id| id.get()).collect::<Vec<_>>(), [1], "exactly one frame in use");
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let close = parked::spawn(scope, || rig.worker.close());
        close.wait_parked();
        assert_eq!(rig.emulator().stats().host_buffers, 1, "the argument went before the fence");
        assert_eq!(rig.spy.closes(), 0);
        rig.complete(1);
        close.join().unwrap();
    });
    assert_eq!((rig.emulator().stats().host_buffers, rig.emulator().stats().runs), (0, 0));
    bench.assert_clean();
}

#[test]
fn s43_interrupted_before_acceptance() {
    let Some(bench) = emulator_only("s43b") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f1()], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    let journal = rig.journal();
    rig.emulator().arm(Fault::new(Call::Submit, FaultEffect::Before));
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    let Err(Error::Backend(error)) = &refused else { panic!("{refused:?}") };
    assert!(error.call() == Call::Submit && error.may_retry(), "{error}");
    assert_eq!((submits(&journal), rig.emulator().stats().runs), (1, 0));
    let counts = |what: fn(&EventKind) -> bool| journal.count(what);
    let released = counts(|e| matches!(e, EventKind::BufferRelease { .. }));
    assert_eq!((counts(|e| matches!(e, EventKind::BufferCreate { .. })), released), (1, 1), "one cleanup");
    // The frame was returned at once: two are free again, and the worker is usable (I13).
    rig.worker.call(&no_args()).unwrap();
    rig.worker.call(&no_args()).unwrap();
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Five submits whose handles are dropped; the third fails before the fourth. Returns what became of 4 and 5.
fn drop_five(rig: &Rig, first_run: u64) -> Vec<Result<(), Error>> {
    rig.hold_runs();
    let submit = || rig.worker.submit(rig.ids[0], &no_args());
    drop(submit().unwrap());
    drop(submit().unwrap());
    rig.complete(first_run);
    rig.complete(first_run + 1);
    // Kept only to see when it is over: nobody observes its outcome.
    let third = submit().unwrap();
    fail_and_await(rig, first_run + 2, &third);
    drop(third);
    let mut rest = Vec::new();
    for run in [first_run + 3, first_run + 4] {
        let handle = submit();
        if handle.is_ok() {
            rig.complete(run);
        }
        rest.push(handle.map(drop));
    }
    rest
}

#[test]
fn s45_dropped_handles_ordinary() {
    let Some(bench) = emulator_only("s45a") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    assert!(drop_five(&rig, 1).iter().all(Result::is_ok), "frames are exhausted");
    let closed = rig.worker.close();
    let Err(Error::Close(close)) = &closed else { panic!("the third's failure is undelivered: {closed:?}") };
    let Error::Failed(failure) = &close.primary else { panic!("{close:?}") };
    assert_eq!((failure.id.get(), close.others.len(), close.complete), (3, 0, true), "once, and nothing else");
    assert_eq!(rig.journal().count(|e| matches!(e, EventKind::Ended(_, true))), 4);
    assert_eq!(rig.journal().count(|e| matches!(e, EventKind::Ended(_, false))), 1);
    bench.assert_clean();
}

#[test]
fn s45_dropped_handles_persistent() {
    let Some(bench) = emulator_only("s45b") else { return };
    let rig = bench.f1n();
    let rest = drop_five(&rig, 2);
    for refused in &rest {
        let Err(Error::Poisoned(failure)) = refused else { panic!("{refused:?}") };
        assert_eq!(failure.id.get(), 4, "the third, after the warm-up");
    }
    rig.worker.close().unwrap();
    assert_eq!(rig.journal().frees(), 1);
    bench.assert_clean();
}

#[test]
fn s46_depth_one() {
    let Some(bench) = emulator_only("s46a") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder().depth(1));
    rig.hold_runs();
    let first = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    rig.until_tasks_over(1);
    let journal = rig.journal();
    let before = (journal.len(), rig.spy.seen());
    let refused = rig.worker.try_submit(rig.ids[0], &no_args()).map(drop);
    assert!(matches!(refused, Err(Error::WouldBlock { .. })), "{refused:?}");
    assert_eq!((journal.len(), rig.spy.seen()), before, "would-block has side effects");
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let second = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &no_args()));
        // It blocks in the backend, not in our line.
        let depth = EventKind::Wait { run: RunId(2), on: WaitFor::Depth };
        rig.emulator().wait_until(|events| events.iter().any(|e| e.kind == depth));
        let third = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &no_args()));
        third.wait_parked();
        assert_eq!(rig.spy.count(|s| matches!(s, pto_tests::spy::Seen::Submit(_))), 2, "two frames at most (I9)");
        rig.complete(1);
        let second = second.join().unwrap();
        rig.complete(2);
        let third = third.join().unwrap();
        rig.complete(3);
        second.wait().unwrap();
        third.wait().unwrap();
    });
    first.wait().unwrap();
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s46_depth_two_and_a_warm_reset() {
    let Some(bench) = emulator_only("s46b") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f1(), f0()], bench.builder());
    rig.worker.run(rig.ids[0], &no_args()).unwrap();
    rig.until_idle();
    rig.hold_runs();
    let journal = rig.journal();
    let first = rig.worker.submit(rig.ids[1], &no_args()).unwrap();
    rig.until_tasks_over(2);
    // The program without domains overlaps; the one with a warm domain would have to reset it.
    let before = (journal.len(), rig.spy.seen(), rig.emulator().stats());
    let refused = rig.worker.try_submit(rig.ids[0], &no_args()).map(drop);
    assert!(matches!(refused, Err(Error::WouldBlock { .. })), "{refused:?}");
    assert_eq!((journal.len(), rig.spy.seen(), rig.emulator().stats()), before, "would-block has side effects");
    let second = rig.worker.try_submit(rig.ids[1], &no_args()).unwrap();
    let refused = rig.worker.try_submit(rig.ids[1], &no_args()).map(drop);
    assert!(matches!(refused, Err(Error::WouldBlock { .. })), "{refused:?}");
    rig.complete(2);
    rig.complete(3);
    first.wait().unwrap();
    second.wait().unwrap();
    // A warm reset dispatch overlaps nothing: its copies wait for the fence of the run before it.
    let plain = rig.worker.submit(rig.ids[1], &no_args()).unwrap();
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let warm = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &no_args()));
        let head = EventKind::Wait { run: RunId(5), on: WaitFor::Head };
        rig.emulator().wait_until(|events| events.iter().any(|e| e.kind == head));
        assert_eq!(copies(&journal), []);
        rig.complete(4);
        let warm = warm.join().unwrap();
        rig.complete(5);
        warm.wait().unwrap();
    });
    plain.wait().unwrap();
    assert!(journal.before(|e| *e == EventKind::Fence(RunId(4)), |e| matches!(e, EventKind::Copy { .. })));
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 5 and I9: frames are granted in the order in which submitters came, whoever wakes first.
#[test]
fn s36_submitters_are_served_first_come_first_served() {
    let Some(bench) = emulator_only("s36b") else { return };
    let built = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&built);
    let (inside, hold) = (Arc::new(AtomicUsize::new(0)), Gate::new());
    let (counted, gate) = (Arc::clone(&inside), hold.clone());
    let spec = ProgramSpec::new("order").parameter(Parameter::scalar("who"));
    let order = program(spec, move |_, args| {
        assert_eq!(counted.fetch_add(1, Ordering::SeqCst), 0, "two builds at one time");
        noted.lock().unwrap().push(args.scalar_at(0)?);
        gate.pass();
        counted.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    });
    let rig = bench.prepare(&Options::ordinary(), &[order], bench.builder());
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let mut waiting = Vec::new();
        for who in 0..6 {
            let rig = &rig;
            let submitter = parked::spawn(scope, move || {
                rig.worker.submit(rig.ids[0], &Args::new().scalar(who)).unwrap().wait().unwrap();
            });
            // The first is inside its build, the others are in line, one behind the other.
            if who == 0 {
                hold.wait_arrived(1);
            }
            submitter.wait_parked();
            waiting.push(submitter);
        }
        hold.open();
        waiting.into_iter().for_each(parked::Parked::join);
    });
    assert_eq!(*built.lock().unwrap(), [0, 1, 2, 3, 4, 5]);
    rig.worker.close().unwrap();
    bench.assert_clean();
}
