"""A CPU computes with subnormal numbers, which take it many times as long as others."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.bound.expected import is_like_measured
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.units import percent, seconds

_MIN_SHARE = 1e-3
"""Of the elements of a tensor. Fewer cost little."""
_MIN_SLOWNESS = 2.0
"""Ops that take fewer times as long as good kernels are not slowed down by what they read."""


@rule("subnormal-numbers", needs=["storages"])
def subnormal_numbers(step: Step) -> Iterator[Waste]:
    """Ops on a CPU that read subnormal numbers and are slow, compared with the same ops on other numbers."""
    if step.machine.kind != "cpu":
        return
    gains: dict[int, float] = {}
    for index, op in enumerate(step.ops):
        expected = step.measured[index].expected_s
        if not expected or not is_like_measured(op.name, step.costs[index].family) or not _share(step, index):
            continue
        good_s = step.pace * expected
        if step.time(index) > _MIN_SLOWNESS * good_s:
            gains[index] = step.time(index) - good_s
    if not gains:
        return
    slowest = max(gains, key=gains.__getitem__)
    took = step.seconds(gains)
    yield Waste(
        title="A CPU computes with subnormal numbers, which it is slow with.",
        op=slowest,
        gains=gains,
        evidence=f"{percent(_share(step, slowest))} of what {step.ops[slowest].packet} reads is nearer to zero than "
        f"normal numbers are (1.2e-38 in float32). {len(gains)} ops that read such numbers take {seconds(took)}.",
        reasoning=f"With zeros in their place, these ops take {seconds(took - sum(gains.values()))}, as on other "
        "numbers.",
        remedy="torch.set_flush_denormal(True)  # once, at the start: such numbers become zeros\n"
        "# or keep them from arising: clamp what is squared, decayed or passed to exp",
    )


def _share(step: Step, index: int) -> float:
    """The largest share of subnormal numbers among the tensors that an op reads; 0 for too few."""
    shares = (step.trace.subnormals.get(tensor.storage, 0.0) for tensor in step.ops[index].inputs)
    largest = max(shares, default=0.0)
    return largest if largest >= _MIN_SHARE else 0.0
