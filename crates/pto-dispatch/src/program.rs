//! Programs: what is prepared, and what a dispatch calls.

use std::fmt;
use std::sync::Arc;

use pto_simpler_sys::{CallConfig, CallableSpec, RunId};

use crate::buffer::{DeviceTensor, HostBuffer};
use crate::build::Build;
use crate::error::Error;

/// The number of a dispatch on its worker, counted from 1. The backend knows its run under the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DispatchId(pub(crate) u64);

impl DispatchId {
    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The dispatch's run, as the backend knows it.
    #[must_use]
    pub const fn run(self) -> RunId {
        RunId(self.0)
    }
}

impl fmt::Display for DispatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A prepared program, named by its worker and its position in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProgramId {
    pub(crate) worker: u64,
    pub(crate) index: usize,
}

impl ProgramId {
    /// The position in the list that the worker was prepared from.
    #[must_use]
    pub const fn index(self) -> usize {
        self.index
    }
}

/// What a program was compiled for. Programs without a target run on any backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Platform name, for example `a2a3sim`.
    pub platform: Arc<str>,
    /// Runtime name.
    pub runtime: Arc<str>,
    /// Device ids in order.
    pub device_ids: Vec<u32>,
}

/// What one parameter of a program takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParameterKind {
    /// A host buffer of exactly this many bytes, or of any size.
    Host {
        /// The size in bytes, if it is fixed.
        nbytes: Option<u64>,
    },
    /// A resident device tensor of exactly this many bytes, or of any size.
    Device {
        /// The size in bytes, if it is fixed.
        nbytes: Option<u64>,
    },
    /// A 64-bit scalar.
    Scalar,
}

/// A declared parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// A name for messages.
    pub name: Arc<str>,
    /// What it takes.
    pub kind: ParameterKind,
}

impl Parameter {
    /// A host buffer of exactly `nbytes` bytes.
    #[must_use]
    pub fn host(name: impl Into<Arc<str>>, nbytes: u64) -> Self {
        Self { name: name.into(), kind: ParameterKind::Host { nbytes: Some(nbytes) } }
    }

    /// A resident device tensor of exactly `nbytes` bytes.
    #[must_use]
    pub fn device(name: impl Into<Arc<str>>, nbytes: u64) -> Self {
        Self { name: name.into(), kind: ParameterKind::Device { nbytes: Some(nbytes) } }
    }

    /// A scalar.
    #[must_use]
    pub fn scalar(name: impl Into<Arc<str>>) -> Self {
        Self { name: name.into(), kind: ParameterKind::Scalar }
    }
}

/// What a program declares once, when it is made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProgramSpec {
    /// A name for messages. Keys of domains use the position in the list, so names need not differ.
    pub name: Arc<str>,
    /// What it was compiled for, if anything.
    pub target: Option<Target>,
    /// Callables, in the order in which [`Build::task`] numbers them.
    pub callables: Vec<CallableSpec>,
    /// Parameters, in order.
    pub parameters: Vec<Parameter>,
    /// Sizes in bytes of host intermediates, made once per frame before the backend starts.
    pub intermediates: Vec<u64>,
    /// The call configuration of dispatches that bring none.
    pub config: CallConfig,
}

impl ProgramSpec {
    /// A program with this name and nothing else; add to the fields from there.
    #[must_use]
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self {
            name: name.into(),
            target: None,
            callables: Vec::new(),
            parameters: Vec::new(),
            intermediates: Vec::new(),
            config: CallConfig::new(),
        }
    }

    /// The same program with one more callable.
    #[must_use]
    pub fn callable(mut self, callable: CallableSpec) -> Self {
        self.callables.push(callable);
        self
    }

    /// The same program with one more parameter.
    #[must_use]
    pub fn parameter(mut self, parameter: Parameter) -> Self {
        self.parameters.push(parameter);
        self
    }

    /// The same program with one more host intermediate of `nbytes` bytes.
    #[must_use]
    pub fn intermediate(mut self, nbytes: u64) -> Self {
        self.intermediates.push(nbytes);
        self
    }

    /// The same program, compiled for `target`.
    #[must_use]
    pub fn target(mut self, target: Target) -> Self {
        self.target = Some(target);
        self
    }
}

/// What a builder returns: its own errors pass through unchanged. Errors of [`Build`] calls convert with `?`.
pub type ProgramResult = Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// A program: a host-side graph builder. The same object runs in ordinary and persistent mode on any backend.
///
/// `build` runs on the submitting thread, one build of a worker at a time. It may fail or panic: the run is
/// cancelled and the worker stays sound. It must not hand calls on the same worker to another thread and wait for
/// them: such a call waits for the build, and the build would wait for it. For the same reason builders of two workers
/// must not submit to each other: each would hold its own build and wait for the other's. Calls from builders go in one
/// direction between workers, or through [`try_submit`](crate::PreparedWorker::try_submit), which waits for no build.
pub trait Program: Send + Sync {
    /// What the program declares.
    fn spec(&self) -> &ProgramSpec;

    /// Builds the graph of one dispatch.
    ///
    /// # Errors
    ///
    /// Whatever the program wants its caller to see. Before the dispatch opens, an error rejects this dispatch only;
    /// afterwards it poisons persistent dispatch.
    fn build<'b>(&self, build: &Build<'b>, args: &Args) -> ProgramResult;
}

/// One argument.
#[derive(Clone, Debug)]
pub enum Arg {
    /// A host buffer.
    Host(HostBuffer),
    /// Resident device memory.
    Device(DeviceTensor),
    /// A scalar: 64 bits, of whatever meaning the program gives them.
    Scalar(u64),
}

