//! Staging: the zero-filled host buffers that whole-buffer resets copy from (design rule 15).
//!
//! A resetting dispatch takes one buffer per *distinct* size before its run and gives all of them back after its
//! end. With [`Staging::Retained`](crate::Staging) buffers stay for the next dispatch, within a cap; they are only
//! ever read, so two dispatches may share one.

use pto_simpler_sys::{Backend, BackendError, Call, HostBufferId};

use crate::error::Error;
use crate::inner::guarded;
use crate::options::Staging;
use crate::sync::{Mutex, Rank};

#[derive(Clone, Copy, Debug)]
struct Kept {
    nbytes: u64,
    id: HostBufferId,
}

/// Zero buffers that outlive dispatches.
#[derive(Debug)]
pub(crate) struct StagingCache {
    cap_bytes: u64,
    buffers: Mutex<Vec<Kept>>,
}

impl StagingCache {
    pub(crate) fn new(policy: Staging) -> Self {
        let cap_bytes = match policy {
            Staging::PerDispatch => 0,
            Staging::Retained { cap_bytes } => cap_bytes,
        };
        Self { cap_bytes, buffers: Mutex::new(Rank::Staging, Vec::new()) }
    }

    /// Fills `sources` with one zero buffer per size, in order, and `owned` with those of them that belong to this
    /// dispatch alone, and returns how many had to be made. Those of this dispatch are released again where one of
    /// them cannot be had.
    pub(crate) fn acquire(
        &self,
        backend: &dyn Backend,
        sizes: &[u64],
        sources: &mut Vec<HostBufferId>,
        owned: &mut Vec<HostBufferId>,
    ) -> Result<u64, Error> {
        sources.clear();
        owned.clear();
        let mut made = 0;
        for &nbytes in sizes {
            match self.source(backend, nbytes, owned) {
                Ok((id, fresh)) => {
                    sources.push(id);
                    made += u64::from(fresh);
                }
                Err(error) => {
                    for failed in release(backend, owned) {
                        tracing::warn!(error = %failed, "a staging buffer could not be released");
                    }
                    sources.clear();
                    return Err(error.into());
                }
            }
        }
        Ok(made)
    }

    /// A zero buffer of this size, and whether it was made just now.
    fn source(
        &self,
        backend: &dyn Backend,
        nbytes: u64,
        owned: &mut Vec<HostBufferId>,
    ) -> Result<(HostBufferId, bool), BackendError> {
        if let Some(kept) = self.buffers.lock().iter().find(|k| k.nbytes == nbytes) {
            return Ok((kept.id, false));
        }
        let id = guarded(Call::CreateBuffer, || backend.create_buffer(nbytes))?;
        owned.push(id);
        // The backend's buffer may arrive dirty.
        guarded(Call::FillBuffer, || backend.fill_buffer(id, 0))?;
        let mut buffers = self.buffers.lock();
        let kept_bytes = buffers.iter().fold(0u64, |sum, k| sum.saturating_add(k.nbytes));
        if kept_bytes.saturating_add(nbytes) <= self.cap_bytes {
            buffers.push(Kept { nbytes, id });
            owned.pop();
        }
        Ok((id, true))
    }

    /// Releases what was kept. For close.
    pub(crate) fn clear(&self, backend: &dyn Backend) -> Vec<Error> {
        let mut ids: Vec<HostBufferId> = self.buffers.lock().drain(..).map(|k| k.id).collect();
        release(backend, &mut ids)
    }
}

/// Releases host buffers, each exactly once, and returns what failed. Allocates only on failure.
pub(crate) fn release(backend: &dyn Backend, buffers: &mut Vec<HostBufferId>) -> Vec<Error> {
    let mut failed = Vec::new();
    for id in buffers.drain(..) {
        if let Err(source) = guarded(Call::ReleaseBuffer, || backend.release_buffer(id)) {
            failed.push(Error::Release { what: format!("staging buffer {id}").into(), source });
        }
    }
    failed
}
