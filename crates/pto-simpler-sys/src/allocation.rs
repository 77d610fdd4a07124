//! What a backend answers when it has allocated (or found) a domain.

use crate::ids::{ChipId, DomainId};

/// The window of one member, as the backend mapped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberWindow {
    /// The chip worker.
    pub chip: ChipId,
    /// Its position in the domain.
    pub rank: u32,
    /// Opaque device-side address of the communication context; generated kernels take it as a scalar.
    pub device_context: u64,
    /// Device address of the first byte of the window. Addresses are per chip: two chips may report equal numbers.
    pub base: u64,
    /// Bytes really mapped, at least the requested window on a healthy backend (more where the backend aligns).
    pub mapped_bytes: u64,
}

/// Address and size of one named buffer on one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferWindow {
    /// Device address.
    pub address: u64,
    /// Size in bytes.
    pub nbytes: u64,
}

/// A reply to an allocation: reusable storage, so that a warm dispatch allocates nothing.
///
/// Members are in rank order; the buffers of all members stand in one list, rank-major, in declaration order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainAllocation {
    id: Option<DomainId>,
    members: Vec<MemberWindow>,
    buffers: Vec<BufferWindow>,
    buffers_per_member: usize,
}

impl DomainAllocation {
    /// Empty storage, to be filled by a backend.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets the previous reply, keeps its storage and names the domain that is about to be described.
    /// For backends: call this, then [`push_member`](Self::push_member) once per rank.
    pub fn begin(&mut self, id: DomainId, buffers_per_member: usize) {
        self.id = Some(id);
        self.members.clear();
        self.buffers.clear();
        self.buffers_per_member = buffers_per_member;
    }

    /// Adds the next rank and its buffers, in declaration order.
    pub fn push_member(&mut self, member: MemberWindow, buffers: impl IntoIterator<Item = BufferWindow>) {
        self.members.push(member);
        self.buffers.extend(buffers);
    }

    /// Forgets everything but the storage.
    pub fn clear(&mut self) {
        self.id = None;
        self.members.clear();
        self.buffers.clear();
        self.buffers_per_member = 0;
    }

    /// The domain, once a backend has filled the reply.
    #[must_use]
    pub fn id(&self) -> Option<DomainId> {
        self.id
    }

    /// All members in rank order.
    #[must_use]
    pub fn members(&self) -> &[MemberWindow] {
        &self.members
    }

    /// Changes members in place. For wrappers and tests that imitate other mappings.
    pub fn members_mut(&mut self) -> &mut [MemberWindow] {
        &mut self.members
    }

    /// The member with this rank.
    #[must_use]
    pub fn member(&self, rank: usize) -> Option<&MemberWindow> {
        self.members.get(rank)
    }

    /// The buffers of one member in declaration order; empty where the rank does not exist or the reply is short.
    #[must_use]
    pub fn buffers(&self, rank: usize) -> &[BufferWindow] {
        let Some(start) = rank.checked_mul(self.buffers_per_member) else { return &[] };
        let Some(end) = start.checked_add(self.buffers_per_member) else { return &[] };
        self.buffers.get(start..end).unwrap_or(&[])
    }
}

/// Where a physical domain is in its life.
///
/// `Live -> Released -> Freed`; a released domain's name may be used again at once, its memory is gone only when it
/// is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DomainState {
    /// Usable.
    Live,
    /// Somebody asked for its release; the memory may still be mapped.
    Released,
    /// The memory is gone.
    Freed,
}
