//! What a backend can do, in two parts: known before the start, and negotiated at the start.

use std::sync::Arc;

/// How finely a backend copies into a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyGranularity {
    /// Only from the start of a named buffer, as many bytes as the host buffer holds.
    WholeBuffer,
    /// Any byte range of the requested window.
    ByteRange,
}

/// How a backend keeps a domain between runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Retention {
    /// Through the public `get_or_allocate_domain(retain_after_run = true)`.
    Public,
    /// Through private hooks of the runtime, chosen explicitly ("legacy retention").
    PrivateHooks,
    /// Not at all; the text says what is missing.
    Unsupported {
        /// The call or hook that was looked for and not found.
        missing: Arc<str>,
    },
}

/// Numeric limits, checked before a call reaches the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Limits {
    /// Most members of a domain.
    pub ranks: u32,
    /// Most registered callables.
    pub callables: u32,
    /// Most tensors of a chip task.
    pub tensors: u32,
    /// Most scalars of a chip task.
    pub scalars: u32,
    /// Most bytes of one task's argument blob.
    pub argument_bytes: u64,
    /// Deepest nesting of scopes.
    pub scope_depth: u32,
}

impl Default for Limits {
    /// The limits of the Simpler snapshot of August 2026.
    fn default() -> Self {
        Self { ranks: 64, callables: 64, tensors: 256, scalars: 128, argument_bytes: 64_016, scope_depth: 64 }
    }
}

/// Known before the start.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Platform name, for example `a2a3sim`.
    pub platform: Arc<str>,
    /// Runtime name, for example `tensormap_and_ringbuffer`.
    pub runtime: Arc<str>,
    /// Device ids; a chip worker is an index into this list.
    pub device_ids: Vec<u32>,
    /// Number of host-side sub-workers.
    pub sub_workers: u32,
    /// Copies into windows.
    pub copy_granularity: CopyGranularity,
    /// Whether the device can fill memory without a host source ([`CopySource::Fill`](crate::CopySource::Fill)).
    pub device_fill: bool,
    /// How domains are kept between runs.
    pub retention: Retention,
    /// Whether a failed task ends the worker's useful life, even in ordinary mode.
    pub failed_task_is_final: bool,
    /// Whether host entries (generated programs) can run.
    pub entries: bool,
    /// Numeric limits.
    pub limits: Limits,
}

impl Capabilities {
    /// Capabilities of a plain whole-buffer backend with public retention; change the fields from there.
    #[must_use]
    pub fn new(platform: impl Into<Arc<str>>, runtime: impl Into<Arc<str>>, device_ids: Vec<u32>) -> Self {
        Self {
            platform: platform.into(),
            runtime: runtime.into(),
            device_ids,
            sub_workers: 0,
            copy_granularity: CopyGranularity::WholeBuffer,
            device_fill: false,
            retention: Retention::Public,
            failed_task_is_final: false,
            entries: false,
            limits: Limits::default(),
        }
    }

    /// Number of chip workers.
    #[must_use]
    pub fn chips(&self) -> u32 {
        u32::try_from(self.device_ids.len()).unwrap_or(u32::MAX)
    }
}

/// How many runs may overlap on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Depth {
    /// Exactly this many (1 or 2).
    Exactly(u32),
    /// The runtime does not say; never more than this.
    AtMost(u32),
}

impl Depth {
    /// How many accepted runs certainly do not make the next submission wait.
    #[must_use]
    pub const fn guaranteed(self) -> u32 {
        match self {
            Self::Exactly(n) => n,
            Self::AtMost(_) => 1,
        }
    }

    /// How many runs can be accepted and not ended at the same time.
    #[must_use]
    pub const fn most(self) -> u32 {
        match self {
            Self::Exactly(n) | Self::AtMost(n) => n,
        }
    }
}

/// Negotiated at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Negotiated {
    /// How many runs may overlap.
    pub depth: Depth,
}

impl Negotiated {
    /// What a backend reports from `start`.
    #[must_use]
    pub const fn new(depth: Depth) -> Self {
        Self { depth }
    }
}
