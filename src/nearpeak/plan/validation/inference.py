"""Predictions beside measured serving runs: error by quantity, source, model, GPU and engine, and the worst rows.

With `leave_out`, the rows of a source are predicted by constants that were fitted without any row of that source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from nearpeak.errors import UsageError
from nearpeak.plan.provenance import Provenance
from nearpeak.plan.serving.constants import ServingConstants, load_serving_constants
from nearpeak.plan.serving.serve import most_throughput, serve
from nearpeak.plan.serving.step import step_time
from nearpeak.plan.validation.measured_inference import MeasuredInference, Quantity, SkippedInference

Grouping = Literal["all", "quantity", "source", "campaign", "model", "gpu", "engine", "precision", "gpus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedInference:
    """One measured quantity of one run, and what was predicted for it; tokens/s for throughput, else seconds."""

    measured: MeasuredInference
    quantity: Quantity
    actual: float
    predicted: float
    reason: str
    """What the prediction is mostly made of, for the worst rows."""
    provenance: Provenance

    @property
    def error(self) -> float:
        """Relative: 0.1 is a prediction 10 % above the measurement."""
        return self.predicted / self.actual - 1

    def group(self, by: Grouping) -> str:
        """The name of the group that this quantity belongs to."""
        row = self.measured
        names: dict[Grouping, str] = {
            "all": self.quantity,
            "quantity": self.quantity,
            "source": f"{self.quantity}, {row.source}",
            "campaign": f"{self.quantity}, {row.campaign}",
            "model": f"{self.quantity}, {row.deployment.model.name}",
            "gpu": f"{self.quantity}, {row.deployment.cluster.machine.id}",
            "engine": f"{self.quantity}, {row.deployment.engine}",
            "precision": f"{self.quantity}, {row.deployment.precision.name}",
            "gpus": f"{self.quantity}, {row.deployment.layout.gpus} GPUs",
        }
        return names[by]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceErrors:
    """Relative errors of one group."""

    name: str
    rows: int
    mean_absolute: float
    median_absolute: float
    median: float
    """Signed: above 0 where predictions are too large."""
    within_20: float
    """Share of the rows within 20 %."""


def predict_quantities(
    row: MeasuredInference, constants: ServingConstants
) -> dict[Quantity, tuple[float, str, Provenance]]:
    """Each measured quantity of `row`: its prediction, what it is made of, and where that comes from."""
    here = row.deployment
    if row.single_stream:
        batch = row.concurrency or 1.0
        decode = step_time(here, sequences=batch, context=row.prompt + row.output / 2, constants=constants)
        found: dict[Quantity, tuple[float, str, Provenance]] = {
            "decode": (decode.seconds, f"a step limited by {decode.limiter}", decode.provenance)
        }
        if row.ttft is not None:
            first = step_time(
                here,
                sequences=0,
                prompt_tokens=batch * row.prompt,
                prompt_length=row.prompt,
                constants=constants,
            )
            found["ttft"] = (first.seconds, f"a prompt limited by {first.limiter}", first.provenance)
        return found
    if row.concurrency is None:
        layouts = [here] if row.alternative is None else [here, row.alternative]
        answers = [most_throughput(one, prompt=row.prompt, output=row.output, constants=constants) for one in layouts]
        answer = max(answers, key=lambda one: one.tokens_per_second)
    else:
        answer = serve(
            here,
            prompt=row.prompt,
            output=row.output,
            concurrency=row.concurrency,
            offline=row.tpot is None,
            constants=constants,
        )
    waits = f", {answer.queue_seconds / answer.ttft:.0%} of it for room in the cache" if answer.queue_seconds else ""
    made = f"{answer.running:.0f} requests at once, decode limited by {answer.limiter}"
    return {
        "tpot": (answer.tpot, f"{made}, prompts in {answer.mixed_share:.0%} of the steps", answer.provenance),
        "ttft": (answer.ttft, f"prompt limited by {answer.prefill.limiter}{waits}", answer.provenance),
        "throughput": (answer.tokens_per_second, made, answer.provenance),
    }


def predict_inference(
    rows: Iterable[MeasuredInference], *, leave_out: bool = True, constants: ServingConstants | None = None
) -> tuple[tuple[PredictedInference, ...], tuple[SkippedInference, ...]]:
    """Every measured quantity with its prediction, and the rows that the planner says cannot run."""
    whole = constants or load_serving_constants()
    found, skipped = [], []
    for row in rows:
        used = whole.leaving_out(row.source) if leave_out else whole
        try:
            answers = predict_quantities(row, used)
        except UsageError as problem:
            skipped.append(SkippedInference(id=row.id, line=row.line, reason=str(problem)))
            continue
        for quantity, actual in row.quantities():
            predicted, reason, provenance = answers[quantity]
            found.append(
                PredictedInference(
                    measured=row,
                    quantity=quantity,
                    actual=actual,
                    predicted=predicted,
                    reason=reason,
                    provenance=provenance,
                )
            )
    return tuple(found), tuple(skipped)


def summarise_inference(predictions: Sequence[PredictedInference], by: Grouping) -> tuple[InferenceErrors, ...]:
    """Errors by group, in the order in which groups first appear."""
    groups: dict[str, list[float]] = {}
    for item in predictions:
        groups.setdefault(item.group(by), []).append(item.error)
    return tuple(
        InferenceErrors(
            name=name,
            rows=len(errors),
            mean_absolute=fmean(map(abs, errors)),
            median_absolute=median(map(abs, errors)),
            median=median(errors),
            within_20=fmean(abs(error) <= 0.2 for error in errors),
        )
        for name, errors in groups.items()
    )


def worst_inference(predictions: Sequence[PredictedInference], count: int = 10) -> tuple[PredictedInference, ...]:
    """The rows furthest off, by ratio, so that half counts as much as double."""
    return tuple(
        sorted(predictions, key=lambda item: -max(item.predicted / item.actual, item.actual / item.predicted))[:count]
    )
