//! Faults, journals and the negative control over any backend, and the mocks.
#![allow(clippy::unwrap_used, clippy::panic, clippy::clone_on_ref_ptr, reason = "this is test code")]

mod common;

use std::sync::Arc;

use common::*;
use pto_mock::mocks::{MockBackend, MockOrchestrator, ScriptSubmit};
use pto_mock::{
    EarlyCopyBackend, Emulator, EventKind, Fault, FaultEffect, FaultSchedule, FaultyBackend, FreeCause,
    JournalBackend,
};
use pto_simpler_sys::*;

/// A started backend around an emulator.
struct Wrapped<B> {
    backend: B,
    emulator: Arc<Emulator>,
    ends: Arc<Ends>,
    nothing: CallableId,
    waits: CallableId,
}

fn wrapped<B: Backend>(wrap: impl FnOnce(Arc<Emulator>) -> B) -> Wrapped<B> {
    let emulator = kernels(builder()).build().unwrap();
    let backend = wrap(emulator.clone());
    let nothing = backend.register(&chip_spec("nothing", &[], 0)).unwrap().id;
    let waits = backend.register(&chip_spec("waits", &[], 1)).unwrap().id;
    let ends = Arc::new(Ends::default());
    backend.start(ends.clone()).unwrap();
    Wrapped { backend, emulator, ends, nothing, waits }
}

fn faulty(schedule: &str) -> Wrapped<FaultyBackend> {
    let schedule: FaultSchedule = schedule.parse().unwrap();
    wrapped(|emulator| FaultyBackend::new(emulator, schedule))
}

#[test]
fn a_wrapper_reports_each_effect_as_it_is() {
    for (text, effect, domains) in [
        ("allocate_domain#1:before", Effect::None, 0),
        ("allocate_domain@chip1#1:after", Effect::Done, 1),
        ("allocate_domain@chip0#1:no-reply", Effect::Unknown, 1),
    ] {
        let w = faulty(text);
        let mut seen = None;
        submit(&w.backend, 1, |o| {
            let mut reply = DomainAllocation::new();
            seen = o.allocate_domain("d", &signal(), &mut reply).err();
            assert_eq!(reply.id(), None, "the ids of a lost reply are lost");
            assert_eq!(w.emulator.stats().domains, domains);
            Ok(())
        })
        .unwrap();
        assert_eq!(seen.unwrap().effect(), effect, "{text}");
        assert_eq!(w.ends.wait(RunId(1)), RunOutcome::success());
        assert_eq!(w.emulator.stats().domains, 0, "the run's cleanup frees what the lost reply left");
        w.backend.close().unwrap();
    }
}

#[test]
fn a_hanging_call_goes_on_when_released() {
    let w = faulty("create_buffer#1:hang");
    std::thread::scope(|scope| {
        let created = scope.spawn(|| w.backend.create_buffer(8));
        w.backend.faults().wait_hung(1);
        assert_eq!(w.emulator.stats().host_buffers, 0);
        assert_eq!(w.backend.faults().release_all(), 1);
        assert!(created.join().unwrap().is_ok());
    });
    w.backend.close().unwrap();
}

#[test]
fn abandon_ends_what_hangs_in_a_wrapper() {
    let w = faulty("close#1:hang");
    std::thread::scope(|scope| {
        let closed = scope.spawn(|| w.backend.close());
        w.backend.faults().wait_hung(1);
        assert_eq!(w.backend.abandon(), AbandonReport::default());
        assert_eq!(closed.join().unwrap(), Ok(()));
    });
}

#[test]
fn s29_a_failed_entry_of_a_batch_skips_the_rest_of_its_chip_only() {
    for (text, results, copied) in [
        ("copy_to@chip0#1:before", [false, false, true, true], 2),
        ("copy_to@chip0#1:after", [false, false, true, true], 3),
        ("copy_to@chip1#2:before", [true, true, true, false], 3),
    ] {
        let w = faulty(text);
        let host = w.backend.create_zeros(64).unwrap();
        submit(&w.backend, 1, |o| {
            let mut reply = DomainAllocation::new();
            o.allocate_domain("d", &signal(), &mut reply)?;
            let copies = [0, 0, 1, 1].map(|chip| copy(buffer(&reply, chip, 0), host, 64));
            let mut outcome = Vec::new();
            o.copy_batch(&copies, &mut outcome)?;
            let done: Vec<bool> = outcome.iter().map(|r| *r == CopyResult::Done).collect();
            assert_eq!(done, results, "{text}: {outcome:?}");
            assert_eq!(w.emulator.journal().copies().len(), copied, "{text}");
            Ok(())
        })
        .unwrap();
        w.backend.close().unwrap();
    }
}

