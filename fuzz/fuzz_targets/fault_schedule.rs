//! See `pto_tests::fuzz::fault_schedule`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pto_tests::fuzz::fault_schedule(bytes));
