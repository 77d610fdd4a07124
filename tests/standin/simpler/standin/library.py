"""The portable kernel library by import path: ``simpler.standin.library:pto_store`` and so on.

Names of chip kernels give chip callables, made on demand. The functions for host-side sub-workers are plain.
"""

from __future__ import annotations

import os
import time
from typing import Any

from . import ChipKernel
from .kernels import KERNELS, SIGNATURES


def __getattr__(name: str) -> Any:
    if name in KERNELS:
        return ChipKernel(name, *SIGNATURES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _words(args: Any, i: int) -> memoryview:
    tensor = args[i]
    count = 1
    for n in tensor.shapes:
        count *= n
    return tensor.buffer[: 4 * count].cast("B").cast("i")


def _low_word(value: int) -> int:
    return (value + 0x8000_0000) % 0x1_0000_0000 - 0x8000_0000


def pto_gate(args: Any) -> None:
    """In and out, two words: the second becomes 1; waits until the first is not 0."""
    words, parent, pause = _words(args, 0), os.getppid(), 0.0001
    words[1] = 1
    while words[0] == 0 and os.getppid() == parent:
        time.sleep(pause)
        pause = min(pause * 1.5, 0.002)


def pto_sub_add(args: Any) -> None:
    """In and out ``data``; scalar ``v``. Adds v to each element."""
    words, amount = _words(args, 0), args.scalar(0)
    for i in range(len(words)):
        words[i] = _low_word(words[i] + amount)


def pto_sub_fail(args: Any) -> None:
    """Scalar ``code``. Fails."""
    raise RuntimeError(f"failed on purpose with code {args.scalar(0)}")
