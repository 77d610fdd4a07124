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
            if let EntryInput::Tensor(tensor) = input {
                tensor.check()?;
            }
        }
        let args: Vec<EntryArg> = args
            .iter()
            .map(|(name, input)| EntryArg {
                name: Arc::clone(name),
                value: match input {
                    EntryInput::Tensor(tensor) => EntryValue::Tensor(tensor.arg),
                    EntryInput::Scalar(value) => EntryValue::Scalar(*value),
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

/// An input of a host entry.
#[derive(Clone, Copy, Debug)]
pub enum EntryInput<'b> {
    /// A tensor.
    Tensor(Tensor<'b>),
    /// A scalar.
    Scalar(u64),
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
    fn open(&self) -> Result<(), BuildFailed> {
        let opened = self.build.open();
        if opened.is_ok() {
            // Asked for right before the entry's first own effect.
            self.build.state.tasks.set(true);
        }
        self.keep(opened)
    }

    fn domain(&self, name: &str, request: &DomainRequest, reply: &mut DomainAllocation) -> Result<(), BuildFailed> {
        let lease = self.keep(self.build.lease(name, request))?;
        reply.clone_from(lease.allocation(&self.build.inner.authority));
        Ok(())
    }
}
