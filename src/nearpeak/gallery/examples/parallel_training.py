"""One training run, split over two ranks in three ways.

Data parallel, fully sharded and tensor parallel training compute the same numbers as one rank: only where the rows, the
weights and the sums are differs. Here one small model is trained on one rank and in each of the three ways by two
processes of this machine, joined by gloo over the loopback. The losses must agree step by step. What each rank keeps
and what both send is predicted by counting, and read from the tensors and from the loopback's own counter.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from nearpeak.gallery.parts import Part, Plot, Prediction, StackedBars, prediction_table, prose
from nearpeak.gallery.run import RANKS_TIMEOUT_S, Context, run_two
from nearpeak.render.document import CodeBlock, Table
from nearpeak.render.picture.bars import Bar
from nearpeak.render.picture.plot import Series
from nearpeak.units import percent, seconds

HIDDEN, INNER, BLOCKS, ROWS, STEPS = 256, 1024, 3, 256, 12
WEIGHTS = BLOCKS * 2 * HIDDEN * INNER
STATE_BYTES = 16
"""Of a weight in float32: itself, its gradient, and the two moments of AdamW."""
LARGEST_DIFFERENCE = 1e-3
"""Of a loss, over the loss: the order of sums in float32, and what AdamW makes of it in twelve steps."""


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, HIDDEN) to (rows, HIDDEN)."""
        change: Tensor = self.down(torch.relu(self.up(x)))
        return x + change


def one_rank(model: nn.Module) -> nn.Module:
    """Each rank has all weights and all rows, and they know nothing of each other."""
    return model


