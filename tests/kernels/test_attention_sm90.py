"""Attention by the kernels for Hopper: what they take, in which order they add, and their results on such a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernel_checks import DEVICE

pytest.importorskip("triton.experimental.gluon")

from nearpeak import kernels
from nearpeak.kernels._runtime import gluon, launch
from nearpeak.kernels.attention import backends, sm90, tuning
from nearpeak.kernels.attention.triton import AttentionProblem

BF16 = torch.bfloat16


def problem(*shape, keys=None, causal=False, dtype=BF16, **changed):
    batches, heads, queries, dim = shape
    query = torch.empty(shape, dtype=dtype)
    key = torch.empty((batches, heads, keys or queries, dim), dtype=dtype)
    given = {
        "query": query, "key": key, "value": key, "bias": None, "slopes": None, "sinks": None, "seed": None,
        "query_starts": None, "key_starts": None, "longest_query": 0, "longest_key": 0, "left": -1,
        "right": 0 if causal else -1, "bottom_right": True, "scale": dim**-0.5, "softcap": 0.0, "dropout": 0.0,
    }  # fmt: skip
    return AttentionProblem(**{**given, **changed})


def test_what_they_take():
    takes = sm90.takes
    assert takes(problem(2, 4, 100, 64))
    assert takes(problem(2, 4, 100, 128, causal=True, dtype=torch.float16))
    assert takes(problem(1, 1, 1, 64, keys=9))
    assert takes(problem(2, 4, 100, 64, causal=True, left=5, sinks=torch.empty(4)))
    for dim in (80, 96, 192, 256):
        assert takes(problem(2, 4, 100, dim))
        assert takes(problem(2, 4, 100, dim), backward=True) == (dim < 192)
    wide = torch.empty(2, 4, 100, 192, dtype=BF16)
    for backward in (False, True):
        assert takes(problem(2, 4, 100, 192, query=wide, key=wide, value=wide[..., :128]), backward=backward)
    assert not takes(problem(2, 4, 100, 64, dtype=torch.float32))
    assert not takes(problem(2, 4, 100, 64, softcap=30.0))
    assert not takes(problem(2, 4, 100, 64, left=5))
    assert not takes(problem(2, 4, 100, 64, dropout=0.1))
    assert not takes(problem(2, 4, 100, 64, bias=torch.zeros(100, 100)))
    assert not takes(problem(0, 4, 100, 64))


def test_what_they_support_and_do_not_take_before_it_is_measured():
    wide = torch.empty(2, 4, 100, 192, dtype=BF16)
    assert sm90.supports(problem(2, 4, 100, 72))
    assert not sm90.takes(problem(2, 4, 100, 72))
    assert sm90.takes(problem(2, 4, 100, 128), backward=True)
    assert sm90.supports_backward(problem(2, 4, 100, 80))
    assert not sm90.supports_backward(problem(2, 4, 100, 192))
    assert not sm90.supports_backward(problem(2, 4, 100, 256))
    assert not sm90.supports(problem(2, 4, 100, 264))
    assert not sm90.supports(problem(2, 4, 100, 100))
    assert not sm90.supports(problem(2, 4, 100, 192, query=wide, key=wide, value=wide[..., :64]))
    assert not sm90.supports(problem(2, 4, 100, 96, left=5))  # not causal
    for dim, changed in ((96, {"left": 5}), (128, {"sinks": torch.empty(4)})):
        assert sm90.supports_backward(problem(2, 4, 100, dim, causal=True, **changed))
        for backward in (False, True):
            assert not sm90.takes(problem(2, 4, 100, dim, causal=True, **changed), backward=backward)


@pytest.mark.parametrize(("dim", "forward"), [(64, True), (128, True), (80, False)])
def test_windows_of_heads_that_were_measured(dim, forward):
    windowed = problem(2, 4, 100, dim, causal=True, left=5)
    assert sm90.takes(windowed) == forward
    assert sm90.takes(windowed, backward=True)


def test_blocks_of_keys_are_smaller_in_narrow_windows():
    assert [tuning.sm90_tiles(64, 64, left).keys for left in (0, 127, 1023, -1)] == [64, 64, 128, 128]
    assert tuning.sm90_tiles(80, 80, 127).keys == 128  # the only size that it has


def test_programs_are_persistent_where_tiles_have_the_same_work():
    def persistent(causal, left=-1, fp8=False):
        return tuning.sm90_config(128, causal, 16384, left, fp8, torch.device("cpu")).persistent

    assert persistent(causal=True, left=1023)
    assert not persistent(causal=True, left=16000)
    assert not persistent(causal=True)
    assert persistent(causal=False, fp8=True)
    assert not persistent(causal=True, fp8=True)


def test_heads_of_grouped_keys_alternate_if_several_are_at_work_at_a_time():
    def together(dim=128, causal=True, group=4, heads=16, blocks=64):
        return tuning.heads_together(dim, causal, group, heads, blocks, 132)

    assert together() == 16
    assert together(heads=24) == 12
    assert together(heads=6) == together(heads=17) == 1  # few heads wait for each other
    assert together(blocks=67) == 1
    assert together(group=1) == together(causal=False) == together(dim=64) == 1


def test_what_cannot_be_copied_is_left_to_the_portable_kernels():
    wide = torch.empty(2, 4, 100, 72, dtype=BF16)
    assert sm90.takes(problem(2, 4, 100, 64, query=wide[..., :64]))
    for x in (
        wide[..., 1:65],  # begins at no multiple of 16 bytes
        torch.empty(2, 4, 100, 66, dtype=BF16)[..., :64],  # neither do its rows
        torch.empty(2, 1, 100, 64, dtype=BF16).expand(-1, 4, -1, -1),
    ):
        assert not sm90.takes(problem(2, 4, 100, 64, query=x))


def test_a_device_without_these_kernels(monkeypatch):
    monkeypatch.setattr(gluon, "runs_on", lambda device: False)
    assert backends.choose(problem(2, 4, 100, 64)) == "triton"


def test_the_first_backend_that_takes_a_problem_runs(monkeypatch):
    monkeypatch.setattr(gluon, "runs_on", lambda device: True)
    assert backends.choose(problem(2, 4, 101, 64)) == "gluon"
    assert backends.choose(problem(2, 4, 101, 64, dropout=0.1)) == "triton"


class Program:
    """What one program of the backward pass adds, in its order."""

    def __init__(self, head, block, sizes, causal, rotated, sums):
        pairs = sizes[4]
        first, count, down = sm90.query_pairs.fn(head, block, sizes, causal, rotated)
        order = [sm90.pair_of_step.fn(step, first, count, down, pairs) for step in range(count)]
        self.left = [(pair, *sm90.turn_of_pair.fn(block, pair, down, sizes, causal, rotated, sums)) for pair in order]


@pytest.mark.parametrize(
    ("causal", "left", "together"),
    [(False, None, 1), (False, None, 3), (True, None, 1), (True, None, 3), (True, 0, 1), (True, 3, 1)],
)
@pytest.mark.parametrize("processors", [1, 3, 8, 100])
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (3, 8), (8, 3), (1, 5), (7, 1), (16, 16)])
def test_everyone_has_a_turn_and_nobody_waits_for_ever(monkeypatch, queries, keys, processors, causal, left, together):
    """All parts are added, each sum by its order, however few programs run at a time; the first begin first."""
    monkeypatch.setattr(
        sm90, "gl", SimpleNamespace(minimum=min, maximum=max, where=lambda is_so, one, other: one if is_so else other)
    )
    monkeypatch.setattr(sm90, "PAIR", 1)  # what is counted here are pairs
    heads, sums = 3, 2
    rotated = keys <= processors and together == 1 and left is None
    sizes = (queries, keys, heads, 1, queries, keys, keys - queries, 0, processors, left)
    places = [sm90.keys_of_program.fn(number, keys, together) for number in range(heads * keys)]
    assert sorted(places) == [(block, head) for block in range(keys) for head in range(heads)]
    waiting = [(head, Program(head, block, sizes, causal, rotated, sums)) for block, head in places]
    expected = sum(len(program.left) for _, program in waiting)
    counters: dict[tuple[int, int, int], int] = {}
    running, added = [], 0
    while waiting or running:
        while waiting and len(running) < processors:
            running.append(waiting.pop(0))
        moved = False
        for head, program in list(running):
            if program.left:
                pair, number, before = program.left[0]
                if counters.get((head, pair, number), 0) < before:
                    continue
                assert counters.get((head, pair, number), 0) == before
                counters[head, pair, number] = before + 1
                program.left.pop(0)
                added += 1
            else:
                running.remove((head, program))
            moved = True
        assert moved, "all that run wait for one that does not"
    assert added == expected
    every = torch.ones(queries, keys)
    if causal:
        every = every.tril(keys - queries)
    if left is not None:
        every = every.triu(keys - queries - left)
    assert added == heads * every.sum()


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hidden", [0, 130])
def test_sums_are_added_up_where_there_are_any(causal, hidden):
    """What nobody has written is not read: a query that sees one block of keys has one sum, and one of none has 0."""
    batches, heads, queries, dim, keys = 2, 3, 300 + hidden, 64, 300
    pairs, blocks = (queries + 127) // 128, 3
    sums = torch.randn(2, batches * heads, pairs * 128, dim, device=DEVICE)
    expected = sums.clone()
    if causal:
        for number in range(2):
            # of the last query of a pair
            unseen = 128 * sum(128 * (pair + 1) - hidden <= 128 * number for pair in range(pairs))
            sums[number, :, :unseen] = float("nan")
            expected[number, :, :unseen] = 0.0
    actual = torch.empty(batches, heads, queries, dim, dtype=BF16, device=DEVICE)
    kernel = sm90.attention_sums_kernel
    launch.launch(
        kernel, (pairs * 4 * batches * heads, 1, 1), sums, actual, *actual.stride()[:3], 0.5, heads, queries,
        pairs * 128, blocks, keys - queries, None, sums[0].numel(), dim, dim, dim, causal, 2, 128, 32,
    )  # fmt: skip
    total = (expected.sum(0) * 0.5).view(batches, heads, pairs * 128, dim)[:, :, :queries]
    torch.testing.assert_close(actual, total.to(BF16), rtol=0.01, atol=0.0)


CASES = [
    # batches, heads, key heads, queries, keys, dim
    (2, 4, 4, 256, 256, 128),
    (2, 4, 2, 333, 333, 64),
    (1, 8, 1, 1000, 1500, 128),
    (1, 2, 2, 1500, 1000, 64),
    (1, 2, 2, 1, 7, 128),
    (1, 1, 1, 17_500, 17_500, 64),  # more blocks of keys than processors
]


def random_inputs(batches, heads, key_heads, queries, keys, dim, dtype=BF16):
    torch.manual_seed(0)
    shapes = ((batches, queries, heads, dim), (batches, keys, key_heads, dim), (batches, keys, key_heads, dim))
    query, key, value = (torch.randn(shape, device=DEVICE, dtype=dtype).transpose(1, 2) for shape in shapes)
    gradient = torch.randn((batches, heads, queries, dim), device=DEVICE, dtype=dtype)
    return [one.requires_grad_() for one in (query, key, value)], gradient


def on_this_gpu() -> bool:
    return torch.cuda.is_available() and gluon.runs_on(torch.device("cuda", 0))


hopper = pytest.mark.skipif(not on_this_gpu(), reason="these kernels are for Hopper")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("alignment", ["bottom right", "top left"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case, causal, alignment):
    inputs, gradient = random_inputs(*case)
    queries, keys = case[3:5]
    with kernels.using("require"):
        actual = kernels.attention(*inputs, causal=causal, alignment=alignment)
    gradients = torch.autograd.grad(actual, inputs, gradient)
    group = case[1] // case[2]
    wide = [one.detach().double().requires_grad_() for one in inputs]
    scores = wide[0] @ wide[1].repeat_interleave(group, 1).mT * case[5] ** -0.5
    if causal:
        diagonal = keys - queries if alignment == "bottom right" else 0
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).triu(diagonal + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1).nan_to_num()
    expected = weights @ wide[2].repeat_interleave(group, 1)
    torch.testing.assert_close(actual.double(), expected, atol=0.02, rtol=0.02)
    for one, right in zip(gradients, torch.autograd.grad(expected, wide, gradient.double()), strict=True):
        assert (one.double() - right).abs().max() < 0.01 * right.abs().max() + 1e-5  # one key: no gradient


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_hundred_times_the_same(dim, causal):
    inputs, gradient = random_inputs(2, 8, 4, 4096, 4096, dim)

    def both():
        result = kernels.attention(*inputs, causal=causal)
        return result.detach(), *torch.autograd.grad(result, inputs, gradient)

    first = both()
    for _ in range(100):
        assert all(map(torch.equal, first, both()))


@pytest.mark.gpu
@hopper
def test_in_a_cuda_graph():
    inputs, _ = random_inputs(1, 4, 4, 1024, 1024, 128)
    query, key, value = (one.detach() for one in inputs)
    expected = kernels.attention(query, key, value, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = kernels.attention(query, key, value, causal=True)
    actual.zero_()
    graph.replay()
    assert torch.equal(actual, expected)
