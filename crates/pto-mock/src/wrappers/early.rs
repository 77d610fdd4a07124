//! The negative control: a backend that copies too early.

use std::sync::Arc;

use pto_simpler_sys::{Backend, BackendError};

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
    pto_simpler_sys::forward_backend!(
        emulator: capabilities, phase, check_blocking, register, start, submit, run_state, create_buffer, create_zeros, write_buffer, read_buffer, fill_buffer, release_buffer, alloc, free, copy_to, copy_from, release_domain, domain_state, committed_device_memory, close, abandon,
    );
}
