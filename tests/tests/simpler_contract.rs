//! What the contract of the real runtime forces on the binding: each a test on the stand-in and on real Simpler.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use pto_mock::kernels;
use pto_simpler_sys::python::{PythonObject, RetentionChoice, SimplerBackend, WorkerArgument};
use pto_simpler_sys::{
    Access, Backend, Call, CallConfig, CallableSpec, ChipId, DomainAllocation, DomainState, FailureKind, Family,
    Orchestrator, Retention, RunId, RunOutcome, RunState, Signature, SubmitError, TaskArgs, TensorPlace,
};
use pto_tests::simpler::{self, Runtime};
use pyo3::prelude::*;
use simpler_bench::{Bench, Build, Ends, alone, kill, misuse, options, signal_window, words};

mod simpler_bench;

alone!(a_failed_chip_task_ends_the_workers_useful_life_and_says_why, || {
    let bench = Bench::new(options(1, 0), &[]);
    let mut args = TaskArgs::new();
    args.scalar(7);
    bench.submit(1, |o| o.submit_next_level(bench.callable(kernels::FAIL), &args, None, ChipId(0))).unwrap();
    let (_, outcome) = bench.end();
    let failure = outcome.result.unwrap_err();
    let failure = failure.runtime().unwrap();
    assert_eq!((failure.kind, failure.chip, failure.fatal), (FailureKind::Task, Some(ChipId(0)), true));
    assert_eq!(failure.type_name, "RuntimeError");
    assert!(failure.traceback.as_ref().unwrap().contains("Traceback"));
    let Err(SubmitError::Backend(refused)) = bench.submit(2, |_| Ok(())) else { panic!("accepted") };
    assert!(refused.must_reprepare() && refused.to_string().contains("takes no more work"), "{refused}");
    assert_eq!(bench.backend.run_state(RunId(2)), RunState::Unknown);
    bench.backend.close().unwrap();
});

alone!(a_failed_sub_task_leaves_the_worker_usable, || {
    let bench = Bench::new(options(1, 1), &[]);
    let mut args = TaskArgs::new();
    args.scalar(7);
    bench.submit(1, |o| o.submit_sub(bench.callable(kernels::SUB_FAIL), &args)).unwrap();
    let failure = bench.end().1.result.unwrap_err();
    assert!(!failure.must_reprepare() && failure.runtime().unwrap().message.contains("code 7"), "{failure}");
    bench.run(2, |_| Ok(()));
    bench.backend.close().unwrap();
});

alone!(s57_a_chip_killed_in_mid_run_ends_the_run_with_its_name_and_signal_and_close_ends, || {
    let bench = Bench::new(options(2, 0), &[]);
    let out = bench.backend.create_buffer(4).unwrap();
    let mut reply = DomainAllocation::new();
    // Rank 0 waits for a peer that gets no task.
    bench
        .submit(1, |o| {
            o.allocate_domain("pair", &signal_window(2), &mut reply)?;
            bench.handshake(o, &reply, 0, out, 1)
        })
        .unwrap();
    let pid = bench.backend.chip_processes().into_iter().find(|(chip, _)| *chip == ChipId(1)).unwrap().1;
    kill(pid);
    let (run, outcome) = bench.end();
    assert_eq!(run, RunId(1));
    let error = outcome.result.clone().and(outcome.cleanup.clone().map_or(Ok(()), Err)).unwrap_err();
    let failure = error.runtime().unwrap();
    assert_eq!(failure.kind, FailureKind::ChipDied { exit_code: None, signal: Some(9) }, "{outcome:?}");
    assert_eq!((failure.chip, failure.fatal), (Some(ChipId(1)), true));
    assert!(outcome.result.is_err(), "{outcome:?}");
    let refused = bench.backend.alloc(ChipId(0), 64).unwrap_err();
    println!("control call afterwards: {refused}");
    assert!(matches!(bench.submit(2, |_| Ok(())), Err(SubmitError::Backend(e)) if e.must_reprepare()));
    println!("close: {:?}", bench.backend.close());
    bench.backend.close().unwrap();
    assert_eq!(bench.backend.domain_state(reply.id().unwrap()).unwrap(), DomainState::Freed);
});

