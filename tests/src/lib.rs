//! What the cross-crate suites share: fixtures, gates, and checks that nothing is left behind.
//!
//! * [`scenario`]: the programs that the scenarios name (F0, F1, F2, F3, H), and programs over closures.
//! * [`gate`]: how a test holds a thread or a kernel open, and how a hanging test ends.
//! * [`shm`]: a private shared-memory directory, and the check that it is empty and unmapped.
//!
//! The suites themselves are in `tests/`, one file per area; each test carries the id of its scenario. They panic and
//! unwrap as tests do.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

pub mod gate;
pub mod scenario;
pub mod shm;
