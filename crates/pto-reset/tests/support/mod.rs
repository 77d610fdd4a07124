//! Replies as a healthy backend would give them, and windows of real bytes to execute plans on.
#![allow(dead_code, reason = "each test binary uses its own part of this")]

use std::sync::Arc;

use pto_reset::{CoveredWindow, MappedWindow, Method, ResetError};
use pto_simpler_sys::{
    BufferWindow, ChipId, CopySource, CopyTo, DevicePlace, DomainAllocation, DomainId, DomainRequest, HostBufferId,
    MemberWindow, NamedBuffer,
};

pub(crate) fn id(index: u32) -> DomainId {
    DomainId::new(index, 1)
}

pub(crate) fn host(index: u32) -> HostBufferId {
    HostBufferId::new(index, 1)
}

/// A request for buffers `b0`, `b1`, ... of these sizes in a window of `window_bytes`.
pub(crate) fn request(workers: &[u32], window_bytes: u64, sizes: &[u64]) -> Arc<DomainRequest> {
    Arc::new(DomainRequest {
        workers: workers.iter().copied().map(ChipId).collect(),
        window_bytes,
        buffers: sizes.iter().zip(0..).map(|(size, i)| NamedBuffer::bytes(format!("b{i}"), *size)).collect(),
    })
}

/// A reply whose members map `mapped_bytes` each.
pub(crate) fn reply(domain: DomainId, request: &DomainRequest, mapped_bytes: u64) -> DomainAllocation {
    let mut allocation = DomainAllocation::new();
    allocation.begin(domain, request.buffers.len());
    for (rank, chip) in (0..).zip(&request.workers) {
        let mut address = 0x1000u64;
        let buffers: Vec<_> = request
            .buffers
            .iter()
            .map(|buffer| {
                let window = BufferWindow { address, nbytes: buffer.nbytes };
                address = address.saturating_add(buffer.nbytes);
                window
            })
            .collect();
        let member = MemberWindow { chip: *chip, rank, device_context: 0, base: 0x1000, mapped_bytes };
        allocation.push_member(member, buffers);
    }
    allocation
}

/// Runs both checks with a mapping of exactly the window.
pub(crate) fn mapped(index: u32, request: &Arc<DomainRequest>, method: Method) -> Result<MappedWindow, ResetError> {
    CoveredWindow::check(request, method)?.map(id(index), &reply(id(index), request, request.window_bytes))
}

/// One domain in memory, as slow and plain as can be: a byte and a write count per mapped byte of each member.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) domain: DomainId,
    request: Arc<DomainRequest>,
    /// Per rank: contents, and how often each byte was written.
    pub(crate) windows: Vec<Vec<(u8, u32)>>,
}

/// What every mapped byte holds before a reset.
pub(crate) const DIRT: u8 = 0xEE;

impl Memory {
    pub(crate) fn new(domain: DomainId, request: &Arc<DomainRequest>, mapped_bytes: usize) -> Self {
        let windows = vec![vec![(DIRT, 0); mapped_bytes]; request.workers.len()];
        Self { domain, request: Arc::clone(request), windows }
    }

    fn rank(&self, chip: ChipId) -> usize {
        self.request.workers.iter().position(|worker| *worker == chip).expect("a copy goes to a member")
    }

    fn write(&mut self, chip: ChipId, start: u64, bytes: u64, value: u8) {
        let rank = self.rank(chip);
        for offset in start..start + bytes {
            let byte = &mut self.windows[rank][usize::try_from(offset).unwrap()];
            *byte = (value, byte.1 + 1);
        }
    }
}

/// Executes copies one by one on `memory`, with the backend's own rules; `staging` gives the size of each zero-filled
/// host buffer, whose id is its position.
pub(crate) fn execute(method: Method, copies: &[CopyTo], staging: &[u64], memory: &mut [Memory]) {
    for copy in copies {
        match copy.src {
            CopySource::Fill(value) => {
                assert_eq!(value, 0);
                assert!(matches!(method, Method::DeviceFill | Method::BufferFill), "fill needs device fill");
            }
            CopySource::Host(source) => {
                let size = staging[usize::try_from(source.index()).unwrap()];
                match method {
                    Method::WholeBuffer => assert_eq!(copy.nbytes, size, "copies are as long as their source"),
                    _ => assert!(copy.nbytes <= size, "no copy reads past its source"),
                }
            }
        }
        assert!(copy.nbytes > 0, "backends refuse copies of no bytes");
        match copy.dst {
            DevicePlace::DomainBuffer { domain, chip, buffer } => {
                assert!(matches!(method, Method::WholeBuffer | Method::BufferFill));
                let memory = memory.iter_mut().find(|m| m.domain == domain).expect("a planned domain");
                let buffers = &memory.request.buffers;
                let index = usize::try_from(buffer).unwrap();
                let start = buffers[..index].iter().map(|b| b.nbytes).sum();
                assert_eq!(copy.nbytes, buffers[index].nbytes, "the whole buffer");
                memory.write(chip, start, copy.nbytes, 0);
            }
            DevicePlace::Window { domain, chip, offset } => {
                assert!(method.reaches_slack(), "ranges need range copies");
                let memory = memory.iter_mut().find(|m| m.domain == domain).expect("a planned domain");
                memory.write(chip, offset, copy.nbytes, 0);
            }
            DevicePlace::Resident(_) => panic!("a reset never touches resident memory"),
        }
    }
}
