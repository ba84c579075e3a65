"""`AdamW` and `adamw_step`: a step of AdamW on all parameters in one launch.

Each number moves once. In bfloat16 with states and master weights in float32, a parameter costs 28 bytes: 14 read
(gradient, both states, master weight) and 14 written (both states, master weight, parameter).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from nearpeak.errors import UsageError
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import cannot_run, fused

_Tensors = Sequence[Tensor]
_Step = float | Tensor | Sequence[Tensor]


@torch.no_grad()
def adamw_reference(
    params: _Tensors, grads: _Tensors, exp_avgs: _Tensors, exp_avg_sqs: _Tensors, *, step: _Step, lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
    master_params: _Tensors | None = None, maximize: bool = False, grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    _check_arguments(params, grads, exp_avgs, exp_avg_sqs, master_params, step, lr, betas)
    for index, (param, grad, average, square) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        master = master_params[index] if master_params else param
        dtype = torch.float64 if param.dtype is torch.float64 else torch.float32
        gradient = -grad.to(dtype) if maximize else grad.to(dtype)
        if grad_scale is not None:
            gradient = gradient / grad_scale.to(gradient).reshape(())
        rate = lr.to(gradient).reshape(()) if isinstance(lr, Tensor) else lr
        number = step if isinstance(step, (int, float, Tensor)) else step[index]
        correction1, correction2 = (_correction(number, beta, gradient) for beta in betas)
        first = betas[0] * average.to(dtype) + (1 - betas[0]) * gradient
        second = betas[1] * square.to(dtype) + (1 - betas[1]) * gradient * gradient
        value = master.to(dtype)
        value = value - rate * weight_decay * value
        value = value - rate / correction1 * (first / (second.sqrt() / correction2**0.5 + eps))
        old_and_new = [(average, first), (square, second), (param, value)]
        if master_params:
            old_and_new.append((master, value))
        for old, new in old_and_new:
            if found_inf is not None:
                new = torch.where(found_inf.to(old.device).reshape(()) != 0, old.to(dtype), new)
            old.copy_(new)


def _correction(step: float | Tensor, beta: float, like: Tensor) -> float | Tensor:
    exponent = math.log(beta) if beta else -math.inf
    if isinstance(step, Tensor):
        return (-torch.expm1(step.double() * exponent)).to(like).reshape(())
    return -math.expm1(step * exponent)


def _check_arguments(
    params: _Tensors, grads: _Tensors, exp_avgs: _Tensors, exp_avg_sqs: _Tensors, master_params: _Tensors | None,
    step: _Step, lr: float | Tensor, betas: tuple[float, float],
) -> None:  # fmt: skip
    others = {
        "grads": grads,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "master_params": master_params or params,
    }
    if not isinstance(step, (int, float, Tensor)):
        others["step"] = step
    for name, tensors in others.items():
        if len(tensors) != len(params):
            raise UsageError(f"adamw_step has {len(params)} params and {len(tensors)} {name}. Give as many of both.")
        if name == "step":
            continue
        for index, (param, other) in enumerate(zip(params, tensors, strict=True)):
            if param.shape != other.shape:
                raise UsageError(
                    f"{name}[{index}] of adamw_step has the shape {tuple(other.shape)}, and its parameter"
                    f" {tuple(param.shape)}. Give tensors of the same shape."
                )
    if isinstance(step, (int, float)) and step < 1:
        raise UsageError(f"The step of adamw_step is {step}. Count steps from 1.")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise UsageError(f"The lr of adamw_step has the shape {tuple(lr.shape)}. Give a number or a tensor of one.")
    if not all(0 <= beta < 1 for beta in betas):
        raise UsageError(f"The betas of adamw_step are {betas}. Give numbers from 0 to less than 1.")


def _why_not(
    params: _Tensors, grads: _Tensors, exp_avgs: _Tensors, exp_avg_sqs: _Tensors, *, step: _Step, lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
    master_params: _Tensors | None = None, maximize: bool = False, grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> str | None:  # fmt: skip
    _check_arguments(params, grads, exp_avgs, exp_avg_sqs, master_params, step, lr, betas)
    steps = [step] if isinstance(step, Tensor) else [] if isinstance(step, (int, float)) else step
    rate = lr if isinstance(lr, Tensor) and lr.device.type != "cpu" else None  # one on the CPU is read there
    return _tensors_why_not(
        params, grads, exp_avgs, exp_avg_sqs, master_params or (), steps, rate, grad_scale, found_inf
    )


def _tensors_why_not(
    params: _Tensors, grads: _Tensors, exp_avgs: _Tensors, exp_avg_sqs: _Tensors, master_params: _Tensors,
    steps: _Tensors, lr_tensor: Tensor | None, grad_scale: Tensor | None, found_inf: Tensor | None, *_: object,
) -> str | None:  # fmt: skip
    if not params:
        return "it has no parameters"
    rate = lr_tensor if lr_tensor is not None and lr_tensor.device.type != "cpu" else None
    every = chain(params, grads, exp_avgs, exp_avg_sqs, master_params, steps)
    kinds = {(tensor.device, tensor.dtype): tensor for tensor in every}  # one of each: there are thousands
    reason = cannot_run(*kinds.values(), rate, grad_scale, found_inf)
    if reason is not None:
        return reason
    if any(number.dtype is not torch.float32 for number in (*steps, *master_params)):
        return "it takes steps and master parameters in float32"
    for index, param in enumerate(params):
        if not param.numel():
            continue
        strides = param.stride()
        if not (param.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(param)):
            return "it takes parameters without holes in memory"
        if not (strides == grads[index].stride() == exp_avgs[index].stride() == exp_avg_sqs[index].stride()) or (
            master_params and master_params[index].stride() != strides
        ):
            return "it takes gradients and states with the strides of their parameters"
    return None


def _operator_reference(
    params: _Tensors, grads: _Tensors, exp_avgs: _Tensors, exp_avg_sqs: _Tensors, master_params: _Tensors,
    steps: _Tensors, lr_tensor: Tensor | None, grad_scale: Tensor | None, found_inf: Tensor | None,
    step: float, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, maximize: bool,
) -> None:  # fmt: skip
    adamw_reference(
        params, grads, exp_avgs, exp_avg_sqs, step=steps or step, lr=lr if lr_tensor is None else lr_tensor,
        betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, master_params=master_params or None,
        maximize=maximize, grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip


_adamw_step = Operator(
    "adamw_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] master_params, Tensor[] steps, Tensor? lr_tensor, Tensor? grad_scale, Tensor? found_inf,"
    " float step, float lr, float beta1, float beta2, float eps, float weight_decay, bool maximize) -> ()",
    backends={"nvidia": "optimizer.triton:adamw_step"},
    reference=_operator_reference,
    fake=lambda *args: None,
    why_not=_tensors_why_not,
)


@fused(reference=adamw_reference, why_not=_why_not)
@torch.no_grad()
def adamw_step(
    params: _Tensors, grads: _Tensors, exp_avgs: _Tensors, exp_avg_sqs: _Tensors, *, step: _Step, lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
    master_params: _Tensors | None = None, maximize: bool = False, grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Takes a step of AdamW in place, as `torch.optim.AdamW(fused=True)` does: in float32, rounded to the nearest.

    One launch for each combination of dtypes: float32, bfloat16 and float16 in any mix. Gradients and states have the
    strides of their parameters. Gradients are not modified, also with `grad_scale`. No derivatives.

    Args:
        params: The parameters, updated.
        grads: Their gradients.
        exp_avgs: The averages of the gradients, updated.
        exp_avg_sqs: The averages of the squared gradients, updated.
        step: The number of this step, from 1: a number, a tensor, or a tensor for each parameter. Tensors are float32
            on the device, and read there, so that a CUDA graph can be replayed.
        lr: The learning rate: a number, or a tensor with one element that the device reads.
        betas: The decay rates of the two averages.
        eps: Added to the root of the second average.
        weight_decay: The fraction of a parameter that is subtracted from it, times `lr`.
        master_params: The parameters in float32, updated. `params` are then written and not read.
        maximize: Ascend instead of descend.
        grad_scale: Divides the gradients; a tensor with one element.
        found_inf: If this tensor with one element is not 0, nothing is changed.
    """
    steps = [step] * len(params) if isinstance(step, Tensor) else [] if isinstance(step, (int, float)) else list(step)
    number = float(step) if isinstance(step, (int, float)) else 1.0
    rate = lr if isinstance(lr, Tensor) else None
    _adamw_step(
        list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), list(master_params or ()), steps,
        rate, grad_scale, found_inf, number, 0.0 if isinstance(lr, Tensor) else float(lr),
        float(betas[0]), float(betas[1]), float(eps), float(weight_decay), maximize,
    )  # fmt: skip


