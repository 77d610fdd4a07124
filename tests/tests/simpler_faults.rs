//! Faults and odd moments, on the stand-in and on real Simpler: everything ends in bounded time, in an error that says
//! what happened, and nothing is left.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::collections::BTreeSet;
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use pto_mock::kernels;
use pto_simpler_sys::python::{SimplerBackend, SimplerOptions};
use pto_simpler_sys::{
    Access, Backend, BackendError, BackendPhase, Call, CallConfig, CallableSource, CallableSpec, ChipArtefact,
    ChipId, DomainAllocation, DomainRequest, DomainState, FailureKind, Family, NamedBuffer, Orchestrator,
    Retention, RunId, RunOutcome, RunState, Signature, SubmitError, TaskArgs, TensorPlace,
};
use pto_tests::simpler::{self, Runtime};
use simpler_bench::{Bench, Build, Ends, alone, misuse, options, signal_window, words};

mod simpler_bench;

/// A guard against hangs, far from both what is right and what the runtime does by itself (two minutes).
const LIMIT: Duration = Duration::from_secs(60);

/// Processes that this one has started by forking.
fn children() -> BTreeSet<u32> {
    let here = std::process::id();
    let command = |pid: u32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mine = command(here);
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
            parent == Some(here) && command(*pid) == mine
        })
        .collect()
}

fn send(pid: u32, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
}

fn sub_workers(bench: &Bench) -> BTreeSet<u32> {
    let chips: BTreeSet<u32> = bench.backend.chip_processes().into_iter().map(|(_, pid)| pid).collect();
    children().difference(&chips).copied().collect()
}

/// What this host has in shared memory by way of windows.
fn windows() -> usize {
    simpler::shared_memory().into_keys().filter(|name| name.starts_with("simpler_")).count()
}

/// A run that waits in a sub-worker until `gate` is opened.
fn gate_task(bench: &Bench, o: &dyn Orchestrator, gate: pto_simpler_sys::HostBufferId) -> Result<(), BackendError> {
    let mut args = TaskArgs::new();
    args.tensor(words(TensorPlace::Host(gate), 2, Access::InOut));
    o.submit_sub(bench.callable(kernels::GATE), &args)
}

alone!(a_sub_worker_killed_while_idle_does_not_keep_close_from_its_end, || {
    let bench = Bench::new(options(1, 1), &[]);
    bench.run(1, |_| Ok(()));
    let subs = sub_workers(&bench);
    assert_eq!(subs.len(), 1);
    subs.into_iter().for_each(|pid| send(pid, Signal::SIGKILL));
    bench.backend.close().unwrap();
    assert_eq!(bench.backend.phase(), BackendPhase::Closed);
    assert_eq!(children(), BTreeSet::new());
});

alone!(a_sub_worker_killed_in_its_task_fails_that_run_and_leaves_the_chips, || {
    let bench = Bench::new(options(1, 1), &[]);
    let gate = bench.backend.create_buffer(8).unwrap();
    bench.backend.fill_buffer(gate, 0).unwrap();
    bench.submit(1, |o| gate_task(&bench, o, gate)).unwrap();
    let mut entered = [0; 4];
    while entered == [0; 4] {
        bench.backend.read_buffer(gate, 4, &mut entered).unwrap();
        std::thread::yield_now();
    }
    sub_workers(&bench).into_iter().for_each(|pid| send(pid, Signal::SIGKILL));
    let failure = bench.end().1.result.unwrap_err();
    assert!(!failure.must_reprepare() && failure.to_string().contains("signal=9"), "{failure}");
    let resident = bench.backend.alloc(ChipId(0), 64).unwrap();
    bench.backend.free(resident).unwrap();
    bench.run(2, |_| Ok(()));
    bench.backend.close().unwrap();
    assert_eq!((bench.backend.phase(), children()), (BackendPhase::Closed, BTreeSet::new()));
});

