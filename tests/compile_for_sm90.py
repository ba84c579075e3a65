"""Compiles what launchers would launch for compute capability 9.0, without a GPU, and prints what ptxas says of it.

    python tests/compile_for_sm90.py [--once] tests/kernels/sm90/add.py ...

Each file has `launches()`: names, and calls of launchers with tensors of real sizes, which are on the CPU and empty.
Instead of launching, a kernel is compiled with these arguments; with `--once` for its first launch alone. Prints a list
of JSON objects, one for each launch.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from runpy import run_path

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from nearpeak import kernels
from nearpeak.kernels._runtime.gluon import runs_on

TARGET = GPUTarget("cuda", 90, 32)
PTXAS = max((Path(nvidia.__file__).parent / "bin").glob("ptxas*"))  # the newest understands what all versions write


def compiled(kernel, args, warps, stages, registers=None):
    """The compiled kernel, in PTX."""
    backend = make_backend(TARGET)
    bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(*args)
    settings = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": True}
    _, signature, constants, attributes = kernel._pack_args(backend, dict(settings), bound, specialization, options)
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(source(kernel, signature, constants, attributes), target=TARGET, options=settings)


def described(kernel, args, warps, stages, registers=None):
    found = compiled(kernel, args, warps, stages, registers)
    ptx = found.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(PTXAS), "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    load = r"ld\.global[\w.:]*"
    return {
        "kernel": kernel.__name__,
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spills": sum(int(number) for number in re.findall(r"(\d+) bytes spill", said)),
        "serialized": "serialized" in said,  # matrix products of which each waits for the one before
        "shared_bytes": found.metadata.shared,
        "warps": warps,
        # 128 bits by a thread at once: what it takes to fill the memory's bandwidth
        "wide_loads": len(re.findall(rf"{load}\.v4\.b32|{load}\.v2\.b64|cp\.async\.cg\.shared\.global.*, 0x10,", ptx)),
        "wide_stores": len(re.findall(r"st\.global[\w.:]*\.v4\.b32|st\.global[\w.:]*\.v2\.b64", ptx)),
        "loads": len(re.findall(r"ld\.global", ptx)),
        "stores": len(re.findall(r"st\.global", ptx)),
        "float64": len(re.findall(r"\.f64", ptx)),
        # what the kernel before writes is read after it has ended
        "waits": "griddepcontrol.wait" in ptx,
        "reads_before_waiting": bool(re.search(r"(ld|st)\.global.*griddepcontrol\.wait", ptx, re.DOTALL)),
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
    }


def main():
    # `described` has PTX assembled, which takes most of the time: Triton need not, and keeps what is of no use
    # elsewhere. Not on import: pytest imports this file for its doctests, beside tests that launch kernels.
    CUDABackend.make_cubin = lambda self, ptx, *rest: b""
    with tempfile.TemporaryDirectory(prefix="nearpeak-triton-") as cache:
        triton.knobs.cache.dir = cache
        compile_all()


def compile_all():
    results = []
    current = file = ""

    once = "--once" in sys.argv

    def launch(kernel, grid, *args, warps=4, stages=2, registers=None, early=False):
        if once and any(result["kernel"] == kernel.__name__ for result in results):
            return
        results.append({"file": file, "name": current, **described(kernel, args, warps, stages, registers)})

    has_gluon = runs_on(torch.device("cpu"))
    for found in pkgutil.walk_packages(kernels.__path__, "nearpeak.kernels."):
        if found.name.endswith(("_runtime.launch", "_runtime.interpreter")) or ("sm90" in found.name and not has_gluon):
            continue
        module = importlib.import_module(found.name)
        if hasattr(module, "launch") and "_runtime" not in found.name:
            module.launch = launch
        if hasattr(module, "can_start_early"):
            module.can_start_early = lambda device: True
    for path in sys.argv[1 + once :]:
        file = Path(path).stem
        for name, call in run_path(path)["launches"]():
            current = name
            with torch.no_grad():
                call()
    json.dump(results, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
