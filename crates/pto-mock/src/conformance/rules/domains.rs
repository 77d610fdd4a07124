//! Communication domains that live for one run: validation, ranks, addresses, contents, and their end.

use pto_simpler_sys::{
    Access, Call, ChipId, DomainAllocation, DomainId, DomainRequest, DomainState, Effect, FailureKind, NamedBuffer,
    Orchestrator, TensorPlace,
};

use super::super::rig::{Must, Rig, args, broken, ensure, fresh, i32s, packed, refused, same};
use super::super::{BackendFactory, Outcome, Stop};
use crate::kernels;

/// A request that must be refused before any effect; afterwards the same name and the same build are usable.
fn refuses(factory: &dyn BackendFactory, what: &str, request: &DomainRequest) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    rig.run(|o| rig.domain(o, &packed(2, &[64])).map(|_| ()))?;
    let name = fresh("refused");
    rig.run(|o| {
        let before = rig.committed()?;
        let mut reply = DomainAllocation::new();
        refused(what, Call::AllocateDomain, o.allocate_domain(&name, request, &mut reply))?;
        same("id in the reply to a refused request", reply.id(), None)?;
        same("committed device memory after the refusal", rig.committed()?, before)?;
        o.allocate_domain(&name, &packed(2, &[64]), &mut reply).must("a valid request under the same name")
    })?;
    rig.is_usable()?;
    rig.finish()
}

/// A request without workers is refused.
pub fn a_domain_without_workers_is_refused(factory: &dyn BackendFactory) -> Outcome {
    refuses(factory, "no workers", &packed(0, &[64]))
}

/// A request that names a worker twice is refused.
pub fn a_domain_with_a_worker_twice_is_refused(factory: &dyn BackendFactory) -> Outcome {
    refuses(factory, "workers [0, 0]", &DomainRequest::packed([0, 0], vec![NamedBuffer::bytes("b", 64)]))
}

/// A request for a worker that does not exist is refused.
pub fn a_domain_with_a_worker_out_of_range_is_refused(factory: &dyn BackendFactory) -> Outcome {
    for worker in [2, u32::MAX] {
        let request = DomainRequest::packed([0, worker], vec![NamedBuffer::bytes("b", 64)]);
        refuses(factory, &format!("worker {worker} of 2"), &request)?;
    }
    Ok(())
}

/// A window of zero bytes is refused.
pub fn a_window_of_zero_bytes_is_refused(factory: &dyn BackendFactory) -> Outcome {
    refuses(factory, "window 0", &packed(2, &[]))
}

/// Buffers that together exceed the window are refused.
pub fn buffers_over_the_window_are_refused(factory: &dyn BackendFactory) -> Outcome {
    let mut request = packed(2, &[40, 40]);
    request.window_bytes = 79;
    refuses(factory, "80 bytes in a window of 79", &request)
}

/// Sizes whose sum does not fit in 64 bits are refused, not wrapped.
pub fn buffer_sizes_that_overflow_are_refused(factory: &dyn BackendFactory) -> Outcome {
    let mut request = packed(2, &[u64::MAX, 65]);
    request.window_bytes = 64;
    refuses(factory, "sizes that wrap to 64", &request)
}

/// Two buffers of one name are refused.
pub fn a_buffer_name_twice_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let buffers = vec![NamedBuffer::bytes("same", 32), NamedBuffer::bytes("same", 32)];
    refuses(factory, "one buffer name twice", &DomainRequest::packed([0, 1], buffers))
}

/// More members than the backend's limit are refused.
pub fn more_members_than_the_limit_are_refused(factory: &dyn BackendFactory) -> Outcome {
    let limit = {
        let rig = Rig::unstarted(factory, 1)?;
        let limit = rig.caps().limits.ranks;
        rig.finish()?;
        limit
    };
    if limit > 128 {
        return Err(Stop::Skipped(format!("{limit} ranks are more than a test can have")));
    }
    let rig = Rig::start(factory, limit + 1)?;
    rig.run(|o| {
        let mut reply = DomainAllocation::new();
        let name = fresh("too-many");
        let result = o.allocate_domain(&name, &packed(limit + 1, &[64]), &mut reply);
        refused("more members than the limit", Call::AllocateDomain, result)
    })?;
    rig.finish()
}

/// A name that is live is refused, and the live domain is untouched.
pub fn a_live_name_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    rig.run(|o| {
        let domain = rig.domain(o, &packed(2, &[16]))?;
        rig.write(o, domain.place(0, 0)?, &[7; 16])?;
        let mut reply = DomainAllocation::new();
        let result = o.allocate_domain(&domain.name, &packed(2, &[16]), &mut reply);
        refused("a live name", Call::AllocateDomain, result)?;
        same("bytes of the live domain", rig.read(o, domain.place(0, 0)?, 16)?, vec![7; 16])
    })?;
    rig.finish()
}

