"""Runs programs in forks of an interpreter that has imported torch and nearpeak: that takes a tenth of the time.

Each line on stdin is a job as JSON; the id of its process and how that ended are written to stdout. A fork runs the
program as the interpreter itself would, so that uncaught exceptions, exit codes and `atexit` are its own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import types
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
import torch.distributed
import torch.optim
import torch.profiler

import nearpeak.cli.main
import nearpeak.profiles.file
import nearpeak.profiling.run
import nearpeak.profiling.script
import nearpeak.render.report
import nearpeak.render.views.profile

assert np is not None and torch.get_num_threads() == 1


def run_program(file: bytes) -> int:
    """Runs a file as `__main__`; errors are printed by the interpreter, and `sys.exit` ends the process."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    run = ctypes.pythonapi.PyRun_SimpleFileExFlags
    run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
    sys.modules["__main__"] = types.ModuleType("__main__")
    return int(run(libc.fopen(file, b"r"), file, 1, None) != 0)


def serve() -> list[str]:
    """Forks for each job; returns the arguments of the job in the fork."""
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if process:
            print(process, flush=True)
            print(os.waitpid(process, 0)[1], flush=True)
            continue
        os.setsid()
        for number, name in enumerate((os.devnull, job["stdout"], job["stderr"])):
            descriptor = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(job["environment"])
        os.chdir(job["folder"])
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
        sys.path[0] = job["folder"]
        sys.argv[:] = job["arguments"]
        return list(job["arguments"])
    os._exit(0)


signal.signal(signal.SIGINT, signal.default_int_handler)
gc.collect()
gc.freeze()  # a fork that ends would copy, and look at, everything that was imported
arguments = serve()
if arguments[0] == "nearpeak":
    nearpeak.cli.main.run()
if run_program(str(Path(arguments[0]).absolute()).encode()) and sys.last_type is not KeyboardInterrupt:
    sys.exit(1)
