//! What the code of a task sees: its arguments, its memory, its peers' windows and signal cells.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pto_simpler_sys::{
    CallConfig, CallableKind, CallableSource, CallbackError, ChipId, EntryArg, EntryCall, EntryHost, EntryValue,
    Orchestrator, RunId,
};

use crate::board::{Board, Interrupt, InterruptFlag};
use crate::emulator::window::{Contexts, DomainWindows, Region};
use crate::memory::OutOfBounds;

/// Why a kernel stopped. Returned by the accessors, and by kernels themselves; the run then fails with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The kernel's own failure.
    #[error("{0}")]
    Failed(String),
    /// There is no such argument.
    #[error("{kind} argument {index} does not exist; the task has {count}")]
    NoArgument {
        /// `tensor` or `scalar`.
        kind: &'static str,
        /// The index asked for.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// An access outside the memory of a view.
    #[error("bytes {offset}..+{len} lie outside the {size} bytes of the view")]
    OutOfBounds {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Size of the view.
        size: u64,
    },
    /// A signal cell must be aligned to four bytes.
    #[error("a signal cell at byte {offset} of its allocation is not aligned to 4 bytes")]
    Misaligned {
        /// Bytes from the start of the window, resident buffer or host buffer.
        offset: u64,
    },
    /// The view cannot be written: an argument with access `Input`, or a read-only buffer of zeros.
    #[error("the view is read-only; submit the tensor with another access than Input")]
    ReadOnly,
    /// The memory was freed while the kernel still held a view of it.
    #[error("the memory was freed")]
    Freed,
    /// No domain has this device context (any more).
    #[error("device context {0:#x} names no live domain")]
    UnknownContext(u64),
    /// The device context belongs to another chip.
    #[error("device context {context:#x} belongs to {owner}, the task runs on {here}")]
    ForeignContext {
        /// The context.
        context: u64,
        /// The chip it was made for.
        owner: ChipId,
        /// The chip of the task.
        here: ChipId,
    },
    /// There is no such rank.
    #[error("rank {rank} does not exist; the domain has {size} ranks")]
    NoRank {
        /// The rank asked for.
        rank: usize,
        /// Number of ranks.
        size: usize,
    },
    /// There is no such named buffer.
    #[error("buffer {index} does not exist; the domain has {count} named buffers")]
    NoBuffer {
        /// The index asked for.
        index: usize,
        /// Number of named buffers.
        count: usize,
    },
    /// A wait ended because the run has failed elsewhere.
    #[error("the wait was interrupted: the run has failed")]
    RunFailed,
    /// A wait ended because the emulator was abandoned.
    #[error("the wait was interrupted: the emulator was abandoned")]
    Abandoned,
}

impl KernelError {
    /// A failure of the kernel itself.
    #[must_use]
    pub fn failed(message: impl Into<String>) -> Self {
        Self::Failed(message.into())
    }
}

impl From<OutOfBounds> for KernelError {
    fn from(e: OutOfBounds) -> Self {
        Self::OutOfBounds { offset: e.offset, len: e.len, size: e.size }
    }
}

/// What every task carries.
pub(crate) struct TaskContext {
    pub(crate) run: RunId,
    pub(crate) tensors: Vec<Region>,
    pub(crate) scalars: Vec<u64>,
    pub(crate) board: Arc<Board>,
    pub(crate) interrupt: Arc<InterruptFlag>,
    pub(crate) contexts: Arc<Contexts>,
}

impl TaskContext {
    fn scalar(&self, index: usize) -> Result<u64, KernelError> {
        let count = self.scalars.len();
        self.scalars.get(index).copied().ok_or(KernelError::NoArgument { kind: "scalar", index, count })
    }

    fn tensor(&self, index: usize) -> Result<MemoryView, KernelError> {
        let count = self.tensors.len();
        let region = self.tensors.get(index).ok_or(KernelError::NoArgument { kind: "tensor", index, count })?;
        Ok(self.view(region.clone()))
    }

    fn view(&self, region: Region) -> MemoryView {
        MemoryView { region, board: Arc::clone(&self.board), interrupt: Arc::clone(&self.interrupt) }
    }
}

