//! Domains, memory and copies: validation, mappings, reuse, release, limits.
#![allow(clippy::unwrap_used, clippy::panic, clippy::clone_on_ref_ptr, reason = "this is test code")]

mod common;

use std::sync::{Arc, Mutex};

use common::*;
use pto_mock::{
    Completion, EventKind, Fault, FaultEffect, FaultKind, FreeCause, KernelError, KernelObject, Mapping, MemoryView,
};
use pto_simpler_sys::*;

#[test]
fn s20_invalid_requests_are_refused_with_no_effect() {
    let rig = Rig::new(builder().limits({
        let mut limits = Limits::default();
        limits.ranks = 2;
        limits
    }));
    let named = |bytes: &[u64]| bytes.iter().map(|b| NamedBuffer::bytes(format!("b{b}"), *b)).collect::<Vec<_>>();
    let request = |workers: &[u32], window_bytes, buffers: Vec<NamedBuffer>| DomainRequest {
        workers: workers.iter().copied().map(ChipId).collect(),
        window_bytes,
        buffers,
    };
    let twice = vec![NamedBuffer::bytes("b", 4), NamedBuffer::bytes("b", 4)];
    let cases = [
        (request(&[], 64, vec![]), "non-empty"),
        (request(&[0, 0], 64, vec![]), "duplicates"),
        (request(&[2], 64, vec![]), "outside [0, 2)"),
        (request(&[0, 1, 0], 64, vec![]), "at most 2 ranks"),
        (request(&[0], 0, vec![]), "must be positive"),
        (request(&[0], 64, twice), "duplicate buffer names"),
        (request(&[0], 64, named(&[40, 41])), "exceeds window_bytes=64"),
        (request(&[0], u64::MAX, named(&[u64::MAX, 1])), "64 bits"),
    ];
    let outcome = rig.run(1, |o| {
        for (request, text) in &cases {
            let mut reply = DomainAllocation::new();
            for error in [
                o.allocate_domain("d", request, &mut reply).unwrap_err(),
                o.get_or_allocate_domain("d", request, true, &mut reply).unwrap_err(),
            ] {
                assert_eq!(error.family(), Family::Misuse);
                assert!(error.to_string().contains(text), "{error} / {text}");
            }
        }
        Ok(())
    });
    assert_eq!(outcome.unwrap(), RunOutcome::success());
    assert_eq!(rig.emulator.journal().allocs(), 0);
    rig.close();
}

#[test]
fn a_window_larger_than_all_memory_is_out_of_shared_memory_and_leaves_nothing() {
    for mapping in [Mapping::Exact, Mapping::Huge2M] {
        let rig = Rig::new(builder().mapping(mapping));
        for window_bytes in [1 << 60, u64::MAX] {
            let request = DomainRequest { window_bytes, ..signal() };
            let mut seen = None;
            rig.submit(window_bytes, |o| {
                seen = o.allocate_domain("d", &request, &mut DomainAllocation::new()).err();
                // The name is free: the failed request did nothing.
                o.allocate_domain("d", &signal(), &mut DomainAllocation::new())
            })
            .unwrap();
            let error = seen.unwrap();
            assert!(error.may_retry());
            assert!(
                matches!(error.runtime().unwrap().kind, FailureKind::OutOfSharedMemory { requested_bytes } if requested_bytes >= window_bytes)
            );
            rig.wait(window_bytes);
        }
        rig.close();
    }
}

#[test]
fn s25_mappings_round_up_and_padding_is_never_written() {
    for (mapping, mapped) in [(Mapping::Exact, 64), (Mapping::Pages4K, 4096), (Mapping::Huge2M, 2 << 20)] {
        let rig = Rig::new(builder().mapping(mapping).dirty_windows(true));
        let domain = rig.retained(1, "d", &signal());
        let id = domain.id().unwrap();
        assert_eq!(domain.member(1).unwrap().mapped_bytes, mapped);
        assert_eq!(rig.emulator.committed_device_memory(ChipId(0)), Ok(mapped));
        assert_eq!(rig.peek(id, 1, 0, 64), [0; 64], "S33: a dirty window is cleared");
        let zeros = rig.emulator.create_zeros(64).unwrap();
        rig.run(2, |o| o.copy_to(&copy(buffer(&domain, 1, 0), zeros, 64))).unwrap();
        if mapped > 64 {
            let padding = rig.peek(id, 1, 64, mapped as usize - 64);
            assert!(padding.iter().all(|b| *b == 0xEE));
        }
        assert!(rig.emulator.peek(id, ChipId(1), mapped, &mut [0]).is_err());
        rig.close();
    }
}

