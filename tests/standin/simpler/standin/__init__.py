"""What the stand-in offers beyond Simpler's own names: kernels by name, switches, failures on demand.

Environment, read when a worker is made or a child starts:

==========================  =========================================================================================
``PTO_STANDIN_PUBLIC=1``    the orchestrator has ``get_or_allocate_domain`` (also: call :func:`public`)
``PTO_STANDIN_DEPTH``       runs in flight: 1 or 2 (default 2)
``PTO_STANDIN_DEAD_PEER_S`` how long a collective step waits for a dead peer (default 0.05; Simpler: 120)
``PTO_STANDIN_CLOSE_S``     the budget of ``close`` for work in flight (default 10)
``PTO_STANDIN_HANG_INIT``   index of the chip whose start never ends
``PTO_STANDIN_LENIENT=1``   losing an open worker does not end the process
==========================  =========================================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from .faults import clear, inject
from .kernels import KERNELS, SIGNATURES
from .types import ArgDirection, ChipCallable

__all__ = ["ChipKernel", "clear", "descriptor", "inject", "kernel_names", "load", "public"]


def kernel_names() -> list[str]:
    """The portable kernels that chips know."""
    return sorted(KERNELS)


def descriptor(name: str, tensors: Sequence[str] | None = None, scalars: int | None = None) -> bytes:
    """The content of a ``*.standin.json`` file: an artefact that names a portable kernel.

    ``tensors`` (``IN``, ``OUT``, ``INOUT`` in order) and ``scalars`` default to what the kernel takes.
    """
    known_tensors, known_scalars = SIGNATURES.get(name, ([], 0))
    described = {
        "simpler_standin": 1,
        "kernel": name,
        "tensors": list(known_tensors if tensors is None else tensors),
        "scalars": known_scalars if scalars is None else scalars,
    }
    return json.dumps(described, sort_keys=True).encode()


def load(data: bytes) -> ChipCallable:
    """A chip callable from the content of a ``*.standin.json`` file."""
    described = json.loads(data)
    if described.get("simpler_standin") != 1:
        raise ValueError("not an artefact of the stand-in")
    return ChipCallable.build(
        signature=[ArgDirection[d] for d in described["tensors"]],
        func_name=described["kernel"],
        binary=bytes(data),
        children=[],
    )


def ChipKernel(name: str, tensors: Sequence[str] | None = None, scalars: int | None = None) -> ChipCallable:
    """A chip callable that runs the portable kernel called ``name``."""
    return load(descriptor(name, tensors, scalars))


def public() -> None:
    """Gives the orchestrator the public retention call. Usable as a prelude: ``simpler.standin:public``."""
    from ..orchestrator import Orchestrator, get_or_allocate_domain

    Orchestrator.get_or_allocate_domain = get_or_allocate_domain


def wants_public() -> bool:
    """Whether the environment asks for the public retention call."""
    return os.environ.get("PTO_STANDIN_PUBLIC") == "1"
