"""`add`: the pattern of a kernel, tested as all others are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_kernel_is_exact, layouts
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (4096,), (3, 4097), (2, 0, 5), ()], ids=str)
def test_it_adds(shape, dtype):
    torch.manual_seed(0)
    x, y = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    with kernels.using("require"):
        assert_kernel_is_exact(kernels.add, kernels.add.reference, [x, y])


@given(st.lists(st.integers(0, 9), max_size=4), st.sampled_from(DTYPES), st.integers(0, 5), st.integers(0, 5))
def test_any_shape_and_layout(shape, dtype, left, right):
    x, y = (torch.randn([*shape, 3], device=DEVICE).to(dtype) for _ in range(2))
    ways = list(layouts(x)), list(layouts(y))
    x, y = ways[0][left % len(ways[0])][1], ways[1][right % len(ways[1])][1]
    with kernels.using("require"):
        assert torch.equal(kernels.add(x, y), x + y)


def test_an_expanded_gradient():
    x = torch.randn(5, 6, device=DEVICE, requires_grad=True)
    kernels.add(x, torch.ones(5, 6, device=DEVICE)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_the_operator_is_one_of_torch():
    x, y = (torch.randn(3, 5, device=DEVICE, requires_grad=True) for _ in range(2))
    opcheck(torch.ops.nearpeak.add.default, (x, y))
    opcheck(torch.ops.nearpeak.add.default, (x.detach().t(), y.detach().t()))


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_it_compiles_without_a_graph_break(backend):
    x = torch.randn(3, 5, device=DEVICE, requires_grad=True)
    compiled = torch.compile(lambda x: kernels.add(x, x.exp()).sum(), fullgraph=True, backend=backend)
    (actual,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(actual, 1 + x.exp())


def test_what_it_does_not_take_runs_the_reference():
    x, y = (torch.ones(3, dtype=torch.float64, device=DEVICE) for _ in range(2))
    assert not kernels.supports(kernels.add, x, y)
    assert torch.equal(kernels.add(x, y), x + y)
    assert torch.equal(kernels.add(torch.ones(2, 3), torch.ones(3)), torch.full((2, 3), 2.0))
    with kernels.using("require"), pytest.raises(KernelUnavailable, match=r"add.*cannot run: .*float64"):
        kernels.add(x, y)


def test_references_alone():
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    with kernels.using("off"):
        assert type(kernels.add(x, x).grad_fn).__name__ == "AddBackward0"
    assert type(kernels.add(x, x).grad_fn).__name__ == "addBackward"


def test_a_mode_that_does_not_exist():
    with pytest.raises(UsageError, match="Did you mean 'require'"), kernels.using("requires"):
        pass


def test_a_function_that_is_no_kernel():
    with pytest.raises(UsageError, match="takes a function"):
        kernels.supports(torch.add, 1, 2)


def test_a_second_derivative_is_refused_and_not_wrong():
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*using\('off'\)"):
        torch.autograd.grad(kernels.add(x, x).sum(), x, create_graph=True)


def test_under_vmap_and_modes_it_is_the_operator():
    x = torch.randn(4, 3, device=DEVICE)
    assert torch.equal(torch.vmap(kernels.add)(x, x), x + x)
    with torch.profiler.profile() as profiler:
        kernels.add(x, x)
    assert "nearpeak::add" in {event.name for event in profiler.events()}
