"""The graph builder that a submission's callback gets."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from .buffer import AccessMode, AddressSpace, BackendKind, Buffer
from .callable_identity import LOCAL_CHIP, LOCAL_PYTHON, CallableHandle
from .standin import wants_public
from .standin.types import CallConfig, ChipCallable, TaskArgs, get_element_size
from .task_interface import CommBufferSpec, CommDomainHandle

_CALLBACKS = threading.local()


class _Frame:
    """One callback that this thread is inside."""

    __slots__ = ("run_id", "submitted", "worker")

    def __init__(self, worker: Any, run_id: int) -> None:
        self.worker, self.run_id, self.submitted = worker, run_id, False


@contextlib.contextmanager
def callback_frame(worker: Any, run_id: int) -> Iterator[None]:
    """Marks this thread as building a run of this worker."""
    frames = _CALLBACKS.__dict__.setdefault("frames", [])
    frames.append(_Frame(worker, run_id))
    try:
        yield
    finally:
        frames.pop()


def frame_of(worker: Any) -> _Frame | None:
    """The innermost callback of this worker on this thread."""
    for frame in reversed(_CALLBACKS.__dict__.get("frames", ())):
        if frame.worker is worker:
            return frame
    return None


@contextlib.contextmanager
def direct_control(worker: Any, api: str) -> Iterator[None]:
    """Orders one control command: in a callback before its first task and at the head of the queue, else alone."""
    frame = frame_of(worker)
    if frame is None:
        with worker._control_reservation(api):
            yield
        return
    if frame.submitted:
        raise RuntimeError(
            f"{api}: direct device control cannot follow a task submission in the same run; do all control first"
        )
    worker._require_no_ordered_cleanup_failure(api)
    worker._native.await_head(frame.run_id)
    yield


def _worker_id(value: Any, argument: str) -> int:
    refusal = f"{argument} must be an integer NEXT_LEVEL worker id"
    if isinstance(value, bool):
        raise TypeError(refusal)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(refusal) from None
    if number < 0:
        raise ValueError(f"{argument} must be a non-negative NEXT_LEVEL worker id")
    return number


class Orchestrator:
    """Valid inside the callback of ``Worker.submit`` only."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    # Tasks -----------------------------------------------------------------------------------------------------

    def _digest(self, handle: Any, kind: str, namespace: str) -> bytes:
        if isinstance(handle, ChipCallable):
            raise TypeError(f"{kind} now takes a CallableHandle, not a ChipCallable: register it first")
        if not isinstance(handle, CallableHandle):
            raise TypeError(f"{kind} expects a CallableHandle returned by Worker.register")
        self._worker._resolve(handle)
        if handle.target_namespace != namespace:
            raise TypeError(f"cannot run {handle.target_namespace}; expected {namespace} for {handle.hashid}")
        return handle.digest

    def _submit(self, members: Sequence[tuple[int | None, bytes, TaskArgs]]) -> None:
        worker = self._worker
        resources = worker._building_run_resources
        if resources is not None:
            for _, _, args in members:
                resources.touched_identities.update(args.tensor(i).buffer.identity for i in range(args.tensor_count()))
        worker._require_no_ordered_cleanup_failure("submit")
        frame = frame_of(worker)
        if frame is not None:
            frame.submitted = True
        run_id = worker._building_run_id
        if run_id is None:
            raise RuntimeError("Orchestrator: task submission requires an active run")
        chips = len(worker._native.chips)
        for chip, _, _ in members:
            if chip is not None and chip >= chips:
                raise ValueError(f"Orchestrator: target worker {chip} is not a registered worker")
        for _, _, args in members:
            args.validate()
        worker._native.submit_task(run_id, members)

    def submit_next_level(self, callable_handle, args: TaskArgs, config: CallConfig | None = None, *, worker: int):
        """One task on one chip."""
        chip = _worker_id(worker, "worker")
        digest = self._digest(callable_handle, "orch.submit_next_level", LOCAL_CHIP)
        if not isinstance(args, TaskArgs):
            raise TypeError("NEXT_LEVEL submit expects TaskArgs")
        self._worker._check_device_arguments(args, chip, "submit_next_level")
        self._submit([(chip, digest, args)])

    def submit_next_level_group(self, callable_handle, args_list: list, config: CallConfig | None = None, *, workers):
        """One node with a member on each of several chips."""
        chips = [_worker_id(value, "workers entries") for value in workers]
        if len(chips) != len(args_list):
            raise ValueError("workers length must match args_list length")
        if len(set(chips)) != len(chips):
            raise ValueError("workers must not contain duplicate NEXT_LEVEL worker ids")
        digest = self._digest(callable_handle, "orch.submit_next_level_group", LOCAL_CHIP)
        for args in args_list:
            if not isinstance(args, TaskArgs):
                raise TypeError("NEXT_LEVEL submit expects TaskArgs")
        if not args_list:
            raise ValueError("Orchestrator: args_list must not be empty")
        for chip, args in zip(chips, args_list):
            self._worker._check_device_arguments(args, chip, "submit_next_level_group")
        self._submit([(chip, digest, args) for chip, args in zip(chips, args_list)])

    def submit_sub(self, callable_handle, args: TaskArgs | None = None):
        """One task on any sub worker."""
        self.submit_sub_group(callable_handle, [TaskArgs() if args is None else args], _kind="orch.submit_sub")

    def submit_sub_group(self, callable_handle, args_list: list, *, _kind: str = "orch.submit_sub_group"):
        """One node with several members on sub workers."""
        digest = self._digest(callable_handle, _kind, LOCAL_PYTHON)
        for args in args_list:
            if not isinstance(args, TaskArgs):
                raise TypeError("SUB submit expects TaskArgs")
            for i in range(args.tensor_count()):
                if args.tensor(i).buffer.address_space == AddressSpace.DEVICE:
                    raise ValueError(f"{_kind}: argument {i} is a DEVICE-space tensor; sub workers run on the host")
        if not args_list:
            raise ValueError("Orchestrator: args_list must not be empty")
        self._submit([(None, digest, args) for args in args_list])

    # Domains ---------------------------------------------------------------------------------------------------

    def allocate_domain(
        self, *, name: str, workers: Sequence[int], window_size: int, buffers: Sequence[CommBufferSpec] = ()
    ) -> CommDomainHandle:
        """A new domain over ``workers``, in rank order; freed after this run unless somebody takes it over."""
        with direct_control(self._worker, "Orchestrator.allocate_domain"):
            return self._worker._allocate_domain(
                name=str(name),
                workers=tuple(int(w) for w in workers),
                window_size=int(window_size),
                buffers=list(buffers),
            )

    def release_domain(self, handle: CommDomainHandle) -> None:
        handle.release()

    # Memory ----------------------------------------------------------------------------------------------------

    def alloc_child_tensor(self, worker_id: int, shapes: Sequence[int], dtype) -> Buffer:
        return self._worker.alloc_child_tensor(int(worker_id), tuple(shapes), dtype)

    def free(self, handle: Buffer) -> None:
        self._worker.free(handle)

    def copy_to(self, dst: Buffer, src) -> None:
        self._worker.copy_to(dst, src)

    def copy_from(self, dst, src: Buffer) -> None:
        self._worker.copy_from(dst, src)

    def committed_device_memory(self, worker_id: int) -> int:
        with direct_control(self._worker, "Orchestrator.committed_device_memory"):
            return self._worker._committed_device_memory(int(worker_id))

    def alloc(self, shape: Sequence[int], dtype) -> Buffer:
        """Host memory for passing results between this run's tasks; gone after the run, dirty when new."""
        nbytes = get_element_size(dtype)
        for n in shape:
            nbytes *= int(n)
        return self._worker._alloc_scratch(nbytes)

    # Scopes ----------------------------------------------------------------------------------------------------

    def _scope(self, step: int) -> None:
        if self._worker._building_run_id is None:
            raise RuntimeError("Orchestrator: task submission requires an active run")
        self._worker._native.scope(step)

    def scope_begin(self) -> None:
        self._scope(1)

    def scope_end(self) -> None:
        self._scope(-1)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Orchestrator]:
        self.scope_begin()
        try:
            yield self
        finally:
            self.scope_end()


