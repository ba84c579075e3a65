"""What is written as many ops and could be few: attention, norms, rotary embeddings, gates, residuals, any chain."""

import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in
from made_up import slow_cpu
from planted import load, planted
from torch.nn import functional

import nearpeak
from nearpeak.findings.engine import wastes_of
from nearpeak.machines.machine import Ceiling
from nearpeak.trace.cuda_ops.target import Target

ON_GPU = [
    *("attention_written_out", "attention_written_out_causal", "attention_softmax_spelled_out"),
    *("unfused_norm", "unfused_rms_norm", "unfused_rotary", "unfused_gated_activation", "unfused_swiglu"),
    *("unfused_residual", "unfused_pointwise", "unfused_pointwise_trained"),
]
COMPILED_TWINS = ("unfused_swiglu", "unfused_residual", "unfused_rotary", "unfused_gated_activation")
UNCOMPILED = [name for name in ON_GPU if name not in COMPILED_TWINS]


def rules(step):
    """Names of rules of a step on real tensors, where each op takes a millisecond."""
    return [finding.rule for finding in found_in(examined(lambda: step, times=lambda op, expected: 1e-3, live=True))]


def randn(*shape, **options):
    return torch.randn(shape, **options)


@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_gpu_it_is_found_at_its_line_and_saves_less_than_all(name):
    module = load(name)
    step = examined(lambda: module.waste("cuda"))
    found = found_in(step)
    assert [(finding.rule, finding.source) for finding in found] == [(module.RULE, planted(name))]
    assert 0.03 < found[0].share < 0.98


FIXES = {
    "unfused_norm": "layer_norm",
    "unfused_rms_norm": "rms_norm",
    "unfused_rotary": "rotary_pair",
    "unfused_swiglu": "swiglu",
    "unfused_residual": "add_layer_norm",
}


@pytest.mark.parametrize("name", FIXES)
def test_on_a_gpu_the_kernel_that_does_it_is_named(name):
    (finding,) = found_in(examined(lambda: load(name).waste("cuda")))
    kernel = finding.fix.id
    assert kernel in nearpeak.kernels.__all__
    assert kernel == FIXES[name]


@pytest.mark.parametrize("name", UNCOMPILED)
def test_on_a_gpu_the_better_form_is_not_named(name):
    module = load(name)
    assert found_in(examined(lambda: module.clean("cuda"))) == []


def attention(query, key, value):
    weights = torch.softmax(query @ key.transpose(-2, -1), dim=-1)
    return weights, weights @ value


def test_attention_whose_probabilities_are_wanted_is_not_named():
    tensors = [randn(2, 4, 64, 16) for _ in range(3)]
    assert "attention-written-out" in rules(lambda: attention(*tensors)[1])
    assert "attention-written-out" not in rules(lambda: attention(*tensors))
    assert "attention-written-out" not in rules(lambda: (lambda pair: pair[1] + pair[0].sum())(attention(*tensors)))


@pytest.mark.parametrize("read", [False, True])
def test_torchs_module_writes_the_matrix_for_weights_that_are_not_read(read):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(256, 4, batch_first=True, device="cuda")

        def forward(self, x):
            y, weights = self.attention(x, x, x)
            return y, weights if read else None

    def build():
        layer, x = Layer(), torch.randn(8, 512, 256, device="cuda", requires_grad=True)
        return lambda: layer(x)

    found = found_in(examined(build), "attention-written-out")
    assert [finding.remedy.partition("  #")[0] for finding in found] == (
        [] if read else ["y, _ = attention(query, key, value, need_weights=False)"]
    )


def test_a_softmax_over_another_dimension_is_no_attention():
    query, key, value = (randn(2, 4, 64, 16) for _ in range(3))
    assert "attention-written-out" not in rules(lambda: torch.softmax(query @ key.mT, dim=-2) @ value)


