"""Optimizers that have a fused step and do not use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nearpeak.fixes.edits import Edits
from nearpeak.fixes.registry import ModelRun, Site, fix

_DEVICES = ("cuda", "cpu")


@fix("fused-optimizer", "the step of the optimizer as one kernel", order=50)
def fused_optimizer(run: ModelRun) -> Iterator[Site]:
    """Parameter groups with an option `fused` that is off."""
    optimizer = run.optimizer
    if optimizer is None:
        return
    groups = [group for group in optimizer.param_groups if "fused" in group and not group["fused"]]
    if not groups:
        return
    parameters = [parameter for group in groups for parameter in group["params"]]
    count = sum(parameter.numel() for parameter in parameters)
    way = "a loop over tensors" if any(group.get("foreach") is False for group in groups) else "foreach kernels"
    if run.device.type == "cpu" and not any(group.get("foreach") for group in groups):
        way = "a loop over tensors"
    yield Site(
        what=f"{type(optimizer).__name__} of {len(parameters)} tensors, {count} numbers, as {way}",
        path="the optimizer",
        skip=_reason(groups, parameters),
        change=lambda edits: _use_fused(edits, optimizer, groups),
    )


def _reason(groups: list[dict[str, Any]], parameters: list[Tensor]) -> str:
    if any(group.get("differentiable") for group in groups):
        return "its step is differentiable"
    if any(group.get("capturable") for group in groups):
        return "it may be in a CUDA graph already"
    kinds = {parameter.device.type for parameter in parameters}
    if not kinds <= set(_DEVICES):
        return f"torch has no fused step for {', '.join(sorted(kinds))}"
    if not all(parameter.is_floating_point() for parameter in parameters):
        return "a parameter has no floating-point numbers"
    if any(type(parameter.data) is not Tensor for parameter in parameters):
        return "a parameter is a tensor subclass"
    return ""


def _use_fused(edits: Edits, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    for group in groups:
        edits.set_item(group, "fused", True)
        edits.set_item(group, "foreach", False)
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            # the fused step counts on the device of the parameter, in float32
            if isinstance(step, Tensor):
                moved = step.to(parameter.device, torch.float32)
                if moved is not step:
                    _move_step(edits, optimizer.state[parameter], moved)
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        edits.set(optimizer, "_step_supports_amp_scaling", True)


def _move_step(edits: Edits, state: dict[str, Any], moved: Tensor) -> None:
    before = state["step"]

    def put_back() -> None:
        state["step"] = state["step"].to(before.device, before.dtype)  # it has counted since

    edits.do(lambda: state.update(step=moved), put_back)
