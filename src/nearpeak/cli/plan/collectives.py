"""How long collectives take on a cluster, and by which algorithm.

Bytes are counted as nccl-tests does: an all-gather's are those of its output, a
reduce-scatter's of its input, an all-to-all's all that a rank sends.

examples:
  nearpeak plan collectives --on "h100-sxm x 64"
  nearpeak plan collectives --on "h100-sxm x 64" --op all_reduce --bytes 1k..1g*8
  nearpeak plan collectives --on "gb200 x 144" --op all_to_all --ranks 64 -o all_to_all.svg
"""

from __future__ import annotations

import argparse

from nearpeak.cli.argument_types import values
from nearpeak.cli.plan.options import add_cluster, add_results, cluster_of, whole_number, write_plan
from nearpeak.errors import UsageError

SIZES = "1k..4g*8"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this question's arguments."""
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


def run(arguments: argparse.Namespace) -> int:
    """Print times by size, and what they are made of."""
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
    found = []
    for op in ops:
        counted = 2 if op == "send_recv" else ranks
        group = cluster.group(counted, arguments.stride)
        found += [
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
    write_plan(document(found, cluster, ranks), tuple(found), arguments)
    return 0
