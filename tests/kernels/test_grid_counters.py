"""Counters that each launch finds at 0."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from kernel_launches_seen import started

from nearpeak import kernels
from nearpeak.kernels._runtime import grid_counters as module

DEVICE = torch.device("cpu")


@pytest.fixture
def counters():
    return module._DeviceCounters(DEVICE)


def test_a_stream_has_counters_of_its_own_at_every_call(counters):
    one, other = counters.for_stream(1, 8), counters.for_stream(2, 8)
    assert counters.for_stream(1, 8) is one
    assert not one.any()
    assert not one.data_ptr() <= other.data_ptr() < one.data_ptr() + 4 * len(one)
    more = counters.for_stream(1, 5000)
    assert len(more) >= 5000
    assert counters.for_stream(1, 8) is more


def test_counters_of_a_graph_are_never_handed_out_again(counters, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 4096)
    assert counters.for_graph(8) is None  # nothing is cleared while a graph is recorded
    tensors = [counters.for_stream(0, 8)]
    while (one := counters.for_graph(70)) is not None:
        tensors.append(one)
    assert len(tensors) > 10
    tensors += [counters.for_stream(0, 2000), counters.for_stream(1, 10_000)]
    for one in tensors:
        one += 1
    assert all((one == 1).all() for one in tensors)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the CPU stand for those of a GPU")
def test_plans_find_them(monkeypatch):
    runs = started(monkeypatch)
    keys, lengths = torch.randn(1, 1, 600, 16), torch.tensor([600], dtype=torch.int32)
    for _ in range(4):
        query = torch.randn(1, 2, 1, 16)
        with kernels.using("require"):
            result = kernels.decode_attention(query, keys, keys + 1, lengths)
        with kernels.using("off"):
            torch.testing.assert_close(result, kernels.decode_attention(query, keys, keys + 1, lengths))
    assert len(runs) >= 2
    assert not module.grid_counters(1, DEVICE).any()
