//! Replies as a healthy backend would give them.
#![allow(dead_code, reason = "each test binary uses its own part of this")]

use pto_simpler_sys::{BufferWindow, ChipId, DomainAllocation, DomainId, DomainRequest, MemberWindow, NamedBuffer};

/// A request over `workers` for one 64-byte signal buffer that fills its window.
pub(crate) fn signal(workers: &[u32]) -> DomainRequest {
    DomainRequest::packed(workers.iter().copied(), vec![NamedBuffer::bytes("signal", 64)])
}

/// A reply for allocation number `id`: its windows lie 1 MiB apart from those of other ids, on each chip alike.
pub(crate) fn reply(id: u32, request: &DomainRequest) -> DomainAllocation {
    reply_at(id, request, 0x1000_0000 + u64::from(id) * 0x10_0000, request.window_bytes)
}

/// A reply whose windows begin at `base` and have `mapped_bytes`.
pub(crate) fn reply_at(id: u32, request: &DomainRequest, base: u64, mapped_bytes: u64) -> DomainAllocation {
    let mut allocation = DomainAllocation::new();
    allocation.begin(DomainId::new(id, 1), request.buffers.len());
    for (rank, chip) in request.workers.iter().enumerate() {
        let mut address = base;
        let buffers: Vec<BufferWindow> = request
            .buffers
            .iter()
            .map(|buffer| {
                let window = BufferWindow { address, nbytes: buffer.nbytes };
                address += buffer.nbytes;
                window
            })
            .collect();
        let device_context = 0xC000 + u64::from(chip.0);
        let rank = u32::try_from(rank).unwrap();
        allocation.push_member(MemberWindow { chip: *chip, rank, device_context, base, mapped_bytes }, buffers);
    }
    allocation
}

pub(crate) fn chips(ids: &[u32]) -> Vec<ChipId> {
    ids.iter().copied().map(ChipId).collect()
}
