//! Extremes: as many chips as there can be and none at all, odd names, sizes that overflow, and calls from where nobody
//! expects them. Each ends in an answer, and leaves a usable worker (I12, I13).
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use pto_dispatch::{
    Args, Dispatch, Error, HostBuffer, Options, PreparedWorker, Program, ProgramResult, ProgramSpec,
};
use pto_mock::{Completion, EventKind, KernelError};
use pto_simpler_sys::{
    Access, Backend, BackendError, Call, CallableSpec, Capabilities, ChipId, DataType, DomainRequest, FailureKind,
    Family, NamedBuffer, RunId, RuntimeFailure, Signature, forward_backend,
};
use pto_tests::gate::Gate;
use pto_tests::rig::{allocations, emulator_only};
use pto_tests::scenario::{DOMAIN, add, f0, f1, program, signal_request};
use pto_tests::spy::Seen;

fn no_args() -> Args {
    Args::new()
}

/// Leases a domain over all chips and adds 1 to the signal of each.
fn everywhere(window_bytes: u64) -> Arc<dyn Program> {
    program(ProgramSpec::new("everywhere").callable(add()), move |build, _| {
        let request = DomainRequest::packed(0..build.chips(), vec![NamedBuffer::bytes("signal", window_bytes)]);
        let lease = build.lease(DOMAIN, &request)?;
        let mut group = build.group(0)?;
        for chip in &request.workers {
            let tensor = build.tensor(&lease.buffer(*chip, "signal")?, &[1], DataType::Int32, Access::InOut)?;
            group = group.member(*chip).tensor(tensor).scalar(1);
        }
        Ok(group.submit()?)
    })
}

/// As many ranks as the backend takes, reset and all (I8, I11); one more is refused before anything is touched.
#[test]
fn sixty_four_chips_take_part_and_sixty_five_are_refused() {
    for chips in [64, 65] {
        let Some(bench) = emulator_only("many chips") else { return };
        let programs = [everywhere(16), f0()];
        let rig = bench.prepare(&Options::persistent(), &programs, bench.builder().chips(chips));
        for dispatch in 1..=3_u64 {
            let outcome = rig.worker.run(rig.ids[0], &no_args());
            if chips == 65 {
                let text = outcome.unwrap_err().to_string();
                assert!(text.contains("65") && text.contains("64"), "{text}");
                continue;
            }
            outcome.unwrap();
            let stats = rig.worker.stats(rig.ids[0]).unwrap();
            assert_eq!((stats.dispatches, stats.allocations), (dispatch, 1));
            assert_eq!(
                (stats.zeroed_bytes, stats.peak_staging_bytes),
                ((dispatch - 1) * 64 * 16, 16.min(16 * (dispatch - 1)))
            );
            let (_, domain) = allocations(&rig.journal())[0];
            let mut cell = [0; 4];
            rig.emulator().peek(domain, ChipId(63), 0, &mut cell).unwrap();
            assert_eq!(i32::from_ne_bytes(cell), 1, "a reused window was not reset");
        }
        rig.worker.run(rig.ids[1], &no_args()).unwrap();
        rig.worker.close().unwrap();
        assert_eq!(
            (rig.journal().allocs(), rig.journal().frees()),
            (usize::from(chips == 64), usize::from(chips == 64))
        );
        drop(rig);
        bench.assert_clean();
    }
}

/// A backend that says that it has no chips.
#[derive(Debug)]
struct Chipless {
    inner: Arc<dyn Backend>,
    capabilities: Capabilities,
}

impl Backend for Chipless {
    forward_backend!(
        inner: phase, check_blocking, register, start, submit, run_state, create_buffer, create_zeros, write_buffer,
        read_buffer, fill_buffer, release_buffer, alloc, free, copy_to, copy_from, release_domain, domain_state,
        committed_device_memory, close, abandon,
    );

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
}

