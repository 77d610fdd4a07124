//! Callables: what a task runs. Registered before the backend starts.

use std::any::Any;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::args::Access;

/// The arguments that a callable takes. Runtimes do not check them (too few arguments crash a chip process), so
/// pto does, before submission.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Signature {
    /// Tensors, in order, with the access that the callable declares.
    pub tensors: Vec<Access>,
    /// Number of scalars.
    pub scalars: u32,
}

impl Signature {
    /// A signature.
    #[must_use]
    pub fn new(tensors: impl Into<Vec<Access>>, scalars: u32) -> Self {
        Self { tensors: tensors.into(), scalars }
    }
}

/// Where a callable runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallableKind {
    /// On a chip worker, through `submit_next_level`.
    Chip,
    /// In a host-side sub-worker process, through `submit_sub`.
    Sub,
    /// On the submitting thread, as the whole graph builder of a generated program, through `run_entry`.
    Entry,
}

/// One compiled kernel of a chip callable.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelArtefact {
    /// The function id that the orchestration uses.
    pub function_id: u32,
    /// The compiled binary.
    pub binary: PathBuf,
    /// `aic` or `aiv`.
    pub core: Arc<str>,
    /// Access of its tensors, in order.
    pub signature: Vec<Access>,
}

/// A chip callable compiled to files.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ChipArtefact {
    /// The compiled orchestration.
    pub orchestration: PathBuf,
    /// The orchestration's exported function.
    pub function: Arc<str>,
    /// The orchestration's exported configuration function; `None` for the runtime's default name.
    pub config_function: Option<Arc<str>>,
    /// The kernels it launches.
    pub kernels: Vec<KernelArtefact>,
}

/// Where the code of a callable comes from.
#[derive(Clone)]
#[non_exhaustive]
pub enum CallableSource {
    /// The backend knows a callable by this callable's name (the emulator's kernel library; a binding's options).
    Named,
    /// Compiled files.
    Artefact(ChipArtefact),
    /// A Python function by import path.
    Import {
        /// Dotted module name.
        module: Arc<str>,
        /// Attribute of the module.
        attribute: Arc<str>,
    },
    /// A directory that a program generator wrote; for host entries.
    Directory(PathBuf),
    /// An object that only the backend understands: an emulator closure, an already built runtime object.
    Object(Arc<dyn Any + Send + Sync>),
}

impl fmt::Debug for CallableSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named => f.write_str("Named"),
            Self::Artefact(artefact) => f.debug_tuple("Artefact").field(artefact).finish(),
            Self::Import { module, attribute } => write!(f, "Import({module}:{attribute})"),
            Self::Directory(path) => f.debug_tuple("Directory").field(path).finish(),
            Self::Object(_) => f.write_str("Object(..)"),
        }
    }
}

/// What is registered: a name, a kind, a signature and where the code is.
#[derive(Clone, Debug)]
pub struct CallableSpec {
    /// A name for messages, and the key of [`CallableSource::Named`].
    pub name: Arc<str>,
    /// Where it runs.
    pub kind: CallableKind,
    /// What it takes; `None` where only the runtime knows (host entries).
    pub signature: Option<Signature>,
    /// Where its code is.
    pub source: CallableSource,
}

impl CallableSpec {
    /// A chip callable that the backend knows by name.
    #[must_use]
    pub fn chip(name: impl Into<Arc<str>>, signature: Signature) -> Self {
        Self {
            name: name.into(),
            kind: CallableKind::Chip,
            signature: Some(signature),
            source: CallableSource::Named,
        }
    }

    /// A sub-worker callable that the backend knows by name.
    #[must_use]
    pub fn sub(name: impl Into<Arc<str>>, signature: Signature) -> Self {
        Self {
            name: name.into(),
            kind: CallableKind::Sub,
            signature: Some(signature),
            source: CallableSource::Named,
        }
    }

    /// The same callable with its code from elsewhere.
    #[must_use]
    pub fn with_source(mut self, source: CallableSource) -> Self {
        self.source = source;
        self
    }
}

/// What a backend found out about a callable when it was registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registered {
    /// Its id.
    pub id: crate::ids::CallableId,
    /// The signature that submissions are checked against.
    pub signature: Option<Signature>,
    /// For host entries: whether the entry takes its domains from a provider, which persistent execution needs.
    pub takes_domains: bool,
}
