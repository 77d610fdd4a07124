"""The public names of the task interface."""

from __future__ import annotations

from dataclasses import dataclass

from .buffer import Buffer, Tensor
from .standin.types import (
    COMM_MAX_RANK_NUM,
    MAX_REGISTERED_CALLABLE_IDS,
    MAX_TENSOR_DIMS,
    ArgDirection,
    CallConfig,
    ChipCallable,
    CoreCallable,
    DataType,
    RuntimeEnv,
    TaskArgs,
    TensorArgType,
    WorkerType,
    arg_direction_name,
    get_dtype_name,
    get_element_size,
    scalar_to_uint64,
)

__all__ = [
    "COMM_MAX_RANK_NUM",
    "MAX_REGISTERED_CALLABLE_IDS",
    "MAX_TENSOR_DIMS",
    "ArgDirection",
    "CallConfig",
    "ChipCallable",
    "ChipDomainContext",
    "CommBufferSpec",
    "CommDomainHandle",
    "CoreCallable",
    "DataType",
    "RuntimeEnv",
    "TaskArgs",
    "Tensor",
    "TensorArgType",
    "WorkerType",
    "arg_direction_name",
    "get_dtype_name",
    "get_element_size",
    "scalar_to_uint64",
]


@dataclass
class CommBufferSpec:
    """One named slice of a window; slices stand back to back in declaration order."""

    name: str
    dtype: str
    count: int
    nbytes: int
    load_from_host: bool = False
    store_to_host: bool = False


@dataclass
class ChipDomainContext:
    """A domain as one member sees it."""

    name: str
    domain_rank: int
    domain_size: int
    device_ctx: int
    local_window_base: int
    actual_window_size: int
    buffers: dict[str, Buffer]


class CommDomainHandle:
    """One allocated domain: live, then released (no more indexing), then freed (the memory is gone)."""

    __slots__ = (
        "_domain_ranks",
        "_domain_size",
        "_freed",
        "_release_fn",
        "_released",
        "allocation_id",
        "contexts",
        "name",
        "workers",
    )

    def __init__(self, *, name, workers, contexts, allocation_id, _release_fn) -> None:
        self.name = name
        self.workers = tuple(workers)
        self.contexts: dict[int, ChipDomainContext] = dict(contexts)
        self.allocation_id = int(allocation_id)
        self._domain_size = len(self.workers)
        self._domain_ranks = {worker: rank for rank, worker in enumerate(self.workers)}
        self._release_fn = _release_fn
        self._released = False
        self._freed = False

    def __getitem__(self, chip_idx: int) -> ChipDomainContext:
        if self._released:
            raise RuntimeError(f"CommDomainHandle({self.name!r}) already released; it cannot be used any more")
        return self.contexts[chip_idx]

    @property
    def released(self) -> bool:
        return self._released

    @property
    def freed(self) -> bool:
        return self._freed

    def release(self) -> None:
        """Asks for the release; idempotent. The memory goes in the owning run's cleanup, or now if that has run."""
        if not self._released:
            self._released = True
            self._release_fn(self)

    def __enter__(self) -> CommDomainHandle:
        return self

    def __exit__(self, *_) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "freed" if self._freed else "released-pending-free" if self._released else "live"
        return f"CommDomainHandle(name={self.name!r}, workers={self.workers}, {state})"
