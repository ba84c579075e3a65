"""Configurations of decode attention and cache append: the measured ones, heuristics, and candidates for the tuner."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nearpeak.kernels._runtime.launch import next_power_of_2
from nearpeak.kernels._runtime.tuning import from_row, tuned

MAX_TILE_ROWS = 32
"""Queries of a tile. Further ones read the keys again, from the L2 cache. With 64 rows Triton uses the asynchronous
matrix instructions of Hopper, for which Triton 3.6 is known to omit waits."""
SHARED_ROWS = 16
"""Queries of a tile if values are columns of keys: more leave no registers, and take 1.4 times as long."""
_MAX_SPLITS = 512
_FULL_WAVE = 0.95
"""The share of the slots for programs that a full wave takes."""
_MOST_WAVES = 8
"""Of programs that do not fit into one."""
_BANDWIDTH, _START_SECONDS, _LATENCY_SECONDS = 4.6e12, 3.3e-6, 1.6e-6
"""Of an H200: bytes in a second, what each wave of programs takes to start and to end, and a load under way."""
_MANY_SPLITS = 24
"""Splits of a sequence from which on fewer are faster: the last program merges the partial results of all of them."""
_BYTES_IN_FLIGHT = 2**17
"""On their way to a multiprocessor: with half as many, one program for heads of 64 reached 4.0 TB/s of an H200 where
cuDNN had 4.3."""
_MANY_TOKENS = 4096
"""Tokens from which on a program appends four times as many elements; with fewer there would be too few programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How decode attention is launched."""

    block: int
    """Keys of a block."""
    warps: int
    stages: int
    """Stages of the software pipeline: blocks in flight."""
    programs: int
    """Programs that run at a time on a multiprocessor."""
    rows: int = MAX_TILE_ROWS
    """The most queries of a tile."""
    splits: int | None = None
    """Programs that share the keys of a sequence; None for `choose_splits`."""

    def bytes_in_flight(self, token_bytes: int) -> int:
        """Of a program, if a token has so many bytes of keys and values."""
        return self.block * token_bytes * max(self.stages - 1, 1)

    def halved(self) -> DecodeConfig:
        """Twice as many programs at a time, of half as many keys each: one loads while another starts or ends."""
        return replace(self, block=self.block // 2, warps=max(self.warps // 2, 4), programs=2 * self.programs)

    def max_registers(self) -> int | None:
        """Registers of a thread with which so many programs fit on a multiprocessor; None for no limit."""
        most = 65536 // (32 * self.warps * self.programs) // 8 * 8
        return most if most < 255 else None


def decode_config(
    dim: int, value_dim: int, element_bytes: int, alone: bool, many: bool, paged: bool, several: bool,
    device: torch.device,
) -> DecodeConfig:  # fmt: skip
    """The configuration for keys of this size.

    `alone`: a single query sees each head of keys. `many`: more than 16 do. `several`: `takes_several_waves`.
    """
    row = tuned(decode_table_key(alone, paged, several), dim * element_bytes, device)
    return from_row(row, DecodeConfig) or decode_heuristic(dim, value_dim, element_bytes, alone, many)


def decode_table_key(alone: bool, paged: bool, several: bool = False) -> str:
    """The name of a kernel in tables, where its size is the bytes of a key."""
    return ("decode_row" if alone else "decode") + "_paged" * paged + "_several" * several


def takes_several_waves(programs: int, processors: int) -> bool:
    """Whether so many programs, each split, leave many multiprocessors without one if each has one: such as 112 of 132.

    Then a multiprocessor has several programs, one after another or at a time, each of which takes its time to start.
    """
    return max(processors // programs, 1) * programs < _FULL_WAVE * processors or programs > processors


def decode_heuristic(dim: int, value_dim: int, element_bytes: int, alone: bool, many: bool) -> DecodeConfig:
    """A configuration for sizes without a measurement.

    Blocks have up to 32 KiB of keys and as much of values. Three to six of them are on a multiprocessor, some in use
    and the others in flight.
    """
    width = max(16, next_power_of_2(max(dim, value_dim)))
    is_large = element_bytes > 1 and not alone and not many
    # a query alone has an accumulator in registers for each value of a block
    most = 8192 // width if alone else 128
    block = max(16, min(128, (32768 if is_large else 16384) // (width * element_bytes), most))
    stages, programs = 4, 2
    if is_large:  # one program, so that there are few partial results to merge
        stages = 3
        programs = max(1, _BYTES_IN_FLIGHT // (2 * block * dim * element_bytes * (stages - 1)))
    elif many:  # accumulators take shared memory too
        stages = 3
    elif element_bytes == 1 and not alone:  # more instructions per byte: more warps hide their latency
        stages, programs = 3, 3
    return DecodeConfig(block=block, warps=8 if alone else 4, stages=stages, programs=programs)


def shared_config(
    dim: int, element_bytes: int, narrow: bool, programs: int, most_splits: int, processors: int
) -> DecodeConfig:
    """The configuration for values that are columns of keys, in so many programs without splits.

    Two programs on a multiprocessor, of which one computes while the other loads. One alone if there are not more, if a
    sequence would have many partial results, or if products are in float32 (not `narrow`), which takes all registers.
    """
    two, one = shared_candidates(dim, element_bytes)
    splits = min(two.programs * processors // programs, most_splits)
    return two if narrow and splits <= _MANY_SPLITS and max(splits, 1) * programs > processors else one


def shared_candidates(dim: int, element_bytes: int) -> list[DecodeConfig]:
    """Configurations for values that are columns of keys: two programs on a multiprocessor, and one.

    Accumulators and queries take the registers of 4 warps each, or of 8. There are blocks of about 128 KiB in all.
    """
    most = 65536 // (next_power_of_2(dim) // 2 * element_bytes)
    return [
        DecodeConfig(block=max(16, min(128, block)), warps=warps, stages=3, programs=8 // warps, rows=SHARED_ROWS)
        for block, warps in ((most // 2, 4), (most, 8))
    ]


def decode_candidates(size: int, alone: bool = False) -> list[DecodeConfig]:
    """Configurations worth measuring for keys of so many bytes."""
    configs = []
    for block in (16, 32, 64, 128):
        for warps in (2, 4, 8):
            for stages, programs in ((3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3), (6, 1), (3, 4)):
                in_flight = 2 * block * size * (stages - 1) * programs
                fits = 96 * 1024 <= in_flight <= 200 * 1024 and 8192 <= block * size <= 32768
                if fits and (warps == 4 or in_flight >= 160 * 1024) and (alone or warps <= 4):
                    configs.append(DecodeConfig(block=block, warps=warps, stages=stages, programs=programs))
    return configs


@functools.lru_cache(maxsize=4096)
def choose_splits(programs: int, slots: int, most: int, sequence_bytes: int, bytes_in_flight: int) -> int:
    """How many programs share the keys of a sequence (split-KV), if `slots` programs run at a time.

    So many that all run in one wave that leaves no slot empty. If no number does that, the one of which
    `launch_seconds` expects the least. It follows from what the host knows: the lengths are on the device, and one CUDA
    graph serves all of them.
    """
    most = max(1, min(most, _MAX_SPLITS))
    once = min(slots // programs, most)
    if once == most or once * programs >= _FULL_WAVE * slots:
        return once
    return min(
        range(1, min(most, _MOST_WAVES * slots // programs + 1) + 1),
        key=lambda splits: launch_seconds(programs * splits, slots, sequence_bytes / splits, bytes_in_flight),
    )


def launch_seconds(programs: int, slots: int, program_bytes: float, bytes_in_flight: int) -> float:
    """About what a launch takes: its bytes, the start of each wave, and a last wave too small for the bandwidth.

    Within 6 % of what an H200 took for caches of 13 x 10236, 15 x 2816 and 7 x 28544 tokens in 4 to 6 waves. A wave
    that is not full costs little: memory has the same bandwidth for fewer programs, as long as enough bytes are on
    their way.
    """
    waves = -(-programs // slots)
    last = programs - (waves - 1) * slots
    seconds = programs * program_bytes / _BANDWIDTH + waves * _START_SECONDS
    own = program_bytes * _LATENCY_SECONDS / bytes_in_flight
    return seconds + max(own - last * program_bytes / _BANDWIDTH, 0.0)


def faster_of(
    configs: Sequence[DecodeConfig], programs: int, most: int, token_bytes: int, tokens: int, processors: int
) -> DecodeConfig:
    """The configuration with which `launch_seconds` expects the least; the first of equal ones."""

    def seconds(config: DecodeConfig) -> float:
        slots, in_flight = config.programs * processors, config.bytes_in_flight(token_bytes)
        splits = choose_splits(programs, slots, most, tokens * token_bytes, in_flight)
        return launch_seconds(programs * splits, slots, tokens * token_bytes / splits, in_flight)

    return min(configs, key=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendConfig:
    """How cache append is launched."""

    tokens: int
    """Tokens of a program."""
    heads: int
    """Heads of a program."""
    warps: int


def append_config(tokens: int, heads: int, dim: int, device: torch.device) -> AppendConfig:
    """The configuration for so many tokens, with heads of `dim` elements."""
    return from_row(tuned("cache_append", dim, device), AppendConfig) or append_heuristic(tokens, heads, dim)


def append_heuristic(tokens: int, heads: int, dim: int) -> AppendConfig:
    """A configuration for sizes without a measurement: 16 bytes of 16 bits per thread, and more for many tokens."""
    together = min(next_power_of_2(heads), 8)
    elements = together * next_power_of_2(dim)
    if tokens < _MANY_TOKENS:
        return AppendConfig(tokens=1, heads=together, warps=max(1, min(4, elements // 256)))
    return AppendConfig(tokens=max(1, min(16, 4096 // elements)), heads=together, warps=4)


def append_candidates(dim: int, heads: int = 8) -> list[AppendConfig]:
    """Configurations worth measuring for heads of this size."""
    return [
        AppendConfig(tokens=tokens, heads=together, warps=warps)
        for tokens in (1, 2, 4, 8)
        for together in sorted({min(next_power_of_2(heads), number) for number in (1, 2, 4, 8)})
        for warps in (1, 2, 4)
        if 4 <= tokens * together * next_power_of_2(dim) // (32 * warps) <= 32
    ]
