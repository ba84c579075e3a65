"""Sources of examples, compiled here: they are right where they run, and their absence is told."""

from __future__ import annotations

import ctypes

import pytest
import torch

from nearpeak.gallery import native
from nearpeak.gallery.examples import cuda_kernel, fewer_operations, memory_hierarchy, power, tiling_ladder
from nearpeak.gallery.run import Context


@pytest.fixture
def compiled():
    """Compiles a C source, or skips."""

    def compile_or_skip(source):
        library = native.compile_c(source)
        if library is None:
            pytest.skip("no C compiler")
        return library

    return compile_or_skip


def test_the_loops_of_a_core_compute_what_torch_does(compiled):
    library = compiled(cuda_kernel.C_LOOP + cuda_kernel.C_PAIRS)
    x, y = torch.randn(256), torch.randn(256)
    right = 2 * x + y
    library.saxpy(native.pointer(x), native.pointer(y), ctypes.c_long(256))
    torch.testing.assert_close(y, right)
    for name, extra in (("in_steps", 1), ("in_steps", 16), ("one_chain", 1), ("eight_chains", 1)):
        function = getattr(library, name)
        function.restype = ctypes.c_float
        total = function(native.pointer(x), ctypes.c_long(256), ctypes.c_long(extra))
        assert total == pytest.approx(x.sum().item(), abs=1e-4)


@pytest.mark.parametrize("side", tiling_ladder.SIDES)
def test_tiles_by_hand_multiply(compiled, side):
    library = compiled(f"#define R {side[0]}\n#define C {side[1]}\n{tiling_ladder.C_TINY}")
    a, b = torch.randn(2, 32, 32)
    torch.testing.assert_close(tiling_ladder._multiply_c(library, a, b), a @ b, rtol=1e-4, atol=1e-4)


def test_a_chain_visits_every_line_once_and_returns():
    indices, step = memory_hierarchy.chain(2**20, 128, "cpu"), 32
    place, seen = int(indices.nonzero()[0]), set()
    for _ in range(2**20 // 128):
        seen.add(place)
        place = int(indices[place])
    assert len(seen) == 2**20 // 128 and place in seen and all(one % step == 0 for one in seen)


def test_without_a_compiler_there_are_predictions(monkeypatch, predicting_cpu):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.compile_c("/* nothing */") is None


def test_a_source_that_does_not_compile_is_none():
    assert native.compile_c("this is no C") is None


def test_strassen_multiplies():
    a, b = torch.randn(2, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(fewer_operations.strassen(a, b), a @ b)


def test_a_duty_cycle_is_kept():
    numbers = torch.ones(8, 8)
    context = Context(machine=None, device="cpu")  # type: ignore[arg-type]
    duty = power.at_duty(context, numbers, 1.0, seconds=0.05)
    assert 0 < duty.seconds < 0.05
