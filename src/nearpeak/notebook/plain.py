"""Results as the text of the command line, for IPython in a terminal, which shows no HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def _shown_by(module: str) -> Callable[[Any, Any, bool], None]:
    """A printer for IPython. What renders the text is imported with the first result."""

    def show(result: Any, printer: Any, cycle: bool) -> None:
        printer.text(import_module(module).text(result))

    return show


PLAIN: Mapping[tuple[str, str], Callable[[Any, Any, bool], None]] = {
    ("nearpeak.measure.timing", "Timing"): _shown_by("nearpeak.render.timing"),
    ("nearpeak.bound.estimate", "Estimate"): _shown_by("nearpeak.render.estimate"),
    ("nearpeak.diagnose.profile", "Profile"): _shown_by("nearpeak.render.profile"),
}
"""By the module and the name of the result's class."""
