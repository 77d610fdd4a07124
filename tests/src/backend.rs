//! Backends by name, as factories of the conformance suite.

use std::sync::Arc;
use std::time::Duration;
use std::{env, fmt, fs, io};

use pto_mock::conformance::{BackendFactory, BackendSpec, CreateError, Deviation, GRACE};
use pto_mock::{Emulator, EmulatorBuilder, Memory, kernels};
use pto_simpler_sys::Backend;
use tempfile::TempDir;

/// The environment variable that names the backend.
pub const VARIABLE: &str = "PTO_BACKEND";

/// Makes the factory of one backend.
type Make = fn() -> Box<dyn BackendFactory>;

/// Every backend that this build can run on; a binding adds its row here.
const BACKENDS: &[(&str, Make)] = &[
    ("emulator", || Box::new(EmulatorFactory::new("emulator"))),
    #[cfg(feature = "simpler")]
    ("simpler", || Box::new(crate::simpler::SimplerFactory(crate::simpler::Runtime::Simpler))),
    #[cfg(feature = "simpler")]
    ("standin", || Box::new(crate::simpler::SimplerFactory(crate::simpler::Runtime::StandIn))),
];

/// A name that is no backend of this build.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{VARIABLE} is {requested:?}; permitted are {}{}",
    permitted.join(", "),
    if cfg!(feature = "simpler") { "" } else { ", and with --features simpler also simpler and standin" }
)]
pub struct UnknownBackend {
    /// The name asked for.
    pub requested: String,
    /// The names there are.
    pub permitted: Vec<&'static str>,
}

/// The backend with this name.
///
/// # Errors
///
/// [`UnknownBackend`], with the names there are.
pub fn named(name: &str) -> Result<Box<dyn BackendFactory>, UnknownBackend> {
    match BACKENDS.iter().find(|(known, _)| *known == name) {
        Some((_, make)) => Ok(make()),
        None => Err(UnknownBackend {
            requested: name.to_owned(),
            permitted: BACKENDS.iter().map(|(known, _)| *known).collect(),
        }),
    }
}

/// The backend that `PTO_BACKEND` names; the emulator where it is not set or empty.
///
/// # Errors
///
/// [`UnknownBackend`].
pub fn chosen() -> Result<Box<dyn BackendFactory>, UnknownBackend> {
    match env::var_os(VARIABLE) {
        None => named("emulator"),
        Some(name) if name.is_empty() => named("emulator"),
        Some(name) => named(&name.to_string_lossy()),
    }
}

type Configure = Box<dyn Fn(EmulatorBuilder) -> EmulatorBuilder + Send + Sync>;
type Wrap = Box<dyn Fn(Arc<Emulator>) -> Arc<dyn Backend> + Send + Sync>;

/// Emulators with the portable kernels, under any options and any wrapper.
pub struct EmulatorFactory {
    name: String,
    configure: Configure,
    wrap: Wrap,
    deviations: Vec<Deviation>,
    grace: Duration,
    process_backed: bool,
    directory: Option<TempDir>,
    device_memory: Option<u64>,
}

impl fmt::Debug for EmulatorFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmulatorFactory")
            .field("name", &self.name)
            .field("deviations", &self.deviations)
            .finish_non_exhaustive()
    }
}

impl EmulatorFactory {
    /// The emulator with its default options.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            configure: Box::new(|builder| builder),
            wrap: Box::new(|emulator| emulator),
            deviations: Vec::new(),
            grace: GRACE,
            process_backed: false,
            directory: None,
            device_memory: None,
        }
    }

    /// The same with options of the emulator's.
    #[must_use]
    pub fn with(mut self, configure: impl Fn(EmulatorBuilder) -> EmulatorBuilder + Send + Sync + 'static) -> Self {
        self.configure = Box::new(configure);
        self
    }

    /// The same behind a wrapper.
    #[must_use]
    pub fn behind(mut self, wrap: impl Fn(Arc<Emulator>) -> Arc<dyn Backend> + Send + Sync + 'static) -> Self {
        self.wrap = Box::new(wrap);
        self
    }

    /// The same with each test in a process of its own, as backends with chip processes need it.
    #[must_use]
    pub fn in_own_processes(mut self) -> Self {
        self.process_backed = true;
        self
    }

    /// The same with its shared memory in a directory of its own, in which the suite looks for what is left.
    ///
    /// # Errors
    ///
    /// Where the directory cannot be made.
    pub fn in_own_directory(mut self) -> io::Result<Self> {
        self.directory = Some(tempfile::tempdir()?);
        Ok(self)
    }

    /// The same with so much device memory on each chip.
    #[must_use]
    pub fn with_device_memory(mut self, bytes: u64) -> Self {
        self.device_memory = Some(bytes);
        self
    }

    /// The same, known to break a rule.
    #[must_use]
    pub fn deviating(mut self, rule: &'static str, reason: &'static str) -> Self {
        self.deviations.push(Deviation { rule, reason });
        // What comes too early comes at once; the minutes only make sure that it is seen.
        self.grace = Duration::from_secs(120);
        self
    }
}

impl BackendFactory for EmulatorFactory {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn create(&self, spec: &BackendSpec) -> Result<Arc<dyn Backend>, CreateError> {
        let mut builder = Emulator::builder().chips(spec.chips).sub_workers(spec.sub_workers);
        if let Some(directory) = &self.directory {
            builder = builder.memory(Memory::SharedIn(directory.path().to_owned()));
        }
        if let Some(bytes) = self.device_memory {
            builder = builder.device_memory(bytes);
        }
        let emulator = (self.configure)(kernels::install(builder)).build().map_err(CreateError::failed)?;
        Ok((self.wrap)(emulator))
    }

    fn known_deviations(&self) -> Vec<Deviation> {
        self.deviations.clone()
    }

    fn grace(&self) -> Duration {
        self.grace
    }

    fn process_backed(&self) -> bool {
        self.process_backed
    }

    fn shared_memory(&self) -> Option<Vec<String>> {
        // A directory that cannot be read would hide what is left in it; as a name it is at least seen.
        let list = |directory: &TempDir| match fs::read_dir(directory.path()) {
            Ok(entries) => entries.map(|entry| format!("{entry:?}")).collect(),
            Err(error) => vec![format!("{}: {error}", directory.path().display())],
        };
        self.directory.as_ref().map(list)
    }

    fn device_memory(&self) -> Option<u64> {
        self.device_memory
    }
}