alone!(a_chip_killed_while_idle_is_noticed_before_the_next_submission, || {
    let bench = Bench::new(options(2, 0), &[]);
    bench.run(1, |_| Ok(()));
    let (chip, pid) = bench.backend.chip_processes()[0];
    kill(pid);
    // Submissions are accepted until the death has been noticed; an empty one does no harm.
    let refused = (2..100_000).find_map(|run| match bench.submit(run, |_| Ok(())) {
        Ok(()) => None,
        Err(SubmitError::Backend(error)) => Some(error),
        Err(other) => panic!("{other:?}"),
    });
    let refused = refused.unwrap();
    let failure = refused.runtime().unwrap();
    assert_eq!((failure.chip, failure.fatal), (Some(chip), true));
    assert_eq!(failure.kind, FailureKind::ChipDied { exit_code: None, signal: Some(9) });
    bench.backend.close().unwrap();
});

alone!(a_retained_domain_behind_a_dead_chip_does_not_keep_close_for_minutes, || {
    let bench = Bench::new(options(2, 0), &[]);
    if matches!(bench.backend.capabilities().retention, Retention::Unsupported { .. }) {
        println!("skipped: no retention");
        return bench.backend.close().unwrap();
    }
    let mut reply = DomainAllocation::new();
    bench.run(1, |o| o.get_or_allocate_domain("kept", &signal_window(2), true, &mut reply));
    let before = std::time::Instant::now();
    kill(bench.backend.chip_processes()[0].1);
    println!("close: {:?}", bench.backend.close());
    // The runtime alone waits two minutes for the dead member; this is a guard, far from both.
    assert!(before.elapsed() < Duration::from_secs(100));
    bench.backend.close().unwrap();
    assert_eq!(bench.backend.domain_state(reply.id().unwrap()).unwrap(), DomainState::Freed);
});

alone!(abandon_after_a_killed_chip_leaves_nothing, || {
    let bench = Bench::new(options(2, 0), &[]);
    let out = bench.backend.create_buffer(4).unwrap();
    let mut reply = DomainAllocation::new();
    bench
        .submit(1, |o| {
            o.allocate_domain("pair", &signal_window(2), &mut reply)?;
            bench.handshake(o, &reply, 0, out, 1)
        })
        .unwrap();
    let processes = bench.backend.chip_processes();
    kill(processes[1].1);
    let report = bench.backend.abandon();
    assert!(report.left.is_empty(), "{report:?}");
    assert!(bench.end().1.result.is_err());
    for (_, pid) in processes {
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "{pid} is still there");
    }
    bench.backend.close().unwrap();
});

/// A killed process no longer shows what it had mapped, and this domain has no other member that does.
fn window_of_a_killed_chip(end: impl FnOnce(&Bench)) {
    let bench = Bench::new(options(1, 0), &[]);
    let out = bench.backend.create_buffer(4).unwrap();
    let mut reply = DomainAllocation::new();
    bench
        .submit(1, |o| {
            o.allocate_domain("alone", &signal_window(1), &mut reply)?;
            bench.handshake(o, &reply, 0, out, 1)
        })
        .unwrap();
    let (_, pid) = bench.backend.chip_processes()[0];
    kill(pid);
    assert!(bench.end().1.result.is_err());
    end(&bench);
    assert_eq!(bench.backend.domain_state(reply.id().unwrap()).unwrap(), DomainState::Freed);
}

alone!(abandon_removes_the_window_of_a_killed_chip, || {
    window_of_a_killed_chip(|bench| {
        let report = bench.backend.abandon();
        assert!(report.left.is_empty(), "{report:?}");
    });
});

alone!(close_removes_the_window_of_a_killed_chip, || {
    window_of_a_killed_chip(|bench| {
        println!("close: {:?}", bench.backend.close());
        bench.backend.close().unwrap();
    });
});

