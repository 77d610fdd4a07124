//! Host memory that other processes share: our own mapping of a host buffer.
//!
//! Simpler's buffers are named POSIX shared memory. Instead of borrowing the interpreter's mapping, whose end Python
//! decides, the binding maps the same memory once more and reference-counts that mapping: a reader keeps it alive,
//! whatever becomes of the Python object. No Rust reference to the bytes ever exists, because chip processes write
//! them at any time; everything goes through relaxed atomics, word by word.

use std::fs::{File, OpenOptions};
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use nix::errno::Errno;
use nix::fcntl::posix_fallocate;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Where POSIX shared memory shows as files.
pub(crate) const SHM_DIRECTORY: &str = "/dev/shm";

const WORD: usize = size_of::<u64>();

/// A shared mapping of `len` bytes, unmapped when the last owner drops it.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: NonZeroUsize,
}

// SAFETY: the mapping is plain shared memory that stays mapped until `drop`, which needs exclusive ownership; every
// access goes through atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Anonymous shared memory of zeros: processes forked later see the same pages at the same address.
    pub(crate) fn anonymous(len: NonZeroUsize) -> Result<Self, Errno> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            mmap_anonymous(None, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED)
        }?;
        Ok(Self { base: base.cast(), len })
    }

    /// The named shared memory `name`, with room for all its pages reserved first: without that a full file system
    /// shows as SIGBUS at the first touch, in whichever process touches it.
    pub(crate) fn named(name: &str, len: NonZeroUsize) -> Result<Self, Errno> {
        let path = Path::new(SHM_DIRECTORY).join(name.trim_start_matches('/'));
        let file: File = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|e| e.raw_os_error().map_or(Errno::EIO, Errno::from_raw))?;
        let size = i64::try_from(len.get()).map_err(|_| Errno::EFBIG)?;
        posix_fallocate(file.as_fd(), 0, size)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory; the file is at
        // least `len` bytes long, as it has just been extended to that size.
        let base = unsafe {
            mmap(None, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED, file.as_fd(), 0)
        }?;
        Ok(Self { base: base.cast(), len })
    }

    /// Address of the first byte in this process.
    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// Whether `len` bytes from `offset` on lie inside.
    fn contains(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len.get())
    }

    fn byte(&self, offset: usize) -> &AtomicU8 {
        debug_assert!(offset < self.len.get());
        // SAFETY: callers stay inside the mapping, which lives as long as `self`; atomics may be shared with other
        // processes, and any byte is a valid `u8`.
        unsafe { AtomicU8::from_ptr(self.base.as_ptr().add(offset)) }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(WORD) && offset + WORD <= self.len.get());
        // SAFETY: as for `byte`; the base is page aligned and the offset a multiple of eight, so the word is aligned.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Copies bytes out. Returns whether the range lies inside; nothing is done otherwise.
    #[must_use]
    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) -> bool {
        if !self.contains(offset, bytes.len()) {
            return false;
        }
        let head = head_of(offset, bytes.len());
        let (first, rest) = bytes.split_at_mut(head);
        for (i, b) in first.iter_mut().enumerate() {
            *b = self.byte(offset + i).load(Ordering::Relaxed);
        }
        let mut at = offset + head;
        let mut words = rest.chunks_exact_mut(WORD);
        for chunk in &mut words {
            chunk.copy_from_slice(&self.word(at).load(Ordering::Relaxed).to_ne_bytes());
            at += WORD;
        }
        for (i, b) in words.into_remainder().iter_mut().enumerate() {
            *b = self.byte(at + i).load(Ordering::Relaxed);
        }
        true
    }

    /// Copies bytes in. Returns whether the range lies inside; nothing is done otherwise.
    #[must_use]
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        if !self.contains(offset, bytes.len()) {
            return false;
        }
        let head = head_of(offset, bytes.len());
        let (first, rest) = bytes.split_at(head);
        for (i, b) in first.iter().enumerate() {
            self.byte(offset + i).store(*b, Ordering::Relaxed);
        }
        let mut at = offset + head;
        let mut words = rest.chunks_exact(WORD);
        for chunk in &mut words {
            let mut word = [0; WORD];
            word.copy_from_slice(chunk);
            self.word(at).store(u64::from_ne_bytes(word), Ordering::Relaxed);
            at += WORD;
        }
        for (i, b) in words.remainder().iter().enumerate() {
            self.byte(at + i).store(*b, Ordering::Relaxed);
        }
        true
    }

    /// Sets every byte.
    pub(crate) fn fill(&self, byte: u8) {
        let word = u64::from_ne_bytes([byte; WORD]);
        let whole = self.len.get() - self.len.get() % WORD;
        for at in (0..whole).step_by(WORD) {
            self.word(at).store(word, Ordering::Relaxed);
        }
        for at in whole..self.len.get() {
            self.byte(at).store(byte, Ordering::Relaxed);
        }
    }
}

/// How many bytes precede the first aligned word at or after `offset`.
fn head_of(offset: usize, len: usize) -> usize {
    (offset.next_multiple_of(WORD) - offset).min(len)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are exactly one mapping made by this type, and nobody else can hold `self`. A
        // failure leaves the mapping in place, which costs address space and nothing else.
        let _ = unsafe { munmap(self.base.cast(), self.len.get()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(len: usize) -> Mapping {
        Mapping::anonymous(NonZeroUsize::new(len).unwrap()).unwrap()
    }

    #[test]
    fn bytes_written_at_any_alignment_are_read_back_and_neighbours_stay() {
        for offset in 0..20 {
            for len in 0..40 {
                let m = mapping(64);
                m.fill(0xEE);
                let bytes: Vec<u8> = (0..len).map(|i| i as u8 + 1).collect();
                let inside = offset + len <= 64;
                assert_eq!(m.write(offset, &bytes), inside);
                let mut all = [0; 64];
                assert!(m.read(0, &mut all));
                for (i, b) in all.iter().enumerate() {
                    let expected =
                        if inside && (offset..offset + len).contains(&i) { (i - offset) as u8 + 1 } else { 0xEE };
                    assert_eq!(*b, expected, "byte {i} after writing {len} at {offset}");
                }
                let mut back = vec![0; len];
                assert_eq!(m.read(offset, &mut back), inside);
                assert!(!inside || back == bytes);
            }
        }
    }

    #[test]
    fn ranges_outside_are_refused_also_by_overflow() {
        let m = mapping(16);
        assert!(!m.write(16, &[1]) && !m.write(usize::MAX, &[1]) && !m.read(8, &mut [0; 9]));
        assert!(m.write(16, &[]));
    }
}
