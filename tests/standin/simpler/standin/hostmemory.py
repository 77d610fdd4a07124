"""Memory as a worker gives it out: device memory, host Buffers, run-scoped scratch, and copies between them."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Sequence
from typing import Any

from ..buffer import (
    AccessMode,
    AddressSpace,
    BackendKind,
    Buffer,
    create_host_shared_buffer,
    host_ptr_nbytes,
    mint_owner_instance_id,
    wrap_device_malloc,
    wrap_fork_inherited,
)
from ..orchestrator import direct_control
from .runs import RunResources, State
from .types import TaskArgs, get_element_size

HEAP_BYTES = 256 << 20
_MAP_NORESERVE = 0x4000


class _NoBufferConsumerError(RuntimeError):
    """A host Buffer that no child could ever map."""


class Memory:
    """The part of a worker that gives out memory."""

    def __init__(self) -> None:
        self._owner_instance_id = mint_owner_instance_id()
        self._buffer_ids = 0
        self._buffers: dict[int, Buffer] = {}
        # (chip, address) -> who holds it ("malloc" or a domain) and how far it reaches.
        self._device_live: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self._device_lock = threading.Lock()
        self._heap: mmap.mmap | None = None
        self._heap_base = 0
        self._heap_free: list[tuple[int, int]] = []

    def _make_heap(self, size: int) -> None:
        """The memory behind scratch; before the fork, so that every child has it at the same address."""
        self._heap = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self._heap_base = host_ptr_nbytes(self._heap)[0]
        self._heap_free = [(0, size)]

    def _drop_heap(self) -> None:
        if self._heap is not None:
            # Somebody may still look at scratch through an address; a mapping costs nothing until exit.
            with contextlib.suppress(BufferError):
                self._heap.close()
            self._heap = None

    # Device memory ---------------------------------------------------------------------------------------------

    def _check_chip(self, worker_id: int) -> None:
        chips = len(self._config.get("device_ids", ())) if self._native is not None else 0
        if not 0 <= worker_id < chips:
            raise IndexError(f"worker_id {worker_id} out of range (have {chips} chips)")

    def _next_buffer_id(self) -> int:
        with self._registry_lock:
            self._buffer_ids += 1
            return self._buffer_ids

    def malloc(self, size: int) -> Buffer:
        raise TypeError("worker.malloc is L2-only; at L3+ use worker.alloc_child_tensor(worker_id, ...)")

    def alloc_child_tensor(self, worker_id: int, shapes: Sequence[int], dtype: Any) -> Buffer:
        """Device memory of one chip."""
        nbytes = get_element_size(dtype)
        for n in shapes:
            nbytes *= int(n)
        worker_id = int(worker_id)
        if self._state is State.READY:
            self._check_chip(worker_id)
        with self._lease("alloc_child_tensor"), direct_control(self, "Worker.alloc_child_tensor"):
            address = self._native.control(self._native.chips[worker_id], "malloc", nbytes)
            with self._device_lock:
                self._device_live.setdefault((worker_id, address), []).append(("malloc", nbytes))
        return wrap_device_malloc(
            address, nbytes, self._owner_instance_id, self._next_buffer_id(), "L3", owner_worker_id=worker_id
        )

    def free(self, handle: Buffer) -> None:
        """Gives device memory of ``alloc_child_tensor`` back."""
        key = (int(handle.owner_worker_id), int(handle.base))
        if self._state is State.READY:
            self._check_chip(key[0])
        with self._lease("free"), direct_control(self, "Worker.free"):
            with self._device_lock:
                roles = self._device_live.get(key, [])
                if not any(role == "malloc" for role, _ in roles):
                    raise ValueError(
                        f"Worker.free: device pointer {key[1]:#x} is not a live malloc base on worker {key[0]} "
                        "(another worker's, freed, inside an allocation, or a domain's)"
                    )
                del self._device_live[key]
            self._native.control(self._native.chips[key[0]], "free", key[1])

    def committed_device_memory(self, worker_id: int = 0) -> int:
        """Bytes of device memory that a chip has given out; windows are not counted."""
        with self._lease("committed_device_memory"):
            if not self._native.chips:
                raise NotImplementedError("committed_device_memory requires at least one forked chip worker")
            self._check_chip(int(worker_id))
            return self._orch.committed_device_memory(int(worker_id))

    def _committed_device_memory(self, worker_id: int) -> int:
        self._check_chip(worker_id)
        return self._native.control(self._native.chips[worker_id], "committed_device_memory")

    def _check_live_range(self, worker_id: int, address: int, nbytes: int, api: str) -> None:
        with self._device_lock:
            for (owner, base), roles in self._device_live.items():
                if owner == worker_id and base <= address and any(address + nbytes <= base + n for _, n in roles):
                    return
        raise ValueError(
            f"Worker.{api}: device range [{address:#x}, +{nbytes}) is not contained in a live allocation on worker "
            f"{worker_id} (another worker's, freed, or out of the allocation)"
        )

    def _check_device_arguments(self, args: TaskArgs, chip: int, api: str) -> None:
        for i in range(args.tensor_count()):
            descriptor = args.tensor(i).buffer
            if descriptor.address_space != AddressSpace.DEVICE:
                continue
            address = int.from_bytes(descriptor.body, "little")
            with self._device_lock:
                if not self._device_live.get((chip, address)):
                    raise ValueError(
                        f"orch.{api}: child_memory argument (arg {i}, ptr {address:#x}) is not a live allocation on "
                        f"target worker {chip} (wrong worker, stale, or interior pointer)"
                    )

    def copy_to(self, dst: Buffer, src: Any) -> None:
        """Host to device; as many bytes as the host side has."""
        self._copy(dst, src, "copy_to")

    def copy_from(self, dst: Any, src: Buffer) -> None:
        """Device to host; as many bytes as the host side has."""
        self._copy(src, dst, "copy_from")

    def _copy(self, device: Buffer, host: Any, api: str) -> None:
        nbytes = int(host.nbytes) if isinstance(host, Buffer) else host_ptr_nbytes(host)[1]
        if isinstance(host, Buffer):
            if host.address_space != AddressSpace.HOST:
                raise ValueError(f"Worker.{api}: the host side must be a HOST handle, got {host.address_space.name}")
            needed = AccessMode.READ if api == "copy_to" else AccessMode.WRITE
            if host.access not in (needed, AccessMode.READWRITE):
                raise ValueError(f"Worker.{api}: host backing grants {host.access.name}, not {needed.name}")
        if device.address_space != AddressSpace.DEVICE:
            raise ValueError(f"Worker.{api}: expected a DEVICE handle, got {device.address_space.name}")
        if nbytes > device.nbytes:
            raise ValueError(f"Worker.{api}: {nbytes} bytes exceeds the {device.nbytes}-byte backing")
        chip = int(device.owner_worker_id)
        if self._state is State.READY:
            self._check_chip(chip)
        if not isinstance(host, Buffer):
            raise TypeError(f"Worker.{api}: an L3 host side must be a Buffer from create_buffer; raw memory is L2-only")
        with self._lease(api), direct_control(self, f"Worker.{api}"):
            self._check_live_range(chip, int(device.base), nbytes, api)
            wire = host.to_descriptor().wire()
            self._native.control(self._native.chips[chip], api, int(device.base), wire, nbytes)

    # Host memory -----------------------------------------------------------------------------------------------

    def create_buffer(self, nbytes: int) -> Buffer:
        """Zero-filled shared memory that children map by name when they first see it."""
        with self._lease("create_buffer"):
            nbytes = int(nbytes)
            if not self._native.children:
                raise _NoBufferConsumerError("create_buffer requires at least one forked child (this Worker has none)")
            if nbytes <= 0:
                raise ValueError("create_buffer: nbytes must be positive")
            number = self._next_buffer_id()
            buffer = create_host_shared_buffer(nbytes, self._owner_instance_id, number)
            with self._registry_lock:
                self._buffers[number] = buffer
            return buffer

    def release_buffer(self, buffer: Buffer) -> None:
        """Gives a host Buffer back; refused while a run in flight names it in a task."""
        if not buffer.closed:
            with self._submit_mu.exclusive(), self._changed:
                for handle in self._accepted_run_handles:
                    if not handle._cleanup_published and buffer.identity in handle._resources.touched_identities:
                        raise RuntimeError(f"release_buffer: {buffer.identity} is still referenced by an in-flight run")
        first = buffer.shm is not None
        buffer.close()
        native = self._native
        if first and native is not None:
            # Waits for a busy child, as the real broadcast does; a dead one maps nothing.
            native.control_all([(c, (buffer.identity._key(),)) for c in native.children], "drop_import")
        with self._registry_lock:
            if self._buffers.get(buffer.identity.buffer_id) is buffer:
                del self._buffers[buffer.identity.buffer_id]

    def alloc_shared_tensor(self, shapes: Sequence[int], dtype: Any) -> Buffer:
        """Run-scoped host memory, as ``Orchestrator.alloc``."""
        return self._orch.alloc(shapes, dtype)

    def make_tensor_arg(self, tensor: Any, shapes: Sequence[int], dtype: int, *, strides: Any = None) -> Any:
        """A tensor over host memory that existed before the start; written through only where it is shared."""
        address, nbytes = host_ptr_nbytes(tensor)
        shared = bool(getattr(tensor, "is_shared", lambda: False)())
        backing = wrap_fork_inherited(
            address,
            nbytes,
            self._owner_instance_id,
            self._next_buffer_id(),
            "L3",
            access=AccessMode.READWRITE if shared else AccessMode.READ,
            backend_kind=BackendKind.FORK_SHM if shared else BackendKind.FORK_COW,
        )
        return backing.tensor(tuple(shapes), dtype, strides)

    def _alloc_scratch(self, nbytes: int) -> Buffer:
        resources = self._building_run_resources
        if resources is None:
            raise RuntimeError("Orchestrator: task submission requires an active run")
        size = max(64, (nbytes + 63) // 64 * 64)
        with self._registry_lock:
            for i, (start, length) in enumerate(self._heap_free):
                if length >= size:
                    self._heap_free[i : i + 1] = [(start + size, length - size)] if length > size else []
                    break
            else:
                raise RuntimeError(f"Orchestrator.alloc: no room for {nbytes} bytes in the heap ring")
            resources.scratch.append((start, size))
        return wrap_fork_inherited(
            self._heap_base + start,
            nbytes,
            self._owner_instance_id,
            self._next_buffer_id(),
            "L3",
            access=AccessMode.READWRITE,
            backend_kind=BackendKind.FORK_SHM,
        )

    def _free_scratch(self, resources: RunResources) -> None:
        if not resources.scratch:
            return
        with self._registry_lock:
            merged: list[tuple[int, int]] = []
            for start, length in sorted([*self._heap_free, *resources.scratch]):
                if merged and sum(merged[-1]) == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((start, length))
            self._heap_free = merged
            resources.scratch.clear()
