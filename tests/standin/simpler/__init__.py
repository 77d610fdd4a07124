"""A stand-in for Simpler: the same module paths and names, in pure Python, for tests anywhere.

Only what an embedding backend uses is here (see the README beside this package). ``Worker`` and the submodules
resolve on first use, so that importing the package alone costs nothing.
"""

import importlib
from typing import Any

from ._log import DEFAULT_THRESHOLD, NUL, TIMING, get_current_config, get_logger

__all__ = ["DEFAULT_THRESHOLD", "NUL", "TIMING", "Worker", "get_current_config", "get_logger", "task_interface"]

_SUBMODULES = ("buffer", "callable_identity", "orchestrator", "standin", "task_interface", "worker")


def __getattr__(name: str) -> Any:
    if name == "Worker":
        return importlib.import_module(f"{__name__}.worker").Worker
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
