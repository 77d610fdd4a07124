"""The parent's side of the children: who runs what when.

One thread (``simpler-scheduler``) receives every answer and learns of every death; requests are sent by whoever
makes them. A child works on one request at a time. All state is under one lock, and nothing is called under it.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from . import faults
from .child import _LENGTH, pack, run_child
from .types import ARGUMENT_BLOB_BYTES, WRITING_TAGS, AddressSpace, TaskArgs, TensorArgType

MAX_SCOPES = 64
COLLECTIVE = ("alloc_domain", "release_domain")


class Cancelled(Exception):
    """``close`` ended the start."""


class Request:
    """One message to a child, and what came of it."""

    __slots__ = ("answer", "data", "error", "finished", "operation", "sent", "task")

    def __init__(self, operation: str, data: bytes, task: Any = None) -> None:
        self.operation, self.data, self.task = operation, data, task
        self.finished = threading.Event() if task is None else None
        self.answer: Any = None
        self.error: str | None = None
        self.sent = False


class Child:
    """A forked process."""

    def __init__(self, kind: str, index: int, pid: int, sock: socket.socket) -> None:
        self.kind, self.index, self.pid, self.sock = kind, index, pid, sock
        self.pidfd = -1
        if hasattr(os, "pidfd_open"):
            try:
                self.pidfd = os.pidfd_open(pid)
            except OSError:
                pass
        self.queue: deque[Request] = deque()
        self.current: Request | None = None
        self.received = bytearray()
        # How it ended, once somebody had to know. Until then a dead idle child stays a zombie, as with the runtime.
        self.exited: str | None = None
        self.hung_up = False
        self.reaped = False
        # A message that the mailbox cannot hold ends its dispatcher, while the process lives on.
        self.stopped = False
        # The first control command to a dead child reports its death, the later ones that it hangs.
        self.control_failed = False

    def messages(self) -> list[Any] | None:
        """What has arrived; ``None`` once the child has hung up."""
        ended = False
        while True:
            try:
                part = self.sock.recv(1 << 16, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                ended = True
                break
            if not part:
                ended = True
                break
            self.received += part
        out = []
        while len(self.received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self.received)[0]
            if len(self.received) < end:
                break
            out.append(pickle.loads(bytes(self.received[_LENGTH.size : end])))
            del self.received[:end]
        return None if ended and not out else out

    def reap(self, block: bool) -> bool:
        """Collects the exit status; whether the process is gone."""
        if self.reaped:
            return True
        text = f"child process pid={self.pid} exited before mailbox completion"
        try:
            pid, status = os.waitpid(self.pid, 0 if block else os.WNOHANG)
        except ChildProcessError:
            pid, status = self.pid, None
        if pid == 0:
            return False
        self.reaped = True
        if status is None:
            self.exited = f"child process pid={self.pid} is no longer waitable (reaped elsewhere)"
        elif os.WIFSIGNALED(status):
            self.exited = f"{text} (signal={os.WTERMSIG(status)})"
        else:
            self.exited = f"{text} (exit_status={os.WEXITSTATUS(status)})"
        return True

    def wait_exit(self, seconds: float) -> bool:
        """Waits for the end of the process; whether it came."""
        if self.pidfd >= 0:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            poll.poll(max(0.0, seconds) * 1000)
            return self.reap(False)
        deadline = time.monotonic() + seconds
        while not self.reap(False):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def close(self) -> None:
        self.sock.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Task:
    """One node of a run's graph, on one child per member."""

    __slots__ = ("blockers", "consumers", "error", "label", "left", "parts", "run", "state")

    def __init__(self, run: Run, parts: list[tuple[int | None, bytes, int]]) -> None:
        self.run = run
        # Per member: the chip (None for a sub task), the message, and its size as the mailbox counts it.
        self.parts = parts
        self.left = len(parts)
        self.blockers = 0
        self.consumers: list[Task] = []
        self.error: str | None = None
        self.state = "pending"  # then ready, running, ended


