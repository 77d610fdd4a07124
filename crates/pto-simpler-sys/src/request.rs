//! What a program asks for when it wants a communication domain.

use std::sync::Arc;

use crate::ids::ChipId;

/// One named buffer of a window, in declaration order. Buffers are placed back to back, without alignment.
///
/// Only `nbytes` is physical. `dtype` and `count` are opaque to the runtime: they are compared, never interpreted.
/// Generated code sends the dtype `opaque` and, as count, the logical byte length.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NamedBuffer {
    /// Unique within its domain.
    pub name: Arc<str>,
    /// Element type as the generator spelled it.
    pub dtype: Arc<str>,
    /// Element count (or logical byte length), opaque.
    pub count: u64,
    /// Physical size in bytes.
    pub nbytes: u64,
}

impl NamedBuffer {
    /// A buffer of `nbytes` bytes with dtype `opaque` and the same number as count.
    #[must_use]
    pub fn bytes(name: impl Into<Arc<str>>, nbytes: u64) -> Self {
        Self { name: name.into(), dtype: "opaque".into(), count: nbytes, nbytes }
    }

    /// A buffer whose physical size is `logical` bytes padded up to a multiple of `align`; the count keeps the
    /// logical length. Padding removes slack between what a window reserves and what its buffers cover.
    ///
    /// Returns `None` where the padded size does not fit in 64 bits or `align` is zero.
    ///
    /// ```
    /// use pto_simpler_sys::NamedBuffer;
    /// let b = NamedBuffer::padded("data", 16_388, 64).unwrap();
    /// assert_eq!((b.count, b.nbytes), (16_388, 16_448));
    /// ```
    #[must_use]
    pub fn padded(name: impl Into<Arc<str>>, logical: u64, align: u64) -> Option<Self> {
        let nbytes = logical.checked_next_multiple_of(align)?;
        Some(Self { name: name.into(), dtype: "opaque".into(), count: logical, nbytes })
    }
}

/// A request for a domain: who takes part, how large each window is and which buffers it holds.
///
/// The order of `workers` defines dense ranks: `[1, 0]` makes chip 1 rank 0. Equality is exact and includes order.
/// A request says nothing about validity; `pto-domain` checks it before a backend sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DomainRequest {
    /// Participating chip workers in rank order.
    pub workers: Vec<ChipId>,
    /// Bytes asked for on every participating chip.
    pub window_bytes: u64,
    /// Named buffers in declaration order.
    pub buffers: Vec<NamedBuffer>,
}

impl DomainRequest {
    /// A request over the given chips whose window is exactly the sum of its buffers (saturating; `pto-domain`
    /// refuses a sum that does not fit).
    #[must_use]
    pub fn packed(workers: impl IntoIterator<Item = u32>, buffers: Vec<NamedBuffer>) -> Self {
        let window_bytes = buffers.iter().fold(0u64, |sum, b| sum.saturating_add(b.nbytes));
        Self { workers: workers.into_iter().map(ChipId).collect(), window_bytes, buffers }
    }

    /// The position of the buffer called `name`.
    #[must_use]
    pub fn buffer_index(&self, name: &str) -> Option<usize> {
        self.buffers.iter().position(|b| &*b.name == name)
    }

    /// The rank of `chip`, if it takes part.
    #[must_use]
    pub fn rank_of(&self, chip: ChipId) -> Option<usize> {
        self.workers.iter().position(|w| *w == chip)
    }
}