#[test]
fn s25_a_short_mapping_can_be_imitated() {
    let rig = Rig::new(builder().reported_mapping(|_, chip, bytes| if chip == ChipId(1) { 48 } else { bytes }));
    let domain = rig.retained(1, "d", &signal());
    let mapped: Vec<u64> = domain.members().iter().map(|m| m.mapped_bytes).collect();
    assert_eq!(mapped, [64, 48]);
    rig.close();
}

#[test]
fn workers_order_gives_ranks_and_buffers_are_packed_without_alignment() {
    let rig = Rig::two();
    let request = DomainRequest::packed([1, 0], vec![NamedBuffer::bytes("a", 3), NamedBuffer::bytes("b", 5)]);
    let domain = rig.retained(1, "d", &request);
    let chips: Vec<_> = domain.members().iter().map(|m| (m.chip.0, m.rank)).collect();
    assert_eq!(chips, [(1, 0), (0, 1)]);
    let base = domain.member(0).unwrap().base;
    assert_eq!(
        domain.buffers(0),
        [BufferWindow { address: base, nbytes: 3 }, BufferWindow { address: base + 3, nbytes: 5 }]
    );
    rig.close();
}

#[test]
fn s15_a_changed_request_is_refused_naming_the_difference() {
    let rig = Rig::two();
    let kept = rig.retained(1, "d", &signal());
    let mut renamed = signal();
    renamed.buffers[0].name = "other".into();
    let changes = [
        (DomainRequest { window_bytes: 128, ..signal() }, "window_bytes 64 against 128"),
        (DomainRequest { workers: vec![ChipId(0)], ..signal() }, "workers"),
        (DomainRequest { workers: vec![ChipId(1), ChipId(0)], ..signal() }, "workers"),
        (DomainRequest { buffers: vec![], ..signal() }, "1 buffers against 0"),
        (renamed, "other"),
    ];
    let outcome = rig.run(2, |o| {
        let mut reply = DomainAllocation::new();
        for (request, text) in &changes {
            let error = o.get_or_allocate_domain("d", request, true, &mut reply).unwrap_err();
            assert!(error.family() == Family::Misuse && error.to_string().contains(text), "{error}");
            assert_eq!(reply.id(), None);
        }
        let live = o.allocate_domain("d", &signal(), &mut reply).unwrap_err();
        assert!(live.to_string().contains("already live"), "{live}");
        o.get_or_allocate_domain("d", &signal(), true, &mut reply)?;
        assert_eq!(reply, kept, "the reply describes the same mapping");
        Ok(())
    });
    assert_eq!(outcome.unwrap(), RunOutcome::success());
    assert_eq!(rig.emulator.journal().allocs(), 1);
    rig.close();
}

#[test]
fn a_run_frees_its_domains_last_first_and_keeps_retained_ones() {
    let rig = Rig::two();
    let mut ids = Vec::new();
    rig.run(1, |o| {
        let mut reply = DomainAllocation::new();
        for name in ["a", "b"] {
            o.allocate_domain(name, &signal(), &mut reply)?;
            ids.push(reply.id().unwrap());
        }
        o.get_or_allocate_domain("kept", &signal(), true, &mut reply)?;
        ids.push(reply.id().unwrap());
        o.get_or_allocate_domain("once", &signal(), false, &mut reply)?;
        ids.push(reply.id().unwrap());
        Ok(())
    })
    .unwrap();
    let freed: Vec<_> = rig
        .emulator
        .journal()
        .select(|e| matches!(e, EventKind::Free { .. }))
        .into_iter()
        .map(|e| match e {
            EventKind::Free { domain, cause, .. } => (domain, cause),
            other => panic!("{other}"),
        })
        .collect();
    let cause = FreeCause::Cleanup(RunId(1));
    assert_eq!(freed, [(ids[3], cause), (ids[1], cause), (ids[0], cause)]);
    assert_eq!(rig.emulator.domain_state(ids[2]), Ok(DomainState::Live));
    rig.close();
}

