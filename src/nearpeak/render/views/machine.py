"""A machine, the catalogue and the networks as documents."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nearpeak.machines.calibrations import Calibration
from nearpeak.machines.catalogue import Network
from nearpeak.machines.machine import Achievable, Ceiling, LaunchCost, Link, Machine, Theoretical
from nearpeak.machines.physics import calibration_doubts
from nearpeak.render.document import Document, Fact, Items, Paragraph, Table
from nearpeak.units import DTYPE_BYTES, gibibytes, percent, quantity, seconds, significant


def document(machine: Machine, calibration: Calibration | None = None) -> Document:
    """What the machine is and can do; `calibration` adds when it was calibrated and where that is kept."""
    return Document(
        title=f"{machine.name} ({machine.id})",
        facts=tuple(_facts(machine)),
        parts=(
            _rates(machine),
            _bandwidths(machine),
            _launch(machine.achievable),
            _origin(machine, calibration),
            *([_sources(machine.sources)] if machine.sources else []),
        ),
    )


def catalogue_document(machines: Sequence[Machine]) -> Document:
    """The catalogue, one line per machine: datasheet figures."""
    rows = []
    for machine in machines:
        matrix = machine.theoretical.matrix if machine.theoretical else {}
        bandwidth = machine.theoretical.bandwidth if machine.theoretical else None
        link = machine.link.bandwidth if machine.link else None
        rows.append(
            (
                machine.id,
                gibibytes(machine.memory_bytes),
                quantity(bandwidth, "B/s"),
                _rate(matrix.get("bfloat16")),
                _rate(matrix.get("float8")),
                _binary(machine.cache_bytes),
                quantity(link, "B/s"),
            )
        )
    note = (
        f"{len(machines)} machines. bf16, fp8: dense FLOP/s of the matrix engines. link: GPU to GPU, one direction, "
        "all links together. `nearpeak machine ID` shows one of them with its sources."
    )
    headers = ("id", "memory", "bandwidth", "bf16", "fp8", "L2", "link")
    table = Table(headers=headers, rows=tuple(rows), note=note)
    return Document(title=f"{len(machines)} machines", is_titled=False, parts=(table,))


def networks_document(networks: Sequence[Network]) -> Document:
    """The networks of the catalogue, one line each."""
    rows = tuple(
        (
            network.id,
            quantity(network.bandwidth, "B/s"),
            network.per,
            "-" if network.domain_size is None else str(network.domain_size),
            textwrap.shorten(network.name, 38, placeholder="..."),
        )
        for network in networks
    )
    note = "bandwidth: one direction. GPUs: how many the switch joins."
    table = Table(headers=("id", "bandwidth", "per", "GPUs", "name"), rows=rows, align="lrlrl", note=note)
    return Document(title=f"{len(networks)} networks", is_titled=False, parts=(table,))


def _facts(machine: Machine) -> Iterator[Fact]:
    """What the machine is made of; what is not known is left out."""
    processors = {"cpu": "cores", "gpu": "compute units" if machine.vendor == "amd" else "multiprocessors"}
    clocks = [
        f"{name} {quantity(clock, 'Hz')}"
        for name, clock in (("base", machine.clock_base_hz), ("boost", machine.clock_boost_hz))
        if clock
    ]
    levels = [f"{name} {_binary(size)}" for name, size in machine.cache_levels.items()]
    if machine.cache_bytes and not levels:
        levels = [f"L2 {_binary(machine.cache_bytes)}"]
    elif machine.cache_bytes and machine.cache_bytes != max(machine.cache_levels.values()):
        levels.append(f"last level in all {_binary(machine.cache_bytes)}")
    if machine.shared_memory_bytes:
        levels.append(f"shared memory {_binary(machine.shared_memory_bytes)} each")
    engines = [
        "" if machine.processors is None else f"{machine.processors} {processors[machine.kind]}",
        "" if machine.vector_bits is None else f"vectors of {machine.vector_bits} bits",
        machine.matrix_engine or "",
    ]
    memory = "" if machine.memory_bytes is None else f"{gibibytes(machine.memory_bytes)} {machine.memory_kind or ''}"
    power = "" if machine.power_watts is None else quantity(machine.power_watts, "W")
    rows = {
        "kind": [machine.kind.upper(), machine.vendor, machine.architecture],
        "processors": [*engines, *clocks, power],
        "memory": [memory.strip()],
        "caches": levels,
        "links": [
            f"{link.name} {quantity(link.bandwidth, 'B/s')}"
            for link in (machine.link, machine.pcie)
            if link is not None
        ],
    }
    for name, values in rows.items():
        line = ", ".join(value for value in values if value)
        if line:
            yield Fact(label=name, text=line)


def _rates(machine: Machine) -> Table:
    """One row per engine and dtype: datasheet, achievable, their ratio, and the ridge against the memory."""
    theoretical, achievable = machine.theoretical, machine.achievable
    headers = ("FLOP/s", "datasheet", "achievable", "random", "sustained", "share", "spread", "FLOP/B")
    rows = []
    for engine in ("matrix", "vector"):
        datasheet: Mapping[str, float] = getattr(theoretical, engine, {})
        reached: Mapping[str, float] = getattr(achievable, engine, {})
        random = achievable.matrix_random if achievable and engine == "matrix" else {}
        sustained = achievable.matrix_sustained if achievable and engine == "matrix" else {}
        for dtype in _in_order({*datasheet, *reached}):
            peak, value = datasheet.get(dtype), reached.get(dtype)
            rows.append(
                (
                    f"{engine} {dtype}",
                    _rate(peak),
                    _rate(value),
                    _rate(random.get(dtype)),
                    _rate(sustained.get(dtype)),
                    percent(value / peak, 0) if peak and value else "-",
                    _spread(achievable, f"{engine}.{dtype}", value),
                    _ridge(theoretical, achievable, peak, value),
                )
            )
    return Table(headers=headers, rows=tuple(rows)).without_empty_columns()


def _ridge(
    theoretical: Theoretical | None, achievable: Achievable | None, peak: float | None, value: float | None
) -> str:
    if achievable and value:
        return significant(value / achievable.bandwidth)
    if theoretical and peak and achievable is None:
        return significant(peak / theoretical.bandwidth)
    return "-"


def _bandwidths(machine: Machine) -> Table:
    theoretical, achievable = machine.theoretical, machine.achievable
    rows: list[tuple[str, ...]] = []

    def add(name: str, field: str, datasheet: float | None) -> None:
        value: float | None = getattr(achievable, field, None)
        if value is None and datasheet is None:
            return
        share = percent(value / datasheet, 0) if value and datasheet else "-"
        spread = _spread(achievable, field, value)
        rows.append((name, quantity(datasheet, "B/s"), quantity(value, "B/s"), share, spread))

    def one_way(link: Link | None) -> float | None:
        return link.bandwidth if link else None

    add("memory", "bandwidth", theoretical.bandwidth if theoretical else None)
    add("last-level cache", "cache_bandwidth", None)
    add("host to device, pinned", "host_to_device", one_way(machine.pcie))
    add("device to host, pinned", "device_to_host", one_way(machine.pcie))
    add("host to device, pageable", "host_to_device_pageable", None)
    add("device to host, pageable", "device_to_host_pageable", None)
    add("device to device", "device_to_device", one_way(machine.link))
    headers = ("bandwidth", "datasheet", "achievable", "share", "spread")
    return Table(headers=headers, rows=tuple(rows)).without_empty_columns()


def _launch(achievable: Achievable | None) -> Table:
    launch = LaunchCost() if achievable is None else achievable.launch
    times = {
        "enqueue (host)": launch.enqueue,
        "one more kernel in a CUDA graph": launch.in_graph,
        "empty pair of events": launch.event_pair,
        "smallest step of event times": launch.event_tick,
        "one tiny operation (host)": launch.host_call,
        "more for the first one, caches cold": launch.cold_start,
    }
    rows = tuple((name, seconds(value)) for name, value in times.items() if value is not None)
    return Table(headers=("launch", "time"), rows=rows)


def _origin(machine: Machine, calibration: Calibration | None) -> Paragraph | Items:
    """Where the achievable figures come from: measured when, with which spread, or derated by what."""
    achievable = machine.achievable
    if achievable is None:
        return Paragraph(text="Not calibrated: `nearpeak machine --calibrate` measures what this machine can reach.")
    lines = [f"Achievable: {achievable.how} {achievable.note}."]
    if achievable.quick:
        derated = ", ".join(sorted(achievable.derated_peaks))
        left = f"derated: {derated}" if derated else "kernels are taken to be as efficient as on the reference machine"
        lines.append(f"A quick calibration; {left}. `nearpeak machine --calibrate` measures the rest.")
    if achievable.ceilings:
        name, widest = max(achievable.ceilings.items(), key=lambda item: item[1].spread)
        lines.append(f"Widest spread of repeats: {percent(widest.spread)} ({name}).")
    doubts = calibration_doubts(machine)
    if doubts:
        lines.append(f"Doubtful: {'; '.join(doubts)}. Measure again while nothing else runs: --calibrate.")
    if calibration is not None:
        key = calibration.key
        lines.append(f"Calibrated {calibration.date}, driver {key.driver}, torch {key.torch}.")
        lines.append(f"Kept in {calibration.path}")
    return Items(items=tuple(lines))


def _sources(sources: Mapping[str, str]) -> Items:
    """Each source once, with the figures that it gives; addresses are left to the JSON, as they do not fit a line."""
    fields: dict[str, list[str]] = {}
    for field, source in sources.items():
        fields.setdefault(source.partition(", http")[0], []).append(field)
    lines = tuple(f"{title}: {', '.join(_grouped(names))}" for title, names in fields.items())
    return Items(title="Sources (addresses: --json -)", items=lines, marker="  ")


def _grouped(names: Iterable[str]) -> list[str]:
    """The names with "matrix.float64", "matrix.int8" joined to "matrix.{float64,int8}"."""
    groups: dict[str, list[str]] = {}
    for name in names:
        group, _, inner = name.partition(".")
        groups.setdefault(group, []).extend([inner] if inner else [])
    joined = {group: ",".join(inner) for group, inner in groups.items()}
    return [
        f"{group}.{{{inner}}}" if "," in inner else f"{group}.{inner}" if inner else group
        for group, inner in joined.items()
    ]


def _spread(achievable: Achievable | None, field: str, value: float | None) -> str:
    """The spread of the ceiling that `value` is: "bandwidth" may be "bandwidth.copy", the best of several."""
    ceilings: Mapping[str, Ceiling] = achievable.ceilings if achievable else {}
    for name, ceiling in ceilings.items():
        if (name == field or name.startswith(f"{field}.")) and ceiling.value == value:
            return percent(ceiling.spread)
    return "-"


def _in_order(dtypes: Iterable[str]) -> list[str]:
    order = list(DTYPE_BYTES)
    return sorted(dtypes, key=lambda dtype: (order.index(dtype) if dtype in order else len(order), dtype))


def _rate(value: float | None) -> str:
    """A rate under a header that has the unit: "989 T"."""
    return quantity(value, "").strip()


def _binary(value: float | None) -> str:
    """A cache size: "50 MiB", "228 KiB"."""
    if value is None:
        return "-"
    unit, scale = ("MiB", 2**20) if value >= 2**20 else ("KiB", 2**10)
    amount = value / scale
    return f"{amount:.0f} {unit}" if amount == round(amount) else f"{significant(amount)} {unit}"
