"""The measurement of attention kernels that are no default yet: its cells, configurations and lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon")

import torch

from benchmarks.kernels import attention_variants
from benchmarks.kernels.attention_variants import CELLS, Cell, configured, is_right, line
from nearpeak.kernels.attention import sm90
from nearpeak.kernels.attention.tuning import sm90_tiles

MAX_SHARED_BYTES = 227 * 1024
BARRIER_BYTES = 1024


def problem(cell):
    sizes = ((cell.heads, cell.dim), (cell.key_heads, cell.dim), (cell.key_heads, cell.value_dim))
    query, key, value = (torch.empty(1, 128, *size, dtype=torch.bfloat16).transpose(1, 2) for size in sizes)
    return attention_variants.problem_of((query, key, value, value), cell)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_kernels_support_every_cell_that_has_variants(cell):
    supports = sm90.supports_backward if cell.backward else sm90.supports_fp8 if cell.fp8 else sm90.supports
    assert supports(problem(cell)) == bool(cell.variants())
    assert len({variant.name for variant in cell.variants()}) == len(cell.variants())


def test_tiles_fit_into_shared_memory():
    for cell in CELLS:
        for variant in cell.variants():
            if variant.tiles is not None:
                tiles = variant.tiles
                operands = variant.consumers * 64 * cell.dim
                operands += tiles.keys * (tiles.key_stages * cell.dim + tiles.value_stages * cell.value_dim)
                size = (1 if variant.fp8 else 2) * operands + 2 * variant.consumers * 64 * tiles.stored
                assert size + BARRIER_BYTES <= MAX_SHARED_BYTES, variant


def test_a_configuration_is_there_while_its_variant_runs_and_gone_after():
    variant = next(cell for cell in CELLS if cell.dim == 192 and cell.value_dim == 128).variants()[-1]
    before = sm90.sm90_tiles, sm90.heads_together
    with configured(variant):
        assert sm90.sm90_tiles(192, 128) == variant.tiles != sm90_tiles(192, 128)
        assert sm90.sm90_config(192, True, 8192, None).persistent == variant.persistent
    assert (sm90.sm90_tiles, sm90.heads_together) == before


def test_flops_of_a_pass():
    """Products of both passes, by the columns of keys and of values."""
    sizes = {"dim": 192, "value_dim": 128, "batch": 1, "heads": 2, "key_heads": 1, "tokens": 10}
    assert Cell(backward=False, causal=False, **sizes).flops == 2 * 2 * 100 * (192 + 128)
    assert Cell(backward=True, causal=True, **sizes).flops == 2 * 100 * (3 * 192 + 2 * 128)
    assert Cell(backward=False, causal=True, window=1, **sizes).flops == 2 * 2 * (1 + 9 * 2) * (192 + 128)


def test_what_is_wrong_is_not_timed_and_named():
    right, wrong = {"error": 0.004, "different": 0}, {"error": 0.004, "different": 1}
    assert is_right(right)
    assert not is_right(wrong)
    assert not is_right({"failed": "no end in 100 s"})
    row = {"cell": "forward", "tflops": {"a": 1.0, "cudnn": 600.0}, "checks": {"a": right, "b": wrong}}
    assert line(row) == f"forward: TFLOP/s cudnn 600, a 1; wrong: b: {wrong}"


def test_the_exact_result_of_a_window():
    """One key for each query, and a sink of as much weight: half of the value."""
    variant = next(cell for cell in CELLS if cell.sinks).variants()[0]
    value = torch.randn(1, 1, 5, 8)
    inputs = (torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 5, 8), value, value)
    actual = attention_variants.exact(inputs, replace(variant, window=0))[0]
    sink = torch.tensor(-2.0).exp()
    torch.testing.assert_close(actual, value / (1 + sink))


def test_a_check_compares_with_float32_and_finds_runs_that_differ(monkeypatch):
    """On a CPU, with torch in the place of the kernels."""
    variant = next(cell for cell in CELLS if cell.variants() and not cell.fp8).variants()[0]
    monkeypatch.setattr(attention_variants, "CHECKED_SIZES", ((1, 4, 2, 9, 11),))
    inputs = [torch.randn(1, 2, 5, 8)] * 4
    monkeypatch.setattr(attention_variants, "random_inputs", lambda *_: inputs)
    results = iter([attention_variants.exact(inputs, variant)[:1]] * 20 + [[torch.zeros(1, 2, 5, 8)]])
    monkeypatch.setattr(attention_variants, "passes", lambda *_: (lambda: next(results), lambda: None))
    found = attention_variants.check(variant)
    assert (found["error"], found["norm"], found["different"]) == (0.0, 0.0, 1)
