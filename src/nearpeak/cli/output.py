"""Output of the command line: results as text or JSON on stdout, files, and progress on stderr."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nearpeak._files import replace_file
from nearpeak.errors import UsageError

if TYPE_CHECKING:
    from nearpeak.render.text import Style


def narrate(line: str) -> None:
    """Prints a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def terminal_style(stream: TextIO) -> Style:
    """Colors and block characters on a terminal that can show them; plain text for files and pipes.

    NO_COLOR (https://no-color.org) or TERM=dumb in the environment: no colors.
    """
    from nearpeak.render.text import Style

    terminal = stream.isatty()
    dumb = os.environ.get("TERM") == "dumb"
    encoding = (stream.encoding or "").lower().replace("-", "").replace("_", "")
    return Style(
        color=terminal and not dumb and not os.environ.get("NO_COLOR"),
        blocks=terminal and not dumb and encoding == "utf8",
    )


def write_file(destination: str, content: str) -> None:
    """Writes a file and names it on stderr."""
    path = Path(destination)
    try:
        if path.exists() and not path.is_file():  # write to a pipe or a terminal, do not replace it
            path.write_text(content, encoding="utf-8")
        else:
            replace_file(path, content.encode())
    except OSError as error:
        raise UsageError(f"Cannot write {destination}: {error.strerror or error}.") from None
    narrate(f"wrote {destination}")


def print_result(text: str, value: Any, destination: str | None) -> None:
    """Prints a result as text and writes it as JSON to `destination`; "-" prints JSON instead of text."""
    from nearpeak._records import to_json

    if destination == "-":
        print(json.dumps(to_json(value), indent=1))
        return
    print(text, flush=bool(destination))  # the text is printed even if the file cannot be written
    if destination:
        write_file(destination, json.dumps(to_json(value), indent=1) + "\n")
