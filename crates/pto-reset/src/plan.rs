//! The copies that zero all retained domains of a program, and what they need from the host.

use std::sync::Arc;

use pto_simpler_sys::{ChipId, CopySource, CopyTo, DevicePlace, DomainId, DomainRequest, HostBufferId};

use crate::coverage::Method;
use crate::error::ResetError;
use crate::mapping::MappedWindow;

/// What one reset does. Made once per set of retained domains, executed by the dispatch layer as often as it likes.
///
/// Executing the copies in their order zeroes every byte of every requested window exactly once, and no other byte.
#[derive(Clone, Debug)]
pub struct ResetPlan {
    method: Method,
    windows: Vec<PlannedWindow>,
    staging_sizes: Vec<u64>,
    staging_bytes: u64,
    bytes: u64,
    copies: usize,
}

#[derive(Clone, Debug)]
struct PlannedWindow {
    domain: DomainId,
    request: Arc<DomainRequest>,
    /// For each buffer the position of its size in `staging_sizes`; empty unless whole buffers are copied.
    sources: Vec<usize>,
}

impl ResetPlan {
    /// Plans the reset of these windows, in this order. An empty list gives a plan that does nothing.
    ///
    /// # Errors
    ///
    /// [`ResetError::MethodMismatch`] where a window was checked for another method, and so may hold bytes that this
    /// one does not reach; [`ResetError::DomainTwice`]; [`ResetError::PlanOverflow`].
    pub fn new(method: Method, windows: &[MappedWindow]) -> Result<Self, ResetError> {
        let mut plan = Self {
            method,
            windows: Vec::with_capacity(windows.len()),
            staging_sizes: Vec::new(),
            staging_bytes: 0,
            bytes: 0,
            copies: 0,
        };
        for window in windows {
            let (domain, covered) = (window.domain(), window.covered());
            if covered.method() != method {
                return Err(ResetError::MethodMismatch { domain, checked: covered.method(), planned: method });
            }
            if plan.windows.iter().any(|planned| planned.domain == domain) {
                return Err(ResetError::DomainTwice { domain });
            }
            plan.add(domain, covered.request()).ok_or(ResetError::PlanOverflow)?;
        }
        Ok(plan)
    }

    /// The method.
    #[must_use]
    pub fn method(&self) -> Method {
        self.method
    }

    /// The sizes of the zero-filled host buffers that the copies start from: each distinct buffer size once, in the
    /// order in which it first appears (rule 15). Empty for methods that need no host buffers of their own.
    #[must_use]
    pub fn staging_sizes(&self) -> &[u64] {
        &self.staging_sizes
    }

    /// The sum of [`staging_sizes`](Self::staging_sizes): what one dispatch in flight holds.
    #[must_use]
    pub fn staging_bytes(&self) -> u64 {
        self.staging_bytes
    }

    /// All bytes that the reset zeroes, over all domains and members.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many copies it takes.
    #[must_use]
    pub fn copies(&self) -> usize {
        self.copies
    }

