"""Seventeen architectures, training and inference: as they are, fixed, compiled and with Liger, in the same rounds.

    PYTHONPATH=src python -m benchmarks.models.fix_architectures --limit 240 --json OUT/fix_architectures.json
    PYTHONPATH=src python -m benchmarks.models.fix_architectures --modes inference --json OUT/fix_architectures.json
    PYTHONPATH=src python -m benchmarks.models.fix_architectures --small --models llama,lstm      # on a CPU
    python -m benchmarks.pages.fix OUT/fix_architectures.json      # the tables

Each model has a process of its own, and one more where Liger, which changes whole modules of transformers, has a
function for it. They import, compile and verify side by side. While something is timed, all other processes stand still
(SIGSTOP). The JSON is written after each model and goes on with the rows that it has.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import importlib.util
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import transformers

import nearpeak
from benchmarks.models.fix import peak_bytes, seconds_of
from benchmarks.models.fix_sites import models, to_device
from benchmarks.pages.fix import model_table
from nearpeak._records import to_json
from nearpeak.fixes import engine

ROUNDS = 7
BLOCK_S = 0.04
LAYERS = 2
LIGER = {name: name for name in ("llama", "qwen3", "qwen3_moe", "mistral", "mixtral")} | {"gemma3": "gemma3_text"}
"""The end of the name of Liger's function for a model."""
MODES = ("training", "inference")


class Program:
    """A model with a batch and an optimizer for each mode, and steps in several ways, each on a copy of the model."""

    def __init__(self, name: str, small: bool) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        torch.manual_seed(0)
        self.model, batch = models(small, layers=LAYERS)[name]()
        self.model.to(self.device, self.dtype)
        self.batch = to_device(batch, self.device, self.dtype)
        self.copies: dict[str, tuple[Any, Any]] = {}

    def copy_for(self, way: str) -> tuple[Any, Any]:
        """The model and the optimizer of a way."""
        if way not in self.copies:
            model = copy.deepcopy(self.model)
            self.copies[way] = model, torch.optim.AdamW(model.parameters(), lr=1e-5)
            if way == "compiled":
                model.compile()
        return self.copies[way]

    def arguments(self, mode: str) -> dict[str, Any]:
        """The batch; without labels in inference, if the model is one of transformers."""
        arguments = dict(self.batch)
        if getattr(self.model, "config", None) is not None:
            if "use_cache" in self.model.forward.__code__.co_varnames and hasattr(self.model.config, "use_cache"):
                arguments["use_cache"] = False
            if mode == "inference":
                labels = arguments.pop("labels")
                if self.model.config.is_encoder_decoder:
                    arguments["decoder_input_ids"] = labels
        return arguments

    def step(self, way: str, mode: str) -> Callable[[], None]:
        model, optimizer = self.copy_for(way)
        arguments = self.arguments(mode)
        model.train(mode == "training")

        def train() -> None:
            output = model(**arguments)
            loss_of(output).backward()
            optimizer.step()
            optimizer.zero_grad()

        @torch.no_grad()
        def infer() -> None:
            model(**arguments)

        return train if mode == "training" else infer


def loss_of(output: Any) -> Any:
    """Models of transformers have it in their output, and the others return it."""
    return getattr(output, "loss", output)


def peak_of(step: Callable[[], None]) -> int | None:
    """What a step has in memory beyond what there is before it: other ways have their models there too."""
    return peak_bytes(step, torch.cuda.memory_allocated())


def quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()


def serve_liger(name: str, small: bool, parent: Connection) -> None:
    """Times steps with Liger's kernels when it is asked to."""
    from liger_kernel import transformers as liger  # type: ignore[import-not-found]

    quiet()
    getattr(liger, f"apply_liger_kernel_to_{LIGER[name]}")()
    program = Program(name, small)
    steps = {mode: program.step("eager", mode) for mode in MODES}
    for mode in MODES:
        program.copy_for("eager")[0].train(mode == "training")
        seconds_of(steps[mode], 2)
    parent.send(("ready",))
    while (request := parent.recv()) is not None:
        mode, calls = request
        program.copy_for("eager")[0].train(mode == "training")
        parent.send((seconds_of(steps[mode], calls), peak_of(steps[mode]) if calls == 1 else None))


