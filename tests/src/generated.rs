//! Generated programs as host entries of the Simpler binding: loading them, changed copies of them, and calling them with
//! a host that gives them their domains as a dispatch would.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use pto_simpler_sys::python::{SimplerBackend, SimplerOptions};
use pto_simpler_sys::{
    Access, Backend, BackendError, BuildFailed, CallConfig, CallableId, CallableKind, CallableSource, CallableSpec,
    CallbackError, DataType, DomainAllocation, DomainId, DomainRequest, EntryArg, EntryCall, EntryHost, EntryValue,
    GraphBuilder, HostBufferId, Orchestrator, Registered, RunEvents, RunId, RunOutcome, Shape, SubmitError,
    TensorArg, TensorPlace,
};
use pyo3::prelude::*;

use crate::simpler::{self, Runtime};

/// The directory of generated programs.
#[must_use]
pub fn generated() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("generated")
}

/// Options with the packages that generated code imports, and the callback of `reduce`.
#[must_use]
pub fn options() -> SimplerOptions {
    let mut options = simpler::options(Runtime::selected(), 2, 0);
    options.python_path.push(generated().join("packages"));
    let report = CallableSource::Import { module: "pto_preludes".into(), attribute: "report".into() };
    options.callbacks.insert("report".into(), report);
    options
}

/// A backend that can compile the chip programs of generated ones.
#[must_use]
pub fn backend(options: SimplerOptions) -> Arc<SimplerBackend> {
    let backend = Arc::new(SimplerBackend::new(options).unwrap());
    Python::attach(|py| py.import("pto_preludes").unwrap().call_method0("toolchain").map(drop)).unwrap();
    backend
}

/// Registers a program.
///
/// # Errors
///
/// What the backend says.
pub fn register(backend: &SimplerBackend, directory: &Path) -> Result<Registered, BackendError> {
    backend.register(&CallableSpec {
        name: "generated".into(),
        kind: CallableKind::Entry,
        signature: None,
        source: CallableSource::Directory(directory.to_owned()),
    })
}

/// A copy of the program `reduce` whose orchestration is changed.
#[must_use]
pub fn changed(change: impl FnOnce(String) -> String) -> tempfile::TempDir {
    changed_copy("reduce", change)
}

/// A copy of the program `name` whose orchestration is changed.
#[must_use]
pub fn changed_copy(name: &str, change: impl FnOnce(String) -> String) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    copy_directory(&generated().join(name), copy.path());
    let entry = copy.path().join("orchestration").join("host_orch.py");
    let text = fs::read_to_string(&entry).unwrap();
    fs::write(&entry, change(text)).unwrap();
    copy
}

/// Copies a program.
pub fn copy_directory(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_directory(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Passes the ends of runs on.
#[derive(Debug)]
pub struct Ends(pub Mutex<mpsc::Sender<(RunId, RunOutcome)>>);

impl RunEvents for Ends {
    fn ended(&self, run: RunId, outcome: RunOutcome) {
        let _ = self.0.lock().unwrap().send((run, outcome));
    }
}

/// Gives the entry its domains from the backend, as a dispatch would.
struct Host<'a> {
    orchestrator: &'a dyn Orchestrator,
    retained: bool,
    refuses: bool,
    opened: RefCell<Vec<bool>>,
    domains: RefCell<Vec<(String, DomainRequest, Option<DomainId>)>>,
}

impl EntryHost for Host<'_> {
    fn open(&self, task: bool) -> Result<(), BuildFailed> {
        self.opened.borrow_mut().push(task);
        Ok(())
    }

    fn retains(&self) -> bool {
        self.retained
    }

    fn domain(&self, name: &str, request: &DomainRequest, reply: &mut DomainAllocation) -> Result<(), BuildFailed> {
        if self.refuses {
            return Err(BuildFailed);
        }
        let full = format!("p0:{name}");
        let result = if self.retained {
            self.orchestrator.get_or_allocate_domain(&full, request, true, reply)
        } else {
            self.orchestrator.allocate_domain(&full, request, reply)
        };
        result.map_err(|error| {
            println!("host: {error}");
            BuildFailed
        })?;
        self.domains.borrow_mut().push((name.to_owned(), request.clone(), reply.id()));
        Ok(())
    }
}

