"""What is computed or cast twice, and what only looks like it."""

import pytest
import torch
from gpu_steps import examined, found_in
from torch.nn import functional

SIZE = (256, 256)


def names(step, rule):
    """Names of the ops that are found, of a step on real tensors, where each op takes a millisecond."""
    seen = examined(lambda: step, times=lambda op, expected: 1e-3, live=True)
    return [seen.ops[index].packet for finding in found_in(seen, rule) for index in finding.ops]


def ones(**options):
    return torch.ones(SIZE, **options)


def test_a_chain_that_runs_twice_is_one_finding_with_all_its_ops():
    x = ones()

    def chain():
        return (x.exp() + 1).tanh()

    assert names(lambda: chain() @ chain(), "computed-twice") == ["aten.exp", "aten.add", "aten.tanh"]


def test_other_arguments_are_another_computation():
    x = ones()
    assert names(lambda: (x + 1) @ (x + 2), "computed-twice") == []


def test_what_was_written_in_between_is_computed_anew():
    x = ones()

    def step():
        before = x.exp()
        x.add_(1)
        return before @ x.exp()

    assert names(step, "computed-twice") == []


def test_a_result_that_is_written_to_cannot_be_shared():
    x = ones()

    def step():
        kept, changed = x.exp(), x.exp()
        changed.mul_(2)
        return kept @ changed

    assert names(step, "computed-twice") == []


def test_a_view_in_place_changes_no_element():
    x = ones()

    def chain():
        return (x.exp().transpose_(0, 1) + 1).tanh()

    found = names(lambda: chain() @ chain(), "computed-twice")
    assert found == ["aten.exp", "aten.transpose_", "aten.add", "aten.tanh"]


def test_a_spectrum_that_is_computed_again_goes_with_what_follows_it_and_its_backward():
    x, window = torch.ones(4, 4096, requires_grad=True), torch.ones(256)

    def magnitude():
        spectrum = torch.stft(x, 256, window=window, return_complex=True)
        return torch.view_as_real(spectrum).square().sum(dim=-1).sqrt()

    found = names(lambda: (magnitude().norm() + magnitude().log().sum()).backward(), "computed-twice")
    assert {"aten._fft_r2c", "aten.pow", "aten.sum", "aten.sqrt", "aten._fft_c2c", "aten.index_add_"} <= set(found)


@pytest.mark.parametrize("op", [torch.rand_like, torch.zeros_like, functional.dropout, torch.bernoulli])
def test_random_numbers_and_new_buffers_differ(op):
    x = ones()
    assert names(lambda: op(x) @ op(x), "computed-twice") == []


def test_what_nobody_reads_is_not_a_second_use():
    x = ones()

    def step():
        x.exp()
        return x.exp().sum()

    assert names(step, "computed-twice") == []


def test_a_cast_is_repeated_if_nothing_was_written_in_between():
    x, y = ones(), ones(dtype=torch.float64)

    def step(write=False):
        first = y @ x.double()
        if write:
            x.add_(1)
        return first @ x.double()

    assert names(step, "repeated-cast") == ["aten._to_copy"]
    assert names(lambda: step(write=True), "repeated-cast") == []
    assert names(step, "computed-twice") == []


def test_casts_to_other_dtypes_or_of_other_parts_are_not_repeated():
    x = ones()
    assert names(lambda: (x.double().sum(), x.half().sum()), "repeated-cast") == []
    assert names(lambda: (x[:128].double().sum(), x[128:].double().sum()), "repeated-cast") == []


def test_one_cast_of_gradients_is_left():
    x, y = ones(requires_grad=True), ones(dtype=torch.float64)

    def step():
        total = sum((y @ x.double()).sum() for _ in range(3))
        return torch.autograd.grad(total, x)

    assert names(step, "repeated-cast") == ["aten._to_copy"] * 4


