"""Where an answer of `nearpeak plan` goes: text or JSON on stdout, or files by the ends of their names."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nearpeak.cli.output import show, style_of, write_file

if TYPE_CHECKING:
    from nearpeak.render.document import Document
    from nearpeak.render.plan.sliders import Sliders


def deliver(
    document: Document,
    answer: Any,
    arguments: argparse.Namespace,
    sliders: Callable[[], Sliders | None] = lambda: None,
) -> None:
    """Prints the answer, or writes it where -o says; `sliders` are made for a page alone."""
    from nearpeak.records import to_json
    from nearpeak.render.document import text
    from nearpeak.render.plan.report import content, format_of

    forms = {path: format_of(path, document) for path in arguments.output}
    if arguments.json or not forms:
        show(text(document, style_of(sys.stdout)), answer, arguments.json)
    for path, form in forms.items():
        if form == "json":
            write_file(path, json.dumps(to_json(answer), indent=1) + "\n")
        else:
            write_file(path, content(document, form, sliders() if form == "html" else None))
