//! What the emulator answers where nothing else asks: counters, journals, schedules, views, and checks that come before
//! a call counts.
#![allow(clippy::unwrap_used, clippy::panic, clippy::clone_on_ref_ptr, reason = "this is test code")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use common::*;
use pto_mock::{
    Completion, Emulator, EmulatorBuilder, EventKind, Fault, FaultEffect, FaultSchedule, FreeCause, KernelError,
    WaitFor,
};
use pto_simpler_sys::*;

/// An emulator that is not started yet, with the kernels of one test.
struct Own {
    emulator: Arc<Emulator>,
    ends: Arc<Ends>,
}

impl Own {
    fn new(kernels: impl FnOnce(EmulatorBuilder) -> EmulatorBuilder) -> Self {
        Self { emulator: kernels(builder()).build().unwrap(), ends: Arc::default() }
    }
}

fn host_arg(id: HostBufferId, elements: u32, access: Access) -> TensorArg {
    let shape = Shape::new(&[elements]).unwrap();
    TensorArg { place: TensorPlace::Host(id), shape, dtype: DataType::Int32, byte_offset: 0, access }
}

#[test]
fn a_run_is_accepted_once_and_a_cancelled_one_never() {
    let rig = Rig::new(builder().completion(Completion::ByHand));
    rig.submit(1, |_| Ok(())).unwrap();
    assert!(rig.emulator.wait_accepted(RunId(1)), "in flight");
    rig.emulator.complete(RunId(1)).unwrap();
    rig.wait(1);
    assert!(rig.emulator.wait_accepted(RunId(1)), "ended");
    let failed = rig.submit(2, |_| {
        assert_eq!(rig.emulator.run_state(RunId(2)), RunState::Unknown, "not accepted yet");
        Err(BackendError::misuse(Call::Submit, "on purpose"))
    });
    assert!(failed.is_err());
    assert!(!rig.emulator.wait_accepted(RunId(2)), "cancelled");
    let emulator = rig.emulator.clone();
    rig.close();
    assert!(!emulator.wait_accepted(RunId(3)), "closed");
}

#[test]
fn every_thread_is_counted() {
    let rig = Rig::new(builder().sub_workers(3));
    // Two chips, three sub-workers, the finisher.
    assert_eq!(rig.emulator.stats().threads, 6);
    rig.close();
}

#[test]
fn calls_that_hang_are_released_one_by_one_by_call_and_chip() {
    let rig = Rig::two();
    for chip in 0..2 {
        rig.emulator.arm(Fault::new(Call::CopyTo, FaultEffect::Hang).on_chip(chip));
    }
    let domain = rig.retained(1, "d", &signal());
    let sources = [(), ()].map(|()| rig.emulator.create_buffer(64).unwrap());
    thread::scope(|scope| {
        let copying = scope.spawn(|| {
            rig.run(2, |o| {
                o.get_or_allocate_domain("d", &signal(), true, &mut DomainAllocation::new())?;
                let copies = [0, 1].map(|chip| copy(buffer(&domain, chip, 0), sources[chip as usize], 64));
                o.copy_batch(&copies, &mut Vec::new())
            })
        });
        rig.emulator.faults().wait_hung(2);
        let mut hung = rig.emulator.faults().hung();
        hung.sort_by_key(|hung| hung.chip.map(|chip| chip.0));
        assert!(hung[0].id != hung[1].id && hung[0].chip == Some(ChipId(0)) && hung[1].chip == Some(ChipId(1)));
        assert_eq!(rig.emulator.release_hang(Call::CopyFrom, None), 0, "another call");
        assert_eq!(rig.emulator.release_hang(Call::CopyFrom, Some(ChipId(1))), 0, "another call");
        assert_eq!(rig.emulator.release_hang(Call::CopyTo, Some(ChipId(1))), 1);
        assert_eq!(rig.emulator.faults().hung(), [hung[0]]);
        assert_eq!(rig.emulator.release_hang(Call::CopyTo, None), 1);
        assert_eq!(copying.join().unwrap().unwrap(), RunOutcome::success());
    });
    for source in sources {
        rig.emulator.release_buffer(source).unwrap();
    }
    rig.close();
}

