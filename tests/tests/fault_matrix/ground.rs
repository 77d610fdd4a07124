//! What one cell stands on: a worker over an emulator, the program that makes every call there is, and the watch that
//! names the cell that hangs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pto_dispatch::{
    Args, Build, DeviceTensor, Dispatch, Error, HostBuffer, Options, Parameter, PreparedWorker, Program,
    ProgramResult, ProgramSpec, Staging,
};
use pto_mock::lifecycle::oracle::{self, Rules};
use pto_mock::{Emulator, FaultControl, FaultSchedule, FaultyBackend, Memory, kernels};
use pto_simpler_sys::{
    Access, Backend, CallableKind, CallableSpec, ChipId, CopyGranularity, DataType, DomainRequest, FRAMES,
    NamedBuffer,
};
use pto_tests::gate::HANG_GUARD;

/// How the worker executes, and what its backend can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Persistent, reset by whole buffers.
    Whole,
    /// The same with staging kept between dispatches.
    Kept,
    /// Persistent, reset by ranges.
    Range,
    /// Persistent, reset by the device.
    Fill,
    /// Persistent without reset.
    Off,
    /// Not persistent.
    Ordinary,
    /// Not persistent, on a backend whose failed task is final.
    Final,
}

impl Mode {
    pub(crate) fn persistent(self) -> bool {
        !matches!(self, Self::Ordinary | Self::Final)
    }

    pub(crate) fn resets(self) -> bool {
        self.persistent() && self != Self::Off
    }

    fn options(self) -> Options {
        let options = match self {
            Self::Ordinary | Self::Final => Options::ordinary(),
            Self::Kept => Options::persistent().staging(Staging::Retained { cap_bytes: 1 << 20 }),
            Self::Whole | Self::Range | Self::Fill => Options::persistent(),
            Self::Off => Options::persistent().reset(false),
        };
        // A drop that a fault holds up is let go by the test, never by the clock.
        options.drop_limit(10 * HANG_GUARD)
    }
}

/// Where faults are injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Site {
    /// In the emulator itself.
    Emulator,
    /// In a wrapper around it.
    Wrapper,
}

/// What the program does in a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Act {
    /// Adds 1 to every word of its window and hands out the first of them.
    Plain,
    /// Makes every call that a builder can make, after its domain is leased.
    Rich,
    /// Scratch and an intermediate before anything opens the dispatch.
    Early,
    /// As `Rich`, and goes on after every failure, in the end with Ok.
    Swallow,
    /// Its task fails.
    FailingTask,
    /// Fails after its tasks are submitted.
    FailLate,
    /// Fails before it asks for anything.
    FailEarly,
    /// Leases a second domain.
    Grow,
    /// Drops a host buffer inside the builder.
    DropBuffer,
}

/// The text of a failure that the program brings about by itself.
pub(crate) const OWN_ERROR: &str = "the program has failed";
/// The text of the failure of its failing task.
pub(crate) const OWN_TASK: &str = kernels::FAIL;

const ENTRY: &str = "matrix_entry";
const WORDS: u32 = 16;
const TAIL_BYTES: u64 = 16;

pub(crate) fn request() -> DomainRequest {
    let buffers = vec![NamedBuffer::bytes("signal", 4 * u64::from(WORDS)), NamedBuffer::bytes("tail", TAIL_BYTES)];
    DomainRequest::packed([0, 1], buffers)
}

fn second_request() -> DomainRequest {
    DomainRequest::packed([1], vec![NamedBuffer::bytes("more", 32)])
}

/// Passes errors on, or drops them where the program swallows them.
struct Swallow(bool);

