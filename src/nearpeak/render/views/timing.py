"""A timing and a comparison of two as documents: the time with its interval and grade, its bound, method and flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nearpeak.measure.timing import Comparison, Environment, Flag, InputStatistics, Timing
from nearpeak.render.document import Block, Document, Fact, Facts, Paragraph, Table
from nearpeak.render.text import count, plain
from nearpeak.units import percent, quantity, seconds, seconds_between, significant

LABEL = 10
SHOWN_KERNELS = 4
SHOWN_INPUTS = 4

MEANINGS = {
    "device": "the device is occupied, launch hidden",
    "graph": "one more call in a CUDA graph",
    "pipelined": "wall time with many calls in flight, as in training",
    "latency": "wall time, idle device to idle device",
    "enqueue": "host time until the call returns",
    "cpu": "wall time of the call on the CPU",
}
"""Each kind of time in one line."""
_CEILINGS = {"measured": "", "derated": " (datasheet, derated; calibrate for its own figure)", None: ""}


def document(timing: Timing) -> Document:
    """The report of one measurement."""
    partial = "  PARTIAL: interrupted" if timing.partial else ""
    regime = f", {timing.regime}" if timing.kind != "cpu" else ""
    return Document(
        title=f"{title(timing)}  {parameters_text(timing.parameters)}".rstrip(),
        facts=(
            f"{seconds_between(timing.seconds, timing.low, timing.high)}  grade {timing.grade}{partial}",
            f"{timing.kind} time, {timing.cache} cache{regime}; median of {count(len(timing.blocks), 'block')}, "
            f"{percent(timing.confidence)} interval",
        ),
        parts=tuple(_parts(timing)),
    )


def _parts(timing: Timing) -> Iterator[Block]:
    bound = tuple(_bound(timing))
    if bound:
        yield Facts(facts=bound, width=LABEL)
    if timing.other_seconds:
        yield _other_times(timing)
    yield from _cpu_bound(timing)
    yield Facts(facts=tuple(_facts(timing)), width=LABEL)
    yield from _flags([("", timing.flags)])


def comparison_document(comparison: Comparison) -> Document:
    """The report of a comparison: the verdict first."""
    a, b = comparison.a, comparison.b
    relation = {
        "FASTER": f"{title(b)} is FASTER than {title(a)}",
        "SLOWER": f"{title(b)} is SLOWER than {title(a)}",
        "EQUIVALENT": f"{title(b)} is EQUIVALENT to {title(a)} within {percent(comparison.margin)}",
        "INCONCLUSIVE": f"INCONCLUSIVE: cannot tell whether {title(b)} or {title(a)} is faster",
    }[comparison.verdict]
    partial = " PARTIAL: the run was interrupted." if comparison.partial else ""
    speed = f"{significant(1 / comparison.ratio)} x as fast" if comparison.ratio > 0 else "too fast to tell"
    facts = [
        Fact(
            label="ratio",
            text=f"{comparison.ratio:.4f} of the time [{comparison.low:.4f}, {comparison.high:.4f}], {speed}; "
            f"{percent(comparison.confidence)} interval",
        ),
        Fact(
            label="seen",
            text=f"{comparison.pairs} interleaved pairs of blocks; a difference of {percent(comparison.detectable, 2)} "
            "would have been seen four times out of five",
        ),
    ]
    if comparison.verdict == "INCONCLUSIVE":
        remedy = "Give it more time with max_seconds, or accept a wider margin."
        facts.append(Fact(label="remedy", text=remedy))
    rows = tuple(
        (letter, title(timing, 36), seconds_between(timing.seconds, timing.low, timing.high), timing.grade)
        for letter, timing in (("a", a), ("b", b))
    )
    method = a.method if a.method == b.method else f"a: {a.method}; b: {b.method}"
    return Document(
        title=f"{relation}.{partial}",
        parts=(
            Facts(facts=tuple(facts), width=LABEL),
            Table(headers=("", "name", f"{a.kind} time, {a.cache} cache", "grade"), rows=rows, align="lllr"),
            Facts(
                facts=(
                    Fact(label="method", text=method),
                    Fact(label="measured", text=_environment(b.environment)),
                ),
                width=LABEL,
            ),
            *_flags([("a", a.flags), ("b", b.flags)]),
        ),
    )


def title(timing: Timing, longest: int = 60) -> str:
    """The name of what was timed."""
    return plain(timing.name, longest) or "unnamed"


def parameters_text(parameters: Mapping[str, str]) -> str:
    """ "rows=4096 dtype=float16"."""
    return " ".join(f"{plain(key, 30)}={plain(value, 40)}" for key, value in parameters.items())


def kernel_name(name: str, longest: int = 44) -> str:
    """The function's own name out of a demangled C++ signature.

    >>> kernel_name("void at::native::(anonymous namespace)::softmax_warp_forward<float, 10>(float*, int)")
    'softmax_warp_forward'
    """
    bare = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    bare = re.split(r"[<(]", bare, maxsplit=1)[0].rpartition("::")[2].strip()
    return plain(bare or name, longest)


def rates(timing: Timing) -> tuple[float | None, float | None]:
    """Bytes per second and FLOP per second that the stated work and the time give; None where there is no such work."""
    work = timing.work
    if work is None or timing.seconds <= 0:
        return None, None
    flops = sum(work.flops.values()) + sum(work.vector_flops.values())
    return (work.bytes / timing.seconds or None), (flops / timing.seconds or None)


def _bound(timing: Timing) -> Iterator[Fact]:
    """How near the roofline, what limits, and the machine's figure that the bound was computed with."""
    moved, computed = rates(timing)
    work, bound, limiter = timing.work, timing.bound_seconds, timing.bound_limiter
    if work is not None and bound and timing.share_of_bound is not None:
        flops = computed and computed * timing.seconds
        figure = {
            "memory": f", {quantity(work.bytes, 'B')} at the machine's {quantity(work.bytes / bound, 'B/s')}",
            "compute": f", {quantity(flops, 'FLOP')} at the machine's {quantity(flops and flops / bound, 'FLOP/s')}",
            "launch": ", the machine's cost of one launch",
        }.get(limiter or "", "")
        yield Fact(
            label="bound",
            text=f"{percent(timing.share_of_bound)} of the roofline; {limiter} limits: {seconds(bound)}{figure}"
            f"{_CEILINGS[timing.bound_ceilings]}",
            share=timing.share_of_bound,
        )
    elif work is not None:
        yield Fact(label="bound", text="none: this machine is not calibrated. Run `nearpeak machine --calibrate`.")
    reached = " and ".join(quantity(rate, unit) for rate, unit in ((moved, "B/s"), (computed, "FLOP/s")) if rate)
    if reached:
        yield Fact(label="reached", text=reached)


