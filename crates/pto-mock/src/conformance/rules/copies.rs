//! Copies into and out of device memory: lengths, bounds, neighbours, batches, ranges and fills.

use pto_simpler_sys::{
    BackendError, Call, ChipId, CopyGranularity, CopyResult, CopySource, CopyTo, DevicePlace, DomainId, Family,
    HostBufferId, Orchestrator, TensorPlace,
};

use super::super::rig::{Domain, Must, Rig, broken, ensure, packed, refused, same};
use super::super::{BackendFactory, Outcome, Stop};

fn refused_copy(what: &str, o: &dyn Orchestrator, copy: CopyTo) -> Outcome {
    refused(what, Call::CopyTo, o.copy_to(&copy))
}

/// Bytes of the three buffers of both members.
fn everything(rig: &Rig<'_>, o: &dyn Orchestrator, domain: &Domain, size: usize) -> Result<Vec<Vec<u8>>, Stop> {
    let mut all = Vec::new();
    for rank in 0..2 {
        for buffer in 0..3 {
            all.push(rig.read(o, domain.place(rank, buffer)?, size)?);
        }
    }
    Ok(all)
}

/// What `copy_to` wrote, `copy_from` reads, byte for byte, on the member that was named.
pub fn copies_are_exact(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let pattern: Vec<u8> = (0..=255u8).cycle().take(4099).collect();
    rig.run(|o| {
        let domain = rig.domain(o, &packed(2, &[4099]))?;
        rig.write(o, domain.place(1, 0)?, &pattern)?;
        same("the written member", rig.read(o, domain.place(1, 0)?, 4099)? == pattern, true)?;
        same("the other member", rig.read(o, domain.place(0, 0)?, 4099)? == vec![0; 4099], true)
    })?;
    rig.finish()
}

/// A source smaller than its destination is a prefix copy: the remainder is untouched.
pub fn a_smaller_source_copies_a_prefix(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.run(|o| {
        let domain = rig.domain(o, &packed(1, &[16]))?;
        rig.write(o, domain.place(0, 0)?, &[1; 16])?;
        rig.write(o, domain.place(0, 0)?, &[2; 5])?;
        let mut expected = vec![2; 5];
        expected.resize(16, 1);
        same("bytes", rig.read(o, domain.place(0, 0)?, 16)?, expected)
    })?;
    rig.finish()
}

/// A copy never touches the neighbours of its destination: not the buffers beside it, not the other members.
pub fn a_copy_never_touches_neighbours(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    rig.run(|o| {
        let domain = rig.domain(o, &packed(2, &[17, 17, 17]))?;
        for (index, fill) in (0..6usize).zip(1u8..) {
            rig.write(o, domain.place(index / 3, u32::try_from(index % 3).unwrap_or(0))?, &[fill; 17])?;
        }
        rig.write(o, domain.place(0, 1)?, &[0xFF; 17])?;
        let expected: Vec<_> = [1u8, 0xFF, 3, 4, 5, 6].map(|byte| vec![byte; 17]).into();
        same("bytes of all buffers", everything(&rig, o, &domain, 17)?, expected)
    })?;
    rig.finish()
}

/// A copy larger than its destination is refused in both directions, and nothing is copied.
pub fn a_copy_larger_than_its_place_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    rig.run(|o| {
        let domain = rig.domain(o, &packed(2, &[16, 16, 16]))?;
        refused_copy("17 bytes into 16", o, rig.copy(domain.place(0, 1)?, &[9; 17])?)?;
        let out = rig.host(&[5; 17])?;
        refused("17 bytes out of 16", Call::CopyFrom, o.copy_from(out, domain.place(0, 1)?, 17))?;
        same("the host buffer", rig.host_bytes(out, 17)?, vec![5; 17])?;
        same("bytes of all buffers", everything(&rig, o, &domain, 16)?, vec![vec![0; 16]; 6])
    })?;
    rig.finish()
}

/// A copy of more bytes than its host buffer holds is refused.
pub fn a_copy_larger_than_its_host_buffer_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.run(|o| {
        let domain = rig.domain(o, &packed(1, &[64]))?;
        let src = CopySource::Host(rig.host(&[9; 16])?);
        refused_copy("17 bytes from 16", o, CopyTo { dst: domain.place(0, 0)?, src, nbytes: 17 })?;
        refused_copy("2^64-1 bytes from 16", o, CopyTo { dst: domain.place(0, 0)?, src, nbytes: u64::MAX })?;
        let out = rig.host(&[9; 16])?;
        refused("17 bytes into 16", Call::CopyFrom, o.copy_from(out, domain.place(0, 0)?, 17))?;
        same("bytes", rig.read(o, domain.place(0, 0)?, 64)?, vec![0; 64])
    })?;
    rig.finish()
}

