//! S84, the part that counts: a warm dispatch makes no heap allocation in `pto-dispatch` (design, cost model).
//!
//! A binary of its own, because the counting allocator is global. The backend here is made for the purpose: once
//! warm it allocates nothing itself, and it reports the end of a run inside `submit`, so that submission, the end of
//! the dispatch and the wait are all counted on the one thread that is measured. A second backend reports ends from
//! a thread of its own, so that the waiter really waits.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests too")]

use std::hint::black_box;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};

use allocation_counter::{AllocationInfo, measure};
use pto_dispatch::{
    Args, Build, Error, Options, Parameter, PreparedWorker, Program, ProgramResult, ProgramSpec, Staging,
};
use pto_simpler_sys::{
    AbandonReport, Access, Backend, BackendError, BackendPhase, BufferWindow, Call, CallConfig, CallableId,
    CallableSpec, Capabilities, ChipId, CopyGranularity, CopyResult, CopyTo, DataType, Depth, DeviceBufferId,
    DevicePlace, DomainAllocation, DomainId, DomainRequest, DomainState, EntryCall, EntryHost, GraphBuilder,
    HostBufferId, MemberWindow, NamedBuffer, Negotiated, Orchestrator, Registered, RunEvents, RunId, RunOutcome,
    RunState, ScratchId, Signature, SubmitError, TaskArgs,
};
use pto_tests::gate::{Gate, HangGuard};

type Result<T> = std::result::Result<T, BackendError>;

/// What the silent backend remembers.
#[derive(Debug, Default)]
struct Memory {
    domains: Vec<(String, DomainRequest)>,
    hosts: u32,
    copies: u64,
    tasks: u64,
}

/// A backend that does nothing and, once warm, allocates nothing.
struct Silent {
    capabilities: Capabilities,
    memory: Mutex<Memory>,
    events: OnceLock<Arc<dyn RunEvents>>,
    /// Where set, ends are reported by whoever listens here, as long as the gate is open.
    reporter: Option<(SyncSender<RunId>, Gate)>,
}

impl std::fmt::Debug for Silent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Silent")
    }
}

impl Silent {
    fn new(granularity: CopyGranularity, reporter: Option<(SyncSender<RunId>, Gate)>) -> Arc<Self> {
        let mut capabilities = Capabilities::new("silent", "silent", vec![0, 1]);
        capabilities.copy_granularity = granularity;
        Arc::new(Self { capabilities, memory: Mutex::default(), events: OnceLock::new(), reporter })
    }

    /// Tasks and copies so far.
    fn counts(&self) -> (u64, u64) {
        let memory = self.memory.lock().unwrap();
        (memory.tasks, memory.copies)
    }

    fn report(&self, run: RunId) {
        self.events.get().unwrap().ended(run, RunOutcome::success());
    }
}

impl Backend for Silent {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn phase(&self) -> BackendPhase {
        if self.events.get().is_some() { BackendPhase::Ready } else { BackendPhase::New }
    }
    fn check_blocking(&self) -> Result<()> {
        Ok(())
    }
    fn register(&self, callable: &CallableSpec) -> Result<Registered> {
        Ok(Registered { id: CallableId::new(0, 1), signature: callable.signature.clone(), takes_domains: false })
    }
    fn start(&self, events: Arc<dyn RunEvents>) -> Result<Negotiated> {
        assert!(self.events.set(events).is_ok(), "started once");
        Ok(Negotiated::new(Depth::Exactly(2)))
    }
    fn submit(
        &self,
        run: RunId,
        _: &CallConfig,
        graph: &mut dyn GraphBuilder,
    ) -> std::result::Result<(), SubmitError> {
        graph.build(&SilentRun { backend: self, run })?;
        match &self.reporter {
            Some((reporter, _)) => reporter.send(run).unwrap(),
            None => self.report(run),
        }
        Ok(())
    }
    fn run_state(&self, _: RunId) -> RunState {
        RunState::Unknown
    }
    fn create_buffer(&self, _: u64) -> Result<HostBufferId> {
        let mut memory = self.memory.lock().unwrap();
        memory.hosts += 1;
        Ok(HostBufferId::new(memory.hosts, 1))
    }
    fn create_zeros(&self, nbytes: u64) -> Result<HostBufferId> {
        self.create_buffer(nbytes)
    }
    fn write_buffer(&self, _: HostBufferId, _: u64, _: &[u8]) -> Result<()> {
        Ok(())
    }
    fn read_buffer(&self, _: HostBufferId, _: u64, _: &mut [u8]) -> Result<()> {
        Ok(())
    }
    fn fill_buffer(&self, _: HostBufferId, _: u8) -> Result<()> {
        Ok(())
    }
    fn release_buffer(&self, _: HostBufferId) -> Result<()> {
        Ok(())
    }
    fn alloc(&self, _: ChipId, _: u64) -> Result<DeviceBufferId> {
        Ok(DeviceBufferId::new(0, 1))
    }
    fn free(&self, _: DeviceBufferId) -> Result<()> {
        Ok(())
    }
    fn copy_to(&self, _: &CopyTo) -> Result<()> {
        Ok(())
    }
    fn copy_from(&self, _: HostBufferId, _: DevicePlace, _: u64) -> Result<()> {
        Ok(())
    }
    fn release_domain(&self, _: DomainId) -> Result<()> {
        Ok(())
    }
    fn domain_state(&self, _: DomainId) -> Result<DomainState> {
        Ok(DomainState::Freed)
    }
    fn committed_device_memory(&self, _: ChipId) -> Result<u64> {
        Ok(0)
    }
    fn close(&self) -> Result<()> {
        Ok(())
    }
    fn abandon(&self) -> AbandonReport {
        AbandonReport::default()
    }
}

