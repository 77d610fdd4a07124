//! What rules share: a started backend, its reported ends, gates that hold runs open, and checks that return what
//! is wrong instead of panicking.

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use pto_simpler_sys::{
    Access, Backend, BackendError, BuildFailed, Call, CallConfig, CallableId, CallableKind, Capabilities, ChipId,
    CopySource, CopyTo, DataType, Depth, DevicePlace, DomainAllocation, DomainId, DomainRequest, Family,
    GraphBuilder, HostBufferId, NamedBuffer, Orchestrator, Retention, RunEvents, RunId, RunOutcome, Shape,
    SubmitError, TaskArgs, TensorArg, TensorPlace,
};

use super::{BackendFactory, BackendSpec, CreateError, GRACE, HoldRun, Outcome, Stop};
use crate::kernels;

/// Fails the rule with a message unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::conformance::Stop::Broken(format!($($message)+)));
        }
    };
}
pub(super) use ensure;

pub(super) fn broken<T>(message: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Broken(message.into()))
}

/// Both values in the message.
pub(super) fn same<T: PartialEq + Debug>(what: &str, found: T, expected: T) -> Outcome {
    if found == expected { Ok(()) } else { broken(format!("{what}: expected {expected:?}, found {found:?}")) }
}

/// A call that must succeed.
pub(super) trait Must<T> {
    fn must(self, what: &str) -> Result<T, Stop>;
}

impl<T, E: Debug> Must<T> for Result<T, E> {
    fn must(self, what: &str) -> Result<T, Stop> {
        self.map_err(|error| Stop::Broken(format!("{what} failed: {error:?}")))
    }
}

impl<T> Must<T> for Option<T> {
    fn must(self, what: &str) -> Result<T, Stop> {
        self.ok_or_else(|| Stop::Broken(format!("{what}: nothing there")))
    }
}

/// A call that must be refused as misuse, under its own name, with a message.
pub(super) fn refused<T: Debug>(what: &str, call: Call, result: Result<T, BackendError>) -> Outcome {
    match result {
        Ok(value) => broken(format!("{what}: accepted ({value:?}), expected misuse")),
        Err(error) => refused_error(what, call, &error),
    }
}

pub(super) fn refused_error(what: &str, call: Call, error: &BackendError) -> Outcome {
    ensure!(error.family() == Family::Misuse, "{what}: expected misuse, found {error:?}");
    ensure!(error.call() == call, "{what}: the error names the call {}, expected {call}", error.call());
    let message = error.to_string();
    ensure!(!message.trim().is_empty() && !message.ends_with('.'), "{what}: message {message:?}");
    Ok(())
}

pub(super) fn refused_submit(what: &str, result: Result<(), SubmitError>) -> Outcome {
    match result {
        Err(SubmitError::Backend(error)) => refused_error(what, Call::Submit, &error),
        other => broken(format!("{what}: expected misuse, found {other:?}")),
    }
}

pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type Hook = Box<dyn FnMut(RunId, &RunOutcome) + Send>;

/// Reported ends, in order.
#[derive(Default)]
pub(super) struct Ends {
    reported: Mutex<Vec<(RunId, RunOutcome)>>,
    changed: Condvar,
    hook: Mutex<Option<Hook>>,
}

impl RunEvents for Ends {
    fn ended(&self, run: RunId, outcome: RunOutcome) {
        if let Some(hook) = &mut *lock(&self.hook) {
            hook(run, &outcome);
        }
        lock(&self.reported).push((run, outcome));
        self.changed.notify_all();
    }
}

impl Ends {
    pub(super) fn runs(&self) -> Vec<RunId> {
        lock(&self.reported).iter().map(|(run, _)| *run).collect()
    }

    pub(super) fn count(&self, run: RunId) -> usize {
        self.runs().iter().filter(|ended| **ended == run).count()
    }

