//! What generated programs may do, and what becomes of directories that are not as the generator writes them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::fs;
use std::path::Path;
use std::sync::Arc;

use pto_dispatch::{
    Args, Build, EntryInput, HostBuffer, Options, Parameter, PreparedWorker, Program, ProgramResult, ProgramSpec,
};
use pto_mock::conformance::TestPath;
use pto_simpler_sys::{
    Access, Backend, BuildFailed, CallConfig, CallableKind, CallableSource, CallableSpec, ChipId, CopySource,
    CopyTo, DataType, DevicePlace, Effect, EntryArg, EntryValue, Family, GraphBuilder, Orchestrator, Retention,
    RunId, RunOutcome, Shape, TensorArg, TensorPlace,
};
use pto_tests::generated::{Bench, Mode, backend, changed, generated, options, register};
use pto_tests::simpler;

macro_rules! alone {
    ($name:ident, $body:expr) => {
        #[test]
        fn $name() {
            simpler::alone(TestPath::new(module_path!(), stringify!($name)), $body);
        }
    };
}

const STEP: &str = "    step = tensors[\"step\"]\n";

/// The rows that `mixed` sums up, and their sum, for what [`Bench::write_x`] writes.
fn bank(step: i32) -> Vec<i32> {
    let x: Vec<i32> = (0..128).map(|i| i * 3 + step * 1000).collect();
    let mut first = x[..64].to_vec();
    first[32..].copy_from_slice(&x[64..96]);
    first.iter().zip(&x[64..]).map(|(a, b)| a + b).collect()
}

fn check_mixed(step: i32, y: &[i32], z: &[i32], marks: &[i32]) {
    let sums = bank(step);
    assert_eq!((&y[..64], &y[64..]), (&*sums, &*sums), "step {step}");
    let doubled: Vec<i32> = sums.iter().map(|n| n * 2).collect();
    assert_eq!((&z[..64], &z[64..]), (&*doubled, &*doubled), "step {step}");
    // Eight numbers from int(5 * 0.5) on.
    assert_eq!(marks[0], (2..10).sum::<i32>(), "step {step}");
}

alone!(scalars_slices_assembly_and_tensors_of_the_entrys_own_reach_the_chips, || {
    let bench = Bench::new_without_callbacks(&generated().join("mixed"));
    for run in 1..=3 {
        let _ = bench.write_x(run as i32);
        let scalar = |name: &str, value| EntryArg { name: name.into(), value };
        let args = [
            bench.tensor("x", bench.x, &[2, 64], Access::Input),
            bench.tensor("y", bench.y, &[2, 64], Access::OutputExisting),
            bench.tensor("z", bench.z, &[2, 64], Access::OutputExisting),
            bench.tensor("marks", bench.marks, &[4], Access::InOut),
            scalar("offset", EntryValue::Signed(-5)),
            scalar("scale", EntryValue::Float(0.5)),
            scalar("marked", EntryValue::Bool(true)),
        ];
        let called = bench.call_with(run, Mode::OfTheRun, &args, &|_| (), &|| ());
        assert!(called.submitted.is_ok() && called.entry.is_ok(), "{called:?}");
        bench.ended(run);
        check_mixed(
            run as i32,
            &bench.words(bench.y, 128),
            &bench.words(bench.z, 128),
            &bench.words(bench.marks, 4),
        );
    }
    bench.backend.close().unwrap();
});

/// What a scalar of a program means.
#[derive(Clone, Copy)]
enum Kind {
    Unsigned,
    Signed,
    Float,
    Bool,
}

/// A generated program of a prepared worker: rows of numbers and marks by name, then scalars.
struct Generated {
    spec: ProgramSpec,
    rows: &'static [&'static str],
    scalars: &'static [(&'static str, Kind)],
}

impl Generated {
    fn program(
        directory: &Path,
        rows: &'static [&'static str],
        scalars: &'static [(&'static str, Kind)],
    ) -> Arc<dyn Program> {
        let mut spec = ProgramSpec::new("generated").callable(CallableSpec {
            name: "generated".into(),
            kind: CallableKind::Entry,
            signature: None,
            source: CallableSource::Directory(directory.to_owned()),
        });
        for name in rows {
            spec = spec.parameter(Parameter::host(*name, 512));
        }
        spec = spec.parameter(Parameter::host("marks", 16));
        for (name, _) in scalars {
            spec = spec.parameter(Parameter::scalar(*name));
        }
        Arc::new(Self { spec, rows, scalars })
    }

    fn mixed() -> Arc<dyn Program> {
        let scalars = &[("offset", Kind::Signed), ("scale", Kind::Float), ("marked", Kind::Bool)];
        Self::program(&generated().join("mixed"), &["x", "y", "z"], scalars)
    }

    fn reduce(directory: &Path) -> Arc<dyn Program> {
        Self::program(directory, &["x", "y"], &[("step", Kind::Unsigned)])
    }
}

