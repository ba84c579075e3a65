"""Worked examples of performance, run on the machine at hand.

Each module of `examples` is one: its docstring is its title and its lesson, and `example(here)` reads from top to
bottom and yields what is shown (`parts`): prose, tables, plots, and predictions beside measurements. `Here` is the
machine it runs on, or one of the catalogue, for which it only predicts. `running.run` runs one, and `pages` writes it
down as text, Markdown and HTML.
"""

from __future__ import annotations

NAMES = (
    "timing",
    "cpu_bound",
    "three_costs",
    "toy_processor",
    "ridge",
    "layer_ops",
    "flash_attention",
    "first_kernels",
    "needless_fills",
    "moe_degrees",
    "skewed_experts",
    "tiling_ladder",
    "waves",
    "kv_cache",
    "asymptotics",
    "collectives",
    "memory_7b",
    "mfu",
    "optimization",
)
"""Names of all examples, in the order of reading."""
