"""`nearpeak plan train` without a layout: the search.

How long a training step takes, by part, and which layout is the fastest.

With any option of a layout: that one. Without: all legal layouts are tried, and
the best few are shown with the reason. A step's time has its parts, which sum
to it, and what hides behind them; tokens per second, MFU and HFU; cost and
energy; an error bar from validation, and the weakest source of a figure.

examples:
  nearpeak plan train llama-3-70b --on "h100-sxm x 64" --tp 4 --pp 4 --virtual 5 --batch 128 --sequence 8k
  nearpeak plan train llama-3-70b --on "h100-sxm x 64" --sequence 8k --price 2.5
  nearpeak plan train deepseek-v3 --on "gb200 x 256" --precision mxfp8 -o plan.html
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nearpeak.cli.output import narrate
from nearpeak.cli.plan.options import (
    add_cluster,
    add_job,
    add_layout,
    add_model,
    add_results,
    cluster_of,
    has_layout,
    job_of,
    model_of,
    write_plan,
)
from nearpeak.errors import UsageError

if TYPE_CHECKING:
    from nearpeak.plan.cluster.cluster import Cluster
    from nearpeak.plan.models.model import Model


def run_search(arguments: argparse.Namespace, model: Model, cluster: Cluster) -> int:
    """Tries all legal layouts, and shows the best."""
    from nearpeak.plan.training.job import precision_named
    from nearpeak.plan.training.search import search_plan
    from nearpeak.render.views.plan.sliders import memory_sliders
    from nearpeak.render.views.plan.training import search_document

    for name in ("microbatch", "overlap", "trainable", "year"):
        if getattr(arguments, name) not in (None, 1, 1.0):
            raise UsageError(f"--{name} needs a layout: give --tp, --pp, --sharding or another option of it as well.")
    answer = search_plan(
        model,
        cluster,
        sequence=arguments.sequence,
        global_batch=arguments.batch,
        precision=precision_named(arguments.precision),
        software=arguments.software,
        price=arguments.price,
    )
    found, plan = answer.search, answer.plan
    narrate(f"{found.legal} legal layouts, {found.fitting} fit; {found.search_seconds:.1f} s")
    write_plan(
        search_document(answer, arguments.top), answer, arguments, lambda: memory_sliders(plan.memory) if plan else None
    )
    return 0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this question's arguments."""
    add_model(parser)
    add_cluster(parser, required=True)
    add_layout(parser)
    add_job(parser)
    parser.add_argument("--price", type=float, metavar="DOLLARS", help="of one GPU for an hour: adds the cost")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many layouts a search shows (5)")
    add_results(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the step, or the best layouts."""
    from nearpeak.plan.training.plan import training_plan
    from nearpeak.plan.training.search import STEP_TOKENS
    from nearpeak.render.views.plan.sliders import memory_sliders
    from nearpeak.render.views.plan.training import training_document

    if arguments.top < 1:
        raise UsageError(f"--top {arguments.top}: a table has at least one row.")
    model, cluster = model_of(arguments), cluster_of(arguments)
    if has_layout(arguments):
        job = job_of(arguments, model, cluster, tokens=STEP_TOKENS)
        plan = training_plan(job, cluster, price=arguments.price)
        write_plan(training_document(plan), plan, arguments, lambda: memory_sliders(plan.memory))
        return 0

    return run_search(arguments, model, cluster)
