"""`in_turns`: the times of several ways to do the same, taken in turns, so that a drift meets all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from nearpeak.measure.bench import measured_block, quiet_collector
from nearpeak.measure.case import Case
from nearpeak.measure.options import Options
from nearpeak.measure.statistics import median
from nearpeak.measure.subject import prepare

ROUNDS = 9


def in_turns(ways: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """The median device time of each way with cold caches, in seconds; the first of all rounds warms up."""
    options = Options(method="events")
    subjects = {name: prepare(Case(way, name=name), options) for name, way in ways.items()}
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    with quiet_collector():
        for turn in range(rounds + 1):
            for name in order.sample(list(subjects), len(subjects)):
                block = measured_block(subjects[name])
                if turn:
                    seconds[name].append(block.seconds)
    return {name: median(series) for name, series in seconds.items()}
