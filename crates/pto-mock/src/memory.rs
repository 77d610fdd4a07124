//! Real memory for windows, resident buffers and host buffers. The only module of this crate with `unsafe`.
//!
//! # Memory model
//!
//! A [`Segment`] is a run of 32-bit atomic words. *Every* access to it, of every kind, is an atomic access to one
//! of those words: bulk copies use relaxed word loads and stores, single bytes at the ends of a copy are written by
//! an atomic read-modify-write of the word that holds them (so the neighbouring bytes of a concurrent writer
//! survive), and signal cells are the same words with acquire and release ordering. There is no Rust reference to
//! the bytes themselves, shared or exclusive, and there are no accesses of mixed size. Kernels may therefore race as
//! they do on a device: what a racing reader sees is unspecified word by word, but the behaviour is defined.
//!
//! # Shared memory
//!
//! 1. The name is random and created exclusively, close-on-exec.
//! 2. Space is reserved with `posix_fallocate` before anything is mapped, so a full file system is an error here and
//!    never a SIGBUS in a kernel.
//! 3. The mapping is made, and the name is unlinked at once. A name that could not be mapped is unlinked too.
//!
//! The heap backing exists for Miri and for platforms other than Linux; it behaves the same.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

/// Where the emulator's memory comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The process heap: for Miri, and for platforms other than Linux.
    Heap,
    /// POSIX shared memory (`/dev/shm` on Linux).
    Shared,
    /// Shared mappings of files made in this directory.
    SharedIn(PathBuf),
}

impl Default for Memory {
    /// Shared memory on Linux; the heap under Miri and elsewhere.
    fn default() -> Self {
        if cfg!(all(target_os = "linux", not(miri))) { Self::Shared } else { Self::Heap }
    }
}

/// Bytes per atomic word.
const WORD: usize = size_of::<AtomicU32>();

/// The most bytes of one segment: far more than any file system or address space of today offers. Larger requests
/// are refused as "no room" without asking the system.
const MAX_SEGMENT_BYTES: u64 = 1 << 46;

/// Bytes of the stack buffer through which one segment is copied into another.
const COPY_CHUNK: usize = 4096;

/// Why a segment could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SegmentError {
    /// No room. Nothing is left behind.
    #[error("no room for {bytes} bytes ({what})")]
    Full { bytes: u64, what: String },
    /// Another failure of the system. Nothing is left behind.
    #[error("cannot map {bytes} bytes: {what}")]
    System { bytes: u64, what: String },
}

/// An access outside a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bytes {offset}..+{len} lie outside the {size} bytes there are")]
pub(crate) struct OutOfBounds {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) size: u64,
}

/// Makes segments of one backing, and knows which shared-memory names exist right now.
#[derive(Debug)]
pub(crate) struct SegmentFactory {
    backing: Memory,
    linked: Arc<Mutex<BTreeSet<String>>>,
}

impl SegmentFactory {
    pub(crate) fn new(backing: Memory) -> Self {
        Self { backing, linked: Arc::default() }
    }

    /// The names that are linked at this moment: empty but for the instant in which a segment is made.
    pub(crate) fn linked(&self) -> Vec<String> {
        self.linked.lock().iter().cloned().collect()
    }

    /// A segment of `bytes` zero bytes. A read-only one cannot be written, by the hardware where the backing allows.
    pub(crate) fn zeroed(&self, bytes: u64, writable: bool) -> Result<Segment, SegmentError> {
        if bytes == 0 || bytes > MAX_SEGMENT_BYTES {
            let what = format!("segments have 1 to {MAX_SEGMENT_BYTES} bytes");
            return Err(SegmentError::Full { bytes, what });
        }
        let size = usize::try_from(bytes).ok().and_then(|b| b.checked_next_multiple_of(WORD));
        let Some(size) = size else {
            return Err(SegmentError::Full { bytes, what: "more than the address space".to_owned() });
        };
        let (base, owner) = match &self.backing {
            Memory::Heap => heap::zeroed(bytes, size)?,
            #[cfg(target_os = "linux")]
            Memory::Shared => shared::zeroed(None, &self.linked, bytes, size, writable)?,
            #[cfg(target_os = "linux")]
            Memory::SharedIn(dir) => shared::zeroed(Some(dir), &self.linked, bytes, size, writable)?,
            #[cfg(not(target_os = "linux"))]
            Memory::Shared | Memory::SharedIn(_) => {
                let what = "shared memory needs Linux; choose Memory::Heap".to_owned();
                return Err(SegmentError::System { bytes, what });
            }
        };
        Ok(Segment { base, words: size / WORD, bytes, writable, owner })
    }
}

