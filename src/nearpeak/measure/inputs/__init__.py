"""Inputs whose distribution is stated, and the statistics of inputs that someone else made.

Zeros, constants and uniform routing flatter a kernel: they draw less power, hit the cache and balance the load. The
generators here draw data that looks like the real thing (MoE routing is in `experts.py`), and `describe` (in
`statistics.py`) says what any tensor holds. A seed gives the same values on every call and on every device,
since all of them are drawn on the CPU and then moved; `seed=None` draws anew.

    >>> activations(2, 3, device="cpu").equal(activations(2, 3, device="cpu"))
    True
"""

from nearpeak.measure.input_facts import InputStatistics
from nearpeak.measure.inputs.experts import Routing, RoutingStatistics, routing
from nearpeak.measure.inputs.statistics import describe
from nearpeak.measure.inputs.tensors import FLOATING, activations, sequence_lengths, token_ids, weights
from nearpeak.measure.redrawn import Redrawn

__all__ = [
    "FLOATING",
    "InputStatistics",
    "Redrawn",
    "Routing",
    "RoutingStatistics",
    "activations",
    "describe",
    "routing",
    "sequence_lengths",
    "token_ids",
    "weights",
]
