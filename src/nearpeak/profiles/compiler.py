"""`CompilerFacts`: what torch.compile did in a run, as plain data; part of a saved profile."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

MAX_REASON_LENGTH = 200


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
    """What was compiled since the process began, up to the clean steps; and what of it the step runs into."""

    graphs: int
    """How many graphs were made."""
    breaks: tuple[GraphBreak, ...]
    """Of the code that ran in the profiled step; the most frequent first."""
    recompiled_in_steps: int
    """Graphs that were made after the first warm-up, when a run has all that it needs."""


def compiled_graph_count() -> int:
    """How many graphs torch.compile has made in this process."""
    module = sys.modules.get("torch._dynamo.utils")
    return int(module.counters["stats"]["unique_graphs"]) if module is not None else 0


def read_compiler_facts(warm: int) -> CompilerFacts | None:
    """What torch.compile did so far, where `warm` graphs were there when the run was warm; None if it did nothing.

    Which breaks the step has is known when one was profiled: see `breaks_in`.
    """
    graphs = compiled_graph_count()
    if graphs == 0:
        return None
    return CompilerFacts(graphs=graphs, breaks=(), recompiled_in_steps=max(0, graphs - warm))


def graph_breaks_in(regions: Collection[str]) -> tuple[GraphBreak, ...]:
    """Where compiled code that ran leaves its graphs, whenever it was compiled; the most frequent first.

    torch keeps the breaks of all code that the process compiled, with their lines. Those lines count that belong to
    functions behind `regions`, which are named as in the profiler: "Torch-Compiled Region: 0/1". Where torch does not
    tell what is behind them, all breaks count.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None or not regions:
        return ()
    codes = _code_of_regions(regions)
    lines = {(code.co_filename, line) for code in codes or () for _, _, line in code.co_lines()}
    found = Counter(
        _reason_and_line(reason)
        for reason in getattr(utils, "graph_break_reasons", ())
        if codes is None or _compiled_line(reason.user_stack) in lines
    )
    return tuple(
        GraphBreak(reason=reason, source=source, count=count) for (reason, source), count in found.most_common()
    )


def _code_of_regions(regions: Collection[str]) -> list[CodeType] | None:
    """The functions, and their parts that go on after a break, whose compiled code has these names; None if unknown."""
    tracker = getattr(sys.modules.get("torch._dynamo.convert_frame"), "input_codes", None)
    entries = getattr(sys.modules.get("torch._C._dynamo.eval_frame"), "_debug_get_cache_entry_list", None)
    if tracker is None or entries is None:
        return None
    codes = [code for reference in tracker.seen if (code := reference()) is not None]
    return [code for code in codes if any(entry.trace_annotation in regions for entry in entries(code))]


def _compiled_line(stack: Sequence[Any]) -> tuple[str, int] | None:
    """The line in the function that was compiled, which is the outermost one of a break.

    torch compiles calls of its own modules from a function of its own, the same for all of them: the function that such
    a module calls is compiled by itself after a break.
    """
    folder = f"{Path(str(sys.modules['torch'].__file__)).parent}/"
    frames = [frame for frame in stack if not frame.filename.startswith(folder)] or stack
    return (frames[0].filename, frames[0].lineno) if frames else None


def _reason_and_line(reason: Any) -> tuple[str, str]:
    """The first line of the reason and the innermost line of the code, of an entry of torch's list."""
    said = " ".join((str(reason.reason).strip().splitlines() or [""])[0].split())[:MAX_REASON_LENGTH]
    stack = reason.user_stack
    return said, f"{Path(stack[-1].filename).name}:{stack[-1].lineno}" if stack else ""
