//! Copies, zeros and epochs: S28 to S34, the counting part of S84, and S86. Rules 3, 9, 12, 13, 15 and 16; I8, I11.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pto_dispatch::{Args, Error, Options, Parameter, PreparedWorker, Program, ProgramSpec, Staging};
use pto_mock::{EventKind, Fault, FaultEffect, Journal, KernelObject};
use pto_simpler_sys::{
    Access, Call, CallableSpec, ChipId, CopyGranularity, DataType, DomainId, DomainRequest, Family, NamedBuffer,
    RunId, Signature,
};
use pto_tests::parked;
use pto_tests::rig::{Rig, allocations, any_backend, copies, emulator_only, submits};
use pto_tests::scenario::{Cells, DOMAIN, add, add_one, f1, f2, h, program, signal_request};

fn no_args() -> Args {
    Args::new()
}

/// Two domains over `ranks` ranks, of two buffers each; one task on each member for the first buffer of each.
fn wide(ranks: u32) -> Arc<dyn Program> {
    let request = move |first| {
        let buffers = vec![NamedBuffer::bytes("first", first), NamedBuffer::bytes("second", 64)];
        DomainRequest::packed(0..ranks, buffers)
    };
    program(ProgramSpec::new("wide").callable(add()), move |build, _| {
        let leases = [build.lease("d0", &request(128))?, build.lease("d1", &request(256))?];
        for lease in &leases {
            add_one(build, lease, "first")?;
        }
        Ok(())
    })
}

fn tasks_of(journal: &Journal, run: u64) -> usize {
    journal.count(|e| matches!(e, EventKind::TaskSubmit { run: r, .. } if *r == RunId(run)))
}

#[test]
fn s28_all_ranks_zeroed_before_any_task() {
    let Some(bench) = emulator_only("s28") else { return };
    let rig = bench.prepare(&Options::persistent(), &[wide(4)], bench.builder().chips(4));
    rig.worker.call(&no_args()).unwrap();
    let journal = rig.journal();
    // The last of rank 3's four copies is held.
    rig.emulator().arm(Fault::new(Call::CopyTo, FaultEffect::Hang).on_chip(3).nth(4));
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let submit = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &no_args()));
        rig.emulator().faults().wait_hung(1);
        // Everything else is zeroed by and by, and still there is no task.
        rig.emulator()
            .wait_until(|events| events.iter().filter(|e| matches!(e.kind, EventKind::Copy { .. })).count() == 15);
        submit.wait_parked();
        assert_eq!(tasks_of(&journal, 2), 0, "a task before the last copy:\n{journal}");
        assert_eq!(rig.emulator().release_hangs(), 1);
        submit.join().unwrap().wait().unwrap();
    });
    assert_eq!(copies(&journal).len(), 16);
    let last_copy = journal.last_position(|e| matches!(e, EventKind::Copy { .. })).unwrap();
    let first_task =
        journal.position(|e| matches!(e, EventKind::TaskSubmit { run, .. } if *run == RunId(2))).unwrap();
    assert!(last_copy < first_task, "{journal}");
    assert_eq!(tasks_of(&journal, 2), 8);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s29_reset_copy_fails_half_way() {
    let Some(bench) = emulator_only("s29") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f2()], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    let journal = rig.journal();
    // Ranks are reset in parallel: the third copy of four is the first one of rank 1.
    rig.emulator().arm(Fault::new(Call::CopyTo, FaultEffect::Before).on_chip(1));
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    let Err(Error::ResetCopy { key, buffer, chip, rank, source }) = refused else { panic!("{refused:?}") };
    assert_eq!((&*key, &*buffer, chip, rank), ("p0:comm_d0", "payload", ChipId(1), 1));
    assert_eq!((source.call(), source.family()), (Call::CopyTo, Family::Backend));
    assert_eq!(tasks_of(&journal, 2), 0, "a task was submitted after a failed reset");
    let created = journal.count(|e| matches!(e, EventKind::BufferCreate { .. }));
    let released = journal.count(|e| matches!(e, EventKind::BufferRelease { .. }));
    assert_eq!((created, released), (2, 2), "each staging buffer is released exactly once");
    assert!(
        journal
            .before(|e| *e == EventKind::BuildFailed(RunId(2)), |e| matches!(e, EventKind::BufferRelease { .. })),
        "staging released before the callback had left:\n{journal}"
    );
    let before = journal.copies().len();
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    let Err(Error::Poisoned(failure)) = refused else { panic!("{refused:?}") };
    assert!(matches!(&failure.cause, Error::ResetCopy { .. }), "{failure}");
    assert_eq!((journal.copies().len(), submits(&journal)), (before, 1));
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.releases(), [], "a poisoned domain is the backend's");
    bench.assert_clean();
}

