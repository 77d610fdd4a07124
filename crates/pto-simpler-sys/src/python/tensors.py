"""Tensors as generated code expects them: the runtime's own, which can also be sliced, looked at and assigned to on the
host. No torch is needed for any of it."""

import ctypes
import itertools
import math
import struct
import sys
import threading

from simpler import task_interface
from simpler.task_interface import DataType, Tensor

MAX_DIMS = getattr(task_interface, "MAX_TENSOR_DIMS", 5)

# Names as torch has them, names as the runtime has them, and how the standard library packs one element.
_TYPES = [
    ("float32", "FLOAT32", 4, "f"),
    ("float16", "FLOAT16", 2, "e"),
    ("bfloat16", "BFLOAT16", 2, None),
    ("int8", "INT8", 1, "b"),
    ("int16", "INT16", 2, "h"),
    ("int32", "INT32", 4, "i"),
    ("int64", "INT64", 8, "q"),
    ("uint8", "UINT8", 1, "B"),
    ("uint16", "UINT16", 2, "H"),
    ("uint32", "UINT32", 4, "I"),
    ("uint64", "UINT64", 8, "Q"),
    ("bool", "BOOL", 1, "?"),
]
_CODES = {}
_PACKED = {}
_NAMES = {}
for _name, _member, _size, _letter in _TYPES:
    if hasattr(DataType, _member):
        _code = int(getattr(DataType, _member).value)
        _CODES[_name] = (_code, _size)
        _PACKED[_code] = _letter
        _NAMES[_code] = _name


class Allocators(threading.local):
    """Where new memory comes from: the call of an entry that this thread is inside, if any."""

    def __init__(self):
        self.stack = []


allocators = Allocators()


class Home:
    """The memory that tensors are views of. `owner` keeps it mapped, whoever looks at it later."""

    __slots__ = ("address", "descriptor", "dtype", "element", "gone", "owner", "writable")

    def __init__(self, descriptor, dtype, element, address, writable, owner=None):
        self.descriptor = descriptor
        self.dtype = dtype
        self.element = element
        self.address = address
        self.writable = writable
        self.owner = owner
        self.gone = False

    def start(self, writing=False):
        """The address on the host, for right now."""
        if self.gone:
            raise RuntimeError("a tensor was used after the call of the entry that it was given to")
        if not self.address:
            raise TypeError("a tensor in device memory has no address on the host; copy it first")
        if writing and not self.writable:
            raise TypeError("a tensor over a read-only buffer cannot be assigned to; pass another buffer")
        return self.address


def row_major(shape):
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _contiguous(shape, strides):
    step = 1
    for n, stride in zip(reversed(shape), reversed(strides)):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


def make(home, offset, shape, strides):
    """A tensor over part of a home. What no task could take is a `View`, which says why where somebody passes it on."""
    shape, strides = tuple(shape), tuple(strides)
    dense = row_major(shape)
    if 0 in shape:
        made = View("has no elements")
    elif strides != dense and not _contiguous(shape, strides):
        made = View("is not contiguous; take whole rows, or assign it to a tensor of its own first")
    elif len(shape) > MAX_DIMS:
        made = View(f"has {len(shape)} dimensions; at most {MAX_DIMS} are allowed")
    else:
        strides = dense
        # The runtime has no tensors without dimensions.
        made = ArgumentTensor(
            buffer=home.descriptor, byte_offset=offset, shapes=shape or (1,), strides=dense or (1,), dtype=home.dtype
        )
    made._home = home
    made._offset = offset
    made.shape = shape
    made._strides = strides
    return made


def over(buffer, shape, dtype, byte_offset, element, address, writable, owner=None):
    """An argument: the tensor that lies at `byte_offset` in a buffer of the runtime."""
    shape = tuple(shape)
    home = Home(buffer.to_descriptor(), int(dtype.value), element, address, writable, owner)
    return make(home, byte_offset, shape, row_major(shape))


