//! Tensors, and the memory that they lie in.

use std::marker::PhantomData;

use pto_domain::LeasedBuffer;
use pto_simpler_sys::{Access, Call, ChipId, DataType, ScratchId, Shape, TensorArg, TensorPlace};

use super::{Build, Invariant};
use crate::buffer::{DeviceTensor, HostBuffer};
use crate::error::Error;

/// A tensor argument that is valid in this build.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Tensor<'b> {
    pub(crate) arg: TensorArg,
    pub(crate) chip: Option<ChipId>,
    /// Bytes of the place.
    room: u64,
    lifetime: Invariant<'b>,
}

impl Tensor<'_> {
    /// The same tensor, starting `bytes` bytes into its place. Whoever takes it as an argument refuses it where it ends
    /// beyond its place, or does not start at a multiple of the element size.
    pub fn at(mut self, bytes: u64) -> Self {
        self.arg.byte_offset = bytes;
        self
    }

    /// Whether the tensor lies in its place. Backends check the same, but only once the dispatch has opened, where a
    /// failure poisons (design rule 17).
    pub(crate) fn check(&self) -> Result<(), Error> {
        let TensorArg { shape, dtype, byte_offset, .. } = &self.arg;
        if !byte_offset.is_multiple_of(dtype.size()) {
            return Err(Error::build(format!(
                "a tensor of {dtype:?} starts at byte {byte_offset} of its place: start at a multiple of {}",
                dtype.size()
            )));
        }
        let end = self.arg.nbytes().and_then(|nbytes| nbytes.checked_add(*byte_offset));
        if end.is_some_and(|end| end <= self.room) {
            return Ok(());
        }
        let end = end.map_or_else(|| "beyond 64 bits".to_owned(), |end| format!("at byte {end}"));
        Err(Error::build(format!(
            "a tensor of shape {shape:?} and type {dtype:?} from byte {byte_offset} on ends {end}, and its place has {} \
             bytes",
            self.room
        )))
    }
}

/// Memory that a builder named.
#[derive(Clone, Copy, Debug)]
pub(super) struct Located {
    pub(super) place: TensorPlace,
    /// The chip that it lives on, if it is device memory.
    pub(super) chip: Option<ChipId>,
    pub(super) nbytes: u64,
}

/// Run-scoped scratch memory of this build.
#[derive(Clone, Copy, Debug)]
pub struct Scratch<'b> {
    id: ScratchId,
    nbytes: u64,
    lifetime: Invariant<'b>,
}

/// A host intermediate of this dispatch's frame.
#[derive(Clone, Copy, Debug)]
pub struct Intermediate<'b> {
    id: pto_simpler_sys::HostBufferId,
    nbytes: u64,
    lifetime: Invariant<'b>,
}

impl Intermediate<'_> {
    /// Size in bytes.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }
}