#[test]
fn release_frees_at_once_outside_runs_and_is_idempotent() {
    let rig = Rig::two();
    let id = rig.retained(1, "d", &signal()).id().unwrap();
    assert_eq!(rig.emulator.release_domain(id), Ok(()));
    assert_eq!(rig.emulator.domain_state(id), Ok(DomainState::Freed));
    assert_eq!(rig.emulator.release_domain(id), Ok(()));
    assert_eq!((rig.emulator.journal().releases(), rig.emulator.journal().frees()), (1, 1));
    let again = rig.retained(2, "d", &signal()).id().unwrap();
    assert_ne!(again, id, "two allocations never share an id");
    let unknown = DomainId::new(99, 0);
    assert_eq!(rig.emulator.release_domain(unknown).unwrap_err().family(), Family::Misuse);
    assert_eq!(rig.emulator.domain_state(unknown).unwrap_err().family(), Family::Misuse);
    rig.close();
}

/// A failed release is not tried again: whoever asks again gets the first outcome, whether the memory is still there,
/// partly there, or gone. What is left is for close.
#[test]
fn a_failed_release_is_repeated_and_not_retried() {
    for (schedule, state, left) in [
        ("release_domain#1:before", DomainState::Live, 2),
        ("release_domain@chip1#1:before", DomainState::Released, 1),
        ("release_domain@chip0#1:before; release_domain@chip1#1:before", DomainState::Released, 2),
        ("release_domain#1:after", DomainState::Freed, 0),
        ("release_domain@chip1#1:after", DomainState::Freed, 0),
    ] {
        let rig = Rig::new(builder().faults(schedule.parse().unwrap()));
        let id = rig.retained(1, "d", &signal()).id().unwrap();
        let first = rig.emulator.release_domain(id).unwrap_err();
        assert_eq!(first.family(), Family::Backend, "{schedule}");
        let mapped = || rig.emulator.stats().committed_bytes.iter().filter(|bytes| **bytes > 0).count();
        let frees = rig.emulator.journal().frees();
        for _ in 0..2 {
            assert_eq!(rig.emulator.release_domain(id), Err(first.clone()), "{schedule}");
            assert_eq!((rig.emulator.domain_state(id), mapped()), (Ok(state), left), "{schedule}");
        }
        assert_eq!(rig.emulator.journal().frees(), frees, "{schedule}: released again");
        let emulator = Arc::clone(&rig.emulator);
        rig.close();
        assert_eq!(emulator.domain_state(id), Ok(DomainState::Freed), "{schedule}");
        assert_eq!(emulator.stats().committed_bytes, [0, 0], "{schedule}");
        assert_eq!(emulator.release_domain(id), Err(first), "{schedule}: after close");
    }
}

