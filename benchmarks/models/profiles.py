"""Fifteen profiles on this GPU: five models, each training eager, training compiled, and inference.

    PYTHONPATH=src python -m benchmarks.models.profiles --json benchmarks/results/model_profiles.json
    python -m benchmarks.models.profiles --show benchmarks/results/model_profiles_h200.json --markdown

Every run is `benchmarks/models/steps.py` in a process of its own, once alone and once under `nearpeak profile`. What is
asked: do the parts of the waterfall sum to the wall time, are clean steps as fast under nearpeak as alone, how much of
the device's time has a bound, does an op take less than its bound, and what does the profile cost.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nearpeak

SCRIPT = Path(__file__).with_name("steps.py")
MODELS = ("gpt2", "llama", "qwen3_moe", "vit", "bert")
MODES = ("train", "compiled", "inference")
NAMES = {"gpt2": "GPT-2", "llama": "Llama-1B", "qwen3_moe": "Qwen3-MoE", "vit": "ViT", "bert": "BERT"}
COLUMNS = (
    *("model", "step", "alone, ms", "clean, ms", "parts / wall", "modeled", "ops below"),
    *("ideal", "traffic", "fusion", "slow", "idle", "MFU"),
)
WARM, TIMED = 5, 10
"""Steps before the clean ones, and how many of these nearpeak takes. The script alone times the same ones: a GPU
becomes slower as it becomes hot."""
BELOW = 0.03
"""An op that takes less than its bound by more than this share of it counts."""


def run(command: Sequence[str], log: Path) -> float:
    """Runs a command and returns its seconds."""
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{log.read_text(encoding='utf-8')[-3000:]}")
    return time.perf_counter() - start


def fill_compiler_cache(models: Sequence[str], folder: Path) -> None:
    """Compiles all models at once, so that both runs of each find their kernels."""
    running = {}
    for model in models:
        log = (folder / f"{model}_compile.log").open("w", encoding="utf-8")
        command = [sys.executable, str(SCRIPT), model, "compiled", "--steps", "2", "--timed", "1"]
        running[model] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    for model, process in running.items():
        if process.wait():
            print(f"{model}: compiling it failed, see {folder}/{model}_compile.log", file=sys.stderr)


def one(model: str, mode: str, steps: int, folder: Path, small: bool) -> dict[str, Any]:
    """Both runs of one model and what they show."""
    script = [str(SCRIPT), model, mode, *(["--small"] if small else [])]
    alone, saved = folder / f"{model}_{mode}_alone.json", folder / f"{model}_{mode}.json.gz"
    same = ["--steps", str(WARM + TIMED), "--timed", str(TIMED), "--json", str(alone)]
    alone_s = run([sys.executable, *script, *same], folder / f"{model}_{mode}_alone.log")
    report = folder / f"{model}_{mode}.txt"
    command = [sys.executable, "-m", "nearpeak", "profile", "--no-keep", "--save", str(saved), *script]
    command += ["--steps", str(steps)]
    under_s = run(command, report)
    profile = nearpeak.load(saved)
    step_s = json.loads(alone.read_text(encoding="utf-8"))["step_s"]
    parts = {part.name: part.seconds for part in profile.waterfall.parts}
    below = sorted(
        (op.measured_s / op.bound_s, op.measured_s, op.name, [list(shape) for shape in op.shapes])
        for op in profile.ops
        if op.kernels and op.modeled and op.measured_s < (1 - BELOW) * op.bound_s
    )
    return {
        "model": model,
        "mode": mode,
        "alone_s": step_s,
        "clean_s": profile.wall_s,
        "clean_over_alone": profile.wall_s / step_s,
        "parts": parts,
        "parts_over_wall": sum(parts.values()) / profile.wall_s,
        "kernel_s": profile.kernel_s,
        "expected_s": profile.expected_s,
        "modeled": profile.modeled_share,
        "matched": profile.matched,
        "spread": profile.spread,
        "ops": len(profile.ops),
        "below": below[:20],
        "ops_below": len(below),
        "mfu": None if profile.rates is None else profile.rates.mfu,
        "process_alone_s": alone_s,
        "process_profiled_s": under_s,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row for each run, in Markdown."""
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        f"| --- | --- {'| ---: ' * (len(COLUMNS) - 2)}|",
    ]
    for row in rows:
        parts = row["parts"]
        shares = (parts[name] / row["clean_s"] for name in ("ideal", "traffic", "fusion", "slow kernels", "idle"))
        cells = [
            NAMES[row["model"]],
            row["mode"],
            f"{row['alone_s'] * 1e3:.2f}",
            f"{row['clean_s'] * 1e3:.2f} ({row['clean_over_alone'] - 1:+.1%})",
            f"{row['parts_over_wall']:.4f}",
            f"{row['modeled']:.1%}",
            str(row["ops_below"]),
            *(f"{share:.0%}" for share in shares),
            "-" if row["mfu"] is None else f"{row['mfu']:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--small", action="store_true", help="tiny configurations, to try this on a CPU")
    parser.add_argument("--folder", type=Path, help="keep logs, reports and profiles here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, help="print the table of an earlier run")
    parser.add_argument("--markdown", action="store_true", help="only the table")
    arguments = parser.parse_args()
    if arguments.show:
        print(table(json.loads(arguments.show.read_text(encoding="utf-8"))["rows"]))
        return
    models, modes = arguments.models.split(","), arguments.modes.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(temporary) / "compiled"))
        machine = nearpeak.machine()
        if "compiled" in modes and not arguments.small:
            fill_compiler_cache(models, folder)
        rows = []
        for mode in modes:
            for model in models:
                try:
                    rows.append(one(model, mode, arguments.steps, folder, arguments.small))
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    continue
                print(table(rows[-1:]).splitlines()[-1], flush=True)
                if arguments.json:
                    result = {
                        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                        "machine": machine.name,
                        "steps": arguments.steps,
                        "rows": rows,
                    }
                    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(table(rows))


if __name__ == "__main__":
    main()