/// A place that a tensor or a copy can refer to.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a, 'b> {
    /// A named buffer of a leased domain.
    Window(&'a LeasedBuffer<'b>),
    /// A host buffer; the dispatch keeps it until it is terminal.
    Host(&'a HostBuffer),
    /// Resident device memory; the dispatch keeps it until it is terminal.
    Device(&'a DeviceTensor),
    /// Run-scoped scratch.
    Scratch(Scratch<'b>),
    /// A host intermediate.
    Intermediate(Intermediate<'b>),
}

impl<'a, 'b> From<&'a LeasedBuffer<'b>> for Place<'a, 'b> {
    fn from(buffer: &'a LeasedBuffer<'b>) -> Self {
        Self::Window(buffer)
    }
}

impl<'a> From<&'a HostBuffer> for Place<'a, '_> {
    fn from(buffer: &'a HostBuffer) -> Self {
        Self::Host(buffer)
    }
}

impl<'a> From<&'a DeviceTensor> for Place<'a, '_> {
    fn from(tensor: &'a DeviceTensor) -> Self {
        Self::Device(tensor)
    }
}

impl<'b> From<Scratch<'b>> for Place<'_, 'b> {
    fn from(scratch: Scratch<'b>) -> Self {
        Self::Scratch(scratch)
    }
}

impl<'b> From<Intermediate<'b>> for Place<'_, 'b> {
    fn from(intermediate: Intermediate<'b>) -> Self {
        Self::Intermediate(intermediate)
    }
}

impl<'b> Build<'b> {
    /// A tensor over `place`: `shape` elements of `dtype`, from the first byte on.
    ///
    /// # Errors
    ///
    /// [`Error::Build`]: not one to five non-zero dimensions, more bytes than the place has, or a buffer of another
    /// worker.
    pub fn tensor<'a>(
        &self,
        place: impl Into<Place<'a, 'b>>,
        shape: &[u32],
        dtype: DataType,
        access: Access,
    ) -> Result<Tensor<'b>, Error>
    where
        'b: 'a,
    {
        let Some(dims) = Shape::new(shape) else {
            return Err(Error::build(format!(
                "a tensor has 1 to {} dimensions, none of them 0; given {shape:?}",
                Shape::MAX_DIMS
            )));
        };
        let Located { place, chip, nbytes } = self.place(place.into())?;
        let arg = TensorArg { place, shape: dims, dtype, byte_offset: 0, access };
        let tensor = Tensor { arg, chip, room: nbytes, lifetime: PhantomData };
        tensor.check()?;
        Ok(tensor)
    }

    pub(super) fn place(&self, place: Place<'_, 'b>) -> Result<Located, Error> {
        let (place, chip, nbytes) = match place {
            Place::Window(buffer) => (buffer.place(&self.inner.authority), Some(buffer.chip()), buffer.nbytes()),
            Place::Host(buffer) => {
                self.check_owner(buffer.worker())?;
                self.keep_host(buffer);
                (TensorPlace::Host(buffer.id()), None, buffer.nbytes())
            }
            Place::Device(tensor) => {
                self.check_owner(tensor.worker())?;
                self.keep_device(tensor);
                (TensorPlace::Resident(tensor.id()), Some(tensor.chip()), tensor.nbytes())
            }
            Place::Scratch(scratch) => (TensorPlace::Scratch(scratch.id), None, scratch.nbytes),
            Place::Intermediate(intermediate) => (TensorPlace::Host(intermediate.id), None, intermediate.nbytes),
        };
        Ok(Located { place, chip, nbytes })
    }

    pub(super) fn check_owner(&self, worker: u64) -> Result<(), Error> {
        if worker == self.inner.id { Ok(()) } else { Err(Error::build("the buffer belongs to another worker")) }
    }

    /// A buffer that the builder brought along lives until the dispatch is terminal, like an argument (rule 6).
    pub(super) fn keep_host(&self, buffer: &HostBuffer) {
        let kept = &mut self.state.storage.borrow_mut().kept_hosts;
        if !kept.iter().any(|k| k.id() == buffer.id()) {
            kept.push(buffer.clone());
        }
    }

    fn keep_device(&self, tensor: &DeviceTensor) {
        let kept = &mut self.state.storage.borrow_mut().kept_tensors;
        if !kept.iter().any(|k| k.id() == tensor.id()) {
            kept.push(tensor.clone());
        }
    }

    /// The host intermediate number `index` of this dispatch's frame.
    ///
    /// # Errors
    ///
    /// [`Error::Build`] where the program declares fewer.
    pub fn intermediate(&self, index: usize) -> Result<Intermediate<'b>, Error> {
        let declared = &self.program.intermediates[self.state.frame];
        let Some(&(id, nbytes)) = declared.get(index) else {
            return Err(Error::build(format!(
                "host intermediate {index} is not declared: the program declares {}",
                declared.len()
            )));
        };
        Ok(Intermediate { id, nbytes, lifetime: PhantomData })
    }

    /// Writes a host intermediate from `offset` (bytes) on.
    ///
    /// # Errors
    ///
    /// [`Error::Backend`]: out of bounds (misuse) or the backend failed.
    pub fn write_intermediate(&self, to: Intermediate<'b>, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.check_sticky()?;
        self.effect(Call::WriteBuffer, || self.inner.backend.write_buffer(to.id, offset, bytes))
    }

    /// Run-scoped host memory of `nbytes` bytes for passing results from task to task. Does not open the dispatch.
    ///
    /// # Errors
    ///
    /// [`Error::Backend`]: zero bytes (misuse), or no room.
    pub fn scratch(&self, nbytes: u64) -> Result<Scratch<'b>, Error> {
        self.check_sticky()?;
        let id = self.effect(Call::AllocScratch, || self.orchestrator.alloc(nbytes))?;
        Ok(Scratch { id, nbytes, lifetime: PhantomData })
    }
}