def get_or_allocate_domain(
    self: Orchestrator,
    *,
    name: str,
    workers: Sequence[int],
    window_size: int,
    buffers: Sequence[CommBufferSpec] = (),
    retain_after_run: bool = False,
) -> CommDomainHandle:
    """The retained domain of that name, or a new one; a reuse must ask for the same thing.

    Either way the domain belongs to this run's fence. It stays allocated after a successful run; after a failed one
    it is freed, once no other run that it belongs to is in flight.
    """
    worker = self._worker
    worker._require_building("get_or_allocate_domain")
    request = (
        tuple(int(w) for w in workers),
        int(window_size),
        tuple((b.name, str(b.dtype), int(b.count), int(b.nbytes)) for b in buffers),
    )
    known = worker._retained.get(str(name))
    if known is not None and not known.handle.freed:
        if known.request != request:
            raise ValueError(
                f"get_or_allocate_domain: {name!r} is retained with another configuration: {known.request} != {request}"
            )
        if known.handle.released:
            raise RuntimeError(f"get_or_allocate_domain: {name!r} was released")
        handle = known.handle
    else:
        handle = self.allocate_domain(name=name, workers=workers, window_size=window_size, buffers=buffers)
        if not retain_after_run:
            return handle
    worker._retain(str(name), request, handle)
    return handle


if wants_public():
    Orchestrator.get_or_allocate_domain = get_or_allocate_domain

__all__ = ["AccessMode", "BackendKind", "Orchestrator"]
