//! What scenarios that run on every backend share: runs held open by a sub-worker, results in host buffers, and one
//! process per test where the backend has processes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::sync::Arc;

use pto_dispatch::{
    Args, Build, Error, HostBuffer, Lease, Options, PreparedWorker, Program, ProgramId, ProgramResult,
};
use pto_mock::conformance::{self, BackendSpec, TestPath};
use pto_mock::{FaultSchedule, FaultyBackend, Journal, JournalBackend, kernels};
use pto_simpler_sys::{Access, Backend, CallableSpec, DataType};

use crate::backend;
use crate::gate::HangGuard;
use crate::spy::Spy;

/// One test on the chosen backend.
#[macro_export]
macro_rules! everywhere {
    ($name:ident, $body:expr) => {
        #[test]
        fn $name() {
            let path = pto_mock::conformance::TestPath::new(module_path!(), stringify!($name));
            $crate::everywhere::on_chosen_backend(path, stringify!($name), $body);
        }
    };
}

/// The body of a test that [`everywhere!`](crate::everywhere!) makes: in a process of its own where the backend has
/// processes, and nothing may then be left in shared memory.
///
/// # Panics
///
/// Where `body` does, or leaves something.
pub fn on_chosen_backend(path: TestPath, name: &'static str, body: impl FnOnce()) {
    if !backend::chosen().unwrap().process_backed() {
        let _guard = HangGuard::arm(name);
        return body();
    }
    conformance::alone(path, || {
        let before = backend::chosen().unwrap().shared_memory().unwrap_or_default();
        body();
        let mut left = backend::chosen().unwrap().shared_memory().unwrap_or_default();
        left.retain(|name| !before.contains(name));
        assert!(left.is_empty(), "left in shared memory: {left:?} (S71)");
    });
}

/// A worker on the chosen backend, watched by a journal and a spy.
#[derive(Debug)]
pub struct Rig {
    /// The worker.
    pub worker: PreparedWorker,
    /// Its programs.
    pub ids: Vec<ProgramId>,
    /// What reached the backend, with counts.
    pub spy: Arc<Spy>,
    /// What reached the backend, in order.
    pub journal: Journal,
}

impl Rig {
    /// Prepares `programs` over `chips` chips and one sub-worker.
    ///
    /// # Panics
    ///
    /// Where that fails.
    #[must_use]
    pub fn new(options: &Options, programs: &[Arc<dyn Program>], chips: u32) -> Self {
        Self::with_faults(options, programs, chips, FaultSchedule::default())
    }

    /// The same, with faults in front of the backend.
    ///
    /// # Panics
    ///
    /// Where preparing fails.
    #[must_use]
    pub fn with_faults(
        options: &Options,
        programs: &[Arc<dyn Program>],
        chips: u32,
        faults: FaultSchedule,
    ) -> Self {
        let backend = backend::chosen().unwrap().create(&BackendSpec::new(chips, 1)).unwrap();
        let journaled = JournalBackend::new(backend);
        let journal = journaled.journal();
        let spy = Spy::new(Arc::new(FaultyBackend::new(Arc::new(journaled), faults)));
        let worker = PreparedWorker::prepare(programs, options, Arc::clone(&spy) as Arc<dyn Backend>).unwrap();
        let ids = worker.programs().collect();
        Self { worker, ids, spy, journal }
    }
}

/// A host buffer that holds a run open (see [`hold_run`]).
#[derive(Debug)]
pub struct Hold(pub HostBuffer);

impl Hold {
    /// A closed one.
    ///
    /// # Panics
    ///
    /// Without memory.
    #[must_use]
    pub fn new(worker: &PreparedWorker) -> Self {
        Self(worker.create_buffer(8).unwrap())
    }

    /// An open one.
    #[must_use]
    pub fn opened(worker: &PreparedWorker) -> Self {
        let hold = Self::new(worker);
        hold.open();
        hold
    }

    /// Lets the run end.
    ///
    /// # Panics
    ///
    /// Where the buffer cannot be written.
    pub fn open(&self) {
        self.0.write(0, &1_i32.to_ne_bytes()).unwrap();
    }

    /// Waits until the run is on the device.
    ///
    /// # Panics
    ///
    /// Where the buffer cannot be read.
    pub fn wait_arrived(&self) {
        let mut word = [0; 4];
        while i32::from_ne_bytes(word) != 1 {
            std::thread::yield_now();
            self.0.read(4, &mut word).unwrap();
        }
    }
}

