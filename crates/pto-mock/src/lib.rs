//! Everything that a test of persistent dispatch needs in place of an NPU: an emulator, faults, a journal, mocks, and
//! the contract of the hardware-abstraction layer as a test suite.
//!
//! # What it does
//!
//! [`Emulator`] is a [`Backend`](pto_simpler_sys::Backend) that does the work in this process, not a script of
//! answers. Chips are threads; windows, resident buffers and host buffers are real shared memory; kernels are
//! closures that read and write it and signal each other through cells. Runs are FIFO with completion fences, control
//! comes before tasks and waits for the head of the device queue, and calls are validated with Simpler's cases and
//! limits. What Simpler does, the emulator does; a difference is a bug of the emulator.
//!
//! # What it leaves to others
//!
//! When to allocate, reset and release (`pto-dispatch`, with `pto-domain` and `pto-reset`). It infers no
//! dependencies between tensors: tasks of one chip run one at a time in submit order, chips are ordered only through
//! cells. Programs that are meant for Simpler too state their accesses and do not rely on the order of one chip
//! without them.
//!
//! # A tour in call order
//!
//! 1. [`Emulator::builder`] takes chips, kernels and options ([`EmulatorBuilder`]: [`Mapping`], [`Memory`],
//!    [`Completion`], faults, limits) and builds an emulator.
//! 2. Its kernels see a [`Kernel`]: scalars, tensors ([`MemoryView`]), and the windows of all members of a domain
//!    ([`DomainView`]) with their signal cells ([`Cell`]). Sub-worker functions see a [`SubTask`], host entries an
//!    [`EntryContext`].
//! 3. The emulator is used through the HAL like any other backend.
//! 4. A test looks at the [`Journal`], one totally ordered list of [`Event`]s, and at memory
//!    ([`peek`](Emulator::peek), [`stats`](Emulator::stats)); holds runs open ([`Completion::ByHand`]); and arms
//!    [`Fault`]s, one by one or as a [`FaultSchedule`] that prints, parses and shrinks.
//! 5. [`FaultyBackend`] and [`JournalBackend`] do the same around any other backend; [`EarlyCopyBackend`] is
//!    deliberately wrong, to show that a test would notice. [`mocks`] are for exact call order on a few calls.
//! 6. [`conformance`] runs every rule of the HAL on anybody's backend, with the portable [`kernels`]; [`fixtures`]
//!    reads production domain requests.
//!
//! # The life of a run
//!
//! 1. `submit` takes a ticket and waits for earlier builds, for room (`depth` runs accepted and not ended), and for
//!    the ordered cleanup of a run that allocated. Then the run is *admitted*.
//! 2. Its graph is built. Control calls wait until every earlier run has passed its fence. Tasks may start as soon as
//!    the run heads the device queue.
//! 3. The run is *accepted*, or its build failed: then its tasks are cancelled, its domains freed, and no end is
//!    reported.
//! 4. Its *fence* passes when its tasks are done (and a test lets it, where ends are by hand), in order.
//! 5. *Cleanup*: domains that nobody keeps are freed, the last first.
//! 6. The end is reported, once, on the emulator's own thread, with no lock held.
//!
//! # Memory
//!
//! Every access to emulated memory is an atomic access to a 32-bit word; see [`MemoryView`] and [`Cell`]. Kernels may
//! race as they do on a device, with defined behaviour. Memory that is freed while a kernel still holds a view stays
//! mapped until the view is gone, and the view answers [`KernelError::Freed`]. Shared-memory names are random,
//! created exclusively and unlinked at once; space is reserved first, so a full file system is an error and never a
//! signal.
//!
//! A closure that never returns cannot be ended: `close` waits for it, and
//! [`abandon`](pto_simpler_sys::Backend::abandon) leaves its thread behind and names it.
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `lifecycle` | no | program strategies, the lifecycle state machine and its oracle (uses `pto-dispatch`) |
//!
//! # Example
//!
//! Two chips exchange a signal through a domain.
//!
//! ```
//! use std::sync::{Arc, mpsc};
//!
//! use pto_mock::Emulator;
//! use pto_simpler_sys::*;
//!
//! struct Ends(mpsc::Sender<RunOutcome>);
//! impl RunEvents for Ends {
//!     fn ended(&self, _run: RunId, outcome: RunOutcome) {
//!         let _ = self.0.send(outcome);
//!     }
//! }
//!
//! struct Exchange(CallableId);
//! impl GraphBuilder for Exchange {
//!     fn build(&mut self, o: &dyn Orchestrator) -> Result<(), BuildFailed> {
//!         let request = DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("signal", 64)]);
//!         let mut domain = DomainAllocation::new();
//!         o.allocate_domain("d0", &request, &mut domain).map_err(|_| BuildFailed)?;
//!         let args: Vec<TaskArgs> = domain
//!             .members()
//!             .iter()
//!             .map(|member| {
//!                 let mut args = TaskArgs::new();
//!                 args.scalar(member.device_context);
//!                 args
//!             })
//!             .collect();
//!         o.submit_next_level_group(self.0, &args, None, &request.workers).map_err(|_| BuildFailed)
//!     }
//! }
//!
//! let emulator = Emulator::builder()
//!     .chips(2)
//!     .kernel("exchange", Signature::new([], 1), |k| {
//!         let domain = k.domain(k.scalar(0)?)?;
//!         let (me, peer) = (domain.rank(), 1 - domain.rank());
//!         domain.buffer(peer, 0)?.cell(0)?.fetch_add(1)?;
//!         domain.buffer(me, 0)?.cell(0)?.wait(|v| v == 1)?;
//!         Ok(())
//!     })
//!     .build()?;
//! let exchange = emulator.register(&CallableSpec::chip("exchange", Signature::new([], 1)))?.id;
//! let (sender, ended) = mpsc::channel();
//! emulator.start(Arc::new(Ends(sender)))?;
//! emulator.submit(RunId(1), &CallConfig::default(), &mut Exchange(exchange))?;
//! assert_eq!(ended.recv(), Ok(RunOutcome::success()));
//! emulator.close()?;
//! assert_eq!((emulator.journal().allocs(), emulator.journal().frees()), (1, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `examples/all_reduce.rs` goes on from there: it arms a fault, and prints and checks the journal.
//!
//! ```console
//! $ cargo run -p pto-mock --example all_reduce
//! ```
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
