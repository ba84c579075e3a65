"""What looks like generation without a cache, and what does not."""

import dataclasses

import pytest
import torch
from gpu_steps import H200, examined, found_in
from torch.nn.functional import scaled_dot_product_attention

from nearpeak.machines.machine import LaunchCost

BATCH, HEADS, LENGTH, WIDTH = 16, 16, 4000, 128


def attending(*, causal=True, train=False):
    def build():
        weight = torch.randn(HEADS * WIDTH, HEADS * WIDTH, dtype=torch.bfloat16, requires_grad=train)
        x = torch.randn(BATCH, LENGTH, HEADS * WIDTH, dtype=torch.bfloat16)

        def step():
            heads = (x @ weight).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
            mixed = scaled_dot_product_attention(heads, heads, heads, is_causal=causal)
            return mixed.sum().backward() if train else mixed

        return step

    return build


def grown(step, by=1, length=LENGTH):
    """The same step where everything that grows with the text was smaller in the step before."""
    before = {}
    for index, op in enumerate(step.ops):
        shapes = {}
        for name in ("self", "query", "key", "value"):
            tensor = op.arguments.get(name)
            sizes = () if not hasattr(tensor, "shape") else tensor.shape
            smaller = tuple(size - size // length * by if size % length == 0 and size else size for size in sizes)
            if smaller != sizes and name in op.arguments and (name != "self" or op.packet.endswith("mm")):
                shapes[name] = smaller
        if shapes:
            before[index] = shapes
    return dataclasses.replace(step, trace=dataclasses.replace(step.trace, shapes_before=before))


def test_a_text_that_grows_by_one_is_named_with_nearly_all_of_its_time():
    step = grown(examined(attending()))
    (found,) = found_in(step, "no-kv-cache")
    products = sum(op.measured_s for op in step.measured if op.family in ("matrix", "attention"))
    assert 0.9 * products < found.saving_s < products
    assert "4000 queries" in found.evidence


def test_what_the_host_needs_to_launch_remains():
    achievable = dataclasses.replace(H200.achievable, launch=LaunchCost(enqueue=1e-3))
    step = grown(examined(attending(), machine=dataclasses.replace(H200, achievable=achievable)))
    (found,) = found_in(step, "no-kv-cache")
    took = sum(step.measured[index].measured_s for index in found.ops)
    assert found.saving_s == pytest.approx(took - len(found.ops) * 1e-3)


@pytest.mark.parametrize(
    "step",
    [
        lambda: examined(attending()),
        lambda: grown(examined(attending()), by=2),
        lambda: grown(examined(attending(causal=False))),
        lambda: grown(examined(attending(train=True))),
    ],
    ids=["a text of one length", "two more tokens", "every token sees every other", "training"],
)
def test_other_steps_are_not_named(step):
    assert not found_in(step(), "no-kv-cache")
