//! The contract of the hardware-abstraction layer as tests, for anybody's backend.
//!
//! Every rule that [`Backend`] and [`Orchestrator`] state is one public function over
//! a [`BackendFactory`], and one macro turns them all into named `#[test]`s. The emulator, every wrapper around it
//! and every binding run the same rules with the same expected values; a difference is a bug, or a [`Deviation`]
//! with a reason that must still fail.
//!
//! # In call order
//!
//! 1. Implement [`BackendFactory`]: how to make one unstarted backend for a [`BackendSpec`].
//! 2. Call [`conformance_tests!`](crate::conformance_tests) with an expression that makes the factory.
//! 3. Each test calls [`check`], which runs one of [`RULES`] and judges it: kept, skipped (printed, with the
//!    capability that is missing), broken, or deviating as known.
//!
//! A backend in another crate runs the suite with this much:
//!
//! ```
//! use std::sync::Arc;
//! use pto_mock::conformance::{BackendFactory, BackendSpec, CreateError};
//! use pto_mock::{Emulator, kernels};
//! use pto_simpler_sys::Backend;
//!
//! struct Mine;
//!
//! impl BackendFactory for Mine {
//!     fn name(&self) -> String {
//!         "mine".into()
//!     }
//!     fn create(&self, spec: &BackendSpec) -> Result<Arc<dyn Backend>, CreateError> {
//!         let builder = Emulator::builder().chips(spec.chips).sub_workers(spec.sub_workers);
//!         Ok(kernels::install(builder).build().map_err(CreateError::failed)?)
//!     }
//! }
//!
//! pto_mock::conformance_tests!(Mine);
//! # pto_mock::conformance::rules::runs::an_empty_run_is_accepted_and_ends(&Mine).unwrap();
//! ```
//!
//! # Kernels
//!
//! The rules use the portable kernels of [`crate::kernels`] under their names, registered as
//! [`CallableSource::Named`](pto_simpler_sys::CallableSource::Named). A binding maps those names to code of its own
//! that does the same.
//!
//! # Time
//!
//! No rule asserts on time. What must not happen yet is observed by order: the test holds a run open with a gate,
//! lets another thread go as far as it can, and looks for what overtook the gate. How long it lets the other thread
//! go ([`GRACE`]) can hide a violation, never invent one. A test that hangs is ended by a guard ([`HANG_GUARD`])
//! that aborts its process.
//!
//! # Processes
//!
//! For a factory that is [`process_backed`](BackendFactory::process_backed), each test runs the test binary again
//! for itself alone, one at a time on the whole machine, because each chip process may keep a core busy and an
//! embedded runtime is one per process.

mod process;
mod rig;
pub mod rules;

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pto_simpler_sys::{Backend, BackendError, CallableSpec, Orchestrator};

pub use process::TestPath;

/// How long one rule may take before its process is aborted. Generous: a guard against hangs, not a measurement.
pub const HANG_GUARD: Duration = Duration::from_secs(300);

/// How long a call that must wait is given to come back too early. Longer finds more; shorter accuses nobody.
pub const GRACE: Duration = Duration::from_millis(100);

/// What a rule needs of a backend.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BackendSpec {
    /// Number of chip workers.
    pub chips: u32,
    /// Number of host-side sub-workers. A backend that has none says 0 in its capabilities, and rules that need one
    /// are skipped.
    pub sub_workers: u32,
    /// The callables that the rule registers by itself; for factories that must know them when they construct.
    pub callables: Vec<CallableSpec>,
}

impl BackendSpec {
    /// So many chip workers and sub-workers, no callables known beforehand.
    #[must_use]
    pub const fn new(chips: u32, sub_workers: u32) -> Self {
        Self { chips, sub_workers, callables: Vec::new() }
    }
}

/// Why a factory made no backend.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// This backend cannot have what the spec asks for; the rule is skipped.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// Construction failed; the rule is broken.
    #[error("the backend could not be made")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
}

impl CreateError {
    /// A failure with its cause.
    pub fn failed(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Failed(cause.into())
    }
}

/// A rule that a backend is known not to keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deviation {
    /// The rule's name.
    pub rule: &'static str,
    /// Why it cannot be kept.
    pub reason: &'static str,
}

/// Holds one run open, for backends that have no sub-worker to do it with.
pub trait HoldRun: Send + Sync {
    /// Adds to the graph being built what keeps its run from ending until [`release`](Self::release). Not control.
    ///
    /// # Errors
    ///
    /// Whatever the backend says.
    fn hold(&self, orchestrator: &dyn Orchestrator) -> Result<(), BackendError>;

