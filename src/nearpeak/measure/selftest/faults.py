"""Is each fault noticed, and called by its name? Broken benchmarks, each with the flag that it must raise."""

from __future__ import annotations

import logging
import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from nearpeak.errors import CaseError
from nearpeak.machines.catalogue import find
from nearpeak.measure.bench import bench
from nearpeak.measure.machine import known_machine
from nearpeak.measure.selftest.bench_place import Place, spin_host
from nearpeak.measure.selftest.report import Experiment
from nearpeak.measure.timing import Timing
from nearpeak.work.model import Work

Fault = Callable[[Place], Timing]

_QUICK: dict[str, Any] = {"max_seconds": 0.3, "warmup_seconds": 0.02, "cache": "hot"}


def faults(place: Place, quick: bool) -> Experiment:
    """Every fault must raise its own flag; a sound benchmark must raise none of them."""
    sound = bench(torch.exp, _data(place), **{**_QUICK, "precision": 0.05})
    wrongly = [flag.name for flag in sound.flags if flag.severity == "wrong"]
    rows: list[dict[str, Any]] = []
    for name, fault in _FAULTS.items():
        if (name in _GPU_ONLY and place.cuda is None) or (quick and name in _SLOW):
            continue
        timing = fault(place)
        seen = [flag.name for flag in timing.flags]
        others = [flag.name for flag in timing.flags if flag.severity == "wrong" and flag.name != name]
        rows.append({"fault": name, "flags": seen, "raised": name in seen, "others": others})
    rows.append({"fault": "endless memory", "flags": [], "raised": _endless_memory_is_refused(place), "others": []})
    missed = [row["fault"] for row in rows if not row["raised"]]
    accused = [f"{other} for {row['fault']}" for row in rows for other in row["others"]]
    found = f"{len(rows) - len(missed)} of {len(rows)} raised"
    for label, items in (("missed", missed), ("wrong accusations", accused), ("raised without a fault", wrongly)):
        found += f"; {label}: {', '.join(items)}" if items else ""
    return Experiment(
        name="faults",
        question="does every injected fault raise its own flag?",
        expected="all raised, no other grade-F flag",
        found=found,
        passed=not missed and not accused and not wrongly,
        data={"rows": rows},
    )


def _data(place: Place, size: int = 2**16) -> torch.Tensor:
    return torch.randn(size, device=place.device)


def _synchronises(place: Place) -> Timing:
    return bench(lambda x: x.sum().item(), _data(place), **_QUICK)


def _side_stream(place: Place) -> Timing:
    x, side = _data(place, 2**26), torch.cuda.Stream()

    def call(x: torch.Tensor) -> None:
        torch.add(x, 1)
        with torch.cuda.stream(side):
            torch.exp(x)

    return bench(call, x, **_QUICK)


def _host_is_slow(place: Place) -> Timing:
    def call(x: torch.Tensor) -> torch.Tensor:
        spin_host(300_000)
        return torch.exp(x)

    return bench(call, _data(place), **_QUICK)


