"""Preludes for tests: what a runtime of another version might lack."""


def without_hooks():
    """Workers lack one of the private hooks of legacy retention."""
    from simpler.worker import Worker

    made = Worker.__init__

    def make(self, *args, **kwargs):
        made(self, *args, **kwargs)
        del self._live_domains

    Worker.__init__ = make


def without_public_retention():
    """The orchestrator lacks the public retention call."""
    from simpler.orchestrator import Orchestrator

    if hasattr(Orchestrator, "get_or_allocate_domain"):
        del Orchestrator.get_or_allocate_domain


def without_submit():
    """The worker lacks a piece that the binding cannot do without."""
    from simpler.worker import Worker

    del Worker.submit


def fails():
    raise RuntimeError("the prelude failed on purpose")


def hang_second_chip():
    """The stand-in's second chip never comes up."""
    import os

    os.environ["PTO_STANDIN_HANG_INIT"] = "1"


def toolchain():
    """Where generated programs of the tests find kernel sources, and the one compiler name that the driver knows."""
    import os
    import shutil
    import tempfile
    from pathlib import Path

    os.environ["PTO_TEST_KERNELS"] = str(Path(__file__).resolve().parent)
    if shutil.which("g++-15") is None and (compiler := shutil.which("g++")):
        directory = Path(tempfile.mkdtemp())
        (directory / "g++-15").symlink_to(compiler)
        os.environ["PATH"] = f"{directory}{os.pathsep}{os.environ.get('PATH', '')}"


def report(args):
    """Bound in place of the sub-worker of that name."""
    args[0].buffer.cast("B").cast("i")[1] += 1


def takes_two(first, second):
    raise AssertionError("never called")


# Seconds that the host has spent inside the runtime since the last `take`; see `time_runtime`.
_spent = 0.0


def time_runtime():
    """Adds up the host time of a dispatch that is the runtime's own: in `Worker.submit` less the callback that it
    makes, and in the calls that the callback makes."""
    import time

    from simpler.orchestrator import Orchestrator
    from simpler.worker import Worker

    clock = time.perf_counter

    def add(seconds):
        global _spent
        _spent += seconds

    def timed_submit(submit):
        def call(self, graph, *args, **kwargs):
            inside = 0.0

            def timed_graph(*graph_args):
                nonlocal inside
                start = clock()
                try:
                    return graph(*graph_args)
                finally:
                    inside += clock() - start

            start = clock()
            try:
                return submit(self, timed_graph, *args, **kwargs)
            finally:
                add(clock() - start - inside)

        return call

    def timed(method):
        def call(*args, **kwargs):
            start = clock()
            try:
                return method(*args, **kwargs)
            finally:
                add(clock() - start)

        return call

    Worker.submit = timed_submit(Worker.submit)
    names = ("allocate_domain", "get_or_allocate_domain", "copy_to", "submit_next_level", "submit_next_level_group")
    for name in names:
        if hasattr(Orchestrator, name):
            setattr(Orchestrator, name, timed(getattr(Orchestrator, name)))


def take():
    """What has been added up, in seconds; from here on it starts at zero."""
    global _spent
    spent, _spent = _spent, 0.0
    return spent


class Mute(Exception):
    def __str__(self):
        raise KeyboardInterrupt("asked for its text")


def fails_without_text():
    raise Mute()


def fails_with_odd_text():
    raise RuntimeError("no such file: \udcff.py")