    fn wait(&self, run: RunId) -> RunOutcome {
        let mut reported = lock(&self.reported);
        loop {
            if let Some((_, outcome)) = reported.iter().find(|(ended, _)| *ended == run) {
                return outcome.clone();
            }
            reported = self.changed.wait(reported).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A graph builder over a closure, which counts its calls and keeps what the closure returned.
pub(super) struct Built<F, T> {
    body: Option<F>,
    pub(super) calls: u32,
    pub(super) out: Option<Result<T, Stop>>,
}

impl<F, T> Built<F, T>
where
    F: FnOnce(&dyn Orchestrator) -> Result<T, Stop>,
{
    pub(super) fn new(body: F) -> Self {
        Self { body: Some(body), calls: 0, out: None }
    }
}

impl<F, T> GraphBuilder for Built<F, T>
where
    F: FnOnce(&dyn Orchestrator) -> Result<T, Stop>,
{
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
        self.calls += 1;
        let Some(body) = self.body.take() else { return Err(BuildFailed) };
        let out = body(orchestrator);
        let result = if out.is_ok() { Ok(()) } else { Err(BuildFailed) };
        self.out = Some(out);
        result
    }
}

static FRESH: AtomicU64 = AtomicU64::new(0);

/// A name that nothing else in this process uses.
pub(super) fn fresh(name: &str) -> String {
    format!("{name}-{}-{}", std::process::id(), FRESH.fetch_add(1, Ordering::Relaxed))
}

/// A backend under test.
pub(super) struct Rig<'f> {
    factory: &'f dyn BackendFactory,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) ends: Arc<Ends>,
    callables: Vec<(Arc<str>, CallableId)>,
    pub(super) depth: Depth,
    next_run: AtomicU64,
    accepted: Mutex<Vec<RunId>>,
    finished: AtomicBool,
}

impl<'f> Rig<'f> {
    /// A backend in state `New`, with the portable kernels registered.
    pub(super) fn unstarted(factory: &'f dyn BackendFactory, chips: u32) -> Result<Self, Stop> {
        let spec = BackendSpec { chips, sub_workers: 1, callables: kernels::specs() };
        let backend = factory.create(&spec).map_err(|error| match error {
            CreateError::Unsupported(why) => Stop::Skipped(why),
            CreateError::Failed(cause) => Stop::Broken(format!("the factory failed: {cause:?}")),
        })?;
        let mut rig = Self {
            factory,
            backend,
            ends: Arc::default(),
            callables: Vec::new(),
            depth: Depth::Exactly(1),
            next_run: AtomicU64::new(1),
            accepted: Mutex::default(),
            finished: AtomicBool::new(false),
        };
        same("number of chip workers", rig.caps().chips(), chips)?;
        for spec in spec.callables {
            if spec.kind == CallableKind::Sub && rig.caps().sub_workers == 0 {
                continue;
            }
            let registered = rig.backend.register(&spec).must(&format!("register {}", spec.name))?;
            rig.callables.push((spec.name, registered.id));
        }
        Ok(rig)
    }

    /// A started backend.
    pub(super) fn start(factory: &'f dyn BackendFactory, chips: u32) -> Result<Self, Stop> {
        let mut rig = Self::unstarted(factory, chips)?;
        rig.begin()?;
        Ok(rig)
    }

    pub(super) fn begin(&mut self) -> Outcome {
        let events = Arc::clone(&self.ends);
        self.depth = self.backend.start(events).must("start")?.depth;
        Ok(())
    }

    pub(super) fn caps(&self) -> &Capabilities {
        self.backend.capabilities()
    }

    pub(super) fn callable(&self, name: &str) -> Result<CallableId, Stop> {
        match self.callables.iter().find(|(known, _)| &**known == name) {
            Some((_, id)) => Ok(*id),
            None => Err(Stop::Skipped(format!("no callable {name} (no sub-workers)"))),
        }
    }

    /// How many callables the rig registered.
    pub(super) fn registered(&self) -> usize {
        self.callables.len()
    }

    pub(super) fn needs_sub_workers(&self) -> Outcome {
        if self.caps().sub_workers > 0 { Ok(()) } else { Err(Stop::Skipped("no sub-workers".into())) }
    }

    pub(super) fn needs_retention(&self) -> Outcome {
        match &self.caps().retention {
            Retention::Unsupported { missing } => Err(Stop::Skipped(format!("no retention: {missing}"))),
            _ => Ok(()),
        }
    }

    /// The device memory of each chip, where more may be asked for.
    pub(super) fn needs_device_memory(&self) -> Result<u64, Stop> {
        self.factory.device_memory().ok_or_else(|| Stop::Skipped("no known amount of device memory".into()))
    }