/// Without chips there is nothing to run on, which each call says for itself.
#[test]
fn a_backend_without_chips_refuses_and_nothing_breaks() {
    let Some(bench) = emulator_only("no chips") else { return };
    let inner = bench.builder().build().unwrap();
    let mut capabilities = inner.capabilities().clone();
    capabilities.device_ids.clear();
    let backend = Arc::new(Chipless { inner, capabilities });
    let idle = program(ProgramSpec::new("idle"), |build, _| {
        assert_eq!(build.chips(), 0);
        Ok(())
    });
    let worker = PreparedWorker::prepare(&[f0(), f1(), idle], &Options::persistent(), backend).unwrap();
    let ids: Vec<_> = worker.programs().collect();
    let task = worker.run(ids[0], &no_args()).unwrap_err();
    assert!(matches!(&task, Error::Build(text) if text.contains("there are 0 chips")), "{task:?}");
    let lease = worker.run(ids[1], &no_args()).unwrap_err();
    assert!(matches!(lease, Error::Request { .. }), "{lease:?}");
    worker.run(ids[2], &no_args()).unwrap();
    worker.close().unwrap();
    drop(worker);
    bench.assert_clean();
}

/// Names are opaque: whatever they hold, each is a domain of its own, and the same one again (I1, I2, rule 8).
#[test]
fn odd_names_are_names() {
    let Some(bench) = emulator_only("odd names") else { return };
    let long = "n".repeat(1 << 20);
    let names: Arc<[String]> = [
        "\0",
        "a\0b",
        "a\nb",
        " ",
        "/",
        "../../etc",
        "\u{1F4A5}",
        "p1:comm_d0",
        ":",
        "comm_d0 ",
        "comm_d0",
        "\u{200B}",
        "%s{}",
        &long,
    ]
    .map(str::to_owned)
    .into();
    let odd = |names: Arc<[String]>| {
        program(ProgramSpec::new("odd\0name\n").callable(add()), move |build, _| {
            let mut requests = Vec::new();
            for name in &*names {
                let buffers = vec![NamedBuffer::bytes(name.as_str(), 8), NamedBuffer::bytes(format!("{name} "), 8)];
                requests.push(DomainRequest::packed([0], buffers));
            }
            let mut leases = Vec::new();
            for (name, request) in names.iter().zip(&requests) {
                leases.push(build.lease(name, request)?);
            }
            for (name, lease) in names.iter().zip(&leases) {
                let tensor = build.tensor(&lease.buffer(ChipId(0), name)?, &[2], DataType::Int32, Access::InOut)?;
                build.task(0)?.tensor(tensor).scalar(1).submit(ChipId(0))?;
            }
            Ok(())
        })
    };
    let programs = [odd(Arc::clone(&names)), odd(Arc::clone(&names))];
    let rig = bench.prepare(&Options::persistent(), &programs, bench.builder());
    for _ in 0..2 {
        for id in &rig.ids {
            rig.worker.run(*id, &no_args()).unwrap();
        }
    }
    let made = allocations(&rig.journal());
    let mut distinct: Vec<&str> = made.iter().map(|(name, _)| name.as_str()).collect();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!((made.len(), distinct.len()), (2 * names.len(), 2 * names.len()));
    rig.worker.close().unwrap();
    assert_eq!(rig.journal().frees(), 2 * names.len());
    drop(rig);
    bench.assert_clean();
}

