//! The same programs on Simpler (feature `simpler`): the binding, told where the two kernels are as compiled files.

#[cfg(feature = "simpler")]
pub(crate) use bound::Simpler;
#[cfg(not(feature = "simpler"))]
pub(crate) use unbound::Simpler;

/// Why Simpler cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SimplerError {
    /// The binding was not built.
    #[cfg(not(feature = "simpler"))]
    #[error(
        "this build has no Simpler binding; it takes a CPython with its shared library: cargo run --release -p \
         pto-dispatch --features simpler --example production_decode -- --backend simpler"
    )]
    NotBuilt,
    /// The kernels do not compile, or there is no Simpler to compile them with.
    #[cfg(feature = "simpler")]
    #[error(
        "{command} failed ({status}): activate the virtual environment that has Simpler, or compile the kernels \
         yourself and name the directory with --kernels"
    )]
    Kernels {
        /// What was run.
        command: String,
        /// How it ended.
        status: String,
    },
    /// No room or no permission for the kernels.
    #[cfg(feature = "simpler")]
    #[error("a directory for the kernels cannot be made: {0}")]
    Directory(#[from] std::io::Error),
}

impl SimplerError {
    /// Whether the command line, not the machine, has to change.
    pub(crate) const fn is_usage(&self) -> bool {
        #[cfg(not(feature = "simpler"))]
        return matches!(self, Self::NotBuilt);
        #[cfg(feature = "simpler")]
        return false;
    }
}

#[cfg(not(feature = "simpler"))]
mod unbound {
    use std::convert::Infallible;
    use std::fmt;
    use std::path::Path;
    use std::sync::Arc;

    use pto_dispatch::sys::{Backend, BackendError};

    use super::SimplerError;

    /// Cannot exist in this build.
    #[derive(Debug)]
    pub(crate) struct Simpler(Infallible);

    impl Simpler {
        pub(crate) const fn installed(_: Option<&Path>) -> Result<Self, SimplerError> {
            Err(SimplerError::NotBuilt)
        }

        pub(crate) const fn stand_in() -> Result<Self, SimplerError> {
            Err(SimplerError::NotBuilt)
        }

        pub(crate) const fn backend(&self, _: u32) -> Result<Arc<dyn Backend>, BackendError> {
            match self.0 {}
        }
    }

    impl fmt::Display for Simpler {
        fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
            match self.0 {}
        }
    }
}

#[cfg(feature = "simpler")]
mod bound {
    use std::fmt;
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use std::sync::Arc;

    use pto_dispatch::sys::python::{SimplerBackend, SimplerOptions};
    use pto_dispatch::sys::{
        Access, Backend, BackendError, CallableSource, ChipArtefact, KernelArtefact, Signature,
    };
    use tempfile::TempDir;

    use super::SimplerError;
    use crate::workload::kernel;

    /// The binding with the kernels of this example.
    #[derive(Debug)]
    pub(crate) struct Simpler {
        options: SimplerOptions,
        runtime: &'static str,
        /// Where the kernels are, if only for this process.
        _kernels: Option<TempDir>,
    }

    impl Simpler {
        /// The Simpler that is installed. Compiles the kernels, unless they are there already.
        ///
        /// # Errors
        ///
        /// [`SimplerError`].
        pub(crate) fn installed(kernels: Option<&Path>) -> Result<Self, SimplerError> {
            let mut options = SimplerOptions::from_environment([]);
            let made = if kernels.is_some() { None } else { Some(compile(&options)?) };
            let directory = kernels.or(made.as_ref().map(TempDir::path)).unwrap_or(Path::new("."));
            for (name, signature) in callables() {
                let kernel = KernelArtefact {
                    function_id: 0,
                    binary: directory.join(format!("{name}.kernel")),
                    core: "aiv".into(),
                    signature: signature.tensors.clone(),
                };
                let artefact = ChipArtefact {
                    orchestration: directory.join("orchestration.so"),
                    function: name.into(),
                    config_function: Some(format!("{name}_config").into()),
                    kernels: vec![kernel],
                };
                options.callables.insert(name.into(), CallableSource::Artefact(artefact));
            }
            Ok(Self { options, runtime: "Simpler", _kernels: made })
        }

        /// The stand-in of this project, which knows the kernels by name.
        ///
        /// # Errors
        ///
        /// [`SimplerError::Directory`].
        pub(crate) fn stand_in() -> Result<Self, SimplerError> {
            let mut options = SimplerOptions::from_environment([]);
            options.python_path.insert(0, tests().join("standin"));
            // An installed Simpler would come first, whatever the search path says.
            options.environment = None;
            options.sys_executable = option_env!("PTO_BASE_PYTHON").map(PathBuf::from);
            options.prelude.get_or_insert_with(|| "simpler.standin:public".to_owned());
            let made = TempDir::new()?;
            for (name, signature) in callables() {
                let tensors: Vec<_> = signature.tensors.iter().copied().map(word).collect();
                let text = format!(
                    "{{\"kernel\": \"{name}\", \"scalars\": {}, \"simpler_standin\": 1, \"tensors\": {tensors:?}}}",
                    signature.scalars
                );
                let orchestration = made.path().join(format!("{name}.standin.json"));
                fs::write(&orchestration, text)?;
                let artefact = ChipArtefact {
                    orchestration,
                    function: name.into(),
                    config_function: None,
                    kernels: Vec::new(),
                };
                options.callables.insert(name.into(), CallableSource::Artefact(artefact));
            }
            Ok(Self { options, runtime: "the stand-in for Simpler", _kernels: Some(made) })
        }

        /// A backend over devices `0..chips`.
        ///
        /// # Errors
        ///
        /// What the binding finds missing.
        pub(crate) fn backend(&self, chips: u32) -> Result<Arc<dyn Backend>, BackendError> {
            let mut options = self.options.clone();
            options.device_ids = (0..chips).collect();
            Ok(Arc::new(SimplerBackend::new(options)?))
        }
    }

    impl fmt::Display for Simpler {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "{} ({})", self.runtime, self.options.platform)
        }
    }

    fn callables() -> [(&'static str, Signature); 2] {
        [(kernel::EXCHANGE, kernel::exchange_signature()), (kernel::PHASE, kernel::phase_signature())]
    }

    const fn word(access: Access) -> &'static str {
        match access {
            Access::Input => "IN",
            Access::Output | Access::OutputExisting => "OUT",
            Access::InOut | Access::NoDependency => "INOUT",
        }
    }

    /// The suites' directory, which has the kernels' sources and the stand-in.
    fn tests() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests")
    }

    /// Compiles the kernels with Simpler's own driver.
    fn compile(options: &SimplerOptions) -> Result<TempDir, SimplerError> {
        let made = TempDir::new()?;
        let interpreter =
            options.environment.as_ref().map_or_else(|| "python3".into(), |root| root.join("bin").join("python3"));
        let mut command = Command::new(interpreter);
        command.arg(tests().join("kernels").join("build.py")).arg(&*options.platform).arg(made.path());
        command.args([kernel::EXCHANGE, kernel::PHASE]);
        let status = match command.status() {
            Ok(status) if status.success() => return Ok(made),
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        Err(SimplerError::Kernels { command: format!("{command:?}"), status })
    }
}
