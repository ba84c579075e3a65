"""MFU: what it counts, what is good, and where it misleads.

Model FLOPs utilization is the operations that a model needs, over the time that they took and the peak of the machine.
The time is measured and the peak is on the datasheet, but "needs" is a convention: whether the embedding table counts,
whether attention counts under its mask, whether the forward pass that checkpointing runs again counts. A small
transformer is trained here with and without checkpointing, and its MFU is read by each of them; then published runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nearpeak import plan
from nearpeak.gallery.examples.small_llama import Llama, shape
from nearpeak.gallery.parts import Part, Prediction, StackedBars, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.machines import catalogue
from nearpeak.plan.models.model import forward_flops
from nearpeak.render.document import Table
from nearpeak.render.picture.bars import Bar
from nearpeak.units import percent, quantity


@dataclass(frozen=True, slots=True)
class Run:
    """A published training run on H100s in bfloat16, and the MFU that was printed with it."""

    id: str
    """Of its row in benchmarks/measurements/measured_training.csv, which names the source, commit and table."""
    source: str
    model: str
    gpus: int
    sequence: int
    batch: int
    seconds: float
    printed: float


PUBLISHED = (
    Run("llmfoundry-010", "mosaicml/llm-foundry", "mpt-7b", 512, 2048, 3072, 1.2707, 0.4220),
    Run("llmfoundry-001", "mosaicml/llm-foundry", "mpt-70b", 512, 2048, 4096, 16.2701, 0.4125),
    Run("dgxc-016", "NVIDIA/dgxc-benchmarking", "llama-3-70b", 2048, 8192, 4096, 14.84, 0.5368),
    Run("dgxc-028", "NVIDIA/dgxc-benchmarking", "llama-3.1-405b", 2304, 8192, 1008, 17.7, 0.5423),
    Run("dgxc-055", "NVIDIA/dgxc-benchmarking", "nemotron-4-15b", 16, 4096, 64, 2.812, 0.6249),
    Run("dgxc-123", "NVIDIA/dgxc-benchmarking", "nemotron-4-15b", 16, 4096, 64, 2.746, 0.567),
)


def conventions(model: plan.Model, sequence: int) -> dict[str, float]:
    """FLOP of one token, forward and backward, by ways of counting that are in use.

    A weight costs a token 2 FLOP forward and 4 backward. Attention over s tokens costs 4 s for each channel and layer
    forward, and half of it is above the diagonal.
    """
    table = 0 if model.tied else model.vocabulary * model.hidden
    weights = 6.0 * (model.active_parameters - table)
    whole = 12.0 * model.attention_layers * model.heads * model.head_dim * sequence
    return {
        "6N": 6.0 * model.active_parameters,
        "6N, no embedding table": weights,
        "and attention, whole": weights + whole,
        "and attention, causal": weights + whole / 2,
    }


def example(context: Context) -> Iterator[Part]:
    """What a small model's FLOPs are, its MFU, and that of others."""
    model = context.pick(
        gpu=shape(layers=8, hidden=2048, heads=16, intermediate=5632, vocabulary=32000),
        cpu=shape(layers=4, hidden=256, heads=4, intermediate=704, vocabulary=4096),
    )
    batch, sequence = context.pick(gpu=(4, 4096), cpu=(1, 256))
    dtype = context.pick(gpu=context.half, cpu=torch.float32)
    tokens = batch * sequence
    flops = forward_flops(model, sequence)
    yield _shares(model, sequence)
    layers = flops.total - flops.output
    yield from prose(
        f"A token costs {quantity(flops.training, 'FLOP')} forward and backward, attention under its mask. The output"
        f" layer is {flops.output / flops.total:.0%} of that here, because the model is small: of llama-3.1-405b it is"
        f" {_output_share('llama-3.1-405b', 8192):.1%}. With checkpointing the layers run forward once more:"
        f" {layers / flops.training:.0%} on top, which hardware does and the model does not need."
    )
    ways = {"kept": _step(context, model, dtype, batch, sequence, False)}
    ways["checkpointed"] = _step(context, model, dtype, batch, sequence, True)
    rows = {name: context.row(f"activations {name}", step) for name, step in ways.items()}
    yield prediction_table(f"Forward and backward of {batch} x {sequence} tokens", list(rows.values()))
    ceilings = context.machine.theoretical or context.machine.achievable
    assert ceilings is not None
    peak = ceilings.peak(str(dtype))
    yield _table(model, sequence, tokens, peak, rows, layers)
    if context.machine.theoretical is None:
        yield from prose("A CPU has no datasheet's peak; the one here is what nearpeak measured on it.")
    yield from prose(*_read(context, rows, conventions(model, sequence), layers, tokens, peak))
    yield from _published()


def _output_share(name: str, sequence: int) -> float:
    flops = forward_flops(plan.find_model(name), sequence)
    return flops.output / flops.total


