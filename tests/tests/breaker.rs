//! Orderings, odd threads and odd callers that no scenario names: each of these once broke something.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use pto_dispatch::{Args, Build, Error, HostBuffer, Options, PreparedWorker, Program, ProgramResult, ProgramSpec};
use pto_domain::DomainError;
use pto_mock::{EventKind, Fault, FaultEffect, kernels};
use pto_simpler_sys::{
    Access, Backend, Call, CallableSpec, ChipId, DataType, DomainRequest, Family, NamedBuffer, RunId,
    RuntimeFailure,
};
use pto_tests::gate::{Gate, OpenOnDrop};
use pto_tests::rig::{emulator_only, submits};
use pto_tests::scenario::{DOMAIN, add, add_one, f0, f1, fail, program, signal_request};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

fn no_args() -> Args {
    Args::new()
}

/// F1, which calls `inner` as often as `on` says: before anything else (1), or after its tasks (2).
fn calling(on: &Arc<AtomicU64>, inner: impl Fn() -> Result<(), Error> + Send + Sync + 'static) -> Arc<dyn Program> {
    let on = Arc::clone(on);
    program(ProgramSpec::new("calling").callable(add()), move |build, _| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        if on.load(Ordering::SeqCst) == 1 {
            inner()?;
        }
        add_one(build, &lease, "signal")?;
        if on.load(Ordering::SeqCst) == 2 {
            inner()?;
        }
        Ok(())
    })
}

#[test]
fn rule_17_another_workers_refusal_returned_before_the_opening_concerns_that_dispatch_only() {
    for options in [Options::ordinary(), Options::persistent()] {
        let Some(bench) = emulator_only("nested refusal") else { return };
        let other = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
        other.worker.close().unwrap();
        let on = Arc::new(AtomicU64::new(0));
        let calls = move || other.worker.call(&no_args());
        let quiet = Arc::new(AtomicU64::new(0));
        let first = program(ProgramSpec::new("first"), {
            let (quiet, other) = (Arc::clone(&quiet), calls);
            move |_, _| if quiet.load(Ordering::SeqCst) == 1 { Ok(other()?) } else { Ok(()) }
        });
        let rig = bench.prepare(&options, &[first, calling(&on, || Ok(()))], bench.builder());
        rig.worker.run(rig.ids[1], &no_args()).unwrap();
        quiet.store(1, Ordering::SeqCst);
        let refused = rig.worker.run(rig.ids[0], &no_args());
        assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
        rig.worker.run(rig.ids[1], &no_args()).unwrap();
        quiet.store(0, Ordering::SeqCst);
        rig.worker.run(rig.ids[0], &no_args()).unwrap();
        rig.worker.close().unwrap();
        bench.assert_clean();
    }
}

#[test]
fn rule_17_another_workers_poison_returned_after_the_opening_poisons_this_worker_too() {
    let Some(bench) = emulator_only("nested poison") else { return };
    let other = bench.prepare(&Options::persistent(), &[f1()], bench.builder());
    other.emulator().arm(Fault::new(Call::Run, FaultEffect::Before));
    assert!(other.worker.call(&no_args()).is_err());
    let on = Arc::new(AtomicU64::new(0));
    let rig = bench.prepare(
        &Options::persistent(),
        &[calling(&on, move || other.worker.call(&no_args()))],
        bench.builder(),
    );
    rig.worker.call(&no_args()).unwrap();
    on.store(2, Ordering::SeqCst);
    let failed = rig.worker.call(&no_args());
    assert!(matches!(failed, Err(Error::Poisoned(_))), "{failed:?}");
    on.store(0, Ordering::SeqCst);
    // The cancelled run took the retained domain along.
    let refused = rig.worker.call(&no_args());
    let Err(Error::Poisoned(failure)) = &refused else { panic!("{refused:?}") };
    assert_eq!(failure.id.get(), 2, "{failure}");
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.releases(), []);
    assert_eq!((rig.journal().allocs(), rig.journal().frees()), (1, 1));
}