    /// How long to wait for what should not happen, or for what usually has happened by then.
    pub(super) fn grace(&self) -> Duration {
        self.factory.grace().min(GRACE)
    }

    pub(super) fn fresh_run(&self) -> RunId {
        RunId(self.next_run.fetch_add(1, Ordering::Relaxed))
    }

    /// Notes that `run` was accepted by a `submit` that the rule made by itself.
    pub(super) fn note_accepted(&self, run: RunId) {
        lock(&self.accepted).push(run);
    }

    /// One submission, whatever comes of it.
    pub(super) fn attempt<T, F>(&self, run: RunId, body: F) -> (Result<(), SubmitError>, Built<F, T>)
    where
        F: FnOnce(&dyn Orchestrator) -> Result<T, Stop>,
    {
        let mut built = Built::new(body);
        let result = self.backend.submit(run, &CallConfig::new(), &mut built);
        if result.is_ok() {
            self.note_accepted(run);
        }
        (result, built)
    }

    /// A submission that must be accepted.
    pub(super) fn submit<T, F>(&self, body: F) -> Result<(RunId, T), Stop>
    where
        F: FnOnce(&dyn Orchestrator) -> Result<T, Stop>,
    {
        let run = self.fresh_run();
        let (result, built) = self.attempt(run, body);
        match (result, built.out) {
            (_, Some(Err(stop))) => Err(stop),
            (Ok(()), Some(Ok(value))) => {
                same("calls of the builder", built.calls, 1)?;
                Ok((run, value))
            }
            (Ok(()), None) => broken(format!("{run} was accepted without a build")),
            (Err(error), _) => broken(format!("{run} was not accepted: {error:?}")),
        }
    }

    /// A run that must succeed.
    pub(super) fn run<T, F>(&self, body: F) -> Result<T, Stop>
    where
        F: FnOnce(&dyn Orchestrator) -> Result<T, Stop>,
    {
        let (run, value) = self.submit(body)?;
        self.succeeds(run)?;
        Ok(value)
    }

    /// Waits for the end of an accepted run.
    pub(super) fn outcome(&self, run: RunId) -> RunOutcome {
        self.ends.wait(run)
    }

    /// Waits for the end of an accepted run, which must be success.
    pub(super) fn succeeds(&self, run: RunId) -> Outcome {
        same(&format!("outcome of {run}"), self.outcome(run), RunOutcome::success())
    }

    /// The worker still does what it is for: one run with one task on each chip.
    pub(super) fn is_usable(&self) -> Outcome {
        for chip in 0..self.caps().chips() {
            let out = self.host(&[0; 8])?;
            self.run(|o| self.store(o, ChipId(chip), TensorPlace::Host(out), 2, 40 + u64::from(chip)))?;
            let expected = 40 + i32::try_from(chip).unwrap_or(0);
            same("what a task stored afterwards", self.host_i32(out, 2)?, vec![expected, expected + 1])?;
            self.backend.release_buffer(out).must("release_buffer")?;
        }
        Ok(())
    }

    /// Calls `hook` on the reporting thread, before each end is noted.
    pub(super) fn on_end(&self, hook: impl FnMut(RunId, &RunOutcome) + Send + 'static) {
        *lock(&self.ends.hook) = Some(Box::new(hook));
    }

    /// Closes, and checks that each accepted run ended exactly once and no other run did.
    pub(super) fn finish(self) -> Outcome {
        let closed = self.backend.close();
        self.finished.store(true, Ordering::Relaxed);
        closed.must("close")?;
        self.each_run_ended_once()
    }

    pub(super) fn each_run_ended_once(&self) -> Outcome {
        let mut accepted = lock(&self.accepted).clone();
        let mut ended = self.ends.runs();
        accepted.sort_unstable();
        ended.sort_unstable();
        same("ended runs against accepted runs", ended, accepted)
    }

    // --- host and device memory ---

    /// A host buffer with these contents.
    pub(super) fn host(&self, bytes: &[u8]) -> Result<HostBufferId, Stop> {
        let buffer = self.backend.create_buffer(bytes.len() as u64).must("create_buffer")?;
        self.backend.write_buffer(buffer, 0, bytes).must("write_buffer")?;
        Ok(buffer)
    }

