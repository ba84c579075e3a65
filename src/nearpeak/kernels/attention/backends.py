"""The backends of attention, and which of them runs.

"gluon" (`sm90`) and "triton" are this package's kernels. "cudnn" and "flash" are torch's, cuDNN's and FlashAttention-2,
as `scaled_dot_product_attention` runs them, and FlashAttention-2 as `torch.nn.attention.varlen` runs it for packed
sequences; their backward passes add in no fixed order, and do not run inside of
`torch.use_deterministic_algorithms(True)`. Forward and backward passes choose on their own: what they exchange, the
result and the log-sum-exp, is the same for all. Results have the order of tokens and heads in memory that queries have.
Kernels for another vendor or architecture are one more name.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from math import inf
from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels._runtime import gluon
from nearpeak.kernels._runtime.choice import OF_TORCH, Chooser, torch_runs_on
from nearpeak.kernels._runtime.policy import too_old
from nearpeak.kernels._runtime.tuning import processors
from nearpeak.kernels.attention import fp8_triton
from nearpeak.kernels.attention.triton import AttentionProblem, Gradients, fill_tail

_aten: Any = torch.ops.aten
_MODULES = {"gluon": "nearpeak.kernels.attention.sm90", "triton": "nearpeak.kernels.attention.triton"}
"""Imported at the first call that may use it, as not every version of Triton has Gluon."""
_TORCH_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_MULTIPLE = 8
"""torch would pad other sizes of heads first."""
_HAS_PACKED_FLASH = find_spec("torch.nn.attention.varlen") is not None
"""Whether this version of torch has FlashAttention of packed sequences, with the log-sum-exp as [heads, tokens]."""
_OLDEST_FOR_FLASH = (8, 0)
_ALIGNED_BYTES = 16
FEATURES = {
    "heads": 0.5, "group": 0.5, "queries": 0.5, "keys": 0.5, "dim": 1.0, "value_dim": 1.0, "wide": 1.0, "causal": 1.0,
    "window": 0.1, "packed": 0.5, "tokens_first": 1.0, "itemsize": 0.5,
}  # fmt: skip
"""By which the backend of a forward pass is chosen, with their weights: heads of all batches, and heads of queries that
share a head of keys; "wide" are heads of more than 128. Packed sequences count with the length of the longest one, and
as many batches of it as have all their queries."""
BACKWARD_FEATURES = {
    "key_tiles": 0.35, "group": 0.3, "queries": 0.5, "keys": 0.5, "dim": 0.5, "value_dim": 0.5, "wide": 1.0,
    "causal": 1.0, "window": 0.1, "packed": 1.0, "tokens_first": 0.3, "itemsize": 0.5,
}  # fmt: skip
"""The same for a backward pass; see `key_tiles`. Backends differ less with the size of heads there, up to 128."""
MOST_NARROW_DIM = 128
_TILE_KEYS = 128
_MOST_TILES = 400

_forward_chooser = Chooser("attention", FEATURES)
_backward_chooser = Chooser("attention_backward", BACKWARD_FEATURES)


def candidates(problem: AttentionProblem, *, backward: bool = False) -> list[str]:
    """The backends that take a problem: torch's first, then this package's, the fastest first."""
    names = _torch_candidates(problem, backward=backward)
    if gluon.runs_on(problem.query.device) and import_module(_MODULES["gluon"]).takes(problem, backward=backward):
        names.append("gluon")
    return [*names, "triton"]


def key_tiles(key_heads: int, keys: int, sequences: int, programs: int) -> int:
    """How many tiles of 128 keys there are for each program that runs at a time, in percent, up to 400.

    Each is a program of this package's backward kernels, which loops over the queries of all heads that share the keys.
    With fewer tiles than multiprocessors some of these have nothing to do. cuDNN distributes heads of queries.

    Args:
        key_heads: Of one sequence.
        keys: Of all sequences.
        programs: That run at a time: the multiprocessors of the GPU.
    """
    tiles = key_heads * sequences * -(-keys // (sequences * _TILE_KEYS)) if sequences else 0
    return min(_MOST_TILES, round(100 * tiles / programs))


def effective_batches(queries: int, longest: int) -> int:
    """How many sequences of the longest one's length have as many queries as all packed sequences."""
    return max(1, round(queries / max(longest, 1)))


