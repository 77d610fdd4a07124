//! See `pto_tests::fuzz::fixtures`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pto_tests::fuzz::fixtures(bytes));
