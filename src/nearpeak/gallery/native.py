"""C and CUDA sources of examples, compiled on the machine at hand."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from nearpeak.errors import KernelUnavailable
from nearpeak.kernels.ladder import compile_cuda

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")


@functools.cache
def compile_c(source: str) -> ctypes.CDLL | None:
    """The functions of a C source; None where there is no C compiler, or where it fails."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder, "example.c"), Path(folder, "example.so")
        code.write_text(source, encoding="utf-8")
        command = [compiler, *FLAGS, str(code), "-o", str(library)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        return ctypes.CDLL(str(library))  # stays loaded when the file is gone


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    """The address of the first element, as an argument of a C function."""
    return ctypes.c_void_p(tensor.data_ptr())


def cuda_problem() -> str:
    """Why no CUDA source can be compiled here; "" where one can."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "there is no NVIDIA GPU"
    try:
        compile_cuda('extern "C" __global__ void nothing() {}', "nothing")
    except (KernelUnavailable, RuntimeError, OSError, ImportError) as error:
        return str(error).splitlines()[0]
    return ""


def cuda_kernel(source: str, name: str) -> Any:
    """A kernel of a CUDA source, compiled by NVRTC; it is called with grid, block and args."""
    return compile_cuda(source, name)


def triton_problem() -> str:
    """Why no Triton source can be run here, not even in the interpreter; "" where one can."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed"
    return ""


@functools.cache
def load_triton(source: str) -> dict[str, Any]:
    """The functions of a Triton source, for a GPU.

    Triton reads the source of a kernel from its file, which therefore stays until the process ends.
    """
    folder = Path(tempfile.mkdtemp(prefix="nearpeak-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "example.py"
    path.write_text(source, encoding="utf-8")
    return runpy.run_path(str(path))


def interpret_triton(source: str, last_lines: str) -> str:
    """What a Triton source with some more lines prints, its kernels run by Triton's interpreter on the CPU.

    Whether kernels are interpreted is decided when Triton is imported: hence a process of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "example.py")
        path.write_text(source + last_lines, encoding="utf-8")
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        run = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, check=False, env=environment, timeout=120
        )
    if run.returncode:
        raise KernelUnavailable(f"Triton's interpreter failed: {run.stderr.strip().splitlines()[-1]}")
    return run.stdout
