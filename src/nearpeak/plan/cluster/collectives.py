"""How long a collective takes: rings, trees, in-switch reduction and direct sends, inside a domain and across.

Three steps. `choose_algorithm` is NCCL's own tuning model with its own constants (NVIDIA/nccl, src/graph/tuning.cc,
2.27 to 2.29): it predicts `latency + bytes / bandwidth` for each algorithm and protocol and takes the smallest, which
decides where the jumps of a measured curve are. `traffic_of` counts what one rank moves. `protocol_seconds` turns that
into time with constants that `benchmarks.plan.fit_collectives` fitted on measurements (`collectives.json`):
`base + steps x lead + join(filling, wire)`. `wire` is bytes over bandwidth, `filling` the time until all ranks have
something to send, and the two overlap (root of squares) in the Simple protocol. Fitted bandwidths are shares of the
link's datasheet bandwidth, so that a GPU with fewer links of the same generation gets its own figure.

`bytes` are counted as nccl-tests does:

| op | bytes | each rank puts on the wire |
| --- | --- | --- |
| all_reduce | the buffer | 2 (n-1)/n of it in a ring; once where the switch adds |
| all_gather | the gathered output, n parts | (n-1)/n |
| reduce_scatter | the whole input, n parts | (n-1)/n |
| all_to_all | all that one rank sends, its own part too | (n-1)/n |
| broadcast, reduce | the buffer | all of it |
| send_recv | the message | all of it |

An all-reduce in the switch is not a reduce-scatter and an all-gather: data goes up once and comes down once.

>>> from nearpeak.plan.cluster.cluster import Cluster
>>> result = collective_seconds("all_reduce", 2**28, 8, Cluster.of("h100-sxm x 8"))
>>> result.algorithm, f"{result.seconds * 1e3:.1f} ms", result.limiter
('in-switch', '1.1 ms', 'link')
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any, Literal

from nearpeak._display import Result, headline
from nearpeak._records import from_json
from nearpeak.comm.fit import CurveFit, bus_factor, find_curve, regime_of
from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.units import quantity

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Result):
    """The time of one collective and what it is made of: `latency_seconds + bandwidth_seconds = seconds`."""

    op: str
    bytes: float
    ranks: int
    seconds: float
    bandwidth_seconds: float
    """Seconds of the wire alone, at the bandwidth of the protocol."""
    algorithm: str
    """"measured" for a time of `nearpeak comm`."""
    protocol: str
    """NCCL's; "" for a measured time."""
    limiter: Literal["latency", "link", "network", "nothing"]
    provenance: Provenance

    def __repr__(self) -> str:
        what = f"{self.op} of {quantity(self.bytes, 'B')} over {self.ranks} GPUs"
        how = f"{self.algorithm}, {self.protocol}, limited by {self.limiter}"
        return headline(f"Collective {what}: {quantity(self.seconds, 's')} ({how})")

    @property
    def latency_seconds(self) -> float:
        """Seconds beyond the wire."""
        return self.seconds - self.bandwidth_seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes/s as nccl-tests' "busbw": the wire bytes of a ring over the time."""
        return ring_wire(self.op, self.bytes, self.ranks) / self.seconds if self.seconds else 0.0


