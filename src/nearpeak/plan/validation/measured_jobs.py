"""Rows of training tables as jobs: what a table leaves out is filled in here, the same way for every source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nearpeak.errors import UsageError
from nearpeak.plan.models.catalogue import model as catalogued
from nearpeak.plan.models.model import Model
from nearpeak.plan.training.job import PRECISIONS, Job, Precision, Software
from nearpeak.plan.training.layout import Layout, Sharding
from nearpeak.plan.training.memory import memory
from nearpeak.plan.validation.measured_names import catalogue_model

MODELS = {
    "llama3-8b": "llama-3-8b", "llama3-70b": "llama-3-70b", "llama3.1-405b": "llama-3.1-405b",
    "grok1-314b": "grok-1", "grok1": "grok-1", "llama4-maverick-400b": "llama-4-maverick",
    "nemotron4-15b": "nemotron-4-15b", "nemotron4-340b": "nemotron-4-340b", "nemotron-3.5-lightning": "nemotron-3-nano",
    "llama2-7b": "llama-2-7b", "llama2-13b": "llama-2-13b", "llama2-70b": "llama-2-70b",
}  # fmt: skip
"""Names of tables that differ from those of the catalogue."""
NANOTRON = {
    1.34: (16, 2048, 8192, 32),
    3.57: (28, 3072, 8192, 24),
    8.86: (32, 4096, 14336, 32),
    80.0: (80, 8192, 28672, 64),
}
"""Layers, hidden, intermediate and heads of nanotron's models: those of Llama 3 with as many key heads as heads and a
vocabulary of 131072, which give the printed number of weights to the last digit."""
UNFUSED = 2022.9
"""Until when training software wrote out the scores of attention, and hid no communication."""
RECOMPUTE = {
    "full": ("layer",), "selective": ("attention",), "core_attn": ("attention",), "mla_up_proj": ("mla_up",),
    "mlp": ("feed",), "moe_act": ("feed_activation",), "layernorm": ("norm",), "moe": ("experts",),
}  # fmt: skip


def job_of(row: Mapping[str, str], capacity: float) -> Job:
    """The job that a row describes, on GPUs of `capacity` bytes."""
    gpus, sequence, batch = whole(row, "gpus"), whole(row, "seq_len"), whole(row, "gbs_seqs")
    model = _model(row, sequence)
    job = Job(
        model=model,
        layout=_layout(row, model, gpus, batch),
        sequence=sequence,
        precision=_precision(row),
        software=_software(row),
        year=_year(row),
        dropless="tokendrop" not in row.get("extras", "").split(";")[0],
        trainable=0.005 if "lora" in row["model"] else 1.0,
    )
    if job.layout.sharding == "zero1" and job.layout.pp == 1 and job.layout.dp > 1:
        least = job.with_layout(replace(job.layout, recompute=("layer",)))
        if memory(least).allocated > capacity:  # the recipe shards weights too, and the table does not say so
            job = job.with_layout(replace(job.layout, sharding="zero3", shard_group=0))
    unsaid = row.get("recompute", "").startswith("not stated") and not job.layout.recompute
    if unsaid and not row["gpu"].startswith("GB"):  # where Grace can hold activations
        job = _that_fits(job, capacity)
    return job


def _that_fits(job: Job, capacity: float) -> Job:
    """The job with as little recomputation as makes it fit, where the source does not say what was recomputed."""
    steps: tuple[tuple[str, ...], ...] = (
        (),
        ("norm", "feed_activation", "mla_up"),
        ("norm", "mla_up", "experts", "feed"),
    )
    for modules in steps:
        tried = job.with_layout(replace(job.layout, recompute=modules))
        if memory(tried).allocated < 1.05 * capacity:
            return tried
    return job.with_layout(replace(job.layout, recompute=("layer",)))


def number(row: Mapping[str, str], field: str) -> float | None:
    text = (row.get(field) or "").strip()
    return float(text) if text else None


def whole(row: Mapping[str, str], field: str, default: int | None = None) -> int:
    value = number(row, field)
    if value is None:
        if default is None:
            raise UsageError(f"`{field}` is not given")
        return default
    return int(value)


def _model(row: Mapping[str, str], sequence: int) -> Model:
    name = row["model"].split("+")[0]
    proxy = re.fullmatch(r"(.+) proxy (\d+)L", name)
    base = proxy.group(1) if proxy else name
    known = MODELS.get(base, base)
    if base.startswith("llama-like"):
        layers, hidden, inner, heads = NANOTRON[float(row["params_b"])]
        return _by_hand(name, layers, hidden, inner, heads, heads, hidden // heads, 131072, tied=hidden < 4096)
    named = catalogue_model(known)
    model = catalogued(named) if named else None
    if base.startswith(("mpt", "gpt-")) and number(row, "hidden"):
        model = None  # the tables print their own dimensions
    if model is None or model.name.startswith("gpt-3"):
        return _from_columns(row, sequence)
    return model.with_layers(int(proxy.group(2))) if proxy else model


def _from_columns(row: Mapping[str, str], sequence: int) -> Model:
    """A model by the dimensions of its row: gated and tied or not, whichever gives the printed number of weights."""
    hidden, layers, heads = whole(row, "hidden"), whole(row, "layers"), whole(row, "heads")
    inner = whole(row, "ffn", 4 * hidden)
    plain = inner == 4 * hidden
    experts: dict[str, Any] = {}
    if whole(row, "experts", 0):
        experts = {
            "experts": whole(row, "experts"),
            "active_experts": whole(row, "topk"),
            "expert_intermediate": whole(row, "moe_ffn", inner),
        }

    def built(gated: bool, tied: bool) -> Model:
        return _by_hand(
            row["model"],
            layers,
            hidden,
            inner,
            heads,
            whole(row, "kv_heads", heads),
            whole(row, "head_dim", hidden // heads),
            whole(row, "vocab"),
            gated=gated,
            positions=0 if gated else sequence,
            tied=tied,
            **experts,
        )

    printed = number(row, "params_b")
    if printed is None or plain:
        return built(not plain, plain)
    every = [built(gated, tied) for gated in (True, False) for tied in (False, True)]
    return min(every, key=lambda model: abs(model.parameters - 1e9 * printed))


def _by_hand(
    name: str, layers: int, hidden: int, inner: int, heads: int, kv: int, width: int, vocabulary: int, **more: Any
) -> Model:
    return Model(
        name=name,
        mixers="A" * layers,
        feeds=("E" if more.get("experts") else "D") * layers,
        hidden=hidden,
        intermediate=inner,
        heads=heads,
        kv_heads=kv,
        head_dim=width,
        vocabulary=vocabulary,
        **more,
    )


def _layout(row: Mapping[str, str], model: Model, gpus: int, batch: int) -> Layout:
    framework, sharding = row.get("framework", ""), row.get("sharding", "")
    tp, pp, cp = whole(row, "tp", 1), whole(row, "pp", 1), whole(row, "cp", 1)
    ep = whole(row, "ep", 1) if model.is_moe else 1
    virtual = whole(row, "vp", 1) if pp > 1 else 1
    dp = gpus // (tp * pp * cp)
    microbatch = whole(row, "mbs_seqs", 0) or (4 if pp == 1 and batch // dp % 4 == 0 else 1)
    old = _year(row) < UNFUSED
    if not row.get("vp") and pp > 1 and ("interleaved" in row.get("extras", "") or "2024-07" in framework):
        per_stage = model.layers // pp if model.layers % pp == 0 else 1
        virtual = min((n for n in range(2, per_stage + 1) if per_stage % n == 0), key=lambda n: abs(n - 4), default=1)
    pieces = batch // (dp * microbatch)
    # recipes count the embedding and the loss as layers, so that 126 make 8 pieces of 16 stages
    virtual = 1 if pieces % pp else min(virtual, max(1, model.layers // pp))
    kind: Sharding
    fsdp = re.search(r"FSDP=(\d+)", sharding)
    group = 0
    if fsdp:
        kind, group = "hsdp", int(fsdp.group(1))
    elif sharding.startswith(("FULL_SHARD", "ZeRO-3", "Megatron-FSDP", "FSDP")):
        kind = "zero3"
    elif sharding.startswith(("SHARD_GRAD_OP", "ZeRO-2")):
        kind = "zero2"
    elif sharding in ("DDP", "ZeRO-0"):
        kind = "none"
    else:
        kind = "zero1"
        part = re.search(r"ZeRO-1\D+(\d+)", sharding)  # sharded inside groups of so many ranks
        group = int(part.group(1)) if part and dp % int(part.group(1)) == 0 else 0
    split = balanced(model, pp) if "nanotron" in framework and pp > 1 else ()
    extras = row.get("extras", "")
    modules = tuple(
        module for part in row.get("recompute", "").split("+") for module in RECOMPUTE.get(part.strip(), ())
    )
    if old and not modules:
        modules = ("layer",)
    # recipes hide the exchange of tokens where it crosses nodes
    crosses = ep > (72 if row["gpu"].startswith("GB") else 8) and "Megatron-Bridge" in framework
    overlapped = "EP overlap" in extras and "no EP overlap" not in extras and "overlap off" not in extras
    return Layout(
        gpus=gpus,
        global_batch=batch,
        microbatch=microbatch,
        tp=tp,
        sequence_parallel=not old or "selective" in row.get("recompute", ""),
        cp=cp,
        pp=pp,
        virtual=1 if split else virtual,
        split=split,
        ep=ep,
        etp=whole(row, "etp", tp if model.is_moe and ep * tp <= gpus // pp and framework == "NeMo" else 1)
        if model.is_moe
        else 1,
        sharding=kind,
        shard_group=group,
        recompute=modules,
        overlap_gradients=not old and not ("nanotron" in framework and kind == "zero1"),
        overlap_tensor=tp > 1 and not old and "nanotron" not in framework,
        overlap_experts=overlapped or (crosses and not extras.startswith(("HybridEP", "no EP", "alltoall"))),
        overlap_pipeline=not old,
        scatter_pipeline="DeepSpeed" not in framework,
    )


def balanced(model: Model, pp: int) -> tuple[int, ...]:
    """Layers of each stage as nanotron spreads them: by weights of products, where the output layer counts.

    A stage takes layers until it has passed its share, so that the first ones have more, and the last one few.
    """
    layer = 4 * model.heads * model.head_dim * model.hidden + 3 * model.intermediate * model.hidden
    total = model.layers * layer + model.hidden * model.vocabulary
    found = [0] * pp
    stage = 0
    for index in range(model.layers):
        found[stage] += 1
        if (index + 1) * layer * pp > total * (stage + 1):
            stage += 1
    return tuple(found)


def _precision(row: Mapping[str, str]) -> Precision:
    text, sharding = row.get("precision", "").lower(), row.get("sharding", "")
    if "fp4" in text:
        return PRECISIONS["fp4"]
    if "mx" in text or "see notes" in text:
        return PRECISIONS["mxfp8"]
    wide = "nanotron" in row.get("framework", "") or "/DEFAULT" in sharding
    # assumed: its recipes keep the moments in 16 bits; those for fine-tuning say that they do not
    low = "Megatron-Bridge (2026)" in row.get("framework", "") and "sft" not in row["model"]
    if "fp8" in text:
        return PRECISIONS["fp8-low-moments" if low else "fp8-fp32-grads" if wide else "fp8"]
    if low:
        return PRECISIONS["bf16-low-moments"]
    if "fp16" in text or text == "mixed":
        return PRECISIONS["fp16-fp32-grads"]
    return PRECISIONS["bf16-fp32-grads" if wide else "bf16-master"]


def _software(row: Mapping[str, str]) -> Software:
    framework, said = row.get("framework", "").lower(), f"{row.get('framework', '')} {row.get('extras', '')}".lower()
    if "llm-foundry" in framework or "nanotron" in framework:
        return "eager"
    if _year(row) < UNFUSED:
        return "unfused"
    native = any(word in framework for word in ("torchtitan", "fsdp", "deepspeed", "transformers", "accelerate"))
    return "eager" if native and "compile" not in said else "fused"


def _year(row: Mapping[str, str]) -> float:
    """When software came out: by the release that a row names, else by the paper that it comes from.

    "Megatron-Bridge 26.04.01" is 2026.33, "arXiv 2104.04473" 2021.33.
    """
    framework = row.get("framework", "")
    found = re.search(r"\b(2\d)\.(\d\d)\b", framework)
    if found:
        return 2000 + int(found.group(1)) + int(found.group(2)) / 12
    found = re.search(r"\((20\d\d)", framework)
    if found:
        return float(found.group(1)) + 0.5
    found = re.search(r"\b(2\d)(0[1-9]|1[0-2])\.\d{5}\b", f"{row['source']} {row.get('source_path', '')}")
    if found:
        return 2000 + int(found.group(1)) + int(found.group(2)) / 12
    return {"NeMo": 2025.3, "MaxText": 2025.3, "llm-foundry/Composer FSDP": 2023.7}.get(framework, 2024.5)
