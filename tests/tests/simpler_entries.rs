//! Generated programs as host entries of the Simpler binding.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::cell::{Cell, RefCell};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use pto_mock::conformance::TestPath;
use pto_simpler_sys::python::{SimplerBackend, SimplerOptions};
use pto_simpler_sys::{
    Access, Backend, BackendError, BuildFailed, Call, CallConfig, CallableId, CallableKind, CallableSource,
    CallableSpec, CallbackError, DataType, DomainAllocation, DomainId, DomainRequest, EntryArg, EntryCall,
    EntryHost, EntryValue, Family, GraphBuilder, HostBufferId, Orchestrator, Registered, Retention, RunEvents,
    RunId, RunOutcome, Shape, SubmitError, TensorArg, TensorPlace,
};
use pto_tests::simpler::{self, Runtime};
use pyo3::prelude::*;

macro_rules! alone {
    ($name:ident, $body:expr) => {
        #[test]
        fn $name() {
            simpler::alone(TestPath::new(module_path!(), stringify!($name)), $body);
        }
    };
}

fn generated() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("generated")
}

fn options() -> SimplerOptions {
    let mut options = simpler::options(Runtime::selected(), 2, 0);
    options.python_path.push(generated().join("packages"));
    let report = CallableSource::Import { module: "pto_preludes".into(), attribute: "report".into() };
    options.callbacks.insert("report".into(), report);
    options
}

fn backend(options: SimplerOptions) -> Arc<SimplerBackend> {
    let backend = Arc::new(SimplerBackend::new(options).unwrap());
    Python::attach(|py| py.import("pto_preludes").unwrap().call_method0("toolchain").map(drop)).unwrap();
    backend
}

fn register(backend: &SimplerBackend, directory: &Path) -> Result<Registered, BackendError> {
    backend.register(&CallableSpec {
        name: "reduce".into(),
        kind: CallableKind::Entry,
        signature: None,
        source: CallableSource::Directory(directory.to_owned()),
    })
}

/// A copy of the program whose orchestration is changed.
fn changed(change: impl FnOnce(String) -> String) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    copy_directory(&generated().join("reduce"), copy.path());
    let entry = copy.path().join("orchestration").join("host_orch.py");
    let text = fs::read_to_string(&entry).unwrap();
    fs::write(&entry, change(text)).unwrap();
    copy
}

fn copy_directory(from: &Path, to: &Path) {
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

struct Ends(Mutex<mpsc::Sender<(RunId, RunOutcome)>>);

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
    opened: Cell<u32>,
    domains: RefCell<Vec<(String, DomainRequest, Option<DomainId>)>>,
}

impl EntryHost for Host<'_> {
    fn open(&self, _task: bool) -> Result<(), BuildFailed> {
        self.opened.set(self.opened.get() + 1);
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

/// Everything for calling the program.
struct Bench {
    backend: Arc<SimplerBackend>,
    ends: mpsc::Receiver<(RunId, RunOutcome)>,
    entry: CallableId,
    x: HostBufferId,
    y: HostBufferId,
    marks: HostBufferId,
}

/// What one call did.
#[derive(Debug)]
struct Called {
    submitted: Result<(), SubmitError>,
    entry: Result<(), CallbackError>,
    opened: u32,
    domains: Vec<(String, DomainRequest, Option<DomainId>)>,
}

struct Build<'b>(&'b mut dyn FnMut(&dyn Orchestrator) -> Result<(), BuildFailed>);

impl GraphBuilder for Build<'_> {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
        (self.0)(orchestrator)
    }
}

impl Bench {
    fn new(directory: &Path) -> Self {
        let backend = backend(options());
        let entry = register(&backend, directory).unwrap().id;
        let (sender, ends) = mpsc::channel();
        backend.start(Arc::new(Ends(Mutex::new(sender)))).unwrap();
        let [x, y, marks] = [512, 512, 16].map(|n| backend.create_buffer(n).unwrap());
        backend.fill_buffer(marks, 0).unwrap();
        Self { backend, ends, entry, x, y, marks }
    }

