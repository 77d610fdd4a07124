#!/usr/bin/env python3
"""Compiles the kernels of this directory with Simpler's own driver, into plain files.

    python build.py PLATFORM OUT_DIR [KERNEL ...]

Writes OUT_DIR/<kernel>.kernel for each kernel (all of them by default) and one OUT_DIR/orchestration.so. Needs an installed Simpler and a C++
compiler. The driver calls the kernel compiler by the name of one fixed version; where that is not installed, any g++
stands in for it, which these sources allow.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

RUNTIME = "tensormap_and_ringbuffer"
DRIVER_NAME = "g++-15"


def build(platform: str, out: Path, kernels: list[str]) -> None:
    from simpler_setup.kernel_compiler import KernelCompiler

    here = Path(__file__).resolve().parent
    out.mkdir(parents=True, exist_ok=True)
    compiler = KernelCompiler(platform=platform)
    include = compiler.get_orchestration_include_dirs(RUNTIME)
    (out / "orchestration.so").write_bytes(
        compiler.compile_orchestration(runtime_name=RUNTIME, source_path=str(here / "orchestration.cpp"))
    )
    for source in sorted(here.glob("*.cpp")):
        if source.stem in kernels or not kernels and source.stem != "orchestration":
            binary = compiler.compile_incore(source_path=str(source), core_type="aiv", extra_include_dirs=include)
            (out / f"{source.stem}.kernel").write_bytes(binary)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        if shutil.which(DRIVER_NAME) is None and (compiler := shutil.which("g++")):
            os.symlink(compiler, os.path.join(directory, DRIVER_NAME))
            os.environ["PATH"] = directory + os.pathsep + os.environ.get("PATH", "")
        build(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
