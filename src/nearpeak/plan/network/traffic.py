"""What one rank moves in a collective, by algorithm, and how long one protocol takes for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nearpeak.plan.network.constants import NetworkConstants, ProtocolConstants
from nearpeak.plan.network.nccl_choice import RING_NETWORK_HOP, SWITCH_TREE_NETWORK_HOP, TREE_NETWORK_HOP, ring_steps

_NETWORK_DATA = {"LL": 0.5, "LL128": 120 / 128, "Simple": 1.0}
"""Of what a protocol sends over the network, the part that is data: LL sends a flag with every 4 bytes."""
_SWITCH_HALF = 1.3
"""An all-gather or reduce-scatter in the switch against an all-reduce there: NCCL's tables give it 0.77 of the rate."""
_US = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank moves under one algorithm."""

    steps: int
    wire: float
    """Bytes over the link."""
    own: float
    """Bytes of the rank's own part."""
    copied: bool = True
    """Whether the rank copies its own part."""
    network_seconds: float = 0.0
    """What the network alone needs for its share."""
    network_latency: float = 0.0
    """Seconds of the steps that cross the network."""


def protocol_seconds(numbers: ProtocolConstants, traffic: Traffic, rate: float) -> tuple[float, float]:
    """Seconds of one collective, and those of the wire alone, at `rate` bytes/s over the link."""
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
    """Bandwidth of `ranks` against that of two, where they share the bridges of a host."""
    return 1.0 if ranks <= 2 else numbers.crossing * (4 / max(ranks, 4)) ** numbers.spreading


def ring_wire(op: str, bytes: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring (or directly)."""
    if op in ("broadcast", "reduce", "send_recv"):
        return bytes
    return bytes * ring_steps(op, ranks) / ranks


def traffic_inside(op: str, bytes: float, ranks: int, algorithm: str, protocol: str) -> tuple[str, Traffic]:
    """The name of the fitted constants, and what one rank moves, for a collective inside one domain."""
    traffic = traffic_of(op, bytes, ranks, ranks, algorithm, protocol, 0.0, 0.0, None)
    return fitted_name(algorithm, protocol), traffic


def fitted_name(algorithm: str, protocol: str) -> str:
    """Under which name the constants for an algorithm and a protocol are kept."""
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
    """What one rank moves over the link and the network; `network` is bytes/s per rank, `extra` seconds per message."""
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
