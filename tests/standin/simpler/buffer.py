"""Host and device backings: the owner's ``Buffer``, its constructors, and the consumer's mappings."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from .standin.types import (
    OWNER_INSTANCE_ID_BYTES,
    AccessMode,
    AddressSpace,
    BackendKind,
    BufferDescriptor,
    CanonicalIdentity,
    DataType,
    Tensor,
    row_major_strides,
)

__all__ = [
    "AccessMode",
    "AddressSpace",
    "BackendKind",
    "Buffer",
    "BufferDescriptor",
    "CanonicalIdentity",
    "ImportRegistry",
    "MappedArg",
    "MappedArgs",
    "Tensor",
    "create_host_shared_buffer",
    "host_ptr_nbytes",
    "mint_owner_instance_id",
    "wrap_device_malloc",
    "wrap_fork_inherited",
    "wrap_vmm_window",
]

SHM_DIRECTORY = "/dev/shm"


def mint_owner_instance_id() -> bytes:
    """A nonce for one owner's life."""
    return os.urandom(OWNER_INSTANCE_ID_BYTES)


def _address_of(view: memoryview) -> int:
    """Where a writable view starts. Leaves no export behind, so that the mapping can still be closed."""
    exporter = ctypes.c_char.from_buffer(view)
    try:
        return ctypes.addressof(exporter)
    finally:
        del exporter


@dataclass
class Buffer:
    """The owner's side of one backing."""

    identity: CanonicalIdentity
    address_space: AddressSpace
    access: AccessMode
    backend_kind: BackendKind
    nbytes: int
    body: bytes = b""
    owner_worker_path_id: int = 0
    shm: SharedMemory | None = None
    base: int = 0
    # The chip that a device backing lives on; 0 for host backings. Never sent anywhere.
    owner_worker_id: int = 0
    closed: bool = False
    # Whether the name is gone; stays False until the unlink has succeeded, so that a retry tries again.
    unlinked: bool = False

    def to_descriptor(self) -> BufferDescriptor:
        if self.closed:
            raise ValueError(f"Buffer: cannot derive a descriptor from a released buffer ({self.identity})")
        return BufferDescriptor(
            self.identity,
            self.address_space,
            self.owner_worker_path_id,
            self.access,
            self.backend_kind,
            self.nbytes,
            self.body,
        )

    def tensor(
        self,
        shapes: Sequence[int],
        dtype: int | DataType,
        strides: Sequence[int] | None = None,
        byte_offset: int = 0,
    ) -> Tensor:
        """A view; dense and row-major unless strides are given."""
        shapes = tuple(shapes)
        return Tensor(
            self.to_descriptor(),
            byte_offset,
            shapes,
            row_major_strides(shapes) if strides is None else tuple(strides),
            dtype,
        )

    def close(self) -> None:
        """Gives the backing up. The name goes first to go and last to fail: an exported view keeps only the mapping."""
        self.closed = True
        if self.shm is None:
            return
        try:
            self.shm.close()
        finally:
            if not self.unlinked:
                self.shm.unlink()
                self.unlinked = True
        self.shm = None


def create_host_shared_buffer(
    nbytes: int,
    owner_instance_id: bytes,
    buffer_id: int,
    owner_worker_path: str = "",
    generation: int = 1,
    access: AccessMode = AccessMode.READWRITE,
) -> Buffer:
    """New zero-filled POSIX shared memory."""
    if nbytes <= 0:
        raise ValueError(f"create_host_shared_buffer: nbytes must be positive, got {nbytes}")
    identity = CanonicalIdentity(owner_instance_id, buffer_id, generation)
    shm = SharedMemory(create=True, size=nbytes)
    return Buffer(
        identity,
        AddressSpace.HOST,
        access,
        BackendKind.POSIX_SHM,
        nbytes,
        body=shm.name.encode(),
        owner_worker_path_id=1 if owner_worker_path else 0,
        shm=shm,
        base=_address_of(shm.buf),
    )


def _wrap(
    space: AddressSpace,
    kind: BackendKind,
    address: int,
    nbytes: int,
    owner_instance_id: bytes,
    buffer_id: int,
    owner_worker_path: str,
    generation: int,
    access: AccessMode,
    owner_worker_id: int = 0,
) -> Buffer:
    return Buffer(
        CanonicalIdentity(owner_instance_id, buffer_id, generation),
        space,
        access,
        kind,
        nbytes,
        body=int(address).to_bytes(8, "little"),
        owner_worker_path_id=1 if owner_worker_path else 0,
        base=int(address),
        owner_worker_id=int(owner_worker_id),
    )


def wrap_fork_inherited(
    data_ptr: int,
    nbytes: int,
    owner_instance_id: bytes,
    buffer_id: int,
    owner_worker_path: str = "",
    generation: int = 1,
    access: AccessMode = AccessMode.READ,
    backend_kind: BackendKind = BackendKind.FORK_COW,
) -> Buffer:
    """Host memory that existed before the children were forked; they see it at the same address."""
    return _wrap(
        AddressSpace.HOST,
        backend_kind,
        data_ptr,
        nbytes,
        owner_instance_id,
        buffer_id,
        owner_worker_path,
        generation,
        access,
    )


