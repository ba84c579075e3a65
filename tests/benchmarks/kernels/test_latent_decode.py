"""The measurement of decoding with multi-head latent attention: its cells and configurations."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from benchmarks.kernels import latent_decode
from benchmarks.kernels.latent_decode import CELLS, Cell
from nearpeak import kernels
from nearpeak.kernels.decode.tuning import shared_candidates, shared_config

MAX_SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_kernel_has_configurations_that_fit(cell):
    candidates = shared_candidates(latent_decode.DIM, cell.dtype.itemsize)
    for config in candidates:
        blocks = (config.stages - 1) * config.block * latent_decode.DIM * cell.dtype.itemsize
        queries = config.rows * latent_decode.DIM * 2
        assert config.programs * (blocks + queries) <= MAX_SHARED_BYTES


def test_two_programs_unless_they_are_few_or_have_many_partial_results():
    def programs(batch, tokens, narrow=True):
        return shared_config(latent_decode.DIM, 2, narrow, batch, tokens // 256, 132).programs

    assert programs(64, 8192) == 2
    assert programs(256, 1024) == 2
    assert programs(8, 32768) == 1  # 33 partial results of a sequence
    assert programs(4, 4096) == 1  # 64 programs in all
    assert programs(64, 8192, narrow=False) == 1


def test_bytes_and_names():
    cell = Cell(batch=2, tokens=10, heads=16, page=4, dtype=torch.float8_e4m3fn)
    assert cell.bytes == 2 * 10 * 576
    assert cell.name == "2 x 10 tokens, 16 heads, float8_e4m3fn, pages of 4"


def test_products_of_torch_are_the_same():
    query, cache = torch.randn(2, 3, 1, 576), torch.randn(2, 1, 7, 576)
    expected = kernels.decode_attention(query, cache, 512, torch.full((2,), 7))
    torch.testing.assert_close(latent_decode.by_torch(query, cache), expected[:, :, 0])
