"""Two processes of the example `collectives`, which run each collective over gloo on the loopback, and time it.

`run_two` starts both. Each runs this file:

python two_ranks.py RANK FILE BYTES: the ranks find each other by FILE, a path that is not there yet. Each prints one
line of JSON: what it held after each collective, block by block, and how long collectives and messages took.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

RANKS = 2
REPEATS = 9
ELEMENTS = 4
"""Of a block, where only the values matter."""
PATIENCE = 20.0
"""Seconds until the two processes are given up."""


def block_value(rank: int, piece: int) -> float:
    """What piece `piece` of rank `rank` is filled with: every sum of these is another number."""
    return float(10**piece * (rank + 1))


def collective(name: str, mine: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Runs one on a tensor of as many pieces as there are ranks; gives what this rank holds then."""
    if name == "broadcast":
        distributed.broadcast(mine, 0)
        return mine
    if name == "all_reduce":
        distributed.all_reduce(mine)
        return mine
    if name == "reduce_scatter":
        result = result.chunk(RANKS)[0]
        distributed.reduce_scatter_tensor(result, mine)
    elif name == "all_gather":
        distributed.all_gather_into_tensor(result, mine.chunk(RANKS)[distributed.get_rank()])
    else:
        distributed.all_to_all_single(result, mine)
    return result


def there_and_back(message: torch.Tensor) -> None:
    """A message to the other rank, which sends it back."""
    if distributed.get_rank() == 0:
        distributed.send(message, 1)
        distributed.recv(message, 1)
    else:
        distributed.recv(message, 0)
        distributed.send(message, 0)


def seconds(call: Callable[[], object]) -> float:
    """The fastest of some calls that both ranks begin together: what else runs on their cores only adds."""
    times = []
    for _ in range(REPEATS):
        distributed.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main(rank: int, file: str, size: int) -> None:
    """The whole run of one rank."""
    warnings.simplefilter("ignore", FutureWarning)  # newer names of two collectives, which older versions do not have
    wait = datetime.timedelta(seconds=10)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS, timeout=wait)
    held, taken = {}, {}
    large, small = (torch.zeros(max(RANKS, count // 4)) for count in (size, 1024))
    result = torch.zeros_like(large)
    alone = {name: seconds(partial(there_and_back, one)) / 2 for name, one in (("large", large), ("small", small))}
    alone["copy"] = seconds(large.clone)
    for name in ("broadcast", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        values = torch.tensor([block_value(rank, piece) for piece in range(RANKS)]).repeat_interleave(ELEMENTS)
        after = collective(name, values, torch.zeros_like(values))
        held[name] = after.view(-1, ELEMENTS).tolist()
        taken[name] = seconds(partial(collective, name, large, result))
    taken["all_reduce of 1 kB"] = seconds(partial(collective, "all_reduce", small, small))
    print(json.dumps({"held": held, "seconds": taken, "alone": alone}))
    distributed.destroy_process_group()


def run_two(size: int) -> list[dict[str, Any]] | None:
    """Both ranks at once, each a process of its own; None where they fail or take too long."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    environment = {**os.environ, **loopback, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    deadline = time.monotonic() + PATIENCE
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        commands = [[sys.executable, __file__, str(rank), meeting, str(size)] for rank in (0, 1)]
        started = [
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
            )
            for command in commands
        ]
        try:
            printed = [one.communicate(timeout=max(0.1, deadline - time.monotonic()))[0] for one in started]
            return [json.loads(text) for text in printed]
        except (subprocess.TimeoutExpired, json.JSONDecodeError):
            return None
        finally:
            for one in started:
                one.kill()  # nothing where it has ended by itself
                one.wait()
                if one.stdout is not None:
                    one.stdout.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
