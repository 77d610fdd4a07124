//! Runs: order, fences, depth, acceptance, ends.

#![allow(clippy::unwrap_used, clippy::panic, clippy::clone_on_ref_ptr, reason = "this is test code")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use common::*;
use pto_mock::{Completion, Event, EventKind, KernelObject, WaitFor};
use pto_simpler_sys::*;

/// The two-rank handshake over `domain`, with results in host buffers.
fn handshake(rig: &Rig, o: &dyn Orchestrator, domain: &DomainAllocation, out: [HostBufferId; 2]) {
    let args: Vec<TaskArgs> = (0..2)
        .map(|rank| {
            let mut args = context(domain, rank);
            args.tensor(TensorArg {
                place: TensorPlace::Host(out[rank]),
                shape: Shape::new(&[1]).unwrap(),
                dtype: DataType::Int32,
                byte_offset: 0,
                access: Access::Output,
            });
            args
        })
        .collect();
    o.submit_next_level_group(rig.handshake, &args, None, &[ChipId(0), ChipId(1)]).unwrap();
}

fn results(rig: &Rig, out: [HostBufferId; 2]) -> [i32; 2] {
    out.map(|buffer| {
        let mut bytes = [0; 4];
        rig.emulator.read_buffer(buffer, 0, &mut bytes).unwrap();
        i32::from_ne_bytes(bytes)
    })
}

#[test]
fn s23_the_handshake_reads_two_and_one_in_a_fresh_window_and_grows_in_a_kept_one() {
    let rig = Rig::two();
    let out = [0, 1].map(|_| rig.emulator.create_buffer(4).unwrap());
    for run in 1..=3 {
        let mut reply = DomainAllocation::new();
        let outcome = rig.run(run, |o| {
            o.get_or_allocate_domain("kept", &signal(), true, &mut reply)?;
            handshake(&rig, o, &reply, out);
            Ok(())
        });
        assert_eq!(outcome.unwrap(), RunOutcome::success());
        // Both additions of a round may be seen or only the peer's newest: here each rank adds once per round, so
        // the sum is exact once both are done, and the wait for 1 passes at once from the second round on.
        let seen = results(&rig, out);
        if run == 1 {
            assert_eq!(seen, [2, 1]);
        }
        let cells = [0, 1].map(|chip| rig.peek(reply.id().unwrap(), chip, 0, 4));
        assert_eq!(cells, [2 * run as i32, run as i32].map(|v| v.to_ne_bytes().to_vec()));
    }
    assert_eq!(rig.emulator.journal().allocs(), 1);
    rig.close();
}

#[test]
fn an_empty_run_ends_and_is_reported_once_with_its_state_known() {
    let rig = Rig::two();
    assert_eq!(rig.emulator.run_state(RunId(1)), RunState::Unknown);
    assert_eq!(rig.run(1, |_| Ok(())).unwrap(), RunOutcome::success());
    assert_eq!(rig.emulator.run_state(RunId(1)), RunState::Ended);
    let again = rig.submit(1, |_| unreachable!("a used number is refused before the build")).unwrap_err();
    assert_eq!(again.family(), Family::Misuse);
    assert_eq!(rig.ends.all().len(), 1);
    rig.close();
}

#[test]
fn runs_end_in_acceptance_order_and_the_third_submission_waits_before_its_build() {
    for depth in [1, 2] {
        let rig = Rig::new(builder().depth(depth).completion(Completion::ByHand));
        for run in 1..=u64::from(depth) {
            rig.submit(run, |o| o.submit_next_level(rig.nothing, &TaskArgs::new(), None, ChipId(0))).unwrap();
        }
        let built = AtomicBool::new(false);
        let next = u64::from(depth) + 1;
        std::thread::scope(|scope| {
            let third = scope.spawn(|| {
                rig.submit(next, |_| {
                    built.store(true, Ordering::SeqCst);
                    Ok(())
                })
            });
            rig.emulator.wait_until(|events| {
                events.iter().any(|e| e.kind == EventKind::Wait { run: RunId(next), on: WaitFor::Depth })
            });
            assert!(!built.load(Ordering::SeqCst));
            // Released out of order, fences still pass in order.
            for run in (1..=u64::from(depth)).rev() {
                rig.emulator.complete(RunId(run)).unwrap();
            }
            third.join().unwrap().unwrap();
            rig.emulator.complete(RunId(next)).unwrap();
        });
        rig.wait(next);
        let order: Vec<_> = rig.ends.all().into_iter().map(|(run, _)| run.0).collect();
        assert_eq!(order, (1..=next).collect::<Vec<_>>());
        rig.close();
    }
}