impl Program for Generated {
    fn spec(&self) -> &ProgramSpec {
        &self.spec
    }

    fn build<'b>(&self, build: &Build<'b>, args: &Args) -> ProgramResult {
        let mut inputs = Vec::new();
        for (index, name) in self.rows.iter().enumerate() {
            let tensor = build.tensor(args.host_at(index)?, &[2, 64], DataType::Int32, Access::InOut)?;
            inputs.push((Arc::from(*name), EntryInput::Tensor(tensor)));
        }
        let marks = build.tensor(args.host_at(self.rows.len())?, &[4], DataType::Int32, Access::InOut)?;
        inputs.push((Arc::from("marks"), EntryInput::Tensor(marks)));
        for (index, (name, kind)) in (self.rows.len() + 1..).zip(self.scalars) {
            let input = match kind {
                Kind::Unsigned => EntryInput::Scalar(args.scalar_at(index)?),
                Kind::Signed => EntryInput::Signed(args.signed_at(index)?),
                Kind::Float => EntryInput::Float(args.float_at(index)?),
                Kind::Bool => EntryInput::Bool(args.scalar_at(index)? != 0),
            };
            inputs.push((Arc::from(*name), input));
        }
        Ok(build.run_entry(0, &inputs)?)
    }
}

/// Host memory of a prepared worker for these programs.
struct Rows {
    x: HostBuffer,
    y: HostBuffer,
    z: HostBuffer,
    marks: HostBuffer,
}

impl Rows {
    fn new(worker: &PreparedWorker) -> Self {
        let [x, y, z, marks] = [512, 512, 512, 16].map(|n| worker.create_buffer(n).unwrap());
        Self { x, y, z, marks }
    }

    fn write_x(&self, step: i32) {
        let rows: Vec<u8> = (0..128).flat_map(|i: i32| (i * 3 + step * 1000).to_le_bytes()).collect();
        self.x.write(0, &rows).unwrap();
    }

    fn mixed(&self) -> Args {
        Args::new().host(&self.x).host(&self.y).host(&self.z).host(&self.marks).signed(-5).float(0.5).scalar(1)
    }

    fn reduce(&self, step: u64) -> Args {
        Args::new().host(&self.x).host(&self.y).host(&self.marks).scalar(step)
    }

    fn words(buffer: &HostBuffer, n: usize) -> Vec<i32> {
        let mut bytes = vec![0; n * 4];
        buffer.read(0, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|w| i32::from_le_bytes(w.try_into().unwrap())).collect()
    }

    fn check_mixed(&self, step: i32) {
        check_mixed(step, &Self::words(&self.y, 128), &Self::words(&self.z, 128), &Self::words(&self.marks, 4));
    }
}

alone!(a_prepared_worker_retains_and_resets_both_domains_of_a_generated_program, || {
    let mut options_ = options();
    options_.callbacks.clear();
    let backend = backend(options_);
    if matches!(backend.capabilities().retention, Retention::Unsupported { .. }) {
        println!("skipped: no retention");
        return backend.close().unwrap();
    }
    let worker = PreparedWorker::prepare(&[Generated::mixed()], &Options::persistent(), backend).unwrap();
    let rows = Rows::new(&worker);
    for step in 1..=3 {
        rows.write_x(step);
        worker.call(&rows.mixed()).unwrap();
        rows.check_mixed(step);
    }
    let stats = worker.stats(worker.only().unwrap()).unwrap();
    assert_eq!((stats.allocations, stats.reuses), (2, 4), "{stats:?}");
    worker.close().unwrap();
});

