"""``Worker`` and ``RunHandle``: life cycle, submissions, memory and domains, from the host's side."""

from __future__ import annotations

import atexit
import contextlib
import enum
import math
import mmap
import os
import random
import struct
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .buffer import (
    AccessMode,
    AddressSpace,
    BackendKind,
    Buffer,
    create_host_shared_buffer,
    host_ptr_nbytes,
    mint_owner_instance_id,
    wrap_device_malloc,
    wrap_fork_inherited,
    wrap_vmm_window,
)
from .callable_identity import LOCAL_CHIP, CallableHandle, describe, serialise_callable
from .orchestrator import Orchestrator, callback_frame, direct_control, frame_of
from .standin.child import chip_body, sub_body
from .standin.memory import create_window_file, unlink_window_file, window_file_name
from .standin.native import Cancelled, Native
from .standin.types import (
    COMM_MAX_RANK_NUM,
    MAX_REGISTERED_CALLABLE_IDS,
    CallConfig,
    CanonicalIdentity,
    ChipCallable,
    TaskArgs,
    get_element_size,
)
from .task_interface import ChipDomainContext, CommBufferSpec, CommDomainHandle

PLATFORMS = ("a2a3", "a2a3sim", "a5", "a5sim")
RUNTIMES = ("host_build_graph", "tensormap_and_ringbuffer")
_STARTUP_S = 300.0
_CANCEL_S = 60.0
_REAP_S = 60.0
_HEAP_BYTES = 256 << 20
_MAP_NORESERVE = 0x4000


class _State(enum.Enum):
    NEW = "new"
    INITIALIZING = "initializing"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


class _NoBufferConsumerError(RuntimeError):
    """A host Buffer that no child could ever map."""


class _SharedExclusive:
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


_RESERVED = threading.local()


@dataclass
class _RunResources:
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
class _Retained:
    """A domain under the public retention call."""

    request: Any
    handle: CommDomainHandle
    runs: list[_RunResources] = field(default_factory=list)


class RunHandle:
    """Completion of one submission. Whoever waits first past the fence does the run's cleanup."""

    def __init__(self, worker: Worker, run_id: int, keepalive: Any, resources: _RunResources) -> None:
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


