"""Measures the efficiency of kernels on this CPU and writes it into the table of the package.

    python -m benchmarks.estimates.reference_efficiency [--write FILE]

The kernels of a GPU have models instead: see `fit_expected`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch

import nearpeak
from nearpeak._records import to_json
from nearpeak.machines.reference import ReferenceEfficiency

TABLE = Path(nearpeak.__file__).parent / "machines" / "efficiency.json"
DIGITS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, default=TABLE, metavar="FILE", help="the table (the package's own)")
    arguments = parser.parse_args()
    machine = nearpeak.machine(calibrate=True, progress=lambda line: print(line, file=sys.stderr))
    assert machine.achievable is not None
    reference = ReferenceEfficiency(
        machine=machine.id,
        torch=torch.__version__,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        efficiency=machine.achievable.efficiency,
    )
    arguments.write.write_text(json.dumps(_rounded(to_json(reference)), indent=1, sort_keys=True) + "\n")
    for kind, points in sorted(reference.efficiency.items()):
        print(f"{kind:55}" + "  ".join(f"{point.bound_seconds * 1e6:.1f} us x {point.ratio:.2f}" for point in points))


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
