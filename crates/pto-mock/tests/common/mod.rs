//! What the tests of the emulator share.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::clone_on_ref_ptr,
    reason = "this is test code"
)]
#![allow(dead_code, unreachable_pub, missing_debug_implementations, reason = "each test binary uses a part of it")]

use std::sync::{Arc, Condvar, Mutex};

use pto_mock::{Emulator, EmulatorBuilder, KernelError, Memory};
use pto_simpler_sys::{
    Access, Backend, BackendError, BuildFailed, CallConfig, CallableId, CallableSpec, ChipId, CopySource, CopyTo,
    DevicePlace, DomainAllocation, DomainId, DomainRequest, GraphBuilder, HostBufferId, NamedBuffer, Orchestrator,
    RunEvents, RunId, RunOutcome, Signature, SubmitError, TaskArgs,
};

/// Records ends of runs and lets tests wait for them.
#[derive(Default)]
pub struct Ends {
    ended: Mutex<Vec<(RunId, RunOutcome)>>,
    changed: Condvar,
}

impl RunEvents for Ends {
    fn ended(&self, run: RunId, outcome: RunOutcome) {
        self.ended.lock().unwrap().push((run, outcome));
        self.changed.notify_all();
    }
}

impl Ends {
    pub fn wait(&self, run: RunId) -> RunOutcome {
        let mut ended = self.ended.lock().unwrap();
        loop {
            if let Some((_, outcome)) = ended.iter().find(|(r, _)| *r == run) {
                return outcome.clone();
            }
            ended = self.changed.wait(ended).unwrap();
        }
    }

    pub fn all(&self) -> Vec<(RunId, RunOutcome)> {
        self.ended.lock().unwrap().clone()
    }
}

/// A graph builder out of a closure. The closure's error stays here.
pub struct Graph<F> {
    build: F,
    pub error: Option<BackendError>,
}

impl<F: FnMut(&dyn Orchestrator) -> Result<(), BackendError>> Graph<F> {
    pub fn new(build: F) -> Self {
        Self { build, error: None }
    }
}

impl<F: FnMut(&dyn Orchestrator) -> Result<(), BackendError>> GraphBuilder for Graph<F> {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
        (self.build)(orchestrator).map_err(|error| {
            self.error = Some(error);
            BuildFailed
        })
    }
}

/// Submits a closure to any backend; a builder's error comes back as itself.
pub fn submit(
    backend: &dyn Backend,
    run: u64,
    build: impl FnMut(&dyn Orchestrator) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    let mut graph = Graph::new(build);
    match backend.submit(RunId(run), &CallConfig::default(), &mut graph) {
        Ok(()) => Ok(()),
        Err(SubmitError::Backend(error)) => Err(error),
        Err(SubmitError::Build(BuildFailed)) => Err(graph.error.expect("the builder failed with an error")),
    }
}

/// A started emulator with the kernels of the tests.
pub struct Rig {
    pub emulator: Arc<Emulator>,
    pub ends: Arc<Ends>,
    pub handshake: CallableId,
    pub nothing: CallableId,
    pub fails: CallableId,
    pub panics: CallableId,
    pub waits: CallableId,
}

/// Scalars: device context.
const CONTEXT: usize = 0;

/// Adds the kernels of the tests:
///
/// * `handshake(out: Output 4 bytes; context)`: adds rank + 1 to the peer's cell, waits for its own, stores it;
/// * `nothing()`, `fails()`, `panics()`;
/// * `waits(; context)`: waits until its own cell is 100.
pub fn kernels(builder: EmulatorBuilder) -> EmulatorBuilder {
    builder
        .kernel("handshake", Signature::new([Access::Output], 1), |k| {
            let domain = k.domain(k.scalar(CONTEXT)?)?;
            let (me, peer) = (domain.rank(), 1 - domain.rank());
            domain.buffer(peer, 0)?.cell(0)?.fetch_add(me as i32 + 1)?;
            let value = domain.buffer(me, 0)?.cell(0)?.wait(|v| v >= 1)?;
            k.tensor(0)?.store(0, &value.to_ne_bytes())
        })
        .kernel("nothing", Signature::default(), |_| Ok(()))
        .kernel("fails", Signature::default(), |_| Err(KernelError::failed("on purpose")))
        .kernel("panics", Signature::default(), |_| panic!("kernel panic on purpose"))
        .kernel("waits", Signature::new([], 1), |k| {
            let domain = k.domain(k.scalar(CONTEXT)?)?;
            domain.buffer(domain.rank(), 0)?.cell(0)?.wait(|v| v == 100).map(|_| ())
        })
}

