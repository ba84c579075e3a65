"""Calls of modules inside a trace: `functional_call`, and the fast path of transformer encoder layers.

In evaluation, torch has one operator for a whole `nn.TransformerEncoderLayer` and one for `nn.MultiheadAttention`. It
takes them on the CPU and on CUDA alike, but not under a function mode, which a trace uses, and it does not know the
shapes of their results. `encoder_fast_path` provides both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import stateless

from nearpeak.trace.cuda_ops.registry import DispatcherKernel, register_kernels
from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute
from nearpeak.trace.recorder import active_recorder


@SharedPatch
@contextmanager
def track_functional_calls() -> Iterator[None]:
    """Inside, a trace registers every module of a `functional_call` before its parameters are replaced.

    Registered later, it would be restored to the replacements, which may be wrappers of a transform that has ended.
    """
    original = stateless._functional_call

    def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = active_recorder()
        if recorder is not None:
            recorder.modules.meet(module)
        return original(module, *args, **kwargs)

    with patch_attribute(stateless, "_functional_call", call):
        yield


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, FakeTensor, type(None))


@SharedPatch
@contextmanager
def encoder_fast_path() -> Iterator[None]:
    """Inside, `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` run as one operator, as without a trace."""
    original, aligned = torch.overrides.has_torch_function, torch._nested_tensor_from_mask_left_aligned

    def has_torch_function(arguments: Any) -> bool:
        return bool(original(arguments)) and not all(type(argument) in _PLAIN_TENSORS for argument in arguments)

    def left_aligned(tensor: torch.Tensor, mask: torch.Tensor) -> bool:
        """Values decide whether padding can be left out; fake tensors have none, so it is not."""
        return not isinstance(tensor, FakeTensor) and bool(aligned(tensor, mask))

    with (
        patch_attribute(torch.overrides, "has_torch_function", has_torch_function),
        patch_attribute(torch, "_nested_tensor_from_mask_left_aligned", left_aligned),
        register_kernels(_encoder_meta_kernels),
    ):
        yield


def _encoder_meta_kernels() -> list[DispatcherKernel]:
    return [
        DispatcherKernel("_transformer_encoder_layer_fwd", "Meta", _encoder_layer),
        DispatcherKernel("_native_multi_head_attention", "Meta", _multi_head_attention),
    ]


def _encoder_layer(src: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    return src.new_empty(src.shape)


def _multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    heads = () if average_attn_weights else (num_head,)
    probabilities = (query.shape[0], *heads, query.shape[1], key.shape[1])
    output = query.new_empty((*query.shape[:2], embed_dim))
    return output, query.new_empty(probabilities) if need_weights else None
