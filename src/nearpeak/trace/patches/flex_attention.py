"""`count_mask_pairs`: inside, ops of flex attention have the number of pairs that their block mask leaves.

Which blocks a mask contains is data. A mask that was built outside of `fake()` and of the trace has it, and its
function tells which pairs of a partly masked block remain. The counts are added to the options for the kernel, which
nothing reads here, and so reach the forward and the backward op.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch._higher_order_ops
import torch.nn.attention.flex_attention as flex
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from nearpeak.trace.cuda_ops.registry import current_target
from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute
from nearpeak.trace.recorder import active_recorder

_MAX_PAIRS = 1 << 24
"""Pairs up to which a mask's function is evaluated; beyond, pairs of partly masked blocks do not count."""
_PREFIX = "mask_"


class _BlockMask(NamedTuple):
    """The parts of a block mask that tell which pairs it leaves."""

    queries: int
    keys: int
    partial: torch.Tensor
    """For each batch, head, block of queries and block of keys, whether it is computed and masked by the function."""
    full: torch.Tensor
    """Whether it is computed without the function."""
    size: tuple[int, int]
    function: Any


class _CountCache(threading.local):
    """Counts by the ids of masks, with the masks to keep their ids unique."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], tuple[Any, dict[str, int]]] = {}


_count_cache = _CountCache()


@SharedPatch
@contextmanager
def count_mask_pairs() -> Iterator[None]:
    operator: Any = torch.ops.higher_order.flex_attention
    original = type(operator).__call__
    validate = flex._validate_device
    graphs = sys.modules[type(operator).__module__]
    differentiate = graphs.create_fw_bw_graph

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active_recorder() is None or len(args) < 7:
            return original(self, *args, **kwargs)
        query, key, value, score, mask, scale, options, *others = args
        options = {**options, **_cached_counts(mask, query.shape[-2], key.shape[-2])}
        return original(self, query, key, value, score, mask, scale, options, *others, **kwargs)

    def differentiate_unseen(score: Any, examples: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = active_recorder()
        if recorder is not None:  # examples to trace the function with, which a kernel does not need
            example_storages = {recorder.storages.used(example) for example in examples}
            while recorder.ops and {tensor.storage for tensor in recorder.ops[-1].outputs} & example_storages:
                recorder.ops.pop()
        with _disable_current_modes():
            return differentiate(score, examples, *args, **kwargs)

    def validate_device(*tensors: torch.Tensor) -> None:
        if current_target() is None:  # for a GPU, CPU tensors stand for its own
            validate(*tensors)

    with ExitStack() as stack:
        stack.enter_context(patch_attribute(type(operator), "__call__", call))
        stack.enter_context(patch_attribute(graphs, "create_fw_bw_graph", differentiate_unseen))
        stack.enter_context(patch_attribute(flex, "_validate_device", validate_device))
        shown: set[str] = getattr(flex, "_WARNINGS_SHOWN", set())
        if "flex_attention_performance" not in shown:  # it is not compiled because of the trace
            shown.add("flex_attention_performance")
            stack.callback(shown.discard, "flex_attention_performance")
        yield
    _count_cache.counts.clear()


def _cached_counts(mask: Any, queries: int, keys: int) -> dict[str, int]:
    """The number of pairs and of heads (batches times heads of the mask); queries and keys of the head with the fewest.

    Empty if the mask has no values.
    """
    tensors = [item for item in mask if isinstance(item, torch.Tensor)]
    if not tensors or any(isinstance(item, FakeTensor) for item in tensors):
        return {}
    key = (queries, keys, id(mask[-1]), *map(id, tensors))
    if key not in _count_cache.counts:
        with no_dispatch(), torch._C.DisableTorchFunction():
            _count_cache.counts[key] = (mask, _count_pairs(_read_block_mask(mask, queries, keys)))
    return _count_cache.counts[key][1]


def _read_block_mask(mask: Any, queries: int, keys: int) -> _BlockMask:
    partial_numbers, partial_indices, full_numbers, full_indices = mask[2:6]
    partial = _dense_block_mask(partial_numbers, partial_indices)
    full = torch.zeros_like(partial) if full_numbers is None else _dense_block_mask(full_numbers, full_indices)
    return _BlockMask(
        queries=min(mask[0], queries),
        keys=min(mask[1], keys),
        partial=partial & ~full,
        full=full,
        size=(mask[-3], mask[-2]),
        function=mask[-1],
    )


def _dense_block_mask(numbers: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """A bool for each block, from lists of block indices whose first `numbers` entries count."""
    blocks = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.bool)
    listed = torch.arange(indices.shape[-1]) < numbers.cpu().unsqueeze(-1)
    places = torch.where(listed, indices.cpu().long(), indices.shape[-1])  # other entries go to an extra block
    return blocks.scatter_(-1, places, True)[..., :-1]


def _count_pairs(blocks: _BlockMask) -> dict[str, int]:
    batches, heads, rows, columns = blocks.full.shape
    row_sizes = (blocks.queries - torch.arange(rows) * blocks.size[0]).clamp(0, blocks.size[0])
    column_sizes = (blocks.keys - torch.arange(columns) * blocks.size[1]).clamp(0, blocks.size[1])
    pairs = int((blocks.full * row_sizes[:, None] * column_sizes).sum())
    seen_queries = _per_position(blocks.full.any(-1), blocks.size[0], blocks.queries)
    seen_keys = _per_position(blocks.full.any(-2), blocks.size[1], blocks.keys)
    partial_blocks = blocks.partial.nonzero()
    if partial_blocks.numel() and len(partial_blocks) * blocks.size[0] * blocks.size[1] <= _MAX_PAIRS:
        for place in partial_blocks.split(64):
            unmasked = _unmasked_pairs(blocks, place)
            if unmasked is None:
                break
            batch, head, query, key = unmasked
            pairs += len(batch)
            seen_queries[batch, head, query] = True
            seen_keys[batch, head, key] = True
    return {
        _PREFIX + "pairs": pairs,
        _PREFIX + "heads": batches * heads,
        _PREFIX + "queries": int(seen_queries.sum(-1).min()),
        _PREFIX + "keys": int(seen_keys.sum(-1).min()),
        _PREFIX + "blocks": int(blocks.full.sum()) + len(partial_blocks),
    }


def _per_position(marks: torch.Tensor, size: int, total: int) -> torch.Tensor:
    return marks.repeat_interleave(size, dim=-1)[..., :total].clone()


def _unmasked_pairs(blocks: _BlockMask, places: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Batch, head, query and key of all pairs that the function leaves in some blocks; None if it raises."""
    batch, head, row, column = (place[:, None, None] for place in places.unbind(1))
    query = row * blocks.size[0] + torch.arange(blocks.size[0])[:, None]
    key = column * blocks.size[1] + torch.arange(blocks.size[1])
    inside = (query < blocks.queries) & (key < blocks.keys)
    index = [item.expand(inside.shape)[inside] for item in (batch, head, query, key)]
    try:
        with TransformGetItemToIndex():
            mask = torch.vmap(blocks.function)(*index)
    except Exception:  # user code, which may read tensors that have no values
        return None
    return tuple(item[mask] for item in index)
