//! Callables: from a specification to something that the runtime can register.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use pyo3::prelude::*;

use super::entry::Entry;
use super::result;
use super::shared::Shared;
use crate::callable::{CallableKind, CallableSource, CallableSpec, ChipArtefact, Signature};
use crate::error::{BackendError, Call, RuntimeFailure};

/// A Python object that can be registered as a callable: a `ChipCallable` or a Python function. Wrap it in
/// [`CallableSource::Object`](crate::CallableSource::Object).
#[derive(Debug)]
pub struct PythonObject(pub Py<PyAny>);

impl PythonObject {
    /// The object as the source of a callable.
    #[must_use]
    pub fn into_source(self) -> CallableSource {
        CallableSource::Object(Arc::new(self))
    }
}

/// A registered callable.
#[derive(Debug)]
pub(crate) struct Callable {
    pub(crate) name: Arc<str>,
    pub(crate) kind: CallableKind,
    pub(crate) signature: Option<Signature>,
    /// What the worker registers: the object, for a chip or sub callable.
    pub(crate) target: Option<Py<PyAny>>,
    /// The loaded program, for a host entry.
    pub(crate) entry: Option<Entry>,
}

impl Callable {
    /// How many of the runtime's callables it takes.
    pub(crate) fn count(&self) -> usize {
        self.entry.as_ref().map_or(1, Entry::callables)
    }
}

/// Loads the code of a callable. Attached.
pub(crate) fn load(py: Python<'_>, shared: &Shared, spec: &CallableSpec) -> Result<Callable, BackendError> {
    let source = match &spec.source {
        CallableSource::Named => shared.options.callables.get(&spec.name).ok_or_else(|| {
            let known: Vec<&str> = shared.options.callables.keys().map(|k| &**k).collect();
            BackendError::misuse(
                Call::Register,
                format!("callable {:?} is not named in the options, which name {known:?}", spec.name),
            )
        })?,
        other => other,
    };
    let mut callable = Callable {
        name: Arc::clone(&spec.name),
        kind: spec.kind,
        signature: spec.signature.clone(),
        target: None,
        entry: None,
    };
    match (spec.kind, source) {
        (CallableKind::Entry, CallableSource::Directory(directory)) => {
            callable.entry = Some(Entry::load(py, shared, &spec.name, directory)?);
        }
        (CallableKind::Chip, CallableSource::Artefact(artefact)) => {
            callable.target = Some(artefact_object(py, shared, spec, artefact)?);
        }
        (CallableKind::Chip | CallableKind::Sub, source) => callable.target = Some(object(py, &spec.name, source)?),
        (kind, source) => return Err(unfit(&spec.name, &format!("{kind:?}"), source)),
    }
    Ok(callable)
}

/// The Python object behind an import path or an object.
pub(crate) fn object(py: Python<'_>, name: &str, source: &CallableSource) -> Result<Py<PyAny>, BackendError> {
    match source {
        CallableSource::Import { module, attribute } => py
            .import(&**module)
            .and_then(|m| m.getattr(&**attribute))
            .map(Bound::unbind)
            .map_err(|e| result::import(py, Call::Register, module, &e)),
        CallableSource::Object(object) => object
            .downcast_ref::<PythonObject>()
            .map(|object| object.0.clone_ref(py))
            .ok_or_else(|| unfit(name, "Python", source)),
        other => Err(unfit(name, "Python", other)),
    }
}

fn unfit(name: &str, kind: &str, source: &CallableSource) -> BackendError {
    BackendError::misuse(
        Call::Register,
        format!(
            "callable {name:?} of kind {kind} cannot come from {source:?}; give compiled files or a Python object"
        ),
    )
}

fn artefact_object(
    py: Python<'_>,
    shared: &Shared,
    spec: &CallableSpec,
    artefact: &ChipArtefact,
) -> Result<Py<PyAny>, BackendError> {
    let orchestration = read(&artefact.orchestration)?;
    let mut kernels = Vec::with_capacity(artefact.kernels.len());
    for kernel in &artefact.kernels {
        kernels.push((kernel.function_id, kernel.signature.clone(), read(&kernel.binary)?));
    }
    let tensors = spec.signature.as_ref().map(|s| s.tensors.as_slice()).ok_or_else(|| {
        BackendError::misuse(
            Call::Register,
            format!("callable {:?} needs a signature, because compiled files do not tell it", spec.name),
        )
    })?;
    shared
        .api
        .chip_callable(
            py,
            tensors,
            &artefact.function,
            artefact.config_function.as_deref(),
            &orchestration,
            &kernels,
        )
        .map(Bound::unbind)
        .map_err(|e| result::failure(py, Call::Register, &e).into())
}

fn read(path: &Path) -> Result<Vec<u8>, BackendError> {
    let failed = |what: String| {
        BackendError::from(RuntimeFailure::new(
            Call::Register,
            "OSError",
            format!("cannot read {}: {what}", path.display()),
        ))
    };
    match fs::read(path) {
        Ok(bytes) if bytes.is_empty() => Err(failed("the file is empty".to_owned())),
        Ok(bytes) => Ok(bytes),
        Err(e) => Err(failed(e.to_string())),
    }
}
