//! Fault schedules: texts parse or are refused, schedules print and parse back, and a worker under any schedule neither
//! panics nor leaks.
#![no_main]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pto_dispatch::{Args, Build, Options, PreparedWorker, Program, ProgramResult, ProgramSpec};
use pto_mock::{CALLS, Emulator, Fault, FaultEffect, FaultKind, FaultSchedule, Memory, kernels};
use pto_simpler_sys::{Access, Backend, CallableSpec, ChipId, DataType, DomainRequest, NamedBuffer};

#[derive(Arbitrary, Debug)]
struct OneFault {
    call: u8,
    chip: Option<u8>,
    occurrence: u8,
    effect: u8,
    kind: u8,
    number: u32,
    fatal: bool,
}

#[derive(Arbitrary, Debug)]
struct Input {
    text: String,
    faults: Vec<OneFault>,
    persistent: bool,
    reset: bool,
    dispatches: u8,
}

impl OneFault {
    fn fault(&self) -> Fault {
        let (call, _) = CALLS[usize::from(self.call) % CALLS.len()];
        let effects =
            [FaultEffect::Before, FaultEffect::After, FaultEffect::NoReply, FaultEffect::Hang, FaultEffect::Unwind];
        let kind = match self.kind % 7 {
            0 => FaultKind::Plain,
            1 => FaultKind::ChipExited(self.number as i32),
            2 => FaultKind::ChipKilled(self.number as i32),
            3 => FaultKind::DeviceTimeout,
            4 => FaultKind::OutOfSharedMemory(u64::from(self.number)),
            5 => FaultKind::OutOfDeviceMemory(u64::from(self.number)),
            _ => FaultKind::Deferred,
        };
        let mut fault = Fault::new(call, effects[usize::from(self.effect) % effects.len()])
            .nth(u64::from(self.occurrence % 8))
            .with_kind(kind);
        fault.chip = self.chip.map(|chip| ChipId(u32::from(chip % 3)));
        fault.failure.fatal = self.fatal;
        fault
    }
}

#[derive(Debug)]
struct Tiny(ProgramSpec);

impl Program for Tiny {
    fn spec(&self) -> &ProgramSpec {
        &self.0
    }

    fn build<'b>(&self, build: &Build<'b>, _: &Args) -> ProgramResult {
        let request = DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("b", 16)]);
        let lease = build.lease("d0", &request)?;
        for chip in [ChipId(0), ChipId(1)] {
            let buffer = lease.buffer(chip, "b")?;
            let words = build.tensor(&buffer, &[4], DataType::Int32, Access::InOut)?;
            build.task(0)?.tensor(words).scalar(1).submit(chip)?;
        }
        Ok(())
    }
}

fn worker_under(schedule: FaultSchedule, input: &Input) {
    let emulator =
        kernels::install(Emulator::builder()).chips(2).memory(Memory::Heap).faults(schedule).build().unwrap();
    let spec =
        ProgramSpec::new("tiny").callable(CallableSpec::chip(kernels::ADD, kernels::signature(kernels::ADD)));
    let options = if input.persistent { Options::persistent().reset(input.reset) } else { Options::ordinary() };
    let backend = Arc::clone(&emulator) as Arc<dyn Backend>;
    if let Ok(worker) = PreparedWorker::prepare(&[Arc::new(Tiny(spec)) as _], &options, backend) {
        let id = worker.only().unwrap();
        for _ in 0..input.dispatches % 5 {
            // Only an unwinding submission unwinds here.
            if let Ok(Ok(dispatch)) = catch_unwind(AssertUnwindSafe(|| worker.submit(id, &Args::new()))) {
                let _outcome = dispatch.wait();
            }
        }
        while worker.close().is_err_and(|error| error.may_retry()) {}
    }
    emulator.faults().disarm();
    emulator.close().unwrap();
    let stats = emulator.stats();
    assert_eq!((stats.domains, stats.runs, stats.host_buffers, stats.threads), (0, 0, 0, 0), "{stats:?}");
}

fuzz_target!(|input: Input| {
    if let Ok(schedule) = input.text.parse::<FaultSchedule>() {
        assert_eq!(schedule.to_string().parse(), Ok(schedule));
    }
    let schedule: FaultSchedule = input.faults.iter().take(6).map(OneFault::fault).collect();
    assert_eq!(schedule.to_string().parse().as_ref(), Ok(&schedule));
    // Nobody is here to let a call that hangs go on.
    worker_under(schedule.faults.into_iter().filter(|fault| fault.effect != FaultEffect::Hang).collect(), &input);
});
