//! The reference model: what a prepared worker is supposed to do, said a second time and without its code.
//!
//! The model follows the design, not the implementation: it knows which runs are in flight, which domains are
//! retained and who wrote them last, who has been told of which failure, and predicts the answer to every operation.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest_state_machine::ReferenceStateMachine;
use pto_simpler_sys::DomainRequest;

use super::shape::{Act, Shape, Zeroing, shapes};

/// A fault for the next operation that makes the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultPoint {
    /// Making a staging buffer fails.
    Staging,
    /// Allocating (or finding) a domain fails, with or without effect.
    Allocate {
        /// Whether the work is done all the same.
        effect: bool,
    },
    /// A reset copy fails, with or without effect.
    ResetCopy {
        /// Whether the work is done all the same.
        effect: bool,
    },
    /// Submitting a task fails, with or without effect.
    Task {
        /// Whether the work is done all the same.
        effect: bool,
    },
    /// Releasing the first domain at close fails without effect.
    Release,
    /// The backend's close fails without effect.
    Close,
}

/// One operation of a user, or of the device.
#[derive(Clone, Debug)]
pub enum Transition {
    /// `submit`; where it has to wait, runs in flight are let go in order until it returns.
    Submit {
        /// The program.
        program: usize,
        /// Which of its domains.
        leases: Vec<usize>,
        /// What it does.
        act: Act,
    },
    /// `try_submit`.
    TrySubmit {
        /// The program.
        program: usize,
        /// Which of its domains.
        leases: Vec<usize>,
    },
    /// `submit` from a second thread while two dispatches hold the frames; the oldest of them then fails.
    SubmitWhileOldestFails {
        /// The program.
        program: usize,
    },
    /// The device lets the run of this flight go.
    Complete {
        /// Position among the runs in flight.
        flight: usize,
    },
    /// The device reports that the oldest run failed.
    FailOldest,
    /// `wait` on a terminal dispatch, twice.
    Wait {
        /// Position in the list of handles.
        handle: usize,
    },
    /// `wait_timeout(0)` and `is_done`.
    Poll {
        /// Position in the list of handles.
        handle: usize,
    },
    /// A handle is dropped.
    DropHandle {
        /// Position in the list of handles.
        handle: usize,
    },
    /// A fault is armed for the next operation.
    Arm(FaultPoint),
    /// `close_timeout(0)` while dispatches are in flight.
    CloseTimeout,
    /// `close`, from one or from two threads; runs in flight are let go meanwhile.
    Close {
        /// From how many threads.
        threads: usize,
    },
}

/// A run in flight.
#[derive(Clone, Debug)]
pub struct Flight {
    /// Its number.
    pub id: u64,
    /// Whether it allocated a domain.
    pub allocated: bool,
    /// Let go already, held up only by an older run.
    pub let_go: bool,
}

/// What a handle should show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// Not terminal.
    Running,
    /// Terminal, Ok.
    Succeeded,
    /// Terminal, failed.
    Failed,
}

/// A retained domain.
#[derive(Clone, Debug)]
pub struct Retained {
    /// Dispatches that leased it.
    pub epoch: u64,
    /// The run that wrote it last.
    pub written_by: Option<u64>,
}

/// What the last operation should have answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Nothing to compare.
    Nothing,
    /// A handle of this dispatch.
    Accepted(u64),
    /// The program's own error.
    ProgramError,
    /// The program's own panic.
    ProgramPanic,
    /// The request was changed.
    SpecChanged,
    /// Slack in a retained window.
    Slack,
    /// The backend failed (an injected fault).
    BackendFailure,
    /// A reset copy failed.
    ResetFailure,
    /// It would have had to wait.
    WouldBlock,
    /// Poisoned by this dispatch.
    Poisoned(u64),
    /// Finished by this dispatch.
    Finished(u64),
    /// Close has begun.
    Closing,
    /// Close is over.
    Closed,
    /// A handle shows this.
    Shows(Shown),
    /// Close timed out with these in flight.
    CloseTimeout(Vec<u64>),
    /// Close succeeded.
    CloseOk,
    /// Close failed; the primary is the failure of this dispatch.
    CloseFailedBecause(u64),
    /// Close failed because a release or the backend's close failed.
    CloseFailed {
        /// Whether the backend is closed.
        complete: bool,
    },
}