/// Opens holds when a test panics, so that it fails instead of hanging.
#[derive(Debug)]
pub struct OpenOnDrop<'a>(pub &'a [&'a Hold]);

impl Drop for OpenOnDrop<'_> {
    fn drop(&mut self) {
        for hold in self.0 {
            let _ = hold.0.write(0, &1_i32.to_ne_bytes());
        }
    }
}

/// The sub-worker function that holds a run open.
#[must_use]
pub fn gate() -> CallableSpec {
    CallableSpec::sub(kernels::GATE, kernels::signature(kernels::GATE))
}

/// Submits the task that holds the run until the [`Hold`] at argument `at` is open.
///
/// # Errors
///
/// What the build refuses.
pub fn hold_run(build: &Build<'_>, callable: usize, args: &Args, at: usize) -> ProgramResult {
    let tensor = build.tensor(args.host_at(at)?, &[2], DataType::Int32, Access::InOut)?;
    Ok(build.task(callable)?.tensor(tensor).submit_sub()?)
}

/// The kernel that copies a tensor.
#[must_use]
pub fn copy() -> CallableSpec {
    CallableSpec::chip(kernels::COPY, kernels::signature(kernels::COPY))
}

/// Copies buffer `name` of each member into the host buffer at `first` + rank, after everything that wrote it.
///
/// # Errors
///
/// What the build refuses.
pub fn read_back<'b>(
    build: &Build<'b>,
    lease: &Lease<'b>,
    name: &str,
    callable: usize,
    args: &Args,
    first: usize,
) -> ProgramResult {
    for (rank, chip) in lease.request().workers.iter().enumerate() {
        let buffer = lease.buffer(*chip, name)?;
        let words = [u32::try_from(buffer.nbytes() / 4)?];
        let from = build.tensor(&buffer, &words, DataType::Int32, Access::Input)?;
        let out = args.host_at(first + rank)?;
        let to = build.tensor(out, &words, DataType::Int32, Access::OutputExisting)?;
        build.task(callable)?.tensor(from).tensor(to).submit(*chip)?;
    }
    Ok(())
}

/// One result buffer per member.
#[derive(Debug)]
pub struct Outs(pub Vec<HostBuffer>);

impl Outs {
    /// Buffers of `nbytes` with rubbish in them.
    ///
    /// # Panics
    ///
    /// Without memory.
    #[must_use]
    pub fn new(worker: &PreparedWorker, nbytes: u64) -> Self {
        let made = (0..2).map(|_| worker.create_buffer(nbytes).unwrap());
        let outs = Self(made.collect());
        outs.0.iter().for_each(|out| out.fill(0xA5).unwrap());
        outs
    }

    /// The buffers as arguments.
    #[must_use]
    pub fn args(&self) -> Args {
        self.0.iter().fold(Args::new(), |args, out| args.host(out))
    }

    /// Every word of every member.
    ///
    /// # Panics
    ///
    /// Where a buffer cannot be read.
    #[must_use]
    pub fn words(&self) -> Vec<i32> {
        let of = |out: &HostBuffer| {
            let mut bytes = vec![0; usize::try_from(out.nbytes()).unwrap()];
            out.read(0, &mut bytes).unwrap();
            let words: Vec<i32> =
                bytes.chunks_exact(4).map(|w| i32::from_ne_bytes(w.try_into().unwrap())).collect();
            words
        };
        self.0.iter().flat_map(of).collect()
    }

    /// Every word has this value.
    ///
    /// # Panics
    ///
    /// Where one has not.
    #[track_caller]
    pub fn assert_all(&self, expected: i32) {
        let words = self.words();
        let wrong = words.iter().filter(|word| **word != expected).count();
        assert_eq!(wrong, 0, "{wrong} of {} words are not {expected}: {:?}...", words.len(), &words[..4]);
    }
}

/// Waits until a close has begun, while two runs are held.
///
/// # Panics
///
/// Where a submission is accepted, or refused for another reason.
pub fn until_closing(rig: &Rig, args: &Args) {
    loop {
        match rig.worker.try_submit(rig.ids[0], args) {
            Err(Error::Closing | Error::Closed) => return,
            Err(Error::WouldBlock { .. }) => std::thread::yield_now(),
            other => panic!("two runs are held: {other:?}"),
        }
    }
}