class Run:
    """One submission, from its admission to its fence."""

    def __init__(self, run_id: int) -> None:
        self.id = run_id
        self.tasks: list[Task] = []
        self.waiting: list[Task] = []
        self.outstanding = 0
        self.closed = False
        self.cancelled = False
        self.terminal = False
        self.error: str | None = None
        # Who wrote which bytes of which backing, for dependencies.
        self.writers: dict[Any, list[tuple[int, int, Task]]] = {}


class Native:
    """All children of one worker, its runs and its scheduler."""

    def __init__(self, depth: int) -> None:
        self.chips: list[Child] = []
        self.subs: list[Child] = []
        self.depth = depth
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._runs: dict[int, Run] = {}
        self._order: deque[Run] = deque()
        self._next_run = 1
        # Open scopes, each run's own included. A run that leaves one open leaves it to its successors.
        self._scopes = 0
        self._sub_ready: deque[tuple[Request, Task]] = deque()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_in, False)
        self._thread: threading.Thread | None = None
        self._stopping = False

    # Children --------------------------------------------------------------------------------------------------

    @property
    def children(self) -> list[Child]:
        return [*self.chips, *self.subs]

    def fork(self, kind: str, index: int, body: Callable[[Any], None]) -> Child:
        """Starts one child. Call before :meth:`start`."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            # Ends that belong to the parent or to a sibling would keep those from noticing a hang-up.
            try:
                ours.close()
                for other in self.children:
                    other.close()
                os.close(self._wake_in)
                os.close(self._wake_out)
            finally:
                run_child(theirs, parent, body)
        theirs.close()
        child = Child(kind, index, pid, ours)
        (self.chips if kind == "chip" else self.subs).append(child)
        return child

    def await_ready(self, deadline: float, cancelled: Callable[[], bool], budget: float) -> None:
        """Waits for every child's report. ``RuntimeError`` names the child that failed, or all that are late."""
        for kind, group in (("sub", self.subs), ("chip", self.chips)):
            pending = {c.sock.fileno(): c for c in group}
            poll = select.poll()
            poll.register(self._wake_out, select.POLLIN)
            for fd in pending:
                poll.register(fd, select.POLLIN)
            while pending:
                if cancelled():
                    raise Cancelled(f"{kind} worker readiness wait cancelled by close()")
                left = deadline - time.monotonic()
                if left <= 0:
                    late = sorted(c.index for c in pending.values())
                    raise RuntimeError(
                        f"{kind} worker(s) {late} did not become ready within {budget}s (startup deadline exceeded)"
                    )
                for fd, _ in poll.poll(left * 1000 + 1):
                    child = pending.get(fd)
                    if child is None:
                        continue
                    who = f"{kind} worker {child.index} (pid {child.pid})"
                    messages = child.messages()
                    if messages is None:
                        child.reap(True)
                        raise RuntimeError(f"{who} exited during init before signalling ready: {child.exited}")
                    for what, detail in messages:
                        if what == "init_failed":
                            raise RuntimeError(f"{who} failed during init: {detail}")
                        if kind == "chip":
                            self.depth = min(self.depth, detail)
                        poll.unregister(fd)
                        del pending[fd]

    def wake(self) -> None:
        try:
            os.write(self._wake_in, b"\0")
        except (BlockingIOError, OSError):
            pass

    def start(self) -> None:
        """Starts the scheduler thread."""
        self._thread = threading.Thread(target=self._receive, name="simpler-scheduler", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        poll = select.poll()
        poll.register(self._wake_out, select.POLLIN)
        watched: dict[int, Child] = {}
        for child in self.children:
            for fd in (child.sock.fileno(), child.pidfd):
                if fd >= 0:
                    watched[fd] = child
                    poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll(None):
                if fd == self._wake_out:
                    os.read(self._wake_out, 4096)
                    if self._stopping:
                        return
                    continue
                child = watched.get(fd)
                if child is None:
                    continue
                messages = child.messages()
                gone = messages is None or fd == child.pidfd
                for ok, value in messages or ():
                    self._answered(child, ok, value)
                if gone:
                    for number in (child.sock.fileno(), child.pidfd):
                        if watched.pop(number, None) is not None:
                            poll.unregister(number)
                    self._died(child)

    def _answered(self, child: Child, ok: bool, value: Any) -> None:
        with self._changed:
            request, child.current = child.current, None
            if request is not None:
                self._settle(child, request, value if ok else None, None if ok else value)
            self._pump(child)
            self._changed.notify_all()

    def _died(self, child: Child) -> None:
        with self._changed:
            child.hung_up = True
            sole_sub = child.kind == "sub" and self._sub_ready and all(c.hung_up for c in self.subs)
            self._changed.notify_all()
            if child.current is None and not child.queue and not sole_sub:
                return
            child.reap(True)
            pending = [r for r in (child.current, *child.queue) if r is not None]
            child.current = None
            child.queue.clear()
            for request in pending:
                self._settle(child, request, None, self._dead_text(child, request))
            if sole_sub:
                waiting, self._sub_ready = self._sub_ready, deque()
                for request, _ in waiting:
                    self._settle(child, request, None, self._dead_text(child, request))

    @staticmethod
    def _dead_text(child: Child, request: Request) -> str:
        """How the runtime words a dead child, which depends on what found it out."""
        if request.task is not None:
            if request.sent:
                return f"LocalMailboxEndpoint progress failed: {child.exited}"
            return f"WorkerThread endpoint rejected publication: endpoint is poisoned: {child.exited}"
        if child.control_failed:
            return f"control_{request.operation} failed: mailbox has an unresolved timed-out control command"
        child.control_failed = True
        return f"control_{request.operation}: {child.exited}"

    def _settle(self, child: Child, request: Request, value: Any, error: str | None) -> None:
        """Notes what came of a request. Holds the lock."""
        request.answer, request.error = value, error
        if request.task is None:
            request.finished.set()
            return
        if error is not None and not error.startswith(("LocalMailbox", "WorkerThread")):
            error = f"LocalMailboxEndpoint child failed (worker_id={child.index}, code=1): {error}"
        self._part_ended(request.task, error)

    def _pump(self, child: Child) -> None:
        """Sends the next request to an idle child. Holds the lock."""
        while child.current is None and not child.hung_up:
            if not child.queue:
                if child.kind != "sub" or not self._sub_ready:
                    return
                child.queue.append(self._sub_ready.popleft()[0])
            request = child.queue.popleft()
            if request.task is not None:
                if request.task.state == "ended":
                    continue  # cancelled before it was sent
                request.task.state = "running"
            request.sent = True
            child.current = request
            try:
                child.sock.sendall(request.data, socket.MSG_NOSIGNAL)
            except OSError:
                return  # dead: the scheduler is about to learn of it
            return

    def _enqueue(self, child: Child, request: Request) -> None:
        """Gives a child a request. Holds the lock."""
        if child.hung_up:
            child.reap(True)
            self._settle(child, request, None, self._dead_text(child, request))
            return
        child.queue.append(request)
        self._pump(child)

    # Control ---------------------------------------------------------------------------------------------------

    def control(self, child: Child, operation: str, *arguments: Any) -> Any:
        """One synchronous command to one child. ``RuntimeError`` with the child's words where it fails."""
        answers, errors = self.control_all([(child, arguments)], operation)
        if errors:
            raise RuntimeError(errors[0][1])
        return answers[0]

    def control_all(
        self, calls: Sequence[tuple[Child, tuple[Any, ...]]], operation: str
    ) -> tuple[list[Any], list[tuple[int, str]]]:
        """One command to several children at once; all answers, and ``(child index, text)`` per failure."""
        requests: list[tuple[Child, Request | None, str | None]] = []
        drawn = [faults.draw(operation, child.kind, child.index) for child, _ in calls]
        # Where one member of a collective step stays away, no other gets past the barrier.
        stuck = operation in COLLECTIVE and any(early for early, _ in drawn)
        for (child, arguments), (early, late) in zip(calls, drawn):
            if stuck:
                early = early or f"control_{operation}: a peer did not reach the barrier"
            request = None if early else Request(operation, pack((operation, arguments)))
            requests.append((child, request, early or late))
        with self._changed:
            for child, request, _ in requests:
                if request is not None:
                    self._enqueue(child, request)
        answers, errors = [], []
        for child, request, injected in requests:
            if request is not None:
                request.finished.wait()
            error = injected or (request.error if request is not None else None)
            answers.append(None if request is None or request.error else request.answer)
            if error is not None:
                errors.append((child.index, error))
        return answers, errors

    # Runs ------------------------------------------------------------------------------------------------------

    def begin_run(self) -> int:
        """Admits a run; blocks while as many as the depth are in flight."""
        with self._changed:
            while len(self._order) >= self.depth:
                self._changed.wait()
            run = Run(self._next_run)
            self._next_run += 1
            self._runs[run.id] = run
            self._order.append(run)
            return run.id

    def await_head(self, run_id: int) -> None:
        """Waits until the run is the oldest in flight."""
        with self._changed:
            while self._order and self._order[0].id != run_id and run_id in self._runs:
                self._changed.wait()

    def close_run(self, run_id: int) -> None:
        """No more tasks will come."""
        with self._changed:
            self._runs[run_id].closed = True
            self._advance()

    def cancel_run(self, run_id: int, message: str) -> None:
        """The graph failed: what has not started never will."""
        with self._changed:
            run = self._runs[run_id]
            run.cancelled = run.closed = True
            if run.error is None:
                run.error = message
            for task in list(run.tasks):
                if task.state in ("pending", "ready"):
                    self._end(task, message)
            run.waiting.clear()
            # A cancelled run with nothing on the device need not wait for its turn.
            if run.outstanding == 0 and run in self._order:
                self._order.remove(run)
                run.terminal = True
            self._advance()

    def wait_run(self, run_id: int, timeout: float | None) -> bool:
        """Waits for the fence. ``RuntimeError`` where the run failed; False where the time is up."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            run = self._runs.get(run_id)
            while run is not None and not run.terminal:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
            if run is not None and run.error is not None:
                raise RuntimeError(run.error)
            return True

    def run_done(self, run_id: int) -> bool:
        with self._lock:
            run = self._runs.get(run_id)
            return run is None or run.terminal

    def forget_run(self, run_id: int) -> None:
        with self._lock:
            self._runs.pop(run_id, None)

    def _advance(self) -> None:
        """Retires finished runs at the head and lets the next one's tasks go. Holds the lock."""
        while self._order:
            head = self._order[0]
            waiting, head.waiting = head.waiting, []
            for task in waiting:
                if task.state == "pending" and task.blockers == 0:
                    self._launch(task)
            if not head.closed or head.outstanding:
                break
            head.terminal = True
            self._order.popleft()
        self._changed.notify_all()

    # Scopes ----------------------------------------------------------------------------------------------------

    def scope(self, step: int) -> None:
        """Opens (1) or closes (-1) a scope."""
        with self._lock:
            if step > 0 and self._scopes >= MAX_SCOPES:
                raise RuntimeError("Scope: maximum nesting depth exceeded")
            if step < 0 and self._scopes == 0:
                raise RuntimeError("Scope: scope_end without scope_begin")
            self._scopes += step

    # Tasks -----------------------------------------------------------------------------------------------------

    def submit_task(self, run_id: int, members: Sequence[tuple[int | None, bytes, TaskArgs]]) -> None:
        """Adds one node: per member the chip (``None``: any sub worker), the callable's digest and the arguments."""
        with self._changed:
            run = self._runs[run_id]
            label = f"run_id={run_id} task={len(run.tasks)}"
            parts = [
                (chip, pack(("task", (digest, *args.wire(), label))), args.blob_bytes())
                for chip, digest, args in members
            ]
            task = Task(run, parts)
            producers = self._producers(run, task, members)
            run.tasks.append(task)
            run.outstanding += 1
            failed = next((p for p in producers if p.state == "ended" and p.error is not None), None)
            if failed is not None:
                self._end(task, failed.error)
                self._advance()
                return
            for producer in producers:
                if producer.state != "ended":
                    producer.consumers.append(task)
                    task.blockers += 1
            if task.blockers == 0:
                self._release(task)

    @staticmethod
    def _producers(run: Run, task: Task, members: Sequence[tuple[int | None, bytes, TaskArgs]]) -> list[Task]:
        """The earlier tasks of the run that this one must wait for: whoever wrote bytes that it reads."""
        found: list[Task] = []
        for chip, _, args in members:
            for i in range(args.tensor_count()):
                tensor, tag = args.tensor(i), args.tag(i)
                key: Any = tensor.buffer.identity
                if tensor.buffer.address_space == AddressSpace.DEVICE:
                    key = (key, chip)
                start, end = tensor.byte_range()
                if tag in (TensorArgType.INPUT, TensorArgType.INOUT):
                    for first, last, writer in run.writers.get(key, ()):
                        if first < end and start < last and writer is not task and writer not in found:
                            found.append(writer)
                if tag in WRITING_TAGS:
                    writers = run.writers.setdefault(key, [])
                    if tag is TensorArgType.INOUT:
                        # Ordered after everything it covers, so later readers need to wait for it alone.
                        writers[:] = [w for w in writers if not (start <= w[0] and w[1] <= end and w[2] in found)]
                    writers.append((start, end, task))
        return found

    def _release(self, task: Task) -> None:
        """Nothing blocks the task any more but, perhaps, its run's turn. Holds the lock."""
        if self._order and self._order[0] is task.run:
            self._launch(task)
        else:
            task.run.waiting.append(task)

    def _launch(self, task: Task) -> None:
        """Hands the task to its children; a group reaches all of them before any other task can. Holds the lock."""
        task.state = "ready"
        for chip, data, size in task.parts:
            request = Request("task", data, task)
            if chip is None:
                idle = next((c for c in self.subs if not c.hung_up and c.current is None and not c.queue), None)
                if idle is not None:
                    self._enqueue(idle, request)
                elif all(c.hung_up for c in self.subs):
                    self.subs[0].reap(True)
                    self._settle(self.subs[0], request, None, self._dead_text(self.subs[0], request))
                else:
                    self._sub_ready.append((request, task))
                continue
            child = self.chips[chip]
            if size > ARGUMENT_BLOB_BYTES or child.stopped:
                note = f" ({size} bytes of arguments, at most {ARGUMENT_BLOB_BYTES})" if not child.stopped else ""
                child.stopped = True
                self._settle(child, request, None, f"WorkerThread::dispatch: worker is stopping{note}")
                continue
            self._enqueue(child, request)

    def _part_ended(self, task: Task, error: str | None) -> None:
        """One member of a task came to its end. Holds the lock."""
        if error is not None and task.error is None:
            task.error = error
        task.left -= 1
        if task.left == 0 and task.state != "ended":
            self._end(task, task.error)
            self._advance()

    def _end(self, task: Task, error: str | None) -> None:
        """Settles a task and, where it failed, everything that depends on it. Holds the lock."""
        ending = [task]
        while ending:
            task = ending.pop()
            if task.state == "ended":
                continue
            task.state, task.error = "ended", error
            task.run.outstanding -= 1
            if error is not None and task.run.error is None:
                task.run.error = error
            for consumer in task.consumers:
                consumer.blockers -= 1
                if error is not None:
                    ending.append(consumer)
                elif consumer.blockers == 0 and consumer.state == "pending":
                    self._release(consumer)

    # The end ---------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Ends every child at once and collects it; for a start that failed."""
        for child in self.children:
            if not child.reaped:
                try:
                    os.kill(child.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        for child in self.children:
            child.reap(True)
        self._dispose()

    def stop(self, seconds: float) -> None:
        """Asks every child to end, collects them, ends the scheduler."""
        deadline = time.monotonic() + seconds
        with self._changed:
            for child in self.children:
                self._enqueue(child, Request("shutdown", pack(("shutdown", ()))))
        # Only a child that does not leave in time is ended by force.
        for child in self.children:
            with self._changed:
                while not child.hung_up and time.monotonic() < deadline:
                    self._changed.wait(max(0.0, deadline - time.monotonic()))
            if not child.hung_up:
                os.kill(child.pid, signal.SIGKILL)
            child.reap(True)
        self._stopping = True
        self.wake()
        if self._thread is not None:
            self._thread.join()
        self._dispose()

    def _dispose(self) -> None:
        for child in self.children:
            child.close()
        for fd in (self._wake_in, self._wake_out):
            os.close(fd)
