"""How long a collective takes: rings, trees, in-switch reduction and direct sends, inside a domain and across.

`bytes` are counted as nccl-tests does:

| op | bytes | each rank puts on the wire |
| --- | --- | --- |
| all_reduce | the buffer | 2 (n-1)/n of it in a ring; once where the switch adds |
| all_gather | the gathered output, n parts | (n-1)/n |
| reduce_scatter | the whole input, n parts | (n-1)/n |
| all_to_all | all that one rank sends, its own part too | (n-1)/n |
| broadcast, reduce | the buffer | all of it |
| send_recv | the message | all of it |

The time is `base + steps x lead + join(filling, wire)`: `wire` is bytes over bandwidth, `filling` the time until all
ranks have something to send on, and the two overlap (root of squares) in the Simple protocol. Which algorithm and
protocol is taken follows NCCL's own tuning (`nccl_choice.py`), the times are fitted (`collectives.json`). An all-reduce
in the switch is not a reduce-scatter and an all-gather: data goes up once and comes down once.

>>> from nearpeak.plan.network.cluster import Cluster
>>> result = collective_seconds("all_reduce", 2**28, 8, Cluster.of("h100-sxm x 8"))
>>> result.algorithm, f"{result.seconds * 1e3:.1f} ms", result.limiter
('in-switch', '1.1 ms', 'link')
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.network.cluster import Cluster
from nearpeak.plan.network.constants import CollectiveConstants, LinkConstants, constants_for, load_constants
from nearpeak.plan.network.nccl_choice import GENERATIONS, Situation, choose
from nearpeak.plan.network.traffic import fitted_name, protocol_seconds, ring_wire, shared_bandwidth, traffic_of
from nearpeak.plan.provenance import Provenance

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The time of one collective and what it is made of: `latency_seconds + bandwidth_seconds = seconds`."""

    op: str
    bytes: float
    ranks: int
    seconds: float
    bandwidth_seconds: float
    """What the wire alone takes, at the bandwidth that the protocol reaches."""
    algorithm: str
    protocol: str
    limiter: Literal["latency", "link", "network", "nothing"]
    provenance: Provenance

    @property
    def latency_seconds(self) -> float:
        """All that is not the wire."""
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
    inside = _check(op, bytes, ranks, cluster, ranks_per_node, concurrent_groups)
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
    constants = constants or load_constants()
    domains = ranks // inside
    over_pcie = cluster.fabric in ("pcie", "host") or (cluster.fabric == "pairs" and inside > 2)
    kind = link_kind(cluster, inside)
    fitted, provenance = constants_for(kind, constants)
    link = cluster.link_bandwidth
    if cluster.fabric == "pairs" and inside > 2 and cluster.machine.pcie is not None:
        link = cluster.machine.pcie.bandwidth
    network = network_bandwidth(cluster, inside, concurrent_groups, constants) if domains > 1 else 0.0
    here = Situation(
        generation=generation(cluster.machine.architecture),
        pcie=over_pcie,
        ranks=ranks,
        domains=domains,
        link=link / 1e9,
        network=min(network * inside, constants.network.communicator) / 1e9,
        in_switch=cluster.in_switch_reduction,
        network_reduction=cluster.network_reduction,
    )
    algorithm, protocol = choose(op, bytes, here)
    traffic = traffic_of(
        op, bytes, ranks, inside, algorithm, protocol, network, cluster.network_latency, constants.network
    )
    sharing = inside * concurrent_groups if over_pcie and inside > 1 else inside
    numbers = fitted.protocols.get(fitted_name(algorithm, protocol)) or fitted.protocols["Simple"]
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


class CollectiveTimes:
    """`collective_seconds` of one cluster, remembered: a search asks for the same few thousand times and again.

    >>> times = CollectiveTimes(Cluster.of("h100-sxm x 64"))
    >>> times("all_gather", 2**26, 8, stride=8) > times("all_gather", 2**26, 8)
    True
    """

    def __init__(self, cluster: Cluster, constants: CollectiveConstants | None = None) -> None:
        self.cluster = cluster
        self.constants = constants or load_constants()
        self.provenances: dict[Provenance, None] = {}
        """All that went into the answers so far, in order."""
        self._known: dict[tuple[str, float, int, int], float] = {}

    def __call__(self, op: str, bytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of `op` over `ranks` GPUs that lie `stride` apart, all such groups at once."""
        key = (op, bytes, ranks, stride)
        known = self._known.get(key)
        if known is None:
            group = self.cluster.group(ranks, stride)
            result = collective_seconds(
                op,
                bytes,
                ranks,
                self.cluster,
                ranks_per_node=group.ranks_per_domain,
                concurrent_groups=group.concurrent_groups,
                constants=self.constants,
            )
            self.provenances[result.provenance] = None
            known = self._known[key] = result.seconds
        return known


def link_kind(cluster: Cluster, ranks: int) -> str:
    """Which constants the links between `ranks` GPUs of one domain have."""
    if cluster.fabric in ("pcie", "host"):
        return cluster.fabric
    if cluster.fabric == "pairs" and ranks > 2:
        return "pcie"
    return cluster.machine.architecture


def generation(architecture: str) -> str:
    """The row of NCCL's tables for an architecture: Ada counts as Ampere, and what is not NVIDIA's too."""
    return architecture if architecture in GENERATIONS else "ampere"


def network_bandwidth(cluster: Cluster, inside: int, concurrent_groups: int, constants: CollectiveConstants) -> float:
    """Bytes/s per rank that reach the network."""
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


def _check(op: str, bytes: float, ranks: int, cluster: Cluster, inside: int | None, groups: int) -> int:
    if op not in OPS:
        raise UsageError(f"op={op!r} is not a collective. {did_you_mean(op, OPS)}")
    if not (math.isfinite(bytes) and bytes >= 0):
        raise UsageError(f"bytes={bytes!r} must be a number of at least 0. Nearest: bytes=0.")
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
