"""Failures on demand, for tests of what a backend does with them. They happen on the parent's side of the link."""

from __future__ import annotations

import threading
from dataclasses import dataclass

_LOCK = threading.Lock()
_ARMED: list[Fault] = []


@dataclass
class Fault:
    """The ``skip + 1``-th matching command fails, before or after its effect."""

    operation: str
    child: tuple[str, int] | None
    text: str
    after_effect: bool
    skip: int
    times: int


def inject(
    operation: str,
    *,
    chip: int | None = None,
    sub: int | None = None,
    text: str = "injected",
    after_effect: bool = False,
    skip: int = 0,
    times: int = 1,
) -> None:
    """Arms a failure of a command, on one child or, without ``chip`` and ``sub``, on any.

    Commands: ``malloc``, ``free``, ``copy_to``, ``copy_from``, ``alloc_domain``, ``release_domain``, ``register``,
    ``unregister``, ``committed_device_memory``, ``drop_import``.
    """
    child = ("chip", chip) if chip is not None else ("sub", sub) if sub is not None else None
    with _LOCK:
        _ARMED.append(Fault(operation, child, text, after_effect, skip, times))


def clear() -> None:
    """Disarms everything."""
    with _LOCK:
        _ARMED.clear()


def draw(operation: str, kind: str, index: int) -> tuple[str | None, str | None]:
    """The text of a failure ``(before, after)`` the effect of one command, or ``(None, None)``."""
    if not _ARMED:
        return None, None
    with _LOCK:
        for fault in _ARMED:
            if fault.operation != operation or fault.child not in (None, (kind, index)):
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            fault.times -= 1
            if fault.times <= 0:
                _ARMED.remove(fault)
            return (None, fault.text) if fault.after_effect else (fault.text, None)
    return None, None