#[test]
fn tasks_of_the_next_run_start_after_the_fence_of_the_previous_one() {
    let rig = Rig::new(builder().completion(Completion::ByHand));
    for run in 1..=2 {
        rig.submit(run, |o| o.submit_next_level(rig.nothing, &TaskArgs::new(), None, ChipId(1))).unwrap();
    }
    rig.emulator.complete(RunId(1)).unwrap();
    rig.emulator.complete(RunId(2)).unwrap();
    rig.wait(2);
    assert!(
        rig.emulator.journal().before(
            |e| *e == EventKind::Fence(RunId(1)),
            |e| matches!(e, EventKind::TaskStart { run: RunId(2), .. })
        )
    );
    rig.close();
}

#[test]
fn s27_control_of_a_run_waits_for_the_fence_of_the_previous_one() {
    let rig = Rig::two();
    let domain = rig.retained(1, "d", &signal());
    let zeros = rig.emulator.create_zeros(64).unwrap();
    rig.submit(2, |o| o.submit_next_level(rig.waits, &context(&domain, 0), None, ChipId(0))).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| rig.submit(3, |o| o.copy_to(&copy(buffer(&domain, 0, 0), zeros, 64))));
        rig.emulator.wait_until(|events| {
            events.iter().any(|e| e.kind == EventKind::Wait { run: RunId(3), on: WaitFor::Head })
        });
        rig.emulator.poke(domain.id().unwrap(), ChipId(0), 0, &100_i32.to_ne_bytes()).unwrap();
        second.join().unwrap().unwrap();
    });
    assert_eq!(rig.wait(2), RunOutcome::success());
    assert_eq!(rig.wait(3), RunOutcome::success());
    assert!(rig.emulator.journal().before(
        |e| *e == EventKind::Fence(RunId(2)),
        |e| matches!(e, EventKind::Copy { run: Some(RunId(3)), zero: true, nbytes: 64, .. })
    ));
    assert_eq!(rig.peek(domain.id().unwrap(), 0, 0, 4), [0; 4]);
    rig.close();
}

#[test]
fn s27_negative_control_early_copies_are_visible_in_the_journal_and_in_memory() {
    let rig = Rig::new(builder().early_control(true));
    let domain = rig.retained(1, "d", &signal());
    let id = domain.id().unwrap();
    let zeros = rig.emulator.create_zeros(64).unwrap();
    rig.emulator.poke(id, ChipId(0), 0, &5_i32.to_ne_bytes()).unwrap();
    rig.submit(2, |o| o.submit_next_level(rig.waits, &context(&domain, 0), None, ChipId(0))).unwrap();
    rig.submit(3, |o| {
        let mut results = Vec::new();
        let copies = [0, 1].map(|chip| copy(buffer(&domain, chip, 0), zeros, 64));
        o.copy_batch(&copies, &mut results)?;
        assert_eq!(results, [CopyResult::Done, CopyResult::Done]);
        Ok(())
    })
    .unwrap();
    let journal = rig.emulator.journal();
    assert!(journal.contains(|e| matches!(e, EventKind::Copy { run: Some(RunId(3)), .. })));
    assert!(!journal.contains(|e| *e == EventKind::Fence(RunId(2))), "the copy came before the fence");
    assert_eq!(rig.peek(id, 0, 0, 4), [0; 4], "the unread cell was wiped");
    rig.emulator.poke(id, ChipId(0), 0, &100_i32.to_ne_bytes()).unwrap();
    rig.wait(3);
    rig.close();
}

#[test]
fn a_run_that_allocated_makes_the_next_submission_wait_for_its_cleanup() {
    let rig = Rig::new(builder().completion(Completion::ByHand));
    let mut reply = DomainAllocation::new();
    rig.submit(1, |o| o.allocate_domain("d", &signal(), &mut reply)).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| rig.submit(2, |_| Ok(())));
        rig.emulator.wait_until(|events| {
            events.iter().any(|e| e.kind == EventKind::Wait { run: RunId(2), on: WaitFor::Cleanup })
        });
        rig.emulator.complete(RunId(1)).unwrap();
        second.join().unwrap().unwrap();
    });
    rig.emulator.complete(RunId(2)).unwrap();
    rig.wait(2);
    let journal = rig.emulator.journal();
    assert!(journal.before(|e| *e == EventKind::Cleanup(RunId(1)), |e| *e == EventKind::Admit(RunId(2))));
    assert_eq!(rig.emulator.domain_state(reply.id().unwrap()), Ok(DomainState::Freed));
    rig.close();
}

