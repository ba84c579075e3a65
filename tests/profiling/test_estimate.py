"""The whole chain: code on fake tensors, costs, bounds, floors."""

import pytest
import torch

import nearpeak
from nearpeak.errors import UnknownMachine

A100 = "a100-pcie-80gb"


def matrix(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("m", "n", "k", "intensity", "limiter"),
    [(8192, 128, 8192, 124.1, "memory"), (8192, 8192, 8192, 2730.7, "compute")],
)
def test_the_intensity_of_a_matrix_product(m, n, k, intensity, limiter):
    found = nearpeak.estimate(torch.mm, matrix(m, k), matrix(k, n), on=A100, ceilings="theoretical")
    assert round(found.flops / found.bytes, 1) == intensity
    assert found.ops[0].limiter == limiter
    peak, bandwidth = 312e12, 1.935e12
    written = 2 * m * n if m * n * 2 > 40 * 2**20 else 0  # a result that the cache can hold need not reach memory
    seconds = max(2 * m * n * k / peak, (2 * (m * k + k * n) + written) / bandwidth)
    assert found.as_written_s == pytest.approx(seconds)


def test_an_addition_moves_three_tensors():
    x = matrix(2048, 4096, dtype=torch.float32)
    found = nearpeak.estimate(torch.add, x, x.clone(), on="h200-sxm", ceilings="theoretical")
    assert found.bytes == 3 * 2048 * 4096 * 4
    assert nearpeak.estimate(torch.add, x, x, on="h200-sxm").bytes == 2 * 2048 * 4096 * 4  # one tensor twice: read once


def test_a_product_with_a_vector_is_limited_by_memory():
    found = nearpeak.estimate(torch.mv, matrix(8192, 4096), matrix(4096), on="h200-sxm")
    assert found.ops[0].limiter == "memory"
    assert found.bytes == 2 * (8192 * 4096 + 4096 + 8192)


