"""Linear layers on repeated rows: what is found, and what the step without them takes."""

import pytest
import torch
from gpu_steps import examined, found_in
from torch.nn import functional

RULE = "linear-after-gather"
NODES, NEAR, SIZE = 4096, 16, 512


def build(program, *, trained=False):
    def prepare():
        x = torch.randn(NODES, SIZE, dtype=torch.bfloat16, requires_grad=trained)
        edges = torch.randn(NODES, NEAR, 64, dtype=torch.bfloat16)
        index = torch.zeros(NODES, NEAR, dtype=torch.int64)
        layers = [
            torch.nn.Linear(columns, SIZE, bias=bias, dtype=torch.bfloat16)
            for columns, bias in ((SIZE, True), (SIZE, False), (64, False), (2 * SIZE + 64, True))
        ]

        def step():
            result = program(x, edges, index, *layers)
            if trained:
                result.sum().backward()
            return result

        return step

    return prepare


def seconds_of(step):
    return sum(op.measured_s for op in step.measured)


def gathered(x, edges, index, one, other, third, joint):
    return one(x[index]).sum(1)


def before_gather(x, edges, index, one, other, third, joint):
    return one(x)[index].sum(1)


def repeated(x, edges, index, one, other, third, joint):
    many = functional.silu(x.repeat_interleave(NEAR, dim=0))
    return functional.silu(one(many))


def before_repeat(x, edges, index, one, other, third, joint):
    return functional.silu(one(functional.silu(x)).repeat_interleave(NEAR, dim=0))


def messages(x, edges, index, one, other, third, joint):
    heard = x.index_select(0, index.flatten()).view(*index.shape, -1)
    pairs = torch.cat([x[:, None].expand_as(heard), heard, edges], dim=-1)
    return functional.silu(joint(pairs)).sum(1)


def in_parts(x, edges, index, one, other, third, joint):
    heard = one(x).index_select(0, index.flatten()).view(*index.shape, -1)
    return functional.silu(heard + other(x)[:, None] + third(edges)).sum(1)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("program", "twin"), [(gathered, before_gather), (repeated, before_repeat), (messages, in_parts)]
)
def test_the_saving_is_what_the_layer_before_the_gather_saves(program, twin, trained):
    seen, mended = (examined(build(item, trained=trained)) for item in (program, twin))
    saved_s = seconds_of(seen) - seconds_of(mended)
    (finding,) = found_in(seen, RULE)
    assert finding.saving_s == pytest.approx(saved_s, rel=0.2)
    assert found_in(mended, RULE) == []


def test_rows_that_are_selected_and_not_repeated_are_fewer_already():
    def program(x, edges, index, one, other, third, joint):
        return one(x[index[:, 0]])

    assert found_in(examined(build(program)), RULE) == []


def test_rows_that_are_added_up_before_the_layer_are_not_those_of_the_gather():
    def program(x, edges, index, one, other, third, joint):
        return one(x[index] + edges.sum(-1, keepdim=True))

    assert found_in(examined(build(program)), RULE) == []


def sums_of_neighbours(make, *, narrow=64, trained=False):
    def prepare():
        x = torch.randn(NODES, SIZE, requires_grad=trained)
        source, target = torch.randint(NODES, (2, NODES * NEAR))
        linear = torch.nn.Linear(SIZE, narrow)

        def step():
            result = make(x, source, target, linear)
            if trained:
                result.sum().backward()
            return result

        return step

    return prepare


def late_mean(x, source, target, linear):
    heard = x.index_select(0, source)
    index = target[:, None].expand_as(heard)
    total = x.new_zeros(x.shape).scatter_add_(0, index, heard)
    count = torch.zeros_like(total).scatter_add_(0, index, torch.ones_like(heard))
    return linear(total / count.clamp(min=1))


def early_mean(x, source, target, linear):
    return late_mean(functional.linear(x, linear.weight), source, target, lambda mean: mean + linear.bias)


def late_sum(x, source, target, linear):
    return linear(torch.zeros_like(x).index_add_(0, target, x[source] * target[:, None]))


def early_sum(x, source, target, linear):
    rows = functional.linear(x, linear.weight)
    return torch.zeros_like(rows).index_add_(0, target, rows[source] * target[:, None]) + linear.bias


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("program", "twin"), [(late_mean, early_mean), (late_sum, early_sum)])
def test_rows_that_are_summed_by_index_can_be_made_narrower_before(program, twin, trained):
    seen, mended = (examined(sums_of_neighbours(item, trained=trained)) for item in (program, twin))
    (finding,) = found_in(seen, RULE)
    assert finding.saving_s == pytest.approx(seconds_of(seen) - seconds_of(mended), rel=0.2)
    assert found_in(mended, RULE) == []


def test_counts_as_wide_as_the_rows_are_a_waste_of_their_own():
    seen = examined(sums_of_neighbours(late_mean))
    (alone,) = found_in(seen, "equal-columns")
    counted = [i for i, op in enumerate(seen.ops) if op.packet in ("aten.ones_like", "aten.scatter_add_")][1:]
    assert alone.saving_s > 0.9 * seen.seconds(counted)


@pytest.mark.parametrize(
    "program",
    [
        lambda x, source, target, linear: linear(torch.zeros_like(x).index_add_(0, target, x[source]).relu()),
        lambda x, source, target, linear: linear(torch.zeros_like(x).index_add_(0, target, x[source].tanh())),
        lambda x, source, target, linear: linear(torch.zeros_like(x).index_add_(0, target, x[source] * x[target])),
        lambda x, source, target, linear: linear(x.clone().index_add_(0, target, x[source])),
        lambda x, source, target, linear: linear(torch.zeros_like(x).scatter_add_(0, (x > 0).long(), x[source])),
        lambda x, source, target, linear: (lambda y: linear(y).sum() + y.sum())(
            torch.zeros_like(x).index_add_(0, target, x[source])
        ),
    ],
    ids=["activation", "of each", "pairs", "added", "elements", "read twice"],
)
def test_other_sums_need_their_width(program):
    assert found_in(examined(sums_of_neighbours(program)), RULE) == []


def test_a_layer_that_makes_summed_rows_wider_is_where_it_should_be():
    assert found_in(examined(sums_of_neighbours(late_mean, narrow=2 * SIZE)), RULE) == []
