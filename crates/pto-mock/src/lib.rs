//! Emulator backend, fault schedules, journal, mocks and conformance suite for pto.

pub mod conformance;
pub mod fixtures;
pub mod kernels;
