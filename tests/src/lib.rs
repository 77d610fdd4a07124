//! What the cross-crate suites share: fixtures, gates, and checks that nothing is left behind.
//!
//! * [`scenario`]: the programs that the scenarios name (F0, F1, F2, F3, H), and programs over closures.
//! * [`backend`]: backends by name. Suites that make sense on every backend take theirs from [`backend::chosen`],
//!   which reads the environment variable `PTO_BACKEND` (the emulator where it is not set).
//! * [`rig`]: a prepared worker on the backend under test, and shorthands for its journal.
//! * [`spy`]: a wrapper that counts calls of any backend, and misbehaves where told to.
//! * [`gate`]: how a test holds a thread or a kernel open, and how a hanging test ends.
//! * [`parked`]: threads that a test wants to see blocked before it goes on.
//! * [`shm`]: a private shared-memory directory, and the check that it is empty and unmapped.
//! * [`fuzz`]: the bodies of the fuzz targets, which a test replays on the committed inputs.
//! * `simpler` (feature `simpler`): the Simpler binding as a backend under test.
//! * `generated` (feature `simpler`): generated programs as host entries of it.
//!
//! The suites themselves are in `tests/`, one file per area; each test carries the id of its scenario. They panic and
//! unwrap as tests do.
//!
//! ```
//! let factory = pto_tests::backend::named("emulator").unwrap();
//! assert_eq!(factory.name(), "emulator");
//! let error = pto_tests::backend::named("abacus").err().unwrap();
//! assert!(error.to_string().contains("\"abacus\"") && error.to_string().contains("emulator"));
//! ```
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

pub mod backend;
pub mod everywhere;
pub mod fuzz;
pub mod gate;
#[cfg(feature = "simpler")]
pub mod generated;
pub mod parked;
pub mod rig;
pub mod scenario;
pub mod shm;
#[cfg(feature = "simpler")]
pub mod simpler;
pub mod spy;

/// Compiles and runs the example in the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
#[derive(Debug)]
pub struct Readme;

/// Compiles and runs the examples in the guide.
#[cfg(doctest)]
#[doc = include_str!("../../docs/guide.md")]
#[derive(Debug)]
pub struct Guide;
