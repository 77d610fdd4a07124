//! One dispatch's right to use a domain, bound by lifetime to the graph build in which it was given.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use pto_simpler_sys::{ChipId, DomainAllocation, DomainId, DomainRequest, MemberWindow, TensorPlace};

use crate::error::LeaseError;
use crate::key::DomainKey;

/// The right to make leases and to read physical ids from them.
///
/// There is one per [`DomainTable`](crate::DomainTable), made together with it; the dispatch layer keeps it, and a
/// program, which is handed leases only, has none. It is not `Clone`.
#[derive(Debug)]
pub struct LeaseAuthority {
    _private: (),
}

impl LeaseAuthority {
    pub(crate) const fn new() -> Self {
        Self { _private: () }
    }
}

/// What a lease is made of.
#[derive(Clone, Debug)]
pub struct LeaseParts {
    /// The physical domain.
    pub domain: DomainId,
    /// Which program leases it, and by what name.
    pub key: DomainKey,
    /// The number of dispatches, this one included, that leased the domain.
    pub epoch: u64,
    /// Whether this dispatch allocated it.
    pub first_use: bool,
    /// What was asked for.
    pub request: Arc<DomainRequest>,
    /// What the backend answered.
    pub allocation: Arc<DomainAllocation>,
}

/// Makes `'b` invariant: a lease of one build is not a lease of another, longer or shorter one.
type Build<'b> = PhantomData<fn(&'b ()) -> &'b ()>;

/// One dispatch's right to use a domain while its graph is being built (rule 11).
///
/// Cheap to clone; asking twice in one dispatch gives equal leases. It shows what the program asked for and where
/// the backend put it, never the physical id, and never a byte beyond the requested window.
///
/// The lifetime is that of the build. A builder that is generic over it cannot let the lease out:
///
/// ```compile_fail
/// use pto_domain::Lease;
/// fn build<R>(builder: impl for<'b> FnOnce(Lease<'b>) -> R) -> Option<R> { None }
/// let escaped = build(|lease| lease);
/// ```
///
/// nor store it outside:
///
/// ```compile_fail
/// use pto_domain::Lease;
/// fn build(builder: impl for<'b> FnOnce(Lease<'b>)) {}
/// let mut kept = None;
/// build(|lease| kept = Some(lease));
/// ```
///
/// and so for a buffer of it:
///
/// ```compile_fail
/// use pto_domain::{Lease, LeasedBuffer};
/// use pto_simpler_sys::ChipId;
/// fn build(builder: impl for<'b> FnOnce(Lease<'b>)) {}
/// let mut kept: Option<LeasedBuffer<'_>> = None;
/// build(|lease| kept = lease.buffer_at(ChipId(0), 0).ok());
/// ```
///
/// Nor do the lifetimes of two builds unify, not even where one outlives the other:
///
/// ```compile_fail
/// use pto_domain::Lease;
/// fn shorten<'outer: 'inner, 'inner>(lease: Lease<'outer>) -> Lease<'inner> { lease }
/// ```
///
/// so leases of two builds never mix:
///
/// ```compile_fail
/// use pto_domain::Lease;
/// fn build(builder: impl for<'b> FnOnce(Lease<'b>)) {}
/// build(|outer| build(|inner| drop([outer, inner])));
/// ```
///
/// What does compile is taking values out:
///
/// ```
/// use pto_domain::Lease;
/// fn build<R>(builder: impl for<'b> FnOnce(Lease<'b>) -> R) -> Option<R> { None }
/// let epoch: Option<u64> = build(|lease| lease.epoch());
/// ```
#[derive(Clone)]
pub struct Lease<'b> {
    parts: LeaseParts,
    build: Build<'b>,
}

impl<'b> Lease<'b> {
    /// A lease of these parts. The authority's holder answers for the lifetime: it must be that of a graph build.
    #[must_use]
    pub fn new(_authority: &LeaseAuthority, parts: LeaseParts) -> Self {
        Self { parts, build: PhantomData }
    }

    /// The physical domain, for the holder of the authority.
    #[must_use]
    pub fn domain_id(&self, _authority: &LeaseAuthority) -> DomainId {
        self.parts.domain
    }

    /// The whole mapping, for the holder of the authority.
    #[must_use]
    pub fn allocation(&self, _authority: &LeaseAuthority) -> &DomainAllocation {
        &self.parts.allocation
    }

    /// Which program leases it, and by what name.
    #[must_use]
    pub fn key(&self) -> &DomainKey {
        &self.parts.key
    }

    /// What the program calls it.
    #[must_use]
    pub fn name(&self) -> &str {
        self.parts.key.name().as_str()
    }

