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
        // Yours: add a line for each backend that the program is meant for.
        Ok(other) => panic!("PTO_BACKEND is {other:?}; permitted is emulator"),
    }
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
    #![proptest_config(config(64))]

    #[test]
    fn the_counter_keeps_every_rule_whatever_is_done_to_it(plan in plans(2, 24)) {
        let (backend, journal) = backend();
        exercise(&Guest, backend, journal.as_ref(), &plan).map_err(proptest::test_runner::TestCaseError::fail)?;
    }
}