/// What chip tasks and sub-worker tasks see in the same way.
macro_rules! task_arguments {
    () => {
        /// The run that the task belongs to.
        #[must_use]
        pub fn run(&self) -> RunId {
            self.task.run
        }

        /// Number of tensors.
        #[must_use]
        pub fn tensors(&self) -> usize {
            self.task.tensors.len()
        }

        /// Number of scalars.
        #[must_use]
        pub fn scalars(&self) -> usize {
            self.task.scalars.len()
        }

        /// A scalar argument.
        ///
        /// # Errors
        ///
        /// [`KernelError::NoArgument`].
        pub fn scalar(&self, index: usize) -> Result<u64, KernelError> {
            self.task.scalar(index)
        }

        /// The bytes of a tensor argument. Read-only where its access is `Input`.
        ///
        /// # Errors
        ///
        /// [`KernelError::NoArgument`].
        pub fn tensor(&self, index: usize) -> Result<MemoryView, KernelError> {
            self.task.tensor(index)
        }
    };
}

/// What a chip task sees.
pub struct Kernel<'a> {
    pub(crate) chip: ChipId,
    pub(crate) task: &'a TaskContext,
}

impl fmt::Debug for Kernel<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").field("run", &self.task.run).field("chip", &self.chip).finish_non_exhaustive()
    }
}

impl Kernel<'_> {
    /// The chip worker that the task runs on.
    #[must_use]
    pub fn chip(&self) -> ChipId {
        self.chip
    }

    task_arguments!();

    /// The domain of a device context (usually a scalar argument), as this chip sees it.
    ///
    /// # Errors
    ///
    /// [`KernelError::UnknownContext`] also for a domain that was freed; [`KernelError::ForeignContext`].
    pub fn domain(&self, device_context: u64) -> Result<DomainView<'_>, KernelError> {
        let entry = self.task.contexts.find(device_context).ok_or(KernelError::UnknownContext(device_context))?;
        if entry.chip != self.chip {
            return Err(KernelError::ForeignContext {
                context: device_context,
                owner: entry.chip,
                here: self.chip,
            });
        }
        Ok(DomainView { rank: entry.rank, windows: entry.windows, task: self.task })
    }
}

/// What a sub-worker task sees: host memory and scalars.
pub struct SubTask<'a> {
    pub(crate) task: &'a TaskContext,
}

impl fmt::Debug for SubTask<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SubTask").field("run", &self.task.run).finish_non_exhaustive()
    }
}

impl SubTask<'_> {
    task_arguments!();
}

/// A domain as one member sees it: its own rank, and every member's window.
pub struct DomainView<'a> {
    rank: usize,
    windows: Arc<DomainWindows>,
    task: &'a TaskContext,
}

impl fmt::Debug for DomainView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DomainView").field("rank", &self.rank).field("size", &self.size()).finish_non_exhaustive()
    }
}

impl DomainView<'_> {
    /// The rank of the chip that the task runs on.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.windows.ranks()
    }

    /// Number of named buffers.
    #[must_use]
    pub fn buffers(&self) -> usize {
        self.windows.buffers.len()
    }

    /// The requested bytes of a member's window; padding beyond them cannot be reached.
    ///
    /// # Errors
    ///
    /// [`KernelError::NoRank`].
    pub fn window(&self, rank: usize) -> Result<MemoryView, KernelError> {
        let region = self.windows.window(rank).ok_or(KernelError::NoRank { rank, size: self.size() })?;
        Ok(self.task.view(region))
    }

    /// A named buffer of a member, by its position in the request.
    ///
    /// # Errors
    ///
    /// [`KernelError::NoRank`], [`KernelError::NoBuffer`].
    pub fn buffer(&self, rank: usize, index: usize) -> Result<MemoryView, KernelError> {
        let window = self.windows.window(rank).ok_or(KernelError::NoRank { rank, size: self.size() })?;
        let count = self.buffers();
        let span = self.windows.buffers.get(index).ok_or(KernelError::NoBuffer { index, count })?;
        let region = window.part(span.offset, span.nbytes).ok_or(KernelError::NoBuffer { index, count })?;
        Ok(self.task.view(region))
    }
}

/// A range of memory. Every access is atomic word by word and relaxed; order between chips comes from [`Cell`]s.
#[derive(Clone)]
pub struct MemoryView {
    region: Region,
    board: Arc<Board>,
    interrupt: Arc<InterruptFlag>,
}

impl fmt::Debug for MemoryView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryView")
            .field("len", &self.region.len)
            .field("writable", &self.region.writable)
            .finish_non_exhaustive()
    }
}