alone!(an_attached_thread_is_refused_before_anything_waits, || {
    let bench = Bench::new(options(1, 0), &[]);
    Python::attach(|_| {
        let about = "detach first";
        misuse(bench.backend.check_blocking(), Call::Submit, about);
        misuse(bench.backend.close(), Call::Close, about);
        misuse(bench.backend.create_buffer(8), Call::CreateBuffer, about);
        misuse(bench.backend.alloc(ChipId(0), 8), Call::Alloc, about);
        match bench.submit(1, |_| Ok(())) {
            Err(SubmitError::Backend(error)) => misuse(Err::<(), _>(error), Call::Submit, about),
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(bench.backend.run_state(RunId(1)), RunState::Unknown);
    bench.backend.check_blocking().unwrap();
    bench.run(1, |_| Ok(()));
    bench.backend.close().unwrap();
});

alone!(builders_run_detached_and_may_attach_by_themselves, || {
    let bench = Bench::new(options(1, 0), &[]);
    bench.run(1, |o| {
        bench.backend.check_blocking()?;
        let seven: i32 = Python::attach(|py| py.eval(c"3 + 4", None, None).unwrap().extract().unwrap());
        assert_eq!(seven, 7);
        o.alloc(16).map(drop)
    });
    bench.backend.close().unwrap();
});

alone!(a_forked_child_cannot_use_the_backend, || {
    let bench = Bench::new(options(1, 0), &[]);
    let status = Python::attach(|py| {
        let os = py.import("os").unwrap();
        let pid: i32 = os.call_method0("fork").unwrap().extract().unwrap();
        if pid == 0 {
            let refused = py.detach(|| {
                let error = bench.backend.create_buffer(8).unwrap_err();
                error.family() == Family::Misuse
                    && error.to_string().contains("forked child")
                    && bench.backend.close().is_err()
                    && !bench.backend.abandon().left.is_empty()
            });
            os.call_method1("_exit", (if refused { 0 } else { 1 },)).unwrap();
        }
        let (_, status): (i32, i32) = os.call_method1("waitpid", (pid, 0)).unwrap().extract().unwrap();
        status
    });
    assert_eq!(status, 0);
    bench.run(1, |_| Ok(()));
    bench.backend.close().unwrap();
});

alone!(start_and_close_from_different_threads_of_the_user_share_one_owner_thread, || {
    for cycle in 0..3 {
        let bench = std::thread::spawn(|| Bench::new(options(1, 0), &[])).join().unwrap();
        let bench = std::thread::spawn(move || {
            bench.run(1, |o| o.alloc(8).map(drop));
            bench
        });
        let bench = bench.join().unwrap();
        let backend = Arc::clone(&bench.backend);
        std::thread::spawn(move || backend.close().unwrap()).join().unwrap();
        assert!(bench.backend.chip_processes().is_empty(), "cycle {cycle}");
    }
});

alone!(a_backend_dropped_open_is_leaked_and_the_process_ends_well, || {
    let bench = Bench::new(options(1, 0), &[]);
    bench.run(1, |_| Ok(()));
    let processes = bench.backend.chip_processes();
    let Bench { backend, .. } = bench;
    drop(backend);
    Python::attach(|py| py.import("gc").unwrap().call_method0("collect").map(drop)).unwrap();
    for (_, pid) in &processes {
        assert!(std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
    // The chips end with this process; here, so that the check for leftovers finds nothing.
    for (_, pid) in processes {
        kill(pid);
    }
    for name in simpler::shared_memory().into_keys() {
        std::fs::remove_file(std::path::Path::new("/dev/shm").join(name)).unwrap();
    }
});

alone!(a_failed_start_names_its_cause_and_leaves_nothing, || {
    let mut options = options(2, 0);
    match Runtime::selected() {
        Runtime::Simpler => {
            options.worker_arguments.insert("enable_sdma".to_owned(), WorkerArgument::Bool(true));
        }
        Runtime::StandIn => {
            options.prelude = Some("pto_preludes:hang_second_chip".to_owned());
            options.startup_timeout = Some(Duration::from_secs(2));
        }
    }
    let backend = SimplerBackend::new(options).unwrap();
    let (sender, _ends) = mpsc::channel();
    let error = backend.start(Arc::new(Ends(Mutex::new(sender)))).unwrap_err();
    println!("{error}");
    assert_eq!((error.family(), error.call()), (Family::Backend, Call::Start));
    assert!(error.runtime().unwrap().chip.is_some() || error.to_string().contains("chip"), "{error}");
    misuse(backend.create_buffer(8), Call::CreateBuffer, "Failed");
    backend.close().unwrap();
    assert!(backend.chip_processes().is_empty());
});

alone!(s69_missing_private_hooks_are_named_before_the_start, || {
    let mut options = options(1, 0);
    options.retention = RetentionChoice::Legacy;
    options.prelude = Some("pto_preludes:without_hooks".to_owned());
    let error = SimplerBackend::new(options).unwrap_err();
    assert!(error.to_string().contains("Worker._live_domains"), "{error}");
});

alone!(s69_missing_public_retention_is_reported_in_the_capabilities, || {
    let mut options = options(1, 0);
    options.retention = RetentionChoice::Public;
    options.prelude = Some("pto_preludes:without_public_retention".to_owned());
    let backend = SimplerBackend::new(options).unwrap();
    assert!(!backend.runtime().public_retention);
    match &backend.capabilities().retention {
        Retention::Unsupported { missing } => assert_eq!(&**missing, "Orchestrator.get_or_allocate_domain"),
        other => panic!("{other:?}"),
    }
    backend.close().unwrap();
});

alone!(a_runtime_that_lacks_a_piece_is_refused_with_its_name, || {
    let mut options = options(1, 0);
    options.prelude = Some("pto_preludes:without_submit".to_owned());
    let error = SimplerBackend::new(options).unwrap_err();
    assert!(error.to_string().contains("lacks a piece") && error.to_string().contains("submit"), "{error}");
});

alone!(a_python_without_the_runtime_says_how_it_was_searched_for, || {
    let mut options = options(1, 0);
    options.environment = None;
    options.python_path.clear();
    options.prelude = None;
    options.sys_executable = option_env!("PTO_BASE_PYTHON").map(Into::into);
    let error = SimplerBackend::new(options).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("ModuleNotFoundError") && text.contains("simpler") && text.contains("sys.path ["),
        "{text}"
    );
});

alone!(a_failing_prelude_keeps_its_traceback, || {
    let mut options = options(1, 0);
    options.prelude = Some("pto_preludes:fails".to_owned());
    let error = SimplerBackend::new(options).unwrap_err();
    let failure = error.runtime().unwrap();
    assert_eq!((&*failure.type_name, &*failure.message), ("RuntimeError", "the prelude failed on purpose"));
    assert!(failure.traceback.as_ref().unwrap().contains("pto_preludes"));
});

alone!(no_devices_are_refused, || {
    misuse(SimplerBackend::new(options(0, 0)), Call::Start, "at least one device");
});

alone!(python_objects_and_import_paths_are_callables, || {
    let mut options = options(1, 1);
    options.callables.clear();
    let backend = SimplerBackend::new(options).unwrap();
    let object =
        Python::attach(|py| PythonObject(py.import("pto_subs").unwrap().getattr("pto_sub_add").unwrap().unbind()));
    let spec = CallableSpec::sub("mine", Signature::new([Access::InOut], 1)).with_source(object.into_source());
    let id = backend.register(&spec).unwrap().id;
    misuse(
        backend.register(&CallableSpec::sub("nobody", Signature::default())).map(drop),
        Call::Register,
        "not named in the options",
    );
    let (sender, ends) = mpsc::channel();
    backend.start(Arc::new(Ends(Mutex::new(sender)))).unwrap();
    let buffer = backend.create_buffer(4).unwrap();
    backend.write_buffer(buffer, 0, &1i32.to_le_bytes()).unwrap();
    let mut args = TaskArgs::new();
    args.tensor(words(TensorPlace::Host(buffer), 1, Access::InOut)).scalar(u64::MAX);
    let mut build = Build(Some(|o: &dyn Orchestrator| o.submit_sub(id, &args)));
    backend.submit(RunId(1), &CallConfig::new(), &mut build).unwrap();
    assert_eq!(ends.recv_timeout(Duration::from_secs(200)).unwrap().1, RunOutcome::success());
    let mut bytes = [0; 4];
    backend.read_buffer(buffer, 0, &mut bytes).unwrap();
    assert_eq!(i32::from_le_bytes(bytes), 0);
    backend.close().unwrap();
});

alone!(a_released_buffer_serves_the_next_one_of_its_size_while_runs_are_in_flight, || {
    let bench = Bench::new(options(1, 1), &[]);
    let gate = bench.backend.create_buffer(8).unwrap();
    bench.backend.fill_buffer(gate, 0).unwrap();
    let mut args = TaskArgs::new();
    args.tensor(words(TensorPlace::Host(gate), 2, Access::InOut));
    bench.submit(1, |o| o.submit_sub(bench.callable(kernels::GATE), &args)).unwrap();
    // The sub-worker is busy for as long as the gate is shut; none of this waits for it.
    for _ in 0..100 {
        let buffer = bench.backend.create_buffer(4096).unwrap();
        bench.backend.fill_buffer(buffer, 0xA5).unwrap();
        bench.backend.release_buffer(buffer).unwrap();
        misuse(bench.backend.release_buffer(buffer), Call::ReleaseBuffer, "not known");
    }
    misuse(bench.backend.release_buffer(gate), Call::ReleaseBuffer, "in flight");
    bench.backend.write_buffer(gate, 0, &1i32.to_le_bytes()).unwrap();
    assert_eq!(bench.end(), (RunId(1), RunOutcome::success()));
    bench.backend.close().unwrap();
});
