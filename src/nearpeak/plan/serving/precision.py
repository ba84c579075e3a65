"""`Precision`: what weights, products and the KV cache are held in when a model is served.

>>> precision("fp8").weight_bytes, precision("fp8").kv_bytes, precision("int4").compute
(1.0, 1.0, 'bfloat16')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.machines.model import Machine
from nearpeak.plan.models.model import Model

KV_BYTES: Mapping[str, float] = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How a served model is held and multiplied."""

    name: str
    weight_bytes: float
    """Of one weight of a quantised matrix, its scales included."""
    compute: str
    """The machine's dtype that products run in."""
    activation_bytes: float
    """Of one input value of a product."""
    kv_bytes: float
    rest_bytes: float
    """Of one weight of the products outside of the experts."""
    rest_compute: str
    weight_only: bool = False
    """Whether weights are widened on the way to the multipliers, which run in `compute`."""


_PRECISIONS: Mapping[str, Precision] = {
    item.name: item
    for item in (
        Precision(
            name="bf16",
            weight_bytes=2.0,
            compute="bfloat16",
            activation_bytes=2.0,
            kv_bytes=2.0,
            rest_bytes=2.0,
            rest_compute="bfloat16",
        ),
        Precision(
            name="fp8",
            weight_bytes=1.0,
            compute="float8",
            activation_bytes=1.0,
            kv_bytes=1.0,
            rest_bytes=1.0,
            rest_compute="float8",
        ),
        Precision(  # blocks of 16 with a scale of 8 bits
            name="fp4",
            weight_bytes=0.5625,
            compute="float4",
            activation_bytes=0.5625,
            kv_bytes=1.0,
            rest_bytes=0.5625,
            rest_compute="float4",
        ),
        Precision(
            name="int8",
            weight_bytes=1.0,
            compute="bfloat16",
            activation_bytes=2.0,
            kv_bytes=2.0,
            rest_bytes=1.0,
            rest_compute="bfloat16",
            weight_only=True,
        ),
        Precision(  # groups of 32 with a scale and a zero point of 16 bits each
            name="int4",
            weight_bytes=0.625,
            compute="bfloat16",
            activation_bytes=2.0,
            kv_bytes=2.0,
            rest_bytes=0.625,
            rest_compute="bfloat16",
            weight_only=True,
        ),
    )
}
_SAME = {"bfloat16": "bf16", "fp16": "bf16", "float16": "bf16", "float8": "fp8", "float4": "fp4", "nvfp4": "fp4"}
_SAME |= {"mxfp4": "fp4", "int4-g32": "int4"}


def precision(name: str, *, kv: str | None = None) -> Precision:
    """The precision of this name; `kv` replaces that of the KV cache ("bf16", "fp8")."""
    found = _PRECISIONS.get(_SAME.get(name, name))
    if found is None:
        raise UsageError(f"precision={name!r} is not known. {did_you_mean(name, _PRECISIONS)}")
    if kv is None:
        return found
    if kv not in KV_BYTES:
        raise UsageError(f"kv={kv!r} is not a precision of the KV cache. {did_you_mean(kv, KV_BYTES)}")
    return replace(found, kv_bytes=KV_BYTES[kv])


def precision_on(machine: Machine, model: Model, chosen: Precision) -> Precision:
    """`chosen` as it runs on `machine`, for `model`; UsageError where the machine cannot.

    Published checkpoints in 4 bits of models with latent attention or attention sinks (DeepSeek, GPT-OSS) hold only
    their experts in 4 bits. Where multipliers of 4 bits are missing, engines widen such weights to 16 bits.
    """
    matrix = machine.theoretical.matrix if machine.theoretical is not None else {}
    if chosen.compute == "float4":
        if model.is_moe and (model.kv_rank or model.sinks):
            chosen = replace(chosen, rest_bytes=2.0, rest_compute="bfloat16")
        if "float4" not in matrix:
            chosen = replace(chosen, compute="bfloat16", activation_bytes=2.0, weight_only=True)
            if chosen.rest_compute == "float4":
                chosen = replace(chosen, rest_compute="bfloat16")
    for dtype in (chosen.compute, chosen.rest_compute):
        if matrix and dtype not in matrix:
            valid = [name for name, item in _PRECISIONS.items() if item.compute in matrix]
            nearest = f" It has {', '.join(matrix)}."
            if valid:
                nearest = f" Nearest: {'int8' if 'int8' in valid else valid[0]}; it can run {', '.join(valid)}."
            raise UsageError(f"precision={chosen.name!r}: {machine.name} has no {dtype} products.{nearest}")
    return chosen
