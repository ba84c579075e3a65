"""`nearpeak plan fit` against this GPU: predicted and measured peaks, before and after the change that it proposes.

    python -m benchmarks.plan.fit_peaks [--json FILE]

Every step is traced on fake tensors, planned for a GPU with less memory than it needs, and run on this GPU as it is and
with the cheapest change that keeps the numbers. Peaks are `torch.cuda.max_memory_allocated` of the second step.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from benchmarks.plan.from_profile import SHAPES, Decoder, Shape
from nearpeak.machines import catalogue
from nearpeak.measure.case import as_case
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.training.fit import Remedy, fit_step
from nearpeak.plan.training.memory import WORKSPACE
from nearpeak.profiling.estimate import estimate_step
from nearpeak.trace.fake import fake

STEPS: dict[str, tuple[Shape, int, float]] = {
    "1b, 8 sequences": (replace(SHAPES["llama-3.2-1b"], microbatch=8), 16, 0.6),
    "1b, tight": (replace(SHAPES["llama-3.2-1b"], microbatch=4), 16, 0.45),
    "8b, 8 layers": (replace(SHAPES["llama-3-8b"], microbatch=4), 8, 0.7),
    "13b, 12 layers": (replace(SHAPES["llama-2-13b"], microbatch=8), 12, 0.7),
}
"""By name: the model and its batch, the layers, and the share of the needed memory that the planned GPU has."""


def build(shape: Shape, layers: int, recomputed: int = 0, pieces: int = 1) -> Callable[[], None]:
    """A training step in bfloat16 with fused AdamW."""
    with torch.device("cuda"):
        model = Decoder(shape, layers, recomputed).to(torch.bfloat16)
        tokens = torch.randint(0, shape.vocabulary, (shape.microbatch, shape.sequence))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for piece in tokens.chunk(pieces):
            functional.cross_entropy(model(piece).view(-1, shape.vocabulary), piece.view(-1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def measured_peak(step: Callable[[], None]) -> float:
    """Bytes that torch's allocator hands out at most in the second step."""
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return float(torch.cuda.max_memory_allocated())


def run(name: str) -> dict[str, float | str]:
    """One step: planned, run, changed, run again."""
    shape, layers, share = STEPS[name]
    machine = catalogue.by_driver_name(torch.cuda.get_device_name())
    assert machine is not None, "the GPU is not in the catalogue"
    with fake():
        case = as_case(build(shape, layers), (), {})
    trace, estimate = estimate_step(case, machine)
    whole = fit_step(trace, estimate, Cluster.of(machine, gpus=1))
    capacity = share * whole.needed
    plan = fit_step(trace, estimate, Cluster.of(replace(machine, memory_bytes=capacity), gpus=1), source=name)
    remedy = next(
        (item for item in plan.remedies if item.states == "as they are"),
        Remedy(recomputed_layers=0, pieces=1, states="as they are", sharding="none", bytes=0.0, added_seconds=0.0),
    )
    peaks = []
    for recomputed, pieces in ((0, 1), (remedy.recomputed_layers, remedy.pieces)):
        gc.collect()
        torch.cuda.empty_cache()
        peaks.append(measured_peak(build(shape, layers, recomputed, pieces)))
    row: dict[str, float | str] = {
        "step": name,
        "predicted": whole.peak,
        "measured": peaks[0],
        "error": (whole.peak + WORKSPACE) / peaks[0] - 1,
        "capacity": capacity,
        "change": str(remedy),
        "needed_after": remedy.bytes,
        "measured_after": peaks[1],
        "fits_after": str(peaks[1] <= capacity),
    }
    before = f"peak {whole.peak / 1e9:6.2f} GB, measured {peaks[0] / 1e9:6.2f} ({row['error']:+.1%} with workspaces)"
    after = f"needed {remedy.bytes / 1e9:6.2f}, measured {peaks[1] / 1e9:6.2f}"
    print(f"{name:16s} {before}; for {capacity / 1e9:5.1f} GB: {remedy}; then {after}", flush=True)
    return row


def main() -> int:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = [run(name) for name in STEPS]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    good = all(abs(float(row["error"])) <= 0.05 and row["fits_after"] == "True" for row in rows)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