def _copy(element, shape, to, to_strides, source, source_strides):
    """Copies elements between two places on the host; strides in elements, 0 where a dimension repeats."""
    dims = [(n, a * element, b * element) for n, a, b in zip(shape, to_strides, source_strides) if n != 1]
    run = element
    while dims and dims[-1][1] == run and dims[-1][2] == run:
        run *= dims.pop()[0]
    for index in itertools.product(*(range(n) for n, _, _ in dims)):
        a = sum(i * stride for i, (_, stride, _) in zip(index, dims))
        b = sum(i * stride for i, (_, _, stride) in zip(index, dims))
        ctypes.memmove(to + a, source + b, run)


def _span(element, shape, strides):
    return (1 + sum((n - 1) * stride for n, stride in zip(shape, strides))) * element


def _pack(dtype, value):
    if dtype not in _PACKED:
        raise TypeError("numbers cannot be assigned to a tensor of this element type")
    letter = _PACKED[dtype]
    if letter is not None:
        return struct.pack("=" + letter, value if letter in "fe" else bool(value) if letter == "?" else int(value))
    bits = struct.unpack("=I", struct.pack("=f", value))[0]
    if math.isnan(value):
        return struct.pack("=H", 0x7FC0)
    return struct.pack("=H", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF)


def _unpack(dtype, data):
    if dtype not in _PACKED:
        raise TypeError("elements of this type cannot be read as numbers")
    letter = _PACKED[dtype]
    if letter is not None:
        return struct.unpack("=" + letter, data)[0]
    return struct.unpack("=f", b"\0\0" + data)[0]


class _Foreign:
    """Somebody else's tensor in host memory, as far as it says what it is."""

    def __init__(self, tensor):
        self.shape = tuple(int(n) for n in tensor.shape)
        name = str(tensor.dtype).rpartition(".")[2]
        self.dtype, self.element = _CODES.get(name, (None, None))
        if self.element is None:
            self.element = int(tensor.element_size())
        place = getattr(getattr(tensor, "device", None), "type", "cpu")
        if place != "cpu":
            raise TypeError(f"a tensor on {place} cannot be used on the host")
        self.address = int(tensor.data_ptr())
        if getattr(tensor, "is_contiguous", lambda: True)():
            self.strides = row_major(self.shape)
        else:
            self.strides = tuple(int(n) for n in tensor.stride())
        # Every view of one storage belongs to one identity, by which the runtime orders tasks.
        storage = getattr(tensor, "untyped_storage", None) or getattr(tensor, "storage", None)
        if callable(storage):
            storage = storage()
            self.base, self.nbytes = int(storage.data_ptr()), int(storage.nbytes())
        else:
            self.base, self.nbytes = self.address, _span(self.element, self.shape, self.strides)
        shared = getattr(tensor, "is_shared", None)
        self.shared = bool(shared()) if callable(shared) else True


def foreign(value):
    """What a tensor of another library says of itself; None for anything else."""
    if isinstance(value, (ArgumentTensor, View)) or not (hasattr(value, "data_ptr") and hasattr(value, "shape")):
        return None
    try:
        return _Foreign(value)
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return None


def copied(value):
    """`value`, or what stands for it in a task if it is a tensor of another library: the same memory if that is an
    argument's, else a copy in memory that the tasks of this run can reach. What is made after the start is in this process
    only."""
    it = foreign(value)
    if it is None or it.dtype is None or not allocators.stack:
        return value
    homes = allocators.stack[-1].homes
    end = it.address + (_span(it.element, it.shape, it.strides) if all(it.shape) else 0)
    for home in homes:
        if home.address and home.address <= it.address and end <= home.address + home.descriptor.nbytes:
            if home.dtype != it.dtype:
                home = Home(home.descriptor, it.dtype, it.element, home.address, home.writable, home.owner)
                homes.append(home)
            return make(home, it.address - home.address, it.shape, it.strides)
    made = _new(it.shape, it.dtype, it.element)
    if all(it.shape):
        _copy(it.element, it.shape, made._home.address, made._strides, it.address, it.strides)
    return made


