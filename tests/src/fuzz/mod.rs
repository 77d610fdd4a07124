//! The bodies of the fuzz targets in `fuzz/`: each takes any bytes, and panics where a claim does not hold.
//!
//! They live here so that the committed inputs run on a stable toolchain, too (`tests/replay.rs`), with nothing that
//! only a fuzzer needs. [`Bytes`] turns input into values; its reading is fixed, so that an input keeps its meaning.
//!
//! | target | what it feeds | what it claims |
//! |---|---|---|
//! | [`request_plan`] | domain requests, mappings and methods to `pto-domain` and `pto-reset` | validity is what wide arithmetic and sets say; a plan zeroes each requested byte once and no other, or is refused for a reason that a per-byte model sees too |
//! | [`fault_schedule`] | texts to the parser of fault schedules, and schedules to a prepared worker | what is parsed prints and parses back; under any schedule nothing hangs, nothing is left after close, and only what an armed fault hit fails |
//! | [`fixtures`] | bytes to the reader of fixture files | a file is read or refused with a reason; what was read makes requests or says why not |

mod bytes;
mod fault_schedule;
mod fixtures;
mod request_plan;

pub use bytes::Bytes;
pub use fault_schedule::fault_schedule;
pub use fixtures::fixtures;
pub use request_plan::request_plan;

/// A target.
pub type Target = fn(&[u8]);

/// Every target, by the name that it has in `fuzz/`.
pub const TARGETS: [(&str, Target); 3] =
    [("request_plan", request_plan), ("fault_schedule", fault_schedule), ("fixtures", fixtures)];