#[test]
fn task_and_run_faults_show_in_the_outcome() {
    for text in ["task@chip1#2:before", "task#3:after", "run#1:before", "run#1:no-reply"] {
        let w = faulty(text);
        submit(&w.backend, 1, |o| {
            for chip in [0, 1, 1] {
                o.submit_next_level(w.nothing, &TaskArgs::new(), None, ChipId(chip))?;
            }
            Ok(())
        })
        .unwrap();
        let outcome = w.ends.wait(RunId(1));
        assert!(outcome.result.is_err() && outcome.cleanup.is_none(), "{text}: {outcome:?}");
        w.backend.close().unwrap();
    }
    let w = faulty("run#1:after");
    submit(&w.backend, 1, |_| Ok(())).unwrap();
    let outcome = w.ends.wait(RunId(1));
    assert!(outcome.result.is_ok() && outcome.cleanup.is_some());
    w.backend.close().unwrap();
}

#[test]
fn s43_a_submission_that_fails_after_acceptance_is_accepted_all_the_same() {
    let w = faulty("submit#1:after; submit#2:before; submit#3:unwind");
    let error = submit(&w.backend, 1, |_| Ok(())).unwrap_err();
    assert_eq!(error.effect(), Effect::Done);
    assert_ne!(w.backend.run_state(RunId(1)), RunState::Unknown);
    assert!(submit(&w.backend, 2, |_| unreachable!("not forwarded")).is_err());
    assert_eq!(w.backend.run_state(RunId(2)), RunState::Unknown);
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| submit(&w.backend, 3, |_| Ok(()))));
    assert!(unwound.is_err());
    assert_ne!(w.backend.run_state(RunId(3)), RunState::Unknown);
    w.ends.wait(RunId(3));
    w.backend.close().unwrap();
    assert_eq!(w.ends.all().len(), 2);
}

#[test]
fn a_journal_from_outside_agrees_with_the_one_from_inside() {
    let w = wrapped(|emulator| JournalBackend::new(emulator));
    let (host, zeros) = (w.backend.create_buffer(64).unwrap(), w.backend.create_zeros(64).unwrap());
    w.backend.fill_buffer(host, 7).unwrap();
    let mut kept = DomainAllocation::new();
    for run in 1..=2 {
        submit(&w.backend, run, |o| {
            o.get_or_allocate_domain("kept", &signal(), true, &mut kept)?;
            if run == 1 {
                o.allocate_domain("own", &signal(), &mut DomainAllocation::new())?;
            }
            o.copy_to(&copy(buffer(&kept, 0, 0), host, 64))?;
            let mut results = Vec::new();
            o.copy_batch(&[0, 1].map(|chip| copy(buffer(&kept, chip, 0), zeros, 64)), &mut results)?;
            o.submit_next_level(w.nothing, &TaskArgs::new(), None, ChipId(1))
        })
        .unwrap();
        w.ends.wait(RunId(run));
    }
    assert!(submit(&w.backend, 3, |_| Err(BackendError::misuse(Call::Submit, "no"))).is_err());
    let domain = kept.id().unwrap();
    w.backend.release_domain(domain).unwrap();
    w.backend.release_domain(domain).unwrap();
    w.backend.release_buffer(host).unwrap();
    w.backend.close().unwrap();

    // What only one side can see, or sees at another time, is left out; copies of one batch are sorted by chip.
    let comparable = |journal: pto_mock::Journal| {
        let mut events = journal.select(|e| {
            !matches!(
                e,
                EventKind::TaskStart { .. }
                    | EventKind::TaskEnd { .. }
                    | EventKind::Fence(_)
                    | EventKind::Wait { .. }
                    | EventKind::Accept(_)
            )
        });
        events.sort_by_key(|e| match e {
            EventKind::Copy { run, chip, zero, .. } => (run.map(|r| r.0), *zero, chip.0),
            _ => (None, false, 0),
        });
        events
    };
    assert_eq!(comparable(w.backend.journal()), comparable(w.emulator.journal()));
    let journal = w.backend.journal();
    assert_eq!((journal.allocs(), journal.releases(), journal.frees()), (2, 1, 2));
    assert_eq!(journal.count(|e| matches!(e, EventKind::Copy { zero: true, .. })), 4);
    assert_eq!(journal.count(|e| matches!(e, EventKind::Accept(_))), 2);
    assert!(journal.contains(|e| matches!(e, EventKind::Free { cause: FreeCause::Cleanup(RunId(1)), .. })));
}