def _shares(small: plan.Model, sequence: int) -> StackedBars:
    bars = []
    models = [(small, sequence)] + [(plan.find_model(name), 8192) for name in ("llama-3-8b", "llama-3.1-405b")]
    for model, length in models:
        flops = forward_flops(model, length)
        pieces = {
            "projections": flops.attention_gemm,
            "scores": flops.scores,
            "feed-forward": flops.dense,
            "output": flops.output,
        }
        shares = tuple((name, value / flops.total) for name, value in pieces.items())
        bars.append(Bar(name=model.name, pieces=shares))
    return StackedBars(
        title=f"Where the FLOPs of a token are: the small one at {sequence} tokens, the others at 8192",
        bars=tuple(bars),
        unit="%",
        are_summed=False,
    )


def _step(
    context: Context, model: plan.Model, dtype: torch.dtype, batch: int, sequence: int, recompute: bool
) -> Callable[[], None]:
    with context.building():
        network = Llama(model, recompute=recompute).to(context.device, dtype)
        tokens = torch.zeros(batch, sequence + 1, dtype=torch.long, device=context.device)

    def step() -> None:
        network.zero_grad()
        network(tokens).backward()

    return step


def _table(
    model: plan.Model, sequence: int, tokens: int, peak: float, rows: dict[str, Prediction], layers: float
) -> Table:
    what = "measured" if all(row.measured for row in rows.values()) else "predicted"
    times = [(name, getattr(row, what)) for name, row in rows.items()]
    counted = conventions(model, sequence)
    lines = [
        (name, quantity(count, "FLOP"), *(percent(count * tokens / (time * peak)) for _, time in times))
        for name, count in counted.items()
    ]
    causal = counted["and attention, causal"]
    done = [causal + (layers if name.startswith("checkpointed") else 0.0) for name, _ in times]
    shares = (percent(count * tokens / (time * peak)) for count, (_, time) in zip(done, times, strict=True))
    lines.append(("HFU: as it was done", quantity(causal + layers, "FLOP"), *shares))
    return Table(
        title=f"MFU by convention, {what}, against {quantity(peak, 'FLOP/s')}",
        headers=("", "of a token", *rows),
        rows=tuple(lines),
        note="HFU counts what the hardware did: with checkpointing the layers' forward pass twice, as the column of"
        " FLOP shows.",
    )


def _read(
    context: Context, rows: dict[str, Prediction], counted: dict[str, float], layers: float, tokens: int, peak: float
) -> Iterator[str]:
    what = "measured" if context.measures else "predicted"
    training = counted["and attention, causal"]
    kept, again = (getattr(rows[name], what) for name in ("kept", "checkpointed"))
    mfu = [training * tokens / (time * peak) for time in (kept, again)]
    hfu = (training + layers) * tokens / (again * peak)
    yield (
        f"Checkpointing makes the step {again / kept:.2f} times as long ({what}). MFU follows: {mfu[0]:.1%} becomes"
        f" {mfu[1]:.1%}. HFU with checkpointing reads {hfu:.1%}: it says how busy the hardware is, needless work or"
        " not. So MFU compares ways to train one model, and HFU tells how near kernels are to the peak."
    )
    yield (
        f"The largest of the four readings of one step is {max(counted.values()) / min(counted.values()) - 1:.0%} above"
        " the least, and nothing ran faster for it. An MFU is read with its convention or not at all."
    )


def _published() -> Iterator[Part]:
    peak = catalogue.find("h100-sxm").theoretical
    assert peak is not None
    lines = []
    for run in PUBLISHED:
        model = plan.find_model(run.model)
        rate = run.batch * run.sequence / (run.seconds * run.gpus * peak.peak("bfloat16"))
        counted = conventions(model, run.sequence)
        read = (counted[name] * rate for name in ("6N", "and attention, whole", "and attention, causal"))
        lines.append((run.model, str(run.gpus), f"{run.seconds:g} s", percent(run.printed), *map(percent, read)))
    yield Table(
        title="Published runs on H100s in bfloat16: the MFU that was printed, and three readings of the same step time",
        headers=("model", "GPUs", "step", "printed", "6N", "whole", "causal"),
        rows=tuple(lines),
        note=f"Sources: {', '.join(sorted({run.source for run in PUBLISHED}))}; nearpeak's repository has each row with"
        " its commit and table in benchmarks/measurements/measured_training.csv.",
    )
    causal = [float(line[-1].removesuffix(" %")) for line in lines]
    before, after = PUBLISHED[-2], PUBLISHED[-1]
    yield from prose(
        f"Read alike, attention under its mask, these runs reach {min(causal):.0f} to {max(causal):.0f} %: what was"
        " published as good on this hardware. The last two are the same model on as many GPUs, from two releases:"
        f" the step became {1 - after.seconds / before.seconds:.1%} shorter, and the printed MFU fell from"
        f" {before.printed:.1%} to {after.printed:.1%}, because the second counts otherwise."
    )