/// The orchestrator of one run.
struct SilentRun<'a> {
    backend: &'a Silent,
    run: RunId,
}

impl SilentRun<'_> {
    fn describe(&self, name: &str, request: &DomainRequest, reply: &mut DomainAllocation) {
        let mut memory = self.backend.memory.lock().unwrap();
        let known = memory.domains.iter().position(|(known, _)| known == name);
        let index = known.unwrap_or_else(|| {
            memory.domains.push((name.to_owned(), request.clone()));
            memory.domains.len() - 1
        });
        let base = (index as u64 + 1) << 20;
        reply.begin(DomainId::new(index as u32, 1), request.buffers.len());
        for (rank, chip) in request.workers.iter().enumerate() {
            let window = MemberWindow {
                chip: *chip,
                rank: rank as u32,
                device_context: 0xC0DE,
                base,
                mapped_bytes: request.window_bytes,
            };
            reply.push_member(
                window,
                request.buffers.iter().map(|b| BufferWindow { address: base, nbytes: b.nbytes }),
            );
        }
    }

    fn task(&self) -> Result<()> {
        self.backend.memory.lock().unwrap().tasks += 1;
        Ok(())
    }
}

impl Orchestrator for SilentRun<'_> {
    fn run(&self) -> RunId {
        self.run
    }
    fn allocate_domain(&self, name: &str, request: &DomainRequest, reply: &mut DomainAllocation) -> Result<()> {
        self.describe(name, request, reply);
        Ok(())
    }
    fn get_or_allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        _: bool,
        reply: &mut DomainAllocation,
    ) -> Result<()> {
        self.describe(name, request, reply);
        Ok(())
    }
    fn copy_to(&self, _: &CopyTo) -> Result<()> {
        self.backend.memory.lock().unwrap().copies += 1;
        Ok(())
    }
    fn copy_from(&self, _: HostBufferId, _: DevicePlace, _: u64) -> Result<()> {
        Ok(())
    }
    fn copy_batch(&self, copies: &[CopyTo], results: &mut Vec<CopyResult>) -> Result<()> {
        results.clear();
        results.extend(copies.iter().map(|_| CopyResult::Done));
        self.backend.memory.lock().unwrap().copies += copies.len() as u64;
        Ok(())
    }
    fn submit_next_level(&self, _: CallableId, _: &TaskArgs, _: Option<&CallConfig>, _: ChipId) -> Result<()> {
        self.task()
    }
    fn submit_next_level_group(
        &self,
        _: CallableId,
        _: &[TaskArgs],
        _: Option<&CallConfig>,
        _: &[ChipId],
    ) -> Result<()> {
        self.task()
    }
    fn submit_sub(&self, _: CallableId, _: &TaskArgs) -> Result<()> {
        self.task()
    }
    fn scope(
        &self,
        body: &mut dyn FnMut() -> std::result::Result<(), pto_simpler_sys::BuildFailed>,
    ) -> std::result::Result<(), SubmitError> {
        Ok(body()?)
    }
    fn alloc(&self, _: u64) -> Result<ScratchId> {
        Ok(ScratchId::new(0, 1))
    }
    fn run_entry(
        &self,
        _: CallableId,
        _: &EntryCall<'_>,
        _: &dyn EntryHost,
    ) -> std::result::Result<(), SubmitError> {
        Err(SubmitError::Backend(BackendError::misuse(Call::RunEntry, "no entries")))
    }
}