def _two_speeds(place: Place) -> Timing:
    turn = [0]
    spin = place.spin or spin_host
    anchor = torch.zeros(1, device=place.device)

    def call(anchor: torch.Tensor) -> None:
        turn[0] += 1
        spin(150_000 if turn[0] // 7 % 2 else 260_000)

    return bench(call, anchor, **{**_QUICK, "max_seconds": 1.0, "min_blocks": 60}, reset=lambda: None)


def _rare_delays(place: Place) -> Timing:
    turn = [0]
    spin = place.spin or spin_host
    anchor = torch.zeros(1, device=place.device)

    def call(anchor: torch.Tensor) -> None:
        turn[0] += 1
        spin(150_000 if turn[0] % 30 else 900_000)

    return bench(call, anchor, **{**_QUICK, "max_seconds": 1.0, "min_blocks": 40}, reset=lambda: None)


def _drifts(place: Place) -> Timing:
    start = time.perf_counter()
    spin = place.spin or spin_host
    anchor = torch.zeros(1, device=place.device)

    def call(anchor: torch.Tensor) -> None:
        spin(round(200_000 * (1 + 0.5 * (time.perf_counter() - start))))

    return bench(call, anchor, **{**_QUICK, "max_seconds": 1.0, "precision": 0.0001})


def _grows(place: Place) -> Timing:
    kept: list[torch.Tensor] = []
    return bench(
        lambda x: kept.append(torch.ones(2**20, device=x.device)), _data(place), **{**_QUICK, "max_seconds": 0.05}
    )


def _allocates(place: Place) -> Timing:
    def call(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.empty_cache()
        return torch.exp(x)

    # A result so large that no cached segment can hold it beside what is still in use there.
    return bench(call, _data(place, 2**28), **{**_QUICK, "kind": "latency"})


def _maps_anew(place: Place) -> Timing:
    def call(x: torch.Tensor) -> None:
        with mmap.mmap(-1, 2**22) as memory:
            memory[:: mmap.PAGESIZE] = bytes(2**22 // mmap.PAGESIZE)

    return bench(call, torch.randn(16), **_QUICK)


def _compiles(place: Place) -> Timing:
    import torch._dynamo

    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
    turn = [0]

    def call(x: torch.Tensor) -> Any:
        turn[0] += 1
        if turn[0] % 10 == 0:
            torch._dynamo.reset()
        return compiled(x)

    with _quiet_compiler():
        return bench(
            call, _data(place), **{**_QUICK, "kind": "auto" if place.cuda is None else "latency", "warmup_seconds": 0.0}
        )


def _zeros(place: Place) -> Timing:
    return bench(torch.exp, torch.zeros(2**16, device=place.device), **_QUICK)


def _mutates(place: Place) -> Timing:
    return bench(lambda x: x.mul_(1.0001), _data(place), **_QUICK)


def _overflows(place: Place) -> Timing:
    return bench(lambda x: torch.exp(x * 1e4), _data(place), **_QUICK)


def _impossible(place: Place) -> Timing:
    machine = known_machine(place.cuda)
    if machine is None or machine.achievable is None or machine.achievable.how != "measured":
        known = find("h200-sxm")
        assert known.achievable is not None
        machine = replace(known, achievable=replace(known.achievable, how="measured"))
    return bench(torch.exp, _data(place), work=Work(bytes_read=1e12), machine=machine, **{**_QUICK, "cache": "cold"})


def _no_time(place: Place) -> Timing:
    return bench(torch.exp, _data(place), **{**_QUICK, "precision": 1e-9, "max_seconds": 0.01})


def _closure(place: Place) -> Timing:
    x = _data(place)
    return bench(lambda: torch.exp(x), **_QUICK)


def _contended(place: Place) -> Timing:
    with _other_processes("while True: pass", 2 * torch.get_num_threads()):
        return bench(torch.exp, torch.randn(2**20), **{**_QUICK, "max_seconds": 1.0})


def _shared_gpu(place: Place) -> Timing:
    program = "import torch, time; x = torch.zeros(1, device='cuda'); print('ready', flush=True); time.sleep(60)"
    with _other_processes(program, 1, wait_for_line=True):
        return bench(torch.exp, _data(place), **_QUICK)


@contextmanager
def _other_processes(program: str, count: int, wait_for_line: bool = False) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        if wait_for_line:
            for process in processes:
                assert process.stdout is not None
                process.stdout.readline()
        else:
            time.sleep(0.3)
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    """The compiler logs that it recompiles, which is what this fault is for."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _endless_memory_is_refused(place: Place) -> bool:
    kept: list[torch.Tensor] = []
    size = 2**28 if place.cuda is not None else 2**26
    try:
        bench(lambda x: kept.append(torch.ones(size, device=x.device)), _data(place), **_QUICK)
    except CaseError:
        return True
    finally:
        kept.clear()
    return False


_FAULTS: dict[str, Fault] = {
    "SYNC_IN_REGION": _synchronises,
    "OFF_STREAM": _side_stream,
    "CPU_BOUND": _host_is_slow,
    "MULTIMODAL": _two_speeds,
    "HEAVY_TAIL": _rare_delays,
    "DRIFT": _drifts,
    "MEMORY_GROWS": _grows,
    "MEMORY_ALLOCATED": _allocates,
    "PAGE_FAULTS": _maps_anew,
    "COMPILED_DURING_TIMING": _compiles,
    "DEGENERATE_INPUT": _zeros,
    "INPUT_MUTATED": _mutates,
    "OUTPUT_NONFINITE": _overflows,
    "ABOVE_ROOFLINE": _impossible,
    "PRECISION_NOT_REACHED": _no_time,
    "CLOSURE_INPUTS": _closure,
    "CPU_CONTENDED": _contended,
    "GPU_SHARED": _shared_gpu,
}
_GPU_ONLY = {"SYNC_IN_REGION", "OFF_STREAM", "CPU_BOUND", "MEMORY_ALLOCATED", "GPU_SHARED"}
_SLOW = {"GPU_SHARED", "CPU_CONTENDED"}
