"""Whether a run is kept however its process ends: each ending alone and under `nearpeak profile`.

    python -m benchmarks.robustness.endings [--seed 1] [--only sigterm] [--json FILE]
    python -m benchmarks.robustness.endings --show results.json

A small training script ends by a signal at a drawn step, by `os._exit`, fork or exec, with closed streams, a full disk
or a folder that cannot be written. It must end as it does alone; if everything had been recorded before, `nearpeak
report @last` must show it afterwards wherever the disk works; and a file that was asked for exists, or an error says
why not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.robustness.programs import (
    ENVIRONMENT,
    ROOT,
    Forked,
    Zygote,
    declined,
    end_session,
    find_calibration,
    receive_signals,
    write_results,
)

LIMIT_S = 60.0
ENOUGH = 48
"""After so many steps everything is recorded, however long the warm-up was."""
MOMENTS = {"before the first step": (0, 0), "early": (1, 12), "midway": (13, 36), "afterwards": (ENOUGH, ENOUGH + 8)}
RECORDED = "everything needed has been recorded"

SCRIPT = """
import ctypes, os, signal, sys, threading, time
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def step():
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()


def receive(number):
    os.kill(os.getpid(), number)
    time.sleep(5)


def wait():
    open("waits", "w").close()
    for _ in range(1200):
        time.sleep(0.05)


def end():
{end}


{setup}
for number in range({steps}):
    if number == {moment}:
        end()
    step()
{after}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A way to end a process."""

    name: str
    end: str = "pass"
    """What the script does at the drawn moment."""
    setup: str = ""
    after: str = ""
    """What it does after its steps."""
    shell: str = "{run}"
    """The command line; `{run}` is the script alone or under nearpeak."""
    options: str = ""
    """Of `nearpeak profile`."""
    drawn: bool = True
    """Whether `end` runs at a drawn moment; otherwise after all steps."""
    status: bool = True
    """Whether it ends alone as it must under nearpeak."""
    disk: bool = True
    """Whether runs can be kept."""
    files: Sequence[str] = ()
    """Asked for by options. Each exists, or stderr names it with a reason."""
    from_outside: Sequence[str] = ()
    """Signals that are sent when the script waits for them, to the whole group as a terminal does."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of nearpeak's process; {work} is its folder."""
    expected: int | None = None
    """How the run under nearpeak ends, where that is not as alone."""


def script(ending: Ending, steps: int, moment: int) -> str:
    """A script of so many steps that ends at one of them."""
    end = textwrap.indent(ending.end.strip("\n"), "    ")
    return SCRIPT.format(end=end, setup=ending.setup, after=ending.after, steps=steps, moment=moment)


def _read_endings() -> tuple[Ending, ...]:
    tables = tomllib.loads(Path(__file__).with_name("endings.toml").read_text())
    return tuple(Ending(name=name, **fields) for name, fields in tables.items())


