//! Bad input: each is a typed error, nothing is lost, and the worker is usable afterwards unless the design says that
//! it is poisoned (I13).
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use pto_dispatch::{Args, Error, Options, Parameter, PreparedWorker, Program, ProgramSpec, Target};
use pto_domain::{DomainError, RequestError};
use pto_mock::KernelObject;
use pto_mock::fixtures::{Fixture, FixtureError};
use pto_reset::ResetError;
use pto_simpler_sys::{
    Backend, CallableSpec, ChipId, DomainRequest, FailureKind, Family, Limits, NamedBuffer, Signature,
};
use pto_tests::rig::{Bench, Rig, any_backend, emulator_only, submits};
use pto_tests::scenario::{DOMAIN, f0, f1, program, signal_request};

fn no_args() -> Args {
    Args::new()
}

/// What preparing says, on a backend that must be closed exactly when it was touched.
fn prepare_error(bench: &Bench, programs: &[Arc<dyn Program>], options: &Options) -> Error {
    let emulator = bench.builder().build().unwrap();
    let backend = Arc::clone(&emulator) as Arc<dyn Backend>;
    let error = PreparedWorker::prepare(programs, options, backend).unwrap_err();
    assert_eq!(emulator.stats().threads, 0);
    error
}

#[test]
fn empty_program_list() {
    let Some(bench) = emulator_only("empty list") else { return };
    let error = prepare_error(&bench, &[], &Options::persistent());
    assert!(matches!(error, Error::NoPrograms), "{error:?}");
    bench.assert_clean();
}

#[test]
fn duplicate_program() {
    let Some(bench) = emulator_only("duplicate program") else { return };
    let program = f1();
    let list = [f0(), Arc::clone(&program), program];
    let error = prepare_error(&bench, &list, &Options::persistent());
    assert!(matches!(error, Error::DuplicateProgram { first: 1, second: 2, .. }), "{error:?}");
    bench.assert_clean();
}

