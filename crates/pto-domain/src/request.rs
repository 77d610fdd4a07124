//! Validity of requests, and the difference between two of them.
//!
//! Both functions run on every dispatch, so neither allocates unless it has something to report.

use std::fmt;
use std::sync::Arc;

use pto_simpler_sys::{ChipId, DomainRequest};

use crate::error::RequestError;

/// Checks the name of a domain.
///
/// # Errors
///
/// [`RequestError::EmptyName`].
pub fn check_name(name: &str) -> Result<(), RequestError> {
    if name.is_empty() { Err(RequestError::EmptyName) } else { Ok(()) }
}

/// Checks a request against a worker of `chips` chip workers and a backend that allows `max_ranks` members.
///
/// This is the one home of these rules: a request that passes here is one that a backend has no reason to refuse.
/// A window without named buffers is allowed (its device context is still of use), and so is slack.
///
/// The checks run in this order, and the first that fails is reported: members, window, buffers one by one, their
/// sum.
///
/// # Errors
///
/// The [`RequestError`] that says what is wrong and what is permitted. Nothing else happens.
pub fn check_request(request: &DomainRequest, chips: u32, max_ranks: u32) -> Result<(), RequestError> {
    let ranks = request.workers.len();
    if ranks == 0 {
        return Err(RequestError::NoWorkers);
    }
    // Before the pairwise comparison, so that its cost is bounded by the limit.
    if u64::try_from(ranks).unwrap_or(u64::MAX) > u64::from(max_ranks) {
        return Err(RequestError::TooManyRanks { ranks, max: max_ranks });
    }
    for (second, chip) in request.workers.iter().enumerate() {
        if chip.0 >= chips {
            return Err(RequestError::WorkerOutOfRange { chip: *chip, chips });
        }
        if let Some(first) = request.workers[..second].iter().position(|other| other == chip) {
            return Err(RequestError::DuplicateWorker { chip: *chip, first, second });
        }
    }
    if request.window_bytes == 0 {
        return Err(RequestError::ZeroWindow);
    }
    let mut named = 0u64;
    for (second, buffer) in request.buffers.iter().enumerate() {
        if buffer.nbytes == 0 {
            return Err(RequestError::EmptyBuffer { name: Arc::clone(&buffer.name) });
        }
        if let Some(first) = request.buffers[..second].iter().position(|other| other.name == buffer.name) {
            return Err(RequestError::DuplicateBuffer { name: Arc::clone(&buffer.name), first, second });
        }
        named = named.checked_add(buffer.nbytes).ok_or_else(|| RequestError::Overflow {
            name: Arc::clone(&buffer.name),
            before: named,
            nbytes: buffer.nbytes,
        })?;
    }
    if named > request.window_bytes {
        return Err(RequestError::Oversized { named, window: request.window_bytes });
    }
    Ok(())
}

/// Where two requests first differ, with both values: `first` is what the domain was allocated for, `now` what is
/// asked for.
///
/// Its `Display` form reads `window_bytes was 64, is now 128`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Difference {
    /// Members, or their order, which is the order of ranks.
    Workers {
        /// At allocation.
        first: Arc<[ChipId]>,
        /// In this request.
        now: Arc<[ChipId]>,
    },
    /// Window size in bytes.
    WindowBytes {
        /// At allocation.
        first: u64,
        /// In this request.
        now: u64,
    },
    /// The number of named buffers.
    NumberOfBuffers {
        /// At allocation.
        first: usize,
        /// In this request.
        now: usize,
    },
    /// The name of a buffer.
    BufferName {
        /// Position of the buffer.
        index: usize,
        /// At allocation.
        first: Arc<str>,
        /// In this request.
        now: Arc<str>,
    },
    /// The element type of a buffer.
    BufferDtype {
        /// Position of the buffer.
        index: usize,
        /// At allocation.
        first: Arc<str>,
        /// In this request.
        now: Arc<str>,
    },
    /// The element count of a buffer.
    BufferCount {
        /// Position of the buffer.
        index: usize,
        /// At allocation.
        first: u64,
        /// In this request.
        now: u64,
    },
    /// The size of a buffer in bytes.
    BufferBytes {
        /// Position of the buffer.
        index: usize,
        /// At allocation.
        first: u64,
        /// In this request.
        now: u64,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Workers { first, now } => write!(f, "workers were {first:?}, are now {now:?}"),
            Self::WindowBytes { first, now } => write!(f, "window_bytes was {first}, is now {now}"),
            Self::NumberOfBuffers { first, now } => write!(f, "number of buffers was {first}, is now {now}"),
            Self::BufferName { index, first, now } => {
                write!(f, "name of buffer {index} was {first:?}, is now {now:?}")
            }
            Self::BufferDtype { index, first, now } => {
                write!(f, "dtype of buffer {index} was {first:?}, is now {now:?}")
            }
            Self::BufferCount { index, first, now } => {
                write!(f, "count of buffer {index} was {first}, is now {now}")
            }
            Self::BufferBytes { index, first, now } => {
                write!(f, "nbytes of buffer {index} was {first}, is now {now}")
            }
        }
    }
}

/// The first field in which two requests differ, or `None` where they are equal. Order counts, in workers and in
/// buffers alike. Equal requests are compared without allocating.
#[must_use]
pub fn difference(first: &DomainRequest, now: &DomainRequest) -> Option<Difference> {
    if first.workers != now.workers {
        return Some(Difference::Workers {
            first: first.workers.as_slice().into(),
            now: now.workers.as_slice().into(),
        });
    }
    if first.window_bytes != now.window_bytes {
        return Some(Difference::WindowBytes { first: first.window_bytes, now: now.window_bytes });
    }
    if first.buffers.len() != now.buffers.len() {
        return Some(Difference::NumberOfBuffers { first: first.buffers.len(), now: now.buffers.len() });
    }
    first.buffers.iter().zip(&now.buffers).enumerate().find_map(|(index, (a, b))| {
        if a.name != b.name {
            let (first, now) = (Arc::clone(&a.name), Arc::clone(&b.name));
            Some(Difference::BufferName { index, first, now })
        } else if a.dtype != b.dtype {
            let (first, now) = (Arc::clone(&a.dtype), Arc::clone(&b.dtype));
            Some(Difference::BufferDtype { index, first, now })
        } else if a.count != b.count {
            Some(Difference::BufferCount { index, first: a.count, now: b.count })
        } else if a.nbytes != b.nbytes {
            Some(Difference::BufferBytes { index, first: a.nbytes, now: b.nbytes })
        } else {
            None
        }
    })
}
