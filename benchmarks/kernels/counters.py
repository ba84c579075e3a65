"""What limits a few kernels, by the counters of the GPU: attention beside cuDNN's, and norms and softmax of long rows.

    PYTHONPATH=src python -m benchmarks.kernels.counters --json benchmarks/results/kernel_counters_h200.json
    python -m benchmarks.kernels.counters --show benchmarks/results/kernel_counters_h200.json

ncu runs this script again: each call once, and each kernel as often as its counters need, with empty caches and an
unlocked clock. The table has the utilization of tensor cores, of the units for exponentials (xu) and of instruction
issue while a multiprocessor is active, and of DRAM and L2 bandwidth; and the three most frequent stall reasons, in
warps per issued instruction.

For a call with several kernels, times and cycles are summed, and utilization is that of the longest kernel. Needs a
GPU, ncu, and permission to read counters.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kernels import ncu

RANGE = "counters "
"""What the range around a call begins with."""
SECONDS, CLOCK = "gpu__time_duration.sum", "gpc__cycles_elapsed.avg.per_second"
SHARES = {
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "xu": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
}
"""In percent, by what the table calls them."""
HOPPER = 9
GMMA = "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active"
"""Instructions for products of a group of warps. One keeps tensor cores busy for long: a few percent are many."""
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    "barrier branch_resolving dispatch_stall drain imc_miss lg_throttle long_scoreboard math_pipe_throttle membar "
    "mio_throttle misc no_instruction short_scoreboard sleeping tex_throttle wait"
).split()
"""Why warps wait. Not among them: those that start an instruction (selected), or could and did not have their turn."""
MOST_STALLS = 3
ATTENTION = ((128, 8192, False), (128, 8192, True), (64, 4096, False))
"""Numbers in a head, tokens, and whether it is causal."""
TOGETHER, WIDTH = 16384, 2048
"""Tokens of all sequences, and numbers of all heads."""
ROWS = (2048, 65536)
CALLS = 2 * len(ATTENTION) + 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What was counted of a call."""

    call: str
    kernels: list[str]
    seconds: float
    cycles: float
    clock: float
    """In Hz; this, and what follows, of the longest kernel."""
    tensor: float
    xu: float
    issue: float
    dram: float
    l2: float
    gmma: float | None
    """Only on Hopper."""
    stalls: dict[str, float]
    """By reason the warps that wait when an instruction starts, the most first."""


def counters(hopper: bool) -> list[str]:
    """The counters to ask ncu for. One that a GPU does not have is an error."""
    stalls = [*STALLS, "gmma"] if hopper else STALLS
    return [SECONDS, CLOCK, *SHARES.values(), *([GMMA] if hopper else []), *map(STALL.format, stalls)]