/// Where the worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Usable.
    Open,
    /// Close has begun and timed out.
    Draining,
    /// The backend's close failed.
    CloseFailed,
    /// Closed.
    Closed,
}

/// The whole model.
#[derive(Clone, Debug)]
pub struct World {
    /// What the worker was made from.
    pub shape: Shape,
    /// Where it is.
    pub status: Status,
    /// The dispatch that poisoned it.
    pub poison: Option<u64>,
    /// The dispatch whose failed task was final.
    pub finished: Option<u64>,
    /// Retained domains by program and domain.
    pub retained: Vec<Vec<Option<Retained>>>,
    /// Runs in flight, oldest first.
    pub flights: Vec<Flight>,
    /// All handles ever given out, with what they show; `None` where dropped.
    pub handles: Vec<(u64, Shown, bool)>,
    /// Failures that nobody has been told of.
    pub undelivered: BTreeSet<u64>,
    /// The next dispatch's number.
    pub next_id: u64,
    /// Armed for the next operation.
    pub fault: Option<FaultPoint>,
    /// Staging buffers that should have been made so far.
    pub staging_made: u64,
    /// Sizes that retained staging keeps.
    pub staging_kept: BTreeSet<u64>,
    /// Domain allocations that should have happened, while nothing has failed.
    pub allocations: u64,
    /// Whether some operation failed after an effect, so that counts of allocations are not exact any more.
    pub disturbed: bool,
    /// What close answered.
    pub close_answer: Option<Expect>,
    /// What the last operation should have answered.
    pub expect: Expect,
    /// Runs that the last operation had to let go, in order.
    pub released: Vec<u64>,
}

impl World {
    fn new(shape: Shape) -> Self {
        let retained = shape.programs.iter().map(|domains| vec![None; domains.len()]).collect();
        Self {
            shape,
            status: Status::Open,
            poison: None,
            finished: None,
            retained,
            flights: Vec::new(),
            handles: Vec::new(),
            undelivered: BTreeSet::new(),
            next_id: 1,
            fault: None,
            staging_made: 0,
            staging_kept: BTreeSet::new(),
            allocations: 0,
            disturbed: false,
            close_answer: None,
            expect: Expect::Nothing,
            released: Vec::new(),
        }
    }

    fn requests(&self, program: usize) -> impl Iterator<Item = (usize, &DomainRequest)> {
        self.retained[program]
            .iter()
            .zip(&self.shape.programs[program])
            .enumerate()
            .filter(|(_, (retained, _))| retained.is_some())
            .map(|(index, (_, request))| (index, request))
    }

    fn has_retained(&self, program: usize) -> bool {
        self.retained[program].iter().any(Option::is_some)
    }

    /// Whether a retained window of the program has bytes that whole-buffer copies cannot reach.
    fn slack(&self, program: usize) -> bool {
        self.shape.zeroing == Zeroing::WholeBuffer
            && self.requests(program).any(|(_, r)| r.window_bytes > r.buffers.iter().map(|b| b.nbytes).sum())
    }

    fn staging_sizes(&self, program: usize) -> BTreeSet<u64> {
        if !self.shape.resets() || self.shape.zeroing != Zeroing::WholeBuffer {
            return BTreeSet::new();
        }
        self.requests(program).flat_map(|(_, r)| r.buffers.iter().map(|b| b.nbytes)).collect()
    }

    fn refusal(&self) -> Option<Expect> {
        match self.status {
            Status::Closed | Status::CloseFailed => return Some(Expect::Closed),
            Status::Draining => return Some(Expect::Closing),
            Status::Open => {}
        }
        self.poison.map(Expect::Poisoned).or(self.finished.map(Expect::Finished))
    }

    /// Tells whoever asked of the failure behind a refusal.
    fn tell(&mut self, refusal: &Expect) {
        if let Expect::Poisoned(id) | Expect::Finished(id) = refusal {
            self.undelivered.remove(id);
        }
    }

