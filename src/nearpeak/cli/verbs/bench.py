"""Time a case, compare two, or sweep one over its parameters.

CASE is FILE.py:FUNCTION. The function builds its inputs and returns what to
time: a callable, a tuple (callable, *arguments), or a nearpeak.Case. One CASE
is timed; two are compared in interleaved pairs, the second against the first.

examples:
  nearpeak bench cases.py:softmax
  nearpeak bench cases.py:softmax --set rows=8k --set dtype=bfloat16
  nearpeak bench cases.py:rms_norm cases.py:fused_rms_norm --margin 2%
  nearpeak bench cases.py:softmax --sweep rows=1k..16k*2 --svg softmax.svg
  nearpeak bench cases.py:softmax --sweep rows=1k,4k --json monday.json
  nearpeak bench cases.py:softmax --sweep rows=1k,4k --baseline monday.json
  nearpeak bench --selftest

Ends with 3 when the measurement should not be trusted: grade F, interrupted,
or with --strict also grade C. With 2 when the case cannot be timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nearpeak._display import printable
from nearpeak.cli.argument_types import assignment, assignments, share
from nearpeak.cli.output import narrate, print_text, write_file
from nearpeak.errors import CaseError, UntrustworthyMeasurement, UsageError

if TYPE_CHECKING:
    from nearpeak.measure.case import CaseBuilder
    from nearpeak.measure.results import Result
    from nearpeak.measure.timing import Sweep, Timing

UNTRUSTWORTHY = 3
MEASURING = ("kind", "method", "cache", "evict", "regime", "precision", "max_seconds", "seed")
"""Options that are passed to the library, which has their defaults."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("cases", nargs="*", metavar="CASE", help="FILE.py:FUNCTION; one to time, two to compare")
    what = parser.add_argument_group("what is timed")
    what.add_argument(
        "--set",
        action="append",
        default=[],
        type=assignment,
        metavar="NAME=VALUE",
        help="a parameter of the case: a number (8k is 8192), true, false, or text; may be repeated",
    )
    what.add_argument(
        "--sweep",
        action="append",
        default=[],
        type=assignments,
        metavar="NAME=VALUES",
        help="values by commas (64,1k,4k) or a range (1k..16k*2, 0..64+16); repeated, it makes a grid",
    )
    how = parser.add_argument_group("how it is timed")
    how.add_argument("--kind", help="auto, device, graph, pipelined, latency, enqueue or cpu (auto)")
    how.add_argument("--method", help="auto, events or graph (auto)")
    how.add_argument("--cache", help="cold or hot (cold)")
    how.add_argument("--evict", help="how the cache is made cold: flush, or rotate over copies of the inputs (flush)")
    how.add_argument("--regime", help="burst, or sustained under continuous load (burst)")
    how.add_argument("--precision", type=share, help="stop at this relative half-width of the interval (0.5%%)")
    how.add_argument("--max-seconds", type=float, metavar="S", help="stop after this long, for each timing (2)")
    how.add_argument("--margin", type=share, help="two cases closer than this are EQUIVALENT (1%%)")
    how.add_argument("--seed", type=int, help="of the order in which two cases are interleaved (0)")
    how.add_argument("--strict", action="store_true", help="end with 3 also at grade C")
    output = parser.add_argument_group("results")
    output.add_argument("--json", metavar="FILE", help="write the result with its raw series; - is stdout, alone")
    output.add_argument("--svg", metavar="FILE", help="plot a sweep against its bound")
    output.add_argument("--baseline", metavar="FILE", help="show the result beside one that --json saved")
    output.add_argument("-v", "--verbose", action="store_true", help="narrate on stderr, also where it is no terminal")
    proof = parser.add_argument_group("the instrument itself")
    proof.add_argument("--selftest", action="store_true", help="experiments with a known answer, on this machine")
    proof.add_argument("--quick", action="store_true", help="a shorter self-test")
    proof.add_argument("--experiment", action="append", default=[], metavar="NAME", help="only this one; repeatable")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and return the exit code."""
    _refuse_contradictions(arguments)
    if arguments.selftest:
        return _selftest(arguments)
    from nearpeak.measure.case import load
    from nearpeak.measure.options import options_from
    from nearpeak.measure.results import as_sweep, load_result

    options = {name: getattr(arguments, name) for name in MEASURING if getattr(arguments, name) is not None}
    options_from(dict(options))  # report mistakes before the file runs, which may take a while
    baseline = as_sweep(load_result(arguments.baseline)) if arguments.baseline else None
    # stdout is for the result: what the case prints goes to stderr.
    with contextlib.redirect_stdout(sys.stderr):
        builders = [load(reference) for reference in arguments.cases]
        result = _measure(builders, arguments, options)
    _show(result, arguments, baseline)
    return _judge(result, strict=arguments.strict)


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    two = len(arguments.cases) == 2
    contradictions = {
        "--selftest takes no CASE.": arguments.selftest and arguments.cases,
        "--quick and --experiment belong to --selftest.": not arguments.selftest
        and (arguments.quick or arguments.experiment),
        "Give one CASE to time it, or two to compare them.": not arguments.selftest
        and len(arguments.cases) not in (1, 2),
        "--sweep takes one CASE.": two and arguments.sweep,
        "--baseline takes one CASE: two are compared with each other.": two and arguments.baseline,
        "--margin belongs to a comparison of two CASEs.": not two and arguments.margin is not None,
        "--svg belongs to --sweep.": arguments.svg and not arguments.sweep,
    }
    for message, is_wrong in contradictions.items():
        if is_wrong:
            raise UsageError(message)
    for pairs in (arguments.set, arguments.sweep):
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"The parameter {name!r} is given twice.")
    for name in dict(arguments.set):
        if name in dict(arguments.sweep):
            raise UsageError(f"The parameter {name!r} is both in --set and in --sweep.")


def _measure(builders: list[CaseBuilder], arguments: argparse.Namespace, options: dict[str, Any]) -> Result:
    parameters = dict(arguments.set)
    if arguments.sweep:
        return _sweep(builders[0], arguments, options)
    cases = [builder.build(**parameters) for builder in builders]
    with _narration(arguments.verbose) as say:
        if len(cases) == 1:
            from nearpeak.measure.bench import bench

            return bench(cases[0], progress=say, **options)
        from nearpeak.measure.compare import compare

        margin = {} if arguments.margin is None else {"margin": arguments.margin}
        return compare(cases[0], cases[1], progress=say, **margin, **options)


def _sweep(builder: CaseBuilder, arguments: argparse.Namespace, options: dict[str, Any]) -> Sweep:
    from nearpeak.measure.sweep import sweep

    grid = {**{name: [value] for name, value in arguments.set}, **dict(arguments.sweep)}
    with _narration(arguments.verbose) as say:
        if arguments.verbose or say is None:
            return sweep(builder, grid, progress=say, **options)
        # On a terminal the line is drawn between points only: nothing runs beside what is timed.
        line = say
        return sweep(
            builder,
            grid,
            point=lambda done, count, parameters: line(f"{done}/{count}  {builder.name} {parameters}"),
            **options,
        )


@contextlib.contextmanager
def _narration(verbose: bool) -> Iterator[Callable[[str], None] | None]:
    """A function that shows progress: lines with --verbose, one line that is replaced on a terminal, otherwise None."""
    stream = sys.stderr
    if verbose:
        yield lambda line: print(printable(line), file=stream, flush=True)
    elif stream.isatty():
        try:
            yield lambda line: print(f"\r\x1b[2K{printable(line)[:79]}", end="", file=stream, flush=True)
        finally:
            print("\r\x1b[2K", end="", file=stream, flush=True)
    else:
        yield None


def _show(result: Result, arguments: argparse.Namespace, baseline: Sweep | None) -> None:
    """Print the result as text, or as JSON alone, and write the requested files."""
    from nearpeak.measure.results import as_json, as_sweep, compare_to_baseline, save
    from nearpeak.measure.timing import Comparison, Sweep
    from nearpeak.render.text import text
    from nearpeak.render.views import sweep as render_sweep
    from nearpeak.render.views import timing as render_timing

    if arguments.json == "-":
        print_text(json.dumps(as_json(result), indent=1, allow_nan=False))
    else:
        if isinstance(result, Sweep):
            print_text(text(render_sweep.document(result)))
        elif isinstance(result, Comparison):
            print_text(text(render_timing.comparison_document(result)))
        else:
            print_text(text(render_timing.document(result)))
        if arguments.json is not None:
            save(result, arguments.json)
            narrate(f"wrote {arguments.json}")
    if arguments.svg is not None and isinstance(result, Sweep):
        write_file(arguments.svg, render_sweep.svg(result))
    if baseline is not None:
        beside = text(render_sweep.baseline_document(compare_to_baseline(as_sweep(result), baseline)))
        if arguments.json == "-":
            narrate(beside)
        else:
            print_text(f"\n{beside}")


def _judge(result: Result, *, strict: bool) -> int:
    """The exit code; with `strict`, raises an error that explains grades C and F."""
    from nearpeak.measure.timing import Comparison, Sweep

    timings: tuple[Timing, ...]
    if isinstance(result, Sweep):
        timings = result.timings
        if not timings:
            raise CaseError(f"No point of the sweep could be measured. {next(iter(result.failures.values()))}")
    else:
        timings = (result.a, result.b) if isinstance(result, Comparison) else (result,)
    doubtful = [timing for timing in timings if timing.grade in ("C", "F")]
    if strict and doubtful:
        from nearpeak.measure.bench import explain

        sys.stdout.flush()
        raise UntrustworthyMeasurement("\n".join(explain(timing) for timing in doubtful))
    wrong = any(timing.grade == "F" for timing in timings)
    return UNTRUSTWORTHY if wrong or result.partial else 0


def _selftest(arguments: argparse.Namespace) -> int:
    from nearpeak._records import to_json
    from nearpeak.measure import selftest
    from nearpeak.render.views import selftest as render

    speaks = arguments.verbose or not sys.stderr.isatty()  # it takes minutes: a log shows lines too
    with contextlib.redirect_stdout(sys.stderr), _narration(speaks) as say:
        report = selftest.run(arguments.experiment, quick=arguments.quick, progress=say)
    if arguments.json is not None:
        content = json.dumps({"nearpeak": "selftest", **to_json(report)}, indent=1, allow_nan=False)
        if arguments.json == "-":
            print_text(content)
        else:
            write_file(arguments.json, content + "\n")
    if arguments.json != "-":
        print_text(render.text(report))
    return 0 if report.passed else UNTRUSTWORTHY
