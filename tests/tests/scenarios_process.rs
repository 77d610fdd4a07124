//! Process and operating system: S71 and S72; invariant I14.
//!
//! What a whole process leaves behind is looked at in child processes that run one test of this binary: nothing
//! else of the test harness is in them, so counts of threads and descriptors cannot flake. The tests of children are
//! ignored in an ordinary run; without the variable that names their directory they do nothing.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use nix::sys::signal::{self, SigAction, SigHandler, SigSet, Signal};
use nix::unistd::Pid;
use pto_dispatch::{Args, Error, Options, PreparedWorker, Program, ProgramSpec};
use pto_mock::{Completion, Emulator, EmulatorBuilder, Fault, FaultEffect, FaultKind, Memory, kernels};
use pto_simpler_sys::{Backend, BackendError, Call, ChipId, FailureKind, RunId, RuntimeFailure};
use pto_tests::gate::HangGuard;
use pto_tests::rig::{Rig, emulator_only};
use pto_tests::scenario::{f1, f2, f2_request, program, signal_program};

/// Names the shared-memory directory of a child.
const DIRECTORY: &str = "PTO_TEST_CHILD_DIRECTORY";

fn no_args() -> Args {
    Args::new()
}

// ---- children ----

/// The directory that the parent gave, if this process is a child.
fn child_directory() -> Option<PathBuf> {
    std::env::var_os(DIRECTORY).map(PathBuf::from)
}

/// Starts this binary for one of its tests.
fn start_child(test: &str, directory: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    child.env(DIRECTORY, directory).stdout(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap()
}

/// Waits until the child prints a line that ends with `word`; the rest of its output can be read from what is
/// returned.
fn await_word(child: &mut Child, word: &str) {
    let stdout = child.stdout.as_mut().unwrap();
    let mut line = Vec::new();
    // Byte by byte, so that nothing behind the line is swallowed by a buffer.
    let mut byte = [0];
    while stdout.read(&mut byte).unwrap() == 1 {
        line.push(byte[0]);
        if byte[0] == b'\n' {
            if String::from_utf8_lossy(&line).trim_end().ends_with(word) {
                return;
            }
            line.clear();
        }
    }
    panic!("the child ended without saying {word:?}");
}

/// Runs one child to its end, and requires that its test really ran.
fn run_child(test: &str, directory: &Path) {
    let mut child = start_child(test, directory);
    let lines: Vec<String> = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap).collect();
    let status = child.wait().unwrap();
    assert!(status.success(), "{test}: {status}\n{}", lines.join("\n"));
    assert!(lines.iter().any(|line| line.contains("1 passed")), "{test} ran nothing:\n{}", lines.join("\n"));
}

fn say(word: &str) {
    println!("\n{word}");
    std::io::stdout().flush().unwrap();
}

/// Threads and descriptors of this process.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    threads: usize,
    descriptors: Vec<String>,
    mappings: Vec<String>,
}

fn held(directory: &Path) -> Held {
    let own = directory.to_string_lossy().into_owned();
    let mut descriptors: Vec<String> = fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.unwrap().path()).ok())
        .map(|target| target.to_string_lossy().into_owned())
        // The listing itself.
        .filter(|target| !target.starts_with("/proc/"))
        .collect();
    descriptors.sort();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    Held {
        threads: fs::read_dir("/proc/self/task").unwrap().count(),
        descriptors,
        mappings: maps.lines().filter(|line| line.contains(&own)).map(str::to_owned).collect(),
    }
}

/// A thread that was joined is gone from the process a moment after: its last steps are the system's.
fn settled(directory: &Path, threads: usize) -> Held {
    loop {
        let now = held(directory);
        if now.threads <= threads {
            return now;
        }
        std::thread::yield_now();
    }
}

fn builder(directory: &Path) -> EmulatorBuilder {
    kernels::install(Emulator::builder().memory(Memory::SharedIn(directory.to_owned()))).chips(2)
}

fn prepare(directory: &Path, options: &Options, programs: &[Arc<dyn Program>]) -> (Arc<Emulator>, PreparedWorker) {
    let emulator = builder(directory).build().unwrap();
    let worker = PreparedWorker::prepare(programs, options, Arc::clone(&emulator) as Arc<dyn Backend>).unwrap();
    (emulator, worker)
}

fn by_hand() -> RuntimeFailure {
    RuntimeFailure::new(Call::Run, "RuntimeError", "failed by hand")
}

/// Runs `life` in this child, and requires that threads, descriptors and mappings are what they were.
fn leaves_nothing(life: impl Fn(&Path)) {
    let Some(directory) = child_directory() else { return };
    let _guard = HangGuard::arm("a child of s71");
    let before = held(&directory);
    for _ in 0..3 {
        life(&directory);
        let after = settled(&directory, before.threads);
        assert_eq!(after, before, "something is left in the process (I14)");
    }
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 0, "a name is left in shared memory (I14)");
}

