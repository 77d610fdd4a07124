//! Retention and isolation: S14 to S20. Rules 8 to 12, 16 and 17; invariants I1 to I4, I7 and I8.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::sync::{Arc, Mutex};

use pto_dispatch::{Args, Error, Options, Parameter, Program, ProgramSpec};
use pto_domain::{DomainError, RequestError};
use pto_mock::{EventKind, Fault, FaultEffect, FreeCause};
use pto_simpler_sys::{Call, ChipId, DomainId, DomainRequest, NamedBuffer, RunId};
use pto_tests::rig::{Rig, allocations, any_backend, assert_order, at, copies, emulator_only, submits};
use pto_tests::scenario::{
    Cells, DOMAIN, await_cell, f0, f1, f3, h_await, h_signal, program, signal, signal_request,
};

fn no_args() -> Args {
    Args::new()
}

/// F1 that leases twice, clones, and drops everything itself.
fn f1_leasing_twice() -> Arc<dyn Program> {
    let f1 = f1();
    program(f1.spec().clone(), move |build, args| {
        let request = signal_request(64);
        {
            let first = build.lease(DOMAIN, &request)?;
            let second = build.lease(DOMAIN, &request)?;
            assert_eq!(first.key(), second.key());
            assert_eq!((first.epoch(), first.is_first_use()), (second.epoch(), second.is_first_use()));
            drop(first.clone());
            drop(first);
            drop(second);
        }
        f1.build(build, args)
    })
}

#[test]
fn s14_one_allocation_for_many_dispatches() {
    let bench = any_backend("s14");
    let rig = bench.prepare_any(&Options::persistent(), &[f1_leasing_twice()], 2);
    for _ in 0..100 {
        rig.worker.call(&no_args()).unwrap();
    }
    let stats = rig.worker.stats(rig.ids[0]).unwrap();
    assert_eq!((stats.dispatches, stats.allocations, stats.reuses), (100, 1, 99));
    assert_eq!(rig.spy.releases(), [], "released before close");
    if let Some(journal) = rig.try_journal() {
        let [(name, domain)] = &allocations(&journal)[..] else { panic!("{journal}") };
        assert_eq!(name, "p0:comm_d0");
        let reused = journal.select(|e| matches!(e, EventKind::Reuse { .. }));
        assert_eq!(reused.len(), 99, "registered once per dispatch");
        assert!(reused.iter().all(|e| matches!(e, EventKind::Reuse { domain: d, .. } if d == domain)));
        assert_eq!((journal.allocs(), journal.releases(), journal.frees()), (1, 0, 0));
    }
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.releases().len(), 1);
    if let Some(journal) = rig.try_journal() {
        assert_eq!((journal.allocs(), journal.releases(), journal.frees()), (1, 1, 1));
    }
    bench.assert_clean();
}

#[test]
fn s14_persistence_off_allocates_each_time() {
    let bench = any_backend("s14b");
    let rig = bench.prepare_any(&Options::ordinary(), &[f1_leasing_twice()], 2);
    for _ in 0..100 {
        rig.worker.call(&no_args()).unwrap();
    }
    assert_eq!(rig.worker.stats(rig.ids[0]).unwrap().allocations, 100);
    if let Some(journal) = rig.try_journal() {
        assert_eq!((journal.allocs(), journal.frees()), (100, 100));
        assert!(allocations(&journal).iter().all(|(name, _)| name == DOMAIN), "an unprefixed name");
        for run in (1..=100).map(RunId) {
            let fence = at(&journal, "fence", |e| *e == EventKind::Fence(run));
            let freed =
                |e: &EventKind| matches!(e, EventKind::Free { cause: FreeCause::Cleanup(r), .. } if *r == run);
            assert_order(&journal, &[("fence", fence), ("free", at(&journal, "free", freed))]);
        }
    }
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.releases(), []);
    bench.assert_clean();
}

/// A program that leases `comm_d0` with whatever request is in the cell.
fn requesting(name: &str, request: &Arc<Mutex<DomainRequest>>) -> Arc<dyn Program> {
    let request = Arc::clone(request);
    program(ProgramSpec::new(name), move |build, _| {
        build.lease(DOMAIN, &request.lock().unwrap())?;
        Ok(())
    })
}