/// Who gives the memory back.
#[derive(Debug)]
enum Owner {
    Heap,
    #[cfg(target_os = "linux")]
    Mapping,
}

/// A run of atomic words.
pub(crate) struct Segment {
    base: NonNull<AtomicU32>,
    words: usize,
    bytes: u64,
    writable: bool,
    owner: Owner,
}

// SAFETY: a segment owns its memory alone (the heap block is its own, the mapping was made from a file that was
// created exclusively and is unlinked), hands out references to atomics only, and frees the memory in `drop`, which
// has `&mut self`. Atomics may be used and dropped from any thread.
unsafe impl Send for Segment {}
// SAFETY: as above; through `&Segment` only atomic operations on the words are possible.
unsafe impl Sync for Segment {}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment").field("bytes", &self.bytes).field("owner", &self.owner).finish_non_exhaustive()
    }
}

impl Segment {
    /// The word with this index; the caller has checked the byte range.
    fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < self.words, "every byte range is checked before its words are touched");
        // SAFETY: `base` points to `words` initialised (zeroed) and aligned 32-bit words that live as long as
        // `self`: block alignment is that of `AtomicU32`, pages are aligned more strictly, and the index is in
        // bounds. All accesses to the memory go through this function, so all are atomic and of one size. A
        // read-only mapping is only ever loaded from: every store checks `writable` first, and relaxed and acquire
        // word loads are allowed on read-only pages.
        unsafe { &*self.base.as_ptr().add(index) }
    }

    fn check(&self, offset: u64, len: u64) -> Result<usize, OutOfBounds> {
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => usize::try_from(offset),
            _ => return Err(OutOfBounds { offset, len, size: self.bytes }),
        }
        .map_err(|_| OutOfBounds { offset, len, size: self.bytes })
    }

    fn check_store(&self, offset: u64, len: u64) -> Result<usize, OutOfBounds> {
        if !self.writable {
            return Err(OutOfBounds { offset, len, size: 0 });
        }
        self.check(offset, len)
    }

    /// Whether stores are possible.
    pub(crate) fn writable(&self) -> bool {
        self.writable
    }

    /// Reads bytes, relaxed.
    pub(crate) fn load(&self, offset: u64, out: &mut [u8]) -> Result<(), OutOfBounds> {
        let mut at = self.check(offset, out.len() as u64)?;
        let mut out = out;
        while !out.is_empty() {
            let (word, byte) = (at / WORD, at % WORD);
            let taken = if byte == 0 && out.len() >= WORD {
                let whole = out.len() / WORD * WORD;
                for (i, chunk) in out[..whole].chunks_exact_mut(WORD).enumerate() {
                    chunk.copy_from_slice(&self.word(word + i).load(Ordering::Relaxed).to_ne_bytes());
                }
                whole
            } else {
                let n = (WORD - byte).min(out.len());
                let bytes = self.word(word).load(Ordering::Relaxed).to_ne_bytes();
                out[..n].copy_from_slice(&bytes[byte..byte + n]);
                n
            };
            out = &mut out[taken..];
            at += taken;
        }
        Ok(())
    }

    /// Writes bytes, relaxed; bytes outside the range keep what they hold, also under concurrent writers.
    pub(crate) fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let mut at = self.check_store(offset, bytes.len() as u64)?;
        let mut bytes = bytes;
        while !bytes.is_empty() {
            let (word, byte) = (at / WORD, at % WORD);
            let taken = if byte == 0 && bytes.len() >= WORD {
                let whole = bytes.len() / WORD * WORD;
                for (i, chunk) in bytes[..whole].chunks_exact(WORD).enumerate() {
                    let mut value = [0; WORD];
                    value.copy_from_slice(chunk);
                    self.word(word + i).store(u32::from_ne_bytes(value), Ordering::Relaxed);
                }
                whole
            } else {
                let n = (WORD - byte).min(bytes.len());
                self.merge(word, byte, &bytes[..n]);
                n
            };
            bytes = &bytes[taken..];
            at += taken;
        }
        Ok(())
    }

    /// Replaces some bytes of one word atomically.
    fn merge(&self, word: usize, byte: usize, bytes: &[u8]) {
        let word = self.word(word);
        let mut old = word.load(Ordering::Relaxed);
        loop {
            let mut new = old.to_ne_bytes();
            new[byte..byte + bytes.len()].copy_from_slice(bytes);
            let new = u32::from_ne_bytes(new);
            match word.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return,
                Err(seen) => old = seen,
            }
        }
    }

    /// Sets bytes, relaxed.
    pub(crate) fn fill(&self, offset: u64, len: u64, byte: u8) -> Result<(), OutOfBounds> {
        self.check_store(offset, len)?;
        let chunk = [byte; COPY_CHUNK];
        let (mut at, mut left) = (offset, len);
        while left > 0 {
            // Chunks end on word boundaries, so only the two ends of the range are partial words.
            let room = COPY_CHUNK - usize::try_from(at % WORD as u64).unwrap_or(0);
            let n = usize::try_from(left).unwrap_or(room).min(room);
            self.store(at, &chunk[..n])?;
            at += n as u64;
            left -= n as u64;
        }
        Ok(())
    }

    /// Copies from another segment, relaxed; says whether every byte copied was zero.
    pub(crate) fn copy_from(&self, at: u64, source: &Self, from: u64, len: u64) -> Result<bool, OutOfBounds> {
        self.check_store(at, len)?;
        source.check(from, len)?;
        let mut buffer = [0; COPY_CHUNK];
        let (mut done, mut zero) = (0, true);
        while done < len {
            let n = usize::try_from(len - done).unwrap_or(COPY_CHUNK).min(COPY_CHUNK);
            source.load(from + done, &mut buffer[..n])?;
            zero &= buffer[..n].iter().all(|b| *b == 0);
            self.store(at + done, &buffer[..n])?;
            done += n as u64;
        }
        Ok(zero)
    }

    /// The word at a byte offset that is a multiple of four.
    pub(crate) fn cell(&self, offset: u64) -> Result<&AtomicU32, OutOfBounds> {
        let at = self.check(offset, WORD as u64)?;
        if at % WORD != 0 {
            return Err(OutOfBounds { offset, len: WORD as u64, size: self.bytes });
        }
        Ok(self.word(at / WORD))
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        match self.owner {
            Owner::Heap => heap::release(self.base, self.words),
            #[cfg(target_os = "linux")]
            Owner::Mapping => shared::release(self.base, self.words),
        }
    }
}