/// A view that a kernel kept beyond its task is of memory that was freed as soon as it is: windows and scratch with
/// their run, resident memory and host buffers when they go.
#[test]
fn views_that_outlive_their_memory_say_that_it_was_freed() {
    let kept: Arc<Mutex<Vec<MemoryView>>> = Arc::default();
    let keep = Arc::clone(&kept);
    let rig = Rig::new(builder().completion(Completion::ByHand));
    let keeps = KernelObject::new(move |k| {
        let mut kept = keep.lock().unwrap();
        for tensor in 0..k.tensors() {
            kept.push(k.tensor(tensor)?);
        }
        kept.push(k.domain(k.scalar(0)?)?.window(1)?);
        Ok(())
    });
    let spec = chip_spec("keeps", &[Access::InOut; 4], 1).with_source(keeps.into_source());
    let keeps = rig.emulator.register(&spec).unwrap().id;
    let host = rig.emulator.create_buffer(64).unwrap();
    let resident = rig.emulator.alloc(ChipId(0), 64).unwrap();
    let (mut domain, mut scratch) = (DomainAllocation::new(), None);
    rig.submit(1, |o| {
        o.allocate_domain("d", &signal(), &mut domain)?;
        scratch = Some(o.alloc(64)?);
        let mut args = TaskArgs::new();
        for place in [
            TensorPlace::DomainBuffer { domain: domain.id().unwrap(), chip: ChipId(0), buffer: 0 },
            TensorPlace::Scratch(scratch.unwrap()),
            TensorPlace::Resident(resident),
            TensorPlace::Host(host),
        ] {
            let shape = Shape::new(&[16]).unwrap();
            args.tensor(TensorArg { place, shape, dtype: DataType::Int32, byte_offset: 0, access: Access::InOut });
        }
        args.scalar(domain.member(0).unwrap().device_context);
        o.submit_next_level(keeps, &args, None, ChipId(0))
    })
    .unwrap();
    rig.emulator.wait_until(|events| events.iter().any(|e| matches!(e.kind, EventKind::TaskEnd { .. })));
    let freed = || -> Vec<bool> {
        let views = kept.lock().unwrap();
        views.iter().map(|view| view.load(0, &mut [0; 4]) == Err(KernelError::Freed)).collect()
    };
    let (stats, committed) = (rig.emulator.stats(), 64 + 64);
    assert_eq!((stats.scratch, stats.committed_bytes), (1, vec![committed, 64]));
    assert_eq!(freed(), [false; 5], "all of it lives until the run is over");
    rig.emulator.complete(RunId(1)).unwrap();
    assert_eq!(rig.wait(1), RunOutcome::success());
    let stats = rig.emulator.stats();
    assert_eq!((stats.scratch, stats.committed_bytes), (0, vec![64, 0]));
    assert_eq!(freed(), [true, true, false, false, true], "window and scratch end with the run");
    rig.emulator.free(resident).unwrap();
    rig.emulator.release_buffer(host).unwrap();
    assert_eq!(freed(), [true; 5]);
    for view in kept.lock().unwrap().iter() {
        assert_eq!(view.store(0, &[1; 4]), Err(KernelError::Freed));
        assert_eq!(view.cell(0).and_then(|cell| cell.load()), Err(KernelError::Freed));
    }
    rig.close();
}

#[test]
fn release_of_a_domain_in_flight_frees_the_name_now_and_the_memory_after_the_fence() {
    let rig = Rig::new(builder().completion(Completion::ByHand));
    let (mut first, mut second) = (DomainAllocation::new(), DomainAllocation::new());
    rig.submit(1, |o| {
        o.allocate_domain("d", &signal(), &mut first)?;
        rig.emulator.release_domain(first.id().unwrap())?;
        o.allocate_domain("d", &signal(), &mut second)
    })
    .unwrap();
    let id = first.id().unwrap();
    assert_eq!(rig.emulator.domain_state(id), Ok(DomainState::Released));
    rig.emulator.complete(RunId(1)).unwrap();
    rig.wait(1);
    assert_eq!(rig.emulator.domain_state(id), Ok(DomainState::Freed));
    assert!(rig.emulator.journal().before(
        |e| *e == EventKind::Fence(RunId(1)),
        |e| matches!(e, EventKind::Free { domain, .. } if *domain == id)
    ));
    rig.close();
}

#[test]
fn s54_a_failed_run_has_its_retained_domains_freed_when_no_run_uses_them_any_more() {
    let rig = Rig::new(builder().completion(Completion::ByHand));
    let mut reply = DomainAllocation::new();
    rig.submit(1, |o| o.get_or_allocate_domain("d", &signal(), true, &mut reply)).unwrap();
    rig.emulator.complete(RunId(1)).unwrap();
    rig.wait(1);
    let id = reply.id().unwrap();
    for run in 2..=3 {
        rig.submit(run, |o| o.get_or_allocate_domain("d", &signal(), true, &mut reply)).unwrap();
    }
    rig.emulator.fail(RunId(2), RuntimeFailure::new(Call::Run, "Test", "by hand")).unwrap();
    rig.wait(2);
    assert_eq!(rig.emulator.domain_state(id), Ok(DomainState::Live), "run 3 still uses it");
    let error = rig.submit(4, |o| o.get_or_allocate_domain("d", &signal(), true, &mut reply)).unwrap_err();
    assert!(error.to_string().contains("after a failed run"), "{error}");
    rig.emulator.complete(RunId(3)).unwrap();
    assert_eq!(rig.wait(3), RunOutcome::success());
    assert_eq!(rig.emulator.domain_state(id), Ok(DomainState::Freed));
    rig.close();
}