#[test]
fn s15_spec_change_on_a_warm_key() {
    let bench = any_backend("s15");
    let first = DomainRequest {
        workers: vec![ChipId(0), ChipId(1)],
        window_bytes: 64,
        buffers: vec![NamedBuffer::bytes("a", 32), NamedBuffer::bytes("b", 32)],
    };
    let asked = Arc::new(Mutex::new(first.clone()));
    let rig = bench.prepare_any(&Options::persistent(), &[f1(), requesting("decode", &asked)], 2);
    rig.worker.run(rig.ids[1], &no_args()).unwrap();
    let changed = |change: &dyn Fn(&mut DomainRequest)| {
        let mut request = first.clone();
        change(&mut request);
        request
    };
    let cases = [
        ("window_bytes", changed(&|r| r.window_bytes = 128)),
        ("workers", changed(&|r| r.workers.truncate(1))),
        ("workers", changed(&|r| r.workers.reverse())),
        ("name", changed(&|r| r.buffers[0].name = "c".into())),
        ("dtype", changed(&|r| r.buffers[1].dtype = "float32".into())),
        ("count", changed(&|r| r.buffers[1].count = 8)),
        ("nbytes", changed(&|r| r.buffers[1].nbytes = 16)),
        ("name", changed(&|r| r.buffers.swap(0, 1))),
    ];
    let before = rig.try_journal().map(|journal| (journal.copies().len(), submits(&journal)));
    for (field, request) in cases {
        *asked.lock().unwrap() = request;
        let error = rig.worker.run(rig.ids[1], &no_args()).unwrap_err();
        let Error::Domain(DomainError::SpecChanged { key, .. }) = &error else { panic!("{field}: {error:?}") };
        assert_eq!((key.program().get(), key.name().as_str()), (1, DOMAIN));
        let message = error.to_string();
        assert!(message.contains("p1:comm_d0") && message.contains(field), "{field}: {message}");
        assert!(!error.must_reprepare());
    }
    if let Some(journal) = rig.try_journal() {
        assert_eq!(Some((journal.copies().len(), submits(&journal))), before, "something was touched");
        assert_eq!((journal.allocs(), journal.frees()), (1, 0));
    }
    *asked.lock().unwrap() = first;
    rig.worker.run(rig.ids[1], &no_args()).unwrap();
    let stats = rig.worker.stats(rig.ids[1]).unwrap();
    assert_eq!((stats.allocations, stats.reuses), (1, 1));
    rig.worker.close().unwrap();
    bench.assert_clean();
}

fn freed_in(rig: &Rig, run: u64) -> Vec<Vec<ChipId>> {
    let chips = |event: EventKind| match event {
        EventKind::Free { chips, cause: FreeCause::Cleanup(r), .. } if r == RunId(run) => Some(chips),
        _ => None,
    };
    rig.journal().select(|e| matches!(e, EventKind::Free { .. })).into_iter().filter_map(chips).collect()
}

#[test]
fn s16_partial_allocation_when_persistent() {
    let Some(bench) = emulator_only("s16a") else { return };
    let rig = bench.prepare(&Options::persistent(), &[f1()], bench.builder());
    let journal = rig.journal();
    rig.emulator().arm(Fault::new(Call::GetOrAllocateDomain, FaultEffect::Before).on_chip(1));
    let error = rig.worker.call(&no_args()).unwrap_err();
    assert!(
        matches!(&error, Error::Backend(e) if e.runtime().is_some_and(|f| f.chip == Some(ChipId(1)))),
        "{error:?}"
    );
    assert_eq!(freed_in(&rig, 1), [vec![ChipId(0)]], "rank 0's window, at the fence\n{journal}");
    assert_eq!(rig.emulator().stats().committed_bytes, [0, 0]);
    let refused = rig.worker.call(&no_args()).unwrap_err();
    let Error::Poisoned(cause) = &refused else { panic!("{refused:?}") };
    assert_eq!(cause.cause.to_string(), error.to_string());
    assert_eq!((journal.allocs(), submits(&journal)), (0, 0));
    // The failure was delivered, and nothing is left to clean.
    rig.worker.close().unwrap();
    assert_eq!((rig.spy.releases(), journal.frees()), (vec![], 1));
    bench.assert_clean();
}