#[test]
fn control_is_refused_after_the_first_task() {
    let rig = Rig::two();
    let host = rig.emulator.create_buffer(64).unwrap();
    let domain = rig.retained(1, "d", &signal());
    let outcome = rig.run(2, |o| {
        o.submit_next_level(rig.nothing, &TaskArgs::new(), None, ChipId(0))?;
        let mut reply = DomainAllocation::new();
        let mut results = vec![CopyResult::Done];
        for refused in [
            o.allocate_domain("x", &signal(), &mut reply),
            o.get_or_allocate_domain("y", &signal(), true, &mut reply),
            o.copy_to(&copy(buffer(&domain, 0, 0), host, 64)),
            o.copy_from(host, buffer(&domain, 0, 0), 64),
            o.copy_batch(&[copy(buffer(&domain, 0, 0), host, 64)], &mut results),
        ] {
            let error = refused.unwrap_err();
            assert_eq!(error.family(), Family::Misuse);
            assert!(error.to_string().contains("cannot follow a task submission"), "{error}");
        }
        assert!(results.is_empty());
        // Finding a retained domain is not control.
        o.get_or_allocate_domain("d", &signal(), true, &mut reply)?;
        assert_eq!(reply.id(), domain.id());
        Ok(())
    });
    assert_eq!(outcome.unwrap(), RunOutcome::success());
    rig.close();
}

#[test]
fn a_failed_or_panicking_kernel_fails_its_run_and_no_other() {
    let rig = Rig::two();
    for (run, kernel, text) in [(1, rig.fails, "on purpose"), (2, rig.panics, "kernel panic on purpose")] {
        let outcome = rig.run(run, |o| o.submit_next_level(kernel, &TaskArgs::new(), None, ChipId(1))).unwrap();
        let error = outcome.result.unwrap_err();
        let failure = error.runtime().unwrap();
        assert_eq!((failure.kind, failure.chip, failure.fatal), (FailureKind::Task, Some(ChipId(1)), false));
        assert!(failure.message.contains(text), "{failure}");
    }
    let ok = rig.run(3, |o| o.submit_next_level(rig.nothing, &TaskArgs::new(), None, ChipId(1)));
    assert_eq!(ok.unwrap(), RunOutcome::success());
    rig.close();
}

#[test]
fn a_failed_task_interrupts_the_waits_of_its_peers_and_cancels_what_has_not_started() {
    let rig = Rig::two();
    let domain = rig.retained(1, "d", &signal());
    let outcome = rig.run(2, |o| {
        o.submit_next_level(rig.waits, &context(&domain, 0), None, ChipId(0))?;
        rig.emulator.wait_until(|events| events.iter().any(|e| matches!(e.kind, EventKind::TaskStart { .. })));
        o.submit_next_level(rig.nothing, &TaskArgs::new(), None, ChipId(0))?;
        o.submit_next_level(rig.fails, &TaskArgs::new(), None, ChipId(1))
    });
    assert_eq!(outcome.unwrap().result.unwrap_err().runtime().unwrap().chip, Some(ChipId(1)));
    let journal = rig.emulator.journal();
    assert_eq!(journal.count(|e| matches!(e, EventKind::TaskCancel { .. })), 1);
    // The failed run doomed the domain only if it was registered, which it was not.
    assert_eq!(rig.emulator.domain_state(domain.id().unwrap()), Ok(DomainState::Live));
    rig.close();
}

#[test]
fn where_a_failed_task_is_final_its_chip_refuses_every_later_task() {
    let rig = Rig::new(builder().failed_task_is_final(true));
    let first = rig.run(1, |o| o.submit_next_level(rig.fails, &TaskArgs::new(), None, ChipId(0))).unwrap();
    assert!(first.result.unwrap_err().must_reprepare());
    let second = rig.run(2, |o| o.submit_next_level(rig.nothing, &TaskArgs::new(), None, ChipId(0))).unwrap();
    let error = second.result.unwrap_err();
    assert!(error.must_reprepare() && error.to_string().contains("poisoned"), "{error}");
    let other = rig.run(3, |o| o.submit_next_level(rig.nothing, &TaskArgs::new(), None, ChipId(1))).unwrap();
    assert_eq!(other, RunOutcome::success());
    rig.close();
}

