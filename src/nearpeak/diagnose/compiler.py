"""`CompilerFacts`: what torch.compile did in a run, as plain data; part of a saved profile."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST_REASON = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """Where torch.compile had to leave a graph and begin another one."""

    reason: str
    """The first line of what it says."""
    source: str
    """The line of the user's code; "" where it is not known."""
    count: int
    """How often it was met while code was compiled; not how often it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerFacts:
    """Counts since the process began, up to the clean steps."""

    graphs: int
    """How many graphs were made."""
    breaks: tuple[GraphBreak, ...]
    """The most frequent first."""
    recompiled_in_steps: int
    """Graphs that were made after the first warm-up, when a run has all that it needs."""


def graphs_so_far() -> int:
    """How many graphs torch.compile has made in this process."""
    module = sys.modules.get("torch._dynamo.utils")
    return int(module.counters["stats"]["unique_graphs"]) if module is not None else 0


def compiler_facts(warm: int) -> CompilerFacts | None:
    """What torch.compile did so far, where `warm` graphs were there when the run was warm; None if it did nothing."""
    graphs = graphs_so_far()
    if graphs == 0:
        return None
    found = Counter(map(_break, getattr(sys.modules["torch._dynamo.utils"], "graph_break_reasons", ())))
    return CompilerFacts(
        graphs=graphs,
        breaks=tuple(
            GraphBreak(reason=reason, source=source, count=count) for (reason, source), count in found.most_common()
        ),
        recompiled_in_steps=max(0, graphs - warm),
    )


def _break(reason: Any) -> tuple[str, str]:
    """The first line of the reason and the innermost line of the code, of an entry of torch's list."""
    said = " ".join((str(reason.reason).strip().splitlines() or [""])[0].split())[:LONGEST_REASON]
    stack = reason.user_stack
    return said, f"{Path(stack[-1].filename).name}:{stack[-1].lineno}" if stack else ""