#[test]
fn s16_partial_allocation_when_ordinary() {
    let Some(bench) = emulator_only("s16b") else { return };
    let rig = bench.prepare(&Options::ordinary(), &[f1()], bench.builder());
    rig.emulator().arm(Fault::new(Call::AllocateDomain, FaultEffect::Before).on_chip(1));
    assert!(rig.worker.call(&no_args()).is_err());
    assert_eq!(freed_in(&rig, 1), [vec![ChipId(0)]]);
    rig.worker.call(&no_args()).unwrap();
    assert_eq!((rig.journal().allocs(), rig.journal().frees()), (1, 2));
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s16_a_window_that_cannot_be_freed_ends_the_worker() {
    for (persistent, options) in [(true, Options::persistent()), (false, Options::ordinary())] {
        let Some(bench) = emulator_only("s16c") else { return };
        let rig = bench.prepare(&options, &[f1()], bench.builder());
        for call in [Call::GetOrAllocateDomain, Call::AllocateDomain] {
            rig.emulator().arm(Fault::new(call, FaultEffect::Before).on_chip(1));
        }
        rig.emulator().arm(Fault::new(Call::Run, FaultEffect::Before).on_chip(0));
        let first = rig.worker.call(&no_args()).unwrap_err();
        assert!(matches!(&first, Error::Backend(e) if e.runtime().is_some_and(|f| f.chip == Some(ChipId(1)))));
        let second = rig.worker.call(&no_args()).unwrap_err();
        assert!(second.must_reprepare(), "{second:?}");
        let told = match &second {
            Error::Poisoned(failure) => failure.to_string(),
            other => other.to_string(),
        };
        assert!(told.contains("on chip0 is still mapped"), "{told}");
        assert!(rig.worker.call(&no_args()).unwrap_err().must_reprepare());
        assert_eq!(submits(&rig.journal()), 0);
        // Told to a later submitter already where persistent; an ordinary submitter got its own error only.
        let close = rig.worker.close();
        assert_eq!(close.is_ok(), persistent, "{close:?}");
        bench.assert_clean();
    }
}

/// H over d0, and over d1 unless argument 4 says otherwise. Cells 0 and 1 belong to d0, 2 and 3 to d1.
fn h_pair() -> Arc<dyn Program> {
    let mut spec = ProgramSpec::new("pair").callable(signal()).callable(await_cell());
    for name in ["out0", "out1", "out2", "out3"] {
        spec = spec.parameter(Parameter::host(name, 4));
    }
    program(spec.parameter(Parameter::scalar("skip_d1")), |build, args| {
        let mut leases = vec![build.lease("d0", &signal_request(64))?];
        if args.scalar_at(4)? == 0 {
            leases.push(build.lease("d1", &signal_request(64))?);
        }
        for (index, lease) in leases.iter().enumerate() {
            h_signal(build, lease, args, 2 * index)?;
        }
        for (index, lease) in leases.iter().enumerate() {
            h_await(build, lease, args, 2 * index, 1)?;
        }
        Ok(())
    })
}

#[test]
fn s17_domain_skipped_by_a_later_dispatch() {
    let bench = any_backend("s17");
    let rig = bench.prepare_any(&Options::persistent(), &[h_pair()], 2);
    let cells = Cells::new(&rig.worker, 4);
    rig.worker.call(&cells.args().scalar(0)).unwrap();
    assert_eq!(cells.values(), [2, 1, 2, 1]);
    rig.worker.call(&cells.args().scalar(1)).unwrap();
    assert_eq!(rig.worker.stats(rig.ids[0]).unwrap().reset_copies, 4, "d1 is reset too, unasked");
    rig.worker.call(&cells.args().scalar(0)).unwrap();
    assert_eq!(cells.values(), [2, 1, 2, 1], "both zeroed");
    if let Some(journal) = rig.try_journal() {
        let ids: Vec<DomainId> = allocations(&journal).iter().map(|(_, id)| *id).collect();
        for run in [2, 3] {
            let mut wiped: Vec<_> = journal
                .copies_of(RunId(run))
                .into_iter()
                .map(|e| match e {
                    EventKind::Copy {
                        chip,
                        dst: pto_simpler_sys::DevicePlace::DomainBuffer { domain, .. },
                        ..
                    } => (domain, chip.0),
                    other => panic!("{other}"),
                })
                .collect();
            wiped.sort_unstable();
            assert_eq!(wiped, [(ids[0], 0), (ids[0], 1), (ids[1], 0), (ids[1], 1)]);
            let last =
                journal.last_position(|e| matches!(e, EventKind::Copy { run: Some(r), .. } if r.0 == run)).unwrap();
            let task = at(&journal, "task", |e| matches!(e, EventKind::TaskSubmit { run: r, .. } if r.0 == run));
            assert_order(&journal, &[("last copy", last), ("first task", task)]);
        }
    }
    drop(cells);
    rig.worker.close().unwrap();
    bench.assert_clean();
}

#[test]
fn s19_same_name_in_two_programs() {
    let Some(bench) = emulator_only("s19") else { return };
    let rig = bench.prepare(&Options::persistent(), &f3(), bench.builder());
    let [prefill, decode] = rig.ids[..] else { panic!("two programs") };
    for id in [prefill, decode, prefill] {
        rig.worker.run(id, &no_args()).unwrap();
    }
    let journal = rig.journal();
    let domains = allocations(&journal);
    let names: Vec<&str> = domains.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["p0:comm_d0", "p1:comm_d0"]);
    assert_ne!(domains[0].1, domains[1].1);
    // (chip, bytes); parallel over chips, so in any order.
    let mut wiped: Vec<_> = copies(&journal).iter().map(|(run, chip, _, nbytes)| (*run, *chip, *nbytes)).collect();
    wiped.sort_unstable();
    assert_eq!(wiped, [(3, 0, 64), (3, 1, 64)], "only the third run resets");
    // Each adds 1 to its own window only.
    for (_, domain) in &domains {
        for chip in [ChipId(0), ChipId(1)] {
            let mut word = [0; 4];
            rig.emulator().peek(*domain, chip, 0, &mut word).unwrap();
            assert_eq!(i32::from_ne_bytes(word), 1);
        }
    }
    // A signal in one window is not seen in the other.
    let (first, second) = (domains[0].1, domains[1].1);
    rig.emulator().poke(first, ChipId(0), 0, &[7; 64]).unwrap();
    let mut other = [0; 64];
    rig.emulator().peek(second, ChipId(0), 0, &mut other).unwrap();
    assert!(!other.contains(&7));
    rig.worker.close().unwrap();
    assert_eq!(rig.spy.releases(), [second, first]);
    assert_eq!((journal.allocs(), journal.frees()), (2, 2));
    bench.assert_clean();
}