#[test]
#[ignore = "runs in a child process"]
fn child_clean_close() {
    leaves_nothing(|directory| {
        let (emulator, worker) = prepare(directory, &Options::persistent(), &[f2()]);
        let buffer = worker.create_buffer(4096).unwrap();
        let device = worker.alloc(ChipId(1), 4096).unwrap();
        for _ in 0..3 {
            worker.call(&no_args()).unwrap();
        }
        worker.close().unwrap();
        drop((buffer, device, worker, emulator));
    });
}

#[test]
#[ignore = "runs in a child process"]
fn child_bounded_close_and_drop() {
    leaves_nothing(|directory| {
        let (_, worker) = prepare(directory, &Options::persistent(), &[f1()]);
        worker.call(&no_args()).unwrap();
        worker.close_timeout(Duration::MAX).unwrap();
        let (_, worker) = prepare(directory, &Options::persistent(), &[f1()]);
        worker.call(&no_args()).unwrap();
        let (_, bounded) = prepare(directory, &Options::persistent(), &[f1()]);
        bounded.close_timeout(Duration::from_secs(60)).unwrap();
        drop(worker);
    });
}

#[test]
#[ignore = "runs in a child process"]
fn child_failed_dispatch() {
    leaves_nothing(|directory| {
        let (emulator, worker) = prepare(directory, &Options::persistent(), &[f2()]);
        worker.call(&no_args()).unwrap();
        emulator.set_completion(Completion::ByHand);
        let dispatch = worker.submit(worker.only().unwrap(), &no_args()).unwrap();
        emulator.fail(RunId(2), by_hand()).unwrap();
        assert!(dispatch.wait().is_err());
        worker.close().unwrap();
    });
}

#[test]
#[ignore = "runs in a child process"]
fn child_failed_reset() {
    leaves_nothing(|directory| {
        let (emulator, worker) = prepare(directory, &Options::persistent(), &[f2()]);
        worker.call(&no_args()).unwrap();
        emulator.arm(Fault::new(Call::CopyTo, FaultEffect::After).nth(2));
        assert!(matches!(worker.call(&no_args()), Err(Error::ResetCopy { .. })));
        worker.close().unwrap();
    });
}

#[test]
#[ignore = "runs in a child process"]
fn child_failed_construction() {
    leaves_nothing(|directory| {
        for call in [Call::Register, Call::Start] {
            for effect in [FaultEffect::Before, FaultEffect::After] {
                let emulator = builder(directory).faults(Fault::new(call, effect).into()).build().unwrap();
                let backend = Arc::clone(&emulator) as Arc<dyn Backend>;
                let failed = PreparedWorker::prepare(&[with_scratch()], &Options::persistent(), backend);
                assert!(matches!(failed.err(), Some(Error::Backend(e)) if e.call() == call));
            }
        }
    });
}

fn with_scratch() -> Arc<dyn Program> {
    let f1 = f1();
    program(f1.spec().clone().intermediate(4096), move |build, args| f1.build(build, args))
}

#[test]
#[ignore = "runs in a child process"]
fn child_panic() {
    leaves_nothing(|directory| {
        let panicking = program(ProgramSpec::new("panicking"), |build, _| {
            build.lease("d", &f2_request())?;
            std::panic::resume_unwind(Box::new("a builder panics"));
        });
        let (_, worker) = prepare(directory, &Options::persistent(), &[panicking]);
        assert!(catch_unwind(AssertUnwindSafe(|| worker.call(&no_args()))).is_err());
        // Dropped, not closed.
    });
}

#[test]
fn s71_nothing_left_in_shared_memory() {
    let Some(bench) = emulator_only("s71") else { return };
    for child in [
        "child_clean_close",
        "child_bounded_close_and_drop",
        "child_failed_dispatch",
        "child_failed_reset",
        "child_failed_construction",
        "child_panic",
    ] {
        run_child(child, bench.shm.path());
        assert_eq!(bench.shm.names(), Vec::<String>::new(), "{child}");
    }
    bench.assert_clean();
}

// ---- signals ----

/// A warm worker with one dispatch in flight.
fn busy_worker(directory: &Path) -> (Arc<Emulator>, PreparedWorker) {
    let (emulator, worker) = prepare(directory, &Options::persistent(), &[f2()]);
    worker.call(&no_args()).unwrap();
    emulator.set_completion(Completion::ByHand);
    drop(worker.submit(worker.only().unwrap(), &no_args()).unwrap());
    assert_eq!(emulator.stats().runs, 1);
    (emulator, worker)
}

