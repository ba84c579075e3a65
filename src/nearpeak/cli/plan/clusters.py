"""The catalogue of systems that GPUs come in, for --on.

Every machine of `nearpeak machine --list` is a name too: it gets its usual system.
"""

from __future__ import annotations

import argparse

from nearpeak.cli.plan.options import add_results, write_plan


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this question's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help='a cluster, such as "gb200 x 144"')
    add_results(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the list, or one cluster."""
    from nearpeak.plan.cluster.cluster import Cluster, systems
    from nearpeak.render.views.plan import catalogue as render

    if arguments.name:
        found = Cluster.of(arguments.name)
        write_plan(render.cluster_document(found), found, arguments)
    else:
        write_plan(render.clusters_document(systems()), systems(), arguments)
    return 0
