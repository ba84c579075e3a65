"""`estimate`: what any PyTorch callable must cost on a machine, without running it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nearpeak.bound.estimate import Estimate, estimate_trace
from nearpeak.bound.roofline import Ceilings
from nearpeak.calibrate.machine import machine as find_machine
from nearpeak.machines.machine import Machine
from nearpeak.measure.case import Case, as_case
from nearpeak.ops.op import Trace
from nearpeak.trace.cuda_ops.target import target_of
from nearpeak.trace.trace import trace


def estimate(
    fn: Callable[..., Any] | Case,
    *args: Any,
    on: str | Machine | None = None,
    ceilings: Ceilings = "achievable",
    live: bool = False,
) -> Estimate:
    """The bounds of `fn(*args)`, op by op, and the three floors of the whole.

    The code runs on fake tensors: it needs no GPU, and no memory for weights that were built inside `nearpeak.fake()`.
    For a GPU, the ops are those that torch's build for CUDA runs there.
    A backward pass or an optimizer step inside `fn` is counted like everything else.

    Args:
        fn: What to call, or a `Case`.
        args: Its arguments, real or fake.
        on: A machine of the catalogue by name, a `Machine`, or None for this machine.
        ceilings: Against what the machine achieves, or against its datasheet.
        live: Run it on the real tensors, for code whose control flow depends on their values.

    >>> import torch
    >>> result = estimate(torch.mm, torch.randn(64, 32), torch.randn(32, 16), on="h100-sxm")
    >>> result.flops, result.bytes, result.ops[0].name
    (65536.0, 14336.0, 'aten.mm.default')
    """
    case = as_case(fn, args, {})
    machine = on if isinstance(on, Machine) else find_machine(on)
    recorded = trace(case.fn, *case.args, kwargs=dict(case.kwargs), live=live, target=target_of(machine))
    return estimate_trace(recorded, machine, ceilings=ceilings)


def estimate_step(case: Case, machine: Machine) -> tuple[Trace, Estimate]:
    """The ops of a case on fake tensors with the storages that they use, and their estimate."""
    recorded = trace(case.fn, *case.args, kwargs=dict(case.kwargs), target=target_of(machine))
    return recorded, estimate_trace(recorded, machine)