/// Allocation after a task of the same run is refused.
pub fn allocation_after_a_task_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let out = rig.host(&[0; 8])?;
    rig.run(|o| {
        rig.store(o, ChipId(0), TensorPlace::Host(out), 2, 3)?;
        let mut reply = DomainAllocation::new();
        let result = o.allocate_domain(&fresh("late"), &packed(2, &[64]), &mut reply);
        refused("allocate after a task", Call::AllocateDomain, result)
    })?;
    same("what the task stored", rig.host_i32(out, 2)?, vec![3, 4])?;
    rig.finish()
}

/// The order of `workers` defines the ranks, in the reply and for kernels.
pub fn workers_order_defines_ranks(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 3)?;
    let outs = [rig.host(&[0; 8])?, rig.host(&[0; 8])?];
    rig.run(|o| {
        let request = DomainRequest::packed([2, 0], vec![NamedBuffer::bytes("b", 64)]);
        let domain = rig.domain(o, &request)?;
        for (rank, chip) in [(0, ChipId(2)), (1, ChipId(0))] {
            let member = domain.reply.member(rank).must("member")?;
            same("chip and rank", (member.chip, member.rank), (chip, u32::try_from(rank).unwrap_or(u32::MAX)))?;
            let out = *outs.get(rank).must("output")?;
            let args = args([i32s(TensorPlace::Host(out), 2, Access::Output)], [member.device_context]);
            o.submit_next_level(rig.callable(kernels::RANK)?, &args, None, chip).must("submit pto_rank")?;
        }
        Ok(())
    })?;
    same("rank and size on chip 2", rig.host_i32(outs[0], 2)?, vec![0, 2])?;
    same("rank and size on chip 0", rig.host_i32(outs[1], 2)?, vec![1, 2])?;
    rig.finish()
}

/// Named buffers are placed back to back in declaration order, without alignment, within the mapped window.
pub fn buffers_are_placed_back_to_back(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    rig.run(|o| {
        let sizes = [3u64, 1, 4096, 17];
        let mut request = packed(2, &sizes);
        request.window_bytes += 5;
        let domain = rig.domain(o, &request)?;
        for rank in 0..2 {
            let member = *domain.reply.member(rank).must("member")?;
            ensure!(
                member.mapped_bytes >= request.window_bytes,
                "mapped {} bytes, requested {}",
                member.mapped_bytes,
                request.window_bytes
            );
            let mut address = member.base;
            for (buffer, nbytes) in domain.reply.buffers(rank).iter().zip(sizes) {
                same("address and size", (buffer.address, buffer.nbytes), (address, nbytes))?;
                address += nbytes;
            }
        }
        Ok(())
    })?;
    rig.finish()
}

/// A window may have no named buffers.
pub fn a_window_may_have_no_named_buffers(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    rig.run(|o| {
        let mut request = packed(2, &[]);
        request.window_bytes = 64;
        rig.domain(o, &request).map(|_| ())
    })?;
    rig.finish()
}

/// A reply replaces whatever its storage held before.
pub fn a_reply_replaces_the_previous_one(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    rig.run(|o| {
        let mut reply = DomainAllocation::new();
        o.allocate_domain(&fresh("first"), &packed(2, &[8, 8, 8]), &mut reply).must("allocate")?;
        let first = reply.id();
        o.allocate_domain(&fresh("second"), &packed(1, &[16]), &mut reply).must("allocate")?;
        ensure!(reply.id().is_some() && reply.id() != first, "two domains share the id {first:?}");
        same("members", reply.members().len(), 1)?;
        same("buffers", reply.buffers(0).iter().map(|b| b.nbytes).collect::<Vec<_>>(), vec![16])
    })?;
    rig.finish()
}

fn all_zero(
    rig: &Rig<'_>,
    o: &dyn Orchestrator,
    what: &str,
    chips: usize,
    sizes: &[u64],
) -> Result<DomainId, Stop> {
    let request = packed(u32::try_from(chips).unwrap_or(u32::MAX), sizes);
    let domain = rig.domain(o, &request)?;
    for rank in 0..chips {
        for (index, nbytes) in (0u32..).zip(sizes) {
            let nbytes = usize::try_from(*nbytes).unwrap_or(usize::MAX);
            let bytes = rig.read(o, domain.place(rank, index)?, nbytes)?;
            let dirty = bytes.iter().filter(|byte| **byte != 0).count();
            same(&format!("{what}: bytes of buffer {index} of rank {rank} that are not 0"), dirty, 0)?;
            rig.write(o, domain.place(rank, index)?, &vec![0xA5; nbytes])?;
        }
    }
    Ok(domain.id)
}

