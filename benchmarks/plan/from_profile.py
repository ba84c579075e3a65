"""Two profiled layers on this GPU predict the steps of 8 and 16 layers: predicted and measured, for three models.

    python -m benchmarks.plan.from_profile [--json FILE] [--models NAME ...]

Needs a CUDA GPU of the catalogue with 80 GB. Every model is trained in bfloat16 by eager code with fused AdamW and
clipped gradients. The profile of two layers calibrates the plan (`nearpeak.plan.training.calibration`), whose step for
more layers is compared with the median of `STEPS` measured steps. Both run after `WARM_SECONDS` of steps: a GPU at its
power limit slows down in its first seconds, by 3 to 4 % on an H200.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import nearpeak
from nearpeak.machines import catalogue
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.find import find_model
from nearpeak.plan.training.calibration import calibrate_plan
from nearpeak.plan.training.job import Job, precision_named
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.plan import training_plan

PROFILED, PREDICTED = 2, (8, 16)
WARM_SECONDS, STEPS = 3.0, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and its microbatch."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    sequence: int
    microbatch: int


SHAPES = {
    "llama-3.2-1b": Shape(
        hidden=2048, heads=32, kv_heads=8, intermediate=8192, vocabulary=128256, sequence=4096, microbatch=2
    ),
    "llama-3-8b": Shape(
        hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocabulary=128256, sequence=4096, microbatch=1
    ),
    "llama-2-13b": Shape(
        hidden=5120, heads=40, kv_heads=40, intermediate=13824, vocabulary=32000, sequence=2048, microbatch=2
    ),
}


class Layer(nn.Module):
    """Attention and a gated feed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.width = shape, shape.hidden // shape.heads
        kv = shape.kv_heads * self.width
        self.norm, self.feed_norm = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.query, self.key, self.value = (
            nn.Linear(shape.hidden, size, bias=False) for size in (shape.hidden, kv, kv)
        )
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate, self.up = (nn.Linear(shape.hidden, shape.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        y = self.norm(x)
        q, k, v = (
            layer(y).view(batch, tokens, -1, self.width).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # (batch, heads, tokens, width)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        y = self.feed_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A language model of some layers."""

    def __init__(self, shape: Shape, layers: int, recomputed: int = 0) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the head reads."""
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number < self.recomputed else layer(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))


def training_step(shape: Shape, layers: int) -> Callable[[], None]:
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    model = Decoder(shape, layers)
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, shape.vocabulary, (shape.microbatch, shape.sequence))
    torch.set_default_device("cpu")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens)
        loss = functional.cross_entropy(logits.view(-1, shape.vocabulary), tokens.view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def warm_up(step: Callable[[], None]) -> None:
    """Steps until the GPU runs at the clock that its power limit sustains."""
    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        step()
        torch.cuda.synchronize()


def measured_seconds(step: Callable[[], None]) -> float:
    """The median step of a loop in which the host runs ahead, as in training."""
    warm_up(step)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(events))


def numbers(shape: Shape, layers: int) -> str:
    """The model of `shape` as `find_model` reads it."""
    return (
        f"layers={layers},hidden={shape.hidden},heads={shape.heads},kv_heads={shape.kv_heads},"
        f"intermediate={shape.intermediate},vocabulary={shape.vocabulary}"
    )


def compare(name: str, folder: Path | None) -> list[dict[str, float | str]]:
    shape = SHAPES[name]
    machine = catalogue.by_driver_name(torch.cuda.get_device_name())
    assert machine is not None, "the GPU is not in the catalogue"
    cluster = Cluster.of(machine, gpus=1)
    few = training_step(shape, PROFILED)
    warm_up(few)
    profile = nearpeak.profile(few)
    del few
    if folder is not None:
        profile.save(folder / f"{name}.json.gz")
    rows: list[dict[str, float | str]] = []
    for layers in PREDICTED:
        gc.collect()
        torch.cuda.empty_cache()
        layout = Layout(gpus=1, global_batch=shape.microbatch, microbatch=shape.microbatch, sharding="none")
        job = Job(
            model=find_model(numbers(shape, layers)),
            layout=layout,
            sequence=shape.sequence,
            precision=precision_named("bf16"),
            software="eager",
        )
        calibration = calibrate_plan(profile, job, cluster)
        predicted = training_plan(job, cluster, calibration=calibration).time.seconds
        uncalibrated = training_plan(job, cluster).time.seconds
        measured = measured_seconds(training_step(shape, layers))
        rows.append(
            {
                "model": name,
                "layers": layers,
                "measured_s": measured,
                "predicted_s": predicted,
                "error": predicted / measured - 1,
                "error_without_profile": uncalibrated / measured - 1,
                "calibration": calibration.text,
            }
        )
        print(
            f"{name:14s} {layers:3d} layers: measured {measured * 1e3:8.2f} ms, predicted {predicted * 1e3:8.2f} ms "
            f"({rows[-1]['error']:+.1%}; without the profile {rows[-1]['error_without_profile']:+.1%})",
            flush=True,
        )
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--profiles", type=Path, metavar="FOLDER", help="save the profiles of two layers here")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments = parser.parse_args()
    rows = [row for name in arguments.models for row in compare(name, arguments.profiles)]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    worst = max(abs(float(row["error"])) for row in rows)
    print(f"largest error {worst:.1%}")
    return 0 if worst <= 0.03 else 1


if __name__ == "__main__":
    raise SystemExit(main())
