//! Host buffers: memory that tasks of every chip can read and write.
//!
//! Before the start they are anonymous shared memory, which the children inherit; after it the runtime makes them, and
//! the binding reserves them before use. See `store.rs` for what becomes of released ones.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nix::errno::Errno;
use pyo3::intern;
use pyo3::prelude::*;

use super::memory::Mapping;
use super::shared::{HostBuffer, Phase, Shared, unknown};
use super::views::Views;
use super::worker::SimplerBackend;
use super::{result, room};
use crate::error::{BackendError, Call, FailureKind, RuntimeFailure};
use crate::ids::HostBufferId;

impl SimplerBackend {
    pub(super) fn host_buffer(&self, nbytes: u64, read_only: bool) -> Result<HostBufferId, BackendError> {
        let call = Call::CreateBuffer;
        let shared = &*self.shared;
        shared.check_caller(call)?;
        shared.require(call, &[Phase::New, Phase::Ready])?;
        let len = length(call, nbytes)?;
        if shared.phase() == Phase::New {
            let mapping = Mapping::anonymous(len)
                .map_err(|e| no_memory(call, nbytes, "shared memory cannot be mapped", e))?;
            let number = self.next_buffer.fetch_add(1, Ordering::Relaxed);
            let object = Python::attach(|py| {
                shared
                    .api
                    .wrap_inherited(py, mapping.address(), nbytes, number, !read_only)
                    .map(Bound::unbind)
                    .map_err(|e| BackendError::from(result::failure(py, call, &e)))
            })?;
            // Chip processes that a start forks from now on inherit it; those of one that has begun may not.
            shared.require(call, &[Phase::New])?;
            return Ok(shared.add_host(object, Arc::new(mapping), nbytes, read_only, None));
        }
        shared.new_host(nbytes, read_only)
    }

    pub(super) fn mapping(
        &self,
        call: Call,
        id: HostBufferId,
        writing: bool,
    ) -> Result<(Arc<Mapping>, u64), BackendError> {
        self.shared.check_process(call)?;
        let host = self.shared.host.lock();
        let buffer = host.at(id).ok_or_else(|| unknown(call, id))?;
        if writing && buffer.read_only {
            return Err(BackendError::misuse(call, format!("{id} is read-only; write to another buffer")));
        }
        Ok((Arc::clone(&buffer.mapping), buffer.nbytes))
    }
}

/// A size that can be mapped.
fn length(call: Call, nbytes: u64) -> Result<NonZeroUsize, BackendError> {
    if nbytes == 0 {
        return Err(BackendError::misuse(call, "0 bytes asked for; ask for at least 1"));
    }
    let len = usize::try_from(nbytes).ok().filter(|n| isize::try_from(*n).is_ok());
    len.and_then(NonZeroUsize::new).ok_or_else(|| {
        RuntimeFailure::new(call, "OverflowError", "more than the address space")
            .with_kind(FailureKind::OutOfSharedMemory { requested_bytes: nbytes })
            .into()
    })
}

fn no_memory(call: Call, nbytes: u64, what: &str, e: Errno) -> RuntimeFailure {
    let failure = RuntimeFailure::new(call, "OSError", format!("{what}: {e}"));
    match e {
        Errno::ENOSPC | Errno::ENOMEM | Errno::EFBIG => {
            failure.with_kind(FailureKind::OutOfSharedMemory { requested_bytes: nbytes })
        }
        _ => failure,
    }
}

/// A buffer of the runtime, its memory reserved, and our mapping of it.
pub(super) struct Reserved {
    pub(super) object: Py<PyAny>,
    mapping: Mapping,
    pub(super) name: String,
}

pub(super) fn out_of_bounds(call: Call, id: HostBufferId, offset: u64, len: usize, nbytes: u64) -> BackendError {
    BackendError::misuse(call, format!("{len} bytes from byte {offset} on, and {id} has {nbytes}"))
}

impl Shared {
    /// A host buffer of a started worker, with whatever it contains; also inside a build.
    pub(crate) fn new_host(&self, nbytes: u64, read_only: bool) -> Result<HostBufferId, BackendError> {
        let call = Call::CreateBuffer;
        length(call, nbytes)?;
        if !read_only && let Some(stored) = self.stored_host(nbytes) {
            return Ok(self.host.lock().add(stored));
        }
        let made = Python::attach(|py| {
            let worker = self.worker(py, call)?;
            let made = self.reserved_buffer(py, call, &worker, nbytes)?;
            if read_only && let Err(e) = self.api.make_read_only(made.object.bind(py)) {
                self.defer_release(made.object, Some(made.name));
                return Err(result::failure(py, call, &e).into());
            }
            Ok(made)
        });
        match made {
            Ok(made) => Ok(self.add_host(made.object, Arc::new(made.mapping), nbytes, read_only, Some(made.name))),
            Err(error) => {
                // What released buffers hold may be what is missing next time.
                self.empty_store();
                self.drain_deferred();
                Err(error)
            }
        }
    }

    /// Makes a buffer of zeros; with no room for it, what was made of it is released when no run is in flight.
    pub(super) fn reserved_buffer(
        &self,
        py: Python<'_>,
        call: Call,
        worker: &Bound<'_, PyAny>,
        nbytes: u64,
    ) -> Result<Reserved, BackendError> {
        let len = length(call, nbytes)?;
        room::check_buffer(call, nbytes)?;
        let buffer = self.api.create_buffer(worker, nbytes).map_err(|e| result::host_allocation(py, &e, nbytes))?;
        let name =
            || -> PyResult<String> { buffer.getattr(intern!(py, "shm"))?.getattr(intern!(py, "name"))?.extract() };
        let name = name();
        let known = name.as_ref().ok().cloned();
        let mapped = name.map_err(|e| BackendError::from(result::failure(py, call, &e))).and_then(|name| {
            py.detach(|| Mapping::named(&name, len))
                .map(|mapping| (name, mapping))
                .map_err(|e| no_memory(call, nbytes, "shared memory cannot be reserved", e).into())
        });
        match mapped {
            Ok((name, mapping)) => Ok(Reserved { object: buffer.unbind(), mapping, name }),
            Err(error) => {
                self.defer_release(buffer.unbind(), known);
                Err(error)
            }
        }
    }

    fn add_host(
        &self,
        object: Py<PyAny>,
        mapping: Arc<Mapping>,
        nbytes: u64,
        read_only: bool,
        name: Option<String>,
    ) -> HostBufferId {
        self.host.lock().add(HostBuffer { mapping, views: Views::new(object), nbytes, read_only, name })
    }
}
