"""The attention kernels for Hopper, by configuration, and those that are no default yet: errors and times.

    python -m benchmarks.kernels.attention_variants --json variants.json --seconds 120

Each cell is a problem of a model, with tokens before heads in memory. Its ways are the kernels for Hopper with each
configuration worth measuring, the portable kernels, and torch's SDPA. Every configuration first runs in a process of
its own on small odd sizes, where it is compiled, compared with float32 and repeated: one that is wrong, differs between
two runs or does not end is not timed. The times of kernels in a backward pass are read from torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nearpeak.kernels.attention import operator_arguments
from nearpeak.kernels.attention.triton import AttentionProblem
from nearpeak.kernels.attention.tuning import (
    MAX_SUMS,
    Sm90Config,
    Sm90Tiles,
    has_sm90_backward,
    sm90_fp8_tile_candidates,
    sm90_fp8_tiles,
    sm90_tile_candidates,
    sm90_tiles,
    tile_dim,
)

ROUNDS = 7
REPEATS = 20
CHECK_SECONDS = 100
"""For compiling and checking one configuration; a kernel whose warps wait for each other for ever takes longer."""
CHECKED_SIZES = ((2, 16, 8, 1217, 1217), (4, 8, 4, 130, 700), (8, 2, 2, 300, 70))
"""Batches, heads, key heads, queries and keys. All have 16 heads of keys, so that heads can alternate as in cells."""
TOLERANCE = 0.01
"""The largest error relative to the largest value: weights and gradients of scores are rounded to 8 bits."""
FP8_TOLERANCE = 0.15
"""Of operands and weights that are rounded to 4 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One configuration of a pass. None is the default."""

    backward: bool
    dim: int
    value_dim: int
    causal: bool
    persistent: bool = True
    tiles: Sm90Tiles | None = None
    consumers: int = 2
    together: int = 1
    """Heads whose programs alternate in the backward pass."""
    sums: int | None = None
    """Partial sums of a query gradient."""
    window: int | None = None
    """Keys that a query sees before its own."""
    sinks: bool = False
    fp8: bool = False
    """Whether operands have 8 bits. They are quantized before, unless it says otherwise."""
    quantizes: bool = False

    @property
    def name(self) -> str:
        if self.backward:
            return f"hopper, {self.together} heads together" + (f", {self.sums} sums" if self.sums else "")
        tiles = self.tiles or default_tiles(self)
        order = "persistent" if self.persistent else "one tile each"
        sizes = f"{64 * self.consumers} x {tiles.keys}, {tiles.key_stages}/{tiles.value_stages} stages, {tiles.stored}"
        kind = "" if not self.fp8 else ", fp8 with quantization" if self.quantizes else ", fp8"
        return f"hopper, {sizes}, {order}{kind}"


def default_tiles(variant: Variant) -> Sm90Tiles:
    if variant.fp8:
        return sm90_fp8_tiles(variant.dim)
    return sm90_tiles(tile_dim(variant.dim), tile_dim(variant.value_dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A problem, with tokens before heads in memory."""

    backward: bool
    dim: int
    value_dim: int
    causal: bool
    batch: int
    heads: int
    key_heads: int
    tokens: int
    window: int | None = None
    sinks: bool = False
    fp8: bool = False

    @property
    def name(self) -> str:
        dims = f"{self.dim}" if self.dim == self.value_dim else f"{self.dim}/{self.value_dim}"
        heads = f"{self.heads}/{self.key_heads}"
        mask = ("causal" if self.causal else "full") + (f", window {self.window}" if self.window else "")
        mask += (", sinks" if self.sinks else "") + (", fp8" if self.fp8 else "")
        return f"{'backward' if self.backward else 'forward'} {dims}, {self.batch} x {heads} x {self.tokens} {mask}"

    @property
    def flops(self) -> float:
        pairs = self.batch * self.heads * self.tokens**2 / (2 if self.causal else 1)
        if self.window is not None:
            pairs = self.batch * self.heads * float(sum(min(query, self.window) + 1 for query in range(self.tokens)))
        products = 3 * self.dim + 2 * self.value_dim if self.backward else self.dim + self.value_dim
        return 2.0 * pairs * products

    def variants(self) -> list[Variant]:
        same: dict[str, Any] = {
            "dim": self.dim, "value_dim": self.value_dim, "causal": self.causal, "window": self.window,
            "sinks": self.sinks,
        }  # fmt: skip
        if self.backward:
            if not has_sm90_backward(self.dim, self.value_dim):
                return []
            heads = self.batch * self.key_heads
            alternate = self.causal and self.dim in (64, 128) and self.window is None
            together = sorted({1, min(16, heads)}) if alternate else [1]
            numbers = (None, MAX_SUMS) if self.heads > self.key_heads and self.window is None else (None,)
            return [
                Variant(backward=True, together=number, sums=sums, **same) for number in together for sums in numbers
            ]
        tiles = sm90_tile_candidates(tile_dim(self.dim), tile_dim(self.value_dim))
        orders = (True, False) if self.causal else (True,)
        if self.fp8:
            whole = Variant(backward=False, fp8=True, quantizes=True, persistent=not self.causal, **same)
            plain = Variant(backward=False, persistent=not self.causal, **same)
            candidates = sm90_fp8_tile_candidates(self.dim)
            both = [(one, order) for one in candidates for order in orders]
            return [Variant(backward=False, fp8=True, tiles=one, persistent=order, **same) for one, order in both] + [
                whole,
                plain,
            ]
        return [
            Variant(backward=False, tiles=one, persistent=order, consumers=consumers, **same)
            for one in tiles
            for order in orders
            for consumers in ((3, 2) if self.dim == 64 and self.window is None else (2,))
        ]


