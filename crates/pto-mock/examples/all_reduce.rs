//! An all-reduce on two emulated chips, once undisturbed and once under a schedule of faults, with its journal.
//!
//! Each chip adds its vector to both windows' sums and signals; whoever has all signals has the sum. The second request
//! meets a fault that kills chip 1 in its task. The journal shows what the emulator makes of it: the run fails with the
//! chip's name, its windows are freed once all the same, and the backend closes.
//!
//! `cargo run -p pto-mock --example all_reduce`

use std::error::Error;
use std::sync::{Arc, mpsc};

use pto_mock::{Emulator, EventKind, FaultSchedule, Kernel, KernelError};
use pto_simpler_sys::{
    Access, Backend, BackendError, BuildFailed, Call, CallConfig, CallableId, CallableSpec, ChipId, DataType,
    DomainAllocation, DomainRequest, DomainState, FailureKind, GraphBuilder, HostBufferId, NamedBuffer,
    Orchestrator, RunEvents, RunId, RunOutcome, Shape, Signature, TaskArgs, TensorArg, TensorPlace,
};

const CHIPS: u32 = 2;
/// Elements of the vector, 32-bit integers.
const ELEMENTS: u32 = 8;
const SUM: usize = 0;
const SIGNAL: usize = 1;

/// The kernel of each chip: input, output, and the device context of the domain.
fn all_reduce(kernel: &Kernel<'_>) -> Result<(), KernelError> {
    let (input, output) = (kernel.tensor(0)?.to_vec()?, kernel.tensor(1)?);
    let domain = kernel.domain(kernel.scalar(0)?)?;
    for rank in 0..domain.size() {
        let sum = domain.buffer(rank, SUM)?;
        for (at, word) in (0..).step_by(4).zip(input.chunks_exact(4)) {
            sum.cell(at)?.fetch_add(i32::from_ne_bytes([word[0], word[1], word[2], word[3]]))?;
        }
        domain.buffer(rank, SIGNAL)?.cell(0)?.fetch_add(1)?;
    }
    // A peer that fails interrupts this wait.
    let all = i32::try_from(domain.size()).map_err(|_| KernelError::failed("too many ranks"))?;
    domain.buffer(domain.rank(), SIGNAL)?.cell(0)?.wait(|signals| signals == all)?;
    output.store(0, &domain.buffer(domain.rank(), SUM)?.to_vec()?)
}

/// The graph of one request: a domain of its own, and one task on each chip.
struct Request {
    kernel: CallableId,
    inputs: [HostBufferId; CHIPS as usize],
    outputs: [HostBufferId; CHIPS as usize],
    domain: DomainAllocation,
    error: Option<BackendError>,
}

impl Request {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BackendError> {
        let nbytes = u64::from(ELEMENTS) * DataType::Int32.size();
        let buffers = vec![NamedBuffer::bytes("sum", nbytes), NamedBuffer::bytes("signal", 64)];
        let request = DomainRequest::packed(0..CHIPS, buffers);
        orchestrator.allocate_domain("all_reduce", &request, &mut self.domain)?;
        let shape = Shape::new(&[ELEMENTS]).ok_or_else(|| BackendError::misuse(Call::Submit, "no elements"))?;
        let args: Vec<TaskArgs> = (self.domain.members().iter().zip(self.inputs).zip(self.outputs))
            .map(|((member, input), output)| {
                let tensor = |buffer, access| TensorArg {
                    place: TensorPlace::Host(buffer),
                    shape,
                    dtype: DataType::Int32,
                    byte_offset: 0,
                    access,
                };
                let mut args = TaskArgs::new();
                args.tensor(tensor(input, Access::Input)).tensor(tensor(output, Access::OutputExisting));
                args.scalar(member.device_context);
                args
            })
            .collect();
        orchestrator.submit_next_level_group(self.kernel, &args, None, &request.workers)
    }
}

