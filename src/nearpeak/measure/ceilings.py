"""The achievable ceilings of the machine at hand, measured with the harness: what CPU and GPU share."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

import torch

from nearpeak.machines.model import Achievable, Ceiling, LaunchCost
from nearpeak.measure.options import Progress
from nearpeak.measure.samplers import Sampler
from nearpeak.measure.statistics import median, quantile


def reach(sampler: Sampler, amount: float, how: str, blocks: int = 9) -> Ceiling:
    """The best rate at which `amount` was done over some blocks, after a first one that is not counted.

    A ceiling is what can be reached, so it is the best block and not the middle one: a neighbour that takes the memory
    for a while does not lower it.
    """
    sampler.block()
    rates = [amount / sampler.block().seconds for _ in range(blocks)]
    return Ceiling(value=max(rates), spread=(quantile(rates, 0.9) - quantile(rates, 0.1)) / median(rates), how=how)


def duration(sampler: Sampler, how: str, blocks: int = 9) -> Ceiling:
    """Seconds per call over some blocks."""
    sampler.block()
    times = [sampler.block().seconds for _ in range(blocks)]
    middle = median(times)
    return Ceiling(value=middle, spread=(quantile(times, 0.9) - quantile(times, 0.1)) / middle, how=how)


class Ceilings:
    """Collects measured ceilings by name: "bandwidth.copy", "matrix.bfloat16", "launch.enqueue", ..."""

    def __init__(self, progress: Progress | None) -> None:
        self.found: dict[str, Ceiling] = {}
        self._say = progress or (lambda line: None)

    def say(self, line: str) -> None:
        """Tells the user what is being measured."""
        self._say(line)

    def best(self, name: str, ceiling: Ceiling) -> None:
        """Keeps the highest of several ways to reach one ceiling."""
        if name not in self.found or ceiling.value > self.found[name].value:
            self.found[name] = ceiling

    def set(self, name: str, ceiling: Ceiling) -> None:
        """Records one figure."""
        self.found[name] = ceiling

    def value(self, name: str) -> float | None:
        """The figure, or None where it was not measured."""
        ceiling = self.found.get(name)
        return None if ceiling is None else ceiling.value

    def group(self, name: str) -> Mapping[str, float]:
        """All figures under a prefix, by what follows it."""
        prefix = name + "."
        return {key[len(prefix) :]: c.value for key, c in self.found.items() if key.startswith(prefix)}

    def achievable(self) -> Achievable:
        """What was found, as the ceilings of a machine."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Achievable(
            how="measured",
            note=f"{now} with torch {torch.__version__}, {torch.get_num_threads()} threads",
            bandwidth=max(self.group("bandwidth").values()),
            cache_bandwidth=self.value("cache_bandwidth"),
            matrix=self.group("matrix"),
            matrix_random=self.group("matrix_random"),
            matrix_sustained=self.group("matrix_sustained"),
            vector=self.group("vector"),
            host_to_device=self.value("host_to_device.pinned"),
            device_to_host=self.value("device_to_host.pinned"),
            host_to_device_pageable=self.value("host_to_device.pageable"),
            device_to_host_pageable=self.value("device_to_host.pageable"),
            device_to_device=self.value("device_to_device"),
            launch=LaunchCost(
                enqueue=self.value("launch.enqueue"),
                in_graph=self.value("launch.in_graph"),
                event_pair=self.value("launch.event_pair"),
                event_tick=self.value("launch.event_tick"),
                host_call=self.value("launch.host_call"),
                cold_start=self.value("launch.cold_start"),
            ),
            ceilings=dict(self.found),
        )
