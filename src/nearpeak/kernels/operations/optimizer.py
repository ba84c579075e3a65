"""`AdamW`: an optimizer that takes its step in one launch, with master weights and states of a dtype of choice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from nearpeak.errors import UsageError
from nearpeak.kernels.operations.adamw import adamw_step

_STATES = ("exp_avg", "exp_avg_sq", "master_param")


class AdamW(torch.optim.Optimizer):
    """AdamW as `torch.optim.AdamW(fused=True)`, and with parameters in float32 beside those in bfloat16.

    Steps are counted on the device, so a step can be recorded in a CUDA graph; give `lr` as a tensor on the device to
    change it between replays. Take a step before the recording: the states and the tables of addresses are made then.

    `torch.optim.AdamW` reads its state dict, and the other way round; torch's turns states into the dtype of the
    parameters and does not use master weights. Works with `torch.amp.GradScaler`; gradients stay scaled.

    Args:
        params: Parameters, or groups of them.
        lr: The learning rate, a number or a tensor of one.
        betas: How much of the averages of gradients and squared gradients stays at each step.
        eps: Added to the root of the second average.
        weight_decay: The part of a parameter that is taken off at each step, times `lr`.
        maximize: Up the gradient instead of down.
        master_weights: Keep parameters of less than 32 bits in float32 too, and update these.
        state_dtype: The dtype of both averages: float32, bfloat16 or float16. By default float32 with master weights,
            that of the parameter without.
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
            # for torch.optim.AdamW, when it reads the state dict: what this optimizer does, in its terms
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
        """Takes a step, and returns what `closure` does."""
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
        """Takes over a state dict, of this class or of `torch.optim.AdamW`, in the dtypes that this optimizer has."""
        mine = [{name: group[name] for name in ("master_weights", "state_dtype")} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own, saved in zip(self.param_groups, mine, state_dict["param_groups"], strict=True):
            if saved.get("amsgrad"):
                raise UsageError("This state dict is of AMSGrad, which nearpeak's AdamW has not.")
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
                    if name in before:  # torch has turned them into the dtype of the parameter
                        dtype = own["state_dtype"] or (torch.float32 if with_master else param.dtype)
                        wanted = torch.float32 if name == "master_param" else dtype
                        state[name] = torch.empty_like(param, dtype=wanted).copy_(before[name])
                if not with_master:
                    state.pop("master_param", None)


def _like(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient with the strides of its parameter, copied where it has others."""
    if grad.stride() == param.stride():
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)
