"""The loss of a small language model, step by step: trained with plain torch and with the kernels of nearpeak.

    PYTHONPATH=src python -m benchmarks.numerics.train_curves --json benchmarks/results/train_curves_cpu.json
    python -m benchmarks.numerics.train_curves --show benchmarks/results/train_curves_cpu.json

Both ways begin with the same weights and see the same batches. What difference means nothing is seen from runs of plain
torch: some see the same batches in other orders, and one begins with weights of which some are moved to the next
number, as another rounding would. On a GPU all kernels must run; on a CPU nearpeak runs its references, and the curves
are to agree but for rounding. Exit code 1 where the difference is more than that between orders.

Attention is nearpeak's too, or with `--attention torch` torch's in both ways.

The learning rate rises over the first steps. Without that the loss leaps on a GPU at some step near the thirtieth,
in every run by another amount, and the largest difference shows nothing else.

The text is made up: each token follows one of few that its predecessor, or the token before that, may have, drawn from
a seed. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nearpeak import kernels

EAGER, NEARPEAK, NUDGED = "eager", "nearpeak", "eager, nudged"
EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of a model and its batches."""

    width: int
    heads: int
    layers: int
    vocabulary: int
    tokens: int
    batch: int
    dtype: str
    lr: float
    warm_up: int = 40  # steps over which the learning rate rises


SIZES = {
    "cpu": Size(width=64, heads=2, layers=2, vocabulary=256, tokens=64, batch=4, dtype="float32", lr=3e-3),
    "cuda": Size(width=1024, heads=8, layers=4, vocabulary=8192, tokens=512, batch=16, dtype="bfloat16", lr=1e-3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """All that a model does beside matrix products and the embedding."""

    rms_norm: Callable[[Tensor, Tensor], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    rotary_pair: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    swiglu_packed: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterable[Tensor], float], torch.optim.Optimizer]


def eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def eager_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return eager_rms_norm(total, weight), total


def eager_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1).to(x.dtype)


def eager_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def eager_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def eager_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight).flatten(0, 1).float(), target.flatten())


OPERATIONS = {
    EAGER: Operations(
        rms_norm=eager_rms_norm,
        add_rms_norm=eager_add_rms_norm,
        rotary_pair=lambda q, k, cos, sin: (eager_rotary(q, cos, sin), eager_rotary(k, cos, sin)),
        attention=eager_attention,
        swiglu_packed=eager_swiglu,
        loss=eager_loss,
        # torch's others round each of their steps to the dtype of the parameters, and differ from it in bfloat16
        optimizer=lambda parameters, lr: torch.optim.AdamW(parameters, lr, fused=True),
    ),
    NEARPEAK: Operations(
        rms_norm=lambda x, weight: kernels.rms_norm(x, weight, eps=EPS),
        add_rms_norm=lambda x, residual, weight: kernels.add_rms_norm(x, residual, weight, eps=EPS),
        rotary_pair=lambda q, k, cos, sin: kernels.rotary_pair(q, k, cos, sin),
        attention=lambda q, k, v: kernels.attention(q, k, v, causal=True),
        swiglu_packed=lambda x: kernels.swiglu_packed(x),
        loss=lambda hidden, weight, target: kernels.linear_cross_entropy(hidden, weight, target),
        optimizer=lambda parameters, lr: kernels.AdamW(parameters, lr),
    ),
}


class Layer(nn.Module):
    """Attention and a gated MLP; the norms in front of both are their caller's."""

    def __init__(self, size: Size, operations: Operations) -> None:
        super().__init__()
        self.heads, self.operations = size.heads, operations
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.gate_and_up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(2 * size.width, size.width, bias=False)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k = self.operations.rotary_pair(q, k, cos, sin)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        result = self.operations.attention(q, k, v)
        return self.out(result.transpose(1, 2).flatten(-2))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.operations.swiglu_packed(self.gate_and_up(x)))


