"""`Efficiency`: the few constants that training time needs beyond datasheets, fitted on published runs.

`benchmarks.plan.fit_training` writes `training_constants.json` from the measurements, with the runs behind each one. A
constant of an architecture without runs comes from the nearest one, and its provenance is "transferred".
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

from nearpeak.errors import UsageError
from nearpeak.machines import catalogue
from nearpeak.machines.machine import Machine
from nearpeak.plan.provenance import Provenance

FLASH_ATTENTION_2_YEAR = 2024.0
"""Since when training software has FlashAttention-2."""
MATURITY_YEAR, NEWEST_YEAR = 2026.0, 2026.7
"""The software that `Efficiency.maturity` is relative to, and the newest in published runs (August 2026): nothing is
extrapolated beyond it."""
POWER_EXPONENT = 1.0
"""GEMM rate goes with the power limit to this power. Assumed."""
GRAPHED_EXPERTS_YEAR = 2026.4
"""Since when dropless expert layers run inside CUDA graphs, without the host (Megatron Core)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Fitted constants: shares of datasheet figures, multiples of minimum traffic, and seconds."""

    gemm_ampere: float = 0.75
    """Share of the 16-bit peak that large GEMMs reach, power and clock included; by architecture."""
    gemm_hopper: float = 0.72
    gemm_blackwell: float = 0.62
    gemm_ultra: float = 1.2
    """Blackwell Ultra against Blackwell: more power."""
    maturity: float = 1.08
    """Yearly growth of Blackwell's GEMM rate in 8 and 4 bits, relative to software of 2026. GEMMs in 16 bits have not
    changed."""
    float8_hopper: float = 0.9
    """Utilization of 8-bit GEMMs against 16-bit ones."""
    float8_blackwell: float = 0.9
    float4_blackwell: float = 0.75
    attention_ampere: float = 0.6
    """Share of the 16-bit peak that fused attention reaches."""
    attention_hopper: float = 0.45
    attention_blackwell: float = 0.5
    attention_first: float = 0.6
    """The first fused kernels (FlashAttention 1, until 2023) against later ones."""
    memory: float = 0.85
    """Share of the memory bandwidth that kernels reach. Not fitted: what copies and norms measure."""
    traffic_fused: float = 1.0
    """Traffic of norms, activations, rotary embeddings and residuals over its minimum, in fused software."""
    traffic_eager: float = 2.0
    state_space: float = 6.0
    """Traffic of the convolution and scan of a state-space layer, as a multiple of the minimum."""
    quantize_tensor: float = 1.0
    """Traffic of casts to 8 bits with a scale per tensor, as a multiple of reading 16 and writing 8 bits twice."""
    quantize_block: float = 1.5
    quantize_fine: float = 2.0
    launch_fused: float = 120e-6
    """Host seconds that the launches of one layer take, forward and backward, where kernels are fused."""
    launch_eager: float = 400e-6
    step: float = 0.02
    """Constant seconds of a step: the data loader, logging, the start of the optimizer."""
    tensor_exposed: float = 0.4
    """Share of tensor-parallel communication that is not hidden, where GEMMs are split to overlap with it."""
    context_exposed: float = 0.3
    pipeline_exposed: float = 0.5
    data_hidden: float = 0.6
    """Share of the time of backward passes (forward, for gathered weights) behind which data-parallel traffic hides."""
    sharded_hidden: float = 0.8
    """The same for weights that are gathered layer by layer (ZeRO-3, FSDP)."""
    network: float = 0.7
    """Share of the collective's modeled rate that large groups across nodes reach in training."""
    expert_exposed: float = 0.7
    """Share of the experts' all-to-all that is not hidden, where it overlaps with another microbatch."""
    expert_traffic: float = 1.5
    """Traffic of routing, permuting and combining tokens, as a multiple of reading and writing them once."""
    expert_sync: float = 2e-3
    """Seconds of one expert layer, forward and backward, in which the host waits for the token counts."""
    expert_each: float = 200e-6
    """Seconds that each expert on a rank adds to that: launches of its GEMMs and casts."""
    expert_graph: float = 0.5
    """What is left of both where shapes do not depend on routing: dropped tokens, software since mid 2026."""
    expert_fused: float = 0.5
    """What is left of an expert layer's casts and traffic with the fused kernels since mid 2026."""
    expert_network: float = 1.0
    """Share of the modeled rate that the experts' all-to-all reaches across nodes."""
    expert_gemm: float = 0.95
    """Utilization of grouped GEMMs against single ones. Not fitted: the rest of an expert layer hides it."""
    straggle: float = 0.01
    """Relative growth of a step with each doubling of nodes: the slowest GPU, contention."""
    layer_scale: float = 1.0
    """Measured over planned computation of layers, from a profile of the user's (`calibration.py`); not fitted."""
    output_scale: float = 1.0
    """The same for embedding, output layer and loss."""
    optimizer_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedEfficiency:
    """The constants and their provenance."""

    values: Efficiency
    provenance: dict[str, Provenance]
    error: float
    """Mean absolute error of step times of sources that were left out of the fit."""

    def of(self, *names: str) -> tuple[Provenance, ...]:
        """The provenance of these constants."""
        unknown = Provenance(kind="assumed", text="no measurement")
        return tuple(self.provenance.get(name, unknown) for name in names)


