//! Reset and mapping: S22 to S27. Rules 12 to 16; invariants I8 and I11.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pto_dispatch::{Args, Error, Options, Program, ProgramSpec};
use pto_mock::{EventKind, KernelObject, Mapping, WaitFor};
use pto_reset::ResetError;
use pto_simpler_sys::{CallableSpec, ChipId, DomainRequest, NamedBuffer, RunId, Signature};
use pto_tests::gate::{Gate, OpenOnDrop};
use pto_tests::parked;
use pto_tests::rig::{Bench, Rig, allocations, any_backend, assert_order, at, copies, emulator_only, submits};
use pto_tests::scenario::{
    Cells, DOMAIN, add, add_one, f0, f1, f2, h, h_await, h_signal, h_spec, program, signal_request,
};

fn no_args() -> Args {
    Args::new()
}

/// Host buffers of these sizes that were created, filled with zero and released, in the order of creation.
fn staging(rig: &Rig) -> Vec<u64> {
    let journal = rig.journal();
    let mut sizes = Vec::new();
    for event in journal.select(|e| matches!(e, EventKind::BufferCreate { .. })) {
        let EventKind::BufferCreate { buffer: id, nbytes, .. } = event else { continue };
        sizes.push(nbytes);
        let created =
            at(&journal, "create", |e| matches!(e, EventKind::BufferCreate { buffer, .. } if *buffer == id));
        let filled =
            at(&journal, "fill", |e| matches!(e, EventKind::BufferFill { buffer, byte: 0 } if *buffer == id));
        assert_order(&journal, &[("creation", created), ("zeroing", filled)]);
    }
    sizes
}

/// The last use of staging by a run, its fence, and the first release of a buffer after that.
fn assert_staging_outlives(rig: &Rig, run: u64, buffers: usize) {
    let journal = rig.journal();
    let fence = at(&journal, "fence", |e| *e == EventKind::Fence(RunId(run)));
    let released = journal.select(|e| matches!(e, EventKind::BufferRelease { .. }));
    assert_eq!(released.len(), buffers, "each released once\n{journal}");
    let first = at(&journal, "release", |e| matches!(e, EventKind::BufferRelease { .. }));
    assert_order(&journal, &[("fence", fence), ("release of staging", first)]);
}

