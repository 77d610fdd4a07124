//! The negative control: a backend that copies too early.

use std::sync::Arc;

use pto_simpler_sys::{
    AbandonReport, Backend, BackendError, CallConfig, CallableSpec, Capabilities, ChipId, CopyTo, DeviceBufferId,
    DevicePlace, DomainId, DomainState, GraphBuilder, HostBufferId, Negotiated, Registered, RunEvents, RunId,
    RunState, SubmitError,
};

use crate::builder::EmulatorBuilder;
use crate::emulator::Emulator;

/// An emulator whose control calls do not wait for the head of the device queue: the reset copies of a run happen
/// when they are asked for, while the previous run may still use the windows. A test of "never wipe under a running
/// dispatch" must fail on it.
///
/// It cannot wrap any backend: a backend that keeps the control rule offers no way around it, since direct copies
/// are refused while runs are in flight. So it is made from the options of an emulator.
#[derive(Clone, Debug)]
pub struct EarlyCopyBackend {
    emulator: Arc<Emulator>,
}

impl EarlyCopyBackend {
    /// Builds the emulator with its control rule switched off.
    ///
    /// # Errors
    ///
    /// As [`EmulatorBuilder::build`].
    pub fn new(options: EmulatorBuilder) -> Result<Self, BackendError> {
        Ok(Self { emulator: options.early_control(true).build()? })
    }

    /// The emulator inside, for its journal and memory.
    #[must_use]
    pub fn emulator(&self) -> &Arc<Emulator> {
        &self.emulator
    }
}

#[deny(clippy::missing_trait_methods)]
impl Backend for EarlyCopyBackend {
    fn capabilities(&self) -> &Capabilities {
        self.emulator.capabilities()
    }

    fn check_blocking(&self) -> Result<(), BackendError> {
        self.emulator.check_blocking()
    }

    fn register(&self, callable: &CallableSpec) -> Result<Registered, BackendError> {
        self.emulator.register(callable)
    }

    fn start(&self, events: Arc<dyn RunEvents>) -> Result<Negotiated, BackendError> {
        self.emulator.start(events)
    }

    fn submit(&self, run: RunId, config: &CallConfig, graph: &mut dyn GraphBuilder) -> Result<(), SubmitError> {
        self.emulator.submit(run, config, graph)
    }

    fn run_state(&self, run: RunId) -> RunState {
        self.emulator.run_state(run)
    }

    fn create_buffer(&self, nbytes: u64) -> Result<HostBufferId, BackendError> {
        self.emulator.create_buffer(nbytes)
    }

    fn create_zeros(&self, nbytes: u64) -> Result<HostBufferId, BackendError> {
        self.emulator.create_zeros(nbytes)
    }

    fn write_buffer(&self, buffer: HostBufferId, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        self.emulator.write_buffer(buffer, offset, bytes)
    }

    fn read_buffer(&self, buffer: HostBufferId, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.emulator.read_buffer(buffer, offset, bytes)
    }

    fn fill_buffer(&self, buffer: HostBufferId, byte: u8) -> Result<(), BackendError> {
        self.emulator.fill_buffer(buffer, byte)
    }

    fn release_buffer(&self, buffer: HostBufferId) -> Result<(), BackendError> {
        self.emulator.release_buffer(buffer)
    }

    fn alloc(&self, chip: ChipId, nbytes: u64) -> Result<DeviceBufferId, BackendError> {
        self.emulator.alloc(chip, nbytes)
    }

    fn free(&self, buffer: DeviceBufferId) -> Result<(), BackendError> {
        self.emulator.free(buffer)
    }

    fn copy_to(&self, copy: &CopyTo) -> Result<(), BackendError> {
        self.emulator.copy_to(copy)
    }

    fn copy_from(&self, dst: HostBufferId, src: DevicePlace, nbytes: u64) -> Result<(), BackendError> {
        self.emulator.copy_from(dst, src, nbytes)
    }

    fn release_domain(&self, domain: DomainId) -> Result<(), BackendError> {
        self.emulator.release_domain(domain)
    }

    fn domain_state(&self, domain: DomainId) -> Result<DomainState, BackendError> {
        self.emulator.domain_state(domain)
    }

    fn committed_device_memory(&self, chip: ChipId) -> Result<u64, BackendError> {
        self.emulator.committed_device_memory(chip)
    }

    fn close(&self) -> Result<(), BackendError> {
        self.emulator.close()
    }

    fn abandon(&self) -> AbandonReport {
        self.emulator.abandon()
    }
}