alone!(what_fails_before_the_opening_leaves_a_persistent_worker_as_it_was, || {
    let program = with_cases(&[
        ("before", "tensors[\"nothing\"]"),
        (
            "with its lease",
            "with _domain_provider(name=\"comm_d0\", workers=[*range(world_size)], window_size=288, \
             buffers=[CommBufferSpec(name=\"payload\", dtype=\"opaque\", count=256, nbytes=256), \
             CommBufferSpec(name=\"signal\", dtype=\"opaque\", count=8, nbytes=32)]):\n    raise ValueError(\"leased\")",
        ),
        ("another request", "_domain_provider(name=\"comm_d0\", workers=[0], window_size=64)"),
        ("after", "orch.submit_sub(sub_ids[\"report\"], _marks(orch, tensors))\nraise ValueError(\"too late\")"),
    ]);
    add_marks(program.path());
    let backend = backend(options());
    if matches!(backend.capabilities().retention, Retention::Unsupported { .. }) {
        println!("skipped: no retention");
        return backend.close().unwrap();
    }
    // Both name their first domain `comm_d0`, and both have a sub-worker `tally`.
    let programs = [Generated::reduce(program.path()), Generated::mixed()];
    let worker = PreparedWorker::prepare(&programs, &Options::persistent(), backend).unwrap();
    let [reduce, mixed] = [0, 1].map(|index| worker.id_of(&programs[index]).unwrap());
    let rows = Rows::new(&worker);
    let both = |step: i32| {
        rows.write_x(step);
        worker.run(reduce, &rows.reduce(step as u64)).unwrap();
        let sums: Vec<i32> = (0..64).map(|i| 2 * (i * 3 + step * 1000) + 192).collect();
        assert_eq!(Rows::words(&rows.y, 64), sums);
        worker.run(mixed, &rows.mixed()).unwrap();
        rows.check_mixed(step);
    };
    both(1);
    for (case, says) in [(100, "nothing"), (101, "leased"), (102, "comm_d0")] {
        let error = worker.run(reduce, &rows.reduce(case)).unwrap_err();
        assert!(error.to_string().contains(says) && !error.must_reprepare(), "{error:?}");
        both(case as i32 - 90);
    }
    let error = worker.run(reduce, &rows.reduce(103)).unwrap_err();
    assert!(error.to_string().contains("too late"), "{error:?}");
    let poisoned = worker.run(mixed, &rows.mixed()).unwrap_err();
    assert!(poisoned.must_reprepare() && format!("{poisoned:?}").contains("too late"), "{poisoned:?}");
    worker.close().unwrap();
});

/// Puts `cases` before the program's own first line, one per step from 100 on, each the body of a function of the
/// entry's parameters. A case that returns True ends the entry.
fn with_cases(cases: &[(&str, &str)]) -> tempfile::TempDir {
    changed(|text| {
        let mut functions = String::from("_kept = []\n\n\n");
        for (number, (_, body)) in cases.iter().enumerate() {
            functions.push_str(&format!(
                "def _case_{number}(orch, config, tensors, callables, sub_ids, _keep, world_size, _domain_provider):\n"
            ));
            for line in body.lines() {
                functions.push_str(&format!("    {line}\n"));
            }
            functions.push_str("\n\n");
        }
        let choose = format!(
            "{STEP}    if step >= 100:\n        case = globals()[f\"_case_{{step - 100}}\"]\n        if case(orch, \
             config, tensors, callables, sub_ids, _keep, world_size, _domain_provider):\n            return\n"
        );
        let text = text.replacen("def host_orch(", &format!("{functions}def host_orch("), 1);
        assert!(text.contains(STEP));
        text.replacen(STEP, &choose, 1)
    })
}

/// Adds a function `_marks(orch, tensors)` that makes the arguments of a task over the marks.
fn add_marks(program: &Path) {
    let path = program.join("orchestration").join("host_orch.py");
    let marks = "def _marks(orch, tensors):\n    ta = TaskArgs()\n    \
                 ta.add_tensor(make_tensor_arg(orch._worker, tensors[\"marks\"]), TensorArgType.INOUT)\n    return \
                 ta\n";
    fs::write(&path, format!("{}\n\n{marks}", fs::read_to_string(&path).unwrap())).unwrap();
}

/// Runs the program with step `100 + case`, then as it is, which must be right.
fn case(bench: &Bench, run: &mut u64, number: usize, mode: Mode) -> pto_tests::generated::Called {
    *run += 1;
    let called = bench.call_with(*run, mode, &bench.args(100 + number as u64), &|_| (), &|| ());
    if called.submitted.is_ok() {
        let (_, outcome) = bench.ends.recv().unwrap();
        assert_eq!(outcome, RunOutcome::success());
    }
    *run += 1;
    let _ = bench.right(*run, Mode::OfTheRun);
    called
}