#[test]
fn s30_option_matrix() {
    let bench = any_backend("s30");
    let resetting = Arc::new(AtomicU64::new(9));
    let seen = Arc::clone(&resetting);
    let asking: Arc<dyn Program> = program(ProgramSpec::new("asking"), move |build, _| {
        seen.store(u64::from(build.is_resetting()), Ordering::SeqCst);
        Ok(())
    });
    for (options, expected) in [
        (Options::ordinary(), 0),
        (Options::persistent(), 1),
        (Options::persistent().reset(true), 1),
        (Options::persistent().reset(false), 0),
        (Options::ordinary().reset(false), 0),
    ] {
        let rig = bench.prepare_any(&options, &[Arc::clone(&asking)], 2);
        rig.worker.call(&no_args()).unwrap();
        rig.worker.close().unwrap();
        assert_eq!(resetting.load(Ordering::SeqCst), expected, "{options:?}");
    }
    let refused = PreparedWorker::prepare_with(&[asking], &Options::ordinary().reset(true), |_| {
        panic!("a backend was made for options that cannot be")
    });
    let error = refused.err().unwrap();
    assert!(matches!(error, Error::ResetWithoutPersistence) && error.family() == Family::Misuse, "{error}");
    bench.assert_clean();
}

/// Leases `request`, and nothing else.
fn leasing(request: DomainRequest) -> Arc<dyn Program> {
    program(ProgramSpec::new("leasing"), move |build, _| {
        build.lease(DOMAIN, &request)?;
        Ok(())
    })
}

/// The only domain of an emulator.
fn domain_of(rig: &Rig) -> DomainId {
    let [(_, domain)] = allocations(&rig.journal())[..] else { panic!("one domain is expected") };
    domain
}

fn window(rig: &Rig, chip: u32, bytes: usize) -> Vec<u8> {
    let mut window = vec![0; bytes];
    rig.emulator().peek(domain_of(rig), ChipId(chip), 0, &mut window).unwrap();
    window
}

fn dirty(rig: &Rig, bytes: usize) {
    for chip in [0, 1] {
        rig.emulator().poke(domain_of(rig), ChipId(chip), 0, &vec![0x7F; bytes]).unwrap();
    }
}