#[test]
fn mismatched_platform_runtime_or_device_ids() {
    let Some(bench) = emulator_only("mismatch") else { return };
    let compiled = |platform: &str, runtime: &str, device_ids: &[u32]| {
        let target = Target { platform: platform.into(), runtime: runtime.into(), device_ids: device_ids.to_vec() };
        program(ProgramSpec::new("compiled").target(target), |_, _| Ok(()))
    };
    let good = ("emulator", "emulated", &[0, 1][..]);
    for (what, bad) in [
        ("platform", ("a5", good.1, good.2)),
        ("runtime", (good.0, "host_build_graph", good.2)),
        ("device ids", (good.0, good.1, &[1, 0][..])),
        ("device ids", (good.0, good.1, &[0][..])),
    ] {
        let odd = || compiled(bad.0, bad.1, bad.2);
        // Against another program, and against the backend.
        for list in [vec![compiled(good.0, good.1, good.2), odd()], vec![odd()]] {
            let error = prepare_error(&bench, &list, &Options::persistent());
            let Error::TargetMismatch { what: found, first, second, .. } = &error else { panic!("{error:?}") };
            assert_eq!(*found, what);
            assert_ne!(first, second);
        }
    }
    let list = [compiled(good.0, good.1, good.2), f0()];
    let rig = bench.prepare(&Options::persistent(), &list, bench.builder());
    rig.worker.run(rig.ids[0], &no_args()).unwrap();
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn reset_without_persistence() {
    let Some(bench) = emulator_only("reset") else { return };
    let error = prepare_error(&bench, &[f1()], &Options::ordinary().reset(true));
    assert!(matches!(error, Error::ResetWithoutPersistence), "{error:?}");
    bench.assert_clean();
}

/// The worker takes a dispatch of F0, which is its last program.
#[track_caller]
fn assert_usable(rig: &Rig) {
    rig.worker.run(*rig.ids.last().unwrap(), &no_args()).unwrap();
}

#[track_caller]
fn finish(bench: &Bench, rig: &Rig) {
    assert_usable(rig);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn wrong_argument_count_kind_size_or_owner() {
    let bench = any_backend("arguments");
    let spec = ProgramSpec::new("typed").parameter(Parameter::host("x", 8)).parameter(Parameter::scalar("n"));
    let typed = program(spec, |_, _| Ok(()));
    let rig = bench.prepare_any(&Options::persistent(), &[typed, f0()], 2);
    let other = bench.prepare_any(&Options::persistent(), &[f0()], 2);
    let x = rig.worker.create_buffer(8).unwrap();
    let small = rig.worker.create_buffer(4).unwrap();
    let foreign = other.worker.create_buffer(8).unwrap();
    for (args, says) in [
        (no_args(), "0 arguments given, 2 declared"),
        (no_args().host(&x).scalar(1).scalar(2), "3 arguments given, 2 declared"),
        (no_args().scalar(1).scalar(1), "declared as a host buffer"),
        (no_args().host(&x).host(&x), "declared as a scalar"),
        (no_args().host(&small).scalar(1), "holds 4 bytes, declared with 8"),
        (no_args().host(&foreign).scalar(1), "belongs to another worker"),
    ] {
        let error = rig.worker.run(rig.ids[0], &args).unwrap_err();
        assert!(matches!(&error, Error::Arguments { message, .. } if message.contains(says)), "{error}");
    }
    assert_eq!(rig.spy.count(|seen| matches!(seen, pto_tests::spy::Seen::Submit(_))), 0);
    rig.worker.run(rig.ids[0], &no_args().host(&x).scalar(1)).unwrap();
    drop((x, small, foreign));
    other.worker.close().unwrap();
    finish(&bench, &rig);
}

#[test]
fn unknown_program_or_callable() {
    let bench = any_backend("unknown");
    let undeclared = program(ProgramSpec::new("undeclared"), |build, _| Ok(build.task(3)?.submit(ChipId(0))?));
    let rig = bench.prepare_any(&Options::persistent(), &[undeclared, f0()], 2);
    let other = bench.prepare_any(&Options::persistent(), &[f0()], 2);
    let error = rig.worker.run(other.ids[0], &no_args()).unwrap_err();
    assert!(matches!(error, Error::UnknownProgram), "{error:?}");
    let error = rig.worker.run(rig.ids[0], &no_args()).unwrap_err();
    assert!(matches!(&error, Error::Build(message) if message.contains("callable 3 is not declared")), "{error:?}");
    let error = rig.worker.call(&no_args()).unwrap_err();
    assert!(matches!(error, Error::Ambiguous { programs: 2 }), "{error:?}");
    other.worker.close().unwrap();
    finish(&bench, &rig);

    let Some(bench) = emulator_only("unknown callable") else { return };
    let spec = ProgramSpec::new("nameless").callable(CallableSpec::chip("no such kernel", Signature::default()));
    let error = prepare_error(&bench, &[program(spec, |_, _| Ok(()))], &Options::persistent());
    assert!(matches!(&error, Error::Backend(e) if e.family() == Family::Misuse), "{error:?}");
    assert!(error.to_string().contains("no such kernel"));
    bench.assert_clean();
}

type Asked = Arc<Mutex<DomainRequest>>;

/// A program that leases whatever is asked for.
fn asking() -> (Asked, Arc<dyn Program>) {
    let asked: Asked = Arc::new(Mutex::new(signal_request(64)));
    let inside = Arc::clone(&asked);
    let program = program(ProgramSpec::new("asking"), move |build, _| {
        build.lease(DOMAIN, &inside.lock().unwrap())?;
        Ok(())
    });
    (asked, program)
}

/// The request is refused as `expected` says, in both modes, before anything reaches the backend.
fn assert_refused(name: &'static str, request: &DomainRequest, expected: impl Fn(&RequestError) -> bool) {
    for options in [Options::persistent(), Options::ordinary()] {
        let bench = any_backend(name);
        let (asked, program) = asking();
        let rig = bench.prepare_any(&options, &[program, f0()], 2);
        *asked.lock().unwrap() = request.clone();
        let error = rig.worker.run(rig.ids[0], &no_args()).unwrap_err();
        assert!(matches!(&error, Error::Request { source, .. } if expected(source)), "{error:?}");
        assert_eq!(error.family(), Family::Misuse);
        if let Some(journal) = rig.try_journal() {
            assert_eq!((journal.allocs(), submits(&journal)), (0, 0));
        }
        finish(&bench, &rig);
    }
}

fn request(workers: &[u32], window_bytes: u64, buffers: &[(&str, u64)]) -> DomainRequest {
    DomainRequest {
        workers: workers.iter().copied().map(ChipId).collect(),
        window_bytes,
        buffers: buffers.iter().map(|(name, nbytes)| NamedBuffer::bytes(*name, *nbytes)).collect(),
    }
}

#[test]
fn worker_id_out_of_range() {
    assert_refused("range", &request(&[0, 2], 64, &[]), |e| {
        matches!(e, RequestError::WorkerOutOfRange { chip: ChipId(2), chips: 2 })
    });
}

#[test]
fn task_for_a_chip_that_does_not_exist() {
    let bench = any_backend("chip");
    let spec = ProgramSpec::new("far").callable(pto_tests::scenario::fail());
    let far = program(spec, |build, _| Ok(build.task(0)?.scalar(1).submit(ChipId(9))?));
    let rig = bench.prepare_any(&Options::persistent(), &[far, f0()], 2);
    let error = rig.worker.run(rig.ids[0], &no_args()).unwrap_err();
    assert!(matches!(&error, Error::Build(message) if message.contains("there are 2 chips")), "{error:?}");
    finish(&bench, &rig);
}

#[test]
fn duplicate_worker() {
    assert_refused("duplicate worker", &request(&[1, 1], 64, &[]), |e| {
        matches!(e, RequestError::DuplicateWorker { chip: ChipId(1), .. })
    });
}

#[test]
fn empty_worker_list() {
    assert_refused("no workers", &request(&[], 64, &[]), |e| matches!(e, RequestError::NoWorkers));
}

#[test]
fn more_ranks_than_the_backend_allows() {
    let Some(bench) = emulator_only("ranks") else { return };
    let mut limits = Limits::default();
    limits.ranks = 1;
    let rig = bench.prepare(&Options::persistent(), &[asking().1, f0()], bench.builder().limits(limits));
    let error = rig.worker.run(rig.ids[0], &no_args()).unwrap_err();
    let expected = RequestError::TooManyRanks { ranks: 2, max: 1 };
    assert!(matches!(&error, Error::Request { source, .. } if *source == expected), "{error:?}");
    finish(&bench, &rig);
}

#[test]
fn window_of_no_bytes() {
    assert_refused("window 0", &request(&[0, 1], 0, &[]), |e| matches!(e, RequestError::ZeroWindow));
}

#[test]
fn buffers_over_the_window() {
    assert_refused("over", &request(&[0, 1], 64, &[("a", 65)]), |e| {
        matches!(e, RequestError::Oversized { named: 65, window: 64 })
    });
}

#[test]
fn sum_overflow() {
    let huge = request(&[0, 1], u64::MAX, &[("a", u64::MAX), ("b", 1)]);
    assert_refused("overflow", &huge, |e| matches!(e, RequestError::Overflow { .. }));
}

#[test]
fn duplicate_buffer_names() {
    assert_refused("names", &request(&[0, 1], 64, &[("a", 8), ("a", 8)]), |e| {
        matches!(e, RequestError::DuplicateBuffer { first: 0, second: 1, .. })
    });
}

#[test]
fn changed_request() {
    let bench = any_backend("changed");
    let (asked, program) = asking();
    let rig = bench.prepare_any(&Options::persistent(), &[program, f0()], 2);
    rig.worker.run(rig.ids[0], &no_args()).unwrap();
    *asked.lock().unwrap() = signal_request(128);
    let error = rig.worker.run(rig.ids[0], &no_args()).unwrap_err();
    assert!(matches!(&error, Error::Domain(DomainError::SpecChanged { .. })), "{error:?}");
    assert!(error.to_string().contains("window_bytes was 64, is now 128"), "{error}");
    finish(&bench, &rig);
}

#[test]
fn slack() {
    let bench = any_backend("slack");
    let (asked, program) = asking();
    *asked.lock().unwrap() = request(&[0, 1], 64, &[("a", 4)]);
    let rig = bench.prepare_any(&Options::persistent(), &[program, f0()], 2);
    rig.worker.run(rig.ids[0], &no_args()).unwrap();
    let error = rig.worker.run(rig.ids[0], &no_args()).unwrap_err();
    assert!(matches!(&error, Error::Reset { source: ResetError::Slack { .. }, .. }), "{error:?}");
    finish(&bench, &rig);
}

#[test]
fn short_mapping_poisons_persistent_dispatch_only() {
    for (persistent, options) in [(true, Options::persistent()), (false, Options::ordinary())] {
        let Some(bench) = emulator_only("short") else { return };
        let builder = bench.builder().reported_mapping(|_, _, mapped| mapped - 1);
        let rig = bench.prepare(&options, &[asking().1, f0()], builder);
        let error = rig.worker.run(rig.ids[0], &no_args()).unwrap_err();
        let short =
            |e: &Error| matches!(e, Error::Reset { source: ResetError::ShortMapping { mapped: 63, .. }, .. });
        assert!(short(&error), "{error:?}");
        let next = rig.worker.run(rig.ids[1], &no_args());
        if persistent {
            let Err(Error::Poisoned(cause)) = next else { panic!("{next:?}") };
            assert!(short(&cause.cause), "{cause}");
        } else {
            next.unwrap();
        }
        rig.worker.close().unwrap();
        assert_eq!(rig.journal().frees(), 1);
        bench.assert_clean();
    }
}

#[test]
fn submit_after_close_and_close_twice() {
    let bench = any_backend("after close");
    let rig = bench.prepare_any(&Options::persistent(), &[f0()], 2);
    let buffer = rig.worker.create_buffer(8).unwrap();
    assert_usable(&rig);
    rig.worker.close().unwrap();
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.closes(), 1);
    let submitted = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    assert!(matches!(submitted, Err(Error::Closed)), "{submitted:?}");
    assert!(matches!(rig.worker.try_submit(rig.ids[0], &no_args()).map(drop), Err(Error::Closed)));
    assert!(matches!(rig.worker.create_buffer(8).map(drop), Err(Error::Closed)));
    assert!(matches!(rig.worker.alloc(ChipId(0), 8).map(drop), Err(Error::Closed)));
    // A buffer that outlives the worker is no error.
    drop(rig);
    drop(buffer);
    bench.assert_clean();
}

#[test]
fn close_from_a_builder() {
    let bench = any_backend("close inside");
    let shared: Arc<OnceLock<Weak<PreparedWorker>>> = Arc::default();
    let inside = Arc::clone(&shared);
    let closing = program(ProgramSpec::new("closing"), move |_, _| {
        Ok(inside.get().and_then(Weak::upgrade).unwrap().close()?)
    });
    let rig = bench.prepare_any(&Options::persistent(), &[closing, f0()], 2);
    let worker = Arc::new(rig.worker);
    shared.set(Arc::downgrade(&worker)).unwrap();
    let error = worker.run(rig.ids[0], &no_args()).unwrap_err();
    assert!(matches!(error, Error::Reentrant { call: "close" }), "{error:?}");
    worker.run(rig.ids[1], &no_args()).unwrap();
    worker.close().unwrap();
    drop(worker);
    bench.assert_clean();
}

#[test]
fn panicking_builder() {
    let bench = any_backend("panicking builder");
    let spec = ProgramSpec::new("panicking").parameter(Parameter::scalar("open first"));
    let panicking = program(spec, |build, args| {
        if args.scalar_at(0)? == 1 {
            build.lease(DOMAIN, &signal_request(64))?;
        }
        resume_unwind(Box::new(42_i32));
    });
    let rig = bench.prepare_any(&Options::persistent(), &[panicking, f0()], 2);
    let payload = |first: u64| {
        let run = || rig.worker.run(rig.ids[0], &no_args().scalar(first));
        let payload = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        assert_eq!(payload.downcast_ref::<i32>(), Some(&42), "not the builder's payload");
    };
    // Before the dispatch opens it concerns nobody else (rule 17, rule 19).
    payload(0);
    assert_usable(&rig);
    // Afterwards persistent dispatch is poisoned, and close works.
    payload(1);
    let refused = rig.worker.run(rig.ids[1], &no_args()).unwrap_err();
    assert!(matches!(&refused, Error::Poisoned(f) if matches!(f.cause, Error::Panicked { .. })), "{refused:?}");
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn panicking_kernel() {
    for (persistent, options) in [(true, Options::persistent()), (false, Options::ordinary())] {
        let Some(bench) = emulator_only("panicking kernel") else { return };
        let kernel = KernelObject::new(|_| resume_unwind(Box::new("the kernel panics")));
        let callable = CallableSpec::chip("panicking", Signature::default()).with_source(kernel.into_source());
        let spec = ProgramSpec::new("panicking").callable(callable);
        let panicking = program(spec, |build, _| Ok(build.task(0)?.submit(ChipId(1))?));
        let rig = bench.prepare(&options, &[panicking, f0()], bench.builder());
        let error = rig.worker.run(rig.ids[0], &no_args()).unwrap_err();
        let Error::Failed(failure) = &error else { panic!("{error:?}") };
        let Error::Backend(cause) = &failure.cause else { panic!("{failure}") };
        let report = cause.runtime().unwrap();
        assert_eq!((report.kind, report.chip), (FailureKind::Task, Some(ChipId(1))));
        assert!(report.message.contains("the kernel panics"), "{report}");
        let next = rig.worker.run(rig.ids[1], &no_args());
        if persistent {
            assert!(matches!(&next, Err(Error::Poisoned(f)) if Arc::ptr_eq(f, failure)), "{next:?}");
        } else {
            next.unwrap();
        }
        rig.worker.close().unwrap();
        bench.assert_clean();
    }
}

#[test]
fn malformed_fixture_file() {
    for (text, expected) in [
        ("", (|e| matches!(e, FixtureError::Syntax { .. })) as fn(&FixtureError) -> bool),
        ("{", |e| matches!(e, FixtureError::Syntax { .. })),
        ("7", |e| matches!(e, FixtureError::WrongType { .. })),
        ("{}", |e| matches!(e, FixtureError::MissingField { .. })),
    ] {
        let error = Fixture::parse(text.as_bytes()).unwrap_err();
        assert!(expected(&error), "{text:?}: {error:?}");
    }
    let error = Fixture::read("no/such/file.json").unwrap_err();
    assert!(matches!(error, FixtureError::Unreadable { .. }), "{error:?}");
    let good = include_bytes!("../fixtures/production-domains.json");
    assert!(Fixture::parse(good).is_ok());
    let error = Fixture::parse(&good[..good.len() / 2]).unwrap_err();
    assert!(matches!(error, FixtureError::Syntax { .. }), "{error:?}");
}
