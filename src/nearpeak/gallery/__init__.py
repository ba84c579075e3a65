"""Worked examples of performance, run on the machine at hand.

Each module of `examples` is one: its docstring is its title and its lesson, and `example(context)` reads from top to
bottom and yields what is shown (`parts`): prose, tables, plots, and predictions beside measurements. `Context` is the
machine it runs on, or one of the catalogue, for which it only predicts. `run.run_example` runs one, and `pages` renders
it as text, Markdown and HTML.
"""

from __future__ import annotations

NAMES = (
    "timing",
    "cpu_bound",
    "three_costs",
    "toy_processor",
    "ridge",
    "layer_ops",
    "fused_layer",
    "flash_attention",
    "cuda_kernel",
    "memory_hierarchy",
    "first_kernels",
    "flash_triton",
    "needless_fills",
    "moe_degrees",
    "skewed_experts",
    "tiling_ladder",
    "fewer_operations",
    "waves",
    "kv_cache",
    "asymptotics",
    "collectives",
    "parallel_training",
    "memory_7b",
    "power",
    "mfu",
    "optimization",
)
"""Names of all examples, in the order of reading."""
