//! The configuration of one call.

use std::sync::Arc;

use crate::error::{BackendError, Call};

/// Number of ring sizes that a runtime takes.
pub const RING_COUNT: usize = 4;

/// Most bytes of an output prefix; the runtime's record has room for these and a final zero.
const MOST_PREFIX_BYTES: usize = 1023;

/// Options of one run. Plain values: copied when a dispatch is submitted, so later changes cannot reach it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CallConfig {
    /// Number of AICPU threads; 0 lets the runtime choose.
    pub aicpu_threads: u32,
    /// Per-ring task windows, in slots; `None` keeps the runtime's own. Ignored by `host_build_graph`.
    pub ring_task_window: Option<[u64; RING_COUNT]>,
    /// Per-ring heaps, in bytes; `None` keeps the runtime's own.
    pub ring_heap: Option<[u64; RING_COUNT]>,
    /// Per-ring dependency pools, in entries; `None` keeps the runtime's own.
    pub ring_dep_pool: Option<[u64; RING_COUNT]>,
    /// Directory prefix of diagnostic output; needed by the diagnostic switches of the runtime.
    pub output_prefix: Option<Arc<str>>,
    /// Switch on the runtime's swimlane profile; needs `output_prefix`.
    pub swimlane: bool,
}

impl CallConfig {
    /// The runtime's defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Checks the values as the runtime does. Every backend refuses what this refuses, in each call that takes a
    /// configuration, before any effect.
    ///
    /// # Errors
    ///
    /// A misuse of `call` that names the field, its value and what is permitted.
    pub fn check(&self, call: Call) -> Result<(), BackendError> {
        self.problem().map_or(Ok(()), |problem| Err(BackendError::misuse(call, problem)))
    }

    fn problem(&self) -> Option<String> {
        const MOST: u64 = i32::MAX as u64;
        if u64::from(self.aicpu_threads) > MOST {
            return Some(format!("aicpu_threads is {}; permitted: 0 (automatic) to {MOST}", self.aicpu_threads));
        }
        for (ring, value) in self.ring_task_window.iter().flatten().enumerate() {
            if *value != 0 && (!(4..=MOST).contains(value) || !value.is_power_of_two()) {
                let permitted = format!("0 (the runtime's own) or a power of two from 4 to {MOST} slots");
                return Some(format!("ring_task_window[{ring}] is {value}; permitted: {permitted}"));
            }
        }
        for (ring, value) in self.ring_heap.iter().flatten().enumerate() {
            if (1..1024).contains(value) {
                return Some(format!(
                    "ring_heap[{ring}] is {value}; permitted: 0 (the runtime's own) or at least 1024 bytes"
                ));
            }
        }
        for (ring, value) in self.ring_dep_pool.iter().flatten().enumerate() {
            if *value != 0 && !(4..=MOST).contains(value) {
                let permitted = format!("0 (the runtime's own) or 4 to {MOST} entries");
                return Some(format!("ring_dep_pool[{ring}] is {value}; permitted: {permitted}"));
            }
        }
        let prefix = self.output_prefix.as_deref().unwrap_or("");
        if prefix.len() > MOST_PREFIX_BYTES {
            return Some(format!("output_prefix has {} bytes; permitted: {MOST_PREFIX_BYTES}", prefix.len()));
        }
        if prefix.contains('\0') {
            return Some("output_prefix contains a zero byte; leave it out".to_owned());
        }
        if self.swimlane && prefix.is_empty() {
            return Some("swimlane is on without an output_prefix; set one, or leave swimlane off".to_owned());
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(change: impl FnOnce(&mut CallConfig)) -> String {
        let mut config = CallConfig::new();
        change(&mut config);
        match config.check(Call::Submit) {
            Ok(()) => String::new(),
            Err(BackendError::Misuse(misuse)) => misuse.message.clone(),
            Err(other) => panic!("not a misuse: {other:?}"),
        }
    }

    #[test]
    fn a_refusal_names_the_field_its_value_and_what_is_permitted() {
        assert_eq!(problem(|_| ()), "");
        assert!(problem(|c| c.aicpu_threads = 1 << 31).contains("2147483648"));
        assert_eq!(problem(|c| c.aicpu_threads = i32::MAX as u32), "");
        for (value, refused) in
            [(0, false), (1, true), (3, true), (4, false), (6, true), (1 << 30, false), (1 << 31, true)]
        {
            let said = problem(|c| c.ring_task_window = Some([4, 4, value, 4]));
            assert_eq!(said.starts_with(&format!("ring_task_window[2] is {value};")), refused, "{said}");
        }
        for (value, refused) in [(0, false), (1, true), (1023, true), (1024, false), (u64::MAX, false)] {
            let said = problem(|c| c.ring_heap = Some([0, 0, 0, value]));
            assert_eq!(said.starts_with(&format!("ring_heap[3] is {value};")), refused, "{said}");
        }
        for (value, refused) in [(0, false), (3, true), (4, false), (5, false), (1 << 31, true)] {
            let said = problem(|c| c.ring_dep_pool = Some([value; 4]));
            assert_eq!(said.starts_with(&format!("ring_dep_pool[0] is {value};")), refused, "{said}");
        }
    }

    #[test]
    fn diagnostics_need_a_prefix_that_fits() {
        assert!(problem(|c| c.swimlane = true).contains("output_prefix"));
        assert!(
            problem(|c| {
                c.swimlane = true;
                c.output_prefix = Some("".into());
            })
            .contains("output_prefix")
        );
        let prefix = |n: usize| problem(|c| c.output_prefix = Some("p".repeat(n).into()));
        assert_eq!(
            (prefix(1023), prefix(1024)),
            (String::new(), "output_prefix has 1024 bytes; permitted: 1023".into())
        );
        assert!(problem(|c| c.output_prefix = Some("a\0b".into())).contains("zero byte"));
        assert_eq!(
            problem(|c| {
                c.swimlane = true;
                c.output_prefix = Some("out/run".into());
            }),
            ""
        );
    }
}