def test_attention_written_out_has_the_floor_of_fused_attention_once_it_is_fused():
    heads, groups, tokens, width = 64, 4, 4096, 128
    q, k, v = matrix(heads, tokens, width), matrix(groups, tokens, width), matrix(groups, tokens, width)

    def naive(q, k, v):
        k, v = (t.repeat_interleave(heads // groups, dim=0, output_size=heads) for t in (k, v))
        return torch.softmax(q @ k.transpose(-1, -2) / width**0.5, -1) @ v

    found = nearpeak.estimate(naive, q, k, v, on="h200-sxm")
    scores = heads * tokens * tokens * 2
    assert found.bytes > 6 * scores  # product, scaling and softmax each write and read them
    assert found.fused_s < found.as_written_s / 3
    assert sum(group.saved_bytes for group in found.groups) >= 6 * scores


def training_step(layers=2, width=256, tokens=128, vocabulary=1000):
    with nearpeak.fake():
        model = torch.nn.Sequential(
            torch.nn.Embedding(vocabulary, width),
            *(torch.nn.Linear(width, width, bias=False) for _ in range(layers)),
            torch.nn.Linear(width, vocabulary, bias=False),
        )
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.zeros(tokens, dtype=torch.long)

    def step(ids):
        torch.nn.functional.cross_entropy(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, ids


def test_the_products_of_a_training_step_are_six_per_weight_and_token():
    step, ids = training_step()
    found = nearpeak.estimate(step, ids, on="h200-sxm")
    products = sum(op.flops for op in found.ops if op.family == "matrix")
    weights = 2 * 256 * 256 + 256 * 1000
    assert products == 6 * weights * 128
    assert found.coverage.seconds_share == 1.0
    assert {op.phase for op in found.ops} == {"forward", "backward", "optimizer"}


def test_the_floors_are_in_order():
    step, ids = training_step()
    for machine in ("h200-sxm", "mi300x", "rtx-4090"):
        found = nearpeak.estimate(step, ids, on=machine)
        assert 0 < found.ideal_s <= found.fused_s <= found.as_written_s


def test_seventy_billion_parameters_take_no_memory():
    with nearpeak.fake():
        layers = [torch.nn.Linear(16384, 65536, bias=False, dtype=torch.bfloat16) for _ in range(66)]
        x = torch.empty(8, 16384, dtype=torch.bfloat16)

    def forward(x):
        return [layer(x) for layer in layers]

    found = nearpeak.estimate(forward, x, on="h200-sxm")
    assert sum(op.bytes_read for op in found.ops) > 66 * 16384 * 65536 * 2
    assert found.as_written_s > 0.02


def test_ops_point_at_the_line_that_ran_them():
    found = nearpeak.estimate(lambda x: torch.exp(x), matrix(64), on="h200-sxm")
    assert "test_estimate.py:" in found.ops[0].source


def test_a_machine_that_is_not_known_is_refused_before_anything_runs():
    with pytest.raises(UnknownMachine, match="h100-sxm"):
        nearpeak.estimate(pytest.fail, "was called", on="h100-sxn")


def test_what_is_assumed_about_values_is_said():
    assumed = nearpeak.estimate(lambda x: x if x.sum().item() > 0 else -x, torch.empty(400, 400), on="h200-sxm")
    assert "assumed: test_estimate.py:" in assumed.notes[0]
    found = nearpeak.estimate(lambda x: x if x.sum().item() > 0 else -x, torch.ones(4), on="h200-sxm", live=True)
    assert found.ops[0].name == "aten.sum.default"


def test_a_fake_module_converts_as_a_real_one_does():
    with nearpeak.fake():
        tied = torch.nn.Embedding(10, 4, padding_idx=0)  # its padding row keeps a second reference to the weight
        head = torch.nn.Linear(4, 10, bias=False)
        head.weight = tied.weight
        scale = torch.nn.Module()
        scale.factor = torch.nn.Parameter(torch.tensor(2.5), requires_grad=False)
        model = torch.nn.ModuleList([tied, head, scale, torch.nn.BatchNorm1d(4)]).to(torch.bfloat16)
    assert head.weight is tied.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert isinstance(scale.factor, torch.nn.Parameter) and not scale.factor.requires_grad
    assert model[3].running_mean.dtype == torch.bfloat16
    assert model[3].num_batches_tracked.dtype == torch.int64


def test_a_short_range_keeps_its_values():
    with nearpeak.fake():
        rates = [rate.item() for rate in torch.linspace(0, 0.4, 5)]
        halves = [half.tolist() for half in torch.linspace(0, 0.3, 4).split(2)]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert halves == [pytest.approx([0, 0.1]), pytest.approx([0.2, 0.3])]


def test_an_initializer_that_looks_at_values_leaves_fake_tensors_alone():
    with nearpeak.fake():
        weight = torch.nn.init.trunc_normal_(torch.nn.Parameter(torch.empty(4, 4)))
    assert weight.shape == (4, 4)
    assert torch.nn.init.trunc_normal_(torch.zeros(100)).std() > 0.5  # outside, it draws


def test_it_is_named_in_one_line():
    found = nearpeak.estimate(torch.mm, torch.empty(64, 64), torch.empty(64, 64), on="h100-sxm")
    assert repr(found).startswith("<Estimate of 1 ops on h100-sxm: as written ")
    assert "\n" not in repr(found)


@pytest.mark.parametrize("machine", ["h200-sxm", "a100-sxm-80gb"])
@pytest.mark.parametrize(("name", "args"), [("nan_to_num", ()), ("clamp", (0.0, 1.0))])
def test_a_kernel_that_stores_what_it_leaves_unchanged_is_expected_to_take_the_time_of_its_stores(machine, name, args):
    with nearpeak.fake():
        x = torch.empty(2**28, dtype=torch.bfloat16, device="cuda")
    apart = nearpeak.estimate(getattr(torch.Tensor, name), x, *args, on=machine)
    in_place = nearpeak.estimate(getattr(torch.Tensor, f"{name}_"), x, *args, on=machine)
    assert in_place.as_written_s < 0.6 * apart.as_written_s  # no write is unavoidable
    assert in_place.expected_device_s == pytest.approx(apart.expected_device_s, rel=0.01)