/// A program that uses everything that a warm dispatch may use.
struct Everything {
    spec: ProgramSpec,
    domains: [(&'static str, DomainRequest); 2],
}

const CHIPS: [ChipId; 2] = [ChipId(0), ChipId(1)];

impl Everything {
    fn program() -> Arc<dyn Program> {
        let data = |n: u64| {
            DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("data", n), NamedBuffer::bytes("signal", 64)])
        };
        let spec = ProgramSpec::new("everything")
            .callable(CallableSpec::chip("work", Signature::new([Access::InOut, Access::Input], 2)))
            .callable(CallableSpec::sub("host", Signature::new([Access::InOut], 0)))
            .parameter(Parameter::host("in", 64))
            .parameter(Parameter::device("cache", 64))
            .parameter(Parameter::scalar("step"))
            .intermediate(256);
        Arc::new(Self { spec, domains: [("d0", data(4096)), ("d1", data(64))] })
    }
}

impl Program for Everything {
    fn spec(&self) -> &ProgramSpec {
        &self.spec
    }

    fn build<'b>(&self, build: &Build<'b>, args: &Args) -> ProgramResult {
        let step = args.scalar_at(2)?;
        let input = args.host_at(0)?;
        let _ = build.tensor(args.device_at(1)?, &[64], DataType::Uint8, Access::InOut)?;
        let intermediate = build.intermediate(0)?;
        build.write_intermediate(intermediate, 0, &step.to_ne_bytes())?;
        let leases = [
            build.lease(self.domains[0].0, &self.domains[0].1)?,
            build.lease(self.domains[1].0, &self.domains[1].1)?,
        ];
        for lease in &leases {
            black_box(lease.epoch());
            let first = lease.buffer(CHIPS[0], "signal")?;
            build.copy_to(&first, input)?;
        }
        let scratch = build.scratch(64)?;
        build.scope(|| {
            for chip in CHIPS {
                let window = leases[0].buffer(chip, "data")?;
                build
                    .task(0)?
                    .tensor(build.tensor(&window, &[1024], DataType::Int32, Access::InOut)?)
                    .tensor(build.tensor(input, &[16], DataType::Int32, Access::Input)?)
                    .scalar(step)
                    .scalar(leases[0].device_context(chip)?)
                    .submit(chip)?;
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        })?;
        let mut group = build.group(0)?;
        for chip in CHIPS {
            let window = leases[1].buffer(chip, "data")?;
            group = group
                .member(chip)
                .tensor(build.tensor(&window, &[16], DataType::Int32, Access::InOut)?)
                .tensor(build.tensor(scratch, &[16], DataType::Int32, Access::Input)?)
                .scalar(step)
                .scalar(0);
        }
        group.submit()?;
        build.task(1)?.tensor(build.tensor(intermediate, &[64], DataType::Int32, Access::InOut)?).submit_sub()?;
        Ok(())
    }
}

const WARM: u64 = 4;
const MEASURED: u64 = 50;

/// Counts the allocations of warm dispatches: submit, wait, drop of the handle.
fn measure_warm(backend: &Arc<Silent>, options: &Options, copies_per_dispatch: u64) -> AllocationInfo {
    let worker = PreparedWorker::prepare(&[Everything::program()], options, Arc::clone(backend) as _).unwrap();
    let program = worker.only().unwrap();
    let input = worker.create_buffer(64).unwrap();
    let cache = worker.alloc(ChipId(0), 64).unwrap();
    let mut args = Args::new().host(&input).device(&cache).scalar(0);
    let config = CallConfig::new();
    let dispatch = |args: &Args, step: u64| {
        let handle = match step % 3 {
            0 => worker.submit(program, args),
            1 => worker.submit_with(program, args, &config),
            // A frame is free a moment after its outcome is published, so this may have to be asked again.
            _ => loop {
                match worker.try_submit(program, args) {
                    Err(Error::WouldBlock { .. }) => std::thread::yield_now(),
                    other => break other,
                }
            },
        };
        let handle = handle.unwrap();
        handle.clone().wait().unwrap();
        assert!(handle.is_done() && handle.outcome().unwrap().is_ok());
    };
    for step in 0..WARM {
        assert!(args.set_scalar(2, step));
        // Ends are held until both frames are in use: each has storage of its own, which must be warm.
        let gate = backend.reporter.as_ref().map(|(_, gate)| gate);
        gate.inspect(|gate| gate.shut());
        let both = [worker.submit(program, &args).unwrap(), worker.submit_with(program, &args, &config).unwrap()];
        gate.inspect(|gate| gate.open());
        for handle in both {
            handle.wait().unwrap();
        }
    }
    let before = backend.counts();
    let counted = measure(|| {
        for step in 0..MEASURED {
            args.set_scalar(2, step);
            dispatch(&args, step);
        }
    });
    // The control: the dispatches really were made.
    let after = backend.counts();
    assert_eq!((after.0 - before.0, after.1 - before.1), (MEASURED * 4, MEASURED * copies_per_dispatch));
    assert_eq!(worker.stats(program).unwrap().dispatches, 2 * WARM + MEASURED);
    drop((args, input, cache));
    worker.close().unwrap();
    counted
}

