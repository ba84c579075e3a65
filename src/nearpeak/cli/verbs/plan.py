"""Memory, speed and layout of models on any cluster, without running them.

Arithmetic alone: no GPU, no torch, milliseconds. MODEL is a name of the
catalogue, the path of a Hugging Face config.json, or numbers:
layers=32,hidden=4096,heads=32,kv_heads=8,intermediate=14336,vocabulary=128256
--on is a machine or a system of the catalogue and a number of GPUs.

examples:
  nearpeak plan memory llama-2-7b
  nearpeak plan train llama-3-70b --on "h100-sxm x 64" --tp 4 --pp 4
  nearpeak plan train llama-3-70b --on "h100-sxm x 64" -o plan.html
  nearpeak plan serve llama-3-70b --on "h100-sxm x 4" --precision fp8
  nearpeak plan collectives --on "h100-sxm x 64" --op all_reduce
  nearpeak plan moe deepseek-v3 --on "h100-sxm x 64"
  nearpeak plan validate measured_training.csv
  nearpeak plan models
  nearpeak plan clusters
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearpeak.cli.argument_types import assignment, share, value, values
from nearpeak.cli.output import narrate, print_result, terminal_style, write_file
from nearpeak.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from nearpeak.plan.cluster.cluster import Cluster
    from nearpeak.plan.models.model import Model
    from nearpeak.plan.serving.simulate import Workload
    from nearpeak.plan.training.job import Job
    from nearpeak.plan.training.layout import Schedule
    from nearpeak.render.document import Document
    from nearpeak.render.views.plan.sliders import Sliders

LAYOUT_OPTIONS = (
    "tp",
    "cp",
    "pp",
    "virtual",
    "schedule",
    "ep",
    "etp",
    "sharding",
    "shard_group",
    "routed_nodes",
    "recompute",
    "recompute_share",
    "offload",
)
"""Options that define a layout; without any of them but --schedule, layouts are searched."""


def whole_number(text: str) -> int:
    """A whole number, which may end in k or m."""
    number = value(text)
    if isinstance(number, bool) or not isinstance(number, int):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, such as 8 or 8k")
    return number


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL."""
    parser.add_argument("model", metavar="MODEL", help="a name of `nearpeak plan models`, a config.json, or numbers")


def add_cluster(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """--on and what replaces the catalogue's figures."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--on", metavar="CLUSTER", required=required, help='a machine or a system and a number of GPUs: "h100-sxm x 64"'
    )
    group.add_argument("--network", metavar="ID", help="another network: an id of `nearpeak machine --networks`")
    group.add_argument("--gpus-per-node", type=whole_number, metavar="N", help="GPUs under one host (the system's)")
    group.add_argument(
        "--domain-size", type=whole_number, metavar="N", help="GPUs that one NVLink switch joins (the system's)"
    )
    group.add_argument(
        "--adapters-per-node", type=whole_number, metavar="N", help="network adapters of a node (the system's)"
    )
    group.add_argument(
        "--comm", metavar="FILE", help="collectives that `nearpeak comm --json FILE` measured on such GPUs"
    )


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Degrees, batch, sharding, recomputation, offload and overlap of a training run."""
    group = parser.add_argument_group("layout")
    group.add_argument(
        "--gpus", type=whole_number, metavar="N", help="how many GPUs (those of --on, or what the degrees need)"
    )
    for name, meaning in (
        ("tp", "tensor parallel"),
        ("cp", "context parallel"),
        ("pp", "pipeline stages"),
        ("virtual", "pieces per pipeline stage (interleaving)"),
        ("ep", "expert parallel"),
        ("etp", "tensor parallel inside an expert"),
    ):
        group.add_argument(f"--{name}", type=whole_number, metavar="N", help=f"{meaning} (1)")
    group.add_argument(
        "--schedule",
        metavar="NAME",
        help="1f1b, interleaved, zero-bubble or dualpipe (1f1b); in a search those to try, or any (1f1b,interleaved)",
    )
    group.add_argument(
        "--sharding", metavar="NAME", help="none, zero1, zero2, shard_grad_op, zero3 (FSDP) or hsdp (zero1)"
    )
    group.add_argument("--routed-nodes", type=whole_number, metavar="N", help="nodes that a token is routed to (any)")
    group.add_argument("--shard-group", type=whole_number, metavar="N", help="hsdp: ranks that share one copy")
    group.add_argument(
        "--recompute",
        metavar="WHAT",
        help="none, selective, full, or modules: attention,mla_up,norm,feed,feed_activation,experts,ops (none)",
    )
    group.add_argument(
        "--recompute-share",
        type=float,
        metavar="SHARE",
        help="share of the layers that recompute: 0.5, every second (1)",
    )
    group.add_argument("--offload", metavar="WHAT", help="none, optimizer, optimizer+gradients or all (none)")
    group.add_argument("--no-sequence-parallel", action="store_true", help="norms and residuals on every TP rank")
    group.add_argument(
        "--overlap", metavar="WHAT", help="of gradients,pipeline,tensor,experts (all but experts); in a search: experts"
    )


def add_job(parser: argparse.ArgumentParser) -> None:
    """Batch, sequence, number formats, software."""
    group = parser.add_argument_group("job")
    group.add_argument("--sequence", type=whole_number, default=4096, metavar="N", help="tokens of a sequence (4096)")
    group.add_argument(
        "--microbatch", type=whole_number, default=1, metavar="N", help="sequences that a rank runs at once (1)"
    )
    group.add_argument("--batch", type=whole_number, metavar="N", help="sequences of one step over all GPUs")
    group.add_argument(
        "--precision",
        default="bf16",
        metavar="NAME",
        help="bf16, bf16-master, bf16-adam8bit, bf16-muon, qlora, fp8, mxfp8, fp4, ... (bf16)",
    )
    group.add_argument("--software", default="fused", metavar="NAME", help="fused, eager or unfused (fused)")
    group.add_argument(
        "--year", type=float, metavar="Y", help="of the software's release, as 2025.5 (the newest that was fitted)"
    )
    group.add_argument("--trainable", type=float, default=1.0, metavar="SHARE", help="of the weights, for adapters (1)")


def add_results(parser: argparse.ArgumentParser) -> None:
    """-o and --json."""
    group = parser.add_argument_group("results")
    group.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="write .html, .svg, .md, .csv, .json or .txt instead; may be given again",
    )
    group.add_argument("--json", metavar="FILE", help="also write JSON to FILE; - writes JSON alone to stdout")


