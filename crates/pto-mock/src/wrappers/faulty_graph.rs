//! Faults over any orchestrator.

use std::fmt;

use pto_simpler_sys::{
    BackendError, BuildFailed, Call, CallConfig, CallableId, CallbackError, ChipId, CopyResult, CopyTo,
    DevicePlace, DomainAllocation, DomainRequest, EntryCall, EntryHost, HostBufferId, Orchestrator, ScratchId,
    TaskArgs,
};

use super::faulty::Shared;
use crate::faults::{FaultEffect, Fired};

/// An orchestrator that fails as a schedule says.
pub(super) struct FaultyGraph<'a> {
    inner: &'a dyn Orchestrator,
    shared: &'a Shared,
}

impl fmt::Debug for FaultyGraph<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyGraph").field("run", &self.inner.run()).finish_non_exhaustive()
    }
}

impl<'a> FaultyGraph<'a> {
    pub(super) fn new(inner: &'a dyn Orchestrator, shared: &'a Shared) -> Self {
        Self { inner, shared }
    }

    /// Forwards an allocation; a lost reply leaves the caller with an empty one.
    fn allocation(
        &self,
        call: Call,
        request: &DomainRequest,
        reply: &mut DomainAllocation,
        forward: impl FnOnce(&mut DomainAllocation) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let fired = self.shared.several(call, &request.workers);
        let result = self.shared.faults.around(fired, || forward(reply));
        if result.is_err() {
            reply.clear();
        }
        result
    }

    /// Forwards a task submission, unless a task fault takes the task out.
    fn task(
        &self,
        call: Option<Fired>,
        tasks: impl IntoIterator<Item = Option<Fired>>,
        forward: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let hits: Vec<Fired> = tasks.into_iter().flatten().collect();
        let dropped = hits.iter().any(|fired| fired.fault.effect == FaultEffect::Before);
        let submitted = self.shared.faults.around(call, || if dropped { Ok(()) } else { forward() });
        submitted?;
        hits.into_iter().for_each(|fired| self.shared.fail_task(self.inner.run(), fired));
        Ok(())
    }

    fn callback(
        &self,
        call: Call,
        forward: impl FnOnce() -> Result<(), CallbackError>,
    ) -> Result<(), CallbackError> {
        let mut inner = Ok(());
        let outer = self.shared.faults.around(self.shared.faults.whole(call), || {
            inner = forward();
            Ok(())
        });
        inner.and(outer.map_err(CallbackError::from))
    }
}

#[deny(clippy::missing_trait_methods)]
impl Orchestrator for FaultyGraph<'_> {
    pto_simpler_sys::forward_orchestrator!(
        inner: run,
    );

    fn allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        self.allocation(Call::AllocateDomain, request, reply, |reply| {
            self.inner.allocate_domain(name, request, reply)
        })
    }

    fn get_or_allocate_domain(
        &self,
        name: &str,
        request: &DomainRequest,
        retain_after_run: bool,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        self.allocation(Call::GetOrAllocateDomain, request, reply, |reply| {
            self.inner.get_or_allocate_domain(name, request, retain_after_run, reply)
        })
    }

    fn copy_to(&self, copy: &CopyTo) -> Result<(), BackendError> {
        let fired = self.shared.on_place(Call::CopyTo, copy.dst);
        self.shared.faults.around(fired, || self.inner.copy_to(copy))
    }

    fn copy_from(&self, dst: HostBufferId, src: DevicePlace, nbytes: u64) -> Result<(), BackendError> {
        let fired = self.shared.on_place(Call::CopyFrom, src);
        self.shared.faults.around(fired, || self.inner.copy_from(dst, src, nbytes))
    }

    fn copy_batch(&self, copies: &[CopyTo], results: &mut Vec<CopyResult>) -> Result<(), BackendError> {
        results.clear();
        let mut forwarded = Vec::with_capacity(copies.len());
        let mut places = Vec::with_capacity(copies.len());
        let mut decided: Vec<Option<CopyResult>> = Vec::with_capacity(copies.len());
        let (mut stopped, mut hangs) = (Vec::new(), Vec::new());
        for (index, copy) in copies.iter().enumerate() {
            let chip = self.shared.chip_of(copy.dst);
            if stopped.contains(&chip) {
                decided.push(Some(CopyResult::Skipped));
                continue;
            }
            let fired = self.shared.on_place(Call::CopyTo, copy.dst);
            let effect = fired.map(|fired| fired.fault.effect);
            if effect != Some(FaultEffect::Before) {
                forwarded.push(*copy);
                places.push(index);
            }
            match (effect, fired) {
                (Some(FaultEffect::Hang), Some(fired)) => {
                    hangs.push(fired);
                    decided.push(None);
                }
                (Some(_), Some(fired)) => {
                    stopped.push(chip);
                    decided.push(Some(CopyResult::Failed(fired.error())));
                }
                _ => decided.push(None),
            }
        }
        for fired in &hangs {
            self.shared.faults.hang(fired);
        }
        let mut real = Vec::with_capacity(forwarded.len());
        self.inner.copy_batch(&forwarded, &mut real)?;
        results.extend(decided.iter().map(|result| result.clone().unwrap_or(CopyResult::Skipped)));
        for (index, outcome) in places.into_iter().zip(real) {
            let injected = decided.get(index).is_some_and(Option::is_some);
            // A genuine failure goes before an injected one.
            if let Some(place) = results.get_mut(index)
                && (!injected || outcome != CopyResult::Done)
            {
                *place = outcome;
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
        let faults = &self.shared.faults;
        let (call, task) = (faults.single(Call::SubmitNextLevel, worker), faults.single(Call::Task, worker));
        self.task(call, [task], || self.inner.submit_next_level(callable, args, config, worker))
    }

    fn submit_next_level_group(
        &self,
        callable: CallableId,
        args: &[TaskArgs],
        config: Option<&CallConfig>,
        workers: &[ChipId],
    ) -> Result<(), BackendError> {
        let call = self.shared.several(Call::SubmitNextLevelGroup, workers);
        let tasks: Vec<_> = workers.iter().map(|chip| self.shared.faults.single(Call::Task, *chip)).collect();
        self.task(call, tasks, || self.inner.submit_next_level_group(callable, args, config, workers))
    }

    fn submit_sub(&self, callable: CallableId, args: &TaskArgs) -> Result<(), BackendError> {
        let faults = &self.shared.faults;
        let (call, task) = (faults.whole(Call::SubmitSub), faults.whole(Call::Task));
        self.task(call, [task], || self.inner.submit_sub(callable, args))
    }

    fn scope(&self, body: &mut dyn FnMut() -> Result<(), BuildFailed>) -> Result<(), CallbackError> {
        self.callback(Call::Scope, || self.inner.scope(body))
    }

    fn alloc(&self, nbytes: u64) -> Result<ScratchId, BackendError> {
        let faults = &self.shared.faults;
        faults.around(faults.whole(Call::AllocScratch), || self.inner.alloc(nbytes))
    }

    fn run_entry(
        &self,
        entry: CallableId,
        call: &EntryCall<'_>,
        host: &dyn EntryHost,
    ) -> Result<(), CallbackError> {
        self.callback(Call::RunEntry, || self.inner.run_entry(entry, call, host))
    }
}