class Layer(torch.nn.Module):
    """Casts what it is given at one line, as each projection of an attention does under autocast."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2048, 4))

    def forward(self, x):
        return x.float() @ self.weight


@pytest.mark.slow
@pytest.mark.parametrize("residual", [False, True])
def test_gradients_of_a_line_that_runs_in_many_modules_are_those_of_its_module(residual):
    layers = torch.nn.ModuleList(Layer() for _ in range(6))
    x = torch.ones(2048, 2048, requires_grad=True, dtype=torch.float64)
    back = torch.ones(4, 2048, dtype=torch.float64)

    def step():
        y = x
        for first, second, third in (layers[:3], layers[3:]):
            y = functional.softmax(y, dim=-1)
            y = (first(y) + second(y) + third(y)).double() @ back + (y if residual else 0)
        y.sum().backward()

    seen = examined(lambda: step, times=lambda op, expected: 1e-3, live=True)
    (found,) = found_in(seen, "repeated-cast")
    counts = {}
    for index in found.ops:
        op = seen.ops[index]
        counts[op.packet, op.phase] = counts.get((op.packet, op.phase), 0) + 1
    # Of both softmaxes: two casts of forward, two of backward, and the two sums of three gradients, which get shorter.
    assert counts == {
        ("aten._to_copy", "forward"): 4,
        ("aten._to_copy", "backward"): 4,
        ("aten.add", "backward"): 4,
    }
    assert 8e-3 < found.saving_s < 11e-3
    assert "Its gradients are added in float32" in found.reasoning


def test_quantiles_of_the_same_rows_one_level_at_a_time():
    paths = torch.rand(6, 60, 24)
    levels = torch.arange(1, 10) / 10

    def step():
        scaled = paths * 2
        return torch.stack([torch.quantile(scaled, level, dim=1) for level in levels])

    for inference in (False, True):
        with torch.inference_mode(inference):
            seen = examined(lambda: step, times=lambda op, expected: 1e-3, live=True)
        (found,) = found_in(seen, "computed-twice")
        packets = [seen.ops[index].packet for index in found.ops]
        # The check for NaN goes with each sort; what is gathered for all levels at once is one op for each of nine.
        assert packets.count("aten.sort") == packets.count("aten.isnan") == packets.count("aten.gather") / 2 == 8
        assert "all levels in one call" in found.remedy
        assert found.saving_s > 8 * 9e-3


def test_a_quantile_of_other_rows_is_another_one():
    paths = torch.rand(6, 60, 24)
    assert (
        names(lambda: torch.quantile(paths, 0.1, dim=1) + torch.quantile(paths + 1, 0.9, dim=1), "computed-twice") == []
    )


@pytest.mark.parametrize(
    ("fn", "packets"),
    [
        (lambda x: (x.topk(5).values.sum(), x.topk(1).values.sum()), ["aten.topk"]),
        (lambda x: (x.topk(1).values.sum(), x.topk(5).values.sum()), ["aten.topk"]),
        (lambda x: (x.sort(1).values.cumsum(1), x.topk(3, 1).values.sum()), ["aten.topk"]),
        (lambda x: (x.sort(1).values.cumsum(1), x.T.topk(3, 0).values.sum()), ["aten.topk"]),
        (lambda x: (x.sort(1).values.cumsum(1), x.median(1).values.sum()), ["aten.median"]),
        (lambda x: (x.sort(1).values.cumsum(1), x.sort(1, descending=True).values.cumsum(1)), ["aten.sort"]),
        (lambda x: [x.kthvalue(k, 1).values.sum() for k in (3, 9, 27)], ["aten.kthvalue"] * 3),
    ],
    ids=["fewer", "more", "of a sort", "transposed", "median", "the other way", "ranks"],
)
def test_rows_that_are_ordered_again_for_other_elements(fn, packets):
    x = torch.rand(SIZE)
    assert names(lambda: fn(x), "computed-twice") == packets


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x.topk(5).values.sum(), x.topk(1, largest=False).values.sum()),
        lambda x: (x.topk(5, 1).values.sum(), x.topk(1, 0).values.sum()),
        lambda x: (x.topk(5, sorted=False).values.sum(), x.topk(1).values.sum()),
        lambda x: (x.topk(5).values.sum(), x.add_(1).topk(1).values.sum()),
        lambda x: (x.topk(5).values.mul_(2).sum(), x.topk(1).values.sum()),
        lambda x: (x.sort(1).values.cumsum(1), x[:128].topk(3, 1).values.sum()),
        lambda x: (x.kthvalue(3, 1).values.sum(), x.kthvalue(3, 0).values.sum()),
    ],
    ids=[
        "the smallest",
        "of columns",
        "in no order",
        "written before",
        "written after",
        "some rows",
        "ranks of columns",
    ],
)
def test_other_rows_or_no_part_of_what_was_found(fn):
    x = torch.rand(SIZE)
    assert names(lambda: fn(x), "computed-twice") == []


def batches_of_rows(*, epochs=3, trained=False, written=False, frozen=True):
    rows, model = torch.randn(64, 256), torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh())
    for parameter in model.parameters():
        parameter.requires_grad_(trained)

    def step():
        total = torch.zeros(())
        for _ in range(epochs):
            for batch in torch.randperm(64).chunk(4):
                total = total + (model(rows[batch]) * 2).sum(dim=-1).mean()
                if written:
                    rows.add_(1)
                if not frozen:
                    model[0].weight.mul_(0.9)
        return total.backward() if trained else total

    return step


def test_rows_that_a_frozen_model_computes_in_every_epoch_are_computed_again():
    step = examined(batches_of_rows, times=lambda op, expected: 1e-3, live=True)
    (found,) = found_in(step, "computed-twice")
    assert {step.ops[index].packet for index in found.ops} == {"aten.addmm", "aten.tanh", "aten.mul", "aten.sum"}
    assert found.saving_s == pytest.approx(step.seconds(found.ops) * 2 / 3)


@pytest.mark.parametrize("options", [{"epochs": 1}, {"trained": True}, {"written": True}, {"frozen": False}])
def test_rows_of_other_values_are_no_rows_that_are_computed_again(options):
    step = examined(lambda: batches_of_rows(**options), times=lambda op, expected: 1e-3, live=True)
    assert found_in(step, "computed-twice") == []


def test_rows_that_a_copy_of_a_policy_is_asked_about_are_computed_again():
    rows, mean, scale = torch.randn(64, 256), torch.nn.Linear(256, 8), torch.nn.Parameter(torch.ones(8))

    def log_prob(x):
        return torch.distributions.Normal(mean(x), scale.exp(), validate_args=False).log_prob(x[:, :8]).sum(dim=-1)

    @torch.no_grad()
    def step():
        return [log_prob(rows[batch]) for _ in range(3) for batch in torch.randperm(64).chunk(4)]

    seen = examined(lambda: step, times=lambda op, expected: 1e-3, live=True)
    found = {index for finding in found_in(seen, "computed-twice") for index in finding.ops}
    for name in ("aten.addmm", "aten.sub", "aten.div", "aten.sum"):
        assert {index for index, op in enumerate(seen.ops) if op.packet == name} <= found


def test_what_calls_of_one_op_of_torchs_compute_again_is_the_callers_to_keep():
    class Sampler(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.identity = torch.nn.Embedding(9600, 256)

        def forward(self, series):
            return self.identity(series) * 2 + self.identity(series).exp() + self.identity(series).sin()

    def build():
        model, series = Sampler().requires_grad_(False), torch.arange(9600)
        return lambda: model(series)

    step = examined(build, live=True)
    (again,) = found_in(step, "computed-twice")
    assert again.library == ""
    assert "model.compile()" not in again.remedy
