//! Whether there is room for windows, which the runtime does not ask before it touches them.
//!
//! Simulated chips have their windows in shared memory and fill them at once: with too little of it a chip process is
//! ended by the system in the middle of the allocation, and so may be anybody else.

use std::fs;

use nix::sys::statvfs::statvfs;

use super::memory::SHM_DIRECTORY;
use crate::error::{BackendError, Call, FailureKind, RuntimeFailure};
use crate::request::DomainRequest;

/// What a simulated domain takes besides its windows.
const HEADER_BYTES: u64 = 4096;
/// Smaller windows are not worth reading the state of the machine's memory.
const SMALL: u64 = 16 << 20;

/// Checks that the windows of a new domain can exist.
pub(crate) fn check(call: Call, platform: &str, request: &DomainRequest) -> Result<(), BackendError> {
    let ranks = request.workers.len() as u64;
    let needed = request.window_bytes.checked_mul(ranks).and_then(|n| n.checked_add(HEADER_BYTES));
    let needed = needed.filter(|n| i64::try_from(*n).is_ok());
    let failure = |message: String| RuntimeFailure::new(call, "MemoryError", message);
    if platform.ends_with("sim") {
        let room = || shared_memory().min(memory());
        let full = match needed {
            None => true,
            Some(needed) => needed > SMALL && needed > room(),
        };
        if full {
            let requested_bytes = needed.unwrap_or(u64::MAX);
            let message = format!(
                "{ranks} window(s) of {} bytes asked for, which simulated chips keep in shared memory; it has room \
                 for {} bytes",
                request.window_bytes,
                room()
            );
            return Err(failure(message).with_kind(FailureKind::OutOfSharedMemory { requested_bytes }).into());
        }
    } else if needed.is_none() {
        let requested_bytes = request.window_bytes;
        let message = format!("{ranks} window(s) of {requested_bytes} bytes are more than the address space");
        return Err(failure(message).with_kind(FailureKind::OutOfDeviceMemory { requested_bytes }).into());
    }
    Ok(())
}

/// Bytes that shared memory has room for; without limit where the system does not say.
fn shared_memory() -> u64 {
    statvfs(SHM_DIRECTORY).map_or(u64::MAX, |s| s.blocks_available().saturating_mul(s.fragment_size()))
}

/// Bytes that the machine can give without ending somebody for it; without limit where the system does not say.
fn memory() -> u64 {
    let Ok(text) = fs::read_to_string("/proc/meminfo") else { return u64::MAX };
    let kib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
    };
    let swap = kib("SwapFree").unwrap_or(0);
    kib("MemAvailable").map_or(u64::MAX, |available| available.saturating_add(swap).saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::NamedBuffer;

    fn kind(platform: &str, nbytes: u64) -> Option<FailureKind> {
        let request = DomainRequest::packed(0..2, vec![NamedBuffer::bytes("b", nbytes)]);
        check(Call::AllocateDomain, platform, &request).err().map(|e| e.runtime().unwrap().kind)
    }

    #[test]
    fn windows_that_cannot_exist_are_refused() {
        let shared = |requested_bytes| Some(FailureKind::OutOfSharedMemory { requested_bytes });
        assert_eq!(kind("a5sim", 64), None);
        assert_eq!(kind("a5sim", SMALL), None);
        assert_eq!(kind("a5sim", 1 << 60), shared((1 << 61) + HEADER_BYTES));
        for nbytes in [1 << 62, 1 << 63, u64::MAX] {
            assert_eq!(kind("a5sim", nbytes), shared(u64::MAX));
            assert_eq!(kind("a5", nbytes), Some(FailureKind::OutOfDeviceMemory { requested_bytes: nbytes }));
        }
        // Only the device knows.
        assert_eq!(kind("a5", 1 << 60), None);
    }

    #[test]
    fn the_room_of_this_machine_is_a_number() {
        assert!(memory() > 0 && memory() < u64::MAX);
        assert!(shared_memory() < u64::MAX);
    }
}
