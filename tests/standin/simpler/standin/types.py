"""Plain values of the task interface: enumerations, argument lists, call configuration, chip callables.

``simpler.task_interface`` and ``simpler.buffer`` give them their public names. Nothing here touches a process, a
file or a thread.
"""

from __future__ import annotations

import ctypes
import enum
import json
import math
import operator
from collections.abc import Sequence
from typing import Any

MAX_REGISTERED_CALLABLE_IDS = 64
MAX_TENSOR_DIMS = 5
COMM_MAX_RANK_NUM = 64
OWNER_INSTANCE_ID_BYTES = 8
# What one chip task may carry, and what one message to a child may.
CHIP_MAX_TENSORS = 256
CHIP_MAX_SCALARS = 128
ARGUMENT_BLOB_BYTES = 64_016
TENSOR_BLOB_BYTES = 144
SCALAR_BLOB_BYTES = 8
BLOB_HEADER_BYTES = 8

_U64 = 1 << 64


class DataType(enum.Enum):
    """Element types and their wire values."""

    FLOAT32 = 0
    FLOAT16 = 1
    INT32 = 2
    INT16 = 3
    INT8 = 4
    UINT8 = 5
    BFLOAT16 = 6
    INT64 = 7
    UINT64 = 8
    UINT16 = 9
    UINT32 = 10
    FP8E4M3FN = 12
    FP8E8M0 = 13
    FP4E2M1 = 14


_ELEMENT_SIZE = {0: 4, 1: 2, 2: 4, 3: 2, 4: 1, 5: 1, 6: 2, 7: 8, 8: 8, 9: 2, 10: 4, 12: 1, 13: 1, 14: 1}


class TensorArgType(enum.Enum):
    """How a task uses a tensor."""

    INPUT = 0
    OUTPUT = 1
    INOUT = 2
    OUTPUT_EXISTING = 3
    NO_DEP = 4


WRITING_TAGS = (TensorArgType.OUTPUT, TensorArgType.OUTPUT_EXISTING, TensorArgType.INOUT)


class ArgDirection(enum.Enum):
    """An entry of a chip callable's signature."""

    SCALAR = 0
    IN = 1
    OUT = 2
    INOUT = 3


class _Numbers(enum.IntEnum):
    """Numbers with names that print as such."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    __str__ = __repr__


class AccessMode(_Numbers):
    """What a backing lets its users do."""

    READ = 0
    WRITE = 1
    READWRITE = 2


class AddressSpace(_Numbers):
    """Where a backing lives."""

    HOST = 0
    DEVICE = 1


class BackendKind(_Numbers):
    """What kind of memory a backing is."""

    FORK_SHM = 0
    POSIX_SHM = 1
    VMM_WINDOW = 2
    REMOTE_SIDECAR = 3
    DEVICE_MALLOC = 4
    FORK_COW = 5


class WorkerType(enum.Enum):
    """The two kinds of children."""

    NEXT_LEVEL = 0
    SUB = 1


def dtype_value(dtype: Any) -> int:
    """The wire value of a ``DataType`` or of its number; ``ValueError`` for anything else."""
    value = dtype.value if isinstance(dtype, DataType) else dtype
    try:
        value = operator.index(value)
    except TypeError:
        raise ValueError("invalid Tensor: unknown dtype") from None
    if value not in _ELEMENT_SIZE:
        raise ValueError("invalid Tensor: unknown dtype")
    return value


def get_element_size(dtype: Any) -> int:
    """Bytes per element."""
    return _ELEMENT_SIZE[dtype_value(dtype)]


def get_dtype_name(dtype: Any) -> str:
    """The name of an element type."""
    return DataType(dtype_value(dtype)).name


def arg_direction_name(direction: ArgDirection) -> str:
    """The name of a signature entry."""
    return direction.name


def scalar_to_uint64(value: Any) -> int:
    """The bits of a scalar, zero-extended: ints wrap, Python floats become single precision."""
    if isinstance(value, float):
        return int.from_bytes(ctypes.string_at(ctypes.byref(ctypes.c_float(value)), 4), "little")
    if isinstance(value, ctypes._SimpleCData):
        if isinstance(value, (ctypes.c_float, ctypes.c_double)):
            return int.from_bytes(bytes(value), "little")
        return int(value.value) % _U64
    return int(value) % _U64


class CanonicalIdentity:
    """Names one backing for ever: its owner's nonce, a number and a generation."""

    __slots__ = ("buffer_id", "generation", "owner_instance_id")

    def __init__(self, owner_instance_id: bytes, buffer_id: int, generation: int = 1) -> None:
        owner = bytes(owner_instance_id)
        if len(owner) != OWNER_INSTANCE_ID_BYTES:
            raise ValueError(f"owner_instance_id must be {OWNER_INSTANCE_ID_BYTES} bytes, got {len(owner)}")
        self.owner_instance_id = owner
        self.buffer_id = int(buffer_id)
        self.generation = int(generation)

    def _key(self) -> tuple[bytes, int, int]:
        return self.owner_instance_id, self.buffer_id, self.generation

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CanonicalIdentity) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        owner = int.from_bytes(self.owner_instance_id, "little")
        return (
            f"CanonicalIdentity(owner_instance_id={owner:#x}, buffer_id={self.buffer_id}, generation={self.generation})"
        )


