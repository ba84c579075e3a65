"""Long rows in shared memory on Hopper: how they are shared, what runs where that cannot be, and the kernels."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, assert_as_exact

pytest.importorskip("triton")

from nearpeak.kernels import norms as operations
from nearpeak.kernels._runtime import ring_buffer
from nearpeak.kernels._runtime.launch import next_power_of_2
from nearpeak.kernels._runtime.ring_buffer import RingConfig
from nearpeak.kernels._runtime.row_barrier import MAX_PARTS
from nearpeak.kernels.norms import triton as norms_triton
from nearpeak.kernels.softmax import log_reference, reference
from nearpeak.kernels.softmax import triton as softmax_triton

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LONG = RingConfig(width=32768, warps=16)
CONFIGS = [
    LONG,
    RingConfig(width=16384, warps=8, programs=2),
    RingConfig(width=32768, warps=16, kept=True),
    RingConfig(width=16384, warps=16, ring=4, where="shared"),
    RingConfig(width=16384, warps=8, programs=2, where="registers"),
]
SHARED_BYTES = 227 * 2**10
"""That a program may ask for on Hopper."""
needs_them = pytest.mark.skipif(
    not ring_buffer._is_available(),
    reason="needs a GPU of compute capability 9.0 and the version of Triton they are written for",
)


@pytest.fixture
def anywhere(monkeypatch):
    """Plans are made as if kernels could run."""
    monkeypatch.setattr(ring_buffer, "runs_on", lambda device: True)


def randn(*shape, dtype=BF16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def empty(rows, columns, dtype=BF16):
    return torch.empty(1, dtype=dtype).expand(rows, columns)


def plan(rows, columns, config=LONG, dtypes=(BF16,), held=(), stride=None, **kwargs):
    tensors = [empty(rows, columns, dtype) for dtype in dtypes]
    copied = [(one, columns if stride is None else stride) for one in tensors]
    return ring_buffer.plan_ring(
        rows, columns, config, copied, tensors[:1], [torch.empty(16, dtype=one) for one in held], **kwargs
    )


@pytest.mark.usefixtures("anywhere")
@settings(max_examples=200, deadline=None)
@given(
    columns=st.integers(1, 300_000),
    rows=st.integers(1, 100_000),
    config=st.sampled_from(CONFIGS),
    dtypes=st.lists(st.sampled_from([BF16, FP16, FP32]), min_size=1, max_size=3),
    held=st.lists(st.sampled_from([BF16, FP32]), max_size=2),
)
def test_every_column_has_one_program_and_all_fit(columns, rows, config, dtypes, held):
    ring = plan(rows, columns, config, dtypes, held)
    if ring is None:
        return
    assert ring.parts * ring.part >= columns + (ring.vector - 1) * (ring.mode == ring_buffer.SHIFTED)
    assert ring.part % ring.vector == 0
    assert (ring.chunks - 1) * ring.chunk < ring.part <= ring.chunks * ring.chunk
    last = columns - (ring.parts - 1) * ring.part
    assert max((ring.chunks - 1) * ring.chunk, 1) <= last <= ring.part
    assert 1 <= ring.parts <= MAX_PARTS
    assert ring.parts * ring.groups <= 132 * config.programs  # they wait for each other, and all run at a time
    assert ring.groups <= rows
    by_column = ring.ring * sum(one.itemsize for one in dtypes)
    if ring_buffer.PARAMETER_MEMORY[ring.where] == "shared":
        by_column += sum(one.itemsize for one in held)
    by_program = ring.chunks * ring.chunk * by_column
    assert by_program + 512 <= SHARED_BYTES // config.programs
    assert ring.chunk == next_power_of_2(ring.chunk)
    assert (ring.mode == ring_buffer.FULL) == (columns == ring.parts * ring.chunks * ring.chunk)


@pytest.mark.parametrize(("most", "rows", "groups"), [(66, 2048, 64), (33, 2048, 32), (264, 4096, 256), (66, 660, 66)])
def test_groups_end_together_where_a_few_less_do(most, rows, groups):
    assert ring_buffer._balanced_groups(most, rows) == groups


@pytest.mark.usefixtures("anywhere")
def test_what_they_are_not_for():
    assert plan(1000, 65536) is not None
    assert plan(100, 65536) is None  # so few rows do not fill a ring
    assert plan(10**6, 2**21) is None  # more parts than may wait for each other
    assert plan(1000, 65536, stride=65537) is None
    assert plan(1000, 65536, stride=65544) is not None
    assert plan(1000, 65535).mode == ring_buffer.SHIFTED
    assert plan(1000, 65535, shifts=False) is None
    assert plan(1001, 65535) is None  # the last 16 bytes of the last row are not all of the tensor
    assert plan(1000, 65535, dtypes=(BF16, FP32)) is None  # they do not start alike
    assert plan(1000, 65535, stride=70000) is None
    no_room = plan(1000, 65536, replace(LONG, where="shared"), held=(FP32,))
    assert ring_buffer.PARAMETER_MEMORY[no_room.where] == "global"
    x = torch.empty(9, dtype=BF16)[1:].expand(1000, 8)
    assert ring_buffer.plan_ring(1000, 8, LONG, [(x, 8)], [empty(1000, 8)]) is None


@pytest.mark.skipif(DEVICE == "cuda", reason="is about where they cannot run")
def test_something_else_runs_where_they_cannot():
    assert not ring_buffer.runs_on(torch.device("cpu"))
    assert ring_buffer.ring_forward_candidates(65536, weights=True) == []
    assert ring_buffer.ring_backward_candidates(65536, sums=True) == []
    x, gradient, weight = randn(5, 300), randn(6, 300)[:5], randn(300)
    result, statistics = norms_triton.layer_norm(x, weight, weight, 1e-5, config=LONG)
    assert torch.equal(result, norms_triton.layer_norm(x, weight, weight, 1e-5)[0])
    given = gradient, x, None, statistics, weight, weight, 0.0, True, [True, False, True, True]
    assert all(map(torch.equal, norms_triton.norm_backward(*given, config=LONG), norms_triton.norm_backward(*given)))
    y = softmax_triton.forward(x, None, 1.0, False, BF16, config=LONG)
    assert torch.equal(y, softmax_triton.forward(x, None, 1.0, False, BF16))
    moved = softmax_triton.backward(gradient, y, 1.0, False, BF16, config=LONG)
    assert torch.equal(moved, softmax_triton.backward(gradient, y, 1.0, False, BF16))


@pytest.fixture
def started(monkeypatch):
    """The names of the kernels in Gluon that were launched."""
    names = []
    for operation in ("norms", "softmax"):
        module = importlib.import_module(f"nearpeak.kernels.{operation}.sm90")

        def launch(kernel, *args, launch=module.launch, **settings):
            names.append(kernel.__name__)
            launch(kernel, *args, **settings)

        monkeypatch.setattr(module, "launch", launch)
    return names


FORWARD = [(300, 65536, BF16), (61, 262144, BF16), (208, 65521, BF16), (250, 50008, FP16), (150, 65536, FP32)]
BACKWARD = [(400, 16384, BF16), (210, 65536, BF16), (70, 262144, BF16), (150, 50008, FP16), (90, 65536, FP32)]


def each_once(sizes):
    """All sizes in one way, and one size in all ways."""
    cases = [(*size, LONG) for size in sizes] + [(1000, *sizes[0][1:], config) for config in CONFIGS[1:]]
    return pytest.mark.parametrize(("rows", "columns", "dtype", "config"), cases, ids=str)


def of_softmax(gradient, y, scale, log):
    """The gradient of x, by that of the result."""
    if not log:
        return scale * y * (gradient - (gradient * y).sum(-1, keepdim=True))
    seen = y > -torch.inf
    return torch.where(seen, scale * (gradient - y.exp() * (gradient * seen).sum(-1, keepdim=True)), 0.0)


def wide(tensors):
    return [one.double() if torch.is_tensor(one) else one for one in tensors]


@pytest.mark.parametrize("columns", [1280, 1536, 2464, 3000, 5656, 7000])
@pytest.mark.parametrize("tensors", [2, 3])
@pytest.mark.parametrize("sums", [1, 2])
def test_whole_rows_leave_few_lanes_empty_and_fit(columns, tensors, sums, anywhere):
    configs = ring_buffer.whole_row_configs(columns, tensors=tensors, sums=sums)
    assert configs
    filled = []
    for config in configs:
        shared = plan(40_000, columns, config, (BF16,) * tensors, (BF16,), shifts=False)
        assert shared.parts == 1
        assert shared.groups <= 132 * config.programs
        taken = 2 * shared.chunks * shared.chunk * (tensors * shared.ring + 1)
        assert config.programs * (taken + 1536) <= 228 * 2**10
        assert shared.registers >= 48 + 8 * shared.chunks * (1 + sums)
        filled.append(columns / (shared.chunks * shared.chunk))
    assert max(filled) > 0.85


@pytest.mark.gpu
@needs_them
@each_once(FORWARD)
@pytest.mark.parametrize("centered", [False, True], ids=["RMSNorm", "LayerNorm"])
def test_norms(rows, columns, dtype, centered, config, started):
    x, weight, bias = randn(rows, columns, dtype=dtype) + 3, randn(columns, dtype=dtype), randn(columns, dtype=FP32)

    def run():
        if centered:
            return norms_triton.layer_norm(x, weight, bias, 1e-5, config=config)
        return norms_triton.rms_norm(x, weight, bias, 1e-5, 0.5, config=config)

    offset = 0.0 if centered else 0.5
    actual, statistics = run()
    assert started == ["norm_forward_parts"]
    given = x, weight, bias, 1e-5, offset, centered
    exact = operations.norm_reference(*wide(given), torch.float64)
    assert_as_exact(actual, exact, operations.norm_reference(*given, dtype))
    expected_statistics = operations.row_statistics(x.double(), 1e-5, centered)
    torch.testing.assert_close(statistics.double(), expected_statistics.double(), rtol=1e-5, atol=1e-6)
    for _ in range(20):
        assert all(map(torch.equal, run(), (actual, statistics)))


@pytest.mark.gpu
@needs_them
@pytest.mark.parametrize("columns", [65536, 65521, 50008])
def test_norms_after_an_addition(columns, started):
    x, residual, weight = randn(424, columns), randn(425, columns)[1:].clone(), randn(columns)
    actual, total, _ = norms_triton.add_layer_norm(x, residual, weight, weight, 1e-5, config=LONG)
    assert started == ["norm_forward_parts"]
    assert torch.equal(total, x + residual)
    given = total, weight, weight, 1e-5, 0.0, True
    assert_as_exact(
        actual, operations.norm_reference(*wide(given), torch.float64), operations.norm_reference(*given, BF16)
    )


@pytest.mark.gpu
@needs_them
@each_once(BACKWARD)
@pytest.mark.parametrize("centered", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "after an addition"])
def test_gradients_of_norms(rows, columns, dtype, centered, adds, config, started):
    x, gradient, weight = randn(rows, columns, dtype=dtype) + 1, randn(rows, columns, dtype=dtype), randn(columns)
    expected_statistics = operations.row_statistics(x, 1e-5, centered)
    more = gradient.flip(0) if adds else None
    given = gradient, x, more, expected_statistics, weight, weight, 0.0, centered, [True, adds, True, centered]
    actual = norms_triton.norm_backward(*given, config=config)
    assert started[:1] == ["norm_backward_parts"]
    exact, same = operations._norm_backward_reference(*wide(given)), operations._norm_backward_reference(*given)
    for number, tensors in enumerate(zip(actual, exact, same, strict=True)):
        assert_as_exact(*tensors, f"gradient {number}")
    for _ in range(20):
        assert all(map(torch.equal, norms_triton.norm_backward(*given, config=config), actual))


@pytest.mark.gpu
@needs_them
@pytest.mark.parametrize("columns", [1280, 1536, 2464, 5656])
@pytest.mark.parametrize("centered", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "after an addition"])
def test_gradients_of_whole_rows(columns, centered, adds, started):
    for config in ring_buffer.whole_row_configs(columns, tensors=2 + adds, sums=1 + centered):
        test_gradients_of_norms(8001, columns, BF16, centered, adds, config, started)
        started.clear()


@pytest.mark.gpu
@needs_them
@each_once(FORWARD)
@pytest.mark.parametrize(("log", "scale"), [(False, 1.0), (False, -0.3), (True, 1.0), (True, 2.0)])
def test_softmax(rows, columns, dtype, log, scale, config, started):
    x = 3 * randn(rows, columns, dtype=dtype)
    x[0, : columns // 2] = x[1] = -torch.inf if scale > 0 else torch.inf
    x[2] += 100
    forward = softmax_triton.log_forward if log else softmax_triton.forward
    backward = softmax_triton.log_backward if log else softmax_triton.backward
    plain = log_reference if log else reference
    actual = forward(x, None, scale, False, dtype, config=config)
    assert started == ["softmax_parts"]
    exact = plain(x.double(), scale=scale)
    assert_as_exact(actual, exact, plain(x, scale=scale), by_exp=True)
    gradient = randn(rows, columns, dtype=dtype)
    moved = backward(gradient, actual, scale, False, dtype, config=config)
    exact, same = (of_softmax(gradient.to(wider), actual.to(wider), scale, log) for wider in (torch.float64, FP32))
    assert_as_exact(moved, exact, same.to(dtype), by_exp=True)
    for _ in range(20):
        assert torch.equal(forward(x, None, scale, False, dtype, config=config), actual)


@pytest.mark.gpu
@needs_them
def test_two_at_a_time_end():
    """Neither has all processors: a program that waits for one that cannot start would wait for ever."""
    x, streams = [randn(700, 262144), randn(701, 262144)], [torch.cuda.Stream() for _ in range(2)]
    alone = [softmax_triton.forward(one, None, 1.0, False, BF16, config=LONG) for one in x]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for one, stream in zip(x, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(softmax_triton.forward(one, None, 1.0, False, BF16, config=LONG))
    torch.cuda.synchronize()
    assert all(map(torch.equal, results, alone * 10))


@pytest.mark.gpu
@needs_them
def test_in_a_graph():
    x = randn(300, 65536)
    softmax_triton.forward(x, None, 1.0, False, BF16, config=LONG)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = softmax_triton.forward(x, None, 1.0, False, BF16, config=LONG)
    for _ in range(3):
        x.copy_(x.flip(0))
        graph.replay()
        assert torch.equal(results, softmax_triton.forward(x, None, 1.0, False, BF16, config=LONG))
