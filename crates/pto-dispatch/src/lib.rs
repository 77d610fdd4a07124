//! `PreparedWorker`: persistent dispatch of PTO programs over any backend.
#![forbid(unsafe_code)]

mod buffer;
mod build;
mod completion;
mod error;
mod finish;
mod frame;
mod inner;
mod options;
mod prepare;
mod program;
mod reentry;
mod shutdown;
mod staging;
mod stats;
mod submit;
mod sync;
mod task;
mod worker;

pub use buffer::{DeviceTensor, HostBuffer};
pub use build::{Build, EntryInput, Intermediate, Place, Scratch, Tensor};
pub use completion::{Dispatch, Outcome};
pub use error::{CloseFailure, Error, Failure};
pub use options::{Options, Staging};
pub use program::{
    Arg, Args, DispatchId, Parameter, ParameterKind, Program, ProgramId, ProgramResult, ProgramSpec, Target,
};
pub use pto_domain::{Lease, LeasedBuffer};
pub use pto_simpler_sys as sys;
pub use stats::ProgramStats;
pub use task::{Group, Task};
pub use worker::PreparedWorker;