/// The arguments of a dispatch: a reusable list. A dispatch copies the list (reference counts only) and owns its
/// copy until it is terminal, so the caller may reuse or drop the original at once.
#[derive(Clone, Debug, Default)]
pub struct Args {
    list: Vec<Arg>,
}

impl Args {
    /// No arguments.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a host buffer.
    #[must_use]
    pub fn host(mut self, buffer: &HostBuffer) -> Self {
        self.list.push(Arg::Host(buffer.clone()));
        self
    }

    /// Adds a resident device tensor.
    #[must_use]
    pub fn device(mut self, tensor: &DeviceTensor) -> Self {
        self.list.push(Arg::Device(tensor.clone()));
        self
    }

    /// Adds a scalar.
    #[must_use]
    pub fn scalar(mut self, value: u64) -> Self {
        self.list.push(Arg::Scalar(value));
        self
    }

    /// Adds a scalar with a sign, in two's complement.
    #[must_use]
    pub fn signed(self, value: i64) -> Self {
        self.scalar(value.cast_unsigned())
    }

    /// Adds a floating-point scalar, as the bits of its IEEE 754 form.
    #[must_use]
    pub fn float(self, value: f64) -> Self {
        self.scalar(value.to_bits())
    }

    /// Adds an argument in place.
    pub fn push(&mut self, arg: Arg) {
        self.list.push(arg);
    }

    /// Forgets all arguments, keeps the storage.
    pub fn clear(&mut self) {
        self.list.clear();
    }

    /// Replaces the scalar at `index`; false where there is no scalar.
    pub fn set_scalar(&mut self, index: usize, value: u64) -> bool {
        match self.list.get_mut(index) {
            Some(Arg::Scalar(slot)) => {
                *slot = value;
                true
            }
            _ => false,
        }
    }

    /// All arguments in order.
    #[must_use]
    pub fn as_slice(&self) -> &[Arg] {
        &self.list
    }

    /// The host buffer at `index`.
    ///
    /// # Errors
    ///
    /// [`Error::Build`] where there is none.
    pub fn host_at(&self, index: usize) -> Result<&HostBuffer, Error> {
        match self.list.get(index) {
            Some(Arg::Host(buffer)) => Ok(buffer),
            _ => Err(Error::build(format!("argument {index} is not a host buffer"))),
        }
    }

    /// The device tensor at `index`.
    ///
    /// # Errors
    ///
    /// [`Error::Build`] where there is none.
    pub fn device_at(&self, index: usize) -> Result<&DeviceTensor, Error> {
        match self.list.get(index) {
            Some(Arg::Device(tensor)) => Ok(tensor),
            _ => Err(Error::build(format!("argument {index} is not a device tensor"))),
        }
    }

    /// The scalar at `index`.
    ///
    /// # Errors
    ///
    /// [`Error::Build`] where there is none.
    pub fn scalar_at(&self, index: usize) -> Result<u64, Error> {
        match self.list.get(index) {
            Some(Arg::Scalar(value)) => Ok(*value),
            _ => Err(Error::build(format!("argument {index} is not a scalar"))),
        }
    }

    /// The scalar at `index`, as a number with a sign.
    ///
    /// # Errors
    ///
    /// [`Error::Build`] where there is none.
    pub fn signed_at(&self, index: usize) -> Result<i64, Error> {
        self.scalar_at(index).map(u64::cast_signed)
    }

    /// The scalar at `index`, as a floating-point number.
    ///
    /// # Errors
    ///
    /// [`Error::Build`] where there is none.
    pub fn float_at(&self, index: usize) -> Result<f64, Error> {
        self.scalar_at(index).map(f64::from_bits)
    }

    /// Copies the list into `self`, keeping storage.
    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.list.clear();
        self.list.extend_from_slice(&other.list);
    }

    /// Checks the list against declared parameters and the worker that will run them.
    pub(crate) fn check(&self, spec: &ProgramSpec, worker: u64) -> Result<(), Error> {
        let refuse = |message: String| Err(Error::Arguments { program: Arc::clone(&spec.name), message });
        if self.list.len() != spec.parameters.len() {
            return refuse(format!("{} arguments given, {} declared", self.list.len(), spec.parameters.len()));
        }
        for (index, (arg, parameter)) in self.list.iter().zip(&spec.parameters).enumerate() {
            let (given, wanted, owner) = match (arg, parameter.kind) {
                (Arg::Host(b), ParameterKind::Host { nbytes }) => (b.nbytes(), nbytes, Some(b.worker())),
                (Arg::Device(t), ParameterKind::Device { nbytes }) => (t.nbytes(), nbytes, Some(t.worker())),
                (Arg::Scalar(_), ParameterKind::Scalar) => (0, None, None),
                (arg, kind) => {
                    let given = match arg {
                        Arg::Host(_) => "a host buffer",
                        Arg::Device(_) => "a device tensor",
                        Arg::Scalar(_) => "a scalar",
                    };
                    let wanted = match kind {
                        ParameterKind::Host { .. } => "a host buffer",
                        ParameterKind::Device { .. } => "a device tensor",
                        ParameterKind::Scalar => "a scalar",
                    };
                    return refuse(format!(
                        "argument {index} (`{}`) is {given}, declared as {wanted}",
                        parameter.name
                    ));
                }
            };
            if let Some(wanted) = wanted
                && wanted != given
            {
                return refuse(format!(
                    "argument {index} (`{}`) holds {given} bytes, declared with {wanted}",
                    parameter.name
                ));
            }
            if owner.is_some_and(|owner| owner != worker) {
                return refuse(format!("argument {index} (`{}`) belongs to another worker", parameter.name));
            }
        }
        Ok(())
    }
}