def test_two_ops_are_no_chain_and_a_chain_stops_at_a_product():
    x = randn(64, 64)
    assert rules(lambda: x.exp() + 1) == []
    assert "unfused-pointwise" not in rules(lambda: (x.exp() + 1) @ (x.cos() * 2))
    assert rules(lambda: (x.exp() + 1).tanh()) == ["unfused-pointwise"]


@pytest.mark.parametrize(
    ("written_out", "call"),
    [
        (lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3))), 'gelu(x, approximate="tanh")'),
        (lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), "gelu(x)"),
        (lambda x: x * torch.sigmoid(x) + 1 - x, "silu(x)"),
        (lambda x: (x.exp() + 1).tanh(), "@torch.compile"),
        (lambda x: (0.5 * x + 1).tanh() * 2, "@torch.compile"),
    ],
)
def test_a_function_of_torchs_that_is_written_out_is_named(written_out, call):
    x = randn(64, 64)
    (found,) = found_in(examined(lambda: lambda: written_out(x)), "unfused-pointwise")
    assert call in found.remedy


def test_what_others_read_in_between_is_still_written():
    def build():
        x = torch.empty(16384, 16384)

        def step():
            first = x.exp()
            second = first + 1
            return first, second, second.tanh()

        return step

    found = found_in(examined(build), "unfused-pointwise")
    assert [finding.share for finding in found] == [pytest.approx(1 / 3, abs=0.03)]


def test_a_norm_over_the_first_dimension_is_none_of_torchs():
    x = randn(64, 64)
    assert "unfused-norm" not in rules(lambda: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6))
    assert "unfused-norm" in rules(lambda: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_a_gate_that_is_the_value_itself_is_no_gate():
    x, other = randn(64, 64), randn(64, 64)
    assert rules(lambda: torch.sigmoid(x) * x) == []
    assert rules(lambda: torch.sigmoid(x) * other) == ["unfused-gated-activation"]
    assert rules(lambda: functional.silu(x) * other[:1]) == []


def test_a_rotary_embedding_of_halves_put_together_is_one_too():
    x, cos, sin = randn(2, 4, 32, 64), randn(32, 32), randn(32, 32)

    def step():
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    assert rules(step) == ["unfused-rotary"]


def test_a_sum_of_products_of_two_tensors_is_no_rotary_embedding():
    x, y, cos, sin = randn(2, 4, 32, 64), randn(2, 4, 32, 64), randn(32, 64), randn(32, 64)
    assert "unfused-rotary" not in rules(lambda: x * cos + y * sin)


@pytest.mark.parametrize("kept", [True, False])
def test_a_residual_that_is_wanted_later_saves_a_read_and_else_a_write_too(kept):
    x, residual = randn(64, 64), randn(64, 64)

    def step():
        total = x + residual
        y = functional.layer_norm(total, (64,))
        return (y, total) if kept else y

    found = found_in(examined(lambda: step, times=lambda op, expected: 1e-3, live=True), "unfused-residual")
    saved = 1 / 2 if kept else 1 / 2 + 1 / 3
    assert [finding.saving_s for finding in found] == [pytest.approx(1e-3 * saved, rel=0.02)]


def test_backward_goes_with_the_line_that_it_belongs_to():
    query, key = (randn(2, 4, 32, 64, requires_grad=True) for _ in range(2))
    cos, sin = randn(32, 64), randn(32, 64)

    def turned(x):
        left, right = x.chunk(2, dim=-1)
        return torch.cat((-right, left), dim=-1)

    def step():
        first = query * cos + turned(query) * sin
        second = key * cos + turned(key) * sin
        (first.sum() + second.sum()).backward()

    found = found_in(examined(lambda: step, times=lambda op, expected: 1e-3, live=True), "unfused-rotary")
    assert [len(finding.ops) for finding in found] == [len(found[0].ops)] * 2
    assert not set(found[0].ops) & set(found[1].ops)


def test_nan_to_num_after_a_masked_softmax_is_named_and_other_ones_are_not():
    scores, mask = randn(4, 64, 64), torch.ones(64, 64, dtype=torch.bool)
    masked = "nan-to-num-for-fill"
    assert masked in rules(lambda: torch.softmax(scores.masked_fill(mask, -torch.inf), -1).nan_to_num(0.0))
    assert masked not in rules(lambda: torch.softmax(scores, -1).nan_to_num(0.0))
    assert masked not in rules(lambda: (scores / scores.sum()).nan_to_num(0.0))
    assert masked not in rules(lambda: scores.nan_to_num(0.0))


def test_kernels_of_a_compiler_are_left_to_it():
    x = randn(64, 64)
    step = examined(lambda: lambda: (x.sin() * 2 + 1).cos(), times=lambda op, expected: 1e-3, live=True)
    assert [finding.rule for finding in found_in(step)] == ["unfused-pointwise"]
    ops = tuple(dataclasses.replace(op, name=f"inductor.{op.packet}", origin="inductor") for op in step.ops)
    compiled = dataclasses.replace(step, trace=dataclasses.replace(step.trace, ops=ops))
    vars(compiled).update(costs=step.costs, touches=step.touches, flow=step.flow)  # which go by the names of ops
    assert not found_in(compiled)


def turning(swapped):
    def build():
        shape = (4, 4096, 32, 128) if swapped else (4, 32, 4096, 128)
        x = torch.randn(shape)
        x = x.transpose(1, 2) if swapped else x
        cos, sin = torch.randn(4096, 128), torch.randn(4096, 128)

        def step():
            left, right = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-right, left), dim=-1) * sin

        return step

    return build