/// How a call gets its domains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// For this run.
    OfTheRun,
    /// Retained; the cells that `reduce` counts in are zeroed from the second run on.
    Retained,
    /// Not at all.
    Refused,
}

/// Everything for calling a program: the worker, and host memory for two rows of numbers in, two times two out, and
/// four marks.
#[derive(Debug)]
pub struct Bench {
    /// The backend.
    pub backend: Arc<SimplerBackend>,
    /// Ends of runs.
    pub ends: mpsc::Receiver<(RunId, RunOutcome)>,
    /// The program.
    pub entry: CallableId,
    /// Two rows of 64 numbers.
    pub x: HostBufferId,
    /// Two rows of 64 numbers.
    pub y: HostBufferId,
    /// Two rows of 64 numbers.
    pub z: HostBufferId,
    /// Four numbers.
    pub marks: HostBufferId,
}

/// What one call did.
#[derive(Debug)]
pub struct Called {
    /// What the submission returned.
    pub submitted: Result<(), SubmitError>,
    /// What the entry returned.
    pub entry: Result<(), CallbackError>,
    /// What the host was told of calls that reach the device: whether each is a task.
    pub opened: Vec<bool>,
    /// The domains that the entry asked for.
    pub domains: Vec<(String, DomainRequest, Option<DomainId>)>,
}

impl Called {
    /// The failure of the entry itself.
    ///
    /// # Panics
    ///
    /// Where it did not fail, or the host refused.
    #[must_use]
    pub fn failure(&self) -> &BackendError {
        assert_eq!(self.submitted, Err(SubmitError::Build(BuildFailed)), "{self:?}");
        match &self.entry {
            Err(CallbackError::Backend(error)) => error,
            other => panic!("{other:?}"),
        }
    }
}

struct Build<'b>(&'b mut dyn FnMut(&dyn Orchestrator) -> Result<(), BuildFailed>);

impl GraphBuilder for Build<'_> {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
        (self.0)(orchestrator)
    }
}

impl Bench {
    /// Loads the program and starts the worker.
    #[must_use]
    pub fn new(directory: &Path) -> Self {
        Self::with(options(), &[directory])
    }

    /// Loads a program that declares no callbacks, and starts the worker.
    #[must_use]
    pub fn new_without_callbacks(directory: &Path) -> Self {
        let mut options = options();
        options.callbacks.clear();
        Self::with(options, &[directory])
    }

    /// Loads programs, of which the first is to be called, and starts the worker.
    #[must_use]
    pub fn with(options: SimplerOptions, directories: &[&Path]) -> Self {
        let backend = backend(options);
        let entries: Vec<CallableId> = directories.iter().map(|d| register(&backend, d).unwrap().id).collect();
        let (sender, ends) = mpsc::channel();
        backend.start(Arc::new(Ends(Mutex::new(sender)))).unwrap();
        let [x, y, z, marks] = [512, 512, 512, 16].map(|n| backend.create_buffer(n).unwrap());
        for buffer in [x, y, z, marks] {
            backend.fill_buffer(buffer, 0).unwrap();
        }
        Self { backend, ends, entry: entries[0], x, y, z, marks }
    }

    /// An argument over a host buffer of 32-bit numbers.
    #[must_use]
    pub fn tensor(&self, name: &str, buffer: HostBufferId, dims: &[u32], access: Access) -> EntryArg {
        EntryArg {
            name: name.into(),
            value: EntryValue::Tensor(TensorArg {
                place: TensorPlace::Host(buffer),
                shape: Shape::new(dims).unwrap(),
                dtype: DataType::Int32,
                byte_offset: 0,
                access,
            }),
        }
    }

    /// The arguments of `reduce`.
    #[must_use]
    pub fn args(&self, step: u64) -> Vec<EntryArg> {
        vec![
            self.tensor("x", self.x, &[2, 64], Access::Input),
            self.tensor("y", self.y, &[2, 64], Access::OutputExisting),
            self.tensor("marks", self.marks, &[4], Access::InOut),
            EntryArg { name: "step".into(), value: EntryValue::Scalar(step) },
        ]
    }

    /// Calls `reduce` with the run as its step.
    #[must_use]
    pub fn call(&self, run: u64, mode: Mode) -> Called {
        self.call_with(run, mode, &self.args(run), &|_| (), &|| ())
    }

