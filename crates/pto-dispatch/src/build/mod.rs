//! The graph build: what a program may ask for while one dispatch is being built.
//!
//! | module | concern |
//! |---|---|
//! | `lease` | domains: retained, or allocated for this dispatch |
//! | `place` | tensors and the memory that they lie in |
//! | `copy` | copies that the builder asks for |
//! | `scope`, `entry` | calls that run somebody's code inside the build |
//! | `opening` | what comes before the builder's first own call |
//! | `graph` | the builder as the backend sees it, and how the build ended |
//!
//! Tasks are in [`task`](crate::task); what a failed call means for the rest of the build is here.
//!
//! # Opening (design rule 12)
//!
//! Until a dispatch opens, leases of retained domains are table look-ups and nothing has been touched. The first
//! call that reaches the backend (an allocation, a copy, a task), or else the end of the build, opens it:
//!
//! 1. every retained domain of the program is registered with the run;
//! 2. all their mappings are checked;
//! 3. with reset on, every named buffer on every participating chip is zeroed, synchronously;
//! 4. the builder's own call goes through.
//!
//! A failed call that had an effect is *sticky*: later calls of the same build return it, and a builder that
//! swallows it has failed all the same (rule 17).

mod copy;
mod entry;
mod graph;
mod lease;
mod opening;
mod place;
mod scope;

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::Arc;

use pto_domain::LeaseParts;
use pto_simpler_sys::{BackendError, Call, CallConfig, ChipId, Orchestrator};

use crate::error::Error;
use crate::inner::{Callable, Inner, OpeningPlan, PreparedProgram, Storage, guarded};
use crate::program::DispatchId;
use crate::task::{Group, Task};

pub use entry::EntryInput;
pub(crate) use graph::{Built, Graph};
pub use place::{Intermediate, Place, Scratch, Tensor};

/// An invariant lifetime: neither longer nor shorter will do.
type Invariant<'b> = PhantomData<fn(&'b ()) -> &'b ()>;

/// Reusable storage of one group submission.
#[derive(Debug, Default)]
pub(crate) struct GroupStorage {
    pub(crate) args: Vec<pto_simpler_sys::TaskArgs>,
    pub(crate) workers: Vec<ChipId>,
}

/// The build of one dispatch's graph, handed to [`Program::build`](crate::Program::build).
///
/// Everything that it gives out (leases, tensors, scratch) carries the lifetime `'b` of this build and cannot leave
/// it.
pub struct Build<'b> {
    pub(crate) inner: &'b Inner,
    pub(crate) program: &'b PreparedProgram,
    pub(crate) orchestrator: &'b dyn Orchestrator,
    pub(crate) config: &'b CallConfig,
    pub(crate) state: &'b State,
    lifetime: Invariant<'b>,
}

/// What a build has done so far.
pub(crate) struct State {
    pub(crate) storage: RefCell<Box<Storage>>,
    pub(crate) plan: Arc<OpeningPlan>,
    pub(crate) id: DispatchId,
    pub(crate) frame: usize,
    /// Dispatches in flight that a control call would have to wait for, where the submitter does not want to wait.
    pub(crate) would_wait: bool,
    pub(crate) opened: Cell<bool>,
    pub(crate) tasks: Cell<bool>,
    pub(crate) sticky: RefCell<Option<Error>>,
    ordinary: RefCell<Vec<LeaseParts>>,
}

impl<'b> Build<'b> {
    /// The dispatch being built.
    #[must_use]
    pub fn dispatch(&self) -> DispatchId {
        self.state.id
    }

    /// The dispatch frame, below [`FRAMES`](pto_simpler_sys::FRAMES).
    #[must_use]
    pub fn frame(&self) -> usize {
        self.state.frame
    }

    /// Number of chip workers.
    #[must_use]
    pub fn chips(&self) -> u32 {
        self.inner.capabilities.chips()
    }

    /// Whether domains are kept between dispatches.
    #[must_use]
    pub fn is_persistent(&self) -> bool {
        self.inner.mode.persistent
    }

    /// Whether reused domains are zeroed before this dispatch can see them.
    #[must_use]
    pub fn is_resetting(&self) -> bool {
        self.inner.mode.reset
    }

    /// The call configuration of this dispatch.
    #[must_use]
    pub fn config(&self) -> &'b CallConfig {
        self.config
    }

    /// A task of the program's callable number `callable` (its position in
    /// [`ProgramSpec::callables`](crate::ProgramSpec)), to be given arguments and submitted.
    ///
    /// # Errors
    ///
    /// [`Error::Build`] where the program declares fewer callables.
    pub fn task(&self, callable: usize) -> Result<Task<'_, 'b>, Error> {
        Task::new(self, self.callable(callable)?)
    }

    /// A group of tasks of one callable that start together, one on each chip.
    ///
    /// # Errors
    ///
    /// As [`task`](Self::task).
    pub fn group(&self, callable: usize) -> Result<Group<'_, 'b>, Error> {
        Group::new(self, self.callable(callable)?)
    }

    fn callable(&self, index: usize) -> Result<&'b Callable, Error> {
        self.program.callables.get(index).ok_or_else(|| {
            Error::build(format!(
                "callable {index} is not declared: program `{}` declares {}",
                self.program.name,
                self.program.callables.len()
            ))
        })
    }

    pub(crate) fn check_sticky(&self) -> Result<(), Error> {
        match &*self.state.sticky.borrow() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// A control call waits for the device queue; a submitter that does not wait is told so instead.
    fn check_control(&self) -> Result<(), Error> {
        if self.state.would_wait {
            return Err(Error::WouldBlock { reason: "a control call waits for the dispatches in flight" });
        }
        Ok(())
    }

    /// Once persistent dispatch is poisoned, retained domains are the backend's: nothing more is touched.
    fn check_poison(&self) -> Result<(), Error> {
        self.inner.ended_by().map_or(Ok(()), Err)
    }

    /// Makes an orchestrator call; a failure that had an effect, or that is final for the worker, sticks.
    pub(crate) fn effect<T>(&self, call: Call, body: impl FnOnce() -> Result<T, BackendError>) -> Result<T, Error> {
        guarded(call, body).map_err(|error| self.failed(error))
    }

    fn failed(&self, error: BackendError) -> Error {
        let error = Error::Backend(error);
        if error.effect().possible() || error.must_reprepare() { self.stick(error) } else { error }
    }

    fn stick(&self, error: Error) -> Error {
        let mut sticky = self.state.sticky.borrow_mut();
        sticky.get_or_insert(error).clone()
    }
}

impl std::fmt::Debug for Build<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Build").field("dispatch", &self.state.id).field("program", &self.program.name).finish()
    }
}
