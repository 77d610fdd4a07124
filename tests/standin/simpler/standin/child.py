"""What the forked children do: take requests from their parent one at a time, answer, and never outlive it."""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any

from ..buffer import ImportRegistry, MappedArg, MappedArgs
from ..callable_identity import rebuild_callable
from . import kernels
from .memory import Device, DeviceFault
from .types import CHIP_MAX_SCALARS, CHIP_MAX_TENSORS, ChipCallable

_LENGTH = struct.Struct("<I")


def pack(message: Any) -> bytes:
    """One message, framed."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class ParentGone(BaseException):
    """The parent is dead or has hung up: the child's life is over."""


class Link:
    """The child's end of its connection, and its watch over the parent."""

    def __init__(self, sock: socket.socket, parent: int) -> None:
        self._sock, self._parent = sock, parent
        sock.setblocking(True)
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)
        self._pidfd = -1
        if hasattr(os, "pidfd_open"):
            try:
                self._pidfd = os.pidfd_open(parent)
                self._poll.register(self._pidfd, select.POLLIN)
            except OSError:
                pass

    def alive(self) -> None:
        """Raises once the parent is dead."""
        if os.getppid() != self._parent:
            raise ParentGone

    def receive(self) -> Any:
        # The timeout only matters where the kernel cannot report the parent's death.
        while True:
            ready = {fd for fd, _ in self._poll.poll(None if self._pidfd >= 0 else 500)}
            if self._sock.fileno() in ready:
                break
            self.alive()
            if self._pidfd in ready:
                raise ParentGone
        return pickle.loads(self._exactly(_LENGTH.unpack(self._exactly(_LENGTH.size))[0]))

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._sock.recv(count - len(data))
            if not part:
                raise ParentGone
            data += part
        return bytes(data)

    def send(self, message: Any) -> None:
        try:
            self._sock.sendall(pack(message))
        except OSError:
            raise ParentGone from None