alone!(a_failed_call_of_an_entry_leaves_the_worker_as_it_was, || {
    // What the error says, whether the device was reached, and what the entry does.
    let cases = [
        ("KeyError: 'nothing'", "tensors[\"nothing\"]"),
        ("SystemExit: 3", "import sys\nsys.exit(3)"),
        ("KeyboardInterrupt", "raise KeyboardInterrupt"),
        ("not contiguous", "make_tensor_arg(orch._worker, tensors[\"x\"][0:2, 0:32])"),
        ("has no elements", "make_tensor_arg(orch._worker, tensors[\"x\"][1:1])"),
        ("of shape (3,)", "tensors[\"x\"][0:1, 0:2] = tensors[\"y\"][0, 0:3]"),
        (
            "takes 2 tensors at least, given 1",
            "ta = TaskArgs()\nta.add_tensor(make_tensor_arg(orch._worker, tensors[\"x\"]), TensorArgType.INPUT)\n\
             orch.submit_next_level(callables[\"allreduce\"], ta, config, worker=0)",
        ),
        (
            "a chip task takes 256",
            "ta = TaskArgs()\nfor _ in range(300):\n    ta.add_tensor(make_tensor_arg(orch._worker, tensors[\"x\"]), \
             TensorArgType.INPUT)\norch.submit_next_level(callables[\"allreduce\"], ta, config, worker=0)",
        ),
        (
            "bytes; at most",
            "ta = TaskArgs()\nfor _ in range(1000):\n    ta.add_tensor(make_tensor_arg(orch._worker, tensors[\"x\"]), \
             TensorArgType.INPUT)\norch.submit_sub(sub_ids[\"tally\"], ta)",
        ),
        (
            "given to, or from a thread",
            "import threading\nraised = []\ndef call():\n    try:\n        \
             orch.submit_sub(sub_ids[\"tally\"])\n    except RuntimeError as e:\n        raised.append(e)\nthread = \
             threading.Thread(target=call)\nthread.start()\nthread.join()\nraise raised[0]",
        ),
        ("allocate_global_domain", "orch.allocate_global_domain(name=\"d\", members=[(0, 0)], window_size=64)"),
        (
            "given to, or from a thread",
            "import threading\nraised = []\ndef call():\n    try:\n        \
             orch._worker.create_buffer(64)\n    except RuntimeError as e:\n        raised.append(e)\nthread = \
             threading.Thread(target=call)\nthread.start()\nthread.join()\nraise raised[0]",
        ),
        ("run was called inside a graph", "orch._worker.run(lambda *_: None)"),
        ("release_buffer was called inside", "orch._worker.release_buffer(None)"),
        ("scope_end without", "orch.scope_end()"),
        ("scopes nest at most", "while True:\n    orch.scope_begin()"),
        ("no '_o'", "orch._o.submit_sub"),
        ("outside [0, 2)", "orch.allocate_domain(name=\"d\", workers=[5], window_size=64)"),
    ];
    let program = with_cases(&cases);
    let bench = Bench::new(program.path());
    let mut run = 0;
    for (number, (says, _)) in cases.iter().enumerate() {
        let called = case(&bench, &mut run, number, Mode::OfTheRun);
        let error = called.failure();
        let failure = error.runtime().unwrap();
        let said = format!("{}: {}", failure.type_name, failure.message);
        assert!(said.contains(says), "{says}: {error:?}");
        let traceback = failure.traceback.as_ref().unwrap();
        assert!(traceback.contains("host_orch.py"), "{says}: {traceback}");
        let reached = *says == "outside [0, 2)";
        assert_eq!(called.opened.is_empty(), !reached, "{says}: {called:?}");
        assert_eq!(failure.effect == Effect::None, !reached, "{says}: {failure:?}");
    }
    bench.backend.close().unwrap();
});

