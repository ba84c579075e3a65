"""A matrix product with a loop of 100,000 Python steps in front of it, beside the product alone.

    PYTHONPATH=src python -m benchmarks.accuracy.cpu_bound --json benchmarks/results/cpu_bound_h200.json

The first is CPU-bound, and its device time is still that of the second. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import nearpeak
from nearpeak._records import to_json
from nearpeak.render.text import text
from nearpeak.render.views.timing import document


def after_a_loop(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = 0
    for step in range(100_000):
        total += step
    return torch.mm(a, b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    a = nearpeak.inputs.activations(4096, 8192, dtype="bfloat16", seed=0)
    b = nearpeak.inputs.activations(8192, 4096, dtype="bfloat16", seed=1)
    clean = nearpeak.bench(torch.mm, a, b, name="product")
    slow = nearpeak.bench(after_a_loop, a, b, name="product after a loop")
    print(text(document(clean)), text(document(slow)), sep="\n\n")
    off = slow.seconds / clean.seconds - 1
    print(f"\nCPU-bound: {slow.cpu_bound} (alone: {clean.cpu_bound}); device time differs by {100 * off:+.2f} %")
    if arguments.json:
        arguments.json.write_text(json.dumps({"clean": to_json(clean), "slow": to_json(slow)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