#[test]
fn s20_oversized_request() {
    let bench = any_backend("s20");
    for options in [Options::persistent(), Options::ordinary()] {
        let asked = Arc::new(Mutex::new(signal_request(64)));
        let rig = bench.prepare_any(&options, &[requesting("asking", &asked), f0()], 2);
        let request = |window_bytes, buffers: &[(&str, u64)]| DomainRequest {
            workers: vec![ChipId(0), ChipId(1)],
            window_bytes,
            buffers: buffers.iter().map(|(name, nbytes)| NamedBuffer::bytes(*name, *nbytes)).collect(),
        };
        type Check = fn(&RequestError) -> bool;
        let cases: [(DomainRequest, Check); 5] = [
            (request(64, &[("a", 40), ("b", 40)]), |e| {
                matches!(e, RequestError::Oversized { named: 80, window: 64 })
            }),
            (request(0, &[]), |e| matches!(e, RequestError::ZeroWindow)),
            (request(64, &[("a", 8), ("a", 8)]), |e| matches!(e, RequestError::DuplicateBuffer { .. })),
            (request(64, &[("a", 0)]), |e| matches!(e, RequestError::EmptyBuffer { .. })),
            (request(u64::MAX, &[("a", u64::MAX), ("b", 2)]), |e| matches!(e, RequestError::Overflow { .. })),
        ];
        for (request, expected) in cases {
            *asked.lock().unwrap() = request;
            let error = rig.worker.run(rig.ids[0], &no_args()).unwrap_err();
            let Error::Request { name, source } = &error else { panic!("{error:?}") };
            assert!(&**name == DOMAIN && expected(source), "{error:?}");
            assert!(!error.must_reprepare());
        }
        if let Some(journal) = rig.try_journal() {
            let touched = |e: &EventKind| {
                matches!(e, EventKind::Alloc { .. } | EventKind::AllocFailed { .. } | EventKind::Accept(_))
            };
            assert_eq!(journal.select(touched), []);
        }
        rig.worker.run(rig.ids[1], &no_args()).unwrap();
        *asked.lock().unwrap() = signal_request(64);
        rig.worker.run(rig.ids[0], &no_args()).unwrap();
        rig.worker.close().unwrap();
    }
    bench.assert_clean();
}