#[test]
fn a_failed_build_cancels_its_tasks_frees_its_domains_and_reports_no_end() {
    let rig = Rig::two();
    let mut kept = DomainAllocation::new();
    let error = rig.submit(1, |o| {
        o.get_or_allocate_domain("kept", &signal(), true, &mut kept)?;
        o.submit_next_level(rig.waits, &context(&kept, 0), None, ChipId(0))?;
        Err(BackendError::misuse(Call::Submit, "changed my mind"))
    });
    assert_eq!(error, Err(BackendError::misuse(Call::Submit, "changed my mind")));
    assert_eq!(rig.emulator.run_state(RunId(1)), RunState::Unknown);
    assert_eq!(rig.emulator.domain_state(kept.id().unwrap()), Ok(DomainState::Freed));
    assert_eq!(rig.run(2, |_| Ok(())).unwrap(), RunOutcome::success());
    assert_eq!(rig.ends.all().len(), 1);
    rig.close();
}

#[test]
fn s55_a_panicking_builder_unwinds_through_submit_and_leaves_the_worker_usable() {
    let rig = Rig::two();
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        rig.submit(1, |o| {
            let mut reply = DomainAllocation::new();
            o.allocate_domain("d", &signal(), &mut reply)?;
            panic!("builder panic on purpose")
        })
    }));
    assert_eq!(unwound.unwrap_err().downcast_ref::<&str>(), Some(&"builder panic on purpose"));
    assert_eq!(rig.emulator.stats().domains, 0);
    assert_eq!(rig.run(2, |_| Ok(())).unwrap(), RunOutcome::success());
    rig.close();
}

#[test]
fn s10_reentrant_calls_are_refused_at_once() {
    let rig = Rig::two();
    let host = rig.emulator.create_buffer(8).unwrap();
    let outcome = rig.run(1, |_| {
        let nested = rig.submit(2, |_| Ok(()));
        let refused = [
            nested,
            rig.emulator.close(),
            rig.emulator.start(Arc::new(Ends::default())).map(|_| ()),
            rig.emulator.release_buffer(host),
        ];
        for error in refused {
            assert_eq!(error.unwrap_err().family(), Family::Misuse);
        }
        assert_eq!(rig.emulator.abandon().left.len(), 1);
        // Creation, reads and writes are allowed.
        let other = rig.emulator.create_buffer(8)?;
        rig.emulator.write_buffer(other, 0, &[1; 8])?;
        Ok(())
    });
    assert_eq!(outcome.unwrap(), RunOutcome::success());
    rig.emulator.release_buffer(host).unwrap();
    rig.close();
}

#[test]
fn a_group_starts_when_all_its_chips_are_free() {
    let rig = Rig::two();
    let domain = rig.retained(1, "d", &signal());
    let out = [0, 1].map(|_| rig.emulator.create_buffer(4).unwrap());
    rig.submit(2, |o| {
        o.submit_next_level(rig.waits, &context(&domain, 1), None, ChipId(1))?;
        handshake(&rig, o, &domain, out);
        Ok(())
    })
    .unwrap();
    rig.emulator.wait_until(|events| events.iter().any(|e| matches!(e.kind, EventKind::TaskStart { .. })));
    assert_eq!(rig.emulator.journal().count(|e| matches!(e, EventKind::TaskStart { .. })), 1);
    rig.emulator.poke(domain.id().unwrap(), ChipId(1), 0, &100_i32.to_ne_bytes()).unwrap();
    assert_eq!(rig.wait(2), RunOutcome::success());
    assert_eq!(results(&rig, out)[0], 2);
    rig.close();
}

#[test]
fn a_run_failed_by_hand_is_reported_failed_and_interrupts_its_waits() {
    let rig = Rig::two();
    let domain = rig.retained(1, "d", &signal());
    rig.submit(2, |o| o.submit_next_level(rig.waits, &context(&domain, 0), None, ChipId(0))).unwrap();
    let failure = RuntimeFailure::new(Call::Run, "Test", "by hand").with_kind(FailureKind::DeviceTimeout);
    rig.emulator.fail(RunId(2), failure.clone()).unwrap();
    assert_eq!(rig.wait(2).result, Err(failure.into()));
    assert_eq!(rig.emulator.complete(RunId(2)).unwrap_err().family(), Family::Misuse);
    rig.close();
}

/// The id is looked up again when a submission's turn has come: of two that found it free, one gets it.
#[test]
fn a_run_id_that_was_taken_while_waiting_is_refused() {
    let rig = Rig::two();
    let (builds, mut results) = (AtomicU32::new(0), Vec::new());
    let second = || {
        rig.submit(2, |_| {
            builds.fetch_add(1, Ordering::SeqCst);
            Ok(())
        })
    };
    thread::scope(|scope| {
        let mut others = Vec::new();
        rig.submit(1, |_| {
            others.extend((0..2).map(|_| scope.spawn(second)));
            let waits = |e: &&Event| e.kind == EventKind::Wait { run: RunId(2), on: WaitFor::Build };
            rig.emulator.wait_until(|events| events.iter().filter(waits).count() == 2);
            Ok(())
        })
        .unwrap();
        results.extend(others.into_iter().map(|other| other.join().unwrap()));
    });
    results.sort_by_key(Result::is_err);
    assert_eq!((&results[0], builds.load(Ordering::SeqCst)), (&Ok(()), 1));
    let error = results[1].as_ref().unwrap_err();
    assert!(error.family() == Family::Misuse && error.to_string().contains("submitted meanwhile"), "{error}");
    rig.wait(2);
    assert_eq!(rig.ends.all().len(), 2);
    rig.close();
}

