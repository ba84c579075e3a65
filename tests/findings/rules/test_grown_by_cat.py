"""Which tensors are said to grow by `cat`."""

import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in
from made_up import slow_cpu

ROUNDS = 32


def looping(*, train=False, read=False):
    def build():
        x = torch.randn(256, 512, requires_grad=train)

        def step():
            whole, total = x.sin().unsqueeze(0), torch.zeros(())
            for _ in range(ROUNDS):
                whole = torch.cat([whole, x.cos().unsqueeze(0)])
                if read:
                    total = total + whole.sin().sum()
            out = whole.sum() + total
            return out.backward() if train else whole

        return step

    return build


def test_a_loop_that_joins_its_results_in_each_round():
    step = examined(looping())
    (found,) = found_in(step, "grown-by-cat")
    cats = [index for index, op in enumerate(step.ops) if op.packet == "aten.cat"]
    assert set(found.ops) <= set(cats)
    assert 0.5 * step.seconds(cats) < found.saving_s < step.seconds(cats)
    assert "parts.append" in found.remedy


@pytest.mark.parametrize(("read", "named"), [(False, True), (True, False)])
def test_autograd_keeps_what_was_read_meanwhile(read, named):
    assert bool(found_in(examined(looping(train=True, read=read)), "grown-by-cat")) == named


def decoding(keep):
    """A step that adds one token to a cache, which is kept for the next."""
    cache = [torch.randn(2, 8, 512, 64)]

    def step():
        longer = torch.cat([cache[0], torch.randn(2, 8, 1, 64)], dim=2)
        if keep:
            cache[0] = longer
        return (longer * longer).sum()

    return step


def grown(step):
    """The same step, whose ops on the longer cache had a shorter one in the step before."""
    before = {
        index: {name: (2, 8, 512, 64)}
        for index, op in enumerate(step.ops)
        for name in ("self",)
        if getattr(op.arguments.get(name), "shape", ()) == (2, 8, 513, 64)
    }
    return dataclasses.replace(step, trace=dataclasses.replace(step.trace, shapes_before=before))


def test_a_cache_that_each_step_makes_longer():
    step = grown(examined(lambda: decoding(keep=True), live=True))
    (found,) = found_in(step, "grown-by-cat")
    assert "the step before left" in found.evidence
    assert "torch.empty(2, 8, longest, 64" in found.remedy


@pytest.mark.parametrize(
    "step",
    [
        lambda: examined(lambda: decoding(keep=True), live=True),
        lambda: grown(examined(lambda: decoding(keep=False), live=True)),
    ],
    ids=["of one length", "not kept"],
)
def test_other_joined_tensors_are_not_named(step):
    assert not found_in(step(), "grown-by-cat")


def test_what_reads_a_cache_reads_it_from_memory_where_nothing_was_copied():
    """It finds the copy in the processor's cache now; so a part of the copy's time is only moved."""
    step = grown(examined(lambda: decoding(keep=True), live=True, machine=slow_cpu()))
    large = dataclasses.replace(step, machine=dataclasses.replace(slow_cpu(), cache_bytes=2.0**25))
    (found,), (no_cache,) = (found_in(item, "grown-by-cat") for item in (large, step))
    cat = next(index for index, op in enumerate(step.ops) if op.packet == "aten.cat")
    assert found.saving_s < 0.75 * step.time(cat) < no_cache.saving_s
    assert "no longer from the cache" in found.reasoning and "cache" not in no_cache.reasoning
