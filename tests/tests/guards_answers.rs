//! Guards of what is answered: what an error advises, what a worker and a build say of themselves, and when a
//! submission that does not wait has to.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use pto_dispatch::{
    Arg, Args, CloseFailure, DeviceTensor, Error, HostBuffer, Options, Parameter, Program, ProgramSpec,
};
use pto_domain::DomainError;
use pto_mock::{Emulator, KernelObject, kernels};
use pto_reset::ResetError;
use pto_simpler_sys::{
    Access, BackendError, Call, CallableKind, CallableSpec, ChipId, CopyGranularity, DataType, DomainAllocation,
    Family,
};
use pto_tests::rig::emulator_only;
use pto_tests::scenario::{DOMAIN, f0, f1, program, signal_request};

fn no_args() -> Args {
    Args::new()
}

fn close_failure(complete: bool) -> Error {
    let primary = Error::NotFreed { key: "p0:d".into() };
    Error::Close(Arc::new(CloseFailure { primary, others: Vec::new(), complete }))
}

/// Every wrapper of an error passes on the family of what it wraps, and the advice that goes with it.
#[test]
fn each_error_names_its_family_and_what_may_follow() {
    let broken = || BackendError::broken(Call::Free, "told to");
    let mapping = ResetError::ShortMapping { chip: ChipId(0), rank: 0, mapped: 1, requested: 2 };
    let cases = [
        // The error, its family, whether to try again, whether to prepare again.
        (Error::NoPrograms, Family::Misuse, false, false),
        (Error::Backend(broken()), Family::Broken, false, true),
        (Error::Backend(BackendError::misuse(Call::Free, "told to")), Family::Misuse, false, false),
        (Error::Release { what: "x".into(), source: broken() }, Family::Broken, false, false),
        (Error::Domain(DomainError::Poisoned), Family::Backend, false, true),
        (Error::Domain(DomainError::Closing), Family::Misuse, false, true),
        (Error::Reset { key: "p0:d".into(), source: mapping }, Family::Backend, false, false),
        (Error::NotFreed { key: "p0:d".into() }, Family::Backend, false, false),
        (Error::Broken("told to".into()), Family::Broken, false, true),
        (Error::BufferInUse, Family::Misuse, true, false),
        (Error::Closed, Family::Misuse, false, true),
        (close_failure(false), Family::Backend, true, false),
        (close_failure(true), Family::Backend, false, false),
    ];
    for (error, family, retry, reprepare) in cases {
        let answers = (error.family(), error.may_retry(), error.must_reprepare());
        assert_eq!(answers, (family, retry, reprepare), "{error:?}");
    }
}

/// A close that timed out names what it waited for, or says that it is the backend.
#[test]
fn a_close_that_timed_out_names_the_dispatches_in_flight() {
    let Some(bench) = emulator_only("guards: close text") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f0()], bench.builder());
    rig.hold_runs();
    let held = [(), ()].map(|()| rig.worker.submit(rig.ids[0], &no_args()).unwrap());
    let text = rig.worker.close_timeout(Duration::ZERO).unwrap_err().to_string();
    assert!(text.contains("still in flight: 1, 2; call close again"), "{text}");
    for (run, dispatch) in (1..).zip(held) {
        rig.complete(run);
        dispatch.wait().unwrap();
    }
    rig.worker.close().unwrap();
    let text = Error::CloseTimeout { in_flight: Arc::new([]) }.to_string();
    assert!(text.contains("the backend has not returned yet; call close again"), "{text}");
    bench.assert_clean();
}

#[test]
fn a_list_of_arguments_holds_what_was_put_in() {
    let mut args = no_args().scalar(1);
    args.push(Arg::Scalar(2));
    assert!(matches!(args.as_slice(), [Arg::Scalar(1), Arg::Scalar(2)]), "{args:?}");
    assert!(args.set_scalar(1, 3));
    assert!(!args.set_scalar(2, 4), "there is no third argument");
    assert!(matches!(args.as_slice(), [Arg::Scalar(1), Arg::Scalar(3)]), "{args:?}");
    args.clear();
    assert!(args.as_slice().is_empty());
}

