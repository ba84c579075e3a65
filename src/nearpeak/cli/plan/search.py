"""`nearpeak plan train` without a layout: the search."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nearpeak.cli.output import narrate
from nearpeak.cli.plan.results import deliver
from nearpeak.errors import UsageError

if TYPE_CHECKING:
    from nearpeak.plan.models.model import Model
    from nearpeak.plan.network.cluster import Cluster


def run_search(arguments: argparse.Namespace, model: Model, cluster: Cluster) -> int:
    """Tries all legal layouts, and shows the best."""
    from nearpeak.plan.training.choice import search_plan
    from nearpeak.plan.training.job import precision_named
    from nearpeak.render.plan.search import document
    from nearpeak.render.plan.sliders import memory_sliders

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
    found, plan = answer.found, answer.plan
    narrate(f"{found.legal} legal layouts, {found.fitting} fit; {found.took:.1f} s")
    deliver(document(answer, arguments.top), answer, arguments, lambda: memory_sliders(plan.memory) if plan else None)
    return 0