    pub(super) fn host_bytes(&self, buffer: HostBufferId, nbytes: usize) -> Result<Vec<u8>, Stop> {
        let mut bytes = vec![0x5A; nbytes];
        self.backend.read_buffer(buffer, 0, &mut bytes).must("read_buffer")?;
        Ok(bytes)
    }

    pub(super) fn host_i32(&self, buffer: HostBufferId, elements: usize) -> Result<Vec<i32>, Stop> {
        Ok(to_i32(&self.host_bytes(buffer, elements * 4)?))
    }

    /// The bytes at a place, read by a control copy of this build.
    pub(super) fn read(&self, o: &dyn Orchestrator, src: DevicePlace, nbytes: usize) -> Result<Vec<u8>, Stop> {
        let out = self.host(&vec![0x5A; nbytes])?;
        o.copy_from(out, src, nbytes as u64).must("copy_from")?;
        self.host_bytes(out, nbytes)
    }

    /// The bytes at a place, read outside runs.
    pub(super) fn peek(&self, src: DevicePlace, nbytes: usize) -> Result<Vec<u8>, Stop> {
        let out = self.host(&vec![0x5A; nbytes])?;
        self.backend.copy_from(out, src, nbytes as u64).must("copy_from outside runs")?;
        let bytes = self.host_bytes(out, nbytes)?;
        self.backend.release_buffer(out).must("release_buffer")?;
        Ok(bytes)
    }

    /// Writes bytes to a place by a control copy of this build.
    pub(super) fn write(&self, o: &dyn Orchestrator, dst: DevicePlace, bytes: &[u8]) -> Outcome {
        o.copy_to(&self.copy(dst, bytes)?).must("copy_to")
    }

    /// A copy of these bytes, from a fresh host buffer.
    pub(super) fn copy(&self, dst: DevicePlace, bytes: &[u8]) -> Result<CopyTo, Stop> {
        Ok(CopyTo { dst, src: CopySource::Host(self.host(bytes)?), nbytes: bytes.len() as u64 })
    }

    pub(super) fn committed(&self) -> Result<Vec<u64>, Stop> {
        (0..self.caps().chips())
            .map(|chip| self.backend.committed_device_memory(ChipId(chip)).must("committed_device_memory"))
            .collect()
    }

    // --- tasks ---

    /// `pto_store` on one chip.
    pub(super) fn store(
        &self,
        o: &dyn Orchestrator,
        chip: ChipId,
        place: TensorPlace,
        elements: u32,
        value: u64,
    ) -> Outcome {
        let args = args([i32s(place, elements, Access::Output)], [value]);
        o.submit_next_level(self.callable(kernels::STORE)?, &args, None, chip).must("submit pto_store")
    }

    /// `pto_add` on one chip.
    pub(super) fn add(
        &self,
        o: &dyn Orchestrator,
        chip: ChipId,
        place: TensorPlace,
        elements: u32,
        value: u64,
    ) -> Outcome {
        let args = args([i32s(place, elements, Access::InOut)], [value]);
        o.submit_next_level(self.callable(kernels::ADD)?, &args, None, chip).must("submit pto_add")
    }

    /// `pto_copy` on one chip.
    pub(super) fn copy_task(
        &self,
        o: &dyn Orchestrator,
        chip: ChipId,
        from: TensorPlace,
        to: TensorPlace,
        elements: u32,
    ) -> Outcome {
        let args = args([i32s(from, elements, Access::Input), i32s(to, elements, Access::OutputExisting)], []);
        o.submit_next_level(self.callable(kernels::COPY)?, &args, None, chip).must("submit pto_copy")
    }

    /// `pto_fail` on one chip.
    pub(super) fn fail(&self, o: &dyn Orchestrator, chip: ChipId) -> Outcome {
        o.submit_next_level(self.callable(kernels::FAIL)?, &args([], [7]), None, chip).must("submit pto_fail")
    }