    /// Waits until what holds the run is executing (it can no longer be cancelled before it starts).
    fn wait_entered(&self);

    /// Lets the run end. Called once, possibly before the run was submitted.
    fn release(&self);
}

/// Makes backends for rules: one fresh, unstarted backend for each call.
pub trait BackendFactory: Send + Sync {
    /// A name for messages.
    fn name(&self) -> String;

    /// A backend in state `New` with nothing registered.
    ///
    /// # Errors
    ///
    /// [`CreateError`].
    fn create(&self, spec: &BackendSpec) -> Result<Arc<dyn Backend>, CreateError>;

    /// Rules that this backend does not keep. They run all the same and must fail.
    fn known_deviations(&self) -> Vec<Deviation> {
        Vec::new()
    }

    /// A way to hold a run of `backend` open. `None` lets the suite use a sub-worker that polls a host buffer, and
    /// skip rules that hold runs where there is no sub-worker.
    fn hold(&self, backend: &Arc<dyn Backend>) -> Option<Box<dyn HoldRun>> {
        let _ = backend;
        None
    }

    /// How long a call that must wait is given to come back too early. A backend that is known to come back too
    /// early asks for minutes, so that it is caught for certain; it will not take them.
    fn grace(&self) -> Duration {
        GRACE
    }

    /// Whether chip workers are processes, or a runtime that a process can have only once is embedded.
    fn process_backed(&self) -> bool {
        false
    }

    /// Names of shared memory that exist now, of this factory's backends alone. `None` where it cannot tell.
    fn shared_memory(&self) -> Option<Vec<String>> {
        None
    }

    /// Bytes of device memory that each chip of this factory's backends has, where asking for more is known to be
    /// harmless. `None` skips the rules that do.
    fn device_memory(&self) -> Option<u64> {
        None
    }
}

impl<F: BackendFactory + ?Sized> BackendFactory for Box<F> {
    fn name(&self) -> String {
        (**self).name()
    }

    fn create(&self, spec: &BackendSpec) -> Result<Arc<dyn Backend>, CreateError> {
        (**self).create(spec)
    }

    fn known_deviations(&self) -> Vec<Deviation> {
        (**self).known_deviations()
    }

    fn hold(&self, backend: &Arc<dyn Backend>) -> Option<Box<dyn HoldRun>> {
        (**self).hold(backend)
    }

    fn grace(&self) -> Duration {
        (**self).grace()
    }

    fn process_backed(&self) -> bool {
        (**self).process_backed()
    }

    fn shared_memory(&self) -> Option<Vec<String>> {
        (**self).shared_memory()
    }

    fn device_memory(&self) -> Option<u64> {
        (**self).device_memory()
    }
}

/// Why a rule did not come to "kept".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The backend lacks a capability that the rule is about.
    Skipped(String),
    /// The rule is broken.
    Broken(String),
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Skipped(why) => write!(f, "skipped: {why}"),
            Self::Broken(what) => write!(f, "broken: {what}"),
        }
    }
}

impl Error for Stop {}

/// What a rule function returns: kept, or why not.
pub type Outcome = Result<(), Stop>;

/// One rule of the contract.
#[derive(Clone, Copy)]
pub struct Rule {
    /// Its name, which states it.
    pub name: &'static str,
    /// The function that checks it.
    pub check: fn(&dyn BackendFactory) -> Outcome,
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Rule").field(&self.name).finish()
    }
}

/// How a rule was judged, deviations considered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The rule holds.
    Kept,
    /// Not applicable, with the reason.
    Skipped(String),
    /// Broken, as listed, with the listed reason.
    DeviatesAsKnown(String),
    /// Broken.
    Broken(String),
    /// Listed as a deviation, but kept: the entry must go.
    Unexpected(String),
}

/// Runs one rule in this process and judges it.
#[must_use]
pub fn judge(rule: &Rule, factory: &dyn BackendFactory) -> Verdict {
    let before = factory.shared_memory();
    let mut outcome = (rule.check)(factory);
    if let (Ok(()), Some(before), Some(after)) = (&outcome, before, factory.shared_memory()) {
        let left: Vec<_> = after.iter().filter(|name| !before.contains(name)).collect();
        if !left.is_empty() {
            outcome = Err(Stop::Broken(format!("left in shared memory: {left:?}")));
        }
    }
    let deviation = factory.known_deviations().into_iter().find(|d| d.rule == rule.name);
    match (outcome, deviation) {
        (Ok(()), None) => Verdict::Kept,
        (Ok(()), Some(d)) => Verdict::Unexpected(d.reason.to_owned()),
        (Err(Stop::Skipped(why)), _) => Verdict::Skipped(why),
        (Err(Stop::Broken(what)), None) => Verdict::Broken(what),
        (Err(Stop::Broken(what)), Some(d)) => Verdict::DeviatesAsKnown(format!("{} ({what})", d.reason)),
    }
}

