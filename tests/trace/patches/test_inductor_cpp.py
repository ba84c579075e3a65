"""Inductor's C++ kernels: what they touch, in traces, in profiles, and what is said where they cannot be seen."""

from __future__ import annotations

import json

import pytest
import torch
from torch._inductor import config as inductor_config

from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import name_without_origin
from nearpeak.profiling.torch_profiler import Profiler
from nearpeak.trace.kineto.read import read_trace
from nearpeak.trace.patches.inductor_cpp import _kernels_of, see_cpp_kernels, touched_by_cpp
from nearpeak.trace.trace import trace

LOOPS = """
extern "C" void kernel({parameters})
{{
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(8L); x0+=static_cast<int64_t>(1L))
    {{
        for(int64_t x1=static_cast<int64_t>(0L); x1<static_cast<int64_t>(48L); x1+=static_cast<int64_t>(16L))
        {{
            if(C10_LIKELY(x1 >= static_cast<int64_t>(0) && x1 < static_cast<int64_t>(48L)))
            {{
                {body}
            }}
        }}
    }}
}}
"""
VECTOR = "at::vec::Vectorized<float>::loadu({} + static_cast<int64_t>({}), static_cast<int64_t>(16))"


def touched(body, parameters="const float* in_ptr0, float* out_ptr0"):
    return touched_by_cpp(LOOPS.format(parameters=parameters, body=body))


@pytest.mark.parametrize(
    ("index", "read"),
    [
        ("x1 + 48L*x0", 384),
        ("x1", 48),
        ("48L*x0", 8),
        ("x1 + 48L*(c10::div_floor_integer(static_cast<int64_t>(x0), static_cast<int64_t>(2L)))", 192),
        ("x1 + 48L*(static_cast<int64_t>(x0) % static_cast<int64_t>(4L))", 192),
        ("x0 + 8L*x1 + 8L*x1_inner", 384),
    ],
)
def test_a_load_touches_the_addresses_of_its_index(index, read):
    counted = touched(
        f"auto tmp0 = {VECTOR.format('in_ptr0', index)};\ntmp0.store(out_ptr0 + static_cast<int64_t>(x1));"
    )
    assert counted.read == {"in_ptr0": read}
    assert counted.written == {"out_ptr0": 48}
    assert counted.complete


@pytest.mark.parametrize(
    "body",
    [
        "auto tmp0 = in_ptr0[static_cast<int64_t>(tmp9)];",
        "if (tmp9) { auto tmp0 = in_ptr0[static_cast<int64_t>(x1)]; }",
        "auto tmp0 = [&] { return in_ptr0[static_cast<int64_t>(x1)]; };",
        "atomic_add(&in_ptr0[static_cast<int64_t>(x1)], tmp3);",
        "call(in_ptr0);",
    ],
    ids=["computed address", "branch", "masked load", "atomic", "unknown use"],
)
def test_what_does_not_follow_counts_as_nothing_and_is_said(body):
    counted = touched(f"{body}\nout_ptr0[static_cast<int64_t>(x1 + 48L*x0)] = tmp0;")
    assert counted.read == {}
    assert counted.written == {"out_ptr0": 384}
    assert not counted.complete


def test_a_function_that_is_called_at_once_runs():
    counted = touched("auto tmp0 = [&] { return in_ptr0[static_cast<int64_t>(x1)]; } ();")
    assert counted.read == {"in_ptr0": 48}
    assert counted.complete


def test_memory_that_is_written_in_place_has_two_names():
    counted = touched(
        f"auto tmp0 = {VECTOR.format('out_ptr0', 'x1')};\ntmp0.store(in_out_ptr0 + static_cast<int64_t>(x1));",
        "float* in_out_ptr0",
    )
    assert counted is not None
    aliased = LOOPS.format(
        parameters="float* in_out_ptr0",
        body="in_out_ptr0[static_cast<int64_t>(x1)] = tmp1; auto tmp0 = out_ptr0[static_cast<int64_t>(x1)];",
    ).replace("{\n    for", "{\n    auto out_ptr0 = in_out_ptr0;\n    for", 1)
    counted = touched_by_cpp(aliased)
    assert (counted.read, counted.written) == ({}, {"in_out_ptr0": 48})


def test_a_template_is_not_read():
    assert touched_by_cpp('extern "C" void kernel(const float* X, const float* W, float* Y)\n{ Y[0] = X[0]; }') is None


