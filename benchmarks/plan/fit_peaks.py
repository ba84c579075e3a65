"""`nearpeak plan fit` judged: peaks before and after the change that it proposes, predicted and found.

    python -m benchmarks.plan.fit_peaks [--json FILE]              # on this GPU: its allocator is the judge
    python -m benchmarks.plan.fit_peaks --fake 8 --seed 1          # drawn models on fake tensors, without a GPU

Every step is traced on fake tensors and planned for a GPU with less memory than it needs. On a GPU it runs as it is and
with the cheapest change that keeps the numbers: peaks are `torch.cuda.max_memory_allocated` of the second step. Drawn
models are changed and traced again: there the peak is that of the tensors of the changed step.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.plan.from_profile import SHAPES, Decoder, Shape
from nearpeak.machines import catalogue
from nearpeak.machines.machine import Machine
from nearpeak.measure.case import as_case
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.training.fit import FitPlan, Remedy, fit_step
from nearpeak.plan.training.memory import WORKSPACE
from nearpeak.profiling.estimate import estimate_step
from nearpeak.trace.fake import fake

Step = Callable[[], None]


@dataclass(frozen=True)
class Change:
    """What is done to a step."""

    recomputed: int = 0
    """Layers."""
    pieces: int = 1
    """Microbatches."""
    chunks: int = 1
    """Of the loss, recomputed."""
    fused: bool = False
    """Whether the optimizer becomes a fused one."""


Build = Callable[[Change], Step]


@dataclass(frozen=True)
class Subject:
    """A step, and the share that the planned GPU has of the memory beyond weights, gradients and optimizer states."""

    name: str
    build: Build
    share: float


def loss_of(model: nn.Module, hidden: torch.Tensor, target: torch.Tensor, chunks: int) -> torch.Tensor:
    """The loss of a model's head over rows, in one piece or in chunks that are recomputed."""

    def part(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model.head(rows), wanted, reduction="mean" if chunks == 1 else "sum")

    rows, wanted = hidden.flatten(0, -2), target.flatten()
    if chunks == 1:
        return part(rows, wanted)
    parts = zip(rows.chunk(chunks), wanted.chunk(chunks), strict=True)
    return sum(checkpoint(part, *each, use_reentrant=False) for each in parts) / len(wanted)


def decoder(shape: Shape, layers: int) -> Build:
    """A language model in bfloat16 with fused AdamW."""

    def build(change: Change) -> Step:
        with torch.device("cuda"):
            model = Decoder(shape, layers, change.recomputed).to(torch.bfloat16)
            tokens = torch.randint(0, shape.vocabulary, (shape.microbatch, shape.sequence))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            for piece in tokens.chunk(change.pieces):
                loss_of(model, model.hidden(piece), piece, change.chunks).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return step

    return build


STEPS = (
    Subject("1b, 8 sequences", decoder(replace(SHAPES["llama-3.2-1b"], microbatch=8), 16), 0.5),
    Subject("1b, tight", decoder(replace(SHAPES["llama-3.2-1b"], microbatch=4), 16), 0.3),
    Subject("8b, 8 layers", decoder(replace(SHAPES["llama-3-8b"], microbatch=4), 8), 0.5),
    Subject("13b, 12 layers", decoder(replace(SHAPES["llama-2-13b"], microbatch=8), 12), 0.5),
)


class Images(nn.Module):
    """A vision transformer: patches, layers, a head."""

    def __init__(self, width: int, layers: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor, recomputed: int) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # (batch, patches, width)
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number < recomputed else layer(x)
        return x.mean(1)