#[test]
fn a_stale_device_context_names_nothing() {
    let rig = Rig::two();
    let domain = rig.retained(1, "d", &signal());
    let foreign = rig.run(2, |o| o.submit_next_level(rig.waits, &context(&domain, 1), None, ChipId(0))).unwrap();
    assert!(foreign.result.unwrap_err().to_string().contains("belongs to chip1"));
    rig.emulator.release_domain(domain.id().unwrap()).unwrap();
    rig.retained(3, "d", &signal());
    let stale = rig.run(4, |o| o.submit_next_level(rig.waits, &context(&domain, 0), None, ChipId(0))).unwrap();
    assert!(stale.result.unwrap_err().to_string().contains("names no live domain"));
    rig.close();
}

#[test]
fn a_domain_freed_under_a_running_kernel_is_a_failed_task_and_not_a_crash() {
    let rig = Rig::two();
    let domain = rig.retained(1, "d", &signal());
    rig.submit(2, |o| o.submit_next_level(rig.waits, &context(&domain, 0), None, ChipId(0))).unwrap();
    rig.emulator.wait_until(|events| events.iter().any(|e| matches!(e.kind, EventKind::TaskStart { .. })));
    // Not registered with run 2, so nothing holds the release up.
    rig.emulator.release_domain(domain.id().unwrap()).unwrap();
    let error = rig.wait(2).result.unwrap_err().to_string();
    assert!(error.contains("the memory was freed") || error.contains("names no live domain"), "{error}");
    rig.close();
}

#[test]
fn s16_a_fault_on_one_chip_leaves_the_windows_of_the_earlier_ones_until_the_cleanup() {
    for (effect, left) in [(FaultEffect::Before, 1), (FaultEffect::After, 2), (FaultEffect::NoReply, 2)] {
        let rig = Rig::new(builder().faults(Fault::new(Call::GetOrAllocateDomain, effect).on_chip(1).into()));
        let mut seen = None;
        rig.submit(1, |o| {
            seen = o.get_or_allocate_domain("d", &signal(), true, &mut DomainAllocation::new()).err();
            let committed: u64 = rig.emulator.stats().committed_bytes.iter().sum();
            assert_eq!(committed, left * 64);
            Ok(())
        })
        .unwrap();
        assert!(seen.unwrap().effect().possible());
        assert_eq!(rig.wait(1), RunOutcome::success());
        assert_eq!(rig.emulator.stats().committed_bytes, [0, 0], "not retained, although the run succeeded");
        assert_eq!(rig.emulator.journal().allocs(), 0);
        rig.close();
    }
}

#[test]
fn s16_a_failed_cleanup_refuses_further_work_and_says_what_is_still_mapped() {
    let rig = Rig::new(builder().faults("run@chip1#1:before".parse().unwrap()));
    let outcome = rig.run(1, |o| o.allocate_domain("d", &signal(), &mut DomainAllocation::new())).unwrap();
    assert_eq!(outcome.result, Ok(()));
    let cleanup = outcome.cleanup.unwrap().to_string();
    assert!(cleanup.contains("chip1 is still mapped"), "{cleanup}");
    let refused = rig.submit(2, |_| Ok(())).unwrap_err();
    assert!(refused.must_reprepare() && refused.to_string().contains("ordered cleanup failed"), "{refused}");
    rig.close();
}

#[test]
fn s08_a_sweep_waits_for_a_release_that_began_first_and_does_not_free_again() {
    for (text, fails) in
        [("release_domain#1:hang", false), ("release_domain@chip1#1:hang; release_domain#1:after", true)]
    {
        let rig = Rig::new(builder().faults(text.parse().unwrap()));
        let id = rig.retained(1, "d", &signal()).id().unwrap();
        std::thread::scope(|scope| {
            let release = scope.spawn(|| rig.emulator.release_domain(id));
            rig.emulator.faults().wait_hung(1);
            let sweep = scope.spawn(|| rig.emulator.close());
            rig.emulator.wait_until(|events| events.iter().any(|e| e.kind == EventKind::CloseBegin));
            rig.emulator.release_hangs();
            let released = release.join().unwrap();
            assert_eq!(released.is_err(), fails, "{text}");
            assert_eq!(rig.emulator.release_domain(id), released, "the outcome is repeated");
            // A sweep that met the release repeats its failure; one that came later found nothing to do.
            let swept = sweep.join().unwrap();
            assert!(swept.is_ok() || swept == released, "{text}: {swept:?}");
        });
        assert_eq!(rig.emulator.journal().frees(), 1, "{text}");
        rig.close();
    }
}

