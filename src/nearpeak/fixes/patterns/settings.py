"""Fixes that are settings of torch: a fused or foreach optimizer, channels-last convolutions, compilation, tf32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nearpeak.fixes.edits import Edits
from nearpeak.fixes.registry import OPTIMIZER, ModelRun, Site, fix

FUSED_DEVICES = ("cuda", "cpu")


@fix("fused-optimizer", "the optimizer's step as fused kernels", order=80)
def fused_optimizer(run: ModelRun) -> Iterator[Site]:
    """Sets `fused` of an optimizer of torch's that has it, and keeps its state."""
    yield from _optimizer_sites(run, "fused")


@fix("foreach-optimizer", "the optimizer's step on lists of tensors", order=81)
def foreach_optimizer(run: ModelRun) -> Iterator[Site]:
    """Sets `foreach`, where `fused` does not help or does not exist."""
    yield from _optimizer_sites(run, "foreach")


def _optimizer_sites(run: ModelRun, option: str) -> Iterator[Site]:
    optimizer = run.optimizer
    if optimizer is None or not run.trains:
        return
    groups = [group for group in optimizer.param_groups if option in group]
    if not groups or all(group[option] or group.get("fused") for group in groups):
        return
    skip = ""
    if any(group.get("differentiable") for group in groups):
        skip = "the optimizer is differentiable"
    elif any(not parameter.is_floating_point() for group in groups for parameter in group["params"]):
        skip = "parameters are not all floating-point numbers"
    elif option == "fused" and any(p.device.type not in FUSED_DEVICES for group in groups for p in group["params"]):
        skip = "torch has no fused kernels for this device"
    elif option == "foreach" and all(p.device.type == "cuda" for group in groups for p in group["params"]):
        return  # it is the default there
    count = sum(len(group["params"]) for group in groups)
    yield Site(
        path=OPTIMIZER,
        what=f"{type(optimizer).__name__} of {count} parameters",
        change=partial(_set_option, optimizer, option),
        skip=skip,
        signature=f"{type(optimizer).__name__} {option}",
    )


def _set_option(optimizer: torch.optim.Optimizer, option: str, edits: Edits) -> None:
    other = "foreach" if option == "fused" else "fused"
    for group in optimizer.param_groups:
        if option in group:
            edits.set_item(group, option, True)
            edits.set_item(group, other, False)
    if option == "fused":  # whose count of steps is on the device of its parameter, as after `load_state_dict`
        edits.do(partial(_move_steps, optimizer, None), partial(_move_steps, optimizer, torch.device("cpu")))


def _move_steps(optimizer: torch.optim.Optimizer, device: torch.device | None) -> None:
    """The count goes on: what is undone later has taken more steps."""
    capturable = {p: bool(group.get("capturable")) for group in optimizer.param_groups for p in group["params"]}
    for parameter, state in optimizer.state.items():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, Tensor) and not capturable.get(parameter):
            state["step"] = step.to(parameter.device if device is None else device, torch.float32)


@fix("channels-last", "convolutions in channels-last layout", order=60)
def channels_last(run: ModelRun) -> Iterator[Site]:
    """Gives the weights of 2-dimensional convolutions the layout that their kernels work in."""
    convolutions = [
        call.module
        for call in run.calls
        if not call.children
        and any(name.startswith("aten.convolution") for name in call.ops)
        and isinstance(weight := getattr(call.module, "weight", None), Tensor)
        and weight.dim() == 4
        and weight.shape[2:].numel() > 1
        and not weight.is_contiguous(memory_format=torch.channels_last)
        and _can_move(run, weight)
    ]
    if convolutions:
        yield Site(
            call=run.calls[0],
            what=f"{len(convolutions)} convolutions",
            change=lambda edits: edits.do(
                partial(_lay_out, run, convolutions, torch.channels_last),
                partial(_lay_out, run, convolutions, torch.contiguous_format),
            ),
            signature=f"{len(convolutions)} convolutions of 2 dimensions",
        )


def _can_move(run: ModelRun, weight: Tensor) -> bool:
    """Whether a weight may get other memory: nothing else, and no other process, has the memory that it is in."""
    storage = weight.untyped_storage()
    if not weight.is_contiguous() or storage.nbytes() != weight.nbytes or (weight.is_cpu and weight.is_shared()):
        return False
    owners = [x for x in (*run.model.parameters(), *run.model.buffers()) if x.data_ptr() == weight.data_ptr()]
    return len(owners) == 1 and owners[0] is weight


@torch.no_grad()
def _lay_out(run: ModelRun, convolutions: list[nn.Module], layout: torch.memory_format) -> None:
    for module in convolutions:
        weight = module.weight
        assert isinstance(weight, Tensor)
        weight.data = weight.data.contiguous(memory_format=layout)
        state = {} if run.optimizer is None else run.optimizer.state.get(weight, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                state[name] = value.contiguous(memory_format=layout)


@fix("torch-compile", "the model compiled by torch.compile", order=90, compiles=True)
def torch_compile(run: ModelRun) -> Iterator[Site]:
    """Compiles the whole model: tried last, on what the other fixes have left."""
    if any(vars(module).get("_compiled_call_impl") is not None for module in run.model.modules()):
        return
    yield Site(
        call=run.calls[0],
        what=f"{len(run.calls[0].ops)} operators",
        change=partial(_compile, run.model),
        signature="the model",
    )


def _compile(model: nn.Module, edits: Edits) -> None:
    call: Callable[..., Any] = torch.compile(model._call_impl)
    edits.set(model, "_compiled_call_impl", call)


@fix("tf32", "float32 matrix products in tf32", changes_numerics=True, order=50)
def tf32(run: ModelRun) -> Iterator[Site]:
    """Sets the precision of float32 products for the whole process: only where it is asked for."""
    before = torch.get_float32_matmul_precision()
    products = [name for name in run.calls[0].ops if name.split(".")[1] in ("mm", "addmm", "bmm", "baddbmm")]
    if run.device.type != "cuda" or before != "highest" or not products:
        return
    yield Site(
        path="torch.set_float32_matmul_precision",
        what=f"{len(products)} matrix products",
        change=lambda edits: edits.do(
            partial(torch.set_float32_matmul_precision, "high"), partial(torch.set_float32_matmul_precision, before)
        ),
        signature="float32 products",
    )
