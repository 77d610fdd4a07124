"""Device memory of one chip process: resident allocations and domain windows, under made-up device addresses.

Addresses are handed out once and never again, with a gap after each, so that a stale or overrun address is always
found out. Two chips hand out the same numbers, as real chips may.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
from typing import Any

SHM_DIRECTORY = "/dev/shm"
# A window file: one header page, then one window per rank, in rank order and without gaps.
HEADER_BYTES = 4096
_PAGE = 4096
_RESIDENT_BASE = 0x1000_0000_0000
_WINDOW_BASE = 0x2000_0000_0000
_CONTEXT_BASE = 0x3000_0000_0000
# Header words that the members count up to meet each other.
_ALLOCATED, _RELEASED = 0, 4
# How long members wait for a peer that is alive, and how much longer for one that is dead.
_BARRIER_S = 120.0


class DeviceFault(Exception):
    """An address that is not mapped: the chip process dies of it."""


def dead_peer_seconds() -> float:
    """How long a collective step waits for a dead peer (the real simulation waits 120 s)."""
    return float(os.environ.get("PTO_STANDIN_DEAD_PEER_S", "0.05"))


def is_alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b") ")[2][:1] not in (b"Z", b"X", b"")
    except OSError:
        return False


def window_file_name(parent: int, nonce: int) -> str:
    """The name under /dev/shm of one domain's windows."""
    return f"simpler_{parent:08x}_{nonce:08x}"


def create_window_file(name: str, ranks: int, window: int) -> None:
    """Makes the zero-filled file behind a domain, with its space reserved. ``OSError`` where there is no room."""
    path = os.path.join(SHM_DIRECTORY, name)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, HEADER_BYTES + ranks * window)
    except OverflowError:
        unlink_window_file(name)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
    except BaseException:
        unlink_window_file(name)
        raise
    finally:
        os.close(fd)


def unlink_window_file(name: str) -> None:
    """Removes the name; nothing happens where it is gone."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(SHM_DIRECTORY, name))


class Window:
    """One domain as one member process holds it: every rank's window, mapped, and a lock over all of them."""

    def __init__(self, name: str, rank: int, ranks: int, size: int, peers: list[int]) -> None:
        self.name, self.rank, self.ranks, self.size, self.peers = name, rank, ranks, size, peers
        self.base = self.context = 0
        self._fd = os.open(os.path.join(SHM_DIRECTORY, name), os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(self._fd, HEADER_BYTES + ranks * size)
        self.bytes = memoryview(self._map)

    @contextlib.contextmanager
    def locked(self):
        """Excludes every other member process. The kernel drops it when a holder dies."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    def at(self, rank: int, offset: int, nbytes: int) -> memoryview:
        """Bytes of one rank's window."""
        if not 0 <= rank < self.ranks or offset < 0 or offset + nbytes > self.size:
            raise DeviceFault(f"rank {rank}, offset {offset}, {nbytes} bytes in windows of {self.size} bytes")
        start = HEADER_BYTES + rank * self.size + offset
        return self.bytes[start : start + nbytes]

    def meet(self, step: int, members: int, alive: Any, what: str) -> bool:
        """Waits until ``members`` processes have come here; whether this one was the last.

        Raises ``RuntimeError`` where a peer died first, and takes back this process's arrival.
        """
        with self.locked():
            count = struct.unpack_from("<I", self.bytes, step)[0] + 1
            struct.pack_into("<I", self.bytes, step, count)
        last = count >= members
        deadline = time.monotonic() + _BARRIER_S
        dead_since = None
        pause = 0.0001
        while count < members:
            alive()
            now = time.monotonic()
            if dead_since is None and not all(is_alive(pid) for pid in self.peers):
                dead_since = now
            if now > deadline or (dead_since is not None and now >= dead_since + dead_peer_seconds()):
                with self.locked():
                    count = struct.unpack_from("<I", self.bytes, step)[0]
                    if count < members:
                        struct.pack_into("<I", self.bytes, step, count - 1)
                        raise RuntimeError(f"{what}: a peer did not reach the barrier ({count} of {members} did)")
                break
            time.sleep(pause)
            pause = min(pause * 2, 0.002)
            count = struct.unpack_from("<I", self.bytes, step)[0]
        return last

    def close(self) -> None:
        self.bytes.release()
        self._map.close()
        os.close(self._fd)


class Device:
    """All memory of one chip."""

    def __init__(self, alive: Any) -> None:
        self._alive = alive
        self._resident: dict[int, tuple[mmap.mmap | None, memoryview]] = {}
        self._windows: dict[int, Window] = {}
        self._next = {_RESIDENT_BASE: _RESIDENT_BASE, _WINDOW_BASE: _WINDOW_BASE, _CONTEXT_BASE: _CONTEXT_BASE}

    def _address(self, space: int, nbytes: int) -> int:
        address = self._next[space]
        self._next[space] += (nbytes + _PAGE - 1) // _PAGE * _PAGE + _PAGE
        return address

    # Resident memory -------------------------------------------------------------------------------------------

    def malloc(self, nbytes: int) -> int:
        mapping = mmap.mmap(-1, nbytes) if nbytes else None
        address = self._address(_RESIDENT_BASE, nbytes)
        self._resident[address] = (mapping, memoryview(mapping if mapping is not None else bytearray()))
        return address

    def free(self, address: int) -> None:
        mapping, view = self._resident.pop(address)
        view.release()
        if mapping is not None:
            mapping.close()

    def committed(self) -> int:
        return sum(view.nbytes for _, view in self._resident.values())

    # Windows ---------------------------------------------------------------------------------------------------

    def allocate_window(
        self, allocation: int, name: str, rank: int, ranks: int, size: int, peers: list[int]
    ) -> tuple[int, int]:
        """Maps a window together with its peers; ``(device context, window base)``."""
        window = Window(name, rank, ranks, size, peers)
        try:
            window.meet(_ALLOCATED, ranks, self._alive, f"allocating domain {allocation}")
        except BaseException:
            window.close()
            raise
        window.base = self._address(_WINDOW_BASE, size)
        window.context = self._address(_CONTEXT_BASE, 1)
        self._windows[allocation] = window
        return window.context, window.base

    def release_window(self, allocation: int, members: int) -> None:
        """Gives a window up together with its peers; the last of them removes the name.

        A failure leaves the window mapped and named: nobody can say what a peer still does with it.
        """
        window = self._windows[allocation]
        if window.meet(_RELEASED, members, self._alive, f"releasing domain {allocation}"):
            unlink_window_file(window.name)
        del self._windows[allocation]
        window.close()

    def remove_names(self) -> None:
        """For the end of the process: what is still mapped loses its name."""
        for window in self._windows.values():
            unlink_window_file(window.name)

    def domain(self, context: int) -> Window:
        """The domain whose device context this is."""
        for window in self._windows.values():
            if window.context == context:
                return window
        raise DeviceFault(f"no communication context at {context:#x}")

    # Any address -----------------------------------------------------------------------------------------------

    def view(self, address: int, nbytes: int) -> memoryview:
        """Bytes at a device address."""
        for base, (_, memory) in self._resident.items():
            if base <= address and address + nbytes <= base + memory.nbytes:
                return memory[address - base : address - base + nbytes]
        for window in self._windows.values():
            if window.base <= address and address + nbytes <= window.base + window.size:
                return window.at(window.rank, address - window.base, nbytes)
        raise DeviceFault(f"{nbytes} bytes at {address:#x}")
