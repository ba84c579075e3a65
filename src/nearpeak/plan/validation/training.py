"""Published training runs as jobs on clusters, and predictions for them.

`read_training` reads a CSV file with the columns of `benchmarks/measurements/measured_training.csv`. What a table
leaves out is filled in by the same rules for every source. Step time is compared, never a printed utilization: sources
count FLOPs in different ways. Each source can be predicted with constants that were fitted on the other sources:
`benchmarks.plan.fit_training` writes these fits into `training_left_out.json`, so that validating takes a second.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from nearpeak._files import read_csv
from nearpeak.errors import UsageError
from nearpeak.machines.machine import Machine
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.models.model import MOST_LAYERS, Model
from nearpeak.plan.training.efficiency import Efficiency, load_efficiency
from nearpeak.plan.training.job import PRECISIONS, Job, Precision, Software
from nearpeak.plan.training.layout import Layout, Sharding
from nearpeak.plan.training.memory import memory, memory_by_stage
from nearpeak.plan.training.time import Planner
from nearpeak.plan.validation.errors import SkippedRow
from nearpeak.plan.validation.names import gpu_id, model_id

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
UNFUSED_UNTIL_YEAR = 2022.9
"""Until when training software materialized the scores of attention, and overlapped no communication."""
RECOMPUTE_NAMES = {
    "full": ("layer",), "selective": ("attention",), "core_attn": ("attention",), "mla_up_proj": ("mla_up",),
    "mlp": ("feed",), "moe_act": ("feed_activation",), "layernorm": ("norm",), "moe": ("experts",),
}  # fmt: skip


_SAYS_NOTHING = re.compile(r"not (stated|printed|given)|recipe|baseline|re-gather|unknown|^\s*(none|no|off|false)\b")
"""Texts of a "recompute" column that name no module."""
MemoryMeaning = Literal["allocated", "reserved", "total"]
"""What a published peak is: of torch's allocator, allocated or reserved, or of the whole device."""


def read_job(row: Mapping[str, str], capacity: float) -> Job:
    """The job of a row, on GPUs of `capacity` bytes."""
    gpus, sequence, batch = read_integer(row, "gpus"), read_integer(row, "seq_len"), read_integer(row, "gbs_seqs")
    model = _read_model(row, sequence)
    job = Job(
        model=model,
        layout=_read_layout(row, model, gpus, batch),
        sequence=sequence,
        precision=_read_precision(row),
        software=_read_software(row),
        year=_release_year(row),
        dropless="tokendrop" not in row.get("extras", "").split(";")[0],
        trainable=0.005 if "lora" in row["model"] else 1.0,
    )
    if job.layout.sharding == "zero1" and job.layout.pp == 1 and job.layout.dp > 1:
        least = job.with_layout(replace(job.layout, recompute=("layer",)))
        if memory(least).allocated > capacity:  # the recipe shards weights too, and the table does not say so
            job = job.with_layout(replace(job.layout, sharding="zero3", shard_group=0))
    unsaid = row.get("recompute", "").startswith("not stated") and not job.layout.recompute
    if unsaid and not row["gpu"].startswith("GB"):  # where Grace can hold activations
        job = _fitting_job(job, capacity)
    return job


def _fitting_job(job: Job, capacity: float) -> Job:
    """The job with the least recomputation that fits, where the source does not state it."""
    steps: tuple[tuple[str, ...], ...] = (
        (),
        ("norm", "feed_activation", "mla_up"),
        ("norm", "mla_up", "experts", "feed"),
    )
    for modules in steps:
        candidate = job.with_layout(replace(job.layout, recompute=modules))
        if memory(candidate).allocated < 1.05 * capacity:
            return candidate
    return job.with_layout(replace(job.layout, recompute=("layer",)))


