import dataclasses

import pytest
import torch
from stalled_steps import GPU, cause, stalled

from nearpeak.findings.engine import find
from nearpeak.findings.rules.synchronization import pageable_copy

LARGE = 1 << 20  # elements of float32: 4 MiB, 83.9 us from pinned memory


def sends(batch, there):  # ops use `there` first: it is number 0, and `batch` 1
    there.copy_(batch)
    return there.exp()


def step_of(size=LARGE, copy_s=4e-4, idle=(), **places):
    args = torch.ones(size), torch.empty(size)
    line = stalled(sends, *args).ops[0].source
    waits = [dataclasses.replace(item, where=item.where or line) for item in idle]
    step = stalled(sends, *args, idle=waits, took=lambda op: copy_s if op.packet == "aten.copy_" else 1e-4, **places)
    return step, line


def test_a_copy_from_pageable_memory_gains_what_pinned_memory_is_faster():
    step, line = step_of(idle=[cause("synchronization", 5e-5, what="copy")], on_host=[1])
    (found,) = pageable_copy(step)
    assert found.gains == {0: pytest.approx(4e-4 - 4 * LARGE / 5e10)}
    assert found.idle == {"synchronization": 5e-5}
    assert "pin_memory" in found.remedy
    assert "non_blocking=True" in found.remedy
    assert "(1048576,)" in found.remedy
    shown, _ = find(step)
    assert [(item.rule, item.source) for item in shown if item.rule in ("pageable-copy", "synchronization")] == [
        ("pageable-copy", line)
    ]


def test_of_a_blocking_copy_from_pinned_memory_only_the_wait_goes():
    step, _ = step_of(idle=[cause("synchronization", 5e-5, what="copy")], pinned=[1])
    (found,) = pageable_copy(step)
    assert found.gains == {}
    assert found.saving_s == 5e-5
    assert found.title == "The host waits for a copy to the device."


def test_a_pinned_copy_without_a_wait_has_nothing_to_gain():
    step, _ = step_of(pinned=[1])
    assert not [item for item in find(step)[0] if item.rule == "pageable-copy"]


def test_a_small_value_should_not_be_copied_at_all():
    step, _ = step_of(size=3, copy_s=2e-6, idle=[cause("synchronization", 5e-5, what="copy")], on_host=[1])
    (found,) = pageable_copy(step)
    assert found.saving_s == pytest.approx(5.2e-5)
    assert "before the steps" in found.remedy


def test_copies_inside_of_one_memory_are_none():
    assert list(pageable_copy(step_of()[0])) == []
    assert list(pageable_copy(step_of(on_host=[0, 1])[0])) == []


def test_a_machine_whose_link_was_not_measured_predicts_nothing():
    step, _ = step_of(on_host=[1])
    unknown = dataclasses.replace(GPU, achievable=dataclasses.replace(GPU.achievable, host_to_device=None))
    assert list(pageable_copy(dataclasses.replace(step, machine=unknown))) == []
