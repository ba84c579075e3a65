"""Options that the questions of `nearpeak plan` share: the model, the cluster, the layout, and where results go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nearpeak.cli.argument_types import value
from nearpeak.cli.output import print_result, terminal_style, write_file
from nearpeak.errors import UsageError

if TYPE_CHECKING:
    from nearpeak.plan.cluster.cluster import Cluster
    from nearpeak.plan.models.model import Model
    from nearpeak.plan.training.job import Job
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
    "recompute",
    "offload",
)
"""Options any of which makes a layout; without one it is searched for."""


def whole_number(text: str) -> int:
    """A whole number, which may end in k or m."""
    found = value(text)
    if isinstance(found, bool) or not isinstance(found, int):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, such as 8 or 8k")
    return found


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
    group.add_argument("--schedule", metavar="NAME", help="1f1b, interleaved or zero-bubble (1f1b)")
    group.add_argument("--sharding", metavar="NAME", help="none, zero1, zero2, zero3 (FSDP) or hsdp (zero1)")
    group.add_argument("--shard-group", type=whole_number, metavar="N", help="hsdp: ranks that share one copy")
    group.add_argument(
        "--recompute",
        metavar="WHAT",
        help="none, selective, full, or modules: attention,mla_up,norm,feed,experts (none)",
    )
    group.add_argument("--offload", metavar="WHAT", help="none, optimizer, optimizer+gradients or all (none)")
    group.add_argument("--no-sequence-parallel", action="store_true", help="norms and residuals on every TP rank")
    group.add_argument("--overlap", metavar="WHAT", help="of gradients,pipeline,tensor,experts (all but experts)")


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
        help="bf16, bf16-master, bf16-fp32-grads, fp8, mxfp8, fp4, ... (bf16)",
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
    asked = getattr(arguments, "gpus", None)
    if counted is not None and asked is not None and counted != asked:
        raise UsageError(f"--on says {counted} GPUs and --gpus {asked}. Give one of them.")
    gpus = counted if counted is not None else asked
    if name == "this":
        from nearpeak.calibrate.machine import machine

        return Cluster.of(machine(), gpus=gpus, **replaced)
    return Cluster.of(name, gpus=gpus, **replaced)


def has_layout(arguments: argparse.Namespace) -> bool:
    """Whether any option of a layout was given."""
    return any(getattr(arguments, name) is not None for name in LAYOUT_OPTIONS)


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
    given: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in LAYOUT_OPTIONS
        if getattr(arguments, name) is not None and name != "recompute"
    }
    if arguments.recompute is not None:
        given["recompute"] = tuple(
            part.strip() for part in arguments.recompute.replace("+", ",").split(",") if part.strip()
        )
    if gpus == 1 and "sharding" not in given:
        given["sharding"] = "none"
    layout = Layout(
        gpus=gpus,
        global_batch=batch,
        microbatch=arguments.microbatch,
        sequence_parallel=not arguments.no_sequence_parallel,
        **given,
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
    given = {part.strip() for part in arguments.overlap.split(",") if part.strip()} - {"none"}
    for name in sorted(given - set(names)):
        raise UsageError(f"--overlap {name!r} is not known. {did_you_mean(name, names)}")
    return {f"overlap_{name}": name in given for name in names}


def _product(numbers: list[int]) -> int:
    found = 1
    for number in numbers:
        found *= max(1, number)
    return found


def write_plan(
    document: Document,
    answer: Any,
    arguments: argparse.Namespace,
    sliders: Callable[[], Sliders | None] = lambda: None,
) -> None:
    """Prints the answer, or writes it where -o says; `sliders` are made for a page alone."""
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
