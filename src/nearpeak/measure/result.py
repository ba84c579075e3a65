"""From a finished series to a `Timing`: the interval, the bound beside it, and the verdict on who waits for whom."""

from __future__ import annotations

import datetime
import platform
from dataclasses import dataclass
from typing import Literal

import torch

import nearpeak
from nearpeak.bound.roofline import bound
from nearpeak.machines.detect import cpu_facts
from nearpeak.machines.model import Machine
from nearpeak.measure.assess import interval_of
from nearpeak.measure.flags import Flag, raise_flag
from nearpeak.measure.inputs.statistics import describe
from nearpeak.measure.machine import known_machine
from nearpeak.measure.options import Options
from nearpeak.measure.subject import Subject
from nearpeak.measure.timing import Block, Environment, Timing
from nearpeak.units import percent, seconds

CPU_BOUND_MARGIN = 1.1
ROOFLINE_SLACK = 0.97
"""A time below this share of its bound is impossible; less is the error of the two measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The bound of a case on the machine that it runs on, and what kind of ceilings gave it."""

    seconds: float
    limiter: str
    ceilings: Literal["measured", "derated"]

    def beaten_by(self, high: float, options: Options) -> bool:
        """Whether a time is impossible: measured ceilings, a cold cache, and still faster than the bound."""
        comparable = self.ceilings == "measured" and options.cache == "cold" and self.limiter != "launch"
        return comparable and high < ROOFLINE_SLACK * self.seconds


def limit_of(subject: Subject, machine: Machine | None = None) -> Limit | None:
    """The bound of the subject's stated work; None where no work is stated or nothing is known of the machine."""
    work = subject.case.work
    machine = machine or (known_machine(subject.device) if work is not None else None)
    if work is None or machine is None or machine.achievable is None:
        return None
    found = bound(work, machine)
    return Limit(seconds=found.seconds, limiter=found.limiter, ceilings=machine.achievable.how)


def make_timing(
    subject: Subject,
    blocks: list[Block],
    options: Options,
    flags: list[Flag],
    *,
    limit: Limit | None = None,
    partial: bool = False,
) -> Timing:
    """The result object, with its bound and the verdict on who is waiting for whom."""
    middle, interval = interval_of(blocks, options)
    case, kind = subject.case, subject.sampler.kind
    cpu_bound = None
    enqueue = subject.other_seconds.get("enqueue")
    if enqueue is not None and kind in ("device", "graph"):
        cpu_bound = enqueue > CPU_BOUND_MARGIN * middle
        if cpu_bound:
            evidence = f"the host needs {seconds(enqueue)} to enqueue what the device does in {seconds(middle)}"
            idle = f"the device idles {percent(1 - middle / enqueue, 0)} of the time"
            flags = [*flags, raise_flag("CPU_BOUND", f"{evidence}: {idle}")]
    dense = (t for t in case.tensors() if t.layout == torch.strided and t.device.type != "meta" and not t.is_quantized)
    inputs = tuple(describe(tensor) for tensor in dense)
    for statistics in inputs:
        if statistics.degenerate:
            shape = "x".join(map(str, statistics.shape))
            flags = [*flags, raise_flag("DEGENERATE_INPUT", f"{statistics.dtype} {shape}: {statistics.degenerate}")]
    if limit is not None and limit.beaten_by(interval.high, options):
        evidence = f"{seconds(middle)} measured, {seconds(limit.seconds)} is the {limit.limiter} bound"
        flags = [*flags, raise_flag("ABOVE_ROOFLINE", evidence)]
    return Timing(
        name=case.name,
        seconds=middle,
        low=interval.low,
        high=interval.high,
        confidence=interval.confidence,
        kind=kind,
        method=subject.sampler.method,
        cache=options.cache if kind in ("device", "graph", "cpu") else "hot",
        regime=options.regime if subject.device is not None else "sustained",
        blocks=tuple(blocks),
        flags=tuple(flags),
        environment=environment(subject),
        other_seconds=dict(subject.other_seconds),
        cpu_bound=cpu_bound,
        kernels=subject.probe.kernels or (),
        parameters=dict(case.parameters),
        inputs=inputs,
        work=case.work,
        bound_seconds=limit.seconds if limit is not None else None,
        bound_limiter=limit.limiter if limit is not None else None,
        bound_ceilings=limit.ceilings if limit is not None else None,
        partial=partial,
    )


def environment(subject: Subject) -> Environment:
    """Where and when this was measured."""
    device = subject.device
    return Environment(
        device=subject.device_name if device is not None else cpu_facts().name,
        driver=device.conditions.driver() if device is not None else None,
        torch=torch.__version__,
        python=platform.python_version(),
        nearpeak=nearpeak.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        threads=torch.get_num_threads(),
    )


def explain(timing: Timing) -> str:
    """Why a measurement should not be used, with the remedies."""
    reasons = [f"  {flag.name}: {flag.evidence}. {flag.remedy}" for flag in timing.flags if flag.severity != "note"]
    return f"{timing.name}: grade {timing.grade}.\n" + "\n".join(reasons)
