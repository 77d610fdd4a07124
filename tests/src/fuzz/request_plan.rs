//! Requests and reset plans.
//!
//! Claims: validity is what wide arithmetic and sets say it is; no input panics; a plan zeroes each byte of each
//! requested window exactly once and no other byte, or it is refused for a reason that the model sees too.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pto_domain::{DomainTable, ProgramIndex, check_request, difference};
use pto_reset::{CoveredWindow, Method, ResetPlan, check_mapping, coverage};
use pto_simpler_sys::{
    BufferWindow, ChipId, CopySource, CopyTo, DevicePlace, DomainAllocation, DomainId, DomainRequest, HostBufferId,
    MemberWindow, NamedBuffer,
};

use super::Bytes;

/// The largest window that is marked byte by byte; larger ones are only counted.
const MARKED: u64 = 4096;

#[derive(Debug)]
enum Size {
    Small(u8),
    Medium(u16),
    Any(u64),
    /// So many below the largest.
    Huge(u8),
}

impl Size {
    fn read(input: &mut Bytes<'_>) -> Self {
        match input.below(4) {
            0 => Self::Small(input.u8()),
            1 => Self::Medium(input.u16()),
            2 => Self::Any(input.u64()),
            _ => Self::Huge(input.u8()),
        }
    }

    fn bytes(&self) -> u64 {
        match *self {
            Self::Small(n) => n.into(),
            Self::Medium(n) => n.into(),
            Self::Any(n) => n,
            Self::Huge(below) => u64::MAX - u64::from(below),
        }
    }
}

#[derive(Debug)]
enum Window {
    /// The sum of the buffers, saturating, and so many more.
    Packed(u8),
    Given(Size),
}

#[derive(Debug)]
struct Domain {
    workers: Vec<u8>,
    window: Window,
    buffers: Vec<(u8, Size)>,
    /// Per rank: mapped bytes more or less than requested.
    mapped: Vec<i16>,
}

impl Domain {
    fn read(input: &mut Bytes<'_>) -> Self {
        Self {
            workers: input.list(9, Bytes::u8),
            window: if input.flag() { Window::Given(Size::read(input)) } else { Window::Packed(input.u8()) },
            // One more than there are names.
            buffers: input.list(17, |input| (input.u8(), Size::read(input))),
            mapped: input.list(9, |input| input.u16().cast_signed()),
        }
    }
}

#[derive(Debug)]
enum How {
    Whole,
    Ranges(u8),
    Fill,
    FillBuffers,
}

#[derive(Debug)]
struct Input {
    chips: u8,
    max_ranks: u8,
    how: How,
    domains: Vec<Domain>,
}

impl Input {
    fn read(input: &mut Bytes<'_>) -> Self {
        Self {
            chips: input.below(10),
            max_ranks: input.below(10),
            how: match input.below(4) {
                0 => How::Whole,
                1 => How::Ranges(input.u8()),
                2 => How::Fill,
                _ => How::FillBuffers,
            },
            domains: input.list(4, Domain::read),
        }
    }
}

impl Domain {
    fn request(&self) -> DomainRequest {
        let named = |(name, size): &(u8, Size)| NamedBuffer::bytes(format!("b{}", name % 16), size.bytes());
        let mut request = DomainRequest::packed(
            self.workers.iter().map(|chip| u32::from(chip % 8)),
            self.buffers.iter().map(named).collect(),
        );
        request.window_bytes = match &self.window {
            Window::Packed(more) => request.window_bytes.saturating_add((*more).into()),
            Window::Given(size) => size.bytes(),
        };
        request
    }

    fn reply(&self, index: u32, request: &DomainRequest) -> DomainAllocation {
        let mut reply = DomainAllocation::new();
        reply.begin(DomainId::new(index, 1), request.buffers.len());
        for (rank, chip) in request.workers.iter().enumerate() {
            let off = self.mapped.get(rank).copied().unwrap_or(0);
            let mapped_bytes = request.window_bytes.saturating_add_signed(off.into());
            let member = MemberWindow {
                chip: *chip,
                rank: u32::try_from(rank).unwrap(),
                device_context: 0,
                base: u64::from(index) << 40,
                mapped_bytes,
            };
            let buffers = request.buffers.iter().map(|b| BufferWindow { address: 0, nbytes: b.nbytes });
            reply.push_member(member, buffers);
        }
        reply
    }
}

/// Whether a request is valid, and its slack, in wide arithmetic.
fn judge(request: &DomainRequest, chips: u32, max_ranks: u32) -> (bool, bool, i128) {
    let named: i128 = request.buffers.iter().map(|b| i128::from(b.nbytes)).sum();
    let slack = i128::from(request.window_bytes) - named;
    let names: BTreeSet<_> = request.buffers.iter().map(|b| &b.name).collect();
    let sizes = slack >= 0
        && request.window_bytes > 0
        && names.len() == request.buffers.len()
        && request.buffers.iter().all(|b| b.nbytes > 0);
    let members: BTreeSet<_> = request.workers.iter().collect();
    let people = !members.is_empty()
        && members.len() == request.workers.len()
        && members.len() <= max_ranks as usize
        && members.iter().all(|chip| chip.0 < chips);
    (people, sizes, slack)
}

