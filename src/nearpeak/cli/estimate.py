"""What the hardware allows for a case, op by op, without running it.

CASE is FILE.py:FUNCTION, as for `nearpeak bench`. Its inputs are built and its code is run on fake tensors: no GPU and
no memory for the weights is needed. --on names a machine of the catalogue; without it, it is this machine.

examples:
  nearpeak estimate cases.py:softmax --on h100-sxm
  nearpeak estimate cases.py:softmax --set rows=64k --on mi300x --ceilings theoretical
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nearpeak.cli.values import assignment


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("case", metavar="CASE", help="FILE.py:FUNCTION")
    parser.add_argument("--on", metavar="NAME", help="a machine of the catalogue (this machine)")
    parser.add_argument(
        "--set", action="append", default=[], type=assignment, metavar="NAME=VALUE", help="a parameter of the case"
    )
    parser.add_argument("--ceilings", choices=("achievable", "theoretical"), default="achievable")
    parser.add_argument("--top", type=int, default=12, help="how many operators to list (12)")
    parser.add_argument("--json", metavar="FILE", help="also write JSON to FILE; - writes JSON alone to stdout")


def run(arguments: argparse.Namespace) -> int:
    """Estimate the case and print the floors."""
    from nearpeak.capture.estimate import estimate
    from nearpeak.capture.fake import fake
    from nearpeak.measure.case import load
    from nearpeak.records import to_json
    from nearpeak.render.estimate import text

    builder = load(arguments.case)
    with fake():
        case = builder.build(**dict(arguments.set))
    result = estimate(case, on=arguments.on, ceilings=arguments.ceilings)
    content = json.dumps(to_json(result), indent=1) if arguments.json else ""
    if arguments.json == "-":
        print(content)
        return 0
    if arguments.json:
        Path(arguments.json).write_text(content + "\n", encoding="utf-8")
    print(text(result, arguments.top))
    return 0
