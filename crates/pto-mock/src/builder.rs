//! Options of the emulator.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pto_simpler_sys::{
    BackendError, Call, CallableKind, CallbackError, Capabilities, ChipId, CopyGranularity, Limits, Retention,
    Signature,
};

use crate::emulator::Emulator;
use crate::faults::FaultSchedule;
use crate::kernel::{Code, EntryContext, Kernel, KernelError, KernelObject, SubTask};
use crate::memory::Memory;

/// How finely windows are mapped; the mapping is the request rounded up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mapping {
    /// Exactly what was asked for.
    #[default]
    Exact,
    /// Multiples of 4 KiB.
    Pages4K,
    /// Multiples of 2 MiB.
    Huge2M,
}

impl Mapping {
    /// The bytes that a request for `bytes` maps, or `None` where they do not fit in 64 bits.
    #[must_use]
    pub const fn mapped(self, bytes: u64) -> Option<u64> {
        match self {
            Self::Exact => Some(bytes),
            Self::Pages4K => bytes.checked_next_multiple_of(4 << 10),
            Self::Huge2M => bytes.checked_next_multiple_of(2 << 20),
        }
    }
}

/// Who lets a run pass its completion fence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Completion {
    /// The run itself, when its tasks are done.
    #[default]
    Free,
    /// A test, with [`Emulator::complete`] or [`Emulator::fail`]; tasks execute freely. A run that is held holds up
    /// `close`, too. The run of a `pto-dispatch` dispatch is `dispatch.id().run()`.
    ByHand,
}

type ReportedMapping = dyn Fn(&str, ChipId, u64) -> u64 + Send + Sync;

/// A library entry: the code of a callable and what it takes.
#[derive(Clone, Debug)]
pub(crate) struct LibraryEntry {
    pub(crate) code: Code,
    pub(crate) signature: Option<Signature>,
}

/// What the emulator was built with.
pub(crate) struct Options {
    pub(crate) depth: u32,
    pub(crate) mapping: Mapping,
    pub(crate) dirty_host_buffers: bool,
    pub(crate) dirty_windows: bool,
    pub(crate) early_control: bool,
    pub(crate) grace: Duration,
    pub(crate) device_memory: Option<u64>,
    pub(crate) reported_mapping: Option<Box<ReportedMapping>>,
    pub(crate) library: HashMap<(Arc<str>, CallableKind), LibraryEntry>,
}

/// Builds an [`Emulator`]; made by [`Emulator::builder`].
pub struct EmulatorBuilder {
    device_ids: Vec<u32>,
    platform: Arc<str>,
    runtime: Arc<str>,
    sub_workers: u32,
    copy_granularity: CopyGranularity,
    device_fill: bool,
    failed_task_is_final: bool,
    retention: Retention,
    limits: Limits,
    completion: Completion,
    memory: Memory,
    faults: FaultSchedule,
    recording: bool,
    options: Options,
    twice: Option<Arc<str>>,
}

impl fmt::Debug for EmulatorBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmulatorBuilder")
            .field("platform", &self.platform)
            .field("runtime", &self.runtime)
            .field("device_ids", &self.device_ids)
            .finish_non_exhaustive()
    }
}

/// How long `abandon` waits for kernels unless set otherwise: far longer than an interrupted kernel needs to notice.
pub(crate) const DEFAULT_GRACE: Duration = Duration::from_secs(2);

impl EmulatorBuilder {
    pub(crate) fn new() -> Self {
        Self {
            device_ids: vec![0],
            platform: "emulator".into(),
            runtime: "emulated".into(),
            sub_workers: 1,
            copy_granularity: CopyGranularity::WholeBuffer,
            device_fill: false,
            failed_task_is_final: false,
            retention: Retention::Public,
            limits: Limits::default(),
            completion: Completion::Free,
            memory: Memory::default(),
            faults: FaultSchedule::none(),
            recording: true,
            options: Options {
                depth: 2,
                mapping: Mapping::Exact,
                dirty_host_buffers: false,
                dirty_windows: false,
                early_control: false,
                grace: DEFAULT_GRACE,
                device_memory: None,
                reported_mapping: None,
                library: HashMap::new(),
            },
            twice: None,
        }
    }

