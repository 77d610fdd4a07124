//! Errors of this crate. Each answers three questions: whose fault, may I retry, must I prepare the worker again.

use std::sync::Arc;

use pto_simpler_sys::{ChipId, DomainId, Family};

use crate::key::{DomainKey, ProgramIndex};
use crate::request::Difference;
use crate::state::DomainPhase;

/// A request that no backend could serve. Always misuse: the caller changes the request, nothing was done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The domain has no name.
    #[error("the name of a domain is empty; name it")]
    EmptyName,
    /// Nobody takes part.
    #[error("workers is empty; name at least one chip worker")]
    NoWorkers,
    /// A chip worker takes part twice.
    #[error("{chip} is a worker twice, as rank {first} and as rank {second}; name each chip worker once")]
    DuplicateWorker {
        /// The chip worker.
        chip: ChipId,
        /// Its first rank.
        first: usize,
        /// Its second rank.
        second: usize,
    },
    /// A chip worker that does not exist.
    #[error("worker {chip} is out of range; this worker drives {chips} chips, numbered from chip0")]
    WorkerOutOfRange {
        /// The chip worker asked for.
        chip: ChipId,
        /// How many there are.
        chips: u32,
    },
    /// More members than the backend allows.
    #[error("{ranks} ranks exceed the backend's limit of {max}; name at most {max} workers")]
    TooManyRanks {
        /// Members asked for.
        ranks: usize,
        /// Most members.
        max: u32,
    },
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
}

impl RequestError {
    /// Always [`Family::Misuse`].
    #[must_use]
    pub const fn family(&self) -> Family {
        Family::Misuse
    }

    /// Never: the same request fails again.
    #[must_use]
    pub const fn may_retry(&self) -> bool {
        false
    }

    /// Never: the worker is as it was.
    #[must_use]
    pub const fn must_reprepare(&self) -> bool {
        false
    }
}

/// Why a domain cannot be served from the table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DomainError {
    /// The request differs from the one the domain was allocated for (rule 9).
    #[error("the request for {key} has changed: {difference}; ask as the first time, or under another name")]
    SpecChanged {
        /// The domain.
        key: DomainKey,
        /// The first differing field, with both values.
        difference: Difference,
    },
    /// An earlier failure has poisoned persistent dispatch (rule 17).
    #[error("retained domains are no longer served after an earlier failure; close the worker")]
    Poisoned,
    /// The worker is being closed (rule 20).
    #[error("retained domains are no longer served, because the worker is closing; prepare another worker")]
    Closing,
    /// This one domain is no longer the table's to serve.
    #[error("{key} is {phase} and can no longer be leased; close the worker")]
    NotLive {
        /// The domain.
        key: DomainKey,
        /// What it is instead of live.
        phase: DomainPhase,
    },
    /// A broken invariant.
    #[error(transparent)]
    Table(#[from] TableError),
}

impl DomainError {
    /// The family.
    #[must_use]
    pub const fn family(&self) -> Family {
        match self {
            Self::SpecChanged { .. } | Self::Closing => Family::Misuse,
            Self::Poisoned | Self::NotLive { .. } => Family::Backend,
            Self::Table(error) => error.family(),
        }
    }

    /// Never: each of these lasts.
    #[must_use]
    pub const fn may_retry(&self) -> bool {
        false
    }

    /// Whether the worker must be closed and prepared again.
    #[must_use]
    pub const fn must_reprepare(&self) -> bool {
        !matches!(self, Self::SpecChanged { .. })
    }
}

