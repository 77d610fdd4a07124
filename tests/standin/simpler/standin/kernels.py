"""The portable kernels: what a chip task can run here.

A kernel is a function of a :class:`Call`. Its argument list is the one that the kernels of the same name take on
the project's other backends. Words in windows are 32-bit cells; adding to one is atomic across the chip processes,
and waiting for one gives way instead of spinning.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import time
from collections.abc import Callable
from typing import Any

from . import decode
from .memory import Device, DeviceFault, Window
from .types import AccessMode, BackendKind

# The codes under which the runtime reports a kernel's own failure and one stopped by the watchdog.
FAILED_ON_PURPOSE = -9
NO_PROGRESS = -100

_FORMATS = {0: "f", 2: "i", 3: "h", 4: "b", 5: "B", 7: "q", 8: "Q", 9: "H", 10: "I"}


class KernelFailure(Exception):
    """A failed task; ends the chip's run lane."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Cells:
    """32-bit cells of a domain, for one member."""

    def __init__(self, window: Window, call: Call) -> None:
        self._window, self._call = window, call
        self.rank, self.ranks = window.rank, window.ranks

    def load(self, rank: int, offset: int) -> int:
        return struct.unpack("<i", self._window.at(rank, offset, 4))[0]

    def store(self, rank: int, offset: int, value: int) -> None:
        cell = self._window.at(rank, offset, 4)
        with self._window.locked():
            struct.pack_into("<i", cell, 0, _wrapped(value))

    def add(self, rank: int, offset: int, amount: int) -> int:
        """Adds and returns what was there before."""
        cell = self._window.at(rank, offset, 4)
        with self._window.locked():
            before = struct.unpack_from("<i", cell)[0]
            struct.pack_into("<i", cell, 0, _wrapped(before + amount))
        return before

    def wait(self, rank: int, offset: int, bound: int) -> int:
        """Waits until the cell is at least ``bound``; what it then held."""
        return self._call.wait(lambda: self.load(rank, offset), bound)

    def bytes(self, rank: int, offset: int, nbytes: int) -> memoryview:
        return self._window.at(rank, offset, nbytes)


def _wrapped(value: int) -> int:
    return (value + 0x8000_0000) % 0x1_0000_0000 - 0x8000_0000


class Call:
    """One task as its kernel sees it."""

    def __init__(self, device: Device, imports: Any, tensors: Any, scalars: Any, alive: Callable[[], None]) -> None:
        self._device, self._imports, self._tensors, self._scalars = device, imports, tensors, scalars
        self._alive = alive
        self._limit = float(os.environ.get("SIMPLER_SCHEDULER_TIMEOUT_MS", "10000")) / 1000

    def _entry(self, values: Any, i: int) -> Any:
        # Nobody counts arguments before a real kernel reads past them.
        if i >= len(values):
            raise DeviceFault(f"argument {i} of {len(values)}")
        return values[i]

    def tensor_bytes(self, i: int) -> memoryview:
        """The bytes that a dense tensor argument spans."""
        wire = self._entry(self._tensors, i)
        (_, kind, _, _, body), offset, shapes, strides, dtype = wire
        size = _FORMATS_SIZE[dtype]
        nbytes = (sum((n - 1) * s for n, s in zip(shapes, strides)) + 1) * size
        if kind in (BackendKind.DEVICE_MALLOC, BackendKind.VMM_WINDOW):
            return self._device.view(int.from_bytes(body, "little") + offset, nbytes)
        return self._imports.view(wire[0])[offset : offset + nbytes]

    def tensor(self, i: int) -> memoryview:
        """A tensor argument as its elements."""
        dtype = self._entry(self._tensors, i)[4]
        view = self.tensor_bytes(i)
        if dtype not in _FORMATS:
            raise KernelFailure(FAILED_ON_PURPOSE)
        try:
            return view.cast(_FORMATS[dtype])
        except TypeError:
            return view

    def words(self, i: int) -> memoryview:
        """A tensor argument as 32-bit signed words."""
        return self.tensor_bytes(i).cast("B").cast("i")

    def scalar(self, i: int) -> int:
        return self._entry(self._scalars, i)

    def signed(self, i: int) -> int:
        value = self.scalar(i)
        return value - (1 << 64) if value >> 63 else value

    def domain(self, i: int) -> Cells:
        """The domain whose device context is scalar ``i``."""
        return Cells(self._device.domain(self.scalar(i)), self)

    def host_word(self, i: int) -> ctypes.c_int32:
        """A word of host memory whose address is scalar ``i``: memory that was shared before the start."""
        return ctypes.c_int32.from_address(self.scalar(i))

    def wait(self, read: Callable[[], int], bound: int) -> int:
        """Waits until ``read`` gives at least ``bound``; the watchdog ends a wait that nothing ends."""
        deadline = time.monotonic() + self._limit
        pause = 0.0001
        while True:
            value = read()
            if value >= bound:
                return value
            self._alive()
            if time.monotonic() > deadline:
                raise KernelFailure(NO_PROGRESS)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.002)


_FORMATS_SIZE = {0: 4, 1: 2, 2: 4, 3: 2, 4: 1, 5: 1, 6: 2, 7: 8, 8: 8, 9: 2, 10: 4, 12: 1, 13: 1, 14: 1}

KERNELS: dict[str, Callable[[Call], None]] = {}
SIGNATURES: dict[str, tuple[list[str], int]] = {}


def kernel(tensors: list[str], scalars: int) -> Callable[[Callable[[Call], None]], Callable[[Call], None]]:
    """Enters a function into the table of kernels, with the signature that it is normally registered with."""

    def enter(function: Callable[[Call], None]) -> Callable[[Call], None]:
        KERNELS[function.__name__] = function
        SIGNATURES[function.__name__] = (tensors, scalars)
        return function

    return enter


