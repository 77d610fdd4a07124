//! Windows of domains and ranges of memory, as tasks hold them.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;
use pto_simpler_sys::ChipId;

use crate::kernel::Freed;
use crate::memory::Segment;

/// A byte range of a segment, with what may be done to it.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) segment: Arc<Segment>,
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) writable: bool,
    pub(crate) freed: Freed,
}

impl Region {
    /// A part of the region, where it fits.
    pub(crate) fn part(&self, offset: u64, len: u64) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| Self { start: self.start + offset, len, ..self.clone() })
    }
}

/// Where a named buffer lies in each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) offset: u64,
    pub(crate) nbytes: u64,
}

/// One member's window.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    pub(crate) segment: Arc<Segment>,
    pub(crate) freed: Freed,
}

/// All windows of a domain, shared with the tasks that reach them.
#[derive(Debug)]
pub(crate) struct DomainWindows {
    pub(crate) window_bytes: u64,
    pub(crate) buffers: Vec<Span>,
    pub(crate) members: Vec<Window>,
}

impl DomainWindows {
    pub(crate) fn ranks(&self) -> usize {
        self.members.len()
    }

    /// The requested bytes of a member's window.
    pub(crate) fn window(&self, rank: usize) -> Option<Region> {
        self.members.get(rank).map(|member| Region {
            segment: Arc::clone(&member.segment),
            start: 0,
            len: self.window_bytes,
            writable: true,
            freed: Arc::clone(&member.freed),
        })
    }
}

/// What a device context stands for.
#[derive(Clone, Debug)]
pub(crate) struct ContextEntry {
    pub(crate) chip: ChipId,
    pub(crate) rank: usize,
    pub(crate) windows: Arc<DomainWindows>,
}

/// Device contexts of live domains. Numbers are never used twice, so a stale one names nothing.
#[derive(Debug, Default)]
pub(crate) struct Contexts(RwLock<HashMap<u64, ContextEntry>>);

impl Contexts {
    pub(crate) fn find(&self, context: u64) -> Option<ContextEntry> {
        self.0.read().get(&context).cloned()
    }

    pub(crate) fn insert(&self, context: u64, entry: ContextEntry) {
        self.0.write().insert(context, entry);
    }

    pub(crate) fn remove(&self, context: u64) {
        self.0.write().remove(&context);
    }
}