    fn args(&self, step: u64) -> Vec<EntryArg> {
        let tensor = |name: &str, buffer, dims: &[u32], access| EntryArg {
            name: name.into(),
            value: EntryValue::Tensor(TensorArg {
                place: TensorPlace::Host(buffer),
                shape: Shape::new(dims).unwrap(),
                dtype: DataType::Int32,
                byte_offset: 0,
                access,
            }),
        };
        vec![
            tensor("x", self.x, &[2, 64], Access::Input),
            tensor("y", self.y, &[2, 64], Access::OutputExisting),
            tensor("marks", self.marks, &[4], Access::InOut),
            EntryArg { name: "step".into(), value: EntryValue::Scalar(step) },
        ]
    }

    /// A call over a domain of its run; `then` is called inside the build, after the entry.
    fn call_then(&self, run: u64, then: impl Fn()) -> Called {
        self.call_with(run, false, false, &then)
    }

    fn call(&self, run: u64, retained: bool, refuses: bool) -> Called {
        self.call_with(run, retained, refuses, &|| ())
    }

    fn call_with(&self, run: u64, retained: bool, refuses: bool, then: &dyn Fn()) -> Called {
        let args = self.args(run);
        let config = CallConfig::new();
        let mut out = None;
        let submitted = {
            let mut body = |orchestrator: &dyn Orchestrator| {
                if retained && run > 1 && !refuses {
                    self.clear(orchestrator);
                }
                let host =
                    Host { orchestrator, retained, refuses, opened: Cell::new(0), domains: RefCell::default() };
                let call = EntryCall { args: &args, config: &config, frame: (run % 2) as u32 };
                let result = orchestrator.run_entry(self.entry, &call, &host);
                then();
                let built = if result.is_ok() { Ok(()) } else { Err(BuildFailed) };
                out = Some((result, host.opened.get(), host.domains.take()));
                built
            };
            self.backend.submit(RunId(run), &config, &mut Build(&mut body))
        };
        let (entry, opened, domains) = out.unwrap();
        Called { submitted, entry, opened, domains }
    }

