"""Makes the model of a script faster while it runs: applies fixes, proves each, keeps what is right and faster.

Runs SCRIPT, or -m MODULE, with its arguments, finds its model and optimizer, and after some steps tries the fixes that
apply to them: each is verified against a float64 reference, and measured in turns with what is there without it. What
is wrong or not faster is rolled back, and the script goes on with the rest. Options go before SCRIPT.

The certificate of --json can be applied again without measuring (--apply, or nearpeak.fix_from in Python), and checked
on another machine (--verify). Fixes that change the numerics, such as tf32, are tried only if --only names them.

examples:
  nearpeak fix examples/train.py --steps 30
  nearpeak fix --json fix.json -o fix.html --without torch-compile train.py config.yaml
  nearpeak fix --apply fix.json train.py config.yaml
  nearpeak fix --verify fix.json --stop train.py config.yaml
"""

from __future__ import annotations

import argparse
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearpeak.cli.output import Streams, json_text, narrate, print_text, terminal_style, write_file
from nearpeak.errors import UsageError

if TYPE_CHECKING:
    from nearpeak.fixes.record import FixReport


PAGES = (".html", ".md", ".csv", ".txt")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="try this fix; may be repeated")
    parser.add_argument("--without", action="append", default=[], metavar="ID", help="leave this fix out")
    parser.add_argument("--list", action="store_true", help="list the fixes")
    parser.add_argument("--apply", metavar="FILE", help="apply a certificate without measuring again")
    parser.add_argument("--verify", metavar="FILE", help="verify and measure again what a certificate has")
    parser.add_argument("--require", action="store_true", help="exit code 1 if a site was found and not replaced")
    parser.add_argument("--stop", action="store_true", help="end the script when its model is fixed")
    parser.add_argument("-o", "--save", metavar="FILE", help="also write the report as .html, .md, .csv or .txt")
    parser.add_argument("--json", metavar="FILE", help="write the certificate to FILE; - prints it alone")
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="a module with its arguments; comes last"
    )
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a script")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's arguments")


def run(arguments: argparse.Namespace) -> int:
    """Fix the model of a script and print what became of it."""
    if arguments.list:
        from nearpeak.fixes.registry import all_fixes

        for each in all_fixes():
            asked = " (only if asked for: it changes the numerics)" if each.changes_numerics else ""
            print_text(f"{each.id:<20} {each.title}{asked}")
        return 0
    if arguments.module is not None and not arguments.module:
        raise UsageError("-m needs the name of a module.")
    if bool(arguments.script) == bool(arguments.module):
        raise UsageError("Give a SCRIPT or -m MODULE, one of them.")
    if arguments.apply and arguments.verify:
        raise UsageError("--apply and --verify exclude each other.")
    if arguments.save:
        if Path(arguments.save).suffix not in PAGES:
            raise UsageError(f"{arguments.save}: a report is written as one of {', '.join(PAGES)}.")
        arguments.save = str(Path(arguments.save).absolute())
    if arguments.json and arguments.json != "-":
        arguments.json = str(Path(arguments.json).absolute())  # the script may change the folder
    return _run_script(arguments)


def _run_script(arguments: argparse.Namespace) -> int:
    from nearpeak.fixes import engine, record
    from nearpeak.fixes.registry import fixes
    from nearpeak.fixes.script import fix_script
    from nearpeak.render import text as _text  # noqa: F401  # while modules are found where they are
    from nearpeak.render.views import fix as _view  # noqa: F401

    file = arguments.apply or arguments.verify
    saved = record.read(file) if file else None
    fixer: Any
    if saved is not None and arguments.apply:
        fixer = partial(engine.fix_from, saved)
    else:
        only = [each.id for each in saved.kept()] if saved is not None else arguments.only
        fixes(only, arguments.without)  # an unknown id is an error before the script runs
        fixer = partial(engine.fix, only=only, without=arguments.without, progress=narrate)
    module, *script_arguments = arguments.module or [None, *arguments.arguments]
    with ExitStack() as stack:
        if not arguments.ends_process:
            stack.enter_context(warnings.catch_warnings())
        warnings.filters[:] = [each for each in warnings.filters if each != arguments.own_filter]  # type: ignore[index]
        ran = fix_script(
            arguments.script,
            script_arguments,
            module=module,
            fixer=fixer,
            stop=arguments.stop,
            progress=narrate,
            ends_process=arguments.ends_process,
        )
    if ran.report is None:
        if ran.exit_code:
            narrate(f"nearpeak: the script ended with exit code {ran.exit_code}, and its model was not fixed.")
            return ran.exit_code
        raise UsageError(ran.problem)
    _show(ran.report, arguments.json, arguments.save)
    if ran.exit_code:
        return ran.exit_code
    if saved is not None and arguments.verify:
        missing = record.differences(saved, ran.report)
        for line in missing:
            narrate(f"nearpeak: {line}")
        return 1 if missing else 0
    skipped = list(ran.report.skipped())
    if arguments.require and skipped:
        narrate(f"nearpeak: {len(skipped)} sites were found and not replaced: {skipped[0].path} ({skipped[0].why}).")
        return 1
    return 0


def _show(report: FixReport, destination: str | None, page: str | None) -> None:
    from nearpeak.fixes.record import as_json
    from nearpeak.render.report import DOCUMENT_FORMATS
    from nearpeak.render.text import text
    from nearpeak.render.views.fix import document

    if page:
        write_file(page, DOCUMENT_FORMATS[Path(page).suffix](document(report, full=True), None))
    if destination == "-":
        print_text(json_text(as_json(report)))
        return
    if destination:
        write_file(destination, json_text(as_json(report)) + "\n")
    print_text(text(document(report), terminal_style(Streams.stdout())))
