"""Measured serving runs: rows of a CSV file with the columns of `benchmarks/measurements/measured_inference.csv`."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nearpeak.errors import UsageError
from nearpeak.plan.models.catalogue import model
from nearpeak.plan.network.cluster import Cluster
from nearpeak.plan.serving.deployment import Deployment
from nearpeak.plan.serving.layout import ServingLayout
from nearpeak.plan.validation.measured_names import catalogue_gpu, catalogue_model

COLUMNS = ("id", "model", "gpu", "gpus", "engine", "weight_precision", "isl", "osl", "batch_or_concurrency", "tp")
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
    """One run that can be predicted: what was served, under what load, and what was seen."""

    id: str
    source: str
    """The group of rows that came from one place."""
    campaign: str
    """Finer: source, model and engine."""
    deployment: Deployment
    alternative: Deployment | None
    """The other layout that the row may mean, where it does not say how experts and attention were cut."""
    prompt: int
    output: int
    concurrency: float | None
    """Requests in flight over the whole replica; None: as many as fit."""
    single_stream: bool
    """A loop that decodes one batch, without a server around it."""
    ttft: float | None
    tpot: float | None
    decode: float | None
    tokens_per_second: float | None
    check: str
    line: int

    def quantities(self) -> tuple[tuple[Quantity, float], ...]:
        """What was measured of this run, each named; throughput only where nothing says more."""
        if self.decode is not None and self.single_stream:
            found: list[tuple[Quantity, float]] = [("decode", self.decode)]
            return tuple([*found, ("ttft", self.ttft)] if self.ttft is not None else found)
        if self.tpot is not None:
            both: list[tuple[Quantity, float]] = [("tpot", self.tpot)]
            return tuple([*both, ("ttft", self.ttft)] if self.ttft is not None else both)
        return (("throughput", self.tokens_per_second),) if self.tokens_per_second is not None else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedInference:
    """A row that cannot be predicted, and why."""

    id: str
    line: int
    reason: str


def read_inference(path: Path) -> tuple[tuple[MeasuredInference, ...], tuple[SkippedInference, ...]]:
    """The rows of `path` that can be predicted, and the others with the reason."""
    found, skipped = [], []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                present = ", ".join(reader.fieldnames or ()) or "none"
                raise UsageError(f"{path}: the column {missing[0]!r} is missing. Columns found: {present}.")
            for line, row in enumerate(reader, start=2):
                try:
                    found.append(_measured(row, line))
                except UsageError as problem:
                    skipped.append(SkippedInference(id=row["id"], line=line, reason=str(problem)))
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror}.") from None
    return tuple(found), tuple(skipped)


def _measured(row: Mapping[str, str], line: int) -> MeasuredInference:
    name = catalogue_model(row["model"])
    if name is None:
        raise UsageError(f"the model {row['model']!r} is not in the catalogue")
    gpu = catalogue_gpu(row["gpu"])
    if gpu is None:
        raise UsageError(f"the GPU {row['gpu']!r} is not in the catalogue")
    if "disaggregated" in row.get("scenario", ""):
        raise UsageError("disaggregated, and the layout of its two pools is not stated")
    if "MTP" in row.get("notes", ""):
        raise UsageError("speculative decoding, and the acceptance rate is not stated")
    engine = next((ours for theirs, ours in _ENGINES if theirs in row["engine"].lower()), None)
    if engine is None:
        raise UsageError(f"the engine {row['engine']!r} is not known")
    prompt, output = _whole(row, "isl"), _whole(row, "osl")
    layout, batch = _layout(row)
    weights = row["weight_precision"].rstrip("?") or "bf16"
    if name.startswith("gpt-oss"):
        weights = "fp4"  # there is no other checkpoint; tables print the precision of the rest
    deployment = Deployment.of(
        model(name),
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
    decode = _number(row, "decode_ms")
    return MeasuredInference(
        id=row["id"],
        source=row.get("group") or row.get("source") or "unknown",
        campaign=f"{row.get('group', '')} {name} {engine}",
        deployment=deployment,
        alternative=alternative,
        prompt=prompt,
        output=output,
        concurrency=batch,
        single_stream=single,
        ttft=_seconds(_number(row, "ttft_ms")),
        tpot=_seconds(_number(row, "tpot_ms")),
        decode=_seconds(decode if decode is not None else _number(row, "tpot_ms") if single else None),
        tokens_per_second=_number(row, "output_tok_s"),
        check=row.get("check", ""),
        line=line,
    )


def _layout(row: Mapping[str, str]) -> tuple[ServingLayout, float | None]:
    """The layout, and the requests in flight over the whole replica."""
    tp, pp = _degree(row, "tp"), _degree(row, "pp") or 1
    if tp is None:
        raise UsageError("the layout is not stated")
    dp, ep, expert_tp = _degree(row, "attn_dp"), _degree(row, "moe_ep") or 1, _degree(row, "moe_tp")
    batch = _number(row, "batch_or_concurrency")
    gpus = _degree(row, "gpus")
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
    # NVIDIA's quantised checkpoints ask for a cache of 8 bits, which TensorRT-LLM obeys; the others keep 16
    return "fp8" if engine == "trtllm" and weights in ("fp8", "fp4") else "bf16"


def _number(row: Mapping[str, str], name: str) -> float | None:
    text = row.get(name) or ""
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number") from None


def _degree(row: Mapping[str, str], name: str) -> int | None:
    value = _number(row, name)
    return None if value is None else int(value)


def _whole(row: Mapping[str, str], name: str) -> int:
    value = _number(row, name)
    if value is None or value < 1:
        raise UsageError(f"{name} is not stated")
    return int(value)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
