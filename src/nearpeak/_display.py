"""How a result shows itself: `card` gives its HTML for a notebook, `write` writes it to a file.

Results are data, and the code that renders them is above them in the order of imports. `nearpeak/__init__.py`, which is
imported before any other module, sets both functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

card: Callable[[Any], str]
write: Callable[[Any, str | Path], None]
