//! Host entries: generated programs that build the rest of a graph by themselves.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pto_simpler_sys::{
    BackendError, BuildFailed, Call, CallableKind, CallbackError, DomainAllocation, DomainRequest, EntryArg,
    EntryCall, EntryHost, EntryValue,
};

use super::{Build, Tensor};
use crate::error::Error;
use crate::inner::panic_text;
use crate::task::expect_kind;

impl<'b> Build<'b> {
    /// Runs the program's host entry number `callable`: a generated program that builds the rest of this graph by
    /// itself and leases its domains through this build.
    ///
    /// # Errors
    ///
    /// [`Error::Build`] where there is no such callable, it is no entry, or a tensor ends beyond its place. [`Error::WouldBlock`] under `try_submit`
    /// while dispatches are in flight: an entry may copy, which waits for them. What a lease inside the entry returned;
    /// [`Error::Backend`] where the entry failed, with its traceback.
    pub fn run_entry(&self, callable: usize, args: &[(Arc<str>, EntryInput<'b>)]) -> Result<(), Error> {
        self.check_sticky()?;
        let callable = self.callable(callable)?;
        expect_kind(callable, CallableKind::Entry)?;
        self.check_control()?;
        for (_, input) in args {
            for tensor in input.tensors() {
                tensor.check()?;
            }
        }
        let args: Vec<EntryArg> = args
            .iter()
            .map(|(name, input)| EntryArg {
                name: Arc::clone(name),
                value: match input {
                    EntryInput::Tensor(tensor) => EntryValue::Tensor(tensor.arg),
                    EntryInput::Stacked(parts) => EntryValue::Stacked(parts.iter().map(|t| t.arg).collect()),
                    EntryInput::Scalar(value) => EntryValue::Scalar(*value),
                    EntryInput::Signed(value) => EntryValue::Signed(*value),
                    EntryInput::Float(value) => EntryValue::Float(*value),
                    EntryInput::Bool(value) => EntryValue::Bool(*value),
                },
            })
            .collect();
        let host = Host { build: self, error: RefCell::new(None) };
        let call = EntryCall { args: &args, config: self.config, frame: self.state.frame as u32 };
        crate::sync::assert_unlocked("run_entry");
        let ran = catch_unwind(AssertUnwindSafe(|| self.orchestrator.run_entry(callable.id, &call, &host)));
        // The entry may have submitted tasks that only the backend knows of.
        self.state.tasks.set(true);
        match ran {
            Ok(Ok(())) => self.check_sticky(),
            Ok(Err(CallbackError::Build(_))) => Err(host
                .error
                .into_inner()
                .unwrap_or_else(|| self.stick(Error::broken("an entry reports a refusal that was not given")))),
            Ok(Err(CallbackError::Backend(error))) => Err(self.failed(error)),
            Err(payload) => {
                let text = format!("the backend panicked: {}", panic_text(&*payload));
                Err(self.failed(BackendError::broken(Call::RunEntry, text)))
            }
        }
    }
}

/// An input of a host entry. A generated program computes with its scalars before it passes them on, so they come with
/// their kind: bits that an [`Arg::Scalar`](crate::Arg::Scalar) carries are given as what they mean, for example
/// `Signed(args.signed_at(0)?)`.
#[derive(Clone, Debug)]
pub enum EntryInput<'b> {
    /// A tensor.
    Tensor(Tensor<'b>),
    /// A tensor whose leading dimension runs over the list: parts of one shape and element type, each resident on a chip
    /// of its own. The entry may take whole parts out of it.
    Stacked(Vec<Tensor<'b>>),
    /// A scalar without a sign.
    Scalar(u64),
    /// A scalar with a sign.
    Signed(i64),
    /// A floating-point scalar.
    Float(f64),
    /// A truth value.
    Bool(bool),
}

impl<'b> EntryInput<'b> {
    fn tensors(&self) -> &[Tensor<'b>] {
        match self {
            Self::Tensor(tensor) => std::slice::from_ref(tensor),
            Self::Stacked(parts) => parts,
            Self::Scalar(_) | Self::Signed(_) | Self::Float(_) | Self::Bool(_) => &[],
        }
    }
}

/// The build as a host entry sees it. What goes wrong stays here; only a marker goes through the backend.
struct Host<'a, 'b> {
    build: &'a Build<'b>,
    error: RefCell<Option<Error>>,
}

impl Host<'_, '_> {
    fn keep<T>(&self, result: Result<T, Error>) -> Result<T, BuildFailed> {
        result.map_err(|error| {
            *self.error.borrow_mut() = Some(error);
            BuildFailed
        })
    }
}

impl EntryHost for Host<'_, '_> {
    fn open(&self, task: bool) -> Result<(), BuildFailed> {
        let opened = self.build.open();
        if task && opened.is_ok() {
            // Asked for right before the task.
            self.build.state.tasks.set(true);
        }
        self.keep(opened)
    }

    fn retains(&self) -> bool {
        self.build.inner.mode.persistent
    }

    fn domain(&self, name: &str, request: &DomainRequest, reply: &mut DomainAllocation) -> Result<(), BuildFailed> {
        let lease = self.keep(self.build.lease(name, request))?;
        reply.clone_from(lease.allocation(&self.build.inner.authority));
        Ok(())
    }
}