def _cells() -> Iterator[Cell]:
    """In the order of what is wanted first."""
    both = (False, True)

    def cell(backward: bool, dim: int, value_dim: int, causal: bool, *sizes: int) -> Cell:
        batch, heads, key_heads, tokens = sizes
        return Cell(
            backward=backward, dim=dim, value_dim=value_dim, causal=causal, batch=batch, heads=heads,
            key_heads=key_heads, tokens=tokens,
        )  # fmt: skip

    for dim, tokens in ((128, 16384), (64, 8192)):
        for causal in both:
            yield replace(cell(False, dim, dim, causal, 1, 16, 16, tokens), fp8=True)
    yield cell(True, 256, 256, True, 2, 16, 16, 8192)  # which only others have
    yield cell(True, 192, 192, True, 2, 32, 32, 8192)
    yield cell(False, 192, 128, True, 2, 32, 32, 8192)
    yield cell(True, 192, 128, True, 2, 32, 32, 8192)
    yield cell(False, 256, 256, False, 1, 16, 16, 16384)
    yield cell(False, 192, 192, True, 2, 32, 32, 8192)
    yield cell(True, 128, 128, True, 1, 64, 8, 16384)
    yield cell(True, 128, 128, True, 2, 32, 8, 8192)
    yield cell(True, 64, 64, True, 4, 32, 8, 4096)
    for dim in (96, 80):
        for causal in both:
            for backward in both:
                yield cell(backward, dim, dim, causal, 4, 32, 32, 4096)
    for backward in both:
        for window in (1023, 127):
            yield replace(cell(backward, 64, 64, True, 2, 64, 8, 8192), window=window, sinks=True)
        yield replace(cell(backward, 128, 128, True, 1, 32, 8, 16384), window=1023)
        yield replace(cell(backward, 80, 80, True, 1, 16, 16, 2048), window=128)
    yield cell(False, 256, 256, True, 2, 16, 16, 8192)
    yield cell(False, 192, 192, False, 1, 64, 8, 4329)
    yield cell(False, 128, 128, True, 1, 64, 8, 16384)
    yield cell(True, 128, 128, False, 2, 16, 16, 8192)  # of the published table: no slower than before
    yield cell(True, 128, 128, True, 2, 16, 16, 8192)
    for tokens in (197, 128, 512):
        yield cell(False, 64, 64, False, 64, 12, 12, tokens)
    yield cell(False, 128, 128, False, 64, 12, 12, 197)
    yield cell(True, 64, 64, False, 64, 12, 12, 197)


CELLS = tuple(_cells())


@contextmanager
def configured(variant: Variant) -> Iterator[None]:
    """The launchers of the kernels for Hopper take the configuration of a variant."""
    from nearpeak.kernels.attention import sm90

    names = ("sm90_config", "sm90_tiles", "sm90_fp8_tiles", "heads_together", "query_gradient_sums")
    before = {name: getattr(sm90, name) for name in names}
    config = Sm90Config(consumers=variant.consumers, persistent=variant.persistent, together=1)
    tiles = variant.tiles or default_tiles(variant)
    stand_ins = (
        lambda *_: config, lambda *_: tiles, lambda *_: tiles, lambda *_: variant.together,
        lambda *given: variant.sums or before["query_gradient_sums"](*given),
    )  # fmt: skip
    for name, stand_in in zip(names, stand_ins, strict=True):
        setattr(sm90, name, stand_in)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(sm90, name, function)


