import pytest
import torch
from stalled_steps import cause, stalled

from nearpeak.findings.engine import find
from nearpeak.findings.rules.synchronization import synchronization
from nearpeak.profiles.idle import Gap


def matrices():
    return torch.ones(64, 64), torch.ones(64, 64)


@pytest.mark.parametrize(
    ("what", "title", "remedy"),
    [
        ("item", "`.item()`", "% 100"),
        ("nonzero", "`nonzero`", "torch.where"),
        ("masked_select", "`nonzero`", "torch.where"),
        ("copy", "A copy between", "torch.full"),
        ("print", "A tensor is printed", "print(loss.item())"),
        ("cudaDeviceSynchronize", "torch.cuda.synchronize()", "Leave the call out"),
        ("_unique2", "_unique2 makes", "shape does not depend"),
    ],
)
def test_the_form_names_what_waits_and_how_not_to(what, title, remedy):
    idle = [cause("synchronization", 3e-4, where="train.py:41", what=what, count=2), cause("python", 1e-4)]
    (found,) = synchronization(stalled(torch.mm, *matrices(), idle=idle))
    assert title in found.title
    assert remedy in found.remedy
    assert found.source == "train.py:41"
    assert found.saving_s == pytest.approx(3e-4)
    assert "2 times" in found.evidence


def test_lines_are_findings_of_their_own_and_nothing_is_claimed_twice():
    idle = [
        cause("synchronization", 3e-4, where="train.py:41", what="item"),
        cause("synchronization", 2e-4, where="train.py:52", what="item"),
    ]
    found, _ = find(stalled(torch.mm, *matrices(), idle=idle))
    assert [(item.rule, item.source, item.saving_s) for item in found] == [
        ("synchronization", "train.py:41", pytest.approx(3e-4)),
        ("synchronization", "train.py:52", pytest.approx(2e-4)),
    ]


def test_a_module_is_named_where_the_line_is_not_known():
    idle = [cause("synchronization", 3e-4, where="model.layers.0", what="item")]
    (found,) = synchronization(stalled(torch.mm, *matrices(), idle=idle))
    assert found.source == ""
    assert "model.layers.0" in found.title


def selects(x, mask):
    return x[mask]


def test_finding_out_where_a_mask_is_true_goes_away_too():
    args = torch.ones(64), torch.ones(64, dtype=torch.bool)
    line = stalled(selects, *args).ops[-1].source
    idle = [cause("synchronization", 3e-4, where=line, what="nonzero")]
    step = stalled(selects, *args, idle=idle, took=lambda op: 5e-5)
    (found,) = synchronization(step)
    (gain,) = found.gains.values()
    assert step.ops[next(iter(found.gains))].packet == "aten.index"
    assert 4e-5 < gain < 5e-5  # the selection becomes an op that keeps the shape


def reads_back(host, x):
    host.copy_(x)


def test_the_direction_of_a_copy_is_known_from_where_its_sides_are():
    args = torch.empty(64), torch.ones(64)
    line = stalled(reads_back, *args).ops[-1].source
    idle = [cause("synchronization", 3e-4, where=line, what="copy")]
    (found,) = synchronization(stalled(reads_back, *args, idle=idle, on_host=[0]))
    assert found.title == "A copy to the host makes the host wait."
    assert list(synchronization(stalled(reads_back, *args, idle=idle, on_host=[1]))) == []  # pageable-copy has it


def gap(start_s, seconds, where):
    return Gap(start_s=start_s, seconds=seconds, cause="synchronization", where=where)


def copies_twice(host, x):
    host.copy_(x.exp())
    return x.exp()


def test_the_time_between_a_kernel_and_its_copy_to_the_host_stays():
    args = torch.empty(64), torch.ones(64)
    plain = stalled(copies_twice, *args)
    (copy,) = (kernel for kernel in plain.profile.timeline if "copy_" in kernel.name)
    line = plain.ops[copy.op].source
    idle = [cause("synchronization", 3e-5, where=line, what="copy")]
    gaps = (gap(copy.start_s - 5e-6, 5e-6, line), gap(copy.start_s + copy.seconds, 2e-5, line))
    (found,) = synchronization(stalled(copies_twice, *args, idle=idle, on_host=[1], gaps=gaps))
    assert found.saving_s == pytest.approx(2.5e-5)
    assert "5.00 us remain" in found.reasoning


def reads_number(x):
    return x.sum().item()


def test_the_copy_of_a_number_that_is_not_read_goes_too():
    line = stalled(reads_number, torch.ones(64)).ops[-1].source
    idle = [cause("synchronization", 3e-4, where=line, what="item")]
    step = stalled(reads_number, torch.ones(64), idle=idle, took=lambda op: 2e-6)
    (found,) = synchronization(step)
    assert [step.ops[index].packet for index in found.gains] == ["aten._local_scalar_dense"]
    assert list(found.gone) == list(found.gains)
    assert found.saving_s == pytest.approx(3e-4 + 2e-6)


def test_a_step_without_waits_has_none():
    idle = [cause("python", 3e-4), cause("launching", 3e-4)]
    assert list(synchronization(stalled(torch.mm, *matrices(), idle=idle))) == []


def clips(parameters, checks):
    torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=checks)


def line_of(fn, *args, packet):
    return next(op.source for op in stalled(fn, *args).ops if op.packet == packet)


def test_a_check_that_gradients_are_finite_is_named_as_such():
    weight = torch.nn.Parameter(torch.ones(64, 64))
    weight.grad = torch.ones(64, 64)
    line = line_of(clips, [weight], True, packet="aten._local_scalar_dense")
    idle = [cause("synchronization", 3e-4, where=line, what="item")]
    (found,) = synchronization(stalled(clips, [weight], True, idle=idle))
    assert "finite" in found.title
    assert "without error_if_nonfinite" in found.remedy