/// A copy of zero bytes is refused.
pub fn a_copy_of_zero_bytes_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.run(|o| {
        let domain = rig.domain(o, &packed(1, &[64]))?;
        let host = rig.host(&[9; 16])?;
        let src = CopySource::Host(host);
        refused_copy("zero bytes in", o, CopyTo { dst: domain.place(0, 0)?, src, nbytes: 0 })?;
        refused("zero bytes out", Call::CopyFrom, o.copy_from(host, domain.place(0, 0)?, 0))
    })?;
    rig.finish()
}

/// A whole-buffer backend copies exactly what its host buffer holds: another length is refused.
pub fn a_whole_buffer_copy_has_the_length_of_its_source(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    if rig.caps().copy_granularity != CopyGranularity::WholeBuffer {
        return Err(Stop::Skipped("copies byte ranges".into()));
    }
    rig.run(|o| {
        let domain = rig.domain(o, &packed(1, &[64]))?;
        let src = CopySource::Host(rig.host(&[9; 16])?);
        refused_copy("15 of 16 bytes", o, CopyTo { dst: domain.place(0, 0)?, src, nbytes: 15 })?;
        let dst = domain.window(0, 0)?;
        refused_copy("a byte range", o, CopyTo { dst, src, nbytes: 16 })?;
        same("bytes", rig.read(o, domain.place(0, 0)?, 64)?, vec![0; 64])
    })?;
    rig.finish()
}

/// Places that do not exist are refused: a chip that is no member, an unknown buffer index, an unknown domain, an
/// unknown or released host buffer.
pub fn copies_of_unknown_places_are_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let released = rig.host(&[1; 16])?;
    rig.backend.release_buffer(released).must("release_buffer")?;
    rig.run(|o| {
        let domain = rig.domain(o, &packed(1, &[16]))?;
        let host = rig.host(&[9; 16])?;
        let place = |domain: DomainId, chip: u32, buffer: u32| DevicePlace::DomainBuffer {
            domain,
            chip: ChipId(chip),
            buffer,
        };
        let unknown = DomainId::new(u32::MAX, u32::MAX);
        for (what, dst) in [
            ("a chip that is no member", place(domain.id, 1, 0)),
            ("a chip that does not exist", place(domain.id, 9, 0)),
            ("an unknown buffer", place(domain.id, 0, 1)),
            ("an unknown domain", place(unknown, 0, 0)),
            ("unknown device memory", DevicePlace::Resident(pto_simpler_sys::DeviceBufferId::new(9, 9))),
        ] {
            refused_copy(what, o, CopyTo { dst, src: CopySource::Host(host), nbytes: 16 })?;
            refused(what, Call::CopyFrom, o.copy_from(host, dst, 16))?;
        }
        for (what, buffer) in
            [("a released host buffer", released), ("an unknown host buffer", HostBufferId::new(u32::MAX, 1))]
        {
            let copy = CopyTo { dst: domain.place(0, 0)?, src: CopySource::Host(buffer), nbytes: 16 };
            refused_copy(what, o, copy)?;
            refused(what, Call::CopyFrom, o.copy_from(buffer, domain.place(0, 0)?, 16))?;
        }
        same("bytes", rig.read(o, domain.place(0, 0)?, 16)?, vec![0; 16])
    })?;
    rig.finish()
}

/// A freed domain is no place for copies.
pub fn copies_into_a_freed_domain_are_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let domain = rig.run(|o| rig.domain(o, &packed(1, &[16])))?;
    rig.run(|o| {
        refused_copy("a freed domain", o, rig.copy(domain.place(0, 0)?, &[9; 16])?)?;
        let out = rig.host(&[0; 16])?;
        refused("a freed domain", Call::CopyFrom, o.copy_from(out, domain.place(0, 0)?, 16))
    })?;
    rig.finish()
}

