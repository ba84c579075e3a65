"""The search over serving layouts."""

from __future__ import annotations

import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.serving.search import front, search_serving, serving_layouts

EIGHT = Cluster.of("h200-sxm x 8")


def test_layouts_are_legal_and_complete() -> None:
    dense = list(serving_layouts(get_model("llama-3-70b"), 8))
    assert {(one.tp, one.pp) for one in dense} == {
        (tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if tp * pp <= 8
    }
    experts = list(serving_layouts(get_model("qwen3-235b-a22b"), 8))
    assert all(one.gpus <= 8 for one in experts)
    assert any(one.dp == 8 and one.ep == 8 for one in experts)
    assert len(set(experts)) == len(experts) > len(dense)


def test_the_front_trades_users_for_throughput() -> None:
    found = search_serving(get_model("llama-3-70b"), EIGHT, "fp8", prompt=1024, output=512, concurrencies=(1, 8, 64))
    users = [option.per_user for option in found.front]
    gpus = [option.per_gpu for option in found.front]
    assert users == sorted(users, reverse=True)
    assert gpus == sorted(gpus)
    assert found.front[0].layout.tp == 8
    assert found.front[-1].layout.tp < 8
    assert found.best is not None
    assert found.best.per_gpu == gpus[-1]
    assert front(found.front) == found.front


def test_limits_are_kept_or_what_is_nearest_is_said() -> None:
    llama = get_model("llama-3-70b")
    found = search_serving(llama, EIGHT, "fp8", prompt=1024, output=512, most_tpot=0.015, concurrencies=(1, 8, 64))
    assert found.best is not None
    assert found.best.serving.tpot <= 0.015
    none = search_serving(llama, EIGHT, "fp8", prompt=1024, output=512, most_tpot=1e-4, concurrencies=(1,))
    assert none.best is None
    assert "the smallest TPOT is" in none.reason


def test_what_fits_nowhere() -> None:
    with pytest.raises(UsageError, match=r"No layout of llama-3\.1-405b fits on 1 GPUs.*What would fit"):
        search_serving(get_model("llama-3.1-405b"), Cluster.of("h100-sxm x 1"), prompt=128, output=128)