def model_of(arguments: argparse.Namespace) -> Model:
    """The model that was named."""
    from nearpeak.plan.models.find import find_model

    return find_model(arguments.model)


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """The cluster that --on and its companions say; "this x 8" is this machine, calibrated."""
    from nearpeak.plan.cluster.cluster import Cluster, parse_cluster

    replaced = {
        name: getattr(arguments, name)
        for name in ("network", "gpus_per_node", "domain_size", "adapters_per_node")
        if getattr(arguments, name) is not None
    }
    name, counted = parse_cluster(arguments.on)
    option = getattr(arguments, "gpus", None)
    if counted is not None and option is not None and counted != option:
        raise UsageError(f"--on says {counted} GPUs and --gpus {option}. Give one of them.")
    gpus = counted if counted is not None else option
    if name == "this":
        from nearpeak.calibrate.machine import machine

        cluster = Cluster.of(machine(progress=narrate), gpus=gpus, **replaced)
    else:
        cluster = Cluster.of(name, gpus=gpus, **replaced)
    return cluster if arguments.comm is None else with_measured(cluster, arguments.comm)


def with_measured(cluster: Cluster, path: str) -> Cluster:
    """The cluster with the collectives that `nearpeak comm` measured; UsageError if that was on other devices."""
    from nearpeak.comm.result import load_run
    from nearpeak.machines.catalogue import by_driver_name

    run = load_run(path)
    device = run.environment.device
    machine = by_driver_name(device)
    if cluster.machine.name != device and (machine is None or machine.id != cluster.machine.id):
        raise UsageError(
            f"--comm {path}: it was measured on {run.ranks} ranks of {device}, and the plan is for "
            f"{cluster.machine.name}. Measure it there, or plan without --comm."
        )
    return replace(cluster, measured=run.fits)


def has_layout(arguments: argparse.Namespace) -> bool:
    """Whether any option of a layout was given."""
    return any(getattr(arguments, name) is not None for name in LAYOUT_OPTIONS if name != "schedule")


