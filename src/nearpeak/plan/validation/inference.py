"""Published serving runs as deployments under a load, and predictions for them.

Rows come from a CSV file with the columns of `benchmarks/measurements/measured_inference.csv`. With `leave_out`, the
rows of a source are predicted by constants that were fitted without any row of that source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nearpeak._files import read_csv
from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.provenance import Provenance
from nearpeak.plan.serving.constants import ServingConstants, load_serving_constants
from nearpeak.plan.serving.deployment import Deployment, ServingLayout
from nearpeak.plan.serving.plan import Load
from nearpeak.plan.serving.serve import most_throughput, serve
from nearpeak.plan.serving.simulate import simulate
from nearpeak.plan.serving.step import experts_hit, step_time
from nearpeak.plan.validation.errors import SkippedRow
from nearpeak.plan.validation.names import gpu_id, model_id
from nearpeak.plan.validation.training import read_number

INFERENCE_COLUMNS = (
    "id",
    "model",
    "gpu",
    "gpus",
    "engine",
    "weight_precision",
    "isl",
    "osl",
    "batch_or_concurrency",
    "tp",
)
Quantity = Literal["decode", "tpot", "ttft", "throughput"]
_ENGINES = (
    ("gpt-fast", "gpt-fast"),
    ("fastertransformer", "gpt-fast"),
    ("tensorrt", "trtllm"),
    ("trt", "trtllm"),
    ("vllm", "vllm"),
    ("sglang", "sglang"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredInference:
    """One run that can be predicted: the deployment, the load, and the measurements."""

    id: str
    source: str
    """The publication."""
    campaign: str
    """Source, model and engine."""
    deployment: Deployment
    alternative: Deployment | None
    """A second layout that the row may mean, where it does not say how experts and attention are split."""
    prompt: int
    output: int
    concurrency: float | None
    """Requests in flight in the replica; None: as many as fit."""
    single_stream: bool
    """Whether a loop decodes one batch, without a server."""
    ttft: float | None
    tpot: float | None
    decode: float | None
    tokens_per_second: float | None
    check: str
    line: int

    def quantities(self) -> tuple[tuple[Quantity, float], ...]:
        """Measured quantities by name; throughput only where there are no latencies."""
        if self.decode is not None and self.single_stream:
            quantities: list[tuple[Quantity, float]] = [("decode", self.decode)]
            return tuple([*quantities, ("ttft", self.ttft)] if self.ttft is not None else quantities)
        if self.tpot is not None:
            both: list[tuple[Quantity, float]] = [("tpot", self.tpot)]
            return tuple([*both, ("ttft", self.ttft)] if self.ttft is not None else both)
        return (("throughput", self.tokens_per_second),) if self.tokens_per_second is not None else ()


def read_inference(path: Path) -> tuple[tuple[MeasuredInference, ...], tuple[SkippedRow, ...]]:
    """The rows of `path` that can be predicted, and the others with reasons."""
    runs, skipped = [], []
    columns, rows = read_csv(path)
    missing = [name for name in INFERENCE_COLUMNS if name not in columns]
    if missing:
        raise UsageError(
            f"{path}: the column {missing[0]!r} is missing. Columns found: {', '.join(columns) or 'none'}."
        )
    for line, row in enumerate(rows, start=2):
        try:
            runs.append(_read_run(row, line))
        except (UsageError, ValueError, ArithmeticError) as problem:
            skipped.append(SkippedRow(id=row["id"], reason=str(problem)))
    return tuple(runs), tuple(skipped)


def _read_run(row: Mapping[str, str], line: int) -> MeasuredInference:
    name = model_id(row["model"])
    if name is None:
        raise UsageError(f"the model {row['model']!r} is not in the catalogue")
    gpu = gpu_id(row["gpu"])
    if gpu is None:
        raise UsageError(f"the GPU {row['gpu']!r} is not in the catalogue")
    if "disaggregated" in row.get("scenario", ""):
        raise UsageError("disaggregated, and the layout of its two pools is not stated")
    if "MTP" in row.get("notes", ""):
        raise UsageError("speculative decoding, and the acceptance rate is not stated")
    engine = next((ours for theirs, ours in _ENGINES if theirs in row["engine"].lower()), None)
    if engine is None:
        raise UsageError(f"the engine {row['engine']!r} is not known")
    prompt, output = _read_integer(row, "isl"), _read_integer(row, "osl")
    layout, batch = _read_layout(row)
    weights = row["weight_precision"].rstrip("?") or "bf16"
    if name.startswith("gpt-oss"):
        weights = "fp4"  # there is no other checkpoint; tables print the precision of the rest
    deployment = Deployment.of(
        get_model(name),
        Cluster.of(gpu, gpus=max(layout.gpus, 1)),
        layout,
        weights,
        kv=_cache_precision(row, weights, engine),
        engine=engine,
    )
    alternative = None
    if "flags not printed" in row.get("notes", "") and deployment.model.is_moe and layout.tp > 1:
        cut = ServingLayout(tp=1, dp=layout.tp, ep=layout.tp, pp=layout.pp)
        alternative = replace(deployment, layout=cut)
    single = row.get("conc_kind", "") == "batch" or row.get("scenario", "") == "single-stream decode"
    decode = read_number(row, "decode_ms")
    run = MeasuredInference(
        id=row["id"],
        source=row.get("group") or row.get("source") or "unknown",
        campaign=f"{row.get('group', '')} {name} {engine}",
        deployment=deployment,
        alternative=alternative,
        prompt=prompt,
        output=output,
        concurrency=batch,
        single_stream=single,
        ttft=_seconds(read_number(row, "ttft_ms")),
        tpot=_seconds(read_number(row, "tpot_ms")),
        decode=_seconds(decode if decode is not None else read_number(row, "tpot_ms") if single else None),
        tokens_per_second=read_number(row, "output_tok_s") or None,
        check=row.get("check", ""),
        line=line,
    )
    _require_possible(run)
    return run


def _require_possible(run: MeasuredInference) -> None:
    """UsageError for latencies that contradict each other: steps faster than the memory can read what they need.

    By Little's law the share of a request's time in which it decodes is the share of the requests that do.
    """
    theoretical = run.deployment.cluster.machine.theoretical
    if run.single_stream or run.concurrency is None or not run.ttft or not run.tpot or theoretical is None:
        return
    decoding = run.tpot * run.output
    running = run.concurrency * decoding / (run.ttft + decoding)
    model = run.deployment.model
    hit = experts_hit(model, running) / model.experts if model.is_moe else 1.0
    cache = running / run.deployment.layout.dp * run.deployment.cache_bytes(run.prompt + run.output / 2)
    least = (hit * run.deployment.weight_bytes + cache) / theoretical.bandwidth
    if run.tpot < least:
        raise UsageError(
            f"tpot_ms={1e3 * run.tpot:.1f} and ttft_ms={1e3 * run.ttft:.0f} contradict each other, at {running:.0f} "
            f"requests that decode: memory reads their weights and cache in {1e3 * least:.1f} ms at best"
        )


def _read_layout(row: Mapping[str, str]) -> tuple[ServingLayout, float | None]:
    """The layout, and the requests in flight in the replica."""
    tp, pp = _read_degree(row, "tp"), _read_degree(row, "pp") or 1
    if tp is None:
        raise UsageError("the layout is not stated")
    dp, ep, expert_tp = _read_degree(row, "attn_dp"), _read_degree(row, "moe_ep") or 1, _read_degree(row, "moe_tp")
    batch = read_number(row, "batch_or_concurrency")
    gpus = _read_degree(row, "gpus")
    kind = row.get("conc_kind", "")
    if dp is None:
        dp = 1
        label = re.search(r"_c(\d+)_", row.get("table", ""))  # the concurrency of the whole replica
        if label and batch and "attention-DP" in kind:
            dp = max(1, round(int(label.group(1)) / batch))
            if dp > 1 and tp % dp == 0:
                tp //= dp
    elif dp > 1 and tp == gpus:
        tp = max(1, tp // dp)  # such tables print the GPUs that tensor or data parallel attention takes
    if gpus is not None and tp * dp * pp != gpus:
        raise UsageError(f"tp x dp x pp = {tp * dp * pp} and gpus = {gpus} contradict each other")
    if expert_tp is not None and ep > 1 and ep * expert_tp != tp * dp:
        raise UsageError(f"moe_tp x moe_ep = {ep * expert_tp} and tp x dp = {tp * dp} contradict each other")
    total = None if batch is None else batch * dp if "per attention-DP" in kind or "per DP" in kind else batch
    return ServingLayout(tp=tp, pp=pp, dp=dp, ep=ep), total


def _cache_precision(row: Mapping[str, str], weights: str, engine: str) -> str:
    stated = row.get("kv_precision", "")
    for name in ("fp8", "bf16", "fp16"):
        if stated.startswith(name):
            return name
    # NVIDIA's quantized checkpoints ask for a cache of 8 bits, which TensorRT-LLM obeys; the others keep 16
    return "fp8" if engine == "trtllm" and weights in ("fp8", "fp4") else "bf16"


def _read_degree(row: Mapping[str, str], name: str) -> int | None:
    value = read_number(row, name)
    return None if value is None else int(value)


def _read_integer(row: Mapping[str, str], name: str) -> int:
    value = read_number(row, name)
    if value is None or value < 1:
        raise UsageError(f"{name} is not stated")
    return int(value)


def _seconds(milliseconds: float | None) -> float | None:
    return milliseconds / 1e3 if milliseconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedInference:
    """One measured quantity of one run and its prediction; tokens/s for throughput, else seconds."""

    measured: MeasuredInference
    quantity: Quantity
    actual: float
    predicted: float
    reason: str
    """The largest part of the prediction."""
    provenance: Provenance

    @property
    def error(self) -> float:
        """Relative: 0.1 is a prediction 10 % above the measurement."""
        return self.predicted / self.actual - 1


def predict_quantities(
    row: MeasuredInference, constants: ServingConstants, *, simulated: bool = False
) -> dict[Quantity, tuple[float, str, Provenance]]:
    """For each measured quantity of `row`: its prediction, the reason and the provenance.

    `simulated`: latencies of servers come from a simulation of the scheduler under a closed loop of the row's
    concurrency, as a plan has it; otherwise from formulas for a steady load.
    """
    deployment = row.deployment
    if row.single_stream:
        batch = row.concurrency or 1.0
        decode = step_time(deployment, sequences=batch, context=row.prompt + row.output / 2, constants=constants)
        quantities: dict[Quantity, tuple[float, str, Provenance]] = {
            "decode": (decode.seconds, f"a step limited by {decode.limiter}", decode.provenance)
        }
        if row.ttft is not None:
            first = step_time(
                deployment,
                sequences=0,
                prompt_tokens=batch * row.prompt,
                prompt_length=row.prompt,
                constants=constants,
            )
            quantities["ttft"] = (first.seconds, f"a prompt limited by {first.limiter}", first.provenance)
        return quantities
    if row.concurrency is None:
        deployments = [deployment] if row.alternative is None else [deployment, row.alternative]
        answers = [
            most_throughput(each, prompt=row.prompt, output=row.output, constants=constants) for each in deployments
        ]
        answer = max(answers, key=lambda answer: answer.tokens_per_second)
    else:
        answer = serve(
            deployment,
            prompt=row.prompt,
            output=row.output,
            concurrency=row.concurrency,
            offline=row.tpot is None,
            constants=constants,
        )
    if simulated and row.concurrency is not None and row.tpot is not None:
        load = Load(prompt=row.prompt, output=row.output, concurrency=row.concurrency)
        run = simulate(deployment, load.closed_loop(), constants=constants)
        queue = f"{run.queue.mean / run.ttft.mean:.0%} of it in the queue, {run.preemptions} preemptions"
        return {
            "tpot": (run.tpot.mean, f"decode limited by {answer.limiter}", run.provenance),
            "ttft": (run.ttft.mean, f"prompt limited by {answer.prefill.limiter}, {queue}", run.provenance),
            "throughput": (run.tokens_per_second, f"decode limited by {answer.limiter}", run.provenance),
        }
    waits = f", {answer.queue_seconds / answer.ttft:.0%} of it for room in the cache" if answer.queue_seconds else ""
    made = f"{answer.running:.0f} requests at once, decode limited by {answer.limiter}"
    return {
        "tpot": (answer.tpot, f"{made}, prompts in {answer.mixed_share:.0%} of the steps", answer.provenance),
        "ttft": (answer.ttft, f"prompt limited by {answer.prefill.limiter}{waits}", answer.provenance),
        "throughput": (answer.tokens_per_second, made, answer.provenance),
    }


def predict_inference(
    rows: Iterable[MeasuredInference],
    *,
    leave_out: bool = True,
    simulated: bool = False,
    constants: ServingConstants | None = None,
) -> tuple[tuple[PredictedInference, ...], tuple[SkippedRow, ...]]:
    """Every measured quantity with its prediction, and the rows that cannot run according to the planner."""
    whole = constants or load_serving_constants()
    predictions, skipped = [], []
    for row in rows:
        used = whole.leaving_out(row.source) if leave_out else whole
        try:
            answers = predict_quantities(row, used, simulated=simulated)
        except UsageError as problem:
            skipped.append(SkippedRow(id=row.id, reason=str(problem)))
            continue
        for quantity, actual in row.quantities():
            predicted, reason, provenance = answers[quantity]
            predictions.append(
                PredictedInference(
                    measured=row,
                    quantity=quantity,
                    actual=actual,
                    predicted=predicted,
                    reason=reason,
                    provenance=provenance,
                )
            )
    return tuple(predictions), tuple(skipped)