#[test]
fn s32_padding_between_buffers() {
    let Some(bench) = emulator_only("s32") else { return };
    let padded = [16_388, 112].map(|n| NamedBuffer::padded(format!("b{n}"), n, 64).unwrap());
    assert_eq!(padded.each_ref().map(|b| (b.count, b.nbytes)), [(16_388, 16_448), (112, 128)]);
    let request = DomainRequest::packed([0, 1], padded.to_vec());
    assert_eq!(request.window_bytes, 16_576);
    let rig = bench.prepare(&Options::persistent(), &[leasing(request)], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    dirty(&rig, 16_576);
    rig.worker.call(&no_args()).unwrap();
    for chip in [0, 1] {
        assert!(window(&rig, chip, 16_576).iter().all(|b| *b == 0), "no slack: the whole window is zero");
    }
    rig.worker.close().unwrap();

    let plain = [16_388, 112].map(|n| NamedBuffer::bytes(format!("b{n}"), n)).to_vec();
    let request = DomainRequest { window_bytes: 16_560, ..DomainRequest::packed([0, 1], plain) };
    let rig = bench.prepare(&Options::persistent(), &[leasing(request.clone())], bench.builder());
    rig.worker.call(&no_args()).unwrap();
    let refused = rig.worker.call(&no_args());
    let Err(error @ Error::Reset { .. }) = &refused else { panic!("{refused:?}") };
    assert!(error.to_string().contains("60"), "slack of 60 bytes: {error}");
    rig.worker.close().unwrap();

    let ranges = bench.builder().copy_granularity(CopyGranularity::ByteRange);
    let rig = bench.prepare(&Options::persistent(), &[leasing(request)], ranges);
    rig.worker.call(&no_args()).unwrap();
    dirty(&rig, 16_560);
    rig.worker.call(&no_args()).unwrap();
    for chip in [0, 1] {
        assert!(window(&rig, chip, 16_560).iter().all(|b| *b == 0), "a range reset clears slack too");
    }
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s32_resetting_one_buffer_leaves_its_neighbours_unchanged() {
    let Some(bench) = emulator_only("s32b") else { return };
    let sizes = [4096_u64, 4096, 16, 16, 16];
    let buffers = sizes
        .iter()
        .zip(0..)
        .map(|(n, i): (_, u32)| NamedBuffer::padded(format!("b{i}"), *n, 64).unwrap())
        .collect();
    let request = DomainRequest::packed([0, 1], buffers);
    let offsets = [0_usize, 4096, 8192, 8256, 8320];
    let which = Arc::new(AtomicU64::new(9));
    let chosen = Arc::clone(&which);
    let spec = ProgramSpec::new("one").parameter(Parameter::host("zeros", 64));
    let one = program(spec, move |build, args| {
        let lease = build.lease(DOMAIN, &request)?;
        let base = lease.buffer_at(ChipId(0), 0)?.address();
        for (index, offset) in offsets.iter().enumerate() {
            assert_eq!(lease.buffer_at(ChipId(0), index)?.address() - base, *offset as u64);
        }
        let chosen = usize::try_from(chosen.load(Ordering::SeqCst))?;
        if chosen < offsets.len() {
            build.copy_to(&lease.buffer_at(ChipId(0), chosen)?, args.host_at(0)?)?;
        }
        Ok(())
    });
    let rig = bench.prepare(&Options::persistent().reset(false), &[one], bench.builder());
    let zeros = rig.worker.create_buffer(64).unwrap();
    let args = Args::new().host(&zeros);
    rig.worker.call(&args).unwrap();
    for index in 2..offsets.len() {
        dirty(&rig, 8384);
        which.store(index as u64, Ordering::SeqCst);
        rig.worker.call(&args).unwrap();
        let mut expected = vec![0x7F; 8384];
        expected[offsets[index]..offsets[index] + 64].fill(0);
        assert!(window(&rig, 0, 8384) == expected, "buffer {index}: a neighbour changed");
        assert!(window(&rig, 1, 8384).iter().all(|b| *b == 0x7F), "another rank changed");
    }
    drop((args, zeros));
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s33_fresh_allocation_is_really_zero() {
    let Some(bench) = emulator_only("s33") else { return };
    let builder = bench.builder().dirty_windows(true).dirty_host_buffers(true);
    let rig = bench.prepare(&Options::persistent(), &[h()], builder);
    let cells = Cells::new(&rig.worker, 2);
    rig.worker.call(&cells.args()).unwrap();
    assert_eq!(cells.values(), [2, 1]);
    assert_eq!(rig.journal().copies(), [], "a fresh window needs no reset of ours");
    // The memory that staging comes from is dirty too; a reset from it is zero all the same.
    rig.worker.call(&cells.args()).unwrap();
    assert_eq!(cells.values(), [2, 1]);
    assert!(rig.journal().copies().iter().all(|e| matches!(e, EventKind::Copy { zero: true, .. })));
    drop(cells);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

/// Rank r writes `value` into the other rank's lane and then its signal cell, if it produces; then every rank waits
/// until its own cell is at least `value` and stores its own lane. Scalars: context, value, whether to produce.
fn exchange() -> CallableSpec {
    let kernel = KernelObject::new(|k| {
        let domain = k.domain(k.scalar(0)?)?;
        let value = k.scalar(1)? as i32;
        let (own, peer) = (domain.window(domain.rank())?, domain.window(1 - domain.rank())?);
        if k.scalar(2)? == 1 {
            peer.store(0, &value.to_ne_bytes())?;
            peer.cell(64)?.store(value)?;
        }
        own.cell(64)?.wait(|signal| signal >= value)?;
        let mut lane = [0; 4];
        own.load(0, &mut lane)?;
        k.tensor(0)?.store(0, &lane)
    });
    CallableSpec::chip("exchange", Signature::new([Access::Output], 3)).with_source(kernel.into_source())
}

/// Exchanges the epoch (argument 2 is 0) or a constant; argument 3 says whether to produce at all.
fn exchanging(epochs: Arc<AtomicU64>) -> Arc<dyn Program> {
    let buffers = vec![NamedBuffer::bytes("lane", 64), NamedBuffer::bytes("signal", 64)];
    let request = DomainRequest::packed([0, 1], buffers);
    let spec = ProgramSpec::new("exchanging")
        .callable(exchange())
        .parameter(Parameter::host("out0", 4))
        .parameter(Parameter::host("out1", 4))
        .parameter(Parameter::scalar("constant"))
        .parameter(Parameter::scalar("produce"));
    program(spec, move |build, args| {
        let lease = build.lease(DOMAIN, &request)?;
        epochs.store(lease.epoch(), Ordering::SeqCst);
        let value = if args.scalar_at(2)? == 0 { lease.epoch() } else { args.scalar_at(2)? };
        for rank in [0, 1] {
            let chip = ChipId(rank);
            let out = build.tensor(args.host_at(rank as usize)?, &[1], DataType::Int32, Access::Output)?;
            let task = build.task(0)?.tensor(out).scalar(lease.device_context(chip)?);
            task.scalar(value).scalar(args.scalar_at(3)?).submit(chip)?;
        }
        Ok(())
    })
}

#[test]
fn s34_reset_off_with_epochs() {
    let Some(bench) = emulator_only("s34") else { return };
    let epoch = Arc::new(AtomicU64::new(0));
    let rig =
        bench.prepare(&Options::persistent().reset(false), &[exchanging(Arc::clone(&epoch))], bench.builder());
    let cells = Cells::new(&rig.worker, 2);
    for e in 1..=3 {
        rig.worker.call(&cells.args().scalar(0).scalar(1)).unwrap();
        assert_eq!((epoch.load(Ordering::SeqCst), cells.values()), (e, vec![e as i32; 2]));
    }
    assert_eq!((rig.journal().copies().len(), rig.journal().allocs()), (0, 1));
    drop(cells);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s34_a_constant_epoch_completes_at_once_and_shows_stale_data() {
    let Some(bench) = emulator_only("s34b") else { return };
    let epoch = Arc::new(AtomicU64::new(0));
    let rig =
        bench.prepare(&Options::persistent().reset(false), &[exchanging(Arc::clone(&epoch))], bench.builder());
    let cells = Cells::new(&rig.worker, 2);
    for _ in 0..3 {
        rig.worker.call(&cells.args().scalar(1).scalar(1)).unwrap();
        assert_eq!(cells.values(), [1, 1]);
    }
    // Why that is unsafe: nobody produces any more, and the consumers are served all the same, with old data.
    rig.worker.call(&cells.args().scalar(1).scalar(0)).unwrap();
    assert_eq!((epoch.load(Ordering::SeqCst), cells.values()), (4, vec![1, 1]));
    assert_eq!(rig.journal().copies(), []);
    drop(cells);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s84_a_hundred_rounds_counted() {
    let Some(bench) = emulator_only("s84") else { return };
    // Allocations, frees before close, staging buffers, copies, zeroed bytes.
    for (options, expected) in [
        (Options::ordinary(), (100, 100, 0, 0, 0)),
        (Options::persistent().reset(false), (1, 0, 0, 0, 0)),
        (Options::persistent(), (1, 0, 99, 198, 198 * 64)),
        (Options::persistent().staging(Staging::Retained { cap_bytes: 64 }), (1, 0, 1, 198, 198 * 64)),
    ] {
        let rig = bench.prepare(&options, &[f1()], bench.builder());
        for _ in 0..100 {
            rig.worker.call(&no_args()).unwrap();
        }
        let (journal, stats) = (rig.journal(), rig.worker.stats(rig.ids[0]).unwrap());
        let counted =
            (journal.allocs(), journal.frees(), stats.staging_buffers, stats.reset_copies, stats.zeroed_bytes);
        assert_eq!(counted, expected, "{options:?}");
        let seen = (journal.copies().len() as u64, stats.dispatches, stats.allocations);
        assert_eq!(seen, (stats.reset_copies, 100, journal.allocs() as u64), "{options:?}");
        rig.worker.close().unwrap();
        let (created, released) = (
            journal.count(|e| matches!(e, EventKind::BufferCreate { .. })),
            journal.count(|e| matches!(e, EventKind::BufferRelease { .. })),
        );
        assert_eq!((journal.frees(), created), (journal.allocs(), released), "{options:?}");
        bench.assert_clean();
    }
}

#[test]
fn s86_ranks_reset_in_parallel() {
    let Some(bench) = emulator_only("s86") else { return };
    let rig = bench.prepare(&Options::persistent(), &[wide(8)], bench.builder().chips(8));
    rig.worker.call(&no_args()).unwrap();
    for chip in 0..8 {
        rig.emulator().arm(Fault::new(Call::CopyTo, FaultEffect::Hang).on_chip(chip));
    }
    std::thread::scope(|scope| {
        let _rescue = rig.rescue();
        let submit = parked::spawn(scope, || rig.worker.submit(rig.ids[0], &no_args()));
        // The barrier: passes only if the first copies of all ranks are in flight at one time.
        rig.emulator().faults().wait_hung(8);
        assert_eq!(rig.emulator().release_hangs(), 8);
        submit.join().unwrap().wait().unwrap();
    });
    let copies = copies(&rig.journal());
    for chip in 0..8 {
        let own: Vec<_> = copies.iter().filter(|c| c.1 == chip).map(|c| (c.2, c.3)).collect();
        assert_eq!(own, [(0, 128), (1, 64), (0, 256), (1, 64)], "copies to one rank stay in order");
    }
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s86_a_failure_on_one_rank_lets_the_others_finish() {
    let Some(bench) = emulator_only("s86b") else { return };
    let rig = bench.prepare(&Options::persistent(), &[wide(8)], bench.builder().chips(8));
    rig.worker.call(&no_args()).unwrap();
    rig.emulator().arm(Fault::new(Call::CopyTo, FaultEffect::Before).on_chip(5).nth(2));
    let refused = rig.worker.submit(rig.ids[0], &no_args()).map(drop);
    let Err(Error::ResetCopy { rank: 5, buffer, .. }) = &refused else { panic!("{refused:?}") };
    assert_eq!(&**buffer, "second");
    let journal = rig.journal();
    let copies = copies(&journal);
    for chip in 0..8 {
        let own = copies.iter().filter(|c| c.1 == chip).count();
        assert_eq!(own, if chip == 5 { 1 } else { 4 }, "chip {chip}");
    }
    let released = journal.select(|e| matches!(e, EventKind::BufferRelease { .. }));
    assert_eq!(released.len(), 3, "three distinct sizes, each released once: {released:?}");
    rig.worker.close().unwrap();
    assert_eq!(rig.emulator().stats().host_buffers, 0);
    bench.assert_clean();
}

#[test]
fn s32_sizes_that_do_not_fit_have_no_padding() {
    assert!(NamedBuffer::padded("b", u64::MAX, 64).is_none() && NamedBuffer::padded("b", 1, 0).is_none());
    assert_eq!(signal_request(64).window_bytes, 64);
}
