"""Collectives: what they do to data, what they cost on three kinds of wire, and what training pays.

GPUs that train one model together exchange data by a handful of collectives. Each is drawn here as what four ranks hold
before and after it, priced on PCIe, on NVLink and on a network, and then run for real by two processes of this machine,
whose results are checked against the drawings. Data-parallel and fully sharded training are sums of these prices.
"""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak import plan
from nearpeak.gallery.examples import two_ranks
from nearpeak.gallery.examples.drawn_collectives import after, drawing
from nearpeak.gallery.here import Here
from nearpeak.gallery.parts import Part, Plot, Row, compared, prose
from nearpeak.plan.models.flops import forward_flops
from nearpeak.render.document import Table
from nearpeak.render.plot import Series
from nearpeak.units import quantity, seconds

OPS = {
    "broadcast": "every rank gets what one has",
    "all_reduce": "every rank gets the sum of what all have",
    "reduce_scatter": "every rank gets its part of the sum",
    "all_gather": "every rank gets the parts of all",
    "all_to_all": "every rank gets one part from each: a transposition",
}
SIZE = 8 * 2**20
"""Bytes of a collective between the two processes."""


def example(here: Here) -> Iterator[Part]:
    """Drawings, prices, training, and two processes."""
    for op, does in OPS.items():
        yield drawing(op, does)
    yield from prose(
        "A colour is the rank that a block comes from, and a block of four stripes is the sum of four. An all-reduce"
        " is a reduce-scatter followed by an all-gather; that is why the sharded forms of training cost no more bytes"
        " for gradients than the plain one."
    )
    own = here.cluster(64)
    linked = own if own.fabric == "switch" else plan.Cluster.of("h100-sxm", gpus=64)
    node = plan.Cluster.of(linked.machine, gpus=8)
    wires = [("PCIe", plan.Cluster.of("l40s x 8"), 8), ("NVLink", node, 8), ("network", linked, 1)]
    yield from _prices(wires)
    yield from _training(wires)
    yield from _for_real(here)


def _seconds(op: str, size: float, wire: tuple[str, plan.Cluster, int]) -> float:
    """Over 8 GPUs; over the network each is in another node, where 8 such groups share the adapters."""
    _, cluster, inside = wire
    groups = 1 if inside == 8 else cluster.gpus_per_node
    found = plan.collective_seconds(op, size, 8, cluster, ranks_per_node=inside, concurrent_groups=groups)
    return found.seconds


def _prices(wires: list[tuple[str, plan.Cluster, int]]) -> Iterator[Part]:
    large = 2.0**28
    yield Table(
        title="256 MiB over 8 GPUs, predicted",
        headers=("", *(name for name, _, _ in wires)),
        rows=tuple((op, *(seconds(_seconds(op, large, wire)) for wire in wires)) for op in OPS),
        note="; ".join(f"{name}: {_described(cluster, inside)}" for name, cluster, inside in wires) + ".",
    )
    sizes = [2.0**power for power in range(10, 31, 2)]
    yield Plot(
        title="An all-reduce over 8 GPUs",
        series=tuple(
            Series(name=wire[0], points=tuple((size, _seconds("all_reduce", size, wire)) for size in sizes))
            for wire in wires
        ),
        x_label="bytes",
        y_label="time",
        x_unit="B",
        log_x=True,
        log_y=True,
    )
    small = [_seconds("all_reduce", sizes[0], wire) for wire in wires]
    yield from prose(
        f"Small messages take about the same time whatever their size, {seconds(min(small))} to {seconds(max(small))}"
        f" for {quantity(sizes[0], 'B')}: that is latency. Large ones take bytes over bandwidth. In a ring of n ranks"
        " every rank sends (n - 1) / n of the data for a reduce-scatter or an all-gather, and twice that for an"
        " all-reduce."
    )


def _described(cluster: plan.Cluster, inside: int) -> str:
    if inside == 1:
        return f"{cluster.network_name}, {quantity(cluster.network_bandwidth, 'B/s')} per GPU"
    return f"8 x {cluster.machine.name}, {cluster.link_name}, {quantity(cluster.link_bandwidth, 'B/s')}"


