//! Arguments that can be checked before a dispatch opens are: a mistake there rejects the dispatch and loses nothing
//! (rules 12 and 17, I13).
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::sync::Arc;

use pto_dispatch::{
    Args, Build, DeviceTensor, EntryInput, Error, HostBuffer, Lease, LeaseError, Options, Program, ProgramResult,
    ProgramSpec, Tensor,
};
use pto_mock::{EventKind, KernelObject, kernels};
use pto_simpler_sys::{Access, CallConfig, CallableKind, CallableSpec, ChipId, DataType, Family, RunId};
use pto_tests::rig::{Bench, Rig, emulator_only};
use pto_tests::scenario::{DOMAIN, add, program, signal_request};

const CHIP: ChipId = ChipId(0);
const ADD: usize = 0;
const SUB: usize = 1;
const ENTRY: usize = 2;

/// What a builder gets wrong: given the lease of a warm domain with a buffer of 64 bytes, a host buffer of 64 bytes, and
/// a device tensor of 64 bytes.
type Mistake = for<'b> fn(&Build<'b>, &Lease<'b>, &HostBuffer, &DeviceTensor) -> Result<(), Error>;

fn words<'a, 'b>(
    build: &Build<'b>,
    place: impl Into<pto_dispatch::Place<'a, 'b>>,
    elements: u32,
) -> Result<Tensor<'b>, Error>
where
    'b: 'a,
{
    build.tensor(place, &[elements], DataType::Int32, Access::InOut)
}

fn signal<'b>(lease: &Lease<'b>) -> Result<pto_dispatch::LeasedBuffer<'b>, Error> {
    // Lease errors become errors of the dispatch by themselves.
    Ok(lease.buffer(CHIP, "signal")?)
}

fn task<'b>(build: &Build<'b>, tensor: Tensor<'b>) -> Result<(), Error> {
    build.task(ADD)?.tensor(tensor).scalar(1).submit(CHIP)
}

const MISTAKES: [(&str, &str, Mistake); 18] = [
    ("tensor over a window", "its place has 64 bytes", |build, lease, _, _| {
        words(build, &signal(lease)?, 17).and_then(|tensor| task(build, tensor))
    }),
    ("tensor over a host buffer", "its place has 64 bytes", |build, _, host, _| {
        words(build, host, 17).and_then(|tensor| task(build, tensor))
    }),
    ("tensor over device memory", "its place has 64 bytes", |build, _, _, device| {
        words(build, device, 17).and_then(|tensor| task(build, tensor))
    }),
    ("tensor over scratch", "its place has 8 bytes", |build, _, _, _| {
        let scratch = build.scratch(8)?;
        words(build, scratch, 3).and_then(|tensor| task(build, tensor))
    }),
    ("tensor over an intermediate", "its place has 32 bytes", |build, _, _, _| {
        let intermediate = build.intermediate(0)?;
        words(build, intermediate, 9).and_then(|tensor| task(build, tensor))
    }),
    ("tensor beyond 64 bits", "beyond 64 bits", |build, lease, _, _| {
        let place = signal(lease)?;
        let tensor = build.tensor(&place, &[u32::MAX; 5], DataType::Int64, Access::InOut)?;
        task(build, tensor)
    }),
    ("moved over the end", "ends at byte 68", |build, lease, _, _| {
        task(build, words(build, &signal(lease)?, 1)?.at(64))
    }),
    ("moved beyond 64 bits", "beyond 64 bits", |build, lease, _, _| {
        task(build, words(build, &signal(lease)?, 1)?.at(u64::MAX - 3))
    }),
    ("moved off the elements", "a multiple of 4", |build, lease, _, _| {
        task(build, words(build, &signal(lease)?, 1)?.at(2))
    }),
    ("in a group", "ends at byte 128", |build, lease, _, _| {
        let good = words(build, &signal(lease)?, 1)?;
        let other = lease.buffer(ChipId(1), "signal")?;
        let bad = words(build, &other, 16)?.at(64);
        build.group(ADD)?.member(CHIP).tensor(good).scalar(1).member(ChipId(1)).tensor(bad).scalar(1).submit()
    }),
    ("for a sub-worker", "ends at byte 68", |build, _, host, _| {
        build.task(SUB)?.tensor(words(build, host, 1)?.at(64)).scalar(1).submit_sub()
    }),
    ("for an entry", "ends at byte 68", |build, _, host, _| {
        let tensor = words(build, host, 1)?.at(64);
        build.run_entry(ENTRY, &[("x".into(), EntryInput::Tensor(tensor))])
    }),
    ("copy larger than the window", "the device side has 64 bytes", |build, lease, _, _| {
        build.copy_to(&signal(lease)?, &large())
    }),
    ("copy larger than device memory", "the device side has 64 bytes", |build, _, _, device| {
        build.copy_to(device, &large())
    }),
    ("copy from a smaller window", "the device side has 64 bytes", |build, lease, _, _| {
        build.copy_from(&large(), &signal(lease)?)
    }),
    ("copy from smaller device memory", "the device side has 64 bytes", |build, _, _, device| {
        build.copy_from(&large(), device)
    }),
    ("no such buffer", "no buffer", |_, lease, _, _| {
        lease.buffer(CHIP, "nothing")?;
        Ok(())
    }),
    ("no such member", "no member", |_, lease, _, _| {
        lease.device_context(ChipId(7))?;
        Ok(())
    }),
];

thread_local! {
    /// A host buffer of 128 bytes; builders run on the submitting thread.
    static LARGE: std::cell::RefCell<Option<HostBuffer>> = const { std::cell::RefCell::new(None) };
}

