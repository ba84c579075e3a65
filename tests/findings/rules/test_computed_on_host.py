import dataclasses

import pytest
import torch
from stalled_steps import cause, stalled

from nearpeak.findings.rules.computed_on_host import computed_on_host
from nearpeak.ops.op import name_with_origin

ROWS = 1 << 20


def scales(batch, there):
    floats = batch.float().div_(255)
    there.copy_(floats)
    return there.exp()


def makes(there):
    there.copy_(torch.arange(ROWS, dtype=torch.float32).square())
    return there.exp()


def step_of(fn, *args, idle_s=5e-3, copy_s=4e-3):
    """A step whose ops before the copy ran on the host."""
    ops = stalled(fn, *args).ops
    host = [index for index in range(len(ops)) if index < [op.packet for op in ops].index("aten.copy_")]
    idle = [cause("host ops", idle_s, where=ops[host[-1]].place, what=ops[host[-1]].packet.removeprefix("aten."))]
    step = stalled(fn, *args, idle=idle, took=lambda op: copy_s if op.packet == "aten.copy_" else 1e-4)
    there = next(op for op in ops if op.packet == "aten.copy_").arguments["self"].storage
    return on_host(step, host, storages_of(ops, host) - {there})


def storages_of(ops, indices):
    return {tensor.storage for index in indices for tensor in (*ops[index].inputs, *ops[index].outputs)}


def on_host(step, indices, storages):
    """The step with these ops and storages on the host."""
    changed = tuple(
        dataclasses.replace(op, name=name_with_origin("host", op.packet.removeprefix("aten.")), origin="host")
        if index in indices
        else op
        for index, op in enumerate(step.ops)
    )
    return dataclasses.replace(step, trace=dataclasses.replace(step.trace, ops=changed, on_host=frozenset(storages)))


def test_conversion_on_the_host_costs_its_time_and_the_larger_copy():
    batch, there = torch.zeros(ROWS, dtype=torch.uint8), torch.zeros(ROWS)
    step = step_of(scales, batch, there)
    (found,) = computed_on_host(step)
    copy = next(index for index, op in enumerate(step.ops) if op.packet == "aten.copy_")
    assert found.op == copy
    assert found.gains == {copy: pytest.approx(0.75 * 4e-3)}  # a byte in place of four
    assert found.idle["host ops"] == pytest.approx(5e-3, rel=0.02)  # less what the device takes
    assert "not prepare(batch).to('cuda')" in found.remedy


def test_what_follows_from_nothing_is_made_on_the_device():
    (found,) = computed_on_host(step_of(makes, torch.zeros(ROWS)))
    assert list(found.gains.values()) == [pytest.approx(4e-3)]
    assert "device='cuda'" in found.remedy


def test_short_work_of_the_host_costs_nothing():
    assert not list(computed_on_host(step_of(makes, torch.zeros(ROWS), idle_s=1e-6)))


def test_a_copy_of_what_exists_before_the_step_is_no_work_of_the_host():
    def sends(batch, there):
        there.copy_(batch)
        return there.exp()

    step = stalled(sends, torch.ones(ROWS), torch.empty(ROWS), on_host=[1])
    assert not list(computed_on_host(step))


def sums_up(result, there, sums):
    there.copy_(result.sigmoid())
    sums.add_(there)
    return sums.mul(2.0)


def step_after_copy(*, copy_s=4e-3, idle_s=5e-3, waited_s=2e-3):
    """A step whose ops after the copy ran on the host."""
    tensors = torch.zeros(ROWS), torch.zeros(ROWS), torch.zeros(ROWS)
    ops = stalled(sums_up, *tensors).ops
    copy = next(op for op in ops if op.packet == "aten.copy_")
    host = {index for index, op in enumerate(ops) if op.packet in ("aten.add_", "aten.mul")}
    idle = [
        cause("host ops", idle_s, where=ops[max(host)].place, what=ops[max(host)].packet.removeprefix("aten.")),
        cause("synchronization", waited_s, where=copy.place, what="copy"),
    ]
    step = stalled(sums_up, *tensors, idle=idle, took=lambda op: copy_s if op.packet == "aten.copy_" else 1e-4)
    return on_host(step, host, storages_of(ops, host) | {copy.arguments["self"].storage})


def test_results_that_the_host_computes_with_cost_its_time_the_copy_and_the_wait():
    step = step_after_copy()
    (found,) = computed_on_host(step)
    copy = next(index for index, op in enumerate(step.ops) if op.packet == "aten.copy_")
    assert found.op == copy
    assert found.gains == {copy: 4e-3}
    assert found.idle["host ops"] == pytest.approx(5e-3, rel=0.02)
    assert found.idle["synchronization"] == 2e-3
    assert "device='cuda'" in found.remedy


def test_short_work_with_results_costs_nothing():
    assert not list(computed_on_host(step_after_copy(idle_s=1e-6)))
