"""The Python half of the binding, compiled into it: starting workers, loading and calling generated programs. What a
program is lent for a call is in `lending.py` and `tensors.py`."""

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

import pto_simpler_lending as lending
import pto_simpler_tensors as tensors_of

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


def _package(name, directory):
    """A package of this program's own, so that its files can import their neighbours and no other program's."""
    package = types.ModuleType(name)
    package.__path__ = [str(directory)]
    sys.modules[name] = package
    try:
        import cloudpickle
    except ModuleNotFoundError:
        pass  # a runtime that pickles has it; one that does not needs nothing
    else:
        # No process that gets one of its functions could import the package by name.
        cloudpickle.register_pickle_by_value(package)


def _forget(prefix):
    for name in [name for name in sys.modules if name == prefix or name.startswith(prefix + ".")]:
        module = sys.modules.pop(name)
        cloudpickle = sys.modules.get("cloudpickle")
        if cloudpickle is not None and name in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.unregister_pickle_by_value(module)


def _load(path, name):
    """Runs a generated file as a module of its own."""
    known = sys.modules.get(name)
    if known is not None:  # a neighbour has imported it
        return known
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
    return module


def _parameters(function):
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _required(manifest):
    try:
        names = json.loads(manifest.read_text(encoding="utf-8"))
    except ValueError as e:
        raise Refused(f"{manifest} is not JSON: {e}; regenerate the program") from e
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Refused(f"{manifest} must be a list of names; regenerate the program")
    return set(names)


def _check_callback(name, function):
    if not callable(function):
        raise Refused(f"the callback for sub-worker {name!r} is not callable: {function!r}")
    try:
        inspect.signature(function).bind(object())
    except TypeError as e:
        raise Refused(f"the callback for sub-worker {name!r} must take exactly one argument: {e}") from e
    except ValueError:
        pass  # a built-in without a signature


def _subs(directory, prefix, callbacks):
    """The functions of `sub_workers/*.py` by file stem, with the caller's own in place of those it binds."""
    folder = directory / "sub_workers"
    manifest = folder / "__required__.json"
    required = _required(manifest) if manifest.exists() else set()
    missing = sorted(required - set(callbacks))
    if missing:
        raise Refused(f"sub-workers {missing} of {directory} have no body; give each a callback of that name")
    subs = {}
    for path in sorted(folder.glob("*.py")) if folder.is_dir() else ():
        function = vars(_load(path, f"{prefix}.sub_workers.{path.stem}")).get(path.stem)
        if function is None:
            continue
        if not callable(function):
            raise Refused(f"{path} must define a function {path.stem!r}, and defines {function!r}; regenerate it")
        subs[path.stem] = function
    # What the manifest asks for is part of the program also where it has no file.
    used = {name: function for name, function in callbacks.items() if name in subs or name in required}
    for name, function in used.items():
        _check_callback(name, function)
    subs.update(used)
    return subs, sorted(used)


def _compiled_for(directory):
    """What the program was compiled for, where it says so: numbers of sub-workers and of scheduler threads."""
    path = directory / "distributed_meta.json"
    if not path.exists():
        return 0, 0
    try:
        settings = json.loads(path.read_text(encoding="utf-8")).get("distributed_config", {})
        numbers = [settings.get(name, 0) for name in ("num_sub_workers", "aicpu_thread_num")]
    except (ValueError, AttributeError) as e:
        raise Refused(f"{path} is not what a compilation writes: {e}; regenerate the program") from e
    subs, threads = numbers
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers) or threads == 1:
        raise Refused(
            f"{path} asks for {subs!r} sub-workers and {threads!r} scheduler threads; at least 0 of the former and 0 or "
            "at least 2 of the latter are allowed; regenerate the program"
        )
    return subs, threads