    /// The oldest run ends.
    fn end_oldest(&mut self, ok: bool) {
        let flight = self.flights.remove(0);
        for handle in &mut self.handles {
            if handle.0 == flight.id {
                handle.1 = if ok { Shown::Succeeded } else { Shown::Failed };
            }
        }
        if !ok {
            self.undelivered.insert(flight.id);
            self.fail(flight.id, self.shape.failed_task_is_final);
        }
    }

    /// Ends every run that was let go and that nothing holds up any more.
    fn settle(&mut self) {
        while self.flights.first().is_some_and(|f| f.let_go) {
            self.end_oldest(true);
        }
    }

    fn fail(&mut self, id: u64, last: bool) {
        self.disturbed = true;
        if self.shape.persistent {
            self.poison.get_or_insert(id);
        } else if last {
            self.finished.get_or_insert(id);
        }
    }

    /// A failure that its submitter was told of at once.
    fn fail_told(&mut self, id: u64) {
        self.fail(id, false);
    }

    /// Lets go what a submission would wait for.
    fn let_go_for(&mut self, program: usize, leases: &[usize]) {
        let cold = leases.iter().any(|d| self.retained[program][*d].is_none());
        let control = if self.shape.persistent {
            cold || (self.shape.resets() && self.has_retained(program))
        } else {
            !leases.is_empty()
        };
        let ordered = self.flights.iter().any(|f| f.allocated);
        let must_end = if control || ordered || self.shape.depth == 1 {
            self.flights.len()
        } else {
            self.flights.len().saturating_sub(1)
        };
        for _ in 0..must_end {
            self.released.push(self.flights[0].id);
            self.flights[0].let_go = true;
            self.end_oldest(true);
        }
        self.settle();
    }

    /// One dispatch, from a granted frame on.
    fn dispatch(&mut self, program: usize, leases: &[usize], act: Act) -> Expect {
        let id = self.next_id;
        self.next_id += 1;
        let fault = self.fault.take();
        if self.shape.resets() && self.slack(program) {
            return Expect::Slack;
        }
        let sizes = self.staging_sizes(program);
        let missing = sizes.difference(&self.staging_kept).count() as u64;
        if fault == Some(FaultPoint::Staging) && missing > 0 {
            return Expect::BackendFailure;
        }
        self.staging_made += missing;
        if self.shape.retained_staging {
            self.staging_kept.extend(&sizes);
        }
        match act {
            Act::FailFirst => return Expect::ProgramError,
            Act::PanicFirst => return Expect::ProgramPanic,
            Act::ChangeRequest => return Expect::SpecChanged,
            Act::Normal | Act::FailLast | Act::PanicLast => {}
        }
        let cold: Vec<usize> = leases.iter().copied().filter(|d| self.retained[program][*d].is_none()).collect();
        let persistent = self.shape.persistent;
        let registers = persistent && self.has_retained(program);
        let allocates = if persistent { !cold.is_empty() } else { !leases.is_empty() };
        let copies = self.shape.resets() && self.has_retained(program);
        // A builder that fails before it has asked for anything never opens.
        let opens = !leases.is_empty();
        let failed = match fault {
            _ if !opens && act != Act::Normal => None,
            Some(FaultPoint::Allocate { .. }) if registers || allocates => Some(Expect::BackendFailure),
            Some(FaultPoint::ResetCopy { .. }) if copies => Some(Expect::ResetFailure),
            Some(FaultPoint::Task { .. }) if !leases.is_empty() => Some(Expect::BackendFailure),
            _ => None,
        };
        if let Some(failed) = failed {
            self.fail_told(id);
            return failed;
        }
        match act {
            Act::FailLast | Act::PanicLast if opens => {
                self.fail_told(id);
                return if act == Act::FailLast { Expect::ProgramError } else { Expect::ProgramPanic };
            }
            Act::FailLast => return Expect::ProgramError,
            Act::PanicLast => return Expect::ProgramPanic,
            _ => {}
        }
        if copies {
            for retained in self.retained[program].iter_mut().flatten() {
                retained.written_by = None;
            }
        }
        if persistent {
            self.allocations += cold.len() as u64;
            for domain in leases {
                let retained =
                    self.retained[program][*domain].get_or_insert(Retained { epoch: 0, written_by: None });
                retained.epoch += 1;
                retained.written_by = Some(id);
            }
        } else {
            self.allocations += leases.len() as u64;
        }
        self.flights.push(Flight { id, allocated: allocates, let_go: false });
        self.handles.push((id, Shown::Running, true));
        Expect::Accepted(id)
    }

