//! Guards of a graph build that no scenario names: each test fails where its guard is taken out. Rules 9, 12, 17, 19.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use pto_dispatch::{
    Args, Build, DeviceTensor, Error, HostBuffer, Options, Parameter, PreparedWorker, Program, ProgramSpec,
};
use pto_mock::{EventKind, Fault, FaultEffect, KernelObject, kernels};
use pto_simpler_sys::{
    Access, Backend, BackendError, BuildFailed, Call, CallConfig, CallableKind, CallableSpec, ChipId, DataType,
    DevicePlace, DomainAllocation, DomainRequest, Effect, FailureKind, Family, GraphBuilder, Limits, NamedBuffer,
    Orchestrator, Retention, RunId, RuntimeFailure, Signature, SubmitError, forward_backend, forward_orchestrator,
};
use pto_tests::gate::Gate;
use pto_tests::parked;
use pto_tests::rig::{Rig, at, emulator_only, submits};
use pto_tests::scenario::{DOMAIN, add, f1, program, signal_request};

fn no_args() -> Args {
    Args::new()
}

/// What the cases below work with: a buffer on each chip, a host buffer, and a host buffer of another worker.
struct Things {
    near: DeviceTensor,
    far: DeviceTensor,
    host: HostBuffer,
    foreign: HostBuffer,
}

type Attempt = for<'b> fn(&Build<'b>, &Things) -> Result<(), Error>;

/// Callables of the cases: one takes a tensor and a scalar, one is the same for sub-workers, two take more scalars and
/// more tensors than the limits of the backend permit, and one takes just as many of both.
const ADD: usize = 0;
const SUB: usize = 1;
const SCALARS: usize = 2;
const TENSORS: usize = 3;
const PAIR: usize = 4;

fn host_tensor<'b>(build: &Build<'b>, buffer: &HostBuffer) -> Result<pto_dispatch::Tensor<'b>, Error> {
    build.tensor(buffer, &[1], DataType::Int32, Access::InOut)
}

fn far_tensor<'b>(build: &Build<'b>, things: &Things) -> Result<pto_dispatch::Tensor<'b>, Error> {
    build.tensor(&things.far, &[1], DataType::Int32, Access::InOut)
}

/// A task of two tensors and two scalars on `chip`.
fn pair(build: &Build<'_>, first: &DeviceTensor, second: &DeviceTensor, chip: u32) -> Result<(), Error> {
    let [first, second] = [first, second].map(|t| build.tensor(t, &[1], DataType::Int32, Access::InOut));
    build.task(PAIR)?.tensor(first?).tensor(second?).scalar(1).scalar(2).submit(ChipId(chip))
}

