"""Decoding with multi-head latent attention: bytes of the cache per second, by configuration.

    python -m benchmarks.kernels.latent_decode --json latent_decode.json --seconds 40

Keys have 576 columns, of which the first 512 are the values (DeepSeek, Kimi, GLM). With 16 heads, as on each of 8 GPUs,
memory is the limit. Every configuration first runs in a process of its own on a small cache, where it is compiled,
compared with float32 and repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels.decode import reference
from nearpeak.kernels.decode.tuning import DecodeConfig, shared_candidates

DIM, VALUE_DIM = 576, 512
ROUNDS = 7
REPEATS = 10
TOLERANCE = 0.02
"""The largest error relative to the largest value: weights are rounded to 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cache that is full."""

    batch: int
    tokens: int
    heads: int
    page: int | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        pages = "" if self.page is None else f", pages of {self.page}"
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.batch} x {self.tokens} tokens, {self.heads} heads, {kind}{pages}"

    @property
    def bytes(self) -> int:
        return self.batch * self.tokens * DIM * self.dtype.itemsize


E4M3 = torch.float8_e4m3fn
CELLS = (
    Cell(batch=64, tokens=8192, heads=16),
    Cell(batch=64, tokens=8192, heads=16, page=64),
    Cell(batch=64, tokens=8192, heads=16, page=64, dtype=E4M3),
    Cell(batch=64, tokens=8192, heads=16, dtype=E4M3),
    Cell(batch=8, tokens=32768, heads=16, page=64),
    Cell(batch=32, tokens=8192, heads=128, page=64),
)
CHECKED_TOKENS = 4096
CHECKED_LENGTHS = (4096, 1001, 37)
CHECK_SECONDS = 60


def inputs_of(cell: Cell) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, cache, lengths and pages."""
    query = torch.randn(cell.batch, cell.heads, 1, DIM, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((cell.batch,), cell.tokens, dtype=torch.int32, device="cuda")
    if cell.page is None:
        cache = torch.randn(cell.batch, 1, cell.tokens, DIM, device="cuda", dtype=torch.bfloat16)
        return query, cache.to(cell.dtype), lengths, None
    each = -(-cell.tokens // cell.page)
    cache = torch.randn(cell.batch * each, cell.page, 1, DIM, device="cuda", dtype=torch.bfloat16).to(cell.dtype)
    return query, cache, lengths, torch.randperm(cell.batch * each, device="cuda").view(cell.batch, each).int()


def arguments_of(query: Tensor, cache: Tensor, lengths: Tensor, pages: Tensor | None) -> tuple[Any, ...]:
    """The arguments of the operator."""
    options = (DIM**-0.5, -1, 0.0, None, 1.0, None, 1.0, None, True)
    return query, cache, cache[..., :VALUE_DIM], lengths, pages, *options


def call_of(inputs: tuple[Any, ...], config: DecodeConfig) -> Callable[[], Tensor]:
    from nearpeak.kernels.decode import triton as portable

    arguments = arguments_of(*inputs)

    def call() -> Tensor:
        result, _ = portable.decode_attention(*arguments, config=config)
        return result

    return call


def by_torch(query: Tensor, cache: Tensor) -> Tensor:
    """Products of all heads with the cache in 16 bits."""
    keys = cache[:, 0].to(query.dtype)
    weights = (query[:, :, 0] @ keys.mT * DIM**-0.5).softmax(-1)
    return weights @ keys[..., :VALUE_DIM]


def check(cell: Cell, config: DecodeConfig) -> dict[str, Any]:
    """The error of a configuration on a small cache, and whether runs differ."""
    torch.manual_seed(0)
    small = replace(cell, batch=len(CHECKED_LENGTHS), tokens=CHECKED_TOKENS)
    query, cache, _, pages = inputs_of(small)
    inputs = (query, cache, torch.tensor(CHECKED_LENGTHS, dtype=torch.int32, device="cuda"), pages)
    query, cache, value, *rest = arguments_of(*inputs)
    right = reference.decode_attention(query.float(), cache, value, *rest)[0]
    call = call_of(inputs, config)
    first = call()
    error = float((first.float() - right).abs().max() / right.abs().max())
    return {"error": error, "different": sum(not torch.equal(first, call()) for _ in range(REPEATS))}


def checked(place: tuple[int, int]) -> dict[str, Any]:
    """`check` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.kernels.latent_decode", "--check", f"{place[0]},{place[1]}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"no end in {CHECK_SECONDS} s"}
    if done.returncode:
        return {"failed": done.stderr.strip()[-400:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def configs_of(cell: Cell) -> dict[str, DecodeConfig]:
    """Configurations worth measuring, by what they are."""
    return {
        f"{one.block} keys, {one.rows} rows, {one.warps} warps, {one.stages} stages": one
        for one in shared_candidates(DIM, cell.dtype.itemsize)
        if cell.heads >= one.rows
    }


def is_right(found: dict[str, Any]) -> bool:
    return "failed" not in found and found["error"] < TOLERANCE and not found["different"]


def measured(cell: Cell, checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The times of the configurations that are right."""
    from benchmarks.kernels.timing import in_turns

    inputs = inputs_of(cell)
    calls: dict[str, Callable[[], Any]] = {
        name: call_of(inputs, config) for name, config in configs_of(cell).items() if is_right(checks[name])
    }
    if cell.page is None:
        calls["torch"] = partial(by_torch, inputs[0], inputs[1])
    seconds = in_turns(calls, ROUNDS, may_wait=False)
    rates = {name: cell.bytes / value / 1e12 for name, value in seconds.items()}
    described = {**asdict(cell), "dtype": str(cell.dtype), "cell": cell.name}
    return {**described, "seconds": seconds, "tb_s": rates, "checks": checks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all times here, after each cell")
    parser.add_argument("--seconds", type=float, default=40.0, help="no cell begins later")
    parser.add_argument("--processes", type=int, default=16, help="that compile and check at a time")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.check:
        number, index = map(int, arguments.check.split(","))
        print(json.dumps(check(CELLS[number], list(configs_of(CELLS[number]).values())[index])))
        return 0
    start, rows = time.perf_counter(), []
    places = [(number, index) for number, cell in enumerate(CELLS) for index in range(len(configs_of(cell)))]
    with ThreadPoolExecutor(arguments.processes) as pool:
        found = dict(zip(places, pool.map(checked, places), strict=True))
    right = sum(map(is_right, found.values()))
    print(f"{time.perf_counter() - start:6.1f} s  {right} of {len(found)} configurations are right", flush=True)
    for number, cell in enumerate(CELLS):
        if time.perf_counter() - start > arguments.seconds:
            print(f"no time for {cell.name}", flush=True)
            continue
        checks = {name: found[number, index] for index, name in enumerate(configs_of(cell))}
        row = measured(cell, checks)
        rows.append(row)
        order = sorted(row["tb_s"], key=lambda name: -row["tb_s"][name])
        rates = ", ".join(f"{name} {row['tb_s'][name]:.2f}" for name in order)
        wrong = "; ".join(f"{name}: {one}" for name, one in checks.items() if not is_right(one))
        print(f"{time.perf_counter() - start:6.1f} s  {cell.name}: TB/s {rates}; wrong: {wrong or 'none'}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
