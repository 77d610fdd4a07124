"""Submissions on the host's side: what a run owns, its handle, and the lock that serialises them."""

from __future__ import annotations

import contextlib
import enum
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..task_interface import CommDomainHandle
from .types import CanonicalIdentity


class State(enum.Enum):
    """Where a worker is in its life."""

    NEW = "new"
    INITIALIZING = "initializing"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


class SharedExclusive:
    """A lock for submissions (alone) and for control outside runs (together). Not re-entrant, as the original."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shared = 0
        self._exclusive = False
        self._queued = 0

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._queued += 1
            try:
                while self._exclusive or self._shared:
                    self._changed.wait()
            finally:
                self._queued -= 1
            self._exclusive = True
        try:
            yield
        finally:
            with self._changed:
                self._exclusive = False
                self._changed.notify_all()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            while self._exclusive or self._queued:
                self._changed.wait()
            self._shared += 1
        try:
            yield
        finally:
            with self._changed:
                self._shared -= 1
                self._changed.notify_all()


@dataclass
class RunResources:
    """What a run owns on the host's side until its cleanup."""

    live_domains: dict[str, CommDomainHandle] = field(default_factory=dict)
    pending_release_domains: list[CommDomainHandle] = field(default_factory=list)
    touched_identities: set[CanonicalIdentity] = field(default_factory=set)
    scratch: list[tuple[int, int]] = field(default_factory=list)
    retained: set[str] = field(default_factory=set)
    # Once true, a release has no fence left to wait for. Under domain_lock, as live_domains.
    retired: bool = False
    domain_lock: threading.Lock = field(default_factory=threading.Lock)
    # This run's cleanup reaches the device, so the next submission waits for it. Set, never cleared.
    requires_ordered_cleanup: bool = False


@dataclass
class Retained:
    """A domain under the public retention call."""

    request: Any
    handle: CommDomainHandle
    runs: list[RunResources] = field(default_factory=list)


class RunHandle:
    """Completion of one submission. Whoever waits first past the fence does the run's cleanup."""

    def __init__(self, worker: Any, run_id: int, keepalive: Any, resources: RunResources) -> None:
        self._worker = worker
        self._run_id = run_id
        self._keepalive = keepalive
        self._resources = resources
        self._changed = threading.Condition()
        self._waiting = False
        self._terminal = False
        self._error: BaseException | None = None
        self._cleanup_published = False

    @property
    def done(self) -> bool:
        """Whether the fence has passed; the cleanup may still be owed."""
        with self._changed:
            if self._terminal:
                return True
            if self._waiting:
                return False
        return self._worker._native_of_runs.run_done(self._run_id)

    def wait(self, timeout: float | None = None) -> None:
        """Waits; raises the run's outcome, the same object every time, or ``TimeoutError``."""
        deadline = None
        if timeout is not None:
            seconds = float(timeout)
            if seconds < 0 or not math.isfinite(seconds):
                raise ValueError("RunHandle timeout must be a non-negative finite number of seconds")
            deadline = time.monotonic() + seconds

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        with self._changed:
            while self._waiting and not self._terminal:
                remaining = left()
                if remaining == 0.0:
                    raise TimeoutError("RunHandle.wait() timed out")
                self._changed.wait(remaining)
            if not self._terminal:
                self._waiting = True
        if not self._terminal:
            self._finish(left())
        if self._error is not None:
            raise self._error

    result = wait

    def _finish(self, timeout: float | None) -> None:
        failure: BaseException | None = None
        try:
            try:
                if not self._worker._native_of_runs.wait_run(self._run_id, timeout):
                    raise TimeoutError("RunHandle.wait() timed out")
            except RuntimeError as error:
                failure = error
        except BaseException:
            with self._changed:
                self._waiting = False
                self._changed.notify_all()
            raise
        try:
            outcome = self._worker._finalize_run_handle(self, self._run_id, failure)
        except BaseException as error:
            outcome = error
        with self._changed:
            self._error = outcome
            self._keepalive = None
            self._terminal = True
            self._waiting = False
            self._changed.notify_all()

    def _wait_quietly(self) -> None:
        with contextlib.suppress(Exception):
            self.wait()
