//! Task arguments: checked in Rust (the runtime does not, and too few of them end a chip process), then converted.

use pyo3::prelude::*;

use super::callables::Callable;
use super::shared::{Shared, live, no_member, unknown};
use super::views::{View, ViewKey, Views};
use crate::args::{Access, TaskArgs, TensorArg, TensorPlace};
use crate::error::{BackendError, Call};
use crate::ids::{ChipId, HostBufferId};

/// Wire size of the fixed part of an argument blob, of one tensor and of one scalar, in bytes.
pub(crate) const BLOB: (u64, u64, u64) = (8, 144, 8);

/// Where a task runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Chip(ChipId),
    Sub,
}

/// Checks the number of arguments against the callable and the runtime's limits.
pub(crate) fn check_counts(
    shared: &Shared,
    call: Call,
    callable: &Callable,
    args: &TaskArgs,
    target: Target,
) -> Result<(), BackendError> {
    let (tensors, scalars) = (args.tensors().len() as u64, args.scalars().len() as u64);
    if let Some(signature) = &callable.signature
        && (tensors != signature.tensors.len() as u64 || scalars != u64::from(signature.scalars))
    {
        return Err(BackendError::misuse(
            call,
            format!(
                "{:?} takes {} tensor(s) and {} scalar(s), given {tensors} and {scalars}",
                callable.name,
                signature.tensors.len(),
                signature.scalars
            ),
        ));
    }
    let limits = &shared.capabilities.limits;
    if matches!(target, Target::Chip(_))
        && (tensors > u64::from(limits.tensors) || scalars > u64::from(limits.scalars))
    {
        return Err(BackendError::misuse(
            call,
            format!(
                "{tensors} tensor(s) and {scalars} scalar(s) given; a chip task takes at most {} and {}",
                limits.tensors, limits.scalars
            ),
        ));
    }
    let blob = BLOB.0 + tensors * BLOB.1 + scalars * BLOB.2;
    if blob > limits.argument_bytes {
        return Err(BackendError::misuse(
            call,
            format!("the arguments take {blob} bytes; at most {} are allowed", limits.argument_bytes),
        ));
    }
    Ok(())
}

/// What a tensor argument was found to refer to.
enum Found<'py> {
    Known(Bound<'py, PyAny>),
    New(View),
}

