"""`StepRates`: compute and memory rates of a step that can be compared with others: MFU, HFU, shares of ceilings.

Conventions, since there are several:

* FLOPs are those of GEMMs, convolutions and attention, which run on a matrix engine. A multiply-add is 2. Vector work
  (norms, activations, optimizers) is not counted.
* They are counted op by op as they ran, not by a formula for a whole model. Causal attention counts the unmasked half;
  a convolution counts in the direct form, without taps on padding, whatever algorithm ran.
* Model FLOPs are what the mathematics requires. Recomputation counts among hardware FLOPs only: a forward that runs
  again in the backward pass, and the scores that the backward of fused attention recomputes.
* The peak is the dense rate of the datasheet for the dtype of each op: of the matrix engine, or of the vector units
  without one, as for float32 without tf32 on a GPU. With several dtypes, the utilization is the time that all FLOPs
  take at their own peaks over the wall time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nearpeak._records import Amount
from nearpeak.bound.estimate import Estimate
from nearpeak.machines.machine import Achievable, Machine, Theoretical
from nearpeak.ops.cost import Cost, costs_of
from nearpeak.ops.op import Op, Trace
from nearpeak.ops.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """Rates of one step; None if the machine has no such ceiling, or no kernel was measured.

    Shares are of the achievable ceilings: over the wall time, and over the kernel time.
    """

    model_flops: Amount
    hardware_flops: Amount
    mfu: Amount | None
    """Model FLOPs utilization: of the datasheet's dense peak, over the wall time."""
    hfu: Amount | None
    """Hardware FLOPs utilization."""
    recompute_known: bool
    """False for a trace file, which does not show recomputation: it counts as model FLOPs."""
    memory_bytes: Amount
    """The least memory traffic of the ops as written. The true rates are at least as high."""
    flops_per_s: Amount
    """Hardware FLOPs over the wall time."""
    bytes_per_s: Amount
    """`memory_bytes` over the wall time."""
    compute_share: Amount | None
    bandwidth_share: Amount | None
    kernel_flops_per_s: Amount | None
    """The following four are over the kernel time."""
    kernel_bytes_per_s: Amount | None
    kernel_compute_share: Amount | None
    kernel_bandwidth_share: Amount | None


def step_rates(
    trace: Trace, estimate: Estimate, machine: Machine, *, wall_s: float, kernel_s: float, recompute_known: bool = True
) -> StepRates | None:
    """The rates of a traced step; None if it took no time."""
    if wall_s <= 0.0:
        return None
    model: dict[str, float] = {}
    hardware: dict[str, float] = {}
    for op, cost in zip(trace.ops, costs_of(trace.ops), strict=True):
        flops = cost.product_flops
        if flops:
            share = 0.0 if op.recomputed else 1.0 - _recomputed_scores_share(op, cost)
            for dtype, count in flops.items():
                hardware[dtype] = hardware.get(dtype, 0.0) + count
                model[dtype] = model.get(dtype, 0.0) + share * count
    total = sum(hardware.values())
    moved = estimate.memory_bytes
    at_ceiling = _seconds_at_peak(hardware, machine.achievable)
    bandwidth = None if machine.achievable is None else machine.achievable.bandwidth
    kernels = kernel_s if kernel_s > 0.0 else None
    return StepRates(
        model_flops=sum(model.values()),
        hardware_flops=total,
        mfu=_ratio(_seconds_at_peak(model, machine.theoretical), wall_s),
        hfu=_ratio(_seconds_at_peak(hardware, machine.theoretical), wall_s),
        recompute_known=recompute_known,
        memory_bytes=moved,
        flops_per_s=total / wall_s,
        bytes_per_s=moved / wall_s,
        compute_share=_ratio(at_ceiling, wall_s),
        bandwidth_share=None if bandwidth is None else moved / wall_s / bandwidth,
        kernel_flops_per_s=_ratio(total, kernels),
        kernel_bytes_per_s=_ratio(moved, kernels),
        kernel_compute_share=_ratio(at_ceiling, kernels),
        kernel_bandwidth_share=None if bandwidth is None else _ratio(moved / bandwidth, kernels),
    )


def _ratio(value: float | None, seconds: float | None) -> float | None:
    return None if value is None or seconds is None else value / seconds


def _seconds_at_peak(flops: Mapping[str, float], ceilings: Theoretical | Achievable | None) -> float | None:
    """The time that FLOPs take at the peaks of their dtypes; None if one has no peak."""
    total = 0.0
    for dtype, count in flops.items():
        peak = None if ceilings is None else ceilings.matrix.get(dtype) or ceilings.vector.get(dtype)
        if not peak:
            if count:
                return None
            continue
        total += count / peak
    return None if ceilings is None else total


def _recomputed_scores_share(op: Op, cost: Cost) -> float:
    """The share of a fused attention backward that recomputes the scores: usually one GEMM of five."""
    if cost.family != "attention" or "_backward" not in op.name:
        return 0.0
    query, value = (op.arguments.get(name, op.arguments.get(place)) for name, place in (("query", "0"), ("value", "2")))
    if not isinstance(query, Tensor) or not isinstance(value, Tensor):
        return 0.0
    for_query, for_key, for_value, *rest = op.arguments.get("grad_input_mask") or (True, True, True)
    scores = for_query or for_key or any(rest)
    width = query.shape[-1] * (1 + for_query + for_key) + value.shape[-1] * (scores + for_value)
    return query.shape[-1] / width if width else 0.0
