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

from __future__ import annotations

import argparse

from nearpeak.cli.plan.options import (
    add_cluster,
    add_job,
    add_layout,
    add_model,
    add_results,
    cluster_of,
    job_of,
    model_of,
    write_plan,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this question's arguments."""
    add_model(parser)
    add_cluster(parser, required=False)
    add_layout(parser)
    add_job(parser)
    add_results(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the memory; exit code 0 also where it does not fit, which is an answer."""
    from nearpeak.plan.training.plan import memory_plan
    from nearpeak.render.views.plan.sliders import memory_sliders
    from nearpeak.render.views.plan.training import memory_document

    model = model_of(arguments)
    cluster = None if arguments.on is None else cluster_of(arguments)
    plan = memory_plan(job_of(arguments, model, cluster), cluster)
    write_plan(memory_document(plan), plan, arguments, lambda: memory_sliders(plan))
    return 0