class BufferDescriptor:
    """What a consumer needs in order to reach a backing."""

    __slots__ = ("access", "address_space", "backend_kind", "body", "identity", "nbytes", "owner_worker_path_id")

    def __init__(
        self,
        identity: CanonicalIdentity,
        address_space: AddressSpace,
        owner_worker_path_id: int,
        access: AccessMode,
        backend_kind: BackendKind,
        nbytes: int,
        body: bytes,
    ) -> None:
        if backend_kind == BackendKind.FORK_COW and access != AccessMode.READ:
            raise ValueError("invalid BufferDescriptor: a FORK_COW backing is read-only")
        self.identity = identity
        self.address_space = AddressSpace(address_space)
        self.owner_worker_path_id = int(owner_worker_path_id)
        self.access = AccessMode(access)
        self.backend_kind = BackendKind(backend_kind)
        self.nbytes = int(nbytes)
        self.body = bytes(body)

    def wire(self) -> tuple[Any, ...]:
        """The descriptor as plain values, for a message."""
        return self.identity._key(), int(self.backend_kind), int(self.access), self.nbytes, self.body

    def __repr__(self) -> str:
        return (
            f"BufferDescriptor(buffer_id={self.identity.buffer_id}, generation={self.identity.generation}, "
            f"address_space={int(self.address_space)}, access={int(self.access)}, "
            f"backend_kind={int(self.backend_kind)}, nbytes={self.nbytes}, body_len={len(self.body)})"
        )


class Tensor:
    """A view of a backing: offset, shape, element strides and element type, checked against its bounds."""

    __slots__ = ("buffer", "byte_offset", "dtype", "shapes", "strides")

    def __init__(
        self, buffer: BufferDescriptor, byte_offset: int, shapes: Sequence[int], strides: Sequence[int], dtype: Any
    ) -> None:
        shapes, strides = tuple(operator.index(s) for s in shapes), tuple(operator.index(s) for s in strides)
        offset = operator.index(byte_offset)
        if not 1 <= len(shapes) <= MAX_TENSOR_DIMS:
            raise ValueError(f"Tensor ndims must be in [1, {MAX_TENSOR_DIMS}], got {len(shapes)}")
        if len(strides) != len(shapes):
            raise ValueError(f"Tensor has {len(shapes)} dimensions and {len(strides)} strides")
        if offset < 0 or any(s < 0 for s in shapes):
            raise TypeError("invalid Tensor: offset and dimensions are unsigned")
        if any(s == 0 for s in shapes):
            raise ValueError("invalid Tensor: shape dimension is zero")
        if any(s <= 0 for s in strides):
            raise ValueError("invalid Tensor: stride must be > 0 (broadcast and negative step unsupported)")
        value = dtype_value(dtype)
        size = _ELEMENT_SIZE[value]
        if offset % size:
            raise ValueError("invalid Tensor: byte_offset is not a multiple of the dtype size")
        last = sum((n - 1) * s for n, s in zip(shapes, strides))
        if offset + (last + 1) * size > buffer.nbytes:
            raise ValueError("invalid Tensor: view extends past the backing (byte_offset + extent > nbytes)")
        self.buffer = buffer
        self.byte_offset = offset
        self.shapes = shapes
        self.strides = strides
        self.dtype = value

    @property
    def ndims(self) -> int:
        return len(self.shapes)

    def byte_range(self) -> tuple[int, int]:
        """First byte and first byte past the view, within its backing."""
        last = sum((n - 1) * s for n, s in zip(self.shapes, self.strides))
        return self.byte_offset, self.byte_offset + (last + 1) * _ELEMENT_SIZE[self.dtype]

    def overlaps(self, other: Tensor) -> bool:
        """Whether two views of one backing meet. Strided views count as the range that they span."""
        if self.buffer.identity != other.buffer.identity:
            return False
        (a, b), (c, d) = self.byte_range(), other.byte_range()
        return a < d and c < b

    def wire(self) -> tuple[Any, ...]:
        """The view as plain values, for a message."""
        return self.buffer.wire(), self.byte_offset, self.shapes, self.strides, self.dtype

    def __repr__(self) -> str:
        return (
            f"Tensor(buffer_id={self.buffer.identity.buffer_id}, byte_offset={self.byte_offset}, "
            f"shapes={self.shapes}, strides={self.strides}, dtype={DataType(self.dtype).name})"
        )


