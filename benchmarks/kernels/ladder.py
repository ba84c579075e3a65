"""The ladder of GEMMs: time and traffic of each rung, as predicted from its tile and as counted by ncu.

    PYTHONPATH=src python -m benchmarks.kernels.ladder --json ladder.json --ncu   # a minute on an H200, ncu included
    python -m benchmarks.kernels.ladder --show benchmarks/results/ladder_h200.json
    PYTHONPATH=src python -m benchmarks.kernels.ladder --again ladder.json --json ladder.json
    PYTHONPATH=src python -m benchmarks.kernels.ladder --predict                  # the arithmetic alone, on any machine

ncu runs this script again, each rung once. It counts sectors requested from the L1 cache, bytes from L2 and bytes from
DRAM. `nearpeak/kernels/ladder/__init__.py` says which counter a rung is compared with, and why. A prediction holds if
it is within 10 % of the counter. `--again` repeats the predictions and compares them with the counters of an earlier
file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kernels import ncu

SIZE = 4096
PEAK = 989.4e12
"""Operations per second of an H200 in bfloat16 without sparsity: NVIDIA's H200 datasheet, 1,979 TFLOP/s with it."""
WITHIN = 0.10
ROUNDS = 3
ALSO = ("dram__bytes_read.sum", "dram__bytes_write.sum")
"""Counted besides, and in the JSON."""
RANGE = "ladder "
"""What the range around a rung begins with, by which ncu's table tells rungs apart."""
Row = dict[str, Any]


def counters() -> list[str]:
    from nearpeak.kernels.ladder import BYTES_PER_COUNT

    return [*BYTES_PER_COUNT, *ALSO]


def predictions(size: int) -> list[Row]:
    """What is known of each rung before it runs."""
    from nearpeak.kernels.ladder import RUNGS

    return [
        {"rung": rung.name, "title": rung.title, "counter": rung.counter, "predicted_bytes": _predicted(rung, size)}
        for rung in RUNGS
    ]


def _predicted(rung: Any, size: int, kernel: str = "") -> int | None:
    try:
        bytes_read: int | None = rung.bytes_read(size, size, size, kernel)
    except ImportError:  # Triton is not here
        return None
    return bytes_read


def matrices(size: int) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator(device="cuda").manual_seed(0)
    made = [torch.randn(size, size, device="cuda", generator=generator).bfloat16() for _ in range(2)]
    return made[0], made[1]


def measure(size: int, rounds: int = ROUNDS) -> list[Row]:
    """Checks every rung against float32, and times them in turns. A rung that fails says why, and the others run."""
    import torch

    from benchmarks.kernels.timing import in_turns
    from nearpeak.kernels.ladder import RUNGS

    a, b = matrices(size)
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = a.float() @ b.float()
    rows = predictions(size)
    ways = {}
    for row, rung in zip(rows, RUNGS, strict=True):
        try:
            result = rung.multiply(a, b)
            row["error"] = ((result.float() - exact).abs().max() / exact.abs().max()).item()
            row["repeats"] = torch.equal(result, rung.multiply(a, b))
        except Exception as error:  # one that cannot run here is to be seen in the table
            row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        ways[rung.name] = lambda rung=rung: rung.multiply(a, b)
    seconds = in_turns(ways, rounds, may_wait=False)
    for row in rows:
        if row["rung"] in seconds:
            row["seconds"] = seconds[row["rung"]]
    return rows


def run_once(size: int) -> None:
    """Each rung once inside of a range, for ncu; once before, as the first call compiles."""
    from nearpeak.kernels.ladder import RUNGS

    a, b = matrices(size)
    for rung in RUNGS:
        try:
            rung.multiply(a, b)
        except Exception as error:
            print(f"{rung.name}: {error}", file=sys.stderr)
            continue
        with ncu.counted_range(RANGE + rung.name):
            rung.multiply(a, b)


def ncu_command(size: int, log: Path) -> list[str]:
    return ncu.command("benchmarks.kernels.ladder", ["--once", "--size", str(size)], counters(), log, page="details")


def read_ncu(lines: Iterable[str]) -> dict[str, dict[str, Any]]:
    """By rung the counters and names of its kernels, from ncu's table."""
    return summed(ncu.read(lines, RANGE))