#[test]
fn schedules_are_lists_of_faults() {
    let (first, second) =
        (Fault::new(Call::Free, FaultEffect::Before), Fault::new(Call::Task, FaultEffect::After).on_chip(1));
    let mut schedule = FaultSchedule::none().with(first);
    assert_eq!((schedule.is_empty(), FaultSchedule::none().is_empty()), (false, true));
    assert_eq!(schedule, FaultSchedule::from(first));
    schedule.extend([second]);
    assert_eq!(schedule.faults, [first, second]);
    assert_eq!(schedule.to_string(), format!("{first}; {second}"));
    // A fault of a task is a failed task, any other a failed call.
    assert_eq!(first.to_failure(None).kind, FailureKind::Call);
    assert_eq!(second.to_failure(None).kind, FailureKind::Task);
    let rig = Rig::new(builder().faults(schedule));
    assert_eq!(rig.emulator.faults().pending(), [first, second]);
    rig.emulator.faults().disarm();
    assert_eq!(rig.emulator.faults().pending(), []);
    let args = TaskArgs::new();
    let outcome = rig.run(1, |o| o.submit_next_level(rig.nothing, &args, None, ChipId(1))).unwrap();
    assert_eq!(outcome, RunOutcome::success());
    rig.close();
}

#[test]
fn a_journal_says_what_happened_in_which_run_and_in_which_order() {
    let rig = Rig::two();
    let journal = rig.emulator.journal();
    assert!(journal.is_recording() && !journal.is_empty());
    journal.clear();
    assert!(journal.is_empty());
    let source = rig.emulator.create_buffer(64).unwrap();
    let mut domain = DomainAllocation::new();
    let outcome = rig.run(1, |o| {
        o.allocate_domain("d", &signal(), &mut domain)?;
        o.copy_to(&copy(buffer(&domain, 1, 0), source, 64))?;
        o.copy_from(source, buffer(&domain, 1, 0), 64)?;
        o.submit_next_level(rig.nothing, &TaskArgs::new(), None, ChipId(1))
    });
    assert_eq!(outcome.unwrap(), RunOutcome::success());
    rig.emulator.release_buffer(source).unwrap();
    assert_eq!(journal.len(), journal.events().len());
    let freed = |e: &EventKind| matches!(e, EventKind::Free { cause: FreeCause::Cleanup(_), .. });
    let copied = |e: &EventKind| matches!(e, EventKind::Copy { .. } | EventKind::CopyFrom { .. });
    let started = |e: &EventKind| matches!(e, EventKind::TaskStart { .. });
    assert!(journal.before(copied, freed) && !journal.before(freed, copied), "{journal}");
    assert!(!journal.before(copied, |_| false) && !journal.before(|_| false, copied));
    let (first, last) = (journal.position(copied).unwrap(), journal.last_position(copied).unwrap());
    assert!(first < last && last < journal.position(started).unwrap(), "{journal}");
    assert_eq!(journal.last_position(|_| false), None);
    let of_run = journal.of_run(RunId(1));
    assert_eq!(of_run.iter().filter(|e| copied(e)).count(), 2);
    assert_eq!(of_run.iter().filter(|e| freed(e)).count(), 1, "{journal}");
    assert!(!of_run.iter().any(|e| matches!(e, EventKind::BufferRelease { .. })));
    let text = journal.to_string();
    for line in ["admit run1", "accept run1", "copy run1 chip1 ", "task-start run1 chip1 ", "\"d\"", "64B"] {
        assert!(text.contains(line), "{line} in {text}");
    }
    assert_eq!(text.lines().count(), journal.len());
    let begin = journal.position(|e| *e == EventKind::Admit(RunId(1))).unwrap();
    assert!(text.lines().any(|line| line.contains(&begin.to_string()) && line.contains("admit")), "{text}");
    let muted = builder().journal(false).build().unwrap();
    muted.close().unwrap();
    assert!(!muted.journal().is_recording() && muted.journal().is_empty());
    rig.close();
}

