"""Compiled code in a live trace. Without a GPU, a stand-in launches kernels as Inductor's wrapper does."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from nearpeak.ops.cost import cost_of
from nearpeak.trace.live import LiveTrace
from nearpeak.trace.patches import inductor_kernels

ADD = """
def triton_poi_fused_add_0(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 4096
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x2 = xindex
    x0 = (xindex % 64)
    tmp0 = tl.load(in_ptr0 + (x2), xmask)
    tmp1 = tl.load(in_ptr1 + (x0), xmask, eviction_policy='evict_last')
    tl.store(out_ptr0 + (x2), tmp0 + tmp1, xmask)
"""


class CachingAutotuner:
    """What a kernel is to Inductor's code, as far as it is used."""

    def __init__(self, name, code, names):
        self.inductor_meta = {"kernel_name": name}
        self.fn = SimpleNamespace(src=code, arg_names=names, __name__="triton_")
        self.launches = 0

    def run(self, *args, stream, benchmark_run=False):
        self.launches += 1


@pytest.fixture(autouse=True)
def heuristics(monkeypatch):
    module = ModuleType(inductor_kernels._HEURISTICS)
    module.CachingAutotuner = CachingAutotuner
    monkeypatch.setitem(sys.modules, inductor_kernels._HEURISTICS, module)


def traced(kernel, *args, **options):
    live = LiveTrace()
    try:
        kernel.run(*args, stream=0, **options)
    finally:
        found = live.stop()
    return found


def test_a_compiled_kernel_is_an_op_of_what_its_code_touches():
    kernel = CachingAutotuner("triton_poi_fused_add_0", ADD, ["in_ptr0", "in_ptr1", "out_ptr0", "xnumel"])
    x, row, out = torch.empty(64, 64), torch.empty(64), torch.empty(64, 64)
    found = traced(kernel, x, row, out, 4096)
    assert kernel.launches == 1
    (op,) = found.ops
    cost = cost_of(op)
    assert op.name == "inductor.triton_poi_fused_add_0"
    assert (cost.family, cost.model) == ("pointwise", "formula")
    assert [access.bytes for access in cost.reads] == [4 * 4096, 4 * 64]
    assert [access.bytes for access in cost.writes] == [4 * 4096]
    kinds = {op.tensors("read")[0].storage: "input", op.tensors("written")[0].storage: "intermediate"}
    assert {number: found.storages[number].kind for number in kinds} == kinds


def test_outside_of_a_trace_and_while_it_is_tuned_a_kernel_is_only_launched():
    kernel = CachingAutotuner("triton_poi_fused_add_0", ADD, ["in_ptr0", "in_ptr1", "out_ptr0", "xnumel"])
    tensors = torch.empty(64, 64), torch.empty(64), torch.empty(64, 64)
    kernel.run(*tensors, 4096, stream=0)
    assert traced(kernel, *tensors, 4096, benchmark_run=True).ops == ()
    assert kernel.launches == 2


def test_a_template_is_a_matrix_product():
    kernel = CachingAutotuner("triton_tem_fused_mm_0", "def other(x):\n    pass", ["arg_A", "arg_B", "out_ptr0"])
    a, b, out = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((32, 16), (16, 64), (32, 64)))
    (op,) = traced(kernel, a, b, out).ops
    cost = cost_of(op)
    assert cost.family == "matrix"
    assert cost.flops == {"bfloat16": 2 * 32 * 16 * 64}
    assert sum(access.bytes for access in cost.reads) == 2 * (32 * 16 + 16 * 64)


def test_a_kernel_that_is_not_understood_has_no_cost():
    kernel = CachingAutotuner("triton_unk_fused_sort_0", "def other(x):\n    pass", ["x"])
    (op,) = traced(kernel, torch.empty(8)).ops
    assert cost_of(op).model == "none"
