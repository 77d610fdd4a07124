//! The configuration of one call.

use std::sync::Arc;

/// Number of ring sizes that a runtime takes.
pub const RING_COUNT: usize = 4;

/// Options of one run. Plain values: copied when a dispatch is submitted, so later changes cannot reach it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CallConfig {
    /// Number of AICPU threads; 0 lets the runtime choose.
    pub aicpu_threads: u32,
    /// Per-ring task windows, in slots; `None` keeps the runtime's own. Ignored by `host_build_graph`.
    pub ring_task_window: Option<[u64; RING_COUNT]>,
    /// Per-ring heaps, in bytes; `None` keeps the runtime's own.
    pub ring_heap: Option<[u64; RING_COUNT]>,
    /// Per-ring dependency pools, in entries; `None` keeps the runtime's own.
    pub ring_dep_pool: Option<[u64; RING_COUNT]>,
    /// Directory prefix of diagnostic output; needed by the diagnostic switches of the runtime.
    pub output_prefix: Option<Arc<str>>,
    /// Switch on the runtime's swimlane profile; needs `output_prefix`.
    pub swimlane: bool,
}

impl CallConfig {
    /// The runtime's defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}
