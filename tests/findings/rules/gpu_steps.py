"""Steps of a GPU without one: traced on fake tensors as an H200 would run them, with times that are made up."""

import nearpeak
from nearpeak.bound.estimate import estimate_trace
from nearpeak.findings.engine import find
from nearpeak.findings.step import Step
from nearpeak.machines.catalogue import find as machine_of
from nearpeak.profiles.profile import DeviceKernel, build_profile
from nearpeak.trace.cuda_ops.target import Target
from nearpeak.trace.trace import trace

H200 = machine_of("h200-sxm")
TARGET = Target(kind="gpu", capability=(9, 0), cudnn=91900, torch=(2, 11))


def as_expected(op, expected):
    """Every op takes what a good kernel takes."""
    return expected


def examined(build, *, times=as_expected, machine=H200, target=TARGET, live=False) -> Step:
    """The step that `build` returns, built and traced with fake tensors; `times` gives an op's seconds.

    Args:
        build: Returns a callable.
        times: Called with an op and what a good kernel takes for it.
        machine: Whose ceilings count.
        target: Whose operators run.
        live: Run on real tensors of this CPU, for code that looks at values.
    """
    if live:
        traced = trace(build(), live=True)
    else:
        with nearpeak.fake():
            step = build()
        traced = trace(step, target=target)
    return with_times(traced, times, machine=machine)


def with_times(traced, times, *, machine=H200) -> Step:
    """A traced step with times that are made up."""
    estimate = estimate_trace(traced, machine)
    kernels, now = [], 0.0
    for index, (op, estimated) in enumerate(zip(traced.ops, estimate.ops, strict=True)):
        took = times(op, estimated.expected_seconds or estimated.seconds)
        if took:
            kernels.append(DeviceKernel(name=op.name, start_s=now, seconds=took, op=index))
            now += took
    profile = build_profile(estimate, kernels, wall_s=now, source="step", date="", device="toy")
    return Step(trace=traced, profile=profile, machine=machine, knows=frozenset({"storages", "lines"}))


def found_in(step, rule=None):
    found, _ = find(step)
    return [finding for finding in found if rule in (None, finding.rule)]