alone!(every_process_killed_at_once_ends_the_run_and_another_backend_can_start, || {
    let bench = Bench::new(options(2, 1), &[]);
    let out = bench.backend.create_buffer(4).unwrap();
    let mut reply = DomainAllocation::new();
    bench
        .submit(1, |o| {
            o.allocate_domain("pair", &signal_window(2), &mut reply)?;
            bench.handshake(o, &reply, 0, out, 1)
        })
        .unwrap();
    children().into_iter().for_each(|pid| send(pid, Signal::SIGKILL));
    let outcome = bench.end().1;
    let failure = outcome.result.unwrap_err();
    assert!(failure.must_reprepare() && failure.runtime().unwrap().chip.is_some(), "{failure:?}");
    println!("close: {:?}", bench.backend.close());
    bench.backend.close().unwrap();
    assert_eq!(children(), BTreeSet::new());
    let next = Bench::new(options(2, 1), &[]);
    next.run(1, |o| o.allocate_domain("pair", &signal_window(2), &mut reply));
    next.backend.close().unwrap();
});

alone!(releasing_a_domain_of_a_dead_chip_is_an_error_with_its_name_in_bounded_time, || {
    let bench = Bench::new(options(2, 0), &[]);
    if matches!(bench.backend.capabilities().retention, Retention::Unsupported { .. }) {
        println!("skipped: no retention");
        return bench.backend.close().unwrap();
    }
    let mut reply = DomainAllocation::new();
    bench.run(1, |o| o.get_or_allocate_domain("kept", &signal_window(2), true, &mut reply));
    let domain = reply.id().unwrap();
    let before = Instant::now();
    send(bench.backend.chip_processes()[1].1, Signal::SIGKILL);
    for _ in 0..2 {
        let error = bench.backend.release_domain(domain).unwrap_err();
        let failure = error.runtime().unwrap();
        assert_eq!((failure.chip, failure.fatal), (Some(ChipId(1)), true), "{error}");
        assert!(matches!(failure.kind, FailureKind::ChipDied { .. }), "{error}");
    }
    println!("close: {:?}", bench.backend.close());
    assert!(before.elapsed() < LIMIT);
    bench.backend.close().unwrap();
    assert_eq!(bench.backend.domain_state(domain).unwrap(), DomainState::Freed);
});

alone!(a_chip_killed_during_an_allocation_leaves_no_window_behind_close, || {
    let bench = Bench::new(options(2, 0), &[]);
    let victim = bench.backend.chip_processes()[1].1;
    // The other member makes the window, and waits for this one.
    send(victim, Signal::SIGSTOP);
    let killer = std::thread::spawn(move || {
        let before = Instant::now();
        while windows() == 0 && before.elapsed() < LIMIT {
            std::thread::yield_now();
        }
        send(victim, Signal::SIGKILL);
    });
    let mut reply = DomainAllocation::new();
    let mut failure = None;
    let built = bench.submit(1, |o| {
        let result = o.allocate_domain("pair", &signal_window(2), &mut reply);
        failure = result.clone().err();
        result
    });
    killer.join().unwrap();
    assert!(matches!(built, Err(SubmitError::Build(_))), "{built:?}");
    let failure = failure.unwrap();
    assert_eq!(failure.runtime().unwrap().chip, Some(ChipId(1)), "{failure}");
    println!("close: {:?}", bench.backend.close());
    bench.backend.close().unwrap();
});

alone!(a_start_that_does_not_come_to_its_end_can_be_abandoned, || {
    let mut options = options(2, 0);
    let runtime = Runtime::selected();
    if runtime == Runtime::StandIn {
        options.prelude = Some("pto_preludes:hang_second_chip".to_owned());
    }
    let backend = SimplerBackend::new(options).unwrap();
    let (sender, _ends) = mpsc::channel();
    let before = Instant::now();
    std::thread::scope(|scope| {
        let start = scope.spawn(|| backend.start(Arc::new(Ends(Mutex::new(sender)))));
        while children().len() < 2 && before.elapsed() < LIMIT {
            std::thread::yield_now();
        }
        if runtime == Runtime::Simpler {
            children().into_iter().for_each(|pid| send(pid, Signal::SIGSTOP));
        }
        if backend.phase() == BackendPhase::Starting {
            misuse(backend.close(), Call::Close, "Starting");
        }
        let report = backend.abandon();
        assert!(report.left.is_empty(), "{report:?}");
        let error = start.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("abandoned"), "{error}");
    });
    assert!(before.elapsed() < LIMIT);
    assert_eq!((backend.phase(), children()), (BackendPhase::Closed, BTreeSet::new()));
    backend.close().unwrap();
});

