"""What the tests share: a rig around one worker, gates, leak checks, and a guard against hangs."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import subprocess
import sys
import threading
import time
import unittest
from multiprocessing import resource_tracker
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import simpler.buffer
from simpler.standin import clear, kernel_names, library
from simpler.standin.memory import is_alive
from simpler.task_interface import CommBufferSpec, DataType, TaskArgs, TensorArgType
from simpler.worker import Worker

# A guard, not a measurement: whatever hangs ends the process with every thread's stack.
GUARD_S = 120
INT32 = DataType.INT32
IN, OUT, INOUT = TensorArgType.INPUT, TensorArgType.OUTPUT_EXISTING, TensorArgType.INOUT
NO_DEP = TensorArgType.NO_DEP

_created: list[str] = []


class _Recorded(simpler.buffer.SharedMemory):
    """Shared memory that leaves its name behind for the leak check."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _created.append(self.name)


simpler.buffer.SharedMemory = _Recorded


def window_names(pid: int | None = None) -> list[str]:
    """The window files of a host process."""
    prefix = f"simpler_{os.getpid() if pid is None else pid:08x}_"
    return sorted(n for n in os.listdir("/dev/shm") if n.startswith(prefix))


def until(condition) -> None:
    """Waits for a condition that is sure to come; the guard is for when it does not."""
    while not condition():
        time.sleep(0.001)


