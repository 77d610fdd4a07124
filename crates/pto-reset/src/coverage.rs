//! Which bytes of a window its named buffers cover, and whether a method of zeroing reaches the rest.

use std::sync::Arc;

use pto_simpler_sys::{Capabilities, CopyGranularity, DomainAllocation, DomainId, DomainRequest};

use crate::error::ResetError;
use crate::mapping::{MappedWindow, check_mapping};

/// The largest copy that a range-copying backend is asked for, and so the size of its one read-only source of zeros:
/// 1 MiB. Large enough that the cost of a call disappears behind that of its bytes, small enough that every process
/// can hold one.
pub const CHUNK_BYTES: u64 = 1 << 20;

/// How a backend zeroes windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Method {
    /// Copies of whole named buffers, each from a zero-filled host buffer of exactly its size. Does not reach slack.
    WholeBuffer,
    /// Copies of byte ranges of the window, all from one zero-filled chunk. Reaches slack.
    ByteRange {
        /// Size of the chunk: the most bytes of one copy.
        chunk_bytes: u64,
    },
    /// The device fills the window, one call per member, without a host source. Reaches slack.
    DeviceFill,
    /// The device fills whole named buffers, without a host source. Does not reach slack: for backends that can
    /// fill but not address a byte range.
    BufferFill,
}

impl Method {
    /// The cheapest method that a backend offers: fill before copies, ranges before whole buffers.
    #[must_use]
    pub fn of(capabilities: &Capabilities) -> Self {
        match (capabilities.device_fill, capabilities.copy_granularity) {
            (true, CopyGranularity::ByteRange) => Self::DeviceFill,
            (true, CopyGranularity::WholeBuffer) => Self::BufferFill,
            (false, CopyGranularity::ByteRange) => Self::ByteRange { chunk_bytes: CHUNK_BYTES },
            (false, CopyGranularity::WholeBuffer) => Self::WholeBuffer,
        }
    }

    /// Whether it zeroes bytes that no buffer names.
    #[must_use]
    pub const fn reaches_slack(self) -> bool {
        matches!(self, Self::ByteRange { .. } | Self::DeviceFill)
    }

    /// The size of the read-only chunk of zeros that must exist before the first reset, for a method that needs one.
    #[must_use]
    pub const fn chunk_bytes(self) -> Option<u64> {
        match self {
            Self::ByteRange { chunk_bytes } => Some(chunk_bytes),
            _ => None,
        }
    }
}

/// How much of a window its named buffers cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Coverage {
    /// Bytes of each window, as requested.
    pub window_bytes: u64,
    /// Bytes that the named buffers cover, from the start of the window on.
    pub named_bytes: u64,
    /// Bytes that they do not cover, up to the end of the *requested* window.
    pub slack_bytes: u64,
}

/// Works out the coverage of a request, in checked arithmetic. Allocates nothing on success.
///
/// # Errors
///
/// [`ResetError::ZeroWindow`], [`EmptyBuffer`](ResetError::EmptyBuffer),
/// [`DuplicateBuffer`](ResetError::DuplicateBuffer), [`Overflow`](ResetError::Overflow) and
/// [`Oversized`](ResetError::Oversized): a window whose coverage means nothing. `pto-domain` refuses these before a
/// backend sees them; here they guard users of this crate alone.
pub fn coverage(request: &DomainRequest) -> Result<Coverage, ResetError> {
    let window_bytes = request.window_bytes;
    if window_bytes == 0 {
        return Err(ResetError::ZeroWindow);
    }
    let mut named_bytes = 0u64;
    for (second, buffer) in request.buffers.iter().enumerate() {
        if buffer.nbytes == 0 {
            return Err(ResetError::EmptyBuffer { name: Arc::clone(&buffer.name) });
        }
        if let Some(first) = request.buffers[..second].iter().position(|other| other.name == buffer.name) {
            return Err(ResetError::DuplicateBuffer { name: Arc::clone(&buffer.name), first, second });
        }
        named_bytes = named_bytes.checked_add(buffer.nbytes).ok_or_else(|| ResetError::Overflow {
            name: Arc::clone(&buffer.name),
            before: named_bytes,
            nbytes: buffer.nbytes,
        })?;
    }
    match window_bytes.checked_sub(named_bytes) {
        Some(slack_bytes) => Ok(Coverage { window_bytes, named_bytes, slack_bytes }),
        None => Err(ResetError::Oversized { named: named_bytes, window: window_bytes }),
    }
}

/// Bytes from the start of the window to buffer `index`: buffers are placed back to back. `None` where there is no
/// such buffer or the sum does not fit in 64 bits.
#[must_use]
pub fn buffer_offset(request: &DomainRequest, index: usize) -> Option<u64> {
    request.buffers.get(index)?;
    request.buffers[..index].iter().try_fold(0u64, |sum, buffer| sum.checked_add(buffer.nbytes))
}

/// A window that a method can zero completely. Only [`check`](Self::check) makes one.
#[derive(Clone, Debug)]
pub struct CoveredWindow {
    request: Arc<DomainRequest>,
    method: Method,
    coverage: Coverage,
}

impl CoveredWindow {
    /// Checks that `method` reaches every byte of the requested window (rule 13). Allocates nothing on success.
    ///
    /// # Errors
    ///
    /// [`ResetError::Slack`] where bytes are out of the method's reach; [`ResetError::ZeroChunk`]; and whatever
    /// [`coverage()`] refuses.
    pub fn check(request: &Arc<DomainRequest>, method: Method) -> Result<Self, ResetError> {
        if method.chunk_bytes() == Some(0) {
            return Err(ResetError::ZeroChunk);
        }
        let coverage = coverage(request)?;
        if coverage.slack_bytes > 0 && !method.reaches_slack() {
            return Err(ResetError::Slack { named: coverage.named_bytes, window: coverage.window_bytes });
        }
        Ok(Self { request: Arc::clone(request), method, coverage })
    }

    /// What was asked for.
    #[must_use]
    pub fn request(&self) -> &Arc<DomainRequest> {
        &self.request
    }

    /// The method it was checked for.
    #[must_use]
    pub fn method(&self) -> Method {
        self.method
    }

    /// How much of it is named.
    #[must_use]
    pub fn coverage(&self) -> Coverage {
        self.coverage
    }

    /// Checks what the backend really mapped (rule 14) and gives what a plan is made of.
    ///
    /// # Errors
    ///
    /// [`ResetError::WrongDomain`] where the reply is about another domain, and whatever [`check_mapping`] refuses.
    pub fn map(self, domain: DomainId, allocation: &DomainAllocation) -> Result<MappedWindow, ResetError> {
        if allocation.id() != Some(domain) {
            return Err(ResetError::WrongDomain { domain, found: allocation.id() });
        }
        check_mapping(&self.request, allocation)?;
        Ok(MappedWindow::new(domain, self))
    }
}
