"""`tuned`: the measured best configuration of a kernel, from the tables in `kernels/tables`.

A table is one JSON file per GPU generation, `tables/sm90.json`: by kernel, a list of rows by increasing size, each with
the sizes that it holds for ("above", "up_to") and the launch parameters. `benchmarks/kernels/tune.py` writes it. A GPU
without a table uses that of the previous generation; sizes without a row use the kernel's heuristic.

Where the number of rows matters too, the kernel has further rows under its name and `BY_ROWS`, each with the numbers
of rows that it holds for ("rows_above", "rows_up_to", powers of 2). They come first, and are launched as they are.
`benchmarks/kernels/fit_rows.py` writes them.

In the code, a configuration is a frozen dataclass of its operation. `from_row` reads one from a row, `to_row` writes
one. Where an operation has several kernels to choose from, each has a class, with its name in the table as `variant`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, TypeVar, overload

import torch

from nearpeak.kernels._runtime.capability import cuda_capability

_H200_CAPABILITY = (9, 0)
_ONE_LOAD = 256
"""Elements of 16 bits that a warp loads at once."""
BY_ROWS = "_by_rows"
_PLACE = ("above", "up_to", "rows_above", "rows_up_to")
"""What says where a row of the table holds."""
BUSY_WARPS = 32
"""Of a multiprocessor, as many as run at a time if threads take 64 registers. The tuner sets 0: candidates run as they
are, whatever the number of rows."""

_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")
_D = TypeVar("_D")


def tuned(kernel: str, size: int, device: torch.device) -> dict[str, Any] | None:
    """The row of the table for a kernel at this size: the launch parameters, or None if none were measured."""
    return _tuned(kernel, size, device.index if device.type == "cuda" else None)


def tuned_by_rows(kernel: str, size: int, rows: int, device: torch.device) -> dict[str, Any] | None:
    """The row of the table for a kernel at this size and number of rows; None if none was measured near it."""
    index = device.index if device.type == "cuda" else None
    return _tuned(kernel + BY_ROWS, size, index, (rows - 1).bit_length())


@overload
def from_row(row: Mapping[str, Any] | None, kind: type[_A], /) -> _A | None: ...
@overload
def from_row(row: Mapping[str, Any] | None, a: type[_A], b: type[_B], /) -> _A | _B | None: ...
@overload
def from_row(row: Mapping[str, Any] | None, a: type[_A], b: type[_B], c: type[_C], /) -> _A | _B | _C | None: ...
@overload
def from_row(
    row: Mapping[str, Any] | None, a: type[_A], b: type[_B], c: type[_C], d: type[_D], /
) -> _A | _B | _C | _D | None: ...
def from_row(row: Mapping[str, Any] | None, *kinds: Any) -> Any:
    """The configuration in a row of the table, of the one kind, or of that with the row's `variant`."""
    if row is None:
        return None
    if len(kinds) == 1:
        return kinds[0](**row)
    settings = dict(row)
    variant = settings.pop("variant")
    return next(kind for kind in kinds if kind.variant == variant)(**settings)


def to_row(config: Any) -> dict[str, Any]:
    """A configuration as a row of the table, without fields that are None."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    row = {name: value for name, value in values.items() if value is not None}
    return {"variant": config.variant, **row} if hasattr(config, "variant") else row


@functools.lru_cache(maxsize=4096)
def _tuned(kernel: str, size: int, index: int | None, row_bits: int = 0) -> dict[str, Any] | None:
    """`row_bits`: those of the number of rows, less one."""
    major, minor = (None if index is None else cuda_capability(index)) or _H200_CAPABILITY
    generation = 10 * major + minor
    for entry in _table(generation).get(kernel, ()):
        in_rows = entry.get("rows_above", 0) < 2**row_bits <= entry.get("rows_up_to", 2**row_bits)
        if entry.get("above", 0) < size <= entry["up_to"] and in_rows:
            return {name: value for name, value in entry.items() if name not in _PLACE}
    return None


@functools.cache
def _table(generation: int) -> dict[str, list[dict[str, Any]]]:
    paths = files("nearpeak.kernels").joinpath("tables").iterdir()
    tables = {int(path.name[2:-5]): path for path in paths if path.name[2:-5].isdigit()}  # others are of choices
    known = [number for number in tables if number <= generation]
    table: dict[str, list[dict[str, Any]]] = json.loads(tables[max(known)].read_text()) if known else {}
    return table


def spread_rows(together: int, warps: int, block: int, rows: int, processors: int) -> tuple[int, int]:
    """Rows and warps of a program whose rows are in registers: of a few rows, fewer in each program, and more warps.

    Until all multiprocessors have `BUSY_WARPS`, or a thread has one load of 16 bytes.
    """
    enough = processors * BUSY_WARPS
    while together > 1 and rows // together * warps < enough:
        together //= 2
        warps = max(min(warps, together * block // _ONE_LOAD), 1)
    while warps < 32 and together * block > _ONE_LOAD * warps and rows // together * warps < enough:
        warps *= 2
    return together, warps


def processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; that of an H200 for other devices."""
    return _processors(device.index if device.type == "cuda" else None)


def shared_bytes(device: torch.device) -> int:
    """The most shared memory of a program in bytes; that of an H200 for other devices."""
    return _shared_bytes(device.index if device.type == "cuda" else None)


@functools.cache
def _shared_bytes(index: int | None) -> int:
    if index is None or not torch.cuda.is_available():
        return 232_448
    properties: Any = torch.cuda.get_device_properties(index)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))  # not in torch 2.6


@functools.cache
def _processors(index: int | None) -> int:
    if index is None or not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
