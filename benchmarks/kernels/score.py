"""Results of random cells: how they are merged and scored, and the tables of them.

The ratio of a cell is the time of the fastest peer over that of nearpeak: 1 is a tie, more is faster. Cells without a
peer are counted apart. A cell is short if nearpeak or the fastest peer takes less than 10 us, where a few hundred
nanoseconds of a launch decide. A result is wrong if its error is above the limit of its row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.kernels.jobs import LATE
from benchmarks.markdown_table import table

Row = Mapping[str, Any]
FORMAT = "kernels random 1"
TUNING_SEEDS = tuple(range(1, 100))
"""Seeds whose cells kernels and choices may be tuned on. A published table has other seeds."""
AS_FAST, SLOW, SHORT_SECONDS = 0.97, 0.85, 10e-6
ALL_BAR, OPERATION_BAR, SHORT_BAR = 0.95, 0.90, 0.02
"""Shares of cells that are as fast: of all, of each operation; and of short ones that may be slow."""
WORST = 10


def merged(contents: Sequence[Row]) -> dict[str, Any]:
    """The cells of several files of one machine; of a cell that was measured twice, the later."""
    machines = {content["machine"] for content in contents}
    if len(machines) != 1:
        raise ValueError(f"these are results of several machines: {', '.join(sorted(machines))}")
    cells: dict[tuple[Any, ...], Row] = {}
    failed: dict[str, str] = {}
    for content in contents:
        failed |= content["failed"]
        for row in content["cells"]:
            key = row["seed"], row["number"], row["pass"]
            cells.pop(key, None)
            cells[key] = row
    runs = [run for content in contents for run in content["runs"]]
    return {**contents[-1], "runs": runs, "cells": list(cells.values()), "failed": failed}


def peers(row: Row) -> dict[str, float]:
    """Seconds of all ways that are not nearpeak's."""
    return {name: seconds for name, seconds in row["seconds"].items() if name.partition("/")[0] != "nearpeak"}


def best_peer(row: Row) -> str | None:
    seconds = peers(row)
    return min(seconds, key=lambda name: seconds[name]) if seconds else None


def ratio(row: Row) -> float | None:
    best = best_peer(row)
    return None if best is None else float(row["seconds"][best] / row["seconds"]["nearpeak"])


def is_short(row: Row) -> bool:
    best = best_peer(row)
    return min(row["seconds"]["nearpeak"], row["seconds"][best] if best else 1.0) < SHORT_SECONDS


def is_wrong(row: Row) -> bool:
    """Also where there is a NaN, which is no smaller than anything."""
    error = row["errors"].get("nearpeak")
    return error is not None and not error <= row["error_limit"]


def group_name(row: Row) -> str:
    return f"{row['operation']} {row['pass']}" if row["pass"] not in row["operation"] else row["operation"]


def head_name(row: Row) -> str | None:
    """The size of heads of attention; None for other operations."""
    if not row["operation"].startswith("attention"):
        return None
    dim, value_dim = row["shape"]["dim"], row["shape"].get("value_dim", row["shape"]["dim"])
    return f"{dim}" if dim == value_dim else f"{dim}/{value_dim}"


def scored(rows: Iterable[Row]) -> list[tuple[float, Row]]:
    """Ratios with their rows, of those that have a peer."""
    return [(one, row) for row in rows if (one := ratio(row)) is not None]


