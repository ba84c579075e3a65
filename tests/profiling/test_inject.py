import time

import pytest
import torch

from nearpeak.errors import UsageError
from nearpeak.profiling import inject
from nearpeak.profiling.inject import Fault, FaultInjector, read_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("rank=2,delay=5ms", Fault(rank=2, kind="delay", seconds=5e-3)),
        ("rank=0,gc=1s,every=4", Fault(rank=0, kind="gc", seconds=1.0, every=4)),
    ],
)
def test_faults_of_the_command_line(text, fault):
    assert read_fault(text) == fault


@pytest.mark.parametrize("text", ["", "rank=1", "delay=5ms", "rank=1,delay=5", "rank=x,delay=5ms", "rank=1,dealy=5ms"])
def test_anything_else_is_an_error(text):
    with pytest.raises(UsageError, match="--inject"):
        read_fault(text)


def test_a_fault_is_in_its_rank_and_its_steps_alone(monkeypatch):
    slept = []
    monkeypatch.setattr(inject.time, "sleep", slept.append)
    for rank in (0, 1):
        injector = FaultInjector(Fault(rank=1, kind="delay", seconds=0.5, every=2), rank)
        for _ in range(4):
            injector.step_begins()
    assert slept == [0.5, 0.5]


def test_a_late_input_is_in_the_data_loader(monkeypatch):
    slept = []
    monkeypatch.setattr(inject.time, "sleep", slept.append)
    injector = FaultInjector(Fault(rank=0, kind="input", seconds=0.25), 0)
    loader = torch.utils.data.DataLoader(range(3))
    with injector.slow_loaders():
        assert len(list(loader)) == 3
    assert slept == [0.25] * 4  # the end of the data too
    assert len(list(loader)) == 3 and len(slept) == 4


def test_more_work_and_collections(monkeypatch):
    collected = []
    monkeypatch.setattr(inject.gc, "collect", lambda: collected.append(1))
    FaultInjector(Fault(rank=0, kind="gc", seconds=1e-4), 0).step_begins()
    assert collected
    begun = time.process_time()
    FaultInjector(Fault(rank=0, kind="work", seconds=1e-3), 0).step_begins()
    assert time.process_time() > begun


def test_other_work_while_products_are_timed_makes_no_less_of_the_fault(monkeypatch):
    products, times = [], iter([0.0, 0.02])
    clock = {"now": 0.0}

    def product(left, right):
        products.append(1)
        clock["now"] += next(times, 1e-3)  # the second product is interrupted

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(inject.time, "perf_counter", lambda: clock["now"])
    injector = FaultInjector(Fault(rank=0, kind="work", seconds=8e-3), 0)
    injector.step_begins()
    products.clear()
    injector.step_begins()
    assert len(products) == 8
