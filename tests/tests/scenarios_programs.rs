//! Several programs, and compatibility: S62, S63, S64 and S66. Rules 1, 4, 5 and 8.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pto_dispatch::{Args, Error, Options, Parameter, PreparedWorker, Program, ProgramSpec, Target};
use pto_simpler_sys::{Access, Backend, ChipId, DataType, Family};
use pto_tests::rig::{allocations, any_backend, emulator_only, submits};
use pto_tests::scenario::{DOMAIN, add, f1, f3, program, signal_request};
use pto_tests::spy::Spy;

fn no_args() -> Args {
    Args::new()
}

fn target(platform: &str, runtime: &str, device_ids: &[u32]) -> Target {
    Target { platform: platform.into(), runtime: runtime.into(), device_ids: device_ids.to_vec() }
}

fn compiled_for(name: &str, target: Target) -> Arc<dyn Program> {
    program(ProgramSpec::new(name).target(target), |_, _| Ok(()))
}

#[test]
fn s62_compatibility_before_anything_starts() {
    let bench = any_backend("s62");
    let ours = target("emulator", "emulated", &[0, 1]);
    for (other, shown) in [
        (target("a5sim", "emulated", &[0, 1]), ["`emulator`", "`a5sim`"]),
        (target("emulator", "host_build_graph", &[0, 1]), ["`emulated`", "`host_build_graph`"]),
        (target("emulator", "emulated", &[1, 0]), ["[0, 1]", "[1, 0]"]),
        (target("emulator", "emulated", &[0]), ["[0, 1]", "[0]"]),
    ] {
        let programs = [compiled_for("a", ours.clone()), compiled_for("b", other)];
        let refused = PreparedWorker::prepare_with(&programs, &Options::ordinary(), |_| {
            panic!("a backend was made for programs that do not agree")
        });
        let error = refused.err().unwrap();
        assert!(matches!(error, Error::TargetMismatch { .. }) && error.family() == Family::Misuse, "{error}");
        let text = error.to_string();
        assert!(shown.iter().all(|value| text.contains(value)), "both values are shown: {text}");
    }
    let refused =
        PreparedWorker::prepare_with(&[], &Options::ordinary(), |_| panic!("a backend was made for no program"));
    assert!(matches!(refused.err(), Some(Error::NoPrograms)));
    bench.assert_clean();
}

#[test]
fn s62_a_program_for_another_platform_than_the_backend() {
    let Some(bench) = emulator_only("s62b") else { return };
    let emulator = bench.builder().build().unwrap();
    let spy = Spy::new(emulator as Arc<dyn Backend>);
    let programs = [compiled_for("a", target("a2a3sim", "emulated", &[0, 1]))];
    let refused = PreparedWorker::prepare(&programs, &Options::ordinary(), Arc::clone(&spy) as Arc<dyn Backend>);
    let text = refused.err().unwrap().to_string();
    assert!(text.contains("a2a3sim") && text.contains("emulator"), "{text}");
    assert_eq!(spy.seen(), [pto_tests::spy::Seen::Close], "neither registered nor started; closed once");
    bench.assert_clean();
}

#[test]
fn s63_which_program() {
    let bench = any_backend("s63");
    let two = bench.prepare_any(&Options::persistent(), &f3(), 2);
    let one = bench.prepare_any(&Options::persistent(), &[f1()], 2);
    let ambiguous = two.worker.call(&no_args());
    assert!(matches!(ambiguous, Err(Error::Ambiguous { programs: 2 })), "{ambiguous:?}");
    one.worker.call(&no_args()).unwrap();
    let unprepared = two.worker.run(one.ids[0], &no_args());
    assert!(matches!(unprepared, Err(Error::UnknownProgram)), "{unprepared:?}");
    assert!(two.worker.id_of(&f1()).is_none());
    if let Some(journal) = two.try_journal() {
        assert_eq!((submits(&journal), two.emulator().stats().runs), (0, 0), "a frame was used");
    }
    two.worker.run(two.ids[1], &no_args()).unwrap();
    one.worker.close().unwrap();
    two.worker.close().unwrap();
    bench.assert_clean();
}

/// Leases its own `comm_d0`, then works on the shared cache: a control write (where `first` is a buffer that holds
/// 7), or an addition of 1.
fn on_cache(name: &str, window: u64, inside: &Arc<AtomicUsize>) -> Arc<dyn Program> {
    let prefill = name == "prefill";
    let inside = Arc::clone(inside);
    let spec = ProgramSpec::new(name)
        .callable(add())
        .parameter(Parameter::device("cache", 4))
        .parameter(Parameter::host("first", 4));
    program(spec, move |build, args| {
        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two graphs are built at one time");
        build.lease(DOMAIN, &signal_request(window))?;
        let cache = args.device_at(0)?;
        if prefill {
            build.copy_to(cache, args.host_at(1)?)?;
        } else {
            let tensor = build.tensor(cache, &[1], DataType::Int32, Access::InOut)?;
            build.task(0)?.tensor(tensor).scalar(1).submit(ChipId(0))?;
        }
        inside.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    })
}

#[test]
fn s64_prefill_decode_decode() {
    let bench = any_backend("s64");
    let inside = Arc::new(AtomicUsize::new(0));
    let programs = [on_cache("prefill", 64, &inside), on_cache("decode", 128, &inside)];
    let rig = bench.prepare_any(&Options::persistent(), &programs, 2);
    let (cache, host) = (rig.worker.alloc(ChipId(0), 4).unwrap(), rig.worker.create_buffer(4).unwrap());
    let args = Args::new().device(&cache).host(&host);
    let value = || {
        let mut bytes = [0; 4];
        cache.copy_from(&host).unwrap();
        host.read(0, &mut bytes).unwrap();
        i32::from_ne_bytes(bytes)
    };
    host.write(0, &7_i32.to_ne_bytes()).unwrap();
    rig.worker.run(rig.ids[0], &args).unwrap();
    assert_eq!(value(), 7);
    for expected in [8, 9] {
        rig.worker.run(rig.ids[1], &args).unwrap();
        assert_eq!(value(), expected);
    }
    if let Some(journal) = rig.try_journal() {
        let names: Vec<_> = allocations(&journal).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["p0:comm_d0", "p1:comm_d0"], "each program has a domain of its own");
    }
    // Building is serial from three threads too; each addition happens exactly once.
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..8).for_each(|_| rig.worker.run(rig.ids[1], &args).unwrap()));
        }
    });
    assert_eq!(value(), 9 + 24);
    drop((args, cache, host));
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s66_same_program_twice_in_the_list() {
    let bench = any_backend("s66");
    let a = f1();
    let [prefill, decode] = f3();
    let list = [prefill, Arc::clone(&a), decode, Arc::clone(&a)];
    let refused = PreparedWorker::prepare_with(&list, &Options::ordinary(), |_| panic!("a backend was made"));
    let error = refused.err().unwrap();
    assert!(matches!(&error, Error::DuplicateProgram { first: 1, second: 3, .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains('1') && text.contains('3') && text.contains("`f1`"), "{text}");
    bench.assert_clean();
}
