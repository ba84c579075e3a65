"""What is measured of a random cell: the ways of each of its passes, and what they should compute.

Ways: "nearpeak"; its backends that it did not choose, as "nearpeak/triton"; and the peers. Torch's own are "eager",
"cublas" (`linear`), "cudnn", "flash" and "efficient" (the backends of its attention), "varlen" (its attention of packed
sequences), "scaled_mm", "torch" (grouped products) and "compile", where torch.compile fuses something; "liger" is
Liger's, where it is installed. FlexAttention is in the fixed cells: it takes long to compile, and is not the fastest.

Results are compared with float32, or float64 for float32: of rows, all; of products and losses, 64 rows from the first
to the last; of attention, the heads that share the first and the last head of keys.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from benchmarks.kernels import copies, gemm, losses, moe
from benchmarks.kernels.attention import FLOAT8, DecodingCase, by_torch
from benchmarks.kernels.cases import DROPOUT, KernelCase, liger, random_tensor, rotary_case, row_case
from benchmarks.kernels.drawing import Cell, Shape
from benchmarks.kernels.flops_cases import Call, GradientCall, Made, compiled_way, forward_call, gradient_call
from benchmarks.kernels.jobs import error_text
from nearpeak import kernels
from nearpeak.kernels._runtime import gluon, launch
from nearpeak.kernels._runtime.choice import Chooser
from nearpeak.kernels._runtime.replay import ReplayCache
from nearpeak.kernels.linear_attention import EPS, feature_map

CHECKED_ROWS = 64
CHECKED_PAIRS = 2**28
"""Scores of a head that is compared: with more, one head of keys is and not two."""
SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Way = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPass:
    """One pass of a cell, with its inputs."""

    ways: Mapping[str, Call]
    exact: Callable[[], Sequence[Tensor]]
    """What is right: some parts of the result, in higher precision."""
    looked_at: Callable[[Any], Sequence[Tensor]]
    """The same parts of what a way returns."""
    bytes: float
    """Least traffic."""
    flops: float | None = None
    resets: Mapping[str, Call] = field(default_factory=dict)
    checked_ways: Mapping[str, Call] | None = None
    """The ways as they are called for the comparison, where a timed call changes its inputs."""
    may_wait: bool = False
    """Whether a way may wait for the device."""
    peer_backends: tuple[str, ...] = ("torch", "cudnn", "flash")
    """Backends of nearpeak that run what a peer runs: their time is that of the peer."""


def passes_of(cell: Cell, device: str) -> dict[str, CellPass]:
    """All passes of a cell, by name; they share their inputs."""
    torch.manual_seed(cell.number)
    dtype: torch.dtype = getattr(torch, cell.dtype)
    return MAKERS[cell.operation](cell, dtype, device)


def spread_rows(rows: int, device: str) -> Tensor:
    """Places from the first row to the last."""
    return torch.linspace(0, rows - 1, min(CHECKED_ROWS, rows), device=device).long()


def worst_row_error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The norm of the worst row of the difference, relative to the root mean square of the norms of rows.

    So a single wrong row shows among thousands, and rows of tiny numbers do not count more than others.
    """
    worst = 0.0
    for result, right in zip(results, exact, strict=True):
        right = right.detach()
        difference = result.detach().to(right.dtype).reshape(right.shape) - right
        rows = (-1, right.shape[-1]) if right.dim() > 1 else (1, -1)
        size = right.reshape(rows).norm(dim=1).square().mean().sqrt()
        error = float(difference.reshape(rows).norm(dim=1).max() / size)
        worst = max(worst, error) if error == error else float("inf")
    return worst


# operations on rows, and others that are a `KernelCase`


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        tensor.detach()
        .to(torch.float64 if tensor.dtype == torch.float32 else torch.float32)
        .requires_grad_(tensor.requires_grad)
        if tensor.is_floating_point()
        else tensor
        for tensor in tensors
    ]


def _several(results: Any) -> list[Tensor]:
    """The results of a call that may have one."""
    tensors = results if isinstance(results, (tuple, list)) else (results,)
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _ways_of(case: KernelCase, inputs: Sequence[Tensor]) -> dict[str, tuple[Way, list[Tensor]]]:
    """Each with its inputs: Liger has its own, as it overwrites some."""
    ways = {}
    for name, way in case.ways().items():
        given = list(inputs)
        if name == "liger":
            given = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
        ways[name] = (way, given)
    return ways


