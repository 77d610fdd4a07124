//! Options of a prepared worker.

use std::time::Duration;

use crate::error::Error;

/// Where the zeros of a whole-buffer reset come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Staging {
    /// One zeroed host buffer per distinct size, made for each resetting dispatch and released at its end.
    #[default]
    PerDispatch,
    /// Zero buffers are kept between dispatches, as long as all of them together stay within this many bytes;
    /// sizes beyond the cap are made per dispatch.
    Retained {
        /// The cap in bytes.
        cap_bytes: u64,
    },
}

/// How programs are executed.
///
/// | `persistent` | `reset` unset | `reset = false` | `reset = true` |
/// |---|---|---|---|
/// | no | off | off | refused |
/// | yes | on | off | on |
#[derive(Clone, Debug)]
#[must_use]
pub struct Options {
    persistent: bool,
    reset: Option<bool>,
    staging: Staging,
    drop_limit: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { persistent: false, reset: None, staging: Staging::default(), drop_limit: Duration::from_secs(10) }
    }
}

impl Options {
    /// Ordinary execution: each request allocates and frees its domains.
    pub fn ordinary() -> Self {
        Self::default()
    }

    /// Persistent execution, with reset unless [`reset`](Self::reset) switches it off.
    pub fn persistent() -> Self {
        Self { persistent: true, ..Self::default() }
    }

    /// Whether reused domains are zeroed before a dispatch can see them.
    pub fn reset(mut self, reset: bool) -> Self {
        self.reset = Some(reset);
        self
    }

    /// Where the zeros come from on a whole-buffer backend.
    pub fn staging(mut self, staging: Staging) -> Self {
        self.staging = staging;
        self
    }

    /// How long `Drop` may wait for a close (10 s unless set).
    pub fn drop_limit(mut self, limit: Duration) -> Self {
        self.drop_limit = limit;
        self
    }

    /// Resolves the defaults of the table above.
    pub(crate) fn resolve(&self) -> Result<Mode, Error> {
        let reset = match (self.persistent, self.reset) {
            (false, Some(true)) => return Err(Error::ResetWithoutPersistence),
            (false, _) | (true, Some(false)) => false,
            (true, _) => true,
        };
        Ok(Mode { persistent: self.persistent, reset, staging: self.staging, drop_limit: self.drop_limit })
    }
}

/// Options with their defaults resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode {
    pub(crate) persistent: bool,
    pub(crate) reset: bool,
    pub(crate) staging: Staging,
    pub(crate) drop_limit: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s30_option_matrix() {
        let on = |options: Options| options.resolve().map(|m| m.reset);
        assert!(!on(Options::ordinary()).unwrap());
        assert!(on(Options::persistent()).unwrap());
        assert!(on(Options::persistent().reset(true)).unwrap());
        assert!(!on(Options::persistent().reset(false)).unwrap());
        assert!(!on(Options::ordinary().reset(false)).unwrap());
        assert!(matches!(on(Options::ordinary().reset(true)), Err(Error::ResetWithoutPersistence)));
    }

    #[test]
    fn drop_waits_for_ten_seconds_unless_told_otherwise() {
        let limit = |options: Options| options.resolve().map(|mode| mode.drop_limit);
        assert_eq!(limit(Options::persistent()).unwrap(), Duration::from_secs(10));
        assert_eq!(limit(Options::ordinary().drop_limit(Duration::MAX)).unwrap(), Duration::MAX);
    }
}