/// Two copies of the builder's own.
const OWN: u64 = 2;

/// Ends reported by a thread of their own.
fn with_reporter<T>(granularity: CopyGranularity, body: impl FnOnce(&Arc<Silent>) -> T) -> T {
    let (sender, receiver): (_, Receiver<RunId>) = sync_channel(2);
    let gate = Gate::new();
    let backend = Silent::new(granularity, Some((sender, gate.clone())));
    let silent = Arc::downgrade(&backend);
    let reporter = std::thread::spawn(move || {
        for run in receiver {
            gate.pass();
            let Some(backend) = silent.upgrade() else { return };
            backend.report(run);
        }
    });
    let result = body(&backend);
    drop(backend);
    reporter.join().unwrap();
    result
}

#[test]
fn s84_a_warm_dispatch_without_reset_allocates_nothing() {
    let backend = Silent::new(CopyGranularity::WholeBuffer, None);
    let counted = measure_warm(&backend, &Options::persistent().reset(false), OWN);
    assert_eq!(counted.count_total, 0, "{counted:?}");
}

#[test]
fn s84_a_warm_dispatch_with_retained_staging_allocates_nothing() {
    let backend = Silent::new(CopyGranularity::WholeBuffer, None);
    let options = Options::persistent().staging(Staging::Retained { cap_bytes: 1 << 20 });
    let counted = measure_warm(&backend, &options, OWN + 8);
    assert_eq!(counted.count_total, 0, "{counted:?}");
}

#[test]
fn s84_a_warm_dispatch_with_a_range_reset_allocates_nothing() {
    let backend = Silent::new(CopyGranularity::ByteRange, None);
    let counted = measure_warm(&backend, &Options::persistent(), OWN + 4);
    assert_eq!(counted.count_total, 0, "{counted:?}");
}

#[test]
fn s84_staging_per_dispatch_allocates_nothing_of_ours_either() {
    let backend = Silent::new(CopyGranularity::WholeBuffer, None);
    let counted = measure_warm(&backend, &Options::persistent(), OWN + 8);
    assert_eq!(counted.count_total, 0, "{counted:?}");
}

#[test]
fn s84_a_waiter_that_really_waits_allocates_nothing() {
    let _guard = HangGuard::arm("s84_a_waiter_that_really_waits");
    let counted = with_reporter(CopyGranularity::WholeBuffer, |backend| {
        measure_warm(backend, &Options::persistent().staging(Staging::Retained { cap_bytes: 1 << 20 }), OWN + 8)
    });
    assert_eq!(counted.count_total, 0, "{counted:?}");
}

/// The control of this file: the counter sees what `pto-dispatch` allocates where it may (a cold dispatch).
#[test]
fn s84_a_cold_dispatch_is_counted() {
    let backend = Silent::new(CopyGranularity::WholeBuffer, None);
    let worker = PreparedWorker::prepare(
        &[Everything::program()],
        &Options::persistent(),
        Arc::clone(&backend) as Arc<dyn Backend>,
    )
    .unwrap();
    let input = worker.create_buffer(64).unwrap();
    let cache = worker.alloc(ChipId(0), 64).unwrap();
    let args = Args::new().host(&input).device(&cache).scalar(0);
    let counted = measure(|| worker.call(&args).unwrap());
    assert!(counted.count_total > 0);
}