    /// The number of dispatches, this one included, that leased the domain: 1 at first use. With reset off, a signal
    /// value that grows with it never meets its own past (rule 16).
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.parts.epoch
    }

    /// Whether this dispatch allocated the domain: its windows are zero without a reset.
    #[must_use]
    pub fn is_first_use(&self) -> bool {
        self.parts.first_use
    }

    /// How many members it has.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.parts.request.workers.len()
    }

    /// What was asked for.
    #[must_use]
    pub fn request(&self) -> &DomainRequest {
        &self.parts.request
    }

    /// The member with this rank.
    #[must_use]
    pub fn chip(&self, rank: usize) -> Option<ChipId> {
        self.parts.request.workers.get(rank).copied()
    }

    /// The rank of a member.
    #[must_use]
    pub fn rank_of(&self, chip: ChipId) -> Option<usize> {
        self.parts.request.rank_of(chip)
    }

    /// Bytes of each window as *requested*. What a backend mapped beyond them is padding, which is never exposed.
    #[must_use]
    pub fn window_bytes(&self) -> u64 {
        self.parts.request.window_bytes
    }

    /// The communication context of a member, which generated kernels take as a scalar.
    ///
    /// # Errors
    ///
    /// [`LeaseError::NotAMember`] and [`LeaseError::BadReply`].
    pub fn device_context(&self, chip: ChipId) -> Result<u64, LeaseError> {
        self.member(chip).map(|(_, member)| member.device_context)
    }

    /// A member's buffer by name.
    ///
    /// # Errors
    ///
    /// [`LeaseError::NotAMember`], [`LeaseError::NoSuchBuffer`] and [`LeaseError::BadReply`].
    pub fn buffer(&self, chip: ChipId, name: &str) -> Result<LeasedBuffer<'b>, LeaseError> {
        let request = &self.parts.request;
        let index = request.buffer_index(name).ok_or_else(|| LeaseError::NoSuchBuffer {
            key: self.parts.key.clone(),
            name: name.into(),
            buffers: request.buffers.iter().map(|b| Arc::clone(&b.name)).collect(),
        })?;
        self.buffer_at(chip, index)
    }

    /// A member's buffer by its position in the request.
    ///
    /// # Errors
    ///
    /// [`LeaseError::NotAMember`], [`LeaseError::NoBufferAt`] and [`LeaseError::BadReply`].
    pub fn buffer_at(&self, chip: ChipId, index: usize) -> Result<LeasedBuffer<'b>, LeaseError> {
        let (rank, _) = self.member(chip)?;
        let request = &self.parts.request;
        let out_of_range =
            || LeaseError::NoBufferAt { key: self.parts.key.clone(), index, buffers: request.buffers.len() };
        let named = request.buffers.get(index).ok_or_else(out_of_range)?;
        let window = self.parts.allocation.buffers(rank).get(index).ok_or_else(|| self.bad_reply(chip, rank))?;
        if window.nbytes != named.nbytes {
            return Err(self.bad_reply(chip, rank));
        }
        let index = u32::try_from(index).map_err(|_| out_of_range())?;
        Ok(LeasedBuffer {
            domain: self.parts.domain,
            chip,
            index,
            address: window.address,
            nbytes: named.nbytes,
            build: PhantomData,
        })
    }

    fn member(&self, chip: ChipId) -> Result<(usize, &MemberWindow), LeaseError> {
        let rank = self.rank_of(chip).ok_or_else(|| LeaseError::NotAMember {
            key: self.parts.key.clone(),
            chip,
            members: self.parts.request.workers.as_slice().into(),
        })?;
        match self.parts.allocation.member(rank) {
            Some(member) if member.chip == chip => Ok((rank, member)),
            _ => Err(self.bad_reply(chip, rank)),
        }
    }

    fn bad_reply(&self, chip: ChipId, rank: usize) -> LeaseError {
        LeaseError::BadReply { key: self.parts.key.clone(), chip, rank }
    }
}

// By hand, so that not even a debug print lets the physical id out.
impl fmt::Debug for Lease<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("key", &format_args!("{}", self.parts.key))
            .field("epoch", &self.parts.epoch)
            .field("first_use", &self.parts.first_use)
            .field("request", &self.parts.request)
            .finish_non_exhaustive()
    }
}

/// One named buffer on one member, as long as the build lasts.
#[derive(Clone, Copy)]
pub struct LeasedBuffer<'b> {
    domain: DomainId,
    chip: ChipId,
    index: u32,
    address: u64,
    nbytes: u64,
    build: Build<'b>,
}

impl LeasedBuffer<'_> {
    /// Size in bytes.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Device address on its chip.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The member.
    #[must_use]
    pub fn chip(&self) -> ChipId {
        self.chip
    }

    /// Its position in the request.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Where a tensor argument finds it, for the holder of the authority.
    #[must_use]
    pub fn place(&self, _authority: &LeaseAuthority) -> TensorPlace {
        TensorPlace::DomainBuffer { domain: self.domain, chip: self.chip, buffer: self.index }
    }
}

impl fmt::Debug for LeasedBuffer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeasedBuffer")
            .field("chip", &self.chip)
            .field("index", &self.index)
            .field("address", &self.address)
            .field("nbytes", &self.nbytes)
            .finish_non_exhaustive()
    }
}
