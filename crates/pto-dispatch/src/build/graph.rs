//! The builder as the backend sees it: runs the program, keeps its error or panic, returns a marker.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pto_simpler_sys::{BuildFailed, CallConfig, GraphBuilder, Orchestrator};

use super::{Build, State};
use crate::error::Error;
use crate::inner::{Inner, PreparedProgram, Storage};
use crate::program::{Args, DispatchId};

/// How a build ended.
pub(crate) enum Built {
    /// The builder was never called.
    NotCalled,
    /// The graph is complete.
    Complete,
    /// It failed: what the submitter gets, and, where another failure came first, that one. An error that the builder
    /// returned may speak of another worker, so it decides nothing about this one.
    Failed { error: Error, first: Option<Error>, returned: bool },
    /// The builder panicked.
    Panicked { payload: Box<dyn Any + Send>, first: Option<Error> },
}

/// The builder that is handed to the backend: runs the program, keeps its error or panic, returns a marker.
pub(crate) struct Graph<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) program: &'a PreparedProgram,
    /// With the build while it runs.
    pub(crate) storage: Option<Box<Storage>>,
    pub(crate) id: DispatchId,
    pub(crate) frame: usize,
    pub(crate) would_wait: bool,
    pub(crate) built: Built,
    pub(crate) opened: bool,
}

impl GraphBuilder for Graph<'_> {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
        // A graph is built once.
        if !matches!(self.built, Built::NotCalled) {
            return Err(BuildFailed);
        }
        let Some(mut storage) = self.storage.take() else { return Err(BuildFailed) };
        let args: Args = std::mem::take(&mut storage.args);
        let config = std::mem::take(&mut storage.config);
        let state = State {
            plan: Arc::clone(&storage.plan),
            storage: RefCell::new(storage),
            id: self.id,
            frame: self.frame,
            would_wait: self.would_wait,
            opened: Cell::new(false),
            tasks: Cell::new(false),
            sticky: RefCell::new(None),
            ordinary: RefCell::new(Vec::new()),
        };
        self.built = build_graph(self.inner, self.program, orchestrator, &config, &args, &state);
        self.opened = state.opened.get();
        let mut storage = state.storage.into_inner();
        storage.args = args;
        storage.config = config;
        self.storage = Some(storage);
        if matches!(self.built, Built::Complete) { Ok(()) } else { Err(BuildFailed) }
    }
}

fn build_graph<'b>(
    inner: &'b Inner,
    program: &'b PreparedProgram,
    orchestrator: &'b dyn Orchestrator,
    config: &'b CallConfig,
    args: &Args,
    state: &'b State,
) -> Built {
    let build = Build { inner, program, orchestrator, config, state, lifetime: PhantomData };
    let result = catch_unwind(AssertUnwindSafe(|| program.program.build(&build, args)));
    let first = state.sticky.borrow().clone();
    match result {
        Err(payload) => Built::Panicked { payload, first },
        Ok(Err(error)) => match error.downcast::<Error>() {
            Ok(error) => Built::Failed { error: *error, first, returned: true },
            Err(error) => {
                let error = Error::Program { program: Arc::clone(&program.name), source: Arc::from(error) };
                Built::Failed { error, first, returned: true }
            }
        },
        Ok(Ok(())) => match build.open().and_then(|()| build.check_poison()) {
            Ok(()) => Built::Complete,
            Err(error) => Built::Failed { error, first: None, returned: false },
        },
    }
}