/// Scratch is freed at the end of its run, however that comes about, and of a build that fails.
#[test]
fn scratch_is_freed_with_its_run() {
    let rig = Rig::new(builder().completion(Completion::ByHand));
    let scratch = || rig.emulator.stats().scratch;
    rig.submit(1, |o| o.alloc(64).and_then(|_| o.alloc(1)).map(|_| ())).unwrap();
    assert_eq!(scratch(), 2);
    rig.emulator.complete(RunId(1)).unwrap();
    rig.wait(1);
    assert_eq!(scratch(), 0);
    rig.submit(2, |o| o.alloc(64).map(|_| ())).unwrap();
    rig.emulator.fail(RunId(2), RuntimeFailure::new(Call::Run, "Test", "by hand")).unwrap();
    rig.wait(2);
    assert_eq!(scratch(), 0);
    let failed = rig.submit(3, |o| {
        o.alloc(64)?;
        assert_eq!(scratch(), 1);
        Err(BackendError::misuse(Call::AllocScratch, "on purpose"))
    });
    assert!(failed.is_err());
    assert_eq!(scratch(), 0);
    rig.close();
}

/// The swimlane profile needs a place for its output: without one it is refused wherever a configuration is given, and
/// nothing is queued.
#[test]
fn a_swimlane_without_an_output_prefix_is_refused() {
    struct Nobody;
    impl EntryHost for Nobody {
        fn open(&self, _task: bool) -> Result<(), BuildFailed> {
            Err(BuildFailed)
        }

        fn retains(&self) -> bool {
            false
        }
        fn domain(&self, _: &str, _: &DomainRequest, _: &mut DomainAllocation) -> Result<(), BuildFailed> {
            Err(BuildFailed)
        }
    }
    let refused = |error: &BackendError, call: Call| {
        assert_eq!((error.family(), error.call()), (Family::Misuse, call), "{error}");
        assert!(error.to_string().contains("output_prefix"), "{error}");
    };
    let rig = Rig::two();
    let entry = CallableSpec {
        name: "entry".into(),
        kind: CallableKind::Entry,
        signature: None,
        source: KernelObject::entry(|_| panic!("an entry under a refused configuration")).into_source(),
    };
    let entry = rig.emulator.register(&entry).unwrap().id;
    let (mut wrong, mut right) = (CallConfig::new(), CallConfig::new());
    wrong.swimlane = true;
    right.swimlane = true;
    right.output_prefix = Some("profile".into());
    let mut unbuilt = Graph::new(|_: &dyn Orchestrator| panic!("a build under it"));
    match rig.emulator.submit(RunId(1), &wrong, &mut unbuilt) {
        Err(SubmitError::Backend(error)) => refused(&error, Call::Submit),
        other => panic!("{other:?}"),
    }
    assert_eq!(rig.emulator.run_state(RunId(1)), RunState::Unknown);
    let args = TaskArgs::new();
    let mut graph = Graph::new(|o: &dyn Orchestrator| {
        let one = o.submit_next_level(rig.nothing, &args, Some(&wrong), ChipId(0));
        refused(&one.unwrap_err(), Call::SubmitNextLevel);
        let group = o.submit_next_level_group(rig.nothing, std::slice::from_ref(&args), Some(&wrong), &[ChipId(0)]);
        refused(&group.unwrap_err(), Call::SubmitNextLevelGroup);
        let call = EntryCall { args: &[], config: &wrong, frame: 0 };
        let Err(CallbackError::Backend(error)) = o.run_entry(entry, &call, &Nobody) else { panic!("it ran") };
        refused(&error, Call::RunEntry);
        o.submit_next_level(rig.nothing, &args, Some(&right), ChipId(1))
    });
    rig.emulator.submit(RunId(1), &right, &mut graph).unwrap();
    assert_eq!(rig.wait(1), RunOutcome::success());
    assert_eq!(rig.emulator.journal().count(|e| matches!(e, EventKind::TaskSubmit { .. })), 1);
    rig.close();
}
