"""The efficiency of kernels on a reference CPU, for CPUs whose own kernels were not measured.

`efficiency.json` is written by `benchmarks.estimates.reference_efficiency` on the machine that it names. The
points are ratios to bounds, so that they carry over to a machine with other ceilings, as an assumption that is stated
wherever it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from nearpeak._records import from_json
from nearpeak.machines.machine import EfficiencyPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceEfficiency:
    """The measured efficiency of kernels, and where and when it was measured."""

    machine: str
    torch: str
    date: str
    efficiency: Mapping[str, tuple[EfficiencyPoint, ...]]


@cache
def reference_efficiency() -> ReferenceEfficiency:
    """That of the reference CPU.

    >>> reference_efficiency().machine
    'cpu-intel-xeon-2'
    """
    text = resources.files("nearpeak.machines").joinpath("efficiency.json").read_text(encoding="utf-8")
    return from_json(ReferenceEfficiency, json.loads(text))
