"""`TrainingTime`: one training step as parts that sum to it, with what hides behind them, and rates."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = (
    "products", "attention", "memory-bound", "casts", "recompute", "launches", "tensor", "context", "experts",
    "pipeline", "bubble", "data", "optimizer", "step", "stragglers",
)  # fmt: skip
"""Names of the parts of a step, in the order in which they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTime:
    """One step: its parts sum to `seconds`; `hidden` is communication that passes behind them."""

    seconds: float
    parts: dict[str, float]
    hidden: dict[str, float]
    tokens: int
    gpus: int
    model_flops: float
    """Of the step, all GPUs: three times the forward pass, attention counted under its mask."""
    hardware_flops: float
    """With what is computed again."""
    peak: float
    """FLOP/s of one GPU in the precision of the products, by the datasheet."""

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of one GPU."""
        return self.tokens_per_second / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: of the peak in the precision of the products; causal attention counts half."""
        return self.model_flops / (self.seconds * self.gpus * self.peak)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: recomputation counts."""
        return self.hardware_flops / (self.seconds * self.gpus * self.peak)
