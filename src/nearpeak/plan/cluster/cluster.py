"""`Cluster`: GPUs, the links that join them inside a node or a rack, and the network between; and known systems.

A *domain* is the set of GPUs that one NVLink switch (or mesh) joins: a node of 8, or a rack of 72 in trays of 4. Inside
it a GPU has `link_bandwidth` to any other; what leaves it goes over `network_bandwidth`. All bandwidths are bytes/s in
one direction. `clusters.toml` is the catalogue of systems, with sources.

>>> Cluster.of("h100-sxm x 64")
<Cluster of 64 x h100-sxm: 8 nodes of 8, NVLink 4 x18 450 GB/s, network 50.0 GB/s>
>>> Cluster.of("gb200 x 144").domain_size, Cluster.of("h100-sxm", gpus=16, network="ethernet-200").network_bandwidth
(72, 25000000000.0)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from nearpeak._display import Result, headline
from nearpeak._files import parse_toml
from nearpeak._records import brief, build, to_json
from nearpeak.comm.fit import CurveFit
from nearpeak.errors import FileProblem, UnknownMachine, UsageError, did_you_mean
from nearpeak.machines import catalogue
from nearpeak.machines.catalogue import Network
from nearpeak.machines.machine import Machine
from nearpeak.plan.legal import require_positive
from nearpeak.units import quantity

Fabric = Literal["switch", "mesh", "pairs", "pcie", "host", "none"]
FABRICS: tuple[str, ...] = get_args(Fabric)
_MOST_DIGITS = 12
"""Of a number of GPUs."""
_LATENCIES = {"infiniband": 0.0, "ethernet": 3e-6, "slingshot": 2e-6, "aws-efa": 12e-6}
"""Seconds of one message beyond InfiniBand's, by the start of the network's id. Assumed: InfiniBand takes about 2 us
end to end, RoCE about 5, EFA about 15 (AWS gave 15.5 us for the first EFA)."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Cluster(Result):
    """GPUs of one kind in equal nodes. `Cluster.of` builds one from names; every field can also be set directly."""

    machine: Machine
    gpus: int
    gpus_per_node: int
    domain_size: int
    """GPUs joined by one link switch; at least 1."""
    fabric: Fabric
    """switch: any to any at full rate; mesh: direct links share the bandwidth; pairs: bridges of two, PCIe beyond;
    pcie: peer to peer over PCIe; host: through host memory; none: a single GPU per node."""
    link_name: str
    link_bandwidth: float
    """Per GPU, one direction, inside the domain."""
    network_name: str
    network_bandwidth: float
    """Per GPU, one direction, when all GPUs of a node send at once; 0 where there is no network."""
    adapters_per_node: int
    adapters_shared: bool
    """Whether one GPU can use all adapters of its node; otherwise it has its share of them."""
    in_switch_reduction: bool
    """Whether NVLink switches reduce and multicast (NVLS)."""
    network_reduction: bool = False
    """Whether network switches reduce (SHARP)."""
    network_latency: float = 0.0
    """Seconds of one message, less those over InfiniBand."""
    system: str | None = None
    """Id in the catalogue of systems; None for a cluster that was built by hand."""
    sources: Mapping[str, str] = field(default_factory=dict)
    measured: tuple[CurveFit, ...] = ()
    """Collectives that `nearpeak comm` measured on such GPUs, in place of the model's."""

    def __post_init__(self) -> None:
        require_positive(gpus=self.gpus, gpus_per_node=self.gpus_per_node, domain_size=self.domain_size)
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            low = self.gpus // self.gpus_per_node * self.gpus_per_node
            raise UsageError(
                f"gpus={self.gpus} is not a whole number of nodes of {self.gpus_per_node} GPUs. "
                f"Nearest: gpus={low} or gpus={low + self.gpus_per_node}."
            )
        if self.domain_size > self.gpus_per_node and self.domain_size % self.gpus_per_node:
            nearest = max(1, round(self.domain_size / self.gpus_per_node)) * self.gpus_per_node
            raise UsageError(
                f"domain_size={self.domain_size} is not a whole number of nodes of {self.gpus_per_node} GPUs. "
                f"Nearest: domain_size={nearest}."
            )
        if self.fabric not in FABRICS:
            raise UsageError(f"fabric={self.fabric!r} is not known. {did_you_mean(self.fabric, FABRICS)}")
        for name in ("link_bandwidth", "network_bandwidth", "network_latency"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name}={value!r} must be a number of at least 0. Nearest: {name}=0.")
        if min(self.gpus, self.domain_size) > 1 and not self.link_bandwidth:
            raise UsageError(
                f"The catalogue has no bandwidth of the links between GPUs of {self.machine.name}. Nearest: gpus=1."
            )
        if self.domains > 1 and not self.network_bandwidth:
            raise UsageError(
                f"gpus={self.gpus} needs a network, and network_bandwidth is 0. "
                f"Nearest: gpus={self.domain_size}, or name a network."
            )

    @staticmethod
    def of(
        name: str | Machine,
        *,
        gpus: int | None = None,
        network: str | None = None,
        gpus_per_node: int | None = None,
        domain_size: int | None = None,
        adapters_per_node: int | None = None,
        adapters_shared: bool | None = None,
        in_switch_reduction: bool | None = None,
        network_reduction: bool = False,
    ) -> Cluster:
        """The cluster of this name: a machine or a system of the catalogue, with "x GPUs" or `gpus`.

        A machine gets its default system; arguments replace the catalogue's figures. `network` is an id
        of the machine catalogue's networks ("infiniband-ndr"); with `adapters_per_node` of them, else one per GPU where
        the system has its own adapter for each.
        """
        machine: Machine | None = None
        if isinstance(name, Machine):
            machine, text, count = name, name.id, None
        else:
            text, count = parse_cluster(name)
        if count is not None and gpus is not None and count != gpus:
            raise UsageError(f"{name!r} says {count} GPUs and gpus={gpus} another number. Give one of them.")
        system, machine = find_system(text, machine)
        per_node = system.gpus_per_node if gpus_per_node is None else gpus_per_node
        link_bandwidth = system.link_bandwidth(machine)
        if gpus is None:
            gpus = count if count is not None else per_node if link_bandwidth else 1
        if per_node == system.gpus_per_node:
            domain = system.domain_size if domain_size is None else domain_size
        else:
            domain = (per_node if system.domain_size <= system.gpus_per_node else system.domain_size) or 1
            domain = domain if domain_size is None else domain_size
        adapters = system.adapters_per_node if adapters_per_node is None else adapters_per_node
        require_positive(adapters_per_node=adapters, gpus_per_node=per_node)
        link = find_network(network) if network is not None else system.network
        ports = 1 if link.per == "node" else adapters
        reduction = system.in_switch_reduction if in_switch_reduction is None else in_switch_reduction
        return Cluster(
            machine=machine,
            gpus=gpus,
            gpus_per_node=per_node,
            domain_size=domain,
            fabric=system.fabric,
            link_name=system.link_name(machine),
            link_bandwidth=link_bandwidth,
            network_name=link.name,
            network_bandwidth=link.bandwidth if link.per == "gpu" else link.bandwidth * ports / per_node,
            adapters_per_node=adapters,
            adapters_shared=system.adapters_shared if adapters_shared is None else adapters_shared,
            in_switch_reduction=reduction,
            network_reduction=network_reduction,
            network_latency=system.latency_beyond_infiniband(link),
            system=system.id,
            sources={"system": system.source, "network": link.source, **dict(machine.sources)},
        )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return math.ceil(self.gpus / self.gpus_per_node)

    @property
    def domain(self) -> int:
        """GPUs used of one domain: schedulers allocate equal blocks (128 GPUs on racks of 72: 64 each)."""
        if self.gpus <= self.domain_size:
            return self.gpus
        step = min(self.gpus_per_node, self.domain_size)
        for size in range(self.domain_size - self.domain_size % step, self.domain_size // 2, -step):
            if self.gpus % size == 0:
                return size
        return self.domain_size

    @property
    def domains(self) -> int:
        """Number of link domains."""
        return math.ceil(self.gpus / self.domain)

    def group(self, ranks: int, stride: int = 1) -> RankGroup:
        """Placement of a group of `ranks` whose neighbors are `stride` GPUs apart (the product of the inner degrees).

        >>> Cluster.of("h100-sxm x 64").group(8), Cluster.of("h100-sxm x 64").group(8, stride=8).concurrent_groups
        (RankGroup(ranks=8, ranks_per_domain=8, concurrent_groups=1), 8)
        """
        require_positive(ranks=ranks, stride=stride)
        if ranks * stride > self.gpus:
            raise UsageError(
                f"ranks={ranks} with stride={stride} needs {ranks * stride} GPUs, and the cluster has {self.gpus}. "
                f"Nearest: ranks={max(1, self.gpus // stride)}."
            )
        inside = max(1, min(ranks, self.domain // stride))
        while ranks % inside:  # as many ranks in each domain
            inside -= 1
        if inside == ranks:
            return RankGroup(ranks=ranks, ranks_per_domain=ranks, concurrent_groups=max(1, self.domain // ranks))
        return RankGroup(ranks=ranks, ranks_per_domain=inside, concurrent_groups=max(1, self.domain // inside))

    def network_share(self, ranks_per_domain: int = 1, concurrent_groups: int = 1) -> float:
        """Bytes/s per GPU into the network when `concurrent_groups` groups of `ranks_per_domain` ranks send at once."""
        senders = max(1, ranks_per_domain * concurrent_groups)
        per_domain = self.network_bandwidth * self.domain
        if self.adapters_shared:
            node = self.network_bandwidth * min(self.gpus_per_node, self.domain)
            alone = node if self.machine.pcie is None else min(node, self.machine.pcie.bandwidth)
        else:
            alone = self.network_bandwidth
        return min(alone, per_domain / senders)

    def __repr__(self) -> str:
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {min(self.gpus, self.gpus_per_node)}"
        network = f", network {quantity(self.network_bandwidth, 'B/s')}" if self.domains > 1 else ""
        link = f"{self.link_name} {quantity(self.link_bandwidth, 'B/s')}"
        return headline(f"Cluster of {self.gpus} x {self.machine.id}: {nodes}, {link}{network}")

    def __str__(self) -> str:
        network = f", {self.network_name} {quantity(self.network_bandwidth, 'B/s')} per GPU" if self.domains > 1 else ""
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {min(self.gpus, self.gpus_per_node)}"
        link = f"{self.link_name} {quantity(self.link_bandwidth, 'B/s')}"
        return f"Cluster: {self.gpus} x {self.machine.name}, {nodes}, {link}{network}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Placement of the ranks of one communicator in a cluster."""

    ranks: int
    ranks_per_domain: int
    """Ranks of this group that share one domain."""
    concurrent_groups: int
    """Groups that communicate at the same time in one domain and share its network adapters."""

    @property
    def domains(self) -> int:
        """Domains that the group spans."""
        return math.ceil(self.ranks / self.ranks_per_domain)


def parse_cluster(text: str) -> tuple[str, int | None]:
    """The name and the number of GPUs in `text`.

    >>> parse_cluster("h100-sxm x 64"), parse_cluster("64x h100-sxm"), parse_cluster("dgx-a100")
    (('h100-sxm', 64), ('h100-sxm', 64), ('dgx-a100', None))
    """
    plain = text.strip()
    after = re.fullmatch(r"(.+?)\s*(?:\s[xX]|\*)\s*([\d_,]+)", plain)
    before = re.fullmatch(r"([\d_,]+)\s*[xX*]\s*(\S.*)", plain)
    if after:
        name, number = after.group(1), after.group(2)
    elif before:
        name, number = before.group(2), before.group(1)
    else:
        return plain, None
    digits = number.replace(",", "").replace("_", "")
    if not 1 <= len(digits) <= _MOST_DIGITS:
        raise UsageError(f"{brief(number)} is no number of GPUs. Write for example 'h100-sxm x 64'.")
    return name.strip(), int(digits)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One entry of the catalogue of systems; `clusters.toml` describes the fields."""

    id: str
    machine: str
    default_for: tuple[str, ...]
    gpus_per_node: int
    domain_size: int
    fabric: Fabric
    in_switch_reduction: bool
    adapters_per_node: int
    adapters_shared: bool
    network: Network
    source: str
    network_latency: float | None = None

    def link_bandwidth(self, machine: Machine) -> float:
        """Bytes/s per GPU in one direction inside the domain."""
        link = machine.link if self.fabric in ("switch", "mesh", "pairs") else machine.pcie
        return link.bandwidth if link is not None else 0.0

    def link_name(self, machine: Machine) -> str:
        """Name of the link in the machine's datasheet."""
        link = machine.link if self.fabric in ("switch", "mesh", "pairs") else machine.pcie
        return link.name if link is not None else "no link"

    def latency_beyond_infiniband(self, network: Network) -> float:
        """Seconds of one message, less those over InfiniBand."""
        if self.network_latency is not None and network == self.network:
            return self.network_latency
        return next((value for prefix, value in _LATENCIES.items() if network.id.startswith(prefix)), 0.0)


def find_system(name: str, machine: Machine | None = None) -> tuple[System, Machine]:
    """The system and the machine of this name; a `machine`, such as a calibrated one, takes precedence."""
    known = load_systems()
    if machine is None and name in known:
        system = known[name]
        return system, catalogue.find(system.machine)
    if machine is None:
        try:
            machine = catalogue.find(name)
        except UnknownMachine:
            near = [known for known in known_names() if known.startswith(name.lower())] or known_names()
            raise UnknownMachine(
                f"No system and no machine is named {name!r}. {did_you_mean(name, near)} "
                "Write a name and a number of GPUs: 'h100-sxm x 64'."
            ) from None
    for system in known.values():
        if machine.id in system.default_for:
            return system, machine
    return _default_system(machine), machine


def systems() -> tuple[System, ...]:
    """All systems of the catalogue, in file order."""
    return tuple(load_systems().values())


def known_names() -> tuple[str, ...]:
    """All names that `Cluster.of` accepts: systems, then machines."""
    return (*load_systems(), *catalogue.load().machines)


def find_network(identifier: str) -> Network:
    """The network with this id, or an error that names the nearest."""
    networks = {item.id: item for item in catalogue.networks() if item.domain_size is None}
    if identifier not in networks:
        raise UsageError(f"network={identifier!r} is not known. {did_you_mean(identifier, networks)}")
    return networks[identifier]


@cache
def load_systems() -> Mapping[str, System]:
    """The systems that are part of the package, by id."""
    file = resources.files("nearpeak.plan.cluster").joinpath("clusters.toml")
    try:
        return parse_systems(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileProblem(file, f"it is damaged: {error}") from None


def parse_systems(text: str) -> Mapping[str, System]:
    """The systems in `text` (TOML); ValueError names the system and the field that is wrong."""
    data = parse_toml(text)
    titles = build(dict[str, dict[str, str]], data.get("sources", {}), "sources")
    sources = {key: f"{value.get('title')}, {value.get('url')}" for key, value in titles.items()}
    machines = catalogue.load().machines
    systems: dict[str, System] = {}
    defaults: dict[str, str] = {}
    for identifier, entry in build(dict[str, dict[str, Any]], data.get("system", {}), "system").items():
        default_for = build(tuple[str, ...], entry.get("default_for", []), f"system {identifier!r}, default_for")
        for name in (build(str, entry.get("machine"), f"system {identifier!r}, machine"), *default_for):
            if name not in machines:
                raise ValueError(f"system {identifier!r}: no machine {name!r} in the catalogue")
        for name in default_for:
            if name in defaults:
                raise ValueError(f"system {identifier!r}: {name!r} is the default of {defaults[name]!r} already")
            defaults[name] = identifier
        systems[identifier] = _system(identifier, {"default_for": [], **entry}, sources)
    return systems


def _default_system(machine: Machine) -> System:
    """The system of a machine without an entry: a server of 8 GPUs with one 100 Gb/s adapter. Assumed."""
    bridged = machine.link is not None and machine.vendor == "nvidia"
    return System(
        id=f"{machine.id}-server",
        machine=machine.id,
        default_for=(),
        gpus_per_node=8,
        domain_size=8,
        fabric="pairs" if bridged else "mesh" if machine.link is not None else "pcie",
        in_switch_reduction=False,
        adapters_per_node=1,
        adapters_shared=True,
        network=find_network("ethernet-100"),
        source="assumed: a server with 8 GPUs and one 100 Gb/s adapter",
    )


def _system(identifier: str, entry: Mapping[str, Any], sources: Mapping[str, str]) -> System:
    where = f"system {identifier!r}"
    source, network = (build(str, entry.get(name), f"{where}, {name}") for name in ("source", "network"))
    if source not in sources:
        raise ValueError(f"{where}: the source {source!r} is missing")
    flags = {name: entry.get(name, False) for name in ("in_switch_reduction", "adapters_shared")}
    try:
        shared = {"id": identifier, "network": to_json(find_network(network)), "source": sources[source]}
    except UsageError as error:
        raise ValueError(f"{where}: {error}") from None
    system: System = build(System, {**entry, **flags, **shared}, where)
    return system