#[test]
fn s22_staging_buffers() {
    let Some(bench) = emulator_only("s22a") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f2()], bench.builder().dirty_host_buffers(true));
    let journal = rig.journal();
    rig.worker.call(&no_args()).unwrap();
    assert_eq!((staging(&rig), journal.copies()), (vec![], vec![]), "the first use is not reset");
    rig.worker.call(&no_args()).unwrap();
    let mut sizes = staging(&rig);
    sizes.sort_unstable();
    assert_eq!(sizes, [17, 1_048_576]);
    for chip in [0, 1] {
        let of_chip: Vec<_> = copies(&journal).into_iter().filter(|(_, c, ..)| *c == chip).collect();
        assert_eq!(of_chip, [(2, chip, 0, 1_048_576), (2, chip, 1, 17)], "declaration order on each rank");
    }
    assert!(journal.copies().iter().all(|e| matches!(e, EventKind::Copy { zero: true, .. })), "{journal}");
    assert_staging_outlives(&rig, 2, 2);
    let stats = rig.worker.stats(rig.ids[0]).unwrap();
    assert_eq!((stats.staging_buffers, stats.peak_staging_bytes), (2, 1_048_593));
    assert_eq!((stats.reset_copies, stats.zeroed_bytes), (4, 2 * 1_048_593));
    assert_eq!(rig.emulator().stats().host_peak_bytes, 1_048_593);
    assert_eq!(rig.emulator().stats().host_buffers, 0);
    // What the second dispatch saw was zero: it added 1 to every word of the payload.
    let [(_, domain)] = allocations(&journal)[..] else { panic!("{journal}") };
    let mut words = vec![0; 1_048_576];
    rig.emulator().peek(domain, ChipId(1), 0, &mut words).unwrap();
    assert!(words.chunks_exact(4).all(|word| word == 1_i32.to_ne_bytes()));
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s22_one_staging_buffer_for_each_distinct_size() {
    let Some(bench) = emulator_only("s22b") else { return };
    let two = |a, b| DomainRequest::packed([0, 1, 2], vec![NamedBuffer::bytes("a", a), NamedBuffer::bytes("b", b)]);
    let (d0, d1) = (two(64, 64), two(64, 4096));
    let pair = program(ProgramSpec::new("pair"), move |build, _| {
        build.lease("d0", &d0)?;
        build.lease("d1", &d1)?;
        Ok(())
    });
    let rig = bench.prepare(&Options::persistent(), &[pair], bench.builder().chips(3));
    rig.worker.call(&no_args()).unwrap();
    rig.worker.call(&no_args()).unwrap();
    let mut sizes = staging(&rig);
    sizes.sort_unstable();
    assert_eq!(sizes, [64, 4096]);
    assert_eq!(copies(&rig.journal()).len(), 12);
    assert_eq!(rig.worker.stats(rig.ids[0]).unwrap().peak_staging_bytes, 4160);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s22_two_dispatches_in_flight_at_most_double_the_peak() {
    let Some(bench) = emulator_only("s22c") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f2()], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    rig.hold_runs();
    let second = rig.worker.submit(rig.ids[0], &no_args()).unwrap();
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let third = scope.spawn(|| rig.worker.submit(rig.ids[0], &no_args()).unwrap());
        let waits = EventKind::Wait { run: RunId(3), on: WaitFor::Head };
        rig.emulator().wait_until(|events| events.iter().any(|e| e.kind == waits));
        rig.complete(2);
        second.wait().unwrap();
        let third = third.join().unwrap();
        rig.complete(3);
        third.wait().unwrap();
    });
    let stats = rig.worker.stats(rig.ids[0]).unwrap();
    assert_eq!((stats.staging_buffers, stats.peak_staging_bytes), (4, 2 * 1_048_593));
    assert_eq!(rig.emulator().stats().host_peak_bytes, 2 * 1_048_593);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s23_the_handshake_oracle() {
    let expected = [
        ("reset on", Options::persistent(), [[2, 1], [2, 1], [2, 1]], 1),
        ("reset off", Options::persistent().reset(false), [[2, 1], [4, 2], [6, 3]], 1),
        ("persistence off", Options::ordinary(), [[2, 1], [2, 1], [2, 1]], 3),
    ];
    for (name, options, outs, allocations) in expected {
        let bench = any_backend("s23");
        let rig = bench.prepare_any(&options, &[h()], 2);
        let cells = Cells::new(&rig.worker, 2);
        for out in outs {
            rig.worker.call(&cells.args()).unwrap();
            assert_eq!(cells.values(), out, "{name}");
        }
        let stats = rig.worker.stats(rig.ids[0]).unwrap();
        assert_eq!(stats.allocations, allocations, "{name}");
        if let Some(journal) = rig.try_journal() {
            assert_eq!(journal.allocs() as u64, allocations, "{name}");
            let resets = if name == "reset on" { 4 } else { 0 };
            assert_eq!(journal.copies().len(), resets, "{name}");
        }
        drop(cells);
        rig.worker.close().unwrap();
        bench.assert_clean();
    }
}

/// Window 64 B, one named buffer of 4 B.
fn slack() -> Arc<dyn Program> {
    let request = DomainRequest {
        workers: vec![ChipId(0), ChipId(1)],
        window_bytes: 64,
        buffers: vec![NamedBuffer::bytes("signal", 4)],
    };
    program(ProgramSpec::new("slack").callable(add()), move |build, _| {
        let lease = build.lease(DOMAIN, &request)?;
        add_one(build, &lease, "signal")
    })
}