/// Sizes at the end of 64 bits are typed errors, none of them wraps, and the worker goes on (S20, I13).
#[test]
fn sizes_that_overflow_are_errors() {
    let Some(bench) = emulator_only("sizes") else { return };
    let asked: Arc<Mutex<Option<DomainRequest>>> = Arc::default();
    let inside = Arc::clone(&asked);
    let asking = program(ProgramSpec::new("asking"), move |build, _| {
        if let Some(request) = &*inside.lock().unwrap() {
            build.lease(DOMAIN, request)?;
        }
        let scratch = build.scratch(u64::MAX);
        assert!(matches!(&scratch, Err(Error::Backend(e)) if e.family() == Family::Backend), "{scratch:?}");
        Ok(())
    });
    let rig = bench.prepare(&Options::ordinary(), &[asking, f0()], bench.builder());
    let bytes = |name: &str, nbytes| NamedBuffer::bytes(name, nbytes);
    let window =
        |window_bytes, buffers| DomainRequest { workers: vec![ChipId(0), ChipId(1)], window_bytes, buffers };
    for (request, refused_here) in [
        (window(u64::MAX, vec![bytes("a", u64::MAX), bytes("b", u64::MAX)]), true),
        (window(u64::MAX, vec![bytes("a", u64::MAX), bytes("b", 1)]), true),
        (window(1, vec![bytes("a", u64::MAX)]), true),
        (window(u64::MAX, vec![bytes("a", u64::MAX)]), false),
        (window(1 << 62, vec![]), false),
    ] {
        *asked.lock().unwrap() = Some(request.clone());
        let error = rig.worker.run(rig.ids[0], &no_args()).unwrap_err();
        match &error {
            Error::Request { .. } => assert!(refused_here, "{request:?}: {error:?}"),
            Error::Backend(e) => {
                assert!(!refused_here, "{request:?}: {error:?}");
                let kind = e.runtime().map(|failure| failure.kind);
                let full = matches!(
                    kind,
                    Some(FailureKind::OutOfSharedMemory { .. } | FailureKind::OutOfDeviceMemory { .. })
                );
                assert!(full, "{error:?}");
            }
            _ => panic!("{request:?}: {error:?}"),
        }
        rig.worker.run(rig.ids[1], &no_args()).unwrap();
    }
    *asked.lock().unwrap() = None;
    rig.worker.run(rig.ids[0], &no_args()).unwrap();

    for nbytes in [u64::MAX, 1 << 62] {
        assert!(
            matches!(rig.worker.create_buffer(nbytes), Err(Error::Backend(e)) if e.family() == Family::Backend)
        );
        assert!(
            matches!(rig.worker.alloc(ChipId(0), nbytes), Err(Error::Backend(e)) if e.family() == Family::Backend)
        );
    }
    let buffer = rig.worker.create_buffer(8).unwrap();
    for offset in [1, 8, u64::MAX - 7, u64::MAX] {
        assert!(matches!(buffer.write(offset, &[1; 8]), Err(Error::Backend(e)) if e.family() == Family::Misuse));
        assert!(matches!(buffer.read(offset, &mut [0; 8]), Err(Error::Backend(e)) if e.family() == Family::Misuse));
    }
    let mut bytes = [9; 8];
    buffer.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 8], "a refused write wrote");
    drop(buffer);
    assert!(
        matches!(rig.worker.alloc(ChipId(u32::MAX), 8), Err(Error::Backend(e)) if e.family() == Family::Misuse)
    );
    rig.worker.close().unwrap();
    drop(rig);
    bench.assert_clean();
}