def random_inputs(
    batch: int, heads: int, key_heads: int, queries: int, keys: int, dim: int, value_dim: int
) -> list[Tensor]:
    """Query, key, value, and the gradient of the result."""
    sizes = ((queries, heads, dim), (keys, key_heads, dim), (keys, key_heads, value_dim), (queries, heads, value_dim))
    return [torch.randn(batch, *size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for size in sizes]


def sinks_of(query: Tensor) -> Tensor:
    return torch.linspace(-2.0, 2.0, query.shape[1]).to(query)


def problem_of(inputs: Sequence[Tensor], case: Variant | Cell) -> AttentionProblem:
    query, key, value, _ = inputs
    options: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        options["window"] = (case.window, None)
    if case.sinks:
        options["sinks"] = sinks_of(query)
    return AttentionProblem(*operator_arguments(query, key, value, **options))


def exact(inputs: Sequence[Tensor], variant: Variant) -> tuple[Tensor, ...]:
    """The result and the gradients, in float32."""
    query, key, value, gradient = (x.float() for x in inputs)
    wide = [x.requires_grad_() for x in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    scores = wide[0] @ wide[1].repeat_interleave(group, 1).mT * query.shape[-1] ** -0.5
    if variant.causal:
        queries, keys = scores.shape[-2:]
        every = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
        hidden = every.triu(keys - queries + 1)
        if variant.window is not None:
            hidden |= every.tril(keys - queries - variant.window - 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    values = wide[2].repeat_interleave(group, 1)
    if variant.sinks:  # one more key, without a value
        sinks = sinks_of(inputs[0]).float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores, values = torch.cat([scores, sinks], -1), torch.nn.functional.pad(values, (0, 0, 0, 1))
    result = scores.softmax(-1).nan_to_num() @ values
    return result.detach(), *torch.autograd.grad(result, wide, gradient)


def passes(variant: Variant, inputs: Sequence[Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The call of a variant, and what it takes before: the forward pass of its backward pass."""
    from nearpeak.kernels.attention import sm90
    from nearpeak.kernels.attention import triton as portable
    from nearpeak.kernels.attention.fp8_triton import quantized

    gradient = inputs[3]
    problem = problem_of(inputs, variant)
    saved: list[Tensor] = []
    operands = quantized(*inputs[:3]) if variant.fp8 else None

    def prepare() -> None:
        if variant.backward:
            saved[:] = portable.forward(problem)

    def call() -> Any:
        with configured(variant):
            if variant.backward:
                return sm90.backward(problem, gradient, None, saved[0], saved[1], True, True)[:3]
            if variant.quantizes:
                return sm90.forward(problem, quantized(*inputs[:3]))[:1]
            return sm90.forward(problem, operands)[:1]

    return call, prepare


def check(variant: Variant) -> dict[str, Any]:
    """The error of a variant on small sizes, and whether two runs differ."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    worst, different, norms = 0.0, 0, [0.0]
    for sizes in CHECKED_SIZES:
        inputs = random_inputs(*sizes, variant.dim, variant.value_dim)
        right = exact(inputs, variant)
        right = right[1:] if variant.backward else right[:1]
        call, prepare = passes(variant, inputs)
        prepare()
        first = call()
        for one, other in zip(first, right, strict=True):
            error = (one.float() - other).abs().max() / other.abs().max()
            worst = max(worst, float("inf") if error.isnan() else float(error))
            norms.append(float((one.float() - other).norm() / other.norm()))
        different += sum(not all(map(torch.equal, first, call())) for _ in range(REPEATS))
    limit = FP8_TOLERANCE if variant.fp8 else TOLERANCE
    return {"error": worst, "norm": max(norms), "limit": limit, "different": different}


def checked(place: tuple[int, int]) -> dict[str, Any]:
    """`check` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.kernels.attention_variants", "--check", f"{place[0]},{place[1]}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"no end in {CHECK_SECONDS} s"}
    if done.returncode:
        return {"failed": done.stderr.strip()[-400:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def is_right(found: dict[str, Any]) -> bool:
    return "failed" not in found and found["error"] < found.get("limit", TOLERANCE) and not found["different"]


def peers(cell: Cell, inputs: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """The portable kernels, and torch's."""
    from nearpeak.kernels.attention import triton as portable

    query, key, value, gradient = inputs
    problem = problem_of(inputs, cell)
    saved = portable.forward(problem)
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    leaves = [x.detach().requires_grad_(cell.backward) for x in (query, key, value)]

    def by_torch(backend: SDPBackend) -> Tensor:
        with sdpa_kernel([backend]):
            grouped = cell.heads != cell.key_heads
            return scaled_dot_product_attention(
                leaves[0], leaves[1], leaves[2], is_causal=cell.causal, enable_gqa=grouped
            )

    def windowed_flash() -> Tensor:
        """torch has it for tokens before heads."""
        given = (None, None, cell.tokens, cell.tokens, 0.0, True, False)
        options = {"scale": cell.dim**-0.5, "window_size_left": cell.window, "window_size_right": 0}
        by_token = (x.transpose(1, 2) for x in leaves)
        result: Tensor = torch.ops.aten._flash_attention_forward(*by_token, *given, **options)[0].transpose(1, 2)
        return result

    of_torch: dict[str, Callable[[], Tensor]] = {}
    if cell.window is None:
        of_torch = {name: partial(by_torch, backend) for name, backend in backends.items()}
    elif not cell.sinks:
        of_torch = {"flash": windowed_flash}
    ways: dict[str, Callable[[], Any]] = {}
    for name, way in of_torch.items():
        try:
            result = way()
            if cell.backward:
                torch.autograd.grad(result, leaves, gradient, retain_graph=True)
        except RuntimeError:
            continue  # not for heads of this size
        ways[name] = partial(torch.autograd.grad, result, leaves, gradient, retain_graph=True) if cell.backward else way
    if cell.backward:
        ways["portable"] = lambda: portable.backward(problem, gradient, None, *saved, True, True, False, False)
    else:
        ways["portable"] = lambda: portable.forward(problem)
    return ways


def kernel_microseconds(call: Callable[[], Any]) -> dict[str, float]:
    """The times of the kernels of a call."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    return {event.key: event.device_time_total / 3 for event in profiler.key_averages() if event.device_time_total}


def measured(cell: Cell, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The times of all ways of a cell whose results are right."""
    from benchmarks.kernels.timing import in_turns

    torch.manual_seed(0)
    sizes = (cell.batch, cell.heads, cell.key_heads, cell.tokens, cell.tokens, cell.dim, cell.value_dim)
    inputs = random_inputs(*sizes)
    ways = peers(cell, inputs)
    variants = cell.variants()
    calls = {}
    for variant, checks in zip(variants, found, strict=True):
        if is_right(checks):
            call, prepare = passes(variant, inputs)
            prepare()
            calls[variant.name] = call
    seconds = in_turns({**calls, **ways}, ROUNDS, may_wait=False)
    row = {
        "cell": cell.name,
        **asdict(cell),
        "seconds": seconds,
        "tflops": {name: cell.flops / value / 1e12 for name, value in seconds.items()},
        "checks": {variant.name: checks for variant, checks in zip(variants, found, strict=True)},
    }
    if cell.backward and cell.dim == 128 and calls:
        row["kernels_us"] = kernel_microseconds(next(iter(calls.values())))
        heads_first = [x.contiguous() for x in inputs]
        call, prepare = passes(variants[0], heads_first)
        prepare()
        row["kernels_us_heads_first"] = kernel_microseconds(call)
    return row


def line(row: dict[str, Any]) -> str:
    order = sorted(row["tflops"], key=lambda name: -row["tflops"][name])
    rates = ", ".join(f"{name} {row['tflops'][name]:.0f}" for name in order)
    wrong = [f"{name}: {checks}" for name, checks in row["checks"].items() if not is_right(checks)]
    return f"{row['cell']}: TFLOP/s {rates}" + (f"; wrong: {'; '.join(wrong)}" if wrong else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all times here, after each cell")
    parser.add_argument("--seconds", type=float, default=120.0, help="no cell begins later")
    parser.add_argument("--processes", type=int, default=16, help="that compile and check at a time")
    parser.add_argument("--only", help="only cells with this in their names; several are separated by |")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.check:
        number, index = map(int, arguments.check.split(","))
        print(json.dumps(check(CELLS[number].variants()[index])))
        return 0
    start = time.perf_counter()
    parts = (arguments.only or "").split("|")
    wanted = [number for number, cell in enumerate(CELLS) if any(part in cell.name for part in parts)]
    # cells that differ in sizes alone have the same variants, which are checked once
    variants: dict[Variant, tuple[int, int]] = {}
    for number in wanted:
        for index, variant in enumerate(CELLS[number].variants()):
            variants.setdefault(variant, (number, index))
    with ThreadPoolExecutor(arguments.processes) as pool:
        found = dict(zip(variants, pool.map(checked, variants.values()), strict=True))
    right = sum(map(is_right, found.values()))
    print(f"{time.perf_counter() - start:6.1f} s  {right} of {len(found)} configurations are right", flush=True)
    rows = []
    for number in wanted:
        if time.perf_counter() - start > arguments.seconds:
            print(f"no time for {CELLS[number].name}", flush=True)
            continue
        row = measured(CELLS[number], [found[variant] for variant in CELLS[number].variants()])
        rows.append(row)
        print(f"{time.perf_counter() - start:6.1f} s  {line(row)}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
