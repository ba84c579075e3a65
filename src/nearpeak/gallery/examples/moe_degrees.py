"""MoE under TP and EP: memory time against compute time for degrees 2 to 64.

The experts of a sparse layer can be split over GPUs in two ways. Tensor parallel gives every GPU a slice of every
expert and all the tokens; expert parallel gives every GPU whole experts and the tokens that are routed to them. The
operations and the weights of one GPU are the same both ways. What differs is how many bytes come with them, and that
decides whether the matrix units have something to do or wait for memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from nearpeak import plan
from nearpeak.gallery.parts import Drawing, Part, Plot, Prediction, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.plan.moe_degrees import MoeDegree, MoeLayer, degrees
from nearpeak.render.document import Table
from nearpeak.render.picture.plot import Series
from nearpeak.render.picture.svg import svg
from nearpeak.render.views.plan import moe
from nearpeak.units import quantity, seconds

LAYER = MoeLayer(experts=256, active=8, hidden=4096, intermediate=1536)
TOKENS = 8192
MODEL = plan.Model(  # the same numbers, as the title of the picture has them
    name="a model of 256 experts",
    mixers="A",
    feeds="E",
    hidden=LAYER.hidden,
    vocabulary=1,
    heads=32,
    kv_heads=32,
    head_dim=128,
    experts=LAYER.experts,
    active_experts=LAYER.active,
    expert_intermediate=LAYER.intermediate,
)


def example(context: Context) -> Iterator[Part]:
    """The plan for all degrees, then the products of one GPU run here at two of them."""
    cluster = context.cluster(64)
    machine = cluster.machine
    ceilings = machine.achievable or machine.theoretical
    assert ceilings is not None
    dtype = next(name for name in ("bfloat16", "float16", "float32") if name in {*ceilings.matrix, *ceilings.vector})
    splits = degrees(LAYER, TOKENS, cluster, dtype=dtype)
    tensor = [item for item in splits if item.split == "tensor"]
    expert = [item for item in splits if item.split == "expert"]
    ridge = machine.ridge(dtype)

    yield from prose(
        f"{TOKENS} tokens each visit {LAYER.active} of {LAYER.experts} experts, so an expert sees about"
        f" {TOKENS * LAYER.active // LAYER.experts} tokens. It has three matrices of {LAYER.hidden} x"
        f" {LAYER.intermediate} ({dtype}). The ridge of {machine.name} is at {ridge:.0f} FLOP per byte: with less work"
        " for each byte, memory limits."
    )
    scene = moe.picture(splits, MODEL, cluster)
    yield Drawing(title="Memory time against compute time by degree", described=scene.described, svg=svg(scene))
    yield Table(
        title=f"One of 64 x {machine.name}, forward",
        headers=("degree", "weights", "TP activations", "EP activations", "TP FLOP/B", "EP FLOP/B"),
        rows=tuple(
            (
                str(one.degree),
                quantity(one.weight_bytes, "B"),
                quantity(one.activation_bytes, "B"),
                quantity(other.activation_bytes, "B"),
                f"{_intensity(one):.0f}",
                f"{_intensity(other):.0f}",
            )
            for one, other in zip(tensor, expert, strict=True)
        ),
    )
    first, last = (tensor[0], expert[0]), (tensor[-1], expert[-1])
    yield from prose(
        f"From degree {first[0].degree} to {last[0].degree} the weights of a GPU shrink"
        f" {first[0].weight_bytes / last[0].weight_bytes:.0f} times both ways. Under TP every GPU still reads and"
        " writes every routed token at the full hidden size: its activations shrink only"
        f" {first[0].activation_bytes / last[0].activation_bytes:.1f} times. Under EP they shrink"
        f" {first[1].activation_bytes / last[1].activation_bytes:.0f} times, as the tokens are divided too."
        f" So the work for each byte falls to {_intensity(last[0]):.0f} FLOP under TP, and stays at"
        f" {_intensity(last[1]):.0f} under EP."
    )
    yield _plot(tensor, expert)
    yield from prose(_starved(tensor, expert), _network(tensor, expert))
    yield from _weak(cluster, dtype, {"TP": tensor, "EP": expert})

    small = context.pick(gpu=context.half, cpu=torch.float32)
    rows = list(_products(context, small))
    what = context.pick(gpu="as one batch", cpu="at a CPU's size, one after the other")
    yield prediction_table(f"The experts of one GPU: gate and up of all of them, {what}", [row for _, row in rows])
    at = rows[-1][0]
    predicted = [row.predicted or 0.0 for degree, row in rows if degree == at]
    ratio = predicted[0] / predicted[1]
    if ratio > 1.2:
        line = (
            f"At degree {at} both do the same operations, and TP is predicted to take {ratio:.1f} times as long as EP"
        )
    else:
        line = (
            f"The ridge here is at {context.machine.ridge(str(small)):.1f} FLOP per byte, and even the slices"
            " have more work than that for each byte: both are predicted to take the same time"
        )
    measured = [row.measured for degree, row in rows if degree == at]
    if measured[0] and measured[1]:
        line += f"; measured, TP took {measured[0] / measured[1]:.1f} times as long as EP"
    yield from prose(line + ".")


def _intensity(item: MoeDegree) -> float:
    return item.flops / (item.weight_bytes + item.activation_bytes)


def _plot(tensor: list[MoeDegree], expert: list[MoeDegree]) -> Plot:
    names = (("TP", tensor), ("EP", expert))
    shares = [
        Series(name=name, points=tuple((item.degree, item.compute_seconds / item.memory_seconds) for item in items))
        for name, items in names
    ]
    ends = ((tensor[0].degree, 1.0), (tensor[-1].degree, 1.0))
    shares.append(Series(name="balance", points=ends, markers=False, dashed=True))
    return Plot(
        title="Compute time over memory time",
        series=tuple(shares),
        x_label="degree (GPUs)",
        y_label="compute / memory",
        y_unit="x",
        log_x=True,
        log_y=True,
    )


def _weak(cluster: plan.Cluster, dtype: str, fixed: dict[str, list[MoeDegree]]) -> Iterator[Part]:
    """The same with tokens that grow with the degree: memory time against compute time, a point for each degree."""
    grown = [
        item
        for degree in [one.degree for one in fixed["TP"]]
        for item in degrees(LAYER, TOKENS // 2 * degree, cluster, at=(degree,), dtype=dtype)
    ]
    growing = {
        "TP": [one for one in grown if one.split == "tensor"],
        "EP": [one for one in grown if one.split == "expert"],
    }
    series = [
        Series(
            name=f"{name}, {what}",
            points=tuple((one.memory_seconds, one.compute_seconds) for one in items),
            labels=tuple(f"{name} {one.degree}" for one in items),
            texts=("",) * (len(items) - 1) + (str(items[-1].degree),),
            dashed=what == "tokens fixed",
            color=number,
        )
        for what, groups in (("tokens fixed", fixed), ("tokens grow", growing))
        for number, (name, items) in enumerate(groups.items())
    ]
    times = [value for one in series for point in one.points for value in point]
    series.append(
        Series(
            name="balance",
            points=((min(times), min(times)), (max(times), max(times))),
            markers=False,
            dashed=True,
            color=5,
        )
    )
    yield Plot(
        title="Memory time against compute time, from degree 2 to degree 64",
        series=tuple(series),
        x_label="memory time",
        y_label="compute time",
        x_unit="s",
        log_x=True,
        log_y=True,
    )
    first, last = ({name: items[place] for name, items in growing.items()} for place in (0, -1))
    yield from prose(
        f"In training the batch grows with the GPUs. With {TOKENS // 2} tokens per GPU, EP has the same tokens on a GPU"
        " at every degree and ever fewer experts to read, so that its points fall towards less memory time at the same"
        f" compute time: {last['EP'].memory_seconds / first['EP'].memory_seconds:.2f} times the memory time at degree"
        f" {last['EP'].degree}. TP gives all tokens of the group to every GPU: its memory time grows"
        f" {last['TP'].memory_seconds / first['TP'].memory_seconds:.1f} times, its compute time"
        f" {last['TP'].compute_seconds / first['TP'].compute_seconds:.1f} times."
    )


def _starved(tensor: list[MoeDegree], expert: list[MoeDegree]) -> str:
    busy = [items[-1].compute_seconds / items[-1].memory_seconds for items in (tensor, expert)]
    text = (
        f"At degree {tensor[-1].degree} compute takes {busy[0]:.2f} times as long as memory under TP, and"
        f" {busy[1]:.2f} times under EP."
    )
    padded = tensor[-1].padded_flops / tensor[-1].flops
    width = LAYER.intermediate // tensor[-1].degree
    if padded > 1.5:
        text += (
            f" Of what is computed under TP only 1 / {padded:.1f} is asked for: a slice is {width} columns wide, and"
            " a tile of the matrix units is wider, so the rest is padding."
        )
    return text


def _network(tensor: list[MoeDegree], expert: list[MoeDegree]) -> str:
    one, other = tensor[-1], expert[-1]
    text = (
        f"With communication a layer takes {seconds(one.seconds)} under TP ({one.communication}) and"
        f" {seconds(other.seconds)} under EP ({other.communication})."
    )
    if one.limiter == other.limiter == "communication":
        text += f" At degree {one.degree} the wires are the largest part of both."
    elif other.limiter == "communication":
        text += " Under EP the wires are now the largest part."
    return text


def _products(context: Context, dtype: torch.dtype) -> Iterator[tuple[int, Prediction]]:
    """Gate and up of all experts that a GPU has: (experts, tokens, hidden) times (experts, hidden, width)."""
    experts, tokens, hidden, width = context.pick(gpu=(128, 256, 4096, 3072), cpu=(8, 128, 1024, 1024))
    run: Callable[..., torch.Tensor] = torch.bmm if context.gpu else _one_by_one
    for degree in context.pick(gpu=(4, 32), cpu=(2, 8)):
        for name, count, columns in (("TP", experts, width // degree), ("EP", experts // degree, width)):
            x = torch.randn(count, tokens, hidden, dtype=dtype, device=context.tensors)
            weights = torch.randn(count, hidden, columns, dtype=dtype, device=context.tensors)
            yield degree, context.row(f"{name} {degree}: {count} of {columns} columns", run, x, weights)


def _one_by_one(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.stack([tokens @ matrix for tokens, matrix in zip(x, weights, strict=True)])
