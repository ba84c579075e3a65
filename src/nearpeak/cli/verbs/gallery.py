"""Worked examples of performance, run on this machine, with predictions beside measurements.

Without a NAME all are run, one after the other. With --on they are predicted for a machine of the catalogue, and
nothing is measured. `-o` writes one example with its pictures as .html, .md, .svg (its first picture) or .txt, or any
number of them as pages in a folder.

examples:
  nearpeak gallery --list
  nearpeak gallery
  nearpeak gallery ridge
  nearpeak gallery ridge -o ridge.html
  nearpeak gallery ridge timing --on h100-sxm
  nearpeak gallery ridge --on h100-sxm --derate 1
  nearpeak gallery --json results.json -o pages/
  nearpeak gallery ridge --source
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nearpeak._display import StatusLine
from nearpeak.cli.argument_types import derating
from nearpeak.cli.output import narrate, print_text, terminal_style, write_file
from nearpeak.errors import UntrustworthyMeasurement, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nearpeak.gallery.parts import ExampleResult

ENDINGS = (".html", ".md", ".svg", ".txt")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="an example (all)")
    parser.add_argument("--list", action="store_true", help="names and titles, and run nothing")
    parser.add_argument("--source", action="store_true", help="the text of the examples, and run nothing")
    parser.add_argument("--on", metavar="MACHINE", help="predict for a machine of the catalogue, and measure nothing")
    parser.add_argument(
        "--derate",
        type=derating,
        metavar="FACTORS",
        help="with --on: the datasheet's figures times 0.9, or by memory=0.9,matrix=0.7,vector=0.9; 1: the datasheet",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit code 1 if a prediction is outside of its band, 3 if that is doubtful"
    )
    output = parser.add_argument_group("results")
    output.add_argument("-o", "--output", metavar="FILE", help="write the page with its pictures; a folder for several")
    output.add_argument("--json", metavar="FILE", help="also write JSON to FILE; - writes JSON alone to stdout")


def run(arguments: argparse.Namespace) -> int:
    """Run examples and show them."""
    from nearpeak._records import to_json
    from nearpeak.gallery import NAMES, pages
    from nearpeak.gallery import run as gallery_run

    names = arguments.names or NAMES
    for name in names:
        gallery_run.title_and_lesson(name)  # a name that is wrong is said before anything is run
    if arguments.list:
        print_text(_list(names))
        return 0
    if arguments.source:
        print_text("\n\n".join(gallery_run.example_source(name) for name in names))
        return 0
    _check_output(arguments.output, len(names))
    if arguments.derate and not arguments.on:
        raise UsageError("--derate belongs to --on: what this machine reaches is measured.")
    here = gallery_run.make_context(arguments.on, progress=_narrate, factors=arguments.derate)
    results = []
    for name in names:
        number = NAMES.index(name) + 1
        narrate(f"{number}. {gallery_run.title_and_lesson(name)[0]}")
        results.append(gallery_run.run_example(name, here))
        if arguments.json != "-":
            print_text(pages.text(results[-1], terminal_style(sys.stdout)) + "\n")
    if len(results) > 1 and arguments.json != "-":
        print_text(_summary(results))
    if arguments.output:
        _write(results, arguments.output)
    if arguments.json:
        content = json.dumps([to_json(result) for result in results], indent=1)
        if arguments.json == "-":
            print_text(content)
        else:
            write_file(arguments.json, content + "\n")
    missed = [result for result in results if result.missed]
    if not arguments.check or not missed:
        return 0
    return 1 if any(not result.doubts for result in missed) else UntrustworthyMeasurement.exit_code


def _narrate(line: str) -> None:
    """What belongs to an example stands under its title."""
    narrate(line if isinstance(line, StatusLine) else f"  {line}")


def _list(names: Sequence[str]) -> str:
    from nearpeak.gallery import NAMES
    from nearpeak.gallery import run as gallery_run
    from nearpeak.render.text import elide, table

    room = 80 - len("19") - max(map(len, names)) - 4
    rows = [[f"{NAMES.index(name) + 1}", name, elide(gallery_run.title_and_lesson(name)[0], room)] for name in names]
    return table(["", "name", "title"], rows, "rll")


def _summary(results: Sequence[ExampleResult]) -> str:
    from nearpeak.gallery.pages import verdict
    from nearpeak.render.text import table
    from nearpeak.units import seconds

    rows = [[result.name, seconds(result.seconds), result.skipped or verdict(result)] for result in results]
    rows.append(["all", seconds(sum(result.seconds for result in results)), ""])
    return table(["", "took", "predictions"], rows, "lrl")


def _check_output(output: str | None, number: int) -> None:
    if output is None:
        return
    ending = Path(output).suffix.lower()
    if number > 1 and ending:
        raise UsageError(f"-o {output}: several examples are written to a folder. Give one name, or a folder.")
    if ending and ending not in ENDINGS:
        raise UsageError(f"-o {output}: an example is written as one of {', '.join(ENDINGS)}, or to a folder.")


def _write(results: Sequence[ExampleResult], output: str) -> None:
    from nearpeak.gallery import pages
    from nearpeak.render.html.document import document_page

    if not Path(output).suffix:
        try:
            Path(output).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"Cannot make the folder {output}: {error.strerror or error}.") from None
        for result in results:
            write_file(str(Path(output) / f"{result.name}.html"), document_page(pages.document(result)))
        return
    (result,) = results
    ending = Path(output).suffix.lower()
    if ending == ".html":
        write_file(output, document_page(pages.document(result)))
    elif ending == ".txt":
        write_file(output, pages.text(result) + "\n")
    elif ending == ".svg":
        pictures = pages.document(result).pictures
        if not pictures:
            raise UsageError(f"-o {output}: this example has no picture. It is written as .html, .md or .txt.")
        write_file(output, pictures[0].svg)
    else:
        beside = Path(output).parent

        def kept(name: str, svg: str) -> str:
            write_file(str(beside / f"{name}.svg"), svg)
            return f"{name}.svg"

        content = f"# {result.number}. {result.title}\n\n{result.lesson}\n\n" + pages.markdown(result, kept)
        write_file(output, content)
