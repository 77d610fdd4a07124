//! The portable kernel library: small kernels that every backend can have under the same names.
//!
//! A program or a test that keeps to these runs unchanged on the emulator and on a real runtime. Each is defined by
//! its name, its [`Signature`] and the sentence in the table; [`install`] adds the emulator's versions, and a binding
//! brings its own (on Simpler: a vector kernel that finds its peers through the communication context).
//!
//! | name | tensors | scalars | what it does |
//! |---|---|---|---|
//! | [`STORE`] | OUTPUT i32\[n\] | v | element i becomes v + i |
//! | [`ADD`] | INOUT i32\[n\] | v | adds v to each element |
//! | [`COPY`] | INPUT i32\[n\], OUTPUT_EXISTING i32\[n\] | | copies the first onto the second |
//! | [`SIGNAL`] | NO_DEP signal buffer | context, offset | rank r adds r + 1 to the cell of every *other* rank |
//! | [`AWAIT`] | OUTPUT i32\[1\] | context, offset, threshold | waits until the own cell >= threshold, stores it |
//! | [`HANDSHAKE`] | NO_DEP signal buffer, OUTPUT i32\[1\] | context, offset, threshold | [`SIGNAL`], then [`AWAIT`] |
//! | [`PEEK`] | OUTPUT i32\[n\] | context, rank, offset | reads n elements of that rank's window |
//! | [`RANK`] | OUTPUT i32\[2\] | context | stores its rank and the number of ranks |
//! | [`FAIL`] | | code | fails |
//!
//! and for host-side sub-workers:
//!
//! | name | tensors | scalars | what it does |
//! |---|---|---|---|
//! | [`GATE`] | INOUT i32\[2\] | | element 1 becomes 1; waits until element 0 is not 0 |
//! | [`SUB_ADD`] | INOUT i32\[n\] | v | adds v to each element |
//! | [`SUB_FAIL`] | | code | fails |
//!
//! and, where the backend runs host entries:
//!
//! | name | arguments | what it does |
//! |---|---|---|
//! | [`ENTRY`] | scalar `code` | leases the domain `pto_entry` on chips 0 and 1 (one buffer `b` of 64 bytes of dtype `opaque`), then fails where `code` is not 0; reaches no device |
//!
//! *context* is the device context that an allocation reply gives for the member, *offset* counts bytes from the
//! start of the window to a cell of 4 bytes, aligned to 4. Scalars are 64 bits wide; values and thresholds use the
//! low 32 bits as a signed integer, and sums wrap. Tensors are dense.

mod emulated;

use pto_simpler_sys::{Access, CallableKind, CallableSource, CallableSpec, DomainRequest, NamedBuffer, Signature};

pub use emulated::install;

/// `pto_store`.
pub const STORE: &str = "pto_store";
/// `pto_add`.
pub const ADD: &str = "pto_add";
/// `pto_copy`.
pub const COPY: &str = "pto_copy";
/// `pto_signal`.
pub const SIGNAL: &str = "pto_signal";
/// `pto_await`.
pub const AWAIT: &str = "pto_await";
/// `pto_handshake`.
pub const HANDSHAKE: &str = "pto_handshake";
/// `pto_peek`.
pub const PEEK: &str = "pto_peek";
/// `pto_rank`.
pub const RANK: &str = "pto_rank";
/// `pto_fail`.
pub const FAIL: &str = "pto_fail";
/// `pto_gate`, for sub-workers.
pub const GATE: &str = "pto_gate";
/// `pto_sub_add`, for sub-workers.
pub const SUB_ADD: &str = "pto_sub_add";
/// `pto_sub_fail`, for sub-workers.
pub const SUB_FAIL: &str = "pto_sub_fail";

/// `pto_entry`, a host entry.
pub const ENTRY: &str = "pto_entry";

/// Names of the chip kernels.
pub const CHIP: [&str; 9] = [STORE, ADD, COPY, SIGNAL, AWAIT, HANDSHAKE, PEEK, RANK, FAIL];

/// Names of the functions for sub-workers.
pub const SUB: [&str; 3] = [GATE, SUB_ADD, SUB_FAIL];

/// The signature of a kernel of this library; an empty one for a name that is not in it.
#[must_use]
pub fn signature(name: &str) -> Signature {
    use Access::{InOut, Input, NoDependency, Output, OutputExisting};
    match name {
        STORE => Signature::new([Output], 1),
        ADD | SUB_ADD => Signature::new([InOut], 1),
        COPY => Signature::new([Input, OutputExisting], 0),
        SIGNAL => Signature::new([NoDependency], 2),
        AWAIT => Signature::new([Output], 3),
        HANDSHAKE => Signature::new([NoDependency, Output], 3),
        PEEK => Signature::new([Output], 3),
        RANK => Signature::new([Output], 1),
        FAIL | SUB_FAIL => Signature::new([], 1),
        GATE => Signature::new([InOut], 0),
        _ => Signature::default(),
    }
}

/// All callables of the library, ready to be registered by name: chip kernels first, then functions for
/// sub-workers.
#[must_use]
pub fn specs() -> Vec<CallableSpec> {
    let chip = CHIP.map(|name| CallableSpec::chip(name, signature(name)));
    let sub = SUB.map(|name| CallableSpec::sub(name, signature(name)));
    chip.into_iter().chain(sub).collect()
}

/// The host entry of the library, ready to be registered by name. Not among [`specs`], as not every backend that runs
/// entries brings it.
#[must_use]
pub fn entry_spec() -> CallableSpec {
    CallableSpec { name: ENTRY.into(), kind: CallableKind::Entry, signature: None, source: CallableSource::Named }
}

/// The domain that [`ENTRY`] leases.
#[must_use]
pub fn entry_request() -> DomainRequest {
    DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("b", 64)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_a_spec_of_its_own_name_and_signature() {
        let specs = specs();
        assert_eq!(specs.len(), CHIP.len() + SUB.len());
        for spec in &specs {
            let signature = spec.signature.clone().unwrap();
            assert_eq!(signature, super::signature(&spec.name));
            assert!(!signature.tensors.is_empty() || signature.scalars > 0, "{} has no signature", spec.name);
        }
        assert_eq!(signature("pto_unknown"), Signature::default());
    }
}
