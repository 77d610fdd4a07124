//! The conformance suite on the backend that `PTO_BACKEND` names.

use pto_mock::conformance::BackendFactory;

fn chosen() -> Box<dyn BackendFactory> {
    pto_tests::backend::chosen().unwrap_or_else(|error| panic!("{error}"))
}

pto_mock::conformance_tests!(chosen());