/// Control after a task of the same run is refused: `copy_to`, `copy_from`, and `copy_batch` as a whole, with no
/// results and nothing tried.
pub fn copies_after_a_task_are_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let resident = rig.backend.alloc(ChipId(0), 16).must("alloc")?;
    let out = rig.host(&[0; 8])?;
    rig.run(|o| {
        rig.store(o, ChipId(0), TensorPlace::Host(out), 2, 3)?;
        let copy = rig.copy(DevicePlace::Resident(resident), &[9; 16])?;
        refused_copy("copy_to after a task", o, copy)?;
        let host = rig.host(&[0; 16])?;
        let result = o.copy_from(host, DevicePlace::Resident(resident), 16);
        refused("copy_from after a task", Call::CopyFrom, result)?;
        let mut results = vec![CopyResult::Done];
        match o.copy_batch(&[copy], &mut results) {
            Err(error) => ensure!(error.family() == Family::Misuse, "copy_batch after a task: {error:?}"),
            Ok(()) => return broken(format!("copy_batch after a task: accepted, {results:?}")),
        }
        same("results of the refused batch", results.len(), 0)
    })?;
    same("device memory", rig.peek(DevicePlace::Resident(resident), 16)?, vec![0; 16])?;
    same("what the task stored", rig.host_i32(out, 2)?, vec![3, 4])?;
    rig.finish()
}

/// The source of a finished copy may be released while its run is in flight: only tasks keep their arguments.
pub fn a_copy_source_may_be_released_while_its_run_is_in_flight(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let source = rig.host(&[7; 16])?;
    let resident = rig.backend.alloc(ChipId(0), 16).must("alloc")?;
    let gate = rig.gate()?;
    let (run, ()) = rig.submit(|o| {
        let copy = CopyTo { dst: DevicePlace::Resident(resident), src: CopySource::Host(source), nbytes: 16 };
        o.copy_to(&copy).must("copy_to")?;
        gate.hold(o)
    })?;
    gate.wait_entered()?;
    rig.backend.release_buffer(source).must("release the source of a finished copy")?;
    gate.open()?;
    rig.succeeds(run)?;
    same("device memory", rig.peek(DevicePlace::Resident(resident), 16)?, vec![7; 16])?;
    drop(gate);
    rig.finish()
}

/// A batch gives one result per entry, in the order of the entries, and keeps the order of one chip.
pub fn a_batch_gives_one_result_per_entry(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    rig.run(|o| {
        let domain = rig.domain(o, &packed(2, &[16, 16, 16]))?;
        let copies = [
            rig.copy(domain.place(0, 0)?, &[1; 16])?,
            rig.copy(domain.place(1, 0)?, &[2; 16])?,
            rig.copy(domain.place(0, 0)?, &[3; 16])?,
            rig.copy(domain.place(1, 2)?, &[4; 8])?,
            rig.copy(domain.place(1, 0)?, &[5; 8])?,
        ];
        let mut results = vec![CopyResult::Skipped; 9];
        o.copy_batch(&copies, &mut results).must("copy_batch")?;
        same("results", results, vec![CopyResult::Done; 5])?;
        same("rank 0, buffer 0", rig.read(o, domain.place(0, 0)?, 16)?, vec![3; 16])?;
        same("rank 1, buffer 0", rig.read(o, domain.place(1, 0)?, 16)?, [[5; 8], [2; 8]].concat())?;
        same("rank 1, buffer 2", rig.read(o, domain.place(1, 2)?, 16)?, [[4; 8], [0; 8]].concat())
    })?;
    rig.finish()
}

/// An empty batch is Ok and empties the results.
pub fn an_empty_batch_has_no_results(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.run(|o| {
        let mut results = vec![CopyResult::Skipped];
        o.copy_batch(&[], &mut results).must("copy_batch of nothing")?;
        same("results", results.len(), 0)
    })?;
    rig.finish()
}

