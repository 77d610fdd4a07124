//! One measurement: programs prepared as one worker, dispatched in one mode, every result checked.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use pto_dispatch::sys::{Backend, BackendError, CopyGranularity};
use pto_dispatch::{Args, Dispatch, Error, HostBuffer, Options, PreparedWorker, Program, ProgramId, ProgramStats};
use pto_mock::{Emulator, Mapping, Memory};

use crate::workload::kernel;
use crate::workload::plan::ProgramPlan;
use crate::workload::program::{ShardedStep, Trust, argument, input_bytes, input_vector};
use crate::workload::reference::{Verdict, verify};

/// How programs are dispatched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Each dispatch allocates and frees its domains.
    PerRequest,
    /// Domains are kept and zeroed before each reuse.
    Reset,
    /// Domains are kept as they were; signals count on from epoch to epoch.
    Epochs,
    /// Domains are kept as they were, and the program does not know: wrong from the second dispatch on.
    Stale,
}

impl Mode {
    /// The three that must be right, in the order in which they are shown.
    pub(crate) const CORRECT: [Self; 3] = [Self::PerRequest, Self::Reset, Self::Epochs];

    /// A short name without spaces.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::PerRequest => "per-request",
            Self::Reset => "reset",
            Self::Epochs => "epochs",
            Self::Stale => "stale",
        }
    }

    fn options(self) -> Options {
        match self {
            Self::PerRequest => Options::ordinary(),
            Self::Reset => Options::persistent(),
            Self::Epochs | Self::Stale => Options::persistent().reset(false),
        }
    }

    fn trust(self) -> Trust {
        if self == Self::Stale { Trust::Blind } else { Trust::Informed }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PerRequest => "domains per request",
            Self::Reset => "persistent, reset",
            Self::Epochs => "persistent, epochs",
            Self::Stale => "persistent, stale",
        })
    }
}

/// The backend and how hard it is driven.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Number of chips.
    pub(crate) chips: u32,
    /// Requests that are kept in flight, and runs that the emulator overlaps.
    pub(crate) depth: u32,
    /// Requests of each program.
    pub(crate) iterations: u32,
    /// How the emulator maps windows.
    pub(crate) mapping: Mapping,
    /// Where the emulator's memory comes from.
    pub(crate) memory: Memory,
}

/// What the requests of one program cost in one mode.
#[derive(Clone, Debug)]
pub(crate) struct ProgramReport {
    /// `model/program`.
    pub(crate) program: String,
    /// The mode.
    pub(crate) mode: Mode,
    /// The worker's counters.
    pub(crate) stats: ProgramStats,
    /// Time in `submit`, one a dispatch.
    pub(crate) submit: Vec<Duration>,
    /// Time from the call of `submit` until the dispatch was terminal, one a dispatch.
    pub(crate) total: Vec<Duration>,
    /// What the comparison found, one a request.
    pub(crate) verdicts: Vec<Verdict>,
}

impl ProgramReport {
    /// Elements that differ, over all requests.
    pub(crate) fn mismatches(&self) -> u64 {
        self.verdicts.iter().map(|v| v.mismatches).sum()
    }

    /// Elements compared, over all requests.
    pub(crate) fn elements(&self) -> u64 {
        self.verdicts.iter().map(|v| v.elements).sum()
    }

    /// The first element that differs.
    pub(crate) fn first_mismatch(&self) -> Option<&str> {
        self.verdicts.iter().find_map(|v| v.first.as_deref())
    }
}

/// Why a measurement could not be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DriverError {
    /// The backend could not be built.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The worker refused or failed.
    #[error(transparent)]
    Worker(#[from] Error),
    /// The thread that observes dispatches is gone, which nothing here can cause.
    #[error("the observer of dispatches ended early")]
    Observer,
}

/// A dispatch on its way to the observer, which stamps its end while this thread does other things.
struct Submitted {
    handle: Dispatch,
    started: Instant,
}

/// What the observer answers, in the order of submission.
struct Ended {
    total: Duration,
    outcome: Result<(), Error>,
}

/// Buffers of one request in flight.
struct Slot {
    output: HostBuffer,
    /// For each program its input and its arguments.
    programs: Vec<(HostBuffer, Args)>,
}

/// A request in flight.
struct Request {
    program: usize,
    seed: u64,
    slot: Slot,
}

/// Dispatches every program `setup.iterations` times in `mode`, on a new backend, and checks every result. Programs take turns, so that
/// a worker of several really switches between them. `tick` is called after each request.
///
/// # Errors
///
/// [`DriverError`]. A wrong result is not an error here: the report counts it.
pub(crate) fn measure(
    plans: &[Arc<ProgramPlan>],
    mode: Mode,
    setup: &Setup,
    backend: &dyn Fn() -> Result<Arc<dyn Backend>, BackendError>,
    tick: &mut dyn FnMut(),
) -> Result<Vec<ProgramReport>, DriverError> {
    let programs: Vec<Arc<dyn Program>> =
        plans.iter().map(|plan| Arc::new(ShardedStep::new(plan, mode.trust())) as Arc<dyn Program>).collect();
    let worker = PreparedWorker::prepare(&programs, &mode.options(), backend()?)?;
    let mut run = Measurement::new(&worker, plans, mode, setup)?;
    std::thread::scope(|scope| {
        let (to_observer, submitted) = mpsc::channel::<Submitted>();
        let (report, ended) = mpsc::channel();
        scope.spawn(move || {
            for Submitted { handle, started } in submitted {
                let outcome = handle.wait();
                if report.send(Ended { total: started.elapsed(), outcome }).is_err() {
                    return;
                }
            }
        });
        run.requests(setup.iterations, &to_observer, &ended, tick)
    })?;
    let reports = run.finish()?;
    worker.close()?;
    Ok(reports)
}

