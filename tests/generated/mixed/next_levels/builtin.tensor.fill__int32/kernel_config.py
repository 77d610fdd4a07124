import os
from pathlib import Path

from simpler.task_interface import ArgDirection as _D

_ROOT_DIR = Path(__file__).parent

RUNTIME_CONFIG = {
    "runtime": "tensormap_and_ringbuffer",
    "aicpu_thread_num": 0,
}

ORCHESTRATION = {
    "source": str(_ROOT_DIR / "orchestration" / "fill.cpp"),
    "function_name": "aicpu_orchestration_entry",
    "signature": [_D.OUT],
}

KERNELS = [
    {
        "func_id": 0,
        "name": "pto_store",
        "source": os.path.join(os.environ["PTO_TEST_KERNELS"], "pto_store.cpp"),
        "core_type": "aiv",
        "signature": [_D.OUT],
    },
]
