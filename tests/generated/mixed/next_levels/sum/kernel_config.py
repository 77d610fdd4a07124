import os
from pathlib import Path

from simpler.task_interface import ArgDirection as _D

_ROOT_DIR = Path(__file__).parent

RUNTIME_CONFIG = {
    "runtime": "tensormap_and_ringbuffer",
    "aicpu_thread_num": 0,
}

ORCHESTRATION = {
    "source": str(_ROOT_DIR / "orchestration" / "sum.cpp"),
    "function_name": "aicpu_orchestration_entry",
    "signature": [_D.IN, _D.OUT],
}

KERNELS = [
    {
        "func_id": 0,
        "name": "allreduce",
        "source": str(_ROOT_DIR / "kernels" / "sum.cpp"),
        "core_type": "aiv",
        "extra_include_dirs": [os.environ["PTO_TEST_KERNELS"]],
        "signature": [_D.IN, _D.OUT],
    },
]
