//! Errors of this crate. Each answers three questions: whose fault, may I retry, must I prepare the worker again.

use std::sync::Arc;

use pto_simpler_sys::{ChipId, DomainId, Family};

use crate::coverage::Method;

/// Why windows cannot be zeroed. Nothing was touched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResetError {
    /// A window of no bytes.
    #[error("window_bytes is 0; ask for at least 1 byte")]
    ZeroWindow,
    /// A buffer of no bytes.
    #[error("buffer {name:?} has nbytes 0; ask for at least 1 byte or leave the buffer out")]
    EmptyBuffer {
        /// The buffer.
        name: Arc<str>,
    },
    /// Two buffers of one name.
    #[error("buffers {first} and {second} are both called {name:?}; names are unique within a domain")]
    DuplicateBuffer {
        /// The name.
        name: Arc<str>,
        /// Position of the first.
        first: usize,
        /// Position of the second.
        second: usize,
    },
    /// The buffers' sizes do not add up within 64 bits.
    #[error(
        "{nbytes} bytes of buffer {name:?} after {before} bytes of earlier buffers exceed {} bytes; shrink them",
        u64::MAX
    )]
    Overflow {
        /// The buffer at which the sum overflows.
        name: Arc<str>,
        /// Bytes of all buffers before it.
        before: u64,
        /// Its own bytes.
        nbytes: u64,
    },
    /// The buffers do not fit in the window.
    #[error("named buffers sum to {named} bytes, but window_bytes is {window}; ask for at least {named}")]
    Oversized {
        /// Bytes of all named buffers.
        named: u64,
        /// Bytes of the window.
        window: u64,
    },
    /// Bytes that no buffer names, on a backend that reaches named buffers only (rule 13).
    #[error(
        "the window has slack that copies of whole buffers cannot zero: named {named} of {window} bytes; \
         pad the buffers to {window} bytes, ask for a window of {named}, or prepare with reset off"
    )]
    Slack {
        /// Bytes of all named buffers.
        named: u64,
        /// Bytes of the window.
        window: u64,
    },
    /// A chunk of no bytes.
    #[error("chunk_bytes is 0; use at least 1 byte ({} is the default)", crate::CHUNK_BYTES)]
    ZeroChunk,
    /// The backend mapped fewer bytes than were requested (rule 14).
    #[error(
        "{chip} (rank {rank}) mapped {mapped} bytes of a window of {requested} requested bytes; close the worker"
    )]
    ShortMapping {
        /// The member.
        chip: ChipId,
        /// Its rank.
        rank: usize,
        /// Bytes mapped.
        mapped: u64,
        /// Bytes requested.
        requested: u64,
    },
    /// The backend described another number of members than take part.
    #[error("the allocation describes {members} members, but {workers} workers were requested; close the worker")]
    MemberCount {
        /// Members described.
        members: usize,
        /// Workers requested.
        workers: usize,
    },
    /// The backend described the members in another order than requested.
    #[error(
        "the allocation's member {rank} is {chip} as rank {found_rank}, but {requested} was requested as rank \
         {rank}; close the worker"
    )]
    WrongMember {
        /// Position in the allocation, which is the rank requested.
        rank: usize,
        /// The chip described there.
        chip: ChipId,
        /// The rank it claims.
        found_rank: u32,
        /// The chip requested.
        requested: ChipId,
    },
    /// The backend described another number of buffers than requested.
    #[error("the allocation describes {found} buffers on {chip} (rank {rank}), not {requested}; close the worker")]
    BufferCount {
        /// The member.
        chip: ChipId,
        /// Its rank.
        rank: usize,
        /// Buffers described.
        found: usize,
        /// Buffers requested.
        requested: usize,
    },
    /// The backend described a buffer of another size than requested.
    #[error(
        "buffer {name:?} has {found} bytes on {chip} (rank {rank}), but {requested} bytes were requested; close \
         the worker"
    )]
    BufferSize {
        /// The member.
        chip: ChipId,
        /// Its rank.
        rank: usize,
        /// The buffer.
        name: Arc<str>,
        /// Bytes described.
        found: u64,
        /// Bytes requested.
        requested: u64,
    },
    /// The allocation describes another domain.
    #[error("broken invariant: the allocation describes {found:?}, not {domain}")]
    WrongDomain {
        /// The domain that is to be reset.
        domain: DomainId,
        /// The one described, if any.
        found: Option<DomainId>,
    },
    /// A window that was checked for another method.
    #[error("broken invariant: {domain} was checked for {checked:?}, but the plan is for {planned:?}")]
    MethodMismatch {
        /// The domain.
        domain: DomainId,
        /// What its coverage was checked for.
        checked: Method,
        /// What the plan is for.
        planned: Method,
    },
    /// The same domain twice in one plan.
    #[error("broken invariant: {domain} is in the plan twice")]
    DomainTwice {
        /// The domain.
        domain: DomainId,
    },
    /// More bytes or copies than can be counted.
    #[error("the reset adds up to more than {} bytes or copies; ask for smaller windows", u64::MAX)]
    PlanOverflow,
    /// No memory for the list of copies.
    #[error("no memory for a list of {copies} copies; ask for smaller windows or larger chunks")]
    TooManyCopies {
        /// Copies planned.
        copies: usize,
    },
    /// Another number of zero-filled sources than the plan needs.
    #[error("broken invariant: {found} zero-filled sources were given, the plan needs {needed}")]
    SourceCount {
        /// Sources given.
        found: usize,
        /// Sources needed.
        needed: usize,
    },
}

impl ResetError {
    /// The family. A mapping that does not match its request is the backend's failure.
    #[must_use]
    pub const fn family(&self) -> Family {
        match self {
            Self::ZeroWindow
            | Self::EmptyBuffer { .. }
            | Self::DuplicateBuffer { .. }
            | Self::Overflow { .. }
            | Self::Oversized { .. }
            | Self::Slack { .. }
            | Self::ZeroChunk
            | Self::PlanOverflow
            | Self::TooManyCopies { .. } => Family::Misuse,
            Self::ShortMapping { .. }
            | Self::MemberCount { .. }
            | Self::WrongMember { .. }
            | Self::BufferCount { .. }
            | Self::BufferSize { .. } => Family::Backend,
            Self::WrongDomain { .. }
            | Self::MethodMismatch { .. }
            | Self::DomainTwice { .. }
            | Self::SourceCount { .. } => Family::Broken,
        }
    }

    /// Never: the same values give the same answer.
    #[must_use]
    pub const fn may_retry(&self) -> bool {
        false
    }

    /// Whether the worker must be closed and prepared again: yes, unless it is the caller who can fix it.
    #[must_use]
    pub const fn must_reprepare(&self) -> bool {
        !matches!(self.family(), Family::Misuse)
    }
}
