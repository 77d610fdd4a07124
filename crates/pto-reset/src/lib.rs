//! What must be zeroed before a retained domain is reused: coverage, mappings, plans.
//!
//! # What it does
//!
//! A retained domain keeps its contents between dispatches, and most programs expect a fresh, all-zero window. This
//! crate works out which copies restore one, whether the backend is able to, and what they need from the host.
//! Values go in, plans come out: no clock, no thread, no lock, no backend call.
//!
//! A plan that skips a check cannot be written down: only [`CoveredWindow::check`] makes a [`CoveredWindow`], only
//! that makes a [`MappedWindow`], and only those make a [`ResetPlan`].
//!
//! # What it leaves to others
//!
//! When a reset is due, making and keeping the zero-filled host buffers, and executing the copies (`pto-dispatch`);
//! whether a request is valid for a worker (`pto-domain`); the values that it works on (`pto-simpler-sys`).
//!
//! # A tour in call order
//!
//! 1. [`Method::of`] says how a backend zeroes; [`Method::chunk_bytes`] what must exist before it starts.
//! 2. [`CoveredWindow::check`] refuses what that method cannot zero completely (rule 13); [`coverage()`] says how much
//!    of a window is named.
//! 3. [`CoveredWindow::map`] checks what was really mapped (rule 14); [`check_mapping`] does so without planning, for
//!    every allocation.
//! 4. [`ResetPlan::new`] takes the windows of a program in first-use order. [`staging_sizes`](ResetPlan::staging_sizes)
//!    says which host buffers a dispatch needs (rule 15).
//! 5. [`ResetPlan::write_copies`] gives the copies, as often as there are dispatches.
//!
//! # Life of a plan
//!
//! 1. A program retains its domains: their coverage is checked before, their mapping after the allocation.
//! 2. From the next dispatch on, one plan zeroes them all; it stays good until the program retains another domain.
//! 3. Each resetting dispatch gets its staging buffers first and holds them until its run has ended.
//!
//! # Four methods
//!
//! | backend | method | reaches slack | from the host |
//! |---|---|---|---|
//! | copies whole buffers | [`Method::WholeBuffer`] | no: refused | one buffer per distinct size and dispatch |
//! | copies byte ranges | [`Method::ByteRange`] | yes | one read-only chunk for the worker's life |
//! | fills byte ranges | [`Method::DeviceFill`] | yes | nothing |
//! | fills whole buffers | [`Method::BufferFill`] | no: refused | nothing |
//!
//! ```text
//! window:   | buffer 0 | buffer 1 | ... |  slack  |  padding
//!           |<--------- named ---------->|         |
//!           |<------------- requested ------------>|
//!           |<------------------ mapped ---------------------->|
//! ```
//!
//! Padding is never written. The requested window is zeroed to its last byte, each byte once, or there is no plan.
//!
//! # Features
//!
//! None: the crate has no optional part.
//!
//! # Cost
//!
//! All checks allocate nothing on success, and neither does [`ResetPlan::write_copies`] once its list has room.
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//! use pto_reset::{CoveredWindow, Method, ResetPlan};
//! use pto_simpler_sys::{
//!     BufferWindow, Capabilities, ChipId, DomainAllocation, DomainId, DomainRequest, HostBufferId, MemberWindow,
//!     NamedBuffer,
//! };
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let method = Method::of(&Capabilities::new("a2a3sim", "tensormap_and_ringbuffer", vec![0]));
//! let request = Arc::new(DomainRequest::packed([0], vec![NamedBuffer::bytes("signal", 64)]));
//! let covered = CoveredWindow::check(&request, method)?;
//!
//! // The backend maps a page; what it describes is checked.
//! let id = DomainId::new(0, 1);
//! let mut reply = DomainAllocation::new();
//! reply.begin(id, 1);
//! reply.push_member(
//!     MemberWindow { chip: ChipId(0), rank: 0, device_context: 0xC0, base: 0x1000, mapped_bytes: 4096 },
//!     [BufferWindow { address: 0x1000, nbytes: 64 }],
//! );
//! let plan = ResetPlan::new(method, &[covered.map(id, &reply)?])?;
//!
//! // One zero-filled host buffer of 64 bytes, and one copy from it: the page's padding stays as it is.
//! assert_eq!(plan.staging_sizes(), [64]);
//! let mut copies = Vec::with_capacity(plan.copies());
//! plan.write_copies(&[HostBufferId::new(0, 1)], &mut copies)?;
//! assert_eq!((copies.len(), copies[0].nbytes), (1, 64));
//! # Ok(())
//! # }
//! ```
//!
//! More of it: `cargo run -p pto-reset --example reset_plan`.
#![forbid(unsafe_code)]

mod coverage;
mod error;
mod mapping;
mod plan;

pub use coverage::{CHUNK_BYTES, Coverage, CoveredWindow, Method, buffer_offset, coverage};
pub use error::ResetError;
pub use mapping::{MappedWindow, check_mapping};
pub use plan::ResetPlan;
