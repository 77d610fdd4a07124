//! Generated programs as host entries of the Simpler binding.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};

use pto_mock::conformance::TestPath;
use pto_simpler_sys::{Backend, BuildFailed, Call, CallableSource, CallbackError, Family, Retention, SubmitError};
use pto_tests::generated::{Bench, Ends, Mode, backend, changed, generated, options, register};
use pto_tests::simpler;
use pyo3::prelude::*;

macro_rules! alone {
    ($name:ident, $body:expr) => {
        #[test]
        fn $name() {
            simpler::alone(TestPath::new(module_path!(), stringify!($name)), $body);
        }
    };
}

alone!(a_generated_program_runs_over_a_retained_domain, || {
    let bench = Bench::new(&generated().join("reduce"));
    if matches!(bench.backend.capabilities().retention, Retention::Unsupported { .. }) {
        println!("skipped: no retention");
        return bench.backend.close().unwrap();
    }
    let mut ids = Vec::new();
    for run in 1..=3 {
        let called = bench.right(run, Mode::Retained);
        assert_eq!(called.opened, [true]);
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
    let called = bench.call(1, Mode::OfTheRun);
    assert!(called.submitted.is_ok() && called.entry.is_ok(), "{called:?}");
    bench.ended(1);
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
    let _ = bench.write_x(1);
    let seen = Cell::new(true);
    let called = bench.call_with(1, Mode::OfTheRun, &bench.args(1), &|_| (), &|| seen.set(gone()));
    assert!(called.submitted.is_ok(), "{called:?}");
    assert!(!seen.get(), "freed before the run was even accepted");
    bench.ended(1);
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
    let ids: Vec<_> = (1..=2).map(|run| bench.right(run, Mode::OfTheRun).domains[0].2).collect();
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
        let called = bench.right(run, Mode::OfTheRun);
        assert!(called.domains.is_empty() && called.opened == [false, true], "{called:?}");
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
    let called = bench.call(1, Mode::OfTheRun);
    assert_eq!(called.submitted, Err(SubmitError::Build(BuildFailed)));
    let Err(CallbackError::Backend(error)) = called.entry else { panic!("{called:?}") };
    let failure = error.runtime().unwrap();
    assert_eq!((failure.call, &*failure.type_name, failure.fatal), (Call::RunEntry, "ZeroDivisionError", false));
    let traceback = failure.traceback.as_ref().unwrap();
    assert!(traceback.contains("host_orch") && traceback.contains("1 // 0"), "{traceback}");
    // It had not reached the device.
    assert_eq!((&*called.opened, failure.effect), (&[][..], pto_simpler_sys::Effect::None));
    bench.backend.close().unwrap();
});

alone!(a_refusal_of_the_host_counts_although_the_program_swallows_it, || {
    let swallows = changed(|text| {
        text.replace("    step = tensors[\"step\"]\n", "    try:\n        _domain_provider(name='d', workers=[0], window_size=64, buffers=[])\n    except Exception:\n        return\n    step = tensors[\"step\"]\n")
    });
    let bench = Bench::new(swallows.path());
    let called = bench.call(1, Mode::Refused);
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