/// The body of one generated test: runs the rule called `name`, in a process of its own where the factory is
/// process-backed, and panics where the rule is broken or a known deviation is kept.
///
/// # Panics
///
/// As a failing test does.
#[expect(clippy::panic, reason = "a test reports by panicking")]
pub fn check(name: &str, factory: &dyn BackendFactory, path: TestPath) {
    let Some(rule) = RULES.iter().find(|rule| rule.name == name) else { panic!("there is no rule {name}") };
    let verdict = if factory.process_backed() && !path.is_child() {
        let deviation = factory.known_deviations().into_iter().find(|d| d.rule == name);
        match (process::rerun(path), deviation) {
            (Ok(()), _) => return,
            (Err(process::Failure::Died(what)), Some(d)) => {
                Verdict::DeviatesAsKnown(format!("{} ({what})", d.reason))
            }
            (Err(process::Failure::Died(what) | process::Failure::Failed(what)), _) => Verdict::Broken(what),
        }
    } else {
        let _guard = process::HangGuard::arm(name);
        judge(rule, factory)
    };
    let backend = factory.name();
    match verdict {
        Verdict::Kept => {}
        Verdict::Skipped(why) => println!("{backend}: {name}: skipped: {why}"),
        Verdict::DeviatesAsKnown(why) => println!("{backend}: {name}: deviates as known: {why}"),
        Verdict::Broken(what) => panic!("{backend}: {name}: broken: {what}"),
        Verdict::Unexpected(reason) => {
            panic!("{backend}: {name} is listed as a known deviation ({reason}) but is kept; take it off the list")
        }
    }
}

/// Runs the body of a test that is not a rule the way rules of process-backed factories run: in a process of its own,
/// one at a time on the whole machine, with the hang guard.
///
/// # Panics
///
/// Where the body does, or its process dies.
#[expect(clippy::panic, reason = "a test reports by panicking")]
pub fn alone(path: TestPath, body: impl FnOnce()) {
    if path.is_child() {
        let _guard = process::HangGuard::arm(path.as_str());
        return body();
    }
    if let Err(process::Failure::Died(what) | process::Failure::Failed(what)) = process::rerun(path) {
        panic!("{what}");
    }
}

/// The body of the generated test that keeps the list of deviations honest: each names a rule, once.
///
/// # Panics
///
/// Where one does not.
#[expect(clippy::panic, reason = "a test reports by panicking")]
pub fn check_deviations(factory: &dyn BackendFactory) {
    let deviations = factory.known_deviations();
    for (index, deviation) in deviations.iter().enumerate() {
        if !RULES.iter().any(|rule| rule.name == deviation.rule) {
            panic!("{}: known deviation {:?} names no rule", factory.name(), deviation.rule);
        }
        if deviations.iter().take(index).any(|d| d.rule == deviation.rule) {
            panic!("{}: known deviation {:?} is listed twice", factory.name(), deviation.rule);
        }
    }
}

macro_rules! list_of_rules {
    ([] $($module:ident :: $name:ident),* $(,)?) => {
        /// Every rule, in the order of the modules of [`rules`].
        pub const RULES: &[Rule] = &[$(Rule { name: stringify!($name), check: rules::$module::$name }),*];
    };
}
crate::__conformance_rules!([list_of_rules]);

/// Makes one `#[test]` for each rule of [`conformance`](crate::conformance), over the factory that the expression
/// makes (evaluated anew in each test). Wrap it in a module where a file tests several backends.
#[macro_export]
macro_rules! conformance_tests {
    ($factory:expr) => {
        #[test]
        fn known_deviations_name_rules() {
            $crate::conformance::check_deviations(&$factory);
        }

        $crate::__conformance_rules!([$crate::__conformance_tests] $factory);
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_tests {
    ([$factory:expr] $($module:ident :: $name:ident),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                let path = $crate::conformance::TestPath::new(module_path!(), stringify!($name));
                $crate::conformance::check(stringify!($name), &$factory, path);
            }
        )*
    };
}

#[cfg(test)]
mod tests;