/// A worker knows its programs and what it has negotiated; a build knows how it is executed.
#[test]
fn workers_and_builds_say_what_they_are() {
    let Some(bench) = emulator_only("guards: accessors") else { return };
    for (options, expected) in [
        (Options::ordinary(), (false, false)),
        (Options::persistent().reset(false), (true, false)),
        (Options::persistent(), (true, true)),
    ] {
        let seen = Arc::new(Mutex::new(None));
        let noted = Arc::clone(&seen);
        let telling = program(ProgramSpec::new("telling").intermediate(24), move |build, _| {
            let mode = (build.is_persistent(), build.is_resetting());
            *noted.lock().unwrap() = Some((mode, build.chips(), build.intermediate(0)?.nbytes()));
            Ok(())
        });
        let rig = bench.prepare(&options, &[f0(), Arc::clone(&telling)], bench.builder().depth(1));
        rig.worker.run(rig.ids[1], &no_args()).unwrap();
        assert_eq!(*seen.lock().unwrap(), Some((expected, 2, 24)));
        assert_eq!((rig.worker.id_of(&telling), rig.worker.id_of(&f0())), (Some(rig.ids[1]), None));
        assert_eq!((rig.ids[1].index(), rig.ids[0].index()), (1, 0));
        assert_eq!(rig.worker.negotiated().map(|n| n.depth.guaranteed()), Some(1));
        rig.worker.close().unwrap();
    }
    bench.assert_clean();
}

/// Zeros of a range-copying backend are made only where something is going to be zeroed.
#[test]
fn without_reset_a_range_copying_backend_is_asked_for_no_zeros() {
    let Some(bench) = emulator_only("guards: no zeros") else { return };
    for (reset, zeros) in [(false, 0), (true, 1)] {
        let ranges = bench.builder().copy_granularity(CopyGranularity::ByteRange);
        let rig = bench.prepare(&Options::persistent().reset(reset), &[f1()], ranges);
        assert_eq!(rig.emulator().stats().host_buffers, zeros, "reset {reset}");
        rig.worker.close().unwrap();
    }
    bench.assert_clean();
}

/// A program that leases `comm_d0` where its argument is 1.
fn leasing_on_demand() -> Arc<dyn Program> {
    program(ProgramSpec::new("leasing").parameter(Parameter::scalar("lease")), |build, args| {
        if args.scalar_at(0)? == 1 {
            build.lease(DOMAIN, &signal_request(64))?;
        }
        Ok(())
    })
}

/// Rule 5: a submission that does not wait is let in beside a dispatch that allocated nothing, whatever has ended
/// before, and refused before it takes a frame beside one that has a domain to be freed.
#[test]
fn try_submit_waits_for_no_cleanup_but_that_of_domains() {
    let Some(bench) = emulator_only("guards: ordered cleanup") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[leasing_on_demand()], bench.builder());
    let run = |lease| rig.worker.submit(rig.ids[0], &no_args().scalar(lease)).unwrap();
    let tried = || rig.worker.try_submit(rig.ids[0], &no_args().scalar(0));
    for lease in [0, 1, 0] {
        run(lease).wait().unwrap();
        rig.until_idle();
    }
    rig.hold_runs();
    let held = run(0);
    let beside = tried().unwrap();
    assert_eq!(beside.id().get(), held.id().get() + 1);
    for dispatch in [held, beside] {
        rig.complete(dispatch.id().get());
        dispatch.wait().unwrap();
    }
    rig.until_idle();
    let held = run(1);
    let refused = tried().map(drop);
    assert!(
        matches!(&refused, Err(Error::WouldBlock { reason }) if reason.contains("earlier dispatches are in flight")),
        "{refused:?}"
    );
    rig.complete(held.id().get());
    held.wait().unwrap();
    rig.until_idle();
    // No number was spent on the refused one.
    assert_eq!(run(0).id().get(), held.id().get() + 1);
    rig.complete(held.id().get() + 1);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 6: every buffer that a builder brings along is kept, and each of them once.
