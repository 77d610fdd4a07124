//! Eight threads submit, try, wait, time out, drop, create and release buffers at once, and one closes: nothing hangs
//! (I12), nothing leaks (I4, I11, I14), every accepted dispatch ends once (I10), builds are serial (I9).
//!
//! Bounded by a number of operations, which the environment variable `PTO_SOAK` multiplies. What each thread does
//! follows from its seed; how the threads interleave is the system's choice.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Scope;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pto_dispatch::{Args, Dispatch, Error, HostBuffer, Options, Parameter, Program, ProgramSpec, Staging};
use pto_mock::EventKind;
use pto_simpler_sys::{Access, ChipId, DataType};
use pto_tests::rig::{Rig, emulator_only};
use pto_tests::scenario::{DOMAIN, add, add_one, program, signal_request};

const THREADS: usize = 8;
const OPERATIONS: usize = 250;

/// Far above what a soak takes; each multiple of `PTO_SOAK` adds as much.
const LIMIT: Duration = Duration::from_secs(300);

fn factor() -> usize {
    std::env::var("PTO_SOAK").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Ends the watchdog when dropped.
struct Watched(Arc<(Mutex<bool>, Condvar)>);

impl Drop for Watched {
    fn drop(&mut self) {
        *self.0.0.lock() = true;
        self.0.1.notify_all();
    }
}

/// Aborts the process with a dump unless what it returns is dropped in time.
fn watch<'s>(
    scope: &'s Scope<'s, '_>,
    what: String,
    rig: &'s Rig,
    progress: &'s [AtomicUsize; THREADS],
) -> Watched {
    let over: Arc<(Mutex<bool>, Condvar)> = Arc::default();
    let theirs = Arc::clone(&over);
    let limit = LIMIT.saturating_mul(u32::try_from(factor()).unwrap_or(u32::MAX));
    scope.spawn(move || {
        let deadline = Instant::now() + limit;
        let mut over = theirs.0.lock();
        while !*over {
            if theirs.1.wait_until(&mut over, deadline).timed_out() && !*over {
                // Not `eprintln`: the harness captures that, and it would be lost with the process.
                let mut dump = std::io::stderr().lock();
                let events = rig.journal().events();
                for event in &events[events.len().saturating_sub(200)..] {
                    let _told = writeln!(dump, "{event}");
                }
                let _told = writeln!(dump, "{:?}\n{:?}", rig.worker, rig.emulator().stats());
                let _told = writeln!(dump, "operations by thread: {progress:?}");
                let _told = writeln!(dump, "{what} hangs: no end after {limit:?}");
                std::process::abort();
            }
        }
    });
    Watched(over)
}

/// A small deterministic generator (xorshift).
struct Choice(u64);

impl Choice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// Leases a domain (if it has one) and adds 1 to it and to the argument; its own error where the scalar is 1.
fn working(name: &str, window: Option<u64>, inside: &Arc<AtomicUsize>) -> Arc<dyn Program> {
    let inside = Arc::clone(inside);
    let spec = ProgramSpec::new(name)
        .callable(add())
        .parameter(Parameter::host("x", 4))
        .parameter(Parameter::scalar("refuse"));
    program(spec, move |build, args| {
        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two graphs are built at one time (I9)");
        let result = (|| {
            let lease = window.map(|window| build.lease(DOMAIN, &signal_request(window))).transpose()?;
            if args.scalar_at(1)? == 1 {
                return Err("refused by the builder".into());
            }
            if let Some(lease) = &lease {
                add_one(build, lease, "signal")?;
            }
            let x = build.tensor(args.host_at(0)?, &[1], DataType::Int32, Access::InOut)?;
            Ok(build.task(0)?.tensor(x).scalar(1).submit(ChipId(0))?)
        })();
        inside.fetch_sub(1, Ordering::SeqCst);
        result
    })
}

/// What one thread did.
#[derive(Default)]
struct Tally {
    accepted: usize,
    refused: usize,
}

struct Worker<'a> {
    rig: &'a Rig,
    ordinary: bool,
    choice: Choice,
    handles: Vec<Dispatch>,
    buffers: Vec<HostBuffer>,
    tally: Tally,
}

