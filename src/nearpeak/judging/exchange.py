"""Tensors that cross between the judge and the process of a candidate, as files.

A file of tensors is a line of JSON, which has a tree of arguments and the form of each storage, and the bytes of the
storages after it. A tensor is sizes, strides and an offset over its storage, so that layouts arrive as they were.
Nothing is pickled.
"""

from __future__ import annotations

import ctypes
import json
import math
from pathlib import Path
from typing import Any

import torch

LONGEST_HEADER = 1 << 20
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def write_tensors(path: str | Path, tree: Any) -> None:
    """Writes lists, tuples, dictionaries, numbers, texts and tensors to a file that `read_tensors` reads."""
    contents: list[bytes] = []
    header = {"tree": _described(tree, contents), "storages": [len(content) for content in contents]}
    with Path(path).open("wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        for content in contents:
            file.write(content)


def read_tensors(path: str | Path, device: torch.device | str = "cpu") -> Any:
    """What `write_tensors` wrote, with its tensors on `device`; ValueError for anything else."""
    with Path(path).open("rb") as file:
        line = file.readline(LONGEST_HEADER)
        header = json.loads(line)
        storages = []
        for size in header["storages"]:
            content = bytearray(file.read(size))
            if len(content) != size:
                raise ValueError("a file of tensors ends early")
            flat = torch.frombuffer(content, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
            storages.append(flat.to(device) if torch.device(device).type != "cpu" else flat.clone())
        return _rebuilt(header["tree"], storages)


def _described(value: Any, contents: list[bytes]) -> Any:
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value, contents)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [_described(item, contents) for item in value]}
    if isinstance(value, list):
        return {"list": [_described(item, contents) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[key, _described(item, contents)] for key, item in value.items()]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise ValueError(f"an argument is a {type(value).__name__}, which is neither a tensor nor plain data")


def _describe_tensor(tensor: torch.Tensor, contents: list[bytes]) -> dict[str, Any]:
    plain = tensor.detach()
    if plain.layout != torch.strided:
        raise ValueError(f"a tensor has the layout {plain.layout}, and only dense ones are exchanged")
    plain = plain.resolve_conj().resolve_neg()
    span = storage_span(plain)
    flat = plain.as_strided((span,), (1,), plain.storage_offset()) if plain.numel() else plain.reshape(-1)
    # The padding before the first element: an offset of some elements, as alignment sees it.
    offset = plain.storage_offset() % 64
    raw = bytes_of(flat).cpu()
    content = ctypes.string_at(raw.data_ptr(), raw.numel()) if raw.numel() else b""
    contents.append(b"\0" * (offset * plain.element_size()) + content)
    return {
        "tensor": len(contents) - 1,
        "of": str(plain.dtype).removeprefix("torch."),
        "size": list(plain.shape),
        "stride": list(plain.stride()),
        "offset": offset,
        "requires_grad": tensor.requires_grad,
    }


def storage_span(tensor: torch.Tensor) -> int:
    """Elements of the storage from the first to the last that the tensor reaches."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _rebuilt(node: Any, storages: list[torch.Tensor]) -> Any:
    kinds = ("tensor", "dtype", "tuple", "list", "dict", "float", "value")
    ((kind, content),) = [(key, node[key]) for key in kinds if key in node]
    if kind == "tensor":
        dtype = _DTYPES[node["of"]]
        storage = storages[int(content)]
        flat = storage.view(dtype) if storage.numel() else torch.empty(0, dtype=dtype, device=storage.device)
        size, stride, offset = ([int(x) for x in node["size"]], [int(x) for x in node["stride"]], int(node["offset"]))
        if 0 in size:
            return torch.empty(size, dtype=dtype, device=storage.device).requires_grad_(bool(node["requires_grad"]))
        tensor = flat.as_strided(size, stride, offset)
        return tensor.requires_grad_(True) if node["requires_grad"] else tensor
    if kind == "dtype":
        return _DTYPES[content]
    if kind == "tuple":
        return tuple(_rebuilt(item, storages) for item in content)
    if kind == "list":
        return [_rebuilt(item, storages) for item in content]
    if kind == "dict":
        return {key: _rebuilt(item, storages) for key, item in content}
    return float(content) if kind == "float" else content


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the values, from the first element to the last."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    # The stride of a tensor with one element or none may be anything.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, from the first to the last."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in tensors_in(item)]
    return []


def map_tensors(tree: Any, change: Any) -> Any:
    """The same tree with `change(tensor)` in place of each tensor."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(item, change) for key, item in tree.items()}
    if isinstance(tree, list):
        return [map_tensors(item, change) for item in tree]
    if isinstance(tree, tuple):
        return tuple(map_tensors(item, change) for item in tree)
    return tree


def rescaled(args: Any, seed: int) -> Any:
    """Arguments whose floating-point tensors have a factor for each index of each dimension, in new memory.

    The form is the same, and no result follows from an earlier one, as it would from inputs that are all multiplied by
    one factor. Dimensions of equal size have equal factors: what is symmetric stays so. The judge and the process of
    the candidate both compute this, with the same result to the last bit.
    """
    factors: dict[int, torch.Tensor] = {}

    def factors_of(size: int) -> torch.Tensor:
        if size not in factors:
            generator = torch.Generator().manual_seed((seed + size) % 2**63)
            factors[size] = 0.8 + 0.45 * torch.rand(size, generator=generator, dtype=torch.float64)
        return factors[size]

    def change(tensor: torch.Tensor) -> torch.Tensor:
        values = plain = tensor.detach()
        if (plain.is_floating_point() or plain.is_complex()) and plain.element_size() > 1:
            values = plain * factors_of(1)[0].to(plain)
            for dim, (size, stride) in enumerate(zip(plain.shape, plain.stride(), strict=True)):
                if size > 1 and stride:
                    values = values * factors_of(size).to(plain).reshape(-1, *[1] * (plain.dim() - dim - 1))
        return _same_form(plain, values).requires_grad_(tensor.requires_grad)

    return map_tensors(args, change)


def _same_form(form: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The values in new memory, with the strides of `form`."""
    if not form.numel():
        return torch.empty_like(form)
    offset = form.storage_offset() % 64
    storage = torch.zeros(offset + storage_span(form), dtype=form.dtype, device=form.device)
    new = storage.as_strided(form.shape, form.stride(), offset)
    if any(stride == 0 and size > 1 for size, stride in zip(form.shape, form.stride(), strict=True)):
        index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in form.stride())
        new[index].copy_(values[index])
    else:
        new.copy_(values)
    return new
