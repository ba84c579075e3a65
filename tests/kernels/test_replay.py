"""Calls that are made again as they were made before: with the same results, wherever that is right."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from kernel_launches_seen import started

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable
from nearpeak.kernels._runtime import replay

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the CPU stand for those of a GPU")


@pytest.fixture
def runs(monkeypatch):
    return started(monkeypatch)


def tensors(*shapes, dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for shape in shapes]


CASES = {
    "add": (lambda x, y: kernels.add(x, y), [(5, 24), (5, 24)]),
    "softmax": (lambda x: kernels.softmax(x), [(5, 24)]),
    "softmax with a mask": (lambda x, mask: kernels.softmax(x, mask=mask, scale=0.5), [(2, 5, 24), (5, 24)]),
    "causal softmax": (lambda x: kernels.softmax(x, causal=True), [(2, 5, 24)]),
    "long softmax": (lambda x: kernels.log_softmax(x), [(2, 70000)]),
    "rms_norm": (lambda x, weight: kernels.rms_norm(x, weight, eps=1e-5), [(5, 24), (24,)]),
    "layer_norm": (lambda x, weight, bias: kernels.layer_norm(x, weight, bias), [(3, 5, 24), (24,), (24,)]),
    "add_rms_norm": (lambda x, residual, w: kernels.add_rms_norm(x, residual, w), [(5, 24), (5, 24), (24,)]),
    "swiglu": (lambda gate, up: kernels.swiglu(gate, up), [(5, 24), (5, 24)]),
    "swiglu_packed": (lambda x: kernels.swiglu_packed(x), [(5, 48)]),
    "bias_gelu": (lambda x, bias: kernels.bias_gelu(x, bias), [(5, 24), (24,)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_third_call_and_those_after_it_are_made_by_a_plan(name, runs):
    function, shapes = CASES[name]
    with torch.no_grad(), kernels.using("require"):
        for call in range(5):
            inputs = tensors(*shapes)
            before = runs.asked, len(runs)
            result = function(*inputs)
            with kernels.using("off"):
                wanted = function(*inputs)
            torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
            assert (runs.asked > before[0]) == (call == 0)
            assert (len(runs) > before[1]) == (call > 0)
    python, _ = calls(lambda: function(*inputs), runs)
    assert python < 20  # by a plan: in full it is over a hundred


def test_gradients_by_plans(runs):
    for _ in range(5):
        x, weight, bias, upstream = tensors((5, 24), (24,), (24,), (5, 24))
        leaves = [one.requires_grad_() for one in (x, weight, bias)]
        found = torch.autograd.grad(kernels.layer_norm(*leaves), leaves, upstream)
        wanted = torch.autograd.grad(torch.nn.functional.layer_norm(x, (24,), weight, bias), leaves, upstream)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(runs) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("how", ["transposed", "expanded", "sliced", "misaligned", "other dtype", "other shape"])
def test_what_looks_different_has_a_plan_of_its_own(how, runs):
    ways = {
        "transposed": lambda: torch.randn(24, 24).t(),
        "expanded": lambda: torch.randn(1, 24).expand(24, 24),
        "sliced": lambda: torch.randn(24, 48)[:, :24],
        "misaligned": lambda: torch.randn(24 * 24 + 1)[1:].view(24, 24),
        "other dtype": lambda: torch.randn(24, 24).half(),
        "other shape": lambda: torch.randn(12, 48),
    }
    with torch.no_grad(), kernels.using("require"):
        for _ in range(4):
            for x in (torch.randn(24, 24), ways[how]()):
                for function in (
                    kernels.softmax,
                    lambda x: kernels.add(x, x.clone(memory_format=torch.preserve_format)),
                ):
                    result = function(x)
                    with kernels.using("off"):
                        torch.testing.assert_close(result, function(x), rtol=1e-3, atol=1e-3)


def test_halves_of_one_tensor_are_not_taken_for_one(runs):
    """In which memory a tensor is says nothing of the next one that looks like it."""
    with torch.no_grad():
        for number in range(6):
            both = torch.randn(5, 64)
            gate, up = (both[:, :32], both[:, 32:]) if number % 2 else (both[:, 32:], torch.randn(5, 64)[:, :32])
            torch.testing.assert_close(kernels.swiglu(gate, up), torch.nn.functional.silu(gate) * up)


def test_a_tensor_given_twice_makes_no_plan_for_two(runs):
    with torch.no_grad():
        for number in range(8):
            x = torch.randn(5, 24)
            y = x if number < 4 or number % 2 else torch.randn(5, 24)
            torch.testing.assert_close(kernels.add(x, y), x + y)


def test_what_is_copied_first_is_copied_each_time(runs):
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(24, 5).t()
            torch.testing.assert_close(kernels.add(x, x * 2), x * 3)


def test_options_count_and_so_do_their_names(runs):
    x = torch.randn(5, 24)
    with torch.no_grad():
        for _ in range(4):
            for scale in (0.5, 2.0):
                torch.testing.assert_close(kernels.softmax(x, scale=scale), torch.softmax(x * scale, -1))
            torch.testing.assert_close(kernels.softmax(x, -1, dtype=torch.float16), torch.softmax(x, -1).half())


def test_results_are_tensors_of_their_own(runs):
    x, y = tensors((5, 24), (5, 24))
    with torch.no_grad():
        results = [kernels.add(x, y) for _ in range(5)]
    assert len({one.data_ptr() for one in results}) == 5
    assert all(one.is_contiguous() and one.stride() == (24, 1) and not one.requires_grad for one in results)
    with torch.inference_mode():
        assert [kernels.add(x, y).is_inference() for _ in range(4)] == [True] * 4


def test_who_watches_sees_the_operator(runs):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, y = tensors((5, 24), (5, 24))
    with torch.no_grad():
        for _ in range(4):
            kernels.add(x, y)
        with Watch():
            kernels.add(x, y)
        assert seen == ["nearpeak.add.default"]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            kernels.add(x, y)
        assert "nearpeak::add" in {event.name for event in profile.events()}
        torch.testing.assert_close(torch.vmap(kernels.add)(x, y), x + y)


def test_a_gradient_is_wanted_after_calls_that_wanted_none(runs):
    x, y = tensors((5, 24), (5, 24))
    for _ in range(4):
        kernels.add(x, y)
    kernels.add(x.requires_grad_(), y).sum().backward()
    assert torch.equal(x.grad, torch.ones(5, 24))
    with torch.no_grad():
        assert not kernels.add(x, y).requires_grad


def test_references_are_asked_for_after_plans(runs):
    x, y = tensors((5, 24), (5, 24))
    with torch.no_grad():
        for _ in range(4):
            kernels.add(x, y)
        before = len(runs)
        with kernels.using("off"):
            kernels.add(x, y)
        assert len(runs) == before


def test_another_device_is_the_current_one(runs, monkeypatch):
    x, y = tensors((5, 24), (5, 24))
    with torch.no_grad():
        for _ in range(4):
            kernels.add(x, y)
        asked = []
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
        monkeypatch.setattr(replay.Replay, "run", lambda *_: asked.append("run"))
        with pytest.raises(KernelUnavailable):
            kernels.add(x, y)  # the launch itself would change to the device of the tensors
        assert asked == []


def test_plans_are_so_many_at_most(runs, monkeypatch):
    monkeypatch.setattr(replay, "_MOST_REPLAYS", 3)
    known = replay.ReplayCache()
    for size in range(1, 20):
        known.call(lambda x: x, (torch.empty(size),), {})
        assert len(known._known) <= 3


def test_arguments_that_are_no_memory_are_left_to_the_function(runs):
    known = replay.ReplayCache()
    sparse = torch.eye(3).to_sparse()
    for given in (sparse, [torch.ones(2)], torch.nn.Module(), torch.ones(3, requires_grad=True)):
        assert known.call(lambda one: one, (given,), {}) is given
    assert not known._known


def calls(function, runs):
    """How many functions of Python and of C are called."""
    counts = {"call": 0, "c_call": 0}

    def count(frame, event, argument):
        if event in counts:
            counts[event] += 1

    runs.interprets = False
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
        runs.interprets = True
    return counts["call"], counts["c_call"]


COSTS = {
    "add": lambda x, y, weight, bias: kernels.add(x, y),
    "softmax": lambda x, y, weight, bias: kernels.softmax(x),
    "rms_norm": lambda x, y, weight, bias: kernels.rms_norm(x, weight),
    "layer_norm": lambda x, y, weight, bias: kernels.layer_norm(x, weight, bias),
    "swiglu": lambda x, y, weight, bias: kernels.swiglu(x, y),
}


@pytest.mark.parametrize("name", COSTS)
def test_the_host_has_little_to_do_for_a_call(name, runs):
    """Each call of a function takes a tenth of a microsecond or two, whether of Python or of torch for a shape."""
    given = tensors((16, 64), (16, 64), (64,), (64,))
    with torch.no_grad():
        for _ in range(3):
            COSTS[name](*given)
        python, c = calls(lambda: COSTS[name](*given), runs)
    assert python <= 13  # of which two are of this file, and four of the stand-in
    assert c <= 27
