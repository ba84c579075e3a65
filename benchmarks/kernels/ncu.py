"""Hardware counters of calls: a script runs itself again under ncu, with an NVTX range around each call.

The script under ncu has `counted_range` around each call; nothing else is counted. The script that a user starts calls
`counted` and gets the kernels of all ranges.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

OPTIONS = ("--csv", "--nvtx", "--profile-from-start", "off", "--print-units", "base", "--clock-control", "none")
"""Units without prefixes, and the clock as it is in any other run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel that ran, the range it ran in, and what was counted of it."""

    name: str
    within: str
    counters: dict[str, float] = field(default_factory=dict)


def command(module: str, arguments: Sequence[str], counters: Sequence[str], log: Path, page: str) -> list[str]:
    """The command that runs `module` under ncu, which writes a table to `log`. `page` is "details" or "raw"."""
    asked = ["--page", page, "--metrics", ",".join(counters), "--log-file", str(log)]
    return ["ncu", *OPTIONS, *asked, sys.executable, "-m", module, *arguments]


def counted(run: Callable[[Path], list[str]], prefix: str) -> list[Kernel]:
    """The kernels that ran in ranges whose names begin so, by the command for a log."""
    if shutil.which("ncu") is None:
        raise SystemExit("ncu is not on the PATH: install NVIDIA Nsight Compute, or add its folder to the PATH")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        done = subprocess.run(run(log), capture_output=True, text=True, check=False)
        text = log.read_text() if log.exists() else ""
    kernels = read(text.splitlines(), prefix)
    if not kernels:
        raise SystemExit(f"ncu counted nothing:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}\n{text[-2000:]}")
    print(done.stderr[-2000:], end="", file=sys.stderr)  # a call that failed says why
    return kernels


def read(lines: Iterable[str], prefix: str) -> list[Kernel]:
    """The kernels of a table of ncu, of its page of details (a row for each counter) or raw (one for each kernel)."""
    kernels: dict[str, Kernel] = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        said = " ".join(str(value) for name, value in row.items() if name and "Push/Pop_Range" in name)
        within = re.search(rf":{re.escape(prefix)}([^:]+):", said)
        if within is None:  # of another range, or the row of units
            continue
        kernel = kernels.setdefault(row["ID"], Kernel(name=row["Kernel Name"], within=within[1]))
        values = {row["Metric Name"]: row["Metric Value"]} if "Metric Name" in row else row
        kernel.counters.update(
            {name: float(text.replace(",", "")) for name, text in values.items() if "__" in name and _is_number(text)}
        )
    return list(kernels.values())


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d,]+(\.\d+)?(e[+-]?\d+)?", text) is not None


@contextmanager
def counted_range(name: str) -> Iterator[None]:
    """What runs inside is counted by an ncu around this process, under this name.

    A range belongs to a thread, and autograd has threads of its own. Inside of it a backward pass runs in the thread
    that asks for it.
    """
    import torch

    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push(name)
    torch.cuda.cudart().cudaProfilerStart()
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.cudart().cudaProfilerStop()
        torch.cuda.nvtx.range_pop()