mod heap {
    use super::{AtomicU32, NonNull, Owner, SegmentError, WORD};
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    pub(super) fn zeroed(bytes: u64, size: usize) -> Result<(NonNull<AtomicU32>, Owner), SegmentError> {
        let full = || SegmentError::Full { bytes, what: "the heap is full".to_owned() };
        let layout = Layout::array::<AtomicU32>(size / WORD).map_err(|_| full())?;
        // SAFETY: the layout is not of size zero: a segment has at least one byte, rounded up to whole words.
        let block = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(block.cast::<AtomicU32>()).ok_or_else(full)?;
        Ok((base, Owner::Heap))
    }

    pub(super) fn release(base: NonNull<AtomicU32>, words: usize) {
        if let Ok(layout) = Layout::array::<AtomicU32>(words) {
            // SAFETY: `base` came from `alloc_zeroed` with this very layout (same word count) and is freed once,
            // by the drop of the segment that owned it.
            unsafe { dealloc(base.as_ptr().cast(), layout) }
        }
    }
}

#[cfg(target_os = "linux")]
mod shared {
    use std::collections::BTreeSet;
    use std::ffi::c_void;
    use std::num::NonZeroUsize;
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    use nix::errno::Errno;
    use nix::fcntl::{OFlag, posix_fallocate};
    use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap, shm_open, shm_unlink};
    use nix::sys::stat::Mode;
    use nix::sys::statvfs::fstatvfs;
    use parking_lot::Mutex;

    use super::{AtomicU32, NonNull, Owner, SegmentError, WORD};

    /// How often another random name is tried when one exists already.
    const NAME_ATTEMPTS: usize = 8;

    /// A name that exists until this is dropped.
    struct Linked {
        name: String,
        path: Option<PathBuf>,
        registry: Arc<Mutex<BTreeSet<String>>>,
    }

    impl Drop for Linked {
        fn drop(&mut self) {
            let gone = match &self.path {
                Some(path) => std::fs::remove_file(path).is_ok(),
                None => shm_unlink(self.name.as_str()).is_ok(),
            };
            if gone {
                self.registry.lock().remove(&self.name);
            }
        }
    }

    pub(super) fn zeroed(
        dir: Option<&PathBuf>,
        registry: &Arc<Mutex<BTreeSet<String>>>,
        bytes: u64,
        size: usize,
        writable: bool,
    ) -> Result<(NonNull<AtomicU32>, Owner), SegmentError> {
        let system = |what: String| SegmentError::System { bytes, what };
        let (fd, linked) = create(dir.map(PathBuf::as_path), registry, bytes)?;
        reserve(&fd, bytes, size)?;
        let length = NonZeroUsize::new(size).ok_or_else(|| system("no bytes".to_owned()))?;
        let protection = if writable { ProtFlags::PROT_READ | ProtFlags::PROT_WRITE } else { ProtFlags::PROT_READ };
        // SAFETY: a new mapping at an address that the kernel chooses cannot overlap memory in use. The file was
        // created exclusively by us and nobody else has a descriptor of it; its `size` bytes are reserved, so an
        // access cannot fault, and it is never truncated.
        let mapped = unsafe { mmap(None, length, protection, MapFlags::MAP_SHARED, &fd, 0) };
        drop(linked);
        let mapped = mapped.map_err(|errno| match errno {
            Errno::ENOMEM => SegmentError::Full { bytes, what: "no address space".to_owned() },
            other => system(format!("mmap: {other}")),
        })?;
        Ok((mapped.cast(), Owner::Mapping))
    }

    fn create(
        dir: Option<&Path>,
        registry: &Arc<Mutex<BTreeSet<String>>>,
        bytes: u64,
    ) -> Result<(OwnedFd, Linked), SegmentError> {
        let system = |what: String| SegmentError::System { bytes, what };
        for _ in 0..NAME_ATTEMPTS {
            let mut random = [0; 16];
            getrandom::fill(&mut random).map_err(|e| system(format!("no random name: {e}")))?;
            let stem = format!("pto-{:032x}", u128::from_ne_bytes(random));
            let (name, path) = match dir {
                Some(dir) => (stem.clone(), Some(dir.join(&stem))),
                None => (format!("/{stem}"), None),
            };
            // Recorded before it exists, so that no instant has a name that nobody knows of.
            registry.lock().insert(name.clone());
            let made = match &path {
                Some(path) => std::fs::OpenOptions::new()
                    .read(true)
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(path)
                    .map(OwnedFd::from)
                    .map_err(|e| Errno::from_raw(e.raw_os_error().unwrap_or(0))),
                None => {
                    let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_RDWR | OFlag::O_CLOEXEC;
                    shm_open(name.as_str(), flags, Mode::S_IRUSR | Mode::S_IWUSR)
                }
            };
            match made {
                Ok(fd) => return Ok((fd, Linked { name, path, registry: Arc::clone(registry) })),
                Err(errno) => {
                    registry.lock().remove(&name);
                    match errno {
                        Errno::EEXIST => {}
                        Errno::ENOSPC | Errno::EDQUOT => {
                            return Err(SegmentError::Full { bytes, what: format!("no new name: {errno}") });
                        }
                        other => {
                            let place = dir.map_or_else(|| "shared memory".into(), Path::to_string_lossy);
                            return Err(system(format!("cannot create a file in {place}: {other}")));
                        }
                    }
                }
            }
        }
        Err(system(format!("{NAME_ATTEMPTS} random names exist already")))
    }

    /// Reserves space, so that a full file system is an error now and not a SIGBUS later.
    fn reserve(fd: &OwnedFd, bytes: u64, size: usize) -> Result<(), SegmentError> {
        let full = |what: String| SegmentError::Full { bytes, what };
        // Asking first keeps a hopeless request from filling the file system before it fails.
        if let Ok(stat) = fstatvfs(fd.as_fd()) {
            let (total, free) = (stat.blocks(), stat.blocks_available());
            let free_bytes = free.saturating_mul(stat.fragment_size());
            if total > 0 && free_bytes < size as u64 {
                return Err(full(format!("{free_bytes} bytes are free")));
            }
        }
        let length = i64::try_from(size).map_err(|_| full("more than a file can hold".to_owned()))?;
        loop {
            match posix_fallocate(fd, 0, length) {
                Ok(()) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno @ (Errno::ENOSPC | Errno::EFBIG | Errno::EDQUOT | Errno::ENOMEM)) => {
                    return Err(full(errno.to_string()));
                }
                Err(other) => {
                    return Err(SegmentError::System { bytes, what: format!("posix_fallocate: {other}") });
                }
            }
        }
    }

    pub(super) fn release(base: NonNull<AtomicU32>, words: usize) {
        // SAFETY: `base` and this length are what `mmap` returned and was asked for; the segment that owned them is
        // being dropped, so no reference into the mapping is left, and it is unmapped once.
        let unmapped = unsafe { munmap(base.cast::<c_void>(), words * WORD) };
        debug_assert!(unmapped.is_ok(), "a mapping of ours can be unmapped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heap(bytes: u64) -> Segment {
        SegmentFactory::new(Memory::Heap).zeroed(bytes, true).unwrap()
    }

    #[test]
    fn every_alignment_and_length_reads_back_and_leaves_its_neighbours_alone() {
        for offset in 0..9_u64 {
            for len in 0..19_usize {
                let segment = heap(32);
                segment.fill(0, 32, 0xEE).unwrap();
                let bytes: Vec<u8> = (1..=len as u8).collect();
                segment.store(offset, &bytes).unwrap();
                let mut all = [0; 32];
                segment.load(0, &mut all).unwrap();
                let mut expected = [0xEE; 32];
                expected[offset as usize..offset as usize + len].copy_from_slice(&bytes);
                assert_eq!(all, expected, "offset {offset}, {len} bytes");
                let mut part = vec![0; len];
                segment.load(offset, &mut part).unwrap();
                assert_eq!(part, bytes);
            }
        }
    }

    #[test]
    fn fill_and_copy_cross_chunk_boundaries_at_odd_offsets() {
        let len = if cfg!(miri) { 4_200 } else { 3 * COPY_CHUNK as u64 + 5 };
        let (source, target) = (heap(len + 8), heap(len + 8));
        source.fill(3, len, 7).unwrap();
        assert!(!target.copy_from(2, &source, 3, len).unwrap());
        let mut all = vec![0; len as usize + 8];
        target.load(0, &mut all).unwrap();
        assert!(all[..2].iter().all(|b| *b == 0) && all[len as usize + 2..].iter().all(|b| *b == 0));
        assert!(all[2..len as usize + 2].iter().all(|b| *b == 7));
        assert!(target.copy_from(0, &heap(len), 0, len).unwrap(), "zeros are reported as zeros");
    }

    #[test]
    fn bounds_are_checked_without_overflow() {
        let segment = heap(10);
        assert!(segment.store(8, &[1, 2]).is_ok());
        assert!(segment.store(9, &[1, 2]).is_err(), "the last word is wider than the segment");
        assert!(segment.load(u64::MAX, &mut [0; 2]).is_err());
        assert!(segment.fill(4, u64::MAX, 0).is_err());
        assert!(segment.cell(4).is_ok());
        assert!(segment.cell(2).is_err(), "a cell is aligned");
        assert!(segment.cell(8).is_err(), "a cell fits");
    }

    #[test]
    fn read_only_segments_refuse_every_store() {
        let segment = SegmentFactory::new(Memory::default()).zeroed(64, false).unwrap();
        assert!(segment.store(0, &[1]).is_err());
        assert!(segment.fill(0, 1, 1).is_err());
        let mut byte = [9];
        segment.load(63, &mut byte).unwrap();
        assert_eq!(byte, [0]);
    }

    #[test]
    fn neighbouring_bytes_survive_concurrent_writers() {
        let segment = heap(4);
        std::thread::scope(|scope| {
            for byte in 0..4_u8 {
                let segment = &segment;
                scope.spawn(move || {
                    for value in 0..50 {
                        segment.store(u64::from(byte), &[value]).unwrap();
                    }
                });
            }
        });
        let mut all = [0; 4];
        segment.load(0, &mut all).unwrap();
        assert_eq!(all, [49; 4]);
    }

    #[test]
    fn a_size_that_no_segment_has_is_refused_before_anything_is_made() {
        let factory = SegmentFactory::new(Memory::default());
        for (bytes, refused) in [(0, true), (MAX_SEGMENT_BYTES + 1, true), (MAX_SEGMENT_BYTES, false), (1, false)] {
            let said = match factory.zeroed(bytes, true) {
                Err(error) => error.to_string().contains(&format!("1 to {MAX_SEGMENT_BYTES} bytes")),
                Ok(_) => false,
            };
            assert_eq!(said, refused, "{bytes} bytes");
        }
        assert_eq!(MAX_SEGMENT_BYTES, 0x4000_0000_0000);
    }

    #[test]
    fn a_hopeless_size_is_refused_by_every_backing() {
        for backing in [Memory::Heap, Memory::default()] {
            let factory = SegmentFactory::new(backing);
            for bytes in [u64::MAX, MAX_SEGMENT_BYTES + 1] {
                assert!(
                    matches!(factory.zeroed(bytes, true), Err(SegmentError::Full { bytes: b, .. }) if b == bytes)
                );
            }
        }
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    mod linux {
        use super::*;

        #[test]
        fn shared_files_are_unlinked_at_once_and_keep_their_bytes() {
            let dir = tempfile::tempdir().unwrap();
            let factory = SegmentFactory::new(Memory::SharedIn(dir.path().to_path_buf()));
            let segment = factory.zeroed(10_001, true).unwrap();
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
            assert!(factory.linked().is_empty());
            segment.store(10_000, &[5]).unwrap();
            let mut byte = [0];
            segment.load(10_000, &mut byte).unwrap();
            assert_eq!(byte, [5]);
        }

        #[test]
        fn more_than_the_file_system_holds_is_out_of_room_with_nothing_left() {
            let dir = tempfile::tempdir().unwrap();
            let stat = nix::sys::statvfs::statvfs(dir.path()).unwrap();
            // One more byte than the whole file system has, whatever is free at the moment.
            let bytes = stat.blocks() * stat.fragment_size() + 1;
            let factory = SegmentFactory::new(Memory::SharedIn(dir.path().to_path_buf()));
            // Found by asking, not by filling the file system until it is full.
            let Err(SegmentError::Full { bytes: b, what }) = factory.zeroed(bytes, true) else { panic!("it fits") };
            assert!(b == bytes && what.ends_with("bytes are free"), "{b}: {what}");
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
            assert!(factory.linked().is_empty());
            assert!(factory.zeroed(64, true).is_ok(), "smaller requests still work");
        }

        #[test]
        fn a_missing_directory_is_a_system_failure() {
            let dir = tempfile::tempdir().unwrap();
            let factory = SegmentFactory::new(Memory::SharedIn(dir.path().join("absent")));
            assert!(matches!(factory.zeroed(1, true), Err(SegmentError::System { .. })));
            assert!(factory.linked().is_empty());
        }
    }
}
