//! Device memory that outlives runs, and the account of what a chip has committed.

use pto_simpler_sys::{
    Call, ChipId, CopySource, CopyTo, DeviceBufferId, DevicePlace, Effect, FailureKind, TensorPlace,
};

use super::super::rig::{Must, Rig, broken, ensure, refused, same, to_i32};
use super::super::{BackendFactory, Outcome};

/// Resident memory is zero when it is allocated, also after a dirty predecessor.
pub fn resident_memory_is_zero_when_allocated(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    for _ in 0..3 {
        let buffer = rig.backend.alloc(ChipId(0), 4099).must("alloc")?;
        let bytes = rig.peek(DevicePlace::Resident(buffer), 4099)?;
        same("bytes that are not 0", bytes.iter().filter(|byte| **byte != 0).count(), 0)?;
        rig.backend.copy_to(&rig.copy(DevicePlace::Resident(buffer), &[0xA5; 4099])?).must("copy_to")?;
        rig.backend.free(buffer).must("free")?;
    }
    rig.finish()
}

/// Copies outside runs are exact, bounded, and never touch neighbours.
pub fn copies_outside_runs_are_exact(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let buffers = [
        rig.backend.alloc(ChipId(0), 17).must("alloc")?,
        rig.backend.alloc(ChipId(0), 17).must("alloc")?,
        rig.backend.alloc(ChipId(1), 17).must("alloc")?,
    ];
    let places = buffers.map(DevicePlace::Resident);
    rig.backend.copy_to(&rig.copy(places[1], &[8; 17])?).must("copy_to")?;
    let large = rig.copy(places[1], &[9; 18])?;
    refused("18 bytes into 17", Call::CopyTo, rig.backend.copy_to(&large))?;
    let CopySource::Host(host) = large.src else { return Ok(()) };
    refused("18 bytes out of 17", Call::CopyFrom, rig.backend.copy_from(host, places[1], 18))?;
    refused("zero bytes", Call::CopyTo, rig.backend.copy_to(&CopyTo { nbytes: 0, ..large }))?;
    rig.backend.copy_to(&rig.copy(places[1], &[7; 5])?).must("copy of a prefix")?;
    let mut expected = vec![7; 5];
    expected.resize(17, 8);
    same("the written buffer", rig.peek(places[1], 17)?, expected)?;
    same("its neighbour", rig.peek(places[0], 17)?, vec![0; 17])?;
    same("the other chip", rig.peek(places[2], 17)?, vec![0; 17])?;
    rig.finish()
}

/// Resident memory outlives runs, and tasks and control copies use it.
pub fn resident_memory_outlives_runs(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let buffer = rig.backend.alloc(ChipId(0), 8).must("alloc")?;
    rig.run(|o| rig.store(o, ChipId(0), TensorPlace::Resident(buffer), 2, 7))?;
    rig.run(|o| {
        same("seen by the next run", to_i32(&rig.read(o, DevicePlace::Resident(buffer), 8)?), vec![7, 8])?;
        rig.add(o, ChipId(0), TensorPlace::Resident(buffer), 2, 1)
    })?;
    same("seen outside runs", to_i32(&rig.peek(DevicePlace::Resident(buffer), 8)?), vec![8, 9])?;
    rig.backend.free(buffer).must("free")?;
    rig.finish()
}

/// Zero bytes and chips that do not exist are refused.
pub fn an_invalid_allocation_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    refused("zero bytes", Call::Alloc, rig.backend.alloc(ChipId(0), 0))?;
    for chip in [1, u32::MAX] {
        refused("an unknown chip", Call::Alloc, rig.backend.alloc(ChipId(chip), 8))?;
        let committed = rig.backend.committed_device_memory(ChipId(chip));
        refused("an unknown chip", Call::CommittedDeviceMemory, committed)?;
    }
    rig.is_usable()?;
    rig.finish()
}

/// Freeing twice, or something that never was, is refused; ids are not used again.
pub fn freed_memory_is_gone(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let gone = rig.backend.alloc(ChipId(0), 8).must("alloc")?;
    rig.backend.free(gone).must("free")?;
    let next = rig.backend.alloc(ChipId(0), 8).must("alloc")?;
    ensure!(gone != next, "new memory has the id of freed memory: {gone}");
    let host = rig.host(&[1; 8])?;
    for buffer in [gone, DeviceBufferId::new(u32::MAX, u32::MAX)] {
        refused("free", Call::Free, rig.backend.free(buffer))?;
        let place = DevicePlace::Resident(buffer);
        let copy = CopyTo { dst: place, src: CopySource::Host(host), nbytes: 8 };
        refused("copy into it", Call::CopyTo, rig.backend.copy_to(&copy))?;
        refused("copy out of it", Call::CopyFrom, rig.backend.copy_from(host, place, 8))?;
    }
    same("the new memory", rig.peek(DevicePlace::Resident(next), 8)?, vec![0; 8])?;
    rig.finish()
}

/// Committed device memory grows with an allocation by at least its size, on its chip alone, and shrinks back.
pub fn committed_memory_grows_and_shrinks(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let before = rig.committed()?;
    let small = rig.backend.alloc(ChipId(1), 4096).must("alloc")?;
    let large = rig.backend.alloc(ChipId(1), 1 << 20).must("alloc")?;
    let with = rig.committed()?;
    same("committed on the other chip", with.first(), before.first())?;
    let grown = with.get(1).zip(before.get(1)).and_then(|(with, before)| with.checked_sub(*before));
    ensure!(grown.is_some_and(|n| n >= 4096 + (1 << 20)), "grown by {grown:?} bytes for 1052672");
    rig.backend.free(large).must("free")?;
    rig.backend.free(small).must("free")?;
    same("committed after freeing", rig.committed()?, before)?;
    rig.finish()
}

/// Device memory that a chip does not have is a typed failure, with the size and the chip, and leaves nothing.
pub fn device_memory_that_does_not_fit_is_a_typed_failure(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let most = rig.needs_device_memory()?;
    let kept = rig.backend.alloc(ChipId(0), 4096).must("alloc")?;
    let before = rig.committed()?;
    for (chip, requested_bytes) in [(0, most), (1, most + 1), (0, u64::MAX)] {
        let error = match rig.backend.alloc(ChipId(chip), requested_bytes) {
            Err(error) => error,
            Ok(id) => return broken(format!("{requested_bytes} bytes on chip {chip}: {id:?}")),
        };
        let failure = error.runtime().must("runtime failure")?;
        same("kind", failure.kind, FailureKind::OutOfDeviceMemory { requested_bytes })?;
        same("chip", failure.chip, Some(ChipId(chip)))?;
        same("effect", failure.effect, Effect::None)?;
        ensure!(!error.must_reprepare(), "memory that does not fit is reported as final: {error:?}");
        same("committed device memory", rig.committed()?, before.clone())?;
    }
    rig.backend.free(kept).must("free")?;
    let all = rig.backend.alloc(ChipId(0), most).must("alloc all of it")?;
    rig.backend.free(all).must("free")?;
    rig.is_usable()?;
    rig.finish()
}
