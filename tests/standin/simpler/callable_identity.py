"""Handles of registered callables, and how their content is named."""

from __future__ import annotations

import hashlib
import importlib
import marshal
import pickle
import types
from typing import Any

from .standin.types import ChipCallable

LOCAL_CHIP = "LOCAL_CHIP"
LOCAL_PYTHON = "LOCAL_PYTHON"

__all__ = ["CallableHandle", "compute_callable_hashid"]


def compute_callable_hashid(descriptor: bytes) -> str:
    """Equal content has one name."""
    return "sha256:" + hashlib.sha256(descriptor).hexdigest()


class CallableHandle:
    """What ``Worker.register`` gives."""

    __slots__ = ("_handle_id", "_owner_id", "hashid", "kind", "target_namespace")

    def __init__(self, hashid: str, kind: str, target_namespace: str) -> None:
        self.hashid = hashid
        self.kind = kind
        self.target_namespace = target_namespace
        self._handle_id = -1
        self._owner_id: str | None = None

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hashid.removeprefix("sha256:"))


def _pickled(value: Any) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:
        return None


def serialise_callable(target: Any) -> bytes | None:
    """A Python callable as bytes that an already running child can use, or None where there is no way."""
    if not isinstance(target, types.FunctionType):
        return _pickled(target)
    parts = (target.__defaults__, target.__kwdefaults__, [c.cell_contents for c in target.__closure__ or ()])
    state = _pickled(parts)
    if state is None:
        return None
    # Globals that the child's copy of the module may not have yet travel with the code, where they can.
    extra = {}
    for name in target.__code__.co_names:
        value = target.__globals__.get(name)
        if value is not None and not isinstance(value, types.ModuleType):
            data = _pickled(value)
            if data is not None:
                extra[name] = data
    return pickle.dumps((target.__module__, target.__name__, marshal.dumps(target.__code__), state, extra))


def rebuild_callable(payload: bytes) -> Any:
    """The inverse of :func:`serialise_callable`, in the child."""
    value = pickle.loads(payload)
    if not isinstance(value, tuple):
        return value
    module, name, code, state, extra = value
    try:
        known = vars(importlib.import_module(module)) if module else {}
    except ImportError:
        known = {}
    names = dict(known)
    for key, data in extra.items():
        if key not in names:
            names[key] = pickle.loads(data)
    defaults, keyword_defaults, cells = pickle.loads(state)
    function = types.FunctionType(
        marshal.loads(code), names, name, defaults, tuple(types.CellType(c) for c in cells) or None
    )
    function.__kwdefaults__ = keyword_defaults
    return function


def describe(target: Any, platform: str, runtime: str) -> tuple[str, str, str]:
    """``(hashid, kind, namespace)`` of something to register; ``TypeError`` where it is not a callable."""
    if isinstance(target, ChipCallable):
        content = b"chip\0" + f"{platform}\0{runtime}\0".encode() + target.to_bytes()
        return compute_callable_hashid(content), "CHIP_CALLABLE", LOCAL_CHIP
    if not callable(target):
        raise TypeError("Worker.register: non-ChipCallable target must be callable")
    content = serialise_callable(target)
    if content is None:
        content = f"object {id(target)}".encode()
    return compute_callable_hashid(b"python\0" + content), "PYTHON_SERIALIZED", LOCAL_PYTHON
