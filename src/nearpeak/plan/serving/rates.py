"""What the GPUs of a deployment reach: bytes/s and FLOP/s, from the fitted shares and the datasheet.

Every product takes the p-norm (p = 3) of the time to read its weights and the time to multiply, so that one passes
smoothly into the other: with one token a product streams its weights, with thousands it multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

from nearpeak.errors import UsageError
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.plan.serving.constants import ServingConstants, compute_share, generation_constants
from nearpeak.plan.serving.deployment import Deployment

SHARPNESS = 3.0
"""Of the p-norm. Products of A100 to GB200 with 128, 512 and 4096 tokens lie on it within 10 %."""
ELEMENTWISE = 0.6
"""Share of the memory bandwidth that norms, activations and the like reach. Assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes/s and FLOP/s that a deployment reaches."""

    stream: float
    rest_stream: float
    expert_stream: float
    plain: float
    """Bytes/s of 16-bit weights."""
    cache: float
    elementwise: float
    rest_compute: float
    expert_compute: float
    half_compute: float
    attention: float
    gap: float
    """Fixed cost of a layer, against other generations."""
    provenance: Provenance


def rates(here: Deployment, constants: ServingConstants) -> Rates:
    """What the GPUs of `here` reach in its precision."""
    machine, chosen = here.cluster.machine, here.precision
    ceilings = machine.theoretical
    if ceilings is None:
        raise UsageError(f"{machine.name} has no datasheet figures. Name a machine of the catalogue.")
    found, provenance = generation_constants(machine, constants)
    half, _ = compute_share(found, "bfloat16", constants)
    expert, of_expert = compute_share(found, chosen.compute, constants)
    rest, of_rest = compute_share(found, chosen.rest_compute, constants)
    stream = ceilings.bandwidth * found.stream
    narrow = constants.narrow.get(chosen.name, 1.0) if chosen.weight_only else 1.0
    widened = constants.narrow_compute if chosen.weight_only else 1.0
    seen = constants.engines[here.engine].rows
    of_engine = Provenance(kind="fitted", text=f"{here.engine}: {seen} rows")
    if not seen:
        of_engine = Provenance(kind="transferred", text=f"{here.engine} has no rows: what servers have in common")
    grouped = constants.engines[here.engine].grouped
    peak = ceilings.peak
    return Rates(
        stream=stream * narrow,
        rest_stream=stream * (narrow if chosen.rest_bytes < 2 else 1.0),
        expert_stream=stream * narrow * (constants.expert_stream if grouped else 1.0),
        plain=stream,
        cache=stream * constants.cache,
        elementwise=ceilings.bandwidth * ELEMENTWISE,
        rest_compute=peak(chosen.rest_compute) * rest * (widened if chosen.rest_bytes < 2 else 1.0),
        expert_compute=peak(chosen.compute) * expert * (constants.expert_compute if grouped else 1.0) * widened,
        half_compute=peak("bfloat16") * half,
        attention=peak("bfloat16") * constants.attention * (constants.attention_narrow if chosen.kv_bytes < 2 else 1.0),
        gap=found.gap,
        provenance=weakest(provenance, of_expert, of_rest, of_engine),
    )


def norm(memory: float, compute: float) -> float:
    """Both at once: near the larger one, above it where they are alike."""
    return float((memory**SHARPNESS + compute**SHARPNESS) ** (1 / SHARPNESS))