/// A task holds up its own run. Calls from it that would wait for that run are refused at once, by the backend's word
/// that this thread may not block; what does not wait is answered, and a buffer dropped there is released later (I12).
#[test]
fn a_task_may_ask_and_not_wait() {
    let Some(bench) = emulator_only("from a task") else { return };
    let worker: Arc<OnceLock<Weak<PreparedWorker>>> = Arc::default();
    let things: Arc<Mutex<Option<(Dispatch, HostBuffer)>>> = Arc::default();
    let ready = Gate::new();
    let (inside, given, gate) = (Arc::clone(&worker), Arc::clone(&things), ready.clone());
    let signature = Signature::new([], 0);
    let calling = bench.builder().kernel("calling", signature.clone(), move |_| {
        gate.pass();
        let worker = inside.get().and_then(Weak::upgrade).ok_or_else(|| KernelError::failed("no worker"))?;
        let (own, buffer) = given.lock().unwrap().take().ok_or_else(|| KernelError::failed("nothing given"))?;
        let other = worker.programs().last().ok_or_else(|| KernelError::failed("no programs"))?;
        for (what, answer) in [
            ("submit", worker.submit(other, &no_args()).map(drop)),
            ("try_submit", worker.try_submit(other, &no_args()).map(drop)),
            ("run", worker.run(other, &no_args())),
            ("wait", own.wait()),
            ("close", worker.close()),
            ("close_timeout", worker.close_timeout(Duration::MAX)),
            ("alloc", worker.alloc(ChipId(0), 8).map(drop)),
        ] {
            if !matches!(&answer, Err(Error::Backend(e)) if e.family() == Family::Misuse) {
                return Err(KernelError::failed(format!("{what}: {answer:?}")));
            }
        }
        if own.is_done() || !matches!(own.wait_timeout(Duration::ZERO), Err(Error::WaitTimeout { .. })) {
            return Err(KernelError::failed("the run of this task is over"));
        }
        drop(buffer);
        Ok(())
    });
    let spec = ProgramSpec::new("calling").callable(CallableSpec::chip("calling", signature));
    let program = program(spec, |build, _| -> ProgramResult { Ok(build.task(0)?.submit(ChipId(0))?) });
    let rig = bench.prepare(&Options::persistent(), &[program, f0()], calling);
    let shared = Arc::new(rig.worker);
    worker.set(Arc::downgrade(&shared)).unwrap();
    let buffer = shared.create_buffer(8).unwrap();
    let own = shared.submit(rig.ids[0], &no_args()).unwrap();
    *things.lock().unwrap() = Some((own.clone(), buffer));
    ready.open();
    own.wait().unwrap();
    shared.run(rig.ids[1], &no_args()).unwrap();
    let released = |seen: &Seen| matches!(seen, Seen::ReleaseBuffer(_));
    assert_eq!(rig.spy.count(released), 1, "the buffer that the task dropped is not released");
    // The task may hold its reference for a moment longer than its run lasts.
    while Arc::strong_count(&shared) > 1 {
        std::thread::yield_now();
    }
    shared.close().unwrap();
    drop((shared, rig.spy));
    bench.assert_clean();
}

/// A builder may drop and close other workers; their dispatches in flight are waited for there (rules 20 and 21).
#[test]
fn a_builder_may_drop_and_close_other_workers() {
    let Some(bench) = emulator_only("workers in a builder") else { return };
    let others: Arc<Mutex<Vec<PreparedWorker>>> = Arc::default();
    let inside = Arc::clone(&others);
    let dropping = program(ProgramSpec::new("dropping").callable(add()), move |build, _| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        let mut others = inside.lock().unwrap();
        if let Some(closed) = others.pop() {
            closed.close()?;
        }
        drop(others.pop());
        pto_tests::scenario::add_one(build, &lease, "signal")
    });
    let rig = bench.prepare(&Options::persistent(), &[dropping], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    let mut journals = Vec::new();
    for _ in 0..2 {
        let other = bench.prepare(&Options::persistent(), &[f1()], bench.builder());
        other.worker.call(&no_args()).unwrap();
        drop(other.worker.submit(other.ids[0], &no_args()).unwrap());
        journals.push(other.journal());
        others.lock().unwrap().push(other.worker);
    }
    rig.worker.call(&no_args()).unwrap();
    for journal in journals {
        assert_eq!((journal.allocs(), journal.frees()), (1, 1));
        assert!(journal.contains(|e| *e == EventKind::Close { ok: true }));
    }
    rig.worker.call(&no_args()).unwrap();
    rig.worker.close().unwrap();
    drop(rig);
    bench.assert_clean();
}

/// A program whose destructor panics.
struct Fragile(ProgramSpec);