#[test]
fn s08_a_release_waits_for_a_sweep_that_began_first_and_gets_its_outcome() {
    for (text, fails) in [("close@chip0#1:hang", false), ("close@chip0#1:hang; close@chip1#1:after", true)] {
        let rig = Rig::new(builder().faults(text.parse().unwrap()));
        let id = rig.retained(1, "d", &signal()).id().unwrap();
        std::thread::scope(|scope| {
            let sweep = scope.spawn(|| rig.emulator.close());
            rig.emulator.faults().wait_hung(1);
            let release = scope.spawn(|| rig.emulator.release_domain(id));
            rig.emulator.release_hangs();
            let (swept, released) = (sweep.join().unwrap(), release.join().unwrap());
            assert_eq!((swept.is_err(), released.clone()), (fails, swept), "{text}");
        });
        let journal = rig.emulator.journal();
        assert_eq!((journal.frees(), journal.releases()), (1, 0), "{text}");
        rig.close();
    }
}

#[test]
fn copies_are_checked_in_both_granularities() {
    for granularity in [CopyGranularity::WholeBuffer, CopyGranularity::ByteRange] {
        let whole = granularity == CopyGranularity::WholeBuffer;
        let rig = Rig::new(builder().copy_granularity(granularity));
        let request = DomainRequest {
            window_bytes: 80,
            ..DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("a", 64), NamedBuffer::bytes("b", 8)])
        };
        let domain = rig.retained(1, "d", &request);
        let id = domain.id().unwrap();
        let sizes = [8, 64, 128].map(|n| rig.emulator.create_buffer(n).unwrap());
        rig.emulator.fill_buffer(sizes[0], 7).unwrap();
        let outcome = rig.run(2, |o| {
            let refused = [
                copy(buffer(&domain, 0, 0), sizes[2], 128),
                copy(buffer(&domain, 0, 0), sizes[0], 0),
                copy(buffer(&domain, 0, 0), sizes[0], 9),
                copy(buffer(&domain, 0, 2), sizes[0], 8),
                copy(DevicePlace::DomainBuffer { domain: id, chip: ChipId(2), buffer: 0 }, sizes[0], 8),
                copy(
                    DevicePlace::DomainBuffer { domain: DomainId::new(9, 0), chip: ChipId(0), buffer: 0 },
                    sizes[0],
                    8,
                ),
                copy(DevicePlace::Window { domain: id, chip: ChipId(0), offset: 73 }, sizes[0], 8),
                copy(DevicePlace::Window { domain: id, chip: ChipId(0), offset: u64::MAX }, sizes[0], 8),
                CopyTo { dst: buffer(&domain, 0, 0), src: CopySource::Fill(1), nbytes: 8 },
            ];
            for copy in refused {
                let error = o.copy_to(&copy).unwrap_err();
                assert_eq!(error.family(), Family::Misuse, "{copy:?}: {error}");
            }
            let partial = o.copy_to(&copy(buffer(&domain, 0, 1), sizes[1], 8));
            assert_eq!(partial.is_err(), whole, "a part of a host buffer needs range copies");
            let slack = copy(DevicePlace::Window { domain: id, chip: ChipId(0), offset: 72 }, sizes[0], 8);
            assert_eq!(o.copy_to(&slack).is_err(), whole);
            // A prefix copy leaves the rest alone.
            o.copy_to(&copy(buffer(&domain, 1, 0), sizes[0], 8))?;
            o.copy_from(sizes[0], buffer(&domain, 1, 1), 8)
        });
        assert_eq!(outcome.unwrap(), RunOutcome::success());
        assert_eq!(rig.peek(id, 1, 0, 9), [7, 7, 7, 7, 7, 7, 7, 7, 0]);
        if !whole {
            assert_eq!(rig.peek(id, 0, 72, 8), [7; 8]);
        }
        let mut back = [9; 8];
        rig.emulator.read_buffer(sizes[0], 0, &mut back).unwrap();
        assert_eq!(back, [0; 8]);
        rig.close();
    }
}

