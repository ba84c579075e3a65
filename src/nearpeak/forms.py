"""Forms that a result takes of itself: a card in a notebook, a file.

What renders a result is above it, and imports go down only. This is the one place that reaches up: by name, and only
when a form is asked for.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


def card(result: Any) -> str:
    """The HTML that a notebook shows for a result."""
    html: str = import_module("nearpeak.render.notebook").card(result)
    return html


def write(result: Any, path: str | Path) -> None:
    """Writes a profile in the format that the file's name ends with."""
    import_module("nearpeak.render.report").write(result, path)
