"""Fits the constants of collectives on measured rows and writes src/nearpeak/plan/cluster/collectives.json.

    python -m benchmarks.plan.fit_collectives [benchmarks/measurements/measured_collectives.csv]

One set per kind of link (NVLink of Ampere, Hopper and Blackwell, PCIe, through the host), shared by all systems of that
kind. Each protocol is fitted on the rows for which NCCL's tuning takes it. The loss grows linearly beyond 5 %, so that
single slow measurements pull little; a weak prior keeps constants that few rows determine near a plausible value. For
each system the constants of its kind are fitted a second time without its rows, for validation.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nearpeak._files import replace_file
from nearpeak._records import to_json
from nearpeak.plan.cluster.collectives import (
    LinkConstants,
    NcclTopology,
    NetworkConstants,
    ProtocolConstants,
    Traffic,
    choose_algorithm,
    constants_name,
    link_kind,
    nccl_generation,
    protocol_seconds,
    shared_bandwidth,
    traffic_of,
)
from nearpeak.plan.validation.validate import MeasuredCollective, cluster_of, read_collectives

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "benchmarks/measurements/measured_collectives.csv"
OUT = ROOT / "src/nearpeak/plan/cluster/collectives.json"
KNEE = 0.05

FREE: dict[str, tuple[str, ...]] = {
    "LL": ("base", "lead", "fill", "fill_step", "fill_bytes", "share", "copy"),
    "LL128": ("base", "lead", "share", "copy"),
    "Simple": ("base", "fill_step", "share", "copy"),
    "in-switch": ("base", "fill_step", "fill_bytes", "share"),
    "direct": ("base", "lead", "fill", "fill_bytes", "share", "copy", "slow_bytes"),
}
"""What is fitted, by protocol; the rest of its constants stays as below. For Simple, rows have 1 MiB per rank and more:
`lead` and `fill_bytes` only say that many ranks with little data each do not wait for whole chunks at every step."""
ZERO = ProtocolConstants(base=0, lead=0, fill=0, fill_step=0, fill_bytes=0, share=0.5, copy=0, slow_bytes=0, root=False)
START: dict[str, ProtocolConstants] = {
    "LL": replace(ZERO, base=6e-6, lead=1e-6, fill=1e-6, fill_step=1e-7, fill_bytes=3e3, share=0.4, copy=1.0),
    "LL128": replace(ZERO, base=14e-6, lead=1e-6, share=0.7, copy=0.5),
    "Simple": replace(ZERO, base=15e-6, lead=1e-6, fill_step=7e-6, fill_bytes=1.3e5, share=0.78, copy=0.5, root=True),
    "in-switch": replace(ZERO, base=25e-6, fill_step=7e-6, fill_bytes=2e6, share=0.6),
    "direct": replace(
        ZERO, base=7e-6, lead=3e-7, fill=8e-6, fill_bytes=2e4, share=0.65, copy=0.5, slow_bytes=1e6, root=True
    ),
}
LOOSENESS = {"share": 0.15, "copy": 0.5, "crossing": 1.0, "spreading": 1.0}
"""Standard deviation of the prior on the logarithm; 1.5 for the others."""

Point = tuple[Traffic, float, int, float]
"""Traffic, link bandwidth, ranks, measured seconds."""


def prepare(rows: Sequence[MeasuredCollective]) -> dict[tuple[str, str, str], list[Point]]:
    """Points by (kind of link, protocol as fitted, system)."""
    points: dict[tuple[str, str, str], list[Point]] = {}
    for row in rows:
        cluster = cluster_of(row)
        here = NcclTopology(
            generation=nccl_generation(cluster.machine.architecture),
            pcie=cluster.fabric in ("pcie", "host"),
            ranks=row.ranks,
            domains=1,
            link=cluster.link_bandwidth / 1e9,
            network=0.0,
            in_switch=cluster.in_switch_reduction,
        )
        algorithm, protocol = choose_algorithm(row.op, row.bytes, here)
        name = constants_name(algorithm, protocol)
        traffic = traffic_of(row.op, row.bytes, row.ranks, row.ranks, algorithm, protocol, 0.0, 0.0, None)
        key = (link_kind(cluster, row.ranks), name, row.system)
        points.setdefault(key, []).append((traffic, cluster.link_bandwidth, row.ranks, row.seconds))
    return points


def fit(name: str, kind: str, points: Sequence[Point]) -> ProtocolConstants:
    """The constants of one protocol over one kind of link."""
    start = START[name]
    free = list(FREE[name])
    if kind in ("pcie", "host"):  # bandwidth depends on how many share the host
        free += ["crossing", "spreading"]
        start = replace(start, crossing=0.5, spreading=0.5)
    first = np.log([getattr(start, field) for field in free])
    widths = np.array([LOOSENESS.get(field, 1.5) for field in free])
    measured = np.log([seconds for _, _, _, seconds in points])

    def constants(x: np.ndarray) -> ProtocolConstants:
        return replace(start, **{field: float(math.exp(value)) for field, value in zip(free, x, strict=True)})

    def residuals(x: np.ndarray) -> np.ndarray:
        numbers = constants(x)
        predicted = [
            protocol_seconds(numbers, traffic, numbers.share * link * shared_bandwidth(numbers, ranks))[0]
            for traffic, link, ranks, _ in points
        ]
        return np.concatenate([(np.log(predicted) - measured) / KNEE, 0.5 * (x - first) / widths])

    return constants(minimize(residuals, first))


def minimize(residuals: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """Levenberg-Marquardt with weights that make the loss linear beyond 1."""
    damping = 1e-2
    value = residuals(x)
    loss = float(np.sum(np.sqrt(1 + value**2) - 1))
    for _ in range(100):
        columns = []
        for index in range(len(x)):
            moved = x.copy()
            moved[index] += 1e-4
            columns.append((residuals(moved) - value) / 1e-4)
        slope = np.stack(columns, axis=1)
        weights = 1 / np.sqrt(1 + value**2)
        curvature = slope.T @ (slope * weights[:, None])
        gradient = slope.T @ (value * weights)
        for _ in range(12):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            trial = x + np.clip(step, -1, 1)
            trial_value = residuals(trial)
            trial_loss = float(np.sum(np.sqrt(1 + trial_value**2) - 1))
            if trial_loss < loss:
                break
            damping *= 4
        else:
            return x
        gained = loss - trial_loss
        x, value, loss = trial, trial_value, trial_loss
        damping /= 3
        if gained < 1e-6 * loss:
            break
    return x


def fit_link(kind: str, points: dict[tuple[str, str, str], list[Point]], without: str = "") -> LinkConstants | None:
    """All protocols of one kind of link, without the rows of one system."""
    used = {key: value for key, value in points.items() if key[0] == kind and key[2] != without}
    if not used:
        return None
    protocols = {}
    for name in FREE:
        chosen = [point for key, value in used.items() if key[1] == name for point in value]
        if chosen:
            protocols[name] = rounded(fit(name, kind, chosen))
    return LinkConstants(
        protocols=protocols,
        rows=sum(map(len, used.values())),
        systems=tuple(sorted({key[2] for key in used})),
        max_ranks=max(point[2] for value in used.values() for point in value),
    )


def rounded(numbers: ProtocolConstants) -> ProtocolConstants:
    """Four digits: more would pretend."""
    values = to_json(numbers)
    return replace(numbers, **{key: float(f"{value:.4g}") for key, value in values.items() if key != "root"})


NETWORK = NetworkConstants(
    # InfiniBand: 12 GB/s per 100 Gb/s, which NCCL's developers count as the peak (NVIDIA/nccl-tests issues 119, 290);
    # Ethernet: 181 of 200 GB/s (two nodes of gcp-a3-mega, in collectives_between_nodes.csv); the others are assumed
    share={"InfiniBand": 0.96, "Ethernet": 0.90, "AWS EFA": 0.80, "": 0.85},
    communicator=16 * 27e9,  # 16 channels; what 144 and 1440 GB200 reach at 16 GiB in collectives_between_nodes.csv
    all_to_all_share=0.85,
    message=1e-6,
    source="latencies of NCCL's tuning tables; bandwidth checked on 17 all-reduces of 96 to 1440 GPUs, assumed else",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, default=ROWS, help="the CSV file of measurements")
    path = parser.parse_args().rows
    rows = read_collectives(path)
    points = prepare(rows)
    kinds = list(dict.fromkeys(key[0] for key in points))
    links, without = {}, {}
    for kind in kinds:
        whole = fit_link(kind, points)
        assert whole is not None
        links[kind] = whole
        print(kind, whole.rows, "rows")
        for name, numbers in whole.protocols.items():
            print("   ", name, {field: getattr(numbers, field) for field in FREE[name]}, numbers.crossing)
        for system in whole.systems:
            rest = fit_link(kind, points, without=system)
            if rest is not None:
                without[system] = {kind: rest}
    data = {
        "source": f"benchmarks.plan.fit_collectives on {path.name}: {len(rows)} rows of {rows[0].source}",
        "links": to_json(links),
        "network": to_json(NETWORK),
        "without": to_json(without),
    }
    replace_file(OUT, (json.dumps(data, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
