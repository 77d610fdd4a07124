//! Host buffers: sizes, bounds, contents, release, and read-only zeros.

use pto_simpler_sys::{Call, ChipId, FailureKind, HostBufferId, TensorPlace};

use super::super::rig::{Must, Rig, broken, ensure, refused, same};
use super::super::{BackendFactory, Outcome};

/// What was written is read back, at any offset, and nothing else changes.
pub fn host_buffers_hold_what_was_written(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let backend = &rig.backend;
    let (a, b) = (rig.host(&[1; 4099])?, rig.host(&[2; 4099])?);
    backend.write_buffer(a, 4090, &[3; 9]).must("write up to the end")?;
    backend.write_buffer(a, 0, &[4]).must("write the first byte")?;
    let mut expected = vec![1; 4099];
    expected[4090..].fill(3);
    expected[0] = 4;
    same("the written buffer", rig.host_bytes(a, 4099)? == expected, true)?;
    same("the other buffer", rig.host_bytes(b, 4099)? == vec![2; 4099], true)?;
    let mut part = [0; 3];
    backend.read_buffer(a, 4089, &mut part).must("read in the middle")?;
    same("three bytes", part, [1, 3, 3])?;
    rig.finish()
}

/// Zero bytes are refused, for buffers and for zeros.
pub fn a_host_buffer_of_zero_bytes_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    refused("create_buffer(0)", Call::CreateBuffer, rig.backend.create_buffer(0))?;
    refused("create_zeros(0)", Call::CreateBuffer, rig.backend.create_zeros(0))?;
    rig.finish()
}

/// A buffer that does not fit is a typed failure with its size, and nothing is left of it.
pub fn a_host_buffer_that_does_not_fit_is_a_typed_failure(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    for requested_bytes in [u64::MAX, 1 << 62, 1 << 50] {
        let error = match rig.backend.create_buffer(requested_bytes) {
            Err(error) => error,
            Ok(id) => return broken(format!("a buffer of {requested_bytes} bytes: {id:?}")),
        };
        let kind = error.runtime().must("runtime failure")?.kind;
        same("kind", kind, FailureKind::OutOfSharedMemory { requested_bytes })?;
        ensure!(!error.must_reprepare(), "a buffer that does not fit is reported as final: {error:?}");
    }
    rig.is_usable()?;
    rig.finish()
}

/// Reads and writes out of bounds are refused, overflow included, and change nothing.
pub fn host_accesses_out_of_bounds_are_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let buffer = rig.host(&[6; 16])?;
    for (what, offset, nbytes) in [
        ("one byte over the end", 9, 8),
        ("an offset behind the end", 17, 1),
        ("an offset at the end", 16, 1),
        ("more than there is", 0, 17),
        ("an offset that overflows", u64::MAX, 2),
    ] {
        let mut bytes = vec![9; nbytes];
        refused(what, Call::WriteBuffer, rig.backend.write_buffer(buffer, offset, &bytes))?;
        refused(what, Call::ReadBuffer, rig.backend.read_buffer(buffer, offset, &mut bytes))?;
        same("bytes of a refused read", bytes, vec![9; nbytes])?;
    }
    same("the buffer", rig.host_bytes(buffer, 16)?, vec![6; 16])?;
    rig.finish()
}

/// Filling sets every byte of the buffer, and of no other.
pub fn filling_a_host_buffer_sets_every_byte(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let (a, b) = (rig.host(&[1; 4099])?, rig.host(&[2; 17])?);
    rig.backend.fill_buffer(a, 0xEE).must("fill_buffer")?;
    same("the filled buffer", rig.host_bytes(a, 4099)? == vec![0xEE; 4099], true)?;
    same("the other buffer", rig.host_bytes(b, 17)?, vec![2; 17])?;
    rig.finish()
}

/// A released buffer is gone: reading, writing, filling and releasing again are refused; ids are not used again.
pub fn a_released_host_buffer_is_gone(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let gone = rig.host(&[1; 16])?;
    rig.backend.release_buffer(gone).must("release_buffer")?;
    let next = rig.host(&[2; 16])?;
    ensure!(gone != next, "a new buffer has the id of a released one: {gone}");
    for buffer in [gone, HostBufferId::new(u32::MAX, u32::MAX)] {
        refused("read", Call::ReadBuffer, rig.backend.read_buffer(buffer, 0, &mut [0; 4]))?;
        refused("write", Call::WriteBuffer, rig.backend.write_buffer(buffer, 0, &[0; 4]))?;
        refused("fill", Call::FillBuffer, rig.backend.fill_buffer(buffer, 0))?;
        refused("release", Call::ReleaseBuffer, rig.backend.release_buffer(buffer))?;
    }
    same("the new buffer", rig.host_bytes(next, 16)?, vec![2; 16])?;
    rig.finish()
}

/// A buffer that a task of a run in flight has as an argument is not released; after the run it is.
pub fn a_task_argument_is_not_released_while_its_run_is_in_flight(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let buffer = rig.host(&[0; 8])?;
    let other = rig.host(&[0; 8])?;
    let gate = rig.gate()?;
    let (run, ()) = rig.submit(|o| {
        rig.store(o, ChipId(0), TensorPlace::Host(buffer), 2, 4)?;
        gate.hold(o)
    })?;
    gate.wait_entered()?;
    let early = rig.backend.release_buffer(buffer);
    let unused = rig.backend.release_buffer(other);
    gate.open()?;
    rig.succeeds(run)?;
    refused("release an argument of a run in flight", Call::ReleaseBuffer, early)?;
    unused.must("release a buffer that no task uses, while a run is in flight")?;
    same("what the task stored", rig.host_i32(buffer, 2)?, vec![4, 5])?;
    rig.backend.release_buffer(buffer).must("release after the run")?;
    drop(gate);
    rig.finish()
}

/// Buffers may be made, written, read and filled while runs are in flight.
pub fn host_buffers_may_be_made_while_runs_are_in_flight(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let (run, gate) = rig.held()?;
    let buffer = rig.host(&[3; 64])?;
    same("contents", rig.host_bytes(buffer, 64)?, vec![3; 64])?;
    rig.backend.fill_buffer(buffer, 4).must("fill_buffer")?;
    let zeros = rig.backend.create_zeros(64).must("create_zeros")?;
    same("zeros", rig.host_bytes(zeros, 64)?, vec![0; 64])?;
    rig.backend.release_buffer(buffer).must("release_buffer")?;
    gate.open()?;
    rig.succeeds(run)?;
    drop(gate);
    rig.finish()
}

/// Zeros read as zero and cannot be written or filled.
pub fn zeros_are_read_only(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let zeros = rig.backend.create_zeros(100).must("create_zeros")?;
    refused("write zeros", Call::WriteBuffer, rig.backend.write_buffer(zeros, 0, &[1]))?;
    refused("fill zeros", Call::FillBuffer, rig.backend.fill_buffer(zeros, 1))?;
    same("zeros", rig.host_bytes(zeros, 100)?, vec![0; 100])?;
    refused("read over the end", Call::ReadBuffer, rig.backend.read_buffer(zeros, 99, &mut [0; 2]))?;
    rig.backend.release_buffer(zeros).must("release_buffer")?;
    refused("release again", Call::ReleaseBuffer, rig.backend.release_buffer(zeros))?;
    rig.finish()
}