def _new(shape, dtype, element):
    nbytes = element * math.prod(shape)
    if nbytes == 0:
        return make(Home(None, dtype, element, 0, True), 0, shape, row_major(shape))
    buffer, address, owner = allocators.stack[-1](nbytes)
    home = Home(buffer.to_descriptor(), dtype, element, address, True, owner)
    allocators.stack[-1].homes.append(home)
    return make(home, 0, shape, row_major(shape))


def _as_torch(tensor):
    """The same memory as torch's own tensor (a copy of what is read-only), where the program has brought torch along."""
    torch = sys.modules.get("torch")
    home = tensor._home
    dtype = getattr(torch, _NAMES.get(home.dtype, ""), None)
    if dtype is None or not hasattr(torch, "frombuffer"):
        raise AttributeError("torch is not there")
    if not all(tensor.shape):
        return torch.empty(tensor.shape, dtype=dtype)
    nbytes = _span(home.element, tensor.shape, tensor._strides)
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.owner = home.owner
    made = torch.frombuffer(memory, dtype=dtype).as_strided(tensor.shape, tensor._strides)
    return made if home.writable else made.clone()


def _with_torch(value):
    if isinstance(value, (ArgumentTensor, View)):
        return _as_torch(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_with_torch, value))
    return value


def _operator(name):
    def call(self, *args):
        return getattr(_as_torch(self), name)(*map(_with_torch, args))

    call.__name__ = name
    return call


_OPERATORS = [f"__{r}{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod") for r in ("", "r")]
_OPERATORS += ["__neg__", "__abs__", "__lt__", "__le__", "__gt__", "__ge__"]