def _assemble(folder, prefix, platform):
    """One chip callable from its `kernel_config.py`, compiled by the runtime's own driver."""
    from simpler.task_interface import ChipCallable, CoreCallable
    from simpler_setup.kernel_compiler import KernelCompiler

    config = _load(folder / "kernel_config.py", f"{prefix}.next_levels.{folder.name}.kernel_config")
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
        # The compiler for chips wants them always, and a source from elsewhere may include them by way of its headers.
        plain = platform.endswith("sim") and not kernel.get("external")
        if not plain or "pto/" in Path(kernel["source"]).read_text(errors="replace"):
            from simpler_setup.pto_isa import ensure_pto_isa_root

            options["pto_isa_root"] = ensure_pto_isa_root()
        binary = compiler.compile_incore(
            kernel["source"],
            core_type=kernel["core_type"],
            extra_include_dirs=include + list(kernel.get("extra_include_dirs") or ()),
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


def _entry(path, module):
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
    entry = marked[0]
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(kind(entry) for kind in kinds):
        raise Refused(f"{entry.__name__!r} in {path} would not run when it is called; make it a plain function")
    named = {PROVIDER: None} if PROVIDER in _parameters(entry) else {}
    try:
        inspect.signature(entry, follow_wrapped=False).bind(
            None, None, None, tensors={}, callables={}, sub_ids={}, _keep=[], world_size=1, **named
        )
    except TypeError as e:
        raise Refused(f"{entry.__name__!r} in {path} cannot be called as an entry: {e}; regenerate it") from e
    return entry, bool(named)


def _needed(name, chip):
    """The name of a chip program and the least number of tensors that it reads."""
    count = getattr(chip, "sig_count", 0)
    from simpler.task_interface import ArgDirection

    scalar = getattr(ArgDirection, "SCALAR", None)
    return name, sum(chip.sig(i) != scalar for i in range(count if isinstance(count, int) else 0))


def _homes(values):
    """The memory of all tensors among some values."""
    for value in values:
        if isinstance(value, (tensors_of.ArgumentTensor, tensors_of.View)):
            yield value._home
        elif isinstance(value, (list, tensors_of.Stacked)):
            yield from _homes(getattr(value, "parts", value))


class Program:
    """A loaded program."""

    def __init__(self, directory, platform, runtime, chips, frames, callbacks, limits):
        # What the files of the program refer to must not depend on the directory that the process is in later.
        directory = Path(directory).absolute()
        prefix = f"_pto_generated_{next(_numbers)}"
        try:
            self._load(directory, prefix, platform, runtime, chips, frames, callbacks)
        except BaseException:
            _forget(prefix)
            raise
        self.world_size = chips
        self.limits = limits
        self.callables = {}
        self.sub_ids = {}
        self.chip_names = {}
        self.needed = {}

    def _load(self, directory, prefix, platform, runtime, chips, frames, callbacks):
        path = directory / "orchestration" / "host_orch.py"
        if not path.exists():
            raise Refused(f"no generated orchestration at {path}")
        _package(prefix, directory)
        for folder in ("orchestration", "sub_workers", "next_levels"):
            _package(f"{prefix}.{folder}", directory / folder)
        module = _load(path, f"{prefix}.orchestration.host_orch")
        self.entry, self.takes_domains = _entry(path, module)
        self.subs, self.used_callbacks = _subs(directory, prefix, callbacks)
        sub_workers, self.threads = _compiled_for(directory)
        self.sub_workers = max(len(self.subs), sub_workers)
        allocate = getattr(module, "_alloc_intermediates", None)
        owned = tensors_of.Owned()
        self.frames = []
        for _ in range(frames):
            tensors = {}
            if allocate is not None:
                parameters = _parameters(allocate)
                if "world_size" in parameters or any(
                    p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
                ):
                    allocate(tensors, world_size=chips)
                else:
                    allocate(tensors)
            self.frames.append({name: owned.adopted(value) for name, value in tensors.items()})
        self.homes = [list(_homes(tensors.values())) for tensors in self.frames]
        # Last, since it may take long.
        self.chips, self.sdma = _chips(directory, prefix, platform, runtime)

    def register(self, worker):
        self.sub_ids = {name: worker.register(function) for name, function in self.subs.items()}
        self.callables = {name: worker.register(chip) for name, chip in self.chips.items()}
        self.chip_names = {id(handle): name for name, handle in self.callables.items()}
        self.needed = {id(handle): _needed(name, self.chips[name]) for name, handle in self.callables.items()}

    def run(self, orchestrator, gate, config, frame, args):
        """Calls the entry; returns what must stay alive until the run has ended."""
        proxy = lending.orchestrator_class(type(orchestrator))(orchestrator, gate, self, self.limits)
        # What the generator's helpers read off the orchestrator, fresh for each call.
        proxy._pypto_chip_count = self.world_size
        proxy._pypto_commless_seq = 0
        proxy._dfx_dispatch_idx = {}
        proxy._dfx_chip_names = dict(self.chip_names)
        if self.threads and not config.aicpu_thread_num:
            config.aicpu_thread_num = self.threads
        keep = []
        named = {PROVIDER: lending.Provider(gate)} if self.takes_domains else {}
        tensors = lending.Tensors({**self.frames[frame], **args})
        lent = list(_homes(args.values()))
        allocator = lending.Allocator(gate, [*lent, *self.homes[frame]])
        lasting = len(allocator.homes)
        tensors_of.allocators.stack.append(allocator)
        try:
            self.entry(
                proxy,
                None,
                config,
                tensors=tensors,
                callables=dict(self.callables),
                sub_ids=dict(self.sub_ids),
                _keep=keep,
                world_size=self.world_size,
                **named,
            )
        finally:
            tensors_of.allocators.stack.pop()
            for home in [*lent, *allocator.homes[lasting:]]:
                home.gone = True
            proxy._pto_finish()
        if proxy._pto_failure is not None:
            raise proxy._pto_failure
        # The entry may have put tensors of its own among the arguments.
        return keep, tensors
