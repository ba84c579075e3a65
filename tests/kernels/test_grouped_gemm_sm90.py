"""`grouped_gemm` by the kernels for Hopper: what they take, their logic on a CPU, and results on a GPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from emulated_hopper import _INSTEAD, emulated
from kernel_checks import DEVICE
from scheduled import here

pytest.importorskip("triton.experimental.gluon")

from nearpeak import kernels
from nearpeak.kernels._runtime import gluon
from nearpeak.kernels._runtime.grid_counters import grid_counters
from nearpeak.kernels.gemm import grouped, grouped_triton
from nearpeak.kernels.gemm.tuning import SM90_GROUPED_CONFIGS, SM90_GROUPED_GRADIENT_CONFIGS

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(gluon, "runs_on", lambda device: True)


def test_what_they_take(on_hopper):
    rows, weight = torch.empty(512, 64, dtype=BF16), torch.empty(4, 48, 64, dtype=BF16)
    assert grouped_triton.takes_sm90(rows, weight, 128, False, False)
    assert grouped_triton.takes_sm90(rows, weight, 128, False, True)
    assert grouped_triton.takes_sm90(rows.half(), weight.half(), 128, False, False)
    assert grouped_triton.takes_sm90(rows[:, :48], weight, 128, True, False)
    assert grouped_triton.takes_sm90(rows, weight.mT.contiguous().mT, 128, False, False)  # by columns
    assert not grouped_triton.takes_sm90(rows, weight.mT.contiguous().mT, 128, False, True)
    assert not grouped_triton.takes_sm90(rows, weight, 64, False, False)
    assert not grouped_triton.takes_sm90(rows.float(), weight.float(), 128, False, False)
    assert not grouped_triton.takes_sm90(
        rows, weight[:, :44], 128, False, False
    )  # results that begin at no multiple of 16 bytes
    assert not grouped_triton.takes_sm90(rows[:, 1:], weight[..., 1:], 128, False, False)
    assert not grouped_triton.takes_sm90(rows[:, :0], weight[..., :0], 128, False, False)
    assert not grouped_triton.takes_sm90(rows, weight[:1].expand(4, -1, -1), 128, False, False)


def test_what_the_others_take(on_hopper):
    rows, weight = torch.empty(512, 64).to(FP8), torch.empty(4, 128, 64).to(FP8)
    assert grouped_triton.takes_fp8_sm90(rows, weight, 128, BF16, "")
    assert grouped_triton.takes_fp8_sm90(rows, weight, 128, BF16, "silu")
    assert not grouped_triton.takes_fp8_sm90(rows, weight, 128, torch.float32, "")
    assert not grouped_triton.takes_fp8_sm90(
        rows, weight[:, :96], 128, BF16, "silu"
    )  # halves of tiles across two blocks
    assert not grouped_triton.takes_fp8_sm90(rows, weight, 32, BF16, "")
    gradient, rows = torch.empty(512, 40, dtype=BF16), torch.empty(512, 64, dtype=BF16)
    assert grouped_triton.takes_weight_gradient_sm90(gradient, rows)
    assert not grouped_triton.takes_weight_gradient_sm90(gradient.float(), rows.float())
    assert not grouped_triton.takes_weight_gradient_sm90(gradient[:, :1].expand(-1, 40), rows)
    assert not grouped_triton.takes_weight_gradient_sm90(gradient[:0], rows[:0])
    assert grouped_triton.can_gather_sm90(rows)
    assert not grouped_triton.can_gather_sm90(rows[:, :44])
    assert not grouped_triton.can_gather_sm90(torch.empty(2**15, 2**16, dtype=BF16, device="meta"))


def test_an_address_comes_back_to_the_rows_of_an_expert():
    """The hardware adds up the dimensions of a description of rows without an end, modulo 2**64."""
    for bytes_each, stride, begin, number, row in ((2, 4096, 0, 5, 3), (2, 72, 10**6, 300, 299), (1, 2**20, 77, 1, 0)):
        strides = (2**34 - stride, stride, stride, 1)
        place = (2**30, begin + number, 2**30 - number + row, 8)
        offset = sum(one * other for one, other in zip(place, strides, strict=True)) * bytes_each % 2**64
        assert offset == ((begin + row) * stride + 8) * bytes_each
        assert place[2] < 2**30  # inside; the first row behind the last is not
        assert place[2] + number - row == 2**30


@pytest.fixture
def emulate(on_hopper, monkeypatch):
    """Runs a launcher's kernel on this CPU, by some programs, whose warps go on in the order of a seed."""
    from nearpeak.kernels._runtime import dynamic_tiles
    from nearpeak.kernels.gemm import grouped_sm90

    if DEVICE != "cpu":
        pytest.skip("tensors are on a GPU")

    def run(call, programs=3, **order):
        names = ("wgmma_layout", "written_layout", "lanes_layout")
        instead = {"activate": lambda x, name: torch.nn.functional.silu(x), **dict.fromkeys(names, lambda *_: None)}
        monkeypatch.setattr(grouped_triton, "processors", lambda device: programs)
        with emulated((dynamic_tiles, grouped_sm90), monkeypatch, **order, **instead) as launch:
            monkeypatch.setattr(grouped_triton, "launch", launch)
            call()
        assert not grid_counters(1, torch.device("cpu")).any()  # as the next launch needs it

    return run


