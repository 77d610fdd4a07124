//! The operations of the dispatch layer, each with how it is set up and what it is to the oracle.

use pto_mock::{Fault, FaultEffect};
use pto_simpler_sys::{Call, ChipId};

use crate::ground::{Act, Answer, Ground, Mode, OWN_ERROR, OWN_TASK};

/// What an operation is to the oracle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Prepares a worker.
    Prepare,
    /// Submits a dispatch and waits for it.
    Dispatch,
    /// A call of the user's outside dispatches, on a worker that goes on whatever comes of it.
    User,
    /// As `User`, but there is nobody to give an error to: it shows at close.
    Silent,
    /// Closes the worker.
    Close,
    /// Drops the worker.
    Drop,
}

/// A failure that the operation brings about without any fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Own {
    None,
    /// The start of the backend fails; what fails after it is only logged.
    Start,
    /// The builder fails before it opens the dispatch.
    BuilderEarly,
    /// The builder fails after its tasks are submitted.
    BuilderLate,
    /// The task fails: the run ends as failed.
    Task,
    /// Close has a failure to report that nobody has seen.
    Undelivered,
}

impl Own {
    pub(crate) fn text(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Start => Some("start#1:before"),
            Self::BuilderEarly | Self::BuilderLate => Some(OWN_ERROR),
            Self::Task | Self::Undelivered => Some(OWN_TASK),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) name: &'static str,
    pub(crate) modes: &'static [Mode],
    pub(crate) kind: Kind,
    pub(crate) own: Own,
    /// Calls of the builder before anything opens the dispatch.
    pub(crate) unopened: &'static [Call],
    /// Calls of the opening itself, which come first of their kind; only where the builder swallows failures.
    pub(crate) opening: &'static [(Call, u64)],
    pub(crate) act: Act,
    pub(crate) ready: fn(&mut Ground),
    pub(crate) run: fn(&Ground) -> Answer,
}

const ALL: &[Mode] = &[Mode::Whole, Mode::Kept, Mode::Range, Mode::Fill, Mode::Off, Mode::Ordinary, Mode::Final];
const BOTH: &[Mode] = &[Mode::Whole, Mode::Ordinary];
const PERSISTENT: &[Mode] = &[Mode::Whole, Mode::Kept, Mode::Range];

impl Operation {
    const fn new(
        name: &'static str,
        kind: Kind,
        modes: &'static [Mode],
        ready: fn(&mut Ground),
        run: fn(&Ground) -> Answer,
    ) -> Self {
        Self { name, modes, kind, own: Own::None, unopened: &[], opening: &[], act: Act::Plain, ready, run }
    }

    const fn dispatch(name: &'static str, modes: &'static [Mode], act: Act, ready: fn(&mut Ground)) -> Self {
        Self { act, ..Self::new(name, Kind::Dispatch, modes, ready, Ground::dispatch) }
    }

    const fn own(mut self, own: Own) -> Self {
        self.own = own;
        self
    }
}

fn nothing(_: &mut Ground) {}

fn cold(ground: &mut Ground) {
    let worker = ground.prepare().unwrap();
    ground.adopt(worker);
}

fn warm(ground: &mut Ground) {
    cold(ground);
    ground.plain();
    ground.earlier = Some(ground.plain());
}

fn with_buffer(ground: &mut Ground) {
    warm(ground);
    *ground.buffer.lock() = Some(ground.worker().create_buffer(64).unwrap());
}

fn with_tensor(ground: &mut Ground) {
    with_buffer(ground);
    *ground.tensor.lock() = Some(ground.worker().alloc(ChipId(1), 64).unwrap());
}

fn with_unseen_failure(ground: &mut Ground) {
    with_tensor(ground);
    ground.set_act(Act::FailingTask);
    let worker = ground.worker();
    let dispatch = worker.submit(worker.only().unwrap(), &ground.args).unwrap();
    while !dispatch.is_done() {
        std::thread::yield_now();
    }
}

fn with_failed_close(ground: &mut Ground) {
    with_tensor(ground);
    ground.faults.arm(Fault::new(Call::Close, FaultEffect::Before));
    assert!(ground.worker().close().is_err());
}

fn for_drop(ground: &mut Ground) {
    with_tensor(ground);
    *ground.spare.lock() = ground.worker.take();
}

fn handing_over(ground: &mut Ground) {
    cold(ground);
    ground.hand_over(ground.worker().create_buffer(64).unwrap());
    ground.plain();
    ground.earlier = Some(ground.plain());
}

