//! See `pto_tests::fuzz::request_plan`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pto_tests::fuzz::request_plan(bytes));