def test_a_rotary_embedding_of_swapped_heads_takes_twice_as_long_compiled():
    steps = [examined(turning(swapped)) for swapped in (False, True)]
    left = [step.profile.wall_s - found_in(step, "unfused-rotary")[0].saving_s for step in steps]
    assert left[1] == pytest.approx(2 * left[0], rel=0.05)


def test_slow_orders_of_tensors_do_not_make_the_fused_kernel_faster():
    def build():
        both = torch.randn(16384, 2 * 4096, dtype=torch.bfloat16)
        gate, up = both.chunk(2, dim=-1)
        return lambda: functional.silu(gate) * up

    usual = examined(build)
    quick = examined(build, times=lambda op, expected: 0.6 * expected)  # halves of rows, which are not that slow
    left = [step.profile.wall_s - found_in(step, "unfused-gated-activation")[0].saving_s for step in (usual, quick)]
    assert left[0] == pytest.approx(left[1])


def test_on_a_cpu_a_fused_kernel_still_computes_its_transcendental_functions():
    def build():
        x = torch.randn(2**22)
        return lambda: ((x + 1).tanh() * 2 + 1).tanh() * 3

    before = slow_cpu()
    rate = Ceiling(value=2e8, spread=0.0, how="made up")
    achievable = dataclasses.replace(before.achievable, ceilings={"transcendental.tanh": rate})
    machine = dataclasses.replace(before, achievable=achievable)
    arithmetic = 2 * 2**22 / 2e8  # more than all of the traffic

    def left(machine):
        def times(op, expected):
            return arithmetic / 2 if op.packet == "aten.tanh" else expected

        step = examined(build, machine=machine, target=Target(kind="cpu"), times=times)
        return step.profile.wall_s - sum(finding.saving_s for finding in found_in(step, "unfused-pointwise"))

    assert left(machine) == pytest.approx(arithmetic, rel=0.01)  # and the call of compiled code
    assert left(before) != pytest.approx(arithmetic, rel=0.01)  # without the rate, the pace of these ops is known