#[test]
fn the_device_fills_where_it_can() {
    let rig = Rig::new(builder().device_fill(true).copy_granularity(CopyGranularity::ByteRange));
    let domain = rig.retained(1, "d", &signal());
    rig.run(2, |o| o.copy_to(&CopyTo { dst: buffer(&domain, 1, 0), src: CopySource::Fill(3), nbytes: 10 }))
        .unwrap();
    assert_eq!(rig.peek(domain.id().unwrap(), 1, 8, 4), [3, 3, 0, 0]);
    rig.close();
}

#[test]
fn s86_copies_to_different_chips_overlap_and_copies_to_one_stay_in_order() {
    let chips = 8;
    let rig = Rig::new(builder().chips(chips));
    let request = DomainRequest::packed(0..chips, vec![NamedBuffer::bytes("a", 4), NamedBuffer::bytes("b", 4)]);
    let domain = rig.retained(1, "d", &request);
    let zeros = rig.emulator.create_zeros(4).unwrap();
    for chip in 0..chips {
        rig.emulator.arm(Fault::new(Call::CopyTo, FaultEffect::Hang).on_chip(chip));
    }
    rig.emulator.arm(Fault::new(Call::CopyTo, FaultEffect::Before).on_chip(5).nth(2));
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            rig.submit(2, |o| {
                let copies: Vec<CopyTo> = (0..2)
                    .flat_map(|b| (0..chips).map(move |chip| (b, chip)))
                    .map(|(b, chip)| copy(buffer(&domain, chip, b), zeros, 4))
                    .collect();
                let mut results = Vec::new();
                o.copy_batch(&copies, &mut results)?;
                for (copy, result) in copies.iter().zip(&results) {
                    let fails = copy.dst == buffer(&domain, 5, 1);
                    assert_eq!(matches!(result, CopyResult::Failed(_)), fails, "{copy:?}: {result:?}");
                }
                Ok(())
            })
        });
        // All chips are inside their first copy at the same time, or this never returns.
        rig.emulator.faults().wait_hung(chips as usize);
        assert_eq!(rig.emulator.journal().copies().len(), 0);
        rig.emulator.release_hangs();
        run.join().unwrap().unwrap();
    });
    for chip in 0..chips {
        let order: Vec<u32> = rig
            .emulator
            .journal()
            .copies_of(RunId(2))
            .into_iter()
            .filter_map(|e| match e {
                EventKind::Copy { dst: DevicePlace::DomainBuffer { chip: c, buffer, .. }, .. } if c.0 == chip => {
                    Some(buffer)
                }
                _ => None,
            })
            .collect();
        assert_eq!(order, if chip == 5 { vec![0] } else { vec![0, 1] });
    }
    rig.close();
}

#[test]
fn resident_memory_is_zeroed_counted_and_refused_while_runs_are_in_flight() {
    let rig = Rig::new(builder().completion(Completion::ByHand).device_memory(100));
    let emulator = &rig.emulator;
    let device = emulator.alloc(ChipId(1), 64).unwrap();
    let host = emulator.create_buffer(64).unwrap();
    emulator.fill_buffer(host, 5).unwrap();
    emulator.copy_from(host, DevicePlace::Resident(device), 64).unwrap();
    let mut bytes = [1; 64];
    emulator.read_buffer(host, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 64]);
    assert_eq!(emulator.committed_device_memory(ChipId(1)), Ok(64));
    let full = emulator.alloc(ChipId(1), 37).unwrap_err();
    assert_eq!(full.runtime().unwrap().kind, FailureKind::OutOfDeviceMemory { requested_bytes: 37 });
    assert_eq!(emulator.alloc(ChipId(2), 1).unwrap_err().family(), Family::Misuse);
    assert_eq!(emulator.alloc(ChipId(1), 0).unwrap_err().family(), Family::Misuse);
    rig.submit(1, |_| {
        // On the building thread these are control.
        let inside = emulator.alloc(ChipId(0), 8)?;
        emulator.copy_to(&copy(DevicePlace::Resident(device), host, 64))?;
        emulator.free(inside)
    })
    .unwrap();
    for refused in [
        emulator.alloc(ChipId(1), 8).map(|_| ()),
        emulator.free(device),
        emulator.copy_to(&copy(DevicePlace::Resident(device), host, 64)),
        emulator.copy_from(host, DevicePlace::Resident(device), 64),
    ] {
        assert!(refused.unwrap_err().to_string().contains("1 run(s) still in flight"));
    }
    emulator.complete(RunId(1)).unwrap();
    rig.wait(1);
    emulator.free(device).unwrap();
    assert_eq!(emulator.free(device).unwrap_err().family(), Family::Misuse);
    rig.close();
}