/// An emulator for these programs.
///
/// # Errors
///
/// No shared memory.
pub(crate) fn emulator(plans: &[Arc<ProgramPlan>], setup: &Setup) -> Result<Arc<dyn Backend>, BackendError> {
    let copies = if needs_ranges(plans) { CopyGranularity::ByteRange } else { CopyGranularity::WholeBuffer };
    let emulator = Emulator::builder()
        .chips(setup.chips)
        .depth(setup.depth)
        .mapping(setup.mapping)
        .memory(setup.memory.clone())
        .copy_granularity(copies)
        .kernel(kernel::EXCHANGE, kernel::exchange_signature(), kernel::exchange)
        .kernel(kernel::PHASE, kernel::phase_signature(), kernel::phase)
        .journal(false)
        .build()?;
    Ok(emulator)
}

/// Whether resetting these programs takes copies of byte ranges, since some window has bytes that no buffer covers.
pub(crate) fn needs_ranges(plans: &[Arc<ProgramPlan>]) -> bool {
    plans.iter().any(|plan| plan.has_slack())
}

/// The state of one measurement.
struct Measurement<'a> {
    worker: &'a PreparedWorker,
    plans: &'a [Arc<ProgramPlan>],
    ids: Vec<ProgramId>,
    free: Vec<Slot>,
    pending: VecDeque<Request>,
    reports: Vec<ProgramReport>,
}

impl<'a> Measurement<'a> {
    fn new(
        worker: &'a PreparedWorker,
        plans: &'a [Arc<ProgramPlan>],
        mode: Mode,
        setup: &Setup,
    ) -> Result<Self, DriverError> {
        // A program that takes stale windows for fresh would disturb its own predecessor, too, if they overlapped; one
        // at a time, its first request is right and every later one is wrong for certain.
        let in_flight = if mode == Mode::Stale { 1 } else { setup.depth };
        let free = (0..in_flight).map(|_| Slot::new(worker, plans)).collect::<Result<Vec<_>, Error>>()?;
        let reports = plans
            .iter()
            .map(|plan| ProgramReport {
                program: plan.name.clone(),
                mode,
                stats: ProgramStats::default(),
                submit: Vec::new(),
                total: Vec::new(),
                verdicts: Vec::new(),
            })
            .collect();
        Ok(Self { worker, plans, ids: worker.programs().collect(), free, pending: VecDeque::new(), reports })
    }

    fn requests(
        &mut self,
        iterations: u32,
        to_observer: &mpsc::Sender<Submitted>,
        ended: &mpsc::Receiver<Ended>,
        tick: &mut dyn FnMut(),
    ) -> Result<(), DriverError> {
        let mut seed = 0;
        for _ in 0..iterations {
            for program in 0..self.plans.len() {
                let slot = match self.free.pop() {
                    Some(slot) => slot,
                    None => self.complete(ended, tick)?,
                };
                seed += 1;
                self.submit(Request { program, seed, slot }, to_observer)?;
            }
        }
        while !self.pending.is_empty() {
            let slot = self.complete(ended, tick)?;
            self.free.push(slot);
        }
        Ok(())
    }

    /// Submits every run of a request.
    fn submit(&mut self, mut request: Request, to_observer: &mpsc::Sender<Submitted>) -> Result<(), DriverError> {
        let plan = &self.plans[request.program];
        let (input, args) = &mut request.slot.programs[request.program];
        input.write(0, &input_vector(plan, request.seed))?;
        for phase in 0..plan.runs() {
            args.set_scalar(argument::PHASE, phase);
            let started = Instant::now();
            let handle = self.worker.submit(self.ids[request.program], args)?;
            self.reports[request.program].submit.push(started.elapsed());
            to_observer.send(Submitted { handle, started }).map_err(|_| DriverError::Observer)?;
        }
        self.pending.push_back(request);
        Ok(())
    }

    /// Waits for the oldest request, checks its results, and gives its buffers back.
    fn complete(&mut self, ended: &mpsc::Receiver<Ended>, tick: &mut dyn FnMut()) -> Result<Slot, DriverError> {
        let Some(request) = self.pending.pop_front() else { return Err(DriverError::Observer) };
        let plan = &self.plans[request.program];
        let report = &mut self.reports[request.program];
        for _ in 0..plan.runs() {
            let Ended { total, outcome } = ended.recv().map_err(|_| DriverError::Observer)?;
            outcome?;
            report.total.push(total);
        }
        report.verdicts.push(verify(plan, request.seed, &request.slot.output)?);
        tick();
        Ok(request.slot)
    }

    fn finish(mut self) -> Result<Vec<ProgramReport>, DriverError> {
        for (report, id) in self.reports.iter_mut().zip(&self.ids) {
            report.stats = self.worker.stats(*id)?;
        }
        Ok(self.reports)
    }
}

impl Slot {
    fn new(worker: &PreparedWorker, plans: &[Arc<ProgramPlan>]) -> Result<Self, Error> {
        let largest = plans.iter().map(|plan| plan.output_bytes).max().unwrap_or(1);
        let output = worker.create_buffer(largest)?;
        let programs = plans
            .iter()
            .map(|plan| {
                let input = worker.create_buffer(input_bytes(plan))?;
                let lines = plan.table();
                let table = worker.create_buffer(lines.len() as u64)?;
                table.write(0, &lines)?;
                let mut args = Args::new().host(&input).host(&output).host(&table).scalar(0);
                for (_, exchange) in plan.run_ordered() {
                    for _ in 0..plan.ranks() {
                        args = args.host(&worker.create_buffer(exchange.nbytes)?);
                    }
                }
                Ok((input, args))
            })
            .collect::<Result<Vec<_>, Error>>()?;
        Ok(Self { output, programs })
    }
}
