"""`tuned`: the measured best configuration of a kernel, from the tables in `kernels/tables`.

A table is one JSON file per GPU generation, `tables/sm90.json`: by kernel, a list of entries by increasing size, each with the
sizes that it holds for ("above", "up_to") and the launch parameters. `benchmarks/kernels/tune.py` writes it. A GPU without a
table uses that of the previous generation; sizes without an entry use the kernel's heuristic.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

import torch


def tuned(kernel: str, size: int, device: torch.device) -> dict[str, Any] | None:
    """What to launch a kernel with for rows, or whatever counts, of this size; None where nobody measured."""
    return _tuned(kernel, size, device.index if device.type == "cuda" else None)


@functools.lru_cache(maxsize=4096)
def _tuned(kernel: str, size: int, index: int | None) -> dict[str, Any] | None:
    if index is None or not torch.cuda.is_available():
        generation = 90
    else:
        major, minor = torch.cuda.get_device_capability(index)
        generation = 10 * major + minor
    for entry in _table(generation).get(kernel, ()):
        if entry.get("above", 0) < size <= entry["up_to"]:
            return {name: value for name, value in entry.items() if name not in ("above", "up_to")}
    return None


@functools.cache
def _table(generation: int) -> dict[str, list[dict[str, Any]]]:
    tables = {int(path.name[2:-5]): path for path in files("nearpeak.kernels").joinpath("tables").iterdir()}
    known = [number for number in tables if number <= generation]
    found: dict[str, list[dict[str, Any]]] = json.loads(tables[max(known)].read_text()) if known else {}
    return found


def processors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; those of an H200 for what is no GPU."""
    return _processors(device.index if device.type == "cuda" else None)


def shared_bytes(device: torch.device) -> int:
    """How much shared memory a program may have; that of an H200 for what is no GPU."""
    return _shared_bytes(device.index if device.type == "cuda" else None)


@functools.cache
def _shared_bytes(index: int | None) -> int:
    if index is None or not torch.cuda.is_available():
        return 232_448
    properties: Any = torch.cuda.get_device_properties(index)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))  # torch 2.6 does not say


@functools.cache
def _processors(index: int | None) -> int:
    if index is None or not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
