"""`page`: a profile as one HTML file that works without a network."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources

from nearpeak.diagnose.finding import Finding
from nearpeak.diagnose.profile import Profile
from nearpeak.machines.model import Machine
from nearpeak.render.html import sections
from nearpeak.render.html.data import data_json
from nearpeak.render.html.markup import visible
from nearpeak.render.html.roofs import machine_of, roofs_of
from nearpeak.render.profile_findings import shown
from nearpeak.work.garbage import rarely_collected

SCRIPTS = (
    "units.js",
    "dom.js",
    "sorting.js",
    "model.js",
    "columns.js",
    "table.js",
    "filters.js",
    "axes.js",
    "roofs.js",
    "roofline.js",
    "icicle.js",
    "timeline_data.js",
    "timeline_paint.js",
    "timeline.js",
    "findings.js",
    "theme.js",
    "main.js",
)
"""In the order in which they are joined."""
_HOLE = re.compile(r"<!--hole:(\w+)-->")


def page(profile: Profile, *, machine: Machine | None = None, findings: Sequence[Finding] | None = None) -> str:
    """The report of a profile: verdict, waterfall, findings, timeline, roofline, modules, all ops, memory, machine.

    Args:
        profile: What to show.
        machine: The machine that its bounds are against, for the roofs; that of the catalogue where it is None.
        findings: Those to show; those that save enough where it is None.
    """
    with rarely_collected():  # a large profile makes many objects, and none of them garbage
        return _page(profile, machine, shown(profile) if findings is None else tuple(findings))


def _page(profile: Profile, machine: Machine | None, found: Sequence[Finding]) -> str:
    machine = machine_of(profile) if machine is None else machine
    roofs = roofs_of(profile, machine)
    holes = {
        "policy": html.escape(policy(), quote=True),
        "title": html.escape(f"{visible(profile.source, 80)} - nearpeak"),
        "style": style(),
        "head": sections.head(profile),
        "card": sections.card(profile, found),
        "waterfall": sections.waterfall(profile),
        "idle": sections.idle(profile),
        "findings": sections.findings_list(profile, found),
        "memory": sections.memory(profile),
        "machine": sections.machine_table(profile, machine, roofs),
        "measurement": sections.measurement(profile),
        "data": data_json(profile, found, roofs),
        "script": script(),
    }
    return _HOLE.sub(lambda hole: holes[hole.group(1)], asset("page.html"))


def policy() -> str:
    """The content security policy: this script, this style, and nothing from anywhere."""
    return (
        f"default-src 'none'; script-src '{hashed(script())}'; style-src '{hashed(style())}'; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def script() -> str:
    """All of the JavaScript, in a scope of its own."""
    parts = "\n".join(asset(name) for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}\nmain();\n}})();\n'


@cache
def style() -> str:
    """All of the CSS."""
    return asset("style.css")


def asset(name: str) -> str:
    """A file of the page as text."""
    return resources.files("nearpeak.render.html").joinpath("assets", name).read_text(encoding="utf-8")


def hashed(content: str) -> str:
    """A script or a style as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