def measure_model(
    name: str,
    small: bool,
    modes: list[str],
    ways: list[str],
    without: list[str],
    has_liger: bool,
    parent: Connection,
) -> None:
    """Fixes a model and times it in all ways; sends a row for each mode."""
    quiet()
    torch.set_num_threads(1)

    @contextmanager
    def alone() -> Iterator[None]:
        parent.send(("alone",))
        parent.recv()
        try:
            yield
        finally:
            parent.send(("done",))
            parent.recv()

    time_in_turns = engine.time_in_turns

    def time_in_turns_alone(*args: Any, **kwargs: Any) -> Any:
        with alone():
            return time_in_turns(*args, **kwargs)

    engine.time_in_turns = time_in_turns_alone
    program = Program(name, small)
    for mode in modes:
        row: dict[str, Any] = {"model": name, "mode": mode, "ways": {}}
        steps: dict[str, Callable[[], None]] = {}
        for way in [each for each in ("eager", "compiled") if each in ways]:
            try:
                steps[way] = program.step(way, mode)
                row["ways"][way] = {"first_s": seconds_of(steps[way], 1), "rounds_s": []}
                seconds_of(steps[way], 1)
            except Exception as error:
                steps.pop(way, None)
                row["ways"][way] = {"problem": f"{type(error).__name__}: {str(error)[:300]}"}
        if has_liger:
            row["ways"]["liger"] = {"rounds_s": []}
        fixed = None
        started = time.perf_counter()
        try:
            steps["fixed"] = program.step("fixed", mode)
            model, optimizer = program.copy_for("fixed")
            seconds_of(steps["fixed"], 1)
            trains = mode == "training"
            with torch.set_grad_enabled(trains):
                fixed = nearpeak.fix(
                    model, optimizer=optimizer if trains else None, trains=trains, without=without,
                    loss=loss_of if trains else None, **program.arguments(mode),
                )  # fmt: skip
            row["report"] = to_json(fixed.report)
            row["ways"]["fixed"] = {"first_s": seconds_of(steps["fixed"], 1), "rounds_s": []}
            seconds_of(steps["fixed"], 1)
        except Exception as error:
            traceback.print_exc()
            steps.pop("fixed", None)
            row["ways"]["fixed"] = {"problem": f"{type(error).__name__}: {str(error)[:300]}"}
        row["fix_s"] = time.perf_counter() - started
        gc.collect()
        with alone():
            time_ways(row, steps, mode, has_liger, parent)
        if fixed is not None:
            fixed.undo()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        parent.send(("row", row))


def time_ways(
    row: dict[str, Any], steps: dict[str, Callable[[], None]], mode: str, has_liger: bool, parent: Connection
) -> None:
    """Rounds of all ways in random order; `rounds_s` of each, and its peak memory."""

    def timed(way: str, calls: int) -> tuple[float, int | None]:
        if way != "liger":
            model_step = steps[way]
            return seconds_of(model_step, calls), peak_of(model_step) if calls == 1 else None
        parent.send(("liger", mode, calls))
        answer: tuple[float, int | None] = parent.recv()
        return answer

    ways = [*steps, *(["liger"] if has_liger else [])]
    chance = random.Random(0)
    calls: dict[str, int] = {}
    for way in list(ways):
        first_s, row["ways"][way]["peak_bytes"] = timed(way, 1)
        if first_s < 0:
            row["ways"][way] = {"problem": "its process has ended"}
            ways.remove(way)
        calls[way] = max(2, round(BLOCK_S / max(first_s, 1e-6)))
    for _ in range(ROUNDS):
        for way in chance.sample(ways, len(ways)):
            row["ways"][way]["rounds_s"].append(timed(way, calls[way])[0])