/// A broken invariant of the table: a bug in its caller, or in a backend whose reply it was given.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// A change of phase that the table of legal edges does not hold.
    #[error("broken invariant: {key} cannot go from {from} to {to}")]
    Broken {
        /// The domain.
        key: DomainKey,
        /// Its phase.
        from: DomainPhase,
        /// The phase it was told to enter.
        to: DomainPhase,
    },
    /// A slot of another table.
    #[error("broken invariant: slot {slot} does not exist; the table holds {len} domains")]
    UnknownSlot {
        /// The slot.
        slot: usize,
        /// How many there are.
        len: usize,
    },
    /// A program of another worker.
    #[error("broken invariant: {program} does not exist; the table was made for {programs} programs")]
    UnknownProgram {
        /// The program.
        program: ProgramIndex,
        /// How many there are.
        programs: usize,
    },
    /// A key that is present already (I1).
    #[error("broken invariant: {key} was allocated a second time (I1)")]
    DuplicateKey {
        /// The key.
        key: DomainKey,
    },
    /// A backend id that is present already (I2).
    #[error("broken invariant: the backend gave {id} to {second}, but {first} has it (I2)")]
    DuplicateId {
        /// The backend's id.
        id: DomainId,
        /// Who has it.
        first: DomainKey,
        /// Who was given it too.
        second: DomainKey,
    },
    /// Device memory that a live domain has already (I2).
    #[error("broken invariant: the windows of {first} and {second} overlap on {chip} (I2)")]
    SharedMemory {
        /// Where.
        chip: ChipId,
        /// Who has it.
        first: DomainKey,
        /// Who was given it too.
        second: DomainKey,
    },
    /// A reply that names no domain.
    #[error("broken invariant: the allocation of {key} carries no domain id")]
    NoId {
        /// The domain.
        key: DomainKey,
    },
    /// The table's own bookkeeping is wrong.
    #[error("broken invariant: {what}")]
    Inconsistent {
        /// What was found.
        what: String,
    },
}

impl TableError {
    /// Always [`Family::Broken`].
    #[must_use]
    pub const fn family(&self) -> Family {
        Family::Broken
    }

    /// Never.
    #[must_use]
    pub const fn may_retry(&self) -> bool {
        false
    }

    /// Always.
    #[must_use]
    pub const fn must_reprepare(&self) -> bool {
        true
    }
}

/// Why a lease does not give what was asked of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// A chip worker that does not take part.
    #[error("{chip} is no member of {key}; its members are {members:?}")]
    NotAMember {
        /// The domain.
        key: DomainKey,
        /// The chip worker asked for.
        chip: ChipId,
        /// Those that take part, in rank order.
        members: Arc<[ChipId]>,
    },
    /// A name that no buffer has.
    #[error("{key} has no buffer {name:?}; its buffers are {buffers:?}")]
    NoSuchBuffer {
        /// The domain.
        key: DomainKey,
        /// The name asked for.
        name: Arc<str>,
        /// The names of its buffers in declaration order.
        buffers: Arc<[Arc<str>]>,
    },
    /// A position that no buffer has.
    #[error("{key} has no buffer {index}; it has {buffers} buffers, numbered from 0")]
    NoBufferAt {
        /// The domain.
        key: DomainKey,
        /// The position asked for.
        index: usize,
        /// How many buffers it has.
        buffers: usize,
    },
    /// The backend's reply does not describe the domain that was asked for.
    #[error("broken invariant: the allocation of {key} does not describe {chip} as rank {rank}")]
    BadReply {
        /// The domain.
        key: DomainKey,
        /// The member that is missing, or lacks the buffer.
        chip: ChipId,
        /// Its rank in the request.
        rank: usize,
    },
}

impl LeaseError {
    /// The family.
    #[must_use]
    pub const fn family(&self) -> Family {
        match self {
            Self::BadReply { .. } => Family::Broken,
            _ => Family::Misuse,
        }
    }

    /// Never: the same question gets the same answer.
    #[must_use]
    pub const fn may_retry(&self) -> bool {
        false
    }

    /// Whether the worker must be closed and prepared again.
    #[must_use]
    pub const fn must_reprepare(&self) -> bool {
        matches!(self, Self::BadReply { .. })
    }
}
