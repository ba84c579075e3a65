"""The catalogue: datasheet figures of known processors and networks, read from `catalogue.toml`.

A machine is found by its id or by the exact name that the driver reports, never by resemblance: an L40 is not an L40S,
and the three kinds of H100 differ by a factor of 1.9 in memory bandwidth.

>>> find("h100-sxm").theoretical.bandwidth
3350000000000.0
>>> find("NVIDIA H100 PCIe").id
'h100-pcie'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from importlib import resources
from typing import Any, Literal

from nearpeak._files import parse_toml
from nearpeak._records import brief
from nearpeak.errors import FileProblem, UnknownMachine, UsageError
from nearpeak.machines.machine import Achievable, Link, Machine, Theoretical
from nearpeak.units import DTYPE_BYTES

BANDWIDTH_FACTOR = 0.98
"""Of the datasheet's memory bandwidth. Measured on an H200: a fill of 8 GiB writes 4.70 of 4.8 TB/s (0.979)."""
MATRIX_FACTOR = 0.94
"""Of the dense matrix peak. Measured on an H200 with products of zeros, the best that any dtype reaches: float64 62.8
of 66.9 TFLOP/s (0.938), tf32 0.925, bfloat16 902 of 989 (0.912). Random bfloat16 numbers run at 806 in a burst and at
688 when they last, since power limits the clock."""
VECTOR_FACTOR = 0.96
"""Of the vector peak. Measured on an H200: 63.8 of 66.9 TFLOP/s in float32 (0.954)."""

LARGEST_FIGURE = 1e24
"""What no processor reaches, in any unit."""

