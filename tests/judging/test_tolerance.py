"""Rounding is tolerated, and nothing else."""

from __future__ import annotations

import pytest
import torch

from nearpeak.judging.tolerance import Answer, agreement, answer, reach_of_nan, without_nonfinite


def compared(function, candidate, *args):
    known = answer(function, args, {})
    return agreement(candidate(*args), known.own[0], known.exact[0], known.perturbed[0], known)


def product(a, b):
    return a @ b


def factors(dtype=torch.float32, depth=1024):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in ((64, depth), (depth, 48)))


def by_blocks(a, b):
    total = torch.zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[1], 16):
        total += a[:, start : start + 16].float() @ b[start : start + 16].float()
    return total.to(a.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_another_order_of_sums_is_right(dtype):
    candidate = by_blocks if dtype != torch.float64 else lambda a, b: (b.t() @ a.t()).t()
    result = compared(product, candidate, *factors(dtype))
    assert result.is_right and result.rms_ratio < 4


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_narrower_dtype_is_seen(narrow):
    result = compared(product, lambda a, b: (a.to(narrow) @ b.to(narrow)).float(), *factors())
    assert not result.is_right and result.lowered and result.looks_rounded


def test_a_narrow_accumulator_is_seen():
    def candidate(a, b):
        total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
        for start in range(0, a.shape[1], 8):
            total += a[:, start : start + 8] @ b[start : start + 8]
        return total

    assert not compared(product, candidate, *factors(torch.bfloat16)).is_right


def test_one_wrong_element_is_seen():
    def candidate(a, b):
        result = a @ b
        result[3, 5] *= 1.001
        return result

    result = compared(product, candidate, *factors())
    assert not result.is_right and result.where.startswith("[3, 5]") and result.wrong_share == 1 / (64 * 48)


def test_elements_left_at_zero_are_counted():
    def candidate(a, b):
        result = a @ b
        result[::2] = 0
        return result

    result = compared(product, candidate, *factors())
    assert result.wrong_share == pytest.approx(0.5) and result.unwritten_share == pytest.approx(0.5)


def test_nan_must_be_where_the_reference_has_it():
    x = torch.randn(8, 8)
    x[2, 3] = float("nan")
    softmax = torch.nn.Softmax(-1)
    assert compared(softmax, softmax, x).is_right
    assert not compared(softmax, lambda x: softmax(x).nan_to_num(0.0), x).is_right


def test_nan_need_not_spread_to_what_does_not_depend_on_it():
    def masked(x, v):
        return torch.softmax(x.masked_fill(~torch.ones(8, 8).bool().tril(), float("-inf")), -1) @ v

    def blocks(x, v):
        return torch.stack([torch.softmax(x[i, : i + 1], -1) @ v[: i + 1] for i in range(8)])

    x, v = torch.randn(8, 8), torch.randn(8, 4)
    v[5, 2] = float("nan")
    known = answer(masked, (x, v), {})
    known = without_nonfinite(known, masked, (x, v), {})
    parts = known.own[0], known.exact[0], known.perturbed[0], known
    assert agreement(blocks(x, v), *parts).is_right and agreement(masked(x, v), *parts).is_right
    assert not agreement(blocks(x, v).nan_to_num(0.0), *parts).is_right


def attention(q, k, v):
    mask = torch.ones(q.shape[-2], k.shape[-2]).bool().tril()
    return torch.softmax((q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf")), -1) @ v


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_masked_nan_may_reach_what_a_weight_of_zero_multiplies_it_for(position):
    inputs = [torch.randn(2, 6, 4, dtype=torch.float64) for _ in range(3)]
    inputs[position][1, 3, 2] = torch.nan
    known = without_nonfinite(answer(attention, inputs, {}), attention, inputs, {})
    (reached,) = reach_of_nan(known, attention, inputs, {})
    expected = torch.zeros_like(reached)
    if position == 0:
        expected[1, 3] = True  # no other query uses it
    elif position == 1:
        expected[1] = True  # the first query too, whose one weight is 1 whatever the key is
    else:
        expected[1, :, 2] = True
    assert torch.equal(reached, expected)


def test_nan_stays_in_its_row_of_a_softmax_and_of_a_product():
    x, y = torch.randn(5, 8), torch.randn(8, 3)
    x[2, 3] = torch.nan
    for function, inputs in ((lambda x: torch.softmax(x, -1), [x]), (product, [x, y])):
        known = without_nonfinite(answer(function, inputs, {}), function, inputs, {})
        (reached,) = reach_of_nan(known, function, inputs, {})
        assert reached[2].all() and int(reached.any(-1).sum()) == 1


def test_nan_may_reach_the_whole_row_of_a_scan_and_nothing_of_what_has_no_gradient():
    x = torch.randn(5, 8)
    x[2, 3] = torch.nan
    for function, rows in ((lambda x: x.cumsum(-1), 1), (lambda x: x.detach().cumsum(-1), 0)):
        known = without_nonfinite(answer(function, [x], {}), function, [x], {})
        (reached,) = reach_of_nan(known, function, [x], {})
        assert reached[2].all() == bool(rows) and int(reached.any(-1).sum()) == rows


def test_the_reach_of_nan_is_found_for_functions_that_change_their_inputs():
    def add(x, y):
        y += 1
        x += y.cumsum(-1)

    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    y[2, 3] = torch.nan
    before = x.clone(), y.clone()
    known = answer(add, [x, y], {})
    reached = reach_of_nan(known, add, [x, y], {})
    assert all(mask[2].all() and int(mask.any(-1).sum()) == 1 for mask in reached)
    assert torch.equal(x, before[0]) and torch.equal(y.nan_to_num(), before[1].nan_to_num())


def test_an_overflow_of_the_reference_is_not_asked_for():
    x = torch.full((4, 64), 300.0).half()
    result = compared(lambda x: (x * x).sum(-1), lambda x: torch.full((4,), float("inf")).half(), x)
    assert result.is_right  # in float16 the sum is infinite
    assert not compared(lambda x: (x * x).sum(-1), lambda x: torch.zeros(4).half(), x).is_right


def test_integers_are_equal_or_wrong():
    x = torch.randn(16, 16)
    assert compared(lambda x: x.argmax(-1), lambda x: x.argmax(-1), x).is_right
    assert not compared(lambda x: x.argmax(-1), lambda x: x.argmin(-1), x).is_right


def test_gradients_and_changed_inputs_are_results():
    def doubled(x, buffer):
        buffer += 1
        return x * 2

    x, buffer = torch.randn(4, requires_grad=True), torch.zeros(3)
    known = answer(doubled, (x, buffer), {}, [torch.ones(4)])
    assert known.mutated == [1] and len(known.own) == 3
    assert torch.equal(known.own[1], torch.ones(3)) and torch.equal(known.own[2], torch.full((4,), 2.0))
    assert torch.equal(buffer, torch.zeros(3))  # the caller's own is as before


def test_complex_numbers_have_the_tolerance_of_their_parts():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))

    def by_product(x):
        turns = torch.arange(64, dtype=torch.float64)
        return (x.to(torch.complex128) @ torch.exp(-2j * torch.pi * turns[:, None] * turns / 64)).to(torch.complex64)

    def conjugate(x):
        return torch.fft.fft(x).conj()

    assert compared(torch.fft.fft, by_product, x).is_right
    assert not compared(torch.fft.fft, conjugate, x).is_right
    assert not compared(torch.fft.fft, lambda x: torch.fft.fft(x.half().float()), x).is_right
    assert compared(lambda z: z * 3, lambda z: z + z + z, torch.fft.fft(x)).is_right


def rounded_inside(share):
    """A bfloat16 result of sums that cancel, the reference's own errors beyond rounding at this share of an ulp."""
    generator = torch.Generator().manual_seed(7)
    exact = 0.13 * torch.randn(256, generator=generator, dtype=torch.float64)
    exact[7] = -3.7e-4
    noise = 2.0**-9 * 0.13 * torch.randn(256, generator=generator, dtype=torch.float64)
    noise[7] = 0.0
    unit = torch.finfo(torch.float32).eps / 2
    perturbed = torch.full_like(exact, 0.13 * unit)
    own = (exact + share * noise).bfloat16()
    known = Answer(own=[own], exact=[exact], perturbed=[perturbed], unit=unit, depth=64, mutated=[], is_exact=True)
    mine = own.clone()
    mine[7] = -9.8e-4
    return agreement(mine, own, exact, perturbed, known)


def test_an_element_near_zero_may_have_the_error_of_a_reference_that_rounds_inside():
    assert rounded_inside(1.0).is_right
    assert not rounded_inside(0.0).is_right