    /// Arguments of `pto_handshake` for the member with this rank.
    pub(super) fn handshake(
        &self,
        domain: &Domain,
        rank: usize,
        out: HostBufferId,
        threshold: u64,
    ) -> Result<TaskArgs, Stop> {
        let member = domain.reply.member(rank).must("member of the reply")?;
        Ok(args(
            [
                i32s(domain.tensor(rank, 0)?, 1, Access::NoDependency),
                i32s(TensorPlace::Host(out), 1, Access::Output),
            ],
            [member.device_context, 0, threshold],
        ))
    }

    // --- domains ---

    /// Allocates a domain under a fresh name.
    pub(super) fn domain(&self, o: &dyn Orchestrator, request: &DomainRequest) -> Result<Domain, Stop> {
        let name = fresh("domain");
        let mut reply = DomainAllocation::new();
        o.allocate_domain(&name, request, &mut reply).must("allocate_domain")?;
        Domain::new(name, request, reply)
    }

    /// Finds or allocates a retained domain.
    pub(super) fn retained(
        &self,
        o: &dyn Orchestrator,
        name: &str,
        request: &DomainRequest,
    ) -> Result<Domain, Stop> {
        let mut reply = DomainAllocation::new();
        o.get_or_allocate_domain(name, request, true, &mut reply).must("get_or_allocate_domain")?;
        Domain::new(name.to_owned(), request, reply)
    }

    // --- holding runs ---

    /// A gate for one run; skips the rule where the backend has no means to hold a run.
    pub(super) fn gate(&self) -> Result<Gate<'_>, Stop> {
        let kind = match self.factory.hold(&self.backend) {
            Some(hold) => GateKind::Hook(hold),
            None => {
                self.needs_sub_workers()?;
                GateKind::Buffer { buffer: self.host(&[0; 8])?, callable: self.callable(kernels::GATE)? }
            }
        };
        Ok(Gate { rig: self, kind, open: AtomicBool::new(false) })
    }

    /// Runs `body` on another thread while a run is held, gives it the chance to pass too early, opens the gate, and
    /// fails where `body` had marked its passing before that.
    pub(super) fn while_held<T, F>(&self, gate: &Gate<'_>, what: &str, body: F) -> Result<T, Stop>
    where
        F: FnOnce(&Passed<'_>) -> Result<T, Stop> + Send,
        T: Send,
    {
        let (told, heard) = mpsc::channel();
        let passed = Passed { gate, early: AtomicBool::new(false), told: Mutex::new(told) };
        let value = thread::scope(|scope| {
            let other = scope.spawn(|| body(&passed));
            let _ = heard.recv_timeout(self.factory.grace());
            gate.open()?;
            other.join().must("the other thread")?
        })?;
        ensure!(!passed.early.load(Ordering::SeqCst), "{what} while a run was held that it must wait for");
        Ok(value)
    }

    /// Submits an empty run that stays in flight until its gate opens.
    pub(super) fn held<'r>(&'r self) -> Result<(RunId, Gate<'r>), Stop> {
        let gate = self.gate()?;
        let (run, ()) = self.submit(|o| gate.hold(o))?;
        gate.wait_entered()?;
        Ok((run, gate))
    }
}

impl Drop for Rig<'_> {
    fn drop(&mut self) {
        *lock(&self.ends.hook) = None;
        if !self.finished.load(Ordering::Relaxed) {
            // A broken or skipped rule left early: end what may wait, then clean up as far as the backend can.
            self.backend.abandon();
            let _ = self.backend.close();
        }
    }
}

/// What another thread marks when it is past the point at which it should have waited.
pub(super) struct Passed<'g> {
    gate: &'g Gate<'g>,
    early: AtomicBool,
    told: Mutex<Sender<()>>,
}

impl Passed<'_> {
    pub(super) fn mark(&self) {
        if !self.gate.is_open() {
            self.early.store(true, Ordering::SeqCst);
        }
        let _ = lock(&self.told).send(());
    }
}

enum GateKind {
    Hook(Box<dyn HoldRun>),
    Buffer { buffer: HostBufferId, callable: CallableId },
}

/// Holds one run open until it is opened, or dropped.
pub(super) struct Gate<'r> {
    rig: &'r Rig<'r>,
    kind: GateKind,
    open: AtomicBool,
}