def wrap_device_malloc(
    device_ptr: int,
    nbytes: int,
    owner_instance_id: bytes,
    buffer_id: int,
    owner_worker_path: str = "",
    generation: int = 1,
    access: AccessMode = AccessMode.READWRITE,
    owner_worker_id: int = 0,
) -> Buffer:
    """Device memory of one chip."""
    return _wrap(
        AddressSpace.DEVICE,
        BackendKind.DEVICE_MALLOC,
        device_ptr,
        nbytes,
        owner_instance_id,
        buffer_id,
        owner_worker_path,
        generation,
        access,
        owner_worker_id,
    )


def wrap_vmm_window(
    device_ptr: int,
    nbytes: int,
    owner_instance_id: bytes,
    buffer_id: int,
    owner_worker_path: str = "",
    generation: int = 1,
    access: AccessMode = AccessMode.READWRITE,
    owner_worker_id: int = 0,
) -> Buffer:
    """A named slice of one chip's window."""
    return _wrap(
        AddressSpace.DEVICE,
        BackendKind.VMM_WINDOW,
        device_ptr,
        nbytes,
        owner_instance_id,
        buffer_id,
        owner_worker_path,
        generation,
        access,
        owner_worker_id,
    )


def host_ptr_nbytes(obj: Any) -> tuple[int, int]:
    """Address and length of a torch tensor (by its methods) or of a writable buffer."""
    if all(hasattr(obj, name) for name in ("data_ptr", "numel", "element_size")):
        return int(obj.data_ptr()), int(obj.numel()) * int(obj.element_size())
    view = memoryview(obj)
    if view.readonly:
        raise TypeError("copy_to/copy_from host buffer must be a torch tensor or a writable buffer")
    return ctypes.addressof((ctypes.c_char * view.nbytes).from_buffer(obj)), view.nbytes


class ImportRegistry:
    """A consumer's mappings of host backings, made on first sight and kept until told otherwise."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[bytes, int, int], tuple[mmap.mmap | None, memoryview]] = {}

    def view(self, wire: tuple[Any, ...]) -> memoryview:
        """The whole backing as bytes. ``wire`` is what ``BufferDescriptor.wire`` gave."""
        key, kind, access, nbytes, body = wire
        known = self._mapped.get(key)
        if known is None:
            known = self._map(BackendKind(kind), nbytes, body)
            self._mapped[key] = known
        view = known[1]
        return view.toreadonly() if access == AccessMode.READ else view

    @staticmethod
    def _map(kind: BackendKind, nbytes: int, body: bytes) -> tuple[mmap.mmap | None, memoryview]:
        if kind in (BackendKind.FORK_SHM, BackendKind.FORK_COW):
            address = int.from_bytes(body, "little")
            return None, memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        if kind != BackendKind.POSIX_SHM:
            raise ValueError(f"ImportRegistry: a host process cannot map {kind.name}")
        name = body.decode()
        try:
            fd = os.open(os.path.join(SHM_DIRECTORY, name), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"ImportRegistry: shm object {name!r} does not exist: its owner has released the buffer"
            ) from None
        try:
            mapping = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        return mapping, memoryview(mapping)

    def unregister(self, key: tuple[bytes, int, int]) -> None:
        """Drops one mapping; nothing happens where there is none. A view still in use keeps it alive."""
        known = self._mapped.pop(key, None)
        if known is not None:
            try:
                known[1].release()
                if known[0] is not None:
                    known[0].close()
            except BufferError:
                self._mapped[key] = known
                raise


class MappedArg:
    """A tensor argument of a Python sub callable."""

    __slots__ = ("_backing", "byte_offset", "dtype", "shapes", "strides")

    def __init__(self, backing: memoryview, wire: tuple[Any, ...]) -> None:
        self._backing = backing
        _, self.byte_offset, self.shapes, self.strides, self.dtype = wire

    @property
    def buffer(self) -> memoryview:
        """The backing from the first byte of this view on."""
        return self._backing[self.byte_offset :]


class MappedArgs(Sequence):
    """All arguments of a Python sub callable: a sequence of its tensors, and its scalars."""

    __slots__ = ("_scalars", "_tensors")

    def __init__(self, tensors: Sequence[MappedArg], scalars: Sequence[int]) -> None:
        self._tensors = list(tensors)
        self._scalars = tuple(scalars)

    def __getitem__(self, i):
        return self._tensors[i]

    def __len__(self) -> int:
        return len(self._tensors)

    def tensor_count(self) -> int:
        return len(self._tensors)

    def scalar_count(self) -> int:
        return len(self._scalars)

    def scalar(self, i: int) -> int:
        return self._scalars[i]