/// A fresh window is all zero on every member, also where its predecessor under the same or another name was
/// dirty.
pub fn a_fresh_window_is_zero_after_a_dirty_predecessor(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let mut ids = Vec::new();
    for round in ["first", "second", "third"] {
        ids.push(rig.run(|o| all_zero(&rig, o, round, 2, &[64, 4096, 17]))?);
    }
    ids.sort_unstable();
    ids.dedup();
    same("different domains", ids.len(), 3)?;
    rig.finish()
}

/// A fresh window is zero when the run's first task sees it.
pub fn a_fresh_window_is_zero_for_the_first_task(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    for _ in 0..2 {
        let outs = [rig.host(&[1; 64])?, rig.host(&[1; 64])?];
        rig.run(|o| {
            let domain = rig.domain(o, &packed(2, &[64]))?;
            for (rank, out) in outs.iter().enumerate() {
                let chip = ChipId(u32::try_from(rank).unwrap_or(u32::MAX));
                rig.copy_task(o, chip, domain.tensor(rank, 0)?, TensorPlace::Host(*out), 16)?;
                rig.store(o, chip, domain.tensor(rank, 0)?, 16, 99)?;
            }
            Ok(())
        })?;
        for out in outs {
            same("what the task saw", rig.host_i32(out, 16)?, vec![0; 16])?;
        }
    }
    rig.finish()
}

/// A domain is freed in the cleanup of its run: when the end is reported it is gone, and its memory is back.
pub fn a_domain_is_freed_after_its_run(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    rig.run(|o| rig.domain(o, &packed(2, &[64])).map(|_| ()))?;
    let before = rig.committed()?;
    let (id, during) = rig.run(|o| {
        let domain = rig.domain(o, &packed(2, &[1 << 20]))?;
        same("state during the build", rig.backend.domain_state(domain.id).must("domain_state")?, {
            DomainState::Live
        })?;
        Ok((domain.id, rig.committed()?))
    })?;
    same("state after the run", rig.backend.domain_state(id).must("domain_state")?, DomainState::Freed)?;
    same("committed device memory after the run", rig.committed()?, before.clone())?;
    for (before, during) in before.iter().zip(&during) {
        ensure!(*during >= before + (1 << 20), "a window of 1 MiB took the memory from {before} to {during}");
    }
    rig.finish()
}

/// A freed domain's name may be used again, for a new domain.
pub fn a_name_may_be_used_again_after_its_run(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let name = fresh("again");
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(rig.run(|o| {
            let mut reply = DomainAllocation::new();
            o.allocate_domain(&name, &packed(2, &[64]), &mut reply).must("allocate under a used name")?;
            reply.id().must("id")
        })?);
    }
    ids.sort_unstable();
    ids.dedup();
    same("different ids", ids.len(), 3)?;
    rig.finish()
}

/// A released domain's name is free at once, in the same build, and its memory stays until the run is over.
pub fn a_released_name_is_free_in_the_same_build(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let name = fresh("released");
    let ids = rig.run(|o| {
        let mut reply = DomainAllocation::new();
        o.allocate_domain(&name, &packed(2, &[64]), &mut reply).must("allocate")?;
        let first = reply.id().must("id")?;
        rig.backend.release_domain(first).must("release_domain inside the build")?;
        same("state of a domain released during its run", rig.backend.domain_state(first).must("state")?, {
            DomainState::Released
        })?;
        o.allocate_domain(&name, &packed(2, &[64]), &mut reply).must("allocate under the released name")?;
        let second = reply.id().must("id")?;
        ensure!(first != second, "two domains share the id {first}");
        Ok([first, second])
    })?;
    for id in ids {
        same("state after the run", rig.backend.domain_state(id).must("domain_state")?, DomainState::Freed)?;
    }
    rig.finish()
}

/// A released domain cannot be used any more, by copies or by tasks, although its memory is still there.
pub fn a_released_domain_cannot_be_used(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let request = packed(2, &[64]);
    let gone = rig.run(|o| {
        let domain = rig.domain(o, &request)?;
        rig.write(o, domain.place(0, 0)?, &[1; 64])?;
        let copy = rig.copy(domain.place(0, 0)?, &[2; 64])?;
        let out = rig.host(&[0; 64])?;
        rig.backend.release_domain(domain.id).must("release_domain inside the build")?;
        let state = rig.backend.domain_state(domain.id).must("domain_state")?;
        same("state of a domain released during its run", state, DomainState::Released)?;
        refused("copy into a released domain", Call::CopyTo, o.copy_to(&copy))?;
        refused("copy out of a released domain", Call::CopyFrom, o.copy_from(out, domain.place(1, 0)?, 64))?;
        let args = args([i32s(domain.tensor(0, 0)?, 16, Access::InOut)], [1]);
        let result = o.submit_next_level(rig.callable(kernels::ADD)?, &args, None, ChipId(0));
        refused("a task on a released domain", Call::SubmitNextLevel, result)?;
        Ok(domain.id)
    })?;
    same("state after the run", rig.backend.domain_state(gone).must("domain_state")?, DomainState::Freed)?;
    rig.is_usable()?;
    rig.finish()
}

