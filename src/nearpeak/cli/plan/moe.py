"""Tensor against expert parallelism for the experts of one MoE layer.

Memory time, compute time and communication of the busiest GPU, by degree, as a
table and as a picture of two panels.

examples:
  nearpeak plan moe deepseek-v3 --on "h100-sxm x 64"
  nearpeak plan moe qwen3-30b-a3b --on "h100-sxm x 8" --tokens 128 -o moe.svg
"""

from __future__ import annotations

import argparse

from nearpeak.cli.plan.options import (
    add_cluster,
    add_model,
    add_results,
    cluster_of,
    model_of,
    whole_number,
    write_plan,
)
from nearpeak.errors import UsageError, did_you_mean

DTYPES = {"bf16": "bfloat16", "fp8": "float8", "fp4": "float4"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this question's arguments."""
    add_model(parser)
    add_cluster(parser, required=True)
    parser.add_argument("--tokens", type=whole_number, default=8192, metavar="N", help="of the whole group (8192)")
    parser.add_argument("--degrees", metavar="LIST", help="as 2,4,8 (powers of two that divide)")
    parser.add_argument("--precision", default="bf16", metavar="NAME", help="bf16, fp8 or fp4 (bf16)")
    parser.add_argument(
        "--skew", type=float, default=1.0, metavar="X", help="load of the busiest GPU against chance (1)"
    )
    add_results(parser)


def run(arguments: argparse.Namespace) -> int:
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
            at = tuple(int(part) for part in arguments.degrees.split(","))
        except ValueError:
            raise UsageError(
                f"--degrees {arguments.degrees!r} is not a list of whole numbers, such as 2,4,8."
            ) from None
    else:
        usable = (degree for degree in DEGREES if degree <= cluster.gpus)
        at = tuple(n for n in usable if layer.experts % n == 0 and layer.intermediate % n == 0)
    if not at:
        raise UsageError(
            f"No degree from 2 to {cluster.gpus} divides experts={layer.experts} and their width. Name some."
        )
    found = degrees(layer, arguments.tokens, cluster, at=at, dtype=DTYPES[arguments.precision], skew=arguments.skew)
    write_plan(document(found, model, cluster), found, arguments)
    return 0