#[test]
fn s24_unnamed_slack() {
    let bench = any_backend("s24");
    let rig = bench.prepare_any(&Options::persistent(), &[slack(), f0()], 2);
    rig.worker.run(rig.ids[0], &no_args()).unwrap();
    let error = rig.worker.run(rig.ids[0], &no_args()).unwrap_err();
    assert!(matches!(&error, Error::Reset { source: ResetError::Slack { named: 4, window: 64 }, .. }), "{error:?}");
    assert!(error.to_string().contains("named 4 of 64"), "{error}");
    assert!(!error.must_reprepare());
    let stats = rig.worker.stats(rig.ids[0]).unwrap();
    assert_eq!((stats.dispatches, stats.staging_buffers, stats.reset_copies), (1, 0, 0));
    if let Some(journal) = rig.try_journal() {
        assert_eq!((submits(&journal), journal.copies().len(), staging(&rig).len()), (1, 0, 0));
        assert_eq!((journal.allocs(), journal.frees()), (1, 0), "still retained");
        assert_eq!(rig.emulator().stats().runs, 0);
    }
    rig.worker.run(rig.ids[1], &no_args()).unwrap();
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.releases().len(), 1);
    bench.assert_clean();

    let rig = bench.prepare_any(&Options::persistent().reset(false), &[slack(), f0()], 2);
    rig.worker.run(rig.ids[0], &no_args()).unwrap();
    rig.worker.run(rig.ids[0], &no_args()).unwrap();
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s25_a_larger_mapping_is_accepted_and_its_padding_untouched() {
    let Some(bench) = emulator_only("s25a") else { return };
    let f1 = f1();
    let looking = program(f1.spec().clone(), move |build, args| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        assert_eq!(lease.window_bytes(), 64, "the lease exposes padding");
        assert_eq!(lease.buffer(ChipId(0), "signal")?.nbytes(), 64);
        f1.build(build, args)
    });
    let rig = bench.prepare(&Options::persistent(), &[looking], bench.builder().mapping(Mapping::Huge2M));
    rig.worker.call(&no_args()).unwrap();
    rig.worker.call(&no_args()).unwrap();
    let mut wiped = copies(&rig.journal());
    wiped.sort_unstable();
    assert_eq!(wiped, [(2, 0, 0, 64), (2, 1, 0, 64)]);
    let [(_, domain)] = allocations(&rig.journal())[..] else { panic!("one domain") };
    for chip in [ChipId(0), ChipId(1)] {
        let mut padding = vec![0; (2 << 20) - 64];
        rig.emulator().peek(domain, chip, 64, &mut padding).unwrap();
        assert!(padding.iter().all(|byte| *byte == 0xEE), "padding was written on {chip}");
    }
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s25_a_smaller_mapping_is_refused_at_allocation() {
    let Some(bench) = emulator_only("s25b") else { return };
    let short = |_: &str, chip: ChipId, mapped| if chip == ChipId(1) { 48 } else { mapped };
    let rig = bench.prepare(&Options::persistent(), &[f1()], bench.builder().reported_mapping(short));
    let error = rig.worker.call(&no_args()).unwrap_err();
    let expected = |e: &Error| {
        matches!(
            e,
            Error::Reset {
                source: ResetError::ShortMapping { chip: ChipId(1), mapped: 48, requested: 64, .. },
                ..
            }
        )
    };
    assert!(expected(&error), "{error:?}");
    let journal = rig.journal();
    assert_eq!((journal.copies().len(), submits(&journal)), (0, 0));
    rig.worker.close().unwrap();
    assert_eq!(journal.frees(), 1);
    bench.assert_clean();
}

#[test]
fn s25_a_mapping_that_shrinks_is_refused_before_any_copy_of_any_domain() {
    // (b) one domain that is short on rank 1 only; (c) two domains of which the second is short.
    for (domains, short) in [(&["d0"][..], "p0:d0"), (&["d0", "d1"][..], "p0:d1")] {
        let Some(bench) = emulator_only("s25c") else { return };
        let shrunk = Arc::new(AtomicBool::new(false));
        let now = Arc::clone(&shrunk);
        let report = move |name: &str, chip: ChipId, mapped| {
            if now.load(Ordering::SeqCst) && name == short && chip == ChipId(1) { 48 } else { mapped }
        };
        let program = program(ProgramSpec::new("p"), move |build, _| {
            for name in domains {
                build.lease(name, &signal_request(64))?;
            }
            Ok(())
        });
        let rig = bench.prepare(&Options::persistent(), &[program], bench.builder().reported_mapping(report));
        rig.worker.call(&no_args()).unwrap();
        shrunk.store(true, Ordering::SeqCst);
        let error = rig.worker.call(&no_args()).unwrap_err();
        let Error::Reset { key, source: ResetError::ShortMapping { chip: ChipId(1), .. } } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(&**key, short);
        assert_eq!(rig.journal().copies(), [], "copied before all mappings were checked");
        let refused = rig.worker.call(&no_args()).unwrap_err();
        assert!(matches!(refused, Error::Poisoned(_)), "{refused:?}");
        rig.worker.close().unwrap();
        assert_eq!(rig.spy.releases(), [], "after a failure they are the backend's");
        assert_eq!(rig.journal().frees(), domains.len());
        assert_eq!(rig.emulator().stats().host_buffers, 0);
        bench.assert_clean();
    }
}