    fn close(&mut self) -> Expect {
        for flight in std::mem::take(&mut self.flights) {
            self.released.push(flight.id);
            self.flights.insert(0, flight);
            self.end_oldest(true);
        }
        if self.status == Status::Closed {
            return self.close_answer.clone().unwrap_or(Expect::CloseOk);
        }
        let fault = self.fault.take();
        let retry = self.status == Status::CloseFailed;
        let live =
            self.shape.persistent && self.poison.is_none() && self.retained.iter().flatten().any(Option::is_some);
        let release_fails = !retry && fault == Some(FaultPoint::Release) && live;
        let close_fails = fault == Some(FaultPoint::Close);
        let failed = release_fails || close_fails;
        let undelivered = std::mem::take(&mut self.undelivered);
        self.disturbed |= failed;
        self.status = if close_fails { Status::CloseFailed } else { Status::Closed };
        let poison_first = self.poison.filter(|p| undelivered.contains(p) || (undelivered.is_empty() && failed));
        let answer = match poison_first.or(undelivered.first().copied()) {
            Some(id) => Expect::CloseFailedBecause(id),
            None if failed => Expect::CloseFailed { complete: !close_fails },
            None => Expect::CloseOk,
        };
        if self.status == Status::Closed {
            self.close_answer = Some(answer.clone());
        }
        answer
    }
}

/// The model as proptest drives it.
#[derive(Debug)]
pub struct Model;

impl ReferenceStateMachine for Model {
    type State = World;
    type Transition = Transition;

    fn init_state() -> BoxedStrategy<World> {
        shapes().prop_map(World::new).boxed()
    }

    fn transitions(world: &World) -> BoxedStrategy<Transition> {
        let programs = world.shape.programs.clone();
        let choice = (0..programs.len()).prop_flat_map(move |program| {
            let domains = programs[program].len();
            (Just(program), proptest::sample::subsequence((0..domains).collect::<Vec<_>>(), 0..=domains))
        });
        let submits = choice.clone();
        let acts = prop_oneof![
            12 => Just(Act::Normal),
            1 => Just(Act::FailFirst),
            1 => Just(Act::FailLast),
            1 => Just(Act::PanicFirst),
            1 => Just(Act::PanicLast),
            1 => Just(Act::ChangeRequest),
        ];
        let faults = prop_oneof![
            Just(FaultPoint::Staging),
            any::<bool>().prop_map(|effect| FaultPoint::Allocate { effect }),
            any::<bool>().prop_map(|effect| FaultPoint::ResetCopy { effect }),
            any::<bool>().prop_map(|effect| FaultPoint::Task { effect }),
            Just(FaultPoint::Release),
            Just(FaultPoint::Close),
        ];
        let handles = world.handles.len().max(1);
        prop_oneof![
            12 => (submits, acts).prop_map(|((program, leases), act)| Transition::Submit { program, leases, act }),
            4 => choice.clone().prop_map(|(program, leases)| Transition::TrySubmit { program, leases }),
            1 => choice.prop_map(|(program, _)| Transition::SubmitWhileOldestFails { program }),
            6 => (0usize..2).prop_map(|flight| Transition::Complete { flight }),
            1 => Just(Transition::FailOldest),
            4 => (0..handles).prop_map(|handle| Transition::Wait { handle }),
            2 => (0..handles).prop_map(|handle| Transition::Poll { handle }),
            2 => (0..handles).prop_map(|handle| Transition::DropHandle { handle }),
            2 => faults.prop_map(Transition::Arm),
            1 => Just(Transition::CloseTimeout),
            1 => (1usize..3).prop_map(|threads| Transition::Close { threads }),
        ]
        .boxed()
    }