pub fn chip_spec(name: &str, tensors: &[Access], scalars: u32) -> CallableSpec {
    CallableSpec::chip(name, Signature::new(tensors, scalars))
}

impl Rig {
    pub fn new(builder: EmulatorBuilder) -> Self {
        let emulator = kernels(builder).build().unwrap();
        let register = |spec: CallableSpec| emulator.register(&spec).unwrap().id;
        let handshake = register(chip_spec("handshake", &[Access::Output], 1));
        let nothing = register(chip_spec("nothing", &[], 0));
        let fails = register(chip_spec("fails", &[], 0));
        let panics = register(chip_spec("panics", &[], 0));
        let waits = register(chip_spec("waits", &[], 1));
        let ends = Arc::new(Ends::default());
        emulator.start(ends.clone()).unwrap();
        Self { emulator, ends, handshake, nothing, fails, panics, waits }
    }

    /// Two chips; heap memory under Miri.
    pub fn two() -> Self {
        Self::new(builder())
    }

    pub fn submit(
        &self,
        run: u64,
        build: impl FnMut(&dyn Orchestrator) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        submit(&*self.emulator, run, build)
    }

    pub fn wait(&self, run: u64) -> RunOutcome {
        self.ends.wait(RunId(run))
    }

    /// Submits and waits.
    pub fn run(
        &self,
        run: u64,
        build: impl FnMut(&dyn Orchestrator) -> Result<(), BackendError>,
    ) -> Result<RunOutcome, BackendError> {
        self.submit(run, build)?;
        Ok(self.wait(run))
    }

    /// Allocates a retained domain in a run of its own.
    pub fn retained(&self, run: u64, name: &str, request: &DomainRequest) -> DomainAllocation {
        let mut reply = DomainAllocation::new();
        let outcome = self.run(run, |o| o.get_or_allocate_domain(name, request, true, &mut reply)).unwrap();
        assert_eq!(outcome, RunOutcome::success());
        reply
    }

    pub fn peek(&self, domain: DomainId, chip: u32, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.emulator.peek(domain, ChipId(chip), offset, &mut bytes).unwrap();
        bytes
    }

    pub fn close(self) {
        self.emulator.close().unwrap();
        let stats = self.emulator.stats();
        assert_eq!((stats.domains, stats.host_buffers, stats.resident_buffers), (0, 0, 0));
        assert_eq!((stats.threads, stats.runs, stats.scratch), (0, 0, 0));
        assert!(stats.linked_names.is_empty());
    }
}

pub fn builder() -> EmulatorBuilder {
    Emulator::builder().chips(2).memory(Memory::default())
}

/// One 64-byte buffer called `signal` on chips 0 and 1.
pub fn signal() -> DomainRequest {
    DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("signal", 64)])
}

pub fn buffer(domain: &DomainAllocation, chip: u32, buffer: u32) -> DevicePlace {
    DevicePlace::DomainBuffer { domain: domain.id().unwrap(), chip: ChipId(chip), buffer }
}

pub fn copy(dst: DevicePlace, src: HostBufferId, nbytes: u64) -> CopyTo {
    CopyTo { dst, src: CopySource::Host(src), nbytes }
}

/// Arguments with the context of one rank as the only scalar.
pub fn context(domain: &DomainAllocation, rank: usize) -> TaskArgs {
    let mut args = TaskArgs::new();
    args.scalar(domain.member(rank).unwrap().device_context);
    args
}