DERATED_NOTE = (
    f"datasheet x {BANDWIDTH_FACTOR:.2f} (memory), x {MATRIX_FACTOR:.2f} (matrix), x {VECTOR_FACTOR:.2f} (vector), "
    "the best that was measured on an H200"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A connection between nodes or inside a rack; `bandwidth` is bytes/s in one direction."""

    id: str
    name: str
    bandwidth: float
    per: Literal["port", "node", "gpu"]
    domain_size: int | None
    """How many GPUs the switch joins; None where there is no such limit."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Everything in the data file, in file order; `driver_names` gives the id for a driver's name."""

    machines: Mapping[str, Machine]
    networks: Mapping[str, Network]
    driver_names: Mapping[str, str]


def find(name: str) -> Machine:
    """The machine with this id ("h100-sxm") or with this exact driver name ("NVIDIA H100 80GB HBM3")."""
    catalogue = load()
    machine = catalogue.machines.get(name) or by_driver_name(name)
    if machine is None:
        raise UnknownMachine(_unknown(name, catalogue))
    return machine


def by_driver_name(name: str) -> Machine | None:
    """The machine whose driver reports exactly `name`, or None."""
    catalogue = load()
    identifier = catalogue.driver_names.get(name)
    return None if identifier is None else catalogue.machines[identifier]


def machines() -> tuple[Machine, ...]:
    """All machines of the catalogue, in file order."""
    return tuple(load().machines.values())


def networks() -> tuple[Network, ...]:
    """The usual links between nodes and inside a rack, in file order."""
    return tuple(load().networks.values())


@cache
def load() -> Catalogue:
    """The catalogue that is part of the package."""
    file = resources.files("nearpeak.machines").joinpath("catalogue.toml")
    try:
        return parse(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileProblem(file, f"it is damaged: {error}") from None


def parse(text: str) -> Catalogue:
    """The catalogue in `text` (TOML); ValueError names the device and the field that is wrong."""
    data = parse_toml(text)
    sources = {key: _source_text(key, value) for key, value in _table(data, "sources").items()}
    devices = {key: _Entry(f"device {key!r}", value, sources) for key, value in _table(data, "device").items()}
    links = {key: _Entry(f"network {key!r}", value, sources) for key, value in _table(data, "network").items()}
    if data:
        raise ValueError(f"catalogue: unknown table {min(data)!r}; valid: 'device', 'network', 'sources'")
    driver_names: dict[str, str] = {}
    for identifier, entry in devices.items():
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", identifier):
            raise ValueError(f"catalogue: device {identifier!r}: an id has lower-case letters, digits and dashes only")
        for name in entry.texts("driver_names"):
            if name in driver_names or name in devices:
                raise entry.problem("driver_names", f"{name!r} belongs to {driver_names.get(name, name)!r} already")
            driver_names[name] = identifier
    return Catalogue(
        machines={identifier: _machine(identifier, entry) for identifier, entry in devices.items()},
        networks={identifier: _network(identifier, entry) for identifier, entry in links.items()},
        driver_names=driver_names,
    )


def _table(data: dict[str, Any], name: str) -> dict[str, Any]:
    table = data.pop(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"catalogue: {name!r}: expected a table, found {brief(table)}")
    return table


def _machine(identifier: str, entry: _Entry) -> Machine:
    processors = entry.number_or_none("multiprocessors", cite="processors")
    theoretical = Theoretical(
        matrix=entry.rates("matrix"),
        vector=entry.rates("vector"),
        bandwidth=entry.number("memory_bandwidth", cite="bandwidth"),
        source=entry.source_of("source"),
    )
    machine = Machine(
        id=identifier,
        name=entry.text("name"),
        kind="gpu",
        vendor=entry.text("vendor"),
        architecture=entry.text("architecture"),
        processors=None if processors is None else int(processors),
        memory_bytes=entry.number("memory_bytes"),
        memory_kind=entry.text("memory_kind"),
        cache_bytes=entry.number_or_none("l2_bytes", cite="cache_bytes"),
        shared_memory_bytes=entry.number_or_none("shared_memory_per_multiprocessor_bytes", cite="shared_memory_bytes"),
        clock_base_hz=entry.number_or_none("clock_base_hz"),
        clock_boost_hz=entry.number_or_none("clock_boost_hz"),
        power_watts=entry.number_or_none("power_watts"),
        link=_link(entry) if entry.has("link.") else None,
        pcie=_pcie(entry) if entry.has("pcie.") else None,
        theoretical=theoretical,
        achievable=derated(theoretical),
        sources=entry.cited,
    )
    entry.text("compute_capability")  # required in the file, for its readers; PyTorch knows that of the real device
    entry.finish()
    return machine


def derated(theoretical: Theoretical) -> Achievable:
    """The best that code can reach on a device that was not measured."""
    factors = {"memory": BANDWIDTH_FACTOR, "matrix": MATRIX_FACTOR, "vector": VECTOR_FACTOR}
    return _times_factors(theoretical, factors, DERATED_NOTE)


def derate(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The machine with its datasheet's figures times these factors as what code can reach, in place of any others.

    `factors` are by "memory", "matrix" and "vector"; what is left out is 1, the datasheet's own figure.
    """
    unknown = set(factors) - {"memory", "matrix", "vector"}
    if unknown or not all(0 < factor <= 1 for factor in factors.values()):
        given = ", ".join(f"{name}={factor:g}" for name, factor in factors.items())
        raise UsageError(f"Cannot derate by {given}: there are memory, matrix and vector, each above 0 and at most 1.")
    if machine.theoretical is None:
        raise UsageError(f"{machine.name} has no datasheet to derate: name a GPU of the catalogue with --on.")
    whole = {"memory": 1.0, "matrix": 1.0, "vector": 1.0, **factors}
    note = "datasheet x " + ", x ".join(f"{factor:g} ({name})" for name, factor in whole.items()) + ", as asked for"
    return replace(machine, achievable=_times_factors(machine.theoretical, whole, note))


def _times_factors(theoretical: Theoretical, factors: Mapping[str, float], note: str) -> Achievable:
    return Achievable(
        how="derated",
        note=note,
        bandwidth=factors["memory"] * theoretical.bandwidth,
        matrix={dtype: factors["matrix"] * rate for dtype, rate in theoretical.matrix.items()},
        vector={dtype: factors["vector"] * rate for dtype, rate in theoretical.vector.items()},
    )


def _link(entry: _Entry) -> Link:
    links = entry.number_or_none("link.links")
    name = entry.text("link.name") + (f" x{links:.0f}" if links else "")
    return Link(name=name, bandwidth=entry.number("link.bandwidth"), source=entry.source_of("link.bandwidth"))


def _pcie(entry: _Entry) -> Link:
    name = f"PCIe {entry.number('pcie.generation'):.1f} x{entry.number('pcie.lanes'):.0f}"
    return Link(name=name, bandwidth=entry.number("pcie.bandwidth"), source=entry.source_of("pcie.bandwidth"))


def _network(identifier: str, entry: _Entry) -> Network:
    domain_size = entry.number_or_none("domain_size")
    valid: dict[str, Literal["port", "node", "gpu"]] = {"port": "port", "node": "node", "gpu": "gpu"}
    per = valid.get(text := entry.text("per"))
    if per is None:
        raise entry.problem("per", f"{text!r} is not one of 'port', 'node', 'gpu'")
    network = Network(
        id=identifier,
        name=entry.text("name"),
        bandwidth=entry.number("bandwidth"),
        per=per,
        domain_size=None if domain_size is None else int(domain_size),
        source=entry.source_of("source"),
    )
    entry.finish()
    return network


def _source_text(key: str, data: Any) -> str:
    entry = _Entry(f"source {key!r}", data, {})
    text = f"{entry.text('title')}, {entry.text('url')}"
    entry.finish()
    return text


class _Entry:
    """One entry of the file as a flat table of dotted fields; each is read once, and what is left over is an error."""

    def __init__(self, where: str, data: Any, sources: Mapping[str, str]) -> None:
        if not isinstance(data, dict):
            raise ValueError(f"catalogue: {where}: expected a table, found {brief(data)}")
        self.where = where
        self.cited: dict[str, str] = {}
        self._all_sources = sources
        cited = data.get("sources", {})
        if not isinstance(cited, dict):
            raise ValueError(f"catalogue: {where}, field 'sources': expected a table, found {brief(cited)}")
        self._source_keys: dict[str, Any] = dict(cited)
        self._unread_source_keys = set(self._source_keys)
        self._fields: dict[str, Any] = {}
        for key, value in data.items():
            if key == "source":
                self._source_keys[""] = value
            elif isinstance(value, dict) and key != "sources":
                self._fields |= {f"{key}.{inner}": item for inner, item in value.items()}
            elif key != "sources":
                self._fields[key] = value

    def problem(self, field: str, text: str) -> ValueError:
        return ValueError(f"catalogue: {self.where}, field {field!r}: {text}")

    def has(self, prefix: str) -> bool:
        return any(field.startswith(prefix) for field in self._fields)

    def text(self, field: str) -> str:
        value = self._fields.pop(field, None)
        if not isinstance(value, str) or not value.strip():
            raise self.problem(field, f"expected a text, found {brief(value)}")
        return value

    def texts(self, field: str) -> list[str]:
        value = self._fields.pop(field, None)
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise self.problem(field, f"expected a list of texts, found {brief(value)}")
        return value

    def number(self, field: str, cite: str = "") -> float:
        """A positive figure; its source is noted under `cite`, its name in `Machine`, where that is another one."""
        value = self._fields.pop(field, None)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < LARGEST_FIGURE:
            raise self.problem(field, f"expected a positive number, found {brief(value)}")
        self.cited[cite or field] = self.source_of(field)
        return float(value)

    def number_or_none(self, field: str, cite: str = "") -> float | None:
        return self.number(field, cite) if field in self._fields else None

    def rates(self, group: str) -> dict[str, float]:
        """FLOP/s by dtype name."""
        fields = [field for field in self._fields if field.startswith(f"{group}.")]
        unknown = [field for field in fields if field.removeprefix(f"{group}.") not in DTYPE_BYTES]
        if unknown:
            raise self.problem(unknown[0], f"no such dtype; valid: {', '.join(DTYPE_BYTES)}")
        if not fields:
            raise self.problem(group, "is missing or empty")
        return {field.removeprefix(f"{group}."): self.number(field) for field in fields}

    def source_of(self, field: str) -> str:
        """Where a figure comes from: by its dotted name, else by its group, else the entry's own source."""
        for key in (field, field.partition(".")[0], ""):
            if key in self._source_keys:
                self._unread_source_keys.discard(key)
                source = self._source_keys[key]
                if not isinstance(source, str) or source not in self._all_sources:
                    name = f"sources.{key}" if key else "source"
                    raise self.problem(name, f"no source {brief(source)} in the file")
                return self._all_sources[source]
        raise self.problem(field, "has no source: give the entry a `source`")

    def finish(self) -> None:
        """Every field and every source key must have been read."""
        for field in self._fields:
            raise self.problem(field, "no such field")
        for key in sorted(self._unread_source_keys):
            raise self.problem(f"sources.{key}", "names no figure of this entry")


def _unknown(name: str, catalogue: Catalogue) -> str:
    near = _nearest(name, catalogue)
    guess = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"The catalogue has no machine {name!r}; names are matched exactly, since neighbors differ too much.{guess}\n"
        "`nearpeak machine --list` shows every id. To measure a device that is not listed, run\n"
        "`nearpeak machine --calibrate` on it."
    )


def _nearest(name: str, catalogue: Catalogue, count: int = 4) -> list[str]:
    """The ids that share the most with `name`, by themselves or by a driver name, which is then shown too."""
    requested_words = _words(name)
    scores: dict[str, tuple[float, str]] = {}
    candidates = [(key, key) for key in catalogue.machines] + [
        (key, driver) for driver, key in catalogue.driver_names.items()
    ]
    for identifier, candidate in candidates:
        words = _words(candidate)
        shared = len(requested_words & words) / max(1, min(len(requested_words), len(words)))
        score = shared + SequenceMatcher(None, name.lower(), candidate.lower()).ratio()
        if score > scores.get(identifier, (0.0, ""))[0]:
            label = repr(candidate) if candidate == identifier else f"{identifier!r} ({candidate})"
            scores[identifier] = (score, label)
    ranked = sorted(scores.values(), key=lambda item: -item[0])
    return [label for score, label in ranked[:count] if score >= max(0.9, ranked[0][0] - 0.5)]


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower())) - {"nvidia", "amd", "tesla", "geforce", "instinct"}
