//! The Simpler binding as a backend under test (feature `simpler`): over the real runtime in simulation, or over the
//! project's own Python stand-in for it.
//!
//! | variable | meaning |
//! |---|---|
//! | `PTO_BACKEND` | `simpler` or `standin`; suites for the binding alone take `standin` by default |
//! | `PTO_PLATFORM` | `a2a3sim` (default), `a5sim`, or a platform with chips |
//! | `PTO_RETENTION` | `legacy`, or public (default) |
//! | `PTO_PYTHON_PRELUDE` | `module:function`, run before the runtime is probed |
//! | `PTO_PYTHON_PATH` | more directories for modules |
//! | `PTO_KERNELS` | directory of kernels compiled already, by `tests/kernels/build.py` |
//!
//! The kernels are this project's own (`tests/kernels`); for the real runtime they are compiled once per platform,
//! with Simpler's own driver, by the interpreter of the active virtual environment.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use pto_mock::conformance::{self, BackendFactory, BackendSpec, CreateError, TestPath};
use pto_mock::kernels;
use pto_simpler_sys::python::{SimplerBackend, SimplerOptions};
use pto_simpler_sys::{Access, Backend, CallableSource, ChipArtefact, KernelArtefact, Signature};

/// What is behind the binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// The installed Simpler.
    Simpler,
    /// The stand-in of this repository.
    StandIn,
}

impl Runtime {
    /// The one that the environment names.
    #[must_use]
    pub fn selected() -> Self {
        match env::var("PTO_BACKEND").as_deref() {
            Ok("simpler") => Self::Simpler,
            Ok("standin" | "") | Err(_) => Self::StandIn,
            Ok(other) => panic!("PTO_BACKEND={other}: this suite runs on simpler or standin"),
        }
    }
}

/// Chip callables of this project beyond the portable library: name and signature.
#[must_use]
pub fn extra_callables() -> Vec<(&'static str, Signature)> {
    vec![
        ("allreduce", Signature::new([Access::Input, Access::Output], 3)),
        ("allreduce_from", Signature::new([Access::Input, Access::Output], 4)),
        ("crash", Signature::new([Access::Output], 0)),
    ]
}

/// Runs the body of a test in a process of its own ([`conformance::alone`]) and looks for shared memory that it leaves.
///
/// # Panics
///
/// Where the body does, or leaves something.
pub fn alone(path: TestPath, body: impl FnOnce()) {
    conformance::alone(path, || {
        let before = shared_memory();
        body();
        let left: Vec<String> = shared_memory().into_keys().filter(|name| !before.contains_key(name)).collect();
        assert!(left.is_empty(), "left in shared memory: {left:?}");
    });
}

fn here() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Options for a runtime: devices `0..chips`, the portable kernels and [`extra_callables`] by name.
#[must_use]
pub fn options(runtime: Runtime, chips: u32, sub_workers: u32) -> SimplerOptions {
    let mut options = SimplerOptions::from_environment(0..chips);
    options.num_sub_workers = sub_workers;
    options.python_path.push(here().join("kernels"));
    if runtime == Runtime::StandIn {
        options.python_path.insert(0, here().join("standin"));
        // Assembles the chip programs of generated programs.
        options.python_path.push(here().join("generated").join("packages"));
        // An installed Simpler would come first, whatever the search path says.
        options.environment = None;
        options.sys_executable = option_env!("PTO_BASE_PYTHON").map(PathBuf::from);
        if options.prelude.is_none() {
            options.prelude = Some("simpler.standin:public".to_owned());
        }
    }
    let artefacts = match runtime {
        Runtime::Simpler => compiled(&options.platform),
        Runtime::StandIn => described(),
    };
    for (name, signature) in chip_callables() {
        let artefact = match runtime {
            Runtime::Simpler => ChipArtefact {
                orchestration: artefacts.join("orchestration.so"),
                function: name.into(),
                config_function: Some(format!("{name}_config").into()),
                kernels: kernel(&artefacts, name, &signature).into_iter().collect(),
            },
            Runtime::StandIn => ChipArtefact {
                orchestration: artefacts.join(format!("{name}.standin.json")),
                function: name.into(),
                config_function: None,
                kernels: Vec::new(),
            },
        };
        options.callables.insert(name.into(), CallableSource::Artefact(artefact));
    }
    for name in kernels::SUB {
        let source = CallableSource::Import { module: "pto_subs".into(), attribute: name.into() };
        options.callables.insert(name.into(), source);
    }
    let entry = CallableSource::Directory(here().join("kernels").join(kernels::ENTRY));
    options.callables.insert(kernels::ENTRY.into(), entry);
    options
}

fn chip_callables() -> Vec<(&'static str, Signature)> {
    let portable = kernels::CHIP.map(|name| (name, kernels::signature(name)));
    portable.into_iter().chain(extra_callables()).collect()
}

fn kernel(directory: &Path, name: &str, signature: &Signature) -> Option<KernelArtefact> {
    let binary = directory.join(format!("{name}.kernel"));
    let core = "aiv".into();
    binary.exists().then(|| KernelArtefact { function_id: 0, binary, core, signature: signature.tensors.clone() })
}