/// A task sees its arguments and nothing beyond them.
#[test]
fn a_task_counts_its_arguments_and_stays_inside_its_views() {
    let rig = Own::new(|builder| {
        builder
            .sub_workers(1)
            .kernel("looks", Signature::new([Access::InOut, Access::Input], 1), |k| {
                assert_eq!((k.tensors(), k.scalars()), (2, 1));
                let domain = k.domain(k.scalar(0)?)?;
                assert_eq!((domain.buffers(), domain.size()), (3, 2));
                let (first, last) = (domain.buffer(domain.rank(), 0)?, domain.buffer(domain.rank(), 2)?);
                assert!(!first.is_empty());
                // The window goes on after the first buffer.
                let beyond = first.load(8, &mut [0; 4]);
                assert!(matches!(beyond, Err(KernelError::OutOfBounds { .. })), "{beyond:?}");
                let across = first.store(4, &[1; 8]);
                assert!(matches!(across, Err(KernelError::OutOfBounds { .. })), "{across:?}");
                assert_eq!(last.to_vec()?, [0; 8]);
                k.tensor(0)?.fill(4, 4, 7)
            })
            .sub("counts", Signature::new([Access::Input], 2), |k| {
                assert_eq!((k.tensors(), k.scalars()), (1, 2));
                Ok(())
            })
    });
    let looks = rig.emulator.register(&chip_spec("looks", &[Access::InOut, Access::Input], 1)).unwrap().id;
    let counts =
        rig.emulator.register(&CallableSpec::sub("counts", Signature::new([Access::Input], 2))).unwrap().id;
    rig.emulator.start(rig.ends.clone()).unwrap();
    let buffers = ["a", "b", "c"].map(|name| NamedBuffer::bytes(name, 8)).to_vec();
    let request = DomainRequest::packed([0, 1], buffers);
    let host = rig.emulator.create_buffer(8).unwrap();
    rig.emulator.fill_buffer(host, 1).unwrap();
    let mut reply = DomainAllocation::new();
    let submitted = submit(&*rig.emulator, 1, |o| {
        o.allocate_domain("d", &request, &mut reply)?;
        let mut args = context(&reply, 0);
        args.tensor(host_arg(host, 2, Access::InOut)).tensor(host_arg(host, 2, Access::Input));
        o.submit_next_level(looks, &args, None, ChipId(0))?;
        let mut args = TaskArgs::new();
        args.tensor(host_arg(host, 2, Access::Input)).scalar(1).scalar(2);
        o.submit_sub(counts, &args)
    });
    submitted.unwrap();
    assert_eq!(rig.ends.wait(RunId(1)), RunOutcome::success());
    let mut bytes = [0; 8];
    rig.emulator.read_buffer(host, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 1, 1, 1, 7, 7, 7, 7]);
    rig.emulator.close().unwrap();
}

/// A refused call has not happened: it is no call that a fault counts.
#[test]
fn misuse_of_a_buffer_is_found_before_the_call_counts() {
    let rig = Rig::two();
    let buffer = rig.emulator.create_buffer(5).unwrap();
    assert_eq!(rig.emulator.stats().host_bytes, 5);
    let zeros = rig.emulator.create_zeros(8).unwrap();
    for call in [Call::WriteBuffer, Call::ReadBuffer, Call::FillBuffer] {
        rig.emulator.arm(Fault::new(call, FaultEffect::Before));
    }
    let pending = rig.emulator.faults().pending();
    for (error, text) in [
        (rig.emulator.write_buffer(buffer, 4, &[0; 2]), "stay inside"),
        (rig.emulator.write_buffer(buffer, u64::MAX, &[0; 2]), "stay inside"),
        (rig.emulator.read_buffer(buffer, 0, &mut [0; 6]), "stay inside"),
        (rig.emulator.write_buffer(zeros, 0, &[0; 2]), "read-only"),
        (rig.emulator.fill_buffer(zeros, 0), "read-only"),
    ] {
        let error = error.unwrap_err();
        assert!(error.family() == Family::Misuse && error.to_string().contains(text), "{error}");
    }
    assert_eq!(rig.emulator.faults().pending(), pending);
    rig.emulator.faults().disarm();
    rig.emulator.write_buffer(buffer, 4, &[9]).unwrap();
    rig.emulator.release_buffer(buffer).unwrap();
    rig.emulator.release_buffer(zeros).unwrap();
    assert_eq!(rig.emulator.stats().host_bytes, 0);
    rig.close();
}