#[test]
fn rule_17_an_end_that_is_reported_late_is_still_the_first_failure() {
    let Some(bench) = emulator_only("late end") else { return };
    let rig = bench.prepare(&Options::persistent().reset(false), &[f1()], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    let gate = Gate::new();
    *rig.spy.ends.lock() = Some(gate.clone());
    rig.hold_runs();
    let second = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    rig.emulator().fail(RunId(2), RuntimeFailure::new(Call::Run, "RuntimeError", "by hand")).unwrap();
    // The run is over and its domains are freed; only we do not know yet.
    gate.wait_arrived(1);
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let _open = OpenOnDrop(gate.clone());
        let third = scope.spawn(|| rig.worker.submit(rig.ids[0], &no_args()).map(drop));
        // It opened, and the backend had to make the domain anew.
        rig.emulator()
            .wait_until(|events| events.iter().any(|e| matches!(e.kind, EventKind::Alloc { run: RunId(3), .. })));
        gate.open();
        let refused = third.join().unwrap();
        let Err(Error::Poisoned(failure)) = &refused else { panic!("{refused:?}") };
        assert_eq!(failure.id.get(), 2, "{failure}");
    });
    let Err(Error::Failed(failure)) = second.wait() else { panic!("the second failed") };
    let refused = rig.worker.call(&no_args());
    assert!(matches!(&refused, Err(Error::Poisoned(f)) if Arc::ptr_eq(f, &failure)), "{refused:?}");
    rig.worker.close().unwrap();
    assert_eq!(rig.journal().allocs(), rig.journal().frees());
    bench.assert_clean();
}

#[test]
fn rule_17_a_build_in_progress_learns_of_the_poison_although_close_has_begun() {
    let Some(bench) = emulator_only("poison behind close") else { return };
    let (gated, gate) = (Arc::new(AtomicBool::new(false)), Gate::new());
    let (on, inside) = (Arc::clone(&gated), gate.clone());
    let waiting = program(ProgramSpec::new("waiting").callable(add()), move |build, _| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        if on.load(Ordering::SeqCst) {
            inside.pass();
        }
        add_one(build, &lease, "signal")
    });
    let rig = bench.prepare(&Options::persistent().reset(false), &[waiting], bench.builder().depth(2));
    rig.worker.call(&no_args()).unwrap();
    rig.hold_runs();
    let second = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    gated.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let _open = OpenOnDrop(gate.clone());
        let third = scope.spawn(|| rig.worker.submit(rig.ids[0], &no_args()).map(drop));
        gate.wait_arrived(1);
        let closing = rig.worker.close_timeout(Duration::ZERO);
        assert!(matches!(closing, Err(Error::CloseTimeout { .. })), "{closing:?}");
        rig.emulator().fail(RunId(2), RuntimeFailure::new(Call::Run, "RuntimeError", "by hand")).unwrap();
        assert!(second.wait().is_err());
        gate.open();
        let refused = third.join().unwrap();
        assert!(matches!(&refused, Err(Error::Poisoned(f)) if f.id.get() == 2), "{refused:?}");
    });
    rig.worker.close().unwrap();
    assert_eq!((rig.journal().allocs(), submits(&rig.journal())), (1, 2), "nothing more is touched");
    bench.assert_clean();
}

/// Stops the thread that it is the default of at the first event whose text contains `text`.
struct StopAt {
    text: &'static str,
    gate: Gate,
}

impl Subscriber for StopAt {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{value:?} ");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        if text.0.contains(self.text) {
            self.gate.pass();
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn rule_20_no_submission_gets_in_between_two_closers() {
    let Some(bench) = emulator_only("two closers") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f1()], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    let gate = Gate::new();
    std::thread::scope(|scope| {
        let _open = OpenOnDrop(gate.clone());
        let closer = scope.spawn(|| {
            let stop = StopAt { text: "closing", gate: gate.clone() };
            tracing::subscriber::with_default(stop, || rig.worker.close())
        });
        // The first closer has announced itself and stands still.
        gate.wait_arrived(1);
        let submitted = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
        assert!(matches!(submitted, Err(Error::Closing)), "{submitted:?}");
        rig.worker.close().unwrap();
        gate.open();
        closer.join().unwrap().unwrap();
    });
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
    assert_eq!(submits(&rig.journal()), 1);
    bench.assert_clean();
}