def data_parallel(model: nn.Module) -> nn.Module:
    """Each rank has all weights and half of the rows; gradients are averaged."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def fully_sharded(model: nn.Module) -> nn.Module:
    """Each rank has half of the weights and half of the rows; weights are gathered when a block needs them."""
    from torch.distributed.fsdp import fully_shard

    for block in model.children():
        fully_shard(block, mesh=_mesh())
    fully_shard(model, mesh=_mesh())
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Each rank has half of the columns, then half of the rows of the weights, and all rows of the batch."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.children():
        parallelize_module(block, _mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "one rank": one_rank,
    "data parallel": data_parallel,
    "fully sharded": fully_sharded,
    "tensor parallel": tensor_parallel,
}
KEPT = {"one rank": 1.0, "data parallel": 1.0, "fully sharded": 0.5, "tensor parallel": 0.5}
"""The share of the weights, gradients and moments on each of two ranks."""


def bytes_sent(way: str) -> float:
    """What two ranks send together in a step.

    An all-reduce sends as many bytes from each of the two as it has. In a gather each sends its half. gloo has no
    reduce-scatter: it is an all-reduce.

    >>> round(bytes_sent("data parallel") / bytes_sent("fully sharded"), 1)
    0.5
    """
    weights, activations = 4.0 * WEIGHTS, 4.0 * ROWS * HIDDEN
    if way == "data parallel":
        return 2 * weights
    if way == "fully sharded":
        return (1 + 1 + 2) * weights  # gathered for both passes; gradients reduced
    if way == "tensor parallel":
        return 2 * activations * (2 * BLOCKS - 1)  # one in each pass of a block; the input of the first needs none
    return 0.0


class Trained(TypedDict):
    """One training run."""

    losses: list[float]
    seconds: float
    """Of a step, the median."""
    kept: int
    """Bytes of weights, gradients and moments on rank 0."""
    sent: float | None
    """Bytes over the loopback in a step, the median; None where they are not counted."""


def example(context: Context) -> Iterator[Part]:
    """The three ways, what they need, and whether they agree."""
    yield from prose(
        f"A model of {BLOCKS} residual blocks, {HIDDEN} to {INNER} and back, {WEIGHTS / 1e6:.1f} million weights in"
        f" float32, learns {ROWS} rows by AdamW. This is all that the three ways need:"
    )
    for split in (data_parallel, fully_sharded, tensor_parallel):
        yield CodeBlock(text=inspect.getsource(split))
    kinds = (("weights", 4), ("gradients", 4), ("moments of AdamW", 8))
    yield StackedBars(
        title="What each of two ranks keeps, predicted",
        bars=tuple(
            Bar(name=way, pieces=tuple((kind, share * size * WEIGHTS) for kind, size in kinds))
            for way, share in KEPT.items()
        ),
        unit="B",
    )
    results = train_two(context) if context.measures else None
    yield prediction_table(
        "Weights, gradients and moments on each rank",
        [
            Prediction(
                what=way,
                predicted=share * STATE_BYTES * WEIGHTS,
                measured=None if results is None else float(results[way]["kept"]),
                low=1.0,
                high=1.001,
            )
            for way, share in KEPT.items()
        ],
        unit="B",
        note="16 bytes for each weight that the rank keeps. AdamW also counts its steps, 4 bytes for each tensor.",
    )
    yield prediction_table(
        "Bytes that both ranks send in a step",
        [
            Prediction(
                what=way,
                predicted=bytes_sent(way),
                measured=None if results is None else results[way]["sent"],
                low=0.98,
                high=1.15,
            )
            for way in WAYS
            if bytes_sent(way)
        ],
        unit="B",
        note="Data parallel: an all-reduce of all gradients. Fully sharded: two gathers of all weights, and gloo's"
        " all-reduce in place of a reduce-scatter, which NCCL has and which sends half of that. Tensor parallel: an"
        " all-reduce of the activations in each pass of a block.",
    )
    yield from prose(
        "Data parallel and fully sharded training send bytes by the weights, whatever the batch is; tensor parallel"
        " training by the rows, whatever the weights are. The first two are therefore the choice across nodes with"
        " large batches, the last one within a node."
    )
    if results is None:
        if context.measures:
            yield from prose(f"The two processes did not finish within {RANKS_TIMEOUT_S:.0f} s here.")
        return
    yield Plot(
        title="The losses",
        series=tuple(
            Series(name=way, points=tuple((float(step), loss) for step, loss in enumerate(one["losses"])))
            for way, one in results.items()
        ),
        x_label="step",
        y_label="loss",
        y_unit="",
        log_y=True,
    )
    alone = results["one rank"]
    rows = []
    for way, one in results.items():
        apart = max(abs(a - b) / b for a, b in zip(one["losses"], alone["losses"], strict=True))
        rows.append((way, seconds(one["seconds"]), f"{one['losses'][-1]:.6f}", percent(apart, 4)))
    yield Table(
        title=f"{STEPS} steps of training",
        headers=("", "step", "last loss", "largest difference from one rank"),
        rows=tuple(rows),
        note="On one rank both processes compute the same whole step at once, each on its own core.",
    )
    wrong = disagreeing(results)
    yield from prose(
        f"All three agree with one rank: no loss of any step differs by more than {percent(LARGEST_DIFFERENCE)}. What"
        " remains is the order in which float32 numbers are added."
        if not wrong
        else f"These do not agree with one rank: {', '.join(wrong)}."
    )


def disagreeing(results: dict[str, Trained]) -> list[str]:
    """The ways in which a loss is another one than on one rank, or does not fall."""
    alone = results["one rank"]["losses"]
    return [
        way
        for way, one in results.items()
        if one["losses"][-1] >= one["losses"][0]
        or any(not abs(a - b) <= LARGEST_DIFFERENCE * b for a, b in zip(one["losses"], alone, strict=True))
    ]


def train_two(context: Context) -> dict[str, Trained] | None:
    """Trains in all ways with two processes; None where they fail or take too long."""
    context.progress("two processes")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trained.json"
        run_two(["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", __name__, str(file)])
        return None if not file.exists() else json.loads(file.read_text())


def train(way: str) -> Trained:
    """Trains on this rank, and all others train with it."""
    from torch import distributed

    torch.manual_seed(0)  # the same weights, rows and targets on all ranks
    model = WAYS[way](nn.Sequential(*(Block() for _ in range(BLOCKS))))
    rows, targets = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
    is_split = way in ("data parallel", "fully sharded")
    if is_split:
        rows, targets = (whole.chunk(distributed.get_world_size())[distributed.get_rank()] for whole in (rows, targets))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, times, sent = [], [], []
    for _ in range(STEPS):
        distributed.barrier()
        begun, counted = time.perf_counter(), loopback_bytes()
        loss = (model(rows) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - begun)
        distributed.barrier()
        if counted is not None:
            sent.append(float((loopback_bytes() or 0) - counted))
        mean = loss.detach().clone()
        if is_split:
            distributed.all_reduce(mean)
            mean /= distributed.get_world_size()
        losses.append(float(mean))
    kept = [_local(parameter) for parameter in model.parameters()]
    kept += [_local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    kept += [_local(value) for state in optimizer.state.values() for value in state.values()]
    return Trained(
        losses=losses,
        seconds=statistics.median(times),
        kept=sum(tensor.numel() * tensor.element_size() for tensor in kept),
        sent=statistics.median(sent) if sent else None,
    )


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def _local(tensor: Any) -> Tensor:
    """The part of a tensor on this rank."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def loopback_bytes() -> int | None:
    """What the loopback of this machine has carried since it was started; None where the system does not tell."""
    with contextlib.suppress(OSError, StopIteration, ValueError, IndexError):
        lines = Path("/proc/net/dev").read_text().splitlines()
        return int(next(line for line in lines if line.strip().startswith("lo:")).partition(":")[2].split()[0])
    return None


def main() -> None:
    """Trains as one rank of the job that torchrun started; rank 0 writes the results to the file that is given."""
    from torch import distributed

    distributed.init_process_group("gloo")
    results = {way: train(way) for way in WAYS}
    if distributed.get_rank() == 0:
        partial = Path(f"{sys.argv[1]}.part")
        partial.write_text(json.dumps(results))
        partial.replace(sys.argv[1])
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