def die_of(number: int) -> None:
    """Ends this process by a signal, whatever handlers the host had."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


def run_child(sock: socket.socket, parent: int, body: Callable[[Link], None]) -> None:
    """The whole life of a child after the fork. Does not return."""
    status = 1
    try:
        os.setpgid(0, 0)  # a terminal's signals are for the host alone
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGPIPE else signal.SIG_DFL)
        link = Link(sock, parent)
        link.alive()
        body(link)
        status = 0
    except ParentGone:
        status = 0
    except BaseException as error:  # nothing may travel up into the host's stack
        os.write(2, f"simpler stand-in: child {os.getpid()}: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _serve(link: Link, handlers: dict[str, Callable[..., Any]]) -> None:
    """Answers requests until told to stop."""
    while True:
        operation, arguments = link.receive()
        if operation == "shutdown":
            link.send((True, None))
            return
        try:
            answer = (True, handlers[operation](*arguments))
        except Exception as error:
            answer = (False, error.args[0] if isinstance(error, Reported) else _text(error))
        link.send(answer)


class Reported(Exception):
    """A failure whose text is complete as it stands."""


def load_kernel(target: ChipCallable) -> Callable[[kernels.Call], None]:
    """The kernel that a chip callable names."""
    try:
        described = json.loads(target.binary)
        name = described["kernel"] if described["simpler_standin"] == 1 else None
    except (ValueError, KeyError, TypeError, UnicodeDecodeError):
        raise RuntimeError(f"{target.func_name!r} is not an artefact of the stand-in") from None
    if name not in kernels.KERNELS:
        raise RuntimeError(f"no portable kernel is called {name!r}")
    return kernels.KERNELS[name]


class ChipProcess:
    """One chip: its memory, its callables and its run lane."""

    def __init__(self, link: Link, device_id: int) -> None:
        self._link = link
        self._who = f"chip_process dev={device_id}"
        self._device = Device(link.alive)
        self._imports = ImportRegistry()
        self._callables: dict[bytes, Callable[[kernels.Call], None]] = {}
        self._poison: str | None = None

    def register(self, digest: bytes, raw: bytes) -> None:
        self._callables[digest] = load_kernel(ChipCallable.from_bytes(raw))

    def unregister(self, digest: bytes) -> None:
        self._callables.pop(digest, None)

    def task(self, digest: bytes, tensors: Any, scalars: Any, label: str) -> None:
        try:
            if len(tensors) > CHIP_MAX_TENSORS:
                raise IndexError("TaskArgs: tensor capacity exceeded")
            if len(scalars) > CHIP_MAX_SCALARS:
                raise IndexError("TaskArgs: scalar capacity exceeded")
            if self._poison is not None:
                raise RuntimeError(f"chip run lane is poisoned: {self._poison}")
            run = self._callables.get(digest)
            if run is None:
                raise RuntimeError(f"unknown callable sha256:{digest.hex()}")
            # Backings are mapped before the run starts, so a released one fails this task and no other.
            for wire in tensors:
                if wire[0][1] in (0, 1, 5):
                    self._imports.view(wire[0])
            self._run(run, kernels.Call(self._device, self._imports, tensors, scalars, self._link.alive), label)
        except Exception as error:
            raise Reported(f"{self._who}: {_text(error)}") from None

    def _run(self, run: Callable[[kernels.Call], None], call: kernels.Call, label: str) -> None:
        try:
            run(call)
        except DeviceFault as fault:
            os.write(2, f"simpler stand-in: {self._who}: device fault: {fault}\n".encode())
            die_of(signal.SIGSEGV)
        except Exception as error:
            code = error.code if isinstance(error, kernels.KernelFailure) else -1
            note = "" if isinstance(error, kernels.KernelFailure) else f": {_text(error)}"
            self._poison = f"finalize_native_run failed with code {code} ({label}){note}"
            raise RuntimeError(self._poison) from None

    def copy(self, to_device: bool, address: int, wire: Any, nbytes: int) -> None:
        host, device = self._imports.view(wire)[:nbytes], self._device.view(address, nbytes)
        if to_device:
            device[:] = host
        else:
            host[:] = device

    def serve(self) -> None:
        device = self._device
        try:
            _serve(
                self._link,
                {
                    "task": self.task,
                    "register": self.register,
                    "unregister": self.unregister,
                    "copy_to": lambda *a: self.copy(True, *a),
                    "copy_from": lambda *a: self.copy(False, *a),
                    "malloc": device.malloc,
                    "free": device.free,
                    "committed_device_memory": device.committed,
                    "alloc_domain": device.allocate_window,
                    "release_domain": device.release_window,
                    "drop_import": self._imports.unregister,
                },
            )
        finally:
            device.remove_names()


def chip_body(index: int, device_id: int, snapshot: dict[bytes, Any], refusal: str | None, depth: int) -> Any:
    """The body of a chip child: uploads the snapshot, reports ready, serves."""

    def body(link: Link) -> None:
        chip = ChipProcess(link, device_id)
        try:
            if os.environ.get("PTO_STANDIN_HANG_INIT") == str(index):
                link.receive()  # never comes
            if refusal is not None:
                raise RuntimeError(refusal)
            for digest, target in snapshot.items():
                if isinstance(target, ChipCallable):
                    chip.register(digest, target.to_bytes())
        except Exception as error:
            link.send(("init_failed", f"chip_process dev={device_id} init: {_text(error)}"))
            return
        link.send(("ready", depth))
        chip.serve()

    return body


def sub_body(index: int, snapshot: dict[bytes, Any]) -> Any:
    """The body of a host-side sub-worker child."""

    def body(link: Link) -> None:
        callables = {digest: t for digest, t in snapshot.items() if not isinstance(t, ChipCallable)}
        imports = ImportRegistry()

        def task(digest: bytes, tensors: Any, scalars: Any, _label: str) -> None:
            try:
                if digest not in callables:
                    raise RuntimeError(f"unknown callable sha256:{digest.hex()}")
                mapped = [MappedArg(imports.view(wire[0]), wire) for wire in tensors]
                callables[digest](MappedArgs(mapped, scalars))
            except Exception as error:
                raise Reported(f"sub_worker: {_text(error)}") from None

        def register(digest: bytes, payload: bytes) -> None:
            callables[digest] = rebuild_callable(payload)

        link.send(("ready", 0))
        _serve(
            link,
            {
                "task": task,
                "register": register,
                "unregister": lambda digest: callables.pop(digest, None) and None,
                "drop_import": imports.unregister,
            },
        )

    return body