alone!(what_an_entry_may_do_beyond_what_is_generated, || {
    let cases = [
        ("nothing", "return True"),
        (
            "a domain of its own beside the provider's",
            "with orch.allocate_domain(name=\"own\", workers=[1, 0], window_size=64) as own:\n    assert \
             own[0].domain_rank == 1\norch.release_domain(own)",
        ),
        ("scopes left open", "with orch.scope() as o:\n    assert o is orch\norch.scope_begin()"),
        (
            "numbers and their parts",
            "tensors[\"x\"][0, 0] = 7\nassert int(tensors[\"x\"][0, 0]) == 7 and \
             tensors[\"x\"][0:1, 0:2].tolist()[0][0] == 7\ntensors[\"x\"][0:2, 0:8].fill_(1)\nassert \
             tensors[\"x\"][0:2, 0:8].contiguous().shape == (2, 8)\nassert len(tensors[\"x\"]) == \
             tensors[\"x\"].size(0) == 2 and tensors[\"x\"].reshape(-1).numel() == 128\nreturn True",
        ),
        (
            "tensors of its own, which children must see",
            "tensors[\"scratch\"] = torch.zeros((8,), dtype=torch.int32)\ntensors[\"scratch\"][0:8] = \
             tensors[\"x\"][1, 8:16]\n_ta = TaskArgs()\n_ta.add_tensor(make_tensor_arg(orch._worker, \
             tensors[\"scratch\"]), TensorArgType.INPUT)\n_ta.add_tensor(make_tensor_arg(orch._worker, \
             tensors[\"marks\"]), TensorArgType.INOUT)\norch.submit_sub(sub_ids[\"tally\"], _ta)\nreturn True",
        ),
        (
            "keeps everything",
            "_kept.extend([orch, _domain_provider, orch._worker, tensors[\"x\"]])\n_kept.append(\
             _domain_provider(name=\"comm_d9\", workers=[0], window_size=64))\n_kept[-1][0].device_ctx\nreturn True",
        ),
        (
            "uses it later",
            "def refused(use, says):\n    try:\n        use()\n    except RuntimeError as e:\n        assert says in \
             str(e), e\n    else:\n        raise AssertionError(says)\nold, provider, worker, x, lease = _kept\n\
             for use in (lambda: old.submit_sub(sub_ids[\"tally\"]), lambda: old.scope_begin(), lambda: \
             old.allocate_domain(name=\"d\", workers=[0], window_size=64), lambda: provider(name=\"d\", workers=[0], \
             window_size=64), lambda: worker.create_buffer(64), lambda: lease[0], lambda: lease.release(), lambda: \
             lease.workers):\n    refused(use, \"outside the entry\")\nfor use in (lambda: x[0, 0].item(), lambda: \
             x.fill_(0), x.data_ptr):\n    refused(use, \"after the call\")\nreturn True",
        ),
    ];
    let program = with_cases(&cases);
    let bench = Bench::new(program.path());
    let mut run = 0;
    for (number, (what, _)) in cases.iter().enumerate() {
        let called = case(&bench, &mut run, number, Mode::OfTheRun);
        assert!(called.entry.is_ok() && called.submitted.is_ok(), "{what}: {called:?}");
    }
    bench.backend.close().unwrap();
});

alone!(a_lost_call_fails_the_entry_that_swallows_it, || {
    let cases = [(
        "control after a task",
        "orch.submit_sub(sub_ids[\"report\"], _marks(orch, tensors))\ntry:\n    orch.allocate_domain(name=\"late\", \
         workers=[0], window_size=64)\nexcept RuntimeError:\n    pass\nreturn True",
    )];
    let program = with_cases(&cases);
    add_marks(program.path());
    let bench = Bench::new(program.path());
    let mut run = 0;
    let called = case(&bench, &mut run, 0, Mode::OfTheRun);
    let failure = called.failure().runtime().unwrap();
    assert!(failure.message.contains("direct device control cannot follow"), "{failure:?}");
    assert_eq!((failure.effect, &*called.opened), (Effect::Unknown, &[true][..]));
    bench.backend.close().unwrap();
});

alone!(an_entry_that_asks_for_retention_itself_gets_it_from_the_host, || {
    let cases = [(
        "retains",
        "handle = orch.get_or_allocate_domain(name=\"kept\", workers=[0], window_size=64, retain_after_run=True)\n\
         _kept.append(handle[0].device_ctx)\nhandle.release()\nassert len(set(_kept)) == 1, _kept\nreturn True",
    )];
    let program = with_cases(&cases);
    let bench = Bench::new(program.path());
    if bench.backend.capabilities().retention != Retention::Public {
        println!("skipped: no such call");
        return bench.backend.close().unwrap();
    }
    let mut run = 0;
    let ids: Vec<_> = (0..2)
        .map(|_| {
            let called = case(&bench, &mut run, 0, Mode::Retained);
            let [(name, request, id)] = &called.domains[..] else { panic!("{called:?}") };
            assert_eq!((&**name, request.window_bytes), ("kept", 64));
            id.unwrap()
        })
        .collect();
    assert_eq!(ids[0], ids[1]);
    bench.backend.close().unwrap();
});

