//! Host buffers and resident device tensors of a worker.

use std::sync::Arc;

use pto_simpler_sys::{BackendError, Call, ChipId, CopySource, CopyTo, DeviceBufferId, DevicePlace, HostBufferId};

use crate::error::Error;
use crate::inner::{Inner, guarded};
use crate::reentry;

/// A host buffer. Clones share it; it is released when the last clone is gone, or by
/// [`release`](Self::release), and at the latest when the worker closes.
///
/// A dispatch holds a clone of every buffer among its arguments until it is terminal, so dropping yours early is
/// safe. Inside a graph builder the release of a dropped buffer is put off until the build is over.
#[derive(Clone, Debug)]
pub struct HostBuffer {
    shared: Arc<SharedHost>,
}

#[derive(Debug)]
struct SharedHost {
    worker: Arc<Inner>,
    id: HostBufferId,
    nbytes: u64,
    /// Whether the backend has been told; set by an explicit release, which drop must not repeat.
    released: std::sync::atomic::AtomicBool,
}

impl HostBuffer {
    pub(crate) fn create(worker: &Arc<Inner>, nbytes: u64) -> Result<Self, Error> {
        worker.check_open()?;
        let id = guarded(Call::CreateBuffer, || worker.backend.create_buffer(nbytes))
            .map_err(|error| worker.unless_closed(error))?;
        let shared = SharedHost { worker: Arc::clone(worker), id, nbytes, released: false.into() };
        let buffer = Self { shared: Arc::new(shared) };
        guarded(Call::FillBuffer, || worker.backend.fill_buffer(id, 0))
            .map_err(|error| worker.unless_closed(error))?;
        Ok(buffer)
    }

    /// Size in bytes.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.shared.nbytes
    }

    pub(crate) fn id(&self) -> HostBufferId {
        self.shared.id
    }

    pub(crate) fn worker(&self) -> u64 {
        self.shared.worker.id
    }

    /// Writes `bytes` from `offset` (bytes) on. What a dispatch in flight that reads the same bytes sees is
    /// unspecified.
    ///
    /// # Errors
    ///
    /// [`Error::Backend`]: out of bounds (misuse), or the backend failed.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let shared = &*self.shared;
        Ok(guarded(Call::WriteBuffer, || shared.worker.backend.write_buffer(shared.id, offset, bytes))?)
    }

    /// Reads into `bytes` from `offset` (bytes) on.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let shared = &*self.shared;
        Ok(guarded(Call::ReadBuffer, || shared.worker.backend.read_buffer(shared.id, offset, bytes))?)
    }

    /// Sets every byte.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn fill(&self, byte: u8) -> Result<(), Error> {
        let shared = &*self.shared;
        Ok(guarded(Call::FillBuffer, || shared.worker.backend.fill_buffer(shared.id, byte))?)
    }

    /// Releases the buffer now and reports how that went.
    ///
    /// # Errors
    ///
    /// [`Error::Reentrant`] inside a graph builder of the same worker. [`Error::BufferInUse`] while a dispatch or
    /// another clone holds the buffer; it stays usable through the others. [`Error::Backend`] where the backend
    /// failed; the buffer is then the backend's to clean.
    pub fn release(self) -> Result<(), Error> {
        reentry::refuse(self.worker(), "releasing a host buffer")?;
        // Refused, the buffer is dropped here, which puts its release off.
        self.shared.worker.backend.check_blocking()?;
        let shared = Arc::try_unwrap(self.shared).map_err(|_| Error::BufferInUse)?;
        shared.released.store(true, std::sync::atomic::Ordering::Relaxed);
        if shared.worker.shutdown.is_torn_down() {
            return Ok(());
        }
        match guarded(Call::ReleaseBuffer, || shared.worker.backend.release_buffer(shared.id)) {
            // A close was faster: the buffer is gone with the backend.
            Err(BackendError::Misuse(_)) if shared.worker.shutdown.is_torn_down() => Ok(()),
            released => Ok(released?),
        }
    }
}

impl Drop for SharedHost {
    fn drop(&mut self) {
        if !self.released.load(std::sync::atomic::Ordering::Relaxed) {
            self.worker.release_host(self.id);
        }
    }
}