def kernel_case_passes(case: KernelCase, cell: Cell) -> dict[str, CellPass]:
    inputs = case.inputs()
    ways = _ways_of(case, inputs)
    passes = {
        "forward": CellPass(
            ways={name: forward_call(way, *given) for name, (way, given) in ways.items()},
            exact=lambda: _several(_without_gradients(case.eager, _wide(inputs))),
            looked_at=_several,
            bytes=case.forward_bytes,
        )
    }
    if "backward" not in cell.passes:
        return passes
    with torch.no_grad():
        results = _several(case.eager(*inputs))
    aboves = [torch.randn_like(result) for result in results]

    def exact() -> list[Tensor]:
        wide = _wide(inputs)
        results = _several(case.eager(*wide))
        wanted = [tensor for tensor in wide if tensor.requires_grad]
        return list(torch.autograd.grad(results, wanted, [above.to(wide[0].dtype) for above in aboves]))

    backward = {
        name: GradientCall(way, aboves, [tensor for tensor in given if tensor.requires_grad], *given)
        for name, (way, given) in ways.items()
    }
    passes["backward"] = CellPass(ways=backward, exact=exact, looked_at=_several, bytes=float(case.backward_bytes or 0))
    return passes


def _without_gradients(way: Way, inputs: Sequence[Tensor]) -> Any:
    with torch.no_grad():
        return way(*inputs)


