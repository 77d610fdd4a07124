"""``Worker``: life cycle and submissions, from the host's side. Its other parts live in ``simpler.standin``."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from .orchestrator import Orchestrator, callback_frame
from .standin.callables import Callables
from .standin.child import chip_body, sub_body
from .standin.domains import Domains
from .standin.hostmemory import HEAP_BYTES, Memory
from .standin.native import Cancelled, Native
from .standin.runs import RunHandle, RunResources, SharedExclusive, State
from .standin.types import CallConfig, ChipCallable
from .task_interface import CommDomainHandle

PLATFORMS = ("a2a3", "a2a3sim", "a5", "a5sim")
RUNTIMES = ("host_build_graph", "tensormap_and_ringbuffer")
_STARTUP_S = 300.0
_CANCEL_S = 60.0
_REAP_S = 60.0
_CLOSE_S = "10"

_RESERVED = threading.local()


class _Attempt:
    """One ``close`` under way or done."""

    def __init__(self) -> None:
        self.done = False
        self.error: BaseException | None = None
        self.retryable = False


_OPEN: weakref.WeakSet[Worker] = weakref.WeakSet()


def _lost(what: str) -> None:
    """The real process dies of this by a segmentation fault; here it says why first."""
    os.write(2, f"simpler stand-in: {what}\n".encode())
    if os.environ.get("PTO_STANDIN_LENIENT") != "1":
        os.abort()


def _at_exit() -> None:
    for worker in list(_OPEN):
        if worker._pid == os.getpid() and worker._native is not None:
            sys.stderr.flush()
            _lost("the interpreter ends while a Worker is open")


atexit.register(_at_exit)


class Worker(Callables, Memory, Domains):
    """A host worker over forked chip and sub processes (level 3)."""

    def __init__(self, level: int, **config: Any) -> None:
        timeout = float(config.get("startup_timeout_s", _STARTUP_S))
        if timeout <= 0 or not math.isfinite(timeout):
            raise ValueError("Worker startup_timeout_s must be a positive finite number of seconds")
        Callables.__init__(self)
        Memory.__init__(self)
        Domains.__init__(self)
        self.level = level
        self._config = config
        self._startup_timeout_s = timeout
        self._pid = os.getpid()
        self._state = State.NEW
        self._changed = threading.Condition(threading.RLock())
        self._cancel = False
        self._startup_error: BaseException | None = None
        self._init_owner_thread: threading.Thread | None = None
        self._active = 0
        self._leases: dict[int, int] = {}
        self._attempt: _Attempt | None = None
        # Submissions.
        self._submit_mu = SharedExclusive()
        self._accepted_run_handles: set[RunHandle] = set()
        self._building_run_resources: RunResources | None = None
        self._building_run_id: int | None = None
        self._ordered_cleanup_error: BaseException | None = None
        # The process tree; None before init and after teardown.
        self._native: Native | None = None
        self._native_of_runs: Any = None
        self._orch: Orchestrator | None = None

    def __del__(self) -> None:
        if getattr(self, "_native", None) is not None and self._pid == os.getpid():
            _lost("a Worker that is not closed was collected")

    # Life cycle ------------------------------------------------------------------------------------------------

    @property
    def _chip_pids(self) -> list[int]:
        native = self._native or self._starting
        return [] if native is None else [c.pid for c in native.chips]

    @property
    def _sub_pids(self) -> list[int]:
        native = self._native or self._starting
        return [] if native is None else [c.pid for c in native.subs]

    @property
    def live_domains(self) -> dict[str, CommDomainHandle]:
        return dict(self._live_domains)

    @contextlib.contextmanager
    def _lease(self, api: str) -> Iterator[None]:
        """Admits one operation on a READY worker; ``close`` waits for it."""
        me = threading.get_ident()
        with self._changed:
            if self._state is not State.READY:
                raise RuntimeError(f"Worker.{api}: requires an initialized (READY) worker") from self._startup_error
            self._require_no_ordered_cleanup_failure(f"{api}")
            self._active += 1
            self._leases[me] = self._leases.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._leases[me] -= 1
                if not self._leases[me]:
                    del self._leases[me]
                self._changed.notify_all()

    def _require_no_ordered_cleanup_failure(self, api: str) -> None:
        if self._ordered_cleanup_error is not None:
            raise RuntimeError(
                f"Worker.{api}: a prior run's ordered cleanup failed, so device state is unreclaimed and nothing "
                "more is admitted; close() it"
            ) from self._ordered_cleanup_error

    def init(self, prewarm_config: CallConfig | None = None) -> None:
        """Forks the children and waits until all are ready."""
        if prewarm_config is not None:
            prewarm_config.validate()
        with self._changed:
            if self._state is State.INITIALIZING:
                raise RuntimeError("Worker.init() is already in progress")
            if self._state is State.READY:
                raise RuntimeError("Worker already initialized")
            if self._state is State.FAILED:
                raise RuntimeError("Worker startup failed; close this Worker and create a new one")
            if self._state is State.CLOSED:
                raise RuntimeError("Worker is closed; create a new Worker")
            self._check_targets()
            self._init_owner_thread = threading.current_thread()
            self._state = State.INITIALIZING
            self._changed.notify_all()
        native: Native | None = None
        try:
            self._check_config()
            native = Native(int(os.environ.get("PTO_STANDIN_DEPTH", "2")))
            self._starting = native
            self._start_children(native)
            native.start()
            with self._changed:
                if self._cancel:
                    raise RuntimeError("init cancelled by close() before it was ready")
                self._native = self._native_of_runs = native
                self._orch = Orchestrator(self)
                self._state = State.READY
                _OPEN.add(self)
                self._changed.notify_all()
        except BaseException as error:
            self._startup_error = error
            try:
                if native is not None:
                    self._abandon_start(native)
            finally:
                with self._changed:
                    self._state = State.FAILED
                    self._changed.notify_all()
            if isinstance(error, Cancelled):
                raise RuntimeError(str(error)) from None
            raise
        finally:
            self._starting = None

    _starting: Native | None = None

    def _abandon_start(self, native: Native) -> None:
        if native._thread is not None:
            native.stop(_REAP_S)
        else:
            native.kill()
        self._drop_heap()

    def _check_config(self) -> None:
        if self.level != 3:
            raise ValueError(f"Worker: level {self.level} not supported by the stand-in, which has level 3 alone")
        platform = self._config["platform"]
        if platform not in PLATFORMS:
            raise ValueError(f"Unknown platform: {platform}. Supported: {', '.join(PLATFORMS)}")
        runtime = self._config["runtime"]
        if runtime not in RUNTIMES:
            raise ValueError(f"Runtime {runtime!r} is not available for platform {platform!r}. Available: {RUNTIMES}")

    def _check_targets(self) -> None:
        chips, subs = self._counts()
        for entry in self._registry.values():
            chip = isinstance(entry[1], ChipCallable)
            if not (chips if chip else subs):
                raise RuntimeError(
                    f"Worker.init(): registered {'LOCAL_CHIP' if chip else 'LOCAL_PYTHON'} callable "
                    f"sha256:{entry[0].hex()} has no eligible dispatch target "
                    f"(needs a {'chip' if chip else 'SUB or next-level'} child)"
                )

    def _counts(self) -> tuple[int, int]:
        return len(self._config.get("device_ids", ())), int(self._config.get("num_sub_workers", 0))

    def _start_children(self, native: Native) -> None:
        self._make_heap(int(self._config.get("heap_ring_size", HEAP_BYTES)))
        snapshot = {entry[0]: entry[1] for entry in self._registry.values()}
        simulated = self._config["platform"].endswith("sim")
        refusal = None
        if self._config.get("enable_sdma") and simulated:
            refusal = "async-DMA workspace provisioning failed with code -1"
        devices, (_, subs) = list(self._config.get("device_ids", ())), self._counts()
        for index in range(subs):
            native.fork("sub", index, sub_body(index, snapshot))
        for index, device in enumerate(devices):
            native.fork("chip", index, chip_body(index, device, snapshot, refusal, native.depth))
        deadline = time.monotonic() + self._startup_timeout_s
        native.await_ready(deadline, lambda: self._cancel, self._startup_timeout_s)

    def close(self) -> None:
        """Ends the worker. Final once begun; what is refused here says whether calling again helps."""
        with self._changed:
            if threading.get_ident() in self._leases:
                raise RuntimeError(
                    "Worker.close(): cannot be called from within a submit() or another leased operation on this thread"
                )
            self._cancel_start()
            current = self._attempt
            if current is not None and not current.done:
                while not current.done:
                    self._changed.wait()
                if current.error is not None:
                    raise current.error
                return
            if current is not None and not current.retryable:
                if current.error is not None:
                    raise current.error
                return
            owner = self._init_owner_thread
            if self._native is not None and owner is not None and owner is not threading.current_thread():
                raise RuntimeError(
                    "Worker.close(): a worker with a live tree must be closed on the thread that init()'d it"
                )
            self._state = State.CLOSED
            attempt = self._attempt = _Attempt()
            self._changed.notify_all()
        try:
            attempt.error, attempt.retryable = self._drain_and_tear_down()
        except BaseException as error:
            attempt.error, attempt.retryable = error, True
        finally:
            with self._changed:
                attempt.done = True
                self._changed.notify_all()
        if attempt.error is not None:
            raise attempt.error

    def _cancel_start(self) -> None:
        """Ends an init under way elsewhere. Holds the lock."""
        if self._state is not State.INITIALIZING:
            return
        if self._init_owner_thread is threading.current_thread():
            raise RuntimeError("Worker.close(): cannot cancel init() from the init-owner thread")
        self._cancel = True
        deadline = time.monotonic() + _CANCEL_S
        while self._state is State.INITIALIZING:
            if self._starting is not None:
                self._starting.wake()
            if time.monotonic() > deadline:
                raise RuntimeError(f"Worker.close(): cancelled init() did not unwind within {_CANCEL_S}s")
            self._changed.wait(0.05)

    def _drain_and_tear_down(self) -> tuple[BaseException | None, bool]:
        """What close does after its claim; the error, and whether another call may do better."""
        budget = float(os.environ.get("PTO_STANDIN_CLOSE_S", _CLOSE_S))
        deadline = time.monotonic() + budget

        def deferred(what: str) -> tuple[BaseException, bool]:
            text = f"Worker.close(): {what} still in flight after the cleanup budget ({budget}s); teardown deferred"
            return TimeoutError(f"{text} (worker stays CLOSED)"), True

        with self._changed:
            while self._active:
                left = deadline - time.monotonic()
                if left <= 0:
                    return deferred("operation(s)")
                self._changed.wait(left)
            handles = sorted(self._accepted_run_handles, key=lambda h: h._run_id)
        first: BaseException | None = None
        for handle in handles:
            try:
                handle.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutError as error:
                if not handle._cleanup_published:
                    return deferred("run fence(s)")
                first = first or error
            except Exception as error:
                first = first or error
        error, retryable = self._tear_down()
        return first or error, retryable

    def _tear_down(self) -> tuple[BaseException | None, bool]:
        native = self._native
        if native is None:
            self._forget_callables()
            return None, False
        failure: BaseException | None = None
        try:
            self._sweep(self._live_domains)
        except BaseException as error:
            failure = error
        buffers: BaseException | None = None
        for number, buffer in list(self._buffers.items()):
            try:
                buffer.close()
                del self._buffers[number]
            except BaseException as error:
                buffers = buffers or error
        if failure is not None or buffers is not None:
            # The children stay: somebody may hold what they map. A domain's outcome never changes, a view may go.
            return failure or buffers, True
        native.stop(_REAP_S)
        self._native = None
        _OPEN.discard(self)
        self._orch = None
        self._device_live.clear()
        self._drop_heap()
        self._forget_callables()
        return None, False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # Submissions -----------------------------------------------------------------------------------------------

    def submit(self, callable: Any, args: Any = None, config: Any = None) -> RunHandle:
        """Builds a run's graph by calling ``callable(orch, args, config)`` here and now."""
        with self._lease("submit"):
            config = CallConfig() if config is None else config
            with self._submit_mu.exclusive():
                before = self._cleanup_bearing_predecessor()
                if before is not None:
                    before._wait_quietly()
                self._require_no_ordered_cleanup_failure("submit")
                return self._submit_locked(callable, args, config)

    def run(self, callable: Any, args: Any = None, config: Any = None) -> None:
        """``submit`` and ``wait``."""
        self.submit(callable, args=args, config=config).wait()

    def _cleanup_bearing_predecessor(self) -> RunHandle | None:
        with self._changed:
            for handle in self._accepted_run_handles:
                if handle._resources.requires_ordered_cleanup and not handle._cleanup_published:
                    return handle
        return None

    def _submit_locked(self, callable: Any, args: Any, config: Any) -> RunHandle:
        native = self._native
        run_id = native.begin_run()
        resources = RunResources()
        handle = RunHandle(self, run_id, (callable, args, config), resources)
        with self._changed:
            self._accepted_run_handles.add(handle)
        self._building_run_resources, self._building_run_id = resources, run_id
        scoped = False
        try:
            native.scope(1)
            scoped = True
            with callback_frame(self, run_id):
                callable(self._orch, args, config)
            scoped = False
            native.scope(-1)
            native.close_run(run_id)
        except BaseException as error:
            if scoped:
                with contextlib.suppress(RuntimeError):
                    native.scope(-1)
            native.cancel_run(run_id, f"orchestration: {type(error).__name__}: {error}")
            self._building_run_resources = self._building_run_id = None
            handle._wait_quietly()
            raise
        finally:
            self._building_run_resources = self._building_run_id = None
        return handle

    def _finalize_run_handle(
        self, handle: RunHandle, run_id: int, native_error: BaseException | None, **_: Any
    ) -> BaseException | None:
        """A run's cleanup on the host's side; its outcome."""
        resources = handle._resources
        self._settle_retained(resources, native_error is None)
        cleanup: BaseException | None = None
        steps = (
            lambda: self._drain_pending(resources),
            lambda: self._sweep(resources.live_domains),
            lambda: self._retire(resources),
        )
        for step in steps:
            try:
                step()
            except BaseException as error:
                cleanup = cleanup or error
        self._free_scratch(resources)
        self._native_of_runs.forget_run(run_id)
        with self._changed:
            if cleanup is not None and self._ordered_cleanup_error is None:
                self._ordered_cleanup_error = cleanup
            handle._cleanup_published = True
            self._accepted_run_handles.discard(handle)
            self._changed.notify_all()
        return native_error if native_error is not None else cleanup

    @contextlib.contextmanager
    def _control_reservation(self, api: str) -> Iterator[None]:
        """One control command that belongs to no run: legal only while none is in flight."""
        held = _RESERVED.__dict__.setdefault("workers", set())
        if id(self) in held:
            yield
            return
        with self._submit_mu.shared():
            with self._changed:
                self._require_no_ordered_cleanup_failure(api.rpartition(".")[2])
                live = sum(not h._cleanup_published for h in self._accepted_run_handles)
            if live:
                raise RuntimeError(
                    f"{api}: {live} run(s) still in flight; wait for them, or do this inside a run's callback"
                )
            held.add(id(self))
            try:
                yield
            finally:
                held.discard(id(self))


__all__ = ["RunHandle", "Worker"]
