//! Retained-domain lifecycle: keys, requests, leases, states, release order.
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