impl MemoryView {
    /// Size in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.region.len
    }

    /// Whether the view has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.region.len == 0
    }

    /// Reads bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// [`KernelError::OutOfBounds`], [`KernelError::Freed`].
    pub fn load(&self, offset: u64, out: &mut [u8]) -> Result<(), KernelError> {
        let at = self.range(offset, out.len() as u64)?;
        Ok(self.region.segment.load(at, out)?)
    }

    /// Writes bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// [`KernelError::OutOfBounds`], [`KernelError::ReadOnly`], [`KernelError::Freed`].
    pub fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), KernelError> {
        let at = self.writable_range(offset, bytes.len() as u64)?;
        self.region.segment.store(at, bytes)?;
        self.board.changed();
        Ok(())
    }

    /// Sets `len` bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// As [`store`](Self::store).
    pub fn fill(&self, offset: u64, len: u64, byte: u8) -> Result<(), KernelError> {
        let at = self.writable_range(offset, len)?;
        self.region.segment.fill(at, len, byte)?;
        self.board.changed();
        Ok(())
    }

    /// All bytes.
    ///
    /// # Errors
    ///
    /// [`KernelError::Freed`]; [`KernelError::Failed`] where a buffer of this size cannot be made.
    pub fn to_vec(&self) -> Result<Vec<u8>, KernelError> {
        let failed = || KernelError::failed(format!("no memory for {} bytes", self.len()));
        let len = usize::try_from(self.len()).map_err(|_| failed())?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| failed())?;
        bytes.resize(len, 0);
        self.load(0, &mut bytes)?;
        Ok(bytes)
    }

    /// The signal cell at `offset`: four bytes, aligned, native byte order.
    ///
    /// # Errors
    ///
    /// [`KernelError::OutOfBounds`], [`KernelError::Misaligned`], [`KernelError::Freed`].
    pub fn cell(&self, offset: u64) -> Result<Cell, KernelError> {
        let at = self.range(offset, 4)?;
        if !at.is_multiple_of(4) {
            return Err(KernelError::Misaligned { offset: at });
        }
        self.region.segment.cell(at)?;
        Ok(Cell { view: self.clone(), at })
    }

    fn range(&self, offset: u64, len: u64) -> Result<u64, KernelError> {
        self.alive()?;
        let size = self.region.len;
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(self.region.start + offset),
            _ => Err(KernelError::OutOfBounds { offset, len, size }),
        }
    }

    fn writable_range(&self, offset: u64, len: u64) -> Result<u64, KernelError> {
        if !self.region.writable {
            return Err(KernelError::ReadOnly);
        }
        self.range(offset, len)
    }

    fn alive(&self) -> Result<(), KernelError> {
        if self.region.freed.load(Ordering::Acquire) { Err(KernelError::Freed) } else { Ok(()) }
    }
}

/// A signal cell: a 32-bit integer through which chips order their work.
///
/// A store or addition releases everything that the chip wrote before it; a load or wait that sees it acquires that.
#[derive(Clone, Debug)]
pub struct Cell {
    view: MemoryView,
    at: u64,
}

impl Cell {
    /// Reads, acquire.
    ///
    /// # Errors
    ///
    /// [`KernelError::Freed`].
    pub fn load(&self) -> Result<i32, KernelError> {
        self.view.alive()?;
        Ok(self.view.region.segment.cell(self.at)?.load(Ordering::Acquire).cast_signed())
    }

    /// Writes, release, and wakes waiters.
    ///
    /// # Errors
    ///
    /// [`KernelError::ReadOnly`], [`KernelError::Freed`].
    pub fn store(&self, value: i32) -> Result<(), KernelError> {
        self.writable()?;
        self.view.region.segment.cell(self.at)?.store(value.cast_unsigned(), Ordering::Release);
        self.view.board.changed();
        Ok(())
    }

    /// Adds (wrapping), acquire and release, wakes waiters, and returns the value before.
    ///
    /// # Errors
    ///
    /// As [`store`](Self::store).
    pub fn fetch_add(&self, value: i32) -> Result<i32, KernelError> {
        self.writable()?;
        let before = self.view.region.segment.cell(self.at)?.fetch_add(value.cast_unsigned(), Ordering::AcqRel);
        self.view.board.changed();
        Ok(before.cast_signed())
    }

    /// Waits until `accept` takes the value, and returns that value. Spins a little, then sleeps until memory
    /// changes.
    ///
    /// # Errors
    ///
    /// [`KernelError::RunFailed`] and [`KernelError::Abandoned`] interrupt the wait; [`KernelError::Freed`].
    pub fn wait(&self, accept: impl Fn(i32) -> bool) -> Result<i32, KernelError> {
        self.view.board.wait(|| match self.load() {
            Err(error) => Some(Err(error)),
            Ok(value) if accept(value) => Some(Ok(value)),
            Ok(_) => match self.view.interrupt.get() {
                Some(Interrupt::RunFailed) => Some(Err(KernelError::RunFailed)),
                Some(Interrupt::Abandoned) => Some(Err(KernelError::Abandoned)),
                None => None,
            },
        })
    }