alone!(a_stacked_argument_is_taken_in_whole_parts, || {
    let bench = Bench::new(&generated().join("reduce"));
    let sums = bench.write_x(4);
    let host = bench.backend.create_buffer(256).unwrap();
    let mut parts = Vec::new();
    for chip in 0..2 {
        let row = bench.words(bench.x, 128)[chip * 64..][..64].to_vec();
        let bytes: Vec<u8> = row.iter().flat_map(|n| n.to_le_bytes()).collect();
        bench.backend.write_buffer(host, 0, &bytes).unwrap();
        let part = bench.backend.alloc(ChipId(chip as u32), 256).unwrap();
        let copy = CopyTo { dst: DevicePlace::Resident(part), src: CopySource::Host(host), nbytes: 256 };
        bench.backend.copy_to(&copy).unwrap();
        parts.push(TensorArg {
            place: TensorPlace::Resident(part),
            shape: Shape::new(&[64]).unwrap(),
            dtype: DataType::Int32,
            byte_offset: 0,
            access: Access::Input,
        });
    }
    let mut args = bench.args(1);
    args[0].value = EntryValue::Stacked(parts);
    let called = bench.call_with(1, Mode::OfTheRun, &args, &|_| (), &|| ());
    assert!(called.submitted.is_ok() && called.entry.is_ok(), "{called:?}");
    bench.ended(1);
    let y = bench.words(bench.y, 128);
    assert_eq!((&y[..64], &y[64..]), (&*sums, &*sums));
    bench.backend.close().unwrap();
});

alone!(programs_that_cannot_be_entries_are_refused_with_what_is_wrong, || {
    let probe = backend(options());
    let marker = "host_orch._pypto_distributed_entry = True";
    let replaced = |by: &str| {
        let by = by.to_owned();
        changed(move |text| {
            assert!(text.contains(marker));
            text.replace(marker, &by)
        })
    };
    // Misuse: the directory is to be made anew. Otherwise an error of its own code, with its traceback.
    for (by, family, says) in [
        ("async def f(*a, **k): pass\nf._pypto_distributed_entry = True", Family::Misuse, "would not run"),
        ("def f(*a, **k): yield\nf._pypto_distributed_entry = True", Family::Misuse, "would not run"),
        ("class F:\n    _pypto_distributed_entry = True", Family::Misuse, "exactly one function"),
        ("def f(orch): pass\nf._pypto_distributed_entry = True", Family::Misuse, "cannot be called as an entry"),
        ("def f(:", Family::Backend, "SyntaxError"),
        ("raise SystemExit(7)", Family::Backend, "SystemExit"),
        ("raise KeyboardInterrupt", Family::Backend, "KeyboardInterrupt"),
        ("from .helper import nothing", Family::Backend, "helper"),
        ("import simpler.no_such_module", Family::Backend, "no_such_module"),
    ] {
        let copy = replaced(by);
        let error = register(&probe, copy.path()).unwrap_err();
        let text = format!("{} {error}", error.runtime().map_or("", |f| &f.type_name));
        assert!(error.family() == family && text.contains(says), "{by}: {error:?}");
        if family == Family::Backend {
            let traceback = error.runtime().unwrap().traceback.clone().unwrap();
            assert!(traceback.contains("host_orch.py"), "{by}: {traceback}");
        }
    }
    for (body, says) in [
        ("raise OSError(\"no room\")", "no room"),
        ("tensors[\"x\"] = torch.zeros((8,), dtype=\"no type\")", ""),
        ("import sys\n    sys.exit(9)", "9"),
    ] {
        let body = body.to_owned();
        let copy = changed(move |text| {
            let head = "def _alloc_intermediates(tensors, world_size=1):\n";
            assert!(text.contains(head));
            text.replace(head, &format!("{head}    {body}\n"))
        });
        let error = register(&probe, copy.path()).unwrap_err();
        let traceback = error.runtime().unwrap().traceback.clone().unwrap();
        assert!(traceback.contains("_alloc_intermediates") && error.to_string().contains(says), "{error:?}");
    }
    // Sub-workers and chip programs that are broken.
    let broken = |file: &str, text: Option<&str>| {
        let copy = changed(|text| text);
        let path = copy.path().join(file);
        match text {
            Some(text) => fs::write(path, text).unwrap(),
            None => fs::remove_file(path).unwrap(),
        }
        copy
    };
    for (file, text, family, says) in [
        ("sub_workers/tally.py", Some("def tally(:"), Family::Backend, "tally.py"),
        ("sub_workers/tally.py", Some("tally = 5"), Family::Misuse, "must define a function"),
        ("sub_workers/tally.py", Some("import no_such_package"), Family::Backend, "no_such_package"),
        ("sub_workers/__required__.json", Some("[\"report\", \"absent\"]"), Family::Misuse, "absent"),
        ("distributed_meta.json", Some("{"), Family::Misuse, "distributed_meta.json"),
        (
            "distributed_meta.json",
            Some("{\"distributed_config\": {\"num_sub_workers\": -1}}"),
            Family::Misuse,
            "-1 sub-workers",
        ),
        (
            "distributed_meta.json",
            Some("{\"distributed_config\": {\"aicpu_thread_num\": 1}}"),
            Family::Misuse,
            "1 scheduler threads",
        ),
        ("next_levels/fill/kernel_config.py", Some("KERNELS = ["), Family::Backend, "kernel_config.py"),
    ] {
        let copy = broken(file, text);
        let error = register(&probe, copy.path()).unwrap_err();
        let text = format!("{error} {}", error.runtime().and_then(|f| f.traceback.clone()).unwrap_or_default());
        assert!(error.family() == family && text.contains(says), "{file}: {error:?}");
    }
    let copy = broken("next_levels/fill/kernel_config.py", None);
    let path = copy.path().join("next_levels").join("fill").join("kernel_config.py");
    let config = fs::read_to_string(generated().join("reduce/next_levels/fill/kernel_config.py")).unwrap();
    fs::write(path, config.replace("pto_store.cpp", "absent.cpp")).unwrap();
    let error = register(&probe, copy.path()).unwrap_err();
    assert!(error.family() == Family::Backend && error.to_string().contains("absent.cpp"), "{error:?}");
    // Nothing of this has spoiled the backend.
    register(&probe, &generated().join("reduce")).unwrap();
    probe.close().unwrap();
});