/// H whose rank 1 passes `gate` between its signal and its read, while the gate is closed.
fn h_gated(gate: &Gate) -> Arc<dyn Program> {
    let gate = gate.clone();
    let kernel = KernelObject::new(move |_| {
        gate.pass();
        Ok(())
    });
    let gate = CallableSpec::chip("gate", Signature::default()).with_source(kernel.into_source());
    program(h_spec("h").callable(gate), |build, args| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        h_signal(build, &lease, args, 0)?;
        build.task(2)?.submit(ChipId(1))?;
        h_await(build, &lease, args, 0, 1)
    })
}

fn warm_gated(bench: &Bench, gate: &Gate, early: bool) -> (Rig, Cells, Cells) {
    let rig = bench.prepare(&Options::persistent(), &[h_gated(gate)], bench.builder().early_control(early));
    let (first, second) = (Cells::new(&rig.worker, 2), Cells::new(&rig.worker, 2));
    gate.open();
    rig.worker.call(&first.args()).unwrap();
    gate.shut();
    (rig, first, second)
}

/// Waits until both ranks of run 2 have signalled and rank 1 is at the gate.
fn until_signalled(rig: &Rig, gate: &Gate) {
    gate.wait_arrived(2);
    let signalled = |e: &EventKind| matches!(e, EventKind::TaskEnd { run: RunId(2), ok: true, .. });
    rig.emulator().wait_until(|events| events.iter().filter(|e| signalled(&e.kind)).count() == 2);
}

#[test]
fn s27_never_wipe_under_a_running_dispatch() {
    let Some(bench) = emulator_only("s27") else { return };
    let gate = Gate::new();
    let (rig, out2, out3) = warm_gated(&bench, &gate, false);
    // Runs 2 and 3 are the first and second dispatch of the scenario; run 1 warmed the domain.
    let running = rig.worker.submit(rig.ids[0], &out2.args()).unwrap();
    until_signalled(&rig, &gate);
    std::thread::scope(|scope| {
        let _open = OpenOnDrop(gate.clone());
        let _rescue = rig.rescue();
        let next = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &out3.args()).unwrap());
        let waits = EventKind::Wait { run: RunId(3), on: WaitFor::Head };
        rig.emulator().wait_until(|events| events.iter().any(|e| e.kind == waits));
        next.wait_parked();
        assert_eq!(rig.journal().copies_of(RunId(3)), [], "wiped under a running dispatch");
        gate.open();
        running.wait().unwrap();
        next.join().wait().unwrap();
    });
    assert_eq!((out2.values(), out3.values()), (vec![2, 1], vec![2, 1]));
    let journal = rig.journal();
    let copy = |e: &EventKind| matches!(e, EventKind::Copy { run: Some(RunId(3)), .. });
    let fence = at(&journal, "fence 2", |e| *e == EventKind::Fence(RunId(2)));
    assert_order(&journal, &[("fence 2", fence), ("copy 3", at(&journal, "copy 3", copy))]);
    drop((out2, out3));
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s27_negative_control_a_backend_that_copies_early_is_caught() {
    let Some(bench) = emulator_only("s27-negative") else { return };
    let gate = Gate::new();
    let _open = OpenOnDrop(gate.clone());
    let (rig, out2, out3) = warm_gated(&bench, &gate, true);
    let running = rig.worker.submit(rig.ids[0], &out2.args()).unwrap();
    until_signalled(&rig, &gate);
    // The wipe does not wait: the submission returns while rank 1 has not read its signal.
    let next = rig.worker.submit(rig.ids[0], &out3.args()).unwrap();
    let journal = rig.journal();
    assert_eq!(journal.copies_of(RunId(3)).len(), 2);
    assert!(!journal.contains(|e| *e == EventKind::Fence(RunId(2))), "copy(3) came before fence(2)");
    let [(_, domain)] = allocations(&journal)[..] else { panic!("{journal}") };
    let mut cell = [9; 4];
    rig.emulator().peek(domain, ChipId(1), 0, &mut cell).unwrap();
    assert_eq!(i32::from_ne_bytes(cell), 0, "the unread signal is gone");
    // Release the waiters, which would wait for ever.
    gate.open();
    for chip in [ChipId(0), ChipId(1)] {
        rig.emulator().poke(domain, chip, 0, &1_i32.to_ne_bytes()).unwrap();
    }
    running.wait().unwrap();
    next.wait().unwrap();
    assert_eq!(out2.values(), [1, 1], "not what the handshake gives");
    drop((out2, out3));
    rig.worker.close().unwrap();
    bench.assert_clean();
}