impl Swallow {
    fn pass<T>(&self, result: Result<T, Error>) -> Result<Option<T>, Error> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(_) if self.0 => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// The program.
#[derive(Debug)]
pub(crate) struct Everything {
    spec: ProgramSpec,
    /// Dropped by `Act::DropBuffer`.
    hand: Mutex<Option<HostBuffer>>,
}

impl Everything {
    fn new() -> Self {
        let chip = |name| CallableSpec::chip(name, kernels::signature(name));
        let entry = CallableSpec { kind: CallableKind::Entry, signature: None, ..chip(ENTRY) };
        let spec = ProgramSpec::new("everything")
            .callable(chip(kernels::ADD))
            .callable(chip(kernels::COPY))
            .callable(CallableSpec::sub(kernels::SUB_ADD, kernels::signature(kernels::SUB_ADD)))
            .callable(chip(kernels::FAIL))
            .callable(entry)
            .parameter(Parameter::host("out0", 4))
            .parameter(Parameter::host("out1", 4))
            .parameter(Parameter::host("tail", TAIL_BYTES))
            .parameter(Parameter::scalar("act"))
            .intermediate(64);
        Self { spec, hand: Mutex::default() }
    }

    fn plain(build: &Build<'_>, args: &Args) -> ProgramResult {
        let lease = build.lease("d0", &request())?;
        for (index, chip) in [ChipId(0), ChipId(1)].into_iter().enumerate() {
            let signal = lease.buffer(chip, "signal")?;
            let all = build.tensor(&signal, &[WORDS], DataType::Int32, Access::InOut)?;
            build.task(0)?.tensor(all).scalar(1).submit(chip)?;
            let first = build.tensor(&signal, &[1], DataType::Int32, Access::Input)?;
            let out = build.tensor(args.host_at(index)?, &[1], DataType::Int32, Access::OutputExisting)?;
            build.task(1)?.tensor(first).tensor(out).submit(chip)?;
        }
        Ok(())
    }

    fn early(build: &Build<'_>) -> Result<(), Error> {
        build.scratch(64)?;
        build.write_intermediate(build.intermediate(0)?, 0, &[1; 4])
    }

    fn rich(build: &Build<'_>, args: &Args, swallow: &Swallow) -> ProgramResult {
        let Some(lease) = swallow.pass(build.lease("d0", &request()))? else { return Ok(()) };
        let tail = lease.buffer(ChipId(0), "tail")?;
        swallow.pass(build.copy_to(&tail, args.host_at(2)?))?;
        swallow.pass(build.copy_from(args.host_at(2)?, &tail))?;
        let scratch = swallow.pass(build.scratch(64))?;
        let intermediate = build.intermediate(0)?;
        swallow.pass(build.write_intermediate(intermediate, 0, &[1; 4]))?;
        let signals = [lease.buffer(ChipId(0), "signal")?, lease.buffer(ChipId(1), "signal")?];
        let words = |chip: u32| build.tensor(&signals[chip as usize], &[WORDS], DataType::Int32, Access::InOut);
        let add =
            |chip| -> Result<(), Error> { build.task(0)?.tensor(words(chip)?).scalar(1).submit(ChipId(chip)) };
        swallow.pass(build.scope(|| add(0)))?;
        swallow.pass(add(1))?;
        let grouped = || -> Result<(), Error> {
            let mut group = build.group(0)?;
            for chip in [0, 1] {
                group = group.member(ChipId(chip)).tensor(words(chip)?).scalar(1);
            }
            group.submit()
        };
        swallow.pass(grouped())?;
        if let Some(scratch) = scratch {
            let sub = || -> Result<(), Error> {
                let tensor = build.tensor(scratch, &[WORDS], DataType::Int32, Access::InOut)?;
                build.task(2)?.tensor(tensor).scalar(1).submit_sub()
            };
            swallow.pass(sub())?;
        }
        swallow.pass(build.run_entry(4, &[]))?;
        Ok(())
    }
}

impl Program for Everything {
    fn spec(&self) -> &ProgramSpec {
        &self.spec
    }

    fn build<'b>(&self, build: &Build<'b>, args: &Args) -> ProgramResult {
        let act = args.scalar_at(3)?;
        let is = |other: Act| act == other as u64;
        if is(Act::FailEarly) {
            return Err(OWN_ERROR.into());
        }
        if is(Act::DropBuffer) {
            drop(self.hand.lock().take());
        }
        if is(Act::Early) {
            Self::early(build)?;
        }
        if is(Act::FailingTask) {
            build.lease("d0", &request())?;
            return Ok(build.task(3)?.scalar(7).submit(ChipId(0))?);
        }
        if is(Act::Rich) || is(Act::Swallow) {
            return Self::rich(build, args, &Swallow(is(Act::Swallow)));
        }
        if is(Act::Grow) {
            build.lease("late", &second_request())?;
        }
        Self::plain(build, args)?;
        if is(Act::FailLate) { Err(OWN_ERROR.into()) } else { Ok(()) }
    }
}

