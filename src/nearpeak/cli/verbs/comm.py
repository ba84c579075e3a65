"""Time collectives where a job runs, against the link, and inside of training steps.

torchrun starts the ranks; NCCL carries the data on GPUs, gloo on processors.
Every result is checked. The time of a call is that of its slowest rank; bus
bandwidth has the factors of nccl-tests. Each curve is fitted as latency and
bandwidth by size, which `nearpeak plan ... --comm comm.json` uses.

examples:
  torchrun --nproc-per-node 8 -m nearpeak comm
  torchrun --nproc-per-node 8 -m nearpeak comm --op all_reduce --dtype bfloat16
  torchrun --nproc-per-node 4 -m nearpeak comm --mesh 2x2 --bytes 64k..64m*4
  torchrun --nproc-per-node 8 -m nearpeak comm --patterns -o comm.html --json comm.json
  nearpeak comm --ranks 2        (two ranks on this machine, started by torchrun's own code)
  nearpeak comm --from comm.json -o comm.html

Ends with 1 if a result is wrong, and with 4 if a rank dies or does not come to
a call within --timeout: the others say which call, and which ranks are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearpeak.cli.argument_types import share, values
from nearpeak.cli.output import json_text, narrate, print_text, terminal_style, write_file
from nearpeak.cli.verbs.plan import whole_number
from nearpeak.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from nearpeak.comm.result import CommRun

WRONG_RESULT = 1


def mesh_shape(text: str) -> tuple[int, ...]:
    """The lengths of a mesh.

    >>> mesh_shape("2x4")
    (2, 4)
    """
    parts = text.lower().split("x")
    if not all(part.isdecimal() and 1 <= len(part) <= 6 and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh, such as 2x4")
    return tuple(map(int, parts))


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = parser.add_argument_group("what is timed")
    what.add_argument(
        "--op", action="append", default=[], metavar="NAME", help="all_reduce, ...; may be repeated (all)"
    )
    what.add_argument(
        "--bytes",
        type=values,
        metavar="SIZES",
        help="as 64m, or a range (1k..64m*4 with gloo, 1k..16g*4 with NCCL, as far as memory allows)",
    )
    what.add_argument("--dtype", action="append", default=[], metavar="NAME", help="may be repeated (float32)")
    what.add_argument("--mesh", type=mesh_shape, default=(), metavar="AxB", help="also every dimension of this mesh")
    what.add_argument(
        "--patterns",
        action="store_true",
        help="also run data parallel, FSDP2, tensor parallel and expert steps: what is hidden and what is exposed",
    )
    how = parser.add_argument_group("how it is timed")
    how.add_argument("--backend", metavar="NAME", help="gloo or nccl (nccl where there are GPUs)")
    how.add_argument("--precision", type=share, default=0.05, help="stop at this half-width of the interval (5%%)")
    how.add_argument("--max-seconds", type=float, default=0.5, metavar="S", help="for each point (0.5)")
    how.add_argument("--timeout", type=float, default=20.0, metavar="S", help="of one call, then ranks are named (20)")
    how.add_argument("--ranks", type=whole_number, metavar="N", help="start so many ranks here, without torchrun")
    output = parser.add_argument_group("results, from rank 0")
    output.add_argument("--from", dest="saved", metavar="FILE", help="show what --json saved, and measure nothing")
    output.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="write .html, .svg, .md, .csv, .json or .txt; may be repeated",
    )
    output.add_argument("--json", metavar="FILE", help="also write JSON to FILE; - writes JSON alone to stdout")


def run(arguments: argparse.Namespace) -> int:
    """Measure on all ranks, and print on rank 0."""
    _check(arguments)
    if arguments.saved is not None:
        from nearpeak.comm.result import load_run

        return _show(load_run(arguments.saved), arguments)
    if arguments.ranks is not None:
        from nearpeak.comm.world import launch

        return launch(arguments.ranks, [sys.executable, "-m", "nearpeak", *without_ranks(arguments.given)])
    from nearpeak.comm.collectives import check_dtype
    from nearpeak.comm.sweep import SweepOptions, measure_collectives
    from nearpeak.comm.world import check_mesh, join

    chosen: dict[str, Any] = {"ops": tuple(arguments.op)} if arguments.op else {}
    if arguments.dtype:
        chosen["dtypes"] = tuple(dict.fromkeys(arguments.dtype))
    for name in arguments.dtype:
        check_dtype(name)
    options = SweepOptions(
        sizes=tuple(arguments.bytes or ()),
        mesh=arguments.mesh,
        precision=arguments.precision,
        max_seconds=arguments.max_seconds,
        patterns=arguments.patterns,
        **chosen,
    )
    with join(arguments.backend, arguments.timeout) as world:
        is_first = world.rank == 0
        try:
            check_mesh(arguments.mesh, world.size)
        except UsageError as error:
            if is_first:
                raise
            return error.exit_code  # said once
        # what libraries print goes to stderr: stdout is for the result
        with contextlib.redirect_stdout(sys.stderr):
            result = measure_collectives(world, options, narrate if is_first else _say_nothing)
    return _show(result, arguments) if is_first else _exit_code(result)


def _exit_code(result: CommRun) -> int:
    wrong_patterns = [each for each in result.patterns if not each.problem and not each.is_right]
    return WRONG_RESULT if result.wrong_points() or wrong_patterns else 0


def without_ranks(words: Sequence[str]) -> list[str]:
    """A command line without --ranks, for the ranks themselves.

    >>> without_ranks(["comm", "--ranks", "2", "--op", "reduce"]), without_ranks(["comm", "--ranks=2"])
    (['comm', '--op', 'reduce'], ['comm'])
    """
    rest = [word for word in words if not word.startswith("--ranks=")]
    if "--ranks" in rest:
        place = rest.index("--ranks")
        del rest[place : place + 2]
    return rest


def _say_nothing(line: str) -> None:
    """Progress is that of rank 0."""


def _check(arguments: argparse.Namespace) -> None:
    """UsageError for what cannot be measured, before ranks meet."""
    from nearpeak.comm.fit import BYTES_OF
    from nearpeak.render.report import DOCUMENT_FORMATS

    for op in arguments.op:
        if op not in BYTES_OF:
            raise UsageError(f"--op {op!r} is not a collective. {did_you_mean(op, BYTES_OF)}")
    for path in arguments.output:
        if Path(path).suffix.lower() not in (*DOCUMENT_FORMATS, ".json"):
            raise UsageError(f"{path}: a run is written as one of {', '.join(DOCUMENT_FORMATS)}, .json.")
        if not Path(path).parent.is_dir():
            raise UsageError(f"{path} cannot be written: there is no folder {Path(path).parent}.")
    sizes = arguments.bytes or []
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise UsageError("--bytes: every size is a whole number above 0, such as 64m or 1k..1g*4.")
    for name in ("timeout", "max_seconds", "precision"):
        if not getattr(arguments, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be above 0.")
    if arguments.ranks is not None and arguments.ranks < 1:
        raise UsageError(f"--ranks {arguments.ranks}: must be at least 1.")


def _show(result: CommRun, arguments: argparse.Namespace) -> int:
    """Prints the result, writes the files, and returns the exit code."""
    from nearpeak.comm.result import as_json
    from nearpeak.render.report import DOCUMENT_FORMATS, document_ending
    from nearpeak.render.text import text
    from nearpeak.render.views.comm import document

    report = document(result)
    endings = {path: document_ending(path, report) for path in arguments.output}
    data = json_text(as_json(result))
    if arguments.json == "-":
        print_text(data)
    else:
        if arguments.json:
            write_file(arguments.json, data + "\n")
        print_text(text(report, terminal_style(sys.stdout)))
    for path, ending in endings.items():
        write_file(path, data + "\n" if ending == ".json" else DOCUMENT_FORMATS[ending](report, None))
    return _exit_code(result)
