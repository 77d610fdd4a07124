"""Domains as a worker keeps them: allocation, release, and both kinds of retention."""

from __future__ import annotations

import os
import random
import struct
import threading
from typing import Any

from ..buffer import Buffer, wrap_vmm_window
from ..task_interface import ChipDomainContext, CommBufferSpec, CommDomainHandle
from .memory import create_window_file, unlink_window_file, window_file_name
from .runs import Retained, RunResources
from .types import COMM_MAX_RANK_NUM


class Domains:
    """The part of a worker that owns domains. ``_live_domains`` is the register of all that are live."""

    def __init__(self) -> None:
        self._live_domains: dict[str, CommDomainHandle] = {}
        self._retained: dict[str, Retained] = {}
        self._next_allocation = 0
        self._free_lock = threading.RLock()
        self._free_results: dict[int, BaseException] = {}
        self._comm_ready = False

    def _require_building(self, api: str) -> RunResources:
        resources = self._building_run_resources
        if resources is None:
            raise RuntimeError(f"{api} is only valid while a run's graph is being built")
        return resources

    def _validate_domain(
        self, name: str, workers: tuple[int, ...], window_size: int, buffers: list[CommBufferSpec]
    ) -> RunResources:
        resources = self._require_building("allocate_domain")
        chips = len(self._native.chips)
        if not workers:
            raise ValueError("allocate_domain: workers must be non-empty")
        if len(set(workers)) != len(workers):
            raise ValueError(f"allocate_domain: workers contains duplicates: {workers}")
        for worker in workers:
            if not 0 <= worker < chips:
                raise ValueError(f"allocate_domain: worker_id {worker} outside [0, {chips})")
        if window_size <= 0:
            raise ValueError("allocate_domain: window_size must be positive")
        names = [b.name for b in buffers]
        if len(set(names)) != len(names):
            raise ValueError(f"allocate_domain: duplicate buffer names: {names}")
        total = sum(int(b.nbytes) for b in buffers)
        if total > window_size:
            raise ValueError(f"allocate_domain: buffers sum to {total} bytes, exceeds window_size={window_size}")
        if name in self._live_domains:
            raise ValueError(f"allocate_domain: domain {name!r} already live")
        return resources

    def _allocate_domain(
        self, *, name: str, workers: tuple[int, ...], window_size: int, buffers: list[CommBufferSpec]
    ) -> CommDomainHandle:
        resources = self._validate_domain(name, workers, window_size, buffers)
        native = self._native
        if not self._comm_ready:
            # The base communicator spans all chips, members or not.
            if len(native.chips) > COMM_MAX_RANK_NUM:
                raise RuntimeError(
                    f"_ensure_comm_base failed: {len(native.chips)} chips, at most {COMM_MAX_RANK_NUM} ranks"
                )
            self._comm_ready = True
        # The real request is packed into unsigned words without a look.
        struct.pack(f"<{1 + len(buffers)}Q", window_size, *(int(b.nbytes) for b in buffers))
        allocation = self._next_allocation
        self._next_allocation += 1
        file = window_file_name(os.getpid(), random.getrandbits(32))
        try:
            create_window_file(file, len(workers), window_size)
        except OSError as error:
            raise RuntimeError(
                f"alloc_domain(allocation_id={allocation}) failed on {len(workers)}/{len(workers)} chips; "
                f"first error chip={workers[0]}: {error}"
            ) from error
        handle = CommDomainHandle(
            name=name,
            workers=workers,
            contexts={},
            allocation_id=allocation,
            _release_fn=lambda released: self._release_domain_handle(released, resources),
        )
        pids = [native.chips[w].pid for w in workers]
        calls = [
            (native.chips[w], (allocation, file, rank, len(workers), window_size, pids))
            for rank, w in enumerate(workers)
        ]
        answers, errors = native.control_all(calls, "alloc_domain")
        # A chip that answered holds its window, whatever else went wrong; the handle owns exactly those.
        handle.workers = tuple(w for w, answer in zip(workers, answers) if answer is not None)
        if not handle.workers:
            unlink_window_file(file)
        else:
            self._live_domains[name] = handle
            resources.live_domains[name] = handle
            resources.requires_ordered_cleanup = True
        if errors:
            chip, text = errors[0]
            raise RuntimeError(
                f"alloc_domain(allocation_id={allocation}) failed on {len(errors)}/{len(workers)} chips; "
                f"first error chip={chip}: {text}"
            )
        for rank, (chip, (context, base)) in enumerate(zip(workers, answers)):
            handle.contexts[chip] = self._context(
                name, rank, len(workers), chip, context, base, window_size, buffers, allocation
            )
        return handle

    def _context(
        self,
        name: str,
        rank: int,
        size: int,
        chip: int,
        context: int,
        base: int,
        window: int,
        buffers: list[CommBufferSpec],
        number: int,
    ) -> ChipDomainContext:
        named: dict[str, Buffer] = {}
        at = base
        with self._device_lock:
            self._device_live.setdefault((chip, base), []).append((f"domain {number}", window))
            for spec in buffers:
                nbytes = int(spec.nbytes)
                self._device_live.setdefault((chip, at), []).append((f"domain {number}", nbytes))
                named[spec.name] = wrap_vmm_window(
                    at, nbytes, self._owner_instance_id, self._next_buffer_id(), "L3", owner_worker_id=chip
                )
                at += nbytes
        return ChipDomainContext(name, rank, size, context, base, window, named)

    def _release_domain_handle(self, handle: CommDomainHandle, resources: RunResources) -> None:
        """``CommDomainHandle.release``: at the owning run's cleanup, or now where that has been."""
        if self._native is None:
            return
        if self._defer_to_users(handle):
            return
        with resources.domain_lock:
            if not resources.retired:
                resources.pending_release_domains.append(handle)
                resources.live_domains.pop(handle.name, None)
                if self._live_domains.get(handle.name) is handle:
                    del self._live_domains[handle.name]
                return
        self._free_domain(handle)
        with resources.domain_lock:
            if resources.live_domains.get(handle.name) is handle:
                del resources.live_domains[handle.name]

    def _drain_pending(self, resources: RunResources) -> None:
        with resources.domain_lock:
            pending = list(resources.pending_release_domains)
        first: BaseException | None = None
        for handle in pending:
            try:
                self._free_domain(handle)
                with resources.domain_lock:
                    resources.pending_release_domains.remove(handle)
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    def _retire(self, resources: RunResources) -> None:
        with resources.domain_lock:
            resources.retired = True
        self._drain_pending(resources)

    def _sweep(self, domains: dict[str, CommDomainHandle]) -> None:
        """Frees every domain of a registry, last first; tries all, raises the first failure."""
        first: BaseException | None = None
        for name, handle in reversed(list(domains.items())):
            try:
                handle._released = True
                self._free_domain(handle)
                if domains.get(name) is handle:
                    del domains[name]
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    def _free_domain(self, handle: CommDomainHandle) -> None:
        """Frees a domain on its chips, once; a failure is final and repeated to everybody who asks."""
        with self._free_lock:
            if handle.freed:
                return
            if handle.allocation_id in self._free_results:
                raise self._free_results[handle.allocation_id]
            mark = f"domain {handle.allocation_id}"
            with self._device_lock:
                for key, roles in list(self._device_live.items()):
                    kept = [r for r in roles if r[0] != mark]
                    if kept:
                        self._device_live[key] = kept
                    else:
                        del self._device_live[key]
            native = self._native
            calls = [(native.chips[w], (handle.allocation_id, len(handle.workers))) for w in handle.workers]
            _, errors = native.control_all(calls, "release_domain")
            if errors:
                chip, text = errors[0]
                failure = RuntimeError(
                    f"release_domain(allocation_id={handle.allocation_id}) failed on {len(errors)}/{len(calls)} chips; "
                    f"first error chip={chip}: {text}"
                )
                self._free_results[handle.allocation_id] = failure
                raise failure
            handle._freed = True
            if self._live_domains.get(handle.name) is handle:
                del self._live_domains[handle.name]

    # Public retention ------------------------------------------------------------------------------------------

    def _retain(self, name: str, request: Any, handle: CommDomainHandle) -> None:
        """Ties a domain to the run being built and keeps it past a success."""
        resources = self._require_building("get_or_allocate_domain")
        known = self._retained.get(name)
        if known is None or known.handle is not handle:
            known = self._retained[name] = Retained(request, handle)
        if resources not in known.runs:
            known.runs.append(resources)
        resources.retained.add(name)
        with resources.domain_lock:
            resources.live_domains.pop(name, None)

    def _defer_to_users(self, handle: CommDomainHandle) -> bool:
        """A release of a retained domain waits for every run that it belongs to. Whether it does."""
        known = self._retained.get(handle.name)
        if known is None or known.handle is not handle:
            return False
        for resources in reversed(known.runs):
            with resources.domain_lock:
                if not resources.retired:
                    resources.requires_ordered_cleanup = True
                    resources.pending_release_domains.append(handle)
                    return True
        self._retained.pop(handle.name, None)
        return False

    def _settle_retained(self, resources: RunResources, success: bool) -> None:
        """Before a run's cleanup: what it retained stays after a success, and goes after a failure when it can."""
        for name in resources.retained:
            known = self._retained.get(name)
            if known is None or resources not in known.runs:
                continue
            known.runs = [r for r in known.runs if r is not resources]
            if success or known.handle.released:
                continue
            # Never to be leased again. Freed here, or, while another run may use it, by the last or by close.
            del self._retained[name]
            if not known.runs:
                with resources.domain_lock:
                    resources.live_domains[name] = known.handle
