"""Provenance of the figures of a plan, and the weakest of several.

>>> fitted = Provenance(kind="fitted", text="240 rows of h100_sxm, h200_sxm")
>>> assumed = Provenance(kind="assumed", text="no rows between nodes")
>>> weakest(fitted, assumed).kind
'assumed'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ProvenanceKind = Literal["measured", "fitted", "datasheet", "transferred", "assumed"]
PROVENANCE_KINDS: tuple[str, ...] = get_args(ProvenanceKind)
"""From the strongest to the weakest: measured on this very machine; fitted on published rows of this GPU; from the
vendor's datasheet; fitted on another GPU, size or scale; assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """One of `PROVENANCE_KINDS`, with details."""

    kind: ProvenanceKind
    text: str

    @property
    def rank(self) -> int:
        """0 for the strongest."""
        return PROVENANCE_KINDS.index(self.kind)


def weakest(*provenances: Provenance) -> Provenance:
    """The weakest provenance, the first of several equally weak ones."""
    return max(provenances, key=lambda item: item.rank)
