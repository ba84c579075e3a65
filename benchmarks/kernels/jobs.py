"""Compilation in several processes before anything is timed, with a time limit.

Jobs have names. A process takes the next free job by creating a file, so that a process that dies loses only its own
job. The outcome of each step of a job is a file in the same folder. The process that measures reads them and skips what
was not compiled in time or crashed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DONE = "done"
LATE = "was not compiled in time"
Steps = Mapping[str, Callable[[], Any]]


class Jobs:
    """The jobs of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, name: str) -> bool:
        """Whether this process has the job from now on."""
        try:
            os.close(os.open(self.folder / f"{name}.taken", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def write(self, name: str, step: str, outcome: str) -> None:
        (self.folder / f"{name}.{step}").write_text(outcome, encoding="utf-8")

    def outcome(self, name: str, step: str) -> str | None:
        """`DONE`, an error, or None for what was not finished."""
        file = self.folder / f"{name}.{step}"
        return file.read_text(encoding="utf-8") if file.exists() else None


def set_caches() -> None:
    """Compiled code in folders that all processes share, and each process compiling on its own. Before torch comes."""
    folder = Path(tempfile.gettempdir()) / f"nearpeak-kernels-{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def set_compiler() -> None:
    """How torch.compile works here, alike in all processes: what one compiled, another finds."""
    import torch._functorch.config
    import torch._inductor.config

    # a backward pass is run many times over what its forward pass kept
    torch._functorch.config.donated_buffer = False
    # the fastest of its configurations is chosen by the process that measures, which has the GPU for itself
    torch._inductor.config.autotune_local_cache = False


def work_through(jobs: Jobs, todo: Iterable[tuple[str, Callable[[], Steps]]], clean: Callable[[], Any]) -> None:
    """Does jobs until none is left; what makes the steps of a job may be an error of each of them."""
    import torch

    for name, make in todo:
        if not jobs.take(name):
            continue
        try:
            steps = make()
        except Exception as error:
            jobs.write(name, "all", error_text(error))
            print(f"{name}: {error_text(error)}", file=sys.stderr, flush=True)
            continue
        for step, call in steps.items():
            try:
                call()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                jobs.write(name, step, DONE)
            except torch.OutOfMemoryError:
                jobs.write(name, step, DONE)  # others have the memory now
            except Exception as error:
                jobs.write(name, step, error_text(error))
                print(f"{name}, {step}: {error_text(error)}", file=sys.stderr, flush=True)
                if "CUDA error" in str(error):
                    return  # nothing runs in this process any more
        del steps
        clean()


def without_failures(ways: Steps, resets: Steps | None = None) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The ways that run at all, and why the others do not: a peer may have a largest size."""
    running, failed = {}, {}
    for name, way in ways.items():
        try:
            if resets and name in resets:
                resets[name]()
            way()
            running[name] = way
        except Exception as error:
            if name == "nearpeak":
                raise
            failed[name] = error_text(error)
    return running, failed


def error_text(error: Exception) -> str:
    """The kind of an error and its message, shortened."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def run_workers(command: Sequence[str], processes: int, limit_seconds: float) -> float:
    """Runs a command in several processes, ends those that take longer than allowed; the seconds that it took."""
    start = time.perf_counter()
    running = [subprocess.Popen(command) for _ in range(processes)]
    while any(process.poll() is None for process in running):
        if time.perf_counter() - start > limit_seconds:
            break
        time.sleep(0.1)
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()
    return time.perf_counter() - start