/// After a failed entry the later entries of that chip are skipped; other chips go on.
pub fn a_failed_entry_skips_the_rest_of_its_chip_only(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    rig.run(|o| {
        let domain = rig.domain(o, &packed(2, &[16, 16, 16]))?;
        let copies = [
            rig.copy(domain.place(0, 0)?, &[1; 16])?,
            rig.copy(domain.place(1, 0)?, &[2; 16])?,
            rig.copy(domain.place(0, 1)?, &[9; 17])?,
            rig.copy(domain.place(1, 1)?, &[3; 16])?,
            rig.copy(domain.place(0, 2)?, &[9; 16])?,
            rig.copy(domain.place(1, 2)?, &[4; 16])?,
        ];
        let mut results = Vec::new();
        o.copy_batch(&copies, &mut results).must("copy_batch")?;
        let short: Vec<_> = results
            .iter()
            .map(|result| match result {
                CopyResult::Done => "done",
                CopyResult::Failed(BackendError::Misuse(_)) => "misuse",
                CopyResult::Failed(_) => "failed",
                CopyResult::Skipped => "skipped",
            })
            .collect();
        same("results", short, vec!["done", "done", "misuse", "done", "skipped", "done"])?;
        let expected: Vec<_> = [1u8, 0, 0, 2, 3, 4].map(|byte| vec![byte; 16]).into();
        same("bytes of all buffers", everything(&rig, o, &domain, 16)?, expected)
    })?;
    rig.finish()
}

/// A range-copying backend copies into any byte range of the requested window, slack included, and nowhere else.
pub fn range_copies_reach_the_requested_window_only(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    if rig.caps().copy_granularity != CopyGranularity::ByteRange {
        return Err(Stop::Skipped("copies whole buffers".into()));
    }
    rig.run(|o| {
        let mut request = packed(1, &[16, 16]);
        request.window_bytes = 40;
        let domain = rig.domain(o, &request)?;
        let src = CopySource::Host(rig.host(&[9; 40])?);
        for (what, offset, nbytes) in [
            ("one byte over the end", 33, 8),
            ("behind the end", 40, 1),
            ("an offset that overflows", u64::MAX, 2),
            ("more than the window", 0, 41),
        ] {
            refused_copy(what, o, CopyTo { dst: domain.window(0, offset)?, src, nbytes })?;
        }
        same("window after the refusals", rig.read(o, domain.window(0, 0)?, 40)?, vec![0; 40])?;
        o.copy_to(&CopyTo { dst: domain.window(0, 10)?, src, nbytes: 8 }).must("a range across two buffers")?;
        o.copy_to(&CopyTo { dst: domain.window(0, 37)?, src, nbytes: 3 }).must("a range of slack")?;
        let mut expected = vec![0; 40];
        expected[10..18].fill(9);
        expected[37..].fill(9);
        same("window", rig.read(o, domain.window(0, 0)?, 40)?, expected.clone())?;
        same("a range read back", rig.read(o, domain.window(0, 8)?, 16)?, expected[8..24].to_vec())
    })?;
    rig.finish()
}

/// A backend with device fill sets exactly the named bytes; one without it refuses.
pub fn a_device_fill_sets_exactly_its_bytes(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.run(|o| {
        let domain = rig.domain(o, &packed(1, &[16, 16, 16]))?;
        let fill = CopyTo { dst: domain.place(0, 1)?, src: CopySource::Fill(0xCD), nbytes: 16 };
        if !rig.caps().device_fill {
            refused_copy("fill without the capability", o, fill)?;
            return Ok(());
        }
        o.copy_to(&fill).must("fill")?;
        refused_copy("fill of 17 bytes in 16", o, CopyTo { nbytes: 17, ..fill })?;
        refused_copy("fill of zero bytes", o, CopyTo { nbytes: 0, ..fill })?;
        for (buffer, byte) in [(0, 0), (1, 0xCD), (2, 0)] {
            same("bytes of a buffer", rig.read(o, domain.place(0, buffer)?, 16)?, vec![byte; 16])?;
        }
        Ok(())
    })?;
    rig.finish()
}

/// A read-only buffer of zeros is a copy source like any other.
pub fn zeros_are_a_copy_source(factory: &dyn BackendFactory) -> Outcome {
    let mut rig = Rig::unstarted(factory, 1)?;
    let early = rig.backend.create_zeros(16).must("create_zeros before the start")?;
    rig.begin()?;
    let late = rig.backend.create_zeros(16).must("create_zeros")?;
    rig.run(|o| {
        let domain = rig.domain(o, &packed(1, &[24]))?;
        for zeros in [early, late] {
            rig.write(o, domain.place(0, 0)?, &[1; 24])?;
            let copy = CopyTo { dst: domain.place(0, 0)?, src: CopySource::Host(zeros), nbytes: 16 };
            o.copy_to(&copy).must("copy_to from zeros")?;
            let mut expected = vec![0; 16];
            expected.resize(24, 1);
            same("bytes", rig.read(o, domain.place(0, 0)?, 24)?, expected)?;
        }
        Ok(())
    })?;
    rig.finish()
}
