//! Tensors over a buffer of the runtime, remembered: a warm dispatch names the same ones again and again.

use pyo3::prelude::*;

use crate::args::{DataType, Shape};

/// Most tensors that are remembered for one buffer.
const REMEMBERED: usize = 8;

/// What distinguishes two tensors over one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ViewKey {
    pub(crate) shape: Shape,
    pub(crate) dtype: DataType,
    pub(crate) byte_offset: u64,
}

/// A buffer object and the tensors made over it.
#[derive(Debug)]
pub(crate) struct Views {
    buffer: Py<PyAny>,
    tensors: Vec<(ViewKey, Py<PyAny>)>,
}

/// A buffer as looked up: the object, and its size.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) buffer: Py<PyAny>,
    pub(crate) nbytes: u64,
}

impl Views {
    pub(crate) const fn new(buffer: Py<PyAny>) -> Self {
        Self { buffer, tensors: Vec::new() }
    }

    pub(crate) fn view(&self, py: Python<'_>, nbytes: u64) -> View {
        View { buffer: self.buffer.clone_ref(py), nbytes }
    }

    pub(crate) fn buffer(&self) -> &Py<PyAny> {
        &self.buffer
    }

    pub(crate) fn into_buffer(self) -> Py<PyAny> {
        self.buffer
    }

    pub(crate) fn known<'py>(&self, py: Python<'py>, key: &ViewKey) -> Option<Bound<'py, PyAny>> {
        self.tensors.iter().find(|(known, _)| known == key).map(|(_, tensor)| tensor.bind(py).clone())
    }

    /// Remembers a tensor. Returns what had to make room, to be dropped outside the lock.
    pub(crate) fn remember(&mut self, key: ViewKey, tensor: Py<PyAny>) -> Option<Py<PyAny>> {
        if self.tensors.iter().any(|(known, _)| *known == key) {
            return Some(tensor);
        }
        let old = (self.tensors.len() >= REMEMBERED).then(|| self.tensors.remove(0).1);
        self.tensors.push((key, tensor));
        old
    }
}
