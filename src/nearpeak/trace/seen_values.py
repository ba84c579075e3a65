"""`SeenValues`: what the values of tensors tell about a step: padded batches, keys that masks hide, rows that a loss
leaves out, matrices that are nearly all zeros, and numbers that a CPU is slow with.

Only the step that is traced is looked at, which is not timed: on a device, a look waits for the values. What is looked
at is bounded: one look for each storage (for each attention, of hidden keys), samples of large tensors, and no further
look at tensors of a shape that had nothing to tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nearpeak.ops.op import Nonzeros, Padding, StorageKind, VisibleKeys
from nearpeak.ops.tensor import Tensor
from nearpeak.trace.schema import OperatorSchema
from nearpeak.trace.source import in_compiled_code
from nearpeak.trace.storages import Storages

SEQUENCE_READERS: Mapping[str, int] = {
    "aten.embedding.default": 1,
    "aten.index.Tensor": 1,
    "aten.index_select.default": 2,
    "aten.lstm.input": 0,
    "aten.gru.input": 0,
    "aten.rnn_tanh.input": 0,
    "aten._cudnn_rnn.default": 0,
    "aten.mkldnn_rnn_layer.default": 0,
    "aten.convolution.default": 0,
    "aten.view.default": 0,
    "aten._unsafe_view.default": 0,
    "aten.native_layer_norm.default": 0,
}
"""Operators that read batches of sequences, and the position of that argument. A layer sees a view of frames."""
_ID_READERS = frozenset(
    {"aten.embedding.default", "aten.index.Tensor", "aten.index_select.default", "aten.view.default"}
)
PRODUCT_FACTORS: Mapping[str, tuple[int, int]] = {
    "aten.mm.default": (0, 1),
    "aten.addmm.default": (1, 2),
    "aten.bmm.default": (0, 1),
    "aten.baddbmm.default": (1, 2),
}
"""Operators that multiply matrices, and the positions of these."""
ONE_HOT_MAKERS = frozenset(
    {
        "aten.scatter.value",
        "aten.scatter_.value",
        "aten.scatter.src",
        "aten.scatter_.src",
        "aten.eq.Tensor",
        "aten.index.Tensor",
        "aten.index_select.default",
        "aten._index_put_impl_.default",
        "aten.index_put_.default",
    }
)
"""Operators that may write one-hot vectors."""
LOSSES = frozenset({"aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"})
"""Operators with a target for each row, and one value of it that does not count."""
MAX_BATCH_ELEMENTS = 1 << 24
"""Larger batches are not looked at."""
MIN_SEQUENCE_LENGTH = 16
"""Elements of a row. A few fields of a record are no sequence."""
MIN_PADDED_SHARE = 0.05
"""Of the batch. Less padding is not worth mentioning."""
MAX_PADDING_INSIDE = 0.02
"""The value that rows end with is padding if no larger share of the other elements has it."""
MIN_MATRIX_ELEMENTS = 1 << 12
"""Smaller matrices are not looked at."""
MAX_MASK_ELEMENTS = 1 << 26
"""Larger masks are not looked at."""
MASKED_SCORE = -1e4
"""What is added to a score that does not count is at most that."""
MIN_KEYS = 64
"""Of an attention. With fewer of them it takes no time."""
MIN_HIDDEN_SHARE = 0.1
"""Of the keys. Kernels work on blocks of them: fewer hidden ones cost next to nothing."""
SOFTMAXES = frozenset({"aten._softmax.default", "aten._safe_softmax.default"})
"""Operators that make probabilities of scores, their first argument."""
SAMPLED_ROWS = 128
SAMPLED_NUMBERS = 4096
VAIN_LOOKS = 3
"""At tensors of one shape that an operator reads: further ones are not looked at."""


class SeenValues:
    """Looks at the arguments of ops before they run; at none if it may not read values."""

    def __init__(self, storages: Storages, *, reads: bool = True) -> None:
        self._storages = storages
        self._reads = reads
        self._padding: dict[int, Padding | None] = {}
        self._nonzeros: dict[int, Nonzeros] = {}
        self._subnormals: dict[int, float] = {}
        self._counted: dict[int, float] = {}
        self._causal: dict[int, bool] = {}
        self.visible_keys: dict[int, VisibleKeys] = {}
        """Of attention of which a mask hides many keys from all queries, by the index of the op."""
        self._row_losses: set[int] = set()
        """Storages of losses per row, which the program may multiply with weights."""
        self._vain: dict[tuple[str, tuple[int, ...]], int] = {}
        """Looks that found nothing, by operator and shape."""

    @property
    def padding(self) -> dict[int, Padding]:
        """The padding of batches of sequences, by their storages."""
        return {storage: padding for storage, padding in self._padding.items() if padding is not None}

    @property
    def nonzeros(self) -> dict[int, Nonzeros]:
        """Of tensors that are nearly all zeros, by their storages."""
        return {storage: nonzeros for storage, nonzeros in self._nonzeros.items() if nonzeros.share <= Nonzeros.MOST}

    @property
    def subnormals(self) -> dict[int, float]:
        """The share of subnormal numbers in tensors on the CPU, by their storages."""
        return {storage: share for storage, share in self._subnormals.items() if share}

    @property
    def counted(self) -> dict[int, float]:
        """The share of rows that a loss counts where that is not all, by the storages of targets and losses per row."""
        return {storage: share for storage, share in self._counted.items() if share < 1}

    @property
    def causal_masks(self) -> frozenset[int]:
        """The storages of masks that let each token attend to itself and all before it, in the whole batch."""
        return frozenset(storage for storage, causal in self._causal.items() if causal)

    def look(
        self,
        schema: OperatorSchema,
        arguments: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        index: int,
    ) -> None:
        """Looks at what an op is about to read, which will have this index."""
        if not self._reads:
            return
        sequences = SEQUENCE_READERS.get(schema.name)
        # Gradients of a loss without the padding are zeros there too: they tell nothing new.
        if sequences is not None and len(args) > sequences and torch._C._current_graph_task_id() == -1:
            self._look_at_sequences(schema.name, arguments.get(schema.arguments[sequences]), args[sequences])
        for position in PRODUCT_FACTORS.get(schema.name, ()):
            # Gradients are zeros where nobody read the result.
            if len(args) > position and torch._C._current_graph_task_id() == -1:
                self._look_at_matrix(schema.name, arguments.get(schema.arguments[position]), args[position])
        if schema.name.startswith("aten._scaled_dot_product_"):
            for name, value in (*zip(schema.arguments, args, strict=False), *kwargs.items()):
                if name in ("attn_bias", "attn_mask") and isinstance(value, torch.Tensor):
                    self._look_at_mask(arguments.get(name), value)
                    if not schema.name.endswith("_backward.default"):
                        self._look_at_keys(schema.name, index, arguments.get("key"), value, MASKED_SCORE)
        elif schema.name in SOFTMAXES and args and _is_softmax_over_keys(args[0], arguments.get("dim")):
            self._look_at_keys(schema.name, index, None, args[0], MASKED_SCORE / 2)  # a score may be added
        if schema.name in LOSSES:
            self._look_at_target(arguments.get("target"), args[1], arguments.get("ignore_index", -100))
        elif schema.name == "aten.mul.Tensor" and self._row_losses:
            for name, weights in (("self", args[1]), ("other", args[0])):
                self._look_at_weights(arguments.get(name), weights)
        for name, value in zip(schema.arguments, args, strict=False):
            self._look_at_numbers(schema.name, arguments.get(name), value)

    def look_at_results(self, schema: OperatorSchema, seen: tuple[Tensor, ...], result: Any) -> None:
        """Looks at what an op has written."""
        if schema.name in LOSSES and seen and seen[0].shape:
            self._row_losses.add(seen[0].storage)
        if (
            not self._reads
            or schema.name not in ONE_HOT_MAKERS
            or len(seen) != 1
            or not isinstance(result, torch.Tensor)
        ):
            return
        if result.dim() > 1 and result.is_contiguous():
            self._look_at_matrix(schema.name, seen[0], result.view(-1, result.shape[-1]))

    def _look_at_sequences(self, name: str, seen: Any, batch: Any) -> None:
        if name == "aten.index.Tensor":  # a table, indexed by a tensor of ids
            indices = [pair for pair in zip(seen, batch, strict=True) if pair[0] is not None]
            seen, batch = indices[0] if len(indices) == 1 else (None, None)
        if not isinstance(seen, Tensor) or seen.storage in self._padding or not _may_be_padded(name, batch):
            return
        key = name, seen.shape
        if self._vain.get(key, 0) >= VAIN_LOOKS:
            return
        padding = padding_of(batch, frames_last=name == "aten.convolution.default")
        if padding is None:
            self._vain[key] = self._vain.get(key, 0) + 1
            if name.startswith("aten.view"):
                return  # its reader may see more of it
        self._padding[seen.storage] = padding

    def _look_at_mask(self, seen: Any, mask: Any) -> None:
        if isinstance(seen, Tensor) and seen.storage not in self._causal and _is_readable(mask):
            self._causal[seen.storage] = mask.numel() <= MAX_MASK_ELEMENTS and is_causal(mask)

    def _look_at_keys(self, name: str, index: int, keys: Any, mask: torch.Tensor, hidden_score: float) -> None:
        """Looks for keys that a mask, or scores to which one was added, hides from all queries."""
        look = f"{name} keys", tuple(mask.shape)
        if not _is_readable(mask) or mask.dim() < 2 or self._vain.get(look, 0) >= VAIN_LOOKS or in_compiled_code():
            return
        if isinstance(keys, Tensor) and keys.shape[-2] != mask.shape[-1]:
            return
        visible = visible_keys_of(mask, hidden_score)
        if visible is not None:
            self.visible_keys[index] = visible
        else:
            self._vain[look] = self._vain.get(look, 0) + 1

    def _look_at_target(self, seen: Any, target: Any, ignored: Any) -> None:
        if isinstance(seen, Tensor) and seen.elements and seen.storage not in self._counted and _is_readable(target):
            self._counted[seen.storage] = float((target != ignored).double().mean())

    def _look_at_weights(self, losses: Any, weights: Any) -> None:
        if not isinstance(losses, Tensor) or losses.storage not in self._row_losses or losses.storage in self._counted:
            return
        if isinstance(weights, torch.Tensor) and weights.numel() == losses.elements and _is_readable(weights):
            self._counted[losses.storage] = float((weights != 0).double().mean())

    def _look_at_matrix(self, name: str, seen: Any, matrix: Any) -> None:
        if not isinstance(seen, Tensor) or seen.elements < MIN_MATRIX_ELEMENTS or seen.storage in self._nonzeros:
            return
        kind: StorageKind = self._storages.kind(seen.storage)
        key = name, seen.shape
        if kind == "parameter" or not _is_readable(matrix) or self._vain.get(key, 0) >= VAIN_LOOKS:
            return
        nonzeros = nonzeros_of(matrix)
        self._nonzeros[seen.storage] = nonzeros
        if nonzeros.share > Nonzeros.MOST:
            self._vain[key] = self._vain.get(key, 0) + 1

    def _look_at_numbers(self, name: str, seen: Any, numbers: Any) -> None:
        if not isinstance(seen, Tensor) or seen.elements < MIN_MATRIX_ELEMENTS or seen.storage in self._subnormals:
            return
        key = f"{name} numbers", seen.shape
        if numbers.device.type != "cpu" or not _is_readable(numbers) or numbers.dtype not in _SLOW_SUBNORMALS:
            return
        if self._vain.get(key, 0) >= VAIN_LOOKS:
            return
        share = self._subnormals[seen.storage] = subnormal_share(numbers)
        if not share:
            self._vain[key] = self._vain.get(key, 0) + 1


_SLOW_SUBNORMALS = frozenset({torch.float32, torch.float64})


def subnormal_share(numbers: torch.Tensor) -> float:
    """The share of a sample of floating-point numbers that is too small to be normal, and not zero.

    >>> subnormal_share(torch.tensor([1.0, 0.0, 1e-40, -1e-42]))
    0.5
    """
    with torch.no_grad():
        rows = numbers if numbers.is_contiguous() else numbers[:: max(1, len(numbers) // SAMPLED_ROWS)].contiguous()
        apart = rows.numel() // SAMPLED_NUMBERS | 1  # odd, so that it is not always the same column of a power of 2
        sizes = rows.view(-1)[::apart].abs()
        return float(((sizes > 0) & (sizes < torch.finfo(sizes.dtype).tiny)).double().mean())


def is_causal(mask: torch.Tensor) -> bool:
    """Whether a mask of attention lets each token attend to itself and all before it, and is one for the whole batch.

    >>> is_causal(torch.ones(3, 3).tril().bool()), is_causal(torch.full((1, 1, 3, 3), -torch.inf).triu(1))
    (True, True)
    >>> is_causal(torch.ones(3, 3)), is_causal(torch.ones(3, 3).tril().bool().repeat(2, 1, 1))
    (False, False)
    """
    *batch, queries, keys = (1, 1, *mask.shape)
    if queries != keys or queries < 2:
        return False
    strides = (0, 0, *mask.stride())
    if any(size > 1 and stride for size, stride in zip(batch, strides, strict=False)):
        return False
    with torch.no_grad():
        matrix = mask[(0,) * (mask.dim() - 2)]
        seen = matrix if matrix.dtype is torch.bool else matrix == 0
        if matrix.dtype is not torch.bool and not bool(((matrix <= MASKED_SCORE) | seen).all()):
            return False
        return torch.equal(seen, torch.ones_like(seen).tril())


def visible_keys_of(mask: torch.Tensor, hidden_score: float = MASKED_SCORE) -> VisibleKeys | None:
    """The keys that a mask shows to any query; None if it hides few at either end, or all of them.

    A mask of bools shows the keys at which it is True; others are added to scores, and hide keys at which they are at
    most `hidden_score`. A sample of the rows tells first whether all have to be looked at.

    >>> mask = torch.zeros(2, 1, 4, 128, dtype=torch.bool)
    >>> mask[0, ..., 8:20], mask[1, ..., 16:32] = True, True
    >>> visible_keys_of(mask)
    VisibleKeys(keys=128, first=8, end=32)
    >>> visible_keys_of(torch.ones(128, 128, dtype=torch.bool).tril())
    """
    keys = mask.shape[-1]
    if keys < MIN_KEYS or mask.numel() == 0 or mask.stride(-1) == 0:
        return None
    with torch.no_grad():
        rows = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
        sample = _sampled_rows(rows)
        visible = None
        for part in (sample, rows) if sample.numel() < rows.numel() else (rows,):
            if part.numel() > MAX_MASK_ELEMENTS:
                return None
            highest = part.amax(dim=tuple(range(part.dim() - 1)))
            shown = (highest if part.dtype is torch.bool else ~(highest <= hidden_score)).nonzero()
            if not len(shown):
                return None
            first, last = shown[[0, -1], 0].tolist()
            visible = VisibleKeys(keys=keys, first=first, end=last + 1)
            if visible.hidden_share < MIN_HIDDEN_SHARE:
                return None
        return visible


def _sampled_rows(rows: torch.Tensor) -> torch.Tensor:
    """Some rows of a mask that lie evenly in it. The last one is among them, from which a causal mask hides nothing."""
    left = SAMPLED_ROWS
    steps: list[int] = []
    for size in rows.shape[:-1]:  # a batch, heads, queries
        most = max(1, min(left, 8 if len(steps) < rows.dim() - 2 else left))
        steps.append(-(-size // most))
        left //= -(-size // steps[-1])
    return rows[tuple(slice((size - 1) % step, None, step) for size, step in zip(rows.shape, steps, strict=False))]


def _is_softmax_over_keys(scores: Any, dim: Any) -> bool:
    """Whether a softmax may be that of attention: for each query of several batches or heads, over the last size."""
    return (
        isinstance(scores, torch.Tensor)
        and scores.is_floating_point()
        and scores.dim() > 2
        and dim in (-1, scores.dim() - 1)
        and torch._C._current_graph_task_id() == -1
    )


def nonzeros_of(matrix: torch.Tensor) -> Nonzeros:
    """The elements of a matrix, or of a batch of matrices, that are not zero, by rows that lie evenly in it.

    >>> nonzeros_of(torch.eye(4))
    Nonzeros(share=0.25, per_row=1.0, most_in_row=1, ones=True)
    """
    with torch.no_grad():
        rows = matrix
        if rows.dim() == 3:  # some matrices, some rows of each
            rows = rows[:: max(1, len(rows) // 8)]
            rows = rows[:, :: max(1, rows.shape[0] * rows.shape[1] // SAMPLED_ROWS)].flatten(0, 1)
        else:
            rows = rows[:: max(1, len(rows) // SAMPLED_ROWS)]
        present = rows != 0
        in_rows = present.sum(dim=1)
        count, most, ones = torch.stack([in_rows.sum(), in_rows.amax(), (rows == 1).sum()]).tolist()
    return Nonzeros(
        share=count / rows.numel(), per_row=count / len(rows), most_in_row=int(most), ones=bool(ones == count)
    )


_IDS = frozenset({torch.int32, torch.int64})
_NUMBERS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether torch compares and counts the elements of a tensor, whatever device it is on."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.dtype in (torch.bool, *_IDS, *_NUMBERS)
        and tensor.device.type != "meta"
    )


def _may_be_padded(name: str, batch: Any) -> bool:
    if not isinstance(batch, torch.Tensor) or not _is_readable(batch):
        return False
    if batch.dim() < 2 or batch.numel() > MAX_BATCH_ELEMENTS:
        return False
    if batch.dtype in _IDS:
        return name in _ID_READERS
    return batch.dtype in _NUMBERS and (batch.dim() == 3 or (batch.dim() == 4 and name == "aten.convolution.default"))


def padding_of(batch: torch.Tensor, *, frames_last: bool = False) -> Padding | None:
    """The padding of a batch of sequences; None if there is little of it, or it cannot be told.

    A batch of ids is (rows, length), or that with further dimensions before; one of frames is (rows, length, features)
    or (length, rows, features); `frames_last`, it is (rows, features, length). Padding is one value at the end of rows,
    or at their start, that hardly occurs elsewhere in them; frames are padded with zeros.

    >>> padding = padding_of(torch.tensor([[5, 7, 9, 4] * 4, [3, 8] + [0] * 14]))
    >>> padding.length, padding.lengths
    (16, (2, 16))
    """
    with torch.no_grad():
        if not batch.is_floating_point():
            ids = batch.reshape(-1, batch.shape[-1]).cpu()
            if ids.shape[1] < MIN_SEQUENCE_LENGTH or len(ids) < 2:
                return None
            edges = (ids == ids[:, column].mode().values for column in (-1, 0))
            return _longer_padding([_padding(empty, batch.stride(-1)) for empty in edges])
        if frames_last:
            return _padding((batch == 0).flatten(1, -2).all(dim=1).cpu(), batch.stride(-1))
        empty = (batch == 0).all(dim=-1).cpu()
        return _longer_padding([_padding(empty, batch.stride(1)), _padding(empty.T, batch.stride(0))])


def _longer_padding(candidates: list[Padding | None]) -> Padding | None:
    known = [padding for padding in candidates if padding is not None]
    return min(known, key=lambda padding: padding.mean / padding.length, default=None)


def _padding(empty: torch.Tensor, stride: int) -> Padding | None:
    """From where elements are the value that may be padding (rows, length)."""
    rows, length = empty.shape
    if length < MIN_SEQUENCE_LENGTH or rows < 2:
        return None
    for mask in (empty, empty.flip(1)):  # at the end of rows, at their start
        places = torch.arange(1, length + 1)
        lengths = ((~mask) * places).amax(dim=1)
        filled = int(lengths.sum())
        inside = int(mask.sum()) - (rows * length - filled)
        padded = 1 - filled / (rows * length)
        if (
            padded >= MIN_PADDED_SHARE
            and inside <= MAX_PADDING_INSIDE * filled
            and 2 * int((lengths == 0).sum()) < rows
        ):
            return Padding(length=length, lengths=tuple(sorted(lengths.tolist())), stride=stride)
    return None
