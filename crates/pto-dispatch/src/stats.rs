//! Counters of a prepared program.

use crate::sync::{AtomicU64, Ordering};

/// What a program's dispatches have cost so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ProgramStats {
    /// Dispatches accepted by the backend.
    pub dispatches: u64,
    /// Domains allocated.
    pub allocations: u64,
    /// Leases of a domain that an earlier dispatch had allocated.
    pub reuses: u64,
    /// Bytes zeroed by resets.
    pub zeroed_bytes: u64,
    /// Copies (or fills) made by resets.
    pub reset_copies: u64,
    /// Staging buffers made.
    pub staging_buffers: u64,
    /// The most bytes of per-dispatch staging at one time.
    pub peak_staging_bytes: u64,
}

/// The counters behind [`ProgramStats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) dispatches: AtomicU64,
    pub(crate) allocations: AtomicU64,
    pub(crate) reuses: AtomicU64,
    pub(crate) zeroed_bytes: AtomicU64,
    pub(crate) reset_copies: AtomicU64,
    pub(crate) staging_buffers: AtomicU64,
    staging_bytes: AtomicU64,
    peak_staging_bytes: AtomicU64,
}

pub(crate) fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl Counters {
    pub(crate) fn staging_taken(&self, buffers: u64, bytes: u64) {
        add(&self.staging_buffers, buffers);
        let now = self.staging_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak_staging_bytes.fetch_max(now, Ordering::Relaxed);
    }

    pub(crate) fn staging_returned(&self, bytes: u64) {
        self.staging_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> ProgramStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ProgramStats {
            dispatches: read(&self.dispatches),
            allocations: read(&self.allocations),
            reuses: read(&self.reuses),
            zeroed_bytes: read(&self.zeroed_bytes),
            reset_copies: read(&self.reset_copies),
            staging_buffers: read(&self.staging_buffers),
            peak_staging_bytes: read(&self.peak_staging_bytes),
        }
    }
}
