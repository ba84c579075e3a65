"""Memory, speed and layout of models on clusters that one does not have.

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
import sys
from typing import TYPE_CHECKING

from nearpeak.cli.plan import clusters, collectives, memory, models, moe, serve, train, validate

if TYPE_CHECKING:
    from nearpeak.cli.main import Verb

QUESTIONS: dict[str, Verb] = {
    "memory": memory,
    "train": train,
    "serve": serve,
    "collectives": collectives,
    "moe": moe,
    "validate": validate,
    "models": models,
    "clusters": clusters,
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add one sub-parser per question."""
    questions = parser.add_subparsers(dest="question", metavar="QUESTION", title="questions")
    for name, module in QUESTIONS.items():
        text = (module.__doc__ or "").strip()
        question = questions.add_parser(
            name,
            help=text.partition("\n")[0].replace("%", "%%"),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(question)
    parser.set_defaults(plan_help=parser.format_help)


def run(arguments: argparse.Namespace) -> int:
    """Answer one question."""
    if arguments.question is None:
        print(arguments.plan_help(), file=sys.stderr, end="")
        return 2
    return QUESTIONS[arguments.question].run(arguments)