    /// `count` chip workers with the device ids 0, 1, ... (default 1).
    #[must_use]
    pub fn chips(mut self, count: u32) -> Self {
        self.device_ids = (0..count).collect();
        self
    }

    /// One chip worker per device id.
    #[must_use]
    pub fn device_ids(mut self, ids: impl Into<Vec<u32>>) -> Self {
        self.device_ids = ids.into();
        self
    }

    /// The platform name (default `emulator`).
    #[must_use]
    pub fn platform(mut self, name: impl Into<Arc<str>>) -> Self {
        self.platform = name.into();
        self
    }

    /// The runtime name (default `emulated`).
    #[must_use]
    pub fn runtime(mut self, name: impl Into<Arc<str>>) -> Self {
        self.runtime = name.into();
        self
    }

    /// How many runs may be accepted and not ended before `submit` blocks: 1 or 2 (default 2).
    #[must_use]
    pub fn depth(mut self, depth: u32) -> Self {
        self.options.depth = depth;
        self
    }

    /// Number of sub-worker threads (default 1).
    #[must_use]
    pub fn sub_workers(mut self, count: u32) -> Self {
        self.sub_workers = count;
        self
    }

    /// Adds a chip kernel to the library that [`CallableSource::Named`](pto_simpler_sys::CallableSource::Named)
    /// draws from.
    #[must_use]
    pub fn kernel(
        self,
        name: impl Into<Arc<str>>,
        signature: Signature,
        kernel: impl Fn(&Kernel<'_>) -> Result<(), KernelError> + Send + Sync + 'static,
    ) -> Self {
        self.library(name, Some(signature), KernelObject::new(kernel))
    }

    /// Adds a sub-worker function to the library.
    #[must_use]
    pub fn sub(
        self,
        name: impl Into<Arc<str>>,
        signature: Signature,
        task: impl Fn(&SubTask<'_>) -> Result<(), KernelError> + Send + Sync + 'static,
    ) -> Self {
        self.library(name, Some(signature), KernelObject::sub(task))
    }

    /// Adds a host entry to the library.
    #[must_use]
    pub fn entry(
        self,
        name: impl Into<Arc<str>>,
        entry: impl Fn(&mut EntryContext<'_>) -> Result<(), CallbackError> + Send + Sync + 'static,
    ) -> Self {
        self.library(name, None, KernelObject::entry(entry))
    }

    /// Adds any callable to the library.
    #[must_use]
    pub fn library(
        mut self,
        name: impl Into<Arc<str>>,
        signature: Option<Signature>,
        object: KernelObject,
    ) -> Self {
        let name = name.into();
        let key = (Arc::clone(&name), object.code.kind());
        if self.options.library.insert(key, LibraryEntry { code: object.code, signature }).is_some() {
            self.twice = Some(name);
        }
        self
    }

    /// How finely windows are mapped (default exactly).
    #[must_use]
    pub fn mapping(mut self, mapping: Mapping) -> Self {
        self.options.mapping = mapping;
        self
    }

    /// Changes the mapped bytes that allocation *replies* report, given the domain's name, the member and the bytes
    /// really mapped: imitates a backend that maps less than it was asked for.
    #[must_use]
    pub fn reported_mapping(mut self, report: impl Fn(&str, ChipId, u64) -> u64 + Send + Sync + 'static) -> Self {
        self.options.reported_mapping = Some(Box::new(report));
        self
    }

    /// New host buffers arrive full of 0xA5 (default: zeros).
    #[must_use]
    pub fn dirty_host_buffers(mut self, dirty: bool) -> Self {
        self.options.dirty_host_buffers = dirty;
        self
    }

    /// New windows arrive full of 0xA5, and the emulator must clear them before anybody can reach them.
    #[must_use]
    pub fn dirty_windows(mut self, dirty: bool) -> Self {
        self.options.dirty_windows = dirty;
        self
    }

    /// Whole-buffer or range copies (default whole buffers).
    #[must_use]
    pub fn copy_granularity(mut self, granularity: CopyGranularity) -> Self {
        self.copy_granularity = granularity;
        self
    }

    /// Whether the device can fill memory by itself (default no).
    #[must_use]
    pub fn device_fill(mut self, fill: bool) -> Self {
        self.device_fill = fill;
        self
    }

    /// Whether a failed chip task poisons its chip for good (default no; Simpler: yes).
    #[must_use]
    pub fn failed_task_is_final(mut self, last: bool) -> Self {
        self.failed_task_is_final = last;
        self
    }

    /// How domains are kept between runs (default public). Private hooks behave the same in the emulator.
    #[must_use]
    pub fn retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// Numeric limits (default: Simpler's).
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Device memory of each chip, in bytes (default: as much as the host has).
    #[must_use]
    pub fn device_memory(mut self, bytes: u64) -> Self {
        self.options.device_memory = Some(bytes);
        self
    }

    /// Who lets runs pass their fence (default: they do). Can be changed later.
    #[must_use]
    pub fn completion(mut self, completion: Completion) -> Self {
        self.completion = completion;
        self
    }

    /// Where memory comes from (default: shared memory on Linux).
    #[must_use]
    pub fn memory(mut self, memory: Memory) -> Self {
        self.memory = memory;
        self
    }

    /// Faults armed from the beginning. More can be armed later.
    #[must_use]
    pub fn faults(mut self, faults: FaultSchedule) -> Self {
        self.faults = faults;
        self
    }

    /// How long `abandon` waits for kernels before it leaves them behind (default 2 s). The receiver of run ends is
    /// given this long again, and at least 2 s, before it is reported as stuck.
    #[must_use]
    pub fn abandon_grace(mut self, grace: Duration) -> Self {
        self.options.grace = grace;
        self
    }

    /// Whether the journal keeps events (default yes). Without it, a long measurement does not grow.
    #[must_use]
    pub fn journal(mut self, recording: bool) -> Self {
        self.recording = recording;
        self
    }

    /// A deliberately broken backend, for negative controls: control calls do not wait until their run heads the
    /// device queue, so the reset of a dispatch wipes windows that the previous one still uses.
    #[must_use]
    pub fn early_control(mut self, early: bool) -> Self {
        self.options.early_control = early;
        self
    }

    /// Builds the emulator. Nothing is started or allocated yet.
    ///
    /// # Errors
    ///
    /// Misuse: no chips, a depth other than 1 or 2, two library entries of one kind with one name.
    pub fn build(self) -> Result<Arc<Emulator>, BackendError> {
        if self.device_ids.is_empty() {
            return Err(BackendError::misuse(Call::Start, "no device ids; an emulator needs at least 1 chip"));
        }
        if !(1..=2).contains(&self.options.depth) {
            let message = format!("depth is {}; permitted are 1 and 2", self.options.depth);
            return Err(BackendError::misuse(Call::Start, message));
        }
        if let Some(name) = self.twice {
            let message = format!("two callables of one kind are called {name:?}; rename one");
            return Err(BackendError::misuse(Call::Register, message));
        }
        let mut capabilities = Capabilities::new(self.platform, self.runtime, self.device_ids);
        capabilities.sub_workers = self.sub_workers;
        capabilities.copy_granularity = self.copy_granularity;
        capabilities.device_fill = self.device_fill;
        capabilities.failed_task_is_final = self.failed_task_is_final;
        capabilities.retention = self.retention;
        capabilities.limits = self.limits;
        capabilities.entries = true;
        let by_hand = self.completion == Completion::ByHand;
        Ok(Emulator::assemble(capabilities, self.options, self.memory, self.faults, self.recording, by_hand))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_round_up_with_checked_arithmetic() {
        assert_eq!(Mapping::Exact.mapped(4097), Some(4097));
        assert_eq!(Mapping::Pages4K.mapped(4097), Some(8192));
        assert_eq!(Mapping::Huge2M.mapped(64), Some(2 << 20));
        assert_eq!(Mapping::Huge2M.mapped(u64::MAX), None);
    }

    #[test]
    fn impossible_options_are_refused() {
        assert!(EmulatorBuilder::new().chips(0).build().is_err());
        assert!(EmulatorBuilder::new().depth(3).build().is_err());
        let kernel = |_: &Kernel<'_>| Ok(());
        let twice = EmulatorBuilder::new()
            .kernel("k", Signature::default(), kernel)
            .kernel("k", Signature::default(), kernel)
            .build();
        assert!(twice.unwrap_err().to_string().contains("\"k\""));
    }
}
