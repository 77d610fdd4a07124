//! Whether a measurement fits into shared memory, asked before anything is made.

use std::path::Path;
use std::sync::Arc;

use nix::sys::statvfs::statvfs;
use pto_mock::Mapping;

use crate::driver::{Mode, Setup, needs_ranges};
use crate::report::bytes;
use crate::workload::plan::ProgramPlan;
use crate::workload::program::input_bytes;

/// Where shared-memory objects live on Linux.
pub(crate) const DIRECTORY: &str = "/dev/shm";

/// Source of zeros of a worker that resets by byte ranges.
const RANGE_CHUNK: u64 = 1 << 20;

/// Why a measurement cannot begin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SharedMemoryError {
    /// The file system cannot be asked.
    #[error("the free space of {DIRECTORY} cannot be read: {source}; mount a tmpfs there")]
    Unknown {
        /// What the system says.
        source: nix::Error,
    },
    /// Too little space.
    #[error(
        "the programs need {} of shared memory, {DIRECTORY} has {} free: use fewer chips, fewer programs or a lower \
         depth, or enlarge it",
        bytes(*required),
        bytes(*free)
    )]
    TooSmall {
        /// Bytes needed.
        required: u64,
        /// Bytes free.
        free: u64,
    },
}

/// The most bytes of shared memory that these modes need; they run one after another.
pub(crate) fn required(plans: &[Arc<ProgramPlan>], modes: &[Mode], setup: &Setup) -> u64 {
    let windows = plans.iter().map(|plan| windows(plan, setup.mapping)).fold(0, u64::saturating_add);
    let in_flight = usize::try_from(setup.depth).unwrap_or(usize::MAX);
    let mut staging: Vec<u64> = plans.iter().map(|plan| staging(plan)).collect();
    staging.sort_unstable_by_key(|bytes| std::cmp::Reverse(*bytes));
    let staging = if !modes.contains(&Mode::Reset) {
        0
    } else if needs_ranges(plans) {
        RANGE_CHUNK
    } else {
        // One program alone may be in flight twice.
        (0..in_flight).map(|i| staging.get(i % staging.len().max(1)).copied().unwrap_or(0)).sum()
    };
    let output = plans.iter().map(|plan| plan.output_bytes).max().unwrap_or(0);
    let private = plans.iter().map(|plan| input_bytes(plan).saturating_add(carries(plan)));
    let buffers = private.fold(output, u64::saturating_add).saturating_mul(u64::from(setup.depth));
    windows.saturating_add(staging).saturating_add(buffers)
}

/// Asks the file system.
///
/// # Errors
///
/// [`SharedMemoryError`].
pub(crate) fn check(required: u64) -> Result<u64, SharedMemoryError> {
    let free = free(Path::new(DIRECTORY)).map_err(|source| SharedMemoryError::Unknown { source })?;
    if required > free { Err(SharedMemoryError::TooSmall { required, free }) } else { Ok(free) }
}

fn free(directory: &Path) -> Result<u64, nix::Error> {
    let stat = statvfs(directory)?;
    Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
}

fn windows(plan: &ProgramPlan, mapping: Mapping) -> u64 {
    let mapped = plan.domains.iter().map(|d| mapping.mapped(d.request.window_bytes).unwrap_or(u64::MAX));
    mapped.fold(0, u64::saturating_add).saturating_mul(u64::from(plan.chips))
}

/// Zeros that one resetting dispatch holds: one buffer per distinct size.
fn staging(plan: &ProgramPlan) -> u64 {
    let mut sizes: Vec<u64> =
        plan.domains.iter().flat_map(|d| d.request.buffers.iter().map(|b| b.nbytes)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes.into_iter().fold(0, u64::saturating_add)
}

/// What ranks hold between the runs of one request.
fn carries(plan: &ProgramPlan) -> u64 {
    let each = plan.run_ordered().map(|(_, e)| e.nbytes).fold(0, u64::saturating_add);
    each.saturating_mul(u64::from(plan.chips))
}
