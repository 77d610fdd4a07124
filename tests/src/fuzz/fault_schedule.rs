//! Fault schedules.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pto_dispatch::{
    Args, Build, Dispatch, Error, HostBuffer, Options, Parameter, PreparedWorker, Program, ProgramResult,
    ProgramSpec, Staging,
};
use pto_mock::{CALLS, Emulator, Fault, FaultEffect, FaultKind, FaultSchedule, Memory, kernels};
use pto_simpler_sys::{
    Access, Backend, CallableSpec, ChipId, CopyGranularity, DataType, DomainRequest, NamedBuffer,
};

use super::Bytes;

const EFFECTS: [FaultEffect; 5] =
    [FaultEffect::Before, FaultEffect::After, FaultEffect::NoReply, FaultEffect::Hang, FaultEffect::Unwind];

fn fault(input: &mut Bytes<'_>) -> Fault {
    let (call, _) = CALLS[usize::from(input.u8()) % CALLS.len()];
    let effect = EFFECTS[usize::from(input.u8()) % EFFECTS.len()];
    let occurrence = input.below(8).into();
    let kind = match input.below(7) {
        0 => FaultKind::Plain,
        1 => FaultKind::ChipExited(input.u32().cast_signed()),
        2 => FaultKind::ChipKilled(input.u32().cast_signed()),
        3 => FaultKind::DeviceTimeout,
        4 => FaultKind::OutOfSharedMemory(input.u64()),
        5 => FaultKind::OutOfDeviceMemory(input.u64()),
        _ => FaultKind::Deferred,
    };
    let mut fault = Fault::new(call, effect).nth(occurrence).with_kind(kind);
    // Chips 0 and 1 exist; nothing ever happens on chip 2.
    fault.chip = [None, Some(ChipId(0)), Some(ChipId(1)), Some(ChipId(2))][usize::from(input.below(4))];
    fault.failure.fatal = input.flag();
    fault
}

/// How a worker is used.
#[derive(Debug)]
struct Use {
    options: Options,
    /// Windows keep what earlier dispatches left in them.
    stale: bool,
    granularity: CopyGranularity,
    depth: u32,
    dispatches: u8,
    /// Each dispatch is waited for before the next is submitted.
    one_at_a_time: bool,
    schedule: FaultSchedule,
}

impl Use {
    fn read(input: &mut Bytes<'_>) -> Self {
        let (options, stale) = match input.below(4) {
            0 => (Options::ordinary(), false),
            1 => (Options::persistent(), false),
            2 => (Options::persistent().reset(false), true),
            _ => (Options::persistent().staging(Staging::Retained { cap_bytes: NBYTES }), false),
        };
        Self {
            options,
            stale,
            granularity: if input.flag() { CopyGranularity::ByteRange } else { CopyGranularity::WholeBuffer },
            depth: 1 + u32::from(input.below(2)),
            dispatches: input.below(5),
            one_at_a_time: input.flag(),
            schedule: input.list(6, fault).into_iter().collect(),
        }
    }
}

/// Bytes of the first domain's window, and of each argument.
const NBYTES: u64 = 16;

const ADD: usize = 0;
const COPY: usize = 1;
const STORE: usize = 2;
const SUB_ADD: usize = 3;

/// Adds 1 to each element of two domains, and copies what came of it in the first, on each chip into an argument of its
/// own. Makes most calls that a graph can make.
#[derive(Debug)]
struct Adds(ProgramSpec);

impl Adds {
    fn new() -> Self {
        let chip = |name| CallableSpec::chip(name, kernels::signature(name));
        let spec = ProgramSpec::new("adds")
            .callable(chip(kernels::ADD))
            .callable(chip(kernels::COPY))
            .callable(chip(kernels::STORE))
            .callable(CallableSpec::sub(kernels::SUB_ADD, kernels::signature(kernels::SUB_ADD)))
            .parameter(Parameter::host("chip 0", NBYTES))
            .parameter(Parameter::host("chip 1", NBYTES))
            .intermediate(NBYTES);
        Self(spec)
    }
}

impl Program for Adds {
    fn spec(&self) -> &ProgramSpec {
        &self.0
    }

    fn build<'b>(&self, build: &Build<'b>, args: &Args) -> ProgramResult {
        let chips = [ChipId(0), ChipId(1)];
        let lease =
            |name, nbytes| build.lease(name, &DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("b", nbytes)]));
        let (sums, others) = (lease("sums", NBYTES)?, lease("others", 2 * NBYTES)?);
        let mut group = build.group(ADD)?;
        for chip in chips {
            let words = build.tensor(&sums.buffer(chip, "b")?, &[4], DataType::Int32, Access::InOut)?;
            group = group.member(chip).tensor(words).scalar(1);
        }
        group.submit()?;
        build.scope(|| {
            for (index, chip) in chips.into_iter().enumerate() {
                let words = build.tensor(&others.buffer(chip, "b")?, &[8], DataType::Int32, Access::InOut)?;
                build.task(ADD)?.tensor(words).scalar(1).submit(chip)?;
                let sum = build.tensor(&sums.buffer(chip, "b")?, &[4], DataType::Int32, Access::Input)?;
                let out = args.host_at(index)?;
                let out = build.tensor(out, &[4], DataType::Int32, Access::OutputExisting)?;
                build.task(COPY)?.tensor(sum).tensor(out).submit(chip)?;
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        })?;
        let scratch = build.scratch(NBYTES)?;
        let words = build.tensor(scratch, &[4], DataType::Int32, Access::Output)?;
        build.task(STORE)?.tensor(words).scalar(7).submit(ChipId(0))?;
        let note = build.tensor(build.intermediate(0)?, &[4], DataType::Int32, Access::InOut)?;
        build.task(SUB_ADD)?.tensor(note).scalar(1).submit_sub()?;
        Ok(())
    }
}