def groups(rows: Sequence[Row], name: Callable[[Row], str | None]) -> dict[str, list[Row]]:
    """Rows by a name, in the order in which names come; None is left out."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        key = name(row)
        if key is not None:
            by_name.setdefault(key, []).append(row)
    return by_name


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _score_line(name: str, rows: Sequence[Row]) -> list[str]:
    pairs = scored(rows)
    head = [name, str(len(pairs))]
    tail = [str(sum(is_wrong(row) for row in rows)), str(len(rows) - len(pairs))]
    if not pairs:
        return [*head, "-", "-", "-", *tail, "-"]
    ratios = [one for one, _ in pairs]
    slow = [row for one, row in pairs if one < SLOW]
    short = sum(is_short(row) for row in slow)
    worst, row = min(pairs, key=lambda pair: pair[0])
    return [
        *head,
        f"{statistics.median(ratios):.2f}",
        percent(sum(one >= AS_FAST for one in ratios) / len(ratios)),
        percent(len(slow) / len(ratios)) + (f" ({short} short)" if short else ""),
        *tail,
        f"{worst:.2f}: {row['text']} ({best_peer(row)})",
    ]


HEAD = ["cells", "median", f">= {AS_FAST}", f"< {SLOW}", "wrong", "no peer", "worst"]


def score_table(rows: Sequence[Row], what: str, name: Callable[[Row], str | None]) -> str:
    """A line for each group, and one for all."""
    by_name = sorted(groups(rows, name).items())
    body = [_score_line(key, some) for key, some in by_name]
    if len(body) > 1:
        body.append(_score_line("all", [row for _, some in by_name for row in some]))
    return table([what, *HEAD], body, 1)


def operations_table(rows: Sequence[Row]) -> str:
    return score_table(rows, "operation", group_name)


def heads_table(rows: Sequence[Row]) -> str:
    def name(row: Row) -> str | None:
        head = head_name(row)
        return (
            None
            if head is None
            else f"{int(head.partition('/')[0]):3d}{head[len(head.partition('/')[0]) :]} {row['pass']}"
        )

    return score_table(rows, "heads", name)


def worst_table(rows: Sequence[Row], count: int = WORST) -> str:
    """The slowest cells beside their peers; short ones are marked."""
    body = []
    for one, row in sorted(scored(rows), key=lambda pair: pair[0])[:count]:
        best = best_peer(row)
        own = {name: seconds for name, seconds in row["seconds"].items() if name.startswith("nearpeak/")}
        body.append(
            [
                group_name(row) + (" (short)" if is_short(row) else ""),
                row["text"],
                f"{row['seed']}/{row['number']}",
                f"{row['backend']} {_microseconds(row['seconds']['nearpeak'])}",
                ", ".join(f"{name.partition('/')[2]} {_microseconds(own[name])}" for name in own) or "-",
                f"{best} {_microseconds(row['seconds'][best])}",
                f"{one:.2f}",
            ]
        )
    return table(["operation", "shape", "cell", "nearpeak, us", "its others", "best peer, us", "ratio"], body, 4)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}" if seconds >= 100e-6 else f"{seconds * 1e6:.1f}"


def backends_table(rows: Sequence[Row]) -> str:
    """What nearpeak chose, and in how many cells another of its backends was faster by more than 3 %."""
    body = []
    for name, some in sorted(groups(rows, group_name).items()):
        others = [row for row in some if any(way.startswith("nearpeak/") for way in row["seconds"])]
        missed = sum(
            min(s for way, s in row["seconds"].items() if way.startswith("nearpeak/"))
            < AS_FAST * row["seconds"]["nearpeak"]
            for row in others
        )
        chosen = groups(some, lambda row: str(row["backend"]))
        words = ", ".join(f"{backend} {len(mine)}" for backend, mine in sorted(chosen.items()))
        body.append([name, words, str(len(others)), str(missed)])
    return table(["operation", "backend that ran", "cells with another", "where that is faster"], body, 2)


def peers_table(rows: Sequence[Row]) -> str:
    """In how many cells a peer ran, could not run, was not compiled in time, and was the fastest of all peers."""
    names = sorted({name for row in rows for name in (*peers(row), *row["failed"])})
    body = [
        [
            name,
            str(sum(name in row["seconds"] for row in rows)),
            str(sum(row["failed"].get(name, LATE) != LATE for row in rows)),
            str(sum(row["failed"].get(name) == LATE for row in rows)),
            str(sum(best_peer(row) == name for row in rows)),
        ]
        for name in names
        if name.partition("/")[0] != "nearpeak"
    ]
    return table(["peer", "ran", "could not", "not compiled", "fastest peer"], body, 1)


def short_of_bars(rows: Sequence[Row], failed: Mapping[str, str]) -> list[str]:
    """What is wanted of random cells, and is not there."""
    pairs = scored(rows)
    sentences = [f"{group_name(row)}, {row['text']}: wrong, {_error(row)}" for row in rows if is_wrong(row)]
    sentences += [f"{name}: failed" for name in failed]
    if not pairs:
        return sentences
    share = sum(one >= AS_FAST for one, _ in pairs) / len(pairs)
    if share < ALL_BAR:
        sentences.append(f"as fast as the best peer in {percent(share)} of all cells, and not {percent(ALL_BAR)}")
    for name, some in sorted(groups(rows, group_name).items()):
        mine = scored(some)
        of_it = sum(one >= AS_FAST for one, _ in mine) / len(mine) if mine else 1.0
        if of_it < OPERATION_BAR:
            sentences.append(f"{name}: as fast in {percent(of_it)}, and not {percent(OPERATION_BAR)}")
    slow = [row for one, row in pairs if one < SLOW]
    long = sum(not is_short(row) for row in slow)
    if long:
        sentences.append(f"{long} cells of 10 us or more below {SLOW}")
    if len(slow) - long > SHORT_BAR * len(pairs):
        sentences.append(f"{len(slow) - long} short cells below {SLOW}, more than {percent(SHORT_BAR)}")
    return sentences


def _error(row: Row) -> str:
    return f"an error of {row['errors']['nearpeak']:.1e}, and the limit is {row['error_limit']:.1e}"


def runs_text(content: Row) -> str:
    """Which seeds were measured, and whether they are for tuning."""
    parts = []
    for seed in dict.fromkeys(run["seed"] for run in content["runs"]):
        rows = [row for row in content["cells"] if row["seed"] == seed]
        seconds = sum(run["seconds"] for run in content["runs"] if run["seed"] == seed)
        kind = "a seed for tuning" if seed in TUNING_SEEDS else "never used for tuning"
        left_out = {name for run in content["runs"] if run["seed"] == seed for name in run.get("left_out", ())}
        without = f", without {', '.join(sorted(left_out))}" if left_out else ""
        parts.append(f"seed {seed} ({kind}): {len(rows)} cells in {seconds:.0f} s{without}")
    return "; ".join(parts)


def shown(content: Row, count: int = WORST) -> str:
    """All tables, what failed, and what is short of a bar."""
    rows = content["cells"]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    parts = [f"{content['machine']}, {versions}, {content['date'][:10]}; {runs_text(content)}"]
    if rows:
        parts += [operations_table(rows)]
        if any(head_name(row) for row in rows):
            parts.append(heads_table(rows))
        parts += [worst_table(rows, count), backends_table(rows), peers_table(rows)]
    lines = [f"- {text}" for text in short_of_bars(rows, content["failed"])]
    parts.append("Short of a bar:\n" + "\n".join(lines) if lines else "No bar is missed.")
    if content["failed"]:
        parts.append("Failed:\n" + "\n".join(f"- {name}: {why}" for name, why in content["failed"].items()))
    return "\n\n".join(parts)