def _rows(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    case = row_case(cell.operation, cell.shape["rows"], cell.shape["columns"], device, dtype)
    return kernel_case_passes(case, cell)


def _dropout_add(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    """Each way draws its own mask: what is left when that is undone is compared, and how much of it there is."""
    case = row_case(cell.operation, cell.shape["rows"], cell.shape["columns"], device, dtype)
    x, residual = case.inputs()
    above = torch.randn_like(x)
    inputs = [x, residual]
    fixed = KernelCase(
        operation=case.operation, rows=case.rows, columns=case.columns, inputs=lambda: inputs, eager=case.eager,
        nearpeak=case.nearpeak, forward_bytes=case.forward_bytes, backward_bytes=case.backward_bytes,
    )  # fmt: skip
    passes = kernel_case_passes(fixed, cell)
    wide = torch.float64 if dtype == torch.float32 else torch.float32

    def residual_of(result: Tensor) -> list[Tensor]:
        with torch.no_grad():
            scaled = x.to(wide) / (1.0 - DROPOUT)
            added = (result.to(wide) - residual.to(wide)).abs() > scaled.abs() / 2
            return [(result.to(wide) - scaled * added) * _usual_share(added)]

    def gradient_of(gradients: Sequence[Tensor]) -> list[Tensor]:
        by_x = gradients[0].to(wide)
        kept = by_x != 0
        return [torch.where(kept, by_x * (1.0 - DROPOUT), above.to(wide)) * _usual_share(kept), gradients[1]]

    return {
        "forward": replace(passes["forward"], exact=lambda: [residual.detach().to(wide)], looked_at=residual_of),
        "backward": CellPass(
            ways={
                name: gradient_call(way, above, given, *given) for name, (way, given) in _ways_of(fixed, inputs).items()
            },
            exact=lambda: [above.to(wide), above.to(wide)],
            looked_at=gradient_of,
            bytes=passes["backward"].bytes,
        ),
    }


def _usual_share(kept: Tensor) -> float:
    """1, or NaN if a mask of many elements has another share of ones than it should."""
    share, spread = float(kept.double().mean()), 6 * (DROPOUT * (1 - DROPOUT) / kept.numel()) ** 0.5
    return 1.0 if abs(share - (1 - DROPOUT)) < spread + 0.005 else float("nan")


def _rotary(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    sizes = (cell.shape[name] for name in ("batch", "tokens", "heads", "key_heads", "dim"))
    return kernel_case_passes(rotary_case(*sizes, device, dtype), cell)


def _transpose(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    case = copies.transpose_case(cell.shape["rows"], cell.shape["columns"], device, dtype)
    return kernel_case_passes(replace(case, compiled=False), cell)


def _quantize(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    name = cell.shape["block"]
    case = copies.quantize_case(name, cell.shape["rows"], cell.shape["columns"], device)
    inputs = case.inputs()
    quantized = kernel_case_passes(replace(case, inputs=lambda: inputs), cell)["forward"]
    return {
        "forward": replace(
            quantized,
            exact=lambda: [inputs[0].float()],
            looked_at=lambda result: [copies.eager_dequantize(*result, copies.BLOCKS[name]).float()],
        )
    }


def _copy_sizes(shape: Shape) -> copies.CopySizes:
    return copies.CopySizes(
        tokens=shape["tokens"], choices=shape["choices"], experts=shape["experts"], hidden=shape["columns"]
    )


def _permute(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    """`index_select` alone is no peer: it is given the order."""
    case = replace(copies.permute_case(_copy_sizes(cell.shape), device), others={})
    return {name: replace(one, may_wait=True) for name, one in kernel_case_passes(case, cell).items()}


def _unpermute(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    return kernel_case_passes(copies.unpermute_case(_copy_sizes(cell.shape), device), cell)


def _adamw(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    first = [random_tensor(size, device=device, dtype=dtype, grad=False) for size in cell.shape["sizes"]]
    gradients = [torch.randn_like(tensor) for tensor in first]
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "nearpeak": kernels.AdamW,
        "eager": partial(torch.optim.AdamW, fused=True),
    }

    def optimizer(make: Callable[..., torch.optim.Optimizer], rate: float, wide: bool = False) -> Any:
        params = [tensor.float().clone() if wide else tensor.clone() for tensor in first]
        for param, gradient in zip(params, gradients, strict=True):
            param.requires_grad_().grad = gradient.to(param.dtype)
        return make(params, lr=rate)

    def stepped(made: torch.optim.Optimizer) -> list[Tensor]:
        made.step()
        return [param.detach() for param in made.param_groups[0]["params"]]

    elements = sum(cell.shape["sizes"])
    return {
        "forward": CellPass(
            ways={name: partial(stepped, optimizer(make, 1e-4)) for name, make in makers.items()},
            # a rate at which a step shows in 16 bits
            checked_ways={name: lambda make=make: stepped(optimizer(make, 0.1)) for name, make in makers.items()},  # type: ignore[misc]
            exact=lambda: stepped(optimizer(torch.optim.AdamW, 0.1, wide=True)),
            looked_at=lambda params: params,
            bytes=7 * elements * dtype.itemsize,
            may_wait=True,
        )
    }


# attention


def _attention_inputs(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Query, key and value as [batch, heads, tokens, dim], with strides by the layout."""
    tensors = []
    for heads, tokens, dim in (
        (shape["heads"], shape["queries"], shape["dim"]),
        (shape["key_heads"], shape["keys"], shape["dim"]),
        (shape["key_heads"], shape["keys"], shape["value_dim"]),
    ):
        if shape["layout"] == "tokens first":
            tensor = random_tensor(shape["batch"], tokens, heads, dim, device=device, dtype=dtype, grad=False)
            tensors.append(tensor.transpose(1, 2).requires_grad_())
        else:
            tensors.append(random_tensor(shape["batch"], heads, tokens, dim, device=device, dtype=dtype))
    return tensors


def _attention(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    shape = cell.shape
    inputs = _attention_inputs(shape, dtype, device)
    query, key, value = inputs
    causal, left = shape["causal"], shape["window"]
    grouped = {"enable_gqa": True} if shape["heads"] != shape["key_heads"] else {}
    options: dict[str, Any] = dict(grouped)
    if left is not None:
        options["attn_mask"] = visible(shape["queries"], shape["keys"], causal, left, device)[None, None]
    ways: dict[str, Way] = {
        "nearpeak": partial(kernels.attention, causal=causal, window=None if left is None else (left, 0)),
        **{name: by_torch(backend, causal and left is None, **options) for name, backend in SDPA.items()},
    }
    if left is not None:
        ways["varlen"] = partial(_windowed_varlen, left=left)
    # with the strides that a model's next layer gives it
    above = torch.randn_like(query[..., :1].expand(-1, -1, -1, shape["value_dim"]).transpose(1, 2).contiguous())
    above = above.transpose(1, 2)
    kept = _Exact(lambda: _exact_attention(query, key, value, above, causal, left))
    pairs = visible_pairs(shape["queries"], shape["keys"], causal, left)
    flops = 2.0 * shape["batch"] * shape["heads"] * pairs * (shape["dim"] + shape["value_dim"])
    moved = float(sum(tensor.numel() for tensor in (*inputs, above)) * dtype.itemsize)
    some = _checked_heads(shape)

    def checked(result: Tensor) -> list[Tensor]:
        return [result[batch, queries] for batch, _, queries in some]

    def checked_gradients(gradients: Sequence[Tensor]) -> list[Tensor]:
        parts = []
        for batch, keys, queries in some:
            parts += [gradients[0][batch, queries], gradients[1][batch, keys], gradients[2][batch, keys]]
        return parts

    return {
        "forward": CellPass(
            ways={name: forward_call(way, *inputs) for name, way in ways.items()},
            exact=lambda: [part[0] for part in kept(some)],
            looked_at=checked,
            bytes=moved,
            flops=flops,
        ),
        "backward": CellPass(
            ways={name: gradient_call(way, above, inputs, *inputs) for name, way in ways.items()},
            exact=lambda: [tensor for part in kept(some) for tensor in part[1:]],
            looked_at=checked_gradients,
            bytes=2 * moved,
            flops=2.5 * flops,
        ),
    }


class _Exact:
    """What is right, computed once for both passes."""

    def __init__(self, compute: Callable[[], Callable[..., Any]]) -> None:
        self._compute, self._results = compute, None

    def __call__(self, places: Sequence[tuple[int, int, slice]]) -> Any:
        if self._results is None:
            part = self._compute()
            self._results = [part(*place) for place in places]
        return self._results


def _checked_heads(shape: Shape) -> list[tuple[int, int, slice]]:
    """Batch, head of keys and its heads of queries: the first of all, and the last if scores are not too many."""
    group = shape["heads"] // shape["key_heads"]
    first, last = (0, 0, slice(0, group)), (shape["batch"] - 1, shape["key_heads"] - 1, slice(-group, None))
    few = shape["queries"] * shape["keys"] * group <= CHECKED_PAIRS
    return [first, last] if few and shape["batch"] * shape["key_heads"] > 1 else [last]


def visible(queries: int, keys: int, causal: bool, left: int | None, device: str) -> Tensor:
    """Which keys a query sees; queries and keys end together."""
    distance = torch.arange(queries, device=device)[:, None] + (keys - queries) - torch.arange(keys, device=device)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        mask &= distance >= 0
    return mask if left is None else mask & (distance <= left)


def visible_pairs(queries: int, keys: int, causal: bool, left: int | None) -> float:
    """How many pairs of a query and a key are not masked; causal attention counts half of its square."""
    if not causal:
        return float(queries * keys)
    pairs = queries * keys / 2
    return pairs if left is None or left >= keys else pairs - (keys - left) ** 2 / 2


def _exact_attention(
    query: Tensor, key: Tensor, value: Tensor, above: Tensor, causal: bool, left: int | None
) -> Callable[[int, int, slice], tuple[Tensor, ...]]:
    """By batch, head of keys and heads of queries: the result and the three gradients in float32."""
    mask = visible(query.shape[-2], key.shape[-2], causal, left, str(query.device))

    def part(batch: int, head: int, heads: slice) -> tuple[Tensor, ...]:
        k, v = (tensor[batch, head].detach().float().requires_grad_() for tensor in (key, value))
        results, by_query, by_key, by_value = [], [], torch.zeros_like(k), torch.zeros_like(v)
        for q, g in zip(query[batch, heads].detach().float(), above[batch, heads].float(), strict=True):
            q.requires_grad_()
            with torch.enable_grad():
                scores = (q @ k.t() * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
                result = torch.softmax(scores, -1) @ v
                gradients = torch.autograd.grad(result, (q, k, v), g)
            results.append(result.detach())
            by_query.append(gradients[0])
            by_key += gradients[1]
            by_value += gradients[2]
        return torch.stack(results), torch.stack(by_query), by_key, by_value

    return part


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, *, starts: Tensor, longest: int, window: tuple[int, int]
) -> Tensor:
    """Torch's attention of packed sequences, [tokens, heads, dim]: FlashAttention."""
    from torch.nn.attention.varlen import varlen_attn  # not in every version

    parameters = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": window} if "window_size" in parameters else {"is_causal": window[1] == 0}
    if "window_size" not in parameters and window[0] >= 0:
        raise NotImplementedError("this version of torch has no windows")
    if "enable_gqa" in parameters and query.shape[1] != key.shape[1]:
        options["enable_gqa"] = True
    result: Any = varlen_attn(query, key, value, starts, starts, longest, longest, **options)
    return result  # type: ignore[no-any-return]


def _windowed_varlen(query: Tensor, key: Tensor, value: Tensor, *, left: int) -> Tensor:
    """A batch of equal sequences as packed ones, for the window."""
    batch, _, tokens, _ = query.shape
    starts = torch.arange(batch + 1, device=query.device, dtype=torch.int32) * tokens
    packed = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    result = _varlen(*packed, starts=starts, longest=tokens, window=(left, 0))
    return result.unflatten(0, (batch, tokens)).transpose(1, 2)


def _packed(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    shape = cell.shape
    lengths: list[int] = shape["lengths"]
    total, longest, causal, dim = sum(lengths), max(lengths), shape["causal"], shape["dim"]
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    inputs = [
        random_tensor(total, heads, dim, device=device, dtype=dtype)
        for heads in (shape["heads"], shape["key_heads"], shape["key_heads"])
    ]

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result: Tensor = kernels.attention_packed(query, key, value, starts, starts, longest, longest, causal=causal)
        return result

    ways: dict[str, Way] = {
        "nearpeak": own,
        "varlen": partial(_varlen, starts=starts, longest=longest, window=(-1, 0 if causal else -1)),
    }
    above = torch.randn_like(inputs[0])
    group = shape["heads"] // shape["key_heads"]
    bounds = list(pairwise(starts.tolist()))
    # the longest sequence with the first head of keys, and the shortest with the last one
    by_length = sorted(bounds, key=lambda bound: bound[1] - bound[0])
    some = [
        (slice(*by_length[-1]), 0, slice(0, group)),
        (slice(*by_length[0]), shape["key_heads"] - 1, slice(-group, None)),
    ]

    def compute() -> Callable[[slice, int, slice], tuple[Tensor, ...]]:
        def part(tokens: slice, head: int, heads: slice) -> tuple[Tensor, ...]:
            sequence = [tensor[tokens].transpose(0, 1)[None] for tensor in (*inputs, above)]
            return _exact_attention(*sequence, causal, None)(0, head, heads)  # type: ignore[call-arg, arg-type]

        return part

    kept = _Exact(compute)

    def checked_gradients(gradients: Sequence[Tensor]) -> list[Tensor]:
        parts = []
        for tokens, head, heads in some:
            parts += [gradients[0][tokens, heads].transpose(0, 1), *(one[tokens, head] for one in gradients[1:])]
        return parts

    flops = 4.0 * shape["heads"] * dim * sum(visible_pairs(length, length, causal, None) for length in lengths)
    moved = float(sum(tensor.numel() for tensor in (*inputs, above)) * dtype.itemsize)
    return {
        "forward": CellPass(
            ways={name: forward_call(way, *inputs) for name, way in ways.items()},
            exact=lambda: [part[0] for part in kept(some)],  # type: ignore[arg-type]
            looked_at=lambda result: [result[tokens, heads].transpose(0, 1) for tokens, _, heads in some],
            bytes=moved,
            flops=flops,
        ),
        "backward": CellPass(
            ways={name: gradient_call(way, above, inputs, *inputs) for name, way in ways.items()},
            exact=lambda: [tensor for part in kept(some) for tensor in part[1:]],  # type: ignore[arg-type]
            looked_at=checked_gradients,
            bytes=2 * moved,
            flops=2.5 * flops,
        ),
    }


def _decode(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    """Caches in pages and in float8 have no peer in torch."""
    shape = cell.shape
    sizes = {name: shape[name] for name in ("batch", "tokens", "heads", "key_heads", "dim")}
    case = DecodingCase(**sizes, device=device)
    query, key, value = case.inputs()
    cache_dtype = FLOAT8 if shape["cache"] == "float8" else torch.bfloat16
    cache = case.filled(key, value, cache_dtype, shape["page"])
    ways: dict[str, Call] = {"nearpeak": lambda: cache.attend(query)}
    if shape["page"] is None and shape["cache"] != "float8":
        grouped = {"enable_gqa": True} if shape["heads"] != shape["key_heads"] else {}
        for name, backend in SDPA.items():
            ways[name] = forward_call(by_torch(backend, False, **grouped), query, key, value)

    def exact() -> list[Tensor]:
        parts = []
        for batch in dict.fromkeys((0, shape["batch"] - 1)):
            keys, values = (tensor[batch].to(cache_dtype).float() for tensor in (key, value))
            rows = query[batch].float().reshape(len(keys), -1, shape["dim"])
            parts.append(torch.softmax(rows @ keys.mT * shape["dim"] ** -0.5, -1) @ values)
        return parts

    return {
        "forward": CellPass(
            ways=ways,
            exact=exact,
            looked_at=lambda result: [result[batch] for batch in dict.fromkeys((0, shape["batch"] - 1))],
            bytes=2.0 * shape["batch"] * shape["tokens"] * shape["key_heads"] * shape["dim"] * cache_dtype.itemsize,
        )
    }


def _linear_attention(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    shape = cell.shape
    size = (shape["batch"], shape["heads"], shape["tokens"], shape["dim"])
    inputs = [random_tensor(*size, device=device, dtype=dtype) for _ in "qkv"]
    ways = {"nearpeak": kernels.linear_attention, "eager": kernels.linear_attention.reference}  # type: ignore[attr-defined]

    def exact() -> list[Tensor]:
        query, key, value = (tensor.detach()[-1, -1].float() for tensor in inputs)
        weights = (feature_map(query) @ feature_map(key).t()).tril()
        return [weights @ value / (weights.sum(-1, keepdim=True) + EPS)]

    return {
        "forward": CellPass(
            ways={name: forward_call(way, *inputs) for name, way in ways.items()},
            exact=exact,
            looked_at=lambda result: [result[-1, -1]],
            bytes=4.0 * inputs[0].numel() * dtype.itemsize,
        )
    }


# products


def _matrices(shape: Shape, dtype: torch.dtype, device: str, factor: int = 1) -> tuple[Tensor, Tensor]:
    """x and the weight, whose results are about 1."""
    x = random_tensor(shape["rows"], shape["features"], device=device, dtype=dtype, grad=False)
    weight = random_tensor(factor * shape["results"], shape["features"], device=device, dtype=dtype, grad=False)
    return x, weight.mul_(shape["features"] ** -0.5)


def _product_bytes(shape: Shape, itemsize: int, factor: int = 1) -> float:
    rows, features, results = shape["rows"], shape["features"], shape["results"]
    return float(itemsize * (rows * features + factor * results * features + rows * results))


def _product_flops(shape: Shape, factor: float = 1.0) -> float:
    return 2.0 * factor * shape["rows"] * shape["features"] * shape["results"]


def _product(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    x, weight = _matrices(cell.shape, dtype, device)
    some = spread_rows(cell.shape["rows"], device)
    return {
        "forward": CellPass(
            ways={
                "nearpeak": forward_call(kernels.gemm, x, weight),
                "cublas": forward_call(functional.linear, x, weight),
            },
            exact=lambda: [x[some].float() @ weight.float().t()],
            looked_at=lambda result: [result[some]],
            bytes=_product_bytes(cell.shape, dtype.itemsize),
            flops=_product_flops(cell.shape),
        )
    }


def _product_backward(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    shape = cell.shape
    x, weight = (tensor.requires_grad_() for tensor in _matrices(shape, dtype, device))
    above = random_tensor(shape["rows"], shape["results"], device=device, dtype=dtype, grad=False)
    some, columns = spread_rows(shape["rows"], device), spread_rows(shape["results"], device)

    def exact() -> list[Tensor]:
        with torch.no_grad():
            return [above[some].float() @ weight.float(), above[:, columns].float().t() @ x.float()]

    ways: dict[str, Way] = {"nearpeak": kernels.gemm, "cublas": functional.linear}
    return {
        "backward": CellPass(
            ways={name: gradient_call(way, above, [x, weight], x, weight) for name, way in ways.items()},
            exact=exact,
            looked_at=lambda gradients: [gradients[0][some], gradients[1][columns]],
            bytes=2 * _product_bytes(shape, dtype.itemsize),
            flops=_product_flops(shape, 2.0),
        )
    }


def _swiglu(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = functional.linear(x, weight).chunk(2, -1)
    return functional.silu(gate) * up


def _product_swiglu(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    """Its backend "torch" is no peer: cuBLAS, with nearpeak's kernel for the gate."""
    x, weight = _matrices(cell.shape, dtype, device, 2)
    some = spread_rows(cell.shape["rows"], device)
    ways: dict[str, Way] = {
        "nearpeak": partial(kernels.gemm, activation="silu", gated=True),
        "eager": _swiglu,
        "compile": compiled_way(_swiglu),
    }
    of_liger = liger("swiglu")
    if of_liger is not None:
        ways["liger"] = lambda x, weight: of_liger(*(functional.linear(x, half) for half in weight.chunk(2)))
    return {
        "forward": CellPass(
            ways={name: forward_call(way, x, weight) for name, way in ways.items()},
            exact=lambda: [_swiglu(x[some].float(), weight.float())],
            looked_at=lambda result: [result[some]],
            bytes=_product_bytes(cell.shape, dtype.itemsize, 2),
            flops=_product_flops(cell.shape, 2.0),
            peer_backends=(),
        )
    }


def _of_made(made: Made, flops: float, moved: float, without: Sequence[str] = ()) -> CellPass:
    assert made.exact is not None
    exact = made.exact
    return CellPass(
        ways={name: way for name, way in made.ways.items() if name not in without},
        exact=lambda: [exact()],
        looked_at=lambda result: [made.looked_at(result)],
        bytes=moved,
        flops=flops,
        may_wait=True,
    )


def _product_fp8(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    shape = cell.shape
    block = "128" if shape["scales"].startswith("blocks") else shape["scales"]
    made = gemm.fp8_product(shape["rows"], shape["features"], shape["results"], block, shape["fast"], device)
    return {
        "forward": _of_made(made, _product_flops(shape), _product_bytes(shape, 1) + shape["rows"] * shape["results"])
    }


def _expert_sizes(shape: Shape) -> moe.ExpertSizes:
    return moe.ExpertSizes(**{name: shape[name] for name in ("experts", "tokens", "choices", "columns", "inner")})


def _grouped(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    shape, sizes = cell.shape, _expert_sizes(cell.shape)
    rows = shape["tokens"] * shape["choices"]
    flops = 2.0 * rows * shape["columns"] * shape["inner"]
    moved = 2.0 * (rows * (shape["columns"] + shape["inner"]) + shape["experts"] * shape["columns"] * shape["inner"])
    made = {"forward": moe.grouped_forward(shape["routing"], sizes=sizes, device=device)}
    for step in ("by rows", "by matrices"):
        made[step] = moe.grouped_gradient(shape["routing"], step=step, sizes=sizes, device=device)
    return {name: _of_made(one, flops, moved, ("max-autotune",)) for name, one in made.items()}


def _moe(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    """torch.compile and Liger's layer, which autotunes for minutes, are in the fixed cells."""
    shape, sizes = cell.shape, _expert_sizes(cell.shape)
    rows = shape["tokens"] * shape["choices"]
    flops = 6.0 * rows * shape["columns"] * shape["inner"]
    moved = 2.0 * (3 * shape["experts"] * shape["columns"] * shape["inner"] + 2 * shape["tokens"] * shape["columns"])
    passes = {}
    for name, factor in (("forward", 1), ("both", 3)):
        made = moe.expert_layer(shape["routing"], sizes=sizes, device=device, both=name == "both")
        passes[name] = _of_made(made, factor * flops, factor * moved, ("compile", "liger"))
    return passes


# losses


def _loss(cell: Cell, dtype: torch.dtype, device: str) -> dict[str, CellPass]:
    shape = cell.shape
    sizes = losses.LossSizes(tokens=shape["tokens"], vocabulary=shape["vocabulary"], hidden=shape.get("hidden", 1))
    linear = cell.operation == "linear_cross_entropy"
    case = (
        losses.linear_cross_entropy_case(sizes, device) if linear else losses.cross_entropy_case(sizes, device, dtype)
    )
    logits = shape["tokens"] * shape["vocabulary"]
    return {
        "both": CellPass(
            ways={name: way for name, way in case.ways.items() if name != "three products"},
            resets={name: reset for name, reset in case.resets.items() if name != "three products"},
            exact=case.exact,
            looked_at=case.looked_at,
            bytes=float(2 * logits * dtype.itemsize),
            flops=6.0 * logits * shape["hidden"] if linear else None,
            may_wait=True,
        )
    }


Maker = Callable[[Cell, torch.dtype, str], dict[str, CellPass]]
MAKERS: dict[str, Maker] = {
    "attention": _attention,
    "attention packed": _packed,
    "decode": _decode,
    "gemm": _product,
    "gemm few rows": _product,
    "gemm backward": _product_backward,
    "gemm swiglu": _product_swiglu,
    "gemm fp8": _product_fp8,
    "grouped_gemm": _grouped,
    "moe": _moe,
    **dict.fromkeys(
        ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "softmax", "log_softmax", "swiglu", "geglu"), _rows
    ),
    "bias_gelu": _rows,
    "dropout_add": _dropout_add,
    "rotary": _rotary,
    "cross_entropy": _loss,
    "linear_cross_entropy": _loss,
    "quantize": _quantize,
    "transpose_copy": _transpose,
    "permute_tokens": _permute,
    "unpermute_tokens": _unpermute,
    "linear_attention": _linear_attention,
    "adamw": _adamw,
}
"""By operation, what makes the passes of a cell."""


# the backends of nearpeak itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a call of nearpeak runs."""

    backend: str
    """"gluon", "triton", "torch", "cudnn" or "flash"; several with a plus between, as of the products of a gradient."""
    candidates: tuple[str, ...] = ()
    """All that take it, the one that runs among them; empty where there is nothing to choose."""
    by_sizes: bool = True
    """Whether the operation chooses one by the sizes of a call; otherwise Gluon's kernels run where they can."""


def choice_of(call: Call) -> Choice:
    """What a call chooses; of an operation that has no choice, the language of the kernels that it starts."""
    names: list[str] = []
    candidates: list[str] = []
    languages: list[str] = []
    choose, start = Chooser.choose, launch._launch_on_device

    def watched_choose(self: Chooser, key: Any, among: Sequence[str], *rest: Any) -> str:
        name = choose(self, key, among, *rest)
        names.append(name)
        candidates.extend(among)
        return name

    def watched_start(kernel: Any, *rest: Any) -> None:
        languages.append("gluon" if type(kernel).__name__ == "GluonJITFunction" else "triton")
        start(kernel, *rest)

    call()  # a backward pass runs its forward pass at its first call
    with _patched(
        {
            (Chooser, "choose"): watched_choose,
            (Chooser, "known"): lambda self, key: None,
            (launch, "_launch_on_device"): watched_start,
            (ReplayCache, "enabled"): False,
        }
    ):
        call()
    if names:
        return Choice(backend="+".join(sorted(set(names))), candidates=tuple(dict.fromkeys(candidates)))
    if "gluon" in languages:
        return Choice(backend="gluon", candidates=("gluon", "triton"), by_sizes=False)
    return Choice(backend="triton" if languages or launch.INTERPRETED else "torch", by_sizes=False)


def other_backends(call: Call, choice: Choice, peers: Sequence[str] = ()) -> tuple[dict[str, Call], dict[str, str]]:
    """The same call by the other backends of nearpeak that take it, as "nearpeak/triton"; and why some do not.

    Not by those of `peers`.
    """
    ways, failed = {}, {}
    for name in choice.candidates:
        if name != choice.backend and name not in peers:
            forced = _by_backend(call, name) if choice.by_sizes else _without_gluon(call)
            try:
                chosen = choice_of(forced)
            except Exception as error:  # what nearpeak itself runs can be measured
                failed[f"nearpeak/{name}"] = error_text(error)
                continue
            if chosen.backend == name:
                ways[f"nearpeak/{name}"] = forced
    return ways, failed


def _by_backend(call: Call, name: str) -> Call:
    def forced() -> Any:
        with kernels.using(backend=name):
            return call()

    return forced


def _without_gluon(call: Call) -> Call:
    """The call where Gluon's kernels run nowhere, after it was made with them: all modules are imported."""
    places = {
        (module, "runs_on"): _runs_nowhere
        for name, module in list(sys.modules.items())
        if name.startswith("nearpeak.kernels") and getattr(module, "runs_on", None) is gluon.runs_on
    }

    def portable() -> Any:
        with _patched({**places, (ReplayCache, "enabled"): False}):
            return call()

    return portable


def _runs_nowhere(device: torch.device) -> bool:
    return False


@contextmanager
def _patched(values: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    before = {place: getattr(*place) for place in values}
    for (owner, name), value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)