impl GraphBuilder for Request {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
        Self::build(self, orchestrator).map_err(|error| {
            self.error = Some(error);
            BuildFailed
        })
    }
}

struct Ends(mpsc::Sender<RunOutcome>);

impl RunEvents for Ends {
    fn ended(&self, _run: RunId, outcome: RunOutcome) {
        // Nobody listens any more where the example has failed meanwhile.
        let _ = self.0.send(outcome);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    // Counted from the start: chip 1's first task succeeds, its second one dies of a signal.
    let schedule: FaultSchedule = "task@chip1#2:before=chip-died(signal=9)".parse()?;
    println!("schedule: {schedule}\n");
    let signature = Signature::new([Access::Input, Access::OutputExisting], 1);
    let emulator = Emulator::builder()
        .chips(CHIPS)
        .kernel("all_reduce", signature.clone(), all_reduce)
        .faults(schedule)
        .build()?;
    let kernel = emulator.register(&CallableSpec::chip("all_reduce", signature))?.id;
    let (sender, ends) = mpsc::channel();
    emulator.start(Arc::new(Ends(sender)))?;

    let nbytes = u64::from(ELEMENTS) * DataType::Int32.size();
    let buffer = || emulator.create_buffer(nbytes);
    let mut request = Request {
        kernel,
        inputs: [buffer()?, buffer()?],
        outputs: [buffer()?, buffer()?],
        domain: DomainAllocation::new(),
        error: None,
    };
    for (chip, input) in (1..).zip(request.inputs) {
        let values: Vec<u8> = (0..ELEMENTS).flat_map(|i| (i * chip).to_ne_bytes()).collect();
        emulator.write_buffer(input, 0, &values)?;
    }

    let mut run = |id: u64| -> Result<RunOutcome, Box<dyn Error>> {
        if let Err(error) = emulator.submit(RunId(id), &CallConfig::new(), &mut request) {
            return Err(request.error.take().map_or_else(|| error.into(), Into::into));
        }
        Ok(ends.recv()?)
    };
    let (undisturbed, disturbed) = (run(1)?, run(2)?);
    let last = request.domain.id().ok_or("no domain was allocated")?;

    undisturbed.result?;
    for (chip, output) in (0..CHIPS).zip(request.outputs) {
        let mut bytes = vec![0; usize::try_from(nbytes)?];
        emulator.read_buffer(output, 0, &mut bytes)?;
        let sums: Vec<u32> = bytes.chunks_exact(4).map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]])).collect();
        println!("run1: chip{chip} has {sums:?}");
        if !sums.iter().copied().eq((0..ELEMENTS).map(|i| i * 3)) {
            return Err("the sum of i and 2i is 3i".into());
        }
    }
    let error = disturbed.result.err().ok_or("the armed fault did not fire")?;
    println!("run2: {error}\n");
    let death = error.runtime().ok_or("a dead chip is the runtime's failure")?;
    if death.chip != Some(ChipId(1)) || death.kind != (FailureKind::ChipDied { exit_code: None, signal: Some(9) }) {
        return Err(format!("not what was armed: {error}").into());
    }
    emulator.close()?;

    let journal = emulator.journal();
    for event in journal.events() {
        println!("{event}");
    }
    // The rules that a test would assert: domains of a failed run are freed too, once, after its fence.
    let freed = |event: &EventKind| matches!(event, EventKind::Free { domain, .. } if *domain == last);
    if (journal.allocs(), journal.frees(), journal.count(freed)) != (2, 2, 1) {
        return Err("each allocation is freed exactly once".into());
    }
    if !journal.before(|e| *e == EventKind::Fence(RunId(2)), freed) {
        return Err("a domain was freed before the fence of its run".into());
    }
    if emulator.domain_state(last)? != DomainState::Freed {
        return Err(format!("{last} is not freed").into());
    }
    println!("\n2 allocations, each freed once and after the fence of its run");
    Ok(())
}
