"""The constants of serving: what products, caches and engines reach, from `serving.json`, with where they come from.

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
    """What the GPUs of one generation reach."""

    stream: float
    """Share of the memory bandwidth at which weights are read."""
    gap: float
    """Fixed cost of layers against that of other generations."""
    compute: Mapping[str, float]
    """Share of the dense peak that large products reach, by dtype."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Measured rows behind each figure: "stream" and the dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConstants:
    """What one serving engine adds to the work itself; seconds."""

    layer: float
    """Per layer of four products and step, when kernels are launched as a graph: norms, rotary, gaps between kernels.
    Layers with more products, as those with latent attention, take as much more."""
    expert_layer: float
    """Per layer with experts, beyond `layer`: routing, sorting, the second product."""
    step: float
    """Host time per step that nothing hides."""
    sequence: float
    """Host and sampling time per step and sequence."""
    launch: float
    """Host time per layer when kernels are launched one by one, as most engines do for prompts."""
    expert_launch: float
    """The same for a layer with experts, beyond `launch`."""
    first: float
    """Per request before its first step: network, tokens, scheduling."""
    collective: float
    """Latency of a small all-reduce against NCCL's: engines have kernels of their own."""
    overlaps: bool
    """Whether the host prepares the next step while the device works on this one; not between pipeline stages."""
    grouped: bool
    """Whether all experts of a layer are one grouped product; else those of each token are multiplied like others."""
    reserves: bool
    """Whether a request is only let in when its whole output has room in the KV cache."""
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingConstants:
    """The whole file."""

    source: str
    generations: Mapping[str, GenerationConstants]
    engines: Mapping[str, EngineConstants]
    cache: float
    """Rate of reading the KV cache against that of reading weights."""
    attention: float
    """Share of the 16-bit peak that attention over a prompt reaches."""
    attention_narrow: float
    """The same with a cache of 8 bits, against that."""
    expert_stream: float
    """Rate of reading experts' weights against that of others."""
    expert_compute: float
    """Rate of grouped products against that of plain ones."""
    expert_rows: float
    """Rows that a group of a grouped product has beyond its tokens: groups are padded to tiles."""
    expert_width: float
    """Width of an expert on one GPU at which grouped products run at half their rate."""
    narrow: Mapping[str, float]
    """Rate of reading weights that are widened before they are multiplied, against others: by precision."""
    narrow_compute: float
    """Rate of products whose weights are widened first, against others."""
    variety: float
    """Exponent: as many tokens of a batch choose their experts independently. 1: all of them."""
    skew: float
    """Load of the busiest part of the experts beyond the mean, as the number of parts grows."""
    occupancy: float
    """Requests that run at once on the average against the most that can, from the first to the last of a batch job."""
    burst: float
    """Share of requests that come at the same time as all the others: those that open a benchmark."""
    fitted_on: Mapping[str, int] = field(default_factory=dict)
    """Rows by source."""
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By quantity: measured over predicted, the 10th and the 90th percentile of runs whose source was left out."""
    without: Mapping[str, ServingConstants] = field(default_factory=dict)
    """By left-out source: the constants as fitted without its rows."""

    def leaving_out(self, source: str) -> ServingConstants:
        """The constants as fitted without the rows of `source`; these where it has none."""
        return self.without.get(source, self)


def serving_generation(machine: Machine) -> str:
    """The name under which constants are kept: a generation, and apart those of its cards with GDDR memory."""
    gddr = machine.memory_kind is not None and machine.memory_kind.startswith("GDDR")
    return f"{machine.architecture}-gddr" if gddr else machine.architecture


def generation_constants(machine: Machine, constants: ServingConstants) -> tuple[GenerationConstants, Provenance]:
    """What `machine` reaches; a generation without rows gets the geometric mean of the others."""
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
    """The share of the peak that large products of `dtype` reach; from the other generations where it was not seen."""
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
    """The constants that are part of the package."""
    text = resources.files("nearpeak.plan.serving").joinpath("serving.json").read_text(encoding="utf-8")
    return from_json(ServingConstants, json.loads(text))
