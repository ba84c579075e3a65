"""What one run of `benchmarks/kernels.py` measures: its sections, their cases, and sizes for a rehearsal."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kernel_jobs import DONE, Jobs

COMPILED_WAYS = ("nearpeak", "compile", "liger", "portable", "flex")
OF_THEIR_OWN = ("attention", "decoding", "attention_memory", "products", "experts", "linear_attention")
"""Sections whose cases say what has to be compiled, `steps`, and measure themselves, `rows`."""
CASES = {
    "rows": "kernel_cases:row_cases",
    "copies": "kernel_copies:copy_cases",
    "losses": "kernel_losses:loss_cases",
    "attention": "kernel_attention:attention_cases",
    "decoding": "kernel_decoding:decoding_cases",
    "attention_memory": "kernel_attention_memory:memory_cases",
    "products": "kernel_products:product_cases",
    "experts": "kernel_experts:expert_cases",
    "linear_attention": "kernel_linear_attention:linear_cases",
}
"""By section, the module and the function that makes its cases."""
Ways = dict[str, Callable[[], Any]]


class Setting:
    """What is measured, where, and what is known of it before."""

    def __init__(self, device: str = "cuda", jobs: Jobs | None = None, check: bool = True, **sizes: Any) -> None:
        self.device, self.jobs, self.check, self.sizes = device, jobs, check, sizes
        self.copy_rate = 1.0
        self.operations: set[str] | None = None

    def wants(self, operation: str) -> bool:
        return self.operations is None or operation in self.operations or operation.split()[0] in self.operations

    def cases(self, section: str) -> Iterator[Any]:
        """The cases of a section; of "losses" what makes them."""
        module, _, name = CASES[section].partition(":")
        make: Any = getattr(importlib.import_module(module), name)
        given = {section: self.sizes[section]} if section in self.sizes else {}
        return make(*given.values(), device=self.device)  # type: ignore[no-any-return]

    def allowed(self, ways: Ways, job: str, compiled: Sequence[str] = COMPILED_WAYS) -> tuple[Ways, dict[str, str]]:
        """The ways that were compiled, and why the others were not; `compiled` are those that had to be."""
        if self.jobs is None:
            return ways, {}
        failed = {}
        whole = self.jobs.outcome(job, "all")
        for name in compiled:
            outcome = whole or self.jobs.outcome(job, name)
            if name not in ways or outcome == DONE or (outcome is None and name == "nearpeak"):
                continue
            if name == "nearpeak":
                raise RuntimeError(outcome)
            failed[name] = outcome or "was not compiled in time"
        return {name: way for name, way in ways.items() if name not in failed}, failed


def rehearsal() -> dict[str, Any]:
    """Sizes at which all that is measured runs in seconds, also in Triton's interpreter: whether it runs at all."""
    from kernel_attention import AttentionSizes
    from kernel_attention_memory import MemorySizes
    from kernel_copies import CopySizes
    from kernel_decoding import DecodingSizes
    from kernel_experts import ExpertSizes
    from kernel_linear_attention import LinearSizes
    from kernel_losses import LossSizes
    from kernel_products import ProductSizes

    copies = CopySizes(side=128, tokens=6, choices=2, experts=4, hidden=32, width=8, layers=2, vocabulary=16)
    losses = LossSizes(tokens=6, hidden=16, vocabulary=96)
    return {
        "rows": [(4, 256)],
        "copies": copies,
        "losses": losses,
        "launch": {"side": 16},
        "attention": AttentionSizes(together=48, tokens=(24,), heads={16: 1}, repeats=2),
        "decoding": DecodingSizes(sequences=((1, 33), (2, 5)), heads=4, key_heads=2, dim=16),
        "attention_memory": MemorySizes(dim=16, beside_others=32, alone=64),
        "products": ProductSizes(cubes=(32, 48), gradients=32, tokens=24, features=32, hidden=40, eight=128),
        "experts": ExpertSizes(experts=4, tokens=10, choices=2, columns=64, inner=32, routings=("even", "uniform")),
        "linear_attention": LinearSizes(together=16, tokens=(8, 16), heads=1, dim=16),
    }