    /// Whether there is nothing to zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.copies == 0
    }

    /// How many sources [`write_copies`](Self::write_copies) takes: one per staging size, or the one chunk, or none.
    #[must_use]
    pub fn sources(&self) -> usize {
        match self.method {
            Method::WholeBuffer => self.staging_sizes.len(),
            Method::ByteRange { .. } => 1,
            Method::DeviceFill | Method::BufferFill => 0,
        }
    }

    /// Writes the copies into `out`, whose previous contents are dropped and whose storage is reused: it does not
    /// allocate where `out` has room for [`copies`](Self::copies).
    ///
    /// Order: domains as planned; within a domain rank after rank; within a rank the buffers in declaration order, or
    /// the chunks from the start of the window on.
    ///
    /// `sources[i]` is a zero-filled host buffer of `staging_sizes()[i]` bytes; for [`Method::ByteRange`] it is the
    /// one chunk; the filling methods take none.
    ///
    /// # Errors
    ///
    /// [`ResetError::SourceCount`] for another number of sources; [`ResetError::TooManyCopies`] where the list does
    /// not fit in memory. `out` is then empty.
    pub fn write_copies(&self, sources: &[HostBufferId], out: &mut Vec<CopyTo>) -> Result<(), ResetError> {
        out.clear();
        if sources.len() != self.sources() {
            return Err(ResetError::SourceCount { found: sources.len(), needed: self.sources() });
        }
        out.try_reserve(self.copies).map_err(|_| ResetError::TooManyCopies { copies: self.copies })?;
        for window in &self.windows {
            for chip in &window.request.workers {
                match self.method {
                    Method::WholeBuffer => {
                        let each = window.request.buffers.iter().zip(&window.sources).enumerate();
                        out.extend(each.map(|(index, (buffer, source))| CopyTo {
                            dst: window.buffer(*chip, index),
                            src: CopySource::Host(sources[*source]),
                            nbytes: buffer.nbytes,
                        }));
                    }
                    Method::BufferFill => {
                        let each = window.request.buffers.iter().enumerate();
                        out.extend(each.map(|(index, buffer)| CopyTo {
                            dst: window.buffer(*chip, index),
                            src: CopySource::Fill(0),
                            nbytes: buffer.nbytes,
                        }));
                    }
                    Method::ByteRange { chunk_bytes } => {
                        let end = window.request.window_bytes;
                        // Every chunk but the last is full, so no offset exceeds the window, and none overflows.
                        out.extend((0..end.div_ceil(chunk_bytes)).map(|chunk| {
                            let offset = chunk * chunk_bytes;
                            CopyTo {
                                dst: window.range(*chip, offset),
                                src: CopySource::Host(sources[0]),
                                nbytes: chunk_bytes.min(end - offset),
                            }
                        }));
                    }
                    Method::DeviceFill => out.push(CopyTo {
                        dst: window.range(*chip, 0),
                        src: CopySource::Fill(0),
                        nbytes: window.request.window_bytes,
                    }),
                }
            }
        }
        debug_assert_eq!(out.len(), self.copies, "the plan counted its copies");
        Ok(())
    }

    /// Adds one domain, or `None` where a count overflows.
    fn add(&mut self, domain: DomainId, request: &Arc<DomainRequest>) -> Option<()> {
        let mut sources = Vec::new();
        if self.method == Method::WholeBuffer {
            sources.reserve(request.buffers.len());
            for buffer in &request.buffers {
                let known = self.staging_sizes.iter().position(|size| *size == buffer.nbytes);
                if known.is_none() {
                    self.staging_bytes = self.staging_bytes.checked_add(buffer.nbytes)?;
                    self.staging_sizes.push(buffer.nbytes);
                }
                sources.push(known.unwrap_or(self.staging_sizes.len() - 1));
            }
        }
        let per_rank = match self.method {
            Method::WholeBuffer | Method::BufferFill => request.buffers.len(),
            Method::ByteRange { chunk_bytes } => {
                usize::try_from(request.window_bytes.div_ceil(chunk_bytes)).ok()?
            }
            Method::DeviceFill => 1,
        };
        self.copies = per_rank.checked_mul(request.workers.len())?.checked_add(self.copies)?;
        // Every method zeroes the requested window to the last byte: those that reach named buffers only are
        // refused where there is slack.
        let ranks = u64::try_from(request.workers.len()).ok()?;
        self.bytes = request.window_bytes.checked_mul(ranks)?.checked_add(self.bytes)?;
        self.windows.push(PlannedWindow { domain, request: Arc::clone(request), sources });
        Some(())
    }
}

impl PlannedWindow {
    fn buffer(&self, chip: ChipId, index: usize) -> DevicePlace {
        // A request of 2^32 buffers has no room in memory.
        let buffer = u32::try_from(index).unwrap_or(u32::MAX);
        DevicePlace::DomainBuffer { domain: self.domain, chip, buffer }
    }

    fn range(&self, chip: ChipId, offset: u64) -> DevicePlace {
        DevicePlace::Window { domain: self.domain, chip, offset }
    }
}
