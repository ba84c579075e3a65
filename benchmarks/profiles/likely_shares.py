"""The range of predicted savings (`nearpeak.profiles.finding.likely_shares`), fitted to programs by others.

    PYTHONPATH=src python -m benchmarks.profiles.likely_shares benchmarks/results/programs_*.json

Of all planted wastes with a finding at or near the line, mended alone: by rule, the measured over the predicted odds
(what goes of a step, over what stays), and the share of ranges that a part of the measured interval is in. Wastes that
saved nothing count too. The fit takes the narrowest ranges that hold a share of them (--target), and is judged by
ranges that were fitted without the program.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from benchmarks.markdown_table import table
from benchmarks.profiles.programs import result_from_json
from nearpeak.profiles.finding import LEAST_ODDS, MOST_ODDS, MOST_POWER

FACTORS = tuple(number / 20 for number in range(8, 15))
MULTIPLES = tuple(number / 10 for number in range(10, 61, 2))
POWERS = tuple(number / 10 for number in range(3, 11))
OLD = ((0.65, 2.5), (0.5, 4.0))
"""Multiples of the odds that ranges had at first: for savings that are time of ops, and idle time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A prediction and what mending really saved, as odds."""

    program: str
    rule: str
    waits: bool
    predicted: float
    measured: float
    low: float
    high: float


Ends = tuple[float, float, float]
"""`LEAST_ODDS`, `MOST_ODDS` and `MOST_POWER`."""


def odds(share: float) -> float:
    """What goes, over what stays; at least one in ten thousand, also of what made a step slower."""
    share = min(max(share, 1e-4), 0.999)
    return share / (1.0 - share)


def outcomes(paths: Sequence[Path]) -> Iterator[Outcome]:
    """Of the rows of result files, those whose waste has a finding at or near its line."""
    for path in paths:
        saved = json.loads(path.read_text(encoding="utf-8"))
        for result in (result_from_json(item, saved["date"]) for item in saved["results"]):
            for row in result.rows:
                if row.measured is None or row.waste == "all" or row.place not in ("line", "call", "beside"):
                    continue
                largest = max(row.findings, key=lambda finding: finding.share)
                yield Outcome(
                    program=row.program,
                    rule=largest.rule,
                    waits=largest.waits,
                    predicted=odds(row.predicted),
                    measured=odds(row.measured.share),
                    low=odds(row.measured.low),
                    high=odds(row.measured.high),
                )


def ends_of(predicted: float, ends: Ends) -> tuple[float, float]:
    """The range of predicted odds."""
    least, most, power = ends
    return least * predicted, max(predicted, most * predicted**power)


def is_held(outcome: Outcome, ends: tuple[float, float]) -> bool:
    """Whether a part of the measured interval is in a range."""
    return outcome.low <= ends[1] and ends[0] <= outcome.high


def width(outcome: Outcome, ends: Ends) -> float:
    """Of a range, as a share of the step."""
    low, high = ends_of(outcome.predicted, ends)
    return high / (1.0 + high) - low / (1.0 + low)


def fit(found: Sequence[Outcome], target: float) -> Ends:
    """The narrowest ranges that hold a share of the outcomes."""
    best: tuple[float, Ends] | None = None
    for ends in itertools.product(FACTORS, MULTIPLES, POWERS):
        held = sum(is_held(one, ends_of(one.predicted, ends)) for one in found)
        if held >= target * len(found):
            wide = mean(width(one, ends) for one in found)
            if best is None or wide < best[0]:
                best = wide, ends
    if best is None:
        raise SystemExit(f"no range holds {target:.0%} of {len(found)} outcomes")
    return best[1]


def left_out(found: Sequence[Outcome], target: float) -> tuple[float, float]:
    """The share that ranges hold of programs that they were not fitted to, and their mean width."""
    held, widths = 0, []
    for program in sorted({one.program for one in found}):
        ends = fit([one for one in found if one.program != program], target)
        for one in (one for one in found if one.program == program):
            held += is_held(one, ends_of(one.predicted, ends))
            widths.append(width(one, ends))
    return held / len(found), mean(widths)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--target", type=float, default=0.83, help="of the outcomes, in the fit")
    arguments = parser.parse_args()
    found = list(outcomes(arguments.results))
    by_rule: dict[str, list[Outcome]] = defaultdict(list)
    for one in found:
        by_rule[one.rule].append(one)
    now = (LEAST_ODDS, MOST_ODDS, MOST_POWER)
    rows = []
    for rule, own in sorted(by_rule.items(), key=lambda item: -len(item[1])):
        ratios = sorted(one.measured / one.predicted for one in own)
        held = sum(is_held(one, ends_of(one.predicted, now)) for one in own)
        rows.append([rule, str(len(own)), f"{median(ratios):.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}", str(held)])
    print(table(("rule", "wastes", "median", "from, to", "in range"), rows, texts=1))
    before = mean(is_held(one, (OLD[one.waits][0] * one.predicted, OLD[one.waits][1] * one.predicted)) for one in found)
    after = mean(is_held(one, ends_of(one.predicted, now)) for one in found)
    share, wide = left_out(found, arguments.target)
    print(f"{len(found)} wastes of {len({one.program for one in found})} programs")
    print(f"odds times {OLD[0]} and, of idle time, {OLD[1]}: {before:.0%} in range")
    print(f"in the source, {now}: {after:.0%}, {mean(width(one, now) for one in found):.0%} of a step wide")
    print(f"fitted, {fit(found, arguments.target)}; without the program: {share:.0%}, {wide:.0%} of a step wide")
    return 0


if __name__ == "__main__":
    sys.exit(main())
