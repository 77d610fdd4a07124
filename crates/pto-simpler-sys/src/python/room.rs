//! Whether there is room for what the runtime, or a reservation, does not ask about before it touches it.
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
/// What the runtime exchanges messages with one child process through.
const MAILBOX_BYTES: u64 = 192 << 10;
/// Smaller windows are not worth reading the state of the machine's memory.
const SMALL: u64 = 16 << 20;

/// Where room is looked for.
#[derive(Clone, Copy)]
struct Room {
    shared_memory: fn() -> u64,
    memory: fn() -> u64,
}

impl Room {
    fn has(self, nbytes: u64) -> bool {
        nbytes <= (self.shared_memory)() && (nbytes <= SMALL || nbytes <= (self.memory)())
    }
}

const MACHINE: Room = Room { shared_memory, memory };

/// Checks that the windows of a new domain can exist.
pub(crate) fn check(call: Call, platform: &str, request: &DomainRequest) -> Result<(), BackendError> {
    windows(call, platform, request.workers.len(), request.window_bytes, MACHINE)
}

/// Checks that windows of that size can exist.
pub(crate) fn check_windows(call: Call, platform: &str, ranks: usize, bytes: u64) -> Result<(), BackendError> {
    windows(call, platform, ranks, bytes, MACHINE)
}

/// Checks that so many child processes can be talked to. The runtime writes to its mailboxes without asking: with no
/// room for them the system ends this very process.
pub(crate) fn check_processes(call: Call, processes: usize) -> Result<(), BackendError> {
    mailboxes(call, processes, MACHINE)
}

/// Checks that a host buffer can be reserved. Reserving one that cannot takes all memory that there is first, and
/// whoever the system then ends for it is mostly this very process.
pub(crate) fn check_buffer(call: Call, nbytes: u64) -> Result<(), BackendError> {
    buffer(call, nbytes, MACHINE)
}

fn windows(call: Call, platform: &str, ranks: usize, bytes: u64, room: Room) -> Result<(), BackendError> {
    let needed = bytes.checked_mul(ranks as u64).and_then(|n| n.checked_add(HEADER_BYTES));
    let needed = needed.filter(|n| i64::try_from(*n).is_ok());
    if platform.ends_with("sim") {
        if needed.is_none_or(|needed| !room.has(needed)) {
            let what = format!("{ranks} window(s) of {bytes} bytes, which simulated chips keep in shared memory");
            return Err(no_room(call, &what, needed.unwrap_or(u64::MAX), room));
        }
    } else if needed.is_none() {
        let message = format!("{ranks} window(s) of {bytes} bytes are more than the address space");
        let kind = FailureKind::OutOfDeviceMemory { requested_bytes: bytes };
        return Err(RuntimeFailure::new(call, "MemoryError", message).with_kind(kind).into());
    }
    Ok(())
}

fn buffer(call: Call, nbytes: u64, room: Room) -> Result<(), BackendError> {
    if room.has(nbytes) {
        return Ok(());
    }
    Err(no_room(call, &format!("a host buffer of {nbytes} bytes"), nbytes, room))
}

fn mailboxes(call: Call, processes: usize, room: Room) -> Result<(), BackendError> {
    let needed = MAILBOX_BYTES.saturating_mul(processes as u64);
    if room.has(needed) {
        return Ok(());
    }
    let what = format!("{needed} bytes, through which the runtime talks to {processes} child process(es)");
    Err(no_room(call, &what, needed, room))
}

fn no_room(call: Call, what: &str, requested_bytes: u64, room: Room) -> BackendError {
    let free = (room.shared_memory)().min((room.memory)());
    let message = format!("asked for {what}; shared memory has room for {free} bytes");
    RuntimeFailure::new(call, "MemoryError", message)
        .with_kind(FailureKind::OutOfSharedMemory { requested_bytes })
        .into()
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
    fn windows_of_any_size_are_refused_where_shared_memory_is_full() {
        let kind = |bytes, room| {
            windows(Call::AllocateDomain, "a2a3sim", 2, bytes, room).err().map(|e| {
                let failure = e.runtime().unwrap().clone();
                (failure.kind, failure.message)
            })
        };
        let full = Room { shared_memory: || 8192, memory: || u64::MAX };
        let (kind_of, message) = kind(4096, full).unwrap();
        assert_eq!(kind_of, FailureKind::OutOfSharedMemory { requested_bytes: 3 * 4096 });
        assert!(message.contains("room for 8192 bytes"), "{message}");
        assert_eq!(kind(2048, full), None);
        let exhausted = Room { shared_memory: || u64::MAX, memory: || 0 };
        assert_eq!(kind(4096, exhausted), None);
        assert!(kind(SMALL, exhausted).is_some());
    }

    #[test]
    fn host_buffers_that_would_take_all_memory_are_refused_before_they_take_any() {
        let kind = |nbytes, room| buffer(Call::CreateBuffer, nbytes, room).err().map(|e| e.runtime().unwrap().kind);
        let refused = |requested_bytes| Some(FailureKind::OutOfSharedMemory { requested_bytes });
        let full = Room { shared_memory: || 8192, memory: || u64::MAX };
        assert_eq!((kind(8192, full), kind(8193, full)), (None, refused(8193)));
        let exhausted = Room { shared_memory: || u64::MAX, memory: || 2 * SMALL };
        assert_eq!((kind(2 * SMALL, exhausted), kind(2 * SMALL + 1, exhausted)), (None, refused(2 * SMALL + 1)));
    }

    #[test]
    fn processes_are_not_started_where_shared_memory_is_full() {
        let room = Room { shared_memory: || 3 * MAILBOX_BYTES, memory: || u64::MAX };
        assert!(mailboxes(Call::Start, 3, room).is_ok());
        let error = mailboxes(Call::Start, 4, room).unwrap_err();
        let requested_bytes = 4 * MAILBOX_BYTES;
        assert_eq!(error.runtime().unwrap().kind, FailureKind::OutOfSharedMemory { requested_bytes });
        assert!(mailboxes(Call::Start, usize::MAX, room).is_err());
    }

    #[test]
    fn the_room_of_this_machine_is_a_number() {
        assert!(memory() > 0 && memory() < u64::MAX);
        assert!(shared_memory() < u64::MAX);
    }
}
