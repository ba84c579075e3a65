"""`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` in evaluation: torch has one operator for the whole layer.

torch takes it on the CPU and on CUDA alike, but not under a function mode, as a trace uses one, and it does not know
the shape of its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nearpeak.capture.counted import Counted, replaced
from nearpeak.capture.lowering.register import Kernel, kernels_registered

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor, type(None))


@contextmanager
def _patches() -> Iterator[None]:
    asked, aligned = torch.overrides.has_torch_function, torch._nested_tensor_from_mask_left_aligned

    def has_torch_function(arguments: Any) -> bool:
        return bool(asked(arguments)) and not all(type(argument) in _PLAIN for argument in arguments)

    def left_aligned(tensor: torch.Tensor, mask: torch.Tensor) -> bool:
        """Values decide whether padding can be left out; where there are none, it is not."""
        return not isinstance(tensor, FakeTensor) and bool(aligned(tensor, mask))

    with (
        replaced(torch.overrides, "has_torch_function", has_torch_function),
        replaced(torch, "_nested_tensor_from_mask_left_aligned", left_aligned),
        kernels_registered(_shapes),
    ):
        yield


layers_whole = Counted(_patches)
"""Inside, these layers run as one operator where they would without a trace."""


def _shapes() -> list[Kernel]:
    return [
        Kernel("_transformer_encoder_layer_fwd", "Meta", _encoder_layer),
        Kernel("_native_multi_head_attention", "Meta", _multi_head_attention),
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