def read_number(row: Mapping[str, str], field: str) -> float | None:
    """A number of a row, None where it has none; UsageError names one that no run has."""
    text = (row.get(field) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LARGEST_NUMBER:
        raise UsageError(f"{field}={text[:40]!r} is not a number of at least 0")
    if 0 < value < SMALLEST_NUMBER:
        raise UsageError(f"{field}={text[:40]!r} is nearly 0: no time, rate or size is below {SMALLEST_NUMBER:g}")
    return value


def read_integer(row: Mapping[str, str], field: str, default: int | None = None) -> int:
    value = read_number(row, field)
    if value is None:
        if default is None:
            raise UsageError(f"`{field}` is not given")
        return default
    return int(value)


def _read_model(row: Mapping[str, str], sequence: int) -> Model:
    name = row["model"].split("+")[0]
    proxy = re.fullmatch(r"(.+) proxy (\d+)L", name)
    base = proxy.group(1) if proxy else name
    known = MODELS.get(base, base)
    if base.startswith("llama-like"):
        layers, hidden, inner, heads = NANOTRON[float(row["params_b"])]
        return _plain_model(name, layers, hidden, inner, heads, heads, hidden // heads, 131072, tied=hidden < 4096)
    named = model_id(known)
    model = get_model(named) if named else None
    if base.startswith(("mpt", "gpt-")) and read_number(row, "hidden"):
        model = None  # the tables print their own dimensions
    if model is None or (model.name.startswith("gpt-3") and read_number(row, "hidden")):
        return _from_columns(row, sequence)
    return model.with_layers(int(proxy.group(2))) if proxy else _with_columns(model, row)


COLUMNS = {
    "hidden": "hidden", "ffn": "intermediate", "heads": "heads", "kv_heads": "kv_heads", "head_dim": "head_dim",
    "vocab": "vocabulary", "experts": "experts", "topk": "active_experts", "moe_ffn": "expert_intermediate",
}  # fmt: skip
"""Columns of dimensions, and the fields of a model."""
PADDED_VOCABULARY = 0.02
"""A vocabulary that is larger by this share at most is padded, and no other model."""


def _with_columns(model: Model, row: Mapping[str, str]) -> Model:
    """A model of the catalogue with the dimensions that a row states, where they are others: a scaled model."""
    changed: dict[str, Any] = {}
    for column, field in COLUMNS.items():
        stated, known = read_integer(row, column, 0), getattr(model, field)
        if not stated or not known or stated == known or model.kv_rank:
            continue  # with latent attention, tables count heads and their channels in different ways
        if field == "vocabulary" and abs(stated / known - 1) <= PADDED_VOCABULARY:
            continue
        if field == "intermediate" and model.is_moe:
            continue  # of dense layers or of an expert: tables do not say which
        changed[field] = stated
    layers = read_integer(row, "layers", model.layers)
    if layers != model.layers:
        model = model.with_layers(layers)
    return replace(model, **changed)


def _from_columns(row: Mapping[str, str], sequence: int) -> Model:
    """A model from the dimensions of its row: gated and tied such that it has the printed number of weights."""
    if "mla" in row.get("arch", ""):
        raise UsageError(f"{row['model']!r} is not in the catalogue, and its latent attention is not in the row")
    hidden, layers, heads = read_integer(row, "hidden"), read_integer(row, "layers"), read_integer(row, "heads")
    inner = read_integer(row, "ffn", 4 * hidden)
    plain = inner == 4 * hidden
    experts: dict[str, Any] = {}
    if read_integer(row, "experts", 0):
        experts = {
            "experts": read_integer(row, "experts"),
            "active_experts": read_integer(row, "topk"),
            "expert_intermediate": read_integer(row, "moe_ffn", inner),
        }

    def built(gated: bool, tied: bool) -> Model:
        return _plain_model(
            row["model"],
            layers,
            hidden,
            inner,
            heads,
            read_integer(row, "kv_heads", heads),
            read_integer(row, "head_dim", hidden // heads),
            read_integer(row, "vocab"),
            gated=gated,
            positions=0 if gated else sequence,
            tied=tied,
            **experts,
        )

    printed = read_number(row, "params_b")
    if printed is None or plain:
        return built(not plain, plain)
    every = [built(gated, tied) for gated in (True, False) for tied in (False, True)]
    return min(every, key=lambda model: abs(model.parameters - 1e9 * printed))


def _plain_model(
    name: str, layers: int, hidden: int, inner: int, heads: int, kv: int, width: int, vocabulary: int, **more: Any
) -> Model:
    if layers > MOST_LAYERS:
        raise UsageError(f"layers={layers} is more than {MOST_LAYERS:,}")
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


def _read_layout(row: Mapping[str, str], model: Model, gpus: int, batch: int) -> Layout:
    framework, sharding = row.get("framework", ""), row.get("sharding", "")
    tp, pp, cp = read_integer(row, "tp", 1), read_integer(row, "pp", 1), read_integer(row, "cp", 1)
    per_node = 4 if row["gpu"].startswith("GB") else 8
    ep = read_integer(row, "ep", 1) if model.is_moe else 1
    virtual = read_integer(row, "vp", 1) if pp > 1 else 1
    dp = gpus // (tp * pp * cp)
    microbatch = read_integer(row, "mbs_seqs", 0) or (4 if pp == 1 and batch // dp % 4 == 0 else 1)
    if pp > 1 and microbatch > 1 and batch // (dp * microbatch) < pp:
        microbatch = 1  # the local batch of a rank, which a pipeline runs one sequence at a time
    old = _release_year(row) < UNFUSED_UNTIL_YEAR
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
    elif re.search(r"SHARD_GRAD_OP|no.reshard|reshard\w*\W*(false|never|off)", sharding, re.IGNORECASE):
        kind = "shard_grad_op"
    elif re.search(r"HSDP|HYBRID_SHARD", sharding, re.IGNORECASE):
        kind, group = "hsdp", _group(sharding, dp) or math.gcd(dp, per_node // min(tp, per_node))
    elif re.match(r"FULL_SHARD|ZeRO-?3|Megatron-FSDP|FSDP", sharding, re.IGNORECASE):
        kind = "zero3"
    elif re.match(r"ZeRO-?2", sharding, re.IGNORECASE):
        kind = "zero2"
    elif re.fullmatch(r"DDP|ZeRO-?0|none", sharding, re.IGNORECASE):
        kind = "none"
    else:
        kind = "zero1"
        group = _group(sharding, dp) if re.match(r"ZeRO-?1", sharding, re.IGNORECASE) else 0
    split = nanotron_split(model, pp) if "nanotron" in framework and pp > 1 else ()
    extras = row.get("extras", "")
    modules, share = read_recompute(row.get("recompute", ""))
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
        etp=read_integer(row, "etp", tp if model.is_moe and ep * tp <= gpus // pp and framework == "NeMo" else 1)
        if model.is_moe
        else 1,
        sharding=kind,
        shard_group=group,
        recompute=modules,
        recompute_share=share,
        overlap_gradients=not old and not ("nanotron" in framework and kind == "zero1"),
        overlap_tensor=tp > 1 and not old and "nanotron" not in framework,
        overlap_experts=overlapped or (crosses and not extras.startswith(("HybridEP", "no EP", "alltoall"))),
        overlap_pipeline=not old,
        scatter_pipeline="DeepSpeed" not in framework,
    )


def _group(sharding: str, dp: int) -> int:
    """Ranks of one sharding group: the number after the kind; 0 for all, which some frameworks write as -1."""
    part = re.search(r"(?:ZeRO-?1|HSDP|HYBRID_SHARD)\b.*?(-?\d+)", sharding, re.IGNORECASE)
    ranks = int(part.group(1)) if part else 0
    return ranks if ranks > 0 and ranks < dp and dp % ranks == 0 else 0


def read_recompute(text: str) -> tuple[tuple[str, ...], float]:
    """The modules of a "recompute" column, and the share of the layers that recompute them.

    >>> read_recompute("full"), read_recompute("layernorm+moe_act"), read_recompute("selective, every 2nd layer")
    ((('layer',), 1.0), (('norm', 'feed_activation'), 1.0), (('layer',), 0.5))
    >>> read_recompute("selective (op)"), read_recompute("full, 4 of 32 layers"), read_recompute("not stated")
    ((('ops',), 1.0), (('layer',), 0.125), ((), 1.0))
    """
    plain = text.lower()
    if _SAYS_NOTHING.search(plain) or not plain.strip():
        return (), 1.0
    share = 1.0
    if match := re.search(r"(?:every|per)\s+(\d+)", plain):
        share = 1 / max(1, int(match.group(1)))
    elif match := re.search(r"(\d+)\s*(?:of|/)\s*(\d+)", plain):
        share = int(match.group(1)) / int(match.group(2))
    elif match := re.search(r"(\d+(?:\.\d+)?)\s*%", plain):
        share = float(match.group(1)) / 100
    if not 0 < share <= 1:
        raise UsageError(f"recompute={text[:60]!r} has no share of layers between 0 and 1")
    if share < 1:  # layers are chosen, so whole layers are recomputed
        return ("layer",), share
    if re.search(r"\bops?\b|op-level|per-op", plain):
        return ("ops",), share
    modules = tuple(
        module
        for part in re.split(r"[+,;&]|\band\b", plain)
        for name, names in RECOMPUTE_NAMES.items()
        if re.match(rf"{name}(?![a-z_])", part.strip())
        for module in names
    )
    if not modules:
        raise UsageError(f"recompute={text[:60]!r} is not understood; known: {', '.join(RECOMPUTE_NAMES)}, none")
    return tuple(dict.fromkeys(modules)), share


def nanotron_split(model: Model, pp: int) -> tuple[int, ...]:
    """Layers of each stage as nanotron splits them: by weights of GEMMs, the output layer included.

    A stage takes layers until it has passed its share, so that the first ones have more, and the last one few.
    """
    layer = 4 * model.heads * model.head_dim * model.hidden + 3 * model.intermediate * model.hidden
    total = model.layers * layer + model.hidden * model.vocabulary
    layers = [0] * pp
    stage = 0
    for index in range(model.layers):
        layers[stage] += 1
        if (index + 1) * layer * pp > total * (stage + 1):
            stage += 1
    return tuple(layers)


def _read_precision(row: Mapping[str, str]) -> Precision:
    text, sharding = row.get("precision", "").lower(), row.get("sharding", "")
    if "fp4" in text:
        return PRECISIONS["fp4"]
    if "mx" in text or "see notes" in text:
        return PRECISIONS["mxfp8"]
    wide = "nanotron" in row.get("framework", "") or "/DEFAULT" in sharding
    # assumed: its recipes keep the moments in 16 bits; those for fine-tuning say that they do not
    low = "Megatron-Bridge (2026)" in row.get("framework", "") and "sft" not in row["model"]
    if "row" in text and ("fp8" in text or "float8" in text):
        return PRECISIONS["fp8-row"]  # a scale for each row
    if "fp8" in text or "float8" in text:
        return PRECISIONS["fp8-low-moments" if low else "fp8-fp32-grads" if wide else "fp8"]
    if low:
        return PRECISIONS["bf16-low-moments"]
    if "fp16" in text or text == "mixed":
        return PRECISIONS["fp16-fp32-grads"]
    return PRECISIONS["bf16-fp32-grads" if wide else "bf16-master"]


def _read_software(row: Mapping[str, str]) -> Software:
    framework, said = row.get("framework", "").lower(), f"{row.get('framework', '')} {row.get('extras', '')}".lower()
    if "llm-foundry" in framework or "nanotron" in framework:
        return "eager"
    if _release_year(row) < UNFUSED_UNTIL_YEAR:
        return "unfused"
    native = any(word in framework for word in ("torchtitan", "fsdp", "deepspeed", "transformers", "accelerate"))
    return "eager" if native and "compile" not in said else "fused"


def _release_year(row: Mapping[str, str]) -> float:
    """Release date of the software: of the release that a row names, else of its paper.

    "Megatron-Bridge 26.04.01" is 2026.33, "arXiv 2104.04473" 2021.33.
    """
    framework = row.get("framework", "")
    match = re.search(r"\b(2\d)\.(\d\d)\b", framework)
    if match:
        return 2000 + int(match.group(1)) + int(match.group(2)) / 12
    match = re.search(r"\((20\d\d)", framework)
    if match:
        return float(match.group(1)) + 0.5
    match = re.search(r"\b(2\d)(0[1-9]|1[0-2])\.\d{5}\b", f"{row['source']} {row.get('source_path', '')}")
    if match:
        return 2000 + int(match.group(1)) + int(match.group(2)) / 12
    return {"NeMo": 2025.3, "MaxText": 2025.3, "llm-foundry/Composer FSDP": 2023.7}.get(framework, 2024.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTraining:
    """One published run."""

    id: str
    group: str
    source: str
    kind: str
    """dense, moe, moe-mla, moe-hybrid or hybrid-ssm."""
    job: Job
    cluster: Cluster
    seconds: float | None
    """Of a step; None where the run failed or was not timed."""
    memory: float | None
    """Peak bytes."""
    memory_meaning: MemoryMeaning = "reserved"
    notes: str


def read_training(path: Path) -> tuple[list[MeasuredTraining], list[SkippedRow]]:
    """All rows of a file with the columns of `measured_training.csv`."""
    columns, rows = read_csv(path)
    missing = {"id", "source", "model", "gpu", "gpus", "seq_len", "gbs_seqs"} - set(columns)
    if missing:
        raise UsageError(f"The measurements {str(path)!r} have no column {min(missing)!r}.")
    runs: list[MeasuredTraining] = []
    skipped: list[SkippedRow] = []
    for row in rows:
        try:
            runs.append(_read_run(row))
        except (UsageError, ValueError, KeyError, ArithmeticError) as error:
            skipped.append(SkippedRow(id=row.get("id") or "?", reason=str(error).split("\n")[0]))
    return runs, skipped


def _read_run(row: Mapping[str, str]) -> MeasuredTraining:
    cluster = _read_cluster(row)
    job = read_job(row, cluster.machine.memory_bytes or 80e9)
    peak = (
        None if "OUTCOME: OOM" in row.get("notes", "") else read_number(row, "peak_mem_gib")
    )  # a step that did not end
    kind = row.get("mem_kind", "")
    # the column is in GiB, unless the row says GB; nanotron prints bytes / 1024^3 as GB
    unit = 1e9 if re.search(r"\bGB\b", kind) and "nanotron" not in row.get("framework", "") else 2.0**30
    meaning: MemoryMeaning = "reserved"
    if re.search("alloc", kind, re.IGNORECASE):
        meaning = "allocated"
    elif re.search("smi|device|total", kind, re.IGNORECASE):
        meaning = "total"
    return MeasuredTraining(
        id=row["id"],
        group=row.get("group") or row["source"],
        source=row["source"],
        kind=row.get("arch") or ("moe" if job.model.is_moe else "dense"),
        job=job,
        cluster=cluster,
        seconds=_read_seconds(row, job, cluster.machine),
        memory=peak * unit if peak else None,
        memory_meaning=meaning,
        notes=row.get("notes", ""),
    )


def _read_cluster(row: Mapping[str, str]) -> Cluster:
    """The default cluster of a GPU, with the network, power limit and memory bandwidth that a row names."""
    label, gpus, interconnect = row["gpu"].rstrip("?"), read_integer(row, "gpus"), row.get("interconnect", "")
    name = gpu_id(label)
    if name is None:
        raise UsageError(f"no GPU {label!r} in the catalogue")
    per_node = 4 if name.startswith("gb") else 8
    count = gpus if gpus <= per_node or gpus % per_node == 0 else -(-gpus // per_node) * per_node
    network = "ethernet-200" if "RoCE" in interconnect and "1600" in interconnect else None
    cluster = Cluster.of(name, gpus=count, network=network)
    said = f"{label} {interconnect} {row.get('notes', '')}"
    watts, memory = re.search(r"(\d{3,4}) ?W\b", said), re.search(r"(\d\.\d+) ?TB/s", said)
    machine = cluster.machine
    if watts:
        machine = replace(machine, power_watts=float(watts.group(1)))
    if memory and machine.theoretical is not None:
        ceilings = replace(machine.theoretical, bandwidth=1e12 * float(memory.group(1)))
        machine = replace(machine, theoretical=ceilings)
    return cluster if machine is cluster.machine else replace(cluster, machine=machine)


def _read_seconds(row: Mapping[str, str], job: Job, machine: Machine) -> float | None:
    """Seconds of a step: as printed, else from tokens per second, else from FLOP/s by the formula of the source."""
    if printed := read_number(row, "step_time_s"):
        return printed
    if per_gpu := read_number(row, "tokens_per_s_per_gpu"):
        return job.tokens / (per_gpu * job.layout.gpus)
    rate, model = read_number(row, "model_tflops_per_gpu") or None, job.model
    share = read_number(row, "mfu_pct") or None
    layers, hidden, sequence = model.layers, model.hidden, job.sequence
    if rate is not None and row.get("hfu_pct"):
        flops = (
            96
            * sequence
            * layers
            * hidden**2
            * (1 + sequence / (6 * hidden) + model.vocabulary / (16 * layers * hidden))
        )
    elif rate is not None and not row.get("group", "").startswith("mbridge"):
        flops = (
            72
            * sequence
            * layers
            * hidden**2
            * (1 + sequence / (6 * hidden) + model.vocabulary / (12 * layers * hidden))
        )
    elif rate is None and share is not None:
        # three forward passes, attention not halved, against the 16-bit peak
        weights = 4 * hidden**2 + (3 if model.gated else 2) * hidden * model.intermediate
        flops = 6.0 * sequence * (layers * (weights + 2 * sequence * hidden) + hidden * model.vocabulary)
        assert machine.theoretical is not None
        rate = share / 100 * machine.theoretical.peak("bfloat16") / 1e12
    else:
        return None
    return job.layout.global_batch * flops / (rate * 1e12 * job.layout.gpus)


LARGEST_NUMBER = 1e15
"""In any column."""
SMALLEST_NUMBER = 1e-9
"""In any column, if it is not 0: of much smaller ones, quotients and squares are infinite or nothing."""
TIE = 0.05
"""Pairs of layouts whose speeds differ by less are not ranked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One run: measured and predicted."""

    run: MeasuredTraining
    seconds: float
    parts: dict[str, float]

    @property
    def error(self) -> float:
        """Predicted to measured step time, less 1."""
        assert self.run.seconds is not None
        return self.seconds / self.run.seconds - 1

    @property
    def why(self) -> str:
        """The largest parts of the prediction."""
        largest = sorted(self.parts.items(), key=lambda item: -item[1])[:3]
        return ", ".join(f"{name} {value / self.seconds:.0%}" for name, value in largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Peak memory of one run on the first rank, measured and predicted with the same meaning."""

    run: MeasuredTraining
    bytes: float

    @property
    def error(self) -> float:
        """Predicted to measured peak, less 1."""
        assert self.run.memory is not None
        return self.bytes / self.run.memory - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPair:
    """Two runs that differ in layout: speed of the first to the second, measured and predicted."""

    first: str
    second: str
    measured: float
    predicted: float

    @property
    def right(self) -> bool:
        """Whether the prediction has the same winner."""
        return (self.measured > 1) == (self.predicted > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingValidation:
    """All runs of a file."""

    rows: tuple[TrainingRow, ...]
    memory: tuple[MemoryRow, ...]
    skipped: tuple[SkippedRow, ...]
    left_out: bool
    """Whether each source was predicted from a fit without it."""


def dense_or_moe(run: MeasuredTraining) -> str:
    """ "moe" for a model with experts, else "dense"."""
    return "moe" if run.job.model.is_moe else "dense"


def validate_training(path: Path, *, left_out: bool = True) -> TrainingValidation:
    """Predictions for the runs of `path`; with `left_out`, by constants that were fitted without the source."""
    runs, skipped = read_training(path)
    planners: dict[tuple[object, ...], Planner] = {}
    rows = []
    for run in runs:
        if run.seconds is None:
            continue
        predicted = _planner(run, planners, left_out).time(run.job)
        rows.append(TrainingRow(run=run, seconds=predicted.seconds, parts=predicted.parts))
    peaks = [
        MemoryRow(run=run, bytes=getattr(memory_by_stage(run.job)[0], run.memory_meaning))
        for run in runs
        if run.memory is not None
    ]
    return TrainingValidation(rows=tuple(rows), memory=tuple(peaks), skipped=tuple(skipped), left_out=left_out)


def validate_pairs(path: Path, runs: Path, *, left_out: bool = True) -> tuple[LayoutPair, ...]:
    """The pairs of training layouts in `path` that differ by more than `CLOSE`; `runs` has the rows they name."""
    known = {row.run.id: row for row in validate_training(runs, left_out=left_out).rows}
    pairs = []
    for line in read_csv(path)[1]:
        first, second = known.get(line["row_a"]), known.get(line["row_b"])
        if line.get("kind") != "training" or first is None or second is None or not line["a_over_b_speed"]:
            continue
        measured = read_number(line, "a_over_b_speed") or 1.0
        if abs(measured - 1) <= TIE:
            continue
        speeds = [row.run.job.tokens / row.seconds / row.run.job.layout.gpus for row in (first, second)]
        pairs.append(
            LayoutPair(first=first.run.id, second=second.run.id, measured=measured, predicted=speeds[0] / speeds[1])
        )
    return tuple(pairs)


def planner_key(cluster: Cluster) -> tuple[object, ...]:
    """All of a cluster that a reader may change: runs with equal keys share a planner."""
    machine = cluster.machine
    bandwidth = machine.theoretical.bandwidth if machine.theoretical else None
    return machine.id, machine.power_watts, bandwidth, cluster.gpus, cluster.network_name


@cache
def constants_without(source: str) -> Efficiency:
    """Constants that were fitted without this source; those of the package where it had no part in the fit."""
    text = resources.files("nearpeak.plan.validation").joinpath("training_left_out.json").read_text(encoding="utf-8")
    known = {field.name for field in fields(Efficiency)}
    values = json.loads(text)["sources"].get(source)
    if values is None:
        return load_efficiency().values
    return Efficiency(**{name: float(value) for name, value in values.items() if name in known})


def _planner(run: MeasuredTraining, planners: dict[tuple[object, ...], Planner], left_out: bool) -> Planner:
    cluster = run.cluster
    key = (*planner_key(cluster), run.source if left_out else "")
    if key not in planners:
        planners[key] = Planner(cluster, constants_without(run.source) if left_out else None)
    return planners[key]
