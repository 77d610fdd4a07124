//! The prepared worker: the public face of this crate.

use std::sync::Arc;
use std::time::Duration;

use pto_simpler_sys::{Backend, BackendError, CallConfig, Capabilities, ChipId, Negotiated};

use crate::buffer::{DeviceTensor, HostBuffer};
use crate::completion::{Dispatch, Outcome};
use crate::error::{Error, Failure};
use crate::inner::Inner;
use crate::options::Options;
use crate::prepare::prepare;
use crate::program::{Args, DispatchId, Program, ProgramId, Target};
use crate::stats::ProgramStats;
use crate::submit::Patience;

/// One or several programs, ready to be dispatched on a started backend.
///
/// All methods take `&self` and may be called from any thread. Dropping the worker closes it, bounded by
/// [`Options::drop_limit`], and only logs what goes wrong; [`close`](Self::close) is the way to see errors.
#[derive(Debug)]
pub struct PreparedWorker {
    inner: Arc<Inner>,
}

impl PreparedWorker {
    /// Prepares `programs` on `backend`, which must not have been started.
    ///
    /// # Errors
    ///
    /// Misuse, found before the backend is touched: no programs, one program twice, targets that differ,
    /// [`Error::ResetWithoutPersistence`]. Found before the start: a target that differs from the backend's,
    /// [`Error::NoRetention`], [`Error::TooManyCallables`], [`Error::EntryWithoutProvider`]. [`Error::Backend`]: the
    /// backend failed. Once the backend is in our hands a failure closes it, once; the first error is returned.
    /// [`Error::BackendInUse`]: the backend is another worker's, or has been started or closed; it is left as it is.
    ///
    /// # Panics
    ///
    /// Where [`Program::spec`] does; nothing of the backend has been touched.
    pub fn prepare(
        programs: &[Arc<dyn Program>],
        options: &Options,
        backend: Arc<dyn Backend>,
    ) -> Result<Self, Error> {
        Self::prepare_with(programs, options, |_| Ok(backend))
    }

    /// As [`prepare`](Self::prepare), with a backend that is made only after programs and options have been checked.
    /// `backend` gets the target that the programs agree on, if they have one.
    ///
    /// # Errors
    ///
    /// As [`prepare`](Self::prepare); what `backend` returns.
    pub fn prepare_with(
        programs: &[Arc<dyn Program>],
        options: &Options,
        backend: impl FnOnce(Option<&Target>) -> Result<Arc<dyn Backend>, BackendError>,
    ) -> Result<Self, Error> {
        Ok(Self { inner: prepare(programs, options, backend)? })
    }