/// What close frees is no longer counted.
#[test]
fn close_counts_down_what_it_frees() {
    let rig = Rig::two();
    rig.emulator.create_buffer(100).unwrap();
    rig.emulator.alloc(ChipId(1), 100).unwrap();
    assert!(rig.emulator.stats().committed_bytes[1] >= 100);
    let emulator = rig.emulator.clone();
    rig.close();
    let stats = emulator.stats();
    assert_eq!((stats.host_bytes, stats.committed_bytes), (0, vec![0, 0]));
}

/// The sweep of a close goes by the order of allocation, not by that of the ids, which are used again.
#[test]
fn the_sweep_is_in_reverse_order_of_allocation_where_ids_are_reused() {
    let rig = Rig::two();
    let [a, b] = [(1, "a"), (2, "b")].map(|(run, name)| rig.retained(run, name, &signal()).id().unwrap());
    rig.emulator.release_domain(a).unwrap();
    let c = rig.retained(3, "c", &signal()).id().unwrap();
    assert_eq!(c.index(), a.index(), "the slot is used again");
    let journal = rig.emulator.journal();
    rig.close();
    let swept = |id: DomainId| {
        journal.position(|e| matches!(e, EventKind::Free { domain, cause: FreeCause::Sweep, .. } if *domain == id))
    };
    assert!(swept(c).unwrap() < swept(b).unwrap(), "{journal}");
}

/// A failed allocation without effect has none, and a domain of one run is not found as a retained one.
#[test]
fn an_allocation_that_fails_before_maps_nothing_and_ordinary_domains_are_not_found() {
    let rig = Rig::two();
    let mut reply = DomainAllocation::new();
    rig.emulator.arm(Fault::new(Call::AllocateDomain, FaultEffect::Before));
    let outcome = rig.run(1, |o| {
        let failed = o.allocate_domain("d", &signal(), &mut reply).unwrap_err();
        assert_eq!(failed.effect(), Effect::None);
        assert_eq!((rig.emulator.stats().domains, rig.emulator.stats().committed_bytes), (0, vec![0, 0]));
        o.allocate_domain("d", &signal(), &mut reply)?;
        let taken = o.get_or_allocate_domain("d", &signal(), true, &mut reply).unwrap_err();
        assert_eq!(taken.family(), Family::Misuse);
        Ok(())
    });
    assert_eq!(outcome.unwrap(), RunOutcome::success());
    assert_eq!(rig.emulator.stats().domains, 0);
    rig.close();
}

/// The first differing buffer is named.
#[test]
fn a_changed_buffer_is_named_by_its_position() {
    let rig = Rig::two();
    let request =
        |last| DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("a", 8), NamedBuffer::bytes(last, 8)]);
    rig.retained(1, "d", &request("b"));
    let error = rig
        .run(2, |o| o.get_or_allocate_domain("d", &request("c"), true, &mut DomainAllocation::new()))
        .unwrap_err();
    assert!(error.to_string().contains("buffer 1"), "{error}");
    rig.close();
}

/// A domain is kept only where every run that it is registered with keeps it, and every registration of a run counts.
#[test]
fn a_domain_is_kept_as_its_runs_ask() {
    let find = |o: &dyn Orchestrator, retain| {
        o.get_or_allocate_domain("d", &signal(), retain, &mut DomainAllocation::new())
    };
    for last in [true, false] {
        let rig = Rig::new(builder().completion(Completion::ByHand));
        let mut reply = DomainAllocation::new();
        rig.submit(1, |o| o.get_or_allocate_domain("d", &signal(), true, &mut reply)).unwrap();
        rig.emulator.complete(RunId(1)).unwrap();
        rig.wait(1);
        rig.submit(2, |o| find(o, true)).unwrap();
        rig.submit(3, |o| find(o, last)).unwrap();
        rig.emulator.complete(RunId(2)).unwrap();
        assert_eq!(rig.wait(2), RunOutcome::success());
        thread::scope(|scope| {
            let next = scope.spawn(|| rig.submit(4, |_| Ok(())));
            if !last {
                // Its domain is going to be freed, which comes first.
                rig.emulator.wait_until(|events| {
                    events.iter().any(|e| e.kind == EventKind::Wait { run: RunId(4), on: WaitFor::Cleanup })
                });
            }
            rig.emulator.complete(RunId(3)).unwrap();
            assert_eq!(rig.wait(3), RunOutcome::success());
            next.join().unwrap().unwrap();
        });
        rig.emulator.complete(RunId(4)).unwrap();
        rig.wait(4);
        let state = rig.emulator.domain_state(reply.id().unwrap()).unwrap();
        assert_eq!(state == DomainState::Freed, !last, "{state:?}");
        rig.close();
    }
    for order in [[true, false], [false, true]] {
        let rig = Rig::two();
        let id = rig.retained(1, "d", &signal()).id().unwrap();
        let outcome = rig.run(2, |o| {
            order.iter().try_for_each(|retain| {
                o.get_or_allocate_domain("d", &signal(), *retain, &mut DomainAllocation::new())
            })
        });
        assert_eq!(outcome.unwrap(), RunOutcome::success());
        assert_ne!(rig.emulator.domain_state(id).unwrap(), DomainState::Freed, "{order:?}");
        rig.close();
    }
}

