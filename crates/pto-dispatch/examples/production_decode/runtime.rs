//! What executes the programs.

use std::fmt;
use std::sync::Arc;

use pto_dispatch::sys::{Backend, BackendError};

use crate::driver::{Setup, emulator};
use crate::options::{Arguments, BackendName};
use crate::simpler::{Simpler, SimplerError};
use crate::workload::plan::ProgramPlan;

/// What is behind the backend.
#[derive(Debug)]
pub(crate) enum Runtime {
    /// The emulator.
    Emulator,
    /// The Simpler binding.
    Simpler(Box<Simpler>),
}

impl Runtime {
    /// The one that the command line names.
    ///
    /// # Errors
    ///
    /// [`SimplerError`].
    pub(crate) fn new(arguments: &Arguments) -> Result<Self, SimplerError> {
        Ok(match arguments.backend {
            BackendName::Emulator => Self::Emulator,
            BackendName::Simpler => Self::Simpler(Box::new(Simpler::installed(arguments.kernels.as_deref())?)),
            BackendName::Standin => Self::Simpler(Box::new(Simpler::stand_in()?)),
        })
    }

    /// A new backend.
    ///
    /// # Errors
    ///
    /// What it finds missing.
    pub(crate) fn backend(
        &self,
        plans: &[Arc<ProgramPlan>],
        setup: &Setup,
    ) -> Result<Arc<dyn Backend>, BackendError> {
        match self {
            Self::Emulator => emulator(plans, setup),
            Self::Simpler(simpler) => simpler.backend(setup.chips),
        }
    }

    /// What its times do not tell.
    pub(crate) const fn caution(&self) -> &'static str {
        match self {
            Self::Emulator => "an emulated allocation is a memory mapping, not a collective",
            Self::Simpler(_) => "a simulated chip is a process, its memory the host's",
        }
    }
}

impl fmt::Display for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Emulator => f.write_str("the emulator"),
            Self::Simpler(simpler) => write!(f, "{simpler}"),
        }
    }
}
