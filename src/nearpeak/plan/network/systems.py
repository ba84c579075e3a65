"""The catalogue of systems (nodes and racks that GPUs come in), read from `clusters.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from nearpeak.errors import UnknownMachine, UsageError, did_you_mean
from nearpeak.machines import catalogue
from nearpeak.machines.catalogue import Network
from nearpeak.machines.model import Machine

_LATENCIES = {"infiniband": 0.0, "ethernet": 3e-6, "slingshot": 2e-6, "aws-efa": 12e-6}
"""Seconds of one message beyond InfiniBand's, by the start of the network's id. Assumed: InfiniBand takes about 2 us
end to end, RoCE about 5, EFA about 15 (AWS gave 15.5 us for the first EFA)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One entry of the catalogue; see the head of `clusters.toml` for the fields."""

    id: str
    machine: str
    default_for: tuple[str, ...]
    gpus_per_node: int
    domain_size: int
    fabric: Literal["switch", "mesh", "pairs", "pcie", "host", "none"]
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
        """The link's name as the machine's datasheet has it."""
        link = machine.link if self.fabric in ("switch", "mesh", "pairs") else machine.pcie
        return link.name if link is not None else "no link"

    def latency_beyond_infiniband(self, network: Network) -> float:
        """Seconds that one message takes more than over InfiniBand."""
        if self.network_latency is not None and network == self.network:
            return self.network_latency
        return next((value for prefix, value in _LATENCIES.items() if network.id.startswith(prefix)), 0.0)


@cache
def load() -> Mapping[str, System]:
    """The systems that are part of the package, by id."""
    return parse(resources.files("nearpeak.plan.network").joinpath("clusters.toml").read_text(encoding="utf-8"))


def parse(text: str) -> Mapping[str, System]:
    """The systems in `text` (TOML); ValueError names the system and the field that is wrong."""
    data = tomllib.loads(text)
    sources = {key: f"{value['title']}, {value['url']}" for key, value in data.get("sources", {}).items()}
    machines = catalogue.load().machines
    found: dict[str, System] = {}
    taken: dict[str, str] = {}
    for identifier, entry in data.get("system", {}).items():
        for name in (entry["machine"], *entry.get("default_for", ())):
            if name not in machines:
                raise ValueError(f"system {identifier!r}: no machine {name!r} in the catalogue")
        for name in entry.get("default_for", ()):
            if name in taken:
                raise ValueError(f"system {identifier!r}: {name!r} is the default of {taken[name]!r} already")
            taken[name] = identifier
        found[identifier] = _system(identifier, entry, sources)
    return found


def find_system(name: str, machine: Machine | None = None) -> tuple[System, Machine]:
    """The system and the machine that `name` says; `machine` (calibrated, say) is used where it is given."""
    known = load()
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
    return _usual(machine), machine


def systems() -> tuple[System, ...]:
    """All systems of the catalogue, in file order."""
    return tuple(load().values())


def known_names() -> tuple[str, ...]:
    """Every name that `Cluster.of` takes: systems, then machines."""
    return (*load(), *catalogue.load().machines)


def network_named(identifier: str) -> Network:
    """The network with this id, or an error that names the nearest."""
    networks = {item.id: item for item in catalogue.networks() if item.domain_size is None}
    if identifier not in networks:
        raise UsageError(f"network={identifier!r} is not known. {did_you_mean(identifier, networks)}")
    return networks[identifier]


def _usual(machine: Machine) -> System:
    """What a machine without an entry gets: a PCIe server of 8 with one 100 Gb/s adapter, said as assumed."""
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
        network=network_named("ethernet-100"),
        source="assumed: a server with 8 GPUs and one 100 Gb/s adapter",
    )


def _system(identifier: str, entry: Mapping[str, Any], sources: Mapping[str, str]) -> System:
    try:
        return System(
            id=identifier,
            machine=entry["machine"],
            default_for=tuple(entry.get("default_for", ())),
            gpus_per_node=int(entry["gpus_per_node"]),
            domain_size=int(entry["domain_size"]),
            fabric=entry["fabric"],
            in_switch_reduction=bool(entry.get("in_switch_reduction", False)),
            adapters_per_node=int(entry["adapters_per_node"]),
            adapters_shared=bool(entry.get("adapters_shared", False)),
            network=network_named(entry["network"]),
            source=sources[entry["source"]],
            network_latency=entry.get("network_latency"),
        )
    except KeyError as missing:
        raise ValueError(f"system {identifier!r}: the field or source {missing} is missing") from None