impl Shared {
    /// The runtime's argument object for one task. Takes down the host buffers among the arguments.
    pub(crate) fn task_args<'py>(
        &self,
        py: Python<'py>,
        call: Call,
        args: &TaskArgs,
        target: Target,
        buffers: &mut Vec<HostBufferId>,
    ) -> Result<Bound<'py, PyAny>, BackendError> {
        let object = self.api.task_args(py).map_err(|e| self.validated(py, call, &e))?;
        for (position, tensor) in args.tensors().iter().enumerate() {
            let value = self.tensor(py, call, position, tensor, target)?;
            self.api.add_tensor(&object, &value, tensor.access).map_err(|e| self.validated(py, call, &e))?;
            if let TensorPlace::Host(id) = tensor.place {
                buffers.push(id);
            }
        }
        for scalar in args.scalars() {
            self.api.add_scalar(&object, *scalar).map_err(|e| self.validated(py, call, &e))?;
        }
        Ok(object)
    }

    /// The runtime's tensor for one argument, remembered from last time where it is the same.
    pub(crate) fn tensor<'py>(
        &self,
        py: Python<'py>,
        call: Call,
        position: usize,
        tensor: &TensorArg,
        target: Target,
    ) -> Result<Bound<'py, PyAny>, BackendError> {
        let key = ViewKey { shape: tensor.shape, dtype: tensor.dtype, byte_offset: tensor.byte_offset };
        let mut found = None;
        self.with_views(call, position, tensor, target, |views, nbytes| {
            found = Some(match views.known(py, &key) {
                Some(known) => Found::Known(known),
                None => Found::New(views.view(py, nbytes)),
            });
        })?;
        let view = match found {
            Some(Found::Known(tensor)) => return Ok(tensor),
            Some(Found::New(view)) => view,
            None => return Err(BackendError::broken(call, "a tensor argument was checked but not looked up")),
        };
        check_bounds(call, position, tensor, view.nbytes)?;
        let made = self
            .api
            .tensor(view.buffer.bind(py), tensor.shape.dims(), tensor.dtype, tensor.byte_offset)
            .map_err(|e| self.validated(py, call, &e))?;
        let mut evicted = None;
        // The place may have gone meanwhile; then there is nothing to remember it by.
        let _ = self.with_views(call, position, tensor, target, |views, _| {
            evicted = views.remember(key, made.clone().unbind());
        });
        drop(evicted);
        Ok(made)
    }

    /// The memory of a tensor that a host entry gets, wherever the entry may send it.
    pub(crate) fn argument_view(
        &self,
        py: Python<'_>,
        call: Call,
        position: usize,
        tensor: &TensorArg,
    ) -> Result<View, BackendError> {
        let target = match tensor.place {
            TensorPlace::DomainBuffer { chip, .. } => Target::Chip(chip),
            TensorPlace::Resident(id) => {
                Target::Chip(self.resident.lock().at(id).map(|r| r.chip).ok_or_else(|| unknown(call, id))?)
            }
            TensorPlace::Host(_) | TensorPlace::Scratch(_) => Target::Sub,
        };
        let mut found = None;
        self.with_views(call, position, tensor, target, |views, nbytes| found = Some(views.view(py, nbytes)))?;
        let view =
            found.ok_or_else(|| BackendError::broken(call, "a tensor argument was checked but not looked up"))?;
        check_bounds(call, position, tensor, view.nbytes)?;
        Ok(view)
    }

    /// Looks a tensor's place up and checks that the task can reach it.
    fn with_views(
        &self,
        call: Call,
        position: usize,
        tensor: &TensorArg,
        target: Target,
        look: impl FnOnce(&mut Views, u64),
    ) -> Result<(), BackendError> {
        match tensor.place {
            TensorPlace::DomainBuffer { domain, chip, buffer } => {
                check_chip(call, position, target, chip)?;
                let mut domains = self.domains.lock();
                let it = live(&domains, call, domain)?;
                let nbytes = it.request.buffers.get(buffer as usize).map(|b| b.nbytes);
                let missing = no_member(call, it, chip, buffer);
                let views = domains.table.at_mut(domain).and_then(|d| d.views_mut(chip, buffer));
                let (Some(views), Some(nbytes)) = (views, nbytes) else { return Err(missing) };
                look(views, nbytes);
            }
            TensorPlace::Resident(id) => {
                let mut resident = self.resident.lock();
                let it = resident.at_mut(id).ok_or_else(|| unknown(call, id))?;
                check_chip(call, position, target, it.chip)?;
                look(&mut it.views, it.nbytes);
            }
            TensorPlace::Host(id) => {
                let mut host = self.host.lock();
                let it = host.at_mut(id).ok_or_else(|| unknown(call, id))?;
                if it.read_only && !matches!(tensor.access, Access::Input | Access::NoDependency) {
                    return Err(BackendError::misuse(
                        call,
                        format!("tensor {position} would write {id}, which is read-only; pass another buffer"),
                    ));
                }
                look(&mut it.views, it.nbytes);
            }
            TensorPlace::Scratch(id) => {
                let mut scratch = self.scratch.lock();
                let it = scratch.at_mut(id).ok_or_else(|| unknown(call, id))?;
                look(&mut it.views, it.nbytes);
            }
        }
        Ok(())
    }
}

fn check_chip(call: Call, position: usize, target: Target, chip: ChipId) -> Result<(), BackendError> {
    match target {
        Target::Chip(here) if here == chip => Ok(()),
        Target::Chip(here) => Err(BackendError::misuse(
            call,
            format!("tensor {position} lives on {chip}, and the task runs on {here}; pass memory of that chip"),
        )),
        Target::Sub => Err(BackendError::misuse(
            call,
            format!("tensor {position} lives on {chip}, and a sub-worker reaches host memory only"),
        )),
    }
}

fn check_bounds(call: Call, position: usize, tensor: &TensorArg, nbytes: u64) -> Result<(), BackendError> {
    let size = tensor.dtype.size();
    if !tensor.byte_offset.is_multiple_of(size) {
        return Err(BackendError::misuse(
            call,
            format!("tensor {position} starts at byte {}, which is no multiple of {size}", tensor.byte_offset),
        ));
    }
    let end = tensor.nbytes().and_then(|n| n.checked_add(tensor.byte_offset));
    if end.is_none_or(|end| end > nbytes) {
        return Err(BackendError::misuse(
            call,
            format!(
                "tensor {position} spans {:?} elements of {size} bytes from byte {} on; its memory has {nbytes}",
                tensor.shape, tensor.byte_offset
            ),
        ));
    }
    Ok(())
}
