"""What an entry is lent for one call: the orchestrator, the worker behind it, its domains, its tensors. Each announces
what it does, so that the dispatch can open first, and each refuses to be used once the call is over."""

import contextlib
import functools

import pto_simpler_tensors as tensors

# The runtime's own complaints about arguments: it raises them before it does anything.
_COMPLAINTS = (TypeError, ValueError, KeyError, IndexError)

_GLOBAL = (
    "allocate_global_domain",
    "release_global_domain",
    "get_global_domain",
    "copy_to_global_domain",
    "copy_from_global_domain",
)
_LOCKED = ("submit", "run", "init", "close", "release_buffer")
# What reaches no child process.
_LOCAL = ("create_buffer", "make_tensor_arg")


class Lease:
    """A domain lent to an entry: neither leaving the `with` block nor `release` ends it; the dispatch does."""

    __slots__ = ("_gate", "_handle")

    def __init__(self, gate, handle):
        self._gate = gate
        self._handle = handle

    def __enter__(self):
        self._gate.check()
        return self

    def __exit__(self, *_):
        return False

    def __getitem__(self, worker):
        self._gate.check()
        return self._handle[worker]

    def __getattr__(self, name):
        self._gate.check()
        return getattr(self._handle, name)

    def release(self):
        """Nothing: the lease ends with the dispatch."""
        self._gate.check()


class Provider:
    """`provider(name=, workers=, window_size=, buffers=)`: leases a domain."""

    __slots__ = ("_gate",)

    def __init__(self, gate):
        self._gate = gate

    def __call__(self, *, name, workers, window_size, buffers=()):
        return Lease(self._gate, self._gate.domain(name, workers, window_size, buffers))


class Worker:
    """The runtime's worker as an entry sees it: without the calls that would wait for the end of the entry's own run."""

    __slots__ = ("_orchestrator", "_worker")

    def __init__(self, orchestrator, worker):
        object.__setattr__(self, "_orchestrator", orchestrator)
        object.__setattr__(self, "_worker", worker)

    @property
    def __class__(self):
        return type(self._worker)

    def __getattr__(self, name):
        self._orchestrator._pto_gate.check()
        if name in _LOCKED:
            raise RuntimeError(f"{name} was called inside a graph, for whose end it would wait; return first")
        value = getattr(self._worker, name)
        if not name.startswith("_") and callable(value) and name not in _LOCAL:
            return functools.partial(self._orchestrator._pto_call, False, value)
        return value

    def __setattr__(self, name, value):
        setattr(self._worker, name, value)


class Tensors(dict):
    """The tensors of a call by name. What an entry makes and puts there moves to memory that its tasks can reach."""

    def __setitem__(self, key, value):
        super().__setitem__(key, tensors.copied(value))

    def setdefault(self, key, default=None):
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args, **kwargs):
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other):
        self.update(other)
        return self


def _announced(name, is_task):
    def call(self, *args, **kwargs):
        self._pto_check(name, args, kwargs)
        return self._pto_call(is_task, getattr(self._pto_orchestrator, name), *args, **kwargs)

    call.__name__ = name
    return call


def _refused(name):
    def call(self, *_args, **_kwargs):
        raise RuntimeError(f"{name} belongs to workers of level 4, and this one has level 3")

    call.__name__ = name
    return call