#[test]
fn wrappers_stack() {
    let w = wrapped(|emulator| {
        let faulty = FaultyBackend::new(emulator, Fault::new(Call::CopyTo, FaultEffect::Before).nth(2).into());
        JournalBackend::new(Arc::new(faulty))
    });
    let chip = ChipId(1);
    let (host, device) = (w.backend.create_buffer(8).unwrap(), w.backend.alloc(chip, 8).unwrap());
    let to = copy(DevicePlace::Resident(device), host, 8);
    assert!(w.backend.copy_to(&to).is_ok());
    assert!(w.backend.copy_to(&to).is_err());
    w.backend.copy_from(host, DevicePlace::Resident(device), 8).unwrap();
    w.backend.free(device).unwrap();
    w.backend.close().unwrap();
    assert_eq!(w.backend.journal().copies().len(), 1);
}

#[test]
fn s27_the_early_copy_backend_wipes_under_a_running_dispatch() {
    let backend = EarlyCopyBackend::new(kernels(builder())).unwrap();
    let emulator = backend.emulator().clone();
    let w = Wrapped {
        nothing: backend.register(&chip_spec("nothing", &[], 0)).unwrap().id,
        waits: backend.register(&chip_spec("waits", &[], 1)).unwrap().id,
        backend,
        emulator,
        ends: Arc::new(Ends::default()),
    };
    w.backend.start(w.ends.clone()).unwrap();
    let zeros = w.backend.create_zeros(64).unwrap();
    let mut kept = DomainAllocation::new();
    submit(&w.backend, 1, |o| o.get_or_allocate_domain("d", &signal(), true, &mut kept)).unwrap();
    w.ends.wait(RunId(1));
    submit(&w.backend, 2, |o| o.submit_next_level(w.waits, &context(&kept, 0), None, ChipId(0))).unwrap();
    submit(&w.backend, 3, |o| o.copy_to(&copy(buffer(&kept, 0, 0), zeros, 64))).unwrap();
    assert!(!w.emulator.journal().contains(|e| *e == EventKind::Fence(RunId(2))));
    assert_eq!(w.emulator.journal().copies_of(RunId(3)).len(), 1);
    w.emulator.poke(kept.id().unwrap(), ChipId(0), 0, &100_i32.to_ne_bytes()).unwrap();
    w.ends.wait(RunId(3));
    w.backend.close().unwrap();
}

#[test]
fn a_mock_backend_calls_the_builder_with_a_scripted_orchestrator() {
    let mut backend = MockBackend::new();
    let place = DevicePlace::Resident(DeviceBufferId::new(0, 0));
    let expected = copy(place, HostBufferId::new(3, 1), 64);
    backend.script_submit(RunId(7), move |_| {
        let mut order = mockall_sequence();
        let mut orchestrator = MockOrchestrator::new();
        orchestrator
            .expect_get_or_allocate_domain()
            .times(1)
            .in_sequence(&mut order)
            .withf(|name, _, retain, _| name == "d" && *retain)
            .returning(|_, request, _, reply| {
                reply.begin(DomainId::new(4, 2), request.buffers.len());
                Ok(())
            });
        orchestrator
            .expect_copy_to()
            .times(1)
            .in_sequence(&mut order)
            .withf(move |copy| *copy == expected)
            .returning(|_| Ok(()));
        orchestrator.expect_scope().times(1).in_sequence(&mut order).returning(|body| body().map_err(Into::into));
        orchestrator
    });
    let mut inside = false;
    submit(&backend, 7, |o| {
        let mut reply = DomainAllocation::new();
        o.get_or_allocate_domain("d", &signal(), true, &mut reply)?;
        assert_eq!(reply.id(), Some(DomainId::new(4, 2)));
        o.copy_to(&expected)?;
        let scoped = o.scope(&mut || {
            inside = true;
            Ok(())
        });
        assert_eq!(scoped, Ok(()));
        Ok(())
    })
    .unwrap();
    assert!(inside);
}

fn mockall_sequence() -> mockall::Sequence {
    mockall::Sequence::new()
}

#[test]
#[should_panic(expected = "copy_to")]
fn a_mock_notices_a_call_that_nobody_expects() {
    let mut backend = MockBackend::new();
    backend.script_submit(RunId(1), |_| MockOrchestrator::new());
    let place = DevicePlace::Resident(DeviceBufferId::new(0, 0));
    let _ = submit(&backend, 1, |o| o.copy_to(&copy(place, HostBufferId::new(0, 0), 1)));
}