/// A domain for which a chip has no device memory left is a typed failure that leaves nothing, on no chip: the same
/// request that fits is granted in the same build.
pub fn a_domain_that_does_not_fit_leaves_nothing(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let most = rig.needs_device_memory()?;
    // Rank 0 has room, rank 1 has not.
    let full = rig.backend.alloc(ChipId(1), most - 4096).must("alloc")?;
    let before = rig.committed()?;
    let name = fresh("large");
    let requested_bytes = 1_u64 << 16;
    let id = rig.run(|o| {
        let mut reply = DomainAllocation::new();
        let Err(error) = o.allocate_domain(&name, &packed(2, &[requested_bytes]), &mut reply) else {
            return broken(format!("{requested_bytes} bytes where 4096 are left: {:?}", reply.id()));
        };
        let failure = error.runtime().must("runtime failure")?;
        same("kind", failure.kind, FailureKind::OutOfDeviceMemory { requested_bytes })?;
        same("chip", failure.chip, Some(ChipId(1)))?;
        same("effect", failure.effect, Effect::None)?;
        ensure!(!error.must_reprepare(), "a domain that does not fit is reported as final: {error:?}");
        same("committed device memory", rig.committed()?, before.clone())?;
        o.allocate_domain(&name, &packed(2, &[64]), &mut reply).must("allocate a smaller one of the same name")?;
        reply.id().must("id")
    })?;
    same("state after the run", rig.backend.domain_state(id).must("domain_state")?, DomainState::Freed)?;
    rig.backend.free(full).must("free")?;
    rig.run(|o| rig.domain(o, &packed(2, &[requested_bytes])).map(|_| ()))?;
    rig.is_usable()?;
    rig.finish()
}

/// Windows of different members, and of different domains, are different memory.
pub fn windows_are_separate_memory(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    rig.run(|o| {
        let domains = [rig.domain(o, &packed(2, &[32]))?, rig.domain(o, &packed(2, &[32]))?];
        for (d, domain) in (0u8..).zip(&domains) {
            for rank in 0..2u8 {
                rig.write(o, domain.place(usize::from(rank), 0)?, &[d * 16 + rank + 1; 32])?;
            }
        }
        for (d, domain) in (0u8..).zip(&domains) {
            for rank in 0..2u8 {
                let bytes = rig.read(o, domain.place(usize::from(rank), 0)?, 32)?;
                same("bytes of a window", bytes, vec![d * 16 + rank + 1; 32])?;
            }
        }
        Ok(())
    })?;
    rig.finish()
}

/// A kernel reaches every member's window through its device context.
pub fn a_kernel_reads_every_members_window(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let outs = [rig.host(&[0; 8])?, rig.host(&[0; 8])?];
    rig.run(|o| {
        let domain = rig.domain(o, &packed(2, &[12, 8]))?;
        for rank in 0..2u8 {
            rig.write(o, domain.place(usize::from(rank), 1)?, &[rank + 1; 8])?;
        }
        for (rank, out) in outs.iter().enumerate() {
            let member = domain.reply.member(rank).must("member")?;
            // Each rank reads the second buffer, at offset 12, of the other one.
            let args = args(
                [i32s(TensorPlace::Host(*out), 2, Access::Output)],
                [member.device_context, 1 - rank as u64, 12],
            );
            o.submit_next_level(rig.callable(kernels::PEEK)?, &args, None, member.chip).must("submit pto_peek")?;
        }
        Ok(())
    })?;
    same("what rank 0 read of rank 1", rig.host_bytes(outs[0], 8)?, vec![2; 8])?;
    same("what rank 1 read of rank 0", rig.host_bytes(outs[1], 8)?, vec![1; 8])?;
    rig.finish()
}

/// `domain_state` refuses an id that was never given out, and still knows a freed domain after `close`.
pub fn domain_state_outlives_the_domain(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let unknown = DomainId::new(u32::MAX, u32::MAX);
    refused("state of an unknown domain", Call::DomainState, rig.backend.domain_state(unknown))?;
    let id = rig.run(|o| Ok(rig.domain(o, &packed(2, &[64]))?.id))?;
    rig.backend.close().must("close")?;
    same("state after close", rig.backend.domain_state(id).must("domain_state")?, DomainState::Freed)?;
    rig.finish()
}
