"""Pages of the planner: self-contained, escaped, and their arithmetic is that of Python."""

import dataclasses
import html
import re

import pytest
from javascript import run

from nearpeak._records import to_json
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.serving.deployment import Deployment, ServingLayout
from nearpeak.plan.serving.plan import Load, serving_plan
from nearpeak.plan.serving.step import step_time
from nearpeak.plan.training.job import Job, precision_named
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.plan import memory_plan, training_plan
from nearpeak.render.document import Document, Paragraph, Table
from nearpeak.render.html.document import document_page
from nearpeak.render.views.plan.sliders import decode_sliders, training_sliders
from nearpeak.render.views.plan.training import memory_document

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def job(name="llama-3-70b", sequence=8192, precision="bf16", software="fused", **layout):
    given = {"gpus": 64, "global_batch": 256, **layout}
    return Job(
        model=get_model(name),
        layout=Layout(**given),
        sequence=sequence,
        precision=precision_named(precision),
        software=software,
    )


def test_nothing_that_is_given_becomes_markup():
    made = document_page(
        Document(
            title=HOSTILE,
            facts=(HOSTILE,),
            parts=(Paragraph(text=HOSTILE), Table(title=HOSTILE, headers=(HOSTILE,), rows=((HOSTILE,),), note=HOSTILE)),
        )
    )
    assert "<img" not in made and made.count("<script") == 2


def test_a_hostile_name_of_a_model_reaches_no_picture():
    plan = memory_plan(job())
    named = dataclasses.replace(plan.job.model, name=HOSTILE)
    plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, model=named))
    made = document_page(memory_document(plan), training_sliders(plan))
    assert "<img" not in made and made.count("<script") == 2


def test_a_page_needs_nothing_from_elsewhere():
    made = document_page(memory_document(memory_plan(job())), training_sliders(memory_plan(job())))
    assert "default-src 'none'" in html.unescape(made)
    links = re.findall(r"(?:src|href)=\"([^\"]+)\"", made)
    assert links == []
    assert not re.search(r"<svg[^>]* style=", made) and made.count("<style>") == 1
    assert len(made) < 150_000


def shown(sliders, **choice):
    picked = {**sliders.data["start"], **choice}
    scripts = ["units.js", "dom.js", "plan_training.js"]
    return run(scripts, "trainingCell(data.model, data.choice)", {"model": to_json(sliders.data), "choice": picked})


PLANNED = {
    "interleaved": job(tp=4, pp=4, virtual=5),
    "groups": job("llama-3-8b", sharding="hsdp", shard_group=8, recompute=("attention",)),
    "both directions": job("llama-3-8b", pp=4, schedule="dualpipe"),
}


@pytest.mark.parametrize("planned", PLANNED.values(), ids=PLANNED)
def test_the_sliders_start_at_the_plan(planned):
    plan = training_plan(planned, Cluster.of("h100-sxm x 64"))
    cell = shown(training_sliders(plan))
    assert cell["needed"] == pytest.approx(plan.memory.fullest.total, rel=1e-4)
    assert cell["seconds"] == pytest.approx(plan.time.seconds, rel=1e-4)
    assert cell["tokens"] == plan.time.tokens


def test_a_slider_shows_what_the_planner_computes_for_it():
    cluster = Cluster.of("h100-sxm x 64")
    sliders = training_sliders(training_plan(job("llama-3-8b", tp=2), cluster))
    cell = shown(sliders, tp=4, microbatch=2, sharding="zero3", recompute="full")
    moved = training_plan(job("llama-3-8b", tp=4, microbatch=2, sharding="zero3", recompute=("layer",)), cluster)
    assert cell["seconds"] == pytest.approx(moved.time.seconds, rel=1e-4)
    assert cell["needed"] == pytest.approx(moved.memory.fullest.total, rel=1e-4)
    assert dict(map(tuple, cell["parts"]))["parameters"] == pytest.approx(moved.memory.fullest.parameters, rel=1e-4)


def test_a_plan_of_memory_has_sliders_of_memory():
    plan = memory_plan(job("gemma-2-9b", sharding="none", gpus=1, global_batch=1))
    sliders = training_sliders(plan)
    assert shown(sliders)["seconds"] is None
    assert shown(sliders)["needed"] == pytest.approx(plan.fullest.total, rel=1e-4)
    assert shown(sliders, gpus=8, sharding="zero3")["needed"] < 0.6 * plan.fullest.total


def test_a_choice_that_cannot_be_says_why():
    sliders = training_sliders(memory_plan(job(tp=8, pp=8)))
    assert shown(sliders, pp=16)["problem"].startswith("tp x cp x pp = 128 is larger than gpus=64.")


def test_the_sliders_of_decoding_show_the_planners_own_steps():
    plan = serving_plan(
        get_model("llama-3-70b"), Cluster.of("h100-sxm x 8"), Load(prompt=1024, output=256, concurrency=32),
        ServingLayout(tp=8), "fp8",
    )  # fmt: skip
    sliders = decode_sliders(plan)

    def step(**choice):
        picked = {**sliders.data["start"], **choice}
        found = {"model": to_json(sliders.data), "choice": picked}
        return run(["units.js", "dom.js", "plan_decode.js"], "decodeStep(data.model, data.choice)", found)

    planned = step()
    assert planned["seconds"] == pytest.approx(plan.replica.decode.seconds)
    assert planned["limit"] == plan.replica.decode.limiter
    moved = step(batch=64, context=256)
    deployment = Deployment.of(plan.model, plan.cluster, plan.layout, "fp8")
    assert moved["seconds"] == pytest.approx(step_time(deployment, sequences=64, context=256).seconds)
    assert moved["cache"] == pytest.approx(64 * 256 * plan.memory.bytes_per_token)
