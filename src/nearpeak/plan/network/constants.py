"""Fitted constants of the collectives: what each protocol takes over each kind of link, read from `collectives.json`.

`benchmarks/fit_collectives.py` writes the file from measured rows. Seconds and bytes; bandwidths as shares of the
link's datasheet bandwidth, so that a GPU with fewer links of the same generation gets its own figure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any

from nearpeak.plan.provenance import Provenance
from nearpeak.records import from_json

NOT_NVLINK = ("pcie", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolConstants:
    """Time of one protocol over one kind of link; `protocol_seconds` in `collective_traffic.py` is the formula."""

    base: float
    """Seconds before anything moves."""
    lead: float
    """Seconds per step that nothing hides."""
    fill: float
    """Seconds to fill the pipeline, whatever the number of steps; reached from `fill_bytes` on."""
    fill_step: float
    """The same, per step."""
    fill_bytes: float
    """Bytes per rank at which half of the filling time is reached; 0: always all of it."""
    share: float
    """Of the link's bandwidth that the wire reaches."""
    copy: float
    """Bytes of wire time per byte of the rank's own part, which is copied beside what is sent."""
    slow_bytes: float
    """The wire takes 1 + sqrt(slow_bytes / bytes) times as long: bandwidth is reached only slowly."""
    root: bool
    """Whether filling and wire overlap (the root of the sum of squares) or follow one another (the sum)."""
    crossing: float = 1.0
    """Bandwidth of more than 2 ranks against that of 2, where they cross the bridges of a host."""
    spreading: float = 0.0
    """Power of ranks / 4 by which bandwidth falls on beyond 4 ranks that share a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConstants:
    """All protocols over one kind of link."""

    protocols: Mapping[str, ProtocolConstants]
    """By "LL", "LL128", "Simple", "in-switch", "direct"."""
    rows: int = 0
    systems: tuple[str, ...] = ()
    """Where the rows were measured."""
    max_ranks: int = 8
    """Ranks of the largest group among the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConstants:
    """Between domains: NCCL's constants, and published or assumed shares of the adapters' bandwidth."""

    share: Mapping[str, float]
    """Of the adapters' bandwidth, by the start of the network's name; "" for any other."""
    communicator: float
    """Bytes/s that one communicator takes out of a domain at most, however many adapters that has."""
    all_to_all_share: float
    """Further share for all-to-all, whose traffic leaves the rails."""
    message: float
    """Seconds per peer of an all-to-all or a send."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveConstants:
    """The whole file; two are equal only where they are one.

    `links` by kind: "ampere", "hopper", "blackwell" (their NVLink), "pcie", "host".
    """

    source: str
    links: Mapping[str, LinkConstants]
    network: NetworkConstants
    without: Mapping[str, Mapping[str, LinkConstants]]
    """By left-out system: the kinds that change when its rows are not used, to validate on rows that were not seen."""

    def leaving_out(self, system: str) -> CollectiveConstants | None:
        """The constants as fitted without the rows of `system`; a generation of NVLink that only it had is missing.

        None where nothing stands in for it: each of the two ways over PCIe has one system only.
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
def constants_for(kind: str, constants: CollectiveConstants) -> tuple[LinkConstants, Provenance]:
    """The constants for a kind of link, and where they come from.

    A generation of NVLink without rows gets the mean of those that have some; the two ways over PCIe stand in for one
    another where one has no rows, which says little: one is through the host's memory.
    """
    found = constants.links.get(kind)
    if found is not None:
        return found, Provenance(kind="fitted", text=f"{found.rows} rows of {', '.join(found.systems)}")
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
        having = [link.protocols[name] for link in links if name in link.protocols]
        values: dict[str, Any] = {}
        for field in fields(ProtocolConstants):
            if field.name != "root":
                given = [float(getattr(numbers, field.name)) for numbers in having]
                values[field.name] = math.exp(fmean(map(math.log, given))) if min(given) > 0 else fmean(given)
        protocols[name] = replace(having[0], **values)
    return LinkConstants(
        protocols=protocols,
        rows=sum(link.rows for link in links),
        systems=tuple(system for link in links for system in link.systems),
        max_ranks=max(link.max_ranks for link in links),
    )


@cache
def load_constants() -> CollectiveConstants:
    """The constants that are part of the package."""
    text = resources.files("nearpeak.plan.network").joinpath("collectives.json").read_text(encoding="utf-8")
    return from_json(CollectiveConstants, json.loads(text))
