"""Section "copies" of `benchmarks.kernels`: quantization to float8, transposes, permuted tokens, and AdamW.

"index_select" is the copy of tokens alone, once their order is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.cases import KernelCase, Way, random_tensor
from nearpeak import kernels

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
BLOCKS: dict[str, Any] = {"tensor": "tensor", "row": "row", "1x128": (1, 128), "128x128": (128, 128)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySizes:
    """Of the tensors that are moved."""

    side: int = 8192
    """Of square matrices."""
    tokens: int = 8192
    choices: int = 8
    experts: int = 128
    hidden: int = 4096
    width: int = 1024
    """Of the model whose parameters an optimizer has."""
    layers: int = 33
    vocabulary: int = 32000


def copy_cases(sizes: CopySizes | None = None, device: str = "cuda") -> Iterator[KernelCase]:
    sizes = sizes or CopySizes()
    for name in BLOCKS:
        yield quantize_case(name, sizes.side, sizes.side, device)
    for name in ("1x128", "128x128"):
        yield _dequantize(name, BLOCKS[name], sizes.side, device)
    yield transpose_case(sizes.side, sizes.side, device)
    yield permute_case(sizes, device)
    yield unpermute_case(sizes, device)
    for dtype in (torch.bfloat16, torch.float32):
        yield _adamw(sizes, dtype, device)


def _blocks(x: Tensor, block: Any) -> tuple[Tensor, tuple[int, ...]]:
    """A matrix in blocks, and the dimensions that share a scale."""
    rows, columns = x.shape
    if block == "tensor":
        return x, (0, 1)
    if block == "row":
        return x, (1,)
    high, wide = block
    return x.view(rows // high, high, columns // wide, wide), (1, 3)


def eager_quantize(x: Tensor, block: Any) -> tuple[Tensor, Tensor]:
    values, shared = _blocks(x.float(), block)
    scales = values.abs().amax(shared, keepdim=True).clamp(min=1e-12) / LARGEST
    values = (values / scales).clamp(-LARGEST, LARGEST).to(FLOAT8)
    return values.view(x.shape), scales.squeeze(shared)


def eager_dequantize(values: Tensor, scales: Tensor, block: Any) -> Tensor:
    numbers, shared = _blocks(values.float(), block)
    for dimension in shared:
        scales = scales.unsqueeze(dimension)
    return (numbers * scales).view(values.shape).bfloat16()


def quantize_case(name: str, rows: int, columns: int, device: str) -> KernelCase:
    elements, block = rows * columns, BLOCKS[name]
    scales = {"tensor": 1, "row": rows, "1x128": elements // 128, "128x128": elements // 128**2}[name]
    reads = 2 if name == "tensor" else 1
    return KernelCase(
        operation=f"quantize {name}",
        rows=rows,
        columns=columns,
        inputs=lambda: [random_tensor(rows, columns, device=device, grad=False)],
        eager=lambda x: eager_quantize(x, block),
        nearpeak=lambda x: kernels.quantize(x, block=block),
        forward_bytes=elements * (2 * reads + 1) + 4 * scales,
        checked=False,
        note="read twice: 5 bytes for each element" if reads == 2 else "",
    )


def _dequantize(name: str, block: Any, side: int, device: str) -> KernelCase:
    elements = side * side
    scales = elements // (128 if name == "1x128" else 128**2)

    def inputs() -> list[Tensor]:
        return list(kernels.quantize(random_tensor(side, side, device=device, grad=False), block=block))

    return KernelCase(
        operation=f"dequantize {name}",
        rows=side,
        columns=side,
        inputs=inputs,
        eager=lambda values, scales: eager_dequantize(values, scales, block),
        nearpeak=lambda values, scales: kernels.dequantize(values, scales, block=block),
        forward_bytes=3 * elements + 4 * scales,
        checked=False,
    )


def transpose_case(rows: int, columns: int, device: str, dtype: torch.dtype = torch.bfloat16) -> KernelCase:
    return KernelCase(
        operation="transpose_copy",
        rows=rows,
        columns=columns,
        inputs=lambda: [random_tensor(rows, columns, device=device, dtype=dtype, grad=False)],
        eager=lambda x: x.t().contiguous(),
        nearpeak=lambda x: kernels.transpose_copy(x),
        forward_bytes=2 * rows * columns * dtype.itemsize,
    )


def _chosen(sizes: CopySizes, device: str) -> Tensor:
    """As many different experts for each token as it has choices."""
    return torch.rand(sizes.tokens, sizes.experts, device=device).topk(sizes.choices, -1).indices


def eager_permute(x: Tensor, experts: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(number, dtype=flat.dtype, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
    return x.index_select(0, order // experts.shape[1]), counts, order


def eager_unpermute(rows: Tensor, row_map: Tensor, weights: Tensor) -> Tensor:
    tokens, choices = row_map.shape
    chosen = rows.index_select(0, row_map.flatten()).view(tokens, choices, rows.shape[1])
    return (chosen * weights[..., None]).sum(1)


def permute_case(sizes: CopySizes, device: str) -> KernelCase:
    tokens, choices, number = sizes.tokens, sizes.choices, sizes.experts
    token = 2 * sizes.hidden

    def inputs() -> list[Tensor]:
        experts = _chosen(sizes, device)
        order = experts.flatten().argsort(stable=True) // choices
        return [random_tensor(tokens, sizes.hidden, device=device), experts, order]

    return KernelCase(
        operation="permute_tokens",
        rows=tokens * choices,
        columns=sizes.hidden,
        inputs=inputs,
        eager=lambda x, experts, order: eager_permute(x, experts, number),
        nearpeak=lambda x, experts, order: kernels.permute_tokens(x, experts, number_of_experts=number),
        others={"index_select": lambda x, experts, order: x.index_select(0, order)},
        forward_bytes=tokens * (1 + choices) * token,
        backward_bytes=tokens * (1 + choices) * token,
        compiled=False,  # a sort, which it calls as it is
    )


def unpermute_case(sizes: CopySizes, device: str) -> KernelCase:
    tokens, choices = sizes.tokens, sizes.choices
    token = 2 * sizes.hidden

    def inputs() -> list[Tensor]:
        experts = _chosen(sizes, device)
        order = experts.flatten().argsort(stable=True)
        row_map = order.argsort().to(torch.int32).view(tokens, choices)
        rows = random_tensor(tokens * choices, sizes.hidden, device=device)
        weights = torch.rand(tokens, choices, device=device).bfloat16().requires_grad_()
        return [rows, row_map, weights]

    return KernelCase(
        operation="unpermute_tokens",
        rows=tokens * choices,
        columns=sizes.hidden,
        inputs=inputs,
        eager=eager_unpermute,
        nearpeak=lambda rows, row_map, weights: kernels.unpermute_tokens(rows, row_map, weights),
        forward_bytes=tokens * (1 + choices) * token,
        backward_bytes=tokens * (1 + 2 * choices) * token,
    )


def parameter_shapes(sizes: CopySizes) -> list[tuple[int, ...]]:
    """Those of a decoder as Llama is: nine tensors for each layer, and three more."""
    width = sizes.width
    keys, inner = max(width // 4, 1), width * 7 // 2
    layer = [(width, width), (keys, width), (keys, width), (width, width)]
    layer += [(inner, width), (inner, width), (width, inner)]
    shapes: list[tuple[int, ...]] = [*layer, (width,), (width,)] * sizes.layers
    return [*shapes, (sizes.vocabulary, width), (sizes.vocabulary, width), (width,)]


def _adamw(sizes: CopySizes, dtype: torch.dtype, device: str) -> KernelCase:
    shapes = parameter_shapes(sizes)
    elements = sum(torch.Size(shape).numel() for shape in shapes)

    def inputs() -> list[Tensor]:
        params = []
        for shape in shapes:
            param = random_tensor(*shape, device=device, dtype=dtype)
            param.grad = torch.randn_like(param) * 1e-3
            params.append(param)
        return params

    return KernelCase(
        operation=f"adamw {str(dtype).removeprefix('torch.')}",
        rows=len(shapes),
        columns=elements,
        inputs=inputs,
        eager=_stepping(lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True)),
        nearpeak=_stepping(lambda params: kernels.AdamW(params, lr=1e-4)),
        forward_bytes=7 * elements * dtype.itemsize,
        compiled=False,
        checked=False,
        note="gradient, parameter and two averages read, the last three written",
    )


def _stepping(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Way:
    """A step on the parameters that it is given, by an optimizer that is made for them once."""
    made: dict[int, torch.optim.Optimizer] = {}

    def step(*params: Tensor) -> None:
        optimizer = made.get(id(params[0]))
        if optimizer is None:
            made.clear()
            optimizer = made[id(params[0])] = make(list(params))
        optimizer.step()

    return step