/// Device memory on one chip that outlives dispatches: caches, weights. Clones share it; it lives until
/// [`PreparedWorker::free`](crate::PreparedWorker::free) or the close of the worker.
#[derive(Clone, Debug)]
pub struct DeviceTensor {
    shared: Arc<SharedDevice>,
}

#[derive(Debug)]
struct SharedDevice {
    worker: Arc<Inner>,
    id: DeviceBufferId,
    chip: ChipId,
    nbytes: u64,
}

impl DeviceTensor {
    pub(crate) fn create(worker: &Arc<Inner>, chip: ChipId, nbytes: u64) -> Result<Self, Error> {
        reentry::refuse(worker.id, "allocating a device tensor")?;
        worker.check_open()?;
        worker.backend.check_blocking()?;
        let id = guarded(Call::Alloc, || worker.backend.alloc(chip, nbytes))
            .map_err(|error| worker.unless_closed(error))?;
        worker.resident.lock().push(id);
        Ok(Self { shared: Arc::new(SharedDevice { worker: Arc::clone(worker), id, chip, nbytes }) })
    }

    /// Size in bytes.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.shared.nbytes
    }

    /// The chip worker it lives on.
    #[must_use]
    pub fn chip(&self) -> ChipId {
        self.shared.chip
    }

    pub(crate) fn id(&self) -> DeviceBufferId {
        self.shared.id
    }

    pub(crate) fn worker(&self) -> u64 {
        self.shared.worker.id
    }

    /// Copies all of `src` to the start of the tensor, outside runs.
    ///
    /// # Errors
    ///
    /// [`Error::Build`]: `src` belongs to another worker. [`Error::Backend`]: `src` is larger (misuse), dispatches are
    /// in flight (misuse), or the backend failed. [`Error::Reentrant`] inside a graph builder of the same worker.
    pub fn copy_to(&self, src: &HostBuffer) -> Result<(), Error> {
        self.outside_runs(src)?;
        let copy = CopyTo {
            dst: DevicePlace::Resident(self.shared.id),
            src: CopySource::Host(src.id()),
            nbytes: src.nbytes(),
        };
        Ok(guarded(Call::CopyTo, || self.shared.worker.backend.copy_to(&copy))?)
    }

    /// Copies from the start of the tensor into all of `dst`, outside runs.
    ///
    /// # Errors
    ///
    /// As [`copy_to`](Self::copy_to).
    pub fn copy_from(&self, dst: &HostBuffer) -> Result<(), Error> {
        self.outside_runs(dst)?;
        let place = DevicePlace::Resident(self.shared.id);
        let backend = &self.shared.worker.backend;
        Ok(guarded(Call::CopyFrom, || backend.copy_from(dst.id(), place, dst.nbytes()))?)
    }

    /// Whether a copy between the tensor and `host` may be made here.
    fn outside_runs(&self, host: &HostBuffer) -> Result<(), Error> {
        if host.worker() != self.worker() {
            // Its id may name a buffer of this worker too.
            return Err(Error::build("the buffer belongs to another worker"));
        }
        reentry::refuse(self.worker(), "a copy outside runs")?;
        self.shared.worker.check_open()?;
        Ok(self.shared.worker.backend.check_blocking()?)
    }

    /// Frees the tensor now.
    pub(crate) fn free(self) -> Result<(), Error> {
        let shared = Arc::try_unwrap(self.shared).map_err(|_| Error::BufferInUse)?;
        shared.worker.backend.check_blocking()?;
        let (worker, id) = (&shared.worker, shared.id);
        // Whoever takes it off the list frees it, this call or a close.
        let listed = {
            let mut resident = worker.resident.lock();
            let at = resident.iter().position(|known| *known == id);
            at.map(|at| resident.remove(at))
        };
        if listed.is_none() {
            return Ok(());
        }
        let freed = guarded(Call::Free, || worker.backend.free(id));
        if let Err(BackendError::Misuse(_)) = &freed {
            if worker.shutdown.is_torn_down() {
                return Ok(());
            }
            worker.resident.lock().push(id);
        }
        Ok(freed?)
    }
}