#[test]
fn rule_20_a_failed_attempt_to_close_that_nobody_waited_for_is_reported_by_the_next() {
    let Some(bench) = emulator_only("unseen attempt") else { return };
    let failing = program(ProgramSpec::new("failing").callable(fail()), |build, _| {
        let scratch = build.scratch(4)?;
        let tensor = build.tensor(scratch, &[1], DataType::Int32, Access::NoDependency)?;
        let task = build.task(0)?;
        let signature = kernels::signature(kernels::FAIL);
        let task = if signature.tensors.is_empty() { task } else { task.tensor(tensor) };
        Ok((0..signature.scalars).fold(task, |task, _| task.scalar(7)).submit(ChipId(0))?)
    });
    let rig = bench.prepare(&Options::ordinary(), &[failing], bench.builder());
    let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    while !rig.worker.in_flight().is_empty() {
        std::thread::yield_now();
    }
    drop(dispatch);
    rig.emulator().arm(Fault::new(Call::Close, FaultEffect::Before));
    let gate = Gate::new();
    *rig.spy.closing.lock() = Some(gate.clone());
    let bounded = rig.worker.close_timeout(Duration::ZERO);
    assert!(matches!(bounded, Err(Error::CloseTimeout { .. })), "{bounded:?}");
    gate.wait_arrived(1);
    gate.open();
    rig.emulator().wait_until(|events| events.iter().any(|e| matches!(e.kind, EventKind::Close { ok: false })));
    let mut reported = Vec::new();
    loop {
        match rig.worker.close_timeout(Duration::ZERO) {
            Err(Error::CloseTimeout { .. }) => std::thread::yield_now(),
            Err(Error::Close(failure)) => {
                reported.push(failure.primary.clone());
                reported.extend(failure.others.iter().cloned());
                if failure.complete {
                    break;
                }
            }
            closed => {
                closed.unwrap();
                break;
            }
        }
    }
    let failed = reported.iter().filter(|e| matches!(e, Error::Failed(f) if f.id.get() == 1)).count();
    assert!(failed >= 1, "the failure that nobody had seen: {reported:?}");
    assert!(reported.iter().any(|e| matches!(e, Error::Backend(e) if e.call() == Call::Close)), "{reported:?}");
    bench.assert_clean();
}

thread_local! {
    static KEPT: RefCell<Option<HostBuffer>> = const { RefCell::new(None) };
}

#[test]
fn a_buffer_in_a_thread_local_is_released_when_its_thread_ends() {
    let Some(bench) = emulator_only("thread local") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            KEPT.with_borrow_mut(|kept| *kept = Some(rig.worker.create_buffer(8).unwrap()));
            // Whatever the crate keeps for this thread is made after KEPT, and so is gone before it.
            rig.worker.call(&no_args()).unwrap();
        });
        // Unlike the end of the scope, this waits for the thread-locals too.
        thread.join().unwrap();
    });
    assert_eq!(rig.emulator().stats().host_buffers, 0);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn a_buffer_dropped_on_a_thread_that_may_not_block_is_released_later() {
    let Some(bench) = emulator_only("attached") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    let (dropped, released) = (rig.worker.create_buffer(8).unwrap(), rig.worker.create_buffer(8).unwrap());
    *rig.spy.refuse_blocking.lock() = Some(std::thread::current().id());
    drop(dropped);
    let refused = released.release();
    assert!(matches!(&refused, Err(Error::Backend(e)) if e.family() == Family::Misuse), "{refused:?}");
    *rig.spy.refuse_blocking.lock() = None;
    rig.worker.call(&no_args()).unwrap();
    assert_eq!(rig.emulator().stats().host_buffers, 0);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn a_device_tensor_takes_no_buffer_of_another_worker() {
    let Some(bench) = emulator_only("foreign copy") else { return };
    let here = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    let there = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    let tensor = here.worker.alloc(ChipId(0), 4).unwrap();
    // The same id on both backends.
    let (mine, foreign) = (here.worker.create_buffer(4).unwrap(), there.worker.create_buffer(4).unwrap());
    mine.write(0, &[1; 4]).unwrap();
    foreign.write(0, &[2; 4]).unwrap();
    for refused in [tensor.copy_to(&foreign), tensor.copy_from(&foreign)] {
        let text = refused.as_ref().map_err(ToString::to_string);
        assert!(matches!(&refused, Err(Error::Build(_))), "{text:?}");
    }
    let mut bytes = [0; 4];
    mine.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [1; 4]);
    drop((tensor, mine, foreign));
    here.worker.close().unwrap();
    there.worker.close().unwrap();
    bench.assert_clean();
}