impl Gate<'_> {
    /// Adds the task that holds the run.
    pub(super) fn hold(&self, o: &dyn Orchestrator) -> Outcome {
        match &self.kind {
            GateKind::Hook(hook) => hook.hold(o).must("hold the run"),
            GateKind::Buffer { buffer, callable } => {
                let args = args([i32s(TensorPlace::Host(*buffer), 2, Access::InOut)], []);
                o.submit_sub(*callable, &args).must("submit pto_gate")
            }
        }
    }

    /// Waits until the holding task executes.
    pub(super) fn wait_entered(&self) -> Outcome {
        match &self.kind {
            GateKind::Hook(hook) => hook.wait_entered(),
            GateKind::Buffer { buffer, .. } => {
                while self.rig.host_i32(*buffer, 2)?.get(1) != Some(&1) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
        Ok(())
    }

    /// Whether the gate was opened. Set before the run can end.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::SeqCst)
    }

    /// Lets the run end.
    pub(super) fn open(&self) -> Outcome {
        if self.open.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        match &self.kind {
            GateKind::Hook(hook) => hook.release(),
            GateKind::Buffer { buffer, .. } => {
                self.rig.backend.write_buffer(*buffer, 0, &1i32.to_le_bytes()).must("open the gate")?;
            }
        }
        Ok(())
    }
}

impl Drop for Gate<'_> {
    fn drop(&mut self) {
        // A rule that returns early must not leave its run waiting.
        let _ = self.open();
    }
}

/// An allocated domain and its reply.
#[derive(Clone, Debug)]
pub(super) struct Domain {
    pub(super) name: String,
    pub(super) id: DomainId,
    pub(super) reply: DomainAllocation,
}

impl Domain {
    pub(super) fn new(name: String, request: &DomainRequest, reply: DomainAllocation) -> Result<Self, Stop> {
        let id = reply.id().must("id of the reply")?;
        same("members of the reply", reply.members().len(), request.workers.len())?;
        for rank in 0..request.workers.len() {
            same("buffers of the reply", reply.buffers(rank).len(), request.buffers.len())?;
        }
        Ok(Self { name, id, reply })
    }

    /// A named buffer of the member with this rank, as a place of copies.
    pub(super) fn place(&self, rank: usize, buffer: u32) -> Result<DevicePlace, Stop> {
        let chip = self.reply.member(rank).must("member of the reply")?.chip;
        Ok(DevicePlace::DomainBuffer { domain: self.id, chip, buffer })
    }

    /// A byte of the window of the member with this rank.
    pub(super) fn window(&self, rank: usize, offset: u64) -> Result<DevicePlace, Stop> {
        let chip = self.reply.member(rank).must("member of the reply")?.chip;
        Ok(DevicePlace::Window { domain: self.id, chip, offset })
    }

    /// A named buffer of the member with this rank, as a place of tensors.
    pub(super) fn tensor(&self, rank: usize, buffer: u32) -> Result<TensorPlace, Stop> {
        let chip = self.reply.member(rank).must("member of the reply")?.chip;
        Ok(TensorPlace::DomainBuffer { domain: self.id, chip, buffer })
    }
}

/// A request for buffers of these sizes on the chips `0..chips`, packed.
pub(super) fn packed(chips: u32, sizes: &[u64]) -> DomainRequest {
    let buffers = sizes.iter().enumerate().map(|(i, n)| NamedBuffer::bytes(format!("b{i}"), *n)).collect();
    DomainRequest::packed(0..chips, buffers)
}

/// A vector of `elements` 32-bit integers at the start of a place.
pub(super) fn i32s(place: TensorPlace, elements: u32, access: Access) -> TensorArg {
    // A request for no elements is a mistake of the rule; one element keeps it visible as a refusal.
    let shape = Shape::new(&[elements.max(1)]).unwrap_or_else(|| unreachable!("one non-zero dimension"));
    TensorArg { place, shape, dtype: DataType::Int32, byte_offset: 0, access }
}

pub(super) fn args<const T: usize, const S: usize>(tensors: [TensorArg; T], scalars: [u64; S]) -> TaskArgs {
    let mut args = TaskArgs::new();
    for tensor in tensors {
        args.tensor(tensor);
    }
    for scalar in scalars {
        args.scalar(scalar);
    }
    args
}

pub(super) fn to_i32(bytes: &[u8]) -> Vec<i32> {
    bytes.chunks_exact(4).map(|word| i32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
}