def job_of(arguments: argparse.Namespace, model: Model, cluster: Cluster | None, *, tokens: int | None = None) -> Job:
    """The job with its layout. Without --batch it is the smallest of at least `tokens` that fills the pipeline."""
    from nearpeak.plan.training.job import Job, precision_named
    from nearpeak.plan.training.layout import Layout

    degrees = [getattr(arguments, name) or 1 for name in ("tp", "cp", "pp")]
    experts = [getattr(arguments, name) or 1 for name in ("ep", "etp", "pp")]
    needed = max(_product(degrees), _product(experts))
    gpus = cluster.gpus if cluster is not None else needed if arguments.gpus is None else arguments.gpus
    stages = max(1, arguments.pp or 1)
    ranks = max(1, gpus // _product(degrees))
    least = ranks * max(1, arguments.microbatch) * stages
    batch = arguments.batch
    if batch is None:
        batch = least if tokens is None else least * max(1, -(-tokens // max(1, least * arguments.sequence)))
    fields: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in LAYOUT_OPTIONS
        if getattr(arguments, name) is not None and name != "recompute"
    }
    if arguments.recompute is not None:
        fields["recompute"] = tuple(
            part.strip() for part in arguments.recompute.replace("+", ",").split(",") if part.strip()
        )
    if gpus == 1 and "sharding" not in fields:
        fields["sharding"] = "none"
    layout = Layout(
        gpus=gpus,
        global_batch=batch,
        microbatch=arguments.microbatch,
        sequence_parallel=not arguments.no_sequence_parallel,
        **fields,
        **overlaps(arguments),
    )
    return Job(
        model=model,
        layout=layout,
        sequence=arguments.sequence,
        precision=precision_named(arguments.precision),
        software=arguments.software,
        **({} if arguments.year is None else {"year": arguments.year}),
        trainable=arguments.trainable,
    )


def overlaps(arguments: argparse.Namespace) -> dict[str, Any]:
    """What --overlap says, as fields of a layout."""
    from nearpeak.errors import did_you_mean

    if arguments.overlap is None:
        return {"overlap_tensor": (arguments.tp or 1) > 1}  # as the search has it
    names = ("gradients", "pipeline", "tensor", "experts")
    overlapped = {part.strip() for part in arguments.overlap.split(",") if part.strip()} - {"none"}
    for name in sorted(overlapped - set(names)):
        raise UsageError(f"--overlap {name!r} is not known. {did_you_mean(name, names)}")
    return {f"overlap_{name}": name in overlapped for name in names}


def _product(numbers: list[int]) -> int:
    return math.prod(max(1, number) for number in numbers)


def write_plan(
    document: Document,
    answer: Any,
    arguments: argparse.Namespace,
    sliders: Callable[[], Sliders | None] = lambda: None,
) -> None:
    """Prints the answer, or writes the files of -o; `sliders` are computed for HTML only."""
    from nearpeak._records import to_json
    from nearpeak.render.report import DOCUMENT_FORMATS, document_ending
    from nearpeak.render.text import text

    endings = {path: document_ending(path, document) for path in arguments.output}
    if arguments.json or not endings:
        print_result(text(document, terminal_style(sys.stdout)), answer, arguments.json)
    for path, ending in endings.items():
        if ending == ".json":
            write_file(path, json.dumps(to_json(answer), indent=1) + "\n")
        else:
            write_file(path, DOCUMENT_FORMATS[ending](document, sliders() if ending == ".html" else None))


def configure_memory(parser: argparse.ArgumentParser) -> None:
    """What a training job needs in memory, by part and by pipeline stage.

    Parameters, gradients, optimizer, activations by module, logits, buffers,
    context and slack, allocated and reserved. With --on: whether it fits, and the
    cheapest changes that would make it fit.

    examples:
      nearpeak plan memory llama-2-7b
      nearpeak plan memory llama-3-70b --on "h100-sxm x 64" --tp 8 --pp 4 --sequence 8k
      nearpeak plan memory config.json --sharding zero3 --gpus 8 --recompute full
      nearpeak plan memory layers=32,hidden=4096,heads=32,intermediate=11008,vocabulary=32000
    """
    add_model(parser)
    add_cluster(parser, required=False)
    add_layout(parser)
    add_job(parser)
    add_results(parser)


def run_memory(arguments: argparse.Namespace) -> int:
    """Print the memory; exit code 0 also where it does not fit, which is an answer."""
    from nearpeak.plan.training.plan import memory_plan
    from nearpeak.render.views.plan.sliders import training_sliders
    from nearpeak.render.views.plan.training import memory_document

    model = model_of(arguments)
    cluster = None if arguments.on is None else cluster_of(arguments)
    plan = memory_plan(job_of(arguments, model, cluster), cluster)
    write_plan(memory_document(plan), plan, arguments, lambda: training_sliders(plan))
    return 0


def configure_fit(parser: argparse.ArgumentParser) -> None:
    """Which change makes a training step fit into memory at the least cost in time.

    TARGET is FILE.py:FUNCTION, as for `nearpeak estimate`: a function that builds
    the model and the optimizer and returns a whole training step. It runs on fake
    tensors: no GPU and no memory is needed. From the lifetimes of its tensors follow
    the peak, and what recomputed layers, smaller microbatches, 8-bit or offloaded
    optimizer states and sharding over the GPUs of --on would leave of it.

    Or TARGET is a model, as for `nearpeak plan memory`: changes of its layout.

    examples:
      nearpeak plan fit train.py:step --on "h100-sxm x 1"
      nearpeak plan fit train.py:step --set batch=8 --on "h100-sxm x 8"
      nearpeak plan fit llama-3-8b --on "h100-sxm x 8" --sequence 8k
    """
    parser.add_argument("model", metavar="TARGET", help="FILE.py:FUNCTION, or a model as for `nearpeak plan memory`")
    add_cluster(parser, required=True)
    parser.add_argument(
        "--set", action="append", default=[], type=assignment, metavar="NAME=VALUE", help="a parameter of the function"
    )
    add_layout(parser)
    add_job(parser)
    add_results(parser)


def run_fit(arguments: argparse.Namespace) -> int:
    """Print whether it fits, and what makes it fit."""
    if ".py" not in arguments.model:
        if arguments.set:
            raise UsageError("--set belongs to FILE.py:FUNCTION; a model has options of its layout.")
        return run_memory(arguments)
    import contextlib

    from nearpeak.measure.case import case_errors, load
    from nearpeak.profiling.estimate import estimate_step
    from nearpeak.render.views.plan.training import fit_document
    from nearpeak.trace.fake import fake

    if has_layout(arguments):
        raise UsageError("A layout belongs to a model: FILE.py:FUNCTION has its own. Give --on and --set alone.")
    cluster = cluster_of(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result: what the case prints goes to stderr
        builder = load(arguments.model)
        with fake():
            case = builder.build(**dict(arguments.set))
        with case_errors(arguments.model, "while it was traced"):
            trace, estimate = estimate_step(case, cluster.machine)
    from nearpeak.plan.training.fit import fit_step

    plan = fit_step(trace, estimate, cluster, source=arguments.model)
    write_plan(fit_document(plan), plan, arguments)
    return 0


def configure_train(parser: argparse.ArgumentParser) -> None:
    """How long a training step takes, by part, and which layout is the fastest.

    With any option of a layout: that one. Without: all legal layouts are tried, and
    the best few are shown with the reason. A step's time has its parts, which sum
    to it, and what hides behind them; tokens per second, MFU and HFU; cost and
    energy; an error bar from validation, and the weakest source of a figure.
    --from: a profile of the same model with a few layers on one GPU of the cluster,
    as `nearpeak profile` saves it, sets the pace of computation.

    examples:
      nearpeak plan train llama-3-70b --on "h100-sxm x 64" --tp 4 --pp 4 --virtual 5 --batch 128 --sequence 8k
      nearpeak plan train llama-3-70b --on "h100-sxm x 64" --sequence 8k --price 2.5
      nearpeak plan train deepseek-v3 --on "gb200 x 256" --precision mxfp8 -o plan.html
      nearpeak plan train llama-3-8b --on "h200-sxm x 64" --sharding zero3 --from two_layers.json
    """
    add_model(parser)
    add_cluster(parser, required=True)
    add_layout(parser)
    add_job(parser)
    parser.add_argument("--price", type=float, metavar="DOLLARS", help="of one GPU for an hour: adds the cost")
    parser.add_argument(
        "--from",
        dest="profile",
        metavar="PROFILE",
        help="a profile of a step of the model with a few layers, on one such GPU: sets the pace",
    )
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many layouts a search shows (5)")
    add_results(parser)


def run_train(arguments: argparse.Namespace) -> int:
    """Print the step, or the best layouts."""
    from nearpeak.plan.training.plan import training_plan
    from nearpeak.plan.training.search import STEP_TOKENS
    from nearpeak.render.views.plan.sliders import training_sliders
    from nearpeak.render.views.plan.training import training_document

    if arguments.top < 1:
        raise UsageError(f"--top {arguments.top}: a table has at least one row.")
    model, cluster = model_of(arguments), cluster_of(arguments)
    if has_layout(arguments):
        job = job_of(arguments, model, cluster, tokens=STEP_TOKENS)
        calibration = None
        if arguments.profile is not None:
            from nearpeak.plan.training.calibration import calibrate_plan
            from nearpeak.profiles.file import read

            calibration = calibrate_plan(read(arguments.profile), job, cluster)
        plan = training_plan(job, cluster, price=arguments.price, calibration=calibration)
        write_plan(training_document(plan), plan, arguments, lambda: training_sliders(plan))
        return 0

    return run_search(arguments, model, cluster)


def run_search(arguments: argparse.Namespace, model: Model, cluster: Cluster) -> int:
    """Tries all legal layouts, and shows the best."""
    from nearpeak.plan.training.job import precision_named
    from nearpeak.plan.training.search import search_plan
    from nearpeak.render.views.plan.sliders import training_sliders
    from nearpeak.render.views.plan.training import search_document

    for name in ("microbatch", "trainable", "year", "profile", "no_sequence_parallel"):
        given = getattr(arguments, name)
        if given is True or given not in (None, False, 1):
            option = "from" if name == "profile" else name.replace("_", "-")
            raise UsageError(f"--{option} needs a layout: give --tp, --pp, --sharding or another option of it as well.")
    if arguments.overlap not in (None, "none", "experts"):
        raise UsageError("--overlap of a search is experts: the others are as a layout has them. Nearest: experts.")
    answer = search_plan(
        model,
        cluster,
        schedules=searched_schedules(arguments.schedule),
        overlap_experts=arguments.overlap == "experts",
        sequence=arguments.sequence,
        global_batch=arguments.batch,
        precision=precision_named(arguments.precision),
        software=arguments.software,
        price=arguments.price,
    )
    search, plan = answer.search, answer.plan
    narrate(f"{search.legal} legal layouts, {search.computed} timed; {search.search_seconds:.1f} s")
    write_plan(
        search_document(answer, arguments.top), answer, arguments, lambda: training_sliders(plan) if plan else None
    )
    return 0


def searched_schedules(text: str | None) -> tuple[Schedule, ...]:
    """The schedules that --schedule says for a search: names with commas between, or "any"."""
    from nearpeak.plan.training.search import ALL_SCHEDULES, SCHEDULES

    if text is None:
        return SCHEDULES
    names = {part.strip() for part in text.split(",")}
    if names == {"any"}:
        return ALL_SCHEDULES
    for name in sorted(names - set(ALL_SCHEDULES)):
        raise UsageError(f"--schedule {name!r} is not known. {did_you_mean(name, (*ALL_SCHEDULES, 'any'))}")
    return tuple(name for name in ALL_SCHEDULES if name in names)


DEGREES = ("tp", "pp", "dp", "ep", "redundant", "overlap")


def configure_serve(parser: argparse.ArgumentParser) -> None:
    """How fast a model is served: prefill, decode, latency, throughput, room.

    Prefill and decode apart, and why one is limited by compute and the other by
    memory; time to the first token (TTFT), time per token (TPOT), throughput
    against concurrency, what the KV cache holds, and the batch at which decode stops
    being limited by memory. The scheduler is simulated, request by request: a closed
    loop of --concurrency clients, arrivals at random with --rate, or those of a file
    with the columns arrival_s, prompt and output (--arrivals). Without --tp, --pp, --dp or --ep: the layout with the
    most tokens per second. --most-ttft and --most-tpot: the layout and the load with
    the most throughput that keep them, and exit code 1 where none does.

    examples:
      nearpeak plan serve llama-3-70b --on "h100-sxm x 8" --precision fp8 --concurrency 64
      nearpeak plan serve deepseek-v3 --on "h200-sxm x 8" --precision fp8 --tp 8
      nearpeak plan serve llama-3-70b --on "h100-sxm x 8" --most-ttft 0.5 --most-tpot 0.02
      nearpeak plan serve llama-3-70b --on "h100-sxm x 8" --precision fp8 --rate 12
      nearpeak plan serve llama-3-70b --on "h200-sxm x 4" --speculate 3:0.7
      nearpeak plan serve llama-3-70b --on "h100-sxm x 4" --tp 4 --disaggregate 1:3 -o serve.html
    """
    add_model(parser)
    add_cluster(parser, required=True)
    layout = parser.add_argument_group("layout of one replica")
    for name, meaning in (
        ("tp", "tensor parallel"),
        ("pp", "pipeline stages"),
        ("dp", "attention data parallel groups"),
        ("ep", "parts of the experts"),
    ):
        layout.add_argument(f"--{name}", type=whole_number, metavar="N", help=f"{meaning} (1)")
    layout.add_argument("--redundant", type=whole_number, metavar="N", help="copies of busy experts, in each layer (0)")
    layout.add_argument(
        "--overlap", action="store_true", default=None, help="two half batches hide each other's exchange of experts"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--precision", default="bf16", metavar="NAME", help="bf16, fp8, fp4, int8 or int4 (bf16)")
    engine.add_argument("--kv", metavar="NAME", help="of the KV cache: bf16 or fp8 (as the precision has it)")
    engine.add_argument("--engine", default="vllm", metavar="NAME", help="vllm, sglang, trtllm or gpt-fast (vllm)")
    engine.add_argument("--no-graphs", action="store_true", help="kernels are launched one by one")
    engine.add_argument(
        "--chunk", type=whole_number, default=8192, metavar="N", help="prompt tokens of one step (8192)"
    )
    engine.add_argument("--batching", default="continuous", metavar="NAME", help="continuous or static (continuous)")
    engine.add_argument("--memory-share", type=float, default=0.92, metavar="S", help="of the GPU's memory (0.92)")
    load = parser.add_argument_group("load")
    load.add_argument("--prompt", type=whole_number, default=1024, metavar="N", help="tokens of a prompt (1024)")
    load.add_argument("--generate", type=whole_number, default=256, metavar="N", help="tokens of an answer (256)")
    load.add_argument("--concurrency", type=float, default=32.0, metavar="N", help="requests in flight, all GPUs (32)")
    load.add_argument("--rate", type=float, metavar="R", help="requests per second that arrive at random")
    load.add_argument("--requests", type=whole_number, metavar="N", help="requests to simulate")
    load.add_argument("--arrivals", metavar="FILE", help="a CSV file of requests to simulate")
    load.add_argument("--prefix", type=whole_number, default=0, metavar="N", help="tokens that prompts share (0)")
    load.add_argument("--price", type=float, metavar="DOLLARS", help="of one GPU for an hour: adds the cost")
    load.add_argument("--most-ttft", type=float, metavar="S", help="seconds to the first token, mean, at most")
    load.add_argument("--most-tpot", type=float, metavar="S", help="seconds per token, mean, at most")
    modes = parser.add_argument_group("other ways to serve")
    modes.add_argument("--disaggregate", type=_pools, metavar="P:D", help="P replicas for prompts and D for decoding")
    modes.add_argument(
        "--speculate", type=_guesses, metavar="N:SHARE", help="N guesses a step, of which a share is accepted: 3:0.7"
    )
    add_results(parser)


def run_serve(arguments: argparse.Namespace) -> int:
    """Print the plan of a replica."""
    from nearpeak.plan.serving.deployment import ServingLayout
    from nearpeak.plan.serving.plan import Load, ServingPlan, plan_within, search_load, serving_plan
    from nearpeak.plan.serving.search import ServingOption
    from nearpeak.render.views.plan.serving import document
    from nearpeak.render.views.plan.sliders import decode_sliders

    model, cluster = model_of(arguments), cluster_of(arguments)
    degrees = {name: getattr(arguments, name) for name in DEGREES if getattr(arguments, name) is not None}
    engine = {"kv": arguments.kv, "engine": arguments.engine, "graphs": not arguments.no_graphs}
    limits = {"most_ttft": arguments.most_ttft, "most_tpot": arguments.most_tpot}

    def load() -> Load:
        return Load(
            prompt=arguments.prompt,
            output=arguments.generate,
            concurrency=arguments.concurrency,
            batching=arguments.batching,
            chunk=arguments.chunk,
            memory_share=arguments.memory_share,
        )

    def planned(layout: ServingLayout | None) -> ServingPlan:
        return serving_plan(
            model,
            cluster,
            load(),
            layout,
            arguments.precision,
            **engine,
            disaggregate=arguments.disaggregate,
            guesses=arguments.speculate,
            workload=_workload(arguments),
            price=arguments.price,
        )

    def planned_option(option: ServingOption) -> ServingPlan:
        arguments.concurrency = option.serving.concurrency * option.replicas
        return planned(option.layout)

    if limits == {"most_ttft": None, "most_tpot": None}:
        plan = planned(ServingLayout(**degrees) if degrees else None)
    else:
        if degrees:
            raise UsageError(f"--most-ttft and --most-tpot search for a layout: leave out --{next(iter(degrees))}.")
        search = search_load(model, cluster, load(), arguments.precision, **engine, **limits)
        within = plan_within(search, planned_option, **limits)
        if within is None:
            reason = "By formulas, some options keep the limits; simulated, none does." if search.within else ""
            narrate(f"nearpeak: {reason or search.reason}")
            return 1
        narrate(f"{search.tried} legal layouts, {search.fitting} fit; {len(search.within)} options within the limits")
        plan = within
    write_plan(document(plan), plan, arguments, lambda: decode_sliders(plan))
    return 0


def _workload(arguments: argparse.Namespace) -> Workload:
    """The requests that the options describe."""
    from nearpeak.plan.serving.plan import LENGTH_SPREAD
    from nearpeak.plan.serving.simulate import closed_loop, open_loop, read_arrivals

    if arguments.arrivals is not None:
        if arguments.rate is not None:
            raise UsageError("--arrivals and --rate both say when requests arrive: leave out one of them.")
        return read_arrivals(Path(arguments.arrivals))
    lengths = {"prompt": arguments.prompt, "output": arguments.generate, "prefix": arguments.prefix}
    if arguments.rate is not None:
        requests = 1000 if arguments.requests is None else arguments.requests
        return open_loop(rate=arguments.rate, requests=requests, spread=LENGTH_SPREAD, **lengths)
    clients = max(1, round(arguments.concurrency))
    return closed_loop(concurrency=clients, requests=arguments.requests, spread=LENGTH_SPREAD, **lengths)


def _pools(text: str) -> tuple[int, int]:
    """P:D."""
    first, colon, second = text.partition(":")
    if not colon or not first.isdecimal() or not second.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not PREFILL:DECODE, such as 1:3")
    return int(first), int(second)


def _guesses(text: str) -> tuple[int, float]:
    """N:SHARE."""
    first, colon, second = text.partition(":")
    try:
        return int(first), float(second if colon else "0.7")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not GUESSES:SHARE, such as 3:0.7") from None


SIZES = "1k..4g*8"


def configure_collectives(parser: argparse.ArgumentParser) -> None:
    """How long collectives take on a cluster, and by which algorithm.

    Bytes are counted as nccl-tests does: an all-gather's are those of its output, a
    reduce-scatter's of its input, an all-to-all's all that a rank sends.

    examples:
      nearpeak plan collectives --on "h100-sxm x 64"
      nearpeak plan collectives --on "h100-sxm x 64" --op all_reduce --bytes 1k..1g*8
      nearpeak plan collectives --on "gb200 x 144" --op all_to_all --ranks 64 -o all_to_all.svg
    """
    add_cluster(parser, required=True)
    parser.add_argument(
        "--op", action="append", default=[], metavar="NAME", help="all_reduce, ...; may be given again (all)"
    )
    parser.add_argument(
        "--bytes", type=values, default=values(SIZES), metavar="SIZES", help=f"as 64m, or a range ({SIZES})"
    )
    parser.add_argument("--ranks", type=whole_number, metavar="N", help="GPUs of the group (all)")
    parser.add_argument(
        "--stride",
        type=whole_number,
        default=1,
        metavar="N",
        help="GPUs between two neighbors: tp, for a data-parallel group (1)",
    )
    add_results(parser)


def run_collectives(arguments: argparse.Namespace) -> int:
    """Print times by message size, and their parts."""
    from nearpeak.plan.cluster.collectives import OPS, collective_seconds
    from nearpeak.render.views.plan.collectives import document

    cluster = cluster_of(arguments)
    sizes = [size for size in arguments.bytes if isinstance(size, (int, float)) and not isinstance(size, bool)]
    if len(sizes) != len(arguments.bytes):
        raise UsageError("--bytes: every size is a number, such as 64m or 1k..1g*8.")
    if arguments.stride < 1:
        raise UsageError(f"--stride {arguments.stride}: must be at least 1. Nearest: --stride 1.")
    ranks = arguments.ranks if arguments.ranks is not None else max(1, cluster.gpus // arguments.stride)
    ops = arguments.op or [op for op in OPS if op != "send_recv" or ranks >= 2]
    collectives = []
    for op in ops:
        counted = 2 if op == "send_recv" else ranks
        group = cluster.group(counted, arguments.stride)
        collectives += [
            collective_seconds(
                op,
                size,
                counted,
                cluster,
                ranks_per_node=group.ranks_per_domain,
                concurrent_groups=group.concurrent_groups if arguments.stride > 1 else 1,
            )
            for size in sizes
        ]
    write_plan(document(collectives, cluster, ranks), tuple(collectives), arguments)
    return 0


DTYPES = {"bf16": "bfloat16", "fp8": "float8", "fp4": "float4"}


def configure_moe(parser: argparse.ArgumentParser) -> None:
    """Tensor against expert parallelism for the experts of one MoE layer.

    Memory time, compute time and communication of the busiest GPU, by degree, as a
    table and as a picture of two panels.

    examples:
      nearpeak plan moe deepseek-v3 --on "h100-sxm x 64"
      nearpeak plan moe qwen3-30b-a3b --on "h100-sxm x 8" --tokens 128 -o moe.svg
    """
    add_model(parser)
    add_cluster(parser, required=True)
    parser.add_argument("--tokens", type=whole_number, default=8192, metavar="N", help="of the whole group (8192)")
    parser.add_argument("--degrees", metavar="LIST", help="as 2,4,8 (powers of two that divide)")
    parser.add_argument("--precision", default="bf16", metavar="NAME", help="bf16, fp8 or fp4 (bf16)")
    parser.add_argument(
        "--skew", type=float, default=1.0, metavar="X", help="load of the busiest GPU against chance (1)"
    )
    add_results(parser)


def run_moe(arguments: argparse.Namespace) -> int:
    """Print both ways to split at each degree."""
    from nearpeak.plan.moe_degrees import DEGREES, MoeLayer, degrees
    from nearpeak.render.views.plan.moe import document

    model, cluster = model_of(arguments), cluster_of(arguments)
    if not model.is_moe:
        raise UsageError(f"{model.name} has no experts. `nearpeak plan models` shows which models have.")
    if arguments.precision not in DTYPES:
        raise UsageError(
            f"--precision {arguments.precision!r} is not known. {did_you_mean(arguments.precision, DTYPES)}"
        )
    layer = MoeLayer(
        experts=model.experts,
        active=model.active_experts,
        hidden=model.latent or model.hidden,
        intermediate=model.expert_intermediate,
        gated=model.gated,
    )
    if arguments.degrees is not None:
        try:
            sizes = tuple(int(part) for part in arguments.degrees.split(","))
        except ValueError:
            raise UsageError(
                f"--degrees {arguments.degrees!r} is not a list of whole numbers, such as 2,4,8."
            ) from None
    else:
        usable = (degree for degree in DEGREES if degree <= cluster.gpus)
        sizes = tuple(n for n in usable if layer.experts % n == 0 and layer.intermediate % n == 0)
    if not sizes:
        raise UsageError(
            f"No degree from 2 to {cluster.gpus} divides experts={layer.experts} and their width. Name some."
        )
    answer = degrees(layer, arguments.tokens, cluster, at=sizes, dtype=DTYPES[arguments.precision], skew=arguments.skew)
    write_plan(document(answer, model, cluster), answer, arguments)
    return 0


def configure_validate(parser: argparse.ArgumentParser) -> None:
    """Measurements in a CSV file against the planner.

    The columns of the file say what it holds: training runs, serving runs,
    collectives, or pairs of layouts with their winner. Each source is predicted by
    constants that were fitted without it. Errors by source, architecture, GPU and
    scale, and the rows that are furthest off.

    --fail-over 10% ends with exit code 1 where a mean error is above it.

    examples:
      nearpeak plan validate benchmarks/measurements/measured_training.csv
      nearpeak plan validate benchmarks/measurements/measured_collectives.csv --worst 20 -o collectives.html
      nearpeak plan validate benchmarks/measurements/layout_pairs.csv
    """
    parser.add_argument("file", metavar="FILE", help="a CSV file of measurements")
    parser.add_argument("--seen", action="store_true", help="use the constants that were fitted on all sources")
    parser.add_argument("--simulate", action="store_true", help="latencies of servers by simulating the scheduler")
    parser.add_argument("--runs", metavar="FOLDER", help="pairs: where the files are whose rows they name")
    parser.add_argument("--worst", type=int, default=10, metavar="N", help="how many of the worst rows to show (10)")
    parser.add_argument("--fail-over", type=share, metavar="SHARE", help="exit code 1 where a mean error is above it")
    add_results(parser)


def run_validate(arguments: argparse.Namespace) -> int:
    """Print the errors, and say whether the gate holds."""
    from nearpeak.plan.validation.validate import validate
    from nearpeak.render.views.plan.validation import document

    if arguments.worst < 0:
        raise UsageError(f"--worst {arguments.worst}: must be at least 0. Nearest: --worst 0.")
    validation = validate(
        Path(arguments.file),
        leave_out=not arguments.seen,
        worst=arguments.worst,
        runs=None if arguments.runs is None else Path(arguments.runs),
        simulated=arguments.simulate,
    )
    write_plan(document(validation), validation, arguments)
    limit = arguments.fail_over
    if limit is None:
        return 0
    above = [group for group in validation.whole if group.mean_absolute > limit]
    for group in above:
        narrate(f"nearpeak: failed: {group.name}: a mean error of {group.mean_absolute:.1%} is above {limit:.1%}.")
    return 1 if above else 0


def configure_models(parser: argparse.ArgumentParser) -> None:
    """The catalogue of models.

    Without NAME: one line for each. With NAME: its shape, weights, FLOPs and cache,
    and where the figures come from.
    """
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name, a config.json, or numbers")
    add_results(parser)


def run_models(arguments: argparse.Namespace) -> int:
    """Print the list, or one model."""
    from nearpeak.plan.models.catalogue import catalogue_names, get_model
    from nearpeak.plan.models.find import find_model
    from nearpeak.render.views.plan import catalogue as render

    if arguments.name:
        model = find_model(arguments.name)
        write_plan(render.model_document(model), model, arguments)
    else:
        models = tuple(get_model(name) for name in catalogue_names())
        write_plan(render.models_document(models), models, arguments)
    return 0


def configure_clusters(parser: argparse.ArgumentParser) -> None:
    """The catalogue of systems that GPUs come in, for --on.

    Every machine of `nearpeak machine --list` is a name too: it gets its usual system.
    """
    parser.add_argument("name", nargs="?", metavar="NAME", help='a cluster, such as "gb200 x 144"')
    add_results(parser)


def run_clusters(arguments: argparse.Namespace) -> int:
    """Print the list, or one cluster."""
    from nearpeak.plan.cluster.cluster import Cluster, systems
    from nearpeak.render.views.plan import catalogue as render

    if arguments.name:
        cluster = Cluster.of(arguments.name)
        write_plan(render.cluster_document(cluster), cluster, arguments)
    else:
        write_plan(render.clusters_document(systems()), systems(), arguments)
    return 0


QUESTIONS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "memory": (configure_memory, run_memory),
    "fit": (configure_fit, run_fit),
    "train": (configure_train, run_train),
    "serve": (configure_serve, run_serve),
    "collectives": (configure_collectives, run_collectives),
    "moe": (configure_moe, run_moe),
    "validate": (configure_validate, run_validate),
    "models": (configure_models, run_models),
    "clusters": (configure_clusters, run_clusters),
}
"""How each question declares its arguments, and how it is answered. The docstring of the first is its help."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add one sub-parser per question."""
    questions = parser.add_subparsers(dest="question", metavar="QUESTION", title="questions")
    for name, (declare, _) in QUESTIONS.items():
        text = inspect.getdoc(declare) or ""
        question = questions.add_parser(
            name,
            help=text.partition("\n")[0].replace("%", "%%"),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        declare(question)
    parser.set_defaults(plan_help=parser.format_help)


def run(arguments: argparse.Namespace) -> int:
    """Answer one question."""
    if arguments.question is None:
        print(arguments.plan_help(), file=sys.stderr, end="")
        return 2
    _, answer = QUESTIONS[arguments.question]
    return answer(arguments)
