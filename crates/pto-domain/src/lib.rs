//! Retained-domain lifecycle: keys, requests, leases, states, release order.
//!
//! # What it does
//!
//! A prepared worker keeps the communication domains of its programs between dispatches. This crate decides which
//! domain a program means, whether a request is one that it may serve, what a dispatch may see of it, and in which
//! order everything is given back. Values go in, decisions come out: no clock, no thread, no lock, no backend call.
//!
//! # What it leaves to others
//!
//! Allocating, releasing and registering domains, and everything that waits (`pto-dispatch`); which bytes must be
//! zeroed before a domain is used again (`pto-reset`); the values that it works on (`pto-simpler-sys`). The first
//! failure, which explains a poisoned table, is kept by whoever poisons it.
//!
//! # A tour in call order
//!
//! 1. [`check_name`] and [`check_request`] are the one home of what makes a request valid.
//! 2. [`DomainTable::lookup`] finds a retained domain and compares the request with the first one; [`difference`]
//!    names the field that changed.
//! 3. [`DomainTable::insert`] takes over what the backend has allocated under a [`DomainKey`].
//! 4. [`DomainTable::lease`] gives a [`Lease`], which names [`LeasedBuffer`]s and cannot outlive the graph build;
//!    physical ids are read from it with the [`LeaseAuthority`] only.
//! 5. [`DomainTable::commit_lease`] counts the published dispatch: the domain's epoch.
//! 6. [`DomainTable::stop_leasing`], [`release_plan`](DomainTable::release_plan),
//!    [`begin_release`](DomainTable::begin_release) and [`finish_release`](DomainTable::finish_release) give the domains
//!    back; after a failure, [`DomainTable::poison`] leaves them to the backend instead.
//!
//! # Life of a retained domain
//!
//! ```text
//!            +--+ published
//!            v  |
//! (insert) Live --begin_release--> Releasing --freed-----------------> Freed
//!            |                         \-------not freed, or failed--> Unreleased
//!            \--poison, backend_owned--> BackendOwned
//! ```
//!
//! 1. *Live*: inserted after its first allocation; leased by any number of dispatches. [`DomainPhase::Live`].
//! 2. *Releasing*: close has asked the backend to release it.
//! 3. *Freed*, or *Unreleased* where the release failed or could not be verified. Both are final.
//! 4. *BackendOwned*: a failure came first; never leased and never released by us again.
//!
//! Any other step is a [`TableError::Broken`] that names both phases, and changes nothing.
//!
//! # Rules and invariants that live here
//!
//! | rule | where |
//! |---|---|
//! | valid requests | [`check_request`] |
//! | 8: one domain per (program, name) | [`DomainKey`], [`DomainTable::insert`] |
//! | 9, I7: later requests equal the first | [`DomainTable::lookup`], [`difference`] |
//! | 11: a lease ends with the build | [`Lease`] |
//! | 16: epochs | [`DomainTable::lease`], [`DomainTable::commit_lease`] |
//! | 17, I6: poison | [`DomainTable::poison`] |
//! | 20: reverse release order | [`DomainTable::release_plan`] |
//! | I1, I2: no shared key, id or memory | [`DomainTable::insert`], [`DomainTable::self_check`] |
//!
//! # Features
//!
//! None: the crate has no optional part.
//!
//! # Cost
//!
//! Checking, looking up, leasing and committing allocate nothing on success; a lease is a few reference counts.
//!
//! # Terms
//!
//! | Simpler | here |
//! |---|---|
//! | domain name | [`DomainKey`]; its text is what the backend sees |
//! | `CommDomainHandle` in generated code | [`Lease`] |
//! | `ChipDomainContext.buffers[name]` | [`LeasedBuffer`] |
//!
//! # Example
//!
//! ```
//! use pto_domain::{DomainTable, ProgramIndex, ReleaseOutcome, check_request};
//! use pto_simpler_sys::{BufferWindow, ChipId, DomainAllocation, DomainId, DomainRequest, MemberWindow, NamedBuffer};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let decode = ProgramIndex::new(0);
//! let request = DomainRequest::packed([0], vec![NamedBuffer::bytes("signal", 64)]);
//! check_request(&request, 1, 64)?;
//!
//! // First use: the backend allocates, and describes what it made.
//! let (mut table, authority) = DomainTable::new(1);
//! assert!(table.lookup(decode, "comm_d0", &request)?.is_none());
//! let mut reply = DomainAllocation::new();
//! reply.begin(DomainId::new(0, 1), 1);
//! reply.push_member(
//!     MemberWindow { chip: ChipId(0), rank: 0, device_context: 0xC0, base: 0x1000, mapped_bytes: 64 },
//!     [BufferWindow { address: 0x1000, nbytes: 64 }],
//! );
//! let slot = table.insert(decode, "comm_d0", &request, reply)?;
//! table.commit_lease(slot)?;
//!
//! // Later dispatches lease the same memory.
//! let lease = table.lease(slot, &authority)?;
//! assert_eq!((lease.epoch(), lease.is_first_use()), (2, false));
//! assert_eq!(lease.buffer(ChipId(0), "signal")?.address(), 0x1000);
//!
//! // Close gives everything back, last first.
//! table.stop_leasing();
//! for slot in table.release_plan() {
//!     let id = table.begin_release(slot)?;
//!     assert_eq!(id, DomainId::new(0, 1)); // here the backend is asked
//!     table.finish_release(slot, ReleaseOutcome::Freed)?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! More of it: `cargo run -p pto-domain --example retained_domain`.
#![forbid(unsafe_code)]

mod error;
mod key;
mod lease;
mod request;
mod state;
mod table;

pub use error::{DomainError, LeaseError, RequestError, TableError};
pub use key::{DomainKey, DomainName, ProgramIndex};
pub use lease::{Lease, LeaseAuthority, LeaseParts, LeasedBuffer};
pub use request::{Difference, check_name, check_request, difference};
pub use state::{DomainPhase, ReleaseOutcome};
pub use table::{DomainTable, RetainedDomain, Slot};