impl Worker<'_> {
    /// One operation; false once the worker is closing.
    fn step(&mut self) -> bool {
        match self.choice.below(10) {
            0..=2 => self.submit(false),
            3 => self.submit(true),
            4 => {
                if let Some(handle) = self.any_handle() {
                    handle.wait().unwrap();
                }
                true
            }
            5 => {
                let limit = [Duration::ZERO, Duration::from_micros(50), Duration::MAX][self.choice.below(3)];
                if let Some(handle) = self.any_handle() {
                    match handle.wait_timeout(limit) {
                        Ok(()) => assert!(handle.is_done()),
                        Err(Error::WaitTimeout { id }) => assert!(id == handle.id() && limit != Duration::MAX),
                        Err(other) => panic!("{other}"),
                    }
                }
                true
            }
            6 => {
                if let Some(handle) = self.any_handle() {
                    let done = handle.is_done();
                    assert!(handle.outcome().is_some() || !done);
                }
                true
            }
            7 => self.create(),
            8 => {
                if let Some(buffer) = self.buffers.pop() {
                    match buffer.release() {
                        Ok(()) | Err(Error::BufferInUse) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
                true
            }
            _ => {
                if !self.handles.is_empty() {
                    let index = self.choice.below(self.handles.len());
                    drop(self.handles.swap_remove(index));
                }
                true
            }
        }
    }

    fn any_handle(&mut self) -> Option<Dispatch> {
        let index = self.choice.below(self.handles.len().max(1));
        self.handles.get(index).cloned()
    }

    fn create(&mut self) -> bool {
        match self.rig.worker.create_buffer(4) {
            Ok(buffer) => {
                self.buffers.push(buffer);
                self.buffers.truncate(4);
                true
            }
            Err(Error::Closing | Error::Closed) => false,
            Err(other) => panic!("{other}"),
        }
    }

    fn submit(&mut self, no_wait: bool) -> bool {
        if self.buffers.is_empty() && !self.create() {
            return false;
        }
        let Some(buffer) = self.buffers.last() else { return false };
        // In ordinary mode a builder that has allocated may fail too; in persistent mode that would poison, unless
        // the domain is warm.
        let refuse = u64::from(self.choice.below(8) == 0 && self.ordinary);
        let args = Args::new().host(buffer).scalar(refuse);
        let id = self.rig.ids[self.choice.below(self.rig.ids.len())];
        let submitted =
            if no_wait { self.rig.worker.try_submit(id, &args) } else { self.rig.worker.submit(id, &args) };
        match submitted {
            Ok(handle) => {
                self.tally.accepted += 1;
                self.handles.push(handle);
                self.handles.truncate(6);
                true
            }
            Err(Error::WouldBlock { .. }) if no_wait => true,
            Err(Error::Program { .. }) if refuse == 1 => {
                self.tally.refused += 1;
                true
            }
            Err(Error::Closing | Error::Closed) => false,
            Err(other) => panic!("{other}"),
        }
    }
}

fn soak(name: &'static str, options: &Options, ordinary: bool, depth: u32) {
    let Some(bench) = emulator_only(name) else { return };
    let bench = bench.unguarded();
    let inside = Arc::new(AtomicUsize::new(0));
    let programs = [
        working("small", Some(64), &inside),
        working("large", Some(4096), &inside),
        working("plain", None, &inside),
    ];
    let rig = bench.prepare(options, &programs, bench.builder().depth(depth).dirty_host_buffers(true));
    let progress: [AtomicUsize; THREADS] = Default::default();
    let operations = OPERATIONS * factor();
    let tallies = std::thread::scope(|scope| {
        let _watched = watch(scope, format!("{name}, depth {depth}"), &rig, &progress);
        let _rescue = rig.rescue();
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (rig, progress) = (&rig, &progress);
                scope.spawn(move || {
                    let mut worker = Worker {
                        rig,
                        ordinary,
                        choice: Choice(
                            0x9E37_79B9_7F4A_7C15 ^ (thread as u64 + 1).wrapping_mul(0xD134_2543_DE82_EF95),
                        ),
                        handles: Vec::new(),
                        buffers: Vec::new(),
                        tally: Tally::default(),
                    };
                    for _ in 0..operations {
                        progress[thread].fetch_add(1, Ordering::Relaxed);
                        if !worker.step() {
                            break;
                        }
                    }
                    if thread == 0 {
                        // The others are in the middle of whatever they do.
                        rig.worker.close().unwrap();
                    }
                    for handle in worker.handles.drain(..) {
                        handle.wait().unwrap();
                    }
                    worker.tally
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    rig.worker.close().unwrap();
    let (accepted, refused) =
        tallies.iter().fold((0, 0), |sum, tally| (sum.0 + tally.accepted, sum.1 + tally.refused));
    let journal = rig.journal();
    let count = |what: fn(&EventKind) -> bool| journal.count(what);
    assert!(accepted > 0);
    assert_eq!(count(|e| matches!(e, EventKind::Accept(_))), accepted);
    assert_eq!(count(|e| matches!(e, EventKind::Ended(_, true))), accepted, "each ends once, and well (I10)");
    assert_eq!(count(|e| matches!(e, EventKind::BuildFailed(_))), refused + would_blocks(&rig, accepted, refused));
    assert_eq!(journal.allocs(), journal.frees(), "every domain is freed exactly once (I4)");
    let stats = rig.emulator().stats();
    assert_eq!((stats.domains, stats.runs, stats.host_buffers, stats.threads), (0, 0, 0, 0), "{stats:?}");
    assert!(stats.linked_names.is_empty() && stats.committed_bytes.iter().all(|bytes| *bytes == 0));
    bench.assert_clean();
}

/// Builds that a submitter who would not wait gave up at their first control call.
fn would_blocks(rig: &Rig, accepted: usize, refused: usize) -> usize {
    rig.journal().count(|e| matches!(e, EventKind::Admit(_))) - accepted - refused
}

#[test]
fn soak_ordinary() {
    soak("soak_ordinary", &Options::ordinary(), true, 2);
    soak("soak_ordinary", &Options::ordinary(), true, 1);
}

#[test]
fn soak_persistent_with_reset() {
    soak("soak_persistent_with_reset", &Options::persistent(), false, 2);
    soak("soak_persistent_with_reset", &Options::persistent(), false, 1);
}

#[test]
fn soak_persistent_with_retained_staging() {
    let options = Options::persistent().staging(Staging::Retained { cap_bytes: 1 << 20 });
    soak("soak_persistent_with_retained_staging", &options, false, 2);
}

#[test]
fn soak_persistent_without_reset() {
    soak("soak_persistent_without_reset", &Options::persistent().reset(false), false, 2);
    soak("soak_persistent_without_reset", &Options::persistent().reset(false), false, 1);
}
