"""Who waits for whom? Host delays against device spins."""

from __future__ import annotations

from typing import Any

import torch

from nearpeak.measure.bench import bench
from nearpeak.measure.case import Case
from nearpeak.measure.result import CPU_BOUND_MARGIN
from nearpeak.measure.selftest.bench_place import Place, spin_host
from nearpeak.measure.selftest.report import Experiment
from nearpeak.units import percent

HOST = (50e-6, 200e-6, 1e-3, 4e-3)
DEVICE = (30e-6, 150e-6, 700e-6, 3e-3)


def waiting(place: Place, quick: bool) -> Experiment:
    """A host delay and a device spin in every combination: device time and CPU-bound verdict must both be right."""
    question = "is CPU-bound code told apart, and its device time right all the same?"
    expected = "all verdicts right, device time within 2 % or 0.5 us"
    if place.cuda is None or place.spin is None:
        found = "needs a GPU and triton"
        return Experiment(name="waiting", question=question, expected=expected, found=found, passed=None)
    spin = place.spin
    anchor = torch.zeros(1, device=place.device)
    rows: list[dict[str, Any]] = []
    for host in HOST[:: 2 if quick else 1]:
        for device in DEVICE[:: 2 if quick else 1]:

            def call(anchor: torch.Tensor, host: float = host, device: float = device) -> None:
                spin_host(round(host * 1e9))
                spin(round(device * 1e9))

            timing = bench(Case(call, anchor, name="delay"), max_seconds=0.3, warmup_seconds=0.02)
            rows.append(
                {
                    "host": host,
                    "device": device,
                    "reported": timing.seconds,
                    "cpu_bound": timing.cpu_bound,
                    "expected": host > CPU_BOUND_MARGIN * device,
                }
            )
    right = sum(row["cpu_bound"] == row["expected"] for row in rows)
    # An empty spin itself takes the 0.6 us that any kernel takes.
    off = [max(0.0, abs(row["reported"] - row["device"]) - 1.1e-6) / row["device"] for row in rows]
    found = f"{right} of {len(rows)} verdicts right, device time off by at most {percent(max(off), 2)}"
    passed = right == len(rows) and max(off) <= 0.02
    return Experiment(
        name="waiting", question=question, expected=expected, found=found, passed=passed, data={"rows": rows}
    )