/// Limits are permitted values: a task may reach each of them.
#[test]
fn a_task_may_take_as_many_arguments_as_the_limits_say() {
    let mut limits = Limits::default();
    (limits.tensors, limits.scalars) = (2, 3);
    for (argument_bytes, fits) in [(16 + 2 * 128 + 3 * 8, true), (16 + 2 * 128 + 3 * 8 - 1, false)] {
        limits.argument_bytes = argument_bytes;
        let emulator = builder().limits(limits).kernel("many", Signature::new([Access::Input; 2], 3), |_| Ok(()));
        let emulator = emulator.build().unwrap();
        let many = emulator.register(&chip_spec("many", &[Access::Input; 2], 3)).unwrap().id;
        let ends = Arc::new(Ends::default());
        emulator.start(ends.clone()).unwrap();
        let host = emulator.create_buffer(4).unwrap();
        let mut args = TaskArgs::new();
        args.tensor(host_arg(host, 1, Access::Input)).tensor(host_arg(host, 1, Access::Input));
        args.scalar(1).scalar(2).scalar(3);
        let submitted = submit(&*emulator, 1, |o| o.submit_next_level(many, &args, None, ChipId(0)));
        match submitted {
            Ok(()) => assert!(fits && ends.wait(RunId(1)) == RunOutcome::success()),
            Err(error) => assert!(!fits && error.to_string().contains("the arguments take 296 bytes"), "{error}"),
        }
        emulator.close().unwrap();
    }
}

/// Scratch belongs to the run that asked for it.
#[test]
fn scratch_of_another_run_is_refused() {
    let rig = Rig::new(builder().completion(Completion::ByHand));
    let id = Mutex::new(None);
    rig.submit(1, |o| {
        *id.lock().unwrap() = Some(o.alloc(64)?);
        Ok(())
    })
    .unwrap();
    let place = TensorPlace::Scratch(id.lock().unwrap().unwrap());
    let shape = Shape::new(&[1]).unwrap();
    let mut args = TaskArgs::new();
    args.scalar(0).tensor(TensorArg {
        place,
        shape,
        dtype: DataType::Int32,
        byte_offset: 0,
        access: Access::Output,
    });
    let refused = rig.submit(2, |o| o.submit_next_level(rig.handshake, &args, None, ChipId(0))).unwrap_err();
    assert!(refused.to_string().contains("no scratch of this run"), "{refused}");
    rig.emulator.complete(RunId(1)).unwrap();
    rig.wait(1);
    rig.close();
}

/// A start that is abandoned while it hangs fails, whatever it had managed; and one that failed lets every thread go,
/// for which no fault of a close is asked.
#[test]
fn an_abandoned_start_fails_and_a_failed_one_leaves_no_thread() {
    let emulator = builder().faults("start@chip1#1:hang".parse().unwrap()).build().unwrap();
    thread::scope(|scope| {
        let starting = scope.spawn(|| emulator.start(Arc::new(Ends::default())));
        emulator.faults().wait_hung(1);
        emulator.abandon();
        let error = starting.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("abandoned"), "{error}");
    });
    let emulator = builder().faults("start@chip1#1:before; close@chip0#1:before".parse().unwrap()).build().unwrap();
    assert!(emulator.start(Arc::new(Ends::default())).is_err());
    assert_eq!(emulator.stats().threads, 0);
    emulator.close().unwrap();
}

