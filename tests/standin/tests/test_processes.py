"""What the processes leave behind, whoever dies (contract section 6 and rule 1 of section 0)."""

import os
import signal
import subprocess
import sys
import unittest
from pathlib import Path

from support import StandInTest, process_runs, script, until, window_names

_COMPILE = "import sys\nfor f in sys.argv[1:]: compile(open(f).read(), f, 'exec')"

_OPEN = """
import os, time
from support import Rig
class Case:
    def addCleanup(self, *_): pass
rig = Rig(Case())
domain = rig.retained()
buffer = rig.worker.create_buffer(4096)
print(os.getpid(), buffer.shm.name, *rig.worker._chip_pids, *rig.worker._sub_pids, flush=True)
"""


class Ends(StandInTest):
    def begin(self, body: str, **environment: str):
        host = script(_OPEN + body, **environment)
        self.addCleanup(host.kill)
        pid, name, *children = host.stdout.readline().split()
        return host, int(pid), name, [int(c) for c in children]

    def nothing_left(self, pid: int, name: str, children: list[int]) -> None:
        until(lambda: not any(process_runs(child) for child in children))
        until(lambda: not window_names(pid))
        until(lambda: not os.path.exists(f"/dev/shm/{name}"))

    def test_whatever_ends_the_host_ends_its_children_and_their_names(self):
        for number in (signal.SIGKILL, signal.SIGTERM):
            host, *rest = self.begin("input()")
            host.send_signal(number)
            host.communicate()
            self.nothing_left(*rest)

    def test_an_immediate_exit_too(self):
        host, *rest = self.begin("os._exit(0)")
        host.communicate()
        self.assertEqual(host.returncode, 0)
        self.nothing_left(*rest)

    def test_children_in_the_middle_of_a_kernel_notice_as_well(self):
        host, *rest = self.begin("rig.hold(rig.worker.create_buffer(4)); print('held', flush=True); input()")
        self.assertEqual(host.stdout.readline(), "held\n")
        host.kill()
        host.communicate()
        self.nothing_left(*rest)

    def test_a_child_in_the_middle_of_a_gate_notices_as_well(self):
        body = """
from support import INOUT, words, until
gate = rig.worker.create_buffer(8)
rig.submit(lambda orch: rig.sub(orch, "pto_gate", (gate, INOUT)))
until(lambda: words(gate)[1] == 1)
print('held', flush=True); input()
"""
        host, *rest = self.begin(body)
        self.assertEqual(host.stdout.readline(), "held\n")
        host.kill()
        host.communicate()
        self.nothing_left(*rest)

    def test_losing_an_open_worker_ends_the_process(self):
        for body, text in (
            ("import gc; del domain, buffer, rig.worker, rig; gc.collect()", "was collected"),
            ("", "the interpreter ends while a Worker is open"),
        ):
            host, *rest = self.begin(body)
            _, errors = host.communicate()
            self.assertEqual(host.returncode, -signal.SIGABRT, errors)
            self.assertIn(text, errors)
            self.nothing_left(*rest)
            lenient, *rest = self.begin(body, PTO_STANDIN_LENIENT="1")
            lenient.communicate()
            self.assertEqual(lenient.returncode, 0)
            self.nothing_left(*rest)

    def test_a_terminals_signals_miss_the_children(self):
        host, pid, name, children = self.begin(
            "import signal; signal.signal(signal.SIGINT, lambda *_: print('int', flush=True))\n"
            "print('ready', flush=True)\nwhile True:\n  try: input(); break\n  except EOFError: break\n"
            "rig.end(); print('closed', flush=True)"
        )
        self.assertEqual(host.stdout.readline(), "ready\n")
        host.send_signal(signal.SIGINT)
        self.assertEqual(host.stdout.readline(), "int\n")
        self.assertTrue(all(process_runs(child) for child in children))
        out, _ = host.communicate("\n")
        self.assertEqual((out, host.returncode), ("closed\n", 0))
        self.nothing_left(pid, name, children)

    def test_an_ignored_child_signal_is_tolerated(self):
        body = """
import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from simpler.worker import Worker
with Worker(level=3, platform="a5sim", runtime="host_build_graph", device_ids=[0]) as worker:
    worker.init()
    worker.run(lambda *_: None)
print("fine")
"""
        out, errors = script(body).communicate()
        self.assertEqual(out, "fine\n", errors)

    def test_an_import_starts_nothing_and_needs_nothing(self):
        body = (
            "import threading, simpler.worker, simpler.orchestrator, simpler.task_interface, simpler.standin\n"
            "print(threading.active_count(), any(m.startswith(('numpy', 'torch')) for m in sys.modules))"
        )
        out, errors = script(body).communicate()
        self.assertEqual(out, "1 False\n", errors)

    def test_the_logger_is_where_a_host_looks_for_it(self):
        body = "import logging, simpler; print(logging.getLogger('simpler').level, simpler.get_current_config())"
        out, errors = script(body).communicate()
        self.assertEqual(out, "25 25\n", errors)


class Sources(unittest.TestCase):
    def test_every_file_compiles_without_warnings(self):
        root = Path(__file__).resolve().parent.parent
        files = [str(p) for p in root.rglob("*.py")]
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", _COMPILE, *files],
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
