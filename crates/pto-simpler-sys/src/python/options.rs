//! What a user says about the runtime to start.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::callable::CallableSource;

/// How domains are kept between runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RetentionChoice {
    /// Through the runtime's public `get_or_allocate_domain(retain_after_run=True)`. Where the runtime lacks it, the
    /// backend works without retention, and its capabilities say what is missing.
    #[default]
    Public,
    /// Through private hooks of today's published runtime, which may change under us; therefore never chosen by
    /// itself. A missing hook is an error that names it, before the start.
    Legacy,
}

/// How much the runtime writes to standard error, from its Python logger and the native code seeded from it. The
/// one-line "ready" notice of each chip process and the simulated device's own error lines are not under anybody's
/// control but that of whoever owns the descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Noise {
    /// What the runtime itself chose.
    Runtime,
    /// Warnings and errors.
    #[default]
    Warnings,
    /// Errors.
    Errors,
    /// Nothing.
    Silent,
}

impl Noise {
    /// The threshold of the Python logger, in its own numbers.
    pub(crate) const fn level(self) -> Option<u32> {
        match self {
            Self::Runtime => None,
            Self::Warnings => Some(30),
            Self::Errors => Some(40),
            Self::Silent => Some(60),
        }
    }
}

/// A plain value for a keyword argument of the runtime's `Worker`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum WorkerArgument {
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// A string.
    Text(String),
}

/// Options of a [`SimplerBackend`](super::SimplerBackend).
///
/// ```no_run
/// use pto_simpler_sys::python::{RetentionChoice, SimplerOptions};
///
/// let mut options = SimplerOptions::new("a2a3sim", [0, 1]);
/// options.retention = RetentionChoice::Legacy;
/// options.environment = Some("/opt/npu/venv".into());
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SimplerOptions {
    /// Platform: `a2a3`, `a2a3sim`, `a5` or `a5sim`.
    pub platform: Arc<str>,
    /// Runtime on the chips.
    pub runtime: Arc<str>,
    /// Devices; a chip worker is an index into this list.
    pub device_ids: Vec<u32>,
    /// Host-side sub-worker processes. Host entries that bring more sub-workers raise the number to theirs.
    pub num_sub_workers: u32,
    /// How domains are kept between runs.
    pub retention: RetentionChoice,
    /// Directories put in front of `sys.path`, in this order.
    pub python_path: Vec<PathBuf>,
    /// Site directories, whose `.pth` files are honoured.
    pub site_directories: Vec<PathBuf>,
    /// Root of a virtual environment: its site directory is added and its interpreter becomes `sys.executable`.
    pub environment: Option<PathBuf>,
    /// `sys.executable` for the embedded interpreter. The runtime's shared-memory tracker is started with it, so it
    /// must be a real interpreter. Default: that of `environment`, else the one the binding was built with.
    pub sys_executable: Option<PathBuf>,
    /// `module:function`, called once without arguments after the interpreter has started and before the runtime is
    /// probed.
    pub prelude: Option<String>,
    /// Code of callables that are registered by name only ([`CallableSource::Named`]).
    pub callables: BTreeMap<Arc<str>, CallableSource>,
    /// Code of sub-workers that generated programs declare without a body, by name.
    pub callbacks: BTreeMap<Arc<str>, CallableSource>,
    /// How long `start` waits for the chip processes. `None`: the runtime's own limit (300 s).
    pub startup_timeout: Option<Duration>,
    /// How much the runtime writes to standard error.
    pub noise: Noise,
    /// Once a chip process has died, how long runs in flight may take to end by themselves before the remaining chip
    /// processes are ended too: a peer that waits for the dead one would otherwise hold its run for minutes.
    pub dead_chip_grace: Duration,
    /// Most bytes of released host buffers that are kept for the next one of the same size. Making one and releasing it
    /// costs the runtime milliseconds and every child process an interruption.
    pub released_buffer_bytes: u64,
    /// More keyword arguments for the runtime's `Worker`.
    pub worker_arguments: BTreeMap<String, WorkerArgument>,
}

impl SimplerOptions {
    /// The defaults for these devices: runtime `tensormap_and_ringbuffer`, no sub-workers, public retention, the
    /// virtual environment that is active (`VIRTUAL_ENV`), if one is.
    #[must_use]
    pub fn new(platform: impl Into<Arc<str>>, device_ids: impl IntoIterator<Item = u32>) -> Self {
        Self {
            platform: platform.into(),
            runtime: "tensormap_and_ringbuffer".into(),
            device_ids: device_ids.into_iter().collect(),
            num_sub_workers: 0,
            retention: RetentionChoice::default(),
            python_path: Vec::new(),
            site_directories: Vec::new(),
            environment: std::env::var_os("VIRTUAL_ENV").map(PathBuf::from),
            sys_executable: None,
            prelude: None,
            callables: BTreeMap::new(),
            callbacks: BTreeMap::new(),
            startup_timeout: None,
            noise: Noise::default(),
            dead_chip_grace: Duration::from_secs(1),
            released_buffer_bytes: 64 << 20,
            worker_arguments: BTreeMap::new(),
        }
    }

    /// [`new`](Self::new), then what the environment says: `PTO_PLATFORM` (default `a2a3sim`), `PTO_PYTHON_PATH`
    /// (colon separated), `PTO_PYTHON_PRELUDE`, and `PTO_RETENTION=legacy`. For tests and examples.
    #[must_use]
    pub fn from_environment(device_ids: impl IntoIterator<Item = u32>) -> Self {
        let variable = |name| std::env::var(name).ok().filter(|v| !v.is_empty());
        let mut options = Self::new(variable("PTO_PLATFORM").unwrap_or_else(|| "a2a3sim".into()), device_ids);
        if let Some(path) = std::env::var_os("PTO_PYTHON_PATH") {
            options.python_path = std::env::split_paths(&path).filter(|p| !p.as_os_str().is_empty()).collect();
        }
        options.prelude = variable("PTO_PYTHON_PRELUDE");
        if variable("PTO_RETENTION").is_some_and(|v| v == "legacy") {
            options.retention = RetentionChoice::Legacy;
        }
        options
    }
}