    fn writable(&self) -> Result<(), KernelError> {
        self.view.alive()?;
        if self.view.region.writable { Ok(()) } else { Err(KernelError::ReadOnly) }
    }
}

/// What a host entry sees: its arguments, the orchestrator, and the host that leases domains.
pub struct EntryContext<'a> {
    pub(crate) call: &'a EntryCall<'a>,
    pub(crate) orchestrator: &'a dyn Orchestrator,
    pub(crate) host: &'a dyn EntryHost,
}

impl fmt::Debug for EntryContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EntryContext").field("call", &self.call).finish_non_exhaustive()
    }
}

impl<'a> EntryContext<'a> {
    /// All arguments.
    #[must_use]
    pub fn args(&self) -> &'a [EntryArg] {
        self.call.args
    }

    /// The argument called `name`.
    #[must_use]
    pub fn arg(&self, name: &str) -> Option<&'a EntryValue> {
        self.call.args.iter().find(|a| &*a.name == name).map(|a| &a.value)
    }

    /// The configuration of this dispatch.
    #[must_use]
    pub fn config(&self) -> &'a CallConfig {
        self.call.config
    }

    /// The dispatch frame.
    #[must_use]
    pub fn frame(&self) -> u32 {
        self.call.frame
    }

    /// The orchestrator of the run. Call [`EntryHost::open`] before the first call that reaches the device.
    #[must_use]
    pub fn orchestrator(&self) -> &'a dyn Orchestrator {
        self.orchestrator
    }

    /// The host: opens the dispatch, leases domains.
    #[must_use]
    pub fn host(&self) -> &'a dyn EntryHost {
        self.host
    }
}

pub(crate) type ChipFn = dyn Fn(&Kernel<'_>) -> Result<(), KernelError> + Send + Sync;
pub(crate) type SubFn = dyn Fn(&SubTask<'_>) -> Result<(), KernelError> + Send + Sync;
pub(crate) type EntryFn = dyn Fn(&mut EntryContext<'_>) -> Result<(), CallbackError> + Send + Sync;

/// The code of a callable.
#[derive(Clone)]
pub(crate) enum Code {
    Chip(Arc<ChipFn>),
    Sub(Arc<SubFn>),
    Entry { code: Arc<EntryFn>, takes_domains: bool },
}

impl Code {
    pub(crate) fn kind(&self) -> CallableKind {
        match self {
            Self::Chip(_) => CallableKind::Chip,
            Self::Sub(_) => CallableKind::Sub,
            Self::Entry { .. } => CallableKind::Entry,
        }
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Code({:?})", self.kind())
    }
}

/// A closure as the source of a callable ([`CallableSource::Object`]).
///
/// ```
/// use pto_mock::KernelObject;
/// use pto_simpler_sys::{CallableSpec, Signature};
///
/// let kernel = KernelObject::new(|k| k.tensor(0)?.fill(0, 4, 1));
/// let spec = CallableSpec::chip("ones", Signature::default()).with_source(kernel.into_source());
/// # let _ = spec;
/// ```
#[derive(Clone, Debug)]
pub struct KernelObject {
    pub(crate) code: Code,
}

impl KernelObject {
    /// A chip kernel.
    #[must_use]
    pub fn new(kernel: impl Fn(&Kernel<'_>) -> Result<(), KernelError> + Send + Sync + 'static) -> Self {
        Self { code: Code::Chip(Arc::new(kernel)) }
    }

    /// A sub-worker function.
    #[must_use]
    pub fn sub(task: impl Fn(&SubTask<'_>) -> Result<(), KernelError> + Send + Sync + 'static) -> Self {
        Self { code: Code::Sub(Arc::new(task)) }
    }

    /// A host entry that takes its domains from the host.
    #[must_use]
    pub fn entry(
        entry: impl Fn(&mut EntryContext<'_>) -> Result<(), CallbackError> + Send + Sync + 'static,
    ) -> Self {
        Self { code: Code::Entry { code: Arc::new(entry), takes_domains: true } }
    }

    /// A host entry of an old generator: it cannot take its domains from the host.
    #[must_use]
    pub fn entry_without_domains(
        entry: impl Fn(&mut EntryContext<'_>) -> Result<(), CallbackError> + Send + Sync + 'static,
    ) -> Self {
        Self { code: Code::Entry { code: Arc::new(entry), takes_domains: false } }
    }

    /// Ready for [`CallableSpec::with_source`](pto_simpler_sys::CallableSpec::with_source).
    #[must_use]
    pub fn into_source(self) -> CallableSource {
        CallableSource::Object(Arc::new(self))
    }
}

/// A flag that views share: set when their memory is freed.
pub(crate) type Freed = Arc<AtomicBool>;