fn start_fails(ground: &mut Ground) {
    ground.faults.arm(Fault::new(Call::Start, FaultEffect::Before));
}

fn prepare(ground: &Ground) -> Answer {
    match ground.prepare() {
        Ok(worker) => {
            *ground.spare.lock() = Some(worker);
            Answer::Fine
        }
        Err(error) => Answer::Failed(error),
    }
}

fn drop_worker(ground: &Ground) -> Answer {
    drop(ground.spare.lock().take());
    Answer::Fine
}

/// Everything that a user of the dispatch layer can do that makes a call of the backend.
pub(crate) fn operations() -> Vec<Operation> {
    use Kind::{Close, Drop, Prepare, Silent, User};
    let any: &[Mode] = &[Mode::Whole];
    let buffer = |name, run| Operation::new(name, User, any, with_buffer, run);
    let tensor = |name, run| Operation::new(name, User, any, with_tensor, run);
    vec![
        Operation::new("prepare", Prepare, PERSISTENT, nothing, prepare),
        Operation::new("prepare, start fails", Prepare, any, start_fails, prepare).own(Own::Start),
        Operation::dispatch("first dispatch", ALL, Act::Plain, cold),
        Operation::dispatch("warm dispatch", ALL, Act::Plain, warm),
        Operation::dispatch("dispatch gains a domain", &[Mode::Whole, Mode::Off], Act::Grow, warm),
        Operation::dispatch("dispatch with every call", BOTH, Act::Rich, warm),
        Operation {
            unopened: &[Call::AllocScratch, Call::WriteBuffer],
            ..Operation::dispatch("dispatch that opens late", &[Mode::Whole, Mode::Off], Act::Early, warm)
        },
        Operation {
            opening: &[(Call::GetOrAllocateDomain, 1), (Call::CopyTo, 4)],
            ..Operation::dispatch("builder swallows failures", any, Act::Swallow, warm)
        },
        Operation::dispatch("ordinary builder swallows failures", &[Mode::Ordinary], Act::Swallow, warm),
        Operation::dispatch("task fails", &[Mode::Whole, Mode::Kept, Mode::Ordinary], Act::FailingTask, warm)
            .own(Own::Task),
        Operation::dispatch("builder fails late", BOTH, Act::FailLate, warm).own(Own::BuilderLate),
        Operation::dispatch("builder fails early", BOTH, Act::FailEarly, warm).own(Own::BuilderEarly),
        Operation {
            kind: Silent,
            ..Operation::dispatch("builder drops a buffer", &[Mode::Fill], Act::DropBuffer, handing_over)
        },
        Operation::new("create a buffer", User, any, warm, |g| {
            let created = g.worker().create_buffer(32);
            created.map(|buffer| *g.buffer.lock() = Some(buffer)).into()
        }),
        buffer("write a buffer", |g| g.buffer.lock().clone().unwrap().write(0, &[1; 8]).into()),
        buffer("read a buffer", |g| g.buffer.lock().clone().unwrap().read(0, &mut [1; 8]).into()),
        buffer("fill a buffer", |g| g.buffer.lock().clone().unwrap().fill(1).into()),
        buffer("release a buffer", |g| {
            let buffer = g.buffer.lock().take().unwrap();
            buffer.release().into()
        }),
        Operation {
            kind: Silent,
            ..buffer("drop a buffer", |g| {
                let buffer = g.buffer.lock().take();
                drop(buffer);
                Answer::Fine
            })
        },
        buffer("allocate device memory", |g| g.worker().alloc(ChipId(0), 64).map(drop).into()),
        tensor("copy to device memory", |g| {
            let (tensor, buffer) = (g.tensor.lock().clone().unwrap(), g.buffer.lock().clone().unwrap());
            tensor.copy_to(&buffer).into()
        }),
        tensor("copy from device memory", |g| {
            let (tensor, buffer) = (g.tensor.lock().clone().unwrap(), g.buffer.lock().clone().unwrap());
            tensor.copy_from(&buffer).into()
        }),
        tensor("free device memory", |g| {
            let tensor = g.tensor.lock().take().unwrap();
            g.worker().free(tensor).into()
        }),
        Operation::new("close", Close, ALL, with_tensor, |g| g.worker().close().into()),
        Operation::new("close after an unseen failure", Close, BOTH, with_unseen_failure, |g| {
            g.worker().close().into()
        })
        .own(Own::Undelivered),
        Operation::new("close again", Close, any, with_failed_close, |g| g.worker().close().into()),
        Operation::new("drop", Drop, &[Mode::Whole, Mode::Range], for_drop, drop_worker),
    ]
}