const UNTOUCHED: &[(&str, Attempt)] = &[
    ("`pto_add` takes 1 tensors and 1 scalars, given 0 and 1", |b, _| b.task(ADD)?.scalar(1).submit(ChipId(0))),
    ("given 1 and 0", |b, t| b.task(ADD)?.tensor(host_tensor(b, &t.host)?).submit(ChipId(0))),
    ("given 2 and 1", |b, t| {
        let tensor = host_tensor(b, &t.host)?;
        b.task(ADD)?.tensor(tensor).tensor(tensor).scalar(1).submit(ChipId(0))
    }),
    ("cannot be an argument of", |b, t| b.task(ADD)?.tensor(far_tensor(b, t)?).scalar(1).submit(ChipId(0))),
    ("a tensor on chip1 cannot be an argument of `pair` on chip0", |b, t| pair(b, &t.near, &t.far, 0)),
    ("a tensor on chip1 cannot be an argument of `pair` on chip0", |b, t| pair(b, &t.far, &t.near, 0)),
    ("a tensor on chip0 cannot be an argument of `pair` on chip1", |b, t| pair(b, &t.near, &t.far, 1)),
    ("a tensor on chip1 cannot be an argument of `pair` on chip0", |b, t| pair(b, &t.far, &t.far, 0)),
    ("is of kind Sub", |b, t| b.task(SUB)?.tensor(host_tensor(b, &t.host)?).scalar(1).submit(ChipId(0))),
    ("is of kind Chip", |b, t| b.task(ADD)?.tensor(host_tensor(b, &t.host)?).scalar(1).submit_sub()),
    ("takes host memory only", |b, t| b.task(SUB)?.tensor(far_tensor(b, t)?).scalar(1).submit_sub()),
    ("there are 2 chips", |b, t| b.task(ADD)?.tensor(host_tensor(b, &t.host)?).scalar(1).submit(ChipId(2))),
    ("the backend takes at most 2 and 2", |b, _| b.task(SCALARS)?.scalar(1).scalar(2).scalar(3).submit(ChipId(0))),
    ("the backend takes at most 2 and 2", |b, t| {
        let tensor = host_tensor(b, &t.host)?;
        b.task(TENSORS)?.tensor(tensor).tensor(tensor).tensor(tensor).submit(ChipId(0))
    }),
    ("at least one member", |b, _| b.group(ADD)?.submit()),
    ("name the member", |b, t| b.group(ADD)?.tensor(host_tensor(b, &t.host)?).member(ChipId(0)).submit()),
    ("name the member", |b, _| b.group(ADD)?.scalar(1).member(ChipId(0)).submit()),
    ("named twice", |b, t| {
        let tensor = host_tensor(b, &t.host)?;
        let group = b.group(ADD)?.member(ChipId(0)).tensor(tensor).scalar(1);
        group.member(ChipId(0)).tensor(tensor).scalar(1).submit()
    }),
    ("there are 2 chips", |b, t| {
        b.group(ADD)?.member(ChipId(7)).tensor(host_tensor(b, &t.host)?).scalar(1).submit()
    }),
    ("cannot be an argument on", |b, t| {
        b.group(ADD)?.member(ChipId(0)).tensor(far_tensor(b, t)?).scalar(1).submit()
    }),
    ("given 1 and 0", |b, t| {
        let tensor = host_tensor(b, &t.host)?;
        let group = b.group(ADD)?.member(ChipId(0)).tensor(tensor).scalar(1);
        group.member(ChipId(1)).tensor(tensor).submit()
    }),
    ("is of kind Sub", |b, t| b.group(SUB)?.member(ChipId(0)).tensor(host_tensor(b, &t.host)?).scalar(1).submit()),
    ("belongs to another worker", |b, t| host_tensor(b, &t.foreign).map(drop)),
    ("belongs to another worker", |b, t| b.copy_to(&t.far, &t.foreign)),
    ("belongs to another worker", |b, t| b.copy_from(&t.foreign, &t.far)),
    ("the device side of a copy", |b, t| b.copy_to(&t.host, &t.host)),
    ("the device side of a copy", |b, t| b.copy_from(&t.host, &t.host)),
    ("1 to 5 dimensions", |b, t| b.tensor(&t.host, &[], DataType::Int32, Access::InOut).map(drop)),
    ("1 to 5 dimensions", |b, t| b.tensor(&t.host, &[1, 0], DataType::Int32, Access::InOut).map(drop)),
    ("host intermediate 0 is not declared", |b, _| b.intermediate(0).map(drop)),
    ("callable 5 is not declared", |b, _| b.task(5).map(drop)),
    ("callable 5 is not declared", |b, _| b.group(5).map(drop)),
];