def collective_seconds(
    op: str,
    bytes: float,
    ranks: int,
    cluster: Cluster,
    *,
    ranks_per_node: int | None = None,
    concurrent_groups: int = 1,
    constants: CollectiveConstants | None = None,
) -> Collective:
    """The time of `op` over `ranks` GPUs of `cluster`.

    `ranks_per_node` is how many of them share one link domain (a node of 8, a rack of 72); as many as fit where it is
    not given. `concurrent_groups` groups like this one run at once in each domain and share its network adapters.
    `Cluster.group(ranks, stride)` gives both for a place in a layout.
    """
    inside = _ranks_inside(op, bytes, ranks, cluster, ranks_per_node, concurrent_groups)
    if ranks == 1 or bytes == 0:
        nothing = Provenance(kind="measured", text="nothing to send")
        return Collective(
            op=op,
            bytes=bytes,
            ranks=ranks,
            seconds=0.0,
            bandwidth_seconds=0.0,
            algorithm="none",
            protocol="none",
            limiter="nothing",
            provenance=nothing,
        )
    domains = ranks // inside
    hosts = domains * math.ceil(inside / cluster.gpus_per_node)
    if (fit := find_curve(cluster.measured, op, ranks, hosts, concurrent_groups)) is not None:
        return _measured(fit, bytes)
    constants = constants or load_collective_constants()
    over_pcie = cluster.fabric in ("pcie", "host") or (cluster.fabric == "pairs" and inside > 2)
    kind = link_kind(cluster, inside)
    fitted, provenance = link_constants(kind, constants)
    link = cluster.link_bandwidth
    if cluster.fabric == "pairs" and inside > 2 and cluster.machine.pcie is not None:
        link = cluster.machine.pcie.bandwidth
    network = network_bandwidth(cluster, inside, concurrent_groups, constants) if domains > 1 else 0.0
    topology = NcclTopology(
        generation=nccl_generation(cluster.machine.architecture),
        pcie=over_pcie,
        ranks=ranks,
        domains=domains,
        link=link / 1e9,
        network=min(network * inside, constants.network.communicator) / 1e9,
        in_switch=cluster.in_switch_reduction,
        network_reduction=cluster.network_reduction,
    )
    algorithm, protocol = choose_algorithm(op, bytes, topology)
    traffic = traffic_of(
        op, bytes, ranks, inside, algorithm, protocol, network, cluster.network_latency, constants.network
    )
    sharing = inside * concurrent_groups if over_pcie and inside > 1 else inside
    numbers = fitted.protocols.get(constants_name(algorithm, protocol)) or fitted.protocols["Simple"]
    rate = numbers.share * link * shared_bandwidth(numbers, sharing)
    seconds, wire = protocol_seconds(numbers, traffic, rate)
    return Collective(
        op=op,
        bytes=bytes,
        ranks=ranks,
        seconds=seconds,
        bandwidth_seconds=wire,
        algorithm=algorithm,
        protocol=protocol,
        limiter="latency" if seconds > 2 * wire else "network" if traffic.network_seconds >= wire else "link",
        provenance=_provenance(op, algorithm, domains, ranks, cluster, fitted, provenance, constants),
    )


def _measured(fit: CurveFit, bytes: float) -> Collective:
    """A collective of a size between the measured ones; larger ones by the last bandwidth."""
    seconds = fit.seconds(bytes)
    wire = bytes * regime_of(fit.regimes, bytes).seconds_per_byte
    return Collective(
        op=fit.op,
        bytes=bytes,
        ranks=fit.ranks,
        seconds=seconds,
        bandwidth_seconds=wire,
        algorithm="measured",
        protocol="",
        limiter="latency" if seconds > 2 * wire else "network" if fit.nodes > 1 else "link",
        provenance=Provenance(kind="measured", text=f"nearpeak comm, {fit.points} sizes of {fit.op}"),
    )