alone!(a_run_whose_build_saw_the_end_of_the_backend_is_not_accepted, || {
    let bench = Bench::new(options(1, 0), &[]);
    let backend = Arc::clone(&bench.backend);
    let built = bench.submit(1, |_| {
        let report = std::thread::spawn(move || backend.abandon()).join().unwrap();
        assert!(report.left.is_empty(), "{report:?}");
        Ok(())
    });
    let Err(SubmitError::Backend(error)) = built else { panic!("{built:?}") };
    assert!(error.must_reprepare() && error.to_string().contains("abandoned"), "{error}");
    assert_eq!(bench.backend.run_state(RunId(1)), RunState::Unknown);
    bench.backend.close().unwrap();
});

alone!(a_forked_child_can_drop_the_backend_and_its_parent_goes_on_watching_the_chips, || {
    let backend = SimplerBackend::new(options(1, 0)).unwrap();
    let (sender, _ends) = mpsc::channel();
    backend.start(Arc::new(Ends(Mutex::new(sender)))).unwrap();
    // SAFETY: the child only runs the destructor under test and leaves.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(backend);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(7) };
    }
    let before = Instant::now();
    let status = loop {
        match waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG)).unwrap() {
            WaitStatus::StillAlive if before.elapsed() < LIMIT => std::thread::yield_now(),
            status => break status,
        }
    };
    if status == WaitStatus::StillAlive {
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    }
    assert_eq!(status, WaitStatus::Exited(Pid::from_raw(pid), 7));
    send(backend.chip_processes()[0].1, Signal::SIGKILL);
    let refused = (1..1_000_000).find_map(|run| {
        let mut build = Build(Some(|_: &dyn Orchestrator| Ok(())));
        backend.submit(RunId(run), &CallConfig::new(), &mut build).err()
    });
    assert!(matches!(refused, Some(SubmitError::Backend(e)) if e.must_reprepare()));
    backend.close().unwrap();
});

alone!(a_chip_without_memory_for_a_request_stays_usable, || {
    let bench = Bench::new(options(1, 0), &[]);
    for nbytes in [1 << 46, u64::MAX] {
        let error = bench.backend.alloc(ChipId(0), nbytes).unwrap_err();
        let failure = error.runtime().unwrap();
        assert_eq!(failure.kind, FailureKind::OutOfDeviceMemory { requested_bytes: nbytes }, "{error}");
        assert_eq!((failure.chip, failure.fatal), (Some(ChipId(0)), false), "{error}");
    }
    bench.run(1, |_| Ok(()));
    let resident = bench.backend.alloc(ChipId(0), 64).unwrap();
    bench.backend.free(resident).unwrap();
    bench.backend.close().unwrap();
});

alone!(windows_for_which_there_is_no_room_are_refused_before_a_chip_touches_them, || {
    let bench = Bench::new(options(2, 0), &[]);
    let before = simpler::shared_memory();
    let released = bench.backend.create_buffer(12_345).unwrap();
    bench.backend.release_buffer(released).unwrap();
    // Kept for the next of its size.
    let mut kept = simpler::shared_memory();
    kept.retain(|name, nbytes| !before.contains_key(name) && *nbytes == 12_345);
    assert_eq!(kept.len(), 1, "{kept:?}");
    let mut reply = DomainAllocation::new();
    for (run, nbytes) in (1..).zip([1u64 << 42, 1 << 63, u64::MAX]) {
        let request = DomainRequest::packed(0..2, vec![NamedBuffer::bytes("huge", nbytes)]);
        let mut error = None;
        let built = bench.submit(run, |o| {
            let result = o.allocate_domain("huge", &request, &mut reply);
            error = result.clone().err();
            result
        });
        assert!(matches!(built, Err(SubmitError::Build(_))), "{built:?}");
        let error = error.unwrap();
        let kind = error.runtime().unwrap().kind;
        assert!(matches!(kind, FailureKind::OutOfSharedMemory { requested_bytes } if requested_bytes > nbytes / 2));
        assert!(!error.must_reprepare(), "{error}");
        let still = simpler::shared_memory();
        assert!(!kept.keys().any(|name| still.contains_key(name)), "what released buffers hold makes room");
    }
    // Refused by us, and not by a reservation that failed half way.
    let error = bench.backend.create_buffer(1 << 42).unwrap_err();
    assert!(error.to_string().contains("room for") && !error.must_reprepare(), "{error}");
    bench.run(9, |o| o.allocate_domain("small", &signal_window(2), &mut reply));
    bench.backend.close().unwrap();
});