/// A graph that is still being built when the worker is abandoned is named, and can ask for nothing more.
#[test]
fn a_build_that_outlives_an_abandon_is_named_and_gets_nothing() {
    let rig = Rig::new(builder().abandon_grace(Duration::ZERO));
    let (entered, inside) = mpsc::channel();
    let (leave, left) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let rig = &rig;
        let building = scope.spawn(move || {
            rig.submit(1, |o| {
                entered.send(()).unwrap();
                left.recv().unwrap();
                o.alloc(8).map(drop)
            })
        });
        inside.recv().unwrap();
        let report = rig.emulator.abandon();
        assert!(report.left.iter().any(|left| left.contains("graph build of run1")), "{report:?}");
        leave.send(()).unwrap();
        let error = building.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("abandoned"), "{error}");
    });
}

/// While a direct call uses a chip no task starts, on no chip and on no sub-worker.
#[test]
fn tasks_start_after_the_direct_call_before_them() {
    let own = Own::new(|builder| kernels(builder.sub_workers(1)).sub("idle", Signature::default(), |_| Ok(())));
    let nothing = own.emulator.register(&chip_spec("nothing", &[], 0)).unwrap().id;
    let idle = own.emulator.register(&CallableSpec::sub("idle", Signature::default())).unwrap().id;
    own.emulator.start(own.ends.clone()).unwrap();
    own.emulator.arm(Fault::new(Call::Alloc, FaultEffect::Hang));
    thread::scope(|scope| {
        let allocating = scope.spawn(|| own.emulator.alloc(ChipId(0), 8));
        own.emulator.faults().wait_hung(1);
        submit(&*own.emulator, 1, |o| {
            o.submit_next_level(nothing, &TaskArgs::new(), None, ChipId(1))?;
            o.submit_sub(idle, &TaskArgs::new())
        })
        .unwrap();
        // Others get every chance to go on too early.
        for _ in 0..10_000 {
            thread::yield_now();
        }
        own.emulator.release_hangs();
        allocating.join().unwrap().unwrap();
    });
    assert_eq!(own.ends.wait(RunId(1)), RunOutcome::success());
    let journal = own.emulator.journal();
    let direct = |e: &EventKind| matches!(e, EventKind::DeviceAlloc { .. });
    let started = |e: &EventKind| matches!(e, EventKind::TaskStart { .. });
    assert!(journal.count(started) == 2 && journal.before(direct, started), "{journal}");
    own.emulator.close().unwrap();
}

/// A failed build returns when the tasks that had started are over.
#[test]
fn a_failed_build_waits_for_its_running_tasks() {
    let over = Arc::new(AtomicBool::new(false));
    let (started, running) = mpsc::channel();
    let (ending, started) = (over.clone(), Mutex::new(started));
    let rig = Own::new(move |builder| {
        builder.kernel("waits and ends", Signature::new([], 1), move |k| {
            let domain = k.domain(k.scalar(0)?)?;
            started.lock().unwrap().send(()).unwrap();
            let waited = domain.buffer(domain.rank(), 0)?.cell(0)?.wait(|v| v == 100);
            // Others get every chance to go on too early.
            for _ in 0..10_000 {
                thread::yield_now();
            }
            ending.store(true, Ordering::SeqCst);
            waited.map(drop)
        })
    });
    let task = rig.emulator.register(&chip_spec("waits and ends", &[], 1)).unwrap().id;
    rig.emulator.start(rig.ends.clone()).unwrap();
    let failed = submit(&*rig.emulator, 1, |o| {
        let mut reply = DomainAllocation::new();
        o.allocate_domain("d", &signal(), &mut reply)?;
        o.submit_next_level(task, &context(&reply, 0), None, ChipId(0))?;
        running.recv().unwrap();
        Err(BackendError::misuse(Call::Submit, "on purpose"))
    });
    assert!(failed.is_err());
    assert!(over.load(Ordering::SeqCst), "the build failed before its task was over");
    rig.emulator.close().unwrap();
}