def features(problem: AttentionProblem, *, backward: bool = False) -> tuple[float, ...]:
    """The values of `FEATURES`, or `BACKWARD_FEATURES`."""
    query = problem.query
    if backward:
        keys = problem.keys if problem.packed else problem.batches * problem.keys
        programs = processors(query.device)
        extent = key_tiles(problem.key_heads, keys, problem.sequences, programs)
    elif problem.packed:
        extent = problem.heads * effective_batches(problem.queries, problem.max_queries)
    else:
        extent = problem.heads * problem.batches
    return (
        extent, problem.group, problem.max_queries, problem.max_keys, problem.dim, problem.value_dim,
        max(problem.dim, problem.value_dim) > MOST_NARROW_DIM, problem.right >= 0, max(problem.left, 0),
        problem.packed, query.stride(1) <= query.stride(2), problem.itemsize,
    )  # fmt: skip


def choose(problem: AttentionProblem, *, backward: bool = False, only_own: bool = False) -> str:
    """The name of the backend that runs.

    Args:
        only_own: Whether torch's are no candidates, which take no gradient of the log-sum-exp.
    """
    chooser = _backward_chooser if backward else _forward_chooser
    tensors = (problem.query, problem.key, problem.value)
    key = (
        *((x.shape, x.stride(), x.data_ptr() & 15) for x in tensors), problem.query.dtype, problem.query.device,
        problem.is_plain, problem.packed, problem.sequences, problem.max_queries, problem.max_keys,
        problem.is_square, problem.left, problem.right, problem.bottom_right,
        problem.sinks is None, problem.seed is None, problem.dropout == 0.0, only_own,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    known = chooser.known(key)
    if known is not None:
        return known
    names = candidates(problem, backward=backward)
    if only_own:
        names = [name for name in names if name not in OF_TORCH]
    return chooser.choose(key, names, features(problem, backward=backward), problem.query.device)


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp of the scores in float32."""
    problem = AttentionProblem(*arguments)
    name = choose(problem)
    if name in OF_TORCH:
        return _torch_forward(name, problem)
    result: tuple[Tensor, Tensor] = import_module(_MODULES[name]).forward(problem)
    return result


def fp8_why_not(query: Tensor, key: Tensor, value: Tensor, right: int, bottom_right: bool, scale: float) -> str | None:
    """Why the forward pass in fp8 does not run for tensors that it takes by their sizes, or None."""
    if not gluon.runs_on(query.device) or query.device.type != "cuda":
        return "it needs a Hopper GPU and Triton 3.6"
    problem = _fp8_problem(query, key, value, right, bottom_right, scale)
    takes = import_module(_MODULES["gluon"]).supports_fp8(problem)
    return None if takes else "it takes tensors whose rows begin at multiples of 16 bytes, and some of each"


def forward_fp8(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The result of operands in 8 bits, and the log-sum-exp of the scores in float32."""
    problem = _fp8_problem(*arguments)
    operands = fp8_triton.quantized(problem.query, problem.key, problem.value)
    result: tuple[Tensor, Tensor] = import_module(_MODULES["gluon"]).forward(problem, operands)
    return result


def _fp8_problem(
    query: Tensor, key: Tensor, value: Tensor, right: int, bottom_right: bool, scale: float
) -> AttentionProblem:
    return AttentionProblem(
        query, key, value, None, None, None, None, None, None, 0, 0, -1, right, bottom_right, scale, 0.0, 0.0
    )


def backward(
    gradient: Tensor, lse_gradient: Tensor | None, result: Tensor, lse: Tensor, *arguments: Any
) -> Gradients:  # fmt: skip
    """The gradients of query, key, value, bias and sinks; empty tensors for those that are not needed."""
    *inputs, for_query, for_keys, for_bias, for_sinks = arguments
    problem = AttentionProblem(*inputs)
    name = choose(problem, backward=True, only_own=lse_gradient is not None)
    if name in OF_TORCH:
        return _torch_backward(name, problem, gradient, result, lse, for_query, for_keys)
    gradients: Gradients = import_module(_MODULES[name]).backward(
        problem, gradient, lse_gradient, result, lse, for_query, for_keys, for_bias, for_sinks
    )
    return gradients


def _torch_candidates(problem: AttentionProblem, *, backward: bool) -> list[str]:
    """Which of "cudnn" and "flash" take a problem: plain scores, full or causal as they have it."""
    if not (
        torch_runs_on(problem.query.device)
        and problem.query.dtype in _TORCH_DTYPES
        and problem.is_plain
        and problem.sinks is None
        and problem.seed is None
        and problem.dropout == 0.0
        and problem.left < 0
        and problem.right in (-1, 0)
        and problem.dim % _HEAD_MULTIPLE == 0
        and problem.value_dim % _HEAD_MULTIPLE == 0
        and 0 not in (problem.batches, problem.queries, problem.keys)
        and all(_torch_reads(x) for x in (problem.query, problem.key, problem.value))
    ):
        return []
    if backward and torch.are_deterministic_algorithms_enabled():
        return []
    if problem.packed:
        return ["flash"] if _takes_packed(problem) else []
    if problem.right == 0 and not problem.is_square:
        return []
    # what a backward pass supports may differ, and shows in whether the query requires a gradient
    query = problem.query.detach().requires_grad_() if backward else problem.query
    params = torch.backends.cuda.SDPAParams(
        query, problem.key, problem.value, None, 0.0, problem.right == 0, problem.group > 1
    )
    backends = {
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "flash": torch.backends.cuda.can_use_flash_attention,
    }
    return [name for name, can_use in backends.items() if can_use(params)]


def _takes_packed(problem: AttentionProblem) -> bool:
    """Whether FlashAttention-2 takes packed sequences with plain scores.

    It aligns the last query with the last key, and has another layout of statistics for sequences of one query.
    """
    return (
        _HAS_PACKED_FLASH
        and torch.backends.cuda.is_flash_attention_available()
        and torch.backends.cuda.flash_sdp_enabled()
        and too_old(problem.query.device, _OLDEST_FOR_FLASH) is None
        and problem.dim == problem.value_dim
        and (problem.right == -1 or problem.bottom_right or problem.is_square)
        and problem.sequences > 0
        and problem.max_queries > 1
        and problem.max_keys > 0
        and all(map(_is_aligned_token_major, (problem.query, problem.key, problem.value)))
    )


def _is_aligned_token_major(x: Tensor) -> bool:
    """Whether tokens come before heads in memory, and each row of a head begins at a multiple of 16 bytes."""
    _, heads, _, _ = x.shape
    _, head_stride, token_stride, _ = x.stride()
    return (heads == 1 or head_stride <= token_stride) and not any(
        number % _ALIGNED_BYTES
        for number in (x.data_ptr(), head_stride * x.element_size(), token_stride * x.element_size())
    )


def _torch_reads(x: Tensor) -> bool:
    """Whether each element has an address of its own, and each row of a head begins at a multiple of 16 bytes.

    torch does not ask for the second: its kernels end with a misaligned address then, or return something else.
    """
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
    return (
        x.stride(-1) == 1
        and all(stride > 0 and stride * x.element_size() % _ALIGNED_BYTES == 0 for stride in strides)
        and x.data_ptr() % _ALIGNED_BYTES == 0
    )


def _torch_forward(name: str, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp of the scores in float32."""
    if problem.packed:
        return _packed_forward(problem)
    inputs, causal = (problem.query, problem.key, problem.value), problem.right == 0
    if name == "cudnn":
        # no bias; with the log-sum-exp; no dropout; no mask for debugging
        outputs = _aten._scaled_dot_product_cudnn_attention(
            *inputs, None, True, 0.0, causal, False, scale=problem.scale
        )
    else:
        outputs = _aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal, False, scale=problem.scale)
    return outputs[0], outputs[1].view(problem.batches, problem.heads, problem.queries)


def _torch_backward(
    name: str, problem: AttentionProblem, gradient: Tensor, result: Tensor, lse: Tensor, for_query: bool,
    for_keys: bool,
) -> Gradients:  # fmt: skip
    """The gradients of query, key and value, which are computed together."""
    if problem.packed:
        return _wanted_gradients(_packed_backward(problem, gradient, result, lse), for_query, for_keys)
    if not _torch_reads(gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
    inputs = (gradient, problem.query, problem.key, problem.value, result)
    causal = problem.right == 0
    unused = torch.empty(2, dtype=torch.int64, device=gradient.device)  # the state of dropout's random numbers
    if name == "cudnn":
        gradients = _aten._scaled_dot_product_cudnn_attention_backward(
            *inputs, lse.contiguous().unsqueeze(-1), unused, unused, None, None, None, problem.queries, problem.keys,
            0.0, causal, scale=problem.scale,
        )  # fmt: skip
    else:
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            *inputs, lse.contiguous(), None, None, problem.queries, problem.keys, 0.0, causal, unused, unused,
            scale=problem.scale,
        )  # fmt: skip
    return _wanted_gradients(gradients, for_query, for_keys)


def _wanted_gradients(computed: tuple[Tensor, Tensor, Tensor], for_query: bool, for_keys: bool) -> Gradients:
    by_query, by_key, by_value = computed
    empty = by_query.new_empty(0)
    if not for_keys:
        by_key = by_value = empty
    return by_query if for_query else empty, by_key, by_value, empty, empty


def _packed_forward(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """The result and the log-sum-exp by FlashAttention-2, which leaves tokens after the last sequence uninitialized."""
    outputs = _aten._flash_attention_forward(
        *_packed_tensors(problem.query, problem.key, problem.value), *_packed_sizes(problem), 0.0, problem.right == 0,
        False, scale=problem.scale,
    )  # fmt: skip
    result, lse = _as_one_batch(outputs[0]), outputs[1].unsqueeze(0)
    if not problem.is_square:  # queries that see no key have inf there
        lse.masked_fill_(lse == inf, -inf)
    assert problem.query_starts is not None
    fill_tail(problem.query_starts, result, lse=lse)
    return result, lse


def _packed_backward(
    problem: AttentionProblem, gradient: Tensor, result: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if not problem.is_square:
        lse = lse.masked_fill(lse == -inf, inf)
    gradient, query, key, value, result = _packed_tensors(gradient, problem.query, problem.key, problem.value, result)
    unused = torch.empty(2, dtype=torch.uint64, device=gradient.device)  # the state of dropout's random numbers
    gradients = _aten._flash_attention_backward(
        gradient, query, key, value, result, lse.squeeze(0).contiguous(), *_packed_sizes(problem), 0.0,
        problem.right == 0, unused, unused, scale=problem.scale,
    )  # fmt: skip
    by_query, by_key, by_value = map(_as_one_batch, gradients)
    assert problem.query_starts is not None
    assert problem.key_starts is not None
    fill_tail(problem.query_starts, by_query)
    fill_tail(problem.key_starts, by_key, by_value)
    return by_query, by_key, by_value


def _packed_tensors(*tensors: Tensor) -> list[Tensor]:
    """[tokens, heads, dim] of [1, heads, tokens, dim]."""
    return [x.squeeze(0).transpose(0, 1) for x in tensors]


def _packed_sizes(problem: AttentionProblem) -> tuple[Tensor, Tensor, int, int]:
    """The starts of queries and keys, and the most of each in a sequence."""
    assert problem.query_starts is not None
    assert problem.key_starts is not None
    starts = (problem.query_starts.to(torch.int32), problem.key_starts.to(torch.int32))
    return *starts, problem.max_queries, problem.max_keys


def _as_one_batch(x: Tensor) -> Tensor:
    """[1, heads, tokens, dim] of [tokens, heads, dim], tokens before heads in memory."""
    return x.contiguous().transpose(0, 1).unsqueeze(0)
