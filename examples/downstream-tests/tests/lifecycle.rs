//! The program under pto's life-cycle suite, on the backend that `PTO_BACKEND` names.

use std::sync::Arc;

use downstream_tests::Counter;
use pto_dispatch::{Args, Error, PreparedWorker, Program};
use pto_mock::lifecycle::{LifecycleProgram, config, exercise, plans};
use pto_mock::{Emulator, Journal, kernels};
use pto_simpler_sys::{Backend, DomainRequest};

/// A fresh backend, with its own journal where it keeps one.
fn backend() -> (Arc<dyn Backend>, Option<Journal>) {
    match std::env::var("PTO_BACKEND").as_deref() {
        Err(_) | Ok("" | "emulator") => {
            let emulator = kernels::install(Emulator::builder().chips(2)).build().unwrap();
            (emulator.clone(), Some(emulator.journal()))
        }
        #[cfg(feature = "simpler")]
        Ok("simpler") => (simpler::backend(), None),
        // Yours: add a line for each backend that the program is meant for.
        Ok(other) => panic!("PTO_BACKEND is {other:?}; permitted: emulator, and simpler with --features simpler"),
    }
}

/// The real runtime. The emulator knows the program's kernels by name; here the names get their compiled files.
#[cfg(feature = "simpler")]
mod simpler {
    use std::path::PathBuf;
    use std::sync::Arc;

    use pto_simpler_sys::python::{SimplerBackend, SimplerOptions};
    use pto_simpler_sys::{Access, Backend, CallableSource, ChipArtefact, KernelArtefact};

    pub(super) fn backend() -> Arc<dyn Backend> {
        let kernels = std::env::var_os("PTO_KERNELS").expect("PTO_KERNELS names the directory of compiled kernels");
        let kernels = PathBuf::from(kernels);
        let mut options = SimplerOptions::from_environment(0..2);
        for (name, signature) in
            [("pto_add", vec![Access::InOut]), ("pto_copy", vec![Access::Input, Access::OutputExisting])]
        {
            let kernel = KernelArtefact {
                function_id: 0,
                binary: kernels.join(format!("{name}.kernel")),
                core: "aiv".into(),
                signature,
            };
            let artefact = ChipArtefact {
                orchestration: kernels.join("orchestration.so"),
                function: name.into(),
                config_function: Some(format!("{name}_config").into()),
                kernels: vec![kernel],
            };
            options.callables.insert(name.into(), CallableSource::Artefact(artefact));
        }
        Arc::new(SimplerBackend::new(options).unwrap())
    }
}

/// Makes a backend once before the plans, so that one that cannot be had is not taken for a failing plan.
fn settings() -> proptest::test_runner::Config {
    drop(backend());
    config(64)
}

struct Guest;

impl LifecycleProgram for Guest {
    fn program(&self) -> Arc<dyn Program> {
        Arc::new(Counter::default())
    }

    fn request(&self, domain: &str) -> Option<DomainRequest> {
        (domain == "counters").then(Counter::request)
    }

    fn args(&self, worker: &PreparedWorker) -> Result<Args, Error> {
        Ok(Args::new().host(&worker.create_buffer(4)?).host(&worker.create_buffer(4)?))
    }

    fn verify(&self, args: &Args, fresh: bool) -> Result<(), String> {
        for index in 0..2 {
            let mut word = [0; 4];
            args.host_at(index).and_then(|out| out.read(0, &mut word)).map_err(|error| error.to_string())?;
            let count = i32::from_ne_bytes(word);
            if count < 1 || (fresh && count != 1) {
                return Err(format!("chip {index} has counted {count}"));
            }
        }
        Ok(())
    }
}

proptest::proptest! {
    #![proptest_config(settings())]

    #[test]
    fn the_counter_keeps_every_rule_whatever_is_done_to_it(plan in plans(2, 24)) {
        let (backend, journal) = backend();
        exercise(&Guest, backend, journal.as_ref(), &plan).map_err(proptest::test_runner::TestCaseError::fail)?;
    }
}
