//! Host memory that other processes share: our own mapping of a host buffer.
//!
//! Simpler's buffers are named POSIX shared memory. Instead of borrowing the interpreter's mapping, whose end Python
//! decides, the binding maps the same memory once more and reference-counts that mapping: a reader keeps it alive,
//! whatever becomes of the Python object. No Rust reference to the bytes ever exists, because chip processes write
//! them at any time; everything goes through relaxed atomics of one size, since accesses of several sizes to the same
//! bytes may not race: whole words, and parts of a word by compare-and-exchange.

use std::fs::{File, OpenOptions};
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::fcntl::posix_fallocate;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use nix::sys::signal::{SigSet, SigmaskHow};

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
        reserve(&file, len)?;
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

    /// The aligned word that holds byte `offset`.
    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset < self.len.get());
        let at = offset - offset % WORD;
        // SAFETY: callers stay inside the mapping, which lives as long as `self`. The base is page aligned and `at` a
        // multiple of eight, so the word is aligned and does not leave the page that `offset` is in, all of which is
        // mapped. Atomics may be shared with other processes, and any eight bytes are a valid `u64`.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// Copies bytes out. Returns whether the range lies inside; nothing is done otherwise.
    #[must_use]
    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) -> bool {
        if !self.contains(offset, bytes.len()) {
            return false;
        }
        let (first, rest) = bytes.split_at_mut(head_of(offset, bytes.len()));
        let mut at = offset + first.len();
        self.read_part(offset, first);
        let mut words = rest.chunks_exact_mut(WORD);
        for chunk in &mut words {
            chunk.copy_from_slice(&self.word(at).load(Ordering::Relaxed).to_ne_bytes());
            at += WORD;
        }
        self.read_part(at, words.into_remainder());
        true
    }

    /// Copies bytes in. Returns whether the range lies inside; nothing is done otherwise.
    #[must_use]
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        if !self.contains(offset, bytes.len()) {
            return false;
        }
        let (first, rest) = bytes.split_at(head_of(offset, bytes.len()));
        let mut at = offset + first.len();
        self.write_part(offset, first);
        let mut words = rest.chunks_exact(WORD);
        for chunk in &mut words {
            let mut word = [0; WORD];
            word.copy_from_slice(chunk);
            self.word(at).store(u64::from_ne_bytes(word), Ordering::Relaxed);
            at += WORD;
        }
        self.write_part(at, words.remainder());
        true
    }

    /// Sets every byte.
    pub(crate) fn fill(&self, byte: u8) {
        let whole = self.len.get() - self.len.get() % WORD;
        for at in (0..whole).step_by(WORD) {
            self.word(at).store(u64::from_ne_bytes([byte; WORD]), Ordering::Relaxed);
        }
        self.write_part(whole, &[byte; WORD][..self.len.get() - whole]);
    }

    /// Some bytes of one word.
    fn read_part(&self, offset: usize, bytes: &mut [u8]) {
        if !bytes.is_empty() {
            let word = self.word(offset).load(Ordering::Relaxed).to_ne_bytes();
            let from = offset % WORD;
            bytes.copy_from_slice(&word[from..from + bytes.len()]);
        }
    }

    /// Some bytes of one word; its other bytes stay what anybody else makes them.
    fn write_part(&self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let from = offset % WORD;
        let with = |word: u64| {
            let mut all = word.to_ne_bytes();
            all[from..from + bytes.len()].copy_from_slice(bytes);
            Some(u64::from_ne_bytes(all))
        };
        // Cannot fail, since `with` always gives a word.
        let _ = self.word(offset).fetch_update(Ordering::Relaxed, Ordering::Relaxed, with);
    }
}

/// Gives a file all its pages. On kernels that let a handled signal interrupt this, what is reserved so far is given
/// back, so with a timer in the host program a large reservation might never come to its end: signals wait meanwhile.
fn reserve(file: &File, len: NonZeroUsize) -> Result<(), Errno> {
    let size = i64::try_from(len.get()).map_err(|_| Errno::EFBIG)?;
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let result = loop {
        match posix_fallocate(file.as_fd(), 0, size) {
            // Stopped and continued.
            Err(Errno::EINTR) => {}
            result => break result,
        }
    };
    before.thread_set_mask()?;
    result
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
    fn writers_of_one_word_lose_nothing_of_each_other() {
        let m = mapping(13);
        let rounds = if cfg!(miri) { 50 } else { 20_000 };
        std::thread::scope(|scope| {
            for (offset, len) in [(0, 1), (1, 4), (5, 3), (8, 5)] {
                let m = &m;
                scope.spawn(move || {
                    for round in 0..rounds {
                        let bytes = vec![round as u8; len];
                        assert!(m.write(offset, &bytes));
                        let mut back = vec![0; len];
                        assert!(m.read(offset, &mut back));
                        assert_eq!(back, bytes, "bytes {offset}..{}", offset + len);
                    }
                });
            }
        });
    }

    #[test]
    fn a_length_that_is_no_multiple_of_a_word_is_filled_to_its_end() {
        for len in 1..20 {
            let m = mapping(len);
            m.fill(0xAB);
            let mut all = vec![0; len];
            assert!(m.read(0, &mut all));
            assert_eq!(all, vec![0xAB; len]);
        }
    }

    /// Shared memory with a name, until dropped.
    struct Named(String);

    impl Drop for Named {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(Path::new(SHM_DIRECTORY).join(&self.0));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn memory_is_reserved_whatever_signals_the_host_program_handles() {
        use std::sync::atomic::AtomicBool;
        extern "C" fn handle(_: libc::c_int) {}
        let name = Named(format!("pto-reserve-{}", std::process::id()));
        std::fs::write(Path::new(SHM_DIRECTORY).join(&name.0), b"").unwrap();
        // SAFETY: a handler that does nothing, for a signal that no other test uses.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            assert_eq!(libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()), 0);
        }
        // SAFETY: names the calling thread.
        let here = unsafe { libc::pthread_self() };
        let (over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        let made = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    // SAFETY: the thread waits for this one below, so it is there.
                    unsafe { libc::pthread_kill(here, libc::SIGUSR2) };
                    sent.fetch_add(1, Ordering::SeqCst);
                }
            });
            while sent.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            let made = Mapping::named(&name.0, NonZeroUsize::new(16 << 20).unwrap());
            over.store(true, Ordering::SeqCst);
            made
        });
        assert!(made.unwrap().write((16 << 20) - 1, &[1]));
        assert!(!SigSet::thread_get_mask().unwrap().contains(nix::sys::signal::Signal::SIGUSR2));
    }

    #[test]
    fn ranges_outside_are_refused_also_by_overflow() {
        let m = mapping(16);
        assert!(!m.write(16, &[1]) && !m.write(usize::MAX, &[1]) && !m.read(8, &mut [0; 9]));
        assert!(m.write(16, &[]));
    }
}
