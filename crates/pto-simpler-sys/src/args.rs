//! Arguments of tasks, and the places in memory that copies and tensors refer to.

use crate::ids::{ChipId, DeviceBufferId, DomainId, HostBufferId, ScratchId};

/// Element type of a tensor argument, with the field's usual names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DataType {
    /// 32-bit IEEE float.
    Float32,
    /// 16-bit IEEE float.
    Float16,
    /// 32-bit signed integer.
    Int32,
    /// 16-bit signed integer.
    Int16,
    /// 8-bit signed integer.
    Int8,
    /// 8-bit unsigned integer.
    Uint8,
    /// 16-bit brain float.
    Bfloat16,
    /// 64-bit signed integer.
    Int64,
    /// 64-bit unsigned integer.
    Uint64,
    /// 16-bit unsigned integer.
    Uint16,
    /// 32-bit unsigned integer.
    Uint32,
}

impl DataType {
    /// Bytes per element.
    #[must_use]
    pub const fn size(self) -> u64 {
        match self {
            Self::Int8 | Self::Uint8 => 1,
            Self::Float16 | Self::Bfloat16 | Self::Int16 | Self::Uint16 => 2,
            Self::Float32 | Self::Int32 | Self::Uint32 => 4,
            Self::Int64 | Self::Uint64 => 8,
        }
    }
}

/// How a task uses a tensor; drives dependency inference where the runtime does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read only.
    Input,
    /// Written without being read; the runtime may provide the memory.
    Output,
    /// Read and written.
    InOut,
    /// Written, in memory that exists already.
    OutputExisting,
    /// Takes no part in dependency inference.
    NoDependency,
}

/// Dimensions of a tensor: one to five, none of them zero, stored inline.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [u32; Self::MAX_DIMS],
    len: u8,
}

impl Shape {
    /// The most dimensions a tensor may have.
    pub const MAX_DIMS: usize = 5;

    /// A shape of one to five non-zero dimensions, or `None`.
    #[must_use]
    pub fn new(dims: &[u32]) -> Option<Self> {
        if dims.is_empty() || dims.len() > Self::MAX_DIMS || dims.contains(&0) {
            return None;
        }
        let mut shape = Self { dims: [0; Self::MAX_DIMS], len: dims.len() as u8 };
        shape.dims[..dims.len()].copy_from_slice(dims);
        Some(shape)
    }

    /// The dimensions.
    #[must_use]
    pub fn dims(&self) -> &[u32] {
        &self.dims[..usize::from(self.len)]
    }

    /// The number of elements, or `None` where it does not fit.
    #[must_use]
    pub fn elements(&self) -> Option<u64> {
        self.dims().iter().try_fold(1u64, |n, d| n.checked_mul(u64::from(*d)))
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.dims().fmt(f)
    }
}

/// A place in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DevicePlace {
    /// A whole named buffer of a domain on one chip.
    DomainBuffer {
        /// The domain.
        domain: DomainId,
        /// The member.
        chip: ChipId,
        /// Position of the buffer in the request.
        buffer: u32,
    },
    /// A byte range of a window, from `offset` on; needs the capability of range copies.
    Window {
        /// The domain.
        domain: DomainId,
        /// The member.
        chip: ChipId,
        /// Bytes from the start of the window.
        offset: u64,
    },
    /// Resident device memory.
    Resident(DeviceBufferId),
}

/// Where the bytes of a copy come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopySource {
    /// A host buffer, from its first byte on.
    Host(HostBufferId),
    /// The device sets every byte to this value; needs the capability `device_fill`.
    Fill(u8),
}

/// One synchronous copy into device memory.
///
/// A whole-buffer backend copies exactly as many bytes as its host buffer holds, so `nbytes` must equal the size of
/// the source there; it may be smaller than the destination (a prefix copy).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CopyTo {
    /// Where to.
    pub dst: DevicePlace,
    /// Where from.
    pub src: CopySource,
    /// How many bytes.
    pub nbytes: u64,
}

/// Where the memory of a tensor argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorPlace {
    /// A named buffer of a domain on the chip that the task runs on.
    DomainBuffer {
        /// The domain.
        domain: DomainId,
        /// The member; must be the chip that the task runs on.
        chip: ChipId,
        /// Position of the buffer in the request.
        buffer: u32,
    },
    /// Resident device memory of the chip that the task runs on.
    Resident(DeviceBufferId),
    /// A host buffer.
    Host(HostBufferId),
    /// Run-scoped scratch.
    Scratch(ScratchId),
}

/// One tensor argument: dense, row-major, `shape` elements of `dtype` from `byte_offset` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorArg {
    /// The memory.
    pub place: TensorPlace,
    /// Dimensions.
    pub shape: Shape,
    /// Element type.
    pub dtype: DataType,
    /// Bytes from the start of the place to the first element; a multiple of the element size.
    pub byte_offset: u64,
    /// How the task uses it.
    pub access: Access,
}

impl TensorArg {
    /// The bytes that the tensor spans, or `None` where they do not fit.
    #[must_use]
    pub fn nbytes(&self) -> Option<u64> {
        self.shape.elements()?.checked_mul(self.dtype.size())
    }
}

/// The argument list of one task: tensors first, then scalars. Reusable: `clear` keeps the storage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskArgs {
    tensors: Vec<TensorArg>,
    scalars: Vec<u64>,
}

impl TaskArgs {
    /// An empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets all arguments, keeps the storage.
    pub fn clear(&mut self) {
        self.tensors.clear();
        self.scalars.clear();
    }

    /// Adds a tensor. The runtime takes tensors before scalars, which this type makes the only order there is.
    pub fn tensor(&mut self, tensor: TensorArg) -> &mut Self {
        self.tensors.push(tensor);
        self
    }

    /// Adds a scalar.
    pub fn scalar(&mut self, value: u64) -> &mut Self {
        self.scalars.push(value);
        self
    }

    /// All tensors in order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorArg] {
        &self.tensors
    }

    /// All scalars in order.
    #[must_use]
    pub fn scalars(&self) -> &[u64] {
        &self.scalars
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_has_one_to_five_non_zero_dimensions() {
        assert!(Shape::new(&[]).is_none());
        assert!(Shape::new(&[1, 0]).is_none());
        assert!(Shape::new(&[1; 6]).is_none());
        let shape = Shape::new(&[2, 3, 4]).unwrap();
        assert_eq!((shape.dims(), shape.elements()), (&[2, 3, 4][..], Some(24)));
        assert_eq!(Shape::new(&[u32::MAX; 3]).unwrap().elements(), None);
    }

    #[test]
    fn a_tensor_spans_elements_times_element_size() {
        let mut tensor = TensorArg {
            place: TensorPlace::Host(HostBufferId::new(0, 0)),
            shape: Shape::new(&[4, 4]).unwrap(),
            dtype: DataType::Int64,
            byte_offset: 0,
            access: Access::Input,
        };
        assert_eq!(tensor.nbytes(), Some(128));
        tensor.shape = Shape::new(&[u32::MAX, u32::MAX]).unwrap();
        assert_eq!(tensor.nbytes(), None);
    }
}
