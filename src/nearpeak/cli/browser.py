"""A report in the user's browser: a file that is opened, and nothing that listens."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from nearpeak.cli.output import narrate
from nearpeak.errors import EnvironmentProblem

if TYPE_CHECKING:
    from nearpeak.diagnose.profile import Profile
    from nearpeak.render.report import Choices

MOST = 10
"""Reports that are left in the cache folder."""


def own_page(profile: Profile, choices: Choices) -> Path:
    """The HTML report in the cache folder, for who named no file. Two different ones never share a name."""
    from nearpeak.files import replace_file
    from nearpeak.machines import store
    from nearpeak.render.report import content

    made = content(profile, "html", choices)
    folder = store.folder() / "reports"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(profile.source).stem)[:40].strip("-.") or "step"
    path = folder / f"{name}-{hashlib.sha256(made).hexdigest()[:10]}.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, made)
        files = sorted(folder.glob("*.html"), key=lambda file: file.stat().st_mtime, reverse=True)
        for old in files[MOST:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"{folder} cannot be written: {error.strerror or error}. -o FILE.html puts the report elsewhere."
        ) from None
    return path


def open_page(path: Path) -> None:
    """Opens a file in the browser; where there is none, says where the file is."""
    address = path.absolute().as_uri()
    if _has_screen() and webbrowser.open(address):
        narrate(f"opened {address}")
    else:
        narrate(f"There is no browser to open here. The report is {address}")


def _has_screen() -> bool:
    """Whether a browser can show something. Without a screen, a browser for terminals would take this one over."""
    if sys.platform in ("darwin", "win32") or os.environ.get("BROWSER"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