#[test]
#[ignore = "runs in a child process"]
fn child_waits_for_sigterm() {
    let Some(directory) = child_directory() else { return };
    let _guard = HangGuard::arm("child_waits_for_sigterm");
    let _busy = busy_worker(&directory);
    say("busy");
    // The default action ends the process.
    loop {
        std::thread::park();
    }
}

/// Where the handler writes a byte for each signal.
static WAKE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn on_interrupt(_: i32) {
    let byte = b"!";
    // SAFETY: `write` is async-signal-safe, the descriptor stays open for the life of the process, and the one byte
    // is readable. A failure has nobody to be told to.
    unsafe { libc::write(WAKE.load(Ordering::SeqCst), byte.as_ptr().cast(), 1) };
}

#[test]
#[ignore = "runs in a child process"]
fn child_is_interrupted_twice_while_draining() {
    let Some(directory) = child_directory() else { return };
    let _guard = HangGuard::arm("child_is_interrupted_twice_while_draining");
    let (mut signals, wake) = std::io::pipe().unwrap();
    WAKE.store(wake.as_raw_fd(), Ordering::SeqCst);
    let action = SigAction::new(SigHandler::Handler(on_interrupt), signal::SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler makes one async-signal-safe call, and nothing else of this process depends on the action
    // that it replaces.
    unsafe { signal::sigaction(Signal::SIGINT, &action) }.unwrap();
    let (emulator, worker) = busy_worker(&directory);
    let mut byte = [0];
    say("busy");
    signals.read_exact(&mut byte).unwrap();
    // The first interrupt: an orderly close, which has to wait for the run.
    let worker = Arc::new(worker);
    let closing = Arc::clone(&worker);
    std::thread::spawn(move || closing.close());
    while !matches!(worker.create_buffer(1), Err(Error::Closing)) {
        std::thread::yield_now();
    }
    say("draining");
    signals.read_exact(&mut byte).unwrap();
    // The second: out, at once.
    assert_eq!(emulator.stats().runs, 1, "still draining");
    std::process::exit(130);
}

fn send(child: &Child, signal: Signal) {
    signal::kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
}

fn end(mut child: Child) -> ExitStatus {
    child.wait().unwrap()
}

#[test]
fn s71_sigterm_leaves_nothing() {
    use std::os::unix::process::ExitStatusExt;
    let Some(bench) = emulator_only("s71b") else { return };
    let mut child = start_child("child_waits_for_sigterm", bench.shm.path());
    await_word(&mut child, "busy");
    assert_eq!(bench.shm.names(), Vec::<String>::new(), "names are unlinked at once, so that no end can leave one");
    send(&child, Signal::SIGTERM);
    assert_eq!(end(child).signal(), Some(Signal::SIGTERM as i32));
    bench.assert_clean();
}

#[test]
fn s71_sigint_twice_during_drain_leaves_nothing() {
    let Some(bench) = emulator_only("s71c") else { return };
    let mut child = start_child("child_is_interrupted_twice_while_draining", bench.shm.path());
    await_word(&mut child, "busy");
    send(&child, Signal::SIGINT);
    await_word(&mut child, "draining");
    send(&child, Signal::SIGINT);
    assert_eq!(end(child).code(), Some(130));
    bench.assert_clean();
}

// ---- a full file system ----

/// The error of a reset whose staging does not fit.
fn assert_out_of_shared_memory(outcome: Result<(), Error>, requested: u64) {
    let Err(Error::Backend(error)) = &outcome else { panic!("a typed error, not {outcome:?}") };
    let kind = error.runtime().unwrap().kind;
    assert_eq!(kind, FailureKind::OutOfSharedMemory { requested_bytes: requested }, "{error}");
    assert!(error.to_string().contains(&requested.to_string()), "{error}");
}

fn refused_by(result: Result<(), Error>) -> BackendError {
    match result {
        Err(Error::Backend(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// The second dispatch of F2 needs 1 MiB that is not there; F1-sized work then runs, in both frames.
fn too_small(emulator: &Emulator, worker: &PreparedWorker, directory: &Path, mut shrink: impl FnMut()) {
    let ids: Vec<_> = worker.programs().collect();
    worker.run(ids[0], &no_args()).unwrap();
    worker.run(ids[1], &no_args()).unwrap();
    shrink();
    for _ in 0..3 {
        assert_out_of_shared_memory(worker.run(ids[0], &no_args()), 1_048_576);
        assert_eq!(fs::read_dir(directory).unwrap().count(), 0, "something is linked");
        let stats = emulator.stats();
        assert_eq!((stats.runs, stats.host_buffers, stats.linked_names.len()), (0, 0, 0));
    }
    worker.run(ids[1], &no_args()).unwrap();
    worker.run(ids[1], &no_args()).unwrap();
    assert!(refused_by(worker.create_buffer(1 << 20).map(drop)).may_retry());
    worker.close().unwrap();
}

#[test]
fn s72_out_of_shared_memory_is_a_typed_error() {
    let Some(bench) = emulator_only("s72a") else { return };
    let rig: Rig = bench.prepare(&Options::persistent(), &[f2(), signal_program("f1", 64)], bench.builder());
    too_small(rig.emulator(), &rig.worker, bench.shm.path(), || {
        // Each attempt, and the last buffer, is refused as a full file system would.
        rig.emulator().faults().disarm();
        let full = Fault::new(Call::CreateBuffer, FaultEffect::Before);
        let full = full.with_kind(FaultKind::OutOfSharedMemory(1_048_576));
        for nth in [1, 2, 3, 6] {
            rig.emulator().arm(full.nth(nth));
        }
    });
    bench.assert_clean();
}

/// A file system of a given size, unmounted when dropped.
struct SmallShm {
    directory: tempfile::TempDir,
}

impl SmallShm {
    fn mount(bytes: u64) -> nix::Result<Self> {
        let directory = tempfile::Builder::new().prefix("pto-small-").tempdir().unwrap();
        let (tmpfs, flags) = (Some("tmpfs"), nix::mount::MsFlags::empty());
        let size = format!("size={bytes}");
        nix::mount::mount(tmpfs, directory.path(), tmpfs, flags, Some(size.as_str()))?;
        Ok(Self { directory })
    }
}

impl Drop for SmallShm {
    fn drop(&mut self) {
        let _unmounted = nix::mount::umount2(self.directory.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}

/// Two windows of F2, two of F1 and the small staging buffers fit; the staging of F2's payload does not. (A file
/// system of 64 KiB, as the scenario has it, would not hold F2's windows, which are shared memory too.)
const SMALL: u64 = 2 * (1_048_593 + 4096) + 64 * 1024;

#[test]
fn s72_a_full_file_system() {
    let Some(bench) = emulator_only("s72b") else { return };
    let small = match SmallShm::mount(SMALL) {
        Ok(small) => small,
        Err(error) => {
            println!("s72: no file system can be mounted here ({error}); a limit on file sizes stands in for it");
            run_child("child_with_a_limit_on_file_sizes", bench.shm.path());
            return;
        }
    };
    let (emulator, worker) =
        prepare(small.directory.path(), &Options::persistent(), &[f2(), signal_program("f1", 64)]);
    too_small(&emulator, &worker, small.directory.path(), || ());
    drop((emulator, worker));
}

/// Space is reserved, not only promised: filling what was handed out never ends in SIGBUS.
#[test]
fn s72_what_was_handed_out_is_there() {
    let Some(_bench) = emulator_only("s72c") else { return };
    let small = match SmallShm::mount(64 * 1024) {
        Ok(small) => small,
        Err(error) => {
            println!("s72: skipped: no file system can be mounted here ({error})");
            return;
        }
    };
    let emulator = builder(small.directory.path()).build().unwrap();
    let mut buffers = Vec::new();
    let full = loop {
        match emulator.create_buffer(4096) {
            Ok(buffer) => buffers.push(buffer),
            Err(error) => break error,
        }
    };
    assert!((1..=16).contains(&buffers.len()), "{} buffers of 4 KiB in 64 KiB", buffers.len());
    let kind = full.runtime().unwrap().kind;
    assert_eq!(kind, FailureKind::OutOfSharedMemory { requested_bytes: 4096 });
    for buffer in buffers {
        emulator.fill_buffer(buffer, 0xA5).unwrap();
        emulator.release_buffer(buffer).unwrap();
    }
    emulator.close().unwrap();
    assert_eq!(fs::read_dir(small.directory.path()).unwrap().count(), 0);
}

#[test]
#[ignore = "runs in a child process"]
fn child_with_a_limit_on_file_sizes() {
    use nix::sys::resource::{Resource, setrlimit};
    let Some(directory) = child_directory() else { return };
    let ignore = SigAction::new(SigHandler::SigIgn, signal::SaFlags::empty(), SigSet::empty());
    // SAFETY: no handler runs; a file that grows past the limit is an error then, and not the end of the process.
    unsafe { signal::sigaction(Signal::SIGXFSZ, &ignore) }.unwrap();
    let (emulator, worker) = prepare(&directory, &Options::persistent(), &[f2(), signal_program("f1", 64)]);
    too_small(&emulator, &worker, &directory, || setrlimit(Resource::RLIMIT_FSIZE, 64 * 1024, 64 * 1024).unwrap());
}

/// The stand-in for the full file system is itself tested where the process may mount.
#[test]
fn s72_a_limit_on_file_sizes() {
    let Some(bench) = emulator_only("s72d") else { return };
    run_child("child_with_a_limit_on_file_sizes", bench.shm.path());
    bench.assert_clean();
}