def _other_times(timing: Timing) -> Table:
    times = {timing.kind: timing.seconds, **timing.other_seconds}
    kinds = [kind for kind in MEANINGS if kind in times] + [kind for kind in times if kind not in MEANINGS]
    rows = tuple(
        (
            plain(kind, 12),
            seconds(times[kind]),
            MEANINGS.get(kind, "") + (" (the headline)" if kind == timing.kind else ""),
        )
        for kind in kinds
    )
    return Table(headers=("time", "per call", "meaning"), rows=rows, align="lrl")


def _cpu_bound(timing: Timing) -> Iterator[Paragraph]:
    """Whether the host can feed the device, in words, with the remedy."""
    enqueue = timing.other_seconds.get("enqueue")
    if timing.cpu_bound is None or enqueue is None:
        return
    busy = seconds(timing.seconds)
    yield Paragraph(
        text=f"CPU-bound: the host needs {seconds(enqueue)} to enqueue what the device does in {busy}. Called in a "
        "loop it runs at the host's pace. Capture it in a CUDA graph, use torch.compile, or do more work per call."
        if timing.cpu_bound
        else f"Not CPU-bound: the host enqueues a call in {seconds(enqueue)}, the device needs {busy}."
    )


def _facts(timing: Timing) -> Iterator[Fact]:
    if timing.kernels:
        yield Fact(label="kernels", text=_kernels(timing.kernels))
    if timing.inputs:
        yield Fact(label="inputs", text=_inputs(timing.inputs))
    if timing.quantiles:
        shown = ", ".join(f"{name} {seconds(value)}" for name, value in timing.quantiles.items())
        yield Fact(label="calls", text=shown)
    method = "; ".join(part for part in (plain(timing.method), _conditions(timing)) if part)
    yield Fact(label="method", text=method)
    yield Fact(label="measured", text=_environment(timing.environment))


def _kernels(kernels: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    for kernel in kernels:
        name = kernel_name(kernel)
        counts[name] = counts.get(name, 0) + 1
    names = [f"{name} x{number}" if number > 1 else name for name, number in counts.items()]
    more = f", and {len(names) - SHOWN_KERNELS} more" if len(names) > SHOWN_KERNELS else ""
    return f"{len(kernels)}: {', '.join(names[:SHOWN_KERNELS])}{more}"


def _inputs(inputs: Sequence[InputStatistics]) -> str:
    more = f"; and {len(inputs) - SHOWN_INPUTS} more" if len(inputs) > SHOWN_INPUTS else ""
    return "; ".join(_input(statistics) for statistics in inputs[:SHOWN_INPUTS]) + more


def _input(statistics: InputStatistics) -> str:
    shape = "x".join(map(str, statistics.shape)) or "scalar"
    values = ""
    if statistics.degenerate:
        values = f" {statistics.degenerate}"
    elif statistics.mean is not None and statistics.std is not None:
        values = f" mean {statistics.mean:.3g}, std {statistics.std:.3g}"
    return f"{plain(statistics.dtype)} {shape}{values}"


def _conditions(timing: Timing) -> str:
    """Clock, power and temperature over the blocks, as ranges."""
    ranges = []
    for field, unit in (("clock_hz", "Hz"), ("power_watts", "W"), ("temperature_celsius", "C")):
        values = [getattr(block.conditions, field) for block in timing.blocks]
        known = sorted(value for value in values if value is not None)
        if known:
            low, high = (
                (f"{value:.0f} C" for value in (known[0], known[-1]))
                if unit == "C"
                else (quantity(value, unit) for value in (known[0], known[-1]))
            )
            ranges.append(low if low == high else f"{low} to {high}")
    return ", ".join(ranges)


def _environment(environment: Environment) -> str:
    driver = f", driver {plain(environment.driver)}" if environment.driver else ""
    return (
        f"{plain(environment.date)} on {plain(environment.device, 60) or 'an unnamed device'}{driver}, torch "
        f"{plain(environment.torch)}, {count(environment.threads, 'thread')}, nearpeak {plain(environment.nearpeak)}"
    )


def _flags(groups: Iterable[tuple[str, Sequence[Flag]]]) -> Iterator[Facts]:
    """Every flag with its evidence and its remedy, the worst first."""
    order = {"wrong": 0, "doubt": 1, "note": 2}
    flags = [(letter, flag) for letter, flags in groups for flag in flags]
    flags.sort(key=lambda item: order[item[1].severity])
    facts = tuple(
        Fact(
            label=flag.severity,
            text=f"{plain(flag.name)}{f' ({letter})' if letter else ''}: {plain(flag.evidence)}",
            advice=flag.remedy,
        )
        for letter, flag in flags
    )
    if facts:
        yield Facts(facts=facts, width=7)
