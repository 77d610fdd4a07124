//! The HAL from both sides: a function that drives any backend from `register` to `close`, and a backend around
//! another one that counts what passes through it.
//!
//! Two chips signal each other three times through a window that is kept between runs: fresh, then zeroed by hand, then
//! left as it was. The counter shows what each way costs. Another backend (or another wrapper) fits in `main` unchanged.
//!
//! `cargo run -p pto-simpler-sys --example counting_backend`

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use pto_mock::{Emulator, kernels};
use pto_simpler_sys::{
    Access, Backend, BackendError, BuildFailed, Call, CallConfig, CallableId, CallableSpec, ChipId, CopyResult,
    CopySource, CopyTo, DataType, DevicePlace, DomainAllocation, DomainRequest, DomainState, GraphBuilder,
    HostBufferId, NamedBuffer, Orchestrator, RunEvents, RunId, RunOutcome, Shape, SubmitError, TaskArgs, TensorArg,
    TensorPlace, forward_backend, forward_orchestrator,
};

// ---- the wrapper ----

/// How often each call was made, and how many bytes went with it.
#[derive(Debug, Default)]
struct Tally(Mutex<BTreeMap<Call, (u64, u64)>>);

impl Tally {
    fn count(&self, call: Call, bytes: u64) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (calls, total) = counts.entry(call).or_default();
        *calls += 1;
        *total += bytes;
    }

    fn counts(&self) -> BTreeMap<Call, (u64, u64)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A backend that counts what concerns domains.
#[derive(Debug)]
struct Counting {
    inner: Arc<dyn Backend>,
    tally: Tally,
}

impl Backend for Counting {
    forward_backend!(
        inner: capabilities, phase, check_blocking, register, start, run_state, create_buffer, create_zeros, write_buffer,
        read_buffer, fill_buffer, release_buffer, alloc, free, copy_to, copy_from, domain_state,
        committed_device_memory, close, abandon,
    );

    fn submit(&self, run: RunId, config: &CallConfig, graph: &mut dyn GraphBuilder) -> Result<(), SubmitError> {
        self.tally.count(Call::Submit, 0);
        // The builder must see the counting orchestrator, so the backend gets a builder of ours around it.
        self.inner.submit(run, config, &mut CountingBuild { outer: graph, tally: &self.tally })
    }

    fn release_domain(&self, domain: pto_simpler_sys::DomainId) -> Result<(), BackendError> {
        self.tally.count(Call::ReleaseDomain, 0);
        self.inner.release_domain(domain)
    }
}

struct CountingBuild<'a> {
    outer: &'a mut dyn GraphBuilder,
    tally: &'a Tally,
}

impl GraphBuilder for CountingBuild<'_> {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
        self.outer.build(&CountingGraph { inner: orchestrator, tally: self.tally })
    }
}

struct CountingGraph<'a> {
    inner: &'a dyn Orchestrator,
    tally: &'a Tally,
}

impl Orchestrator for CountingGraph<'_> {
    forward_orchestrator!(
        inner: run, allocate_domain, copy_to, copy_from, submit_next_level, submit_sub, scope, alloc, run_entry,
    );

    fn get_or_allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        retain_after_run: bool,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        self.tally.count(Call::GetOrAllocateDomain, 0);
        self.inner.get_or_allocate_domain(name, request, retain_after_run, reply)
    }

    fn copy_batch(&self, copies: &[CopyTo], results: &mut Vec<CopyResult>) -> Result<(), BackendError> {
        copies.iter().for_each(|copy| self.tally.count(Call::CopyTo, copy.nbytes));
        self.inner.copy_batch(copies, results)
    }

    fn submit_next_level_group(
        &self,
        callable: CallableId,
        args: &[TaskArgs],
        config: Option<&CallConfig>,
        workers: &[ChipId],
    ) -> Result<(), BackendError> {
        self.tally.count(Call::SubmitNextLevelGroup, 0);
        self.inner.submit_next_level_group(callable, args, config, workers)
    }
}

// ---- the driver ----

/// Where ends of runs are reported. It may be called on any thread of the backend.
struct Ends(mpsc::Sender<RunOutcome>);

impl RunEvents for Ends {
    fn ended(&self, _run: RunId, outcome: RunOutcome) {
        // Nobody listens any more where the driver has failed meanwhile.
        let _ = self.0.send(outcome);
    }
}

const SIGNAL_BYTES: u64 = 64;

/// One run: every chip signals every other one, waits for a signal, and writes down how much it found.
struct Handshake<'a> {
    request: &'a DomainRequest,
    kernel: CallableId,
    /// Copied over each signal buffer before the task, where the window is to be zeroed.
    zeros: Option<HostBufferId>,
    found: HostBufferId,
    domain: &'a mut DomainAllocation,
    /// The reason of a failed build stays here; only a marker goes through the backend.
    error: Option<BackendError>,
}