/// After the dispatch has opened; harmless in ordinary mode.
const TOO_LATE: &[(&str, Attempt)] = &[
    ("lease it before the first task", |b, t| {
        b.task(ADD)?.tensor(host_tensor(b, &t.host)?).scalar(1).submit(ChipId(0))?;
        b.lease(DOMAIN, &signal_request(64)).map(drop)
    }),
    ("lease it before the first task", |b, t| {
        b.group(ADD)?.member(ChipId(0)).tensor(host_tensor(b, &t.host)?).scalar(1).submit()?;
        b.lease(DOMAIN, &signal_request(64)).map(drop)
    }),
    ("lease it before the first task", |b, t| {
        b.task(SUB)?.tensor(host_tensor(b, &t.host)?).scalar(1).submit_sub()?;
        b.lease(DOMAIN, &signal_request(64)).map(drop)
    }),
    ("copies come before the first task", |b, t| {
        b.task(ADD)?.tensor(host_tensor(b, &t.host)?).scalar(1).submit(ChipId(0))?;
        b.copy_to(&t.far, &t.host)
    }),
    ("copies come before the first task", |b, t| {
        b.task(ADD)?.tensor(host_tensor(b, &t.host)?).scalar(1).submit(ChipId(0))?;
        b.copy_from(&t.host, &t.far)
    }),
    ("leased in this dispatch with another request", |b, _| {
        let _lease = b.lease(DOMAIN, &signal_request(64))?;
        b.lease(DOMAIN, &signal_request(128)).map(drop)
    }),
];

/// A program that makes the attempt whose number is its argument.
fn attempting(cases: &'static [(&'static str, Attempt)], things: &Arc<Mutex<Option<Things>>>) -> Arc<dyn Program> {
    let things = Arc::clone(things);
    let large = |name: &str, signature| {
        CallableSpec::chip(name, signature).with_source(KernelObject::new(|_| Ok(())).into_source())
    };
    let scalars = large("scalars", Signature::new([], 3));
    let tensors = large("tensors", Signature::new([Access::InOut; 3], 0));
    let both = large("pair", Signature::new([Access::InOut; 2], 2));
    let sub = CallableSpec::sub(kernels::SUB_ADD, kernels::signature(kernels::SUB_ADD));
    let spec = ProgramSpec::new("attempting").callable(add()).callable(sub).callable(scalars).callable(tensors);
    let spec = spec.callable(both);
    program(spec.parameter(Parameter::scalar("case")), move |build, args| {
        let case = usize::try_from(args.scalar_at(0)?)?;
        let things = things.lock().unwrap();
        let things = things.as_ref().unwrap();
        match cases.get(case) {
            Some((_, attempt)) => attempt(build, things)?,
            None => pair(build, &things.far, &things.far, 1)?,
        }
        Ok(())
    })
}

