//! A journal of any orchestrator.

use std::fmt;

use pto_simpler_sys::{
    Backend, BackendError, CallConfig, CallableId, ChipId, CopyResult, CopyTo, DevicePlace, DomainAllocation,
    DomainRequest, HostBufferId, Orchestrator, TaskArgs,
};

use super::journaled::{Shared, is_zero};
use crate::journal::EventKind;

/// An orchestrator that records what passes through it.
pub(super) struct JournaledGraph<'a> {
    inner: &'a dyn Orchestrator,
    backend: &'a dyn Backend,
    shared: &'a Shared,
}

impl fmt::Debug for JournaledGraph<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JournaledGraph").field("run", &self.inner.run()).finish_non_exhaustive()
    }
}

impl<'a> JournaledGraph<'a> {
    pub(super) fn new(inner: &'a dyn Orchestrator, backend: &'a dyn Backend, shared: &'a Shared) -> Self {
        Self { inner, backend, shared }
    }

    /// Records what an allocation came to.
    fn allocated(&self, name: &str, request: &DomainRequest, reply: &DomainAllocation) {
        let Some(domain) = reply.id() else { return };
        let (run, name) = (self.inner.run(), name.into());
        let chips = request.workers.clone();
        let kind = if self.shared.meet(domain, &chips) {
            EventKind::Alloc { run, name, domain, window_bytes: request.window_bytes, chips }
        } else {
            EventKind::Reuse { run, name, domain }
        };
        self.shared.journal.record(kind);
    }

    fn submitted(&self, chip: Option<ChipId>, callable: CallableId) {
        let run = self.inner.run();
        self.shared.journal.record(EventKind::TaskSubmit { run, chip, callable });
    }
}

#[deny(clippy::missing_trait_methods)]
impl Orchestrator for JournaledGraph<'_> {
    pto_simpler_sys::forward_orchestrator!(
        inner: run, scope, alloc, run_entry,
    );

    fn allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        self.inner.allocate_domain(name, request, reply)?;
        self.allocated(name, request, reply);
        Ok(())
    }

    fn get_or_allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        retain_after_run: bool,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        self.inner.get_or_allocate_domain(name, request, retain_after_run, reply)?;
        self.allocated(name, request, reply);
        Ok(())
    }

    fn copy_to(&self, copy: &CopyTo) -> Result<(), BackendError> {
        let zero = is_zero(self.backend, copy);
        self.inner.copy_to(copy)?;
        self.shared.copied(Some(self.inner.run()), copy, zero);
        Ok(())
    }

    fn copy_from(&self, dst: HostBufferId, src: DevicePlace, nbytes: u64) -> Result<(), BackendError> {
        self.inner.copy_from(dst, src, nbytes)?;
        self.shared.copied_from(Some(self.inner.run()), src, nbytes);
        Ok(())
    }

    fn copy_batch(&self, copies: &[CopyTo], results: &mut Vec<CopyResult>) -> Result<(), BackendError> {
        let zeros: Vec<bool> = copies.iter().map(|copy| is_zero(self.backend, copy)).collect();
        self.inner.copy_batch(copies, results)?;
        for ((copy, zero), result) in copies.iter().zip(zeros).zip(results.iter()) {
            if *result == CopyResult::Done {
                self.shared.copied(Some(self.inner.run()), copy, zero);
            }
        }
        Ok(())
    }

    fn submit_next_level(
        &self,
        callable: CallableId,
        args: &TaskArgs,
        config: Option<&CallConfig>,
        worker: ChipId,
    ) -> Result<(), BackendError> {
        self.inner.submit_next_level(callable, args, config, worker)?;
        self.submitted(Some(worker), callable);
        Ok(())
    }

    fn submit_next_level_group(
        &self,
        callable: CallableId,
        args: &[TaskArgs],
        config: Option<&CallConfig>,
        workers: &[ChipId],
    ) -> Result<(), BackendError> {
        self.inner.submit_next_level_group(callable, args, config, workers)?;
        workers.iter().for_each(|worker| self.submitted(Some(*worker), callable));
        Ok(())
    }

    fn submit_sub(&self, callable: CallableId, args: &TaskArgs) -> Result<(), BackendError> {
        self.inner.submit_sub(callable, args)?;
        self.submitted(None, callable);
        Ok(())
    }
}