impl Handshake<'_> {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BackendError> {
        orchestrator.get_or_allocate_domain("handshake", self.request, true, self.domain)?;
        let domain = self
            .domain
            .id()
            .ok_or_else(|| BackendError::broken(Call::GetOrAllocateDomain, "the reply names no domain"))?;
        let signal = |chip| DevicePlace::DomainBuffer { domain, chip, buffer: 0 };
        if let Some(zeros) = self.zeros {
            let copies: Vec<CopyTo> = self
                .request
                .workers
                .iter()
                .map(|chip| CopyTo { dst: signal(*chip), src: CopySource::Host(zeros), nbytes: SIGNAL_BYTES })
                .collect();
            let mut results = Vec::new();
            orchestrator.copy_batch(&copies, &mut results)?;
            for result in results {
                if let CopyResult::Failed(error) = result {
                    return Err(error);
                }
            }
        }
        let one = Shape::new(&[1]).ok_or_else(|| BackendError::broken(Call::Submit, "a shape of one element"))?;
        let args: Vec<TaskArgs> = self
            .domain
            .members()
            .iter()
            .map(|member| {
                let tensor = |place, byte_offset, access| TensorArg {
                    place,
                    shape: one,
                    dtype: DataType::Int32,
                    byte_offset,
                    access,
                };
                let cell = TensorPlace::DomainBuffer { domain, chip: member.chip, buffer: 0 };
                let mut args = TaskArgs::new();
                args.tensor(tensor(cell, 0, Access::NoDependency));
                args.tensor(tensor(TensorPlace::Host(self.found), 4 * u64::from(member.rank), Access::Output));
                args.scalar(member.device_context).scalar(0).scalar(1);
                args
            })
            .collect();
        orchestrator.submit_next_level_group(self.kernel, &args, None, &self.request.workers)
    }
}

impl GraphBuilder for Handshake<'_> {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
        Handshake::build(self, orchestrator).map_err(|error| {
            self.error = Some(error);
            BuildFailed
        })
    }
}

/// Drives a backend that has not been started through its whole life. Returns what the chips found in each run.
fn drive(backend: &dyn Backend) -> Result<Vec<[i32; 2]>, Box<dyn Error>> {
    let kernel = CallableSpec::chip(kernels::HANDSHAKE, kernels::signature(kernels::HANDSHAKE));
    let kernel = backend.register(&kernel)?.id;
    let (sender, ends) = mpsc::channel();
    backend.start(Arc::new(Ends(sender)))?;
    let (zeros, found) = (backend.create_zeros(SIGNAL_BYTES)?, backend.create_buffer(8)?);

    let request = DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("signal", SIGNAL_BYTES)]);
    let mut domain = DomainAllocation::new();
    let mut all = Vec::new();
    for (run, zeros) in [(1, None), (2, Some(zeros)), (3, None)] {
        let mut graph = Handshake { request: &request, kernel, zeros, found, domain: &mut domain, error: None };
        if let Err(error) = backend.submit(RunId(run), &CallConfig::new(), &mut graph) {
            return Err(graph.error.map_or_else(|| error.into(), Into::into));
        }
        let outcome = ends.recv()?;
        outcome.result?;
        outcome.cleanup.map_or(Ok(()), Err)?;
        let mut bytes = [0; 8];
        backend.read_buffer(found, 0, &mut bytes)?;
        let cell = |at: usize| i32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        all.push([cell(0), cell(4)]);
    }

    let id = domain.id().ok_or("no domain was allocated")?;
    backend.release_domain(id)?;
    if backend.domain_state(id)? != DomainState::Freed {
        return Err(format!("{id} is not freed").into());
    }
    backend.close()?;
    Ok(all)
}

fn main() -> Result<(), Box<dyn Error>> {
    let emulator = kernels::install(Emulator::builder().chips(2)).build()?;
    let counting = Counting { inner: emulator, tally: Tally::default() };
    let found = drive(&counting)?;

    for (run, (what, found)) in (1..).zip(
        ["a fresh window", "a window zeroed by two copies", "a window as the last run left it"].iter().zip(&found),
    ) {
        println!("run {run}: {what:<33} the chips find {found:?}");
    }
    println!();
    println!("{:<24} {:>5} {:>6}", "call", "calls", "bytes");
    for (call, (calls, bytes)) in counting.tally.counts() {
        println!("{:<24} {calls:>5} {bytes:>6}", call.name());
    }
    // Rank r adds r + 1 to its peer's cell. Whether the last run sees its peer's second signal is a race that both
    // lose: what is left from the run before ends the wait at once.
    let stale = found.last().is_some_and(|last| last[0] >= 2 && last[1] >= 1);
    if found.get(..2) != Some(&[[2, 1], [2, 1]]) || !stale {
        return Err(format!("expected [2, 1] twice and then something stale, found {found:?}").into());
    }
    Ok(())
}
