"""The Python half of the binding, compiled into it: starting workers, loading and calling generated programs."""

import ctypes
import importlib.util
import inspect
import itertools
import json
import os
import signal
import sys
import threading
import types
from pathlib import Path

MARKER = "_pypto_distributed_entry"
PROVIDER = "_domain_provider"
_numbers = itertools.count()


_starting = threading.local()
_PR_SET_PDEATHSIG = 1


def _in_child():
    """A child of a worker's start dies with the thread that started it. By themselves chip processes notice the end
    of their host only between tasks, so one in an endless kernel would run for ever."""
    host = getattr(_starting, "host", None)
    if host is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != host:
            os._exit(1)


os.register_at_fork(after_in_child=_in_child)


def start(worker, config):
    """`Worker.init` on a thread that lives as long as the worker."""
    _starting.host = os.getpid()
    try:
        worker.init(config)
    finally:
        _starting.host = None


class Missing(ImportError):
    """A package that a generated program needs is not there."""


class Refused(ValueError):
    """The program, or what was given for it, cannot be used; the message says what to change."""

    _pto_refused = True


def _load(path, name):
    """Runs a generated file as a module of its own and has its functions pickled by value: no process that gets one
    could import the module by name."""
    spec = importlib.util.spec_from_file_location(name, str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as e:
        sys.modules.pop(name, None)
        raise Missing(f"{path} needs the package {e.name!r}, which cannot be imported: {e}") from e
    except BaseException:
        sys.modules.pop(name, None)
        raise
    try:
        import cloudpickle
    except ModuleNotFoundError:
        pass  # a runtime that pickles has it; one that does not needs nothing
    else:
        cloudpickle.register_pickle_by_value(module)
    return module


def _takes(function, name):
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _required(manifest):
    try:
        names = json.loads(manifest.read_text())
    except ValueError as e:
        raise Refused(f"{manifest} is not JSON: {e}; regenerate the program") from e
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Refused(f"{manifest} must be a list of names; regenerate the program")
    return set(names)


def _subs(directory, prefix, callbacks):
    """The functions of `sub_workers/*.py` by file stem, with the caller's own in place of those it binds."""
    folder = directory / "sub_workers"
    subs = {}
    for path in sorted(folder.glob("*.py")) if folder.is_dir() else ():
        function = getattr(_load(path, f"{prefix}.sub_{path.stem}"), path.stem, None)
        if function is not None:
            subs[path.stem] = function
    manifest = folder / "__required__.json"
    required = _required(manifest) if manifest.exists() else set()
    missing = sorted(required - set(callbacks))
    if missing:
        raise Refused(f"sub-workers {missing} of {directory} have no body; give each a callback of that name")
    used = {name: function for name, function in callbacks.items() if name in subs}
    for name, function in used.items():
        if not callable(function):
            raise Refused(f"the callback for sub-worker {name!r} is not callable: {function!r}")
        try:
            inspect.signature(function).bind(object())
        except TypeError as e:
            raise Refused(f"the callback for sub-worker {name!r} must take exactly one argument: {e}") from e
        except ValueError:
            pass  # a built-in without a signature
    subs.update(used)
    return subs, sorted(used)


def _assemble(folder, prefix, platform):
    """One chip callable from its `kernel_config.py`, compiled by the runtime's own driver."""
    from simpler.task_interface import ChipCallable, CoreCallable
    from simpler_setup.kernel_compiler import KernelCompiler

    config = _load(folder / "kernel_config.py", f"{prefix}.chip_{folder.name}")
    for name in ("KERNELS", "ORCHESTRATION"):
        if not hasattr(config, name):
            raise Refused(f"{folder / 'kernel_config.py'} defines no {name}; regenerate the program")
    settings = getattr(config, "RUNTIME_CONFIG", {})
    runtime = settings.get("runtime", "tensormap_and_ringbuffer")
    compiler = KernelCompiler(platform=platform)
    include = list(compiler.get_orchestration_include_dirs(runtime))
    children = []
    for kernel in config.KERNELS:
        options = {}
        if "pto/" in Path(kernel["source"]).read_text(errors="replace"):
            from simpler_setup.pto_isa import ensure_pto_isa_root

            options["pto_isa_root"] = ensure_pto_isa_root()
        binary = compiler.compile_incore(
            kernel["source"],
            core_type=kernel["core_type"],
            extra_include_dirs=include + list(kernel.get("include_dirs", ())),
            **options,
        )
        if not platform.endswith("sim"):
            from simpler_setup.elf_parser import extract_text_section

            binary = extract_text_section(binary)
        children.append((kernel["func_id"], CoreCallable.build(signature=kernel.get("signature", []), binary=binary)))
    orchestration = config.ORCHESTRATION
    chip = ChipCallable.build(
        signature=orchestration.get("signature", []),
        func_name=orchestration["function_name"],
        binary=compiler.compile_orchestration(runtime, orchestration["source"]),
        children=children,
    )
    return chip, runtime, settings


def _chips(directory, prefix, platform, runtime):
    try:
        from pypto.runtime.device_runner import compile_and_assemble as assemble
    except ImportError:
        assemble = None  # the generator's own driver knows its caches, but is not needed
    chips = {}
    sdma = False
    root = directory / "next_levels"
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if not (folder / "kernel_config.py").exists():
            continue
        chip, wanted, settings = assemble(folder, platform) if assemble else _assemble(folder, prefix, platform)
        if wanted != runtime:
            raise Refused(f"{folder} was built for runtime {wanted!r}, and the worker runs {runtime!r}")
        chips[folder.name] = chip
        sdma = sdma or bool(settings.get("enable_sdma", False))
    if not chips:
        raise Refused(f"{root} holds no chip program (a directory with a kernel_config.py)")
    return chips, sdma


class Program:
    """A loaded program."""

    def __init__(self, directory, platform, runtime, chips, frames, callbacks):
        directory = Path(directory)
        prefix = f"_pto_generated_{next(_numbers)}"
        path = directory / "orchestration" / "host_orch.py"
        if not path.exists():
            raise Refused(f"no generated orchestration at {path}")
        module = _load(path, f"{prefix}.host_orch")
        marked = [
            f
            for f in vars(module).values()
            if isinstance(f, types.FunctionType) and f.__module__ == module.__name__ and getattr(f, MARKER, False)
        ]
        names = sorted({f.__name__ for f in marked})
        if len(set(map(id, marked))) != 1:
            raise Refused(
                f"{path} must have exactly one function marked `{MARKER}` and has {len(names)}: {names}; regenerate it"
            )
        self.entry = marked[0]
        self.takes_domains = _takes(self.entry, PROVIDER)
        self.world_size = chips
        self.subs, self.used_callbacks = _subs(directory, prefix, callbacks)
        self.chips, self.sdma = _chips(directory, prefix, platform, runtime)
        allocate = getattr(module, "_alloc_intermediates", None)
        self.frames = []
        for _ in range(frames):
            tensors = {}
            if allocate is not None:
                if _takes(allocate, "world_size"):
                    allocate(tensors, world_size=chips)
                else:
                    allocate(tensors)
            self.frames.append(tensors)
        self.callables = {}
        self.sub_ids = {}
        self.chip_names = {}

    def register(self, worker):
        self.sub_ids = {name: worker.register(function) for name, function in self.subs.items()}
        self.callables = {name: worker.register(chip) for name, chip in self.chips.items()}
        self.chip_names = {id(handle): name for name, handle in self.callables.items()}

    def run(self, orchestrator, before, config, frame, tensors, provider):
        """Calls the entry; returns what must stay alive until the run has ended."""
        proxy = Orchestrator(orchestrator, before)
        # What the generator's helpers read off the orchestrator, fresh for each call.
        proxy._pypto_chip_count = self.world_size
        proxy._pypto_commless_seq = 0
        proxy._dfx_dispatch_idx = {}
        proxy._dfx_chip_names = self.chip_names
        keep = []
        named = {PROVIDER: provider} if self.takes_domains else {}
        tensors = {**self.frames[frame], **tensors}
        self.entry(
            proxy,
            None,
            config,
            tensors=tensors,
            callables=self.callables,
            sub_ids=self.sub_ids,
            _keep=keep,
            world_size=self.world_size,
            **named,
        )
        # The entry may have put tensors of its own among the arguments.
        return keep, tensors


def _gated(name, is_task):
    def call(self, *args, **kwargs):
        self._before(is_task)
        return getattr(self._orchestrator, name)(*args, **kwargs)

    call.__name__ = name
    return call


class Orchestrator:
    """The runtime's orchestrator as an entry sees it: the same calls, each announced before it reaches the device."""

    def __init__(self, orchestrator, before):
        self._orchestrator = orchestrator
        self._before = before

    def __getattr__(self, name):
        # Only for what is not found here.
        return getattr(self._orchestrator, name)

    submit_next_level = _gated("submit_next_level", True)
    submit_next_level_group = _gated("submit_next_level_group", True)
    submit_sub = _gated("submit_sub", True)
    submit_sub_group = _gated("submit_sub_group", True)
    allocate_domain = _gated("allocate_domain", False)
    copy_to = _gated("copy_to", False)
    copy_from = _gated("copy_from", False)
    alloc = _gated("alloc", False)
    alloc_child_tensor = _gated("alloc_child_tensor", False)
    free = _gated("free", False)


class Lease:
    """A domain lent to an entry: leaving the `with` block releases nothing."""

    __slots__ = ("_handle",)

    def __init__(self, handle):
        self._handle = handle

    def __enter__(self):
        return self._handle

    def __exit__(self, *_):
        return False

    def __getitem__(self, worker):
        return self._handle[worker]

    def release(self):
        """Nothing: the lease ends with the dispatch."""


def tensor_class():
    """The runtime's tensor, with the slicing and the `shape` that generated code asks of an argument."""
    from simpler.task_interface import Tensor

    class ArgumentTensor(Tensor):
        @classmethod
        def over(cls, buffer, shape, dtype, byte_offset, element, address):
            strides = [1] * len(shape)
            for i in range(len(shape) - 2, -1, -1):
                strides[i] = strides[i + 1] * shape[i + 1]
            descriptor = buffer.to_descriptor()
            return cls._made(descriptor, byte_offset, tuple(shape), tuple(strides), int(dtype.value), element, address)

        @classmethod
        def _made(cls, descriptor, byte_offset, shape, strides, dtype, element, address):
            made = cls(buffer=descriptor, byte_offset=byte_offset, shapes=shape, strides=strides, dtype=dtype)
            made._element = element
            made._address = address
            return made

        @property
        def shape(self):
            return tuple(self.shapes)

        def size(self, dimension=None):
            return self.shape if dimension is None else self.shape[dimension]

        def dim(self):
            return len(self.shape)

        def numel(self):
            count = 1
            for n in self.shape:
                count *= n
            return count

        def __len__(self):
            return self.shape[0]

        def __getitem__(self, index):
            index = index if isinstance(index, tuple) else (index,)
            if Ellipsis in index:
                at = index.index(Ellipsis)
                index = index[:at] + (slice(None),) * (self.dim() - len(index) + 1) + index[at + 1 :]
            if len(index) > self.dim():
                raise IndexError(f"{len(index)} indices for a tensor of {self.dim()} dimensions")
            index += (slice(None),) * (self.dim() - len(index))
            offset, shape, strides = 0, [], []
            for i, n, stride in zip(index, self.shape, self.strides):
                if isinstance(i, slice):
                    start, stop, step = i.indices(n)
                    if step <= 0:
                        raise ValueError("a slice of an argument must run forwards")
                    offset += start * stride
                    shape.append(max(0, -(-(stop - start) // step)))
                    strides.append(stride * step)
                else:
                    i = i.__index__()
                    if not -n <= i < n:
                        raise IndexError(f"index {i} is out of range for {n} elements")
                    offset += (i % n) * stride
            if not shape:  # the runtime has no tensors without dimensions
                shape, strides = [1], [1]
            return self._made(
                self.buffer,
                self.byte_offset + offset * self._element,
                tuple(shape),
                tuple(strides),
                self.dtype,
                self._element,
                self._address,
            )

        def data_ptr(self):
            """Address of the first element in this process; refused for device memory."""
            if not self._address:
                raise TypeError("a tensor in device memory has no address on the host; copy it first")
            return self._address + self.byte_offset

        def _runs(self):
            """Addresses and lengths in bytes of what is contiguous, in the order of elements."""
            shape, strides, run = list(self.shape), list(self.strides), self._element
            while shape and (shape[-1] == 1 or strides[-1] * self._element == run):
                strides.pop()
                run *= shape.pop()
            first = self.data_ptr()
            for index in itertools.product(*map(range, shape)):
                yield first + sum(i * stride for i, stride in zip(index, strides)) * self._element, run

        def __setitem__(self, index, value):
            """Copies elements, now, on the host: what generated code does before it submits tasks."""
            to = self[index]
            if isinstance(value, ArgumentTensor):
                elements, alike, parts = value.numel(), value.dtype == to.dtype, value._runs()
            elif hasattr(value, "data_ptr") and getattr(value, "is_contiguous", lambda: True)():
                elements = value.nbytes // to._element
                alike, parts = value.nbytes % to._element == 0, [(value.data_ptr(), value.nbytes)]
            else:
                raise TypeError(f"a tensor is assigned from a contiguous tensor in host memory, not from {value!r}")
            if not alike or elements != to.numel():
                raise ValueError(f"{elements} elements cannot be assigned to {to.numel()}, or their types differ")
            source = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in parts)
            at = 0
            for address, nbytes in to._runs():
                ctypes.memmove(address, source[at : at + nbytes], nbytes)
                at += nbytes

    return ArgumentTensor