def calls(
    device: str = "cuda", together: int = TOGETHER, rows: tuple[int, int] = ROWS
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each call with its name, ready to run; tensors live as long as their call."""
    import torch
    from torch.nn.attention import SDPBackend

    from benchmarks.kernels.attention import by_torch
    from nearpeak import kernels

    def random(*shape: int, gradient: bool = False) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=gradient)

    for dim, tokens, causal in ATTENTION:
        inputs = [random(max(1, together // tokens), WIDTH // dim, min(together, tokens), dim) for _ in range(3)]
        size = f"{dim} {'causal' if causal else 'full'} {tokens // 1024}k"
        yield f"attention {size}", partial(kernels.attention, *inputs, causal=causal)
        yield f"cuDNN attention {size}", partial(by_torch(SDPBackend.CUDNN_ATTENTION, causal), *inputs)
    size = f"{ROWS[0]} x {ROWS[1]}"
    x, weight, bias = (random(*shape, gradient=True) for shape in (rows, rows[1:], rows[1:]))
    yield f"softmax forward {size}", partial(kernels.softmax, x.detach())
    yield f"layer_norm forward {size}", partial(kernels.layer_norm, x.detach(), weight.detach(), bias.detach())
    result = kernels.layer_norm(x, weight, bias)
    backward = partial(torch.autograd.grad, result, [x, weight, bias], random(*rows), retain_graph=True)
    yield f"layer_norm backward {size}", backward


def run_once() -> None:
    """Each call once inside of a range, for ncu; twice before, as the first compiles."""
    import torch

    from nearpeak.kernels._runtime.policy import using

    torch.manual_seed(0)
    with using("require"):
        for name, call in calls():
            try:
                call()
                call()
            except Exception as error:  # the others run
                print(f"{name}: {error}", file=sys.stderr)
                continue
            with ncu.counted_range(RANGE + name):
                call()


def ncu_command(hopper: bool, log: Path) -> list[str]:
    return ncu.command("benchmarks.kernels.counters", ["--once"], counters(hopper), log, page="raw")


def by_call(kernels: Sequence[ncu.Kernel]) -> list[Counted]:
    """What was counted of each call, from its kernels."""
    kernels_by_call: dict[str, list[ncu.Kernel]] = {}
    for kernel in kernels:
        kernels_by_call.setdefault(kernel.within, []).append(kernel)
    return [_counted(name, of_call) for name, of_call in kernels_by_call.items()]


def _counted(name: str, kernels: Sequence[ncu.Kernel]) -> Counted:
    longest = max(kernels, key=_seconds).counters
    waiting = {stall: longest[STALL.format(stall)] for stall in (*STALLS, "gmma") if STALL.format(stall) in longest}
    most = sorted(waiting, key=waiting.__getitem__, reverse=True)[:MOST_STALLS]
    return Counted(
        call=name,
        kernels=[kernel.name for kernel in kernels],
        seconds=sum(map(_seconds, kernels)),
        cycles=sum(_seconds(kernel) * kernel.counters[CLOCK] for kernel in kernels),
        clock=longest[CLOCK],
        gmma=longest[GMMA] / 100 if GMMA in longest else None,
        stalls={stall: waiting[stall] for stall in most},
        **{share: longest[counter] / 100 for share, counter in SHARES.items()},
    )


def _seconds(kernel: ncu.Kernel) -> float:
    return 1e-9 * kernel.counters[SECONDS]


def table(rows: Sequence[Counted]) -> str:
    """In 100 columns: time, clock and shares of each call, and below what its warps wait for."""
    lines = [f"{'call':<33}{'ms':>8}{'Mcycles':>9}{'GHz':>7}" + "".join(f"{share:>8}" for share in SHARES)]
    for row in rows:
        shares = "".join(f"{getattr(row, share):>8.1%}" for share in SHARES)
        lines.append(f"{row.call:<33}{1e3 * row.seconds:>8.3f}{row.cycles / 1e6:>9.3f}{row.clock / 1e9:>7.3f}{shares}")
    lines += ["", f"{'call':<33}  warps that wait when an instruction starts"]
    for row in rows:
        stalls = ", ".join(f"{stall.replace('_', ' ')} {warps:.2f}" for stall, warps in row.stalls.items())
        lines.append(f"{row.call:<33}  {stalls}")
    return "\n".join(lines)


def shown(content: dict[str, Any]) -> str:
    """A file of before, as text."""
    versions = f"torch {content['torch']}, triton {content['triton']}, cuDNN {content['cudnn']}"
    rows = [Counted(**row) for row in content["calls"]]
    return f"{content['machine']}, {versions}, {content['date']}\n\n{table(rows)}"


def measured() -> dict[str, Any]:
    """What a run under ncu counts here, and where."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: ncu counts on a GPU; --show FILE shows what was counted on another")
    import triton

    hopper = torch.cuda.get_device_capability()[0] == HOPPER
    rows = by_call(ncu.counted(partial(ncu_command, hopper), RANGE))
    if len(rows) < CALLS:
        print(f"ncu counted {len(rows)} of {CALLS} calls: the others failed, or ran no kernel", file=sys.stderr)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "command": shlex.join(["python", *sys.argv]),
        "calls": [asdict(row) for row in rows],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write what was counted")
    parser.add_argument("--show", type=Path, help="only show what was counted before")
    parser.add_argument("--once", action="store_true", help="run each call once, for ncu")
    given = parser.parse_args(arguments)
    if given.once:
        run_once()
        return
    content = json.loads(given.show.read_text()) if given.show else measured()
    if given.json:
        given.json.write_text(json.dumps(content, indent=1) + "\n")
    print(shown(content))


if __name__ == "__main__":
    main()