    fn preconditions(world: &World, transition: &Transition) -> bool {
        let domains = |program: usize| world.shape.programs.get(program).map_or(0, Vec::len);
        let held = |handle: &usize| world.handles.get(*handle).is_some_and(|h| h.2);
        match transition {
            Transition::Submit { program, leases, act } => {
                let fits = leases.iter().all(|d| *d < domains(*program));
                // A changed request is one only where the first one is known.
                let warm = leases.first().is_some_and(|d| {
                    world.retained.get(*program).and_then(|p| p.get(*d)).is_some_and(Option::is_some)
                });
                fits && *program < world.shape.programs.len() && (*act != Act::ChangeRequest || warm)
            }
            Transition::TrySubmit { program, leases } => {
                *program < world.shape.programs.len() && leases.iter().all(|d| *d < domains(*program))
            }
            Transition::SubmitWhileOldestFails { program } => {
                *program < world.shape.programs.len()
                    && world.flights.len() == 2
                    && !world.flights[1].let_go
                    && world.status == Status::Open
                    && world.refusal().is_none()
                    // Otherwise the submission gets further than the line before the run fails, or not, by chance.
                    && world.shape.persistent
            }
            Transition::Complete { flight } => world.flights.get(*flight).is_some_and(|f| !f.let_go),
            Transition::FailOldest => {
                world.flights.first().is_some_and(|f| !f.let_go) && world.flights.iter().all(|f| !f.let_go)
            }
            Transition::Wait { handle } => held(handle) && world.handles[*handle].1 != Shown::Running,
            Transition::Poll { handle } | Transition::DropHandle { handle } => held(handle),
            Transition::Arm(_) => world.fault.is_none() && world.status == Status::Open,
            Transition::CloseTimeout => !world.flights.is_empty(),
            // A fault and two closers would leave open whose attempt it hits.
            Transition::Close { threads } => *threads == 1 || world.fault.is_none(),
        }
    }

    fn apply(mut world: World, transition: &Transition) -> World {
        world.released.clear();
        world.expect = match transition {
            Transition::Submit { program, leases, act } => match world.refusal() {
                Some(refusal) => {
                    world.tell(&refusal);
                    refusal
                }
                None => {
                    world.let_go_for(*program, leases);
                    world.dispatch(*program, leases, *act)
                }
            },
            Transition::TrySubmit { program, leases } => match world.refusal() {
                Some(refusal) => {
                    world.tell(&refusal);
                    refusal
                }
                None => {
                    let resets = world.shape.resets() && world.has_retained(*program);
                    let ordered = world.flights.iter().any(|f| f.allocated);
                    let most = if resets || ordered { 0 } else { world.shape.depth as usize - 1 };
                    let cold = leases.iter().any(|d| world.retained[*program][*d].is_none());
                    if world.flights.len() > most {
                        Expect::WouldBlock
                    } else if !world.flights.is_empty() && cold {
                        // The frame was granted; the builder's first control call is what would have waited.
                        world.next_id += 1;
                        world.fault = None;
                        Expect::WouldBlock
                    } else {
                        world.dispatch(*program, leases, Act::Normal)
                    }
                }
            },
            Transition::SubmitWhileOldestFails { .. } => {
                let oldest = world.flights[0].id;
                world.end_oldest(false);
                world.undelivered.remove(&oldest);
                Expect::Poisoned(oldest)
            }
            Transition::Complete { flight } => {
                world.flights[*flight].let_go = true;
                world.settle();
                Expect::Nothing
            }
            Transition::FailOldest => {
                world.end_oldest(false);
                world.settle();
                Expect::Nothing
            }
            Transition::Wait { handle } | Transition::Poll { handle } => {
                let (id, shown, _) = world.handles[*handle];
                if shown == Shown::Failed {
                    world.undelivered.remove(&id);
                }
                Expect::Shows(shown)
            }
            Transition::DropHandle { handle } => {
                world.handles[*handle].2 = false;
                Expect::Nothing
            }
            Transition::Arm(fault) => {
                world.fault = Some(*fault);
                Expect::Nothing
            }
            Transition::CloseTimeout => {
                if world.status == Status::Open {
                    world.status = Status::Draining;
                }
                Expect::CloseTimeout(world.flights.iter().map(|f| f.id).collect())
            }
            Transition::Close { .. } => world.close(),
        };
        // A fault is for one operation that could meet it.
        if matches!(transition, Transition::Submit { .. } | Transition::TrySubmit { .. } | Transition::Close { .. })
        {
            world.fault = None;
        }
        world
    }
}
