"""MFU, HFU and shares, on a machine with round figures."""

import dataclasses

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from nearpeak.bound.estimate import estimate_trace
from nearpeak.machines.machine import Achievable, Machine, Theoretical
from nearpeak.profiles.rates import step_rates
from nearpeak.trace.trace import trace

TERA = 1e12
MACHINE = Machine(
    id="toy",
    name="Toy",
    kind="gpu",
    vendor="none",
    architecture="none",
    processors=1,
    memory_bytes=1e9,
    theoretical=Theoretical(
        matrix={"bfloat16": 8 * TERA}, vector={"float32": 2 * TERA}, bandwidth=2 * TERA, source="made up"
    ),
    achievable=Achievable(
        how="measured", note="", bandwidth=1 * TERA, matrix={"bfloat16": 4 * TERA}, vector={"float32": 1 * TERA}
    ),
)
WIDTH, BATCH = 16, 8
PRODUCT = 2.0 * BATCH * WIDTH * WIDTH


def rates(step, *args, machine=MACHINE, wall_s=1.0, kernel_s=0.5, **options):
    traced = trace(step, *args)
    estimate = estimate_trace(traced, machine)
    return step_rates(traced, estimate, machine, wall_s=wall_s, kernel_s=kernel_s, **options)


def inputs(dtype=torch.float32):
    return torch.empty(BATCH, WIDTH, dtype=dtype, requires_grad=True)


def test_a_linear_layer_has_three_products():
    model = torch.nn.Linear(WIDTH, WIDTH)
    found = rates(lambda x: model(x).relu().sum().backward(), inputs())
    assert found.model_flops == found.hardware_flops == 3 * PRODUCT
    assert found.mfu == found.hfu == pytest.approx(3 * PRODUCT / (2 * TERA))
    assert found.flops_per_s == 3 * PRODUCT
    assert found.kernel_flops_per_s == 6 * PRODUCT
    assert found.compute_share == pytest.approx(3 * PRODUCT / TERA)
    assert found.kernel_compute_share == pytest.approx(6 * PRODUCT / TERA)


@pytest.mark.parametrize("reentrant", [False, True], ids=["by hooks", "reentrant"])
def test_what_is_computed_again_is_hardware_flops_alone(reentrant):
    blocks = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(3)]

    def step(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        x.sum().backward()

    found = rates(step, inputs())
    assert found.model_flops == 9 * PRODUCT
    assert found.hardware_flops == 12 * PRODUCT
    assert found.hfu / found.mfu == pytest.approx(12 / 9)


def test_gradient_accumulation_counts_every_pass():
    model = torch.nn.Linear(WIDTH, WIDTH)

    def step(x):
        for _ in range(4):
            model(x).sum().backward()

    assert rates(step, inputs()).model_flops == 12 * PRODUCT


def test_each_dtype_has_its_own_peak():
    wide, narrow = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def step(x):
        with torch.no_grad():
            narrow(wide(x).bfloat16())

    found = rates(step, inputs(), wall_s=1e-9)
    assert found.model_flops == 2 * PRODUCT
    assert found.mfu == pytest.approx((PRODUCT / (2 * TERA) + PRODUCT / (8 * TERA)) / 1e-9)
    assert found.compute_share == pytest.approx((PRODUCT / (1 * TERA) + PRODUCT / (4 * TERA)) / 1e-9)


def test_fused_attention_computes_its_scores_twice_and_the_model_does_not():
    heads, length, head = 2, 32, 16
    query = torch.empty(1, heads, length, head, requires_grad=True)

    def step(query):
        scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()

    pairs = heads * length * (length + 1) / 2
    found = rates(step, query)
    assert found.model_flops == pytest.approx(6 * 2 * pairs * head)
    assert found.hardware_flops == pytest.approx(7 * 2 * pairs * head)


def test_a_convolution_counts_in_its_direct_form():
    layer = torch.nn.Conv2d(4, 4, 3, bias=False, dtype=torch.bfloat16)  # its bound is that of a fast algorithm

    def step(x):
        with torch.no_grad():
            layer(x)

    assert rates(step, torch.empty(1, 4, 10, 10, dtype=torch.bfloat16)).model_flops == 2 * 4 * 8 * 8 * 4 * 9


def test_the_least_bytes_cross_memory_once():
    found = rates(torch.add, torch.empty(1000), torch.empty(1000), kernel_s=0.25)
    assert found.memory_bytes == pytest.approx(3 * 4000)
    assert found.bytes_per_s == found.memory_bytes
    assert found.kernel_bytes_per_s == 4 * found.memory_bytes
    assert found.bandwidth_share == pytest.approx(found.memory_bytes / TERA)
    assert found.kernel_bandwidth_share == pytest.approx(4 * found.memory_bytes / TERA)
    assert (found.model_flops, found.mfu) == (0.0, 0.0)


def test_without_a_peak_there_is_no_utilization():
    model = torch.nn.Linear(WIDTH, WIDTH)
    found = rates(model, inputs(), machine=dataclasses.replace(MACHINE, theoretical=None), kernel_s=0.0)
    assert (found.mfu, found.hfu, found.kernel_flops_per_s, found.kernel_bandwidth_share) == (None,) * 4
    assert found.compute_share == pytest.approx(PRODUCT / TERA)
    assert MACHINE.theoretical is not None
    without = dataclasses.replace(MACHINE.theoretical, vector={})
    assert rates(model, inputs(), machine=dataclasses.replace(MACHINE, theoretical=without)).mfu is None


def test_a_step_without_time_has_no_rates():
    assert rates(torch.add, torch.empty(1), torch.empty(1), wall_s=0.0) is None
