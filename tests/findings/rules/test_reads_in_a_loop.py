import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in
from planted import load, planted

from nearpeak.findings.rules.python_stretch import python_stretch
from nearpeak.findings.rules.reads_in_a_loop import reads_in_a_loop
from nearpeak.findings.rules.synchronization import synchronization
from nearpeak.profiles.idle import IdleCause
from nearpeak.trace.recorder import _as_host_op

RULE = "reads-in-a-loop"


def as_long(op, expected):
    return 2e-6 if "scalar" in op.packet else expected


def reading(count=100, *, used=False):
    def build():
        weight, scores = torch.randn(16, 16), torch.sin(torch.arange(float(count)))

        def step():
            best, total = 0.0, weight @ weight
            for place in range(count):
                value = scores[place] * 2
                if value.item() > best:
                    best = value.item()
                if used:
                    total = total + value
            return total * best

        return step

    return examined(build, live=True, times=as_long)


def test_all_that_serves_the_reads_goes():
    step = reading()
    (found,) = found_in(step, RULE)
    products = [index for index, op in enumerate(step.ops) if op.packet == "aten.mul" and op.outputs[0].shape == ()]
    assert set(products) <= set(found.ops) and "tolist()" in found.remedy


def discounting(count=40, *, whole_rows=False):
    """Sums of rewards from the last to the first, read and written one by one."""

    def build():
        weight, rewards = torch.randn(16, 16), torch.sin(torch.arange(2.0 * count)).view(count, 2)

        def step():
            sums, running, rows = torch.zeros(count, 2), 0.0, rewards * 2
            for place in reversed(range(count)):
                running = rows[place, 0].item() + 0.9 * running
                if whole_rows:
                    sums[place].add_(running)
                else:
                    sums[place, 1] = running
            return weight @ weight * sums.sum()

        return step

    return examined(build, live=True, times=as_long)


def test_a_result_that_the_loop_fills_number_by_number_is_part_of_it():
    (found,) = found_in(discounting(), RULE)
    assert "tolist()" in found.remedy and "torch.tensor(numbers)" in found.remedy
    assert not found_in(discounting(whole_rows=True), RULE)


def test_a_loop_over_tensors_of_the_host_is_the_stretch_before_the_next_op_of_the_device():
    step = discounting()
    following = next(index for index, op in enumerate(step.ops) if op.packet == "aten.mm")
    host = range(next(index for index, op in enumerate(step.ops) if op.packet == "aten.select"), following)
    ops = [_as_host_op(op) if index in host else op for index, op in enumerate(step.ops)]
    profiled = [
        dataclasses.replace(op, measured_s=0.0) if index in host else op for index, op in enumerate(step.profile.ops)
    ]
    python = IdleCause(cause="python", seconds=4e-3, count=1, where=ops[following].place, what="")
    profile = dataclasses.replace(step.profile, ops=tuple(profiled), idle=(python,), wall_s=1e-2)
    step = dataclasses.replace(step, trace=dataclasses.replace(step.trace, ops=tuple(ops)), profile=profile)
    (waste,) = reads_in_a_loop(step)
    assert waste.idle == {"python": 4e-3}
    assert "4.00 ms on the host" in waste.evidence


@pytest.mark.parametrize("step", [lambda: reading(10), lambda: reading(used=True)], ids=["few", "needed elsewhere"])
def test_other_loops_are_not_named(step):
    assert not found_in(step(), RULE)


def test_the_corpus():
    module = load("reads_in_a_loop")
    (found,) = found_in(examined(lambda: module.waste("cpu"), live=True, times=as_long), RULE)
    assert found.source == planted("reads_in_a_loop")
    assert not found_in(examined(lambda: module.clean("cpu"), live=True, times=as_long), RULE)


def decoding():
    """Logits are copied to the host, and Python works on them until the next op."""

    def build():
        weight = torch.randn(64, 64)

        def step():
            logits = weight @ weight
            starts = logits.clone()
            return torch.tensor([float(row.sum()) for row in starts]) + logits[0]

        return step

    step = examined(build, live=True)
    copy = next(index for index, op in enumerate(step.ops) if op.packet == "aten.clone")
    following = next(index for index, op in enumerate(step.ops) if op.packet == "aten.sum")
    ops = list(step.ops)
    ops[copy] = dataclasses.replace(ops[copy], name="aten._to_copy.default")
    on_host = frozenset({ops[copy].outputs[0].storage})
    wait = IdleCause(cause="synchronization", seconds=3e-3, count=1, where=ops[copy].source, what="copy")
    python = IdleCause(cause="python", seconds=4e-3, count=1, where=ops[following].source, what="")
    profile = dataclasses.replace(step.profile, idle=(wait, python), wall_s=1e-2)
    trace = dataclasses.replace(step.trace, ops=tuple(ops), on_host=on_host, python=None)
    return dataclasses.replace(step, trace=trace, profile=profile), ops[copy].source


def test_python_that_works_on_a_copy_has_the_wait_for_it():
    step, line = decoding()
    (waste,) = python_stretch(step)
    assert waste.idle == {"python": 4e-3, "synchronization": 3e-3}
    assert step.ops[waste.op].source == line and line in waste.evidence
    assert not list(synchronization(step))


def test_the_backward_pass_of_the_turns_goes_with_the_loop():
    """Each row is repeated as often as a number says: views in forward, a sum for each in backward."""

    def build():
        rows, counts = torch.randn(40, 16, requires_grad=True), torch.arange(1, 41)

        def step():
            parts = [row.expand(int(count), -1) for row, count in zip(rows, counts, strict=True)]
            rows.grad = None
            torch.cat(parts).square().sum().backward()

        return step

    step = examined(build, live=True, times=as_long)
    (found,) = found_in(step, RULE)
    sums = [index for index, op in enumerate(step.ops) if op.phase == "backward" and op.packet == "aten.sum"]
    assert len(sums) >= 39 and len(set(sums) & set(found.ops)) >= 39