/// What an operation came to.
#[derive(Debug)]
pub(crate) enum Answer {
    Fine,
    Failed(Error),
    Panicked(String),
}

impl From<Result<(), Error>> for Answer {
    fn from(result: Result<(), Error>) -> Self {
        match result {
            Ok(()) => Self::Fine,
            Err(error) => Self::Failed(error),
        }
    }
}

/// One worker and everything around it.
#[derive(Debug)]
pub(crate) struct Ground {
    pub(crate) mode: Mode,
    pub(crate) emulator: Arc<Emulator>,
    backend: Arc<dyn Backend>,
    pub(crate) faults: FaultControl,
    pub(crate) program: Arc<Everything>,
    pub(crate) worker: Option<PreparedWorker>,
    /// A worker that an operation makes, or drops.
    pub(crate) spare: Mutex<Option<PreparedWorker>>,
    pub(crate) args: Args,
    pub(crate) outs: Vec<HostBuffer>,
    pub(crate) buffer: Mutex<Option<HostBuffer>>,
    pub(crate) tensor: Mutex<Option<DeviceTensor>>,
    /// A dispatch that has ended well.
    pub(crate) earlier: Option<Dispatch>,
    /// The dispatch under test, once it is accepted.
    pub(crate) current: Mutex<Option<Dispatch>>,
    /// Plain dispatches that have ended well.
    pub(crate) ran: Mutex<i32>,
}

impl Ground {
    /// A backend, and no worker yet.
    pub(crate) fn bare(mode: Mode, site: Site) -> Self {
        let granularity = match mode {
            Mode::Range | Mode::Fill => CopyGranularity::ByteRange,
            _ => CopyGranularity::WholeBuffer,
        };
        let emulator = kernels::install(Emulator::builder())
            .entry(ENTRY, |entry| {
                entry.host().open(true)?;
                entry.orchestrator().alloc(64)?;
                Ok(())
            })
            .chips(2)
            .copy_granularity(granularity)
            .device_fill(mode == Mode::Fill)
            .failed_task_is_final(mode == Mode::Final)
            .dirty_host_buffers(true)
            .dirty_windows(true)
            .memory(Memory::Heap)
            .build()
            .unwrap();
        let (backend, faults): (Arc<dyn Backend>, _) = match site {
            Site::Emulator => (Arc::clone(&emulator) as _, emulator.faults()),
            Site::Wrapper => {
                let faulty = FaultyBackend::new(Arc::clone(&emulator) as _, FaultSchedule::none());
                let faults = faulty.faults();
                (Arc::new(faulty), faults)
            }
        };
        Self {
            mode,
            emulator,
            backend,
            faults,
            program: Arc::new(Everything::new()),
            worker: None,
            spare: Mutex::default(),
            args: Args::new(),
            outs: Vec::new(),
            buffer: Mutex::default(),
            tensor: Mutex::default(),
            earlier: None,
            current: Mutex::default(),
            ran: Mutex::default(),
        }
    }

    pub(crate) fn prepare(&self) -> Result<PreparedWorker, Error> {
        let programs = [Arc::clone(&self.program) as Arc<dyn Program>];
        PreparedWorker::prepare(&programs, &self.mode.options(), Arc::clone(&self.backend))
    }

    /// Takes a worker, and makes what its dispatches need.
    pub(crate) fn adopt(&mut self, worker: PreparedWorker) {
        self.outs = [4, 4, TAIL_BYTES].map(|nbytes| worker.create_buffer(nbytes).unwrap()).into();
        // What a builder copies must be told apart from a reset.
        self.outs[2].fill(7).unwrap();
        self.worker = Some(worker);
        self.set_act(Act::Plain);
    }

    pub(crate) fn set_act(&mut self, act: Act) {
        self.args = self.outs.iter().fold(Args::new(), |args, out| args.host(out)).scalar(act as u64);
    }

    /// Hands the program a buffer to drop inside its builder.
    pub(crate) fn hand_over(&self, buffer: HostBuffer) {
        *self.program.hand.lock() = Some(buffer);
    }

