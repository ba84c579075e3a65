"""What the hardware allows for a case, op by op, without running it.

CASE is FILE.py:FUNCTION, as for `nearpeak bench`. Its inputs are built and its code is run on fake tensors: no GPU and
no memory for the weights is needed. --on names a machine of the catalogue; without it, it is this machine.

--trace FILE takes the ops from a file that torch.profiler wrote with record_shapes=True, on any machine; without --on,
the machine is the one that the file names.

examples:
  nearpeak estimate cases.py:softmax --on h100-sxm
  nearpeak estimate cases.py:softmax --set rows=64k --on mi300x --ceilings theoretical
  nearpeak estimate cases.py:softmax --on h100-sxm --derate memory=0.9,matrix=0.7
  nearpeak estimate cases.py:transformer_layer --on h100-sxm --intensities
  nearpeak estimate cases.py:transformer_layer --on h100-sxm --groups
  nearpeak estimate cases.py:transformer_layer --on h100-sxm --roofline layer.svg
  nearpeak estimate --trace step.json.gz
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nearpeak.cli.argument_types import assignment, derating, step_number
from nearpeak.cli.output import narrate, print_result, write_file
from nearpeak.errors import UsageError

if TYPE_CHECKING:
    from nearpeak.bound.estimate import Estimate
    from nearpeak.machines.machine import Machine

PICTURES = (".svg", ".png")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("case", metavar="CASE", nargs="?", help="FILE.py:FUNCTION")
    parser.add_argument(
        "--trace", metavar="FILE", help="a trace of torch.profiler, .json or .json.gz, instead of a case"
    )
    parser.add_argument(
        "--step", type=step_number, metavar="N", help="with --trace: the profiler's step, or all (the last)"
    )
    parser.add_argument("--on", metavar="NAME", help="a machine of the catalogue (this machine)")
    parser.add_argument(
        "--set", action="append", default=[], type=assignment, metavar="NAME=VALUE", help="a parameter of the case"
    )
    parser.add_argument("--ceilings", choices=("achievable", "theoretical"), default="achievable")
    parser.add_argument(
        "--derate",
        type=derating,
        metavar="FACTORS",
        help="the achievable ceilings: the datasheet's times 0.9, or by memory=0.9,matrix=0.7,vector=0.9",
    )
    output = parser.add_argument_group("results")
    output.add_argument("--top", type=int, default=12, help="how many rows a table has at most (12)")
    output.add_argument("--intensities", action="store_true", help="FLOPs, bytes and FLOP per byte of the ops")
    output.add_argument("--groups", action="store_true", help="ops that could run as one kernel, and what that saves")
    output.add_argument("--roofline", metavar="FILE", help="draw the ops under the machine's roofs, as .svg or .png")
    output.add_argument("--json", metavar="FILE", help="also write JSON to FILE; - writes JSON alone to stdout")


def run(arguments: argparse.Namespace) -> int:
    """Estimate the case and print the floors."""
    if arguments.roofline and Path(arguments.roofline).suffix.lower() not in PICTURES:
        raise UsageError(f"--roofline {arguments.roofline}: a picture is written as .svg or as .png.")
    if arguments.top < 1:
        raise UsageError(f"--top {arguments.top}: a table has at least one row.")

    if bool(arguments.case) == bool(arguments.trace):
        raise UsageError("Give a CASE (FILE.py:FUNCTION) or --trace FILE, one of the two.")

    result, machine = _from_file(arguments) if arguments.trace else _from_case(arguments)
    if arguments.roofline:
        _draw(result, machine, Path(arguments.roofline), arguments.case or arguments.trace)
    print_result(_text(result, machine, arguments), result, arguments.json)
    return 0


def _from_case(arguments: argparse.Namespace) -> tuple[Estimate, Machine]:
    from nearpeak.calibrate.machine import machine as find_machine
    from nearpeak.measure.case import case_errors, load
    from nearpeak.profiling.estimate import estimate
    from nearpeak.trace.fake import fake

    if arguments.step is not None:
        raise UsageError("--step belongs to --trace.")
    machine = _derated(find_machine(arguments.on, progress=narrate), arguments)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result: what the case prints goes to stderr
        builder = load(arguments.case)
        with fake():
            case = builder.build(**dict(arguments.set))
        with case_errors(arguments.case, "while it was traced"):
            return estimate(case, on=machine, ceilings=arguments.ceilings), machine


def _from_file(arguments: argparse.Namespace) -> tuple[Estimate, Machine]:
    from nearpeak.bound.estimate import estimate_trace
    from nearpeak.calibrate.machine import machine_of_file
    from nearpeak.trace.kineto.read import read_trace
    from nearpeak.trace.recorder import ops_on
    from nearpeak.units import seconds

    if arguments.set:
        raise UsageError("--set belongs to a CASE; a trace has no parameters.")
    recorded = read_trace(arguments.trace, step=arguments.step)
    machine = _derated(machine_of_file(arguments.trace, recorded.device, arguments.on), arguments)
    trace = dataclasses.replace(recorded.trace, ops=ops_on(machine, recorded.trace.ops))
    result = estimate_trace(trace, machine, ceilings=arguments.ceilings)
    measured = f"Measured on {recorded.device}: {seconds(recorded.wall_s)} in all"
    if recorded.kernels:
        measured += f", {seconds(sum(recorded.device_seconds.values()))} of it kernels"
    return dataclasses.replace(result, notes=(f"{measured}.", *result.notes)), machine


def _derated(machine: Machine, arguments: argparse.Namespace) -> Machine:
    from nearpeak.machines.catalogue import derate

    return machine if arguments.derate is None else derate(machine, arguments.derate)


def _text(result: Estimate, machine: Machine, arguments: argparse.Namespace) -> str:
    """The report, or the tables that were asked for below the floors."""
    from nearpeak.render.text import text
    from nearpeak.render.views.estimate import document

    intensities_on = machine if arguments.intensities else None
    return text(document(result, arguments.top, intensities_on=intensities_on, groups=arguments.groups))


def _draw(result: Estimate, machine: Machine, path: Path, case: str) -> None:
    from nearpeak.render.picture.png import png
    from nearpeak.render.picture.svg import svg
    from nearpeak.render.views.estimate import roofline

    scene = roofline(result, machine, title=f"Roofline of {case.rpartition('/')[2]}")
    write_file(str(path), png(scene) if path.suffix.lower() == ".png" else svg(scene))