class _Operations:
    """What generated code, and what is written like it, does to a tensor on the host. Elements are copied at once."""

    def size(self, dimension=None):
        return self.shape if dimension is None else self.shape[dimension]

    def stride(self, dimension=None):
        return self._strides if dimension is None else self._strides[dimension]

    def dim(self):
        return len(self.shape)

    ndim = property(dim)

    def numel(self):
        return math.prod(self.shape)

    def element_size(self):
        return self._home.element

    @property
    def nbytes(self):
        return self.numel() * self._home.element

    def is_contiguous(self):
        return not all(self.shape) or _contiguous(self.shape, self._strides)

    def is_shared(self):
        return True

    def share_memory_(self):
        return self

    def __len__(self):
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def data_ptr(self):
        """Address of the first element in this process; refused for device memory."""
        return self._home.start() + self._offset

    def __getattr__(self, name):
        # Only for what is not found here.
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(_as_torch(self), name)
        except AttributeError:
            raise AttributeError(f"a tensor of shape {self.shape} has no {name!r} here") from None

    @classmethod
    def __torch_function__(cls, function, _types, args=(), kwargs=None):
        named = {name: _with_torch(value) for name, value in (kwargs or {}).items()}
        return function(*map(_with_torch, args), **named)

    def _part(self, index):
        """Where an indexed part lies: its offset in bytes, shape and strides."""
        whole, steps = self.shape, self._strides
        index = index if isinstance(index, tuple) else (index,)
        dots = [at for at, i in enumerate(index) if i is Ellipsis]
        if dots:
            if len(dots) > 1:
                raise IndexError("an index takes one ellipsis at most")
            at = dots[0]
            index = index[:at] + (slice(None),) * (len(whole) - len(index) + 1) + index[at + 1 :]
        if len(index) > len(whole):
            raise IndexError(f"{len(index)} indices for a tensor of {len(whole)} dimensions")
        offset, shape, strides = 0, [], []
        for i, n, stride in zip(index, whole, steps):
            if isinstance(i, slice):
                start, stop, step = i.indices(n)
                if step <= 0:
                    raise ValueError("a slice of an argument must run forwards")
                offset += start * stride
                shape.append(max(0, -(-(stop - start) // step)))
                strides.append(stride * step)
                continue
            if isinstance(i, bool) or not hasattr(i, "__index__"):
                raise TypeError(f"a tensor is indexed with numbers, slices and an ellipsis, not with {i!r}")
            i = i.__index__()
            if not -n <= i < n:
                raise IndexError(f"index {i} is out of range for {n} elements")
            offset += (i % n) * stride
        shape += whole[len(index) :]
        strides += steps[len(index) :]
        return self._offset + offset * self._home.element, shape, strides

    def __getitem__(self, index):
        return make(self._home, *self._part(index))

    def __setitem__(self, index, value):
        offset, shape, strides = self._part(index)
        self._write(offset, shape, strides, value)

    def copy_(self, source):
        self._write(self._offset, self.shape, self._strides, source)
        return self

    def fill_(self, value):
        self._write(self._offset, self.shape, self._strides, value)
        return self

    def zero_(self):
        return self.fill_(0)

    def _write(self, offset, shape, strides, value):
        home = self._home
        if isinstance(value, (bool, int, float)):
            data = _pack(home.dtype, value)
            if all(shape):
                if _contiguous(shape, strides):
                    data *= math.prod(shape)
                    ctypes.memmove(home.start(True) + offset, data, len(data))
                else:
                    element = ctypes.create_string_buffer(data, len(data))
                    zero = [0] * len(shape)
                    place = home.start(True) + offset
                    _copy(home.element, shape, place, strides, ctypes.addressof(element), zero)
            return
        if isinstance(value, (ArgumentTensor, View)):
            dtype, element = value._home.dtype, value._home.element
            given, steps = value.shape, value._strides
            source = value.data_ptr() if all(given) else 0
        else:
            it = foreign(value)
            if it is None:
                raise TypeError(f"a tensor is assigned from a tensor in host memory or a number, not from {value!r}")
            dtype, element, given, steps, source = it.dtype, it.element, it.shape, it.strides, it.address
        if element != home.element or (dtype is not None and dtype != home.dtype):
            raise TypeError("a tensor is assigned from one of its own element type; convert it in a task")
        # As tensors broadcast: from the right, a 1 repeats, and what stands before is 1.
        extra = len(given) - len(shape)
        kept, kept_steps = given[max(extra, 0) :], steps[max(extra, 0) :]
        lacking = len(shape) - len(kept)
        fits = all(n == 1 for n in given[: max(extra, 0)]) and all(
            n in (1, m) for n, m in zip(kept, shape[lacking:])
        )
        if not fits:
            raise ValueError(f"a tensor of shape {tuple(given)} cannot be assigned to one of shape {tuple(shape)}")
        if not all(shape):
            return
        repeated = [0] * lacking + [0 if n == 1 else step for n, step in zip(kept, kept_steps)]
        to = home.start(True) + offset
        end, source_end = to + _span(element, shape, strides), source + _span(element, shape, repeated)
        if to < source_end and source < end:
            # Read whole before anything is written.
            data = ctypes.create_string_buffer(math.prod(shape) * element)
            dense = row_major(shape)
            _copy(element, shape, ctypes.addressof(data), dense, source, repeated)
            source, repeated = ctypes.addressof(data), dense
        _copy(element, shape, to, strides, source, repeated)

    def contiguous(self):
        if self.is_contiguous():
            return self
        if not allocators.stack:
            raise RuntimeError("a tensor was used outside the call of the entry that it was given to")
        return _new(self.shape, self._home.dtype, self._home.element).copy_(self)

    def reshape(self, *shape):
        shape = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        if shape.count(-1) == 1:
            known = -math.prod(shape)
            shape[shape.index(-1)] = self.numel() // known if known else 0
        if math.prod(shape) != self.numel() or any(n < 0 for n in shape):
            raise ValueError(f"{self.numel()} elements do not have the shape {shape}")
        it = self.contiguous()
        return make(it._home, it._offset, shape, row_major(shape))

    view = reshape

    def flatten(self):
        return self.reshape(-1)

    def tolist(self):
        if self.shape:
            return [part.tolist() for part in self]
        return self.item()

    def item(self):
        if self.numel() != 1:
            raise ValueError(f"a tensor of {self.numel()} elements is no single number")
        return _unpack(self._home.dtype, ctypes.string_at(self.data_ptr(), self._home.element))

    def __int__(self):
        return int(self.item())

    def __float__(self):
        return float(self.item())

    def __bool__(self):
        return bool(self.item())

    def __index__(self):
        return self.item().__index__()


def _with_operations(cls):
    # The runtime's tensor takes no second base.
    for name, operation in vars(_Operations).items():
        if callable(operation) or isinstance(operation, (property, classmethod)):
            setattr(cls, name, operation)
    for name in _OPERATORS:
        setattr(cls, name, _operator(name))
    return cls


@_with_operations
class ArgumentTensor(Tensor):
    """A tensor that a task can take."""


@_with_operations
class View:
    """Part of a tensor that no task can take as it is, but that can be looked at and assigned."""

    def __init__(self, refusal):
        self._refusal = refusal

    @property
    def dtype(self):
        # What turns tensors into arguments asks for it first.
        raise ValueError(f"a tensor of shape {self.shape} cannot be passed to a task: it {self._refusal}")


class Stacked:
    """A tensor in parts, each on a chip of its own: whole parts can be taken out of it."""

    def __init__(self, parts):
        shapes = {part.shape for part in parts}
        if not parts or len(shapes) != 1 or len({part._home.dtype for part in parts}) != 1:
            raise ValueError("a stacked tensor takes at least one part, all of one shape and element type")
        self.parts = tuple(parts)
        self.shape = (len(parts), *parts[0].shape)

    def size(self, dimension=None):
        return self.shape if dimension is None else self.shape[dimension]

    def dim(self):
        return len(self.shape)

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, index):
        at, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        if isinstance(at, bool) or not hasattr(at, "__index__"):
            raise TypeError(f"a stacked tensor is indexed with a number first, not with {at!r}")
        if not 0 <= at.__index__() < len(self.parts):
            raise IndexError(f"part {at} is out of range for {len(self.parts)} parts")
        whole = self.parts[at.__index__()]
        taken = whole[rest] if rest else whole
        if taken.shape != whole.shape:
            raise ValueError(f"a stacked tensor is taken in whole parts of shape {whole.shape}, not as {index!r}")
        return taken


class Owned:
    """Descriptors for tensors that exist before the start, one per storage."""

    def __init__(self):
        from simpler.buffer import mint_owner_instance_id

        self._owner = mint_owner_instance_id()
        self._known = {}

    def adopted(self, value):
        """`value`, with each tensor of another library in it as an argument over the same memory."""
        if isinstance(value, list):
            return [self.adopted(part) for part in value]
        it = foreign(value)
        if it is None or it.dtype is None:
            return value
        if not all(it.shape):
            return make(Home(None, it.dtype, it.element, 0, True, value), 0, it.shape, it.strides)
        known = self._known.get((it.base, it.nbytes))
        if known is None:
            known = self._descriptor(it)
            self._known[(it.base, it.nbytes)] = known
        home = Home(known, it.dtype, it.element, it.base, True, value)
        return make(home, it.address - it.base, it.shape, it.strides)

    def _descriptor(self, it):
        from simpler.buffer import AccessMode, BackendKind, wrap_fork_inherited

        # What is not shared, a child gets a copy of: it can read it and nothing that it writes comes back.
        return wrap_fork_inherited(
            it.base,
            it.nbytes,
            self._owner,
            len(self._known) + 1,
            access=AccessMode.READWRITE if it.shared else AccessMode.READ,
            backend_kind=BackendKind.FORK_SHM if it.shared else BackendKind.FORK_COW,
        ).to_descriptor()