def _training(wires: list[tuple[str, plan.Cluster, int]]) -> Iterator[Part]:
    model = plan.find_model("llama-2-7b")
    size = 2.0 * model.parameters
    layer = size / model.layers
    ways = {  # what a step sends in bfloat16, layer by layer
        "data parallel": ("all_reduce",),
        "ZeRO 1 and 2": ("reduce_scatter", "all_gather"),
        "FSDP (ZeRO 3)": ("all_gather", "all_gather", "reduce_scatter"),
    }
    flops = forward_flops(model, 4096).training
    rows = []
    for name, ops in ways.items():
        sent = sum((2 if op == "all_reduce" else 1) * 7 / 8 * size for op in ops)
        times = [model.layers * sum(_seconds(op, layer, wire) for op in ops) for wire in wires]
        tokens = [time * _peak(cluster) / flops for time, (_, cluster, _) in zip(times, wires, strict=True)]
        shown = (f"{seconds(time)}, {count:.0f}" for time, count in zip(times, tokens, strict=True))
        rows.append((name, quantity(sent, "B"), *shown))
    yield Table(
        title=f"What a step of {model.name} sends on 8 GPUs: bytes of each GPU in a ring, time, and tokens",
        headers=("", "sent", *(name for name, _, _ in wires)),
        rows=tuple(rows),
        note="tokens: of each GPU and step whose products, at the peak of its matrix units, take as long as that; with"
        " more of them, communication can hide behind computation.",
    )
    yield from prose(
        f"The gradients of {model.parameters / 1e9:.2f} billion weights are {quantity(size, 'B')} in bfloat16. Data"
        " parallel sums them once. ZeRO 1 and 2 leave each rank its part of the sum and gather the new weights: the"
        " same bytes. FSDP gathers the weights for the forward and again for the backward pass: half as many again."
    )


def _peak(cluster: plan.Cluster) -> float:
    ceilings = cluster.machine.achievable or cluster.machine.theoretical
    assert ceilings is not None
    return ceilings.peak("bfloat16")


def _for_real(here: Here) -> Iterator[Part]:
    yield from prose(
        "Now for real: two processes of this machine, joined by gloo over the loopback. Their wire is the CPU itself,"
        " which copies what is sent, so the bytes of both ranks count. First a message goes there and back, small and"
        f" large, and each rank copies {quantity(SIZE, 'B')} to new memory; the collectives of as many bytes are"
        " predicted from these three: messages one after the other times the small one, bytes at the rate of the large"
        " one, and the copies that torch makes. gloo sends each half of an all-reduce in two segments: four messages."
        " Of an all-gather torch copies the result; a reduce-scatter gloo does not have: it is an all-reduce of a copy,"
        " of which a rank keeps its part. Both ranks may copy at once where cores are free, and sums come on top, so"
        " the band is wide."
    )
    if not here.measures:
        return
    here.progress("two processes")
    answers = two_ranks.run_two(SIZE)
    if answers is None:
        yield from prose(f"The two processes did not finish within {two_ranks.PATIENCE:.0f} s here.")
        return
    alone = answers[0]["alone"]
    moved = max(alone["large"] - alone["small"], 0.0) / SIZE
    yield from prose(
        f"A message takes {seconds(alone['small'])}, one of {quantity(SIZE, 'B')} {seconds(alone['large'])}"
        f" ({quantity(SIZE / alone['large'], 'B/s')}), and the copy {seconds(alone['copy'])}."
    )
    # By op: messages one after the other, bytes that both ranks send together over the size, and copies of it.
    sends = {
        "broadcast": (1, 1.0, 0),
        "all_reduce": (4, 2.0, 0),
        "reduce_scatter": (4, 2.0, 1),
        "all_gather": (1, 1.0, 1),
        "all_to_all": (1, 1.0, 0),
        "all_reduce of 1 kB": (4, 0.0, 0),
    }
    rows = [
        Row(
            what=op,
            predicted=messages * alone["small"] + share * SIZE * moved + copies * alone["copy"],
            measured=max(answer["seconds"][op] for answer in answers),
            low=0.4,
            high=2.5,
        )
        for op, (messages, share, copies) in sends.items()
    ]
    yield compared("Two processes over gloo", rows)
    right = [op for op in OPS if held_as_drawn(op, [answer["held"][op] for answer in answers])]
    wrong = [op for op in OPS if op not in right]
    yield from prose(
        f"After each of the {len(right)} both ranks held what the drawings say, block by block."
        if not wrong
        else f"Not as the drawings say: {', '.join(wrong)}."
    )


def held_as_drawn(op: str, held: list[list[list[float]]]) -> bool:
    """Whether each rank held the sums that `after` says, in every element of every block."""
    for blocks, found in zip(after(op, two_ranks.RANKS), held, strict=True):
        wanted = [sum(two_ranks.block_value(*piece) for piece in block) for block in blocks if block]
        if found != [[value] * two_ranks.ELEMENTS for value in wanted]:
            return False
    return True