def _low_word(value: int) -> int:
    """The low 32 bits of a scalar, signed."""
    return _wrapped(value & 0xFFFF_FFFF)


@kernel(["OUT"], 1)
def pto_store(call: Call) -> None:
    """Output ``out``; scalar ``v``. Element i becomes v + i."""
    out, value = call.words(0), _low_word(call.scalar(0))
    for i in range(len(out)):
        out[i] = _wrapped(value + i)


@kernel(["INOUT"], 1)
def pto_add(call: Call) -> None:
    """In and out ``data``; scalar ``v``. Adds v to each element."""
    data, amount = call.words(0), _low_word(call.scalar(0))
    for i in range(len(data)):
        data[i] = _wrapped(data[i] + amount)


@kernel(["IN", "OUT"], 0)
def pto_copy(call: Call) -> None:
    """Input and output. Copies the first onto the second."""
    source, out = call.tensor_bytes(0), call.tensor_bytes(1)
    if source.nbytes > out.nbytes:
        raise DeviceFault(f"{source.nbytes} bytes into {out.nbytes}")
    out[: source.nbytes] = source


def _signal(cells: Cells, offset: int) -> None:
    for rank in range(cells.ranks):
        if rank != cells.rank:
            cells.add(rank, offset, cells.rank + 1)


@kernel(["INOUT"], 2)
def pto_signal(call: Call) -> None:
    """The signal buffer; scalars ``context, offset``. Rank r adds r + 1 to the cell of every other rank."""
    call.tensor(0)
    _signal(call.domain(0), call.scalar(1))


@kernel(["OUT"], 3)
def pto_await(call: Call) -> None:
    """Output ``out``; scalars ``context, offset, threshold``. Waits for the own cell, stores what it then held."""
    cells = call.domain(0)
    call.words(0)[0] = cells.wait(cells.rank, call.scalar(1), _low_word(call.scalar(2)))


@kernel(["INOUT", "OUT"], 3)
def pto_handshake(call: Call) -> None:
    """The signal buffer and output ``out``; scalars ``context, offset, threshold``. Signals, then awaits."""
    cells, offset = call.domain(0), call.scalar(1)
    _signal(cells, offset)
    call.words(1)[0] = cells.wait(cells.rank, offset, _low_word(call.scalar(2)))


@kernel(["OUT"], 3)
def pto_peek(call: Call) -> None:
    """Output ``out``; scalars ``context, rank, offset``. Reads as much of that rank's window."""
    out = call.tensor_bytes(0)
    out[:] = call.domain(0).bytes(call.scalar(1), call.scalar(2), out.nbytes)


@kernel(["OUT"], 1)
def pto_rank(call: Call) -> None:
    """Output ``out``; scalar ``context``. Stores the own rank and the number of ranks."""
    out, cells = call.words(0), call.domain(0)
    out[0], out[1] = cells.rank, cells.ranks


@kernel([], 1)
def pto_fail(call: Call) -> None:
    """Scalar ``code``. Fails."""
    call.scalar(0)
    raise KernelFailure(FAILED_ON_PURPOSE)


# Beyond the portable set ---------------------------------------------------------------------------------------


@kernel(["IN", "OUT"], 3)
def allreduce(call: Call) -> None:
    """Input and output; scalars ``payload offset, arrivals offset, context``. The sum over all ranks, fresh window."""
    _allreduce(call, 0)


@kernel(["IN", "OUT"], 4)
def allreduce_from(call: Call) -> None:
    """The same in a kept window; a fourth scalar tells how many arrivals earlier dispatches have left."""
    _allreduce(call, call.scalar(3))


def _allreduce(call: Call, before: int) -> None:
    source, out, cells = call.words(0), call.words(1), call.domain(2)
    payload, arrivals = call.scalar(0), call.scalar(1)
    nbytes = source.nbytes
    cells.bytes(cells.rank, payload, nbytes)[:] = source.cast("B")
    for rank in range(cells.ranks):
        cells.add(rank, arrivals, 1)
    cells.wait(cells.rank, arrivals, before + cells.ranks)
    parts = [cells.bytes(rank, payload, nbytes).cast("i") for rank in range(cells.ranks)]
    for i in range(len(source)):
        out[i] = _wrapped(sum(part[i] for part in parts))


@kernel(["IN", "IN", "OUT"], 5)
def decode_exchange(call: Call) -> None:
    """Input, table and output; scalars ``context, first, exchanges, epoch, fresh``. See :mod:`.decode`."""
    decode.exchange(call)


@kernel(["IN", "IN", "OUT", "INOUT"], 5)
def decode_phase(call: Call) -> None:
    """Input, table, output and carry; scalars ``context, first, exchanges, phase, fresh``. See :mod:`.decode`."""
    decode.phase(call)


@kernel(["OUT"], 1)
def pto_wait_cell(call: Call) -> None:
    """Output ``out``; scalar: address of a host word. Waits until it is at least 1, stores it."""
    word = call.host_word(0)
    call.words(0)[0] = call.wait(lambda: word.value, 1)


@kernel(["OUT"], 0)
def crash(call: Call) -> None:
    """Ends the chip process by a segmentation fault."""
    raise DeviceFault("crashed on purpose")


@kernel([], 0)
def pto_exit(call: Call) -> None:
    """Ends the chip process by a kill."""
    os.kill(os.getpid(), signal.SIGKILL)


__all__ = ["KERNELS", "SIGNATURES", "AccessMode", "Call", "Cells", "KernelFailure", "kernel"]
