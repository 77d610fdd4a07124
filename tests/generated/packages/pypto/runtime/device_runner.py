"""Assembles chip programs for the stand-in; with the real runtime there is nothing here, and its driver does it."""

import importlib.util

if importlib.util.find_spec("simpler.standin") is None:
    raise ImportError("only for the stand-in")


def compile_and_assemble(folder, platform):
    from simpler.standin import ChipKernel

    spec = importlib.util.spec_from_file_location("kernel_config", folder / "kernel_config.py")
    config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config)
    for kernel in config.KERNELS:
        with open(kernel["source"], "rb"):
            pass  # what a compiler would read
    name = config.KERNELS[0]["name"] if config.KERNELS else "pto_fail"
    return ChipKernel(name), config.RUNTIME_CONFIG["runtime"], config.RUNTIME_CONFIG