#[test]
fn host_buffers_are_checked_and_kept_while_tasks_use_them() {
    let rig = Rig::new(builder().completion(Completion::ByHand).dirty_host_buffers(true));
    let emulator = &rig.emulator;
    let host = emulator.create_buffer(10).unwrap();
    let mut bytes = [0; 10];
    emulator.read_buffer(host, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [0xA5; 10]);
    let zeros = emulator.create_zeros(10).unwrap();
    emulator.read_buffer(zeros, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 10], "zeros are zeros even where buffers arrive dirty");
    for refused in [
        emulator.create_buffer(0).map(|_| ()),
        emulator.write_buffer(host, 9, &[0; 2]),
        emulator.write_buffer(host, u64::MAX, &[0; 2]),
        emulator.read_buffer(host, 11, &mut []),
        emulator.write_buffer(zeros, 0, &[1]),
        emulator.fill_buffer(zeros, 1),
        emulator.release_buffer(HostBufferId::new(9, 0)),
    ] {
        assert_eq!(refused.unwrap_err().family(), Family::Misuse);
    }
    let domain = {
        let mut reply = DomainAllocation::new();
        rig.submit(1, |o| o.get_or_allocate_domain("d", &signal(), true, &mut reply)).unwrap();
        emulator.complete(RunId(1)).unwrap();
        rig.wait(1);
        reply
    };
    let mut args = context(&domain, 0);
    args.tensor(TensorArg {
        place: TensorPlace::Host(host),
        shape: Shape::new(&[2]).unwrap(),
        dtype: DataType::Int32,
        byte_offset: 0,
        access: Access::Output,
    });
    let mut peer = args.clone();
    peer.clear();
    peer.tensor(args.tensors()[0]).scalar(domain.member(1).unwrap().device_context);
    rig.submit(2, |o| {
        o.submit_next_level_group(rig.handshake, &[args.clone(), peer.clone()], None, &[ChipId(0), ChipId(1)])
    })
    .unwrap();
    let busy = emulator.release_buffer(host).unwrap_err();
    assert!(busy.to_string().contains("still referenced by 2 task(s)"), "{busy}");
    emulator.complete(RunId(2)).unwrap();
    rig.wait(2);
    emulator.release_buffer(host).unwrap();
    assert_eq!(emulator.release_buffer(host).unwrap_err().family(), Family::Misuse);
    assert_eq!(emulator.stats().host_peak_bytes, 20);
    rig.close();
}

#[test]
fn a_host_buffer_larger_than_all_memory_is_out_of_shared_memory() {
    let rig = Rig::two();
    let error = rig.emulator.create_buffer(1 << 62).unwrap_err();
    let kind = error.runtime().unwrap().kind;
    assert_eq!(kind, FailureKind::OutOfSharedMemory { requested_bytes: 1 << 62 });
    assert!(error.may_retry());
    rig.close();
}

#[test]
fn s57_a_dead_chip_fails_its_run_and_every_later_control_call_the_same_way() {
    let fault = Fault::new(Call::Task, FaultEffect::Before).on_chip(1).with_kind(FaultKind::ChipKilled(9)).fatal();
    let rig = Rig::new(builder().faults(fault.into()));
    let outcome = rig.run(1, |o| o.submit_next_level(rig.nothing, &TaskArgs::new(), None, ChipId(1))).unwrap();
    let error = outcome.result.unwrap_err();
    assert!(error.to_string().contains("chip1") && error.to_string().contains("signal 9"), "{error}");
    let mut seen = None;
    rig.run(2, |o| {
        seen = o.allocate_domain("d", &signal(), &mut DomainAllocation::new()).err();
        Ok(())
    })
    .unwrap();
    assert_eq!(seen.unwrap().runtime().unwrap().kind, error.runtime().unwrap().kind);
    assert!(rig.emulator.committed_device_memory(ChipId(1)).is_err());
    assert_eq!(rig.emulator.committed_device_memory(ChipId(0)), Ok(0));
    rig.close();
}