    pub(crate) fn worker(&self) -> &PreparedWorker {
        self.worker.as_ref().unwrap()
    }

    /// Submits what is set up, and waits for it.
    pub(crate) fn dispatch(&self) -> Answer {
        let worker = self.worker();
        let id = worker.only().unwrap();
        let submitted = catch_unwind(AssertUnwindSafe(|| worker.submit(id, &self.args)));
        match submitted {
            Err(payload) => Answer::Panicked(payload.downcast_ref::<String>().cloned().unwrap_or_default()),
            Ok(Err(error)) => Answer::Failed(error),
            Ok(Ok(dispatch)) => {
                *self.current.lock() = Some(dispatch.clone());
                dispatch.wait().into()
            }
        }
    }

    /// A plain dispatch, and what it should find in its windows.
    #[track_caller]
    pub(crate) fn plain(&mut self) -> Dispatch {
        self.set_act(Act::Plain);
        let answer = self.dispatch();
        assert!(matches!(answer, Answer::Fine), "a dispatch as any other: {answer:?}");
        self.check_contents();
        self.current.lock().take().unwrap()
    }

    /// The words that the last plain dispatch handed out: what it found, plus 1.
    #[track_caller]
    pub(crate) fn check_contents(&self) {
        *self.ran.lock() += 1;
        let expected = if self.mode == Mode::Off { *self.ran.lock() } else { 1 };
        for out in &self.outs[..2] {
            let mut word = [0; 4];
            out.read(0, &mut word).unwrap();
            assert_eq!(i32::from_ne_bytes(word), expected, "contents of the window (I8)");
        }
    }

    /// The journal keeps every invariant, everything is freed exactly once, nothing is left.
    #[track_caller]
    pub(crate) fn check_end(&self) {
        let stats = self.emulator.stats();
        assert_eq!(
            (stats.domains, stats.runs, stats.host_buffers, stats.resident_buffers, stats.scratch, stats.threads),
            (0, 0, 0, 0, 0, 0),
            "something is left (I4, I14): {stats:?}"
        );
        assert!(stats.linked_names.is_empty() && stats.committed_bytes.iter().all(|b| *b == 0), "{stats:?}");
        let named = |name: &str| match name {
            "d0" | "p0:d0" => Some(request()),
            "late" | "p0:late" => Some(second_request()),
            _ => None,
        };
        let rules = Rules { frames: FRAMES, resets: self.mode.resets(), request: &named, closed: true };
        let events = self.emulator.journal().events();
        oracle::check(&events, rules).unwrap_or_else(|breach| panic!("{breach}\n{}", self.emulator.journal()));
    }
}

/// The cell, when it began, and whether all is over.
type Watched = (String, Instant, bool);

/// Names the cell that makes no progress, and ends the process. The limit is far above what a cell needs.
#[derive(Debug)]
pub(crate) struct Watch {
    state: Arc<(Mutex<Watched>, Condvar)>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Watch {
    pub(crate) fn start() -> Self {
        let state = Arc::new((Mutex::new((String::new(), Instant::now(), false)), Condvar::new()));
        let theirs = Arc::clone(&state);
        let thread = std::thread::spawn(move || {
            let (cell, changed) = &*theirs;
            let mut cell = cell.lock();
            while !cell.2 {
                let deadline = cell.1 + HANG_GUARD;
                if changed.wait_until(&mut cell, deadline).timed_out() && !cell.2 && cell.1 + HANG_GUARD <= deadline
                {
                    eprintln!("cell {} hangs", cell.0);
                    std::process::abort();
                }
            }
        });
        Self { state, thread: Some(thread) }
    }

    /// The next cell begins.
    pub(crate) fn cell(&self, name: &str) {
        *self.state.0.lock() = (name.to_owned(), Instant::now(), false);
    }

    pub(crate) fn name(&self) -> String {
        self.state.0.lock().0.clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.state.0.lock().2 = true;
        self.state.1.notify_all();
        if let Some(thread) = self.thread.take() {
            let _joined = thread.join();
        }
    }
}

/// No time at all: for waits that only look.
pub(crate) const NOW: Duration = Duration::ZERO;
