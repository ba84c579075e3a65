"""`ServingLayout`: how one replica of a served model is spread over GPUs.

Attention and experts share the GPUs of a pipeline stage and cut them in two ways: attention into `dp` data parallel
groups of `tp`, experts into `ep` parts of the experts, each cut `expert_tp` ways.

>>> ServingLayout(tp=1, dp=8, ep=8).gpus, ServingLayout(tp=8).expert_tp_used
(8, 8)
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from nearpeak.errors import UsageError
from nearpeak.plan.models.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLayout:
    """Degrees of parallelism of one replica."""

    tp: int = 1
    """GPUs that share each attention and each dense layer."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Attention data parallel groups in one stage: each has requests and a KV cache of its own."""
    ep: int = 1
    """Parts of the experts."""
    expert_tp: int | None = None
    """GPUs that share one expert; None: all that `ep` leaves."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{item.name}={value!r} must be a whole number of at least 1. Nearest: {item.name}=1.")
        if self.stage_gpus % self.ep:
            near = _nearest(self.ep, self.stage_gpus)
            raise UsageError(
                f"ep={self.ep} does not divide the tp x dp = {self.stage_gpus} GPUs of a stage. Nearest: ep={near}."
            )
        if self.expert_tp is not None and self.expert_tp * self.ep != self.stage_gpus:
            raise UsageError(
                f"ep x expert_tp = {self.ep * self.expert_tp} and tp x dp = {self.stage_gpus} differ, and both are the "
                f"GPUs of a stage. Nearest: expert_tp={self.stage_gpus // self.ep}."
            )

    @property
    def stage_gpus(self) -> int:
        """GPUs of one pipeline stage."""
        return self.tp * self.dp

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.stage_gpus * self.pp

    @property
    def expert_tp_used(self) -> int:
        """GPUs that share one expert."""
        return self.stage_gpus // self.ep

    def check(self, model: Model, gpus: int) -> None:
        """UsageError where this layout does not fit `model` or is larger than `gpus` GPUs."""
        if self.gpus > gpus:
            raise UsageError(
                f"tp x dp x pp = {self.gpus} is larger than the cluster of {gpus} GPUs. Nearest: gpus={self.gpus}."
            )
        if model.heads and model.heads % self.tp:
            raise UsageError(
                f"tp={self.tp} does not divide the {model.heads} heads of {model.name}. "
                f"Nearest: tp={_nearest(self.tp, model.heads)}."
            )
        if self.pp > model.layers:
            raise UsageError(
                f"pp={self.pp} is more than the {model.layers} layers of {model.name}. Nearest: pp={model.layers}."
            )
        if not model.is_moe:
            if self.ep > 1:
                raise UsageError(f"ep={self.ep}: {model.name} has no experts. Nearest: ep=1.")
            return
        if model.experts % self.ep:
            raise UsageError(
                f"ep={self.ep} does not divide the {model.experts} experts of {model.name}. "
                f"Nearest: ep={_nearest(self.ep, model.experts)}."
            )

    def __str__(self) -> str:
        parts = [f"tp {self.tp}"]
        parts += [f"{name} {value}" for name, value in (("dp", self.dp), ("ep", self.ep), ("pp", self.pp)) if value > 1]
        return ", ".join(parts)


def _nearest(value: int, number: int) -> int:
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: (abs(n - value), n))