def in_own_group(function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function in a group of processes of its own, which can be stopped with all that it starts."""
    os.setsid()
    function(*arguments)


class Schedule:
    """The processes, all of which run until one asks to be alone."""

    def __init__(self, small: bool, modes: list[str], ways: list[str], without: list[str], end: float) -> None:
        self.small, self.modes, self.ways, self.without, self.end = small, modes, ways, without, end
        self.context = get_context("spawn")
        self.processes: dict[Connection, Any] = {}
        self.names: dict[Connection, str] = {}
        """Of the models whose processes run."""
        self.ligers: dict[str, Connection] = {}

    def start(self, function: Callable[..., None], name: str, *arguments: Any) -> Connection:
        ours, theirs = self.context.Pipe()
        called = (function, name, self.small, *arguments, theirs)
        process = self.context.Process(target=in_own_group, args=called, daemon=True)
        process.start()
        theirs.close()
        self.processes[ours] = process
        return ours

    def start_model(self, name: str) -> None:
        has_liger = "liger" in self.ways and name in LIGER and importlib.util.find_spec("liger_kernel") is not None
        if has_liger:
            self.ligers[name] = self.start(serve_liger, name)
        self.names[self.start(measure_model, name, self.modes, self.ways, self.without, has_liger)] = name

    def rows(self, names: list[str], jobs: int) -> Iterator[dict[str, Any]]:
        """The rows, as they come."""
        left = list(names)
        while (left or self.names) and time.perf_counter() < self.end:
            while left and len(self.names) < jobs:
                self.start_model(left.pop(0))
            for each in wait(list(self.names), timeout=1.0):
                row = self.answer(each)  # type: ignore[arg-type]
                if row is not None:
                    yield row

    def answer(self, connection: Connection) -> dict[str, Any] | None:
        """A row that has come, or None."""
        try:
            kind, *rest = connection.recv()
            if kind == "row":
                row: dict[str, Any] = rest[0]
                return row
            assert kind == "alone"
            name = self.names[connection]
            with self.others_stopped(connection, self.ligers.get(name)):
                connection.send("go")
                while (request := connection.recv())[0] == "liger":
                    connection.send(self.ask_liger(name, request[1:]))
            connection.send("go on")
        except (EOFError, OSError):  # the process has ended
            del self.names[connection]
        return None

    @contextmanager
    def others_stopped(self, *connections: Connection | None) -> Iterator[None]:
        others = [process for each, process in self.processes.items() if each not in connections]
        self.signal(others, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(others, signal.SIGCONT)

    def signal(self, processes: list[Any], number: signal.Signals) -> None:
        for process in processes:
            if process.is_alive():
                with suppress(ProcessLookupError):  # it begins, or has ended since
                    os.killpg(process.pid, number)

    def ask_liger(self, name: str, request: tuple[str, int]) -> tuple[float, int | None]:
        liger = self.ligers[name]
        try:
            liger.send(request)
            while (answer := liger.recv())[0] == "ready":
                pass
            seconds, peak = answer
            return seconds, peak
        except (EOFError, OSError):
            return -1.0, None

    def stop(self) -> None:
        self.signal(list(self.processes.values()), signal.SIGKILL)
        for process in self.processes.values():
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="names with commas; all of fix_sites by default")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--ways", default="eager,compiled,liger", help="beside fixed")
    parser.add_argument("--without", default="", help="ids of fixes to leave out, with commas")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds after which it ends, with the rows there are"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="models at a time")
    parser.add_argument("--small", action="store_true", help="tiny models, to try this on a CPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    end = time.perf_counter() + arguments.limit
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there is a process for each model already
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = arguments.models.split(",") if arguments.models else list(models(True))
    modes = arguments.modes.split(",")
    rows: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        rows = [
            row
            for row in json.loads(arguments.json.read_text(encoding="utf-8"))["rows"]
            if row["model"] not in names or row["mode"] not in modes
        ]
    without = [id for id in arguments.without.split(",") if id]
    schedule = Schedule(arguments.small, modes, arguments.ways.split(","), without, end)
    try:
        for row in schedule.rows(names, arguments.jobs):
            rows.append(row)
            print(model_table([row]).splitlines()[-1], f"| fixed in {row['fix_s']:.0f} s |", flush=True)
            if arguments.json:
                write(arguments.json, rows, torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")
    finally:
        schedule.stop()
    missing = [
        f"{name} {mode}"
        for name in names
        for mode in modes
        if not any((name, mode) == (row["model"], row["mode"]) for row in rows)
    ]
    print(f"{len(rows)} rows; none of: {', '.join(missing) or 'nothing'}")
    sys.exit(1 if missing else 0)


def write(file: Path, rows: list[dict[str, Any]], machine: str) -> None:
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": rows,
    }
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
