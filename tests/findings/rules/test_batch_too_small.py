import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in
from planted import load
from torch import nn

from nearpeak.findings.replay import HostPiece, ReplayedKernel, StepReplay, StepTimeline
from nearpeak.findings.rules.batch_too_small import batch_too_small

NAME = "batch-too-small"


def layers(rows, *, trained=False, width=4096):
    def build():
        model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(2)))
        x = torch.randn(rows, width, dtype=torch.bfloat16)

        def step():
            if not trained:
                with torch.no_grad():
                    return model(x)
            return model(x).sum().backward()

        return step

    return build


def test_the_corpus():
    module = load("batch_too_small")
    (finding,) = found_in(examined(lambda: module.waste("cuda")), NAME)
    assert finding.source.startswith("batch_too_small.py")
    assert finding.share > 0.9
    assert "with 200 rows" in finding.evidence and "50 times" in finding.remedy
    assert not found_in(examined(lambda: module.clean("cuda")), NAME)


def test_launches_serve_the_larger_batch_too():
    """The host takes half as long as the kernels: it would limit a step of shorter kernels, and not a larger batch."""
    step = examined(layers(4))
    took = {index: step.time(index) for index in range(len(step.ops)) if step.time(index)}
    pieces = [HostPiece(seconds / 2, 0, op, None, kernel=number) for number, (op, seconds) in enumerate(took.items())]
    kernels = [ReplayedKernel(seconds, op, 0, 0.0, False, None, 0.0) for op, seconds in took.items()]
    timeline = StepTimeline(pieces=pieces, kernels=kernels, launch_latency_s=0.0)
    replayed = dataclasses.replace(step, replay=StepReplay(timeline, step.profile.wall_s))
    (finding,), (summed,) = (found_in(one, NAME) for one in (replayed, step))
    assert finding.share == pytest.approx(summed.share, rel=0.02) and finding.share > 0.9


def test_the_saving_is_what_these_rows_would_be_charged_of_a_larger_batch():
    step = examined(layers(50))
    (waste,) = batch_too_small(step)
    enough = examined(layers(200))
    assert step.profile.wall_s - waste.saving_s == pytest.approx(enough.profile.wall_s / 4, rel=0.05)


def test_gradients_of_weights_count_too():
    step = examined(layers(8, trained=True, width=8192))  # a weight does not fit into the cache
    (waste,) = batch_too_small(step)
    assert [step.ops[index].phase for index in waste.gains] == ["forward", "forward", *["backward"] * 3]


def test_silent_near_the_ridge_and_beside_other_work():
    assert not list(batch_too_small(examined(layers(128))))
    slow_rest = examined(layers(8, trained=True), times=lambda op, took: took if ".mm." in op.name else took + 1e-3)
    assert not list(batch_too_small(slow_rest))


def test_silent_where_the_large_matrix_is_no_weight():
    def build():  # a router: many tokens, few experts
        router, x = nn.Linear(4096, 8, bias=False, dtype=torch.bfloat16), torch.randn(16384, 4096, dtype=torch.bfloat16)
        return lambda: router(x)

    step = examined(build)
    assert step.measured[1].limiter == "memory"
    assert not list(batch_too_small(step))