    /// The ids of the prepared programs, in the order of the list.
    pub fn programs(&self) -> impl ExactSizeIterator<Item = ProgramId> + '_ {
        (0..self.inner.programs.len()).map(|index| ProgramId { worker: self.inner.id, index })
    }

    /// The id of `program`, if this worker was prepared from it.
    #[must_use]
    pub fn id_of(&self, program: &Arc<dyn Program>) -> Option<ProgramId> {
        let index = self.inner.programs.iter().position(|p| Arc::ptr_eq(&p.program, program))?;
        Some(ProgramId { worker: self.inner.id, index })
    }

    /// The one program, where exactly one is prepared.
    ///
    /// # Errors
    ///
    /// [`Error::Ambiguous`] where there are several.
    pub fn only(&self) -> Result<ProgramId, Error> {
        match self.inner.programs.len() {
            1 => Ok(ProgramId { worker: self.inner.id, index: 0 }),
            programs => Err(Error::Ambiguous { programs }),
        }
    }

    /// Submits a dispatch of `program`: waits in line for a frame, builds the graph on this thread, and returns a
    /// handle once the backend has accepted the run. The arguments are copied (reference counts only); the caller
    /// keeps its list.
    ///
    /// Inside a graph builder of *another* worker this may wait for a build of this one. Two workers whose builders
    /// submit to each other on two threads wait for each other for good; see [`Program`].
    ///
    /// # Errors
    ///
    /// Misuse, with nothing done and the worker usable: [`Error::UnknownProgram`], [`Error::Arguments`],
    /// [`Error::Reentrant`], [`Error::Reset`] (slack), [`Error::Closing`], [`Error::Closed`]. What the builder
    /// returned: [`Error::Program`] with its own error, or the error of a [`Build`](crate::Build) call.
    /// [`Error::Poisoned`] or [`Error::Finished`] after an earlier failure. [`Error::Backend`] where the backend
    /// refused or failed; out of shared memory leaves the worker usable. [`Error::Failed`] where a failure that by
    /// itself could be tried again came after the opening and has poisoned the worker.
    ///
    /// # Panics
    ///
    /// Where the builder panics: its panic is resumed here, after the run has been cancelled.
    pub fn submit(&self, program: ProgramId, args: &Args) -> Result<Dispatch, Error> {
        self.inner.submit(program, args, None, Patience::Wait)
    }

    /// As [`submit`](Self::submit), with a configuration for this dispatch only, copied here.
    ///
    /// # Errors
    ///
    /// As [`submit`](Self::submit).
    pub fn submit_with(&self, program: ProgramId, args: &Args, config: &CallConfig) -> Result<Dispatch, Error> {
        self.inner.submit(program, args, Some(config), Patience::Wait)
    }

    /// As [`submit`](Self::submit), but never waits: neither for a frame, nor for another build, nor for the device
    /// queue. The arguments stay with the caller in any case.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] where it would have to wait, with no effect; otherwise as [`submit`](Self::submit).
    pub fn try_submit(&self, program: ProgramId, args: &Args) -> Result<Dispatch, Error> {
        self.inner.submit(program, args, None, Patience::Try)
    }

    /// As [`try_submit`](Self::try_submit), with a configuration for this dispatch only.
    ///
    /// # Errors
    ///
    /// As [`try_submit`](Self::try_submit).
    pub fn try_submit_with(&self, program: ProgramId, args: &Args, config: &CallConfig) -> Result<Dispatch, Error> {
        self.inner.submit(program, args, Some(config), Patience::Try)
    }

    /// Submits and waits.
    ///
    /// # Errors
    ///
    /// As [`submit`](Self::submit) and [`Dispatch::wait`].
    pub fn run(&self, program: ProgramId, args: &Args) -> Outcome {
        self.submit(program, args)?.wait()
    }

    /// Runs the one prepared program.
    ///
    /// # Errors
    ///
    /// [`Error::Ambiguous`] where several are prepared; otherwise as [`run`](Self::run).
    pub fn call(&self, args: &Args) -> Outcome {
        self.run(self.only()?, args)
    }

    /// A host buffer of `nbytes` bytes, zeroed. Allowed while dispatches are in flight and inside a builder.
    ///
    /// # Errors
    ///
    /// [`Error::Closing`] or [`Error::Closed`]; [`Error::Backend`]: zero bytes (misuse), or no room.
    pub fn create_buffer(&self, nbytes: u64) -> Result<HostBuffer, Error> {
        HostBuffer::create(&self.inner, nbytes)
    }

    /// Device memory of `nbytes` bytes on `chip` that outlives dispatches. No dispatch may be in flight.
    ///
    /// # Errors
    ///
    /// [`Error::Reentrant`] inside a builder; [`Error::Closing`] or [`Error::Closed`]; [`Error::Backend`]: zero
    /// bytes, unknown chip, dispatches in flight (misuse), or no room.
    pub fn alloc(&self, chip: ChipId, nbytes: u64) -> Result<DeviceTensor, Error> {
        DeviceTensor::create(&self.inner, chip, nbytes)
    }

    /// Frees device memory now. No dispatch may be in flight.
    ///
    /// # Errors
    ///
    /// [`Error::BufferInUse`] while another clone exists; [`Error::Reentrant`] inside a builder; otherwise as
    /// [`alloc`](Self::alloc). On an error the memory is freed at close.
    pub fn free(&self, tensor: DeviceTensor) -> Result<(), Error> {
        crate::reentry::refuse(self.inner.id, "freeing a device tensor")?;
        self.inner.check_open()?;
        if tensor.worker() != self.inner.id {
            return Err(Error::build("the tensor belongs to another worker"));
        }
        tensor.free()
    }

    /// What the backend can do.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.inner.capabilities
    }

    /// What was negotiated at the start.
    #[must_use]
    pub fn negotiated(&self) -> Option<Negotiated> {
        self.inner.negotiated.get().copied()
    }

    /// The dispatches that hold a frame: published and not terminal, or being built. Oldest first.
    #[must_use]
    pub fn in_flight(&self) -> Vec<DispatchId> {
        self.inner.admission.in_use().into_iter().map(DispatchId).collect()
    }

    /// Why the worker takes no more dispatches: the failure that poisoned or finished it, `None` while it is sound. It
    /// must then be closed and prepared again.
    ///
    /// Asking does not count as having been told: close still reports a failure that no waiter and no submitter has
    /// seen.
    #[must_use]
    pub fn failure(&self) -> Option<Arc<Failure>> {
        self.inner.final_failure()
    }

    /// What the dispatches of `program` have cost so far.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownProgram`].
    pub fn stats(&self, program: ProgramId) -> Result<ProgramStats, Error> {
        Ok(self.inner.program(program)?.counters.snapshot())
    }

    /// Closes the worker: turns new submissions away, waits for dispatches in flight, releases retained domains in
    /// reverse first-use order and verifies that each is freed, frees device tensors, closes the backend. Every step
    /// is attempted whatever failed before.
    ///
    /// Idempotent: concurrent callers wait for the one close and get its outcome, and so do later ones: a failure of one
    /// of its steps is repeated to each of them. After a failed backend close, calling again retries that and nothing
    /// else.
    ///
    /// # Errors
    ///
    /// [`Error::Close`] where something failed here, or where an earlier failure was seen by nobody: primary first,
    /// all others attached. [`Error::Reentrant`] inside a graph builder of the same worker. [`Error::Backend`]
    /// (misuse) where this thread may not block.
    pub fn close(&self) -> Result<(), Error> {
        self.inner.close(None)
    }

    /// As [`close`](Self::close), waiting for at most `limit` (`Duration::MAX` means no limit).
    ///
    /// # Errors
    ///
    /// [`Error::CloseTimeout`] with the dispatches still in flight; submissions stay refused, and calling close
    /// again goes on from there. Otherwise as [`close`](Self::close).
    pub fn close_timeout(&self, limit: Duration) -> Result<(), Error> {
        self.inner.close(Some(limit))
    }
}

impl Drop for PreparedWorker {
    fn drop(&mut self) {
        self.inner.close_on_drop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_handles_and_buffers_cross_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<PreparedWorker>();
        shared::<Dispatch>();
        shared::<HostBuffer>();
        shared::<DeviceTensor>();
        shared::<Args>();
        shared::<Error>();
    }
}