fn large() -> HostBuffer {
    LARGE.with_borrow(|large| large.clone().unwrap())
}

/// Scalar 0 chooses a mistake, counted from 1.
fn mistaken() -> Arc<dyn Program> {
    let entry = CallableSpec {
        name: "entry".into(),
        kind: CallableKind::Entry,
        signature: None,
        source: KernelObject::entry(|_| Ok(())).into_source(),
    };
    let spec = ProgramSpec::new("mistaken")
        .callable(add())
        .callable(CallableSpec::sub(kernels::SUB_ADD, kernels::signature(kernels::SUB_ADD)))
        .callable(entry)
        .intermediate(32)
        .parameter(pto_dispatch::Parameter::scalar("mistake"))
        .parameter(pto_dispatch::Parameter::host("host", 64))
        .parameter(pto_dispatch::Parameter::device("device", 64));
    program(spec, |build, args| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        let mistake = usize::try_from(args.scalar_at(0)?)?;
        if let Some((_, _, mistake)) = mistake.checked_sub(1).and_then(|at| MISTAKES.get(at)) {
            mistake(build, &lease, args.host_at(1)?, args.device_at(2)?)?;
        }
        correct(build, &lease)
    })
}

fn correct<'b>(build: &Build<'b>, lease: &Lease<'b>) -> ProgramResult {
    // The last four bytes of the buffer.
    Ok(task(build, words(build, &signal(lease)?, 1)?.at(60))?)
}

fn rig(bench: &Bench) -> (Rig, HostBuffer, DeviceTensor) {
    let rig = bench.prepare(&Options::persistent(), &[mistaken()], bench.builder());
    let host = rig.worker.create_buffer(64).unwrap();
    let device = rig.worker.alloc(CHIP, 64).unwrap();
    (rig, host, device)
}

/// Rule 17, I13: none of these opens the dispatch, so none of them poisons, on a warm domain with reset on.
#[test]
fn mistakes_in_arguments_reject_the_dispatch_and_poison_nothing() {
    let Some(bench) = emulator_only("early checks") else { return };
    let (rig, host, device) = rig(&bench);
    LARGE.set(Some(rig.worker.create_buffer(128).unwrap()));
    let dispatch = |mistake: u64| rig.worker.call(&Args::new().scalar(mistake).host(&host).device(&device));
    dispatch(0).unwrap();
    for (number, (name, says, _)) in (1..).zip(MISTAKES) {
        let cost = || {
            let stats = rig.worker.stats(rig.ids[0]).unwrap();
            (stats.dispatches, stats.allocations, stats.reuses, stats.zeroed_bytes)
        };
        let before = cost();
        let copies = rig.journal().copies().len();
        let error = dispatch(number).unwrap_err();
        assert!(matches!(error, Error::Build(_) | Error::Lease(_)), "{name}: {error:?}");
        assert!(error.to_string().contains(says), "{name}: {error}");
        assert_eq!(error.family(), Family::Misuse, "{name}");
        assert!(!error.must_reprepare() && !error.may_retry(), "{name}");
        assert_eq!(cost(), before, "{name}: something was counted");
        assert_eq!(rig.journal().copies().len(), copies, "{name}: something was copied");
        // Rule 12: opening registers every retained domain first.
        let opened = |e: &EventKind| matches!(e, EventKind::Reuse { run, .. } if *run == RunId(number * 2));
        assert!(!rig.journal().contains(opened), "{name}: the dispatch opened\n{}", rig.journal());
        dispatch(0).unwrap_or_else(|error| panic!("{name} left an unusable worker: {error}"));
    }
    LARGE.set(None);
    drop((host, device));
    rig.worker.close().unwrap();
    drop(rig);
    bench.assert_clean();
}

/// Lease errors convert with `?` into what calls of a build return.
#[test]
fn a_lease_error_is_an_error_of_the_dispatch() {
    let error: Error = LeaseError::NotAMember {
        key: pto_domain::DomainKey::new(pto_domain::ProgramIndex::new(0), pto_domain::DomainName::new("d")),
        chip: ChipId(7),
        members: Arc::from([CHIP]),
    }
    .into();
    assert_eq!(error.family(), Family::Misuse);
    assert!(error.to_string().contains("chip7 is no member of p0:d"), "{error}");
}

/// Rule 17, rule 4: a configuration that no run can have is refused before the build, and the worker goes on.
#[test]
fn an_impossible_configuration_rejects_the_dispatch() {
    let Some(bench) = emulator_only("configuration") else { return };
    let rig = bench.prepare(&Options::persistent(), &[pto_tests::scenario::f1()], bench.builder());
    rig.worker.call(&Args::new()).unwrap();
    let mut config = CallConfig::new();
    config.swimlane = true;
    for error in [
        rig.worker.submit_with(rig.ids[0], &Args::new(), &config).map(drop).unwrap_err(),
        rig.worker.try_submit_with(rig.ids[0], &Args::new(), &config).map(drop).unwrap_err(),
    ] {
        assert!(error.to_string().contains("output_prefix"), "{error}");
        assert_eq!(error.family(), Family::Misuse);
    }
    assert_eq!(rig.journal().count(|e| matches!(e, EventKind::Admit { .. })), 1, "refused before the backend");
    config.output_prefix = Some("profile".into());
    rig.worker.submit_with(rig.ids[0], &Args::new(), &config).unwrap().wait().unwrap();
    assert_eq!(rig.journal().allocs(), 1);
    rig.worker.close().unwrap();
    drop(rig);
    bench.assert_clean();
}