_STATES = ("exp_avg", "exp_avg_sq", "master_param")


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW(fused=True)`, with optional master weights in float32 for parameters of 16 bits.

    Steps are counted on the device, so that a CUDA graph can record a step; pass `lr` as a tensor on the device to
    change it between replays. Take a step before the recording: it allocates the states and the tables of addresses.

    `torch.optim.AdamW` reads its state dict, and vice versa; torch converts states to the dtype of the parameters and
    ignores master weights. Works with `torch.amp.GradScaler`; gradients stay scaled.

    Args:
        params: Parameters, or groups of them.
        lr: The learning rate, a number or a tensor with one element.
        betas: The decay rates of the averages of gradients and of squared gradients.
        eps: Added to the root of the second average.
        weight_decay: The fraction of a parameter that is subtracted from it at each step, times `lr`.
        maximize: Ascend instead of descend.
        master_weights: Also keep parameters of less than 32 bits in float32, and update these.
        state_dtype: The dtype of both averages: float32, bfloat16 or float16. By default float32 with master weights,
            and that of the parameter without.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        master_weights: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        wrong = [
            f"{name} is {value}"
            for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items()
            if not isinstance(value, Tensor) and not value >= 0
        ]
        if wrong:
            raise UsageError(f"AdamW takes no negative numbers, and {' and '.join(wrong)}.")
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"The betas of AdamW are {betas}. Give numbers from 0 to less than 1.")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "master_weights": master_weights,
            "state_dtype": state_dtype,
            # for torch.optim.AdamW, if it reads the state dict
            "amsgrad": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": True,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults)
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step, and returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            lists: dict[tuple[torch.device, bool], list[list[Tensor]]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    state = self._state(param, group)
                    master = state.get("master_param")
                    tensors = [param, _like(param, param.grad), state["exp_avg"], state["exp_avg_sq"], state["step"]]
                    if master is not None:
                        tensors.append(master)
                    lists[param.device, master is not None].append(tensors)
            for (device, with_master), rows in lists.items():
                params, grads, averages, squares, steps, *masters = map(list, zip(*rows, strict=True))
                skipped = None if found_inf is None else found_inf.to(device, non_blocking=True)
                torch._foreach_add_(steps, 1 if skipped is None else (skipped == 0).to(torch.float32).reshape(()))
                adamw_step(
                    params,
                    grads,
                    averages,
                    squares,
                    step=steps,
                    lr=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    master_params=masters[0] if with_master else None,
                    maximize=group["maximize"],
                    grad_scale=None if grad_scale is None else grad_scale.to(device, non_blocking=True),
                    found_inf=skipped,
                )
        return loss

    def _state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if param.grad is not None and param.grad.is_sparse:
            raise UsageError("AdamW takes dense gradients, and one of these is sparse. Use torch.optim.SparseAdam.")
        with_master = group["master_weights"] and param.dtype in (torch.bfloat16, torch.float16)
        if not state:
            dtype = group["state_dtype"] or (torch.float32 if with_master else param.dtype)
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype)
        if with_master and "master_param" not in state:  # also after the state dict of an optimizer without
            state["master_param"] = param.detach().to(torch.float32)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of `torch.optim.AdamW`, in the dtypes of this optimizer."""
        mine = [{name: group[name] for name in ("master_weights", "state_dtype")} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own, saved in zip(self.param_groups, mine, state_dict["param_groups"], strict=True):
            if saved.get("amsgrad"):
                raise UsageError("This state dict is of AMSGrad, which nearpeak's AdamW does not support.")
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            group.update(own)
            for param, number in zip(group["params"], saved["params"], strict=True):
                state, before = self.state.get(param), state_dict["state"].get(number)
                if not state or before is None:
                    continue
                state["step"] = torch.as_tensor(before["step"]).to(param.device, torch.float32, copy=True).reshape(())
                with_master = own["master_weights"] and param.dtype in (torch.bfloat16, torch.float16)
                for name in _STATES:
                    if name in before:  # torch has converted them to the dtype of the parameter
                        dtype = own["state_dtype"] or (torch.float32 if with_master else param.dtype)
                        wanted = torch.float32 if name == "master_param" else dtype
                        state[name] = torch.empty_like(param, dtype=wanted).copy_(before[name])
                if not with_master:
                    state.pop("master_param", None)


def _like(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient with the strides of its parameter, copied if it has others."""
    if grad.stride() == param.stride():
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)