ENDINGS = _read_endings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one ending went."""

    ending: str
    moment: int
    alone: int | None
    """The exit status alone, negative for a signal; None if it was not run, or did not end."""
    status: int | None
    recorded: bool
    """Whether everything had been recorded when it ended."""
    shown: bool
    """Whether `nearpeak report @last` showed it."""
    faults: tuple[str, ...]
    errors: str
    """The last lines of stderr."""


class Bench:
    """A folder in which endings happen."""

    def __init__(self, folder: Path, calibration: Path | None, zygote: Zygote, *, forked: bool) -> None:
        self.folder, self.calibration, self.zygote, self.forked = folder, calibration, zygote, forked

    def judge(self, ending: Ending, moment: int) -> Row:
        """Runs the script alone and under nearpeak, and asks for the last run."""
        alone = self._run(ending, moment, profiled=False)[0] if ending.status else None
        status, errors = self._run(ending, moment, profiled=True)
        gave_up = declined(errors)
        recorded = RECORDED in errors or (moment >= ENOUGH and not gave_up)
        faults = []
        if status is None:
            faults.append(f"it hangs; alone it ends with {alone}")
        elif ending.status and status != alone and not (alone == 0 and gave_up):
            faults.append(f"it ends with {status}, alone with {alone}")
        elif ending.expected is not None and status != ending.expected:
            faults.append(f"it ends with {status} instead of {ending.expected}")
        if "Traceback" in errors and "/nearpeak/" in errors.rpartition("Traceback")[2]:
            faults.append("a traceback of nearpeak")
        report = self._report()
        shown = "prog.py" in report
        if recorded and ending.disk and not shown:
            faults.append(f"the run is lost: {report.strip()[-200:]}")
        for name in ending.files if recorded else ():
            path = self.folder / "work" / name
            if not (path.exists() and path.stat().st_size) and not re.search(rf"{re.escape(name)}.*: ", errors):
                faults.append(f"{name} is missing, and nothing says why")
        last = "\n".join(errors.strip().splitlines()[-6:])
        return Row(
            ending=ending.name, moment=moment, alone=alone, status=status, recorded=recorded, shown=shown,
            faults=tuple(faults), errors=last,
        )  # fmt: skip

    def _report(self) -> str:
        """What `nearpeak report @last` prints."""
        command = ["nearpeak", "report", "@last"]
        code = self.zygote.start(command, self.folder, self._environment()).wait()
        return (self.folder / ("stderr" if code else "stdout")).read_text()

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder / "home"),
            "PYTHONPATH": os.environ.get("PYTHONPATH") or f"{ROOT / 'src'}:{ROOT}",
            "NEARPEAK_CACHE_DIR": str(self.folder / "cache"),
            **ENVIRONMENT,
        }

    def _run(self, ending: Ending, moment: int, *, profiled: bool) -> tuple[int | None, str]:
        for name in ("work", "home", "cache"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()
        if self.calibration is not None:
            shutil.copytree(self.calibration, self.folder / "cache" / "machines")
        work = self.folder / "work"
        steps = max(ENOUGH + 10, moment + 1)
        at = moment if ending.drawn and moment < steps else -1
        (work / "prog.py").write_text(script(ending, steps, at))
        options = [*(["--on", "h200-sxm"] if self.calibration is None else []), *ending.options.split()]
        command = [*(["nearpeak", "profile", *options] if profiled else []), str(work / "prog.py")]
        environment = self._environment()
        if profiled:
            environment |= {name: value.format(work=work) for name, value in ending.environment.items()}
        process: subprocess.Popen[bytes] | Forked
        if self.forked and ending.shell == "{run}":
            process = self.zygote.start(command, self.folder, environment)
        else:
            run = " ".join([sys.executable, *(["-m"] if profiled else []), *command])
            with (self.folder / "stderr").open("wb") as errors, (self.folder / "stdout").open("wb") as output:
                process = subprocess.Popen(
                    ["bash", "-c", f"set -o pipefail; {ending.shell.format(run=run)}"],
                    cwd=work,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    start_new_session=True,
                )
        deadline = time.monotonic() + LIMIT_S
        for name in ending.from_outside:
            while not (work / "waits").exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.3)
            if process.poll() is None:
                os.killpg(process.pid, signal.Signals[name])
        status: int | None
        try:
            status = process.wait(max(0.1, deadline - time.monotonic()))
            while _session_lives(process.pid) and time.monotonic() < deadline:  # a child that goes on, an orphan
                time.sleep(0.05)
        except subprocess.TimeoutExpired:
            status = None
        end_session(process.pid)
        process.wait()
        return status, (self.folder / "stderr").read_text(errors="replace")


def _session_lives(leader: int) -> bool:
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if rest[3] == str(leader) and rest[0] != "Z":
            return True
    return False


def draw(seed: int) -> Iterator[tuple[Ending, int]]:
    """Each ending at a drawn moment, and once more after everything was recorded where the moment matters."""
    chance = random.Random(seed)
    for ending in ENDINGS:
        drawn = ending.drawn and (ending.end != "pass" or bool(ending.from_outside))
        if drawn:
            low, high = MOMENTS[chance.choice([name for name in MOMENTS if name != "afterwards"])]
            yield ending, chance.randint(low, high)
        yield ending, chance.randint(*MOMENTS["afterwards"])


def show(rows: Sequence[dict[str, object]]) -> None:
    """Prints the faults, and how many there are."""
    counts = Counter("faulty" if row["faults"] else "as it should" for row in rows)
    print(f"{len(rows)} runs of {len({row['ending'] for row in rows})} endings: {dict(counts)}; ", end="")
    recorded, shown = (sum(bool(row[name]) for row in rows) for name in ("recorded", "shown"))
    print(f"everything recorded in {recorded}, shown in {shown}")
    for row in rows:
        for fault in row["faults"]:  # type: ignore[attr-defined]
            print(f"{row['ending']} at step {row['moment']}: {fault}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="draws the moments (0)")
    parser.add_argument("--only", help="the endings whose name matches this regular expression")
    parser.add_argument("--forked", action="store_true", help="in forks of one interpreter, where no shell is needed")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--show", type=Path, help="print the results of a file")
    wanted = parser.parse_args()
    receive_signals()
    if wanted.show:
        show(json.loads(wanted.show.read_text())["rows"])
        return 0
    rows = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nearpeak-endings-") as folder:
        bench = Bench(Path(folder), find_calibration(), Zygote(), forked=wanted.forked)
        for ending, moment in draw(wanted.seed):
            if wanted.only and not re.fullmatch(wanted.only, ending.name):
                continue
            row = bench.judge(ending, moment)
            rows.append(asdict(row))
            told = f"{row.status} (alone {row.alone}), recorded {row.recorded}, shown {row.shown}"
            print(f"{row.ending} at {row.moment}: {told} {'; '.join(row.faults)}", flush=True)
            if wanted.json:
                write_results(wanted.json, wanted.seed, rows, time.monotonic() - started)
            if row.faults and wanted.only:
                print(row.errors)
        bench.zygote.close()
    print()
    show(rows)
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