@cache
def load_efficiency() -> FittedEfficiency:
    """The constants of `training_constants.json`."""
    text = resources.files("nearpeak.plan.training").joinpath("training_constants.json").read_text(encoding="utf-8")
    data = json.loads(text)
    known = {field.name for field in fields(Efficiency)}
    values = {name: float(entry["value"]) for name, entry in data["constants"].items() if name in known}
    provenance = {
        name: Provenance(kind=entry["kind"], text=entry["source"]) for name, entry in data["constants"].items()
    }
    return FittedEfficiency(values=Efficiency(**values), provenance=provenance, error=float(data["error"]))


def fitted_generation(machine: Machine) -> str:
    """The generation of GPUs whose constants are used; for an architecture without runs, the nearest."""
    known = {"ampere": "ampere", "ada": "ampere", "turing": "ampere", "volta": "ampere", "hopper": "hopper"}
    return known.get(machine.architecture, "blackwell" if machine.architecture.startswith("blackwell") else "hopper")


def is_ultra(machine: Machine) -> bool:
    """Whether this is Blackwell Ultra."""
    return machine.id.startswith(("b300", "gb300"))


def power_share(machine: Machine) -> float:
    """GEMM rate under the machine's power limit, against that at the limit of the datasheet; at most 1.

    Assumed: large GEMMs run at the power limit, and their rate is proportional to it.
    """
    if machine.power_watts is None:
        return 1.0
    datasheet = next((known.power_watts for known in catalogue.machines() if known.id == machine.id), None)
    return 1.0 if not datasheet else min(1.0, machine.power_watts / datasheet) ** POWER_EXPONENT


def gemm_rate(machine: Machine, dtype: str, year: float, efficiency: Efficiency) -> float:
    """FLOP/s of large GEMMs in `dtype` with software of `year`."""
    if machine.theoretical is None:
        raise UsageError(f"{machine.name} has no datasheet figures to plan with.")
    peaks, kind = machine.theoretical.matrix, fitted_generation(machine)
    if dtype not in peaks:
        nearest = next((name for name in ("float8", "bfloat16", "float16") if name in peaks), "float32")
        raise UsageError(
            f"{machine.name} has no matrix engine for {dtype}. Nearest: {nearest}. It has {', '.join(peaks)}."
        )
    share: float = getattr(efficiency, f"gemm_{kind}") * power_share(machine)
    if is_ultra(machine):
        share *= efficiency.gemm_ultra
    if kind == "blackwell" and dtype in ("float8", "float4"):
        share *= efficiency.maturity ** (min(year, NEWEST_YEAR) - MATURITY_YEAR)
    if dtype == "float8":
        share *= efficiency.float8_blackwell if kind == "blackwell" else efficiency.float8_hopper
    elif dtype == "float4":
        # the 4-bit peak of Blackwell Ultra is half as high again, and GEMMs in training do not follow it
        share *= efficiency.float4_blackwell
        return share * min(peaks[dtype], 2 * peaks["float8"])
    return share * peaks[dtype]


def attention_rate(machine: Machine, year: float, efficiency: Efficiency) -> float:
    """FLOP/s of fused attention in 16 bits."""
    assert machine.theoretical is not None
    peaks = machine.theoretical.matrix
    share: float = getattr(efficiency, f"attention_{fitted_generation(machine)}") * power_share(machine)
    if is_ultra(machine):
        share *= efficiency.gemm_ultra
    return (
        share
        * (efficiency.attention_first if year < FLASH_ATTENTION_2_YEAR else 1.0)
        * peaks.get("bfloat16", peaks.get("float16", 0.0))
    )
