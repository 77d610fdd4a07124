//! Whether a backend really mapped what was requested.

use std::sync::Arc;

use pto_simpler_sys::{DomainAllocation, DomainId, DomainRequest};

use crate::coverage::CoveredWindow;
use crate::error::ResetError;

/// Checks a backend's reply against the request it answers: the members are the workers, in rank order, each window
/// has at least the requested bytes, and the buffers are those requested. Larger mappings are fine (rule 14).
/// Allocates nothing on success.
///
/// For every allocation, reset or not: a short window is unusable.
///
/// # Errors
///
/// [`ResetError::MemberCount`], [`WrongMember`](ResetError::WrongMember),
/// [`ShortMapping`](ResetError::ShortMapping), [`BufferCount`](ResetError::BufferCount) or
/// [`BufferSize`](ResetError::BufferSize), for the lowest rank that is wrong.
pub fn check_mapping(request: &DomainRequest, allocation: &DomainAllocation) -> Result<(), ResetError> {
    let members = allocation.members();
    if members.len() != request.workers.len() {
        return Err(ResetError::MemberCount { members: members.len(), workers: request.workers.len() });
    }
    for (rank, (member, requested)) in members.iter().zip(&request.workers).enumerate() {
        let chip = member.chip;
        if chip != *requested || usize::try_from(member.rank) != Ok(rank) {
            return Err(ResetError::WrongMember { rank, chip, found_rank: member.rank, requested: *requested });
        }
        if member.mapped_bytes < request.window_bytes {
            let (mapped, requested) = (member.mapped_bytes, request.window_bytes);
            return Err(ResetError::ShortMapping { chip, rank, mapped, requested });
        }
        let buffers = allocation.buffers(rank);
        if buffers.len() != request.buffers.len() {
            let (found, requested) = (buffers.len(), request.buffers.len());
            return Err(ResetError::BufferCount { chip, rank, found, requested });
        }
        for (buffer, named) in buffers.iter().zip(&request.buffers) {
            if buffer.nbytes != named.nbytes {
                let (found, requested) = (buffer.nbytes, named.nbytes);
                return Err(ResetError::BufferSize { chip, rank, name: Arc::clone(&named.name), found, requested });
            }
        }
    }
    Ok(())
}

/// A window that can be zeroed completely and is really mapped. Only [`CoveredWindow::map`] makes one.
#[derive(Clone, Debug)]
pub struct MappedWindow {
    domain: DomainId,
    covered: CoveredWindow,
}

impl MappedWindow {
    pub(crate) fn new(domain: DomainId, covered: CoveredWindow) -> Self {
        Self { domain, covered }
    }

    /// The physical domain.
    #[must_use]
    pub fn domain(&self) -> DomainId {
        self.domain
    }

    /// The coverage that was checked.
    #[must_use]
    pub fn covered(&self) -> &CoveredWindow {
        &self.covered
    }
}