class Worker:
    """A host worker over forked chip and sub processes (level 3)."""

    def __init__(self, level: int, **config: Any) -> None:
        timeout = float(config.get("startup_timeout_s", _STARTUP_S))
        if timeout <= 0 or not math.isfinite(timeout):
            raise ValueError("Worker startup_timeout_s must be a positive finite number of seconds")
        self.level = level
        self._config = config
        self._startup_timeout_s = timeout
        self._pid = os.getpid()
        self._state = _State.NEW
        self._changed = threading.Condition(threading.RLock())
        self._cancel = False
        self._startup_error: BaseException | None = None
        self._init_owner_thread: threading.Thread | None = None
        self._active = 0
        self._leases: dict[int, int] = {}
        self._attempt: _Attempt | None = None
        # Callables: hashid -> [digest, target, references], and the handles that are live.
        self._registry: dict[str, list[Any]] = {}
        self._live_handles: dict[int, str] = {}
        self._owner_id = uuid.uuid4().hex
        self._registry_lock = threading.RLock()
        self._next_handle = 0
        # Submissions.
        self._submit_mu = _SharedExclusive()
        self._accepted_run_handles: set[RunHandle] = set()
        self._building_run_resources: _RunResources | None = None
        self._building_run_id: int | None = None
        self._ordered_cleanup_error: BaseException | None = None
        # Memory.
        self._owner_instance_id = mint_owner_instance_id()
        self._buffer_ids = 0
        self._buffers: dict[int, Buffer] = {}
        self._device_live: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self._device_lock = threading.Lock()
        self._heap: mmap.mmap | None = None
        self._heap_base = 0
        self._heap_free: list[tuple[int, int]] = []
        # Domains.
        self._live_domains: dict[str, CommDomainHandle] = {}
        self._retained: dict[str, _Retained] = {}
        self._next_allocation = 1
        self._free_lock = threading.RLock()
        self._free_results: dict[int, BaseException | None] = {}
        self._window_names: dict[int, str] = {}
        self._comm_ready = False
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
        return [] if self._native is None else [c.pid for c in self._native.chips]

    @property
    def _sub_pids(self) -> list[int]:
        return [] if self._native is None else [c.pid for c in self._native.subs]

    @property
    def live_domains(self) -> dict[str, CommDomainHandle]:
        return dict(self._live_domains)

    @contextlib.contextmanager
    def _lease(self, api: str) -> Iterator[None]:
        """Admits one operation on a READY worker; ``close`` waits for it."""
        me = threading.get_ident()
        with self._changed:
            if self._state is not _State.READY:
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
            if self._state is _State.INITIALIZING:
                raise RuntimeError("Worker.init() is already in progress")
            if self._state is _State.READY:
                raise RuntimeError("Worker already initialized")
            if self._state is _State.FAILED:
                raise RuntimeError("Worker startup failed; close this Worker and create a new one")
            if self._state is _State.CLOSED:
                raise RuntimeError("Worker is closed; create a new Worker")
            self._check_targets()
            self._init_owner_thread = threading.current_thread()
            self._state = _State.INITIALIZING
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
                self._state = _State.READY
                _OPEN.add(self)
                self._changed.notify_all()
        except BaseException as error:
            self._startup_error = error
            try:
                if native is not None:
                    self._abandon_start(native)
            finally:
                with self._changed:
                    self._state = _State.FAILED
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
        size = int(self._config.get("heap_ring_size", _HEAP_BYTES))
        self._heap = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self._heap_base = host_ptr_nbytes(self._heap)[0]
        self._heap_free = [(0, size)]
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

    def _drop_heap(self) -> None:
        if self._heap is not None:
            # Somebody may still look at scratch through an address; a mapping costs nothing until exit.
            with contextlib.suppress(BufferError):
                self._heap.close()
            self._heap = None

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
                raise RuntimeError("Worker.close(): a worker with a live tree must be closed on the thread that init()'d it")
            self._state = _State.CLOSED
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
        if self._state is not _State.INITIALIZING:
            return
        if self._init_owner_thread is threading.current_thread():
            raise RuntimeError("Worker.close(): cannot cancel init() from the init-owner thread")
        self._cancel = True
        deadline = time.monotonic() + _CANCEL_S
        while self._state is _State.INITIALIZING:
            if self._starting is not None:
                self._starting.wake()
            if time.monotonic() > deadline:
                raise RuntimeError(f"Worker.close(): cancelled init() did not unwind within {_CANCEL_S}s")
            self._changed.wait(0.05)

    def _drain_and_tear_down(self) -> tuple[BaseException | None, bool]:
        """What close does after its claim; the error, and whether another call may do better."""
        budget = float(os.environ.get("PTO_STANDIN_CLOSE_S", "10"))
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

    def _forget_callables(self) -> None:
        with self._registry_lock:
            self._registry.clear()
            self._live_handles.clear()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # Callables -------------------------------------------------------------------------------------------------

    def register(self, target: Any, *, workers: Any = None) -> CallableHandle:
        """Makes a callable known, before the start or after."""
        if workers is not None:
            raise TypeError("Worker.register: workers= is only supported for RemoteCallable")
        hashid, kind, namespace = describe(
            target, self._config.get("platform", ""), self._config.get("runtime", "")
        )
        with self._changed:
            while self._state is _State.INITIALIZING:
                self._changed.wait()
            if self._state is _State.FAILED:
                raise RuntimeError("Worker.register: hierarchical startup failed; close this Worker and create a new one")
            if self._state is _State.CLOSED:
                raise RuntimeError("Worker.register: worker is closed")
            if self._state is _State.NEW:
                return self._new_handle(hashid, kind, namespace, target)[0]
        with self._lease("register"):
            chips, subs = self._counts()
            if not (chips if namespace == LOCAL_CHIP else subs):
                raise RuntimeError("Worker.register: no child of this worker can run it")
            handle, new = self._new_handle(hashid, kind, namespace, target)
            if new:
                self._send_registration(handle, target)
            return handle

    def _new_handle(self, hashid: str, kind: str, namespace: str, target: Any) -> tuple[CallableHandle, bool]:
        with self._registry_lock:
            new = hashid not in self._registry
            if new and len(self._registry) >= MAX_REGISTERED_CALLABLE_IDS:
                raise RuntimeError(
                    f"Worker.register: callable capacity exhausted ({MAX_REGISTERED_CALLABLE_IDS}); unregister some first"
                )
            handle = CallableHandle(hashid, kind, namespace)
            entry = self._registry.setdefault(hashid, [handle.digest, target, 0])
            entry[2] += 1
            handle._owner_id, handle._handle_id = self._owner_id, self._next_handle
            self._live_handles[self._next_handle] = hashid
            self._next_handle += 1
            return handle, new

    def _send_registration(self, handle: CallableHandle, target: Any) -> None:
        native = self._native
        children = native.chips if handle.target_namespace == LOCAL_CHIP else native.subs
        payload = target.to_bytes() if isinstance(target, ChipCallable) else serialise_callable(target)
        errors: list[tuple[int, str]]
        if payload is None:
            errors = [(0, "the callable cannot be sent to a running child")]
        else:
            _, errors = native.control_all([(c, (handle.digest, payload)) for c in children], "register")
        if errors:
            failed = {index for index, _ in errors}
            native.control_all([(c, (handle.digest,)) for c in children if c.index not in failed], "unregister")
            with self._registry_lock:
                del self._live_handles[handle._handle_id]
                del self._registry[handle.hashid]
            index, text = errors[0]
            raise RuntimeError(f"REGISTER_PARTIAL_FAILURE: {handle.hashid}: worker {index}: {text}")

    def _resolve(self, handle: CallableHandle) -> None:
        with self._registry_lock:
            if handle._owner_id != self._owner_id:
                raise KeyError(f"CallableHandle {handle.hashid} does not belong to this Worker")
            if handle._handle_id not in self._live_handles:
                raise KeyError(f"CallableHandle {handle.hashid} is not live on this Worker")

    def unregister(self, handle: CallableHandle) -> None:
        """Gives one handle up; the last of its content frees a place."""
        if not isinstance(handle, CallableHandle):
            raise TypeError("Worker.unregister expects a CallableHandle returned by Worker.register")
        with self._changed:
            new = self._state is _State.NEW
        with contextlib.nullcontext() if new else self._lease("unregister"):
            self._resolve(handle)
            with self._registry_lock:
                del self._live_handles[handle._handle_id]
                entry = self._registry[handle.hashid]
                entry[2] -= 1
                if entry[2]:
                    return
                del self._registry[handle.hashid]
            if not new:
                chip = handle.target_namespace == LOCAL_CHIP
                children = self._native.chips if chip else self._native.subs
                # Best effort: a dead child has forgotten it anyway.
                self._native.control_all([(c, (handle.digest,)) for c in children], "unregister")

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
        resources = _RunResources()
        handle = RunHandle(self, run_id, (callable, args, config), resources)
        with self._changed:
            self._accepted_run_handles.add(handle)
        self._building_run_resources, self._building_run_id = resources, run_id
        try:
            with callback_frame(self, run_id):
                callable(self._orch, args, config)
            native.close_run(run_id)
        except BaseException as error:
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

    # Device memory ---------------------------------------------------------------------------------------------

    def _check_chip(self, worker_id: int) -> None:
        chips = len(self._config.get("device_ids", ())) if self._native is not None else 0
        if not 0 <= worker_id < chips:
            raise IndexError(f"worker_id {worker_id} out of range (have {chips} chips)")

    def _next_buffer_id(self) -> int:
        with self._registry_lock:
            self._buffer_ids += 1
            return self._buffer_ids

    def malloc(self, size: int) -> Buffer:
        raise TypeError("worker.malloc is L2-only; at L3+ use worker.alloc_child_tensor(worker_id, ...)")

    def alloc_child_tensor(self, worker_id: int, shapes: Sequence[int], dtype: Any) -> Buffer:
        """Device memory of one chip."""
        nbytes = get_element_size(dtype)
        for n in shapes:
            nbytes *= int(n)
        worker_id = int(worker_id)
        if self._state is _State.READY:
            self._check_chip(worker_id)
        with self._lease("alloc_child_tensor"), direct_control(self, "Worker.alloc_child_tensor"):
            address = self._native.control(self._native.chips[worker_id], "malloc", nbytes)
            with self._device_lock:
                self._device_live.setdefault((worker_id, address), []).append(("malloc", nbytes))
        return wrap_device_malloc(
            address, nbytes, self._owner_instance_id, self._next_buffer_id(), "L3", owner_worker_id=worker_id
        )

    def free(self, handle: Buffer) -> None:
        """Gives device memory of ``alloc_child_tensor`` back."""
        key = (int(handle.owner_worker_id), int(handle.base))
        if self._state is _State.READY:
            self._check_chip(key[0])
        with self._lease("free"), direct_control(self, "Worker.free"):
            with self._device_lock:
                roles = self._device_live.get(key, [])
                if not any(role == "malloc" for role, _ in roles):
                    raise ValueError(
                        f"Worker.free: device pointer {key[1]:#x} is not a live malloc base on worker {key[0]} "
                        "(another worker's, freed, inside an allocation, or a domain's)"
                    )
                del self._device_live[key]
            self._native.control(self._native.chips[key[0]], "free", key[1])

    def committed_device_memory(self, worker_id: int = 0) -> int:
        """Bytes of device memory that a chip has given out; windows are not counted."""
        with self._lease("committed_device_memory"):
            if not self._native.chips:
                raise NotImplementedError("committed_device_memory requires at least one forked chip worker")
            self._check_chip(int(worker_id))
            return self._orch.committed_device_memory(int(worker_id))

    def _committed_device_memory(self, worker_id: int) -> int:
        self._check_chip(worker_id)
        return self._native.control(self._native.chips[worker_id], "committed")

    def _check_live_range(self, worker_id: int, address: int, nbytes: int, api: str) -> None:
        with self._device_lock:
            for (owner, base), roles in self._device_live.items():
                if owner == worker_id and base <= address and any(address + nbytes <= base + n for _, n in roles):
                    return
        raise ValueError(
            f"Worker.{api}: device range [{address:#x}, +{nbytes}) is not contained in a live allocation on worker "
            f"{worker_id} (another worker's, freed, or out of the allocation)"
        )

    def _check_device_arguments(self, args: TaskArgs, chip: int, api: str) -> None:
        for i in range(args.tensor_count()):
            descriptor = args.tensor(i).buffer
            if descriptor.address_space != AddressSpace.DEVICE:
                continue
            address = int.from_bytes(descriptor.body, "little")
            with self._device_lock:
                if not self._device_live.get((chip, address)):
                    raise ValueError(
                        f"orch.{api}: child_memory argument (arg {i}, ptr {address:#x}) is not a live allocation on "
                        f"target worker {chip} (wrong worker, stale, or interior pointer)"
                    )

    def copy_to(self, dst: Buffer, src: Any) -> None:
        """Host to device; as many bytes as the host side has."""
        self._copy(dst, src, to_device=True, api="copy_to")

    def copy_from(self, dst: Any, src: Buffer) -> None:
        """Device to host; as many bytes as the host side has."""
        self._copy(src, dst, to_device=False, api="copy_from")

    def _copy(self, device: Buffer, host: Any, *, to_device: bool, api: str) -> None:
        nbytes = int(host.nbytes) if isinstance(host, Buffer) else host_ptr_nbytes(host)[1]
        if isinstance(host, Buffer):
            if host.address_space != AddressSpace.HOST:
                raise ValueError(f"Worker.{api}: the host side must be a HOST handle, got {host.address_space.name}")
            needed = AccessMode.READ if to_device else AccessMode.WRITE
            if host.access not in (needed, AccessMode.READWRITE):
                raise ValueError(f"Worker.{api}: host backing grants {host.access.name}, not {needed.name}")
        if device.address_space != AddressSpace.DEVICE:
            raise ValueError(f"Worker.{api}: expected a DEVICE handle, got {device.address_space.name}")
        if nbytes > device.nbytes:
            raise ValueError(f"Worker.{api}: {nbytes} bytes exceeds the {device.nbytes}-byte backing")
        chip = int(device.owner_worker_id)
        if self._state is _State.READY:
            self._check_chip(chip)
        if not isinstance(host, Buffer):
            raise TypeError(f"Worker.{api}: an L3 host side must be a Buffer from create_buffer; raw memory is L2-only")
        with self._lease(api), direct_control(self, f"Worker.{api}"):
            self._check_live_range(chip, int(device.base), nbytes, api)
            wire = host.to_descriptor().wire()
            self._native.control(self._native.chips[chip], "copy", to_device, int(device.base), wire, nbytes)

    # Host memory -----------------------------------------------------------------------------------------------

    def create_buffer(self, nbytes: int) -> Buffer:
        """Zero-filled shared memory that children map by name when they first see it."""
        with self._lease("create_buffer"):
            nbytes = int(nbytes)
            if not self._native.children:
                raise _NoBufferConsumerError("create_buffer requires at least one forked child (this Worker has none)")
            if nbytes <= 0:
                raise ValueError("create_buffer: nbytes must be positive")
            number = self._next_buffer_id()
            buffer = create_host_shared_buffer(nbytes, self._owner_instance_id, number)
            with self._registry_lock:
                self._buffers[number] = buffer
            return buffer

    def release_buffer(self, buffer: Buffer) -> None:
        """Gives a host Buffer back; refused while a run in flight names it in a task."""
        if not buffer.closed:
            with self._submit_mu.exclusive(), self._changed:
                for handle in self._accepted_run_handles:
                    if not handle._cleanup_published and buffer.identity in handle._resources.touched_identities:
                        raise RuntimeError(f"release_buffer: {buffer.identity} is still referenced by an in-flight run")
        first = buffer.shm is not None
        buffer.close()
        native = self._native
        if first and native is not None:
            # Waits for a busy child, as the real broadcast does; a dead one maps nothing.
            native.control_all([(c, (buffer.identity._key(),)) for c in native.children], "drop_import")
        with self._registry_lock:
            if self._buffers.get(buffer.identity.buffer_id) is buffer:
                del self._buffers[buffer.identity.buffer_id]

    def alloc_shared_tensor(self, shapes: Sequence[int], dtype: Any) -> Buffer:
        """Run-scoped host memory, as ``Orchestrator.alloc``."""
        return self._orch.alloc(shapes, dtype)

    def make_tensor_arg(self, tensor: Any, shapes: Sequence[int], dtype: int, *, strides: Any = None) -> Any:
        """A tensor over host memory that existed before the start; written through only where it is shared."""
        address, nbytes = host_ptr_nbytes(tensor)
        shared = bool(getattr(tensor, "is_shared", lambda: False)())
        backing = wrap_fork_inherited(
            address,
            nbytes,
            self._owner_instance_id,
            self._next_buffer_id(),
            "L3",
            access=AccessMode.READWRITE if shared else AccessMode.READ,
            backend_kind=BackendKind.FORK_SHM if shared else BackendKind.FORK_COW,
        )
        return backing.tensor(tuple(shapes), dtype, strides)

    def _alloc_scratch(self, nbytes: int) -> Buffer:
        resources = self._building_run_resources
        if resources is None:
            raise RuntimeError("Orchestrator: task submission requires an active run")
        size = max(64, (nbytes + 63) // 64 * 64)
        with self._registry_lock:
            for i, (start, length) in enumerate(self._heap_free):
                if length >= size:
                    self._heap_free[i : i + 1] = [(start + size, length - size)] if length > size else []
                    break
            else:
                raise RuntimeError(f"Orchestrator.alloc: no room for {nbytes} bytes in the heap ring")
            resources.scratch.append((start, size))
        return wrap_fork_inherited(
            self._heap_base + start,
            nbytes,
            self._owner_instance_id,
            self._next_buffer_id(),
            "L3",
            access=AccessMode.READWRITE,
            backend_kind=BackendKind.FORK_SHM,
        )

    def _free_scratch(self, resources: _RunResources) -> None:
        if not resources.scratch:
            return
        with self._registry_lock:
            merged: list[tuple[int, int]] = []
            for start, length in sorted([*self._heap_free, *resources.scratch]):
                if merged and sum(merged[-1]) == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((start, length))
            self._heap_free = merged
            resources.scratch.clear()

    # Domains ---------------------------------------------------------------------------------------------------

    def _require_building(self, api: str) -> _RunResources:
        resources = self._building_run_resources
        if resources is None:
            raise RuntimeError(f"{api} is only valid while a run's graph is being built")
        return resources

    def _validate_domain(
        self, name: str, workers: tuple[int, ...], window_size: int, buffers: list[CommBufferSpec]
    ) -> _RunResources:
        resources = self._require_building("allocate_domain")
        chips = len(self._native.chips)
        if not workers:
            raise ValueError("allocate_domain: workers must be non-empty")
        if len(set(workers)) != len(workers):
            raise ValueError(f"allocate_domain: workers contains duplicates: {workers}")
        for worker in workers:
            if not 0 <= worker < chips:
                raise ValueError(f"allocate_domain: worker_id {worker} outside [0, {chips})")
        if window_size <= 0:
            raise ValueError("allocate_domain: window_size must be positive")
        names = [b.name for b in buffers]
        if len(set(names)) != len(names):
            raise ValueError(f"allocate_domain: duplicate buffer names: {names}")
        total = sum(int(b.nbytes) for b in buffers)
        if total > window_size:
            raise ValueError(f"allocate_domain: buffers sum to {total} bytes, exceeds window_size={window_size}")
        if name in self._live_domains:
            raise ValueError(f"allocate_domain: domain {name!r} already live")
        return resources

    def _allocate_domain(
        self, *, name: str, workers: tuple[int, ...], window_size: int, buffers: list[CommBufferSpec]
    ) -> CommDomainHandle:
        resources = self._validate_domain(name, workers, window_size, buffers)
        native = self._native
        if not self._comm_ready:
            # The base communicator spans all chips, members or not.
            if len(native.chips) > COMM_MAX_RANK_NUM:
                raise RuntimeError(
                    f"_ensure_comm_base failed: {len(native.chips)} chips, at most {COMM_MAX_RANK_NUM} ranks"
                )
            self._comm_ready = True
        # The real request is packed into unsigned words without a look.
        struct.pack(f"<{1 + len(buffers)}Q", window_size, *(int(b.nbytes) for b in buffers))
        allocation = self._next_allocation
        self._next_allocation += 1
        file = window_file_name(os.getpid(), random.getrandbits(32))
        try:
            create_window_file(file, len(workers), window_size)
        except OSError as error:
            raise RuntimeError(
                f"alloc_domain(allocation_id={allocation}) failed on {len(workers)}/{len(workers)} chips; "
                f"first error chip={workers[0]}: {error}"
            ) from error
        handle = CommDomainHandle(
            name=name,
            workers=workers,
            contexts={},
            allocation_id=allocation,
            _release_fn=lambda released: self._release_domain_handle(released, resources),
        )
        pids = [native.chips[w].pid for w in workers]
        calls = [
            (native.chips[w], (allocation, file, rank, len(workers), window_size, pids))
            for rank, w in enumerate(workers)
        ]
        answers, errors = native.control_all(calls, "alloc_domain")
        # A chip that answered holds its window, whatever else went wrong; the handle owns exactly those.
        handle.workers = tuple(w for w, answer in zip(workers, answers) if answer is not None)
        if not handle.workers:
            unlink_window_file(file)
        else:
            self._window_names[allocation] = file
            self._live_domains[name] = handle
            resources.live_domains[name] = handle
            resources.requires_ordered_cleanup = True
        if errors:
            chip, text = errors[0]
            raise RuntimeError(
                f"alloc_domain(allocation_id={allocation}) failed on {len(errors)}/{len(workers)} chips; "
                f"first error chip={chip}: {text}"
            )
        for rank, (chip, (context, base)) in enumerate(zip(workers, answers)):
            handle.contexts[chip] = self._context(
                name, rank, len(workers), chip, context, base, window_size, buffers, allocation
            )
        return handle

    def _context(
        self, name: str, rank: int, size: int, chip: int, context: int, base: int, window: int, buffers: Any, number: int
    ) -> ChipDomainContext:
        named: dict[str, Buffer] = {}
        at = base
        with self._device_lock:
            self._device_live.setdefault((chip, base), []).append((f"domain {number}", window))
            for spec in buffers:
                nbytes = int(spec.nbytes)
                self._device_live.setdefault((chip, at), []).append((f"domain {number}", nbytes))
                named[spec.name] = wrap_vmm_window(
                    at, nbytes, self._owner_instance_id, self._next_buffer_id(), "L3", owner_worker_id=chip
                )
                at += nbytes
        return ChipDomainContext(name, rank, size, context, base, window, named)

    def _release_domain_handle(self, handle: CommDomainHandle, resources: _RunResources) -> None:
        """``CommDomainHandle.release``: at the owning run's cleanup, or now where that has been."""
        if self._native is None:
            return
        if self._defer_to_users(handle):
            return
        with resources.domain_lock:
            if not resources.retired:
                resources.pending_release_domains.append(handle)
                resources.live_domains.pop(handle.name, None)
                if self._live_domains.get(handle.name) is handle:
                    del self._live_domains[handle.name]
                return
        self._free_domain(handle)
        with resources.domain_lock:
            if resources.live_domains.get(handle.name) is handle:
                del resources.live_domains[handle.name]

    def _drain_pending(self, resources: _RunResources) -> None:
        with resources.domain_lock:
            pending = list(resources.pending_release_domains)
        first: BaseException | None = None
        for handle in pending:
            try:
                self._free_domain(handle)
                with resources.domain_lock:
                    resources.pending_release_domains.remove(handle)
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    def _retire(self, resources: _RunResources) -> None:
        with resources.domain_lock:
            resources.retired = True
        self._drain_pending(resources)

    def _sweep(self, domains: dict[str, CommDomainHandle]) -> None:
        """Frees every domain of a registry, last first; tries all, raises the first failure."""
        first: BaseException | None = None
        for name, handle in reversed(list(domains.items())):
            try:
                handle._released = True
                self._free_domain(handle)
                if domains.get(name) is handle:
                    del domains[name]
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    def _free_domain(self, handle: CommDomainHandle) -> None:
        """Frees a domain on its chips, once; a failure is final and repeated to everybody who asks."""
        with self._free_lock:
            if handle.freed:
                return
            if handle.allocation_id in self._free_results:
                raise self._free_results[handle.allocation_id]
            mark = f"domain {handle.allocation_id}"
            with self._device_lock:
                for key, roles in list(self._device_live.items()):
                    kept = [r for r in roles if r[0] != mark]
                    if kept:
                        self._device_live[key] = kept
                    else:
                        del self._device_live[key]
            native = self._native
            calls = [(native.chips[w], (handle.allocation_id, len(handle.workers))) for w in handle.workers]
            _, errors = native.control_all(calls, "release_domain")
            if errors:
                chip, text = errors[0]
                failure = RuntimeError(
                    f"release_domain(allocation_id={handle.allocation_id}) failed on {len(errors)}/{len(calls)} chips; "
                    f"first error chip={chip}: {text}"
                )
                self._free_results[handle.allocation_id] = failure
                raise failure
            self._window_names.pop(handle.allocation_id, None)
            handle._freed = True
            if self._live_domains.get(handle.name) is handle:
                del self._live_domains[handle.name]

    # Public retention ------------------------------------------------------------------------------------------

    def _retain(self, name: str, request: Any, handle: CommDomainHandle) -> None:
        """Ties a domain to the run being built and keeps it past a success."""
        resources = self._require_building("get_or_allocate_domain")
        known = self._retained.get(name)
        if known is None or known.handle is not handle:
            known = self._retained[name] = _Retained(request, handle)
        if resources not in known.runs:
            known.runs.append(resources)
        resources.retained.add(name)
        with resources.domain_lock:
            resources.live_domains.pop(name, None)

    def _defer_to_users(self, handle: CommDomainHandle) -> bool:
        """A release of a retained domain waits for every run that it belongs to. Whether it does."""
        known = self._retained.get(handle.name)
        if known is None or known.handle is not handle:
            return False
        for resources in reversed(known.runs):
            with resources.domain_lock:
                if not resources.retired:
                    resources.requires_ordered_cleanup = True
                    resources.pending_release_domains.append(handle)
                    return True
        self._retained.pop(handle.name, None)
        return False

    def _settle_retained(self, resources: _RunResources, success: bool) -> None:
        """Before a run's cleanup: what it retained stays after a success, and goes after a failure when it can."""
        for name in resources.retained:
            known = self._retained.get(name)
            if known is None or resources not in known.runs:
                continue
            known.runs = [r for r in known.runs if r is not resources]
            if success or known.handle.released:
                continue
            # Never to be leased again. Freed here, or, while another run may use it, by the last or by close.
            del self._retained[name]
            if not known.runs:
                with resources.domain_lock:
                    resources.live_domains[name] = known.handle


__all__ = ["RunHandle", "Worker", "frame_of"]