def nothing(*shape):
    return torch.full(shape, float("nan")).to(BF16)


def gated_of(exact):
    one, other = exact.chunk(2, 1)
    return torch.nn.functional.silu(one) * other


def check_products(emulate, counts, config, columns=144, depth=72, **order):
    """Plain ones, transposed ones, and those with an activation whose factors are kept."""
    rows, weight, given = made(counts, columns, depth)
    groups = grouped.build_groups(given, len(rows), 128)
    exact = grouped.multiply_reference(rows.double().nan_to_num(), weight.double(), groups, 128, False)
    found, across, gated, kept = (nothing(len(rows), n) for n in (columns, columns, columns // 2, columns))
    emulate(lambda: grouped_triton.launch_sm90(rows, weight, groups, found, None, False, "", config), **order)
    assert_close(found, exact)
    emulate(
        lambda: grouped_triton.launch_sm90(rows, weight.mT.contiguous(), groups, across, None, True, "", config),
        **order,
    )
    assert_close(across, exact)
    emulate(lambda: grouped_triton.launch_sm90(rows, weight, groups, gated, kept, False, "silu", config), **order)
    assert_close(gated, gated_of(exact))
    assert_close(kept, exact)


EMULATED = [[300, 0, 1, 129, 64, 65, 270], [321, 40]]


@pytest.mark.slow
@pytest.mark.parametrize("config", SM90_GROUPED_CONFIGS, ids=str)
@pytest.mark.parametrize("counts", EMULATED, ids=str)
def test_the_logic(emulate, counts, config):
    check_products(emulate, counts, config)


@pytest.mark.slow
@pytest.mark.parametrize("slowest", [None, 0, 1, 2])
@pytest.mark.parametrize("programs", [1, 7, 100])
def test_however_fast_warps_are_and_however_many_programs(emulate, programs, slowest):
    """Many programs find no tile, and tiles of few steps are drawn before the last one is told."""
    counts = [130, 0, 20]
    rows, weight, given = made(counts, 264, 40 if programs == 7 else 264)
    groups = grouped.build_groups(given, len(rows), 128)
    exact = grouped.multiply_reference(rows.double().nan_to_num(), weight.double(), groups, 128, False)
    for number, config in enumerate(SM90_GROUPED_CONFIGS):
        found = nothing(len(rows), 264)
        given = (rows, weight, groups, found, None, False, "", config)
        emulate(partial(grouped_triton.launch_sm90, *given), programs, seed=number, slowest=slowest)
        assert_close(found, exact)


@pytest.mark.slow
@pytest.mark.parametrize("config", SM90_GROUPED_GRADIENT_CONFIGS, ids=str)
@pytest.mark.parametrize("counts", EMULATED, ids=str)
def test_the_logic_of_gradients(emulate, counts, config):
    rows, _, given = made(counts, 144, 72)
    groups = grouped.build_groups(given, len(rows), 128)
    gradient = torch.randn(len(rows), 144).to(BF16)
    exact = grouped.weight_gradient_reference(gradient.double(), rows.double().nan_to_num(), groups, len(counts))
    for seed in range(3):
        found = nothing(len(counts), 144, 72)
        call = partial(grouped_triton.launch_weight_gradient_sm90, gradient, rows, groups, found, config)
        emulate(call, programs=(3, 1, 20)[seed], seed=seed, slowest=(None, 2, 0)[seed])
        assert_close(found, exact)


@pytest.mark.slow
@pytest.mark.parametrize("config", SM90_GROUPED_CONFIGS, ids=str)
@pytest.mark.parametrize("counts", EMULATED, ids=str)
def test_the_logic_with_rows_of_tokens(emulate, counts, config):
    """Plain ones, transposed ones, and those with an activation whose factors are kept or not."""
    columns = 144
    tokens, sources, rows, groups = of_tokens(counts, 72)
    weight = made(counts, columns, 72)[1]
    exact = grouped.multiply_reference(rows.double(), weight.double(), groups, 128, False)
    found, across, gated, kept, alone = (nothing(len(rows), n) for n in (columns, columns, 72, columns, 72))
    for seed, slowest, given in (
        (0, None, (weight, groups, found, None, False, "")),
        (1, 3, (weight.mT.contiguous(), groups, across, None, True, "")),
        (2, 2, (weight, groups, gated, kept, False, "silu")),
        (3, 0, (weight, groups, alone, None, False, "silu")),
    ):
        emulate(partial(grouped_triton.launch_sm90, tokens, *given, config, sources), seed=seed, slowest=slowest)
    assert_close(found, exact)
    assert_close(across, exact)
    assert_close(kept, exact)
    assert_close(gated, gated_of(exact))
    assert torch.equal(alone, gated)


@pytest.mark.slow
@pytest.mark.parametrize("slowest", [None, 0, 1, 2, 3])
def test_however_fast_warps_copy_tokens_and_however_many_programs(emulate, slowest):
    """With depths of one step, and of as many as take each slot of the ring several times."""
    counts = [130, 0, 20]
    for seed, (programs, depth, config) in enumerate(
        zip((1, 7, 40), (264, 40, 520), SM90_GROUPED_CONFIGS, strict=True)
    ):
        tokens, sources, rows, groups = of_tokens(counts, depth)
        weight = made(counts, 136, depth)[1]
        found = nothing(len(rows), 136)
        given = (tokens, weight, groups, found, None, False, "", config, sources)
        emulate(partial(grouped_triton.launch_sm90, *given), programs, seed=seed, slowest=slowest)
        assert_close(found, grouped.multiply_reference(rows.double(), weight.double(), groups, 128, False))


@pytest.mark.slow
@pytest.mark.parametrize("gathered", ["rows", "gradient"])
@pytest.mark.parametrize("config", SM90_GROUPED_GRADIENT_CONFIGS, ids=str)
@pytest.mark.parametrize("counts", EMULATED, ids=str)
def test_the_logic_of_gradients_with_rows_of_tokens(emulate, counts, config, gathered):
    tokens, sources, copied, groups = of_tokens(counts, 72 if gathered == "rows" else 200)
    others = nothing(len(sources), 200 if gathered == "rows" else 72)
    others[: sum(counts)] = torch.randn(sum(counts), others.shape[1]).to(BF16)
    pair, plain = ((others, tokens), (others, copied)) if gathered == "rows" else ((tokens, others), (copied, others))
    wide = [one.double().nan_to_num() for one in plain]
    exact = grouped.weight_gradient_reference(*wide, groups, len(counts))
    for seed, programs, slowest in ((0, 3, None), (1, 1, 2), (2, 20, 3)):
        found = nothing(*exact.shape)
        call = partial(grouped_triton.launch_weight_gradient_sm90, *pair, groups, found, config, sources, gathered)
        emulate(call, programs, seed=seed, slowest=slowest)
        assert_close(found, exact)


@pytest.mark.parametrize("gathered", ["product", "rows", "gradient"])
def test_tokens_whose_rows_end_within_16_bytes(emulate, gathered):
    """No copy is of a part of 16 bytes: other kernels take these, to the last column."""
    tokens, sources, copied, groups = of_tokens([70, 20], 48, behind=0)
    tokens, copied = tokens[:, :44], copied[:, :44]
    others, weight = torch.randn(90, 16).to(BF16), made([70, 20], 16, 48)[1][..., :44]
    found = []
    if gathered == "product":
        exact = grouped.multiply_reference(copied.double(), weight.double(), groups, 128, False)
        emulate(lambda: found.append(grouped_triton.multiply(tokens, weight, groups, 128, False, sources)))
    else:
        pair, plain = (
            ((others, tokens), (others, copied)) if gathered == "rows" else ((tokens, others), (copied, others))
        )
        exact = grouped.weight_gradient_reference(*(one.double() for one in plain), groups, 2)
        emulate(lambda: found.append(grouped_triton.weight_gradient(*pair, groups, 2, sources, gathered)))
    assert_close(found[0], exact)


def early_fence(barrier, phase, pred=True):
    """Fences, and then waits: what is fenced is not what was waited for."""
    _INSTEAD["fence_async_shared"]()
    _INSTEAD["mbarrier"].wait(barrier, phase, pred)


def no_wait_for_slots(barrier, phase, pred=True):
    """Those that copy tokens do not wait for a slot of the ring to be free, which two say."""
    _INSTEAD["mbarrier"].wait(barrier, phase, pred and not (here().warps == 2 and barrier.count == 2))


def without(name, part, instead):
    """What there is of a name, but for one part."""
    return {name: SimpleNamespace(**{**vars(_INSTEAD[name]), part: instead})}


FAULTS = {
    "no fence": ({"fence_async_shared": lambda: None}, "its reader has not fenced it"),
    "a fence before the wait": (
        {"fence_async_shared": lambda: None, **without("mbarrier", "wait", early_fence)},
        "its reader has not fenced it",
    ),
    "nobody arrives": (
        without("async_copy", "mbarrier_arrive", lambda barrier, increment_count: None),
        "after which nobody arrives|wait for ever",
    ),
    "slots that are not free": (without("mbarrier", "wait", no_wait_for_slots), "more arrive|no numbers"),
    "more arrive": ({"GATHER_THREADS": 32}, "more arrive"),
    "fewer arrive": ({"GATHER_THREADS": 128}, "wait for ever"),
}


@pytest.mark.parametrize("kernel", ["product", "gradient"])
@pytest.mark.parametrize(("instead", "message"), FAULTS.values(), ids=FAULTS)
def test_what_is_wrong_with_copies_of_tokens_is_found(emulate, kernel, instead, message):
    depth = 520  # so that slots of the ring are taken several times
    tokens, sources, rows, groups = of_tokens([70], depth)
    if kernel == "product":
        found = nothing(len(rows), 16)
        given = (tokens, made([70], 16, depth)[1], groups, found, None, False, "", None, sources)
        call = partial(grouped_triton.launch_sm90, *given)
    else:
        found = nothing(1, depth, depth)
        call = partial(grouped_triton.launch_weight_gradient_sm90, rows, tokens, groups, found, None, sources, "rows")
    try:
        with pytest.raises(AssertionError, match=message):
            emulate(call, programs=1, slowest=0, **instead)
            assert not found.isnan().any(), "no numbers"
    finally:
        grid_counters(1, torch.device("cpu")).zero_()  # whoever fails leaves them as they are


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("counts", EMULATED, ids=str)
def test_the_logic_of_fp8(emulate, counts, blocks):
    rows, weight, row_scales, weight_scales, groups, exact = of_fp8(counts, 256, 272, blocks)
    found, gated = nothing(len(rows), 256), nothing(len(rows), 128)
    emulate(lambda: grouped_triton.launch_fp8_sm90(rows, weight, row_scales, weight_scales, groups, found, ""))
    assert_close(found, exact)
    emulate(
        lambda: grouped_triton.launch_fp8_sm90(rows, weight, row_scales, weight_scales, groups, gated, "silu"), seed=1
    )
    assert_close(gated, gated_of(exact))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
def test_the_logic_of_fp8_with_rows_of_tokens(emulate, blocks):
    """Whose scales are those of their tokens."""
    counts = [130, 0, 1, 70]
    tokens, weight, token_scales, weight_scales, _, _ = of_fp8([90], 256, 272, blocks, experts=len(counts))
    tokens[60:], token_scales[61:] = float("nan"), float("nan")
    sources = torch.randint(60, (sum(counts) + 70,), dtype=torch.int32)
    sources[sum(counts) :] = 60
    groups = grouped.build_groups(torch.tensor(counts), len(sources), 128)
    wide = grouped.dequantize_rows(tokens, token_scales)[sources.long()].double().nan_to_num()
    exact = grouped.multiply_reference(
        wide, grouped.dequantize_weight(weight, weight_scales).double(), groups, 128, False
    )
    found, gated = nothing(len(sources), 256), nothing(len(sources), 128)
    given = (tokens, weight, token_scales, weight_scales, groups)
    emulate(lambda: grouped_triton.launch_fp8_sm90(*given, found, "", sources), slowest=3)
    emulate(lambda: grouped_triton.launch_fp8_sm90(*given, gated, "silu", sources), seed=1, slowest=0)
    assert_close(found, exact)
    assert_close(gated, gated_of(exact))


def of_fp8(counts, columns, depth, blocks, experts=None):
    """Rows and matrices with their scales, groups, and the exact product."""
    rows, weight, given = made(counts, columns, depth, torch.float32, behind=0)
    if experts is not None:
        weight = torch.randn(experts, columns, depth, device=DEVICE)
    if blocks:
        rows, row_scales = kernels.quantize(rows, block=(1, 128))
        weight, weight_scales = kernels.quantize(weight, block=(128, 128))
    else:
        rows, row_scales = kernels.quantize(rows, block="row")
        weight_scales = weight.abs().amax((1, 2)) / 448
        weight = (weight / weight_scales[:, None, None]).to(FP8)
    groups = grouped.group_rows(given, len(rows), 128)
    if experts is not None:
        return rows, weight, row_scales, weight_scales, groups, None
    wide = (
        grouped.dequantize_rows(rows, row_scales).double(),
        grouped.dequantize_weight(weight, weight_scales).double(),
    )
    return rows, weight, row_scales, weight_scales, groups, grouped.multiply_reference(*wide, groups, 128, False)


def on_this_gpu() -> bool:
    return torch.cuda.is_available() and gluon.runs_on(torch.device("cuda", 0))


hopper = pytest.mark.skipif(not on_this_gpu(), reason="these kernels are for Hopper")
SPREADS = {
    "even": [256] * 16,
    "odd": [300, 0, 1, 129, 64, 65, 128, 700, 0, 31, 270, 320, 321],
    "one": [0, 0, 2000, 0],
    "one expert": [999],
}


def made(counts, columns, depth, dtype=BF16, behind=70):
    torch.manual_seed(0)
    rows = torch.randn(sum(counts) + behind, depth, device=DEVICE).to(dtype)
    rows[sum(counts) :] = float("nan")  # what belongs to nobody is not looked at
    weight = (torch.randn(len(counts), columns, depth, device=DEVICE) * depth**-0.5).to(dtype)
    return rows, weight, torch.tensor(counts, dtype=torch.int32, device=DEVICE)


def of_tokens(counts, depth, behind=70, dtype=BF16):
    """Tokens, the token of each row, these rows, and groups. Tokens that nobody takes, and what is between their rows,
    are no numbers."""
    torch.manual_seed(1)
    total = sum(counts)
    taken = total // 2 + 1
    tokens = torch.full((taken + 9, depth + 8), float("nan"), device=DEVICE).to(dtype)[:, :depth]
    tokens[:taken] = torch.randn(taken, depth, device=DEVICE).to(dtype)
    sources = torch.randint(taken, (total + behind,), dtype=torch.int32, device=DEVICE)
    sources[total:] = taken + 4  # of choices that were dropped
    rows = tokens[sources.long()]
    rows[total:] = 0
    return tokens, sources, rows, grouped.build_groups(torch.tensor(counts), total + behind, 128).to(DEVICE)


def assert_close(actual, exact):
    assert not actual.isnan().any()
    assert (actual.double() - exact).abs().max() < 0.01 * exact.abs().max()


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(("columns", "depth", "dtype"), [(512, 1024, BF16), (320, 200, torch.float16), (16, 8, BF16)])
@pytest.mark.parametrize("counts", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("config", SM90_GROUPED_CONFIGS, ids=str)
def test_results(config, counts, columns, depth, dtype):
    rows, weight, given = made(counts, columns, depth, dtype)
    height = 128
    groups = grouped.group_rows(given, len(rows), height)
    assert grouped_triton.takes_sm90(rows, weight, height, False, False)
    with torch.no_grad():
        wide = [torch.nan_to_num(rows.double()), weight.double()]
        exact = grouped.multiply_reference(*wide, groups, height, False)
        assert_close(grouped_triton.multiply(rows, weight, groups, height, False, config=config), exact)
        by_columns = weight.mT.contiguous()
        assert_close(grouped_triton.multiply(rows, by_columns, groups, height, True, config=config), exact)
        result, kept = grouped_triton.multiply_gated(rows, weight, groups, height, "silu", True, config=config)
        half = columns // 2
        assert_close(kept, exact)
        assert_close(result, torch.nn.functional.silu(exact[:, :half]) * exact[:, half:])
        assert torch.equal(
            grouped_triton.multiply_gated(rows, weight, groups, height, "silu", False, config=config)[0], result
        )


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(("columns", "depth"), [(512, 1024), (320, 200), (16, 8)])
@pytest.mark.parametrize("counts", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("config", SM90_GROUPED_GRADIENT_CONFIGS, ids=str)
def test_gradients_of_matrices(config, counts, columns, depth):
    rows, _, given = made(counts, columns, depth)
    groups = grouped.group_rows(given, len(rows), 128)
    gradient = torch.randn(len(rows), columns, device=DEVICE).to(BF16)
    wide = gradient.double(), torch.nan_to_num(rows.double())
    exact = grouped.weight_gradient_reference(*wide, groups, len(counts))
    assert_close(grouped_triton.weight_gradient(gradient, rows, groups, len(counts), config=config), exact)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(("columns", "depth", "dtype"), [(512, 1024, BF16), (320, 200, torch.float16), (16, 8, BF16)])
@pytest.mark.parametrize("counts", SPREADS.values(), ids=SPREADS)
def test_tokens_give_what_their_copies_give(counts, columns, depth, dtype):
    """To the bit, with all configurations."""
    tokens, sources, rows, groups = of_tokens(counts, depth, dtype=dtype)
    weight = made(counts, columns, depth, dtype)[1]
    across = weight.mT.contiguous()
    upstream = torch.randn(len(rows), columns, device=DEVICE).to(dtype)
    for config in SM90_GROUPED_CONFIGS:
        for matrices, transposed in ((weight, False), (across, True)):
            found = grouped_triton.multiply(tokens, matrices, groups, 128, transposed, sources, config=config)
            assert torch.equal(found, grouped_triton.multiply(rows, matrices, groups, 128, transposed, config=config))
        found = grouped_triton.multiply_gated(tokens, weight, groups, 128, "silu", True, sources, config=config)
        assert all(
            map(
                torch.equal,
                found,
                grouped_triton.multiply_gated(rows, weight, groups, 128, "silu", True, config=config),
            )
        )
    number = len(counts)
    for config in SM90_GROUPED_GRADIENT_CONFIGS:
        found = grouped_triton.weight_gradient(upstream, tokens, groups, number, sources, "rows", config=config)
        assert torch.equal(found, grouped_triton.weight_gradient(upstream, rows, groups, number, config=config))
        found = grouped_triton.weight_gradient(tokens, upstream, groups, number, sources, "gradient", config=config)
        assert torch.equal(found, grouped_triton.weight_gradient(rows, upstream, groups, number, config=config))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("counts", SPREADS.values(), ids=SPREADS)
def test_fp8(counts, blocks):
    rows, weight, row_scales, weight_scales, groups, exact = of_fp8(counts, 512, 1024, blocks)
    assert grouped_triton.takes_fp8_sm90(rows, weight, 128, BF16, "silu")
    assert_close(grouped_triton.multiply_fp8(rows, weight, row_scales, weight_scales, groups, 128, "", BF16), exact)
    found = grouped_triton.multiply_fp8(rows, weight, row_scales, weight_scales, groups, 128, "silu", BF16)
    assert_close(found, gated_of(exact))


@pytest.mark.gpu
@hopper
def test_a_hundred_times_the_same_and_in_a_graph():
    counts = torch.distributions.Beta(1.0, 5.0).sample((64,)).mul(2000).int().tolist()
    rows, weight, given = made(counts, 1024, 2048, behind=0)
    rows.requires_grad_()
    weight.requires_grad_()
    upstream = torch.randn(len(rows), 512, device=DEVICE, dtype=BF16)

    def both():
        result = kernels.grouped_gemm(rows, weight, given, activation="silu")
        return result.detach(), *torch.autograd.grad(result, (rows, weight), upstream)

    first = both()
    for _ in range(100):
        assert all(map(torch.equal, first, both()))
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = kernels.grouped_gemm(rows, weight, given, activation="silu")
        given.copy_(given.flip(0))
        for _ in range(10):
            recorded.zero_()
            graph.replay()
            assert torch.equal(recorded, kernels.grouped_gemm(rows, weight, given, activation="silu"))
    assert not grid_counters(1, rows.device).any()


@pytest.mark.gpu
@hopper
def test_two_streams_at_the_same_time():
    rows, weight, given = made([300, 0, 1, 129, 700, 31] * 4, 512, 1024, behind=0)
    expected = kernels.grouped_gemm(rows, weight, given)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    torch.cuda.synchronize()
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(kernels.grouped_gemm(rows, weight, given))
    torch.cuda.synchronize()
    assert all(torch.equal(one, expected) for one in found)
