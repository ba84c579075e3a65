"""The catalogue of models.

Without NAME: one line for each. With NAME: its shape, weights, FLOPs and cache,
and where the figures come from.
"""

from __future__ import annotations

import argparse

from nearpeak.cli.plan.options import add_results, write_plan


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this question's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name, a config.json, or numbers")
    add_results(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the list, or one model."""
    from nearpeak.plan.models.catalogue import catalogue_names, get_model
    from nearpeak.plan.models.find import find_model
    from nearpeak.render.views.plan import catalogue as render

    if arguments.name:
        found = find_model(arguments.name)
        write_plan(render.model_document(found), found, arguments)
    else:
        models = tuple(get_model(name) for name in catalogue_names())
        write_plan(render.models_document(models), models, arguments)
    return 0
