//! Mocks of the HAL traits, for tests of exact call order on a few calls.
//!
//! The traits take their callbacks as named traits ([`GraphBuilder`], [`EntryHost`], [`RunEvents`]), so plain mocks
//! can be made of them. What a mock must still do by hand is to *call* the graph builder inside `submit`; the trait
//! [`ScriptSubmit`] sets that up:
//!
//! ```
//! use pto_mock::mocks::{MockBackend, MockOrchestrator, ScriptSubmit};
//! use pto_simpler_sys::{Backend, BuildFailed, CallConfig, GraphBuilder, Orchestrator, RunId};
//!
//! struct AskRun(Option<RunId>);
//! impl GraphBuilder for AskRun {
//!     fn build(&mut self, o: &dyn Orchestrator) -> Result<(), BuildFailed> {
//!         self.0 = Some(o.run());
//!         Ok(())
//!     }
//! }
//!
//! let mut backend = MockBackend::new();
//! backend.script_submit(RunId(1), |run| {
//!     let mut orchestrator = MockOrchestrator::new();
//!     orchestrator.expect_run().times(1).return_const(run);
//!     orchestrator
//! });
//! let mut graph = AskRun(None);
//! backend.submit(RunId(1), &CallConfig::default(), &mut graph).unwrap();
//! assert_eq!(graph.0, Some(RunId(1)));
//! ```
//!
//! Use the [`Emulator`](crate::Emulator) wherever effects matter: a mock knows only what it was told.
#![allow(missing_docs, reason = "what mockall generates; its methods are named after those of the traits")]
#![allow(clippy::missing_errors_doc, clippy::ref_option_ref, reason = "what mockall generates")]

use std::sync::Arc;

use mockall::mock;
use pto_simpler_sys::{
    AbandonReport, Backend, BackendError, BackendPhase, BuildFailed, CallConfig, CallableId, CallableSpec,
    CallbackError, Capabilities, ChipId, CopyResult, CopyTo, DeviceBufferId, DevicePlace, DomainAllocation,
    DomainId, DomainRequest, DomainState, EntryCall, EntryHost, GraphBuilder, HostBufferId, Negotiated,
    Orchestrator, Registered, RunEvents, RunId, RunOutcome, RunState, ScratchId, SubmitError, TaskArgs,
};

mock! {
    /// A mock of [`Backend`].
    #[derive(Debug)]
    pub Backend {}

    impl Backend for Backend {
        fn capabilities(&self) -> &Capabilities;
        fn phase(&self) -> BackendPhase;
        fn check_blocking(&self) -> Result<(), BackendError>;
        fn register(&self, callable: &CallableSpec) -> Result<Registered, BackendError>;
        fn start(&self, events: Arc<dyn RunEvents>) -> Result<Negotiated, BackendError>;
        fn submit(
            &self,
            run: RunId,
            config: &CallConfig,
            graph: &mut dyn GraphBuilder,
        ) -> Result<(), SubmitError>;
        fn run_state(&self, run: RunId) -> RunState;
        fn create_buffer(&self, nbytes: u64) -> Result<HostBufferId, BackendError>;
        fn create_zeros(&self, nbytes: u64) -> Result<HostBufferId, BackendError>;
        fn write_buffer(&self, buffer: HostBufferId, offset: u64, bytes: &[u8]) -> Result<(), BackendError>;
        fn read_buffer(&self, buffer: HostBufferId, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError>;
        fn fill_buffer(&self, buffer: HostBufferId, byte: u8) -> Result<(), BackendError>;
        fn release_buffer(&self, buffer: HostBufferId) -> Result<(), BackendError>;
        fn alloc(&self, chip: ChipId, nbytes: u64) -> Result<DeviceBufferId, BackendError>;
        fn free(&self, buffer: DeviceBufferId) -> Result<(), BackendError>;
        fn copy_to(&self, copy: &CopyTo) -> Result<(), BackendError>;
        fn copy_from(&self, dst: HostBufferId, src: DevicePlace, nbytes: u64) -> Result<(), BackendError>;
        fn release_domain(&self, domain: DomainId) -> Result<(), BackendError>;
        fn domain_state(&self, domain: DomainId) -> Result<DomainState, BackendError>;
        fn committed_device_memory(&self, chip: ChipId) -> Result<u64, BackendError>;
        fn close(&self) -> Result<(), BackendError>;
        fn abandon(&self) -> AbandonReport;
    }
}

mock! {
    /// A mock of [`Orchestrator`].
    #[derive(Debug)]
    pub Orchestrator {}

    impl Orchestrator for Orchestrator {
        fn run(&self) -> RunId;
        fn allocate_domain(
            &self,
            name: &str,
            request: &DomainRequest,
            reply: &mut DomainAllocation,
        ) -> Result<(), BackendError>;
        fn get_or_allocate_domain(
            &self,
            name: &str,
            request: &DomainRequest,
            retain_after_run: bool,
            reply: &mut DomainAllocation,
        ) -> Result<(), BackendError>;
        fn copy_to(&self, copy: &CopyTo) -> Result<(), BackendError>;
        fn copy_from(&self, dst: HostBufferId, src: DevicePlace, nbytes: u64) -> Result<(), BackendError>;
        fn copy_batch(&self, copies: &[CopyTo], results: &mut Vec<CopyResult>) -> Result<(), BackendError>;
        fn submit_next_level<'a>(
            &self,
            callable: CallableId,
            args: &TaskArgs,
            config: Option<&'a CallConfig>,
            worker: ChipId,
        ) -> Result<(), BackendError>;
        fn submit_next_level_group<'a>(
            &self,
            callable: CallableId,
            args: &[TaskArgs],
            config: Option<&'a CallConfig>,
            workers: &[ChipId],
        ) -> Result<(), BackendError>;
        fn submit_sub(&self, callable: CallableId, args: &TaskArgs) -> Result<(), BackendError>;
        fn scope(&self, body: &mut dyn FnMut() -> Result<(), BuildFailed>) -> Result<(), CallbackError>;
        fn alloc(&self, nbytes: u64) -> Result<ScratchId, BackendError>;
        fn run_entry<'a>(
            &self,
            entry: CallableId,
            call: &EntryCall<'a>,
            host: &dyn EntryHost,
        ) -> Result<(), CallbackError>;
    }
}

mock! {
    /// A mock of [`RunEvents`].
    #[derive(Debug)]
    pub RunEvents {}

    impl RunEvents for RunEvents {
        fn ended(&self, run: RunId, outcome: RunOutcome);
    }
}

/// Sets up `submit` of a [`MockBackend`] so that it calls the graph builder, as a backend must.
pub trait ScriptSubmit {
    /// Expects exactly one submission, of `run`, and builds its graph with the orchestrator that `orchestrator`
    /// makes. The orchestrator's expectations are checked when it is dropped, at the end of the build.
    fn script_submit(&mut self, run: RunId, orchestrator: impl Fn(RunId) -> MockOrchestrator + Send + 'static);
}

impl ScriptSubmit for MockBackend {
    fn script_submit(&mut self, run: RunId, orchestrator: impl Fn(RunId) -> MockOrchestrator + Send + 'static) {
        self.expect_submit().times(1).withf(move |submitted, _, _| *submitted == run).returning(
            move |run, _, graph| {
                let orchestrator = orchestrator(run);
                graph.build(&orchestrator).map_err(SubmitError::from)
            },
        );
    }
}
