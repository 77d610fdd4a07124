"""Registering callables, before the start and after."""

from __future__ import annotations

import contextlib
import threading
import uuid
from typing import Any

from ..callable_identity import LOCAL_CHIP, CallableHandle, describe, serialise_callable
from .runs import State
from .types import MAX_REGISTERED_CALLABLE_IDS, ChipCallable


class Callables:
    """The part of a worker that knows its callables."""

    def __init__(self) -> None:
        # hashid -> [digest, target, references], and the handles that are live.
        self._registry: dict[str, list[Any]] = {}
        self._live_handles: dict[int, str] = {}
        self._owner_id = uuid.uuid4().hex
        self._registry_lock = threading.RLock()
        self._next_handle = 0

    def register(self, target: Any, *, workers: Any = None) -> CallableHandle:
        """Makes a callable known, before the start or after."""
        if workers is not None:
            raise TypeError("Worker.register: workers= is only supported for RemoteCallable")
        hashid, kind, namespace = describe(target, self._config.get("platform", ""), self._config.get("runtime", ""))
        with self._changed:
            while self._state is State.INITIALIZING:
                self._changed.wait()
            if self._state is State.FAILED:
                raise RuntimeError("Worker.register: hierarchical startup failed; close this Worker, create a new one")
            if self._state is State.CLOSED:
                raise RuntimeError("Worker.register: worker is closed")
            if self._state is State.NEW:
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
                    f"Worker.register: callable capacity exhausted ({MAX_REGISTERED_CALLABLE_IDS}); "
                    "unregister some first"
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
        if payload is None:
            self._forget_handle(handle)
            raise TypeError("cannot pickle the callable for a running child; register it before init")
        _, errors = native.control_all([(c, (handle.digest, payload)) for c in children], "register")
        if errors:
            failed = {index for index, _ in errors}
            native.control_all([(c, (handle.digest,)) for c in children if c.index not in failed], "unregister")
            self._forget_handle(handle)
            index, text = errors[0]
            raise RuntimeError(f"REGISTER_PARTIAL_FAILURE: {handle.hashid}: worker {index}: {text}")

    def _forget_handle(self, handle: CallableHandle) -> None:
        with self._registry_lock:
            del self._live_handles[handle._handle_id]
            del self._registry[handle.hashid]

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
            new = self._state is State.NEW
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

    def _forget_callables(self) -> None:
        with self._registry_lock:
            self._registry.clear()
            self._live_handles.clear()
