"""How fast a model is served: prefill, decode, latency, throughput, room.

Prefill and decode apart, and why one is limited by compute and the other by
memory; time to the first token (TTFT), time per token (TPOT), throughput
against concurrency, what the KV cache holds, and the batch at which decode stops
being limited by memory. Without --tp, --pp, --dp or --ep: the layout with the
most tokens per second. --most-ttft and --most-tpot: the layout and the load with
the most throughput that keep them, and exit code 1 where none does.

examples:
  nearpeak plan serve llama-3-70b --on "h100-sxm x 8" --precision fp8 --concurrency 64
  nearpeak plan serve deepseek-v3 --on "h200-sxm x 8" --precision fp8 --tp 8
  nearpeak plan serve llama-3-70b --on "h100-sxm x 8" --most-ttft 0.5 --most-tpot 0.02
  nearpeak plan serve llama-3-70b --on "h200-sxm x 4" --speculate 3:0.7
  nearpeak plan serve llama-3-70b --on "h100-sxm x 4" --tp 4 --disaggregate 1:3 -o serve.html
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nearpeak.cli.output import narrate
from nearpeak.cli.plan.options import (
    add_cluster,
    add_model,
    add_results,
    cluster_of,
    model_of,
    whole_number,
    write_plan,
)
from nearpeak.errors import UsageError

if TYPE_CHECKING:
    from nearpeak.plan.cluster.cluster import Cluster
    from nearpeak.plan.models.model import Model

DEGREES = ("tp", "pp", "dp", "ep")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this question's arguments."""
    add_model(parser)
    add_cluster(parser, required=True)
    layout = parser.add_argument_group("layout of one replica")
    for name, meaning in (
        ("tp", "tensor parallel"),
        ("pp", "pipeline stages"),
        ("dp", "attention data parallel groups"),
        ("ep", "parts of the experts"),
    ):
        layout.add_argument(f"--{name}", type=whole_number, metavar="N", help=f"{meaning} (1)")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--precision", default="bf16", metavar="NAME", help="bf16, fp8, fp4, int8 or int4 (bf16)")
    engine.add_argument("--kv", metavar="NAME", help="of the KV cache: bf16 or fp8 (as the precision has it)")
    engine.add_argument("--engine", default="vllm", metavar="NAME", help="vllm, sglang, trtllm or gpt-fast (vllm)")
    engine.add_argument("--no-graphs", action="store_true", help="kernels are launched one by one")
    engine.add_argument(
        "--chunk", type=whole_number, default=8192, metavar="N", help="prompt tokens of one step (8192)"
    )
    engine.add_argument("--batching", default="continuous", metavar="NAME", help="continuous or static (continuous)")
    engine.add_argument("--memory-share", type=float, default=0.92, metavar="S", help="of the GPU's memory (0.92)")
    load = parser.add_argument_group("load")
    load.add_argument("--prompt", type=whole_number, default=1024, metavar="N", help="tokens of a prompt (1024)")
    load.add_argument("--generate", type=whole_number, default=256, metavar="N", help="tokens of an answer (256)")
    load.add_argument("--concurrency", type=float, default=32.0, metavar="N", help="requests in flight, all GPUs (32)")
    load.add_argument("--most-ttft", type=float, metavar="S", help="seconds to the first token at most")
    load.add_argument("--most-tpot", type=float, metavar="S", help="seconds per token at most")
    modes = parser.add_argument_group("other ways to serve")
    modes.add_argument("--disaggregate", type=_pools, metavar="P:D", help="P replicas for prompts and D for decoding")
    modes.add_argument(
        "--speculate", type=_guesses, metavar="N:SHARE", help="N guesses a step, of which a share is accepted: 3:0.7"
    )
    add_results(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan of a replica."""
    from nearpeak.plan.serving.deployment import ServingLayout
    from nearpeak.plan.serving.plan import Load, serving_plan
    from nearpeak.render.views.plan.serving import document
    from nearpeak.render.views.plan.sliders import decode_sliders

    model, cluster = model_of(arguments), cluster_of(arguments)
    given = {name: getattr(arguments, name) for name in DEGREES if getattr(arguments, name) is not None}
    if arguments.most_ttft is not None or arguments.most_tpot is not None:
        chosen = _within_limits(arguments, model, cluster, given)
        if chosen is None:
            return 1
        given, arguments.concurrency = chosen
    plan = serving_plan(
        model,
        cluster,
        Load(
            prompt=arguments.prompt,
            output=arguments.generate,
            concurrency=arguments.concurrency,
            batching=arguments.batching,
            chunk=arguments.chunk,
            memory_share=arguments.memory_share,
        ),
        ServingLayout(**given) if given else None,
        arguments.precision,
        kv=arguments.kv,
        engine=arguments.engine,
        graphs=not arguments.no_graphs,
        disaggregate=arguments.disaggregate,
        guesses=arguments.speculate,
    )
    write_plan(document(plan), plan, arguments, lambda: decode_sliders(plan))
    return 0


def _within_limits(
    arguments: argparse.Namespace, model: Model, cluster: Cluster, given: dict[str, int]
) -> tuple[dict[str, int], float] | None:
    """The layout and the load with the most throughput within the limits; None, and a line on stderr, if none is."""
    from nearpeak.plan.serving.search import search_serving

    if given:
        raise UsageError(f"--most-ttft and --most-tpot search for a layout: leave out --{next(iter(given))}.")
    found = search_serving(
        model,
        cluster,
        arguments.precision,
        prompt=arguments.prompt,
        output=arguments.generate,
        kv=arguments.kv,
        engine=arguments.engine,
        most_ttft=arguments.most_ttft,
        most_tpot=arguments.most_tpot,
    )
    if found.best is None:
        narrate(f"nearpeak: {found.nearest}")
        return None
    narrate(f"{found.tried} legal layouts, {found.fitting} fit; {found.nearest}")
    layout = {name: getattr(found.best.layout, name) for name in DEGREES}
    return layout, found.best.serving.concurrency * found.best.replicas


def _pools(text: str) -> tuple[int, int]:
    """P:D."""
    first, colon, second = text.partition(":")
    if not colon or not first.isdecimal() or not second.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not PREFILL:DECODE, such as 1:3")
    return int(first), int(second)


def _guesses(text: str) -> tuple[int, float]:
    """N:SHARE."""
    first, colon, second = text.partition(":")
    try:
        return int(first), float(second if colon else "0.7")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not GUESSES:SHARE, such as 3:0.7") from None
