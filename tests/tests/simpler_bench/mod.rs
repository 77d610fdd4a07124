//! A started backend and what the suites of the binding do with it.
#![allow(dead_code, reason = "each suite uses a part of it")]

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use pto_mock::kernels;
use pto_simpler_sys::python::{SimplerBackend, SimplerOptions};
use pto_simpler_sys::{
    Access, Backend, BackendError, BuildFailed, Call, CallConfig, CallableId, CallableSpec, DataType,
    DomainAllocation, DomainRequest, Family, GraphBuilder, HostBufferId, NamedBuffer, Orchestrator, RunEvents,
    RunId, RunOutcome, Shape, SubmitError, TaskArgs, TensorArg, TensorPlace,
};
use pto_tests::simpler::{self, Runtime};

/// A test in a process of its own that must leave nothing in shared memory.
macro_rules! alone {
    ($name:ident, $body:expr) => {
        #[test]
        fn $name() {
            pto_tests::simpler::alone(
                pto_mock::conformance::TestPath::new(module_path!(), stringify!($name)),
                $body,
            );
        }
    };
}

pub(crate) use alone;

pub(crate) fn options(chips: u32, sub_workers: u32) -> SimplerOptions {
    simpler::options(Runtime::selected(), chips, sub_workers)
}

/// Collects ends of runs.
pub(crate) struct Ends(pub(crate) Mutex<mpsc::Sender<(RunId, RunOutcome)>>);

impl RunEvents for Ends {
    fn ended(&self, run: RunId, outcome: RunOutcome) {
        // A test that is over no longer listens.
        let _ = self.0.lock().unwrap().send((run, outcome));
    }
}

pub(crate) struct Build<F>(pub(crate) Option<F>);

impl<F: FnOnce(&dyn Orchestrator) -> Result<(), BackendError>> GraphBuilder for Build<F> {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
        let body = self.0.take().ok_or(BuildFailed)?;
        body(orchestrator).map_err(|error| {
            println!("builder: {error}");
            BuildFailed
        })
    }
}

/// A started backend with the portable kernels.
pub(crate) struct Bench {
    pub(crate) backend: Arc<SimplerBackend>,
    pub(crate) ends: mpsc::Receiver<(RunId, RunOutcome)>,
    pub(crate) callables: Vec<(Arc<str>, CallableId)>,
}

impl Bench {
    pub(crate) fn new(options: SimplerOptions, extra: &[CallableSpec]) -> Self {
        let backend = Arc::new(SimplerBackend::new(options).unwrap());
        let mut callables = Vec::new();
        for spec in kernels::specs().iter().chain(extra) {
            if spec.kind == pto_simpler_sys::CallableKind::Sub && backend.capabilities().sub_workers == 0 {
                continue;
            }
            callables.push((Arc::clone(&spec.name), backend.register(spec).unwrap().id));
        }
        let (sender, ends) = mpsc::channel();
        backend.start(Arc::new(Ends(Mutex::new(sender)))).unwrap();
        Self { backend, ends, callables }
    }

    pub(crate) fn callable(&self, name: &str) -> CallableId {
        self.callables.iter().find(|(known, _)| &**known == name).unwrap().1
    }

    pub(crate) fn submit(
        &self,
        run: u64,
        build: impl FnOnce(&dyn Orchestrator) -> Result<(), BackendError>,
    ) -> Result<(), SubmitError> {
        self.backend.submit(RunId(run), &CallConfig::new(), &mut Build(Some(build)))
    }

    pub(crate) fn end(&self) -> (RunId, RunOutcome) {
        self.ends.recv_timeout(Duration::from_secs(200)).unwrap()
    }

    /// A run that ends well.
    pub(crate) fn run(&self, run: u64, build: impl FnOnce(&dyn Orchestrator) -> Result<(), BackendError>) {
        self.submit(run, build).unwrap();
        assert_eq!(self.end(), (RunId(run), RunOutcome::success()));
    }

    pub(crate) fn handshake(
        &self,
        o: &dyn Orchestrator,
        reply: &DomainAllocation,
        rank: usize,
        out: HostBufferId,
        bound: u64,
    ) -> Result<(), BackendError> {
        let member = reply.members()[rank];
        let signal = TensorPlace::DomainBuffer { domain: reply.id().unwrap(), chip: member.chip, buffer: 0 };
        let mut args = TaskArgs::new();
        args.tensor(words(signal, 1, Access::NoDependency)).tensor(words(
            TensorPlace::Host(out),
            1,
            Access::Output,
        ));
        args.scalar(member.device_context).scalar(0).scalar(bound);
        o.submit_next_level(self.callable(kernels::HANDSHAKE), &args, None, member.chip)
    }
}

pub(crate) fn words(place: TensorPlace, n: u32, access: Access) -> TensorArg {
    TensorArg { place, shape: Shape::new(&[n]).unwrap(), dtype: DataType::Int32, byte_offset: 0, access }
}

pub(crate) fn signal_window(chips: u32) -> DomainRequest {
    DomainRequest::packed(0..chips, vec![NamedBuffer::bytes("signal", 64)])
}

pub(crate) fn kill(pid: u32) {
    assert!(std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
}

pub(crate) fn misuse<T: std::fmt::Debug>(result: Result<T, BackendError>, call: Call, about: &str) {
    let error = result.unwrap_err();
    assert_eq!((error.family(), error.call()), (Family::Misuse, call), "{error:?}");
    assert!(error.to_string().contains(about), "{error}");
}
