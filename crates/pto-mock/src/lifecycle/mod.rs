//! The lifecycle suite: a reference model, a state machine test and an oracle (feature `lifecycle`).
//!
//! # What it does
//!
//! Prepares random workers (one to three chips, one or two programs with one or two domains each, ordinary or
//! persistent, reset on or off, depth 1 or 2, whole-buffer, range or fill zeroing, exact or padded mappings, dirty
//! memory), applies random operations (submit, try_submit, wait, poll, drop, complete, fail, close in every form,
//! injected faults, panicking and failing builders, changed requests) and compares every answer with a model. After
//! each step the [`oracle`] asserts the invariants I1-I14 of the design from the emulator's journal and memory.
//!
//! # Your own program
//!
//! The state machine drives a program of its own, which touches everything that it leases. A program of yours goes
//! through [`exercise`]: implement [`LifecycleProgram`] for it, take random [`plans`], and run each on a fresh backend
//! of any kind. `examples/downstream-tests` is a whole project that does this.
//!
//! # How to run it
//!
//! ```no_run
//! use proptest_state_machine::{ReferenceStateMachine, StateMachineTest};
//! use pto_mock::lifecycle::{Lifecycle, Model, config};
//!
//! proptest::proptest!(config(256), |((world, transitions, seen) in Model::sequential_strategy(1..30))| {
//!     Lifecycle::test_sequential(config(256), world, transitions, seen);
//! });
//! ```
//!
//! `PTO_PROPTEST_CASES` scales the number of cases.

mod guest;
mod machine;
mod model;
pub mod oracle;
mod shape;
mod watch;

pub use guest::{LifecycleProgram, Plan, Step, exercise, plans};
pub use machine::{Lifecycle, System};
pub use model::{Expect, FaultPoint, Flight, Model, Retained, Shown, Status, Transition, World};
pub use shape::{Act, Shape, Zeroing, shapes};

/// A configuration with as many cases as `PTO_PROPTEST_CASES` says, or `default` where it says nothing.
#[must_use]
pub fn config(default: u32) -> proptest::test_runner::Config {
    let cases = std::env::var("PTO_PROPTEST_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    proptest::test_runner::Config {
        cases,
        // Operations that make no sense in a state are rejected one by one; their number grows with the cases.
        max_local_rejects: u32::MAX,
        ..proptest::test_runner::Config::default()
    }
}