/// A program whose `spec` panics at the second call after it was told to.
struct Moody {
    spec: ProgramSpec,
    left: AtomicU64,
}

impl Program for Moody {
    fn spec(&self) -> &ProgramSpec {
        let left = self.left.load(Ordering::SeqCst);
        assert!(left != 1, "the specification panics");
        self.left.store(left.saturating_sub(1), Ordering::SeqCst);
        &self.spec
    }

    fn build<'b>(&self, _: &Build<'b>, _: &Args) -> ProgramResult {
        Ok(())
    }
}

#[test]
fn i12_a_specification_that_panics_leaves_the_worker_usable() {
    let Some(bench) = emulator_only("moody") else { return };
    let moody = Arc::new(Moody { spec: ProgramSpec::new("moody"), left: AtomicU64::new(0) });
    let rig = bench.prepare(&Options::ordinary(), &[Arc::clone(&moody) as Arc<dyn Program>], bench.builder());
    for calls in [1, 2] {
        moody.left.store(calls, Ordering::SeqCst);
        let _maybe = catch_unwind(AssertUnwindSafe(|| rig.worker.submit(rig.ids[0], &no_args()).map(drop)));
        moody.left.store(0, Ordering::SeqCst);
        let _rescue = rig.rescue();
        while rig.emulator().stats().runs > 0 {
            std::thread::yield_now();
        }
        assert_eq!(rig.worker.try_submit(rig.ids[0], &no_args()).map(|d| d.wait().is_ok()).ok(), Some(true));
    }
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn i12_a_run_state_that_panics_leaves_no_frame_behind() {
    for options in [Options::ordinary(), Options::persistent()] {
        let Some(bench) = emulator_only("run state") else { return };
        let refusing = program(ProgramSpec::new("refusing"), |_, _| Err("no".into()));
        let rig = bench.prepare(&options, &[refusing, f0()], bench.builder());
        rig.spy.panic_in_run_state.store(true, Ordering::SeqCst);
        let failed = rig.worker.run(rig.ids[0], &no_args());
        assert!(failed.is_err());
        rig.spy.panic_in_run_state.store(false, Ordering::SeqCst);
        assert_eq!(rig.worker.in_flight(), []);
        let refused = rig.worker.run(rig.ids[1], &no_args()).unwrap_err();
        assert!(refused.must_reprepare(), "{refused:?}");
        let _reported = rig.worker.close();
        bench.assert_clean();
    }
}

#[test]
fn an_entry_call_of_another_kind_of_callable_is_refused_and_does_nothing() {
    let Some(bench) = emulator_only("entry kind") else { return };
    let odd = program(ProgramSpec::new("odd").callable(add()), |build, _| {
        let refused = build.run_entry(0, &[]);
        assert!(matches!(refused, Err(Error::Build(_))), "{refused:?}");
        // No task was submitted, so a domain may still be had.
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        add_one(build, &lease, "signal")
    });
    let rig = bench.prepare(&Options::persistent(), &[odd], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn a_graph_is_built_once_even_where_the_backend_asks_twice() {
    let Some(bench) = emulator_only("built twice") else { return };
    let builds = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&builds);
    let counting = program(ProgramSpec::new("counting"), move |_, _| {
        counted.fetch_add(1, Ordering::SeqCst);
        Ok(())
    });
    let rig = bench.prepare(&Options::ordinary(), &[counting], bench.builder());
    rig.spy.build_twice.store(true, Ordering::SeqCst);
    rig.worker.call(&no_args()).unwrap();
    assert_eq!(builds.load(Ordering::SeqCst), 1);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn rule_18_a_failed_task_of_a_sub_worker_is_not_final() {
    let Some(bench) = emulator_only("sub task") else { return };
    let signature = kernels::signature(kernels::SUB_FAIL);
    let spec = ProgramSpec::new("sub").callable(CallableSpec::sub(kernels::SUB_FAIL, signature.clone()));
    let failing = program(spec, move |build, _| {
        let scratch = build.scratch(4)?;
        let mut task = build.task(0)?;
        for _ in &signature.tensors {
            task = task.tensor(build.tensor(scratch, &[1], DataType::Int32, Access::NoDependency)?);
        }
        Ok((0..signature.scalars).fold(task, |task, _| task.scalar(7)).submit_sub()?)
    });
    let builder = bench.builder().sub_workers(1).failed_task_is_final(true);
    let rig = bench.prepare(&Options::ordinary(), &[failing, f0()], builder);
    let failed = rig.worker.run(rig.ids[0], &no_args());
    assert!(matches!(&failed, Err(Error::Failed(f)) if !f.final_for_worker), "{failed:?}");
    rig.worker.run(rig.ids[1], &no_args()).unwrap();
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn an_error_after_the_opening_does_not_invite_to_try_again_on_a_poisoned_worker() {
    let Some(bench) = emulator_only("retry") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f1()], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    rig.emulator().arm(Fault::new(Call::SubmitNextLevel, FaultEffect::Before));
    let failed = rig.worker.submit(rig.ids[0], &no_args()).map(drop).unwrap_err();
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    assert!(matches!(refused, Err(Error::Poisoned(_))), "{refused:?}");
    assert!(!failed.may_retry() && failed.must_reprepare(), "{failed:?}");
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn errors_of_a_lease_answer_as_their_cause_does() {
    assert!(Error::Domain(DomainError::Poisoned).must_reprepare());
    let changed = Arc::new(AtomicBool::new(false));
    let Some(bench) = emulator_only("changed") else { return };
    let seen = Arc::clone(&changed);
    let changing = program(ProgramSpec::new("changing"), move |build, _| {
        let bytes = if seen.load(Ordering::SeqCst) { 128 } else { 64 };
        build.lease(DOMAIN, &DomainRequest::packed([0], vec![NamedBuffer::bytes("x", bytes)]))?;
        Ok(())
    });
    let rig = bench.prepare(&Options::persistent(), &[changing], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    changed.store(true, Ordering::SeqCst);
    let error = rig.worker.call(&no_args()).unwrap_err();
    assert!(error.family() == Family::Misuse && !error.must_reprepare(), "{error:?}");
    changed.store(false, Ordering::SeqCst);
    rig.worker.call(&no_args()).unwrap();
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn a_worker_in_a_thread_local_is_closed_when_its_thread_ends() {
    thread_local! {
        static WORKER: RefCell<Option<PreparedWorker>> = const { RefCell::new(None) };
    }
    let Some(bench) = emulator_only("thread-local worker") else { return };
    let emulator = bench.builder().build().unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            WORKER.with_borrow_mut(|slot| {
                let backend = Arc::clone(&emulator) as Arc<dyn Backend>;
                let worker = PreparedWorker::prepare(&[f0()], &Options::ordinary(), backend).unwrap();
                worker.call(&no_args()).unwrap();
                *slot = Some(worker);
            });
        });
        thread.join().unwrap();
    });
    assert_eq!(emulator.stats().threads, 0);
    bench.assert_clean();
}