    /// What a dispatch does before it reuses a domain: zeroes the cells that the program counts in.
    fn clear(&self, o: &dyn Orchestrator) {
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

    fn request(&self) -> DomainRequest {
        let buffer = |name: &str, count, nbytes| pto_simpler_sys::NamedBuffer {
            name: name.into(),
            dtype: "opaque".into(),
            count,
            nbytes,
        };
        DomainRequest::packed([0, 1], vec![buffer("payload", 256, 256), buffer("signal", 8, 32)])
    }

    fn write_x(&self, step: i32) -> Vec<i32> {
        let rows: Vec<i32> = (0..128).map(|i| i * 3 + step * 1000).collect();
        let bytes: Vec<u8> = rows.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.backend.write_buffer(self.x, 0, &bytes).unwrap();
        (0..64).map(|i| rows[i] + rows[64 + i]).collect()
    }

    fn words(&self, buffer: HostBufferId, n: usize) -> Vec<i32> {
        let mut bytes = vec![0; n * 4];
        self.backend.read_buffer(buffer, 0, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|w| i32::from_le_bytes(w.try_into().unwrap())).collect()
    }

    /// One call that must be right.
    fn right(&self, run: u64, retained: bool) -> Called {
        let sums = self.write_x(run as i32);
        let called = self.call(run, retained, false);
        assert!(called.submitted.is_ok() && called.entry.is_ok(), "{called:?}");
        assert_eq!(self.ends.recv_timeout(Duration::from_secs(200)).unwrap(), (RunId(run), RunOutcome::success()));
        let y = self.words(self.y, 128);
        assert_eq!((&y[..64], &y[64..]), (&*sums, &*sums), "run {run}");
        let marks = self.words(self.marks, 2);
        assert_eq!(marks[0], (0..8).map(|i| run as i32 + i).sum::<i32>(), "run {run}");
        called
    }
}

alone!(a_generated_program_runs_over_a_retained_domain, || {
    let bench = Bench::new(&generated().join("reduce"));
    if matches!(bench.backend.capabilities().retention, Retention::Unsupported { .. }) {
        println!("skipped: no retention");
        return bench.backend.close().unwrap();
    }
    let mut ids = Vec::new();
    for run in 1..=3 {
        let called = bench.right(run, true);
        assert_eq!(called.opened, 1);
        let [(name, request, id)] = &called.domains[..] else { panic!("{called:?}") };
        assert_eq!((&**name, request), ("comm_d0", &bench.request()));
        ids.push(id.unwrap());
        // Bound in place of the program's own, which only fails.
        assert_eq!(bench.words(bench.marks, 2)[1], run as i32);
    }
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    bench.backend.close().unwrap();
});

alone!(a_generated_program_may_assign_parts_of_its_arguments, || {
    let row = r#"tensors["x_row"] = tensors["x"][r, 0 : tensors["x"].shape[1]]"#;
    let assign = format!(r#"tensors["x"][r : r + 1, 0:32] = tensors["x"][r : r + 1, 32:64]; {row}"#);
    let copy = changed(|text| {
        assert!(text.contains(row));
        text.replace(row, &assign)
    });
    let bench = Bench::new(copy.path());
    let sums = bench.write_x(1);
    let called = bench.call(1, false, false);
    assert!(called.submitted.is_ok() && called.entry.is_ok(), "{called:?}");
    assert_eq!(bench.ends.recv_timeout(Duration::from_secs(200)).unwrap(), (RunId(1), RunOutcome::success()));
    let y = bench.words(bench.y, 64);
    assert_eq!((&y[..32], &y[32..]), (&sums[32..], &sums[32..]));
    bench.backend.close().unwrap();
});

alone!(what_an_entry_puts_among_its_tensors_lives_as_long_as_its_run, || {
    let first = "step = tensors[\"step\"]";
    let copy = changed(|text| {
        let mark =
            "class Mark:\n    gone = False\n\n    def __del__(self):\n        Mark.gone = True\n\n\ndef host_orch(";
        let text = text.replacen("def host_orch(", mark, 1);
        text.replacen(
            first,
            &format!("tensors[\"own\"] = Mark()\n    __import__(\"sys\")._pto_mark = Mark\n    {first}"),
            1,
        )
    });
    let bench = Bench::new(copy.path());
    let gone = || {
        Python::attach(|py| {
            let mark = py.import("sys").unwrap().getattr("_pto_mark").unwrap();
            mark.getattr("gone").unwrap().is_truthy().unwrap()
        })
    };
    bench.write_x(1);
    let seen = Cell::new(true);
    let called = bench.call_then(1, || seen.set(gone()));
    assert!(called.submitted.is_ok(), "{called:?}");
    assert!(!seen.get(), "freed before the run was even accepted");
    assert_eq!(bench.ends.recv_timeout(Duration::from_secs(200)).unwrap(), (RunId(1), RunOutcome::success()));
    assert!(gone(), "kept for ever");
    bench.backend.close().unwrap();
});

alone!(an_error_of_the_programs_own_keeps_its_traceback, || {
    let copy = changed(|text| {
        text.replacen("def _alloc_intermediates", "raise ValueError(\"own\")\n\n\ndef _alloc_intermediates", 1)
    });
    let backend = backend(options());
    let error = register(&backend, copy.path()).unwrap_err();
    assert_eq!(error.family(), Family::Backend, "{error:?}");
    assert!(error.runtime().unwrap().traceback.as_ref().unwrap().contains("host_orch.py"), "{error:?}");
    backend.close().unwrap();
});

alone!(a_manifest_that_is_no_list_is_refused_with_its_name, || {
    for text in ["{\"a\": 1}", "[1]", "[\"a\""] {
        let copy = changed(|text| text);
        fs::write(copy.path().join("sub_workers").join("__required__.json"), text).unwrap();
        let backend = backend(options());
        let error = register(&backend, copy.path()).unwrap_err();
        assert_eq!(error.family(), Family::Misuse, "{error:?}");
        assert!(error.to_string().contains("__required__.json"), "{error}");
        backend.close().unwrap();
    }
});

alone!(a_generated_program_runs_over_a_domain_of_its_run, || {
    let bench = Bench::new(&generated().join("reduce"));
    let ids: Vec<_> = (1..=2).map(|run| bench.right(run, false).domains[0].2).collect();
    assert_ne!(ids[0], ids[1]);
    bench.backend.close().unwrap();
});

alone!(s68_a_program_without_the_provider_says_so_and_allocates_by_itself, || {
    let old = changed(|text| {
        text.replace(", _domain_provider=None)", ")")
            .replace("(_domain_provider or orch.allocate_domain)", "orch.allocate_domain")
    });
    let bench = Bench::new(old.path());
    for run in 1..=2 {
        let called = bench.right(run, false);
        assert!(called.domains.is_empty() && called.opened == 1, "{called:?}");
    }
    bench.backend.close().unwrap();
    let probe = backend(options());
    assert!(!register(&probe, old.path()).unwrap().takes_domains);
    assert!(register(&probe, &generated().join("reduce")).unwrap().takes_domains);
    probe.close().unwrap();
});

alone!(an_exception_of_the_program_keeps_its_traceback, || {
    let broken = changed(|text| text.replace("    step = tensors[\"step\"]\n", "    step = 1 // 0\n"));
    let bench = Bench::new(broken.path());
    let called = bench.call(1, false, false);
    assert_eq!(called.submitted, Err(SubmitError::Build(BuildFailed)));
    let Err(CallbackError::Backend(error)) = called.entry else { panic!("{called:?}") };
    let failure = error.runtime().unwrap();
    assert_eq!((failure.call, &*failure.type_name, failure.fatal), (Call::RunEntry, "ZeroDivisionError", false));
    let traceback = failure.traceback.as_ref().unwrap();
    assert!(traceback.contains("host_orch") && traceback.contains("1 // 0"), "{traceback}");
    // It had not reached the device.
    assert_eq!((called.opened, failure.effect), (0, pto_simpler_sys::Effect::None));
    bench.backend.close().unwrap();
});

alone!(a_refusal_of_the_host_counts_although_the_program_swallows_it, || {
    let swallows = changed(|text| {
        text.replace("    step = tensors[\"step\"]\n", "    try:\n        _domain_provider(name='d', workers=[0], window_size=64, buffers=[])\n    except Exception:\n        return\n    step = tensors[\"step\"]\n")
    });
    let bench = Bench::new(swallows.path());
    let called = bench.call(1, false, true);
    assert_eq!(called.entry, Err(CallbackError::Build(BuildFailed)));
    assert_eq!(called.submitted, Err(SubmitError::Build(BuildFailed)));
    bench.backend.close().unwrap();
});

alone!(malformed_programs_are_refused_at_registration, || {
    let probe = backend(options());
    let refused = |directory: &Path, about: &str| {
        let error = register(&probe, directory).unwrap_err();
        assert_eq!(error.call(), Call::Register);
        assert!(error.to_string().contains(about), "{error}");
        error
    };
    let none = changed(|text| text.replace("host_orch._pypto_distributed_entry = True", ""));
    assert_eq!(refused(none.path(), "exactly one function").family(), Family::Misuse);
    let two = changed(|text| {
        format!("{text}\n\ndef other(orch):\n    pass\n\n\nother._pypto_distributed_entry = True\n")
    });
    assert_eq!(refused(two.path(), "[\'host_orch\', \'other\']").family(), Family::Misuse);
    let package = changed(|text| format!("import no_such_package\n{text}"));
    refused(package.path(), "'no_such_package'");
    let empty = tempfile::tempdir().unwrap();
    refused(empty.path(), "no generated orchestration");
    let chipless = changed(|text| text);
    fs::remove_dir_all(chipless.path().join("next_levels")).unwrap();
    refused(chipless.path(), "no chip program");
    // Nothing of this has spoiled the backend.
    register(&probe, &generated().join("reduce")).unwrap();
    probe.close().unwrap();
});

alone!(sub_workers_without_a_body_must_be_bound_and_by_something_fitting, || {
    let directory = generated().join("reduce");
    let mut unbound = options();
    unbound.callbacks.clear();
    let error = register(&backend(unbound), &directory).unwrap_err();
    assert!(error.family() == Family::Misuse && error.to_string().contains("report"), "{error}");
    let mut unfit = options();
    let two = CallableSource::Import { module: "pto_preludes".into(), attribute: "takes_two".into() };
    unfit.callbacks.insert("report".into(), two);
    let error = register(&backend(unfit), &directory).unwrap_err();
    assert!(error.family() == Family::Misuse && error.to_string().contains("exactly one argument"), "{error}");
    let mut unused = options();
    let spare = CallableSource::Import { module: "pto_preludes".into(), attribute: "report".into() };
    unused.callbacks.insert("reprot".into(), spare);
    let backend = backend(unused);
    register(&backend, &directory).unwrap();
    let (sender, _ends) = mpsc::channel();
    let error = backend.start(Arc::new(Ends(Mutex::new(sender)))).unwrap_err();
    assert!(error.family() == Family::Misuse && error.to_string().contains("reprot"), "{error}");
    backend.close().unwrap();
});