fn attempt_all(name: &'static str, options: &Options, cases: &'static [(&'static str, Attempt)], untouched: bool) {
    let Some(bench) = emulator_only(name) else { return };
    let things = Arc::default();
    let mut limits = Limits::default();
    (limits.tensors, limits.scalars) = (2, 2);
    let builder = bench.builder().limits(limits).sub_workers(1);
    let rig = bench.prepare(options, &[attempting(cases, &things)], builder);
    let other = bench.prepare(&Options::ordinary(), &[f1()], bench.builder());
    *things.lock().unwrap() = Some(Things {
        near: rig.worker.alloc(ChipId(0), 4).unwrap(),
        far: rig.worker.alloc(ChipId(1), 4).unwrap(),
        host: rig.worker.create_buffer(4).unwrap(),
        foreign: other.worker.create_buffer(4).unwrap(),
    });
    for (case, (says, _)) in cases.iter().enumerate() {
        let error = rig.worker.call(&no_args().scalar(case as u64)).unwrap_err();
        assert!(matches!(&error, Error::Build(text) if text.contains(says)), "{case} ({says}): {error:?}");
        assert_eq!(error.family(), Family::Misuse);
    }
    let journal = rig.journal();
    assert_eq!(submits(&journal), 0);
    if untouched {
        assert_eq!(journal.count(|e| matches!(e, EventKind::TaskSubmit { .. } | EventKind::Alloc { .. })), 0);
    }
    // Usable afterwards (I13), up to the limits.
    rig.worker.call(&no_args().scalar(u64::MAX)).unwrap();
    *things.lock().unwrap() = None;
    rig.worker.close().unwrap();
    other.worker.close().unwrap();
    bench.assert_clean();
}

/// What a builder may not ask for is refused here, before the dispatch opens, and poisons nothing.
#[test]
fn a_wrong_task_or_copy_is_refused_before_the_backend_sees_it() {
    attempt_all("guards: wrong tasks", &Options::persistent(), UNTOUCHED, true);
}

#[test]
fn what_comes_too_late_in_a_build_is_refused_here() {
    attempt_all("guards: too late", &Options::ordinary(), TOO_LATE, false);
}

/// A name that no domain can have, in both modes.
#[test]
fn a_domain_without_a_name_is_refused() {
    for options in [Options::ordinary(), Options::persistent()] {
        let Some(bench) = emulator_only("guards: no name") else { return };
        let nameless = program(ProgramSpec::new("nameless"), |build, _| {
            build.lease("", &signal_request(64))?;
            Ok(())
        });
        let rig = bench.prepare(&options, &[nameless], bench.builder());
        for _ in 0..2 {
            let error = rig.worker.call(&no_args()).unwrap_err();
            assert!(matches!(error, Error::Request { .. }), "{error:?}");
        }
        rig.worker.close().unwrap();
        bench.assert_clean();
    }
}

/// Rule 12: an entry may have submitted tasks, so domains that are new after it come too late.
#[test]
fn after_an_entry_no_domain_is_allocated() {
    let Some(bench) = emulator_only("guards: after an entry") else { return };
    let entry = KernelObject::entry(|_| Ok(()));
    let entry = CallableSpec {
        name: "entry".into(),
        kind: CallableKind::Entry,
        signature: None,
        source: entry.into_source(),
    };
    let calling = program(ProgramSpec::new("calling").callable(entry), |build, _| {
        build.run_entry(0, &[])?;
        let late = build.lease(DOMAIN, &signal_request(64));
        assert!(matches!(&late, Err(Error::Build(text)) if text.contains("before the first task")), "{late:?}");
        Ok(())
    });
    let rig = bench.prepare(&Options::ordinary(), &[calling], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 17: a failed call without effect does not stick; the builder may do something else instead.
#[test]
fn a_failed_call_without_effect_may_be_passed_over() {
    let Some(bench) = emulator_only("guards: without effect") else { return };
    let tensor: Arc<Mutex<Option<DeviceTensor>>> = Arc::default();
    let inside = Arc::clone(&tensor);
    let trying = program(ProgramSpec::new("trying").parameter(Parameter::host("x", 4)), move |build, args| {
        let tensor = inside.lock().unwrap().clone().unwrap();
        let failed = build.copy_to(&tensor, args.host_at(0)?);
        assert!(matches!(&failed, Err(Error::Backend(e)) if e.effect() == Effect::None), "{failed:?}");
        build.copy_to(&tensor, args.host_at(0)?)?;
        Ok(())
    });
    let rig = bench.prepare(&Options::persistent(), &[trying], bench.builder());
    *tensor.lock().unwrap() = Some(rig.worker.alloc(ChipId(0), 4).unwrap());
    rig.emulator().arm(Fault::new(Call::CopyTo, FaultEffect::Before));
    let x = rig.worker.create_buffer(4).unwrap();
    rig.worker.call(&no_args().host(&x)).unwrap();
    assert!(rig.emulator().faults().pending().is_empty());
    drop(x);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 17: a failed opening cannot be undone, whatever the failed call says of its own effect: it sticks.
#[test]
fn a_failed_opening_sticks() {
    let Some(bench) = emulator_only("guards: failed opening") else { return };
    let request = signal_request(64);
    let spec = ProgramSpec::new("swallowing").callable(add()).parameter(Parameter::host("x", 4));
    let swallowing = program(spec, move |build, args| {
        let lease = build.lease(DOMAIN, &request);
        let tensor = build.tensor(args.host_at(0)?, &[1], DataType::Int32, Access::InOut)?;
        for _ in 0..2 {
            let _swallowed = build.task(0).and_then(|task| task.tensor(tensor).scalar(1).submit(ChipId(0)));
        }
        drop(lease);
        Ok(())
    });
    for call in [Call::GetOrAllocateDomain, Call::CopyTo] {
        let rig = bench.prepare(&Options::persistent(), &[Arc::clone(&swallowing)], bench.builder());
        let x = rig.worker.create_buffer(4).unwrap();
        rig.worker.call(&no_args().host(&x)).unwrap();
        let before = rig.journal().count(|e| matches!(e, EventKind::TaskSubmit { .. }));
        rig.emulator().arm(Fault::new(call, FaultEffect::Before));
        let failed = rig.worker.call(&no_args().host(&x));
        // An allocation that did nothing could be tried again by itself, but not on a worker that it has poisoned.
        let known = match &failed {
            Err(Error::Failed(failure)) => matches!(failure.cause, Error::Backend(_)),
            Err(error) => matches!(error, Error::ResetCopy { .. }),
            Ok(()) => false,
        };
        assert!(known, "{failed:?}");
        assert_eq!(rig.journal().count(|e| matches!(e, EventKind::TaskSubmit { .. })), before, "{call:?}");
        let refused = rig.worker.call(&no_args().host(&x));
        assert!(matches!(refused, Err(Error::Poisoned(_))), "{refused:?}");
        drop(x);
        rig.worker.close().unwrap();
    }
    bench.assert_clean();
}

/// Rule 17: once a call has failed with an effect, every later call of the build returns that failure.
#[test]
fn every_call_after_a_sticky_failure_returns_it() {
    let Some(bench) = emulator_only("guards: sticky") else { return };
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    let spec = ProgramSpec::new("going on").callable(add()).parameter(Parameter::scalar("cold"));
    let going_on = program(spec, move |build, args| {
        let _warm = build.lease("warm", &signal_request(64))?;
        if args.scalar_at(0)? == 0 {
            return Ok(());
        }
        let first = build.lease("cold", &signal_request(64)).map(drop).unwrap_err().to_string();
        let later: [(&str, Result<(), Error>); 6] = [
            ("lease of a warm domain", build.lease("warm", &signal_request(64)).map(drop)),
            ("lease of the same domain", build.lease("cold", &signal_request(64)).map(drop)),
            ("task", build.task(0).map(drop)),
            ("group", build.group(0).map(drop)),
            ("scratch", build.scratch(8).map(drop)),
            ("scope", build.scope(|| Ok(()))),
        ];
        for (what, result) in later {
            assert_eq!(result.unwrap_err().to_string(), first, "{what}");
            counted.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    });
    let rig = bench.prepare(&Options::persistent(), &[going_on], bench.builder());
    rig.worker.call(&no_args().scalar(0)).unwrap();
    // The registration of the warm domain is the first such call of the dispatch.
    rig.emulator().arm(Fault::new(Call::GetOrAllocateDomain, FaultEffect::After).nth(2));
    let failed = rig.worker.call(&no_args().scalar(1));
    assert!(matches!(&failed, Err(Error::Backend(e)) if e.effect().possible()), "{failed:?}");
    assert_eq!(count.load(Ordering::SeqCst), 6);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 12: any call that reaches the backend opens the dispatch first, copies of the builder's own among them; and
/// an opening registers all domains before it zeroes any.
#[test]
fn copies_open_the_dispatch_and_registration_comes_before_zeroing() {
    let Some(bench) = emulator_only("guards: copies open") else { return };
    let tensor: Arc<Mutex<Option<DeviceTensor>>> = Arc::default();
    let inside = Arc::clone(&tensor);
    let spec = ProgramSpec::new("copying").parameter(Parameter::host("x", 4)).parameter(Parameter::scalar("what"));
    let copying = program(spec, move |build, args| {
        let tensor = inside.lock().unwrap().clone().unwrap();
        match args.scalar_at(1)? {
            0 => {
                build.lease("d0", &signal_request(64))?;
                build.lease("d1", &signal_request(64))?;
            }
            1 => build.copy_to(&tensor, args.host_at(0)?)?,
            _ => build.copy_from(args.host_at(0)?, &tensor)?,
        }
        Ok(())
    });
    let rig = bench.prepare(&Options::persistent(), &[copying], bench.builder());
    *tensor.lock().unwrap() = Some(rig.worker.alloc(ChipId(0), 4).unwrap());
    let x = rig.worker.create_buffer(4).unwrap();
    for what in 0..3 {
        rig.worker.call(&no_args().host(&x).scalar(what)).unwrap();
    }
    let journal = rig.journal();
    for run in [2, 3].map(RunId) {
        let own = |e: &EventKind| {
            matches!(e, EventKind::Copy { run: Some(r), dst: DevicePlace::Resident(_), .. } if *r == run)
                || matches!(e, EventKind::CopyFrom { run: Some(r), .. } if *r == run)
        };
        let zeroing = |e: &EventKind| matches!(e, EventKind::Copy { run: Some(r), dst: DevicePlace::DomainBuffer { .. }, .. } if *r == run);
        let registered = |e: &EventKind| matches!(e, EventKind::Reuse { run: r, .. } if *r == run);
        assert_eq!((journal.count(registered), journal.count(zeroing)), (2, 4), "{journal}");
        let last_registered = journal.last_position(registered).unwrap();
        assert!(last_registered < at(&journal, "zeroing", zeroing), "{journal}");
        assert!(journal.last_position(zeroing).unwrap() < at(&journal, "own copy", own), "{journal}");
    }
    drop(x);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Warm F1 without reset, and a program that stops at `gate` before or after its first call to the backend.
fn poisoned_while_building(point: u64) -> (Rig, u64, Result<(), Error>) {
    let bench = emulator_only("guards: poisoned while building").unwrap();
    let gate = Gate::new();
    let inside = gate.clone();
    let host: Arc<Mutex<Option<HostBuffer>>> = Arc::default();
    let buffer = Arc::clone(&host);
    let spec = ProgramSpec::new("gated").callable(add()).parameter(Parameter::scalar("point"));
    let gated = program(spec, move |build, args| {
        let point = args.scalar_at(0)?;
        let buffer = buffer.lock().unwrap().clone().unwrap();
        let submit = || {
            let tensor = build.tensor(&buffer, &[1], DataType::Int32, Access::InOut)?;
            build.task(0)?.tensor(tensor).scalar(1).submit(ChipId(0))
        };
        match point {
            // Before the opening, which a lease of a retained domain would not be, but a task is.
            1 => {
                inside.pass();
                submit()?;
            }
            // Before a lease.
            2 => {
                inside.pass();
                build.lease(DOMAIN, &signal_request(64))?;
            }
            // After the opening.
            3 => {
                build.lease(DOMAIN, &signal_request(64))?;
                submit()?;
                inside.pass();
            }
            _ => {
                build.lease(DOMAIN, &signal_request(64))?;
            }
        }
        Ok(())
    });
    let rig = bench.prepare(&Options::persistent().reset(false), &[gated], bench.builder());
    *host.lock().unwrap() = Some(rig.worker.create_buffer(4).unwrap());
    rig.worker.call(&no_args().scalar(0)).unwrap();
    rig.hold_runs();
    let older = rig.worker.submit(rig.ids[0], &no_args().scalar(0)).unwrap();
    let outcome = std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let building = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &no_args().scalar(point)).map(drop));
        gate.wait_arrived(1);
        let failure = RuntimeFailure::new(Call::Run, "RuntimeError", "told to fail").with_kind(FailureKind::Task);
        rig.emulator().fail(RunId(2), failure).unwrap();
        while !older.is_done() {
            std::thread::yield_now();
        }
        gate.open();
        building.join()
    });
    *host.lock().unwrap() = None;
    let poisoned_by = older.id().get();
    // Seen by the dispatch that was being built; the handle has not been read.
    drop(older);
    rig.worker.close().unwrap();
    bench.assert_clean();
    (rig, poisoned_by, outcome)
}

/// Rule 17: a dispatch that is being built while an older one fails is turned away with that failure as its cause:
/// before it opens nothing is touched, and a built graph is not accepted.
#[test]
fn a_dispatch_being_built_while_an_older_one_fails_is_turned_away() {
    if emulator_only("guards: poisoned while building").is_none() {
        return;
    }
    for point in 1..=3 {
        let (rig, by, outcome) = poisoned_while_building(point);
        assert!(matches!(&outcome, Err(Error::Poisoned(f)) if f.id.get() == by), "point {point}: {outcome:?}");
        let journal = rig.journal();
        assert!(!journal.contains(|e| *e == EventKind::Accept(RunId(3))), "point {point}");
        let touched = journal
            .of_run(RunId(3))
            .into_iter()
            .any(|e| matches!(e, EventKind::Reuse { .. } | EventKind::Alloc { .. } | EventKind::TaskSubmit { .. }));
        assert_eq!(touched, point == 3, "point {point}: {journal}");
    }
}

/// Rule 5: under `try_submit` a control call that would wait for an older dispatch is refused instead.
#[test]
fn a_control_call_under_try_submit_does_not_wait() {
    let Some(bench) = emulator_only("guards: control under try") else { return };
    let tensor: Arc<Mutex<Option<DeviceTensor>>> = Arc::default();
    let inside = Arc::clone(&tensor);
    let spec = ProgramSpec::new("controlling").parameter(Parameter::host("x", 4));
    let controlling = program(spec.parameter(Parameter::scalar("what")), move |build, args| {
        let tensor = inside.lock().unwrap().clone().unwrap();
        match args.scalar_at(1)? {
            0 => {}
            1 => build.copy_to(&tensor, args.host_at(0)?)?,
            2 => build.copy_from(args.host_at(0)?, &tensor)?,
            _ => {
                build.lease(DOMAIN, &signal_request(64))?;
            }
        }
        Ok(())
    });
    for options in [Options::ordinary(), Options::persistent()] {
        let rig = bench.prepare(&options, &[Arc::clone(&controlling)], bench.builder());
        *tensor.lock().unwrap() = Some(rig.worker.alloc(ChipId(0), 4).unwrap());
        let x = rig.worker.create_buffer(4).unwrap();
        rig.hold_runs();
        let held = rig.worker.submit(rig.ids[0], &no_args().host(&x).scalar(0)).unwrap();
        for what in 1..4 {
            let tried = rig.worker.try_submit(rig.ids[0], &no_args().host(&x).scalar(what)).map(drop);
            assert!(matches!(tried, Err(Error::WouldBlock { .. })), "{what}: {tried:?}");
        }
        assert_eq!(rig.journal().count(|e| matches!(e, EventKind::Wait { .. })), 0);
        rig.complete(1);
        held.wait().unwrap();
        *tensor.lock().unwrap() = None;
        drop(x);
        rig.worker.close().unwrap();
    }
    bench.assert_clean();
}

/// Rule 9: two buffers of one size may stand for different things, and a domain leased twice is one lease.
#[test]
fn the_epoch_counts_accepted_dispatches_that_leased() {
    let Some(bench) = emulator_only("guards: epochs") else { return };
    let seen: Arc<Mutex<Vec<(u64, bool)>>> = Arc::default();
    let noted = Arc::clone(&seen);
    let spec = ProgramSpec::new("counting").parameter(Parameter::scalar("what"));
    let request = DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("a", 8), NamedBuffer::bytes("b", 8)]);
    let counting = program(spec, move |build, args| {
        let what = args.scalar_at(0)?;
        if what == 1 {
            return Ok(());
        }
        for _ in 0..2 {
            let lease = build.lease(DOMAIN, &request)?;
            noted.lock().unwrap().push((lease.epoch(), lease.is_first_use()));
        }
        if what == 2 { Err("told to fail".into()) } else { Ok(()) }
    });
    let rig = bench.prepare(&Options::persistent(), &[counting], bench.builder());
    // Leased, not leased, leased but rejected, leased.
    for what in [0, 1, 2, 0, 0] {
        assert_eq!(rig.worker.call(&no_args().scalar(what)).is_err(), what == 2);
    }
    let once = [(1, true), (2, false), (2, false), (3, false)];
    let twice: Vec<_> = once.iter().flat_map(|lease| [*lease, *lease]).collect();
    assert_eq!(*seen.lock().unwrap(), twice);
    let stats = rig.worker.stats(rig.ids[0]).unwrap();
    assert_eq!((stats.dispatches, stats.allocations, stats.reuses), (4, 1, 2));
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// How domains are asked for: the name, and whether they are to be kept.
type Asked = Arc<Mutex<Vec<(String, Option<bool>)>>>;

/// A backend that notes how domains are asked for.
#[derive(Debug)]
struct Noting {
    inner: Arc<dyn Backend>,
    asked: Asked,
}

impl Backend for Noting {
    forward_backend!(
        inner: capabilities, phase, check_blocking, register, start, run_state, create_buffer, create_zeros,
        write_buffer, read_buffer, fill_buffer, release_buffer, alloc, free, copy_to, copy_from, release_domain,
        domain_state, committed_device_memory, close, abandon,
    );

    fn submit(&self, run: RunId, config: &CallConfig, graph: &mut dyn GraphBuilder) -> Result<(), SubmitError> {
        struct Around<'a>(&'a mut dyn GraphBuilder, &'a Asked);
        impl GraphBuilder for Around<'_> {
            fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
                self.0.build(&NotingGraph { inner: orchestrator, asked: self.1 })
            }
        }
        self.inner.submit(run, config, &mut Around(graph, &self.asked))
    }
}

struct NotingGraph<'a> {
    inner: &'a dyn Orchestrator,
    asked: &'a Asked,
}

