import dataclasses

import pytest
import torch
from gpu_steps import examined
from torch.utils.checkpoint import checkpoint

from nearpeak.findings.rules.needless_recompute import needless_recompute
from nearpeak.profiles.memory import PeakMemory

KNOWN = frozenset({"storages", "lines", "memory"})


def step_with(peak, capacity):
    def build():
        block = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU())
        x = torch.randn(256, 512)
        return lambda: checkpoint(block, x, use_reentrant=False).sum().backward()

    step = examined(build, live=True)
    memory = PeakMemory(
        device="cuda:0",
        capacity_bytes=capacity,
        peak_bytes=peak,
        parameters_bytes=0.0,
        gradients_bytes=0.0,
        optimizer_bytes=0.0,
        activations_bytes=peak,
    )
    return dataclasses.replace(step, profile=dataclasses.replace(step.profile, memory=memory), knows=KNOWN)


def test_what_runs_again_is_saved_where_there_is_memory():
    step = step_with(20e9, 100e9)
    (waste,) = needless_recompute(step)
    again = [index for index, op in enumerate(step.ops) if op.recomputed]
    assert again
    assert waste.saving_s == pytest.approx(step.seconds(again))


@pytest.mark.parametrize(("peak", "capacity"), [(84.9999e9, 100e9), (20e9, None)], ids=["full", "unknown"])
def test_it_is_needed_where_memory_is_full_or_not_known(peak, capacity):
    assert not list(needless_recompute(step_with(peak, capacity)))
