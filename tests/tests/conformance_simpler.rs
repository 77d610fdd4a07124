//! The conformance suite on the Simpler binding, over the runtime that the environment names (`pto_tests::simpler`).

use pto_tests::simpler::SimplerFactory;

pto_mock::conformance_tests!(SimplerFactory);
