"""Which algorithm and protocol NCCL takes for a collective: its own tuning model, with its own constants.

NCCL predicts `latency + bytes / bandwidth` for every algorithm and protocol and takes the smallest. The prediction is
not what the collective then takes (`collectives.py` has that, fitted on measurements), but it decides where the jumps
are: the step at 1 to 16 MiB in every measured curve is where the protocol changes.

Constants: NVIDIA/nccl, src/graph/tuning.cc (2.27 to 2.29), facts only. Latencies in microseconds, bandwidths in GB/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Protocol = Literal["LL", "LL128", "Simple"]
Algorithm = Literal["ring", "tree", "in-switch", "in-switch tree", "parallel trees", "direct"]
PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")

RING_BASE = {"LL": 6.6, "LL128": 14.0, "Simple": 8.4}
TREE_BASE = {"LL": 6.8, "LL128": 14.0, "Simple": 8.4}
RING_HOP = {"link": {"LL": 0.6, "LL128": 1.9, "Simple": 3.4}, "pcie": {"LL": 1.0, "LL128": 2.5, "Simple": 5.7}}
TREE_HOP = {"link": {"LL": 0.6, "LL128": 1.25, "Simple": 4.0}, "pcie": {"LL": 1.0, "LL128": 1.9, "Simple": 4.0}}
RING_NETWORK_HOP = {"LL": 2.7, "LL128": 4.0, "Simple": 14.0}
TREE_NETWORK_HOP = {"LL": 5.0, "LL128": 8.5, "Simple": 14.0}
SWITCH_LATENCY = 25.0
SWITCH_TREE_NETWORK_HOP = 20.9
PARALLEL_TREES_BASE = 8.0
"""PAT: all-gather and reduce-scatter in log2(nodes) steps, for groups with one rank per node."""
PARALLEL_TREES_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What NCCL has written down for one generation of GPUs; tuples are for 1, 2 and 4 or more nodes."""

    channels: int
    ring_share: float
    """Of the link's bandwidth per direction that NCCL's search of rings finds."""
    low_latency: float
    """Cap of LL inside a node."""
    low_latency_128: float
    """Cap of LL128 per channel; 0 where the measured rows show that it is not used."""
    tree: tuple[float, float, float]
    """Cap of trees per channel."""
    switch_efficiency: float
    """Of in-switch reduction; 0 where there is none."""
    switch_tree: tuple[float, float, float]


GENERATIONS: dict[str, Generation] = {
    "volta": Generation(
        channels=12,
        ring_share=0.8,
        low_latency=39.0,
        low_latency_128=20.0,
        tree=(26.5, 18.5, 10.0),
        switch_efficiency=0.0,
        switch_tree=(0.0, 0.0, 0.0),
    ),
    "ampere": Generation(
        channels=24,
        ring_share=0.8,
        low_latency=87.7,
        low_latency_128=20.0,
        tree=(24.0, 23.6, 17.8),
        switch_efficiency=0.0,
        switch_tree=(0.0, 0.0, 0.0),
    ),
    "hopper": Generation(
        channels=16,
        ring_share=320 / 450,
        low_latency=141.0,
        low_latency_128=36.7,
        tree=(38.7, 41.4, 36.0),
        switch_efficiency=0.85,
        switch_tree=(0.0, 57.7, 45.5),
    ),
    # LL128: rows of B200, B300, GB200 and GB300 show the plateau of Simple where the tables would give LL128
    "blackwell": Generation(
        channels=16,
        ring_share=640 / 900,
        low_latency=282.4,
        low_latency_128=0.0,
        tree=(70.0, 42.8, 24.0),
        switch_efficiency=0.74,
        switch_tree=(0.0, 96.0, 43.8),
    ),
}
NETWORK_LOW_LATENCY = (39.0, 20.4)
"""Cap of LL over 2 nodes, and over more."""
PCIE_SHARE = 0.38
"""Of a PCIe x16 link that NCCL's search finds: 12 GB/s of 31.5 (gen 4), 24 of 63 (gen 5)."""
MIN_SWITCH_RANKS = 5
"""In-switch reduction inside a node: rows of 4 GPUs follow the ring, rows of 8 do not."""

TREE_CORRECTION: dict[str, tuple[float, ...]] = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
    ),
}
"""By log2(bytes / 64): NCCL's own hand-made table, since trees do not follow its model at medium sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the choice depends on; bandwidths in GB/s per GPU and direction."""

    generation: str
    pcie: bool
    """Whether GPUs reach each other over PCIe rather than a link of their own."""
    ranks: int
    domains: int
    link: float
    network: float
    """Into the network, of all ranks of one domain together; unused in one domain."""
    in_switch: bool
    network_reduction: bool = False


