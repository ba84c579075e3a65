"""One finding as a document."""

from __future__ import annotations

from nearpeak.profiles.finding import Finding
from nearpeak.render.document import Document
from nearpeak.render.text import elide_start
from nearpeak.render.views.profile import finding_blocks
from nearpeak.render.views.verdict import range_text
from nearpeak.units import percent, seconds


def document(finding: Finding) -> Document:
    """What is wasted, where, why, and what to write instead."""
    where = elide_start(finding.where, 60)
    places = f", {finding.places:,} places" if finding.places > 1 else ""
    return Document(
        title=f"{finding.rule} at {where}{places}",
        facts=(f"Predicted saving: {_saving(finding)}",),
        parts=tuple(finding_blocks(finding)),
    )


def _saving(finding: Finding) -> str:
    if finding.once_s:
        return finding.saving_text
    likely = range_text(finding.share)
    return f"{seconds(finding.saving_s)} a step, {percent(finding.share)} {likely}"
