"""A timing and a comparison as text: at most 80 columns, plain ASCII, no color."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from nearpeak.measure.timing import Comparison, Environment, Flag, InputStatistics, Timing
from nearpeak.render.text import table
from nearpeak.units import percent, quantity, seconds, seconds_between, significant

WIDTH = 80
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


def text(timing: Timing) -> str:
    """The card of one measurement."""
    parts = [
        _headline(timing),
        _bound(timing),
        _other_times(timing),
        _cpu_bound(timing),
        _facts(timing),
        _flags([("", timing.flags)]),
    ]
    return "\n\n".join(part for part in parts if part)


def comparison_text(comparison: Comparison) -> str:
    """The card of a comparison: the verdict first."""
    a, b = comparison.a, comparison.b
    relation = {
        "FASTER": f"{title(b)} is FASTER than {title(a)}",
        "SLOWER": f"{title(b)} is SLOWER than {title(a)}",
        "EQUIVALENT": f"{title(b)} is EQUIVALENT to {title(a)} within {percent(comparison.margin)}",
        "INCONCLUSIVE": f"INCONCLUSIVE: cannot tell whether {title(b)} or {title(a)} is faster",
    }[comparison.verdict]
    partial = " PARTIAL: the run was interrupted." if comparison.partial else ""
    facts = {
        "ratio": f"{comparison.ratio:.4f} of the time [{comparison.low:.4f}, {comparison.high:.4f}], "
        f"{_speed(comparison.ratio)}; {percent(comparison.confidence)} interval",
        "seen": f"{comparison.pairs} interleaved pairs of blocks; a difference of {percent(comparison.detectable, 2)} "
        "would have been seen four times out of five",
    }
    if comparison.verdict == "INCONCLUSIVE":
        facts["remedy"] = "Give it more time with max_seconds, or accept a wider margin."
    rows = [
        [letter, title(timing, 36), seconds_between(timing.seconds, timing.low, timing.high), timing.grade]
        for letter, timing in (("a", a), ("b", b))
    ]
    parts = [
        _wrapped(f"{relation}.{partial}"),
        _labeled(facts),
        table(["", "name", f"{a.kind} time, {a.cache} cache", "grade"], rows, "lllr"),
        _labeled(
            {
                "method": plain(a.method if a.method == b.method else f"a: {a.method}; b: {b.method}"),
                "measured": _environment(b.environment),
            }
        ),
        _flags([("a", a.flags), ("b", b.flags)]),
    ]
    return "\n\n".join(part for part in parts if part)


def plain(value: str, longest: int = 0) -> str:
    """Text from outside as printable ASCII on one line, cut to `longest` characters where that is given.

    >>> plain("gr\\u00f6\\u00dfe\\x1b[31m"), plain("abcdefgh", 6)
    ('gr\\\\xf6\\\\xdfe\\\\x1b[31m', 'abc...')
    """
    safe = " ".join(value.split())
    safe = "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode("ascii") for c in safe)
    return safe[: longest - 3] + "..." if longest and len(safe) > longest else safe


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


def _headline(timing: Timing) -> str:
    name = f"{title(timing)}  {parameters_text(timing.parameters)}".rstrip()
    time = seconds_between(timing.seconds, timing.low, timing.high)
    partial = "  PARTIAL: interrupted" if timing.partial else ""
    regime = f", {timing.regime}" if timing.kind != "cpu" else ""
    how = f"{timing.kind} time, {timing.cache} cache{regime}"
    return "\n".join(
        [
            _wrapped(name, hanging=2),
            f"{time}  grade {timing.grade}{partial}",
            _wrapped(f"{how}; median of {_count(len(timing.blocks), 'block')}, {percent(timing.confidence)} interval"),
        ]
    )


_CEILINGS = {"measured": "", "derated": " (datasheet, derated; calibrate for its own figure)", None: ""}


def _bound(timing: Timing) -> str:
    """How near the roofline, what limits, and the machine's figure that the bound was computed with."""
    moved, computed = rates(timing)
    reached = " and ".join(quantity(rate, unit) for rate, unit in ((moved, "B/s"), (computed, "FLOP/s")) if rate)
    facts = {}
    work, bound, limiter = timing.work, timing.bound_seconds, timing.bound_limiter
    if work is not None and bound and timing.share_of_bound is not None:
        at = {
            "memory": f"{quantity(work.bytes, 'B')} at the machine's {quantity(work.bytes / bound, 'B/s')}",
            "compute": f"{quantity(computed and computed * timing.seconds, 'FLOP')} at the machine's "
            f"{quantity(computed and computed * timing.seconds / bound, 'FLOP/s')}",
            "launch": "the machine's cost of one launch",
        }.get(limiter or "", "")
        facts["bound"] = (
            f"{percent(timing.share_of_bound)} of the roofline; {limiter} limits: {seconds(bound)}"
            f"{f', {at}' if at else ''}{_CEILINGS[timing.bound_ceilings]}"
        )
    elif work is not None:
        facts["bound"] = "none: this machine is not calibrated. Run `nearpeak machine --calibrate`."
    if reached:
        facts["reached"] = reached
    return _labeled(facts)