/// Arbitrary requests, mappings and methods through `pto-domain` and `pto-reset`, against a model that marks bytes.
///
/// # Panics
///
/// Where a claim does not hold.
pub fn request_plan(bytes: &[u8]) {
    let input = Input::read(&mut Bytes::new(bytes));
    let (chips, max_ranks) = (u32::from(input.chips), u32::from(input.max_ranks));
    let method = match input.how {
        How::Whole => Method::WholeBuffer,
        How::Ranges(chunk) => Method::ByteRange { chunk_bytes: chunk.into() },
        How::Fill => Method::DeviceFill,
        How::FillBuffers => Method::BufferFill,
    };
    let whole = matches!(input.how, How::Whole | How::FillBuffers);
    let chunkless = matches!(input.how, How::Ranges(0));

    let (mut table, authority) = DomainTable::new(1);
    let program = ProgramIndex::new(0);
    let mut windows = Vec::new();
    let mut requests: BTreeMap<DomainId, Arc<DomainRequest>> = BTreeMap::new();
    for (domain, index) in input.domains.iter().zip(0u32..) {
        let request = Arc::new(domain.request());
        assert!(difference(&request, &request.as_ref().clone()).is_none());
        let (people, sizes, slack) = judge(&request, chips, max_ranks);
        assert_eq!(check_request(&request, chips, max_ranks).is_ok(), people && sizes);
        match coverage(&request) {
            Ok(found) => assert!(sizes && i128::from(found.slack_bytes) == slack),
            Err(_) => assert!(!sizes),
        }
        let covered = CoveredWindow::check(&request, method);
        assert_eq!(covered.is_ok(), sizes && !chunkless && (slack == 0 || !whole));
        let reply = domain.reply(index, &request);
        let short = reply.members().iter().any(|member| member.mapped_bytes < request.window_bytes);
        assert_eq!(check_mapping(&request, &reply).is_err(), short);
        let id = DomainId::new(index, 1);
        let name = format!("d{index}");
        if people && sizes && !short {
            // A window of all memory may overlap others; then the table refuses it, and nothing else may go wrong.
            if let Ok(slot) = table.insert(program, &name, &request, reply.clone()) {
                assert_eq!(table.lookup(program, &name, &request).unwrap(), Some(slot));
                let lease = table.lease(slot, &authority).unwrap();
                for chip in &request.workers {
                    for i in 0..request.buffers.len() {
                        assert_eq!(lease.buffer_at(*chip, i).unwrap().nbytes(), request.buffers[i].nbytes);
                    }
                }
            }
        }
        let Ok(covered) = covered else { continue };
        let mapped = covered.map(id, &reply);
        assert_eq!(mapped.is_err(), short);
        if let (Ok(mapped), true) = (mapped, people) {
            windows.push(mapped);
            requests.insert(id, request);
        }
    }
    table.self_check().unwrap();

    let total: u128 = requests.values().map(|r| u128::from(r.window_bytes) * r.workers.len() as u128).sum();
    let Ok(plan) = ResetPlan::new(method, &windows) else {
        assert!(total > u128::from(u64::MAX), "only what cannot be counted is refused");
        return;
    };
    assert_eq!(u128::from(plan.bytes()), total);
    if requests.values().any(|request| request.window_bytes > MARKED) {
        return;
    }
    let sizes: BTreeSet<u64> = requests.values().flat_map(|r| r.buffers.iter().map(|b| b.nbytes)).collect();
    let staged: BTreeSet<u64> = plan.staging_sizes().iter().copied().collect();
    assert_eq!(staged.len(), plan.staging_sizes().len());
    if method == Method::WholeBuffer {
        assert_eq!(staged, sizes);
    } else {
        assert!(staged.is_empty());
    }
    let sources: Vec<_> =
        (0..u32::try_from(plan.sources()).unwrap()).map(|index| HostBufferId::new(index, 0)).collect();
    let mut copies = Vec::new();
    plan.write_copies(&sources, &mut copies).unwrap();
    assert_eq!(copies.len(), plan.copies());
    check_bytes(&plan, &requests, &copies);
}

/// Marks every written byte; each byte of a requested window must be marked once, and there are no others.
fn check_bytes(plan: &ResetPlan, requests: &BTreeMap<DomainId, Arc<DomainRequest>>, copies: &[CopyTo]) {
    let mut marks: BTreeMap<(DomainId, ChipId), Vec<u8>> = BTreeMap::new();
    for (id, request) in requests {
        for chip in &request.workers {
            marks.insert((*id, *chip), vec![0; request.window_bytes as usize]);
        }
    }
    for copy in copies {
        if let CopySource::Host(source) = copy.src {
            match plan.method() {
                Method::ByteRange { chunk_bytes } => assert!(copy.nbytes <= chunk_bytes),
                _ => assert_eq!(plan.staging_sizes()[source.index() as usize], copy.nbytes),
            }
        }
        let (domain, chip, start) = match copy.dst {
            DevicePlace::DomainBuffer { domain, chip, buffer } => {
                let buffers = &requests[&domain].buffers;
                assert_eq!(copy.nbytes, buffers[buffer as usize].nbytes);
                (domain, chip, buffers[..buffer as usize].iter().map(|b| b.nbytes).sum())
            }
            DevicePlace::Window { domain, chip, offset } => (domain, chip, offset),
            DevicePlace::Resident(_) => panic!("a reset never touches resident memory"),
        };
        let window = marks.get_mut(&(domain, chip)).expect("copies go to members");
        for offset in start..start + copy.nbytes {
            window[offset as usize] += 1;
        }
    }
    assert!(marks.values().flatten().all(|mark| *mark == 1));
}
