"""Where the time of `linear_cross_entropy` goes: its products and its pass over the logits, by the size of chunks.

    PYTHONPATH=src python -m benchmarks.kernels.loss_parts [--json FILE] [--cells 16384x2048x32000,...]

Each cell is tokens x features x vocabulary. The three products of all tokens are what the whole call is compared with;
the parts are those of one chunk, times the number of chunks. The pass over the logits of the largest chunk is measured
in every configuration that the tuner knows, and its bytes are a read and a write of the logits.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.cases import random_tensor
from benchmarks.kernels.timing import in_turns
from nearpeak import kernels
from nearpeak.kernels._runtime.tuning import to_row
from nearpeak.kernels.losses import triton as losses_triton

CELLS = "16384x2048x32000,16384x2048x128256"
CHUNKS = (1, 2, 4, 8)
CHUNK_BYTES = 2**30 + 2**27
ROUNDS = 3


def measured_cell(tokens: int, features: int, vocabulary: int, device: str) -> dict[str, Any]:
    """The times of one cell in seconds, by chunks."""
    hidden = random_tensor(tokens, features, device=device)
    weight = random_tensor(vocabulary, features, device=device)
    target = torch.randint(vocabulary, (tokens,), device=device)

    def whole(chunk: int | None) -> tuple[Tensor, ...]:
        loss = kernels.linear_cross_entropy(hidden, weight, target, chunk_tokens=chunk)
        return torch.autograd.grad(loss, (hidden, weight))

    rows, matrix = hidden.detach(), weight.detach()
    sizes = {-(-tokens // number): number for number in CHUNKS}
    sizes = {size: number for size, number in sizes.items() if 2 * size * vocabulary <= CHUNK_BYTES}
    ways = {"whole": partial(whole, None)} | {
        f"whole, {number} chunks": partial(whole, n) for n, number in sizes.items()
    }
    seconds = in_turns(ways, ROUNDS, may_wait=False)
    for size in dict.fromkeys((tokens, *sizes)):
        number = -(-tokens // size)
        some = rows[:size]
        logits = torch.empty(size, vocabulary, dtype=rows.dtype, device=device)
        gradient = torch.empty_like(matrix)
        parts = {
            "logits": partial(torch.mm, some, matrix.t(), out=logits),
            "by hidden": partial(torch.mm, logits, matrix, out=torch.empty_like(some)),
            "by weight": partial(torch.mm, logits.t(), some, out=gradient),
        }
        if size < tokens:
            parts["by weight, added"] = partial(torch.addmm, gradient, logits.t(), some, out=gradient)
        torch.mm(some, matrix.t(), out=logits)
        if size == max(sizes, default=0):
            for config in losses_triton.cross_entropy_candidates(vocabulary):
                parts[f"loss {json.dumps(to_row(config))}"] = partial(_loss, logits, target[:size], config)
        times = in_turns(parts, ROUNDS, may_wait=False)
        seconds |= {f"{number} chunks: {name}": number * time for name, time in times.items()}
        del logits, parts
    return {"tokens": tokens, "features": features, "vocabulary": vocabulary, "seconds": seconds}


def _loss(logits: Tensor, target: Tensor, config: losses_triton.RowConfig) -> Any:
    """The loss, with the gradient in place of the logits: each call has the same work, whatever the values are."""
    return losses_triton.cross_entropy_forward_(logits, target, None, -100, 0.0, 0.0, 0.0, "mean", config=config)


def table(cell: dict[str, Any]) -> str:
    """The times of a cell, of the loss the fastest configurations, over the three products."""
    seconds = cell["seconds"]
    products = sum(seconds[f"1 chunks: {name}"] for name in ("logits", "by hidden", "by weight"))
    lines = [f"{cell['tokens']} x {cell['features']} x {cell['vocabulary']}: three products {products * 1e3:.2f} ms"]
    losses = sorted((name for name in seconds if ": loss" in name), key=seconds.__getitem__)
    shown = [name for name in seconds if ": loss" not in name] + losses[:4]
    lines += [f"  {seconds[name] * 1e3:8.3f} ms {seconds[name] / products:6.3f}  {name}" for name in shown]
    moved = 4 * cell["tokens"] * cell["vocabulary"]
    return "\n".join([*lines, f"  bytes of the loss at 4.2 TB/s: {moved / 4.2e9:.3f} ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all times here")
    parser.add_argument("--cells", default=CELLS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cells = []
    for text in options.cells.split(","):
        cells.append(measured_cell(*map(int, text.split("x")), device))
        print(table(cells[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
