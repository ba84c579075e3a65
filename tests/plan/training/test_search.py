"""The search over layouts: all legal, the fastest that fits, the front, reasons, and how quick it is."""

from __future__ import annotations

import itertools
import time

import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.memory import memory
from nearpeak.plan.training.search import layouts, search
from nearpeak.plan.training.time import training_time


def test_every_layout_is_legal_and_met_once() -> None:
    qwen, cluster = get_model("qwen3-30b-a3b"), Cluster.of("h100-sxm x 16")
    found = list(layouts(qwen, cluster, 64, 4096))
    assert len(found) == len(set(found)) > 500
    for layout in found:
        layout.check(qwen, 4096)
    assert {layout.ep for layout in found} == {1, 2, 4, 8, 16}
    assert {layout.sharding for layout in found} == {"zero1", "zero3", "hsdp", "none"}


def test_the_winner_fits_and_none_that_fits_is_faster() -> None:
    llama, cluster = get_model("llama-3-8b"), Cluster.of("h100-sxm x 8")
    found = search(llama, cluster, global_batch=32, sequence=8192)
    assert found.best is not None and found.time is not None
    capacity = cluster.machine.memory_bytes
    assert capacity is not None and found.best.memory <= capacity
    for layout in list(layouts(llama, cluster, 32, 8192))[::7]:
        job = Job(model=llama, layout=layout, sequence=8192)
        if memory(job).total <= capacity:
            assert training_time(job, cluster).seconds >= found.best.seconds * (1 - 1e-9)
    assert found.time.seconds == pytest.approx(found.best.seconds)


def test_the_front_gives_up_time_only_for_memory() -> None:
    front = search(get_model("llama-3-8b"), Cluster.of("h100-sxm x 8"), global_batch=32, sequence=8192).front
    assert len(front) > 2
    for first, second in itertools.pairwise(front):
        assert first.seconds <= second.seconds and first.memory > second.memory


def test_a_reason_names_what_another_choice_loses() -> None:
    found = search(get_model("llama-3-70b"), Cluster.of("h100-sxm x 64"), global_batch=128, sequence=8192)
    reasons = {reason.field: reason for reason in found.reasons}
    tensor = reasons["tp"]
    assert tensor.other is not None and tensor.slower is not None and tensor.slower >= 0
    assert tensor.other.layout.tp != tensor.value and "of a step more" in tensor.because
    assert reasons["ep"].other is None and "nothing else" in reasons["ep"].because


def test_nothing_fits_is_an_answer_with_what_would_be_needed() -> None:
    found = search(get_model("llama-3.1-405b"), Cluster.of("h100-sxm x 8"), global_batch=8, sequence=8192)
    assert found.best is None and found.fitting == 0 and found.legal > 0
    assert found.smallest > 80e9


def test_a_batch_that_no_layout_can_spread_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"global_batch=7 .*global_batch=8"):
        search(get_model("qwen2.5-7b"), Cluster.of("h100-sxm x 8"), global_batch=7, sequence=4097)


def test_405_billion_weights_on_16384_gpus_take_seconds() -> None:
    start = time.process_time()
    found = search(get_model("llama-3.1-405b"), Cluster.of("h100-sxm x 16384"), global_batch=2048, sequence=8192)
    took = time.process_time() - start
    assert found.best is not None and found.time is not None
    assert took < 3  # 0.2 s on a quiet machine
    assert found.legal / took > 3000  # 13,000 a second on a quiet machine
    assert 0.35 < found.time.mfu < 0.5  # what runs of this size reach
    assert isinstance(found.best.layout, Layout)
