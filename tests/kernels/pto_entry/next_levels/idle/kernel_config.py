"""A chip program that the entry never submits; every generated program has at least one."""

from pathlib import Path

RUNTIME_CONFIG = {"runtime": "tensormap_and_ringbuffer", "aicpu_thread_num": 0}

ORCHESTRATION = {
    "source": str(Path(__file__).parent / "orchestration" / "idle.cpp"),
    "function_name": "aicpu_orchestration_entry",
    "signature": [],
}

KERNELS = []