/// Where this build keeps what its tests make.
fn cache() -> PathBuf {
    let binary = env::current_exe().unwrap();
    // A binary that was moved elsewhere shares the system's directory.
    let target = binary.ancestors().find(|p| p.join("deps").is_dir()).map_or_else(env::temp_dir, PathBuf::from);
    target.join("pto-kernels")
}

/// The kernels for one platform, compiled if they are not yet. Made in a directory of its own and then renamed, so
/// that concurrent tests never see half of it.
fn compiled(platform: &str) -> PathBuf {
    if let Some(directory) = env::var_os("PTO_KERNELS") {
        return PathBuf::from(directory);
    }
    let sources = here().join("kernels");
    let mut hash = DefaultHasher::new();
    let mut files: Vec<PathBuf> = fs::read_dir(&sources).unwrap().map(|f| f.unwrap().path()).collect();
    files.sort();
    for file in files.iter().filter(|f| f.is_file()) {
        fs::read(file).unwrap().hash(&mut hash);
    }
    let interpreter = interpreter();
    interpreter.hash(&mut hash);
    let done = cache().join(format!("{platform}-{:016x}", hash.finish()));
    if !done.exists() {
        fs::create_dir_all(cache()).unwrap();
        let made = tempfile::tempdir_in(cache()).unwrap();
        let status =
            Command::new(&interpreter).arg(sources.join("build.py")).arg(platform).arg(made.path()).status();
        assert!(
            status.as_ref().is_ok_and(|s| s.success()),
            "the kernels do not compile ({interpreter:?}: {status:?}): they are compiled with the Python of the active \
             virtual environment, so activate the one that has Simpler, or set PTO_KERNELS"
        );
        // Another test may have been faster.
        let _ = fs::rename(made.path(), &done);
        assert!(done.exists());
    }
    done
}

/// The interpreter that has Simpler installed.
fn interpreter() -> PathBuf {
    env::var_os("VIRTUAL_ENV")
        .map_or_else(|| "python3".into(), |root| PathBuf::from(root).join("bin").join("python3"))
}

/// Descriptors by which the stand-in knows its kernels.
fn described() -> PathBuf {
    let directory = cache().join("standin");
    fs::create_dir_all(&directory).unwrap();
    for (name, signature) in chip_callables() {
        let tensors: Vec<&str> = signature
            .tensors
            .iter()
            .map(|access| match access {
                Access::Input => "\"IN\"",
                Access::Output | Access::OutputExisting => "\"OUT\"",
                Access::InOut | Access::NoDependency => "\"INOUT\"",
            })
            .collect();
        let text = format!(
            "{{\"kernel\": \"{name}\", \"scalars\": {}, \"simpler_standin\": 1, \"tensors\": [{}]}}",
            signature.scalars,
            tensors.join(", ")
        );
        let path = directory.join(format!("{name}.standin.json"));
        if fs::read_to_string(&path).ok().as_deref() != Some(&*text) {
            let made = tempfile::NamedTempFile::new_in(&directory).unwrap();
            fs::write(made.path(), text).unwrap();
            made.persist(&path).unwrap();
        }
    }
    directory
}

/// Makes backends over a runtime.
#[derive(Clone, Copy, Debug)]
pub struct SimplerFactory(pub Runtime);

impl BackendFactory for SimplerFactory {
    fn name(&self) -> String {
        match self.0 {
            Runtime::Simpler => "simpler".to_owned(),
            Runtime::StandIn => "standin".to_owned(),
        }
    }

    fn create(&self, spec: &BackendSpec) -> Result<Arc<dyn Backend>, CreateError> {
        let options = options(self.0, spec.chips, spec.sub_workers);
        Ok(Arc::new(SimplerBackend::new(options).map_err(CreateError::failed)?))
    }

    fn process_backed(&self) -> bool {
        true
    }

    fn shared_memory(&self) -> Option<Vec<String>> {
        Some(shared_memory().into_keys().collect())
    }
}

/// Shared memory of the kinds that the runtime links, less what a process of somebody else has mapped: mailboxes, host
/// buffers, and the windows of this process.
#[must_use]
pub fn shared_memory() -> BTreeMap<String, u64> {
    let windows = format!("simpler_{:08x}_", std::process::id());
    let ours = |name: &str| name.starts_with("sp-") || name.starts_with("psm_") || name.starts_with(&windows);
    let Ok(entries) = fs::read_dir("/dev/shm") else { return BTreeMap::new() };
    let mut names: BTreeMap<String, u64> = entries
        .flatten()
        .filter_map(|e| Some((e.file_name().into_string().ok()?, e.metadata().map_or(0, |m| m.len()))))
        .filter(|(name, _)| ours(name))
        .collect();
    names.retain(|name, _| !mapped_by_a_stranger(name) && Path::new("/dev/shm").join(name).exists());
    names
}

/// Whether a process that is neither this one nor a child of it has the memory mapped.
fn mapped_by_a_stranger(name: &str) -> bool {
    let Ok(processes) = fs::read_dir("/proc") else { return false };
    let pids = processes.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let here = std::process::id();
    pids.filter(|pid| *pid != here && parent(*pid) != Some(here))
        .filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/maps")).ok())
        .any(|maps| maps.lines().any(|line| line.ends_with(name)))
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}