def summed(kernels: Iterable[ncu.Kernel]) -> dict[str, dict[str, Any]]:
    """By rung the counters, summed over its kernels, and their names."""
    sums: dict[str, dict[str, Any]] = {}
    for kernel in kernels:
        of_rung = sums.setdefault(kernel.within, {"kernels": []})
        if kernel.name not in of_rung["kernels"]:
            of_rung["kernels"].append(kernel.name)
        for name, value in kernel.counters.items():
            of_rung[name] = of_rung.get(name, 0.0) + value
    return sums


def counted(size: int) -> dict[str, dict[str, Any]]:
    return summed(ncu.counted(partial(ncu_command, size), RANGE))


def joined(rows: Sequence[Row], counters: dict[str, dict[str, Any]], size: int) -> None:
    """Adds what was counted to each row, and predicts again where the kernel's name tells its tile."""
    from nearpeak.kernels.ladder import BYTES_PER_COUNT, RUNGS

    for row, rung in zip(rows, RUNGS, strict=True):
        of_rung = counters.get(rung.name)
        if of_rung is None:
            continue
        row["kernels"] = of_rung["kernels"]
        row["counters"] = {name: value for name, value in of_rung.items() if name != "kernels"}
        if rung.counter in of_rung:
            row["counted_bytes"] = BYTES_PER_COUNT[rung.counter] * of_rung[rung.counter]
        own = [name for name in of_rung["kernels"] if re.search(rung.kernel, name)]
        if row["predicted_bytes"] is None and own:
            row["predicted_bytes"] = _predicted(rung, size, own[0])


def again(before: Sequence[Row], size: int) -> list[Row]:
    """Rows of a run before, with predictions of today, held against what was counted then."""
    rows = predictions(size)
    counters = {}
    for row, old in zip(rows, before, strict=True):
        row.update({name: old[name] for name in ("error", "repeats", "seconds", "failed") if name in old})
        if "counters" in old:
            counters[old["rung"]] = {"kernels": old["kernels"], **old["counters"]}
    joined(rows, counters, size)
    return rows


def off(row: Row) -> float | None:
    """What the counter is above the prediction, as a share of it."""
    predicted, count = row.get("predicted_bytes"), row.get("counted_bytes")
    return None if predicted is None or count is None else count / predicted - 1.0


def table(rows: Sequence[Row], size: int) -> str:
    """In 80 columns: time, share of the peak, intensity, and bytes as predicted and counted."""
    flops = 2.0 * size**3
    lines = [f"{'rung':<31}{'ms':>9}{'peak':>8}{'FLOP/B':>8}{'predicted':>11}{'off':>7}"]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['title']:<31} {row['failed'][:48]}")
            continue
        seconds, predicted, share = row.get("seconds"), row.get("predicted_bytes"), off(row)
        lines.append(
            f"{row['title']:<31}"
            + (f"{1e3 * seconds:>9.3f}{flops / seconds / PEAK:>8.2%}" if seconds else f"{'-':>9}{'-':>8}")
            + (f"{flops / predicted:>8.3g}{predicted / 1e9:>8.2f} GB" if predicted else f"{'-':>8}{'-':>11}")
            + (f"{share:>+7.1%}" if share is not None else f"{'-':>7}")
        )
    wrong = [row["rung"] for row in rows if (share := off(row)) is not None and abs(share) > WITHIN]
    if wrong:
        lines.append(f"Predictions that are off by more than {WITHIN:.0%}: {', '.join(wrong)}.")
    unequal = [row["rung"] for row in rows if row.get("repeats") is False]
    if unequal:
        lines.append(f"Results that differ from run to run: {', '.join(unequal)}.")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=SIZE, help="of the square matrices, a multiple of 256")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--ncu", action="store_true", help="count traffic by a run under ncu")
    parser.add_argument("--show", type=Path, help="only show what was found before")
    parser.add_argument("--again", type=Path, help="predict anew, with the times and counters that were found before")
    parser.add_argument("--predict", action="store_true", help="only show predictions")
    parser.add_argument("--once", action="store_true", help="run each rung once, for ncu")
    given = parser.parse_args(arguments)
    if given.once:
        run_once(given.size)
        return
    if given.show:
        before = json.loads(given.show.read_text())
        print(table(before["rungs"], before["size"]))
        return
    size = given.size
    if given.again:
        before = json.loads(given.again.read_text())
        size = before["size"]
        rows = again(before["rungs"], size)
    else:
        rows = predictions(size) if given.predict else measure(size)
    if given.ncu:
        joined(rows, counted(size), size)
    if given.json:
        given.json.write_text(json.dumps({"size": size, "rungs": rows}, indent=1) + "\n")
    print(table(rows, size))


if __name__ == "__main__":
    main()