def test_short_rows_of_a_norm_are_left_to_a_compiler():
    def remedy(width):
        def build():
            x = torch.randn(1 << 24 >> 6, width)
            return lambda: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

        return found_in(examined(build), "unfused-norm")[0].remedy

    assert "torch.compile" in remedy(64) and "rms_norm" in remedy(1024)


def test_copies_to_the_host_are_no_chain():
    start, host = randn(64, 64), torch.zeros(8, 64)

    def step():
        x = start
        for row in range(8):
            x = x.softmax(-1)
            host[row].copy_(x[0])
        return x

    seen = examined(lambda: step, times=lambda op, expected: 1e-3, live=True)
    assert [finding.rule for finding in found_in(seen)] == ["unfused-pointwise"]
    there = next(op.inputs[0].storage for op in seen.ops if op.packet == "aten.copy_")
    trace = dataclasses.replace(seen.trace, on_host=frozenset({there}))
    assert not found_in(dataclasses.replace(seen, trace=trace), "unfused-pointwise")


def chain_on_a_cpu(elements, fn, times=lambda op, expected: expected):
    """What is found about some pointwise ops of one tensor on a slow CPU."""

    def build():
        x = torch.randn(elements)
        return lambda: fn(x)

    step = examined(build, machine=slow_cpu(), target=Target(kind="cpu"), times=times)
    return found_in(step, "unfused-pointwise")


def test_on_a_cpu_the_call_of_compiled_code_costs_more_than_some_small_ops():
    def ops(x):
        return ((x + 1) * 2 - 3).neg().abs() + x

    assert not chain_on_a_cpu(64, ops)
    assert chain_on_a_cpu(1 << 22, ops)


def test_on_a_cpu_fused_random_numbers_are_as_slow_as_others():
    def ops(x):
        return (torch.empty_like(x).exponential_() * x + 1).neg()

    def slow(op, expected):
        return 0.2 if op.packet == "aten.exponential_" else expected

    assert not chain_on_a_cpu(1 << 22, ops, slow)


def test_products_between_small_ops_make_several_calls_of_compiled_code():
    weight = torch.randn(8, 8)

    def ops(x, products):
        for _ in range(12):
            x = (x + 1) * 2 - 3
            x = x + (x @ weight).sum() if products else x.neg()
        return x

    together = chain_on_a_cpu((400, 8), lambda x: ops(x, products=False))
    apart = chain_on_a_cpu((400, 8), lambda x: ops(x, products=True))
    assert together and not apart


def test_all_that_reads_or_writes_the_scores_goes_with_attention_under_autocast():
    """The softmax is in float32 there: the gradient of the probabilities is cast before it."""

    def build():
        attention, x = torch.nn.MultiheadAttention(256, 4, batch_first=True), torch.randn(8, 384, 256)

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                attention(x, x, x)[0].float().square().mean().backward()

        return step

    step = examined(build)
    (waste,) = wastes_of(step, "attention-written-out")
    scores = 8 * 4 * 384 * 384
    of_scores = {
        index
        for index, op in enumerate(step.ops)
        if step.time(index) and any(tensor.elements == scores for tensor in (*op.inputs, *op.outputs))
    }
    assert of_scores and of_scores <= set(waste.gains)


def test_what_is_differentiated_twice_is_not_for_torch_compile_to_differentiate():
    def build(*, twice):
        layers = torch.nn.Sequential(torch.nn.Linear(3, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1))
        x = torch.randn(2048, 3, requires_grad=True)

        def step():
            u = torch.tanh(layers(x).sin() * 2 + 1).square() / 3
            if twice:
                (u,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            u.square().mean().backward()

        return step

    remedies = {
        twice: [
            found.remedy
            for found in found_in(examined(lambda twice=twice: build(twice=twice), live=True), "unfused-pointwise")
        ]
        for twice in (False, True)
    }
    assert all("Put these lines into" in remedy for remedy in remedies[False])
    assert any("torch.func" in remedy for remedy in remedies[True])
    assert remedies[False]
