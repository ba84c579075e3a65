"""Why a prompt is limited by compute and decoding by memory, and the batch at which decoding stops being so.

>>> from nearpeak.plan.models.catalogue import model
>>> from nearpeak.plan.network.cluster import Cluster
>>> from nearpeak.plan.serving.layout import ServingLayout
>>> here = Deployment.of(model("llama-3-70b"), Cluster.of("h100-sxm x 4"), ServingLayout(tp=4), "fp8")
>>> both = phases(here, prompt=4096, context=4096)
>>> both.prefill.limiter, both.decode.limiter
('compute', 'memory')
"""

from __future__ import annotations

from dataclasses import dataclass

from nearpeak.errors import UsageError
from nearpeak.plan.models.flops import forward_flops
from nearpeak.plan.serving.constants import ServingConstants, load_serving_constants
from nearpeak.plan.serving.deployment import Deployment
from nearpeak.plan.serving.kv_cache import MEMORY_SHARE, cache_room
from nearpeak.plan.serving.rates import rates
from nearpeak.plan.serving.step import StepTime, step_time

LARGEST = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase on one GPU: its work, its intensity, and what limits it."""

    name: str
    tokens: float
    """That one pass works on, in one attention data parallel group."""
    flops: float
    """Of the pass, per GPU."""
    bytes_moved: float
    """Weights, cache and activations that cross memory in the pass, per GPU."""
    ridge: float
    """FLOP per byte at which this GPU's products in this precision go over from memory to compute."""
    step: StepTime

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes_moved

    @property
    def limiter(self) -> str:
        """Memory or compute."""
        return "compute" if self.step.compute_seconds > self.step.memory_seconds else "memory"

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.tokens:.0f} tokens move {self.bytes_moved / 1e9:.1f} GB for "
            f"{self.flops / 1e12:.2f} TFLOP per GPU, {self.intensity:.0f} FLOP per byte; "
            f"the GPU needs {self.ridge:.0f} to be busy: limited by "
            f"{self.limiter}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The two phases of one deployment."""

    prefill: Phase
    decode: Phase


def phases(
    here: Deployment, *, prompt: int, context: int, batch: float = 1.0, constants: ServingConstants | None = None
) -> Phases:
    """One prompt of `prompt` tokens, and one step in which `batch` sequences of `context` tokens decode."""
    constants = constants or load_serving_constants()
    reached = rates(here, constants)
    prefill = step_time(here, sequences=0, prompt_tokens=prompt, prompt_length=prompt, constants=constants)
    decode = step_time(here, sequences=batch, context=context, constants=constants)
    ridge = reached.rest_compute / reached.rest_stream
    gpus = here.layout.tp
    return Phases(
        prefill=Phase(
            name="prefill",
            tokens=prompt,
            flops=prompt * forward_flops(here.model, prompt).total / gpus,
            bytes_moved=prefill.memory_seconds * reached.rest_stream,
            ridge=ridge,
            step=prefill,
        ),
        decode=Phase(
            name="decode",
            tokens=batch,
            flops=batch * forward_flops(here.model, 2 * context).total / gpus,  # the last token sees all keys
            bytes_moved=decode.memory_seconds * reached.rest_stream,
            ridge=ridge,
            step=decode,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalBatch:
    """The batch at which a decode step multiplies for as long as it reads."""

    batch: float | None
    """Sequences per attention data parallel group; None where reading always takes longer."""
    fits: float
    """Sequences of this context that the KV cache has room for."""
    context: int
    weights_only: float
    """The same batch if there were no KV cache to read."""

    @property
    def reached(self) -> bool:
        """Whether there is room for so many."""
        return self.batch is not None and self.batch <= self.fits

    def __str__(self) -> str:
        if self.batch is None:
            return (
                f"decode at {self.context} tokens stays limited by memory at every batch: each sequence brings its own "
                f"cache to read; without a cache it would change at {self.weights_only:.0f}"
            )
        room = "there is room for so many" if self.reached else f"the cache has room for {self.fits:.0f}"
        return f"decode at {self.context} tokens is limited by memory below {self.batch:.0f} sequences; {room}"


def critical_batch(
    here: Deployment,
    *,
    context: int,
    memory_share: float = MEMORY_SHARE,
    constants: ServingConstants | None = None,
) -> CriticalBatch:
    """The smallest batch at which a decode step at `context` tokens is no longer limited by memory."""
    if isinstance(context, bool) or not isinstance(context, int) or context < 1:
        raise UsageError(f"context={context!r} must be a whole number of at least 1. Nearest: context=1.")
    constants = constants or load_serving_constants()
    room = cache_room(here, memory_share=memory_share)
    return CriticalBatch(
        batch=_crossing(here, float(context), constants),
        fits=room.sequences(context),
        context=context,
        weights_only=_crossing(here, 0.0, constants) or float(LARGEST),
    )


def _crossing(here: Deployment, context: float, constants: ServingConstants) -> float | None:
    """By doubling and halving: compute grows with the batch, the reading of weights does not."""
    reached = rates(here, constants)

    def computes(batch: float) -> bool:
        step = step_time(here, sequences=batch, context=context, constants=constants, reached=reached)
        return step.compute_seconds >= step.memory_seconds

    high = 1.0
    while not computes(high):
        high *= 2
        if high > LARGEST:
            return None
    low = high / 2
    while high - low > max(0.5, 0.005 * high):
        middle = (low + high) / 2
        low, high = (low, middle) if computes(middle) else (middle, high)
    return high
