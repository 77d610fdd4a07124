//! The hardware-abstraction layer of pto: the traits [`Backend`] and [`Orchestrator`], and the plain values that
//! pass through them.
//!
//! # What it does
//!
//! Describes, in Rust and without Python, what persistent execution needs from a runtime that drives Ascend NPU
//! chips. Each call carries the name of Simpler's own public call and keeps its rules. Two kinds of code meet here:
//! backends (the emulator in `pto-mock`, the Simpler binding, wrappers that inject faults or record journals)
//! implement the traits; `pto-dispatch` calls them.
//!
//! # What it leaves to others
//!
//! Keys, leases and the life of a retained domain (`pto-domain`); which bytes must be zeroed (`pto-reset`); when
//! things happen (`pto-dispatch`). It validates nothing by itself: requests are values, and backends report only
//! what the caller could not have foreseen.
//!
//! # A tour in call order
//!
//! 1. [`Backend::capabilities`] says what the backend can do ([`Capabilities`], [`Limits`]).
//! 2. [`Backend::register`] takes each [`CallableSpec`] and returns a [`Registered`] id.
//! 3. [`Backend::start`] brings the chip workers up, takes the [`RunEvents`] receiver and negotiates the [`Depth`].
//! 4. [`Backend::submit`] calls a [`GraphBuilder`] with an [`Orchestrator`], which allocates domains
//!    ([`DomainRequest`] in, [`DomainAllocation`] out), copies ([`CopyTo`]) and submits tasks ([`TaskArgs`]).
//! 5. [`RunEvents::ended`] reports each accepted run's [`RunOutcome`] exactly once.
//! 6. [`Backend::release_domain`] and [`Backend::close`] give everything back; [`Backend::abandon`] is the last
//!    resort.
//!
//! Everything that names a thing of the backend is a plain generational id ([`DomainId`], [`HostBufferId`], ...), so
//! wrappers compose and tests can print and compare every value. A wrapper writes the methods that it changes and
//! leaves the others to [`forward_backend!`] and [`forward_orchestrator!`].
//!
//! # Errors
//!
//! [`BackendError`] has the three families of the whole project: [`Misuse`], [`RuntimeFailure`],
//! [`BrokenInvariant`]. Each answers [`may_retry`](BackendError::may_retry) and
//! [`must_reprepare`](BackendError::must_reprepare).
//!
//! # Terms
//!
//! | Simpler | here |
//! |---|---|
//! | `Worker` | a [`Backend`] |
//! | NEXT_LEVEL worker id | [`ChipId`] |
//! | `RunHandle` | [`RunId`] plus [`RunEvents`] |
//! | `CommDomainHandle` | [`DomainId`] |
//! | `ChipDomainContext` | [`MemberWindow`] and [`BufferWindow`] |
//! | `CommBufferSpec` | [`NamedBuffer`] |
//! | `Buffer` (host) | [`HostBufferId`] |
//! | `Buffer` (device, `alloc_child_tensor`) | [`DeviceBufferId`] |
//! | `Orchestrator.alloc` | [`ScratchId`] |
//! | `TaskArgs`, `Tensor`, `TensorArgType` | [`TaskArgs`], [`TensorArg`], [`Access`] |
//!
//! # Example
//!
//! ```
//! use pto_simpler_sys::{ChipId, DomainRequest, NamedBuffer};
//!
//! let request = DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("signal", 64)]);
//! assert_eq!(request.window_bytes, 64);
//! assert_eq!(request.rank_of(ChipId(1)), Some(1));
//! ```
//!
//! `examples/counting_backend.rs` drives any `dyn Backend` through a whole life, from `register` to `close`, and wraps
//! it in a backend that counts:
//!
//! ```console
//! $ cargo run -p pto-simpler-sys --example counting_backend
//! ```
//!
//! # Features
//!
//! | Feature | Default | What it adds |
//! |---|---|---|
//! | `simpler` | no | the module `python`: the binding to the real runtime; needs CPython 3.10 to 3.13 with its library |
#![cfg_attr(not(feature = "simpler"), forbid(unsafe_code))]

mod allocation;
mod args;
mod backend;
mod callable;
mod capability;
mod config;
mod error;
mod forward;
mod ids;
mod orchestrator;
#[cfg(feature = "simpler")]
pub mod python;
mod request;

pub use allocation::{BufferWindow, DomainAllocation, DomainState, MemberWindow};
pub use args::{Access, CopySource, CopyTo, DataType, DevicePlace, Shape, TaskArgs, TensorArg, TensorPlace};
pub use backend::{AbandonReport, Backend, BackendPhase, FRAMES, RunEvents, RunOutcome, RunState};
pub use callable::{
    CallableKind, CallableSource, CallableSpec, ChipArtefact, KernelArtefact, Registered, Signature,
};
pub use capability::{Capabilities, CopyGranularity, Depth, Limits, Negotiated, Retention};
pub use config::{CallConfig, RING_COUNT};
pub use error::{
    BackendError, BrokenInvariant, BuildFailed, Call, CallbackError, Effect, FailureKind, Family, Misuse,
    RuntimeFailure, SubmitError,
};
pub use ids::{CallableId, ChipId, DeviceBufferId, DomainId, HostBufferId, RunId, ScratchId};
pub use orchestrator::{CopyResult, EntryArg, EntryCall, EntryHost, EntryValue, GraphBuilder, Orchestrator};
pub use request::{DomainRequest, NamedBuffer};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traits_are_dyn_compatible_and_backends_are_shared_between_threads() {
        fn shared<T: Send + Sync + ?Sized>() {}
        shared::<dyn Backend>();
        shared::<dyn RunEvents>();
        shared::<BackendError>();
        fn object(_: &dyn Orchestrator, _: &mut dyn GraphBuilder, _: &dyn EntryHost) {}
        let _ = object;
    }
}
