//! Preparing: whose backend it is, and what a program that panics leaves (rules 1 and 2, I13, I14).
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pto_dispatch::{Args, Build, Error, Options, PreparedWorker, Program, ProgramResult, ProgramSpec};
use pto_simpler_sys::{
    Backend, BackendError, BackendPhase, CallableSpec, Family, Registered, RunEvents, RunId, RunOutcome,
    forward_backend,
};
use pto_tests::rig::{any_backend, emulator_only};
use pto_tests::scenario::{f0, f1};
use pto_tests::spy::{Seen, Spy};

struct Nobody;

impl RunEvents for Nobody {
    fn ended(&self, _: RunId, _: RunOutcome) {}
}

fn prepare(backend: &Arc<Spy>) -> Result<PreparedWorker, Error> {
    PreparedWorker::prepare(&[f1()], &Options::persistent(), Arc::clone(backend) as Arc<dyn Backend>)
}

#[track_caller]
fn assert_in_use(error: &Error, expected: BackendPhase) {
    assert!(matches!(error, Error::BackendInUse { phase } if *phase == expected), "{error:?}");
    assert_eq!(error.family(), Family::Misuse);
    assert!(error.to_string().contains("a backend of its own"), "{error}");
    assert!(!error.must_reprepare() && !error.may_retry());
}

/// Rule 2: what a failed preparation closes is what it opened. Another worker's backend it leaves as it is.
#[test]
fn a_second_worker_on_one_backend_is_refused_and_leaves_the_first_alone() {
    let bench = any_backend("in use");
    let rig = bench.prepare_any(&Options::persistent(), &[f1()], 2);
    rig.worker.call(&Args::new()).unwrap();
    let seen = rig.spy.seen();
    assert_in_use(&prepare(&rig.spy).unwrap_err(), BackendPhase::Ready);
    assert_eq!(rig.spy.seen(), seen, "something was asked of a backend in use");
    rig.worker.call(&Args::new()).unwrap();
    rig.worker.close().unwrap();
    let seen = rig.spy.seen();
    assert_in_use(&prepare(&rig.spy).unwrap_err(), BackendPhase::Closed);
    assert_eq!(rig.spy.seen(), seen);
    drop(rig);
    bench.assert_clean();
}

/// Rule 2, where it is the user who has started the backend.
#[test]
fn a_backend_that_the_user_has_started_is_refused_and_left_alone() {
    let Some(bench) = emulator_only("started") else { return };
    let spy = Spy::new(bench.builder().build().unwrap());
    spy.start(Arc::new(Nobody)).unwrap();
    assert_in_use(&prepare(&spy).unwrap_err(), BackendPhase::Ready);
    assert_eq!(spy.phase(), BackendPhase::Ready);
    assert_eq!(spy.seen(), [Seen::Start]);
    spy.close().unwrap();
    drop(spy);
    bench.assert_clean();
}

/// A backend that somebody starts while programs are being registered with it.
#[derive(Debug)]
struct Overtaken {
    inner: Arc<Spy>,
}

impl Backend for Overtaken {
    forward_backend!(
        inner: capabilities, phase, check_blocking, start, submit, run_state, create_buffer, create_zeros, write_buffer,
        read_buffer, fill_buffer, release_buffer, alloc, free, copy_to, copy_from, release_domain, domain_state,
        committed_device_memory, close, abandon,
    );

    fn register(&self, callable: &CallableSpec) -> Result<Registered, BackendError> {
        self.inner.start(Arc::new(Nobody))?;
        self.inner.register(callable)
    }
}

/// Rule 2: of two threads that prepare on one backend the slower one does not close it.
#[test]
fn whoever_loses_the_race_for_a_backend_does_not_close_it() {
    let Some(bench) = emulator_only("overtaken") else { return };
    let spy = Spy::new(bench.builder().build().unwrap());
    let backend = Arc::new(Overtaken { inner: Arc::clone(&spy) });
    let error = PreparedWorker::prepare(&[f0()], &Options::persistent(), backend).unwrap_err();
    assert_in_use(&error, BackendPhase::Ready);
    assert_eq!((spy.phase(), spy.closes()), (BackendPhase::Ready, 0));
    spy.close().unwrap();
    drop(spy);
    bench.assert_clean();
}

/// A program that panics when it is asked what it declares for the `at`-th time.
struct Unspeakable {
    spec: ProgramSpec,
    asked: AtomicUsize,
    at: usize,
}

impl Program for Unspeakable {
    fn spec(&self) -> &ProgramSpec {
        assert!(self.asked.fetch_add(1, Ordering::SeqCst) + 1 != self.at, "no spec");
        &self.spec
    }

    fn build<'b>(&self, _: &Build<'b>, _: &Args) -> ProgramResult {
        Ok(())
    }
}

/// Rule 2: a program that panics in its declaration leaves the backend in New or closed, never started, and the panic
/// goes on in the caller.
#[test]
fn a_declaration_that_panics_leaves_nothing_open() {
    let Some(bench) = emulator_only("spec panics") else { return };
    let mut panicked = 0;
    for at in 1..=6 {
        let spy = Spy::new(bench.builder().build().unwrap());
        let spec = ProgramSpec::new("unspeakable").intermediate(64);
        let program: Arc<dyn Program> = Arc::new(Unspeakable { spec, asked: AtomicUsize::new(0), at });
        let backend = Arc::clone(&spy) as Arc<dyn Backend>;
        let prepared = catch_unwind(AssertUnwindSafe(|| {
            PreparedWorker::prepare(&[f0(), program], &Options::persistent(), backend)
        }));
        match prepared {
            Ok(worker) => worker.unwrap().close().unwrap(),
            Err(payload) => {
                assert_eq!(payload.downcast_ref::<&str>(), Some(&"no spec"));
                assert!(matches!(spy.phase(), BackendPhase::New | BackendPhase::Closed), "{:?}", spy.phase());
                panicked += 1;
            }
        }
        drop(spy);
        bench.assert_clean();
    }
    assert!(panicked >= 1, "the declaration was never asked for");
}

/// A backend that panics where it is asked what it can do.
#[derive(Debug)]
struct Incapable {
    inner: Arc<Spy>,
}

impl Backend for Incapable {
    forward_backend!(
        inner: phase, check_blocking, register, start, submit, run_state, create_buffer, create_zeros, write_buffer,
        read_buffer, fill_buffer, release_buffer, alloc, free, copy_to, copy_from, release_domain, domain_state,
        committed_device_memory, close, abandon,
    );

    fn capabilities(&self) -> &pto_simpler_sys::Capabilities {
        panic!("no capabilities")
    }
}

/// Rule 2, S11: a panic of any kind in the middle of a preparation closes the backend, once, and goes on.
#[test]
fn a_panic_in_the_middle_closes_the_backend_once() {
    let Some(bench) = emulator_only("panic in the middle") else { return };
    let spy = Spy::new(bench.builder().build().unwrap());
    let backend = Arc::new(Incapable { inner: Arc::clone(&spy) });
    let prepared =
        catch_unwind(AssertUnwindSafe(|| PreparedWorker::prepare(&[f0()], &Options::persistent(), backend)));
    assert_eq!(prepared.unwrap_err().downcast_ref::<&str>(), Some(&"no capabilities"));
    assert_eq!((spy.phase(), spy.closes()), (BackendPhase::Closed, 1));
    drop(spy);
    bench.assert_clean();
}