alone!(odd_but_right_directories_run, || {
    // A decorated entry with defaults; imported functions that are marked elsewhere do not count; spaces and letters
    // beyond ASCII in the path; neighbours imported; a sub-worker that only the manifest names.
    let copy = changed(|text| {
        let text = text.replace("def host_orch(", "def logged(f):\n    import functools\n\n    @functools.wraps(f)\n    \
            def call(*args, **kwargs):\n        return f(*args, **kwargs)\n\n    return call\n\n\n@logged\ndef host_orch(");
        let text = text.replace("tensors[\"scratch\"])", "tensors[SCRATCH])");
        let text = text.replacen(STEP, &format!("{STEP}    assert config.aicpu_thread_num == 3\n"), 1);
        format!("from .names import SCRATCH, other\n{text}")
    });
    fs::write(
        copy.path().join("orchestration").join("names.py"),
        "SCRATCH = \"scratch\"\n\n\ndef other():\n    pass\n\n\nother._pypto_distributed_entry = True\n",
    )
    .unwrap();
    let subs = copy.path().join("sub_workers");
    let tally = fs::read_to_string(subs.join("tally.py")).unwrap();
    fs::write(subs.join("tally.py"), format!("from .zebra import added\n{tally}").replace("sum(", "added("))
        .unwrap();
    fs::write(subs.join("zebra.py"), "def added(numbers):\n    return sum(numbers)\n").unwrap();
    fs::write(subs.join("__init__.py"), "").unwrap();
    fs::remove_file(subs.join("report.py")).unwrap();
    fs::write(
        copy.path().join("distributed_meta.json"),
        "{\"distributed_config\": {\"num_sub_workers\": 3, \"aicpu_thread_num\": 3}}",
    )
    .unwrap();
    let home = tempfile::tempdir().unwrap();
    let odd = home.path().join("größe und 名前");
    pto_tests::generated::copy_directory(copy.path(), &odd);
    // The other program has a neighbour of the same name, callables of the same names, and other contents.
    let twin = changed(|text| text);
    let subs = twin.path().join("sub_workers");
    fs::write(subs.join("zebra.py"), "def added(numbers):\n    return -1\n").unwrap();
    fs::write(subs.join("tally.py"), format!("from .zebra import added\n{tally}").replace("sum(", "added("))
        .unwrap();
    let sys_path = || {
        pyo3::Python::attach(|py| {
            use pyo3::types::PyAnyMethods;
            py.import("sys").unwrap().getattr("path").unwrap().extract::<Vec<String>>().unwrap()
        })
    };
    let slash = format!("{}/", twin.path().display());
    let bench = Bench::with(options(), &[&odd, Path::new(&slash)]);
    let before = sys_path();
    for run in 1..=2 {
        let _ = bench.right(run, Mode::OfTheRun);
        assert_eq!(bench.words(bench.marks, 2)[1], run as i32, "bound although it has no file");
    }
    assert_eq!(sys_path(), before);
    bench.backend.close().unwrap();
});

