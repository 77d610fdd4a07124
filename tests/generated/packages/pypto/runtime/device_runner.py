"""Assembles chip programs for the stand-in; with the real runtime there is nothing here, and its driver does it."""

import importlib.util

if importlib.util.find_spec("simpler.standin") is None:
    raise ImportError("only for the stand-in")

KERNELS = {"allreduce": "allreduce", "fill": "pto_store", "idle": "pto_fail"}


def compile_and_assemble(folder, platform):
    from simpler.standin import ChipKernel

    return ChipKernel(KERNELS[folder.name]), "tensormap_and_ringbuffer", {}
