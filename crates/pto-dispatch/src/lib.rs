//! `PreparedWorker`: persistent dispatch of PTO programs over any backend.
//!
//! # What it does
//!
//! Prepares one or several programs on a backend, keeps their communication domains for as long as the worker lives
//! (persistent mode), leases them to each dispatch, restores fresh contents before every reuse, and brings every
//! dispatch to exactly one outcome, whatever fails. Without persistence the same programs allocate and free their
//! domains per request. Composes `pto-domain` (which domain may be leased) and `pto-reset` (what must be zeroed)
//! over the traits of `pto-simpler-sys`, and has no `unsafe` code, no clock in its decisions and no thread of its
//! own except to close with a deadline.
//!
//! # What it leaves to others
//!
//! Running tasks, mapping memory and ordering runs on the device are the backend's: the emulator in `pto-mock`, or
//! Simpler behind `pto-simpler-sys`. What a graph computes is the program's. How many runs overlap is negotiated by
//! the backend; at most two dispatches are published here in any case.
//!
//! # A tour in call order
//!
//! 1. [`Program`] and its [`ProgramSpec`]: what is prepared, and the builder that each dispatch calls.
//! 2. [`Options`]: ordinary or persistent, reset on or off, [`Staging`].
//! 3. [`PreparedWorker::prepare`] checks, registers, starts; [`PreparedWorker::id_of`] gives a [`ProgramId`].
//! 4. [`Args`] with [`HostBuffer`]s, [`DeviceTensor`]s and scalars; [`PreparedWorker::submit`] returns a
//!    [`Dispatch`].
//! 5. Inside the builder, [`Build`]: [`Build::lease`] gives a [`Lease`], [`Build::tensor`] a [`Tensor`],
//!    [`Build::task`] and [`Build::group`] submit work.
//! 6. [`Dispatch::wait`] gives the [`Outcome`], to every waiter the same.
//! 7. [`PreparedWorker::stats`] tells what it cost; [`PreparedWorker::close`] gives everything back.
//!
//! # Life of a dispatch
//!
//! 1. *In line*: a submitter waits for one of two frames, first come, first served.
//! 2. *Building*: the builder runs on the submitting thread. Until something reaches the backend, nothing has been
//!    touched, and a failure rejects this dispatch only.
//! 3. *Opened*: retained domains are registered with the run, their mappings checked, and, with reset on, every
//!    named buffer is zeroed. From here on a failure poisons persistent dispatch.
//! 4. *Published*: the backend has accepted the run. The dispatch owns its arguments, frame and staging.
//! 5. *Terminal*: the backend has reported the end, staging is released, the outcome is published, the frame is free.
//!
//! The whole of it, with the rules that each step keeps, is in `docs/architecture.md`.
//!
//! # Errors
//!
//! [`Error`] has the three families of the whole project (misuse, backend failure, broken invariant) and answers
//! [`may_retry`](Error::may_retry) and [`must_reprepare`](Error::must_reprepare).
//!
//! # Features
//!
//! | feature | default | effect |
//! |---|---|---|
//! | `simpler` | no | the binding to the real runtime, as `sys::python`; embeds CPython (see `pto-simpler-sys`) |
//!
//! # Terms
//!
//! | Simpler, PyPTO | here |
//! |---|---|
//! | compiled program, host orchestration | [`Program`] |
//! | `Worker.run(orch, args)` | [`PreparedWorker::run`] |
//! | orchestration function | [`Program::build`] |
//! | `orch.allocate_domain(..)` and its handle | [`Build::lease`], [`Lease`] |
//! | `submit_next_level`, `submit_next_level_group`, `submit_sub` | [`Task::submit`], [`Group::submit`], [`Task::submit_sub`] |
//! | run handle | [`Dispatch`] |
//!
//! # Example
//!
//! Two emulated chips signal each other in a window that is kept between dispatches. Each finds exactly one signal,
//! every time, since the window is zeroed before it is used again.
//!
//! ```
//! use std::sync::Arc;
//!
//! use pto_dispatch::sys::{CallableSpec, DomainRequest, NamedBuffer, Signature};
//! use pto_dispatch::{Args, Build, Options, PreparedWorker, Program, ProgramResult, ProgramSpec};
//! use pto_mock::{Emulator, KernelError};
//!
//! struct Handshake(ProgramSpec);
//!
//! impl Program for Handshake {
//!     fn spec(&self) -> &ProgramSpec {
//!         &self.0
//!     }
//!
//!     fn build<'b>(&self, build: &Build<'b>, _args: &Args) -> ProgramResult {
//!         let request = DomainRequest::packed(0..build.chips(), vec![NamedBuffer::bytes("signal", 64)]);
//!         let domain = build.lease("handshake", &request)?;
//!         let mut group = build.group(0)?;
//!         for chip in request.workers {
//!             group = group.member(chip).scalar(domain.device_context(chip)?);
//!         }
//!         Ok(group.submit()?)
//!     }
//! }
//!
//! let signature = Signature::new(Vec::new(), 1);
//! let emulator = Emulator::builder()
//!     .chips(2)
//!     .kernel("handshake", signature.clone(), |kernel| {
//!         let domain = kernel.domain(kernel.scalar(0)?)?;
//!         domain.buffer(1 - domain.rank(), 0)?.cell(0)?.fetch_add(1)?;
//!         match domain.buffer(domain.rank(), 0)?.cell(0)?.wait(|signals| signals >= 1)? {
//!             1 => Ok(()),
//!             stale => Err(KernelError::failed(format!("{stale} signals"))),
//!         }
//!     })
//!     .build()?;
//! let program: Arc<dyn Program> =
//!     Arc::new(Handshake(ProgramSpec::new("handshake").callable(CallableSpec::chip("handshake", signature))));
//!
//! let worker = PreparedWorker::prepare(&[program], &Options::persistent(), emulator)?;
//! for _ in 0..3 {
//!     worker.call(&Args::new())?;
//! }
//! let stats = worker.stats(worker.only()?)?;
//! assert_eq!((stats.allocations, stats.reuses), (1, 2));
//! assert_eq!(stats.zeroed_bytes, 2 * 2 * 64);
//! worker.close()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
pub use pto_domain::{Lease, LeaseError, LeasedBuffer};
pub use pto_simpler_sys as sys;
pub use stats::ProgramStats;
pub use task::{Group, Task};
pub use worker::PreparedWorker;
