"""Section "losses" of `benchmarks.kernels`: forward and backward pass together, and memory.

Every implementation computes the gradients. Logits that are overwritten in place are restored before each call,
untimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels import cases
from benchmarks.kernels.cases import liger, random_tensor
from nearpeak import kernels

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSizes:
    """Of logits, and of the hidden states that they are made of."""

    tokens: int = 8192
    hidden: int = 4096
    vocabulary: int = 128256


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCase:
    """A loss at one size, with its inputs."""

    operation: str
    tokens: int
    vocabulary: int
    ways: dict[str, Call]
    exact: Callable[[], Sequence[Tensor]]
    """Some rows of the gradients in float32 or float64."""
    looked_at: Callable[[Any], Sequence[Tensor]]
    """The same rows of what a way returns."""
    resets: dict[str, Call] = field(default_factory=dict)
    given_bytes: int = 0
    """What must be there beside the inputs whatever the way: gradients that are no input."""
    bar_seconds: float | None = None


def loss_cases(sizes: LossSizes | None = None, device: str = "cuda") -> Iterator[Callable[[], LossCase]]:
    """What makes the cases: they are large, and made one by one."""
    sizes = sizes or LossSizes()
    yield lambda: cross_entropy_case(sizes, device)
    yield lambda: linear_cross_entropy_case(sizes, device)


def cross_entropy_case(sizes: LossSizes, device: str, dtype: torch.dtype = torch.bfloat16) -> LossCase:
    tokens, vocabulary = sizes.tokens, sizes.vocabulary
    kept = random_tensor(tokens, vocabulary, device=device, dtype=dtype, grad=False)
    logits = _Made.apply(torch.ones((), requires_grad=True), kept)  # type: ignore[no-untyped-call]
    leaf = kept.detach().requires_grad_()  # for those that only read
    target = torch.randint(vocabulary, (tokens,), device=device)

    def both(loss: Callable[[Tensor, Tensor], Tensor], on: Tensor) -> Call:
        return lambda: torch.autograd.grad(loss(on, target), on)

    @torch.no_grad()
    def reset() -> None:
        logits.detach().copy_(kept)

    places = _some(tokens, device)
    compiled = torch.compile(functional.cross_entropy, dynamic=False, fullgraph=True, backend=cases.BACKEND)
    ways = {
        "nearpeak": both(lambda x, t: kernels.cross_entropy(x, t, inplace=True), logits),
        "eager": both(functional.cross_entropy, leaf),
        "compile": both(compiled, leaf),
    }
    resets = {"nearpeak": reset}
    function = liger("cross_entropy")
    if function is not None:
        ways["liger"] = both(function, logits)
        resets["liger"] = reset
    return LossCase(
        operation="cross_entropy",
        tokens=tokens,
        vocabulary=vocabulary,
        ways=ways,
        resets=resets,
        exact=lambda: [_logits_gradient(kept[places].double(), target[places], tokens)],
        looked_at=lambda gradients: [gradients[0][places]],
        bar_seconds=1.65e-3,
    )


def linear_cross_entropy_case(sizes: LossSizes, device: str) -> LossCase:
    tokens, width, vocabulary = sizes.tokens, sizes.hidden, sizes.vocabulary
    hidden = random_tensor(tokens, width, device=device)
    weight = (random_tensor(vocabulary, width, device=device, grad=False) / width**0.5).requires_grad_()
    target = torch.randint(vocabulary, (tokens,), device=device)

    def both(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Call:
        return lambda: torch.autograd.grad(loss(hidden, weight, target), (hidden, weight))

    products = _Products(hidden.detach(), weight.detach())
    ways: dict[str, Call] = {
        "nearpeak": both(lambda h, w, t: kernels.linear_cross_entropy(h, w, t)),
        "eager": both(lambda h, w, t: functional.cross_entropy(functional.linear(h, w), t)),
        "three products": products,
    }
    function = liger("linear_cross_entropy")
    if function is not None:
        ways["liger"] = both(function)
    return LossCase(
        operation="linear_cross_entropy",
        tokens=tokens,
        vocabulary=vocabulary,
        ways=ways,
        resets={"three products": products.prepare},
        exact=lambda: _exact_gradients(hidden.detach(), weight.detach(), target),
        looked_at=lambda gradients: [gradients[0][_some(tokens, device)], gradients[1][_some(vocabulary, device)]],
        given_bytes=2 * (tokens + vocabulary) * width,
    )


CHECKED_ROWS, CHUNK_TOKENS = 64, 1024


def _some(rows: int, device: str) -> Tensor:
    """Places from the first row to the last."""
    return torch.linspace(0, rows - 1, min(CHECKED_ROWS, rows), device=device).long()


def _logits_gradient(logits: Tensor, target: Tensor, tokens: int) -> Tensor:
    """Of the mean loss of so many tokens, by the logits of some."""
    shares = torch.softmax(logits, -1)
    shares[torch.arange(len(target), device=target.device), target] -= 1.0
    return shares / tokens


def _exact_gradients(hidden: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    """Of some tokens by their hidden states, and of all tokens by some rows of the weight, in float32."""
    tokens, (vocabulary, width) = len(hidden), weight.shape
    wide, matrix = _some(tokens, str(hidden.device)), weight.float()
    by_hidden = _logits_gradient(hidden[wide].float() @ matrix.t(), target[wide], tokens) @ matrix
    classes = _some(vocabulary, str(hidden.device))
    by_weight = matrix.new_zeros(len(classes), width)
    for start in range(0, tokens, CHUNK_TOKENS):
        rows = hidden[start : start + CHUNK_TOKENS].float()
        gradient = _logits_gradient(rows @ matrix.t(), target[start : start + CHUNK_TOKENS], tokens)
        by_weight += gradient[:, classes].t() @ rows
    return [by_hidden, by_weight]


class _Made(torch.autograd.Function):
    """Logits that are the result of something, as those of a model: a way may overwrite them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class _Products:
    """The matrix products that the layer and its gradients need, into tensors that are there."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self.hidden, self.weight = hidden, weight
        self.results: tuple[Tensor, Tensor, Tensor] | None = None

    def prepare(self) -> None:
        if self.results is None:
            logits = self.hidden.new_empty(len(self.hidden), len(self.weight))
            self.results = logits, torch.empty_like(self.hidden), torch.empty_like(self.weight)

    def __call__(self) -> None:
        self.prepare()
        assert self.results is not None
        logits, by_hidden, by_weight = self.results
        torch.mm(self.hidden, self.weight.t(), out=logits)
        torch.mm(logits, self.weight, out=by_hidden)
        torch.mm(logits.t(), self.hidden, out=by_weight)