class Decoder(nn.Module):
    """A decoder-only transformer that returns its loss."""

    def __init__(self, size: Size, operations: Operations) -> None:
        super().__init__()
        self.operations = operations
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size, operations) for _ in range(size.layers))
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(size.width)) for _ in range(2 * size.layers + 1))
        self.head = nn.Parameter(torch.randn(size.vocabulary, size.width) / size.width**0.5)
        pairs = size.width // size.heads // 2
        angles = torch.outer(torch.arange(size.tokens), 10000.0 ** -(torch.arange(pairs) / pairs))
        self.angles = angles.cos(), angles.sin()  # not a buffer: stays in float32

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        cos, sin = (table.to(tokens.device) for table in self.angles)
        residual = self.embedding(tokens)
        first, *norms = self.norms
        x = self.operations.rms_norm(residual, first)
        for layer, after_attention, after_mlp in zip(self.layers, norms[::2], norms[1::2], strict=True):
            x, residual = self.operations.add_rms_norm(layer.attention(x, cos, sin), residual, after_attention)
            x, residual = self.operations.add_rms_norm(layer.mlp(x), residual, after_mlp)
        return self.operations.loss(x, self.head, target)


def text(size: Size, sequences: int, seed: int = 0) -> Tensor:
    """Sequences of one more than the tokens of a batch: a chain of order 2."""
    random = torch.Generator().manual_seed(seed)
    # squared, so that some tokens are frequent and others rare
    follow = torch.rand(2, size.vocabulary, 4, generator=random).square().mul(size.vocabulary).long()
    which = torch.multinomial(
        torch.tensor([0.7, 0.15, 0.1, 0.05]), sequences * (size.tokens + 1), replacement=True, generator=random
    ).view(size.tokens + 1, sequences)
    by_last = torch.rand(size.tokens + 1, sequences, generator=random) < 0.75
    result = torch.randint(size.vocabulary, (size.tokens + 1, sequences), generator=random)
    for place in range(2, size.tokens + 1):
        last, before = follow[0, result[place - 1]], follow[1, result[place - 2]]
        result[place] = torch.where(by_last[place, :, None], last, before).gather(1, which[place, :, None])[:, 0]
    return result.t().contiguous()


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    """Moves one weight in a thousand to the next number of its dtype."""
    random = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        chosen = torch.rand(weight.shape, generator=random) < 1e-3
        weight.copy_(torch.where(chosen, torch.nextafter(weight, torch.full_like(weight, torch.inf)), weight))


def trained(
    operations: Operations, size: Size, batches: Sequence[Tensor], device: str, nudged: bool = False
) -> Iterator[float]:
    """The loss at each step."""
    torch.manual_seed(0)
    model = Decoder(size, operations).to(getattr(torch, size.dtype))
    if nudged:
        nudge(model)
    model.to(device)
    optimizer = operations.optimizer(model.parameters(), size.lr)
    for step, batch in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = size.lr * min(1.0, step / size.warm_up)
        batch = batch.to(device)
        loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def operations_of(way: str, attention: str = NEARPEAK) -> Operations:
    """Those of a way; with "torch" for attention, that of both is torch's."""
    operations = OPERATIONS[NEARPEAK if way == NEARPEAK else EAGER]
    return operations if attention == NEARPEAK else replace(operations, attention=eager_attention)