    /// A call: `before` comes inside the build before the entry, `after` after it.
    #[must_use]
    pub fn call_with(
        &self,
        run: u64,
        mode: Mode,
        args: &[EntryArg],
        before: &dyn Fn(&dyn Orchestrator),
        after: &dyn Fn(),
    ) -> Called {
        let config = CallConfig::new();
        let mut out = None;
        let submitted = {
            let mut body = |orchestrator: &dyn Orchestrator| {
                before(orchestrator);
                let host = Host {
                    orchestrator,
                    retained: mode == Mode::Retained,
                    refuses: mode == Mode::Refused,
                    opened: RefCell::default(),
                    domains: RefCell::default(),
                };
                let call = EntryCall { args, config: &config, frame: (run % 2) as u32 };
                let result = orchestrator.run_entry(self.entry, &call, &host);
                after();
                let built = if result.is_ok() { Ok(()) } else { Err(BuildFailed) };
                out = Some((result, host.opened.take(), host.domains.take()));
                built
            };
            self.backend.submit(RunId(run), &config, &mut Build(&mut body))
        };
        let (entry, opened, domains) = out.unwrap();
        Called { submitted, entry, opened, domains }
    }

    /// What a dispatch does before it reuses the domain of `reduce`: zeroes the cells that the program counts in.
    pub fn clear(&self, o: &dyn Orchestrator) {
        let mut reply = DomainAllocation::new();
        let request = self.request();
        o.get_or_allocate_domain("p0:comm_d0", &request, true, &mut reply).unwrap();
        let zeros = self.backend.create_buffer(request.buffers[1].nbytes).unwrap();
        self.backend.fill_buffer(zeros, 0).unwrap();
        for member in reply.members() {
            o.copy_to(&pto_simpler_sys::CopyTo {
                dst: pto_simpler_sys::DevicePlace::DomainBuffer {
                    domain: reply.id().unwrap(),
                    chip: member.chip,
                    buffer: 1,
                },
                src: pto_simpler_sys::CopySource::Host(zeros),
                nbytes: request.buffers[1].nbytes,
            })
            .unwrap();
        }
    }

    /// What `reduce` asks for.
    #[must_use]
    pub fn request(&self) -> DomainRequest {
        let buffer = |name: &str, count, nbytes| pto_simpler_sys::NamedBuffer {
            name: name.into(),
            dtype: "opaque".into(),
            count,
            nbytes,
        };
        DomainRequest::packed([0, 1], vec![buffer("payload", 256, 256), buffer("signal", 8, 32)])
    }

    /// Writes two rows of numbers to `x`; their sum.
    #[must_use]
    pub fn write_x(&self, step: i32) -> Vec<i32> {
        let rows: Vec<i32> = (0..128).map(|i| i * 3 + step * 1000).collect();
        let bytes: Vec<u8> = rows.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.backend.write_buffer(self.x, 0, &bytes).unwrap();
        (0..64).map(|i| rows[i] + rows[64 + i]).collect()
    }

    /// The first numbers of a buffer.
    #[must_use]
    pub fn words(&self, buffer: HostBufferId, n: usize) -> Vec<i32> {
        let mut bytes = vec![0; n * 4];
        self.backend.read_buffer(buffer, 0, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|w| i32::from_le_bytes(w.try_into().unwrap())).collect()
    }

    /// Waits for the end of a run, which must be a success.
    pub fn ended(&self, run: u64) {
        let end = self.ends.recv_timeout(Duration::from_secs(200)).unwrap();
        assert_eq!(end, (RunId(run), RunOutcome::success()));
    }

    /// One call of `reduce` that must be right.
    #[must_use]
    pub fn right(&self, run: u64, mode: Mode) -> Called {
        let sums = self.write_x(run as i32);
        let clear = |o: &dyn Orchestrator| {
            if mode == Mode::Retained && run > 1 {
                self.clear(o);
            }
        };
        let called = self.call_with(run, mode, &self.args(run), &clear, &|| ());
        assert!(called.submitted.is_ok() && called.entry.is_ok(), "{called:?}");
        self.ended(run);
        let y = self.words(self.y, 128);
        assert_eq!((&y[..64], &y[64..]), (&*sums, &*sums), "run {run}");
        let marks = self.words(self.marks, 2);
        assert_eq!(marks[0], (0..8).map(|i| run as i32 + i).sum::<i32>(), "run {run}");
        called
    }
}
