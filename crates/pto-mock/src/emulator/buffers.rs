//! Host buffers and resident device memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pto_simpler_sys::{BackendError, Call, ChipId, DeviceBufferId, FailureKind, HostBufferId, RuntimeFailure};

use super::Core;
use super::control::host_region;
use super::domain::{DIRT, segment_failure, take_address};
use super::run::closed_by_abandon;
use super::state::{HostMemory, Phase, Resident};
use super::window::Region;
use crate::journal::EventKind;
use crate::memory::{OutOfBounds, SegmentError};

impl Core {
    pub(crate) fn create_buffer(&self, nbytes: u64, zeros: bool) -> Result<HostBufferId, BackendError> {
        let call = Call::CreateBuffer;
        {
            let state = self.state.lock();
            if state.abandoned {
                return Err(closed_by_abandon(call));
            }
            if !matches!(state.phase, Phase::New | Phase::Ready) {
                let message = format!("the worker is {:?}; buffers are created in New or Ready", state.phase);
                return Err(BackendError::misuse(call, message));
            }
        }
        if nbytes == 0 {
            return Err(BackendError::misuse(call, "nbytes is 0; a host buffer needs at least 1 byte"));
        }
        self.faults.around(self.faults.whole(call), || {
            let region = self.host_memory(call, nbytes, !zeros)?;
            let mut state = self.state.lock();
            // A close or an abandon may have swept the table while the memory was made.
            if state.abandoned {
                return Err(closed_by_abandon(call));
            }
            if matches!(state.phase, Phase::Closing | Phase::Closed | Phase::Failed) {
                let message =
                    format!("the worker is {:?} by now; buffers are created in New or Ready", state.phase);
                return Err(BackendError::misuse(call, message));
            }
            let buffer = state.hosts.insert(HostMemory { region, users: 0 });
            let buffer = buffer.ok_or_else(|| BackendError::broken(call, "the table of host buffers is full"))?;
            state.add_host_bytes(nbytes);
            self.journal.record(EventKind::BufferCreate { buffer, nbytes, zeros });
            Ok(buffer)
        })
    }

    /// Fresh host memory, dirty where the options say so.
    pub(crate) fn host_memory(&self, call: Call, nbytes: u64, writable: bool) -> Result<Region, BackendError> {
        let segment = self.segments.zeroed(nbytes, writable).map_err(|e| segment_failure(call, &e))?;
        if writable && self.options.dirty_host_buffers {
            segment.fill(0, nbytes, DIRT).map_err(|e| BackendError::broken(call, e.to_string()))?;
        }
        Ok(Region { segment: Arc::new(segment), start: 0, len: nbytes, writable, freed: Arc::default() })
    }

    pub(crate) fn write_buffer(&self, id: HostBufferId, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        let call = Call::WriteBuffer;
        let region = host_region(&self.state.lock(), call, id)?;
        refuse_read_only(call, id, &region)?;
        check_bounds(call, id, offset, bytes.len() as u64, region.len)?;
        self.faults.around(self.faults.whole(call), || {
            region.segment.store(offset, bytes).map_err(|e| outside(call, id, e))?;
            self.board.changed();
            Ok(())
        })
    }

    pub(crate) fn read_buffer(&self, id: HostBufferId, offset: u64, out: &mut [u8]) -> Result<(), BackendError> {
        let call = Call::ReadBuffer;
        let region = host_region(&self.state.lock(), call, id)?;
        check_bounds(call, id, offset, out.len() as u64, region.len)?;
        self.faults
            .around(self.faults.whole(call), || region.segment.load(offset, out).map_err(|e| outside(call, id, e)))
    }

    pub(crate) fn fill_buffer(&self, id: HostBufferId, byte: u8) -> Result<(), BackendError> {
        let call = Call::FillBuffer;
        let region = host_region(&self.state.lock(), call, id)?;
        refuse_read_only(call, id, &region)?;
        self.faults.around(self.faults.whole(call), || {
            region.segment.fill(0, region.len, byte).map_err(|e| outside(call, id, e))?;
            self.board.changed();
            self.journal.record(EventKind::BufferFill { buffer: id, byte });
            Ok(())
        })
    }

    pub(crate) fn release_buffer(&self, id: HostBufferId) -> Result<(), BackendError> {
        let call = Call::ReleaseBuffer;
        self.refuse_in_build(call)?;
        self.check_release(id)?;
        self.faults.around(self.faults.whole(call), || {
            self.check_release(id)?;
            let mut state = self.state.lock();
            let Some(memory) = state.hosts.remove(id) else { return Ok(()) };
            memory.region.freed.store(true, Ordering::Release);
            let nbytes = memory.region.len;
            state.host_bytes -= nbytes;
            self.journal.record(EventKind::BufferRelease { buffer: id, nbytes });
            drop(state);
            drop(memory);
            Ok(())
        })
    }

