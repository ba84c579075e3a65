"""Steps of a GPU that was idle: traced on this CPU, with made-up times, causes of idle time and places in memory."""

import dataclasses

from stalled import idle as cause  # for who makes steps  # noqa: F401  # for who makes steps

from nearpeak.bound.estimate import estimate_trace
from nearpeak.findings.step import Step
from nearpeak.machines.machine import Achievable, LaunchCost, Machine
from nearpeak.profiles.profile import DeviceKernel, build_profile
from nearpeak.trace.trace import trace

GPU = Machine(
    id="test-gpu",
    name="a made-up GPU",
    kind="gpu",
    vendor="none",
    architecture="none",
    processors=100,
    memory_bytes=8e10,
    cache_bytes=5e7,
    achievable=Achievable(
        how="measured",
        note="made up",
        matrix={"float32": 4e14, "bfloat16": 8e14},
        vector={"float32": 5e13},
        bandwidth=4e12,
        host_to_device=5e10,
        host_to_device_pageable=1e10,
        launch=LaunchCost(enqueue=4e-6, in_graph=1e-6),
    ),
)


def stalled(fn, *args, idle=(), took=lambda op: 1e-5, on_host=(), pinned=(), communication_s=0.0, **facts):
    """One run of `fn`; each op that is no view takes `took(op)`.

    Args:
        fn: The step.
        args: Its tensors.
        idle: Causes, whose times make the step longer.
        took: Seconds of an op.
        on_host: Which tensors are in the host's memory, by the order in which ops first use them.
        pinned: Those among them that are pinned.
        communication_s: A kernel of communication runs alone for so long at the end.
        facts: Other fields of the profile.
    """
    traced = trace(fn, *args, live=True)
    numbers = [each for each, storage in traced.storages.items() if storage.kind == "input"]
    traced = dataclasses.replace(
        traced,
        on_host=frozenset(numbers[at] for at in (*on_host, *pinned)),
        pinned=frozenset(numbers[at] for at in pinned),
        python=None,  # the idle time is made up, and not that of this run
    )
    estimate = estimate_trace(traced, GPU)
    kernels, now = [], 0.0
    for index, op in enumerate(traced.ops):
        seconds = took(op)
        kernels.append(DeviceKernel(name=op.name, start_s=now, seconds=seconds, op=index))
        now += seconds
    if communication_s:
        kernels.append(DeviceKernel(name="nccl", start_s=now, seconds=communication_s, op=None, collective="unknown"))
        now += communication_s
    wall = now + sum(item.seconds for item in idle)
    profile = build_profile(estimate, kernels, wall_s=wall, source="step", date="", device="toy")
    profile = dataclasses.replace(profile, idle=tuple(idle), **facts)
    return Step(trace=traced, profile=profile, machine=GPU, knows=frozenset({"storages", "lines", "host"}))
