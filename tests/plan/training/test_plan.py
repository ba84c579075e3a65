import json

import pytest

from nearpeak._records import to_json
from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.training.job import Job, precision_named
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.memory import memory
from nearpeak.plan.training.plan import make_it_fit, memory_plan, training_plan
from nearpeak.plan.training.search import search_plan
from nearpeak.plan.training.time import Planner


def job(name="llama-3-8b", gpus=8, **layout):
    given = {"global_batch": gpus, **layout}
    return Job(
        model=get_model(name), layout=Layout(gpus=gpus, **given), sequence=8192, precision=precision_named("bf16")
    )


def test_what_fits_needs_no_changes():
    plan = memory_plan(job(sharding="zero3", recompute=("full",)), Cluster.of("h100-sxm x 8"))
    assert plan.fits and plan.changes == ()
    assert plan.fullest.total < plan.capacity


def test_without_a_machine_nothing_is_said_of_fitting():
    plan = memory_plan(job())
    assert plan.fits is None and plan.capacity is None and plan.changes == ()


def test_every_change_makes_it_fit_and_the_quickest_is_first():
    cluster = Cluster.of("h100-sxm x 64")
    large = job("llama-3-70b", gpus=64, sharding="zero1")
    plan = memory_plan(large, cluster)
    assert plan.fits is False
    assert len(plan.changes) > 1
    for change in plan.changes:
        assert change.total <= plan.capacity
        assert memory(large.with_layout(change.layout)).total == pytest.approx(change.total)
        assert change.what.split("=")[0] in ("sharding", "recompute", "tp", "pp", "cp", "offload", "microbatch")
    times = [change.seconds for change in plan.changes]
    assert times == sorted(times)


def test_a_single_change_is_found_before_pairs():
    cluster = Cluster.of("h100-sxm x 8")
    small = job(sharding="zero1")
    assert memory_plan(small, cluster).fits is False
    found = make_it_fit(small, cluster.machine.memory_bytes, Planner(cluster))
    assert any("," not in change.what for change in found)


def test_more_gpus_are_named_where_nothing_else_helps():
    plan = memory_plan(job("llama-3.1-405b", gpus=1, sharding="none"), Cluster.of("h100-sxm x 1"))
    assert plan.changes and plan.changes[0].what.startswith("gpus=")
    assert plan.changes[0].total <= plan.capacity


def test_cost_and_energy_follow_from_the_time():
    cluster = Cluster.of("h100-sxm x 8")
    plan = training_plan(job(sharding="zero3", global_batch=64), cluster, price=2.0)
    gpu_hours = 8 * plan.time.seconds / 3600 / plan.time.tokens * 1e6
    assert plan.dollars_per_million_tokens == pytest.approx(2.0 * gpu_hours)
    assert plan.joules_per_million_tokens == pytest.approx(cluster.machine.power_watts * gpu_hours * 3600)
    assert plan.low < plan.time.seconds < plan.high
    assert training_plan(job(sharding="zero3"), cluster).dollars_per_million_tokens is None


def test_the_weakest_source_is_that_of_links_between_nodes():
    one = training_plan(job("llama-3-70b", gpus=8, tp=8), Cluster.of("h100-sxm x 8"))
    many = training_plan(job("llama-3-70b", gpus=64, tp=8), Cluster.of("h100-sxm x 64"))
    assert one.provenance.kind == "fitted"
    assert many.provenance.kind == "assumed" and "between nodes" in many.provenance.text


def test_a_gpu_without_runs_says_whose_utilization_it_has():
    plan = training_plan(job(sharding="zero3"), Cluster.of("mi300x x 8"))
    assert any(item.kind == "transferred" for item in plan.provenances)


def test_a_price_below_zero_is_an_error():
    with pytest.raises(UsageError, match="price=-1"):
        training_plan(job(), Cluster.of("h100-sxm x 8"), price=-1)


def test_a_search_gives_the_plan_of_its_winner():
    found = search_plan(get_model("llama-3-8b"), Cluster.of("h100-sxm x 8"), sequence=8192)
    assert found.plan is not None and found.search.best is not None
    assert found.plan.job.layout == found.search.best.layout
    assert found.plan.time.seconds == pytest.approx(found.search.best.seconds)
    assert found.plan.memory.fits


@pytest.mark.slow
def test_a_search_says_what_would_change_its_winner():
    found = search_plan(get_model("llama-3-70b"), Cluster.of("h100-sxm x 64"), sequence=8192)
    by_name = {condition.what: condition for condition in found.conditions}
    assert by_name["memory x 1.5"].tokens_per_second >= found.plan.time.tokens_per_second
    assert by_name["network / 2"].tokens_per_second <= by_name["network x 2"].tokens_per_second
    assert any(condition.changed for condition in found.conditions)
    assert found.with_margin is not None and found.with_margin.memory < found.search.best.memory
    inside = search_plan(get_model("llama-3-8b"), Cluster.of("h100-sxm x 8"), sequence=8192)
    assert not any("network" in condition.what for condition in inside.conditions)


def test_a_search_that_finds_nothing_has_no_plan():
    assert search_plan(get_model("llama-3.1-405b"), Cluster.of("h100-sxm x 8"), sequence=8192).plan is None


def test_plans_are_plain_data():
    plan = training_plan(job(sharding="zero3"), Cluster.of("h100-sxm x 8"))
    assert json.loads(json.dumps(to_json(plan)))["time"]["tokens"] == 8 * 8192


def test_the_public_names_of_the_package():
    from nearpeak import plan

    assert set(plan.__all__) == set(plan._HOME)
    assert all(callable(getattr(plan, name)) for name in plan.__all__)
    with pytest.raises(AttributeError, match=r"'nearpeak\.plan' has no attribute 'pla'"):
        _ = plan.pla