alone!(released_buffers_do_not_pile_up_behind_runs_that_follow_one_another, || {
    let bench = Bench::new(options(1, 0), &[]);
    let backend = &bench.backend;
    let (stop, runs) = (AtomicBool::new(false), AtomicU64::new(0));
    let most = std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (stop, runs) = (&stop, &runs);
            scope.spawn(move || {
                for n in 0.. {
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    let mut build = Build(Some(|_: &dyn Orchestrator| Ok(())));
                    backend.submit(RunId(2 * n + thread), &CallConfig::new(), &mut build).unwrap();
                    runs.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let mut most = 0;
        for n in 0..300 {
            // The store takes none of these.
            let buffer = backend.create_zeros(4096 + n).unwrap();
            backend.release_buffer(buffer).unwrap();
            if n % 10 == 0 {
                most =
                    most.max(simpler::shared_memory().into_keys().filter(|name| name.starts_with("psm_")).count());
            }
        }
        stop.store(true, Ordering::SeqCst);
        most
    });
    assert!(most < 100, "{most} buffers were waiting for their release");
    println!("{} runs, at most {most} buffers", runs.load(Ordering::SeqCst));
    backend.close().unwrap();
});

alone!(abandon_removes_released_buffers_too, || {
    let before = simpler::shared_memory();
    let bench = Bench::new(options(1, 1), &[]);
    let gate = bench.backend.create_buffer(8).unwrap();
    bench.backend.fill_buffer(gate, 0).unwrap();
    bench.submit(1, |o| gate_task(&bench, o, gate)).unwrap();
    for n in 0..30 {
        let buffer = bench.backend.create_zeros(4096 + n).unwrap();
        bench.backend.release_buffer(buffer).unwrap();
    }
    let report = bench.backend.abandon();
    assert!(report.left.is_empty(), "{report:?}");
    // Every name is gone now, not only once this process ends.
    let left: Vec<String> =
        simpler::shared_memory().into_keys().filter(|name| !before.contains_key(name)).collect();
    assert!(left.is_empty(), "{left:?}");
    assert_ne!(bench.end().1, RunOutcome::success());
});

fn refused(change: impl FnOnce(&mut SimplerOptions)) -> BackendError {
    let mut options = options(1, 0);
    change(&mut options);
    SimplerBackend::new(options).unwrap_err()
}

alone!(options_that_name_nothing_are_refused_with_what_they_name, || {
    let error = refused(|o| o.sys_executable = Some("/nonexistent/python3".into()));
    assert_eq!((error.family(), error.call()), (Family::Misuse, Call::Start));
    assert!(error.to_string().contains("/nonexistent/python3"), "{error}");
    for (prelude, said) in [("nobody:f", "nobody"), ("os:nobody", "nobody"), ("", "Empty module name")] {
        let error = refused(|o| o.prelude = Some(prelude.to_owned()));
        let text = error.to_string();
        assert!(text.contains(&format!("the prelude {prelude:?}")) && text.contains(said), "{text}");
    }
    let error = refused(|o| o.prelude = Some("sys:exit".to_owned()));
    assert_eq!(error.runtime().unwrap().type_name, "SystemExit");
});

alone!(what_an_exception_says_of_itself_is_kept_whatever_it_is, || {
    let failure = |prelude: &str| {
        let error = refused(|o| o.prelude = Some(prelude.to_owned()));
        let failure = error.runtime().unwrap().clone();
        let traceback = failure.traceback.clone().unwrap_or_else(|| panic!("no traceback of {failure:?}"));
        assert!(traceback.contains("pto_preludes.py"), "{traceback}");
        (failure, traceback)
    };
    let (odd, traceback) = failure("pto_preludes:fails_with_odd_text");
    assert!(odd.message.starts_with("no such file: ") && odd.message.ends_with(".py"), "{odd}");
    assert!(traceback.contains("no such file: "), "{traceback}");
    let (mute, _) = failure("pto_preludes:fails_without_text");
    assert_eq!((&*mute.type_name, &*mute.message), ("Mute", "(no text)"));
});

/// A module whose `wait()` waits until this test lets it go on.
struct Gate(tempfile::TempDir);

/// Somebody waits at a gate, until this is dropped.
struct Waiting(std::fs::File);

impl Gate {
    fn new(module: &str, before: &str, after: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("gate");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        // Not to its end: child processes may have its other end, too.
        let wait = format!("def wait():\n    with open({fifo:?}) as gate:\n        gate.readline()\n");
        std::fs::write(directory.path().join(format!("{module}.py")), format!("{before}\n\n{wait}\n\n{after}\n"))
            .unwrap();
        Self(directory)
    }

    /// Comes back once somebody waits.
    fn reached(&self) -> Waiting {
        Waiting(std::fs::OpenOptions::new().write(true).open(self.0.path().join("gate")).unwrap())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.write_all(b"\n").unwrap();
    }
}

alone!(a_callable_that_is_loaded_while_the_worker_starts_is_refused, || {
    let gate = Gate::new("pto_slow", "", "wait()\n\ndef task(args):\n    pass");
    let mut options = options(1, 1);
    options.python_path.push(gate.0.path().into());
    let backend = SimplerBackend::new(options).unwrap();
    let spec = CallableSpec {
        name: "slow".into(),
        kind: pto_simpler_sys::CallableKind::Sub,
        signature: None,
        source: CallableSource::Import { module: "pto_slow".into(), attribute: "task".into() },
    };
    let (sender, _ends) = mpsc::channel();
    std::thread::scope(|scope| {
        let registering = scope.spawn(|| backend.register(&spec));
        let loading = gate.reached();
        backend.start(Arc::new(Ends(Mutex::new(sender)))).unwrap();
        drop(loading);
        // The worker has started without it.
        misuse(registering.join().unwrap(), Call::Register, "Ready");
    });
    backend.close().unwrap();
});

alone!(a_buffer_released_while_the_worker_closes_is_no_failure_of_the_close, || {
    if Runtime::selected() == Runtime::Simpler {
        return println!("skipped: only the stand-in can be held in the middle of its close");
    }
    let before = "from simpler import standin\nfrom simpler.worker import State, Worker\n\n\
                  tear_down, release = Worker._tear_down, Worker.release_buffer\n";
    let after = "def held(self):\n    wait()\n    return tear_down(self)\n\n\
                 def strict(self, buffer):\n    assert self._state is State.READY, 'it is being closed'\n    \
                 return release(self, buffer)\n\n\
                 def install():\n    standin.public()\n    Worker._tear_down = held\n    \
                 Worker.release_buffer = strict\n";
    let gate = Gate::new("pto_held", before, after);
    let mut options = options(1, 0);
    options.python_path.push(gate.0.path().into());
    options.prelude = Some("pto_held:install".to_owned());
    let bench = Bench::new(options, &[]);
    // No store takes these.
    let zeros = bench.backend.create_zeros(4096).unwrap();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| bench.backend.close());
        let held = gate.reached();
        bench.backend.release_buffer(zeros).unwrap();
        drop(held);
        closing.join().unwrap().unwrap();
    });
    assert_eq!(bench.backend.phase(), BackendPhase::Closed);
});

alone!(a_virtual_environment_that_is_none_is_named_where_the_runtime_is_missing, || {
    let error = refused(|o| {
        o.python_path.clear();
        o.prelude = None;
        o.sys_executable = option_env!("PTO_BASE_PYTHON").map(Into::into);
        o.environment = Some("/nonexistent/venv".into());
    });
    assert!(error.to_string().contains("\"/nonexistent/venv\" has no site directory"), "{error}");
});

alone!(files_that_are_no_code_are_named, || {
    let backend = SimplerBackend::new(options(1, 0)).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let empty = directory.path().join("empty");
    std::fs::write(&empty, b"").unwrap();
    for (path, about) in
        [(empty, "empty"), (directory.path().into(), "directory"), ("/nonexistent".into(), "No such")]
    {
        let artefact = ChipArtefact {
            orchestration: path.clone(),
            function: "f".into(),
            config_function: None,
            kernels: Vec::new(),
        };
        let spec = CallableSpec::chip("f", Signature::default()).with_source(CallableSource::Artefact(artefact));
        let error = backend.register(&spec).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(about) && text.contains(path.to_str().unwrap()), "{text}");
    }
    backend.close().unwrap();
});
