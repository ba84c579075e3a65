"""Where results go: text or JSON to stdout, files where the user said, narration to stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nearpeak.errors import UsageError


def narrate(line: str) -> None:
    """Tells what is being done."""
    print(line, file=sys.stderr, flush=True)


def write_file(destination: str, content: str) -> None:
    """Writes a file that the user asked for, and says so."""
    try:
        Path(destination).write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot write {destination}: {error.strerror or error}.") from None
    narrate(f"wrote {destination}")


def show(text: str, value: Any, destination: str | None) -> None:
    """Prints a result as text, and writes it as JSON where that was asked for; to "-" it is JSON alone."""
    from nearpeak.records import to_json

    if destination:
        content = json.dumps(to_json(value), indent=1)
        if destination == "-":
            print(content)
            return
        write_file(destination, content + "\n")
    print(text)