#[test]
fn each_buffer_that_a_builder_brings_is_kept_until_the_end() {
    let Some(bench) = emulator_only("guards: brought along") else { return };
    type Brought = (Vec<DeviceTensor>, Vec<HostBuffer>);
    let brought: Arc<Mutex<Brought>> = Arc::default();
    let inside = Arc::clone(&brought);
    let bringing = program(ProgramSpec::new("bringing"), move |build, _| {
        let (tensors, hosts) = &*inside.lock().unwrap();
        for _ in 0..2 {
            for tensor in tensors {
                let _kept = build.tensor(tensor, &[1], DataType::Int32, Access::Input)?;
            }
            for host in hosts {
                let _kept = build.tensor(host, &[1], DataType::Int32, Access::Input)?;
            }
        }
        Ok(())
    });
    let rig = bench.prepare(&Options::ordinary(), &[bringing], bench.builder());
    *brought.lock().unwrap() = (
        vec![rig.worker.alloc(ChipId(0), 4).unwrap(), rig.worker.alloc(ChipId(1), 4).unwrap()],
        vec![rig.worker.create_buffer(4).unwrap(), rig.worker.create_buffer(4).unwrap()],
    );
    rig.hold_runs();
    let dispatch = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    let (tensors, hosts) = std::mem::take(&mut *brought.lock().unwrap());
    for tensor in tensors {
        assert!(matches!(rig.worker.free(tensor), Err(Error::BufferInUse)), "a tensor was not kept");
    }
    for host in hosts {
        assert!(matches!(host.release(), Err(Error::BufferInUse)), "a host buffer was not kept");
    }
    assert_eq!(rig.emulator().stats().host_buffers, 2);
    rig.complete(1);
    dispatch.wait().unwrap();
    rig.until_idle();
    assert_eq!(rig.emulator().stats().host_buffers, 0);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// What a builder writes into an intermediate is what a task reads from it.
#[test]
fn a_written_intermediate_reaches_the_task() {
    let Some(bench) = emulator_only("guards: written intermediate") else { return };
    let copy = CallableSpec::chip(kernels::COPY, kernels::signature(kernels::COPY));
    let spec = ProgramSpec::new("writing").callable(copy).intermediate(8).parameter(Parameter::host("out", 8));
    let writing = program(spec, |build, args| {
        let intermediate = build.intermediate(0)?;
        build.write_intermediate(intermediate, 4, &[5; 4])?;
        let from = build.tensor(intermediate, &[2], DataType::Int32, Access::Input)?;
        let to = build.tensor(args.host_at(0)?, &[2], DataType::Int32, Access::Output)?;
        Ok(build.task(0)?.tensor(from).tensor(to).submit(ChipId(0))?)
    });
    let rig = bench.prepare(&Options::ordinary(), &[writing], bench.builder());
    let out = rig.worker.create_buffer(8).unwrap();
    rig.worker.call(&no_args().host(&out)).unwrap();
    let mut bytes = [1; 8];
    out.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0, 0, 0, 0, 5, 5, 5, 5]);
    drop(out);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rule 12: an entry that opens the dispatch finds its retained domains zeroed, leases through the build, and may have
/// submitted tasks from then on, so that new domains come too late.
#[test]
fn an_entry_opens_the_dispatch_and_leases_through_the_build() {
    let Some(bench) = emulator_only("guards: entry") else { return };
    let emulator: Arc<OnceLock<Arc<Emulator>>> = Arc::default();
    let leased: Arc<Mutex<Vec<DomainAllocation>>> = Arc::default();
    let (noted, inside) = (Arc::clone(&leased), Arc::clone(&emulator));
    let entry = KernelObject::entry(move |context| {
        let mut reply = DomainAllocation::default();
        context.host().domain(DOMAIN, &signal_request(64), &mut reply)?;
        let earlier = {
            let mut noted = noted.lock().unwrap();
            noted.push(reply.clone());
            noted.len() - 1
        };
        context.host().open(true)?;
        let copies = inside.get().unwrap().journal().copies().len();
        assert_eq!(copies, 2 * earlier, "the second dispatch finds both windows zeroed by now");
        context.host().domain("late", &signal_request(64), &mut reply)?;
        Ok(())
    });
    let entry = CallableSpec {
        name: "entry".into(),
        kind: CallableKind::Entry,
        signature: None,
        source: entry.into_source(),
    };
    let calling = program(ProgramSpec::new("calling").callable(entry), |build, _| {
        let late = build.run_entry(0, &[]);
        assert!(matches!(&late, Err(Error::Build(text)) if text.contains("before the first task")), "{late:?}");
        Ok(())
    });
    let rig = bench.prepare(&Options::persistent(), &[calling], bench.builder());
    emulator.set(rig.shared_emulator()).unwrap();
    rig.worker.call(&no_args()).unwrap();
    rig.worker.call(&no_args()).unwrap();
    let leased = leased.lock().unwrap();
    assert!(leased.len() == 2 && leased[0].id().is_some() && leased[0] == leased[1], "{leased:?}");
    rig.worker.close().unwrap();
    bench.assert_clean();
}