alone!(a_relative_directory_is_that_of_the_moment_of_loading, || {
    let home = tempfile::tempdir().unwrap();
    pto_tests::generated::copy_directory(&generated().join("reduce"), &home.path().join("program"));
    std::env::set_current_dir(home.path()).unwrap();
    let bench = Bench::with(options(), &[Path::new("program")]);
    std::env::set_current_dir("/").unwrap();
    let _ = bench.right(1, Mode::OfTheRun);
    bench.backend.close().unwrap();
});

alone!(a_provider_taken_by_name_only_counts, || {
    let any = changed(|text| {
        text.replace("world_size, _domain_provider=None)", "world_size, **more)")
            .replace("(_domain_provider or orch.allocate_domain)", "orch.allocate_domain")
    });
    let probe = backend(options());
    assert!(!register(&probe, any.path()).unwrap().takes_domains);
    probe.close().unwrap();
    let bench = Bench::new(any.path());
    let called = bench.right(1, Mode::OfTheRun);
    assert!(called.domains.is_empty(), "{called:?}");
    bench.backend.close().unwrap();
});

alone!(an_entry_gets_no_windows_for_which_there_is_no_room, || {
    let domain = |call: &str, size: &str| {
        format!("orch.{call}(name=\"huge\", workers=[0, 1], window_size={size}, buffers=[])")
    };
    let program = with_cases(&[
        ("own", &domain("allocate_domain", "1 << 42")),
        ("kept", &domain("get_or_allocate_domain", "1 << 42")),
        ("caught", &format!("try:\n    {}\nexcept MemoryError:\n    pass", domain("allocate_domain", "1 << 62"))),
    ]);
    let bench = Bench::with(options(), &[program.path()]);
    let public = bench.backend.capabilities().retention == Retention::Public;
    let mut run = 0;
    for number in if public { 0..2 } else { 0..1 } {
        let called = case(&bench, &mut run, number, Mode::OfTheRun);
        let failure = called.failure();
        assert!(failure.to_string().contains("room for") && !failure.must_reprepare(), "{failure:?}");
    }
    let called = case(&bench, &mut run, 2, Mode::OfTheRun);
    assert!(called.entry.is_ok(), "{called:?}");
    bench.backend.close().unwrap();
});

struct Empty;

impl GraphBuilder for Empty {
    fn build(&mut self, _: &dyn Orchestrator) -> Result<(), BuildFailed> {
        Ok(())
    }
}

alone!(a_domain_that_an_entry_keeps_by_itself_does_not_hold_up_the_end_behind_a_dead_chip, || {
    let directory = tempfile::tempdir().unwrap();
    let text = "import os\n\n\ndef install():\n    from simpler import standin\n\n    standin.public()\n    \
                os.environ[\"PTO_STANDIN_DEAD_PEER_S\"] = \"300\"\n";
    fs::write(directory.path().join("pto_patient.py"), text).unwrap();
    let mut options = options();
    options.python_path.push(directory.path().into());
    if simpler::Runtime::selected() == simpler::Runtime::StandIn {
        options.prelude = Some("pto_patient:install".to_owned());
    }
    let program = with_cases(&[(
        "kept",
        "orch.get_or_allocate_domain(name=\"own\", workers=[0, 1], window_size=64, retain_after_run=True)\nreturn True",
    )]);
    let bench = Bench::with(options, &[program.path()]);
    if bench.backend.capabilities().retention != Retention::Public {
        println!("skipped: no public retention");
        return bench.backend.close().unwrap();
    }
    let called = bench.call_with(1, Mode::OfTheRun, &bench.args(100), &|_| (), &|| ());
    assert!(called.submitted.is_ok() && called.entry.is_ok(), "{called:?}");
    bench.ended(1);
    let before = std::time::Instant::now();
    let victim = i32::try_from(bench.backend.chip_processes()[1].1).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(victim), nix::sys::signal::Signal::SIGKILL).unwrap();
    // Until its death has been noticed.
    let mut run = 1;
    let mut admitted = || {
        run += 1;
        bench.backend.submit(RunId(run), &CallConfig::new(), &mut Empty).is_ok()
    };
    while admitted() {}
    println!("close: {:?}", bench.backend.close());
    // Far from what is right and from what a dead peer costs.
    assert!(before.elapsed() < std::time::Duration::from_secs(60));
    bench.backend.close().unwrap();
});