def why_not_attention(size: Size, device: str) -> str:
    """Why the kernels of attention do not run at this size; empty where they do, and where references run anyway."""
    if device == "cpu":
        return ""
    shape = (size.batch, size.heads, size.tokens, size.width // size.heads)
    given = torch.empty(shape, device=device, dtype=getattr(torch, size.dtype))
    return kernels.supports(kernels.attention, given, given, given, causal=True).reason


def curves(size: Size, steps: int, device: str, orders: int, attention: str = NEARPEAK) -> dict[str, list[float]]:
    """The losses of all runs, by name."""
    batches = text(size, steps * size.batch).split(size.batch)
    runs: dict[str, tuple[str, Sequence[Tensor]]] = {name: (name, batches) for name in (EAGER, NEARPEAK, NUDGED)}
    for number in range(1, orders + 1):
        order = torch.randperm(steps, generator=torch.Generator().manual_seed(number)).tolist()
        runs[f"eager, order {number}"] = EAGER, [batches[index] for index in order]
    losses: dict[str, list[float]] = {}
    for name, (way, seen) in runs.items():
        losses[name] = []
        operations = operations_of(way, attention)
        with kernels.using("require" if way == NEARPEAK and device == "cuda" else "auto"):
            for loss in trained(operations, size, seen, device, nudged=way == NUDGED):
                losses[name].append(round(loss, 8))
                if len(losses[name]) % 20 == 0 or len(losses[name]) == steps:
                    progress = f"{name}: step {len(losses[name])} of {steps}, loss {loss:.4f}"
                    print(f"\r{progress:<60}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    return losses


def difference(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """The largest and the mean distance of two curves, and that of their means over the last tenth."""
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    end = max(1, len(one) // 10)
    return {
        "largest": max(apart),
        "mean": sum(apart) / len(apart),
        "at the end": abs(sum(one[-end:]) - sum(other[-end:])) / end,
    }


def differences(runs: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Between nearpeak and eager, eager and eager nudged, and all pairs of orders of eager."""
    orders = [name for name in runs if name not in (NEARPEAK, NUDGED)]
    pairs = [(EAGER, NEARPEAK), (EAGER, NUDGED), *itertools.combinations(orders, 2)]
    return {f"{one} | {other}": difference(runs[one], runs[other]) for one, other in pairs}


def is_within_noise(by_pair: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether nearpeak is nearer to eager than the two nearest orders of eager are to each other."""
    own, _, *orders = by_pair.values()
    # what is left of the last tenth may be 0 for two orders by chance: the largest counts there
    return (
        own["largest"] <= min(one["largest"] for one in orders)
        and own["mean"] <= min(one["mean"] for one in orders)
        and own["at the end"] <= max(one["at the end"] for one in orders)
    )


def shown(content: Mapping[str, Any]) -> str:
    size = content["size"]
    lines = [
        f"{content['machine']}, torch {content['torch']}, {content['date']}; nearpeak ran {content['nearpeak ran']}",
        f"{size['layers']} layers of {size['width']}, {size['heads']} heads, vocabulary {size['vocabulary']},"
        f" {size['batch']} x {size['tokens']} tokens, {size['dtype']}, {content['steps']} steps;"
        f" attention of nearpeak's run: {content.get('attention', 'torch')}",
        "",
        "| run | first loss | last tenth |",
        "| --- | ---: | ---: |",
    ]
    end = max(1, content["steps"] // 10)
    for name, losses in content["runs"].items():
        lines.append(f"| {name} | {losses[0]:.4f} | {sum(losses[-end:]) / end:.4f} |")
    lines += ["", "| difference of losses | largest | mean | last tenth |", "| --- | ---: | ---: | ---: |"]
    for name, numbers in content["differences"].items():
        cells = (name.replace(" | ", " and "), *(f"{value:.2g}" for value in numbers.values()))
        lines.append("| " + " | ".join(cells) + " |")
    verdict = "within the noise" if content["within noise"] else "NOT within the noise"
    return "\n".join([*lines, "", f"nearpeak is {verdict} of orders."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--orders", type=int, default=3, help="other orders of the batches that eager sees")
    parser.add_argument("--attention", choices=(NEARPEAK, "torch"), default=NEARPEAK, help="of nearpeak's run")
    parser.add_argument("--json", type=Path, help="write the losses here")
    parser.add_argument("--show", type=Path, help="print what was written, and train nothing")
    arguments = parser.parse_args()
    if arguments.show:
        content = json.loads(arguments.show.read_text(encoding="utf-8"))
        print(shown(content))
        return 0 if content["within noise"] else 1
    if arguments.steps < 1 or arguments.orders < 1:
        parser.error("--steps and --orders are 1 or more")
    device = arguments.device
    size = SIZES[device]
    if device == "cpu":
        torch.set_num_threads(1)  # for tensors so small more of them wait for each other
    attention = arguments.attention
    reason = why_not_attention(size, device) if attention == NEARPEAK else ""
    if reason:
        print(f"attention is torch's in all runs: {reason}", file=sys.stderr)
        attention = "torch"
    runs = curves(size, arguments.steps, device, arguments.orders, attention)
    ran = kernels.supports(kernels.rms_norm, torch.ones(1, 8, device=device))
    by_pair = differences(runs)
    content = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU",
        "torch": torch.__version__,
        "nearpeak ran": "kernels" if ran else "references",
        "attention": attention,
        "size": asdict(size),
        "steps": arguments.steps,
        "within noise": is_within_noise(by_pair),
        "differences": by_pair,
        "runs": runs,
    }
    print(shown(content))
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if content["within noise"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