class Block(nn.Module):
    """Two convolutions around which the image goes on."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm(self.first(x)))
        return functional.relu(x + self.last_norm(self.second(y)))


class Convolutions(nn.Module):
    """A residual network of one size."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, channels, 7, 4, 3)
        self.blocks = nn.ModuleList(Block(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 1000)

    def forward(self, images: torch.Tensor, recomputed: int) -> torch.Tensor:
        x = self.enter(images)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number < recomputed else block(x)
        return x.mean((2, 3))


class Scores(nn.Module):
    """Attention written out, with dropout, and a feed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / 8).softmax(-1)  # (batch, heads, tokens, tokens)
        x = x + self.out((functional.dropout(scores, 0.1) @ v).transpose(1, 2).reshape(batch, tokens, width))
        return x + self.feed(self.feed_norm(x))


class Texts(nn.Module):
    """A language model with scores in memory."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Scores(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, recomputed: int) -> torch.Tensor:
        x = self.table(tokens)
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number < recomputed else layer(x)
        return x


class Recurrent(nn.Module):
    """A recurrent language model, none of whose layers can be recomputed alone."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.memory = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, tokens: torch.Tensor, _recomputed: int) -> torch.Tensor:
        return self.memory(self.table(tokens))[0]


def trained(make: Callable[[], nn.Module], inputs: tuple[int, ...], vocabulary: int, optimizer: str) -> Build:
    """A step of a model of images (`vocabulary` is 0) or tokens."""

    def build(change: Change) -> Step:
        with torch.device("cuda"):
            model = make().to(torch.bfloat16)
            values = torch.randint(0, vocabulary, inputs) if vocabulary else torch.randn(inputs, dtype=torch.bfloat16)
            target = values if vocabulary else torch.randint(0, 1000, inputs[:1])
        steps: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=change.fused or None)
        if optimizer == "momentum":
            steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step() -> None:
            steps.zero_grad(set_to_none=True)
            for piece, wanted in zip(values.chunk(change.pieces), target.chunk(change.pieces), strict=True):
                loss_of(model, model(piece, change.recomputed), wanted, change.chunks).backward()
            steps.step()

        return step

    return build


def draw(seed: int) -> Subject:
    """A model, its sizes and its optimizer."""
    dice = random.Random(seed)
    kind = dice.choice(("decoder", "images", "convolutions", "texts", "recurrent"))
    optimizer, batch = dice.choice(("adamw", "momentum")), dice.choice((1, 3, 8, 32))
    width, layers = 64 * dice.randrange(8, 33), dice.randrange(4, 25)
    vocabulary = dice.choice((16_000, 32_000, 50_304))
    share = dice.uniform(0.2, 0.8)
    if kind == "decoder":
        shape = Shape(
            hidden=2 * width,
            heads=width // 64,
            kv_heads=width // 64,
            intermediate=256 * dice.randrange(16, 50),
            vocabulary=vocabulary,
            sequence=512 * dice.randrange(2, 9),
            microbatch=max(1, batch // 4),
        )
        build = decoder(shape, layers)
    elif kind == "images":
        size = 32 * dice.randrange(7, 13)
        build = trained(lambda: Images(width, layers, 16), (4 * batch, 3, size, size), 0, optimizer)
    elif kind == "convolutions":
        size = 64 * dice.randrange(3, 8)
        build = trained(lambda: Convolutions(width // 4, layers), (4 * batch, 3, size, size), 0, optimizer)
    elif kind == "texts":
        tokens = 128 * dice.randrange(4, 13)
        build = trained(lambda: Texts(width, layers, vocabulary), (batch, tokens), vocabulary, optimizer)
    else:
        tokens = 128 * dice.randrange(1, 5)
        build = trained(lambda: Recurrent(width, 2 + layers % 3, vocabulary), (batch, tokens), vocabulary, optimizer)
    return Subject(f"{kind} {seed}", build, share)


def measured_peak(step: Step) -> float:
    """Bytes that torch's allocator hands out at most in the second step."""
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return float(torch.cuda.max_memory_allocated())


def planned(subject: Subject, machine: Machine) -> tuple[FitPlan, FitPlan]:
    """The plan where there is memory enough, and that where there is not."""
    with fake():
        case = as_case(subject.build(Change()), (), {})
    trace, estimate = estimate_step(case, machine)
    whole = fit_step(trace, estimate, Cluster.of(machine, gpus=1))
    kept = 2 * whole.by_category["parameters"] + whole.by_category["optimizer"]
    less = replace(machine, memory_bytes=whole.needed - (1 - subject.share) * max(0.0, whole.peak - kept))
    return whole, fit_step(trace, estimate, Cluster.of(less, gpus=1), source=subject.name)


def run(subject: Subject, *, is_fake: bool) -> dict[str, float | str]:
    """One step: planned, run, changed, run again."""
    machine = catalogue.find("h200-sxm") if is_fake else catalogue.by_driver_name(torch.cuda.get_device_name())
    assert machine is not None, "the GPU is not in the catalogue"
    whole, plan = planned(subject, machine)
    remedy: Remedy | None = next((item for item in plan.remedies if item.states == "as they are"), None)
    changed = Change()
    if remedy is not None:
        changed = Change(remedy.recomputed_layers, remedy.pieces, remedy.loss_chunks, remedy.fused)
    found = []
    for change in (Change(), changed):
        if is_fake:
            found.append(planned(replace(subject, build=lambda _, own=change: subject.build(own)), machine)[0].peak)
        else:
            gc.collect()
            torch.cuda.empty_cache()
            found.append(measured_peak(subject.build(change)))
    around = 0.0 if is_fake else WORKSPACE
    row: dict[str, float | str] = {
        "step": subject.name,
        "predicted": whole.peak,
        "found": found[0],
        "error": (whole.peak + around) / found[0] - 1,
        "needed": whole.needed,
        "capacity": plan.capacity,
        "change": "none" if remedy is None else str(remedy),
        "others": "; ".join(str(item) for item in plan.remedies if item.states != "as they are"),
    }
    if remedy is not None:
        row |= {
            "recomputed_layers": remedy.recomputed_layers,
            "pieces": remedy.pieces,
            "loss_chunks": remedy.loss_chunks,
            "fused": str(remedy.fused),
            "predicted_after": remedy.peak,
            "needed_after": remedy.bytes,
            "found_after": found[1],
            "error_after": (remedy.peak + around) / found[1] - 1,
            "fits_after": str(found[1] + (remedy.bytes - remedy.peak if is_fake else 0.0) <= plan.capacity),
        }
    return row


def _line(row: dict[str, float | str]) -> str:
    def gigabytes(name: str) -> str:
        return f"{float(row[name]) / 1e9:6.2f}"

    before = f"peak {gigabytes('predicted')} GB, found {gigabytes('found')} ({float(row['error']):+.1%})"
    if "found_after" not in row:
        return f"{row['step']:16s} {before}; for {gigabytes('capacity')} GB: nothing that keeps the numbers"
    after = f"{gigabytes('predicted_after')}, found {gigabytes('found_after')} ({float(row['error_after']):+.1%})"
    fits = "fits" if row["fits_after"] == "True" else "does not fit"
    return f"{row['step']:16s} {before}; for {gigabytes('capacity')} GB: {row['change']}; then {after}, {fits}"


def main() -> int:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--fake", type=int, default=0, metavar="N", help="draw so many models, on fake tensors")
    parser.add_argument("--seed", type=int, default=0, help="of the first drawn model")
    arguments = parser.parse_args()
    subjects = map(draw, itertools.count(arguments.seed)) if arguments.fake else iter(STEPS)
    rows = []
    while len(rows) < (arguments.fake or len(STEPS)):
        row = run(next(subjects), is_fake=arguments.fake > 0)
        if float(row["capacity"]) < 0.98 * float(row["needed"]):  # else nothing is there that could be saved
            print(_line(row), flush=True)
            rows.append(row)
    if arguments.json is not None:
        where = "fake tensors" if arguments.fake else torch.cuda.get_device_name()
        machine = f"{where}, torch {torch.__version__}"
        results = {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "rows": rows}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    close = [max(abs(float(row["error"])), abs(float(row.get("error_after", 1.0)))) <= 0.05 for row in rows]
    fits = [row.get("fits_after") == "True" for row in rows]
    print(f"{sum(fits)} of {len(rows)} fit after the change; {sum(close)} with both peaks within 5 %")
    return 0 if all(close) and all(fits) else 1


if __name__ == "__main__":
    raise SystemExit(main())