def choose(op: str, size: float, here: Situation) -> tuple[Algorithm, Protocol]:
    """The algorithm and the protocol that NCCL would take for `size` bytes (as nccl-tests counts them).

    >>> here = Situation(generation="hopper", pcie=False, ranks=8, domains=1, link=450, network=0, in_switch=True)
    >>> choose("all_reduce", 2**20, here), choose("all_reduce", 2**26, here), choose("all_gather", 2**26, here)
    (('ring', 'LL'), ('in-switch', 'Simple'), ('ring', 'Simple'))
    """
    if op in ("all_to_all", "send_recv"):
        return "direct", "Simple"
    table = GENERATIONS[here.generation]
    ring_bandwidth = here.link * (PCIE_SHARE if here.pcie else table.ring_share)
    if here.domains > 2:
        ring_bandwidth = min(ring_bandwidth, here.network)
    best: tuple[float, Algorithm, Protocol] = (math.inf, "ring", "Simple")
    for protocol in PROTOCOLS:
        if protocol == "LL128" and (here.pcie or not table.low_latency_128):
            continue
        cost = _ring(op, size, here, table, ring_bandwidth, protocol)
        best = min(best, (cost, "ring", protocol))
        if op == "all_reduce" and here.ranks > 2:
            best = min(best, (_tree(size, here, table, ring_bandwidth, protocol), "tree", protocol))
    if op in ("all_gather", "reduce_scatter") and here.domains == here.ranks > 2:
        latency = PARALLEL_TREES_BASE + math.log2(here.domains) * RING_NETWORK_HOP["Simple"]
        wire = size / 1e3 * (here.ranks - 1) / here.ranks / (ring_bandwidth * PARALLEL_TREES_SHARE)
        best = min(best, (latency + wire, "parallel trees", "Simple"))
    if here.in_switch and table.switch_efficiency and not here.pcie:
        best = min(best, _in_switch(op, size, here, table))
    return best[1], best[2]


def ring_steps(op: str, ranks: int) -> int:
    """How often data moves on around a ring of `ranks`."""
    if op == "all_reduce":
        return 2 * (ranks - 1)
    return ranks - 1 if op in ("all_gather", "reduce_scatter", "all_to_all") else ranks


def _bucket(domains: int) -> int:
    return 0 if domains == 1 else 1 if domains == 2 else 2


def _ring(op: str, size: float, here: Situation, table: Generation, bandwidth: float, protocol: Protocol) -> float:
    steps = ring_steps(op, here.ranks)
    across = 0 if here.domains == 1 else ring_steps(op, here.domains)
    latency = RING_BASE[protocol] + (steps - across) * RING_HOP["pcie" if here.pcie else "link"][protocol]
    latency += across * RING_NETWORK_HOP[protocol]
    if protocol == "LL":
        cap = table.low_latency if here.domains == 1 else NETWORK_LOW_LATENCY[_bucket(here.domains) - 1]
        bandwidth = min(cap, bandwidth * 0.5)
    elif protocol == "LL128":
        bandwidth = min(bandwidth * 0.92, table.channels * table.low_latency_128)
    elif op == "all_reduce" and here.domains > 1 and size / (table.channels * here.ranks) >= 64:
        latency *= 1.4  # the plateau of rings over the network
    wire = steps / here.ranks if op in ("all_reduce", "all_gather", "reduce_scatter") else 1.0
    return latency + size / 1e3 * wire / bandwidth


def _tree(size: float, here: Situation, table: Generation, bandwidth: float, protocol: Protocol) -> float:
    hop = TREE_HOP["pcie" if here.pcie else "link"][protocol]
    inside = here.ranks // here.domains - 1
    latency = TREE_BASE[protocol] + 2 * (
        inside * hop + int(math.log2(max(1, here.domains))) * TREE_NETWORK_HOP[protocol]
    )
    bucket = _bucket(here.domains)
    bandwidth = min(bandwidth * 0.92, table.channels * table.tree[bucket])
    if protocol == "LL":
        cap = table.low_latency if here.domains == 1 else NETWORK_LOW_LATENCY[bucket - 1]
        bandwidth = min(bandwidth / 3.8, cap)
    elif protocol == "LL128":
        share = 7 / 9 if here.domains == 1 else 120 / 128
        bandwidth = min(bandwidth * share, table.channels * table.low_latency_128)
    place = min(22, max(0, int(math.log2(max(size, 64) / 64))))
    return latency + size / 1e3 / (bandwidth * 0.5 * TREE_CORRECTION[protocol][place])


def _in_switch(op: str, size: float, here: Situation, table: Generation) -> tuple[float, Algorithm, Protocol]:
    inside = here.ranks // here.domains
    if inside < MIN_SWITCH_RANKS:
        return math.inf, "in-switch", "Simple"
    bandwidth = here.link * table.ring_share * table.switch_efficiency * (table.channels - 1) / table.channels
    if op == "all_reduce":
        bandwidth *= 2
        ratio = here.ranks / ring_steps(op, here.ranks)
    elif op in ("all_gather", "reduce_scatter") and here.domains == 1:
        bandwidth *= (inside - 1) / inside
        ratio = 1.0
    else:
        return math.inf, "in-switch", "Simple"
    if here.domains == 1:
        return SWITCH_LATENCY + size / 1e3 / (bandwidth * ratio), "in-switch", "Simple"
    if here.network_reduction:
        latency = SWITCH_LATENCY + 18.0
        return latency + size / 1e3 / (min(bandwidth, here.network) * ratio), "in-switch", "Simple"
    cap = table.channels * table.switch_tree[_bucket(here.domains)]
    network = here.network * (2 if here.domains == 2 else 1)
    bandwidth = min(bandwidth, network, cap)
    latency = SWITCH_LATENCY + 2 * math.log2(here.domains) * SWITCH_TREE_NETWORK_HOP
    return latency + size / 1e3 / (bandwidth * ratio), "in-switch tree", "Simple"