impl Orchestrator for NotingGraph<'_> {
    forward_orchestrator!(
        inner: run, copy_to, copy_from, copy_batch, submit_next_level, submit_next_level_group, submit_sub, scope,
        alloc, run_entry,
    );

    fn allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        self.asked.lock().unwrap().push((name.to_owned(), None));
        self.inner.allocate_domain(name, request, reply)
    }

    fn get_or_allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        retain_after_run: bool,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        self.asked.lock().unwrap().push((name.to_owned(), Some(retain_after_run)));
        self.inner.get_or_allocate_domain(name, request, retain_after_run, reply)
    }
}

/// Rule 10: persistent execution asks for its domains by the one call that keeps them, at the first use and again in
/// each later run, under the key; ordinary execution never does, and needs no retention. Legacy retention is the
/// backend's way to serve the same call.
#[test]
fn rule_10_retention_is_asked_for_by_the_one_call() {
    let Some(bench) = emulator_only("rule 10") else { return };
    let missing = || Retention::Unsupported { missing: "get_or_allocate_domain".into() };
    for (options, retention, expected) in [
        (Options::persistent(), Retention::Public, Some(("p0:comm_d0", Some(true)))),
        (Options::persistent(), Retention::PrivateHooks, Some(("p0:comm_d0", Some(true)))),
        (Options::persistent(), missing(), None),
        (Options::ordinary(), missing(), Some(("comm_d0", None))),
    ] {
        let inner = bench.builder().retention(retention).build().unwrap();
        let journal = inner.journal();
        let backend = Arc::new(Noting { inner, asked: Asked::default() });
        let asked = Arc::clone(&backend.asked);
        let prepared = PreparedWorker::prepare(&[f1()], &options, backend);
        let Some((name, retain)) = expected else {
            assert!(matches!(prepared, Err(Error::NoRetention { .. })));
            assert!(!journal.contains(|e| matches!(e, EventKind::Start { .. })), "the backend was started");
            continue;
        };
        let worker = prepared.unwrap();
        for _ in 0..3 {
            worker.call(&no_args()).unwrap();
        }
        assert_eq!(*asked.lock().unwrap(), vec![(name.to_owned(), retain); 3]);
        worker.close().unwrap();
    }
    bench.assert_clean();
}