impl Program for Fragile {
    fn spec(&self) -> &ProgramSpec {
        &self.0
    }

    fn build<'b>(&self, _: &pto_dispatch::Build<'b>, _: &Args) -> ProgramResult {
        Ok(())
    }
}

impl Drop for Fragile {
    fn drop(&mut self) {
        // As a panic does, without the message on standard error.
        std::panic::resume_unwind(Box::new("the program's destructor panics"));
    }
}

/// I12, I14: what a program does when it is dropped is its own; by then the worker is closed, on whatever thread the
/// last reference goes.
#[test]
fn a_program_whose_destructor_panics_leaves_nothing() {
    for close in [true, false] {
        let Some(bench) = emulator_only("fragile") else { return };
        let fragile: Arc<dyn Program> = Arc::new(Fragile(ProgramSpec::new("fragile")));
        let rig = bench.prepare(&Options::persistent(), &[fragile, f1()], bench.builder());
        rig.worker.run(rig.ids[1], &no_args()).unwrap();
        drop(rig.worker.submit(rig.ids[0], &no_args()).unwrap());
        if close {
            rig.worker.close().unwrap();
        }
        let (spy, journal) = (Arc::clone(&rig.spy), rig.journal());
        let worker = rig.worker;
        let _unwinds_or_not = catch_unwind(AssertUnwindSafe(|| drop(worker)));
        assert_eq!(spy.closes(), 1);
        assert!(journal.contains(|e| *e == EventKind::Close { ok: true }));
        assert_eq!((journal.allocs(), journal.frees()), (1, 1));
    }
}

/// A backend that panics in the two calls that answer a question, once it is told to.
#[derive(Debug)]
struct Moody {
    inner: Arc<dyn Backend>,
    mood: AtomicBool,
}

impl Moody {
    fn ask(&self) {
        assert!(!self.mood.load(Ordering::SeqCst), "not now");
    }
}

impl Backend for Moody {
    forward_backend!(
        inner: phase, register, start, submit, run_state, create_buffer, create_zeros, write_buffer, read_buffer,
        fill_buffer, release_buffer, alloc, free, copy_to, copy_from, release_domain, domain_state,
        committed_device_memory, close, abandon,
    );

    fn capabilities(&self) -> &Capabilities {
        self.ask();
        self.inner.capabilities()
    }

    fn check_blocking(&self) -> Result<(), BackendError> {
        self.ask();
        self.inner.check_blocking()
    }
}

/// I10, I12: a failed run ends, and a dropped worker closes, whatever becomes of questions that the backend had answered
/// before.
#[test]
fn a_backend_that_panics_when_it_is_asked_loses_no_dispatch() {
    let Some(bench) = emulator_only("moody") else { return };
    let emulator = bench.builder().completion(Completion::ByHand).build().unwrap();
    let (inner, journal) = (Arc::clone(&emulator) as Arc<dyn Backend>, emulator.journal());
    let backend = Arc::new(Moody { inner, mood: AtomicBool::new(false) });
    let worker =
        PreparedWorker::prepare(&[f0()], &Options::ordinary(), Arc::clone(&backend) as Arc<dyn Backend>).unwrap();
    let dispatch = worker.submit(worker.only().unwrap(), &no_args()).unwrap();
    backend.mood.store(true, Ordering::SeqCst);
    let failure =
        RuntimeFailure::new(Call::Task, "RuntimeError", "by hand").with_kind(FailureKind::Task).on_chip(ChipId(0));
    emulator.fail(RunId(1), failure).unwrap();
    while !dispatch.is_done() {
        std::thread::yield_now();
    }
    assert!(matches!(dispatch.outcome(), Some(Err(Error::Failed(_)))));
    // On another thread, since the backend does not say whether this one may block.
    drop(worker);
    journal.wait_until(|events| events.iter().any(|event| event.kind == EventKind::Close { ok: true }));
}