class TaskArgs:
    """Arguments of one task: tensors first, then scalars."""

    __slots__ = ("_scalars", "_tags", "_tensors")

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._tags: list[TensorArgType] = []
        self._scalars: list[int] = []

    def add_tensor(self, tensor: Tensor, tag: TensorArgType = TensorArgType.INPUT) -> None:
        if not isinstance(tensor, Tensor) or not isinstance(tag, TensorArgType):
            raise TypeError(
                "add_tensor(): incompatible function arguments; expected a Tensor and a TensorArgType, got "
                f"{type(tensor).__name__} and {type(tag).__name__}"
            )
        if self._scalars:
            raise RuntimeError("TaskArgs: cannot add tensor after scalar")
        self._tensors.append(tensor)
        self._tags.append(tag)

    def add_scalar(self, s: int) -> None:
        if isinstance(s, float) or not hasattr(s, "__index__") or not 0 <= operator.index(s) < _U64:
            raise TypeError("add_scalar(): incompatible function arguments; expected an int in [0, 2**64)")
        self._scalars.append(operator.index(s))

    def clear(self) -> None:
        self._tensors.clear()
        self._tags.clear()
        self._scalars.clear()

    def tensor_count(self) -> int:
        return len(self._tensors)

    def scalar_count(self) -> int:
        return len(self._scalars)

    @staticmethod
    def _at(values: list[Any], i: int, what: str) -> Any:
        if not 0 <= i < len(values):
            raise IndexError(f"TaskArgs {what} index out of range")
        return values[i]

    def tensor(self, i: int) -> Tensor:
        return self._at(self._tensors, i, "tensor")

    def tag(self, i: int) -> TensorArgType:
        return self._at(self._tags, i, "tensor")

    def set_tag(self, i: int, tag: TensorArgType) -> None:
        self._at(self._tags, i, "tensor")
        self._tags[i] = tag

    def scalar(self, i: int) -> int:
        return self._at(self._scalars, i, "scalar")

    def __len__(self) -> int:
        return len(self._tensors) + len(self._scalars)

    def blob_bytes(self) -> int:
        """What the arguments take in a message of the runtime."""
        return BLOB_HEADER_BYTES + TENSOR_BLOB_BYTES * len(self._tensors) + SCALAR_BLOB_BYTES * len(self._scalars)

    def validate(self) -> None:
        """What a submission checks: access that the backings grant, and no write that meets another argument.

        As in the runtime, an argument is compared with the later ones only, so a write after an overlapping read
        passes.
        """
        for tensor, tag in zip(self._tensors, self._tags):
            granted = tensor.buffer.access
            if (
                (tag is TensorArgType.INPUT and granted == AccessMode.WRITE)
                or (tag is TensorArgType.OUTPUT_EXISTING and granted == AccessMode.READ)
                or (tag is TensorArgType.INOUT and granted != AccessMode.READWRITE)
            ):
                raise ValueError("submit: an argument's TensorArgType requests access the backing does not grant")
        for i, (tensor, tag) in enumerate(zip(self._tensors, self._tags)):
            if tag in WRITING_TAGS and any(tensor.overlaps(other) for other in self._tensors[i + 1 :]):
                raise ValueError("submit: two arguments of one task write overlapping bytes of the same buffer")

    def wire(self) -> tuple[Any, ...]:
        """The arguments as plain values, for a message."""
        return tuple(t.wire() for t in self._tensors), tuple(self._scalars)


class RuntimeEnv:
    """Ring sizes, four of each; zero keeps the runtime's own."""

    __slots__ = ("_values",)
    _FIELDS = ("ring_task_window", "ring_heap", "ring_dep_pool")

    def __init__(self) -> None:
        self._values = {name: [0, 0, 0, 0] for name in self._FIELDS}

    def _set(self, name: str, value: Any) -> None:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            value = [value] * 4
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, int) and 0 <= v < _U64 for v in value):
            raise ValueError(f"RuntimeEnv.{name} must be an int (broadcast) or a list of 4 ints")
        if len(value) != 4:
            raise ValueError(f"RuntimeEnv.{name} list must contain exactly 4 entries")
        self._values[name] = list(value)

    def validate(self) -> None:
        for v in self._values["ring_task_window"]:
            if v and (v < 4 or v > 0x7FFF_FFFF or v & (v - 1)):
                raise ValueError("RuntimeEnv: ring_task_window must be a power of 2 in [4, INT32_MAX]")
        if any(v and v < 1024 for v in self._values["ring_heap"]):
            raise ValueError("RuntimeEnv: ring_heap must be >= 1024 (bytes per ring)")
        if any(v and not 4 <= v <= 0x7FFF_FFFF for v in self._values["ring_dep_pool"]):
            raise ValueError("RuntimeEnv: ring_dep_pool must be in [4, INT32_MAX]")

    def __repr__(self) -> str:
        return "RuntimeEnv(" + ", ".join(f"{k}={v}" for k, v in self._values.items()) + ")"


