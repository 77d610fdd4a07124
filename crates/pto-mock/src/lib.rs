//! Emulator backend, fault schedules, journal, mocks and conformance suite for pto.
#![deny(unsafe_code)]

pub mod conformance;
pub mod fixtures;
pub mod kernels;
pub mod strategies;

mod board;
mod builder;
mod emulator;
mod faults;
mod journal;
mod kernel;
#[cfg(feature = "lifecycle")]
pub mod lifecycle;
mod memory;
pub mod mocks;
mod wrappers;

pub use builder::{Completion, EmulatorBuilder, Mapping};
pub use emulator::{Emulator, EmulatorStats};
pub use faults::{
    CALLS, FailureTemplate, Fault, FaultControl, FaultEffect, FaultKind, FaultSchedule, Hung, ParseFaultError,
};
pub use journal::{Event, EventKind, FreeCause, Journal, WaitFor};
pub use kernel::{Cell, DomainView, EntryContext, Kernel, KernelError, KernelObject, MemoryView, SubTask};
pub use memory::Memory;
pub use wrappers::{EarlyCopyBackend, FaultyBackend, JournalBackend};
