"""Judge a kernel: is it right, is it honest, how fast is it, and how near the limit.

CANDIDATE and the reference are FILE.py:FUNCTION, or FILE.py:CLASS for modules. The file of the reference has a function
`inputs` that draws the arguments; its integer parameters with defaults are the sizes, which are varied. The candidate
runs in a process of its own. Its results are compared with the reference in float64, on other sizes, values and strides
too; its times are taken in turns with those of the reference, torch.compile of it, and nearpeak's kernel where there is
one.

--suite DIR judges every folder of DIR that has a reference.py: each other .py in it is a candidate.

examples:
  nearpeak judge candidate.py:softmax --against reference.py:softmax
  nearpeak judge candidate.py:softmax --against reference.py:softmax --size rows=64,columns=8k -o verdict.html
  nearpeak judge candidate.py:softmax --against reference.py:softmax --device cpu --json -
  nearpeak judge --suite tasks

Ends with 0 when the candidate is accepted, and with 1 when it is wrong or dishonest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from nearpeak.cli.argument_types import assignment
from nearpeak.cli.output import narrate, print_result, terminal_style, write_file
from nearpeak.errors import UsageError

if TYPE_CHECKING:
    from nearpeak.judging.judgement import Judgement, SuiteJudgement
    from nearpeak.render.document import Document

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
"""They are there where a GPU is."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("candidate", metavar="CANDIDATE", nargs="?", help="FILE.py:FUNCTION")
    parser.add_argument("--against", metavar="REFERENCE", help="FILE.py:FUNCTION of the reference in plain torch")
    parser.add_argument("--suite", metavar="DIR", help="judge the candidates of a folder of tasks")
    what = parser.add_argument_group("what is judged")
    what.add_argument(
        "--inputs", metavar="FILE.py:FUNCTION", help="draws the inputs (`inputs` in the reference's file)"
    )
    what.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=N,...",
        help="sizes to judge and time at, in place of the defaults of `inputs`; may be repeated",
    )
    what.add_argument("--device", choices=("cpu", "cuda"), help="where it runs (the GPU where there is one)")
    what.add_argument(
        "--mutates", action="append", default=[], type=int, metavar="N", help="tensor N of the inputs may be changed"
    )
    what.add_argument("--no-times", action="store_true", help="check that it is right and honest, and take no times")
    what.add_argument("--no-compile", action="store_true", help="do not time torch.compile of the reference")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds until a call has hung (60)")
    limits.add_argument(
        "--max-seconds", type=float, default=10.0, metavar="S", help="for checks and for times, each (10)"
    )
    limits.add_argument(
        "--budget",
        type=float,
        metavar="S",
        help="for everything (27 on a CPU, 55 on a GPU); notes say what is left out",
    )
    limits.add_argument("--memory", type=float, metavar="GIB", help="memory that a call may allocate")
    limits.add_argument(
        "--sanitize", choices=("memcheck", "racecheck"), help="also run a call under compute-sanitizer, on a GPU"
    )
    limits.add_argument("--seed", type=int, help="repeat a judgement; otherwise nobody knows the inputs before")
    output = parser.add_argument_group("results")
    output.add_argument(
        "-o", "--output", action="append", default=[], metavar="FILE", help="a report as .html, .md, .txt or .json"
    )
    output.add_argument("--json", metavar="FILE", help="also write JSON to FILE; - writes JSON alone to stdout")


def run(arguments: argparse.Namespace) -> int:
    """Judge, print the verdict, and end with its exit code."""
    _refuse_contradictions(arguments)
    options: dict[str, Any] = {
        "inputs": arguments.inputs,
        "sizes": [_sizes(text) for text in arguments.size],
        "device": arguments.device,
        "timeout": arguments.timeout,
        "max_seconds": arguments.max_seconds,
        "budget": arguments.budget,
        "compile_reference": not arguments.no_compile,
        "timed": not arguments.no_times,
        "mutates": arguments.mutates,
        "sanitize": arguments.sanitize,
        "memory_bytes": None if arguments.memory is None else int(arguments.memory * 2**30),
        "seed": arguments.seed,
        "progress": narrate,
    }
    result: Judgement | SuiteJudgement
    # stdout is for the result: what the reference prints goes to stderr.
    with contextlib.redirect_stdout(sys.stderr):
        from nearpeak.judging.channel import start_server

        # It imports torch while this process does.
        start_server("cpu" if arguments.device == "cpu" or not any(map(os.path.exists, GPU_FILES)) else "cuda")
        from nearpeak.judging.judge import judge, judge_suite
        from nearpeak.render.results import document_of

        if arguments.suite:
            result = judge_suite(arguments.suite, **options)
        else:
            result = judge(arguments.candidate, against=arguments.against, **options)
    _show(result, document_of(result), arguments)
    return 0 if result.is_accepted else 3 if result.is_undecided else 1


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    if arguments.suite and (arguments.candidate or arguments.against):
        raise UsageError("--suite takes neither a CANDIDATE nor --against: the folder has both.")
    if not arguments.suite and not (arguments.candidate and arguments.against):
        raise UsageError(
            "Give a CANDIDATE and its reference, as in `nearpeak judge candidate.py:softmax --against "
            "reference.py:softmax`, or --suite DIR."
        )
    for name in ("timeout", "max_seconds", "budget", "memory"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < 1e6:
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: expected a number above 0.")


def _sizes(text: str) -> dict[str, int]:
    sizes = {}
    for part in text.split(","):
        try:
            name, value = assignment(part)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"--size {text}: {error}.") from None
        if type(value) is not int:
            raise UsageError(f"--size {text}: {name} is {value!r}, and a size is a whole number.")
        sizes[name] = value
    return sizes


def _show(result: Judgement | SuiteJudgement, document: Document, arguments: argparse.Namespace) -> None:
    from nearpeak._records import to_json
    from nearpeak.render.report import DOCUMENT_FORMATS, document_ending
    from nearpeak.render.text import text

    endings = {path: document_ending(path, document) for path in arguments.output}
    print_result(text(document, terminal_style(sys.stdout)), result, arguments.json)
    for path, ending in endings.items():
        if ending == ".json":
            write_file(path, json.dumps(to_json(result), indent=1) + "\n")
        else:
            write_file(path, DOCUMENT_FORMATS[ending](document, None))
