import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in

from nearpeak.profiles.idle import IdleCause


def scaling(count, size=64, same=False):
    def build():
        tensors = [torch.randn(size, size) for _ in range(count)]
        product = torch.randn(512, 512)

        def step():
            for tensor in tensors:
                (tensors[0] if same else tensor).mul_(0.5)
            return product @ product

        return step

    return build


def test_a_long_loop_is_one_pass():
    (found,) = found_in(examined(scaling(100)), "per-tensor-loop")
    assert len(found.ops) == 100
    assert "torch._foreach_mul_" in found.remedy


@pytest.mark.parametrize(
    "build",
    [scaling(8), scaling(100, same=True), scaling(20, size=16384)],
    ids=["short", "one tensor", "large tensors"],
)
def test_other_loops_are_not_named(build):
    assert not found_in(examined(build), "per-tensor-loop")


def test_what_the_device_waited_for_launches_is_counted():
    step = examined(scaling(100))
    waited = IdleCause(cause="launching", seconds=1e-3, count=100, where="", what="launched late")
    ops = tuple(dataclasses.replace(op, launch_wait_s=1e-5) for op in step.profile.ops)
    profile = dataclasses.replace(step.profile, idle=(waited,), ops=ops, wall_s=step.profile.wall_s + 1e-3)
    (quick,) = found_in(step, "per-tensor-loop")
    (waiting,) = found_in(dataclasses.replace(step, profile=profile), "per-tensor-loop")
    assert waiting.saving_s - quick.saving_s == pytest.approx(1e-3, rel=0.05)


def norms(count, size):
    def build():
        tensors = [torch.randn(size, size) for _ in range(count)]
        return lambda: torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors])

    return build


def test_a_list_of_long_tensors_takes_many_kernels():
    def saved(step):
        (found,) = found_in(step, "per-tensor-loop")
        return found

    step = examined(norms(40, 3072), times=lambda op, expected: 3 * expected)
    assert "in 18 kernels" in saved(step).reasoning  # 40 times 144 pieces, 320 at a time
    waited = IdleCause(cause="launching", seconds=40e-6, count=40, where="", what="between queued kernels")
    ops = tuple(dataclasses.replace(op, launch_wait_s=1e-6 if "norm" in op.name else 0.0) for op in step.profile.ops)
    profile = dataclasses.replace(step.profile, idle=(waited,), ops=ops, wall_s=step.profile.wall_s + 40e-6)
    waiting = saved(dataclasses.replace(step, profile=profile))
    assert waiting.saving_s - saved(step).saving_s == pytest.approx(23e-6)  # 17 of the 40 launches are still there