    fn check_release(&self, id: HostBufferId) -> Result<(), BackendError> {
        let state = self.state.lock();
        host_region(&state, Call::ReleaseBuffer, id)?;
        let users = state.hosts.get(id).map_or(0, |memory| memory.users);
        if users > 0 {
            let message =
                format!("{id} is still referenced by {users} task(s) of runs in flight; wait for their end");
            return Err(BackendError::misuse(Call::ReleaseBuffer, message));
        }
        Ok(())
    }

    pub(crate) fn alloc(&self, chip: ChipId, nbytes: u64) -> Result<DeviceBufferId, BackendError> {
        let call = Call::Alloc;
        self.check_chip(call, chip)?;
        if nbytes == 0 {
            return Err(BackendError::misuse(call, "nbytes is 0; device memory needs at least 1 byte"));
        }
        let _access = self.access(call)?;
        if let Some(dead) = self.state.lock().lane(chip).and_then(|lane| lane.dead.clone()) {
            return Err(dead);
        }
        self.faults.around(self.faults.single(call, chip), || {
            self.check_device_memory(call, chip, nbytes)?;
            let segment = self.segments.zeroed(nbytes, true).map_err(|e| match e {
                SegmentError::Full { bytes, .. } => RuntimeFailure::new(call, "OutOfMemory", e.to_string())
                    .with_kind(FailureKind::OutOfDeviceMemory { requested_bytes: bytes })
                    .on_chip(chip),
                SegmentError::System { .. } => segment_failure(call, &e).on_chip(chip),
            })?;
            let region =
                Region { segment: Arc::new(segment), start: 0, len: nbytes, writable: true, freed: Arc::default() };
            let mut state = self.state.lock();
            if let Some(lane) = state.lane_mut(chip) {
                take_address(&mut lane.next_address, nbytes);
                lane.committed_bytes = lane.committed_bytes.saturating_add(nbytes);
            }
            let buffer = state.residents.insert(Resident { chip, region, mapped_bytes: nbytes });
            let buffer = buffer.ok_or_else(|| BackendError::broken(call, "the table of device memory is full"))?;
            self.journal.record(EventKind::DeviceAlloc { buffer, chip, nbytes });
            Ok(buffer)
        })
    }

    pub(crate) fn free(&self, id: DeviceBufferId) -> Result<(), BackendError> {
        let call = Call::Free;
        let _access = self.access(call)?;
        let chip = {
            let state = self.state.lock();
            let resident = state.residents.get(id);
            resident.map(|resident| resident.chip).ok_or_else(|| {
                let what = if state.residents.ever(id) { "was freed" } else { "was never allocated here" };
                BackendError::misuse(call, format!("{id} {what}; free live device memory once"))
            })?
        };
        self.faults.around(self.faults.single(call, chip), || {
            let mut state = self.state.lock();
            let Some(resident) = state.residents.remove(id) else { return Ok(()) };
            resident.region.freed.store(true, Ordering::Release);
            if let Some(lane) = state.lane_mut(chip) {
                lane.committed_bytes -= resident.mapped_bytes;
            }
            self.journal.record(EventKind::DeviceFree(id));
            drop(state);
            drop(resident);
            Ok(())
        })
    }

    pub(crate) fn committed_device_memory(&self, chip: ChipId) -> Result<u64, BackendError> {
        let call = Call::CommittedDeviceMemory;
        self.check_chip(call, chip)?;
        {
            let state = self.state.lock();
            if state.abandoned {
                return Err(closed_by_abandon(call));
            }
            self.require_ready(&state, call)?;
            if let Some(dead) = state.lane(chip).and_then(|lane| lane.dead.clone()) {
                return Err(dead);
            }
        }
        self.faults.around(self.faults.single(call, chip), || {
            Ok(self.state.lock().lane(chip).map_or(0, |lane| lane.committed_bytes))
        })
    }

    pub(crate) fn check_chip(&self, call: Call, chip: ChipId) -> Result<(), BackendError> {
        let chips = self.capabilities.chips();
        if chip.0 < chips {
            return Ok(());
        }
        let message = format!("worker {} is not a registered worker; it lies outside [0, {chips})", chip.0);
        Err(BackendError::misuse(call, message))
    }
}

fn refuse_read_only(call: Call, id: HostBufferId, region: &Region) -> Result<(), BackendError> {
    if region.segment.writable() {
        return Ok(());
    }
    Err(BackendError::misuse(call, format!("{id} is a read-only buffer of zeros; write to another buffer")))
}

fn check_bounds(call: Call, id: HostBufferId, offset: u64, len: u64, size: u64) -> Result<(), BackendError> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(outside(call, id, OutOfBounds { offset, len, size })),
    }
}

fn outside(call: Call, id: HostBufferId, error: OutOfBounds) -> BackendError {
    BackendError::misuse(call, format!("{id}: {error}; stay inside the buffer"))
}