def process_runs(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    return is_alive(pid)


class Background(threading.Thread):
    """A call on another thread, with its outcome."""

    def __init__(self, call) -> None:
        super().__init__(daemon=True)
        self._call, self.value, self.error = call, None, None
        self.start()

    def run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as error:
            self.error = error

    def inside(self, function: str) -> bool:
        """Whether the thread waits inside a function of that name."""
        frame = sys._current_frames().get(self.ident)
        names = []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        return function in names and names[0] == "wait"

    def finish(self):
        """Joins; the value, or the error raised here."""
        self.join()
        if self.error is not None:
            raise self.error
        return self.value


def arguments(*tensors, scalars=()) -> TaskArgs:
    """Task arguments from ``(buffer, tag)`` pairs, buffers taken whole as 32-bit words."""
    args = TaskArgs()
    for buffer, tag in tensors:
        args.add_tensor(buffer.tensor((buffer.nbytes // 4,), INT32), tag)
    for scalar in scalars:
        args.add_scalar(scalar % (1 << 64))
    return args


def words(buffer) -> list[int]:
    """A host buffer as signed words."""
    return list((ctypes.c_int32 * (buffer.nbytes // 4)).from_address(buffer.base))


def write(buffer, values) -> None:
    """Puts words into a host buffer, without making an export."""
    (ctypes.c_int32 * (buffer.nbytes // 4)).from_address(buffer.base)[: len(values)] = values


def signal_buffer(nbytes: int = 64) -> list[CommBufferSpec]:
    return [CommBufferSpec("signal", "opaque", nbytes, nbytes)]


class Rig:
    """A worker that knows all kernels, and one word with which a test holds runs open."""

    def __init__(self, case: unittest.TestCase, chips: int = 2, subs: int = 1, start: bool = True, **config) -> None:
        self.page = mmap.mmap(-1, mmap.PAGESIZE)
        self.gates = (ctypes.c_int32 * 16).from_buffer(self.page)
        config = {"platform": "a2a3sim", "runtime": "tensormap_and_ringbuffer", "num_sub_workers": subs, **config}
        self.worker = Worker(level=3, device_ids=list(range(chips)), **config)
        self.handles = {}
        if chips:
            self.handles = {n: self.worker.register(getattr(library, n)) for n in kernel_names()}
        if subs:
            for name in ("pto_gate", "pto_sub_add", "pto_sub_fail"):
                self.handles[name] = self.worker.register(getattr(library, name))
        case.addCleanup(self.end)
        if start:
            self.worker.init()

    def end(self) -> None:
        """Opens every gate and closes, whatever the test left behind."""
        self.gates[:] = [1] * 16
        try:
            self.worker.close()
        except Exception:
            pass
        if self.worker._native is not None:
            # A worker that cannot be closed any more: ends its children by their ids, and forgets its domains.
            for pid in (*self.worker._chip_pids, *self.worker._sub_pids):
                if process_runs(pid):
                    os.kill(pid, 9)
            self.worker._live_domains.clear()
            try:
                self.worker.close()
            except Exception:
                pass
            for name in window_names():
                os.unlink(f"/dev/shm/{name}")
        assert self.worker._native is None, "the worker could not be ended"

    def task(self, orch, kernel: str, *tensors, scalars=(), chip: int = 0) -> None:
        orch.submit_next_level(self.handles[kernel], arguments(*tensors, scalars=scalars), worker=chip)

    def sub(self, orch, function: str, *tensors, scalars=()) -> None:
        orch.submit_sub(self.handles[function], arguments(*tensors, scalars=scalars))

    def submit(self, build):
        """Submits ``build(orch)``."""
        return self.worker.submit(lambda orch, _args, _config: build(orch))

    def run(self, build) -> None:
        self.submit(build).result()

    def one(self, kernel: str, *tensors, scalars=(), chip: int = 0):
        """A run of one chip task."""
        return self.submit(lambda orch: self.task(orch, kernel, *tensors, scalars=scalars, chip=chip))

    def hold(self, out, chip: int = 0, gate: int = 0):
        """A run that stays on the device until :meth:`open`."""
        self.gates[gate] = 0
        address = ctypes.addressof(self.gates) + 4 * gate
        return self.one("pto_wait_cell", (out, OUT), scalars=[address], chip=chip)

    def open(self, gate: int = 0) -> None:
        self.gates[gate] = 1

    def allocate(self, name="d", workers=(0, 1), window=64, buffers=None, then=None):
        """A run that allocates one domain; the handle and the run."""
        seen = []

        def build(orch):
            specs = signal_buffer() if buffers is None else buffers
            seen.append(orch.allocate_domain(name=name, workers=workers, window_size=window, buffers=specs))
            if then is not None:
                then(orch, seen[0])

        run = self.submit(build)
        return seen[0], run

    def detach(self, domain) -> None:
        """Legacy retention: takes a domain out of the register of the run being built."""
        resources = self.worker._building_run_resources
        with resources.domain_lock:
            assert not resources.retired
            assert self.worker._live_domains[domain.name] is domain
            assert resources.live_domains[domain.name] is domain
            del resources.live_domains[domain.name]

    def retained(self, name="d", workers=(0, 1), window=64, buffers=None):
        domain, run = self.allocate(name, workers, window, buffers, then=lambda _, d: self.detach(d))
        run.result()
        return domain

    def handshake(self, orch, domain, outs, thresholds=(1, 1)) -> None:
        """On every member: signal the others, wait for the threshold of its rank, store what was seen."""
        for chip, out, threshold in zip(domain.workers, outs, thresholds):
            context = domain[chip]
            scalars = [context.device_ctx, 0, threshold]
            self.task(
                orch, "pto_handshake", (context.buffers["signal"], NO_DEP), (out, OUT), scalars=scalars, chip=chip
            )


class StandInTest(unittest.TestCase):
    """Base of all tests: nothing may be left behind, and nothing may hang."""

    def setUp(self) -> None:
        faulthandler.dump_traceback_later(GUARD_S, exit=True)
        self.addCleanup(faulthandler.cancel_dump_traceback_later)
        del _created[:]
        threads = set(threading.enumerate())
        descriptors = len(os.listdir("/proc/self/fd"))
        self.addCleanup(self._nothing_left, threads, descriptors)
        self.addCleanup(clear)

    def _nothing_left(self, threads, descriptors) -> None:
        linked = set(os.listdir("/dev/shm"))
        self.assertEqual([n for n in _created if n in linked], [], "host buffers left in shared memory")
        self.assertEqual(window_names(), [], "windows left in shared memory")
        self.assertEqual([t for t in threading.enumerate() if t not in threads and t.is_alive()], [])
        # The tracker of shared memory keeps one descriptor once it runs.
        self.assertLessEqual(len(os.listdir("/proc/self/fd")), descriptors + 1)
        self.assertEqual(children(), set(), "child processes left")

    def environment(self, **values: str) -> None:
        """Sets variables for this test."""
        for name, value in values.items():
            before = os.environ.get(name)
            os.environ[name] = value
            restore = (lambda n=name: os.environ.pop(n, None)) if before is None else None
            self.addCleanup(restore or (lambda n=name, v=before: os.environ.__setitem__(n, v)))

    def refused(self, error, text: str):
        """Expects an error whose message has a part in it."""
        return self.assertRaisesRegex(error, text)


def children() -> set[int]:
    """Children of this process, apart from the tracker of shared memory."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found - {resource_tracker._resource_tracker._pid}


def script(body: str, **environment: str) -> subprocess.Popen:
    """A Python process of its own that runs ``body`` with the stand-in on its path."""
    prelude = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + body],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
