//! What must be zeroed before a retained domain is reused: coverage, mappings, plans.
#![forbid(unsafe_code)]

mod coverage;
mod error;
mod mapping;
mod plan;

pub use coverage::{CHUNK_BYTES, Coverage, CoveredWindow, Method, buffer_offset, coverage};
pub use error::ResetError;
pub use mapping::{MappedWindow, check_mapping};
pub use plan::ResetPlan;
