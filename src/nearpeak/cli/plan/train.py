"""How long a training step takes, by part, and which layout is the fastest.

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
)
from nearpeak.cli.plan.results import deliver
from nearpeak.errors import UsageError


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
    from nearpeak.plan.training.answers import training_plan
    from nearpeak.plan.training.choice import TOKENS
    from nearpeak.render.plan.sliders import memory_sliders
    from nearpeak.render.plan.training import document

    if arguments.top < 1:
        raise UsageError(f"--top {arguments.top}: a table has at least one row.")
    model, cluster = model_of(arguments), cluster_of(arguments)
    if has_layout(arguments):
        job = job_of(arguments, model, cluster, tokens=TOKENS)
        plan = training_plan(job, cluster, price=arguments.price)
        deliver(document(plan), plan, arguments, lambda: memory_sliders(plan.memory))
        return 0
    from nearpeak.cli.plan.search import run_search

    return run_search(arguments, model, cluster)