/// One dispatch: its arguments, and what came of it.
type Attempt = ([HostBuffer; 2], Result<Dispatch, Option<Error>>);

/// Uses a worker; whatever happens, it ends, and nothing is left.
fn worker_under(plan: &Use) {
    let emulator = kernels::install(Emulator::builder())
        .chips(2)
        .memory(Memory::Heap)
        .depth(plan.depth)
        .copy_granularity(plan.granularity)
        .faults(plan.schedule.clone())
        .build()
        .unwrap();
    let untouched = || emulator.faults().pending().len() == plan.schedule.faults.len();
    let backend = Arc::clone(&emulator) as Arc<dyn Backend>;
    match PreparedWorker::prepare(&[Arc::new(Adds::new()) as _], &plan.options, backend) {
        Err(error) => assert!(!untouched(), "prepare failed by itself: {error}"),
        Ok(worker) => {
            let all_well = dispatch_all(&worker, plan);
            assert!(all_well || !untouched(), "a dispatch failed by itself");
            let closed = worker.close();
            assert!(closed.is_ok() || !untouched(), "close failed by itself: {closed:?}");
            emulator.faults().disarm();
            let mut closed = closed;
            for _ in 0..3 {
                if closed.is_err_and(|error| error.may_retry()) {
                    closed = worker.close();
                } else {
                    closed = Ok(());
                }
            }
            assert!(
                closed.is_ok(),
                "without faults a close that may be retried is over after some tries: {closed:?}"
            );
        }
    }
    emulator.faults().disarm();
    emulator.close().unwrap();
    let stats = emulator.stats();
    assert_eq!((stats.domains, stats.runs, stats.host_buffers, stats.scratch), (0, 0, 0, 0), "{stats:?}");
    assert_eq!((stats.threads, stats.committed_bytes), (0, vec![0, 0]));
}

/// Says whether every dispatch succeeded. One that says so must have the right result.
fn dispatch_all(worker: &PreparedWorker, plan: &Use) -> bool {
    let Ok(id) = worker.only() else { return false };
    let mut attempts: Vec<Attempt> = Vec::new();
    let mut all_well = true;
    for _ in 0..plan.dispatches {
        let (Ok(a), Ok(b)) = (worker.create_buffer(NBYTES), worker.create_buffer(NBYTES)) else {
            all_well = false;
            continue;
        };
        let args = Args::new().host(&a).host(&b);
        // An injected unwind in a builder's call comes back to the submitter.
        let submitted = catch_unwind(AssertUnwindSafe(|| worker.submit(id, &args)));
        let submitted = submitted.map_or(Err(None), |submitted| submitted.map_err(Some));
        if let (true, Ok(dispatch)) = (plan.one_at_a_time, &submitted) {
            let _later = dispatch.wait();
        }
        attempts.push(([a, b], submitted));
    }
    for (index, (buffers, submitted)) in attempts.iter().enumerate() {
        let Ok(Ok(())) = submitted.as_ref().map(Dispatch::wait) else {
            all_well = false;
            continue;
        };
        let most = if plan.stale { i32::try_from(index).unwrap() + 1 } else { 1 };
        for buffer in buffers {
            let mut bytes = [0; NBYTES as usize];
            if buffer.read(0, &mut bytes).is_err() {
                all_well = false;
                continue;
            }
            let words: Vec<i32> =
                bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
            assert!(
                words.iter().all(|word| (1..=most).contains(word)),
                "dispatch {index}: {words:?}, at most {most}"
            );
        }
    }
    all_well
}

/// Texts to the parser of fault schedules, or schedules to a prepared worker.
///
/// # Panics
///
/// Where a claim does not hold.
pub fn fault_schedule(bytes: &[u8]) {
    let mut input = Bytes::new(bytes);
    if input.flag() {
        if let Ok(schedule) = String::from_utf8_lossy(input.rest()).parse::<FaultSchedule>() {
            assert_eq!(schedule.to_string().parse(), Ok(schedule));
        }
        return;
    }
    let mut plan = Use::read(&mut input);
    assert_eq!(plan.schedule.to_string().parse().as_ref(), Ok(&plan.schedule));
    // Nobody is here to let a call that hangs go on.
    plan.schedule.faults.retain(|fault| fault.effect != FaultEffect::Hang);
    worker_under(&plan);
}
