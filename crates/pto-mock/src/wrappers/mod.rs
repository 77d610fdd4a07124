//! Backends around other backends: injected faults, a journal from outside, and the negative control for resets.
//!
//! Wrappers stack in any order, since everything that passes through the HAL is a plain value. Each implements every
//! method of the traits, and the compiler is told to refuse one that would fall back to a default.

mod early;
mod faulty;
mod faulty_graph;
mod journaled;
mod journaled_graph;

pub use early::EarlyCopyBackend;
pub use faulty::FaultyBackend;
pub use journaled::JournalBackend;
