"""How long rows are shared by programs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from nearpeak.kernels._runtime import row_barrier
from nearpeak.kernels._runtime.row_barrier import MAX_PARTS, SplitConfig, adapt_to_rows, split_row

DEVICE = torch.device("cpu")


def test_the_rows_at_work_are_not_more_than_the_cache_has_room_for():
    assert split_row(1000, 65536, 2 * 65536, DEVICE) == (65536, 1)
    assert split_row(1000, 262144, 2 * 262144, DEVICE) == (65536, 4)
    assert split_row(1000, 262144, 4 * 262144, DEVICE) == (32768, 8)


def test_few_rows_have_more_parts_and_all_have_few_enough():
    assert split_row(8, 262144, 2 * 262144, DEVICE) == (16384, 16)
    assert split_row(1, 2**30, 2**31, DEVICE)[1] == MAX_PARTS
    assert split_row(1, 2**30, 2**31, DEVICE, 16384)[1] == MAX_PARTS
    assert split_row(1, 300_001, 600_002, DEVICE) == (16384, 19)
    assert split_row(1, 7, 14, DEVICE) == (16384, 1)


def test_what_is_given_or_measured_counts():
    assert split_row(1000, 262144, 2 * 262144, DEVICE, 131072) == (131072, 2)
    measured = SplitConfig(part=131072)
    assert adapt_to_rows(measured, 1000) == measured
    assert adapt_to_rows(measured, 8) == SplitConfig()  # it was measured with many rows
    assert adapt_to_rows(None, 8) is None


def test_a_small_part_of_a_gpu_runs_all_parts_of_a_row_at_once(monkeypatch):
    monkeypatch.setattr(row_barrier, "processors", lambda device: 14)
    assert split_row(1, 2**20, 2**21, DEVICE)[1] <= 14
    assert split_row(1, 2**20, 2**21, DEVICE, 16384)[1] <= 14