def _other_times(timing: Timing) -> str:
    if not timing.other_seconds:
        return ""
    taken = {timing.kind: timing.seconds, **timing.other_seconds}
    kinds = [kind for kind in MEANINGS if kind in taken] + [kind for kind in taken if kind not in MEANINGS]
    rows = [
        [
            plain(kind, 12),
            seconds(taken[kind]),
            MEANINGS.get(kind, "") + (" (the headline)" if kind == timing.kind else ""),
        ]
        for kind in kinds
    ]
    return table(["time", "per call", "meaning"], rows, "lrl")


def _cpu_bound(timing: Timing) -> str:
    """Whether the host can feed the device, in words, with the remedy."""
    enqueue = timing.other_seconds.get("enqueue")
    if timing.cpu_bound is None or enqueue is None:
        return ""
    busy = seconds(timing.seconds)
    if timing.cpu_bound:
        return _wrapped(
            f"CPU-bound: the host needs {seconds(enqueue)} to enqueue what the device does in {busy}. Called in a loop "
            "it runs at the host's pace. Capture it in a CUDA graph, use torch.compile, or do more work per call."
        )
    return _wrapped(f"Not CPU-bound: the host enqueues a call in {seconds(enqueue)}, the device needs {busy}.")


def _facts(timing: Timing) -> str:
    facts = {}
    if timing.kernels:
        facts["kernels"] = _kernels(timing.kernels)
    if timing.inputs:
        facts["inputs"] = _inputs(timing.inputs)
    facts["method"] = "; ".join(part for part in (plain(timing.method), _conditions(timing)) if part)
    facts["measured"] = _environment(timing.environment)
    return _labeled(facts)


def _kernels(kernels: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    for kernel in kernels:
        name = kernel_name(kernel)
        counts[name] = counts.get(name, 0) + 1
    names = [f"{name} x{count}" if count > 1 else name for name, count in counts.items()]
    more = f", and {len(names) - SHOWN_KERNELS} more" if len(names) > SHOWN_KERNELS else ""
    return f"{len(kernels)}: {', '.join(names[:SHOWN_KERNELS])}{more}"


def _inputs(inputs: Sequence[InputStatistics]) -> str:
    shown = [_input(statistics) for statistics in inputs[:SHOWN_INPUTS]]
    more = f"; and {len(inputs) - SHOWN_INPUTS} more" if len(inputs) > SHOWN_INPUTS else ""
    return "; ".join(shown) + more


def _input(statistics: InputStatistics) -> str:
    shape = "x".join(map(str, statistics.shape)) or "scalar"
    told = [f"{plain(statistics.dtype)} {shape}"]
    if statistics.degenerate:
        told.append(statistics.degenerate)
    elif statistics.mean is not None and statistics.std is not None:
        told.append(f"mean {_three_digits(statistics.mean)}, std {_three_digits(statistics.std)}")
    return " ".join(told)


def _three_digits(value: float) -> str:
    return f"{value:.3g}"


def _conditions(timing: Timing) -> str:
    """Clock, power and temperature over the blocks, as ranges."""
    told = []
    for field, unit in (("clock_hz", "Hz"), ("power_watts", "W"), ("temperature_celsius", "C")):
        values = [getattr(block.conditions, field) for block in timing.blocks]
        known = sorted(value for value in values if value is not None)
        if known:
            low, high = (
                (f"{value:.0f} C" for value in (known[0], known[-1]))
                if unit == "C"
                else (quantity(value, unit) for value in (known[0], known[-1]))
            )
            told.append(low if low == high else f"{low} to {high}")
    return ", ".join(told)


def _environment(environment: Environment) -> str:
    driver = f", driver {plain(environment.driver)}" if environment.driver else ""
    return (
        f"{plain(environment.date)} on {plain(environment.device, 60) or 'an unnamed device'}{driver}, torch "
        f"{plain(environment.torch)}, {_count(environment.threads, 'thread')}, nearpeak {plain(environment.nearpeak)}"
    )


def _flags(groups: Iterable[tuple[str, Sequence[Flag]]]) -> str:
    """Every flag with its evidence and its remedy, the worst first."""
    order = {"wrong": 0, "doubt": 1, "note": 2}
    found = [(letter, flag) for letter, flags in groups for flag in flags]
    found.sort(key=lambda item: order[item[1].severity])
    lines = []
    for letter, flag in found:
        whose = f" ({letter})" if letter else ""
        lines.append(
            _wrapped(f"{flag.severity:<7}{plain(flag.name)}{whose}: {plain(flag.evidence)}", hanging=LABEL - 3)
        )
        lines.append(_wrapped(f"{'':<7}-> {plain(flag.remedy)}", hanging=LABEL))
    return "\n".join(lines)


def _speed(ratio: float) -> str:
    return f"{significant(1 / ratio)} x as fast" if ratio > 0 else "too fast to tell"


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"


def _labeled(facts: Mapping[str, str]) -> str:
    return "\n".join(_wrapped(f"{name:<{LABEL}}{value}", hanging=LABEL) for name, value in facts.items())


def _wrapped(line: str, hanging: int = 0) -> str:
    """The line in as many of at most 80 columns; only a word longer than a line is broken."""
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * hanging, break_on_hyphens=False)
