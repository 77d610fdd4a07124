//! The conformance suite on the backend that `PTO_BACKEND` names.

pto_mock::conformance_tests!(pto_tests::backend::chosen().map_err(|error| error.to_string()).unwrap());
