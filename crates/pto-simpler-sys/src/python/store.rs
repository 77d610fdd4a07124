//! Host buffers that were released and wait for the next use.

use super::shared::HostBuffer;

/// Most buffers that are kept.
const MOST: usize = 32;

/// Released buffers, the oldest first, up to a number of bytes.
#[derive(Debug)]
pub(crate) struct Store {
    limit: u64,
    bytes: u64,
    buffers: Vec<HostBuffer>,
}

impl Store {
    pub(crate) const fn new(limit: u64) -> Self {
        Self { limit, bytes: 0, buffers: Vec::new() }
    }

    /// Keeps a buffer, or gives it back where there is no room. Read-only ones are given back: the next user may want
    /// to write.
    pub(crate) fn put(&mut self, buffer: HostBuffer) -> Option<HostBuffer> {
        let bytes = self.bytes.checked_add(buffer.nbytes).filter(|n| *n <= self.limit);
        match bytes {
            Some(bytes) if !buffer.read_only && self.buffers.len() < MOST => {
                self.bytes = bytes;
                self.buffers.push(buffer);
                None
            }
            _ => Some(buffer),
        }
    }

    /// Takes a buffer of exactly this size.
    pub(crate) fn take(&mut self, nbytes: u64) -> Option<HostBuffer> {
        let at = self.buffers.iter().position(|b| b.nbytes == nbytes)?;
        self.bytes -= nbytes;
        Some(self.buffers.remove(at))
    }

    pub(crate) fn drain(&mut self) -> Vec<HostBuffer> {
        self.bytes = 0;
        std::mem::take(&mut self.buffers)
    }

    /// Names in shared memory of the buffers inside.
    pub(crate) fn names(&self) -> Vec<String> {
        self.buffers.iter().filter_map(|b| b.name.clone()).collect()
    }
}