def _ring(name: str) -> property:
    return property(lambda self: list(self._values[name]), lambda self, value: self._set(name, value))


for _name in RuntimeEnv._FIELDS:
    setattr(RuntimeEnv, _name, _ring(_name))


class CallConfig:
    """Options of one run."""

    _SWITCHES = ("enable_chip_swimlane", "enable_dump_args", "enable_pmu", "enable_dep_gen", "enable_scope_stats")
    __slots__ = (*_SWITCHES, "_runtime_env", "aicpu_thread_num", "output_prefix")

    def __init__(self) -> None:
        self.aicpu_thread_num = 0
        self.enable_chip_swimlane = 0
        self.enable_dump_args = 0
        self.enable_pmu = 0
        self.enable_dep_gen = False
        self.enable_scope_stats = False
        self.output_prefix = ""
        self._runtime_env = RuntimeEnv()

    @property
    def runtime_env(self) -> RuntimeEnv:
        return self._runtime_env

    def validate(self) -> None:
        if not self.output_prefix and any(getattr(self, name) for name in self._SWITCHES):
            raise ValueError(
                "CallConfig: output_prefix must be set whenever any of " + " / ".join(self._SWITCHES) + " is enabled"
            )
        self._runtime_env.validate()

    def __repr__(self) -> str:
        fields = ("aicpu_thread_num", *self._SWITCHES)
        return "CallConfig(" + ", ".join(f"{f}={getattr(self, f)}" for f in fields) + ")"


class _Binary:
    """A block of bytes at a stable address, as callables are."""

    def __init__(self, described: dict[str, Any], binary: bytes) -> None:
        head = json.dumps(described, sort_keys=True).encode()
        raw = len(head).to_bytes(4, "little") + head + binary
        self._raw = ctypes.create_string_buffer(raw, len(raw))
        self._described = described
        self._binary = binary

    def buffer_ptr(self) -> int:
        return ctypes.addressof(self._raw)

    def buffer_size(self) -> int:
        return len(self._raw)

    @property
    def binary_size(self) -> int:
        return len(self._binary)

    @property
    def sig_count(self) -> int:
        return len(self._described["signature"])

    def sig(self, i: int) -> ArgDirection:
        return ArgDirection[self._described["signature"][i]]

    def to_bytes(self) -> bytes:
        return bytes(self._raw)


def _split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(raw[:4], "little")
    return json.loads(raw[4 : 4 + length]), raw[4 + length :]


class CoreCallable(_Binary):
    """One kernel of a chip callable."""

    @staticmethod
    def build(signature: Sequence[ArgDirection], binary: bytes) -> CoreCallable:
        return CoreCallable({"signature": [d.name for d in signature]}, bytes(binary))


class ChipCallable(_Binary):
    """What a chip task runs. Here the binary is a descriptor that names a portable kernel (see ``simpler.standin``)."""

    @staticmethod
    def build(
        signature: Sequence[ArgDirection],
        func_name: str,
        binary: bytes,
        children: Sequence[tuple[int, CoreCallable]],
        config_name: str = "",
    ) -> ChipCallable:
        described = {
            "signature": [d.name for d in signature],
            "func_name": str(func_name),
            "config_name": str(config_name),
            "children": [[int(i), core.to_bytes().hex()] for i, core in children],
        }
        return ChipCallable(described, bytes(binary))

    @staticmethod
    def from_bytes(raw: bytes) -> ChipCallable:
        return ChipCallable(*_split(bytes(raw)))

    @property
    def func_name(self) -> str:
        return self._described["func_name"]

    @property
    def config_name(self) -> str:
        return self._described["config_name"]

    @property
    def child_count(self) -> int:
        return len(self._described["children"])

    def child_func_id(self, i: int) -> int:
        return self._described["children"][i][0]

    def child(self, i: int) -> CoreCallable:
        return CoreCallable(*_split(bytes.fromhex(self._described["children"][i][1])))

    @property
    def binary(self) -> bytes:
        """The orchestration binary. The stand-in's own: the real type hides it."""
        return self._binary

    def __repr__(self) -> str:
        return (
            f'ChipCallable(func_name="{self.func_name}", config_name="{self.config_name}", '
            f"sig_count={self.sig_count}, binary_size={self.binary_size}, child_count={self.child_count})"
        )


def row_major_strides(shapes: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a dense view."""
    return tuple(math.prod(shapes[i + 1 :]) for i in range(len(shapes)))