class Orchestrator:
    """The runtime's orchestrator as an entry sees it: the same calls, each announced before it reaches the device."""

    def __init__(self, orchestrator, gate, program, limits):
        self._pto_orchestrator = orchestrator
        self._pto_gate = gate
        self._pto_program = program
        self._pto_limits = limits
        self._pto_failure = None
        self._pto_scopes = 0
        worker = getattr(orchestrator, "_worker", None)
        self._worker = None if worker is None else Worker(self, worker)

    def __getattr__(self, name):
        raise AttributeError(f"the orchestrator of an entry has no {name!r}")

    def _pto_call(self, is_task, call, *args, **kwargs):
        self._pto_gate(is_task)
        try:
            return call(*args, **kwargs)
        except _COMPLAINTS:
            raise
        except BaseException as error:
            # Something may have happened: the entry cannot succeed any more, whatever it makes of this.
            if self._pto_failure is None:
                self._pto_failure = error
            raise

    # Scopes: what is submitted inside is announced, whoever the `with` statement names.

    def scope_begin(self):
        self._pto_gate.check()
        if self._pto_scopes >= self._pto_limits["scope_depth"]:
            raise RuntimeError(f"scopes nest at most {self._pto_limits['scope_depth']} deep")
        self._pto_orchestrator.scope_begin()
        self._pto_scopes += 1

    def scope_end(self):
        self._pto_gate.check()
        if not self._pto_scopes:
            raise RuntimeError("scope_end without a scope_begin of this entry")
        self._pto_scopes -= 1
        self._pto_orchestrator.scope_end()

    @contextlib.contextmanager
    def scope(self):
        self.scope_begin()
        try:
            yield self
        finally:
            self.scope_end()

    def release_domain(self, handle):
        if isinstance(handle, Lease):
            return handle.release()
        return self._pto_call(False, handle.release)

    def _pto_check(self, name, args, kwargs):
        """Arguments that would end a chip process are refused before anything is touched."""
        if name in ("submit_next_level", "submit_next_level_group"):
            handle = args[0] if args else kwargs.get("callable_handle")
            given = args[1] if len(args) > 1 else kwargs.get("args", kwargs.get("args_list"))
            needed = self._pto_program.needed.get(id(handle))
            limits = self._pto_limits["tensors"], self._pto_limits["scalars"]
        elif name in ("allocate_domain", "get_or_allocate_domain"):
            live = getattr(getattr(self._pto_orchestrator, "_worker", None), "live_domains", ())
            if name != "allocate_domain" and kwargs.get("name") in live:
                return  # it has its windows
            # Anything else than this the runtime refuses by itself.
            with contextlib.suppress(TypeError, OverflowError):
                self._pto_gate.room(len(kwargs.get("workers", ())), kwargs.get("window_size", 0))
            return
        elif name in ("submit_sub", "submit_sub_group"):
            given = args[1] if len(args) > 1 else kwargs.get("args", kwargs.get("args_list"))
            needed = limits = None
        else:
            return
        for member in given if isinstance(given, (list, tuple)) else (given,):
            try:
                tensor_count, scalar_count = member.tensor_count(), member.scalar_count()
            except AttributeError:
                continue  # the runtime says what it wants
            if needed is not None and tensor_count < needed[1]:
                raise ValueError(f"chip program {needed[0]!r} takes {needed[1]} tensors at least, given {tensor_count}")
            if limits is not None and (tensor_count > limits[0] or scalar_count > limits[1]):
                raise ValueError(
                    f"{tensor_count} tensors and {scalar_count} scalars given; a chip task takes {limits[0]} and "
                    f"{limits[1]} at most"
                )
            fixed, tensor, scalar = self._pto_limits["blob"]
            blob = fixed + tensor_count * tensor + scalar_count * scalar
            if blob > self._pto_limits["argument_bytes"]:
                raise ValueError(
                    f"the arguments take {blob} bytes; at most {self._pto_limits['argument_bytes']} are allowed"
                )

    def _pto_finish(self):
        """Closes what the entry left open."""
        while self._pto_scopes:
            self.scope_end()


def _retaining(self, *, name, workers, window_size, buffers=(), retain_after_run=False):
    if retain_after_run and self._pto_gate.retains():
        # Kept between dispatches, as asked, by the one who resets and releases it.
        return Lease(self._pto_gate, self._pto_gate.domain(name, workers, window_size, buffers))
    return self._pto_get_or_allocate(
        name=name,
        workers=workers,
        window_size=window_size,
        buffers=buffers,
        retain_after_run=retain_after_run,
    )


_classes = {}


def orchestrator_class(runtime):
    """The class for one class of the runtime's: every public call that it has, announced."""
    made = _classes.get(runtime)
    if made is None:
        calls = {}
        for name in dir(runtime):
            if name.startswith("_") or hasattr(Orchestrator, name) or not callable(getattr(runtime, name)):
                continue
            if name in _GLOBAL:
                calls[name] = _refused(name)
            elif name == "get_or_allocate_domain":
                calls["_pto_get_or_allocate"] = _announced(name, False)
                calls[name] = _retaining
            else:
                calls[name] = _announced(name, name.startswith("submit"))
        made = type("Orchestrator", (Orchestrator,), calls)
        _classes[runtime] = made
    return made


class Allocator:
    """Memory for the tensors that an entry makes, until the end of its run. `homes` are those that it has already."""

    def __init__(self, gate, homes=()):
        self._gate = gate
        self.homes = list(homes)

    def __call__(self, nbytes):
        return self._gate.buffer(nbytes)
