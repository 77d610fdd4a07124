//! The opening: what comes before the first call of a builder that reaches the backend (design rule 12).

use std::sync::Arc;

use pto_reset::check_mapping;
use pto_simpler_sys::{BackendError, Call, CopyResult, CopyTo, DevicePlace};

use super::Build;
use crate::error::Error;
use crate::inner::{Storage, guarded};

impl Build<'_> {
    /// Opens the dispatch, once.
    pub(crate) fn open(&self) -> Result<(), Error> {
        self.check_sticky()?;
        if self.state.opened.get() {
            return Ok(());
        }
        self.check_poison()?;
        self.state.opened.set(true);
        // From here on a failure cannot be undone, whatever the failed call says of its own effect.
        self.register_retained()
            .and_then(|()| self.reset_retained())
            .map_err(|error| self.stick(self.explain(error)))?;
        tracing::trace!(dispatch = %self.state.id, program = %self.program.name, "opened");
        Ok(())
    }

    /// Why the opening failed. A backend frees the domains of a failed run, and gives up a chip that died in it, before
    /// it reports the run's end. Where a domain is gone (refused, or made anew) or a chip takes no copy, the end of an
    /// older dispatch may so be on its way, and be the cause. Waiting for it costs little: what is made anew or copied
    /// has waited for the older runs already.
    fn explain(&self, error: Error) -> Error {
        let told =
            matches!(error, Error::Backend(BackendError::Misuse(_)) | Error::Broken(_) | Error::ResetCopy { .. });
        if !told {
            return error;
        }
        if !self.state.would_wait {
            self.inner.admission.wait_older(self.state.id.0);
        }
        match self.inner.ended_by() {
            Some(cause) => {
                tracing::debug!(dispatch = %self.state.id, %error, "the opening failed after an older failure");
                cause
            }
            None => error,
        }
    }

    fn register_retained(&self) -> Result<(), Error> {
        let mut storage = self.state.storage.borrow_mut();
        let reply = &mut storage.reply;
        for domain in &self.state.plan.domains {
            guarded(Call::GetOrAllocateDomain, || {
                self.orchestrator.get_or_allocate_domain(&domain.key, &domain.request, true, reply)
            })?;
            if reply.id() != Some(domain.id) {
                return Err(Error::broken(format!(
                    "the backend answers {:?} for retained domain {} ({})",
                    reply.id(),
                    domain.key,
                    domain.id
                )));
            }
            check_mapping(&domain.request, reply)
                .map_err(|source| Error::Reset { key: Arc::clone(&domain.key), source })?;
        }
        Ok(())
    }

    fn reset_retained(&self) -> Result<(), Error> {
        let Some(plan) = &self.state.plan.reset else { return Ok(()) };
        let mut storage = self.state.storage.borrow_mut();
        let Storage { copies, results, sources, .. } = &mut **storage;
        plan.write_copies(sources, copies)
            .map_err(|error| Error::broken(format!("a checked reset plan cannot be carried out: {error}")))?;
        if copies.is_empty() {
            return Ok(());
        }
        guarded(Call::CopyTo, || self.orchestrator.copy_batch(copies, results))?;
        if results.len() != copies.len() {
            return Err(Error::broken(format!("{} results for {} copies", results.len(), copies.len())));
        }
        for (copy, result) in copies.iter().zip(results.iter()) {
            match result {
                CopyResult::Done => {}
                CopyResult::Failed(source) => return Err(self.reset_copy_error(copy, source.clone())),
                CopyResult::Skipped => return Err(Error::broken("a copy was skipped and none before it failed")),
            }
        }
        Ok(())
    }

    fn reset_copy_error(&self, copy: &CopyTo, source: BackendError) -> Error {
        let (id, chip) = match copy.dst {
            DevicePlace::DomainBuffer { domain, chip, .. } | DevicePlace::Window { domain, chip, .. } => {
                (domain, chip)
            }
            DevicePlace::Resident(_) => return source.into(),
        };
        let Some(domain) = self.state.plan.domains.iter().find(|d| d.id == id) else { return source.into() };
        let buffer: Arc<str> = match copy.dst {
            DevicePlace::DomainBuffer { buffer, .. } => domain
                .request
                .buffers
                .get(buffer as usize)
                .map_or_else(|| format!("#{buffer}").into(), |b| Arc::clone(&b.name)),
            DevicePlace::Window { offset, .. } => format!("bytes from {offset}").into(),
            DevicePlace::Resident(_) => "".into(),
        };
        let rank = domain.request.rank_of(chip).map_or(u32::MAX, |rank| rank as u32);
        Error::ResetCopy { key: Arc::clone(&domain.key), buffer, chip, rank, source }
    }
}
