"""The kernels of the example ``production_decode``: partial sums of a matrix-vector product go round the ring of ranks.

The Rust form of the same kernels (the example's ``workload/kernel.rs``) tells what they do and why.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .kernels import Call, Cells

WORD = 4
ROWS_PER_CHIP = 4
_LOW = 0xFFFF_FFFF
_LONG = 0xFFFF_FFFF_FFFF_FFFF


class Exchange(NamedTuple):
    """One line of the table; offsets are bytes of the window."""

    data: int
    nbytes: int
    cells: int
    before: int
    per_dispatch: int


def _lines(call: Call) -> list[Exchange]:
    return [Exchange(*words) for words in struct.iter_unpack("<5Q", call.tensor_bytes(1).cast("B"))]


def _scramble(value: int) -> int:
    z = (value + 0x9E37_79B9_7F4A_7C15) & _LONG
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _LONG
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _LONG
    return (z ^ (z >> 31)) >> 32


def _weight(salt: int, index: int) -> int:
    mixed = ((index ^ salt) * 0x9E37_79B1) & _LOW
    return mixed ^ (mixed >> 15)


def _chunk(nbytes: int, ranks: int, at: int) -> tuple[int, int]:
    words = -(-nbytes // WORD)
    start, end = (min(words * i // ranks * WORD, nbytes) for i in (at, at + 1))
    return start, end


class _Rows:
    def __init__(self, call: Call, index: int, rank: int) -> None:
        words = call.tensor_bytes(0).cast("B").cast("I")
        rows = range(rank * ROWS_PER_CHIP, (rank + 1) * ROWS_PER_CHIP)
        self._rows = [(words[row], _scramble((index << 32) | row)) for row in rows]

    def partial(self, element: int) -> int:
        return sum(x * _weight(salt, element) for x, salt in self._rows)


def _load(view: memoryview, at: int, size: int) -> int:
    return int.from_bytes(view[at : at + size], "little")


def _fill(view: memoryview, span: tuple[int, int], word) -> None:
    """Replaces the words of a span, the last of which may be shortened; ``word(at, size)`` gives each."""
    start, end = span
    for at in range(start, end, WORD):
        size = min(WORD, end - at)
        view[at : at + size] = (word(at, size) & _LOW).to_bytes(WORD, "little")[:size]


def _ring(call: Call, cells: Cells, exchange: Exchange, rows: _Rows, earlier: int, fresh: bool) -> None:
    rank, ranks = cells.rank, cells.ranks
    writer, reader = (rank - 1) % ranks, (rank + 1) % ranks
    mine = cells.bytes(rank, exchange.data, exchange.nbytes)
    theirs = cells.bytes(reader, exchange.data, exchange.nbytes)
    base = earlier * exchange.per_dispatch + exchange.before

    def wait(nth: int) -> None:
        def come() -> int:
            # Cells wrap around, so by distance.
            distance = (cells.load(rank, exchange.cells + writer * WORD) - base - nth) & _LOW
            return 0 if distance >> 31 else 1

        call.wait(come, 1)

    for hop in range(ranks):
        if hop:
            wait(hop)

        def word(at: int, size: int, hop: int = hop) -> int:
            total = rows.partial(at // WORD)
            if hop:
                total += _load(mine, at, size)
            if fresh:
                total += _load(theirs, at, size)
            return total

        _fill(theirs, _chunk(exchange.nbytes, ranks, (rank - hop) % ranks), word)
        cells.add(reader, exchange.cells + rank * WORD, 1)
    wait(ranks)


def exchange(call: Call) -> None:
    """Runs some exchanges of one domain, ordered by signals; their results follow each other in the output."""
    output, cells = call.tensor_bytes(2).cast("B"), call.domain(0)
    first, count, epoch, fresh = (call.scalar(i) for i in range(1, 5))
    lines, at = _lines(call), 0
    for index in range(first, first + count):
        line = lines[index]
        earlier = 0 if fresh == 1 else max(epoch - 1, 0)
        _ring(call, cells, line, _Rows(call, index, cells.rank), earlier, fresh == 1)
        start, end = _chunk(line.nbytes, cells.ranks, cells.rank)
        output[at : at + end - start] = cells.bytes(cells.rank, line.data + start, end - start)
        at += max(end - start, 1)


def phase(call: Call) -> None:
    """One phase of one exchange that is ordered by runs: the same ring, one hop per run."""
    output, carry, cells = call.tensor_bytes(2).cast("B"), call.tensor_bytes(3).cast("B"), call.domain(0)
    index, hop, fresh = call.scalar(1), call.scalar(3), call.scalar(4) == 1
    line, rank, ranks = _lines(call)[index], cells.rank, cells.ranks
    arrived = cells.bytes((rank - 1) % ranks, line.data, line.nbytes)
    if hop >= ranks:
        start, end = _chunk(line.nbytes, ranks, rank)
        output[: end - start] = arrived[start:end]
        return
    if hop == 0:
        # A fresh window is zero; all of it takes part, so that a byte that is not shows up in some result.
        carry[: line.nbytes] = cells.bytes(rank, line.data, line.nbytes) if fresh else bytes(line.nbytes)
    rows = _Rows(call, index, rank)

    def word(at: int, size: int) -> int:
        total = _load(carry, at, size) + rows.partial(at // WORD)
        return total + _load(arrived, at, size) if hop else total

    _fill(carry, _chunk(line.nbytes, ranks, (rank - hop) % ranks), word)
