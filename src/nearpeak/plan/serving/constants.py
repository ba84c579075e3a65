"""The constants of serving, from `serving.json`: efficiency of GEMMs and caches, overheads of engines, provenance.

`benchmarks.plan.fit_serving` fits them on published runs and writes the file. Shares are of the datasheet's figure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from statistics import fmean

from nearpeak._records import from_json
from nearpeak.machines.machine import Machine
from nearpeak.plan.provenance import Provenance

ENGINES = ("vllm", "sglang", "trtllm", "gpt-fast")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConstants:
    """Efficiency of one generation of GPUs."""

    stream: float
    """Share of the memory bandwidth at which weights are read."""
    gap: float
    """Fixed cost of layers, relative to other generations."""
    compute: Mapping[str, float]
    """Share of the dense peak that large GEMMs reach, by dtype."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Measured rows behind each figure: "stream" and the dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConstants:
    """Overheads of one serving engine, in seconds."""

    layer: float
    """Per step and layer of four GEMMs, when kernels are launched as a graph: norms, rotary embeddings, gaps between
    kernels. Proportional to the number of GEMMs, as in layers with latent attention."""
    expert_layer: float
    """Per layer with experts, beyond `layer`: routing, sorting, the second GEMM."""
    step: float
    """Exposed host time per step."""
    sequence: float
    """Host and sampling time per step and sequence."""
    launch: float
    """Host time per layer when kernels are launched one by one, as most engines do for prompts."""
    expert_launch: float
    """The same for a layer with experts, beyond `launch`."""
    first: float
    """Per request before its first step: network, tokens, scheduling."""
    collective: float
    """Latency of a small all-reduce relative to NCCL's: engines have custom kernels."""
    overlaps: bool
    """Whether the host prepares the next step while the device works on this one; not between pipeline stages."""
    grouped: bool
    """Whether all experts of a layer are one grouped GEMM; otherwise those of each token are separate GEMMs."""
    reserves: bool
    """Whether a request is admitted only when its whole output fits into the KV cache."""
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingConstants:
    """All constants of `serving.json`."""

    source: str
    generations: Mapping[str, GenerationConstants]
    engines: Mapping[str, EngineConstants]
    cache: float
    """Rate of reading the KV cache, relative to weights."""
    attention: float
    """Share of the 16-bit peak that attention over a prompt reaches."""
    attention_narrow: float
    """Factor of `attention` with a cache in 8 bits."""
    expert_stream: float
    """Rate of reading the weights of experts, relative to other weights."""
    expert_compute: float
    """Rate of grouped GEMMs, relative to plain ones."""
    expert_rows: float
    """Rows of padding of each group of a grouped GEMM."""
    expert_width: float
    """Width of an expert on one GPU at which grouped GEMMs run at half their rate."""
    narrow: Mapping[str, float]
    """Rate of reading weight-only quantized weights, relative to others, by precision."""
    narrow_compute: float
    """Rate of GEMMs with weight-only quantization, relative to others."""
    variety: float
    """Exponent: `tokens ** variety` tokens of a batch choose their experts independently."""
    skew: float
    """Excess load of the busiest group of experts over the mean, for many groups."""
    occupancy: float
    """Mean number of running requests of a batch job over the maximum."""
    burst: float
    """Share of requests that arrive at the same time, at the start of a benchmark."""
    fitted_on: Mapping[str, int] = field(default_factory=dict)
    """Rows by source."""
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By quantity: 10th and 90th percentile of measured over predicted, for runs whose source was left out."""
    without: Mapping[str, ServingConstants] = field(default_factory=dict)
    """By left-out source: the constants as fitted without its rows."""

    def leaving_out(self, source: str) -> ServingConstants:
        """The constants as fitted without the rows of `source`; these where it has none."""
        return self.without.get(source, self)


def serving_generation(machine: Machine) -> str:
    """The key of a machine's constants: its architecture, with "-gddr" for cards with GDDR memory."""
    gddr = machine.memory_kind is not None and machine.memory_kind.startswith("GDDR")
    return f"{machine.architecture}-gddr" if gddr else machine.architecture


def generation_constants(machine: Machine, constants: ServingConstants) -> tuple[GenerationConstants, Provenance]:
    """The constants of `machine`; a generation without rows gets the geometric mean of the others."""
    name = serving_generation(machine)
    generation = constants.generations.get(name)
    if generation is not None:
        count = sum(generation.rows.values())
        text = f"{name}: {count} rows" if count else f"{name}: products timed one by one"
        return generation, Provenance(kind="fitted", text=text)
    mean = _mean_generation(tuple(constants.generations.values()))
    text = f"{name} has no rows: mean of {', '.join(constants.generations)}"
    return mean, Provenance(kind="transferred", text=text)


def compute_share(generation: GenerationConstants, dtype: str, constants: ServingConstants) -> tuple[float, Provenance]:
    """The share of the peak that large GEMMs of `dtype` reach; the mean of other generations without rows."""
    share = generation.compute.get(dtype)
    if share is not None:
        rows = generation.rows.get(dtype, 0)
        kind: Provenance = Provenance(kind="fitted", text=f"{dtype} products: {rows} rows")
        return share, kind
    others = [item.compute[dtype] for item in constants.generations.values() if dtype in item.compute]
    near = others or list(generation.compute.values())
    what = "other generations" if others else "other dtypes"
    return _mean(near), Provenance(kind="transferred", text=f"{dtype} products: mean of {what}")


def _mean_generation(items: tuple[GenerationConstants, ...]) -> GenerationConstants:
    dtypes = dict.fromkeys(dtype for item in items for dtype in item.compute)
    compute = {dtype: _mean(item.compute[dtype] for item in items if dtype in item.compute) for dtype in dtypes}
    return GenerationConstants(
        stream=_mean(item.stream for item in items), gap=_mean(item.gap for item in items), compute=compute
    )


def _mean(values: Iterable[float]) -> float:
    return math.exp(fmean(math.log(value) for value in values))


@cache
def load_serving_constants() -> ServingConstants:
    """The constants of `serving.json`."""
    text = resources.files("nearpeak.plan.serving").joinpath("serving.json").read_text(encoding="utf-8")
    return from_json(ServingConstants, json.loads(text))
