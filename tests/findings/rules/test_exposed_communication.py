import dataclasses

import pytest
import torch
from stalled_steps import stalled

from nearpeak.findings.engine import find
from nearpeak.findings.rules.exposed_communication import exposed_communication
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


def two_products(x):
    return x @ x @ x


def step_of(communication_s, phase=None):
    """Two products of 1 ms each; with a collective in a phase where it is given, the second product too."""
    step = stalled(two_products, torch.ones(8, 8), took=lambda op: 1e-3, communication_s=communication_s)
    if phase is None:
        return step
    reduced = Op(
        name="_c10d_functional.all_reduce_.default",
        arguments={"input": Tensor(shape=(1000,), strides=(1,), dtype="float32", storage=99)},
        outputs=(Tensor(shape=(1000,), strides=(1,), dtype="float32", storage=99),),
        mutated=("input",),
        phase=phase,
        source="train.py:9",
    )
    first, second = step.ops
    trace = dataclasses.replace(step.trace, ops=(first, dataclasses.replace(second, phase=phase), reduced))
    measured = (
        step.measured[0],
        dataclasses.replace(step.measured[1], phase=phase),
        dataclasses.replace(step.measured[1], phase=phase, measured_s=0.0),
    )
    return dataclasses.replace(step, trace=trace, profile=dataclasses.replace(step.profile, ops=measured))


def test_all_of_it_can_hide_behind_enough_kernels():
    (found,) = exposed_communication(step_of(0.5e-3))
    assert found.idle == {"communication": pytest.approx(0.5e-3)}
    shown, _ = find(step_of(0.5e-3))
    assert [(item.rule, item.share) for item in shown] == [("exposed-communication", pytest.approx(0.2))]


def test_no_more_than_the_kernels_of_its_phase_can_hide():
    (found,) = exposed_communication(step_of(5e-3, "backward"))
    assert found.saving_s == pytest.approx(1e-3)
    assert "4 kB" in found.evidence or "4.00 kB" in found.evidence
    assert "bucket_cap_mb" in found.remedy
    assert found.op == 2


def test_gathered_parameters_have_another_remedy():
    (found,) = exposed_communication(step_of(5e-3, "forward"))
    assert "fully_shard" in found.remedy
    assert found.saving_s == pytest.approx(2e-3)  # both products run forward


def test_a_step_that_talks_to_nobody_has_none():
    assert list(exposed_communication(step_of(0.0))) == []
