"""`rotary` and `rotary_pair`."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_as_exact, assert_kernel_is_exact, gradients, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError

pytest.importorskip("triton")


def made(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def tables(length, pairs, dtype=torch.float32, form="pairs"):
    angles = torch.arange(length, device=DEVICE)[:, None] * 0.7 ** torch.arange(pairs, device=DEVICE)
    if form == "twice":
        angles = torch.cat((angles, angles), -1)
    if form == "side by side":
        angles = angles.repeat_interleave(2, -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def assert_rotates(x, cos, sin, upstream=None, **options):
    def with_tables(function):
        def call(x):  # tables as exact as x, so that the reference in float64 is one
            return function(x, *(t.double() if x.dtype == torch.float64 else t for t in (cos, sin)), **options)

        return call

    with kernels.using("require"):
        assert_kernel_is_exact(
            with_tables(kernels.rotary), with_tables(kernels.rotary.reference), [x], upstream
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("seq_dim", [-3, -2])
def test_values_and_gradients(seq_dim, interleaved, dtype):
    for head_dim, rotary_dim in ((8, 8), (64, 64), (12, 12), (20, 8), (6, 2)):
        x = made(2, 5, 3, head_dim, dtype=dtype)
        length = x.shape[seq_dim]
        options = {"interleaved": interleaved, "seq_dim": seq_dim, "rotary_dim": rotary_dim}
        assert_rotates(x, *tables(length, rotary_dim // 2), **options)
        twice = "side by side" if interleaved else "twice"
        assert_rotates(x, *tables(length, rotary_dim // 2, dtype, twice), **options)


@pytest.mark.slow
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)),
    st.sampled_from([2, 4, 8, 10]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from([-3, -2, 1, 2]),
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from(["none", "one", "batch"]),
)
@settings(max_examples=30)
def test_any_layout(shape, head_dim, dtype, interleaved, seq_dim, left, right, positions):
    x = list(layouts(made(*shape, head_dim, dtype=dtype)))[left][1]
    upstream = list(layouts(made(*shape, head_dim, dtype=dtype, seed=1)))[right][1]
    length, where = x.shape[seq_dim], None
    if positions != "none":
        where = torch.randint(0, 9, (length,) if positions == "one" else (shape[0], length), device=DEVICE)
    options = {"interleaved": interleaved, "seq_dim": seq_dim, "positions": where}
    assert_rotates(x, *tables(9, head_dim // 2), upstream, **options)


def test_tables_by_batch_positions_and_offsets():
    x = made(2, 5, 3, 8)
    cos, sin = tables(20, 4, form="twice")
    positions = torch.tensor([[3, 4, 5, 6, 7], [0, 19, 2, 2, 1]], device=DEVICE)
    expected = kernels.rotary.reference(x, cos, sin, positions=positions)
    with kernels.using("require"):
        for one in (positions, positions.int(), positions.t().contiguous().t()):
            torch.testing.assert_close(kernels.rotary(x, cos, sin, positions=one), expected)
        torch.testing.assert_close(kernels.rotary(x, cos[positions], sin[positions]), expected)
        moved = x.transpose(1, 2)
        torch.testing.assert_close(
            kernels.rotary(moved, cos[positions], sin[positions], seq_dim=2), expected.transpose(1, 2)
        )
        torch.testing.assert_close(kernels.rotary(x[0], cos, sin, positions=positions[0]), expected[0])
        one = kernels.rotary(x, cos[None, :5], sin[None, :5])  # a batch of one is for all
        torch.testing.assert_close(one, kernels.rotary.reference(x, cos, sin))
        torch.testing.assert_close(
            kernels.rotary(x, cos[:, ::2], sin[:, ::2]), kernels.rotary(x, cos[:, ::2] + 0, sin[:, ::2] + 0)
        )


def test_a_position_that_is_not_there_shows():
    x, (cos, sin) = made(1, 3, 2, 4), tables(5, 2)
    result = kernels.rotary(x, cos, sin, positions=torch.tensor([0, 5, -1], device=DEVICE))
    assert result[:, 1:].isnan().all()
    assert result[:, 0].isfinite().all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_invariants(interleaved):
    """Lengths stay, and a product of two rotated vectors knows their distance alone."""
    x, (cos, sin) = made(1, 1, 1, 16).expand(1, 6, 2, 16), tables(12, 8)
    turn = partial(kernels.rotary, cos=cos, sin=sin, interleaved=interleaved)
    torch.testing.assert_close(turn(x).norm(dim=-1), x.norm(dim=-1))
    near, far = turn(x), turn(x, positions=torch.arange(6, 12, device=DEVICE))
    torch.testing.assert_close((near[:, 0] * near[:, 3]).sum(-1), (far[:, 0] * far[:, 3]).sum(-1))


def test_q_and_k_in_one_launch():
    packed = made(2, 5, 8, 16, dtype=torch.bfloat16)
    cos, sin = tables(5, 8)
    for dtype, (heads_of_q, rotary_dim) in product((torch.bfloat16,), ((6, 16), (1, 16), (5, 8))):
        q, k = packed.to(dtype).split([heads_of_q, 8 - heads_of_q], 2)
        options = {"rotary_dim": rotary_dim}
        table = cos[:, : rotary_dim // 2], sin[:, : rotary_dim // 2]
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        with kernels.using("require"):
            results = kernels.rotary_pair(q, k, *table, **options)
            for result, one in zip(results, (q, k), strict=True):
                assert torch.equal(result, kernels.rotary(one, *table, **options))
            upstream = made(*q.shape, dtype=dtype), made(*k.transpose(1, 2).shape, dtype=dtype).transpose(1, 2)
            actual = torch.autograd.grad(results, (q, k), upstream)
            for gradient, one, given_ in zip(actual, (q, k), upstream, strict=True):
                _, (expected,) = gradients(lambda x: kernels.rotary(x, *table, **options), [one], given_)  # noqa: B023
                assert torch.equal(gradient, expected)
    (only,) = torch.autograd.grad(kernels.rotary_pair(q, k, *table, **options)[0].sum(), q)
    assert only.shape == q.shape


@pytest.mark.slow
@pytest.mark.parametrize("few", [3, 33, 40])
def test_more_heads_than_a_program_takes(few):
    q, k, (cos, sin) = made(1, 3, 40, 8), made(1, 3, few, 8), tables(3, 4)
    with kernels.using("require"):
        for first, second in ((q, k), (k, q)):
            results = kernels.rotary_pair(first, second, cos, sin)
            for result, one in zip(results, (first, second), strict=True):
                torch.testing.assert_close(result, kernels.rotary.reference(one, cos, sin))


def test_parts_of_a_packed_tensor_are_read_and_written_where_they_are():
    packed = made(2, 5, 3, 4, 8)
    cos, sin = tables(5, 4)
    q, k, v = packed.unbind(2)
    expected = [kernels.rotary.reference(one, cos, sin) for one in (q, k)] + [v.clone()]
    with kernels.using("require"), torch.no_grad():
        version = packed._version
        results = kernels.rotary_pair(q, k, cos, sin, inplace=True)
    assert results[0] is q
    assert packed._version > version
    for actual, one in zip(packed.unbind(2), expected, strict=True):
        torch.testing.assert_close(actual, one)


@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place(interleaved):
    x, (cos, sin) = made(2, 3, 5, 12, dtype=torch.bfloat16), tables(5, 4)
    options = {"interleaved": interleaved, "seq_dim": -2, "rotary_dim": 8}
    expected = kernels.rotary(x, cos, sin, **options)
    with torch.inference_mode():
        once = x.clone()
        assert kernels.rotary(once, cos, sin, inplace=True, **options) is once
        assert torch.equal(once, expected)
    for mode in ("auto", "off"):
        again = x.clone()
        with kernels.using(mode):
            kernels.rotary(again, cos, sin, inplace=True, **options)
        torch.testing.assert_close(again, expected)
    with pytest.raises(UsageError, match="records no gradient"):
        kernels.rotary(x.clone().requires_grad_(), cos, sin, inplace=True, **options)
    with pytest.raises(RuntimeError, match="single memory location"):
        kernels.rotary(x[:1].expand(2, 3, 5, 12), cos, sin, inplace=True, **options)


def test_nothing_to_rotate():
    cos, sin = tables(5, 4)
    for shape in ((0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)):
        x = made(*shape).requires_grad_()
        with kernels.using("require"):
            kernels.rotary(x, cos, sin).sum().backward()
        assert x.grad.shape == shape
    with kernels.using("require"):
        _, k = kernels.rotary_pair(made(2, 5, 0, 8), made(2, 5, 1, 8), cos, sin)
    torch.testing.assert_close(k, kernels.rotary.reference(made(2, 5, 1, 8), cos, sin))


def test_tokens_more_than_two_gibibytes_apart():
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE)
    for count, far in ((2, 2**31 + 16), (3, 2**30 + 16)):  # a stride, and a multiple of one, beyond 32 bits
        for place in range(3):
            shape, strides = [2, 2, 2, 4], [16, 8, 4, 1]
            shape[place], strides[place] = count, far
            x = storage.as_strided(shape, strides)
            x.copy_(made(*shape))
            assert_rotates(x, *tables(3, 2))


@pytest.mark.slow
def test_all_candidates_give_the_same():
    from nearpeak.kernels.rotary import triton as rotary_triton

    x, (cos, sin) = made(2, 5, 6, 64), tables(5, 32)
    expected = rotary_triton.forward(x, cos, sin, None, False, False, False, 64)
    for config in rotary_triton.candidates(64, 6):
        assert torch.equal(rotary_triton.forward(x, cos, sin, None, False, False, False, 64, config=config), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_of_two_tensors_are_in_programs_of_their_own_or_share_them(batch, interleaved):
    from nearpeak.kernels.rotary import triton as rotary_triton

    q, k, (cos, sin) = made(batch, 5, 6, 24), made(batch, 5, 3, 24), tables(5, 8)
    options = (cos, sin, None, interleaved, False, False, 16)
    expected = [rotary_triton.forward(x, *options) for x in (q, k)]
    for tokens, heads in ((2, 4), (4, 2)):
        for apart in (False, True):
            config = rotary_triton.RotaryConfig(tokens=tokens, heads=heads, warps=1, apart=apart)
            assert all(map(torch.equal, rotary_triton.forward_pair(q, k, *options, config=config), expected))


@pytest.mark.parametrize("length", [1, 6, 15, 16])
def test_tiles_begin_with_each_sequence_where_that_leaves_few_tokens_empty(length):
    from nearpeak.kernels.rotary import triton as rotary_triton

    positions = torch.randint(0, 20, (3, length), device=DEVICE)
    q, k, (cos, sin) = made(3, length, 5, 8), made(3, length, 2, 8), tables(20, 4)
    options = {"interleaved": False, "reverse": False, "heads_first": False, "rotary_dim": 8}
    config = rotary_triton.RotaryConfig(tokens=8, heads=4, warps=1, apart=True)
    assert rotary_triton.has_tiles_by_sequence(3, length, 8) == (length > 6)
    assert not rotary_triton.has_tiles_by_sequence(2**16, length, 8)
    for where in (None, positions):
        rotated = rotary_triton.forward_pair(q, k, cos, sin, where, **options, config=config)
        for x, result in zip((q, k), rotated, strict=True):
            torch.testing.assert_close(result, kernels.rotary.reference(x, cos, sin, positions=where))


def test_few_tokens_have_programs_for_each_of_two_tensors():
    from nearpeak.kernels.rotary import triton as rotary_triton

    few, many = (rotary_triton.heuristic(tokens, 32, 64, 0, 132) for tokens in (584, 65536))
    assert few.apart
    assert not many.apart
    assert (few.tokens, few.heads) == (many.tokens, many.heads) == (4, 4)


@pytest.mark.slow
def test_the_operators_are_those_of_torch():
    x, y, (cos, sin) = made(2, 5, 3, 8).requires_grad_(), made(2, 5, 2, 8).requires_grad_(), tables(5, 2)
    names = torch.ops.nearpeak
    where = torch.arange(5, device=DEVICE)
    opcheck(names.rotary.default, (x, cos, sin, where, True, False, False, 4))
    opcheck(names.rotary_pair.default, (x, y, cos, sin, None, False, False, False, 4))
    x, y = x.detach(), y.detach()
    opcheck(names.rotary_.default, ([x, y], cos, sin, None, False, False, 4))
    for one in (x.transpose(1, 2), x.transpose(2, 3), x[..., ::2], x[:1].expand(3, 5, 3, 8), x[0]):
        options = (None, False, True, False, 2)
        opcheck(names.rotary.default, (one, cos[:, :1], sin[:, :1], *options), test_utils="test_faketensor")


@pytest.mark.slow
def test_it_compiles_without_a_graph_break():
    q, k, (cos, sin) = made(2, 5, 3, 8).requires_grad_(), made(2, 5, 1, 8).requires_grad_(), tables(5, 4)

    def loss(q, k):
        q, k = kernels.rotary_pair(q * 2, k, cos, sin)
        return (q * k).sum() + kernels.rotary(q, cos, sin, interleaved=True).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(q, k), (q, k))
    with kernels.using("off"):
        expected = torch.autograd.grad(loss(q, k), (q, k))
    torch.testing.assert_close(actual, expected)

    def in_place(q):
        q = q * 2
        kernels.rotary(q, cos, sin, inplace=True)
        return q + 1

    with torch.no_grad():
        compiled = torch.compile(in_place, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q), in_place(q))


def test_references_in_float64():
    x, y = made(1, 3, 2, 6).double().requires_grad_(), made(1, 3, 1, 6).double().requires_grad_()
    cos, sin = tables(3, 2, torch.float64)
    torch.autograd.gradcheck(partial(kernels.rotary, cos=cos, sin=sin), (x,))
    torch.autograd.gradcheck(partial(kernels.rotary_pair, cos=cos, sin=sin, interleaved=True), (x, y))


def test_tables_that_need_a_gradient_run_plain_torch():
    x, (cos, sin) = made(1, 3, 2, 4), tables(3, 2)
    cos.requires_grad_()
    assert "no gradients of cosines" in kernels.supports(kernels.rotary, x, cos, sin).reason
    (gradient,) = torch.autograd.grad(kernels.rotary(x, cos, sin).sum(), cos)
    assert gradient.shape == cos.shape


def test_mistakes():
    x, (cos, sin) = made(1, 3, 2, 8), tables(3, 4)
    turn = kernels.rotary
    for match, call in {
        r"not \[3, 8\]": lambda: turn(x[0, :, 0], cos, sin),
        "seq_dim is": lambda: turn(x, cos, sin, seq_dim=0),
        "these have 4, rotary_dim is 6": lambda: turn(x, cos, sin, rotary_dim=6),
        "these have 5, rotary_dim is 10": lambda: turn(x, *tables(3, 5)),
        r"not \[3, 4\] and \[2, 4\]": lambda: turn(x, cos, sin[:2]),
        "too little for 1 x 3 tokens": lambda: turn(x, cos[:2], sin[:2]),
        r"\[rows, columns\]": lambda: turn(x, cos[None], sin[None], positions=torch.arange(3)),
        r"\[seq\] or \[batch, seq\], and not \[4\]": lambda: turn(x, cos, sin, positions=torch.arange(4)),
        "int32 or int64, and not torch.float32": lambda: turn(x, cos, sin, positions=torch.ones(3)),
        "only in their number of heads": lambda: kernels.rotary_pair(x, x[:, :2], cos, sin),
    }.items():
        with pytest.raises(UsageError, match=match):
            call()
    with kernels.using("require"), pytest.raises(KernelUnavailable, match="float64"):
        turn(x.double(), cos, sin)


@pytest.mark.gpu
@pytest.mark.parametrize("seq_dim", [-3, -2])
def test_exact_at_full_size_and_always_the_same(seq_dim):
    shapes = ((4, 4096, 32, 128), (4, 4096, 8, 128)) if seq_dim == -3 else ((4, 32, 4096, 128), (4, 8, 4096, 128))
    q, k = (made(*shape, dtype=torch.bfloat16) for shape in shapes)
    cos, sin = tables(4096, 64)
    with kernels.using("require"):
        results = kernels.rotary_pair(q, k, cos, sin, seq_dim=seq_dim)
        for one, result in zip((q, k), results, strict=True):
            exact = kernels.rotary.reference(one[-1:].double(), cos.double(), sin.double(), seq_dim=seq_dim)
            low = kernels.rotary.reference(one[-1:], cos, sin, seq_dim=seq_dim)
            assert_as_exact(result[-1:], exact, low)
        for _ in range(100):
            again = kernels.rotary_pair(q, k, cos, sin, seq_dim=seq_dim)
            assert all(map(torch.equal, again, results))
        kernels.rotary_pair(q, k, cos, sin, seq_dim=seq_dim, inplace=True)
        assert all(map(torch.equal, (q, k), results))


@pytest.mark.gpu
def test_in_a_graph_and_compiled():
    q, k, (cos, sin) = made(2, 64, 8, 128), made(2, 64, 2, 128), tables(64, 64)
    expected = kernels.rotary_pair(q, k, cos, sin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = kernels.rotary_pair(q, k, cos, sin)
    graph.replay()
    assert all(map(torch.equal, actual, expected))
    q.requires_grad_()
    compiled = torch.compile(lambda q, k: kernels.rotary_pair(q * 2, k, cos, sin)[0].square().sum(), fullgraph=True)
    (actual,) = torch.autograd.grad(compiled(q, k), q)
    torch.testing.assert_close(actual, 8 * q, rtol=1e-4, atol=1e-4)