class CollectiveTimes:
    """Memoized `collective_seconds` of one cluster: a search asks for the same few thousand collectives.

    >>> times = CollectiveTimes(Cluster.of("h100-sxm x 64"))
    >>> times("all_gather", 2**26, 8, stride=8) > times("all_gather", 2**26, 8)
    True
    """

    def __init__(self, cluster: Cluster, constants: CollectiveConstants | None = None) -> None:
        self.cluster = cluster
        self.constants = constants or load_collective_constants()
        self._collectives: dict[tuple[str, float, int, int], Collective] = {}
        self._provenances: dict[tuple[int, int], Provenance] = {}

    def __call__(self, op: str, bytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of `op` over `ranks` GPUs that lie `stride` apart, all such groups at once."""
        return self.collective(op, bytes, ranks, stride).seconds

    def collective(self, op: str, bytes: float, ranks: int, stride: int = 1) -> Collective:
        """`op` over `ranks` GPUs that lie `stride` apart, all such groups at once."""
        key = (op, bytes, ranks, stride)
        collective = self._collectives.get(key)
        if collective is None:
            group = self.cluster.group(ranks, stride)
            collective = self._collectives[key] = collective_seconds(
                op,
                bytes,
                ranks,
                self.cluster,
                ranks_per_node=group.ranks_per_domain,
                concurrent_groups=group.concurrent_groups,
                constants=self.constants,
            )
            known = self._provenances.get((ranks, stride), collective.provenance)
            self._provenances[ranks, stride] = weakest(known, collective.provenance)
        return collective

    def provenance(self, ranks: int, stride: int = 1) -> Provenance | None:
        """The weakest provenance of the collectives of such groups so far; None where there were none."""
        return self._provenances.get((ranks, stride))


def link_kind(cluster: Cluster, ranks: int) -> str:
    """Kind of the links between `ranks` GPUs of one domain: the key of their constants."""
    if cluster.fabric in ("pcie", "host"):
        return cluster.fabric
    if cluster.fabric == "pairs" and ranks > 2:
        return "pcie"
    return cluster.machine.architecture


def nccl_generation(architecture: str) -> str:
    """The row of NCCL's tables for an architecture. Ada has none and uses Ampere's; so do other vendors' GPUs, whose
    provenance is "assumed"."""
    return architecture if architecture in NCCL_TABLES else "ampere"


def network_bandwidth(cluster: Cluster, inside: int, concurrent_groups: int, constants: CollectiveConstants) -> float:
    """Bytes/s per rank into the network."""
    shares = constants.network.share
    share = next((value for start, value in shares.items() if start and cluster.network_name.startswith(start)), None)
    return cluster.network_share(inside, concurrent_groups) * (shares[""] if share is None else share)


def _provenance(
    op: str,
    algorithm: str,
    domains: int,
    ranks: int,
    cluster: Cluster,
    fitted: LinkConstants,
    provenance: Provenance,
    constants: CollectiveConstants,
) -> Provenance:
    if domains > 1:
        return Provenance(kind="assumed", text=f"between nodes: {constants.network.source}")
    if cluster.fabric == "mesh":
        return Provenance(kind="assumed", text=f"a mesh as if it were a switch; {provenance.text}")
    if provenance.kind != "fitted":
        return provenance
    if ranks > fitted.max_ranks:
        text = f"{ranks} ranks from rows of at most {fitted.max_ranks}; {provenance.text}"
        return Provenance(kind="transferred", text=text)
    if op in ("broadcast", "reduce", "send_recv") or (algorithm == "in-switch" and op != "all_reduce"):
        return Provenance(kind="transferred", text=f"{op} from other collectives; {provenance.text}")
    return provenance


LARGEST_MESSAGE = 10**18
"""Bytes."""


def _ranks_inside(op: str, bytes: float, ranks: int, cluster: Cluster, inside: int | None, groups: int) -> int:
    if op not in OPS:
        raise UsageError(f"op={op!r} is not a collective. {did_you_mean(op, OPS)}")
    if not 0 <= bytes <= LARGEST_MESSAGE:
        near = LARGEST_MESSAGE if bytes > LARGEST_MESSAGE else 0
        raise UsageError(f"bytes={bytes!r} must be from 0 to {LARGEST_MESSAGE:.3g}. Nearest: bytes={near}.")
    if isinstance(ranks, bool) or ranks != int(ranks) or not 1 <= ranks <= cluster.gpus:
        nearest = min(max(1, int(ranks)), cluster.gpus)
        raise UsageError(f"ranks={ranks} is not between 1 and the {cluster.gpus} GPUs. Nearest: ranks={nearest}.")
    if op == "send_recv" and ranks != 2:
        if ranks == 1:
            return 1
        raise UsageError(f"ranks={ranks}: send_recv is between two. Nearest: ranks=2.")
    if isinstance(groups, bool) or groups != int(groups) or groups < 1:
        raise UsageError(f"concurrent_groups={groups!r} must be at least 1. Nearest: concurrent_groups=1.")
    largest = min(ranks, cluster.domain)
    if inside is None:
        return largest if ranks % largest == 0 else math.gcd(ranks, largest)
    if not 1 <= inside <= largest or ranks % inside:
        legal = [value for value in range(1, largest + 1) if ranks % value == 0]
        nearest = min(legal, key=lambda value: abs(value - inside))
        raise UsageError(
            f"ranks_per_node={inside} does not divide ranks={ranks} or is larger than the domain of {cluster.domain}. "
            f"Nearest: ranks_per_node={nearest}."
        )
    return inside


Protocol = Literal["LL", "LL128", "Simple"]
Algorithm = Literal["ring", "tree", "in-switch", "in-switch tree", "parallel trees", "direct"]
PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")
# NCCL: NVIDIA/nccl, src/graph/tuning.cc, 2.27 to 2.29; latencies in microseconds
RING_BASE = {"LL": 6.6, "LL128": 14.0, "Simple": 8.4}
TREE_BASE = {"LL": 6.8, "LL128": 14.0, "Simple": 8.4}
RING_HOP = {"link": {"LL": 0.6, "LL128": 1.9, "Simple": 3.4}, "pcie": {"LL": 1.0, "LL128": 2.5, "Simple": 5.7}}
TREE_HOP = {"link": {"LL": 0.6, "LL128": 1.25, "Simple": 4.0}, "pcie": {"LL": 1.0, "LL128": 1.9, "Simple": 4.0}}
RING_NETWORK_HOP = {"LL": 2.7, "LL128": 4.0, "Simple": 14.0}
TREE_NETWORK_HOP = {"LL": 5.0, "LL128": 8.5, "Simple": 14.0}
SWITCH_LATENCY = 25.0
SWITCH_TREE_NETWORK_HOP = 20.9
PARALLEL_TREES_BASE = 8.0
"""PAT: all-gather and reduce-scatter in log2(nodes) steps, for groups with one rank per node. Microseconds."""
PARALLEL_TREES_SHARE = 0.75
NETWORK_LOW_LATENCY = (39.0, 20.4)
"""Cap of LL over 2 nodes, and over more."""
PCIE_SHARE = 0.38
"""Share of a PCIe x16 link that NCCL's search finds: 12 GB/s of 31.5 (gen 4), 24 of 63 (gen 5)."""
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
"""By log2(bytes / 64): NCCL's own table of corrections, since trees do not follow its model at medium sizes."""


@dataclass(frozen=True, slots=True)
class NcclTable:
    """NCCL's tuning table for one generation of GPUs; tuples are for 1, 2 and 4 or more nodes. Bandwidths in GB/s."""

    channels: int
    ring_share: float
    """Share of the link's bandwidth per direction that NCCL's search for rings finds."""
    low_latency: float
    """Cap of LL inside a node."""
    low_latency_128: float
    """Cap of LL128 per channel; 0 where measured rows show that it is not used."""
    tree: tuple[float, float, float]
    """Cap of trees per channel."""
    switch_efficiency: float
    """Efficiency of in-switch reduction; 0 where there is none."""
    switch_tree: tuple[float, float, float]


NCCL_TABLES: dict[str, NcclTable] = {
    "volta": NcclTable(12, 0.8, 39.0, 20.0, (26.5, 18.5, 10.0), 0.0, (0.0, 0.0, 0.0)),
    "ampere": NcclTable(24, 0.8, 87.7, 20.0, (24.0, 23.6, 17.8), 0.0, (0.0, 0.0, 0.0)),
    "hopper": NcclTable(16, 320 / 450, 141.0, 36.7, (38.7, 41.4, 36.0), 0.85, (0.0, 57.7, 45.5)),
    # LL128: rows of B200, B300, GB200 and GB300 show the plateau of Simple where the tables would give LL128
    "blackwell": NcclTable(16, 640 / 900, 282.4, 0.0, (70.0, 42.8, 24.0), 0.74, (0.0, 96.0, 43.8)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTopology:
    """Inputs of NCCL's choice; bandwidths in GB/s per GPU and direction."""

    generation: str
    pcie: bool
    """Whether GPUs communicate over PCIe rather than NVLink."""
    ranks: int
    domains: int
    link: float
    network: float
    """Into the network, all ranks of one domain together; unused in one domain."""
    in_switch: bool
    network_reduction: bool = False


def choose_algorithm(op: str, size: float, topology: NcclTopology) -> tuple[Algorithm, Protocol]:
    """The algorithm and the protocol that NCCL chooses for `size` bytes (as nccl-tests counts them).

    >>> node = NcclTopology(generation="hopper", pcie=False, ranks=8, domains=1, link=450, network=0, in_switch=True)
    >>> choose_algorithm("all_reduce", 2**20, node), choose_algorithm("all_reduce", 2**26, node)
    (('ring', 'LL'), ('in-switch', 'Simple'))
    """
    if op in ("all_to_all", "send_recv"):
        return "direct", "Simple"
    table = NCCL_TABLES[topology.generation]
    ring_bandwidth = topology.link * (PCIE_SHARE if topology.pcie else table.ring_share)
    if topology.domains > 2:
        ring_bandwidth = min(ring_bandwidth, topology.network)
    best: tuple[float, Algorithm, Protocol] = (math.inf, "ring", "Simple")
    for protocol in PROTOCOLS:
        if protocol == "LL128" and (topology.pcie or not table.low_latency_128):
            continue
        cost = _ring_microseconds(op, size, topology, table, ring_bandwidth, protocol)
        best = min(best, (cost, "ring", protocol))
        if op == "all_reduce" and topology.ranks > 2:
            best = min(best, (_tree_microseconds(size, topology, table, ring_bandwidth, protocol), "tree", protocol))
    if op in ("all_gather", "reduce_scatter") and topology.domains == topology.ranks > 2:
        latency = PARALLEL_TREES_BASE + math.log2(topology.domains) * RING_NETWORK_HOP["Simple"]
        wire = size / 1e3 * (topology.ranks - 1) / topology.ranks / (ring_bandwidth * PARALLEL_TREES_SHARE)
        best = min(best, (latency + wire, "parallel trees", "Simple"))
    if topology.in_switch and table.switch_efficiency and not topology.pcie:
        best = min(best, _in_switch_microseconds(op, size, topology, table))
    return best[1], best[2]


def ring_steps(op: str, ranks: int) -> int:
    """Steps of a ring of `ranks`."""
    if op == "all_reduce":
        return 2 * (ranks - 1)
    return ranks - 1 if op in ("all_gather", "reduce_scatter", "all_to_all") else ranks


def _bucket(domains: int) -> int:
    return 0 if domains == 1 else 1 if domains == 2 else 2


def _ring_microseconds(
    op: str, size: float, topology: NcclTopology, table: NcclTable, bandwidth: float, protocol: Protocol
) -> float:
    steps = ring_steps(op, topology.ranks)
    across = 0 if topology.domains == 1 else ring_steps(op, topology.domains)
    latency = RING_BASE[protocol] + (steps - across) * RING_HOP["pcie" if topology.pcie else "link"][protocol]
    latency += across * RING_NETWORK_HOP[protocol]
    if protocol == "LL":
        cap = table.low_latency if topology.domains == 1 else NETWORK_LOW_LATENCY[_bucket(topology.domains) - 1]
        bandwidth = min(cap, bandwidth * 0.5)
    elif protocol == "LL128":
        bandwidth = min(bandwidth * 0.92, table.channels * table.low_latency_128)
    elif op == "all_reduce" and topology.domains > 1 and size / (table.channels * topology.ranks) >= 64:
        latency *= 1.4  # the plateau of rings over the network
    wire = steps / topology.ranks if op in ("all_reduce", "all_gather", "reduce_scatter") else 1.0
    return latency + size / 1e3 * wire / bandwidth


def _tree_microseconds(
    size: float, topology: NcclTopology, table: NcclTable, bandwidth: float, protocol: Protocol
) -> float:
    hop = TREE_HOP["pcie" if topology.pcie else "link"][protocol]
    inside = topology.ranks // topology.domains - 1
    latency = TREE_BASE[protocol] + 2 * (
        inside * hop + int(math.log2(max(1, topology.domains))) * TREE_NETWORK_HOP[protocol]
    )
    bucket = _bucket(topology.domains)
    bandwidth = min(bandwidth * 0.92, table.channels * table.tree[bucket])
    if protocol == "LL":
        cap = table.low_latency if topology.domains == 1 else NETWORK_LOW_LATENCY[bucket - 1]
        bandwidth = min(bandwidth / 3.8, cap)
    elif protocol == "LL128":
        share = 7 / 9 if topology.domains == 1 else 120 / 128
        bandwidth = min(bandwidth * share, table.channels * table.low_latency_128)
    place = min(22, max(0, int(math.log2(max(size, 64) / 64))))
    return latency + size / 1e3 / (bandwidth * 0.5 * TREE_CORRECTION[protocol][place])


def _in_switch_microseconds(
    op: str, size: float, topology: NcclTopology, table: NcclTable
) -> tuple[float, Algorithm, Protocol]:
    inside = topology.ranks // topology.domains
    if inside < MIN_SWITCH_RANKS:
        return math.inf, "in-switch", "Simple"
    bandwidth = topology.link * table.ring_share * table.switch_efficiency * (table.channels - 1) / table.channels
    if op == "all_reduce":
        bandwidth *= 2
        ratio = topology.ranks / ring_steps(op, topology.ranks)
    elif op in ("all_gather", "reduce_scatter") and topology.domains == 1:
        bandwidth *= (inside - 1) / inside
        ratio = 1.0
    else:
        return math.inf, "in-switch", "Simple"
    if topology.domains == 1:
        return SWITCH_LATENCY + size / 1e3 / (bandwidth * ratio), "in-switch", "Simple"
    if topology.network_reduction:
        latency = SWITCH_LATENCY + 18.0
        return latency + size / 1e3 / (min(bandwidth, topology.network) * ratio), "in-switch", "Simple"
    cap = table.channels * table.switch_tree[_bucket(topology.domains)]
    network = topology.network * (2 if topology.domains == 2 else 1)
    bandwidth = min(bandwidth, network, cap)
    latency = SWITCH_LATENCY + 2 * math.log2(topology.domains) * SWITCH_TREE_NETWORK_HOP
    return latency + size / 1e3 / (bandwidth * ratio), "in-switch tree", "Simple"


_NETWORK_DATA = {"LL": 0.5, "LL128": 120 / 128, "Simple": 1.0}
"""Share of data in what a protocol sends over the network: LL sends a flag with every 4 bytes."""
_SWITCH_HALF = 1.3
"""Time of an all-gather or reduce-scatter in the switch over that of an all-reduce: 1 / 0.77 of NCCL's tables."""
_US = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Traffic of one rank under one algorithm."""

    steps: int
    wire: float
    """Bytes over the link."""
    own: float
    """Bytes of the rank's own part."""
    copied: bool = True
    """Whether the rank copies its own part."""
    network_seconds: float = 0.0
    """Seconds of the network alone."""
    network_latency: float = 0.0
    """Seconds of the steps that cross the network."""


def protocol_seconds(numbers: ProtocolConstants, traffic: Traffic, rate: float) -> tuple[float, float]:
    """Seconds of one collective, and those of the wire alone, with `rate` bytes/s over the link."""
    wire = traffic.network_seconds
    if traffic.wire > 0:
        handled = traffic.wire + numbers.copy * traffic.own * traffic.copied
        wire = max(wire, (handled + math.sqrt(numbers.slow_bytes * handled)) / rate)
    reached = 1.0
    if numbers.fill_bytes > 0:
        square = traffic.own * traffic.own
        reached = square / (square + numbers.fill_bytes * numbers.fill_bytes)
    filling = reached * (numbers.fill + numbers.fill_step * traffic.steps)
    before = numbers.base + numbers.lead * traffic.steps
    if numbers.root:
        return before + math.hypot(filling + traffic.network_latency, wire), wire
    return before + filling + traffic.network_latency + wire, wire


def shared_bandwidth(numbers: ProtocolConstants, ranks: int) -> float:
    """Bandwidth of `ranks` over that of two, where they share the bridges of a host."""
    return 1.0 if ranks <= 2 else numbers.crossing * (4 / max(ranks, 4)) ** numbers.spreading


def ring_wire(op: str, bytes: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring (or directly)."""
    return bytes * bus_factor(op, ranks)


def constants_name(algorithm: str, protocol: str) -> str:
    """Name of the fitted constants of an algorithm and a protocol."""
    if algorithm in ("in-switch", "in-switch tree"):
        return "in-switch"
    return "direct" if algorithm == "direct" else protocol


def traffic_of(
    op: str,
    bytes: float,
    ranks: int,
    inside: int,
    algorithm: str,
    protocol: str,
    network: float,
    extra: float,
    between: NetworkConstants | None,
) -> Traffic:
    """Traffic of one rank over the link and the network; `network` is bytes/s per rank, `extra` seconds per message."""
    domains = ranks // inside
    own = bytes if op in ("broadcast", "reduce", "send_recv") else bytes / ranks
    extra *= 2 if protocol == "Simple" else 1  # Simple sends a flush after the data
    levels = math.ceil(math.log2(domains)) if domains > 1 else 0
    if algorithm == "direct":
        return _direct(op, bytes, ranks, inside, network, extra, between)
    out = math.inf if between is None or domains == 1 else min(network * inside, between.communicator)
    out *= _NETWORK_DATA[protocol]
    # a tree sends the buffer up and down again; of two, each sends it once and has the sum
    crossing = 0.0 if domains == 1 else bytes if domains == 2 else 2 * bytes
    if algorithm in ("in-switch", "in-switch tree"):
        # the whole buffer goes up once and comes down once, whatever the number of ranks: 434 GB/s of buffer with 8
        # B200, 423 with 72 GB200 (https://github.com/coreweave/nccl-tests/pull/43)
        wire = bytes * (1.0 if op == "all_reduce" else _SWITCH_HALF)
        if algorithm == "in-switch" and domains > 1:  # the network's switches add, too
            levels, crossing, hops = 1, bytes, 1
        else:
            hops = 2 * levels
        return Traffic(
            steps=(inside - 1) * max(1, levels),  # every level of the tree fills its domain's pipeline again
            wire=wire,
            own=bytes / inside,
            network_seconds=crossing / out,
            network_latency=hops * (SWITCH_TREE_NETWORK_HOP * _US + extra),
        )
    if algorithm == "tree":
        return Traffic(
            steps=2 * (inside - 1),
            wire=2 * bytes if inside > 1 else 0.0,
            own=own,
            network_seconds=crossing / out,
            network_latency=2 * levels * (TREE_NETWORK_HOP[protocol] * _US + extra),
        )
    wire = ring_wire(op, bytes, ranks)
    if algorithm == "parallel trees":
        steps, across, hop = 0, levels, RING_NETWORK_HOP["Simple"] * _US
    else:
        steps = ring_steps(op, ranks)
        across = ring_steps(op, domains) if domains > 1 else 0
        # one rank per domain receives and sends at one adapter: NCCL counts the longer hop of its trees
        table = RING_NETWORK_HOP if inside > 1 else TREE_NETWORK_HOP
        steps, hop = steps - across, table[protocol] * _US
    return Traffic(
        steps=steps,
        wire=wire if inside > 1 else 0.0,
        own=own if inside > 1 else 0.0,
        copied=own < bytes,
        network_seconds=wire / out if domains > 1 else 0.0,
        network_latency=across * (hop + extra),
    )


def _direct(
    op: str, bytes: float, ranks: int, inside: int, network: float, extra: float, between: NetworkConstants | None
) -> Traffic:
    domains = ranks // inside
    hop = RING_NETWORK_HOP["Simple"] * _US + extra
    if op == "send_recv":
        if inside > 1:
            return Traffic(steps=1, wire=bytes, own=bytes, copied=False)
        return Traffic(steps=0, wire=0.0, own=bytes, network_seconds=bytes / network, network_latency=hop)
    own = bytes / ranks
    outside = ranks - inside
    if domains == 1 or between is None:
        return Traffic(steps=ranks - 1, wire=own * (ranks - 1), own=own)
    return Traffic(
        steps=inside - 1,
        wire=own * (inside - 1),
        own=own,
        network_seconds=own * outside / (network * between.all_to_all_share),
        network_latency=hop + outside * between.message,
    )


NOT_NVLINK = ("pcie", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolConstants:
    """Time of one protocol over one kind of link; `protocol_seconds` is the formula."""

    base: float
    """Seconds before the transfer starts."""
    lead: float
    """Exposed seconds per step."""
    fill: float
    """Seconds to fill the pipeline, independent of the number of steps; reached at `fill_bytes`."""
    fill_step: float
    """The same, per step."""
    fill_bytes: float
    """Bytes per rank at which half of the filling time is reached; 0: always all of it."""
    share: float
    """Share of the link's bandwidth."""
    copy: float
    """Bytes of wire time per byte of the rank's own part, which is copied locally."""
    slow_bytes: float
    """The wire takes 1 + sqrt(slow_bytes / bytes) times as long: bandwidth rises slowly with size."""
    root: bool
    """Whether filling and wire overlap (root of the sum of squares) or add up."""
    crossing: float = 1.0
    """Bandwidth of more than 2 ranks over that of 2, where they cross the bridges of a host."""
    spreading: float = 0.0
    """Power of 4 / ranks with which bandwidth falls beyond 4 ranks of one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConstants:
    """All protocols over one kind of link."""

    protocols: Mapping[str, ProtocolConstants]
    """By "LL", "LL128", "Simple", "in-switch", "direct"."""
    rows: int = 0
    systems: tuple[str, ...] = ()
    """Systems of the measured rows."""
    max_ranks: int = 8
    """Ranks of the largest measured group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConstants:
    """Between domains: NCCL's constants, and published or assumed shares of the adapters' bandwidth."""

    share: Mapping[str, float]
    """Share of the adapters' bandwidth, by prefix of the network's name; "" for any other."""
    communicator: float
    """Most bytes/s of one communicator out of a domain, whatever the number of adapters."""
    all_to_all_share: float
    """Further share of all-to-all, whose traffic leaves the rails."""
    message: float
    """Seconds per peer of an all-to-all or a send."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveConstants:
    """All constants of `collectives.json`; compared by identity.

    `links` by kind: "ampere", "hopper", "blackwell" (their NVLink), "pcie", "host".
    """

    source: str
    links: Mapping[str, LinkConstants]
    network: NetworkConstants
    without: Mapping[str, Mapping[str, LinkConstants]]
    """By left-out system: the links as fitted without its rows, for validation on unseen rows."""

    def leaving_out(self, system: str) -> CollectiveConstants | None:
        """The constants as fitted without the rows of `system`; a generation of NVLink that only it had is missing.

        None where nothing replaces it: each of the two ways over PCIe has one system only.
        """
        if any(self.links[kind].systems == (system,) for kind in NOT_NVLINK if kind in self.links):
            return None
        changed = self.without.get(system, {})
        links = {kind: value for kind, value in self.links.items() if value.systems != (system,)}
        return CollectiveConstants(
            source=f"{self.source}, without {system}",
            links={**links, **changed},
            network=self.network,
            without={},
        )


@cache
def link_constants(kind: str, constants: CollectiveConstants) -> tuple[LinkConstants, Provenance]:
    """The constants of a kind of link, and their provenance.

    A generation of NVLink without rows gets the mean of the others. The two ways over PCIe replace each other where
    one has no rows, which is a poor guess: one is through the host's memory.
    """
    link = constants.links.get(kind)
    if link is not None:
        return link, Provenance(kind="fitted", text=f"{link.rows} rows of {', '.join(link.systems)}")
    others = {name: link for name, link in constants.links.items() if (name in NOT_NVLINK) == (kind in NOT_NVLINK)}
    if not others:
        others = dict(constants.links)
    mean = mean_constants(tuple(others.values()))
    text = f"{kind}: mean of {', '.join(others)}, {mean.rows} rows of {', '.join(mean.systems)}"
    return mean, Provenance(kind="transferred", text=text)


def mean_constants(links: tuple[LinkConstants, ...]) -> LinkConstants:
    """The geometric mean of the constants of several kinds of link, protocol by protocol."""
    protocols = {}
    for name in dict.fromkeys(name for link in links for name in link.protocols):
        measured = [link.protocols[name] for link in links if name in link.protocols]
        values: dict[str, Any] = {}
        for field in fields(ProtocolConstants):
            if field.name != "root":
                numbers = [float(getattr(protocol, field.name)) for protocol in measured]
                values[field.name] = math.exp(fmean(map(math.log, numbers))) if min(numbers) > 0 else fmean(numbers)
        protocols[name] = replace(measured[0], **values)
    return LinkConstants(
        protocols=protocols,
        rows=sum(link.rows for link in links),
        systems=tuple(system for link in links for system in link.systems),
        max_ranks=max(link.max_ranks for link in links),
    )


@cache
def load_collective_constants() -> CollectiveConstants:
    """The constants of `collectives.json`."""
    text = resources.files("nearpeak.plan.cluster").joinpath("collectives.json").read_text(encoding="utf-8")
    return from_json(CollectiveConstants, json.loads(text))
