"""nearpeak in a notebook: `%load_ext nearpeak` gives the magics, `progress` lines that update in place.

Results show themselves by `_repr_html_`, with or without the extension. IPython is no dependency: what is used of it is
imported with the extension, when IPython itself asks for it.
"""

from __future__ import annotations

import os
from typing import Any

from nearpeak.notebook.magic import Magics
from nearpeak.notebook.plain import PLAIN
from nearpeak.notebook.progress import progress

__all__ = ["load_ipython_extension", "progress"]


def load_ipython_extension(shell: Any) -> None:
    """Registers `%nearpeak` and `%%nearpeak`, and how results are shown where there is only text."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would write its own starts and stops into the output
    magics = Magics(shell)
    shell.register_magic_function(magics.line, magic_kind="line", magic_name="nearpeak")
    shell.register_magic_function(magics.cell, magic_kind="cell", magic_name="nearpeak")
    formatter = shell.display_formatter.formatters["text/plain"]
    for (module, name), show in PLAIN.items():
        formatter.for_type_by_name(module, name, show)