@pytest.fixture
def compiled():
    """A compiled function of two kernels around a product, which has run."""
    torch._dynamo.reset()

    def step(x, weight):  # x: [64, 32], weight: [32, 48]
        return torch.softmax((x * 2 + 1) @ weight, -1)

    function = torch.compile(step)
    arguments = (torch.randn(64, 32), torch.randn(32, 48))
    function(*arguments)
    return lambda: function(*arguments)


@pytest.mark.slow
def test_kernels_are_ops_with_bytes_in_a_trace_and_with_a_time_in_a_profile(compiled):
    traced = trace(compiled, live=True, keep_compiled=True)
    kernels = [op for op in traced.ops if op.origin == "inductor"]
    assert len(kernels) == 2
    first, last = map(cost_of, kernels)
    assert (first.model, last.model) == ("formula", "formula")
    assert sum(access.bytes for access in first.reads) == 64 * 32 * 4
    assert sum(access.bytes for access in first.writes) == 64 * 32 * 4
    assert (first.family, last.family) == ("pointwise", "reduction")

    profiler = Profiler()
    compiled()
    recorded = profiler.stop()
    names = [op.name for op in recorded.trace.ops if op.origin == "inductor"]
    assert names == [op.name for op in kernels]
    assert all(
        seconds > 0
        for op, (_, seconds) in zip(recorded.trace.ops, recorded.spans, strict=True)
        if op.origin == "inductor"
    )


@pytest.mark.slow
def test_kernels_are_called_as_before_afterwards(compiled):
    from torch._inductor.codecache import PyCodeCache

    def functions():
        return [
            getattr(module, kernel.name) for module in PyCodeCache.modules for kernel in _kernels_of(module.__file__)
        ]

    before = functions()
    with see_cpp_kernels():
        assert before
        assert all(function is not old for function, old in zip(functions(), before, strict=True))
    assert functions() == before


@pytest.mark.slow
def test_kernels_write_what_their_code_says(compiled):
    """By another way: which elements of the outputs are no longer what they were."""
    from torch._inductor.codecache import PyCodeCache

    wrote = 0
    for module in PyCodeCache.modules:
        for kernel in _kernels_of(module.__file__):
            outputs = [name for name in kernel.parameters if name.startswith("out_ptr")]
            counted = touched_by_cpp(kernel.source)
            if not outputs or any(not name.startswith(("in_ptr", "out_ptr")) for name in kernel.parameters):
                continue
            tensors = {
                name: torch.full((4096,), float("nan")) if name in outputs else torch.rand(4096)
                for name in kernel.parameters
            }
            getattr(module, kernel.name)(*tensors.values())
            for name in outputs:
                assert int(tensors[name].isnan().logical_not().sum()) == counted.written[name], (kernel.name, name)
                wrote += 1
    assert wrote


@pytest.mark.slow
def test_code_compiled_as_a_whole_is_said_to_be_unseen():
    torch._dynamo.reset()

    def step(x):  # x: [64, 32]
        return torch.softmax(x * 2 + 1, -1)

    with inductor_config.patch(cpp_wrapper=True):
        function = torch.compile(step)
        x = torch.randn(64, 32)
        function(x)
        profiler = Profiler()
        function(x)
        recorded = profiler.stop()
    assert [name_without_origin(op.name) for op in recorded.trace.ops if op.origin == "unknown"] == ["compiled_code"]


def test_unseen_kernels_of_a_file_are_an_op_without_a_cost(tmp_path):
    def event(name, start, duration, **args):
        return {
            "ph": "X",
            "cat": args.pop("cat", "cpu_op"),
            "name": name,
            "pid": 1,
            "tid": 1,
            "ts": start,
            "dur": duration,
            "args": args,
        }

    mm = {
        "Input Dims": [[64, 64], [64, 64]],
        "Input type": ["float", "float"],
        "Input Strides": [[64, 1], [64, 1]],
        "Concrete Inputs": ["", ""],
        "External id": 2,
    }
    events = [
        event("ProfilerStep#1", 0, 1000, cat="user_annotation"),
        event("## Call CompiledFxGraph abc ##", 100, 800),
        event("aten::mm", 300, 100, **mm),
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    recorded = read_trace(file)
    assert [op.name for op in recorded.trace.ops] == [
        "unknown.compiled_code",
        "aten.mm.default",
        "unknown.compiled_code",
    ]
    assert [round(seconds * 1e6) for _, seconds in recorded.spans] == [200, 100, 500]
    assert any("compiled_code (2)" in note for note in recorded.notes)
